// SPDX-License-Identifier: Apache-2.0
// How reductions and ops along one dimension are shared out among threads: plain arithmetic, which tests check on the
// host.
#pragma once

#include "device/geometry.h"

namespace hscuda {

/// The smallest power of two that is at least n (1 for n below 1).
constexpr int64_t power_of_two(int64_t n) {
  return n <= 1 ? 1 : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n)));
}

/// Puts a dimension outside of those that are there, merged with the last where all tensors lie straight across both.
template <int N>
void add_dimension(Layout<N>& layout, int64_t size, const int64_t (&stride)[N]) {
  layout.numel *= size;
  if (size == 1) return;
  const int last = layout.ndim - 1;
  bool straight = last >= 0;
  for (int k = 0; straight && k < N; ++k) straight = stride[k] == layout.strides[last][k] * layout.sizes[last];
  if (straight) {
    layout.sizes[last] *= size;
    return;
  }
  layout.sizes[layout.ndim] = size;
  for (int k = 0; k < N; ++k) layout.strides[layout.ndim][k] = stride[k];
  ++layout.ndim;
}
/// After the last dimension: there is at least one, and what places() needs is there.
template <int N>
void close_dimensions(Layout<N>& layout) {
  if (layout.ndim == 0) {
    layout.sizes[0] = 1;
    for (int k = 0; k < N; ++k) layout.strides[0][k] = 1;
    layout.ndim = 1;
  }
  if (!layout.narrow() || layout.numel == 0) return;
  for (int d = 0; d < layout.ndim; ++d) layout.divisors[d] = Divisor(static_cast<uint32_t>(layout.sizes[d]));
}

/// A reduction of a tensor to outputs that lie row-major. Where the elements of one output are next to each other in
/// memory, `lanes` threads share an output (a row), else each thread has its own (columns), so that threads that are
/// neighbours read neighbours.
struct Reduction {
  Layout<2> kept;     ///< the outputs' places in the input and in the result; the order is that of the input's memory
  Layout<1> reduced;  ///< the places of one output's elements from there
  bool columns = false;
  int width = 1;  ///< elements of one access, in memory side by side: of a row, or `width` outputs of a column
  int lanes =
      1;  ///< a power of two: threads to a row, up to a warp, or a whole block; of columns: threads side by side
  int64_t parts = 1;  ///< blocks that share an output's elements; more than 1: their results are joined afterwards
  int64_t part_length = 0;  ///< elements of a part, a multiple of `width` for rows
  unsigned blocks = 1;      ///< of one part

  int64_t outputs() const { return kept.numel; }
  int64_t length() const { return reduced.numel; }
};

/// Bit d is set where dimension d is reduced. None listed: all.
inline uint32_t dims_mask(const int64_t* dims, int count, int ndim) {
  uint32_t mask = count == 0 ? ~0u : 0u;
  for (int i = 0; i < count; ++i) mask |= 1u << ((dims[i] < 0 ? dims[i] + ndim : dims[i]) & 31);
  return mask;
}

namespace plan {

/// Whether stride a is nearer in memory than b; repeated elements (0) come last.
constexpr bool nearer(int64_t a, int64_t b) { return a != 0 && (b == 0 || a < b); }

/// Whether all strides but the innermost dimension's (of the first tensor) and that one's size are whole packs.
template <int N>
bool whole_packs(const Layout<N>& layout, int64_t width, int from) {
  for (int d = from; d < layout.ndim; ++d) {
    if (layout.strides[d][0] % width != 0) return false;
  }
  return true;
}

inline void share_columns(Reduction& r, int64_t widest, bool aligned, int processors) {
  r.columns = true;
  const bool packs = aligned && r.kept.strides[0][0] == 1 && r.kept.sizes[0] % widest == 0 &&
                     whole_packs(r.kept, widest, 1) && whole_packs(r.reduced, widest, 0);
  r.width = packs ? static_cast<int>(widest) : 1;
  const int64_t groups = r.outputs() / r.width;
  // No wider than a run in memory; narrower where a last block would be much empty.
  int64_t lanes = std::min<int64_t>(32, power_of_two(r.kept.sizes[0] / r.width));
  while (lanes > 8 && (divide_up(groups, lanes) * lanes - groups) * 8 > groups) lanes /= 2;
  r.lanes = static_cast<int>(lanes);
  r.blocks = static_cast<unsigned>(divide_up(groups, lanes));
  // Enough blocks for the whole GPU, of at least 8 rows a thread.
  const int64_t most = divide_up(r.length(), kThreads / lanes * 8);
  r.parts = std::clamp<int64_t>(int64_t{processors} * 8 / r.blocks, 1, std::min<int64_t>(most, 1024));
  r.part_length = divide_up(r.length(), r.parts);
  r.parts = divide_up(r.length(), r.part_length);
}

inline void share_rows(Reduction& r, int64_t widest, bool aligned, int processors) {
  const int64_t length = std::max<int64_t>(r.length(), 1);
  if (r.reduced.strides[0][0] == 1 && widest > 1) {
    const bool whole = aligned && r.reduced.sizes[0] % widest == 0 && whole_packs(r.reduced, widest, 1) &&
                       whole_packs(r.kept, widest, 0);
    // One run may begin and end anywhere: a few threads then take the ends by themselves.
    if ((whole && (r.reduced.ndim == 1 || length >= widest)) || (r.reduced.ndim == 1 && length >= 16 * widest)) {
      r.width = static_cast<int>(widest);
    }
  }
  const int64_t packs = divide_up(length, r.width), outputs = r.outputs();
  const bool few = outputs < int64_t{processors} * 32;  // warps that a GPU wants
  int64_t lanes = std::min<int64_t>(32, power_of_two(few ? packs : divide_up(packs, 4)));
  if (packs >= 1024 || (few && packs >= 256)) lanes = kThreads;
  r.lanes = static_cast<int>(lanes);
  r.blocks = static_cast<unsigned>(std::max<int64_t>(1, divide_up(outputs, kThreads / lanes)));
  r.part_length = packs * r.width;
  if (lanes < kThreads || outputs == 0) return;
  const int64_t most = divide_up(packs, kThreads * 8);
  r.parts = std::clamp<int64_t>(int64_t{processors} * 8 / outputs, 1, std::min<int64_t>(most, 1024));
  r.part_length = divide_up(packs, r.parts) * r.width;
  r.parts = divide_up(packs * r.width, r.part_length);
}

}  // namespace plan

/// The plan for reducing the dimensions of `mask`. `widest`: elements of 16 bytes, or 1 where a kernel takes them one
/// by one.
inline Reduction plan_reduction(const halfstep_tensor& x, uint32_t mask, int64_t widest, int processors) {
  Reduction r;
  int64_t out_stride[HALFSTEP_MAX_DIMS] = {}, out = 1;
  int order[HALFSTEP_MAX_DIMS], n = 0;
  for (int d = x.ndim - 1; d >= 0; --d) {
    if ((mask >> d & 1) == 0) {
      out_stride[d] = out;
      out *= x.sizes[d];
    }
    order[n++] = d;
  }
  std::stable_sort(order, order + n, [&](int a, int b) { return plan::nearer(x.strides[a], x.strides[b]); });
  r.kept.numel = r.reduced.numel = 1;
  for (int i = 0; i < n; ++i) {
    const int d = order[i];
    if (mask >> d & 1) {
      add_dimension<1>(r.reduced, x.sizes[d], {x.strides[d]});
    } else {
      add_dimension<2>(r.kept, x.sizes[d], {x.strides[d], out_stride[d]});
    }
  }
  close_dimensions(r.kept);
  close_dimensions(r.reduced);
  const bool aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  const bool columns = r.outputs() > 1 && r.length() > 1 && plan::nearer(r.kept.strides[0][0], r.reduced.strides[0][0]);
  if (columns) {
    plan::share_columns(r, widest, aligned, processors);
  } else {
    plan::share_rows(r, widest, aligned, processors);
  }
  return r;
}

/// The rows of N tensors along one dimension, in row-major order. Tensor 0 gives the sizes.
template <int N>
struct Rows {
  Layout<N> rows;  ///< places of the rows' first elements
  int64_t length = 1;
  int64_t strides[N];  ///< from an element of a row to the next

  int64_t count() const { return rows.numel; }
  /// Whether rows of tensor k can be read in packs of `width` elements.
  bool packed(int k, const void* data, int64_t width, int64_t item) const {
    if (strides[k] != 1 || length % width != 0 || reinterpret_cast<uintptr_t>(data) % (width * item) != 0) return false;
    for (int d = 0; d < rows.ndim; ++d) {
      if (rows.sizes[d] != 1 && rows.strides[d][k] % width != 0) return false;
    }
    return true;
  }
};

/// `lacks` bit k: tensor k has not the dimension (nor counts it), as targets and results.
template <int N>
Rows<N> rows_of(const halfstep_tensor* const (&tensors)[N], int64_t dim, uint32_t lacks = 0) {
  Rows<N> r;
  const halfstep_tensor& first = *tensors[0];
  for (int64_t& s : r.strides) s = 1;
  r.rows.numel = 1;
  for (int d = first.ndim - 1; d >= 0; --d) {
    int64_t stride[N];
    for (int k = 0; k < N; ++k) {
      const bool lacking = lacks >> k & 1;
      stride[k] = !lacking ? tensors[k]->strides[d] : d == dim ? 0 : tensors[k]->strides[d > dim ? d - 1 : d];
    }
    if (d == dim) {
      r.length = first.sizes[d];
      for (int k = 0; k < N; ++k) r.strides[k] = r.length == 1 ? 1 : stride[k];
    } else {
      add_dimension<N>(r.rows, first.sizes[d], stride);
    }
  }
  close_dimensions(r.rows);
  return r;
}

/// Threads to a row, for kernels that read `each` elements of a row by a thread at a time: a power of two up to 32, or
/// kThreads. One where neighbouring rows are nearer than a row's own elements and there are rows enough.
template <int N>
int lanes_of(const Rows<N>& r, int64_t each, int processors) {
  const bool across = r.rows.sizes[0] > 1 && plan::nearer(r.rows.strides[0][0], r.strides[0]);
  if (across && (r.length <= 32 || r.count() >= int64_t{processors} * 64)) return 1;
  const int64_t packs = divide_up(r.length, each);
  if (packs > 128) return kThreads;
  return static_cast<int>(std::min<int64_t>(32, power_of_two(packs)));
}

/// Blocks that share each of `rows` rows of `length` elements where a block alone reads `each` elements a thread at a
/// time: enough for all processors, of 8 such rounds or more.
inline int64_t parts_of_rows(int64_t rows, int64_t length, int64_t each, int processors) {
  const int64_t most = divide_up(length, each * kThreads * 8);
  return std::clamp<int64_t>(int64_t{processors} * 8 / std::max<int64_t>(rows, 1), 1, std::min<int64_t>(most, 1024));
}

}  // namespace hscuda
