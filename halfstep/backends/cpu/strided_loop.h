// SPDX-License-Identifier: Apache-2.0
// Walks several tensors of one (broadcast) shape together: dimensions are put in the order of the output's memory and
// merged where they can be, so that most calls are one straight run.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "halfstep/core/shape.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {

/// The loop over N operands; operand 0 is the output. Strides are in elements, 0 where an operand is repeated.
template <int N>
struct StridedLoop {
  int ndim = 0;  ///< after merging; dimension 0 is the innermost
  std::int64_t sizes[kMaxDims];
  std::int64_t strides[N][kMaxDims];
  std::int64_t numel = 1;

  /// Whether all operands are walked as one run with unit stride.
  bool straight() const {
    if (ndim > 1) return false;
    for (int k = 0; k < N; ++k) {
      if (ndim == 1 && strides[k][0] != 1) return false;
    }
    return true;
  }

  explicit StridedLoop(const std::array<const TensorView*, N>& views) {
    const TensorView& out = *views[0];
    numel = out.numel;
    bool all_straight = out.contiguous;
    for (int k = 1; all_straight && k < N; ++k) {
      all_straight = views[k]->contiguous && views[k]->numel == out.numel;
    }
    if (all_straight) {
      ndim = 1;
      sizes[0] = numel;
      for (int k = 0; k < N; ++k) strides[k][0] = 1;
      return;
    }
    // Innermost first: by the output's stride, then by the first input's.
    int order[kMaxDims];
    int n = 0;
    for (int i = out.ndim - 1; i >= 0; --i) {
      if (out.sizes[i] != 1) order[n++] = i;
    }
    const auto stride_of = [&](int k, int dim) -> std::int64_t {
      const TensorView& v = *views[k];
      const int d = dim - (out.ndim - v.ndim);
      return d < 0 || v.sizes[d] == 1 ? 0 : v.strides[d];
    };
    for (int i = 1; i < n; ++i) {  // insertion sort, stable
      const int dim = order[i];
      int j = i;
      for (; j > 0 && out.strides[dim] < out.strides[order[j - 1]]; --j) order[j] = order[j - 1];
      order[j] = dim;
    }
    for (int j = 0; j < n; ++j) {
      const std::int64_t size = out.sizes[order[j]];
      std::int64_t s[N];
      for (int k = 0; k < N; ++k) s[k] = stride_of(k, order[j]);
      bool merge = ndim > 0;
      for (int k = 0; merge && k < N; ++k) merge = s[k] == strides[k][ndim - 1] * sizes[ndim - 1];
      if (merge) {
        sizes[ndim - 1] *= size;
      } else {
        sizes[ndim] = size;
        for (int k = 0; k < N; ++k) strides[k][ndim] = s[k];
        ++ndim;
      }
    }
    if (ndim == 0) {
      ndim = 1;
      sizes[0] = 1;
      for (int k = 0; k < N; ++k) strides[k][0] = 1;
    }
  }

  /// Calls `f(offsets, n, strides)` for runs along the innermost dimension, in parallel when there is enough work:
  /// element j of operand k of a run is at offsets[k] + j * strides[k]. `grain` is the number of elements worth a
  /// thread.
  template <class F>
  void for_each_run(std::int64_t grain, F&& f) const {
    if (numel == 0) return;
    parallel_for(numel, grain, [&](std::int64_t begin, std::int64_t end) { for_runs(begin, end, f); });
  }

  /// How many pieces there are of up to `together` steps along dimension 1, each with all of dimension 0: for loops
  /// whose runs along dimension 0 are too short to be worth a call each.
  std::int64_t pieces(std::int64_t together) const {
    std::int64_t n = (sizes[1] + together - 1) / together;
    for (int d = 2; d < ndim; ++d) n *= sizes[d];
    return n;
  }
  /// Calls f(offsets, steps) for pieces [begin, end), on this thread.
  template <class F>
  void for_pieces(std::int64_t begin, std::int64_t end, std::int64_t together, F&& f) const {
    const std::int64_t along = (sizes[1] + together - 1) / together;
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t first = piece % along * together;
      std::int64_t offsets[N], rest = piece / along;
      for (int k = 0; k < N; ++k) offsets[k] = first * strides[k][1];
      for (int d = 2; d < ndim; ++d) {
        for (int k = 0; k < N; ++k) offsets[k] += rest % sizes[d] * strides[k][d];
        rest /= sizes[d];
      }
      f(offsets, std::min(together, sizes[1] - first));
    }
  }

  /// The same for elements [begin, end), on this thread.
  template <class F>
  void for_runs(std::int64_t begin, std::int64_t end, F&& f) const {
    std::int64_t inner[N];
    for (int k = 0; k < N; ++k) inner[k] = strides[k][0];
    std::int64_t index[kMaxDims] = {};
    std::int64_t rest = begin;
    std::int64_t offsets[N] = {};
    for (int d = 0; d < ndim; ++d) {
      index[d] = rest % sizes[d];
      rest /= sizes[d];
      for (int k = 0; k < N; ++k) offsets[k] += index[d] * strides[k][d];
    }
    for (std::int64_t at = begin; at < end;) {
      const std::int64_t n = std::min(sizes[0] - index[0], end - at);
      f(offsets, n, inner);
      at += n;
      for (int k = 0; k < N; ++k) offsets[k] -= index[0] * strides[k][0];
      index[0] = 0;
      for (int d = 1; d < ndim; ++d) {
        if (++index[d] < sizes[d]) {
          for (int k = 0; k < N; ++k) offsets[k] += strides[k][d];
          break;
        }
        for (int k = 0; k < N; ++k) offsets[k] -= (sizes[d] - 1) * strides[k][d];
        index[d] = 0;
      }
    }
  }
};

/// Elements worth a thread of their own for cheap elementwise work.
inline constexpr std::int64_t kGrain = 32768;

}  // namespace halfstep::cpu
