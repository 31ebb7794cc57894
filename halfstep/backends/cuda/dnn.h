// SPDX-License-Identifier: Apache-2.0
// Convolutions by cuDNN 9, by way of its graph interface: a graph of a convolution, with a bias where there is one, for
// which cuDNN's heuristics name engines; the first that fits becomes the plan of its problem and is kept.
#pragma once

#include <cuda_runtime.h>
#include <cudnn.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "conv_plan.h"

namespace hscuda {

class Call;

/// cuDNN's functions.
struct DnnFunctions {
  decltype(&cudnnGetVersion) version = nullptr;
  decltype(&cudnnGetErrorString) error_string = nullptr;
  decltype(&cudnnGetLastErrorString) last_error = nullptr;
  decltype(&cudnnCreate) create = nullptr;
  decltype(&cudnnDestroy) destroy = nullptr;
  decltype(&cudnnSetStream) set_stream = nullptr;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendSetAttribute) set = nullptr;
  decltype(&cudnnBackendGetAttribute) get = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;

  /// What was opened; null, and why, when it can't be. Opened once.
  static const DnnFunctions* open(std::string* why);
};

/// One of cuDNN's descriptors. After a failure everything fails and does nothing, so that it is asked for at the end.
class DnnDescriptor {
 public:
  DnnDescriptor(const DnnFunctions& dnn, cudnnBackendDescriptorType_t type);
  ~DnnDescriptor();
  DnnDescriptor(DnnDescriptor&& other) noexcept;
  DnnDescriptor& operator=(DnnDescriptor&&) = delete;

  cudnnBackendDescriptor_t get() const { return handle_; }
  cudnnStatus_t status() const { return status_; }
  bool ok() const { return status_ == CUDNN_STATUS_SUCCESS; }
  DnnDescriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const void* values,
                     int64_t count = 1);
  DnnDescriptor& set(cudnnBackendAttributeName_t name, int64_t value) { return set(name, CUDNN_TYPE_INT64, &value); }
  DnnDescriptor& set(cudnnBackendAttributeName_t name, cudnnDataType_t value) {
    return set(name, CUDNN_TYPE_DATA_TYPE, &value);
  }
  DnnDescriptor& set(cudnnBackendAttributeName_t name, const DnnDescriptor& value);
  DnnDescriptor& finalize();
  /// How many values were there; up to `count` are written.
  int64_t read(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, void* values, int64_t count) const;

 private:
  const DnnFunctions* dnn_;
  cudnnBackendDescriptor_t handle_ = nullptr;
  cudnnStatus_t status_ = CUDNN_STATUS_SUCCESS;
};

/// What plans are made for: a device's handle, or hardware that is only described
/// (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR).
struct DnnTarget {
  cudnnHandle_t handle = nullptr;
  cudnnBackendDescriptor_t properties = nullptr;
};

/// An engine that has been made ready for a problem. What it is made of lives as long.
struct DnnPlan {
  std::shared_ptr<std::vector<DnnDescriptor>> graph;
  std::vector<DnnDescriptor> parts;  ///< the plan is the last
  int64_t workspace = 0;             ///< bytes
  int64_t engine = 0;                ///< its number, for reports
  bool compiles = false;             ///< whether it is compiled when the plan is made
  std::vector<cudnnBackendNumericalNote_t> notes;

  cudnnBackendDescriptor_t get() const { return parts.back().get(); }
};

/// Whether an engine keeps what docs/kernels.md promises: the same bits in every run, sums in float32, products of
/// the values as they are (in TF32 where the problem allows it).
bool engine_fits(const ConvProblem& problem, const std::vector<cudnnBackendNumericalNote_t>& notes);

struct DnnLimits {
  int64_t workspace = int64_t{256} << 20;  ///< the most bytes that a plan may need beside the tensors
  int plans = 1;                           ///< the most plans
  bool compile = false;                    ///< whether engines that are compiled when a plan is made may be taken
};

/// Plans in the order of cuDNN's heuristics; when there is none, `why` says what cuDNN said last.
std::vector<DnnPlan> make_plans(const DnnFunctions& dnn, const DnnTarget& target, const ConvProblem& problem,
                                const DnnLimits& limits, std::string* why);

/// cuDNN on a device. May be used by several threads.
class Dnn {
 public:
  /// Null, and why, when it can't be had. The device is the thread's current one.
  static std::unique_ptr<Dnn> open(std::string* why);
  ~Dnn();
  Dnn(const Dnn&) = delete;
  Dnn& operator=(const Dnn&) = delete;

  /// The plan for a problem, made at its first use; null when cuDNN has none. Lives as long as this.
  const DnnPlan* plan(const ConvProblem& problem);
  /// Puts a plan behind what is in the call's queue.
  halfstep_status run(const Call& call, const DnnPlan& plan, const void* x, const void* w, const void* y,
                      const void* bias, void* workspace);
  /// What cuDNN said when it had no plan for the problem.
  std::string refusal(const ConvProblem& problem);

  /// Whether cuDNN may compile kernels for a plan, which takes seconds: HALFSTEP_CUDNN_COMPILE=1.
  bool compiles() const { return compile_; }

 private:
  Dnn(const DnnFunctions& dnn, cudnnHandle_t handle);

  struct Entry {
    std::unique_ptr<DnnPlan> plan;
    std::string why;
  };
  struct Hash {
    std::size_t operator()(const ConvProblem& problem) const { return hash(problem); }
  };
  Entry& entry(const ConvProblem& problem);

  const DnnFunctions& dnn_;
  const cudnnHandle_t handle_;
  const bool compile_;
  std::mutex mutex_;  // of the handle, and of the plans
  std::unordered_map<ConvProblem, Entry, Hash> plans_;
};

}  // namespace hscuda
