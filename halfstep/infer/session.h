// SPDX-License-Identifier: Apache-2.0
// Networks for evaluation and serving: folded, with memory planned once, from several threads at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/nn/module.h"
#include "halfstep/nn/trace.h"

namespace halfstep::infer {

/// Pictures of bytes as an input: a pixel p from 0 to 255 becomes (p / 255 - mean) / std, each step rounded to float32,
/// as data::Normalization has it.
struct Pictures {
  std::vector<float> mean = {0};  ///< one number, or one for each channel
  std::vector<float> std = {1};   ///< likewise
};

/// Options of Session.
struct SessionOptions {
  /// What products compute in: f16 or bf16, with the other ops as autocast's policy has them and weights converted
  /// once, or f32. By default the network's own.
  std::optional<DType> dtype = {};
  /// Runs a network that quant::prepare() has prepared, or one that calls quant::FakeQuantize itself as those of
  /// quantized ONNX files do (io::load_onnx), in integers of 8 bits, with its scales and zero points. Products of
  /// activations of 16 bits are two of 8 bits. What has no grid, such as layers that were left out, computes in
  /// `dtype`, or in float32; beside activations of 16 bits it has to be float32.
  bool int8 = false;
  /// The network's only input is u8 [N, C, H, W], and this makes of it what the network takes. In an int8 session the
  /// bytes become integers on the input's grid by a table, without a floating picture in between.
  std::optional<Pictures> pictures = {};
  /// Calls may have any number of samples, in dimension 0 of all inputs and outputs; otherwise the example's sizes
  /// only.
  bool dynamic_batch = true;
  /// The most plans that are kept for later calls; those that were used longest ago go.
  int plans = 32;
};

/// How calls of a session ran.
struct SessionStats {
  std::uint64_t calls = 0;
  std::uint64_t planned = 0;      ///< those that made a plan: the first of a number of samples, and concurrent ones
  std::uint64_t interpreted = 0;  ///< those that ran op by op, since ops are observed or why_not() says so
};

/// Bytes that a session's tensors take.
struct SessionMemory {
  /// Constants in the form in which calls take them: weights in float32, 16 bits or integers, scales, tables. Kernels
  /// may keep weights in an order of their own besides.
  std::uint64_t weights = 0;
  /// What the largest plan of those that are kept has for results and all between: each place is counted once, whatever
  /// lies there in the course of a call. Inputs are the caller's. 0 before the first call, and where calls can't be
  /// planned.
  std::uint64_t activations = 0;
};

/// A network that only computes results. It is made by running `forward` on the example in evaluation mode: what is
/// called becomes a list of calls with batch norms folded into the convolutions and linear layers before them (as
/// nn::fold_batch_norms; several rows a sample aside), constants computed, activations in place and image weights
/// channels-last. Parameters are copied: a network that is changed afterwards, trained on for example, doesn't change
/// the session. What the network reads on the host (item(), to_vector()) is as in those runs.
///
/// The first call with a number of samples plans it: the kernels and the place of each tensor in memory. Later ones
/// run the kernels, and on the CPU run_into() takes no memory but what kernels of oneDNN take for themselves. Calls of
/// several threads run at once, each on a plan of its own; copies of a session share plans and weights. On a device
/// kernels are enqueued one by one on the thread's queue. Results are row-major, have no history, and on the CPU in
/// float32 the bits of the folded, channels-last network's.
///
///     infer::Session session(net, zeros({1, 3, 224, 224}));
///     Tensor logits = session(images);  // any batch from 1 up
class HS_API Session {
 public:
  /// For networks of several inputs or outputs. The example has the inputs' sizes, dtypes and device; the number of its
  /// samples doesn't matter. Throws Error for ops that draw random numbers or write parts of tensors in place, for
  /// sizes and constants that follow the number of samples other than as a multiple, and for options that don't fit.
  Session(const nn::ModuleBase& network, const nn::TracedForward& forward, std::vector<Tensor> example,
          const SessionOptions& options = {});
  /// For a network of one input and one output.
  template <nn::TensorModule M>
  Session(const M& network, const Tensor& example, const SessionOptions& options = {})
      : Session(
            network, [&network](std::span<const Tensor> in) { return std::vector<Tensor>{network(in[0])}; }, {example},
            options) {}

  /// The result for the only input of a network with one output.
  Tensor operator()(const Tensor& input) const;
  /// The results. Throws Error for another number of inputs, ShapeError, DTypeError and DeviceError for others than the
  /// example's but for the number of samples, and what kernels throw.
  std::vector<Tensor> run(std::span<const Tensor> inputs) const;
  /// Writes the results into `outputs`, which have their sizes, dtypes and device.
  void run_into(std::span<const Tensor> inputs, std::span<Tensor> outputs) const;

  /// How calls ran so far, of all copies.
  SessionStats stats() const;
  /// What it holds, of all copies.
  SessionMemory memory() const;
  /// Why calls can't be planned and run op by op; empty if they can.
  std::string why_not() const;
  /// The calls by name, in their order: `conv2d`, `relu`, ..., of an int8 session `conv2d_int8` and the like.
  std::vector<std::string> calls() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace halfstep::infer
