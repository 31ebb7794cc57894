// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <type_traits>

#include "halfstep/core/export.h"
#include "halfstep/core/float16.h"

namespace halfstep {

/// Element type of a tensor.
enum class DType : std::uint8_t { f32, f64, f16, bf16, f8e4m3, f8e5m2, i64, i32, i8, u8, boolean };

/// How many element types there are.
inline constexpr int kNumDTypes = 11;

/// Short names of the element types, for programs: `zeros({2, 3}, {.dtype = f16})`.
inline constexpr DType f32 = DType::f32;
inline constexpr DType f64 = DType::f64;
inline constexpr DType f16 = DType::f16;
inline constexpr DType bf16 = DType::bf16;
inline constexpr DType f8e4m3 = DType::f8e4m3;
inline constexpr DType f8e5m2 = DType::f8e5m2;
inline constexpr DType i64 = DType::i64;
inline constexpr DType i32 = DType::i32;
inline constexpr DType i8 = DType::i8;
inline constexpr DType u8 = DType::u8;
inline constexpr DType boolean = DType::boolean;

/// The C++ type that stores one element of dtype `D`, and the reverse.
template <DType D>
struct StorageType;
template <>
struct StorageType<DType::f32> : std::type_identity<float> {};
template <>
struct StorageType<DType::f64> : std::type_identity<double> {};
template <>
struct StorageType<DType::f16> : std::type_identity<Half> {};
template <>
struct StorageType<DType::bf16> : std::type_identity<BFloat16> {};
template <>
struct StorageType<DType::f8e4m3> : std::type_identity<Float8E4M3> {};
template <>
struct StorageType<DType::f8e5m2> : std::type_identity<Float8E5M2> {};
template <>
struct StorageType<DType::i64> : std::type_identity<std::int64_t> {};
template <>
struct StorageType<DType::i32> : std::type_identity<std::int32_t> {};
template <>
struct StorageType<DType::i8> : std::type_identity<std::int8_t> {};
template <>
struct StorageType<DType::u8> : std::type_identity<std::uint8_t> {};
template <>
struct StorageType<DType::boolean> : std::type_identity<bool> {};
template <DType D>
using storage_t = typename StorageType<D>::type;

namespace detail {
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> : std::integral_constant<DType, DType::f32> {};
template <>
struct DTypeOf<double> : std::integral_constant<DType, DType::f64> {};
template <>
struct DTypeOf<Half> : std::integral_constant<DType, DType::f16> {};
template <>
struct DTypeOf<BFloat16> : std::integral_constant<DType, DType::bf16> {};
template <>
struct DTypeOf<Float8E4M3> : std::integral_constant<DType, DType::f8e4m3> {};
template <>
struct DTypeOf<Float8E5M2> : std::integral_constant<DType, DType::f8e5m2> {};
template <>
struct DTypeOf<std::int64_t> : std::integral_constant<DType, DType::i64> {};
template <>
struct DTypeOf<std::int32_t> : std::integral_constant<DType, DType::i32> {};
template <>
struct DTypeOf<std::int8_t> : std::integral_constant<DType, DType::i8> {};
template <>
struct DTypeOf<std::uint8_t> : std::integral_constant<DType, DType::u8> {};
template <>
struct DTypeOf<bool> : std::integral_constant<DType, DType::boolean> {};
}  // namespace detail

/// The dtype that a C++ type stores: `dtype_of<float> == f32`.
template <class T>
inline constexpr DType dtype_of = detail::DTypeOf<std::remove_cv_t<T>>::value;

/// Bytes that one element takes.
constexpr std::size_t item_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    default:
      return 1;
  }
}

/// Short name: "f32", "bf16", "bool" and so on.
constexpr const char* name(DType dtype) noexcept {
  constexpr const char* kNames[kNumDTypes] = {"f32", "f64", "f16", "bf16", "f8e4m3", "f8e5m2",
                                              "i64", "i32", "i8",  "u8",   "bool"};
  const auto index = static_cast<std::size_t>(dtype);
  return index < kNumDTypes ? kNames[index] : "unknown";
}

/// Parses a short name or the long one that PyTorch uses ("float32", "half", "torch.bfloat16"); none if it is neither.
HS_API std::optional<DType> parse_dtype(std::string_view text) noexcept;

/// f32, f64, f16, bf16 and the two f8 formats.
constexpr bool is_floating(DType dtype) noexcept { return dtype <= DType::f8e5m2; }
/// i64, i32, i8 and u8; not bool.
constexpr bool is_integral(DType dtype) noexcept { return dtype >= DType::i64 && dtype <= DType::u8; }
/// The dtypes that autocast casts to: f16 and bf16.
constexpr bool is_low_precision(DType dtype) noexcept { return dtype == DType::f16 || dtype == DType::bf16; }
constexpr bool is_float8(DType dtype) noexcept { return dtype == DType::f8e4m3 || dtype == DType::f8e5m2; }
/// The dtype in which values of `dtype` are summed and in which optimizers keep their state: f64 for f64, else f32.
constexpr DType accumulate_dtype(DType dtype) noexcept { return dtype == DType::f64 ? DType::f64 : DType::f32; }

/// The dtype that an op computes in when its operands have dtypes `a` and `b`: torch.promote_types. A floating dtype
/// wins over an integral one, bool yields to everything, f16 with bf16 gives f32. An f8 dtype mixes with no other: none
/// is returned, and the op reports it. One deviation: i8 with u8 gives i32, because there is no i16.
constexpr std::optional<DType> promote_types(DType a, DType b) noexcept {
  if (a == b) return a;
  if (is_float8(a) || is_float8(b)) return std::nullopt;
  if (a == DType::boolean) return b;
  if (b == DType::boolean) return a;
  if (is_floating(a) != is_floating(b)) return is_floating(a) ? a : b;
  const std::size_t size_a = item_size(a), size_b = item_size(b);
  if (size_a != size_b) return size_a > size_b ? a : b;
  return is_floating(a) ? DType::f32 : DType::i32;
}

/// Limits of a floating dtype, all exact. `eps` is the distance from 1 to the next larger value, so that rounding to
/// nearest errs by at most eps / 2 relative in the normal range. `digits` counts significand bits, the implicit one
/// included.
struct FloatInfo {
  double max;
  double lowest;
  double smallest_normal;
  double smallest_subnormal;
  double eps;
  int digits;

  /// Distance from |x| to the next larger value of the dtype (at `max`, where there is none, to the next smaller one):
  /// eps at 1, 1 at 1024 in f16. Rounding to nearest errs by at most half of it. Throws Error if |x| is above `max` or
  /// NaN.
  HS_API double spacing(double x) const;
};

/// Limits of a floating dtype. Throws DTypeError for others.
HS_API const FloatInfo& finfo(DType dtype);

/// The most negative finite value of any dtype, as a double (0 for u8 and bool). It masks scores before a softmax:
/// where -infinity would make a fully masked row NaN, this does not.
HS_API double lowest_finite(DType dtype) noexcept;

/// Converts one element between any two storage types, rounding once.
///
/// Floating to floating: to nearest even; overflow as the type says. Integer to floating: to nearest even. Floating to
/// integer: towards zero, values out of range (infinities too) saturate, NaN gives 0. Integer to integer: modulo
/// 2^bits. To bool: whether the value differs from zero (NaN does). From bool: 0 or 1.
template <class To, class From>
constexpr To convert(From value) noexcept {
  constexpr bool kToNarrow = is_low_precision(dtype_of<To>) || is_float8(dtype_of<To>);
  constexpr bool kFromNarrow = is_low_precision(dtype_of<From>) || is_float8(dtype_of<From>);
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (kFromNarrow) {
    return convert<To>(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, bool>) {
    return value != From{0};
  } else if constexpr (kToNarrow) {
    if constexpr (std::is_floating_point_v<From>) {
      return To(value);
    } else {
      return To(static_cast<std::int64_t>(value));
    }
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    using Limits = std::numeric_limits<To>;
    // One past the largest value is a power of two and so exact, where the largest value itself may not be.
    constexpr From kEnd = static_cast<From>(Limits::max() / 2 + 1) * From{2};
    constexpr From kBegin = static_cast<From>(Limits::min());
    if (!(value == value)) return To{0};
    if (value >= kEnd) return Limits::max();
    if (value <= kBegin) return Limits::min();
    return static_cast<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

/// What the visitors below pass: the dtype as a type and as a constant.
template <DType D>
struct DTypeTag {
  using type = storage_t<D>;
  static constexpr DType value = D;
};

namespace detail {
[[noreturn]] HS_API void fail_visit(DType dtype, const char* expected);
}  // namespace detail

/// Calls `f(DTypeTag<D>{})` with the tag of `dtype` and returns what it returns (the same type for every tag):
/// `visit_dtype(d, [&](auto tag) { using T = storage_t<tag.value>; … })`.
template <class F>
constexpr decltype(auto) visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(DTypeTag<DType::f32>{});
    case DType::f64:
      return f(DTypeTag<DType::f64>{});
    case DType::f16:
      return f(DTypeTag<DType::f16>{});
    case DType::bf16:
      return f(DTypeTag<DType::bf16>{});
    case DType::f8e4m3:
      return f(DTypeTag<DType::f8e4m3>{});
    case DType::f8e5m2:
      return f(DTypeTag<DType::f8e5m2>{});
    case DType::i64:
      return f(DTypeTag<DType::i64>{});
    case DType::i32:
      return f(DTypeTag<DType::i32>{});
    case DType::i8:
      return f(DTypeTag<DType::i8>{});
    case DType::u8:
      return f(DTypeTag<DType::u8>{});
    case DType::boolean:
      return f(DTypeTag<DType::boolean>{});
  }
  detail::fail_visit(dtype, "a known dtype");
}

/// Another name for visit_dtype, for code that also uses visit_floating.
template <class F>
constexpr decltype(auto) visit_all(DType dtype, F&& f) {
  return visit_dtype(dtype, static_cast<F&&>(f));
}

/// visit_dtype for the four dtypes that networks compute in: f32, f64, f16, bf16. Throws DTypeError for others.
template <class F>
constexpr decltype(auto) visit_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(DTypeTag<DType::f32>{});
    case DType::f64:
      return f(DTypeTag<DType::f64>{});
    case DType::f16:
      return f(DTypeTag<DType::f16>{});
    case DType::bf16:
      return f(DTypeTag<DType::bf16>{});
    default:
      detail::fail_visit(dtype, "f32, f64, f16 or bf16");
  }
}

}  // namespace halfstep
