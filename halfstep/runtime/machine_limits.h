// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, measured by loops that do nothing else.
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"

namespace halfstep {

/// Rates that no kernel exceeds, with as many threads as parallel loops use.
struct MachineLimits {
  double operations = 0;         ///< per second in float32; a multiply-add is two
  double bf16_operations = 0;    ///< of bf16 factors with float32 sums: those of units for them, or `operations`
  double f16_operations = 0;     ///< the same of f16; AVX512-FP16 doesn't count, because it sums in f16
  double inner_bandwidth = 0;    ///< bytes per second, read and written, of what lies in the processors' own caches
  double cache_bandwidth = 0;    ///< of what lies in the last cache
  double memory_bandwidth = 0;   ///< of what doesn't
  std::int64_t cache_bytes = 0;  ///< of the last cache
  std::int64_t inner_bytes = 0;  ///< of the own second-level caches of as many processors as there are threads

  /// That of products of a dtype, with the peak of float32 for all others.
  double operations_of(DType dtype) const {
    return dtype == DType::bf16 ? bf16_operations : dtype == DType::f16 ? f16_operations : operations;
  }
};

/// Bytes of the processor's last cache; 32 MiB where the system doesn't say.
HS_API std::int64_t last_cache_bytes();

/// Bytes of a processor's second-level cache; 1 MiB where the system doesn't say.
HS_API std::int64_t second_cache_bytes();

/// Bytes of the second-level caches of as many processors as parallel loops have threads; 1 MiB each where the system
/// doesn't say.
HS_API std::int64_t inner_cache_bytes();

/// Multiply-adds in registers, on all threads: `rounds` times as many vectors as keep the units busy, with factors of
/// `dtype` (f32; bf16 or f16, which computes in float32 where no unit multiplies it with float32 sums). With AMX, an
/// f32 multiply-add is six of bf16 (three with Float32Precision::high) and an f16 one four. Returns the number of
/// operations.
HS_API double run_multiply_adds(DType dtype, std::int64_t rounds);
/// `to[i] += 1e-6f * from[i]`, on all threads: two arrays are read and one is written, as an optimizer does.
HS_API void run_stream(float* to, const float* from, std::int64_t n);

/// Measures this machine, in less than a second: the best of some runs.
HS_API MachineLimits measure_machine_limits();

/// The loops, on one thread: the CPU backend supplies them.
struct MachineLoops {
  double (*multiply_adds)(DType dtype, std::int64_t rounds) = nullptr;
  void (*stream)(float* to, const float* from, std::int64_t n) = nullptr;
};
/// For the CPU backend.
HS_API void set_machine_loops(const MachineLoops& loops);

}  // namespace halfstep
