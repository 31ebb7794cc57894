// SPDX-License-Identifier: Apache-2.0
// Captured steps on a device: through its graphs, kernel by kernel, with ops that run on the CPU, and with a device
// that fails. The simulated accelerator has all of these.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/schedule.h"
#include "halfstep/optim/sgd.h"
#include "tests/runtime/on_sim.h"
#include "tests/support/captured_training.h"

namespace halfstep {
namespace {

using test::error_of;
using test::host_classes;
using test::host_randn;
using test::How;
using test::Net;
using test::Outcome;
using test::scaled_step;
using test::Step;
using test::trained;

class CaptureOnSim : public test::OnSim {
 protected:
  CaptureOnSim() { set_device_graphs(true); }
  ~CaptureOnSim() override { set_device_graphs(true); }
};

TEST_F(CaptureOnSim, ScaledAndSkippedStepsTrainToTheSameBits) {
  constexpr int kSteps = 24;
  for (const bool adam : {false, true}) {
    for (const bool lacks_kernels : {false, true}) {
      const Outcome plain = trained(How::plain, sim, kSteps, lacks_kernels, adam);
      // From 2^24 by 1/8 at an overflow and by 2 after every two good steps: some steps were skipped, others not.
      EXPECT_LT(plain.scale, 0x1p24);
      EXPECT_NE(plain.losses.front(), plain.losses.back());
      for (const How how : {How::one_by_one, How::graphs}) {
        const auto launches = test::sim_stats().graph_launches;
        const Outcome fast = trained(how, sim, kSteps, lacks_kernels, adam);
        EXPECT_EQ(fast.losses, plain.losses);
        EXPECT_EQ(fast.weights, plain.weights);
        EXPECT_EQ(fast.scale, plain.scale);
        EXPECT_GE(fast.stats.replayed, static_cast<std::uint64_t>(kSteps) - 4) << fast.why_not;
        // The first replay makes no graphs yet.
        EXPECT_EQ(fast.stats.graphs, how == How::graphs ? fast.stats.replayed - 1 : 0U);
        EXPECT_EQ(test::sim_stats().graph_launches > launches, how == How::graphs);
      }
    }
  }
}

// All of a step whose ops the device has is one graph: forward and backward pass, loss scale, the step that is skipped
// or not, and the optimizer; nothing is read.
TEST_F(CaptureOnSim, AWholeStepIsOneGraphAndReadsNothing) {
  manual_seed(1);
  const Net net;
  net.to(sim);
  const auto optimizer = std::make_shared<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  const auto scaler = std::make_shared<amp::GradScaler>(amp::GradScalerOptions{.init_scale = 1024});
  auto fast = capture(scaled_step(net, optimizer, scaler));
  const Tensor x = randn({8, 6}, {.device = sim}), y = host_classes(8).to(sim);
  reset_fallback_counts();  // of the random numbers, which have yet to come to the device
  for (int i = 0; i < 4; ++i) fast(x, y);
  ASSERT_TRUE(fast.replayed()) << fast.why_not();
  const auto before = test::sim_stats();
  for (int i = 0; i < 10; ++i) fast(x, y);
  const auto after = test::sim_stats();
  EXPECT_EQ(after.graph_launches - before.graph_launches, 10U);
  EXPECT_EQ(after.host_reads, before.host_reads);
  EXPECT_EQ(after.waiting_copies, before.waiting_copies);
  for (const FallbackCount& count : fallback_counts()) EXPECT_EQ(count.calls, 0U) << count.op;
}

TEST_F(CaptureOnSim, FallbacksOfReplaysAreCounted) {
  auto step = capture([](const Tensor& x) { return gelu(x * 2) + 1; });
  const Tensor x = ones({4}, {.device = sim});
  for (int i = 0; i < 6; ++i) step(x);
  EXPECT_TRUE(step.replayed()) << step.why_not();
  ASSERT_EQ(fallback_counts().size(), 1U);
  EXPECT_EQ(fallback_counts()[0].op, "gelu");
  EXPECT_EQ(fallback_counts()[0].calls, 6U);
  EXPECT_EQ(fallback_counts()[0].bytes_to_host, 6U * 16U);
  EXPECT_EQ(fallback_counts()[0].bytes_to_device, 6U * 16U);
}

// A graph has the attributes of its kernels' calls; an optimizer's may change between steps, and a schedule changes
// them in every step.
TEST_F(CaptureOnSim, MomentaThatChangeAreFollowed) {
  std::vector<std::vector<float>> ends;
  struct Kind {
    bool captured, schedule_inside;
  };
  for (const Kind kind : {Kind{false, false}, {true, false}, {true, true}}) {
    manual_seed(1);
    const Net net;
    net.to(sim);
    optim::SGD optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.5}};
    optim::OneCycleLR schedule(optimizer, {.max_lr = 0.2, .total_steps = 40});
    auto step = [&](const Tensor& x, const Tensor& y) {
      optimizer.zero_grad();
      cross_entropy(net(x), y).backward();
      optimizer.step();
      if (kind.schedule_inside) schedule.step();
    };
    auto fast = capture(step);
    for (int i = 0; i < 20; ++i) {
      const Tensor x = host_randn({8, 6}).to(sim), y = host_classes(8).to(sim);
      kind.captured ? fast(x, y) : step(x, y);
      if (!kind.schedule_inside) schedule.step();
    }
    EXPECT_EQ(fast.stats().graphs > 0, kind.captured);
    ends.emplace_back();
    for (const auto& p : net.parameters()) {
      for (const float v : p.tensor.to_vector<float>()) ends.back().push_back(v);
    }
  }
  EXPECT_EQ(ends[0], ends[1]);
  EXPECT_EQ(ends[0], ends[2]);
}

TEST_F(CaptureOnSim, InputsLieElsewhereInEveryCall) {
  auto step = capture([](const Tensor& a, const Tensor& b) { return mm(a, b.t()) + sum(a) * 2 + a.narrow(1, 0, 2); });
  const Tensor all = arange(64).to(f32).to(sim).view({16, 4});
  for (int i = 0; i < 8; ++i) {
    // Rows of a larger tensor, and every second one.
    const Tensor a = all.narrow(0, i, 2), b = all.slice(0, i, i + 4, 2);
    const Tensor want = mm(a, b.t()) + sum(a) * 2 + a.narrow(1, 0, 2);
    EXPECT_EQ(step(a, b).to_vector<float>(), want.to_vector<float>()) << i;
  }
  EXPECT_EQ(step.stats().graphs, 5U) << step.why_not();
  // What is written to an input has to be written there: no graph.
  auto writes = capture([](const Tensor& t) {
    const NoGrad no_grad;
    Tensor to = t;
    to.add_(1);
    to.mul_(2);
  });
  for (int i = 0; i < 5; ++i) {
    const Tensor t = full({3}, i, {.device = sim});
    writes(t);
    EXPECT_EQ(t.to_vector<float>()[2], static_cast<float>(2 * (i + 1)));
  }
  EXPECT_EQ(writes.stats().replayed, 3U);
  EXPECT_EQ(writes.stats().graphs, 0U);
}

// A step on the CPU between kernels writes to the input: the graph behind it is to read what was written.
TEST_F(CaptureOnSim, InputsThatAreWrittenOutsideOfGraphsAreReadAsWritten) {
  auto step = capture([](const Tensor& x) {
    const NoGrad no_grad;
    Tensor to = x;
    sigmoid_(to);
    return x * 2 + 1;
  });
  ASSERT_FALSE(op_support(sim, "sigmoid", f32).native);
  for (int i = 0; i < 6; ++i) {
    const Tensor x = full({3}, 0.25 * i, {.device = sim});
    const float want = 2 * sigmoid(full({3}, 0.25 * i, {.device = Device{}})).to_vector<float>()[0] + 1;
    EXPECT_EQ(step(x).to_vector<float>(), std::vector<float>(3, want)) << i;
  }
  EXPECT_EQ(step.stats().replayed, 4U) << step.why_not();
}

// A step that isn't captured, whose optimizer runs on the CPU, leaves the 16-bit copies of weights on the host.
TEST_F(CaptureOnSim, CopiesOfWeightsThatAFallbackWroteAreOnTheDeviceForAReplay) {
  const auto losses = [&](bool captured) {
    manual_seed(5);
    Net net;
    net.to(sim);
    const auto sgd = std::make_shared<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = 0.5});
    const auto scaler = std::make_shared<amp::GradScaler>(amp::GradScalerOptions{.init_scale = 256});
    const Step step = scaled_step(net, sgd, scaler);
    auto fast = capture(step);
    std::vector<float> result;
    for (int i = 0; i < 8; ++i) {
      const Tensor x = host_randn({8, 6}).to(sim), y = host_classes(8).to(sim);
      const bool alone = i == 4 || i == 6;
      if (alone) test::order_fault("unsupported:sgd_step:1:always");
      result.push_back((captured && !alone ? fast(x, y) : step(x, y)).item<float>());
      test::order_fault("clear");
    }
    EXPECT_EQ(fast.stats().replayed > 2, captured) << fast.why_not();
    return result;
  };
  EXPECT_EQ(losses(true), losses(false));
}

TEST_F(CaptureOnSim, OtherQueuesAndDevices) {
  auto step = capture([](const Tensor& x) { return x * 2 + 1; });
  const Tensor x = ones({4}, {.device = sim});
  const auto run = [&] { EXPECT_EQ(step(x).to_vector<float>()[3], 3); };
  for (int i = 0; i < 4; ++i) run();
  EXPECT_TRUE(step.replayed());
  synchronize(sim);
  {
    const QueueGuard guard{Queue(sim)};
    run();
    EXPECT_FALSE(step.replayed()) << "it is recorded for the other queue";
    run();
    EXPECT_TRUE(step.replayed());
  }
  synchronize(sim);
  run();
  run();
  EXPECT_TRUE(step.replayed());

  const Device other = test::sim_device(1);
  const auto refused = [&](const std::function<Tensor(const Tensor&)>& f, const std::string& why) {
    auto fast = capture(f);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(fast(x).to_vector<float>(), f(x).to_vector<float>());
    EXPECT_NE(fast.why_not().find(why), std::string::npos) << fast.why_not();
  };
  refused([&](const Tensor& t) { return t.to(other) * 2; }, "from device to device");
  const Tensor there = ones({4}, {.device = other});
  refused([&](const Tensor& t) { return t + (there * 2).to(Device{}).to(sim); }, "on sim:1 and on sim:0");
  refused(
      [&](const Tensor& t) {
        synchronize(sim);
        return t + 1;
      },
      "it waits for a device");
  refused(
      [&](const Tensor& t) {
        const QueueGuard guard{Queue(sim)};
        return t + 1;
      },
      "on a queue of its own");
  const Queue other_queue(sim);
  refused(
      [&](const Tensor& t) {
        const Tensor once = t + 1;
        synchronize(sim);
        const QueueGuard guard(other_queue);
        const Tensor twice = once + 1;
        other_queue.synchronize();
        return twice;
      },
      "it waits for a device");
}

TEST_F(CaptureOnSim, WhereEveryOpWaitsStepsRunAsTheyAre) {
  auto step = capture([](const Tensor& x) { return x * 2 + 1; });
  const Tensor x = ones({4}, {.device = sim});
  for (int i = 0; i < 4; ++i) step(x);
  EXPECT_TRUE(step.replayed());
  set_synchronous(true);
  for (int i = 0; i < 3; ++i) step(x);
  EXPECT_FALSE(step.replayed());
  EXPECT_EQ(step.why_not(), "every op waits until it is done");
  test::order_fault("fail:*:1");
  EXPECT_NE(error_of([&] { step(x); }).find("a failure was ordered"), std::string::npos);
  set_synchronous(false);
  EXPECT_EQ(step(x).to_vector<float>()[0], 3);
  EXPECT_TRUE(step.replayed());
}

// Copies to the CPU and back are part of a step.
TEST_F(CaptureOnSim, PartsOnTheCpuAreRepeated) {
  const Tensor host = tensor({1, 2, 3}, {.device = Device{}});
  auto step = capture([&](const Tensor& x, const Tensor& labels) {
    const Tensor there = (x * 2).to(Device{});  // waits
    return (there + host).to(sim) * 3 + labels.to(sim) + tensor({1, 0, 0}, {.device = sim});
  });
  for (int i = 0; i < 7; ++i) {
    const Tensor x = full({3}, i, {.device = sim}), labels = full({3}, 10 * i, {.device = Device{}});
    const auto at = [&](int k) { return static_cast<float>((2 * i + k + 1) * 3 + 10 * i + (k == 0 ? 1 : 0)); };
    EXPECT_EQ(step(x, labels).to_vector<float>(), (std::vector<float>{at(0), at(1), at(2)})) << i;
  }
  EXPECT_EQ(step.stats().replayed, 5U) << step.why_not();
}

// A graph runs all kernels behind the copies that go before it: results that a copy fills have memory that no kernel
// before it uses.
TEST_F(CaptureOnSim, ResultsThatAreCopiesKeepWhatWasCopied) {
  CapturedStep step([&](std::span<const Tensor> in) {
    Tensor total = zeros({}, {.device = sim});
    for (const std::int64_t n : {4096, 2048, 1024, 512}) total = total + sum(full({n}, 1, {.device = sim}) * in[0]);
    const Tensor there = in[1].to(sim);
    return CapturedStep::Result{.tensors = {total + sum(there), there}};
  });
  for (int i = 0; i < 7; ++i) {
    const Tensor inputs[] = {full({1}, i, {.device = sim}), full({4096}, 10 * i, {.device = Device{}})};
    const std::vector<Tensor> results = step(inputs).tensors;
    EXPECT_EQ(results[1].to_vector<float>(), inputs[1].to_vector<float>()) << i;
    EXPECT_EQ(results[0].item<float>(), static_cast<float>(7680 * i + 40960 * i)) << i;
  }
  EXPECT_EQ(step.stats().replayed, 5U) << step.why_not();
}

TEST_F(CaptureOnSim, TheDeviceSaysHowLongItHasWorked) {
  const auto before = device_busy_seconds(sim);
  ASSERT_TRUE(before.has_value());
  test::order_fault("delay:add:1:1s");  // that is no work
  const Tensor x = ones({1 << 20}, {.device = sim});
  (x + x).to_vector<float>();
  synchronize(sim);
  const double worked = *device_busy_seconds(sim) - *before;
  EXPECT_GT(worked, 0);
  EXPECT_LT(worked, 1);  // with the delay it would be more than that
  EXPECT_FALSE(device_busy_seconds(Device{}).has_value());
}

// --- a device that fails

struct Failing {
  const Net net;
  std::shared_ptr<optim::SGD> optimizer;
  std::shared_ptr<amp::GradScaler> scaler = std::make_shared<amp::GradScaler>(amp::GradScalerOptions{.init_scale = 8});
  Step step;
  Tensor x, y;

  explicit Failing(Device device) {
    net.to(device);
    optimizer = std::make_shared<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = 0.1});
    step = scaled_step(net, optimizer, scaler);
    x = host_randn({8, 6}).to(device);
    y = host_classes(8).to(device);
  }
};

template <class E>
std::string thrown(const std::function<void()>& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing";
}

TEST_F(CaptureOnSim, FailuresAreReportedAsOfStepsByThemselves) {
  for (const How how : {How::plain, How::one_by_one, How::graphs}) {
    set_device_graphs(how == How::graphs);
    const Failing f(sim);
    auto fast = capture(f.step);
    const auto run = [&] { return how == How::plain ? f.step(f.x, f.y) : fast(f.x, f.y); };
    for (int i = 0; i < 5; ++i) run();
    synchronize(sim);
    // On the queue: found out by whoever waits, with the op's name.
    test::order_fault("fail:linear:2");
    const std::string late = thrown<DeviceError>([&] { run().item<float>(); });
    EXPECT_EQ(late.find("linear ("), 0U) << late;
    EXPECT_NE(late.find("failed on sim:0: a failure was ordered; found out in copy to host"), std::string::npos)
        << late;
    EXPECT_EQ(fast.replayed(), how != How::plain);
    EXPECT_TRUE(std::isfinite(run().item<float>())) << "the device goes on";
    EXPECT_EQ(fast.replayed(), how != How::plain);
    // At the call.
    test::order_fault("refuse:mm:1");
    const std::string at_once = thrown<DeviceError>([&] { run(); });
    EXPECT_NE(at_once.find("refused, as ordered"), std::string::npos) << at_once;
    EXPECT_NE(at_once.find("sim:0"), std::string::npos) << at_once;
    test::order_fault("clear");
  }
}

TEST_F(CaptureOnSim, ACallThatIsNotSupportedRunsAsItDoesByItself) {
  for (const How how : {How::one_by_one, How::graphs}) {
    set_device_graphs(how == How::graphs);
    auto step = capture([](const Tensor& a) { return mm(a, a.t()) * 2; });
    const Tensor a = tensor({{1, 2}, {3, 4}}, {.device = sim});
    for (int i = 0; i < 4; ++i) step(a);
    reset_fallback_counts();
    test::order_fault("unsupported:mm:1");
    EXPECT_EQ(step(a).to_vector<float>(), (std::vector<float>{10, 22, 22, 50}));
    EXPECT_TRUE(step.replayed());
    EXPECT_EQ(fallback_counts().size(), how == How::one_by_one ? 1U : 0U);
  }
}

// 6 MB and then 11 MB, one after the other.
Tensor two_large_ones(const Tensor& x) {
  const Tensor first = x.expand({1'500'000}).clone().narrow(0, 0, 1) + x;
  return x.expand({2'750'000}).clone().narrow(0, 0, 1) + first;
}

TEST_F(CaptureOnSim, ARecordingNeedsNoMoreMemoryThanTheStep) {
  empty_memory_cache(sim);
  set_memory_limit(memory_stats(sim).reserved + (std::uint64_t{16} << 20), sim);
  auto step = capture(two_large_ones);
  const Tensor x = ones({1}, {.device = sim});
  for (int i = 0; i < 4; ++i) EXPECT_EQ(step(x).item<float>(), 3);
  EXPECT_TRUE(step.replayed()) << step.why_not();
  set_memory_limit(0, sim);
}

TEST_F(CaptureOnSim, WhereMemoryIsShortTheStepRunsByItself) {
  int runs = 0;
  auto step = capture([&](const Tensor& x) {
    Tensor result = two_large_ones(x);
    // Other allocations exhaust the device while the step is being recorded.
    if (++runs == 2) {
      empty_memory_cache(sim);
      set_memory_limit(memory_stats(sim).reserved + (std::uint64_t{4} << 20), sim);
    }
    return result;
  });
  const Tensor x = ones({1}, {.device = sim});
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(step(x).item<float>(), 3);
    set_memory_limit(0, sim);
  }
  EXPECT_FALSE(step.replayed());
  EXPECT_NE(step.why_not().find("not enough memory"), std::string::npos) << step.why_not();
}

}  // namespace
}  // namespace halfstep
