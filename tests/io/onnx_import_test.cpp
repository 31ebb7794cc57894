// SPDX-License-Identifier: Apache-2.0
// Networks from ONNX files: what PyTorch wrote (tests/goldens/make_onnx.py) and what Halfstep wrote.
#include "halfstep/io/onnx_import.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/io/onnx.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/models/mlp.h"
#include "halfstep/models/mobilenet.h"
#include "halfstep/models/registry.h"
#include "halfstep/models/resnet.h"
#include "halfstep/models/yolov5.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/quant/quantization.h"
#include "tests/io/onnx_file.h"
#include "tests/support/errors.h"
#include "tests/support/golden.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using test::GoldenEntry;
using test::GoldenTensor;
using test::OnnxFile;

constexpr double kUnit = 1.0 / (1 << 24);

Tensor made(const GoldenTensor& t) { return tensor(t.data, t.shape); }
double largest(const Tensor& t) { return abs(t).to(f64).to_vector<double>().empty() ? 0 : max(abs(t)).item<double>(); }
double difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  return a.sizes() == b.sizes() ? largest(a - b) : 1e30;
}
fs::path golden_file(const std::string& name) { return test::goldens_dir() / "onnx" / (name + ".onnx"); }
Tensor in_evaluation(const io::OnnxNetwork& net, const Tensor& x) {
  const NoGrad no_grad;
  const nn::EvalMode evaluation(net);
  return net(x);
}
std::vector<std::string> names_of(const NamedTensors& tensors) {
  std::vector<std::string> names;
  for (const NamedTensor& t : tensors) names.push_back(t.name);
  return names;
}
Tensor by_name(const NamedTensors& tensors, const std::string& name) {
  for (const NamedTensor& t : tensors) {
    if (t.name == name) return t.tensor;
  }
  throw std::runtime_error("no " + name);
}

class OnnxImport : public ::testing::Test {
 protected:
  void SetUp() override { default_generator().manual_seed(7); }
  static const std::vector<GoldenEntry>& goldens() {
    static const std::vector<GoldenEntry> entries = test::read_goldens("onnx.json");
    return entries;
  }
  static const GoldenEntry& golden(const std::string& name) {
    for (const GoldenEntry& e : goldens()) {
      if (e.name == name) return e;
    }
    throw std::runtime_error(name);
  }
  // Statistics and weights of norms as training leaves them.
  static void season(const nn::ModuleBase& module) {
    for (const NamedTensor& t : module.state_dict()) {
      if (t.tensor.dim() != 1 || !t.tensor.is_floating()) continue;
      const bool positive = t.name.ends_with("var") || t.name.ends_with("weight");
      nn::replace_contents(t.tensor, positive ? rand(t.tensor.sizes()) * 0.6 + 0.7 : rand(t.tensor.sizes()) - 0.5);
    }
  }
  template <nn::TensorModule M>
  io::OnnxNetwork exported(const M& net, const Tensor& x, const io::OnnxOptions& options = {}) {
    io::export_onnx(path_, net, x, options);
    return io::load_onnx(path_);
  }

  test::TemporaryDir temporary_;
  const fs::path path_ = temporary_.path() / "net.onnx";
};

// Each file has at most 12 layers whose sums are of at most 72 terms, rounded in another order than PyTorch does.
TEST_F(OnnxImport, ComputesWhatPyTorchDoes) {
  ASSERT_EQ(goldens().size(), 8u);
  for (const GoldenEntry& e : goldens()) {
    SCOPED_TRACE(e.name);
    const io::OnnxNetwork net = io::load_onnx(golden_file(e.name));
    const Tensor expected = made(e.outputs[0]);
    const Tensor y = in_evaluation(net, made(e.inputs[0]));
    EXPECT_LE(difference(y, expected), 64 * kUnit * std::max(1.0, largest(expected)));
  }
}

TEST_F(OnnxImport, HasPyTorchsNames) {
  const std::vector<std::string> folded{"conv1.weight", "conv1.bias", "layer.0.weight",
                                        "layer.0.bias", "fc.weight",  "fc.bias"};
  EXPECT_EQ(names_of(io::load_onnx(golden_file("residual")).parameters()), folded);
  EXPECT_EQ(names_of(io::load_onnx(golden_file("residual_script")).parameters()), folded);
  const io::OnnxNetwork norms = io::load_onnx(golden_file("residual_norms"));
  EXPECT_EQ(names_of(norms.state_dict()),
            (std::vector<std::string>{"conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var",
                                      "layer.0.weight", "layer.1.weight", "layer.1.bias", "layer.1.running_mean",
                                      "layer.1.running_var", "fc.weight", "fc.bias"}));
  EXPECT_EQ(norms.buffers().size(), 4u);
  // The exporter has turned the matrices of linear layers and given them names of its own.
  const NamedTensors attention = io::load_onnx(golden_file("attention")).parameters();
  EXPECT_EQ(by_name(attention, "qkv.weight").sizes(), (Shape{24, 8}));
  EXPECT_EQ(by_name(attention, "mlp.0.weight").sizes(), (Shape{12, 8}));
  for (const char* name : {"class_token", "pos_embedding", "layer_scale", "ln_1.weight", "out.weight"}) {
    EXPECT_TRUE(by_name(attention, name).requires_grad()) << name;
  }
}

// A step of SGD in training mode, with the batch's statistics. Gradients are sums of up to 128 products over 6 layers.
TEST_F(OnnxImport, TrainsAsPyTorchDoes) {
  const GoldenEntry& e = golden("residual_norms");
  const io::OnnxNetwork net = io::load_onnx(golden_file("residual_norms"));
  EXPECT_TRUE(net.is_training());
  optim::SGD optimizer(net.trainable_parameters(), {.lr = 0.5});
  const Tensor loss = mean(square(net(made(e.inputs[0]))));
  EXPECT_NEAR(loss.item<double>(), made(e.tensor("loss")).item<double>(), 1e-6);
  loss.backward();
  optimizer.step();
  for (const NamedTensor& t : net.state_dict()) {
    EXPECT_LE(difference(t.tensor, made(e.tensor(t.name))), 2e-6) << t.name;
  }
}

TEST_F(OnnxImport, AllOfItsParametersTrain) {
  for (const GoldenEntry& e : goldens()) {
    SCOPED_TRACE(e.name);
    const io::OnnxNetwork net = io::load_onnx(golden_file(e.name));
    const io::OnnxNetwork before = nn::clone(net);
    optim::SGD optimizer(net.trainable_parameters(), {.lr = 0.1});
    mean(square(net(made(e.inputs[0])) - 1)).backward();
    optimizer.step();
    const NamedTensors old = before.parameters();
    ASSERT_GE(old.size(), 4u);
    for (const NamedTensor& t : net.parameters()) {
      if (!t.tensor.requires_grad()) continue;
      // Keys of an attention don't feel what is added to all of them: their third of a bias stays.
      EXPECT_GT(difference(t.tensor, by_name(old, t.name)), 0) << t.name;
    }
  }
}

TEST_F(OnnxImport, IsSavedClonedAndLoaded) {
  const GoldenEntry& e = golden("attention");
  const Tensor x = made(e.inputs[0]);
  const io::OnnxNetwork net = io::load_onnx(golden_file("attention"));
  io::OnnxNetwork copy = nn::clone(net);
  for (const NamedTensor& t : copy.parameters()) nn::replace_contents(t.tensor, t.tensor.detach() * 0.5);
  const Tensor halved = in_evaluation(copy, x);
  EXPECT_GT(difference(halved, in_evaluation(net, x)), 1e-3);
  io::save_safetensors(temporary_.path() / "net.safetensors", copy.state_dict());
  net.load_state_dict(io::load_safetensors(temporary_.path() / "net.safetensors").tensors);
  EXPECT_EQ(in_evaluation(net, x).to_vector<float>(), halved.to_vector<float>());
  EXPECT_EQ(net.inputs().at(0).name, "input");
  EXPECT_EQ(net.inputs().at(0).sizes, (std::vector<std::int64_t>{-1, 3, 8, 8}));
  EXPECT_EQ(net.outputs().at(0).name, "output");
  EXPECT_NE(net.str().find("OnnxNetwork("), std::string::npos);
}

TEST_F(OnnxImport, RunsOnADevice) {
#ifndef HALFSTEP_SIM_PLUGIN
  GTEST_SKIP() << "the simulated accelerator is not built";
#endif
  const Device device("sim");
  for (const char* name : {"attention_script", "mobile_script", "quantized"}) {
    SCOPED_TRACE(name);
    const io::OnnxNetwork net = io::load_onnx(golden_file(name));
    const Tensor x = made(golden(name).inputs[0]), expected = in_evaluation(net, x);
    net.to(device);
    const Tensor y = in_evaluation(net, x.to(device));
    EXPECT_EQ(y.device(), device);
    EXPECT_LE(difference(y.to(Device{}), expected), 64 * kUnit * std::max(1.0, largest(expected)));
  }
}

// Numbers that the host knows are there in replays too.
TEST_F(OnnxImport, TrainsInCapturedSteps) {
  for (const char* name : {"attention_script", "mobile_script", "residual_norms", "quantized"}) {
    SCOPED_TRACE(name);
    const io::OnnxNetwork plain = io::load_onnx(golden_file(name)), captured = nn::clone(plain);
    const auto trainer = [](const io::OnnxNetwork& net, optim::SGD& optimizer) {
      return [&net, &optimizer](const Tensor& x) {
        optimizer.zero_grad();
        const Tensor loss = mean(square(net(x) - 1));
        loss.backward();
        optimizer.step();
        return loss;
      };
    };
    optim::SGD first(plain.trainable_parameters(), {.lr = 0.01}), second(captured.trainable_parameters(), {.lr = 0.01});
    const auto step = trainer(plain, first);
    auto replayed = capture(trainer(captured, second));
    for (int i = 0; i < 6; ++i) {
      const Tensor x = randn({2, 3, 8, 8});
      EXPECT_EQ(step(x).item<float>(), replayed(x).item<float>()) << i;
    }
    EXPECT_GT(replayed.stats().replayed, 0u) << replayed.why_not();
    const NamedTensors state = captured.state_dict();
    for (const NamedTensor& t : plain.state_dict()) {
      EXPECT_EQ(t.tensor.to_vector<double>(), by_name(state, t.name).to_vector<double>()) << t.name;
    }
  }
}

TEST_F(OnnxImport, TheDocsNameAllOperators) {
  const std::vector<std::string> names = io::onnx_import_ops();
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  std::ifstream file(test::goldens_dir().parent_path().parent_path() / "docs" / "guide" / "onnx.md");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  for (const std::string& n : names) EXPECT_NE(text.find("`" + n + "`"), std::string::npos) << n;
}

// --- what Halfstep wrote

// The same ops in the same order: the same bits.
TEST_F(OnnxImport, ReadsWhatHalfstepWrites) {
  const auto check = [&](const std::string& name, const nn::ModuleBase& module, const io::OnnxForward& forward,
                         const Tensor& x) {
    SCOPED_TRACE(name);
    season(module);
    const std::vector<Tensor> inputs{x};
    io::export_onnx(path_, module, forward, inputs);
    const io::OnnxNetwork net = io::load_onnx(path_);
    const NoGrad no_grad;
    const nn::EvalMode evaluation(module);
    const Tensor expected = forward(inputs)[0];
    EXPECT_LE(difference(in_evaluation(net, x), expected), 32 * kUnit * largest(expected));
    // Exported again it is the same network.
    const fs::path again = temporary_.path() / "again.onnx";
    io::export_onnx(again, net, x);
    EXPECT_EQ(in_evaluation(io::load_onnx(again), x).to_vector<float>(), in_evaluation(net, x).to_vector<float>());
  };
  for (const char* name : {"mlp", "resnet20"}) {
    const models::Model net = models::make_model(name);
    const auto forward = [&](std::span<const Tensor> in) { return std::vector<Tensor>{net.forward(in[0])}; };
    check(name, *net.module, forward, std::string(name) == "mlp" ? randn({2, 784}) : randn({2, 3, 32, 32}));
  }
  const models::MobileNetV2 mobile{{.width = 0.35, .classes = 7}};
  check(
      "mobilenet", mobile, [&](std::span<const Tensor> in) { return std::vector<Tensor>{mobile(in[0])}; },
      randn({2, 3, 32, 32}));
}

TEST_F(OnnxImport, KeepsNamesAndStatisticsOfWhatHalfstepWrites) {
  const models::ResNet resnet{{.layers = {1, 1}, .width = 8, .classes = 7}};
  season(resnet);
  const io::OnnxNetwork net = exported(resnet, zeros({1, 3, 16, 16}));
  const NamedTensors state = net.state_dict();
  for (const NamedTensor& t : resnet.state_dict()) {
    if (t.name.ends_with("num_batches_tracked")) continue;
    EXPECT_EQ(by_name(state, t.name).to_vector<float>(), t.tensor.to_vector<float>()) << t.name;
  }
  EXPECT_EQ(names_of(net.parameters()).size(), names_of(resnet.parameters()).size());
  // In training mode the norms follow the batches.
  const Tensor mean = by_name(state, "bn1.running_mean").clone();
  (void)net(randn({4, 3, 16, 16}));
  EXPECT_GT(difference(by_name(net.state_dict(), "bn1.running_mean"), mean), 0);
}

// Decoded predictions: a chain of 60 convolutions, and boxes as large as anchors and strides make them.
TEST_F(OnnxImport, ReadsADetectorThatHalfstepWrote) {
  const models::Yolov5 net({.classes = 3});
  season(net);
  const auto forward = [&](std::span<const Tensor> in) { return std::vector<Tensor>{net.decode(net(in[0]))}; };
  const std::vector<Tensor> inputs{rand({2, 3, 64, 64})};
  io::export_onnx(path_, net, forward, inputs);
  const io::OnnxNetwork read = io::load_onnx(path_);
  const NoGrad no_grad;
  const nn::EvalMode evaluation(net);
  const Tensor expected = forward(inputs)[0];
  EXPECT_LE(difference(in_evaluation(read, inputs[0]), expected), 60 * 16 * kUnit * largest(expected));
  EXPECT_EQ(names_of(read.trainable_parameters()).size(), names_of(net.trainable_parameters()).size());
}

TEST_F(OnnxImport, IsPreparedForQuantization) {
  const io::OnnxNetwork net = io::load_onnx(golden_file("residual_norms"));
  const Tensor x = made(golden("residual_norms").inputs[0]);
  const quant::Quantization q = quant::prepare(net, x);
  EXPECT_TRUE(q.left().empty());
  std::vector<std::string> names;
  for (const quant::QuantizedTensor& t : q.tensors()) names.push_back(t.name);
  EXPECT_EQ(names.front(), "input");
  for (const char* name : {"conv1.weight", "layer.0.weight", "fc.weight"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
  (void)net(x);
  quant::enable_observer(net, false);
  io::export_onnx(path_, net, x);
  const std::vector<std::string> ops = OnnxFile(path_).ops();
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "BatchNormalization"), 0);
  EXPECT_GE(std::count(ops.begin(), ops.end(), "QuantizeLinear"), 4);
}

// A network with two inputs and two outputs.
struct Two : nn::Module<Two> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 4, .out = 3}});
  std::vector<Tensor> forward(const Tensor& a, const Tensor& b) const {
    const Tensor y = fc(a);
    return {y, y * 2 + b};
  }
};
TEST_F(OnnxImport, HasSeveralInputsAndOutputs) {
  const Two two;
  const std::vector<Tensor> inputs{randn({2, 4}), randn({2, 3})};
  const auto forward = [&](std::span<const Tensor> in) { return two(in[0], in[1]); };
  io::export_onnx(path_, two, forward, inputs, {.input_names = {"a", "b"}, .output_names = {"y", "z"}});
  const io::OnnxNetwork net = io::load_onnx(path_);
  const std::vector<Tensor> results = net(std::span<const Tensor>(inputs)), expected = forward(inputs);
  ASSERT_EQ(results.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(results[i].to_vector<float>(), expected[i].to_vector<float>());
  EXPECT_EQ(net.inputs().at(1).name, "b");
  const std::string error = test::error_of<Error>([&] { (void)net(inputs[0]); });
  EXPECT_NE(error.find("one input and one output, got 2 and 2"), std::string::npos) << error;
}

// --- quantized files

class OnnxQuantizedImport : public OnnxImport {
 protected:
  // A prepared network and its file.
  io::OnnxNetwork quantized_file() {
    net_ = models::ResNet{{.layers = {1, 1}, .width = 8, .classes = 7}};
    season(net_);
    quant::prepare(net_, x_);
    const NoGrad no_grad;
    const nn::EvalMode evaluation(net_);
    quant::quantization_of(net_)->train();
    for (int i = 0; i < 3; ++i) (void)net_(randn(x_.sizes()));
    quant::enable_observer(net_, false);
    io::export_onnx(path_, net_, x_);
    return io::load_onnx(path_);
  }
  models::ResNet net_{{.layers = {1, 1}, .width = 8, .classes = 7}};
  const Tensor x_ = randn({2, 3, 16, 16});
};

TEST_F(OnnxQuantizedImport, ComputesWithTheGridsOfTheFile) {
  const io::OnnxNetwork net = quantized_file();
  const NoGrad no_grad;
  const nn::EvalMode evaluation(net_);
  const Tensor expected = net_(x_), y = in_evaluation(net, x_);
  // Norms are in the weights now, so that a value in the middle of two steps may go the other way: how far a logit
  // goes if each input of the last product is off by a step.
  const quant::Quantization& q = *quant::quantization_of(net_);
  double step = 0;
  for (const quant::QuantizedTensor& t : q.tensors()) {
    if (!t.weight) step = q.at(t.name).scale.item<double>();
  }
  const Tensor rows = sum(abs(by_name(net_.parameters(), "fc.weight").detach()), {1});
  EXPECT_LE(difference(y, expected), step * largest(rows));
  // Nothing observes; on demand it does.
  int grids = 0;
  net.apply([&](const std::string&, const nn::ModuleBase& m) {
    if (const auto* f = dynamic_cast<const quant::FakeQuantize*>(&m)) {
      ++grids;
      EXPECT_FALSE(f->is_observer_enabled());
      EXPECT_TRUE(f->is_fake_quant_enabled());
    }
  });
  // Behind pooling and flatten the file has their input's grid again.
  EXPECT_EQ(grids, static_cast<int>(q.tensors().size()) + 2);
  EXPECT_NO_THROW(by_name(net.state_dict(), "conv1.weight_fake_quant.scale"));
}

TEST_F(OnnxQuantizedImport, IsExportedToTheSameIntegers) {
  const io::OnnxNetwork net = quantized_file();
  const fs::path again = temporary_.path() / "again.onnx";
  io::export_onnx(again, net, x_);
  const OnnxFile first(path_), second(again);
  const auto sorted = [](std::vector<std::string> ops) {
    std::sort(ops.begin(), ops.end());
    return ops;
  };
  EXPECT_EQ(sorted(first.ops()), sorted(second.ops()));
  int weights = 0, biases = 0;
  for (const auto& [name, t] : first.initializers) {
    if (!name.ends_with("_quantized")) continue;
    const auto& other = second.initializers.at(name);
    EXPECT_EQ(t.type, other.type) << name;
    EXPECT_EQ(t.data, other.data) << name;
    const std::string scale = name.substr(0, name.size() - 10) + "_scale";
    (t.type == 6 ? biases : weights) += 1;
    EXPECT_EQ(first.initializers.at(scale).data, second.initializers.at(scale).data) << name;
  }
  EXPECT_EQ(weights, 10);
  EXPECT_EQ(biases, 10);
}

TEST_F(OnnxQuantizedImport, TrainsOn) {
  quantized_file();
  for (const bool learned : {false, true}) {
    const io::OnnxNetwork net = io::load_onnx(path_, {.learned_scales = learned});
    const io::OnnxNetwork before = nn::clone(net);
    optim::SGD optimizer(net.trainable_parameters(), {.lr = 0.01});
    // Weights begin on their grids, where a scale has no gradient: the second step finds it.
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      mean(square(net(x_) - 1)).backward();
      optimizer.step();
    }
    int scales = 0;
    for (const NamedTensor& t : net.trainable_parameters()) {
      const double moved = difference(t.tensor, by_name(before.parameters(), t.name));
      const bool is_scale = t.name.ends_with("scale");
      scales += is_scale;
      EXPECT_GT(moved, 0) << t.name;
    }
    EXPECT_EQ(scales > 0, learned);
    // Ranges follow again.
    if (learned) continue;
    quant::enable_observer(net);
    const Tensor old = by_name(net.state_dict(), "conv1.weight_fake_quant.scale").clone();
    (void)net(x_);
    EXPECT_GT(difference(by_name(net.state_dict(), "conv1.weight_fake_quant.scale"), old), 0);
  }
}

}  // namespace
}  // namespace halfstep
