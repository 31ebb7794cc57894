// SPDX-License-Identifier: Apache-2.0
// From a trace to a graph: names, constants, sizes that follow the batch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/io/onnx_internal.h"
#include "halfstep/ops/create.h"

namespace halfstep::io::detail {
namespace {

using Kind = nn::TracedValue::Kind;

std::vector<std::int64_t> list(const Shape& sizes) { return {sizes.begin(), sizes.end()}; }

std::string_view bytes_of(const Tensor& t) {
  return {static_cast<const char*>(t.impl()->data()), static_cast<std::size_t>(t.numel()) * t.item_size()};
}

double finfo_max(DType dtype) { return is_floating(dtype) ? finfo(dtype).max : 0; }

bool all_finite(const Tensor& t) {
  const std::vector<double> values = t.to_vector<double>();
  return std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
}

}  // namespace

OnnxBuilder::OnnxBuilder(const nn::Trace& trace, const nn::Trace* other, const OnnxGrids& grids,
                         const OnnxOptions& options)
    : trace_(trace),
      other_(other),
      grids_(grids),
      options_(options),
      makers_(trace.values.size(), -1),
      reader_(trace.values.size(), -1),
      needed_(trace.values.size(), false) {
  constexpr int kSeveral = -2;
  for (std::size_t c = 0; c < trace.calls.size(); ++c) {
    for (const int v : trace.calls[c].outputs) makers_[static_cast<std::size_t>(v)] = static_cast<int>(c);
    for (const int v : trace.calls[c].inputs) {
      if (v < 0) continue;
      int& reader = reader_[static_cast<std::size_t>(v)];
      reader = reader == -1 ? static_cast<int>(c) : kSeveral;
    }
  }
  for (const int v : trace.outputs) reader_[static_cast<std::size_t>(v)] = kSeveral;
  // Programs find a product's integers where QuantizeLinear and DequantizeLinear stand right before it, not where a
  // view or pooling is between: what is on a grid already is put on it again, which changes no number.
  for (const auto& [place, grid] : grids) {
    const auto& [c, input] = place;
    if (!grid.weight || input != 1 || grids.contains({c, 0})) continue;
    const int maker = makers_[static_cast<std::size_t>(trace.calls[static_cast<std::size_t>(c)].inputs[0])];
    if (maker >= 0 && !grids.contains({maker, -1})) again_.insert(maker);
  }
}

std::int32_t OnnxBuilder::type_of(DType dtype) const {
  if (is_floating(dtype)) return options_.dtype == DType::f16 ? kOnnxFloat16 : kOnnxFloat;
  switch (dtype) {
    case DType::i64:
      return kOnnxInt64;
    case DType::i32:
      return kOnnxInt32;
    case DType::i8:
      return kOnnxInt8;
    case DType::u8:
      return kOnnxUint8;
    default:
      return kOnnxBool;
  }
}

void OnnxBuilder::refuse(const std::string& why) const { fail<Error>("export_onnx: {}: {}", call_->place(), why); }

void OnnxBuilder::check_attributes(std::size_t size) const {
  if (call_->attributes.size() != size) {
    fail<InternalError>("export_onnx: {}: expected attributes of {} bytes, got {}", call_->op, size,
                        call_->attributes.size());
  }
}

OnnxDims OnnxBuilder::dims_of(int value) const {
  const Shape& mine = trace_.values[static_cast<std::size_t>(value)].tensor.sizes();
  OnnxDims dims;
  for (std::int64_t n : mine) dims.push_back({.fixed = n});
  if (!other_) return dims;
  const Shape& theirs = other_->values[static_cast<std::size_t>(value)].tensor.sizes();
  const std::int64_t my_batch = trace_.values[static_cast<std::size_t>(trace_.inputs[0])].tensor.sizes()[0];
  const std::int64_t their_batch = other_->values[static_cast<std::size_t>(other_->inputs[0])].tensor.sizes()[0];
  if (mine.size() != theirs.size()) refuse("its number of dimensions follows the batch; export with a fixed batch");
  for (int i = 0; i < mine.size(); ++i) {
    if (mine[i] == theirs[i]) continue;
    const std::int64_t times = mine[i] / my_batch;
    if (times * my_batch != mine[i] || times * their_batch != theirs[i]) {
      refuse(fmt::format("a size that is {} for {} samples is {} for {}, no multiple; export with a fixed batch",
                         mine[i], my_batch, theirs[i], their_batch));
    }
    dims[static_cast<std::size_t>(i)] = {.fixed = 0, .per_batch = times};
  }
  return dims;
}

bool OnnxBuilder::wanted(int i) const {
  return needed_[static_cast<std::size_t>(call_->outputs[static_cast<std::size_t>(i)])];
}

// --- names

std::string OnnxBuilder::unique(const std::string& name) {
  std::string result = name;
  for (int i = 2; !taken_.insert(result).second; ++i) result = fmt::format("{}_{}", name, i);
  return result;
}

std::string OnnxBuilder::name_of(int value, bool in_float32) {
  const nn::TracedValue& v = trace_.values[static_cast<std::size_t>(value)];
  const bool other_type = in_float32 && is_floating(v.tensor.dtype()) && options_.dtype != DType::f32;
  auto& names = other_type ? in_float_ : names_;
  if (const auto it = names.find(value); it != names.end()) return it->second;
  std::string name;
  if (v.kind == Kind::parameter || v.kind == Kind::constant) {
    name = embed(value, other_type);
  } else if (other_type) {
    name = node("Cast", {name_of(value, false)}, {{"to", kOnnxFloat}});
  } else {
    refuse("reads a tensor that nothing made");
  }
  names[value] = name;
  return name;
}

std::string OnnxBuilder::in(int i) {
  if (product_ && i == 1) return product_->weight;
  if (product_ && i == 2) return product_->bias;
  if (!has(i)) return {};
  const int value = call_->inputs[static_cast<std::size_t>(i)];
  const OnnxGrid* grid = grid_at(i);
  if (!grid) return name_of(value, false);
  return grid->weight ? weight_on_grid(value, *grid) : input_on_grid(value, *grid);
}
std::string OnnxBuilder::in_float(int i) {
  return has(i) ? name_of(call_->inputs[static_cast<std::size_t>(i)], true) : std::string();
}

std::string OnnxBuilder::output_name(int value, int i) {
  if (const auto it = names_.find(value); it != names_.end()) return it->second;  // of the graph's outputs
  std::string name = call_->module.empty() ? call_->op : call_->module + "/" + call_->op;
  if (i > 0) name += fmt::format(":{}", i);
  return names_[value] = unique(name);
}

// --- nodes

std::string OnnxBuilder::node(std::string_view op, std::vector<std::string> inputs, OnnxAttributes attributes) {
  const std::string base = call_ ? (call_->module.empty() ? call_->op : call_->module + "/" + call_->op) : "sizes";
  const std::string name = unique(fmt::format("{}.{}", base, op));
  graph_.nodes.push_back({std::string(op), name, std::move(inputs), {name}, std::move(attributes)});
  return name;
}

void OnnxBuilder::result(std::string_view op, std::vector<std::string> inputs, OnnxAttributes attributes, int i) {
  const std::string name = output_name(call_->outputs[static_cast<std::size_t>(i)], i);
  graph_.nodes.push_back({std::string(op), name, std::move(inputs), {name}, std::move(attributes)});
}

void OnnxBuilder::same(const std::string& name, int i) {
  const int value = call_->outputs[static_cast<std::size_t>(i)];
  if (names_.contains(value)) {
    result("Identity", {name}, {}, i);
  } else {
    names_[value] = name;
  }
}

// --- constants

// Checked before the memory is taken: protobuf's sizes are 32 bits.
Tensor OnnxBuilder::converted(const Tensor& tensor, bool in_float32, const std::string& what) {
  const DType wanted = !is_floating(tensor.dtype()) ? tensor.dtype() : in_float32 ? DType::f32 : options_.dtype;
  bytes_ += tensor.numel() * static_cast<std::int64_t>(item_size(wanted));
  if (bytes_ > std::numeric_limits<std::int32_t>::max()) {
    fail<IoError>("export_onnx: the parameters take more than 2 GiB, which is more than an ONNX file can hold{}",
                  options_.dtype == DType::f32 ? "; export with dtype f16?" : "");
  }
  const Tensor t = tensor.to(Device{}).contiguous();
  const Tensor result = t.to(wanted);
  const bool narrower = finfo_max(wanted) < finfo_max(t.dtype());
  if (narrower && !all_finite(result) && all_finite(t)) {
    fail<Error>("export_onnx: {} has values beyond {}'s range; export with another dtype", what, name(wanted));
  }
  return result;
}

std::string OnnxBuilder::add_initializer(std::string name, const Tensor& tensor, std::vector<std::int64_t> dims,
                                         std::int32_t type) {
  name = unique(name);
  graph_.initializers.push_back({name, type, std::move(dims), tensor});
  return name;
}

// A constant whose sizes follow the batch: one element, repeated.
std::string OnnxBuilder::broadcast_constant(const nn::TracedValue& v, const OnnxDims& dims) {
  const Tensor flat = v.tensor.to(Device{}).contiguous().view({v.tensor.numel()});
  const std::string_view bytes = bytes_of(flat);
  const std::size_t n = flat.item_size();
  for (std::size_t i = n; i < bytes.size(); i += n) {
    if (bytes.substr(i, n) != bytes.substr(0, n)) {
      refuse("reads a constant whose sizes follow the batch; export with a fixed batch");
    }
  }
  return node("Expand", {constant(flat.select(0, 0)), shape_tensor(dims)});
}

std::string OnnxBuilder::embed(int value, bool in_float32) {
  const nn::TracedValue& v = trace_.values[static_cast<std::size_t>(value)];
  if (v.overwritten) refuse("reads a parameter or constant that is written over later");
  const bool named = v.kind == Kind::parameter;
  const OnnxDims dims = dims_of(value);
  if (std::any_of(dims.begin(), dims.end(), [](const OnnxDim& d) { return d.per_batch != 0; })) {
    const std::string spread = broadcast_constant(v, dims);
    return in_float32 ? node("Cast", {spread}, {{"to", kOnnxFloat}}) : spread;
  }
  if (!named && !in_float32) return constant(v.tensor);
  const Tensor t = converted(v.tensor, in_float32, named ? v.name : "a constant");
  // Beside a form of the same parameter in another dtype it needs another name.
  return add_initializer(named ? v.name : "constant", t, list(t.sizes()), in_float32 ? kOnnxFloat : type_of(t.dtype()));
}

std::string OnnxBuilder::constant(const Tensor& tensor) {
  const Tensor t = converted(tensor, false, "a constant");
  const std::int32_t type = type_of(t.dtype());
  // Small ones are often the same.
  if (t.numel() > 64) return add_initializer("constant", t, list(t.sizes()), type);
  const std::string key = fmt::format("{} {} ", type, t.sizes().str()) + std::string(bytes_of(t));
  if (const auto it = constants_.find(key); it != constants_.end()) return it->second;
  return constants_[key] = add_initializer("constant", t.clone(), list(t.sizes()), type);
}

std::string OnnxBuilder::ints(const std::vector<std::int64_t>& values) {
  Tensor t = empty({static_cast<std::int64_t>(values.size())}, {.dtype = DType::i64, .device = Device{}});
  std::copy(values.begin(), values.end(), write_data<std::int64_t>(t));
  return constant(t);
}
std::string OnnxBuilder::number(double value, DType dtype) {
  return constant(full({}, value, {.dtype = is_floating(dtype) ? DType::f64 : dtype, .device = Device{}}));
}
std::string OnnxBuilder::number(const ScalarValue& v, DType dtype) {
  if (v.kind == 2 || is_floating(dtype)) return number(v.floating, dtype);
  return constant(full({}, v.integer, {.dtype = dtype, .device = Device{}}));
}
std::string OnnxBuilder::floats(const std::vector<float>& values) {
  Tensor t = empty({static_cast<std::int64_t>(values.size())}, {.dtype = DType::f32, .device = Device{}});
  std::copy(values.begin(), values.end(), write_data<float>(t));
  return options_.dtype == DType::f32 ? constant(t) : add_initializer("constant", t, list(t.sizes()), kOnnxFloat);
}
std::string OnnxBuilder::filled(std::int64_t n, double value, bool in_float32) {
  if (in_float32) return floats(std::vector<float>(static_cast<std::size_t>(n), static_cast<float>(value)));
  return constant(full({n}, value, {.dtype = DType::f32, .device = Device{}}));
}

// --- sizes

std::string OnnxBuilder::shape_tensor(const OnnxDims& dims) {
  std::vector<std::string> parts;
  std::vector<std::int64_t> fixed;
  const auto flush = [&] {
    if (!fixed.empty()) parts.push_back(ints(fixed));
    fixed.clear();
  };
  for (const OnnxDim& d : dims) {
    if (d.per_batch == 0) {
      fixed.push_back(d.fixed);
      continue;
    }
    flush();
    if (batch_.empty()) {
      batch_ = node("Shape", {graph_.inputs[0].name}, {{"start", std::int64_t{0}}, {"end", std::int64_t{1}}});
    }
    parts.push_back(d.per_batch == 1 ? batch_ : node("Mul", {batch_, ints({d.per_batch})}));
  }
  flush();
  if (parts.empty()) return ints({});
  return parts.size() == 1 ? parts[0] : node("Concat", parts, {{"axis", std::int64_t{0}}});
}

std::string OnnxBuilder::reshape(const std::string& x, const OnnxDims& from, const OnnxDims& to, bool final) {
  const auto add = [&](std::string_view op, std::vector<std::string> inputs, OnnxAttributes attributes = {}) {
    if (!final) return node(op, std::move(inputs), std::move(attributes));
    result(op, std::move(inputs), std::move(attributes));
    return std::string();
  };
  if (from == to) {
    if (final) same(x);
    return x;
  }
  if (to.size() == 2 && from.size() > 2 && from[0] == to[0]) return add("Flatten", {x}, {{"axis", std::int64_t{1}}});
  // 0 keeps the size in the same place, -1 is what is left.
  std::vector<std::int64_t> target;
  int left = 0;
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (to[i].per_batch == 0) {
      target.push_back(to[i].fixed);
    } else if (i < from.size() && from[i] == to[i]) {
      target.push_back(0);
    } else {
      target.push_back(-1);
      ++left;
    }
  }
  return add("Reshape", {x, left <= 1 ? ints(target) : shape_tensor(to)});
}

// --- the whole

void OnnxBuilder::find_needed() {
  std::vector<int> wanted = trace_.outputs;
  for (int v : wanted) needed_[static_cast<std::size_t>(v)] = true;
  for (auto it = trace_.calls.rbegin(); it != trace_.calls.rend(); ++it) {
    const bool any = std::any_of(it->outputs.begin(), it->outputs.end(),
                                 [&](int v) { return needed_[static_cast<std::size_t>(v)]; });
    if (!any) continue;
    for (int v : it->inputs) {
      if (v >= 0) needed_[static_cast<std::size_t>(v)] = true;
    }
  }
}

void OnnxBuilder::add_ports() {
  const auto names = [](const std::vector<std::string>& given, std::size_t n, const char* standard) {
    if (!given.empty()) {
      if (given.size() != n) fail<Error>("export_onnx: expected {} names of {}s, got {}", n, standard, given.size());
      return given;
    }
    if (n == 1) return std::vector<std::string>{standard};
    std::vector<std::string> result;
    for (std::size_t i = 0; i < n; ++i) result.push_back(fmt::format("{}_{}", standard, i));
    return result;
  };
  const auto port = [&](const std::string& name, int value) {
    if (name.empty()) fail<Error>("export_onnx: expected names for inputs and outputs, got an empty one");
    if (!taken_.insert(name).second) fail<Error>("export_onnx: two inputs or outputs are called '{}'", name);
    const nn::TracedValue& v = trace_.values[static_cast<std::size_t>(value)];
    return OnnxPort{name, type_of(v.tensor.dtype()), dims_of(value)};
  };
  const auto in = names(options_.input_names, trace_.inputs.size(), "input");
  for (std::size_t i = 0; i < in.size(); ++i) {
    graph_.inputs.push_back(port(in[i], trace_.inputs[i]));
    names_[trace_.inputs[i]] = in[i];
  }
  const auto out = names(options_.output_names, trace_.outputs.size(), "output");
  for (std::size_t i = 0; i < out.size(); ++i) {
    graph_.outputs.push_back(port(out[i], trace_.outputs[i]));
    const nn::TracedValue& v = trace_.values[static_cast<std::size_t>(trace_.outputs[i])];
    // The call that makes it gives it this name.
    if (v.kind == Kind::computed) names_.try_emplace(trace_.outputs[i], out[i]);
  }
}

// What is an output twice, or is an input or a constant.
void OnnxBuilder::add_outputs() {
  for (std::size_t i = 0; i < trace_.outputs.size(); ++i) {
    const std::string made = name_of(trace_.outputs[i], false), &wanted = graph_.outputs[i].name;
    if (made != wanted) graph_.nodes.push_back({"Identity", wanted, {made}, {wanted}, {}});
  }
}

// The call as its translator has it, and around it what is in integers.
void OnnxBuilder::translate() {
  const int value = call_->outputs[0];
  const OnnxGrid* grid = grid_at(-1);
  if (!grid && again_.contains(index_)) grid = grid_of(value);
  begin_product();
  // The result's name is that of what comes last.
  std::string name;
  if (grid || (product_ && product_->late_bias.defined())) {
    if (const auto it = names_.find(value); it != names_.end()) {
      name = it->second;
      names_.erase(it);
    }
  }
  if (folded_.contains(index_)) {
    same(in(0));
  } else {
    onnx_translators().find(call_->op)->second(*this);
  }
  if (product_ && product_->late_bias.defined()) add_late_bias();
  if (grid) names_[value] = on_grid(names_.at(value), *grid, name);
  if (!grid && !name.empty()) {
    graph_.nodes.push_back({"Identity", name, {names_.at(value)}, {name}, {}});
    names_[value] = name;
  }
  product_.reset();
}

OnnxGraph OnnxBuilder::build() {
  const nn::TracedCall output{.op = "the output", .module = {}, .inputs = {}, .outputs = {}, .attributes = {}};
  call_ = &output;
  find_needed();
  add_ports();
  for (std::size_t c = 0; c < trace_.calls.size(); ++c) {
    const nn::TracedCall& call = trace_.calls[c];
    if (std::none_of(call.outputs.begin(), call.outputs.end(),
                     [&](int v) { return needed_[static_cast<std::size_t>(v)]; })) {
      continue;
    }
    call_ = &call;
    index_ = static_cast<int>(c);
    if (!onnx_translators().contains(call.op)) {
      refuse("has no form in ONNX here; docs/guide/onnx.md lists the ops that have");
    }
    translate();
    for (int v : call.outputs) {
      if (needed_[static_cast<std::size_t>(v)] && !names_.contains(v)) {
        refuse("has a second result, which has no form in ONNX here");
      }
    }
  }
  call_ = &output;
  index_ = -1;
  add_outputs();
  return std::move(graph_);
}

}  // namespace halfstep::io::detail
