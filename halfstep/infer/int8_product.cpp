// SPDX-License-Identifier: Apache-2.0
#include "halfstep/infer/int8_product_internal.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "halfstep/core/write_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/quantize.h"

namespace halfstep::infer::detail {
namespace {

// A factor below this is 0: what it leaves of a product is nothing beside any other number.
constexpr double kLeastScale = 0x1p-90;

}  // namespace

Int8Weights int8_weights(const Tensor& integers, const Tensor& scale, const nn::detail::NormFactors& factors) {
  const std::int64_t channels = integers.size(0), each = integers.numel() / std::max<std::int64_t>(channels, 1);
  const std::vector<double> scales = scale.to_vector<double>(), factor = factors.factor.to_vector<double>();
  const Device device = integers.device();
  Int8Weights result{.weight = integers.to(Device{}).clone(MemoryFormat::contiguous),
                     .scale = empty({channels}, {.dtype = f32, .device = Device{}}),
                     .bias = factors.shift.to(device, f32)};
  auto* q = write_data<std::int8_t>(result.weight);
  auto* s = write_data<float>(result.scale);
  for (std::int64_t o = 0; o < channels; ++o) {
    const auto at = static_cast<std::size_t>(o);
    const double given = scales[scales.size() == 1 ? 0 : at], own = given * std::abs(factor[at]);
    const bool vanishes = !(own >= kLeastScale);
    s[o] = static_cast<float>(vanishes ? given : own);
    for (std::int64_t i = o * each; i < (o + 1) * each; ++i) {
      const int turned = factor[at] < 0 ? -q[i] : q[i];
      q[i] = static_cast<std::int8_t>(vanishes ? 0 : std::min(turned, 127));
    }
  }
  result.weight = result.weight.to(device);
  result.scale = result.scale.to(device);
  return result;
}

Node::Function int8_product(const nn::TracedCall& product, const Int8Weights& w, Conv2dInt8Options options) {
  if (product.op == "linear") {
    return [w, options](std::span<const Tensor> in) {
      return std::vector<Tensor>{
          linear_int8(in[0], w.weight, w.scale, w.bias, in.size() > 1 ? in[1] : Tensor(), options)};
    };
  }
  ConvAttributes a{};
  if (product.attributes.size() == sizeof(a)) std::memcpy(&a, product.attributes.data(), sizeof(a));
  options.stride = {a.stride[0], a.stride[1]};
  options.padding = {a.padding[0], a.padding[1]};
  options.dilation = {a.dilation[0], a.dilation[1]};
  options.groups = a.groups;
  return [w, options](std::span<const Tensor> in) {
    return std::vector<Tensor>{
        conv2d_int8(in[0], w.weight, w.scale, w.bias, in.size() > 1 ? in[1] : Tensor(), options)};
  };
}

bool is_wide(const Site& site) {
  if (site.grid || site.axis || site.bound.defined() || site.scale.numel() != 1) return false;
  const std::int64_t zero = site.zero_point.item<std::int64_t>();
  return site.quant_max - site.quant_min < 1 << 16 && zero >= site.quant_min && zero <= site.quant_max;
}

Node::Function wide_product(const nn::TracedCall& product, const Int8Weights& w, const Site& input) {
  // Counted from the least integer on, x is scale (256 h + l - zero), with bytes h, l.
  const auto scale = static_cast<double>(input.scale.item<float>());
  const std::int64_t zero = input.zero_point.item<std::int64_t>() - input.quant_min;
  Conv2dInt8Options high, low;
  high.input = {.scale = 256 * scale, .zero_point = zero >> 8};
  low.input = {.scale = scale, .zero_point = zero & 255};
  Int8Weights without = w;
  without.bias = {};
  const Node::Function of_high = int8_product(product, without, high), of_low = int8_product(product, w, low);
  const auto number = [&](double value, DType dtype) {
    return full({1}, value, {.dtype = dtype}).to(input.scale.device());
  };
  const Tensor high_scale = number(high.input.scale, f32), low_scale = number(scale, f32);
  const Tensor high_zero = number(static_cast<double>(zero >> 8), i32),
               low_zero = number(static_cast<double>(zero & 255), i32);
  // Half a step of h below: the nearest h is then the one that x / 256 is cut to, and no value lies between two.
  const double down = (static_cast<double>(zero & 255) - 127.5) * scale;
  const QuantizeOptions bytes{.dtype = u8, .quant_min = 0, .quant_max = 255};
  return [=](std::span<const Tensor> in) {
    const Tensor x = in[0].to(f32), h = quantize(x + down, high_scale, high_zero, bytes);
    const Tensor l = quantize(x - dequantize(h, high_scale, high_zero), low_scale, low_zero, bytes);
    return std::vector<Tensor>{of_high({&h, 1})[0] + of_low({&l, 1})[0]};
  };
}

std::optional<FusedActivation> fused_activation(const nn::TracedCall& call) {
  if (call.op == "relu") return FusedActivation{.activation = Int8Activation::relu};
  if (call.op == "silu") return FusedActivation{.activation = Int8Activation::silu};
  if (call.op == "hardswish") return FusedActivation{.activation = Int8Activation::hardswish};
  if (call.op == "hardtanh" && call.attributes.size() == sizeof(ClampAttributes)) {
    ClampAttributes a;
    std::memcpy(&a, call.attributes.data(), sizeof(a));
    if (a.min <= a.max) return FusedActivation{.activation = Int8Activation::hardtanh, .a = a.min, .b = a.max};
  }
  if (call.op == "leaky_relu" && call.attributes.size() == sizeof(ActivationAttributes)) {
    ActivationAttributes a;
    std::memcpy(&a, call.attributes.data(), sizeof(a));
    return FusedActivation{.activation = Int8Activation::leaky_relu, .a = a.a};
  }
  return std::nullopt;
}

bool is_elementwise(const nn::TracedCall& call) {
  static constexpr auto kNames = std::to_array<std::string_view>(
      {"relu",      "silu",     "hardtanh",    "leaky_relu", "sigmoid",   "tanh",       "gelu",       "gelu_tanh",
       "hardswish", "mish",     "hardsigmoid", "elu",        "abs",       "neg",        "square",     "sqrt",
       "exp",       "softplus", "logsigmoid",  "clamp",      "threshold", "add_scalar", "mul_scalar", "pow_scalar"});
  return call.inputs.size() == 1 && std::find(kNames.begin(), kNames.end(), call.op) != kNames.end();
}

double pad_value(const PadAttributes& pad) {
  return pad.value.kind == 2 ? pad.value.floating : static_cast<double>(pad.value.integer);
}

bool padding_lies_on(const Int8Grid& grid, const PadAttributes& pad) {
  if (pad.mode != 0) return true;
  const Tensor value = full({1}, pad_value(pad));
  return from_grid(to_grid(value, grid), grid).item<double>() == value.item<double>();
}

bool pools_all(const AdaptivePoolAttributes& pool) {
  // Behind the sizes are strides.
  return pool.sizes.size >= 2 && pool.sizes.values[0] == 1 && pool.sizes.values[1] == 1;
}

}  // namespace halfstep::infer::detail
