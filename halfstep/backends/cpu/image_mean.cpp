// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/image_mean.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "halfstep/backends/cpu/image_mean.h"
#include "halfstep/backends/cpu/image_rows.h"
#include "halfstep/backends/cpu/simd-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_IMAGE_MEAN_BLOCK_
#define HALFSTEP_BACKENDS_CPU_IMAGE_MEAN_BLOCK_
namespace halfstep::cpu {
/// Some channels of an image, and one place of the other tensor.
struct ImageBlock {
  static constexpr std::int64_t kChannels = 2048;  ///< at most
  DType image_dtype, place_dtype;
  const void* from;
  void* to;
  std::int64_t height, width, row_step, column_step;  ///< of the image, steps in elements
  std::int64_t channels;
  float row, column, divisor;
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

// Adds the sum of a row of places to K vectors of totals; kFew: to n lanes.
template <int K, bool kFew, class T>
HWY_INLINE void add_row(const T* x, std::int64_t places, std::int64_t step, float* totals,
                        [[maybe_unused]] std::size_t n) {
  const F32Tag d;
  constexpr std::size_t kLanes = hn::MaxLanes(F32Tag());
  F32Vec sum[K];
  for (int k = 0; k < K; ++k) sum[k] = hn::Zero(d);
  for (; places > 0; --places, x += step) {
    if constexpr (kFew) {
      sum[0] = hn::Add(sum[0], load_n(d, x, n));
    } else {
      for (int k = 0; k < K; ++k) sum[k] = hn::Add(sum[k], load(d, x + static_cast<std::size_t>(k) * kLanes));
    }
  }
  for (int k = 0; k < K; ++k) {
    float* to = totals + static_cast<std::size_t>(k) * kLanes;
    hn::StoreU(hn::Add(hn::LoadU(d, to), sum[k]), d, to);
  }
}

template <class T, class O>
void mean_of(const ImageBlock& b) {
  const F32Tag d;
  constexpr std::size_t kLanes = hn::MaxLanes(F32Tag());
  const auto n = static_cast<std::size_t>(b.channels);
  alignas(64) float totals[ImageBlock::kChannels + kLanes];
  for (std::size_t c = 0; c < n; c += kLanes) hn::StoreU(hn::Zero(d), d, totals + c);
  // Row by row, so that memory is read in its order: the places of a row are some streams side by side.
  for (std::int64_t h = 0; h < b.height; ++h) {
    const T* x = static_cast<const T*>(b.from) + h * b.row_step;
    std::size_t c = 0;
    for (; c + 4 * kLanes <= n; c += 4 * kLanes) add_row<4, false>(x + c, b.width, b.column_step, totals + c, 0);
    for (; c + kLanes <= n; c += kLanes) add_row<1, false>(x + c, b.width, b.column_step, totals + c, 0);
    if (c < n) add_row<1, true>(x + c, b.width, b.column_step, totals + c, n - c);
  }
  const auto by = hn::Set(d, b.divisor);
  map_run(
      d, static_cast<O*>(b.to), b.channels, [&](F32Vec v) HWY_ATTR { return hn::Div(v, by); }, Run<float>{totals});
}

template <class T, class O>
void spread_of(const ImageBlock& b) {
  const F32Tag d;
  const auto row = hn::Set(d, b.row), column = hn::Set(d, b.column), by = hn::Set(d, b.divisor), zero = hn::Zero(d);
  // Some places of the result, which are copied as one where places lie next to each other.
  alignas(64) O places[ImageBlock::kChannels];
  const auto value = [&](F32Vec v) HWY_ATTR {
    // As sums that begin with 0: -0 is 0.
    const auto sum = hn::Add(hn::Mul(column, v), zero);
    return hn::Div(hn::Add(hn::Mul(row, sum), zero), by);
  };
  map_run(d, places, b.channels, value, Run<T>{static_cast<const T*>(b.from)});
  std::int64_t count = 1;
  if (b.column_step == b.channels) {
    count = std::min(ImageBlock::kChannels / b.channels, b.width);
    for (std::int64_t i = b.channels; i < count * b.channels; ++i) places[i] = places[i - b.channels];
  }
  for (std::int64_t h = 0; h < b.height; ++h) {
    O* to = static_cast<O*>(b.to) + h * b.row_step;
    for (std::int64_t w = 0; w < b.width; w += count, to += count * b.column_step) {
      std::memcpy(to, places, static_cast<std::size_t>(std::min(count, b.width - w) * b.channels) * sizeof(O));
    }
  }
}

}  // namespace

void mean_of_block(const ImageBlock& b) {
  const bool wide = b.place_dtype == DType::f32;
  if (b.image_dtype == DType::f16) return wide ? mean_of<Half, float>(b) : mean_of<Half, Half>(b);
  if (b.image_dtype == DType::bf16) return wide ? mean_of<BFloat16, float>(b) : mean_of<BFloat16, BFloat16>(b);
  mean_of<float, float>(b);
}
void spread_over_block(const ImageBlock& b) {
  const bool wide = b.image_dtype == DType::f32;
  if (b.place_dtype == DType::f16) return wide ? spread_of<Half, float>(b) : spread_of<Half, Half>(b);
  if (b.place_dtype == DType::bf16) return wide ? spread_of<BFloat16, float>(b) : spread_of<BFloat16, BFloat16>(b);
  spread_of<float, float>(b);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "halfstep/backends/cpu/convert_block.h"

namespace halfstep::cpu {
HWY_EXPORT(mean_of_block);
HWY_EXPORT(spread_over_block);

namespace {

// f(sample, first channel, channels) for blocks of the images' channels: whole images where there are enough for the
// threads, since a place's channels lie together.
template <class F>
void for_image_blocks(const TensorView& images, F&& f) {
  const std::int64_t n = images.sizes[0], channels = images.sizes[1], places = images.sizes[2] * images.sizes[3];
  const std::int64_t width = n >= 4 * num_threads() ? ImageBlock::kChannels : 128;
  const std::int64_t blocks = (channels + width - 1) / width;
  parallel_for(n * blocks, row_grain(std::min(width, channels) * places), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t c = i % blocks * width;
      f(i / blocks, c, std::min(width, channels - c));
    }
  });
}

}  // namespace

void mean_of_images(const TensorView& x, const TensorView& y, float divisor) {
  for_image_blocks(x, [&](std::int64_t n, std::int64_t c, std::int64_t channels) {
    HWY_DYNAMIC_DISPATCH(mean_of_block)
    ({.image_dtype = x.dtype,
      .place_dtype = y.dtype,
      .from = element(x.dtype, static_cast<const void*>(x.data), n * x.strides[0] + c),
      .to = element(y.dtype, y.data, n * y.strides[0] + c),
      .height = x.sizes[2],
      .width = x.sizes[3],
      .row_step = x.strides[2],
      .column_step = x.strides[3],
      .channels = channels,
      .row = 1,
      .column = 1,
      .divisor = divisor});
  });
}

void spread_over_images(const TensorView& x, const TensorView& y, float row, float column, float divisor) {
  for_image_blocks(y, [&](std::int64_t n, std::int64_t c, std::int64_t channels) {
    HWY_DYNAMIC_DISPATCH(spread_over_block)
    ({.image_dtype = y.dtype,
      .place_dtype = x.dtype,
      .from = element(x.dtype, static_cast<const void*>(x.data), n * x.strides[0] + c),
      .to = element(y.dtype, y.data, n * y.strides[0] + c),
      .height = y.sizes[2],
      .width = y.sizes[3],
      .row_step = y.strides[2],
      .column_step = y.strides[3],
      .channels = channels,
      .row = row,
      .column = column,
      .divisor = divisor});
  });
}

}  // namespace halfstep::cpu
#endif
