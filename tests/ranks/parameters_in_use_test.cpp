// SPDX-License-Identifier: Apache-2.0
// Backward passes of DataParallel that don't reach all parameters, and the size of its buckets.
#include <gtest/gtest.h>

#include <memory>

#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/dist/data_parallel.h"
#include "halfstep/dist/power_sgd.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/sgd.h"
#include "tests/ranks/networks.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using dist::DataParallel;
using dist::DistError;
using test::error_of;
using test::part_of;
using test::values_of;
using test::world;

struct Branches : nn::Module<Branches> {
  nn::Linear used = child("used", nn::Linear{{.in = 4, .out = 4}});
  nn::Linear left = child("left", nn::Linear{{.in = 4, .out = 1}});
  nn::Linear right = child("right", nn::Linear{{.in = 4, .out = 1}});
  nn::Linear never = child("never", nn::Linear{{.in = 4, .out = 1}});
  Tensor forward(const Tensor& x, bool to_the_left) const { return (to_the_left ? left : right)(used(x)); }
};
void drop_gradients(const nn::ModuleBase& net) {
  for (const NamedTensor& p : net.parameters()) p.tensor.set_grad({});
}
// A bucket for each parameter.
dist::DataParallelOptions one_each() { return {.bucket_cap_mb = 1e-6, .first_bucket_cap_mb = 1e-6}; }

void expect_branches(const Branches& net) {
  const auto others = static_cast<float>(world().size() - 1);
  EXPECT_FLOAT_EQ(net.left.bias.grad().item<float>(), 2.0F / static_cast<float>(world().size()));
  EXPECT_FLOAT_EQ(net.right.bias.grad().item<float>(), 2 * others / static_cast<float>(world().size()));
  EXPECT_FALSE(net.never.weight.grad().defined());
  EXPECT_EQ(dist::first_difference(net, world()), "");
}

// A rank that reaches all that a bucket has sends it before the end of its pass, others don't.
TEST(ParametersInUse, RanksMayReachThemInDifferentBuckets) {
  for (const bool all_on_rank_zero : {false, true}) {
    manual_seed(3);
    const Branches net;
    dist::DataParallelOptions options = one_each();
    options.find_unused_parameters = true;
    DataParallel parallel(net, world(), options);
    for (int i = 0; i < 3; ++i) {
      drop_gradients(net);
      const bool first = world().rank() == 0;
      Tensor loss = sum(parallel(ones({2, 4}), first));
      if (first && all_on_rank_zero) loss = loss + sum(parallel(ones({2, 4}), false) + net.never(ones({2, 4})));
      loss.backward();
      const auto n = static_cast<float>(world().size());
      EXPECT_FLOAT_EQ(net.left.bias.grad().item<float>(), 2 / n);
      EXPECT_FLOAT_EQ(net.right.bias.grad().item<float>(), 2 * (n - (all_on_rank_zero ? 0 : 1)) / n);
      EXPECT_EQ(net.never.weight.grad().defined(), all_on_rank_zero);
    }
    EXPECT_EQ(dist::first_difference(net, world()), "");
  }
}

TEST(StaticGraph, FindsUnusedParametersOnce) {
  manual_seed(3);
  const Branches net;
  dist::DataParallelOptions options = one_each();
  options.static_graph = true;
  DataParallel parallel(net, world(), options);
  std::uint64_t collectives[4] = {};
  for (std::uint64_t& count : collectives) {
    drop_gradients(net);
    const std::uint64_t before = world().stats().collectives;
    sum(parallel(ones({2, 4}), world().rank() == 0)).backward();
    count = world().stats().collectives - before;
    expect_branches(net);
  }
  // In the first pass: what is in use, and the order of the gradients.
  EXPECT_EQ(collectives[0], 8U + 2);
  for (int i = 1; i < 4; ++i) EXPECT_EQ(collectives[i], 8U) << i;
}

TEST(StaticGraph, AChangedSetIsNamed) {
  manual_seed(3);
  {
    DataParallel parallel(Branches(), world(), {.static_graph = true});
    sum(parallel(ones({2, 4}), true)).backward();
    drop_gradients(parallel.module());
    const std::string text = error_of<DistError>([&] { sum(parallel(ones({2, 4}), false)).backward(); });
    EXPECT_NE(text.find("gradient of right."), std::string::npos) << text;
    EXPECT_NE(text.find("static_graph"), std::string::npos) << text;
  }
  DataParallel parallel(Branches(), world(), {.static_graph = true});
  const auto both = [&] { return sum(parallel(ones({2, 4}), true)) + sum(parallel(ones({2, 4}), false)); };
  both().backward();
  drop_gradients(parallel.module());
  const std::string text = error_of<DistError>([&] { sum(parallel(ones({2, 4}), true)).backward(); });
  EXPECT_NE(text.find("no gradient to right.weight, right.bias"), std::string::npos) << text;
  EXPECT_EQ(text.find("never"), std::string::npos) << text;
}

// A pass that reduces nothing would leave each rank a gradient of its own, which no later pass takes.
TEST(StaticGraph, AChangedSetIsNamedWithoutAReduction) {
  manual_seed(3);
  const Branches net;
  DataParallel parallel(net, world(), {.static_graph = true});
  sum(parallel(ones({2, 4}), true)).backward();
  drop_gradients(net);
  const auto guard = parallel.no_sync();
  const std::string text = error_of<DistError>([&] { sum(parallel(ones({2, 4}), false)).backward(); });
  EXPECT_NE(text.find("gradient of right."), std::string::npos) << text;
  EXPECT_NE(text.find("had none"), std::string::npos) << text;
}

// A rank without samples in the first pass learns in its own first one what it uses.
TEST(StaticGraph, ARankMayBeginWithoutSamples) {
  manual_seed(3);
  const Branches net;
  dist::DataParallelOptions options = one_each();
  options.static_graph = true;
  DataParallel parallel(net, world(), options);
  for (int i = 0; i < 4; ++i) {
    drop_gradients(net);
    if (world().rank() == 0 && (i == 0 || i == 2)) {
      parallel.reduce_without_backward();
    } else {
      sum(parallel(ones({2, 4}), false)).backward();
    }
    const auto n = static_cast<float>(world().size());
    EXPECT_FLOAT_EQ(net.right.bias.grad().item<float>(), 2 * (i % 2 == 0 ? n - 1 : n) / n);
    EXPECT_FALSE(net.left.bias.grad().defined());
  }
}

TEST(StaticGraph, StepsAreCaptured) {
  std::vector<double> results[2];
  for (const bool captured : {false, true}) {
    manual_seed(3);
    const Branches net;
    dist::DataParallelOptions options = one_each();
    options.static_graph = true;
    DataParallel parallel(net, world(), options);
    optim::SGD sgd(net.parameters(), {.lr = 0.1});
    const auto step = [&](const Tensor& x) {
      sgd.zero_grad();
      const Tensor out = parallel(x, world().rank() == 0), loss = mean(out * out);
      loss.backward();
      sgd.step();
      return loss;
    };
    auto fast = capture(step);
    manual_seed(7);
    for (int i = 0; i < 10; ++i) {
      const Tensor x = part_of(randn({8, 4})).clone();
      results[captured].push_back((captured ? fast(x) : step(x)).item<double>());
    }
    for (const double v : values_of(net.parameters())) results[captured].push_back(v);
    EXPECT_EQ(dist::first_difference(net, world()), "");
    if (captured) {
      EXPECT_GE(fast.stats().replayed, 5U) << fast.why_not();
    }
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(FindUnused, IsWhyAStepIsNotCaptured) {
  manual_seed(3);
  const Branches net;
  dist::DataParallelOptions options = one_each();
  options.find_unused_parameters = true;
  DataParallel parallel(net, world(), options);
  auto fast = capture([&](const Tensor& x) {
    drop_gradients(net);
    const Tensor loss = sum(parallel(x, world().rank() == 0));
    loss.backward();
    return loss;
  });
  for (int i = 0; i < 4; ++i) fast(ones({2, 4}));
  EXPECT_EQ(fast.stats().replayed, 0U);
  EXPECT_EQ(fast.why_not(), "which parameters it uses is found out on the host (find_unused_parameters)");
}

// About 5 MB of gradients, so that there are several sizes to try.
struct Wide : nn::Module<Wide> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 64, .out = 768}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 768, .out = 768}});
  nn::Linear fc3 = child("fc3", nn::Linear{{.in = 768, .out = 768}});
  nn::Linear fc4 = child("fc4", nn::Linear{{.in = 768, .out = 10}});
  Tensor forward(const Tensor& x) const { return fc4(relu(fc3(relu(fc2(relu(fc1(x))))))); }
};

// Whatever the size, the bits are the same; so a size that is found in the first steps changes none.
TEST(BucketSize, DoesNotChangeBits) {
  struct Way {
    const char* hook;
    bool captured;
  };
  for (const auto& [hook, captured] : {Way{"", false}, {"", true}, {"bf16", true}, {"powersgd", true}}) {
    std::vector<double> expected;
    for (const double mb : {25.0, 0.5, 0.0}) {
      manual_seed(3);
      const Wide net;
      dist::DataParallelOptions options{.bucket_cap_mb = mb};
      if (hook == std::string("bf16")) options.hook = dist::compress_hook(bf16);
      if (hook == std::string("powersgd")) options.hook = dist::PowerSGD({.start = 2}).hook();
      DataParallel parallel(net, world(), options);
      optim::SGD sgd(net.parameters(), {.lr = 0.1, .momentum = 0.9});
      const auto step = [&](const Tensor& x, const Tensor& y) {
        sgd.zero_grad();
        const Tensor loss = cross_entropy(parallel(x), y);
        loss.backward();
        sgd.step();
        return loss;
      };
      auto fast = capture(step);
      manual_seed(7);
      std::vector<double> results;
      for (int i = 0; i < 22; ++i) {
        const Tensor x = randn({4, 64}), y = randint(0, 10, {4});
        results.push_back((captured ? fast(x, y) : step(x, y)).item<double>());
        // 1, 4 and 16 MiB, five passes of each, behind the first two.
        EXPECT_EQ(parallel.stats().tuning, mb == 0 && i < 16) << i;
      }
      for (const NamedTensor& p : net.parameters()) results.push_back(sum(p.tensor).item<double>());
      EXPECT_EQ(dist::first_difference(net, world()), "");
      if (expected.empty()) expected = results;
      EXPECT_EQ(results, expected) << mb << ' ' << hook << ' ' << captured;
      const double size = parallel.stats().bucket_mb;
      if (mb > 0) {
        EXPECT_EQ(size, mb);
      } else {
        EXPECT_TRUE(size == 1 || size == 4 || size == 16) << size;
        for (const std::string& theirs : world().all_gather_text(std::to_string(size))) {
          EXPECT_EQ(theirs, std::to_string(size));
        }
      }
      if (captured) {
        EXPECT_GE(fast.stats().replayed, 6U) << fast.why_not();
      }
    }
  }
  EXPECT_NE(error_of<Error>([] {
              DataParallel parallel(Branches(), world(), {.bucket_cap_mb = -1});
            }).find("0 for one that is tuned"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
