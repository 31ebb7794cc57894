// SPDX-License-Identifier: Apache-2.0
// Gradient accumulation: the gradients of four small batches make one step; the scale changes only between steps.
#include <cstring>
#include <iostream>

#include "halfstep/halfstep.h"

using namespace halfstep;

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  manual_seed(1);
  const data::MnistDataset digits{data::make_digits(data::Split::kTrain, {.count = quick ? 6400 : 60000}),
                                  {.flatten = true, .mean = 0.1307, .std = 0.3081}};
  data::DataLoader loader{digits, {.batch_size = 16, .shuffle = true}};
  const models::MLP net{{.hidden = 128}};
  optim::SGD optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  amp::GradScaler scaler;
  const int accumulate = 4;
  int batch = 0, steps = 0;
  double first = 0, last = 0;
  for (auto [images, labels] : loader) {
    Tensor loss;
    {
      amp::Autocast autocast{{.dtype = f16}};
      loss = cross_entropy(net(images), labels) / accumulate;  // the mean over all four
    }
    scaler.scale(loss).backward();
    last = loss.item<double>() * accumulate;
    if (batch == 0) first = last;
    if (++batch % accumulate != 0) continue;
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    ++steps;
  }
  std::cout << batch << " batches, " << steps << " steps, loss " << first << " -> " << last << '\n';
  return steps == batch / accumulate && last < first ? 0 : 1;
}
