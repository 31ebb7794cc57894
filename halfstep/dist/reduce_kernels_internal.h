// SPDX-License-Identifier: Apache-2.0
// Internal: the loops of reductions, compiled with the options of the CPU's kernels.
#pragma once

#include <cstdint>
#include <span>

#include "halfstep/core/float16.h"
#include "halfstep/dist/process_group.h"

namespace halfstep::dist::detail {

/// reduce_in_order for T of float, double and the integers; mean divides by `divisor` (floating T only).
template <class T>
void reduce_values(ReduceOp op, std::span<const T* const> inputs, T* output, std::int64_t n, int divisor);

/// The same of 16-bit values, added up and left in float32. n is at most kWidenedBlock.
template <class T>
void reduce_widened(ReduceOp op, std::span<const T* const> inputs, float* output, std::int64_t n, int divisor);
inline constexpr std::int64_t kWidenedBlock = 2048;

extern template void reduce_widened(ReduceOp, std::span<const Half* const>, float*, std::int64_t, int);
extern template void reduce_widened(ReduceOp, std::span<const BFloat16* const>, float*, std::int64_t, int);
extern template void reduce_values(ReduceOp, std::span<const float* const>, float*, std::int64_t, int);
extern template void reduce_values(ReduceOp, std::span<const double* const>, double*, std::int64_t, int);
extern template void reduce_values(ReduceOp, std::span<const std::int64_t* const>, std::int64_t*, std::int64_t, int);
extern template void reduce_values(ReduceOp, std::span<const std::int32_t* const>, std::int32_t*, std::int64_t, int);
extern template void reduce_values(ReduceOp, std::span<const std::int8_t* const>, std::int8_t*, std::int64_t, int);
extern template void reduce_values(ReduceOp, std::span<const std::uint8_t* const>, std::uint8_t*, std::int64_t, int);

}  // namespace halfstep::dist::detail
