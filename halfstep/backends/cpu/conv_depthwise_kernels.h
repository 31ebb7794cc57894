// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions of channels-last images, a few neighbouring results at a time, compiled for AVX2 and AVX-512
// and chosen at run time. Places are found through arrays of pointers, so that padding, strides and dilation need no
// code of their own: what lies outside the image is one place of zeros.
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// Channels of a place at least: a vector of AVX-512.
inline constexpr std::int64_t kFewestDepthwiseChannels = 16;

/// Places of one row of an image and beyond its edges: pointers to their first channels.
using DepthwisePlaces = const void* const*;

/// Results next to each other, or `pitch` elements apart. Result t is the sum over rows r and taps k of
/// taps[r][k * all + channel] times places[r][first + t * step + k].
struct DepthwiseStrip {
  const DepthwisePlaces* places;  ///< [rows]
  const float* const* taps;       ///< [rows]
  std::int64_t rows;
  std::int64_t first, step;
  const float* bias;  ///< [channels], or null
  void* result;
  std::int64_t pitch;
  std::int64_t channels;
  bool stream;  ///< results go past the caches, which requires them at multiples of 64 bytes
  /// Behind the places of the last `fetched` rows, which no strip has seen before, memory that is `ahead` bytes away
  /// is fetched for later strips.
  std::int64_t fetched, ahead;
};
/// `step` is that of the kernel, or, for one tap a row, any.
using DepthwiseStripKernel = void (*)(const DepthwiseStrip&);

/// Strips of places whose products are added to sums: row r and tap k of a channel to
/// sums[(r * taps + k) * all + channel].
struct DepthwiseTerms {
  const DepthwisePlaces* places;     ///< [strips][rows], of the input
  const DepthwisePlaces* gradients;  ///< [strips], of the output's gradient
  std::int64_t strips, rows, step;
  float* sums;
  std::int64_t channels, all;  ///< channels that are summed, kFewestDepthwiseChannels or more, and those of a place
  std::int64_t offset;         ///< the first of them
  std::int64_t fetched, ahead, ahead_of_gradients;  ///< as a strip's
};
using DepthwiseTermsKernel = void (*)(const DepthwiseTerms&);

/// Widths of strips. Rows of 7, 14, 28, 56 and 112 results are whole multiples of the first.
inline constexpr int kDepthwiseWidths[] = {7, 4, 1};

/// The kernel of strips of `width` results (of kDepthwiseWidths; 7 or 4 for terms) for compute_isa(), images of f32,
/// f16 or bf16, and `taps` a row; null where there is none.
DepthwiseStripKernel depthwise_strip_kernel(DType images, std::int64_t taps, std::int64_t step, int width);
DepthwiseTermsKernel depthwise_terms_kernel(DType images, std::int64_t taps, std::int64_t step, int width,
                                            std::int64_t rows);

}  // namespace halfstep::cpu
