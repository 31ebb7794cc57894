// SPDX-License-Identifier: Apache-2.0
// The folder that a run writes into: one run in it, and one program that writes.
#pragma once

#include <filesystem>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::training {

/// What a run does with a folder that holds a run already.
enum class Occupied {
  refuse,   ///< IoError
  go_on,    ///< it is the run that is gone on with
  replace,  ///< its files make place, others stay
};

/// The files of a run that are in a folder: checkpoints, configuration and log, in this order. None for a folder that
/// isn't there.
HS_API std::vector<std::filesystem::path> run_files(const std::filesystem::path& folder);

/// Whether the checkpoint, or the folder with it, that a run goes on from is in that folder.
HS_API bool is_run_in(const std::filesystem::path& resume, const std::filesystem::path& folder);

/// A folder that this program alone writes a run into, while this object lives. What locks it ends with the process,
/// however that ends; file systems without locks are warned of.
class HS_API RunFolder {
 public:
  RunFolder() = default;
  /// Makes the folder where it isn't there, with those above it, and locks it. Throws IoError when it can't be made or
  /// written, when it holds a run that `occupied` refuses, and when another program writes there, naming it.
  RunFolder(const std::filesystem::path& path, Occupied occupied);
  /// Makes a folder that was not there: `path`, or the first of `path-2`, `path-3`... Throws IoError.
  static RunFolder make(const std::filesystem::path& path);
  /// Lets others in. Folders that were made and are empty are removed.
  ~RunFolder();
  RunFolder(RunFolder&& other) noexcept;
  RunFolder& operator=(RunFolder&& other) noexcept;

  const std::filesystem::path& path() const { return path_; }
  /// Whether there is one.
  explicit operator bool() const { return !path_.empty(); }
  /// Removes the files of the run that was there, but for those to keep. Throws IoError.
  void remove_run(const std::vector<std::filesystem::path>& keep);
  /// Removes what a killed process left of files of a run that it was writing; nothing unless the folder is locked.
  /// Throws IoError.
  void remove_leftovers();

  /// What making one would throw, as far as it can be told without changing anything.
  static void check(const std::filesystem::path& path, Occupied occupied);

 private:
  void make_folders(const std::filesystem::path& path);
  void lock();
  void release();

  std::filesystem::path path_;
  std::vector<std::filesystem::path> made_;  // the outermost first
  int lock_ = -1;
};

}  // namespace halfstep::training
