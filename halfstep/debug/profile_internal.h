// SPDX-License-Identifier: Apache-2.0
// Internal: what the profiler records, and how it is shown.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "halfstep/core/device.h"
#include "halfstep/core/dtype.h"
#include "halfstep/debug/profiler.h"
#include "halfstep/ops/observer.h"

namespace halfstep::debug::detail {

/// A call of an op or a range of the program. Texts are numbers of Recording::texts.
struct ProfileEvent {
  std::uint32_t name = 0;
  std::uint32_t category = 0;
  std::uint32_t module = 0;
  std::uint32_t backward_of = 0;
  std::uint32_t thread = 0;
  bool range = false;
  bool view = false;
  bool cast = false;
  bool backward = false;
  ExecutionPath path = ExecutionPath::native;
  DType dtype = DType::f32;
  Device device = {};
  std::uint64_t number = 0;  ///< of the call on its device
  std::uint64_t start_ns = 0;
  std::uint64_t end_ns = 0;
  std::uint64_t self_ns = 0;
  std::uint64_t device_ns = 0;
  std::uint64_t bytes = 0;
  std::uint32_t inside = 0;  ///< of a call: the innermost range of its thread around it
};

/// A stretch of time of a device's queue.
struct DeviceRecord {
  Device device;
  std::uint32_t queue;
  std::uint64_t number;
  std::uint32_t name;
  std::uint64_t start_ns;
  std::uint64_t end_ns;
};

struct Recording {
  std::uint64_t start_ns = 0;
  std::uint64_t end_ns = 0;
  std::vector<ProfileEvent> events;  ///< in the order in which they ended
  std::vector<DeviceRecord> records;
  std::vector<std::string> threads;       ///< their names
  std::vector<std::string> texts = {""};  ///< each once; the first is empty
  std::unordered_map<std::string, std::uint32_t> numbers = {{"", 0}};
  std::uint64_t left_out = 0;

  std::uint32_t text(const std::string& t) {
    const auto [it, fresh] = numbers.try_emplace(t, static_cast<std::uint32_t>(texts.size()));
    if (fresh) texts.push_back(t);
    return it->second;
  }
  /// Gives each call the time of its records.
  void assign_device_times();
  /// Gives each call the range that it ran in.
  void assign_ranges();
};

/// The tables for people.
std::string profile_text(const std::vector<ProfileRow>& ops, const std::vector<ProfileRow>& modules,
                         const std::vector<ProfileRow>& ranges, std::uint64_t duration_ns, std::uint64_t left_out,
                         std::size_t most);
/// The recording in Chrome's trace event format.
std::string chrome_trace(const Recording& recording);

}  // namespace halfstep::debug::detail
