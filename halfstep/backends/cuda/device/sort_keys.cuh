// SPDX-License-Identifier: Apache-2.0
// Numbers 0 to n - 1 sorted by a key that each has, those of one key in their order: by eight bits after eight bits,
// from the lowest on (radix sort). No atomic operation decides about an order.
#pragma once

#include <bit>

#include "device/index.cuh"
#include "device/prefix_sum.cuh"

namespace hscuda {

inline constexpr int kDigits = 256;
inline constexpr int kSortRounds = 8;  ///< keys of a thread
inline constexpr int64_t kSortTile = int64_t{kThreads} * kSortRounds;
static_assert(kThreads == kDigits);

// How often each digit comes in each tile: counts[digit * tiles + tile].
static __global__ void __launch_bounds__(kThreads)
    count_digits(const uint32_t* keys, int64_t n, int shift, uint32_t* counts) {
  __shared__ uint32_t count[kDigits];
  count[threadIdx.x] = 0;
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSortTile + threadIdx.x;
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    const int64_t i = first + r * kThreads;
    if (i < n) atomicAdd(&count[keys[i] >> shift & (kDigits - 1)], 1u);
  }
  __syncthreads();
  counts[static_cast<int64_t>(threadIdx.x) * gridDim.x + blockIdx.x] = count[threadIdx.x];
}

// Each tile moves its keys to where its digits begin, in order. `numbers` is null in the first pass: 0, 1, ...
static __global__ void __launch_bounds__(kThreads)
    move_by_digit(const uint32_t* keys, const uint32_t* numbers, int64_t n, int shift, const uint32_t* starts,
                  uint32_t* new_keys, uint32_t* new_numbers) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ uint32_t place[kWarps][kDigits];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  // Where the next key of the digit of this thread's number goes.
  uint32_t next = starts[static_cast<int64_t>(thread) * gridDim.x + blockIdx.x];
  for (int r = 0; r < kSortRounds; ++r) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kSortTile + r * kThreads + thread;
    const bool mine = i < n;
    const uint32_t key = mine ? keys[i] : 0;
    const int digit = mine ? static_cast<int>(key >> shift & (kDigits - 1)) : kDigits;
    // The lanes with this digit: its key's rank in the warp is how many of them come before it.
    unsigned peers = __ballot_sync(kWholeWarp, mine);
    if (!mine) peers = ~peers;
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const unsigned set = __ballot_sync(kWholeWarp, digit >> bit & 1);
      peers &= (digit >> bit & 1) ? set : ~set;
    }
    const auto rank = static_cast<uint32_t>(__popc(peers & ((1u << lane) - 1)));
#pragma unroll
    for (int w = 0; w < kWarps; ++w) place[w][thread] = 0;
    __syncthreads();
    if (mine && rank == 0) place[warp][digit] = static_cast<uint32_t>(__popc(peers));
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t count = place[w][thread];
      place[w][thread] = next;
      next += count;
    }
    __syncthreads();
    if (mine) {
      const uint32_t to = place[warp][digit] + rank;
      new_keys[to] = key;
      new_numbers[to] = numbers ? numbers[i] : static_cast<uint32_t>(i);
    }
    __syncthreads();
  }
}

/// Keys and the numbers that have them, sorted.
struct Sorted {
  const uint32_t* keys = nullptr;
  const uint32_t* numbers = nullptr;
};
/// Device memory for sorting.
struct SortSpace {
  uint32_t* keys[2];
  uint32_t* numbers[2];
  uint32_t* counts;
  bool found;  ///< whether there was enough

  SortSpace(const Call& call, int64_t n) {
    const int64_t tiles = divide_up(n, kSortTile);
    auto* all = call.workspace<uint32_t>(4 * n + kDigits * tiles);
    found = all != nullptr;
    keys[0] = all, keys[1] = all + n, numbers[0] = all + 2 * n, numbers[1] = all + 3 * n, counts = all + 4 * n;
  }
};

/// Sorts space.keys[0], n keys (less than 2^31) that are at most `largest`.
inline Sorted sort_keys(const Call& call, const SortSpace& space, int64_t n, uint32_t largest) {
  const int64_t tiles = divide_up(n, kSortTile);
  int at = 0;
  const uint32_t* numbers = nullptr;
  for (int shift = 0; shift == 0 || shift < static_cast<int>(std::bit_width(largest)); shift += 8) {
    const Launch how{.grid = static_cast<unsigned>(tiles)};
    launch(call, how, count_digits, space.keys[at], n, shift, space.counts);
    launch(call, {.grid = 1}, scan_counts<uint32_t>, space.counts, tiles * kDigits, nullptr);
    launch(call, how, move_by_digit, space.keys[at], numbers, n, shift, space.counts, space.keys[1 - at],
           space.numbers[1 - at]);
    at = 1 - at;
    numbers = space.numbers[at];
  }
  return {space.keys[at], numbers};
}

}  // namespace hscuda
