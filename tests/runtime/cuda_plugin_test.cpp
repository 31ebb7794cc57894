// SPDX-License-Identifier: Apache-2.0
// The plug-in for NVIDIA GPUs through its table, on two emulated GPUs: memory, streams, events, copies between GPUs,
// what kernels report, groups of one rank. What CUDA itself does is not under test here.
#if defined(HALFSTEP_CUDA_EMULATED_PLUGIN)

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/runtime/cuda_table.h"

namespace halfstep::test::emulated_cuda {
namespace {

TEST_F(CudaPlugin, SaysWhatItIs) {
  EXPECT_STREQ(cuda().name, "cuda");
  EXPECT_STREQ(cuda().vendor, "NVIDIA");
  ASSERT_EQ(cuda().device_count(), 2);
  halfstep_device_info info = {};
  info.size = sizeof info;
  ASSERT_TRUE(ok(cuda().device_info(1, &info)));
  EXPECT_EQ(info.memory, uint64_t{64} << 20);
  EXPECT_TRUE(info.low_dtypes >> HALFSTEP_BF16 & 1);
  EXPECT_EQ(cuda().device_info(2, &info), HALFSTEP_FAILED);
  EXPECT_TRUE(says("there is no GPU 2; there are 2"));
  EXPECT_EQ(cuda().device_info(-1, &info), HALFSTEP_FAILED);
  // The caller's struct may be an older, shorter one.
  std::memset(&info, 0x55, sizeof info);
  info.size = offsetof(halfstep_device_info, name);
  ASSERT_TRUE(ok(cuda().device_info(0, &info)));
  EXPECT_EQ(info.name[0], 0x55);
  EXPECT_NE(cuda().extension("needs_check"), nullptr);
  EXPECT_EQ(cuda().extension("no such thing"), nullptr);
}

TEST_F(CudaPlugin, MemoryComesGoesAndRunsOut) {
  uint64_t before = 0, total = 0, now = 0;
  ASSERT_TRUE(ok(cuda().memory_info(0, &before, &total)));
  void* data = nullptr;
  ASSERT_TRUE(ok(cuda().allocate(0, 40 << 20, &data)));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
  ASSERT_TRUE(ok(cuda().memory_info(0, &now, &total)));
  EXPECT_LE(now, before - (40 << 20));
  void* more = &now;
  EXPECT_EQ(cuda().allocate(0, 40 << 20, &more), HALFSTEP_OUT_OF_MEMORY);
  EXPECT_EQ(more, nullptr);
  EXPECT_TRUE(says("cudaMallocAsync"));
  // An allocation that failed leaves no error behind for later calls to trip over.
  EXPECT_TRUE(ok(cuda().synchronize(0)));
  ASSERT_TRUE(ok(cuda().deallocate(0, data, 40 << 20)));
  ASSERT_TRUE(ok(cuda().allocate(0, 40 << 20, &more)));
  ASSERT_TRUE(ok(cuda().deallocate(0, more, 40 << 20)));
  ASSERT_TRUE(ok(cuda().memory_info(0, &now, &total)));
  EXPECT_EQ(now, before);
}

TEST_F(CudaPlugin, CopiesToOnAndFrom) {
  const std::vector<float> values = {1, 2, 3, 4};
  void* a = put(values);
  void* b = allocate(16);
  ASSERT_TRUE(ok(cuda().copy(queue, b, a, 16, HALFSTEP_COPY_ON_DEVICE)));
  EXPECT_EQ(get<float>(b, 4), values);
  EXPECT_TRUE(ok(cuda().copy(queue, nullptr, nullptr, 0, HALFSTEP_COPY_ON_DEVICE)));
  EXPECT_EQ(cuda().copy(queue, b, a, 16, 3), HALFSTEP_FAILED);
  void* pinned = nullptr;
  ASSERT_TRUE(ok(cuda().host_allocate(16, &pinned)));
  ASSERT_TRUE(ok(cuda().copy(queue, pinned, b, 16, HALFSTEP_COPY_TO_HOST)));
  ASSERT_TRUE(ok(cuda().queue_synchronize(queue)));
  EXPECT_EQ(std::memcmp(pinned, values.data(), 16), 0);
  EXPECT_TRUE(ok(cuda().host_deallocate(pinned, 16)));
}

TEST_F(CudaPlugin, CopiesBetweenGpus) {
  const std::vector<float> values = {5, 6, 7};
  void* here = put(values);
  void* there = allocate(12, 1);
  ASSERT_TRUE(ok(cuda().copy_peer(queue, 1, there, here, 12)));
  ASSERT_TRUE(ok(cuda().queue_synchronize(queue)));
  halfstep_queue* other = nullptr;
  ASSERT_TRUE(ok(cuda().queue_create(1, 0, &other)));
  EXPECT_EQ(get<float>(there, 3, other), values);
  EXPECT_TRUE(ok(cuda().queue_destroy(other)));
  EXPECT_EQ(cuda().copy_peer(queue, 2, there, here, 12), HALFSTEP_FAILED);
}

TEST_F(CudaPlugin, QueuesWaitForEvents) {
  halfstep_queue* second = nullptr;
  halfstep_event *event = nullptr, *timed = nullptr, *later = nullptr;
  ASSERT_TRUE(ok(cuda().queue_create(0, 2, &second)));
  ASSERT_TRUE(ok(cuda().event_create(0, 0, &event)));
  ASSERT_TRUE(ok(cuda().event_create(0, HALFSTEP_EVENT_TIMING, &timed)));
  ASSERT_TRUE(ok(cuda().event_create(0, HALFSTEP_EVENT_TIMING, &later)));
  // Never recorded: passed, and nothing waits for it.
  EXPECT_TRUE(ok(cuda().event_query(event)));
  EXPECT_TRUE(ok(cuda().queue_wait(second, event)));
  double elapsed = 0;
  EXPECT_EQ(cuda().event_elapsed(timed, later, &elapsed), HALFSTEP_FAILED);
  EXPECT_TRUE(says("never recorded"));
  EXPECT_EQ(cuda().event_elapsed(timed, event, &elapsed), HALFSTEP_FAILED);
  EXPECT_TRUE(says("without timing"));

  const std::vector<float> values(1000, 3.0f);
  void* a = allocate(4000);
  void* b = allocate(4000);
  ASSERT_TRUE(ok(cuda().event_record(timed, queue)));
  const int64_t n = 1000;
  const halfstep_fill_attributes three = {{3, 3, 2}};
  ASSERT_TRUE(ok(run("fill", HALFSTEP_F32, {}, {vector(a, n, HALFSTEP_F32)}, &three)));
  ASSERT_TRUE(ok(cuda().event_record(later, queue)));
  ASSERT_TRUE(ok(cuda().queue_wait(second, later)));
  ASSERT_TRUE(ok(cuda().copy(second, b, a, 4000, HALFSTEP_COPY_ON_DEVICE)));
  EXPECT_EQ(get<float>(b, 1000, second), values);
  EXPECT_TRUE(ok(cuda().event_synchronize(later)));
  EXPECT_TRUE(ok(cuda().event_query(later)));
  EXPECT_TRUE(ok(cuda().event_elapsed(timed, later, &elapsed)));
  EXPECT_GE(elapsed, 0);
  EXPECT_TRUE(ok(cuda().queue_synchronize(queue)));
  EXPECT_TRUE(ok(cuda().queue_query(queue)));
  for (halfstep_event* e : {event, timed, later}) EXPECT_TRUE(ok(cuda().event_destroy(e)));
  EXPECT_TRUE(ok(cuda().queue_destroy(second)));
}

TEST_F(CudaPlugin, KernelsAreKnownByOpVersionAndDType) {
  halfstep_kernel kernel = {};
  kernel.size = sizeof kernel;
  EXPECT_EQ(cuda().kernel("to", 1, HALFSTEP_F16, &kernel), HALFSTEP_OK);
  EXPECT_NE(kernel.run, nullptr);
  EXPECT_EQ(kernel.layouts, uint32_t{HALFSTEP_LAYOUT_STRIDED});
  EXPECT_EQ(cuda().kernel("to", 2, HALFSTEP_F16, &kernel), HALFSTEP_UNSUPPORTED);
  EXPECT_STREQ(kernel.reason, "this plug-in knows version 1 of the op");
  EXPECT_EQ(cuda().kernel("to", 1, 99, &kernel), HALFSTEP_UNSUPPORTED);
  EXPECT_EQ(cuda().kernel("no_such_op", 1, HALFSTEP_F32, &kernel), HALFSTEP_UNSUPPORTED);
  EXPECT_EQ(kernel.run, nullptr);
}

// An index that is out of range is found by the kernel, long after its call: whoever waits next is told, once, with the
// number of the call.
TEST_F(CudaPlugin, WhatKernelsFindIsToldByTheNextWait) {
  const int64_t three = 3, two = 2;
  void* x = put<float>({1, 2, 3});
  void* index = put<int64_t>({1, 3});
  void* y = put<float>({-1, -1});
  const halfstep_along_attributes along = {0};
  ASSERT_TRUE(ok(run("index_select", HALFSTEP_F32, {vector(x, three, HALFSTEP_F32), vector(index, two, HALFSTEP_I64)},
                     {vector(y, two, HALFSTEP_F32)}, &along, 4711)));
  EXPECT_EQ(cuda().queue_synchronize(queue), HALFSTEP_FAILED);
  const halfstep_error error = last_error();
  EXPECT_EQ(error.call, 4711u);
  EXPECT_STREQ(error.text, "index 3 lies outside of its dimension (0 to 2)");
  EXPECT_TRUE(ok(cuda().queue_synchronize(queue)));
  EXPECT_TRUE(ok(cuda().synchronize(0)));
  EXPECT_EQ(get<float>(y, 2)[0], 2.0f);
}

// A call that gets no memory has enqueued nothing, whichever of its requests it was: what it had got is as it was.
TEST_F(CudaPlugin, CallsWithoutMemoryLeaveNothingBehind) {
  const int64_t n = 100000;
  void* x = put<float>(std::vector<float>(n, 2));
  const halfstep_tensor in = vector(x, n, HALFSTEP_F32);
  const halfstep_tensor weights = vector(put<float>(std::vector<float>(n, -1)), n, HALFSTEP_F32);
  const halfstep_tensor one = {put<float>({-1}), nullptr, nullptr, 1, 0, HALFSTEP_F32, 1, 1, 0};
  halfstep_tensor largest = one;
  largest.data = put<float>({2});
  const halfstep_var_attributes var = {};
  const halfstep_reduce_attributes sum = {};
  const halfstep_norm_attributes extreme = {};
  struct Case {
    const char* op;
    std::vector<halfstep_tensor> in;
    halfstep_tensor out;
    const void* attributes;
    float result;
  };
  for (const Case& c : {Case{"var", {in}, one, &var, 0}, Case{"logsumexp", {in}, one, &sum, 2 + std::log(100000.0f)},
                        Case{"extreme_weights", {in, largest}, weights, &extreme, 1e-5f}}) {
    const auto before = get<float>(c.out.data, 1);
    halfstep_status status = HALFSTEP_OUT_OF_MEMORY;
    for (int allowed = 0; allowed < 8 && status != HALFSTEP_OK; ++allowed) {
      const std::size_t held = memory.size();
      workspaces = allowed;
      status = run(c.op, HALFSTEP_F32, c.in, {c.out}, c.attributes);
      ASSERT_TRUE(ok(cuda().queue_synchronize(queue)));
      if (status == HALFSTEP_OK) break;
      EXPECT_EQ(status, HALFSTEP_OUT_OF_MEMORY) << c.op;
      EXPECT_EQ(get<float>(c.out.data, 1), before) << c.op;
      for (std::size_t i = held; i < memory.size(); ++i) {
        for (const unsigned char byte : get<unsigned char>(memory[i].data, memory[i].bytes)) {
          ASSERT_EQ(byte, kFresh) << c.op << " with " << allowed << " pieces of memory";
        }
      }
    }
    EXPECT_EQ(status, HALFSTEP_OK) << c.op;
    EXPECT_NEAR(get<float>(c.out.data, 1)[0], c.result, 1e-5) << c.op;
  }
}

TEST_F(CudaPlugin, GroupsOfOneRankMoveTheirOwn) {
  char id[128];
  uint64_t bytes = 0;
  EXPECT_EQ(cuda().group_id(id, 10, &bytes), HALFSTEP_FAILED);
  EXPECT_TRUE(says("there is room for 10"));
  ASSERT_TRUE(ok(cuda().group_id(id, sizeof id, &bytes)));
  EXPECT_EQ(bytes, 128u);
  halfstep_group* group = nullptr;
  EXPECT_EQ(cuda().group_create(0, 1, 0, id, 5, &group), HALFSTEP_FAILED);
  EXPECT_EQ(cuda().group_create(0, 2, 0, id, bytes, &group), HALFSTEP_FAILED);
  EXPECT_TRUE(says("ncclCommInitRank"));
  ASSERT_TRUE(ok(cuda().group_create(0, 1, 0, id, bytes, &group)));
  const std::vector<float> values = {1, 2, 3};
  void* in = put(values);
  void* out = allocate(12);
  ASSERT_TRUE(ok(cuda().all_reduce(group, queue, in, out, 3, HALFSTEP_F32, HALFSTEP_REDUCE_SUM)));
  EXPECT_EQ(get<float>(out, 3), values);
  EXPECT_EQ(cuda().all_reduce(group, queue, in, out, 3, HALFSTEP_F32, 9), HALFSTEP_FAILED);
  EXPECT_EQ(cuda().all_gather(group, queue, in, out, 3, HALFSTEP_F8E4M3), HALFSTEP_UNSUPPORTED);
  EXPECT_TRUE(ok(cuda().broadcast(group, queue, out, 3, HALFSTEP_F32, 0)));
  EXPECT_TRUE(ok(cuda().reduce_scatter(group, queue, in, out, 3, HALFSTEP_F32, HALFSTEP_REDUCE_MAX)));
  EXPECT_EQ(cuda().all_reduce(group, queue, in, out, 3, HALFSTEP_F32, HALFSTEP_REDUCE_MEAN), HALFSTEP_UNSUPPORTED);
  void* swapped = allocate(12);
  EXPECT_TRUE(ok(cuda().all_to_all(group, queue, in, swapped, 3, HALFSTEP_F32)));
  EXPECT_EQ(get<float>(swapped, 3), values);
  const halfstep_transfer to_nobody = {in, 3, HALFSTEP_F32, 1, 0, 0};
  EXPECT_TRUE(ok(cuda().send_receive(group, queue, &to_nobody, 0)));
  EXPECT_EQ(cuda().send_receive(group, queue, &to_nobody, 1), HALFSTEP_FAILED);
  EXPECT_TRUE(says("send_receive: invalid argument"));
  EXPECT_TRUE(ok(cuda().group_error(group)));
  EXPECT_TRUE(ok(cuda().group_abort(group)));
  EXPECT_EQ(cuda().group_error(group), HALFSTEP_FAILED);
  EXPECT_EQ(cuda().broadcast(group, queue, out, 3, HALFSTEP_F32, 0), HALFSTEP_FAILED);
  EXPECT_TRUE(says("the group was aborted"));
  EXPECT_TRUE(ok(cuda().group_destroy(group)));
}

TEST_F(CudaPlugin, SeveralThreadsUseQueuesOfTheirOwn) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      halfstep_queue* own = nullptr;
      ASSERT_TRUE(ok(cuda().queue_create(t % 2, 0, &own)));
      void* data = nullptr;
      ASSERT_TRUE(ok(cuda().allocate(t % 2, 4096, &data)));
      for (int i = 0; i < 50; ++i) {
        std::vector<int32_t> values(1024, 100 * t + i), back(1024);
        ASSERT_TRUE(ok(cuda().copy(own, data, values.data(), 4096, HALFSTEP_COPY_TO_DEVICE)));
        ASSERT_TRUE(ok(cuda().copy(own, back.data(), data, 4096, HALFSTEP_COPY_TO_HOST)));
        ASSERT_EQ(back, values);
      }
      EXPECT_TRUE(ok(cuda().queue_destroy(own)));
      EXPECT_TRUE(ok(cuda().deallocate(t % 2, data, 4096)));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace halfstep::test::emulated_cuda

#endif
