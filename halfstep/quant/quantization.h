// SPDX-License-Identifier: Apache-2.0
// Quantization-aware training of a network as it is written: where it is quantized is found in a run, and done as its
// ops are called.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/nn/module.h"
#include "halfstep/nn/trace.h"
#include "halfstep/quant/fake_quantize.h"
#include "halfstep/quant/observer.h"

namespace halfstep::quant {

/// Options of prepare.
struct QuantizationOptions {
  int weight_bits = 8;      ///< 2 to 8, and 16
  int activation_bits = 8;  ///< 2 to 8, and 16
  bool per_channel = true;  ///< weights have a scale for each output channel, else one
  bool symmetric = false;   ///< activations too have a zero point of 0, in signed integers
  /// Activations have a bit less, as PyTorch has it for x86: processors without VNNI add two products in 16 bits.
  bool reduce_range = false;
  ObserverKind observer = ObserverKind::moving_average;  ///< of activations
  double averaging_constant = 0.01;                      ///< of theirs
  bool learned = false;  ///< scales are parameters (LSQ), which start from what is observed
  /// Modules that stay in floating point: paths, in which `*` stands for any text, such as `fc` or `layer4.*`.
  std::vector<std::string> skip = {};
  bool first = true;  ///< quantize the first product too
  bool last = true;   ///< quantize the last product too
};

/// A tensor that is quantized.
struct QuantizedTensor {
  std::string name = {};    ///< `layer1.0.conv1.weight`, `layer1.0.bn1`, `input`
  std::string module = {};  ///< path of the module that computes with it
  bool weight = false;
  std::string group = {};  ///< the ops whose result it is, `conv2d + batch_norm + relu`; empty for weights and inputs
};

/// Where a FakeQuantize stands in a traced run.
struct TracedGrid {
  int call = 0;                                  ///< number of the call
  int input = -1;                                ///< which of its inputs is quantized; -1: its result
  bool weight = false;                           ///< a parameter, by output channel or as a whole
  std::shared_ptr<FakeQuantize> quantizer = {};  ///< the network's own
  std::string name = {};                         ///< as in QuantizedTensor
};

/// What quantizes a network: a module that prepare() attaches to it under the name `quantization`, with a FakeQuantize
/// for each tensor. It takes the calls of ops in the network's forward() and puts weights, inputs and results on their
/// grids. enable_observer(), enable_fake_quant() and commit() take the network or this.
class HS_API Quantization : public nn::Module<Quantization> {
 public:
  /// Made by prepare().
  struct Plan;
  Quantization(std::shared_ptr<const Plan> plan, const QuantizationOptions& options);
  Quantization(const Quantization& other);
  ~Quantization() override;

  QuantizationOptions options;  ///< as given
  /// What is quantized, in the order of the calls.
  std::vector<QuantizedTensor> tensors() const;
  /// The module for the tensor of that name. Throws Error where there is none.
  FakeQuantize& at(std::string_view name) const;
  /// Modules with weights that stay in floating point, each with the reason: `fc: left out by option`.
  std::vector<std::string> left() const;
  /// Where it stands in a run that was traced without it; trace_quantized() is the way there.
  std::vector<TracedGrid> grids(const nn::Trace& trace, std::string_view who) const;

  std::string kind() const override { return "Quantization"; }
  std::string describe() const override;
  std::shared_ptr<void> around_forward(const nn::ModuleBase& owner) const override;
  void unshare() override;

 protected:
  std::vector<std::pair<std::string, nn::ModuleBase*>> held() const override;

 private:
  std::shared_ptr<const Plan> plan_;
  std::vector<std::shared_ptr<FakeQuantize>> quantizers_;  // by site
};

/// Prepares a network for quantization-aware training, or for the calibration of one that is trained: runs `forward` on
/// `inputs` in evaluation mode, finds the products with weights (convolutions and linear layers), what is computed
/// together with each (batch norm, the sum with a residual, an activation), and the tensors between them; attaches a
/// Quantization, which this returns a handle on. The network is not rewritten: its state_dict() has further entries
/// under `quantization.`. Call it before the optimizer is made.
///
/// Weights have a scale for each output channel and no zero point, -127 to 127 for 8 bits, so that a batch norm's
/// factor moves into the scale alone when it is folded: what is trained is what is converted. The function must make
/// the same calls in each run. Throws Error where nothing can be quantized and for
/// options out of range.
HS_API Quantization prepare(const nn::ModuleBase& network, const nn::TracedForward& forward, std::vector<Tensor> inputs,
                            const QuantizationOptions& options = {});
/// The same for a network of one input and one output: `quant::prepare(net, zeros({1, 3, 32, 32}));`
template <nn::TensorModule M>
Quantization prepare(const M& network, const Tensor& input, const QuantizationOptions& options = {}) {
  return prepare(
      network, [&network](std::span<const Tensor> in) { return std::vector<Tensor>{network(in[0])}; }, {input},
      options);
}
/// The Quantization of a prepared network; null: it isn't prepared.
HS_API std::shared_ptr<Quantization> quantization_of(const nn::ModuleBase& network);

/// A run of a prepared network as it is without its quantization, and where that stands in it.
struct QuantizedTrace {
  nn::Trace trace;
  std::vector<TracedGrid> grids;  ///< in the order of the calls
};
/// What exports and conversions to integers start from: nn::trace of a prepared network whose FakeQuantize modules are
/// left out for the run. Where a call's result has no grid of its own, it lies on its input's if keeps_grid(), and in
/// floating point otherwise. Throws Error, in the name of `who`, where the network isn't prepared, where a quantized
/// tensor isn't computed in this run, and as nn::trace does.
HS_API QuantizedTrace trace_quantized(const nn::ModuleBase& network, const nn::TracedForward& forward,
                                      std::vector<Tensor> inputs, std::string_view who = "trace_quantized");
/// Whether a call moves or chooses elements, so that its results lie on the grid of its input: views, max pooling,
/// padding, nearest resampling.
HS_API bool keeps_grid(const nn::TracedCall& call);

}  // namespace halfstep::quant
