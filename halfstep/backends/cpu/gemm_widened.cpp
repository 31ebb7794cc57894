// SPDX-License-Identifier: Apache-2.0
// Larger products by oneDNN's float32 routine, with 16-bit operands widened before and results rounded after it, in
// pieces that stay in the outer cache. Next to n^3 multiplications the n^2 conversions take 2 to 6 percent.
#include <algorithm>
#include <cstdint>

#include "halfstep/backends/cpu/gemm_internal.h"
#include "halfstep/backends/cpu/gemm_kernels.h"
#include "halfstep/backends/cpu/onednn.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kPieceFloats = 4 << 20;  // of an operand at a time, 16 MiB
constexpr std::int64_t kSmallestPiece = 256;    // rows or columns
// Elements worth a thread. They are few, and measured: what is converted was written by one core and the result is read
// by all, so that caches are waited for (0.7 ns an element where the arithmetic takes 0.06).
constexpr std::int64_t kWidenPerThread = 8192;

constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b * b; }

/// Floats between rows: whole cache lines, but not a multiple of 4096 bytes, where all rows would share a cache set.
std::int64_t leading(std::int64_t n) {
  const std::int64_t ld = round_up(n, 16);
  return ld % 1024 == 0 ? ld + 16 : ld;
}

bool by_rows(const GemmOperand& x, std::int64_t cols) { return x.col_stride == 1 && x.row_stride >= cols; }
bool by_cols(const GemmOperand& x, std::int64_t rows) { return x.row_stride == 1 && x.col_stride >= rows; }
bool in_place(const GemmOperand& x, std::int64_t rows, std::int64_t cols) {
  return x.dtype == DType::f32 && (by_rows(x, cols) || by_cols(x, rows));
}

const void* offset(const GemmOperand& x, std::int64_t row, std::int64_t col) {
  return static_cast<const char*>(x.data) +
         (row * x.row_stride + col * x.col_stride) * static_cast<std::int64_t>(item_size(x.dtype));
}

struct Pieces {
  std::int64_t m, n;
  bool widen_a, widen_b, widen_c;
};

Pieces pieces_of(const GemmArgs& g) {
  Pieces p = {g.m, g.n, !in_place(g.a, g.m, g.k), !in_place(g.b, g.k, g.n), g.c_dtype != DType::f32};
  const std::int64_t most = std::max(kSmallestPiece, kPieceFloats / g.k);
  if (p.widen_a || p.widen_c) p.m = std::min(p.m, most);
  if (p.widen_b || p.widen_c) p.n = std::min(p.n, most);
  return p;
}

struct Scratch {
  float *a, *b, *c, *bias;
};

Scratch carve(const GemmArgs& g, const Pieces& p, Carver& carver) {
  Scratch s = {};
  // Either orientation may be kept: the larger of both.
  if (p.widen_a) s.a = carver.floats(std::max(p.m * leading(g.k), g.k * leading(p.m)));
  if (p.widen_b) s.b = carver.floats(std::max(g.k * leading(p.n), p.n * leading(g.k)));
  if (p.widen_c) s.c = carver.floats(p.m * leading(p.n));
  if (g.bias != nullptr) s.bias = carver.floats(g.n);
  return s;
}

/// The rows [row, row + rows) and columns [col, col + cols) as float32, at `to` if they have to be converted.
OneDnnMatrix float_matrix(const GemmKernels& kernels, const GemmOperand& x, std::int64_t row, std::int64_t rows,
                          std::int64_t col, std::int64_t cols, bool widen, float* to) {
  const void* from = offset(x, row, col);
  if (!widen) {
    const bool turned = x.col_stride != 1 || x.row_stride < cols;
    return {static_cast<const float*>(from), turned ? x.col_stride : x.row_stride, turned};
  }
  const bool turned = x.row_stride == 1 && x.col_stride != 1;
  const std::int64_t lines = turned ? cols : rows, length = turned ? rows : cols;
  const std::int64_t stride = turned ? x.col_stride : x.row_stride, step = turned ? x.row_stride : x.col_stride;
  const std::int64_t ld = leading(length), size = static_cast<std::int64_t>(item_size(x.dtype));
  parallel_for(lines, std::max<std::int64_t>(1, kWidenPerThread / length), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const char* line = static_cast<const char*>(from) + i * stride * size;
      if (step == 1) {
        kernels.widen(x.dtype, line, length, to + i * ld);
      } else {
        kernels.pack(x.dtype, line, step, 0, length, 1, length, to + i * ld);
      }
    }
  });
  return {to, ld, turned};
}

}  // namespace

std::size_t widened_workspace(const GemmArgs& args) {
  Carver carver(nullptr);
  carve(args, pieces_of(args), carver);
  return carver.used();
}

bool gemm_widened(const GemmArgs& g, void* workspace) {
  const GemmKernels& kernels = gemm_kernels();
  const Pieces p = pieces_of(g);
  Carver carver(workspace);
  const Scratch s = carve(g, p, carver);
  if (g.bias != nullptr) kernels.widen(g.bias_dtype, g.bias, g.n, s.bias);
  const bool relu = g.activation == GemmActivation::relu;
  for (std::int64_t j = 0; j < g.n; j += p.n) {
    const std::int64_t n = std::min(p.n, g.n - j);
    const OneDnnMatrix b = float_matrix(kernels, g.b, 0, g.k, j, n, p.widen_b, s.b);
    for (std::int64_t i = 0; i < g.m; i += p.m) {
      const std::int64_t m = std::min(p.m, g.m - i);
      const OneDnnMatrix a = float_matrix(kernels, g.a, i, m, 0, g.k, p.widen_a, s.a);
      char* const to = static_cast<char*>(g.c) + (i * g.ldc + j) * static_cast<std::int64_t>(item_size(g.c_dtype));
      float* const c = p.widen_c ? s.c : reinterpret_cast<float*>(to);
      const std::int64_t ld = p.widen_c ? leading(p.n) : g.ldc;
      if (!onednn_sgemm(a, b, m, n, g.k, g.beta, c, ld)) return false;
      if (!p.widen_c && s.bias == nullptr && !relu) continue;
      parallel_for(m, std::max<std::int64_t>(1, kWidenPerThread / n), [&](std::int64_t begin, std::int64_t end) {
        GemmFinish f = {};
        f.from = c + begin * ld;
        f.ld = ld;
        f.rows = end - begin;
        f.cols = n;
        f.c = to + begin * g.ldc * static_cast<std::int64_t>(item_size(g.c_dtype));
        f.dtype = g.c_dtype;
        f.row_stride = g.ldc;
        f.col_stride = 1;
        f.bias = s.bias == nullptr ? nullptr : s.bias + j;
        f.relu = relu;
        kernels.finish(f);
      });
    }
  }
  return true;
}

}  // namespace halfstep::cpu
