// SPDX-License-Identifier: Apache-2.0
// Internal: makes the plan of a network of an ONNX graph: nodes and steps (onnx_plan.cpp), tensors and grids
// (onnx_plan_tensors.cpp).
#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "halfstep/io/onnx_import_internal.h"

namespace halfstep::io::detail {

/// What an operator takes an input for.
enum class OnnxUse : std::uint8_t { host, weight, bias, mean, variance, operand, other };
/// What `op` takes its input `i` for.
OnnxUse use_of(const std::string& op, std::size_t i);

/// A tensor of the file.
struct OnnxSource {
  OnnxInitializer data;
  bool made_up = false;                ///< its name, or that of a Constant
  int as_number = -1, as_tensor = -1;  ///< its values, once somebody reads it
};

/// A grid as QuantizeLinear and DequantizeLinear have it.
struct OnnxFileGrid {
  std::vector<float> scale;
  std::vector<std::int64_t> zero_point;
  std::int32_t type = kOnnxUint8;
  std::optional<std::int64_t> axis;
  bool operator==(const OnnxFileGrid&) const = default;
};

/// For one file.
class OnnxPlanner {
 public:
  OnnxPlanner(OnnxModelFile&& model, const std::string& file, bool learned)
      : model_(std::move(model)), graph_(model_.graph), learned_(learned) {
    plan_.file = file;
    plan_.opset = model_.opset;
  }
  OnnxPlan plan();

 private:
  [[noreturn]] void refuse(const OnnxNode& node, const std::string& why) const;
  void take_tensors();
  void check_nodes();
  void take_constant(const OnnxNode& n);
  void check(const OnnxNode& n) const;
  void drop_unread();
  OnnxPortInfo info(const OnnxPort& p) const;
  void take_ports();
  void take_outputs();
  int new_value(const std::string& name);

  // onnx_plan_tensors.cpp
  static OnnxHostRef host_of(const OnnxInitializer& t);
  static bool goes_to_host(const OnnxSource& s, OnnxUse use);
  int value_of(const OnnxNode& n, const std::string& name, OnnxUse use);
  int constant(OnnxHostRef h);
  int hold(const std::string& wanted, Tensor tensor, bool trained);

  // grids
  const OnnxInitializer& constant_of(const OnnxNode& n, std::size_t i, const char* what) const;
  OnnxFileGrid grid_of(const OnnxNode& n, std::int32_t type) const;
  int quantizer(const OnnxNode& n, const std::string& path, const OnnxFileGrid& g, bool narrow);
  int fake_quantized(const OnnxNode& n, int from, int quantizer_index);
  void quantize_step(const OnnxNode& n);
  std::string name_of_value(int value) const;
  void dequantize_step(const OnnxNode& n);
  int weight_of(const OnnxNode& reader, const std::string& name, OnnxUse use, bool transposed);
  static Tensor dequantized(const Tensor& q, const OnnxFileGrid& g);

  // steps
  void step(OnnxNode& n);
  int input_of(const OnnxNode& n, std::size_t i);
  const OnnxNode* gate_of(const OnnxNode& n);
  static bool is_sixth(const OnnxNode& n);
  void add_step(const OnnxNode& n, const std::string& type, std::vector<int> inputs, const OnnxNode& last);
  bool fold(const OnnxStep& s);
  bool linear_step(OnnxNode& n);
  bool is_row(const std::string& name, std::int64_t size) const;
  void find_last_reads();

  OnnxModelFile model_;
  OnnxGraph& graph_;
  const bool learned_;
  OnnxPlan plan_;
  std::map<std::string, OnnxSource> sources_;
  std::unordered_map<std::string, int> values_;                   // by name, of what steps make
  std::unordered_map<std::string, int> readers_;                  // how many
  std::unordered_map<std::string, std::size_t> reader_, maker_;   // nodes
  std::unordered_map<const OnnxNode*, const OnnxNode*> gated_;    // products with a gate
  std::unordered_set<const OnnxNode*> consumed_;                  // nodes that are part of another's step
  std::map<std::string, std::pair<int, OnnxFileGrid>> integers_;  // what QuantizeLinear makes: the value on its grid
  std::unordered_map<std::string, const OnnxNode*> weights_;      // DequantizeLinear of tensors of the file, by result
  std::map<std::string, int> made_weights_;
  std::vector<OnnxValue> host_;  // by value
  std::size_t folded_ = 0;
  std::unordered_set<std::string> names_;  // of tensors and grids
  std::unordered_map<std::string, std::size_t> part_of_path_;
  std::unordered_map<int, int> part_of_;  // by value
};

}  // namespace halfstep::io::detail
