// SPDX-License-Identifier: Apache-2.0
// Object detection as a task: the loss of an anchor-based detector and mean average precision.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/data/detection_dataset.h"
#include "halfstep/models/detection_loss.h"
#include "halfstep/models/detections.h"
#include "halfstep/models/yolov5.h"
#include "halfstep/train/average_precision.h"
#include "halfstep/train/detection_config.h"
#include "halfstep/train/task.h"

namespace halfstep::training {

struct NetworkDescription;

/// The network of the description's text, or else of its file. Throws IoError.
HS_API models::Yolov5Options described_network(const NetworkDescription& description);

/// Options of DetectionTask.
struct DetectionTaskOptions {
  models::DetectionLossOptions loss = {};
  /// Of evaluations.
  models::DetectionsOptions found = {.score = 0.001, .overlap = 0.6, .multi_label = true};
  std::vector<std::string> classes = {};  ///< names, for figures and tables; may be empty
  /// What is evaluated, whose objects say whether they stand for many and how large they are; null: objects are those
  /// of the batches.
  std::shared_ptr<const data::DetectionDataset> evaluated = {};
  /// What is trained on, for figures; may be null.
  std::shared_ptr<const data::DetectionDataset> training = {};
  std::uint64_t seed = 0;  ///< of the order of training, for the figure of its first batch
  /// What computes the network's results in evaluations; empty: the network.
  std::function<models::DetectorLevels(const Tensor& pictures)> levels = {};
};

/// A detector with its loss (models::detection_loss). Batches are those of data::DetectionDataset: pictures [N, 3, H,
/// W], objects [N, M, 5], and in evaluations where the pictures lie in the input [N, 6]. The parts are `box`, `obj` and
/// `cls`, the weighted parts of the loss, `labels`, the objects in a picture, and `img_size`, the pixels of a side. An
/// evaluation gives `precision`, `recall`, `mAP50` and `mAP50-95` by the trainers' protocol, `COCO_AP50` and `COCO_AP`
/// by COCO's, and `fitness`, by which the best one is chosen.
class HS_API DetectionTask final : public Task {
 public:
  /// Throws Error without a network.
  explicit DetectionTask(std::shared_ptr<const models::Yolov5> network, DetectionTaskOptions options = {});

  const nn::ModuleBase& network() const override { return *network_; }
  TaskLoss loss(const data::Batch& batch) override;
  void begin_evaluation() override;
  TaskLoss evaluate(const data::Batch& batch) override;
  void merge_evaluation(dist::ProcessGroup& group) override;
  void end_evaluation(MetricResults& results) override;
  /// All classes together, then each that has objects: pictures, objects, precision, recall and both averages.
  ResultTable result_table() const override;
  /// Writes `classes.csv`, `confusion.svg`, `precision-recall.svg`, `f1.svg`, `precision.svg`, `recall.svg` and, where
  /// the data sets are known, `predictions.png`, `train-batch.png` and `labels.svg`.
  void write_results(const ResultPlace& place) const override;
  /// Epoch, memory, the parts of the loss, labels in the batch and the pictures' size.
  std::vector<ProgressColumn> progress(const ProgressState& state) const override;
  std::string best_by() const override { return "fitness"; }
  bool larger_is_better() const override { return true; }
  void check_saved(const std::map<std::string, double>& parts, std::int64_t samples,
                   std::optional<double> best) const override;
  /// As models::yolov5_description().
  std::string network_description() const override;
  void check_network(const std::string& description) const override;

  /// The boxes of the last evaluation; on several ranks of all of them.
  const DetectionEvaluation& evaluation() const { return evaluation_; }

 private:
  /// What was found in a picture, for figures; boxes in its pixels.
  struct Shown {
    std::int64_t picture = 0;  // number in data().pictures
    std::vector<DetectedBox> found = {};
  };
  models::DetectionLoss loss_of(const models::DetectorLevels& levels, const data::Batch& batch) const;
  void add_picture(std::int64_t place, const data::Batch& batch, const std::vector<double>& geometry,
                   const std::vector<double>& objects, const std::vector<models::Detection>& found);
  void draw_compared_pictures(const ResultPlace& place) const;

  std::shared_ptr<const models::Yolov5> network_;
  DetectionTaskOptions options_;
  DetectionEvaluation evaluation_;
  std::vector<Shown> shown_;                // the first pictures of an evaluation
  mutable bool training_is_drawn_ = false;  // which doesn't change
};

}  // namespace halfstep::training
