// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_images.h"

#include <algorithm>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/transpose_tile.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kConvImagesGrain = 1 << 15;  // elements worth a thread
constexpr std::int64_t kSide = tile_side(sizeof(float));

bool lies(const TensorView& t, const int (&order)[4]) noexcept {
  std::int64_t stride = 1;
  for (const int d : order) {
    if (t.sizes[d] != 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

// Rows of places along W, each of all channels: row(n, h, at(n, h)), with the distance of channels and of places.
template <class F>
void for_each_row(const TensorView& t, std::int64_t first, std::int64_t count, const F& row) {
  const std::int64_t height = t.sizes[2], each = t.sizes[1] * t.sizes[3];
  parallel_for(count * height, std::max<std::int64_t>(1, kConvImagesGrain / 2 / std::max<std::int64_t>(each, 1)),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   row(i, (first + i / height) * t.strides[0] + i % height * t.strides[2]);
                 }
               });
}

/// A square of places, which lie side by side, and channels.
struct Tile {
  std::int64_t at, places, channels;  ///< of the images: the first element, and how many there are
  std::int64_t to;                    ///< the first element of what lies channels-last
  float *from_rows, *to_rows;         ///< room for a row of places each, and for a row of channels each
};

// Calls tile(Tile). Lines of images without gaps between them are one line.
template <class F>
void for_each_tile(const TensorView& t, std::int64_t first, std::int64_t count, const F& tile) {
  const bool joined = t.strides[2] == t.sizes[3];
  const std::int64_t lines = joined ? 1 : t.sizes[2], width = joined ? t.sizes[2] * t.sizes[3] : t.sizes[3];
  const std::int64_t channels = t.sizes[1], tiles = (width + kSide - 1) / kSide;
  parallel_for(count * lines * tiles, std::max<std::int64_t>(1, kConvImagesGrain / 2 / (kSide * channels)),
               [&](std::int64_t begin, std::int64_t end) {
                 alignas(64) float from_rows[kSide * kSide] = {}, to_rows[kSide * kSide] = {};
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t line = i / tiles, column = i % tiles * kSide;
                   const std::int64_t at = (first + line / lines) * t.strides[0] + line % lines * t.strides[2] + column;
                   for (std::int64_t c = 0; c < channels; c += kSide) {
                     tile(Tile{at + c * t.strides[1], std::min(kSide, width - column), std::min(kSide, channels - c),
                               (line * width + column) * channels + c, from_rows, to_rows});
                   }
                 }
               });
}

std::int64_t image_size(const TensorView& t) { return t.sizes[1] * t.sizes[2] * t.sizes[3]; }

}  // namespace

bool channels_last(const TensorView& t) noexcept { return lies(t, {1, 3, 2, 0}); }
bool row_major(const TensorView& t) noexcept { return lies(t, {3, 2, 1, 0}); }

void load_images(const TensorView& t, std::int64_t first, std::int64_t count, float* to) {
  if (channels_last(t)) {
    const std::int64_t from = first * image_size(t);
    parallel_for(count * image_size(t), kConvImagesGrain, [&](std::int64_t begin, std::int64_t end) {
      load_floats(t.dtype, t.data, from + begin, end - begin, to + begin);
    });
    return;
  }
  const std::int64_t channels = t.sizes[1], width = t.sizes[3];
  if (t.strides[3] != 1) {
    return for_each_row(t, first, count, [&](std::int64_t i, std::int64_t at) {
      float* row = to + i * width * channels;
      for (std::int64_t w = 0; w < width; ++w) {
        read_row(t, at + w * t.strides[3], t.strides[1], channels, row + w * channels);
      }
    });
  }
  const auto* const floats = t.dtype == DType::f32 ? static_cast<const float*>(t.data) : nullptr;
  for_each_tile(t, first, count, [&](const Tile& tile) {
    for (std::int64_t c = 0; c < tile.channels; ++c) {
      const std::int64_t at = tile.at + c * t.strides[1];
      if (floats != nullptr) {
        copy_tile_row(floats + at, tile.places, tile.from_rows + c * kSide);
      } else {
        load_floats(t.dtype, t.data, at, tile.places, tile.from_rows + c * kSide);
      }
    }
    transpose_tile(tile.from_rows, tile.to_rows);
    for (std::int64_t i = 0; i < tile.places; ++i) {
      copy_tile_row(tile.to_rows + i * kSide, tile.channels, to + tile.to + i * channels);
    }
  });
}

void store_images(const float* from, std::int64_t first, std::int64_t count, TensorView& t) {
  if (channels_last(t)) {
    const std::int64_t to = first * image_size(t);
    parallel_for(count * image_size(t), kConvImagesGrain, [&](std::int64_t begin, std::int64_t end) {
      store_floats(t.dtype, t.data, to + begin, end - begin, from + begin);
    });
    return;
  }
  const std::int64_t channels = t.sizes[1], width = t.sizes[3];
  if (t.strides[3] != 1) {
    return for_each_row(t, first, count, [&](std::int64_t i, std::int64_t at) {
      const float* row = from + i * width * channels;
      for (std::int64_t w = 0; w < width; ++w) {
        write_row(t, at + w * t.strides[3], t.strides[1], channels, row + w * channels);
      }
    });
  }
  auto* const floats = t.dtype == DType::f32 ? static_cast<float*>(t.data) : nullptr;
  for_each_tile(t, first, count, [&](const Tile& tile) {
    for (std::int64_t i = 0; i < tile.places; ++i) {
      copy_tile_row(from + tile.to + i * channels, tile.channels, tile.to_rows + i * kSide);
    }
    transpose_tile(tile.to_rows, tile.from_rows);
    for (std::int64_t c = 0; c < tile.channels; ++c) {
      const std::int64_t at = tile.at + c * t.strides[1];
      if (floats != nullptr) {
        copy_tile_row(tile.from_rows + c * kSide, tile.places, floats + at);
      } else {
        store_floats(t.dtype, t.data, at, tile.places, tile.from_rows + c * kSide);
      }
    }
  });
}

void load_all(const TensorView& t, float* to) {
  parallel_for(t.numel, kConvImagesGrain, [&](std::int64_t begin, std::int64_t end) {
    load_floats(t.dtype, t.data, begin, end - begin, to + begin);
  });
}
void store_all(const float* from, TensorView& t) {
  parallel_for(t.numel, kConvImagesGrain, [&](std::int64_t begin, std::int64_t end) {
    store_floats(t.dtype, t.data, begin, end - begin, from + begin);
  });
}

}  // namespace halfstep::cpu
