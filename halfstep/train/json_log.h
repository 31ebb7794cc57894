// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/train/metrics.h"

namespace halfstep::training {

/// One JSON object a line: `{"event":"step","epoch":1,...}`. NaN and infinities are null. Each line is written
/// immediately and atomically: a line cut off by a full disk is removed again.
class HS_API JsonLog {
 public:
  using Value = std::variant<bool, std::int64_t, std::uint64_t, double, std::string, std::vector<std::int64_t>>;
  JsonLog() = default;
  /// Truncates the file at the first line and leaves it unchanged until then; with `append` it continues after the
  /// existing lines. A named pipe waits for its reader, and the library's log says so; if `stop` is given and becomes
  /// true meanwhile, the log stays without a file. Throws IoError when it can't be written.
  explicit JsonLog(const std::filesystem::path& path, bool append = false, const std::atomic<bool>* stop = nullptr);
  /// A file that was created but got no line is removed.
  ~JsonLog();
  JsonLog(JsonLog&& other) noexcept;
  JsonLog& operator=(JsonLog&& other) noexcept;
  /// Whether there is a file to write to.
  explicit operator bool() const { return file_ >= 0; }
  /// Names and values, in the order of the line.
  using Fields = std::vector<std::pair<std::string, Value>>;
  /// Writes a line; nothing without a file. A pipe or terminal that takes nothing is waited for; once `stop` is true
  /// for a second only, and then the log ends there with a warning. Throws IoError when the disk is full.
  void write(const char* event, const Fields& fields);

 private:
  void close();
  bool can_write_line() const;

  std::filesystem::path path_;
  const std::atomic<bool>* stop_ = nullptr;
  int file_ = -1;
  bool anew_ = false;  // existing contents are dropped with the first line
  bool made_ = false;  // the file did not exist and has no line yet
};

/// The results of an evaluation that are numbers, as all lines have them; others (a confusion matrix) have no place in
/// a line.
HS_API void add_metrics(JsonLog::Fields& fields, const MetricResults& metrics);

/// How much of a log was taken out by prepare_log.
struct LogRepair {
  std::int64_t torn = 0;      ///< lines that were not whole
  std::int64_t repeated = 0;  ///< lines of work that the run repeats
  std::int64_t first = 0;     ///< number of the first line that changed, from 1; 0: none
};

/// Whether `log` may be written as the log of a run in `out` (may be empty): a new file, an empty one, a log, or no
/// regular file at all. Throws IoError for the files that the run itself writes, for those that the same command reads
/// (`reads`: files, and folders of runs; a checkpoint's config.yaml is among them), for the log of a run in another
/// folder, and for files with other contents.
HS_API void check_log(const std::filesystem::path& log, const std::filesystem::path& out,
                      const std::vector<std::filesystem::path>& reads = {});

/// Prepares a log for a run that resumes after `step` steps and `epochs` evaluated epochs: removes the lines of steps,
/// evaluations and checkpoints that will be repeated, and partial lines left by a full disk or a kill; a last line that
/// only lacks its newline gets one. A file that is missing or not a regular file is left alone. Throws IoError, without
/// changing anything.
HS_API LogRepair prepare_log(const std::filesystem::path& path, std::int64_t step, std::int64_t epochs);

}  // namespace halfstep::training
