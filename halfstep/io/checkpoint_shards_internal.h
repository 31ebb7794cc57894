// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a state that ranks divide. Each rank writes what only it has into a file of its own, a shard, beside
// the checkpoint; when all of them are on the disk, the checkpoint itself is written, which has the rest and lists them
// with their checksums. Until then the one before it is in force, whose shards have other names.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/io/safetensors.h"
#include "halfstep/io/safetensors_internal.h"
#include "halfstep/io/weights.h"
#include "halfstep/optim/optimizer.h"

namespace halfstep::io {

/// `last.120.rank1-of-2.safetensors` for `last.safetensors` and the tag `120`, in the same folder.
std::filesystem::path shard_path(const std::filesystem::path& checkpoint, const std::string& tag, int rank, int ranks);
/// A tag for the shards of the next checkpoint at that place: `number`, or else the one after that of the checkpoint
/// which is there; never that one's own.
std::string next_shard_tag(const std::filesystem::path& checkpoint, std::optional<std::int64_t> number);

/// Writes a shard atomically, with a checksum of each tensor. `weights`: whether some are the network's. Returns its
/// entry in the checkpoint's list. Throws IoError.
nlohmann::json write_shard(const std::filesystem::path& path, const NamedTensors& tensors, bool weights);

/// Behind the writing of shards, all processes: those of each file, in the order of processes. `written` gives this
/// process's, one a file. Where one fails, all do: with its own error, or with an IoError that names the rank.
std::vector<nlohmann::json> gather_shards(optim::StateSharding& sharding,
                                          const std::function<std::vector<nlohmann::json>()>& written);

/// Throws IoError where files of a list aren't beside the checkpoint: they were written in another folder of that name.
void check_shards(const std::filesystem::path& checkpoint, const nlohmann::json& shards);

/// What this process alone has of an optimizer's divided state, without whole_state_of_groups().
NamedTensors own_state(const optim::Optimizer& optimizer);
/// Takes out of a network's state what is with the owners only; what this process owns of that is returned.
NamedTensors take_owned(NamedTensors& weights, const optim::StateSharding& sharding);

/// Which tensors of a checkpoint are read: all, or those of files that have some of the network's.
enum class Portion : std::uint8_t { all, weights };
/// load_safetensors() of a file that may be a checkpoint. One with shards comes back merged, with the contents that it
/// would have as one file: neither the number of ranks that wrote it nor what they divided makes a difference. It may
/// be replaced meanwhile. With `wanted`, other tensors are left out: no memory is taken for them, and of shards their
/// bytes aren't read; what a checksum is of is compared all the same. Throws IoError, naming the shard, where one is
/// missing, cut short, damaged or of another checkpoint, and for a shard in place of the checkpoint.
Safetensors load_checkpoint_file(const std::filesystem::path& path, const ReadLimits& limits, Portion which,
                                 const detail::Wanted& wanted = {});

/// load_weights_file() of `which`.
WeightsFile load_weights_file(const std::filesystem::path& path, const ReadLimits& limits, Portion which);

/// Files beside a checkpoint, there or not, that have names of its shards: those of its list, and what was left by
/// writers that were killed.
std::vector<std::filesystem::path> shards_beside(const std::filesystem::path& checkpoint);
/// Removes those that aren't in `shards`, a checkpoint's list, unless someone is writing them.
void remove_other_shards(const std::filesystem::path& checkpoint, const nlohmann::json& shards);
/// Removes those that the checkpoint which is there doesn't list.
void remove_stale_shards(const std::filesystem::path& checkpoint);

}  // namespace halfstep::io
