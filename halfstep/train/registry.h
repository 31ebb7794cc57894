// SPDX-License-Identifier: Apache-2.0
// What can be trained by name: networks, the data that they take, and the tasks that they are trained for. The program
// and the loop know them from here only: a new one is registered in one place and needs no branch elsewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/data/dataset.h"
#include "halfstep/data/transforms.h"
#include "halfstep/nn/module.h"
#include "halfstep/train/config.h"
#include "halfstep/train/task.h"
#include "halfstep/train/verdicts.h"

namespace halfstep::training {

struct NetworkKind;

/// The data of a run.
struct RunData {
  std::shared_ptr<const data::Dataset> training;            ///< null where only an evaluation was asked for
  std::shared_ptr<const data::Dataset> test;                ///< for the evaluations
  std::int64_t num_classes = 0;                             ///< 0: not that kind of data
  std::vector<std::string> classes = {};                    ///< names; may be empty
  std::map<std::string, std::string> checksums = {};        ///< see TrainConfig::data_checksums
  std::vector<std::function<std::int64_t()>> damaged = {};  ///< samples that could not be read so far
};

/// A kind of data, such as `digits` or `cifar`.
struct DataKind {
  std::string name;  ///< that networks give
  /// Reads the data that a configuration names (data, limit, seed, images...); without `training` the test part only.
  /// Throws IoError.
  std::function<RunData(const TrainConfig& config, bool training)> load;
  /// Throws Error, naming the flag, for a configuration that can't be one of such data; called before load().
  std::function<void(const TrainConfig& config)> check = {};
  /// Fills in the usual settings of a run on such data. `device` is set, and `batch_size` and `images.image_size` where
  /// they are given (otherwise 0 and the network's); by default those of TrainConfig.
  std::function<void(TrainConfig& config)> usual = {};
  std::string flags = {};  ///< the flags that it takes beside those of all kinds, as Flag::data says: `images`
  bool images = false;     ///< samples are colour pictures [3, S, S] with the configuration's image size S
  /// What is read where a configuration names no data, as messages call it: `the built-in digits`; empty: it has to.
  std::string built_in = {};
  bool lines = true;  ///< a run prints lines as the usual ImageNet scripts do, every 10 steps unless told otherwise
  /// Of images: how colours are normalised; the rest follows from the configuration.
  data::TrainTransform train_transform = {};
  data::EvalTransform eval_transform = {};
  std::optional<PictureForm> pictures = {};  ///< how samples are drawn; none: they aren't
  /// A batch of random samples for a network that the configuration names, on the CPU, as those of `load`: for
  /// benchmarks, summaries and traces, and where only the sizes matter (example_input()); `image_size` may be 0. May be
  /// empty.
  std::function<data::Batch(const NetworkKind& network, std::int64_t batch_size, std::int64_t image_size)> random = {};
};

/// A network that was made.
struct Network {
  std::shared_ptr<const nn::ModuleBase> module;       ///< parameters, state and mode
  std::function<Tensor(const Tensor&)> forward = {};  ///< of networks with one input and one output; may be empty
  std::string name = {};                              ///< that it is registered under
  /// The results of the module's forward() in evaluations, from something faster in its place such as an
  /// infer::Session; empty: the module itself.
  std::function<std::vector<Tensor>(const Tensor&)> outputs = {};

  /// The network as what a task needs it to be: its type or a base of it. Throws Error for another one.
  template <class M>
  std::shared_ptr<const M> as() const {
    auto result = std::dynamic_pointer_cast<const M>(module);
    if (!result) refuse_type();
    return result;
  }

 private:
  [[noreturn]] HS_API void refuse_type() const;
};

/// A network, by the name of MODEL.
struct NetworkKind {
  std::string name;                                                             ///< such as `resnet50`
  std::string task;                                                             ///< name of a TaskKind
  std::string data;                                                             ///< name of a DataKind
  std::function<Network(const TrainConfig& config, const RunData& data)> make;  ///< with fresh weights
  std::int64_t image_size = 0;  ///< of networks of images: pixels of a side, customarily
  std::int64_t classes = 0;     ///< of classifiers: unless data or weights say others
  std::string head = {};        ///< of classifiers: prefix of the last layer's parameters, such as `fc.`

  /// Classes of weights of this network, 0 where they don't say; by default the rows of the last layer.
  std::function<std::int64_t(const NamedTensors& weights)> classes_in = {};
  /// What names of layers begin with that depend on the classes (io::PretrainedOptions::heads); by default the last
  /// one.
  std::function<std::vector<std::string>(const nn::ModuleBase& network)> heads = {};
  /// Of networks that a configuration may describe (--cfg): what messages call its description, `--cfg FILE`; empty
  /// text where it has none. By default the name says what the network is.
  std::function<std::string(const TrainConfig& config)> described_by = {};
  /// The same description as text alone, in one form, as Task::network_description() of the network that is built from
  /// it. Throws IoError for one that can't be read, or of no network.
  std::function<std::string(const NetworkDescription& description)> description = {};
  /// Where two descriptions first differ, in words; empty where they are of the same network.
  std::function<std::string(const NetworkDescription& a, const NetworkDescription& b)> difference = {};
};

/// What a network is trained for, such as `classification`.
struct TaskKind {
  std::string name;  ///< that networks give
  /// Makes the task of a network; it keeps the module.
  std::function<std::shared_ptr<Task>(const TrainConfig& config, const RunData& data, const Network& network)> make;
};

/// Registers one; the name may be used from then on. Throws Error for an empty name, one that is taken, or without what
/// makes it.
HS_API void register_data(DataKind kind);
HS_API void register_network(NetworkKind kind);
HS_API void register_task(TaskKind kind);

/// The one of that name; for the library's networks see models/registry.h. Throws Error naming the choices.
HS_API const DataKind& data_kind(const std::string& name);
HS_API const NetworkKind& network_kind(const std::string& name);
HS_API const TaskKind& task_kind(const std::string& name);
/// The kind of data that the network of that name takes.
HS_API const DataKind& data_of(const std::string& network);

/// Reads the data of the configuration's network.
HS_API RunData load_data(const TrainConfig& config, bool training = true);
/// What is trained of a network that was made.
HS_API std::shared_ptr<Task> make_task(const TrainConfig& config, const RunData& data, Network network);
/// Makes the configuration's network for these data, and the task that it is trained for. The network has fresh weights
/// from the default generator and is on the CPU.
HS_API std::shared_ptr<Task> make_task(const TrainConfig& config, const RunData& data);

}  // namespace halfstep::training
