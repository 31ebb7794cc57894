// SPDX-License-Identifier: Apache-2.0
// The caching allocator of one device of a plug-in. For the library; programs use runtime/caching_allocator.h.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "halfstep/core/storage.h"
#include "halfstep/runtime/caching_allocator.h"

namespace halfstep {

class DeviceBackend;

/// Takes memory from the device in segments and hands out blocks of them, which are split when allocated and merged
/// with free neighbours when freed. A block belongs to the queue that it was allocated for: that queue's later work may
/// write to it as soon as it is free, since it comes after. Use by other queues is tracked with events, which are
/// waited for before it is reused. Sizes are those of the CUDA allocator that its users know: multiples of 512 bytes,
/// up to 1 MiB out of segments of 2 MiB, up to 10 MiB out of segments of 20 MiB, larger ones in multiples of 2 MiB.
class HS_API DeviceAllocator final : public Allocator {
 public:
  DeviceAllocator(DeviceBackend& backend, int index);
  ~DeviceAllocator() override;

  void* allocate(std::size_t bytes) override;
  void deallocate(void* data, std::size_t bytes) noexcept override;
  /// Null for queues other than the default one: such a queue can be destroyed and its address reused by another one,
  /// so that only the allocator knows which queue owns its blocks.
  void* home_queue() override;
  void used_on(void* data, void* queue) noexcept override;

  /// The queue is gone and all its work done.
  void queue_destroyed(void* queue);

  /// What runtime/caching_allocator.h offers for a device.
  MemoryStats stats();
  void reset_peak();
  void empty_cache();
  void set_caching(bool on);
  /// Bytes that may be taken from the device; 0: as many as it has.
  void set_limit(std::uint64_t bytes);
  std::vector<MemoryBlock> blocks();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace halfstep
