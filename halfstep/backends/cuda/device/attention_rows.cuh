// SPDX-License-Identifier: Apache-2.0
// The softmax of attention's scores and its gradient: the rows of a piece, one query each.
#pragma once

#include <cstdint>
#include <limits>

#include "device/block.cuh"
#include "device/elementwise.cuh"
#include "halfstep/core/philox.h"

namespace hscuda {

/// A piece of the scores [items, heads, queries, keys], row-major, of all [.., all_heads, all_queries, keys].
struct ScoreRows {
  int64_t rows, heads, queries, keys;
  int64_t first_item, first_head, first_query;
  int64_t all_heads, all_queries;
  double scale;
  bool causal;
  const void* mask;
  int mask_dtype;
  int64_t mask_strides[4];  ///< 0 where it has one for all
  const int64_t* state;     ///< of the generator
  uint64_t threshold;       ///< words below it drop their weight; 0: none
  double kept;              ///< factor of the others
};

/// Which query a row is.
struct ScoreRow {
  int64_t number;  ///< among all queries of all heads
  int64_t query;
  int64_t mask;  ///< where its mask begins
  int64_t seen;  ///< keys before this one may be seen
};

__device__ __forceinline__ ScoreRow row_at(const ScoreRows& p, int64_t row) {
  int64_t line = 0, image = 0;
  if (p.rows <= INT32_MAX) {
    // 64 bits are divided by in a hundred instructions.
    const auto small = static_cast<uint32_t>(row), queries = static_cast<uint32_t>(p.queries);
    line = small / queries;
    image = static_cast<uint32_t>(line) / static_cast<uint32_t>(p.heads);
  } else {
    line = row / p.queries;
    image = line / p.heads;
  }
  const int64_t query = p.first_query + row - line * p.queries, head = p.first_head + line - image * p.heads,
                item = p.first_item + image;
  ScoreRow at;
  at.number = (item * p.all_heads + head) * p.all_queries + query;
  at.query = query;
  at.mask = item * p.mask_strides[0] + head * p.mask_strides[1] + query * p.mask_strides[2];
  at.seen = p.causal && query + 1 < p.keys ? query + 1 : p.keys;
  return at;
}

template <class C>
__device__ __forceinline__ C no_score() {
  return -std::numeric_limits<C>::infinity();
}
__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return ::exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return ::log(x); }

/// The score of key j from the product of the vectors.
template <class C>
__device__ __forceinline__ C finished_score(const ScoreRows& p, const ScoreRow& at, int64_t j, C raw) {
  const C x = raw * static_cast<C>(p.scale);
  if (p.mask == nullptr) return x;
  const int64_t place = at.mask + j * p.mask_strides[3];
  switch (p.mask_dtype) {
    case HALFSTEP_BOOL:
      return static_cast<const uint8_t*>(p.mask)[place] ? x : no_score<C>();
    case HALFSTEP_F64:
      return x + static_cast<C>(static_cast<const double*>(p.mask)[place]);
    case HALFSTEP_F16:
      return x + static_cast<C>(value_of(static_cast<const Half*>(p.mask)[place]));
    case HALFSTEP_BF16:
      return x + static_cast<C>(value_of(static_cast<const BFloat16*>(p.mask)[place]));
    default:
      return x + static_cast<C>(static_cast<const float*>(p.mask)[place]);
  }
}

/// What dropout makes of weight j: 0, or a factor.
template <class C>
__device__ __forceinline__ C dropout_factor(const ScoreRows& p, const ScoreRow& at, int64_t j) {
  if (p.threshold == 0) return C(1);
  const auto i = static_cast<uint64_t>(at.number * p.keys + j);
  const auto block =
      halfstep::philox_block({static_cast<uint64_t>(p.state[0]), static_cast<uint64_t>(p.state[1])}, i / 4);
  const uint32_t word = i % 4 < 2 ? (i % 4 == 0 ? block[0] : block[1]) : (i % 4 == 2 ? block[2] : block[3]);
  return word < p.threshold ? C(0) : static_cast<C>(p.kept);
}

// How the rows are shared out: kLanes threads (a warp, or a block) have a row. Each holds up to kCount of its scores in
// registers; 0: any number of them, which are read again for each pass.
//
// kSplit: what is left for the products that follow is, in the same memory, the sum of two bf16 for each float, which
// has 16 bits of mantissa and float's range; all that are larger lie before all that they lack. A thread then has
// neighbours, which it reads and writes at once: `keys` are whole multiples of kCount, rows begin on such.
template <int kCount, int kLanes, bool kSplit>
struct Share {
  static_assert(kLanes == kWarp || kLanes == kThreads);
  static_assert(kCount > 0 || !kSplit);
  static constexpr int kHeld = kCount > 0 ? kCount : 1;
  static constexpr int kRows = kThreads / kLanes;  ///< of a block

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  template <class C, class Op>
  __device__ __forceinline__ static C reduce(C value, Op op, C identity) {
    if constexpr (kLanes == kWarp) {
      return warp_reduce(value, op);
    } else {
      return block_reduce(value, op, identity);
    }
  }
  /// Behind it, what any lane of the row has read may be written by another.
  __device__ __forceinline__ static void settle() {
    if constexpr (kLanes == kWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  /// Calls f(j, c) for a lane's columns j.
  template <class F>
  __device__ __forceinline__ static void for_columns(int64_t keys, F&& f) {
    if constexpr (kSplit) {
      if (const int64_t first = int64_t{lane()} * kCount; first < keys) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) f(first + c, c);
      }
    } else if constexpr (kCount > 0) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        if (const int64_t j = lane() + c * kLanes; j < keys) f(j, c);
      }
    } else {
      for (int64_t j = lane(); j < keys; j += kLanes) f(j, 0);
    }
  }
  /// A lane's columns of a row, where they are held.
  template <class C>
  __device__ __forceinline__ static void read(const C* row, int64_t keys, C (&to)[kHeld]) {
    if constexpr (kSplit) {
      if (const int64_t first = int64_t{lane()} * kCount; first < keys) {
        const auto pack = load_pack<kCount>(row + first);
#pragma unroll
        for (int c = 0; c < kCount; ++c) to[c] = pack.values[c];
      }
    } else if constexpr (kCount > 0) {
      for_columns(keys, [&](int64_t j, int c) { to[c] = row[j]; });
    }
  }
  template <class C>
  __device__ __forceinline__ static void write(C* row, int64_t keys, const C (&from)[kHeld]) {
    if constexpr (kSplit) {
      if (const int64_t first = int64_t{lane()} * kCount; first < keys) {
        auto* const halves = reinterpret_cast<BFloat16*>(row);
        Pack<BFloat16, kCount> large, rest;
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          large.values[c] = convert<BFloat16>(from[c]);
          rest.values[c] = convert<BFloat16>(from[c] - value_of(large.values[c]));
        }
        *reinterpret_cast<Pack<BFloat16, kCount>*>(halves + first) = large;
        *reinterpret_cast<Pack<BFloat16, kCount>*>(halves + keys + first) = rest;
      }
    } else if constexpr (kCount > 0) {
      for_columns(keys, [&](int64_t j, int c) { row[j] = from[c]; });
    }
  }
};

/// The softmax of each row in place, with dropout, and `lse` of each.
template <class C, int kCount, int kLanes, bool kSplit = false>
__global__ void __launch_bounds__(kThreads) softmax_rows(ScoreRows p, C* scores, C* lse) {
  using Rows = Share<kCount, kLanes, kSplit>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * Rows::kRows;
  for (int64_t row = thread_index() / kLanes; row < p.rows; row += step) {
    const ScoreRow at = row_at(p, row);
    C* const x = scores + row * p.keys;
    [[maybe_unused]] C held[Rows::kHeld] = {};
    Rows::read(x, p.keys, held);
    const auto value = [&](int64_t j, int c) -> C& { return kCount > 0 ? held[c] : x[j]; };
    C top = no_score<C>();
    Rows::for_columns(p.keys, [&](int64_t j, int c) {
      C& score = value(j, c);
      score = j < at.seen ? finished_score(p, at, j, score) : no_score<C>();
      top = Largest{}(top, score);
    });
    top = Rows::reduce(top, Largest{}, no_score<C>());
    const bool nothing = top == no_score<C>();
    C sum = 0;
    Rows::for_columns(p.keys, [&](int64_t j, int c) {
      C& score = value(j, c);
      score = nothing || j >= at.seen ? C(0) : exponential(score - top);
      sum += score;
    });
    sum = Rows::reduce(sum, Sum{}, C(0));
    Rows::for_columns(p.keys, [&](int64_t j, int c) {
      C& weight = value(j, c);
      weight = nothing ? C(0) : weight / sum * dropout_factor<C>(p, at, j);
    });
    if constexpr (kSplit) Rows::settle();
    Rows::write(x, p.keys, held);
    if (Rows::lane() == 0) lse[at.number] = nothing ? no_score<C>() : top + logarithm(sum);
  }
}

/// In `scores` come the raw scores and go the weights (after dropout), in `d` (may be null) come the gradients of these
/// and go those of the raw scores. `mask_grad` [all queries, keys] (may be null): of the scores before the scale.
template <class C, int kCount, int kLanes, bool kSplit = false>
__global__ void __launch_bounds__(kThreads)
    softmax_gradient_rows(ScoreRows p, C* scores, C* d, const C* lse, C* mask_grad) {
  using Rows = Share<kCount, kLanes, kSplit>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * Rows::kRows;
  for (int64_t row = thread_index() / kLanes; row < p.rows; row += step) {
    const ScoreRow at = row_at(p, row);
    C* const x = scores + row * p.keys;
    C* const dx = d == nullptr ? nullptr : d + row * p.keys;
    const C shift = lse[at.number];
    const bool nothing = shift == no_score<C>();
    [[maybe_unused]] C weights[Rows::kHeld] = {}, gradients[Rows::kHeld] = {}, dropped[Rows::kHeld] = {};
    Rows::read(x, p.keys, weights);
    if (dx != nullptr) Rows::read(dx, p.keys, gradients);
    if constexpr (kSplit) Rows::settle();
    C total = 0;
    Rows::for_columns(p.keys, [&](int64_t j, int c) {
      const bool seen = !nothing && j < at.seen;
      const C raw = kCount > 0 ? weights[c] : x[j];
      const C weight = seen ? exponential(finished_score(p, at, j, raw) - shift) : C(0);
      const C factor = seen ? dropout_factor<C>(p, at, j) : C(0);
      const C gradient = seen && dx != nullptr ? (kCount > 0 ? gradients[c] : dx[j]) * factor : C(0);
      total += weight * gradient;
      if constexpr (kCount > 0) {
        weights[c] = weight, gradients[c] = gradient, dropped[c] = weight * factor;
      } else if (dx != nullptr) {
        x[j] = weight, dx[j] = gradient;
      } else {
        x[j] = weight * factor;
      }
    });
    Rows::write(x, p.keys, dropped);
    if (dx == nullptr) continue;
    total = Rows::reduce(total, Sum{}, C(0));
    Rows::for_columns(p.keys, [&](int64_t j, int c) {
      C weight = 0, gradient = 0;
      if constexpr (kCount > 0) {
        weight = weights[c], gradient = gradients[c];
      } else {
        weight = x[j], gradient = dx[j];
        x[j] = weight * dropout_factor<C>(p, at, j);
      }
      const C ds = !nothing && j < at.seen ? weight * (gradient - total) : C(0);
      if (mask_grad != nullptr) mask_grad[at.number * p.keys + j] = ds;
      if constexpr (kCount > 0) {
        gradients[c] = ds * static_cast<C>(p.scale);
      } else {
        dx[j] = ds * static_cast<C>(p.scale);
      }
    });
    if (kCount > 0) Rows::write(dx, p.keys, gradients);
  }
}

}  // namespace hscuda
