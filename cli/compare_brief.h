// SPDX-License-Identifier: Apache-2.0
// Two runs in a few lines, and in a figure.
#pragma once

#include <filesystem>
#include <string>

#include "cli/run_log.h"

namespace halfstep::cli {

/// A run for the short comparison: its log, and what its folder says beside it.
struct RunBrief {
  RunLog log;
  std::string label;           ///< its precision where the runs differ in that, else its name
  double tensor_mb = -1;       ///< peak of tensors; -1: not known
  double step_ms = -1;         ///< time of a step, of the quickest tenth; -1: not known
  std::int64_t evaluated = 0;  ///< samples of the evaluation; 0: not known
};
/// Reads what a run's folder has beside the log; `path` is the folder or the log.
RunBrief brief_of(RunLog log, const std::filesystem::path& path);
/// Gives both labels.
void label_runs(RunBrief& a, RunBrief& b);

/// A line for each quantity, `a` as a multiple of `b` where that says something, and a sentence for what may surprise.
std::string brief_text(const RunBrief& a, const RunBrief& b);
/// Curves and bars of both, as SVG or PNG. Throws Error, IoError.
void draw_comparison(const RunBrief& a, const RunBrief& b, const std::filesystem::path& file);

}  // namespace halfstep::cli
