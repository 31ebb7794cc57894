// SPDX-License-Identifier: Apache-2.0
// The model of what data parallel training costs, beside what these ranks take on this machine.
#include "halfstep/dist/cost_model.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "halfstep/dist/data_parallel.h"
#include "halfstep/dist/measure_cost.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/sgd.h"
#include "tests/ranks/ranks.h"

namespace halfstep::dist::test {
namespace {

TEST(MeasureCost, GivesAllRanksTheSame) {
  const std::vector<double> sizes = {1024, 1 << 20};
  const std::vector<AllReduceSample> samples = measure_all_reduce(world(), sizes, 3);
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_EQ(samples[0].bytes, 1024);
  std::string text;
  for (const AllReduceSample& s : samples) {
    EXPECT_GT(s.seconds, 0);
    text += std::to_string(s.seconds) + ' ';
  }
  for (const std::string& other : world().all_gather_text(text)) EXPECT_EQ(other, text);
  EXPECT_THROW(measure_all_reduce(world(), sizes, 0), Error);
}

double slowest(double seconds) {
  const Tensor all = full({1}, seconds, {.dtype = f64});
  world().all_reduce(all, ReduceOp::max).wait();
  return all.item<double>();
}

// Of times in turns with other programs: some of the quicker ones say most of what was to be measured.
double lower_quartile(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 4];
}

// Steps of a network with and without communication, and all-reduces alone, in turns. The ranks have all processors at
// work or share them, so the truth lies between communication that costs the backward pass nothing and communication
// that takes a processor from it: the model has to hold the measured step between both. The tolerance is that of
// the machine: times of turns within minutes differ by up to a third where other programs run.
TEST(CostModelSlow, HoldsTheStepOfTheseRanks) {
  double load = 0;
  std::ifstream("/proc/loadavg") >> load;
  if (std::stod(world().broadcast_text(std::to_string(load))) > 0.5) {
    GTEST_SKIP() << "other programs are running: neither a step nor a collective takes its own time";
  }
  constexpr double kTolerance = 0.35;
  constexpr int kTurns = 31, kWidth = 1024, kBatch = 32;
  const auto hidden = [] { return nn::Linear{{.in = kWidth, .out = kWidth}}; };
  const nn::Sequential net{hidden(),   nn::ReLU{}, hidden(),
                           nn::ReLU{}, hidden(),   nn::ReLU{},
                           hidden(),   nn::ReLU{}, nn::Linear{{.in = kWidth, .out = 10}}};
  DataParallel parallel{net, world(), {.bucket_cap_mb = 4}};
  optim::SGD optimizer{net.parameters(), {.lr = 1e-3, .momentum = 0.9}};
  const Tensor x = randn({kBatch, kWidth}), y = randint(0, 10, {kBatch});
  // One, as long as on the slowest rank: ranks that share processors wait for each other in every step.
  const auto a_step = [&] {
    world().barrier();
    const auto start = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    cross_entropy(parallel(x), y).backward();
    optimizer.step();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    return slowest(time.count());
  };
  std::vector<double> sizes;
  for (double bytes = 0x1p10; bytes <= 0x1p23; bytes *= 8) sizes.push_back(bytes);
  std::vector<double> with, without;
  std::vector<std::vector<double>> reductions(sizes.size());
  for (int turn = -1; turn < kTurns; ++turn) {
    const double sent = a_step();
    double kept = 0;
    {
      const auto alone = parallel.no_sync();
      kept = a_step();
    }
    optimizer.zero_grad();
    const std::vector<AllReduceSample> samples = measure_all_reduce(world(), sizes, 1);
    if (turn < 0) continue;
    with.push_back(sent);
    without.push_back(kept);
    for (std::size_t i = 0; i < sizes.size(); ++i) reductions[i].push_back(samples[i].seconds);
  }
  std::vector<AllReduceSample> samples;
  for (std::size_t i = 0; i < sizes.size(); ++i) samples.push_back({sizes[i], lower_quartile(reductions[i])});
  const ClusterCost cluster{.ranks_per_machine = world().size(),
                            .inside = fit_link(samples, world().size()),
                            .algorithm = AllReduceAlgorithm::ring};
  StepCost step = step_cost(nn::summary(net, x), lower_quartile(without));
  const BucketCost buckets{.first = 0x1p20, .others = 4 * 0x1p20};
  const StepPrediction hidden_step = predict_step(step, cluster, world().size(), buckets);
  step.interference = 1;
  const StepPrediction shared_step = predict_step(step, cluster, world().size(), buckets);
  const double measured = lower_quartile(with);
  if (world().rank() == 0) {
    std::printf("%d ranks: link %.1f us %.3f GB/s, step %.3f ms alone, %.3f to %.3f ms predicted, %.3f ms measured\n",
                world().size(), 1e6 * cluster.inside.latency, 1e-9 * cluster.inside.bandwidth, 1e3 * step.seconds(),
                1e3 * hidden_step.seconds, 1e3 * shared_step.seconds, 1e3 * measured);
    for (const AllReduceSample& s : samples) std::printf("  {%.0f, %.3e},\n", s.bytes, s.seconds);
  }
  EXPECT_GT(measured, hidden_step.seconds * (1 - kTolerance));
  EXPECT_LT(measured, shared_step.seconds * (1 + kTolerance));
}

}  // namespace
}  // namespace halfstep::dist::test
