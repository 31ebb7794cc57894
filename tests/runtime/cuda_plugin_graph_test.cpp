// SPDX-License-Identifier: Apache-2.0
// Graphs of the plug-in for NVIDIA GPUs through its table, on emulated GPUs: what a queue records, what it refuses
// meanwhile, and what other threads do.
#if defined(HALFSTEP_CUDA_EMULATED_PLUGIN)

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "tests/runtime/cuda_table.h"

namespace halfstep::test::emulated_cuda {
namespace {

constexpr int64_t kThree = 3;
constexpr halfstep_alpha_attributes kPlainSum = {1, 1};

class CudaGraphs : public CudaPlugin {
 protected:
  /// x += y
  halfstep_status add(void* x, void* y, uint64_t number = 7) {
    const halfstep_tensor to = vector(x, kThree, HALFSTEP_F32), from = vector(y, kThree, HALFSTEP_F32);
    return run("add", HALFSTEP_F32, {to, from}, {to}, &kPlainSum, number);
  }
  halfstep_graph* ended() {
    halfstep_graph* graph = nullptr;
    EXPECT_TRUE(ok(cuda().graph_end(queue, &graph)));
    return graph;
  }
  static uint64_t launches() { return reinterpret_cast<uint64_t (*)()>(cuda().extension("graph_launches"))(); }
};

TEST_F(CudaGraphs, AreRecordedWithoutRunningAndLaunchedAgainAndAgain) {
  void *x = put<float>({1, 2, 3}), *y = put<float>({10, 20, 30});
  ASSERT_TRUE(ok(cuda().graph_begin(queue)));
  ASSERT_TRUE(ok(add(x, y)));
  ASSERT_TRUE(ok(add(x, x)));
  halfstep_graph* const graph = ended();
  ASSERT_NE(graph, nullptr);
  EXPECT_EQ(get<float>(x, 3), (std::vector<float>{1, 2, 3}));
  const uint64_t before = launches();
  ASSERT_TRUE(ok(cuda().graph_launch(graph, queue)));
  // It reads what is there by then.
  const std::vector<float> other = {1, 1, 1};
  ASSERT_TRUE(ok(cuda().copy(queue, y, other.data(), 12, HALFSTEP_COPY_TO_DEVICE)));
  ASSERT_TRUE(ok(cuda().graph_launch(graph, queue)));
  EXPECT_EQ(get<float>(x, 3), (std::vector<float>{46, 90, 134}));  // 2 (2 (1 + 10) + 1), ...
  EXPECT_EQ(launches() - before, 2U);

  halfstep_queue* second = nullptr;
  ASSERT_TRUE(ok(cuda().queue_create(0, 0, &second)));
  EXPECT_EQ(cuda().graph_launch(graph, second), HALFSTEP_FAILED);
  EXPECT_TRUE(says("a graph of another queue"));
  EXPECT_TRUE(ok(cuda().queue_destroy(second)));
  EXPECT_TRUE(ok(cuda().graph_destroy(graph)));
}

// Attributes lie on the stack of whoever calls, sizes too.
TEST_F(CudaGraphs, KeepCopiesOfWhatTheHostGaveTheirKernels) {
  void* x = put<float>({1, 2, 3});
  auto size = std::make_unique<int64_t>(3);
  auto seven = std::make_unique<halfstep_fill_attributes>(halfstep_fill_attributes{{7, 7, 2}});
  ASSERT_TRUE(ok(cuda().graph_begin(queue)));
  ASSERT_TRUE(ok(run("fill", HALFSTEP_F32, {}, {vector(x, *size, HALFSTEP_F32)}, seven.get())));
  halfstep_graph* const graph = ended();
  *size = 1;
  *seven = {{8, 8, 2}};
  size.reset();
  seven.reset();
  ASSERT_TRUE(ok(cuda().graph_launch(graph, queue)));
  EXPECT_EQ(get<float>(x, 3), (std::vector<float>{7, 7, 7}));
  EXPECT_TRUE(ok(cuda().graph_destroy(graph)));
}

TEST_F(CudaGraphs, HoldNothingButKernels) {
  void *x = put<float>({1, 2, 3}), *y = put<float>({1, 1, 1});
  ASSERT_TRUE(ok(cuda().graph_begin(queue)));
  ASSERT_TRUE(ok(add(x, y)));
  halfstep_graph* const graph = ended();
  halfstep_event* event = nullptr;
  ASSERT_TRUE(ok(cuda().event_create(0, 0, &event)));
  char id[128];
  uint64_t bytes = 0;
  ASSERT_TRUE(ok(cuda().group_id(id, sizeof id, &bytes)));
  halfstep_group* group = nullptr;
  ASSERT_TRUE(ok(cuda().group_create(0, 1, 0, id, bytes, &group)));
  void* const there = allocate(12, 1);

  ASSERT_TRUE(ok(cuda().graph_begin(queue)));
  ASSERT_TRUE(ok(add(x, y)));
  float host[3] = {};
  const auto refused = [](halfstep_status status, const char* what) {
    EXPECT_EQ(status, HALFSTEP_FAILED) << what;
    says(std::string(what) + ": the queue's work is being recorded into a graph, which can't hold this");
  };
  refused(cuda().copy(queue, host, x, 12, HALFSTEP_COPY_TO_HOST), "copy");
  refused(cuda().copy(queue, y, x, 12, HALFSTEP_COPY_ON_DEVICE), "copy");
  refused(cuda().copy_peer(queue, 1, there, x, 12), "copy_peer");
  refused(cuda().queue_synchronize(queue), "queue_synchronize");
  refused(cuda().queue_query(queue), "queue_query");
  refused(cuda().queue_wait(queue, event), "queue_wait");
  refused(cuda().event_record(event, queue), "event_record");
  refused(cuda().graph_begin(queue), "graph_begin");
  refused(cuda().graph_launch(graph, queue), "graph_launch");
  EXPECT_EQ(cuda().all_reduce(group, queue, x, x, 3, HALFSTEP_F32, HALFSTEP_REDUCE_SUM), HALFSTEP_UNSUPPORTED);
  EXPECT_TRUE(says("graphs hold no collectives"));
  // What was refused has broken nothing.
  ASSERT_TRUE(ok(add(x, y)));
  halfstep_graph* const twice = ended();
  ASSERT_NE(twice, nullptr);
  EXPECT_TRUE(ok(cuda().graph_launch(twice, queue)));
  EXPECT_EQ(get<float>(x, 3), (std::vector<float>{3, 4, 5}));
  for (halfstep_graph* g : {graph, twice}) EXPECT_TRUE(ok(cuda().graph_destroy(g)));
  EXPECT_TRUE(ok(cuda().group_destroy(group)));
  EXPECT_TRUE(ok(cuda().event_destroy(event)));
}

// The allocator may take memory and ask for events at any time, the loader works on in its thread, and whoever runs
// out of memory waits for the whole device: CUDA would break off what is recorded there, and refuse the wait.
TEST_F(CudaGraphs, AreNotBrokenOffByWhatGoesOnBeside) {
  void *x = put<float>({1, 2, 3}), *y = put<float>({1, 1, 1});
  halfstep_event* event = nullptr;
  ASSERT_TRUE(ok(cuda().event_create(0, 0, &event)));
  ASSERT_TRUE(ok(cuda().event_record(event, queue)));
  ASSERT_TRUE(ok(add(x, y)));
  ASSERT_TRUE(ok(cuda().graph_begin(queue)));
  ASSERT_TRUE(ok(add(x, y)));
  std::vector<halfstep_queue*> queues;
  const auto beside = [&] {
    halfstep_queue* own = nullptr;
    void *data = nullptr, *pinned = nullptr;
    uint64_t free_bytes = 0, total = 0;
    halfstep_event* passed = nullptr;
    EXPECT_TRUE(ok(cuda().queue_create(0, 0, &own)));
    EXPECT_TRUE(ok(cuda().allocate(0, 12, &data)));
    EXPECT_TRUE(ok(cuda().host_allocate(12, &pinned)));
    EXPECT_TRUE(ok(cuda().memory_info(0, &free_bytes, &total)));
    EXPECT_TRUE(ok(cuda().event_create(0, 0, &passed)));
    EXPECT_TRUE(ok(cuda().event_record(passed, own)));
    EXPECT_TRUE(ok(cuda().event_query(passed)));
    EXPECT_TRUE(ok(cuda().event_synchronize(passed)));
    EXPECT_TRUE(ok(cuda().synchronize(0)));
    EXPECT_TRUE(ok(cuda().event_query(event))) << "it was recorded before, and the device has been waited for";
    EXPECT_TRUE(ok(cuda().event_destroy(passed)));
    EXPECT_TRUE(ok(cuda().host_deallocate(pinned, 12)));
    EXPECT_TRUE(ok(cuda().deallocate(0, data, 12)));
    queues.push_back(own);
  };
  beside();
  std::thread([&] {
    beside();
    halfstep_queue* own = nullptr;
    EXPECT_TRUE(ok(cuda().queue_create(0, 0, &own)));
    // The work from before has been waited for, what is recorded hasn't run.
    EXPECT_EQ(get<float>(x, 3, own), (std::vector<float>{2, 3, 4}));
    EXPECT_TRUE(ok(cuda().queue_synchronize(own)));
    EXPECT_TRUE(ok(cuda().queue_destroy(own)));
  }).join();
  ASSERT_TRUE(ok(add(x, y)));
  halfstep_graph* const graph = ended();
  ASSERT_NE(graph, nullptr);
  EXPECT_TRUE(ok(cuda().graph_launch(graph, queue)));
  EXPECT_EQ(get<float>(x, 3), (std::vector<float>{4, 5, 6}));
  EXPECT_TRUE(ok(cuda().graph_destroy(graph)));
  EXPECT_TRUE(ok(cuda().event_destroy(event)));
  for (halfstep_queue* q : queues) EXPECT_TRUE(ok(cuda().queue_destroy(q)));
}

// What Halfstep does then: it ends the graph and calls the kernels one by one.
TEST_F(CudaGraphs, OfWhichAKernelRefusedAreEnded) {
  constexpr int64_t kMany = 100000;
  void* x = put<float>(std::vector<float>(kMany, 2));
  const halfstep_tensor in = vector(x, kMany, HALFSTEP_F32);
  const halfstep_tensor one = {put<float>({-1}), nullptr, nullptr, 1, 0, HALFSTEP_F32, 1, 1, 0};
  const halfstep_reduce_attributes sum = {};
  ASSERT_TRUE(ok(cuda().graph_begin(queue)));
  workspaces = 0;
  EXPECT_EQ(run("logsumexp", HALFSTEP_F32, {in}, {one}, &sum), HALFSTEP_OUT_OF_MEMORY);
  halfstep_graph* const graph = ended();
  ASSERT_NE(graph, nullptr);
  EXPECT_TRUE(ok(cuda().graph_destroy(graph)));
  workspaces = -1;
  EXPECT_TRUE(ok(run("logsumexp", HALFSTEP_F32, {in}, {one}, &sum)));
  EXPECT_NEAR(get<float>(one.data, 1)[0], 13.512925F, 1e-5);  // 2 + log(100000)
}

TEST_F(CudaGraphs, EndWhereTheyWereBegun) {
  halfstep_graph* graph = nullptr;
  EXPECT_EQ(cuda().graph_end(queue, &graph), HALFSTEP_FAILED);
  EXPECT_TRUE(says("no graph was begun on the queue"));
  void *x = put<float>({1, 2, 3}), *y = put<float>({1, 1, 1});
  ASSERT_TRUE(ok(cuda().graph_begin(queue)));
  std::thread([&] {
    EXPECT_EQ(cuda().graph_end(queue, &graph), HALFSTEP_FAILED);
    EXPECT_TRUE(says("from another thread"));
    EXPECT_EQ(graph, nullptr);
  }).join();
  ASSERT_TRUE(ok(add(x, y)));
  graph = ended();
  ASSERT_NE(graph, nullptr);
  EXPECT_TRUE(ok(cuda().graph_launch(graph, queue)));
  EXPECT_EQ(get<float>(x, 3), (std::vector<float>{2, 3, 4}));
  EXPECT_TRUE(ok(cuda().graph_destroy(graph)));
  // A queue may go while it records.
  halfstep_queue* const first = queue;
  ASSERT_TRUE(ok(cuda().queue_create(0, 0, &queue)));
  ASSERT_TRUE(ok(cuda().graph_begin(queue)));
  ASSERT_TRUE(ok(add(x, y)));
  EXPECT_TRUE(ok(cuda().queue_destroy(queue)));
  queue = first;
  EXPECT_EQ(get<float>(x, 3), (std::vector<float>{2, 3, 4}));
}

TEST_F(CudaGraphs, TellWhatTheirKernelsFind) {
  const int64_t three = 3, two = 2;
  void* x = put<float>({1, 2, 3});
  void* index = put<int64_t>({1, 2});
  void* y = put<float>({-1, -1});
  const halfstep_along_attributes along = {0};
  ASSERT_TRUE(ok(cuda().graph_begin(queue)));
  ASSERT_TRUE(ok(run("index_select", HALFSTEP_F32, {vector(x, three, HALFSTEP_F32), vector(index, two, HALFSTEP_I64)},
                     {vector(y, two, HALFSTEP_F32)}, &along, 4711)));
  halfstep_graph* const graph = ended();
  ASSERT_TRUE(ok(cuda().graph_launch(graph, queue)));
  EXPECT_TRUE(ok(cuda().queue_synchronize(queue)));
  const std::vector<int64_t> wrong = {3, 0};
  ASSERT_TRUE(ok(cuda().copy(queue, index, wrong.data(), 16, HALFSTEP_COPY_TO_DEVICE)));
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(ok(cuda().graph_launch(graph, queue)));
    EXPECT_EQ(cuda().queue_synchronize(queue), HALFSTEP_FAILED);
    const halfstep_error error = last_error();
    EXPECT_EQ(error.call, 4711u);
    EXPECT_STREQ(error.text, "index 3 lies outside of its dimension (0 to 2)");
  }
  EXPECT_TRUE(ok(cuda().queue_synchronize(queue)));
  EXPECT_TRUE(ok(cuda().graph_destroy(graph)));
}

// Products in it were chosen by the setting of its time.
TEST_F(CudaGraphs, AreNotLaunchedUnderAnotherPrecision) {
  const auto set = reinterpret_cast<void (*)(int32_t)>(cuda().extension("set_float32_precision"));
  void *x = put<float>({1, 2, 3}), *y = put<float>({1, 1, 1});
  ASSERT_TRUE(ok(cuda().graph_begin(queue)));
  ASSERT_TRUE(ok(add(x, y)));
  halfstep_graph* const graph = ended();
  set(1);
  EXPECT_EQ(cuda().graph_launch(graph, queue), HALFSTEP_UNSUPPORTED);
  EXPECT_TRUE(says("precision of float32 products"));
  EXPECT_EQ(get<float>(x, 3), (std::vector<float>{1, 2, 3}));
  set(0);
  EXPECT_TRUE(ok(cuda().graph_launch(graph, queue)));
  EXPECT_EQ(get<float>(x, 3), (std::vector<float>{2, 3, 4}));
  EXPECT_TRUE(ok(cuda().graph_destroy(graph)));
}

TEST_F(CudaGraphs, OfSeveralThreadsAreRecordedSideBySide) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([] {
      halfstep_queue* own = nullptr;
      void* data = nullptr;
      ASSERT_TRUE(ok(cuda().queue_create(0, 0, &own)));
      ASSERT_TRUE(ok(cuda().allocate(0, 12, &data)));
      for (int i = 0; i < 30; ++i) {
        ASSERT_TRUE(ok(cuda().graph_begin(own)));
        std::this_thread::yield();
        halfstep_graph* graph = nullptr;
        ASSERT_TRUE(ok(cuda().graph_end(own, &graph)));
        ASSERT_TRUE(ok(cuda().graph_launch(graph, own)));
        ASSERT_TRUE(ok(cuda().synchronize(0)));
        ASSERT_TRUE(ok(cuda().graph_destroy(graph)));
      }
      EXPECT_TRUE(ok(cuda().queue_destroy(own)));
      EXPECT_TRUE(ok(cuda().deallocate(0, data, 12)));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace halfstep::test::emulated_cuda

#endif
