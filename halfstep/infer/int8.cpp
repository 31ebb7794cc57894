// SPDX-License-Identifier: Apache-2.0
// From a prepared network to integers: products with what follows them, and all that lies between grids. A value of the
// trace is, in the graph, integers on its grid, floating numbers, or both; whoever reads it gets what it takes.
#include <algorithm>
#include <cstring>
#include <set>
#include <unordered_map>

#include "halfstep/amp/policy.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/infer/int8_product_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/quantize.h"
#include "halfstep/ops/view.h"

namespace halfstep::infer::detail {
namespace {

constexpr std::int64_t kMostProducts = 65793;  // of a sum of ops/int8.h

template <class A>
A attributes_of(const nn::TracedCall& call) {
  A a{};
  if (call.attributes.size() == sizeof(A)) std::memcpy(&a, call.attributes.data(), sizeof(A));
  return a;
}

// A product and what is computed in one go with it, up to the call whose result is rounded.
struct Group {
  int product = -1;
  int norm = -1;      // -1: none
  int residual = -1;  // value
  int last = -1;      // call
  FusedActivation activation = {};
  Int8Grid input = {};
};

class Converter {
 public:
  Converter(const QuantizedSource& quantized, const std::optional<PictureNumbers>& pictures, std::optional<DType> dtype)
      : sites_(quantized.sites),
        source_(quantized.source),
        maker_(quantized.source),
        low_(dtype && is_low_precision(*dtype) ? dtype : std::nullopt) {
    integers_.resize(source_.trace.values.size());
    grids_.resize(source_.trace.values.size());
    if (pictures) pictures_ = picture_tensors(maker_, *pictures, source_.who);
    input_ = maker_.graph.inputs[0];
    // Its values are those of the bytes.
    if (pictures_) maker_.set_value(source_.trace.inputs[0], -1);
  }

  Graph convert() {
    const NoGrad no_grad;
    find_grids();
    find_groups();
    for (int c = 0; c < maker_.calls(); ++c) {
      if (!maker_.is_constant_call(c) && !inside_.contains(c)) add(c);
    }
    for (const int v : source_.trace.outputs) {
      if (!maker_.is_constant(v)) maker_.set_value(v, real(v, {.op = "the output"}));
    }
    Graph graph = maker_.finish();
    if (low_) lower_constants(graph, *low_);
    return graph;
  }

 private:
  const nn::TracedCall& call(int c) const { return maker_.call(c); }
  const Tensor& tensor(int v) const { return maker_.traced(v).tensor; }
  const std::optional<Int8Grid>& grid(int v) const { return grids_[static_cast<std::size_t>(v)]; }
  // The grid of what call `c` reads as its input `i`.
  std::optional<Int8Grid> read_grid(int c, std::size_t i) const {
    const int v = call(c).inputs[i];
    if (const Site* site = sites_.find(c, static_cast<int>(i)); site && !site->axis) return site->grid;
    return v < 0 ? std::nullopt : grid(v);
  }
  std::optional<Int8Grid> result_grid(int c) const {
    const Site* site = sites_.find(c, -1);
    return site ? site->grid : std::nullopt;
  }
  bool is_site(int c) const { return sites_.find(c, -1) != nullptr; }

  // --- what lies on which grid

  void find_grids() {
    for (int c = 0; c < maker_.calls(); ++c) {
      const nn::TracedCall& at = call(c);
      if (at.outputs.empty()) continue;
      std::optional<Int8Grid>& own = grids_[static_cast<std::size_t>(at.outputs[0])];
      if (is_site(c)) {
        own = result_grid(c);
      } else if (quant::keeps_grid(at) && !at.inputs.empty() && at.inputs[0] >= 0) {
        own = grid(at.inputs[0]);
        if (own && at.op == "pad" && !padding_lies_on(*own, attributes_of<PadAttributes>(at))) own.reset();
      }
    }
  }
  // --- groups

  bool is_int8_product(int c) const { return has_int8_weight(c) && read_grid(c, 0); }
  bool has_int8_weight(int c) const {
    const nn::TracedCall& at = call(c);
    if (!is_product(at.op) || at.inputs.size() < 2) return false;
    const Site* weight = sites_.find(c, 1);
    if (!weight || weight->bound.defined() || weight->quant_min < -128 || weight->quant_max > 127) return false;
    if (!maker_.is_constant(at.inputs[1])) return false;
    if (at.inputs.size() > 2 && at.inputs[2] >= 0 && !maker_.is_constant(at.inputs[2])) return false;
    const Tensor &x = tensor(at.inputs[0]), &w = tensor(at.inputs[1]);
    if (x.dtype() == f64 || w.numel() == 0 || w.numel() / w.size(0) > kMostProducts) return false;
    if (at.op == "conv2d" && attributes_of<ConvAttributes>(at).sizes.size > 0) return false;
    const std::vector<double> zeros = weight->zero_point.to_vector<double>();
    return std::all_of(zeros.begin(), zeros.end(), [](double z) { return z == 0; });
  }

  // The other operand of a sum that goes on with the result of `c`, where it is integers; -1: it isn't.
  int residual_of(int sum, int c) const {
    const nn::TracedCall& at = call(sum);
    if (at.op != "add" || attributes_of<AlphaAttributes>(at).alpha != 1) return -1;
    const int own = call(c).outputs[0], other = at.inputs[0] == own ? at.inputs[1] : at.inputs[0];
    if (other == own || other < 0 || !grid(other) || tensor(other).sizes() != tensor(own).sizes()) return -1;
    return other;
  }

  void find_groups() {
    for (int c = 0; c < maker_.calls(); ++c) {
      const int folded = maker_.product_of_norm(c);
      if (folded >= 0 && !is_site(folded)) norms_[folded] = c;
    }
    for (int c = 0; c < maker_.calls(); ++c) {
      if (!is_int8_product(c)) continue;
      Group group{.product = c, .last = c, .input = *read_grid(c, 0)};
      if (const auto norm = norms_.find(c); norm != norms_.end()) group.norm = norm->second;
      const auto next = [&] { return is_site(group.last) ? -1 : maker_.only_reader(group.last); };
      const auto take = [&](int reader) {
        inside_.insert(group.last);
        group.last = reader;
      };
      if (group.norm >= 0 && next() == group.norm) take(group.norm);
      // A norm behind a view of the product comes later, as that view.
      const bool ends = group.norm >= 0 && group.last != group.norm;
      if (const int sum = ends ? -1 : next(); sum >= 0 && !inside_.contains(sum)) {
        group.residual = residual_of(sum, group.last);
        if (group.residual >= 0) take(sum);
      }
      if (const int reader = ends ? -1 : next(); reader >= 0) {
        if (const auto fused = fused_activation(call(reader)); fused && call(reader).inputs.size() == 1) {
          group.activation = *fused;
          take(reader);
        }
      }
      groups_.emplace(group.last, group);
    }
    for (const auto& [product, norm] : norms_) {
      if (!inside_.contains(product) && !groups_.contains(norm)) aliases_[norm] = product;
    }
  }

  // --- values

  struct Integers {
    Int8Grid grid;
    int value;
  };
  std::vector<Integers>& integers(int v) { return integers_[static_cast<std::size_t>(v)]; }

  void set_integers(int v, const Int8Grid& grid, int value) {
    maker_.graph.values[static_cast<std::size_t>(value)].grid = grid;
    integers(v).push_back({grid, value});
  }

  // The value in floating point.
  int real(int v, const nn::TracedCall& reader) {
    if (v < 0 || maker_.is_constant(v) || maker_.known_value(v) >= 0) return maker_.value(v, reader);
    int made = -1;
    if (v == source_.trace.inputs[0] && pictures_) {
      const PictureTensors pictures = *pictures_;
      made = maker_.add_function(
          "pictures", "", [pictures](std::span<const Tensor> in) { return std::vector<Tensor>{pictures(in[0])}; },
          {input_}, v);
    } else if (!integers(v).empty()) {
      const auto [from, value] = integers(v)[0];
      const auto [scale, zero] = numbers(from);
      const DequantizeOptions options{.dtype = dtype_of(v)};
      made = maker_.add_function(
          "dequantize", reader.module,
          [scale, zero, options](std::span<const Tensor> in) {
            return std::vector<Tensor>{dequantize(in[0], scale, zero, options)};
          },
          {value}, v);
    } else {
      return maker_.value(v, reader);  // which says that nobody made it
    }
    maker_.set_value(v, made);
    return made;
  }

  struct Numbers {
    Tensor scale, zero_point;
  };
  Numbers numbers(const Int8Grid& grid) const {
    return {full({1}, grid.scale).to(device()), full({1}, grid.zero_point, {.dtype = i32}).to(device())};
  }
  Device device() const { return tensor(source_.trace.inputs[0]).device(); }
  void hold(std::vector<Tensor> constants) { maker_.graph.nodes.back().held = std::move(constants); }
  // Of integers as floating numbers: 16 bits, as a product in 16 bits gives them, but for results of the network and
  // for calls that autocast has compute in float32.
  DType dtype_of(int v) const {
    const std::vector<int>& readers = maker_.readers(v);
    const bool rounded = low_ && !maker_.is_output(v) && std::all_of(readers.begin(), readers.end(), [&](int c) {
                           const Op* op = find_op(call(c).op);
                           return op && amp::policy_of(*op) != amp::Policy::float32;
                         });
    return rounded ? *low_ : f32;
  }

  // The value as integers on that grid.
  int on_grid(int v, const Int8Grid& grid, const nn::TracedCall& reader) {
    for (const Integers& i : integers(v)) {
      if (same_grid(i.grid, grid)) return i.value;
    }
    int made = -1;
    if (v == source_.trace.inputs[0] && pictures_) {
      made = add_picture_tables(grid, v);
    } else if (!integers(v).empty()) {
      const auto [from, value] = integers(v)[0];
      made = add_table(reader, table_of(from, grid, device()), value, v);
    } else {
      made = add_quantize(real(v, reader), grid, reader.module, v);
    }
    set_integers(v, grid, made);
    return made;
  }

  int add_quantize(int from, const Int8Grid& grid, const std::string& module, int v) {
    const auto [scale, zero] = numbers(grid);
    const bool image = tensor(v).dim() == 4;
    return maker_.add_function(
        "quantize", module,
        [scale, zero, grid, image](std::span<const Tensor> in) {
          const Tensor q = quantize(in[0], scale, zero,
                                    {.dtype = grid.dtype, .quant_min = grid.quant_min, .quant_max = grid.quant_max});
          return std::vector<Tensor>{image ? q.contiguous(MemoryFormat::channels_last) : q};
        },
        {from}, v);
  }

  int add_table(const nn::TracedCall& at, const Tensor& table, int from, int v) {
    const int made = maker_.add_function(
        "lookup_int8", at.module,
        [table](std::span<const Tensor> in) { return std::vector<Tensor>{lookup_int8(in[0], table)}; }, {from}, v);
    hold({table});
    name_layer(at.module.empty() ? at.op : at.module);
    return made;
  }
  void name_layer(const std::string& name) { maker_.graph.nodes.back().layer = name; }

  int add_picture_tables(const Int8Grid& grid, int v) {
    const std::vector<Tensor> tables = picture_tables(*pictures_, tensor(v).sizes()[1], grid, device());
    const int made = maker_.add_function(
        "pictures_int8", "",
        [tables](std::span<const Tensor> in) { return std::vector<Tensor>{look_up_pictures(in[0], tables)}; }, {input_},
        v);
    hold(tables);
    return made;
  }

  // What call `c` reads as its input `i`, in floating point.
  int read_real(int c, std::size_t i) {
    const nn::TracedCall& at = call(c);
    const int v = at.inputs[i];
    const Site* site = sites_.find(c, static_cast<int>(i));
    if (v < 0 || !site) return real(v, at);
    if (maker_.is_constant(v)) return maker_.add_weight(site->fake(maker_.constant(v, at)));
    return add_fake(*site, real(v, at), at.module, v);
  }

  int add_fake(const Site& site, int from, const std::string& module, int v) {
    return maker_.add_function(
        "fake_quantize", module, [site](std::span<const Tensor> in) { return std::vector<Tensor>{site.fake(in[0])}; },
        {from}, v);
  }

  // The result of call `c` is in floating point, and goes to its grid.
  void finish_real(int c) {
    const nn::TracedCall& at = call(c);
    const Site* site = sites_.find(c, -1);
    if (!site || at.outputs.empty()) return;
    const int v = at.outputs[0], made = maker_.known_value(v);
    maker_.set_value(v, -1);
    if (!site->grid || site->bound.defined()) {
      maker_.set_value(v, add_fake(*site, made, at.module, v));
      if (!site->grid) return name_layer(site->name);
      set_integers(v, *site->grid, add_quantize(maker_.known_value(v), *site->grid, at.module, v));
    } else {
      set_integers(v, *site->grid, add_quantize(made, *site->grid, at.module, v));
    }
    name_layer(site->name);
  }

  // --- calls

  void add(int c) {
    if (const auto group = groups_.find(c); group != groups_.end()) return add_group(group->second);
    if (const auto alias = aliases_.find(c); alias != aliases_.end()) {
      const int v = call(c).outputs[0], made = real(call(c).inputs[0], call(c));
      maker_.graph.values[static_cast<std::size_t>(made)].traced = v;
      maker_.set_value(v, made);
      return finish_real(c);
    }
    if (is_grid_call(call(c))) return add_to_grid(c);
    if (add_integer_sum(c) || add_integer_cat(c) || add_integer_mean(c) || add_moved(c) || add_elementwise(c)) return;
    add_real(c);
  }

  // A tensor that several read, or a moved one, goes to a grid.
  void add_to_grid(int c) {
    const nn::TracedCall& at = call(c);
    const Site& site = *sites_.find(c, -1);
    const int from = at.inputs[0], to = at.outputs[0];
    if (site.grid) {
      set_integers(to, *site.grid, on_grid(from, *site.grid, at));
    } else {
      maker_.set_value(to, add_fake(site, real(from, at), at.module, to));
    }
  }

  // The norm that is folded into a product, as factors; without one they are 1.
  nn::detail::NormFactors factors_of(int product, int norm) const {
    const nn::TracedCall& at = call(product);
    const auto optional = [&](const nn::TracedCall& from, std::size_t i) {
      return i < from.inputs.size() && from.inputs[i] >= 0 ? maker_.constant(from.inputs[i], from) : Tensor();
    };
    const Tensor bias = optional(at, 2);
    if (norm < 0) {
      const std::int64_t channels = tensor(at.inputs[1]).size(0);
      return {ones({channels}, {.dtype = f64}), bias.defined() ? bias.to(f64) : zeros({channels}, {.dtype = f64})};
    }
    return nn::detail::norm_factors(norm_of(norm), bias);
  }
  nn::detail::ConstantNorm norm_of(int norm) const {
    const nn::TracedCall& n = call(norm);
    const auto optional = [&](std::size_t i) { return n.inputs[i] >= 0 ? maker_.constant(n.inputs[i], n) : Tensor(); };
    return {.weight = optional(1),
            .bias = optional(2),
            .running_mean = optional(3),
            .running_var = optional(4),
            .eps = attributes_of<BatchNormAttributes>(n).eps};
  }

  void add_group(const Group& group) {
    const nn::TracedCall &product = call(group.product), &last = call(group.last);
    const Site& weight = *sites_.find(group.product, 1);
    const Int8Weights w = int8_weights(weight.weight(maker_.constant(product.inputs[1], product)), weight.scale,
                                       factors_of(group.product, group.norm));
    Conv2dInt8Options options;
    options.input = group.input;
    options.activation = group.activation.activation;
    options.a = group.activation.a;
    options.b = group.activation.b;
    std::vector<int> inputs{on_grid(product.inputs[0], group.input, product)};
    if (group.residual >= 0) {
      options.residual = *grid(group.residual);
      inputs.push_back(on_grid(group.residual, options.residual, last));
    }
    const Site* site = sites_.find(group.last, -1);
    if (site && !site->bound.defined()) options.output = site->grid;
    const int v = last.outputs[0];
    if (!site) options.dtype = dtype_of(v);
    const int made =
        maker_.add_function(product.op + "_int8", product.module, int8_product(product, w, options), inputs, v);
    hold({w.weight, w.scale, w.bias});
    name_layer(site ? site->name : product.module.empty() ? product.op : product.module);
    if (options.output) {
      set_integers(v, *options.output, made);
    } else {
      maker_.set_value(v, made);
      finish_real(group.last);
    }
  }

  // A sum of integers, with relu.
  bool add_integer_sum(int c) {
    const nn::TracedCall& at = call(c);
    if (at.op != "add" || at.inputs.size() != 2 || attributes_of<AlphaAttributes>(at).alpha != 1) return false;
    if (at.inputs[0] < 0 || at.inputs[1] < 0 || maker_.is_constant(at.inputs[0]) || maker_.is_constant(at.inputs[1]))
      return false;
    const auto a = read_grid(c, 0), b = read_grid(c, 1);
    if (!a || !b || tensor(at.inputs[0]).sizes() != tensor(at.inputs[1]).sizes()) return false;
    int last = c;
    if (const int reader = is_site(c) ? -1 : maker_.only_reader(c); reader >= 0 && call(reader).op == "relu") {
      last = reader;
    }
    const auto out = result_grid(last);
    if (!out || sites_.find(last, -1)->bound.defined()) return false;
    const bool relu = last != c;
    const int v = call(last).outputs[0];
    const int made = maker_.add_function(
        "add_int8", at.module,
        [a = *a, b = *b, out, relu](std::span<const Tensor> in) {
          return std::vector<Tensor>{add_int8(in[0], in[1], a, b, out, relu)};
        },
        {on_grid(at.inputs[0], *a, at), on_grid(at.inputs[1], *b, at)}, v);
    name_layer(sites_.find(last, -1)->name);
    set_integers(v, *out, made);
    if (relu) inside_.insert(last);
    return true;
  }

  bool add_integer_cat(int c) {
    const nn::TracedCall& at = call(c);
    const auto out = result_grid(c);
    if (at.op != "cat" || !out || sites_.find(c, -1)->bound.defined()) return false;
    std::vector<int> inputs;
    for (std::size_t i = 0; i < at.inputs.size(); ++i) {
      if (at.inputs[i] < 0 || maker_.is_constant(at.inputs[i]) || sites_.find(c, static_cast<int>(i))) return false;
    }
    for (const int v : at.inputs) inputs.push_back(on_grid(v, *out, at));
    add_integers(c, std::move(inputs), *out);
    name_layer(sites_.find(c, -1)->name);
    return true;
  }

  // The call as it is, on integers.
  void add_integers(int c, std::vector<int> inputs, const Int8Grid& out) {
    maker_.add_call(c, std::move(inputs));
    const int v = call(c).outputs[0], made = maker_.known_value(v);
    maker_.set_value(v, -1);
    set_integers(v, out, made);
    maker_.graph.nodes.back().in_place = false;
  }

  // A mean over dimensions, global average pooling among them.
  bool add_integer_mean(int c) {
    const nn::TracedCall& at = call(c);
    if (at.inputs.size() != 1 || at.inputs[0] < 0) return false;
    const auto from = read_grid(c, 0);
    Shape dims;
    bool keepdim = true;
    if (at.op == "mean") {
      const auto a = attributes_of<ReduceAttributes>(at);
      dims = shape_of(a.dims);
      keepdim = a.keepdim != 0;
      if (dims.empty() || a.dtype >= 0) return false;
    } else if (at.op == "adaptive_avg_pool2d" && pools_all(attributes_of<AdaptivePoolAttributes>(at))) {
      dims = {tensor(at.inputs[0]).dim() - 2, tensor(at.inputs[0]).dim() - 1};
    } else {
      return false;
    }
    const Site* site = sites_.find(c, -1);
    if (!from || (site && (site->bound.defined() || !site->grid))) return false;
    const std::optional<Int8Grid> out = site ? site->grid : std::nullopt;
    const int v = at.outputs[0];
    const int made = maker_.add_function(
        "mean_int8", at.module,
        [from = *from, dims, keepdim, out](std::span<const Tensor> in) {
          return std::vector<Tensor>{mean_int8(in[0], dims, keepdim, from, out)};
        },
        {on_grid(at.inputs[0], *from, at)}, v);
    name_layer(site ? site->name : at.module.empty() ? at.op : at.module);
    if (out) {
      set_integers(v, *out, made);
    } else {
      maker_.set_value(v, made);
    }
    return true;
  }

  // Views, max pooling and the like, which move integers.
  bool add_moved(int c) {
    const nn::TracedCall& at = call(c);
    if (!quant::keeps_grid(at) || is_site(c) || at.inputs.empty() || at.inputs[0] < 0 || !grid(at.outputs[0]) ||
        integers(at.inputs[0]).empty()) {
      return false;
    }
    const Op* op = find_op(at.op);
    const bool moves = (op && op->view) || at.op == "max_pool2d" || at.op == "pad" || at.op == "interpolate" ||
                       at.op == "flip" || at.op == "index_select";
    // Of max pooling the second result is for gradients.
    const bool one = std::all_of(at.outputs.begin() + 1, at.outputs.end(),
                                 [&](int v) { return maker_.readers(v).empty() && !maker_.is_output(v); });
    if (!moves || !one) return false;  // in floating point, and back: the values are on the grid still
    const Int8Grid own = *grid(at.outputs[0]);
    std::vector<int> inputs{on_grid(at.inputs[0], own, at)};
    for (std::size_t i = 1; i < at.inputs.size(); ++i) inputs.push_back(real(at.inputs[i], at));
    add_integers(c, std::move(inputs), own);
    if (at.op != "pad") return true;
    auto a = attributes_of<PadAttributes>(at);
    const auto value = to_grid(full({1}, pad_value(a)), own).item<std::int64_t>();
    a.value = {.floating = static_cast<double>(value), .integer = value, .kind = 1};
    std::memcpy(maker_.graph.nodes.back().attributes.data(), &a, sizeof(a));
    return true;
  }

  // A function of each element between two grids.
  bool add_elementwise(int c) {
    const nn::TracedCall& at = call(c);
    const auto out = result_grid(c);
    if (!is_elementwise(at) || !out || at.inputs[0] < 0 || maker_.is_constant(at.inputs[0])) return false;
    const auto from = read_grid(c, 0);
    if (!from) return false;
    const Site& site = *sites_.find(c, -1);
    const Op* op = find_op(at.op);
    const auto function = [&](const Tensor& values) {
      const Tensor* input = &values;
      Tensor result;
      call_op(*op, {&input, 1}, at.attributes.empty() ? nullptr : at.attributes.data(), {&result, 1});
      return site.fake(result);
    };
    const int made =
        add_table(at, table_of(*from, *out, device(), function), on_grid(at.inputs[0], *from, at), at.outputs[0]);
    name_layer(site.name);
    set_integers(at.outputs[0], *out, made);
    return true;
  }

  // The grid of more than 8 bits that call `c` reads its first input on; null: none.
  const Site* wide_input(int c) const {
    if (const Site* site = sites_.find(c, 0)) return is_wide(*site) ? site : nullptr;
    for (int m = maker_.maker(call(c).inputs[0]); m >= 0; m = maker_.maker(call(m).inputs[0])) {
      const nn::TracedCall& at = call(m);
      if (const Site* site = sites_.find(m, -1)) return is_wide(*site) ? site : nullptr;
      const bool moves = quant::keeps_grid(at) && (at.op != "pad" || pad_value(attributes_of<PadAttributes>(at)) == 0);
      if (!moves || at.inputs.empty() || at.inputs[0] < 0) return nullptr;
    }
    return nullptr;
  }
  // The product of an input of 16 bits, floating behind it.
  bool add_wide_product(int c) {
    const Site* input = has_int8_weight(c) ? wide_input(c) : nullptr;
    if (!input) return false;
    const nn::TracedCall& at = call(c);
    if (low_) {
      fail<Error>("{}: {}: activations of 16 bits are float32 between products, expected dtype f32 or none, got {}",
                  source_.who, at.place(), name(*low_));
    }
    const auto norm = norms_.find(c);
    const int folded = norm != norms_.end() && aliases_.contains(norm->second) ? norm->second : -1;
    const Site& weight = *sites_.find(c, 1);
    const Tensor integers = weight.weight(maker_.constant(at.inputs[1], at));
    const Int8Weights w = int8_weights(integers, weight.scale, factors_of(c, folded));
    const int v = at.outputs[0], x = read_real(c, 0);
    maker_.set_value(v, maker_.add_function(at.op + "_int16", at.module, wide_product(at, w, *input), {x}, v));
    hold({w.weight, w.scale, w.bias});
    if (!is_site(folded >= 0 ? folded : c)) name_layer(at.module.empty() ? at.op : at.module);
    finish_real(c);
    return true;
  }

  // Everything else: in floating point.
  void add_real(int c) {
    if (add_wide_product(c)) return;
    const nn::TracedCall& at = call(c);
    std::vector<int> inputs;
    const auto norm = norms_.find(c);
    if (norm != norms_.end() && aliases_.contains(norm->second)) {
      const Site* site = sites_.find(c, 1);
      const Tensor weight = maker_.constant(at.inputs[1], at);
      const Tensor bias = at.inputs.size() > 2 && at.inputs[2] >= 0 ? maker_.constant(at.inputs[2], at) : Tensor();
      const nn::detail::FoldedWeights folded =
          nn::detail::folded_weights(site ? site->fake(weight) : weight, bias, norm_of(norm->second));
      inputs = {read_real(c, 0), maker_.add_weight(folded.weight), maker_.add_constant(folded.bias)};
    } else {
      for (std::size_t i = 0; i < at.inputs.size(); ++i) inputs.push_back(read_real(c, i));
      if (is_product(at.op) && at.inputs[1] >= 0 && maker_.is_constant(at.inputs[1]) && !sites_.find(c, 1)) {
        inputs[1] = maker_.add_weight(maker_.constant(at.inputs[1], at));
      }
    }
    maker_.add_call(c, std::move(inputs));
    finish_real(c);
  }

  const Sites& sites_;
  const Source& source_;
  GraphMaker maker_;
  const std::optional<DType> low_;  // of what has no grid
  int input_ = -1;
  std::optional<PictureTensors> pictures_;
  std::vector<std::optional<Int8Grid>> grids_;   // by the trace's value: what it lies on wherever it is read
  std::vector<std::vector<Integers>> integers_;  // likewise: values of the graph
  std::unordered_map<int, int> norms_;           // by product
  std::unordered_map<int, int> aliases_;         // norms whose product has them, and gives floating numbers
  std::unordered_map<int, Group> groups_;        // by last call
  std::set<int> inside_;                         // calls of a group but the last
};

}  // namespace

Graph int8_graph(const QuantizedSource& quantized, const std::optional<PictureNumbers>& pictures,
                 std::optional<DType> dtype) {
  return Converter(quantized, pictures, dtype).convert();
}

}  // namespace halfstep::infer::detail
