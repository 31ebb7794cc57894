// SPDX-License-Identifier: Apache-2.0
// Internal: how a graph runs, whatever surrounds the call.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "halfstep/amp/region_internal.h"
#include "halfstep/core/dtype.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/op.h"

namespace halfstep::infer::detail {

/// The thread without gradients, interceptors and regions of autocast, but for one of `dtype` where that has 16 bits.
class QuietThread {
 public:
  explicit QuietThread(std::optional<DType> dtype)
      : grad_(std::exchange(thread_state().grad_enabled, false)),
        interceptor_(std::exchange(thread_state().interceptor, nullptr)),
        path_(call_origin().module_path) {
    AutocastState state;
    state.enabled = dtype && is_low_precision(*dtype);
    state.cache = false;
    state.dtype = dtype.value_or(state.dtype);
    region_ = amp::detail::open_region(std::move(state), false);
  }
  ~QuietThread() {
    amp::detail::close_region(region_);
    thread_state().grad_enabled = grad_;
    thread_state().interceptor = interceptor_;
    call_origin().module_path = std::move(path_);
  }
  QuietThread(const QuietThread&) = delete;
  QuietThread& operator=(const QuietThread&) = delete;

 private:
  bool grad_;
  CallInterceptor* interceptor_;
  std::string path_;
  std::shared_ptr<amp::detail::Region> region_;
};

}  // namespace halfstep::infer::detail
