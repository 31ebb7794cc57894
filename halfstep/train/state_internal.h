// SPDX-License-Identifier: Apache-2.0
// The state of training, as every checkpoint of a run has it.
#pragma once

#include "halfstep/train/checkpoint.h"

namespace halfstep::training {

/// Weights, optimizer, scale, generator and results so far, without what is of the data and of the run. `optimizer` and
/// `scaler` may be null. Tensors are those of the network and the optimizer, not copies.
Checkpoint state_of(const nn::ModuleBase& network, const optim::Optimizer* optimizer, const amp::GradScaler* scaler,
                    const RunState& state);

}  // namespace halfstep::training
