// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "halfstep/core/tensor.h"
#include "halfstep/ops/observer.h"

namespace halfstep::debug {

/// Where an op was called, for reports.
struct HS_API CallSite {
  std::uint64_t number = 0;      ///< among the calls that the observer saw, from 1
  std::string op;                ///< or the kernel that runs by itself
  std::string module = {};       ///< path of the module in whose forward it runs, or whose gradient it computes
  std::string backward_of = {};  ///< the op whose gradient is computed; empty in a forward pass
  bool standalone = false;       ///< a kernel that runs by itself, of no op
  Device device = {};
  ExecutionPath path = ExecutionPath::native;

  /// `encoder.fc1: mm (backward of linear)`.
  std::string str() const;
  /// `forward`, `backward`, or `in no pass` for calls outside both, such as an optimizer's.
  const char* pass() const;
};
/// The call that runs on this thread.
HS_API CallSite call_site(const ObservedCall& call, std::uint64_t number);

/// Whether the module at `path` is `module` or inside it: `encoder.fc1` is inside `encoder`.
inline bool in_module(std::string_view path, std::string_view module) {
  return path.starts_with(module) && (path.size() == module.size() || path[module.size()] == '.');
}

/// Summary statistics of a tensor, including integers and bools.
struct HS_API Statistics {
  Shape sizes;
  DType dtype = DType::f32;
  Device device = {};
  std::int64_t numel = 0;
  double min = 0;  ///< of the finite values; NaN when there are none
  double max = 0;
  double mean = 0;
  double abs_sum = 0;  ///< sum of |x| over the finite values
  std::int64_t nan = 0;
  std::int64_t inf = 0;
  std::int64_t zero = 0;
  std::int64_t subnormal = 0;  ///< values between 0 and the dtype's smallest normal number

  /// Whether there is no NaN and no infinity.
  bool finite() const { return nan == 0 && inf == 0; }
  /// `f16 [2, 3]: min -1, max 2, mean 0.5, sum|x| 7; 1 nan, 2 zero`; counts of 0 are left out.
  std::string str() const;
};
/// Statistics of a tensor on any device; sums in float64. Waits for the device.
HS_API Statistics statistics(const Tensor& tensor);

}  // namespace halfstep::debug
