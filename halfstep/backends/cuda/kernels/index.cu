// SPDX-License-Identifier: Apache-2.0
// Reading and writing by index. A wrong index is reported, and what it would read or write is left alone.
#include "device/chunks.h"
#include "device/elementwise.cuh"
#include "device/fault.cuh"
#include "device/index.cuh"

namespace hscuda {
namespace {

// ------------------------------------------------------------------------------------------------------------------
// Elements by index: gather and the scatters.

template <class Word>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(Layout<3> layout, Word* y, const int64_t* index, const Word* x, IndexRange range, int64_t step) {
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[3];
    places_of(layout, i, at);
    const int64_t k = index[at[1]];
    if (range.accepts(k)) y[at[0]] = x[at[2] + k * step];
  }
}

halfstep_status gather(Call& call) {
  const Tensor &x = call.in[0], &index = call.in[1], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  const int dim = wrapped(call.attributes<halfstep_along_attributes>().dim, std::max(x.ndim, index.ndim));
  const View source = across(index, x, dim);
  const Layout<3> layout = layout_of<3>({&y, &index, &source});
  with_word(y.dtype, [&](auto word) {
    using Word = decltype(word);
    launch(call, {.grid = grid_size(y.numel, kThreads), .alone = true}, gather_kernel<Word>, layout,
           static_cast<Word*>(y.data), static_cast<const int64_t*>(index.data), static_cast<const Word*>(x.data),
           IndexRange(call, size_along(x, dim)), stride_along(x, dim));
  });
  return call.launched();
}

// The tensors of a scatter, as the index's elements are walked: the index, y, what is written, the number along the
// dimension, and y's elements numbered one by one.
using ScatterLayout = Layout<5>;

// Which of several for one place is written: the last along the dimension. Numbers from 1, the largest wins.
__global__ void __launch_bounds__(kThreads)
    mark_last(ScatterLayout layout, const int64_t* index, IndexRange range, int64_t slot_step, uint32_t* last) {
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[5];
    places_of(layout, i, at);
    const int64_t k = index[at[0]];
    if (range.accepts(k)) atomicMax(&last[at[4] + k * slot_step], static_cast<uint32_t>(at[3] + 1));
  }
}
// `last` is null where no two can meet.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(ScatterLayout layout, const int64_t* index, IndexRange range, int64_t step, int64_t slot_step,
                   const uint32_t* last, Word* y, const Word* source) {
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[5];
    places_of(layout, i, at);
    const int64_t k = index[at[0]];
    if (!range.accepts(k)) continue;
    if (last && last[at[4] + k * slot_step] != static_cast<uint32_t>(at[3] + 1)) continue;
    y[at[1] + k * step] = source[at[2]];
  }
}
template <class Word>
__global__ void __launch_bounds__(kThreads) scatter_value_kernel(ScatterLayout layout, const int64_t* index,
                                                                 IndexRange range, int64_t step, Word* y, Word value) {
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[5];
    places_of(layout, i, at);
    const int64_t k = index[at[0]];
    if (range.accepts(k)) y[at[1] + k * step] = value;
  }
}

struct Scatter {
  int dim;
  ScatterLayout layout;
  int64_t length, step, slot_step = 0, slots;

  Scatter(const Call& call, int64_t wanted, const Tensor* source)
      : dim(wrapped(wanted, std::max(call.in[1].ndim, call.out[0].ndim))) {
    const Tensor &index = call.in[1], &y = call.out[0];
    length = size_along(index, dim);
    step = stride_along(y, dim);
    slots = y.numel;
    const View to = across(index, y, dim);
    const View from = source ? across(index, *source, -1) : View(index);
    const Coordinate number(index, dim);
    View slot(to);
    int64_t next = 1;
    for (int d = y.ndim - 1; d >= 0; --d) {
      if (d == dim) {
        slot_step = next;
      } else if (d < index.ndim) {
        slot.own_strides[d] = next;
      }
      next *= y.sizes[d];
    }
    layout = layout_of<5>({&index, &to, &from, &number, &slot});
  }
};

halfstep_status scatter(Call& call) {
  const Tensor &index = call.in[1], &source = call.in[2], &y = call.out[0];
  const Scatter s(call, call.attributes<halfstep_along_attributes>().dim, &source);
  if (s.length >= UINT32_MAX) return call.refuse("scatter along more than 2^32 elements");
  const bool meet = s.length > 1 && index.numel > 0;
  uint32_t* last = nullptr;
  if (meet) {
    last = call.workspace<uint32_t>(s.slots);
    if (!last) return call.no_memory();
    clear(call, last, s.slots * 4);
  }
  start_from(call, y, call.in[0]);
  if (index.numel == 0) return call.launched();
  const auto* places = static_cast<const int64_t*>(index.data);
  const IndexRange range(call, size_along(y, s.dim));
  const Launch how{.grid = grid_size(index.numel, kThreads), .alone = true};
  if (meet) launch(call, how, mark_last, s.layout, places, range, s.slot_step, last);
  with_word(y.dtype, [&](auto word) {
    using Word = decltype(word);
    launch(call, how, scatter_kernel<Word>, s.layout, places, range, s.step, s.slot_step, last,
           static_cast<Word*>(y.data), static_cast<const Word*>(source.data));
  });
  return call.launched();
}

halfstep_status scatter_value(Call& call) {
  const auto& a = call.attributes<halfstep_scatter_value_attributes>();
  const Tensor &index = call.in[1], &y = call.out[0];
  start_from(call, y, call.in[0]);
  if (index.numel == 0) return call.launched();
  const Scatter s(call, a.dim, nullptr);
  with_type(y.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T value = a.value.kind == 2 ? convert<T>(a.value.floating) : convert<T>(a.value.integer);
    with_word(y.dtype, [&](auto word) {
      using Word = decltype(word);
      if constexpr (sizeof(Word) == sizeof(T)) {
        launch(call, {.grid = grid_size(index.numel, kThreads), .alone = true}, scatter_value_kernel<Word>, s.layout,
               static_cast<const int64_t*>(index.data), IndexRange(call, size_along(y, s.dim)), s.step,
               static_cast<Word*>(y.data), std::bit_cast<Word>(value));
      }
    });
  });
  return call.launched();
}

// ------------------------------------------------------------------------------------------------------------------
// Rows by index: y is [outer, rows, inner], and each row of `inner` elements is one of x's.

constexpr int64_t kNowhere = INT64_MIN, kZeros = INT64_MIN + 1;

/// Rows that an index along one dimension says.
struct ByIndex {
  Layout<1> layout;  ///< of the index, in row-major order
  const int64_t* index;
  int64_t padding;  ///< the row that reads as zeros; -1: none
  int64_t step;     ///< from row to row of x, in bytes
  IndexRange range;
  __device__ int64_t operator()(int64_t row) const {
    int64_t at[1];
    places_of(layout, row, at);
    const int64_t k = index[at[0]];
    if (!range.accepts(k)) return kNowhere;
    return k == padding ? kZeros : k * step;
  }
};
/// Rows whose places (in elements) have been worked out.
struct ByPlace {
  const int64_t* places;
  int64_t item;
  __device__ int64_t operator()(int64_t row) const { return places[row] < 0 ? kNowhere : places[row] * item; }
};

/// How x's elements lie beside the indexed dimension.
struct RowShape {
  Layout<1> outer, inner;   ///< in row-major order, places in elements of x
  Split by_inner, by_rows;  ///< of y's words, of rows of y
  int64_t total;            ///< words of y
  int64_t item;             ///< bytes of an element of x
  bool straight;            ///< inner elements of x lie one behind the other
};

template <class Word, class Rows>
__global__ void __launch_bounds__(kThreads) copy_rows(RowShape shape, Rows rows, Word* y, const unsigned char* x) {
  for (int64_t i = thread_index(); i < shape.total; i += grid_threads()) {
    int64_t c, row, outer_at[1] = {0};
    const int64_t line = shape.by_inner.divide(i, &c);
    const int64_t outer = shape.by_rows.divide(line, &row);
    const int64_t place = rows(row);
    if (place == kNowhere) continue;
    if (place == kZeros) {
      y[i] = Word{};
      continue;
    }
    if (outer != 0) places_of(shape.outer, outer, outer_at);
    const unsigned char* from = x + place + outer_at[0] * shape.item;
    if (shape.straight) {
      y[i] = reinterpret_cast<const Word*>(from)[c];
    } else {
      int64_t at[1];
      places_of(shape.inner, c, at);
      y[i] = *reinterpret_cast<const Word*>(from + at[0] * shape.item);
    }
  }
}

/// x's dimensions before `begin` are outer ones, those from `end` on inner ones. `step`: from row to row of x, in
/// elements, as far as it is known. y is row-major.
template <class Rows>
halfstep_status copy_by_rows(const Call& call, const Tensor& x, int begin, int end, int64_t num_rows, uint64_t steps,
                             const Rows& rows) {
  const Tensor& y = call.out[0];
  RowShape shape;
  const int64_t* outer[] = {x.strides};
  const int64_t* inner[] = {x.strides + end};
  shape.outer = row_major<1>(begin, x.sizes, outer);
  shape.inner = row_major<1>(x.ndim - end, x.sizes + end, inner);
  shape.item = static_cast<int64_t>(item_size(x.dtype));
  shape.straight = shape.inner.linear();
  int64_t bytes = shape.item;
  if (shape.straight) {
    // What divides every address and the length of a row can be moved at once.
    uint64_t all = steps | static_cast<uint64_t>(shape.inner.numel);
    for (int d = 0; d < begin; ++d) all |= static_cast<uint64_t>(x.strides[d]);
    bytes =
        word_bytes(all * item_size(x.dtype) | reinterpret_cast<uint64_t>(x.data) | reinterpret_cast<uint64_t>(y.data));
  }
  const int64_t words = shape.inner.numel * shape.item / bytes;
  shape.total = y.numel * shape.item / bytes;
  shape.by_inner = Split(words, shape.total);
  shape.by_rows = Split(num_rows, shape.total);
  with_bytes(bytes, [&](auto word) {
    using Word = decltype(word);
    launch(call, {.grid = grid_size(shape.total, kThreads), .alone = true}, copy_rows<Word, Rows>, shape, rows,
           static_cast<Word*>(y.data), static_cast<const unsigned char*>(x.data));
  });
  return call.launched();
}

halfstep_status by_index(Call& call, int dim, int64_t padding) {
  const Tensor &x = call.in[0], &index = call.in[1];
  if (call.out[0].numel == 0) return HALFSTEP_OK;
  if (!call.out[0].contiguous) return call.refuse("a result that is not row-major");
  const int64_t step = stride_along(x, dim);
  const ByIndex rows{row_major_of(index), static_cast<const int64_t*>(index.data), padding,
                     step * static_cast<int64_t>(item_size(x.dtype)), IndexRange(call, size_along(x, dim))};
  const int end = x.ndim == 0 ? 0 : dim + 1;
  return copy_by_rows(call, x, dim, end, index.numel, static_cast<uint64_t>(step), rows);
}

halfstep_status embedding(Call& call) {
  const auto& a = call.attributes<halfstep_embedding_attributes>();
  return by_index(call, 0, a.zero_padding ? a.padding_idx : -1);
}
halfstep_status index_select(Call& call) {
  return by_index(call, wrapped(call.attributes<halfstep_along_attributes>().dim, call.in[0].ndim), -1);
}

halfstep_status index(Call& call) {
  const Tensor &x = call.in[0], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  if (!y.contiguous) return call.refuse("a result that is not row-major");
  const int k = call.n - 1, broadcast = y.ndim - (x.ndim - k);
  int64_t count = 1;
  for (int d = 0; d < broadcast; ++d) count *= y.sizes[d];
  auto* places = call.workspace<int64_t>(count);
  if (!places) return call.no_memory();
  number_places(call, call.in + 1, k, x.sizes, x.strides, broadcast, y.sizes, places, int64_t{-1});
  uint64_t steps = 0;
  for (int i = 0; i < k; ++i) steps |= static_cast<uint64_t>(x.strides[i]);
  return copy_by_rows(call, x, 0, k, count, steps, ByPlace{places, static_cast<int64_t>(item_size(x.dtype))});
}

constexpr KernelDef kKernels[] = {
    {.op = "gather", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = gather},
    {.op = "scatter", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = scatter},
    {.op = "scatter_value", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = scatter_value},
    {.op = "embedding", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = embedding},
    {.op = "index_select", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = index_select},
    {.op = "index", .dtypes = kAll, .layouts = kStrided, .attributes = false, .run = index},
};

}  // namespace

std::span<const KernelDef> index_kernels() { return kKernels; }

}  // namespace hscuda
