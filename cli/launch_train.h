// SPDX-License-Identifier: Apache-2.0
// `halfstep launch ... train ...`: where the run writes, and how it goes on after a failure.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace halfstep::cli {

/// The arguments of `train`, for its first start and the ones after a failure.
class TrainCommand {
 public:
  /// With `needs_folder` the run gets the folder that `train` would choose by itself, so that it is known here; the
  /// network may then be told from other arguments by the flags' names only.
  TrainCommand(std::vector<std::string> arguments, bool needs_folder);

  const std::vector<std::string>& first() const { return arguments_; }
  /// With --resume where the run has a checkpoint, else from the beginning.
  std::vector<std::string> again() const;
  /// The checkpoint that again() goes on from; empty: there is none. One that was in the folder before is another
  /// run's, unless this job was told to resume there.
  std::filesystem::path checkpoint() const;
  /// Whether the folder held a run before this one, which `train` doesn't write over: it would refuse each start.
  bool is_refused() const { return refused_; }
  /// Of --reproducible: the number of ranks has to divide it; 0 without it.
  std::uint64_t shards() const { return shards_; }

 private:
  // A file as it is now, which one that takes its place is not.
  struct FileMark {
    std::uint64_t device = 0, inode = 0;
    std::int64_t seconds = 0, nanoseconds = 0;
    friend bool operator==(const FileMark&, const FileMark&) = default;
  };
  FileMark mark(const char* name) const;

  std::vector<std::string> arguments_;
  std::filesystem::path folder_;
  std::uint64_t shards_ = 0;
  FileMark checkpoint_before_, config_before_;  // of another run, when the job began
  bool had_files_ = false, refused_ = false;
};

}  // namespace halfstep::cli
