// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are written beside training, from a copy, as torch.distributed.checkpoint.async_save does it.
#pragma once

#include <atomic>
#include <exception>
#include <filesystem>
#include <thread>
#include <vector>

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
  /// the earlier ones are. Without memory for the copy or without a thread it writes them itself. What is still being
  /// written is waited for first, and throws what wait() throws.
  void write(const std::vector<std::filesystem::path>& files, Checkpoint checkpoint);
  /// Whether wait() would return, or throw, at once.
  bool done() const { return !thread_.joinable() || finished_; }
  /// Returns when the files are written. Throws IoError if they can't be: once.
  void wait();

 private:
  bool copy(NamedTensors& tensors, NamedTensors& copies);

  bool beside_;
  NamedTensors weights_, optimizer_, communication_, training_weights_;  // copies, which the next one is made over
  std::thread thread_;
  std::atomic<bool> finished_{false};
  std::exception_ptr error_;
};

}  // namespace halfstep::training
