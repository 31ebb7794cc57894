// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/autograd/gradcheck.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using test::GoldenEntry;
using Values = std::vector<double>;
using Tensors = std::vector<Tensor>;

Tensor at(const Tensors& in, std::size_t i) { return i < in.size() ? in[i] : Tensor{}; }

Tensors call_layer_norm(const GoldenEntry& e, const Tensors& in) {
  return {layer_norm(in[0], Shape(e.integers("normalized_shape")),
                     {.weight = at(in, 1), .bias = at(in, 2), .eps = e.real("eps")})};
}
Tensors call_rms_norm(const GoldenEntry& e, const Tensors& in) {
  return {rms_norm(in[0], Shape(e.integers("normalized_shape")), {.weight = at(in, 1), .eps = e.real("eps")})};
}
Tensors call_group_norm(const GoldenEntry& e, const Tensors& in) {
  return {group_norm(in[0], e.integer("num_groups"), {.weight = at(in, 1), .bias = at(in, 2), .eps = e.real("eps")})};
}
// The golden's outputs are the result and the running statistics after the call.
Tensors call_batch_norm(const GoldenEntry& e, const Tensors& in) {
  const Tensor running_mean = in[3].detach().clone(), running_var = in[4].detach().clone();
  const Tensor y = batch_norm(in[0], {.weight = in[1],
                                      .bias = in[2],
                                      .running_mean = running_mean,
                                      .running_var = running_var,
                                      .training = e.flag("training"),
                                      .momentum = e.real("momentum"),
                                      .eps = e.real("eps")});
  if (e.outputs.size() == 1) return {y};
  return {y, running_mean, running_var};
}

TEST(Norm, AgreesWithPyTorch) {
  test::check_op_goldens("layer_norm", call_layer_norm);
  test::check_op_goldens("rms_norm", call_rms_norm);
  test::check_op_goldens("group_norm", call_group_norm);
  test::check_op_goldens("batch_norm", call_batch_norm);
}
TEST(Norm, FollowsThePolicy) {
  test::check_policy_goldens("layer_norm", call_layer_norm);
  test::check_policy_goldens("rms_norm", call_rms_norm);
  test::check_policy_goldens("group_norm", call_group_norm);
  test::check_policy_goldens("batch_norm", call_batch_norm);
}

Tensor wave(const Shape& sizes, DType dtype = f64, double offset = 0) {
  Values values;
  for (std::int64_t i = 0; i < sizes.numel(); ++i) values.push_back(offset + std::sin(1.7 * static_cast<double>(i)));
  return tensor(values, sizes, {.dtype = dtype});
}
void expect_near(const Tensor& a, const Tensor& b, double bound) {
  const auto p = a.to_vector<double>(), q = b.to_vector<double>();
  ASSERT_EQ(p.size(), q.size());
  for (std::size_t i = 0; i < p.size(); ++i) ASSERT_NEAR(p[i], q[i], bound) << i;
}

TEST(Norm, FirstAndSecondGradients) {
  const Tensor x = wave({3, 4, 2}).requires_grad_(), w = wave({4, 2}, f64, 1).requires_grad_();
  const Tensor b = wave({4, 2}).requires_grad_(), strided = wave({2, 4, 3}).transpose(0, 2).requires_grad_();
  const Tensor cw = wave({4}, f64, 1).requires_grad_(), cb = wave({4}).requires_grad_();
  const Tensor rm = wave({4}), rv = wave({4}, f64, 2);
  const std::vector<std::pair<TensorFunction, Tensors>> cases = {
      {[](const Tensors& v) {
         return Tensors{layer_norm(v[0], {4, 2}, {.weight = v[1], .bias = v[2]})};
       },
       {x, w, b}},
      {[](const Tensors& v) { return Tensors{layer_norm(v[0], {2})}; }, {strided}},
      {[](const Tensors& v) {
         return Tensors{rms_norm(v[0], {4, 2}, {.weight = v[1], .eps = 1e-3})};
       },
       {x, w}},
      {[](const Tensors& v) { return Tensors{group_norm(v[0], 2, {.weight = v[1], .bias = v[2]})}; }, {x, cw, cb}},
      {[](const Tensors& v) { return Tensors{group_norm(v[0], 4)}; }, {wave({2, 4, 3}).requires_grad_()}},
      {[](const Tensors& v) { return Tensors{batch_norm(v[0], {.weight = v[1], .bias = v[2], .training = true})}; },
       {x, cw, cb}},
      {[](const Tensors& v) { return Tensors{batch_norm(v[0], {.weight = v[1], .bias = v[2], .training = true})}; },
       {strided, cw, cb}},
      {[=](const Tensors& v) {
         return Tensors{batch_norm(v[0], {.weight = v[1], .bias = v[2], .running_mean = rm, .running_var = rv})};
       },
       {x, cw, cb}},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    gradcheck(cases[i].first, cases[i].second);
    gradgradcheck(cases[i].first, cases[i].second);
  }
}

// The mean is 10,000 deviations away: E[x^2] - E[x]^2 in float32 would have no digit left.
TEST(Norm, LargeMeansKeepTheVariance) {
  const Tensor x = wave({64, 8}, f32, 10000), exact = x.to(f64);
  expect_near(layer_norm(x, {8}), layer_norm(exact, {8}), 1e-5);
  expect_near(batch_norm(x, {.training = true}), batch_norm(exact, {.training = true}), 1e-5);
}

TEST(Norm, SixteenBitInputsWithFloat32Parameters) {
  for (DType dtype : {f16, bf16}) {
    const double u = dtype == f16 ? 0x1p-11 : 0x1p-8;
    const Tensor x = wave({4, 6, 5}, dtype), w = wave({6}, f32, 1), b = wave({6}, f32);
    Tensor rm = zeros({6}), rv = ones({6});
    const Tensor y = batch_norm(x, {.weight = w, .bias = b, .running_mean = rm, .running_var = rv, .training = true});
    EXPECT_EQ(y.dtype(), dtype);
    EXPECT_EQ(rm.dtype(), f32);
    const Tensor exact = batch_norm(x.to(f64), {.weight = w.to(f64), .bias = b.to(f64), .training = true});
    // Results up to 4: half a unit of the last place, and some float32 roundings.
    expect_near(y, exact, 4 * u + 1e-5);
    const Tensor l = layer_norm(x, {5});
    EXPECT_EQ(l.dtype(), dtype);
    expect_near(l, layer_norm(x.to(f64), {5}), 4 * u + 1e-5);
  }
}

TEST(Norm, LayoutsAgreeAndAreKept) {
  const Tensor x = wave({3, 5, 4, 6}), last = x.contiguous(MemoryFormat::channels_last);
  const Tensor a = batch_norm(x, {.training = true}), b = batch_norm(last, {.training = true});
  EXPECT_EQ(b.strides(), last.strides());
  expect_near(a, b, 1e-13);
  const Tensor odd = wave({6, 4, 5, 3}).permute({3, 2, 1, 0});
  expect_near(batch_norm(odd, {.training = true}), batch_norm(odd.contiguous(), {.training = true}), 1e-13);
  // Gradients of another layout than the input's.
  const Tensor p = x.detach().requires_grad_(), q = last.detach().requires_grad_();
  const Tensor g = wave({3, 5, 4, 6}, f64, 0.3);
  batch_norm(p, {.training = true}).backward(g.contiguous(MemoryFormat::channels_last));
  batch_norm(q, {.training = true}).backward(g);
  expect_near(p.grad(), q.grad(), 1e-13);
  expect_near(group_norm(last, 5), group_norm(x, 5), 1e-13);
}

TEST(Norm, LongRows) {
  const Tensor x = wave({2, 5000}).requires_grad_();
  const auto f = [&](const Tensor& v) { return layer_norm(v, {5000}); };
  const Tensor y = f(x);
  EXPECT_NEAR(mean(y).item<double>(), 0, 1e-13);
  EXPECT_NEAR(var(y, {1}, {.correction = 0}).to_vector<double>()[1], 1, 1e-4);
  y.backward(x.detach());
  // y is x scaled, and what is parallel to x or constant has no gradient but through eps.
  for (double v : x.grad().to_vector<double>()) ASSERT_NEAR(v, 0, 1e-4);
}

TEST(Norm, RunningStatisticsAreWrittenInPlace) {
  const Tensor rm = zeros({2}), rv = ones({2});
  const auto version = rm.version();
  const Tensor x = tensor(Values{1, 10, 3, 30}, {2, 2});
  batch_norm(x, {.running_mean = rm, .running_var = rv, .training = true, .momentum = 0.5});
  EXPECT_EQ(rm.to_vector<double>(), (Values{1, 10}));
  EXPECT_EQ(rv.to_vector<double>(), (Values{1.5, 100.5}));  // unbiased: 2 and 200
  EXPECT_GT(rm.version(), version);
}

TEST(Norm, Errors) {
  EXPECT_THROW(layer_norm(ones({2, 3}), {4}), ShapeError);
  EXPECT_THROW(layer_norm(ones({2, 3}), {3}, {.weight = ones({2})}), ShapeError);
  EXPECT_THROW(layer_norm(ones({2, 3}, {.dtype = i64}), {3}), DTypeError);
  EXPECT_THROW(group_norm(ones({2, 3}), 2), ShapeError);
  EXPECT_THROW(batch_norm(ones({3}), {.training = true}), ShapeError);
  EXPECT_THROW(batch_norm(ones({1, 3}), {.training = true}), ShapeError);
  EXPECT_THROW(batch_norm(ones({2, 3})), Error);
  EXPECT_THROW(batch_norm(ones({2, 3}), {.running_mean = ones({3})}), Error);
}

TEST(Norm, NothingToNormalise) {
  EXPECT_EQ(layer_norm(empty({0, 3}), {3}).sizes(), (Shape{0, 3}));
  EXPECT_EQ(group_norm(empty({0, 4, 2}), 2).sizes(), (Shape{0, 4, 2}));
  EXPECT_EQ(batch_norm(empty({0, 3}), {.running_mean = zeros({3}), .running_var = ones({3})}).sizes(), (Shape{0, 3}));
}

}  // namespace
}  // namespace halfstep
