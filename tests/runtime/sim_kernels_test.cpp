// SPDX-License-Identifier: Apache-2.0
// The simulated accelerator's kernels through its table, against closed forms in float64. Expected 16-bit values are
// found by scaling and rounding doubles, not by the bit patterns that the kernels work with.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/runtime/sim_table.h"

namespace halfstep::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Format {
  uint8_t dtype;
  int mantissa, min_exponent;
  double max;
  double smallest() const { return std::ldexp(1, min_exponent - mantissa); }
};
const Format kHalf{HALFSTEP_F16, 10, -14, 65504}, kBFloat{HALFSTEP_BF16, 7, -126, 0x1.fep127};
const Format kF32{HALFSTEP_F32, 23, -126, 0x1.fffffep127};

/// The value of the format that is nearest to v, the even one of two.
double rounded(double v, const Format& f) {
  if (!std::isfinite(v) || v == 0) return v;
  const double unit = std::ldexp(1, std::max(std::ilogb(v), f.min_exponent) - f.mantissa);
  const double result = std::nearbyint(v / unit) * unit;
  return std::abs(result) > f.max ? std::copysign(kInf, v) : result;
}

/// The value of a bit pattern.
double value_of(uint16_t bits, const Format& f) {
  const int exponent = (bits & 0x7fff) >> f.mantissa, mantissa = bits & ((1 << f.mantissa) - 1);
  const int top = 0x7fff >> f.mantissa;
  double v;
  if (exponent == top) {
    v = mantissa != 0 ? kNan : kInf;
  } else if (exponent == 0) {
    v = std::ldexp(mantissa, f.min_exponent - f.mantissa);
  } else {
    v = std::ldexp(mantissa + (1 << f.mantissa), f.min_exponent - f.mantissa + exponent - 1);
  }
  return bits & 0x8000 ? -v : v;
}

std::vector<float> uniform(std::size_t n, unsigned seed, double low = -1, double high = 1) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> draw(static_cast<float>(low), static_cast<float>(high));
  std::vector<float> values(n);
  for (float& v : values) v = draw(engine);
  return values;
}

using SimKernels = KernelCalls;

DeviceTensor turned(DeviceTensor t) {
  std::swap(t.sizes[0], t.sizes[1]);
  std::swap(t.strides[0], t.strides[1]);
  return t;
}

// --- conversions

TEST_F(SimKernels, EveryPatternOf16BitsConvertsBothWays) {
  std::vector<int16_t> bits(65536);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<int16_t>(i);
  for (const Format& f : {kHalf, kBFloat}) {
    const DeviceTensor narrow = queue.tensor(bits, {65536}, f.dtype), wide = queue.empty({65536}),
                       back = queue.empty({65536}, f.dtype);
    call("to", f.dtype, {narrow}, {wide});
    call("to", HALFSTEP_F32, {wide}, {back});
    const auto floats = queue.read<float>(wide);
    const auto again = queue.read<uint16_t>(back);
    for (std::size_t i = 0; i < bits.size(); ++i) {
      const auto pattern = static_cast<uint16_t>(i);
      const double expected = value_of(pattern, f);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(floats[i])) << i;
        ASSERT_TRUE(std::isnan(value_of(again[i], f))) << i;
      } else {
        ASSERT_EQ(static_cast<double>(floats[i]), expected) << i;
        ASSERT_EQ(again[i], pattern);
      }
    }
  }
}

TEST_F(SimKernels, NarrowingRoundsToNearestEvenOnce) {
  for (const Format& f : {kHalf, kBFloat}) {
    // Around every value: itself, the middle to the next, and that a little less and more.
    std::vector<double> values = {0,
                                  f.max,
                                  f.max * (1 + std::ldexp(1, -f.mantissa - 2)),
                                  f.max + std::ldexp(1, std::ilogb(f.max) - f.mantissa - 1),
                                  kInf,
                                  f.smallest() / 2,
                                  f.smallest() * 0.75};
    for (uint32_t bits = 1; bits < 0x7fffu; bits += 37) {
      const double v = value_of(static_cast<uint16_t>(bits), f), next = value_of(static_cast<uint16_t>(bits + 1), f);
      if (!std::isfinite(v) || !std::isfinite(next)) continue;
      const double middle = (v + next) / 2;
      values.insert(values.end(), {v, middle, std::nextafter(middle, 0), std::nextafter(middle, kInf), -middle});
    }
    const auto n = static_cast<int64_t>(values.size());
    const DeviceTensor wide = queue.tensor(values), narrow = queue.empty({n}, f.dtype);
    call("to", HALFSTEP_F64, {wide}, {narrow});
    const auto results = doubles(narrow);
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(results[i], rounded(values[i], f)) << values[i];
    // The same by way of floats, which are conversions of their own.
    std::vector<float> floats(values.begin(), values.end());
    const DeviceTensor from = queue.tensor(floats);
    call("to", HALFSTEP_F32, {from}, {narrow});
    const auto of_floats = doubles(narrow);
    for (std::size_t i = 0; i < floats.size(); ++i) {
      ASSERT_EQ(of_floats[i], rounded(static_cast<double>(floats[i]), f)) << floats[i];
    }
  }
}

TEST_F(SimKernels, IntegersConvertAsOnTheCpu) {
  const std::vector<float> values = {-1.9f, 300, -300, kNan, static_cast<float>(kInf), 3e9f, -3e9f, 0.5f};
  const auto n = static_cast<int64_t>(values.size());
  const DeviceTensor from = queue.tensor(values), i8 = queue.empty({n}, HALFSTEP_I8),
                     i32 = queue.empty({n}, HALFSTEP_I32), u8 = queue.empty({n}, HALFSTEP_U8),
                     flag = queue.empty({n}, HALFSTEP_BOOL);
  for (const auto& to : {i8, i32, u8, flag}) call("copy", HALFSTEP_F32, {to, from}, {to});
  EXPECT_EQ(doubles(i8), (std::vector<double>{-1, 127, -128, 0, 127, 127, -128, 0}));
  EXPECT_EQ(doubles(i32), (std::vector<double>{-1, 300, -300, 0, 2147483647, 2147483647, -2147483648.0, 0}));
  EXPECT_EQ(doubles(u8), (std::vector<double>{0, 255, 0, 0, 255, 255, 0, 0}));
  EXPECT_EQ(doubles(flag), (std::vector<double>{1, 1, 1, 1, 1, 1, 1, 1}));
  // Integers to smaller ones wrap around; the middle between two bf16 values that a double can't hold goes up.
  const DeviceTensor wide = queue.tensor(std::vector<int64_t>{300, -1, (int64_t{257} << 54) + 1, int64_t{257} << 54}),
                     byte = queue.empty({4}, HALFSTEP_U8), brain = queue.empty({4}, HALFSTEP_BF16);
  call("to", HALFSTEP_I64, {wide}, {byte});
  EXPECT_EQ(doubles(byte), (std::vector<double>{44, 255, 1, 0}));
  call("to", HALFSTEP_I64, {wide}, {brain});
  EXPECT_EQ(doubles(brain), (std::vector<double>{300, -1, 0x1.02p62, 0x1p62}));
}

TEST_F(SimKernels, EightBitFloatsGoThereAndBack) {
  std::vector<uint8_t> bits(256);
  for (std::size_t i = 0; i < 256; ++i) bits[i] = static_cast<uint8_t>(i);
  for (const uint8_t dtype : {HALFSTEP_F8E4M3, HALFSTEP_F8E5M2}) {
    const DeviceTensor narrow = queue.tensor(bits, {256}, dtype), back = queue.empty({256}, dtype);
    const DeviceTensor wide = queue.empty({256});
    call("to", dtype, {narrow}, {wide});
    call("to", HALFSTEP_F32, {wide}, {back});
    const auto again = queue.read<uint8_t>(back);
    const auto values = doubles(narrow);
    for (std::size_t i = 0; i < 256; ++i) {
      if (!std::isnan(values[i])) {
        ASSERT_EQ(again[i], bits[i]) << i;
      }
    }
    EXPECT_EQ(values[0x38], dtype == HALFSTEP_F8E4M3 ? 1 : 0.5);
  }
  const DeviceTensor large = make({460, 1000, -500, 1e-9f, 0x1.8p-9f, 0x1p-10f}, {6}, HALFSTEP_F8E4M3);
  EXPECT_EQ(doubles(large), (std::vector<double>{448, 448, -448, 0, 0x1p-8, 0}));
  const DeviceTensor wider = make({61440, 61439, -1e6f, 0x1p-17f}, {4}, HALFSTEP_F8E5M2);
  EXPECT_EQ(doubles(wider), (std::vector<double>{kInf, 57344, -kInf, 0}));
}

// --- elementwise

TEST_F(SimKernels, ArithmeticRoundsOnce) {
  const auto x = uniform(1000, 1, -100, 100), y = uniform(1000, 2, -3, 3);
  for (const Format& f : {kHalf, kBFloat, kF32}) {
    const DeviceTensor a = make(x, {1000}, f.dtype), b = make(y, {1000}, f.dtype), to = queue.empty({1000}, f.dtype);
    const auto p = doubles(a), q = doubles(b);
    const halfstep_alpha_attributes one = {1, 1};
    const halfstep_scalar_attributes third = {{1.0 / 3, 0, 2}};
    const double number = rounded(1.0 / 3, kF32);  // numbers are float32 where floats compute in it
    const auto check = [&](const char* op, auto&& expected) {
      const auto r = doubles(to);
      for (std::size_t i = 0; i < r.size(); ++i) ASSERT_EQ(r[i], rounded(expected(p[i], q[i]), f)) << op << ' ' << i;
    };
    call("add", f.dtype, {a, b}, {to}, &one);
    check("add", [](double s, double t) { return s + t; });
    call("sub", f.dtype, {a, b}, {to}, &one);
    check("sub", [](double s, double t) { return s - t; });
    call("mul", f.dtype, {a, b}, {to});
    check("mul", [](double s, double t) { return s * t; });
    call("div", f.dtype, {a, b}, {to});
    check("div", [](double s, double t) { return s / t; });
    call("mul_scalar", f.dtype, {a}, {to}, &third);
    // In float32 first, as everywhere: the number has more digits than the format.
    check("mul_scalar", [&](double s, double) { return rounded(s * number, kF32); });
    call("div_scalar", f.dtype, {a}, {to}, &third);
    check("div_scalar", [&](double s, double) { return rounded(s / number, kF32); });
  }
  // In float32 the product with alpha is not rounded by itself.
  const DeviceTensor a = queue.tensor(std::vector<float>{-1}), b = queue.tensor(std::vector<float>{1 + 0x1p-12f});
  const halfstep_alpha_attributes alpha = {1 + 0x1p-12, 1};
  call("add", HALFSTEP_F32, {a, b}, {a}, &alpha);
  EXPECT_EQ(queue.read<float>(a)[0], 0x1p-11f + 0x1p-24f);
}

TEST_F(SimKernels, ShapesBroadcastAndStridesAreFollowed) {
  const DeviceTensor column = queue.tensor(std::vector<float>{1, 2, 3}, {3, 1}),
                     row = queue.tensor(std::vector<float>{10, 20, 30, 40}), to = queue.empty({4, 3});
  const halfstep_alpha_attributes two = {2, 2};
  call("sub", HALFSTEP_F32, {row, column}, {turned(to)}, &two);  // [3, 4], its columns dense
  EXPECT_EQ(queue.read<float>(to), (std::vector<float>{8, 6, 4, 18, 16, 14, 28, 26, 24, 38, 36, 34}));
  const DeviceTensor copy = queue.empty({3, 4}, HALFSTEP_I32);
  call("copy", HALFSTEP_F32, {turned(to)}, {copy});
  EXPECT_EQ(queue.read<int32_t>(copy), (std::vector<int32_t>{8, 18, 28, 38, 6, 16, 26, 36, 4, 14, 24, 34}));
  DeviceTensor repeated = row;
  repeated.sizes = {2, 4};
  repeated.strides = {0, 1};
  const DeviceTensor half = queue.empty({2, 4}, HALFSTEP_F16);
  call("to", HALFSTEP_F32, {repeated}, {half});
  EXPECT_EQ(doubles(half), (std::vector<double>{10, 20, 30, 40, 10, 20, 30, 40}));
}

TEST_F(SimKernels, IntegersAndBoolsAddUp) {
  const DeviceTensor a = queue.tensor(std::vector<int8_t>{100, -100, 5}),
                     b = queue.tensor(std::vector<int8_t>{100, -100, -7});
  const halfstep_alpha_attributes one = {1, 1}, three = {3, 3};
  const DeviceTensor to = queue.empty({3}, HALFSTEP_I8);
  call("add", HALFSTEP_I8, {a, b}, {to}, &one);
  EXPECT_EQ(doubles(to), (std::vector<double>{-56, 56, -2}));
  call("sub", HALFSTEP_I8, {a, b}, {to}, &three);
  EXPECT_EQ(doubles(to), (std::vector<double>{56, -56, 26}));
  const std::vector<uint8_t> p = {0, 0, 1, 1}, q = {0, 1, 0, 1};
  const DeviceTensor x = queue.tensor(p, {4}, HALFSTEP_BOOL), y = queue.tensor(q, {4}, HALFSTEP_BOOL),
                     z = queue.empty({4}, HALFSTEP_BOOL);
  call("add", HALFSTEP_BOOL, {x, y}, {z}, &one);
  EXPECT_EQ(doubles(z), (std::vector<double>{0, 1, 1, 1}));
  call("mul", HALFSTEP_BOOL, {x, y}, {z});
  EXPECT_EQ(doubles(z), (std::vector<double>{0, 0, 0, 1}));
}

TEST_F(SimKernels, ReluKeepsNotANumber) {
  for (const uint8_t dtype : {HALFSTEP_F32, HALFSTEP_F16}) {
    const DeviceTensor x = make({-2, 3, kNan, -0.f}, {4}, dtype), g = make({5, 6, 7, 8}, {4}, dtype);
    const DeviceTensor to = queue.empty({4}, dtype), back = queue.empty({4}, dtype);
    call("relu", dtype, {x}, {to});
    const auto y = doubles(to);
    EXPECT_EQ(y[0], 0);
    EXPECT_EQ(y[1], 3);
    EXPECT_TRUE(std::isnan(y[2]));
    EXPECT_FALSE(std::signbit(y[3]));
    call("relu_backward", dtype, {g, to}, {back});
    EXPECT_EQ(doubles(back), (std::vector<double>{0, 6, 7, 0}));
  }
}

TEST_F(SimKernels, FillsInEveryDType) {
  for (uint8_t dtype = HALFSTEP_F32; dtype <= HALFSTEP_BOOL; ++dtype) {
    const DeviceTensor t = queue.empty({3, 2}, dtype);
    const halfstep_fill_attributes one = {{1, 1, 1}}, two = {{2.75, 2, 2}};
    call("fill", dtype, {}, {turned(t)}, &one);
    EXPECT_EQ(doubles(t), std::vector<double>(6, 1));
    call("fill", dtype, {}, {t}, &two);
    const double expected = dtype == HALFSTEP_BOOL     ? 1
                            : dtype >= HALFSTEP_I64    ? 2
                            : dtype == HALFSTEP_F8E5M2 ? 3
                                                       : 2.75;
    EXPECT_EQ(doubles(t), std::vector<double>(6, expected)) << int{dtype};
  }
}

// --- matrix products

TEST_F(SimKernels, ProductsKeepTheBoundOfTheirSums) {
  const halfstep_matmul_attributes none = {-1};
  struct Case {
    int64_t m, n, k;
  };
  for (const Case& c : {Case{1, 1, 1}, Case{5, 37, 300}, Case{66, 17, 520}, Case{3, 4, 0}}) {
    const auto xs = uniform(static_cast<std::size_t>(c.m * c.k), 3),
               ys = uniform(static_cast<std::size_t>(c.k * c.n), 4), zs = uniform(static_cast<std::size_t>(c.n), 5);
    for (const Format& f : {kHalf, kBFloat, kF32}) {
      for (const Format& result : {f, kF32}) {
        const DeviceTensor a = make(xs, {c.m, c.k}, f.dtype), b = make(ys, {c.k, c.n}, f.dtype),
                           bias = make(zs, {c.n}, f.dtype), product = queue.empty({c.m, c.n}, result.dtype),
                           layer = queue.empty({c.m, c.n}, result.dtype), weight = queue.empty({c.n, c.k}, f.dtype);
        call("copy", f.dtype, {turned(b)}, {weight});
        call("mm", f.dtype, {a, b}, {product}, &none);
        call("linear", f.dtype, {a, weight, bias}, {layer}, &none);
        const auto p = doubles(a), q = doubles(b), s = doubles(bias), r = doubles(product), l = doubles(layer);
        for (int64_t i = 0; i < c.m; ++i) {
          for (int64_t j = 0; j < c.n; ++j) {
            double sum = 0, magnitude = 0;
            for (int64_t k = 0; k < c.k; ++k) {
              const double term = p[static_cast<std::size_t>(i * c.k + k)] * q[static_cast<std::size_t>(k * c.n + j)];
              sum += term;
              magnitude += std::abs(term);
            }
            const auto at = static_cast<std::size_t>(i * c.n + j);
            const double own = s[static_cast<std::size_t>(j)];
            // Half a unit of the result, and of float32 for each addition.
            const auto bound = [&](double value, double all) {
              return std::ldexp(std::abs(value), -result.mantissa - 1) * 1.001 +
                     std::ldexp(all * static_cast<double>(c.k + 2), -24) + result.smallest();
            };
            ASSERT_NEAR(r[at], sum, bound(sum, magnitude)) << i << ' ' << j;
            ASSERT_NEAR(l[at], sum + own, bound(sum + own, magnitude + std::abs(own))) << i << ' ' << j;
          }
        }
      }
    }
  }
}

TEST_F(SimKernels, BatchesDoublesAndIntegersMultiply) {
  const halfstep_matmul_attributes none = {-1};
  const DeviceTensor a = queue.tensor(std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8}, {2, 2, 2}),
                     b = queue.tensor(std::vector<double>{1, 0, 0, 1, 2, 1, 1, 2}, {2, 2, 2});
  const DeviceTensor c = queue.empty({2, 2, 2}, HALFSTEP_F64);
  call("bmm", HALFSTEP_F64, {a, b}, {c}, &none);
  EXPECT_EQ(doubles(c), (std::vector<double>{1, 2, 3, 4, 16, 17, 22, 23}));
  const int32_t large = 1 << 20;
  const DeviceTensor x = queue.tensor(std::vector<int32_t>{large, 3}, {1, 2}),
                     y = queue.tensor(std::vector<int32_t>{large, -2}, {2, 1});
  const DeviceTensor z = queue.empty({1, 1}, HALFSTEP_I32);
  call("mm", HALFSTEP_I32, {x, y}, {z}, &none);
  EXPECT_EQ(queue.read<int32_t>(z)[0], -6);  // 2^40 - 6 modulo 2^32
  // Matrices that are not contiguous are not for this unit.
  const DeviceTensor w = queue.empty({2, 3});
  EXPECT_EQ(queue.call("mm", HALFSTEP_F32, {turned(w), turned(w)}, {w}, &none), HALFSTEP_FAILED);
  EXPECT_EQ(queue.reason, "input 0 is not contiguous");
  const DeviceTensor infinite = make({static_cast<float>(kInf), 0, 1, 1}, {2, 2}, HALFSTEP_F16),
                     zero = make({0, 0, 1, 1}, {2, 2}, HALFSTEP_F16), to = queue.empty({2, 2}, HALFSTEP_F16);
  call("mm", HALFSTEP_F16, {infinite, zero}, {to}, &none);
  EXPECT_TRUE(std::isnan(doubles(to)[0]));
  EXPECT_EQ(doubles(to)[2], 1);
}

// --- reductions

halfstep_reduce_attributes over(std::initializer_list<int64_t> dims) {
  halfstep_reduce_attributes a = {};
  for (int64_t d : dims) a.dims.values[a.dims.size++] = d;
  a.dtype = -1;
  return a;
}

TEST_F(SimKernels, SumsOverAnyDimensionsAndLayouts) {
  constexpr int64_t kA = 3, kB = 150, kC = 70;
  const auto values = uniform(static_cast<std::size_t>(kA * kB * kC), 6);
  for (const Format& f : {kHalf, kF32}) {
    const DeviceTensor x = make(values, {kA, kB, kC}, f.dtype);
    const auto v = doubles(x);
    const auto at = [&](int64_t i, int64_t j, int64_t k) { return v[static_cast<std::size_t>((i * kB + j) * kC + k)]; };
    const DeviceTensor all = queue.empty({}, f.dtype), rows = queue.empty({kA, kB}, f.dtype),
                       mid = queue.empty({kA, kC}, f.dtype), mean = queue.empty({kB}, f.dtype),
                       wide = queue.empty({kA, kB}, HALFSTEP_F64);
    const auto everything = over({}), last = over({2}), middle = over({1}), outer = over({0, -1});
    call("sum", f.dtype, {x}, {all}, &everything);
    call("sum", f.dtype, {x}, {rows}, &last);
    call("sum", f.dtype, {x}, {mid}, &middle);
    call("mean", f.dtype, {x}, {mean}, &outer);
    call("sum", f.dtype, {x}, {wide}, &last);
    // Half a unit of the result, and of float32 for each addition: neighbours are added up in 32 lanes, at most 256 in
    // each, and five more join the lanes; columns one by one. Beyond that additions are in float64.
    const auto expect = [&](double got, double exact, double magnitude, int64_t additions) {
      ASSERT_NEAR(got, exact,
                  std::ldexp(std::abs(exact), -f.mantissa - 1) * 1.001 +
                      std::ldexp(magnitude * static_cast<double>(additions), -24) + 1e-9);
    };
    const auto in_lanes = [](int64_t n) { return std::min<int64_t>((n + 31) / 32, 256) + 5; };
    double total = 0, total_magnitude = 0;
    for (double e : v) total += e, total_magnitude += std::abs(e);
    expect(doubles(all)[0], total, total_magnitude, in_lanes(kA * kB * kC));
    const auto r = doubles(rows), m = doubles(mid), mean_values = doubles(mean), w = doubles(wide);
    for (int64_t i = 0; i < kA; ++i) {
      for (int64_t j = 0; j < kB; ++j) {
        double sum = 0, magnitude = 0;
        for (int64_t k = 0; k < kC; ++k) sum += at(i, j, k), magnitude += std::abs(at(i, j, k));
        expect(r[static_cast<std::size_t>(i * kB + j)], sum, magnitude, in_lanes(kC));
        ASSERT_NEAR(w[static_cast<std::size_t>(i * kB + j)], sum, 1e-12);
      }
      for (int64_t k = 0; k < kC; ++k) {
        double sum = 0, magnitude = 0;
        for (int64_t j = 0; j < kB; ++j) sum += at(i, j, k), magnitude += std::abs(at(i, j, k));
        expect(m[static_cast<std::size_t>(i * kC + k)], sum, magnitude, kB);
      }
    }
    for (int64_t j = 0; j < kB; ++j) {
      constexpr auto kCount = static_cast<double>(kA * kC);
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < kA; ++i) {
        for (int64_t k = 0; k < kC; ++k) sum += at(i, j, k), magnitude += std::abs(at(i, j, k));
      }
      expect(mean_values[static_cast<std::size_t>(j)], sum / kCount, magnitude / kCount, in_lanes(kA * kC));
    }
  }
}

TEST_F(SimKernels, IntegersAreSummedIn64Bits) {
  const DeviceTensor x = queue.tensor(std::vector<int8_t>(1000, 127), {1000}), to = queue.empty({}, HALFSTEP_I64);
  const auto all = over({});
  call("sum", HALFSTEP_I8, {x}, {to}, &all);
  EXPECT_EQ(queue.read<int64_t>(to)[0], 127000);
  const DeviceTensor none = queue.empty({0, 3}), sums = queue.empty({3});
  const auto first = over({0});
  call("sum", HALFSTEP_F32, {none}, {sums}, &first);
  EXPECT_EQ(doubles(sums), (std::vector<double>{0, 0, 0}));
}

TEST_F(SimKernels, NormsOfManyTensorsTogether) {
  const DeviceTensor a = make({3, -1}, {2}, HALFSTEP_F32), b = make({-4, 2, 0}, {3, 1}, HALFSTEP_F16),
                     to = queue.empty({});
  const auto norm = [&](double p) {
    const halfstep_clip_attributes attributes = {0, p};
    call("multi_norm", HALFSTEP_F32, {a, b}, {to}, &attributes);
    return doubles(to)[0];
  };
  EXPECT_EQ(norm(1), 10);
  EXPECT_NEAR(norm(2), std::sqrt(30), 1e-6);
  EXPECT_NEAR(norm(3), std::cbrt(27 + 1 + 64 + 8), 1e-6);
  EXPECT_EQ(norm(kInf), 4);
}

}  // namespace
}  // namespace halfstep::test
