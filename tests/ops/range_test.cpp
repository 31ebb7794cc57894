// SPDX-License-Identifier: Apache-2.0
// Results and gradients that are representable where squares, sums or powers on the way to them are not. What is
// expected is the closed form in long double, which has exponents of 15 bits.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "halfstep/autograd/engine.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

static_assert(std::numeric_limits<long double>::max_exponent > 10000, "the closed forms need room");
using Real = long double;
using Values = std::vector<double>;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The largest error of a rounding to v.
Real rounding(DType dtype, Real v) {
  const FloatInfo& info = finfo(dtype);
  return Real{info.eps} / 2 * std::max(std::fabs(v), Real{info.smallest_normal});
}
// What is wrong with a number that is off by `roundings` of the dtype at most, and where that leads beyond the largest
// one may be infinite; nothing where it is right.
std::string wrong(double got, Real expected, DType dtype, Real roundings) {
  const Real most = finfo(dtype).max, error = roundings * rounding(dtype, expected);
  const bool may_overflow = std::isinf(expected) || std::fabs(expected) + error > most;
  if (may_overflow && got == std::copysign(kInf, static_cast<double>(expected))) return "";
  if (std::fabs(Real{got} - expected) <= error) return "";
  return fmt::format("got {}, expected {} with an error of {}", got, expected, error);
}
void expect_close(double got, Real expected, DType dtype, Real roundings, const std::string& what) {
  EXPECT_EQ(wrong(got, expected, dtype, roundings), "") << what;
}

// --- reductions

Real deviation(const Values& x, double correction) {
  Real mean = 0, squares = 0;
  for (const double v : x) mean += Real{v};
  mean /= static_cast<Real>(x.size());
  for (const double v : x) squares += (Real{v} - mean) * (Real{v} - mean);
  return std::sqrt(squares / (static_cast<Real>(x.size()) - Real{correction}));
}
Real length(const Values& x, Real p) {
  Real sum = 0;
  for (const double v : x) sum += std::pow(std::fabs(Real{v}), p);
  return std::pow(sum, 1 / p);
}
Values column(const Values& x, std::size_t columns, std::size_t c) {
  Values result;
  for (std::size_t i = c; i < x.size(); i += columns) result.push_back(x[i]);
  return result;
}

// A sum in float32 takes blocks of some hundred elements: 128 additions of at most a rounding each, half of which is
// left after the root, and ten roundings for distances, squares and the mean.
constexpr double kBlocked = 128 / 2 + 10;
Real bound(DType dtype) { return dtype == f32 ? Real{kBlocked} : 1 + Real{kBlocked} * 0x1p-13L; }

const double kScales[] = {1e-37, 1e-30, 1e-22, 1e-19, 1, 1e18, 1e19, 1e22, 1e30, 5e37};

TEST(Range, DeviationsAndNormsInRows) {
  manual_seed(3);
  for (const DType dtype : {f32, bf16}) {
    for (const std::int64_t n : {2, 3, 7, 33, 100, 1000, 5000, 140000}) {
      const Tensor base = rand({n}, {.dtype = f64}) * 2 - 0.75;
      for (const double scale : kScales) {
        if (n > 5000 && scale != 1e30 && scale != 1e-30) continue;
        const Tensor x = (base * scale).to(dtype);
        const Values v = x.to_vector<double>();
        const std::string what = std::string(name(dtype)) + " " + std::to_string(n) + " of " + std::to_string(scale);
        for (const double correction : {0.0, 1.0}) {
          const Real exact = deviation(v, correction);
          expect_close(stddev(x, {}, {.correction = correction}).item<double>(), exact, dtype, bound(dtype),
                       "std " + what);
          expect_close(var(x, {}, {.correction = correction}).item<double>(), exact * exact, dtype, 2 * bound(dtype),
                       "var " + what);
        }
        for (const double p : {1.0, 2.0, 3.0, 0.5}) {
          // A root of a power of the sum keeps the error of a power of the length.
          if (p == 0.5 && length(v, 0.5) > finfo(dtype).max) continue;
          expect_close(norm(x, p).item<double>(), length(v, p), dtype, 4 * bound(dtype),
                       "norm " + std::to_string(p) + " " + what);
        }
      }
    }
  }
}

// Columns next to each other, each of its own size, among them what has to be taken in float64 beside what has not.
TEST(Range, DeviationsAndNormsInColumns) {
  manual_seed(4);
  constexpr std::size_t kColumns = std::size(kScales) * 2;
  for (const DType dtype : {f32, bf16}) {
    for (const std::int64_t n : {2, 37, 300}) {
      Values scales(std::begin(kScales), std::end(kScales));
      scales.insert(scales.end(), std::begin(kScales), std::end(kScales));
      scales[3] = scales[13] = 0;
      const Tensor x =
          ((rand({n, static_cast<std::int64_t>(kColumns)}, {.dtype = f64}) * 2 - 0.75) * tensor(scales, {.dtype = f64}))
              .to(dtype);
      const Values v = x.to_vector<double>();
      const Values deviations = stddev(x, {0}).to_vector<double>(), norms = norm(x, 2, {0}).to_vector<double>();
      const auto [variances, means] = var_mean(x, {0});
      const Values variance = variances.to_vector<double>();
      for (std::size_t c = 0; c < kColumns; ++c) {
        const std::string what = std::string(name(dtype)) + " " + std::to_string(n) + " column " + std::to_string(c);
        const Values one = column(v, kColumns, c);
        const Real exact = deviation(one, 1);
        expect_close(deviations[c], exact, dtype, bound(dtype), "std " + what);
        expect_close(variance[c], exact * exact, dtype, 2 * bound(dtype), "var " + what);
        expect_close(norms[c], length(one, 2), dtype, bound(dtype), "norm " + what);
      }
      // A column by itself has the bits that it has beside others.
      const Values others = stddev(x.slice(1, 0, 9), {0}).to_vector<double>();
      for (std::size_t c = 0; c < others.size(); ++c) EXPECT_EQ(others[c], deviations[c]) << c;
    }
  }
}

TEST(Range, SumsThatOverflowOnTheWay) {
  for (const std::int64_t times : {1, 50}) {
    const Tensor x = repeat(tensor(Values{3e38, 3e38, -3e38, -2e38}), {times});
    const Real n = static_cast<Real>(times), high = 3e38f, low = 2e38f;
    expect_close(mean(x).item<double>(), (high - low) / 4, f32, 4, "mean");
    expect_close(sum(x).item<double>(), n * (high - low), f32, 4, "sum");
    expect_close(norm(x, 1).item<double>(), n * (3 * high + low), f32, 4, "norm 1");
    EXPECT_EQ(stddev(full({4 * times}, 3e38)).item<double>(), 0);
  }
}

TEST(Range, InfinitiesAndZerosStay) {
  for (const DType dtype : {f32, f64, f16, bf16}) {
    for (const std::size_t n : {3, 200}) {
      const auto with = [&](double v, double others) {
        Values all(n, others);
        all[1] = v;
        return tensor(all, {.dtype = dtype});
      };
      EXPECT_EQ(norm(with(-kInf, 1)).item<double>(), kInf);
      EXPECT_TRUE(std::isnan(norm(with(kNaN, 1)).item<double>()));
      EXPECT_TRUE(std::isnan(stddev(with(kInf, 1)).item<double>()));
      EXPECT_TRUE(std::isnan(stddev(with(kNaN, 1)).item<double>()));
      EXPECT_EQ(sum(with(kInf, 1)).item<double>(), kInf);
      EXPECT_EQ(norm(with(0, 0)).item<double>(), 0);
      EXPECT_EQ(stddev(with(0, 0)).item<double>(), 0);
      EXPECT_EQ(stddev(with(0.5, 0.5)).item<double>(), 0);
    }
  }
}

// --- gradients of reductions

using Function = std::function<Tensor(const Tensor&)>;
// Those of f, for a gradient of `weight`, against slope(values, i).
void check_slopes(const Function& f, const Tensor& values, double weight,
                  const std::function<Real(const Values&, std::size_t)>& slope, Real roundings,
                  const std::string& what) {
  for (const bool recorded : {false, true}) {
    const Tensor x = values.detach().requires_grad_();
    const Tensor y = f(x), w = full(y.sizes(), weight).to(y.dtype());
    const Values v = x.to_vector<double>(),
                 got = grad({y}, {x}, {.grad_outputs = {w}, .create_graph = recorded})[0].detach().to_vector<double>();
    const Real g = w.item<double>();
    for (std::size_t i = 0; i < v.size(); ++i) {
      expect_close(got[i], g * slope(v, i), x.dtype(), roundings,
                   what + " at " + std::to_string(i) + " of " + std::to_string(v.size()));
    }
  }
}
Real deviation_slope(const Values& v, std::size_t i) {
  Real mean = 0;
  for (const double x : v) mean += Real{x};
  mean /= static_cast<Real>(v.size());
  return (Real{v[i]} - mean) / deviation(v, 1) / static_cast<Real>(v.size() - 1);
}

// The output is rounded to the dtype and read again, and so is the mean in float32; the values are not near it.
TEST(Range, GradientsOfDeviationsAndNorms) {
  const auto norm_slope = [](Real p) {
    return [p](const Values& v, std::size_t i) {
      const Real ratio = Real{v[i]} / length(v, p);
      return std::copysign(std::pow(std::fabs(ratio), p - 1), ratio);
    };
  };
  for (const DType dtype : {f32, bf16}) {
    for (const double scale : kScales) {
      for (const double weight : {1.0, 1e-9, 65536.0}) {
        const Tensor x = (tensor(Values{1, -0.5, 0.25, 0.875, -1.75}, {.dtype = f64}) * scale).to(dtype);
        const std::string what = std::string(name(dtype)) + " of " + std::to_string(scale);
        check_slopes([](const Tensor& t) { return stddev(t); }, x, weight, deviation_slope, 2 * kBlocked,
                     "std " + what);
        check_slopes([](const Tensor& t) { return norm(t); }, x, weight, norm_slope(2), kBlocked, "norm " + what);
        check_slopes([](const Tensor& t) { return norm(t, 3); }, x, weight, norm_slope(3), 2 * kBlocked,
                     "norm 3 " + what);
        check_slopes([](const Tensor& t) { return norm(t, 1.5); }, x, weight, norm_slope(1.5), kBlocked,
                     "norm 1.5 " + what);
      }
    }
  }
  // What PyTorch 2.15 prints for torch.std.
  const Tensor x = tensor(Values{1e30, 1}).requires_grad_();
  const Tensor y = stddev(x);
  EXPECT_NEAR(y.detach().item<double>(), 7.071067565216947e+29, 1e23);
  y.backward();
  EXPECT_NEAR(x.grad().to_vector<double>()[0], 0.7071068286895752, 2e-7);
  EXPECT_NEAR(x.grad().to_vector<double>()[1], -0.7071068286895752, 2e-7);
  // Beside a subnormal there may be a zero, whose gradient is not 0 times infinity.
  check_slopes([](const Tensor& t) { return norm(t); }, tensor(Values{0, 1e-40}), 1, norm_slope(2), 2, "subnormal");
}

// f16 has neither the number of elements times a deviation nor the quotient of a gradient by that number.
TEST(Range, GradientsOfLongRowsInF16) {
  Values values;
  for (int i = 0; i < 4096; ++i) values.push_back(64 * ((i * 37) % 64) - 2016);
  const Tensor x = tensor(values, {.dtype = f16});
  // Four roundings for the ops that a rule is made of.
  check_slopes([](const Tensor& t) { return stddev(t); }, x, 1024, deviation_slope, 4, "std");
  check_slopes([](const Tensor& t) { return var(t * 0.125); }, x, 0.25,
               [](const Values& v, std::size_t i) { return deviation_slope(v, i) * deviation(v, 1) * 2 / 64; }, 4,
               "var");
  check_slopes([](const Tensor& t) { return norm(t); }, tensor(Values{3e4, 4e4}, {.dtype = f16}), 1e-3,
               [](const Values& v, std::size_t i) { return Real{v[i]} / length(v, 2); }, 4, "norm");
}

// --- elementwise gradients

struct Slope {
  const char* name;
  std::function<Tensor(const std::vector<Tensor>&)> f;
  std::vector<std::function<Real(Real, Real)>> slopes;  // in each input
  Real roundings;                                       // of the dtype
  std::function<bool(Real, Real)> defined = nullptr;
  bool of_result = false;  // the saved result is read, and must have its digits
};
const std::vector<Slope>& slopes() {
  using In = const std::vector<Tensor>&;
  const auto positive = [](Real a, Real) { return a > 0; };
  // One rounding where a rule is one op. Else one for each op, and for a saved result one for each time it is used.
  static const std::vector<Slope> all = {
      {"atan2",
       [](In in) { return atan2(in[0], in[1]); },
       {[](Real a, Real b) { return a == 0 && b == 0 ? 0 : b / (a * a + b * b); },
        [](Real a, Real b) { return a == 0 && b == 0 ? 0 : -a / (a * a + b * b); }},
       1.01L},
      {"hypot",
       [](In in) { return hypot(in[0], in[1]); },
       {[](Real a, Real b) { return a / std::sqrt(a * a + b * b); },
        [](Real a, Real b) { return b / std::sqrt(a * a + b * b); }},
       1.01L,
       [](Real a, Real b) { return a != 0 || b != 0; }},
      {"div",
       [](In in) { return in[0] / in[1]; },
       {[](Real, Real b) { return 1 / b; }, [](Real a, Real b) { return -a / (b * b); }},
       3.1L,
       [](Real, Real b) { return b != 0; }},
      {"addcdiv",
       [](In in) { return addcdiv(zeros_like(in[0]), in[0], in[1], 2); },
       {[](Real, Real b) { return 2 / b; }, [](Real a, Real b) { return -2 * a / (b * b); }},
       4.1L,
       [](Real, Real b) { return b != 0; }},
      {"sqrt",
       [](In in) { return sqrt(in[0]); },
       {[](Real a, Real) { return 1 / (2 * std::sqrt(a)); }},
       2.1L,
       positive},
      {"rsqrt",
       [](In in) { return rsqrt(in[0]); },
       {[](Real a, Real) { return -1 / (2 * a * std::sqrt(a)); }},
       9.1L,  // the saved result itself has two roundings
       positive},
      {"reciprocal", [](In in) { return reciprocal(in[0]); }, {[](Real a, Real) { return -1 / (a * a); }}, 4.1L},
      {"1 / x", [](In in) { return 1 / in[0]; }, {[](Real a, Real) { return -1 / (a * a); }}, 3.1L},
      {"log", [](In in) { return log(in[0]); }, {[](Real a, Real) { return 1 / a; }}, 1.01L, positive},
      {"log2",
       [](In in) { return log2(in[0]); },
       {[](Real a, Real) { return 1 / (a * std::log(Real{2})); }},
       3.1L,
       positive},
      {"log10",
       [](In in) { return log10(in[0]); },
       {[](Real a, Real) { return 1 / (a * std::log(Real{10})); }},
       3.1L,
       positive},
      {"atan", [](In in) { return atan(in[0]); }, {[](Real a, Real) { return 1 / (1 + a * a); }}, 1.01L},
      {"asinh", [](In in) { return asinh(in[0]); }, {[](Real a, Real) { return 1 / std::sqrt(1 + a * a); }}, 1.01L},
      {"acosh",
       [](In in) { return acosh(in[0]); },
       {[](Real a, Real) { return 1 / (std::sqrt(a - 1) * std::sqrt(a + 1)); }},
       5.1L,
       [](Real a, Real) { return a > 1; }},
      {"norm of two",
       [](In in) {
         return norm(stack({in[0], in[1]}), 2, {0});
       },
       {[](Real a, Real b) { return a == 0 && b == 0 ? 0 : a / std::sqrt(a * a + b * b); },
        [](Real a, Real b) { return a == 0 && b == 0 ? 0 : b / std::sqrt(a * a + b * b); }},
       3.1L,
       nullptr,
       true},
  };
  return all;
}

Values magnitudes(DType dtype) {
  if (dtype == f16) return {0, 6e-8, 1e-6, 1e-5, 1e-4, 1e-3, 0.03, 1, 1.25, 30, 300, 1000, 3e4, 6e4};
  if (dtype == f64)
    return {0, 5e-324, 1e-310, 1e-300, 1e-200, 1e-160, 1e-100, 1e-30, 1, 1.25, 1e30, 1e160, 1e300, 1.7e308};
  return {0, 1.5e-45, 1e-40, 1e-38, 1e-30, 1e-23, 1e-20, 1e-10, 1, 1.25, 1e10, 1e19, 1e20, 1e30, 3e38};
}

// The first gradient of a and b, pair by pair, that is wrong.
std::string first_wrong(const Slope& s, DType dtype, const Values& first, const Values& second, double weight,
                        bool recorded) {
  const std::vector<Tensor> in = {tensor(first, {.dtype = dtype}).requires_grad_(),
                                  tensor(second, {.dtype = dtype}).requires_grad_()};
  const Tensor y = s.f(in), w = full(y.sizes(), weight).to(dtype);
  const std::vector<Tensor> wanted(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(s.slopes.size()));
  const auto grads = grad({y}, wanted, {.grad_outputs = {w}, .create_graph = recorded});
  const Values a = in[0].to_vector<double>(), b = in[1].to_vector<double>(), result = y.detach().to_vector<double>();
  const Real g = w.to_vector<double>()[0];
  // Norms of float64 tensors are taken in float64.
  const double least = dtype == f64 ? 1e-150 : finfo(dtype).smallest_normal,
               most = dtype == f64 ? 1e150 : finfo(dtype).max;
  // A rule of one op is computed in float64: of which float64 itself sees squares, sum, quotient, product.
  const Real roundings = s.roundings + (dtype == f64 ? 4 : 0);
  for (std::size_t k = 0; k < grads.size(); ++k) {
    const Values got = grads[k].detach().to_vector<double>();
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (s.defined && !s.defined(Real{a[i]}, Real{b[i]})) continue;
      if (s.of_result && !(result[i] >= least && result[i] <= most)) continue;
      const std::string problem = wrong(got[i], g * s.slopes[k](Real{a[i]}, Real{b[i]}), dtype, roundings);
      if (!problem.empty()) return fmt::format("input {} of {}, {}, times {}: {}", k, a[i], b[i], weight, problem);
    }
  }
  return "";
}
TEST(Range, ElementwiseGradients) {
  for (const DType dtype : {f32, f16, bf16, f64}) {
    // Every pair of magnitudes, with signs.
    Values first, second;
    for (const double a : magnitudes(dtype)) {
      for (const double b : magnitudes(dtype)) {
        for (const int signs : {0, 1, 2, 3}) {
          first.push_back(signs & 1 ? -a : a);
          second.push_back(signs & 2 ? -b : b);
        }
      }
    }
    for (const Slope& s : slopes()) {
      for (const double weight : {1.0, 1e-4, 1000.0}) {
        for (const bool recorded : {false, true}) {
          EXPECT_EQ(first_wrong(s, dtype, first, second, weight, recorded), "") << s.name << ' ' << name(dtype);
        }
      }
    }
  }
}

// Second derivatives where first ones need care: of atan2 and hypot against -2 a b / r^4 and b^2 / r^3.
TEST(Range, SecondDerivativesOfAtan2AndHypot) {
  for (const double scale : {1e-18, 1e-15, 1.0, 1e15, 1e18}) {
    const Tensor a = full({1}, 3 * scale).to(f32).requires_grad_(), b = full({1}, 4 * scale).to(f32);
    const auto second = [&](const Tensor& y) {
      const Tensor first = grad({y}, {a}, {.create_graph = true})[0];
      return grad({first}, {a})[0].item<double>();
    };
    const Real x = a.detach().item<double>(), y = b.item<double>(), r = std::hypot(x, y);
    // A handful of ops.
    expect_close(second(atan2(a, b)), -2 * x * y / (r * r * r * r), f32, 8, "atan2 " + std::to_string(scale));
    expect_close(second(hypot(a, b)), y * y / (r * r * r), f32, 8, "hypot " + std::to_string(scale));
  }
}

// A square that overflows makes no reciprocal vanish.
TEST(Range, NegativePowers) {
  for (const double v : {1e19, 3e19, 1e20, 1e22, 1e-19}) {
    const double x = static_cast<double>(static_cast<float>(v));
    expect_close(pow(tensor(Values{x}), -2).item<double>(), 1 / (Real{x} * Real{x}), f32, 2.1L, std::to_string(v));
  }
}

}  // namespace
}  // namespace halfstep
