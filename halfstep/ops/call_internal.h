// SPDX-License-Identifier: Apache-2.0
// Internal: how kernels are run, shared by the CPU call path and those of other devices.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/observer.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::detail {

/// One run of a kernel.
struct KernelCall {
  const KernelTable& table;
  const char* name;
  Device device;
  DType dtype;
  std::span<const Tensor* const> inputs;
  std::span<const Tensor* const> outputs;
  const void* attributes;
  std::size_t attributes_bytes = 0;
  bool fresh = false;  ///< the outputs were made for this call: nothing of them has to be kept
  bool live = false;   ///< the attributes live as long as what runs kernels with them, and may change
};

/// The tensor as a kernel sees it.
inline TensorView view_of(const Tensor& t) {
  const TensorImpl* p = t.impl();
  if (!p) return {nullptr, nullptr, nullptr, 0, 0, DType::f32, false, false};
  return {p->data(), p->sizes.data(), p->strides.data(), p->numel, p->sizes.size(), p->dtype, true, p->contiguous};
}

/// Views of all tensors of a call, on the stack for all but long lists.
class Views {
 public:
  Views(std::span<const Tensor* const> inputs, std::span<const Tensor* const> outputs) : inputs_(inputs.size()) {
    if (inputs.size() + outputs.size() > std::size(fixed_)) {
      many_.resize(inputs.size() + outputs.size());
      views_ = many_.data();
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) views_[i] = view_of(*inputs[i]);
    for (std::size_t i = 0; i < outputs.size(); ++i) views_[inputs_ + i] = view_of(*outputs[i]);
  }
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;
  TensorView* in() { return views_; }
  TensorView* out() { return views_ + inputs_; }

 private:
  TensorView fixed_[20];
  std::vector<TensorView> many_;
  TensorView* views_ = fixed_;
  std::size_t inputs_;
};

/// Inputs as text, for errors: `f32 [2, 3], none`.
std::string describe(std::span<const Tensor* const> inputs);
std::string describe(std::span<const TensorView> inputs);
/// Runs the CPU's kernel; for tensors of meta dry, which takes its workspace and computes nothing. Throws DTypeError or
/// DeviceError when there is none, Error when it fails.
void run_on_host(const KernelCall& call);
/// Runs the kernel of another device, or the CPU's in its place. Throws DeviceError.
ExecutionPath run_on_device(const KernelCall& call, std::uint64_t& number);
/// Throws the error for a kernel of a device that has refused a call: with its own reason, or the plug-in's.
[[noreturn]] void raise_launch(Device device, const char* name, Status status, const std::string& error,
                               const std::string& inputs);
/// Runs the CPU's kernel on copies of device tensors and copies the results back.
void run_fallback(const KernelCall& call, const std::string& reason, bool failed);
/// The same for tensors of which only this is known; `call` has none.
void run_fallback(const KernelCall& call, std::span<const TensorView> inputs, std::span<const TensorView> outputs,
                  const std::string& reason);
/// Whether kernels are asked for bounds of what they write.
bool magnitude_bounds_wanted();

/// Scratch of one kernel call: freed when the call is over.
struct CallContext : KernelContext {
  struct Block {
    void* data;
    std::size_t bytes;
  };
  std::vector<Block> blocks;
  std::string error;
  const Tensor* first_output = nullptr;
  std::span<const Tensor* const> inputs;
  Device where;

  explicit CallContext(const KernelCall& call);
  ~CallContext();
  /// Bytes of all blocks, as KernelRun has them: each can be cut out of them at an address that suits any device.
  std::size_t workspace_bytes() const;
  CallContext(const CallContext&) = delete;
  CallContext& operator=(const CallContext&) = delete;
};

}  // namespace halfstep::detail
