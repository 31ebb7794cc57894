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

/// The pieces of each thread's share, in order. Shares differ by little, and depend on the geometry and the number of
/// threads alone; few threads are asked for little work.
struct ConvShares {
  std::vector<std::vector<ConvPiece>> shares;
  bool bands = false;  ///< pieces are rows of images: there are too few images for the threads
};

/// Cuts a convolution for at most `threads` threads. `most_images`: of a piece.
HS_API ConvShares conv_shares(ConvPart part, const ConvGeometry& geometry, int threads, std::int64_t most_images);

}  // namespace halfstep::cpu
