// SPDX-License-Identifier: Apache-2.0
// Weights of layers that stay in floating point beside integers.
#pragma once

#include <map>
#include <span>
#include <string>

#include "halfstep/nn/module.h"

namespace halfstep::cli {

/// A network some of whose layers have weights of 16 bits, rounded in place: in files they take that much, and what was
/// measured is what is read again.
class LeftWeights {
 public:
  /// f32: nothing is rounded.
  LeftWeights(const nn::ModuleBase& network, DType dtype) : network_(network), dtype_(dtype) {}
  /// Rounds the weights and biases of these modules; those of all others become what they were. Tensors with numbers
  /// that 16 bits have not stay as they are.
  void round(std::span<const std::string> modules);
  /// Of a network's state, the tensors that are rounded now in 16 bits.
  void lower(NamedTensors& state) const;

 private:
  const nn::ModuleBase& network_;
  const DType dtype_;
  std::map<std::string, Tensor> before_;  // by the names of those that are rounded
};

/// A network's floating tensors in 16 bits, as `halfstep convert --dtype` writes them: running statistics stay.
NamedTensors in_16_bits(NamedTensors tensors, DType dtype);

}  // namespace halfstep::cli
