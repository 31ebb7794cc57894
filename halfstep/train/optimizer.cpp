// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/optimizer.h"

#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"

namespace halfstep::training {
namespace {

template <class T, class Options>
std::unique_ptr<optim::Optimizer> make(const NamedTensors& parameters, Options options, bool norm_decay) {
  if (norm_decay || options.weight_decay == 0) return std::make_unique<T>(parameters, options);
  NamedTensors decaying, others;
  for (const NamedTensor& p : parameters) (p.tensor.dim() > 1 ? decaying : others).push_back(p);
  if (others.empty()) return std::make_unique<T>(decaying, options);
  Options without = options;
  without.weight_decay = 0;
  if (decaying.empty()) return std::make_unique<T>(others, without);
  auto optimizer = std::make_unique<T>(decaying, options);
  optimizer->add_param_group(others, without);
  return optimizer;
}

}  // namespace

std::unique_ptr<optim::Optimizer> make_optimizer(const TrainConfig& c, const NamedTensors& parameters) {
  if (c.optimizer == "sgd") {
    return make<optim::SGD>(
        parameters,
        optim::SGDOptions{.lr = c.lr, .momentum = c.momentum, .weight_decay = c.weight_decay, .nesterov = c.nesterov},
        c.norm_decay);
  }
  if (c.optimizer == "adam") {
    return make<optim::Adam>(parameters, optim::AdamOptions{.lr = c.lr, .weight_decay = c.weight_decay}, c.norm_decay);
  }
  return make<optim::AdamW>(parameters, optim::AdamWOptions{.lr = c.lr, .weight_decay = c.weight_decay}, c.norm_decay);
}

}  // namespace halfstep::training
