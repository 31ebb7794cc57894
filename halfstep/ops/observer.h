// SPDX-License-Identifier: Apache-2.0
// What debugging, profiles and statistics see of calls: an observer beside the path, which costs one load of a counter
// while there is none.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "halfstep/core/tensor.h"

namespace halfstep {

struct Op;

/// How a call ran.
enum class Road : std::uint8_t {
  native,      ///< by a kernel of the tensors' device
  contiguous,  ///< by such a kernel, with copies into the only layout that it takes
  fallback,    ///< on the CPU, with copies there and back
  view,        ///< no kernel: the result shares memory
  transfer,    ///< a copy from one device to another
};
/// `native`, `contiguous`, ...
HS_API const char* name(Road road);

/// A call of an op, a view, a copy between devices, or a kernel that runs by itself (an optimizer's pass, a conversion
/// inside of another call). Valid while the observer is told of it.
struct ObservedCall {
  const char* name;                       ///< of the op or the kernel
  const Op* op;                           ///< null for a kernel that runs by itself
  std::span<const Tensor* const> inputs;  ///< as the kernel gets them: after autocast and conversions; may be undefined
  std::span<const Tensor* const> outputs;  ///< before the call: not written yet
  const void* attributes;                  ///< the op's struct, or null
  Device device;                           ///< where it runs (for a transfer: where to)
  bool in_place = false;                   ///< the output is written over input 0
  Road road = Road::native;                ///< known after the call
  std::uint64_t number = 0;                ///< the device's number of the call; 0 on the CPU
};

/// Sees all calls of all threads. Both functions run on the calling thread, and one thread may call while another does:
/// an observer must cope with that. What an observer itself calls (reading a tensor, say) is not observed. An exception
/// of an observer is one of the call.
class HS_API OpObserver {
 public:
  virtual ~OpObserver() = default;
  /// Before the kernel runs: outputs are there, unwritten. Not for views.
  virtual void before_call(const ObservedCall& call) { (void)call; }
  /// After it ran (on a device: after it was enqueued).
  virtual void after_call(const ObservedCall& call) = 0;
  /// The call threw after before_call().
  virtual void failed_call(const ObservedCall& call) { (void)call; }
};
/// Adds or takes away an observer. Taking away waits for calls of it that are under way on other threads.
HS_API void add_observer(OpObserver* observer);
HS_API void remove_observer(OpObserver* observer);
/// Whether there is any, for what is only recorded for them.
HS_API bool observed();

/// Where this thread is, for messages and observers.
struct Whereabouts {
  std::string module_path;                             ///< of the module whose forward runs: `encoder.fc1`
  const char* backward_of = nullptr;                   ///< the op whose gradient is computed; null in a forward pass
  std::shared_ptr<const std::string> backward_module;  ///< the module that op was called in; null when unknown
};
HS_API Whereabouts& whereabouts();

namespace detail {
/// Tells observers of a call; used by whoever runs kernels.
class HS_API Observation {
 public:
  explicit Observation(const ObservedCall& call);
  ~Observation();
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;
  /// The call is done.
  void done(Road road, std::uint64_t number = 0);

 private:
  ObservedCall call_;
  bool active_;
  bool done_ = false;
};
}  // namespace detail

}  // namespace halfstep
