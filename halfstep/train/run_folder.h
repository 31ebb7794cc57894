// SPDX-License-Identifier: Apache-2.0
// The folder that a run writes into: it holds one run, and one program writes to it.
#pragma once

#include <filesystem>
#include <span>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::training {

/// The checkpoints of a run, in its folder: the one to go on from, and the one of the best evaluation.
inline constexpr const char* kLastCheckpoint = "last.safetensors";
inline constexpr const char* kBestCheckpoint = "best.safetensors";

/// What a run does with a folder that already holds a run.
enum class ExistingRun {
  refuse,   ///< IoError
  resume,   ///< it is the run being resumed
  replace,  ///< its files are replaced, others stay
};

/// Names of all files that a run writes into its folder, but the lock and shards of checkpoints.
HS_API std::span<const char* const> run_file_names();
/// Those of them that are in a folder: checkpoints, configuration, log, what people look at and reports of debugging,
/// in this order, and then shards of checkpoints. None for a folder that isn't there.
HS_API std::vector<std::filesystem::path> run_files(const std::filesystem::path& folder);
/// Whether a folder holds a run: a checkpoint, a configuration or a log. Tables and figures alone may be anybody's.
HS_API bool holds_run(const std::filesystem::path& folder);

/// The file that is locked while a run writes into a folder; it names the process that does.
HS_API std::filesystem::path run_lock(const std::filesystem::path& folder);

/// Whether the checkpoint, or its folder, that a run resumes from is in that folder.
HS_API bool is_run_in(const std::filesystem::path& resume, const std::filesystem::path& folder);

/// Exclusive access to a folder for writing a run, for this object's lifetime. The lock ends with the process, however
/// that ends; file systems without locks cause a warning.
class HS_API RunFolder {
 public:
  RunFolder() = default;
  /// Creates the folder and its parents if needed, and locks it. Throws IoError if it can't be created or written, if
  /// it holds a run that `existing` rejects or, without a run, a file that a run would write over, and if another
  /// program writes there, naming it.
  RunFolder(const std::filesystem::path& path, ExistingRun existing);
  /// Creates a new folder: `path`, or the first of `path-2`, `path-3`... Throws IoError.
  static RunFolder make(const std::filesystem::path& path);
  /// Releases the lock. Created folders that are still empty are removed.
  ~RunFolder();
  RunFolder(RunFolder&& other) noexcept;
  RunFolder& operator=(RunFolder&& other) noexcept;

  /// The folder; empty: there is none.
  const std::filesystem::path& path() const { return path_; }
  /// Whether there is one.
  explicit operator bool() const { return !path_.empty(); }
  /// Removes all files of a run, except those to keep; for a folder that held one when it was locked (holds_run).
  /// Throws IoError.
  void remove_run(const std::vector<std::filesystem::path>& keep);
  /// Removes what a killed process left of files of a run that it was writing, and shards that belong to no checkpoint;
  /// nothing unless the folder is locked.
  /// Throws IoError.
  void remove_leftovers();

  /// Throws what constructing one would throw, as far as that can be determined without changing anything.
  static void check(const std::filesystem::path& path, ExistingRun existing);

 private:
  void make_folders(const std::filesystem::path& path);
  void lock();
  void release();

  std::filesystem::path path_;
  std::vector<std::filesystem::path> made_;  // the outermost first
  int lock_ = -1;
};

}  // namespace halfstep::training
