// SPDX-License-Identifier: Apache-2.0
// A block of threads on the CPU: each a fiber, which runs until it waits for others. Everything that CUDA says all
// threads named must reach together is checked: a barrier that some don't reach, a shuffle with lanes missing, or two
// different ones met at once end the program with a message that says which threads wait where.
#pragma once

#include <cstdint>
#include <functional>
#include <source_location>

#include "include/emulated_types.h"

namespace hscuda::emulator {

/// What threads wait for together.
enum class Meeting : uint8_t {
  kBarrier,
  kBarrierOr,
  kBarrierAnd,
  kBarrierCount,
  kSyncWarp,
  kShuffle,
  kVote,
  kReduceAdd,
  kReduceMin,
  kReduceMax,
  kReduceMinSigned,
  kReduceMaxSigned,
  kReduceAnd,
  kReduceOr,
  kReduceXor,
  kMatch
};

#pragma GCC visibility push(hidden)

/// A barrier of the block; the answer is that of __syncthreads_or and its like.
int meet_block(Meeting what, int predicate, const std::source_location& where);

/// A meeting of the lanes in `mask`. A shuffle answers the value that lane `source` brought; a vote the lanes whose
/// value isn't 0; a reduction its result; a match the lanes that brought the same value.
uint64_t meet_warp(Meeting what, unsigned mask, uint64_t value, int source, const std::source_location& where);

/// The calling thread's number in its warp.
int lane();

/// Runs all blocks of a grid, one after the other, on this thread. `body` runs one thread.
/// HALFSTEP_CUDA_EMULATED_ORDER: forward (the default), reverse or random:SEED; the order of blocks, and of threads
/// between meetings.
void run_grid(dim3 grid, dim3 block, std::size_t shared, bool alone, const std::function<void()>& body);

/// The block's dynamic shared memory, filled with 0xff bytes (NaN, -1) before each block.
void* dynamic_shared();

#pragma GCC visibility pop

}  // namespace hscuda::emulator
