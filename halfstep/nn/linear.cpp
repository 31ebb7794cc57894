// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/linear.h"

#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/nn/given_internal.h"
#include "halfstep/nn/init.h"
#include "halfstep/ops/matmul.h"

namespace halfstep::nn {
namespace {

const LinearOptions& checked(const LinearOptions& o) {
  constexpr const char* kExample = ".in = 784, .out = 10";
  check_given(o.in, "Linear", "in", kExample);
  check_given(o.out, "Linear", "out", kExample);
  if (o.in < 0 || o.out < 0) {
    fail<Error>("Linear: expected at least 0 features, got in {} and out {}", o.in, o.out);
  }
  return o;
}

}  // namespace

Linear::Linear(const LinearOptions& o)
    : options(checked(o)),
      weight(parameter("weight", init::uniform_fan_in({o.out, o.in}, o.in, o.dtype))),
      bias(parameter("bias", o.bias ? init::uniform_fan_in({o.out}, o.in, o.dtype) : Tensor())) {}

Tensor Linear::forward(const Tensor& input) const { return linear(input, weight, bias); }

std::string Linear::describe() const {
  return fmt::format("{}, {}{}", options.in, options.out, options.bias ? "" : ", bias=false");
}

}  // namespace halfstep::nn
