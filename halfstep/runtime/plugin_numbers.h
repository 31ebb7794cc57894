// SPDX-License-Identifier: Apache-2.0
// For plug-ins written in C++: element types of tensors as C++ types, and exact conversions between them: to nearest
// even, once; subnormals, NaN and infinities are kept. It depends only on plugin.h. With a CUDA compiler everything is
// available on both host and device.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

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
// Widening, exact. Both 16-bit conversions are branch-free, so that loops over them vectorise.

/// The value as float32 (double for double), exactly.
HALFSTEP_BOTH_SIDES inline float widen(Half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  // Exponent and mantissa in their places; the exponent's bias differs by 112, and for infinities by 224.
  const uint32_t normal = (magnitude << 13) + (112u << 23) + (magnitude >= 0x7c00u ? 112u << 23 : 0u);
  // A subnormal is its mantissa times 2^-24, which float32 holds.
  const uint32_t small = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return std::bit_cast<float>((magnitude < 0x400u ? small : normal) | sign);
}
HALFSTEP_BOTH_SIDES inline float widen(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

/// A format of 8 bits: sign, exponent, `kMantissa` bits of mantissa.
template <int kMantissa, int kBias>
HALFSTEP_BOTH_SIDES float widen_byte(uint8_t bits) {
  const int exponent = (bits & 0x7f) >> kMantissa, mantissa = bits & ((1 << kMantissa) - 1);
  const int value = exponent == 0 ? mantissa : mantissa + (1 << kMantissa);
  const float magnitude = std::ldexp(static_cast<float>(value), (exponent == 0 ? 1 : exponent) - kBias - kMantissa);
  return bits & 0x80 ? -magnitude : magnitude;
}
HALFSTEP_BOTH_SIDES inline float widen(Float8E4M3 x) {
  if ((x.bits & 0x7f) == 0x7f)
    return std::copysign(std::numeric_limits<float>::quiet_NaN(), x.bits & 0x80 ? -1.f : 1.f);
  return widen_byte<3, 7>(x.bits);
}
HALFSTEP_BOTH_SIDES inline float widen(Float8E5M2 x) { return widen(Half{static_cast<uint16_t>(x.bits << 8)}); }
HALFSTEP_BOTH_SIDES inline float widen(float x) { return x; }
HALFSTEP_BOTH_SIDES inline double widen(double x) { return x; }

// ------------------------------------------------------------------------------------------------------------------
// Narrowing from float32.

/// Rounds to nearest even into `to`.
HALFSTEP_BOTH_SIDES inline void narrow(float value, float* to) { *to = value; }
HALFSTEP_BOTH_SIDES inline void narrow(float value, BFloat16* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const uint32_t nan = bits >> 16 | 0x40u;
  to->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}
HALFSTEP_BOTH_SIDES inline void narrow(float value, Half* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  // From the half of the largest step on everything is infinite; the addition carries into the exponent as it should.
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // Under 2^-14 the last place is 2^-24: adding 0.5 puts it in float32's last place, and the processor rounds.
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  uint32_t result = magnitude < (113u << 23) ? small : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? nan : result;
  to->bits = static_cast<uint16_t>(result | sign);
}

/// The bits of a magnitude in a format with `kMantissa` bits of mantissa; may be more than its largest value.
template <int kMantissa, int kBias>
HALFSTEP_BOTH_SIDES uint32_t narrow_byte(float magnitude) {
  if (magnitude == 0) return 0;
  int exponent = std::ilogb(magnitude);
  exponent = exponent < 1 - kBias ? 1 - kBias : exponent;
  // 1 to 2 in units of the last place, rounded to nearest even; a mantissa that overflows raises the exponent.
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, kMantissa - exponent)));
  return (static_cast<uint32_t>(exponent + kBias - 1) << kMantissa) + units;
}
HALFSTEP_BOTH_SIDES inline void narrow(float value, Float8E4M3* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 24 & 0x80u;
  const float magnitude = std::fabs(value);
  // There are no infinities: what is too large becomes the largest value.
  const uint32_t result = value != value ? 0x7fu : magnitude >= 448 ? 0x7eu : narrow_byte<3, 7>(magnitude);
  to->bits = static_cast<uint8_t>(sign | result);
}
HALFSTEP_BOTH_SIDES inline void narrow(float value, Float8E5M2* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 24 & 0x80u;
  const float magnitude = std::fabs(value);
  const uint32_t nan = 0x7eu | (bits >> 21 & 3u);
  const uint32_t result = value != value ? nan : magnitude >= 61440 ? 0x7cu : narrow_byte<2, 15>(magnitude);
  to->bits = static_cast<uint8_t>(sign | result);
}

// ------------------------------------------------------------------------------------------------------------------
// From wider types, through a float32 rounded to odd: its last bit records the dropped bits, so that the second
// rounding, to at least two bits fewer, equals that of the exact value.

/// Rounded to odd.
HALFSTEP_BOTH_SIDES inline float to_odd_float(double value) {
  const auto nearest = static_cast<float>(value);
  const uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (static_cast<double>(nearest) == value || value != value || (bits & 1u) != 0) return nearest;
  return std::bit_cast<float>(std::fabs(static_cast<double>(nearest)) > std::fabs(value) ? bits - 1 : bits + 1);
}
HALFSTEP_BOTH_SIDES inline float to_odd_float(int64_t value) {
  uint64_t magnitude = value < 0 ? uint64_t{0} - static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
  // More bits than a double has: the lowest are folded into one that is kept.
  if (magnitude >> 53 != 0) magnitude = (magnitude >> 11 | uint64_t{(magnitude & 0x7ffu) != 0}) << 11;
  const auto exact = static_cast<double>(magnitude);
  return to_odd_float(value < 0 ? -exact : exact);
}

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
    To result;
    if constexpr (std::is_same_v<From, float>) {
      narrow(value, &result);
    } else if constexpr (std::is_same_v<From, double>) {
      narrow(to_odd_float(value), &result);
    } else {
      narrow(to_odd_float(static_cast<int64_t>(value)), &result);
    }
    return result;
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
