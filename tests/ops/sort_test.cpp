// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/sort.h"

#include <limits>

#include "halfstep/ops/index.h"
#include "tests/ops/index_checks.h"

namespace halfstep {
namespace {

using namespace test;

constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(Sort, Goldens) {
  check_goldens("sort", [](const auto& e, const auto& x) {
    const auto r = sort(x[0], e.integer("dim"), {.descending = e.flag("descending"), .stable = e.flag("stable")});
    return std::vector{r.values, r.indices};
  });
  check_goldens("topk", [](const auto& e, const auto& x) {
    const auto r = topk(x[0], e.integer("k"), e.integer("dim"), {.largest = e.flag("largest")});
    return std::vector{r.values, r.indices};
  });
}

TEST(Sort, SpecialValuesOfEveryFloatingDtype) {
  for (const DType d : {f64, f32, f16, bf16}) {
    const Tensor x = tensor({1, NAN, -0.0, -kInf, 0, kInf, -2, -NAN, 1}, {.dtype = d});
    EXPECT_EQ(argsort(x).to_vector<std::int64_t>(), (Ints{3, 6, 2, 4, 0, 8, 5, 1, 7})) << name(d);
    EXPECT_EQ(argsort(x, 0, {.descending = true}).to_vector<std::int64_t>(), (Ints{1, 7, 5, 0, 8, 2, 4, 6, 3}))
        << name(d);
    EXPECT_EQ(topk(x, 4).indices.to_vector<std::int64_t>(), (Ints{1, 7, 5, 0})) << name(d);
    EXPECT_EQ(topk(x, 3, 0, {.largest = false}).values.to_vector<double>(), (Values{-kInf, -2, -0.0})) << name(d);
  }
}

TEST(Sort, Integers) {
  const Tensor x = ints({3, INT64_MIN, INT64_MAX, -1, 0, 3});
  EXPECT_EQ(sort(x).values.to_vector<std::int64_t>(), (Ints{INT64_MIN, -1, 0, 3, 3, INT64_MAX}));
  EXPECT_EQ(argsort(x, 0, {.descending = true}).to_vector<std::int64_t>(), (Ints{2, 0, 5, 4, 3, 1}));
  for (const DType d : {i32, i8}) {
    EXPECT_EQ(sort(tensor({3, -128, 127, -1}, {.dtype = d})).values.to_vector<double>(), (Values{-128, -1, 3, 127}));
  }
  EXPECT_EQ(sort(tensor({3, 200, 0}, {.dtype = u8})).values.to_vector<double>(), (Values{0, 3, 200}));
  EXPECT_EQ(argsort(tensor({1, 0, 1, 0}, {.dtype = boolean})).to_vector<std::int64_t>(), (Ints{1, 3, 0, 2}));
}

TEST(Sort, LayoutsAndShapes) {
  const Tensor x = sample({3, 4, 5}).permute({2, 0, 1});
  for (const std::int64_t dim : {0, 1, 2}) {
    EXPECT_EQ(sort(x, dim).values.to_vector<double>(), sort(x.contiguous(), dim).values.to_vector<double>());
    EXPECT_EQ(sort(x, dim).values.to_vector<double>(), gather(x, dim, argsort(x, dim)).to_vector<double>());
    const SortResult top = topk(x, 2, dim), all = sort(x, dim, {.descending = true});
    EXPECT_EQ(top.values.to_vector<double>(), all.values.narrow(dim, 0, 2).to_vector<double>());
    EXPECT_EQ(top.indices.to_vector<std::int64_t>(), all.indices.narrow(dim, 0, 2).to_vector<std::int64_t>());
  }
  EXPECT_EQ(sort(scalar_tensor(3)).values.item<double>(), 3);
  EXPECT_EQ(sort(scalar_tensor(3)).indices.item<int>(), 0);
  EXPECT_EQ(topk(scalar_tensor(3), 1).values.item<double>(), 3);
  EXPECT_EQ(sort(zeros({0})).values.sizes(), Shape({0}));
  EXPECT_EQ(sort(zeros({3, 0}), 0).indices.sizes(), Shape({3, 0}));
  EXPECT_EQ(topk(zeros({3, 2}), 0).values.sizes(), Shape({3, 0}));
}

TEST(Sort, LongAndManyLines) {
  // A permutation by a multiplier prime to n.
  const std::int64_t n = 100003;
  std::vector<double> values;
  for (std::int64_t i = 0; i < n; ++i) values.push_back(static_cast<double>(i * 7919 % n));
  const Tensor x = tensor(values, {.dtype = f32});
  EXPECT_EQ(sort(x).values.to_vector<double>(), arange(0, n).to_vector<double>());
  EXPECT_EQ(topk(x, 3).values.to_vector<double>(), (Values{100002, 100001, 100000}));
  EXPECT_EQ(sort(x.to(f64), 0, {.descending = true}).values.slice(0, n - 2).to_vector<double>(), (Values{1, 0}));
  const Tensor lines = x.slice(0, 0, 100000).view({10000, 10});
  const Tensor sorted = sort(lines).values;
  for (std::int64_t i = 0; i < 10000; i += 997) {
    EXPECT_EQ(sorted[i].to_vector<double>(), sort(lines[i]).values.to_vector<double>());
  }
}

TEST(Sort, Kthvalue) {
  const Tensor x = tensor({{3, 1, 2}, {6, 5, 4}});
  EXPECT_EQ(kthvalue(x, 2).values.to_vector<double>(), (Values{2, 5}));
  EXPECT_EQ(kthvalue(x, 1, 0, true).values.sizes(), Shape({1, 3}));
  EXPECT_THROW(kthvalue(x, 0), ShapeError);
  EXPECT_THROW(kthvalue(x, 4), ShapeError);
}

TEST(Sort, Errors) {
  EXPECT_EQ(error_of<ShapeError>([] {
              topk(zeros({2, 3}), 4);
            }),
            "topk: expected a k from 0 to 3 for dimension 1 of [2, 3], got 4");
  EXPECT_THROW(topk(zeros({2, 3}), -1), ShapeError);
  EXPECT_THROW(sort(zeros({2}), 1), ShapeError);
  EXPECT_THROW(sort(zeros({2}, {.dtype = f8e5m2})), DTypeError);
  EXPECT_THROW(sort(Tensor()), Error);
}

TEST(Sort, Gradients) {
  const Tensor x = sample({4, 3}).transpose(0, 1);
  check_gradients([](const auto& v) { return sort(v[0] * v[0], 0).values; }, {x});
  check_gradients([](const auto& v) { return sort(v[0] * v[0], 1, {.descending = true}).values; }, {x});
  check_gradients([](const auto& v) { return topk(v[0] * v[0], 2).values; }, {x});
  check_gradients([](const auto& v) { return kthvalue(v[0] * v[0], 2, 0).values; }, {x});
}

}  // namespace
}  // namespace halfstep
