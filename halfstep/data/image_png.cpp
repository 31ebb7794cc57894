// SPDX-License-Identifier: Apache-2.0
// PNG through libpng. As with JPEG, functions that call the library after setjmp have nothing but trivial locals.
#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/data/image_internal.h"

namespace halfstep::data {
namespace {

struct PngState {
  png_structp png = nullptr;
  png_infop info = nullptr;
  std::jmp_buf jump{};
  char message[128] = {};
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
  std::size_t position = 0;
  png_uint_32 width = 0, height = 0;
  int color_type = 0;
  int passes = 1;
};

[[noreturn]] void on_error(png_structp png, png_const_charp text) {
  auto& state = *static_cast<PngState*>(png_get_error_ptr(png));
  std::strncpy(state.message, text, sizeof state.message - 1);
  std::longjmp(state.jump, 1);
}

void on_warning(png_structp, png_const_charp) {}

void read_bytes(png_structp png, png_bytep to, std::size_t n) {
  auto& state = *static_cast<PngState*>(png_get_io_ptr(png));
  if (n > state.size - state.position) png_error(png, "the end of the file; it is cut short");
  std::memcpy(to, state.data + state.position, n);
  state.position += n;
}

void destroy(PngState& state) { png_destroy_read_struct(&state.png, &state.info, nullptr); }

bool read_header(PngState& state, std::uint64_t max_pixels) noexcept {
  if (setjmp(state.jump) != 0) return false;
  if (state.png != nullptr) destroy(state);
  state.position = 0;
  state.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &state, on_error, on_warning);
  if (state.png == nullptr) return false;
  state.info = png_create_info_struct(state.png);
  if (state.info == nullptr) return false;
  png_set_read_fn(state.png, &state, read_bytes);
  const auto most = static_cast<png_uint_32>(std::min<std::uint64_t>(max_pixels, PNG_UINT_31_MAX));
  png_set_user_limits(state.png, most, most);
  constexpr png_alloc_size_t kLargestChunk = png_alloc_size_t{8} << 20;
  png_set_chunk_malloc_max(state.png, kLargestChunk);
  // Profiles, texts and the like are not even unpacked.
  png_set_keep_unknown_chunks(state.png, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_read_info(state.png, state.info);
  state.width = png_get_image_width(state.png, state.info);
  state.height = png_get_image_height(state.png, state.info);
  state.color_type = png_get_color_type(state.png, state.info);
  return true;
}

/// Everything becomes 8 bits of red, green and blue.
bool start(PngState& state) noexcept {
  if (setjmp(state.jump) != 0) return false;
  png_set_strip_16(state.png);
  png_set_expand(state.png);
  png_set_strip_alpha(state.png);
  png_set_gray_to_rgb(state.png);
  state.passes = png_set_interlace_handling(state.png);
  png_read_update_info(state.png, state.info);
  if (png_get_rowbytes(state.png, state.info) != png_size_t{3} * state.width)
    png_error(state.png, "rows of another size");
  return true;
}

/// Rows top to top + height into `out`; those above go through `row`. Interlaced pictures come whole.
bool read_rows(PngState& state, png_uint_32 top, png_uint_32 height, std::uint8_t* out, std::uint8_t* row) noexcept {
  if (setjmp(state.jump) != 0) return false;
  const std::size_t bytes = std::size_t{3} * state.width;
  for (int pass = 0; pass < state.passes; ++pass) {
    for (png_uint_32 y = 0; y < top + height; ++y) {
      png_read_row(state.png, y < top ? row : out + (y - top) * bytes, nullptr);
    }
  }
  return true;
}

class PngDecoder final : public FormatDecoder {
 public:
  PngDecoder(std::span<const std::uint8_t> bytes, std::string_view name, const ImageLimits& limits)
      : FormatDecoder(name, limits) {
    state_.data = bytes.data();
    state_.size = bytes.size();
    try {
      open();
      const int type = state_.color_type;
      info_ = {.format = ImageFormat::png,
               .width = state_.width,
               .height = state_.height,
               .channels = type == PNG_COLOR_TYPE_GRAY         ? 1
                           : type == PNG_COLOR_TYPE_GRAY_ALPHA ? 2
                           : type == PNG_COLOR_TYPE_RGB_ALPHA  ? 4
                                                               : 3};
      check_size();
    } catch (...) {
      destroy(state_);
      throw;
    }
  }
  PngDecoder(const PngDecoder&) = delete;
  PngDecoder& operator=(const PngDecoder&) = delete;
  ~PngDecoder() override { destroy(state_); }

  ImagePatch decode(const PixelRegion& region, int, Image& image) override {
    if (used_) open();
    used_ = true;
    if (!start(state_)) refuse();
    const bool whole = state_.passes > 1;
    const std::int64_t top = whole ? 0 : region.top;
    const std::int64_t height = whole ? info_.height : region.height;
    image.resize(info_.width, height);
    row_.resize(static_cast<std::size_t>(3 * info_.width));
    if (!read_rows(state_, static_cast<png_uint_32>(top), static_cast<png_uint_32>(height), image.pixels.data(),
                   row_.data())) {
      refuse();
    }
    return {.left = 0, .top = top, .full_width = info_.width, .full_height = info_.height, .shrink = 1};
  }

 private:
  void open() {
    if (!read_header(state_, static_cast<std::uint64_t>(limits_.max_pixels))) refuse();
  }
  [[noreturn]] void refuse() {
    fail<IoError>("decode_image: {}: expected a sound PNG, got: {}", name_, state_.message);
  }

  PngState state_;  // the library keeps a pointer to it
  bool used_ = false;
  std::vector<std::uint8_t> row_;
};

}  // namespace

std::unique_ptr<FormatDecoder> open_png(std::span<const std::uint8_t> bytes, std::string_view name,
                                        const ImageLimits& limits) {
  return std::make_unique<PngDecoder>(bytes, name, limits);
}

}  // namespace halfstep::data
