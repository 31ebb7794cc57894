// SPDX-License-Identifier: Apache-2.0
// Internal: what the observers of this layer share: reading tensors unseen by autograd and autocast, keeping what a
// call writes over, and running a call again in another dtype.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/op.h"

namespace halfstep::debug::detail {

/// Nothing that happens on this thread is recorded or cast while it lives.
struct Unrecorded {
  NoGrad no_grad;
  AutocastOff autocast_off;
};

/// The tensor on the CPU, row-major; itself when it is that already.
Tensor on_host(const Tensor& tensor);

/// Calls `f` with each value of a host tensor, in row-major order, as a double.
template <class F>
void for_each_value(const Tensor& tensor, F&& f) {
  if (tensor.numel() == 0) return;
  const Tensor host = on_host(tensor);
  visit_all(host.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    // Not through data(): that forgets what is known about the magnitude of the values.
    const T* values = static_cast<const T*>(host.impl()->data());
    const std::int64_t n = host.numel();
    for (std::int64_t i = 0; i < n; ++i) f(convert<double>(values[i]));
  });
}

/// Whether a floating tensor has an infinity or a NaN.
bool has_nonfinite(const Tensor& tensor);

/// Whether the call writes into the memory of input `i`.
bool written_over(const ObservedCall& call, std::size_t i);
/// The inputs of a call as they are now: copies of those that it will write over (in before_call), handles otherwise.
std::vector<Tensor> keep_inputs(const ObservedCall& call);

/// Results of a call that was run again; or why it could not be.
struct Replay {
  std::vector<Tensor> outputs;
  std::string skipped;
};
/// Runs the call again on the CPU with its floating inputs converted to `dtype`. `inputs`: as they were before it.
Replay replay(const ObservedCall& call, std::span<const Tensor> inputs, DType dtype);

/// A name for skipping: a kernel that only converts or copies.
bool is_conversion(const ObservedCall& call);

/// The distance between neighbours of `value` in a floating dtype.
double ulp(double value, DType dtype);

/// An observer that sees the calls of one thread (or of all), numbers them from 1, and keeps the inputs that calls
/// write over.
class CallObserver : public OpObserver {
 public:
  CallObserver(bool all_threads, bool keep_overwritten)
      : all_threads_(all_threads), keep_(keep_overwritten), thread_(std::this_thread::get_id()) {}

  void before_call(const ObservedCall& call) final;
  void after_call(const ObservedCall& call) final;
  void failed_call(const ObservedCall& call) final;

 protected:
  /// One at a time. `inputs` as they were before the call.
  virtual void seen(const ObservedCall& call, std::uint64_t number, std::span<const Tensor> inputs) = 0;
  std::mutex mutex_;
  std::uint64_t calls_ = 0;

 private:
  bool mine() const { return all_threads_ || std::this_thread::get_id() == thread_; }
  bool all_threads_;
  bool keep_;
  std::thread::id thread_;
  std::map<const ObservedCall*, std::vector<Tensor>> kept_;
};

}  // namespace halfstep::debug::detail
