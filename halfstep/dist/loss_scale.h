// SPDX-License-Identifier: Apache-2.0
// Loss scaling on several ranks: they are to have the same scale, and to skip the same steps. Where gradients are
// reduced before they are unscaled, as DataParallel does it, both follow from that: what isn't finite on one rank isn't
// on any.
#pragma once

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/dist/process_group.h"

namespace halfstep::dist {

/// Whether ranks check in every step of training::TrainStep what they otherwise check at its start: the environment has
/// HALFSTEP_DIST_DEBUG with another value than 0.
HS_API bool debug_checks();

/// Throws DistError on all ranks, which names the ranks' scales and growth counts, unless these are the same. In every
/// replay, too, of a step that is being captured, in which `scaler` has to live. All ranks call it.
HS_API void check_same_scale(const amp::GradScaler& scaler, const ProcessGroup& group);

/// Behind GradScaler::unscale_() of gradients that are not reduced yet: what one rank found counts for all, so that
/// all skip the step, as they do where gradients are reduced first. (StepResult::overflows() names a rank's own ones.)
/// PyTorch's ShardedGradScaler. Throws Error without unscale_() of this optimizer. All ranks call it.
HS_API void share_found_inf(const amp::GradScaler& scaler, const amp::OptimizerBase& optimizer,
                            const ProcessGroup& group);

}  // namespace halfstep::dist
