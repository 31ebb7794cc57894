// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/gemm.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/gemm_internal.h"
#include "halfstep/backends/cpu/onednn.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Rows, columns or steps of a sum up to which a product is narrow.
constexpr std::int64_t kGemmNarrow = 4;
// Multiply-adds that are worth a thread: about 10 microseconds of a small product.
constexpr double kGemmWorkPerThread = 150'000;
// The same of tiles.
constexpr double kTilesWorkPerThread = 1'000'000;
// Elements of the large matrix of a narrow product, likewise.
constexpr double kNarrowPerThread = 40'000;
// Multiply-adds under which a call of a primitive, or tiles and their packing, cost more than they save.
constexpr double kWorkForUnits = 64 * 64 * 64;

bool computes_in_f32(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

bool valid(const GemmArgs& g) {
  if (g.a.dtype == DType::f64) {
    return g.b.dtype == DType::f64 && is_floating(g.c_dtype) && (g.bias == nullptr || g.bias_dtype == DType::f64);
  }
  if (computes_in_f32(g.c_dtype)) {
    return computes_in_f32(g.a.dtype) && computes_in_f32(g.b.dtype) &&
           (g.bias == nullptr || computes_in_f32(g.bias_dtype)) && (g.beta == 0 || g.c_dtype == DType::f32);
  }
  return is_integral(g.c_dtype) && is_integral(g.a.dtype) && is_integral(g.b.dtype) && g.bias == nullptr &&
         g.beta == 0 && g.activation == GemmActivation::none;
}

bool by_reference(const GemmArgs& g) { return !computes_in_f32(g.a.dtype); }

double work(const GemmArgs& g) {
  return static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k);
}

bool is_narrow(const GemmArgs& g) {
  if (g.m > kGemmNarrow && g.n > kGemmNarrow) {
    return g.k <= kGemmNarrow && (g.b.col_stride == 1 || g.k == 1 || g.b.row_stride == 1);
  }
  // The large matrix is read in place, which needs it contiguous in one dimension.
  const GemmOperand& large = g.n < g.m ? g.a : g.b;
  return large.row_stride == 1 || large.col_stride == 1;
}

GemmArgs item(const GemmArgs& g, std::int64_t i) {
  GemmArgs one = g;
  one.batch = 1;
  one.a.data =
      static_cast<const char*>(g.a.data) + i * g.a_batch_stride * static_cast<std::int64_t>(item_size(g.a.dtype));
  one.b.data =
      static_cast<const char*>(g.b.data) + i * g.b_batch_stride * static_cast<std::int64_t>(item_size(g.b.dtype));
  one.c = static_cast<char*>(g.c) + i * g.c_batch_stride * static_cast<std::int64_t>(item_size(g.c_dtype));
  return one;
}

/// A matrix of one row or column may have any stride there: the one that makes it contiguous is chosen.
void tidy(GemmOperand& x, std::int64_t rows, std::int64_t cols) {
  if (rows == 1 && cols == 1) {
    x.row_stride = x.col_stride = 1;
  } else if (cols == 1 && x.row_stride != 1) {
    x.col_stride = 1;
  } else if (rows == 1 && x.col_stride != 1) {
    x.row_stride = 1;
  }
}

GemmArgs tidy(const GemmArgs& args) {
  GemmArgs g = args;
  if (g.batch > 1 && g.b_batch_stride == 0 && g.a_batch_stride == g.m * g.a.row_stride &&
      g.c_batch_stride == g.m * g.ldc) {  // One matrix for all: one taller product.
    g.m *= g.batch;
    g.batch = 1;
  }
  if (g.batch == 1) g.a_batch_stride = g.b_batch_stride = 0;
  tidy(g.a, g.m, g.k);
  tidy(g.b, g.k, g.n);
  if (g.m == 1) g.ldc = std::max(g.ldc, g.n);
  return g;
}

double work_per_thread(GemmPath path) {
  return path == GemmPath::tiles || path == GemmPath::split ? kTilesWorkPerThread : kGemmWorkPerThread;
}

int threads_for(const GemmArgs& g, GemmPath path) {
  const double units = path == GemmPath::narrow
                           ? static_cast<double>(std::max({g.m * g.k, g.k * g.n, g.m * g.n})) / kNarrowPerThread
                           : work(g) / work_per_thread(path);
  const int threads = in_parallel_region() ? 1 : num_threads();
  return static_cast<int>(std::clamp(units, 1.0, static_cast<double>(threads)));
}

std::size_t workspace_for(const GemmArgs& g, GemmPath path, int threads) {
  if (path == GemmPath::blocked) return blocked_workspace(g, threads);
  if (path == GemmPath::narrow) return narrow_workspace(g, threads);
  if (path == GemmPath::tiles) return tiles_workspace(g, threads);
  if (path == GemmPath::split) return split_workspace(g, threads);
  return 0;
}

void run(const GemmArgs& g, GemmPath path, int threads, void* workspace) {
  if (path == GemmPath::blocked) {
    gemm_blocked(g, threads, workspace);
  } else if (path == GemmPath::narrow) {
    gemm_narrow(g, threads, workspace);
  } else if (path == GemmPath::tiles) {
    gemm_tiles(g, threads, workspace);
  } else if (path == GemmPath::split) {
    gemm_split(g, threads, workspace);
  } else {
    gemm_reference(g);
  }
}

/// Sums of nothing.
void empty_sums(const GemmArgs& g) {
  visit_floating(g.c_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (std::int64_t i = 0; i < g.m; ++i) {
      T* c = static_cast<T*>(g.c) + i * g.ldc;
      for (std::int64_t j = 0; j < g.n; ++j) {
        double v = g.beta != 0 ? convert<double>(c[j]) : 0;
        if (g.bias != nullptr) {
          visit_floating(g.bias_dtype, [&](auto bias_tag) {
            using B = typename decltype(bias_tag)::type;
            v += convert<double>(static_cast<const B*>(g.bias)[j]);
          });
        }
        c[j] = convert<T>(g.activation == GemmActivation::relu && v < 0 ? 0.0 : v);
      }
    }
  });
}

Status run_by(GemmPath path, KernelContext* context, const GemmArgs& g) {
  if (path == GemmPath::onednn) return gemm_onednn(context, g);
  GemmArgs one = g;
  one.batch = 1;
  // Either the items are shared out among threads, or the threads work on one item after the other.
  const int threads = threads_for(one, path);
  const int all = in_parallel_region() ? 1 : num_threads();
  const bool share_items = g.batch > 1 && (threads == 1 || g.batch >= all);
  const int lanes =
      share_items
          ? static_cast<int>(std::clamp<double>(work(one) * static_cast<double>(g.batch) / work_per_thread(path), 1.0,
                                                static_cast<double>(std::min<std::int64_t>(all, g.batch))))
          : 1;
  const int inner = share_items ? 1 : threads;
  const std::size_t bytes = (workspace_for(one, path, inner) + 63) / 64 * 64;
  void* workspace = nullptr;
  if (bytes > 0) {
    workspace = context->workspace(context, bytes * static_cast<std::size_t>(lanes));
    if (workspace == nullptr) {
      context->set_error(context, "matrix product: out of memory for the workspace");
      return Status::failed;
    }
  }
  if (runs_dry(context)) return Status::ok;
  const auto run_item = [&](std::int64_t i, int with, void* memory) { run(item(g, i), path, with, memory); };
  if (!share_items) {
    for (std::int64_t i = 0; i < g.batch; ++i) run_item(i, inner, workspace);
  } else {
    parallel_jobs(g.batch, lanes, [&](std::int64_t i, std::int64_t lane) {
      run_item(i, 1, bytes > 0 ? static_cast<char*>(workspace) + static_cast<std::size_t>(lane) * bytes : nullptr);
    });
  }
  return Status::ok;
}

/// The largest magnitude in an operand with a contiguous dimension; infinity for others.
double largest(const GemmOperand& x, std::int64_t rows, std::int64_t cols) {
  const bool turned = x.col_stride != 1;
  if (turned && x.row_stride != 1) return std::numeric_limits<double>::infinity();
  const std::int64_t lines = turned ? cols : rows, length = turned ? rows : cols;
  const std::int64_t stride = turned ? x.col_stride : x.row_stride;
  if (stride == length) return static_cast<double>(max_magnitude(x.dtype, x.data, lines * length));
  float top = 0;
  for (std::int64_t i = 0; i < lines; ++i) {
    top = std::max(top, max_magnitude(x.dtype, element(x.dtype, x.data, i * stride), length));
  }
  return static_cast<double>(top);
}

/// A gradient scaler wants to know whether the result is finite. Where that is much larger than the operands, as the
/// gradient of a weight is, they are quicker to read: no sum of k products is larger than k times the largest product.
void tell_bound(KernelContext* context, const GemmArgs& g) {
  if (context->set_magnitude_bound == nullptr || runs_dry(context) || g.batch != 1 || g.c_dtype != DType::f32 ||
      g.bias != nullptr || g.beta != 0 || g.ldc != g.n || !computes_in_f32(g.a.dtype) ||
      g.m * g.n < 4 * g.k * (g.m + g.n)) {
    return;
  }
  // Twice for the roundings: (1 + 2^-24)^k < 2 for all k that fit the comparison above.
  const double bound = 2 * static_cast<double>(g.k) * largest(g.a, g.m, g.k) * largest(g.b, g.k, g.n);
  if (bound <= static_cast<double>(std::numeric_limits<float>::max())) {
    context->set_magnitude_bound(context, static_cast<float>(bound));
  }
}

}  // namespace

GemmEpilogue epilogue(const GemmArgs& g, bool turned, const float* from, std::int64_t ld, std::int64_t row,
                      std::int64_t rows, std::int64_t column, std::int64_t columns, const float* bias) {
  GemmEpilogue f = {};
  f.from = from, f.ld = ld;
  f.rows = rows, f.cols = columns;
  f.dtype = g.c_dtype;
  f.row_stride = turned ? 1 : g.ldc;
  f.col_stride = turned ? g.ldc : 1;
  f.c = static_cast<char*>(element(g.c_dtype, g.c, row * f.row_stride + column * f.col_stride));
  if (bias != nullptr) f.bias = bias + (turned ? row : column);
  f.bias_by_row = turned;
  f.add_c = g.beta != 0;
  f.relu = g.activation == GemmActivation::relu;
  return f;
}

GemmPath choose_gemm_path(const GemmArgs& g, Isa isa) noexcept {
  if (by_reference(g)) return GemmPath::reference;
  if (is_narrow(g)) return GemmPath::narrow;
  if (isa == Isa::amx && work(g) >= kWorkForUnits && tiles_serve(g) && amx_usable() && tiles_suit(g)) {
    return GemmPath::tiles;
  }
  const bool in_parts = !(g.a.dtype == DType::f16 && has_f16_units(isa));
  if (isa == Isa::amx && work(g) >= kWorkForUnits && split_serves(g) && amx_usable() && split_suits(g) && in_parts) {
    return GemmPath::split;
  }
  const bool bf16_units = g.a.dtype == DType::bf16 && has_bf16_units(isa);
  // Without AMX for f16, oneDNN's products convert it to float32 as they go, which takes 0.85 to 0.95 of the time of
  // `blocked`.
  const bool f16_units = g.a.dtype == DType::f16 && isa >= Isa::avx512_fp16;
  const bool worth_units = work(g) * static_cast<double>(g.batch) >= kWorkForUnits;
  if ((bf16_units || f16_units) && worth_units && onednn_serves(g)) return GemmPath::onednn;
  return GemmPath::blocked;
}

Status gemm_by(GemmPath path, KernelContext* context, const GemmArgs& args) {
  if (!valid(args)) return Status::unsupported;
  if (args.m <= 0 || args.n <= 0 || args.batch <= 0) return Status::ok;
  const GemmArgs g = tidy(args);
  if (g.k <= 0 && is_floating(g.c_dtype)) {
    if (runs_dry(context)) return Status::ok;
    for (std::int64_t i = 0; i < g.batch; ++i) empty_sums(item(g, i));
    return Status::ok;
  }
  if ((path == GemmPath::reference) != by_reference(g)) return Status::unsupported;
  if (path == GemmPath::narrow && !is_narrow(g)) return Status::unsupported;
  if (path == GemmPath::onednn && !onednn_serves(g)) return Status::unsupported;
  if (path == GemmPath::tiles && !tiles_serve(g)) return Status::unsupported;
  if (path == GemmPath::split && !split_serves(g)) return Status::unsupported;
  return run_by(path, context, g);
}

Status gemm(KernelContext* context, const GemmArgs& args) {
  const GemmArgs g = tidy(args);
  const GemmPath path = choose_gemm_path(g, compute_isa());
  tell_bound(context, g);
  const Status status = gemm_by(path, context, args);
  // oneDNN may refuse a layout: ours takes them all.
  return status == Status::unsupported && path == GemmPath::onednn ? gemm_by(GemmPath::blocked, context, args) : status;
}

}  // namespace halfstep::cpu
