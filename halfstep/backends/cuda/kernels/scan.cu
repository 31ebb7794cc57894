// SPDX-License-Identifier: Apache-2.0
// Along one dimension: extremes with their indices, cumulative sums and products, and the pieces of their gradients.
#include "device/fault.cuh"
#include "device/order.cuh"
#include "device/rows.cuh"
#include "halfstep/runtime/plugin_attributes.h"

namespace hscuda {
namespace {

/// How rows are divided among blocks where one for each would leave most of the GPU idle.
struct Parts {
  int64_t count = 1, length = 0;  ///< a row's blocks, and the elements of one
};
Parts parts_of(const Call& call, int64_t rows, int64_t length, int lanes) {
  Parts p{.count = 1, .length = length};
  if (lanes < kThreads) return p;
  p.length = divide_up(length, parts_of_rows(rows, length, 4, call.device().processors()));
  p.count = divide_up(length, p.length);
  return p;
}

// --- Extremes ---

/// The best key of some elements and where it is; of equal keys the first.
struct Best {
  uint64_t key = 0;
  int64_t index = INT64_MAX;
};
struct Better {
  __device__ __forceinline__ Best operator()(const Best& a, const Best& b) const {
    return a.key > b.key || (a.key == b.key && a.index < b.index) ? a : b;
  }
};

/// Where extremes go; `values` is null for argmax and argmin.
template <class T>
struct Extremes {
  T* values;
  int64_t* indices;
  __device__ __forceinline__ void put(const Rows<1>& rows, const T* x, int64_t row, int64_t at,
                                      const Best& best) const {
    indices[row] = best.index;
    if (values) values[row] = x[at + best.index * rows.strides[0]];
  }
};

// A NaN is the best of all. Block (b, p) has the part p of its rows, of `part_length` elements; what is found in a part
// goes to `partial` [part][row] unless that is null.
template <class T>
__global__ void __launch_bounds__(kThreads) find_extreme(Rows<1> rows, int lanes, int64_t part_length, bool largest,
                                                         const T* x, Extremes<T> to, Best* partial) {
  const int lane = lane_of_thread(lanes);
  const int64_t row = row_of_thread(lanes);
  const bool exists = row < rows.rows.numel;
  int64_t at[1] = {0};
  Best best;
  if (exists) {
    walk_places(rows.rows, row, at);
    constexpr int kUnroll = 4;
    const int64_t first = int64_t{blockIdx.y} * part_length;
    const int64_t end = first + part_length < rows.length ? first + part_length : rows.length;
    for (int64_t i = first + lane; i < end; i += lanes * kUnroll) {
      T loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * lanes < end) loaded[u] = x[at[0] + (i + u * lanes) * rows.strides[0]];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * lanes < end) best = Better{}(best, {extreme_key(loaded[u], largest), i + u * lanes});
      }
    }
  }
  best = row_reduce(best, Better{}, Best{}, lanes);
  if (!exists || lane != 0) return;
  if (partial) {
    partial[blockIdx.y * rows.rows.numel + row] = best;
  } else {
    to.put(rows, x, row, at[0], best);
  }
}

// The best of the parts of a row: a block a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    join_extremes(Rows<1> rows, int64_t parts, const Best* partial, const T* x, Extremes<T> to) {
  const int64_t row = blockIdx.x;
  Best best;
  for (int64_t p = threadIdx.x; p < parts; p += kThreads) best = Better{}(best, partial[p * rows.rows.numel + row]);
  best = block_reduce(best, Better{}, Best{});
  if (threadIdx.x != 0) return;
  int64_t at[1];
  walk_places(rows.rows, row, at);
  to.put(rows, x, row, at[0], best);
}

template <bool kLargest, bool kValues>
halfstep_status extreme(Call& call) {
  const Tensor& x = call.in[0];
  const Tensor& indices = call.out[kValues ? 1 : 0];
  if (indices.numel == 0) return HALFSTEP_OK;
  const Rows<1> rows = rows_of<1>({&x}, call.attributes<halfstep_dim_attributes>().dim);
  const int lanes = lanes_of(rows, 4, call.device().processors());
  const Parts parts = parts_of(call, rows.count(), rows.length, lanes);
  auto* partial = parts.count > 1 ? call.workspace<Best>(parts.count * rows.count()) : nullptr;
  if (parts.count > 1 && !partial) return call.no_memory();
  with_computed(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Extremes<T> to{kValues ? static_cast<T*>(call.out[0].data) : nullptr, static_cast<int64_t*>(indices.data)};
    const auto* data = static_cast<const T*>(x.data);
    const dim3 grid(row_blocks(rows.count(), kThreads, lanes), static_cast<unsigned>(parts.count));
    launch(call, {.grid = grid, .alone = lanes == 1}, find_extreme<T>, rows, lanes, parts.length, kLargest, data, to,
           partial);
    if (partial) {
      launch(call, {.grid = static_cast<unsigned>(rows.count())}, join_extremes<T>, rows, parts.count, partial, data,
             to);
    }
  });
  return call.launched();
}

// --- Cumulative sums and products ---

/// An element of any dtype as Total (double for floating ones, int64_t for the others), and back.
template <class Total>
__device__ __forceinline__ Total load_any(const void* data, int dtype, int64_t at) {
  if constexpr (std::is_same_v<Total, double>) {
    return load_floating<double>(data, dtype, at);
  } else {
    switch (dtype) {
      case HALFSTEP_I64:
        return static_cast<const int64_t*>(data)[at];
      case HALFSTEP_I32:
        return static_cast<const int32_t*>(data)[at];
      case HALFSTEP_I8:
        return static_cast<const int8_t*>(data)[at];
      case HALFSTEP_U8:
        return static_cast<const uint8_t*>(data)[at];
      default:
        return static_cast<const uint8_t*>(data)[at] != 0;
    }
  }
}
template <class Total>
__device__ __forceinline__ void store_any(void* data, int dtype, int64_t at, Total v) {
  if constexpr (std::is_same_v<Total, double>) {
    store_floating(data, dtype, at, v);
  } else {
    const auto put = [&](auto zero) {
      using T = decltype(zero);
      static_cast<T*>(data)[at] = convert<T>(v);
    };
    with_integer(dtype, put);
  }
}

struct Scan {
  Rows<2> rows;
  const void* x;
  void* y;
  int x_dtype, y_dtype;
  bool product, reverse;

  /// The place of the j-th element in the order of the scan.
  __device__ __forceinline__ int64_t place(int64_t at, int k, int64_t j) const {
    return at + (reverse ? rows.length - 1 - j : j) * rows.strides[k];
  }
  template <class Total>
  __device__ __forceinline__ Total join(Total a, Total b) const {
    if constexpr (std::is_same_v<Total, double>) {
      return product ? a * b : a + b;
    } else {
      const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
      return static_cast<int64_t>(product ? x * y : x + y);
    }
  }
};

// A thread a row: where neighbouring rows are neighbours in memory, or rows are short.
template <class Total>
__global__ void __launch_bounds__(kThreads) scan_by_thread(Scan scan) {
  const int64_t row = thread_index();
  if (row >= scan.rows.rows.numel) return;
  int64_t at[2];
  walk_places(scan.rows.rows, row, at);
  Total total = scan.product ? 1 : 0;
  for (int64_t j = 0; j < scan.rows.length; ++j) {
    total = scan.join(total, load_any<Total>(scan.x, scan.x_dtype, scan.place(at[0], 0, j)));
    store_any(scan.y, scan.y_dtype, scan.place(at[1], 1, j), total);
  }
}

// A warp a row, one element after the other: the product of a part of a row may overflow where the whole doesn't.
template <class Total>
__global__ void __launch_bounds__(kThreads) scan_by_warp(Scan scan) {
  const int lane = lane_of_thread(kWarp);
  const int64_t row = row_of_thread(kWarp);
  const bool exists = row < scan.rows.rows.numel;
  int64_t at[2] = {0, 0};
  if (exists) walk_places(scan.rows.rows, row, at);
  Total total = scan.product ? 1 : 0;
  for (int64_t first = 0; first < scan.rows.length; first += kWarp) {
    const bool mine = exists && first + lane < scan.rows.length;
    Total v = scan.product ? 1 : 0, result = 0;
    if (mine) v = load_any<Total>(scan.x, scan.x_dtype, scan.place(at[0], 0, first + lane));
    for (int k = 0; k < kWarp; ++k) {
      total = scan.join(total, shuffle_from(v, k));
      if (lane == k) result = total;
    }
    if (mine) store_any(scan.y, scan.y_dtype, scan.place(at[1], 1, first + lane), result);
  }
}

/// What joins the totals of threads and blocks.
template <class Total>
struct JoinTotals {
  const Scan& scan;
  __device__ __forceinline__ Total operator()(Total a, Total b) const { return scan.join(a, b); }
};

// The totals of the parts of rows, for scan_by_block: totals[part][row] by block (row, part).
template <class Total>
__global__ void __launch_bounds__(kThreads) part_totals(Scan scan, int64_t part_length, Total* totals) {
  int64_t at[2];
  walk_places(scan.rows.rows, int64_t{blockIdx.x}, at);
  const int64_t begin = int64_t{blockIdx.y} * part_length;
  const int64_t end = begin + part_length < scan.rows.length ? begin + part_length : scan.rows.length;
  const Total none = scan.product ? 1 : 0;
  Total total = none;
#pragma unroll 4
  for (int64_t j = begin + threadIdx.x; j < end; j += kThreads) {
    total = scan.join(total, load_any<Total>(scan.x, scan.x_dtype, scan.place(at[0], 0, j)));
  }
  total = block_reduce(total, JoinTotals<Total>{scan}, none);
  if (threadIdx.x == 0) totals[blockIdx.y * scan.rows.rows.numel + blockIdx.x] = total;
}

// A block a row, or a part of one: chunks of some elements a thread, joined by Hillis and Steele's scan of the threads'
// totals. `part_totals`: what part_totals() found, null for whole rows.
constexpr int kScanEach = 4;
template <class Total>
__global__ void __launch_bounds__(kThreads) scan_by_block(Scan scan, int64_t part_length, const Total* part_totals) {
  __shared__ Total totals[2][kThreads];
  const int me = static_cast<int>(threadIdx.x);
  int64_t at[2];
  walk_places(scan.rows.rows, int64_t{blockIdx.x}, at);
  const int64_t begin = int64_t{blockIdx.y} * part_length;
  const int64_t end = begin + part_length < scan.rows.length ? begin + part_length : scan.rows.length;
  const Total none = scan.product ? 1 : 0;
  Total before = none;
  if (part_totals) {
    for (int64_t p = me; p < blockIdx.y; p += kThreads) {
      before = scan.join(before, part_totals[p * scan.rows.rows.numel + blockIdx.x]);
    }
    before = block_reduce(before, JoinTotals<Total>{scan}, none);
  }
  for (int64_t first = begin; first < end; first += kThreads * kScanEach) {
    Total v[kScanEach], sum = none;
    const int64_t j = first + me * kScanEach;
#pragma unroll
    for (int k = 0; k < kScanEach; ++k) {
      v[k] = j + k < end ? load_any<Total>(scan.x, scan.x_dtype, scan.place(at[0], 0, j + k)) : none;
      sum = v[k] = scan.join(sum, v[k]);
    }
    int now = 0;
    totals[now][me] = sum;
    __syncthreads();
    for (int step = 1; step < kThreads; step *= 2) {
      const Total t = totals[now][me];
      totals[1 - now][me] = me >= step ? scan.join(totals[now][me - step], t) : t;
      now = 1 - now;
      __syncthreads();
    }
    const Total start = me == 0 ? before : scan.join(before, totals[now][me - 1]);
    before = scan.join(before, totals[now][kThreads - 1]);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kScanEach; ++k) {
      if (j + k < end) {
        store_any(scan.y, scan.y_dtype, scan.place(at[1], 1, j + k), scan.join(start, v[k]));
      }
    }
  }
}

template <class Total>
halfstep_status scan_rows(const Call& call, const Scan& scan) {
  const Parts parts = parts_of(call, scan.rows.count(), scan.rows.length, kThreads);
  auto* totals = parts.count > 1 ? call.workspace<Total>(parts.count * scan.rows.count()) : nullptr;
  if (parts.count > 1 && !totals) return call.no_memory();
  const Launch how{.grid = dim3(static_cast<unsigned>(scan.rows.count()), static_cast<unsigned>(parts.count))};
  if (totals) launch(call, how, part_totals<Total>, scan, parts.length, totals);
  launch(call, how, scan_by_block<Total>, scan, parts.length, totals);
  return call.launched();
}

template <bool kProduct>
halfstep_status scan(Call& call) {
  const auto& a = call.attributes<halfstep_dim_attributes>();
  const Tensor &x = call.in[0], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  const Scan scan{rows_of<2>({&x, &y}, a.dim), x.data,   y.data,        static_cast<int>(x.dtype),
                  static_cast<int>(y.dtype),   kProduct, a.reverse != 0};
  const int64_t rows = scan.rows.count();
  const int lanes = lanes_of(scan.rows, 4, call.device().processors());
  const bool floating = is_floating(x.dtype);
  if (lanes == 1 || scan.rows.length <= 16) {
    launch(call, {.grid = row_blocks(rows, kThreads, 1), .alone = true},
           floating ? scan_by_thread<double> : scan_by_thread<int64_t>, scan);
  } else if (kProduct && floating) {
    launch(call, {.grid = row_blocks(rows, kThreads, kWarp)}, scan_by_warp<double>, scan);
  } else {
    return floating ? scan_rows<double>(call, scan) : scan_rows<int64_t>(call, scan);
  }
  return call.launched();
}

// A thread a row. Before the first zero the gradient is the sum of g y from there on, over x; at the first zero the
// products are taken without it; after it all are zero. Tensors of `rows`: x_grad, g, x.
template <class T>
struct CumprodBackward {
  Rows<3> rows;
  const T *g, *x;
  T* x_grad;
  __device__ void operator()(int64_t row) const {
    int64_t at[3];
    walk_places(rows.rows, row, at);
    const auto gradient = [&](int64_t i) { return static_cast<double>(value_of(g[at[1] + i * rows.strides[1]])); };
    const auto element = [&](int64_t i) { return static_cast<double>(value_of(x[at[2] + i * rows.strides[2]])); };
    const auto put = [&](int64_t i, double v) { x_grad[at[0] + i * rows.strides[0]] = convert<T>(v); };
    const int64_t n = rows.length;
    int64_t zero = 0;
    double before = 1;  // product up to the first zero
    while (zero < n && element(zero) != 0) before *= element(zero++);
    double product = before, sum = 0;
    if (zero < n) {
      for (int64_t k = zero; k < n; ++k) {
        if (k > zero) product *= element(k);
        sum += gradient(k) * product;
      }
      put(zero, sum);
      for (int64_t i = zero + 1; i < n; ++i) put(i, 0);
    }
    // From behind: the products are found again by division, which is safe where no factor is zero.
    product = before;
    sum = 0;
    for (int64_t i = zero - 1; i >= 0; --i) {
      sum += gradient(i) * product;
      product /= element(i);
      put(i, sum / element(i));
    }
  }
};
halfstep_status cumprod_backward(Call& call) {
  const Tensor &g = call.in[0], &x = call.in[1], &x_grad = call.out[0];
  if (x_grad.numel == 0) return HALFSTEP_OK;
  const Rows<3> rows = rows_of<3>({&x_grad, &g, &x}, call.attributes<halfstep_dim_attributes>().dim);
  with_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_each(call, rows.count(),
             CumprodBackward<T>{rows, static_cast<const T*>(g.data), static_cast<const T*>(x.data),
                                static_cast<T*>(x_grad.data)});
  });
  return call.launched();
}

// A thread a row: the products from both ends.
template <class T>
struct ProductOfOthers {
  Rows<2> rows;  // y, x
  const T* x;
  T* y;
  __device__ void operator()(int64_t row) const {
    using C = Compute<T>;
    int64_t at[2];
    walk_places(rows.rows, row, at);
    C product = 1;
    for (int64_t i = 0; i < rows.length; ++i) {
      y[at[0] + i * rows.strides[0]] = convert<T>(product);
      product *= value_of(x[at[1] + i * rows.strides[1]]);
    }
    product = 1;
    for (int64_t i = rows.length - 1; i >= 0; --i) {
      T& result = y[at[0] + i * rows.strides[0]];
      result = convert<T>(value_of(result) * product);
      product *= value_of(x[at[1] + i * rows.strides[1]]);
    }
  }
};
halfstep_status prod_others(Call& call) {
  const Tensor &x = call.in[0], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  const Rows<2> rows = rows_of<2>({&y, &x}, call.attributes<halfstep_dim_attributes>().dim);
  with_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_each(call, rows.count(), ProductOfOthers<T>{rows, static_cast<const T*>(x.data), static_cast<T*>(y.data)});
  });
  return call.launched();
}

// --- One element of each row ---

// Every element of y is written once: x's where the row's index says so, else zero. Tensors of `rows`: y, x, index.
template <class Word>
struct PutAlong {
  Rows<3> rows;
  int64_t inner;  // elements of y from one along the dimension to the next, in row-major order
  const Word* x;
  const int64_t* index;
  Word* y;
  __device__ void operator()(int64_t i) const {
    const int64_t outer = i / inner, row = outer / rows.length * inner + (i - outer * inner);
    const int64_t place = outer % rows.length;
    int64_t at[3];
    walk_places(rows.rows, row, at);
    y[at[0] + place * rows.strides[0]] = index[at[2]] == place ? x[at[1]] : Word{0};
  }
};
halfstep_status put_along(Call& call) {
  const Tensor &x = call.in[0], &index = call.in[1], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  const int64_t dim = call.attributes<halfstep_view_attributes>().dim;
  const Rows<3> rows = rows_of<3>({&y, &x, &index}, dim);
  int64_t inner = 1;
  for (int64_t d = dim + 1; d < y.ndim; ++d) inner *= y.sizes[d];
  with_word(y.dtype, [&](auto word) {
    using Word = decltype(word);
    for_each(call, y.numel,
             PutAlong<Word>{rows, inner, static_cast<const Word*>(x.data), static_cast<const int64_t*>(index.data),
                            static_cast<Word*>(y.data)});
  });
  return call.launched();
}

// Tensors of `rows`: x, index, y.
template <class Word>
struct PickAlong {
  Rows<3> rows;
  const Word* x;
  const int64_t* index;
  Word* y;
  Fault* fault;
  unsigned long long call;
  __device__ void operator()(int64_t row) const {
    int64_t at[3];
    walk_places(rows.rows, row, at);
    const int64_t i = index[at[1]];
    if (i < 0 || i >= rows.length) {
      report(fault, call, kIndex, i, 0, rows.length - 1);
      return;
    }
    y[at[2]] = x[at[0] + i * rows.strides[0]];
  }
};
halfstep_status pick_along(Call& call) {
  const Tensor &x = call.in[0], &index = call.in[1], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  const Rows<3> rows = rows_of<3>({&x, &index, &y}, call.attributes<halfstep_view_attributes>().dim);
  with_word(y.dtype, [&](auto word) {
    using Word = decltype(word);
    for_each(call, rows.count(),
             PickAlong<Word>{rows, static_cast<const Word*>(x.data), static_cast<const int64_t*>(index.data),
                             static_cast<Word*>(y.data), call.fault(), call.number()});
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "argmax", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = extreme<true, false>},
    {.op = "argmin", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = extreme<false, false>},
    {.op = "max_dim", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = extreme<true, true>},
    {.op = "min_dim", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = extreme<false, true>},
    {.op = "cumsum", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = scan<false>},
    {.op = "cumprod", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = scan<true>},
    {.op = "cumprod_backward", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = cumprod_backward},
    {.op = "prod_others", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = prod_others},
    {.op = "put_along", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = put_along},
    {.op = "pick_along", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = pick_along},
};

}  // namespace

std::span<const KernelDef> scan_kernels() { return kKernels; }

}  // namespace hscuda
