// SPDX-License-Identifier: Apache-2.0
// Many rows one behind the other, of which kernels take several together: each row's results are its own, whatever its
// place among them. Against plain loops in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "halfstep/autograd/engine.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

using test::ThreadsGuard;
using Values = std::vector<double>;
using Row = const double*;

// Half of the distance to the next number, relative to a number; float32's own share of an error is in the bounds.
double half_spacing(DType d) { return d == f64 ? 0x1p-53 : d == f32 ? 0x1p-24 : d == f16 ? 0x1p-11 : 0x1p-8; }
double smallest_half(DType d) { return d == f16 ? 0x1p-24 : 0; }  // what a number near zero may be off

// Numbers of -2 to 2 in steps of an eighth, which each dtype has.
Values eighths(std::int64_t n, std::int64_t seed) {
  Values v;
  for (std::int64_t i = 0; i < n; ++i) v.push_back(static_cast<double>((i + seed) * 7919 % 104729 % 33 - 16) / 8);
  return v;
}
void expect_near_rows(const Tensor& got, const Values& expected, const Values& bound, const char* what) {
  const Values values = got.to_vector<double>();
  ASSERT_EQ(values.size(), expected.size());
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], bound[i]) << what << " " << i;
}

TEST(ManyRows, SoftmaxOfShortRows) {
  constexpr std::int64_t kRows = 701;
  for (const DType d : {f32, bf16, f16}) {
    for (const std::int64_t n : {1, 3, 16, 17, 64, 100}) {
      SCOPED_TRACE(testing::Message() << name(d) << ", rows of " << n);
      const Values x = eighths(kRows * n, 1), g = eighths(kRows * n, 5);
      Values y, y_bound, logs, log_bound, dx, dx_bound, log_dx, log_dx_bound;
      const double eps = half_spacing(d) + 4e-6, smallest = smallest_half(d);
      for (std::int64_t r = 0; r < kRows; ++r) {
        const Row row = x.data() + r * n, gs = g.data() + r * n;
        double total = 0, dot = 0, magnitude = 0, sum = 0, size = 0;
        for (std::int64_t i = 0; i < n; ++i) total += std::exp(row[i]);
        for (std::int64_t i = 0; i < n; ++i) {
          y.push_back(std::exp(row[i]) / total);
          y_bound.push_back(eps * y.back() + smallest);
          logs.push_back(row[i] - std::log(total));
          log_bound.push_back(eps * (std::abs(logs.back()) + 1));
          dot += y.back() * gs[i];
          magnitude += std::abs(y.back() * gs[i]);
          sum += gs[i];
          size += std::abs(gs[i]);
        }
        // Gradients start from rounded results: y off by eps, a logarithm by eps of itself.
        for (std::int64_t i = 0; i < n; ++i) {
          const auto at = static_cast<std::size_t>(r * n + i);
          dx.push_back(y[at] * (gs[i] - dot));
          dx_bound.push_back(4 * eps * y[at] * (std::abs(gs[i]) + magnitude) + smallest * (1 + size));
          log_dx.push_back(gs[i] - y[at] * sum);
          log_dx_bound.push_back(eps * (std::abs(gs[i]) + y[at] * size * (2 + std::abs(logs[at]))) + smallest);
        }
      }
      for (const int threads : {1, 3}) {
        ThreadsGuard guard(threads);
        const Tensor weights = tensor(g, {kRows, n}, {.dtype = d});
        Tensor in = tensor(x, {kRows, n}, {.dtype = d, .requires_grad = true});
        const Tensor plain = softmax(in, 1);
        expect_near_rows(plain, y, y_bound, "softmax");
        plain.backward(weights);
        expect_near_rows(in.grad(), dx, dx_bound, "gradient");
        Tensor again = tensor(x, {kRows, n}, {.dtype = d, .requires_grad = true});
        const Tensor logarithms = log_softmax(again, 1);
        expect_near_rows(logarithms, logs, log_bound, "log_softmax");
        logarithms.backward(weights);
        expect_near_rows(again.grad(), log_dx, log_dx_bound, "its gradient");
      }
    }
  }
}

// Reductions of a row each, in rows of every length around those that are folded side by side. Sums of eighths and of
// their squares are exact in float32.
TEST(ManyRows, ReductionsOfShortRows) {
  constexpr std::int64_t kRows = 701;
  for (const DType d : {f32, bf16, f16, f64}) {
    for (const std::int64_t n : {1, 2, 3, 4, 7, 16, 31, 32, 33, 70}) {
      SCOPED_TRACE(testing::Message() << name(d) << ", rows of " << n);
      const Values x = eighths(kRows * n, 3);
      const double eps = half_spacing(d), computed = d == f64 ? eps : 0x1p-24, smallest = smallest_half(d);
      Values sums, means, largest, places, norms, variances, logs, nonzero, every, bound;
      for (std::int64_t r = 0; r < kRows; ++r) {
        const Row row = x.data() + r * n;
        double sum = 0, squares = 0, exponentials = 0, distances = 0, count = 0;
        std::int64_t best = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          sum += row[i];
          squares += row[i] * row[i];
          exponentials += std::exp(row[i]);
          count += row[i] != 0 ? 1 : 0;
          if (row[i] > row[best]) best = i;
        }
        for (std::int64_t i = 0; i < n; ++i) distances += (row[i] - sum / double(n)) * (row[i] - sum / double(n));
        sums.push_back(sum);
        means.push_back(sum / double(n));
        largest.push_back(row[best]);
        places.push_back(double(best));
        norms.push_back(std::sqrt(squares));
        variances.push_back(distances / double(n));
        logs.push_back(std::log(exponentials));
        nonzero.push_back(count);
        every.push_back(count == double(n));
      }
      const auto near = [&](const Tensor& got, const Values& expected, double units, const char* what) {
        Values bounds;
        for (const double v : expected) bounds.push_back(units * eps * std::abs(v) + smallest);
        expect_near_rows(got, expected, bounds, what);
      };
      const Tensor t = tensor(x, {kRows, n}, {.dtype = d});
      for (const int threads : {1, 3}) {
        ThreadsGuard guard(threads);
        near(sum(t, {1}), sums, 1, "sum");
        near(mean(t, {1}), means, 1, "mean");
        near(amax(t, {1}), largest, 0, "amax");
        near(argmax(t, 1), places, 0, "argmax");
        near(norm(t, 2.0, {1}), norms, 1.01, "norm");
        near(count_nonzero(t, {1}), nonzero, 0, "count_nonzero");
        near(all(t, {1}), every, 0, "all");
        // Of up to 70 terms in float32 (float64), each with two roundings of its own: exponentials err by 1.1 units.
        near(var(t, {1}, {.correction = 0}), variances, d == f32 || d == f64 ? 140 : 2, "var");
        Values log_bound;
        for (const double v : logs) log_bound.push_back(eps * std::abs(v) + 140 * computed + smallest);
        expect_near_rows(logsumexp(t, {1}), logs, log_bound, "logsumexp");
      }
    }
  }
}

// A row whose float32 sum overflows, or whose squares do, is taken again in float64, and none of its neighbours is.
TEST(ManyRows, ShortRowsThatLeaveFloat32) {
  constexpr std::int64_t kRows = 300, kLength = 3;
  Values x = eighths(kRows * kLength, 2);
  const auto place = [&](std::int64_t row, const Values& values) {
    std::copy(values.begin(), values.end(), x.begin() + row * kLength);
  };
  place(7, {3e38, 3e38, -3e38});
  place(130, {-3e38, -3e38, -3e38});
  place(255, {1e30, 2e30, 2e30});
  place(256, {1e-30, 2e-30, 2e-30});
  place(299, {INFINITY, 1, 2});
  place(12, {1, NAN, 2});
  const Tensor t = tensor(x, {kRows, kLength});
  const Values means = mean(t, {1}).to_vector<double>(), norms = norm(t, 2.0, {1}).to_vector<double>(),
               largest = amax(t, {1}).to_vector<double>();
  for (std::int64_t r = 0; r < kRows; ++r) {
    const auto at = static_cast<std::size_t>(r);
    const Row row = x.data() + r * kLength;
    const double sum = row[0] + row[1] + row[2], square = row[0] * row[0] + row[1] * row[1] + row[2] * row[2];
    if (std::isnan(sum)) {
      EXPECT_TRUE(std::isnan(means[at]) && std::isnan(norms[at]) && std::isnan(largest[at])) << r;
    } else if (std::isinf(sum)) {
      EXPECT_TRUE(std::isinf(means[at]) && std::isinf(norms[at]) && std::isinf(largest[at])) << r;
    } else {
      // Of float32 values: 3e38 and 1e-30 are rounded by half a unit.
      EXPECT_NEAR(means[at], sum / 3, 0x1p-22 * (std::abs(row[0]) + std::abs(row[1]) + std::abs(row[2]))) << r;
      if (square < 1e76) {
        EXPECT_NEAR(norms[at], std::sqrt(square), 0x1p-22 * std::sqrt(square)) << r;
      }
      EXPECT_NEAR(largest[at], std::max({row[0], row[1], row[2]}), 0x1p-23 * std::abs(largest[at])) << r;
    }
  }
}

TEST(ManyRows, SumsAndProductsOfEachRow) {
  for (const DType d : {f32, bf16, f16}) {
    for (const std::int64_t n : {1, 2, 31, 33, 255, 257, 1000}) {
      const std::int64_t rows = n < 64 ? 701 : 29;  // not a multiple of what is taken together
      SCOPED_TRACE(testing::Message() << name(d) << ", rows of " << n);
      const Values x = eighths(rows * n, 2);
      Values sums, bound, behind(x.size()), behind_bound(x.size()), factors, products, products_bound;
      for (std::int64_t r = 0; r < rows; ++r) {
        double total = 0, product = 1;
        for (std::int64_t i = 0; i < n; ++i) {
          // Sums are exact in float32; they round once.
          total += x[static_cast<std::size_t>(r * n + i)];
          sums.push_back(total);
          bound.push_back(half_spacing(d) * std::abs(total));
          // A product of powers of two is exact too.
          const std::int64_t which = (r * 5 + i * 3) % 4;
          factors.push_back(which == 0 ? 2 : which == 1 ? -0.5 : which == 2 ? -1 : 1);
          product *= factors.back();
          products.push_back(product);
          products_bound.push_back(0);
        }
        total = 0;
        for (std::int64_t i = n - 1; i >= 0; --i) {
          const auto at = static_cast<std::size_t>(r * n + i);
          total += x[at];
          behind[at] = total;
          behind_bound[at] = half_spacing(d) * std::abs(total);
        }
      }
      for (const int threads : {1, 3}) {
        ThreadsGuard guard(threads);
        Tensor in = tensor(x, {rows, n}, {.dtype = d, .requires_grad = true});
        const Tensor y = cumsum(in, 1);
        expect_near_rows(y, sums, bound, "sum");
        y.backward(in.detach());
        expect_near_rows(in.grad(), behind, behind_bound, "gradient");
        expect_near_rows(cumprod(tensor(factors, {rows, n}, {.dtype = d}), 1), products, products_bound, "product");
      }
    }
  }
}

// By the definition, element by element: what each product that an element is in would be without it. Factors are
// powers of two and products stay small, so that sums are exact in float32. A zero leaves gradients of what is before
// it.
TEST(ManyRows, GradientsOfProductsOfEachRow) {
  constexpr std::int64_t kRows = 5;
  for (const DType d : {f32, bf16, f16}) {
    for (const std::int64_t n : {1, 2, 300, 1024, 1025, 2600}) {
      SCOPED_TRACE(testing::Message() << name(d) << ", rows of " << n);
      const Values g = eighths(kRows * n, 6);
      Values x, expected, bound;
      for (std::int64_t r = 0; r < kRows; ++r) {
        for (std::int64_t i = 0; i < n; ++i) x.push_back(i % 2 == 0 ? 2 : i % 3 == 0 ? -0.5 : 0.5);
        // Rows without a zero, with one at either end and within, and with two.
        if (r == 1) x[static_cast<std::size_t>(r * n)] = 0;
        if (r == 2) x[static_cast<std::size_t>(r * n + n - 1)] = 0;
        if (r >= 3) x[static_cast<std::size_t>(r * n + n / 2)] = 0;
        if (r == 4) x[static_cast<std::size_t>(r * n + n * 2 / 3)] = 0;
        double before = 1;
        for (std::int64_t i = 0; i < n; ++i) {
          double product = before, total = 0;
          for (std::int64_t k = i; k < n; ++k) {
            if (k > i) product *= x[static_cast<std::size_t>(r * n + k)];
            total += g[static_cast<std::size_t>(r * n + k)] * product;
          }
          expected.push_back(total);
          bound.push_back(half_spacing(d) * std::abs(total));
          before *= x[static_cast<std::size_t>(r * n + i)];
        }
      }
      for (const bool turned : {false, true}) {
        Tensor in = tensor(x, {kRows, n}, {.dtype = d, .requires_grad = true});
        const Tensor leaf = turned ? in.t().contiguous().t() : in;
        cumprod(leaf, 1).backward(tensor(g, {kRows, n}, {.dtype = d}));
        expect_near_rows(in.grad(), expected, bound, "gradient");
      }
    }
  }
}

// And few long ones, of which several threads share each: ties in all parts of a row, and at its ends.
TEST(ManyRows, GradientsOfExtremesOfFewLongRows) {
  const std::int64_t n = 150001, rows = 3;
  for (const DType d : {f32, bf16, f16}) {
    Values x, expected;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t step = r + 1;  // 1 / ties is exact in none of them
      const auto ties = static_cast<double>((n - 1) / (7500 * step) + 1);
      for (std::int64_t i = 0; i < n; ++i) {
        const bool top = i % (7500 * step) == 0;
        x.push_back(top ? 3 : static_cast<double>(i % 5));
        expected.push_back(top ? 1 / ties : 0);
        if (!top && x.back() >= 3) x.back() = -1;
      }
    }
    const Values rounded = tensor(expected, {rows, n}, {.dtype = d}).to_vector<double>();
    for (const int threads : {1, 3}) {
      ThreadsGuard guard(threads);
      Tensor in = tensor(x, {rows, n}, {.dtype = d, .requires_grad = true});
      amax(in, {1}).backward(ones({rows}, {.dtype = d}));
      const Values got = in.grad().to_vector<double>();
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], rounded[i], 2 * half_spacing(d) * rounded[i]) << name(d) << " " << i;
      }
    }
  }
}

// Rows of several stretches of columns that go to one row, to none and to most. Sums of eighths are exact in float32,
// and rounded once.
TEST(ManyRows, AddedToRowsByIndex) {
  constexpr std::int64_t kTo = 37, kFrom = 311;
  for (const DType d : {f32, bf16, f16}) {
    for (const std::int64_t width : {15, 16, 33, 600}) {
      SCOPED_TRACE(testing::Message() << name(d) << ", " << width << " columns");
      std::vector<std::int64_t> at;
      for (std::int64_t i = 0; i < kFrom; ++i) at.push_back(i % 3 == 0 ? 20 : i * 7919 % (kTo - 5));
      const Values x = eighths(kTo * width, 3), source = eighths(kFrom * width, 4);
      Values sums = x, grads(x.size());
      for (std::int64_t i = 0; i < kFrom; ++i) {
        for (std::int64_t j = 0; j < width; ++j) {
          const auto to = static_cast<std::size_t>(at[static_cast<std::size_t>(i)] * width + j);
          sums[to] += 0.5 * source[static_cast<std::size_t>(i * width + j)];
          grads[to] += source[static_cast<std::size_t>(i * width + j)];
        }
      }
      // By a conversion, which rounds to nearest even as the sum does.
      const Values rounded = tensor(sums, {kTo, width}, {.dtype = d}).to_vector<double>();
      const Values rounded_grads = tensor(grads, {kTo, width}, {.dtype = d}).to_vector<double>();
      const Tensor index = tensor(at, {kFrom}), values = tensor(source, {kFrom, width}, {.dtype = d});
      for (const int threads : {1, 3}) {
        ThreadsGuard guard(threads);
        Tensor rows = tensor(x, {kTo, width}, {.dtype = d});
        EXPECT_EQ(index_add(rows, 0, index, values, 0.5).to_vector<double>(), rounded);
        // Along the middle dimension, and with a gap behind each row.
        const Tensor two = rows.unsqueeze(0).expand({2, kTo, width}).contiguous();
        const Tensor both = index_add(two, 1, index, values.unsqueeze(0).expand({2, kFrom, width}), 0.5);
        EXPECT_EQ(both[0].to_vector<double>(), rounded);
        EXPECT_EQ(both[1].to_vector<double>(), rounded);
        Tensor wide = zeros({kTo, width + 3}, {.dtype = d});
        Tensor part = wide.slice(1, 0, width);
        part.copy_(rows);
        index_add_(part, 0, index, values, 0.5);
        EXPECT_EQ(part.to_vector<double>(), rounded);
        EXPECT_EQ(sum(wide.slice(1, width, width + 3)).item<double>(), 0);
        Tensor leaf = rows.clone().requires_grad_();
        index_select(leaf, 0, index).backward(values);
        EXPECT_EQ(leaf.grad().to_vector<double>(), rounded_grads);
        Tensor weight = rows.clone().requires_grad_();
        embedding(index, weight).backward(values);
        EXPECT_EQ(weight.grad().to_vector<double>(), rounded_grads);
      }
    }
  }
}

}  // namespace
}  // namespace halfstep
