// SPDX-License-Identifier: Apache-2.0
// A small training in mixed precision, captured or not: for the tests of captured steps on devices.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/schedule.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::test {

/// Two linear layers.
struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 6, .out = 16}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 16, .out = 3}});
  bool lacks_kernels = false;  ///< gelu and dropout, which the simulated device lacks
  Tensor forward(const Tensor& x) const {
    const Tensor h = fc1(x);
    return fc2(lacks_kernels ? dropout(gelu(h), 0.25, true) : relu(h));
  }
};

inline Tensor host_randn(const Shape& sizes) { return randn(sizes, {.device = Device{}}); }
inline Tensor host_classes(std::int64_t n) { return randint(0, 3, {n}, {.dtype = i64, .device = Device{}}); }

using Step = std::function<Tensor(const Tensor&, const Tensor&)>;

/// The tutorial's step: mixed precision, a dynamic loss scale, a step that is skipped where gradients overflow.
inline Step scaled_step(const Net& net, const std::shared_ptr<optim::Optimizer>& optimizer,
                        const std::shared_ptr<amp::GradScaler>& scaler) {
  return [=](const Tensor& x, const Tensor& y) {
    optimizer->zero_grad();
    Tensor loss;
    {
      const amp::Autocast region({.dtype = f16});
      loss = cross_entropy(net(x), y);
    }
    scaler->scale(loss).backward();
    scaler->step(*optimizer);
    scaler->update();
    return loss;
  };
}

/// What a training was like.
struct Outcome {
  std::vector<float> losses, weights;
  double scale = 0;
  CaptureStats stats = {};
  std::string why_not = {};
};

/// Not captured; replayed kernel by kernel; replayed through graphs, where the device has them.
enum class How { plain, one_by_one, graphs };

/// Trains a Net in f16 on random data with a scale that overflows now and then.
inline Outcome trained(How how, Device device, int steps, bool lacks_kernels, bool adam) {
  manual_seed(3);
  Net net;
  net.lacks_kernels = lacks_kernels;
  net.to(device);
  std::shared_ptr<optim::Optimizer> optimizer;
  if (adam) {
    optimizer = std::make_shared<optim::AdamW>(net.parameters(), optim::AdamWOptions{.lr = 0.01});
  } else {
    optimizer = std::make_shared<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  }
  optim::ExponentialLR schedule(*optimizer, 0.97);
  // Overflows at the start, and again each time that it has grown too far.
  const auto scaler = std::make_shared<amp::GradScaler>(
      amp::GradScalerOptions{.init_scale = 0x1p24, .backoff_factor = 0.125, .growth_interval = 2});
  const Step step = scaled_step(net, optimizer, scaler);
  auto fast = capture(step);
  set_device_graphs(how == How::graphs);
  Outcome result;
  for (int i = 0; i < steps; ++i) {
    const Tensor x = host_randn({8, 6}).to(device), y = host_classes(8).to(device);
    const Tensor loss = how == How::plain ? step(x, y) : fast(x, y);
    schedule.step();
    result.losses.push_back(loss.item<float>());
  }
  for (const auto& p : net.parameters()) {
    for (const float v : p.tensor.to_vector<float>()) result.weights.push_back(v);
  }
  result.scale = scaler->get_scale();
  result.stats = fast.stats();
  result.why_not = fast.why_not();
  return result;
}

}  // namespace halfstep::test
