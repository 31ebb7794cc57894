// SPDX-License-Identifier: Apache-2.0
// mm, bmm and linear.
#include <algorithm>
#include <vector>

#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double,
                                   std::conditional_t<std::is_integral_v<T>, std::int64_t, float>>;

// c[m, n] = sum over k of a[m, k] * b[k, n] (+ bias[n]); strides in elements.
template <class T, class Out>
void product(const T* a, std::int64_t am, std::int64_t ak, const T* b, std::int64_t bk, std::int64_t bn, const T* bias,
             Out* c, std::int64_t m, std::int64_t n, std::int64_t k) {
  using C = Compute<T>;
  parallel_for(m, std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(n * k, 1)),
               [&](std::int64_t begin, std::int64_t end) {
                 std::vector<C> row(static_cast<std::size_t>(n));
                 for (std::int64_t i = begin; i < end; ++i) {
                   std::fill(row.begin(), row.end(), C{});
                   for (std::int64_t j = 0; j < k; ++j) {
                     const C x = convert<C>(a[i * am + j * ak]);
                     for (std::int64_t l = 0; l < n; ++l)
                       row[static_cast<std::size_t>(l)] += x * convert<C>(b[j * bk + l * bn]);
                   }
                   for (std::int64_t l = 0; l < n; ++l) {
                     C v = row[static_cast<std::size_t>(l)];
                     if (bias) v += convert<C>(bias[l]);
                     c[i * n + l] = convert<Out>(v);
                   }
                 }
               });
}

Status matmul(const TensorView* in, int n, TensorView* out, bool transpose_b) {
  const TensorView &a = in[0], &b = in[1];
  const bool batched = a.ndim == 3;
  const int d = batched ? 1 : 0;
  visit_all(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    visit_all(out[0].dtype, [&](auto out_tag) {
      using Out = typename decltype(out_tag)::type;
      const int bk = transpose_b ? 1 : 0;
      const std::int64_t rows = a.sizes[d], inner = a.sizes[d + 1], columns = b.sizes[d + 1 - bk];
      for (std::int64_t i = 0; i < (batched ? a.sizes[0] : 1); ++i) {
        product<T, Out>(static_cast<const T*>(a.data) + (batched ? i * a.strides[0] : 0), a.strides[d],
                        a.strides[d + 1], static_cast<const T*>(b.data) + (batched ? i * b.strides[0] : 0),
                        b.strides[d + bk], b.strides[d + 1 - bk],
                        n > 2 && in[2].defined ? static_cast<const T*>(in[2].data) : nullptr,
                        static_cast<Out*>(out[0].data) + i * rows * columns, rows, columns, inner);
      }
    });
  });
  return Status::ok;
}

Status mm(KernelContext*, const TensorView* in, int n, TensorView* out, int, const void*) {
  return matmul(in, n, out, false);
}
Status linear(KernelContext*, const TensorView* in, int n, TensorView* out, int, const void*) {
  return matmul(in, n, out, true);
}

const RegisterCpuKernel registered[] = {
    {"mm", kNumericDTypes, mm},
    {"bmm", kNumericDTypes, mm},
    {"linear", kNumericDTypes, linear},
};

}  // namespace
}  // namespace halfstep::cpu
