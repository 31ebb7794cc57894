// SPDX-License-Identifier: Apache-2.0
// Quantized ONNX files, imported and run in integers, against what ONNX Runtime computes with them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "halfstep/infer/parity.h"
#include "halfstep/infer/session.h"
#include "halfstep/io/onnx_import.h"
#include "halfstep/models/mlp.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/quant/quantization.h"
#include "halfstep/quant/weight_only.h"
#include "tests/io/onnx_file.h"
#include "tests/io/onnx_reference.h"
#include "tests/support/errors.h"
#include "tests/support/golden.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

fs::path golden_network(const std::string& name) { return test::goldens_dir() / "onnx" / (name + ".onnx"); }

std::int64_t count(const Names& calls, const char* name) { return std::count(calls.begin(), calls.end(), name); }

// Written by ONNX Runtime's quantize_static, which puts a grid on every tensor. Elements differ by one step of the
// output at most: where a value lies between two integers, float32 decides, and ONNX Runtime adds the bias as an
// integer. In a long chain of grids and products of them (mobile_qdq has 29) ONNX Runtime's own integers are up to two
// steps from what it computes operator by operator in float32: there an element may be as far away as that, and as many
// of them, within the accidents of which are hit; by itself no layer is more than a step off.
TEST(OnnxInt8, ComputesWhatOnnxRuntimeDoes) {
  const auto goldens = test::read_goldens("onnx_int8.json");
  ASSERT_EQ(goldens.size(), 3u);
  for (const test::GoldenEntry& e : goldens) {
    SCOPED_TRACE(e.name);
    const io::OnnxNetwork net = io::load_onnx(golden_network(e.name));
    const Tensor x = tensor(e.inputs[0].data, e.inputs[0].shape);
    const infer::Session session(net, x, {.int8 = true});
    const double step = e.real("step");
    const std::vector<double>&integers = e.outputs[0].data, &written = e.outputs[1].data;
    double own_most = 0, own_apart = 0;
    for (std::size_t i = 0; i < integers.size(); ++i) {
      own_most = std::max(own_most, std::abs(integers[i] - written[i]) / step);
      own_apart += std::abs(integers[i] - written[i]) > step / 2;
    }
    EXPECT_EQ(own_most > 0.5, e.name == "mobile_qdq");
    for (int call = 0; call < 2; ++call) {
      const std::vector<double> got = session(x).to_vector<double>();
      ASSERT_EQ(got.size(), integers.size());
      double apart = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double off = std::abs(got[i] - integers[i]) / step;  // a whole number, to rounding in float32
        EXPECT_LE(off, std::max(1.0, own_most) + 1e-4) << i;
        apart += off > 0.5;
      }
      EXPECT_LE(apart, 1.5 * own_apart);
    }
    EXPECT_EQ(session.why_not(), "");
    for (const infer::LayerParity& layer : infer::compare_layers(net, x)) {
      EXPECT_EQ(layer.alone.by_more, 0) << layer.name << " " << layer.call;
    }
  }
}

TEST(OnnxInt8, StaysInIntegers) {
  const io::OnnxNetwork net = io::load_onnx(golden_network("residual_qdq"));
  const infer::Session session(net, zeros({1, 3, 8, 8}), {.int8 = true});
  const Names calls = session.calls();
  EXPECT_EQ(count(calls, "conv2d_int8"), 2);
  EXPECT_EQ(count(calls, "linear_int8"), 1);
  EXPECT_EQ(count(calls, "add_int8"), 1);
  EXPECT_EQ(count(calls, "max_pool2d"), 1);
  // The input, and the mean's result, which the file leaves floating until it is flat.
  EXPECT_EQ(count(calls, "quantize"), 2);
  // The output.
  EXPECT_EQ(count(calls, "dequantize"), 1);
  for (const char* floating : {"conv2d", "linear", "relu", "add", "fake_quantize"}) {
    EXPECT_EQ(count(calls, floating), 0) << floating;
  }
}

// A file without grids has no integers, and its session in floating point is what it was.
TEST(OnnxInt8, SaysThatAFloatFileHasNoIntegers) {
  const io::OnnxNetwork net = io::load_onnx(golden_network("residual"));
  const Tensor x = zeros({1, 3, 8, 8});
  EXPECT_NE(test::error_of([&] {
              infer::Session(net, x, {.int8 = true});
            }).find("one of a quantized ONNX file, got one without fake quantization"),
            std::string::npos);
  const io::OnnxNetwork quantized = io::load_onnx(golden_network("residual_qdq"));
  EXPECT_EQ(count(infer::Session(quantized, x).calls(), "conv2d_int8"), 0);
}

// What Halfstep wrote: two readers of one tensor, norms, a sum before the activation, 16 bits.
struct Parts : nn::Module<Parts> {
  nn::Conv2d conv1 = child("conv1", nn::Conv2d{{.in = 3, .out = 8, .kernel = {3}, .padding = 1, .bias = false}});
  nn::BatchNorm2d bn1 = child("bn1", nn::BatchNorm2d{{.channels = 8}});
  nn::Conv2d conv2 = child("conv2", nn::Conv2d{{.in = 8, .out = 8, .kernel = {3}, .padding = 1}});
  nn::Conv2d conv3 = child("conv3", nn::Conv2d{{.in = 8, .out = 6, .kernel = {1}}});
  nn::Linear fc = child("fc", nn::Linear{{.in = 96, .out = 12}});
  nn::Linear last = child("last", nn::Linear{{.in = 12, .out = 5}});
  std::vector<Tensor> forward(const Tensor& x) const {
    const Tensor a = relu(bn1(conv1(x)));
    const Tensor b = relu(conv2(a) + a);
    const Tensor c = relu(fc(flatten(max_pool2d(conv3(b), {2}), 1)));
    return {c, last(c)};
  }
};

class OnnxInt8Reference : public test::OnnxReference {
 protected:
  void add_session(const std::string& name, const infer::Session& session, const std::vector<Tensor>& inputs,
                   const std::vector<std::string>& outputs, const std::vector<double>& steps) {
    Json runs = Json::array();
    for (const Tensor& x : inputs) {
      Json recorded_outputs = Json::array();
      const std::vector<Tensor> results = session.run(std::span<const Tensor>(&x, 1));
      for (std::size_t i = 0; i < results.size(); ++i) {
        recorded_outputs.push_back(recorded(results[i], outputs[i]));
        recorded_outputs.back()["step"] = steps[i];
      }
      runs.push_back({{"inputs", Json::array({recorded(x, "input")})}, {"outputs", recorded_outputs}});
    }
    std::ofstream(folder_ / (name + ".json")) << Json{{"tolerance", 0}, {"runs", runs}}.dump(1);
  }
};

TEST_F(OnnxInt8Reference, SessionsOfImportsAgreeWithOnnxRuntime) {
  for (const quant::QuantizationOptions& options :
       {quant::QuantizationOptions{}, quant::QuantizationOptions{.symmetric = true},
        quant::QuantizationOptions{.weight_bits = 4}, quant::QuantizationOptions{.skip = {"conv2"}}}) {
    const std::string name = fmt::format("parts{}{}{}", options.symmetric ? "_s8" : "",
                                         options.weight_bits == 4 ? "_w4" : "", options.skip.empty() ? "" : "_skip");
    SCOPED_TRACE(name);
    const Parts net;
    const auto forward = [&](std::span<const Tensor> in) { return net(in[0]); };
    const quant::Quantization q = quant::prepare(net, forward, {randn({4, 3, 8, 8})}, options);
    const NoGrad no_grad;
    net.eval();
    q.train();
    for (int i = 0; i < 4; ++i) (void)net(randn({4, 3, 8, 8}));
    quant::enable_observer(net, false);
    q.eval();
    const std::vector<Tensor> example{zeros({1, 3, 8, 8})};
    io::export_onnx(folder_ / (name + ".onnx"), net, forward, example, {.output_names = {"features", "logits"}});
    const io::OnnxNetwork imported = io::load_onnx(folder_ / (name + ".onnx"));
    const infer::Session session(imported, [&](std::span<const Tensor> in) { return imported.forward(in); }, example,
                                 {.int8 = true});
    EXPECT_GE(count(session.calls(), "conv2d_int8"), options.skip.empty() ? 3 : 2);
    EXPECT_EQ(count(session.calls(), "linear_int8"), 2);
    // Of the logits: what a step of each input moves them by.
    double features = 0;
    for (const quant::QuantizedTensor& t : q.tensors()) {
      if (!t.weight) features = q.at(t.name).scale.item<double>();
    }
    double rows = 0;
    const auto weights = net.last.weight.to_vector<double>();
    for (std::size_t o = 0; o < 5; ++o) {
      double row = 0;
      for (std::size_t i = 0; i < 12; ++i) row += std::abs(weights[o * 12 + i]);
      rows = std::max(rows, row);
    }
    add_session(name, session, {randn({2, 3, 8, 8}), randn({5, 3, 8, 8})}, {"features", "logits"},
                {features, features * rows});
  }
  for (const char* name : {"residual_qdq", "residual_qdq_s8"}) {
    SCOPED_TRACE(name);
    fs::copy_file(golden_network(name), folder_ / (std::string(name) + ".onnx"));
    const io::OnnxNetwork imported = io::load_onnx(golden_network(name));
    Shape sizes;
    for (const std::int64_t d : imported.inputs()[0].sizes) sizes.push_back(d < 0 ? 4 : d);
    const infer::Session session(imported, zeros(sizes), {.int8 = true});
    double step = 0;
    for (const test::GoldenEntry& e : test::read_goldens("onnx_int8.json")) {
      if (e.name == name) step = e.real("step");
    }
    add_session(name, session, {randn(sizes), randn(sizes)}, {imported.outputs()[0].name}, {step});
  }
  check();
}

// Weights alone: three layers of at most 48 products, each rounded twice and added, in another order there.
TEST_F(OnnxInt8Reference, WeightsAloneAreWrittenAsIntegers) {
  for (const int bits : {8, 4}) {
    for (const std::int64_t group : {0, 16}) {
      const models::MLP net({.in = 48, .hidden = 32, .classes = 10});
      quant::quantize_weights(net, {.bits = bits, .group_size = group});
      const io::OnnxOptions options{.opset = bits == 8 && group == 0 ? 17 : 21};
      const std::string name = fmt::format("weights_{}_{}", bits, group);
      add(name, net, {randn({2, 48}), randn({5, 48})}, 3 * 50 * test::kUnit, options);
      const test::OnnxFile file(folder_ / (name + ".onnx"));
      const auto& stored = file.initializers.at("fc1.weight_quantized");
      EXPECT_EQ(stored.type, bits == 8 ? 3 : 22);
      EXPECT_EQ(stored.dims, (std::vector<std::int64_t>{32, 48}));
      const Names ops = file.ops();
      EXPECT_EQ(count(ops, "DequantizeLinear"), 3);
      EXPECT_EQ(count(ops, "Gemm"), 3);
      if (options.opset == 17) {
        const io::OnnxNetwork back = io::load_onnx(folder_ / (name + ".onnx"));
        const Tensor x = randn({3, 48});
        const NoGrad no_grad;
        EXPECT_LE(max(abs(back.eval()(x) - net(x))).item<double>(), 3 * 50 * test::kUnit * 4);
        continue;
      }
      EXPECT_NE(test::error_of([&] {
                  io::export_onnx(folder_ / "old.onnx", net, zeros({1, 48}), {.opset = 17});
                }).find("linear_weight_only in module fc1: has weights of 4 bits or in groups"),
                std::string::npos);
    }
  }
  const nn::Linear rows{{.in = 16, .out = 6}};
  quant::quantize_weights(rows);
  add("rows", rows, {randn({2, 3, 16}), randn({4, 3, 16})}, 20 * test::kUnit);
  check();
}

}  // namespace
}  // namespace halfstep
