// SPDX-License-Identifier: Apache-2.0
// One network trained by several processes, each on its part of every batch, in 16 bits with a gradient scaler.
//
//     mpirun -n 2 data_parallel
//     data_parallel                # one process: the same loop
#include <cstring>
#include <iostream>

#include "halfstep/halfstep.h"

using namespace halfstep;

int main(int argc, char** argv) try {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  dist::ProcessGroup group = dist::ProcessGroup::init();
  const bool first = group.rank() == 0;
  if (first) std::cout << group.size() << " ranks, " << group.library() << '\n';

  manual_seed(1);
  const data::MnistDataset digits{data::make_digits(data::Split::kTrain, {.count = quick ? 3200 : 60000}),
                                  {.flatten = true, .mean = 0.1307, .std = 0.3081}};
  // The batch size is that of all ranks together; a rank's loader returns its part of each batch.
  data::DataLoader loader{digits, {.batch_size = 64, .shuffle = true, .rank = group.rank(), .ranks = group.size()}};

  // All ranks start from rank 0's weights. Gradients are sent in 16 bits.
  dist::DataParallel net{models::MLP(), group, {.hook = dist::compress_hook(bf16)}};
  optim::SGD optimizer{net.module().parameters(), {.lr = 0.05, .momentum = 0.9}};
  amp::GradScaler scaler;
  dist::broadcast_state(scaler, group);

  double first_loss = 0, last_loss = 0;
  for (const data::Batch& batch : loader) {
    optimizer.zero_grad();
    Tensor loss;
    {
      amp::Autocast autocast{{.dtype = f16}};
      loss = cross_entropy(net(batch.input), batch.target);
    }
    scaler.scale(loss).backward();  // when it returns, gradients are the mean over the ranks
    scaler.step(optimizer);         // which all ranks make, or all skip
    scaler.update();

    const Tensor mean = loss.detach().to(f32);
    group.all_reduce(mean, dist::ReduceOp::mean).wait();
    last_loss = mean.item<double>();
    if (first_loss == 0) first_loss = last_loss;
  }
  const std::string difference = dist::first_difference(net.module(), group);
  if (first) {
    std::cout << loader.size() << " steps, loss " << first_loss << " to " << last_loss << ", "
              << static_cast<double>(group.stats().bytes_sent) / 1e6 << " MB sent by rank 0\n"
              << (difference.empty() ? "the networks of all ranks are bit-identical"
                                     : "the networks differ, first in " + difference)
              << '\n';
  }
  return last_loss < first_loss && difference.empty() ? 0 : 1;
} catch (const std::exception& e) {
  std::cerr << "data_parallel: " << e.what() << '\n';
  return 1;
}
