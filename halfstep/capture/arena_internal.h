// SPDX-License-Identifier: Apache-2.0
// Internal: the memory of a recorded step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "halfstep/capture/placement_internal.h"
#include "halfstep/core/device.h"
#include "halfstep/core/storage.h"

namespace halfstep::detail {

/// Memory of one device that a recorded step has for itself. While the step is recorded, its tensors come from the
/// device's allocator and go back to it, as those of a step by itself do; what is noted is which calls use each. After
/// that place() plans the memory of all replays at once. Lives until the recording and all tensors in it have gone.
class CaptureArena final : public Allocator {
 public:
  /// A block that the step took, and a place in it.
  struct Place {
    std::size_t block;
    std::ptrdiff_t offset;
  };

  static CaptureArena* make(Device device) { return new CaptureArena(device); }
  void* allocate(std::size_t bytes) override;
  void deallocate(void* data, std::size_t bytes) noexcept override;
  void* home_queue() override { return source_.home_queue(); }
  void used_on(void* data, void* queue) noexcept override;

  // While it is recorded:
  /// What is taken from now on gets memory that nothing else of the step gets.
  void set_alone(bool alone) { alone_ = alone; }
  /// The block in use that has this address.
  std::optional<Place> find(const void* data) const;
  bool is_alone(const Place& place) const { return blocks_[place.block].alone; }
  /// Call number `call` reads or writes the block.
  void use(const Place& place, std::size_t call);
  /// What a call works in and leaves.
  Place add_work(std::size_t bytes, std::size_t call);
  /// Blocks in use.
  std::size_t in_use() const;

  /// Ends the recording. What the step has freed gets a place for its time in memory that is taken here, once. The
  /// contents of blocks that outlast it move there too, as far as that needs no more memory at a time than the step
  /// did: before the call that writes them first, a replay has other things there. Throws OutOfMemoryError.
  void place(std::span<const Ref<Storage>> outlasting);
  /// Where it lies in replays.
  void* address(const Place& place) const;

  /// Whether the address lies in it.
  bool owns(const void* data) const;
  /// Bytes of all that it has.
  std::size_t bytes() const;
  /// Called by the recording at its end: what holds no tensor is returned now, the rest when they are freed.
  void close() noexcept;

 private:
  struct Block {
    std::size_t bytes;
    char* data;  // where it lies; null for what has gone and has no place yet
    bool alone = false;
    bool used = false;
    std::size_t first = 0, last = 0;  // calls that use it
  };
  // Taken from the device in one piece.
  struct Piece {
    char* data = nullptr;
    std::size_t bytes = 0;
    std::size_t tensors = 0;  // in use that lie in it
    bool has(const void* address) const {
      const auto* const at = static_cast<const char*>(address);
      return data && data <= at && at < data + bytes;
    }
  };

  explicit CaptureArena(Device device);
  ~CaptureArena() override = default;
  std::vector<Placement> lifetimes(std::vector<std::size_t>& placed) const;
  void move(std::span<const Ref<Storage>> moving);
  void take(Piece& piece, std::size_t bytes);
  void give(Piece& piece) noexcept;
  void release(std::unique_lock<std::mutex> lock) noexcept;

  const Device device_;
  Allocator& source_;
  const std::size_t alignment_;
  mutable std::mutex mutex_;
  std::vector<Block> blocks_;                  // all that the step took
  std::map<const char*, std::size_t> living_;  // those that come from the device's allocator, and are in use
  std::size_t now_ = 0, most_ = 0;             // bytes of these
  Piece kept_;                                 // what outlasts the step, and what is there before
  Piece passing_;                              // all else
  std::uint64_t users_ = 1;                    // blocks in use, and the recording
  bool alone_ = false, closed_ = false;
};

/// What a kernel works in has a place of its own in the plan from so many bytes on. Less comes from Scratch, which is
/// warm in the cache.
constexpr std::size_t kLeastPlannedWork = std::size_t{1} << 20;

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
