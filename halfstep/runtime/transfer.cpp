// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/transfer.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/core/storage.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/device_wait_internal.h"
#include "halfstep/runtime/queue.h"

namespace halfstep {
namespace {

// Host memory of the plug-ins, kept in blocks of powers of two. A block goes back to its list when the copies that used
// it have been passed by their queues.
class PinnedPool {
 public:
  void* allocate(Device device, std::size_t bytes) {
    DeviceBackend* backend = device.is_host() ? nullptr : &backend_for(device, "pin_memory");
    if (backend && !backend->has_pinned()) backend = nullptr;
    const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
    std::lock_guard lock(mutex_);
    look_at_pending(false);
    for (int attempt = 0; attempt < 2; ++attempt) {
      auto& list = free_[{backend, size}];
      if (!list.empty()) {
        void* data = list.back();
        list.pop_back();
        blocks_[data].in_use = true;
        return data;
      }
      void* data = nullptr;
      halfstep_status status = HALFSTEP_OK;
      if (backend) {
        status = backend->table.host_allocate(size, &data);
      } else {
        data = allocator_for(Device{}).allocate(size);
      }
      if (status == HALFSTEP_OK && data) {
        blocks_[data] = Block{.bytes = size, .backend = backend, .in_use = true, .uses = {}, .events = {}};
        return data;
      }
      if (attempt == 0) {
        give_back(backend);  // blocks of other sizes may be what is missing
      } else {
        backend->check(status, "pin_memory", 0);
      }
    }
    fail<OutOfMemoryError>("pin_memory: no {} bytes of pinned memory left", bytes);
  }

  void deallocate(void* data) noexcept {
    std::lock_guard lock(mutex_);
    const auto it = blocks_.find(data);
    if (it == blocks_.end()) return;
    Block& block = it->second;
    block.in_use = false;
    try {
      for (const Use& use : block.uses) {
        if (use.backend->ended()) continue;
        halfstep_event* event = nullptr;
        if (use.backend->table.event_create(use.index, 0, &event) == HALFSTEP_OK) {
          if (use.backend->table.event_record(event, use.queue) == HALFSTEP_OK) {
            block.events.push_back({use.backend, use.index, event});
            continue;
          }
          use.backend->table.event_destroy(event);
        }
        // Without a mark in the queue only its end tells that the block is free.
        const DeviceWait waiting;
        use.backend->defer(use.backend->table.queue_synchronize(use.queue), use.index);
      }
      block.uses.clear();
      if (block.events.empty()) {
        free_[{block.backend, block.bytes}].push_back(data);
      } else {
        pending_.push_back(data);
      }
    } catch (...) {  // no memory for the lists: the block is not used again
    }
  }

  // Whether the address lies in a block that devices know; the copy that asks uses it on `queue`.
  bool use(const void* data, DeviceBackend* backend, int index, halfstep_queue* queue) {
    std::lock_guard lock(mutex_);
    Block* block = find(data);
    if (!block || !block->backend) return false;
    if (queue) {
      for (const Use& u : block->uses) {
        if (u.queue == queue) return true;
      }
      block->uses.push_back({backend, index, queue});
    }
    return true;
  }

  // The queue is gone and all its work done.
  void queue_destroyed(const halfstep_queue* queue) {
    std::lock_guard lock(mutex_);
    for (auto& [data, block] : blocks_) std::erase_if(block.uses, [&](const Use& u) { return u.queue == queue; });
  }

 private:
  struct Use {
    DeviceBackend* backend;
    int index;
    halfstep_queue* queue;
  };
  struct Mark {
    DeviceBackend* backend;
    int index;
    halfstep_event* event;
  };
  struct Block {
    std::size_t bytes = 0;
    DeviceBackend* backend = nullptr;  // null: ordinary memory
    bool in_use = false;
    std::vector<Use> uses;
    std::vector<Mark> events;
  };

  Block* find(const void* data) {
    auto it = blocks_.upper_bound(const_cast<void*>(data));
    if (it == blocks_.begin()) return nullptr;
    --it;
    const auto* start = static_cast<const char*>(it->first);
    return static_cast<const char*>(data) < start + it->second.bytes ? &it->second : nullptr;
  }

  void look_at_pending(bool wait) {
    for (std::size_t i = 0; i < pending_.size();) {
      Block& block = blocks_[pending_[i]];
      while (!block.events.empty()) {
        const Mark& m = block.events.back();
        const DeviceWait waiting;
        const halfstep_status status =
            wait ? m.backend->table.event_synchronize(m.event) : m.backend->table.event_query(m.event);
        if (status == HALFSTEP_NOT_READY) break;
        m.backend->defer(status, m.index);
        m.backend->table.event_destroy(m.event);
        block.events.pop_back();
      }
      if (!block.events.empty()) {
        ++i;
        continue;
      }
      free_[{block.backend, block.bytes}].push_back(pending_[i]);
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  void give_back(DeviceBackend* backend) {
    look_at_pending(true);
    for (auto& [key, list] : free_) {
      if (key.first != backend) continue;
      for (void* data : list) {
        if (backend) {
          backend->table.host_deallocate(data, key.second);
        } else {
          allocator_for(Device{}).deallocate(data, key.second);
        }
        blocks_.erase(data);
      }
      list.clear();
    }
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::map<std::pair<DeviceBackend*, std::size_t>, std::vector<void*>> free_;
  std::vector<void*> pending_;
};

PinnedPool& pinned_pool() {
  static PinnedPool& pool = *new PinnedPool;
  return pool;
}

struct Counters {
  std::atomic<std::uint64_t> to_device{0}, to_host{0}, between{0}, bytes{0}, asynchronous{0};
};
Counters counters;

// Host memory of anybody's, which may be gone after the call. What is small goes through a pinned block, so that
// numbers and states of random numbers don't stop the queue.
constexpr std::size_t kStaged = std::size_t{64} << 10;

void copy_one(DeviceBackend& backend, int index, void* destination, const void* source, std::size_t bytes, int kind,
              bool non_blocking) {
  const char* const what = kind == HALFSTEP_COPY_TO_DEVICE ? "copy to device"
                           : kind == HALFSTEP_COPY_TO_HOST ? "copy to host"
                                                           : "copy";
  backend.check_alive(what, index);
  const Device device = backend.device(index);
  auto* queue = static_cast<halfstep_queue*>(current_native_queue(device));
  counters.bytes.fetch_add(bytes, std::memory_order_relaxed);
  if (kind == HALFSTEP_COPY_ON_DEVICE) {
    counters.between.fetch_add(1, std::memory_order_relaxed);
    counters.asynchronous.fetch_add(1, std::memory_order_relaxed);
    backend.check(backend.table.copy(queue, destination, source, bytes, kind), what, index);
    if (synchronous()) synchronize(device);
    return;
  }
  const bool to_host = kind == HALFSTEP_COPY_TO_HOST;
  (to_host ? counters.to_host : counters.to_device).fetch_add(1, std::memory_order_relaxed);
  if (!to_host && !non_blocking && bytes <= kStaged && backend.has_pinned() && !synchronous()) {
    void* staged = nullptr;
    try {
      staged = allocate_pinned(device, bytes);
    } catch (const OutOfMemoryError&) {  // then it waits
    }
    if (staged) {
      std::memcpy(staged, source, bytes);
      pinned_pool().use(staged, &backend, index, queue);
      const halfstep_status status = backend.table.copy(queue, destination, staged, bytes, kind);
      free_pinned(staged);
      counters.asynchronous.fetch_add(1, std::memory_order_relaxed);
      backend.check(status, what, index);
      return;
    }
  }
  const bool asynchronous =
      non_blocking && !synchronous() && pinned_pool().use(to_host ? destination : source, &backend, index, queue);
  backend.check(backend.table.copy(queue, destination, source, bytes, kind), what, index);
  if (asynchronous) {
    counters.asynchronous.fetch_add(1, std::memory_order_relaxed);
  } else {
    const DeviceWait waiting;
    backend.check(backend.table.queue_synchronize(queue), what, index);
    backend.check_alive(what, index);
  }
}

}  // namespace

void copy_memory(void* destination, Device to, const void* source, Device from, std::size_t bytes, bool non_blocking) {
  if (bytes == 0 || to.is_meta()) return;
  if (from.is_meta()) fail<DeviceError>("copy: tensors of the device meta have no values to copy to {}", to.str());
  if (to.is_cpu() && from.is_cpu()) {
    std::memcpy(destination, source, bytes);
  } else if (to.is_cpu()) {
    copy_one(backend_for(from, "copy"), from.index, destination, source, bytes, HALFSTEP_COPY_TO_HOST, non_blocking);
  } else if (from.is_cpu()) {
    copy_one(backend_for(to, "copy"), to.index, destination, source, bytes, HALFSTEP_COPY_TO_DEVICE, non_blocking);
  } else if (to == from) {
    copy_one(backend_for(to, "copy"), to.index, destination, source, bytes, HALFSTEP_COPY_ON_DEVICE, non_blocking);
  } else {
    DeviceBackend& backend = backend_for(from, "copy");
    if (to.type == from.type && backend.table.copy_peer) {
      backend.check_alive("copy between devices", from.index);
      backend.check_alive("copy between devices", to.index);
      // Behind what the destination's queue has been given; its later work waits for the copy.
      synchronize(to);
      auto* queue = static_cast<halfstep_queue*>(current_native_queue(from));
      counters.between.fetch_add(1, std::memory_order_relaxed);
      counters.bytes.fetch_add(bytes, std::memory_order_relaxed);
      backend.check(backend.table.copy_peer(queue, to.index, destination, source, bytes), "copy between devices",
                    from.index);
      const DeviceWait waiting;
      backend.check(backend.table.queue_synchronize(queue), "copy between devices", from.index);
      return;
    }
    void* staged = allocate_pinned(from, bytes);
    try {
      copy_memory(staged, Device{}, source, from, bytes);
      copy_memory(destination, to, staged, Device{}, bytes);
    } catch (...) {
      free_pinned(staged);
      throw;
    }
    free_pinned(staged);
  }
}

void read_memory(void* destination, const void* source, Device from, std::size_t bytes) {
  copy_memory(destination, Device{}, source, from, bytes);
}

void* allocate_pinned(Device device, std::size_t bytes) { return pinned_pool().allocate(device, bytes); }
void free_pinned(void* data) noexcept { pinned_pool().deallocate(data); }
void pinned_queue_destroyed(const void* queue) {
  pinned_pool().queue_destroyed(static_cast<const halfstep_queue*>(queue));
}
bool is_pinned_memory(const void* data) { return pinned_pool().use(data, nullptr, 0, nullptr); }

TransferStats transfer_stats() {
  return {.to_device = counters.to_device.load(),
          .to_host = counters.to_host.load(),
          .between = counters.between.load(),
          .bytes = counters.bytes.load(),
          .asynchronous = counters.asynchronous.load()};
}

}  // namespace halfstep
