// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/nn/module.h"
#include "halfstep/optim/optimizer.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/config.h"
#include "halfstep/train/task.h"

namespace halfstep::training {

/// Throws IoError, naming `file` and the flag, if the checkpoint is not from a run with this configuration, optimizer,
/// scaler and number of training samples: the run would continue differently, or flags would silently have no effect.
/// Warns if the precision differs.
HS_API void check_resume(const Checkpoint& checkpoint, const TrainConfig& config, const optim::Optimizer& optimizer,
                         const amp::GradScaler& scaler, std::int64_t samples, const std::string& file);

/// Throws IoError, naming `file` and what describes the task's network, if the checkpoint is of another one.
HS_API void check_network(const Checkpoint& checkpoint, const Task& task, const TrainConfig& config,
                          const std::string& file);

/// Throws IoError, naming `file` and the tensor, if integers of the network or the optimizer are saved as
/// floating-point values or vice versa, and for counters that no run produces.
HS_API void check_state(const Checkpoint& checkpoint, const nn::ModuleBase& module, const optim::Optimizer& optimizer,
                        const std::string& file);

}  // namespace halfstep::training
