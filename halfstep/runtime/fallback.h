// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep {

/// When an op on a device's tensors falls back to the CPU, with its inputs copied there and its results back.
struct FallbackOptions {
  bool missing = true;  ///< the device has no kernel for the op or dtype, or its kernel refuses the call
                        ///< (HALFSTEP_FALLBACK=0 turns it off: then such a call is an error)
  /// The device's kernel failed (HALFSTEP_FALLBACK_ON_FAILURE=1 turns it on). Every op then waits until it is done, so
  /// that a failure is detected while its inputs still exist.
  bool failing = false;
};
HS_API FallbackOptions fallback_options();
HS_API void set_fallback_options(const FallbackOptions& options);

/// The cost of one op's CPU fallback.
struct FallbackCount {
  std::string op;
  std::uint64_t calls = 0;
  std::uint64_t bytes_to_host = 0;
  std::uint64_t bytes_to_device = 0;  ///< of results that a kernel of the device read, or that were part of a block
  double seconds = 0;                 ///< copies and computing
  std::uint64_t failures = 0;         ///< calls that fell back because the device's kernel had failed
};
/// All ops that fell back since the start or the last reset, the most expensive first.
HS_API std::vector<FallbackCount> fallback_counts();
HS_API void reset_fallback_counts();
/// For the op layer: adds one call.
HS_API void count_fallback(std::string_view op, std::uint64_t bytes_to_host, std::uint64_t bytes_to_device,
                           double seconds, bool failure);
/// For the op layer: a result of an earlier call came to the device.
HS_API void count_fallback_result(std::string_view op, std::uint64_t bytes, double seconds);

}  // namespace halfstep
