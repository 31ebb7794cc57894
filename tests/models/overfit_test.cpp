// SPDX-License-Identifier: Apache-2.0
// ResNet-50 learns a hundred photographs by heart in 16 bits.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <numeric>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/data/image_dataset.h"
#include "halfstep/data/loader.h"
#include "halfstep/models/resnet.h"
#include "halfstep/ops/loss.h"
#include "halfstep/optim/sgd.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

constexpr std::int64_t kImages = 100, kBatch = 20, kSize = 64, kEpochs = 24;

// The first pictures of each of the five classes, whole.
data::Batch pictures() {
  const data::ImageDataset all{data::open_images(*test::data_dir() / "images/flowers5", data::Split::kTrain),
                               data::EvalTransform{.size = kSize, .resize = 0}};
  const auto classes = static_cast<std::int64_t>(all.classes().size());
  std::vector<std::int64_t> taken(static_cast<std::size_t>(classes)), indices;
  for (std::int64_t i = 0; i < all.size(); ++i) {
    if (taken[static_cast<std::size_t>(all.source().label(i))]++ < kImages / classes) indices.push_back(i);
  }
  return all.batch({.indices = indices});
}

int right(const models::ResNet& net, const data::Batch& batch) {
  const NoGrad no_grad;
  net.eval();
  int count = 0;
  for (std::int64_t i = 0; i < kImages; i += kBatch) {
    const Tensor logits = net(batch.input.slice(0, i, i + kBatch));
    const auto labels = batch.target.slice(0, i, i + kBatch).to_vector<std::int64_t>();
    const auto values = logits.to_vector<float>();
    const std::size_t classes = values.size() / labels.size();
    for (std::size_t k = 0; k < labels.size(); ++k) {
      const auto row = values.begin() + static_cast<std::ptrdiff_t>(k * classes);
      if (std::max_element(row, row + static_cast<std::ptrdiff_t>(classes)) - row == labels[k]) ++count;
    }
  }
  net.train();
  return count;
}

class OverfitSlow : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, OverfitSlow, testing::Values(bf16, f16),
                         [](const auto& dtype) { return std::string(name(dtype.param)); });

TEST_P(OverfitSlow, ResNet50LearnsAHundredPhotographs) {
  if (!test::data_dir() || !std::filesystem::exists(*test::data_dir() / "images/flowers5")) {
    GTEST_SKIP() << "no images/flowers5 in the data folder: set HALFSTEP_DATA";
  }
  const DType dtype = GetParam();
  manual_seed(1);
  const data::Batch batch = pictures();
  ASSERT_EQ(batch.input.size(0), kImages);
  const models::ResNet net = models::resnet50({.classes = 5, .zero_init_residual = true});
  net.to(MemoryFormat::channels_last);
  optim::SGD optimizer{net.parameters(), {.lr = 0.015, .momentum = 0.9}};
  amp::GradScaler scaler{{.enabled = dtype == f16}};
  data::DataLoader loader{data::TensorDataset{batch.input, batch.target}, {.batch_size = kBatch, .shuffle = true}};
  const amp::Autocast autocast{{.dtype = dtype}};
  const auto start = std::chrono::steady_clock::now();
  int steps = 0, skipped = 0, count = 0;
  for (int epoch = 0; epoch < kEpochs && count < kImages; ++epoch) {
    optimizer.set_lr(0.015 * (1 - static_cast<double>(epoch) / kEpochs));
    double sum = 0;
    for (const data::Batch& b : loader) {
      optimizer.zero_grad();
      const Tensor loss = cross_entropy(net(b.input), b.target);
      scaler.scale(loss).backward();
      if (!scaler.step(optimizer).ran()) ++skipped;
      scaler.update();
      sum += loss.item<double>();
      ++steps;
    }
    sum /= kImages / kBatch;
    if (sum < 0.3) count = right(net, batch);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%s epoch %d: loss %.4f, %d of %d right, %d steps (%d skipped), %.0f s\n", name(dtype), epoch, sum,
                count, static_cast<int>(kImages), steps, skipped, seconds.count());
    std::fflush(stdout);
  }
  EXPECT_EQ(count, kImages);
}

}  // namespace
}  // namespace halfstep
