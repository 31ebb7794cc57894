// SPDX-License-Identifier: Apache-2.0
// How kernels on images [N, C, H, W] are walked: with channels side by side in memory, place by place in vectors of
// channels; else row by row of one channel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "halfstep/backends/cpu/reduce_plan.h"
#include "halfstep/core/float16.h"

namespace halfstep::cpu {

/// The strides of an image, in elements.
struct ImageStrides {
  std::int64_t n, c, h, w;
  explicit ImageStrides(const TensorView& v) : n(v.strides[0]), c(v.strides[1]), h(v.strides[2]), w(v.strides[3]) {}
  std::int64_t at(std::int64_t in, std::int64_t ic, std::int64_t ih, std::int64_t iw) const {
    return in * n + ic * c + ih * h + iw * w;
  }
};

/// Whether the channels of all lie side by side, and are enough for vectors.
template <class... Views>
bool channels_side_by_side(const TensorView& first, const Views&... others) {
  return first.sizes[1] >= 4 && first.strides[1] == 1 && ((others.strides[1] == 1) && ...);
}

/// Where the elements of a tensor are.
template <class T>
T* elements(const TensorView& v) {
  return static_cast<T*>(v.data);
}

/// f(From(), To()) for a tensor of float32 or 16 bits and a result of its dtype or float32.
template <class F>
void visit_image_dtypes(DType from, DType to, F&& f) {
  const auto narrow = [&](auto zero) { to == DType::f32 ? f(zero, float()) : f(zero, zero); };
  if (from == DType::f16) return narrow(Half());
  if (from == DType::bf16) return narrow(BFloat16());
  f(float(), float());
}

/// f(sample, row, first channel, channels) for all rows of the images of y, in parallel; `work`: what one element of a
/// row costs. Few rows are divided by channels, in blocks of whole cache lines; the last one is not cut down to fewer
/// than the 4 channels of the least vector.
template <class F>
void for_image_rows(const TensorView& y, std::int64_t work, F&& f) {
  const std::int64_t rows = y.sizes[0] * y.sizes[2], channels = y.sizes[1];
  constexpr std::int64_t kBlock = 128;
  const std::int64_t blocks = rows >= 32 ? 1 : std::max<std::int64_t>(1, (channels + kBlock - 4) / kBlock);
  const std::int64_t width = blocks == 1 ? channels : kBlock;
  parallel_for(rows * blocks, row_grain(width * y.sizes[3] * work), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = i / blocks, c = i % blocks * width;
      f(row / y.sizes[2], row % y.sizes[2], c, i % blocks + 1 < blocks ? width : channels - c);
    }
  });
}
/// f(sample, channel, row) for all rows of all channels of y, in parallel.
template <class F>
void for_plane_rows(const TensorView& y, std::int64_t work, F&& f) {
  const std::int64_t channels = y.sizes[1], rows = y.sizes[2];
  parallel_for(y.sizes[0] * channels * rows, row_grain(y.sizes[3] * work), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) f(i / rows / channels, i / rows % channels, i % rows);
  });
}

}  // namespace halfstep::cpu
