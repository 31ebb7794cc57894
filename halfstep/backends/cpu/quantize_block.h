// SPDX-License-Identifier: Apache-2.0
// Fake quantization of blocks of values that lie next to each other, in float32 and float64.
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// The grid of a block: of one channel, or of a channel for each element.
template <class C>
struct Grid {
  const C* scale;
  const C* inverse;  ///< 1 / scale
  const C* zero;
  C least, most;
  bool each;      ///< the pointers lead to a number for each element, else to one for all
  bool fraction;  ///< the zero point may have one: it is added before rounding
};

/// What a block adds to the gradients of scale and zero point.
struct GridSums {
  double scale, zero;
};

#define HALFSTEP_GRID_BLOCKS(C)                                                                                     \
  /** y = the grid's values of x, and mask, unless it is null, whether the integer was in range before clamping. */ \
  void grid_values(const Grid<C>& grid, const C* x, std::int64_t n, C* y, std::uint8_t* mask);                      \
  /** The grid's integers of x. */                                                                                  \
  void grid_integers(const Grid<C>& grid, const C* x, std::int64_t n, C* y);                                        \
  /** What integers stand for. */                                                                                   \
  void grid_points(const Grid<C>& grid, const C* x, std::int64_t n, C* y);                                          \
  /** The gradients of grid_values for whole zero points; that of x unless it is null. Those of scale and zero are  \
   * the sums, for one channel, and else written for each element. */                                               \
  GridSums grid_gradients(const Grid<C>& grid, const C* g, const C* x, std::int64_t n, C* x_grad, C* scale_grad,    \
                          C* zero_grad);                                                                            \
  /** g where mask is not 0, else 0. */                                                                             \
  void masked_values(const C* g, const std::uint8_t* mask, std::int64_t n, C* y);                                   \
  /** x between 0 and alpha. */                                                                                     \
  void clipped_values(const C* x, C alpha, std::int64_t n, C* y);                                                   \
  /** The gradient of x, unless it is null, and the sum of alpha's. */                                              \
  double clipped_gradients(const C* g, const C* x, C alpha, std::int64_t n, C* x_grad);
HALFSTEP_GRID_BLOCKS(float)
HALFSTEP_GRID_BLOCKS(double)
#undef HALFSTEP_GRID_BLOCKS

/// The grid's values of n numbers as they lie in memory, and the mask, as above. False, and nothing is written, unless
/// the grid is of one channel without a fraction, and both dtypes are the same one of 16 bits, or the input's is f32.
bool grid_values(const Grid<float>& grid, DType in, const void* x, std::int64_t n, DType out, void* y,
                 std::uint8_t* mask);
/// As above, for numbers of 16 bits.
void masked_values(const std::uint16_t* g, const std::uint8_t* mask, std::int64_t n, std::uint16_t* y);

/// Widens low to high by the finite ones of n values.
void widen_by_finite(const float* x, std::int64_t n, float* low, float* high);
/// The same of a range for each element.
void widen_each_by_finite(const float* x, std::int64_t n, float* low, float* high);

}  // namespace halfstep::cpu
