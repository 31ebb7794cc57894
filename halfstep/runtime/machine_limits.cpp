// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/machine_limits.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "halfstep/runtime/float32_precision.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep {
namespace {

constexpr std::int64_t kUnknownCache = 32 << 20, kUnknownInner = 1 << 20;
constexpr std::int64_t kStreamGrain = 1 << 15;
constexpr std::int64_t kRounds = 200'000;

MachineLoops& loops() {
  static MachineLoops all;
  return all;
}

// The most work per second of some runs.
template <class F>
double best_rate(int times, F&& work) {
  double best = 0;
  for (int i = 0; i < times; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const double done = work();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, done / std::max(seconds, 1e-9));
  }
  return best;
}

double bandwidth(std::int64_t bytes, int times) {
  const std::int64_t n = bytes / 2 / static_cast<std::int64_t>(sizeof(float));
  std::vector<float> to(static_cast<std::size_t>(n), 1.0f), from(static_cast<std::size_t>(n), 1.0f);
  run_stream(to.data(), from.data(), n);
  return best_rate(times, [&] {
    run_stream(to.data(), from.data(), n);
    return 3.0 * static_cast<double>(n) * sizeof(float);
  });
}

}  // namespace

void set_machine_loops(const MachineLoops& made) { loops() = made; }

namespace {

std::int64_t read_last_cache_bytes() {
  // Of the processors that share one; the C library may tell the sum of all that the package has.
  std::int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    std::int64_t size = 0;
    char unit = 0;
    if (!(file >> size)) continue;
    if (file >> unit) size *= unit == 'K' ? 1 << 10 : unit == 'M' ? 1 << 20 : 1;
    largest = std::max(largest, size);
  }
  if (largest > 0) return largest;
  for (const int level : {_SC_LEVEL4_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE}) {
    if (const long bytes = sysconf(level); bytes > 0) return bytes;
  }
  return kUnknownCache;
}

}  // namespace

std::int64_t last_cache_bytes() {
  // Read once: that takes longer than a small kernel.
  static const std::int64_t bytes = read_last_cache_bytes();
  return bytes;
}

std::int64_t second_cache_bytes() {
  static const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);  // asks the processor, which a virtual machine traps
  return bytes > 0 ? bytes : kUnknownInner;
}

std::int64_t inner_cache_bytes() { return second_cache_bytes() * num_threads(); }

double run_multiply_adds(DType dtype, std::int64_t rounds) {
  const int threads = num_threads();
  std::vector<double> done(static_cast<std::size_t>(threads));
  parallel_for(threads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      done[static_cast<std::size_t>(i)] = loops().multiply_adds(dtype, rounds);
    }
  });
  double all = 0;
  for (const double d : done) all += d;
  return all;
}

void run_stream(float* to, const float* from, std::int64_t n) {
  parallel_for(n, kStreamGrain,
               [&](std::int64_t begin, std::int64_t end) { loops().stream(to + begin, from + begin, end - begin); });
}

MachineLimits measure_machine_limits() {
  MachineLimits limits{.cache_bytes = last_cache_bytes(), .inner_bytes = inner_cache_bytes()};
  const auto operations = [](DType dtype) { return best_rate(8, [&] { return run_multiply_adds(dtype, kRounds); }); };
  limits.operations = operations(DType::f32);
  const MachineInfo info = machine();
  limits.bf16_operations = info.bf16_units ? std::max(limits.operations, operations(DType::bf16)) : limits.operations;
  limits.f16_operations = operations(DType::f16);
  // Otherwise f16 is computed as float32. On AMX it takes more than float32 of two parts.
  const bool less = info.isa == "amx" && float32_precision() == Float32Precision::high;
  if (!less) limits.f16_operations = std::max(limits.operations, limits.f16_operations);
  limits.inner_bandwidth = bandwidth(limits.inner_bytes / 4, 200);
  limits.cache_bandwidth = bandwidth(limits.cache_bytes / 4, 20);
  limits.memory_bandwidth = bandwidth(std::min<std::int64_t>(8 * limits.cache_bytes, 512'000'000), 4);
  return limits;
}

}  // namespace halfstep
