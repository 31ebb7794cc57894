// SPDX-License-Identifier: Apache-2.0
// Reads ONNX files for tests: a decoder of protobuf's wire format of its own, with ONNX's field numbers written out, so
// that what the exporter's messages are called and numbered is checked against something else.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::test {

/// One message: numbers (varints and 32-bit floats' bits) and bytes by field number.
struct WireMessage {
  std::map<int, std::vector<std::uint64_t>> numbers;
  std::map<int, std::vector<std::string>> bytes;

  explicit WireMessage(std::string_view text) {
    while (!text.empty()) {
      const std::uint64_t key = varint(text);
      const int field = static_cast<int>(key >> 3);
      switch (key & 7) {
        case 0:
          numbers[field].push_back(varint(text));
          break;
        case 2: {
          const std::uint64_t n = varint(text);
          if (n > text.size()) throw std::runtime_error("cut short");
          bytes[field].emplace_back(text.substr(0, n));
          text.remove_prefix(n);
          break;
        }
        case 5: {
          std::uint32_t v = 0;
          if (text.size() < 4) throw std::runtime_error("cut short");
          std::memcpy(&v, text.data(), 4);
          numbers[field].push_back(v);
          text.remove_prefix(4);
          break;
        }
        default:
          throw std::runtime_error("unknown wire type");
      }
    }
  }
  std::int64_t number(int field) const { return static_cast<std::int64_t>(numbers.at(field).at(0)); }
  std::string text(int field) const { return bytes.contains(field) ? bytes.at(field).at(0) : std::string(); }
  std::vector<std::string> texts(int field) const {
    return bytes.contains(field) ? bytes.at(field) : std::vector<std::string>();
  }
  std::vector<std::int64_t> list(int field) const {
    if (!numbers.contains(field)) return {};
    return {numbers.at(field).begin(), numbers.at(field).end()};
  }

 private:
  static std::uint64_t varint(std::string_view& text) {
    std::uint64_t v = 0;
    for (int shift = 0;; shift += 7) {
      if (text.empty() || shift > 63) throw std::runtime_error("cut short");
      const auto b = static_cast<unsigned char>(text[0]);
      text.remove_prefix(1);
      v |= static_cast<std::uint64_t>(b & 127) << shift;
      if (b < 128) return v;
    }
  }
};

struct OnnxFile {
  struct Node {
    std::string op, name;
    std::vector<std::string> inputs, outputs;
    std::map<std::string, std::vector<std::int64_t>> ints;  ///< attributes of one integer or several
    std::map<std::string, float> floats;
    std::map<std::string, std::string> strings;
  };
  struct Tensor {
    std::int64_t type;
    std::vector<std::int64_t> dims;
    std::string data;
    template <class T>
    std::vector<T> values() const {
      std::vector<T> v(data.size() / sizeof(T));
      std::memcpy(v.data(), data.data(), v.size() * sizeof(T));
      return v;
    }
  };
  struct Port {
    std::string name;
    std::int64_t type;
    std::vector<std::string> dims;  ///< numbers as text
  };

  std::int64_t ir_version, opset;
  std::string producer, graph_name;
  std::vector<Node> nodes;
  std::map<std::string, Tensor> initializers;
  std::vector<std::string> initializer_names;
  std::vector<Port> inputs, outputs;

  /// The operators' types, in order.
  std::vector<std::string> ops() const {
    std::vector<std::string> list;
    for (const Node& n : nodes) list.push_back(n.op);
    return list;
  }

  explicit OnnxFile(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const WireMessage model(text);
    ir_version = model.number(1);
    producer = model.text(2);
    opset = WireMessage(model.text(8)).number(2);
    const WireMessage graph(model.text(7));
    graph_name = graph.text(2);
    for (const std::string& t : graph.texts(1)) nodes.push_back(node(WireMessage(t)));
    for (const std::string& t : graph.texts(5)) {
      const WireMessage m(t);
      initializer_names.push_back(m.text(8));
      initializers[m.text(8)] = {.type = m.number(2), .dims = m.list(1), .data = m.text(9)};
    }
    for (const std::string& t : graph.texts(11)) inputs.push_back(port(WireMessage(t)));
    for (const std::string& t : graph.texts(12)) outputs.push_back(port(WireMessage(t)));
  }

 private:
  static Node node(const WireMessage& m) {
    Node n{.op = m.text(4),
           .name = m.text(3),
           .inputs = m.texts(1),
           .outputs = m.texts(2),
           .ints = {},
           .floats = {},
           .strings = {}};
    for (const std::string& t : m.texts(5)) {
      const WireMessage a(t);
      const std::string name = a.text(1);
      switch (a.number(20)) {
        case 1: {
          const auto bits = static_cast<std::uint32_t>(a.number(2));
          std::memcpy(&n.floats[name], &bits, 4);
          break;
        }
        case 2:
          n.ints[name] = a.list(3);
          break;
        case 3:
          n.strings[name] = a.text(4);
          break;
        case 7:
          n.ints[name] = a.list(8);
          break;
        default:
          throw std::runtime_error("unknown type of attribute");
      }
    }
    return n;
  }
  static Port port(const WireMessage& m) {
    const WireMessage type(WireMessage(m.text(2)).text(1));
    Port p{.name = m.text(1), .type = type.number(1), .dims = {}};
    for (const std::string& t : WireMessage(type.text(2)).texts(1)) {
      const WireMessage dim(t);
      p.dims.push_back(dim.numbers.contains(1) ? std::to_string(dim.number(1)) : dim.text(2));
    }
    return p;
  }
};

}  // namespace halfstep::test
