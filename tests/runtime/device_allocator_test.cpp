// SPDX-License-Identifier: Apache-2.0
// The caching allocator of a device, on the simulated accelerator's second device, which no other test uses.
#include "halfstep/runtime/caching_allocator.h"

#include "halfstep/core/error.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "tests/runtime/on_sim.h"

namespace halfstep {
namespace {

using test::error_of;

constexpr std::int64_t kMiB = 1 << 20;

class DeviceMemory : public test::OnSim {
 protected:
  DeviceMemory() {
    set_memory_limit(0, device);
    set_memory_caching(true, device);
    empty_memory_cache(device);
    before_ = memory_stats(device);
    EXPECT_EQ(before_.allocated, 0u);
    EXPECT_EQ(before_.reserved, 0u);
    EXPECT_EQ(before_.segments, 0u);
  }
  ~DeviceMemory() override {
    set_memory_limit(0, device);
    set_memory_caching(true, device);
    EXPECT_EQ(memory_stats(device).allocated, 0u) << "a test keeps no memory";
  }
  Tensor bytes(std::int64_t n) { return empty({n}, {.dtype = u8, .device = device}); }
  MemoryStats now() { return memory_stats(device); }

  Device device = test::sim_device(1);
  MemoryStats before_;
};

TEST_F(DeviceMemory, SizesOfSegmentsAndBlocks) {
  const Tensor one = bytes(1);
  EXPECT_EQ(now().allocated, 512u);
  EXPECT_EQ(now().reserved, 2u * kMiB);
  const Tensor small = bytes(kMiB);
  EXPECT_EQ(now().allocated, 512u + kMiB);
  EXPECT_EQ(now().reserved, 2u * kMiB) << "both in one segment of 2 MiB";
  EXPECT_EQ(now().cache_hits - before_.cache_hits, 1u);
  const Tensor medium = bytes(3 * kMiB);
  EXPECT_EQ(now().reserved, 22u * kMiB) << "1 to 10 MiB out of segments of 20 MiB";
  const Tensor large = bytes(10 * kMiB + 1);
  EXPECT_EQ(now().reserved, 22u * kMiB) << "fits what is left of it";
  const Tensor larger = bytes(11 * kMiB);
  EXPECT_EQ(now().reserved, 34u * kMiB) << "in multiples of 2 MiB";
  EXPECT_EQ(now().segments, 3u);
  EXPECT_EQ(now().blocks, 5u);
}

TEST_F(DeviceMemory, SplitsAndJoins) {
  Tensor a = bytes(4 * kMiB), b = bytes(4 * kMiB), c = bytes(4 * kMiB);
  const auto* first = static_cast<const char*>(a.impl()->data());
  EXPECT_EQ(static_cast<const char*>(b.impl()->data()), first + 4 * kMiB);
  EXPECT_EQ(now().split, 8u * kMiB);
  a = Tensor();
  c = Tensor();
  EXPECT_EQ(now().split, 16u * kMiB);
  // 8 MiB fit behind b only because c has been joined with what lay behind it.
  Tensor d = bytes(8 * kMiB);
  EXPECT_EQ(static_cast<const char*>(d.impl()->data()), first + 8 * kMiB);
  b = Tensor();
  d = Tensor();
  EXPECT_EQ(now().split, 0u);
  Tensor whole = bytes(20 * kMiB);
  EXPECT_EQ(static_cast<const char*>(whole.impl()->data()), first) << "all of it is one block again";
  EXPECT_EQ(now().reserved, 20u * kMiB);
  const auto snapshot = memory_snapshot(device);
  ASSERT_EQ(snapshot.size(), 1u);
  EXPECT_EQ(snapshot[0].bytes, 20u * kMiB);
  EXPECT_TRUE(snapshot[0].in_use);
}

// Small blocks stay at hand, unjoined, for calls of their size; nothing of that is lost when memory runs short.
TEST_F(DeviceMemory, SmallBlocksAreAtHand) {
  set_memory_limit(20u * kMiB, device);
  std::vector<Tensor> many;
  for (int i = 0; i < 128; ++i) many.push_back(bytes(16 * 1024));
  EXPECT_EQ(now().reserved, 2u * kMiB) << "one segment";
  const void* last = many.back().impl()->data();
  many.pop_back();
  EXPECT_EQ(bytes(16 * 1024).impl()->data(), last);
  many.clear();
  EXPECT_EQ(now().allocated, 0u);
  EXPECT_EQ(now().blocks, 0u);
  // The segment can be given back for another kind only when all of it is joined.
  const Tensor large = bytes(2 * kMiB - 512);
  EXPECT_EQ(now().segments, 1u);
  EXPECT_EQ(memory_snapshot(device).size(), 2u) << "the block and the rest of the segment";
}

TEST_F(DeviceMemory, PeaksAndEmptyCache) {
  { const Tensor x = bytes(30 * kMiB); }
  EXPECT_EQ(now().allocated, 0u);
  EXPECT_GE(now().allocated_peak, 30u * kMiB);
  EXPECT_EQ(now().reserved, 30u * kMiB);
  empty_memory_cache(device);
  EXPECT_EQ(now().reserved, 0u);
  reset_peak_memory(device);
  EXPECT_EQ(now().allocated_peak, 0u);
  EXPECT_EQ(now().reserved_peak, 0u);
}

TEST_F(DeviceMemory, WithoutCachingEverythingGoesBack) {
  set_memory_caching(false, device);
  const std::uint64_t allocations = test::sim_stats().allocations;
  for (int i = 0; i < 3; ++i) {
    const Tensor x = ones({1000}, {.device = device});
    EXPECT_EQ(sum(x).item<double>(), 1000);
  }
  EXPECT_GE(test::sim_stats().allocations, allocations + 6);
  EXPECT_EQ(now().reserved, 0u);
}

TEST_F(DeviceMemory, TheLimitAndWhatIsHeld) {
  set_memory_limit(64u << 20, device);
  EXPECT_EQ(sum(ones({4}, {.device = device}) + 1).item<double>(), 8);
  empty_memory_cache(device);
  const Tensor x = ones({8 * kMiB}, {.device = device});  // 32 MiB
  const Tensor y = x + x;
  const std::string text = error_of([&] { y* y; });
  EXPECT_NE(text.find("allocate: sim:1 has no 33.6 MB left for mul"), std::string::npos) << text;
  EXPECT_NE(text.find("67.1 MB are in use in 2 blocks"), std::string::npos) << text;
  EXPECT_NE(text.find("the limit is 67.1 MB"), std::string::npos) << text;
  EXPECT_NE(text.find("33.6 MB by add"), std::string::npos) << text;
  EXPECT_NE(text.find("33.6 MB by unnamed"), std::string::npos) << "made by no op, whatever came before: " << text;
  EXPECT_THROW(y * y, OutOfMemoryError);
  EXPECT_EQ(now().out_of_memory - before_.out_of_memory, 2u);
  EXPECT_EQ(now().limit, 64u << 20);
  set_memory_limit(0, device);
  EXPECT_EQ((y * y).numel(), 8 * kMiB) << "an allocation that failed harms nothing";
  EXPECT_THROW(set_memory_limit(1, Device{}), DeviceError);
}

TEST_F(DeviceMemory, WhatIsLeftIsUsedWhereAWholeSegmentDoesNotFit) {
  set_memory_limit(3 * kMiB, device);
  const Tensor x = bytes(2 * kMiB + 100);  // out of segments of 20 MiB, were there room
  EXPECT_EQ(now().reserved, 2u * kMiB + 512);
  const Tensor y = bytes(1000);  // of 2 MiB
  EXPECT_EQ(now().reserved, 2u * kMiB + 512 + 1024);
  const std::string text = error_of([&] { bytes(kMiB); });
  EXPECT_NE(text.find("sim:1 has no 1.0 MB left"), std::string::npos) << text;
  EXPECT_NE(text.find("1.0 kB by"), std::string::npos) << text;
  set_memory_limit(0, device);
}

TEST_F(DeviceMemory, WhatIsKeptIsGivenBackBeforeAnythingFails) {
  { const Tensor x = bytes(600 * kMiB); }
  EXPECT_EQ(now().reserved, 600u * kMiB);
  const Tensor y = bytes(700 * kMiB);  // the device has 1 GiB
  EXPECT_EQ(now().reserved, 700u * kMiB);
  EXPECT_GE(now().retries - before_.retries, 1u);
  const std::string text = error_of([&] { bytes(700 * kMiB); });
  EXPECT_NE(text.find("the device says 339.7 MB of 1073.7 MB are free"), std::string::npos) << text;
}

TEST_F(DeviceMemory, AnAllocationThatFailsOnceIsTriedAgain) {
  test::order_fault("oom:1");
  const Tensor x = bytes(30 * kMiB);
  EXPECT_EQ(now().retries - before_.retries, 1u);
  EXPECT_EQ(now().out_of_memory, before_.out_of_memory);
  test::order_fault("oom:1:always");
  EXPECT_THROW(bytes(40 * kMiB), OutOfMemoryError);
  test::order_fault("clear");
  EXPECT_EQ(bytes(40 * kMiB).numel(), 40 * kMiB);
}

}  // namespace
}  // namespace halfstep
