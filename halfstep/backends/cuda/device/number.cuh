// SPDX-License-Identifier: Apache-2.0
// Element types in kernels: as plugin_numbers.h has them, by the GPU's own instructions where it runs.
#pragma once

#include <cuda_runtime.h>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <bit>
#include <cmath>
#include <limits>

#include "halfstep/runtime/plugin_numbers.h"

namespace hscuda {

using halfstep_plugin_numbers::BFloat16;
using halfstep_plugin_numbers::Bool;
using halfstep_plugin_numbers::Compute;
using halfstep_plugin_numbers::Float8E4M3;
using halfstep_plugin_numbers::Float8E5M2;
using halfstep_plugin_numbers::Half;
using halfstep_plugin_numbers::is_floating;
using halfstep_plugin_numbers::item_size;
using halfstep_plugin_numbers::with_floating;
using halfstep_plugin_numbers::with_type;

/// An element as what it computes in, exactly: float for 16 and 8 bits, bool for flags, else its own type.
template <class T>
__host__ __device__ __forceinline__ Compute<T> value_of(T value) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, Half>) {
    return __half2float(__ushort_as_half(value.bits));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __uint_as_float(uint32_t{value.bits} << 16);
  } else
#endif
  {
    return halfstep_plugin_numbers::load(value);
  }
}

/// A number as an element, rounded once, to nearest even; see plugin_numbers.h.
template <class To, class From>
__host__ __device__ __forceinline__ To convert(From value) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<To, Half> && std::is_same_v<From, float>) {
    return Half{__half_as_ushort(__float2half_rn(value))};
  } else if constexpr (std::is_same_v<To, BFloat16> && std::is_same_v<From, float>) {
    return BFloat16{__bfloat16_as_ushort(__float2bfloat16_rn(value))};
  } else
#endif
  {
    return halfstep_plugin_numbers::convert<To>(value);
  }
}

/// What sums of T add up in: float64 for double, 64 bits for integers and flags, float32 for the rest.
template <class T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double,
                                      std::conditional_t<std::is_floating_point_v<Compute<T>>, float, int64_t>>;

/// Calls f(zero) for f32, f64, f16, bf16 and the integers; false, and no call, for other dtypes.
template <class F>
void with_numeric(int dtype, F&& f) {
  if (dtype == HALFSTEP_F8E4M3 || dtype == HALFSTEP_F8E5M2 || dtype == HALFSTEP_BOOL) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, Float8E4M3> && !std::is_same_v<T, Float8E5M2> && !std::is_same_v<T, Bool>) f(zero);
  });
}
/// The same with flags: what kComputed has.
template <class F>
void with_computed(int dtype, F&& f) {
  if (dtype == HALFSTEP_BOOL) {
    f(Bool{});
  } else {
    with_numeric(dtype, f);
  }
}
/// Calls f(zero) for the integers and flags.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class F>
__host__ __device__ __forceinline__ void with_integer(int dtype, F&& f) {
  switch (dtype) {
    case HALFSTEP_I64:
      return f(int64_t{});
    case HALFSTEP_I32:
      return f(int32_t{});
    case HALFSTEP_I8:
      return f(int8_t{});
    case HALFSTEP_U8:
      return f(uint8_t{});
    default:
      return f(Bool{});
  }
}
/// Calls f(word) with an unsigned integer of the size of the dtype's elements, for kernels that only move them.
template <class F>
void with_word(int dtype, F&& f) {
  switch (item_size(dtype)) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
    default:
      return f(uint64_t{});
  }
}

}  // namespace hscuda
