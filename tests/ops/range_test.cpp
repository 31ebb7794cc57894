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

}  // namespace
}  // namespace halfstep
