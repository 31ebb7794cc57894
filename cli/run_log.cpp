// SPDX-License-Identifier: Apache-2.0
#include "cli/run_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/io/atomic_file.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double number(const json& event, const char* key) {
  const auto it = event.find(key);
  return it != event.end() && it->is_number() ? it->get<double>() : kNone;
}

std::optional<double> some(double value) { return std::isnan(value) ? std::nullopt : std::optional(value); }

// Counts begin with 1; what is none isn't looked at.
std::int64_t count(const json& event, const char* key) {
  const auto it = event.find(key);
  if (it == event.end() || !it->is_number_integer()) return 0;
  if (it->is_number_unsigned() && it->get<std::uint64_t>() > std::uint64_t{1} << 62) return 0;
  return std::max<std::int64_t>(it->get<std::int64_t>(), 0);
}

class Reading {
 public:
  explicit Reading(std::string file) : file_(std::move(file)) {}

  void line(std::string_view text, std::int64_t number, bool whole) {
    json event = json::parse(text, nullptr, false);
    if (event.is_discarded()) {
      // Killed while it wrote, the run left half a line. One that went on wrote behind it.
      const std::size_t begin = text.find("{\"event\":\"start\"");
      if (begin != std::string_view::npos && begin > 0) {
        event = json::parse(text.substr(begin), nullptr, false);
      } else if (!whole && number > 1) {
        log.cut_off = true;
        return;
      }
    }
    const auto kind = event.is_object() ? event.find("event") : event.end();
    if (!event.is_object() || kind == event.end() || !kind->is_string()) {
      throw IoError(fmt::format("{}:{}: expected a JSON object with an event", file_, number));
    }
    take(event, kind->get<std::string>());
  }

  RunLog log;

 private:
  void take(const json& event, const std::string& kind) {
    if (kind == "start") {
      start(event);
    } else if (kind == "step") {
      // Without a number of its own a step stands behind the one before.
      const std::int64_t given = count(event, "step");
      const std::int64_t step = given > 0 ? given : log.steps.empty() ? 1 : log.steps.rbegin()->first + 1;
      log.steps[step] = {.epoch = count(event, "epoch"),
                         .loss = number(event, "loss"),
                         .scale = number(event, "scale"),
                         .skipped = number(event, "skipped"),
                         .samples_per_s = number(event, "samples_per_s")};
      memory(event);
    } else if (kind == "eval") {
      LoggedEval eval{.step = count(event, "step"), .metrics = {}};
      for (const auto& [key, value] : event.items()) {
        const bool of_the_run = key == "epoch" || key == "step" || key == "scale" || key == "skipped" ||
                                key == "peak_rss_mb" || key == "device_peak_mb" || key == "seconds" ||
                                key == "samples_per_s";
        if (!of_the_run && (value.is_number() || value.is_null())) eval.metrics[key] = number(event, key.c_str());
      }
      log.evals[count(event, "epoch")] = std::move(eval);
      memory(event);
    } else if (kind == "end") {
      log.ended = true;
      const auto interrupted = event.find("interrupted");
      log.interrupted = interrupted != event.end() && interrupted->is_boolean() && interrupted->get<bool>();
      if (const auto seconds = some(number(event, "seconds"))) log.seconds = log.seconds.value_or(0) + *seconds;
      log.last_scale = some(number(event, "scale"));
      log.skipped = some(number(event, "skipped"));
      memory(event);
    }
  }

  void start(const json& event) {
    ++log.starts;
    log.ended = log.interrupted = log.cut_off = false;
    const std::int64_t begin = count(event, "step");
    log.steps.erase(log.steps.upper_bound(begin), log.steps.end());
    log.begins.erase(log.begins.upper_bound(begin), log.begins.end());
    log.begins.insert(begin);
    std::erase_if(log.evals, [&](const auto& e) { return e.second.step > begin; });
    for (const auto& [key, value] : event.items()) {
      if (key == "event" || key == "step") continue;
      // A text of its own as it is; what no run writes is not looked at.
      if (value.is_string()) {
        log.settings[key] = value.get<std::string>();
      } else if (value.is_number() || value.is_boolean()) {
        log.settings[key] = value.dump();
      }
    }
  }

  void memory(const json& event) {
    if (const auto mb = some(number(event, "peak_rss_mb"))) log.peak_mb = std::max(log.peak_mb.value_or(0), *mb);
    if (const auto mb = some(number(event, "device_peak_mb"))) {
      log.device_peak_mb = std::max(log.device_peak_mb.value_or(0), *mb);
    }
  }

  std::string file_;
};

}  // namespace

RunLog read_run_log(const fs::path& given) {
  const fs::path path = fs::is_directory(given) ? given / "log.jsonl" : given;
  if (!fs::exists(path)) throw IoError(fmt::format("{}: expected the log of a run, or its folder", shown_path(path)));
  constexpr std::uintmax_t kMostBytes = std::uintmax_t{4} << 30;
  const std::string text = io::read_file(path, kMostBytes);
  Reading reading(shown_path(path));
  std::int64_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    ++number;
    if (end > begin) reading.line(std::string_view(text).substr(begin, end - begin), number, end < text.size());
    begin = end + 1;
  }
  RunLog log = std::move(reading.log);
  if (log.starts == 0) throw IoError(fmt::format("{}: no run was started in this log", shown_path(path)));
  // log.jsonl is called after its folder, whichever was given.
  const fs::path folder = fs::absolute(path).lexically_normal().parent_path();
  log.name = (path.filename() == "log.jsonl" ? folder.filename() : path.stem()).string();
  if (!log.last_scale && !log.steps.empty()) log.last_scale = some(log.steps.rbegin()->second.scale);
  if (!log.skipped && !log.steps.empty()) log.skipped = some(log.steps.rbegin()->second.skipped);
  return log;
}

std::string scale_text(double scale) {
  constexpr double kExact = 9007199254740992;  // 2^53
  const bool whole = scale == std::floor(scale) && std::fabs(scale) < kExact;
  return whole ? fmt::format("{:.0f}", scale) : fmt::format("{:g}", scale);
}

std::map<std::int64_t, double> scale_changes(const RunLog& log) {
  std::map<std::int64_t, double> changes;
  for (const auto& [number, step] : log.steps) {
    if (!std::isnan(step.scale) && (changes.empty() || changes.rbegin()->second != step.scale)) {
      changes[number] = step.scale;
    }
  }
  return changes;
}

}  // namespace halfstep::cli
