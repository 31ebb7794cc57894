// SPDX-License-Identifier: Apache-2.0
// Products of 16-bit operands on the processor's units, by oneDNN. Each thread has a product of its own: columns of the
// result where there are enough, else rows, else items of a batch. oneDNN's kernels for units want dense matrices, so a
// part of a row-major operand is copied, and a part of the result written, through scratch memory: that is little
// beside the reordering of the operands that the kernels do anyway. (On two cores with AMX, 64 x 512 x 784 takes 41
// microseconds so, and 46 by oneDNN's own threads, which wait for each other; 55 in halves by rows, which both reorder
// all of b.)
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/gemm_internal.h"
#include "halfstep/backends/cpu/onednn.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Multiply-adds of units that are worth a thread: about 10 microseconds.
constexpr double kGemmOnednnWorkPerThread = 1'000'000;
constexpr std::int64_t kRows = 32, kColumns = 64;  // of a part, a multiple of
// Steps of a long sum that are taken at a time, so that copies of operands stay in the cache and take little memory:
// with AVX512-FP16 or AMX oneDNN reorders all of them.
constexpr std::int64_t kStepsAtOnce = 1024, kReorderedSteps = 768, kStepsMultiple = 64;

/// A part of a product, and what of it lies in scratch memory.
struct Part {
  GemmArgs g;      ///< as given, of this part
  GemmArgs dense;  ///< as oneDNN gets it, without addresses in scratch memory
  bool copy_a, copy_b, through_c;
  std::size_t scratch = 0, a_bytes = 0, b_bytes = 0, c_bytes = 0;

  std::size_t bytes() const { return scratch + a_bytes + b_bytes + c_bytes; }
};

bool is_dense(const GemmOperand& x, std::int64_t rows, std::int64_t cols) {
  return (x.col_stride == 1 && x.row_stride == cols) || (x.row_stride == 1 && x.col_stride == rows);
}

void make_dense(GemmOperand& x, std::int64_t rows, std::int64_t cols) {
  const bool turned = x.row_stride == 1 && x.col_stride != 1;
  x.row_stride = turned ? 1 : cols;
  x.col_stride = turned ? rows : 1;
}

void copy_dense(const GemmOperand& x, std::int64_t rows, std::int64_t cols, void* to) {
  const bool turned = x.row_stride == 1 && x.col_stride != 1;
  const std::int64_t lines = turned ? cols : rows, stride = turned ? x.col_stride : x.row_stride;
  const std::size_t length = static_cast<std::size_t>(turned ? rows : cols) * item_size(x.dtype);
  for (std::int64_t i = 0; i < lines; ++i) {
    std::memcpy(static_cast<char*>(to) + static_cast<std::size_t>(i) * length, element(x.dtype, x.data, i * stride),
                length);
  }
}

/// Rows of c from their dense place, added to what is there for beta = 1.
void copy_result(const GemmArgs& g, const void* from) {
  const std::size_t length = static_cast<std::size_t>(g.n) * item_size(g.c_dtype);
  for (std::int64_t i = 0; i < g.m; ++i) {
    const char* const row = static_cast<const char*>(from) + static_cast<std::size_t>(i) * length;
    char* const to = static_cast<char*>(element(g.c_dtype, g.c, i * g.ldc));
    if (g.beta == 0) {
      std::memcpy(to, row, length);
      continue;
    }
    for (std::int64_t j = 0; j < g.n; ++j) reinterpret_cast<float*>(to)[j] += reinterpret_cast<const float*>(row)[j];
  }
}

/// How a product is divided: a function of its shape and the threads alone.
struct Cut {
  std::int64_t batches = 1, rows = 1, columns = 1;
  std::int64_t parts() const { return batches * rows * columns; }

  Cut(const GemmArgs& g, std::int64_t threads) {
    // Parts of rows all reorder b. Parts of columns write their results through scratch memory, which costs more than
    // that where there are more rows than steps, and takes memory as large as the result.
    const bool tall = g.m >= threads * kRows && g.m > (threads - 1) * g.k;
    if (g.batch > 1) {
      batches = std::min(g.batch, threads);
    } else if (g.n >= threads * kColumns && !tall) {
      columns = threads;
    } else {
      rows = std::clamp<std::int64_t>(g.m / kRows, 1, threads);
    }
  }

  Part part(const GemmArgs& g, std::int64_t i) const {
    const auto edge = [](std::int64_t n, std::int64_t of, std::int64_t k, std::int64_t block) {
      return k == of ? n : n * k / of / block * block;
    };
    const std::int64_t b = i / (rows * columns), r = i / columns % rows, c = i % columns;
    const std::int64_t b0 = edge(g.batch, batches, b, 1), m0 = edge(g.m, rows, r, kRows),
                       n0 = edge(g.n, columns, c, kColumns);
    Part p = {};
    GemmArgs& one = p.g = g;
    one.batch = edge(g.batch, batches, b + 1, 1) - b0;
    one.m = edge(g.m, rows, r + 1, kRows) - m0;
    one.n = edge(g.n, columns, c + 1, kColumns) - n0;
    one.a.data = element(g.a.dtype, g.a.data, b0 * g.a_batch_stride + m0 * g.a.row_stride);
    one.b.data = element(g.b.dtype, g.b.data, b0 * g.b_batch_stride + n0 * g.b.col_stride);
    one.c = static_cast<char*>(element(g.c_dtype, g.c, b0 * g.c_batch_stride + m0 * g.ldc + n0));
    if (g.bias != nullptr) one.bias = element(g.bias_dtype, g.bias, n0);
    p.dense = one;
    if (g.batch > 1) return p;
    p.copy_a = !is_dense(one.a, one.m, one.k);
    p.copy_b = !is_dense(one.b, one.k, one.n);
    p.through_c = one.ldc != one.n || (one.beta != 0 && one.bias == nullptr && one.activation == GemmActivation::none);
    if (p.copy_a)
      make_dense(p.dense.a, one.m, one.k),
          p.a_bytes = whole_lines(static_cast<std::size_t>(one.m * one.k) * item_size(one.a.dtype));
    if (p.copy_b)
      make_dense(p.dense.b, one.k, one.n),
          p.b_bytes = whole_lines(static_cast<std::size_t>(one.k * one.n) * item_size(one.b.dtype));
    if (p.through_c) {
      p.dense.ldc = one.n;
      p.dense.beta = 0;
      p.c_bytes = whole_lines(static_cast<std::size_t>(one.m * one.n) * item_size(one.c_dtype));
    }
    return p;
  }
};

// By shape and dtypes alone, not by how it is cut: the order of a sum mustn't follow the number of threads.
std::int64_t steps_at_once(const GemmArgs& g) {
  const bool added_up =
      g.batch == 1 && g.c_dtype == DType::f32 && g.bias == nullptr && g.activation == GemmActivation::none;
  const std::int64_t most = compute_isa() >= Isa::avx512_fp16 ? kReorderedSteps : kStepsAtOnce;
  if (!added_up || g.k <= most) return g.k;
  return round_up(divide_up(g.k, divide_up(g.k, most)), kStepsMultiple);
}

/// Steps from k0 on, added to those before.
GemmArgs some_steps(const GemmArgs& g, std::int64_t k0, std::int64_t steps) {
  GemmArgs some = g;
  some.k = std::min(steps, g.k - k0);
  some.a.data = element(g.a.dtype, g.a.data, k0 * g.a.col_stride);
  some.b.data = element(g.b.dtype, g.b.data, k0 * g.b.row_stride);
  if (k0 > 0) some.beta = 1;
  return some;
}

bool run(const Part& p, char* memory) {
  GemmArgs g = p.dense;
  char* at = memory + p.scratch;
  if (p.copy_a) {
    copy_dense(p.g.a, g.m, g.k, at);
    g.a.data = at;
    at += p.a_bytes;
  }
  if (p.copy_b) {
    copy_dense(p.g.b, g.k, g.n, at);
    g.b.data = at;
    at += p.b_bytes;
  }
  if (p.through_c) g.c = at;
  if (!onednn_product(g, memory)) return false;
  if (p.through_c) copy_result(p.g, at);
  return true;
}

}  // namespace

Status gemm_onednn(KernelContext* context, const GemmArgs& g) {
  const double work =
      static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k) * static_cast<double>(g.batch);
  const int most = in_parallel_region() ? 1 : num_threads();
  const Cut cut(g,
                static_cast<std::int64_t>(std::clamp(work / kGemmOnednnWorkPerThread, 1.0, static_cast<double>(most))));
  // Whether there are primitives for all parts is known before any is written.
  std::size_t bytes = 0;
  const std::int64_t steps = steps_at_once(g);
  const auto planned = [&](std::int64_t i, std::int64_t k0) -> std::optional<Part> {
    Part p = cut.part(some_steps(g, k0, steps), i);
    // After bias or activation nothing can be added.
    if (p.through_c && g.beta != 0 && (g.bias != nullptr || g.activation != GemmActivation::none)) return std::nullopt;
    const auto scratch = onednn_product_scratch(p.dense);
    if (!scratch) return std::nullopt;
    p.scratch = whole_lines(*scratch);
    return p;
  };
  for (std::int64_t i = 0; i < cut.parts(); ++i) {
    for (std::int64_t k0 = 0; k0 < g.k; k0 += steps) {
      const auto p = planned(i, k0);
      if (!p) return Status::unsupported;
      bytes = std::max(bytes, p->bytes());
    }
  }
  char* memory = nullptr;
  if (bytes > 0) {
    memory = static_cast<char*>(context->workspace(context, bytes * static_cast<std::size_t>(cut.parts())));
    if (memory == nullptr) {
      context->set_error(context, "matrix product: out of memory for the workspace");
      return Status::failed;
    }
  }
  if (runs_dry(context)) return Status::ok;
  std::atomic<bool> done{true};
  parallel_for(cut.parts(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      for (std::int64_t k0 = 0; k0 < g.k; k0 += steps) {
        const auto p = planned(i, k0);
        if (!p || !run(*p, memory + static_cast<std::size_t>(i) * bytes)) done.store(false, std::memory_order_relaxed);
      }
    }
  });
  if (done.load(std::memory_order_relaxed)) return Status::ok;
  context->set_error(context, "matrix product: oneDNN failed, which is when memory runs out");
  return Status::failed;
}

}  // namespace halfstep::cpu
