// SPDX-License-Identifier: Apache-2.0
#include "cli/compare_brief.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <vector>

#include "cli/progress.h"
#include "cli/terminal.h"
#include "halfstep/core/error.h"
#include "halfstep/io/drawing.h"
#include "halfstep/train/results.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;
namespace colors = io::colors;
constexpr io::Color kFirst = colors::kBlue, kSecond = colors::kOrange;

// The samples of the last evaluation, as the table of classes counts them.
std::int64_t samples_in(const fs::path& classes) {
  std::ifstream file(classes);
  std::int64_t sum = 0;
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    const std::string count = line.substr(line.rfind(',') + 1);
    if (count.empty() || count.size() > 12 || count.find_first_not_of("0123456789") != std::string::npos) return 0;
    sum += std::stoll(count);
  }
  return sum;
}

// The metric by which both choose their best evaluation, unless it is the loss.
std::optional<std::string> shared_metric(const RunLog& a, const RunLog& b) {
  const auto best_by = [](const RunLog& log) {
    const auto it = log.settings.find("best_by");
    return it == log.settings.end() ? std::string("top1") : it->second;  // logs of before don't say it
  };
  const auto has = [](const RunLog& log, const std::string& name) {
    return !log.evals.empty() && log.evals.rbegin()->second.metrics.contains(name);
  };
  const std::string name = best_by(a);
  return name != "loss" && name == best_by(b) && has(a, name) && has(b, name) ? std::optional(name) : std::nullopt;
}

// A setting that is a number; 0 where the log has none.
double setting(const RunLog& log, const char* name) {
  const auto it = log.settings.find(name);
  return it == log.settings.end() ? 0 : std::strtod(it->second.c_str(), nullptr);
}

// Milliseconds of the steps, from the speed of the epoch so far: not of the first one that it is of, and not of the
// last one of an epoch where that has fewer samples.
std::map<std::int64_t, double> step_times(const RunLog& log) {
  std::map<std::int64_t, double> times;
  // Logs of before have no accumulation.
  const double size = setting(log, "batch_size") * std::max(setting(log, "accumulate"), 1.0);
  const bool smaller = size > 0 && std::fmod(setting(log, "samples"), size) != 0;
  std::int64_t epoch = -1, first = 0;
  double before = 0;
  for (auto it = log.steps.begin(); it != log.steps.end(); ++it) {
    const auto& [number, step] = *it;
    // The speed is that of a part of the run, which may begin inside an epoch.
    if (step.epoch != epoch || log.begins.contains(number - 1)) epoch = step.epoch, first = number;
    const auto next = std::next(it);
    const bool last = next == log.steps.end() || next->second.epoch != epoch;
    const double seconds = static_cast<double>(number - first + 1) * size / step.samples_per_s;
    const bool known = number > first && !(last && smaller) && std::isfinite(seconds) && seconds > before;
    if (known) times[number] = 1e3 * (seconds - before);
    before = seconds;
  }
  return times;
}

// What a step takes where nothing else runs: the quickest tenth of them. Means and medians of two runs would compare
// what else the machine did meanwhile.
double undisturbed(const std::map<std::int64_t, double>& values) {
  std::vector<double> sorted;
  for (const auto& [unused, v] : values) sorted.push_back(v);
  if (sorted.empty()) return -1;
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 10];
}

bool scales(const RunLog& log) {
  const auto changes = scale_changes(log);
  return std::any_of(changes.begin(), changes.end(), [](const auto& c) { return c.second != 1; });
}

double first_scale(const RunLog& log) { return log.steps.empty() ? 1 : log.steps.begin()->second.scale; }

// Whether `a` computes in 16 bits with weights in float32, as `b` in float32, and both with as many samples of the same
// kind at once.
bool halves_activations(const RunLog& a, const RunLog& b) {
  const auto text = [](const RunLog& log, const char* name) {
    const auto it = log.settings.find(name);
    return it == log.settings.end() ? std::string() : it->second;
  };
  // A level puts weights into 16 bits too.
  const bool region = text(a, "amp") == "f16" || text(a, "amp") == "bf16";
  return region && text(b, "amp") == "off" && !text(a, "model").empty() && text(a, "model") == text(b, "model") &&
         text(a, "batch_size") == text(b, "batch_size") && text(a, "optimizer") == text(b, "optimizer");
}

}  // namespace

RunBrief brief_of(RunLog log, const fs::path& path) {
  RunBrief run{.log = std::move(log), .label = {}};
  run.label = run.log.name;
  const fs::path folder = fs::is_directory(path) ? path : path.parent_path();
  std::error_code error;
  if (fs::exists(folder / "results.csv", error)) {
    try {
      const auto rows = training::read_results(folder / "results.csv");
      for (const auto& r : rows) run.tensor_mb = std::max(run.tensor_mb, r.peak_tensor_mb);
    } catch (const IoError&) {  // no table of a run: then that much isn't known
    }
  }
  run.step_ms = undisturbed(step_times(run.log));
  run.evaluated = samples_in(folder / "classes.csv");
  return run;
}

void label_runs(RunBrief& a, RunBrief& b) {
  const auto amp = [](const RunBrief& r) {
    const auto it = r.log.settings.find("amp");
    return it == r.log.settings.end() ? std::string() : it->second == "off" ? std::string("float32") : it->second;
  };
  if (amp(a).empty() || amp(b).empty() || amp(a) == amp(b)) return;
  a.label = amp(a);
  b.label = amp(b);
}

std::string brief_text(const RunBrief& a, const RunBrief& b) {
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> notes;
  if (const auto name = shared_metric(a.log, b.log)) {
    const double x = a.log.evals.rbegin()->second.metrics.at(*name), y = b.log.evals.rbegin()->second.metrics.at(*name);
    const bool share = is_share(*name);
    const auto number = [&](double value, bool sign) {
      if (share) return sign ? fmt::format("{:+.2f}%", 100 * value) : fmt::format("{:.2f}%", 100 * value);
      return sign ? fmt::format("{:+.4f}", value) : fmt::format("{:.4f}", value);
    };
    rows.push_back({*name == "top1" ? "accuracy on the test part" : *name, number(x, false), number(y, false),
                    number(x - y, true)});
    const auto n = static_cast<double>(std::min(a.evaluated, b.evaluated));
    if (share && n > 0 && x != y) {
      // Two fractions of n independent samples differ by chance by twice this in one of twenty cases.
      const double p = (x + y) / 2, chance = 2 * std::sqrt(2 * p * (1 - p) / n);
      const auto pictures = std::llround(std::fabs(x - y) * n);
      notes.push_back(fmt::format("Accuracy: {} of {:.0f} samples; a test part of that size {} such accuracies apart.",
                                  pictures, n, std::fabs(x - y) <= chance ? "can't tell" : "tells"));
    }
  }
  const auto ratio = [&](const std::string& what, double x, double y, const char* unit, int digits) {
    if (!(x > 0) || !(y > 0)) return;
    rows.push_back({what, fmt::format("{:.{}f} {}", x, digits, unit), fmt::format("{:.{}f} {}", y, digits, unit),
                    fmt::format("{:.2f}x", x / y)});
  };
  ratio("memory of tensors, at most", a.tensor_mb, b.tensor_mb, "MB", 1);
  const double memory = a.tensor_mb / b.tensor_mb;
  if (a.tensor_mb > 0 && b.tensor_mb > 0 && memory > 0.5 && memory < 0.8 && halves_activations(a.log, b.log)) {
    notes.push_back("Memory: activations take half; weights, their gradients and the optimizer's state stay float32.");
  }
  ratio("time of a step, at best", a.step_ms, b.step_ms, "ms", 1);
  const double time = a.step_ms / b.step_ms;
  constexpr double kVaries = 0.1;
  if (a.step_ms > 0 && b.step_ms > 0 && std::fabs(time - 1) <= kVaries && time != 1) {
    notes.push_back("Time: steps differ by less than timings on a busy machine vary.");
  }
  const double skipped = a.log.skipped.value_or(0) - b.log.skipped.value_or(0);
  if (a.log.skipped.value_or(0) + b.log.skipped.value_or(0) > 0) {
    rows.push_back({"skipped steps", fmt::format("{:g}", a.log.skipped.value_or(0)),
                    fmt::format("{:g}", b.log.skipped.value_or(0)), fmt::format("{:+g}", skipped)});
    for (const RunBrief* with : {&a, &b}) {
      if (with->log.skipped.value_or(0) == 0) continue;
      notes.push_back(fmt::format(
          "Skipped steps: {:g} whose gradients overflowed {} were dropped; the loss scale went from {} to {}.",
          *with->log.skipped, with->label, scale_text(first_scale(with->log)),
          scale_text(with->log.last_scale.value_or(1))));
    }
  }
  std::string text = table({"", a.label, b.label, "difference"}, rows);
  if (!notes.empty()) text += '\n';
  for (const std::string& n : notes) text += n + '\n';
  return text;
}

namespace {

std::vector<io::Point> losses(const RunLog& log) {
  training::StepCurve curve(150);
  for (const auto& [step, s] : log.steps) curve.add({.step = step, .loss = s.loss});
  std::vector<io::Point> points;
  for (const auto& p : curve.points()) points.push_back({static_cast<double>(p.step), p.loss});
  return points;
}

io::Chart chart_of(const char* title, const char* y, double last) {
  return {.title = title, .x_label = "step", .y_label = y, .x_min = 0, .x_max = last};
}

// Two bars from a common line, with their numbers.
void draw_bars(io::Drawing& drawing, const io::Box& box, const std::string& title, const RunBrief& a, double x,
               const RunBrief& b, double y, const std::string& unit, int digits) {
  drawing.text({box.x, box.y + 14}, title, {.size = 13, .bold = true});
  const double most = std::max(x, y), longest = box.width - 170;
  const auto bar = [&](double top, const RunBrief& run, double value, io::Color color) {
    const double length = most > 0 ? value / most * longest : 0;
    drawing.text({box.x + 70, top + 17}, io::fitted_text(run.label, 12, 66),
                 {.size = 12, .color = colors::kGrey, .align = io::Align::right});
    drawing.fill({box.x + 78, top, std::max(length, 1.0), 24}, color);
    drawing.text({box.x + 86 + length, top + 17}, fmt::format("{:.{}f} {}", value, digits, unit), {.size = 12});
  };
  bar(box.y + 26, a, x, kFirst);
  bar(box.y + 56, b, y, kSecond);
  if (y > 0) {
    drawing.text({box.x + box.width - 8, box.y + 14}, fmt::format("{:.2f}x", x / y),
                 {.size = 15, .color = kFirst, .align = io::Align::right, .bold = true});
  }
}

}  // namespace

void draw_comparison(const RunBrief& a, const RunBrief& b, const fs::path& file) {
  constexpr double kWidth = 470, kTop = 46;
  const auto model = a.log.settings.find("model");
  const std::string title =
      fmt::format("{}{} beside {}", model == a.log.settings.end() ? "" : model->second + ": ", a.label, b.label);
  io::Drawing drawing(2 * kWidth + 24, kTop + 510, title);
  drawing.text({24, 30}, io::fitted_text(title, 18, 2 * kWidth - 24), {.size = 18, .bold = true});
  double last = 1;
  for (const RunLog* log : {&a.log, &b.log}) {
    if (!log->steps.empty()) last = std::max(last, static_cast<double>(log->steps.rbegin()->first));
  }
  io::Chart loss = chart_of("Training loss", "loss", last);
  loss.series = {{.name = a.label, .points = losses(a.log), .color = kFirst},
                 {.name = b.label, .points = losses(b.log), .color = kSecond}};
  draw_chart(drawing, {12, kTop, kWidth, 245}, loss);
  if (const auto name = shared_metric(a.log, b.log)) {
    const bool share = is_share(*name);
    io::Chart metric = chart_of(*name == "top1" ? "Accuracy on the test part" : name->c_str(), share ? "%" : "", last);
    for (const RunBrief* run : {&a, &b}) {
      io::ChartSeries s{.name = run->label, .color = run == &a ? kFirst : kSecond, .dots = true};
      for (const auto& [epoch, eval] : run->log.evals) {
        const auto value = eval.metrics.find(*name);
        if (value == eval.metrics.end()) continue;
        s.points.push_back({static_cast<double>(eval.step), share ? 100 * value->second : value->second});
      }
      metric.series.push_back(std::move(s));
    }
    draw_chart(drawing, {12 + kWidth, kTop, kWidth, 245}, metric);
  }
  // Without loss scales the times of the steps are worth more.
  const bool scaled = scales(a.log) || scales(b.log);
  io::Chart scale = scaled ? chart_of("Loss scale", "scale", last) : chart_of("Time of a step", "ms", last);
  if (scaled) scale.scale = io::ChartScale::log2;
  if (!scaled) scale.y_min = 0;
  for (const RunBrief* run : {&a, &b}) {
    io::ChartSeries s{.name = run->label, .color = run == &a ? kFirst : kSecond, .width = scaled ? 1.5 : 1};
    s.interval = scaled;
    if (!scaled) {
      for (const auto& [step, ms] : step_times(run->log)) s.points.push_back({static_cast<double>(step), ms});
      scale.series.push_back(std::move(s));
      continue;
    }
    for (const auto& [step, value] : scale_changes(run->log)) s.points.push_back({static_cast<double>(step), value});
    if (!s.points.empty() && !run->log.steps.empty()) {
      s.points.push_back({static_cast<double>(run->log.steps.rbegin()->first), s.points.back().y});
    }
    scale.series.push_back(std::move(s));
  }
  draw_chart(drawing, {12, kTop + 255, kWidth, 245}, scale);
  const io::Box bars{12 + kWidth + 24, kTop + 262, kWidth - 30, 90};
  if (a.tensor_mb > 0 && b.tensor_mb > 0) {
    draw_bars(drawing, bars, "Memory of tensors, at most", a, a.tensor_mb, b, b.tensor_mb, "MB", 1);
  }
  if (a.step_ms > 0 && b.step_ms > 0) {
    draw_bars(drawing, {bars.x, bars.y + 120, bars.width, bars.height}, "Time of a step, at best", a, a.step_ms, b,
              b.step_ms, "ms", 1);
  }
  drawing.save(file);
}

}  // namespace halfstep::cli
