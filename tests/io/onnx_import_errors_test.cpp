// SPDX-License-Identifier: Apache-2.0
// What load_onnx refuses, and that no bytes harm it. Files are made here, field by field.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/text.h"
#include "halfstep/io/onnx_import.h"
#include "halfstep/ops/create.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

using Strings = std::vector<std::string>;
using Ints = std::vector<std::int64_t>;

// Protobuf's wire format.
std::string varint(std::uint64_t v) {
  std::string s;
  for (; v >= 128; v >>= 7) s += static_cast<char>((v & 127) | 128);
  return s + static_cast<char>(v);
}
std::string number(int field, std::int64_t v) {
  return varint(static_cast<std::uint64_t>(field) << 3) + varint(static_cast<std::uint64_t>(v));
}
std::string bytes(int field, const std::string& s) {
  return varint(static_cast<std::uint64_t>(field) << 3 | 2) + varint(s.size()) + s;
}
// ONNX's messages by their field numbers.
std::string tensor_message(const std::string& name, int type, const Ints& dims, const std::string& data) {
  std::string s;
  for (const std::int64_t d : dims) s += number(1, d);
  return s + number(2, type) + bytes(8, name) + bytes(9, data);
}
std::string floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}
std::string whole(const Ints& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(std::int64_t)};
}
std::string ints_attribute(const std::string& name, const Ints& values) {
  std::string s = bytes(1, name) + number(20, 7);
  for (const std::int64_t v : values) s += number(8, v);
  return s;
}
std::string int_attribute(const std::string& name, std::int64_t v) {
  return bytes(1, name) + number(20, 2) + number(3, v);
}
std::string node(const std::string& op, const Strings& inputs, const Strings& outputs, const Strings& attributes = {},
                 const std::string& domain = "") {
  std::string s;
  for (const std::string& i : inputs) s += bytes(1, i);
  for (const std::string& o : outputs) s += bytes(2, o);
  s += bytes(3, "the " + op) + bytes(4, op);
  for (const std::string& a : attributes) s += bytes(5, a);
  if (!domain.empty()) s += bytes(7, domain);
  return s;
}
std::string port(const std::string& name, const Ints& dims, int type = 1) {
  std::string shape;
  for (const std::int64_t d : dims) shape += bytes(1, number(1, d));
  return bytes(1, name) + bytes(2, bytes(1, number(1, type) + bytes(2, shape)));
}
// A file from x to y.
std::string model(const Strings& nodes, const Strings& tensors = {}, std::int64_t opset = 17,
                  const Ints& sizes = {2, 3}) {
  std::string graph;
  for (const std::string& n : nodes) graph += bytes(1, n);
  for (const std::string& t : tensors) graph += bytes(5, t);
  graph += bytes(11, port("x", sizes)) + bytes(12, port("y", sizes));
  return number(1, 8) + bytes(7, graph) + bytes(8, number(2, opset));
}
io::OnnxNetwork parsed(const std::string& file, const io::OnnxImportOptions& options = {}) {
  return io::parse_onnx({reinterpret_cast<const unsigned char*>(file.data()), file.size()}, "net.onnx", options);
}
std::string error_of(const std::string& file, const io::OnnxImportOptions& options = {}) {
  return test::error_of<Error>([&] { parsed(file, options); });
}
std::string error_of_run(const std::string& file, const Tensor& x) {
  const io::OnnxNetwork net = parsed(file);
  return test::error_of<Error>([&] { (void)net(x); });
}

TEST(OnnxImportErrors, NameFileNodeAndOperator) {
  const auto expect = [](const std::string& file, const std::string& text) {
    const std::string error = error_of(file);
    EXPECT_NE(error.find(text), std::string::npos) << error;
    EXPECT_EQ(error.find("net.onnx: "), 0u) << error;
  };
  expect(model({node("Loop", {"x"}, {"y"})}), "net.onnx: node 'the Loop' (Loop): is no operator that is read");
  expect(model({node("linear", {"x", "x"}, {"y"})}), "node 'the linear' (linear): is no operator that is read");
  expect(model({node("Relu", {"x"}, {"y"}, {int_attribute("axis", 1)})}),
         "node 'the Relu' (Relu): attribute 'axis' isn't supported");
  expect(model({node("Softmax", {"x"}, {"y"}, {ints_attribute("axis", {1})})}), "attribute 'axis' isn't supported");
  expect(model({node("If", {"x"}, {"y"}, {bytes(1, "then_branch") + number(20, 5)})}),
         "node 'the If' (If): attribute 'then_branch' is a graph, which isn't read");
  expect(model({node("Gelu", {"x"}, {"y"}, {}, "com.microsoft")}),
         "node 'the Gelu' (Gelu): is an operator of the domain 'com.microsoft'");
  expect(model({node("Add", {"x"}, {"y"})}), "node 'the Add' (Add): expected 2 to 2 inputs, got 1");
  expect(model({node("Add", {"x", ""}, {"y"})}), "node 'the Add' (Add): input 1 is left out");
  expect(model({node("Relu", {"z"}, {"y"})}), "node 'the Relu' (Relu): reads 'z', which nothing before it makes");
  expect(model({node("Relu", {"y"}, {"z"}), node("Relu", {"x"}, {"y"})}), "reads 'y', which nothing before it makes");
  expect(model({node("Relu", {"x"}, {"y"}), node("Relu", {"x"}, {"y"})}), "makes 'y', which is there already");
  expect(model({}), "nothing makes it");
  expect(model({node("Relu", {"x"}, {"y"})}, {}, 10), "expected ONNX's operators of opset 11 to 24, got 10");
  expect(model({node("QuantizeLinear", {"x", "s"}, {"q"}), node("Relu", {"q"}, {"y"})},
               {tensor_message("s", 1, {}, floats({0.1F}))}),
         "reads integers of QuantizeLinear, which only DequantizeLinear does here");
  expect(model({node("QuantizeLinear", {"x", "s"}, {"q"}), node("DequantizeLinear", {"q", "t"}, {"y"})},
               {tensor_message("s", 1, {}, floats({0.1F})), tensor_message("t", 1, {}, floats({0.2F}))}),
         "has another scale or zero point than the QuantizeLinear that it reads");
  expect(model({node("QuantizeLinear", {"x", "s"}, {"q"}), node("DequantizeLinear", {"q", "s"}, {"y"})},
               {tensor_message("s", 1, {}, floats({0}))}),
         "expected scales above 0, got 0");
}

TEST(OnnxImportErrors, OfTensors) {
  const auto expect = [](const std::string& tensor, const std::string& text) {
    const std::string error = error_of(model({node("Add", {"x", "w"}, {"y"})}, {tensor}));
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  expect(tensor_message("w", 1, {3}, floats({1, 2})), "tensor 'w' [3] has 2 elements in the file, expected 3");
  expect(tensor_message("w", 1, {3}, std::string(11, 'a')), "expected 3");
  expect(tensor_message("w", 1, {-1}, ""), "has a size of -1");
  expect(tensor_message("w", 1, {1LL << 40, 1LL << 40}, ""), "has more elements than a file holds");
  expect(tensor_message("w", 1, {1, 1, 1, 1, 1, 1, 1, 1, 1}, floats({1})), "has 9 dimensions, at most 8 are read");
  expect(tensor_message("w", 8, {1}, "a"), "has elements of type 8, which aren't read");
  expect(tensor_message("w", 9, {1}, std::string(1, '\2')), "is bool but holds other values than 0 and 1");
  expect(tensor_message("w", 1, {1}, "") + number(14, 1), "is in another file, which isn't read");
  const std::string twice = tensor_message("w", 1, {3}, floats({1, 2, 3}));
  const std::string error = error_of(model({node("Add", {"x", "w"}, {"y"})}, {twice, twice}));
  EXPECT_NE(error.find("two tensors are called 'w'"), std::string::npos) << error;
}

TEST(OnnxImportErrors, OfRunsNameTheNodeToo) {
  const Tensor x = ones({2, 3});
  // The size of a reshape from the values of the input.
  std::string error = error_of_run(
      model({node("Cast", {"x"}, {"s"}, {int_attribute("to", 7)}), node("Reshape", {"x", "s"}, {"y"})}), x);
  EXPECT_NE(error.find("net.onnx: node 'the Reshape' (Reshape): input 1 depends on the values of tensors"),
            std::string::npos)
      << error;
  error =
      error_of_run(model({node("Conv", {"x", "w"}, {"y"})}, {tensor_message("w", 1, {1, 1, 1, 1}, floats({1}))}), x);
  EXPECT_NE(error.find("net.onnx: node 'the Conv' (Conv): "), std::string::npos) << error;
  error = error_of_run(model({node("Softmax", {"x"}, {"y"}, {int_attribute("axis", 5)})}), x);
  EXPECT_NE(error.find("node 'the Softmax' (Softmax): axis 5 of 2 dimensions"), std::string::npos) << error;
  error = error_of_run(model({node("Gather", {"x", "i"}, {"y"})}, {tensor_message("i", 7, {}, whole({7}))}), x);
  EXPECT_NE(error.find("node 'the Gather' (Gather): index 7 of 2 elements"), std::string::npos) << error;
}

// Sizes that the graph computes: those of the input, halved, and back.
TEST(OnnxImportSizes, AreComputedOnTheHost) {
  const Strings nodes{node("Shape", {"x"}, {"s"}),
                      node("Gather", {"s", "one"}, {"n"}),
                      node("Div", {"n", "two"}, {"h"}),
                      node("Unsqueeze", {"h", "zero"}, {"u"}),
                      node("Concat", {"minus", "u"}, {"t"}, {int_attribute("axis", 0)}),
                      node("Reshape", {"x", "t"}, {"r"}),
                      node("Slice", {"r", "minus", "least", "zero", "minus"}, {"y"})};
  const Strings tensors{tensor_message("one", 7, {}, whole({1})), tensor_message("two", 7, {}, whole({2})),
                        tensor_message("zero", 7, {1}, whole({0})), tensor_message("minus", 7, {1}, whole({-1})),
                        tensor_message("least", 7, {1}, whole({std::numeric_limits<std::int64_t>::min()}))};
  const io::OnnxNetwork net = parsed(model(nodes, tensors, 17, {2, 4}));
  const Tensor y = net(tensor({1, 2, 3, 4, 5, 6, 7, 8}, {2, 4}));
  EXPECT_EQ(y.sizes(), (Shape{4, 2}));
  EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{7, 8, 5, 6, 3, 4, 1, 2}));
}

// Every prefix of a file, and every file with one byte changed, is read or refused with an Error.
TEST(OnnxImportErrors, DamageIsRefused) {
  for (const char* name : {"residual", "quantized", "attention_script"}) {
    std::ifstream stream(test::goldens_dir() / "onnx" / (std::string(name) + ".onnx"), std::ios::binary);
    const std::string file{std::istreambuf_iterator<char>(stream), {}};
    ASSERT_GT(file.size(), 1000u);
    const auto reads = [&](const std::string& damaged) {
      try {
        parsed(damaged, {.limits = {.max_bytes = 1 << 22, .max_unpacked = 1 << 22}});
        return true;
      } catch (const Error& e) {
        EXPECT_EQ(printable(e.what()), e.what());
        return false;
      }
    };
    EXPECT_TRUE(reads(file));
    int refused = 0;
    for (std::size_t n = 0; n < file.size(); n += 7) refused += !reads(file.substr(0, n));
    EXPECT_EQ(refused, static_cast<int>((file.size() + 6) / 7));
    for (std::size_t i = 0; i < file.size(); i += 5) {
      std::string damaged = file;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << i % 8));
      (void)reads(damaged);
    }
  }
}

TEST(OnnxImportErrors, LimitsHold) {
  const std::string file =
      model({node("Add", {"x", "w"}, {"y"})}, {tensor_message("w", 1, {4096}, std::string(4 * 4096, '\0'))});
  EXPECT_NE(error_of(file, {.limits = {.max_bytes = 1000}}).find("at most 1000 are allowed"), std::string::npos);
  // Empty messages take more memory than they take in the file.
  std::string graph;
  for (int i = 0; i < 100000; ++i) graph += bytes(1, "");
  const std::string many = bytes(7, graph) + bytes(8, number(2, 17));
  EXPECT_NE(error_of(many, {.limits = {.max_bytes = 1 << 30, .max_unpacked = 1 << 20}}).find("max-unpacked"),
            std::string::npos);
  // What is computed when the file is read has its bound: numbers that double 40 times.
  Strings nodes{node("Concat", {"w", "w"}, {"a0"}, {int_attribute("axis", 0)})};
  for (int i = 0; i < 40; ++i) {
    const std::string a = "a" + std::to_string(i), b = "a" + std::to_string(i + 1);
    nodes.push_back(node("Concat", {a, a}, {b}, {int_attribute("axis", 0)}));
  }
  nodes.push_back(node("Reshape", {"x", "a40"}, {"y"}));
  const std::string error = error_of(model(nodes, {tensor_message("w", 7, {2}, whole({1, 2}))}));
  EXPECT_NE(error.find("elements, which the host doesn't compute"), std::string::npos) << error;
  test::TemporaryDir folder;
  const std::string missing = test::error_of<IoError>([&] { io::load_onnx(folder.path() / "none.onnx"); });
  EXPECT_NE(missing.find("none.onnx"), std::string::npos) << missing;
}

}  // namespace
}  // namespace halfstep
