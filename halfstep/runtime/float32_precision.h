// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "halfstep/core/export.h"

namespace halfstep {

/// The internal precision of float32 matrix products and convolutions on devices.
enum class Float32Precision : std::int32_t {
  highest = 0,  ///< in float32, or by other units as accurately (on the CPU, AMX)
  high = 1,     ///< factors may be rounded to TF32 (8 bits of exponent, 10 of mantissa), where the device has units for
                ///< that; sums stay float32
};

/// Sets it for all devices of the program, including those of plug-ins loaded later. It applies to subsequent calls; a
/// captured step keeps the setting it was captured with. Devices without such units, including the CPU, ignore it.
/// Storage, dtypes and autocast are not affected.
///
///     set_float32_precision(Float32Precision::high);
///
/// PyTorch's torch.set_float32_matmul_precision with "highest" (its default and ours) and "high"; as there, "high"
/// holds for matrix products; here it holds for convolutions too. Throws Error for another value.
HS_API void set_float32_precision(Float32Precision precision);
/// The current setting: highest, or high if HALFSTEP_TF32=1 is set and the program has not changed it.
HS_API Float32Precision float32_precision();
/// `highest` or `high`.
HS_API const char* name(Float32Precision precision);

}  // namespace halfstep
