// SPDX-License-Identifier: Apache-2.0
// Work on images [N, C, H, W] of any strides: a thread a place of the result, with 16 bytes of channels where they lie
// side by side.
#pragma once

#include "device/norm.cuh"
#include "device/window_plan.h"

namespace hscuda {

/// An image tensor in a kernel.
struct Image {
  void* data = nullptr;
  int dtype = 0;
  int64_t n = 0, c = 0, h = 0, w = 0;  ///< strides
  Image() = default;
  explicit Image(const Tensor& t)
      : data(t.data), dtype(t.dtype), n(t.strides[0]), c(t.strides[1]), h(t.strides[2]), w(t.strides[3]) {}
  __device__ __forceinline__ int64_t at(int64_t in, int64_t ic, int64_t ih, int64_t iw) const {
    return in * n + ic * c + ih * h + iw * w;
  }
};

/// Channels that lie side by side, of f32, f16 or bf16.
template <class T>
struct SideBySide {
  using C = float;
  static constexpr int kWidth = 16 / sizeof(T);
  using Raw = Pack<T, kWidth>;
  __device__ static __forceinline__ Raw fetch(const Image& x, int64_t at) {
    return *reinterpret_cast<const Raw*>(static_cast<const T*>(x.data) + at);
  }
  __device__ static __forceinline__ float value(const Raw& raw, int j) { return value_of(raw.values[j]); }
  __device__ static __forceinline__ void store(const Image& y, int64_t at, const float (&values)[kWidth]) {
    store_pack(y.data, y.dtype, at / kWidth, values);
  }
};
/// One element of any dtype, computed in float or double.
template <class Computed>
struct OneByOne {
  using C = Computed;
  static constexpr int kWidth = 1;
  struct Raw {
    C value;
  };
  __device__ static __forceinline__ Raw fetch(const Image& x, int64_t at) {
    AnyFloat from;
    from.data = x.data;
    from.dtype = x.dtype;
    return {from.load<C>(at)};
  }
  __device__ static __forceinline__ C value(const Raw& raw, int) { return raw.value; }
  __device__ static __forceinline__ void store(const Image& y, int64_t at, const C (&values)[1]) {
    AnyFloat to;
    to.data = y.data;
    to.dtype = y.dtype;
    to.store<C>(at, values[0]);
  }
};

/// Numbers of places in windows: u8 or i32.
template <int kWidth>
__device__ __forceinline__ void load_numbers(const Image& index, int64_t at, int (&to)[kWidth]) {
  const auto as = [&](auto zero) {
    using I = decltype(zero);
    const auto raw = *reinterpret_cast<const Pack<I, kWidth>*>(static_cast<const I*>(index.data) + at);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) to[j] = raw.values[j];
  };
  if (index.dtype == HALFSTEP_U8) {
    as(uint8_t{});
  } else {
    as(int32_t{});
  }
}
template <int kWidth>
__device__ __forceinline__ void store_numbers(const Image& index, int64_t at, const int (&from)[kWidth]) {
  const auto as = [&](auto zero) {
    using I = decltype(zero);
    Pack<I, kWidth> raw;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) raw.values[j] = static_cast<I>(from[j]);
    *reinterpret_cast<Pack<I, kWidth>*>(static_cast<I*>(index.data) + at) = raw;
  };
  if (index.dtype == HALFSTEP_U8) {
    as(uint8_t{});
  } else {
    as(int32_t{});
  }
}

template <class Op>
__global__ void __launch_bounds__(kThreads) image_kernel(uint32_t units, ImageOrder order, int first, Op op) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= units) return;
  const ImageOrder::Place p = order.place(i);
  op(static_cast<int64_t>(p.n) + first, static_cast<int64_t>(p.c) * Op::kWidth, p.h, p.w);
}

/// Whether `width` channels of a tensor may be moved as one.
inline bool side_by_side(const Tensor& t, int width) {
  if (t.sizes[1] % width != 0 || (t.sizes[1] > 1 && t.strides[1] != 1) || !starts_even(t, width)) return false;
  for (const int d : {0, 2, 3}) {
    if (t.sizes[d] != 1 && t.strides[d] % width != 0) return false;
  }
  return true;
}
/// Whether sizes are within what kernels here count in.
inline bool within_reach(const Tensor& t) {
  return t.sizes[0] < kMostPlaces && t.sizes[1] < kMostPlaces && t.sizes[2] < kMostPlaces && t.sizes[3] < kMostPlaces &&
         (t.sizes[0] == 0 || t.numel / t.sizes[0] < kMostPlaces);
}

inline bool within_reach(const halfstep_pool_attributes& a) {
  return a.kernel[0] < kMostPlaces / 2 && a.kernel[1] < kMostPlaces / 2;
}
inline bool within_reach(const halfstep_adaptive_pool_attributes&) { return true; }

/// op(n, c, h, w) for all places of `y`, with every Op::kWidth-th channel.
template <class Op>
void for_each_place(const Call& call, const Tensor& y, const Op& op) {
  const ImageOrder order = image_order(y, Op::kWidth);
  // As many samples at once as units can be counted of.
  const int64_t samples = std::max<int64_t>(1, ((int64_t{1} << 31) - kThreads) / order.per_image);
  for (int64_t n = 0; n < order.images; n += samples) {
    const auto units = static_cast<uint32_t>(std::min(samples, order.images - n) * order.per_image);
    launch(call, {.grid = grid_size(units, kThreads, int64_t{1} << 31), .alone = true}, image_kernel<Op>, units, order,
           static_cast<int>(n), op);
  }
}

/// Runs Op<access> for tensors in[0], of whose dtype the other inputs are, and y: with packs of channels where all of
/// `others` and both let it. f(access) makes the op.
template <class F>
void with_access(const Tensor& x, const Tensor& y, std::initializer_list<const Tensor*> others, F&& f) {
  if (is_fast(x.dtype) && is_fast(y.dtype)) {
    const int width = static_cast<int>(16 / item_size(x.dtype));
    bool even = side_by_side(x, width) && side_by_side(y, width);
    for (const Tensor* t : others) even = even && side_by_side(*t, width);
    if (even) return with_fast(x.dtype, [&](auto zero) { f(SideBySide<decltype(zero)>()); });
  }
  if (x.dtype == HALFSTEP_F64 || y.dtype == HALFSTEP_F64) {
    f(OneByOne<double>());
  } else {
    f(OneByOne<float>());
  }
}

/// Both dimensions' windows; `image` is of the larger tensor, `count` of the other.
inline void windows_of(const halfstep_pool_attributes& a, const int64_t* image, const int64_t* count, Windows& rows,
                       Windows& columns, bool dilated) {
  const auto make = [&](int d) {
    return fixed_windows(image[2 + d], count[2 + d], a.kernel[d], a.stride[d], a.padding[d],
                         dilated ? a.dilation[d] : 1);
  };
  rows = make(0);
  columns = make(1);
}
inline void windows_of(const halfstep_adaptive_pool_attributes&, const int64_t* image, const int64_t* count,
                       Windows& rows, Windows& columns, bool) {
  rows = adaptive_windows(image[2], count[2]);
  columns = adaptive_windows(image[3], count[3]);
}

}  // namespace hscuda
