// SPDX-License-Identifier: Apache-2.0
// 16-bit inputs to float32 weights outside of a region compute in float32, and it is said once for each op.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/amp/mixed_internal.h"
#include "halfstep/autograd/checkpoint.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/function.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/log.h"

namespace halfstep {
namespace {

class MixedDtypes : public testing::Test {
 protected:
  void SetUp() override {
    amp::detail::forget_mixed_warnings();
    set_log_sink([this](LogLevel level, std::string_view text) {
      // A device may have to say that it lacks an op.
      if (level >= LogLevel::warning && text.find("meets a weight") != text.npos) said_.emplace_back(text);
    });
  }
  void TearDown() override { set_log_sink({}); }
  std::vector<std::string> said_;
};

TEST_F(MixedDtypes, SaidOnceForEachOpWithTheWayToWriteIt) {
  const nn::Linear fc{{.in = 4, .out = 3}};
  for (const DType low : {f16, bf16}) {
    for (int i = 0; i < 3; ++i) EXPECT_EQ(fc(ones({2, 4}, {.dtype = low})).dtype(), f32) << "promoted";
  }
  ASSERT_EQ(said_.size(), 1u);
  EXPECT_EQ(said_[0],
            "linear: an input of f16 meets a weight of f32 outside of an autocast region, so that it is computed in "
            "f32; for 16 bits, put forward pass and loss into a region, `amp::Autocast autocast{{.dtype = f16}};`, or "
            "turn the module's weights to f16 with `to(f16)` (said once for each op)");
  const nn::Conv2d conv{{.in = 2, .out = 3, .kernel = {3}}};
  conv(ones({1, 2, 5, 5}, {.dtype = bf16}));
  ASSERT_EQ(said_.size(), 2u);
  EXPECT_EQ(said_[1].find("conv2d: an input of bf16"), 0u) << said_[1];
  // What it says to write is what helps.
  said_.clear();
  amp::detail::forget_mixed_warnings();
  nn::Linear low{{.in = 4, .out = 3}};
  low.to(f16);
  EXPECT_EQ(low(ones({2, 4}, {.dtype = f16})).dtype(), f16);
  {
    const amp::Autocast autocast{{.dtype = f16}};
    EXPECT_EQ(fc(ones({2, 4}, {.dtype = f16})).dtype(), f16);
  }
  EXPECT_TRUE(said_.empty()) << said_[0];
}

TEST_F(MixedDtypes, SaidInAnEvaluationToo) {
  const nn::Linear fc{{.in = 4, .out = 3}};
  const NoGrad no_grad;
  fc(ones({2, 4}, {.dtype = f16}));
  EXPECT_EQ(said_.size(), 1u);
}

TEST_F(MixedDtypes, OfAViewOfAWeight) {
  const Tensor w = (full({3, 4}, 1) + 0).requires_grad_();
  mm(ones({2, 4}, {.dtype = f16}), w.t());
  EXPECT_EQ(said_.size(), 1u);
}

TEST_F(MixedDtypes, NotWhereItMakesNoDifference) {
  const Tensor w = (full({4, 4}, 1) + 0).requires_grad_(), h = ones({4, 4}, {.dtype = f16});
  const Tensor other = ones({4, 4}), wide = ones({4, 4}, {.dtype = f64});
  mm(h, other);                     // no weight
  mm(wide, w);                      // no 16 bits
  EXPECT_EQ((h * w).dtype(), f32);  // an op of elements, where everybody expects promotion
  mm(h, wide);
  nn::LayerNorm norm{{.normalized_shape = {4}}};
  norm(h);
  EXPECT_TRUE(said_.empty()) << said_[0];
}

TEST_F(MixedDtypes, NotInsideARegionEvenWhereAutocastIsOff) {
  const nn::Linear fc{{.in = 4, .out = 4}};
  const Tensor h = ones({2, 4}, {.dtype = f16});
  const amp::Autocast region{
      {.ops = {{"linear", amp::Policy::pass_through}}, .modules = {{.path = "head", .enabled = false}}}};
  EXPECT_EQ(fc(h).dtype(), f32);
  {
    const amp::ModuleScope head{"head"};
    EXPECT_EQ(fc(h).dtype(), f32);
  }
  const amp::Autocast off{{.enabled = false}};
  EXPECT_EQ(fc(h).dtype(), f32);
  EXPECT_TRUE(said_.empty()) << said_[0];
}

struct Own : Function<Own> {
  static Tensor forward(FunctionContext& c, const Tensor& x, const Tensor& w) {
    c.save_for_backward({x, w});
    return mm(x.to(f16), w.to(f16));
  }
  static std::vector<Tensor> backward(FunctionContext& c, const std::vector<Tensor>& g) {
    return {mm(g[0], c.saved(1).t()), mm(c.saved(0).t(), g[0])};
  }
};

TEST_F(MixedDtypes, NotFromTheLibrarysOwnWork) {
  // Backward passes, losses, optimizers and scalers around 16-bit tensors.
  nn::Linear fc{{.in = 4, .out = 4}};
  optim::Adam adam(fc.parameters(), {.lr = 0.1});
  amp::GradScaler scaler{{.init_scale = 8}};
  const Tensor x = ones({2, 4}, {.dtype = f16, .requires_grad = true}), labels = zeros({2}, {.dtype = i64});
  for (int i = 0; i < 2; ++i) {
    Tensor loss;
    {
      const amp::Autocast region;
      loss = cross_entropy(checkpoint([&](const Tensor& t) { return fc(t * 1); }, x), labels);
    }
    scaler.scale(loss).backward();
    scaler.step(adam);
    scaler.update();
  }
  const Tensor w = (full({4, 4}, 1) + 0).requires_grad_();
  sum(Own::apply(x, w)).backward();
  mse_loss(ones({4}, {.dtype = f16}), w.slice(0, 0, 1).view({4}));
  EXPECT_TRUE(said_.empty()) << said_[0];
}

TEST_F(MixedDtypes, FromManyThreadsOnce) {
  const nn::Linear fc{{.in = 4, .out = 4}};
  const Tensor h = ones({2, 4}, {.dtype = f16});
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 50; ++k) fc(h);
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(said_.size(), 1u);
}

}  // namespace
}  // namespace halfstep
