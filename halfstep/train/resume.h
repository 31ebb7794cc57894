// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/optim/optimizer.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/config.h"

namespace halfstep::train {

/// Throws IoError, naming `file` and the flag, when a run of this configuration, with this optimizer, scaler and number
/// of training samples, is not the one that the checkpoint is of: it would go on differently, or flags would do nothing
/// in silence. Warns when the precision is another one.
HS_API void check_resume(const Checkpoint& checkpoint, const TrainConfig& config, const optim::Optimizer& optimizer,
                         const amp::GradScaler& scaler, std::int64_t samples, const std::string& file);

}  // namespace halfstep::train
