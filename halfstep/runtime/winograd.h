// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "halfstep/core/export.h"

namespace halfstep {

/// Whether convolutions may be computed by Winograd's algorithms, with fewer multiplications and larger rounding
/// errors.
enum class Winograd : std::int32_t {
  off = 0,        ///< products and sums only: each result within the error of a float32 sum of its own products (more
                  ///< with Float32Precision::high)
  tiles_2x2 = 2,  ///< F(2x2, 3x3) where it is faster: 16 products for 4 results instead of 36
  tiles_4x4 = 4,  ///< F(4x4, 3x3) where it is faster still: 36 products for 16 results instead of 144
};

/// Sets it for all convolutions of the program from now on. It applies to convolutions of 3x3 windows with stride 1,
/// dilation 1 and one group, of channels-last images in float32 or 16 bits, and to their gradients, where it is faster
/// than the direct kernels, the processor's 16-bit units included. Transforms, products and sums are float32. Devices
/// other than the CPU ignore it.
///
///     set_winograd(Winograd::tiles_2x2);
///
/// The error bound of a result follows the inputs of its whole tile instead of those of its window alone:
/// docs/reference/performance.md has it, and measured errors. Where results aren't finite, a convolution is computed
/// again directly, so that overflow is found as without this. Results have the same bits in every run and for any
/// number of threads. Throws Error for another value.
HS_API void set_winograd(Winograd winograd);
/// The current setting: off, or what HALFSTEP_WINOGRAD says (`off`, `2x2` or `4x4`) if the program has not changed it.
HS_API Winograd winograd();
/// `off`, `2x2` or `4x4`.
HS_API const char* name(Winograd winograd);
/// The reverse of name(). Throws Error with the valid choices.
HS_API Winograd winograd_from_string(std::string_view text);

}  // namespace halfstep
