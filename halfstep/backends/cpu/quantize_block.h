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

// For C of float and double.

/// y = the grid's values of x, and mask, unless it is null, whether the integer was in range before clamping.
template <class C>
void grid_values(const Grid<C>& grid, const C* x, std::int64_t n, C* y, std::uint8_t* mask);
/// The grid's integers of x.
template <class C>
void grid_integers(const Grid<C>& grid, const C* x, std::int64_t n, C* y);
/// What integers stand for.
template <class C>
void grid_points(const Grid<C>& grid, const C* x, std::int64_t n, C* y);
/// The gradients of grid_values for whole zero points; that of x unless it is null. Those of scale and zero point,
/// unless they are null, are the sums, for one channel, and else written for each element.
template <class C>
GridSums grid_gradients(const Grid<C>& grid, const C* g, const C* x, std::int64_t n, C* x_grad, C* scale_grad,
                        C* zero_grad);
/// g where mask is not 0, else 0.
template <class C>
void masked_values(const C* g, const std::uint8_t* mask, std::int64_t n, C* y);
/// x between 0 and alpha.
template <class C>
void clipped_values(const C* x, C alpha, std::int64_t n, C* y);
/// The gradient of x, unless it is null; returns the sum of alpha's.
template <class C>
double clipped_gradients(const C* g, const C* x, C alpha, std::int64_t n, C* x_grad);

/// The grid's values of n numbers as they lie in memory, and the mask, as above. False, and nothing is written, unless
/// the grid is of one channel without a fraction, and both dtypes are the same one of 16 bits, or the input's is f32.
bool grid_values_of(const Grid<float>& grid, DType in, const void* x, std::int64_t n, DType out, void* y,
                    std::uint8_t* mask);
/// masked_values() of numbers of 16 bits, whatever they are.
void masked_bits(const std::uint16_t* g, const std::uint8_t* mask, std::int64_t n, std::uint16_t* y);

/// Widens low to high by the finite ones of n values.
void widen_by_finite(const float* x, std::int64_t n, float* low, float* high);
/// The same of a range for each element.
void widen_each_by_finite(const float* x, std::int64_t n, float* low, float* high);

}  // namespace halfstep::cpu
