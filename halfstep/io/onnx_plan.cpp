// SPDX-License-Identifier: Apache-2.0
// From a graph to the plan of a network: which nodes are computed, and in what steps.
#include <algorithm>

#include "halfstep/autograd/grad_mode.h"
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

// Of all that is computed once, when the file is read.
constexpr size_t kMostFolded = size_t{1} << 24;

bool matches_type(const OnnxAttribute& a, char letter) {
  switch (letter) {
    case 'i':
      return std::holds_alternative<int64_t>(a.value);
    case 'f':
      return std::holds_alternative<float>(a.value);
    case 's':
      return std::holds_alternative<std::string>(a.value);
    case 'I':
      return std::holds_alternative<Ints>(a.value);
    default:
      return std::holds_alternative<std::shared_ptr<const OnnxInitializer>>(a.value);
  }
}
bool is_known(std::string_view list, const OnnxAttribute& a) {
  for (size_t at = 0; (at = list.find(a.name, at)) != std::string_view::npos; at += a.name.size()) {
    const size_t end = at + a.name.size();
    if ((at == 0 || list[at - 1] == ' ') && end + 1 < list.size() && list[end] == ':') {
      return !a.name.empty() && matches_type(a, list[end + 1]);
    }
    if (a.name.empty()) return false;
  }
  return false;
}

}  // namespace

OnnxPlan OnnxPlanner::plan() {
  if (plan_.opset < 11 || plan_.opset > 24) {
    fail<Error>("{}: expected ONNX's operators of opset 11 to 24, got {}", plan_.file, plan_.opset);
  }
  plan_.nodes = static_cast<int64_t>(graph_.nodes.size());
  take_tensors();
  check_nodes();
  drop_unread();
  take_ports();
  for (OnnxNode& n : graph_.nodes) step(n);
  take_outputs();
  find_last_reads();
  return std::move(plan_);
}

void OnnxPlanner::refuse(const OnnxNode& node, const std::string& why) const {
  OnnxStep s;
  s.type = node.op;
  s.name = node.name;
  refuse_step(plan_.file, s, why);
}

void OnnxPlanner::take_tensors() {
  for (OnnxInitializer& t : graph_.initializers) {
    const std::string name = t.name;
    const bool made_up = is_made_up(name) || (model_.producer == "Halfstep" && name.starts_with("constant"));
    if (name.empty() || !sources_.emplace(name, OnnxSource{.data = std::move(t), .made_up = made_up}).second) {
      fail<IoError>("{}: two tensors are called '{}'", plan_.file, printable_start(name));
    }
  }
  graph_.initializers.clear();
}

// Names, operators and attributes; constants and copies of tensors are taken out.
void OnnxPlanner::check_nodes() {
  std::unordered_set<std::string> known;
  for (const OnnxPort& p : graph_.inputs) known.insert(p.name);
  std::vector<OnnxNode> kept;
  for (OnnxNode& n : graph_.nodes) {
    for (const std::string& name : n.inputs) {
      if (!name.empty() && !known.contains(name) && !sources_.contains(name)) {
        refuse(n, fmt::format("reads '{}', which nothing before it makes", printable_start(name)));
      }
    }
    for (const std::string& name : n.outputs) {
      if (name.empty()) continue;
      if (sources_.contains(name) || !known.insert(name).second) {
        refuse(n, fmt::format("makes '{}', which is there already", printable_start(name)));
      }
    }
    if (n.outputs.empty()) refuse(n, "has no result");
    if (n.op == "Constant") {
      known.erase(n.outputs[0]);
      take_constant(n);
    } else if (n.op == "Identity" && n.inputs.size() == 1 && sources_.contains(n.inputs[0])) {
      // Exporters write equal tensors once; they are trained apart.
      known.erase(n.outputs[0]);
      OnnxSource copy = sources_.at(n.inputs[0]);
      copy.made_up = copy.made_up || is_made_up(n.outputs[0]);
      copy.data.name = n.outputs[0];
      sources_.emplace(n.outputs[0], std::move(copy));
    } else {
      check(n);
      kept.push_back(std::move(n));
    }
  }
  graph_.nodes = std::move(kept);
}

void OnnxPlanner::take_constant(const OnnxNode& n) {
  if (n.attributes.size() != 1) refuse(n, "expected one attribute");
  const OnnxAttribute& a = n.attributes[0];
  OnnxSource s{.data = {.name = n.outputs[0], .type = kOnnxFloat, .dims = {}, .tensor = {}}, .made_up = true};
  const auto numbers = [&](const auto& values, DType dtype, bool is_list) {
    Tensor t = empty({static_cast<int64_t>(values.size())}, {.dtype = dtype, .device = Device{}});
    using T = typename std::remove_cvref_t<decltype(values)>::value_type;
    std::copy(values.begin(), values.end(), write_data<T>(t));
    s.data.type = dtype == DType::i64 ? kOnnxInt64 : kOnnxFloat;
    if (is_list) s.data.dims = {t.size(0)};
    s.data.tensor = is_list ? t : t.reshape({});
  };
  if (const auto* t = std::get_if<std::shared_ptr<const OnnxInitializer>>(&a.value)) {
    s.data = **t;
    s.data.name = n.outputs[0];
  } else if (const auto* i = std::get_if<int64_t>(&a.value)) {
    numbers(Ints{*i}, DType::i64, false);
  } else if (const auto* f = std::get_if<float>(&a.value)) {
    numbers(std::vector<float>{*f}, DType::f32, false);
  } else if (const auto* is = std::get_if<Ints>(&a.value)) {
    numbers(*is, DType::i64, true);
  } else if (const auto* fs = std::get_if<std::vector<float>>(&a.value)) {
    numbers(*fs, DType::f32, true);
  } else {
    refuse(n, fmt::format("attribute '{}' isn't read", printable_start(a.name)));
  }
  sources_.emplace(n.outputs[0], std::move(s));
}

void OnnxPlanner::check(const OnnxNode& n) const {
  if (n.op == "QuantizeLinear" || n.op == "DequantizeLinear") {
    for (const OnnxAttribute& a : n.attributes) {
      const bool standard = std::holds_alternative<int64_t>(a.value) && std::get<int64_t>(a.value) == 0;
      if (a.name == "axis" && std::holds_alternative<int64_t>(a.value)) continue;
      if (a.name == "saturate" || standard) continue;
      refuse(n, fmt::format("attribute '{}' isn't supported", printable_start(a.name)));
    }
    if (n.inputs.size() < 2 || n.inputs.size() > 3) refuse(n, "expected two or three inputs");
    return;
  }
  const auto it = onnx_operators().find(n.op);
  const bool own = !n.op.empty() && n.op[0] >= 'a' && n.op[0] <= 'z';
  if (it == onnx_operators().end() || own) {
    refuse(n, "is no operator that is read; docs/guide/onnx.md lists those that are");
  }
  for (const OnnxAttribute& a : n.attributes) {
    if (is_known(it->second.attributes, a)) continue;
    refuse(n, fmt::format("attribute '{}' isn't supported", printable_start(a.name)));
  }
  const auto inputs = static_cast<int>(n.inputs.size());
  if (inputs < it->second.least_inputs || inputs > it->second.most_inputs) {
    refuse(n, fmt::format("expected {} to {} inputs, got {}", it->second.least_inputs, it->second.most_inputs, inputs));
  }
  for (int i = 0; i < it->second.least_inputs; ++i) {
    if (n.inputs[static_cast<size_t>(i)].empty()) refuse(n, fmt::format("input {} is left out", i));
  }
}

// Nodes that no output depends on; and who reads what is left.
void OnnxPlanner::drop_unread() {
  std::unordered_set<std::string> wanted;
  for (const OnnxPort& p : graph_.outputs) {
    wanted.insert(p.name);
    ++readers_[p.name];
  }
  std::vector<OnnxNode> kept;
  for (auto n = graph_.nodes.rbegin(); n != graph_.nodes.rend(); ++n) {
    bool any = false;
    for (std::string& name : n->outputs) {
      const bool is_wanted = wanted.contains(name);
      any |= is_wanted;
      if (!is_wanted) name.clear();
    }
    if (!any) continue;
    for (const std::string& name : n->inputs) {
      if (name.empty()) continue;
      wanted.insert(name);
      ++readers_[name];
    }
    kept.push_back(std::move(*n));
  }
  graph_.nodes.assign(std::make_move_iterator(kept.rbegin()), std::make_move_iterator(kept.rend()));
  for (size_t i = 0; i < graph_.nodes.size(); ++i) {
    for (const std::string& name : graph_.nodes[i].inputs) reader_[name] = i;
    for (const std::string& name : graph_.nodes[i].outputs) {
      if (!name.empty()) maker_[name] = i;
    }
  }
  for (const OnnxNode& n : graph_.nodes) {
    if (n.op != "Mul") continue;
    if (const OnnxNode* gate = gate_of(n)) {
      gated_[&n] = gate;
      consumed_.insert(gate);
    }
  }
}

OnnxPortInfo OnnxPlanner::info(const OnnxPort& p) const {
  OnnxPortInfo result{.name = p.name, .dtype = DType::f32, .sizes = {}};
  switch (p.type) {
    case kOnnxInt64:
      result.dtype = DType::i64;
      break;
    case kOnnxInt32:
      result.dtype = DType::i32;
      break;
    case kOnnxUint8:
      result.dtype = DType::u8;
      break;
    case kOnnxInt8:
      result.dtype = DType::i8;
      break;
    case kOnnxBool:
      result.dtype = DType::boolean;
      break;
    default:
      break;
  }
  for (const OnnxDim& d : p.dims) result.sizes.push_back(d.symbol.empty() ? d.fixed : -1);
  return result;
}

void OnnxPlanner::take_ports() {
  for (const OnnxPort& p : graph_.inputs) {
    if (sources_.contains(p.name)) continue;  // as files of IR 3 have them
    plan_.input_ports.push_back(info(p));
    plan_.inputs.push_back(new_value(p.name));
  }
  if (plan_.inputs.empty()) fail<Error>("{}: expected a network with inputs, got none", plan_.file);
  if (graph_.outputs.empty()) fail<Error>("{}: expected a network with outputs, got none", plan_.file);
}

void OnnxPlanner::take_outputs() {
  for (const OnnxPort& p : graph_.outputs) {
    const OnnxNode output{.op = "the output", .name = p.name, .inputs = {}, .outputs = {}, .attributes = {}};
    const auto it = values_.find(p.name);
    if (it == values_.end() && !sources_.contains(p.name)) refuse(output, "nothing makes it");
    if (integers_.contains(p.name)) refuse(output, "integers of QuantizeLinear are an output");
    plan_.output_ports.push_back(info(p));
    plan_.outputs.push_back(value_of(output, p.name, OnnxUse::operand));
  }
}

int OnnxPlanner::new_value(const std::string& name) {
  const int value = plan_.values++;
  if (!name.empty()) values_[name] = value;
  host_.push_back({});
  return value;
}

void OnnxPlanner::step(OnnxNode& n) {
  if (consumed_.contains(&n)) return;
  if (n.op == "QuantizeLinear") return quantize_step(n);
  if (n.op == "DequantizeLinear") return dequantize_step(n);
  if ((n.op == "MatMul" || n.op == "Gemm") && linear_step(n)) return;
  std::vector<int> inputs;
  if (const auto gate = gated_.find(&n); gate != gated_.end()) {
    n.op = gate->second->op == "Sigmoid" ? "silu" : "HardSwish";
    n.inputs = {gate->second->inputs[0]};
  }
  for (size_t i = 0; i < n.inputs.size(); ++i) inputs.push_back(input_of(n, i));
  add_step(n, n.op, std::move(inputs), n);
}

int OnnxPlanner::input_of(const OnnxNode& n, size_t i) {
  const OnnxUse use = use_of(n.op, i);
  const std::string& name = n.inputs[i];
  return weights_.contains(name) ? weight_of(n, name, use, false) : value_of(n, name, use);
}

// x * sigmoid(x), and x * hardsigmoid(x): the gate, which nobody else reads; null: none.
const OnnxNode* OnnxPlanner::gate_of(const OnnxNode& n) {
  for (size_t i = 0; i < 2 && n.inputs.size() == 2; ++i) {
    const auto maker = maker_.find(n.inputs[i]);
    if (maker == maker_.end() || readers_[n.inputs[i]] != 1) continue;
    const OnnxNode& gate = graph_.nodes[maker->second];
    if (gate.op != "Sigmoid" && gate.op != "HardSigmoid") continue;
    if (gate.inputs[0] != n.inputs[1 - i]) continue;
    if (gate.op == "Sigmoid" || is_sixth(gate)) return &gate;
  }
  return nullptr;
}

bool OnnxPlanner::is_sixth(const OnnxNode& n) {
  float alpha = 0.2F, beta = 0.5F;
  for (const OnnxAttribute& a : n.attributes) (a.name == "alpha" ? alpha : beta) = std::get<float>(a.value);
  return alpha == 1.0F / 6 && beta == 0.5F;
}

void OnnxPlanner::add_step(const OnnxNode& n, const std::string& type, std::vector<int> inputs, const OnnxNode& last) {
  OnnxStep s{.op = &onnx_operators().find(type)->second, .type = type, .name = n.name, .inputs = std::move(inputs)};
  s.attributes = n.attributes;
  for (const std::string& name : last.outputs) s.outputs.push_back(name.empty() ? -1 : new_value(name));
  if (fold(s)) return;
  for (const int v : s.inputs) {
    if (const auto it = part_of_.find(v); it != part_of_.end() && s.part < 0) s.part = it->second;
  }
  // A weight on its grid is the part's too.
  for (size_t i = plan_.steps.size(); s.part < 0 && i > 0; --i) {
    const OnnxStep& before = plan_.steps[i - 1];
    if (before.quantizer < 0) break;
    const bool read = std::find(s.inputs.begin(), s.inputs.end(), before.outputs[0]) != s.inputs.end();
    const auto it = part_of_.find(before.inputs[0]);
    if (read && it != part_of_.end()) s.part = it->second;
  }
  plan_.steps.push_back(std::move(s));
}

// Steps that read only what the host knows are taken now.
bool OnnxPlanner::fold(const OnnxStep& s) {
  if (s.type == "Dropout" || s.inputs.empty()) return false;
  try {
    if (!run_on_host(plan_, s, host_)) return false;
  } catch (const IoError&) {
    throw;
  } catch (const Error& e) {
    if (std::string_view(e.what()).starts_with(plan_.file)) throw;
    refuse_step(plan_.file, s, e.what());
  }
  for (const int v : s.outputs) {
    if (v < 0) continue;
    folded_ += host_[static_cast<size_t>(v)].host->size();
    plan_.constants.emplace_back(v, host_[static_cast<size_t>(v)].host);
  }
  if (folded_ > kMostFolded) refuse_step(plan_.file, s, "too much to be computed when the file is read");
  return true;
}

// A product with a matrix of the file, as linear(): its weight is [out, in], so that a file's [in, out] is turned
// where nobody else reads it. A sum with a bias of the file goes with it.
bool OnnxPlanner::linear_step(OnnxNode& n) {
  const std::string weight = n.inputs[1];
  const bool quantized = weights_.contains(weight);
  const auto source = sources_.find(quantized ? weights_.at(weight)->inputs[0] : weight);
  if (source == sources_.end() || source->second.data.dims.size() != 2) return false;
  if (!quantized && !is_floating(source->second.data.tensor.dtype())) return false;
  bool turned = true;
  if (n.op == "Gemm") {
    for (const OnnxAttribute& a : n.attributes) {
      if (a.name == "transB") turned = std::get<int64_t>(a.value) == 0;
      if (a.name == "transA" && std::get<int64_t>(a.value) != 0) return false;
      if ((a.name == "alpha" || a.name == "beta") && std::get<float>(a.value) != 1) return false;
    }
  } else if (sources_.contains(n.inputs[0]) || weights_.contains(n.inputs[0])) {
    return false;
  }
  if (turned && readers_[weight] != 1) return false;
  const int64_t out = source->second.data.dims[turned ? 1 : 0];
  OnnxNode* last = &n;
  std::string bias = n.op == "Gemm" && n.inputs.size() > 2 ? n.inputs[2] : "";
  if (!bias.empty() && !is_row(bias, out)) return false;
  if (n.op == "MatMul" && readers_[n.outputs[0]] == 1 && reader_.contains(n.outputs[0])) {
    OnnxNode& sum = graph_.nodes[reader_.at(n.outputs[0])];
    const size_t other = sum.inputs.size() == 2 && sum.inputs[0] == n.outputs[0] ? 1 : 0;
    if (sum.op == "Add" && is_row(sum.inputs[other], out)) {
      bias = sum.inputs[other];
      last = &sum;
      consumed_.insert(&sum);
    }
  }
  const OnnxNode as{.op = "linear", .name = n.name, .inputs = {}, .outputs = {}, .attributes = {}};
  OnnxSource& s = source->second;
  if (!quantized && turned && s.as_tensor < 0) {
    s.data.tensor = s.data.tensor.t().contiguous();
    std::swap(s.data.dims[0], s.data.dims[1]);
    // Exporters that turn a weight give it a new name; the bias has kept its own.
    if (s.made_up && bias.ends_with("bias") && !is_made_up(bias)) {
      const std::string named = bias.substr(0, bias.size() - 4) + "weight";
      s.as_tensor = hold(parameter_name(named, "weight"), s.data.tensor.to(DType::f32), true);
    }
  }
  const int x = input_of(n, 0);
  const int w = quantized ? weight_of(as, weight, OnnxUse::weight, turned) : value_of(as, weight, OnnxUse::weight);
  std::vector<int> inputs{x, w};
  if (!bias.empty()) {
    inputs.push_back(weights_.contains(bias) ? weight_of(as, bias, OnnxUse::bias, false)
                                             : value_of(as, bias, OnnxUse::bias));
  }
  add_step(as, "linear", std::move(inputs), *last);
  return true;
}

// A tensor of the file with one dimension of that size.
bool OnnxPlanner::is_row(const std::string& name, int64_t size) const {
  const auto made = weights_.find(name);
  const auto it = sources_.find(made == weights_.end() ? name : made->second->inputs[0]);
  return it != sources_.end() && it->second.data.dims == Ints{size} &&
         (made != weights_.end() || is_floating(it->second.data.tensor.dtype()));
}

void OnnxPlanner::find_last_reads() {
  std::vector<int> last(static_cast<size_t>(plan_.values), -1);
  for (size_t i = 0; i < plan_.steps.size(); ++i) {
    for (const int v : plan_.steps[i].inputs) {
      if (v >= 0) last[static_cast<size_t>(v)] = static_cast<int>(i);
    }
  }
  for (const int v : plan_.outputs) last[static_cast<size_t>(v)] = -1;
  for (size_t v = 0; v < last.size(); ++v) {
    if (last[v] >= 0) plan_.steps[static_cast<size_t>(last[v])].drops.push_back(static_cast<int>(v));
  }
}

OnnxPlan plan_onnx(OnnxModelFile&& model, const std::string& file, bool learned_scales) {
  const NoGrad no_grad;
  return OnnxPlanner(std::move(model), file, learned_scales).plan();
}

}  // namespace halfstep::io::detail
