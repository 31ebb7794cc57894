// SPDX-License-Identifier: Apache-2.0
// The log of a run as a callback.
#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>

#include "halfstep/train/callback.h"
#include "halfstep/train/json_log.h"

namespace halfstep::training {

struct RunReport;
class TrainStep;

/// Options of JsonLogger.
struct JsonLoggerOptions {
  bool append = false;                      ///< goes on behind the lines that the file has
  const std::atomic<bool>* stop = nullptr;  ///< see JsonLog
  JsonLog::Fields start = {};  ///< of the line `start`: what else identifies the run, or in place of its own fields
  bool end = true;             ///< on_train_end writes the last lines; false: the caller does, by write_end()
};

/// Writes what happens in a run as JSON, an object a line: the log of `halfstep train --log-json`
/// (docs/guide/runs.md). `start` has epochs, accumulation, rate, device, scale and step; `step`, for each
/// step as its values are read, loss, parts, rate, scale, skipped steps, speed and memory; `eval` the results of each
/// evaluation; `capture`, `fallback` and `buckets`, where they apply, how steps were replayed, ops that ran on the CPU
/// in place of a device, and how gradients are reduced; `end` how the run ended. Throws IoError when the file can't be
/// written.
class HS_API JsonLogger : public CallbackBase {
 public:
  explicit JsonLogger(const std::filesystem::path& file, const JsonLoggerOptions& options = {});
  /// Into a log that others write to as well; `append` and `stop` are its own matter. Throws Error without one.
  explicit JsonLogger(std::shared_ptr<JsonLog> log, const JsonLoggerOptions& options = {});
  void on_train_begin(TrainContext& context) override;
  void on_values(TrainContext& context, std::span<const StepRecord> steps) override;
  void on_eval_end(TrainContext& context) override;
  void on_train_end(TrainContext& context) override;

  /// The lines `capture`, `fallback`, `buckets` and `end` of a run of this step.
  void write_end(const RunReport& report, const TrainStep& step);

 private:
  using Clock = std::chrono::steady_clock;
  std::shared_ptr<JsonLog> log_;
  JsonLoggerOptions options_;
  Clock::time_point begin_ = {};
  Device device_ = {};     // of the run
  MetricResults metrics_;  // of the last evaluation
};

}  // namespace halfstep::training
