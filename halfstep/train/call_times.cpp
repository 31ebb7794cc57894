// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/call_times.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "halfstep/core/atomic_file.h"
#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/runtime/float32_precision.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/runtime/machine_file.h"
#include "halfstep/runtime/tuning.h"
#include "halfstep/runtime/winograd.h"

namespace halfstep::training {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using debug::OperandPlace;

constexpr int kFormat = 1;
constexpr std::uintmax_t kMostFileBytes = 64 << 20;

// Whose times they are.
std::string owner_now() {
  const MachineInfo info = machine();
  // Float32Precision::high changes what AMX computes.
  const bool high = info.isa == "amx" && float32_precision() == Float32Precision::high;
  const Json owner = {{"cpu", info.cpu},
                      {"isa", info.isa},
                      {"threads", info.threads},
                      {"winograd", name(winograd())},
                      {"float32_precision", name(high ? Float32Precision::high : Float32Precision::highest)},
                      {"tuning", tuning()},
                      {"library", library_build()}};
  return owner.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// A time that can be one.
double time_in(const Json& json) {
  const double value = json.get<double>();
  if (!std::isfinite(value) || value < 0) throw nlohmann::json::other_error::create(501, "no time", nullptr);
  return value;
}

double rate_in(const Json& json) {
  const double value = time_in(json);
  if (!(value > 0)) throw nlohmann::json::other_error::create(501, "no rate", nullptr);
  return value;
}

}  // namespace

fs::path CallTimes::default_file() { return machine_file("calls"); }

CallTimes::CallTimes(CallTimesOptions options) : options_(std::move(options)), owner_(owner_now()) {
  if (options_.file.empty()) options_.file = default_file();
  if (!options_.again) known_ = read(true);
}

CallTimes::Content CallTimes::read(bool warn) const {
  std::error_code error;
  if (options_.file.empty() || !fs::exists(options_.file, error)) return {};
  try {
    const Json json = Json::parse(io::read_file(options_.file, kMostFileBytes));
    if (json.at("format").get<int>() != kFormat || json.at("of") != Json::parse(owner_)) return {};
    Content content;
    if (json.contains("calling")) content.calling = time_in(json.at("calling"));
    if (json.contains("limits")) {
      const Json& l = json.at("limits");
      content.limits = MachineLimits{.operations = rate_in(l.at("operations")),
                                     .bf16_operations = rate_in(l.at("bf16_operations")),
                                     .f16_operations = rate_in(l.at("f16_operations")),
                                     .inner_bandwidth = rate_in(l.at("inner_bandwidth")),
                                     .cache_bandwidth = rate_in(l.at("cache_bandwidth")),
                                     .memory_bandwidth = rate_in(l.at("memory_bandwidth")),
                                     .cache_bytes = l.at("cache_bytes").get<std::int64_t>(),
                                     .inner_bytes = l.at("inner_bytes").get<std::int64_t>()};
    }
    for (const auto& [key, times] : json.at("calls").items()) {
      Entry entry;
      if (times.contains("inner")) entry.inner = time_in(times.at("inner"));
      if (times.contains("cache")) entry.cache = time_in(times.at("cache"));
      if (times.contains("memory")) entry.memory = time_in(times.at("memory"));
      content.calls.emplace(key, entry);
    }
    return content;
  } catch (const nlohmann::json::exception&) {
    if (warn)
      log(LogLevel::warning, fmt::format("{} is damaged: what it said is measured again", shown_path(options_.file)));
  } catch (const IoError& e) {
    if (warn) log(LogLevel::warning, fmt::format("{}: measured again", e.what()));
  }
  return {};
}

double CallTimes::seconds(const debug::TracedCall& call, OperandPlace place) {
  const std::string key = debug::signature(call);
  const auto of = [&](Entry& entry) -> std::optional<double>& {
    return place == OperandPlace::inner ? entry.inner : place == OperandPlace::cache ? entry.cache : entry.memory;
  };
  std::optional<double>& here = of(known_.calls[key]);
  if (!here) {
    here = options_.measure.call(call, place);
    of(fresh_.calls[key]) = here;
    ++measured_;
  }
  return *here;
}

double CallTimes::calling() {
  if (!known_.calling) {
    known_.calling = fresh_.calling = options_.measure.calling();
    ++measured_;
  }
  return *known_.calling;
}

const MachineLimits& CallTimes::limits() {
  if (!known_.limits) {
    known_.limits = fresh_.limits = options_.measure.limits();
    ++measured_;
  }
  return *known_.limits;
}

bool CallTimes::save() {
  if (measured_ == 0) return true;
  const fs::path& file = options_.file;
  if (file.empty()) {
    log(LogLevel::warning, "measured times are not kept: there is neither XDG_CACHE_HOME nor HOME");
    return false;
  }
  Content all = read(options_.again);
  if (fresh_.calling) all.calling = fresh_.calling;
  if (fresh_.limits) all.limits = fresh_.limits;
  for (const auto& [key, entry] : fresh_.calls) {
    Entry& there = all.calls[key];
    if (entry.inner) there.inner = entry.inner;
    if (entry.cache) there.cache = entry.cache;
    if (entry.memory) there.memory = entry.memory;
  }
  Json json{{"format", kFormat}, {"of", Json::parse(owner_)}};
  if (all.calling) json["calling"] = *all.calling;
  if (all.limits) {
    json["limits"] = {
        {"operations", all.limits->operations},           {"bf16_operations", all.limits->bf16_operations},
        {"f16_operations", all.limits->f16_operations},   {"inner_bandwidth", all.limits->inner_bandwidth},
        {"cache_bandwidth", all.limits->cache_bandwidth}, {"memory_bandwidth", all.limits->memory_bandwidth},
        {"cache_bytes", all.limits->cache_bytes},         {"inner_bytes", all.limits->inner_bytes}};
  }
  Json calls = Json::object();
  for (const auto& [key, entry] : all.calls) {
    Json times = Json::object();
    if (entry.inner) times["inner"] = *entry.inner;
    if (entry.cache) times["cache"] = *entry.cache;
    if (entry.memory) times["memory"] = *entry.memory;
    calls[key] = std::move(times);
  }
  json["calls"] = std::move(calls);
  const std::string text = json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
  try {
    std::error_code error;
    fs::create_directories(file.parent_path(), error);
    if (error) {
      log(LogLevel::warning, fmt::format("{}: can't be made: {}; measured times are not kept",
                                         shown_path(file.parent_path()), error.message()));
      return false;
    }
    AtomicFile out(file, false);
    out.write(text.data(), text.size());
    out.commit();
  } catch (const IoError& e) {
    log(LogLevel::warning, fmt::format("{}; measured times are not kept", e.what()));
    return false;
  }
  return true;
}

}  // namespace halfstep::training
