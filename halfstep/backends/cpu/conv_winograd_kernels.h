// SPDX-License-Identifier: Apache-2.0
// The transforms of Winograd's convolutions F(2x2, 3x3) and F(4x4, 3x3), compiled for AVX2 and AVX-512 and chosen at
// run time. A tile of m x m results comes from t x t places of the input, t = m + 2.
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// Dense channels-last images, or some neighbouring channels of them, and how they are cut into tiles: `rows` by
/// `columns` of them an image.
struct WinogradImages {
  DType dtype;  ///< f32, f16 or bf16
  void* data;   ///< the first of the channels
  std::int64_t height, width, channels;
  std::int64_t pitch;  ///< elements from a place to the next: all channels
  std::int64_t rows, columns;
  std::int64_t before[2];  ///< zeros above and to the left; any number, negative ones leave places out
  const void* zeros;       ///< `channels` of them, for the input
};

/// Where the numbers of `count` tiles lie from number `first` on: number k (of t t) of tile i and channel c at
/// data[k * apart + (i - first) * stride + c]. Strides are whole vectors of 16.
struct WinogradTiles {
  std::int64_t first, count;
  float* data;
  std::int64_t apart, stride;
};

struct WinogradKernels {
  /// B' d B of the tiles. What lies between channels and stride may be written.
  void (*input)(const WinogradImages& images, const WinogradTiles& to);
  /// A' m A of the tiles plus bias (or null), rounded once. Whether all results were finite before.
  bool (*output)(const WinogradTiles& from, const float* bias, const WinogradImages& images);
  /// G g G': number k of `n` weights to to[k * apart + i], element e (of 9) of weight i at from[e * stride + i]. All in
  /// whole vectors of 16.
  void (*weight)(const float* from, std::int64_t stride, std::int64_t n, float* to, std::int64_t apart);
  /// A y A' of tiles of the output's gradient, with zeros beyond its edges.
  void (*gradient)(const WinogradImages& images, const WinogradTiles& to);
  /// G' p G of n weights, from the order of `weight`'s results to that of its operands. Whether all were finite.
  bool (*weight_gradient)(const float* from, std::int64_t apart, std::int64_t n, float* to, std::int64_t stride);
};

/// The kernels of tiles of m x m results, 2 or 4, for compute_isa().
const WinogradKernels& winograd_kernels(int m);

}  // namespace halfstep::cpu
