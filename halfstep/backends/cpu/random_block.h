// SPDX-License-Identifier: Apache-2.0
// Blocks of a Philox stream in vectors: the words of core/philox.h, and normals of core/box_muller.h from them.
#pragma once

#include <cstdint>

#include "halfstep/core/export.h"
#include "halfstep/core/philox.h"

namespace halfstep::cpu {

/// The words of `blocks` blocks of the stream that starts at `state`, from block `first` on: 4 a block.
HS_API void random_words(PhiloxState state, std::uint64_t first, std::int64_t blocks, std::uint32_t* words);
/// The standard normals of these blocks, 4 a block, as `normal_at` numbers them. Within a few units of the last place
/// of double, so that what is rounded to float32 or less is within 0.5001 units.
HS_API void random_normals(PhiloxState state, std::uint64_t first, std::int64_t blocks, double* normals);

}  // namespace halfstep::cpu
