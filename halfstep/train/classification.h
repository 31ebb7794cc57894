// SPDX-License-Identifier: Apache-2.0
// Classification as a task: cross entropy, and how often the label is among the likeliest classes.
#pragma once

#include "halfstep/train/networks.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/task.h"
#include "halfstep/train/verdicts.h"

namespace halfstep::training {

/// Samples of a batch whose label ranks first, and among the first five, as f32 [] on the device of `scores`.
struct TopHits {
  Tensor top1;
  Tensor top5;
};
/// Counts the rows of `scores` [N, classes] (any floating dtype) whose label is the likeliest class, or among the five
/// likeliest. `target`: labels [N] of i64, or soft targets [N, classes], whose largest share is the label. Ties count
/// against the label, lower classes first, so that a network that gives every class the same score isn't right; a NaN
/// never hits, and neither does a label that is no class. Made of ops: nothing is read by the host. Not differentiable.
HS_API TopHits count_top_hits(const Tensor& scores, const Tensor& target);

/// Options of ClassificationTask.
struct ClassificationOptions {
  double label_smoothing = 0;                ///< share of the target that is spread over all classes, in training
  bool train_accuracy = false;               ///< count hits in training batches too
  bool keep_verdicts = true;                 ///< keep what was said of each sample of an evaluation, for verdicts()
  std::vector<std::string> classes = {};     ///< names, for figures and tables; may be empty
  std::optional<PictureForm> pictures = {};  ///< how samples are drawn; none: they aren't
  double mixup = 0;              ///< alpha of training_data(), see data::MixupOptions; 0: samples aren't mixed
  std::int64_t num_classes = 0;  ///< for mixup; 0: as many as there are names
};

/// Those of a configuration.
HS_API ClassificationOptions classification_options(const TrainConfig& config);

/// A classifier with cross entropy. Batches hold inputs and labels [N] (i64) or soft targets [N, classes]. The parts
/// are `top1` and `top5`; the best evaluation is the one with the largest `top1`.
class HS_API ClassificationTask final : public Task {
 public:
  /// `classifier.module` has to live as long as the task.
  explicit ClassificationTask(Classifier classifier, const ClassificationOptions& options = {})
      : classifier_(std::move(classifier)), options_(options) {}
  /// Of a network that it keeps.
  explicit ClassificationTask(const Network& network, const ClassificationOptions& options = {});

  const nn::ModuleBase& network() const override { return *classifier_.module; }
  /// Mixed with soft targets, with ClassificationOptions::mixup.
  std::shared_ptr<const data::Dataset> training_data(std::shared_ptr<const data::Dataset> samples) const override;
  TaskLoss loss(const data::Batch& batch) override;
  void count(TaskLoss& made, const data::Batch& batch) override;
  void begin_evaluation() override { verdicts_.clear(); }
  TaskLoss evaluate(const data::Batch& batch) override;
  void merge_evaluation(dist::ProcessGroup& group) override;
  /// Precision, recall, F1 and count of each class; of more than 50 the 20 with the lowest F1.
  ResultTable result_table() const override;
  /// The likeliest class of each sample with its share: `cat (97.1%)`.
  std::vector<std::string> predictions(const data::Batch& batch) override;
  /// Writes `classes.csv`, `confusion.svg` (up to kMostConfusionClasses) and, where samples are pictures,
  /// `predictions.png`; nothing unless verdicts are kept.
  void write_results(const ResultPlace& place) const override;
  std::string best_by() const override { return "top1"; }
  bool larger_is_better() const override { return true; }
  void check_saved(const std::map<std::string, double>& parts, std::int64_t samples,
                   std::optional<double> best) const override;
  /// Of the last evaluation, empty without ClassificationOptions::keep_verdicts.
  const Verdicts& verdicts() const { return verdicts_; }

 private:
  // The scores of an evaluation.
  Tensor scores(const Tensor& input) const;

  std::shared_ptr<const nn::ModuleBase> holder_ = nullptr;
  Classifier classifier_;
  std::function<std::vector<Tensor>(const Tensor&)> outputs_ = {};  // in evaluations; empty: the classifier's
  ClassificationOptions options_;
  Verdicts verdicts_;
};

}  // namespace halfstep::training
