// SPDX-License-Identifier: Apache-2.0
// The curves of a run as a figure.
#include <algorithm>
#include <cmath>
#include <limits>

#include "halfstep/train/results.h"

namespace halfstep::training {
namespace {

using io::Chart;
using io::ChartSeries;
using io::Point;
namespace colors = io::colors;

constexpr io::Color kCycle[] = {colors::kBlue, colors::kOrange, colors::kGreen,
                                colors::kPink, colors::kYellow, colors::kSky};

class Curves {
 public:
  explicit Curves(const RunCurves& run) : run_(run) {
    for (const EpochResult& r : run.rows) last_ = std::max(last_, static_cast<double>(r.epoch));
    for (const StepPoint& p : run.steps) last_ = std::max(last_, place(p));
    last_ = std::max(last_, static_cast<double>(run.epochs));
  }

  Chart loss() const {
    Chart c = chart("Loss", "loss");
    ChartSeries steps{.name = "training", .color = colors::kSky, .width = 1};
    for (const StepPoint& p : run_.steps) steps.points.push_back({place(p), p.loss});
    ChartSeries means{.name = "epoch mean", .color = colors::kBlue, .dots = true};
    for (const EpochResult& r : run_.rows) means.points.push_back({static_cast<double>(r.epoch), r.loss});
    ChartSeries evaluated{.name = "validation", .points = metric("loss"), .color = colors::kOrange, .dots = true};
    c.series = {steps, means, evaluated};
    // Over some decades only a logarithm shows the end of the curve.
    double low = std::numeric_limits<double>::infinity(), high = 0;
    for (const ChartSeries& s : c.series) {
      for (const Point& p : s.points) {
        if (std::isfinite(p.y)) low = std::min(low, p.y), high = std::max(high, p.y);
      }
    }
    constexpr double kDecades = 30;
    if (low > 0 && high > kDecades * low) c.scale = io::ChartScale::log10;
    std::erase_if(c.series, [](const ChartSeries& s) { return s.points.empty(); });
    return c;
  }

  Chart metrics() const {
    Chart c = chart("Metrics on the validation data", "value");
    std::vector<std::string> names;
    bool shares = true;
    for (const EpochResult& r : run_.rows) {
      for (const auto& [name, value] : r.metrics) {
        if (name == "loss") continue;
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
        shares = shares && !(value < 0 || value > 1);
      }
    }
    for (std::size_t i = 0; i < names.size(); ++i) {
      ChartSeries s{.name = names[i], .points = metric(names[i]), .color = kCycle[i % std::size(kCycle)], .dots = true};
      if (shares) {
        for (Point& p : s.points) p.y *= 100;
      }
      c.series.push_back(std::move(s));
    }
    if (shares && !names.empty()) c.y_label = std::string("%");
    return c;
  }

  // A number that each step has.
  Chart of_steps(const char* title, const char* label, double (*of_step)(const StepPoint&),
                 double (*of_epoch)(const EpochResult&)) const {
    Chart c = chart(title, label);
    ChartSeries s{.color = colors::kBlue, .interval = true};
    const double begin = run_.steps.empty() ? std::numeric_limits<double>::infinity() : place(run_.steps.front());
    // What the steps of an earlier part of the run were is known by epoch only, where its log is gone.
    for (const EpochResult& r : run_.rows) {
      if (r.epoch < begin) s.points.push_back({static_cast<double>(r.epoch), of_epoch(r)});
    }
    for (const StepPoint& p : run_.steps) s.points.push_back({place(p), of_step(p)});
    if (!s.points.empty()) c.series = {s};
    return c;
  }

  Chart speed() const {
    Chart c = chart("Speed", "samples a second");
    ChartSeries s{.color = colors::kBlue, .dots = true};
    for (const EpochResult& r : run_.rows) s.points.push_back({static_cast<double>(r.epoch), r.samples_per_s});
    c.series = {s};
    c.y_min = 0;
    return c;
  }

 private:
  double place(const StepPoint& p) const {
    return static_cast<double>(p.step) / static_cast<double>(std::max<std::int64_t>(run_.steps_in_epoch, 1));
  }
  Chart chart(const char* title, const char* label) const {
    return {.title = title, .x_label = "epoch", .y_label = label, .x_min = 0, .x_max = last_};
  }
  std::vector<Point> metric(const std::string& name) const {
    std::vector<Point> points;
    for (const EpochResult& r : run_.rows) {
      for (const auto& [n, value] : r.metrics) {
        if (n == name) points.push_back({static_cast<double>(r.epoch), value});
      }
    }
    return points;
  }

  const RunCurves& run_;
  double last_ = 1;
};

}  // namespace

io::Drawing draw_curves(const RunCurves& run) {
  constexpr double kWidth = 470, kHeight = 245, kTop = 40, kMargin = 12;
  const Curves curves(run);
  std::vector<Chart> charts = {
      curves.loss(),
      curves.metrics(),
      curves.of_steps(
          "Learning rate", "learning rate", [](const StepPoint& p) { return p.lr; },
          [](const EpochResult& r) { return r.lr; }),
      curves.of_steps(
          "Loss scale", "scale", [](const StepPoint& p) { return p.scale; },
          [](const EpochResult& r) { return r.scale; }),
      curves.of_steps(
          "Skipped steps, in all", "steps", [](const StepPoint& p) { return static_cast<double>(p.skipped); },
          [](const EpochResult& r) { return static_cast<double>(r.skipped); }),
      curves.speed()};
  charts[2].y_min = charts[4].y_min = 0;
  charts[3].scale = io::ChartScale::log2;
  io::Drawing drawing(2 * kWidth + 2 * kMargin, kTop + 3 * kHeight + kMargin, run.title);
  drawing.text({kMargin + 8, 26}, io::fitted_text(run.title, 16, 2 * kWidth - 16), {.size = 16, .bold = true});
  for (std::size_t i = 0; i < charts.size(); ++i) {
    draw_chart(drawing,
               {kMargin + static_cast<double>(i % 2) * kWidth, kTop + static_cast<double>(i / 2) * kHeight, kWidth,
                kHeight - 8},
               charts[i]);
  }
  return drawing;
}

}  // namespace halfstep::training
