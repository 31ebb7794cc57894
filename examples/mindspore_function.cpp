// SPDX-License-Identifier: Apache-2.0
// MindSpore's tutorial in its function style: level O2, a dynamic loss scale, and a train step that is captured. An
// epoch in f16 and one in float32; both curves go into mindspore_function.svg.
#include <cstdio>
#include <numeric>

#include "examples/mindspore.h"
#include "examples/plot.h"

using namespace halfstep;

// The loss of every step of an epoch.
std::vector<double> losses_of_epoch(const data::MnistData& digits, DType dtype) {
  const auto net = mindspore::initialised(mindspore::Network{}, 1);
  if (dtype != f32) amp::auto_mixed_precision(net, amp::Level::O2, dtype);
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
  std::printf("%s:\n", name(dtype));
  for (auto [images, labels] : loader) {
    const int batch = static_cast<int>(losses.size());
    losses.push_back(step(images, labels).item<double>());
    if (batch % 100 == 0) std::printf("loss: %f [%3d/%3d]\n", losses.back(), batch, static_cast<int>(loader.size()));
  }
  std::printf("%d steps replayed, scale %g\n\n", static_cast<int>(step.stats().replayed), scaler.scale_value());
  return losses;
}

int main(int argc, char** argv) {
  const mindspore::Arguments arguments(argc, argv);
  const data::MnistData digits = arguments.digits(data::Split::kTrain);
  const auto half = plot::smooth(losses_of_epoch(digits, f16), 25),
             full = plot::smooth(losses_of_epoch(digits, f32), 25);

  std::vector<double> steps(half.size());
  std::iota(steps.begin(), steps.end(), 0);
  std::vector<plot::Curve> curves{{"float32", "#f2a65a", steps, full, 6}, {"f16, level O2", "#1f4e9c", steps, half, 2}};
  if (!arguments.data.empty()) {  // the tutorial's own digits
    curves.push_back({"tutorial, single batches", "#333333", {}, mindspore::kFunctionLosses, 1.5, true});
    for (int i = 0; i < 10; ++i) curves.back().x.push_back(100 * i);
  }
  plot::write("mindspore_function.svg", "Function style: mean loss of 51 steps", "step", "loss", curves);

  double apart = 0;
  for (std::size_t i = 0; i < half.size(); ++i) apart = std::max(apart, std::abs(half[i] - full[i]));
  std::printf("the curves are at most %.4f apart\n", apart);
  return apart < 0.1 && half.back() < half.front() ? 0 : 1;
}
