// SPDX-License-Identifier: Apache-2.0
// What a kernel of this device is, and how the host's calls come to it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "halfstep/runtime/plugin_helpers.h"
#include "host/device.h"
#include "host/errors.h"

namespace hscuda {

using Tensor = halfstep_tensor;

/// A call of a kernel, for the time of the call. What is enqueued copies what it needs.
class Call {
 public:
  Call(halfstep_context* context, const Tensor* in, int n, Tensor* out, int m, const void* attributes)
      : in(in), n(n), out(out), m(m), context_(context), attributes_(attributes) {}

  const Tensor* const in;
  const int n;
  Tensor* const out;
  const int m;

  Queue& queue() const { return *reinterpret_cast<Queue*>(context_->queue); }
  Device& device() const { return *queue().device; }
  cudaStream_t stream() const { return queue().stream; }
  uint64_t number() const { return context_->call; }
  /// For report() in kernels (fault.cuh).
  Fault* fault() const { return device().device_fault; }

  /// Whether input i was given.
  bool has(int i) const { return i < n && in[i].defined; }
  template <class A>
  const A& attributes() const {
    return *static_cast<const A*>(attributes_);
  }
  bool has_attributes() const { return attributes_ != nullptr; }

  /// Device memory until the work of this call is done, aligned to 64 bytes; null when there is none left: return
  /// no_memory() then. Nothing may have been enqueued.
  template <class T>
  T* workspace(int64_t count) const {
    return static_cast<T*>(context_->workspace(context_, static_cast<uint64_t>(count) * sizeof(T)));
  }
  halfstep_status no_memory() const { return fail(HALFSTEP_OUT_OF_MEMORY, "no memory for its workspace"); }
  /// This call is for the CPU; `why` is a text that lasts.
  halfstep_status refuse(const char* why) const { return fail(HALFSTEP_UNSUPPORTED, why); }
  halfstep_status fail(halfstep_status status, const char* text) const;
  /// The end of a kernel: what CUDA says of the launches since the last call.
  halfstep_status launched() const;

 private:
  halfstep_context* context_;
  const void* attributes_;
};

using halfstep_plugin_helpers::dtypes;
using halfstep_plugin_helpers::kAll;
using halfstep_plugin_helpers::kComputed;
using halfstep_plugin_helpers::kContiguous;
using halfstep_plugin_helpers::kFlag;
using halfstep_plugin_helpers::kFloating;
using halfstep_plugin_helpers::kIntegers;
using halfstep_plugin_helpers::kNumeric;
using halfstep_plugin_helpers::kStrided;

/// A kernel for some dtypes (of the key input). `run` checks nothing that the op's rule has checked; it is not called
/// with inputs of other layouts than it says, nor without attributes where it has said that it needs them.
struct KernelDef {
  const char* op;
  uint32_t dtypes;
  uint32_t layouts;
  bool attributes;  ///< whether it reads any
  halfstep_status (*run)(Call& call);
  const char* missing = nullptr;  ///< why the other dtypes are missing
};

// The families, a file each: kernels/FAMILY.cu (.cpp where all is done by a library).
std::span<const KernelDef> copy_kernels();
std::span<const KernelDef> matmul_kernels();
std::span<const KernelDef> attention_kernels();
std::span<const KernelDef> conv_kernels();
std::span<const KernelDef> arithmetic_kernels();
std::span<const KernelDef> activation_kernels();
std::span<const KernelDef> unary_kernels();
std::span<const KernelDef> binary_kernels();
std::span<const KernelDef> ratio_kernels();
std::span<const KernelDef> integer_kernels();
std::span<const KernelDef> compare_kernels();
std::span<const KernelDef> where_kernels();
std::span<const KernelDef> pair_loss_kernels();
std::span<const KernelDef> random_kernels();
std::span<const KernelDef> dropout_kernels();
std::span<const KernelDef> amp_kernels();
std::span<const KernelDef> clip_kernels();
std::span<const KernelDef> optimizer_kernels();
std::span<const KernelDef> ema_kernels();
std::span<const KernelDef> join_kernels();
std::span<const KernelDef> triangle_kernels();
std::span<const KernelDef> index_kernels();
std::span<const KernelDef> index_scatter_kernels();
std::span<const KernelDef> index_nonzero_kernels();
std::span<const KernelDef> reduce_kernels();
std::span<const KernelDef> softmax_kernels();
std::span<const KernelDef> loss_kernels();
std::span<const KernelDef> scan_kernels();
std::span<const KernelDef> sort_kernels();
std::span<const KernelDef> norm_batch_kernels();
std::span<const KernelDef> norm_batch_backward_kernels();
std::span<const KernelDef> norm_kernels();
std::span<const KernelDef> norm_backward_kernels();
std::span<const KernelDef> max_pool_kernels();
std::span<const KernelDef> pool_kernels();
std::span<const KernelDef> resample_kernels();
std::span<const KernelDef> pad_kernels();

/// Answers the table's `kernel`.
halfstep_status find_kernel(const char* op, int32_t version, int32_t dtype, halfstep_kernel* answer);

}  // namespace hscuda
