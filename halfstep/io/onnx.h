// SPDX-License-Identifier: Apache-2.0
// Export of networks as ONNX files, to be run by other programs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/nn/module.h"
#include "halfstep/nn/trace.h"

namespace halfstep::io {

/// Non-maximum suppression behind a detector's predictions, class by class: ONNX's NonMaxSuppression.
struct OnnxNms {
  double score = 0.25;       ///< objectness times class probability is above this; 0 to 1
  double overlap = 0.45;     ///< boxes that overlap a better one of their class by more are dropped; 0 to 1
  std::int64_t limit = 300;  ///< the most objects of a class in a picture
};

/// Options of export_onnx.
struct OnnxOptions {
  int opset = 17;             ///< version of ONNX's operators, 17 to 21
  bool dynamic_batch = true;  ///< dimension 0 of the inputs is dynamic, named `batch`; otherwise the example's
  DType dtype = f32;          ///< of all floating-point tensors in the file, including inputs and outputs: f32 or f16
  std::vector<std::string> input_names = {};   ///< by default `input`, or `input_0`, `input_1`, ... for several
  std::vector<std::string> output_names = {};  ///< by default `output`, or `output_0`, `output_1`, ... for several
  /// For a network of one output [N, predictions, 5 + classes] (centre x and y, width, height, objectness, classes, as
  /// Yolov5::decode gives them): the file's output is then `detections` [found, 7] of float32: number of the picture,
  /// class, score, left, top, right and bottom, ordered by picture, class and falling score.
  std::optional<OnnxNms> nms = {};
};

/// What export_onnx wrote.
struct OnnxSummary {
  std::int64_t nodes = 0;         ///< operators
  std::int64_t initializers = 0;  ///< parameters, buffers and constants
  std::int64_t elements = 0;      ///< of all initializers
  std::int64_t bytes = 0;         ///< of the file
};

/// A network as a function of its inputs, for modules with several inputs or outputs.
using OnnxForward = nn::TracedForward;

/// Writes what `forward` computes as an ONNX file. `forward` runs on copies of `inputs` in evaluation mode, without
/// gradients and without autocast, and the op calls that the outputs depend on become nodes. With a dynamic batch it
/// runs twice, on two and on three samples (those of `inputs`, repeated from the first if there are fewer), to
/// distinguish sizes that depend on the batch from those that don't. Parameters and buffers of `module` become
/// initializers under the names of its state_dict(); all other tensors, and values computed only from them, are written
/// as constants. Sizes other than the batch's are the example's. Computations on values read back from a tensor
/// (item(), to_vector()) are not recorded.
///
/// The bytes depend only on the arguments. The file is written atomically (AtomicFile). Modules keep their mode. Throws
/// Error naming op and module for ops without an ONNX operator, for ops that write part of a tensor in place, for
/// random numbers, and for sizes that depend on the batch other than as a multiple; IoError for files over 2 GiB and
/// for what AtomicFile throws.
HS_API OnnxSummary export_onnx(const std::filesystem::path& path, const nn::ModuleBase& module,
                               const OnnxForward& forward, std::span<const Tensor> inputs,
                               const OnnxOptions& options = {});

/// The same for a module with one input and one output:
///
///     io::export_onnx("net.onnx", net, zeros({1, 784}));
template <nn::TensorModule M>
OnnxSummary export_onnx(const std::filesystem::path& path, const M& module, const Tensor& input,
                        const OnnxOptions& options = {}) {
  return export_onnx(
      path, module, [&module](std::span<const Tensor> in) { return std::vector<Tensor>{module(in[0])}; },
      std::span<const Tensor>(&input, 1), options);
}

/// The names of the ops supported in ONNX, in alphabetical order, without functions composed of other ops.
HS_API std::vector<std::string> onnx_ops();

}  // namespace halfstep::io
