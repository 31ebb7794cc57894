// SPDX-License-Identifier: Apache-2.0
// Internal: the values of a step on several ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "halfstep/dist/data_parallel.h"
#include "halfstep/train/train_step.h"

namespace halfstep::training {

/// Losses, parts and what StepValues::count_later counts, which is counted now, become those of all ranks. `own`: this
/// rank's samples in each batch; `device`: the network's.
void merge_ranks(StepValues& values, const std::vector<std::int64_t>& own, const dist::DataParallelBase& parallel,
                 Device device);

}  // namespace halfstep::training
