// SPDX-License-Identifier: Apache-2.0
// Numbers as sums of bfloat16. Of float32 they are three: the number rounded to bfloat16, what is left of it likewise,
// and the rest. Their sum is the number for magnitudes from 2^-110 on. When they are multiplied, a part below 2^-126
// counts as 0, which those of magnitudes from 2^-103 on aren't. Of float16 they are two, and always exact. Of
// infinities, NaN, and magnitudes that round to 2^128 at least one part is infinite or NaN, and so is every sum of
// products with it.
//
// The parts are packed as TileProduct wants them, in groups of 32 numbers that follow each other along the sum: numbers
// i and i + 16 of a group are a pair.
#pragma once

#include <cstdint>

#include "halfstep/core/export.h"
#include "halfstep/core/float16.h"

namespace halfstep::cpu {

inline constexpr std::int64_t kSplitGroup = 32;
/// Parts of an element, float or Half.
template <class Element>
inline constexpr std::int64_t kSplitParts = sizeof(Element) == sizeof(float) ? 3 : 2;

/// Where packed pairs go: those of part p to to[p * part ...].
struct SplitTo {
  std::uint32_t* to;
  std::int64_t part;
};

/// Of `n` numbers along the sum, and zeros up to a whole group: 16 pairs of each group in a line, `group` from one
/// group's to the next one's.
template <class Element>
HS_API void split_along(const Element* from, std::int64_t n, const SplitTo& to, std::int64_t group);

/// Of two lines of `n` numbers: pair j is first[j] and second[j], at to[j / 32 * panel + j % 32]. `ahead`: numbers from
/// each of these to what will be read soon, which is prefetched.
template <class Element>
HS_API void split_across(const Element* first, const Element* second, std::int64_t n, const SplitTo& to,
                         std::int64_t panel, std::int64_t ahead);

/// Of 32 lines that follow each other along the sum, 16 numbers of each (`n` of them, and zeros): number j's 16 pairs
/// are at to[j * 16 ...].
template <class Element>
HS_API void split_turned(const Element* const* lines, std::int64_t n, const SplitTo& to, std::int64_t ahead);

/// Of `count` lines (at most 16, `stride` apart) of `n` numbers along the sum, at most 32 and zeros behind them: line
/// j's pair i is at to[i * 32 + j], zeros in the lines up to 16.
template <class Element>
HS_API void split_columns(const Element* from, std::int64_t stride, std::int64_t count, std::int64_t n,
                          const SplitTo& to);

/// [rows, columns] float32 in panels of 32 columns, lines of 32 in each, `panel` from one to the next.
struct PanelSums {
  const float* sums;
  std::int64_t panel, rows, columns;
  const float* bias = nullptr;  ///< of each column, is added when they are copied
  const std::int32_t* lines =
      nullptr;  ///< where each row goes, or below 0 where it doesn't count; null: row i to line i
};
/// Whether none of them is infinite or NaN. Copies them, rounded, to lines `stride` apart, unless `to` is null; with
/// non-temporal stores if `stream`, after which the thread must call AmxKernels::fence() before it signals others.
template <class Element>
HS_API bool copy_finite(const PanelSums& from, Element* to, std::int64_t stride, bool stream);

}  // namespace halfstep::cpu
