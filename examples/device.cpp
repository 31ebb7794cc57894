// SPDX-License-Identifier: Apache-2.0
// Training on a device: where the time and the memory go, and which ops ran on the CPU instead.
//
//     device                 # the first accelerator there is, else the CPU
//     device --device sim    # the simulated one
#include <cstring>
#include <iostream>
#include <string>

#include "halfstep/halfstep.h"

using namespace halfstep;

int main(int argc, char** argv) try {
  bool quick = false;
  std::string wanted;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--device") == 0 && i + 1 < argc) wanted = argv[++i];
  }
  Device device;
  for (const DeviceInfo& d : devices()) {
    std::cout << d.device.str() << ": " << d.name << '\n';
    if (wanted.empty() && device.is_cpu()) device = d.device;
  }
  if (!wanted.empty()) device = Device(wanted);
  std::cout << "training on " << device.str() << '\n';

  manual_seed(1);
  const data::MnistDataset digits{data::make_digits(data::Split::kTrain, {.count = quick ? 3200 : 60000}),
                                  {.mean = 0.1307, .std = 0.3081}};
  // The workers pin the batches' memory, and the next batch is copied while this one trains.
  data::DataLoader loader{digits, {.batch_size = 64, .shuffle = true, .device = device}};

  nn::Sequential net{nn::Conv2d{{.in = 1, .out = 16, .kernel = {3}, .stride = {2}, .padding = 1}},
                     nn::BatchNorm2d{{.channels = 16}}, nn::ReLU{}, nn::Flatten{},
                     nn::Linear{{.in = 16 * 14 * 14, .out = 10}}};
  net.to(device);  // before the optimizer, whose state is created where the parameters are
  optim::SGD optimizer{net.parameters(), {.lr = 0.02, .momentum = 0.9}};
  amp::GradScaler scaler;

  reset_peak_memory(device);
  reset_fallback_counts();
  // Nothing in the loop waits for the device: the losses are summed there, and read once at the end.
  Tensor sum_of_losses = zeros({}, {.device = device});
  Tensor first;
  std::int64_t steps = 0;
  for (auto [images, labels] : loader) {
    optimizer.zero_grad();
    Tensor loss;
    {
      amp::Autocast autocast{{.dtype = f16}};
      loss = cross_entropy(net(images), labels);
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    loss = loss.detach();
    if (steps++ == 0) first = loss;
    sum_of_losses.add_(loss);
  }
  const double first_loss = first.item<double>();
  const double mean = sum_of_losses.item<double>() / static_cast<double>(steps);
  std::cout << steps << " steps, first loss " << first_loss << ", mean " << mean << ", scale " << scaler.get_scale()
            << '\n';

  const MemoryStats memory = memory_stats(device);
  std::cout << "memory: at most " << static_cast<double>(memory.allocated_peak) / 1e6 << " MB in tensors, "
            << static_cast<double>(memory.reserved_peak) / 1e6 << " MB reserved\n";
  for (const FallbackCount& f : fallback_counts()) {
    std::cout << "on the CPU: " << f.op << ", " << f.calls << " calls, " << f.bytes_to_host + f.bytes_to_device
              << " bytes copied\n";
  }
  return mean < first_loss ? 0 : 1;
} catch (const std::exception& e) {
  std::cerr << "device: " << e.what() << '\n';
  return 1;
}
