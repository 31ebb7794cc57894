// SPDX-License-Identifier: Apache-2.0
// The MNIST network of the tutorials on several ranks, beside one process on the whole batches.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/data/loader.h"
#include "halfstep/dist/data_parallel.h"
#include "halfstep/models/mlp.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/sgd.h"
#include "tests/ranks/networks.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

using test::gradients_of;
using test::part_of;
using test::relative_error;
using test::values_of;
using test::world;

constexpr int kSteps = 50;
constexpr std::int64_t kBatch = 96;  // 2, 3 and 4 ranks divide it

data::MnistDataset mnist(data::Split split) {
  return data::MnistDataset{data::load_mnist(*test::data_dir() / "mnist", split), {.mean = 0.1307, .std = 0.3081}};
}

double accuracy(const models::MLP& net, const data::Dataset& images) {
  const NoGrad no_grad;
  data::DataLoader loader{std::shared_ptr<const data::Dataset>(&images, [](auto*) {}), {.batch_size = 1000}};
  double right = 0;
  for (const auto& [x, y] : loader) right += sum(eq(argmax(net(x), 1), y).to(f32)).item<double>();
  return right / static_cast<double>(images.size());
}

TEST(MnistSteps, AreThoseOfOneProcess) {
  if (!test::data_dir() || !data::has_mnist(*test::data_dir() / "mnist", data::Split::kTrain)) {
    GTEST_SKIP() << "no mnist in the data folder: set HALFSTEP_DATA";
  }
  const data::MnistDataset train = mnist(data::Split::kTrain), images = mnist(data::Split::kTest);
  for (const bool compressed : {false, true}) {
    manual_seed(3);
    const models::MLP net, alone = nn::clone(net);
    dist::DataParallelOptions options;
    if (compressed) options.hook = dist::compress_hook(f16);
    dist::DataParallel parallel(net, world(), options);
    optim::SGD sgd(net.parameters(), {.lr = 0.05, .momentum = 0.9}),
        one(alone.parameters(), {.lr = 0.05, .momentum = 0.9});
    data::DataLoader batches{train, {.batch_size = kBatch, .shuffle = true, .seed = 5}};
    int step = 0;
    for (const auto& [x, y] : batches) {
      if (step == kSteps) break;
      sgd.zero_grad();
      one.zero_grad();
      cross_entropy(parallel(part_of(x)), part_of(y)).backward();
      cross_entropy(alone(x), y).backward();
      if (step == 0) {
        EXPECT_LT(relative_error(values_of(gradients_of(net)), values_of(gradients_of(alone))),
                  compressed ? 2e-3 : 5e-6);
      }
      sgd.step();
      one.step();
      ++step;
    }
    EXPECT_EQ(step, kSteps);
    EXPECT_EQ(dist::first_difference(net, world()), "") << "replicas";
    const double apart = relative_error(values_of(net.parameters()), values_of(alone.parameters()));
    const double on_ranks = accuracy(net, images), of_one = accuracy(alone, images);
    if (world().rank() == 0) {
      std::printf("%s: weights apart by %.2e, accuracy %.4f and %.4f\n", compressed ? "f16" : "f32", apart, on_ranks,
                  of_one);
    }
    if (!compressed) {
      EXPECT_LT(apart, 5e-6);
    }
    EXPECT_GT(of_one, 0.88);
    // The binomial deviation of what 10,000 images say of a network.
    EXPECT_NEAR(on_ranks, of_one, compressed ? std::sqrt(of_one * (1 - of_one) / 1e4) : 2e-4);
  }
}

}  // namespace
}  // namespace halfstep
