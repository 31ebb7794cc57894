// SPDX-License-Identifier: Apache-2.0
// Stream capture and graphs of the CPU's stand-in for CUDA (tests/cuda_emulator): what CUDA's manual says of them, and
// that what it forbids breaks a capture off.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "tests/cuda_emulator/launch.h"
#include "tests/cuda_emulator/machine.h"

namespace hscuda::emulator {
namespace {

__global__ void put(int* to, int value) { *to = value; }
__global__ void multiply_add(int* x, int factor, int addend) { *x = *x * factor + addend; }

class CudaCapture : public testing::Test {
 protected:
  void SetUp() override { set({}, {}); }
  void TearDown() override {
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(cudaFree(x), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
    EXPECT_TRUE(machine().graphs.empty());
    EXPECT_TRUE(machine().executables.empty());
    unsetenv("HALFSTEP_CUDA_EMULATED_DEVICES");
    unsetenv("HALFSTEP_CUDA_EMULATED_FAULTS");
    machine().reset();
  }
  /// Begins anew with this environment.
  void set(const char* devices, const char* faults) {
    if (stream != nullptr) TearDown();
    if (devices) setenv("HALFSTEP_CUDA_EMULATED_DEVICES", devices, 1);
    if (faults) setenv("HALFSTEP_CUDA_EMULATED_FAULTS", faults, 1);
    machine().reset();
    cudaGetLastError();
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&x, sizeof(int)), cudaSuccess);
    ASSERT_EQ(cudaHostAlloc(&pinned, sizeof(int), cudaHostAllocPortable), cudaSuccess);
    ASSERT_EQ(cudaMemset(x, 0, sizeof(int)), cudaSuccess);
    *pinned = 0;
  }

  template <class... P, class... A>
  cudaError_t start(cudaStream_t s, void (*kernel)(P...), A... arguments) {
    cudaGetLastError();  // of a call before that was meant to fail
    launch(s, 1, 1, 0, true, kernel, static_cast<P>(arguments)...);
    return cudaGetLastError();
  }
  int value() {
    int result = 0;
    EXPECT_EQ(cudaMemcpyAsync(&result, x, sizeof(int), cudaMemcpyDeviceToHost, stream), cudaSuccess);
    return result;
  }
  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    ASSERT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
    ASSERT_EQ(start(stream, multiply_add, x, 1, 1), cudaSuccess);
  }
  /// Whether the capture came to a good end, and else left nothing.
  bool ends_well() {
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(stream, &graph);
    EXPECT_EQ(error, graph != nullptr ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaGraphDestroy(graph), graph != nullptr ? cudaSuccess : cudaErrorInvalidValue);
    // The stream can be used in either case, and nothing of the capture was done.
    const int before = value();
    EXPECT_EQ(start(stream, multiply_add, x, 1, 1), cudaSuccess);
    EXPECT_EQ(value(), before + 1);
    return error == cudaSuccess;
  }
  /// A capture in whose middle `call` gives `error` and breaks it off.
  void breaks(const char* what, cudaError_t error, const std::function<cudaError_t()>& call,
              cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    SCOPED_TRACE(what);
    begin(mode);
    EXPECT_EQ(call(), error);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusInvalidated);
    EXPECT_EQ(start(stream, multiply_add, x, 1, 1), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaMemsetAsync(x, 0, sizeof(int), stream), cudaErrorStreamCaptureInvalidated);
    EXPECT_FALSE(ends_well());
  }
  template <class F>
  static cudaError_t elsewhere(F f) {
    cudaError_t error = cudaSuccess;
    std::thread([&] { error = f(); }).join();
    return error;
  }

  cudaStream_t stream = nullptr, other = nullptr;
  cudaEvent_t event = nullptr;
  int *x = nullptr, *pinned = nullptr;
};

TEST_F(CudaCapture, RecordsWhatIsLaunchedAgainAndAgain) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  EXPECT_EQ(start(stream, put, x, 1), cudaSuccess);  // not part of it
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(start(stream, multiply_add, x, 1, 1), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(pinned, x, sizeof(int), cudaMemcpyDeviceToHost, stream), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(x, 0, sizeof(int), stream), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(value(), 1);
  EXPECT_EQ(*pinned, 0);
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);  // not needed any more
  EXPECT_EQ(cudaGraphDestroy(graph), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(*pinned, 101);
  EXPECT_EQ(start(stream, put, x, 5), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);  // what is under way goes on
  EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaErrorInvalidValue);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(*pinned, 100);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaErrorInvalidValue);
}

TEST_F(CudaCapture, BeginsAndEndsOnce) {
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorIllegalState);
  begin();
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaErrorIllegalState);
  // It ends on its thread, unless it was begun as relaxed; who tries elsewhere hasn't broken it off.
  EXPECT_EQ(elsewhere([&] { return cudaStreamEndCapture(stream, &graph); }), cudaErrorStreamCaptureWrongThread);
  EXPECT_TRUE(ends_well());
  begin(cudaStreamCaptureModeRelaxed);
  EXPECT_EQ(elsewhere([&] { return cudaStreamEndCapture(stream, &graph); }), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(CudaCapture, IsBrokenOffByWhatItCannotHold) {
  int local = 0, *more = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  begin();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  const cudaError_t unsupported = cudaErrorStreamCaptureUnsupported;
  breaks("wait", unsupported, [&] { return cudaStreamSynchronize(stream); });
  breaks("query", unsupported, [&] { return cudaStreamQuery(stream); });
  breaks("destroy", unsupported, [&] { return cudaStreamDestroy(stream); });
  breaks("pageable", unsupported,
         [&] { return cudaMemcpyAsync(x, &local, sizeof(int), cudaMemcpyHostToDevice, stream); });
  breaks("free", unsupported, [&] { return cudaFreeAsync(x, stream); });
  breaks("graph", unsupported, [&] { return cudaGraphLaunch(executable, stream); });
  breaks("device", unsupported, [&] { return cudaDeviceSynchronize(); });
  // What isn't put into the stream wouldn't be repeated.
  breaks("malloc", unsupported, [&] { return cudaMalloc(&more, 4); });
  breaks("host", unsupported, [&] { return cudaHostAlloc(&more, 4, 0); });
  breaks("memcpy", unsupported, [&] { return cudaMemcpy(x, pinned, 4, cudaMemcpyHostToDevice); });
  breaks("memset", unsupported, [&] { return cudaMemset(x, 0, 4); });
  breaks("other wait", unsupported, [&] { return cudaStreamSynchronize(other); });
  // An event stands for a place of the graph, or for one outside.
  breaks("captured event", cudaErrorCapturedEvent, [&] {
    EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
    return cudaEventQuery(event);
  });
  EXPECT_EQ(cudaEventSynchronize(event), cudaErrorCapturedEvent) << "until it is recorded again";
  EXPECT_EQ(start(other, multiply_add, x, 1, 0), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, other), cudaSuccess);
  breaks("outside", cudaErrorStreamCaptureIsolation, [&] { return cudaStreamWaitEvent(stream, event); });
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(CudaCapture, LeavesOtherStreamsAndItsOwnEventsAlone) {
  begin();
  EXPECT_EQ(cudaStreamWaitEvent(stream, event), cudaSuccess);  // never recorded
  EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event), cudaSuccess);
  EXPECT_EQ(start(other, multiply_add, x, 1, 0), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(x, 0, sizeof(int)), cudaSuccess) << "of the legacy stream, which doesn't keep step";
  EXPECT_TRUE(ends_well());
}

TEST_F(CudaCapture, ForbidsThreadsWhatTheirModesSay) {
  const auto allocate = [] {
    int* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, 4);
    return error == cudaSuccess ? cudaFree(memory) : error;
  };
  const auto in_mode = [](cudaStreamCaptureMode mode, const std::function<cudaError_t()>& f) {
    EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    const cudaError_t error = f();
    EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    return error;
  };
  constexpr auto global = cudaStreamCaptureModeGlobal, local = cudaStreamCaptureModeThreadLocal,
                 relaxed = cudaStreamCaptureModeRelaxed;
  for (const auto mode : {global, local}) {
    begin(mode);
    EXPECT_EQ(in_mode(relaxed, allocate), cudaSuccess);
    EXPECT_EQ(elsewhere([&] { return in_mode(local, allocate); }), cudaSuccess);
    EXPECT_TRUE(ends_well());
    breaks(
        "own", cudaErrorStreamCaptureUnsupported, [&] { return in_mode(local, allocate); }, mode);
  }
  begin(local);
  EXPECT_EQ(elsewhere(allocate), cudaSuccess);
  EXPECT_TRUE(ends_well());
  breaks(
      "global", cudaErrorStreamCaptureUnsupported, [&] { return elsewhere(allocate); }, global);
  begin(relaxed);
  EXPECT_EQ(allocate(), cudaSuccess);
  EXPECT_TRUE(ends_well());
  auto none = static_cast<cudaStreamCaptureMode>(3);
  EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&none), cudaErrorInvalidValue);
}

// Seen on GPUs (NVIDIA/TensorRT issue 2888): whatever the modes, from any thread.
TEST_F(CudaCapture, IsBrokenOffByWhoeverWaitsForItsDevice) {
  set("2", nullptr);
  for (const auto mode :
       {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed}) {
    breaks(
        "device", cudaErrorStreamCaptureUnsupported, [&] { return elsewhere(cudaDeviceSynchronize); }, mode);
  }
  begin();
  EXPECT_EQ(elsewhere([] {
              cudaSetDevice(1);
              return cudaDeviceSynchronize();
            }),
            cudaSuccess);
  EXPECT_EQ(elsewhere([&] { return cudaStreamSynchronize(other); }), cudaSuccess);
  EXPECT_TRUE(ends_well());
}

TEST_F(CudaCapture, OfABlockingStreamIsBrokenOffByTheLegacyStream) {
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  std::swap(stream, blocking);
  breaks("legacy", cudaErrorStreamCaptureImplicit, [&] { return start(nullptr, put, x, 1); });
  std::swap(stream, blocking);
  EXPECT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

TEST_F(CudaCapture, FailsAsOrdered) {
  set(nullptr, "capture:1=900,instantiate:1=2,graph:2=2");
  begin();
  EXPECT_FALSE(ends_well());
  begin();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaErrorMemoryAllocation);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  const int before = value();
  EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaErrorMemoryAllocation);
  EXPECT_EQ(value(), before + 1);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

// Addresses are those of the capture: memory that has gone since is found.
TEST_F(CudaCapture, LaunchesUseMemoryThatIsStillThere) {
  int* gone = nullptr;
  ASSERT_EQ(cudaMalloc(&gone, sizeof(int)), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(start(stream, put, gone, 1), cudaSuccess);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaFree(gone), cudaSuccess);
  testing::internal::CaptureStderr();
  EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("no memory of device 0"), std::string::npos);
  EXPECT_EQ(cudaDeviceReset(), cudaSuccess);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

}  // namespace
}  // namespace hscuda::emulator
