// SPDX-License-Identifier: Apache-2.0
// The observer interface for debugging, profiling and statistics. Without observers it costs one load of a counter per
// call.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "halfstep/core/tensor.h"

namespace halfstep {

struct Op;

/// How a call ran.
enum class ExecutionPath : std::uint8_t {
  native,      ///< by a kernel of the tensors' device
  contiguous,  ///< by such a kernel, with copies into the only layout that it supports
  fallback,    ///< on the CPU, with copies to it and back
  view,        ///< no kernel: the result shares memory
  transfer,    ///< a copy from one device to another
};
/// `native`, `contiguous`, ...
HS_API const char* name(ExecutionPath path);

/// A call of an op, a view, a copy between devices, or a standalone kernel (an optimizer's pass, a conversion inside
/// another call). Valid only during the observer's callback.
struct ObservedCall {
  const char* name;  ///< of the op, or of that which a standalone kernel is a part of
  const Op* op;      ///< null for a standalone kernel
  std::span<const Tensor* const>
      inputs;  ///< as the kernel receives them: after autocast and conversions; may be undefined
  std::span<const Tensor* const> outputs;      ///< before the call: not written yet
  const void* attributes;                      ///< the op's struct, or null
  std::size_t attributes_bytes = 0;            ///< of that struct
  Device device;                               ///< where it runs (for a transfer: where to)
  bool in_place = false;                       ///< the output is written over input 0
  ExecutionPath path = ExecutionPath::native;  ///< known after the call
  std::uint64_t number = 0;                    ///< the device's number of the call; 0 on the CPU
  const char* kernel = nullptr;  ///< what plug-ins know the kernel by; null for views and copies between devices
  DType dtype = DType::f32;      ///< that the kernel is chosen by
};

/// Observes all calls on all threads. Both functions run on the calling thread and may run concurrently on several
/// threads: an observer must handle that. Calls made by an observer itself (reading a tensor, for example) are not
/// observed. An exception thrown by an observer propagates from the call.
class HS_API OpObserver {
 public:
  virtual ~OpObserver() = default;
  /// Before the kernel runs: outputs are allocated but not written. Not called for views.
  virtual void before_call(const ObservedCall& call) { (void)call; }
  /// After it ran (on a device: after it was enqueued).
  virtual void after_call(const ObservedCall& call) = 0;
  /// Whether it takes fused ops as they run. Where an observer doesn't, they run as the ops that they are made of, so
  /// that it sees the values between these.
  virtual bool takes_fused() const { return false; }
  /// The call threw after before_call().
  virtual void failed_call(const ObservedCall& call) { (void)call; }
};
/// Adds or removes an observer. Removing waits for its ongoing calls on other threads.
HS_API void add_observer(OpObserver* observer);
HS_API void remove_observer(OpObserver* observer);
/// An observer for this object's lifetime.
class Observing {
 public:
  explicit Observing(OpObserver* observer) : observer_(observer) { add_observer(observer); }
  ~Observing() { remove_observer(observer_); }
  Observing(const Observing&) = delete;
  Observing& operator=(const Observing&) = delete;

 private:
  OpObserver* observer_;
};
/// Whether there is any, for data that is recorded only for observers.
HS_API bool observed();
/// Whether there is one that doesn't take fused ops.
HS_API bool observed_in_parts();

/// The thread's current location, for messages and observers.
struct CallOrigin {
  std::string module_path;                             ///< of the module whose forward runs: `encoder.fc1`
  const char* backward_of = nullptr;                   ///< the op whose gradient is computed; null in a forward pass
  std::shared_ptr<const std::string> backward_module;  ///< the module that op was called in; null when unknown
};
HS_API CallOrigin& call_origin();

namespace detail {
/// Notifies observers of a call; used by code that runs kernels.
class HS_API Observation {
 public:
  explicit Observation(const ObservedCall& call);
  ~Observation();
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;
  /// The call is done.
  void done(ExecutionPath path, std::uint64_t number = 0);

 private:
  ObservedCall call_;
  bool active_;
  bool done_ = false;
};
}  // namespace detail

}  // namespace halfstep
