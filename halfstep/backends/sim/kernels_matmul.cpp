// SPDX-License-Identifier: Apache-2.0
// Matrix products: mm, bmm and linear, on contiguous matrices.
//
// Both factors are packed into panels of what is computed in (float32 for 16 bits), a small block of results is kept in
// registers while a panel of at most kDepth products is summed, and these sums are added up apart: so the error grows
// with kDepth and with the number of panels, not with their product. Results are rounded once.
#include <cstring>

#include "walk.h"

namespace sim {
namespace {

constexpr int64_t kDepth = 256;  // products summed in a register
constexpr int64_t kRows = 4;     // of a block of results
constexpr int64_t kBlock = 64;   // rows of the first factor that are packed together

template <class C>
constexpr int64_t kColumns = 64 / sizeof(C);  // of a block of results: two vectors of 32 bytes

/// sums[kRows][kColumns] of a panel of `depth` rows of a and columns of b.
template <class C>
[[gnu::always_inline]] inline void block_of_sums(const C* a, const C* b, int64_t depth, C* sums) {
  using Vector [[gnu::vector_size(32)]] = C;
  constexpr int64_t kLanes = 32 / sizeof(C);
  Vector total[kRows][2] = {};
  for (int64_t p = 0; p < depth; ++p) {
    Vector b0, b1;
    std::memcpy(&b0, b + p * kColumns<C>, sizeof b0);
    std::memcpy(&b1, b + p * kColumns<C> + kLanes, sizeof b1);
    for (int64_t i = 0; i < kRows; ++i) {
      const C x = a[p * kRows + i];
      total[i][0] += x * b0;
      total[i][1] += x * b1;
    }
  }
  std::memcpy(sums, total, sizeof total);
}

template <class C>
void block_plain(const C* a, const C* b, int64_t depth, C* sums) {
  block_of_sums(a, b, depth, sums);
}
#if defined(__x86_64__)
// The same code for machines with wider vectors than the compiler may assume.
template <class C>
[[gnu::target("avx2")]] void block_avx2(const C* a, const C* b, int64_t depth, C* sums) {
  block_of_sums(a, b, depth, sums);
}
#endif

template <class C>
using BlockFn = void (*)(const C*, const C*, int64_t, C*);
template <class C>
BlockFn<C> block_function() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return block_avx2<C>;
#endif
  return block_plain<C>;
}

/// A matrix in memory: element (row, column) at row * row_step + column * column_step.
struct Matrix {
  const View* view;
  int64_t at;
  int64_t row_step, column_step;
};

/// Packs `rows` by `depth` elements as panels of `width` rows, one after the other, each `depth` long; what is missing
/// in the last one is zero. Rows of the matrix are those of the first factor, or the columns of the second.
template <class C>
void pack(const Matrix& m, int64_t row0, int64_t rows, int64_t depth0, int64_t depth, int64_t width, C* to) {
  with_type(m.view->dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_convertible_v<Compute<T>, C> && std::is_floating_point_v<Compute<T>>) {
      const T* from = m.view->at<T>(m.at + row0 * m.row_step + depth0 * m.column_step);
      for (int64_t panel = 0; panel < rows; panel += width, to += width * depth) {
        const int64_t n = std::min(width, rows - panel);
        const T* first = from + panel * m.row_step;
        if (m.row_step == 1) {
          for (int64_t p = 0; p < depth; ++p) {
            const T* line = first + p * m.column_step;
            C* out = to + p * width;
            for (int64_t i = 0; i < n; ++i) out[i] = static_cast<C>(load(line[i]));
            for (int64_t i = n; i < width; ++i) out[i] = 0;
          }
        } else {
          for (int64_t i = 0; i < width; ++i) {
            const T* line = first + i * m.row_step;
            for (int64_t p = 0; p < depth; ++p) {
              to[p * width + i] = i < n ? static_cast<C>(load(line[p * m.column_step])) : C(0);
            }
          }
        }
      }
    }
  });
}

/// What is multiplied: c[m, n] = a[m, k] * b[k, n] + bias[n], all of c's rows behind each other.
struct Product {
  int64_t m, n, k;
  Matrix a, b;  // b by columns: its rows here are the n columns
  const View* bias;
  const View* c;
  int64_t c_at;
};

template <class C>
void multiply(const Product& g) {
  const BlockFn<C> block = block_function<C>();
  constexpr int64_t kWide = kColumns<C>;
  const int64_t panels = (g.n + kWide - 1) / kWide;
  const int64_t depths = (g.k + kDepth - 1) / kDepth;
  // Device memory of its own would be workspace; this is what a chip has as registers and caches.
  std::vector<C> b(static_cast<std::size_t>(panels * kWide * g.k)), a(static_cast<std::size_t>(kBlock * kDepth));
  for (int64_t d = 0; d < depths; ++d) {
    const int64_t depth = std::min(kDepth, g.k - d * kDepth);
    pack(g.b, 0, g.n, d * kDepth, depth, kWide, b.data() + panels * kWide * d * kDepth);
  }
  std::vector<C> results(static_cast<std::size_t>(kBlock * g.n));
  for (int64_t row0 = 0; row0 < g.m; row0 += kBlock) {
    const int64_t rows = std::min(kBlock, g.m - row0);
    std::fill(results.begin(), results.end(), C(0));
    for (int64_t d = 0; d < depths; ++d) {
      const int64_t depth = std::min(kDepth, g.k - d * kDepth);
      pack(g.a, row0, rows, d * kDepth, depth, kRows, a.data());
      const C* b_panels = b.data() + panels * kWide * d * kDepth;
      for (int64_t j = 0; j < panels; ++j) {
        const int64_t columns = std::min(kWide, g.n - j * kWide);
        for (int64_t i = 0; i < rows; i += kRows) {
          C sums[kRows * kWide];
          block(a.data() + i * depth, b_panels + j * kWide * depth, depth, sums);
          for (int64_t r = 0; r < std::min(kRows, rows - i); ++r) {
            C* to = results.data() + (i + r) * g.n + j * kWide;
            for (int64_t c = 0; c < columns; ++c) to[c] += sums[r * kWide + c];
          }
        }
      }
    }
    if (g.bias != nullptr) {
      with_type(g.bias->dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (std::is_floating_point_v<Compute<T>>) {
          const T* bias = g.bias->at<T>();
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t j = 0; j < g.n; ++j) results[r * g.n + j] += static_cast<C>(load(bias[j]));
          }
        }
      });
    }
    with_type(g.c->dtype, [&](auto zero) {
      using T = decltype(zero);
      T* to = g.c->at<T>(g.c_at + row0 * g.n);
      for (int64_t i = 0; i < rows * g.n; ++i) to[i] = convert<T>(results[i]);
    });
  }
}

/// Integers: modulo 2^bits.
void multiply_integers(const Product& g) {
  const auto read = [](const Matrix& m, int64_t row, int64_t column) {
    const int64_t at = m.at + row * m.row_step + column * m.column_step;
    return m.view->dtype == HALFSTEP_I64 ? static_cast<uint64_t>(*m.view->at<int64_t>(at))
                                         : static_cast<uint64_t>(int64_t{*m.view->at<int32_t>(at)});
  };
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j) {
      uint64_t sum = 0;
      for (int64_t p = 0; p < g.k; ++p) sum += read(g.a, i, p) * read(g.b, j, p);
      with_type(g.c->dtype, [&](auto zero) {
        *g.c->at<decltype(zero)>(g.c_at + i * g.n + j) = convert<decltype(zero)>(static_cast<int64_t>(sum));
      });
    }
  }
}

/// The last two dimensions of inputs 0 and 1; kTurned: input 1 is [n, k], as the weight of a linear layer is.
template <bool kTurned>
std::string product(const Call& call) {
  const View &a = call.in[0], &b = call.in[1], &c = call.out[0];
  if (c.numel == 0) return {};
  Product g;
  g.m = a.sizes[a.ndim - 2];
  g.k = a.sizes[a.ndim - 1];
  g.n = c.sizes[c.ndim - 1];
  g.c = &c;
  g.bias = call.in.size() > 2 && call.in[2].defined ? &call.in[2] : nullptr;
  const int64_t batch = a.ndim == 3 ? a.sizes[0] : 1;
  for (int64_t i = 0; i < batch; ++i) {
    g.a = {&a, i * g.m * g.k, g.k, 1};
    g.b = kTurned ? Matrix{&b, 0, g.k, 1} : Matrix{&b, i * g.k * g.n, 1, g.n};
    g.c_at = i * g.m * g.n;
    if (a.dtype == HALFSTEP_F64) {
      multiply<double>(g);
    } else if (is_floating(a.dtype)) {
      multiply<float>(g);
    } else {
      multiply_integers(g);
    }
  }
  return {};
}

const char* refuses(const Call& call) {
  if (is_floating(call.in[0].dtype) != is_floating(call.out[0].dtype)) return "the result is of another kind";
  if (call.in[1].dtype != call.in[0].dtype) return "the factors differ in dtype";
  return !is_floating(call.in[0].dtype) && call.in.size() > 2 && call.in[2].defined ? "integers take no bias" : nullptr;
}

constexpr uint32_t kFactors = kFloating | dtypes({HALFSTEP_I64, HALFSTEP_I32});
constexpr char kMissing[] = "the matrix unit takes no integers of 8 bits";
constexpr KernelDef kMm{.op = "mm",
                        .dtypes = kFactors,
                        .layouts = HALFSTEP_LAYOUT_CONTIGUOUS,
                        .attribute_bytes = sizeof(halfstep_matmul_attributes),
                        .run = product<false>,
                        .missing = kMissing,
                        .refuses = refuses};
constexpr KernelDef kBmm{.op = "bmm",
                         .dtypes = kFactors,
                         .layouts = HALFSTEP_LAYOUT_CONTIGUOUS,
                         .attribute_bytes = sizeof(halfstep_matmul_attributes),
                         .run = product<false>,
                         .missing = kMissing,
                         .refuses = refuses};
constexpr KernelDef kLinear{.op = "linear",
                            .dtypes = kFactors,
                            .layouts = HALFSTEP_LAYOUT_CONTIGUOUS,
                            .attribute_bytes = sizeof(halfstep_matmul_attributes),
                            .run = product<true>,
                            .missing = kMissing,
                            .refuses = refuses};

}  // namespace

std::span<const Kernel> matmul_kernels() {
  static constexpr Kernel kKernels[] = {kernel<kMm>, kernel<kBmm>, kernel<kLinear>};
  return kKernels;
}

}  // namespace sim
