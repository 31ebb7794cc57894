// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/fallback.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <map>
#include <mutex>

namespace halfstep {
namespace {

// 1, on and true turn a switch on, 0, off and false turn it off.
bool switch_of(const char* variable, bool otherwise) {
  const char* value = std::getenv(variable);
  if (!value || !*value) return otherwise;
  std::string text = value;
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text != "0" && text != "off" && text != "false" && text != "no";
}

struct Switches {
  std::atomic<bool> missing{switch_of("HALFSTEP_FALLBACK", true)};
  std::atomic<bool> failing{switch_of("HALFSTEP_FALLBACK_ON_FAILURE", false)};
};
Switches& switches() {
  static Switches instance;
  return instance;
}

struct Counts {
  std::mutex mutex;
  std::map<std::string, FallbackCount, std::less<>> ops;
};
Counts& counts() {
  static Counts& instance = *new Counts;
  return instance;
}

// Under the mutex.
FallbackCount& count_of(std::string_view op) {
  auto& ops = counts().ops;
  auto it = ops.find(op);
  if (it == ops.end()) {
    it = ops.emplace(std::string(op), FallbackCount{}).first;
    it->second.op = op;
  }
  return it->second;
}

}  // namespace

FallbackOptions fallback_options() {
  const Switches& s = switches();
  return {.missing = s.missing.load(std::memory_order_relaxed), .failing = s.failing.load(std::memory_order_relaxed)};
}

void set_fallback_options(const FallbackOptions& options) {
  switches().missing.store(options.missing);
  switches().failing.store(options.failing);
}

void count_fallback(std::string_view op, std::uint64_t bytes_to_host, std::uint64_t bytes_to_device, double seconds,
                    bool failure) {
  std::lock_guard lock(counts().mutex);
  FallbackCount& c = count_of(op);
  ++c.calls;
  c.bytes_to_host += bytes_to_host;
  c.bytes_to_device += bytes_to_device;
  c.seconds += seconds;
  if (failure) ++c.failures;
}

void count_fallback_result(std::string_view op, std::uint64_t bytes, double seconds) {
  std::lock_guard lock(counts().mutex);
  FallbackCount& c = count_of(op);
  c.bytes_to_device += bytes;
  c.seconds += seconds;
}

std::vector<FallbackCount> fallback_counts() {
  Counts& all = counts();
  std::vector<FallbackCount> list;
  {
    std::lock_guard lock(all.mutex);
    for (const auto& [name, count] : all.ops) list.push_back(count);
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const FallbackCount& a, const FallbackCount& b) { return a.seconds > b.seconds; });
  return list;
}

void reset_fallback_counts() {
  std::lock_guard lock(counts().mutex);
  counts().ops.clear();
}

}  // namespace halfstep
