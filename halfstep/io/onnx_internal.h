// SPDX-License-Identifier: Apache-2.0
// Internal: how a network becomes an ONNX graph. A builder walks over the trace of a run (nn/trace.h) and has each call
// written as nodes (onnx_builder.cpp) by its op's translator (onnx_ops.cpp, onnx_image_ops.cpp), with what is quantized
// as integers (onnx_quant.cpp); onnx_file.cpp writes the graph, and onnx_read.cpp reads one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/io/onnx.h"
#include "halfstep/io/read_limits.h"
#include "halfstep/nn/trace.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/quant/quantization.h"

namespace halfstep::io::detail {

// --- the graph

/// ONNX's numbers for element types.
enum OnnxType : std::int32_t {
  kOnnxFloat = 1,
  kOnnxUint8 = 2,
  kOnnxInt8 = 3,
  kOnnxUint16 = 4,
  kOnnxInt16 = 5,
  kOnnxInt32 = 6,
  kOnnxInt64 = 7,
  kOnnxBool = 9,
  kOnnxFloat16 = 10,
  kOnnxDouble = 11,
  kOnnxBfloat16 = 16,
  kOnnxInt4 = 22,
};

struct OnnxInitializer {
  std::string name;
  std::int32_t type;
  std::vector<std::int64_t> dims;
  Tensor tensor;  ///< on the CPU, row-major, of the type; its sizes may be others
};

struct OnnxAttribute {
  std::string name;
  // The last three are only read.
  std::variant<std::int64_t, float, std::string, std::vector<std::int64_t>, std::vector<float>,
               std::vector<std::string>, std::shared_ptr<const OnnxInitializer>>
      value;
  bool operator==(const OnnxAttribute&) const = default;
};
using OnnxAttributes = std::vector<OnnxAttribute>;

struct OnnxNode {
  std::string op;
  std::string name;
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  OnnxAttributes attributes;
  bool operator==(const OnnxNode&) const = default;
};

/// A size: `fixed`, or `per_batch` times the batch where that isn't 0, or one with a name.
struct OnnxDim {
  std::int64_t fixed = 0;
  std::int64_t per_batch = 0;
  std::string symbol = {};  ///< name of a size that only a run tells; empty: it is one of those above
  bool operator==(const OnnxDim&) const = default;
};
using OnnxDims = std::vector<OnnxDim>;

struct OnnxPort {
  std::string name;
  std::int32_t type;
  OnnxDims dims;
};

struct OnnxGraph {
  std::string name;
  std::vector<OnnxNode> nodes;
  std::vector<OnnxInitializer> initializers;
  std::vector<OnnxPort> inputs;
  std::vector<OnnxPort> outputs;
};

// --- quantization

/// A grid of integers on which a tensor is put: (q - zero_point) * scale with q from `least` to `most`.
struct OnnxGrid {
  std::string name = {};
  bool weight = false;  ///< of a constant: its integers are stored
  std::vector<float> scale = {};
  std::vector<std::int64_t> zero_point = {};  ///< as many
  std::int64_t axis = -1;                     ///< of the channels; -1: one scale for all
  std::int64_t least = 0, most = 255;

  /// The narrowest of ONNX's types that has the integers.
  std::int32_t type() const;
  bool has_16_bits() const { return type() == kOnnxInt16 || type() == kOnnxUint16; }
};
/// By the number of the call and of its input; -1: its result.
using OnnxGrids = std::map<std::pair<int, int>, OnnxGrid>;
/// The grids of a prepared network, and those of fake quantizations that a trace calls, which are taken out of it:
/// those of parameters become ones of the calls that read them, others are calls that do nothing.
OnnxGrids take_grids(nn::Trace& trace, const std::vector<quant::TracedGrid>& planned);

/// Writes the file atomically and returns its size. Throws IoError.
std::int64_t write_onnx(const std::filesystem::path& path, const OnnxGraph& graph, int opset);

/// A file as it was read. Types of 16-bit integers are held as i32, bfloat16 and float16 as they are.
struct OnnxModelFile {
  OnnxGraph graph;
  std::int64_t opset = 0;
  std::string producer;
};
/// Reads a file's bytes; `name` is for messages. Throws IoError, also for what is beyond the limits, and Error for what
/// the format has and Halfstep doesn't: data in other files, operators of other domains, sparse tensors, functions.
OnnxModelFile read_onnx(std::span<const unsigned char> bytes, const std::string& name, const ReadLimits& limits);

/// Throws Error for options out of range.
void check_nms(const OnnxNms& options);
/// Adds it behind the graph's output, which becomes `output`. Throws Error for another output than predictions.
void add_nms(OnnxGraph& graph, const OnnxNms& options, const std::string& output);

// --- translation

/// Makes the graph of one trace. With a dynamic batch there is a second trace, with another number of samples.
class OnnxBuilder {
 public:
  OnnxBuilder(const nn::Trace& trace, const nn::Trace* other, const OnnxGrids& grids, const OnnxOptions& options);
  OnnxGraph build();

  // For translators. They speak of the call that is being translated; `i` counts its inputs or outputs.
  int opset() const { return options_.opset; }
  int inputs() const { return static_cast<int>(call_->inputs.size()); }
  bool has(int i) const {
    if (product_ && i == 2) return !product_->bias.empty();
    return i < inputs() && call_->inputs[static_cast<std::size_t>(i)] >= 0;
  }
  /// The input's name in the graph; an empty one where there is none, which is how ONNX leaves inputs out.
  std::string in(int i);
  /// The input as float32, whatever the other floating tensors of the file are.
  std::string in_float(int i);
  const Tensor& in_tensor(int i) const { return value_in(i).tensor; }
  const Tensor& out_tensor(int i = 0) const { return value_out(i).tensor; }
  const Shape& in_sizes(int i) const { return in_tensor(i).sizes(); }
  const Shape& out_sizes(int i = 0) const { return out_tensor(i).sizes(); }
  OnnxDims in_dims(int i) const { return dims_of(call_->inputs[static_cast<std::size_t>(i)]); }
  OnnxDims out_dims(int i = 0) const { return dims_of(call_->outputs[static_cast<std::size_t>(i)]); }
  /// Whether anything reads the output.
  bool wanted(int i) const;
  template <class A>
  const A& attributes() const {
    check_attributes(sizeof(A));
    return *reinterpret_cast<const A*>(call_->attributes.data());
  }
  /// ONNX's type of tensors of a dtype in this file.
  std::int32_t type_of(DType dtype) const;

  /// Adds an operator and returns the name of its result.
  std::string node(std::string_view op, std::vector<std::string> inputs, OnnxAttributes attributes = {});
  /// Adds the operator whose result is the call's output `i`.
  void result(std::string_view op, std::vector<std::string> inputs, OnnxAttributes attributes = {}, int i = 0);
  /// The call's output `i` is this.
  void same(const std::string& name, int i = 0);

  /// Constants: a list of integers, and a number of the type that `dtype` has in the file.
  std::string ints(const std::vector<std::int64_t>& values);
  std::string floats(const std::vector<float>& values);  ///< float32 whatever the file's dtype is
  std::string number(double value, DType dtype);
  std::string number(const ScalarValue& value, DType dtype);
  /// `n` times a floating number; `in_float32`: whatever the other floating tensors are.
  std::string filled(std::int64_t n, double value, bool in_float32 = false);
  /// A tensor as a constant.
  std::string constant(const Tensor& tensor);
  /// Input 1, integers of a linear layer of 8 or 4 bits (two in a byte), as the numbers that they and the scales of
  /// input 2 stand for: DequantizeLinear.
  std::string dequantized_weight(int bits);
  /// `x` of sizes `from` with other sizes; the operator is the call's result if `final`.
  std::string reshape(const std::string& x, const OnnxDims& from, const OnnxDims& to, bool final = false);
  /// Sizes as a tensor: a constant, or computed from the graph's input.
  std::string shape_tensor(const OnnxDims& dims);

  /// Throws: the call can't be written, since ...
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  const nn::TracedValue& value_in(int i) const {
    return trace_.values[static_cast<std::size_t>(call_->inputs[static_cast<std::size_t>(i)])];
  }
  const nn::TracedValue& value_out(int i) const {
    return trace_.values[static_cast<std::size_t>(call_->outputs[static_cast<std::size_t>(i)])];
  }
  OnnxDims dims_of(int value) const;
  void check_attributes(std::size_t size) const;
  void find_needed();
  std::string name_of(int value, bool in_float32);
  std::string output_name(int value, int i);
  std::string embed(int value, bool in_float32);
  std::string broadcast_constant(const nn::TracedValue& value, const OnnxDims& dims);
  Tensor converted(const Tensor& tensor, bool in_float32, const std::string& what);
  std::string add_initializer(std::string name, const Tensor& tensor, std::vector<std::int64_t> dims,
                              std::int32_t type);
  std::string unique(const std::string& name);
  void add_ports();
  void add_outputs();
  void translate();

  // onnx_quant.cpp
  /// A product with a weight in integers.
  struct Product {
    std::string weight, bias;  // what it reads; no bias: an empty one
    Tensor late_bias = {};     // f32 [channels], to be added behind it
  };
  const OnnxGrid* grid_at(int input) const;
  const OnnxGrid* grid_of(int value) const;
  int norm_behind() const;
  std::string on_grid(const std::string& x, const OnnxGrid& grid, const std::string& as);
  std::string input_on_grid(int value, const OnnxGrid& grid);
  std::string weight_on_grid(int value, const OnnxGrid& grid);
  std::string stored(const OnnxGrid& grid, const Tensor& integers);
  void begin_product();
  void add_late_bias();
  std::string grid_scale(const OnnxGrid& grid);
  std::string grid_zero_point(const OnnxGrid& grid);

  const nn::Trace& trace_;
  const nn::Trace* other_;
  const OnnxGrids& grids_;
  const OnnxOptions& options_;
  const nn::TracedCall* call_ = nullptr;
  int index_ = -1;                  // of the call in the trace
  std::optional<Product> product_;  // which the call is
  std::vector<int> makers_;         // by value: the call that makes it, or -1
  std::vector<int> reader_;         // by value: the one call that reads it, or -1
  std::set<int> folded_;            // batch norms that are in the weights before them
  std::set<int> again_;             // calls whose results lie on a grid, and are put on it once more
  std::map<std::pair<int, std::string>, std::string> on_grids_;                // names by value and grid
  std::map<const OnnxGrid*, std::pair<std::string, std::string>> grid_names_;  // of scales and zero points
  OnnxGraph graph_;
  std::vector<bool> needed_;                      // by value
  std::map<int, std::string> names_;              // of values
  std::map<int, std::string> in_float_;           // of values, as float32 beside another dtype
  std::set<std::string> taken_;                   // names
  std::map<std::string, std::string> constants_;  // names by contents
  std::int64_t bytes_ = 0;                        // of what was embedded
  std::string batch_;                             // the size of the batch as a tensor, once it was asked for
};

/// Writes the builder's call as nodes.
using OnnxTranslator = void (*)(OnnxBuilder&);
using OnnxTranslators = std::map<std::string_view, OnnxTranslator>;
/// By the op's name.
const OnnxTranslators& onnx_translators();
/// Adds those of convolution, pooling, resizing and padding.
void add_image_translators(OnnxTranslators& table);

}  // namespace halfstep::io::detail
