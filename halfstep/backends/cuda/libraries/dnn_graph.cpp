// SPDX-License-Identifier: Apache-2.0
#include "libraries/dnn_graph.h"

#include <algorithm>
#include <array>
#include <utility>

#include "libraries/library.h"

namespace hscuda {
namespace {

cudnnDataType_t data_type(int dtype) {
  switch (dtype) {
    case HALFSTEP_F64:
      return CUDNN_DATA_DOUBLE;
    case HALFSTEP_F16:
      return CUDNN_DATA_HALF;
    case HALFSTEP_BF16:
      return CUDNN_DATA_BFLOAT16;
    default:
      return CUDNN_DATA_FLOAT;
  }
}

DnnDescriptor tensor(const DnnFunctions& dnn, const ConvProblem& p, int64_t id, const int64_t (&sizes)[4], int dtype,
                     bool is_virtual = false) {
  int64_t strides[4];
  p.strides(sizes, strides);
  DnnDescriptor d(dnn, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  d.set(CUDNN_ATTR_TENSOR_DATA_TYPE, data_type(dtype));
  d.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, sizes, 4);
  d.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides, 4);
  d.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
  d.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, int64_t{p.alignment});
  if (is_virtual) d.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, &is_virtual);
  d.finalize();
  return d;
}

DnnDescriptor convolution(const DnnFunctions& dnn, const ConvProblem& p) {
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  DnnDescriptor d(dnn, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  d.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, p.dtype == HALFSTEP_F64 ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT);
  d.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, &mode);
  d.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, int64_t{2});
  d.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, p.padding, 2);
  d.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, p.padding, 2);
  d.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, p.dilation, 2);
  d.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, p.stride, 2);
  d.finalize();
  return d;
}

/// The names of one operation's attributes.
struct Names {
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t x, w, y, convolution, alpha, beta;
};
constexpr Names kOutputNames = {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
constexpr Names kInputNames = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
constexpr Names kWeightNames = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};

/// What the plans of a problem share, the graph last; the status of what failed, if anything.
cudnnStatus_t make_graph(const DnnFunctions& dnn, const DnnTarget& target, const ConvProblem& p,
                         std::vector<DnnDescriptor>* parts) {
  const Names& names = p.part == ConvPart::kOutput  ? kOutputNames
                       : p.part == ConvPart::kInput ? kInputNames
                                                    : kWeightNames;
  parts->reserve(9);
  const auto keep = [&](DnnDescriptor d) -> const DnnDescriptor& { return parts->emplace_back(std::move(d)); };
  const bool epilogue = p.epilogue != ConvEpilogue::kNone;
  // What the convolution writes; behind it there may be an operation that takes the sums before they are rounded.
  const auto end = [&](ConvPart part, int64_t id, const int64_t(&sizes)[4]) -> const DnnDescriptor& {
    if (part != p.part) return keep(tensor(dnn, p, id, sizes, p.dtype));
    if (!epilogue) return keep(tensor(dnn, p, id, sizes, p.result()));
    return keep(tensor(dnn, p, kDnnSums, sizes, p.dtype == HALFSTEP_F64 ? HALFSTEP_F64 : HALFSTEP_F32, true));
  };
  const DnnDescriptor& x = end(ConvPart::kInput, kDnnX, p.x);
  const DnnDescriptor& w = end(ConvPart::kWeight, kDnnW, p.w);
  const DnnDescriptor& y = end(ConvPart::kOutput, kDnnY, p.y);
  const DnnDescriptor& how = keep(convolution(dnn, p));
  DnnDescriptor operation(dnn, names.type);
  operation.set(names.x, x).set(names.w, w).set(names.y, y).set(names.convolution, how);
  const double factors[] = {1, 0};
  const float float_factors[] = {1, 0};
  const bool wide = p.dtype == HALFSTEP_F64;
  const auto type = wide ? CUDNN_TYPE_DOUBLE : CUDNN_TYPE_FLOAT;
  operation.set(names.alpha, type, wide ? static_cast<const void*>(&factors[0]) : &float_factors[0]);
  operation.set(names.beta, type, wide ? static_cast<const void*>(&factors[1]) : &float_factors[1]);
  cudnnBackendDescriptor_t operations[2] = {keep(std::move(operation.finalize())).get()};
  if (epilogue) {
    const bool bias = p.epilogue == ConvEpilogue::kBias;
    const int64_t id = p.part == ConvPart::kOutput ? kDnnY : p.part == ConvPart::kInput ? kDnnX : kDnnW;
    const auto& sizes = p.part == ConvPart::kOutput ? p.y : p.part == ConvPart::kInput ? p.x : p.w;
    const DnnDescriptor& sums = p.part == ConvPart::kOutput ? y : p.part == ConvPart::kInput ? x : w;
    const DnnDescriptor& result = keep(tensor(dnn, p, id, sizes, p.result()));
    const cudnnPointwiseMode_t mode = bias ? CUDNN_POINTWISE_ADD : CUDNN_POINTWISE_IDENTITY;
    DnnDescriptor pointwise(dnn, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    pointwise.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, &mode);
    pointwise.set(CUDNN_ATTR_POINTWISE_MATH_PREC, wide ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT).finalize();
    DnnDescriptor last(dnn, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    last.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, keep(std::move(pointwise)));
    last.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, sums).set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, result);
    if (bias) {
      const int64_t row[4] = {1, sizes[1], 1, 1};
      last.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, keep(tensor(dnn, p, kDnnBias, row, p.dtype)));
    }
    operations[1] = keep(std::move(last.finalize())).get();
  }
  for (const DnnDescriptor& part : *parts) {
    if (!part.ok()) return part.status();
  }
  DnnDescriptor graph(dnn, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, operations, epilogue ? 2 : 1);
  if (target.handle != nullptr) graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, &target.handle);
  return keep(std::move(graph.finalize())).status();
}

std::vector<DnnDescriptor> heuristics(const DnnFunctions& dnn, const DnnTarget& target, const DnnDescriptor& graph,
                                      cudnnBackendHeurMode_t mode) {
  std::vector<DnnDescriptor> results;
  DnnDescriptor asked(dnn, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  asked.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  asked.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &mode);
#if CUDNN_VERSION >= 90800
  if (target.properties != nullptr) {
    asked.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, &target.properties);
  }
#endif
  if (!asked.finalize().ok()) return results;
  constexpr int64_t kMost = 64;
  std::vector<cudnnBackendDescriptor_t> handles;
  for (int i = 0; i < kMost; ++i) {
    results.emplace_back(dnn, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    handles.push_back(results.back().get());
  }
  const int64_t count = asked.read(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, handles.data(), kMost);
  while (static_cast<int64_t>(results.size()) > std::min(count, kMost)) results.pop_back();
  return results;
}

void read_engine(const DnnFunctions& dnn, const DnnDescriptor& config, DnnPlan* plan) {
  const DnnDescriptor engine(dnn, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t handle = engine.get();
  config.read(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, &handle, 1);
  engine.read(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, &plan->engine, 1);
  // Asked of a newer library, there may be notes that this header doesn't know.
  plan->notes.resize(64);
  const int64_t count =
      engine.read(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, plan->notes.data(), 64);
  plan->notes.resize(static_cast<std::size_t>(std::clamp<int64_t>(count, 0, 64)));
  cudnnBackendBehaviorNote_t behavior[64];
  const int64_t n =
      std::min<int64_t>(engine.read(CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE, behavior, 64), 64);
  for (int64_t i = 0; i < n; ++i) plan->compiles |= behavior[i] == CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION;
}

}  // namespace

const DnnFunctions* DnnFunctions::open(std::string* why) {
  static std::string failure;
  static const DnnFunctions* const opened = []() -> const DnnFunctions* {
    static Library library("cudnn", CUDNN_MAJOR);
    static DnnFunctions f;
    library.find(f.version, "cudnnGetVersion");
    library.find(f.error_string, "cudnnGetErrorString");
    library.find(f.last_error, "cudnnGetLastErrorString");
    library.find(f.create, "cudnnCreate");
    library.find(f.destroy, "cudnnDestroy");
    library.find(f.set_stream, "cudnnSetStream");
    library.find(f.create_descriptor, "cudnnBackendCreateDescriptor");
    library.find(f.destroy_descriptor, "cudnnBackendDestroyDescriptor");
    library.find(f.finalize, "cudnnBackendFinalize");
    library.find(f.set, "cudnnBackendSetAttribute");
    library.find(f.get, "cudnnBackendGetAttribute");
    if (library.find(f.execute, "cudnnBackendExecute")) return &f;
    failure = library.failure();
    return nullptr;
  }();
  if (opened == nullptr) *why = failure;
  return opened;
}

DnnDescriptor::DnnDescriptor(const DnnFunctions& dnn, cudnnBackendDescriptorType_t type) : dnn_(&dnn) {
  status_ = dnn.create_descriptor(type, &handle_);
}
DnnDescriptor::DnnDescriptor(DnnDescriptor&& other) noexcept
    : dnn_(other.dnn_), handle_(std::exchange(other.handle_, nullptr)), status_(other.status_) {}
DnnDescriptor::~DnnDescriptor() {
  if (handle_ != nullptr) dnn_->destroy_descriptor(handle_);
}

DnnDescriptor& DnnDescriptor::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                  const void* values, int64_t count) {
  if (ok()) status_ = dnn_->set(handle_, name, type, count, values);
  return *this;
}
DnnDescriptor& DnnDescriptor::set(cudnnBackendAttributeName_t name, const DnnDescriptor& value) {
  if (ok() && !value.ok()) status_ = value.status();
  return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, &value.handle_);
}
DnnDescriptor& DnnDescriptor::finalize() {
  if (ok()) status_ = dnn_->finalize(handle_);
  return *this;
}
int64_t DnnDescriptor::read(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, void* values,
                            int64_t count) const {
  int64_t found = 0;
  if (!ok() || dnn_->get(handle_, name, type, count, &found, values) != CUDNN_STATUS_SUCCESS) return 0;
  return found;
}

bool engine_fits(const ConvProblem& problem, int64_t engine, const std::vector<cudnnBackendNumericalNote_t>& notes) {
  // Seen on an H100 with cuDNN 9.14, all plans of 13 small convolutions beside float64: these alone were further off
  // than sums in float32 that are rounded once (up to 67 times), most by rounding parts of sums to 16 bits.
  struct Rounding {
    ConvPart part;
    int64_t engine;
    bool float32;  // too
  };
  constexpr Rounding kRounding[] = {{ConvPart::kInput, 2, false},
                                    {ConvPart::kWeight, 17, true},
                                    {ConvPart::kWeight, 47, false},
                                    {ConvPart::kWeight, 61, false}};
  const bool low = problem.dtype == HALFSTEP_F16 || problem.dtype == HALFSTEP_BF16;
  for (const Rounding& r : kRounding) {
    const bool concerned = low || (r.float32 && problem.dtype == HALFSTEP_F32);
    if (concerned && r.part == problem.part && r.engine == engine) return false;
  }
  for (const cudnnBackendNumericalNote_t note : notes) {
    switch (note) {
      case CUDNN_NUMERICAL_NOTE_TENSOR_CORE:
        // Of float32 they take TF32 only.
        if (problem.dtype == HALFSTEP_F32 && problem.tf32 == 0) return false;
        break;
      case CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP:
        break;
      case CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS:
      case CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION:
      case CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC:
      default:
        // Winograd's and Fourier's ways round in between; notes of later versions are not known.
        return false;
    }
  }
  return true;
}

std::vector<DnnPlan> make_plans(const DnnFunctions& dnn, const DnnTarget& target, const ConvProblem& problem,
                                const DnnLimits& limits, std::string* why) {
  std::vector<DnnPlan> plans;
  const auto note = [&](const char* what, cudnnStatus_t status) {
    char text[256] = {};
    dnn.last_error(text, sizeof text);
    *why = std::string(what) + ": " + dnn.error_string(status) + (text[0] ? ": " : "") + text;
  };
  *why = "its heuristics know no engine";
  const auto graph = std::make_shared<std::vector<DnnDescriptor>>();
  if (const auto status = make_graph(dnn, target, problem, graph.get())) {
    note("operation", status);
    return plans;
  }
  for (const auto mode : {CUDNN_HEUR_MODE_B, CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    for (DnnDescriptor& config : heuristics(dnn, target, graph->back(), mode)) {
      DnnPlan plan;
      plan.graph = graph;
      read_engine(dnn, config, &plan);
      if (plan.compiles && !limits.compile) continue;
      if (!engine_fits(problem, plan.engine, plan.notes)) {
        *why = "its engines' arithmetic is not the one asked for";
        continue;
      }
      DnnDescriptor made(dnn, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      if (target.handle != nullptr) made.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &target.handle);
#if CUDNN_VERSION >= 90800
      if (target.properties != nullptr) {
        made.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, &target.properties);
      }
#endif
      made.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config).finalize();
      if (!made.ok()) {
        note("plan", made.status());
        continue;
      }
      made.read(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, &plan.workspace, 1);
      if (plan.workspace > limits.workspace) {
        *why = "its engines need more memory than they may have";
        continue;
      }
      plan.parts.push_back(std::move(config));
      plan.parts.push_back(std::move(made));
      plans.push_back(std::move(plan));
      if (static_cast<int>(plans.size()) == limits.plans) break;
    }
    if (!plans.empty()) break;
  }
  return plans;
}

}  // namespace hscuda
