// SPDX-License-Identifier: Apache-2.0
// Ops along one dimension of every length: kernels change their way of work with it (a thread, a warp or a block a row,
// rows in registers, chunks, several blocks a row), and with whether rows or columns lie side by side. Against plain
// loops in float64. A float32 sum of n terms in blocks of at most 1024 is within 1e-4 of the sum of magnitudes by far;
// a result is rounded once more to its dtype.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "halfstep/autograd/engine.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/sort.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;
using Integers = std::vector<std::int64_t>;

constexpr std::int64_t kRows = 3;
constexpr std::int64_t kLengths[] = {1, 6, 33, 256, 1000, 4104, 9001, 40000};

double epsilon(DType d) { return d == f64 ? 1e-14 : d == f32 ? 0x1p-23 : d == f16 ? 0x1p-10 : 0x1p-7; }
double sum_epsilon(DType d) { return d == f64 ? 1e-14 : 1e-6; }

// kRows rows of one length, and the tensor that has them as rows (dim 1) or as columns (dim 0).
struct Lines {
  DType dtype;
  std::int64_t length;
  bool columns;
  Tensor x;
  Values v;  // row after row

  std::int64_t dim() const { return columns ? 0 : 1; }
  Tensor tensor_of(const Values& values, DType d) const {
    const Tensor rows = tensor(values, {kRows, length}, {.dtype = d});
    return columns ? rows.transpose(0, 1).contiguous() : rows;
  }
  Values values_of(const Tensor& t) const { return (columns ? t.transpose(0, 1) : t).to_vector<double>(); }
  const double* row(const Values& all, std::int64_t r) const { return all.data() + r * length; }

  Lines(DType d, std::int64_t n, bool as_columns) : dtype(d), length(n), columns(as_columns) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::uniform_real_distribution<double> uniform(-4, 4);
    v.resize(static_cast<std::size_t>(kRows * n));
    for (double& value : v) value = uniform(random);
    x = tensor_of(v, d);
    v = values_of(x);  // as the dtype holds them
  }
};

template <class F>
void for_lines(const F& f) {
  for (const DType d : {f32, bf16, f64}) {
    for (const std::int64_t n : kLengths) {
      for (const bool columns : {false, true}) {
        const Lines lines(d, n, columns);
        SCOPED_TRACE(testing::Message() << name(d) << ", length " << n << (columns ? ", columns" : ", rows"));
        f(lines);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

void expect_near(const Values& got, const Values& expected, const Values& bound) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], bound[i]) << "element " << i;
}

TEST(RowLengths, SumsAndExtremes) {
  for_lines([](const Lines& l) {
    Values sums, bounds, largest, squares, square_bounds;
    Integers where;
    for (std::int64_t r = 0; r < kRows; ++r) {
      const double* row = l.row(l.v, r);
      double total = 0, magnitude = 0, square = 0;
      for (std::int64_t i = 0; i < l.length; ++i) {
        total += row[i];
        magnitude += std::abs(row[i]);
        square += row[i] * row[i];
      }
      sums.push_back(total);
      bounds.push_back(epsilon(l.dtype) * std::abs(total) + sum_epsilon(l.dtype) * magnitude);
      squares.push_back(std::sqrt(square));
      square_bounds.push_back((epsilon(l.dtype) + sum_epsilon(l.dtype)) * std::sqrt(square));
      const double* top = std::max_element(row, row + l.length);
      largest.push_back(*top);
      where.push_back(top - row);
    }
    expect_near(sum(l.x, {l.dim()}).to_vector<double>(), sums, bounds);
    expect_near(norm(l.x, 2, {l.dim()}).to_vector<double>(), squares, square_bounds);
    EXPECT_EQ(amax(l.x, {l.dim()}).to_vector<double>(), largest);
    EXPECT_EQ(argmax(l.x, l.dim()).to_vector<std::int64_t>(), where);
    const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
    EXPECT_NEAR(sum(l.x, {}, {.dtype = f64}).item<double>(), total, 1e-5 * static_cast<double>(kRows * l.length));
  });
}

TEST(RowLengths, CumulativeSums) {
  for_lines([](const Lines& l) {
    Values sums(l.v.size()), bounds(l.v.size());
    for (std::int64_t r = 0; r < kRows; ++r) {
      double total = 0;
      for (std::int64_t i = 0; i < l.length; ++i) {
        total += l.row(l.v, r)[i];
        sums[static_cast<std::size_t>(r * l.length + i)] = total;
        bounds[static_cast<std::size_t>(r * l.length + i)] = epsilon(l.dtype) * std::abs(total) + 1e-10;
      }
    }
    expect_near(l.values_of(cumsum(l.x, l.dim())), sums, bounds);
  });
}

// Rows that several blocks share, around the lengths where there is one more: ties, NaN and sums across their borders.
// Whole numbers, so that sums are exact in any order.
constexpr std::int64_t kSharedLengths[] = {8191, 8192, 8193, 16385, 70001};

TEST(RowLengths, ExtremesOfRowsOfSeveralBlocks) {
  for (const std::int64_t n : kSharedLengths) {
    SCOPED_TRACE(n);
    Values v(static_cast<std::size_t>(2 * n));
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(i * 7919 % 101);
    for (const DType d : {f32, f64, bf16, i32, u8}) {
      const Tensor x = tensor(v, {2, n}, {.dtype = d});
      Values best, worst;
      Integers first_best, first_worst;
      for (auto row = v.begin(); row != v.end(); row += n) {
        const auto high = std::max_element(row, row + n), low = std::min_element(row, row + n);
        best.push_back(*high), worst.push_back(*low);
        first_best.push_back(high - row), first_worst.push_back(low - row);
      }
      const ValuesAndIndices most = max(x, 1), least = min(x, 1);
      EXPECT_EQ(most.values.to_vector<double>(), best) << name(d);
      EXPECT_EQ(least.values.to_vector<double>(), worst) << name(d);
      EXPECT_EQ(most.indices.to_vector<std::int64_t>(), first_best) << name(d);
      EXPECT_EQ(least.indices.to_vector<std::int64_t>(), first_worst) << name(d);
      // A single one that is the best, at the very end.
      Tensor one = zeros({n}, {.dtype = d});
      one[n - 1].fill_(1);
      EXPECT_EQ(argmax(one, 0).item<std::int64_t>(), n - 1) << name(d);
      EXPECT_EQ(argmin(one, 0).item<std::int64_t>(), 0) << name(d);
      if (!is_floating(d)) continue;
      one[n - 1].fill_(std::nan(""));
      one[n / 2].fill_(std::nan(""));
      EXPECT_EQ(argmax(one, 0).item<std::int64_t>(), n / 2) << name(d);
      EXPECT_EQ(argmin(one, 0).item<std::int64_t>(), n / 2) << name(d);
      EXPECT_TRUE(std::isnan(min(one, 0).values.item<double>())) << name(d);
    }
  }
}

TEST(RowLengths, CumulativeSumsOfRowsOfSeveralBlocks) {
  for (const std::int64_t n : kSharedLengths) {
    SCOPED_TRACE(n);
    Integers v(static_cast<std::size_t>(2 * n)), sums(v.size()), products(v.size()), behind(v.size());
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<std::int64_t>(i * 7919 % 100) * 2 - 99;  // odd
    for (std::int64_t row = 0; row < 2; ++row) {
      std::uint64_t sum = 0, product = 1, rest = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        const auto at = static_cast<std::size_t>(row * n + i), back = static_cast<std::size_t>(row * n + n - 1 - i);
        sums[at] = static_cast<std::int64_t>(sum += static_cast<std::uint64_t>(v[at]));
        products[at] = static_cast<std::int64_t>(product *= static_cast<std::uint64_t>(v[at]));
        behind[back] = static_cast<std::int64_t>(rest += static_cast<std::uint64_t>(v[back]));
      }
    }
    const Tensor x = tensor(v, {2, n}, {.dtype = i64});
    EXPECT_EQ(cumsum(x, 1).to_vector<std::int64_t>(), sums);
    EXPECT_EQ(cumprod(x, 1).to_vector<std::int64_t>(), products);
    EXPECT_EQ(cumsum(x.transpose(0, 1).contiguous(), 0).transpose(0, 1).to_vector<std::int64_t>(), sums);
    for (const DType d : {f32, f64}) {
      Tensor in = x.to(d).requires_grad_();
      const Tensor y = cumsum(in, 1);
      EXPECT_EQ(y.to_vector<std::int64_t>(), sums) << name(d);
      y.backward(x.to(d));  // whose gradient goes from behind
      EXPECT_EQ(in.grad().to_vector<std::int64_t>(), behind) << name(d);
    }
  }
}

TEST(RowLengths, LogSumExp) {
  for_lines([](const Lines& l) {
    Values expected, bound;
    for (std::int64_t r = 0; r < kRows; ++r) {
      double total = 0;
      for (std::int64_t i = 0; i < l.length; ++i) total += std::exp(l.row(l.v, r)[i]);
      expected.push_back(std::log(total));
      // Sums are right to a part of 1e-5, which their logarithm is wrong by.
      bound.push_back(epsilon(l.dtype) * (std::abs(expected.back()) + 1) + (l.dtype == f64 ? 0 : 1e-5));
    }
    expect_near(logsumexp(l.x, {l.dim()}).to_vector<double>(), expected, bound);
  });
}

TEST(RowLengths, GradientsOfExtremesOfColumnsAreThoseOfRows) {
  for (const std::int64_t width : {1, 4, 255, 256, 300}) {
    for (const DType d : {f32, bf16, f64}) {
      SCOPED_TRACE(testing::Message() << name(d) << " " << width);
      Values v(static_cast<std::size_t>(5 * width * 2));
      for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(i * 7 % 5) - 3;  // with ties
      v[v.size() / 2] = std::nan("");
      const Tensor x = tensor(v, {2, 5, width}, {.dtype = d}).requires_grad_();
      const Tensor turned = x.detach().transpose(1, 2).contiguous().requires_grad_();
      const Tensor g = arange(0, 2 * width, 1, {.dtype = d}).reshape({2, width});
      const auto columns = grad({amax(x, {1})}, {x}, {.grad_outputs = {g}})[0].transpose(1, 2).to_vector<double>();
      const auto rows = grad({amax(turned, {2})}, {turned}, {.grad_outputs = {g}})[0].to_vector<double>();
      EXPECT_EQ(columns, rows);
      // By hand: the share of each tie.
      const auto values = turned.to_vector<double>(), grads = g.to_vector<double>();
      for (std::size_t r = 0; r < rows.size() / 5; ++r) {
        const double* row = values.data() + 5 * r;
        const bool nan = std::any_of(row, row + 5, [](double e) { return e != e; });
        const double top = *std::max_element(row, row + 5);
        const auto takes = [&](double e) { return nan ? e != e : e == top; };
        const auto ties = std::count_if(row, row + 5, takes);
        for (std::size_t i = 0; i < 5; ++i) {
          const double share = takes(row[i]) ? grads[r] / static_cast<double>(ties) : 0;
          ASSERT_NEAR(rows[5 * r + i], share, 2 * epsilon(d) * std::abs(share)) << r << " " << i;
        }
      }
    }
  }
}

TEST(RowLengths, SoftmaxAndItsGradient) {
  for_lines([](const Lines& l) {
    Values w(l.v.size()), y(l.v.size()), y_bound(l.v.size()), logs(l.v.size()), log_bound(l.v.size()),
        x_grad(l.v.size()), grad_bound(l.v.size());
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<double>(i % 7) / 8 - 0.25;
    const double eps = 2 * epsilon(l.dtype) + (l.dtype == f64 ? 0 : 1e-5);
    for (std::int64_t r = 0; r < kRows; ++r) {
      const auto at = [&](std::int64_t i) { return static_cast<std::size_t>(r * l.length + i); };
      double total = 0, inner = 0, magnitude = 0;
      for (std::int64_t i = 0; i < l.length; ++i) total += std::exp(l.v[at(i)]);
      for (std::int64_t i = 0; i < l.length; ++i) {
        logs[at(i)] = l.v[at(i)] - std::log(total);
        log_bound[at(i)] = eps * (std::abs(logs[at(i)]) + 1);
        y[at(i)] = std::exp(logs[at(i)]);
        y_bound[at(i)] = eps * y[at(i)];
        inner += y[at(i)] * w[at(i)];
        magnitude += std::abs(y[at(i)] * w[at(i)]);
      }
      for (std::int64_t i = 0; i < l.length; ++i) {
        x_grad[at(i)] = y[at(i)] * (w[at(i)] - inner);
        grad_bound[at(i)] = 4 * eps * y[at(i)] * (std::abs(w[at(i)]) + magnitude) + 1e-12;
      }
    }
    Tensor x = l.x.clone().requires_grad_();
    const Tensor result = softmax(x, l.dim());
    expect_near(l.values_of(result), y, y_bound);
    expect_near(l.values_of(log_softmax(l.x, l.dim())), logs, log_bound);
    result.backward(l.tensor_of(w, l.dtype));
    expect_near(l.values_of(x.grad()), x_grad, grad_bound);
  });
}

TEST(RowLengths, CrossEntropyAndItsGradient) {
  for_lines([](const Lines& l) {
    if (l.columns) return;
    Integers target;
    double loss = 0;
    Values x_grad(l.v.size()), bound(l.v.size());
    for (std::int64_t r = 0; r < kRows; ++r) {
      target.push_back(r * 7919 % l.length);
      const auto at = [&](std::int64_t i) { return static_cast<std::size_t>(r * l.length + i); };
      double total = 0;
      for (std::int64_t i = 0; i < l.length; ++i) total += std::exp(l.v[at(i)]);
      loss += (std::log(total) - l.v[at(target.back())]) / kRows;
      for (std::int64_t i = 0; i < l.length; ++i) {
        const double p = std::exp(l.v[at(i)]) / total;
        x_grad[at(i)] = (p - (i == target.back() ? 1 : 0)) / kRows;
        bound[at(i)] = (epsilon(l.dtype) + 1e-5) * (p + (i == target.back() ? 1 : 0));
      }
    }
    Tensor x = l.x.clone().requires_grad_();
    const Tensor result = cross_entropy(x, tensor(target, {kRows}, {.dtype = i64}));
    EXPECT_NEAR(result.item<double>(), loss, (epsilon(l.dtype) + 1e-5) * (1 + loss));
    result.backward();
    expect_near(l.values_of(x.grad()), x_grad, bound);
  });
}

TEST(RowLengths, SortAndTopK) {
  for_lines([](const Lines& l) {
    Values sorted(l.v.size()), best;
    Integers index(l.v.size()), best_index;
    const std::int64_t k = std::min<std::int64_t>(l.length, 5);
    for (std::int64_t r = 0; r < kRows; ++r) {
      const double* row = l.row(l.v, r);
      const auto first = index.begin() + r * l.length;
      std::iota(first, first + l.length, 0);
      std::stable_sort(first, first + l.length, [&](std::int64_t a, std::int64_t b) { return row[a] > row[b]; });
      for (std::int64_t i = 0; i < l.length; ++i) {
        const double value = row[first[i]];
        sorted[static_cast<std::size_t>(r * l.length + i)] = value;
        if (i >= k) continue;
        best.push_back(value);
        best_index.push_back(first[i]);
      }
    }
    const SortResult all = sort(l.x, l.dim(), {.descending = true}), top = topk(l.x, k, l.dim());
    const auto rows = [&](const Tensor& t) { return l.columns ? t.transpose(0, 1) : t; };
    EXPECT_EQ(rows(all.values).to_vector<double>(), sorted);
    EXPECT_EQ(rows(all.indices).to_vector<std::int64_t>(), index);
    EXPECT_EQ(rows(top.values).to_vector<double>(), best);
    EXPECT_EQ(rows(top.indices).to_vector<std::int64_t>(), best_index);
  });
}

}  // namespace
}  // namespace halfstep
