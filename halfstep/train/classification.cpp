// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/classification.h"

#include <algorithm>
#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/data/mixup.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/trace.h"
#include "halfstep/train/built_in_internal.h"
#include "halfstep/train/confusion_figure_internal.h"
#include "halfstep/train/data.h"

namespace halfstep::training {

TopHits count_top_hits(const Tensor& scores, const Tensor& target) {
  const NoGrad no_grad;
  if (scores.dim() != 2 || target.dim() < 1 || target.dim() > 2 || target.size(0) != scores.size(0)) {
    fail<ShapeError>(
        "count_top_hits: expected scores [N, classes] and labels [N] or shares [N, classes], got {} and {}",
        scores.sizes().str(), target.sizes().str());
  }
  const Tensor wide = scores.detach().to(f32);
  const std::int64_t classes = wide.size(1);
  const Tensor given = target.dim() == 1 ? target.to(i64) : argmax(target, 1);
  const Tensor known = logical_and(ge(given, 0), lt(given, classes));
  const Tensor label = where(known, given, 0).unsqueeze(1);
  const Tensor own = gather(wide, 1, label);
  const Tensor place = arange(0, classes, 1, {.dtype = i64, .device = wide.device()});
  const Tensor above = sum(logical_or(gt(wide, own), logical_and(eq(wide, own), lt(place, label))), {1});
  const Tensor counts = logical_and(known, eq(own, own).squeeze(1));
  const auto hits = [&](std::int64_t first) { return sum(logical_and(counts, lt(above, first))).to(f32); };
  return {hits(1), hits(5)};
}

namespace {

// On the CPU by ops, which steps can be captured with; elsewhere on the host, once the scores are there: a dozen small
// kernels are more than a copy, and a device that is being brought up may lack them.
// `verdicts`: null where they aren't kept.
void add_hits(TaskLoss& made, const Tensor& target, Verdicts* verdicts) {
  if (made.output.device().is_host()) {
    if (verdicts) verdicts->add(made.output, target);
    const TopHits hits = count_top_hits(made.output, target);
    made.parts.push_back({"top1", hits.top1});
    made.parts.push_back({"top5", hits.top5});
    return;
  }
  made.count_later = [scores = made.output.detach().to(Device{}, {.non_blocking = true}),
                      labels = target.to(Device{}, {.non_blocking = true}),
                      verdicts](std::map<std::string, double>& parts) {
    if (verdicts) verdicts->add(scores, labels);
    const TopHits hits = count_top_hits(scores, labels);
    parts["top1"] += hits.top1.item<double>();
    parts["top5"] += hits.top5.item<double>();
  };
}

}  // namespace

ClassificationTask::ClassificationTask(const Network& network, const ClassificationOptions& options)
    : holder_(network.module),
      classifier_{.module = network.module.get(), .forward = network.forward},
      outputs_(network.outputs),
      options_(options) {}

// Batches are mixed by whoever makes them, keyed as their samples are: no state beside the loader's.
std::shared_ptr<const data::Dataset> ClassificationTask::training_data(
    std::shared_ptr<const data::Dataset> samples) const {
  if (options_.mixup == 0) return samples;
  const auto names = static_cast<std::int64_t>(options_.classes.size());
  const data::MixupOptions options{.alpha = options_.mixup,
                                   .classes = options_.num_classes > 0 ? options_.num_classes : names};
  return std::make_shared<data::MixupDataset>(std::move(samples), options);
}

TaskLoss ClassificationTask::loss(const data::Batch& batch) {
  TaskLoss made;
  {
    const TraceRange range("forward");
    made.output = classifier_.forward(batch.input);
  }
  const TraceRange range("loss");
  made.loss = cross_entropy(made.output, batch.target, {.label_smoothing = options_.label_smoothing});
  return made;
}

void ClassificationTask::count(TaskLoss& made, const data::Batch& batch) {
  if (options_.train_accuracy) add_hits(made, batch.target, nullptr);
}

Tensor ClassificationTask::scores(const Tensor& input) const {
  return outputs_ ? outputs_(input).at(0) : classifier_.forward(input);
}

TaskLoss ClassificationTask::evaluate(const data::Batch& batch) {
  TaskLoss made;
  made.output = scores(batch.input);
  made.loss = cross_entropy(made.output, batch.target);
  add_hits(made, batch.target, options_.keep_verdicts ? &verdicts_ : nullptr);
  return made;
}

void ClassificationTask::merge_evaluation(dist::ProcessGroup& group) {
  if (group.size() > 1) verdicts_.merge(group);
}

ResultTable ClassificationTask::result_table() const {
  if (verdicts_.size() == 0) return {};
  constexpr std::size_t kMost = 50, kWorst = 20;
  std::vector<ClassRow> rows = class_rows(verdicts_, options_.classes);
  ResultTable table{.header = {"class", "precision", "recall", "F1", "count"}, .rows = {}, .note = {}};
  if (const std::size_t all = rows.size(); all > kMost) {
    // A class without samples says nothing of the network.
    std::erase_if(rows, [](const ClassRow& r) { return r.count == 0; });
    std::stable_sort(rows.begin(), rows.end(), [](const ClassRow& a, const ClassRow& b) { return a.f1 < b.f1; });
    rows.resize(std::min(rows.size(), kWorst));
    table.note = fmt::format("({} of {} classes, those with the lowest F1)", rows.size(), all);
  }
  const auto percent = [](double share) { return fmt::format("{:.2f}%", 100 * share); };
  for (const ClassRow& r : rows) {
    table.rows.push_back({r.name, percent(r.precision), percent(r.recall), percent(r.f1), std::to_string(r.count)});
  }
  return table;
}

std::vector<std::string> ClassificationTask::predictions(const data::Batch& batch) {
  const Tensor shares = softmax(scores(batch.input).to(f32), 1);
  const auto classes = static_cast<std::size_t>(shares.size(1));
  const std::vector<float> all = shares.to_vector<float>();
  std::vector<std::string> lines;
  for (auto row = all.begin(); row != all.end(); row += static_cast<std::ptrdiff_t>(classes)) {
    const auto best = std::max_element(row, row + static_cast<std::ptrdiff_t>(classes));
    const auto i = static_cast<std::size_t>(best - row);
    const std::string name = i < options_.classes.size() ? options_.classes[i] : std::to_string(i);
    lines.push_back(fmt::format("{} ({:.1f}%)", name, 100 * static_cast<double>(*best)));
  }
  return lines;
}

void ClassificationTask::write_results(const ResultPlace& place) const {
  if (verdicts_.size() == 0) return;
  const std::string table = class_rows_csv(class_rows(verdicts_, options_.classes));
  io::AtomicFile file(place.folder / "classes.csv", false);
  file.write(table.data(), table.size());
  file.commit();
  if (has_confusion(verdicts_.classes, place.folder)) {
    draw_confusion(verdicts_, options_.classes, place.title).save(place.folder / "confusion.svg");
  }
  if (!options_.pictures || !place.samples || place.samples->size() == 0) return;
  // A network under that name may be trained on something else.
  const std::int64_t first = 0;
  if (!are_pictures(place.samples->batch({.indices = {&first, 1}}).input, *options_.pictures)) return;
  draw_predictions(verdicts_, options_.classes, *place.samples, *options_.pictures, place.title)
      .save(place.folder / "predictions.png");
}

void ClassificationTask::check_saved(const std::map<std::string, double>& parts, std::int64_t samples,
                                     std::optional<double> best) const {
  for (const auto& [name, hits] : parts) {
    if (name != "top1" && name != "top5") fail<Error>("expected top1 and top5 as parts, got '{}'", name);
    if (hits >= 0 && hits <= static_cast<double>(samples) && hits == std::floor(hits)) continue;
    fail<Error>("expected a whole number from 0 to {} for parts.{}, got {}", samples, name, hits);
  }
  if (best && !(*best >= 0 && *best <= 1)) fail<Error>("expected a fraction of 1 for the best top1, got {}", *best);
}

ClassificationOptions classification_options(const TrainConfig& config) {
  return {.label_smoothing = config.label_smoothing,
          .train_accuracy = config.train_accuracy,
          .classes = config.classes,
          .pictures = picture_form(config.model),
          .mixup = config.mixup,
          .num_classes = config.num_classes};
}

TaskKind classification_kind() {
  return {.name = "classification", .make = [](const TrainConfig& c, const RunData& data, const Network& network) {
            if (!network.forward) fail<Error>("classification: expected a network of one input and one output");
            ClassificationOptions options = classification_options(c);
            options.classes = data.classes;
            options.num_classes = data.num_classes;
            return std::make_shared<ClassificationTask>(network, options);
          }};
}

}  // namespace halfstep::training
