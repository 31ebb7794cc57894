// SPDX-License-Identifier: Apache-2.0
// Networks as ONNX files, for other programs to run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/nn/module.h"

namespace halfstep::io {

/// Options of export_onnx.
struct OnnxOptions {
  int opset = 17;             ///< version of ONNX's operators, 17 to 21
  bool dynamic_batch = true;  ///< dimension 0 of the inputs is any number, called `batch`; otherwise the example's
  DType dtype = f32;          ///< of all floating tensors in the file, inputs and outputs too: f32 or f16
  std::vector<std::string> input_names = {};   ///< by default `input`; `input_0`, `input_1`, ... of several
  std::vector<std::string> output_names = {};  ///< by default `output`; `output_0`, `output_1`, ... of several
};

/// What export_onnx wrote.
struct OnnxSummary {
  std::int64_t nodes = 0;         ///< operators
  std::int64_t initializers = 0;  ///< parameters, buffers and constants
  std::int64_t elements = 0;      ///< of all initializers
  std::int64_t bytes = 0;         ///< of the file
};

/// A network as a function of its inputs, for modules of several inputs or outputs.
using OnnxForward = std::function<std::vector<Tensor>(std::span<const Tensor> inputs)>;

/// Writes what `forward` computes as an ONNX file. `forward` runs on copies of `inputs` in evaluation mode, without
/// gradients and without autocast, and the calls of ops that the outputs need become nodes. With a dynamic batch it
/// runs twice, on two and on three samples (those of `inputs`, from the first again where there are fewer), so that
/// sizes that follow the batch are told from those that don't. Parameters and buffers of `module` become initializers
/// under the names of its state_dict(); all other tensors, and what is computed from them alone, are written as
/// constants. Sizes other than the batch's are the example's. What the program computes from values that it reads back
/// from a tensor (item(), to_vector()) is not seen.
///
/// The bytes depend on the arguments alone. The file is there whole or not at all (AtomicFile). Modules keep their
/// mode. Throws Error naming op and module for what ONNX has no operators for, for ops that write a part of a tensor in
/// place, for random numbers, and for sizes that follow the batch in another way than as a multiple; IoError for files
/// over 2 GiB and for what AtomicFile throws.
HS_API OnnxSummary export_onnx(const std::filesystem::path& path, const nn::ModuleBase& module,
                               const OnnxForward& forward, std::span<const Tensor> inputs,
                               const OnnxOptions& options = {});

/// The same for a module of one input and one output:
///
///     io::export_onnx("net.onnx", net, zeros({1, 784}));
template <nn::TensorModule M>
OnnxSummary export_onnx(const std::filesystem::path& path, const M& module, const Tensor& input,
                        const OnnxOptions& options = {}) {
  return export_onnx(
      path, module, [&module](std::span<const Tensor> in) { return std::vector<Tensor>{module(in[0])}; },
      std::span<const Tensor>(&input, 1), options);
}

/// The names of the ops that have a form in ONNX, in alphabetical order. Functions made of other ops aren't among them.
HS_API std::vector<std::string> onnx_ops();

}  // namespace halfstep::io
