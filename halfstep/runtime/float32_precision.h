// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "halfstep/core/export.h"

namespace halfstep {

/// How exactly devices compute matrix products and convolutions of float32 inside.
enum class Float32Precision : std::int32_t {
  highest = 0,  ///< in float32
  high = 1,     ///< factors may be rounded to TF32 (8 bits of exponent, 10 of mantissa), where the device has units for
                ///< that; sums stay float32
};

/// Sets it for all devices of the program, of plug-ins that are loaded later too. Calls that come after it are computed
/// so; a captured step keeps what it was captured with. Devices without such units, the CPU among them, ignore it.
/// Storage, dtypes and autocast are not touched.
///
///     set_float32_precision(Float32Precision::high);
///
/// PyTorch's torch.set_float32_matmul_precision with "highest" (its default and ours) and "high"; as there, "high"
/// holds for matrix products; here it holds for convolutions too. Throws Error for another value.
HS_API void set_float32_precision(Float32Precision precision);
/// What holds now: highest, or high where HALFSTEP_TF32=1 is set and the program has said nothing else.
HS_API Float32Precision float32_precision();
/// `highest` or `high`.
HS_API const char* name(Float32Precision precision);

}  // namespace halfstep
