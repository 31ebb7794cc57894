// SPDX-License-Identifier: Apache-2.0
// Splits numbers into sums of bfloat16 numbers, their parts, after G. Henry, P. T. P. Tang and A. Heinecke, "Leveraging
// the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations" (2019).
//
// float32: three parts, which are the number rounded to bfloat16, the remainder rounded likewise, and what remains
// then. They add up to the number exactly if its magnitude is at least 2^-110. Units that flush subnormal numbers
// multiply all three parts if it is at least 2^-103; below, a part under 2^-126 counts as 0. float16: two parts, which
// always add up exactly. For Float32Precision::high float32 numbers are split into two parts, the second one rounded;
// they add up to the number within 2^-17 of it if its magnitude is at least 2^-109.
//
// At least one part of an infinity, of NaN, and of a magnitude that rounds to 2^128 is infinite or NaN, and so is every
// sum of products with all parts.
//
// The parts are packed for TileProduct in pairs of numbers: i and i + 16 of 32 that follow each other along the sum, or
// whatever two the caller takes together.
#pragma once

#include <cstdint>
#include <type_traits>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/core/float16.h"
#include "halfstep/runtime/float32_precision.h"

namespace halfstep::cpu {

inline constexpr std::int64_t kSplitGroup = 32;

/// How numbers are stored, and how they are split.
template <class Stored, TileParts Parts>
struct SplitNumber {
  using Element = Stored;
  static constexpr TileParts kTileParts = Parts;
  static constexpr std::int64_t kParts = count_parts(Parts);
};
using SplitFloat = SplitNumber<float, TileParts::three>;
using SplitFloatInTwo = SplitNumber<float, TileParts::leading_two>;
using SplitHalf = SplitNumber<Half, TileParts::two>;
using WholeBFloat = SplitNumber<std::uint16_t, TileParts::one>;

/// How elements of f32, f16 or bf16 are split.
constexpr TileParts tile_parts(DType dtype, Float32Precision precision) {
  if (dtype == DType::f32) return precision == Float32Precision::high ? TileParts::leading_two : TileParts::three;
  return dtype == DType::f16 ? TileParts::two : TileParts::one;
}
/// f(number) with the SplitNumber of these parts.
template <class F>
decltype(auto) with_split_number(TileParts parts, F&& f) {
  switch (parts) {
    case TileParts::one:
      return f(WholeBFloat{});
    case TileParts::two:
      return f(SplitHalf{});
    case TileParts::leading_two:
      return f(SplitFloatInTwo{});
    default:
      return f(SplitFloat{});
  }
}

/// Where packed pairs go: those of part p are at to + p * part.
struct SplitTo {
  std::uint32_t* to;
  std::int64_t part;
};

/// Splits `n` numbers that follow each other along the sum. Each group of 32, the last one filled up with zeros,
/// becomes a line of 16 pairs; groups are `group` apart. Prefetches what is `ahead` numbers behind each of them.
template <class Number>
HS_API void split_along(const typename Number::Element* from, std::int64_t n, const SplitTo& to, std::int64_t group,
                        std::int64_t ahead);

/// Splits two lines of `n` numbers: pair j, of first[j] and second[j], is at j / 32 * panel + j % 32. Prefetches what
/// is `ahead` numbers behind each of them.
template <class Number>
HS_API void split_across(const typename Number::Element* first, const typename Number::Element* second, std::int64_t n,
                         const SplitTo& to, std::int64_t panel, std::int64_t ahead);

/// Splits 32 lines, of which lines i and i + 16 are pairs. Of each line it takes 16 numbers, `n` of them and zeros if n
/// is smaller; the 16 pairs of number j are at j * 16. Prefetches as split_across().
template <class Number>
HS_API void split_turned(const typename Number::Element* const* lines, std::int64_t n, const SplitTo& to,
                         std::int64_t ahead);

/// Splits `count` lines, at most 16 of them and `stride` apart, of `n` numbers along the sum, at most 32. Pair i of
/// line j is at i * 32 + j, with zeros up to 32 numbers and 16 lines.
template <class Number>
HS_API void split_columns(const typename Number::Element* from, std::int64_t stride, std::int64_t count, std::int64_t n,
                          const SplitTo& to);

/// Float32 sums [rows, columns] in panels of 32 columns. A panel's rows are 32 apart, panels are `panel` apart.
struct PanelSums {
  const float* sums;
  std::int64_t panel, rows, columns;
  const float* bias = nullptr;          ///< [columns], added to what is copied; or null
  const std::int32_t* lines = nullptr;  ///< the line that row i goes to, negative for a row to skip; null: line i
};
/// Whether all sums are finite, but for skipped rows. Copies them, with the bias and rounded once, to lines that are
/// `stride` apart, unless `to` is null. With `stream` it uses non-temporal stores, and the thread must call
/// AmxKernels::fence() before it signals others.
template <class Element>
HS_API bool copy_finite(const PanelSums& from, Element* to, std::int64_t stride, bool stream);

}  // namespace halfstep::cpu
