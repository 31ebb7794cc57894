// SPDX-License-Identifier: Apache-2.0
// Modules that keep their inputs only and compute the rest again in the backward pass: the same bits, less memory.
#include "halfstep/nn/recompute.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <span>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/cast_cache.h"
#include "halfstep/amp/level.h"
#include "halfstep/autograd/checkpoint.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;

// A residual block with everything that a second run could do twice.
struct Block : nn::Module<Block> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 16, .out = 32}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 32}});
  nn::BatchNorm1d mean_norm = child("mean_norm", nn::BatchNorm1d{{.channels = 32, .momentum = {}}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 32, .out = 16}});
  std::shared_ptr<int> calls = std::make_shared<int>(0);
  Tensor forward(const Tensor& x) const {
    ++*calls;
    const Tensor h = mean_norm(dropout(norm(fc1(x), Activation::relu), 0.25, is_training()));
    return x + fc2(gelu(h));
  }
};

struct Net : nn::Module<Net> {
  nn::Sequential blocks = child("blocks", nn::Sequential{Block(), Block(), Block()});
  nn::Linear head = child("head", nn::Linear{{.in = 16, .out = 3}});
  Tensor forward(const Tensor& x) const { return head(blocks(x)); }
  const Block& block(std::size_t i) const { return blocks.at<Block>(i); }
};

// Values of losses, gradients and the network's state.
std::vector<double> trained(const Net& start, std::optional<DType> amp, bool level, bool captured,
                            const std::function<void(const Net&)>& prepare) {
  const Net net = nn::clone(start);
  if (level) amp::auto_mixed_precision(net, amp::Level::O2, f16);
  prepare(net);
  optim::SGD sgd(net.parameters(), {.lr = 0.05, .momentum = 0.9});
  const auto plain = [&](const Tensor& x, const Tensor& y) {
    sgd.zero_grad();
    Tensor loss;
    {
      std::optional<amp::Autocast> region;
      if (amp) region.emplace(amp::AutocastOptions{.dtype = *amp});
      loss = cross_entropy(net(x).to(f32), y);
    }
    loss.backward();
    sgd.step();
    return loss.detach();
  };
  auto fast = capture(plain);
  manual_seed(5);
  std::vector<double> values;
  const auto add = [&](const Tensor& t) {
    for (const double v : t.to_vector<double>()) values.push_back(v);
  };
  for (int i = 0; i < 6; ++i) {
    const Tensor x = randn({8, 16}), y = randint(0, 3, {8});
    add(captured ? fast(x, y) : plain(x, y));
    for (const NamedTensor& p : net.parameters()) add(p.tensor.grad());
  }
  EXPECT_EQ(fast.why_not(), "");
  for (const NamedTensor& t : net.state_dict()) add(t.tensor);
  values.push_back(static_cast<double>(default_generator().offset()));
  return values;
}

void all_blocks(const Net& net) {
  for (std::size_t i = 0; i < 3; ++i) net.block(i).recompute();
}

TEST(Recompute, GradientsStatisticsAndRandomNumbersAreTheSame) {
  manual_seed(1);
  Net start;
  // A mean of all batches reads its count on the host, which no captured step does.
  for (const bool captured : {false, true}) {
    if (captured) {
      for (std::size_t i = 0; i < 3; ++i) start.block(i).mean_norm.eval();
    }
    for (const std::optional<DType> amp : {std::optional<DType>(), std::optional(bf16), std::optional(f16)}) {
      const auto expected = trained(start, amp, false, captured, [](const Net&) {});
      EXPECT_TRUE(trained(start, amp, false, captured, all_blocks) == expected) << captured;
      EXPECT_TRUE(trained(start, amp, false, captured, [](const Net& n) { n.block(1).recompute(); }) == expected);
      // Blocks inside of what is recomputed, and single layers.
      EXPECT_TRUE(trained(start, amp, false, captured, [](const Net& n) {
                    n.blocks.recompute();
                    n.block(2).recompute();
                    n.block(0).norm.recompute();
                  }) == expected);
      EXPECT_TRUE(trained(start, amp, false, captured, [](const Net& n) { n.recompute(); }) == expected);
    }
    const auto expected = trained(start, {}, true, captured, [](const Net&) {});
    EXPECT_TRUE(trained(start, {}, true, captured, all_blocks) == expected) << captured;
  }
}

TEST(Recompute, RunsTwiceInTrainingWithGradientsOnly) {
  const Net net;
  all_blocks(net);
  const Tensor x = randn({8, 16});
  sum(net(x)).backward();
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(*net.block(i).calls, 2) << i;
  EXPECT_EQ(net.block(0).norm.num_batches_tracked.item<std::int64_t>(), 1);
  {
    const NoGrad no_grad;
    net(x);
  }
  EXPECT_EQ(*net.block(0).calls, 3);
  net.eval();
  sum(net(x)).backward();
  EXPECT_EQ(*net.block(0).calls, 4);
  net.train();
  net.block(0).recompute(false);
  EXPECT_FALSE(net.block(0).is_recomputed());
  sum(net(x)).backward();
  EXPECT_EQ(*net.block(0).calls, 5);
}

struct Wide : nn::Module<Wide> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 64, .out = 64}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 64, .out = 64}});
  nn::Linear fc3 = child("fc3", nn::Linear{{.in = 64, .out = 64}});
  Tensor forward(const Tensor& x) const { return gelu(fc3(gelu(fc2(gelu(fc1(x)))))); }
};

TEST(Recompute, KeepsInputsOnly) {
  const Wide net;
  const Tensor x = randn({256, 64});
  const auto kept = [&] {
    const std::uint64_t before = memory_stats(default_device()).allocated;
    const Tensor y = sum(net(x));
    return memory_stats(default_device()).allocated - before;
  };
  EXPECT_GE(kept(), 5U * 65536);
  net.recompute();
  EXPECT_LT(kept(), 65536U);
}

TEST(Recompute, IsNoStateAndGoesWithCopies) {
  const Wide net;
  const auto names = [](const Wide& n) {
    std::vector<std::string> result;
    for (const NamedTensor& t : n.state_dict()) result.push_back(t.name);
    return result;
  };
  const auto before = names(net);
  const Wide same = net;
  EXPECT_EQ(&net.recompute(), &net);
  EXPECT_EQ(names(net), before);
  EXPECT_TRUE(same.is_recomputed());
  const Wide apart = nn::clone(net);
  EXPECT_TRUE(apart.is_recomputed());
  net.recompute(false);
  EXPECT_FALSE(same.is_recomputed());
  EXPECT_TRUE(apart.is_recomputed());
}

// Arguments of several kinds, and results that are no tensor.
struct Mixed : nn::Module<Mixed> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 8, .out = 8}});
  std::pair<Tensor, double> forward(Tensor x, const std::vector<Tensor>& more, const std::optional<Tensor>& last,
                                    double factor) const {
    Tensor y = gelu(fc(x) * factor);
    for (const Tensor& t : more) y = y * t;
    x = y;
    return {last ? x + gelu(*last) : x, factor};
  }
};

TEST(Recompute, TakesAllKindsOfArguments) {
  const Mixed net;
  const Tensor x = randn({4, 8}), a = randn({4, 8}, {.requires_grad = true}),
               b = randn({4, 8}, {.requires_grad = true}), c = randn({4, 8}, {.requires_grad = true});
  const auto run = [&](bool on) {
    net.recompute(on);
    net.zero_grad();
    for (const Tensor* t : {&a, &b, &c}) t->set_grad({});
    std::vector<Tensor> more{a * 2, b};
    std::optional<Tensor> last = c * 3;
    const auto [y, factor] = net(x * 2, more, last, 0.5);
    more.clear();  // the caller's own
    last.reset();
    EXPECT_EQ(factor, 0.5);
    sum(y * y).backward();
    std::vector<float> values = y.to_vector<float>();
    for (const Tensor& t : {a.grad(), b.grad(), c.grad(), net.fc.weight.grad()}) {
      for (const float v : t.to_vector<float>()) values.push_back(v);
    }
    return values;
  };
  EXPECT_EQ(run(true), run(false));
}

struct OfSpan : nn::Module<OfSpan> {
  Tensor forward(std::span<const Tensor> inputs) const { return inputs[0] * inputs[1]; }
};

TEST(Recompute, RefusesWhatCantBeKept) {
  const OfSpan net;
  const std::vector<Tensor> inputs{ones({2}, {.requires_grad = true}), ones({2})};
  EXPECT_NO_THROW(net(std::span(inputs)));
  net.recompute();
  const std::string text = error_of<Error>([&] { net(std::span(inputs)); });
  EXPECT_NE(text.find("recompute: Module is called with an argument that can't be kept"), std::string::npos) << text;
}

TEST(Recompute, OutlivesTheModule) {
  Tensor weight, loss;
  const Tensor x = randn({4, 64});
  {
    const Wide net;
    net.recompute();
    weight = net.fc1.weight;
    loss = sum(net(x));
  }
  loss.backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(Recompute, FindsWhatWasChangedInPlace) {
  const Wide net;
  net.recompute();
  const Tensor loss = sum(net(randn({4, 64})));
  {
    const NoGrad no_grad;
    Tensor(net.fc2.weight).mul_(2);
  }
  const std::string text = error_of<Error>([&] { loss.backward(); });
  EXPECT_NE(text.find("changed in place"), std::string::npos) << text;
}

TEST(Recompute, CapturedStepsAreRecordedAgain) {
  const Wide net;
  auto step = capture([&](const Tensor& x) {
    net.zero_grad();
    const Tensor y = sum(net(x));
    y.backward();
    return y.detach();
  });
  const Tensor x = randn({8, 64});
  for (int i = 0; i < 4; ++i) step(x);
  ASSERT_TRUE(step.replayed()) << step.why_not();
  const auto expected = net.fc1.weight.grad().to_vector<float>();
  net.recompute();
  step(x);
  EXPECT_FALSE(step.replayed());
  for (int i = 0; i < 4; ++i) step(x);
  ASSERT_TRUE(step.replayed()) << step.why_not();
  EXPECT_EQ(net.fc1.weight.grad().to_vector<float>(), expected);
}

// 16-bit copies that an optimizer keeps outlive the region of the forward pass, and are good in the second run.
TEST(Recompute, UsesKeptCopiesOfWeights) {
  const Wide net;
  net.recompute();
  optim::SGD sgd(net.parameters(), {.lr = 0.01});
  std::uint64_t casts = 0;
  for (int i = 0; i < 4; ++i) {
    sgd.zero_grad();
    const amp::CastStats before = amp::cast_stats();
    Tensor loss;
    {
      const amp::Autocast region({.dtype = bf16});
      loss = sum(net(randn({4, 64})));
    }
    loss.backward();
    sgd.step();
    casts = amp::cast_stats().casts - before.casts;
  }
  net.recompute(false);
  std::uint64_t without = 0;
  for (int i = 0; i < 2; ++i) {
    sgd.zero_grad();
    const amp::CastStats before = amp::cast_stats();
    Tensor loss;
    {
      const amp::Autocast region({.dtype = bf16});
      loss = sum(net(randn({4, 64})));
    }
    loss.backward();
    sgd.step();
    without = amp::cast_stats().casts - before.casts;
  }
  EXPECT_EQ(casts, without + 1);  // of the input
}

// A function of the user's own tells its runs apart, and running statistics are updated once there, too.
TEST(Recompute, CheckpointsUpdateStatisticsOnce) {
  const nn::BatchNorm1d norm{{.channels = 4}};
  std::vector<bool> again;
  const Tensor x = randn({8, 4}, {.requires_grad = true});
  const auto f = [&](const Tensor& t) {
    again.push_back(is_recomputing());
    return gelu(norm(t * 2));
  };
  const Tensor y = sum(checkpoint(f, x));
  const auto mean = norm.running_mean.to_vector<float>();
  y.backward();
  EXPECT_EQ(again, (std::vector<bool>{false, true}));
  EXPECT_FALSE(is_recomputing());
  EXPECT_EQ(norm.running_mean.to_vector<float>(), mean);
  EXPECT_EQ(norm.num_batches_tracked.item<std::int64_t>(), 1);
}

}  // namespace
}  // namespace halfstep
