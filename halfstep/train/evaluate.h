// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/core/dtype.h"
#include "halfstep/data/dataset.h"
#include "halfstep/optim/sharding.h"
#include "halfstep/train/batches.h"
#include "halfstep/train/callback.h"
#include "halfstep/train/task.h"

namespace halfstep::training {

/// The device of a network's first parameter or buffer; the CPU for one without any.
HS_API Device device_of(const nn::ModuleBase& network);

/// The largest of the ranks' values, on all of them: what they agree on. All ranks call it.
HS_API double max_of(dist::ProcessGroup& group, double value);

/// Options of evaluate.
struct EvaluationOptions {
  std::optional<DType> autocast = {};  ///< dtype of the region around Task::evaluate; none: the caller's own, or none
  int read_every = 1;  ///< batches between two reads of a device's values, at least 1, at most 100 count; on the
                       ///< CPU each is read
  std::function<void(const EvalProgress&)> on_batch = {};  ///< for each batch once its values are read
  std::function<bool()> stop = {};                         ///< gives up before the next batch when it says true
  /// Ranks that evaluate a part of the data set each, which may be empty; the results are those of all parts together,
  /// on all of them. They give up together.
  dist::ProcessGroup group = {};
  /// How ranks divide the network's parameters; null: they don't. Where these are with their owners only, each module's
  /// come when it runs. (With fewer batches than ranks all parameters come to each rank.)
  std::shared_ptr<optim::StateSharding> sharding = {};
  const char* who = "evaluate";  ///< the caller, for messages
};

/// Evaluates a task on a data set, with the network in evaluation mode (the mode is restored) and without recording.
/// Adds `loss` and the task's parts to `results` as means over all samples, then what Task::end_evaluation() adds.
/// Returns false, and leaves `results` as they were, when it was stopped. Throws Error where no rank has a
/// batch and for a read_every below 1.
HS_API bool evaluate(Task& task, const Batches& batches, MetricResults& results, const EvaluationOptions& options = {});

/// What the task finds in the first `count` samples of a data set, a line each (Task::predictions), with the network in
/// evaluation mode (the mode is restored) and without recording; empty for a task that has no words for it. `autocast`
/// as in EvaluationOptions.
HS_API std::vector<std::string> predictions(Task& task, const data::Dataset& samples, std::int64_t count,
                                            std::optional<DType> autocast = {});

}  // namespace halfstep::training
