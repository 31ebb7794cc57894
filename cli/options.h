// SPDX-License-Identifier: Apache-2.0
// Flags that several verbs share.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/flags.h"
#include "cli/run_config.h"
#include "cli/verbs.h"
#include "halfstep/core/error.h"
#include "halfstep/data/dataset.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/data.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/trainer.h"

namespace halfstep::cli {

/// Device, threads and model: what every verb that computes takes.
struct CommonOptions {
  std::string model;
  std::string device = "cpu";
  int gpu = -1;
  int threads = 0;
  bool tf32 = false;
  std::string winograd;
  bool tune = false;
  bool device_given = false;
};
/// Their rows: MODEL, --device, --gpu, --threads, --tf32, --winograd and --tune.
std::vector<Flag> common_flags(CommonOptions& options);
/// Adds them.
void add_common(const Verb& verb, CommonOptions& options, bool model_required = true);
/// Checks the model (where one is named), sets the threads, the precision of float32 and Winograd's tiles, and returns
/// the device. Throws UsageError.
Device apply_common(const CommonOptions& options);

/// Most threads that --threads and HALFSTEP_THREADS take.
inline constexpr std::uint64_t kMostThreads = 4096;

/// Makes a folder with those above it. Throws IoError.
void make_folder(const std::filesystem::path& folder);

/// Whether a network is called so.
bool is_network(const std::string& name);

/// Where MODEL is the first argument and may be left out: a file or folder in its place is returned as what it is, and
/// the model becomes empty.
std::filesystem::path take_model_for_path(std::string& model);

/// A network with weights, and what their file says of them.
struct Loaded {
  training::Classifier classifier;
  training::Network network;  ///< the same, for a task
  std::int64_t num_classes = 0;
  std::vector<std::string> classes;                   ///< names; may be empty
  std::map<std::string, std::string> recipe;          ///< flags of its training; may be empty
  std::string amp = {};                               ///< precision of its training, as `O2 bf16`; may be empty
  std::map<std::string, std::string> data_checksums;  ///< of its training's data; may be empty
  std::filesystem::path file;                         ///< of the weights
  RunConfig run;                                      ///< that they are of, where that is known
  training::NetworkDescription described = {};        ///< what the network was built from, if not its name

  /// `mlp with runs/a/best.safetensors`.
  std::string text(const std::string& model) const;
  /// Lets a configuration say what the network was built from.
  void apply(training::TrainConfig& config) const;
};
/// The network with the weights of a checkpoint, of a run's folder, or of any .safetensors or .pth file; it has as many
/// classes as they have. A network that was described is built from what the checkpoint says of it, or where that says
/// nothing from `given` (--cfg) or the run's configuration. An empty `model` becomes that of the checkpoint; a
/// checkpoint of another network, or of another description than the one given, is refused. Throws IoError, and
/// UsageError for weights that don't say what they are of.
Loaded load_classifier(std::string& model, const std::filesystem::path& weights,
                       const training::NetworkDescription& given = {});

/// What a file of the same network with other weights holds: the task's description of it, its classes and flags, and
/// the size and cut of the pictures that it was measured with (null: no network of pictures).
training::Checkpoint rewritten(const std::string& model, const Loaded& loaded, const training::Task& task,
                               const training::ImageDataOptions* images, NamedTensors weights);

/// The names of classes in a file, one a line. Throws IoError unless there are so many.
std::vector<std::string> read_class_names(const std::filesystem::path& path, std::int64_t expected);

/// Where a verb takes pictures from.
struct DataPlace {
  std::filesystem::path folder;  ///< empty: the built-in digits
  std::uint64_t seed = 0;        ///< of those
  bool from_run = false;         ///< the run says so, no flag

  /// `data, as runs/a/config.yaml says`.
  std::string text(const Loaded& loaded) const;
};
/// The data of the run that the weights are of, where no flag says others. Throws IoError when they are gone.
DataPlace place_of_data(const Loaded& loaded, const std::filesystem::path& given, std::optional<std::uint64_t> seed);
/// The configuration of the network on those data: the usual one, with `images` where they aren't null.
training::TrainConfig data_config(const std::string& model, const Loaded& loaded, const DataPlace& place,
                                  const training::ImageDataOptions* images, std::int64_t batch_size, Device device);
/// Adds the --seed that it takes.
void add_data_seed(const Verb& verb, std::uint64_t& seed);
/// Throws IoError when a part of the run's data has another checksum than it had.
void check_same_data(const Loaded& loaded, const DataPlace& place, const std::string& part,
                     const std::string& checksum);

/// The flags of the images that a trained network looks at.
struct EvalImageOptions {
  training::ImageDataOptions images;
  std::function<std::size_t(const std::string& flag)> count = {};  ///< of the verb: how often a flag was given
};
/// Adds --image-size.
void add_image_size(const Verb& verb, EvalImageOptions& options);
/// Adds --image-size and --resize, for verbs that read images.
void add_image_sizes(const Verb& verb, EvalImageOptions& options);
/// Adds the --image-size of verbs that make a network with fresh weights; it stays as it is where none is given.
void add_fresh_image_size(const Verb& verb, std::int64_t& image_size);
/// The input of the network of that name. Throws UsageError for an --image-size, other than 0, of one that doesn't take
/// images.
training::NetworkInput checked_input(const std::string& model, std::int64_t image_size);
/// Where flags don't say it, the sizes that the weights were trained with, or else the network's usual ones. Throws
/// UsageError.
void resolve_images(EvalImageOptions& options, const std::string& model, const Loaded& loaded);

/// What verbs take that load a trained network.
struct TrainedOptions : CommonOptions {
  EvalImageOptions pictures;
  std::filesystem::path weights;
};
/// Adds the common flags, with a MODEL that may be left out, and --weights with the limits of its file.
void add_trained(const Verb& verb, TrainedOptions& options);

/// Throws UsageError for the first of these flags that was given, for a network of something else than images.
void refuse_image_flags(const EvalImageOptions& options, const std::string& model,
                        std::initializer_list<const char*> flags);

/// Throws IoError when the classes of weights and data can't be the same; warns when they have other names.
void check_classes(const Loaded& loaded, const std::vector<std::string>& classes, const std::filesystem::path& weights,
                   const std::filesystem::path& folder);

/// Runs `function`; an Error of it becomes a UsageError, since it speaks of arguments.
template <class F>
auto as_usage(F&& function) {
  try {
    return function();
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

}  // namespace halfstep::cli
