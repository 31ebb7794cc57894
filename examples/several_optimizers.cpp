// SPDX-License-Identifier: Apache-2.0
// Two networks, two losses that both depend on both, two optimizers and one scaler.
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
  const models::MLP a{{.hidden = 64}}, b{{.hidden = 32}};
  optim::SGD first{a.parameters(), {.lr = 0.05}};
  optim::Adam second{b.parameters(), {.lr = 1e-3}};
  amp::GradScaler scaler;
  double begin = 0, end = 0;
  for (auto [images, labels] : loader) {
    first.zero_grad();
    second.zero_grad();
    Tensor loss0, loss1;
    {
      amp::Autocast autocast{{.dtype = f16}};
      const Tensor x = a(images), y = b(images);
      loss0 = cross_entropy(2 * x + 3 * y, labels);
      loss1 = cross_entropy(3 * x - 5 * y, labels);
    }
    // The graph is shared, so the first pass keeps it.
    scaler.scale(loss0).backward({}, {.retain_graph = true});
    scaler.scale(loss1).backward();
    scaler.unscale_(first);  // to look at or change the gradients of one network
    // Each optimizer skips by its own gradients; the scale follows both, once.
    scaler.step(first);
    scaler.step(second);
    scaler.update();
    end = loss0.item<double>() + loss1.item<double>();
    if (begin == 0) begin = end;
  }
  std::cout << "losses " << begin << " -> " << end << ", scale " << scaler.get_scale() << '\n';
  return end < begin ? 0 : 1;
}
