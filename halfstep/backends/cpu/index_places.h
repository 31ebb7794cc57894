// SPDX-License-Identifier: Apache-2.0
// How the kernels that read or write by index walk tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "halfstep/backends/cpu/index_check.h"
#include "halfstep/backends/cpu/move.h"

namespace halfstep::cpu {

/// gather and scatter walk lines of the index along its dimension: no two lines meet in one element, so that lines run
/// in parallel and each in order.
struct Lines {
  int dim = 0;
  int others = 0;
  std::int64_t sizes[kMaxDims];       // of the index, without the dimension
  std::int64_t strides[3][kMaxDims];  // of the index and up to two more tensors
  std::int64_t steps[3] = {0, 0, 0};  // along the dimension
  std::int64_t count = 1, length = 1;
  bool side_by_side = true;  // along the dimension, in all of the tensors

  Lines(std::int64_t wanted, std::initializer_list<const TensorView*> views) {
    const TensorView& index = **views.begin();
    int n = 1;
    for (const TensorView* v : views) n = std::max(n, v->ndim);
    dim = static_cast<int>(wanted < 0 ? wanted + n : wanted);
    length = index.ndim == 0 ? 1 : index.sizes[dim];
    for (int d = 0; d < index.ndim; ++d) {
      if (d == dim) continue;
      sizes[others] = index.sizes[d];
      count *= index.sizes[d];
      int k = 0;
      for (const TensorView* v : views) strides[k++][others] = v->strides[d];
      ++others;
    }
    int k = 0;
    for (const TensorView* v : views) {
      steps[k] = v->ndim == 0 ? 0 : v->strides[dim];
      side_by_side &= steps[k++] == 1;
    }
  }

  void offsets(std::int64_t line, std::int64_t (&at)[3]) const {
    at[0] = at[1] = at[2] = 0;
    for (int d = others - 1; d >= 0; --d) {
      const std::int64_t i = line % sizes[d];
      line /= sizes[d];
      for (int k = 0; k < 3; ++k) at[k] += i * strides[k][d];
    }
  }

  /// Calls f(steps...) with the steps along the dimension, as constants where they all are 1.
  template <class F>
  void with_steps(F&& f) const {
    constexpr std::integral_constant<std::int64_t, 1> kOne;
    side_by_side ? f(kOne, kOne, kOne) : f(steps[0], steps[1], steps[2]);
  }

  template <class F>
  void for_each(F&& f) const {
    if (count == 0 || length == 0) return;
    parallel_for(count, std::max<std::int64_t>(1, kGrain / 4 / length), [&](std::int64_t begin, std::int64_t end) {
      std::int64_t at[3];
      for (std::int64_t line = begin; line < end; ++line) {
        offsets(line, at);
        f(at);
      }
    });
  }
};

inline std::int64_t dim_size(const TensorView& v, std::int64_t wanted) {
  if (v.ndim == 0) return 1;
  return v.sizes[wanted < 0 ? wanted + v.ndim : wanted];
}

/// Indices in row-major order, whatever their strides.
inline std::int64_t index_at(const TensorView& index, std::int64_t i) {
  const auto* data = static_cast<const std::int64_t*>(index.data);
  if (index.contiguous) return data[i];
  std::int64_t offset = 0;
  for (int d = index.ndim - 1; d >= 0; --d) {
    offset += i % index.sizes[d] * index.strides[d];
    i /= index.sizes[d];
  }
  return data[offset];
}

/// The output starts as the input, unless it is the same memory.
inline void start_from(const TensorView& out, const TensorView& input) {
  if (out.data != input.data && out.numel) move_elements(out, input);
}

/// Sums in float32 for the 16-bit types need a place of their own as large as the output.
template <class T>
constexpr bool kWideSums = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;
template <class T>
using Sum = std::conditional_t<kWideSums<T>, float, T>;

/// A tensor around one dimension, seen as [outer, dimension, inner]. Row-major tensors have one outer and one inner
/// step; others are walked element by element.
struct Around {
  std::int64_t outer = 1, inner = 1;
  int dim = 0;
  Around(const TensorView& v, std::int64_t wanted) : dim(static_cast<int>(wanted < 0 ? wanted + v.ndim : wanted)) {
    if (v.ndim == 0) dim = 0;
    for (int d = 0; d < dim; ++d) outer *= v.sizes[d];
    for (int d = dim + 1; d < v.ndim; ++d) inner *= v.sizes[d];
  }
};
/// Offset of element `i` in row-major order over dimensions [begin, end).
inline std::int64_t offset_of(const TensorView& v, const std::int64_t* strides, int begin, int end, std::int64_t i) {
  std::int64_t offset = 0;
  for (int d = end - 1; d >= begin; --d) {
    offset += i % v.sizes[d] * strides[d];
    i /= v.sizes[d];
  }
  return offset;
}
/// The step between neighbours of the inner part where it is one, else 0.
inline std::int64_t inner_step(const TensorView& v, const std::int64_t* strides, int dim) {
  std::int64_t step = 1, expected = 0;
  bool first = true;
  for (int d = v.ndim - 1; d > dim; --d) {
    if (v.sizes[d] == 1) continue;
    if (first) {
      step = strides[d];
      first = false;
    } else if (strides[d] != expected) {
      return 0;
    }
    expected = strides[d] * v.sizes[d];
  }
  return step;
}

/// Where each place of the (broadcast) indices points to in a tensor whose first dimensions they index.
struct Places {
  std::int64_t count = 0;
  std::int64_t* offsets = nullptr;  // in elements of the tensor, `count` of them
  Status status = Status::ok;

  // `strides` are the tensor's; sizes those of all of its dimensions.
  Places(KernelContext* context, const TensorView* index, int k, const TensorView& x, const std::int64_t* strides,
         const std::int64_t* broadcast, int ndim) {
    count = 1;
    for (int d = 0; d < ndim; ++d) count *= broadcast[d];
    offsets = static_cast<std::int64_t*>(
        context->workspace(context, static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(std::int64_t)));
    if (!offsets) {
      status = Status::failed;
      return;
    }
    if (runs_dry(context)) return;
    std::fill(offsets, offsets + count, std::int64_t{0});
    for (int i = 0; i < k; ++i) {
      if (count != 0 && !check_indices(context, index[i], x.sizes[i], i, x.ndim, true)) {
        status = Status::failed;
        return;
      }
      TensorView to{offsets, broadcast, nullptr, count, ndim, DType::i64, true, true};
      std::int64_t row_major[kMaxDims];
      std::int64_t step = 1;
      for (int d = ndim - 1; d >= 0; --d) {
        row_major[d] = step;
        step *= broadcast[d];
      }
      to.strides = row_major;
      const StridedLoop<2> loop({&to, &index[i]});
      const std::int64_t size = x.sizes[i], stride = strides[i];
      loop.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* s) {
        const auto* values = static_cast<const std::int64_t*>(index[i].data) + at[1];
        for (std::int64_t j = 0; j < n; ++j) {
          const std::int64_t v = values[j * s[1]];
          offsets[at[0] + j * s[0]] += (v < 0 ? v + size : v) * stride;
        }
      });
    }
  }
};

/// The dimensions that are not indexed, row-major: offsets of element j in two tensors.
struct Rest {
  int ndim = 0;
  std::int64_t sizes[kMaxDims];
  std::int64_t strides[2][kMaxDims];
  std::int64_t count = 1;
  bool straight = true;  // both run through memory without gaps

  Rest(const std::int64_t* all_sizes, int from, int to, const std::int64_t* a, const std::int64_t* b) {
    for (int d = from; d < to; ++d) {
      sizes[ndim] = all_sizes[d];
      strides[0][ndim] = a[d];
      strides[1][ndim] = b[d - from];
      count *= all_sizes[d];
      ++ndim;
    }
    std::int64_t step = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      if (sizes[d] != 1) straight &= strides[0][d] == step && strides[1][d] == step;
      step *= sizes[d];
    }
  }
  void offsets(std::int64_t j, std::int64_t& a, std::int64_t& b) const {
    a = b = 0;
    for (int d = ndim - 1; d >= 0; --d) {
      const std::int64_t i = j % sizes[d];
      j /= sizes[d];
      a += i * strides[0][d];
      b += i * strides[1][d];
    }
  }
};

}  // namespace halfstep::cpu
