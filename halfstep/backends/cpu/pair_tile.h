// SPDX-License-Identifier: Apache-2.0
// Products on the processor's bfloat16 units (AVX512-BF16), which multiply pairs: a lane of 32 bits holds two values
// that follow each other along the sum.
#pragma once

#include <cstdint>

#include "halfstep/backends/cpu/gemm_kernels.h"

namespace halfstep::cpu {

/// Floats of a vector.
inline constexpr std::int64_t kPairLanes = 16;

/// The tile of `rows` (1 to 14) by `vectors` (1 or 2) vectors: as GemmKernels::tiles with s contiguous along the rows,
/// but each 32 bits of s and v are a pair of bfloat16, and a step adds both products. To these units subnormal numbers
/// are 0. Where compute_isa() has no avx512_bf16, plain loops.
GemmTileFn bfloat16_pair_tile(int vectors, int rows) noexcept;

/// to[i] = first[i] in the lower and second[i] in the upper half, i < n; each 32 of them begin `panel` behind those
/// before. Up to 31 elements more are written, and as many behind `first` and `second` read. Under the same conditions.
void interleave_pairs(const std::uint16_t* first, const std::uint16_t* second, std::int64_t n, std::uint32_t* to,
                      std::int64_t panel = 32);

}  // namespace halfstep::cpu
