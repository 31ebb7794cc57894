// SPDX-License-Identifier: Apache-2.0
// The only file that knows how the format is laid out: through protobuf, from onnx.proto.
#include <limits>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/core/text.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/io/onnx_internal.h"
#include "onnx.pb.h"  // made by protoc from onnx.proto

namespace halfstep::io::detail {
namespace {

// What protobuf can write in one message.
constexpr std::size_t kLargest = std::numeric_limits<std::int32_t>::max();

// Names of parameters, inputs and outputs come from the program; the format has UTF-8 only.
std::string kept(const std::string& name) { return is_utf8(name) ? name : kept_name(name); }

void write(onnx_file::Attribute& to, const OnnxAttribute& from) {
  to.set_name(from.name);
  if (const auto* i = std::get_if<std::int64_t>(&from.value)) {
    to.set_i(*i);
    to.set_type(onnx_file::Attribute::INT);
  } else if (const auto* f = std::get_if<float>(&from.value)) {
    to.set_f(*f);
    to.set_type(onnx_file::Attribute::FLOAT);
  } else if (const auto* s = std::get_if<std::string>(&from.value)) {
    to.set_s(*s);
    to.set_type(onnx_file::Attribute::STRING);
  } else {
    for (std::int64_t v : std::get<std::vector<std::int64_t>>(from.value)) to.add_ints(v);
    to.set_type(onnx_file::Attribute::INTS);
  }
}

void write(onnx_file::Node& to, const OnnxNode& from) {
  for (const std::string& s : from.inputs) to.add_input(kept(s));
  for (const std::string& s : from.outputs) to.add_output(kept(s));
  to.set_name(kept(from.name));
  to.set_op_type(from.op);
  for (const OnnxAttribute& a : from.attributes) write(*to.add_attribute(), a);
}

void write(onnx_file::ValueInfo& to, const OnnxPort& from) {
  to.set_name(kept(from.name));
  onnx_file::TensorType& type = *to.mutable_type()->mutable_tensor_type();
  type.set_elem_type(from.type);
  type.mutable_shape();  // there even when it has no dimensions
  for (const OnnxDim& d : from.dims) {
    onnx_file::Dimension& dim = *type.mutable_shape()->add_dim();
    if (!d.symbol.empty()) {
      dim.set_dim_param(d.symbol);
    } else if (d.per_batch == 0) {
      dim.set_dim_value(d.fixed);
    } else {
      dim.set_dim_param(d.per_batch == 1 ? "batch" : fmt::format("{}*batch", d.per_batch));
    }
  }
}

std::size_t bytes_of(const OnnxInitializer& t) {
  return static_cast<std::size_t>(t.tensor.numel()) * t.tensor.item_size();
}

int ir_version(int opset) { return opset <= 18 ? 8 : opset <= 20 ? 9 : 10; }

}  // namespace

std::int64_t write_onnx(const std::filesystem::path& path, const OnnxGraph& graph, int opset) {
  onnx_file::Model model;
  model.set_ir_version(ir_version(opset));
  model.set_producer_name("Halfstep");
  model.set_producer_version(HALFSTEP_VERSION);
  model.add_opset_import()->set_version(opset);
  model.mutable_opset_import(0)->set_domain("");
  onnx_file::Graph& g = *model.mutable_graph();
  g.set_name(kept(graph.name));
  for (const OnnxNode& n : graph.nodes) write(*g.add_node(), n);
  for (const OnnxInitializer& t : graph.initializers) {
    onnx_file::Tensor& to = *g.add_initializer();
    for (std::int64_t d : t.dims) to.add_dims(d);
    to.set_data_type(t.type);
    to.set_name(kept(t.name));
    to.set_raw_bytes(t.tensor.impl()->data(), bytes_of(t));
  }
  for (const OnnxPort& p : graph.inputs) write(*g.add_input(), p);
  for (const OnnxPort& p : graph.outputs) write(*g.add_output(), p);
  // The builder has counted the tensors; this is with all around them.
  if (model.ByteSizeLong() > kLargest) {
    fail<IoError>("{}: takes {} bytes, and an ONNX file has at most 2 GiB", shown_path(path), model.ByteSizeLong());
  }
  std::string text;
  if (!model.SerializeToString(&text)) fail<InternalError>("{}: protobuf could not write it", shown_path(path));
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
  return static_cast<std::int64_t>(text.size());
}

}  // namespace halfstep::io::detail
