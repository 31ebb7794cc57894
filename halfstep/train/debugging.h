// SPDX-License-Identifier: Apache-2.0
// What a run is told to watch and record; the callbacks that do it are in callbacks_debug.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "halfstep/core/tensor.h"

namespace halfstep::training {

/// Steps of a run, counted from 1 over the whole run.
struct StepRange {
  std::int64_t first = 1;
  std::int64_t last = 1;
  bool contains(std::int64_t step) const { return step >= first && step <= last; }
};
/// `12`, `10-12`, `10-` (to the end) or `all`. Throws Error naming `flag`.
HS_API StepRange parse_steps(const std::string& text, const std::string& flag);

/// What a run monitors and records, as the flags of `halfstep train` say it; by default nothing (debug_callbacks).
struct DebugConfig {
  std::filesystem::path dump = {};   ///< folder for debug::Dump
  std::string level = "statistics";  ///< of the dump: statistics, first or whole
  /// `f64` or `f32`: debug::Compare with that reference; `twin`: debug::twin on the first step of the range.
  std::string compare = {};
  std::string nonfinite = {};          ///< `log` or `raise`: debug::NonFinite, in all steps
  std::string steps = "1";             ///< that are dumped and compared, see parse_steps
  std::filesystem::path profile = {};  ///< folder for trace.json and profile.txt
  std::string profile_steps = "2-11";  ///< the first step has costs of its own
};
/// Throws Error, naming the flag of `halfstep train`, when a value is none of the choices.
HS_API void check(const DebugConfig& config);

}  // namespace halfstep::training
