// SPDX-License-Identifier: Apache-2.0
// Checkpoints of custom training loops.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <utility>
#include <variant>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/amp/loss_scaler.h"
#include "halfstep/core/random.h"
#include "halfstep/data/loader.h"
#include "halfstep/nn/module.h"
#include "halfstep/optim/ema.h"
#include "halfstep/optim/optimizer.h"
#include "halfstep/optim/schedule.h"

namespace halfstep::io {

/// An object whose state a checkpoint holds. It is referred to, not copied. Each kind has a name of its own; two of a
/// kind, and numbers, need names that tell them apart:
///
///     io::save_checkpoint("gan.safetensors", {{"g", generator}, {"d", discriminator}, {"g_adam", g_adam},
///                                             {"d_adam", d_adam}, {"steps", steps}});
class HS_API CheckpointPart {
 public:
  CheckpointPart(const nn::ModuleBase& model) : CheckpointPart("model", model) {}
  CheckpointPart(optim::Optimizer& optimizer) : CheckpointPart("optimizer", optimizer) {}
  CheckpointPart(amp::GradScaler& scaler) : CheckpointPart("scaler", scaler) {}
  CheckpointPart(amp::LossScaler& scaler) : CheckpointPart("scaler", scaler) {}
  CheckpointPart(optim::Schedule& schedule) : CheckpointPart("schedule", schedule) {}
  CheckpointPart(optim::ReduceLROnPlateau& schedule) : CheckpointPart("schedule", schedule) {}
  CheckpointPart(optim::EMA& average) : CheckpointPart("average", average) {}
  CheckpointPart(Generator& generator) : CheckpointPart("generator", generator) {}
  CheckpointPart(data::DataLoader& loader) : CheckpointPart("loader", loader) {}

  CheckpointPart(std::string name, const nn::ModuleBase& model) : name_(std::move(name)), object_(&model) {}
  CheckpointPart(std::string name, optim::Optimizer& optimizer) : name_(std::move(name)), object_(&optimizer) {}
  CheckpointPart(std::string name, amp::GradScaler& scaler) : name_(std::move(name)), object_(&scaler) {}
  CheckpointPart(std::string name, amp::LossScaler& scaler) : name_(std::move(name)), object_(&scaler) {}
  CheckpointPart(std::string name, optim::Schedule& schedule) : name_(std::move(name)), object_(&schedule) {}
  CheckpointPart(std::string name, optim::ReduceLROnPlateau& schedule) : name_(std::move(name)), object_(&schedule) {}
  CheckpointPart(std::string name, optim::EMA& average) : name_(std::move(name)), object_(&average) {}
  CheckpointPart(std::string name, Generator& generator) : name_(std::move(name)), object_(&generator) {}
  CheckpointPart(std::string name, data::DataLoader& loader) : name_(std::move(name)), object_(&loader) {}
  /// Counters of the loop: steps, epochs, a best value.
  CheckpointPart(std::string name, std::int64_t& number) : name_(std::move(name)), object_(&number) {}
  CheckpointPart(std::string name, double& number) : name_(std::move(name)), object_(&number) {}

  /// What may be a part.
  using Object =
      std::variant<const nn::ModuleBase*, optim::Optimizer*, amp::GradScaler*, amp::LossScaler*, optim::Schedule*,
                   optim::ReduceLROnPlateau*, optim::EMA*, Generator*, data::DataLoader*, std::int64_t*, double*>;
  /// Its name in the file, and the object itself.
  const std::string& name() const { return name_; }
  const Object& object() const { return object_; }

 private:
  std::string name_;
  Object object_;
};

/// Writes the states of these objects into one safetensors file, atomically: what was there is replaced when the new
/// file is complete. Any of them may be left out, in any order. Call it between steps (after GradScaler::update).
///
///     io::save_checkpoint("run.safetensors", {net, optimizer, scaler, schedule, default_generator(), loader});
///
/// The network's tensors have their own names, so that every reader of safetensors, `halfstep eval --weights` and
/// load_weights_file() find them; the optimizer's are prefixed by `optimizer.`. A checksum covers everything.
///
/// Where ranks divide an optimizer's state (dist::ZeroRedundancy), all of them call it, with the same path in a folder
/// that they share, and the same parts. Each writes what only it has into a file beside the checkpoint, such as
/// `run.3.rank1-of-2.safetensors`; the checkpoint, with the rest, takes its place when all of these are there, and
/// those of the one before are removed. Afterwards it is read like any other, by any number of ranks. (On a rank to
/// which consolidate_state_dict() has brought the whole state, that rank alone calls it and writes one file.)
///
/// Throws IoError if it can't be written, and Error for no parts, two of one name, an empty name or one with characters
/// other than letters, digits, `_` and `-`, and for tensors of two parts that would have the same name.
HS_API void save_checkpoint(const std::filesystem::path& path, std::initializer_list<CheckpointPart> parts);

/// Restores the states of these objects from such a file, or from a checkpoint of `halfstep train` or
/// training::ModelCheckpoint (which have no schedule: their rates follow from the number of steps). A loop that goes on
/// from there computes the same bits as one that was never interrupted, if it was built in the same way. Parts of the
/// file that are not asked for are ignored.
///
/// Throws IoError, naming file and fault, for a file that is no checkpoint, is damaged, is of another version or holds
/// kinds of parts that this version doesn't know; for a part that the file doesn't have; and for one that doesn't fit:
/// another network, kind of optimizer or of schedule, a loader with another data set size, batch size, order or seed.
/// Then no object is changed.
HS_API void load_checkpoint(const std::filesystem::path& path, std::initializer_list<CheckpointPart> parts);

}  // namespace halfstep::io
