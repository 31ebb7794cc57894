// SPDX-License-Identifier: Apache-2.0
// Convolutions as cuDNN 9's graph interface has them: a graph of a convolution, with a bias where there is one, for
// which cuDNN's heuristics name engines. Needs no GPU: plans can be made for one that is only described.
#pragma once

#include <cuda_runtime.h>
#include <cudnn.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libraries/conv_plan.h"

namespace hscuda {

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

/// Whether an engine keeps what docs/devices/kernels.md promises: the same bits in every run, sums in float32, products
/// of the values as they are (in TF32 where the problem allows it). By its notes, and by its number where its notes
/// don't tell that it rounds parts of sums.
bool engine_fits(const ConvProblem& problem, int64_t engine, const std::vector<cudnnBackendNumericalNote_t>& notes);

struct DnnLimits {
  int64_t workspace = int64_t{256} << 20;  ///< the most bytes that a plan may need beside the tensors
  int plans = 1;                           ///< the most plans
  bool compile = false;                    ///< whether engines that are compiled when a plan is made may be taken
};

/// Plans in the order of cuDNN's heuristics; when there is none, `why` says what cuDNN said last.
std::vector<DnnPlan> make_plans(const DnnFunctions& dnn, const DnnTarget& target, const ConvProblem& problem,
                                const DnnLimits& limits, std::string* why);

/// Unique ids of the tensors in a variant pack.
inline constexpr int64_t kDnnX = 1, kDnnW = 2, kDnnY = 3, kDnnBias = 4, kDnnSums = 5;

}  // namespace hscuda
