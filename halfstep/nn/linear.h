// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/nn/module.h"

namespace halfstep::nn {

/// Options of Linear.
struct LinearOptions {
  std::int64_t in = kNotGiven;   ///< features of an input, at least 0
  std::int64_t out = kNotGiven;  ///< features of an output, at least 0
  bool bias = true;
  DType dtype = f32;
};

/// y = x W^T + b: [*, in] -> [*, out]. Weight [out, in] and bias [out] start uniform in +-1/sqrt(in), as PyTorch's
/// nn.Linear.
class HS_API Linear : public Module<Linear> {
 public:
  /// Throws Error unless `in` and `out` are given.
  explicit Linear(const LinearOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "Linear"; }
  std::string describe() const override;

  /// As constructed, and the parameters; without a bias `bias` is undefined.
  LinearOptions options;
  Parameter weight;
  Parameter bias;
};

}  // namespace halfstep::nn
