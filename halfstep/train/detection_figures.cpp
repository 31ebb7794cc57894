// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/detection_figures.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "halfstep/core/fail.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/train/confusion_figure_internal.h"
#include "halfstep/train/results.h"

namespace halfstep::training {
namespace {

using io::Align;
using io::Chart;
using io::ChartSeries;
namespace colors = io::colors;

constexpr int kCurvePoints = 201;  // lines of some 500 pixels
constexpr std::size_t kMostColoured = 10;
constexpr std::size_t kMostLines = 1000;  // of more classes they are one grey, and megabytes

// Those of all classes, and of each that has objects.
struct DetectionRow {
  std::string name;
  std::int64_t pictures, objects;
  double precision, recall, ap50, ap;
};
std::vector<DetectionRow> detection_rows(const DetectionEvaluation& evaluation, const DetectionSummary& summary,
                                         const std::vector<std::string>& names) {
  std::vector<DetectionRow> rows = {
      {"all", evaluation.pictures(), 0, summary.precision, summary.recall, summary.ap50, summary.ap}};
  for (const ClassDetection& c : summary.classes) {
    rows[0].objects += c.objects;
    rows.push_back({class_name(names, c.label), c.pictures, c.objects, c.precision, c.recall, c.ap50, c.ap});
  }
  return rows;
}

std::string csv_of(const std::vector<DetectionRow>& rows) {
  std::string text = "class,pictures,objects,precision,recall,map50,map50_95\n";
  for (const DetectionRow& r : rows) {
    text += fmt::format("{},{},{},{},{},{},{}\n", csv_field(r.name), r.pictures, r.objects, r.precision, r.recall,
                        r.ap50, r.ap);
  }
  return text;
}

// What a figure of curves has: values from 0 to 1 of each class, at equal distances of x.
struct ClassCurve {
  std::int64_t label;
  const std::vector<double>* values;
  std::string note;  // behind the name in the legend
};
std::vector<double> mean_of(const std::vector<ClassCurve>& curves) {
  std::vector<double> mean(curves.empty() ? 0 : curves[0].values->size());
  for (const ClassCurve& c : curves) {
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += (*c.values)[i] / static_cast<double>(curves.size());
  }
  return mean;
}

io::Drawing draw_class_curves(const std::vector<ClassCurve>& curves, Chart chart, const std::vector<std::string>& names,
                              const std::string& title, const std::string& summary) {
  constexpr double kWidth = 560, kHeight = 420, kTop = 58, kSide = 220;
  const auto points_of = [](const std::vector<double>& values) {
    std::vector<io::Point> points;
    const auto last = static_cast<double>(std::max<std::size_t>(values.size(), 2) - 1);
    for (std::size_t i = 0; i < values.size(); ++i) points.push_back({static_cast<double>(i) / last, values[i]});
    return points;
  };
  const bool coloured = curves.size() <= kMostColoured;
  const io::Color faint{178, 188, 198};
  chart.y_min = 0, chart.y_max = 1;
  const bool lines = curves.size() <= kMostLines;
  for (const ClassCurve& c : curves) {
    if (!lines) break;
    chart.series.push_back({.points = points_of(*c.values),
                            .color = coloured ? class_color(c.label) : faint,
                            .width = coloured ? 1.4 : 0.7});
  }
  if (!curves.empty()) {
    chart.series.push_back({.points = points_of(mean_of(curves)), .color = colors::kBlack, .width = 2.8});
  }
  io::Drawing drawing(kWidth + kSide + 30, kTop + kHeight + 12, title);
  drawing.text({20, 26}, io::fitted_text(title, 16, kWidth + kSide - 10), {.size = 16, .bold = true});
  drawing.text({20, 46}, summary, {.size = 12, .color = colors::kGrey});
  draw_chart(drawing, {12, kTop, kWidth, kHeight}, chart);
  io::Point at{kWidth + 30, kTop + 34};
  const auto entry = [&](const std::string& text, io::Color color, double width) {
    drawing.line({at.x, at.y - 4}, {at.x + 18, at.y - 4}, {.color = color, .width = width});
    drawing.text({at.x + 25, at.y}, text, {.size = 11});
    at.y += 19;
  };
  if (curves.empty()) return drawing;
  entry("all classes, mean", colors::kBlack, 2.8);
  if (!coloured && lines) entry(fmt::format("each of {} classes", curves.size()), faint, 1.4);
  for (std::size_t i = 0; coloured && i < curves.size(); ++i) {
    const std::string& note = curves[i].note;
    const double room = kSide - 35 - io::text_width(note, 11);
    entry(io::fitted_text(class_name(names, curves[i].label), 11, room) + note, class_color(curves[i].label), 2.5);
  }
  return drawing;
}

// Where a mean is largest, the first of equal ones.
std::string best_text(const char* what, const std::vector<double>& mean) {
  if (mean.empty()) return "no objects";
  const auto best = std::max_element(mean.begin(), mean.end());
  return fmt::format("best mean {} of all classes {:.3f}, at a score of {:.3f}", what, *best,
                     static_cast<double>(best - mean.begin()) / static_cast<double>(mean.size() - 1));
}

struct ScoreCurveKind {
  const char *name, *of_title;
  const std::vector<double> DetectionCurves::*values;
};
ScoreCurveKind kind_of(ScoreCurve which) {
  if (which == ScoreCurve::f1) return {"F1", "F1 over the score", &DetectionCurves::f1};
  if (which == ScoreCurve::precision) return {"precision", "Precision over the score", &DetectionCurves::precision};
  return {"recall", "Recall over the score", &DetectionCurves::recall};
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  io::AtomicFile file(path, false);
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace

ResultTable detection_table(const DetectionEvaluation& evaluation, const std::vector<std::string>& names) {
  if (evaluation.pictures() == 0) return {};
  constexpr std::size_t kMost = 100, kWorst = 50;
  std::vector<DetectionRow> rows = detection_rows(evaluation, evaluation.summary(), names);
  ResultTable table{.header = {"Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"}, .rows = {}, .note = {}};
  if (const std::size_t classes = rows.size() - 1; classes > kMost) {
    std::stable_sort(rows.begin() + 1, rows.end(),
                     [](const DetectionRow& a, const DetectionRow& b) { return a.ap < b.ap; });
    rows.resize(1 + kWorst);
    table.note = fmt::format("({} of {} classes, those with the lowest mAP50-95)", kWorst, classes);
  }
  const auto number = [](double v) { return fmt::format("{:.3f}", v); };
  for (const DetectionRow& r : rows) {
    table.rows.push_back({r.name, std::to_string(r.pictures), std::to_string(r.objects), number(r.precision),
                          number(r.recall), number(r.ap50), number(r.ap)});
  }
  return table;
}

std::string detection_csv(const DetectionEvaluation& evaluation, const std::vector<std::string>& names) {
  return csv_of(detection_rows(evaluation, evaluation.summary(), names));
}

io::Drawing draw_precision_recall(const std::vector<DetectionCurves>& curves, const DetectionSummary& summary,
                                  const std::vector<std::string>& names, const std::string& title) {
  std::vector<ClassCurve> lines;
  for (const DetectionCurves& c : curves) {
    const auto found = std::find_if(summary.classes.begin(), summary.classes.end(),
                                    [&](const ClassDetection& d) { return d.label == c.label; });
    lines.push_back({c.label, &c.precision_at_recall,
                     found == summary.classes.end() ? std::string() : fmt::format(" {:.3f}", found->ap50)});
  }
  return draw_class_curves(
      lines, {.title = "Precision over recall, overlap 0.5", .x_label = "recall", .y_label = "precision"}, names, title,
      curves.empty() ? std::string("no objects")
                     : fmt::format("mAP50 {:.3f}, mAP50-95 {:.3f}", summary.ap50, summary.ap));
}

io::Drawing draw_score_curve(ScoreCurve which, const std::vector<DetectionCurves>& curves,
                             const std::vector<std::string>& names, const std::string& title) {
  const ScoreCurveKind kind = kind_of(which);
  std::vector<ClassCurve> lines;
  for (const DetectionCurves& c : curves) lines.push_back({c.label, &(c.*kind.values), {}});
  return draw_class_curves(lines, {.title = kind.of_title, .x_label = "score", .y_label = kind.name}, names, title,
                           best_text(kind.name, mean_of(lines)));
}

io::Drawing draw_confusion(const DetectionEvaluation& evaluation, const std::vector<std::string>& names,
                           const std::string& title) {
  const std::int64_t classes = evaluation.classes(), side = classes + 1;
  const std::vector<std::int64_t> found = evaluation.confusion();
  ConfusionFigure figure{.title = title,
                         .classes = side,
                         .counts = std::vector<std::int64_t>(found.size()),
                         .most_named = 101,
                         .no_mistakes = "No mistakes"};
  std::int64_t objects = 0, right = 0, nothing = 0;
  for (std::int64_t is = 0; is < side; ++is) {
    for (std::int64_t said = 0; said < side; ++said) {
      const std::int64_t n = found[static_cast<std::size_t>(said * side + is)];
      figure.counts[static_cast<std::size_t>(is * side + said)] = n;
      (is < classes ? objects : nothing) += n;
      if (is == said) right += n;
    }
    figure.rows.push_back(is < classes ? class_name(names, is) : "background");
    figure.columns.push_back(is < classes ? class_name(names, is) : "missed");
  }
  figure.summary = objects + nothing == 0
                       ? "no objects"
                       : fmt::format("{} of {} objects found; boxes where nothing is: {}", right, objects, nothing);
  figure.mistake = [&](std::int64_t row, std::int64_t column, double width) {
    const auto name = [&](std::int64_t c, double room) { return io::fitted_text(class_name(names, c), 11, room); };
    if (column == classes) return name(row, width - 50) + " missed";
    if (row == classes) return name(column, width - 110) + " where nothing is";
    return name(row, (width - 80) / 2) + " taken for " + name(column, (width - 80) / 2);
  };
  return draw_confusion_figure(figure);
}

void write_detection_results(const DetectionEvaluation& evaluation, const std::vector<std::string>& names,
                             const std::filesystem::path& folder, const std::string& title) {
  if (evaluation.pictures() == 0) return;
  const DetectionSummary summary = evaluation.summary();
  write_text(folder / "classes.csv", csv_of(detection_rows(evaluation, summary, names)));
  if (has_confusion(evaluation.classes(), folder)) {
    draw_confusion(evaluation, names, title).save(folder / "confusion.svg");
  }
  const std::vector<DetectionCurves> curves = evaluation.curves(kCurvePoints);
  draw_precision_recall(curves, summary, names, title).save(folder / "precision-recall.svg");
  draw_score_curve(ScoreCurve::f1, curves, names, title).save(folder / "f1.svg");
  draw_score_curve(ScoreCurve::precision, curves, names, title).save(folder / "precision.svg");
  draw_score_curve(ScoreCurve::recall, curves, names, title).save(folder / "recall.svg");
}

void write_compared(const std::vector<ComparedPicture>& pictures, const std::vector<std::string>& names,
                    const std::filesystem::path& folder, const std::string& title) {
  if (!pictures.empty()) draw_compared(pictures, names, title).save(folder / "predictions.png", 1);
}

void write_train_batch(const Tensor& input, const Tensor& target, const std::vector<std::string>& names,
                       const std::filesystem::path& folder, const std::string& title) {
  draw_train_batch(input, target, names, title).save(folder / "train-batch.png", 1);
}

void write_labels(const std::vector<LabelBox>& boxes, const std::vector<std::string>& names,
                  const std::filesystem::path& folder, const std::string& title) {
  draw_labels(boxes, names, title).save(folder / "labels.svg");
}

}  // namespace halfstep::training
