// SPDX-License-Identifier: Apache-2.0
// How the kernels of batch normalisation walk a tensor, forward and backward.
#pragma once

#include "device/norm.cuh"
#include "device/view.h"

namespace hscuda {

inline constexpr int kUnroll = 4;  ///< accesses of a tensor that a thread has under way
inline constexpr int kBlocksOfSums =
    4;  ///< blocks a processor, of kernels that sum: few, as each has sums to be joined

/// How a call goes over its tensors.
struct ChannelPlan {
  ChannelLayout layout;
  int width = 1;      ///< elements of an access
  bool fast = false;  ///< all tensors are of one dtype of with_fast() and lie as `layout` says
  RowsPlan rows;      ///< for sums
  PlanesPlan planes;  ///< for sums; also where the layout is kOther, with units of one element
  int64_t chunks() const { return by_rows() ? rows.chunks : planes.chunks; }
  bool by_rows() const { return fast && layout.kind == ChannelLayout::kRows; }
};

/// `tensors`: those that are read or written beside x, each with x's sizes; null ones don't count. What is written last
/// (`results`) may be of another floating dtype of 32 or 16 bits.
template <std::size_t kInputs, std::size_t kResults>
ChannelPlan channel_plan(const Call& call, const Tensor& x, const Tensor* const (&inputs)[kInputs],
                         const Tensor* const (&results)[kResults]) {
  ChannelPlan plan;
  plan.layout = channel_layout(x);
  const int64_t limit = int64_t{1} << 31;
  plan.fast = is_fast(x.dtype) && plan.layout.kind != ChannelLayout::kOther && x.numel < limit;
  int width = is_fast(x.dtype) ? static_cast<int>(16 / item_size(x.dtype)) : 1;
  bool even = starts_even(x, width);
  for (const Tensor* t : inputs) {
    if (t == nullptr) continue;
    plan.fast = plan.fast && t->dtype == x.dtype && lie_alike(*t, x);
    even = even && starts_even(*t, width);
  }
  for (const Tensor* t : results) {
    if (t == nullptr) continue;
    plan.fast = plan.fast && is_fast(t->dtype) && lie_alike(*t, x);
    even = even && starts_even(*t, width);
  }
  if (!plan.fast || !even) width = 1;
  const ChannelLayout& l = plan.layout;
  const int64_t blocks = int64_t{kBlocksOfSums} * call.device().processors();
  if (plan.by_rows()) {
    if (l.channels % width != 0) width = 1;
    plan.rows = rows_plan(l.places, l.channels, width, blocks, kUnroll);
    plan.fast = plan.rows.tiles <= 65535;  // the second dimension of a grid
  }
  if (!plan.by_rows()) {
    const bool planes = plan.fast;
    if (!planes) width = 1;
    const int units = planes && l.run % width == 0 ? width : 1;
    plan.planes = planes_plan(l.places, l.channels, planes ? l.run : 1, units, blocks, 2 * kUnroll);
  }
  plan.width = width;
  return plan;
}

template <class Word>
struct MoveWords {
  Layout<2> layout;
  Word* to;
  const Word* from;
  __device__ void operator()(int64_t i) const {
    int64_t at[2];
    places_of(layout, i, at);
    to[at[0]] = from[at[1]];
  }
};
/// A tensor of x's sizes that lies otherwise, copied so that it lies as x, where that lets everything else go fast: so
/// that results don't depend on how it lies, either.
class Alike {
 public:
  /// Puts the copy in the place of `t` if there has to be one. False without memory.
  bool take(const Call& call, const Tensor& x, const Tensor*& t) {
    if (t == nullptr || x.numel == 0 || t->dtype != x.dtype || !is_fast(x.dtype) || lie_alike(*t, x)) return true;
    if (channel_layout(x).kind == ChannelLayout::kOther) return true;
    original_ = t;
    copy_ = x;
    copy_.data = call.workspace<char>(x.numel * static_cast<int64_t>(item_size(x.dtype)));
    t = &copy_;
    return copy_.data != nullptr;
  }
  /// Makes the copy.
  void move(const Call& call) const {
    if (original_ == nullptr) return;
    const auto layout = layout_of<2>({&copy_, original_});
    with_word(copy_.dtype, [&](auto word) {
      using Word = decltype(word);
      for_each(call, copy_.numel,
               MoveWords<Word>{layout, static_cast<Word*>(copy_.data), static_cast<const Word*>(original_->data)});
    });
  }

 private:
  Tensor copy_ = {};
  const Tensor* original_ = nullptr;
};

/// The places of one channel of tensors that are walked together: the sizes and strides but the channel's.
template <int N>
struct ChannelPlaces {
  Layout<N> places;
  int64_t channel_strides[N] = {};
};
/// tensors[0] has the order; null ones are walked as if they were it.
template <int N>
ChannelPlaces<N> channel_places(const Tensor* const (&tensors)[N]) {
  ChannelPlaces<N> result;
  Tensor single[N];
  const Tensor* pointers[N];
  int64_t sizes[HALFSTEP_MAX_DIMS];
  for (int d = 0; d < tensors[0]->ndim; ++d) sizes[d] = d == 1 ? 1 : tensors[0]->sizes[d];
  for (int k = 0; k < N; ++k) {
    single[k] = tensors[k] ? *tensors[k] : *tensors[0];
    result.channel_strides[k] = single[k].strides[1];
    single[k].numel = tensors[0]->numel / tensors[0]->sizes[1];
    single[k].sizes = sizes;
    pointers[k] = &single[k];
  }
  result.places = layout_of<N>(pointers);
  return result;
}

/// The layout of tensors[0] and others of its sizes (null: as tensors[0]), and behind them the number of the channel.
template <int N>
Layout<N + 1> channel_elements(const Tensor* const (&tensors)[N]) {
  const int64_t channels = tensors[0]->sizes[1];
  int64_t sizes[HALFSTEP_MAX_DIMS], strides[HALFSTEP_MAX_DIMS];
  for (int d = 0; d < tensors[0]->ndim; ++d) {
    sizes[d] = d == 1 ? channels : 1;
    strides[d] = d == 1 ? 1 : 0;
  }
  Tensor number = *tensors[0];
  number.sizes = sizes;
  number.strides = strides;
  number.numel = channels;
  const Tensor* pointers[N + 1];
  for (int k = 0; k < N; ++k) pointers[k] = tensors[k] ? tensors[k] : tensors[0];
  pointers[N] = &number;
  return layout_of<N + 1>(pointers);
}

/// Sums of each channel of a block's tile over the `down` threads that share it, in float64: f(channel, a, b).
template <int kWidth, class F>
__device__ __forceinline__ void join_rows(const RowsPlan& p, const float (&a)[kWidth], const float (&b)[kWidth],
                                          F&& f) {
  float* sums = dynamic_shared<float>();
  const int width = p.across * kWidth, lane = static_cast<int>(threadIdx.x) & (p.across - 1);
  const int line = static_cast<int>(threadIdx.x) >> p.across_bits;
  Pack<float, kWidth> first, second;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) first.values[j] = a[j], second.values[j] = b[j];
  reinterpret_cast<Pack<float, kWidth>*>(sums)[line * p.across + lane] = first;
  reinterpret_cast<Pack<float, kWidth>*>(sums)[(p.down + line) * p.across + lane] = second;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kThreads) {
    const int64_t channel = static_cast<int64_t>(blockIdx.y) * width + i;
    if (channel >= p.packs * kWidth) continue;
    double total_a = 0, total_b = 0;
    for (int k = 0; k < p.down; ++k) {
      total_a += static_cast<double>(sums[k * width + i]);
      total_b += static_cast<double>(sums[(p.down + k) * width + i]);
    }
    f(channel, total_a, total_b);
  }
}
/// The shared memory for join_rows(), and `more` floats behind each channel's.
inline std::size_t join_bytes(const RowsPlan& p) {
  return 2 * sizeof(float) * kThreads * static_cast<std::size_t>(p.width);
}

/// Where the elements of a pack that begins at element `at` of a row-major tensor have their channels.
template <int kWidth>
struct PlaneChannels {
  uint32_t channel[kWidth];
  __device__ __forceinline__ PlaneChannels(uint32_t at, const Divisor& run, const Divisor& channels) {
    const uint32_t plane = run.divide(at);
    uint32_t rest = at - plane * run.divisor, c = plane - channels.divide(plane) * channels.divisor;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (rest == run.divisor) {
        rest = 0;
        c = c + 1 == channels.divisor ? 0 : c + 1;
      }
      channel[j] = c;
      ++rest;
    }
  }
};

/// f(width of an access) where that is known when compiling.
template <class T, class F>
void with_width(int width, F&& f) {
  if (width == 1) {
    f(std::integral_constant<int, 1>());
  } else {
    f(std::integral_constant<int, 16 / sizeof(T)>());
  }
}

}  // namespace hscuda
