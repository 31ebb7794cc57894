// SPDX-License-Identifier: Apache-2.0
// Import of ONNX files as networks that are trained on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/io/read_limits.h"
#include "halfstep/nn/module.h"
#include "halfstep/quant/fake_quantize.h"

namespace halfstep::io {

namespace detail {
class OnnxPart;
struct OnnxPlan;
}  // namespace detail

/// Options of load_onnx.
struct OnnxImportOptions {
  /// Of a quantized file: scales are parameters (LSQ) that start from the file's; by default they stay as they are
  /// until quant::enable_observer() lets them follow the values.
  bool learned_scales = false;
  ReadLimits limits = read_limits();
};

/// An input or output of a network as its file declares it.
struct OnnxPortInfo {
  std::string name;
  DType dtype = f32;
  std::vector<std::int64_t> sizes;  ///< -1: any
};

/// A network that load_onnx() read: runs the file's operators as recorded ops, so that it is trained, saved, moved,
/// cloned, prepared for quantization and exported as any other module.
///
/// Tensors of floating dtypes in the file are float32 here. Those that Conv, Gemm, MatMul, normalisations and the like
/// read are parameters under their names in the file, which are PyTorch's where that wrote it
/// (`layer1.0.conv1.weight`); where a file has made-up names (`onnx::Conv_193`), the operator's name takes their place.
/// Running statistics and constants are buffers. The weight of a matrix product is [out, in], as nn::Linear has it,
/// whatever it is in the file.
///
/// In training mode batch norms take the batch's statistics and follow them, and Dropout drops; where an exporter
/// folded or left out either, there is none.
///
/// Of a quantized file (QuantizeLinear and DequantizeLinear) integers of weights become parameters, and each grid a
/// quant::FakeQuantize, whose observer is off: `conv1.weight_fake_quant`, or `quantize.` and the tensor's name.
class HS_API OnnxNetwork : public nn::Module<OnnxNetwork> {
 public:
  /// Of networks with one input and one output. Throws Error naming file, node and operator for what can't be computed.
  Tensor forward(const Tensor& input) const;
  /// All inputs and outputs, in the file's order.
  std::vector<Tensor> forward(std::span<const Tensor> inputs) const;
  /// The inputs and outputs.
  /// @{
  const std::vector<OnnxPortInfo>& inputs() const;
  const std::vector<OnnxPortInfo>& outputs() const;
  /// @}
  std::string kind() const override { return "OnnxNetwork"; }
  /// `net.onnx, 69 operators`
  std::string describe() const override;
  void unshare() override;

 protected:
  std::vector<std::pair<std::string, nn::ModuleBase*>> held() const override;

 private:
  friend HS_API OnnxNetwork parse_onnx(std::span<const unsigned char> bytes, const std::string& name,
                                       const OnnxImportOptions& options);
  explicit OnnxNetwork(std::shared_ptr<const detail::OnnxPlan> plan);
  std::shared_ptr<const detail::OnnxPlan> plan_;
  std::vector<std::shared_ptr<detail::OnnxPart>> parts_;
  std::vector<std::shared_ptr<quant::FakeQuantize>> quantizers_;
};

/// Reads an ONNX file of opset 11 to 24 as a network, in training mode:
///
///     io::OnnxNetwork net = io::load_onnx("resnet18.onnx");
///
/// Sizes that the file computes from those of its inputs are computed by the host in each run; sizes that depend on the
/// values of tensors are an error of that run. Throws IoError for a file that is missing, damaged or beyond the limits,
/// and Error naming file, node and operator for operators (onnx_import_ops()) and attributes that aren't supported, for
/// tensors in other files, and for graphs in attributes (If, Loop).
HS_API OnnxNetwork load_onnx(const std::filesystem::path& path, const OnnxImportOptions& options = {});
/// The same from memory; `name` is for messages.
HS_API OnnxNetwork parse_onnx(std::span<const unsigned char> bytes, const std::string& name,
                              const OnnxImportOptions& options = {});
/// The operators that are read, in alphabetical order.
HS_API std::vector<std::string> onnx_import_ops();

}  // namespace halfstep::io
