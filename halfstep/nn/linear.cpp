// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/linear.h"

#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/nn/given_internal.h"
#include "halfstep/nn/init.h"
#include "halfstep/nn/weight_only_internal.h"
#include "halfstep/ops/int8.h"
#include "halfstep/ops/matmul.h"

namespace halfstep::nn {
namespace {

LinearOptions checked(const LinearOptions& o) {
  constexpr const char* kExample = ".in = 784, .out = 10";
  check_given(o.in, "Linear", "in", kExample);
  check_given(o.out, "Linear", "out", kExample);
  if (o.in < 0 || o.out < 0) {
    fail<Error>("Linear: expected at least 0 features, got in {} and out {}", o.in, o.out);
  }
  return o;
}

Tensor scale_of(const Linear& layer) {
  const std::shared_ptr<ModuleBase> quantizer = layer.attached(detail::kWeightQuantizer);
  const Tensor scale = quantizer ? quantizer->own_tensor(detail::kWeightScale) : Tensor();
  if (!scale.defined()) {
    fail<Error>("Linear: expected a floating weight, or one of quant::quantize_weights(), got {} without a scale",
                name(layer.weight.dtype()));
  }
  return scale;
}

Tensor forward_of_integers(const Linear& layer, const Tensor& input) {
  if (input.defined() && input.requires_grad() && GradMode::is_enabled()) {
    fail<Error>(
        "Linear: expected an input that needs no gradient, since a weight of integers gives none; compute under NoGrad,"
        " or train before quant::quantize_weights()");
  }
  return linear_weight_only(input, layer.weight, scale_of(layer), layer.bias);
}

}  // namespace

Linear::Linear(const LinearOptions& o)
    : options(checked(o)),
      weight(parameter("weight", init::uniform_fan_in({o.out, o.in}, o.in, o.dtype))),
      bias(parameter("bias", o.bias ? init::uniform_fan_in({o.out}, o.in, o.dtype) : Tensor())) {}

Tensor Linear::forward(const Tensor& input) const {
  if (!weight.is_floating()) [[unlikely]]
    return forward_of_integers(*this, input);
  return linear(input, weight, bias);
}

std::string Linear::describe() const {
  std::string text = fmt::format("{}, {}{}", options.in, options.out, options.bias ? "" : ", bias=false");
  if (weight.is_floating()) return text;
  text += weight.dtype() == u8 ? ", 4-bit weights" : ", 8-bit weights";
  if (const Tensor scale = scale_of(*this); scale.dim() == 2 && scale.size(1) > 0) {
    text += fmt::format(", group {}", options.in / scale.size(1));
  }
  return text;
}

}  // namespace halfstep::nn
