// SPDX-License-Identifier: Apache-2.0
// JPEG through libjpeg-turbo. The library reports errors by longjmp: every function that calls it after setjmp has
// nothing but trivial locals, keeps its state in JpegState, and returns false, so that no destructor is jumped over.
#include <algorithm>
#include <csetjmp>
#include <cstddef>
#include <cstdio>  // jpeglib.h needs FILE
#include <vector>

#include <jpeglib.h>

#include <jerror.h>

#include "halfstep/core/fail.h"
#include "halfstep/data/image_internal.h"

namespace halfstep::data {
namespace {

struct JpegState {
  jpeg_decompress_struct cinfo{};
  jpeg_error_mgr errors{};
  jpeg_source_mgr source{};
  jpeg_progress_mgr progress{};
  std::jmp_buf jump{};
  char message[JMSG_LENGTH_MAX] = {};
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
  bool created = false;
  bool at_end = false;      // the reader asked for more than there is
  bool hit_marker = false;  // the entropy decoder ran into a marker, or the end, with pixels missing
};

JpegState& state_of(void* cinfo) { return *static_cast<JpegState*>(static_cast<j_common_ptr>(cinfo)->client_data); }

[[noreturn]] void on_error(j_common_ptr cinfo) {
  JpegState& state = state_of(cinfo);
  cinfo->err->format_message(cinfo, state.message);
  std::longjmp(state.jump, 1);
}

void on_message(j_common_ptr cinfo, int level) {
  if (level < 0) {
    ++cinfo->err->num_warnings;
    if (cinfo->err->msg_code == JWRN_HIT_MARKER) state_of(cinfo).hit_marker = true;
  }
}

void on_output(j_common_ptr) {}

void start_source(j_decompress_ptr) {}

// The end of the bytes is an end-of-image marker to the library; whether pixels were missing is seen afterwards.
::boolean fill_source(j_decompress_ptr cinfo) {
  static const JOCTET end_of_image[2] = {0xFF, JPEG_EOI};
  state_of(cinfo).at_end = true;
  cinfo->src->next_input_byte = end_of_image;
  cinfo->src->bytes_in_buffer = sizeof end_of_image;
  return TRUE;
}

void skip_source(j_decompress_ptr cinfo, long count) {
  if (count <= 0) return;
  if (static_cast<std::size_t>(count) > cinfo->src->bytes_in_buffer) {
    fill_source(cinfo);
    return;
  }
  cinfo->src->next_input_byte += count;
  cinfo->src->bytes_in_buffer -= static_cast<std::size_t>(count);
}

void end_source(j_decompress_ptr) {}

// A progressive file of few bytes can hold so many scans over so many pixels that decoding never ends. Those that
// encoders write have about ten.
void on_progress(j_common_ptr cinfo) {
  constexpr int kMostScans = 100;
  if (reinterpret_cast<j_decompress_ptr>(cinfo)->input_scan_number > kMostScans) {
    cinfo->err->msg_code = JERR_BAD_PROGRESSION;
    on_error(cinfo);
  }
}

bool read_header(JpegState& state) noexcept {
  jpeg_decompress_struct& cinfo = state.cinfo;
  if (setjmp(state.jump) != 0) return false;
  if (!state.created) {
    cinfo.err = jpeg_std_error(&state.errors);
    cinfo.client_data = &state;
    state.errors.error_exit = on_error;
    state.errors.emit_message = on_message;
    state.errors.output_message = on_output;
    jpeg_create_decompress(&cinfo);
    state.created = true;
    state.progress.progress_monitor = on_progress;
    cinfo.progress = &state.progress;
    state.source = {.next_input_byte = nullptr,
                    .bytes_in_buffer = 0,
                    .init_source = start_source,
                    .fill_input_buffer = fill_source,
                    .skip_input_data = skip_source,
                    .resync_to_restart = jpeg_resync_to_restart,
                    .term_source = end_source};
    cinfo.src = &state.source;
  } else {
    jpeg_abort_decompress(&cinfo);
  }
  state.at_end = false;
  state.hit_marker = false;
  state.source.next_input_byte = state.data;
  state.source.bytes_in_buffer = state.size;
  jpeg_read_header(&cinfo, TRUE);
  return true;
}

/// What to decode, in pixels of the output.
struct Part {
  JDIMENSION left = 0, top = 0, width = 0, height = 0;
  std::uint8_t* out = nullptr;  // width * 3 bytes a row
  std::uint8_t* row = nullptr;  // room for a row as the library gives it, for CMYK
};

bool start(JpegState& state, int shrink, bool cmyk) noexcept {
  jpeg_decompress_struct& cinfo = state.cinfo;
  if (setjmp(state.jump) != 0) return false;
  cinfo.out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
  cinfo.scale_num = 1;
  cinfo.scale_denom = static_cast<unsigned>(shrink);
  cinfo.dct_method = JDCT_ISLOW;  // what Pillow and torchvision decode with
  jpeg_start_decompress(&cinfo);
  return true;
}

/// Widens the part to whole blocks, as the library wants it.
bool crop(JpegState& state, Part& part) noexcept {
  if (setjmp(state.jump) != 0) return false;
  jpeg_crop_scanline(&state.cinfo, &part.left, &part.width);
  return true;
}

/// Inverted CMYK to RGB: light that the ink of one colour and the black let through.
void cmyk_to_rgb(const std::uint8_t* in, std::uint8_t* out, JDIMENSION width) {
  for (JDIMENSION x = 0; x < width; ++x, in += 4, out += 3) {
    const unsigned light = in[3];
    for (int c = 0; c < 3; ++c) {
      const unsigned product = (255U - in[c]) * light + 128;  // divided by 255, rounded
      out[c] = static_cast<std::uint8_t>(light - (((product >> 8) + product) >> 8));
    }
  }
}

bool read_rows(JpegState& state, const Part& part, bool cmyk) noexcept {
  jpeg_decompress_struct& cinfo = state.cinfo;
  if (setjmp(state.jump) != 0) return false;
  if (part.top > 0) jpeg_skip_scanlines(&cinfo, part.top);
  while (cinfo.output_scanline < part.top + part.height) {
    constexpr JDIMENSION kRows = 8;
    std::uint8_t* const out = part.out + static_cast<std::size_t>(cinfo.output_scanline - part.top) * part.width * 3;
    if (cmyk) {
      JSAMPROW row = part.row;
      jpeg_read_scanlines(&cinfo, &row, 1);
      cmyk_to_rgb(part.row, out, part.width);
    } else {
      JSAMPROW rows[kRows];
      const JDIMENSION n = std::min(kRows, part.top + part.height - cinfo.output_scanline);
      for (JDIMENSION i = 0; i < n; ++i) rows[i] = out + static_cast<std::size_t>(i) * part.width * 3;
      jpeg_read_scanlines(&cinfo, rows, n);
    }
    if (state.at_end && state.hit_marker)
      break;  // a few bytes may announce a picture that takes long to fill with grey
  }
  return true;
}

class JpegDecoder final : public FormatDecoder {
 public:
  JpegDecoder(std::span<const std::uint8_t> bytes, std::string_view name, const ImageLimits& limits)
      : FormatDecoder(name, limits), state_(std::make_unique<JpegState>()) {
    state_->data = bytes.data();
    state_->size = bytes.size();
    const bool ok = read_header(*state_);
    const jpeg_decompress_struct& cinfo = state_->cinfo;
    info_ = {.format = ImageFormat::jpeg,
             .width = ok ? cinfo.image_width : 0,
             .height = ok ? cinfo.image_height : 0,
             .channels = ok ? cinfo.num_components : 0};
    try {
      if (!ok) refuse();
      check_size();
      if (info_.channels != 1 && info_.channels != 3 && info_.channels != 4) {
        fail<IoError>("decode_image: {}: expected a JPEG of 1, 3 or 4 components, got {}", name_, info_.channels);
      }
    } catch (...) {
      destroy();
      throw;
    }
  }
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;
  ~JpegDecoder() override { destroy(); }

  ImagePatch decode(const PixelRegion& region, int shrink, Image& image) override {
    JpegState& state = *state_;
    const bool cmyk = info_.channels == 4;
    if (used_ && !read_header(state)) refuse();
    used_ = true;
    if (!start(state, shrink, cmyk)) refuse();
    check_end(state.cinfo.buffered_image || jpeg_has_multiple_scans(&state.cinfo));
    const auto full_width = static_cast<std::int64_t>(state.cinfo.output_width);
    const auto full_height = static_cast<std::int64_t>(state.cinfo.output_height);
    // The chroma of a pixel is interpolated from its neighbours: with those, the pixels at the edges of the part are
    // the same as in the whole picture.
    constexpr std::int64_t kMargin = 2;
    const std::int64_t left = std::max<std::int64_t>(region.left / shrink - kMargin, 0);
    const std::int64_t right = std::min((region.left + region.width + shrink - 1) / shrink + kMargin, full_width);
    const std::int64_t top = region.top / shrink;
    const std::int64_t bottom = std::min((region.top + region.height + shrink - 1) / shrink, full_height);
    Part part{.left = static_cast<JDIMENSION>(left),
              .top = static_cast<JDIMENSION>(top),
              .width = static_cast<JDIMENSION>(right - left),
              .height = static_cast<JDIMENSION>(bottom - top)};
    if (!crop(state, part)) refuse();
    image.resize(part.width, part.height);
    part.out = image.pixels.data();
    if (cmyk) row_.resize(static_cast<std::size_t>(part.width) * 4);
    part.row = row_.data();
    if (!read_rows(state, part, cmyk)) refuse();
    check_end(false);
    return {.left = part.left, .top = part.top, .full_width = full_width, .full_height = full_height, .shrink = shrink};
  }

 private:
  void destroy() {
    if (state_->created) jpeg_destroy_decompress(&state_->cinfo);  // can't fail
  }
  [[noreturn]] void refuse() {
    fail<IoError>("decode_image: {}: expected a sound JPEG, got: {}", name_, state_->message);
  }
  /// With several scans every one is needed for every pixel, and all have been read by now.
  void check_end(bool all_read) const {
    if (state_->at_end && (state_->hit_marker || all_read)) {
      fail<IoError>("decode_image: {}: expected more JPEG data, got the end after {} bytes; the file is cut short",
                    name_, state_->size);
    }
  }

  std::unique_ptr<JpegState> state_;  // the library keeps pointers to it
  bool used_ = false;
  std::vector<std::uint8_t> row_;
};

}  // namespace

std::unique_ptr<FormatDecoder> open_jpeg(std::span<const std::uint8_t> bytes, std::string_view name,
                                         const ImageLimits& limits) {
  return std::make_unique<JpegDecoder>(bytes, name, limits);
}

}  // namespace halfstep::data
