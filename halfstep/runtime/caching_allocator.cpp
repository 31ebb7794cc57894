// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/caching_allocator.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/runtime/device_allocator.h"
#include "halfstep/runtime/device_backend.h"

namespace halfstep {
namespace {

// Blocks come in classes of size, so that blocks of about one size serve each other: four to each doubling, and 32 from
// 2 MiB on, so that at most a fifth is wasted of small ones and 3% of large ones, which are most of a step's memory. A
// training step asks for the same sizes again and again: after the first step everything comes from the lists, and no
// page is touched for the first time again (page faults of fresh memory cost more than many kernels).
constexpr int kSmallestLog2 = 6, kLargeLog2 = 21, kMostLog2 = 46;
constexpr int kSmallClassesLog2 = 2, kLargeClassesLog2 = 5;  // of a doubling
constexpr int kSmallClasses = (kLargeLog2 - kSmallestLog2) << kSmallClassesLog2;
constexpr int kNumClasses = 1 + kSmallClasses + ((kMostLog2 + 1 - kLargeLog2) << kLargeClassesLog2);

int class_of(std::size_t bytes) {
  if (bytes <= std::size_t{1} << kSmallestLog2) return 0;
  const int log2 = std::bit_width(bytes - 1) - 1;  // 2^log2 < bytes <= 2^(log2+1)
  const bool large = log2 >= kLargeLog2;
  const int classes = large ? kLargeClassesLog2 : kSmallClassesLog2;
  const auto step = static_cast<int>((bytes - 1 - (std::size_t{1} << log2)) >> (log2 - classes));
  return 1 + step + (large ? kSmallClasses + ((log2 - kLargeLog2) << classes) : (log2 - kSmallestLog2) << classes);
}

std::size_t class_bytes(int c) {
  if (c == 0) return std::size_t{1} << kSmallestLog2;
  const bool large = c > kSmallClasses;
  const int classes = large ? kLargeClassesLog2 : kSmallClassesLog2;
  const int of_kind = c - 1 - (large ? kSmallClasses : 0);
  const int log2 = (large ? kLargeLog2 : kSmallestLog2) + (of_kind >> classes);
  const auto step = static_cast<std::size_t>(of_kind & ((1 << classes) - 1)) + 1;
  return (std::size_t{1} << log2) + (step << (log2 - classes));
}

// From this size on memory comes straight from the system, aligned to its huge pages.
constexpr std::size_t kHuge = std::size_t{2} << 20;

// Where blocks come from. `give` frees what `take` gave for the same size, and `trim` returns what was given to the
// system.
struct Source {
  void* (*take)(std::size_t size);
  void (*give)(void* data, std::size_t size) noexcept;
  void (*trim)() noexcept;
};

constexpr Source kMemory = {
    .take = [](std::size_t size) -> void* {
      const std::size_t alignment = size >= kHuge ? kHuge : 64;
      // aligned_alloc wants a multiple of the alignment.
      void* data = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
      if (data && size >= kHuge) madvise(data, size, MADV_HUGEPAGE);
      return data;
    },
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
  HostAllocator(const Source& source, const char* what) : source_(source), what_(what) {
    caching_ = std::getenv("HALFSTEP_NO_CACHE") == nullptr;
  }

  void* allocate(std::size_t bytes) override {
    if (bytes > std::size_t{1} << kMostLog2) out_of_memory(bytes);
    const int c = class_of(bytes);
    const std::size_t size = class_bytes(c);
    std::unique_lock lock(mutex_);
    ++stats_.allocations;
    stats_.allocated += size;
    stats_.allocated_peak = std::max(stats_.allocated_peak, stats_.allocated);
    auto& list = free_[static_cast<std::size_t>(c)];
    if (!list.empty()) {
      void* data = list.back();
      list.pop_back();
      ++stats_.cache_hits;
      return data;
    }
    stats_.reserved += size;
    stats_.reserved_peak = std::max(stats_.reserved_peak, stats_.reserved);
    lock.unlock();
    void* data = source_.take(size);
    if (!data) {
      empty_cache();  // what is kept in other classes may be what is missing
      data = source_.take(size);
    }
    if (!data) {
      lock.lock();
      stats_.allocated -= size;
      stats_.reserved -= size;
      lock.unlock();
      out_of_memory(bytes);
    }
    return data;
  }

  void deallocate(void* data, std::size_t bytes) noexcept override {
    const int c = class_of(bytes);
    const std::size_t size = class_bytes(c);
    std::unique_lock lock(mutex_);
    stats_.allocated -= size;
    if (caching_) {
      try {
        free_[static_cast<std::size_t>(c)].push_back(data);
        return;
      } catch (const std::bad_alloc&) {  // the list can't grow: let the block go instead
      }
    }
    stats_.reserved -= size;
    lock.unlock();
    source_.give(data, size);
  }

  void empty_cache() {
    std::lock_guard lock(mutex_);
    for (int c = 0; c < kNumClasses; ++c) {
      const std::size_t size = class_bytes(c);
      for (void* data : free_[static_cast<std::size_t>(c)]) {
        stats_.reserved -= size;
        source_.give(data, size);
      }
      free_[static_cast<std::size_t>(c)] = {};
    }
    source_.trim();
  }

  MemoryStats stats() {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_peak() {
    std::lock_guard lock(mutex_);
    stats_.allocated_peak = stats_.allocated;
    stats_.reserved_peak = stats_.reserved;
  }
  void set_caching(bool on) {
    {
      std::lock_guard lock(mutex_);
      caching_ = on;
    }
    if (!on) empty_cache();
  }

 private:
  [[noreturn]] void out_of_memory(std::size_t bytes) {
    const MemoryStats s = stats();
    fail<OutOfMemoryError>("allocate: {} has no {} bytes left; {} bytes are in use, {} are kept for later", what_,
                           bytes, s.allocated, s.reserved - s.allocated);
  }

  const Source source_;
  const char* const what_;
  std::mutex mutex_;
  std::array<std::vector<void*>, kNumClasses> free_;
  MemoryStats stats_;
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
std::vector<MemoryBlock> memory_snapshot(Device device) {
  return device.is_host() ? std::vector<MemoryBlock>() : device_allocator(device, "memory_snapshot").blocks();
}

const char*& allocation_label() {
  thread_local const char* label = nullptr;
  return label;
}

}  // namespace halfstep
