// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// Values whose keys select_first() of sort.cpp looks at together.
inline constexpr std::int64_t kKeyBlock = 32;

/// The keys that sort.cpp orders floats by, of n neighbouring values of f32, f16 or bf16; their complements with
/// `descending`.
void float_keys(DType dtype, const void* values, std::int64_t n, bool descending, std::uint32_t* keys);
/// The least of these keys in each of `blocks` whole blocks.
void least_float_keys(DType dtype, const void* values, std::int64_t blocks, bool descending, std::uint32_t* least);

}  // namespace halfstep::cpu
