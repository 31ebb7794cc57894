// SPDX-License-Identifier: Apache-2.0
// From a trace to a graph: constants, batch norms that fold, numbers that follow the samples.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "halfstep/amp/policy.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/infer/graph_internal.h"
#include "halfstep/nn/fold_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"

namespace halfstep::infer::detail {
namespace {

using Kind = nn::TracedValue::Kind;

template <std::size_t N>
bool is_listed(std::string_view name, const std::array<std::string_view, N>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool draws_numbers(std::string_view op) {
  static constexpr auto kNames = std::to_array<std::string_view>(
      {"uniform", "normal", "randint", "randperm", "bernoulli", "bernoulli_p", "dropout"});
  return is_listed(op, kNames);
}

// Elementwise ops that leave the dtype of their first input under autocast too, and that can write over it.
bool can_be_in_place(std::string_view op) {
  static constexpr auto kNames =
      std::to_array<std::string_view>({"relu", "leaky_relu", "silu", "sigmoid", "tanh", "hardtanh", "hardswish", "add",
                                       "sub", "mul", "add_scalar", "mul_scalar"});
  return is_listed(op, kNames);
}

// Views are made anew from sizes or places: strides and offsets are those of the tensor that they meet.
bool counts_in_view(std::string_view op, std::string_view field) {
  if (op == "select" || op == "slice") return field == "dim" || field == "start" || field == "end" || field == "step";
  return field == "sizes";
}

// Of images: the backward pass reads it.
bool is_for_gradients(std::string_view op, std::string_view field) {
  static constexpr auto kNames = std::to_array<std::string_view>(
      {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "interpolate", "roi_align"});
  return field == "sizes" && is_listed(op, kNames);
}

template <class T>
T read_at(const std::vector<unsigned char>& bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

// Without the bytes after its last member, which nobody sets.
bool same_scalar(const std::vector<unsigned char>& a, const std::vector<unsigned char>& b, std::size_t offset) {
  constexpr std::size_t kBytes = offsetof(halfstep_scalar, kind) + sizeof(halfstep_scalar::kind);
  return std::memcmp(a.data() + offset, b.data() + offset, kBytes) == 0;
}

bool same_contents(const Tensor& a, const Tensor& b) {
  const Tensor x = a.to(Device{}).contiguous(), y = b.to(Device{}).contiguous();
  return x.sizes() == y.sizes() && x.dtype() == y.dtype() &&
         (x.const_raw_data() == y.const_raw_data() || x.numel() == 0 ||
          std::memcmp(x.const_raw_data(), y.const_raw_data(), static_cast<std::size_t>(x.numel()) * x.item_size()) ==
              0);
}

// Whether all elements are one.
bool is_uniform(const Tensor& t) {
  const Tensor flat = t.to(Device{}).contiguous().view({t.numel()});
  const auto* bytes = static_cast<const char*>(flat.const_raw_data());
  const std::size_t size = flat.item_size(), all = static_cast<std::size_t>(flat.numel()) * size;
  for (std::size_t i = size; i < all; i += size) {
    if (std::memcmp(bytes, bytes + i, size) != 0) return false;
  }
  return true;
}

}  // namespace

bool is_product(std::string_view op) { return op == "conv2d" || op == "linear"; }

void Graph::finish() {
  std::vector<bool> needed(values.size(), false);
  const auto need = [&](int v) {
    if (v >= 0) needed[static_cast<std::size_t>(v)] = true;
  };
  for (const int v : outputs) need(v);
  std::vector<bool> kept(nodes.size(), false);
  for (std::size_t i = nodes.size(); i-- > 0;) {
    const Node& node = nodes[i];
    kept[i] = std::any_of(node.outputs.begin(), node.outputs.end(),
                          [&](int v) { return needed[static_cast<std::size_t>(v)]; });
    if (!kept[i]) continue;
    for (const int v : node.inputs) need(v);
  }
  std::vector<Node> live;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (kept[i]) live.push_back(std::move(nodes[i]));
  }
  nodes = std::move(live);
  for (std::size_t v = 0; v < values.size(); ++v) {
    if (!needed[v]) values[v].constant = {};
  }
  std::vector<bool> read_later(values.size(), false);
  for (const int v : outputs) read_later[static_cast<std::size_t>(v)] = true;
  for (std::size_t i = nodes.size(); i-- > 0;) {
    Node& node = nodes[i];
    node.last.clear();
    for (const auto* list : {&node.inputs, &node.outputs}) {
      for (const int v : *list) {
        if (v < 0 || read_later[static_cast<std::size_t>(v)]) continue;
        read_later[static_cast<std::size_t>(v)] = true;
        node.last.push_back(v);
      }
    }
  }
}

GraphMaker::GraphMaker(const Source& source) : source_(source) {
  const nn::Trace& trace = source.trace;
  readers_.resize(trace.values.size());
  makers_.assign(trace.values.size(), -1);
  is_output_.assign(trace.values.size(), false);
  constant_.assign(trace.values.size(), false);
  values_.assign(trace.values.size(), -1);
  for (const int v : trace.outputs) is_output_[static_cast<std::size_t>(v)] = true;
  const auto follows_samples = [&](std::size_t v) {
    return source.other && trace.values[v].tensor.sizes() != source.other->values[v].tensor.sizes();
  };
  for (std::size_t v = 0; v < trace.values.size(); ++v) {
    const Kind kind = trace.values[v].kind;
    constant_[v] = kind == Kind::parameter || (kind == Kind::constant && !follows_samples(v));
  }
  for (int c = 0; c < calls(); ++c) {
    const nn::TracedCall& at = call(c);
    for (const int v : at.inputs) {
      if (v >= 0) readers_[static_cast<std::size_t>(v)].push_back(c);
    }
    const bool constant = !draws_numbers(at.op) && std::all_of(at.inputs.begin(), at.inputs.end(),
                                                               [&](int v) { return v < 0 || is_constant(v); });
    for (const int v : at.outputs) {
      makers_[static_cast<std::size_t>(v)] = c;
      constant_[static_cast<std::size_t>(v)] = constant && !follows_samples(static_cast<std::size_t>(v));
    }
  }
  for (const int v : trace.inputs) {
    const int made = graph.add({.traced = v});
    graph.inputs.push_back(made);
    set_value(v, made);
  }
}

void GraphMaker::refuse(const nn::TracedCall& call, const std::string& why) const {
  fail<Error>("{}: {}: {}", source_.who, call.place(), why);
}

bool GraphMaker::is_constant_call(int c) const {
  return std::all_of(call(c).outputs.begin(), call(c).outputs.end(), [&](int v) { return is_constant(v); });
}

Tensor GraphMaker::constant(int v, const nn::TracedCall& reader) const {
  const nn::TracedValue& value = traced(v);
  if (value.overwritten) refuse(reader, "reads a parameter or constant that is written over later");
  if (value.kind == Kind::constant && source_.other) {
    if (!same_contents(value.tensor, source_.other->values[static_cast<std::size_t>(v)].tensor)) {
      refuse(reader, "reads a constant that follows the number of samples; set dynamic_batch = false");
    }
  }
  return value.tensor.detach();
}

int GraphMaker::only_reader(int c) const {
  const nn::TracedCall& at = call(c);
  if (at.outputs.empty() || is_output(at.outputs[0])) return -1;
  const std::vector<int>& all = readers(at.outputs[0]);
  return all.size() == 1 ? all[0] : -1;
}

bool GraphMaker::is_constant_norm(int c) const {
  const nn::TracedCall& at = call(c);
  if (at.op != "batch_norm" || at.attributes.size() != sizeof(BatchNormAttributes)) return false;
  if (read_at<BatchNormAttributes>(at.attributes, 0).training || at.inputs.size() < 5) return false;
  if (at.inputs[3] < 0 || at.inputs[4] < 0) return false;
  return std::all_of(at.inputs.begin() + 1, at.inputs.end(), [&](int v) { return v < 0 || is_constant(v); });
}

int GraphMaker::product_of_norm(int c) const {
  if (!is_constant_norm(c)) return -1;
  const auto sizes = [&](int v) -> const Shape& { return traced(v).tensor.sizes(); };
  const int read = call(c).inputs[0];
  int made = maker(read);
  // A sequence's convolution is that of an image one pixel high: its result is a view.
  while (made >= 0 && only_reader(made) >= 0 && !is_product(call(made).op)) {
    const nn::TracedCall& view = call(made);
    if (view.op != "view" && view.op != "squeeze") return -1;
    const Shape &from = sizes(view.inputs[0]), &to = sizes(view.outputs[0]);
    if (from.size() < 3 || to.size() < 3 || from[0] != to[0] || from[1] != to[1]) return -1;
    made = maker(view.inputs[0]);
  }
  if (made < 0 || !is_product(call(made).op) || only_reader(made) < 0) return -1;
  const nn::TracedCall& product = call(made);
  // What a linear layer makes of several rows a sample has its channels last.
  if (product.op == "linear" && sizes(read).size() != 2) return -1;
  const auto known = [&](std::size_t i) {
    return product.inputs.size() <= i || product.inputs[i] < 0 || is_constant(product.inputs[i]);
  };
  return product.inputs.size() >= 2 && product.inputs[1] >= 0 && known(1) && known(2) ? made : -1;
}

std::vector<Patch> GraphMaker::patches_of(int c) const {
  if (!source_.other) return {};
  const nn::TracedCall &a = call(c), &b = source_.other->calls[static_cast<std::size_t>(c)];
  const Op* op = find_op(a.op);
  if (a.attributes == b.attributes || !op || !op->attributes) return {};
  const auto n = static_cast<double>(source_.samples()), m = static_cast<double>(source_.other_samples());
  std::vector<Patch> patches;
  const auto number = [&](const AttributeField& field, std::size_t offset, bool floating) {
    const double x = floating ? read_at<double>(a.attributes, offset)
                              : static_cast<double>(read_at<std::int64_t>(a.attributes, offset));
    const double y = floating ? read_at<double>(b.attributes, offset)
                              : static_cast<double>(read_at<std::int64_t>(b.attributes, offset));
    if (x == y) return;
    const double times = x / n;
    if (times * m != y || (!floating && times != static_cast<double>(static_cast<std::int64_t>(times)))) {
      refuse(a, fmt::format("{} is {} for {} samples and {} for {}, no multiple; set dynamic_batch = false", field.name,
                            x, n, y, m));
    }
    patches.push_back({.offset = offset, .times = times, .floating = floating});
  };
  for (const AttributeField& field : op->attributes->fields) {
    if (op->view ? !counts_in_view(a.op, field.name) : is_for_gradients(a.op, field.name)) continue;
    if (std::memcmp(a.attributes.data() + field.offset, b.attributes.data() + field.offset, field.size) == 0) continue;
    const std::size_t each = field.size / field.count;
    for (std::size_t i = 0; i < field.count; ++i) {
      const std::size_t offset = field.offset + i * each;
      if (field.kind == AttributeField::Kind::list) {
        const auto x = read_at<IntList>(a.attributes, offset), y = read_at<IntList>(b.attributes, offset);
        if (x.size != y.size) refuse(a, fmt::format("the length of {} follows the number of samples", field.name));
        for (int k = 0; k < x.size; ++k) {
          number(field, offset + offsetof(IntList, values) + static_cast<std::size_t>(k) * sizeof(std::int64_t), false);
        }
      } else if (field.kind == AttributeField::Kind::i64 || field.kind == AttributeField::Kind::f64) {
        number(field, offset, field.kind == AttributeField::Kind::f64);
      } else if (field.kind != AttributeField::Kind::scalar || !same_scalar(a.attributes, b.attributes, offset)) {
        refuse(a, fmt::format("{} follows the number of samples; set dynamic_batch = false", field.name));
      }
    }
  }
  return patches;
}

int GraphMaker::add_constant(Tensor tensor) { return graph.add({.constant = std::move(tensor)}); }

int GraphMaker::value(int v, const nn::TracedCall& reader) {
  if (v < 0) return -1;
  int& known = values_[static_cast<std::size_t>(v)];
  if (known >= 0) return known;
  const nn::TracedValue& value = traced(v);
  if (is_constant(v)) {
    known = add_constant(constant(v, reader).clone());
    graph.values[static_cast<std::size_t>(known)].traced = v;
    return known;
  }
  if (value.kind != Kind::constant) refuse(reader, "reads a tensor that nothing made");
  // Its sizes follow the samples: it has to be one element, repeated.
  const Tensor other = source_.other->values[static_cast<std::size_t>(v)].tensor;
  if (value.overwritten || value.tensor.dim() != other.dim() || !is_uniform(value.tensor) || !is_uniform(other) ||
      value.tensor.numel() == 0 ||
      !same_contents(value.tensor.reshape({-1}).slice(0, 0, 1), other.reshape({-1}).slice(0, 0, 1))) {
    refuse(reader, "reads a constant that follows the number of samples; set dynamic_batch = false");
  }
  Value repeated;
  repeated.traced = v;
  Shape sizes = value.tensor.sizes();
  for (int d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == other.sizes()[d]) continue;
    const std::int64_t times = sizes[d] / source_.samples();
    if (times * source_.samples() != sizes[d] || times * source_.other_samples() != other.sizes()[d]) {
      refuse(reader, "reads a constant whose sizes are no multiple of the samples; set dynamic_batch = false");
    }
    repeated.batch.push_back(d);
    repeated.times.push_back(static_cast<double>(times));
    sizes[d] = 1;
  }
  const Tensor one = value.tensor.contiguous().view({value.tensor.numel()}).slice(0, 0, 1).clone();
  repeated.constant = one.view(Shape::filled(sizes.size(), 1)).expand(sizes).clone(MemoryFormat::contiguous);
  return known = graph.add(std::move(repeated));
}

int GraphMaker::add_weight(const Tensor& weight) {
  const Tensor own = weight.detach();
  // Channels-last is the fast layout of images: what convolutions make is in that of their weights.
  return add_constant(own.dim() == 4 ? own.clone(MemoryFormat::channels_last) : own.clone());
}

void GraphMaker::add_call(int c) {
  const nn::TracedCall& at = call(c);
  if (draws_numbers(at.op)) refuse(at, "draws random numbers; a session gives the same for the same inputs");
  std::vector<int> inputs;
  for (const int v : at.inputs) inputs.push_back(value(v, at));
  add_call(c, std::move(inputs));
}

void GraphMaker::add_call(int c, std::vector<int> inputs) {
  const nn::TracedCall& at = call(c);
  const Op* op = find_op(at.op);
  if (!op || op->composite || op->attributes_size != at.attributes.size() || at.op == "as_strided") {
    refuse(at, "has no form in a session");
  }
  Node node{.name = at.op,
            .module = at.module,
            .op = op,
            .inputs = std::move(inputs),
            .attributes = at.attributes,
            .patches = patches_of(c)};
  node.in_place = can_be_in_place(at.op);
  for (const int v : at.outputs) {
    const int made = graph.add({.traced = v});
    set_value(v, made);
    node.outputs.push_back(made);
  }
  graph.nodes.push_back(std::move(node));
}

int GraphMaker::add_function(std::string name, std::string module, Node::Function function, std::vector<int> inputs,
                             int traced, int results) {
  Node node{.name = std::move(name),
            .module = std::move(module),
            .function = std::move(function),
            .inputs = std::move(inputs)};
  for (int i = 0; i < results; ++i) node.outputs.push_back(graph.add({.traced = i == 0 ? traced : -1}));
  const int first = node.outputs[0];
  graph.nodes.push_back(std::move(node));
  return first;
}

Graph GraphMaker::finish() {
  const nn::TracedCall output{.op = "the output"};
  for (const int v : source_.trace.outputs) graph.outputs.push_back(value(v, output));
  graph.finish();
  return std::move(graph);
}

Tensor PictureTensors::operator()(const Tensor& pictures) const {
  return ((pictures.to(f32) / 255 - mean) / std).to(dtype);
}

PictureTensors picture_tensors(const GraphMaker& maker, const PictureNumbers& numbers, std::string_view who) {
  const int traced = maker.graph.values[static_cast<std::size_t>(maker.graph.inputs[0])].traced;
  const Tensor& example = maker.traced(traced).tensor;
  if (maker.graph.inputs.size() != 1 || example.dim() != 4 || !example.is_floating()) {
    fail<Error>("{}: pictures: expected a network of one floating input [N, C, H, W], got one of {} inputs, {} {}", who,
                maker.graph.inputs.size(), name(example.dtype()), example.sizes().str());
  }
  const std::int64_t channels = example.sizes()[1];
  const auto by_channel = [&](const std::vector<float>& given, const char* what) {
    if (given.size() != 1 && static_cast<std::int64_t>(given.size()) != channels) {
      fail<Error>("{}: pictures: expected 1 or {} numbers of {}, got {}", who, channels, what, given.size());
    }
    const std::vector<double> all(given.begin(), given.end());
    return tensor(all, {1, static_cast<std::int64_t>(given.size()), 1, 1}).to(example.device());
  };
  return {by_channel(numbers.mean, "mean"), by_channel(numbers.std, "std"), example.dtype()};
}

void add_pictures(GraphMaker& maker, const PictureNumbers& numbers, std::string_view who) {
  const int input = maker.graph.inputs[0], traced = maker.graph.values[static_cast<std::size_t>(input)].traced;
  const PictureTensors pictures = picture_tensors(maker, numbers, who);
  maker.set_value(traced, maker.add_function(
                              "pictures", "",
                              [pictures](std::span<const Tensor> in) { return std::vector<Tensor>{pictures(in[0])}; },
                              {input}, traced));
}

void lower_constants(Graph& graph, DType dtype) {
  std::map<int, int> lowered;
  for (Node& node : graph.nodes) {
    if (!node.op || amp::policy_of(*node.op) != amp::Policy::lower_precision) continue;
    for (std::size_t i = 0; i < node.inputs.size(); ++i) {
      int& v = node.inputs[i];
      const bool state = i < 16 && (node.op->state_inputs >> i & 1) != 0;  // as autocast leaves it
      if (v < 0 || state) continue;
      const Value& value = graph.values[static_cast<std::size_t>(v)];
      if (!value.constant.defined() || value.constant.dtype() != DType::f32) continue;
      const auto [at, fresh] = lowered.try_emplace(v, 0);
      if (fresh) {
        Value low = value;
        low.constant = value.constant.to(dtype);
        at->second = graph.add(std::move(low));
      }
      v = at->second;
    }
  }
  graph.finish();
}

std::uint64_t constant_bytes(const Graph& graph) {
  std::set<const Storage*> seen;
  std::uint64_t sum = 0;
  const auto count = [&](const Tensor& t) {
    if (t.defined() && seen.insert(t.storage().get()).second) sum += static_cast<std::uint64_t>(t.storage()->bytes());
  };
  for (const Value& value : graph.values) count(value.constant);
  for (const Node& node : graph.nodes) {
    for (const Tensor& t : node.held) count(t);
  }
  return sum;
}

namespace {

// All of 16 bits as float32, for a session that computes in that.
void widen_constants(Graph& graph) {
  for (Value& value : graph.values) {
    if (value.constant.defined() && is_low_precision(value.constant.dtype())) value.constant = value.constant.to(f32);
  }
}

}  // namespace

Graph float_graph(const Source& source, std::optional<DType> dtype, const std::optional<PictureNumbers>& pictures) {
  const NoGrad no_grad;
  GraphMaker maker(source);
  if (pictures) add_pictures(maker, *pictures, source.who);
  // Norms by the product that they are folded into.
  std::unordered_map<int, int> norm_of, product_of;
  for (int c = 0; c < maker.calls(); ++c) {
    const int product = maker.product_of_norm(c);
    if (product < 0) continue;
    norm_of[product] = c;
    product_of[c] = product;
  }
  for (int c = 0; c < maker.calls(); ++c) {
    const nn::TracedCall& call = maker.call(c);
    if (maker.is_constant_call(c)) continue;
    if (product_of.contains(c)) {
      maker.set_value(call.outputs[0], maker.value(call.inputs[0], call));
      continue;
    }
    if (!is_product(call.op) || call.inputs.size() < 2 || !maker.is_constant(call.inputs[1])) {
      maker.add_call(c);
      continue;
    }
    const auto optional = [&](const nn::TracedCall& at, std::size_t i) {
      return i < at.inputs.size() && at.inputs[i] >= 0 ? maker.constant(at.inputs[i], at) : Tensor();
    };
    std::vector<int> inputs{maker.value(call.inputs[0], call)};
    if (const auto norm = norm_of.find(c); norm != norm_of.end()) {
      const nn::TracedCall& at = maker.call(norm->second);
      const nn::detail::FoldedWeights folded =
          nn::detail::folded_weights(optional(call, 1), optional(call, 2),
                                     {.weight = optional(at, 1),
                                      .bias = optional(at, 2),
                                      .running_mean = optional(at, 3),
                                      .running_var = optional(at, 4),
                                      .eps = read_at<BatchNormAttributes>(at.attributes, 0).eps});
      inputs.push_back(maker.add_weight(folded.weight));
      inputs.push_back(maker.add_constant(folded.bias));
    } else {
      inputs.push_back(maker.add_weight(maker.constant(call.inputs[1], call)));
      inputs.push_back(call.inputs.size() > 2 ? maker.value(call.inputs[2], call) : -1);
    }
    maker.add_call(c, std::move(inputs));
  }
  Graph graph = maker.finish();
  if (dtype == DType::f32) widen_constants(graph);
  if (dtype && is_low_precision(*dtype)) lower_constants(graph, *dtype);
  return graph;
}

}  // namespace halfstep::infer::detail
