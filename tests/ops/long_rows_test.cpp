// SPDX-License-Identifier: Apache-2.0
// Selection, extremes, scans, casts, flips and random numbers along rows and columns long enough for vectors, stretches
// and several threads, against plain loops.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "halfstep/core/philox.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/sort.h"
#include "tests/ops/index_checks.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

using namespace test;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Values exact in bf16 and in i8, so with many ties.
Values few_values(std::int64_t n) {
  Values v;
  for (std::int64_t i = 0; i < n; ++i) v.push_back(static_cast<double>(i * 7919 % 104729 % 199) - 99);
  return v;
}

// The order of topk: NaN is the greatest, equal values keep theirs.
Ints first_of(const double* v, std::int64_t n, std::int64_t k, bool largest) {
  Ints order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    const auto less = [](double x, double y) { return std::isnan(y) ? !std::isnan(x) : x < y; };
    return largest ? less(v[b], v[a]) : less(v[a], v[b]);
  });
  order.resize(static_cast<std::size_t>(k));
  return order;
}

TEST(LongRows, TopKOfOneLongRow) {
  const std::int64_t n = 40009;  // more than two pieces
  Values ascending(n), equal(n, 3), mixed = few_values(n), wide(n);
  for (std::int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    ascending[at] = static_cast<double>(i / 320) - 60;
    wide[at] = std::sin(static_cast<double>(i) * 78.233) * 1e4;
  }
  Values odd = mixed;
  for (const std::size_t at : {5u, 20000u, 40008u}) odd[at] = NAN;
  odd[77] = kInfinite, odd[78] = -kInfinite, odd[79] = -0.0, odd[80] = 0;
  for (const DType d : {f32, f16, bf16, f64, i64, i32}) {
    for (const Values* values : {&ascending, &equal, &mixed, &wide, &odd}) {
      if (!is_floating(d) && values == &odd) continue;
      const Tensor x = tensor(*values, {.dtype = d}), spread = stack({x, x}, 1).select(1, 1);
      const Values v = x.to_vector<double>();
      for (const std::int64_t k : {1, 10, 130, 2000}) {
        for (const bool largest : {true, false}) {
          const Ints expected = first_of(v.data(), n, k, largest);
          for (const int threads : {1, 3}) {
            ThreadsGuard guard(threads);
            const SortResult top = topk(x, k, 0, {.largest = largest});
            ASSERT_TRUE(top.indices.to_vector<std::int64_t>() == expected) << name(d) << " " << k << " " << largest;
          }
          EXPECT_EQ(topk(spread, k, 0, {.largest = largest}).indices.to_vector<std::int64_t>(), expected);
        }
      }
    }
  }
}

TEST(LongRows, TopKOfManyRows) {
  const std::int64_t rows = 91, n = 1003;
  for (const DType d : {f32, f16, bf16, f64, i8}) {
    Values values = few_values(rows * n);
    if (is_floating(d)) values[1002] = values[1003] = NAN;
    const Tensor x = tensor(values, {rows, n}, {.dtype = d});
    for (const std::int64_t k : {1, 10, 31, 100}) {
      Ints expected;
      for (std::int64_t r = 0; r < rows; ++r) {
        const Ints row = first_of(values.data() + r * n, n, k, true);
        expected.insert(expected.end(), row.begin(), row.end());
      }
      for (const int threads : {1, 3}) {
        ThreadsGuard guard(threads);
        EXPECT_TRUE(topk(x, k, 1).indices.to_vector<std::int64_t>() == expected) << name(d) << " " << k;
        const SortResult columns = topk(x.t().contiguous(), k, 0);
        EXPECT_TRUE(columns.indices.t().to_vector<std::int64_t>() == expected) << name(d) << " " << k;
      }
    }
  }
}

TEST(LongRows, TheFirstOfTheExtremes) {
  for (const DType d : {f32, f64, f16, bf16}) {
    for (const std::int64_t n : {1, 2, 7, 15, 16, 17, 33, 64, 100, 1023, 1024, 1025, 2500, 4100}) {
      const std::int64_t rows = 9;
      Values values;
      for (const double v : few_values(rows * n)) values.push_back(v / 4);
      const auto put = [&](std::int64_t row, std::int64_t at, double v) {
        values[static_cast<std::size_t>(row * n + std::clamp<std::int64_t>(at, 0, n - 1))] = v;
      };
      put(1, n / 2, NAN), put(1, n - 1, NAN), put(1, 3, kInfinite);
      put(2, 1, kInfinite), put(2, n - 1, -kInfinite), put(2, 2, -kInfinite), put(2, n - 1, kInfinite);
      for (std::int64_t i = 0; i < n; ++i) {
        put(3, i, i % 2 ? 0.0 : -0.0);
        put(4, i, i % 2 ? -0.0 : 0.0);
        put(5, i, -kInfinite);
        put(6, i, static_cast<double>(i / 32));   // ascending
        put(7, i, -static_cast<double>(i / 32));  // descending
      }
      put(8, n - 1, NAN);
      const Tensor x = tensor(values, {rows, n}, {.dtype = d});
      const Values v = x.to_vector<double>();
      Ints largest, smallest;
      for (std::int64_t r = 0; r < rows; ++r) {
        const auto first = v.begin() + r * n, nan = std::find_if(first, first + n, [](double a) { return a != a; });
        largest.push_back(nan - first < n ? nan - first : std::max_element(first, first + n) - first);
        smallest.push_back(nan - first < n ? nan - first : std::min_element(first, first + n) - first);
      }
      EXPECT_EQ(argmax(x, 1).to_vector<std::int64_t>(), largest) << name(d) << " " << n;
      EXPECT_EQ(argmin(x, 1).to_vector<std::int64_t>(), smallest) << name(d) << " " << n;
      EXPECT_EQ(max(x, 1).indices.to_vector<std::int64_t>(), largest) << name(d) << " " << n;
      EXPECT_EQ(argmax(x.t().contiguous(), 0).to_vector<std::int64_t>(), largest) << name(d) << " " << n;
    }
  }
}

TEST(LongRows, ScansAcrossRows) {
  const std::int64_t length = 201;
  for (const DType d : {f32, f64, f16, bf16}) {
    for (const std::int64_t width : {3, 8, 127, 300, 1025}) {
      Values values;
      for (const double v : few_values(2 * length * width)) values.push_back(1 + v / 1024);
      const Shape sizes{2, length, width};
      const Tensor x = tensor(values, sizes, {.dtype = d});
      const Values v = x.to_vector<double>();
      Values sums = v, products = v, behind = v;
      for (std::int64_t i = 0; i < 2 * length * width; ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (i / width % length == 0) continue;
        sums[at] += sums[at - static_cast<std::size_t>(width)];
        products[at] *= products[at - static_cast<std::size_t>(width)];
      }
      for (std::int64_t i = 2 * length * width - 1; i >= 0; --i) {
        const auto at = static_cast<std::size_t>(i);
        if (i / width % length != length - 1) behind[at] += behind[at + static_cast<std::size_t>(width)];
      }
      const auto rounded = [&](const Values& all) { return tensor(all, sizes, {.dtype = d}).to_vector<double>(); };
      for (const int threads : {1, 3}) {
        ThreadsGuard guard(threads);
        EXPECT_TRUE(cumsum(x, 1).to_vector<double>() == rounded(sums)) << name(d) << " " << width;
        EXPECT_TRUE(cumprod(x, 1).to_vector<double>() == rounded(products)) << name(d) << " " << width;
        const Tensor leaf = zeros(sizes, {.dtype = d, .requires_grad = true});
        cumsum(leaf, 1).backward(x);
        EXPECT_TRUE(leaf.grad().to_vector<double>() == rounded(behind)) << name(d) << " " << width;
      }
    }
  }
}

TEST(LongRows, FlippedRows) {
  for (const DType d : {f64, f32, bf16, u8}) {
    for (const std::int64_t n : {1, 2, 15, 16, 31, 33, 67, 1000}) {
      Values values;
      for (std::int64_t i = 0; i < 3 * n; ++i) values.push_back(static_cast<double>(i % 251));
      Values expected;
      for (std::int64_t i = 0; i < 3 * n; ++i)
        expected.push_back(values[static_cast<std::size_t>(i / n * n + n - 1 - i % n)]);
      const Tensor x = tensor(values, {3, n}, {.dtype = d});
      EXPECT_EQ(flip(x, {1}).to_vector<double>(), expected) << name(d) << " " << n;
      EXPECT_EQ(flip(x.t().contiguous().t(), {1}).to_vector<double>(), expected) << name(d) << " " << n;
    }
  }
}

TEST(LongRows, CastsToIntegers) {
  const Values special = {0,      -0.0,  0.999, -0.999,     1.5,           -2.5,   255,
                          -65504, 3e9,   -3e9,  2147483520, -2147483648.0, 9.2e18, -9.2e18,
                          1e19,   -1e19, 3e38,  kInfinite,  -kInfinite,    NAN,    -NAN};
  Values values;
  for (std::size_t i = 0; i < 67; ++i) values.push_back(special[i * 5 % special.size()]);
  for (const DType from : {f32, f16, bf16, f64}) {
    const Tensor x = tensor(values, {.dtype = from});
    for (const DType to : {i64, i32, i8}) {
      const int bits = to == i64 ? 63 : to == i32 ? 31 : 7;
      const std::int64_t most = bits == 63 ? INT64_MAX : (std::int64_t{1} << bits) - 1;
      Ints expected;
      for (const double v : x.to_vector<double>()) {
        const double end = std::ldexp(1.0, bits);
        expected.push_back(std::isnan(v)   ? 0
                           : v >= end      ? most
                           : v <= -end - 1 ? -most - 1
                                           : static_cast<std::int64_t>(v));
      }
      for (const std::int64_t n : {67, 16, 7, 1}) {
        const Ints part(expected.begin(), expected.begin() + n);
        EXPECT_EQ(x.slice(0, 0, n).to(to).to_vector<std::int64_t>(), part) << name(from) << " " << name(to);
      }
      EXPECT_EQ(stack({x, x}, 1).select(1, 0).to(to).to_vector<std::int64_t>(), expected) << name(from);
    }
  }
}

TEST(LongRows, RandomIntegersAreThoseOfTheStream) {
  const std::int64_t n = 20011;
  // A quarter of all words is rejected for the second range.
  for (const auto& [low, high] : {std::pair<std::int64_t, std::int64_t>{-5, 100},
                                  {-3 * (std::int64_t{1} << 61), 3 * (std::int64_t{1} << 61)},
                                  {INT64_MIN, INT64_MAX}}) {
    const auto range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
    Ints expected;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint64_t above = integer_below({11, 0}, static_cast<std::uint64_t>(i), range);
      expected.push_back(static_cast<std::int64_t>(static_cast<std::uint64_t>(low) + above));
    }
    for (const int threads : {1, 3}) {
      ThreadsGuard guard(threads);
      Generator generator(11);
      EXPECT_TRUE(randint(low, high, {n}, {.dtype = i64}, &generator).to_vector<std::int64_t>() == expected);
    }
  }
  Values uniform;
  for (std::int64_t i = 0; i < n; ++i)
    uniform.push_back(uniform_f64(philox_word64({11, 0}, static_cast<std::uint64_t>(i))));
  Generator generator(11);
  EXPECT_TRUE(rand({n}, {.dtype = f64}, &generator).to_vector<double>() == uniform);
}

}  // namespace
}  // namespace halfstep
