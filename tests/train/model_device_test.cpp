// SPDX-License-Identifier: Apache-2.0
// A Model on a device whose queue the host shall not wait for: the simulated
// one.
#include <gtest/gtest.h>

#ifdef HALFSTEP_SIM_PLUGIN
#include <sstream>

#include "halfstep/data/loader.h"
#include "halfstep/nn/loss.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/loss.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/model.h"
#include "tests/runtime/on_sim.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

class ModelOnSim : public test::OnSim {};

const test::Samples& samples() {
  static const test::Samples all(100, 6, 3, 1);
  return all;
}

data::DataLoader loader() { return data::DataLoader{samples().dataset(), {.batch_size = 16}}; }

test::Regression fresh(Device device) {
  manual_seed(7);
  test::Regression net(6, 3);
  net.to(device);
  return net;
}

TEST_F(ModelOnSim, TrainsAndEvaluatesAsOnTheCpu) {
  std::vector<training::History> histories;
  std::vector<double> accuracies;
  for (const Device device : {Device{}, sim}) {
    const test::Regression net = fresh(device);
    optim::SGD optimizer{net.parameters(), {.lr = 0.3}};
    training::Model model{net,
                          {.loss = nn::CrossEntropyLoss{},
                           .optimizer = optimizer,
                           .metrics = {"accuracy"},
                           .loss_scale_manager = amp::FixedLossScaleManager{1024}}};
    std::ostringstream out;
    histories.push_back(model.fit(2, loader(), loader(), {training::LossMonitor{5, out}, training::TimeMonitor{out}}));
    EXPECT_NE(out.str().find("epoch: 1 step: 5, loss is 0.9"), std::string::npos) << out.str();
    EXPECT_NE(out.str().find("epoch: 2 step: 3, loss is "), std::string::npos) << out.str();
    accuracies.push_back(model.eval(loader())["accuracy"]);
    EXPECT_EQ(model.predict(zeros({1, 6}, {.device = Device{}})).device(), device);
  }
  // 14 steps of sums of 100 terms under 3 in another order: 2^-24 each, a
  // factor of 10 for what a step passes on.
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(histories[1]["loss"][i], histories[0]["loss"][i], 14 * 100 * 3 * 10 * 0x1p-24);
  }
  EXPECT_EQ(histories[1]["skipped"], (std::vector<double>{0, 0}));
  EXPECT_NEAR(accuracies[1], accuracies[0], 0.01);  // one sample on the edge
}

// Nobody looks at the losses before a line is due; then the message names the
// step.
TEST_F(ModelOnSim, FindsANanWhenALineIsDue) {
  for (const std::int64_t every : {4, 0}) {
    const test::Regression net = fresh(sim);
    optim::SGD optimizer{net.parameters(), {.lr = 0.3}};
    int step = 0;
    const auto loss = [&](const Tensor& output, const Tensor& target) {
      return ++step == 2 ? cross_entropy(output, target) * std::nan("") : cross_entropy(output, target);
    };
    training::Model model{
        net, {.loss = loss, .optimizer = optimizer, .loss_scale_manager = amp::FixedLossScaleManager{1024}}};
    std::ostringstream out;
    const std::string error = test::error_of<Error>([&] {
      model.train(2, loader(), {training::LossMonitor{every, out}});
    });
    EXPECT_NE(error.find("got nan in epoch 1, step 2"), std::string::npos) << error;
    EXPECT_EQ(step, every == 0 ? 7 : 4);  // the epoch's end
  }
}

// A step that is replayed writes its loss to one place.
TEST_F(ModelOnSim, RemembersLossesThatAreOverwritten) {
  std::ostringstream out;
  training::LossMonitor monitor(3, out);
  training::TrainContext context;
  context.loss = ones({}, {.device = sim});
  const auto step = [&](double loss) {
    context.step = ++context.step_in_epoch;
    context.loss.fill_(loss);
    monitor.on_step_end(context);
  };
  for (const double loss : {3, 2, 1, 4}) step(loss);
  EXPECT_EQ(out.str(), "epoch: 0 step: 3, loss is 1.0\n");
  step(std::nan(""));
  EXPECT_NE(test::error_of<Error>([&] { step(1); }).find("got nan in epoch 0, step 5"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
#endif
