// SPDX-License-Identifier: Apache-2.0
// How a convolution of integers is cut for threads.
#pragma once

#include <cstdint>
#include <vector>

#include "halfstep/backends/cpu/onednn.h"
#include "halfstep/core/export.h"

namespace halfstep::cpu {

/// A smaller convolution of a call: whole images, or some rows of one. Places are numbered as they lie in memory,
/// channels-last, and stand for all their channels.
struct Int8Piece {
  ConvGeometry geometry;
  std::int64_t input, output;  ///< places before the piece's first
  std::int64_t first = 0;      ///< output channel; `geometry` has those of the piece
};

/// Equal shares for at most `threads` threads, each of at most a few rows, some images, and a few rows; what reads
/// single places is one row of them all, and a single place is cut by output channels, into four at most: packed
/// weights are kept for as many. Empty where rows see nothing of the input. Depends on the geometry and the number of
/// threads alone; few threads are asked for little work.
HS_API std::vector<std::vector<Int8Piece>> int8_shares(const ConvGeometry& geometry, int threads);

}  // namespace halfstep::cpu
