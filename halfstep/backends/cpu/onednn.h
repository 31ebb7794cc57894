// SPDX-License-Identifier: Apache-2.0
// The one place that knows oneDNN.
#pragma once

#include <cstdint>

#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/core/export.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// Whether oneDNN can hold such a product: both operands bf16 giving bf16 or f32, both f16 giving f16 or f32, or all
/// f32. It computes f16 with AVX512-FP16 only, and bf16 slowly where it has to emulate it.
bool onednn_serves(const GemmArgs& args) noexcept;

/// The product by oneDNN's matmul primitive, which is kept for its shape. Returns unsupported where oneDNN refuses.
Status onednn_gemm(KernelContext* context, const GemmArgs& args) noexcept;

/// A float32 matrix whose rows (or, turned, columns) are contiguous and `ld` apart.
struct OneDnnMatrix {
  const float* data;
  std::int64_t ld;
  bool turned;
};

/// c[m, n] = a[m, k] * b[k, n] + beta * c, c by rows. False where oneDNN fails, which is when memory runs out.
bool onednn_sgemm(const OneDnnMatrix& a, const OneDnnMatrix& b, std::int64_t m, std::int64_t n, std::int64_t k,
                  float beta, float* c, std::int64_t ldc) noexcept;

/// oneDNN's version, as "3.2.0".
HS_API const char* onednn_version() noexcept;

}  // namespace halfstep::cpu
