// SPDX-License-Identifier: Apache-2.0
// Parameters that ranks divide come ahead of their use (ZeroOptions::prefetch): the same bits, in networks whose order
// changes too, a module's parameters more in memory, and as many gathers.
#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "halfstep/autograd/checkpoint.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/dist/zero.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"
#include "tests/ranks/networks.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using dist::DataParallel;
using dist::ZeroRedundancy;
using test::part_of;
using test::values_of;
using test::world;

constexpr std::int64_t kWidth = 40;

// Its layers run in the order that it is given; some may be left out, or run twice.
struct Layers : nn::Module<Layers> {
  nn::Linear a = child("a", nn::Linear{{.in = kWidth, .out = kWidth}});
  nn::Linear b = child("b", nn::Linear{{.in = kWidth, .out = kWidth}});
  nn::Linear c = child("c", nn::Linear{{.in = kWidth, .out = kWidth}});
  nn::Linear d = child("d", nn::Linear{{.in = kWidth, .out = kWidth}});
  Tensor forward(Tensor x, const std::string& order) const {
    for (const char which : order) x = relu((which == 'a' ? a : which == 'b' ? b : which == 'c' ? c : d)(x));
    return x;
  }
};

struct Trained {
  std::vector<double> values;  // losses, outputs of evaluations and the weights
  dist::ZeroGathers gathers;
};

struct Training {
  std::optional<Device> device = {};
  int steps = 6;
  // What is done in step `step`, from a batch to the losses of which backward() is called.
  std::function<std::vector<Tensor>(int step, DataParallel<Layers>& net, const Tensor& x)> losses;
};

Trained trained(const Training& run, bool prefetch) {
  manual_seed(3);
  Layers net;
  if (run.device) net.to(*run.device);
  optim::SGD sgd(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  DataParallel parallel(net, world(), {.bucket_cap_mb = 0.01, .find_unused_parameters = true});
  ZeroRedundancy zero(parallel, sgd, {.stage = 3, .prefetch = prefetch});
  Trained result;
  manual_seed(7);
  for (int step = 0; step < run.steps; ++step) {
    sgd.zero_grad();
    const Tensor x = part_of(randn({24, kWidth}));
    for (const Tensor& loss : run.losses(step, parallel, run.device ? x.to(*run.device) : x)) {
      result.values.push_back(loss.item<double>());
      if (loss.requires_grad()) loss.backward();
    }
    sgd.step();
  }
  result.gathers = zero.gathers();
  const auto whole = zero.gather_parameters();
  for (const double v : values_of(net.parameters())) result.values.push_back(v);
  return result;
}

// Bits with prefetching are those without; returns what has been gathered with it.
dist::ZeroGathers expect_same_bits(const Training& run, const std::string& what) {
  const Trained with = trained(run, true), without = trained(run, false);
  EXPECT_EQ(with.values.size(), without.values.size()) << what;
  EXPECT_TRUE(with.values == without.values) << what;
  EXPECT_EQ(with.gathers.gathers, without.gathers.gathers) << what;
  EXPECT_EQ(without.gathers.ahead + without.gathers.discarded, 0U) << what;
  EXPECT_LE(with.gathers.arrived, with.gathers.ahead) << what;
  return with.gathers;
}

// All but the first of a pass come ahead, from the second pass on: 4 layers forward, 3 weights backward: nobody
// wants the gradient of the input.
TEST(ZeroPrefetch, HasTheSameBits) {
  if (world().size() == 1) return;
  const Training run{
      .losses = [](int, DataParallel<Layers>& net, const Tensor& x) { return std::vector{mean(net(x, "abcd"))}; }};
  const dist::ZeroGathers gathers = expect_same_bits(run, "one order");
  EXPECT_EQ(gathers.gathers, 6U * 7U);
  EXPECT_EQ(gathers.ahead, 5U * 6U);
  EXPECT_EQ(gathers.discarded, 0U);
}

TEST(ZeroPrefetch, FollowsOrdersThatChange) {
  if (world().size() == 1) return;
  const std::vector<std::string> orders{"abcd", "abcd", "abdc", "abdc", "abdc", "ad", "ad", "aabbccdd", "abcd", "dcba"};
  const Training run{.steps = static_cast<int>(orders.size()),
                     .losses = [&](int step, DataParallel<Layers>& net, const Tensor& x) {
                       return std::vector{mean(net(x, orders[static_cast<std::size_t>(step)]))};
                     }};
  const dist::ZeroGathers gathers = expect_same_bits(run, "orders");
  EXPECT_GE(gathers.ahead, 20U);
  EXPECT_GE(gathers.discarded, 4U) << "one where an order changed";
  EXPECT_LE(gathers.discarded, 6U);
}

TEST(ZeroPrefetch, IsForEvaluationsInBetween) {
  if (world().size() == 1) return;
  const Training run{.losses = [](int step, DataParallel<Layers>& net, const Tensor& x) {
    std::vector<Tensor> all;
    const auto evaluate = [&] {
      const NoGrad no_grad;
      all.push_back(mean(net(x, "abcd")));
    };
    if (step % 2 == 0) evaluate();
    if (step == 3) mean(net(x, "abcd"));  // recorded, but nobody wants its gradient
    all.push_back(mean(net(x, "abcd")));
    evaluate();
    evaluate();
    return all;
  }};
  // Before the backward pass: what it was expected to begin with came for nothing.
  const dist::ZeroGathers gathers = expect_same_bits(run, "evaluations");
  EXPECT_GT(gathers.ahead, gathers.gathers / 2);
  EXPECT_GE(gathers.discarded, 6U);
}

TEST(ZeroPrefetch, IsForPassesOfOneStep) {
  if (world().size() == 1) return;
  const Training two{.losses = [](int step, DataParallel<Layers>& net, const Tensor& x) {
    const Tensor first = net(x, "abcd"), second = net(x, step < 3 ? "abcd" : "acbd");
    return std::vector{mean(first) + mean(second)};
  }};
  EXPECT_GT(expect_same_bits(two, "two passes").ahead, 20U);
  const Training recomputed{.losses = [](int, DataParallel<Layers>& net, const Tensor& x) {
    return std::vector{mean(checkpoint([&](const Tensor& in) { return net.module()(in, "abcd"); }, x * 1.0))};
  }};
  const dist::ZeroGathers gathers = expect_same_bits(recomputed, "recomputed");
  EXPECT_GT(gathers.ahead, gathers.gathers / 2);
}

TEST(ZeroPrefetch, WorksOnDevices) {
  if (world().size() == 1) return;
  Training run{.losses = [](int step, DataParallel<Layers>& net, const Tensor& x) {
    return std::vector{mean(net(x, step == 3 ? "badc" : "abcd"))};
  }};
  try {
    run.device = Device("sim");
  } catch (const Error& e) {
    GTEST_SKIP() << e.what();
  }
  EXPECT_GT(expect_same_bits(run, "on the simulated device").ahead, 15U);
}

// What a rank writes to its parameters between passes is what all compute with.
TEST(ZeroPrefetch, TakesNoValuesFromBeforeAStep) {
  if (world().size() == 1) return;
  manual_seed(3);
  const Layers net;
  optim::SGD sgd(net.parameters(), {.lr = 0.1});
  DataParallel parallel(net, world());
  ZeroRedundancy zero(parallel, sgd, {.stage = 3});
  const Tensor x = ones({2, kWidth});
  for (int step = 0; step < 4; ++step) {
    sgd.zero_grad();
    mean(parallel(x, "abcd")).backward();
    // Expects a backward pass, whose parameters are on their way when the step changes them.
    const Tensor unused = parallel(x, "abcd");
    sgd.step();
    for (const NamedTensor& p : net.parameters()) {
      const NoGrad no_grad;
      if (zero.owner(p.tensor) == world().rank()) Tensor(p.tensor).fill_(0.01 * (step + 1));
    }
    const NoGrad no_grad;
    const double got = mean(parallel(x, "abcd")).item<double>();
    double expected = 1;
    for (int layer = 0; layer < 4; ++layer) expected = (kWidth * expected + 1) * 0.01 * (step + 1);
    EXPECT_NEAR(got, expected, 1e-5 * expected) << step;
  }
}

// Ranks that don't do the same are told so, whichever of them has a module's parameters ahead.
TEST(ZeroPrefetch, FindsRanksThatDiffer) {
  if (world().size() == 1) return;
  const Layers net;
  optim::SGD sgd(net.parameters(), {.lr = 0.1});
  dist::ProcessGroup group = world().split(0);
  DataParallel parallel(net, group);
  ZeroRedundancy zero(parallel, sgd, {.stage = 3});
  const Tensor x = ones({2, kWidth});
  const NoGrad no_grad;
  parallel(x, "abcd");
  parallel(x, "abcd");
  for (const char* other : {"acd", "abdc", "bacd", "ab"}) {
    const std::string error = dist::test::error_of([&] {
      parallel(x, world().rank() == 0 ? other : "abcd");
      group.barrier();
    });
    EXPECT_NE(error.find("expected all ranks to do the same"), std::string::npos) << other << ": " << error;
    group.barrier();  // nobody is a gather ahead
    parallel(x, "abcd");
    parallel(x, "abcd");
  }
}

struct Deep : nn::Module<Deep> {
  static constexpr std::int64_t kDeepWidth = 512;
  nn::Linear a = child("a", nn::Linear{{.in = kDeepWidth, .out = kDeepWidth}});
  nn::Linear b = child("b", nn::Linear{{.in = kDeepWidth, .out = kDeepWidth}});
  nn::Linear c = child("c", nn::Linear{{.in = kDeepWidth, .out = kDeepWidth}});
  nn::Linear d = child("d", nn::Linear{{.in = kDeepWidth, .out = kDeepWidth}});
  nn::Linear e = child("e", nn::Linear{{.in = kDeepWidth, .out = kDeepWidth}});
  nn::Linear f = child("f", nn::Linear{{.in = kDeepWidth, .out = kDeepWidth}});
  Tensor forward(Tensor x) const {
    for (const nn::Linear* layer : {&a, &b, &c, &d, &e, &f}) x = relu((*layer)(x));
    return x;
  }
};

// In the layers' order a rank owns every second of them, or fewer: of those that it doesn't, two are here at a time.
TEST(ZeroPrefetch, HasOneModuleMoreInMemory) {
  if (world().size() == 1) return;
  constexpr std::int64_t kLayer = 4 * (Deep::kDeepWidth + 1) * Deep::kDeepWidth;
  const auto peak = [&](bool prefetch, bool backward) {
    manual_seed(3);
    const Deep net;
    optim::SGD sgd(net.parameters(), {.lr = 0.1});
    DataParallel parallel(net, world(), {.bucket_cap_mb = 0.01});
    ZeroRedundancy zero(parallel, sgd, {.stage = 3, .prefetch = prefetch});
    const Tensor x = ones({2, Deep::kDeepWidth});
    std::int64_t most = 0;
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      const auto before = static_cast<std::int64_t>(memory_stats().allocated);
      reset_peak_memory();
      std::optional<NoGrad> no_grad;
      if (!backward) no_grad.emplace();
      const Tensor loss = mean(parallel(x));
      if (backward) loss.backward();
      most = std::max(most, static_cast<std::int64_t>(memory_stats().allocated_peak) - before);
      const dist::ZeroMemory memory = zero.memory();
      std::int64_t own = 0;
      for (const NamedTensor& p : net.parameters())
        own += zero.owner(p.tensor) == world().rank() ? p.tensor.numel() : 0;
      EXPECT_EQ(memory.parameters, 4 * own) << "nothing stays";
    }
    return most;
  };
  EXPECT_LE(peak(true, false), 2 * kLayer + kLayer / 4);
  EXPECT_LE(peak(true, true), peak(false, true) + kLayer + kLayer / 4);
}

}  // namespace
}  // namespace halfstep
