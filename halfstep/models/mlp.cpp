// SPDX-License-Identifier: Apache-2.0
#include "halfstep/models/mlp.h"

#include "halfstep/ops/activation.h"
#include "halfstep/ops/view.h"

namespace halfstep::models {

MLP::MLP(const MLPOptions& o)
    : fc1(child("fc1", nn::Linear{{.in = o.in, .out = o.hidden}})),
      fc2(child("fc2", nn::Linear{{.in = o.hidden, .out = o.hidden}})),
      fc3(child("fc3", nn::Linear{{.in = o.hidden, .out = o.classes}})) {}

Tensor MLP::forward(const Tensor& input) const {
  const Tensor x = input.dim() > 2 ? flatten(input, 1) : input;
  return fc3(relu(fc2(relu(fc1(x)))));
}

}  // namespace halfstep::models
