// SPDX-License-Identifier: Apache-2.0
// softmax and log_softmax along one dimension, and their backward passes. A row is converted to float32, the largest
// element is taken out, and each result is rounded once.
#include <algorithm>
#include <cmath>
#include <utility>

#include "halfstep/backends/cpu/exp_block.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/softmax_columns.h"

namespace halfstep::cpu {
namespace {

// Rows up to this length are read once; longer ones block by block in each pass.
constexpr std::int64_t kSoftmaxRow = 4096;

const DimAttributes& dim_attributes(const void* attributes) { return *static_cast<const DimAttributes*>(attributes); }

// A row of C in memory that can be used as it lies, or null. `at`: its first element.
template <class C>
const C* row_in_place(const TensorView& t, std::int64_t stride, std::int64_t at) {
  return t.dtype == dtype_of<C> && stride == 1 ? static_cast<const C*>(t.data) + at : nullptr;
}
template <class C>
C* row_in_place(TensorView& t, std::int64_t stride, std::int64_t at) {
  return const_cast<C*>(row_in_place<C>(std::as_const(t), stride, at));
}

// Whether rows lie one behind the other, so that several short ones are converted and computed by one call: a call for
// each takes longer than a row of dozens of elements.
bool rows_follow(const RowPlan& plan) {
  return plan.stride == 1 && plan.rows.n == 1 && plan.rows.strides[0] == plan.length;
}
// Calls f(first row, rows) for rows [begin, end): as many together as `capacity` elements hold, or one.
template <class F>
void for_row_groups(std::int64_t begin, std::int64_t end, bool together, std::int64_t capacity, std::int64_t length,
                    F&& f) {
  const std::int64_t rows = together ? std::max<std::int64_t>(1, capacity / length) : 1;
  for (std::int64_t r = begin; r < end; r += rows) f(r, std::min(rows, end - r));
}

template <class C, bool kLog>
void forward(const TensorView& x, TensorView& out, std::int64_t dim) {
  const RowPlan from(x, dim), to(out, dim);
  const std::int64_t n = from.length;
  const bool together = rows_follow(from) && rows_follow(to);
  parallel_for(from.rows.numel, row_grain(n * 4), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) C buffer[kSoftmaxRow];
    for_row_groups(begin, end, together, kSoftmaxRow, n, [&](std::int64_t r, std::int64_t rows) {
      const std::int64_t in_at = from.rows.offset(r), out_at = to.rows.offset(r);
      const C* const whole_x = row_in_place<C>(x, from.stride, in_at);
      C* const whole_y = row_in_place<C>(out, to.stride, out_at);
      const C* row = nullptr;  // a block of the input
      const auto load = [&](std::int64_t at, std::int64_t count) {
        row = whole_x != nullptr ? whole_x + at : buffer;
        if (whole_x == nullptr) read_row(x, in_at + at * from.stride, from.stride, count, buffer);
      };
      const auto result = [&](std::int64_t at) { return whole_y != nullptr ? whole_y + at : buffer; };
      const auto write = [&](std::int64_t at, std::int64_t count) {
        if (whole_y == nullptr) write_row(out, out_at + at * to.stride, to.stride, count, buffer);
      };
      if (n <= kSoftmaxRow) {
        load(0, rows * n);
        softmax_rows(row, n, rows, kLog, result(0));
        write(0, rows * n);
        return;
      }
      C top = -std::numeric_limits<C>::infinity();
      for (std::int64_t at = 0; at < n; at += kSoftmaxRow) {
        const std::int64_t count = std::min(kSoftmaxRow, n - at);
        load(at, count);
        const C t = max_of(row, count);
        top = t > top || t != t ? t : top;
        if (top != top) break;
      }
      double sum = 0;
      for (std::int64_t at = 0; at < n; at += kSoftmaxRow) {
        const std::int64_t count = std::min(kSoftmaxRow, n - at);
        load(at, count);
        sum += exp_sum(row, count, top, nullptr);
      }
      for (std::int64_t at = 0; at < n; at += kSoftmaxRow) {
        const std::int64_t count = std::min(kSoftmaxRow, n - at);
        load(at, count);
        C* const y = result(at);
        if (!kLog) exp_sum(row, count, top, y);
        softmax_part(row, count, top, sum, kLog, y);
        write(at, count);
      }
    });
  });
}

template <class C, bool kLog>
void backward(const TensorView& g, const TensorView& y, TensorView& out, std::int64_t dim) {
  const RowPlan from_g(g, dim), from_y(y, dim), to(out, dim);
  const std::int64_t n = to.length;
  constexpr std::int64_t kBlock = kSoftmaxRow / 2;
  const bool together = rows_follow(from_g) && rows_follow(from_y) && rows_follow(to);
  parallel_for(to.rows.numel, row_grain(n * 3), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) C g_buffer[kBlock], y_buffer[kBlock];
    for_row_groups(begin, end, together, kBlock, n, [&](std::int64_t r, std::int64_t rows) {
      const std::int64_t g_at = from_g.rows.offset(r), y_at = from_y.rows.offset(r), out_at = to.rows.offset(r);
      const C* const whole_g = row_in_place<C>(g, from_g.stride, g_at);
      const C* const whole_y = row_in_place<C>(y, from_y.stride, y_at);
      C* const whole_out = row_in_place<C>(out, to.stride, out_at);
      const C *gs = nullptr, *ys = nullptr;  // blocks of the two
      const auto load = [&](std::int64_t at, std::int64_t count) {
        gs = whole_g != nullptr ? whole_g + at : g_buffer;
        ys = whole_y != nullptr ? whole_y + at : y_buffer;
        if (whole_g == nullptr) read_row(g, g_at + at * from_g.stride, from_g.stride, count, g_buffer);
        if (whole_y == nullptr) read_row(y, y_at + at * from_y.stride, from_y.stride, count, y_buffer);
      };
      const auto result = [&](std::int64_t at) { return whole_out != nullptr ? whole_out + at : g_buffer; };
      const auto write = [&](std::int64_t at, std::int64_t count) {
        if (whole_out == nullptr) write_row(out, out_at + at * to.stride, to.stride, count, g_buffer);
      };
      if (n <= kBlock) {
        load(0, rows * n);
        softmax_rows_backward(gs, ys, n, rows, kLog, result(0));
        write(0, rows * n);
        return;
      }
      double sum = 0;
      for (std::int64_t at = 0; at < n; at += kBlock) {
        const std::int64_t count = std::min(kBlock, n - at);
        load(at, count);
        sum += kLog ? sum_of(gs, count) : dot_of(gs, ys, count);
      }
      for (std::int64_t at = 0; at < n; at += kBlock) {
        const std::int64_t count = std::min(kBlock, n - at);
        load(at, count);
        softmax_gradients(gs, ys, count, static_cast<C>(sum), kLog, result(at));
        write(at, count);
      }
    });
  });
}

// Of tensors that lie alike, row-major and of one dtype, softmax down a dimension that isn't the last one: f(first
// element, width) for blocks of columns side by side. Whether they do.
template <class F>
bool for_columns(std::initializer_list<const TensorView*> tensors, std::int64_t dim, F&& f) {
  const TensorView& like = **tensors.begin();
  if (like.ndim == 0 || like.dtype == DType::f64) return false;
  for (const TensorView* t : tensors) {
    if (!t->contiguous || t->dtype != like.dtype) return false;
  }
  std::int64_t inner = 1;
  for (std::int64_t i = dim + 1; i < like.ndim; ++i) inner *= like.sizes[i];
  const std::int64_t n = like.sizes[dim], outer = like.numel / (n * inner);
  if (inner < 16) return false;  // a vector
  // Blocks of a few rows' worth of columns follow from the shape.
  const std::int64_t blocks = (inner + kSoftmaxColumns - 1) / kSoftmaxColumns;
  parallel_for(outer * blocks, row_grain(n * std::min(inner, kSoftmaxColumns) * 4),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t b = begin; b < end; ++b) {
                   const std::int64_t at = b % blocks * kSoftmaxColumns;
                   f(b / blocks * n * inner + at, n, inner, std::min(kSoftmaxColumns, inner - at));
                 }
               });
  return true;
}

template <bool kLog>
Status forward_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  if (out[0].numel == 0) return Status::ok;
  const std::int64_t dim = dim_attributes(attributes).dim;
  const DType dtype = in[0].dtype;
  if (for_columns({&in[0], &out[0]}, dim,
                  [&](std::int64_t at, std::int64_t n, std::int64_t stride, std::int64_t width) {
                    softmax_columns(dtype, element(dtype, static_cast<const void*>(in[0].data), at),
                                    element(dtype, out[0].data, at), n, stride, width, kLog);
                  })) {
    return Status::ok;
  }
  if (in[0].dtype == DType::f64 || out[0].dtype == DType::f64) {
    forward<double, kLog>(in[0], out[0], dim);
  } else {
    forward<float, kLog>(in[0], out[0], dim);
  }
  return Status::ok;
}
template <bool kLog>
Status backward_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  if (out[0].numel == 0) return Status::ok;
  const std::int64_t dim = dim_attributes(attributes).dim;
  const DType dtype = in[1].dtype;
  if (for_columns({&in[1], &in[0], &out[0]}, dim,
                  [&](std::int64_t at, std::int64_t n, std::int64_t stride, std::int64_t width) {
                    softmax_columns_backward(dtype, element(dtype, static_cast<const void*>(in[0].data), at),
                                             element(dtype, static_cast<const void*>(in[1].data), at),
                                             element(dtype, out[0].data, at), n, stride, width, kLog);
                  })) {
    return Status::ok;
  }
  if (in[1].dtype == DType::f64) {
    backward<double, kLog>(in[0], in[1], out[0], dim);
  } else {
    backward<float, kLog>(in[0], in[1], out[0], dim);
  }
  return Status::ok;
}

const RegisterCpuKernel softmax_kernels[] = {
    {"softmax", kFloatingDTypes, forward_kernel<false>},
    {"log_softmax", kFloatingDTypes, forward_kernel<true>},
    {"softmax_backward", kFloatingDTypes, backward_kernel<false>},
    {"log_softmax_backward", kFloatingDTypes, backward_kernel<true>},
};

}  // namespace
}  // namespace halfstep::cpu
