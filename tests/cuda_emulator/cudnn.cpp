// SPDX-License-Identifier: Apache-2.0
// cuDNN's graph interface on the CPU: a convolution, with or without a bias or a wider result behind it. Descriptors
// keep what they are given; what the real library checks when they are finalized is checked. Its heuristics name an
// engine that must not be taken before the one that may be, and results are those of the engine that was.
#include <cudnn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "convolve.h"
#include "functions.h"
#include "launch.h"

struct cudnnContext {
  cudaStream_t stream = nullptr;
};

namespace {

using namespace hscuda::emulator;

thread_local std::string last_error;

cudnnStatus_t refuse(cudnnStatus_t status, const char* why) {
  last_error = why;
  return status;
}

struct Descriptor;
using Shared = std::shared_ptr<Descriptor>;

struct Value {
  cudnnBackendAttributeType_t type;
  std::vector<char> bytes;
  std::vector<Shared> descriptors;
};

struct Descriptor {
  cudnnBackendDescriptorType_t type;
  bool finalized = false;
  std::map<int, Value> values;
  // Of configurations and engines.
  Engine engine = kPlain;
  Shared graph;

  bool has(int name) const { return values.count(name) != 0; }
  template <class T>
  std::vector<T> list(int name) const {
    const auto found = values.find(name);
    if (found == values.end()) return {};
    std::vector<T> result(found->second.bytes.size() / sizeof(T));
    std::memcpy(result.data(), found->second.bytes.data(), result.size() * sizeof(T));
    return result;
  }
  template <class T>
  T one(int name) const {
    T value = {};
    const auto found = values.find(name);
    if (found != values.end()) std::memcpy(&value, found->second.bytes.data(), sizeof value);
    return value;
  }
  const Descriptor* other(int name, std::size_t i = 0) const {
    const auto found = values.find(name);
    return found == values.end() || i >= found->second.descriptors.size() ? nullptr
                                                                          : found->second.descriptors[i].get();
  }
};

std::size_t size_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
      return 1;
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return 8;
    default:
      return 4;
  }
}

/// The type that an attribute takes.
cudnnBackendAttributeType_t type_of(int name, cudnnBackendAttributeType_t given) {
  switch (name) {
    case CUDNN_ATTR_POINTWISE_MODE:
      return CUDNN_TYPE_POINTWISE_MODE;
    case CUDNN_ATTR_POINTWISE_MATH_PREC:
    case CUDNN_ATTR_CONVOLUTION_COMP_TYPE:
    case CUDNN_ATTR_TENSOR_DATA_TYPE:
      return CUDNN_TYPE_DATA_TYPE;
    case CUDNN_ATTR_CONVOLUTION_CONV_MODE:
      return CUDNN_TYPE_CONVOLUTION_MODE;
    case CUDNN_ATTR_ENGINEHEUR_MODE:
      return CUDNN_TYPE_HEUR_MODE;
    case CUDNN_ATTR_OPERATIONGRAPH_HANDLE:
    case CUDNN_ATTR_EXECUTION_PLAN_HANDLE:
      return CUDNN_TYPE_HANDLE;
    case CUDNN_ATTR_TENSOR_IS_VIRTUAL:
      return CUDNN_TYPE_BOOLEAN;
    case CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS:
    case CUDNN_ATTR_VARIANT_PACK_WORKSPACE:
      return CUDNN_TYPE_VOID_PTR;
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA:
      return given == CUDNN_TYPE_DOUBLE ? CUDNN_TYPE_DOUBLE : CUDNN_TYPE_FLOAT;
    case CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH:
    case CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG:
    case CUDNN_ATTR_OPERATIONGRAPH_OPS:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY:
    case CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR:
    case CUDNN_ATTR_OPERATION_POINTWISE_XDESC:
    case CUDNN_ATTR_OPERATION_POINTWISE_BDESC:
    case CUDNN_ATTR_OPERATION_POINTWISE_YDESC:
      return CUDNN_TYPE_BACKEND_DESCRIPTOR;
    default:
      return CUDNN_TYPE_INT64;
  }
}

// ------------------------------------------------------------------------------------------------------------------
// What operations say

struct Parts {
  int x, w, y, convolution, alpha, beta;
};
Parts parts_of(int type) {
  switch (type) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
      return {704, 703, 705, 702, 700, 701};
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
      return {710, 709, 711, 708, 706, 707};
    default:
      return {716, 715, 717, 714, 712, 713};
  }
}
int result_of(int type) {
  const Parts parts = parts_of(type);
  return type == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR         ? parts.y
         : type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR ? parts.x
                                                                                : parts.w;
}

std::vector<int64_t> sizes(const Descriptor& tensor) { return tensor.list<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS); }
cudnnDataType_t dtype(const Descriptor& tensor) { return tensor.one<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE); }
int64_t id(const Descriptor& tensor) { return tensor.one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID); }
bool is_virtual(const Descriptor& tensor) { return tensor.one<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL); }

cudnnStatus_t check_tensor(const Descriptor& d) {
  const auto dims = sizes(d), strides = d.list<int64_t>(CUDNN_ATTR_TENSOR_STRIDES);
  const auto alignment = d.one<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
  if (!d.has(CUDNN_ATTR_TENSOR_DATA_TYPE) || dims.empty() || !d.has(CUDNN_ATTR_TENSOR_UNIQUE_ID)) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "a tensor without dtype, sizes or id");
  }
  if (strides.size() != dims.size()) return refuse(CUDNN_STATUS_BAD_PARAM, "a tensor with other strides than sizes");
  for (std::size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] < 1 || strides[i] < 1) return refuse(CUDNN_STATUS_BAD_PARAM, "a size or stride below 1");
  }
  if (alignment < 1 || (alignment & (alignment - 1)) != 0) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "an alignment that is no power of 2");
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t check_convolution(const Descriptor& d) {
  const auto dims = static_cast<std::size_t>(d.one<int64_t>(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS));
  if (!d.has(CUDNN_ATTR_CONVOLUTION_COMP_TYPE) || !d.has(CUDNN_ATTR_CONVOLUTION_CONV_MODE)) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "a convolution without type or mode");
  }
  for (const int name : {CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES,
                         CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS}) {
    const auto all = d.list<int64_t>(name);
    if (all.size() != dims) return refuse(CUDNN_STATUS_BAD_PARAM, "a convolution with other numbers than dimensions");
    const bool padding = name >= CUDNN_ATTR_CONVOLUTION_POST_PADDINGS;
    for (const int64_t v : all) {
      if (v < (padding ? 0 : 1))
        return refuse(CUDNN_STATUS_BAD_PARAM, "a stride or dilation below 1, or padding below 0");
    }
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t check_operation(const Descriptor& d) {
  const Parts parts = parts_of(d.type);
  const Descriptor *x = d.other(parts.x), *w = d.other(parts.w), *y = d.other(parts.y),
                   *how = d.other(parts.convolution);
  if (!x || !w || !y || !how || !d.has(parts.alpha) || !d.has(parts.beta)) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "an operation that lacks a tensor, its convolution or a factor");
  }
  const bool wide = how->one<cudnnDataType_t>(CUDNN_ATTR_CONVOLUTION_COMP_TYPE) == CUDNN_DATA_DOUBLE;
  for (const int factor : {parts.alpha, parts.beta}) {
    if ((d.values.at(factor).type == CUDNN_TYPE_DOUBLE) != wide) {
      return refuse(CUDNN_STATUS_BAD_PARAM, "a factor that isn't of the type that is computed in");
    }
  }
  const auto xs = sizes(*x), ws = sizes(*w), ys = sizes(*y);
  if (xs.size() != 4 || ws.size() != 4 || ys.size() != 4) return refuse(CUDNN_STATUS_BAD_PARAM, "no images");
  const auto stride = how->list<int64_t>(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
  const auto dilation = how->list<int64_t>(CUDNN_ATTR_CONVOLUTION_DILATIONS);
  const auto before = how->list<int64_t>(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
  const auto after = how->list<int64_t>(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS);
  bool fits = xs[0] == ys[0] && ys[1] == ws[0] && xs[1] % ws[1] == 0 && ws[0] % (xs[1] / ws[1]) == 0;
  for (std::size_t i = 0; i < 2; ++i) {
    const int64_t room = xs[2 + i] + before[i] + after[i] - dilation[i] * (ws[2 + i] - 1) - 1;
    fits = fits && room >= 0 && room / stride[i] + 1 == ys[2 + i];
  }
  return fits ? CUDNN_STATUS_SUCCESS : refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "sizes that don't fit");
}

cudnnStatus_t check_pointwise(const Descriptor& d) {
  const Descriptor* how = d.other(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
  const Descriptor *x = d.other(CUDNN_ATTR_OPERATION_POINTWISE_XDESC),
                   *y = d.other(CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
  const Descriptor* b = d.other(CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
  if (!how || !x || !y || sizes(*x) != sizes(*y)) return refuse(CUDNN_STATUS_BAD_PARAM, "no pointwise operation");
  const bool add = how->one<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE) == CUDNN_POINTWISE_ADD;
  if (add != (b != nullptr)) return refuse(CUDNN_STATUS_BAD_PARAM, "a second operand too many, or none");
  for (std::size_t i = 0; b != nullptr && i < 4; ++i) {
    const int64_t size = sizes(*b)[i];
    if (size != 1 && size != sizes(*x)[i]) return refuse(CUDNN_STATUS_BAD_PARAM, "a bias that doesn't broadcast");
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t check_graph(const Descriptor& d) {
  const auto found = d.values.find(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  if (found == d.values.end() || !d.has(CUDNN_ATTR_OPERATIONGRAPH_HANDLE)) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "a graph without operations or handle");
  }
  const auto& operations = found->second.descriptors;
  if (operations.empty() || operations.size() > 2) return refuse(CUDNN_STATUS_NOT_SUPPORTED, "too many operations");
  const Descriptor& result = *operations[0]->other(result_of(operations[0]->type));
  if (operations.size() == 1) {
    return is_virtual(result) ? refuse(CUDNN_STATUS_BAD_PARAM, "a result that is virtual") : CUDNN_STATUS_SUCCESS;
  }
  if (operations[1]->type != CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR || !is_virtual(result) ||
      operations[1]->other(CUDNN_ATTR_OPERATION_POINTWISE_XDESC) != &result) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "operations that aren't tied by a virtual tensor");
  }
  return CUDNN_STATUS_SUCCESS;
}

/// The graph's result, behind all operations.
const Descriptor& last_result(const Descriptor& graph) {
  const Descriptor* second = graph.other(CUDNN_ATTR_OPERATIONGRAPH_OPS, 1);
  if (second != nullptr) return *second->other(CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
  const Descriptor* first = graph.other(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  return *first->other(result_of(first->type));
}

/// The engines of a graph: as the real library has them on an H200.
std::vector<Engine> engines_of(const Descriptor& graph) {
  const Descriptor& operation = *graph.other(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  const Descriptor* const second = graph.other(CUDNN_ATTR_OPERATIONGRAPH_OPS, 1);
  const Parts parts = parts_of(operation.type);
  const int sought = result_of(operation.type);
  const auto low = dtype(*operation.other(sought == parts.y ? parts.x : parts.y));
  for (const int part : {parts.x, parts.w, parts.y}) {
    if (part != sought && dtype(*operation.other(part)) != low) return {};
  }
  if (dtype(last_result(graph)) != low) {
    const bool widens = second != nullptr && dtype(last_result(graph)) == CUDNN_DATA_FLOAT;
    return widens ? std::vector{kCompiled} : std::vector<Engine>{};
  }
  if (second != nullptr && sought != parts.y) return {};
  if (low == CUDNN_DATA_FLOAT) return {kUnsteady, kRounding, kPlain};
  return {kUnsteady, kPlain};
}

std::vector<int32_t> notes_of(Engine engine) {
  switch (engine) {
    case kUnsteady:
      return {CUDNN_NUMERICAL_NOTE_TENSOR_CORE, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC};
    case kRounding:
      return {CUDNN_NUMERICAL_NOTE_TENSOR_CORE};
    default:
      return {};
  }
}

// ------------------------------------------------------------------------------------------------------------------
// Execution

View view(const Descriptor& tensor) {
  View v = {};
  const auto dims = sizes(tensor), strides = tensor.list<int64_t>(CUDNN_ATTR_TENSOR_STRIDES);
  std::copy_n(dims.begin(), 4, v.sizes);
  std::copy_n(strides.begin(), 4, v.strides);
  v.dtype = dtype(tensor);
  return v;
}

constexpr int64_t kWorkspace = 512;

/// What a tensor's place in the variant pack is; null, and the status says why.
const void* address(const Descriptor& tensor, const Descriptor& pack, cudnnStatus_t* status) {
  const auto ids = pack.list<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto data = pack.list<const void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  const auto alignment = static_cast<uintptr_t>(tensor.one<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] != id(tensor)) continue;
    if (data[i] == nullptr) *status = refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "a tensor without memory");
    if (reinterpret_cast<uintptr_t>(data[i]) % alignment != 0) {
      *status = refuse(CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER, "a tensor that isn't aligned as it said");
    }
    return data[i];
  }
  *status = refuse(CUDNN_STATUS_BAD_PARAM, "a tensor that the variant pack doesn't have");
  return nullptr;
}

Descriptor* open(cudnnBackendDescriptor_t descriptor) { return static_cast<Shared*>(descriptor)->get(); }

template <class T>
cudnnStatus_t give(const std::vector<T>& all, int64_t requested, int64_t* count, void* values) {
  *count = static_cast<int64_t>(all.size());
  std::memcpy(values, all.data(), sizeof(T) * static_cast<std::size_t>(std::min(requested, *count)));
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return CUDNN_VERSION; }
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS         ? "CUDNN_STATUS_SUCCESS"
         : status == CUDNN_STATUS_NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED"
         : status / 1000 == 2                   ? "CUDNN_STATUS_BAD_PARAM"
                                                : "CUDNN_STATUS_EXECUTION_FAILED";
}
void cudnnGetLastErrorString(char* message, size_t max_size) {
  if (max_size == 0) return;
  const std::size_t size = std::min(max_size - 1, last_error.size());
  std::memcpy(message, last_error.data(), size);
  message[size] = '\0';
  last_error.clear();
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = new cudnnContext;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* descriptor) {
  auto made = std::make_shared<Descriptor>();
  made->type = type;
  *descriptor = new Shared(std::move(made));
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  delete static_cast<Shared*>(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* values) {
  Descriptor& d = *open(descriptor);
  if (d.finalized) return refuse(CUDNN_STATUS_BAD_PARAM, "a descriptor that was finalized");
  if (values == nullptr || count < 1) return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no values");
  if (type != type_of(name, type)) return refuse(CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE, "another type");
  Value value = {type, {}, {}};
  const auto* const bytes = static_cast<const char*>(values);
  value.bytes.assign(bytes, bytes + size_of(type) * static_cast<std::size_t>(count));
  for (int64_t i = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && i < count; ++i) {
    const auto* const other = static_cast<const Shared*>(static_cast<const cudnnBackendDescriptor_t*>(values)[i]);
    if (other == nullptr || !(*other)->finalized) {
      return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a descriptor that wasn't finalized");
    }
    value.descriptors.push_back(*other);
  }
  d.values[name] = std::move(value);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  Descriptor& d = *open(descriptor);
  if (d.finalized) return refuse(CUDNN_STATUS_BAD_PARAM, "a descriptor that was finalized");
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  switch (d.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
      status = check_tensor(d);
      break;
    case CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR:
      status = check_convolution(d);
      break;
    case CUDNN_BACKEND_POINTWISE_DESCRIPTOR:
      if (!d.has(CUDNN_ATTR_POINTWISE_MODE) || !d.has(CUDNN_ATTR_POINTWISE_MATH_PREC)) status = CUDNN_STATUS_BAD_PARAM;
      break;
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
      status = check_operation(d);
      break;
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
      status = check_pointwise(d);
      break;
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
      status = check_graph(d);
      break;
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
      if (!d.has(CUDNN_ATTR_ENGINEHEUR_MODE) || !d.other(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)) {
        status = refuse(CUDNN_STATUS_BAD_PARAM, "heuristics without mode or graph");
      }
      break;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
      if (!d.other(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) || !d.has(CUDNN_ATTR_EXECUTION_PLAN_HANDLE)) {
        status = refuse(CUDNN_STATUS_BAD_PARAM, "a plan without engine or handle");
      }
      break;
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR:
      if (d.list<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS).size() !=
              d.list<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS).size() ||
          !d.has(CUDNN_ATTR_VARIANT_PACK_WORKSPACE)) {
        status = refuse(CUDNN_STATUS_BAD_PARAM, "a variant pack without as many addresses as ids, or workspace");
      }
      break;
    default:
      status = refuse(CUDNN_STATUS_NOT_SUPPORTED, "a descriptor that isn't emulated");
  }
  d.finalized = status == CUDNN_STATUS_SUCCESS;
  return status;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t, int64_t requested, int64_t* count, void* values) {
  Descriptor& d = *open(descriptor);
  if (!d.finalized) return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a descriptor that wasn't finalized");
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: {
      const Shared graph = d.values.at(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH).descriptors[0];
      const auto engines = engines_of(*graph);
      *count = static_cast<int64_t>(engines.size());
      for (int64_t i = 0; i < std::min(requested, *count); ++i) {
        Descriptor& config = *open(static_cast<cudnnBackendDescriptor_t*>(values)[i]);
        if (config.type != CUDNN_BACKEND_ENGINECFG_DESCRIPTOR) return CUDNN_STATUS_BAD_PARAM;
        config.engine = engines[static_cast<std::size_t>(i)];
        config.graph = graph;
        config.finalized = true;
      }
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_ENGINECFG_ENGINE: {
      Descriptor& engine = *open(*static_cast<cudnnBackendDescriptor_t*>(values));
      if (requested < 1 || engine.type != CUDNN_BACKEND_ENGINE_DESCRIPTOR) return CUDNN_STATUS_BAD_PARAM;
      engine.engine = d.engine;
      engine.finalized = true;
      *count = 1;
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
      return give(std::vector<int64_t>{d.engine}, requested, count, values);
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
      return give(notes_of(d.engine), requested, count, values);
    case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE:
      return give(d.engine == kCompiled ? std::vector<int32_t>{CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION}
                                        : std::vector<int32_t>{},
                  requested, count, values);
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      return give(std::vector<int64_t>{kWorkspace}, requested, count, values);
    default:
      return refuse(CUDNN_STATUS_NOT_SUPPORTED, "an attribute that isn't emulated");
  }
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t variant_pack) {
  const Descriptor& pack = *open(variant_pack);
  if (!open(plan)->finalized || !pack.finalized) return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "not finalized");
  const Descriptor& config = *open(plan)->other(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  const Descriptor& graph = *config.graph;
  const Descriptor& operation = *graph.other(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  const Descriptor* const second = graph.other(CUDNN_ATTR_OPERATIONGRAPH_OPS, 1);
  const Descriptor* const bias = second ? second->other(CUDNN_ATTR_OPERATION_POINTWISE_BDESC) : nullptr;
  const Parts parts = parts_of(operation.type);
  const Descriptor *x = operation.other(parts.x), *w = operation.other(parts.w), *y = operation.other(parts.y);
  const Descriptor& how = *operation.other(parts.convolution);
  const Descriptor& result = last_result(graph);
  const int sought = result_of(operation.type);

  Convolution work = {};
  work.x = view(*x), work.w = view(*w), work.y = view(*y), work.result = view(result);
  if (bias != nullptr) work.bias = view(*bias);
  for (std::size_t i = 0; i < 2; ++i) {
    work.stride[i] = how.list<int64_t>(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES)[i];
    work.padding[i] = how.list<int64_t>(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS)[i];
    work.dilation[i] = how.list<int64_t>(CUDNN_ATTR_CONVOLUTION_DILATIONS)[i];
  }
  work.sought = sought == parts.x ? 0 : sought == parts.w ? 1 : 2;
  work.engine = config.engine;
  work.flipped = how.one<cudnnConvolutionMode_t>(CUDNN_ATTR_CONVOLUTION_CONV_MODE) == CUDNN_CONVOLUTION;

  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  const void* const xs = work.sought == 0 ? nullptr : address(*x, pack, &status);
  const void* const ws = work.sought == 1 ? nullptr : address(*w, pack, &status);
  const void* const ys = work.sought == 2 ? nullptr : address(*y, pack, &status);
  const void* const row = bias == nullptr ? nullptr : address(*bias, pack, &status);
  void* const to = const_cast<void*>(address(result, pack, &status));
  void* const space = pack.one<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
  if (space == nullptr) return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no workspace");
  if (status != CUDNN_STATUS_SUCCESS) return status;
  // As an engine uses it, so that what is too small is noticed.
  hscuda::emulator::launch(
      handle->stream, 1, 1, 0, true, +[](char* bytes) { std::memset(bytes, 0xa5, kWorkspace); },
      static_cast<char*>(space));
  hscuda::emulator::launch(handle->stream, 1, 1, 0, true, convolve, work, xs, ws, ys, row, to);
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"

namespace {

const hscuda::emulator::Function functions[] = {
    {"cudnnGetVersion", cudnnGetVersion},
    {"cudnnGetErrorString", cudnnGetErrorString},
    {"cudnnGetLastErrorString", cudnnGetLastErrorString},
    {"cudnnCreate", cudnnCreate},
    {"cudnnDestroy", cudnnDestroy},
    {"cudnnSetStream", cudnnSetStream},
    {"cudnnBackendCreateDescriptor", cudnnBackendCreateDescriptor},
    {"cudnnBackendDestroyDescriptor", cudnnBackendDestroyDescriptor},
    {"cudnnBackendFinalize", cudnnBackendFinalize},
    {"cudnnBackendSetAttribute", cudnnBackendSetAttribute},
    {"cudnnBackendGetAttribute", cudnnBackendGetAttribute},
    {"cudnnBackendExecute", cudnnBackendExecute},
};

}  // namespace
