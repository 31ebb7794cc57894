// SPDX-License-Identifier: Apache-2.0
// cuDNN on a device: the first plan that fits a problem is kept.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "halfstep/runtime/plugin.h"
#include "libraries/dnn_graph.h"

namespace hscuda {

class Call;

/// cuDNN on a device. May be used by several threads.
class Dnn {
 public:
  /// Null, and why, when it can't be had. The device is the thread's current one.
  static std::unique_ptr<Dnn> open(std::string* why);
  ~Dnn();
  Dnn(const Dnn&) = delete;
  Dnn& operator=(const Dnn&) = delete;

  /// The plan for a problem, made at its first use; null when cuDNN has none.
  std::shared_ptr<const DnnPlan> plan(const ConvProblem& problem);
  /// Puts a plan behind what is in the call's queue.
  halfstep_status run(const Call& call, const DnnPlan& plan, const void* x, const void* w, const void* y,
                      const void* bias, void* workspace);
  /// Whether cuDNN may compile kernels for a plan, which takes seconds: HALFSTEP_CUDNN_COMPILE=1.
  bool compiles() const { return compile_; }

 private:
  Dnn(const DnnFunctions& dnn, cudnnHandle_t handle);

  struct Hash {
    std::size_t operator()(const ConvProblem& problem) const { return hash(problem); }
  };

  const DnnFunctions& dnn_;
  const cudnnHandle_t handle_;
  const bool compile_;
  std::mutex mutex_;                                                             // of the handle, and of the plans
  std::unordered_map<ConvProblem, std::shared_ptr<const DnnPlan>, Hash> plans_;  // null: cuDNN has none
};

}  // namespace hscuda
