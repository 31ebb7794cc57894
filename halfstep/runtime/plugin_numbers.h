// SPDX-License-Identifier: Apache-2.0
// For plug-ins written in C++: element types of tensors as C++ types, and exact conversions between them: to nearest
// even, once; subnormals, NaN and infinities are kept. It depends only on plugin.h and core/float16.h. With a CUDA
// compiler everything is available on both host and device (nvcc needs --expt-relaxed-constexpr).
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "halfstep/core/float16.h"
#include "halfstep/runtime/plugin.h"

namespace halfstep_plugin_numbers {

#if defined(__CUDACC__)
#define HALFSTEP_BOTH_SIDES __host__ __device__
#else
#define HALFSTEP_BOTH_SIDES
#endif

/// IEEE binary16.
struct Half {
  uint16_t bits;  ///< as they lie in memory
};
/// bfloat16: the upper half of a float32.
struct BFloat16 {
  uint16_t bits;  ///< as they lie in memory
};
/// OCP's E4M3: no infinities, one NaN of each sign.
struct Float8E4M3 {
  uint8_t bits;  ///< as they lie in memory
};
/// OCP's E5M2: the upper half of a binary16.
struct Float8E5M2 {
  uint8_t bits;  ///< as they lie in memory
};
/// A flag in a byte, 0 or 1.
struct Bool {
  uint8_t bits;  ///< as they lie in memory
};

/// Bytes of an element of a HALFSTEP_... dtype.
HALFSTEP_BOTH_SIDES constexpr uint64_t item_size(int dtype) {
  constexpr uint64_t kSizes[] = {4, 8, 2, 2, 1, 1, 8, 4, 1, 1, 1};
  return kSizes[dtype];
}
/// Whether a dtype is a floating-point one, including the 8-bit ones.
HALFSTEP_BOTH_SIDES constexpr bool is_floating(int dtype) { return dtype <= HALFSTEP_F8E5M2; }
/// The name that Halfstep prints.
inline const char* dtype_name(int dtype) {
  constexpr const char* kNames[] = {"f32", "f64", "f16", "bf16", "f8e4m3", "f8e5m2", "i64", "i32", "i8", "u8", "bool"};
  return dtype >= 0 && dtype <= HALFSTEP_BOOL ? kNames[dtype] : "unknown";
}

// ------------------------------------------------------------------------------------------------------------------
// The narrow formats, by the conversions that the library itself uses (core/float16.h).

/// The value as float32 (double for double), exactly. A signalling NaN of binary16 or of an 8-bit format becomes quiet;
/// others stay.
HALFSTEP_BOTH_SIDES inline float widen(Half x) { return halfstep::detail::widen_half(x.bits); }
HALFSTEP_BOTH_SIDES inline float widen(BFloat16 x) { return halfstep::detail::widen_bfloat16(x.bits); }
HALFSTEP_BOTH_SIDES inline float widen(Float8E4M3 x) { return halfstep::detail::widen_e4m3(x.bits); }
HALFSTEP_BOTH_SIDES inline float widen(Float8E5M2 x) { return halfstep::detail::widen_e5m2(x.bits); }
HALFSTEP_BOTH_SIDES inline float widen(float x) { return x; }
HALFSTEP_BOTH_SIDES inline double widen(double x) { return x; }

/// The format of a narrow element type.
template <class T>
struct FormatOf;
template <>
struct FormatOf<Half> {
  using Type = halfstep::detail::HalfFormat;  ///< what the conversions take
};
template <>
struct FormatOf<BFloat16> {
  using Type = halfstep::detail::BFloat16Format;  ///< what the conversions take
};
template <>
struct FormatOf<Float8E4M3> {
  using Type = halfstep::detail::Float8E4M3Format;  ///< what the conversions take
};
template <>
struct FormatOf<Float8E5M2> {
  using Type = halfstep::detail::Float8E5M2Format;  ///< what the conversions take
};

/// Whether an element is narrower than the float32 that it computes in.
template <class T>
inline constexpr bool kNarrow = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16> ||
                                std::is_same_v<T, Float8E4M3> || std::is_same_v<T, Float8E5M2>;

/// The type that an element is computed in.
template <class T>
using Compute = std::conditional_t<kNarrow<T>, float, std::conditional_t<std::is_same_v<T, Bool>, bool, T>>;

/// An element converted exactly to the type that it is computed in.
template <class T>
HALFSTEP_BOTH_SIDES Compute<T> load(T value) {
  if constexpr (kNarrow<T>) {
    return widen(value);
  } else if constexpr (std::is_same_v<T, Bool>) {
    return value.bits != 0;
  } else {
    return value;
  }
}

/// A number (float, double, bool or an integer) as an element: to floating types to nearest even; floats to integers
/// towards zero, what is out of range saturates and NaN gives 0; integers to integers modulo 2^bits; to bool whether it
/// differs from zero.
template <class To, class From>
HALFSTEP_BOTH_SIDES To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<To, Bool>) {
    return Bool{static_cast<uint8_t>(value != From{0})};
  } else if constexpr (kNarrow<To>) {
    using Format = typename FormatOf<To>::Type;
    if constexpr (std::is_floating_point_v<From>) {
      return To{halfstep::detail::narrow<Format>(value)};
    } else {
      return To{halfstep::detail::narrow_integer<Format>(static_cast<int64_t>(value))};
    }
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    using Limits = std::numeric_limits<To>;
    // The largest value need not be a float, one more is a power of two.
    constexpr From kEnd = static_cast<From>(Limits::max() / 2 + 1) * From{2};
    if (!(value == value)) return To{0};
    if (value >= kEnd) return Limits::max();
    if (value <= static_cast<From>(Limits::min())) return Limits::min();
    return static_cast<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

/// Calls f with a value of the type of `dtype`, which is f32, f64, f16 or bf16.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class F>
HALFSTEP_BOTH_SIDES decltype(auto) with_floating(int dtype, F&& f) {
  switch (dtype) {
    case HALFSTEP_F32:
      return f(float{});
    case HALFSTEP_F64:
      return f(double{});
    case HALFSTEP_F16:
      return f(Half{});
    default:
      return f(BFloat16{});
  }
}

/// Calls f with a value of the type of `dtype`.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class F>
HALFSTEP_BOTH_SIDES decltype(auto) with_type(int dtype, F&& f) {
  switch (dtype) {
    case HALFSTEP_F32:
      return f(float{});
    case HALFSTEP_F64:
      return f(double{});
    case HALFSTEP_F16:
      return f(Half{});
    case HALFSTEP_BF16:
      return f(BFloat16{});
    case HALFSTEP_F8E4M3:
      return f(Float8E4M3{});
    case HALFSTEP_F8E5M2:
      return f(Float8E5M2{});
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

#undef HALFSTEP_BOTH_SIDES

}  // namespace halfstep_plugin_numbers
