// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/nn/linear.h"
#include "halfstep/nn/module.h"

namespace halfstep::models {

/// Options of MLP.
struct MLPOptions {
  std::int64_t in = 784;
  std::int64_t hidden = 512;
  std::int64_t classes = 10;
};

/// The MNIST network of the mixed-precision tutorials: in-hidden-hidden-classes with ReLU between. Takes [N, ...] with
/// `in` values per sample and returns logits [N, classes]. Calls throw ShapeError for samples of a different size.
class HS_API MLP : public nn::Module<MLP> {
 public:
  explicit MLP(const MLPOptions& options = {});
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "MLP"; }

  nn::Linear fc1;  ///< in -> hidden, ReLU after it
  nn::Linear fc2;  ///< hidden -> hidden, ReLU after it
  nn::Linear fc3;  ///< hidden -> classes: the logits
};

}  // namespace halfstep::models
