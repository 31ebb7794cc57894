// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are written beside training, from a copy, as torch.distributed.checkpoint.async_save does it.
#pragma once

#include <atomic>
#include <exception>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <vector>

#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/train/checkpoint.h"

namespace halfstep::training {

/// Writes checkpoints on a thread of its own, one at a time.
class CheckpointWriter {
 public:
  /// Without `beside` it writes them itself.
  explicit CheckpointWriter(bool beside) : beside_(beside) {}
  /// Waits. An error that nobody asked for is logged.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Copies the tensors to the host, and begins to write the files, one after the other: a later one is there only if
  /// the earlier ones are. Without memory for the copy and for training beside it, or without a thread, it writes
  /// them itself. What is still being written is waited for first, and throws what wait() throws.
  void write(const std::vector<std::filesystem::path>& files, Checkpoint checkpoint);
  /// The first half of a checkpoint whose state ranks divide: begins to write `shard`, which this rank alone has, into
  /// each of the files, and keeps `rest` for the second half. Without memory for the copies and for training beside
  /// them, or without a thread, it writes them itself and returns false: then training may not go on before the second
  /// half is written. Errors are wait()'s.
  bool write_shards(const std::vector<std::filesystem::path>& files, NamedTensors shard, bool has_weights,
                    std::optional<Checkpoint> rest);
  /// Behind wait(): the entries of the files in the lists of their checkpoints.
  const std::vector<nlohmann::json>& shards() const { return shards_; }
  /// The second half: begins to write `rest`, one after the other, each with the list of its shards.
  void write_rest(const std::vector<std::filesystem::path>& files, const std::vector<nlohmann::json>& lists);
  /// Whether wait() would return, or throw, at once.
  bool done() const { return !thread_.joinable() || finished_; }
  /// Returns when the files are written. Throws IoError if they can't be: once.
  void wait();

 private:
  bool copy(NamedTensors& tensors, NamedTensors& copies);
  bool copy(Checkpoint& checkpoint);
  bool leaves_room(const MemoryStats& before);
  void use_copies(Checkpoint& checkpoint) const;
  bool start(std::function<void()> job);

  bool beside_;
  NamedTensors weights_, optimizer_, communication_, training_weights_,
      shard_;  // copies, which the next one is made over
  std::optional<Checkpoint> rest_;
  std::vector<nlohmann::json> shards_;
  std::thread thread_;
  std::atomic<bool> finished_{false};
  std::exception_ptr error_;
};

}  // namespace halfstep::training
