// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/core/philox.h"
#include "halfstep/data/loader.h"
#include "halfstep/optim/optimizer.h"
#include "halfstep/train/callback.h"

namespace halfstep::training {

/// Everything a run needs to resume bit-exactly, except the data.
struct Checkpoint {
  std::string model;           ///< name of the network
  std::string network = {};    ///< Task::network_description(); empty: none, or a file of before
  NamedTensors weights;        ///< its state_dict
  std::string optimizer_kind;  ///< such as `SGD`
  optim::OptimizerState optimizer;
  std::map<std::string, double> scaler;  ///< empty: no loss scaling
  data::LoaderState loader;
  std::uint64_t loader_seed = 0;
  std::int64_t batch_size = 0;
  std::int64_t samples = 0;  ///< of the training data
  /// Of the loader's options, what its order follows from too; none: not known, as in a file of before.
  std::optional<bool> shuffle = {}, drop_last = {};
  std::optional<std::int64_t> repeat = {};
  std::int64_t accumulate = 1;  ///< batches of a step
  PhiloxState random{};         ///< of the default generator
  std::int64_t step = 0;        ///< over the whole run
  std::int64_t skipped = 0;     ///< steps that overflowed so far
  double loss_sum = 0;          ///< over the samples of the epoch so far
  std::int64_t loss_samples = 0;
  std::optional<double> best = {};           ///< of all evaluations so far; none before the first
  std::string best_by = {};                  ///< name of the metric that `best` is of
  std::int64_t best_epoch = 0;               ///< the epoch, from 1, that it is of; 0: not known
  bool finite = true;                        ///< whether the loss of the last evaluation was
  std::string amp;                           ///< precision of the run, for a hint when it changes
  std::map<std::string, double> parts = {};  ///< of the task, sums over `part_samples` of the epoch so far
  std::int64_t part_samples = 0;             ///< all of them, unless the parts were counted in a part of the epoch
  std::vector<std::string> classes = {};     ///< names; may be empty
  std::map<std::string, std::string> recipe = {};  ///< of the run, see recipe() in train/config.h
  /// Of the loss scale, see loss_scale_rules() in train/config.h; empty: no loss scaling, or a file of before.
  std::map<std::string, double> scale_rules = {};
  std::map<std::string, std::string> data_checksums = {};  ///< see TrainConfig
  /// With TrainConfig::ema, `weights` are averages: these are the ones that training goes on with. Empty: no average.
  NamedTensors training_weights = {};
  std::int64_t ema_updates = 0;     ///< of the average
  NamedTensors communication = {};  ///< dist::PowerSGD::state_dict(); empty: gradients aren't compressed so
};

/// Where a run stood that wrote this.
RunState run_state(const Checkpoint& checkpoint);

/// Weights without a training state, and their file's metadata; everything but the tensors may be empty.
struct SavedWeights {
  NamedTensors tensors;
  std::string model;
  std::string network = {};                           ///< what it is built from, see Task::network_description()
  std::vector<std::string> classes;                   ///< names
  std::map<std::string, std::string> recipe;          ///< such as `image-size`
  std::string amp;                                    ///< precision of the run, as `O2 bf16`
  std::map<std::string, std::string> data_checksums;  ///< of the run, see TrainConfig
  std::filesystem::path file;                         ///< that they were read from
  std::int64_t step = -1;                             ///< of the run; -1: no checkpoint
};

/// Writes a checkpoint as one safetensors file, atomically: weights under their own names, so that any reader of
/// safetensors finds them; the optimizer's tensors with the prefix "optimizer.", those of communication with
/// "communication.", and of an average's run the weights in training with "training."; the rest as JSON in the
/// metadata, with a checksum (CRC-32) of all. Throws IoError.
HS_API void save_checkpoint(const std::filesystem::path& path, const Checkpoint& checkpoint);
/// Reads one; a folder stands for its `last.safetensors`, or, if a full disk or a kill came between the two,
/// `best.safetensors`. One that ranks wrote in shards is read with them. Throws IoError naming file and fault, also for
/// a safetensors file that is not a checkpoint, for a wrong checksum, and for numbers that no run produces.
HS_API Checkpoint load_checkpoint(const std::filesystem::path& path);
/// The weights of a checkpoint or of any safetensors or .pth file (io::load_weights_file); a folder stands for its
/// `best.safetensors`, or else `last.safetensors`. With a `model`, a checkpoint of another one is refused.
HS_API SavedWeights load_saved_weights(const std::filesystem::path& path, const std::string& model = "");
/// Only the weights, from a checkpoint or from any safetensors or .pth file (io::load_weights_file); a folder stands
/// for its `best.safetensors`, or else `last.safetensors`. With a `model`, a checkpoint of another one is refused.
HS_API NamedTensors load_weights(const std::filesystem::path& path, const std::string& model = "");

}  // namespace halfstep::training
