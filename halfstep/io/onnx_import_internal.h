// SPDX-License-Identifier: Apache-2.0
// Internal: how an ONNX graph becomes a network. The plan (onnx_plan.cpp) has the steps and what they read: tensors of
// parts, which are modules, and numbers that the host knows. A run (onnx_import.cpp) takes each step: on the host where
// all that it reads is known there (onnx_host.cpp), else by recorded ops (onnx_run.cpp, onnx_run_image.cpp,
// onnx_run_views.cpp).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/io/onnx_import.h"
#include "halfstep/io/onnx_internal.h"
#include "halfstep/nn/module.h"

namespace halfstep::io::detail {

/// An array that the host knows: sizes, and numbers such as a factor.
struct OnnxHost {
  DType dtype = DType::i64;  ///< f32, i64 or boolean
  std::vector<std::int64_t> dims = {};
  std::vector<double> floats = {};      ///< of f32
  std::vector<std::int64_t> ints = {};  ///< of the others

  bool is_floating() const { return dtype == DType::f32; }
  std::size_t size() const { return is_floating() ? floats.size() : ints.size(); }
  double number(std::size_t i) const { return is_floating() ? floats[i] : static_cast<double>(ints[i]); }
};
/// As a tensor.
Tensor host_tensor(const OnnxHost& array, Device device);
using OnnxHostRef = std::shared_ptr<const OnnxHost>;

/// The elements of an array of these sizes. Throws Error where they are too many for the host.
std::size_t host_elements(const std::vector<std::int64_t>& dims);

/// What a run has of a value: a tensor, or what the host knows.
struct OnnxValue {
  Tensor tensor = {};
  OnnxHostRef host = {};
};

class OnnxCall;

/// How an operator is computed.
struct OnnxOperator {
  using Run = void (*)(OnnxCall&);
  int least_inputs = 1, most_inputs = 1;
  /// Names of attributes with the letters of their types: `axis:i pads:I alpha:f mode:s value:t`.
  std::string_view attributes = {};
  Run run = nullptr;      ///< of tensors
  Run on_host = nullptr;  ///< where all inputs are known to the host
};
using OnnxOperators = std::map<std::string, OnnxOperator, std::less<>>;
/// By the operator's name. Names in lower case are the importer's own.
const OnnxOperators& onnx_operators();
/// Add theirs.
/// @{
void add_image_operators(OnnxOperators& table);
void add_view_operators(OnnxOperators& table);
void add_host_operators(OnnxOperators& table);
/// @}

/// A node, with its values as numbers.
struct OnnxStep {
  const OnnxOperator* op = nullptr;
  std::string type = {};
  std::string name = {};
  std::vector<int> inputs = {};  ///< -1: left out
  std::vector<int> outputs = {};
  OnnxAttributes attributes = {};
  int part = -1;                ///< in whose scope it runs
  int quantizer = -1;           ///< of a fake quantization
  std::vector<int> drops = {};  ///< values that nobody reads afterwards
};

/// Tensors of one module of the network.
struct OnnxPartPlan {
  struct Tensor {
    std::string name;
    halfstep::Tensor tensor;
    bool trained;
    int value;
  };
  std::string path;
  std::vector<Tensor> tensors;
};

/// A grid.
struct OnnxQuantizerPlan {
  std::string path;
  quant::FakeQuantizeOptions options;
  std::vector<float> scale;
  std::vector<std::int64_t> zero_point;
};

/// A network as it was read.
struct OnnxPlan {
  std::string file;
  std::int64_t opset = 0;
  int values = 0;  ///< how many
  std::vector<int> inputs, outputs;
  std::vector<OnnxPortInfo> input_ports, output_ports;
  std::vector<OnnxStep> steps;
  std::vector<std::pair<int, OnnxHostRef>> constants;  ///< values that the host knows
  std::vector<OnnxPartPlan> parts;
  std::vector<OnnxQuantizerPlan> quantizers;
  std::int64_t nodes = 0;  ///< in the file
};

/// Throws as load_onnx() does.
OnnxPlan plan_onnx(OnnxModelFile&& model, const std::string& file, bool learned_scales);
/// Throws Error naming file, node and operator.
[[noreturn]] void refuse_step(const std::string& file, const OnnxStep& step, const std::string& why);

/// A step of a run, for those who compute it; `i` counts inputs or outputs.
class OnnxCall {
 public:
  OnnxCall(const OnnxPlan& plan, const OnnxStep& step, std::vector<OnnxValue>& values, Device device, bool training)
      : plan_(plan), step_(step), values_(values), device_(device), training_(training) {}

  const std::string& type() const { return step_.type; }
  std::int64_t opset() const { return plan_.opset; }
  bool training() const { return training_; }
  int inputs() const { return static_cast<int>(step_.inputs.size()); }
  int outputs() const { return static_cast<int>(step_.outputs.size()); }
  bool has(int i) const { return i < inputs() && step_.inputs[static_cast<std::size_t>(i)] >= 0; }
  /// Whether somebody reads the output.
  bool wanted(int i) const { return i < outputs() && step_.outputs[static_cast<std::size_t>(i)] >= 0; }
  bool is_host(int i) const { return has(i) && value(i).host; }
  const OnnxHost& host(int i) const;
  /// The input as a tensor; what the host knows is put on the device.
  Tensor in(int i) const;
  /// Integers that the host knows, such as sizes.
  std::vector<std::int64_t> ints(int i) const;
  /// One number that the host knows.
  double number(int i) const;

  std::int64_t integer(std::string_view name, std::int64_t standard) const;
  double real(std::string_view name, double standard) const;
  std::string text(std::string_view name, std::string_view standard) const;
  std::optional<std::vector<std::int64_t>> list(std::string_view name) const;
  const OnnxAttribute* attribute(std::string_view name) const;
  /// A dimension of `dims`, counted from 0.
  int dim(std::int64_t d, int dims) const;

  void out(Tensor tensor, int i = 0);
  void out(OnnxHost host, int i = 0);
  [[noreturn]] void refuse(const std::string& why) const { refuse_step(plan_.file, step_, why); }

 private:
  const OnnxValue& value(int i) const;
  const OnnxPlan& plan_;
  const OnnxStep& step_;
  std::vector<OnnxValue>& values_;
  const Device device_;
  const bool training_;
};

/// Computes a step on the host, if all that it reads is known there and it has such a form.
bool run_on_host(const OnnxPlan& plan, const OnnxStep& step, std::vector<OnnxValue>& values);

}  // namespace halfstep::io::detail
