// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "halfstep/core/device.h"
#include "halfstep/core/export.h"

namespace halfstep::conformance {

/// One line of a check: a family of cases in one dtype.
struct HS_API DeviceCheckLine {
  std::string name;                   ///< of the family: `matrix products`
  std::string dtype;                  ///< `f16`; empty where it says nothing
  int cases = 0;                      ///< that were run
  double worst = 0;                   ///< largest error of all cases, in units of its case's bound; above 1 is too much
  std::string worst_case;             ///< the case that it was found in
  std::string bound;                  ///< its bound, in words
  std::vector<std::string> on_cpu;    ///< ops that ran on the CPU instead of the device; empty: all native
  std::vector<std::string> problems;  ///< what went wrong, one entry per case; empty: the line is ok
  double seconds = 0;                 ///< including the CPU's part
  std::string note;                   ///< what was not checked, and why; may be empty
  /// Whether nothing went wrong.
  bool passed() const { return problems.empty(); }
};

/// What check_device() found.
struct HS_API DeviceCheckReport {
  Device device;                       ///< that was checked
  std::vector<DeviceCheckLine> lines;  ///< in the order in which they were run
  double seconds = 0;                  ///< of all
  bool lost = false;                   ///< the device failed permanently, so that later lines are missing
  /// Whether all lines have passed.
  bool passed() const;
};

/// Options of check_device().
struct DeviceCheckOptions {
  bool quick = false;  ///< small tensors only: seconds, also on a device that is slow
  std::function<void(const DeviceCheckLine&)> on_line = {};  ///< called for each line when it is done
};

/// Compares a device with the CPU: casts of every 16-bit pattern, copies of odd strides, every family of ops forward
/// and backward in f32, f16, bf16 and some in f64, random numbers, gradient scaling with injected infinities and NaNs,
/// optimizers with master weights, a few training steps of two networks, captured steps by the device's graphs,
/// collectives between the devices of the kind, queues, events and pinned memory, and that a wrong index is reported.
/// Takes about a minute. Inputs are always the same.
///
/// The reference is the CPU in float64 on the same inputs. With u the roundoff of the result's dtype (2^-24, 2^-11,
/// 2^-8), an error may be
///
///     r u |x| + n 2^-24 S
///
/// with r the roundings that the result goes through in its dtype (1, in a backward pass 1 more for each saved result),
/// n those in float32 (of a product of matrices: the length of the sum; of a reduction over n: 2 sqrt(n) + 16, which a
/// blocked sum keeps), and S the sum of the magnitudes of what is added up. Results of ops that only move, compare,
/// round once or draw random numbers must be bit-identical. A network's error after some steps may be 4 times that of
/// the CPU in the same precision. Throws DeviceError for a device that isn't there. All settings that it changes
/// (float32 precision, fallback, graphs, random state) are restored.
HS_API DeviceCheckReport check_device(Device device, const DeviceCheckOptions& options = {});

}  // namespace halfstep::conformance
