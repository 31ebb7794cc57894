// SPDX-License-Identifier: Apache-2.0
// Products with few rows or columns (a batch of one), and outer products of short sums: each element of the large
// matrix is used once or a few times, so that reading it, or writing the result, is the limit. Nothing of it is packed.
#include <algorithm>
#include <cstdint>

#include "halfstep/backends/cpu/gemm_internal.h"
#include "halfstep/backends/cpu/gemm_kernels.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kGemmNarrowColumns =
    1024;                                // of sums that stay in the first-level cache while the matrix streams by
constexpr std::int64_t kOuterRows = 16;  // of an outer product that wait to be rounded

struct Narrow {
  bool swap;                // the large matrix is a
  std::int64_t rows, n, k;  // out[rows, n] = x[rows, k] * w[k, n]
  GemmOperand x, w;         // w: row_stride along k
  std::int64_t ldx, ldo;
  bool straight;  // sums are written to c at once
  bool outer;     // many rows, short sums
};

Narrow describe(const GemmArgs& g) {
  Narrow p = {};
  p.outer = g.m > 4 && g.n > 4;
  p.swap = !p.outer && g.n < g.m;
  p.rows = p.swap ? g.n : g.m;
  p.n = p.swap ? g.m : g.n;
  p.k = g.k;
  p.x = p.swap ? GemmOperand{g.b.data, g.b.dtype, g.b.col_stride, g.b.row_stride} : g.a;
  p.w = p.swap ? GemmOperand{g.a.data, g.a.dtype, g.a.col_stride, g.a.row_stride} : g.b;
  p.ldx = round_up(p.k, 16);
  p.ldo = round_up(p.n, 16);
  p.straight = (!p.swap || g.ldc == 1) && g.c_dtype == DType::f32 && g.bias == nullptr && g.beta == 0 &&
               g.activation == GemmActivation::none;
  return p;
}

struct NarrowScratch {
  float* x;
  float* bias;
  float* out;
};

NarrowScratch carve(const GemmArgs& g, const Narrow& p, int threads, Carver& carver) {
  NarrowScratch s = {};
  s.x = carver.floats(p.rows * p.ldx);
  if (g.bias != nullptr) s.bias = carver.floats(g.n);
  if (!p.straight) s.out = carver.floats((p.outer ? kOuterRows * threads : p.rows) * p.ldo);
  return s;
}

const void* offset(const GemmOperand& w, std::int64_t elements) {
  return static_cast<const char*>(w.data) + elements * static_cast<std::int64_t>(item_size(w.dtype));
}

/// out[rows, columns j0 to j1) of x * w into `out`, which points at column j0.
void multiply(const GemmKernels& kernels, const Narrow& p, const float* x, std::int64_t rows, std::int64_t j0,
              std::int64_t j1, float* out, std::int64_t ldo) {
  if (p.w.row_stride == 1 && p.w.col_stride != 1) {
    kernels.dots(p.w.dtype, offset(p.w, j0 * p.w.col_stride), p.w.col_stride, j1 - j0, p.k, x, p.ldx, rows, out, ldo);
    return;
  }
  for (std::int64_t j = j0; j < j1; j += kGemmNarrowColumns) {
    kernels.axpys(p.w.dtype, offset(p.w, j), p.w.row_stride, std::min(kGemmNarrowColumns, j1 - j), p.k, x, p.ldx, rows,
                  out + (j - j0), ldo, false);
  }
}

}  // namespace

std::size_t narrow_workspace(const GemmArgs& args, int threads) {
  Carver carver(nullptr);
  carve(args, describe(args), threads, carver);
  return carver.used();
}

void gemm_narrow(const GemmArgs& g, int threads, void* workspace) {
  const GemmKernels& kernels = gemm_kernels();
  const Narrow p = describe(g);
  Carver carver(workspace);
  const NarrowScratch s = carve(g, p, threads, carver);
  if (g.bias != nullptr) kernels.widen(g.bias_dtype, g.bias, g.n, s.bias);
  if (p.x.col_stride == 1 || p.k == 1) {
    for (std::int64_t i = 0; i < p.rows; ++i) {
      kernels.widen(p.x.dtype, offset(p.x, i * p.x.row_stride), p.k, s.x + i * p.ldx);
    }
  } else {
    kernels.pack(p.x.dtype, p.x.data, p.x.col_stride, p.x.row_stride, p.k, p.rows, p.ldx, s.x);
  }
  GemmEpilogue f = {};
  f.dtype = g.c_dtype;
  f.ld = p.ldo;
  f.row_stride = p.swap ? 1 : g.ldc;
  f.col_stride = p.swap ? g.ldc : 1;
  f.bias = s.bias;
  f.bias_by_row = p.swap;
  f.add_c = g.beta != 0;
  f.relu = g.activation == GemmActivation::relu;
  const auto at_c = [&](std::int64_t i, std::int64_t j) -> void* {
    return static_cast<char*>(g.c) +
           (i * f.row_stride + j * f.col_stride) * static_cast<std::int64_t>(item_size(g.c_dtype));
  };
  const std::int64_t ldc = p.swap ? 1 : g.ldc;

  if (p.outer) {
    const std::int64_t blocks = (p.rows + kOuterRows - 1) / kOuterRows;
    parallel_for(threads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        for (std::int64_t block = blocks * t / threads; block < blocks * (t + 1) / threads; ++block) {
          const std::int64_t r = block * kOuterRows, rows = std::min(kOuterRows, p.rows - r);
          if (p.straight) {
            multiply(kernels, p, s.x + r * p.ldx, rows, 0, p.n, static_cast<float*>(at_c(r, 0)), ldc);
            continue;
          }
          float* const out = s.out + t * kOuterRows * p.ldo;
          multiply(kernels, p, s.x + r * p.ldx, rows, 0, p.n, out, p.ldo);
          GemmEpilogue part = f;
          part.from = out;
          part.rows = rows;
          part.cols = p.n;
          part.c = at_c(r, 0);
          kernels.finish(part);
        }
      }
    });
    return;
  }
  constexpr std::int64_t kLine = 16;  // Columns are shared out in whole vectors.
  const std::int64_t lines = (p.n + kLine - 1) / kLine;
  parallel_for(threads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t j0 = lines * t / threads * kLine, j1 = std::min(lines * (t + 1) / threads * kLine, p.n);
      if (j0 >= j1) continue;
      if (p.straight) {
        multiply(kernels, p, s.x, p.rows, j0, j1, static_cast<float*>(at_c(0, j0)), ldc);
        continue;
      }
      multiply(kernels, p, s.x, p.rows, j0, j1, s.out + j0, p.ldo);
      GemmEpilogue part = f;
      part.from = s.out + j0;
      part.rows = p.rows;
      part.cols = j1 - j0;
      part.c = at_c(0, j0);
      if (part.bias != nullptr && !p.swap) part.bias += j0;
      kernels.finish(part);
    }
  });
}

}  // namespace halfstep::cpu
