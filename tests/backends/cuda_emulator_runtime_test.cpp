// SPDX-License-Identifier: Apache-2.0
// Streams, events, memory and failures of the CPU's stand-in for CUDA (tests/cuda_emulator).
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/cuda_emulator/launch.h"
#include "tests/cuda_emulator/machine.h"

namespace hscuda::emulator {
namespace {

class CudaRuntime : public testing::Test {
 protected:
  void SetUp() override { set({}); }
  void TearDown() override {
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    set({.devices = "3"});
    for (void* memory : memory_) EXPECT_EQ(cudaFree(memory), cudaSuccess);
    for (void* memory : pinned_) EXPECT_EQ(cudaFreeHost(memory), cudaSuccess);
    cudaSetDevice(0);
    set({});
  }

  struct Machinery {
    const char *devices = nullptr, *memory = nullptr, *faults = nullptr;
  };
  /// Begins anew with this environment.
  static void set(const Machinery& m) {
    const auto put = [](const char* name, const char* value) {
      value == nullptr ? unsetenv(name) : setenv(name, value, 1);
    };
    put("HALFSTEP_CUDA_EMULATED_DEVICES", m.devices);
    put("HALFSTEP_CUDA_EMULATED_MEMORY", m.memory);
    put("HALFSTEP_CUDA_EMULATED_FAULTS", m.faults);
    machine().reset();
    cudaGetLastError();
  }

  cudaStream_t stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t made = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&made, flags), cudaSuccess);
    streams_.push_back(made);
    return made;
  }
  cudaEvent_t event(unsigned flags = cudaEventDisableTiming) {
    cudaEvent_t made = nullptr;
    EXPECT_EQ(cudaEventCreateWithFlags(&made, flags), cudaSuccess);
    return made;
  }
  int* device(int count = 1) {
    int* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(int)), cudaSuccess);
    memory_.push_back(memory);
    return memory;
  }
  int* pinned(int value) {
    int* memory = nullptr;
    EXPECT_EQ(cudaHostAlloc(&memory, sizeof(int), cudaHostAllocPortable), cudaSuccess);
    *memory = value;
    pinned_.push_back(memory);
    return memory;
  }

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<void*> memory_, pinned_;
};

__global__ void set_value(int* to, int value) { *to = value; }
__global__ void times_plus(int* x, int factor, int addend) { *x = *x * factor + addend; }
__global__ void copy_value(int* to, const int* from) { *to = *from; }

template <class... P, class... A>
void start(cudaStream_t stream, void (*kernel)(P...), A... arguments) {
  launch(stream, 1, 1, 0, true, kernel, static_cast<P>(arguments)...);
}
int read(const int* from, cudaStream_t stream = nullptr) {
  int value = 0;
  EXPECT_EQ(cudaMemcpyAsync(&value, from, sizeof(int), cudaMemcpyDeviceToHost, stream), cudaSuccess);
  return value;
}

TEST_F(CudaRuntime, WorkRunsWhenItIsWaitedFor) {
  const auto s = stream();
  int *from = pinned(1), *x = device();
  EXPECT_EQ(cudaMemcpyAsync(x, from, sizeof(int), cudaMemcpyHostToDevice, s), cudaSuccess);
  *from = 2;  // a copy from pinned memory reads it later
  EXPECT_EQ(read(x, s), 2);

  int* to = pinned(0);
  start(s, set_value, to, 5);
  EXPECT_EQ(*to, 0);
  EXPECT_EQ(cudaStreamSynchronize(s), cudaSuccess);
  EXPECT_EQ(*to, 5);

  // A copy from other memory has read it when the call returns.
  int local = 7;
  EXPECT_EQ(cudaMemcpyAsync(x, &local, sizeof(int), cudaMemcpyHostToDevice, s), cudaSuccess);
  local = 8;
  EXPECT_EQ(read(x, s), 7);

  // A stream doesn't keep any amount of work.
  start(s, set_value, to, 1);
  for (int i = 0; i < 100; ++i) start(s, set_value, x, i);
  EXPECT_EQ(*to, 1);
  EXPECT_EQ(read(x, s), 99);
}

TEST_F(CudaRuntime, AskingGetsWorkDone) {
  const auto s = stream();
  const auto e = event();
  int* x = pinned(0);
  for (int i = 0; i < 30; ++i) start(s, times_plus, x, 1, 1);
  EXPECT_EQ(cudaEventRecord(e, s), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(e), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(s), cudaErrorNotReady);
  int asked = 0;
  while (cudaEventQuery(e) == cudaErrorNotReady) ++asked;
  EXPECT_LT(asked, 10);
  EXPECT_EQ(*x, 30);
  EXPECT_EQ(cudaStreamQuery(s), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(e), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(e), cudaErrorInvalidResourceHandle);
}

TEST_F(CudaRuntime, EventsOrderStreams) {
  const auto first = stream(), second = stream();
  const auto e = event();
  int *x = device(), *y = pinned(0);
  // An event that was never recorded is nothing to wait for.
  EXPECT_EQ(cudaStreamWaitEvent(first, e), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(e), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(e), cudaSuccess);

  start(first, set_value, x, 1);
  EXPECT_EQ(cudaEventRecord(e, first), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(second, e), cudaSuccess);
  start(second, copy_value, y, x);
  // What the event stands for from now on is nothing to the wait before, even when it is gone.
  start(first, set_value, x, 2);
  EXPECT_EQ(cudaEventRecord(e, first), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(e), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(*y, 1);
  EXPECT_EQ(cudaStreamSynchronize(first), cudaSuccess);
  // Without the wait nothing orders them.
  start(first, set_value, x, 3);
  start(second, copy_value, y, x);
  EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(*y, 2);
}

TEST_F(CudaRuntime, TheDefaultStreamKeepsStep) {
  const auto blocking = stream(cudaStreamDefault);
  int* x = device();
  start(blocking, set_value, x, 2);
  start(nullptr, times_plus, x, 10, 1);
  start(blocking, times_plus, x, 3, 0);
  EXPECT_EQ(read(x, blocking), 63);
}

TEST_F(CudaRuntime, EventsTellTime) {
  const auto s = stream();
  const auto begin = event(cudaEventDefault), end = event(cudaEventDefault), untimed = event();
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle);
  cudaEventRecord(begin, s);
  cudaEventRecord(untimed, s);
  cudaEventRecord(end, s);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorNotReady);
  EXPECT_EQ(cudaEventSynchronize(end), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
  EXPECT_GE(milliseconds, 0);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, untimed), cudaErrorInvalidResourceHandle);
  for (cudaEvent_t e : {begin, end, untimed}) cudaEventDestroy(e);
}

TEST_F(CudaRuntime, OrderedFailuresComeInTheirCall) {
  set({.faults = "malloc:2=2,launch:2=701,memset:1=1"});
  int* x = device();
  int* none = nullptr;
  EXPECT_EQ(cudaMalloc(&none, 4), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  const auto s = stream();
  start(s, set_value, x, 1);
  start(s, set_value, x, 2);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorLaunchOutOfResources);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchOutOfResources);
  start(s, times_plus, x, 10, 3);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(read(x, s), 13);
  EXPECT_EQ(cudaMemsetAsync(x, 0, 4, s), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(x, 1, 4, s), cudaSuccess);
  EXPECT_EQ(read(x, s), 0x01010101);
}

TEST_F(CudaRuntime, AnIllegalAddressStays) {
  set({.faults = "launch:2=700"});
  const auto s = stream();
  int* x = pinned(0);
  start(s, set_value, x, 1);
  start(s, set_value, x, 2);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // it comes when the work runs
  start(s, set_value, x, 3);
  EXPECT_EQ(cudaStreamSynchronize(s), cudaErrorIllegalAddress);
  EXPECT_EQ(*x, 1);
  cudaGetLastError();
  int* more = nullptr;
  EXPECT_EQ(cudaMalloc(&more, 4), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  start(s, set_value, x, 4);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_EQ(*x, 1);
  EXPECT_EQ(cudaDeviceReset(), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(s), cudaSuccess);
}

TEST_F(CudaRuntime, PointersToTheHostsMemoryAreIllegalInKernels) {
  const auto s = stream();
  int local = 0;
  testing::internal::CaptureStderr();
  start(s, set_value, &local, 1);
  EXPECT_EQ(cudaStreamSynchronize(s), cudaErrorIllegalAddress);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("no memory of device 0"), std::string::npos);
  EXPECT_EQ(local, 0);
}

TEST_F(CudaRuntime, LaunchesHaveTheirLimits) {
  const auto s = stream();
  int* x = device();
  const auto outcome = [&](dim3 grid, dim3 block, std::size_t shared = 0) {
    launch(s, grid, block, shared, true, set_value, x, 1);
    return cudaGetLastError();
  };
  EXPECT_EQ(outcome(1, 1024), cudaSuccess);
  EXPECT_EQ(outcome(1, 1025), cudaErrorInvalidConfiguration);
  EXPECT_EQ(outcome(1, dim3(1, 1, 65)), cudaErrorInvalidConfiguration);
  EXPECT_EQ(outcome(0, 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(outcome(1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(outcome(dim3(1, 65536), 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(outcome(1u << 31, 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(outcome(1, 1, 48 * 1024), cudaSuccess);
  EXPECT_EQ(outcome(1, 1, 48 * 1024 + 1), cudaErrorInvalidValue);
}

TEST_F(CudaRuntime, MemoryRunsOut) {
  set({.memory = "1M"});
  std::size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(total, std::size_t{1} << 20);
  EXPECT_EQ(free, total);
  const auto s = stream();
  char *x = nullptr, *y = nullptr;
  EXPECT_EQ(cudaMallocAsync(&x, 700 << 10, s), cudaSuccess);
  EXPECT_EQ(cudaMallocAsync(&y, 700 << 10, s), cudaErrorMemoryAllocation);
  EXPECT_EQ(y, nullptr);
  // What is freed behind the queue's work is there for whoever comes after it.
  EXPECT_EQ(cudaFreeAsync(x, s), cudaSuccess);
  EXPECT_EQ(cudaMallocAsync(&y, 700 << 10, s), cudaSuccess);
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(free, std::size_t{324} << 10);
  EXPECT_EQ(cudaFree(y), cudaSuccess);
  EXPECT_EQ(cudaFree(y), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
}

TEST_F(CudaRuntime, NewMemoryHoldsNoZeros) { EXPECT_EQ(read(device()), -1); }

TEST_F(CudaRuntime, CopiesAreChecked) {
  int *x = device(4), *y = device(4), *host = pinned(0), local = 3;
  EXPECT_EQ(cudaMemcpy(x, &local, 4, cudaMemcpyHostToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(&local, x, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(x, &local, 4, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(x + 1, y, 16, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(x, y + 2, 12, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(x + 4, 0, 4), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(&local, 0, 4), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(x, &local, 4, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(host, x, 4, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(y, x, 16, cudaMemcpyDeviceToDevice), cudaSuccess);
  EXPECT_EQ(*host, 3);
  EXPECT_EQ(read(y), 3);

  cudaPointerAttributes attributes;
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, x + 1), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 0);
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, host), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, &local), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
}

TEST_F(CudaRuntime, NoDevices) {
  set({.devices = "0"});
  int count = -1, *x = nullptr;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(cudaMalloc(&x, 4), cudaErrorNoDevice);
  EXPECT_EQ(cudaSetDevice(0), cudaErrorNoDevice);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorNoDevice);
  start(nullptr, set_value, x, 1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNoDevice);
}

TEST_F(CudaRuntime, DevicesHaveMemoryAndStreamsOfTheirOwn) {
  set({.devices = "3"});
  int count = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 3);
  EXPECT_EQ(cudaSetDevice(3), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  const auto here = stream();
  int* x = device();
  start(here, set_value, x, 11);
  EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
  const auto there = stream();
  int* y = device();
  // A launch wants the stream's device, an event is its device's; who waits for it may be anywhere.
  start(here, set_value, x, 1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  const auto e = event();
  EXPECT_EQ(cudaEventRecord(e, here), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(e, there), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(here, e), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(e), cudaSuccess);

  EXPECT_EQ(cudaMemcpyPeerAsync(y, 0, x, 0, 4, there), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyPeerAsync(y, 1, x, 0, 4, here), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(here), cudaSuccess);
  EXPECT_EQ(read(y, there), 11);

  // Kernels get at the other's memory where that was allowed only, and pools are asked for themselves.
  int can = 0;
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can, 1, 0), cudaSuccess);
  EXPECT_EQ(can, 1);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(0, 0), cudaSuccess);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(0, 0), cudaErrorPeerAccessAlreadyEnabled);
  start(there, copy_value, y, x);
  EXPECT_EQ(cudaStreamSynchronize(there), cudaSuccess);
  int* pooled = nullptr;
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaMallocAsync(&pooled, 4, here), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(here), cudaSuccess);
  cudaMemPool_t pool = nullptr;
  EXPECT_EQ(cudaDeviceGetDefaultMemPool(&pool, 0), cudaSuccess);
  const cudaMemAccessDesc access = {{cudaMemLocationTypeDevice, 1}, cudaMemAccessFlagsProtReadWrite};
  EXPECT_EQ(cudaMemPoolSetAccess(pool, &access, 1), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
  start(there, set_value, pooled, 4);
  EXPECT_EQ(cudaStreamSynchronize(there), cudaSuccess);
  const cudaMemAccessDesc closed = {{cudaMemLocationTypeDevice, 1}, cudaMemAccessFlagsProtNone};
  EXPECT_EQ(cudaMemPoolSetAccess(pool, &closed, 1), cudaSuccess);
  testing::internal::CaptureStderr();
  start(there, set_value, pooled, 5);
  EXPECT_EQ(cudaStreamSynchronize(there), cudaErrorIllegalAddress);
  testing::internal::GetCapturedStderr();
  // One device is lost, the other isn't.
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(read(pooled, here), 4);
  EXPECT_EQ(cudaFree(pooled), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(1), cudaErrorIllegalAddress);
}

TEST_F(CudaRuntime, ThreadsOfTheHostWorkSideBySide) {
  std::vector<std::thread> threads;
  std::vector<int> results(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t, &results] {
      cudaStream_t s = nullptr;
      int* x = nullptr;
      cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
      cudaMalloc(&x, sizeof(int));
      start(s, set_value, x, t);
      for (int i = 0; i < 500; ++i) {
        start(s, times_plus, x, 1, 2);
        if (i % 50 == 0) cudaStreamSynchronize(s);
      }
      results[static_cast<std::size_t>(t)] = read(x, s);
      cudaFree(x);
      cudaStreamDestroy(s);
    });
  }
  for (auto& thread : threads) thread.join();
  for (int t = 0; t < 4; ++t) EXPECT_EQ(results[static_cast<std::size_t>(t)], 1000 + t);
}

using CudaRuntimeDeathTest = CudaRuntime;

TEST_F(CudaRuntimeDeathTest, TheHostCannotTouchTheDevicesMemory) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  if (!device_memory_is_protected()) GTEST_SKIP() << "no memory protection keys here";
  volatile int* x = device();
  EXPECT_EXIT({ *x = 1; }, testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT({ std::exit(*x == 0); }, testing::KilledBySignal(SIGSEGV), "");
}

}  // namespace
}  // namespace hscuda::emulator
