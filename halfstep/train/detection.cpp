// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/detection.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "halfstep/core/fail.h"
#include "halfstep/data/loader.h"
#include "halfstep/models/yolov5_description.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/trace.h"
#include "halfstep/train/detection_figures.h"

namespace halfstep::training {
namespace {

constexpr std::size_t kShownPictures = 12;
constexpr std::int64_t kObject = 5;    // numbers of a row of a batch's objects
constexpr std::int64_t kGeometry = 6;  // numbers that say where a picture lies in the input
constexpr const char* kParts[] = {"box", "obj", "cls", "labels", "img_size"};

std::vector<double> numbers(const Tensor& t) { return t.detach().to(Device{}).to(f64).to_vector<double>(); }

}  // namespace

DetectionTask::DetectionTask(std::shared_ptr<const models::Yolov5> network, DetectionTaskOptions options)
    : network_(std::move(network)),
      options_(std::move(options)),
      evaluation_(network_ ? network_->head().options.classes : 1) {
  if (!network_) fail<Error>("DetectionTask: expected a network, got none");
}

models::DetectionLoss DetectionTask::loss_of(const models::DetectorLevels& levels, const data::Batch& batch) const {
  models::DetectionLossOptions options = options_.loss;
  // Of rectangular pictures, which only evaluations have, the longer side.
  options.image_size = static_cast<double>(std::max(batch.input.size(2), batch.input.size(3)));
  return models::detection_loss(levels, batch.target, network_->head(), options);
}

TaskLoss DetectionTask::loss(const data::Batch& batch) {
  TaskLoss made;
  models::DetectorLevels levels;
  {
    const TraceRange range("forward");
    levels = (*network_)(batch.input);
  }
  const TraceRange range("loss");
  const models::DetectionLoss loss = loss_of(levels, batch);
  made.loss = loss.loss;
  const auto n = static_cast<double>(batch.input.size(0));
  const TensorOptions like{.dtype = f32, .device = batch.input.device()};
  made.parts = {{"box", loss.box.detach() * n},
                {"obj", loss.objectness.detach() * n},
                {"cls", loss.classes.detach() * n},
                {"labels", sum(ge(batch.target.select(2, 0), 0).to(f32))},
                {"img_size", full({}, n * static_cast<double>(batch.input.size(2)), like)}};
  return made;
}

void DetectionTask::begin_evaluation() {
  evaluation_ = DetectionEvaluation(network_->head().options.classes);
  shown_.clear();
}

TaskLoss DetectionTask::evaluate(const data::Batch& batch) {
  if (batch.more.empty() || batch.more[0].dim() != 2 || batch.more[0].size(1) != kGeometry ||
      batch.more[0].size(0) != batch.input.size(0)) {
    fail<ShapeError>(
        "DetectionTask: expected where each of {} pictures lies in the input, [N, {}], as "
        "data::DetectionDataset says it, got {}",
        batch.input.size(0), kGeometry, batch.more.empty() ? std::string("nothing") : batch.more[0].sizes().str());
  }
  const models::DetectorLevels levels = options_.levels ? options_.levels(batch.input) : (*network_)(batch.input);
  const auto found = models::detections(network_->decode(levels), options_.found);
  const std::vector<double> geometry = numbers(batch.more[0]), objects = numbers(batch.target);
  for (std::int64_t i = 0; i < batch.input.size(0); ++i) {
    add_picture(i, batch, geometry, objects, found[static_cast<std::size_t>(i)]);
  }
  return {.loss = loss_of(levels, batch).loss};
}

void DetectionTask::add_picture(std::int64_t place, const data::Batch& batch, const std::vector<double>& geometry,
                                const std::vector<double>& objects, const std::vector<models::Detection>& found) {
  const double* g = geometry.data() + place * kGeometry;
  const auto picture = static_cast<std::int64_t>(g[0]);
  if (!(g[1] > 0)) {  // it could not be read: the network has not missed its objects
    evaluation_.add({}, {});
    if (shown_.size() < kShownPictures) shown_.push_back({picture, {}});
    return;
  }
  const double scale = g[1], left = g[2], top = g[3], width = g[4], height = g[5];
  // From the input to the picture.
  const auto x_of = [&](double x) { return std::clamp((x - left) / scale, 0.0, width); };
  const auto y_of = [&](double y) { return std::clamp((y - top) / scale, 0.0, height); };
  std::vector<DetectedBox> detected;
  for (const models::Detection& d : found) {
    const double x = x_of(d.left), y = y_of(d.top);
    detected.push_back({d.label, d.score, {x, y, x_of(d.right) - x, y_of(d.bottom) - y}});
  }
  std::vector<TrueBox> truth;
  const auto labels = network_->head().options.classes;
  const auto add = [&](std::int64_t label, double cx, double cy, double w, double h, double area, bool crowd) {
    if (label < labels) truth.push_back({label, {cx - w / 2, cy - h / 2, w, h}, area, crowd});
  };
  if (options_.evaluated) {
    for (const data::LabeledObject& o :
         options_.evaluated->data().pictures.at(static_cast<std::size_t>(picture)).objects) {
      add(o.label, o.x * width, o.y * height, o.width * width, o.height * height, o.area, o.crowd);
    }
  } else {
    const std::int64_t rows = batch.target.size(1);
    const auto across = static_cast<double>(batch.input.size(3)), down = static_cast<double>(batch.input.size(2));
    for (std::int64_t r = 0; r < rows; ++r) {
      const double* o = objects.data() + (place * rows + r) * kObject;
      if (o[0] < 0) continue;
      add(static_cast<std::int64_t>(o[0]), (o[1] * across - left) / scale, (o[2] * down - top) / scale,
          o[3] * across / scale, o[4] * down / scale, -1, false);
    }
  }
  if (shown_.size() < kShownPictures) shown_.push_back({picture, detected});
  evaluation_.add(std::move(detected), std::move(truth));
}

void DetectionTask::merge_evaluation(dist::ProcessGroup& group) {
  if (group.size() == 1) return;
  DetectionEvaluation all(network_->head().options.classes);
  for (const std::string& bytes : group.all_gather_text(evaluation_.serialized())) {
    all.add(DetectionEvaluation::deserialized(bytes));
  }
  evaluation_ = std::move(all);
}

void DetectionTask::end_evaluation(MetricResults& results) {
  const DetectionSummary summary = evaluation_.summary();
  const CocoSummary coco = evaluation_.coco();
  results.set("precision", summary.precision);
  results.set("recall", summary.recall);
  results.set("mAP50", summary.ap50);
  results.set("mAP50-95", summary.ap);
  // -1 says that there are no objects, which is no number of a curve.
  results.set("COCO_AP50", std::max(coco.ap50, 0.0));
  results.set("COCO_AP", std::max(coco.ap, 0.0));
  results.set("fitness", summary.fitness());
}

ResultTable DetectionTask::result_table() const { return detection_table(evaluation_, options_.classes); }

void DetectionTask::write_results(const ResultPlace& place) const {
  write_detection_results(evaluation_, options_.classes, place.folder, place.title);
  draw_compared_pictures(place);
  if (!options_.training || options_.training->size() == 0 || std::exchange(training_is_drawn_, true)) return;
  std::vector<LabelBox> boxes;
  for (const data::LabeledPicture& picture : options_.training->data().pictures) {
    for (const data::LabeledObject& o : picture.objects) boxes.push_back({o.label, o.x, o.y, o.width, o.height});
  }
  write_labels(boxes, options_.classes, place.folder, "labels of the training pictures");
  constexpr std::size_t kShown = 9;
  std::vector<std::int64_t> order = data::shuffled_order(options_.training->size(), options_.seed, 0);
  order.resize(std::min(order.size(), kShown));
  const data::Batch first = options_.training->batch({.indices = order, .seed = options_.seed});
  write_train_batch(first.input, first.target, options_.classes, place.folder, "first training pictures");
}

void DetectionTask::draw_compared_pictures(const ResultPlace& place) const {
  if (!place.samples || shown_.empty()) return;
  // Those of the first rank are the first of the data set.
  std::vector<std::int64_t> samples(std::min<std::size_t>(shown_.size(), place.samples->size()));
  std::iota(samples.begin(), samples.end(), 0);
  const data::Batch batch = place.samples->batch({.indices = samples});
  if (batch.more.empty()) return;
  const std::vector<double> geometry = numbers(batch.more[0]);
  constexpr double kScore = 0.25;  // that predictions are shown from
  std::vector<ComparedPicture> pictures;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const double* g = geometry.data() + static_cast<std::int64_t>(i) * kGeometry;
    if (static_cast<std::int64_t>(g[0]) != shown_[i].picture) return;  // of another data set
    ComparedPicture picture{.picture = batch_picture(batch.input, static_cast<std::int64_t>(i)),
                            .truth = batch_boxes(batch.input, batch.target, static_cast<std::int64_t>(i)),
                            .found = {},
                            .name = {}};
    for (const DetectedBox& d : shown_[i].found) {
      if (d.score < kScore) continue;
      const double x = d.box[0] * g[1] + g[2], y = d.box[1] * g[1] + g[3];
      picture.found.push_back({.label = d.label,
                               .left = x,
                               .top = y,
                               .right = x + d.box[2] * g[1],
                               .bottom = y + d.box[3] * g[1],
                               .score = d.score});
    }
    if (options_.evaluated) {
      picture.name =
          options_.evaluated->data().pictures.at(static_cast<std::size_t>(shown_[i].picture)).file.filename().string();
    }
    pictures.push_back(std::move(picture));
  }
  write_compared(pictures, options_.classes, place.folder, place.title);
}

std::vector<ProgressColumn> DetectionTask::progress(const ProgressState& s) const {
  const auto part = [](const std::map<std::string, double>& all, const char* name) {
    const auto it = all.find(name);
    return it == all.end() ? 0.0 : it->second;
  };
  const auto mean = [&](const char* name) { return fmt::format("{:.4g}", part(s.means, name)); };
  return {{"Epoch", fmt::format("{}/{}", s.epoch - 1, s.epochs - 1)},
          {"mem", fmt::format("{:.3g}G", s.memory_mb / 1e3)},
          {"box", mean("box")},
          {"obj", mean("obj")},
          {"cls", mean("cls")},
          {"labels", fmt::format("{:.0f}", part(s.last, "labels") * static_cast<double>(s.samples))},
          {"img_size", fmt::format("{:.0f}", part(s.last, "img_size"))}};
}

void DetectionTask::check_saved(const std::map<std::string, double>& parts, std::int64_t /*samples*/,
                                std::optional<double> best) const {
  for (const auto& [name, sum] : parts) {
    if (std::find(std::begin(kParts), std::end(kParts), name) == std::end(kParts)) {
      fail<Error>("expected {} as parts, got '{}'", fmt::join(kParts, ", "), name);
    }
    if (!(sum >= 0)) fail<Error>("expected a number of at least 0 for parts.{}, got {}", name, sum);
  }
  if (best && !(*best >= 0 && *best <= 1)) fail<Error>("expected a fraction of 1 for the best fitness, got {}", *best);
}

std::string DetectionTask::network_description() const { return models::yolov5_description(network_->options); }

void DetectionTask::check_network(const std::string& description) const {
  const auto other = models::parse_yolov5_description(description, "its description");
  if (const std::string text = models::yolov5_difference(other, network_->options); !text.empty()) {
    fail<Error>("{}", text);
  }
}

}  // namespace halfstep::training
