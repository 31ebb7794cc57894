// SPDX-License-Identifier: Apache-2.0
// Functions that the CPU computes in float64, by vectors or by the C library where those have no result: of floats of
// every magnitude as the C library has them in float64, rounded once, with its zeros' signs, infinities and NaN.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "halfstep/core/random.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;

// Of another device's, what CUDA's programming guide says of its functions holds.
double units_of(double elsewhere) { return default_device().is_cpu() ? 0.51 : elsewhere; }

// The distance to the next float.
double unit_of(double v) { return std::ldexp(0x1p-23, std::ilogb(std::fmax(std::fabs(v), 0x1p-126))); }
void expect_rounded_once(const char* what, double got, double exact, double units, const std::string& of) {
  if (std::isnan(exact)) {
    EXPECT_TRUE(std::isnan(got)) << what << of << ": " << got;
  } else if (std::fabs(exact) >= 0x1.ffffffp127) {
    EXPECT_EQ(got, std::copysign(HUGE_VAL, exact)) << what << of;
  } else {
    ASSERT_NEAR(got, exact, units * unit_of(exact)) << what << of;
    if (default_device().is_cpu()) {
      EXPECT_EQ(std::signbit(got), std::signbit(exact)) << what << of;
    }
  }
}
TEST(RoundedOnce, InverseAndHyperbolicFunctionsAreRoundedOnce) {
  Values points = {0.0, -0.0, INFINITY, -INFINITY, NAN};
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 65537) {
    const float v = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (std::isfinite(v)) points.push_back(v);
  }
  RandomStream random(3);
  for (const double scale : {1.0, 10.0, 100.0, 160.0}) {
    for (int i = 0; i < 2000; ++i) points.push_back(static_cast<float>(random.uniform(-scale, scale)));
  }
  for (float v = 0.999999f; v <= 1.000001f; v = std::nextafterf(v, 2)) points.push_back(v), points.push_back(-v);
  const Tensor x = tensor(points);
  const auto check = [&](const char* name, Tensor (*f)(const Tensor&), double (*exact)(double), double elsewhere) {
    const Values got = f(x).to_vector<double>();
    for (std::size_t i = 0; i < points.size() && !testing::Test::HasFatalFailure(); ++i) {
      expect_rounded_once(name, got[i], exact(points[i]), units_of(elsewhere), fmt::format(" of {}", points[i]));
    }
  };
  check("exp2", exp2, std::exp2, 2);
  check("log2", log2, std::log2, 2);
  check("log10", log10, std::log10, 3);
  check("asin", asin, std::asin, 4);
  check("acos", acos, std::acos, 4);
  check("atan", atan, std::atan, 4);
  check("sinh", sinh, std::sinh, 4);
  check("cosh", cosh, std::cosh, 4);
  check("asinh", asinh, std::asinh, 4);
  check("acosh", acosh, std::acosh, 4);
  check("atanh", atanh, std::atanh, 4);
}

// Remainders are exact, whatever the quotient: those about whole quotients, and those whose quotient has more digits
// than a double.
TEST(RoundedOnce, RemaindersAreExactAndAnglesRoundedOnce) {
  const double inf = INFINITY;
  const Values special = {
      0.0, -0.0, 1, -1, 2, -3, 0.7, inf, -inf, NAN, 1e30, -1e30, 1e-40, -1e-45, 3e38, 7, 4503599627370496};
  Values a, b;
  for (const double x : special) {
    for (const double y : special) a.push_back(static_cast<float>(x)), b.push_back(static_cast<float>(y));
  }
  RandomStream random(5);
  for (int i = 0; i < 30000; ++i) {
    const auto y = static_cast<float>(random.uniform(-1, 1) * std::exp2(random.uniform(-149, 127)));
    const double quotient = random.uniform(-1, 1) * std::exp2(random.uniform(-10, i % 5 == 0 ? 80 : 26));
    auto x = static_cast<float>(y * (i % 2 ? std::round(quotient) : quotient));
    if (i % 4 == 1) x = std::nextafterf(x, i % 8 == 1 ? 0.0f : HUGE_VALF);
    if (!std::isfinite(x)) continue;
    a.push_back(x), b.push_back(y);
  }
  const Tensor x = tensor(a), y = tensor(b);
  const Values cut = fmod(x, y).to_vector<double>(), floored = remainder(x, y).to_vector<double>(),
               angle = atan2(x, y).to_vector<double>(), length = hypot(x, y).to_vector<double>();
  for (std::size_t i = 0; i < a.size() && !testing::Test::HasFatalFailure(); ++i) {
    const std::string of = fmt::format(" of {} and {}", a[i], b[i]);
    const double m = std::fmod(a[i], b[i]);
    const double other = m != 0 && (m < 0) != (b[i] < 0) ? static_cast<double>(static_cast<float>(m + b[i])) : m;
    expect_rounded_once("fmod", cut[i], m, 0, of);
    expect_rounded_once("remainder", floored[i], other, 0, of);
    expect_rounded_once("atan2", angle[i], std::atan2(a[i], b[i]), units_of(4), of);
    expect_rounded_once("hypot", length[i], std::hypot(a[i], b[i]), units_of(4), of);
  }
}

}  // namespace
}  // namespace halfstep
