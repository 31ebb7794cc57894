// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "halfstep/core/error.h"
#include "tests/support/test_data.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace halfstep {
namespace {

// The oracle knows a format only as the list of its finite values, read off the definition value = significand *
// 2^exponent, and rounds by comparing with the middle of two neighbours. Nothing of it is shared with the code tested.
struct Format {
  int exponent_bits, mantissa_bits;
  bool has_infinity;
  int width() const { return 1 + exponent_bits + mantissa_bits; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  unsigned sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
  unsigned max_finite() const { return has_infinity ? infinity() - 1 : sign_bit() - 2; }
  unsigned infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  double value(unsigned magnitude) const {
    const int field = static_cast<int>(magnitude >> mantissa_bits);
    const double mantissa = magnitude & ((1u << mantissa_bits) - 1);
    return field == 0 ? std::ldexp(mantissa, 1 - bias() - mantissa_bits)
                      : std::ldexp(mantissa + (1 << mantissa_bits), field - bias() - mantissa_bits);
  }
  bool is_nan(unsigned bits) const {
    const unsigned magnitude = bits & (sign_bit() - 1);
    return has_infinity ? magnitude > infinity() : magnitude == sign_bit() - 1;
  }
};

template <class T>
struct FormatOf;
template <>
struct FormatOf<Half> {
  static constexpr Format format{5, 10, true};
};
template <>
struct FormatOf<BFloat16> {
  static constexpr Format format{8, 7, true};
};
template <>
struct FormatOf<Float8E4M3> {
  static constexpr Format format{4, 3, false};
};
template <>
struct FormatOf<Float8E5M2> {
  static constexpr Format format{5, 2, true};
};

template <class T>
class NarrowFloat : public testing::Test {
 public:
  static constexpr Format format = FormatOf<T>::format;

  NarrowFloat() {
    for (unsigned i = 0; i <= format.max_finite(); ++i) values.push_back(format.value(i));
    for (unsigned i = 0; i < format.max_finite(); ++i) middles.push_back((values[i] + values[i + 1]) / 2);
    // What lies past the largest value rounds as if the next one existed.
    middles.push_back(values.back() + (values.back() - values[values.size() - 2]) / 2);
  }

  // The pattern of x >= 0, given that at least `below` middles are smaller than x.
  unsigned step(double x, std::size_t index) const {
    const bool tie = index < middles.size() && x == middles[index];
    const auto result = static_cast<unsigned>(index + (tie && index % 2 == 1));
    return result > format.max_finite() ? overflow() : result;
  }
  unsigned overflow() const { return format.has_infinity ? format.infinity() : format.max_finite(); }
  unsigned nearest(double x) const {
    const auto at = std::lower_bound(middles.begin(), middles.end(), std::fabs(x)) - middles.begin();
    return step(std::fabs(x), static_cast<std::size_t>(at)) | (std::signbit(x) ? format.sign_bit() : 0);
  }

  template <class Source>
  void check(Source x) const {
    if (T(x).bits != nearest(x)) {
      ADD_FAILURE() << std::hexfloat << x << " gave " << std::hex << +T(x).bits << ", expected " << nearest(x);
    }
  }

  std::vector<double> values, middles;
};

using NarrowTypes = testing::Types<Half, BFloat16, Float8E4M3, Float8E5M2>;
TYPED_TEST_SUITE(NarrowFloat, NarrowTypes);

TYPED_TEST(NarrowFloat, WidensEveryPatternExactlyAndBack) {
  using Bits = decltype(TypeParam{}.bits);
  const Format& format = this->format;
  for (unsigned i = 0; i < 1u << format.width(); ++i) {
    const auto x = TypeParam::from_bits(static_cast<Bits>(i));
    const auto single = static_cast<float>(x);
    const auto wide = static_cast<double>(x);
    const bool negative = (i & format.sign_bit()) != 0;
    ASSERT_EQ(std::signbit(single), negative) << i;
    ASSERT_EQ(std::signbit(wide), negative) << i;
    if (format.is_nan(i)) {
      ASSERT_TRUE(std::isnan(single) && std::isnan(wide)) << i;
      for (const auto back : {TypeParam(single), TypeParam(wide)}) {
        ASSERT_TRUE(format.is_nan(back.bits)) << i;
        ASSERT_EQ((back.bits & format.sign_bit()) != 0, negative) << i;
        // Quiet: the first mantissa bit is set.
        ASSERT_TRUE(back.bits >> (format.mantissa_bits - 1) & 1) << i;
      }
      continue;
    }
    const unsigned magnitude = i & (format.sign_bit() - 1);
    const double expected = magnitude > format.max_finite() ? HUGE_VAL : format.value(magnitude);
    ASSERT_EQ(std::fabs(wide), expected) << i;
    ASSERT_EQ(std::fabs(static_cast<double>(single)), expected) << i;
    // E4M3 has no infinities, so every pattern that is no NaN comes back.
    ASSERT_EQ(TypeParam(single).bits, i);
    ASSERT_EQ(TypeParam(wide).bits, i);
  }
}

TYPED_TEST(NarrowFloat, RoundsAtEveryBoundary) {
  long once_only = 0;
  for (std::size_t i = 0; i < this->middles.size(); ++i) {
    for (const double x : {this->middles[i], this->values[i]}) {
      for (const double sign : {1.0, -1.0}) {
        const auto single = static_cast<float>(x * sign);
        ASSERT_EQ(static_cast<double>(single), x * sign);
        this->check(single);
        this->check(std::nextafter(single, HUGE_VALF));
        this->check(std::nextafter(single, -HUGE_VALF));
        this->check(x * sign);
        for (const double y : {std::nextafter(x * sign, HUGE_VAL), std::nextafter(x * sign, -HUGE_VAL)}) {
          this->check(y);
          once_only += TypeParam(y).bits != TypeParam(static_cast<float>(y)).bits;
        }
      }
    }
  }
  // Half of the neighbours of the middles come out wrong when rounded to float first: these values would tell.
  EXPECT_GE(once_only, static_cast<long>(this->middles.size()) - 1);
}

TYPED_TEST(NarrowFloat, RoundsAStridedSweepOfAllFloats) {
  for (std::uint64_t bits = 0; bits <= 0xffffffffu; bits += 4099) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (std::isnan(x)) continue;
    this->check(x);
  }
}

TYPED_TEST(NarrowFloat, RoundsDoublesOfAnySize) {
  // A pattern of the double's bits that visits every exponent with changing significands.
  std::uint64_t bits = 0x123456789abcdef;
  for (int i = 0; i < 200000; ++i) {
    bits = bits * 6364136223846793005u + 1442695040888963407u;
    const auto x = std::bit_cast<double>(bits);
    if (!std::isnan(x)) this->check(x);
    const auto near = std::ldexp(std::bit_cast<double>((bits >> 12) | (std::uint64_t{1023} << 52)), i % 300 - 150);
    this->check(near);
  }
  const double inf = HUGE_VAL;
  for (const double x : {inf, -inf, std::numeric_limits<double>::max(), std::numeric_limits<double>::denorm_min()}) {
    this->check(x);
  }
}

TYPED_TEST(NarrowFloat, RoundsIntegersOnce) {
  for (std::size_t i = 0; i < this->middles.size(); ++i) {
    const double middle = this->middles[i];
    if (middle < 1 || middle >= 0x1p63 || middle != std::floor(middle)) continue;
    const auto m = static_cast<std::int64_t>(middle);
    const auto lower = static_cast<unsigned>(i);
    const unsigned upper = lower == this->format.max_finite() ? this->overflow() : lower + 1;
    const unsigned even = i % 2 == 0 ? lower : upper;
    const unsigned sign = this->format.sign_bit();
    ASSERT_EQ(TypeParam(m - 1).bits, lower) << m;
    ASSERT_EQ(TypeParam(m).bits, even) << m;
    ASSERT_EQ(TypeParam(m + 1).bits, upper) << m;
    ASSERT_EQ(TypeParam(-m + 1).bits, lower | sign) << m;
    ASSERT_EQ(TypeParam(-m).bits, even | sign) << m;
    ASSERT_EQ(TypeParam(-m - 1).bits, upper | sign) << m;
  }
  for (int i = -300; i <= 300; ++i) ASSERT_EQ(TypeParam(i).bits, this->nearest(i));
  ASSERT_EQ(TypeParam(std::numeric_limits<std::int64_t>::min()).bits, this->nearest(-0x1p63));
  ASSERT_EQ(TypeParam(std::numeric_limits<std::int64_t>::max()).bits, this->nearest(0x1p63));
}

TYPED_TEST(NarrowFloat, ConvertsBetweenNarrowFormatsOnce) {
  auto from = [&]<class From>(From) {
    using Bits = decltype(From{}.bits);
    for (unsigned i = 0; i < 1u << FormatOf<From>::format.width(); ++i) {
      const auto x = From::from_bits(static_cast<Bits>(i));
      const auto y = convert<TypeParam>(x);
      if (FormatOf<From>::format.is_nan(i)) {
        ASSERT_TRUE(this->format.is_nan(y.bits)) << i;
      } else {
        ASSERT_EQ(y.bits, this->nearest(static_cast<double>(x))) << i;
      }
    }
  };
  from(Half{});
  from(BFloat16{});
  from(Float8E4M3{});
  from(Float8E5M2{});
}

// Every float there is, in order, so that the oracle only has to step on. About a minute for each format.
template <class T>
class NarrowFloatSlow : public NarrowFloat<T> {};
TYPED_TEST_SUITE(NarrowFloatSlow, NarrowTypes);

TYPED_TEST(NarrowFloatSlow, RoundsEveryFloat) {
  std::size_t index = 0;
  const unsigned sign = this->format.sign_bit();
  for (std::uint32_t bits = 0; bits <= 0x7f800000u; ++bits) {
    const auto x = std::bit_cast<float>(bits);
    while (index < this->middles.size() && this->middles[index] < static_cast<double>(x)) ++index;
    const unsigned expected = this->step(static_cast<double>(x), index);
    ASSERT_EQ(TypeParam(x).bits, expected) << std::hexfloat << x;
    ASSERT_EQ(TypeParam(-x).bits, expected | sign) << std::hexfloat << -x;
  }
  for (std::uint32_t bits = 0x7f800001u; bits < 0x80000000u; ++bits) {
    ASSERT_TRUE(this->format.is_nan(TypeParam(std::bit_cast<float>(bits)).bits)) << bits;
  }
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) std::uint16_t hardware_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
__attribute__((target("f16c"))) float hardware_float(std::uint16_t bits) { return _cvtsh_ss(bits); }

TEST(Half, AgreesWithTheProcessorBitForBit) {
  if (!__builtin_cpu_supports("f16c")) GTEST_SKIP() << "this processor has no F16C instructions";
  for (std::uint64_t bits = 0; bits <= 0xffffffffu; bits += 1021) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    ASSERT_EQ(Half(x).bits, hardware_half(x)) << bits;
  }
  for (unsigned i = 0; i < 65536; ++i) {
    const auto half = static_cast<std::uint16_t>(i);
    const auto expected = std::bit_cast<std::uint32_t>(hardware_float(half));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(static_cast<float>(Half::from_bits(half))), expected) << i;
  }
}
#endif

TEST(NarrowFloats, GiveTheValuesThatPyTorchGives) {
  // What torch 2.15 gives on the CPU for the same casts.
  EXPECT_EQ(static_cast<float>(Half(65519.99f)), 65504.0f);
  EXPECT_EQ(static_cast<float>(Half(65520.0f)), HUGE_VALF);
  EXPECT_EQ(static_cast<float>(Half(0x1p-25f)), 0.0f);
  EXPECT_EQ(static_cast<float>(Half(std::nextafter(0x1p-25f, 1.0f))), 0x1p-24f);
  EXPECT_EQ(static_cast<float>(BFloat16(1 + 0x1p-8f)), 1.0f);
  EXPECT_EQ(static_cast<float>(BFloat16(1 + 3 * 0x1p-8f)), 1.015625f);
  EXPECT_EQ(static_cast<float>(BFloat16(3.3961776e38f)), HUGE_VALF);
  EXPECT_EQ(static_cast<float>(Float8E4M3(465.0f)), 448.0f);
  EXPECT_EQ(static_cast<float>(Float8E4M3(-1e6f)), -448.0f);
  EXPECT_EQ(static_cast<float>(Float8E4M3(HUGE_VALF)), 448.0f);
  EXPECT_EQ(static_cast<float>(Float8E4M3(0x1p-10f)), 0.0f);
  EXPECT_EQ(static_cast<float>(Float8E4M3(3 * 0x1p-10f)), 0x1p-8f);
  EXPECT_EQ(static_cast<float>(Float8E5M2(61439.0f)), 57344.0f);
  EXPECT_EQ(static_cast<float>(Float8E5M2(61440.0f)), HUGE_VALF);
  static_assert(Half(1.0).bits == 0x3c00 && BFloat16(-2).bits == 0xc000 && Float8E4M3(1.0f).bits == 0x38);
}

// Out of the optimiser's sight: folded at compile time, an undefined conversion might give the right answer by chance.
template <class To, class From>
To at_run_time(From value) {
  const volatile bool always = true;
  return convert<To>(always ? value : From{});
}

TEST(Convert, FloatingToIntegerTruncatesAndSaturates) {
  const double inf = HUGE_VAL, nan = std::nan("");
  EXPECT_EQ(at_run_time<std::int8_t>(127.99), 127);
  EXPECT_EQ(at_run_time<std::int8_t>(128.0f), 127);
  EXPECT_EQ(at_run_time<std::int8_t>(-128.99), -128);
  EXPECT_EQ(at_run_time<std::int8_t>(-1e30f), -128);
  EXPECT_EQ(at_run_time<std::int8_t>(-1.99f), -1);
  EXPECT_EQ(at_run_time<std::uint8_t>(255.9f), 255);
  EXPECT_EQ(at_run_time<std::uint8_t>(256.0), 255);
  EXPECT_EQ(at_run_time<std::uint8_t>(-0.5f), 0);
  EXPECT_EQ(at_run_time<std::uint8_t>(-5.0f), 0);
  EXPECT_EQ(at_run_time<std::int32_t>(2147483520.0f), 2147483520);
  EXPECT_EQ(at_run_time<std::int32_t>(2147483648.0f), 2147483647);
  EXPECT_EQ(at_run_time<std::int32_t>(2147483647.5), 2147483647);
  EXPECT_EQ(at_run_time<std::int64_t>(0x1.fffffep62f), 0x7fffff8000000000);
  EXPECT_EQ(at_run_time<std::int64_t>(0x1p63f), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(at_run_time<std::int64_t>(-0x1p63), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(at_run_time<std::int64_t>(-inf), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(at_run_time<std::int32_t>(inf), std::numeric_limits<std::int32_t>::max());
  EXPECT_EQ(at_run_time<std::int32_t>(nan), 0);
  EXPECT_EQ(at_run_time<std::int64_t>(BFloat16(nan)), 0);
  EXPECT_EQ(at_run_time<std::int32_t>(Half(-3.75f)), -3);
  EXPECT_EQ(at_run_time<std::int8_t>(Float8E4M3(448.0f)), 127);
}

TEST(Convert, IntegersAndBools) {
  EXPECT_EQ(convert<std::uint8_t>(std::int32_t{-1}), 255);
  EXPECT_EQ(convert<std::int8_t>(std::int64_t{384}), -128);
  EXPECT_EQ(convert<float>(std::int64_t{16777217}), 16777216.0f);
  EXPECT_EQ(convert<double>(std::int64_t{9007199254740993}), 9007199254740992.0);
  EXPECT_EQ(convert<float>(0x1.000001p0 + 0x1p-50), 0x1.000002p0f);
  EXPECT_EQ(convert<float>(1e300), HUGE_VALF);
  EXPECT_TRUE(convert<bool>(0.1f));
  EXPECT_TRUE(convert<bool>(std::nan("")));
  EXPECT_FALSE(convert<bool>(-0.0));
  EXPECT_FALSE(convert<bool>(Half(-0.0f)));
  EXPECT_TRUE(convert<bool>(BFloat16::from_bits(1)));
  EXPECT_TRUE(convert<bool>(std::int64_t{1} << 40));
  EXPECT_EQ(convert<std::int64_t>(true), 1);
  EXPECT_EQ(convert<Half>(true).bits, 0x3c00);
  EXPECT_EQ(convert<Float8E5M2>(std::uint8_t{3}).bits, Float8E5M2(3.0f).bits);
}

TEST(DTypes, NamesAndSizes) {
  const struct {
    DType dtype;
    const char* name;
    std::size_t size;
    std::vector<const char*> aliases;
  } rows[] = {{f32, "f32", 4, {"float32", "float", "torch.float32"}},
              {f64, "f64", 8, {"float64", "double"}},
              {f16, "f16", 2, {"float16", "half", "fp16"}},
              {bf16, "bf16", 2, {"bfloat16", "torch.bfloat16"}},
              {f8e4m3, "f8e4m3", 1, {"float8_e4m3fn"}},
              {f8e5m2, "f8e5m2", 1, {"float8_e5m2"}},
              {i64, "i64", 8, {"int64", "long"}},
              {i32, "i32", 4, {"int32", "int"}},
              {i8, "i8", 1, {"int8"}},
              {u8, "u8", 1, {"uint8"}},
              {boolean, "bool", 1, {"boolean", "torch.bool"}}};
  ASSERT_EQ(std::size(rows), static_cast<std::size_t>(kNumDTypes));
  for (const auto& row : rows) {
    EXPECT_STREQ(name(row.dtype), row.name);
    EXPECT_EQ(item_size(row.dtype), row.size);
    EXPECT_EQ(parse_dtype(row.name), row.dtype);
    for (const char* alias : row.aliases) EXPECT_EQ(parse_dtype(alias), row.dtype) << alias;
    visit_dtype(row.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      EXPECT_EQ(tag.value, row.dtype);
      EXPECT_EQ(dtype_of<T>, row.dtype);
      EXPECT_EQ(dtype_of<const T>, row.dtype);
      EXPECT_EQ(sizeof(T), row.size);
    });
    EXPECT_STREQ(visit_all(row.dtype, [](auto tag) { return name(tag.value); }), row.name);
  }
  for (const char* wrong : {"", "f33", "F32", "float16 ", "torch.", "torch.torch.f32", "int4"}) {
    EXPECT_EQ(parse_dtype(wrong), std::nullopt) << wrong;
  }
}

TEST(DTypes, Kinds) {
  std::string floating, integral, low, float8;
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto d = static_cast<DType>(i);
    if (is_floating(d)) floating += name(d) + std::string(" ");
    if (is_integral(d)) integral += name(d) + std::string(" ");
    if (is_low_precision(d)) low += name(d) + std::string(" ");
    if (is_float8(d)) float8 += name(d) + std::string(" ");
  }
  EXPECT_EQ(floating, "f32 f64 f16 bf16 f8e4m3 f8e5m2 ");
  EXPECT_EQ(integral, "i64 i32 i8 u8 ");
  EXPECT_EQ(low, "f16 bf16 ");
  EXPECT_EQ(float8, "f8e4m3 f8e5m2 ");
}

TEST(DTypes, PromoteAsInPyTorch) {
  // torch.promote_types, row by column; "-" where it raises. The one difference is i8 with u8, i16 there.
  const char* names[] = {"f32", "f64", "f16", "bf16", "f8e4m3", "f8e5m2", "i64", "i32", "i8", "u8", "bool"};
  const char* table[11][11] = {
      {"f32", "f64", "f32", "f32", "-", "-", "f32", "f32", "f32", "f32", "f32"},
      {"f64", "f64", "f64", "f64", "-", "-", "f64", "f64", "f64", "f64", "f64"},
      {"f32", "f64", "f16", "f32", "-", "-", "f16", "f16", "f16", "f16", "f16"},
      {"f32", "f64", "f32", "bf16", "-", "-", "bf16", "bf16", "bf16", "bf16", "bf16"},
      {"-", "-", "-", "-", "f8e4m3", "-", "-", "-", "-", "-", "-"},
      {"-", "-", "-", "-", "-", "f8e5m2", "-", "-", "-", "-", "-"},
      {"f32", "f64", "f16", "bf16", "-", "-", "i64", "i64", "i64", "i64", "i64"},
      {"f32", "f64", "f16", "bf16", "-", "-", "i64", "i32", "i32", "i32", "i32"},
      {"f32", "f64", "f16", "bf16", "-", "-", "i64", "i32", "i8", "i32", "i8"},
      {"f32", "f64", "f16", "bf16", "-", "-", "i64", "i32", "i32", "u8", "u8"},
      {"f32", "f64", "f16", "bf16", "-", "-", "i64", "i32", "i8", "u8", "bool"},
  };
  for (int a = 0; a < kNumDTypes; ++a) {
    for (int b = 0; b < kNumDTypes; ++b) {
      const auto promoted = promote_types(*parse_dtype(names[a]), *parse_dtype(names[b]));
      EXPECT_STREQ(promoted ? name(*promoted) : "-", table[a][b]) << names[a] << " with " << names[b];
    }
  }
}

TEST(DTypes, LimitsOfFloatingTypes) {
  auto check_standard = [](DType dtype, auto zero) {
    using Limits = std::numeric_limits<decltype(zero)>;
    EXPECT_EQ(finfo(dtype).max, static_cast<double>(Limits::max()));
    EXPECT_EQ(finfo(dtype).lowest, static_cast<double>(Limits::lowest()));
    EXPECT_EQ(finfo(dtype).smallest_normal, static_cast<double>(Limits::min()));
    EXPECT_EQ(finfo(dtype).smallest_subnormal, static_cast<double>(Limits::denorm_min()));
    EXPECT_EQ(finfo(dtype).eps, static_cast<double>(Limits::epsilon()));
    EXPECT_EQ(finfo(dtype).digits, Limits::digits);
  };
  check_standard(f32, 0.0f);
  check_standard(f64, 0.0);
  auto check_narrow = [](auto zero) {
    using T = decltype(zero);
    const Format& format = FormatOf<T>::format;
    const FloatInfo& info = finfo(dtype_of<T>);
    EXPECT_EQ(info.max, format.value(format.max_finite()));
    EXPECT_EQ(info.lowest, -info.max);
    EXPECT_EQ(info.smallest_normal, format.value(1u << format.mantissa_bits));
    EXPECT_EQ(info.smallest_subnormal, format.value(1));
    const auto one = static_cast<unsigned>(format.bias()) << format.mantissa_bits;
    ASSERT_EQ(format.value(one), 1.0);
    EXPECT_EQ(info.eps, format.value(one + 1) - 1.0);
    EXPECT_EQ(info.digits, format.mantissa_bits + 1);
  };
  check_narrow(Half{});
  check_narrow(BFloat16{});
  check_narrow(Float8E4M3{});
  check_narrow(Float8E5M2{});
  // The maxima that the formats' definitions state.
  EXPECT_EQ(finfo(f16).max, 65504.0);
  EXPECT_EQ(finfo(f8e4m3).max, 448.0);
  EXPECT_EQ(finfo(f8e5m2).max, 57344.0);
  EXPECT_THROW(finfo(i64), DTypeError);
  EXPECT_THROW(finfo(boolean), DTypeError);
}

// Closed forms: a format of p significand bits has 2^(p-1) values in [2^e, 2^(e+1)).
TEST(FloatInfo, SpacingIsTheDistanceToTheNextValue) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float x : {1.0F, 1.5F, 1024.0F, 1e-30F, 1e-44F, 0.0F, 3e38F, -7.0F}) {
    EXPECT_EQ(finfo(f32).spacing(x), static_cast<double>(std::nextafter(std::abs(x), inf)) - std::abs(x)) << x;
  }
  EXPECT_EQ(finfo(f64).spacing(1024), std::nextafter(1024.0, 2000.0) - 1024);
  EXPECT_EQ(finfo(f16).spacing(1), 0x1p-10);
  EXPECT_EQ(finfo(f16).spacing(1024), 1);
  EXPECT_EQ(finfo(f16).spacing(65504), 32);
  EXPECT_EQ(finfo(f16).spacing(0x1p-20), 0x1p-24);
  EXPECT_EQ(finfo(bf16).spacing(1), 0x1p-7);
  EXPECT_EQ(finfo(bf16).spacing(1024), 8);
  EXPECT_EQ(finfo(bf16).spacing(finfo(bf16).max), 0x1p120);
  EXPECT_EQ(finfo(f8e4m3).spacing(1), 0.125);
  EXPECT_EQ(finfo(f8e4m3).spacing(448), 32);
  EXPECT_EQ(finfo(f8e5m2).spacing(1024), 256);
  EXPECT_EQ(finfo(f8e5m2).spacing(57344), 8192);
  EXPECT_THROW(finfo(f8e4m3).spacing(1024), Error);
  EXPECT_THROW(finfo(f16).spacing(std::nan("")), Error);
}

std::string power_text(double x) { return "2^" + std::to_string(std::ilogb(x)); }
std::string number_text(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.5g", x);
  return text;
}

TEST(FloatInfo, ThePageOfFormatsHasTheseNumbers) {
  std::ifstream file(test::goldens_dir() / "../../docs/reference/number-formats.md");
  std::stringstream page;
  page << file.rdbuf();
  for (const DType dtype : {f64, f32, f16, bf16, f8e4m3, f8e5m2}) {
    const FloatInfo& i = finfo(dtype);
    const std::string row =
        "| `" + std::string(name(dtype)) + "` | " + std::to_string(i.digits) + " | " + number_text(i.max) + " | " +
        power_text(i.smallest_normal) + " | " + power_text(i.smallest_subnormal) + " | " + power_text(i.spacing(1)) +
        " | " + (i.max < 1024 ? "none" : power_text(i.spacing(1024))) + " | " + power_text(i.spacing(i.max)) + " |\n";
    EXPECT_NE(page.str().find(row), std::string::npos) << "docs/reference/number-formats.md lacks the row\n" << row;
  }
}

TEST(DTypes, LowestFiniteValueSurvivesStorage) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    visit_dtype(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto stored = convert<double>(convert<T>(lowest_finite(dtype)));
      EXPECT_EQ(stored, lowest_finite(dtype)) << name(dtype);
      EXPECT_TRUE(std::isfinite(stored));
      if constexpr (std::is_integral_v<T>) {
        EXPECT_EQ(stored, static_cast<double>(std::numeric_limits<T>::min()));
      } else {
        EXPECT_EQ(stored, finfo(dtype).lowest);
      }
    });
  }
}

TEST(DTypes, VisitFloatingTakesTheFourComputeTypes) {
  std::string seen;
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    try {
      visit_floating(dtype, [&](auto tag) { seen += name(tag.value) + std::string(" "); });
    } catch (const DTypeError& error) {
      EXPECT_NE(std::string(error.what()).find(name(dtype)), std::string::npos);
    }
  }
  EXPECT_EQ(seen, "f32 f64 f16 bf16 ");
}

}  // namespace
}  // namespace halfstep
