// SPDX-License-Identifier: Apache-2.0
// The allocator of the CPU, and of meta, which counts as it does: what it rounds up, and what it keeps.
#include <gtest/gtest.h>

#include <cstdint>

#include "halfstep/core/device.h"
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

TEST(HostAllocator, RoundsUpLittleAndLargeBlocksLeast) {
  constexpr std::size_t kLarge = std::size_t{2} << 20;
  for (int log2 = 6; log2 < 40; ++log2) {
    const std::size_t power = std::size_t{1} << log2;
    EXPECT_EQ(counted(power), power);
    std::uint64_t last = power;
    for (std::size_t part = 1; part <= 64; ++part) {
      for (const std::size_t bytes : {power + part * power / 64 - 1, power + part * power / 64}) {
        const std::uint64_t got = counted(bytes);
        EXPECT_GE(got, bytes);
        EXPECT_GE(got, last) << "larger blocks are never smaller";
        EXPECT_LE(got - bytes, power / (bytes > kLarge ? 32 : 4)) << bytes;
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
  void* const data = allocator.allocate(kBytes);
  allocator.deallocate(data, kBytes);
  EXPECT_EQ(allocator.allocate(kBytes - 1000), data);
  allocator.deallocate(data, kBytes - 1000);
  const std::uint64_t kept = memory_stats().reserved - memory_stats().allocated;
  EXPECT_GE(kept, kBytes);
  empty_memory_cache();
  EXPECT_EQ(memory_stats().reserved, memory_stats().allocated);
}

}  // namespace
}  // namespace halfstep
