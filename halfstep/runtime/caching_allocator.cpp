// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/caching_allocator.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/runtime/block_heap_internal.h"
#include "halfstep/runtime/device_allocator.h"
#include "halfstep/runtime/device_backend.h"

namespace halfstep {
namespace {

// Small blocks come in classes of size, sixteen to each doubling, so that blocks of about one size serve each other: at
// most a seventeenth is wasted. Large ones, which are most of a step's memory, are cut from a heap and rounded up to
// pages. A training step asks for the same sizes again and again: after the first step everything comes from what is
// kept, and no page is touched for the first time again (page faults of fresh memory cost more than many kernels).
constexpr int kSmallestLog2 = 6, kLargeLog2 = 18, kMostLog2 = 46;
constexpr int kClassesLog2 = 4;  // of a doubling
constexpr int kNumClasses = 1 + ((kLargeLog2 - kSmallestLog2) << kClassesLog2);
constexpr std::size_t kMostOfClasses = std::size_t{1} << kLargeLog2;  // at most

int class_of(std::size_t bytes) {
  constexpr std::size_t kSmallest = std::size_t{1} << kSmallestLog2;
  if (bytes <= kSmallest) return 0;
  bytes = (bytes + kSmallest - 1) / kSmallest * kSmallest;  // classes between its multiples have no blocks
  // 2^log2 < bytes <= 2^(log2+1)
  const int log2 = std::max(static_cast<int>(std::bit_width(bytes - 1)) - 1, kSmallestLog2);
  const auto step = static_cast<int>((bytes - 1 - (std::size_t{1} << log2)) >> (log2 - kClassesLog2));
  return 1 + step + ((log2 - kSmallestLog2) << kClassesLog2);
}

std::size_t class_bytes(int c) {
  if (c == 0) return std::size_t{1} << kSmallestLog2;
  const int log2 = kSmallestLog2 + ((c - 1) >> kClassesLog2);
  const auto step = static_cast<std::size_t>((c - 1) & ((1 << kClassesLog2) - 1)) + 1;
  return (std::size_t{1} << log2) + (step << (log2 - kClassesLog2));
}

// What a block takes.
std::size_t taken_for(std::size_t bytes) {
  return bytes <= kMostOfClasses ? class_bytes(class_of(bytes)) : detail::BlockHeap::block_bytes(bytes);
}

// Where small blocks come from, and large ones that are not to be kept. `give` frees what `take` gave for the same
// size, and `trim` returns what was given to the system.
struct Source {
  detail::BlockHeap::Kind kind;  // of the heap for large ones
  void* (*take)(std::size_t size);
  void (*give)(void* data, std::size_t size) noexcept;
  void (*trim)() noexcept;
};

constexpr Source kMemory = {
    .kind = detail::BlockHeap::Kind::memory,
    .take = [](std::size_t size) -> void* { return std::aligned_alloc(64, size); },
    .give = [](void* data, std::size_t) noexcept { std::free(data); },
    // The C library keeps blocks of up to 32 MiB.
    .trim =
        []() noexcept {
#ifdef __GLIBC__
          malloc_trim(0);
#endif
        },
};

// Addresses for meta: nothing may touch them, so that they cost no memory, and an access by mistake ends the program
// where it happens. Neighbouring ranges of a kind are one for the system, however many there are.
constexpr Source kAddresses = {
    .kind = detail::BlockHeap::Kind::addresses,
    .take = [](std::size_t size) -> void* {
      void* data = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      return data == MAP_FAILED ? nullptr : data;
    },
    .give = [](void* data, std::size_t size) noexcept { munmap(data, size); },
    .trim = []() noexcept {},
};

// The CPU's, and meta's, which counts as the CPU's does.
class HostAllocator final : public Allocator {
 public:
  HostAllocator(const Source& source, const char* what) : source_(source), what_(what), heap_(source.kind) {
    caching_ = std::getenv("HALFSTEP_NO_CACHE") == nullptr;
  }

  void* allocate(std::size_t bytes) override {
    if (bytes > std::size_t{1} << kMostLog2) out_of_memory(bytes);
    const std::size_t size = taken_for(bytes);
    std::unique_lock lock(mutex_);
    ++stats_.allocations;
    const std::uint64_t reserved = reserved_now();
    void* data = take(bytes, size);
    if (!data) {  // what is kept of other sizes may be what is missing
      trim();
      data = take(bytes, size);
    }
    if (!data) {
      lock.unlock();
      out_of_memory(bytes);
    }
    if (stats_.limit > 0 && reserved_now() > std::max(reserved, stats_.limit)) shrink();
    stats_.allocated += size;
    stats_.allocated_peak = std::max(stats_.allocated_peak, stats_.allocated);
    if (reserved_now() == reserved) ++stats_.cache_hits;
    stats_.reserved_peak = std::max(stats_.reserved_peak, reserved_now());
    return data;
  }

  void deallocate(void* data, std::size_t bytes) noexcept override {
    const std::size_t size = taken_for(bytes);
    std::lock_guard lock(mutex_);
    stats_.allocated -= size;
    if (bytes > kMostOfClasses && heap_.give(data)) {
      if (!caching_) heap_.trim();
      return;
    }
    if (bytes <= kMostOfClasses && caching_) {
      try {
        free_[static_cast<std::size_t>(class_of(bytes))].push_back(data);
        cached_ += size;
        return;
      } catch (const std::bad_alloc&) {  // the list can't grow: let the block go instead
      }
    }
    from_source_ -= size;
    source_.give(data, size);
  }

  void empty_cache() {
    std::lock_guard lock(mutex_);
    trim();
  }

  MemoryStats stats() {
    std::lock_guard lock(mutex_);
    MemoryStats s = stats_;
    s.reserved = reserved_now();
    return s;
  }
  void reset_peak() {
    std::lock_guard lock(mutex_);
    stats_.allocated_peak = stats_.allocated;
    stats_.reserved_peak = reserved_now();
  }
  void set_cache_limit(std::uint64_t bytes) {
    std::lock_guard lock(mutex_);
    stats_.limit = bytes;
  }
  void set_caching(bool on) {
    std::lock_guard lock(mutex_);
    caching_ = on;
    if (!on) trim();
  }

 private:
  std::uint64_t reserved_now() const { return from_source_ + heap_.reserved(); }

  // Null when there is no memory.
  void* take(std::size_t bytes, std::size_t size) {
    if (bytes > kMostOfClasses && caching_) return heap_.take(bytes);
    if (bytes <= kMostOfClasses) {
      auto& list = free_[static_cast<std::size_t>(class_of(bytes))];
      if (!list.empty()) {
        void* data = list.back();
        list.pop_back();
        cached_ -= size;
        return data;
      }
    }
    void* data = source_.take(size);
    if (data) from_source_ += size;
    return data;
  }

  void release_small() {
    for (int c = 0; c < kNumClasses; ++c) {
      const std::size_t size = class_bytes(c);
      for (void* data : std::exchange(free_[static_cast<std::size_t>(c)], {})) {
        from_source_ -= size;
        source_.give(data, size);
      }
    }
    cached_ = 0;
    source_.trim();
  }
  // What is cached goes back until the limit is met.
  void shrink() {
    heap_.shrink(stats_.limit - std::min(stats_.limit, from_source_));
    // The C library searches all of its memory for pages to return: not for a little.
    if (reserved_now() > stats_.limit && cached_ > stats_.limit / 64) release_small();
  }
  void trim() {
    heap_.trim();
    release_small();
  }

  [[noreturn]] void out_of_memory(std::size_t bytes) {
    const MemoryStats s = stats();
    fail<OutOfMemoryError>("allocate: {} has no {} bytes left; {} bytes are in use, {} are kept for later", what_,
                           bytes, s.allocated, s.reserved - s.allocated);
  }

  const Source source_;
  const char* const what_;
  std::mutex mutex_;
  detail::BlockHeap heap_;
  std::array<std::vector<void*>, kNumClasses> free_;
  std::uint64_t from_source_ = 0;  // bytes, handed out or in free_
  std::uint64_t cached_ = 0;       // bytes in free_
  MemoryStats stats_;              // without `reserved`
  bool caching_ = true;
};

// Never destroyed: tensors with static lifetime give their memory back late.
HostAllocator& cpu_allocator() {
  static HostAllocator& instance = *new HostAllocator(kMemory, "the CPU");
  return instance;
}
HostAllocator& meta_allocator() {
  static HostAllocator& instance = *new HostAllocator(kAddresses, "the address space of meta");
  return instance;
}
HostAllocator& host_allocator(Device device) { return device.is_meta() ? meta_allocator() : cpu_allocator(); }

[[maybe_unused]] const bool registered = [] {
  set_allocator(Device{}, &cpu_allocator());
  set_allocator(kMeta, &meta_allocator());
  return true;
}();

DeviceAllocator& device_allocator(Device device, const char* what) {
  return backend_for(device, what).allocator(device.index);
}
}  // namespace

MemoryStats memory_stats(Device device) {
  return device.is_host() ? host_allocator(device).stats() : device_allocator(device, "memory_stats").stats();
}
void reset_peak_memory(Device device) {
  device.is_host() ? host_allocator(device).reset_peak() : device_allocator(device, "reset_peak_memory").reset_peak();
}
void empty_memory_cache(Device device) {
  device.is_host() ? host_allocator(device).empty_cache()
                   : device_allocator(device, "empty_memory_cache").empty_cache();
}
void set_memory_caching(bool on, Device device) {
  device.is_host() ? host_allocator(device).set_caching(on)
                   : device_allocator(device, "set_memory_caching").set_caching(on);
}
void set_memory_limit(std::uint64_t bytes, Device device) {
  if (device.is_host()) fail<DeviceError>("set_memory_limit: expected another device than the CPU");
  device_allocator(device, "set_memory_limit").set_limit(bytes);
}
void set_memory_cache_limit(std::uint64_t bytes) { cpu_allocator().set_cache_limit(bytes); }
MemoryCacheLimitGuard::MemoryCacheLimitGuard(std::uint64_t bytes) : before_(memory_stats().limit) {
  set_memory_cache_limit(bytes);
}
MemoryCacheLimitGuard::~MemoryCacheLimitGuard() { set_memory_cache_limit(before_); }
bool can_allocate(std::uint64_t bytes) {
  const MemoryStats s = memory_stats();
  const std::uint64_t kept = s.reserved - s.allocated;
  if (bytes <= kept) return true;
  const auto more = static_cast<std::size_t>(bytes - kept);
  void* const data = mmap(nullptr, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return false;
  munmap(data, more);
  return true;
}
std::vector<MemoryBlock> memory_snapshot(Device device) {
  return device.is_host() ? std::vector<MemoryBlock>() : device_allocator(device, "memory_snapshot").blocks();
}

const char*& allocation_label() {
  thread_local const char* label = nullptr;
  return label;
}

}  // namespace halfstep
