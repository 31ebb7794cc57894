// SPDX-License-Identifier: Apache-2.0
// What ops report to a step that is being captured (capture/capture.h): which kernels ran on which tensors, and the
// host work between them that a replay has to repeat. For code that runs kernels and keeps numbers on the host.
#pragma once

#include <functional>
#include <span>
#include <utility>

#include "halfstep/core/capture.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep {

namespace detail {
struct KernelCall;
}

/// Blocks that a kernel works in begin at multiples of it, whatever the device.
constexpr std::size_t kWorkAlignment = 512;

/// How a kernel ran.
struct KernelRun {
  KernelFn function = nullptr;  ///< the CPU's or the plug-in's
  void* state = nullptr;        ///< that a plug-in supplied with it
  void* queue = nullptr;        ///< the device's queue that it was given to; null on the CPU
  bool bounded = false;         ///< it may have reported a bound of its first output
  std::size_t workspace = 0;    ///< bytes that it worked in
};

/// Every CaptureSink is one.
class HS_API KernelRecorder : public CaptureSink {
 public:
  /// A kernel ran, on the CPU or a device, on the tensors of `call` as they are.
  virtual void kernel(const detail::KernelCall& call, const KernelRun& run) = 0;
  /// A place in a storage.
  struct Bytes {
    const Ref<Storage>& storage;
    std::int64_t begin;  ///< in bytes, from the storage's start
  };
  /// So many bytes were copied between the CPU and a device.
  virtual void copy(const Bytes& to, const Bytes& from, std::size_t count, bool non_blocking) = 0;
  /// Host work to run at this point in every replay. It depends on nothing that a device computes.
  virtual void host(std::function<void()> work) = 0;
  /// Host work that reads or writes these tensors, on the CPU or a device, where other threads and processes may take
  /// part: in every replay it comes behind all kernels before it and ahead of all behind it.
  virtual void exchange(std::span<const Tensor> tensors, std::function<void()> work) = 0;
  /// Between `true` and `false`, memory of devices is taken that no other tensor of the step gets, so that the host may
  /// fill it before the kernels of a replay are enqueued.
  virtual void own_memory(bool on) = 0;
  /// Work before every replay; it returns false if the recording is no longer valid.
  virtual void before(std::function<bool()> work) = 0;
  /// The host wrote this tensor: its memory stays.
  virtual void keep(const Tensor& tensor) = 0;
  /// A tensor in the memory of this one, which the step frees before it ends, for exchange(): it lies where the
  /// recording's memory is, now and in replays, and is valid as long as the recording. Undefined where the tensor's
  /// memory isn't the recording's.
  virtual Tensor stand_in(const Tensor& tensor) = 0;
  /// The memory of this tensor is owned elsewhere; the owner ensures (with before()) that replays find it.
  virtual void manage(const Tensor& tensor) = 0;
  /// Whether the block is of the memory that every replay writes anew.
  virtual bool owns(const Storage& block) = 0;
  /// The step uses a tensor that was not passed to any kernel.
  virtual void uses(const Tensor& tensor) = 0;
  /// Where a replay finds the bound of this tensor's current contents (Storage::magnitude_bound); null: there is none.
  virtual const float* bound_of(const Tensor& tensor) = 0;
};

/// The calling thread's, or null.
inline KernelRecorder* kernel_recorder() { return static_cast<KernelRecorder*>(capture_sink()); }

/// KernelRecorder::own_memory() of this thread's recorder, if any, for its lifetime.
class OwnMemory {
 public:
  OwnMemory() : recorder_(kernel_recorder()) {
    if (recorder_) recorder_->own_memory(true);
  }
  ~OwnMemory() {
    if (recorder_) recorder_->own_memory(false);
  }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;

 private:
  KernelRecorder* recorder_;
};

/// A tensor on `device` of `count` numbers that `make(T*)` writes, now and again in every replay of a captured step:
/// for learning rates and states of generators, which change from step to step.
template <class T, class F>
Tensor host_numbers(std::int64_t count, Device device, F make) {
  if (device.is_meta()) {
    const Tensor none = empty({count}, {.dtype = dtype_of<T>, .device = device});
    if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
      recorder->keep(none);
    return none;
  }
  const Tensor numbers = empty({count}, {.dtype = dtype_of<T>, .device = Device{}});
  T* const at = static_cast<T*>(numbers.impl()->data());
  make(at);
  if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]] {
    recorder->keep(numbers);
    recorder->host([at, make] { make(at); });
  }
  return device.is_cpu() ? numbers : numbers.to(device);
}

}  // namespace halfstep
