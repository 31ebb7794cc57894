// SPDX-License-Identifier: Apache-2.0
// What the goldens of matrix products don't say: ignored inputs, roundings and errors.
#include "halfstep/ops/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;

using Values = std::vector<double>;

TEST(Matmul, BetaZeroIgnoresTheInputNaNIncluded) {
  const Tensor nan = full({1}, std::nan(""));
  const AddmmOptions ignored{.beta = 0, .alpha = 2};
  const Tensor a = ones({2, 3}), b = ones({3, 2}), batch_a = ones({4, 2, 3}), batch_b = ones({4, 3, 2});
  EXPECT_EQ(addmm(nan, a, b, ignored).to_vector<double>(), Values(4, 6));
  EXPECT_EQ(addmv(nan, a, ones({3}), ignored).to_vector<double>(), Values(2, 6));
  EXPECT_EQ(addr(nan, ones({2}), ones({3}), ignored).to_vector<double>(), Values(6, 2));
  EXPECT_EQ(addbmm(nan, batch_a, batch_b, ignored).to_vector<double>(), Values(4, 24));
  EXPECT_EQ(baddbmm(nan, batch_a, batch_b, ignored).to_vector<double>(), Values(16, 6));
  EXPECT_TRUE(std::isnan(addmm(nan, a, b, {.beta = 1}).to_vector<double>()[0]));
}

// 257 * 256 = 65792 lies halfway between the bf16 numbers 65536 and 66048: alone it rounds to the lower, where adding
// 254 changes nothing; the sum 66046 rounds to the upper.
TEST(Matmul, ProductAndSumAreRoundedTogether) {
  const Tensor a = full({1, 257}, 16, {.dtype = bf16}), b = full({257, 1}, 16, {.dtype = bf16});
  const Tensor c = full({1}, 254, {.dtype = bf16});
  const Tensor want = full({1, 1}, 66048, {.dtype = bf16});
  EXPECT_EQ(addmm(c, a, b).item<double>(), want.item<double>());
  EXPECT_EQ(addmv(c, a, b.squeeze(1)).item<double>(), want.item<double>());
  EXPECT_EQ(addbmm(c, a.unsqueeze(0), b.unsqueeze(0)).item<double>(), want.item<double>());
  EXPECT_EQ(baddbmm(c, a.unsqueeze(0), b.unsqueeze(0)).item<double>(), want.item<double>());
  EXPECT_EQ(mm(a, b, {.dtype = f32}).item<double>(), 65792);
  EXPECT_EQ(mm(a, b).dtype(), bf16);
}

// Sizes around those of the tiles that kernels make, matrices turned either way, and a bias; in numbers that are exact
// in every dtype.
TEST(Matmul, TilesEndWhereTheMatrixDoes) {
  const auto small = [](std::int64_t rows, std::int64_t columns, std::int64_t step) {
    Values v(static_cast<std::size_t>(rows * columns));
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = i * static_cast<std::size_t>(step) % 11 % 3 == 0 ? 1 : 0;
    return v;
  };
  struct Size {
    std::int64_t m, n, k;
  };
  for (const auto& [m, n, k] : {Size{1, 1, 1}, {63, 65, 15}, {64, 64, 16}, {65, 63, 17}, {17, 130, 40}, {129, 3, 33}}) {
    const Values a = small(m, k, 3), b = small(n, k, 7), bias = small(1, n, 5);
    Values product(static_cast<std::size_t>(m * n)), sum(product.size());
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        const auto at = static_cast<std::size_t>(i * n + j);
        for (std::int64_t l = 0; l < k; ++l) {
          product[at] += a[static_cast<std::size_t>(i * k + l)] * b[static_cast<std::size_t>(j * k + l)];
        }
        sum[at] = product[at] + bias[static_cast<std::size_t>(j)];
      }
    }
    for (const DType dtype : {f32, f64, f16, bf16, i64, i32, i8, u8}) {
      const Tensor x = tensor(a, {m, k}, {.dtype = dtype}), w = tensor(b, {n, k}, {.dtype = dtype});
      const Tensor offset = tensor(bias, {n}, {.dtype = dtype});
      const Tensor turned = x.transpose(0, 1).contiguous().transpose(0, 1);
      EXPECT_EQ(mm(x, w.transpose(0, 1)).to_vector<double>(), product) << name(dtype) << m << "x" << n;
      EXPECT_EQ(mm(turned, w.transpose(0, 1).contiguous()).to_vector<double>(), product) << name(dtype);
      if (!is_floating(dtype)) continue;  // there is no linear() of integers on the CPU
      EXPECT_EQ(linear(turned, w, offset).to_vector<double>(), sum) << name(dtype) << m << "x" << n;
    }
  }
}

TEST(Matmul, ShapesThatDoNotFitAreNamed) {
  const Tensor m = ones({2, 3}), v = ones({3}), batch = ones({4, 2, 3});
  EXPECT_EQ(error_of([&] { mm(m, m); }), "mm: expected [m, k] and [k, n], got [2, 3] and [2, 3]");
  EXPECT_EQ(error_of([&] { bmm(batch, batch); }), "bmm: expected [b, m, k] and [b, k, n], got [4, 2, 3] and [4, 2, 3]");
  EXPECT_EQ(error_of([&] { mv(m, ones({2})); }), "mv: expected [m, k] and [k], got [2, 3] and [2]");
  EXPECT_EQ(error_of([&] { outer(m, v); }), "outer: expected two vectors, got [2, 3] and [3]");
  EXPECT_EQ(error_of([&] { addmv(v, m, ones({2})); }), "addmv: expected [m, k] and [k], got [2, 3] and [2]");
  EXPECT_EQ(error_of([&] { addr(m, v, m); }), "addr: expected two vectors, got [3] and [2, 3]");
  EXPECT_EQ(error_of([&] { addbmm(m, batch, batch); }),
            "addbmm: expected [b, m, k] and [b, k, n], got [4, 2, 3] and [4, 2, 3]");
  EXPECT_EQ(error_of([&] {
              addmm(ones({5, 2, 2}), m, m.t());
            }),
            "addmm: expected an input that broadcasts to [2, 2], got [5, 2, 2]");
  EXPECT_NE(error_of([&] { matmul(batch, ones({2, 3})); }).find("[..., m, k] and [..., k, n]"), std::string::npos);
  EXPECT_EQ(error_of([&] {
              linear(ones({4, 2, 3}), ones({5, 6}));
            }),
            "linear: expected input [*, 6], got [4, 2, 3]; flatten it first?");
  EXPECT_EQ(error_of([&] {
              linear(m, ones({5, 3}), ones({4}));
            }),
            "linear: expected bias [5] for weight [5, 3], got [4]");
}

}  // namespace
}  // namespace halfstep
