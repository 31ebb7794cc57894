// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "halfstep/core/random.h"
#include "halfstep/train/state_internal.h"

namespace halfstep::training {

Checkpoint state_of(NamedTensors weights, std::string optimizer_kind, optim::OptimizerState optimizer,
                    const amp::GradScaler* scaler, const RunState& state) {
  return {.model = "",
          .weights = std::move(weights),
          .optimizer_kind = std::move(optimizer_kind),
          .optimizer = std::move(optimizer),
          .scaler = scaler ? scaler->state_dict() : std::map<std::string, double>{},
          .loader = {},
          .random = default_generator().state(),
          .step = state.step,
          .skipped = state.skipped,
          .loss_sum = state.loss_sum,
          .loss_samples = state.loss_samples,
          .amp = "",
          .parts = state.parts,
          .part_samples = state.samples};
}

}  // namespace halfstep::training
