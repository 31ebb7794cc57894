// SPDX-License-Identifier: Apache-2.0
// How a convolution is cut for threads that each compute whole smaller convolutions.
#pragma once

#include <cstdint>
#include <vector>

#include "halfstep/backends/cpu/onednn.h"
#include "halfstep/core/export.h"

namespace halfstep::cpu {

/// Images [first, first + count) of a convolution, all their rows, or some rows of one: those that `geometry` (with
/// n = count) is about. The part that is computed is this piece's own; of the weight's gradient it is a term.
struct ConvPiece {
  ConvGeometry geometry;
  std::int64_t first;      ///< image
  std::int64_t input_row;  ///< where the rows begin
  std::int64_t output_row;
};

/// The pieces of each share, in order. Shares differ by little, and depend on the geometry and their number alone; few
/// are made of little work.
struct ConvShares {
  std::vector<std::vector<ConvPiece>> shares;
  bool bands = false;  ///< pieces are rows of images: there are too few images for the shares
};

/// How many shares to ask conv_shares() for, of an output or an input gradient: up to four for each thread, so that
/// idle threads can steal them, if all are the same number of images and take a quarter of a millisecond of float32 on
/// AVX-512. Otherwise one for each thread.
HS_API std::int64_t stolen_shares(const ConvGeometry& geometry, std::int64_t threads) noexcept;

/// Cuts a convolution into at most `shares` shares, none of them empty. `most_images`: of a piece. However outputs and
/// input gradients are cut, oneDNN's direct kernels give them the same bits: where windows move by several rows, a band
/// of the input begins at a multiple of them, since the taps that reach a row, and their order, follow from its phase.
/// Without `bands` images stay whole.
HS_API ConvShares conv_shares(ConvPart part, const ConvGeometry& geometry, std::int64_t shares,
                              std::int64_t most_images, bool bands = true);

/// The number of terms of which a weight's gradient is the ordered sum, each over a part of `places` output places (or
/// tiles of them): a power of two up to 16, with at least 1,024 places each, to which writing and adding the terms adds
/// little. It must not follow the number of threads, so that the bits of the gradient don't.
HS_API std::int64_t weight_terms(std::int64_t places) noexcept;

}  // namespace halfstep::cpu
