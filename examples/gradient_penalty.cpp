// SPDX-License-Identifier: Apache-2.0
// A gradient penalty: the norm of the loss's gradient is part of the loss, so the backward pass is itself
// differentiated, under autocast.
#include <cmath>
#include <cstring>
#include <iostream>

#include "halfstep/halfstep.h"

using namespace halfstep;

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  manual_seed(1);
  const data::MnistDataset digits{data::make_digits(data::Split::kTrain, {.count = quick ? 3200 : 12800}),
                                  {.flatten = true, .mean = 0.1307, .std = 0.3081}};
  data::DataLoader loader{digits, {.batch_size = 64, .shuffle = true}};
  const models::MLP net{{.hidden = 128}};
  optim::SGD optimizer{net.parameters(), {.lr = 0.05}};
  amp::GradScaler scaler;
  double first = 0, last = 0, penalty_value = 0;
  for (auto [images, labels] : loader) {
    optimizer.zero_grad();
    Tensor loss;
    {
      amp::Autocast autocast{{.dtype = f16}};
      loss = cross_entropy(net(images), labels);
    }
    // The gradients of the scaled loss are scaled; divide by hand, outside autocast, before their norm is taken.
    std::vector<Tensor> parameters;
    for (const auto& p : net.parameters()) parameters.push_back(p.tensor);
    const auto scaled = grad({scaler.scale(loss)}, parameters, {.create_graph = true});
    const double inverse = 1 / scaler.get_scale();
    Tensor total;
    {
      amp::Autocast autocast{{.dtype = f16}};
      Tensor squares;
      for (const Tensor& g : scaled) {
        const Tensor unscaled = g * inverse;
        const Tensor part = sum(unscaled * unscaled);
        squares = squares.defined() ? squares + part : part;
      }
      const Tensor penalty = sqrt(squares);
      penalty_value = penalty.item<double>();
      total = loss + 0.1 * penalty;
    }
    scaler.scale(total).backward();
    scaler.step(optimizer);
    scaler.update();
    last = loss.item<double>();
    if (first == 0) first = last;
  }
  std::cout << "loss " << first << " -> " << last << ", gradient norm at the end " << penalty_value << '\n';
  return last < first && std::isfinite(penalty_value) ? 0 : 1;
}
