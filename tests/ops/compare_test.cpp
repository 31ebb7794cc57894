// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/compare.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/autograd/gradcheck.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;

TEST(Compare, EveryDtypeAndLength) {
  RandomStream random(5);
  for (const DType dtype : {f32, f64, f16, bf16, i64, i32, i8, u8, boolean}) {
    for (const std::int64_t n : {0, 1, 7, 16, 33, 300}) {
      Values a, b;
      for (std::int64_t i = 0; i < n; ++i) {
        a.push_back(static_cast<double>(random.below(4)));
        b.push_back(static_cast<double>(random.below(4)));
      }
      const Tensor x = tensor(a, {.dtype = dtype}), y = tensor(b, {.dtype = dtype});
      const Values va = x.to_vector<double>(), vb = y.to_vector<double>();
      const auto expect = [&](const Tensor& got, auto f) {
        EXPECT_EQ(got.dtype(), boolean);
        Values want;
        for (std::size_t i = 0; i < va.size(); ++i) want.push_back(f(va[i], vb[i]));
        EXPECT_EQ(got.to_vector<double>(), want) << name(dtype) << " " << n;
      };
      expect(eq(x, y), [](double p, double q) { return p == q; });
      expect(ne(x, y), [](double p, double q) { return p != q; });
      expect(lt(x, y), [](double p, double q) { return p < q; });
      expect(le(x, y), [](double p, double q) { return p <= q; });
      expect(gt(x, y), [](double p, double q) { return p > q; });
      expect(ge(x, y), [](double p, double q) { return p >= q; });
      expect(logical_and(x, y), [](double p, double q) { return p != 0 && q != 0; });
      expect(logical_or(x, y), [](double p, double q) { return p != 0 || q != 0; });
      expect(logical_xor(x, y), [](double p, double q) { return (p != 0) != (q != 0); });
      expect(logical_not(x), [](double p, double) { return p == 0; });
      expect(gt(x, 1.5), [](double p, double) { return p > 1.5; });
    }
  }
}

TEST(Compare, NanAndInfinity) {
  for (const DType dtype : {f32, f64, f16, bf16}) {
    const Tensor x = tensor(Values{NAN, INFINITY, -INFINITY, 1, -0.0}, {.dtype = dtype});
    EXPECT_EQ(isnan(x).to_vector<double>(), (Values{1, 0, 0, 0, 0}));
    EXPECT_EQ(isinf(x).to_vector<double>(), (Values{0, 1, 1, 0, 0}));
    EXPECT_EQ(isfinite(x).to_vector<double>(), (Values{0, 0, 0, 1, 1}));
    EXPECT_EQ(eq(x, x).to_vector<double>(), (Values{0, 1, 1, 1, 1}));
    EXPECT_EQ(ne(x, x).to_vector<double>(), (Values{1, 0, 0, 0, 0}));
    EXPECT_EQ(ge(x, 0).to_vector<double>(), (Values{0, 1, 0, 1, 1}));
  }
  EXPECT_EQ(isfinite(zeros({2}, {.dtype = i32})).to_vector<double>(), (Values{1, 1}));
}

TEST(Compare, Bits) {
  const auto ints = [](const std::vector<std::int64_t>& v) { return tensor(v, {4}, {.dtype = i32}); };
  const Tensor a = ints({12, -1, 0, 7}), b = ints({10, 5, 3, -8});
  EXPECT_EQ(bitwise_and(a, b).to_vector<double>(), (Values{8, 5, 0, 0}));
  EXPECT_EQ(bitwise_or(a, b).to_vector<double>(), (Values{14, -1, 3, -1}));
  EXPECT_EQ(bitwise_xor(a, b).to_vector<double>(), (Values{6, -6, 3, -1}));
  EXPECT_EQ(bitwise_not(a).to_vector<double>(), (Values{-13, 0, -1, -8}));
  EXPECT_EQ(bitwise_not(tensor(Values{0, 1}, {.dtype = boolean})).to_vector<double>(), (Values{1, 0}));
  EXPECT_THROW(bitwise_and(zeros({2}), zeros({2})), DTypeError);
}

TEST(Select, WhereAndMaskedFill) {
  RandomStream random(9);
  for (const DType dtype : {f32, f64, f16, bf16, f8e4m3, i64, i8, boolean}) {
    Values m, a, b, want;
    for (int i = 0; i < 77; ++i) {
      m.push_back(static_cast<double>(random.below(2)));
      a.push_back(static_cast<double>(random.below(2)));
      b.push_back(static_cast<double>(random.below(2)));
      want.push_back(m.back() != 0 ? a.back() : b.back());
    }
    const Tensor mask = tensor(m, {.dtype = boolean}), x = tensor(a, {.dtype = dtype}), y = tensor(b, {.dtype = dtype});
    EXPECT_EQ(where(mask, x, y).dtype(), dtype);
    EXPECT_EQ(where(mask, x, y).to_vector<double>(), want);
    if (dtype != boolean) {
      const Values filled = masked_fill(x, mask, 1).to_vector<double>();
      for (std::size_t i = 0; i < filled.size(); ++i) EXPECT_EQ(filled[i], m[i] != 0 ? 1 : a[i]);
    }
  }
  EXPECT_EQ(where(tensor(Values{1, 0}, {.dtype = boolean}), zeros({2}, {.dtype = f16}), 2.5).dtype(), f16);
  EXPECT_THROW(where(zeros({2}), zeros({2}), zeros({2})), DTypeError);
  EXPECT_THROW(masked_fill(zeros({2}), zeros({2}, {.dtype = u8}), 1), DTypeError);
}

TEST(Select, MasksStayFinite) {
  const Tensor mask = tensor(Values{1}, {.dtype = boolean});
  const auto fill = [&](DType dtype, double value) {
    return masked_fill(zeros({1}, {.dtype = dtype}), mask, value).item<double>();
  };
  EXPECT_EQ(fill(f16, -1e9), -65504);
  EXPECT_EQ(fill(f16, 1e9), 65504);
  EXPECT_EQ(fill(f16, -INFINITY), -INFINITY);
  EXPECT_EQ(fill(bf16, -1e39), finfo(bf16).lowest);
  EXPECT_EQ(fill(f32, -1e9), -1e9);
  for (const DType dtype : {f32, f64, f16, bf16}) {
    EXPECT_EQ(fill(dtype, mask_value(dtype)), finfo(dtype).lowest);
    EXPECT_TRUE(std::isfinite(mask_value(dtype)));
  }
  EXPECT_THROW(mask_value(i32), DTypeError);
  Tensor scores = zeros({2, 3}, {.dtype = f16});
  masked_fill_(scores, tensor(Values{0, 1, 0}, {.dtype = boolean}), -1e9);
  EXPECT_EQ(scores.to_vector<double>(), (Values{0, -65504, 0, 0, -65504, 0}));
}

TEST(Select, Gradients) {
  const Tensor x = tensor(Values{1, 2, 3, 4, 5, 6}, {2, 3}, {.dtype = f64, .requires_grad = true});
  const Tensor y = tensor(Values{7, 8, 9}, {.dtype = f64, .requires_grad = true});
  const Tensor mask = tensor(Values{1, 0, 0, 1, 1, 0}, {2, 3}, {.dtype = boolean});
  const auto f = [mask](const std::vector<Tensor>& in) { return where(mask, in[0], in[1]); };
  gradcheck(f, {x, y});
  gradgradcheck(f, {x, y});
  const auto fill = [mask](const std::vector<Tensor>& in) { return masked_fill(in[0] * in[0], mask, 3); };
  gradcheck(fill, {x});
  gradgradcheck(fill, {x});
}

}  // namespace
}  // namespace halfstep
