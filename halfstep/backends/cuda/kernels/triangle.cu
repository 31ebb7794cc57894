// SPDX-License-Identifier: Apache-2.0
// Triangles, and the gradients of diagonals and slices: results whose elements are those of a tensor or zeros. The
// layout has four tensors: the result, the source and two coordinates of the result.
#include "device/elementwise.cuh"
#include "device/view.h"

namespace hscuda {
namespace {

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

constexpr KernelDef kKernels[] = {
    {.op = "slice_backward", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = slice_backward},
    {.op = "tril", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = tril},
    {.op = "triu", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = triu},
    {.op = "diagonal_backward", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = diagonal_backward},
};

}  // namespace

std::span<const KernelDef> triangle_kernels() { return kKernels; }

}  // namespace hscuda
