// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"

namespace halfstep::test {

/// exp as a module.
struct Exp : nn::Module<Exp> {
  Tensor forward(const Tensor& x) const { return exp(x); }
};

/// Two layers with a relu between them: 3 -> 2 -> 1.
struct Small : nn::Module<Small> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 3, .out = 2}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 2, .out = 1}});
  Tensor forward(const Tensor& x) const { return fc2(relu(fc1(x))); }
};

/// A linear layer called `fc` and an exp called `head`.
struct ExpNet : nn::Module<ExpNet> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 2, .out = 2, .bias = false}});
  Exp head = child("head", Exp{});
  Tensor forward(const Tensor& x) const { return head(fc(x)); }
};

/// Puts numbers into a parameter.
inline void set(const Tensor& parameter, const std::vector<double>& values) {
  const NoGrad no_grad;
  Tensor to = parameter;
  to.copy_(tensor(values, parameter.sizes()));
}

}  // namespace halfstep::test
