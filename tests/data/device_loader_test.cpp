// SPDX-License-Identifier: Apache-2.0
// A loader that hands out batches on a device: the simulated one, where it was built.
#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>

#include "halfstep/core/error.h"
#include "halfstep/data/loader.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep::data {
namespace {

// The sample of this index can't be read.
constexpr std::int64_t kBad = 11;

class Numbers final : public Dataset {
 public:
  explicit Numbers(std::int64_t n, bool bad = false) : n_(n), bad_(bad) {}
  std::int64_t size() const override { return n_; }
  Batch batch(const BatchRequest& request) const override {
    std::vector<double> values;
    for (const std::int64_t i : request.indices) {
      if (bad_ && i == kBad) throw std::runtime_error("sample 11 is bad");
      for (int k = 0; k < 1000; ++k) values.push_back(static_cast<double>(i) + k / 1024.0);
    }
    const auto n = static_cast<std::int64_t>(request.indices.size());
    return {tensor(values, {n, 1000}, {.device = Device{}}),
            tensor_from_integers({request.indices.begin(), request.indices.end()}, {n},
                                 {.dtype = i64, .device = Device{}})};
  }

 private:
  std::int64_t n_;
  bool bad_;
};

class DeviceLoader : public testing::Test {
 protected:
  void SetUp() override {
#ifndef HALFSTEP_SIM_PLUGIN
    GTEST_SKIP() << "the simulated accelerator is not built";
#endif
    device = Device("sim");
  }
  Device device;
};

TEST_F(DeviceLoader, HandsOutTheSameBatches) {
  for (const int workers : {0, 1, 3}) {
    DataLoader here{Numbers{50}, {.batch_size = 8, .shuffle = true, .workers = workers, .seed = 5}};
    DataLoader there{Numbers{50}, {.batch_size = 8, .shuffle = true, .workers = workers, .seed = 5, .device = device}};
    for (int epoch = 0; epoch < 2; ++epoch) {
      std::vector<std::vector<double>> inputs, targets;
      for (const auto& [input, target] : here) {
        inputs.push_back(input.to_vector<double>());
        targets.push_back(target.to_vector<double>());
      }
      std::size_t i = 0;
      // Kept to the end, so that memory given back too early would show.
      std::vector<Tensor> doubled;
      for (const auto& [input, target] : there) {
        EXPECT_EQ(input.device(), device);
        EXPECT_EQ(target.device(), device);
        EXPECT_EQ(there.state(), (LoaderState{.epoch = epoch, .batch = static_cast<std::int64_t>(i) + 1}));
        doubled.push_back(input + input);
        EXPECT_EQ(target.to_vector<double>(), targets.at(i++));
      }
      ASSERT_EQ(i, inputs.size());
      for (std::size_t k = 0; k < i; ++k) {
        for (double& v : inputs[k]) v *= 2;
        EXPECT_EQ(doubled[k].to_vector<double>(), inputs[k]) << k;
      }
    }
  }
}

TEST_F(DeviceLoader, CopiesDontWait) {
  DataLoader loader{Numbers{64}, {.batch_size = 8, .workers = 2, .device = device}};
  const TransferStats before = transfer_stats();
  for (const auto& batch : loader) EXPECT_EQ(batch.input.device(), device);
  const TransferStats after = transfer_stats();
  EXPECT_EQ(after.to_device - before.to_device, 16u);
  EXPECT_EQ(after.asynchronous - before.asynchronous, 16u) << "from pinned memory";
}

TEST_F(DeviceLoader, AnErrorComesAtItsTurn) {
  DataLoader loader{Numbers{40, true}, {.batch_size = 4, .workers = 2, .device = device}};
  int seen = 0;
  const auto loop = [&] {
    for (const auto& batch : loader) {
      EXPECT_EQ(batch.input.device(), device);
      ++seen;
    }
  };
  EXPECT_THROW(loop(), std::runtime_error);
  EXPECT_EQ(seen, 2) << "the third batch has the bad sample";
}

TEST_F(DeviceLoader, ALoopThatIsLeftLeavesNothingBehind) {
  for (int i = 0; i < 3; ++i) {
    DataLoader loader{Numbers{64}, {.batch_size = 4, .workers = 2, .device = device}};
    for (const auto& batch : loader) {
      EXPECT_EQ(batch.target.to_vector<double>().front(), 0);
      break;
    }
    for (const auto& batch : loader) EXPECT_EQ(batch.input.device(), device);
    loader.seek({.epoch = 7, .batch = 15});
    int rest = 0;
    for (const auto& batch : loader) rest += batch.target.to_vector<double>().front() == 60;
    EXPECT_EQ(rest, 1);
  }
}

}  // namespace
}  // namespace halfstep::data
