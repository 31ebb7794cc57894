// SPDX-License-Identifier: Apache-2.0
// The tensors of a file in the plan of a network: what is a parameter and how it is called, what the host knows, and
// grids of integers.
#include <algorithm>
#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/io/onnx_names_internal.h"
#include "halfstep/io/onnx_plan_internal.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/view.h"

namespace halfstep::io::detail {
namespace {

using std::int64_t;
using std::size_t;
using Ints = std::vector<int64_t>;

// Beyond this, arrays of whole numbers are buffers, and floating ones of constants.
constexpr int64_t kMostHostInts = int64_t{1} << 16, kMostHostFloats = 16;

const char* role(OnnxUse use) {
  switch (use) {
    case OnnxUse::bias:
      return "bias";
    case OnnxUse::mean:
      return "running_mean";
    case OnnxUse::variance:
      return "running_var";
    default:
      return "weight";
  }
}

}  // namespace

OnnxUse use_of(const std::string& op, size_t i) {
  static const std::map<std::string, std::vector<OnnxUse>, std::less<>> kUses = {
      {"Conv", {OnnxUse::other, OnnxUse::weight, OnnxUse::bias}},
      {"ConvTranspose", {OnnxUse::other, OnnxUse::weight, OnnxUse::bias}},
      {"Gemm", {OnnxUse::weight, OnnxUse::weight, OnnxUse::bias}},
      {"linear", {OnnxUse::other, OnnxUse::weight, OnnxUse::bias}},
      {"MatMul", {OnnxUse::weight, OnnxUse::weight}},
      {"Einsum", {OnnxUse::weight, OnnxUse::weight}},
      {"PRelu", {OnnxUse::other, OnnxUse::weight}},
      {"BatchNormalization", {OnnxUse::other, OnnxUse::weight, OnnxUse::bias, OnnxUse::mean, OnnxUse::variance}},
      {"LayerNormalization", {OnnxUse::other, OnnxUse::weight, OnnxUse::bias}},
      {"RMSNormalization", {OnnxUse::other, OnnxUse::weight}},
      {"InstanceNormalization", {OnnxUse::other, OnnxUse::weight, OnnxUse::bias}},
      {"GroupNormalization", {OnnxUse::other, OnnxUse::weight, OnnxUse::bias}},
      {"Gather", {OnnxUse::operand, OnnxUse::host}},
      {"GatherND", {OnnxUse::operand, OnnxUse::host}},
      {"ScatterND", {OnnxUse::host, OnnxUse::host, OnnxUse::host}},
      {"Reshape", {OnnxUse::operand, OnnxUse::host}},
      {"Expand", {OnnxUse::operand, OnnxUse::host}},
      {"Tile", {OnnxUse::operand, OnnxUse::host}},
      {"Transpose", {OnnxUse::operand}},
      {"Concat", {OnnxUse::operand, OnnxUse::operand, OnnxUse::operand}},
      {"Unsqueeze", {OnnxUse::operand, OnnxUse::host}},
      {"Squeeze", {OnnxUse::operand, OnnxUse::host}},
      {"Split", {OnnxUse::operand, OnnxUse::host}},
      {"Slice", {OnnxUse::operand, OnnxUse::host, OnnxUse::host, OnnxUse::host, OnnxUse::host}},
      {"Resize", {OnnxUse::other, OnnxUse::host, OnnxUse::host, OnnxUse::host}},
      {"Pad", {OnnxUse::other, OnnxUse::host, OnnxUse::host, OnnxUse::host}},
      {"Clip", {OnnxUse::other, OnnxUse::host, OnnxUse::host}},
      {"Dropout", {OnnxUse::other, OnnxUse::host, OnnxUse::host}},
      {"QuantizeLinear", {OnnxUse::weight, OnnxUse::host, OnnxUse::host}},
      {"DequantizeLinear", {OnnxUse::operand, OnnxUse::host, OnnxUse::host}},
      {"Add", {OnnxUse::operand, OnnxUse::operand}},
      {"Sub", {OnnxUse::operand, OnnxUse::operand}},
      {"Mul", {OnnxUse::operand, OnnxUse::operand}},
      {"Div", {OnnxUse::operand, OnnxUse::operand}},
  };
  const auto it = kUses.find(op);
  if (it != kUses.end()) return i < it->second.size() ? it->second[i] : OnnxUse::other;
  return op.starts_with("Reduce") && i == 1 ? OnnxUse::host : OnnxUse::other;
}

OnnxHostRef OnnxPlanner::host_of(const OnnxInitializer& t) {
  OnnxHost h{.dtype = DType::i64, .dims = t.dims};
  if (is_floating(t.tensor.dtype())) {
    h.dtype = DType::f32;
    h.floats = t.tensor.to(DType::f32).to_vector<double>();
  } else {
    if (t.tensor.dtype() == DType::boolean) h.dtype = DType::boolean;
    h.ints = t.tensor.to_vector<int64_t>();
  }
  return std::make_shared<const OnnxHost>(std::move(h));
}

// Whether a tensor of the file is known to the host rather than held by a module.
bool OnnxPlanner::goes_to_host(const OnnxSource& s, OnnxUse use) {
  if (use == OnnxUse::host) return s.data.tensor.numel() <= kMostHostInts;
  if (use != OnnxUse::operand && use != OnnxUse::other) return false;
  const int64_t n = s.data.tensor.numel();
  if (!is_floating(s.data.tensor.dtype())) return n <= kMostHostInts;
  return n <= 1 || (s.made_up && n <= kMostHostFloats);
}

// The number of a node's input.
int OnnxPlanner::value_of(const OnnxNode& n, const std::string& name, OnnxUse use) {
  if (name.empty()) return -1;
  const auto source = sources_.find(name);
  if (source == sources_.end()) {
    if (integers_.contains(name)) refuse(n, "reads integers of QuantizeLinear, which only DequantizeLinear does here");
    const auto it = values_.find(name);
    if (it == values_.end()) refuse(n, fmt::format("reads '{}', which has no value here", printable_start(name)));
    return it->second;
  }
  OnnxSource& s = source->second;
  // Weights of one element may be read as a number, too.
  if (goes_to_host(s, use)) {
    if (s.as_number < 0) s.as_number = constant(host_of(s.data));
    return s.as_number;
  }
  if (s.as_tensor >= 0) return s.as_tensor;
  const bool floats = is_floating(s.data.tensor.dtype());
  const Tensor t = floats ? s.data.tensor.to(DType::f32) : s.data.tensor;
  const bool statistic = use == OnnxUse::mean || use == OnnxUse::variance;
  const bool operand = use == OnnxUse::operand || use == OnnxUse::other || use == OnnxUse::host;
  const bool trained = floats && !statistic && !is_constant_name(name) && !(operand && s.made_up);
  s.as_tensor = hold(s.made_up ? path_of(n) + "." + role(use) : parameter_name(name, role(use)), t, trained);
  return s.as_tensor;
}

int OnnxPlanner::constant(OnnxHostRef h) {
  const int value = new_value({});
  plan_.constants.emplace_back(value, h);
  host_[static_cast<size_t>(value)].host = std::move(h);
  return value;
}

// A tensor of a module, under a name that is free.
int OnnxPlanner::hold(const std::string& wanted, Tensor tensor, bool trained) {
  std::string name = wanted;
  for (int i = 2; !names_.insert(name).second; ++i) name = fmt::format("{}_{}", wanted, i);
  const size_t dot = name.rfind('.');
  std::string path = dot == std::string::npos ? "" : name.substr(0, dot);
  // Modules hold so many; names without a dot are those of the network.
  constexpr size_t kMostTensors = 4096;
  size_t index = 0;
  for (int i = 2;; ++i) {
    const auto [it, is_new] = part_of_path_.emplace(path, plan_.parts.size());
    if (is_new) plan_.parts.push_back({.path = path, .tensors = {}});
    index = it->second;
    if (plan_.parts[index].tensors.size() < kMostTensors) break;
    path = fmt::format("{}_{}", dot == std::string::npos ? "" : name.substr(0, dot), i);
  }
  const int value = new_value({});
  part_of_[value] = static_cast<int>(index);
  plan_.parts[index].tensors.push_back({.name = dot == std::string::npos ? name : name.substr(dot + 1),
                                        .tensor = std::move(tensor),
                                        .trained = trained,
                                        .value = value});
  return value;
}

const OnnxInitializer& OnnxPlanner::constant_of(const OnnxNode& n, size_t i, const char* what) const {
  const auto it = sources_.find(n.inputs[i]);
  if (it == sources_.end()) refuse(n, fmt::format("expected {} that is in the file", what));
  return it->second.data;
}

OnnxFileGrid OnnxPlanner::grid_of(const OnnxNode& n, std::int32_t type) const {
  OnnxFileGrid g{.scale = {}, .zero_point = {}, .type = type, .axis = {}};
  const OnnxInitializer& scale = constant_of(n, 1, "a scale");
  if (!is_floating(scale.tensor.dtype()) || scale.dims.size() > 1) {
    refuse(n, "expected a scale, or one for each channel");
  }
  g.scale = scale.tensor.to(DType::f32).to_vector<float>();
  for (const float s : g.scale) {
    if (!(s > 0) || !std::isfinite(s)) refuse(n, fmt::format("expected scales above 0, got {}", s));
  }
  g.zero_point.assign(g.scale.size(), 0);
  if (n.inputs.size() > 2 && !n.inputs[2].empty()) {
    const OnnxInitializer& zero = constant_of(n, 2, "a zero point");
    if (is_floating(zero.tensor.dtype())) refuse(n, "expected a zero point of whole numbers");
    if (zero.tensor.numel() != scale.tensor.numel()) refuse(n, "expected as many zero points as scales");
    g.zero_point = zero.tensor.to_vector<int64_t>();
    g.type = zero.type;
  }
  if (scale.dims.size() == 1 && scale.dims[0] != 1) {
    g.axis = 1;
    for (const OnnxAttribute& a : n.attributes) {
      if (a.name == "axis") g.axis = std::get<int64_t>(a.value);
    }
  }
  return g;
}

int OnnxPlanner::quantizer(const OnnxNode& n, const std::string& path, const OnnxFileGrid& g, bool narrow) {
  quant::FakeQuantizeOptions o;
  o.is_signed = g.type == kOnnxInt8 || g.type == kOnnxInt16;
  if (!o.is_signed && g.type != kOnnxUint8 && g.type != kOnnxUint16) {
    refuse(n, fmt::format("its integers are of type {}; those of 8 and 16 bits are read", g.type));
  }
  o.bits = g.type == kOnnxInt16 || g.type == kOnnxUint16 ? 16 : 8;
  o.symmetric = o.is_signed && std::all_of(g.zero_point.begin(), g.zero_point.end(), [](auto z) { return z == 0; });
  o.narrow_range = narrow && o.symmetric;
  const int64_t least = o.is_signed ? -(int64_t{1} << (o.bits - 1)) : 0, most = least + (int64_t{1} << o.bits) - 1;
  for (const int64_t z : g.zero_point) {
    if (z < least || z > most) refuse(n, fmt::format("its zero point is {}", z));
  }
  o.axis = g.axis;
  if (g.axis) o.channels = static_cast<int64_t>(g.scale.size());
  if (learned_) {
    o.source = quant::ScaleSource::learned;
    o.eps = std::min<double>(o.eps, *std::min_element(g.scale.begin(), g.scale.end()));
  }
  std::string name = path;
  for (int i = 2; !names_.insert(name).second; ++i) name = fmt::format("{}_{}", path, i);
  plan_.quantizers.push_back({.path = name, .options = o, .scale = g.scale, .zero_point = g.zero_point});
  return static_cast<int>(plan_.quantizers.size()) - 1;
}

// Adds a step that puts `from` on a grid.
int OnnxPlanner::fake_quantized(const OnnxNode& n, int from, int quantizer_index) {
  static const OnnxOperator kFakeQuantize{};
  const int to = new_value({});
  plan_.steps.push_back({.op = &kFakeQuantize,
                         .type = n.op,
                         .name = n.name,
                         .inputs = {from},
                         .outputs = {to},
                         .quantizer = quantizer_index});
  return to;
}

void OnnxPlanner::quantize_step(const OnnxNode& n) {
  std::int32_t type = kOnnxUint8;
  const OnnxFileGrid g = grid_of(n, type);
  const int from = input_of(n, 0);
  const bool is_weight = part_of_.contains(from);
  std::string path = is_weight ? name_of_value(from) + "_fake_quant" : "quantize." + one_component(n.inputs[0]);
  const int to = fake_quantized(n, from, quantizer(n, path, g, is_weight));
  values_[n.outputs[0]] = to;
  integers_[n.outputs[0]] = {to, g};
}

std::string OnnxPlanner::name_of_value(int value) const {
  const OnnxPartPlan& part = plan_.parts[static_cast<size_t>(part_of_.at(value))];
  for (const OnnxPartPlan::Tensor& t : part.tensors) {
    if (t.value == value) return part.path.empty() ? t.name : part.path + "." + t.name;
  }
  return "weight";
}

// What DequantizeLinear gives: a parameter on its grid, or what was quantized.
void OnnxPlanner::dequantize_step(const OnnxNode& n) {
  if (const auto q = integers_.find(n.inputs[0]); q != integers_.end()) {
    if (!(grid_of(n, q->second.second.type) == q->second.second)) {
      refuse(n, "has another scale or zero point than the QuantizeLinear that it reads");
    }
    values_[n.outputs[0]] = q->second.first;
    return;
  }
  const auto source = sources_.find(n.inputs[0]);
  if (source == sources_.end()) refuse(n, "reads neither a tensor of the file nor QuantizeLinear");
  weights_.emplace(n.outputs[0], &n);
}

// The reader of a DequantizeLinear of the file's tensor tells what it is. `transposed`: a matrix.
int OnnxPlanner::weight_of(const OnnxNode& reader, const std::string& name, OnnxUse use, bool transposed) {
  const std::string key = name + (transposed ? " t" : "");
  if (const auto it = made_weights_.find(key); it != made_weights_.end()) return it->second;
  const OnnxNode& n = *weights_.at(name);
  const OnnxSource& s = sources_.at(n.inputs[0]);
  if (is_floating(s.data.tensor.dtype())) refuse(n, "expected integers");
  OnnxFileGrid g = grid_of(n, s.data.type);
  const Tensor& q = s.data.tensor;
  if (g.type != s.data.type) refuse(n, "expected a zero point of the type of the integers");
  if (g.axis) {
    if (*g.axis < 0) *g.axis += q.dim();
    if (*g.axis < 0 || *g.axis >= q.dim() || q.size(*g.axis) != static_cast<int64_t>(g.scale.size())) {
      refuse(n, fmt::format("has {} scales for integers {}", g.scale.size(), q.sizes().str()));
    }
  }
  Tensor values = dequantized(q, g);
  if (transposed) {
    values = values.t().contiguous();
    if (g.axis) *g.axis = 1 - *g.axis;
  }
  const std::string original = strip(n.inputs[0]);
  const std::string wanted =
      is_made_up(original) ? path_of(reader) + "." + role(use) : parameter_name(original, role(use));
  int value = hold(wanted, values, true);
  if (s.data.type != kOnnxInt32) {
    const std::vector<int64_t> integers = q.to_vector<int64_t>();
    const int64_t least = s.data.type == kOnnxInt16 ? -32768 : -128;
    const bool narrow = std::none_of(integers.begin(), integers.end(), [&](int64_t i) { return i == least; });
    const std::string path = name_of_value(value) + "_fake_quant";
    value = fake_quantized(n, value, quantizer(n, path, g, narrow));
  }
  return made_weights_[key] = value;
}

// In float32, as DequantizeLinear has it, also of 32 bits.
Tensor OnnxPlanner::dequantized(const Tensor& q, const OnnxFileGrid& g) {
  Tensor result = empty(q.sizes(), {.dtype = DType::f32, .device = Device{}});
  auto* to = write_data<float>(result);
  const std::vector<int64_t> integers = q.to_vector<int64_t>();
  size_t inner = integers.size();  // elements for which one scale stands in a row
  if (g.axis) {
    inner = 1;
    for (int i = static_cast<int>(*g.axis) + 1; i < q.dim(); ++i) inner *= static_cast<size_t>(q.size(i));
  }
  for (size_t i = 0; i < integers.size(); ++i) {
    const size_t c = g.axis ? i / inner % g.scale.size() : 0;
    to[i] = static_cast<float>(integers[i] - g.zero_point[c]) * g.scale[c];
  }
  return result;
}

}  // namespace halfstep::io::detail
