// SPDX-License-Identifier: Apache-2.0
// Kernels that put elements elsewhere, and zeros where none come: cat, flip, triangles, diagonals, slices.
#include "chunks.cuh"
#include "view.h"

namespace hscuda {
namespace {

struct Same {
  template <class T>
  __device__ __forceinline__ T operator()(T value) const {
    return value;
  }
};

// ------------------------------------------------------------------------------------------------------------------
// Results whose elements are those of a tensor or zeros. The layout has four tensors: the result, the source and two
// coordinates of the result.

constexpr int64_t kZero = INT64_MIN;

/// Keeps one side of a diagonal.
struct Triangle {
  int64_t diagonal;
  bool lower;
  __device__ int64_t operator()(const int64_t (&at)[4]) const {
    const int64_t beyond = at[3] - at[2];
    return (lower ? beyond <= diagonal : beyond >= diagonal) ? at[1] : kZero;
  }
};
/// Spreads the last dimension along a diagonal.
struct OnDiagonal {
  int64_t diagonal, stride;
  __device__ int64_t operator()(const int64_t (&at)[4]) const {
    if (at[3] - at[2] != diagonal) return kZero;
    return at[1] + (at[3] < at[2] ? at[3] : at[2]) * stride;
  }
};
/// Spreads a dimension over every `step`th place from `start` on.
struct InSlice {
  int64_t start, step, size, stride;
  __device__ int64_t operator()(const int64_t (&at)[4]) const {
    const int64_t i = at[2] - start;
    if (i < 0) return kZero;
    const int64_t number = step == 1 ? i : i / step;
    return number < size && number * step == i ? at[1] + number * stride : kZero;
  }
};

template <class Word, class F>
__global__ void __launch_bounds__(kThreads) choose_kernel(Layout<4> layout, F from_where, Word* to, const Word* from) {
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[4];
    places_of(layout, i, at);
    const int64_t place = from_where(at);
    to[at[0]] = place == kZero ? Word{} : from[place];
  }
}

/// `source` has y's shape, `first` and `second` are the dimensions whose coordinates f looks at. Elements are words.
template <class Word, class F>
void choose(const Call& call, const F& f, const Tensor& y, const Tensor& source, int first, int second) {
  const Coordinate a(y, first), b(y, second);
  const Layout<4> layout = layout_of<4>({&y, &source, &a, &b});
  launch(call, {.grid = grid_size(y.numel, kThreads), .alone = true}, choose_kernel<Word, F>, layout, f,
         static_cast<Word*>(y.data), static_cast<const Word*>(source.data));
}
template <class F>
halfstep_status choose(const Call& call, const F& f, const Tensor& source, int first, int second) {
  const Tensor& y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  with_word(y.dtype, [&](auto word) { choose<decltype(word)>(call, f, y, source, first, second); });
  return call.launched();
}

halfstep_status triangle(Call& call, bool lower) {
  const int n = call.out[0].ndim;
  const Triangle f{call.attributes<halfstep_diagonal_attributes>().diagonal, lower};
  return choose(call, f, call.in[0], n - 2, n - 1);
}
halfstep_status tril(Call& call) { return triangle(call, true); }
halfstep_status triu(Call& call) { return triangle(call, false); }

halfstep_status diagonal_backward(Call& call) {
  const auto& a = call.attributes<halfstep_diagonal_attributes>();
  const Tensor &y = call.out[0], &g = call.in[0];
  const int dim1 = wrapped(a.dim1, y.ndim), dim2 = wrapped(a.dim2, y.ndim);
  View source(y);
  source.data = g.data;
  int from = 0;
  for (int d = 0; d < y.ndim; ++d) {
    source.own_strides[d] = d == dim1 || d == dim2 ? 0 : g.strides[from++];
  }
  return choose(call, OnDiagonal{a.diagonal, g.strides[g.ndim - 1]}, source, dim1, dim2);
}

// Slices without gaps are runs of both tensors, which are moved in words of up to 16 bytes: of the last dimension left,
// all sizes and steps are counted in words. False if there are gaps.
bool slice_runs(const Call& call, int dim, int64_t start) {
  const Tensor &y = call.out[0], &g = call.in[0];
  const auto item = static_cast<int64_t>(item_size(y.dtype));
  int64_t inner = 1;
  bool straight = y.contiguous;
  for (int d = y.ndim - 1; d >= dim; --d) {
    straight = straight && (g.sizes[d] == 1 || g.strides[d] == inner);
    if (d > dim) inner *= y.sizes[d];
  }
  if (!straight) return false;
  View to(y), from(y);
  from.data = g.data;
  to.ndim = from.ndim = dim + 1;
  uint64_t all = static_cast<uint64_t>((y.sizes[dim] | start | g.sizes[dim]) * inner);
  for (int d = 0; d < dim; ++d) all |= static_cast<uint64_t>(y.strides[d] | g.strides[d]);
  const int64_t bytes = word_bytes(all * static_cast<uint64_t>(item) | reinterpret_cast<uint64_t>(y.data) |
                                   reinterpret_cast<uint64_t>(g.data));
  const int64_t each = bytes / item;
  for (int d = 0; d < dim; ++d) {
    to.own_strides[d] = y.strides[d] / each;
    from.own_strides[d] = g.strides[d] / each;
  }
  to.own_sizes[dim] = from.own_sizes[dim] = y.sizes[dim] * inner / each;
  to.own_strides[dim] = 1;
  from.own_strides[dim] = 0;
  to.numel = from.numel = y.numel / each;
  const InSlice f{start * inner / each, 1, g.sizes[dim] * inner / each, 1};
  with_bytes(bytes, [&](auto word) { choose<decltype(word)>(call, f, to, from, dim, -1); });
  return true;
}

halfstep_status slice_backward(Call& call) {
  const auto& a = call.attributes<halfstep_view_attributes>();
  const Tensor &y = call.out[0], &g = call.in[0];
  const auto dim = static_cast<int>(a.dim);
  if (y.numel == 0) return HALFSTEP_OK;
  if (a.step == 1 && g.numel > 0 && slice_runs(call, dim, a.start)) return call.launched();
  View source(y);
  source.data = g.data;
  for (int d = 0; d < y.ndim; ++d) source.own_strides[d] = d == dim ? 0 : g.strides[d];
  return choose(call, InSlice{a.start, a.step, g.sizes[dim], g.strides[dim]}, source, dim, -1);
}

// ------------------------------------------------------------------------------------------------------------------

halfstep_status flip(Call& call) {
  const Tensor& y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  View from(call.in[0]);
  const halfstep_int_list& dims = call.attributes<halfstep_dims_attributes>().dims;
  for (int i = 0; i < dims.size; ++i) {
    const auto d = static_cast<int>(dims.values[i]);
    from.advance((from.own_sizes[d] - 1) * from.own_strides[d], item_size(from.dtype));
    from.own_strides[d] = -from.own_strides[d];
  }
  with_word(y.dtype, [&](auto word) {
    using Word = decltype(word);
    map<Word, Word>(call, Same{}, y, from);
  });
  return call.launched();
}

// ------------------------------------------------------------------------------------------------------------------
// cat of row-major tensors: each is rows of one length, which lie at one distance from each other in the result.

constexpr int kData = 0, kLength = 1, kOffset = 2;  // columns

template <class Word>
__global__ void __launch_bounds__(kThreads)
    cat_kernel(const __grid_constant__ ChunkTable table, Word* to, int64_t pitch) {
  const Chunk chunk = table.at(blockIdx.x);
  const auto* from = table.address<const Word>(chunk, kData);
  const auto length = static_cast<int64_t>(table.word(chunk, kLength));
  to += static_cast<int64_t>(table.word(chunk, kOffset));
  // Rows of a chunk are counted from that of its first element, by 32-bit arithmetic.
  const int64_t first_row = chunk.begin / length;
  const auto begin = chunk.begin - first_row * length;
  to += first_row * pitch;
  from += first_row * length;
  const auto size = chunk.end - chunk.begin;
  if (begin + size <= length) {
#pragma unroll 4
    for (int64_t i = begin + threadIdx.x; i < begin + size; i += kThreads) to[i] = from[i];
    return;
  }
  // length < begin + size, and begin < length: all of it fits 32 bits.
  const auto divisor = static_cast<uint32_t>(length), end = static_cast<uint32_t>(begin + size);
#pragma unroll 4
  for (uint32_t i = static_cast<uint32_t>(begin) + threadIdx.x; i < end; i += kThreads) {
    const uint32_t row = i / divisor;
    to[row * pitch + (i - row * divisor)] = from[i];
  }
}

// Any strides: a copy for each input.
void cat_views(const Call& call, int dim) {
  View part(call.out[0]);
  for (int i = 0; i < call.n; ++i) {
    const Tensor& x = call.in[i];
    if (x.numel == 0) continue;
    part.own_sizes[dim] = x.sizes[dim];
    part.numel = x.numel;
    with_word(x.dtype, [&](auto word) {
      using Word = decltype(word);
      map<Word, Word>(call, Same{}, part, x);
    });
    part.advance(x.sizes[dim] * part.own_strides[dim], item_size(x.dtype));
  }
}

halfstep_status cat(Call& call) {
  const Tensor& y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  const int dim = wrapped(call.attributes<halfstep_along_attributes>().dim, y.ndim);
  const auto item = static_cast<int64_t>(item_size(y.dtype));
  int64_t inner = 1;
  for (int d = dim + 1; d < y.ndim; ++d) inner *= y.sizes[d];
  bool straight = y.contiguous;
  // Everything in bytes: what divides all of it can be moved at once.
  const int64_t pitch = y.sizes[dim] * inner * item;
  uint64_t all = reinterpret_cast<uint64_t>(y.data) | static_cast<uint64_t>(pitch);
  for (int i = 0; i < call.n; ++i) {
    const Tensor& x = call.in[i];
    if (x.numel == 0) continue;
    straight = straight && x.contiguous;
    all |= reinterpret_cast<uint64_t>(x.data) | static_cast<uint64_t>(x.sizes[dim] * inner * item);
  }
  if (!straight) {
    cat_views(call, dim);
    return call.launched();
  }
  const int64_t bytes = word_bytes(all);
  int64_t offset = 0;
  const auto describe = [&](int i, ChunkColumns& columns) -> int64_t {
    const Tensor& x = call.in[i];
    if (x.numel == 0) return 0;
    const int64_t length = x.sizes[dim] * inner * item / bytes;
    columns.set(kData, reinterpret_cast<uint64_t>(x.data));
    columns.set(kLength, static_cast<uint64_t>(length));
    columns.set(kOffset, static_cast<uint64_t>(offset));
    offset += length;
    return x.numel * item / bytes;
  };
  with_bytes(bytes, [&](auto word) {
    using Word = decltype(word);
    for_each_table(call.n, kChunkElements / 4, describe, [&](const ChunkTable& table) {
      launch_chunks(call, table, true, cat_kernel<Word>, table, static_cast<Word*>(y.data), pitch / bytes);
    });
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "slice_backward", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = slice_backward},
    {.op = "cat", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = cat},
    {.op = "flip", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = flip},
    {.op = "tril", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = tril},
    {.op = "triu", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = triu},
    {.op = "diagonal_backward", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = diagonal_backward},
};

}  // namespace

std::span<const KernelDef> place_kernels() { return kKernels; }

}  // namespace hscuda
