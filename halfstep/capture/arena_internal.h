// SPDX-License-Identifier: Apache-2.0
// Internal: the memory of a recorded step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "halfstep/core/device.h"
#include "halfstep/core/storage.h"

namespace halfstep::detail {

/// Memory of one device that a recording has for itself. What the step frees is used again by what it makes later, in
/// every replay in the same way. Lives until the recording and all tensors in it have gone.
class CaptureArena final : public Allocator {
 public:
  /// Without `reuse`, no block is handed out twice.
  static CaptureArena* make(Device device, bool reuse = true) { return new CaptureArena(device, reuse); }
  void* allocate(std::size_t bytes) override;
  void deallocate(void* data, std::size_t bytes) noexcept override;
  void* home_queue() override { return source_.home_queue(); }
  void used_on(void* data, void* queue) noexcept override { source_.used_on(data, queue); }
  /// Whether the address lies in it.
  bool owns(const void* data) const;
  /// Blocks in use.
  std::size_t in_use() const;
  /// Bytes of all that was taken from the device.
  std::size_t bytes() const;
  /// Memory ran out, and free blocks went back: the recording is of no use.
  bool ran_short() const;
  /// Called by the recording at its end: unused blocks are returned now, the others when they are freed.
  void close() noexcept;

 private:
  CaptureArena(Device device, bool reuse);
  ~CaptureArena() override = default;
  void return_free() noexcept;
  void release(std::unique_lock<std::mutex> lock) noexcept;

  Allocator& source_;
  const std::size_t alignment_;
  const bool reuse_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> free_;  // by size
  std::map<const char*, std::size_t> blocks_;       // all that was taken from the device
  std::uint64_t users_ = 1;                         // blocks in use, and the recording
  bool closed_ = false, ran_short_ = false;
};

/// Scratch of kernels that run one after another, kept from replay to replay.
class Scratch {
 public:
  explicit Scratch(Device device) : device_(device) {}
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  /// The next kernel has all of it.
  void begin() { block_ = used_ = 0; }
  /// Throws OutOfMemoryError.
  void* take(std::size_t bytes);

 private:
  const Device device_;
  std::vector<std::pair<void*, std::size_t>> blocks_;
  std::size_t block_ = 0, used_ = 0;
};

}  // namespace halfstep::detail
