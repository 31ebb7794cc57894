// SPDX-License-Identifier: Apache-2.0
#include "host/kernel.h"

#include <string>

namespace hscuda {
namespace {

halfstep_status run(halfstep_context* context, const halfstep_tensor* in, int n, halfstep_tensor* out, int m,
                    const void* attributes) {
  const auto& def = *static_cast<const KernelDef*>(context->state);
  Call call(context, in, n, out, m, attributes);
  const std::string wrong =
      halfstep_plugin_helpers::wrong_call(def.layouts, def.attributes, *context, in, n, out, m, attributes);
  if (!wrong.empty()) return call.fail(HALFSTEP_FAILED, wrong.c_str());
  Device& device = call.device();
  if (device.lost.load(std::memory_order_relaxed)) return call.fail(HALFSTEP_LOST, "the device is lost");
  // Which device a launch goes to is the thread's own state in CUDA.
  if (const auto status = check(cudaSetDevice(device.ordinal), "cudaSetDevice", context->call)) return status;
  return def.run(call);
}

}  // namespace

halfstep_status Call::fail(halfstep_status status, const char* text) const {
  return halfstep_plugin_helpers::refuse(context_, status, text);
}

halfstep_status Call::launched() const {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return HALFSTEP_OK;
  context_->set_error(context_, cudaGetErrorString(error));
  const halfstep_status status = check(error, "launch", context_->call);
  if (status == HALFSTEP_LOST) device().lost.store(true, std::memory_order_relaxed);
  return status;
}

halfstep_status find_kernel(const char* op, int32_t version, int32_t dtype, halfstep_kernel* answer) {
  // One a line.
  // clang-format off
  const std::span<const KernelDef> families[] = {
      copy_kernels(),
      matmul_kernels(),
      attention_kernels(),
      conv_kernels(),
      arithmetic_kernels(),
      activation_kernels(),
      unary_kernels(),
      binary_kernels(),
      ratio_kernels(),
      integer_kernels(),
      compare_kernels(),
      where_kernels(),
      pair_loss_kernels(),
      random_kernels(),
      dropout_kernels(),
      amp_kernels(),
      clip_kernels(),
      optimizer_kernels(),
      ema_kernels(),
      join_kernels(),
      triangle_kernels(),
      index_kernels(),
      index_scatter_kernels(),
      index_nonzero_kernels(),
      reduce_kernels(),
      softmax_kernels(),
      loss_kernels(),
      scan_kernels(),
      sort_kernels(),
      norm_batch_kernels(),
      norm_batch_backward_kernels(),
      norm_kernels(),
      norm_backward_kernels(),
      max_pool_kernels(),
      pool_kernels(),
      resample_kernels(),
      pad_kernels(),
  };
  // clang-format on
  return halfstep_plugin_helpers::find_kernel<KernelDef>(
      families, op, version, dtype, answer,
      [](const KernelDef& def, halfstep_kernel& kernel) {
        kernel.run = run;
        kernel.state = const_cast<KernelDef*>(&def);
      },
      "no CUDA kernel", "no CUDA kernel for this dtype");
}

}  // namespace hscuda
