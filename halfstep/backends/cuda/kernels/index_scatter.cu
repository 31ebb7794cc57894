// SPDX-License-Identifier: Apache-2.0
// Sums by index: the places are sorted, so that what goes to one place lies together in its order, and sums are the
// same in every run.
#include <limits>

#include "device/sort_keys.cuh"

namespace hscuda {
namespace {

// ------------------------------------------------------------------------------------------------------------------
// Rows of a source, each with a key, added up into rows of a result. Sorted rows are cut into tiles of one length; a
// key whose rows lie in one tile is done there, one that spans tiles is put together from their parts afterwards.

constexpr int64_t kTileRows = 32;

/// Where rows and columns lie; numbers are row-major.
struct SumShape {
  Layout<1> from_rows, to_rows;  ///< by row of the source, by key
  Layout<2> columns;             ///< in the source and in the result
  Split by_columns;
  int64_t rows;   ///< of the source
  uint32_t keys;  ///< that count; larger ones are passed over
  bool add;       ///< to what the result holds
  int to_dtype;
};

template <class T>
using Joined = std::conditional_t<std::is_same_v<T, float>, double, T>;

// Integers wrap around: through unsigned numbers.
template <class T>
__device__ __forceinline__ T plus(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}
template <class T>
__device__ __forceinline__ T times(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

/// The result has `In`s as the source does; only gradients in floating types differ.
template <class In, class S>
__device__ void write_sum(const SumShape& shape, void* to, uint32_t key, int64_t column, S sum) {
  int64_t row[1];
  places_of(shape.to_rows, key, row);
  const int64_t place = row[0] + column;
  const auto write = [&](auto zero) {
    using T = decltype(zero);
    T& element = static_cast<T*>(to)[place];
    element = convert<T>(shape.add ? plus(static_cast<S>(value_of(element)), sum) : sum);
  };
  if constexpr (std::is_floating_point_v<S>) {
    with_floating(shape.to_dtype, write);
  } else {
    write(In{});
  }
}

// A thread for each tile and column. Of keys that span tiles the part in this one goes to `heads` where it began
// before, else to `tails`.
template <class In>
__global__ void __launch_bounds__(kThreads)
    sum_tiles(SumShape shape, Sorted sorted, Accumulate<In> alpha, const In* from, void* to, Accumulate<In>* heads,
              Accumulate<In>* tails) {
  using S = Accumulate<In>;
  constexpr int kFlight = 4;
  const int64_t n = shape.rows, tiles = divide_up(n, kTileRows), columns = shape.by_columns.size;
  for (int64_t i = thread_index(); i < tiles * columns; i += grid_threads()) {
    int64_t column, at[2];
    const int64_t tile = shape.by_columns.divide(i, &column);
    places_of(shape.columns, column, at);
    const int64_t begin = tile * kTileRows, end = min(begin + kTileRows, n);
    uint32_t key = sorted.keys[begin];
    bool before = begin > 0 && sorted.keys[begin - 1] == key;
    S sum = 0;
    for (int64_t r = begin; r < end; r += kFlight) {
      uint32_t keys[kFlight];
      In values[kFlight];
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (r + u >= end) break;
        keys[u] = sorted.keys[r + u];
        int64_t row[1];
        places_of(shape.from_rows, sorted.numbers[r + u], row);
        values[u] = from[row[0] + at[0]];
      }
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (r + u >= end) break;
        if (keys[u] != key) {
          if (key < shape.keys) {
            if (before) {
              heads[i] = sum;
            } else {
              write_sum<In>(shape, to, key, at[1], sum);
            }
          }
          key = keys[u];
          before = false;
          sum = 0;
        }
        sum = plus(sum, times(alpha, static_cast<S>(value_of(values[u]))));
      }
    }
    if (key >= shape.keys) continue;
    if (before) {
      heads[i] = sum;
    } else if (end < n && sorted.keys[end] == key) {
      tails[i] = sum;
    } else {
      write_sum<In>(shape, to, key, at[1], sum);
    }
  }
}

// A thread for each tile and column puts the key together that begins in the tile and goes on after it, if there is
// one.
template <class In>
__global__ void __launch_bounds__(kThreads) join_tiles(SumShape shape, const uint32_t* keys, void* to,
                                                       const Accumulate<In>* heads, const Accumulate<In>* tails) {
  using Total = Joined<Accumulate<In>>;
  const int64_t n = shape.rows, tiles = divide_up(n, kTileRows), columns = shape.by_columns.size;
  for (int64_t i = thread_index(); i < (tiles - 1) * columns; i += grid_threads()) {
    int64_t column, at[2];
    const int64_t tile = shape.by_columns.divide(i, &column);
    const int64_t begin = tile * kTileRows, end = begin + kTileRows;
    const uint32_t key = keys[end - 1];
    if (keys[end] != key || key >= shape.keys) continue;
    if (keys[begin] == key && begin > 0 && keys[begin - 1] == key) continue;
    // The last row with this key.
    int64_t low = end, high = n - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (keys[middle] == key) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    Total sum = tails[i];
    const int64_t last = low / kTileRows;
#pragma unroll 4
    for (int64_t t = tile + 1; t <= last; ++t) sum = plus(sum, static_cast<Total>(heads[t * columns + column]));
    places_of(shape.columns, column, at);
    write_sum<In>(shape, to, key, at[1], sum);
  }
}

/// Memory for all of this, asked for before anything is enqueued.
struct SumSpace {
  SortSpace sort;
  void *heads = nullptr, *tails = nullptr;
  bool found;
  SumSpace(const Call& call, int64_t rows, int64_t columns, int dtype) : sort(call, rows), found(sort.found) {
    const int64_t tiles = divide_up(rows, kTileRows);
    if (tiles < 2) return;
    const bool narrow = dtype == HALFSTEP_F32 || dtype == HALFSTEP_F16 || dtype == HALFSTEP_BF16;
    const int64_t bytes = tiles * columns * (narrow ? 4 : 8);
    heads = call.workspace<unsigned char>(bytes);
    tails = call.workspace<unsigned char>(bytes);
    found = found && heads && tails;
  }
};

/// Adds up the rows of `from`, whose keys are in space.sort.keys[0]: at most shape.keys, which is passed over.
template <class In>
void sum_rows(const Call& call, const SumSpace& space, SumShape shape, Accumulate<In> alpha, const void* from,
              void* to) {
  using S = Accumulate<In>;
  // Sums of 16-bit floats are float32's: their parts are put together as those are.
  using Parts = std::conditional_t<std::is_same_v<S, float>, float, In>;
  const Sorted sorted = sort_keys(call, space.sort, shape.rows, shape.keys);
  const int64_t columns = shape.columns.numel, tiles = divide_up(shape.rows, kTileRows);
  shape.by_columns = Split(columns, tiles * columns);
  launch(call, {.grid = grid_size(tiles * columns, kThreads), .alone = true}, sum_tiles<In>, shape, sorted, alpha,
         static_cast<const In*>(from), to, static_cast<S*>(space.heads), static_cast<S*>(space.tails));
  if (tiles < 2) return;
  launch(call, {.grid = grid_size((tiles - 1) * columns, kThreads), .alone = true}, join_tiles<Parts>, shape,
         sorted.keys, to, static_cast<const S*>(space.heads), static_cast<const S*>(space.tails));
}

constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // rows, and keys

// Keys from an index along one dimension; wrong ones and `skipped` become `size`.
__global__ void __launch_bounds__(kThreads)
    index_keys(Layout<1> layout, const int64_t* index, IndexRange range, int64_t skipped, uint32_t* keys) {
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[1];
    places_of(layout, i, at);
    const int64_t k = index[at[0]];
    keys[i] = static_cast<uint32_t>(range.accepts(k) && k != skipped ? k : range.size);
  }
}
void make_keys(const Call& call, const Tensor& index, int64_t size, int64_t skipped, uint32_t* keys) {
  launch(call, {.grid = grid_size(index.numel, kThreads), .alone = true}, index_keys, row_major_of(index),
         static_cast<const int64_t*>(index.data), IndexRange(call, size), skipped, keys);
}

// ------------------------------------------------------------------------------------------------------------------

halfstep_status embedding_backward(Call& call) {
  const auto& a = call.attributes<halfstep_embedding_attributes>();
  const Tensor &g = call.in[0], &index = call.in[1], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  if (index.numel > kMost || a.rows > kMost) return call.refuse("more than 2^31 rows");
  if (y.dtype == HALFSTEP_F64 && g.dtype != HALFSTEP_F64) return call.refuse("a gradient wider than what comes in");
  const int64_t width = y.sizes[1];
  const auto bytes = static_cast<std::size_t>(y.numel) * item_size(y.dtype);
  if (!y.contiguous) return call.refuse("a result that is not row-major");
  if (index.numel == 0) {
    clear(call, y.data, static_cast<int64_t>(bytes));
    return call.launched();
  }
  const SumSpace space(call, index.numel, width, g.dtype);
  if (!space.found) return call.no_memory();
  clear(call, y.data, static_cast<int64_t>(bytes));
  make_keys(call, index, a.rows, a.padding_idx, space.sort.keys[0]);
  SumShape shape = {};
  const int64_t* from_rows[] = {g.strides};
  const int64_t* to_rows[] = {y.strides};
  const int64_t* columns[] = {g.strides + g.ndim - 1, y.strides + 1};
  shape.from_rows = row_major<1>(g.ndim - 1, g.sizes, from_rows);
  shape.to_rows = row_major<1>(1, y.sizes, to_rows);
  shape.columns = row_major<2>(1, y.sizes + 1, columns);
  shape.rows = index.numel;
  shape.keys = static_cast<uint32_t>(a.rows);
  shape.to_dtype = y.dtype;
  with_floating(g.dtype, [&](auto zero) { sum_rows<decltype(zero)>(call, space, shape, 1, g.data, y.data); });
  return call.launched();
}

halfstep_status index_add(Call& call) {
  const auto& a = call.attributes<halfstep_index_add_attributes>();
  const Tensor &index = call.in[1], &source = call.in[2], &y = call.out[0];
  const int dim = wrapped(a.dim, y.ndim);
  const int64_t rows = index.numel, size = size_along(y, dim);
  if (rows > kMost || size > kMost) return call.refuse("more than 2^31 rows");
  if (rows == 0 || y.numel == 0) {
    // Indices of a dimension without elements are wrong all the same.
    if (rows != 0) {
      auto* keys = call.workspace<uint32_t>(rows);
      if (!keys) return call.no_memory();
      make_keys(call, index, size, -1, keys);
    }
    start_from(call, y, call.in[0]);
    return call.launched();
  }
  const SumSpace space(call, rows, y.numel / size, y.dtype);
  if (!space.found) return call.no_memory();
  start_from(call, y, call.in[0]);
  make_keys(call, index, size, -1, space.sort.keys[0]);
  // Columns are all other dimensions.
  int64_t others[HALFSTEP_MAX_DIMS], from[HALFSTEP_MAX_DIMS], to[HALFSTEP_MAX_DIMS];
  int n = 0;
  for (int d = 0; d < y.ndim; ++d) {
    if (d == dim) continue;
    others[n] = y.sizes[d], from[n] = source.strides[d], to[n] = y.strides[d];
    ++n;
  }
  const int64_t steps[] = {source.ndim == 0 ? 0 : source.strides[dim], stride_along(y, dim)};
  const int64_t* from_rows[] = {&steps[0]};
  const int64_t* to_rows[] = {&steps[1]};
  const int64_t* columns[] = {from, to};
  SumShape shape = {};
  shape.from_rows = row_major<1>(1, &rows, from_rows);
  shape.to_rows = row_major<1>(1, &size, to_rows);
  shape.columns = row_major<2>(n, others, columns);
  shape.rows = rows;
  shape.keys = static_cast<uint32_t>(size);
  shape.add = true;
  shape.to_dtype = y.dtype;
  with_computed(y.dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Accumulate<T>;
    const auto alpha = a.alpha.kind == 2 ? convert<T>(a.alpha.floating) : convert<T>(a.alpha.integer);
    S factor = static_cast<S>(value_of(alpha));
    // 16-bit sums are float32's, and so is their factor.
    if constexpr (std::is_floating_point_v<S>) {
      factor = a.alpha.kind == 2 ? convert<S>(a.alpha.floating) : convert<S>(a.alpha.integer);
    }
    sum_rows<T>(call, space, shape, factor, source.data, y.data);
  });
  return call.launched();
}

// Keys of a scatter: the numbers of y's elements, one by one. Tensors: the index by its row-major numbers, y's elements
// likewise, without the dimension.
__global__ void __launch_bounds__(kThreads) scatter_keys(Layout<2> layout, const int64_t* index, IndexRange range,
                                                         int64_t step, uint32_t none, uint32_t* keys) {
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[2];
    places_of(layout, i, at);
    const int64_t k = index[at[0]];
    keys[i] = range.accepts(k) ? static_cast<uint32_t>(at[1] + k * step) : none;
  }
}

halfstep_status scatter_add(Call& call) {
  const Tensor &index = call.in[1], &source = call.in[2], &y = call.out[0];
  const int dim = wrapped(call.attributes<halfstep_along_attributes>().dim, std::max(y.ndim, index.ndim));
  if (index.numel > kMost || y.numel > kMost) return call.refuse("more than 2^31 elements");
  if (index.numel == 0) {
    start_from(call, y, call.in[0]);
    return call.launched();
  }
  const SumSpace space(call, index.numel, 1, y.dtype);
  if (!space.found) return call.no_memory();
  start_from(call, y, call.in[0]);
  int64_t numbers[HALFSTEP_MAX_DIMS] = {}, step = 0, next = 1;
  for (int d = y.ndim - 1; d >= 0; --d) {
    (d == dim ? step : numbers[d]) = next;
    next *= y.sizes[d];
  }
  const int64_t* walked[] = {index.strides, numbers};
  const auto none = static_cast<uint32_t>(y.numel);
  launch(call, {.grid = grid_size(index.numel, kThreads), .alone = true}, scatter_keys,
         row_major<2>(index.ndim, index.sizes, walked), static_cast<const int64_t*>(index.data),
         IndexRange(call, size_along(y, dim)), step, none, space.sort.keys[0]);
  const View from = across(index, source, -1);
  SumShape shape = {};
  shape.from_rows = row_major_of(from);
  shape.to_rows = row_major_of(y);
  shape.columns = row_major<2>(0, nullptr, {nullptr, nullptr});
  shape.columns.strides[0][0] = shape.columns.strides[0][1] = 0;
  shape.rows = index.numel;
  shape.keys = none;
  shape.add = true;
  shape.to_dtype = y.dtype;
  with_computed(y.dtype, [&](auto zero) { sum_rows<decltype(zero)>(call, space, shape, 1, source.data, y.data); });
  return call.launched();
}

// ------------------------------------------------------------------------------------------------------------------
// index_put

// Which of several for one place is written: the last. Numbers from 1, the largest wins.
__global__ void __launch_bounds__(kThreads) mark_last(const uint32_t* keys, int64_t n, uint32_t none, uint32_t* last) {
  for (int64_t i = thread_index(); i < n; i += grid_threads()) {
    if (keys[i] != none) atomicMax(&last[keys[i]], static_cast<uint32_t>(i + 1));
  }
}
template <class Word>
__global__ void __launch_bounds__(kThreads)
    put_rows(SumShape shape, const uint32_t* keys, const uint32_t* last, Word* to, const Word* from) {
  for (int64_t i = thread_index(); i < shape.rows * shape.by_columns.size; i += grid_threads()) {
    int64_t column, at[2], from_row[1], to_row[1];
    const int64_t row = shape.by_columns.divide(i, &column);
    const uint32_t key = keys[row];
    if (key == shape.keys || last[key] != static_cast<uint32_t>(row + 1)) continue;
    places_of(shape.columns, column, at);
    places_of(shape.from_rows, row, from_row);
    places_of(shape.to_rows, key, to_row);
    to[to_row[0] + at[1]] = from[from_row[0] + at[0]];
  }
}

halfstep_status index_put(Call& call) {
  const bool accumulate = call.attributes<halfstep_index_put_attributes>().accumulate;
  const Tensor &values = call.in[1], &y = call.out[0];
  const int k = call.n - 2, broadcast = values.ndim - (y.ndim - k);
  int64_t rows = 1, keys = 1, columns = 1, steps[HALFSTEP_MAX_DIMS];
  for (int d = 0; d < broadcast; ++d) rows *= values.sizes[d];
  for (int d = k - 1; d >= 0; --d) {
    steps[d] = keys;
    keys *= y.sizes[d];
  }
  for (int d = k; d < y.ndim; ++d) columns *= y.sizes[d];
  if (rows > kMost || keys > kMost) return call.refuse("more than 2^31 places");
  if (accumulate && (y.dtype == HALFSTEP_F8E4M3 || y.dtype == HALFSTEP_F8E5M2)) {
    return call.refuse("sums of 8-bit floats");
  }
  if (rows == 0) {
    start_from(call, y, call.in[0]);
    return call.launched();
  }
  SumShape shape = {};
  const int64_t* from_rows[] = {values.strides};
  const int64_t* to_rows[] = {y.strides};
  const int64_t* inner[] = {values.strides + broadcast, y.strides + k};
  shape.from_rows = row_major<1>(broadcast, values.sizes, from_rows);
  shape.to_rows = row_major<1>(k, y.sizes, to_rows);
  shape.columns = row_major<2>(y.ndim - k, y.sizes + k, inner);
  shape.rows = rows;
  shape.keys = static_cast<uint32_t>(keys);
  shape.add = true;
  shape.to_dtype = y.dtype;
  const auto number = [&](uint32_t* to) {
    number_places(call, call.in + 2, k, y.sizes, steps, broadcast, values.sizes, to, shape.keys);
  };
  if (accumulate) {
    const SumSpace space(call, rows, columns, y.dtype);
    if (!space.found) return call.no_memory();
    start_from(call, y, call.in[0]);
    number(space.sort.keys[0]);
    if (columns == 0 || y.numel == 0) return call.launched();
    with_computed(y.dtype, [&](auto zero) { sum_rows<decltype(zero)>(call, space, shape, 1, values.data, y.data); });
    return call.launched();
  }
  auto* of_rows = call.workspace<uint32_t>(rows);
  auto* last = call.workspace<uint32_t>(std::max<int64_t>(keys, 1));
  if (!of_rows || !last) return call.no_memory();
  start_from(call, y, call.in[0]);
  number(of_rows);
  if (columns == 0 || y.numel == 0) return call.launched();
  clear(call, last, keys * 4);
  launch(call, {.grid = grid_size(rows, kThreads), .alone = true}, mark_last, of_rows, rows, shape.keys, last);
  shape.by_columns = Split(columns, rows * columns);
  with_word(y.dtype, [&](auto word) {
    using Word = decltype(word);
    launch(call, {.grid = grid_size(rows * columns, kThreads), .alone = true}, put_rows<Word>, shape, of_rows, last,
           static_cast<Word*>(y.data), static_cast<const Word*>(values.data));
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "embedding_backward",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = embedding_backward},
    {.op = "scatter_add", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = scatter_add},
    {.op = "index_add", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = index_add},
    {.op = "index_put", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = index_put},
};

}  // namespace

std::span<const KernelDef> index_scatter_kernels() { return kKernels; }

}  // namespace hscuda
