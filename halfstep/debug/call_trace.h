// SPDX-License-Identifier: Apache-2.0
// Which ops a piece of a program calls: where each runs, in which dtype, with how many operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "halfstep/debug/call_site.h"

namespace halfstep::debug {

/// A tensor that a call took or gave; one that was left out isn't `defined`.
struct TracedTensor {
  bool defined = false;
  DType dtype = DType::f32;
  Shape sizes = {};
  Shape strides = {};         ///< in elements
  std::uint64_t address = 0;  ///< of the first element, in its device's memory; 0 where that isn't looked at

  /// From the first element to behind the last one, gaps included; 0 without elements.
  std::uint64_t bytes() const;
};

/// A call of an op or of a kernel that runs by itself.
struct TracedCall {
  CallSite site = {};
  std::string kernel = {};   ///< what plug-ins know it by; empty for a view and a copy between devices
  DType dtype = DType::f32;  ///< that the kernel was chosen by
  std::vector<Shape> outputs = {};
  std::vector<DType> output_dtypes = {};
  std::int64_t multiply_adds = 0;          ///< multiply_adds() of the call
  std::vector<TracedTensor> inputs = {};   ///< as the kernel took them
  std::vector<TracedTensor> results = {};  ///< those of `outputs`, and those that were left out
  std::vector<std::byte> attributes = {};  ///< a copy of the struct that the kernel got
  bool repeatable = false;                 ///< the kernel can be run again with what is here: its attributes are known
};

/// Multiplications with an addition of a matrix product or a convolution, forward or backward; 0 for all other ops,
/// which are few against these. A bias costs none.
HS_API std::int64_t multiply_adds(const ObservedCall& call);

/// Records the calls of this thread, views too, until it is stopped or destroyed.
class HS_API CallTrace {
 public:
  CallTrace();
  ~CallTrace();
  CallTrace(const CallTrace&) = delete;
  CallTrace& operator=(const CallTrace&) = delete;

  /// Ends the recording; the second call does nothing.
  void stop();
  /// What was recorded so far, in order. Stops.
  const std::vector<TracedCall>& calls();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Where the calls of one op in one dtype ran.
struct HS_API Placement {
  std::string op = {};
  DType dtype = DType::f32;
  Device device = {};  ///< of its tensors
  ExecutionPath path = ExecutionPath::native;
  std::uint64_t forward = 0;   ///< calls in a forward pass
  std::uint64_t backward = 0;  ///< in a backward pass
  std::uint64_t other = 0;     ///< in neither, such as an optimizer's
  /// Why it isn't native, as far as is known: what the device's plug-in says, or that its kernel refused the call.
  std::string why = {};

  /// All of them.
  std::uint64_t calls() const { return forward + backward + other; }
  /// `native`, `native, after copies to row-major`, `CPU: no kernel for f64`, `a copy`.
  std::string str() const;
};
/// Calls by op, dtype and path: what runs on the CPU in place of its device first, then by op. Views run no kernel and
/// are left out.
HS_API std::vector<Placement> placements(std::span<const TracedCall> calls);

}  // namespace halfstep::debug
