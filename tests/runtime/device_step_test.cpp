// SPDX-License-Identifier: Apache-2.0
// What a training step does to a device: on the simulated one, whose kernels cover a network of linear layers.
#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/amp/loss_scaler.h"
#include "halfstep/autograd/value_and_grad.h"
#include "halfstep/core/random.h"
#include "halfstep/models/mlp.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/transfer.h"
#include "tests/runtime/on_sim.h"

namespace halfstep {
namespace {

using DeviceStep = test::OnSim;

template <class Optimizer>
struct Trial {
  explicit Trial(Device device, const amp::GradScalerOptions& options)
      : net([&] {
          manual_seed(1);
          models::MLP made;
          made.to(device);
          return made;
        }()),
        optimizer(net.parameters(), {.lr = 0.01}),
        scaler(options),
        images(randn({16, 784}, {.device = Device{}}).to(device)),
        labels(arange(0, 16, 1, {.dtype = i64, .device = Device{}}).to(device)) {
    labels.copy_(full({16}, 3, {.dtype = i64, .device = Device{}}));
  }
  Tensor step(double factor = 1) {
    optimizer.zero_grad();
    Tensor loss;
    {
      const amp::Autocast autocast{{.dtype = f16}};
      loss = cross_entropy(net(images), labels);
    }
    scaler.scale(factor == 1 ? loss : loss * factor).backward();
    result.emplace(scaler.step(optimizer));
    scaler.update();
    return loss;
  }
  models::MLP net;
  Optimizer optimizer;
  amp::GradScaler scaler;
  Tensor images, labels;
  std::optional<amp::StepResult> result;
};

template <class Optimizer>
void check_no_host_reads(Device sim) {
  Trial<Optimizer> trial(sim, {.init_scale = 1024});
  trial.step();  // makes the scaler's and the optimizer's tensors
  synchronize(sim);
  reset_fallback_counts();
  const TransferStats before = transfer_stats();
  for (int i = 0; i < 3; ++i) trial.step();
  const TransferStats after = transfer_stats();
  EXPECT_EQ(after.to_host, before.to_host) << "the host waits for nothing in a step";
  EXPECT_EQ(after.to_device - before.to_device, after.asynchronous - before.asynchronous) << "nor does it wait to send";
  EXPECT_TRUE(fallback_counts().empty()) << fallback_counts()[0].op;
  EXPECT_TRUE(trial.result->ran());  // reads, since it was asked
  EXPECT_GT(transfer_stats().to_host, after.to_host);
}

TEST_F(DeviceStep, ReadsNothingBack) {
  check_no_host_reads<optim::SGD>(sim);
  check_no_host_reads<optim::Adam>(sim);
}

TEST_F(DeviceStep, SkipsOnTheDeviceAndNamesTheParameter) {
  Trial<optim::SGD> here(Device{}, {.init_scale = 1024}), there(sim, {.init_scale = 1024});
  for (const double factor : {1.0, 1e38, 1.0}) {
    here.step(factor);
    there.step(factor);
    EXPECT_EQ(there.result->ran(), here.result->ran());
    EXPECT_EQ(there.result->ran(), factor == 1);
    EXPECT_EQ(there.result->first_overflow(), here.result->first_overflow());
    EXPECT_EQ(there.scaler.get_scale(), here.scaler.get_scale());
  }
  EXPECT_EQ(there.scaler.get_scale(), 512);
  // Parameters agree to the rounding of f16 gradients of a few steps with a rate of 0.01.
  const NamedTensors a = here.net.parameters(), b = there.net.parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto x = a[i].tensor.to_vector<double>(), y = b[i].tensor.to_vector<double>();
    double worst = 0;
    for (std::size_t k = 0; k < x.size(); ++k) worst = std::max(worst, std::abs(x[k] - y[k]));
    EXPECT_LE(worst, 0.01 * 3 * 0x1p-10) << a[i].name;
  }
}

// A policy with a floor and hysteresis is watched without a look at the device, too.
TEST_F(DeviceStep, PoliciesReadNothingBackAndSayTheirErrorsWhenRead) {
  Trial<optim::SGD> trial(sim, {});
  trial.scaler = amp::GradScaler(amp::LossScalePolicy::deepspeed({.init_scale = 2, .hysteresis = 1}));
  trial.step();
  synchronize(sim);
  const TransferStats before = transfer_stats();
  EXPECT_NO_THROW({
    for (int i = 0; i < 3; ++i) trial.step(1e38);
  });
  EXPECT_EQ(transfer_stats().to_host, before.to_host);
  EXPECT_THROW(trial.scaler.get_scale(), AmpError) << "three overflows from 2 on, with a floor of 1";
}

// A training step as a function, MindSpore's way.
TEST_F(DeviceStep, TheFunctionStyleReadsNothingBack) {
  Trial<optim::SGD> trial(sim, {});
  amp::DynamicLossScaler scaler(1024, 2, 2);
  double factor = 1;
  const auto forward_and_backward = value_and_grad(
      [&](const Tensor& x, const Tensor& y) {
        const amp::Autocast autocast{{.dtype = f16}};
        const Tensor logits = trial.net(x);
        return std::pair(scaler.scale(cross_entropy(logits, y) * factor), logits);
      },
      trial.net.parameters());
  Tensor finite, loss;
  const auto step = [&] {
    const auto [value, gradients] = forward_and_backward(trial.images, trial.labels);
    finite = amp::all_finite(gradients);
    trial.optimizer.step(scaler.unscale(gradients), {.unless = logical_not(finite)});
    scaler.adjust(finite);
    loss = scaler.unscale(value.first);
  };
  step();
  const double first = loss.item<double>();
  synchronize(sim);
  reset_fallback_counts();
  const TransferStats before = transfer_stats();
  for (int i = 0; i < 3; ++i) step();
  const TransferStats after = transfer_stats();
  EXPECT_EQ(after.to_host, before.to_host);
  EXPECT_EQ(after.to_device - before.to_device, after.asynchronous - before.asynchronous);
  EXPECT_TRUE(fallback_counts().empty()) << fallback_counts()[0].op;
  EXPECT_TRUE(finite.item<bool>());
  EXPECT_EQ(scaler.scale_value(), 4096) << "four good steps, two for each growth";
  EXPECT_LT(loss.item<double>(), first);
  const auto weights = trial.net.parameters()[0].tensor.to_vector<float>();
  factor = 1e38;
  step();
  EXPECT_FALSE(finite.item<bool>());
  EXPECT_EQ(scaler.scale_value(), 2048);
  EXPECT_EQ(trial.net.parameters()[0].tensor.to_vector<float>(), weights) << "the step was not made";
}

TEST_F(DeviceStep, MemoryOfAStepIsThatOfTheNext) {
  Trial<optim::Adam> trial(sim, {.init_scale = 1024});
  for (int i = 0; i < 3; ++i) trial.step();
  synchronize(sim);
  const MemoryStats before = memory_stats(sim);
  for (int i = 0; i < 5; ++i) trial.step();
  synchronize(sim);
  const MemoryStats after = memory_stats(sim);
  EXPECT_EQ(after.reserved, before.reserved) << "all comes from what is kept";
  EXPECT_EQ(after.allocations - before.allocations, after.cache_hits - before.cache_hits);
}

}  // namespace
}  // namespace halfstep
