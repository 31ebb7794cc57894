// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "halfstep/backends/cpu/move.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

Status triangle(const TensorView& x, const TensorView& out, std::int64_t diagonal, bool lower) {
  if (out.numel == 0) return Status::ok;
  const int n = x.ndim;
  const std::int64_t rows = x.sizes[n - 2], columns = x.sizes[n - 1];
  visit_bits(x.dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    const auto grain = std::max<std::int64_t>(1, kGrain / columns);
    parallel_for(out.numel / columns, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t line = begin; line < end; ++line) {
        const std::int64_t row = line % rows;
        std::int64_t from = row * x.strides[n - 2], to = row * out.strides[n - 2], rest = line / rows;
        for (int d = n - 3; d >= 0; --d) {
          from += rest % x.sizes[d] * x.strides[d];
          to += rest % x.sizes[d] * out.strides[d];
          rest /= x.sizes[d];
        }
        // Columns up to row + diagonal belong to the lower triangle, those from there on to the upper one.
        std::int64_t edge = 0;
        if (__builtin_add_overflow(row, diagonal, &edge)) edge = diagonal < 0 ? INT64_MIN : INT64_MAX - 1;
        const std::int64_t first = lower ? 0 : std::clamp<std::int64_t>(edge, 0, columns);
        const std::int64_t last = lower ? std::clamp<std::int64_t>(edge, -1, columns - 1) + 1 : columns;
        const U* a = static_cast<const U*>(x.data) + from;
        U* o = static_cast<U*>(out.data) + to;
        const std::int64_t s = x.strides[n - 1], t = out.strides[n - 1];
        for (std::int64_t j = 0; j < first; ++j) o[j * t] = 0;
        for (std::int64_t j = first; j < last; ++j) o[j * t] = a[j * s];
        for (std::int64_t j = last; j < columns; ++j) o[j * t] = 0;
      }
    });
  });
  return Status::ok;
}

Status tril(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  return triangle(in[0], out[0], static_cast<const DiagonalAttributes*>(attributes)->diagonal, true);
}
Status triu(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  return triangle(in[0], out[0], static_cast<const DiagonalAttributes*>(attributes)->diagonal, false);
}

Status diagonal_backward(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const DiagonalAttributes*>(attributes);
  clear(out[0]);
  if (in[0].numel == 0) return Status::ok;
  const int n = out[0].ndim;
  const auto dim1 = static_cast<int>(a.dim1 < 0 ? a.dim1 + n : a.dim1);
  const auto dim2 = static_cast<int>(a.dim2 < 0 ? a.dim2 + n : a.dim2);
  std::int64_t strides[kMaxDims];
  int m = 0;
  for (int d = 0; d < n; ++d) {
    if (d != dim1 && d != dim2) strides[m++] = out[0].strides[d];
  }
  strides[m++] = out[0].strides[dim1] + out[0].strides[dim2];
  TensorView to = out[0];
  advance(to, a.diagonal < 0 ? -a.diagonal * out[0].strides[dim1] : a.diagonal * out[0].strides[dim2]);
  to.sizes = in[0].sizes;
  to.strides = strides;
  to.ndim = m;
  to.numel = in[0].numel;
  to.contiguous = false;
  move_elements(to, in[0]);
  return Status::ok;
}

const RegisterCpuKernel triangle_kernels[] = {
    {"tril", kAllDTypes, tril},
    {"triu", kAllDTypes, triu},
    {"diagonal_backward", kAllDTypes, diagonal_backward},
};

}  // namespace
}  // namespace halfstep::cpu
