// SPDX-License-Identifier: Apache-2.0
// Steps of several ranks on a device are replayed, kernel by kernel and through its graphs, with the bits of steps that
// run as they are.
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "halfstep/amp/autocast.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/dist/loss_scale.h"
#include "halfstep/dist/power_sgd.h"
#include "halfstep/dist/sync_batch_norm.h"
#include "halfstep/dist/zero.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/adam.h"
#include "halfstep/runtime/queue.h"
#include "halfstep/train/train_step.h"
#include "tests/ranks/networks.h"

namespace halfstep::dist::test {
namespace {

using halfstep::test::values_of;

struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 24, .out = 48}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 48}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 48, .out = 40}});
  nn::Linear fc3 = child("fc3", nn::Linear{{.in = 40, .out = 6}});
  Tensor forward(const Tensor& x) const { return fc3(relu(fc2(relu(norm(fc1(x)))))); }
};

// A batch has a factor of its loss. Right answers are counted in parts, or on the host.
class Task final : public training::Task {
 public:
  Task(Net net, bool counts_later) : net_(std::move(net)), counts_later_(counts_later) {}
  const nn::ModuleBase& network() const override { return net_; }
  training::TaskLoss loss(const data::Batch& batch) override {
    training::TaskLoss made;
    made.output = net_(batch.input).to(f32);
    made.loss = cross_entropy(made.output, batch.target) * batch.more[0];
    made.parts.push_back({"loss", made.loss.detach() * static_cast<double>(batch.input.size(0))});
    return made;
  }
  void count(training::TaskLoss& made, const data::Batch& batch) override {
    const Tensor right = sum(eq(argmax(made.output.detach(), 1), batch.target).to(f32));
    made.parts.push_back({"right", right});
    // Of this batch on this rank, whatever the step has become since.
    made.parts.push_back({"again", made.loss.detach() * static_cast<double>(batch.input.size(0))});
    if (!counts_later_) return;
    made.count_later = [right](std::map<std::string, double>& parts) { parts["later"] += right.item<double>(); };
  }

 private:
  Net net_;
  bool counts_later_;
};

struct Case {
  const char* name;
  const char* hook = "";
  std::optional<DType> autocast = {};
  int accumulate = 1;
  double clip = 0;
  bool scaled = false;   // two of the steps overflow on the last rank
  bool checked = false;  // scales are compared after each step
  bool synced = false;
  bool counts_later = false;
  int stage = 0;
};

// The simulated device has no kernel that clamps.
std::function<void()> clamped(const GradBucket& bucket, const ProcessGroup& group) {
  ProcessGroup all = group;
  return [work = all.all_reduce(bucket.buffer, ReduceOp::mean), mean = bucket.buffer]() mutable {
    work.wait();
    clamp_(mean, -0.01, 0.01);
  };
}

enum class How { plain, kernels, graphs };

struct Outcome {
  std::vector<std::vector<double>> steps;
  std::vector<double> state;
  std::string difference;
  CaptureStats stats;
  std::string why_not;
};

Outcome trained(const Case& c, How how, Device device) {
  set_device_graphs(how == How::graphs);
  manual_seed(3);
  Net net;
  if (c.synced) convert_sync_batch_norm(net, world());
  net.to(device);
  optim::AdamW adam(net.parameters(), {.lr = 1e-2});
  DataParallelOptions options{.bucket_cap_mb = 0.004, .first_bucket_cap_mb = 0.001};
  if (c.hook == std::string("f16")) options.hook = compress_hook(f16);
  if (c.hook == std::string("bf16")) options.hook = compress_hook(bf16);
  if (c.hook == std::string("clamped")) options.hook = clamped;
  if (c.hook == std::string("powersgd")) options.hook = PowerSGD({.rank = 2, .start = 4}).hook();
  const auto parallel = std::make_shared<DataParallelBase>(net, world(), options);
  std::optional<ZeroRedundancy> zero;
  if (c.stage > 0) zero.emplace(*parallel, net, adam, ZeroOptions{.stage = c.stage, .bucket_cap_mb = 0.004});
  std::optional<amp::GradScaler> scaler;
  if (c.scaled) scaler.emplace(amp::GradScalerOptions{.init_scale = 256, .growth_interval = 3});
  training::TrainStep step =
      training::make_train_step(std::make_shared<Task>(net, c.counts_later), adam, std::move(scaler),
                                {.autocast = c.autocast, .clip_norm = c.clip, .parallel = parallel});
  if (c.checked) ::setenv("HALFSTEP_DIST_DEBUG", "1", 1);
  manual_seed(7);
  Outcome outcome;
  for (int i = 0; i < 12; ++i) {
    std::vector<data::Batch> batches;
    for (int k = 0; k < c.accumulate; ++k) {
      const Tensor x = randn({24, 24}), y = randint(0, 6, {24});
      const bool overflow = c.scaled && (i == 5 || i == 8) && k == 0 && world().rank() == world().size() - 1;
      batches.push_back({halfstep::test::part_of(x).clone().to(device),
                         halfstep::test::part_of(y).clone().to(device),
                         {full({}, overflow ? 1e38 : 1, {.device = device})}});
    }
    const training::StepValues values = how == How::plain ? step.run(batches) : step.run_captured(batches);
    std::vector<double>& made = outcome.steps.emplace_back();
    made = {values.loss().item<double>(), values.overflow.item<double>(), values.scale.item<double>()};
    for (const NamedTensor& p : values.parts) made.push_back(p.tensor.item<double>());
    std::map<std::string, double> later;
    for (const auto& count : values.count_later) count(later);
    for (const auto& [name, sum] : later) made.push_back(sum);
    for (const NamedTensor& p : net.parameters()) {
      const Tensor g = p.tensor.grad();
      made.push_back(g.defined() ? sum(g.to(f32).to(Device())).item<double>() : 0);
    }
    for (double& v : made) {
      if (std::isnan(v)) v = -1;  // which is like itself
    }
  }
  ::unsetenv("HALFSTEP_DIST_DEBUG");
  parallel->broadcast_buffers();
  outcome.difference = first_difference(net, world());
  outcome.state = values_of(net.state_dict());
  outcome.stats = step.capture_stats();
  outcome.why_not = step.why_not_captured();
  return outcome;
}

class CapturedOnDevice : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    try {
      device_ = Device("sim");
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }
  void TearDown() override { set_device_graphs(true); }
  Device device_;
};

TEST_P(CapturedOnDevice, HasTheBitsOfStepsThatRunAsTheyAre) {
  const Case& c = GetParam();
  const Outcome plain = trained(c, How::plain, device_);
  EXPECT_EQ(plain.difference, "");
  EXPECT_NE(plain.steps.front()[0], plain.steps.back()[0]);
  if (c.scaled) {
    EXPECT_EQ(plain.steps[4][1], 0);
    EXPECT_EQ(plain.steps[5][1], 1) << "all ranks skip what overflows on the last one";
    EXPECT_EQ(plain.steps[8][1], 1);
  }
  for (const How how : {How::kernels, How::graphs}) {
    const Outcome fast = trained(c, how, device_);
    EXPECT_GE(fast.stats.replayed, 6U) << fast.why_not;
    EXPECT_EQ(fast.stats.graphs, how == How::graphs ? fast.stats.replayed - 1 : 0U) << "the first one warms up";
    ASSERT_EQ(fast.steps.size(), plain.steps.size());
    for (std::size_t i = 0; i < plain.steps.size(); ++i) EXPECT_EQ(fast.steps[i], plain.steps[i]) << "step " << i;
    EXPECT_EQ(fast.state, plain.state);
    EXPECT_EQ(fast.difference, "");
  }
}

INSTANTIATE_TEST_SUITE_P(Steps, CapturedOnDevice,
                         testing::Values(Case{.name = "plain"}, Case{.name = "f16", .hook = "f16"},
                                         Case{.name = "bf16", .hook = "bf16", .autocast = bf16},
                                         Case{.name = "powersgd", .hook = "powersgd"},
                                         Case{.name = "clamped", .hook = "clamped"},
                                         Case{.name = "synced", .synced = true},
                                         Case{.name = "accumulated", .accumulate = 3, .clip = 0.5},
                                         Case{.name = "overflow", .autocast = f16, .scaled = true, .checked = true},
                                         Case{.name = "overflow_accumulated",
                                              .hook = "f16",
                                              .autocast = f16,
                                              .accumulate = 2,
                                              .clip = 0.5,
                                              .scaled = true,
                                              .synced = true},
                                         Case{.name = "zero1", .clip = 0.5, .stage = 1},
                                         Case{.name = "zero1_overflow", .autocast = f16, .scaled = true, .stage = 1},
                                         Case{.name = "zero2", .clip = 0.5, .stage = 2},
                                         Case{.name = "zero2_clamped", .hook = "clamped", .stage = 2},
                                         Case{.name = "zero2_powersgd", .hook = "powersgd", .stage = 2},
                                         Case{.name = "zero2_overflow", .autocast = f16, .scaled = true, .stage = 2},
                                         Case{.name = "zero2_overflow_accumulated",
                                              .hook = "f16",
                                              .autocast = f16,
                                              .accumulate = 2,
                                              .clip = 0.5,
                                              .scaled = true,
                                              .stage = 2},
                                         Case{.name = "counted", .accumulate = 2, .counts_later = true}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace halfstep::dist::test
