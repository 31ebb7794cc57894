// SPDX-License-Identifier: Apache-2.0
// MindSpore's tutorial in its function style: level O1, a dynamic loss scale, and a train step that is captured. An
// epoch in f16 and one in float32; both curves go into mindspore_function.svg.
#include <iostream>
#include <numeric>

#include "examples/mindspore.h"
#include "examples/plot.h"

using namespace halfstep;

// The loss of every step of an epoch.
std::vector<double> losses_of_epoch(const data::MnistData& digits, DType dtype) {
  const auto net = mindspore::initialised(mindspore::Network{}, 1);
  if (dtype != f32) amp::auto_mixed_precision(net, amp::Level::O1, dtype);
  optim::SGD optimizer{net.parameters(), {.lr = 1e-2}};
  amp::DynamicLossScaler scaler{1024, 2, 50};  // scale, factor, window

  // Only the first result is differentiated: the logits come along.
  const auto forward = [&](const Tensor& images, const Tensor& labels) {
    const Tensor logits = net(images);
    return std::pair(scaler.scale(cross_entropy(logits, labels)), logits);
  };
  const auto grad_fn = value_and_grad(forward, net.parameters());

  // Python's `if is_finite:` would read it back and wait; here the optimizer looks for itself, so that the step can be
  // captured and replayed.
  auto step = capture([&](const Tensor& images, const Tensor& labels) {
    auto [value, gradients] = grad_fn(images, labels);
    const Tensor is_finite = amp::all_finite(gradients);
    optimizer.step(scaler.unscale(gradients), {.unless = logical_not(is_finite)});
    const Tensor loss = scaler.unscale(value.first);
    scaler.adjust(is_finite);
    return loss;
  });

  std::vector<double> losses;
  auto loader = mindspore::batches(digits);
  for (auto [images, labels] : loader) {
    losses.push_back(step(images, labels).item<double>());
    if ((losses.size() - 1) % 100 == 0) {
      std::cout << name(dtype) << " step " << losses.size() - 1 << ": loss " << losses.back() << '\n';
    }
  }
  std::cout << name(dtype) << ": " << step.stats().replayed << " steps replayed, scale " << scaler.scale_value()
            << '\n';
  return losses;
}

int main(int argc, char** argv) {
  const mindspore::Arguments arguments(argc, argv);
  const data::MnistData digits = arguments.digits(data::Split::kTrain);
  const auto half = plot::smooth(losses_of_epoch(digits, f16), 25),
             full = plot::smooth(losses_of_epoch(digits, f32), 25);

  std::vector<double> steps(half.size());
  std::iota(steps.begin(), steps.end(), 0);
  std::vector<plot::Curve> curves{{"float32", "#f2a65a", steps, full, 6}, {"f16, level O1", "#1f4e9c", steps, half, 2}};
  if (!arguments.data.empty()) {  // the tutorial's own digits
    curves.push_back({"tutorial, single batches", "#333333", {}, mindspore::kFunctionLosses, 1.5, true});
    for (int i = 0; i < 10; ++i) curves.back().x.push_back(100 * i);
  }
  plot::write("mindspore_function.svg", "Function style: mean loss of 51 steps", "step", "loss", curves);

  double apart = 0;
  for (std::size_t i = 0; i < half.size(); ++i) apart = std::max(apart, std::abs(half[i] - full[i]));
  std::cout << "the curves are at most " << apart << " apart\n";
  return apart < 0.1 && half.back() < half.front() ? 0 : 1;
}
