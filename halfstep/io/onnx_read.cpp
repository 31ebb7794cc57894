// SPDX-License-Identifier: Apache-2.0
// Reads ONNX files, which nobody vouches for: through protobuf, after a look at how much that would take.
#include <algorithm>
#include <cstring>
#include <limits>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/io/onnx_internal.h"
#include "halfstep/io/read_limits_internal.h"
#include "halfstep/ops/copy.h"
#include "onnx.pb.h"  // made by protoc from onnx.proto

namespace halfstep::io::detail {
namespace {

using std::int64_t;
using std::uint64_t;
using Bytes = std::span<const unsigned char>;

std::string shown(const std::string& name) { return printable_start(name); }

// --- how much memory the messages take

// Messages with messages in them; none holds itself, so that the depth is bounded.
enum class Message : std::uint8_t { model, graph, node, attribute, tensor, port, type, tensor_type, sizes, leaf };

std::optional<Message> inner_message(Message message, uint64_t field) {
  switch (message) {
    case Message::model:
      return field == 7 ? Message::graph : Message::leaf;
    case Message::graph:
      if (field == 1) return Message::node;
      if (field == 5) return Message::tensor;
      if (field == 11 || field == 12) return Message::port;
      return std::nullopt;
    case Message::node:
      return field == 5 ? Message::attribute : Message::leaf;
    case Message::attribute:
      return field == 5 ? Message::tensor : Message::leaf;
    case Message::tensor:
      if (field == 13) return Message::leaf;
      return std::nullopt;
    case Message::port:
      return field == 2 ? Message::type : Message::leaf;
    case Message::type:
      return field == 1 ? Message::tensor_type : Message::leaf;
    case Message::tensor_type:
      return field == 2 ? Message::sizes : Message::leaf;
    case Message::sizes:
      return Message::leaf;
    default:
      return std::nullopt;
  }
}

class Scanner {
 public:
  explicit Scanner(const std::string& file) : file_(file) {}
  // Bytes that the messages' objects take beside what is in them.
  uint64_t scan(Bytes bytes, Message message) {
    constexpr uint64_t kObject = 256;
    uint64_t total = kObject;
    while (!bytes.empty()) {
      const uint64_t key = varint(bytes);
      uint64_t length = 0;
      switch (key & 7) {
        case 0:
          varint(bytes);
          continue;
        case 1:
          length = 8;
          break;
        case 2:
          length = varint(bytes);
          break;
        case 5:
          length = 4;
          break;
        default:
          damaged();
      }
      if (length > bytes.size()) damaged();
      if ((key & 7) == 2) {
        const std::optional<Message> inner = inner_message(message, key >> 3);
        if (inner) {
          total += *inner == Message::leaf ? kObject : scan(bytes.first(static_cast<std::size_t>(length)), *inner);
        }
      }
      bytes = bytes.subspan(static_cast<std::size_t>(length));
    }
    return total;
  }
  [[noreturn]] void damaged() const { fail<IoError>("{}: no ONNX file, or a damaged one", file_); }

 private:
  uint64_t varint(Bytes& bytes) const {
    uint64_t v = 0;
    for (int shift = 0;; shift += 7) {
      if (bytes.empty() || shift > 63) damaged();
      const unsigned char b = bytes[0];
      bytes = bytes.subspan(1);
      v |= static_cast<uint64_t>(b & 127) << shift;
      if (b < 128) return v;
    }
  }
  const std::string& file_;
};

// --- tensors

struct Element {
  DType dtype;        // as it is held
  std::size_t bytes;  // as raw data
};
std::optional<Element> element_of(std::int32_t type) {
  switch (type) {
    case kOnnxFloat:
      return Element{DType::f32, 4};
    case kOnnxUint8:
      return Element{DType::u8, 1};
    case kOnnxInt8:
      return Element{DType::i8, 1};
    case kOnnxUint16:
    case kOnnxInt16:
      return Element{DType::i32, 2};
    case kOnnxInt32:
      return Element{DType::i32, 4};
    case kOnnxInt64:
      return Element{DType::i64, 8};
    case kOnnxBool:
      return Element{DType::boolean, 1};
    case kOnnxFloat16:
      return Element{DType::f16, 2};
    case kOnnxDouble:
      return Element{DType::f64, 8};
    case kOnnxBfloat16:
      return Element{DType::bf16, 2};
    default:
      return std::nullopt;
  }
}

class TensorReader {
 public:
  TensorReader(const std::string& file, const ReadLimits& limits) : file_(file), limits_(limits) {}

  OnnxInitializer tensor(const onnx_file::Tensor& from, const std::string& what) {
    if (from.data_location() == 1 || from.external_data_size() > 0) {
      fail<Error>(
          "{}: {} is in another file, which isn't read; write the network as one file (PyTorch: external_data=False)",
          file_, what);
    }
    const std::optional<Element> element = element_of(from.data_type());
    if (!element) fail<Error>("{}: {} has elements of type {}, which aren't read", file_, what, from.data_type());
    OnnxInitializer result{.name = from.name(), .type = from.data_type(), .dims = {}, .tensor = {}};
    if (from.dims_size() > kMaxDims) {
      fail<Error>("{}: {} has {} dimensions, at most {} are read", file_, what, from.dims_size(), kMaxDims);
    }
    int64_t n = 1;
    Shape sizes;
    for (const int64_t d : from.dims()) {
      if (d < 0) fail<IoError>("{}: {} has a size of {}", file_, what, d);
      if (__builtin_mul_overflow(n, d, &n)) fail<IoError>("{}: {} has more elements than a file holds", file_, what);
      result.dims.push_back(d);
      sizes.push_back(d);
    }
    const std::size_t given = from.has_raw_bytes() ? from.raw_bytes().size() / element->bytes : listed(from);
    const bool whole = !from.has_raw_bytes() || from.raw_bytes().size() % element->bytes == 0;
    if (!whole || given != static_cast<uint64_t>(n)) {
      fail<IoError>("{}: {} {} has {} elements in the file, expected {}", file_, what, sizes.str(), given, n);
    }
    bytes_ += static_cast<uint64_t>(n) * item_size(element->dtype);
    check_bytes(bytes_, limits_, file_);
    result.tensor = empty(sizes, {.dtype = element->dtype, .device = Device{}});
    if (n != 0) fill(result, from, *element, what);
    return result;
  }

 private:
  static std::size_t listed(const onnx_file::Tensor& t) {
    switch (t.data_type()) {
      case kOnnxFloat:
        return static_cast<std::size_t>(t.float_data_size());
      case kOnnxDouble:
        return static_cast<std::size_t>(t.double_data_size());
      case kOnnxInt64:
        return static_cast<std::size_t>(t.int64_data_size());
      default:
        return static_cast<std::size_t>(t.int32_data_size());
    }
  }

  void fill(const OnnxInitializer& to, const onnx_file::Tensor& from, const Element& element,
            const std::string& what) const {
    auto* bytes = static_cast<unsigned char*>(write_raw_data(to.tensor));
    if (!from.has_raw_bytes()) return fill_listed(to, from, bytes);
    const std::string& raw = from.raw_bytes();
    if (to.type == kOnnxBool) {
      for (const char b : raw) {
        if (b != 0 && b != 1) fail<IoError>("{}: {} is bool but holds other values than 0 and 1", file_, what);
      }
    }
    if (to.type != kOnnxInt16 && to.type != kOnnxUint16) {
      std::copy(raw.begin(), raw.end(), bytes);
      return;
    }
    auto* wide = reinterpret_cast<std::int32_t*>(bytes);
    for (std::size_t i = 0; i < raw.size() / element.bytes; ++i) {
      std::uint16_t v = 0;
      std::memcpy(&v, raw.data() + 2 * i, 2);
      wide[i] = to.type == kOnnxInt16 ? static_cast<std::int16_t>(v) : v;
    }
  }

  static void fill_listed(const OnnxInitializer& to, const onnx_file::Tensor& from, unsigned char* bytes) {
    const auto n = static_cast<int>(to.tensor.numel());
    const auto each = [&]<class T>(T*, auto&& value) {
      auto* p = reinterpret_cast<T*>(bytes);
      for (int i = 0; i < n; ++i) p[i] = static_cast<T>(value(i));
    };
    const auto whole = [&](int i) { return from.int32_data(i); };
    switch (to.type) {
      case kOnnxFloat:
        return each(static_cast<float*>(nullptr), [&](int i) { return from.float_data(i); });
      case kOnnxDouble:
        return each(static_cast<double*>(nullptr), [&](int i) { return from.double_data(i); });
      case kOnnxInt64:
        return each(static_cast<int64_t*>(nullptr), [&](int i) { return from.int64_data(i); });
      case kOnnxBool:
        return each(static_cast<std::uint8_t*>(nullptr), [&](int i) { return from.int32_data(i) != 0 ? 1 : 0; });
      case kOnnxInt8:
      case kOnnxUint8:
        return each(static_cast<std::uint8_t*>(nullptr), whole);
      case kOnnxFloat16:
      case kOnnxBfloat16:
        return each(static_cast<std::uint16_t*>(nullptr), whole);
      case kOnnxInt16:
        return each(static_cast<std::int32_t*>(nullptr), [&](int i) { return static_cast<std::int16_t>(whole(i)); });
      case kOnnxUint16:
        return each(static_cast<std::int32_t*>(nullptr), [&](int i) { return static_cast<std::uint16_t>(whole(i)); });
      default:
        return each(static_cast<std::int32_t*>(nullptr), whole);
    }
  }

  const std::string& file_;
  const ReadLimits& limits_;
  uint64_t bytes_ = 0;
};

OnnxAttribute attribute(const onnx_file::Attribute& from, const std::string& file, const std::string& place,
                        TensorReader& reader) {
  OnnxAttribute to{.name = from.name(), .value = {}};
  const auto refuse = [&](const char* what) {
    fail<Error>("{}: {}: attribute '{}' is {}, which isn't read", file, place, shown(from.name()), what);
  };
  switch (from.type()) {
    case onnx_file::Attribute::FLOAT:
      to.value = from.f();
      break;
    case onnx_file::Attribute::INT:
      to.value = static_cast<int64_t>(from.i());
      break;
    case onnx_file::Attribute::STRING:
      to.value = from.s();
      break;
    case onnx_file::Attribute::TENSOR:
      to.value = std::make_shared<const OnnxInitializer>(
          reader.tensor(from.t(), fmt::format("attribute '{}' of {}", shown(from.name()), place)));
      break;
    case onnx_file::Attribute::FLOATS:
      to.value = std::vector<float>(from.floats().begin(), from.floats().end());
      break;
    case onnx_file::Attribute::INTS:
      to.value = std::vector<int64_t>(from.ints().begin(), from.ints().end());
      break;
    case onnx_file::Attribute::STRINGS:
      to.value = std::vector<std::string>(from.strings().begin(), from.strings().end());
      break;
    case onnx_file::Attribute::GRAPH:
      refuse("a graph");
      break;
    default:
      refuse("of an unknown type");
  }
  return to;
}

OnnxPort port(const onnx_file::ValueInfo& from) {
  OnnxPort to{.name = from.name(), .type = from.type().tensor_type().elem_type(), .dims = {}};
  for (const onnx_file::Dimension& d : from.type().tensor_type().shape().dim()) {
    OnnxDim dim{.fixed = d.dim_value()};
    if (!d.has_dim_value()) dim.symbol = d.dim_param().empty() ? "?" : d.dim_param();
    to.dims.push_back(std::move(dim));
  }
  return to;
}

}  // namespace

OnnxModelFile read_onnx(std::span<const unsigned char> bytes, const std::string& file, const ReadLimits& limits) {
  if (bytes.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    fail<IoError>("{}: has {} bytes, and an ONNX file has at most 2 GiB", file, bytes.size());
  }
  check_bytes(bytes.size(), limits, file);
  Scanner scanner(file);
  check_unpacked(scanner.scan(bytes, Message::model), bytes.size(), limits, file);
  onnx_file::Model model;
  if (!model.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) scanner.damaged();
  if (!model.has_graph() || model.opset_import_size() == 0) scanner.damaged();
  OnnxModelFile result;
  result.producer = model.producer_name();
  for (const onnx_file::OperatorSet& set : model.opset_import()) {
    if (set.domain().empty() || set.domain() == "ai.onnx") result.opset = set.version();
  }
  const onnx_file::Graph& graph = model.graph();
  if (graph.sparse_initializer_size() > 0) fail<Error>("{}: has sparse tensors, which aren't read", file);
  TensorReader reader(file, limits);
  result.graph.name = graph.name();
  for (const onnx_file::Tensor& t : graph.initializer()) {
    result.graph.initializers.push_back(reader.tensor(t, fmt::format("tensor '{}'", shown(t.name()))));
  }
  for (const onnx_file::Node& from : graph.node()) {
    const std::string place = fmt::format("node '{}' ({})", shown(from.name()), shown(from.op_type()));
    if (!from.domain().empty() && from.domain() != "ai.onnx") {
      fail<Error>("{}: {}: is an operator of the domain '{}', and only those of ONNX are read", file, place,
                  shown(from.domain()));
    }
    OnnxNode to{.op = from.op_type(), .name = from.name(), .inputs = {}, .outputs = {}, .attributes = {}};
    to.inputs.assign(from.input().begin(), from.input().end());
    to.outputs.assign(from.output().begin(), from.output().end());
    for (const onnx_file::Attribute& a : from.attribute()) {
      to.attributes.push_back(attribute(a, file, place, reader));
    }
    result.graph.nodes.push_back(std::move(to));
  }
  for (const onnx_file::ValueInfo& p : graph.input()) result.graph.inputs.push_back(port(p));
  for (const onnx_file::ValueInfo& p : graph.output()) result.graph.outputs.push_back(port(p));
  return result;
}

}  // namespace halfstep::io::detail
