// SPDX-License-Identifier: Apache-2.0
// Internal: the two passes of a resizing.
#pragma once

#include <cstdint>

namespace halfstep::data {

/// Bits behind the point of a weight: 8 bits are for the pixel and 2 for what a cubic filter goes beyond 0 to 1.
inline constexpr int kWeightBits = 32 - 8 - 2;

// A weight w is kept as two 16-bit numbers, w = 256 * high + low with low from 0 to 255: the instruction that
// multiplies pairs of 16-bit numbers and adds them then gives the exact 32-bit sum in two steps, in half the time of
// 32-bit products.

/// Pixels of one row of a result, from a row of a source. For each of `outputs` pixels `first` has the position of the
/// first source pixel, and `weights` 32 numbers a group of four source pixels: the upper parts of the weights (0 and 1
/// for red, green, blue and nothing, then 2 and 3 likewise), then the lower parts. Reads up to 16 bytes from the start
/// of each group, and writes one byte more than 3 * outputs.
void resize_row(const std::uint8_t* row, const std::int32_t* first, const std::int16_t* weights, std::int64_t outputs,
                std::int64_t groups, std::uint8_t* out);

/// One row of `bytes` bytes from rows that lie `stride` apart; `weights` has for each pair of rows the upper parts of
/// both weights and the lower parts of both. `rows` is the number of rows that may be read: beyond it weights are 0.
/// `in` may be read to 63 bytes beyond a row.
void resize_columns(const std::uint8_t* in, std::int64_t stride, std::int64_t rows, const std::int16_t* weights,
                    std::int64_t pairs, std::int64_t bytes, std::uint8_t* out);

}  // namespace halfstep::data
