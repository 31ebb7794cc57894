// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/op_golden.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

using test::GoldenEntry;
using Values = std::vector<double>;
using Integers = std::vector<std::int64_t>;
using Tensors = std::vector<Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::optional<DType> dtype_of_entry(const GoldenEntry& e) {
  if (!e.has("dtype")) return {};
  return e.text("dtype") == "f64" ? f64 : f16;
}
ReduceOptions reduce_options(const GoldenEntry& e) {
  return {.keepdim = e.flag("keepdim", false), .dtype = dtype_of_entry(e)};
}
KeepOptions keep_options(const GoldenEntry& e) { return {.keepdim = e.flag("keepdim", false)}; }
VarOptions var_options(const GoldenEntry& e) {
  return {.correction = e.real("correction", 1), .keepdim = e.flag("keepdim", false)};
}
double order_of(const GoldenEntry& e) {
  try {
    return e.real("p", 2);
  } catch (const std::invalid_argument&) {
    return e.text("p") == "inf" ? kInfinity : -kInfinity;
  }
}
std::optional<std::int64_t> dim_of(const GoldenEntry& e) {
  if (!e.has("dim")) return {};
  return e.integer("dim");
}

const std::map<std::string, test::GoldenCall>& calls() {
  static const std::map<std::string, test::GoldenCall> table = {
      {"sum", [](auto& e, auto& in) { return Tensors{sum(in[0], test::golden_dims(e), reduce_options(e))}; }},
      {"mean", [](auto& e, auto& in) { return Tensors{mean(in[0], test::golden_dims(e), reduce_options(e))}; }},
      {"prod", [](auto& e, auto& in) { return Tensors{prod(in[0], test::golden_dims(e), reduce_options(e))}; }},
      {"var", [](auto& e, auto& in) { return Tensors{var(in[0], test::golden_dims(e), var_options(e))}; }},
      {"std", [](auto& e, auto& in) { return Tensors{std(in[0], test::golden_dims(e), var_options(e))}; }},
      {"amax", [](auto& e, auto& in) { return Tensors{amax(in[0], test::golden_dims(e), keep_options(e))}; }},
      {"amin", [](auto& e, auto& in) { return Tensors{amin(in[0], test::golden_dims(e), keep_options(e))}; }},
      {"any", [](auto& e, auto& in) { return Tensors{any(in[0], test::golden_dims(e), keep_options(e))}; }},
      {"all", [](auto& e, auto& in) { return Tensors{all(in[0], test::golden_dims(e), keep_options(e))}; }},
      {"norm",
       [](auto& e, auto& in) { return Tensors{norm(in[0], order_of(e), test::golden_dims(e), reduce_options(e))}; }},
      {"logsumexp", [](auto& e, auto& in) { return Tensors{logsumexp(in[0], test::golden_dims(e), keep_options(e))}; }},
      {"cumsum",
       [](auto& e, auto& in) { return Tensors{cumsum(in[0], e.integer("dim"), {.dtype = dtype_of_entry(e)})}; }},
      {"cumprod",
       [](auto& e, auto& in) { return Tensors{cumprod(in[0], e.integer("dim"), {.dtype = dtype_of_entry(e)})}; }},
      {"argmax", [](auto& e, auto& in) { return Tensors{argmax(in[0], dim_of(e), keep_options(e))}; }},
      {"argmin", [](auto& e, auto& in) { return Tensors{argmin(in[0], dim_of(e), keep_options(e))}; }},
      {"dot", [](auto&, auto& in) { return Tensors{dot(in[0], in[1])}; }},
      {"max",
       [](auto& e, auto& in) {
         if (!e.has("dim")) return Tensors{max(in[0])};
         const auto [values, indices] = max(in[0], e.integer("dim"), keep_options(e));
         return Tensors{values, indices};
       }},
      {"min",
       [](auto& e, auto& in) {
         if (!e.has("dim")) return Tensors{min(in[0])};
         const auto [values, indices] = min(in[0], e.integer("dim"), keep_options(e));
         return Tensors{values, indices};
       }},
  };
  return table;
}

TEST(Reduce, AgreesWithPyTorch) {
  for (const auto& [op, call] : calls()) test::check_op_goldens(op, call);
}
TEST(Reduce, FollowsThePolicy) {
  for (const char* op :
       {"sum", "mean", "prod", "var", "std", "amax", "amin", "norm", "logsumexp", "cumsum", "cumprod", "argmax"}) {
    test::check_policy_goldens(op, calls().at(op));
  }
}

Tensor wave(const Shape& sizes, DType dtype = f64, double step = 1) {
  Values values;
  for (std::int64_t i = 0; i < sizes.numel(); ++i) values.push_back(std::sin(1 + step * static_cast<double>(i)));
  return tensor(values, sizes, {.dtype = dtype});
}
Tensor leaf(const Shape& sizes) { return wave(sizes).requires_grad_(); }

// Every layout gives what the contiguous copy gives; the paths by rows, by columns and for any strides differ in the
// order of sums, so float64 results may differ by roundings.
TEST(Reduce, LayoutsAgree) {
  const Tensor x = wave({6, 5, 7});
  const Tensors views = {x,
                         x.transpose(0, 2),
                         x.transpose(0, 1),
                         x.slice(2, 1, 6, 2),
                         x.slice(0, 1, 6, 2).transpose(1, 2),
                         x.select(1, 2).unsqueeze(1).expand({6, 3, 7})};
  const std::vector<Shape> dims = {{}, {0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}};
  for (const Tensor& v : views) {
    const Tensor copy = v.clone(MemoryFormat::contiguous);
    const auto at = copy.to_vector<double>();
    for (const Shape& d : dims) {
      const auto check = [&](const Tensor& a, const Tensor& b) {
        const auto p = a.to_vector<double>(), q = b.to_vector<double>();
        ASSERT_EQ(p.size(), q.size());
        for (std::size_t i = 0; i < p.size(); ++i) EXPECT_NEAR(p[i], q[i], 1e-12);
      };
      check(sum(v, d), sum(copy, d));
      check(prod(v, d), prod(copy, d));
      check(var(v, d), var(copy, d));
      check(amax(v, d), amax(copy, d));
      check(norm(v, 3, d), norm(copy, 3, d));
      check(logsumexp(v, d), logsumexp(copy, d));
      if (d.size() == 1) {
        check(cumsum(v, d[0]), cumsum(copy, d[0]));
        check(max(v, d[0]).indices, max(copy, d[0]).indices);
      }
    }
  }
  // Against plain loops.
  const auto values = x.to_vector<double>();
  const auto rows = sum(x, {2}).to_vector<double>(), columns = sum(x, {0}).to_vector<double>();
  for (std::size_t i = 0; i < 30; ++i) {
    double want = 0;
    for (std::size_t k = 0; k < 7; ++k) want += values[i * 7 + k];
    EXPECT_NEAR(rows[i], want, 1e-13);
  }
  for (std::size_t i = 0; i < 35; ++i) {
    double want = 0;
    for (std::size_t k = 0; k < 6; ++k) want += values[k * 35 + i];
    EXPECT_NEAR(columns[i], want, 1e-13);
  }
}

// A million equal terms: added one after the other, float32 would be off by 1e-2 relative; blocks of at most 8192
// elements in 32 lanes make at most 256 + 5 roundings of 2^-24 each.
TEST(Reduce, LongSumsKeepTheirDigits) {
  const std::int64_t n = 1 << 20;
  for (DType dtype : {f32, f16, bf16}) {
    const Tensor x = full({n}, 0.1, {.dtype = dtype});
    const double exact = x.slice(0, 0, 1).item<double>() * static_cast<double>(n);
    for (const Tensor& y :
         {sum(x, {}, {.dtype = f32}), sum(x.reshape({n / 4, 4}), {0}, {.dtype = f32}).select(0, 1) * 4,
          sum(x.reshape({n / 64, 64}), {0}, {.dtype = f32}).select(0, 5) * 64}) {
      EXPECT_NEAR(y.item<double>(), exact, exact * 261 * 0x1p-24) << name(dtype);
    }
  }
}

TEST(Reduce, SixteenBitSumsRoundOnce) {
  const Tensor x = full({4096}, 1, {.dtype = bf16});
  EXPECT_EQ(sum(x).item<double>(), 4096);  // bf16 sums would stop at 256
  EXPECT_EQ(sum(x).dtype(), bf16);
  const Tensor y = full({300, 8}, 300, {.dtype = f16});
  EXPECT_EQ(sum(y, {0}).to_vector<double>()[0], kInfinity);
  EXPECT_EQ(sum(y, {0}, {.dtype = f32}).to_vector<double>()[0], 90000);
  EXPECT_EQ(mean(y).item<double>(), 300);
}

// Down columns, of numbers of columns and rows that are no whole number of vectors or blocks: of a whole tensor, of
// some columns of a wider one, and of two dimensions with a gap between them. Up to 128 terms are added up in float32,
// and what 16 bits make of the result is one rounding.
TEST(Reduce, SumsOfColumnsAgreeWithFloat64OnAnyNumberOfThreads) {
  const test::ThreadsGuard guard;
  for (const auto& [n, columns] : {std::pair{1, 4}, std::pair{2, 67}, std::pair{9, 16}, std::pair{128, 31},
                                   std::pair{129, 300}, std::pair{1000, 64}, std::pair{40000, 5}}) {
    for (const DType dtype : {f32, f16, bf16}) {
      const Tensor x = wave({n, columns}, f64, 0.7).to(dtype);
      Tensor wider = zeros({n, columns + 3}, {.dtype = dtype}), folded = zeros({2, n + 1, columns}, {.dtype = dtype});
      Tensor part = wider.slice(1, 1, columns + 1), two = folded.slice(1, 0, n);
      part.copy_(x);
      two.copy_(x.unsqueeze(0).expand({2, n, columns}));
      const Values v = x.to_vector<double>();
      const std::string what = std::to_string(n) + " x " + std::to_string(columns) + " " + std::string(name(dtype));
      const auto check = [&](const Tensor& got, double times) {
        const Values y = got.to_vector<double>();
        ASSERT_EQ(y.size(), static_cast<std::size_t>(columns)) << what;
        const double half_ulp = dtype == f32 ? 0x1p-24 : dtype == f16 ? 0x1p-11 : 0x1p-8;
        for (std::size_t c = 0; c < y.size(); ++c) {
          double exact = 0, size = 0;
          for (std::size_t r = 0; r < static_cast<std::size_t>(n); ++r) {
            exact += v[r * y.size() + c] * times;
            size += std::abs(v[r * y.size() + c] * times);
          }
          ASSERT_NEAR(y[c], exact, 128 * 0x1p-24 * size + half_ulp * std::abs(exact) + (dtype == f16 ? 0x1p-25 : 0))
              << what << ", column " << c;
        }
      };
      Values first;
      for (const int threads : {1, 2, 5}) {
        set_num_threads(threads);
        const Tensor y = sum(x, {0});
        check(y, 1);
        check(mean(x, {0}), 1.0 / n);
        check(sum(part, {0}), 1);
        check(sum(two, {0, 1}), 2);
        if (threads == 1) first = y.to_vector<double>();
        EXPECT_EQ(y.to_vector<double>(), first) << what;
      }
    }
  }
}

// A column that leaves float32 on the way does not touch its neighbours, and comes back.
TEST(Reduce, SumsOfColumnsMayLeaveFloat32OnTheWay) {
  if (!default_device().is_cpu()) GTEST_SKIP() << "other devices may lose small terms beside large ones";
  for (const std::int64_t columns : {4, 16, 70}) {
    Tensor x = ones({6, columns});
    Tensor large = x.select(1, 2);
    large.copy_(tensor(Values{3e38, 3e38, -3e38, -3e38, 1, 2}, {6}));
    Tensor endless = x.select(1, 3);
    endless.copy_(tensor(Values{1, kInfinity, 1, 1, 1, 1}, {6}));
    const Values y = sum(x, {0}).to_vector<double>();
    for (std::size_t c = 0; c < y.size(); ++c) EXPECT_EQ(y[c], c == 2 ? 3 : c == 3 ? kInfinity : 6) << c;
  }
}

TEST(Reduce, ResultsDontDependOnTheNumberOfThreads) {
  const Tensor x = wave({1 << 19}, f32, 0.7), m = wave({1 << 13, 48}, f32, 0.7);
  const int threads = num_threads();
  std::vector<Values> results;
  for (int n : {1, 2, 3}) {
    set_num_threads(n);
    Values r = sum(m, {0}).to_vector<double>();
    r.push_back(sum(x).item<double>());
    r.push_back(var(x).item<double>());
    results.push_back(r);
  }
  set_num_threads(threads);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

// Down columns and along rows, of lengths that are no whole number of vectors or blocks. Sums of up to 128 terms in
// float32, in columns.
TEST(Reduce, LogSumExpOfColumnsAgreesWithFloat64) {
  const test::ThreadsGuard guard(3);
  for (const auto& [n, columns] : {std::pair{3, 5}, std::pair{300, 17}, std::pair{129, 270}, std::pair{70000, 5}}) {
    for (const DType dtype : {f32, f16, bf16}) {
      const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
      const Tensor x = (wave({n, columns}, f32, 0.7) * 20).to(dtype).requires_grad_();
      const auto v = x.to_vector<double>();
      const Tensor y = logsumexp(x, {0});
      const auto got = y.to_vector<double>(), slopes = grad({sum(y)}, {x})[0].to_vector<double>();
      for (std::int64_t c = 0; c < columns; ++c) {
        double total = 0;
        for (std::int64_t r = 0; r < n; ++r) total += std::exp(v[static_cast<std::size_t>(r * columns + c)]);
        const double expected = std::log(total);
        ASSERT_NEAR(got[static_cast<std::size_t>(c)], expected, u * std::abs(expected) + 140 * 0x1p-24)
            << n << " " << c;
        for (std::int64_t r = 0; r < n; ++r) {
          const auto at = static_cast<std::size_t>(r * columns + c);
          const double p = std::exp(v[at]) / total;
          ASSERT_NEAR(slopes[at], p, (u + 140 * 0x1p-24) * p + (dtype == f16 ? 0x1p-24 : 0))
              << n << " " << c << " " << r;
        }
      }
    }
  }
  const double nan = std::nan("");
  const Tensor odd = tensor(Values{kInfinity, -kInfinity, nan, 1, 2, -kInfinity, 5, 1}, {2, 4}).requires_grad_();
  const Tensor y = logsumexp(odd, {0});
  const auto got = y.to_vector<double>(), slopes = grad({sum(y)}, {odd})[0].to_vector<double>();
  EXPECT_EQ(got[0], kInfinity);
  EXPECT_EQ(got[1], -kInfinity);
  EXPECT_TRUE(std::isnan(got[2]));
  EXPECT_NEAR(got[3], 1 + std::log(2), 1e-6);
  EXPECT_EQ(slopes[4], 0);  // beside infinity
  EXPECT_NEAR(slopes[7], 0.5, 1e-6);
}

TEST(Reduce, DotOfAnyLengthAgreesWithFloat64OnAnyNumberOfThreads) {
  const test::ThreadsGuard guard;
  for (const std::int64_t n : {1, 15, 513, 16384, 100001}) {
    for (const DType dtype : {f32, f16, bf16, f64}) {
      const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
      const Tensor a = wave({n}, f32, 0.7).to(dtype), b = wave({2 * n}, f32, 0.3).to(dtype);
      for (const bool strided : {false, true}) {
        const Tensor other = strided ? b.slice(0, 0, INT64_MAX, 2) : b.slice(0, n, INT64_MAX);
        const auto x = a.to_vector<double>(), y = other.contiguous().to_vector<double>();
        double expected = 0, magnitude = 0;
        for (std::size_t i = 0; i < x.size(); ++i) {
          expected += x[i] * y[i];
          magnitude += std::abs(x[i] * y[i]);
        }
        std::vector<double> results;
        for (const int threads : {1, 2, 4}) {
          set_num_threads(threads);
          results.push_back(dot(a, other).item<double>());
        }
        EXPECT_NEAR(results[0], expected, u * std::abs(expected) + 66 * 0x1p-24 * magnitude) << n << name(dtype);
        EXPECT_EQ(results[0], results[1]);
        EXPECT_EQ(results[0], results[2]);
      }
    }
  }
  // Terms that fit float32 and whose partial sums don't.
  Values large(100, 3e38), signs(100, 1);
  for (std::size_t i = 50; i < 100; ++i) signs[i] = -1;
  EXPECT_EQ(dot(tensor(large, {100}), tensor(signs, {100})).item<double>(), 0);
  EXPECT_EQ(dot(empty({0}), empty({0})).item<double>(), 0);
}

TEST(Reduce, GradientsOfExtremesAreSharedByTies) {
  const test::ThreadsGuard guard(3);
  for (const std::int64_t n : {1, 37, 2048, 5003}) {
    for (const DType dtype : {f32, f16, bf16, f64}) {
      Values values;
      std::vector<std::size_t> ties(7, 0);
      for (std::int64_t i = 0; i < 7 * n; ++i) {
        const std::int64_t row = i / n, column = i % n;
        const bool largest = column % 16 == row;
        values.push_back(largest ? 2.0 : 0.25 * static_cast<double>(column % 5));
        if (column == n - 1 && row == 6) values.back() = std::nan("");
      }
      const Tensor x = tensor(values, {7, n}).to(dtype).requires_grad_();
      const auto slopes = grad({sum(amax(x, {1}) * 4)}, {x})[0].to_vector<double>();
      const auto magnitudes = grad({sum(norm(neg(x), kInfinity, {1}) * 4)}, {x})[0].to_vector<double>();
      for (std::size_t row = 0; row < 6; ++row) {
        const auto begin = values.begin() + static_cast<std::ptrdiff_t>(row) * n;
        const double top = *std::max_element(begin, begin + n);
        const double weight = 4 / static_cast<double>(std::count(begin, begin + n, top));
        const double u = dtype == f16 ? 0x1p-10 : dtype == bf16 ? 0x1p-7 : 0x1p-23;
        for (std::int64_t i = 0; i < n; ++i) {
          const auto at = row * static_cast<std::size_t>(n) + static_cast<std::size_t>(i);
          const double expected = values[at] == top ? weight : 0;
          ASSERT_NEAR(slopes[at], expected, 2 * u * expected) << n << " " << row << " " << i;
          ASSERT_NEAR(magnitudes[at], top == 0 ? 0 : expected, 2 * u * expected) << n << " " << row << " " << i;
        }
      }
      // NaN is the largest of its row, alone.
      EXPECT_EQ(slopes[static_cast<std::size_t>(7 * n - 1)], 4);
      EXPECT_EQ(std::count(slopes.begin() + static_cast<std::ptrdiff_t>(6 * n), slopes.end(), 0), n - 1);
    }
  }
}

// Rows that are taken together and those left over, blocks and their rests, along either dimension.
TEST(Reduce, GradientsOfProductsAreThoseOfTheOthers) {
  const test::ThreadsGuard guard(3);
  for (const std::int64_t n : {1, 2, 63, 64, 130}) {
    for (const std::int64_t rows : {1, 8, 21}) {
      for (const std::int64_t zeros : {0, 1, 2}) {
        Values values;
        for (std::int64_t i = 0; i < rows * n; ++i) {
          values.push_back(i % n < zeros ? 0 : (i % 2 == 0 ? 1.125 : -0.875));
        }
        const Tensor x = tensor(values, {rows, n}).requires_grad_();
        for (const bool turned : {false, true}) {
          const Tensor y = turned ? prod(x.t().contiguous(), {0}) : prod(x, {1});
          const auto slopes = grad({sum(y)}, {x})[0].to_vector<double>();
          for (std::int64_t i = 0; i < rows * n; ++i) {
            double expected = 1;
            for (std::int64_t k = 0; k < n; ++k)
              expected *= k == i % n ? 1 : values[static_cast<std::size_t>(i / n * n + k)];
            const double bound = static_cast<double>(n) * 0x1p-24 * std::abs(expected);
            ASSERT_NEAR(slopes[static_cast<std::size_t>(i)], expected, bound) << n << " " << rows << " " << i;
          }
        }
      }
    }
  }
}

TEST(Reduce, NothingToReduce) {
  const Tensor none = empty({0}), rows = empty({3, 0});
  EXPECT_EQ(sum(none).item<double>(), 0);
  EXPECT_EQ(prod(none).item<double>(), 1);
  EXPECT_TRUE(std::isnan(mean(none).item<double>()));
  EXPECT_TRUE(std::isnan(var(full({1}, 3)).item<double>()));
  EXPECT_EQ(sum(rows, {1}).to_vector<double>(), (Values{0, 0, 0}));
  EXPECT_EQ(sum(rows, {0}).sizes(), (Shape{0}));
  EXPECT_EQ(norm(none).item<double>(), 0);
  EXPECT_EQ(logsumexp(rows, {1}).to_vector<double>()[0], -kInfinity);
  EXPECT_THROW(amax(none), ShapeError);
  EXPECT_THROW(argmax(none), ShapeError);
  EXPECT_THROW(max(rows, 1), ShapeError);
  EXPECT_THROW(norm(none, kInfinity), ShapeError);
  EXPECT_EQ(amax(rows, {0}).sizes(), (Shape{0}));
  EXPECT_FALSE(any(none).item<bool>());
  EXPECT_TRUE(all(none).item<bool>());
  EXPECT_EQ(cumsum(none, 0).numel(), 0);
}

// One row is added up column by column too, in blocks of columns: 600 is two whole ones and a part of a third.
TEST(Reduce, ADimensionOfOneKeepsEveryValue) {
  for (const DType dtype : {f32, f16, bf16, f64}) {
    for (const std::int64_t width : {1, 3, 4, 256, 600}) {
      Values values(static_cast<std::size_t>(width));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 200) - 99.5;  // exact in bf16
      const Tensor x = tensor(values, {1, width}, {.dtype = dtype});
      const Tensor stacked = cat({x, x}).reshape({2, 1, width});
      EXPECT_EQ(sum(x, {0}).to_vector<double>(), values) << name(dtype) << width;
      EXPECT_EQ(mean(x, {0}).to_vector<double>(), values) << name(dtype) << width;
      EXPECT_EQ(amax(x, {0}).to_vector<double>(), values) << name(dtype) << width;
      EXPECT_EQ(logsumexp(x, {0}).to_vector<double>(), values) << name(dtype) << width;
      EXPECT_EQ(sum(stacked, {1})[1].to_vector<double>(), values) << name(dtype) << width;
    }
  }
}

TEST(Reduce, ZeroDimensional) {
  const Tensor x = full({}, 3, {.dtype = f64});
  EXPECT_EQ(sum(x).item<double>(), 3);
  EXPECT_EQ(sum(x, {0}).item<double>(), 3);
  EXPECT_EQ(max(x, 0).values.item<double>(), 3);
  EXPECT_EQ(argmax(x).item<std::int64_t>(), 0);
  EXPECT_EQ(cumprod(x, -1).item<double>(), 3);
}

TEST(Reduce, Integers) {
  const Tensor x = tensor(Integers{1, -2, 3, 0}, {2, 2}, {.dtype = i32});
  EXPECT_EQ(sum(x).dtype(), i64);
  EXPECT_EQ(sum(x).item<std::int64_t>(), 2);
  EXPECT_EQ(prod(x, {1}).to_vector<std::int64_t>(), (Integers{-2, 0}));
  EXPECT_EQ(amax(x).dtype(), i32);
  EXPECT_EQ(amin(x).item<std::int64_t>(), -2);
  EXPECT_EQ(count_nonzero(x, {0}).to_vector<std::int64_t>(), (Integers{2, 1}));
  EXPECT_EQ(sum(x, {}, {.dtype = f32}).dtype(), f32);
  EXPECT_EQ(cumsum(x, 0).to_vector<std::int64_t>(), (Integers{1, -2, 4, -2}));
  EXPECT_EQ(dot(x[0], x[1]).item<std::int64_t>(), 3);
  EXPECT_THROW(mean(x), DTypeError);
  EXPECT_EQ(mean(x, {}, {.dtype = f32}).item<double>(), 0.5);
  EXPECT_THROW(var(x), DTypeError);
  const Tensor big = tensor(Integers{(std::int64_t{1} << 53) + 1, 1}, {2}, {.dtype = i64});
  EXPECT_EQ(sum(big).item<std::int64_t>(), (std::int64_t{1} << 53) + 2);
}

TEST(Reduce, NaNWins) {
  const Tensor x = tensor(Values{1, NAN, 3, 2}, {4});
  EXPECT_TRUE(std::isnan(amax(x).item<double>()));
  EXPECT_TRUE(std::isnan(amin(x).item<double>()));
  EXPECT_EQ(argmax(x).item<std::int64_t>(), 1);
  EXPECT_EQ(argmin(x).item<std::int64_t>(), 1);
  Values many(1000, 1.0);
  many[777] = NAN;
  EXPECT_TRUE(std::isnan(amax(tensor(many, {1000})).item<double>()));
  EXPECT_TRUE(std::isnan(amin(tensor(many, {1000})).item<double>()));
}

TEST(Reduce, VarianceOfLargeNumbers) {
  // Sums of squares would lose all digits in float32.
  const Tensor x = tensor(Values{100000, 100001, 100002}, {3});
  EXPECT_EQ(var(x).item<double>(), 1);
  const auto [v, m] = var_mean(x, {}, {.correction = 0});
  EXPECT_NEAR(v.item<double>(), 2.0 / 3, 1e-7);
  EXPECT_EQ(m.item<double>(), 100001);
}

TEST(Reduce, Errors) {
  EXPECT_THROW(sum(ones({2, 3}), {2}), ShapeError);
  EXPECT_THROW(sum(ones({2, 3}), {0, -2}), ShapeError);
  EXPECT_THROW(sum(Tensor{}), Error);
  EXPECT_THROW(dot(ones({2}), ones({3})), ShapeError);
  EXPECT_THROW(cumsum(ones({2}), 1), ShapeError);
  EXPECT_THROW(norm(ones({2}, {.dtype = i64})), DTypeError);
}

void check_gradients(const std::function<Tensor(const Tensor&)>& f, const Tensor& x) {
  const auto g = [&](const Tensors& in) { return Tensors{f(in[0])}; };
  gradcheck(g, {x});
  gradgradcheck(g, {x});
}

TEST(ReduceGradients, FirstAndSecond) {
  const Tensor x = leaf({3, 4}), t = wave({4, 3}).t().detach().requires_grad_();
  for (const Tensor& in : {x, t}) {
    check_gradients([](const Tensor& v) { return sum(v, {0}); }, in);
    check_gradients([](const Tensor& v) { return mean(v * v, {1}); }, in);
    check_gradients([](const Tensor& v) { return prod(v, {1}); }, in);
    check_gradients([](const Tensor& v) { return prod(v); }, in);
    check_gradients([](const Tensor& v) { return var(v, {0}); }, in);
    check_gradients([](const Tensor& v) { return std(v, {1}, {.correction = 0}); }, in);
    check_gradients([](const Tensor& v) { return var_mean(v, {1}).first + var_mean(v, {1}).second; }, in);
    check_gradients([](const Tensor& v) { return amax(v * v, {1}); }, in);
    check_gradients([](const Tensor& v) { return max(v * v, 0).values; }, in);
    check_gradients([](const Tensor& v) { return min(v * v, -1).values; }, in);
    check_gradients([](const Tensor& v) { return norm(v, 2, {1}); }, in);
    check_gradients([](const Tensor& v) { return norm(v, 3, {0}); }, in);
    check_gradients([](const Tensor& v) { return norm(v * v, 1); }, in);
    check_gradients([](const Tensor& v) { return norm(v * v, kInfinity, {1}); }, in);
    check_gradients([](const Tensor& v) { return logsumexp(v, {0}); }, in);
    check_gradients([](const Tensor& v) { return logsumexp(v, {0, 1}); }, in);
    check_gradients([](const Tensor& v) { return cumsum(v * v, 1); }, in);
    check_gradients([](const Tensor& v) { return cumprod(v, 0); }, in);
    check_gradients([](const Tensor& v) { return cumprod(v, 1); }, in);
  }
  const Tensor a = leaf({5}), b = leaf({5});
  const auto f = [](const Tensors& in) { return Tensors{dot(in[0], in[1])}; };
  gradcheck(f, {a, b});
  gradgradcheck(f, {a, b});
}

// The numbers are 100 apart from 0 and 1 from their mean: a mean that is rounded to 16 bits, as a gradient made of ops
// on 16-bit tensors would have it, is off by a large part of the differences. Four roundings of the largest gradient
// are allowed, for the ops that a rule is made of.
TEST(ReduceGradients, In16BitsAreTakenInFloat32) {
  const auto gradient = [](const Tensor& x, const auto& f) {
    const Tensor leaf = x.detach().requires_grad_();
    f(leaf).backward();
    return leaf.grad().to_vector<double>();
  };
  const auto check = [&](const Tensor& x, const auto& f) {
    const auto got = gradient(x, f), exact = gradient(x.to(f64), f);
    double top = 0;
    for (const double v : exact) top = std::max(top, std::abs(v));
    const double u = x.dtype() == f16 ? 0x1p-11 : 0x1p-8;
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], exact[i], 4 * u * top) << name(x.dtype()) << i;
  };
  for (const DType dtype : {f16, bf16}) {
    std::vector<double> values;
    for (int i = 0; i < 37; ++i) values.push_back(100 + 0.5 * (i * 7 % 5));  // both dtypes have them
    const Tensor x = tensor(values, {37}, {.dtype = dtype});
    check(x, [](const Tensor& t) { return var(t); });
    check(x, [](const Tensor& t) { return std(t); });
    check(x, [](const Tensor& t) { return var_mean(t).first; });
    // A product of 37 factors next to 1, whose partial products would each be rounded.
    for (double& v : values) v = 1 + (v - 101) / 16;
    check(tensor(values, {37}, {.dtype = dtype}), [](const Tensor& t) { return prod(t); });
    check(tensor(values, {37}, {.dtype = dtype}), [](const Tensor& t) { return logsumexp(t, {0}); });
    check(tensor(values, {37}, {.dtype = dtype}), [](const Tensor& t) { return norm(t, 3); });
  }
}

TEST(ReduceGradients, ProductsWithZeros) {
  for (const Values& values : {Values{2, 0, 3}, Values{0, 0, 3}, Values{0, 0, 0}}) {
    const Tensor x = tensor(values, {3}, {.dtype = f64, .requires_grad = true});
    check_gradients([](const Tensor& v) { return prod(v); }, x);
    check_gradients([](const Tensor& v) { return cumprod(v, 0); }, x);
  }
}

TEST(ReduceGradients, AtZeroNormAndZeroDeviation) {
  const Tensor x = zeros({3}, {.dtype = f64, .requires_grad = true});
  norm(x).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{0, 0, 0}));
  x.set_grad({});
  std(x).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{0, 0, 0}));
}

TEST(ReduceGradients, TiesShareOrTakeTheFirst) {
  const Tensor x = tensor(Values{2, 5, 5, 1}, {4}, {.dtype = f64, .requires_grad = true});
  amax(x).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{0, 0.5, 0.5, 0}));
  x.set_grad({});
  max(x, 0).values.backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{0, 1, 0, 0}));
}

}  // namespace
}  // namespace halfstep
