// SPDX-License-Identifier: Apache-2.0
#include "cli/quantize_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "cli/progress.h"
#include "cli/verbs.h"
#include "cli/weights_files.h"
#include "halfstep/runtime/machine.h"

namespace halfstep::cli {
namespace {

namespace colors = io::colors;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string percent_text(double share) { return fmt::format("{:.2f}%", 100 * share); }

constexpr double kRow = 36, kTop = 104, kBar = 18, kNames = 240, kPanel = 176, kScore = 250, kGap = 26, kMargin = 24;

// A bar for each row that has a value, from 0.
void draw_bars(io::Drawing& drawing, double left, const QuantizedTable& t, const std::string& title,
               const std::vector<io::Color>& palette, double (*value)(const QuantizedRow&),
               std::string (*label)(double)) {
  double most = 0, widest = 0;
  for (const QuantizedRow& row : t.rows) {
    if (!row.session) continue;
    most = std::max(most, value(row));
    widest = std::max(widest, io::text_width(label(value(row)), 12));
  }
  drawing.text({left, kTop - 16}, title, {.size = 12, .bold = true});
  const double room = kPanel - widest - 8;
  double y = kTop;
  std::size_t i = 0;
  for (const QuantizedRow& row : t.rows) {
    if (!row.session) continue;
    const double width = most > 0 ? room * value(row) / most : 0;
    drawing.fill({left, y + (kRow - kBar) / 2, std::max(width, 1.0), kBar}, palette[i++ % palette.size()]);
    drawing.text({left + width + 6, y + kRow / 2 + 4.5}, label(value(row)), {.size = 12});
    y += kRow;
  }
  drawing.line({left, kTop}, {left, y}, {.color = colors::kGrey});
}

// Accuracies lie too close for bars from 0: dots on an axis of their range, and what is lost in points.
void draw_scores(io::Drawing& drawing, double left, const QuantizedTable& t, const std::vector<io::Color>& palette) {
  double least = INFINITY, most = -INFINITY, reference = NAN;
  std::size_t shown = 0;
  for (const QuantizedRow& row : t.rows) {
    if (!row.session || !row.score) continue;
    ++shown;
    if (std::isnan(reference)) reference = *row.score;
    least = std::min(least, *row.score);
    most = std::max(most, *row.score);
  }
  drawing.text({left, kTop - 16}, t.score + ", and points more than float32", {.size = 12, .bold = true});
  if (shown == 0 || !std::isfinite(least) || !std::isfinite(most)) return;
  if (t.max_drop) least = std::min(least, reference - *t.max_drop / 100);
  const double pad = std::max(0.12 * (most - least), 0.001);
  least -= pad;
  most += pad;
  constexpr double kLabels = 116;
  const double room = kScore - kLabels, bottom = kTop + kRow * static_cast<double>(shown);
  const auto x = [&](double score) { return left + room * (score - least) / (most - least); };
  if (t.max_drop) {
    const double from = x(reference - *t.max_drop / 100);
    drawing.fill({from, kTop, left + room - from, bottom - kTop}, {228, 241, 234});
    drawing.text({from, bottom + 30}, fmt::format("allowed: {:g} lost", *t.max_drop),
                 {.size = 10, .color = colors::kGreen});
  }
  drawing.line({x(reference), kTop}, {x(reference), bottom}, {.color = colors::kGrey});
  drawing.line({left, bottom}, {left + room, bottom}, {.color = colors::kGrey});
  drawing.text({left, bottom + 15}, percent_text(least), {.size = 10, .color = colors::kGrey});
  drawing.text({left + room, bottom + 15}, percent_text(most),
               {.size = 10, .color = colors::kGrey, .align = io::Align::right});
  double y = kTop;
  std::size_t i = 0;
  for (const QuantizedRow& row : t.rows) {
    if (!row.session) continue;
    const io::Color color = palette[i++ % palette.size()];
    if (row.score) {
      drawing.line({left, y + kRow / 2}, {x(*row.score), y + kRow / 2}, {.color = colors::kPale});
      drawing.dot({x(*row.score), y + kRow / 2}, 5.5, color);
      const double points = 100 * (*row.score - reference);
      drawing.text({left + room + 8, y + kRow / 2 + 4.5},
                   percent_text(*row.score) + (i == 1 ? "" : fmt::format(" ({:+.2f})", points)), {.size = 12});
    }
    y += kRow;
  }
}

}  // namespace

void QuantizedTable::time(const Tensor& input) {
  constexpr double kSeconds = 1.5;  // of each row
  constexpr std::size_t kLeast = 5, kMost = 200;
  batch = input.size(0);
  std::vector<std::vector<double>> seconds(rows.size());
  const Clock::time_point start = Clock::now();
  for (std::size_t call = 0; call < kMost + 2 && !g_stop; ++call) {
    if (call >= kLeast + 2 && seconds_since(start) > kSeconds * static_cast<double>(rows.size())) break;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (!rows[i].session) continue;
      const Clock::time_point begin = Clock::now();
      (void)rows[i].session->run({&input, 1});
      if (call >= 2) seconds[i].push_back(seconds_since(begin));
    }
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::vector<double>& s = seconds[i];
    if (s.empty()) continue;
    std::nth_element(s.begin(), s.begin() + static_cast<std::ptrdiff_t>(s.size() / 2), s.end());
    rows[i].ms = 1000 * s[s.size() / 2] / static_cast<double>(batch);
    const infer::SessionMemory memory = rows[i].session->memory();
    rows[i].memory = memory.weights + memory.activations;
  }
}

std::string QuantizedTable::text(const TerminalStyle& style) const {
  std::vector<std::vector<std::string>> lines;
  for (const QuantizedRow& row : rows) {
    lines.push_back({row.name, row.score ? percent_text(*row.score) : "", fmt::format("{:.4f}", row.loss)});
    if (!row.session) continue;
    lines.back().insert(lines.back().end(),
                        {fmt::format("{:.3f}", row.ms), bytes_text(row.memory), bytes_text(row.file)});
  }
  return table({"computed in", score, "loss", "ms a sample", "memory", "file"}, lines, style);
}

std::optional<QuantizedRow> evaluated_row(training::Task& task, const std::shared_ptr<const data::Dataset>& test,
                                          const std::string& name, training::EvalOptions options) {
  if (g_stop) return std::nullopt;
  options.stop = &g_stop;
  const Clock::time_point start = Clock::now();
  const training::EvalReport made = training::evaluate(task, test, options);
  if (made.interrupted) return std::nullopt;
  QuantizedRow row{.name = name, .loss = static_cast<double>(made.metrics["loss"])};
  if (task.larger_is_better()) row.score = static_cast<double>(made.metrics[task.best_by()]);
  if (!name.empty()) {
    fmt::print("{}: {} in {:.2f} s\n", name, results_text(made.metrics), seconds_since(start));
    std::fflush(stdout);
  }
  return row;
}

std::string parity_text(const std::vector<infer::LayerParity>& layers, std::int64_t count) {
  const auto percent = [](double share) { return fmt::format("{:.3f}%", 100 * share); };
  std::vector<std::vector<std::string>> lines;
  for (std::size_t i = 0; i < layers.size() && static_cast<std::int64_t>(i) < count; ++i) {
    const infer::LayerParity& l = layers[i];
    lines.push_back({l.name, l.call, percent(l.chain.by_one), percent(l.chain.by_more), percent(l.alone.by_one),
                     percent(l.alone.by_more)});
  }
  if (lines.empty()) return "";
  return fmt::format("\nlayers whose integers differ most from fake quantization, of {}:\n{}", layers.size(),
                     table({"layer", "call", "by 1 step", "by more", "by 1, alone", "by more, alone"}, lines));
}

std::string sensitivity_text(const std::vector<quant::LayerSensitivity>& costs, std::int64_t count) {
  std::vector<std::vector<std::string>> lines;
  for (std::size_t i = 0; i < costs.size() && static_cast<std::int64_t>(i) < count; ++i) {
    lines.push_back({costs[i].module, fmt::format("{:.6f}", costs[i].loss), fmt::format("{:+.6f}", costs[i].increase)});
  }
  if (lines.empty()) return "";
  return fmt::format("\nlayers that cost most where they alone are quantized, of {}; --quant-skip leaves one out:\n{}",
                     costs.size(), table({"layer", "loss", "more than float32"}, lines));
}

std::string set_text(const std::vector<std::string>& names, const std::vector<std::string>& enough) {
  std::vector<std::string> without;
  std::ranges::copy_if(enough, std::back_inserter(without),
                       [&](const std::string& name) { return std::ranges::find(names, name) == names.end(); });
  if (without.size() == 1 && names.size() + 1 == enough.size()) return fmt::format(" (without {})", without[0]);
  constexpr std::ptrdiff_t kMost = 4;
  if (names.empty()) return "";
  const std::vector<std::string> first(names.begin(), names.begin() + std::min(kMost, std::ssize(names)));
  return fmt::format(" ({}{})", fmt::join(first, ", "), first.size() < names.size() ? ", ..." : "");
}

io::Drawing QuantizedTable::figure() const {
  const auto shown = static_cast<double>(
      std::count_if(rows.begin(), rows.end(), [](const QuantizedRow& row) { return row.session.has_value(); }));
  const bool scored = !score.empty();
  const double bars = kMargin + kNames + (scored ? kScore + kGap : 0);
  const std::string title = fmt::format("{} in integers", model);
  io::Drawing drawing(bars + 3 * kPanel + 2 * kGap + kMargin, kTop + kRow * shown + 44, title);
  drawing.text({kMargin, 32}, title, {.size = 16, .bold = true});
  const MachineInfo cpu = machine();
  drawing.text({kMargin, 54},
               fmt::format("{} test samples; time and memory of a session's calls with {} samples, on {} with {} "
                           "thread{}",
                           samples, batch, cpu.cpu, cpu.threads, cpu.threads == 1 ? "" : "s"),
               {.size = 12, .color = colors::kGrey});
  const std::vector<io::Color> palette{colors::kGrey,  colors::kSky,  colors::kBlue,
                                       colors::kGreen, colors::kPink, colors::kOrange};
  double y = kTop + kRow / 2 + 4.5;
  for (const QuantizedRow& row : rows) {
    if (!row.session) continue;
    drawing.text({kMargin, y}, io::fitted_text(row.name, 13, kNames - 10), {.size = 13});
    y += kRow;
  }
  if (scored) draw_scores(drawing, kMargin + kNames, *this, palette);
  draw_bars(
      drawing, bars, *this, "ms a sample", palette, [](const QuantizedRow& r) { return r.ms; },
      [](double v) { return fmt::format("{:.3g}", v); });
  draw_bars(
      drawing, bars + kPanel + kGap, *this, "memory", palette,
      [](const QuantizedRow& r) { return static_cast<double>(r.memory); },
      [](double v) { return bytes_text(static_cast<std::uint64_t>(v)); });
  draw_bars(
      drawing, bars + 2 * (kPanel + kGap), *this, "file", palette,
      [](const QuantizedRow& r) { return static_cast<double>(r.file); },
      [](double v) { return bytes_text(static_cast<std::uint64_t>(v)); });
  return drawing;
}

}  // namespace halfstep::cli
