// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/dtype.h"

#include <cmath>

#include "halfstep/core/fail.h"

namespace halfstep {
namespace {

struct Alias {
  std::string_view text;
  DType dtype;
};

constexpr Alias kAliases[] = {
    {"float32", DType::f32},    {"float", DType::f32},          {"fp32", DType::f32},       {"float64", DType::f64},
    {"double", DType::f64},     {"fp64", DType::f64},           {"float16", DType::f16},    {"half", DType::f16},
    {"fp16", DType::f16},       {"bfloat16", DType::bf16},      {"float8_e4m3fn", f8e4m3},  {"float8_e4m3", f8e4m3},
    {"f8_e4m3", DType::f8e4m3}, {"float8_e5m2", DType::f8e5m2}, {"f8_e5m2", DType::f8e5m2}, {"int64", DType::i64},
    {"long", DType::i64},       {"int32", DType::i32},          {"int", DType::i32},        {"int8", DType::i8},
    {"uint8", DType::u8},       {"boolean", DType::boolean},
};

/// From the exponent of the smallest normal, the exponent of the largest value and the number of significand bits. E4M3
/// gives its largest significand to NaN, so its largest value is one step lower.
constexpr FloatInfo make_info(int min_exponent, int max_exponent, int digits, bool nan_at_top = false) {
  auto power = [](int exponent) {
    double result = 1;
    for (; exponent > 0; --exponent) result *= 2;
    for (; exponent < 0; ++exponent) result /= 2;
    return result;
  };
  const double eps = power(1 - digits);
  const double max = power(max_exponent) * (2 - (nan_at_top ? 2 : 1) * eps);
  return {max, -max, power(min_exponent), power(min_exponent) * eps, eps, digits};
}

constexpr FloatInfo kInfos[] = {make_info(-126, 127, 24), make_info(-1022, 1023, 53), make_info(-14, 15, 11),
                                make_info(-126, 127, 8),  make_info(-6, 8, 4, true),  make_info(-14, 15, 3)};

}  // namespace

std::optional<DType> parse_dtype(std::string_view text) noexcept {
  constexpr std::string_view kPrefix = "torch.";
  if (text.substr(0, kPrefix.size()) == kPrefix) text.remove_prefix(kPrefix.size());
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (text == name(dtype)) return dtype;
  }
  for (const Alias& alias : kAliases) {
    if (text == alias.text) return alias.dtype;
  }
  return std::nullopt;
}

double FloatInfo::spacing(double x) const {
  const double size = std::abs(x);
  if (!(size <= max)) fail<Error>("spacing: expected a magnitude of at most {}, got {}", max, x);
  if (size < smallest_normal) return smallest_subnormal;
  return std::ldexp(eps, std::ilogb(size));
}

const FloatInfo& finfo(DType dtype) {
  if (!is_floating(dtype)) fail<DTypeError>("finfo: expected a floating dtype, got {}", name(dtype));
  return kInfos[static_cast<std::size_t>(dtype)];
}

double lowest_finite(DType dtype) noexcept {
  switch (dtype) {
    case DType::i64:
      return -0x1p63;
    case DType::i32:
      return -0x1p31;
    case DType::i8:
      return -128;
    case DType::u8:
    case DType::boolean:
      return 0;
    default:
      return kInfos[static_cast<std::size_t>(dtype)].lowest;
  }
}

namespace detail {
void fail_visit(DType dtype, const char* expected) { fail<DTypeError>("expected {}, got {}", expected, name(dtype)); }
}  // namespace detail

}  // namespace halfstep
