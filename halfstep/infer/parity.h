// SPDX-License-Identifier: Apache-2.0
// How far the integers of a converted network are from what fake quantization computes, layer by layer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/nn/module.h"
#include "halfstep/nn/trace.h"

namespace halfstep::infer {

/// How many elements of a layer's result differ.
struct Differences {
  double by_one = 0;   ///< share of elements that are one step off
  double by_more = 0;  ///< share that are more than one step off
  double most = 0;     ///< the largest difference, in steps
};

/// A layer of the converted network beside the same of the fake-quantized one.
struct LayerParity {
  std::string name = {};      ///< of the quantized result, `layer1.0.bn1`; of a floating one the module's path
  std::string module = {};    ///< path of the module that computes it
  std::string call = {};      ///< `conv2d_int8`, `add_int8`, ...
  std::int64_t elements = 0;  ///< of the result
  bool floating = false;      ///< the result has no grid: a step is 1/255 of what fake quantization's spans
  Differences chain = {};     ///< after all layers before it: what the network gives
  Differences alone = {};     ///< fed with the integers of fake quantization: what arises in this layer
};

/// Runs a prepared network with its fake quantizations in float32, and as an int8 Session runs it, on `inputs`, and
/// compares the results of every layer that was converted, worst first: by the share of elements that are more than one
/// step off in the chain, then by that of one step. The network isn't changed. Throws what a Session's constructor
/// throws.
HS_API std::vector<LayerParity> compare_layers(const nn::ModuleBase& network, const nn::TracedForward& forward,
                                               std::vector<Tensor> inputs);
/// The same for a network of one input and one output.
template <nn::TensorModule M>
std::vector<LayerParity> compare_layers(const M& network, const Tensor& input) {
  return compare_layers(network, [&network](std::span<const Tensor> in) { return std::vector<Tensor>{network(in[0])}; },
                        {input});
}

}  // namespace halfstep::infer
