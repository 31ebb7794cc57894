// SPDX-License-Identifier: Apache-2.0
// The allocator of the CPU, and of meta, which counts as it does: what it rounds up, and what it keeps.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "halfstep/core/device.h"
#include "halfstep/core/error.h"
#include "halfstep/core/storage.h"
#include "halfstep/runtime/caching_allocator.h"

namespace halfstep {
namespace {

// Bytes that are counted for a block of so many.
std::uint64_t counted(std::size_t bytes) {
  Allocator& allocator = allocator_for(kMeta);
  const std::uint64_t before = memory_stats(kMeta).allocated;
  void* const data = allocator.allocate(bytes);
  const std::uint64_t taken = memory_stats(kMeta).allocated - before;
  allocator.deallocate(data, bytes);
  EXPECT_EQ(memory_stats(kMeta).allocated, before);
  return taken;
}

TEST(HostAllocator, RoundsUpLittleAndLargeBlocksToPages) {
  constexpr std::size_t kLarge = std::size_t{256} << 10;
  for (int log2 = 6; log2 < 40; ++log2) {
    const std::size_t power = std::size_t{1} << log2;
    EXPECT_EQ(counted(power), power);
    std::uint64_t last = power;
    for (std::size_t part = 1; part <= 64; ++part) {
      for (const std::size_t bytes : {power + part * power / 64 - 1, power + part * power / 64}) {
        const std::uint64_t got = counted(bytes);
        EXPECT_GE(got, bytes);
        EXPECT_GE(got, last) << "larger blocks are never smaller";
        EXPECT_LE(got - bytes, bytes > kLarge ? 4095 : std::max<std::size_t>(power / 16, 63)) << bytes;
        last = got;
      }
    }
    EXPECT_EQ(last, 2 * power);
  }
  EXPECT_EQ(counted(1), 64u);
  // A result of ResNet-50 on 16 pictures in float32 wastes nothing.
  EXPECT_EQ(counted(std::size_t{16} * 64 * 112 * 112 * 4), std::uint64_t{49} << 20);
  empty_memory_cache(kMeta);
}

TEST(HostAllocator, BlocksOfAboutOneSizeServeEachOther) {
  Allocator& allocator = allocator_for(Device{});
  constexpr std::size_t kBytes = std::size_t{40} << 20;
  set_memory_caching(true);
  void* const data = allocator.allocate(kBytes);
  allocator.deallocate(data, kBytes);
  EXPECT_EQ(allocator.allocate(kBytes - 1000), data);
  allocator.deallocate(data, kBytes - 1000);
  const std::uint64_t kept = memory_stats().reserved - memory_stats().allocated;
  EXPECT_GE(kept, kBytes);
  empty_memory_cache();
  EXPECT_EQ(memory_stats().reserved, memory_stats().allocated);
}

TEST(HostAllocator, CachesUpToItsLimit) {
  Allocator& allocator = allocator_for(Device{});
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  set_memory_caching(true);
  empty_memory_cache();
  EXPECT_EQ(memory_stats().limit, 0u);
  const std::uint64_t before = memory_stats().allocated;
  // Holes of 2 MiB, for which a block of 3 MiB has no use.
  std::vector<void*> holes, kept;
  for (int i = 0; i < 8; ++i) {
    holes.push_back(allocator.allocate(2 * kMiB));
    kept.push_back(allocator.allocate(kMiB));
  }
  for (void* hole : holes) allocator.deallocate(hole, 2 * kMiB);
  EXPECT_EQ(memory_stats().reserved, before + 24 * kMiB);
  void* const free = allocator.allocate(3 * kMiB);
  EXPECT_EQ(memory_stats().reserved, before + 27 * kMiB);
  {
    const MemoryCacheLimitGuard limit(before + 20 * kMiB);
    EXPECT_EQ(memory_stats().limit, before + 20 * kMiB);
    reset_peak_memory();
    void* const limited = allocator.allocate(3 * kMiB);
    EXPECT_EQ(memory_stats().reserved, before + 20 * kMiB);
    EXPECT_LE(memory_stats().reserved_peak, before + 27 * kMiB);
    // In use may be more, and then nothing is cached.
    void* const more = allocator.allocate(30 * kMiB);
    EXPECT_EQ(memory_stats().reserved, memory_stats().allocated);
    allocator.deallocate(more, 30 * kMiB);
    allocator.deallocate(limited, 3 * kMiB);
  }
  EXPECT_EQ(memory_stats().limit, 0u);
  allocator.deallocate(free, 3 * kMiB);
  for (void* block : kept) allocator.deallocate(block, kMiB);
}

TEST(HostAllocator, KeepsNothingWithoutCaching) {
  Allocator& allocator = allocator_for(Device{});
  constexpr std::size_t kBytes = std::size_t{3} << 20;
  set_memory_caching(true);
  void* const before = allocator.allocate(kBytes);
  set_memory_caching(false);
  EXPECT_EQ(memory_stats().reserved, memory_stats().allocated);
  void* const small = allocator.allocate(100);
  void* const large = allocator.allocate(kBytes);
  std::memset(large, 1, kBytes);
  for (const auto& [data, bytes] : {std::pair{large, kBytes}, {before, kBytes}, {small, std::size_t{100}}}) {
    allocator.deallocate(data, bytes);
    EXPECT_EQ(memory_stats().reserved, memory_stats().allocated);
  }
  set_memory_caching(true);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need addresses of their own
TEST(HostAllocator, SaysWhenTheSystemHasNoMore) {
  const auto in_child = [] {
    std::ifstream file("/proc/self/statm");
    std::uint64_t pages = 0;
    file >> pages;
    const std::uint64_t most = pages * 4096 + (std::uint64_t{300} << 20);
    const rlimit limit{most, most};
    if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(1);
    Allocator& allocator = allocator_for(Device{});
    set_memory_caching(true);
    empty_memory_cache();
    const MemoryStats before = memory_stats();
    void* const kept = allocator.allocate(std::size_t{150} << 20);
    allocator.deallocate(kept, std::size_t{150} << 20);
    // The addresses of what is kept are needed: they are returned first.
    void* const other = allocator.allocate(std::size_t{200} << 20);
    if (can_allocate(std::size_t{1} << 30) || !can_allocate(std::size_t{50} << 20)) std::_Exit(3);
    std::string why;
    try {
      allocator.allocate(std::size_t{1} << 30);
    } catch (const OutOfMemoryError& e) {
      why = e.what();
    }
    allocator.deallocate(other, std::size_t{200} << 20);
    std::fputs(why.c_str(), stderr);
    std::_Exit(memory_stats().allocated == before.allocated && allocator.allocate(1 << 20) ? 0 : 2);
  };
  EXPECT_EXIT(in_child(), testing::ExitedWithCode(0), "the CPU has no 1073741824 bytes left");
}
#endif

}  // namespace
}  // namespace halfstep
