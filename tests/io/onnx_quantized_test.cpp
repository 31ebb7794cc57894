// SPDX-License-Identifier: Apache-2.0
// Prepared networks as ONNX files of QuantizeLinear and DequantizeLinear: what is in them, and that ONNX's evaluators
// compute what the network computes, to one step of the grids.
#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/models/mlp.h"
#include "halfstep/models/mobilenet.h"
#include "halfstep/models/resnet.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/nn/pooling.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/quant/quantization.h"
#include "tests/io/onnx_file.h"
#include "tests/io/onnx_reference.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::OnnxFile;
using Names = std::vector<std::string>;

// Two convolutions with norms, a residual and a pooling between products.
struct Block : nn::Module<Block> {
  nn::Conv2d conv1 = child("conv1", nn::Conv2d{{.in = 3, .out = 8, .kernel = {3}, .padding = 1, .bias = false}});
  nn::BatchNorm2d bn1 = child("bn1", nn::BatchNorm2d{{.channels = 8}});
  nn::Conv2d conv2 = child("conv2", nn::Conv2d{{.in = 8, .out = 8, .kernel = {3}, .padding = 1, .bias = false}});
  nn::BatchNorm2d bn2 = child("bn2", nn::BatchNorm2d{{.channels = 8}});
  nn::Conv2d conv3 = child("conv3", nn::Conv2d{{.in = 8, .out = 6, .kernel = {1}}});
  nn::Linear fc = child("fc", nn::Linear{{.in = 6, .out = 5}});
  // What is on a grid before the mean, and the logits.
  std::vector<Tensor> forward(const Tensor& x) const {
    const Tensor a = relu(bn1(conv1(x)));
    const Tensor b = relu(bn2(conv2(a)) + a);
    const Tensor c = silu(conv3(max_pool2d(b, {2})));
    return {c, fc(flatten(adaptive_avg_pool2d(c, {1}), 1))};
  }
};

class OnnxQuantized : public test::OnnxReference {
 protected:
  // Statistics and weights of norms as training leaves them, with factors of both signs and one of 0.
  static void season(const nn::ModuleBase& module) {
    for (const NamedTensor& t : module.state_dict()) {
      if (t.tensor.dim() != 1 || !t.tensor.is_floating() || t.name.starts_with("quantization")) continue;
      Tensor values = rand(t.tensor.sizes()) * 0.6 + 0.5;
      if (t.name.ends_with("weight")) {
        values = values * sign(rand(t.tensor.sizes()) - 0.3);
        values.slice(0, 0, 1).zero_();
      }
      if (t.name.ends_with("bias") || t.name.ends_with("mean")) values = rand(t.tensor.sizes()) * 0.4 - 0.2;
      nn::replace_contents(t.tensor, values);
    }
  }
  // Prepared, with the ranges of a few batches.
  template <class M>
  static quant::Quantization calibrated(const M& net, const Tensor& x, const quant::QuantizationOptions& options = {}) {
    season(net);
    const auto forward = [&](std::span<const Tensor> in) { return outputs_of(net(in[0])); };
    quant::Quantization q = quant::prepare(net, forward, {x}, options);
    const NoGrad no_grad;
    const nn::EvalMode evaluation(net);
    q.train();
    for (int i = 0; i < 4; ++i) (void)net(randn(x.sizes()));
    quant::enable_observer(net, false);
    q.eval();
    return q;
  }
  static std::vector<Tensor> outputs_of(const Tensor& t) { return {t}; }
  static std::vector<Tensor> outputs_of(const std::vector<Tensor>& t) { return t; }

  // How far the last product's results may be if each of its inputs is off by a step.
  static double last_step(const nn::ModuleBase& net, const quant::Quantization& q) {
    double step = 0, rows = 0;
    for (const quant::QuantizedTensor& t : q.tensors()) {
      if (!t.weight) {
        step = q.at(t.name).scale.item<double>();
        continue;
      }
      for (const NamedTensor& p : net.parameters()) {
        if (p.name == t.name && p.tensor.dim() == 2) rows = max(sum(abs(p.tensor.detach()), {1})).item<double>();
      }
    }
    EXPECT_GT(step * rows, 0);
    return step * rows;
  }

  // A file, whose outputs are `{features,} logits`: the first on a grid, of the step `features`.
  template <class M>
  void add_quantized(const std::string& name, const M& net, const std::vector<Tensor>& inputs, double logits,
                     double features = 0, const io::OnnxOptions& options = {}) {
    SCOPED_TRACE(name);
    io::OnnxOptions named = options;
    if (features > 0) named.output_names = {"features", "output"};
    const auto forward = [&](std::span<const Tensor> in) { return outputs_of(net(in[0])); };
    io::export_onnx(folder_ / (name + ".onnx"), net, forward, std::span(inputs).first(1), named);
    const NoGrad no_grad;
    const nn::EvalMode evaluation(net);
    Json runs = Json::array();
    for (const Tensor& x : inputs) {
      Json outputs = Json::array();
      for (const Tensor& y : outputs_of(net(x))) {
        const bool first = features > 0 && outputs.empty();
        outputs.push_back(recorded(y, first ? "features" : "output"));
        outputs.back()["step"] = first ? features : logits;
      }
      runs.push_back({{"inputs", Json::array({recorded(x, "input")})}, {"outputs", outputs}});
    }
    std::ofstream(folder_ / (name + ".json")) << Json{{"tolerance", 0}, {"runs", runs}}.dump(1);
  }
  void add_block(const std::string& name, const quant::QuantizationOptions& given,
                 const io::OnnxOptions& options = {}) {
    const Block net;
    const quant::Quantization q = calibrated(net, randn({4, 3, 8, 8}), given);
    const double features = q.at("silu").scale.template item<double>();
    std::vector<Tensor> inputs{randn({2, 3, 8, 8}), randn({options.dynamic_batch ? 5 : 2, 3, 8, 8})};
    add_quantized(name, net, inputs, last_step(net, q), features, options);
  }
};

TEST_F(OnnxQuantized, RunsAsTheNetworkDoes) {
  add_block("block", {});
  add_block("symmetric", {.symmetric = true});
  add_block("reduced", {.reduce_range = true});
  add_block("four_bits", {.weight_bits = 4, .activation_bits = 4});
  add_block("two_bits", {.weight_bits = 2, .activation_bits = 8});
  add_block("one_scale", {.per_channel = false});
  add_block("learned", {.learned = true});
  add_block("left_out", {.skip = {"conv2"}});
  add_block("first_left_out", {.first = false});
  add_block("fixed", {}, {.opset = 21, .dynamic_batch = false});
  // Of 16 bits, from opset 21 on.
  add_block("sixteen_bits", {.weight_bits = 16, .activation_bits = 16}, {.opset = 21});
  check();
}

TEST_F(OnnxQuantized, WholeNetworksRunAsTheyDo) {
  const auto add_network = [&](const std::string& name, const auto& net, const std::vector<Tensor>& inputs) {
    const quant::Quantization q = calibrated(net, randn(inputs[0].sizes()));
    add_quantized(name, net, inputs, last_step(net, q));
  };
  add_network("mlp", models::MLP({.in = 64, .hidden = 48}), {randn({1, 64}), randn({7, 64})});
  add_network("bottleneck", models::ResNet{{.layers = {1, 1, 2}, .width = 8, .classes = 7}}, {randn({2, 3, 33, 33})});
  add_network("mobile", models::MobileNetV2{{.width = 0.35, .classes = 7}}, {randn({2, 3, 32, 32})});
  check();
}

// What is in a file, against what the format and the folding of norms say.
class OnnxQuantizedFile : public OnnxQuantized {
 protected:
  void SetUp() override { default_generator().manual_seed(7); }
  const std::filesystem::path path_ = folder_ / "net.onnx";
};

TEST_F(OnnxQuantizedFile, HoldsIntegersWithTheNormsInTheirScales) {
  const Block net;
  const quant::Quantization q = calibrated(net, randn({4, 3, 8, 8}));
  const auto forward = [&](std::span<const Tensor> in) { return net(in[0]); };
  const std::vector<Tensor> inputs{zeros({1, 3, 8, 8})};
  io::export_onnx(path_, net, forward, inputs);
  const OnnxFile file(path_);
  EXPECT_EQ(file.opset, 17);
  const Names ops = file.ops();
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "BatchNormalization"), 0);
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "Clip"), 0);
  // Input, two relus, silu and the mean, and again behind pooling and flatten; of four products weights and biases.
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "QuantizeLinear"), 7);
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "DequantizeLinear"), 7 + 4 + 4);

  const NamedTensors state = net.state_dict();
  const auto values = [&](const std::string& name) {
    for (const NamedTensor& t : state) {
      if (t.name == name) return t.tensor.to_vector<float>();
    }
    throw std::runtime_error(name);
  };
  const auto weight = values("conv1.weight"), gamma = values("bn1.weight"), beta = values("bn1.bias");
  const auto mean = values("bn1.running_mean"), var = values("bn1.running_var");
  const auto scale = values("quantization.conv1.weight.scale");
  const double input_scale = q.at("input").scale.item<double>();
  const auto& stored = file.initializers.at("conv1.weight_quantized");
  EXPECT_EQ(stored.type, 3);
  EXPECT_EQ(stored.dims, (std::vector<std::int64_t>{8, 3, 3, 3}));
  const auto integers = stored.values<std::int8_t>();
  const auto scales = file.initializers.at("conv1.weight_scale").values<float>();
  const auto bias = file.initializers.at("conv1.bias_quantized").values<std::int32_t>();
  EXPECT_EQ(file.initializers.at("conv1.bias_quantized").type, 6);
  const auto steps = file.initializers.at("conv1.bias_scale").values<float>();
  ASSERT_EQ(scales.size(), 8u);
  int negative = 0;
  for (std::size_t o = 0; o < 8; ++o) {
    const double factor = gamma[o] / std::sqrt(var[o] + 1e-5);
    negative += factor < 0;
    if (o == 0) {
      EXPECT_EQ(factor, 0);  // its results are the bias alone
      EXPECT_EQ(scales[o], scale[o]);
    } else {
      EXPECT_NEAR(scales[o], scale[o] * std::fabs(factor), 1e-6 * scales[o]);
    }
    for (std::size_t i = 0; i < 27; ++i) {
      const double exact = weight[o * 27 + i] / scale[o] * (factor > 0 ? 1 : factor < 0 ? -1 : 0);
      EXPECT_LE(std::fabs(integers[o * 27 + i] - exact), 0.5001) << o << " " << i;
    }
    const double folded = beta[o] - mean[o] * factor;
    EXPECT_NEAR(steps[o], input_scale * scales[o], 1e-6 * steps[o]);
    EXPECT_LE(std::fabs(bias[o] - folded / steps[o]), 0.51 + 1e-6 * std::fabs(bias[o]));
  }
  EXPECT_GE(negative, 1);
  EXPECT_LE(negative, 6);
}

TEST_F(OnnxQuantizedFile, NarrowRangesAreClipped) {
  const Block net;
  calibrated(net, randn({4, 3, 8, 8}), {.activation_bits = 4});
  const auto forward = [&](std::span<const Tensor> in) { return net(in[0]); };
  const std::vector<Tensor> inputs{zeros({1, 3, 8, 8})};
  io::export_onnx(path_, net, forward, inputs);
  const Names ops = OnnxFile(path_).ops();
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "Clip"), 7);
}

TEST_F(OnnxQuantizedFile, SaysWhatTheFormatHasNot) {
  const Block net;
  const quant::Quantization q = calibrated(net, randn({4, 3, 8, 8}), {.activation_bits = 16});
  const auto forward = [&](std::span<const Tensor> in) { return net(in[0]); };
  const std::vector<Tensor> inputs{zeros({1, 3, 8, 8})};
  const auto error = [&](const io::OnnxOptions& options) {
    return test::error_of<Error>([&] { io::export_onnx(path_, net, forward, inputs, options); });
  };
  EXPECT_NE(error({}).find("'input' has integers of 16 bits, which ONNX quantizes from opset 21 on"),
            std::string::npos);
  EXPECT_NE(error({.opset = 21, .dtype = f16}).find("expected dtype f32 for a quantized network, got f16"),
            std::string::npos);
  nn::replace_contents(q.at("input").scale, zeros({1}));
  EXPECT_NE(error({.opset = 21}).find("expected scales above 0 for 'input', got 0"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(path_));
}

// A network whose fake quantization is off has none in its file.
TEST_F(OnnxQuantizedFile, LeavesOutWhatIsOff) {
  const Block net;
  calibrated(net, randn({4, 3, 8, 8}));
  quant::enable_fake_quant(net, false);
  const auto forward = [&](std::span<const Tensor> in) { return net(in[0]); };
  const std::vector<Tensor> inputs{zeros({1, 3, 8, 8})};
  io::export_onnx(path_, net, forward, inputs);
  const Names ops = OnnxFile(path_).ops();
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "QuantizeLinear"), 0);
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "BatchNormalization"), 2);
}

}  // namespace
}  // namespace halfstep
