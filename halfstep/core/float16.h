// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>

/// Storage types for the 16-bit and 8-bit floating formats: Half (IEEE 754 binary16), BFloat16 (the upper half of a
/// binary32), Float8E4M3 and Float8E5M2 (the two formats of "FP8 Formats for Deep Learning", arXiv 2209.05433; E4M3 is
/// the finite-only kind, E4M3FN, with a maximum of 448).
///
/// They are storage types only: arithmetic is done in float or double and rounded once when stored. Conversions to them
/// round to nearest even, keep subnormals and convert directly from the source type, so that no value is rounded twice
/// (a double is never narrowed to a float first, an int64 never to a double). NaN stays a quiet NaN with its sign and
/// the upper bits of its payload, which is what the conversion instructions of x86 do, so that scalar and vector code
/// give the same bits. Overflow gives infinity, except in Float8E4M3, which has none and saturates at +-448 (infinities
/// too). None of this depends on the rounding mode of the thread.
namespace halfstep {
namespace detail {

/// What distinguishes one narrow format from another. `kMaxFinite` is the bit pattern of the largest finite value,
/// `kOverflow` that of the value that anything larger becomes, `kNan` the bits set in every NaN.
struct HalfFormat {
  using Bits = std::uint16_t;
  static constexpr int kExponentBits = 5, kMantissaBits = 10;
  static constexpr Bits kMaxFinite = 0x7bff, kOverflow = 0x7c00, kNan = 0x7e00;
};
struct BFloat16Format {
  using Bits = std::uint16_t;
  static constexpr int kExponentBits = 8, kMantissaBits = 7;
  static constexpr Bits kMaxFinite = 0x7f7f, kOverflow = 0x7f80, kNan = 0x7fc0;
};
struct Float8E4M3Format {
  using Bits = std::uint8_t;
  static constexpr int kExponentBits = 4, kMantissaBits = 3;
  static constexpr Bits kMaxFinite = 0x7e, kOverflow = 0x7e, kNan = 0x7f;
};
struct Float8E5M2Format {
  using Bits = std::uint8_t;
  static constexpr int kExponentBits = 5, kMantissaBits = 2;
  static constexpr Bits kMaxFinite = 0x7b, kOverflow = 0x7c, kNan = 0x7e;
};

/// Rounds a float or a double to the narrow format `F`, once, to nearest even.
template <class F, class Source>
constexpr typename F::Bits narrow(Source value) noexcept {
  static_assert(std::is_same_v<Source, float> || std::is_same_v<Source, double>);
  using U = std::conditional_t<std::is_same_v<Source, float>, std::uint32_t, std::uint64_t>;
  using Bits = typename F::Bits;
  constexpr int kSourceMantissa = std::is_same_v<Source, float> ? 23 : 52;
  constexpr int kSourceBias = std::is_same_v<Source, float> ? 127 : 1023;
  constexpr int kBias = (1 << (F::kExponentBits - 1)) - 1;
  constexpr int kDrop = kSourceMantissa - F::kMantissaBits;
  // The exponent field, in the source, of the target's smallest normal number.
  constexpr int kMinExponent = kSourceBias - kBias + 1;
  constexpr U kImplicit = U{1} << kSourceMantissa;
  constexpr U kInfinity = U(2 * kSourceBias + 1) << kSourceMantissa;
  constexpr U kSign = U{1} << (8 * sizeof(U) - 1);

  const U bits = std::bit_cast<U>(value);
  const U magnitude = bits & ~kSign;
  const U sign = bits >> (8 * (sizeof(U) - sizeof(Bits))) & U(Bits(1) << (8 * sizeof(Bits) - 1));
  if (magnitude > kInfinity) {
    constexpr U kPayload = (U{1} << F::kMantissaBits) - 1;
    return static_cast<Bits>(sign | F::kNan | (magnitude >> kDrop & kPayload));
  }
  const int field = static_cast<int>(magnitude >> kSourceMantissa);
  const int exponent = field > 1 ? field : 1;
  const U significand = (magnitude & (kImplicit - 1)) | (field != 0 ? kImplicit : 0);
  // Below the target's normal range one more bit is dropped for each power of two. Two bits more than the significand
  // has are enough to make it zero; a larger shift would be undefined.
  const int below = exponent < kMinExponent ? kMinExponent - exponent : 0;
  const int wanted = kDrop + below;
  const int shift = wanted < kSourceMantissa + 2 ? wanted : kSourceMantissa + 2;
  const U odd = significand >> shift & 1;
  const U rounded = (significand + ((U{1} << (shift - 1)) - 1) + odd) >> shift;
  // The implicit bit and a carry out of the significand both add one to the exponent field, as they should.
  const U above = exponent > kMinExponent ? static_cast<U>(exponent - kMinExponent) : 0;
  const U result = (above << F::kMantissaBits) + rounded;
  return static_cast<Bits>(sign | (result > F::kMaxFinite ? U{F::kOverflow} : result));
}

template <>
constexpr std::uint16_t narrow<BFloat16Format, float>(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/// Rounds an integer to the narrow format `F` once. Integers beyond 2^53 are brought to 53 bits with the dropped bits
/// folded into the last one ("round to odd"), which no later rounding to fewer bits can tell from the exact value.
template <class F>
constexpr typename F::Bits narrow_integer(std::int64_t value) noexcept {
  std::uint64_t magnitude =
      value < 0 ? std::uint64_t{0} - static_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(value);
  if (magnitude >> 53 != 0) magnitude = (magnitude >> 11 | std::uint64_t{(magnitude & 0x7ffu) != 0}) << 11;
  const double exact = static_cast<double>(magnitude);
  return narrow<F, double>(value < 0 ? -exact : exact);
}

/// binary16 to binary32, exact. A signalling NaN becomes quiet, as with VCVTPH2PS.
constexpr float widen_half(std::uint16_t half) noexcept {
  constexpr std::uint32_t kExponent = 0x7c00u << 13;
  const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
  std::uint32_t bits = std::uint32_t{half & 0x7fffu} << 13;
  const std::uint32_t exponent = bits & kExponent;
  if (exponent == 0) {
    // value = mantissa * 2^-24: read with exponent 2^-14 and an implicit one, then take that one away, exactly.
    const float subnormal = std::bit_cast<float>(bits + (113u << 23)) - std::bit_cast<float>(113u << 23);
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(subnormal) | sign);
  }
  if (exponent == kExponent) {
    const std::uint32_t quiet = bits != kExponent ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | (bits & 0x7fffffu) | quiet);
  }
  bits += 112u << 23;
  return std::bit_cast<float>(bits | sign);
}

constexpr float widen_bfloat16(std::uint16_t bits) noexcept { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

constexpr float widen_e4m3(std::uint8_t byte) noexcept {
  const std::uint32_t sign = std::uint32_t{byte & 0x80u} << 24;
  const std::uint32_t magnitude = byte & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) {
    const float subnormal = static_cast<float>(static_cast<int>(magnitude)) * 0x1p-9f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(subnormal) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

/// Float8E5M2 is the upper byte of a binary16.
constexpr float widen_e5m2(std::uint8_t byte) noexcept {
  return widen_half(static_cast<std::uint16_t>(std::uint16_t{byte} << 8));
}

}  // namespace detail

// The four formats have one interface and are four types, not instances of a template: their names stand in symbols,
// in messages of compilers and in debuggers, and headers can declare them without this one.

/// IEEE 754 binary16: 5 exponent and 10 mantissa bits, largest value 65504.
struct Half {
  std::uint16_t bits;

  Half() = default;
  explicit constexpr Half(float value) noexcept : bits(detail::narrow<detail::HalfFormat>(value)) {}
  explicit constexpr Half(double value) noexcept : bits(detail::narrow<detail::HalfFormat>(value)) {}
  explicit constexpr Half(std::signed_integral auto value) noexcept
      : bits(detail::narrow_integer<detail::HalfFormat>(value)) {}
  /// The number with this bit pattern.
  static constexpr Half from_bits(std::uint16_t bits) noexcept { return std::bit_cast<Half>(bits); }
  explicit constexpr operator float() const noexcept { return detail::widen_half(bits); }
  explicit constexpr operator double() const noexcept { return detail::widen_half(bits); }
};

/// The upper 16 bits of a binary32: 8 exponent and 7 mantissa bits.
struct BFloat16 {
  std::uint16_t bits;

  BFloat16() = default;
  explicit constexpr BFloat16(float value) noexcept : bits(detail::narrow<detail::BFloat16Format>(value)) {}
  explicit constexpr BFloat16(double value) noexcept : bits(detail::narrow<detail::BFloat16Format>(value)) {}
  explicit constexpr BFloat16(std::signed_integral auto value) noexcept
      : bits(detail::narrow_integer<detail::BFloat16Format>(value)) {}
  /// The number with this bit pattern.
  static constexpr BFloat16 from_bits(std::uint16_t bits) noexcept { return std::bit_cast<BFloat16>(bits); }
  explicit constexpr operator float() const noexcept { return detail::widen_bfloat16(bits); }
  explicit constexpr operator double() const noexcept { return detail::widen_bfloat16(bits); }
};

/// E4M3FN: 4 exponent and 3 mantissa bits, largest value 448, no infinities; conversions to it saturate.
struct Float8E4M3 {
  std::uint8_t bits;

  Float8E4M3() = default;
  explicit constexpr Float8E4M3(float value) noexcept : bits(detail::narrow<detail::Float8E4M3Format>(value)) {}
  explicit constexpr Float8E4M3(double value) noexcept : bits(detail::narrow<detail::Float8E4M3Format>(value)) {}
  explicit constexpr Float8E4M3(std::signed_integral auto value) noexcept
      : bits(detail::narrow_integer<detail::Float8E4M3Format>(value)) {}
  /// The number with this bit pattern.
  static constexpr Float8E4M3 from_bits(std::uint8_t bits) noexcept { return std::bit_cast<Float8E4M3>(bits); }
  explicit constexpr operator float() const noexcept { return detail::widen_e4m3(bits); }
  explicit constexpr operator double() const noexcept { return detail::widen_e4m3(bits); }
};

/// E5M2: 5 exponent and 2 mantissa bits, largest value 57344, with infinities; 61440 and above become infinite.
struct Float8E5M2 {
  std::uint8_t bits;

  Float8E5M2() = default;
  explicit constexpr Float8E5M2(float value) noexcept : bits(detail::narrow<detail::Float8E5M2Format>(value)) {}
  explicit constexpr Float8E5M2(double value) noexcept : bits(detail::narrow<detail::Float8E5M2Format>(value)) {}
  explicit constexpr Float8E5M2(std::signed_integral auto value) noexcept
      : bits(detail::narrow_integer<detail::Float8E5M2Format>(value)) {}
  /// The number with this bit pattern.
  static constexpr Float8E5M2 from_bits(std::uint8_t bits) noexcept { return std::bit_cast<Float8E5M2>(bits); }
  explicit constexpr operator float() const noexcept { return detail::widen_e5m2(bits); }
  explicit constexpr operator double() const noexcept { return detail::widen_e5m2(bits); }
};

static_assert(sizeof(Half) == 2 && std::is_trivial_v<Half> && std::is_standard_layout_v<Half>);
static_assert(sizeof(BFloat16) == 2 && std::is_trivial_v<BFloat16> && std::is_standard_layout_v<BFloat16>);
static_assert(sizeof(Float8E4M3) == 1 && std::is_trivial_v<Float8E4M3> && std::is_standard_layout_v<Float8E4M3>);
static_assert(sizeof(Float8E5M2) == 1 && std::is_trivial_v<Float8E5M2> && std::is_standard_layout_v<Float8E5M2>);

}  // namespace halfstep
