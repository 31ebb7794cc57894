// SPDX-License-Identifier: Apache-2.0
// Internal: checkpoints of a state that ranks divide.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

#include "halfstep/io/safetensors_internal.h"
#include "halfstep/nn/module.h"
#include "halfstep/optim/optimizer.h"
#include "halfstep/train/checkpoint.h"

namespace halfstep::training {

/// save_checkpoint() of what ranks don't divide; `shards` lists the files with the rest (io/checkpoint_shards).
void save_checkpoint(const std::filesystem::path& path, const Checkpoint& checkpoint, const nlohmann::json& shards);
/// load_checkpoint() of the tensors that this rank needs, by their names in the file.
Checkpoint load_checkpoint(const std::filesystem::path& path, const io::detail::Wanted& wanted);

/// Those of a network and its optimizer that this rank needs; empty: all. Where ranks divide the state, it is what this
/// rank owns of it, and all that isn't divided.
io::detail::Wanted needed_tensors(const nn::ModuleBase& network, const optim::Optimizer& optimizer);
/// Loads them into the network. Throws what ModuleBase::load_state_dict() throws.
void load_needed(const nn::ModuleBase& network, const optim::Optimizer& optimizer, const NamedTensors& weights);

}  // namespace halfstep::training
