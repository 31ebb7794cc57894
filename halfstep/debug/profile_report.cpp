// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "halfstep/debug/profile_internal.h"

namespace halfstep::debug::detail {
namespace {

using Json = nlohmann::ordered_json;

std::string milliseconds(std::uint64_t ns) { return fmt::format("{:.3f}", static_cast<double>(ns) / 1e6); }
std::string megabytes(std::uint64_t bytes) { return fmt::format("{:.2f}", static_cast<double>(bytes) / 1e6); }
std::string percent(std::uint64_t part, std::uint64_t whole) {
  return whole ? fmt::format("{:.1f}", 100.0 * static_cast<double>(part) / static_cast<double>(whole)) : "-";
}

// Columns as wide as what is in them: the first ones to the left, numbers to the right.
std::string aligned(const std::vector<std::vector<std::string>>& rows, std::size_t texts) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += i < texts ? fmt::format("{:<{}}  ", row[i], widths[i]) : fmt::format("{:>{}}  ", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

// Microseconds from the start, with nanoseconds behind the point.
Json microseconds(std::uint64_t ns) { return static_cast<double>(ns) / 1e3; }

constexpr int kHost = 1;

}  // namespace

void Recording::assign_device_times() {
  std::map<std::tuple<std::uint8_t, std::uint8_t, std::uint64_t>, std::uint64_t> times;
  for (const DeviceRecord& r : records) {
    if (r.number != 0) times[{r.device.type, r.device.index, r.number}] += r.end_ns - r.start_ns;
  }
  // A call inside another has a number of its own.
  for (ProfileEvent& e : events) {
    if (e.number == 0) continue;
    const auto it = times.find({e.device.type, e.device.index, e.number});
    if (it != times.end()) e.device_ns = it->second;
  }
}

void Recording::assign_ranges() {
  // Outer ones first where they begin together.
  std::vector<const ProfileEvent*> ranges;
  std::vector<ProfileEvent*> calls;
  for (ProfileEvent& e : events) {
    if (!e.range) {
      calls.push_back(&e);
    } else if (texts[e.category] != "loader") {
      ranges.push_back(&e);
    }
  }
  std::stable_sort(ranges.begin(), ranges.end(), [](const ProfileEvent* a, const ProfileEvent* b) {
    return std::pair(a->start_ns, b->end_ns) < std::pair(b->start_ns, a->end_ns);
  });
  std::stable_sort(calls.begin(), calls.end(),
                   [](const ProfileEvent* a, const ProfileEvent* b) { return a->start_ns < b->start_ns; });
  std::map<std::uint32_t, std::vector<const ProfileEvent*>> open;  // by thread, innermost last
  auto next = ranges.begin();
  for (ProfileEvent* e : calls) {
    for (; next != ranges.end() && (*next)->start_ns <= e->start_ns; ++next) open[(*next)->thread].push_back(*next);
    auto& around = open[e->thread];
    while (!around.empty() && around.back()->end_ns < e->end_ns) around.pop_back();
    if (!around.empty()) e->inside = around.back()->name;
  }
}

std::string profile_text(const std::vector<ProfileRow>& ops, const std::vector<ProfileRow>& modules,
                         const std::vector<ProfileRow>& ranges, std::uint64_t duration_ns, std::uint64_t left_out,
                         std::size_t most) {
  std::uint64_t host = 0, device = 0, calls = 0, casts = 0, bytes = 0;
  for (const ProfileRow& r : ops) {
    host += r.self_ns;
    device += r.device_ns;
    calls += r.calls;
    casts += r.casts;
    bytes += r.bytes;
  }
  std::string text = fmt::format("{} ms: {} calls of ops, {} ms on the host, {}{} casts, {} MB read and written\n",
                                 milliseconds(duration_ns), calls, milliseconds(host),
                                 device ? milliseconds(device) + " ms on devices, " : "", casts, megabytes(bytes));
  if (left_out) text += fmt::format("{} calls and ranges more are left out\n", left_out);
  std::vector<std::vector<std::string>> rows = {
      {"op", "dtype", "calls", "self ms", "self %", "total ms", "mean us", "device ms", "MB", "casts"}};
  for (std::size_t i = 0; i < std::min(ops.size(), most); ++i) {
    const ProfileRow& r = ops[i];
    rows.push_back({r.name, r.dtype, std::to_string(r.calls), milliseconds(r.self_ns), percent(r.self_ns, host),
                    milliseconds(r.total_ns),
                    fmt::format("{:.2f}", static_cast<double>(r.total_ns) / 1e3 / static_cast<double>(r.calls)),
                    device ? milliseconds(r.device_ns) : "-", megabytes(r.bytes), std::to_string(r.casts)});
  }
  text += "\n" + aligned(rows, 2);
  if (ops.size() > most) text += fmt::format("... and {} rows more\n", ops.size() - most);
  rows = {{"module", "calls", "self ms", "total ms", "total %", "backward ms", "device ms", "MB", "casts"}};
  for (const ProfileRow& r : modules) {
    rows.push_back({r.name.empty() ? "(outside)" : r.name, std::to_string(r.calls), milliseconds(r.self_ns),
                    milliseconds(r.total_ns), percent(r.total_ns, host), milliseconds(r.backward_ns),
                    device ? milliseconds(r.device_ns) : "-", megabytes(r.bytes), std::to_string(r.casts)});
  }
  text += "\n" + aligned(rows, 1);
  if (ranges.empty()) return text;
  rows = {{"range", "count", "total ms", "total %", "calls", "self ms", "device ms", "MB"}};
  for (const ProfileRow& r : ranges) {
    rows.push_back({r.name, std::to_string(r.count), milliseconds(r.total_ns), percent(r.total_ns, duration_ns),
                    std::to_string(r.calls), milliseconds(r.self_ns), device ? milliseconds(r.device_ns) : "-",
                    megabytes(r.bytes)});
  }
  return text + "\n" + aligned(rows, 1);
}

std::string chrome_trace(const Recording& recording) {
  Json events = Json::array();
  const auto named = [&](const char* what, int process, std::uint32_t thread, const std::string& name) {
    events.push_back({{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", {{"name", name}}}});
  };
  named("process_name", kHost, 0, "host");
  for (std::size_t i = 0; i < recording.threads.size(); ++i) {
    named("thread_name", kHost, static_cast<std::uint32_t>(i), recording.threads[i]);
  }
  std::map<std::pair<std::uint8_t, std::uint8_t>, int> devices;
  std::map<std::pair<int, std::uint32_t>, bool> queues;
  for (const DeviceRecord& r : recording.records) {
    const auto [it, fresh] =
        devices.try_emplace({r.device.type, r.device.index}, kHost + 1 + static_cast<int>(devices.size()));
    if (fresh) named("process_name", it->second, 0, r.device.str());
    if (queues.try_emplace({it->second, r.queue}, true).second) {
      named("thread_name", it->second, r.queue, fmt::format("queue {}", r.queue));
    }
  }
  const auto span = [&](const std::string& name, const std::string& category, int process, std::uint32_t thread,
                        std::uint64_t start, std::uint64_t end) {
    return Json({{"ph", "X"},
                 {"name", name},
                 {"cat", category},
                 {"pid", process},
                 {"tid", thread},
                 {"ts", microseconds(start - recording.start_ns)},
                 {"dur", microseconds(end - start)}});
  };
  for (const ProfileEvent& e : recording.events) {
    if (e.view) continue;  // no time passes in them
    if (e.range) {
      events.push_back(
          span(recording.texts[e.name], recording.texts[e.category], kHost, e.thread, e.start_ns, e.end_ns));
      continue;
    }
    Json json =
        span(recording.texts[e.name], e.backward ? "backward" : "forward", kHost, e.thread, e.start_ns, e.end_ns);
    json["args"] = {{"module", recording.texts[e.module]},
                    {"dtype", name(e.dtype)},
                    {"device", e.device.str()},
                    {"path", name(e.path)},
                    {"bytes", e.bytes}};
    if (e.backward) json["args"]["backward_of"] = recording.texts[e.backward_of];
    if (e.number) json["args"]["call"] = e.number;
    events.push_back(std::move(json));
  }
  for (const DeviceRecord& r : recording.records) {
    Json json = span(recording.texts[r.name], r.number ? "kernel" : "copy", devices.at({r.device.type, r.device.index}),
                     r.queue, r.start_ns, r.end_ns);
    if (r.number) json["args"] = {{"call", r.number}};
    events.push_back(std::move(json));
  }
  const Json trace = {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
  return trace.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace halfstep::debug::detail
