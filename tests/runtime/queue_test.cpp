// SPDX-License-Identifier: Apache-2.0
// Queues, events, copies and pinned memory, on the simulated accelerator.
#include "halfstep/runtime/queue.h"

#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>

#include "halfstep/core/error.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/transfer.h"
#include "tests/runtime/on_sim.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

namespace halfstep {
namespace {

using Values = std::vector<double>;
using test::error_of;
using Queues = test::OnSim;
using Transfer = test::OnSim;
using Devices = test::OnSim;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST_F(Queues, WorkIsAsynchronousAndInOrder) {
  const Tensor x = ones({4}, {.device = sim});
  synchronize(sim);
  test::order_fault("delay:add:1:200ms");
  const auto start = std::chrono::steady_clock::now();
  const Tensor y = (x + x) * x + x;
  EXPECT_LT(seconds_since(start), 0.15) << "the call must not wait for the kernel";
  EXPECT_FALSE(Queue::current(sim).query());
  EXPECT_EQ(y.to_vector<double>(), (Values{3, 3, 3, 3}));  // waits
  EXPECT_GT(seconds_since(start), 0.19);
  EXPECT_TRUE(Queue::current(sim).query());
}

TEST_F(Queues, SeveralRunSideBySideAndEventsOrderThem) {
  const Tensor x = ones({4}, {.device = sim});
  synchronize(sim);
  const Queue other(sim, {.priority = 2});
  EXPECT_EQ(other.priority(), 2);
  EXPECT_EQ(Queue(sim, {.priority = 99}).priority(), 2);
  EXPECT_FALSE(other == Queue::default_queue(sim));
  test::order_fault("delay:add:1:200ms");
  Tensor slow;
  const Event made(sim);
  EXPECT_TRUE(made.query()) << "never recorded";
  {
    const QueueGuard guard(other);
    EXPECT_TRUE(Queue::current(sim) == other);
    slow = x + x;
    made.record();
  }
  EXPECT_TRUE(Queue::current(sim) == Queue::default_queue(sim));
  // The default queue goes on meanwhile.
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ((x * x).to_vector<double>(), (Values{1, 1, 1, 1}));
  EXPECT_LT(seconds_since(start), 0.15);
  EXPECT_FALSE(made.query());
  Queue::current(sim).wait(made);
  EXPECT_EQ((slow * x).to_vector<double>(), (Values{2, 2, 2, 2}));
  EXPECT_TRUE(made.query());
}

TEST_F(Queues, EventsMeasureTheDevicesTime) {
  const Tensor x = ones({4}, {.device = sim});
  const Event start(sim, {.timing = true}), end(sim, {.timing = true}), silent(sim);
  test::order_fault("delay:add:1:50ms");
  start.record();
  x + x;
  end.record();
  const double ms = start.elapsed_ms(end);
  EXPECT_GE(ms, 49);
  EXPECT_LT(ms, 5000);
  EXPECT_NE(error_of([&] { start.elapsed_ms(silent); }).find("timing"), std::string::npos);
  EXPECT_NE(error_of([&] { silent.record(Queue::default_queue(Device{})); }).find("expected a queue of sim:0"),
            std::string::npos);
  // The CPU's events use the host's clock.
  const Event a(Device{}, {.timing = true}), b(Device{}, {.timing = true});
  a.record();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  b.record();
  EXPECT_GE(a.elapsed_ms(b), 19);
}

TEST_F(Queues, SynchronousModeWaitsForEveryOp) {
  const Tensor x = ones({4}, {.device = sim});
  synchronize(sim);
  set_synchronous(true);
  test::order_fault("delay:add:1:100ms");
  const auto start = std::chrono::steady_clock::now();
  const Tensor y = x + x;
  EXPECT_GT(seconds_since(start), 0.09);
}

TEST_F(Queues, EveryThreadHasItsOwnCurrentQueue) {
  const Queue mine(sim);
  const QueueGuard guard(mine);
  std::thread([&] { EXPECT_FALSE(Queue::current(sim) == mine); }).join();
  EXPECT_TRUE(Queue::current(sim) == mine);
  {
    const Queue inner(sim);
    const QueueGuard again(inner);
    EXPECT_TRUE(Queue::current(sim) == inner);
  }
  EXPECT_TRUE(Queue::current(sim) == mine);
}

// Threads with queues of their own, ops that fall back, pinned copies: each gets its own numbers.
TEST_F(Queues, ThreadsWorkSideBySide) {
  constexpr int kThreads = 4;
  std::vector<double> sums(kThreads);
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        const Queue mine(sim);
        const QueueGuard guard(mine);
        Tensor total = zeros({64}, {.device = sim});
        for (int i = 0; i < 20; ++i) {
          const Tensor x = full({64}, t + 1, {.device = Device{}}).pin_memory().to(sim, {.non_blocking = true});
          total = total + abs(neg(x)) * x;  // abs runs on the CPU
        }
        sums[static_cast<std::size_t>(t)] = sum(total).item<double>();
      });
    }
  }
  for (int t = 0; t < kThreads; ++t) EXPECT_EQ(sums[static_cast<std::size_t>(t)], 20.0 * 64 * (t + 1) * (t + 1));
}

// Memory of a tensor that another queue still reads is not handed out before that queue is done: large blocks, and
// small ones, which have a list of their own.
TEST_F(Queues, MemoryInUseElsewhereIsHeldBack) {
  for (const std::int64_t n : {std::int64_t{1} << 20, std::int64_t{256}}) {
    empty_memory_cache(sim);
    const Queue other(sim);
    Tensor x = full({n}, 3, {.device = sim});
    synchronize(sim);
    test::order_fault("delay:mul:1:150ms");
    Tensor y;
    {
      const QueueGuard guard(other);
      y = x * x;
    }
    const void* was = x.impl()->data();
    x = Tensor();  // freed on the host, still to be read by the other queue
    EXPECT_GE(memory_stats(sim).held_back, static_cast<std::uint64_t>(4 * n));
    const Tensor z = full({n}, 7, {.device = sim});  // the same size: would take the same block
    EXPECT_NE(z.impl()->data(), was);
    {
      const QueueGuard guard(other);
      EXPECT_EQ(sum(y).item<double>(), 9.0 * static_cast<double>(n));
    }
    // Now it is free.
    const Tensor again = full({n}, 1, {.device = sim});
    EXPECT_EQ(memory_stats(sim).held_back, 0u);
    EXPECT_EQ(again.impl()->data(), was);
  }
}

// Its queue is gone, and a new one may have its address: what that one reads is held back all the same.
TEST_F(Queues, ANewQueueAtTheAddressOfOneThatIsGone) {
  for (int attempt = 0; attempt < 50; ++attempt) {
    Tensor y;
    auto queue = std::make_unique<Queue>(sim);
    const void* const address = queue->native();
    {
      const QueueGuard guard(*queue);
      y = full({1 << 20}, 2, {.device = sim});
    }
    queue.reset();
    queue = std::make_unique<Queue>(sim);
    EXPECT_EQ(y.storage()->home_queue(), nullptr) << "the address says nothing";
    if (queue->native() != address) continue;
    synchronize(sim);
    test::order_fault("delay:mul:1:150ms");
    Tensor z;
    {
      const QueueGuard guard(*queue);
      z = y * y;
    }
    y = Tensor();
    const Tensor other = full({1 << 20}, 7, {.device = sim});
    const QueueGuard guard(*queue);
    EXPECT_EQ(sum(z).item<double>(), 4.0 * (1 << 20));
    return;
  }
}

// A failure that only the end of its queue finds out about reaches the next call.
TEST_F(Queues, AQueueThatGoesTellsWhatFailedInIt) {
  const Device second = test::sim_device(1);
  std::thread([&] {
    const Queue mine(second);
    const QueueGuard guard(mine);
    const Tensor x = ones({4}).to(second);
    test::order_fault("fail:add:1");
    x + x;
  }).join();
  EXPECT_NE(error_of([&] { synchronize(second); }).find("add (call"), std::string::npos);
}

TEST_F(Queues, TheHostWaitsForADevicesEvent) {
  const Tensor x = ones({4}, {.device = sim});
  synchronize(sim);
  test::order_fault("delay:add:1:100ms");
  x + x;
  const Event done(sim);
  done.record();
  Queue::default_queue(Device{}).wait(done);
  EXPECT_TRUE(done.query());
}

// In place by way of the CPU: the copy back is work of this queue, and holds the memory back until it is done.
TEST_F(Queues, WhatComesBackFromTheCpuHoldsMemoryBack) {
  Tensor x = zeros({100}, {.device = sim});
  synchronize(sim);
  const std::uint64_t before = memory_stats(sim).held_back;
  const Queue other(sim);
  {
    const QueueGuard guard(other);
    const Tensor* const pointer = &x;
    const Op& exp_op = *find_op("exp");
    run_kernel(*exp_op.table, "exp", sim, f32, {&pointer, 1}, {&pointer, 1});
    x = Tensor();
  }
  EXPECT_GT(memory_stats(sim).held_back, before);
}

TEST_F(Queues, AQueueThatGoesLeavesItsMemoryToOthers) {
  empty_memory_cache(sim);
  const std::uint64_t before = memory_stats(sim).allocated;
  Tensor y;  // outlives its queue
  {
    const Queue short_lived(sim);
    const QueueGuard guard(short_lived);
    y = ones({3 << 18}, {.device = sim}) + 1;
  }
  EXPECT_EQ(sum(y).item<double>(), 2 * (3 << 18));
  y = Tensor();
  EXPECT_EQ(memory_stats(sim).allocated, before);
  const std::uint64_t reserved = memory_stats(sim).reserved;
  // All of the segment of 20 MiB, so what the queue had used is joined with the rest.
  EXPECT_EQ(sum(ones({5 << 20}, {.device = sim})).item<double>(), 5 << 20);
  EXPECT_EQ(memory_stats(sim).reserved, reserved) << "the default queue uses what it left";
}

// What the CPU converts has come before.
TEST_F(Transfer, ConversionsOnTheCpuWaitForWhatTheyConvert) {
  const Tensor x = full({2, 3, 4, 5}, 3, {.dtype = f16, .device = sim});
  synchronize(sim);
  int value = 0;  // another one each time: pinned memory comes back with what was in it
  for (const ToOptions& options : {ToOptions{.non_blocking = true},
                                   ToOptions{.non_blocking = true, .memory_format = MemoryFormat::channels_last}}) {
    for (const DType dtype : {f16, f32}) {
      test::order_fault("delay:add_scalar:1:60ms");
      const Tensor y = (x + ++value).to(Device{}, dtype, options);
      synchronize(sim);
      EXPECT_EQ(y.to_vector<double>(), Values(120, 3.0 + value)) << name(dtype);
    }
  }
}

// Pinned memory outlives the queue that read it.
TEST_F(Transfer, PinnedMemoryOfAQueueThatIsGone) {
  Tensor pinned = ones({10000}).pin_memory();
  Tensor there;
  {
    const Queue short_lived(sim);
    const QueueGuard guard(short_lived);
    there = pinned.to(sim, {.non_blocking = true});
  }
  const auto memory = pinned.impl()->data();
  pinned = Tensor();
  EXPECT_EQ(ones({10000}).pin_memory().impl()->data(), memory) << "nobody uses it any more";
  EXPECT_EQ(sum(there).item<double>(), 10000);
}

void exit_with_everything() {
  static Tensor pinned, there;
  static std::optional<Queue> queue;
  static std::optional<Event> event;
  const Device sim = test::sim_device();
  queue.emplace(sim);
#ifdef __SANITIZE_ADDRESS__
  __lsan_disable();  // what the program still holds when the plug-in is gone is left to the system
#endif
  event.emplace(sim);
  const QueueGuard guard(*queue);
  pinned = ones({1 << 20}).pin_memory();
  there = pinned.to(sim, {.non_blocking = true}) + 1;
  event->record();
  std::exit(0);
}

void lose_a_device_without_a_default_queue() {
  const Device sim = test::sim_device(1);
  try {
    const Queue mine(sim);
    const QueueGuard guard(mine);
    const Tensor x = ones({4}).to(sim);
    test::order_fault("lost:1");
    x + x;
  } catch (const DeviceLostError&) {
    try {
      synchronize(sim);
    } catch (const DeviceLostError&) {
      std::exit(0);
    }
  }
  std::exit(1);
}

// Tensors, queues and events that the program keeps to its end don't touch a plug-in that was shut down.
TEST(AtExit, WhatIsLeftLeavesThePlugInAlone) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exit_with_everything(), ::testing::ExitedWithCode(0), "");
}

TEST(AtExit, ALostDeviceEndsInAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(lose_a_device_without_a_default_queue(), ::testing::ExitedWithCode(0), "");
}

TEST_F(Transfer, ThereAndBackInEveryLayoutAndDtype) {
  const Tensor x = tensor(Values{1, -2.5, 3, 0, 65504, 1e-7}, {2, 3});
  for (const DType d : {f32, f64, f16, bf16, i64, i32, i8, u8, boolean}) {
    const Tensor here = x.to(d);
    for (const Tensor& t :
         {here, here.t(), here.slice(1, 0, 3, 2), here.select(0, 1), here.unsqueeze(0).expand({2, 2, 3})}) {
      const Tensor there = t.to(sim);
      EXPECT_EQ(there.device(), sim);
      EXPECT_EQ(there.dtype(), d);
      EXPECT_EQ(there.to_vector<double>(), t.to_vector<double>()) << name(d);
      EXPECT_EQ(there.to(Device{}).to_vector<double>(), t.to_vector<double>());
    }
    EXPECT_TRUE(here.t().to(sim).strides() == here.t().strides()) << "dense layouts stay";
  }
  EXPECT_EQ(x.to(sim, f16).to(Device{}, f64).to_vector<double>(), x.to(f16).to_vector<double>());
  EXPECT_TRUE(x.to(sim).to(sim).is_same(x.to(sim)) == false);
  const Tensor there = x.to(sim);
  EXPECT_TRUE(there.to(sim).is_same(there));
  EXPECT_EQ(empty({0, 3}).to(sim).sizes(), (Shape{0, 3}));
  EXPECT_EQ(scalar_tensor(5).to(sim).item<double>(), 5);
}

TEST_F(Transfer, BetweenTwoDevices) {
  const Device second = test::sim_device(1);
  const Tensor x = tensor({{1, 2}, {3, 4}}, {.device = sim});
  const Tensor y = (x + x).to(second);
  EXPECT_EQ(y.device(), second);
  EXPECT_EQ((y * y).to_vector<double>(), (Values{4, 16, 36, 64}));
  EXPECT_NE(error_of([&] { x + y; }).find("expected all tensors on one device, got sim:0 and sim:1"),
            std::string::npos);
}

TEST_F(Transfer, IsRecorded) {
  const Tensor x = tensor({1, 2, 3}, {.device = Device{}, .requires_grad = true});
  const Tensor y = sum(x.to(sim) * x.to(sim).to(Device{}).to(sim));
  EXPECT_EQ(y.device(), sim);
  y.backward();
  EXPECT_TRUE(x.grad().device().is_cpu());
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{2, 4, 6}));
}

TEST_F(Transfer, CopyAndNumbersCrossDevices) {
  Tensor there = zeros({2, 3}, {.device = sim});
  there.copy_(tensor({1, 2, 3}, {.device = Device{}}));  // broadcast
  EXPECT_EQ(there.to_vector<double>(), (Values{1, 2, 3, 1, 2, 3}));
  there.select(1, 1).copy_(tensor({7, 8}, {.dtype = f64, .device = Device{}}));  // strided, converted
  EXPECT_EQ(there.to_vector<double>(), (Values{1, 7, 3, 1, 8, 3}));
  Tensor here = zeros({3}, {.device = Device{}});
  here.copy_(there.select(0, 1));
  EXPECT_EQ(here.to_vector<double>(), (Values{1, 8, 3}));
  // 0-d tensors of the CPU join any device, and get their gradient.
  const Tensor two = scalar_tensor(2, {.device = Device{}, .requires_grad = true});
  const Tensor product = sum(there * two);
  EXPECT_EQ(product.device(), sim);
  product.backward();
  EXPECT_EQ(two.grad().item<double>(), 23);
  EXPECT_TRUE(two.grad().device().is_cpu());
  EXPECT_NE(error_of([&] { there + here; }).find("expected all tensors on one device"), std::string::npos);
  // A number of the CPU can't take a device's result in place.
  Tensor number = scalar_tensor(2, {.device = Device{}});
  EXPECT_NE(error_of([&] { number.add_(there.select(0, 0).select(0, 0)); }).find("destination"), std::string::npos);
}

TEST_F(Transfer, PinnedMemoryCopiesWithoutWaiting) {
  const Tensor x = full({1 << 18}, 2, {.device = Device{}});
  EXPECT_FALSE(x.is_pinned());
  const Tensor pinned = x.pin_memory();
  EXPECT_TRUE(pinned.is_pinned());
  EXPECT_TRUE(pinned.slice(0, 5, 9).is_pinned());
  EXPECT_TRUE(pinned.pin_memory().is_same(pinned));
  synchronize(sim);
  const Tensor busy = ones({4}, {.device = sim});
  synchronize(sim);
  test::order_fault("delay:add:1:150ms");
  busy + busy;  // the queue is held up
  const auto start = std::chrono::steady_clock::now();
  const Tensor there = pinned.to(sim, {.non_blocking = true});
  const Tensor back = there.to(Device{}, {.non_blocking = true});
  EXPECT_LT(seconds_since(start), 0.1);
  EXPECT_TRUE(back.is_pinned());
  synchronize(sim);
  EXPECT_EQ(back.to_vector<double>(), x.to_vector<double>());
  // From memory that isn't pinned the call waits.
  test::order_fault("delay:add:1:100ms");
  busy + busy;
  const auto again = std::chrono::steady_clock::now();
  x.to(sim, {.non_blocking = true});
  EXPECT_GT(seconds_since(again), 0.09);
  EXPECT_NE(error_of([&] { there.pin_memory(); }).find("expected a tensor of the CPU"), std::string::npos);
}

TEST_F(Transfer, ABlockingCopyFromPinnedMemoryWaits) {
  const Tensor busy = ones({4}, {.device = sim});
  Tensor pinned = full({1 << 18}, 2, {.device = Device{}}).pin_memory();
  synchronize(sim);
  test::order_fault("delay:add:1:100ms");
  busy + busy;
  const Tensor there = pinned.to(sim);
  pinned.fill_(9);  // the source is the caller's again
  EXPECT_EQ(sum(there).item<double>(), 2.0 * (1 << 18));
}

// A pinned block that a copy on its way reads is not given to somebody else.
TEST_F(Transfer, PinnedMemoryIsKeptUntilTheCopyIsDone) {
  const Tensor busy = ones({4}, {.device = sim});
  synchronize(sim);
  test::order_fault("delay:add:1:150ms");
  busy + busy;
  Tensor there;
  const void* was = nullptr;
  {
    const Tensor pinned = full({1 << 16}, 5, {.device = Device{}}).pin_memory();
    was = pinned.raw_data();
    there = pinned.to(sim, {.non_blocking = true});
  }
  const Tensor next = full({1 << 16}, 9, {.device = Device{}}).pin_memory();
  EXPECT_NE(next.raw_data(), was);
  EXPECT_EQ(sum(there).item<double>(), 5.0 * (1 << 16));
}

TEST_F(Transfer, HostMemoryIsNotReadThroughTheHandle) {
  const Tensor x = ones({4}, {.device = sim});
  EXPECT_NE(error_of([&] { x.data<float>(); }).find("expected a tensor of the CPU, got one of sim:0"),
            std::string::npos);
  EXPECT_DEATH({ *static_cast<volatile float*>(x.raw_data()) = 1; }, "");
}

TEST_F(Devices, NamesNumbersAndGuards) {
  EXPECT_EQ(Device("sim:1").str(), "sim:1");
  EXPECT_NE(error_of([] { Device("sim:2"); }).find("there are 2 devices of kind sim, got 'sim:2'"), std::string::npos);
  const std::string unknown = error_of([] { Device("simm"); });
  EXPECT_NE(unknown.find("expected one of cpu"), std::string::npos) << unknown;
  EXPECT_NE(unknown.find("sim"), std::string::npos) << unknown;
  EXPECT_EQ(device_count("sim"), 2);
  EXPECT_EQ(device_count("cpu"), 1);
  EXPECT_EQ(device_count("nothing"), 0);
  EXPECT_TRUE(default_device().is_cpu());
  {
    const DeviceGuard guard(sim);
    EXPECT_EQ(ones({2}).device(), sim);
    {
      const DeviceGuard inner(test::sim_device(1));
      EXPECT_EQ(ones({2}).device(), test::sim_device(1));
    }
    EXPECT_EQ(randn({2}).device(), sim);
    std::thread([] { EXPECT_TRUE(ones({2}).device().is_cpu()); }).join();
  }
  EXPECT_TRUE(ones({2}).device().is_cpu());
  const DeviceInfo info = device_info(sim);
  EXPECT_EQ(info.memory_total, std::uint64_t{1} << 30);
  EXPECT_TRUE(info.pinned);
  EXPECT_GE(devices().size(), 3u);
  EXPECT_TRUE(devices()[0].device.is_cpu());
}

TEST_F(Devices, TensorsPrint) {
  const Tensor x = tensor({{1, 2.5}, {-3, 4}}, {.device = sim});
  EXPECT_EQ(x.str(), "tensor([[ 1.0000,  2.5000],\n        [-3.0000,  4.0000]], device=sim:0)");
  EXPECT_EQ((x.to(f16) * 2).t().str(), "tensor([[ 2., -6.],\n        [ 5.,  8.]], dtype=f16, device=sim:0)");
}

}  // namespace
}  // namespace halfstep
