// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/nn/module.h"
#include "halfstep/optim/optimizer.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/config.h"

namespace halfstep::training {

/// Throws IoError, naming `file` and the flag, when a run of this configuration, with this optimizer, scaler and number
/// of training samples, is not the one that the checkpoint is of: it would go on differently, or flags would do nothing
/// in silence. Warns when the precision is another one.
HS_API void check_resume(const Checkpoint& checkpoint, const TrainConfig& config, const optim::Optimizer& optimizer,
                         const amp::GradScaler& scaler, std::int64_t samples, const std::string& file);

/// Throws IoError, naming `file` and the tensor, when whole numbers of the network or the optimizer are saved as others
/// or the other way round, and for counters that no run leaves behind.
HS_API void check_state(const Checkpoint& checkpoint, const nn::ModuleBase& module, const optim::Optimizer& optimizer,
                        const std::string& file);

}  // namespace halfstep::training
