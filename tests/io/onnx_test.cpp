// SPDX-License-Identifier: Apache-2.0
// What the exporter writes, read back by a decoder of the tests' own; what it computes is checked in
// onnx_reference_test.cpp.
#include "halfstep/io/onnx.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <fstream>

#include "halfstep/amp/autocast.h"
#include "halfstep/models/mlp.h"
#include "halfstep/models/resnet.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/sort.h"
#include "halfstep/ops/view.h"
#include "tests/io/onnx_file.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using test::OnnxFile;
using Names = std::vector<std::string>;
using Ints = std::vector<std::int64_t>;

// A function with one parameter, as a module.
struct Function : nn::Module<Function> {
  using F = std::function<Tensor(const Tensor& x, const Tensor& weight)>;
  Function(F f, Tensor w) : function(std::move(f)), weight(parameter("weight", std::move(w))) {}
  template <class G>
  requires(!std::derived_from<G, nn::ModuleBase>) explicit Function(G f) : Function(F(std::move(f)), ones({1})) {}
  Tensor forward(const Tensor& x) const { return function(x, weight); }
  F function;
  nn::Parameter weight;
};
struct Outer : nn::Module<Outer> {
  explicit Outer(const Function& f) : inner(child("inner", f)) {}
  Tensor forward(const Tensor& x) const { return inner(x); }
  Function inner;
};

class Onnx : public ::testing::Test {
 protected:
  test::TemporaryDir temporary_;
  const fs::path path_ = temporary_.path() / "net.onnx";

  template <nn::TensorModule M>
  OnnxFile written(const M& module, const Tensor& input, const io::OnnxOptions& options = {}) {
    io::export_onnx(path_, module, input, options);
    return OnnxFile(path_);
  }
  template <class G>
  requires(!std::derived_from<G, nn::ModuleBase>) OnnxFile
      written(G f, const Tensor& input, const io::OnnxOptions& options = {}) {
    return written(Function(std::move(f)), input, options);
  }
  template <class G>
  std::string error(G f, const Tensor& input, const io::OnnxOptions& options = {}) {
    return test::error_of<Error>([&] { written(std::move(f), input, options); });
  }
  std::string bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
};

TEST_F(Onnx, WritesTheMlpWithItsNamesAndWeights) {
  const models::MLP net({.in = 12, .hidden = 8, .classes = 5});
  const auto summary = io::export_onnx(path_, net, zeros({1, 12}));
  const OnnxFile file(path_);
  EXPECT_EQ(file.ir_version, 8);
  EXPECT_EQ(file.opset, 17);
  EXPECT_EQ(file.producer, "Halfstep");
  EXPECT_EQ(file.graph_name, "MLP");
  EXPECT_EQ(file.ops(), (Names{"Gemm", "Relu", "Gemm", "Relu", "Gemm"}));
  EXPECT_EQ(file.nodes[0].name, "fc1/linear");
  EXPECT_EQ(file.nodes[0].inputs, (Names{"input", "fc1.weight", "fc1.bias"}));
  EXPECT_EQ(file.nodes[0].ints.at("transB"), Ints{1});
  EXPECT_EQ(file.nodes[1].inputs, file.nodes[0].outputs);
  EXPECT_EQ(file.nodes[4].outputs, Names{"output"});
  ASSERT_EQ(file.initializer_names,
            (Names{"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"}));
  for (const NamedTensor& p : net.state_dict()) {
    const auto& t = file.initializers.at(p.name);
    EXPECT_EQ(t.type, 1) << p.name;
    EXPECT_EQ(Shape(t.dims), p.tensor.sizes()) << p.name;
    EXPECT_EQ(t.values<float>(), p.tensor.to_vector<float>()) << p.name;
  }
  ASSERT_EQ(file.inputs.size(), 1u);
  EXPECT_EQ(file.inputs[0].name, "input");
  EXPECT_EQ(file.inputs[0].type, 1);
  EXPECT_EQ(file.inputs[0].dims, (Names{"batch", "12"}));
  EXPECT_EQ(file.outputs[0].dims, (Names{"batch", "5"}));
  EXPECT_EQ(summary.nodes, 5);
  EXPECT_EQ(summary.initializers, 6);
  EXPECT_EQ(summary.elements, 12 * 8 + 8 + 8 * 8 + 8 + 8 * 5 + 5);
  EXPECT_EQ(summary.bytes, static_cast<std::int64_t>(fs::file_size(path_)));
}

TEST_F(Onnx, WritesTheSameBytesAgainAndReplacesTheFile) {
  const models::MLP net({.in = 12, .hidden = 8, .classes = 5});
  io::export_onnx(path_, net, zeros({1, 12}));
  const std::string first = bytes();
  io::export_onnx(path_, net, full({4, 12}, 3.0));  // the example's values and its batch don't matter
  EXPECT_EQ(bytes(), first);
  EXPECT_EQ(std::distance(fs::directory_iterator(temporary_.path()), fs::directory_iterator()), 1);
}

TEST_F(Onnx, FailsWithoutTouchingWhatIsThere) {
  std::ofstream(path_) << "old";
  EXPECT_NE(error([](const Tensor& x, const Tensor&) { return sort(x).values; }, zeros({2, 3})), "");
  EXPECT_EQ(bytes(), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(temporary_.path()), fs::directory_iterator()), 1);
}

TEST_F(Onnx, AFixedBatchIsTheExamples) {
  const auto file = written(models::MLP({.in = 4, .hidden = 3, .classes = 2}), zeros({6, 2, 2}),
                            {.dynamic_batch = false, .input_names = {"pixels"}, .output_names = {"logits"}});
  EXPECT_EQ(file.inputs[0].name, "pixels");
  EXPECT_EQ(file.inputs[0].dims, (Names{"6", "2", "2"}));
  EXPECT_EQ(file.outputs[0].name, "logits");
  EXPECT_EQ(file.outputs[0].dims, (Names{"6", "2"}));
}

TEST_F(Onnx, Float16IsTheDtypeOfAllButBatchNormsParameters) {
  const nn::Sequential net{nn::BatchNorm2d{{.channels = 3}}, nn::Flatten{}, nn::Linear{{.in = 12, .out = 2}}};
  const auto file = written(net, zeros({1, 3, 2, 2}), {.dtype = f16});
  EXPECT_EQ(file.ops(), (Names{"BatchNormalization", "Flatten", "Gemm"}));
  EXPECT_EQ(file.inputs[0].type, 10);
  EXPECT_EQ(file.outputs[0].type, 10);
  EXPECT_EQ(file.initializers.at("0.weight").type, 1);
  EXPECT_EQ(file.initializers.at("0.running_var").type, 1);
  EXPECT_EQ(file.initializers.at("2.weight").type, 10);
  const auto halves = file.initializers.at("2.weight").values<std::uint16_t>();
  const Tensor expected = net.at<nn::Linear>(2).weight.to(f16).contiguous();
  ASSERT_EQ(halves.size(), 24u);
  EXPECT_EQ(std::memcmp(halves.data(), expected.raw_data(), 48), 0);
  // float32's parameters stay what they are.
  EXPECT_EQ(net.at<nn::Linear>(2).weight.dtype(), f32);
}

TEST_F(Onnx, ANetworkInBfloat16IsWrittenInTheAskedDtype) {
  const models::MLP net({.in = 4, .hidden = 3, .classes = 2});
  net.to(bf16);
  const auto file = written(net, zeros({1, 4}, {.dtype = bf16}));
  EXPECT_EQ(file.inputs[0].type, 1);
  EXPECT_EQ(file.initializers.at("fc1.weight").type, 1);
  EXPECT_EQ(file.initializers.at("fc1.weight").values<float>(), net.fc1.weight.to_vector<float>());
  EXPECT_EQ(file.ops(), (Names{"Gemm", "Relu", "Gemm", "Relu", "Gemm"}));
}

TEST_F(Onnx, NetworksOfImagesInAnyDtypeAndLayoutAreTheSameBytes) {
  const models::ResNet net{{.block = models::ResNetBlock::basic, .layers = {1, 1}, .width = 4, .classes = 3}};
  net.to(bf16);
  io::export_onnx(path_, net, zeros({1, 3, 32, 32}, {.dtype = bf16}));
  const std::string first = bytes();
  net.to(MemoryFormat::channels_last);
  net.to(f32);
  io::export_onnx(path_, net, to_channels_last(zeros({1, 3, 32, 32})));
  EXPECT_TRUE(bytes() == first);
}

TEST_F(Onnx, BatchNormWithWhatFollowsIsWrittenAsSingleOperators) {
  const nn::BatchNorm2d norm{{.channels = 3}};
  norm.eval();
  const auto ops = [&](Activation activation, bool residual) {
    const auto f = [=](const Tensor& x, const Tensor&) { return norm(x * 2, activation, residual ? x : Tensor()); };
    return written(f, zeros({1, 3, 2, 2})).ops();
  };
  EXPECT_EQ(ops(Activation::relu, true), (Names{"Mul", "BatchNormalization", "Add", "Relu"}));
  EXPECT_EQ(ops(Activation::relu, false), (Names{"Mul", "BatchNormalization", "Relu"}));
  EXPECT_EQ(ops(Activation::relu6, true), (Names{"Mul", "BatchNormalization", "Add", "Clip"}));
  EXPECT_EQ(ops(Activation::none, true), (Names{"Mul", "BatchNormalization", "Add"}));
}

TEST_F(Onnx, ModulesKeepTheirModeAndAutocastIsOff) {
  const nn::Sequential net{nn::Linear{{.in = 4, .out = 4}}, nn::Dropout{}, nn::BatchNorm1d{{.channels = 4}}};
  net[1].eval();
  const Tensor mean = net.at<nn::BatchNorm1d>(2).running_mean.clone();
  const amp::Autocast autocast{{.dtype = bf16}};
  const auto file = written(net, ones({2, 4}));
  EXPECT_EQ(file.ops(), (Names{"Gemm", "BatchNormalization"}));
  EXPECT_TRUE(net.is_training());
  EXPECT_FALSE(net[1].is_training());
  EXPECT_TRUE(net[2].is_training());
  EXPECT_EQ(net.at<nn::BatchNorm1d>(2).running_mean.to_vector<float>(), mean.to_vector<float>());
}

TEST_F(Onnx, ReshapesKeepTheBatchOpen) {
  // [B, 2, 6] -> [B * 2, 6] -> [B, 12] -> [B, 3, 4]
  const auto file = written(
      [](const Tensor& x, const Tensor&) {
        const std::int64_t n = x.size(0);
        return x.reshape({n * 2, 6}).reshape({n, 12}).reshape({n, 3, 4});
      },
      zeros({1, 2, 6}));
  ASSERT_EQ(file.ops(), (Names{"Reshape", "Reshape", "Reshape"}));
  const auto target = [&](int i) {
    return file.initializers.at(file.nodes[static_cast<std::size_t>(i)].inputs[1]).values<std::int64_t>();
  };
  EXPECT_EQ(target(0), (Ints{-1, 6}));
  EXPECT_EQ(target(1), (Ints{-1, 12}));
  EXPECT_EQ(target(2), (Ints{0, 3, 4}));
  EXPECT_EQ(file.outputs[0].dims, (Names{"batch", "3", "4"}));
}

TEST_F(Onnx, ConvolutionHasItsAttributes) {
  const Function net(
      [](const Tensor& x, const Tensor& w) {
        return conv2d(x, w, {}, {.stride = {2, 1}, .padding = {1, 3}, .dilation = {1, 2}, .groups = 2});
      },
      zeros({4, 3, 3, 5}));
  const auto file = written(net, zeros({1, 6, 9, 10}));
  ASSERT_EQ(file.ops(), Names{"Conv"});
  const auto& a = file.nodes[0].ints;
  EXPECT_EQ(a.at("strides"), (Ints{2, 1}));
  EXPECT_EQ(a.at("pads"), (Ints{1, 3, 1, 3}));
  EXPECT_EQ(a.at("dilations"), (Ints{1, 2}));
  EXPECT_EQ(a.at("kernel_shape"), (Ints{3, 5}));
  EXPECT_EQ(a.at("group"), Ints{2});
}

TEST_F(Onnx, TransposedConvolutionHasItsAttributes) {
  const Function net(
      [](const Tensor& x, const Tensor& w) {
        return conv_transpose2d(x, w, {}, {.stride = {2, 3}, .padding = {1, 0}, .output_padding = {1, 2}, .groups = 2});
      },
      zeros({4, 3, 3, 5}));
  const auto file = written(net, zeros({1, 4, 6, 7}));
  ASSERT_EQ(file.ops(), Names{"ConvTranspose"});
  const auto& a = file.nodes[0].ints;
  EXPECT_EQ(a.at("strides"), (Ints{2, 3}));
  EXPECT_EQ(a.at("pads"), (Ints{1, 0, 1, 0}));
  EXPECT_EQ(a.at("output_padding"), (Ints{1, 2}));
  EXPECT_EQ(a.at("group"), Ints{2});
  EXPECT_EQ(file.outputs[0].dims, (Names{"batch", "6", "12", "25"}));
}

TEST_F(Onnx, ChannelsLastIsNotSeen) {
  const auto file =
      written([](const Tensor& x, const Tensor&) { return relu(to_channels_last(x)); }, zeros({2, 3, 4, 5}));
  EXPECT_EQ(file.ops(), Names{"Relu"});
  EXPECT_EQ(file.outputs[0].dims, (Names{"batch", "3", "4", "5"}));
}

TEST_F(Onnx, ConstantsAreFoldedAndUnusedCallsLeftOut) {
  const auto file = written(
      [](const Tensor& x, const Tensor&) {
        const Tensor unused = sort(x).values;
        return x + (arange(3).to(f32) * 2 + 1);
      },
      zeros({2, 3}));
  EXPECT_EQ(file.ops(), Names{"Add"});
  ASSERT_EQ(file.initializer_names.size(), 1u);
  EXPECT_EQ(file.initializers.begin()->second.values<float>(), (std::vector<float>{1, 3, 5}));
}

TEST_F(Onnx, InPlaceOpsMakeNewValues) {
  const auto file = written(
      [](const Tensor& x, const Tensor&) {
        Tensor y = x * 2;
        Tensor before = y + 0.5;
        relu_(y);
        return y + before;
      },
      zeros({2, 3}));
  ASSERT_EQ(file.ops(), (Names{"Mul", "Add", "Relu", "Add"}));
  EXPECT_EQ(file.nodes[2].inputs[0], file.nodes[0].outputs[0]);
  EXPECT_EQ(file.nodes[3].inputs, (Names{file.nodes[2].outputs[0], file.nodes[1].outputs[0]}));
}

TEST_F(Onnx, OutputsThatAreInputsOrTwiceTheSame) {
  const Function net([](const Tensor& x, const Tensor&) { return x; });
  const auto forward = [](std::span<const Tensor> in) {
    const Tensor y = relu(in[0]);
    return std::vector<Tensor>{y, in[1], y};
  };
  const Tensor inputs[] = {zeros({2, 3}), zeros({2}, {.dtype = i64})};
  io::export_onnx(path_, net, forward, inputs);
  const OnnxFile file(path_);
  EXPECT_EQ(file.ops(), (Names{"Relu", "Identity", "Identity"}));
  EXPECT_EQ(file.inputs[1].name, "input_1");
  EXPECT_EQ(file.inputs[1].type, 7);
  EXPECT_EQ(file.nodes[0].outputs, Names{"output_0"});
  EXPECT_EQ(file.nodes[1].inputs, Names{"input_1"});
  EXPECT_EQ(file.nodes[2].inputs, Names{"output_0"});
  EXPECT_EQ(file.outputs[2].name, "output_2");
}

TEST_F(Onnx, NamesWhatHasNoForm) {
  const Outer net(Function([](const Tensor& x, const Tensor&) { return relu(sort(x).values); }));
  const std::string text = test::error_of<Error>([&] { written(net, zeros({2, 3})); });
  EXPECT_EQ(text,
            "export_onnx: sort in module inner: has no form in ONNX here; docs/guide/onnx.md lists the ops that have");
  EXPECT_FALSE(fs::exists(path_));
}

TEST_F(Onnx, RefusesWhatItCannotWriteTruly) {
  const Tensor x = ones({2, 3});
  EXPECT_NE(error([](const Tensor& t, const Tensor&) { return t + randn({3}); }, x).find("normal"), std::string::npos);
  EXPECT_NE(error(
                [](const Tensor& t, const Tensor&) {
                  Tensor y = t * 2;
                  Tensor part = y.select(1, 0);
                  part.add_(1);
                  return y;
                },
                x)
                .find("in place through another view"),
            std::string::npos);
  EXPECT_NE(error([](const Tensor& t, const Tensor&) { return t.slice(0, 0, t.size(0) - 1); }, x).find("no multiple"),
            std::string::npos);
  EXPECT_NE(error([](const Tensor& t, const Tensor&) { return t.slice(0, 0, t.size(0) / 2 + 1); }, x)
                .find("follows the batch"),
            std::string::npos);
  EXPECT_NE(
      error([](const Tensor& t, const Tensor&) { return t * static_cast<double>(t.size(0)); }, x).find("constant"),
      std::string::npos);
  EXPECT_NE(error([](const Tensor& t, const Tensor&) { return t.size(0) == 2 ? relu(t) : sigmoid(t); }, x)
                .find("follows the batch"),
            std::string::npos);
  EXPECT_NE(error([](const Tensor& t, const Tensor&) { return t + full({3}, 1e5); }, x, {.dtype = f16}).find("f16"),
            std::string::npos);
  EXPECT_NE(error([](const Tensor& t, const Tensor&) { return relu(t); }, x, {.opset = 16}).find("17 to 21"),
            std::string::npos);
  EXPECT_NE(error([](const Tensor& t, const Tensor&) { return relu(t); }, x, {.dtype = bf16}).find("f32 or f16"),
            std::string::npos);
  EXPECT_NE(
      error([](const Tensor& t, const Tensor&) { return relu(t); }, x, {.output_names = {"input"}}).find("called"),
      std::string::npos);
  EXPECT_NE(error([](const Tensor& t, const Tensor&) { return relu(t); }, zeros({0, 3})).find("[0, 3]"),
            std::string::npos);
}

TEST_F(Onnx, RefusesPoolingResizingAndPaddingThatOnnxHasNot) {
  const Tensor x = ones({1, 2, 9, 8});
  const auto refused = [&](Tensor (*f)(const Tensor&, const Tensor&), const char* why) {
    const std::string text = error(f, x);
    EXPECT_NE(text.find(why), std::string::npos) << text;
    EXPECT_FALSE(fs::exists(path_));
  };
  refused([](const Tensor& t, const Tensor&) { return adaptive_avg_pool2d(t, {4, 4}); }, "sizes that divide");
  refused([](const Tensor& t, const Tensor&) { return adaptive_max_pool2d(t, {3, 3}); }, "sizes that divide");
  refused([](const Tensor& t, const Tensor&) { return avg_pool2d(t, {2}, {.ceil_mode = true}); }, "over the padding");
  // Rounded up in height, and not in width, where a window would begin behind the input.
  refused(
      [](const Tensor& t, const Tensor&) {
        return max_pool2d(t, {2}, {.stride = {2, 9}, .padding = {0, 1}, .ceil_mode = true});
      },
      "ONNX's pooling");
  refused([](const Tensor& t, const Tensor&) { return max_pool2d_with_indices(t, {2}).indices; }, "max_pool2d");
  refused([](const Tensor& t, const Tensor&) { return pad(t, {1, 1}, PadMode::circular); }, "opset 19");
  refused([](const Tensor& t, const Tensor&) { return pad(t, {0, 0, 0, 0, 0, 0, 1, 0}); }, "batch");
  EXPECT_NE(error(
                [](const Tensor& t, const Tensor&) {
                  return pad(t, {-5, 4}, PadMode::circular);
                },
                x, {.opset = 19})
                .find("more than once"),
            std::string::npos);
}

// A limit on the size of files stands for a full disk: write() fails in the middle of the file.
TEST_F(Onnx, AFullDiskLeavesWhatWasThere) {
  const models::MLP net({.in = 100, .hidden = 100, .classes = 5});
  io::export_onnx(path_, net, zeros({1, 100}));
  const std::string good = bytes();
  rlimit was{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &was), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit less{.rlim_cur = 8192, .rlim_max = was.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &less), 0);
  const std::string text = test::error_of<IoError>([&] {
    io::export_onnx(path_, net, zeros({1, 100}), {.opset = 18});
  });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &was), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(text.find("net.onnx: writing failed"), std::string::npos) << text;
  EXPECT_EQ(bytes(), good);
  EXPECT_EQ(std::distance(fs::directory_iterator(temporary_.path()), fs::directory_iterator()), 1);
}

TEST_F(Onnx, FoldersThatAreNotThereAreNamed) {
  const fs::path nowhere = temporary_.path() / "nowhere" / "net.onnx";
  const std::string text = test::error_of<IoError>([&] {
    io::export_onnx(nowhere, models::MLP({.in = 4, .hidden = 3}), zeros({1, 4}));
  });
  EXPECT_NE(text.find("nowhere/net.onnx"), std::string::npos) << text;
}

TEST_F(Onnx, AFixedBatchTakesWhatADynamicOneRefuses) {
  const auto half = [](const Tensor& t, const Tensor&) { return t.slice(0, 0, t.size(0) / 2 + 1); };
  EXPECT_EQ(written(half, ones({4, 3}), {.dynamic_batch = false}).outputs[0].dims, (Names{"3", "3"}));
}

TEST_F(Onnx, RefusesFilesOver2GiBBeforeItTakesTheMemory) {
  // 2.4 GB of parameter that are one element.
  const Function net([](const Tensor& x, const Tensor& w) { return x + w.slice(0, 0, 1); },
                     zeros({1}).expand({600'000'000}));
  const std::string text = test::error_of<IoError>([&] { written(net, zeros({1, 1}), {.dynamic_batch = false}); });
  EXPECT_NE(text.find("2 GiB"), std::string::npos) << text;
}

TEST_F(Onnx, TheDocsNameAllOps) {
  const Names names = io::onnx_ops();
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  std::ifstream file(test::goldens_dir().parent_path().parent_path() / "docs" / "guide" / "onnx.md");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  for (const std::string& n : names) EXPECT_NE(text.find("`" + n + "`"), std::string::npos) << n;
}

}  // namespace
}  // namespace halfstep
