// SPDX-License-Identifier: Apache-2.0
// Products whose speed matters less: float64, for gradient checks, and integers.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "halfstep/backends/cpu/gemm_internal.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kGemmReferenceColumns = 256;  // of sums kept on the stack

std::int64_t grain(const GemmArgs& g) {
  return std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(g.n * g.k, 1));
}

/// sums[j] = sum over p of a(i, p) * b(p, j0 + j), in the order of p.
template <class A, class B, class S>
void row_of_sums(const GemmArgs& g, const A* a, const B* b, std::int64_t i, std::int64_t j0, std::int64_t n, S* sums) {
  std::fill(sums, sums + n, S{});
  for (std::int64_t p = 0; p < g.k; ++p) {
    const S x = static_cast<S>(a[i * g.a.row_stride + p * g.a.col_stride]);
    const B* row = b + p * g.b.row_stride + j0 * g.b.col_stride;
    if (g.b.col_stride == 1) {
      for (std::int64_t j = 0; j < n; ++j) sums[j] += x * static_cast<S>(row[j]);
    } else {
      for (std::int64_t j = 0; j < n; ++j) sums[j] += x * static_cast<S>(row[j * g.b.col_stride]);
    }
  }
}

template <class C>
void doubles(const GemmArgs& g) {
  const auto* a = static_cast<const double*>(g.a.data);
  const auto* b = static_cast<const double*>(g.b.data);
  const auto* bias = static_cast<const double*>(g.bias);
  C* c = static_cast<C*>(g.c);
  parallel_for(g.m, grain(g), [&](std::int64_t begin, std::int64_t end) {
    double sums[kGemmReferenceColumns];
    for (std::int64_t i = begin; i < end; ++i) {
      for (std::int64_t j0 = 0; j0 < g.n; j0 += kGemmReferenceColumns) {
        const std::int64_t n = std::min(kGemmReferenceColumns, g.n - j0);
        row_of_sums(g, a, b, i, j0, n, sums);
        C* to = c + i * g.ldc + j0;
        for (std::int64_t j = 0; j < n; ++j) {
          double v = sums[j];
          if (g.beta != 0) v += convert<double>(to[j]);
          if (bias != nullptr) v += bias[j0 + j];
          to[j] = convert<C>(g.activation == GemmActivation::relu && v < 0 ? 0.0 : v);
        }
      }
    }
  });
}

template <class F>
void with_integer(DType dtype, F f) {
  switch (dtype) {
    case DType::i64:
      return f(std::int64_t{});
    case DType::i32:
      return f(std::int32_t{});
    case DType::i8:
      return f(std::int8_t{});
    default:
      return f(std::uint8_t{});
  }
}

void integers(const GemmArgs& g) {
  with_integer(g.a.dtype, [&](auto a_tag) {
    with_integer(g.b.dtype, [&](auto b_tag) {
      const auto* a = static_cast<const decltype(a_tag)*>(g.a.data);
      const auto* b = static_cast<const decltype(b_tag)*>(g.b.data);
      parallel_for(g.m, grain(g), [&](std::int64_t begin, std::int64_t end) {
        std::uint64_t sums[kGemmReferenceColumns];  // Unsigned: sums wrap around.
        for (std::int64_t i = begin; i < end; ++i) {
          for (std::int64_t j0 = 0; j0 < g.n; j0 += kGemmReferenceColumns) {
            const std::int64_t n = std::min(kGemmReferenceColumns, g.n - j0);
            row_of_sums(g, a, b, i, j0, n, sums);
            with_integer(g.c_dtype, [&](auto c_tag) {
              using C = decltype(c_tag);
              C* to = static_cast<C*>(g.c) + i * g.ldc + j0;
              for (std::int64_t j = 0; j < n; ++j) to[j] = static_cast<C>(sums[j]);
            });
          }
        }
      });
    });
  });
}

}  // namespace

void gemm_reference(const GemmArgs& args) {
  if (args.a.dtype == DType::f64) {
    visit_floating(args.c_dtype, [&](auto tag) { doubles<typename decltype(tag)::type>(args); });
  } else {
    integers(args);
  }
}

}  // namespace halfstep::cpu
