// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/optimizer.h"

#include <array>

#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"

namespace halfstep::training {
namespace {

// Weights; then, if they are apart, biases and the weights of norms; then, if those are too, biases alone.
template <class T, class Options>
std::unique_ptr<optim::Optimizer> make(const NamedTensors& parameters, Options options, bool norm_decay,
                                       bool biases_apart) {
  if (!biases_apart && (norm_decay || options.weight_decay == 0)) return std::make_unique<T>(parameters, options);
  std::array<NamedTensors, 3> groups;
  for (const NamedTensor& p : parameters) {
    const bool bias = biases_apart && (p.name == "bias" || p.name.ends_with(".bias"));
    groups[p.tensor.dim() > 1 ? 0 : bias ? 2 : 1].push_back(p);
  }
  std::unique_ptr<T> optimizer;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].empty()) continue;
    Options own = options;
    if (g > 0 && !norm_decay) own.weight_decay = 0;
    if (!optimizer) {
      optimizer = std::make_unique<T>(groups[g], own);
    } else {
      optimizer->add_param_group(groups[g], own);
    }
  }
  return optimizer;
}

}  // namespace

std::unique_ptr<optim::Optimizer> make_optimizer(const TrainConfig& c, const NamedTensors& parameters) {
  // Decay is in the units of a batch of the nominal size.
  const double decay = c.weight_decay * (c.nominal_batch > 0 ? static_cast<double>(c.batch_size * c.accumulate) /
                                                                   static_cast<double>(c.nominal_batch)
                                                             : 1);
  const bool apart = c.warmup_bias_lr > 0;
  if (c.optimizer == "sgd") {
    return make<optim::SGD>(
        parameters,
        optim::SGDOptions{.lr = c.lr, .momentum = c.momentum, .weight_decay = decay, .nesterov = c.nesterov},
        c.norm_decay, apart);
  }
  if (c.optimizer == "adam") {
    return make<optim::Adam>(parameters, optim::AdamOptions{.lr = c.lr, .weight_decay = decay}, c.norm_decay, apart);
  }
  return make<optim::AdamW>(parameters, optim::AdamWOptions{.lr = c.lr, .weight_decay = decay}, c.norm_decay, apart);
}

}  // namespace halfstep::training
