// SPDX-License-Identifier: Apache-2.0
// Matrix products of the CPU backend over plain pointers: every op that multiplies matrices comes here.
#pragma once

#include <cstdint>

#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/runtime/float32_precision.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// A matrix in memory; strides in elements, any values. A stride of 1 in one dimension is fast.
struct GemmOperand {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};

enum class GemmActivation : std::uint8_t { none, relu };

/// c[m, n] = activation(a[m, k] * b[k, n] + beta * c + bias[n]), and the same for each item of a batch.
struct GemmArgs {
  std::int64_t m = 0, n = 0, k = 0;
  GemmOperand a;  ///< [m, k]
  GemmOperand b;  ///< [k, n]
  void* c = nullptr;
  DType c_dtype = DType::f32;
  std::int64_t ldc = 0;        ///< between rows of c, which are contiguous; at least n
  const void* bias = nullptr;  ///< [n], or null; the same for the whole batch
  DType bias_dtype = DType::f32;
  float beta = 0;  ///< 0, or 1 to add to c, which is then f32 (or the operands are f64)
  GemmActivation activation = GemmActivation::none;
  std::int64_t batch = 1;
  /// Between items of the batch, in elements; 0 where one matrix serves all (not c).
  std::int64_t a_batch_stride = 0, b_batch_stride = 0, c_batch_stride = 0;
  Float32Precision precision = float32_precision();  ///< of f32 operands
};

/// Computes a product. Operands of f32, f16 and bf16 in any mixture give f32, f16 or bf16: sums are kept in float32 and
/// rounded once, to nearest even, after bias and activation. f64 operands give f64
/// (or another floating dtype). Integers of any kind give integers
/// of any kind, modulo 2^bits, without bias, beta or activation. Not-a-number and infinities come through, k = 0 is a
/// sum of nothing. The result is the same bits for the same shapes, strides, threads and instruction set, and doesn't
/// depend on where the operands lie beyond their alignment to 64 bytes.
///
/// c overlaps nothing else. Workspace comes from `context`. Returns unsupported for dtypes that don't go together and
/// failed when there is no workspace.
HS_API Status gemm(KernelContext* context, const GemmArgs& args);

/// The ways that a product may take.
enum class GemmPath : std::uint8_t {
  reference,  ///< plain loops: f64 and integers
  narrow,     ///< few rows or a short sum: memory is the limit, operands are read in place
  blocked,    ///< our float32 kernel on packed blocks; 16-bit operands are widened while they are packed
  onednn,     ///< 16-bit units of the processor, through oneDNN
  tiles,      ///< bf16 by our own kernels for AMX
  split,      ///< f32 and f16 on the units of AMX, as sums of bf16
};

/// Which way a product goes on a processor with `isa`: a function of shape and dtypes alone, never of timing (and with
/// AMX of whether this process may use its tiles).
HS_API GemmPath choose_gemm_path(const GemmArgs& args, Isa isa) noexcept;

/// As gemm(), by a given path, for tests and measurements. `reference` serves f64 and integers only, the others serve
/// the rest; `onednn` takes what oneDNN can compute on this processor, `tiles` most operands of bf16 and `split` most
/// of f32, by a model of the tiles where there is no AMX; else they return unsupported.
HS_API Status gemm_by(GemmPath path, KernelContext* context, const GemmArgs& args);

}  // namespace halfstep::cpu
