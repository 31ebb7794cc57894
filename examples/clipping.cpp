// SPDX-License-Identifier: Apache-2.0
// Gradient clipping under a scaler: gradients are unscaled first, so that the norm means what it says.
#include <cstring>
#include <iostream>

#include "halfstep/halfstep.h"

using namespace halfstep;

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  manual_seed(1);
  const data::MnistDataset digits{data::make_digits(data::Split::kTrain, {.count = quick ? 6400 : 60000}),
                                  {.flatten = true, .mean = 0.1307, .std = 0.3081}};
  data::DataLoader loader{digits, {.batch_size = 64, .shuffle = true}};
  const models::MLP net{{.hidden = 128}};
  optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
  amp::GradScaler scaler;
  const double max_norm = 0.5;
  double largest = 0, after = 0;
  for (auto [images, labels] : loader) {
    optimizer.zero_grad();
    Tensor loss;
    {
      amp::Autocast autocast{{.dtype = f16}};
      loss = cross_entropy(net(images), labels);
    }
    scaler.scale(loss).backward();
    // One pass over all gradients unscales them, looks for infinities and gives the norm.
    const Tensor norm = scaler.unscale_(optimizer, {.norm = true});
    optim::clip_grad_norm_(net.parameters(), max_norm, {.norm = norm});
    const auto step = scaler.step(optimizer);
    scaler.update();
    if (step.ran()) {
      largest = std::max(largest, norm.item<double>());
      after = std::max(after, optim::grad_norm(net.parameters()).item<double>());
    }
  }
  std::cout << "largest norm before clipping " << largest << ", after " << after << '\n';
  return largest > max_norm && after <= max_norm * (1 + 1e-4) ? 0 : 1;
}
