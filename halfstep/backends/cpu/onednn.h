// SPDX-License-Identifier: Apache-2.0
// The one place that knows oneDNN.
#pragma once

#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/core/export.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// Whether oneDNN can hold such a product: both operands bf16 giving bf16 or f32, both f16 giving f16 or f32, or all
/// f32. It computes f16 with AVX512-FP16 only, and bf16 slowly where it has to emulate it.
bool onednn_serves(const GemmArgs& args) noexcept;

/// The product by oneDNN's matmul primitive, which is kept for its shape. Returns unsupported where oneDNN refuses.
Status onednn_gemm(KernelContext* context, const GemmArgs& args) noexcept;

/// oneDNN's version, as "3.2.0".
HS_API const char* onednn_version() noexcept;

}  // namespace halfstep::cpu
