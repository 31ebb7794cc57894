// SPDX-License-Identifier: Apache-2.0
// What a kernel of this device is, and how its calls get into a queue.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "halfstep/runtime/plugin.h"
#include "numbers.h"

namespace sim {

/// A tensor of a call, copied: what the host passed lasts for the call only, the work for longer.
struct View {
  char* data;  ///< where queues find the first element; null for absent and empty tensors
  int64_t sizes[HALFSTEP_MAX_DIMS];
  int64_t strides[HALFSTEP_MAX_DIMS];
  int64_t numel;
  int32_t ndim;
  uint8_t dtype;
  bool defined, contiguous;

  template <class T>
  T* at(int64_t element = 0) const {
    return reinterpret_cast<T*>(data) + element;
  }
};

constexpr std::size_t kMaxAttributes = 128;

struct Call {
  std::vector<View> in, out;
  alignas(16) unsigned char attribute_bytes[kMaxAttributes];
  char* workspace = nullptr;

  template <class A>
  const A& attributes() const {
    static_assert(sizeof(A) <= kMaxAttributes);
    return *reinterpret_cast<const A*>(attribute_bytes);
  }
};

constexpr uint32_t dtypes(std::initializer_list<int> list) {
  uint32_t mask = 0;
  for (int d : list) mask |= 1u << d;
  return mask;
}
constexpr uint32_t kFloating = dtypes({HALFSTEP_F32, HALFSTEP_F64, HALFSTEP_F16, HALFSTEP_BF16});
constexpr uint32_t kIntegers = dtypes({HALFSTEP_I64, HALFSTEP_I32, HALFSTEP_I8, HALFSTEP_U8});
constexpr uint32_t kNumeric = kFloating | kIntegers;
constexpr uint32_t kComputed = kNumeric | dtypes({HALFSTEP_BOOL});
constexpr uint32_t kAll = kComputed | dtypes({HALFSTEP_F8E4M3, HALFSTEP_F8E5M2});

/// A kernel for some dtypes.
struct KernelDef {
  const char* op;
  uint32_t dtypes;
  uint32_t layouts;
  uint32_t attribute_bytes;
  /// The work itself, on a queue's thread; returns what went wrong, or an empty text.
  std::string (*run)(const Call& call);
  const char* missing = nullptr;                       ///< why the other dtypes are missing
  const char* (*refuses)(const Call& call) = nullptr;  ///< why this call can't be done here; null when it can
  uint64_t (*workspace)(const Call& call) = nullptr;   ///< bytes of device memory that it needs beside its tensors
};

/// A kernel and the function that the host calls.
struct Kernel {
  const KernelDef* def;
  halfstep_kernel_fn function;
};

halfstep_status enqueue(const KernelDef& def, halfstep_context* context, const halfstep_tensor* in, int n,
                        halfstep_tensor* out, int m, const void* attributes);

/// The host's calls carry nothing that tells kernels apart, so each has a function of its own.
template <const KernelDef& def>
halfstep_status entry(halfstep_context* context, const halfstep_tensor* in, int n, halfstep_tensor* out, int m,
                      const void* attributes) {
  return enqueue(def, context, in, n, out, m, attributes);
}
template <const KernelDef& def>
constexpr Kernel kernel = {&def, entry<def>};

// The families, a file each.
std::span<const Kernel> copy_kernels();
std::span<const Kernel> arithmetic_kernels();
std::span<const Kernel> matmul_kernels();
std::span<const Kernel> reduce_kernels();
std::span<const Kernel> loss_kernels();
std::span<const Kernel> amp_kernels();
std::span<const Kernel> optimizer_kernels();

/// Answers the table's `kernel`.
halfstep_status find_kernel(const char* op, int32_t version, int32_t dtype, halfstep_kernel* answer);

}  // namespace sim
