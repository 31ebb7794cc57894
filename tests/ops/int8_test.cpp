// SPDX-License-Identifier: Apache-2.0
// Products and other ops of 8-bit integers against plain loops of 32-bit and float64 numbers in this file.
#include "halfstep/ops/int8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/resample.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using Integers = std::vector<std::int64_t>;

Tensor bytes(const Shape& sizes, DType dtype) {
  return dtype == u8 ? randint(0, 256, sizes, {.dtype = u8}) : randint(-128, 128, sizes, {.dtype = i8});
}

struct ConvSizes {
  std::int64_t n, c, h, w, o, kh, kw, stride, padding, dilation, groups;
  std::int64_t out(std::int64_t size, std::int64_t k) const {
    return (size + 2 * padding - dilation * (k - 1) - 1) / stride + 1;
  }
};

// sum((x - zero) w) of every place, [n, o, oh, ow], in 64 bits.
Integers plain_sums(const Tensor& input, const Tensor& weight, std::int64_t zero, const ConvSizes& s) {
  const Integers x = input.to_vector<std::int64_t>(), w = weight.to_vector<std::int64_t>();
  const std::int64_t oh = s.out(s.h, s.kh), ow = s.out(s.w, s.kw), channels = s.c / s.groups, filters = s.o / s.groups;
  Integers sums;
  for (std::int64_t n = 0; n < s.n; ++n) {
    for (std::int64_t o = 0; o < s.o; ++o) {
      for (std::int64_t i = 0; i < oh * ow; ++i) {
        std::int64_t sum = 0;
        for (std::int64_t k = 0; k < s.kh * s.kw; ++k) {
          const std::int64_t h = i / ow * s.stride - s.padding + k / s.kw * s.dilation;
          const std::int64_t v = i % ow * s.stride - s.padding + k % s.kw * s.dilation;
          if (h < 0 || h >= s.h || v < 0 || v >= s.w) continue;
          for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t from = o / filters * channels + c;
            sum += (x[static_cast<std::size_t>(((n * s.c + from) * s.h + h) * s.w + v)] - zero) *
                   w[static_cast<std::size_t>((o * channels + c) * s.kh * s.kw + k)];
          }
        }
        sums.push_back(sum);
      }
    }
  }
  return sums;
}

double activated(double v, const Int8ProductOptions& o) {
  switch (o.activation) {
    case Int8Activation::relu:
      return std::max(v, 0.0);
    case Int8Activation::hardtanh:
      return std::clamp(v, o.a, o.b);
    case Int8Activation::silu:
      return v / (1 + std::exp(-v));
    case Int8Activation::leaky_relu:
      return v > 0 ? v : v * o.a;
    case Int8Activation::hardswish:
      return v * std::clamp(v + 3, 0.0, 6.0) / 6;
    default:
      return v;
  }
}

// What the sums of products are to become, in float64, and how large its terms are.
struct Exact {
  double value, size;
};
struct Operands {
  Tensor scale, bias, residual;  // the last two may be undefined
};
std::vector<Exact> exact_values(const Integers& sums, const Operands& t, const Int8ProductOptions& o,
                                std::int64_t channels, std::int64_t places) {
  const auto scale = t.scale.to_vector<double>();
  const auto bias = t.bias.defined() ? t.bias.to_vector<double>() : std::vector<double>(scale.size(), 0);
  const bool real = t.bias.defined() && t.bias.is_floating();
  const Integers r = t.residual.defined() ? t.residual.to_vector<std::int64_t>() : Integers();
  std::vector<Exact> result;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto c = static_cast<std::size_t>(static_cast<std::int64_t>(i) / places % channels);
    const double factor = o.input.scale * scale[c], product = static_cast<double>(sums[i]) * factor,
                 shift = real ? bias[c] : bias[c] * factor,
                 rest = r.empty() ? 0 : static_cast<double>(r[i] - o.residual.zero_point) * o.residual.scale,
                 rest_size = r.empty() ? 0 : 512 * o.residual.scale;
    const double v = activated(product + shift + rest, o);
    result.push_back({v, std::abs(product) + std::abs(shift) + rest_size});
  }
  return result;
}

// Up to here a result may be wrong before it is rounded: of float32's roundings there are at most eight (two scales
// that are rounded, product, bias, two sums, activation, last factor), each of 2^-24 of the terms' size; oneDNN's
// sigmoid has an error of 2^-20.
double slack(const Exact& e, const Int8ProductOptions& o) {
  const bool sigmoid = o.activation == Int8Activation::silu;
  return (8 * 0x1p-24 + (sigmoid ? 0x1p-20 : 0)) * e.size;
}

void expect_product(const Tensor& got, const std::vector<Exact>& want, const Int8ProductOptions& o,
                    const std::string& what) {
  ASSERT_EQ(static_cast<std::size_t>(got.numel()), want.size()) << what;
  const auto values = got.to_vector<double>();
  if (!o.output) {
    EXPECT_EQ(got.dtype(), o.dtype) << what;
    const double u = o.dtype == f32 ? 0 : o.dtype == f16 ? 0x1p-11 : 0x1p-8;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double bound = slack(want[i], o) + u * std::abs(want[i].value) + (o.dtype == f16 ? 0x1p-25 : 0);
      ASSERT_NEAR(values[i], want[i].value, bound) << what << " element " << i;
    }
    return;
  }
  EXPECT_EQ(got.dtype(), o.output->dtype) << what;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double t = want[i].value / o.output->scale, error = slack(want[i], o) / o.output->scale;
    const auto integer = [&](double v) {
      const double q = std::nearbyint(v) + static_cast<double>(o.output->zero_point);
      return std::clamp(q, static_cast<double>(o.output->quant_min), static_cast<double>(o.output->quant_max));
    };
    // One integer, unless the value is that close to the middle of two.
    ASSERT_GE(values[i], integer(t - error)) << what << " element " << i << " of value " << t;
    ASSERT_LE(values[i], integer(t + error)) << what << " element " << i << " of value " << t;
  }
}

const ConvSizes kSizes[] = {
    // n, c, h, w, o, kh, kw, stride, padding, dilation, groups
    {2, 3, 13, 11, 8, 7, 7, 2, 3, 1, 1}, {1, 16, 9, 9, 24, 3, 3, 1, 1, 1, 1},    {2, 32, 7, 7, 16, 1, 1, 1, 0, 1, 1},
    {3, 8, 8, 6, 40, 1, 1, 2, 0, 1, 1},  {1, 24, 10, 10, 24, 3, 3, 1, 1, 1, 24}, {2, 16, 7, 5, 16, 5, 5, 2, 2, 1, 16},
    {1, 12, 8, 8, 20, 3, 3, 1, 1, 1, 4}, {2, 5, 9, 7, 3, 3, 2, 1, 1, 2, 1},      {1, 17, 5, 5, 33, 3, 3, 1, 0, 1, 1},
    {5, 64, 4, 4, 64, 3, 3, 1, 1, 1, 1}, {1, 1, 6, 6, 1, 3, 3, 1, 1, 1, 1},      {1, 256, 14, 14, 64, 3, 3, 1, 1, 1, 1},
};

struct ConvOperands : Operands {
  Tensor x, w;
};
ConvOperands operands(const ConvSizes& s, DType input, DType residual) {
  ConvOperands t;
  t.x = bytes({s.n, s.c, s.h, s.w}, input);
  t.w = bytes({s.o, s.c / s.groups, s.kh, s.kw}, i8);
  t.scale = rand({s.o}) * 0.02 + 0.001;
  t.bias = randint(-5000, 5000, {s.o}, {.dtype = i32});
  t.residual = bytes({s.n, s.o, s.out(s.h, s.kh), s.out(s.w, s.kw)}, residual);
  return t;
}

constexpr Int8Activation kActivations[] = {Int8Activation::none, Int8Activation::relu,       Int8Activation::hardtanh,
                                           Int8Activation::silu, Int8Activation::leaky_relu, Int8Activation::hardswish};

Conv2dInt8Options options_of(const ConvSizes& s) {
  Conv2dInt8Options o;
  o.stride = {s.stride};
  o.padding = {s.padding};
  o.dilation = {s.dilation};
  o.groups = s.groups;
  return o;
}

// The grid's range covers about the values that come out: a sum of k products of random bytes is about 5400 sqrt(k).
double output_scale(const ConvSizes& s, double factor) {
  return factor * 5400 * std::sqrt(static_cast<double>(s.c / s.groups * s.kh * s.kw)) / 64;
}

TEST(Conv2dInt8, IsTheRoundedExactSum) {
  manual_seed(1);
  int number = 0;
  for (const ConvSizes& s : kSizes) {
    for (const DType input : {u8, i8}) {
      for (const Int8Activation activation : kActivations) {
        for (const bool with_residual : {false, true}) {
          ++number;
          const DType residual = number % 3 == 0 ? i8 : u8;
          ConvOperands t = operands(s, input, residual);
          if (number % 5 == 0) t.bias = {};
          if (number % 5 > 2) t.bias = randn({s.o});
          if (!with_residual) t.residual = {};
          Conv2dInt8Options o = options_of(s);
          o.input = {.scale = 0.013, .zero_point = input == u8 ? 101 : number % 2 == 0 ? 0 : -9};
          o.residual = {.scale = 0.7, .zero_point = residual == u8 ? 77 : -3};
          o.activation = activation;
          o.a = activation == Int8Activation::hardtanh ? -3 : 0.1;
          o.b = 6;
          const Integers sums = plain_sums(t.x, t.w, o.input.zero_point, s);
          const auto want = exact_values(sums, t, o, s.o, s.out(s.h, s.kh) * s.out(s.w, s.kw));
          const std::string what = "case " + std::to_string(number) + " of " + std::to_string(s.c) + " to " +
                                   std::to_string(s.o) + " channels";
          const double scale = activation == Int8Activation::hardtanh ? 0.04 : output_scale(s, 0.013 * 0.011);
          o.output = Int8Grid{.scale = scale, .zero_point = 33, .quant_min = 0, .quant_max = 255, .dtype = u8};
          expect_product(conv2d_int8(t.x, t.w, t.scale, t.bias, t.residual, o), want, o, what + " u8");
          o.output = Int8Grid{.scale = scale, .zero_point = 0, .quant_min = -127, .quant_max = 120, .dtype = i8};
          expect_product(conv2d_int8(t.x, t.w, t.scale, t.bias, t.residual, o), want, o, what + " i8");
          o.output = {};
          o.dtype = number % 3 == 0 ? f32 : number % 3 == 1 ? f16 : bf16;
          expect_product(conv2d_int8(t.x, t.w, t.scale, t.bias, t.residual, o), want, o, what + " floating");
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

// With powers of two as scales float32 is exact: no slack, and many values are in the middle of two integers, which go
// to the even one of those before the zero point is added.
TEST(Conv2dInt8, RoundsTiesToEvenBeforeTheZeroPoint) {
  manual_seed(2);
  const ConvSizes s{2, 16, 9, 9, 24, 3, 3, 1, 1, 1, 1};
  std::int64_t ties = 0;
  for (const DType input : {u8, i8}) {
    for (const bool with_residual : {false, true}) {
      for (const std::int64_t zero : {0, 7, 90}) {
        ConvOperands t;
        t.x = randint(0, 8, {s.n, s.c, s.h, s.w}, {.dtype = input});
        t.w = randint(-1, 2, {s.o, s.c, s.kh, s.kw}, {.dtype = i8});
        t.scale = ones({s.o});
        t.bias = randint(-20, 20, {s.o}, {.dtype = i32});
        if (with_residual) t.residual = bytes({s.n, s.o, 9, 9}, u8);
        Conv2dInt8Options o = options_of(s);
        o.input = {.scale = 0.5, .zero_point = 3};
        o.residual = {.scale = 0.25, .zero_point = 111};
        o.output = Int8Grid{.scale = 1, .zero_point = zero, .quant_min = 0, .quant_max = 255, .dtype = u8};
        const auto want = exact_values(plain_sums(t.x, t.w, 3, s), t, o, s.o, 81);
        const auto got = conv2d_int8(t.x, t.w, t.scale, t.bias, t.residual, o).to_vector<std::int64_t>();
        for (std::size_t i = 0; i < want.size(); ++i) {
          const double v = want[i].value;
          ties += v - std::floor(v) == 0.5 && v > -static_cast<double>(zero) && v < 160;
          const double q = std::clamp(std::nearbyint(v) + static_cast<double>(zero), 0.0, 255.0);
          ASSERT_EQ(got[i], static_cast<std::int64_t>(q)) << "element " << i << " of value " << v;
        }
      }
    }
  }
  EXPECT_GT(ties, 2000);
}

TEST(LinearInt8, IsTheRoundedExactSum) {
  manual_seed(3);
  for (const std::int64_t rows : {1, 2, 7, 64, 300}) {
    for (const std::int64_t k : {1, 16, 77, 512}) {
      for (const std::int64_t outputs : {1, 10, 64, 130, 2100}) {
        if (outputs > 1000 && (rows > 2 || k < 512)) continue;  // one row of many weights is cut by them
        for (const DType input : {u8, i8}) {
          const ConvSizes s{rows, k, 1, 1, outputs, 1, 1, 1, 0, 1, 1};
          Operands t;
          const Tensor x = bytes({rows, k}, input), w = bytes({outputs, k}, i8);
          t.scale = rand({outputs}) * 0.02 + 0.001;
          t.bias = randint(-3000, 3000, {outputs}, {.dtype = i32});
          if (rows % 2 == 1) t.residual = bytes({rows, outputs}, u8);
          Int8ProductOptions o;
          o.input = {.scale = 0.02, .zero_point = input == u8 ? 12 : -5};
          o.residual = {.scale = 0.3, .zero_point = 100};
          o.activation = k == 77 ? Int8Activation::silu : Int8Activation::relu;
          const auto want = exact_values(plain_sums(x, w, o.input.zero_point, s), t, o, outputs, 1);
          const std::string what = std::to_string(rows) + " x " + std::to_string(k) + " to " + std::to_string(outputs);
          o.output = Int8Grid{.scale = output_scale(s, 0.02 * 0.011), .zero_point = 5};
          expect_product(linear_int8(x, w, t.scale, t.bias, t.residual, o), want, o, what);
          o.output = {};
          expect_product(linear_int8(x, w, t.scale, t.bias, t.residual, o), want, o, what + " floating");
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
  const Tensor x = bytes({2, 3, 4}, u8), w = bytes({5, 4}, i8);
  EXPECT_EQ(linear_int8(x, w, ones({5})).sizes(), (Shape{2, 3, 5}));
  EXPECT_EQ(linear_int8(bytes({0, 4}, u8), w, ones({5})).sizes(), (Shape{0, 5}));
  EXPECT_EQ(linear_int8(bytes({4}, u8), w, ones({5})).sizes(), Shape{5});
}

TEST(Int8, DoesNotDependOnThreadsOrLayout) {
  manual_seed(4);
  const int threads = num_threads();
  for (const ConvSizes& s : kSizes) {
    const ConvOperands t = operands(s, u8, u8);
    Conv2dInt8Options o = options_of(s);
    o.input = {.scale = 0.013, .zero_point = 101};
    o.residual = {.scale = 0.7, .zero_point = 77};
    o.activation = Int8Activation::silu;
    o.output = Int8Grid{.scale = output_scale(s, 0.013 * 0.011), .zero_point = 33};
    set_num_threads(1);
    const auto one = conv2d_int8(t.x, t.w, t.scale, t.bias, t.residual, o).to_vector<std::int64_t>();
    for (const int n : {2, 3, 7}) {
      set_num_threads(n);
      EXPECT_EQ(conv2d_int8(t.x, t.w, t.scale, t.bias, t.residual, o).to_vector<std::int64_t>(), one);
    }
    const auto last = MemoryFormat::channels_last;
    const Tensor y =
        conv2d_int8(t.x.contiguous(last), t.w.contiguous(last), t.scale, t.bias, t.residual.contiguous(last), o);
    EXPECT_EQ(y.to_vector<std::int64_t>(), one);
    EXPECT_TRUE(y.is_contiguous(last));
  }
  set_num_threads(threads);
}

TEST(AddInt8, IsTheRoundedSum) {
  manual_seed(5);
  for (const DType a_dtype : {u8, i8}) {
    for (const DType b_dtype : {u8, i8}) {
      for (const bool relu : {false, true}) {
        const Int8Grid a_grid{.scale = 0.031, .zero_point = 9}, b_grid{.scale = 0.047, .zero_point = -0};
        Tensor a = bytes({3, 37, 5, 7}, a_dtype), b = bytes({3, 37, 5, 7}, b_dtype);
        const Int8Grid grids[] = {{.scale = 0.06, .zero_point = 21, .quant_min = 3, .quant_max = 250, .dtype = u8},
                                  {.scale = 0.06, .zero_point = -4, .quant_min = -128, .quant_max = 127, .dtype = i8}};
        for (int turn = 0; turn < 2; ++turn) {
          const Integers x = a.to_vector<std::int64_t>(), y = b.to_vector<std::int64_t>();
          const auto exact = [&](std::size_t i) {
            const double v = static_cast<double>(x[i] - 9) * 0.031 + static_cast<double>(y[i]) * 0.047;
            return relu ? std::max(v, 0.0) : v;
          };
          for (const Int8Grid& grid : grids) {
            const Tensor got = add_int8(a, b, a_grid, b_grid, grid, relu);
            EXPECT_EQ(got.dtype(), grid.dtype);
            EXPECT_EQ(got.strides(), a.strides());
            const Integers q = got.to_vector<std::int64_t>();
            for (std::size_t i = 0; i < q.size(); ++i) {
              // Terms of at most 14, six roundings.
              const double t = exact(i) / 0.06, error = 6 * 0x1p-24 * 28 / 0.06;
              const auto integer = [&](double v) {
                return std::clamp(static_cast<std::int64_t>(std::nearbyint(v)) + grid.zero_point, grid.quant_min,
                                  grid.quant_max);
              };
              ASSERT_GE(q[i], integer(t - error));
              ASSERT_LE(q[i], integer(t + error));
            }
          }
          const auto v = add_int8(a, b, a_grid, b_grid, {}, relu).to_vector<double>();
          for (std::size_t i = 0; i < v.size(); ++i) ASSERT_NEAR(v[i], exact(i), 6 * 0x1p-24 * 28);
          EXPECT_EQ(add_int8(a, b, a_grid, b_grid, {}, relu, bf16).dtype(), bf16);
          a = a.contiguous(MemoryFormat::channels_last);  // and b as it is
        }
      }
    }
  }
}

TEST(LookupInt8, ReadsTheTable) {
  manual_seed(6);
  for (const DType from : {u8, i8}) {
    for (const DType to : {u8, i8}) {
      const Tensor table = bytes({256}, to);
      const Integers entries = table.to_vector<std::int64_t>();
      for (const std::int64_t n : {1, 63, 64, 1000, 200000}) {
        const Tensor x = bytes({n}, from), y = lookup_int8(x, table);
        EXPECT_EQ(y.dtype(), to);
        const Integers q = x.to_vector<std::int64_t>(), got = y.to_vector<std::int64_t>();
        for (std::size_t i = 0; i < q.size(); ++i) {
          ASSERT_EQ(got[i], entries[static_cast<std::size_t>(q[i] & 255)]) << i;
        }
      }
      const Tensor strided = bytes({40, 50}, from).t();
      const Integers q = strided.to_vector<std::int64_t>(), got = lookup_int8(strided, table).to_vector<std::int64_t>();
      for (std::size_t i = 0; i < q.size(); ++i) ASSERT_EQ(got[i], entries[static_cast<std::size_t>(q[i] & 255)]);
    }
  }
}

TEST(MeanInt8, IsTheRoundedMean) {
  manual_seed(7);
  for (const DType dtype : {u8, i8}) {
    for (const auto format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
      for (const std::int64_t c : {1, 37, 512}) {
        const Tensor x = bytes({2, c, 7, 6}, dtype).contiguous(format);
        const Int8Grid in{.scale = 0.05, .zero_point = 30};
        const Int8Grid out{.scale = 0.01, .zero_point = 100, .quant_min = 1, .quant_max = 254, .dtype = u8};
        const Tensor got = mean_int8(x, {2, 3}, false, in, out);
        EXPECT_EQ(got.sizes(), (Shape{2, c}));
        EXPECT_EQ(mean_int8(x, {-2, -1}, true, in, out).sizes(), (Shape{2, c, 1, 1}));
        const Integers q = x.to_vector<std::int64_t>(), y = got.to_vector<std::int64_t>();
        const auto v = mean_int8(x, {2, 3}, false, in).to_vector<double>();
        for (std::size_t i = 0; i < y.size(); ++i) {
          std::int64_t sum = 0;
          for (std::size_t k = 0; k < 42; ++k) sum += q[i * 42 + k] - 30;
          const double mean = static_cast<double>(sum) * 0.05 / 42;
          EXPECT_NEAR(v[i], mean, 2 * 0x1p-24 * std::abs(mean));  // the factor and the product are rounded
          const double error = 4 * 0x1p-24 * std::abs(mean) / 0.01;
          const auto integer = [](double t) {
            return std::clamp<std::int64_t>(static_cast<std::int64_t>(std::nearbyint(t)) + 100, 1, 254);
          };
          EXPECT_GE(y[i], integer(mean / 0.01 - error));
          EXPECT_LE(y[i], integer(mean / 0.01 + error));
        }
      }
    }
  }
  // All of it, and one dimension that isn't the last.
  const Tensor x = bytes({5, 9, 4}, u8);
  double total = 0;
  for (const double v : x.to_vector<double>()) total += v;
  EXPECT_NEAR(mean_int8(x, {}, false, {}).item<double>(), total / 180, 1e-4);
  const auto columns = mean_int8(x, {1}, false, {}).to_vector<double>();
  for (std::size_t i = 0; i < columns.size(); ++i) {
    double sum = 0;
    for (std::size_t k = 0; k < 9; ++k) sum += x.to_vector<double>()[i / 4 * 36 + k * 4 + i % 4];
    EXPECT_NEAR(columns[i], sum / 9, 1e-4);
  }
}

// What only moves or compares bytes gives what the same op gives of their values in float32.
TEST(Int8, PoolsResizesAndMovesAsFloatsDo) {
  manual_seed(8);
  using Function = std::function<Tensor(const Tensor&)>;
  const std::pair<const char*, Function> functions[] = {
      {"max_pool2d 3 2 1", [](const Tensor& x) { return max_pool2d(x, {3}, {.stride = {2}, .padding = {1}}); }},
      {"max_pool2d 5 1 2", [](const Tensor& x) { return max_pool2d(x, {5}, {.stride = {1}, .padding = {2}}); }},
      {"max_pool2d 2",
       [](const Tensor& x) {
         return max_pool2d(x, {2, 3}, {.dilation = {2}, .ceil_mode = true});
       }},
      {"adaptive_max_pool2d",
       [](const Tensor& x) {
         return adaptive_max_pool2d(x, {3, 2});
       }},
      {"interpolate", [](const Tensor& x) { return interpolate(x, {.scale_factor = {2}}); }},
      {"interpolate exact",
       [](const Tensor& x) {
         return interpolate(x, {.size = {5, 20}, .mode = InterpolateMode::nearest_exact});
       }},
      {"cat",
       [](const Tensor& x) {
         return cat({x, x}, 1);
       }},
      {"flip", [](const Tensor& x) { return flip(x, {2}); }},
      {"pad",
       [](const Tensor& x) {
         return pad(x, {1, 2, 3, 4});
       }},
  };
  for (const DType dtype : {u8, i8}) {
    for (const auto format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
      for (const std::int64_t c : {1, 7, 16, 300}) {
        const Tensor x = bytes({2, c, 9, 11}, dtype).contiguous(format);
        for (const auto& [what, f] : functions) {
          const Tensor y = f(x);
          EXPECT_EQ(y.dtype(), dtype) << what;
          EXPECT_EQ(y.to_vector<double>(), f(x.to(f32)).to_vector<double>()) << what << " of " << c;
        }
      }
    }
  }
  const Tensor x = bytes({1, 4, 8, 8}, u8);
  EXPECT_THROW(max_pool2d_with_indices(x, {2}), DTypeError);
  EXPECT_THROW(interpolate(x, {.scale_factor = {2}, .mode = InterpolateMode::bilinear}), DTypeError);
  EXPECT_THROW(avg_pool2d(x, {2}), DTypeError);
}

TEST(Int8, GivesPyTorchsIntegers) {
  int found = 0;
  for (const test::GoldenEntry& e : test::read_goldens("int8.json")) {
    SCOPED_TRACE(e.name);
    ++found;
    std::vector<Tensor> in;
    for (const auto& t : e.inputs) in.push_back(test::to_tensor(t));
    const auto grid = [&](const std::string& prefix) {
      return Int8Grid{.scale = e.real(prefix + "scale"), .zero_point = e.integer(prefix + "zero_point")};
    };
    Tensor y;
    if (e.op == "add_int8") {
      y = add_int8(in[0], in[1], grid("a_"), grid("b_"), grid("output_"), e.flag("relu"));
    } else if (e.op == "mean_int8") {
      y = mean_int8(in[0], {2, 3}, false, grid(""), grid(""));
    } else {
      Conv2dInt8Options o;
      o.input = grid("input_");
      o.output = grid("output_");
      if (in.size() > 4) o.residual = grid("residual_");
      o.activation = e.flag("relu") ? Int8Activation::relu : Int8Activation::none;
      const Tensor residual = in.size() > 4 ? in[4] : Tensor();
      if (e.op == "linear_int8") {
        y = linear_int8(in[0], in[1], in[2], in[3], residual, o);
      } else {
        o.stride = {e.integer("stride")}, o.padding = {e.integer("padding")}, o.groups = e.integer("groups");
        y = conv2d_int8(in[0], in[1], in[2], in[3], residual, o);
      }
    }
    EXPECT_EQ(y.sizes(), Shape(e.outputs[0].shape));
    EXPECT_EQ(y.to_vector<double>(), e.outputs[0].data);
  }
  EXPECT_EQ(found, 13);
}

TEST(Int8, RefusesWhatHasNoMeaning) {
  const Tensor x = zeros({1, 4, 5, 5}, {.dtype = u8}), w = zeros({6, 4, 3, 3}, {.dtype = i8}), s = ones({6});
  const Conv2dInt8Options good;
  EXPECT_NO_THROW(conv2d_int8(x, w, s, {}, {}, good));
  EXPECT_THROW(conv2d_int8(x.to(f32), w, s), DTypeError);
  EXPECT_THROW(conv2d_int8(x, w.to(u8), s), DTypeError);
  EXPECT_THROW(conv2d_int8(x, w, s.to(f16)), DTypeError);
  EXPECT_THROW(conv2d_int8(x, w, s, zeros({6}, {.dtype = f64})), DTypeError);
  EXPECT_THROW(conv2d_int8(x, w, s, zeros({5}, {.dtype = i32})), ShapeError);
  EXPECT_THROW(conv2d_int8(x, w, ones({1})), ShapeError);
  EXPECT_THROW(conv2d_int8(x, w, s, {}, zeros({1, 6, 5, 5}, {.dtype = u8})), ShapeError);
  EXPECT_THROW(conv2d_int8(x, w, s, {}, zeros({1, 6, 3, 3})), DTypeError);
  EXPECT_THROW(conv2d_int8(zeros({1, 5, 5, 5}, {.dtype = u8}), w, s), ShapeError);
  EXPECT_THROW(conv2d_int8(zeros({4, 5, 5}, {.dtype = u8}), w, s), ShapeError);
  EXPECT_THROW(conv2d_int8(zeros({1, 4, 2, 5}, {.dtype = u8}), w, s), ShapeError);
  EXPECT_THROW(conv2d_int8({}, w, s), Error);
  const auto with = [&](auto change) {
    Conv2dInt8Options o;
    o.output = Int8Grid{};
    change(o);
    return [=] { return conv2d_int8(x, w, s, {}, {}, o); };
  };
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {0.0, -1.0, nan, infinity, 1e-60}) {
    EXPECT_THROW(with([&](auto& o) { o.input.scale = bad; })(), Error) << bad;
    EXPECT_THROW(with([&](auto& o) { o.output->scale = bad; })(), Error) << bad;
    EXPECT_THROW(conv2d_int8(x, w, s * bad), Error) << bad;
  }
  EXPECT_THROW(with([](auto& o) { o.input.zero_point = 256; })(), Error);
  EXPECT_THROW(with([](auto& o) { o.input.zero_point = -1; })(), Error);
  EXPECT_THROW(with([](auto& o) { o.output->zero_point = 300; })(), Error);
  EXPECT_THROW(with([](auto& o) { o.output->quant_max = 256; })(), Error);
  EXPECT_THROW(with([](auto& o) { o.output->quant_min = 9, o.output->quant_max = 8; })(), Error);
  EXPECT_THROW(with([](auto& o) { o.output->dtype = f32; })(), DTypeError);
  EXPECT_THROW(with([](auto& o) { o.output = {}, o.dtype = i32; })(), DTypeError);
  EXPECT_THROW(with([](auto& o) { o.activation = static_cast<Int8Activation>(9); })(), Error);
  EXPECT_THROW(with([](auto& o) { o.activation = Int8Activation::hardtanh, o.a = 2, o.b = 1; })(), Error);
  EXPECT_THROW(with([&](auto& o) { o.activation = Int8Activation::leaky_relu, o.a = nan; })(), Error);
  EXPECT_THROW(with([](auto& o) { o.stride = {0}; })(), ShapeError);
  EXPECT_THROW(with([](auto& o) { o.padding = {-1}; })(), ShapeError);
  EXPECT_THROW(with([](auto& o) { o.dilation = {1, 2, 3}; })(), ShapeError);
  EXPECT_THROW(with([](auto& o) { o.groups = 0; })(), ShapeError);
  EXPECT_THROW(with([](auto& o) { o.groups = 3; })(), ShapeError);
  // 32 bits hold 65793 products of 255 by -128.
  const Tensor row = full({1, 65793}, 255, {.dtype = u8}), column = full({1, 65793}, -128, {.dtype = i8});
  EXPECT_EQ(linear_int8(row, column, ones({1})).item<double>(), -255.0 * 128 * 65793);
  EXPECT_THROW(linear_int8(zeros({1, 65794}, {.dtype = u8}), zeros({1, 65794}, {.dtype = i8}), ones({1})), ShapeError);
  EXPECT_THROW(linear_int8(row, zeros({1, 5}, {.dtype = i8}), ones({1})), ShapeError);
  EXPECT_THROW(linear_int8(row, zeros({1, 5, 1}, {.dtype = i8}), ones({1})), ShapeError);
  EXPECT_THROW(add_int8(x, zeros({1, 4, 5, 4}, {.dtype = u8}), {}, {}), ShapeError);
  EXPECT_THROW(add_int8(x, x.to(i32), {}, {}), DTypeError);
  EXPECT_THROW(add_int8(x, x, {.scale = nan}, {}), Error);
  EXPECT_THROW(lookup_int8(x, zeros({255}, {.dtype = u8})), ShapeError);
  EXPECT_THROW(lookup_int8(x, zeros({256})), DTypeError);
  EXPECT_THROW(lookup_int8(x.to(f32), zeros({256}, {.dtype = u8})), DTypeError);
  EXPECT_THROW(mean_int8(x, {4}, false, {}), ShapeError);
  EXPECT_THROW(mean_int8(zeros({0, 3}, {.dtype = u8}), {0}, false, {}), ShapeError);
  EXPECT_THROW(mean_int8(x, {}, false, {.scale = 0}), Error);
}

TEST(Int8, TakesEmptyBatches) {
  const Tensor w = zeros({6, 4, 3, 3}, {.dtype = i8}), s = ones({6});
  EXPECT_EQ(conv2d_int8(zeros({0, 4, 5, 5}, {.dtype = u8}), w, s).sizes(), (Shape{0, 6, 3, 3}));
  EXPECT_EQ(add_int8(zeros({0, 3}, {.dtype = u8}), zeros({0, 3}, {.dtype = u8}), {}, {}).numel(), 0);
  EXPECT_EQ(lookup_int8(zeros({0}, {.dtype = u8}), zeros({256}, {.dtype = i8})).numel(), 0);
  EXPECT_EQ(mean_int8(zeros({0, 3}, {.dtype = u8}), {1}, false, {}).numel(), 0);
}

}  // namespace
}  // namespace halfstep
