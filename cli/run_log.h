// SPDX-License-Identifier: Apache-2.0
// What `log.jsonl` says of a run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace halfstep::cli {

/// One step; a number that the log has not, or has as null, is NaN.
struct LoggedStep {
  std::int64_t epoch = 0;
  double loss;
  double scale;
  double skipped;  ///< steps skipped so far
  double samples_per_s;
};

/// One evaluation.
struct LoggedEval {
  std::int64_t step = 0;
  std::map<std::string, double> metrics;  ///< loss first of all, and whatever else was measured
};

/// A run, from the first start to the last end: where a run went on from a checkpoint, what it did again replaces what
/// it had done.
struct RunLog {
  std::string name;                             ///< of its folder or file
  std::map<std::string, std::string> settings;  ///< fields of `start` as text
  std::map<std::int64_t, LoggedStep> steps;
  std::map<std::int64_t, LoggedEval> evals;  ///< by epoch
  std::optional<double> seconds;             ///< of all parts of the run that came to an end
  std::optional<double> peak_mb;
  std::optional<double> device_peak_mb;
  std::optional<double> last_scale;
  std::optional<double> skipped;
  std::set<std::int64_t> begins;  ///< steps that were done when a part of the run began
  int starts = 0;
  bool ended = false;        ///< the last part came to an end
  bool interrupted = false;  ///< by a signal
  bool cut_off = false;      ///< the last line is not whole
};

/// Reads a log, or log.jsonl of a run's folder. Throws IoError for a file that is none, naming the line.
RunLog read_run_log(const std::filesystem::path& given);

/// Steps from which on a loss scale held: of every change the first step, in order.
std::map<std::int64_t, double> scale_changes(const RunLog& log);

/// A loss scale for people: whole where it can be, so that powers of two are recognised.
std::string scale_text(double scale);

}  // namespace halfstep::cli
