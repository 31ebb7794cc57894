// SPDX-License-Identifier: Apache-2.0
// What an attack on captured steps found: memory seen from two sides, the host's random numbers, and what comes and
// goes between calls.
#include <gtest/gtest.h>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/checkpoint.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

TEST(CaptureEdges, ViewsOfAnInputsMemoryThatOthersHoldStayWhereTheyAre) {
  const Tensor all = arange(8).to(f32);
  auto step = capture([&](const Tensor& x) { return sum(x) + sum(all) * 100; });
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(step(all.narrow(0, i, 2)).item<float>(), static_cast<float>(2800 + 2 * i + 1)) << i;
  }
  EXPECT_TRUE(step.replayed());
}

TEST(CaptureEdges, WritesToAnInputAreSeenOutside) {
  const nn::Linear layer{{.in = 3, .out = 2}};
  auto step = capture([](const Tensor& t) {
    const NoGrad no_grad;
    Tensor to = t;
    to.add_(1);
  });
  const Tensor x = ones({1, 3});
  for (int i = 0; i < 6; ++i) {
    const amp::Autocast region({.dtype = f16});
    const auto before = layer.weight.version();
    step(layer.weight.detach());
    EXPECT_GT(layer.weight.version(), before);
    EXPECT_EQ(layer(x).to(f32).to_vector<float>(),
              linear(x.to(f16), layer.weight.detach().to(f16), layer.bias.detach().to(f16)).to(f32).to_vector<float>());
  }
  EXPECT_TRUE(step.replayed());
}

TEST(CaptureEdges, CheckpointsDrawTheirNumbersAgain) {
  Tensor w = ones({64});
  w.requires_grad_();
  auto step = capture([&](const Tensor& x) {
    w.set_grad({});
    const auto part = [&](const std::vector<Tensor>& in) { return std::vector<Tensor>{dropout(in[0] * w, 0.5, true)}; };
    const Tensor y = checkpoint(part, std::vector<Tensor>{x})[0];
    sum(y).backward();
    return y.detach();
  });
  const Tensor x = ones({64});
  std::vector<float> last;
  for (int i = 0; i < 6; ++i) {
    const auto y = step(x).to_vector<float>();
    EXPECT_EQ(w.grad().to_vector<float>(), y) << "the gradient has the mask of its forward pass";
    EXPECT_NE(y, last);
    last = y;
  }
  EXPECT_TRUE(step.replayed()) << step.why_not();
}

TEST(CaptureEdges, WhatIsRegisteredSeededOrReplacedBetweenCallsCounts) {
  Tensor w = ones({2});
  w.requires_grad_();
  auto step = capture([&](const Tensor& x) {
    w.set_grad({});
    sum(w * x).backward();
  });
  const Tensor x = full({2}, 3);
  for (int i = 0; i < 4; ++i) step(x);
  ASSERT_TRUE(step.replayed());
  const auto id = w.register_hook([](const Tensor& g) { return g * 2; });
  for (int i = 0; i < 4; ++i) {
    step(x);
    EXPECT_EQ(w.grad().to_vector<float>()[0], 6);
  }
  w.remove_hook(id);

  auto seeded = capture([](const Tensor& t) {
    manual_seed(3);
    return t + rand({2});
  });
  const auto first = seeded(x).to_vector<float>();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(seeded(x).to_vector<float>(), first);
  EXPECT_EQ(seeded.why_not(), "it seeds a generator");

  auto own = capture([](const Tensor& t) {
    Generator generator(7);
    return t + rand({2}, {}, &generator);
  });
  const auto once = own(x).to_vector<float>();
  for (int i = 0; i < 40; ++i) ASSERT_EQ(own(x).to_vector<float>(), once);
  EXPECT_FALSE(own.why_not().empty());

  auto optimizer = std::make_unique<optim::SGD>(NamedTensors{{"w", w}}, optim::SGDOptions{.lr = 0.5});
  auto train = capture([&](const Tensor& t) {
    w.set_grad({});
    sum(w * t).backward();
    optimizer->step();
  });
  for (int i = 0; i < 4; ++i) train(x);
  const auto state = optimizer->state_dict();
  optimizer = std::make_unique<optim::SGD>(NamedTensors{{"w", w}}, optim::SGDOptions{.lr = 0});
  const auto before = w.to_vector<float>();
  for (int i = 0; i < 4; ++i) train(x);
  EXPECT_EQ(w.to_vector<float>(), before);
  Tensor other = ones({2});
  other.requires_grad_();
  optimizer->add_param_group({{"other", other}}, {.lr = 1});
  for (int i = 0; i < 4; ++i) train(x);
  EXPECT_EQ(w.to_vector<float>(), before);
}

TEST(CaptureEdges, FreezingAndUnfreezingCounts) {
  // In 16 bits kernels may see the copies of the parameters only; the optimizer that keeps them isn't part of the step.
  for (const bool low : {false, true}) {
    const nn::Linear layer{{.in = 3, .out = 2}};
    optim::SGD optimizer{layer.parameters(), {.lr = 0.1}};
    auto step = capture([&](const Tensor& x) {
      layer.zero_grad();
      const amp::Autocast region({.dtype = f16, .enabled = low});
      sum(layer(x)).backward();
    });
    const Tensor x = ones({4, 3});
    for (int i = 0; i < 24; ++i) {
      const bool frozen = i / 6 % 2 == 1;
      Tensor weight = layer.weight;
      weight.requires_grad_(!frozen);
      step(x);
      EXPECT_EQ(layer.weight.grad().defined(), !frozen) << i << " low " << low;
      optimizer.step();
    }
    EXPECT_GE(step.stats().replayed, 12U) << step.why_not();
  }
}

TEST(CaptureEdges, RegionsOfOtherKindsAreOtherCalls) {
  const Tensor a = ones({2, 2}), b = ones({2, 2});
  auto product = capture([](const Tensor& l, const Tensor& r) { return mm(l, r); });
  for (int i = 0; i < 12; ++i) {
    const bool wide = i % 2 == 0;
    std::vector<amp::OpOverride> ops;
    if (wide) ops.push_back({"mm", amp::Policy::float32});
    const amp::Autocast region({.dtype = f16, .ops = ops});
    EXPECT_EQ(product(a, b).dtype(), wide ? f32 : f16);
  }
  EXPECT_EQ(test::error_of<Error>([&] {
              auto list = capture([](const Tensor& x, const auto&... more) { return (x + ... + more); });
              list(a);
              list(a, b);
            }),
            "capture: expected 1 inputs, as at the first call, got 2");
}

TEST(CaptureEdges, ResultsAreCopiesOfWhatStaysToo) {
  Tensor kept = zeros({2});
  auto step = capture([&](const Tensor& x) {
    kept.add_(x);
    return kept;
  });
  std::vector<Tensor> results;
  for (int i = 0; i < 5; ++i) results.push_back(step(ones({2})));
  for (int i = 1; i < 5; ++i) EXPECT_EQ(results[static_cast<std::size_t>(i)].to_vector<float>()[0], i + 1);
}

}  // namespace
}  // namespace halfstep
