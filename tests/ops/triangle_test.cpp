// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/triangle.h"

#include "tests/ops/index_checks.h"

namespace halfstep {
namespace {

using namespace test;

TEST(Triangle, Goldens) {
  check_goldens("tril", [](const auto& e, const auto& x) { return std::vector{tril(x[0], e.integer("diagonal"))}; });
  check_goldens("triu", [](const auto& e, const auto& x) { return std::vector{triu(x[0], e.integer("diagonal"))}; });
  check_goldens("diagonal", [](const auto& e, const auto& x) {
    return std::vector{diagonal(x[0], e.integer("offset"), e.integer("dim1"), e.integer("dim2"))};
  });
}

TEST(Triangle, TrilAndTriuShareAllButTheDiagonal) {
  const Tensor x = sample({2, 4, 3}).permute({0, 2, 1});
  for (const std::int64_t d : {-5, -3, -1, 0, 1, 2, 4, 9}) {
    const Tensor both = tril(x, d) + triu(x, d + 1);
    EXPECT_EQ(both.to_vector<double>(), x.to_vector<double>()) << d;
    EXPECT_EQ(tril(x, d).to_vector<double>(), tril(x.contiguous(), d).to_vector<double>()) << d;
  }
  EXPECT_EQ(tril(x, INT64_MAX).to_vector<double>(), x.to_vector<double>());
  EXPECT_EQ(triu(x, INT64_MIN).to_vector<double>(), x.to_vector<double>());
  EXPECT_EQ(sum(triu(x, INT64_MAX)).item<double>(), 0);
  EXPECT_EQ(sum(tril(x, INT64_MIN)).item<double>(), 0);
  for (const DType d : {f32, f16, bf16, i64, u8, boolean}) {
    EXPECT_EQ(tril(ones({2, 2}, {.dtype = d})).to_vector<double>(), (Values{1, 0, 1, 1})) << name(d);
  }
  EXPECT_EQ(tril(zeros({0, 3})).sizes(), Shape({0, 3}));
  Tensor y = ones({2, 2});
  triu_(y, 1);
  EXPECT_EQ(y.to_vector<double>(), (Values{0, 1, 0, 0}));
}

TEST(Triangle, DiagonalIsAView) {
  Tensor x = zeros({2, 3, 4});
  Tensor d = diagonal(x, -1, 1, 2);
  EXPECT_EQ(d.sizes(), Shape({2, 2}));
  d.fill_(1);
  EXPECT_EQ(x[0].to_vector<double>(), (Values{0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(diagonal(x, 3, 1, 2).sizes(), Shape({2, 1}));
  EXPECT_EQ(diagonal(x, 4, 1, 2).sizes(), Shape({2, 0}));
  EXPECT_EQ(diagonal(x, -9, 1, 2).sizes(), Shape({2, 0}));
  EXPECT_EQ(diagonal(x, 0, -1, 0).sizes(), Shape({3, 2}));
}

TEST(Triangle, DiagAndTrace) {
  EXPECT_EQ(diag(tensor({1, 2})).to_vector<double>(), (Values{1, 0, 0, 2}));
  EXPECT_EQ(diag(tensor({1, 2}), -1).to_vector<double>(), (Values{0, 0, 0, 1, 0, 0, 0, 2, 0}));
  EXPECT_EQ(diag(tensor({{1, 2}, {3, 4}}), 1).to_vector<double>(), (Values{2}));
  EXPECT_EQ(diag_embed(ones({2, 3}), 1).sizes(), Shape({2, 4, 4}));
  EXPECT_EQ(diag(zeros({0})).sizes(), Shape({0, 0}));
  EXPECT_EQ(trace(tensor({{1, 2, 9}, {3, 4, 9}})).item<double>(), 5);
}

TEST(Triangle, Errors) {
  EXPECT_EQ(error_of<ShapeError>([] { tril(zeros({3})); }), "tril: expected at least 2 dimensions, got [3]");
  EXPECT_EQ(error_of<ShapeError>([] {
              diagonal(zeros({3, 3}), 0, 1, -1);
            }),
            "diagonal: expected two different dimensions of [3, 3], got 1 and -1");
  EXPECT_THROW(diagonal(zeros({3})), ShapeError);
  EXPECT_THROW(diag(zeros({2, 2, 2})), ShapeError);
  EXPECT_THROW(diag(zeros({2}), INT64_MAX), Error);
  EXPECT_THROW(trace(zeros({2})), ShapeError);
  EXPECT_THROW(tril(Tensor()), Error);
}

TEST(Triangle, Gradients) {
  const Tensor x = sample({2, 4, 3}).permute({0, 2, 1});
  check_gradients([](const auto& v) { return tril(v[0] * v[0], 1); }, {x});
  check_gradients([](const auto& v) { return triu(v[0] * v[0], -1); }, {x});
  check_gradients([](const auto& v) { return diagonal(v[0] * v[0], 1, 2, 1); }, {x});
  check_gradients([](const auto& v) { return diag_embed(v[0] * v[0], -1); }, {sample({2, 2})});
  check_gradients([](const auto& v) { return trace(v[0] * v[0]); }, {sample({3, 4})});
}

}  // namespace
}  // namespace halfstep
