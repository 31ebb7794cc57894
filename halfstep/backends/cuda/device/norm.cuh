// SPDX-License-Identifier: Apache-2.0
// What the kernels of normalisation and of images share.
#pragma once

#include <cmath>
#include <limits>

#include "device/block.cuh"
#include "device/elementwise.cuh"
#include "device/norm_plan.h"

namespace hscuda {

/// A tensor of any floating dtype, for kernels that need not be the fastest: one serves all dtypes.
struct AnyFloat {
  void* data = nullptr;
  int dtype = HALFSTEP_F32;
  AnyFloat() = default;
  explicit AnyFloat(const Tensor& t) : data(t.numel > 0 ? t.data : nullptr), dtype(t.dtype) {}

  template <class C>
  __device__ __forceinline__ C load(int64_t i) const {
    C value = 0;
    with_floating(dtype, [&](auto zero) {
      using T = decltype(zero);
      value = static_cast<C>(value_of(static_cast<const T*>(data)[i]));
    });
    return value;
  }
  template <class C>
  __device__ __forceinline__ void store(int64_t i, C value) const {
    with_floating(dtype, [&](auto zero) {
      using T = decltype(zero);
      static_cast<T*>(data)[i] = convert<T>(value);
    });
  }
};

/// Element types that have kernels of their own, vectorised.
template <class F>
void with_fast(int dtype, F&& f) {
  switch (dtype) {
    case HALFSTEP_F16:
      return f(Half{});
    case HALFSTEP_BF16:
      return f(BFloat16{});
    default:
      return f(float{});
  }
}

/// Writes pack i of a tensor of f32, f16 or bf16.
template <int kWidth>
__device__ __forceinline__ void store_pack(void* data, int dtype, int64_t i, const float (&values)[kWidth]) {
  const auto as = [&](auto zero) {
    using T = decltype(zero);
    Pack<T, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result.values[j] = convert<T>(values[j]);
    static_cast<Pack<T, kWidth>*>(data)[i] = result;
  };
  if (dtype == HALFSTEP_F16) {
    as(Half{});
  } else if (dtype == HALFSTEP_BF16) {
    as(BFloat16{});
  } else {
    as(float{});
  }
}
inline bool is_fast(int dtype) { return dtype == HALFSTEP_F32 || dtype == HALFSTEP_F16 || dtype == HALFSTEP_BF16; }
/// Whether packs of `width` elements may begin at the tensor's first element.
inline bool starts_even(const Tensor& t, int width) {
  return t.numel == 0 || reinterpret_cast<uintptr_t>(t.data) % (item_size(t.dtype) * static_cast<unsigned>(width)) == 0;
}

/// a b + c, rounded once.
__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }

/// Two sums.
struct Two {
  double a, b;
};
struct AddTwo {
  __device__ __forceinline__ Two operator()(Two x, Two y) const { return {x.a + y.a, x.b + y.b}; }
};

/// The middle one of three numbers: near the mean of the rest, even if one of the three is far off.
template <class C>
__device__ __forceinline__ C middle(C a, C b, C c) {
  const C low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : (high < c ? high : c);
}

/// What follows batch norm: none, relu, relu6. NaN passes.
template <class C>
struct Activate {
  C low, high;
  explicit Activate(int activation)
      : low(activation == 0 ? -std::numeric_limits<C>::infinity() : C(0)),
        high(activation == 2 ? C(6) : std::numeric_limits<C>::infinity()) {}
  __device__ __forceinline__ C operator()(C v) const { return v <= low ? low : (v >= high ? high : v); }
};
/// Whether the gradient passes, where the result is y.
template <class C>
__device__ __forceinline__ bool passes(int activation, C y) {
  return activation == 2 ? !(y <= 0 || y >= 6) : !(y <= 0);
}

}  // namespace hscuda
