// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
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

/// What a run monitors and records; by default nothing.
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

/// The observers of a run, each active in its range of steps. Findings are passed to `say` when the range, or the run,
/// ends, and written next to the checkpoints.
class HS_API StepDebugging {
 public:
  /// `out`: folder for reports; empty: none are written.
  StepDebugging(const DebugConfig& config, std::filesystem::path out,
                std::function<void(const std::string& text)> say = {});
  ~StepDebugging();
  StepDebugging(const StepDebugging&) = delete;
  StepDebugging& operator=(const StepDebugging&) = delete;

  /// Before anything of step `number` runs; further calls for the same step do nothing.
  void before_step(std::int64_t number);
  /// After all of it did.
  void after_step(std::int64_t number);
  /// Whether step `number` is first to be run both in float32 and in its own precision.
  bool wants_twin(std::int64_t number) const;
  /// Runs `step` with debug::twin, in float32 and in `dtype`.
  void twin(const std::function<void()>& step, DType dtype);
  /// The run is over: ends what hasn't ended. The destructor does so too, for runs that fail.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null when nothing is on
};

}  // namespace halfstep::training
