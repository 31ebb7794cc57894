// SPDX-License-Identifier: Apache-2.0
// MindSpore's tutorial with Model: level O2, a fixed loss scale, LossMonitor and accuracy. The same in float32 beside
// it; the first epoch of both goes into mindspore_model.svg.
#include <iostream>
#include <numeric>

#include "examples/mindspore.h"
#include "examples/plot.h"

using namespace halfstep;

struct Run {
  std::vector<double> losses;
  double accuracy;
};

Run run(const mindspore::Arguments& arguments, amp::Level level, int epochs) {
  const auto net = mindspore::initialised(mindspore::Network{}, 1);
  optim::SGD optimizer{net.parameters(), {.lr = 1e-2}};
  std::optional<amp::LossScaleManager> manager;
  if (level != amp::Level::O0) manager = amp::FixedLossScaleManager{};  // 128

  training::Model model{net,
                        {.loss = nn::CrossEntropyLoss{},
                         .optimizer = optimizer,
                         .metrics = {training::Accuracy{}},
                         .amp_level = level,
                         .loss_scale_manager = manager}};
  std::vector<double> losses;
  const training::Lambda record{
      {.on_step_end = [&](training::TrainContext& c) { losses.push_back(c.loss.item<double>()); }}};
  const auto training = arguments.digits(data::Split::kTrain), test = arguments.digits(data::Split::kTest);
  model.train(epochs, mindspore::batches(training), {training::LossMonitor{100}, training::TimeMonitor{}, record});
  const double accuracy = model.eval(mindspore::batches(test))["accuracy"];
  std::cout << name(level) << ": accuracy " << accuracy << "\n\n";
  return {std::move(losses), accuracy};
}

int main(int argc, char** argv) {
  const mindspore::Arguments arguments(argc, argv);
  const int epochs = arguments.quick ? 1 : 10;
  const Run half = run(arguments, amp::Level::O2, epochs), full = run(arguments, amp::Level::O0, epochs);

  const auto f16_curve = plot::smooth(half.losses, 25), f32_curve = plot::smooth(full.losses, 25);
  std::vector<double> steps(half.losses.size() / static_cast<std::size_t>(epochs));  // the first epoch's
  std::iota(steps.begin(), steps.end(), 1);
  std::vector<plot::Curve> curves{{"float32", "#f2a65a", steps, f32_curve, 6},
                                  {"f16, level O2", "#1f4e9c", steps, f16_curve, 2}};
  if (!arguments.data.empty()) {  // the tutorial's own digits
    curves.push_back({"tutorial, single batches", "#333333", {}, mindspore::kModelLosses, 1.5, true});
    for (int i = 1; i < 10; ++i) curves.back().x.push_back(100 * i);
  }
  plot::write("mindspore_model.svg", "Model, first epoch: mean loss of 51 steps", "step", "loss", curves);
  return std::abs(half.accuracy - full.accuracy) < 0.05 && f16_curve.back() < f16_curve.front() ? 0 : 1;
}
