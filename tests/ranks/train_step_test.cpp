// SPDX-License-Identifier: Apache-2.0
// Steps of a task on several ranks, beside the same on one: every rank also makes them alone, on the whole batches.
#include "halfstep/train/train_step.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "halfstep/core/random.h"
#include "halfstep/data/loader.h"
#include "halfstep/dist/sync_batch_norm.h"
#include "halfstep/models/mlp.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/evaluate.h"
#include "tests/ranks/networks.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;
using test::relative_error;
using test::values_of;
using test::world;

struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 12, .out = 16}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 16}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 16, .out = 4}});
  double dropped = 0;
  bool normed = true;
  Tensor forward(const Tensor& x) const {
    const Tensor h = fc1(x);
    return fc2(dropout(relu(normed ? norm(h) : h), dropped, is_training()));
  }
};

class Task final : public training::Task {
 public:
  explicit Task(Net net) : net_(std::move(net)) {}
  const nn::ModuleBase& network() const override { return net_; }
  training::TaskLoss loss(const data::Batch& batch) override {
    return {.loss = cross_entropy(net_(batch.input), batch.target)};
  }
  void count(training::TaskLoss& made, const data::Batch& batch) override {
    const auto n = static_cast<double>(batch.input.size(0));
    made.parts.push_back({"samples", full({}, n, {.device = batch.input.device()})});
    if (counts_later) made.count_later = [n](std::map<std::string, double>& parts) { parts["later"] += n; };
  }
  bool counts_later = false;

 private:
  Net net_;
};

data::DataLoader loader(bool divided, std::int64_t samples, std::int64_t batch, int shards = 0) {
  manual_seed(5);
  return data::DataLoader(data::TensorDataset(randn({samples, 12}), randint(0, 4, {samples})),
                          {.batch_size = batch,
                           .shuffle = true,
                           .workers = 0,
                           .rank = divided ? world().rank() : 0,
                           .ranks = divided ? world().size() : 1,
                           .shards = shards});
}

struct Result {
  std::vector<double> losses, samples, weights;
  std::uint64_t replayed = 0;
};

struct Setting {
  int shards = 0, accumulate = 1;
  bool captured = false;
  std::optional<DType> autocast = {};
  bool normed = false, synced = false;
  std::int64_t samples = 0;  // 0: those that trained() chooses
  std::int64_t first = 0;    // batch that the first epoch begins with, as where a run is resumed
  Device device = {};
  bool counts_later = false;
};

// Without batch norm, whose statistics of parts aren't those of the whole, and where they are synchronised, 45 samples
// in batches of 14: the last one has 3, fewer than 4 ranks. With it 48 in batches of 20, whose shards have several
// samples.
Result trained(bool divided, const Setting& s) {
  manual_seed(3);
  Net net;
  net.normed = s.normed || s.synced;
  net.dropped = s.shards > 0 ? 0.25 : 0;
  if (s.synced && divided) dist::convert_sync_batch_norm(net, world());
  net.to(s.device);
  const auto task = std::make_shared<Task>(net);
  task->counts_later = s.counts_later;
  optim::SGD sgd(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  training::StepOptions options{.autocast = s.autocast, .clip_norm = 1, .shards = s.shards};
  if (divided) {
    dist::DataParallelOptions parallel{.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001};
    if (s.shards > 0) parallel.hook = training::shard_hook(), parallel.broadcast_buffers = false;
    // Of the norm's parameters, which the steps don't reach.
    if (!net.normed) (s.captured ? parallel.static_graph : parallel.find_unused_parameters) = true;
    options.parallel = std::make_shared<dist::DataParallelBase>(net, world(), parallel);
  }
  std::optional<amp::GradScaler> scaler;
  if (s.autocast) scaler.emplace(amp::GradScalerOptions{.init_scale = 256, .growth_interval = 3});
  training::TrainStep step = training::make_train_step(task, sgd, std::move(scaler), options);
  data::DataLoader batches = loader(divided,
                                    s.samples > 0 ? s.samples
                                    : s.normed    ? 48
                                                  : 45,
                                    s.normed ? 20 : 14, s.shards);
  manual_seed(9);
  Result result;
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::vector<data::Batch> group;
    std::int64_t at = 0;
    for (const data::Batch& batch : batches) {
      if (epoch == 0 && at < s.first) {
        ++at;
        continue;
      }
      group.push_back(batch);
      data::visit_tensors(group.back(), [&](Tensor& t) {
        if (t.defined()) t = t.to(s.device);
      });
      if (++at < batches.size() && static_cast<int>(group.size()) < s.accumulate) continue;
      const training::StepValues values = s.captured ? step.run_captured(group) : step.run(group);
      result.losses.push_back(values.loss().item<double>());
      result.samples.push_back(static_cast<double>(values.samples));
      result.samples.push_back(values.parts.at(0).tensor.item<double>());
      std::map<std::string, double> later;
      for (const auto& count : values.count_later) count(later);
      EXPECT_EQ(later["later"], s.counts_later ? result.samples.back() : 0);
      group.clear();
    }
  }
  result.replayed = step.capture_stats().replayed;
  // Of several ranks rank 0's buffers count.
  result.weights = values_of(net.parameters());
  if (!divided || world().rank() == 0) {
    for (const double v : values_of(net.buffers())) result.weights.push_back(v);
  }
  if (divided && world().rank() > 0) result.weights.resize(values_of(net.parameters()).size());
  EXPECT_EQ(dist::first_difference(nn::clone(net.fc1), world()), "");
  return result;
}

std::vector<double> parameters_of(const Result& r, std::size_t n) {
  return {r.weights.begin(), r.weights.begin() + static_cast<std::ptrdiff_t>(n)};
}

TEST(RankSteps, AreThoseOfOneProcess) {
  for (const bool captured : {false, true}) {
    for (const int accumulate : {1, 2}) {
      for (const bool synced : {false, true}) {
        const Setting setting{.accumulate = accumulate, .captured = captured, .synced = synced};
        const Result here = trained(true, setting), alone = trained(false, setting);
        EXPECT_EQ(here.samples, alone.samples) << "every sample counts once";
        // A dozen steps, each with a few roundings of 2^-24 in another order.
        EXPECT_LT(relative_error(here.losses, alone.losses), 5e-6) << accumulate << synced;
        const std::size_t n = std::min(here.weights.size(), alone.weights.size());
        EXPECT_LT(relative_error(parameters_of(here, n), parameters_of(alone, n)), 5e-6) << accumulate << synced;
      }
    }
  }
}

// Also where the first one is an epoch's last, smaller one. 115 samples are 8 batches of 14 and one of 3.
TEST(RankSteps, AreReplayed) {
  for (const int accumulate : {1, 2}) {
    for (const std::int64_t first : {0, 8}) {
      Setting setting{.accumulate = accumulate, .captured = true, .samples = 115, .first = first};
      const Result fast = trained(true, setting);
      EXPECT_GT(fast.replayed, 2U) << accumulate << ' ' << first;
      setting.captured = false;
      const Result plain = trained(true, setting);
      EXPECT_EQ(fast.losses, plain.losses) << accumulate << ' ' << first;
      EXPECT_EQ(fast.weights, plain.weights) << accumulate << ' ' << first;
    }
  }
}

// What a task counts is of all ranks: on the host, and on a device, where one process counts it behind the step.
TEST(RankSteps, CountAllSamples) {
  for (const char* name : {"cpu", "sim"}) {
    Device device;
    try {
      device = Device(name);
    } catch (const Error&) {
      continue;  // the plug-in isn't built
    }
    for (const int accumulate : {1, 3}) {
      const Setting setting{.accumulate = accumulate, .captured = true, .device = device, .counts_later = true};
      const Result here = trained(true, setting), alone = trained(false, setting);
      EXPECT_EQ(here.samples, alone.samples) << name << accumulate;
      EXPECT_LT(relative_error(here.losses, alone.losses), 5e-6) << name << accumulate;
    }
  }
}

// A rank without samples computes with one of another's, which leaves no trace in what it knows of the data: 43 samples
// in batches of 20, the last of which are rank 0's.
TEST(RankSteps, LeaveAloneTheStatisticsOfARankWithoutSamples) {
  for (const bool captured : {false, true}) {
    manual_seed(3);
    const Net net;
    const auto task = std::make_shared<Task>(net);
    optim::SGD sgd(net.parameters(), {.lr = 0.1});
    // Their own, as they are: not rank 0's.
    const dist::DataParallelOptions own{.broadcast_buffers = false, .static_graph = captured};
    training::TrainStep step = training::make_train_step(
        task, sgd, {}, {.parallel = std::make_shared<dist::DataParallelBase>(net, world(), own)});
    data::DataLoader batches = loader(true, 43, 20);
    std::int64_t steps = 0, without = 0;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (const data::Batch& batch : batches) {
        const std::vector<double> before = values_of(net.buffers());
        captured ? step.run_captured({&batch, 1}) : step.run({&batch, 1});
        ++steps;
        if (batch.stand_in) {
          ++without;
          EXPECT_EQ(values_of(net.buffers()), before);
        } else {
          EXPECT_NE(values_of(net.buffers()), before);
        }
      }
    }
    EXPECT_EQ(net.norm.num_batches_tracked.item<std::int64_t>(), steps - without);
    EXPECT_EQ(without, world().rank() == 0 ? 0 : 2);
    EXPECT_EQ(dist::first_difference(nn::clone(net.fc1), world()), "");
  }
}

// The same bits, with batch norm and dropout, whatever the number of ranks.
TEST(RankSteps, OfShardsGiveTheSameBitsOnAnyNumberOfRanks) {
  if (world().size() == 3) {
    EXPECT_NE(error_of<Error>([] { trained(true, {.shards = 4}); }).find("3 ranks"), std::string::npos);
    return;
  }
  for (const std::optional<DType> autocast : {std::optional<DType>(), std::optional(f16)}) {
    for (const int accumulate : {1, 2}) {
      for (const bool normed : {false, true}) {
        const Setting setting{
            .shards = 4, .accumulate = accumulate, .captured = true, .autocast = autocast, .normed = normed};
        const Result here = trained(true, setting), alone = trained(false, setting);
        EXPECT_EQ(here.losses, alone.losses);
        EXPECT_EQ(here.samples, alone.samples);
        const std::size_t n = std::min(here.weights.size(), alone.weights.size());
        EXPECT_EQ(parameters_of(here, n), parameters_of(alone, n));
        EXPECT_NE(here.losses.front(), here.losses.back());
      }
    }
  }
  // Parts of a batch that weren't made for it.
  const Net net;
  optim::SGD sgd(net.parameters(), {.lr = 0.1});
  training::TrainStep step = training::make_train_step(
      std::make_shared<Task>(net), sgd, {},
      {.parallel = std::make_shared<dist::DataParallelBase>(net, world(), dist::DataParallelOptions{}), .shards = 4});
  const data::Batch batch{randn({8, 12}), zeros({8}, {.dtype = i64})};
  EXPECT_NE(error_of<Error>([&] { step.run({&batch, 1}); }).find("a batch of 4 shards"), std::string::npos);
}

// What docs/guide/data-parallel.md says of their cost: (n - 1) P bytes a rank beside 2 (n - 1) / n P.
TEST(RankSteps, OfShardsSendTheirGradientsToAllRanks) {
  const int n = world().size();
  if (n == 3) return;
  for (const int shards : {0, n}) {
    const models::MLP net;
    const auto task = std::make_shared<training::ClassificationTask>(
        training::Classifier{&net, [&net](const Tensor& x) { return net(x); }});
    optim::SGD sgd(net.parameters(), {.lr = 0.1});
    dist::DataParallelOptions parallel;
    if (shards > 0) parallel.hook = training::shard_hook();
    training::TrainStep step = training::make_train_step(
        task, sgd, {},
        {.parallel = std::make_shared<dist::DataParallelBase>(net, world(), parallel), .shards = shards});
    data::DataLoader batches{data::TensorDataset(randn({16, 784}), randint(0, 10, {16})),
                             {.batch_size = 8, .workers = 0, .rank = world().rank(), .ranks = n, .shards = shards}};
    double bytes = 0, parameters = 0;
    for (const data::Batch& batch : batches) {
      const auto before = world().stats().bytes_sent;
      step.run({&batch, 1});
      bytes = static_cast<double>(world().stats().bytes_sent - before);
    }
    for (const NamedTensor& p : net.parameters()) parameters += static_cast<double>(p.tensor.numel()) * 4;
    const double expected = shards > 0 ? (n - 1) * parameters : 2.0 * (n - 1) / n * parameters;
    EXPECT_NEAR(bytes, expected, 0.01 * parameters) << shards;  // losses and counts are beside them
  }
}

}  // namespace
}  // namespace halfstep
