// SPDX-License-Identifier: Apache-2.0
// Training in mixed precision: autocast around forward pass and loss, a scaler around the backward pass.
#include <cstring>
#include <iostream>

#include "halfstep/halfstep.h"

using namespace halfstep;

struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 784, .out = 512}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 512, .out = 10}});
  Tensor forward(const Tensor& x) const { return fc2(relu(fc1(flatten(x, 1)))); }
};

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  manual_seed(1);
  const data::MnistDataset digits{data::make_digits(data::Split::kTrain, {.count = quick ? 6400 : 60000}),
                                  {.mean = 0.1307, .std = 0.3081}};
  data::DataLoader loader{digits, {.batch_size = 64, .shuffle = true}};
  Net net;
  optim::SGD optimizer{net.parameters(), {.lr = 0.05, .momentum = 0.9}};
  amp::GradScaler scaler;
  double mean = 0;
  for (int epoch = 1; epoch <= 2; ++epoch) {
    mean = 0;
    for (auto [images, labels] : loader) {
      optimizer.zero_grad();
      Tensor loss;
      {
        amp::Autocast autocast{{.dtype = f16}};
        loss = cross_entropy(net(images), labels);
      }
      scaler.scale(loss).backward();
      const auto step = scaler.step(optimizer);
      scaler.update();
      if (!step.ran()) std::cerr << "overflow in " << step.first_overflow() << '\n';
      mean += loss.item<double>() / static_cast<double>(loader.size());
    }
    std::cout << "epoch " << epoch << ": loss " << mean << ", scale " << scaler.get_scale() << '\n';
  }
  return mean < 1.0 ? 0 : 1;
}
