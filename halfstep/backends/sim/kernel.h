// SPDX-License-Identifier: Apache-2.0
// What a kernel of this device is, and how its calls get into a queue. The arithmetic is the CPU's: the host lends its
// kernels (halfstep_host.cpu_kernel), which queues run on the device's memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "halfstep/runtime/plugin_helpers.h"

namespace sim {

using namespace halfstep_plugin_helpers;

/// A call, copied: what the host passed lasts for the call only, the work for longer.
struct Call {
  /// Their data is where queues find the first element; null for absent and empty tensors.
  std::vector<halfstep_tensor> in, out;
  std::vector<std::array<int64_t, HALFSTEP_MAX_DIMS>> geometry;  ///< what their sizes and strides point to
  std::vector<std::max_align_t> attributes;
};

/// A kernel for some dtypes.
struct KernelDef {
  const char* op;
  uint32_t dtypes;
  uint32_t layouts;
  uint32_t attribute_bytes;
  const char* missing = nullptr;                       ///< why the other dtypes are missing
  const char* (*refuses)(const Call& call) = nullptr;  ///< why this call can't be done here; null when it can
  const char* source_of = nullptr;  ///< null, or the op of the CPU that does this one, from the last input alone
  uint64_t workspace = 0;           ///< bytes of device memory that it takes beside its tensors
};

/// Checks the call and puts it into its queue.
halfstep_status enqueue(const KernelDef& def, int32_t dtype, halfstep_context* context, const halfstep_tensor* in,
                        int n, halfstep_tensor* out, int m, const void* attributes);

/// A kernel and the functions that the host calls, one a dtype.
struct Kernel : KernelDef {
  std::array<halfstep_kernel_fn, HALFSTEP_BOOL + 1> functions;
};

template <const KernelDef& def, int32_t dtype>
halfstep_status entry(halfstep_context* context, const halfstep_tensor* in, int n, halfstep_tensor* out, int m,
                      const void* attributes) {
  return enqueue(def, dtype, context, in, n, out, m, attributes);
}
template <const KernelDef& def>
constexpr Kernel kernel = []<int32_t... dtype>(std::integer_sequence<int32_t, dtype...>) {
  return Kernel{def, {entry<def, dtype>...}};
}
(std::make_integer_sequence<int32_t, HALFSTEP_BOOL + 1>());

/// All of them.
std::span<const Kernel> kernels();

/// Answers the table's `kernel`.
halfstep_status find_kernel(const char* op, int32_t version, int32_t dtype, halfstep_kernel* answer);

}  // namespace sim
