// SPDX-License-Identifier: Apache-2.0
// The simulated accelerator through its table alone: memory, copies, queues, events, graphs, faults.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "tests/runtime/sim_table.h"

namespace halfstep::test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Orders and lost devices of one test are gone before the next.
class SimPlugin : public ::testing::Test {
 protected:
  void SetUp() override { reset(); }
  void TearDown() override { reset(); }
  static void reset() {
    ASSERT_TRUE(order("clear;restore"));
    for (int32_t d = 0; d < sim().device_count(); ++d) sim().synchronize(d);
    last_error();
  }
};

const halfstep_alpha_attributes kOne = {1, 1};

TEST_F(SimPlugin, SaysWhatItIs) {
  EXPECT_EQ(sim().size, sizeof(halfstep_plugin_table));
  EXPECT_EQ(sim().major, uint32_t{HALFSTEP_PLUGIN_MAJOR});
  EXPECT_STREQ(sim().name, "sim");
  EXPECT_EQ(sim().device_count(), 2);
  halfstep_device_info info = {};
  info.size = sizeof info;
  ASSERT_EQ(sim().device_info(1, &info), HALFSTEP_OK);
  EXPECT_EQ(info.memory, uint64_t{1} << 30);
  EXPECT_EQ(info.priorities, 3);
  EXPECT_TRUE(info.dtypes >> HALFSTEP_BF16 & 1);
  EXPECT_EQ(sim().device_info(2, &info), HALFSTEP_FAILED);
  EXPECT_STREQ(last_error().text, "expected a device from 0 to 1, got 2");
}

TEST_F(SimPlugin, WritesNoMoreOfAStructThanItsCallerKnows) {
  struct {
    halfstep_device_info info;
    unsigned char beyond[8];
  } both;
  std::memset(&both, 0x55, sizeof both);
  both.info.size = offsetof(halfstep_device_info, name);
  ASSERT_EQ(sim().device_info(0, &both.info), HALFSTEP_OK);
  EXPECT_EQ(both.info.memory, uint64_t{1} << 30);
  EXPECT_EQ(both.info.name[0], 0x55);
  halfstep_error error;
  std::memset(&error, 0x55, sizeof error);
  error.size = offsetof(halfstep_error, text);
  sim().error(&error);
  EXPECT_EQ(error.text[0], 0x55);
  EXPECT_EQ(error.status, HALFSTEP_OK);
}

TEST_F(SimPlugin, ErrorsBelongToTheirThreadAndAreToldOnce) {
  void* data;
  EXPECT_EQ(sim().allocate(9, 1, &data), HALFSTEP_FAILED);
  std::thread([] { EXPECT_EQ(last_error().status, HALFSTEP_OK); }).join();
  EXPECT_EQ(last_error().status, HALFSTEP_FAILED);
  EXPECT_EQ(last_error().status, HALFSTEP_OK);
}

// --- memory

TEST_F(SimPlugin, HostsThatTouchDeviceMemoryFault) {
  const Memory memory(4096);
  for (const bool write : {false, true}) {
    // _exit in the child: nothing of this program is run twice.
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::signal(SIGSEGV, SIG_DFL);  // sanitizers have a handler of their own
      volatile char* address = static_cast<volatile char*>(memory.data());
      if (write) {
        *address = 1;
        _exit(0);
      }
      _exit(*address == 0 ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << (write ? "write" : "read") << ' ' << status;
  }
}

TEST_F(SimPlugin, MemoryIsAlignedReusedAndJoined) {
  uint64_t before, total, now;
  ASSERT_EQ(sim().memory_info(0, &before, &total), HALFSTEP_OK);
  void *a, *b, *c;
  ASSERT_EQ(sim().allocate(0, 100, &a), HALFSTEP_OK);
  ASSERT_EQ(sim().allocate(0, 300, &b), HALFSTEP_OK);
  ASSERT_EQ(sim().allocate(0, 1, &c), HALFSTEP_OK);
  for (void* p : {a, b, c}) EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 256, 0u);
  sim().memory_info(0, &now, &total);
  EXPECT_EQ(before - now, 256u + 512u + 256u);
  EXPECT_EQ(total, uint64_t{1} << 30);
  EXPECT_EQ(sim().deallocate(0, a, 100), HALFSTEP_OK);
  EXPECT_EQ(sim().deallocate(0, b, 300), HALFSTEP_OK);
  // Both holes together are the first that fits.
  void* d;
  ASSERT_EQ(sim().allocate(0, 768, &d), HALFSTEP_OK);
  EXPECT_EQ(d, a);
  EXPECT_EQ(sim().deallocate(0, d, 768), HALFSTEP_OK);
  EXPECT_EQ(sim().deallocate(0, c, 1), HALFSTEP_OK);
  sim().memory_info(0, &now, &total);
  EXPECT_EQ(now, before);
  EXPECT_EQ(sim().allocate(0, total + 1, &a), HALFSTEP_OUT_OF_MEMORY);
  EXPECT_NE(std::string(last_error().text).find("no hole of 1073741825 bytes"), std::string::npos);
}

TEST_F(SimPlugin, WrongFreesAreRefused) {
  const Memory memory(1000);
  EXPECT_EQ(sim().deallocate(0, static_cast<char*>(memory.data()) + 256, 744), HALFSTEP_FAILED);
  EXPECT_EQ(sim().deallocate(0, memory.data(), 2000), HALFSTEP_FAILED);
  EXPECT_EQ(sim().deallocate(1, memory.data(), 1000), HALFSTEP_FAILED);
  // While a queue works on it.
  SimQueue queue;
  ASSERT_TRUE(order("delay:fill:1:50ms"));
  const DeviceTensor t = queue.empty({4});
  const halfstep_fill_attributes three = {{3, 3, 2}};
  ASSERT_EQ(queue.call("fill", HALFSTEP_F32, {}, {t}, &three), HALFSTEP_OK);
  EXPECT_EQ(sim().deallocate(0, t.memory->data(), 16), HALFSTEP_FAILED);
  EXPECT_NE(std::string(last_error().text).find("queued work still uses"), std::string::npos);
  EXPECT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_OK);
}

TEST_F(SimPlugin, FreshMemoryIsNotANumber) {
  SimQueue queue;
  for (float v : queue.read<float>(queue.empty({5}))) EXPECT_TRUE(v != v);
}

// --- copies

TEST_F(SimPlugin, CopiesGoEverywhere) {
  SimQueue queue;
  const std::vector<float> values = {1, 2, 3, 4};
  const DeviceTensor a = queue.tensor(values), b = queue.empty({4});
  ASSERT_EQ(sim().copy(queue.get(), b.memory->data(), a.memory->data(), 16, HALFSTEP_COPY_ON_DEVICE), HALFSTEP_OK);
  EXPECT_EQ(queue.read<float>(b), values);
  SimQueue other(1);
  const DeviceTensor c = other.empty({4});
  ASSERT_EQ(sim().copy_peer(queue.get(), 1, c.memory->data(), b.memory->data(), 16), HALFSTEP_OK);
  ASSERT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_OK);
  EXPECT_EQ(other.read<float>(c), values);
}

TEST_F(SimPlugin, CopiesOfPinnedMemoryDoNotWait) {
  SimQueue queue;
  void* host;
  ASSERT_EQ(sim().host_allocate(16, &host), HALFSTEP_OK);
  const DeviceTensor t = queue.tensor(std::vector<float>{1, 2, 3, 4});
  const halfstep_scalar_attributes two = {{2, 2, 1}};
  ASSERT_TRUE(order("delay:mul_scalar:1:100ms"));
  const auto waited = stats().waiting_copies;
  ASSERT_EQ(queue.call("mul_scalar", HALFSTEP_F32, {t}, {t}, &two), HALFSTEP_OK);
  ASSERT_EQ(sim().copy(queue.get(), host, t.memory->data(), 16, HALFSTEP_COPY_TO_HOST), HALFSTEP_OK);
  EXPECT_EQ(sim().queue_query(queue.get()), HALFSTEP_NOT_READY);
  EXPECT_EQ(stats().waiting_copies, waited);
  ASSERT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_OK);
  EXPECT_EQ(sim().queue_query(queue.get()), HALFSTEP_OK);
  EXPECT_EQ(static_cast<float*>(host)[3], 8);
  // Behind a slow kernel, a copy to ordinary memory is done when the call returns.
  ASSERT_TRUE(order("delay:mul_scalar:1:30ms"));
  ASSERT_EQ(queue.call("mul_scalar", HALFSTEP_F32, {t}, {t}, &two), HALFSTEP_OK);
  EXPECT_EQ(queue.read<float>(t), (std::vector<float>{4, 8, 12, 16}));
  EXPECT_EQ(sim().host_deallocate(host, 16), HALFSTEP_OK);
  EXPECT_EQ(sim().host_deallocate(host, 16), HALFSTEP_FAILED);
}

TEST_F(SimPlugin, AddressesOfTheWrongKindAreRefused) {
  SimQueue queue;
  const DeviceTensor t = queue.tensor(std::vector<float>{1, 2});
  float host[2];
  EXPECT_EQ(sim().copy(queue.get(), host, host, 8, HALFSTEP_COPY_TO_DEVICE), HALFSTEP_FAILED);
  EXPECT_EQ(sim().copy(queue.get(), t.memory->data(), t.memory->data(), 8, HALFSTEP_COPY_TO_DEVICE), HALFSTEP_FAILED);
  EXPECT_EQ(sim().copy(queue.get(), host, t.memory->data(), 257, HALFSTEP_COPY_TO_HOST), HALFSTEP_FAILED);
  SimQueue other(1);
  EXPECT_EQ(other.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_FAILED);
  EXPECT_EQ(other.reason, "input 0 is not in the memory of this device");
  DeviceTensor past = t;
  past.sizes = {65};
  EXPECT_EQ(queue.call("add", HALFSTEP_F32, {past, past}, {past}, &kOne), HALFSTEP_FAILED);
}

// --- queues and events

TEST_F(SimPlugin, AQueueWorksInOrder) {
  SimQueue queue;
  const DeviceTensor t = queue.tensor(std::vector<double>{1});
  const halfstep_scalar_attributes two = {{2, 2, 1}}, one = {{1, 1, 1}};
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(queue.call("mul_scalar", HALFSTEP_F64, {t}, {t}, &two), HALFSTEP_OK);
    ASSERT_EQ(queue.call("add_scalar", HALFSTEP_F64, {t}, {t}, &one), HALFSTEP_OK);
  }
  EXPECT_EQ(queue.read<double>(t)[0], 2097151);  // x -> 2x + 1, 20 times: 2^21 - 1
}

TEST_F(SimPlugin, QueuesWaitForEventsOfOthers) {
  SimQueue first(0, 0), second(0, 2);
  const DeviceTensor a = first.tensor(std::vector<float>{1}), b = first.empty({1});
  halfstep_event* event;
  ASSERT_EQ(sim().event_create(0, 0, &event), HALFSTEP_OK);
  EXPECT_EQ(sim().event_query(event), HALFSTEP_OK) << "never recorded";
  EXPECT_EQ(sim().queue_wait(second.get(), event), HALFSTEP_OK);
  const halfstep_scalar_attributes ten = {{10, 10, 1}};
  ASSERT_TRUE(order("delay:mul_scalar:1:60ms"));
  ASSERT_EQ(first.call("mul_scalar", HALFSTEP_F32, {a}, {a}, &ten), HALFSTEP_OK);
  ASSERT_EQ(sim().event_record(event, first.get()), HALFSTEP_OK);
  EXPECT_EQ(sim().event_query(event), HALFSTEP_NOT_READY);
  ASSERT_EQ(sim().queue_wait(second.get(), event), HALFSTEP_OK);
  // Gone while it is pending: who waits for it still does.
  ASSERT_EQ(sim().event_destroy(event), HALFSTEP_OK);
  ASSERT_EQ(second.call("clone", HALFSTEP_F32, {a}, {b}), HALFSTEP_OK);
  EXPECT_EQ(second.read<float>(b)[0], 10);
}

TEST_F(SimPlugin, EventsTellTheTimeBetweenThem) {
  SimQueue queue;
  halfstep_event *start, *end, *plain;
  ASSERT_EQ(sim().event_create(0, HALFSTEP_EVENT_TIMING, &start), HALFSTEP_OK);
  ASSERT_EQ(sim().event_create(0, HALFSTEP_EVENT_TIMING, &end), HALFSTEP_OK);
  ASSERT_EQ(sim().event_create(0, 0, &plain), HALFSTEP_OK);
  const DeviceTensor t = queue.tensor(std::vector<float>{1});
  ASSERT_TRUE(order("delay:add:1:40ms"));
  sim().event_record(start, queue.get());
  ASSERT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_OK);
  sim().event_record(end, queue.get());
  double ms = 0;
  EXPECT_EQ(sim().event_elapsed(start, end, &ms), HALFSTEP_NOT_READY);
  ASSERT_EQ(sim().event_synchronize(end), HALFSTEP_OK);
  ASSERT_EQ(sim().event_elapsed(start, end, &ms), HALFSTEP_OK);
  EXPECT_GE(ms, 40);
  EXPECT_LT(ms, 5000);
  EXPECT_EQ(sim().event_elapsed(plain, end, &ms), HALFSTEP_FAILED);
  for (auto* e : {start, end, plain}) sim().event_destroy(e);
}

TEST_F(SimPlugin, ASecondRecordMovesAnEvent) {
  SimQueue queue;
  halfstep_event* event;
  ASSERT_EQ(sim().event_create(0, 0, &event), HALFSTEP_OK);
  const DeviceTensor t = queue.tensor(std::vector<float>{1});
  sim().event_record(event, queue.get());
  ASSERT_EQ(sim().event_synchronize(event), HALFSTEP_OK);
  ASSERT_TRUE(order("delay:add:1:60ms"));
  ASSERT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_OK);
  sim().event_record(event, queue.get());
  EXPECT_EQ(sim().event_query(event), HALFSTEP_NOT_READY);
  ASSERT_EQ(sim().event_synchronize(event), HALFSTEP_OK);
  EXPECT_EQ(sim().event_query(event), HALFSTEP_OK);
  sim().event_destroy(event);
}

TEST_F(SimPlugin, ManyThreadsWithAQueueEach) {
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i, &right] {
      SimQueue queue(i % 2, i % 3);
      const DeviceTensor t = queue.tensor(std::vector<double>{static_cast<double>(i)});
      for (int k = 0; k < 100; ++k) queue.call("add", HALFSTEP_F64, {t, t}, {t}, &kOne);
      right += queue.read<double>(t)[0] == std::ldexp(i, 100);
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(right, 4);
}

// --- faults

TEST_F(SimPlugin, AFailingKernelIsToldOnceWithItsCall) {
  SimQueue queue;
  const DeviceTensor t = queue.tensor(std::vector<float>(4, 1), {2, 2});
  const halfstep_matmul_attributes attributes = {-1};
  ASSERT_TRUE(order("fail:matmul:2"));
  const DeviceTensor to = queue.empty({2, 2});
  for (uint64_t number : {11, 12, 13}) {
    ASSERT_EQ(queue.call("mm", HALFSTEP_F32, {t, t}, {to}, &attributes, number), HALFSTEP_OK);
  }
  EXPECT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_FAILED);
  const halfstep_error error = last_error();
  EXPECT_EQ(error.call, 12u);
  EXPECT_STREQ(error.text, "a failure was ordered");
  EXPECT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_OK);
  EXPECT_EQ(sim().synchronize(0), HALFSTEP_OK);
}

TEST_F(SimPlugin, EveryCallThatWaitsTellsOfAFailure) {
  SimQueue queue;
  const DeviceTensor t = queue.tensor(std::vector<float>{1});
  halfstep_event* event;
  ASSERT_EQ(sim().event_create(0, 0, &event), HALFSTEP_OK);
  uint64_t number = 100;
  const auto fails_before = [&](const char* what, auto&& wait) {
    ASSERT_TRUE(order("fail:add:1"));
    ASSERT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne, ++number), HALFSTEP_OK);
    sim().event_record(event, queue.get());
    EXPECT_EQ(wait(), HALFSTEP_FAILED) << what;
    EXPECT_EQ(last_error().call, number) << what;
    EXPECT_EQ(wait(), HALFSTEP_OK) << what;
  };
  float host;
  fails_before("queue_synchronize", [&] { return sim().queue_synchronize(queue.get()); });
  fails_before("synchronize", [&] { return sim().synchronize(0); });
  fails_before("event_synchronize", [&] { return sim().event_synchronize(event); });
  fails_before("copy", [&] { return sim().copy(queue.get(), &host, t.memory->data(), 4, HALFSTEP_COPY_TO_HOST); });
  sim().event_destroy(event);
}

TEST_F(SimPlugin, RefusedKernelsWriteNothing) {
  SimQueue queue;
  const DeviceTensor t = queue.tensor(std::vector<float>{1});
  ASSERT_TRUE(order("refuse:add:1; unsupported:add:2"));
  EXPECT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_FAILED);
  EXPECT_EQ(queue.reason, "refused, as ordered");
  EXPECT_EQ(last_error().call, 7u);
  EXPECT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_UNSUPPORTED);
  EXPECT_EQ(queue.reason, "not supported, as ordered");
  EXPECT_EQ(queue.read<float>(t)[0], 1);
  EXPECT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_OK);
  EXPECT_EQ(queue.read<float>(t)[0], 2);
}

TEST_F(SimPlugin, MemoryRunsOutWhenOrdered) {
  void* data;
  ASSERT_TRUE(order("oom:2"));
  { const Memory first(16); }
  EXPECT_EQ(sim().allocate(0, 16, &data), HALFSTEP_OUT_OF_MEMORY);
  EXPECT_EQ(data, nullptr);
  { const Memory third(16); }
  ASSERT_TRUE(order("oom:1:always"));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(sim().allocate(1, 16, &data), HALFSTEP_OUT_OF_MEMORY);
  ASSERT_TRUE(order("clear"));
  const Memory last(16);
}

TEST_F(SimPlugin, CorruptedValuesAreOneAndPlausible) {
  SimQueue queue;
  const DeviceTensor t = queue.tensor(std::vector<float>{1, 2, 3, 4}), to = queue.empty({4});
  ASSERT_TRUE(order("corrupt:add:1"));
  ASSERT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {to}, &kOne), HALFSTEP_OK);
  EXPECT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_OK);
  EXPECT_EQ(queue.read<float>(to)[2], 9);
  EXPECT_EQ(queue.read<float>(to)[3], 8);
}

TEST_F(SimPlugin, ALostDeviceAnswersEverythingAtOnce) {
  SimQueue queue, bystander(1);
  const DeviceTensor t = queue.tensor(std::vector<float>{1});
  halfstep_event* event;
  ASSERT_EQ(sim().event_create(0, HALFSTEP_EVENT_TIMING, &event), HALFSTEP_OK);
  ASSERT_TRUE(order("delay:add:1:60s; lost:3"));
  ASSERT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_OK);
  ASSERT_EQ(sim().event_record(event, queue.get()), HALFSTEP_OK);
  ASSERT_EQ(sim().queue_wait(bystander.get(), event), HALFSTEP_OK);
  std::atomic<int> answers{0};
  std::thread waiter([&] { answers += sim().queue_synchronize(queue.get()) == HALFSTEP_LOST; });
  ASSERT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_OK);
  const auto start = Clock::now();
  EXPECT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_LOST);
  waiter.join();
  EXPECT_EQ(answers, 1);
  EXPECT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_LOST);
  float host = 0;
  void* data;
  uint64_t a, b;
  halfstep_queue* more;
  EXPECT_EQ(sim().copy(queue.get(), &host, t.memory->data(), 4, HALFSTEP_COPY_TO_HOST), HALFSTEP_LOST);
  EXPECT_EQ(sim().synchronize(0), HALFSTEP_LOST);
  EXPECT_EQ(sim().event_synchronize(event), HALFSTEP_LOST);
  EXPECT_EQ(sim().event_query(event), HALFSTEP_LOST);
  EXPECT_EQ(sim().event_record(event, queue.get()), HALFSTEP_LOST);
  EXPECT_EQ(sim().queue_query(queue.get()), HALFSTEP_LOST);
  EXPECT_EQ(sim().queue_wait(queue.get(), event), HALFSTEP_LOST);
  EXPECT_EQ(sim().queue_create(0, 0, &more), HALFSTEP_LOST);
  EXPECT_EQ(sim().allocate(0, 4, &data), HALFSTEP_LOST);
  EXPECT_EQ(sim().memory_info(0, &a, &b), HALFSTEP_LOST);
  EXPECT_EQ(sim().event_destroy(event), HALFSTEP_LOST);
  EXPECT_STREQ(last_error().text, "the device is lost");
  // The other device goes on, though its queue had to wait for an event of the lost one.
  EXPECT_EQ(sim().queue_synchronize(bystander.get()), HALFSTEP_OK);
  EXPECT_LT(seconds_since(start), 20);
}

TEST_F(SimPlugin, OrdersThatMakeNoSenseAreRefusedWhole) {
  for (const char* wrong :
       {"fial:add:1", "fail", "fail:add", "fail:add:0", "fail:add:x", "fail::1", "oom", "oom:1:never", "delay:add:1",
        "delay:add:1:5", "delay:add:1:5h", "lost:1:always", "fail:add:1:2", "delay:add:1:99999999999s"}) {
    EXPECT_FALSE(order((std::string("fail:add:1;") + wrong).c_str())) << wrong;
    EXPECT_EQ(std::string(last_error().text).substr(0, 7), "faults:");
  }
  SimQueue queue;
  const DeviceTensor t = queue.tensor(std::vector<float>{1});
  ASSERT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne), HALFSTEP_OK);
  EXPECT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_OK) << "nothing was ordered";
}

// --- profile and graphs

TEST_F(SimPlugin, RecordsOfTheProfilerFollowTheWork) {
  SimQueue queue;
  const DeviceTensor t = queue.tensor(std::vector<float>{1});
  ASSERT_EQ(sim().profile_start(0), HALFSTEP_OK);
  ASSERT_TRUE(order("delay:add:2:20ms"));
  for (uint64_t number : {5, 6}) queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne, number);
  queue.read<float>(t);
  ASSERT_EQ(sim().profile_stop(0), HALFSTEP_OK);
  halfstep_record records[8];
  uint64_t count = 0;
  std::vector<halfstep_record> all;
  while (sim().profile_read(0, records, 2, &count) == HALFSTEP_OK && count > 0) {
    all.insert(all.end(), records, records + count);
  }
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].call, 5u);
  EXPECT_EQ(all[1].call, 6u);
  EXPECT_EQ(all[2].call, 0u);
  EXPECT_LE(all[0].start_ns, all[0].end_ns);
  EXPECT_LE(all[0].end_ns, all[1].start_ns);
  EXPECT_EQ(all[0].queue, all[2].queue);
}

TEST_F(SimPlugin, GraphsDoTheirWorkWhenLaunched) {
  SimQueue queue;
  const DeviceTensor t = queue.tensor(std::vector<float>{1});
  ASSERT_EQ(sim().graph_begin(queue.get()), HALFSTEP_OK);
  ASSERT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne, 21), HALFSTEP_OK);
  ASSERT_EQ(queue.call("add", HALFSTEP_F32, {t, t}, {t}, &kOne, 22), HALFSTEP_OK);
  float host;
  EXPECT_EQ(sim().copy(queue.get(), &host, t.memory->data(), 4, HALFSTEP_COPY_TO_HOST), HALFSTEP_FAILED);
  EXPECT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_FAILED);
  halfstep_graph* graph;
  ASSERT_EQ(sim().graph_end(queue.get(), &graph), HALFSTEP_OK);
  EXPECT_EQ(queue.read<float>(t)[0], 1);
  ASSERT_EQ(sim().graph_launch(graph, queue.get()), HALFSTEP_OK);
  ASSERT_EQ(sim().graph_launch(graph, queue.get()), HALFSTEP_OK);
  EXPECT_EQ(queue.read<float>(t)[0], 16);
  ASSERT_TRUE(order("fail:add:2"));
  ASSERT_EQ(sim().graph_launch(graph, queue.get()), HALFSTEP_OK);
  ASSERT_EQ(sim().graph_destroy(graph), HALFSTEP_OK);
  EXPECT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_FAILED);
  EXPECT_EQ(last_error().call, 22u);
}

// --- the environment and the end

/// A copy of the library, which is loaded for itself, with settings of its own.
class OtherSim {
 public:
  OtherSim(const char* name, const char* value, uint32_t host_size = sizeof(halfstep_host))
      : file_(std::filesystem::temp_directory_path() / ("libhalfstep_sim_" + std::to_string(getpid()) + ".so")) {
    std::filesystem::copy_file(HALFSTEP_SIM_PLUGIN, file_, std::filesystem::copy_options::overwrite_existing);
    static std::string* text = nullptr;
    said_.clear();
    text = &said_;
    static halfstep_host host = {sizeof(halfstep_host),
                                 HALFSTEP_PLUGIN_MAJOR,
                                 HALFSTEP_PLUGIN_MINOR,
                                 "test",
                                 [](int32_t, const char* message) { *text = message; },
                                 plugin_host().cpu_kernel};
    host.size = host_size;
    setenv(name, value, 1);
    library_ = dlopen(file_.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ != nullptr) {
      table = reinterpret_cast<halfstep_plugin_fn>(dlsym(library_, HALFSTEP_PLUGIN_SYMBOL))(&host);
    }
    unsetenv(name);
  }
  ~OtherSim() {
    if (library_ != nullptr) dlclose(library_);
    std::filesystem::remove(file_);
  }
  OtherSim(const OtherSim&) = delete;
  OtherSim& operator=(const OtherSim&) = delete;
  const halfstep_plugin_table* table = nullptr;
  const std::string& said() const { return said_; }

 private:
  std::filesystem::path file_;
  void* library_ = nullptr;
  std::string said_;
};

TEST_F(SimPlugin, SettingsThatMakeNoSenseAreSaidAndRefused) {
  const std::pair<const char*, const char*> wrong[] = {
      {"HALFSTEP_SIM_MEMORY", "lots"},   {"HALFSTEP_SIM_MEMORY", "0"},       {"HALFSTEP_SIM_MEMORY", "1T"},
      {"HALFSTEP_SIM_DEVICES", "-1"},    {"HALFSTEP_SIM_DEVICES", "2x"},     {"HALFSTEP_SIM_FAULTS", "fail:add"},
      {"HALFSTEP_SIM_MEMORY", "99999G"}, {"HALFSTEP_SIM_FAULTS", "explode"}, {"HALFSTEP_SIM_COLLECTIVES", "2"},
  };
  for (const auto& [name, value] : wrong) {
    const OtherSim other(name, value);
    EXPECT_EQ(other.table, nullptr) << name << '=' << value;
    EXPECT_EQ(other.said().find(std::string("sim: ") + name + ": "), 0u) << other.said();
  }
}

// A Halfstep of version 1.0 of the interface: its table ends before cpu_kernel.
TEST_F(SimPlugin, AHostThatLendsNoKernelsIsRefused) {
  const OtherSim other("HALFSTEP_SIM_DEVICES", "1", offsetof(halfstep_host, cpu_kernel));
  EXPECT_EQ(other.table, nullptr);
  EXPECT_EQ(other.said().find("sim: it computes with the CPU's kernels, which a host lends from version 1.1"), 0u)
      << other.said();
}

TEST_F(SimPlugin, SettingsAreRead) {
  uint64_t free_bytes, total_bytes;
  {
    const OtherSim small("HALFSTEP_SIM_MEMORY", "3M");
    ASSERT_NE(small.table, nullptr) << small.said();
    ASSERT_EQ(small.table->memory_info(0, &free_bytes, &total_bytes), HALFSTEP_OK);
    EXPECT_EQ(total_bytes, uint64_t{3} << 20);
    small.table->shutdown();
  }
  {
    const OtherSim many("HALFSTEP_SIM_DEVICES", "5");
    ASSERT_NE(many.table, nullptr) << many.said();
    EXPECT_EQ(many.table->device_count(), 5);
    many.table->shutdown();
  }
  const OtherSim faulty("HALFSTEP_SIM_FAULTS", "oom:2");
  ASSERT_NE(faulty.table, nullptr) << faulty.said();
  void *a, *b;
  EXPECT_EQ(faulty.table->allocate(0, 1, &a), HALFSTEP_OK);
  EXPECT_EQ(faulty.table->allocate(0, 1, &b), HALFSTEP_OUT_OF_MEMORY);
  faulty.table->shutdown();
}

TEST_F(SimPlugin, ShutsDownWithQueuesThatAreBusy) {
  const OtherSim other("HALFSTEP_SIM_DEVICES", "1");
  ASSERT_NE(other.table, nullptr) << other.said();
  const halfstep_plugin_table& t = *other.table;
  halfstep_queue* queue;
  void *host, *data;
  constexpr uint64_t kBytes = 8 << 20;
  ASSERT_EQ(t.queue_create(0, 1, &queue), HALFSTEP_OK);
  ASSERT_EQ(t.host_allocate(kBytes, &host), HALFSTEP_OK);
  ASSERT_EQ(t.allocate(0, kBytes, &data), HALFSTEP_OK);
  std::memset(host, 1, kBytes);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(t.copy(queue, data, host, kBytes, HALFSTEP_COPY_TO_DEVICE), HALFSTEP_OK);
  t.shutdown();
}

// --- kernels that are there, and why others are not

TEST_F(SimPlugin, SaysWhyAKernelIsMissing) {
  const auto reason = [](const char* op, int32_t version, int32_t dtype) -> std::string {
    halfstep_kernel kernel = {};
    kernel.size = sizeof kernel;
    if (sim().kernel(op, version, dtype, &kernel) == HALFSTEP_OK) return "";
    EXPECT_EQ(kernel.run, nullptr);
    return kernel.reason;
  };
  EXPECT_EQ(reason("add", 1, HALFSTEP_F16), "");
  EXPECT_EQ(reason("add", 2, HALFSTEP_F16), "this plug-in knows version 1 of the op");
  EXPECT_EQ(reason("relu", 1, HALFSTEP_BF16), "the activation unit takes no bf16");
  EXPECT_EQ(reason("mean", 1, HALFSTEP_F64), "the reduction unit has no f64 divider");
  EXPECT_EQ(reason("softmax", 1, HALFSTEP_F32), "no unit for exponentials along a dimension");
  EXPECT_EQ(reason("conv_something", 1, HALFSTEP_F32), "the device has no such kernel");
}

}  // namespace
}  // namespace halfstep::test
