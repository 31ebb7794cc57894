// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "halfstep/optim/optimizer.h"
#include "halfstep/train/config.h"

namespace halfstep::training {

/// The optimizer that a configuration names, over these parameters. Without `norm_decay` the parameters of one
/// dimension or none (biases, and the weights of normalisation) are a separate group without weight decay.
HS_API std::unique_ptr<optim::Optimizer> make_optimizer(const TrainConfig& config, const NamedTensors& parameters);

}  // namespace halfstep::training
