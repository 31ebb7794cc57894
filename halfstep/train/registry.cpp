// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/registry.h"

#include <deque>
#include <mutex>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/models/registry.h"
#include "halfstep/train/built_in_internal.h"
#include "halfstep/train/memory_plan.h"
#include "halfstep/train/networks.h"

namespace halfstep::training {
namespace {

// Kinds stay where they are: references to them are kept.
template <class Kind>
class Registry {
 public:
  Registry(const char* what, std::vector<Kind> built_in) : what_(what) {
    for (Kind& kind : built_in) kinds_.push_back(std::move(kind));
  }
  void add(Kind kind, bool complete) {
    const std::lock_guard lock(mutex_);
    if (kind.name.empty() || !complete) {
      fail<Error>("register: expected a {} with a name and all that makes it, got '{}'", what_, kind.name);
    }
    if (find(kind.name)) fail<Error>("register: there is a {} called '{}' already", what_, kind.name);
    kinds_.push_back(std::move(kind));
  }
  const Kind* find_locked(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    return find(name);
  }
  std::vector<std::string> names() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> result;
    for (const Kind& kind : kinds_) result.push_back(kind.name);
    return result;
  }
  const Kind& get(const std::string& name) const {
    if (const Kind* kind = find_locked(name)) return *kind;
    fail<Error>("{}: expected one of {}, got '{}'", what_, fmt::join(names(), ", "), name);
  }

 private:
  const Kind* find(const std::string& name) const {
    for (const Kind& kind : kinds_) {
      if (kind.name == name) return &kind;
    }
    return nullptr;
  }

  const char* what_;
  mutable std::mutex mutex_;
  std::deque<Kind> kinds_;
};

// The networks of models/registry.h, which classify, and those that detect.
std::vector<NetworkKind> model_kinds() {
  std::vector<NetworkKind> kinds;
  for (const models::ModelInfo& info : models::all_models()) {
    kinds.push_back({.name = info.name,
                     .task = info.task,
                     .data = info.data,
                     .make =
                         [name = info.name](const TrainConfig& c, const RunData& data) {
                           models::ModelOptions o{.zero_init_residual = c.zero_init_residual};
                           if (data.num_classes > 0) o.classes = data.num_classes;
                           const models::Model made = models::make_model(name, o);
                           return Network{.module = made.module, .forward = made.forward, .name = name};
                         },
                     .image_size = info.image_size,
                     .classes = info.classes,
                     .head = info.head});
  }
  for (NetworkKind& kind : detection_networks()) kinds.push_back(std::move(kind));
  return kinds;
}

std::vector<DataKind> built_in_kinds_of_data() {
  std::vector<DataKind> kinds = built_in_data();
  kinds.push_back(boxes_kind());
  return kinds;
}

Registry<DataKind>& data_kinds() {
  static Registry<DataKind> all("data kind", built_in_kinds_of_data());
  return all;
}
Registry<NetworkKind>& networks() {
  static Registry<NetworkKind> all("network", model_kinds());
  return all;
}
Registry<TaskKind>& tasks() {
  static Registry<TaskKind> all("task", {classification_kind(), detection_kind()});
  return all;
}

}  // namespace

void Network::refuse_type() const {
  fail<Error>("network '{}': its task expects a module of another type; register it for a task that takes it", name);
}

void register_data(DataKind kind) {
  const bool complete = kind.load != nullptr;
  data_kinds().add(std::move(kind), complete);
}
void register_network(NetworkKind kind) {
  const bool complete = kind.make != nullptr && !kind.task.empty() && !kind.data.empty();
  networks().add(std::move(kind), complete);
}
void register_task(TaskKind kind) {
  const bool complete = kind.make != nullptr;
  tasks().add(std::move(kind), complete);
}

const DataKind& data_kind(const std::string& name) { return data_kinds().get(name); }
const TaskKind& task_kind(const std::string& name) { return tasks().get(name); }
const NetworkKind& network_kind(const std::string& name) {
  if (const NetworkKind* kind = networks().find_locked(name)) return *kind;
  // It says what may be meant, and knows other spellings.
  return networks().get(models::model_info(name).name);
}
const DataKind& data_of(const std::string& network) { return data_kind(network_kind(network).data); }

std::vector<std::string> network_names() { return networks().names(); }

RunData load_data(const TrainConfig& config, bool training) {
  const DataKind& kind = data_of(config.model);
  if (kind.check) kind.check(config);
  return kind.load(config, training);
}

std::shared_ptr<Task> make_task(const TrainConfig& config, const RunData& data) {
  const NetworkKind& kind = network_kind(config.model);
  Network network = kind.make(config, data);
  if (!network.module) fail<Error>("network '{}': expected a module, got none", kind.name);
  network.name = kind.name;
  return make_task(config, data, std::move(network));
}

std::shared_ptr<Task> make_task(const TrainConfig& config, const RunData& data, Network network) {
  const NetworkKind& kind = network_kind(config.model);
  std::shared_ptr<Task> task = task_kind(kind.task).make(config, data, network);
  if (!task) fail<Error>("task '{}': expected a task, got none", kind.task);
  set_recomputed(task->network(), config.recompute);
  return task;
}

}  // namespace halfstep::training
