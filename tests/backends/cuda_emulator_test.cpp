// SPDX-License-Identifier: Apache-2.0
// Kernels on the CPU's stand-in for a GPU (tests/cuda_emulator): what their threads do together, and that
// what a GPU leaves undefined is found.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "halfstep/backends/cuda/device/block.cuh"
#include "tests/cuda_emulator/launch.h"

namespace hscuda {
namespace {

const char* const kOrders[] = {"forward", "reverse", "random:1", "random:2"};

class CudaKernel : public testing::Test {
 protected:
  void SetUp() override {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    unsetenv("HALFSTEP_CUDA_EMULATED_ORDER");
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    for (void* memory : memory_) EXPECT_EQ(cudaFree(memory), cudaSuccess);
  }

  /// Device memory with these values, until the test's end.
  template <class T>
  T* device(const std::vector<T>& values) {
    T* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, values.size() * sizeof(T)), cudaSuccess);
    memory_.push_back(memory);
    EXPECT_EQ(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    return memory;
  }
  template <class T>
  std::vector<T> host(const T* memory, std::size_t count) {
    std::vector<T> values(count);
    EXPECT_EQ(cudaMemcpyAsync(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost, stream_), cudaSuccess);
    return values;
  }
  template <class... P, class... A>
  void run(dim3 grid, dim3 block, void (*kernel)(P...), A... arguments) {
    emulator::launch(stream_, grid, block, 4096, false, kernel, static_cast<std::decay_t<P>>(arguments)...);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }
  template <class F>
  void in_all_orders(F f) {
    for (const char* order : kOrders) {
      SCOPED_TRACE(order);
      setenv("HALFSTEP_CUDA_EMULATED_ORDER", order, 1);
      f();
    }
  }

  static std::string order() { return std::getenv("HALFSTEP_CUDA_EMULATED_ORDER"); }

  cudaStream_t stream_ = nullptr;

 private:
  std::vector<void*> memory_;
};

template <bool kBarrier>
__global__ void reverse_block(int* x) {
  int* tile = static_cast<int*>(emulator::dynamic_shared());
  tile[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  if (kBarrier) __syncthreads();
  x[blockIdx.x * blockDim.x + threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

// Each takes its left neighbour's value; thread 0 its own. Run in ascending order it needs no barrier.
template <bool kBarrier>
__global__ void take_left(int* x) {
  __shared__ int tile[256];
  tile[threadIdx.x] = x[threadIdx.x];
  if (kBarrier) __syncthreads();
  x[threadIdx.x] = tile[threadIdx.x == 0 ? 0 : threadIdx.x - 1];
}

template <bool kBarrier>
__global__ void take_left_in_warp(int* x) {
  __shared__ int tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  if (kBarrier) __syncwarp();
  x[threadIdx.x] = tile[threadIdx.x == 0 ? 0 : threadIdx.x - 1];
}

std::vector<int> counted(int n) {
  std::vector<int> values(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) values[static_cast<std::size_t>(i)] = i;
  return values;
}

TEST_F(CudaKernel, BarriersOrderWhatThreadsDo) {
  in_all_orders([&] {
    int* x = device(counted(512));
    run(2, 256, reverse_block<true>, x);
    const auto values = host(x, 512);
    for (int i = 0; i < 512; ++i) ASSERT_EQ(values[static_cast<std::size_t>(i)], i / 256 * 256 + 255 - i % 256);
    int* y = device(counted(256));
    run(1, 256, take_left<true>, y);
    run(1, 32, take_left_in_warp<true>, y);
    EXPECT_EQ(host(y, 256)[31], 29);
    EXPECT_EQ(host(y, 256)[255], 254);
  });
}

TEST_F(CudaKernel, AMissingBarrierShowsInSomeOrder) {
  const auto right = [&](auto kernel, const char* order, int threads) {
    setenv("HALFSTEP_CUDA_EMULATED_ORDER", order, 1);
    // Other values each time: what the last block has left in shared memory must not be right by chance.
    static int offset = 0;
    offset += 1000;
    auto values = counted(threads);
    for (int& v : values) v += offset;
    int* x = device(values);
    run(1, dim3(static_cast<unsigned>(threads)), kernel, x);
    values = host(x, static_cast<std::size_t>(threads));
    for (int i = 1; i < threads; ++i) {
      if (values[static_cast<std::size_t>(i)] != offset + i - 1) return false;
    }
    return true;
  };
  EXPECT_TRUE(right(take_left<true>, "reverse", 256));
  EXPECT_TRUE(right(take_left<false>, "forward", 256));
  EXPECT_FALSE(right(take_left<false>, "reverse", 256));
  EXPECT_FALSE(right(take_left<false>, "random:1", 256));
  EXPECT_TRUE(right(take_left_in_warp<true>, "reverse", 32));
  EXPECT_FALSE(right(take_left_in_warp<false>, "reverse", 32));
  // What is read ahead is garbage in ascending order: dynamic shared memory is filled with ones.
  setenv("HALFSTEP_CUDA_EMULATED_ORDER", "forward", 1);
  int* x = device(counted(256));
  run(1, 256, reverse_block<false>, x);
  EXPECT_EQ(host(x, 256)[0], -1);
}

__global__ void note_places(int* seen, int* wrong) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  atomicAdd(&seen[block * (blockDim.x * blockDim.y * blockDim.z) + thread], 1);
  if (gridDim.x != 3 || gridDim.y != 4 || gridDim.z != 2 || blockDim.x != 5 || blockDim.y != 3 || blockDim.z != 2) {
    atomicExch(wrong, 1);
  }
}

TEST_F(CudaKernel, EveryThreadOfEveryBlockRunsOnce) {
  in_all_orders([&] {
    for (const bool alone : {false, true}) {
      int* seen = device(std::vector<int>(24 * 30));
      int* wrong = device(std::vector<int>(1));
      emulator::launch(stream_, dim3(3, 4, 2), dim3(5, 3, 2), 0, alone, note_places, seen, wrong);
      EXPECT_EQ(host(seen, 24 * 30), std::vector<int>(24 * 30, 1));
      EXPECT_EQ(host(wrong, 1)[0], 0);
    }
  });
}

template <class T>
__global__ void shuffle_all(T* out, int width, int by) {
  const int lane = static_cast<int>(threadIdx.x);
  const T value = static_cast<T>(lane * 3 - 7);
  out[lane] = __shfl_sync(0xffffffffu, value, by, width);
  out[32 + lane] = __shfl_up_sync(0xffffffffu, value, static_cast<unsigned>(by), width);
  out[64 + lane] = __shfl_down_sync(0xffffffffu, value, static_cast<unsigned>(by), width);
  out[96 + lane] = __shfl_xor_sync(0xffffffffu, value, by, width);
}

template <class T>
void check_shuffles(T* out, const std::vector<T>& got, int width, int by) {
  ASSERT_NE(out, nullptr);
  const auto value = [](int lane) { return static_cast<T>(lane * 3 - 7); };
  for (int lane = 0; lane < 32; ++lane) {
    // PTX ISA, shfl.sync: lanes form groups of `width`; out of the group (above it, for xor) a lane keeps its own.
    const int group = lane / width, place = lane % width;
    const auto at = [&](int what) { return got[static_cast<std::size_t>(32 * what + lane)]; };
    ASSERT_EQ(at(0), value(group * width + by % width)) << lane << " of " << width;
    ASSERT_EQ(at(1), value(place - by >= 0 ? lane - by : lane)) << lane << " of " << width;
    ASSERT_EQ(at(2), value(place + by < width ? lane + by : lane)) << lane << " of " << width;
    ASSERT_EQ(at(3), value((lane ^ by) / width <= group ? lane ^ by : lane)) << lane << " of " << width;
  }
}

TEST_F(CudaKernel, ShufflesTakeFromTheRightLane) {
  in_all_orders([&] {
    float* f = device(std::vector<float>(128));
    long long* l = device(std::vector<long long>(128));
    for (const int width : {2, 4, 8, 16, 32}) {
      for (int by = 0; by < 32; by += by < 4 ? 1 : 5) {
        run(1, 32, shuffle_all<float>, f, width, by);
        check_shuffles(f, host(f, 128), width, by);
        run(1, 32, shuffle_all<long long>, l, width, by);
        check_shuffles(l, host(l, 128), width, by);
      }
    }
  });
}

// The halves of a warp go different ways, each by itself.
__global__ void two_halves(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  int value = lane;
  if (lane < 16) {
    for (int mask = 8; mask > 0; mask /= 2) value += __shfl_xor_sync(0x0000ffffu, value, mask);
  } else {
    value = __shfl_down_sync(0xffff0000u, value, 1, 16);
  }
  __syncwarp();
  out[lane] = value + __shfl_sync(0xffffffffu, value, 0);
}

__global__ void votes(unsigned* out) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const unsigned warp = threadIdx.x / 32;
  const unsigned ballot = __ballot_sync(0xffffffffu, lane % 3 == 0);
  const int any = __any_sync(0xffffffffu, warp == 1 && lane == 5), all = __all_sync(0xffffffffu, warp == 0);
  const unsigned same = __match_any_sync(0xffffffffu, lane / 8);
  const int sum = __reduce_add_sync(0xffffffffu, -lane), least = __reduce_min_sync(0xffffffffu, lane - 9);
  const int count = __syncthreads_count(threadIdx.x < 40);
  const int some = __syncthreads_or(threadIdx.x == 63), every = __syncthreads_and(threadIdx.x != 63);
  if (lane == 9) {
    unsigned* to = out + 16 * warp;
    to[0] = ballot, to[1] = static_cast<unsigned>(any), to[2] = static_cast<unsigned>(all), to[3] = same;
    to[4] = static_cast<unsigned>(sum), to[5] = static_cast<unsigned>(least), to[6] = static_cast<unsigned>(count);
    to[7] = some != 0, to[8] = every != 0;
  }
}

TEST_F(CudaKernel, VotesAndHalvesOfWarps) {
  in_all_orders([&] {
    int* x = device(std::vector<int>(32));
    run(1, 32, two_halves, x);
    const auto halves = host(x, 32);
    EXPECT_EQ(halves[3], 240);  // twice 0 + 1 + ... + 15
    EXPECT_EQ(halves[20], 120 + 21);
    EXPECT_EQ(halves[31], 120 + 31);
    unsigned* y = device(std::vector<unsigned>(32));
    run(1, 64, votes, y);
    const auto out = host(y, 32);
    for (unsigned warp = 0; warp < 2; ++warp) {
      const unsigned* got = &out[16 * warp];
      EXPECT_EQ(got[0], 0x49249249u);
      EXPECT_EQ(got[1], warp);
      EXPECT_EQ(got[2], 1 - warp);
      EXPECT_EQ(got[3], 0x0000ff00u);
      EXPECT_EQ(static_cast<int>(got[4]), -496);
      EXPECT_EQ(static_cast<int>(got[5]), -9);
      EXPECT_EQ(got[6], 40u);
      EXPECT_EQ(got[7], 1u);
      EXPECT_EQ(got[8], 0u);
    }
  });
}

struct Moments {
  double sum;
  int64_t count;
};
struct Join {
  __device__ Moments operator()(Moments a, Moments b) const { return {a.sum + b.sum, a.count + b.count}; }
};

// One after the other, so that a reduction that leaves before all have read shows.
__global__ void reduce_block(const float* x, double* out) {
  const float value = x[blockIdx.x * blockDim.x + threadIdx.x];
  const float sum = block_reduce(value, Sum{}, 0.0f);
  const float largest = block_reduce(value, Largest{}, -HUGE_VALF),
              smallest = block_reduce(value, Smallest{}, HUGE_VALF);
  const Moments both = block_reduce(Moments{value, 1}, Join{}, Moments{0, 0});
  const int64_t threads = block_reduce(int64_t{threadIdx.x}, Sum{}, int64_t{0});
  double* to = out + 6 * (blockIdx.x * blockDim.x + threadIdx.x);
  to[0] = sum, to[1] = largest, to[2] = smallest, to[3] = both.sum, to[4] = static_cast<double>(both.count);
  to[5] = static_cast<double>(threads);
}

TEST_F(CudaKernel, ReductionsOfBlocksAreThoseOfLoops) {
  in_all_orders([&] {
    for (const unsigned threads : {32u, 64u, 96u, 256u, 1024u}) {
      SCOPED_TRACE(threads);
      if (threads == 1024 && order() != "random:1") continue;  // slow under the thread sanitizer
      // Small integers: float sums are exact in any order.
      std::vector<float> values(2 * threads);
      for (unsigned i = 0; i < 2 * threads; ++i) values[i] = static_cast<float>(static_cast<int>(i * 37 % 101) - 50);
      const float* x = device(values);
      double* out = device(std::vector<double>(12 * threads));
      run(2, threads, reduce_block, x, out);
      const auto got = host(out, 12 * threads);
      for (unsigned block = 0; block < 2; ++block) {
        double sum = 0, largest = -1e9, smallest = 1e9;
        for (unsigned i = 0; i < threads; ++i) {
          const double v = values[block * threads + i];
          sum += v, largest = std::max(largest, v), smallest = std::min(smallest, v);
        }
        for (unsigned i = 0; i < threads; ++i) {
          const double* t = &got[6 * (block * threads + i)];
          ASSERT_EQ(std::vector<double>(t, t + 6),
                    (std::vector<double>{sum, largest, smallest, sum, double(threads), threads * (threads - 1) / 2.0}));
        }
      }
    }
  });
  // NaN wins.
  std::vector<float> values(64, 1.0f);
  values[45] = std::numeric_limits<float>::quiet_NaN();
  const float* x = device(values);
  double* out = device(std::vector<double>(6 * 64));
  run(1, 64, reduce_block, x, out);
  EXPECT_TRUE(std::isnan(host(out, 3)[1]));
  EXPECT_TRUE(std::isnan(host(out, 3)[2]));
}

// Threads that return count as come to a barrier, of the block and of the warp.
__global__ void leave_early(int* out) {
  if (threadIdx.x % 3 == 0) return;
  __syncwarp();
  __syncthreads();
  atomicAdd(out, 1);
  if (threadIdx.x >= 40) return;
  __syncthreads();
  atomicMax(out + 1, static_cast<int>(threadIdx.x));
  atomicMin(out + 2, -static_cast<int>(threadIdx.x));
  atomicCAS_system(out + 3, 0, 5);
}

TEST_F(CudaKernel, ThreadsMayReturnBeforeABarrier) {
  in_all_orders([&] {
    int* out = device(std::vector<int>(4));
    run(1, 96, leave_early, out);
    EXPECT_EQ(host(out, 4), (std::vector<int>{64, 38, -38, 5}));
  });
}

// ------------------------------------------------------------------------------------------------------------------
// What ends the program.

__global__ void barriers_apart(int* x) {
  if (threadIdx.x < 32) {
    __syncthreads();
    x[0] = 1;
  } else {
    __syncthreads();
    x[1] = 1;
  }
}
__global__ void warp_waits_for_block(int*) {
  if (threadIdx.x % 32 < 16) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}
__global__ void lane_returned(int* x) {
  if (threadIdx.x == 0) return;
  x[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 1);
}
__global__ void lane_not_named(int* x) { x[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 1); }
__global__ void source_not_named(int* x) {
  if (threadIdx.x < 16) x[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 20);
}
__global__ void other_shuffle(int* x) {
  x[threadIdx.x] = threadIdx.x < 5 ? __shfl_sync(0xffffffffu, 1, 1) : __shfl_xor_sync(0xffffffffu, 1, 1);
}
__global__ void one_barrier(int*) { __syncthreads(); }
__global__ void shared_alone(int* x) { x[0] = *static_cast<int*>(emulator::dynamic_shared()); }

using CudaKernelDeathTest = CudaKernel;

TEST_F(CudaKernelDeathTest, MeetingsThatCannotComeAboutEndTheProgram) {
  int* x = device(std::vector<int>(64));
  EXPECT_DEATH(run(1, 64, barriers_apart, x), "others of its block are at another one");
  EXPECT_DEATH(run(1, 64, warp_waits_for_block, x),
               "threads that never come(.|\n)*threads 0 to 15: in __syncwarp(.|\n)*threads 16 to 31: in __syncthreads");
  EXPECT_DEATH(run(1, 32, lane_returned, x), "names a lane that has returned");
  EXPECT_DEATH(run(1, 32, lane_not_named, x), "isn't named by its own mask");
  EXPECT_DEATH(run(1, 32, source_not_named, x), "a lane that its mask doesn't name");
  EXPECT_DEATH(run(1, 32, other_shuffle, x), "meets lanes of its warp that are elsewhere");
  EXPECT_DEATH(run(1, 16, lane_returned, x), "names lanes that its block doesn't have");
}

TEST_F(CudaKernelDeathTest, KernelsThatSaidTheirThreadsAreAloneMustBe) {
  int* x = device(std::vector<int>(64));
  const auto alone = [&](void (*kernel)(int*)) {
    emulator::launch(stream_, 1, 32, 64, true, kernel, x);
    cudaStreamSynchronize(stream_);
  };
  EXPECT_DEATH(alone(one_barrier), "__syncthreads(.|\n)*alone = true");
  EXPECT_DEATH(alone(lane_not_named), "a shuffle(.|\n)*alone = true");
  EXPECT_DEATH(alone(shared_alone), "dynamic shared memory(.|\n)*alone = true");
}

TEST(CudaFunctions, BitsAndNumbers) {
  EXPECT_EQ(__umulhi(0xffffffffu, 0xffffffffu), 0xfffffffeu);
  EXPECT_EQ(__mulhi(-2, 1 << 30), -1);
  EXPECT_EQ(__umul64hi(~0ull, ~0ull), ~0ull - 1);
  EXPECT_EQ(__mul64hi(-1, 1), -1);
  EXPECT_EQ(__popc(0xf0f0u) + __popcll(~0ull), 72);
  EXPECT_EQ(__clz(0), 32);
  EXPECT_EQ(__clz(1), 31);
  EXPECT_EQ(__clzll(1), 63);
  EXPECT_EQ(__ffs(0), 0);
  EXPECT_EQ(__ffs(8), 4);
  EXPECT_EQ(__ffsll(1ll << 40), 41);
  EXPECT_EQ(__brev(1u), 0x80000000u);
  EXPECT_EQ(__brevll(2ull), 1ull << 62);
  EXPECT_EQ(__funnelshift_l(0x80000000u, 1u, 1), 3u);
  EXPECT_EQ(__funnelshift_r(2u, 1u, 1), 0x80000001u);
  EXPECT_EQ(__saturatef(std::numeric_limits<float>::quiet_NaN()), 0.0f);
  EXPECT_EQ(max(1.0f, std::numeric_limits<float>::quiet_NaN()), 1.0f);
  for (double x = -0.9999999; x < 1; x += 0.0078125) EXPECT_NEAR(std::erf(erfinv(x)), x, 4e-16) << x;
  // Near 1 by what is left to 1.
  for (const double tail : {1e-3, 1e-8, 1e-13}) EXPECT_NEAR(std::erfc(erfinv(1 - tail)) / (1 - (1 - tail)), 1, 1e-12);
  EXPECT_EQ(erfinv(1.0), HUGE_VAL);
  EXPECT_TRUE(std::isnan(erfinv(1.5)));
  for (const double p : {1e-300, 1e-20, 1e-5, 0.01, 0.3, 0.5, 0.9, 0.999}) {
    EXPECT_NEAR(normcdf(normcdfinv(p)) / p, 1, 1e-12) << p;
  }
  EXPECT_EQ(sinpi(7.0), 0.0);
  EXPECT_EQ(cospi(2.5), 0.0);
  EXPECT_NEAR(sinpi(0.25), std::sqrt(0.5), 3e-16);
  EXPECT_NEAR(cospi(1e6 + 1.0 / 3), 0.5, 1e-9);
}

}  // namespace
}  // namespace hscuda
