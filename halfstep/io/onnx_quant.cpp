// SPDX-License-Identifier: Apache-2.0
// How a quantized network is written: QuantizeLinear and DequantizeLinear around what programs compute in integers
// (ONNX's "QDQ format"). Weights are stored as integers, with the factors of batch norms in their scales; biases as 32
// bits in steps of the sums.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/io/onnx_internal.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/quantize.h"

namespace halfstep::io::detail {
namespace {

using Kind = nn::TracedValue::Kind;
using std::int64_t;

// Sums of products are added to a bias in 32 bits.
constexpr double kMostBias = 1 << 30;

int64_t least_of(std::int32_t type) { return type == kOnnxInt8 ? -128 : type == kOnnxInt16 ? -32768 : 0; }
int64_t most_of(std::int32_t type) {
  return type == kOnnxInt8 ? 127 : type == kOnnxUint8 ? 255 : type == kOnnxInt16 ? 32767 : 65535;
}

std::vector<int64_t> whole(const Tensor& zero_point, int64_t least, int64_t most) {
  std::vector<int64_t> result;
  for (const double z : zero_point.to_vector<double>()) {
    result.push_back(
        static_cast<int64_t>(std::clamp(std::nearbyint(z), static_cast<double>(least), static_cast<double>(most))));
  }
  return result;
}

OnnxGrid grid_of(const quant::TracedGrid& traced) {
  const quant::FakeQuantize& q = *traced.quantizer;
  const quant::FakeQuantizeOptions& o = q.options;
  OnnxGrid grid{.name = traced.name, .weight = traced.weight, .least = q.quant_min(), .most = q.quant_max()};
  const bool clipped = o.source == quant::ScaleSource::clipped;
  grid.scale = (clipped ? q.alpha : q.scale).to(f32).to_vector<float>();
  for (float& s : grid.scale) {
    if (clipped) s /= static_cast<float>(grid.most);
    if (o.source != quant::ScaleSource::observed) s = std::max(s, static_cast<float>(o.eps));
  }
  grid.zero_point = whole(q.zero_point, grid.least, grid.most);
  if (o.axis) grid.axis = *o.axis;
  return grid;
}

// A call of fake_quantize: its inputs are x, scale and zero point.
OnnxGrid grid_of(const nn::Trace& trace, const nn::TracedCall& call) {
  const auto value = [&](int i) -> const nn::TracedValue& {
    return trace.values[static_cast<std::size_t>(call.inputs[static_cast<std::size_t>(i)])];
  };
  QuantizeAttributes a;
  if (call.attributes.size() != sizeof(a)) fail<InternalError>("export_onnx: {}: unknown attributes", call.place());
  std::memcpy(&a, call.attributes.data(), sizeof(a));
  OnnxGrid grid{.name = value(1).name, .axis = a.axis, .least = a.quant_min, .most = a.quant_max};
  // `conv1.weight_fake_quant.scale`; a learned scale is computed from the parameter.
  constexpr std::string_view kScale = ".scale";
  if (grid.name.ends_with(kScale)) grid.name.resize(grid.name.size() - kScale.size());
  if (grid.name.empty()) grid.name = call.module.empty() ? "quantized" : call.module;
  grid.scale = value(1).tensor.to(f32).to_vector<float>();
  grid.zero_point = whole(value(2).tensor, a.quant_min, a.quant_max);
  return grid;
}

bool is_constant(const nn::TracedValue& v) { return v.kind == Kind::parameter || v.kind == Kind::constant; }

}  // namespace

std::int32_t OnnxGrid::type() const {
  if (least >= 0) return most <= 255 ? kOnnxUint8 : kOnnxUint16;
  return least >= -128 && most <= 127 ? kOnnxInt8 : kOnnxInt16;
}

OnnxGrids take_grids(nn::Trace& trace, const std::vector<quant::TracedGrid>& planned) {
  OnnxGrids grids;
  for (const quant::TracedGrid& g : planned) {
    if (g.quantizer->is_fake_quant_enabled()) grids[{g.call, g.input}] = grid_of(g);
  }
  for (std::size_t c = 0; c < trace.calls.size(); ++c) {
    nn::TracedCall& call = trace.calls[c];
    if (call.op != "fake_quantize" && call.op != "fake_quantize_learnable") continue;
    OnnxGrid grid = grid_of(trace, call);
    const int from = call.inputs[0], to = call.outputs[0];
    call.inputs = {from};
    const bool is_output = std::find(trace.outputs.begin(), trace.outputs.end(), to) != trace.outputs.end();
    if (!is_constant(trace.values[static_cast<std::size_t>(from)]) || is_output) {
      grids[{static_cast<int>(c), -1}] = std::move(grid);
      continue;
    }
    grid.weight = true;
    for (std::size_t r = c + 1; r < trace.calls.size(); ++r) {
      for (std::size_t i = 0; i < trace.calls[r].inputs.size(); ++i) {
        if (trace.calls[r].inputs[i] != to) continue;
        trace.calls[r].inputs[i] = from;
        grids[{static_cast<int>(r), static_cast<int>(i)}] = grid;
      }
    }
  }
  return grids;
}

// --- the builder's part

const OnnxGrid* OnnxBuilder::grid_at(int input) const {
  const auto it = grids_.find({index_, input});
  return it == grids_.end() ? nullptr : &it->second;
}

// The grid on which a value lies; null: none.
const OnnxGrid* OnnxBuilder::grid_of(int value) const {
  for (;;) {
    const int maker = makers_[static_cast<std::size_t>(value)];
    if (maker < 0) return nullptr;
    if (const auto it = grids_.find({maker, -1}); it != grids_.end()) return &it->second;
    const nn::TracedCall& call = trace_.calls[static_cast<std::size_t>(maker)];
    if (!quant::keeps_grid(call) || call.inputs.empty() || call.inputs[0] < 0) return nullptr;
    if (const auto it = grids_.find({maker, 0}); it != grids_.end()) return &it->second;
    value = call.inputs[0];
  }
}

std::string OnnxBuilder::grid_scale(const OnnxGrid& grid) {
  std::string& name = grid_names_[&grid].first;
  if (!name.empty()) return name;
  for (const float s : grid.scale) {
    if (!(s > 0) || !std::isfinite(s)) {
      refuse(fmt::format("expected scales above 0 for '{}', got {}; was it calibrated?", grid.name, s));
    }
  }
  if (grid.has_16_bits() && opset() < 21) {
    refuse(fmt::format("'{}' has integers of 16 bits, which ONNX quantizes from opset 21 on; export with opset 21",
                       grid.name));
  }
  const auto n = static_cast<int64_t>(grid.scale.size());
  Tensor t = empty({n}, {.dtype = DType::f32, .device = Device{}});
  std::copy(grid.scale.begin(), grid.scale.end(), write_data<float>(t));
  std::vector<int64_t> dims;
  if (grid.axis >= 0) dims.push_back(n);
  return name = add_initializer(grid.name + "_scale", t, std::move(dims), kOnnxFloat);
}

std::string OnnxBuilder::grid_zero_point(const OnnxGrid& grid) {
  std::string& name = grid_names_[&grid].second;
  if (!name.empty()) return name;
  const auto n = static_cast<int64_t>(grid.zero_point.size());
  Tensor t = empty({n}, {.dtype = DType::i32, .device = Device{}});
  std::copy(grid.zero_point.begin(), grid.zero_point.end(), write_data<std::int32_t>(t));
  OnnxGrid whole = grid;
  whole.name += "_zero_point";
  if (grid.axis < 0) t = t.reshape({});
  return name = stored(whole, t);
}

// Integers as an initializer of the grid's type and name.
std::string OnnxBuilder::stored(const OnnxGrid& grid, const Tensor& integers) {
  const std::int32_t type = grid.type();
  std::vector<int64_t> dims(integers.sizes().begin(), integers.sizes().end());
  if (!grid.has_16_bits()) {
    const DType dtype = type == kOnnxInt8 ? DType::i8 : DType::u8;
    return add_initializer(grid.name, integers.to(dtype).contiguous(), std::move(dims), type);
  }
  // There is no dtype of 16-bit integers: as bytes, little-endian.
  const std::vector<int64_t> values = integers.to_vector<int64_t>();
  Tensor bytes = empty({2 * integers.numel()}, {.dtype = DType::u8, .device = Device{}});
  auto* to = write_data<std::uint8_t>(bytes);
  for (std::size_t i = 0; i < values.size(); ++i) {
    to[2 * i] = static_cast<std::uint8_t>(values[i] & 255);
    to[2 * i + 1] = static_cast<std::uint8_t>(values[i] >> 8 & 255);
  }
  return add_initializer(grid.name, bytes, std::move(dims), type);
}

// `x` on the grid, called `as` if that isn't empty. A range that is narrower than the type's needs a Clip before it.
std::string OnnxBuilder::on_grid(const std::string& x, const OnnxGrid& grid, const std::string& as) {
  const std::string scale = grid_scale(grid), zero_point = grid_zero_point(grid);
  OnnxAttributes attributes;
  if (grid.axis >= 0) attributes.push_back({"axis", grid.axis});
  std::string clipped = x;
  if (grid.least != least_of(grid.type()) || grid.most != most_of(grid.type())) {
    if (grid.axis >= 0) refuse(fmt::format("'{}' has a narrower range by channel, which has no form here", grid.name));
    const auto bound = [&](int64_t q) {
      return number(static_cast<float>(q - grid.zero_point[0]) * grid.scale[0], DType::f32);
    };
    clipped = node("Clip", {x, bound(grid.least), bound(grid.most)});
  }
  const std::string integers = node("QuantizeLinear", {clipped, scale, zero_point}, attributes);
  if (as.empty()) return node("DequantizeLinear", {integers, scale, zero_point}, attributes);
  graph_.nodes.push_back({"DequantizeLinear", as, {integers, scale, zero_point}, {as}, std::move(attributes)});
  return as;
}

std::string OnnxBuilder::input_on_grid(int value, const OnnxGrid& grid) {
  std::string& name = on_grids_[{value, grid.name}];
  if (name.empty()) name = on_grid(name_of(value, false), grid, {});
  return name;
}

namespace {

Tensor integers_of(const Tensor& tensor, const OnnxGrid& grid) {
  const auto n = static_cast<int64_t>(grid.scale.size());
  Tensor scale = empty({n}, {.dtype = DType::f32, .device = Device{}});
  std::copy(grid.scale.begin(), grid.scale.end(), write_data<float>(scale));
  Tensor zero = empty({n}, {.dtype = DType::i32, .device = Device{}});
  std::copy(grid.zero_point.begin(), grid.zero_point.end(), write_data<std::int32_t>(zero));
  QuantizeOptions options{.dtype = DType::i32, .quant_min = grid.least, .quant_max = grid.most};
  if (grid.axis >= 0) options.axis = grid.axis;
  return quantize(tensor.to(Device{}).contiguous().to(DType::f32), scale, zero, options);
}

std::vector<double> doubles_of(const Tensor& t) { return t.to(Device{}).to(DType::f64).to_vector<double>(); }

}  // namespace

// A constant that isn't the weight of a product: of embeddings, of transposed convolutions.
std::string OnnxBuilder::weight_on_grid(int value, const OnnxGrid& grid) {
  std::string& name = on_grids_[{value, grid.name}];
  if (!name.empty()) return name;
  const nn::TracedValue& v = trace_.values[static_cast<std::size_t>(value)];
  if (v.overwritten) refuse("reads a parameter or constant that is written over later");
  OnnxGrid own = grid;
  own.name = grid.name + "_quantized";
  const std::string integers = stored(own, integers_of(v.tensor, grid));
  OnnxAttributes attributes;
  if (grid.axis >= 0) attributes.push_back({"axis", grid.axis});
  return name = node("DequantizeLinear", {integers, grid_scale(grid), grid_zero_point(grid)}, attributes);
}

std::string OnnxBuilder::dequantized_weight(int bits) {
  if (options_.dtype != DType::f32) refuse("has weights of integers; export it with dtype f32");
  const nn::TracedValue &weight = value_in(1), &scale = value_in(2);
  const bool grouped = scale.tensor.dim() == 2;
  if ((bits == 4 || grouped) && opset() < 21) {
    refuse("has weights of 4 bits or in groups, which ONNX has from opset 21 on; export with opset 21");
  }
  if (weight.overwritten || scale.overwritten) refuse("reads a parameter that is written over later");
  const Tensor w = weight.tensor.to(Device{}).contiguous(), s = scale.tensor.to(Device{}).contiguous();
  const int64_t k = w.size(1) * (bits == 4 ? 2 : 1);
  const std::string name = weight.name.empty() ? "weight" : weight.name;
  // Two numbers in a byte, the first in the low half: ONNX's order of 4 bits, too.
  const std::string integers =
      add_initializer(name + "_quantized", w, {w.size(0), k}, bits == 4 ? kOnnxInt4 : kOnnxInt8);
  const std::string scales =
      add_initializer(name + "_scale", s, std::vector<int64_t>(s.sizes().begin(), s.sizes().end()), kOnnxFloat);
  OnnxAttributes attributes{{"axis", int64_t{grouped}}};
  if (grouped) attributes.push_back({"block_size", k / s.size(1)});
  return node("DequantizeLinear", {integers, scales}, attributes);
}

// The batch norm that alone reads the call's result, as it is; -1: none.
int OnnxBuilder::norm_behind() const {
  const int result = call_->outputs[0];
  const int r = reader_[static_cast<std::size_t>(result)];
  if (r < 0 || grid_at(-1)) return -1;
  const nn::TracedCall& norm = trace_.calls[static_cast<std::size_t>(r)];
  if (norm.op != "batch_norm" || norm.inputs[0] != result || grids_.contains({r, 0})) return -1;
  if (norm.attributes.size() != sizeof(BatchNormAttributes) || norm.inputs.size() < 5) return -1;
  BatchNormAttributes a;
  std::memcpy(&a, norm.attributes.data(), sizeof(a));
  if (a.training || norm.inputs[3] < 0 || norm.inputs[4] < 0) return -1;
  for (std::size_t i = 1; i < 5; ++i) {
    if (norm.inputs[i] < 0) continue;
    const nn::TracedValue& v = trace_.values[static_cast<std::size_t>(norm.inputs[i])];
    if (!is_constant(v) || v.overwritten) return -1;
  }
  return r;
}

// Weight and bias of a convolution or linear layer whose weight is on a grid, with the batch norm behind it.
void OnnxBuilder::begin_product() {
  product_.reset();
  const OnnxGrid* given = call_->op == "conv2d" || call_->op == "linear" ? grid_at(1) : nullptr;
  if (!given || !given->weight || given->axis > 0) return;
  const nn::TracedValue& v = value_in(1);
  const bool has_bias = call_->inputs.size() > 2 && call_->inputs[2] >= 0;
  if (v.overwritten || (has_bias && !is_constant(value_in(2)))) return;
  const Tensor& weight = v.tensor;
  const auto channels = static_cast<std::size_t>(weight.size(0));
  const auto row = static_cast<std::size_t>(weight.numel()) / std::max<std::size_t>(channels, 1);
  OnnxGrid grid = *given;
  Tensor integers = integers_of(weight, grid);
  std::vector<double> bias(channels, 0);
  if (has_bias) bias = doubles_of(value_in(2).tensor);
  bool any_bias = has_bias;

  const int norm_index = norm_behind();
  if (norm_index >= 0) {
    const nn::TracedCall& norm = trace_.calls[static_cast<std::size_t>(norm_index)];
    const auto of_norm = [&](std::size_t i, double standard) {
      if (norm.inputs[i] < 0) return std::vector<double>(channels, standard);
      return doubles_of(trace_.values[static_cast<std::size_t>(norm.inputs[i])].tensor);
    };
    BatchNormAttributes a;
    std::memcpy(&a, norm.attributes.data(), sizeof(a));
    const std::vector<double> gamma = of_norm(1, 1), beta = of_norm(2, 0), mean = of_norm(3, 0), var = of_norm(4, 1);
    if (grid.axis < 0) {
      grid.axis = 0;
      grid.scale.resize(channels, grid.scale[0]);
      grid.zero_point.resize(channels, grid.zero_point[0]);
    }
    // A negative factor turns the integers round, where their range has both signs of each.
    bool fits = true;
    std::vector<double> factor(channels);
    auto* q = write_data<std::int32_t>(integers);
    for (std::size_t o = 0; o < channels; ++o) {
      factor[o] = gamma[o] / std::sqrt(var[o] + a.eps);
      fits &= std::isfinite(factor[o]);
      if (factor[o] >= 0) continue;
      fits &= grid.zero_point[o] == 0;
      for (std::size_t i = 0; i < row; ++i) fits &= -q[o * row + i] <= most_of(grid.type());
    }
    if (fits) {
      folded_.insert(norm_index);
      any_bias = true;
      for (std::size_t o = 0; o < channels; ++o) {
        bias[o] = beta[o] + (bias[o] - mean[o]) * factor[o];
        const auto scale = static_cast<float>(grid.scale[o] * std::fabs(factor[o]));
        const bool vanishes = scale < FLT_MIN;
        for (std::size_t i = 0; i < row; ++i) {
          std::int32_t& n = q[o * row + i];
          n = vanishes ? static_cast<std::int32_t>(grid.zero_point[o]) : factor[o] < 0 ? -n : n;
        }
        if (!vanishes) grid.scale[o] = scale;
      }
    }
  }

  Product product;
  const std::string name = v.name.empty() ? grid.name : v.name;
  OnnxAttributes along;
  if (grid.axis >= 0) along.push_back({"axis", int64_t{0}});
  grid.name = name;
  const std::string scale = grid_scale(grid), zero_point = grid_zero_point(grid);
  grid_names_.erase(&grid);
  OnnxGrid of_integers = grid;
  of_integers.name = name + "_quantized";
  product.weight = node("DequantizeLinear", {stored(of_integers, integers), scale, zero_point}, along);
  const OnnxGrid* input = grid_at(0) ? grid_at(0) : grid_of(call_->inputs[0]);
  if (any_bias) {
    std::string bias_name = name.ends_with("weight") ? name.substr(0, name.size() - 6) + "bias" : name + "_bias";
    std::vector<float> steps;
    Tensor whole = empty({weight.size(0)}, {.dtype = DType::i32, .device = Device{}});
    auto* to = write_data<std::int32_t>(whole);
    // In steps of grids of few bits a bias would be rounded as coarsely as they are.
    constexpr int64_t kFewest = 127;
    const auto is_fine = [](const OnnxGrid& g) { return g.most - g.least >= kFewest; };
    bool fits = input && input->axis < 0 && is_fine(*input) && is_fine(grid);
    for (std::size_t o = 0; o < channels && fits; ++o) {
      steps.push_back(input->scale[0] * grid.scale[grid.axis < 0 ? 0 : o]);
      const double n = std::nearbyint(bias[o] / steps.back());
      fits = std::fabs(n) <= kMostBias && steps.back() >= FLT_MIN;
      to[o] = fits ? static_cast<std::int32_t>(n) : 0;
    }
    if (fits) {
      Tensor s = empty({weight.size(0)}, {.dtype = DType::f32, .device = Device{}});
      std::copy(steps.begin(), steps.end(), write_data<float>(s));
      const std::vector<int64_t> dims{weight.size(0)};
      const std::string q = add_initializer(bias_name + "_quantized", whole, dims, kOnnxInt32);
      const std::string bias_scale = add_initializer(bias_name + "_scale", s, dims, kOnnxFloat);
      product.bias = node("DequantizeLinear", {q, bias_scale}, {{"axis", int64_t{0}}});
    } else {
      product.late_bias = tensor(bias, {weight.size(0)}, {.dtype = DType::f32, .device = Device{}});
    }
  }
  product_ = std::move(product);
}

void OnnxBuilder::add_late_bias() {
  const int value = call_->outputs[0];
  Shape sizes{product_->late_bias.size(0)};
  if (call_->op == "conv2d") sizes = {product_->late_bias.size(0), 1, 1};
  names_[value] = node("Add", {names_.at(value), constant(product_->late_bias.reshape(sizes))});
}

}  // namespace halfstep::io::detail
