// SPDX-License-Identifier: Apache-2.0
// A scaler doesn't read gradients that the product which made them knows to be finite. Here: that it knows, and that
// nothing which may change them afterwards goes unseen.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/core/dlpack.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/sgd.h"

namespace halfstep {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Wanted {
  Wanted() { want_magnitude_bounds(true); }
  ~Wanted() { want_magnitude_bounds(false); }
};

float bound(const Tensor& t) { return t.storage()->magnitude_bound(); }

// [64, 48], of sums of four products.
Tensor product(DType dtype, double a, double b, double last_a = 0) {
  Tensor x = full({64, 4}, a, {.dtype = dtype}), y = full({4, 48}, b, {.dtype = dtype});
  if (last_a != 0) x.select(0, 63).select(0, 3).fill_(last_a);
  return mm(x, y, {.dtype = f32});
}

// The CPU's kernels know bounds; those of a device need not.
class MagnitudeBound : public testing::Test {
  void SetUp() override {
    if (!default_device().is_cpu()) GTEST_SKIP() << "bounds come from the CPU's kernels";
  }
};

TEST_F(MagnitudeBound, HoldsAndIsNotTooLarge) {
  EXPECT_EQ(bound(product(f16, 3, 5)), kInf);  // nobody asked
  const Wanted wanted;
  for (const DType dtype : {f32, f16, bf16}) {
    const Tensor c = product(dtype, -3, 5);
    EXPECT_GE(bound(c), 60) << name(dtype);
    EXPECT_LE(bound(c), 240) << name(dtype);
    const Tensor turned =
        mm(full({4, 64}, 2, {.dtype = dtype}).t(), full({48, 4}, 3, {.dtype = dtype}).t(), {.dtype = f32});
    EXPECT_GE(bound(turned), 24) << name(dtype);
    EXPECT_LE(bound(turned), 96) << name(dtype);
  }
  // All finite f16 operands give finite sums; those of float32 may not.
  EXPECT_LT(bound(product(f16, 65504, 65504)), kInf);
  EXPECT_EQ(bound(product(f32, 1e20, 1e20)), kInf);
  EXPECT_EQ(bound(product(f32, 2e19, 1e19)), kInf);  // 8e38
  EXPECT_EQ(bound(product(bf16, 1, 1, kInf)), kInf);
  EXPECT_EQ(bound(product(f16, 1, 1, std::numeric_limits<double>::quiet_NaN())), kInf);
  // Of several products none is read for all.
  const Tensor several = full({2, 64, 4}, 1);
  several[1].fill_(kInf);
  EXPECT_EQ(bound(bmm(several, full({2, 4, 64}, 1))), kInf);
  // As large as its operands: reading it costs no more than reading those.
  EXPECT_EQ(bound(mm(ones({8, 8}), ones({8, 8}))), kInf);
}

TEST_F(MagnitudeBound, IsForgottenAtEveryWrite) {
  const Wanted wanted;
  const std::function<void(const Tensor&)> writes[] = {
      [](Tensor t) { t.mul_(2); },
      [](Tensor t) { t.select(0, 3).fill_(1); },
      [](Tensor t) {
        t.copy_(ones({64, 48}));
      },
      [](Tensor t) { t.data<float>()[5] = kInf; },
      [](Tensor t) { *static_cast<float*>(t.raw_data()) = kInf; },
      [](Tensor t) { from_dlpack(to_dlpack(t)).fill_(3); },
  };
  for (const auto& write : writes) {
    const Tensor c = product(f16, 1, 1);
    EXPECT_LT(bound(c), kInf);
    write(c);
    EXPECT_EQ(bound(c), kInf);
  }
  const Tensor c = product(f16, 1, 1);
  EXPECT_EQ(bound(c.clone()), kInf);
  EXPECT_EQ(bound(c + 1), kInf);
  EXPECT_LT(bound(c.detach().view({48, 64})), kInf);  // the same memory
}

// One linear layer's weight, whose gradient is a product that nobody reads.
struct Layer {
  Tensor weight = full({64, 48}, 0.5, {.requires_grad = true});
  optim::SGD optimizer{{{"weight", weight}}, {.lr = 1}};
  amp::GradScaler scaler{{.init_scale = 4}};

  void backward(double input = 1, double gradient = 1, DType dtype = f32) {
    const Tensor x = full({4, 48}, input, {.dtype = dtype});
    Tensor y = linear(x, dtype == f32 ? weight : weight.to(dtype));
    y.backward((scaler.scale(ones({})) * gradient).to(dtype).expand(y.sizes()).contiguous());
  }
};

TEST_F(MagnitudeBound, ScalersUseIt) {
  Layer layer;
  layer.backward();
  EXPECT_LT(bound(layer.weight.grad()), kInf);
  EXPECT_TRUE(layer.scaler.step(layer.optimizer).ran());
  EXPECT_EQ(layer.weight.grad().to_vector<float>().front(), 4);  // four samples, unscaled
  EXPECT_EQ(layer.weight.to_vector<float>().front(), -3.5f);
}

TEST_F(MagnitudeBound, WhatIsNotFiniteIsFoundAllTheSame) {
  const std::function<void(Layer&)> breaks[] = {
      [](Layer& l) { l.backward(kInf); },
      [](Layer& l) { l.backward(std::numeric_limits<double>::quiet_NaN()); },
      [](Layer& l) { l.backward(1e30, 1e30); },
      [](Layer& l) { l.backward(3e38, 1); },        // each product fits, the sum of four doesn't
      [](Layer& l) { l.backward(1, 65504, f16); },  // times the scale
      [](Layer& l) {
        l.backward();
        l.weight.grad().mul_(kInf);
      },
      [](Layer& l) {
        l.backward();
        l.weight.grad().data<float>()[3071] = kInf;
      },
      [](Layer& l) {
        l.backward();
        l.backward(kInf);
      },
      [](Layer& l) {
        l.backward();
        l.weight.set_grad(full({64, 48}, kInf));
      },
  };
  int i = 0;
  for (const auto& breakage : breaks) {
    Layer layer;
    breakage(layer);
    const auto result = layer.scaler.step(layer.optimizer);
    EXPECT_FALSE(result.ran()) << i;
    EXPECT_EQ(result.first_overflow(), "weight") << i;
    EXPECT_EQ(layer.weight.to_vector<float>().front(), 0.5f) << i;
    ++i;
  }
  // A scale under 1 can make what is finite overflow.
  Layer layer;
  layer.scaler.scale(ones({}));
  layer.scaler.update(1e-10);
  layer.backward(1e15, 1e25);  // 4e30 in the gradient
  EXPECT_LT(bound(layer.weight.grad()), kInf);
  EXPECT_FALSE(layer.scaler.step(layer.optimizer).ran());
}

TEST_F(MagnitudeBound, IsAskedForAsLongAsAScalerLives) {
  {
    amp::GradScaler scaler;
    EXPECT_EQ(bound(product(f16, 1, 1)), kInf);  // not used yet
    scaler.scale(ones({}));
    EXPECT_LT(bound(product(f16, 1, 1)), kInf);
    amp::GradScaler moved = std::move(scaler);
    EXPECT_LT(bound(product(f16, 1, 1)), kInf);
  }
  EXPECT_EQ(bound(product(f16, 1, 1)), kInf);
}

}  // namespace
}  // namespace halfstep
