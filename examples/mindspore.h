// SPDX-License-Identifier: Apache-2.0
// What the MindSpore examples share: the data, the network, and what MindSpore's tutorial prints.
#pragma once

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "halfstep/halfstep.h"

namespace mindspore {

using namespace halfstep;

/// `--quick`: some seconds, for the tests. `--data FOLDER`: MNIST there; otherwise the built-in digits.
struct Arguments {
  bool quick = false;
  std::filesystem::path data = {};

  Arguments(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], "--quick") == 0) quick = true;
      if (std::strcmp(argv[i], "--data") == 0 && i + 1 < argc) data = argv[i + 1];
    }
  }
  data::MnistData digits(data::Split split) const {
    return data.empty() ? data::make_digits(split, {.count = quick ? 6400 : 0}) : data::load_mnist(data, split);
  }
};

/// Batches of 64 pictures [64, 1, 28, 28] and their labels, in a new order every epoch.
inline data::PipelineLoader batches(const data::MnistData& digits, std::uint64_t seed = 0) {
  return data::Pipeline{digits}
      .map({data::Rescale{1.0 / 255}, data::Normalize{{0.1307}, {0.3081}}, data::HWC2CHW{}}, data::Column::image)
      .map(data::TypeCast{i32}, data::Column::label)
      .shuffle({.seed = seed})
      .batch(64);
}

/// The tutorial's network.
struct Network : nn::Module<Network> {
  nn::Flatten flatten = child("flatten", nn::Flatten{});
  nn::Sequential dense_relu = child("dense_relu", nn::Sequential{
                                                      nn::Linear{{.in = 28 * 28, .out = 512}},
                                                      nn::ReLU{},
                                                      nn::Linear{{.in = 512, .out = 512}},
                                                      nn::ReLU{},
                                                      nn::Linear{{.in = 512, .out = 10}},
                                                  });
  Tensor forward(const Tensor& x) const { return dense_relu(flatten(x)); }
};

/// Weights and biases as MindSpore's Dense has them in the tutorial: normal with a deviation of 0.01, and zero.
template <class Net>
Net initialised(const Net& net, std::uint64_t seed) {
  manual_seed(seed);
  for (const auto& [name, tensor] : net.parameters()) {
    name.ends_with("weight") ? nn::init::normal_(tensor, 0, 0.01) : nn::init::zeros_(tensor);
  }
  return net;
}

/// The tutorial's losses, of single batches of MNIST: at steps 0, 100, … 900 of the first epoch in the function style,
/// and at steps 100, 200, … 900 with Model.
inline const std::vector<double> kFunctionLosses = {2.305, 2.290, 2.259, 2.177, 1.857,
                                                    1.398, 0.890, 0.710, 0.751, 0.483};
inline const std::vector<double> kModelLosses = {2.288, 2.261, 2.156, 1.942, 1.397, 1.045, 0.698, 0.692, 0.574};

}  // namespace mindspore
