// SPDX-License-Identifier: Apache-2.0
// Indexing of tensors large enough for several threads, of any strides, against plain loops.
#include <algorithm>

#include "halfstep/ops/compare.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "tests/ops/index_checks.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

using namespace test;

constexpr std::int64_t kIndexRows = 67, kIndexColumns = 1031;  // more than one part of a thread's work, and odd

std::int64_t scattered(std::int64_t i, std::int64_t n) { return i * 7919 % 104729 % n; }

// Small whole numbers, which are exact in every dtype.
Tensor numbers(const Shape& sizes, DType dtype) {
  Values values;
  for (std::int64_t i = 0; i < sizes.numel(); ++i) values.push_back(static_cast<double>(scattered(i, 13)));
  return tensor(values, sizes, {.dtype = dtype});
}
Ints spread(std::int64_t n, std::int64_t below) {
  Ints result;
  for (std::int64_t i = 0; i < n; ++i) result.push_back(scattered(i + 3, below));
  return result;
}
// The same elements in memory that is not row-major.
Tensor turned(const Tensor& x) { return x.transpose(0, 1).contiguous().transpose(0, 1); }

TEST(IndexLines, NonzeroOfEveryShapeAndLayout) {
  for (const int threads : {1, 2, 5}) {
    ThreadsGuard guard(threads);
    for (const DType d : {boolean, f32, bf16, f64, u8}) {
      for (const Shape& sizes :
           {Shape{70001}, Shape{67, 1031}, Shape{4099, 2, 3, 5}, Shape{16384}, Shape{1, 40000, 1}}) {
        const Tensor x = eq(numbers(sizes, f32), 3).to(d);
        const Values values = x.to_vector<double>();
        Ints expected;
        for (std::int64_t i = 0; i < sizes.numel(); ++i) {
          if (values[static_cast<std::size_t>(i)] == 0) continue;
          std::int64_t rest = i;
          const std::size_t at = expected.size();
          for (int k = sizes.size() - 1; k >= 0; --k) {
            expected.insert(expected.begin() + static_cast<std::ptrdiff_t>(at), rest % sizes[k]);
            rest /= sizes[k];
          }
        }
        EXPECT_TRUE(nonzero(x).to_vector<std::int64_t>() == expected) << name(d) << " " << sizes.str();
        if (sizes.size() > 1) {
          EXPECT_TRUE(nonzero(turned(x)).to_vector<std::int64_t>() == expected) << name(d) << " " << sizes.str();
        }
      }
    }
    EXPECT_EQ(nonzero(ones({50000})).to_vector<std::int64_t>(), arange(0, 50000).to_vector<std::int64_t>());
    EXPECT_EQ(nonzero(zeros({50000})).size(0), 0);
  }
}

TEST(IndexLines, MaskedSelectOfManyElements) {
  const Tensor x = numbers({kIndexRows, kIndexColumns}, bf16), mask = gt(numbers({kIndexRows, kIndexColumns}, f32), 7);
  Values expected;
  for (const double v : x.to_vector<double>()) {
    if (v > 7) expected.push_back(v);
  }
  for (const int threads : {1, 3}) {
    ThreadsGuard guard(threads);
    EXPECT_TRUE(masked_select(x, mask).to_vector<double>() == expected);
    EXPECT_TRUE(masked_select(turned(x), mask).to_vector<double>() == expected);
  }
}

TEST(IndexLines, SelectAndAddAlongEachDimension) {
  const std::int64_t n = 517;
  for (const DType d : {f32, bf16, f64, i64}) {
    const Tensor x = numbers({kIndexRows, 131, 3}, d);
    const Values values = x.to_vector<double>();
    for (const int dim : {0, 1, 2}) {
      const Ints at = spread(n, x.size(dim));
      Shape sizes = x.sizes();
      sizes[dim] = n;
      std::int64_t inner = 1;
      for (int k = dim + 1; k < 3; ++k) inner *= x.size(k);
      Values expected, sums = values;
      for (std::int64_t i = 0; i < sizes.numel(); ++i) {
        const std::int64_t o = i / inner / n, k = i / inner % n, j = i % inner;
        const std::size_t from =
            static_cast<std::size_t>((o * x.size(dim) + at[static_cast<std::size_t>(k)]) * inner + j);
        expected.push_back(values[from]);
        sums[from] += 2 * static_cast<double>(k % 2);
      }
      Shape along = {1, 1, 1};
      along[dim] = n;
      Values odd;
      for (std::int64_t k = 0; k < n; ++k) odd.push_back(static_cast<double>(k % 2));
      const Tensor source = tensor(odd, {.dtype = d}).reshape(along).expand(sizes);
      for (const int threads : {1, 3}) {
        ThreadsGuard guard(threads);
        EXPECT_TRUE(index_select(x, dim, ints(at)).to_vector<double>() == expected) << name(d) << " " << dim;
        EXPECT_TRUE(index_select(turned(x), dim, ints(at)).to_vector<double>() == expected) << name(d) << " " << dim;
        // Sums that the 16-bit type rounds: they are taken in float32, and rounded once.
        const Values rounded = tensor(sums, x.sizes(), {.dtype = d}).to_vector<double>();
        EXPECT_TRUE(index_add(x, dim, ints(at), source, 2).to_vector<double>() == rounded) << name(d) << " " << dim;
        EXPECT_TRUE(index_add(turned(x), dim, ints(at), source, 2).to_vector<double>() == rounded) << name(d);
      }
    }
  }
}

TEST(IndexLines, GatherAndScatterAlongRows) {
  const std::int64_t length = 1500, count = kIndexRows * length;
  const Tensor index = ints(spread(count, kIndexColumns), {kIndexRows, length});
  const Ints at = index.to_vector<std::int64_t>();
  for (const DType d : {f32, bf16, f64, u8}) {
    const Tensor x = numbers({kIndexRows, kIndexColumns}, d), src = numbers({kIndexRows, length}, d);
    // One value for each row: it has a step of 0 along the rows.
    const Tensor same = src.slice(1, 0, 1).expand({kIndexRows, length});
    const Values values = x.to_vector<double>();
    for (const Tensor& s : {src, turned(src), same}) {
      const Values added = s.to_vector<double>();
      Values gathered, last = values, sums = values;
      for (std::int64_t i = 0; i < count; ++i) {
        const auto to = static_cast<std::size_t>(i / length * kIndexColumns + at[static_cast<std::size_t>(i)]);
        gathered.push_back(values[to]);
        last[to] = added[static_cast<std::size_t>(i)];
        sums[to] += added[static_cast<std::size_t>(i)];
      }
      if (d == u8) {
        for (double& v : sums) v = static_cast<double>(static_cast<std::int64_t>(v) & 255);
      }
      for (const int threads : {1, 3}) {
        ThreadsGuard guard(threads);
        for (const Tensor& input : {x, turned(x)}) {
          EXPECT_TRUE(gather(input, 1, index).to_vector<double>() == gathered) << name(d);
          EXPECT_TRUE(gather(input, 1, turned(index)).to_vector<double>() == gathered) << name(d);
          EXPECT_TRUE(scatter(input, 1, index, s).to_vector<double>() == last) << name(d);
          EXPECT_TRUE(scatter_add(input, 1, index, s).to_vector<double>() == sums) << name(d);
        }
      }
    }
  }
}

TEST(IndexLines, TheFirstIndexOutsideIsNamed) {
  if (!default_device().is_cpu()) GTEST_SKIP() << "other devices report one of them, and maybe later";
  const std::int64_t rows = 130, columns = 1000;
  const Tensor x = zeros({rows, 9}), index = zeros({rows, columns}, {.dtype = i64});
  for (const std::int64_t wrong : {std::int64_t{9}, std::int64_t{-1}, INT64_MAX, INT64_MIN}) {
    Tensor bad = index.clone();
    for (const std::int64_t row : {128, 127, 70}) bad.select(0, row).slice(0, 990, 991).fill_(wrong);
    const std::string text =
        "index " + std::to_string(wrong) + " at [70, 990] lies outside dimension 1 of size 9 (0 to 8)";
    for (const int threads : {1, 4}) {
      ThreadsGuard guard(threads);
      EXPECT_NE(error_of<Error>([&] { gather(x, 1, bad); }).find(text), std::string::npos);
      EXPECT_NE(error_of<Error>([&] { gather(x, 1, turned(bad)); }).find(text), std::string::npos);
      Tensor kept = zeros({rows, 9});
      EXPECT_NE(error_of<Error>([&] { scatter_(kept, 1, bad, Scalar(5)); }).find(text), std::string::npos);
      EXPECT_EQ(amax(kept).item<double>(), 0) << "nothing is written where an index is wrong";
    }
  }
}

}  // namespace
}  // namespace halfstep
