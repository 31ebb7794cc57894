// SPDX-License-Identifier: Apache-2.0
// The library's own reads and writes give no tensor's address away: what is kept of a weight outlives the first save.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/cast_cache.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/core/random.h"
#include "halfstep/data/dataset.h"
#include "halfstep/data/mixup.h"
#include "halfstep/io/pth.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/lbfgs.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/checkpoint.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;

class OwnReads : public testing::Test {
 protected:
  void SetUp() override {
    if (!default_device().is_cpu()) GTEST_SKIP() << "only the CPU's memory has addresses to write through";
    folder_ = fs::temp_directory_path() / ("own_reads." + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

TEST_F(OwnReads, SavingEndsNoKeptCopy) {
  nn::Linear net{{.in = 8, .out = 8}};
  optim::SGD optimizer(net.parameters(), {.lr = 0.125, .momentum = 0.5});
  const Tensor x = ones({2, 8}, {.dtype = f16});
  const auto casts = [&] {
    amp::cast_stats() = {};
    optimizer.zero_grad();
    Tensor loss;
    {
      const amp::Autocast region;
      loss = sum(net(x));
    }
    loss.backward();
    optimizer.step();
    return amp::cast_stats().casts;
  };
  casts();
  ASSERT_EQ(casts(), 0u);
  io::save_safetensors(folder_ / "w.safetensors", net.state_dict());
  EXPECT_EQ(casts(), 0u) << "save_safetensors";
  io::save_pth(folder_ / "w.pth", net.state_dict());
  EXPECT_EQ(casts(), 0u) << "save_pth";
  training::Checkpoint checkpoint;
  checkpoint.model = "linear";
  checkpoint.weights = net.state_dict();
  checkpoint.optimizer_kind = "SGD";
  checkpoint.optimizer = optimizer.state_dict();
  training::save_checkpoint(folder_ / "last.safetensors", checkpoint);
  EXPECT_EQ(casts(), 0u) << "save_checkpoint";
  // Loading writes in place, by ops: one cast of each of the two, and then none.
  net.load_state_dict(io::load_safetensors(folder_ / "w.safetensors").tensors);
  EXPECT_EQ(casts(), 2u);
  EXPECT_EQ(casts(), 0u);
}

TEST_F(OwnReads, NoAddressIsHeldAfterwards) {
  const auto held = [](const Tensor& t) { return t.storage()->address_held(); };
  manual_seed(3);
  const Tensor w = (randn({4, 4}) + 0).requires_grad_();
  ASSERT_FALSE(held(w));
  io::save_safetensors(folder_ / "w.safetensors", {{"w", w}});
  io::save_pth(folder_ / "w.pth", {{"w", w}});
  EXPECT_FALSE(held(w));
  EXPECT_FALSE(held(io::load_safetensors(folder_ / "w.safetensors").tensors[0].tensor));
  EXPECT_FALSE(held(io::load_pth(folder_ / "w.pth").tensors[0].tensor));

  optim::LBFGS lbfgs({{"w", w}});
  lbfgs.step([&] {
    lbfgs.zero_grad();
    const Tensor loss = sum(w * w);
    loss.backward();
    return loss;
  });
  EXPECT_FALSE(held(w));
  EXPECT_FALSE(held(w.grad()));

  const Tensor d = (randn({2, 2}, {.dtype = f64}) + 0).requires_grad_();
  gradcheck([](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] * in[0]}; }, {d});
  EXPECT_FALSE(held(d));

  const Tensor labels = (zeros({4}, {.dtype = i64}) + 1);
  const data::TensorDataset rows(w.detach(), labels);
  const data::Batch batch = rows.batch({.indices = std::vector<std::int64_t>{2, 0}});
  EXPECT_FALSE(held(w));
  EXPECT_FALSE(held(batch.input));
  RandomStream random(1);
  const data::Mixed mixed = data::mixup({w.detach(), labels}, {}, random);
  EXPECT_FALSE(held(w));
  EXPECT_FALSE(held(labels));
  EXPECT_FALSE(held(mixed.input));
}

}  // namespace
}  // namespace halfstep
