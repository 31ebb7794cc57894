// SPDX-License-Identifier: Apache-2.0
// The state of training, as every checkpoint of a run has it.
#pragma once

#include "halfstep/train/checkpoint.h"

namespace halfstep::training {

/// Weights, optimizer, scale, generator and results so far, without what is of the data and of the run. `scaler` may be
/// null. Tensors are those that are given, not copies.
Checkpoint state_of(NamedTensors weights, std::string optimizer_kind, optim::OptimizerState optimizer,
                    const amp::GradScaler* scaler, const RunState& state);

}  // namespace halfstep::training
