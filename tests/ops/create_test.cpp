// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/create.h"

#include "tests/ops/index_checks.h"

namespace halfstep {
namespace {

using namespace test;

TEST(Create, FullAndLike) {
  for (const DType d : {f32, f64, f16, bf16, f8e4m3, f8e5m2, i64, i32, i8, u8}) {
    EXPECT_EQ(full({2, 2}, 3, {.dtype = d}).to_vector<double>(), Values(4, 3)) << name(d);
    EXPECT_EQ(ones_like(zeros({2}, {.dtype = d})).dtype(), d);
  }
  EXPECT_EQ(full({1}, INT64_MAX, {.dtype = i64}).item<std::int64_t>(), INT64_MAX) << "no detour over double";
  EXPECT_EQ(zeros({2, 0}).sizes(), Shape({2, 0}));
  const Tensor x = zeros({2, 3, 4, 5}).contiguous(MemoryFormat::channels_last);
  EXPECT_EQ(full_like(x, 1).strides(), x.strides());
  EXPECT_EQ(zeros_like(x, f16).dtype(), f16);
  EXPECT_EQ(full_like(x, 2.5, f64)[0][0][0][0].item<double>(), 2.5);
  EXPECT_TRUE(ones({1}, {.requires_grad = true}).requires_grad());
  EXPECT_THROW(zeros({-1}), ShapeError);
  EXPECT_THROW(zeros({INT64_MAX, 16}), ShapeError);
  EXPECT_THROW(zeros({1}, {.dtype = i64, .requires_grad = true}), AutogradError);
}

TEST(Create, Tensor) {
  EXPECT_EQ(tensor({1, 2, 3}).sizes(), Shape({3}));
  EXPECT_EQ(tensor({1, 2, 3, 4}, {2, 2}, {.dtype = f16}).dtype(), f16);
  EXPECT_EQ(tensor({{1, 2, 3}, {4, 5, 6}}).sizes(), Shape({2, 3}));
  EXPECT_EQ(tensor({{{1, 2}, {3, 4}}, {{5, 6}, {7, 8}}}, {.dtype = i64}).to_vector<std::int64_t>(),
            (Ints{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(tensor(Ints{INT64_MAX, 1}, {2}).to_vector<std::int64_t>()[0], INT64_MAX);
  EXPECT_EQ(error_of<ShapeError>([] {
              tensor({{1, 2}, {3}});
            }),
            "tensor: expected 2 items in each list of dimension 1, got 1");
  EXPECT_EQ(error_of<ShapeError>([] { tensor({1, 2, 3}, {2, 2}); }), "tensor: expected 4 values for [2, 2], got 3");
}

TEST(Create, Arange) {
  EXPECT_EQ(arange(4).to_vector<std::int64_t>(), (Ints{0, 1, 2, 3}));
  EXPECT_EQ(arange(4).dtype(), i64);
  EXPECT_EQ(arange(5, -2, -3).to_vector<std::int64_t>(), (Ints{5, 2, -1}));
  EXPECT_EQ(arange(3, 3).numel(), 0);
  EXPECT_EQ(arange(0, 3, 1, {.dtype = f16}).dtype(), f16);
  EXPECT_EQ(arange(INT64_MIN, INT64_MAX, INT64_MAX).to_vector<std::int64_t>(), (Ints{INT64_MIN, -1, INT64_MAX - 1}));
  EXPECT_EQ(arange(0.0, 1.0, 0.25).to_vector<double>(), (Values{0, 0.25, 0.5, 0.75}));
  EXPECT_EQ(arange(0, 1.0, 0.25).dtype(), f32);
  EXPECT_EQ(arange(1.0, 0, -0.5, {.dtype = f64}).to_vector<double>(), (Values{1, 0.5}));
  EXPECT_EQ(arange(0.0, -1.0).numel(), 0);
  // No rounding adds up: element i is start + i * step.
  EXPECT_EQ(arange(0.0, 100.0, 0.1, {.dtype = f64}).to_vector<double>()[999], 999 * 0.1);
  EXPECT_THROW(arange(0, 5, 0), Error);
  EXPECT_THROW(arange(0.0, 5.0, 0.0), Error);
  EXPECT_THROW(arange(0.0, NAN), Error);
  EXPECT_THROW(arange(0, INT64_MAX), ShapeError);
  EXPECT_THROW(arange(0.0, 1e300), ShapeError);
}

TEST(Create, LinspaceLogspaceEye) {
  EXPECT_EQ(linspace(0, 1, 5).to_vector<double>(), (Values{0, 0.25, 0.5, 0.75, 1}));
  EXPECT_EQ(linspace(3, 7, 1).to_vector<double>(), (Values{3}));
  EXPECT_EQ(linspace(3, 7, 0).numel(), 0);
  EXPECT_EQ(linspace(0, 0.1, 7, {.dtype = f64}).to_vector<double>()[6], 0.1) << "the end is exact";
  // Here 49 steps of 1 / 49 add up to less than 1.
  EXPECT_EQ(linspace(0, 1, 50, {.dtype = f64}).to_vector<double>()[49], 1);
  EXPECT_THROW(linspace(0, 1, -1), Error);
  EXPECT_EQ(logspace(0, 3, 4, 2).to_vector<double>(), (Values{1, 2, 4, 8}));
  EXPECT_EQ(eye(2).to_vector<double>(), (Values{1, 0, 0, 1}));
  EXPECT_EQ(eye(0).sizes(), Shape({0, 0}));
  EXPECT_EQ(eye(3, {.dtype = boolean}).dtype(), boolean);
}

TEST(Create, FillIsRecorded) {
  const Tensor x = sample({3}).requires_grad_();
  Tensor y = x * 2;
  y.slice(0, 0, 1).fill_(7);
  y.slice(0, 1, 2).zero_();
  sum(y).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{0, 0, 2}));
}

}  // namespace
}  // namespace halfstep
