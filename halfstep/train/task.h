// SPDX-License-Identifier: Apache-2.0
// What is trained: a network with its loss, the numbers of a batch and the evaluation of a data set. The loop
// (train/model.h) knows nothing else of it, so that classification, detection and text are trained by the same one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/data/dataset.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/nn/module.h"
#include "halfstep/train/metrics.h"

namespace halfstep::training {

/// The results of a batch; every tensor has one element and is on the network's device.
struct TaskLoss {
  Tensor loss;              ///< mean over the batch's samples; in training the backward pass starts here
  NamedTensors parts = {};  ///< sums over the batch's samples: parts of the loss, counts of right answers
  Tensor output = {};       ///< what the network gave, of any size, for Task::count(); may be undefined
  /// Adds further parts when the values of the batch are read: counted on the host, from copies to it that were
  /// enqueued with the step. For devices without the kernels that counting needs; a step on the CPU that sets it is not
  /// captured.
  std::function<void(std::map<std::string, double>& parts)> count_later = {};
};

/// Where a task leaves what people look at after an evaluation.
struct ResultPlace {
  std::filesystem::path folder = {};
  std::string title = {};                             ///< of figures: which run and epoch
  std::shared_ptr<const data::Dataset> samples = {};  ///< that were evaluated, in this order; null: not known
};

/// A table of an evaluation, for people: rows of text, the first column to the left.
struct ResultTable {
  std::vector<std::string> header = {};
  std::vector<std::vector<std::string>> rows = {};  ///< empty: there is no table
  std::string note = {};                            ///< below it
};

/// Where a run stands, for the line that it prints.
struct ProgressState {
  int epoch = 0;  ///< from 1
  int epochs = 0;
  std::int64_t samples = 0;                  ///< of the last step
  double memory_mb = 0;                      ///< peak of the device's tensors, or of the process, in 10^6 bytes
  std::map<std::string, double> last = {};   ///< TaskLoss::parts of the last step, divided by its samples
  std::map<std::string, double> means = {};  ///< the same of the epoch so far
};
/// A column of that line.
struct ProgressColumn {
  std::string name = {};
  std::string value = {};
};

/// A problem to train on. A step calls loss() and count() of every batch; an evaluation calls begin_evaluation(),
/// evaluate() of every batch and end_evaluation(). Batches are on the network's device.
///
/// A step can only be captured where loss() and count() are made of ops and leave values on the device.
class HS_API Task {
 public:
  Task() = default;
  virtual ~Task();
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  /// The network: parameters, buffers and mode. The same object in every call.
  virtual const nn::ModuleBase& network() const = 0;
  /// The samples of a run as loss() takes them, such as pairs that are mixed; as they are unless overridden. A run
  /// calls it once, for its training data.
  virtual std::shared_ptr<const data::Dataset> training_data(std::shared_ptr<const data::Dataset> samples) const;
  /// Forward pass and loss of a batch in training, with recording on and inside the run's autocast region.
  virtual TaskLoss loss(const data::Batch& batch) = 0;
  /// Adds to `made.parts` what is counted of a batch but not part of its loss. After the backward pass, without
  /// recording and outside of the region. On other devices than the CPU it is no part of a captured step and is called
  /// after it, with the values of `loss` and `output` alone.
  virtual void count(TaskLoss& made, const data::Batch& batch);

  /// Before the first batch of an evaluation.
  virtual void begin_evaluation();
  /// A batch of an evaluation, in evaluation mode, without recording, inside the run's region: loss() and count()
  /// unless overridden. An undefined loss is left out of the results.
  virtual TaskLoss evaluate(const data::Batch& batch);
  /// Between the last batch and end_evaluation() on each of several ranks that evaluated a part of the data set, one
  /// behind the other: takes over what the other ranks' tasks have of theirs, in the order of ranks. Losses and parts
  /// are summed by the loop.
  virtual void merge_evaluation(dist::ProcessGroup& group);
  /// After the last one. `results` holds `loss` and the parts as means over all samples; a task with metrics of the
  /// whole data set, such as mean average precision, adds them.
  virtual void end_evaluation(MetricResults& results);
  /// What `halfstep eval` prints of the last evaluation besides its results; empty unless overridden.
  virtual ResultTable result_table() const;
  /// What the network finds in each sample of a batch, a line of words each: what `halfstep predict` prints for tasks
  /// that it knows no drawing of. Called in evaluation mode, without recording; empty unless overridden.
  virtual std::vector<std::string> predictions(const data::Batch& batch);
  /// Writes figures and tables of the last evaluation, if the task has any. Throws IoError.
  virtual void write_results(const ResultPlace& place) const;
  /// The line that a run prints every so many steps, where the task's users know another one than that of the usual
  /// ImageNet scripts; empty: that one.
  virtual std::vector<ProgressColumn> progress(const ProgressState& state) const;
  /// Name of the result by which the best evaluation of a run is chosen; `loss` unless overridden.
  virtual std::string best_by() const;
  /// Whether a larger value of it is better; false unless overridden.
  virtual bool larger_is_better() const;

  /// Throws Error for what no run of this task leaves in a checkpoint: sums of parts over `samples` samples, and the
  /// best value of best_by() so far, if there is one.
  virtual void check_saved(const std::map<std::string, double>& parts, std::int64_t samples,
                           std::optional<double> best) const;

  /// What the network is built from, as text that checkpoints keep, where its name alone doesn't say it; empty unless
  /// overridden.
  virtual std::string network_description() const;
  /// Throws Error, saying where they differ, if a checkpoint's network_description() is of another network than this
  /// one; nothing unless overridden.
  virtual void check_network(const std::string& description) const;

  /// Samples in a batch: dimension 0 of its input unless overridden.
  virtual std::int64_t samples(const data::Batch& batch) const;
};

}  // namespace halfstep::training
