// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/random.h"
#include "halfstep/train/state_internal.h"

namespace halfstep::training {

Checkpoint state_of(const nn::ModuleBase& network, const optim::Optimizer* optimizer, const amp::GradScaler* scaler,
                    const RunState& state) {
  return {.model = "",
          .weights = network.state_dict(),
          .optimizer_kind = optimizer ? optimizer->kind() : "",
          .optimizer = optimizer ? optimizer->state_dict() : optim::OptimizerState{},
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
