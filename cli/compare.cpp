// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/terminal.h"
#include "cli/verbs.h"
#include "halfstep/core/error.h"
#include "halfstep/io/atomic_file.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// What a log says of a run.
struct RunLog {
  std::string name;
  json start;
  json end;
  std::map<int, json> evals;       // by epoch
  std::map<int, json> last_steps;  // by epoch
};

std::string text_of(const json& object, const char* key, const char* otherwise) {
  const bool there = object.is_object() && object.contains(key) && object[key].is_string();
  return there ? object[key].get<std::string>() : otherwise;
}

RunLog read_log(const fs::path& given) {
  const fs::path path = fs::is_directory(given) ? given / "log.jsonl" : given;
  if (!fs::exists(path)) throw IoError(fmt::format("{}: expected the log of a run, or its folder", path.string()));
  constexpr std::uintmax_t kMostBytes = std::uintmax_t{4} << 30;
  std::istringstream file(io::read_file(path, kMostBytes));
  RunLog log;
  log.name = (fs::is_directory(given) ? fs::path(given / "").parent_path().filename() : given.stem()).string();
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.empty()) continue;
    const json event = json::parse(line, nullptr, false);
    const std::string kind = text_of(event, "event", "");
    if (kind == "start") {
      log.start = event;
    } else if (kind == "end") {
      log.end = event;
    } else if (kind == "eval" && event.contains("epoch") && event["epoch"].is_number_integer()) {
      log.evals[event["epoch"].get<int>()] = event;
    } else if (kind == "step" && event.contains("epoch") && event["epoch"].is_number_integer()) {
      log.last_steps[event["epoch"].get<int>()] = event;
    } else if (kind.empty()) {
      throw IoError(fmt::format("{}:{}: expected a JSON object with an event", path.string(), number));
    }
  }
  if (log.start.is_null()) throw IoError(fmt::format("{}: no run was started in this log", path.string()));
  return log;
}

std::optional<double> number(const json& object, const char* key) {
  if (!object.is_object() || !object.contains(key) || !object[key].is_number()) return std::nullopt;
  return object[key].get<double>();
}

std::string text(std::optional<double> value, double factor, int digits, const char* unit) {
  return value ? fmt::format("{:.{}f}{}", *value * factor, digits, unit) : std::string("-");
}

int run(const std::vector<std::string>& paths) {
  const RunLog a = read_log(paths[0]), b = read_log(paths[1]);
  std::vector<std::vector<std::string>> rows;
  const auto row = [&](const std::string& what, std::optional<double> x, std::optional<double> y, double factor,
                       int digits, const char* unit, bool ratio) {
    if (!x && !y) return;
    std::string difference = "-";
    if (x && y) {
      difference = ratio ? (*y != 0 ? fmt::format("{:.2f}x", *x / *y) : "-")
                         : fmt::format("{:+.{}f}{}", (*x - *y) * factor, digits, unit);
    }
    rows.push_back({what, text(x, factor, digits, unit), text(y, factor, digits, unit), difference});
  };
  rows.push_back({"precision", text_of(a.start, "amp", "?"), text_of(b.start, "amp", "?"), ""});
  for (const auto& [epoch, eval] : a.evals) {
    const auto other = b.evals.find(epoch);
    const json none;
    const json& second = other == b.evals.end() ? none : other->second;
    row(fmt::format("epoch {} test loss", epoch), number(eval, "loss"), number(second, "loss"), 1, 4, "", false);
    row(fmt::format("epoch {} top1", epoch), number(eval, "top1"), number(second, "top1"), 100, 2, "%", false);
  }
  row("time", number(a.end, "seconds"), number(b.end, "seconds"), 1, 2, " s", true);
  if (!a.last_steps.empty() && !b.last_steps.empty()) {
    row("samples a second", number(a.last_steps.rbegin()->second, "samples_per_s"),
        number(b.last_steps.rbegin()->second, "samples_per_s"), 1, 0, "", true);
  }
  row("peak memory", number(a.end, "peak_rss_mb"), number(b.end, "peak_rss_mb"), 1, 0, " MB", true);
  rows.push_back(
      {"loss scale at the end", text(number(a.end, "scale"), 1, 0, ""), text(number(b.end, "scale"), 1, 0, ""), ""});
  row("skipped steps", number(a.end, "skipped"), number(b.end, "skipped"), 1, 0, "", false);
  fmt::print("{}", table({"", a.name, b.name, "difference"}, rows));
  return kDone;
}

}  // namespace

void add_compare(CLI::App& program, int& status) {
  auto* verb = program.add_subcommand("compare", "Put two runs side by side: loss, accuracy, time, memory");
  auto paths = std::make_shared<std::vector<std::string>>();
  verb->add_option("RUN", *paths, "Folder of a run, or its log")->required()->expected(2);
  verb->callback([paths, &status] { status = run(*paths); });
}

}  // namespace halfstep::cli
