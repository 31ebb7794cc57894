// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cli/compare_brief.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/run_log.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "halfstep/core/text.h"

namespace halfstep::cli {
namespace {

using Row = std::vector<std::string>;

struct CompareOptions {
  std::vector<std::string> paths;
  double tolerance = 0.05;
  bool brief = false;
  std::filesystem::path figure;
};

// How a kind of number is printed.
struct Form {
  double factor = 1;
  int digits = 4;
  const char* unit = "";
  bool ratio = false;  // the last column is a over b, not a minus b
};
constexpr Form kPlain{}, kPercent{.factor = 100, .digits = 2, .unit = "%"};

std::string text(std::optional<double> value, const Form& form) {
  if (!value) return "-";
  if (!std::isfinite(*value)) return std::isnan(*value) ? "NaN" : *value > 0 ? "inf" : "-inf";
  return fmt::format("{:.{}f}{}", *value * form.factor, form.digits, form.unit);
}

std::string difference(std::optional<double> a, std::optional<double> b, const Form& form) {
  if (!a || !b || !std::isfinite(*a) || !std::isfinite(*b)) return "-";
  if (form.ratio) return *b != 0 ? fmt::format("{:.2f}x", *a / *b) : "-";
  return fmt::format("{:+.{}f}{}", (*a - *b) * form.factor, form.digits, form.unit);
}

class Rows {
 public:
  void add(const std::string& what, std::optional<double> a, std::optional<double> b, const Form& form) {
    if (a || b) rows.push_back({what, text(a, form), text(b, form), difference(a, b, form)});
  }
  std::vector<Row> rows;
};

std::optional<double> metric(const RunLog& log, std::int64_t epoch, const std::string& name) {
  const auto eval = log.evals.find(epoch);
  if (eval == log.evals.end()) return std::nullopt;
  const auto value = eval->second.metrics.find(name);
  return value == eval->second.metrics.end() ? std::nullopt : std::optional(value->second);
}

// Mean loss of the steps of each epoch.
std::map<std::int64_t, double> training_losses(const RunLog& log) {
  std::map<std::int64_t, std::pair<double, double>> sums;
  for (const auto& [number, step] : log.steps) {
    auto& [sum, count] = sums[step.epoch];
    sum += step.loss;
    count += 1;
  }
  std::map<std::int64_t, double> means;
  for (const auto& [epoch, s] : sums) means[epoch] = s.first / s.second;
  return means;
}

void add_settings(std::vector<Row>& rows, const RunLog& a, const RunLog& b) {
  const auto value = [](const RunLog& log, const std::string& key) {
    const auto it = log.settings.find(key);
    return it == log.settings.end() ? std::string("?") : it->second;
  };
  rows.push_back({"precision", value(a, "amp"), value(b, "amp"), ""});
  std::set<std::string> keys;
  for (const RunLog* log : {&a, &b}) {
    for (const auto& [key, unused] : log->settings) keys.insert(key);
  }
  keys.erase("amp");
  keys.erase("scale");  // its history comes below
  for (const std::string& key : keys) {
    if (value(a, key) != value(b, key)) rows.push_back({key, value(a, key), value(b, key), ""});
  }
}

void add_epochs(Rows& rows, const RunLog& a, const RunLog& b) {
  const auto train_a = training_losses(a), train_b = training_losses(b);
  std::set<std::int64_t> epochs;
  for (const auto* means : {&train_a, &train_b}) {
    for (const auto& [epoch, unused] : *means) epochs.insert(epoch);
  }
  std::set<std::string> names;
  for (const RunLog* log : {&a, &b}) {
    for (const auto& [epoch, eval] : log->evals) {
      epochs.insert(epoch);
      for (const auto& [name, unused] : eval.metrics) names.insert(name);
    }
  }
  names.erase("loss");
  const auto mean = [](const auto& means, std::int64_t epoch) {
    const auto it = means.find(epoch);
    return it == means.end() ? std::nullopt : std::optional(it->second);
  };
  for (const std::int64_t epoch : epochs) {
    rows.add(fmt::format("epoch {} loss", epoch), mean(train_a, epoch), mean(train_b, epoch), kPlain);
    rows.add(fmt::format("epoch {} test loss", epoch), metric(a, epoch, "loss"), metric(b, epoch, "loss"), kPlain);
    for (const std::string& name : names) {
      rows.add(fmt::format("epoch {} {}", epoch, name), metric(a, epoch, name), metric(b, epoch, name),
               is_share(name) ? kPercent : kPlain);
    }
  }
}

std::string state(const RunLog& log) {
  std::string text = log.interrupted ? "interrupted" : log.ended ? "done" : log.cut_off ? "in a line" : "not ended";
  if (log.starts > 1) text += fmt::format(", resumed {}x", log.starts - 1);
  return text;
}

std::optional<double> rate(const RunLog& log) {
  if (log.steps.empty() || std::isnan(log.steps.rbegin()->second.samples_per_s)) return std::nullopt;
  return log.steps.rbegin()->second.samples_per_s;
}

// Where the losses of equal steps are not the same, and where they are further apart than the tolerance.
void print_parting(const RunLog& a, const RunLog& b, double tolerance) {
  struct Place {
    std::int64_t step = 0;
    double a = 0, b = 0;
  };
  std::optional<Place> other, apart;
  std::int64_t both = 0;
  for (const auto& [number, step] : a.steps) {
    const auto it = b.steps.find(number);
    if (it == b.steps.end()) continue;
    ++both;
    const double x = step.loss, y = it->second.loss;
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    if (!other) other = Place{number, x, y};
    // Of NaN and a number there is no distance: they are apart.
    if (!(std::fabs(x - y) <= tolerance * std::max(std::fabs(x), std::fabs(y)))) {
      apart = Place{number, x, y};
      break;
    }
  }
  if (both == 0) {
    fmt::print("the runs have no steps in common\n");
    return;
  }
  const auto say = [both](const std::string& what, const std::optional<Place>& p) {
    if (!p) {
      fmt::print("{}: none of the {} that both have\n", what, both);
    } else {
      const Form form{.digits = 6};
      fmt::print("{}: {} ({} and {})\n", what, p->step, text(p->a, form), text(p->b, form));
    }
  };
  say("first step with another loss", other);
  if (other) say(fmt::format("first step whose losses are more than {:g}% apart", 100 * tolerance), apart);
}

void print_scales(const RunLog& a, const RunLog& b) {
  const auto changes_a = scale_changes(a), changes_b = scale_changes(b);
  const auto scales = [](const auto& changes) {
    return std::any_of(changes.begin(), changes.end(), [](const auto& c) { return c.second != 1; });
  };
  if (!scales(changes_a) && !scales(changes_b)) return;
  std::set<std::int64_t> places;
  for (const auto* changes : {&changes_a, &changes_b}) {
    for (const auto& [step, unused] : *changes) places.insert(step);
  }
  const auto at = [](const RunLog& log, const auto& changes, std::int64_t step) -> std::string {
    auto it = changes.upper_bound(step);
    if (it == changes.begin() || log.steps.rbegin()->first < step) return "-";
    return scale_text(std::prev(it)->second);
  };
  std::vector<Row> rows;
  for (const std::int64_t step : places) {
    rows.push_back({fmt::format("{}", step), at(a, changes_a, step), at(b, changes_b, step)});
  }
  constexpr std::size_t kEnds = 12;
  if (rows.size() > 2 * kEnds + 1) {
    const std::size_t left_out = rows.size() - 2 * kEnds;
    rows.erase(rows.begin() + kEnds, rows.end() - kEnds);
    rows.insert(rows.begin() + kEnds, Row{fmt::format("({} more)", left_out), "", ""});
  }
  fmt::print("\n{}", table({"loss scale from step", a.name, b.name}, rows));
}

int run(const CompareOptions& o) {
  const std::string ending = o.figure.extension().string();
  if (!o.figure.empty() && ending != ".svg" && ending != ".png") {
    throw UsageError(fmt::format("--figure: expected a name that ends in .svg or .png, got {}", shown_path(o.figure)));
  }
  if (!(o.tolerance >= 0) || !std::isfinite(o.tolerance)) {
    throw UsageError(fmt::format("--tolerance: expected a number of at least 0, got {}", o.tolerance));
  }
  RunLog a = read_run_log(o.paths[0]), b = read_run_log(o.paths[1]);
  if (a.name == b.name) {
    a.name = o.paths[0];
    b.name = o.paths[1];
  }
  if (o.brief || !o.figure.empty()) {
    RunBrief x = brief_of(a, o.paths[0]), y = brief_of(b, o.paths[1]);
    label_runs(x, y);
    if (!o.figure.empty()) draw_comparison(x, y, o.figure);
    if (o.brief) {
      fmt::print("{}", brief_text(x, y));
      return kDone;
    }
  }
  Rows rows;
  add_settings(rows.rows, a, b);
  if (state(a) != "done" || state(b) != "done") rows.rows.push_back({"the run is", state(a), state(b), ""});
  add_epochs(rows, a, b);
  rows.add("time", a.seconds, b.seconds, {.digits = 2, .unit = " s", .ratio = true});
  rows.add("samples a second", rate(a), rate(b), {.digits = 0, .ratio = true});
  rows.add("peak memory", a.peak_mb, b.peak_mb, {.digits = 0, .unit = " MB", .ratio = true});
  rows.add("peak device memory", a.device_peak_mb, b.device_peak_mb, {.digits = 0, .unit = " MB", .ratio = true});
  const auto scale = [](const RunLog& log) { return log.last_scale ? scale_text(*log.last_scale) : std::string("-"); };
  rows.rows.push_back({"loss scale at the end", scale(a), scale(b), ""});
  rows.add("skipped steps", a.skipped, b.skipped, {.digits = 0});
  fmt::print("{}\n", table({"", a.name, b.name, "difference"}, rows.rows));
  print_parting(a, b, o.tolerance);
  print_scales(a, b);
  return kDone;
}

}  // namespace

void add_compare(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "compare", "Put two runs side by side: loss, metrics, time, memory, loss scale");
  auto o = std::make_shared<CompareOptions>();
  verb.add_list("RUN", o->paths, "Folder of a run, or its log").required().values(2, 2);
  add_real(verb, "--tolerance", o->tolerance, "How far apart the losses of a step may be, as a share of the larger");
  verb.add_switch("--brief", o->brief, "A line for each quantity: accuracy, memory of tensors, time, skipped steps");
  add_path(verb, "--figure", o->figure, "File for a figure of both, .svg or .png");
  verb.run([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
