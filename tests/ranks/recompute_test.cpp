// SPDX-License-Identifier: Apache-2.0
// Blocks that recompute on several ranks: each gradient is reduced once, synchronised statistics are gathered again by
// all ranks in one order, and the bits are those without.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/core/random.h"
#include "halfstep/dist/sync_batch_norm.h"
#include "halfstep/dist/zero.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/train_step.h"
#include "tests/ranks/networks.h"

namespace halfstep {
namespace {

using test::part_of;
using test::values_of;
using test::world;

struct Block : nn::Module<Block> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 24, .out = 32}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 32}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 32, .out = 24}});
  Tensor forward(const Tensor& x) const {
    return x + fc2(dropout(norm(fc1(x), Activation::relu), 0.25, is_training()));
  }
};

struct Net : nn::Module<Net> {
  nn::Sequential blocks = child("blocks", nn::Sequential{Block(), Block(), Block()});
  nn::Linear head = child("head", nn::Linear{{.in = 24, .out = 6}});
  Tensor forward(const Tensor& x) const { return head(blocks(x)); }
};

class Task final : public training::Task {
 public:
  explicit Task(Net net) : net_(std::move(net)) {}
  const nn::ModuleBase& network() const override { return net_; }
  training::TaskLoss loss(const data::Batch& batch) override {
    return {.loss = cross_entropy(net_(batch.input).to(f32), batch.target)};
  }

 private:
  Net net_;
};

struct Settings {
  bool synchronised = false;
  int zero = 0;
  std::optional<DType> autocast = {};
  bool captured = false;
};

std::vector<double> trained(const Settings& s, const std::vector<std::size_t>& recomputed, std::uint64_t* replayed) {
  manual_seed(3);
  const Net net;
  if (s.synchronised) dist::convert_sync_batch_norm(net, world());
  for (const std::size_t i : recomputed) net.blocks[i].recompute();
  optim::SGD sgd(net.parameters(), {.lr = 0.05, .momentum = 0.9});
  const auto parallel = std::make_shared<dist::DataParallelBase>(
      net, world(), dist::DataParallelOptions{.bucket_cap_mb = 0.005, .first_bucket_cap_mb = 0.002});
  std::optional<dist::ZeroRedundancy> zero;
  if (s.zero > 0) zero.emplace(*parallel, net, sgd, dist::ZeroOptions{.stage = s.zero});
  std::optional<amp::GradScaler> scaler;
  if (s.autocast == f16) scaler.emplace(amp::GradScalerOptions{.init_scale = 1024, .growth_interval = 3});
  training::TrainStep step = training::make_train_step(std::make_shared<Task>(net), sgd, std::move(scaler),
                                                       {.autocast = s.autocast, .parallel = parallel});
  manual_seed(7);
  std::vector<double> values;
  for (int i = 0; i < 7; ++i) {
    const std::vector<data::Batch> batches{{part_of(randn({24, 24})), part_of(randint(0, 6, {24}))}};
    const training::StepValues made = s.captured ? step.run_captured(batches) : step.run(batches);
    values.push_back(made.loss().item<double>());
  }
  if (replayed) *replayed = step.capture_stats().replayed;
  const auto whole = zero ? zero->gather_parameters() : nullptr;
  for (const double v : values_of(net.state_dict())) values.push_back(v);
  return values;
}

TEST(RecomputeOnRanks, BitsAreThoseWithout) {
  for (const bool synchronised : {false, true}) {
    for (const int zero : {0, 1, 2, 3}) {
      for (const std::optional<DType> autocast : {std::optional<DType>(), std::optional(bf16), std::optional(f16)}) {
        for (const bool captured : {false, true}) {
          const Settings s{synchronised, world().size() > 1 ? zero : 0, autocast, captured};
          std::uint64_t replayed = 0, plain_replayed = 0;
          const auto expected = trained(s, {}, &plain_replayed);
          const std::string what = fmt::format("sync {}, stage {}, {}, {}", synchronised, zero,
                                               autocast ? name(*autocast) : "f32", captured);
          EXPECT_TRUE(trained(s, {0, 1, 2}, &replayed) == expected) << what;
          EXPECT_EQ(replayed, plain_replayed) << what;
          EXPECT_TRUE(trained(s, {1}, nullptr) == expected) << what;
        }
      }
    }
  }
}

}  // namespace
}  // namespace halfstep
