// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/results.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/atomic_file.h"

namespace halfstep::training {
namespace {

constexpr std::string_view kMetric = "eval_";

// The columns that every table has, in order: those before the metrics and those behind.
struct Column {
  const char* name;
  double (*get)(const EpochResult&);
  void (*set)(EpochResult&, double);
};
template <auto Member>
constexpr Column column(const char* name) {
  using T = std::remove_cvref_t<decltype(std::declval<EpochResult>().*Member)>;
  return {name, [](const EpochResult& r) { return static_cast<double>(r.*Member); },
          [](EpochResult& r, double v) { r.*Member = static_cast<T>(v); }};
}
constexpr Column kBefore[] = {column<&EpochResult::epoch>("epoch"), column<&EpochResult::step>("step"),
                              column<&EpochResult::loss>("loss")};
constexpr Column kBehind[] = {column<&EpochResult::lr>("lr"),
                              column<&EpochResult::scale>("scale"),
                              column<&EpochResult::skipped>("skipped"),
                              column<&EpochResult::seconds>("seconds"),
                              column<&EpochResult::samples_per_s>("samples_per_s"),
                              column<&EpochResult::peak_tensor_mb>("peak_tensor_mb"),
                              column<&EpochResult::peak_rss_mb>("peak_rss_mb")};

// Counts beyond 2^53 don't occur: no run has so many steps.
std::string number_text(double v) { return std::isnan(v) ? "nan" : fmt::format("{}", v); }

// The fields of a line. Names have no line ends, so that no field goes over several lines.
std::vector<std::string> fields_of(std::string_view line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quoted && c == '"' && i + 1 < line.size() && line[i + 1] == '"') {
      fields.back() += line[++i];
    } else if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

const Column* find_column(std::string_view name) {
  for (const auto& columns : {std::span<const Column>(kBefore), std::span<const Column>(kBehind)}) {
    for (const Column& c : columns) {
      if (name == c.name) return &c;
    }
  }
  return nullptr;
}

}  // namespace

std::string csv_field(std::string_view text) {
  const std::string shown = printable(text);
  if (shown.find_first_of(",\" ") == std::string::npos) return shown;
  std::string quoted = "\"";
  for (const char c : shown) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + '"';
}

std::string results_csv(std::span<const EpochResult> epochs) {
  std::vector<std::string> metrics;
  for (const EpochResult& e : epochs) {
    for (const auto& [name, unused] : e.metrics) {
      if (std::find(metrics.begin(), metrics.end(), name) == metrics.end()) metrics.push_back(name);
    }
  }
  std::string text;
  const auto end_line = [&] { text.back() = '\n'; };
  for (const Column& c : kBefore) text += std::string(c.name) + ',';
  for (const std::string& m : metrics) text += csv_field(std::string(kMetric) + m) + ',';
  for (const Column& c : kBehind) text += std::string(c.name) + ',';
  end_line();
  for (const EpochResult& e : epochs) {
    for (const Column& c : kBefore) text += number_text(c.get(e)) + ',';
    for (const std::string& m : metrics) {
      const auto found = std::find_if(e.metrics.begin(), e.metrics.end(), [&](const auto& p) { return p.first == m; });
      if (found != e.metrics.end()) text += number_text(found->second);
      text += ',';
    }
    for (const Column& c : kBehind) text += number_text(c.get(e)) + ',';
    end_line();
  }
  return text;
}

std::vector<EpochResult> read_results(const std::filesystem::path& path) {
  constexpr std::uintmax_t kMostBytes = std::uintmax_t{256} << 20;
  const std::string text = io::read_file(path, kMostBytes);
  const std::string file = shown_path(path);
  std::vector<EpochResult> rows;
  std::vector<std::string> names;
  std::int64_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::vector<std::string> fields = fields_of(std::string_view(text).substr(begin, end - begin));
    begin = end + 1;
    if (++number == 1) {
      names = fields;
      for (const std::string& name : names) {
        if (!find_column(name) && !name.starts_with(kMetric)) {
          fail<IoError>("{}:1: expected the columns of a run's results, got '{}'", file, printable_start(name, 40));
        }
      }
      continue;
    }
    if (fields.size() != names.size()) {
      fail<IoError>("{}:{}: expected {} fields, got {}", file, number, names.size(), fields.size());
    }
    EpochResult row;
    for (std::size_t i = 0; i < fields.size(); ++i) {
      const std::string& field = fields[i];
      const Column* known = find_column(names[i]);
      if (field.empty() && !known) continue;
      double value = 0;
      const auto [rest, error] = std::from_chars(field.data(), field.data() + field.size(), value);
      const bool whole = known == &kBefore[0] || known == &kBefore[1] || (known && names[i] == "skipped");
      constexpr double kMost = 9007199254740992;  // 2^53
      const bool fits = !whole || (value >= 0 && value <= (known == &kBefore[0] ? 1e9 : kMost));
      if (error != std::errc{} || rest != field.data() + field.size() || !fits) {
        fail<IoError>("{}:{}: expected a number for {}, got '{}'", file, number, names[i], printable_start(field, 40));
      }
      if (known) {
        known->set(row, value);
      } else {
        row.metrics.emplace_back(names[i].substr(kMetric.size()), value);
      }
    }
    rows.push_back(std::move(row));
  }
  if (number == 0) fail<IoError>("{}: expected the results of a run, got an empty file", file);
  return rows;
}

void StepCurve::add(const StepPoint& step) {
  if (groups_.empty() || groups_.back().steps == width_) {
    if (groups_.size() >= most_) {
      // Each two become one.
      std::vector<Group> merged;
      for (std::size_t i = 0; i < groups_.size(); i += 2) {
        Group g = groups_[i];
        if (i + 1 < groups_.size()) {
          const Group& next = groups_[i + 1];
          g = {next.last, g.sum + next.sum, g.finite + next.finite, g.steps + next.steps};
        }
        merged.push_back(g);
      }
      groups_ = std::move(merged);
      width_ *= 2;
    }
    if (groups_.empty() || groups_.back().steps == width_) groups_.emplace_back();
  }
  Group& g = groups_.back();
  g.last = step;
  ++g.steps;
  if (std::isfinite(step.loss)) {
    g.sum += step.loss;
    ++g.finite;
  }
}

std::vector<StepPoint> StepCurve::points() const {
  std::vector<StepPoint> result;
  for (const Group& g : groups_) {
    result.push_back(g.last);
    result.back().loss =
        g.finite > 0 ? g.sum / static_cast<double>(g.finite) : std::numeric_limits<double>::quiet_NaN();
  }
  return result;
}

}  // namespace halfstep::training
