// SPDX-License-Identifier: Apache-2.0
// `halfstep predict`: what all networks share, and how those of a task do it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/options.h"

namespace halfstep::cli {

/// What `halfstep predict` was told, of any network.
struct PredictOptions : TrainedOptions {
  std::filesystem::path classes;
  std::vector<std::filesystem::path> inputs;
  std::string amp;
  bool fold = false;  ///< batch norms into convolutions, see cli/fold.h
  bool int8 = false;  ///< see cli/integers.h
};

/// How the networks of a task predict that has drawings or flags of its own; the others are what predict_samples()
/// prints.
class Predictor {
 public:
  virtual ~Predictor() = default;
  /// The task's name, see training::TaskKind.
  virtual std::string task() const = 0;
  /// Adds the flags that no other task has; given for a network of another one they are refused.
  virtual void add_flags(const Verb& verb) = 0;
  /// Predicts with a network of the task; `options.model` names it, or is empty where the weights don't. Returns the
  /// program's status.
  virtual int run(PredictOptions& options, Device device) = 0;
};
std::unique_ptr<Predictor> classification_predictor();
std::unique_ptr<Predictor> detection_predictor();

/// For networks of any task and data: what the task finds in the first samples of the test data (Task::predictions), of
/// the run or of the folder that is INPUT. Throws UsageError for a task that has no words for it.
int predict_samples(PredictOptions& options, Device device);

/// The flags of classifiers.
struct ClassifierFlags {
  std::filesystem::path data;
  std::vector<std::int64_t> indices;
  int count = 8;
  int top = 5;
  std::uint64_t seed = 0;
};
/// For classifiers of images: the likeliest classes of each file. A file that can't be read is complained of, the
/// others are still told, and the status is kFailed.
int predict_images(PredictOptions& options, const ClassifierFlags& flags, Device device);

}  // namespace halfstep::cli
