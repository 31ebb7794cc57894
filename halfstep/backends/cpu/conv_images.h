// SPDX-License-Identifier: Apache-2.0
// Images to and from dense channels-last float32, a few at a time.
#pragma once

#include <cstdint>

#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// Whether the images [N, C, H, W] lie channels-last without gaps; dimensions of one place don't count.
bool channels_last(const TensorView& images) noexcept;
/// Whether they lie row-major without gaps, likewise.
bool row_major(const TensorView& images) noexcept;

/// `count` images from number `first` on, of f32, f16 or bf16, as float32 [count, H, W, C].
void load_images(const TensorView& images, std::int64_t first, std::int64_t count, float* to);
/// The reverse, rounded to nearest even.
void store_images(const float* from, std::int64_t first, std::int64_t count, TensorView& images);

/// All elements of a dense tensor of f32, f16 or bf16 in their order in memory as float32, and back.
void load_all(const TensorView& dense, float* to);
void store_all(const float* from, TensorView& dense);

}  // namespace halfstep::cpu
