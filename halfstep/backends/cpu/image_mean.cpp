// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/image_mean.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "halfstep/backends/cpu/column_sums-inl.h"
#include "halfstep/backends/cpu/image_mean.h"
#include "halfstep/backends/cpu/image_rows.h"
#include "halfstep/backends/cpu/simd-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_IMAGE_MEAN_BLOCK_
#define HALFSTEP_BACKENDS_CPU_IMAGE_MEAN_BLOCK_
namespace halfstep::cpu {
/// Some channels of an image, and one place of the other tensor.
struct ImageBlock {
  static constexpr std::int64_t kChannels = 2048;  ///< at most
  DType image_dtype = DType::f32, place_dtype = DType::f32;
  void *image = nullptr, *place = nullptr;                            ///< one of them is written
  std::int64_t height = 0, width = 0, row_step = 0, column_step = 0;  ///< of the image, steps in elements
  std::int64_t channels = 0;
  float row = 1, column = 1, divisor = 1;
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class T, class O>
void mean_of(const ImageBlock& b) {
  const F32Tag d;
  alignas(64) float totals[ImageBlock::kChannels];
  std::fill_n(totals, b.channels, 0.0f);
  // Row by row, so that memory is read in its order: the places of a row are some streams side by side.
  for (std::int64_t h = 0; h < b.height; ++h) {
    add_columns<true>(static_cast<const T*>(b.image) + h * b.row_step, b.width, b.column_step, b.channels, totals);
  }
  const auto by = hn::Set(d, b.divisor);
  map_run(
      d, static_cast<O*>(b.place), b.channels, [&](F32Vec v) HWY_ATTR { return hn::Div(v, by); }, Run<float>{totals});
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
  map_run(d, places, b.channels, value, Run<T>{static_cast<const T*>(b.place)});
  std::int64_t count = 1;
  if (b.column_step == b.channels) {
    count = std::min(ImageBlock::kChannels / b.channels, b.width);
    for (std::int64_t i = b.channels; i < count * b.channels; ++i) places[i] = places[i - b.channels];
  }
  for (std::int64_t h = 0; h < b.height; ++h) {
    O* to = static_cast<O*>(b.image) + h * b.row_step;
    for (std::int64_t w = 0; w < b.width; w += count, to += count * b.column_step) {
      std::memcpy(to, places, static_cast<std::size_t>(std::min(count, b.width - w) * b.channels) * sizeof(O));
    }
  }
}

}  // namespace

void mean_of_block(const ImageBlock& b) {
  visit_image_dtypes(b.image_dtype, b.place_dtype,
                     [&](auto from, auto to) { mean_of<decltype(from), decltype(to)>(b); });
}
void spread_over_block(const ImageBlock& b) {
  visit_image_dtypes(b.place_dtype, b.image_dtype,
                     [&](auto from, auto to) { spread_of<decltype(from), decltype(to)>(b); });
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

// f(block) for blocks of the channels of `images`, beside `places`: whole images where there are enough for the
// threads, since a place's channels lie together.
template <class F>
void for_image_blocks(const TensorView& images, const TensorView& places, const ImageBlock& like, F&& f) {
  const std::int64_t n = images.sizes[0], channels = images.sizes[1];
  const std::int64_t width = n >= 4 * num_threads() ? ImageBlock::kChannels : 128;
  const std::int64_t blocks = (channels + width - 1) / width;
  const std::int64_t work = std::min(width, channels) * images.sizes[2] * images.sizes[3];
  parallel_for(n * blocks, row_grain(work), [&](std::int64_t begin, std::int64_t end) {
    ImageBlock b = like;
    b.image_dtype = images.dtype, b.place_dtype = places.dtype;
    b.height = images.sizes[2], b.width = images.sizes[3];
    b.row_step = images.strides[2], b.column_step = images.strides[3];
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t image = i / blocks, c = i % blocks * width;
      b.image = element(images.dtype, images.data, image * images.strides[0] + c);
      b.place = element(places.dtype, places.data, image * places.strides[0] + c);
      b.channels = std::min(width, channels - c);
      f(b);
    }
  });
}

}  // namespace

void mean_of_images(const TensorView& x, const TensorView& y, float divisor) {
  for_image_blocks(x, y, {.divisor = divisor}, [](const ImageBlock& b) { HWY_DYNAMIC_DISPATCH(mean_of_block)(b); });
}

void spread_over_images(const TensorView& x, const TensorView& y, float row, float column, float divisor) {
  for_image_blocks(y, x, {.row = row, .column = column, .divisor = divisor}, [](const ImageBlock& b) {
    HWY_DYNAMIC_DISPATCH(spread_over_block)(b);
  });
}

}  // namespace halfstep::cpu
#endif
