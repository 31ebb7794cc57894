// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep {

/// When an op of a device's tensors runs on the CPU, with copies of its inputs there and of its results back.
struct FallbackOptions {
  bool missing = true;  ///< the device has no kernel for the op or dtype, or its kernel refuses the call
                        ///< (HALFSTEP_FALLBACK=0 turns it off: then such a call is an error)
  /// The device's kernel failed (HALFSTEP_FALLBACK_ON_FAILURE=1 turns it on). Every op then waits until it is done, so
  /// that a failure is known while its inputs are there.
  bool failing = false;
};
HS_API FallbackOptions fallback_options();
HS_API void set_fallback_options(const FallbackOptions& options);

/// What one op cost on its way over the CPU.
struct FallbackCount {
  std::string op;
  std::uint64_t calls = 0;
  std::uint64_t bytes_to_host = 0;
  std::uint64_t bytes_to_device = 0;
  double seconds = 0;          ///< copies and computing
  std::uint64_t failures = 0;  ///< of the calls: because the device's kernel had failed
};
/// All ops that fell back since the start or the last reset, the costliest first.
HS_API std::vector<FallbackCount> fallback_counts();
HS_API void reset_fallback_counts();
/// For the op layer: adds one call.
HS_API void count_fallback(std::string_view op, std::uint64_t bytes_to_host, std::uint64_t bytes_to_device,
                           double seconds, bool failure);

}  // namespace halfstep
