// SPDX-License-Identifier: Apache-2.0
// Three ways to say what runs in 16 bits: a level for the whole network, to_float for a module, and casts by hand.
#include <iostream>

#include "examples/mindspore.h"

using namespace halfstep;

// to_float where the members are made: the first two layers in f16, the last as the rest of the program is.
struct ToFloatNetwork : nn::Module<ToFloatNetwork> {
  nn::Flatten flatten = child("flatten", nn::Flatten{});
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 28 * 28, .out = 512}}.to_float(f16));
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 512, .out = 512}}.to_float(f16));
  nn::Linear fc3 = child("fc3", nn::Linear{{.in = 512, .out = 10}});
  Tensor forward(const Tensor& x) const { return fc3(relu(fc2(relu(fc1(flatten(x)))))); }
};

// Casts by hand: what is computed of f16 tensors is f16. Parameters stay float32, their gradients too.
struct ManualNetwork : nn::Module<ManualNetwork> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 28 * 28, .out = 512}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 512, .out = 512}});
  nn::Linear fc3 = child("fc3", nn::Linear{{.in = 512, .out = 10}});
  Tensor forward(const Tensor& image) const {
    Tensor x = flatten(image, 1).to(f16);
    x = relu(linear(x, fc1.weight.to(f16), fc1.bias.to(f16)));
    x = relu(linear(x, fc2.weight.to(f16), fc2.bias.to(f16)));
    return fc3(x.to(f32));
  }
};

// Some steps with a static scale; true when the loss fell.
template <class Net>
bool learns(const Net& net, const data::MnistData& digits, int steps) {
  std::cout << net << '\n';
  optim::SGD optimizer{net.parameters(), {.lr = 1e-2, .momentum = 0.9}};
  amp::StaticLossScaler scaler{1024};
  const auto grad_fn = value_and_grad(
      [&](const Tensor& x, const Tensor& y) { return scaler.scale(cross_entropy(net(x), y)); }, net.parameters());
  double first = 0, last = 0;
  auto loader = mindspore::batches(digits);
  for (auto [images, labels] : loader) {
    auto [scaled, gradients] = grad_fn(images, labels);
    optimizer.step(scaler.unscale(gradients));
    const Tensor loss = scaler.unscale(scaled);
    last = loss.item<double>();
    if (first == 0) first = last;
    if (--steps == 0) break;
  }
  std::cout << "loss " << first << " -> " << last << "\n\n";
  return last < first;
}

int main(int argc, char** argv) {
  const mindspore::Arguments arguments(argc, argv);
  const data::MnistData digits = arguments.digits(data::Split::kTrain);
  const int steps = arguments.quick ? 60 : 300;

  // Automatic: O2 is everything but norms in 16 bits, and float32 comes out.
  const auto automatic = mindspore::initialised(mindspore::Network{}, 1);
  amp::auto_mixed_precision(automatic, amp::Level::O2);
  const auto by_module = mindspore::initialised(ToFloatNetwork{}, 1);
  const auto by_hand = mindspore::initialised(ManualNetwork{}, 1);

  const bool all =
      learns(automatic, digits, steps) && learns(by_module, digits, steps) && learns(by_hand, digits, steps);
  return all ? 0 : 1;
}
