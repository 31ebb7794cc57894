// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_images.h"

#include <algorithm>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kConvImagesGrain = 1 << 15;  // elements worth a thread
constexpr std::int64_t kTile = 64;                  // places of a row that are turned at a time

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
  for_each_row(t, first, count, [&](std::int64_t i, std::int64_t at) {
    float* row = to + i * width * channels;
    if (t.strides[3] != 1) {
      for (std::int64_t w = 0; w < width; ++w) {
        read_row(t, at + w * t.strides[3], t.strides[1], channels, row + w * channels);
      }
      return;
    }
    alignas(64) float tile[kTile];
    for (std::int64_t w = 0; w < width; w += kTile) {
      const std::int64_t n = std::min(kTile, width - w);
      for (std::int64_t c = 0; c < channels; ++c) {
        read_row(t, at + c * t.strides[1] + w, 1, n, tile);
        for (std::int64_t j = 0; j < n; ++j) row[(w + j) * channels + c] = tile[j];
      }
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
  for_each_row(t, first, count, [&](std::int64_t i, std::int64_t at) {
    const float* row = from + i * width * channels;
    if (t.strides[3] != 1) {
      for (std::int64_t w = 0; w < width; ++w) {
        write_row(t, at + w * t.strides[3], t.strides[1], channels, row + w * channels);
      }
      return;
    }
    alignas(64) float tile[kTile];
    for (std::int64_t w = 0; w < width; w += kTile) {
      const std::int64_t n = std::min(kTile, width - w);
      for (std::int64_t c = 0; c < channels; ++c) {
        for (std::int64_t j = 0; j < n; ++j) tile[j] = row[(w + j) * channels + c];
        write_row(t, at + c * t.strides[1] + w, 1, n, tile);
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
