// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "halfstep/core/export.h"

namespace halfstep {

/// The internal precision of float32 matrix products and convolutions on devices.
enum class Float32Precision : std::int32_t {
  highest = 0,  ///< in float32, or by other units as accurately (on the CPU, AMX)
  high = 1,     ///< factors may be rounded where the device has units for that; sums stay float32
};

/// Sets it for all devices of the program, including those of plug-ins loaded later. It applies to subsequent calls,
/// including replays of captured steps. Storage, dtypes and autocast are not affected.
///
/// With `high`, devices with TF32 units round factors to 8 bits of exponent and 10 of mantissa. CPUs multiply sums of
/// two bfloat16 numbers, within 2^-17 of each factor whose magnitude is at least 2^-109, where they use AMX for float32
/// (docs/reference/performance.md says for which shapes). The product of both second numbers is left out: the error is
/// at most 2^-15 of the sum of the products' magnitudes beside that of `highest`. Other devices and CPUs ignore the
/// setting.
///
///     set_float32_precision(Float32Precision::high);
///
/// PyTorch's torch.set_float32_matmul_precision with "highest" (its default and ours) and "high", which allows the same
/// two ways there, for matrix products; here it holds for convolutions too. Throws Error for another value.
HS_API void set_float32_precision(Float32Precision precision);
/// The current setting: highest, or high if HALFSTEP_TF32=1 is set and the program has not changed it.
HS_API Float32Precision float32_precision();
/// `highest` or `high`.
HS_API const char* name(Float32Precision precision);

}  // namespace halfstep
