// SPDX-License-Identifier: Apache-2.0
// Scalers of several ranks: the same scale, and the same steps skipped, whatever overflows where.
#include "halfstep/dist/loss_scale.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>

#include "halfstep/amp/autocast.h"
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
#include "halfstep/optim/adam.h"
#include "halfstep/optim/clip.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/train_step.h"
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

struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 24, .out = 48}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 48, .out = 48}});
  nn::Linear more = child("more", nn::Linear{{.in = 48, .out = 10}});
  nn::Linear out = child("out", nn::Linear{{.in = 48, .out = 10}});
  Tensor forward(const Tensor& x, bool both) const {
    const Tensor h = relu(fc2(relu(fc1(x))));
    return both ? out(h) + more(h) : out(h);
  }
};

bool last() { return world().rank() == world().size() - 1; }

struct Case {
  const char* name;
  const char* hook = "";
  int accumulate = 1;
  double clip = 0;
  bool captured = false;
  bool unused = false;  // the last rank alone reaches a part
  bool empty = false;   // rank 0 has no samples
  // Of the last rank's loss: overflows float32, or only 16 bits.
  double factor = 1e38;
};

class Skips : public ::testing::TestWithParam<Case> {};

// Of eight steps those in which one rank overflows are skipped, on all ranks; scales and weights stay the same.
TEST_P(Skips, AllRanksTogether) {
  const Case c = GetParam();
  manual_seed(3);
  const Net net;
  dist::DataParallelOptions options{.bucket_cap_mb = 0.004, .first_bucket_cap_mb = 0.001};
  if (c.hook == std::string("f16")) options.hook = dist::compress_hook(f16);
  if (c.hook == std::string("bf16")) options.hook = dist::compress_hook(bf16);
  if (c.hook == std::string("powersgd")) options.hook = dist::PowerSGD({.rank = 2, .start = 1}).hook();
  options.find_unused_parameters = c.unused;
  DataParallel parallel(net, world(), options);
  optim::AdamW adam(net.parameters(), {.lr = 1e-3});
  amp::GradScaler scaler({.init_scale = 256, .growth_interval = 4});
  const auto step = [&](const Tensor& x, const Tensor& y, const Tensor& factor) {
    adam.zero_grad();
    Tensor loss;
    for (int k = 0; k < c.accumulate; ++k) {
      std::optional<dist::DataParallelBase::NoSync> guard;
      if (k + 1 < c.accumulate) guard.emplace(parallel);
      if (c.empty && world().rank() == 0) {
        scaler.scale(zeros({}));  // which begins with the first step
        if (k + 1 == c.accumulate) parallel.reduce_without_backward();
        continue;
      }
      loss = cross_entropy(parallel(x, !c.unused || last()), y);
      // In the first of several passes, so that what is added to it later isn't finite any more.
      scaler.scale(k == 0 ? loss * factor : loss).backward();
    }
    if (c.clip > 0) {
      scaler.unscale_(adam);
      optim::clip_grad_norm_(net.parameters(), c.clip);
    }
    scaler.step(adam);
    scaler.update();
    return loss.defined() ? loss.detach() : zeros({});
  };
  auto fast = capture(step);
  manual_seed(7);
  std::vector<double> before = values_of(net.parameters());
  for (int i = 0; i < 8; ++i) {
    const Tensor whole = randn({24, 24}), labels = randint(0, 10, {24});
    const Tensor x = part_of(whole).clone(), y = part_of(labels).clone();
    const bool overflow = i == 2 || i == 6;
    const Tensor factor = full({}, overflow && last() ? c.factor : 1);
    c.captured ? fast(x, y, factor) : step(x, y, factor);
    const std::vector<double> now = values_of(net.parameters());
    EXPECT_EQ(now == before, overflow) << i;
    before = now;
    EXPECT_EQ(error_of<DistError>([&] { dist::check_same_scale(scaler, world()); }), "");
    // Halved by each overflow, doubled by 4 steps in a row without.
    EXPECT_EQ(scaler.get_scale(), i < 2 ? 256 : i < 6 ? 128 : 64) << i;
  }
  EXPECT_EQ(dist::first_difference(net, world()), "");
  if (c.captured) {
    EXPECT_GE(fast.stats().replayed, 4U) << fast.why_not();
  }
}

INSTANTIATE_TEST_SUITE_P(LossScale, Skips,
                         ::testing::Values(Case{.name = "plain"}, Case{.name = "accumulated", .accumulate = 3},
                                           Case{.name = "clipped", .clip = 0.5}, Case{.name = "f16", .hook = "f16"},
                                           // 256 x 1e4 is finite in float32 and too large for f16.
                                           Case{.name = "f16_only_in_compression", .hook = "f16", .factor = 1e5},
                                           Case{.name = "bf16_accumulated", .hook = "bf16", .accumulate = 2},
                                           Case{.name = "powersgd", .hook = "powersgd"},
                                           Case{.name = "powersgd_accumulated", .hook = "powersgd", .accumulate = 2},
                                           Case{.name = "captured", .captured = true},
                                           Case{.name = "captured_f16", .hook = "f16", .captured = true, .factor = 1e5},
                                           Case{.name = "captured_powersgd", .hook = "powersgd", .captured = true},
                                           Case{.name = "unused", .unused = true},
                                           Case{.name = "without_samples", .empty = true}),
                         [](const auto& info) { return info.param.name; });

// A weight's gradient that is large beside its factors is known to be finite without being read; what comes from
// another rank in its place isn't.
TEST(LossScale, ReplaysReadGradientsThatOtherRanksHaveChanged) {
  manual_seed(3);
  const nn::Linear net({.in = 48, .out = 48, .bias = false});
  DataParallel parallel(net, world());
  optim::SGD sgd(net.parameters(), {.lr = 0.1});
  amp::GradScaler scaler({.init_scale = 256, .growth_interval = 4});
  auto step = capture([&](const Tensor& x, const Tensor& y, const Tensor& factor) {
    sgd.zero_grad();
    const auto alone = parallel.no_sync();
    const Tensor loss = cross_entropy(net(x), y) * factor;
    scaler.scale(loss).backward();
    parallel.mean_(net.weight.grad(), "gradient");
    scaler.step(sgd);
    scaler.update();
    return loss.detach();
  });
  manual_seed(7);
  std::vector<double> before = values_of(net.parameters());
  for (int i = 0; i < 8; ++i) {
    const bool overflow = i == 4 || i == 6;
    step(randn({2, 48}), randint(0, 48, {2}), full({}, overflow && last() ? 1e38 : 1));
    const std::vector<double> now = values_of(net.parameters());
    EXPECT_EQ(now == before, overflow) << i;
    before = now;
  }
  EXPECT_GE(step.stats().replayed, 5U) << step.why_not();
  EXPECT_EQ(dist::first_difference(net, world()), "");
}

TEST(LossScale, ScalesThatDifferAreNamed) {
  amp::GradScaler scaler({.init_scale = last() ? 512.0 : 1024.0});
  const std::string text = error_of<DistError>([&] { dist::check_same_scale(scaler, world()); });
  const std::string before_last = std::to_string(world().size() - 1);
  EXPECT_EQ(text, "loss scale: expected the same on all ranks, got 1024 (after 0 steps without overflow) on rank" +
                      std::string(world().size() == 2   ? " 0"
                                  : world().size() == 3 ? "s 0, 1"
                                                        : "s 0, 1, 2") +
                      "; 512 (after 0 steps without overflow) on rank " + before_last);
  dist::broadcast_state(scaler, world());
  dist::check_same_scale(scaler, world());
  const amp::GradScaler off({.init_scale = last() ? 2.0 : 1.0, .enabled = false});
  dist::check_same_scale(off, world());
}

class ClassTask final : public training::Task {
 public:
  explicit ClassTask(Net net) : net_(std::move(net)) {}
  const nn::ModuleBase& network() const override { return net_; }
  training::TaskLoss loss(const data::Batch& batch) override {
    return {.loss = cross_entropy(net_(batch.input, true), batch.target)};
  }

 private:
  Net net_;
};

// In debug mode every step looks, replays too.
TEST(LossScale, StepsCheckItInDebugMode) {
  for (const bool debug : {false, true}) {
    if (debug) ::setenv("HALFSTEP_DIST_DEBUG", "1", 1);
    EXPECT_EQ(dist::debug_checks(), debug);
    manual_seed(3);
    Net net;
    optim::SGD sgd(net.parameters(), {.lr = 0.1});
    training::TrainStep step = training::make_train_step(
        std::make_shared<ClassTask>(net), sgd, amp::GradScaler({.init_scale = 1024}),
        {.parallel = std::make_shared<dist::DataParallelBase>(net, world(), dist::DataParallelOptions{})});
    const data::Batch batch{randn({6, 24}), randint(0, 10, {6})};
    for (int i = 0; i < 5; ++i) step.run_captured({&batch, 1});
    EXPECT_GE(step.capture_stats().replayed, 2U) << step.why_not_captured();
    if (last()) step.scaler()->update(64.0);
    const std::string text = error_of<DistError>([&] { step.run_captured({&batch, 1}); });
    ::unsetenv("HALFSTEP_DIST_DEBUG");
    EXPECT_EQ(text.find("64 (after") != std::string::npos, debug) << text;
    EXPECT_EQ(text.find("1024 (after") != std::string::npos, debug) << text;
  }
}

// Unscaled before the reduction or after it: the same gradients, since the scale is a power of 2, and the same verdict.
TEST(LossScale, UnscalingBeforeOrAfterTheReductionDecidesAlike) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {1.0F, kInf, -kInf, std::numeric_limits<float>::quiet_NaN(), 1e30F}) {
    std::vector<double> gradients[2];
    bool ran[2] = {};
    for (const bool before : {false, true}) {
      manual_seed(3);
      const Net net;
      DataParallel parallel(net, world());
      optim::SGD sgd(net.parameters(), {.lr = 0});
      amp::GradScaler scaler({.init_scale = 1024});
      manual_seed(7);
      const Tensor whole = randn({24, 24}), labels = randint(0, 10, {24});
      const auto backward = [&] {
        const Tensor loss = cross_entropy(parallel(part_of(whole), true), part_of(labels));
        scaler.scale(loss * (last() ? static_cast<double>(bad) : 1)).backward();
      };
      if (before) {
        {
          const auto guard = parallel.no_sync();
          backward();
        }
        scaler.unscale_(sgd);
        dist::share_found_inf(scaler, sgd, world());
        parallel.reduce_without_backward();
      } else {
        backward();
        scaler.unscale_(sgd);
      }
      gradients[before] = values_of(test::gradients_of(net));
      ran[before] = scaler.step(sgd).ran();
    }
    EXPECT_EQ(ran[0], bad == 1.0F || bad == 1e30F) << bad;
    EXPECT_EQ(ran[0], ran[1]) << bad;
    for (const std::string& theirs : world().all_gather_text(ran[1] ? "ran" : "skipped")) {
      EXPECT_EQ(theirs, ran[1] ? "ran" : "skipped");
    }
    if (ran[0]) {
      EXPECT_EQ(gradients[0], gradients[1]) << bad;
    }
  }
  amp::GradScaler unused;
  const Net net;
  optim::SGD sgd(net.parameters(), {.lr = 0.1});
  EXPECT_NE(error_of<Error>([&] { dist::share_found_inf(unused, sgd, world()); }).find("unscale_()"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
