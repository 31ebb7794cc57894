// SPDX-License-Identifier: Apache-2.0
// Batch norms folded into convolutions: against both one behind the other, and what is left alone.
#include "halfstep/nn/fold.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/models/registry.h"
#include "halfstep/models/resnet.h"
#include "halfstep/models/yolov5.h"
#include "halfstep/nn/container.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using Names = std::vector<std::string>;
constexpr double kUnit = 0x1p-24;  // a rounding of float32

// Statistics and weights of batch norm as training leaves them: none that could be left out or taken for another.
void season(const nn::ModuleBase& module) {
  manual_seed(3);
  for (const NamedTensor& t : module.state_dict()) {
    if (t.tensor.dim() != 1 || !t.tensor.is_floating()) continue;
    const bool factor = t.name.ends_with("var") || t.name.ends_with("weight");
    const Tensor values = factor ? rand(t.tensor.sizes()) * 0.6 + 0.7 : rand(t.tensor.sizes()) * 0.4 - 0.2;
    nn::replace_contents(t.tensor, values.to(t.tensor.dtype()));
  }
}
std::int64_t numel(const nn::ModuleBase& module) {
  std::int64_t n = 0;
  for (const NamedTensor& t : module.parameters()) n += t.tensor.numel();
  return n;
}
// The largest difference, as a share of the largest value.
double difference(const Tensor& got, const Tensor& expected) {
  const auto a = got.detach().to_vector<double>(), b = expected.detach().to_vector<double>();
  EXPECT_EQ(got.sizes(), expected.sizes());
  double most = 0, largest = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    most = std::max(most, std::isfinite(a[i]) ? std::abs(a[i] - b[i]) : INFINITY);
    largest = std::max(largest, std::abs(b[i]));
  }
  return most / largest;
}

// y = (w x + b - mean) g / sqrt(var + eps) + h: with deviations 2 and 0.5 the numbers are exact.
TEST(FuseConvBnEval, MultipliesWeightsAndMovesTheBias) {
  for (const bool bias : {true, false}) {
    const nn::Conv2d conv{{.in = 1, .out = 2, .kernel = {1}, .bias = bias}};
    const nn::BatchNorm2d norm{{.channels = 2, .eps = 0}};
    const auto set = [](const Tensor& t, const std::vector<double>& values) {
      nn::replace_contents(t, tensor(values, t.sizes()).to(t.dtype()));
    };
    set(conv.weight, {3, 5});
    if (bias) set(conv.bias, {1, 2});
    set(norm.weight, {6, 2});
    set(norm.bias, {10, 20});
    set(norm.running_mean, {4, 8});
    set(norm.running_var, {4, 0.25});
    const nn::Conv2d both = nn::fuse_conv_bn_eval(conv, norm);
    EXPECT_EQ(both.weight.to_vector<double>(), (std::vector<double>{9, 20}));
    EXPECT_EQ(both.bias.to_vector<double>(), bias ? (std::vector<double>{1, -4}) : (std::vector<double>{-2, -12}));
    EXPECT_EQ(conv.weight.to_vector<double>(), (std::vector<double>{3, 5})) << "the given ones stay";
    EXPECT_EQ(both.state_dict().size(), 2u);
  }
  EXPECT_EQ(test::error_of<Error>([] {
              nn::fuse_conv_bn_eval(nn::Conv2d{{.in = 1, .out = 2, .kernel = {1}}}, nn::BatchNorm2d{{.channels = 3}});
            }),
            "fuse_conv_bn_eval: expected a batch norm of the convolution's 2 channels, got one of 3");
  EXPECT_EQ(test::error_of<Error>([] {
              nn::fuse_conv_bn_eval(nn::Conv1d{{.in = 1, .out = 2, .kernel = {1}}},
                                    nn::BatchNorm1d{{.channels = 2, .track_running_stats = false}});
            }),
            "fuse_conv_bn_eval: expected a batch norm with running statistics, got one without");
}

// Weights that are rounded once more, to 2^-24 in float32 and 2^-53 in float64; sums of 36 products.
TEST(FuseConvBnEval, IsBothUpToRounding) {
  for (const DType dtype : {f32, f64}) {
    const nn::Conv2d conv{{.in = 8, .out = 6, .kernel = {3}, .stride = {2}, .padding = 1, .groups = 2}};
    const nn::BatchNorm2d norm{{.channels = 6}};
    season(norm);
    conv.to(dtype);
    norm.to(dtype);
    nn::replace_contents(norm.running_mean, norm.running_mean.to(dtype));
    norm.eval();
    const Tensor x = randn({2, 8, 9, 7}, {.dtype = dtype});
    const double unit = dtype == f32 ? kUnit : 0x1p-53;
    EXPECT_LE(difference(nn::fuse_conv_bn_eval(conv, norm)(x), norm(conv(x))), 64 * unit) << name(dtype);
  }
}

// In float64 nothing but an error shows; in float32 each layer's sums round by some units of their largest value, at
// random, and what comes in is passed on as it is: n layers are within n times 16 units.
TEST(FoldBatchNorms, LeavesWhatNetworksCompute) {
  struct Case {
    const char* model;
    std::int64_t size;
    int norms, layers;
  };
  for (const Case& c : {Case{"cnn", 28, 3, 4},
                        {"resnet20", 32, 21, 22},
                        {"resnet18", 32, 20, 21},
                        {"resnet50", 32, 53, 54},
                        {"mobilenet_v2", 32, 52, 53}}) {
    for (const DType dtype : {f32, f64}) {
      if (dtype == f64 && c.layers > 22) continue;  // takes its time
      const models::Model net = models::make_model(c.model, {.classes = 7});
      season(*net.module);
      net.module->to(dtype);
      net.module->eval();
      const bool grey = c.size == 28;
      const Tensor x = randn({2, grey ? 1 : 3, c.size, c.size}, {.dtype = dtype});
      const Tensor before = net.forward(x);
      const std::int64_t parameters = numel(*net.module);
      std::int64_t channels = 0;
      net.module->apply([&](const std::string&, const nn::ModuleBase& m) {
        if (const auto* norm = dynamic_cast<const nn::BatchNorm2d*>(&m)) channels += norm->options.channels;
      });
      const nn::FoldReport report =
          nn::fold_batch_norms(const_cast<nn::ModuleBase&>(*net.module), [&] { net.forward(x); });
      EXPECT_EQ(report.folded.size(), static_cast<std::size_t>(c.norms)) << c.model;
      EXPECT_EQ(report.left, Names{}) << c.model;
      // A norm had two parameters a channel, its convolution has a bias now.
      EXPECT_EQ(numel(*net.module), parameters - channels) << c.model;
      EXPECT_TRUE(net.module->buffers().empty()) << c.model;
      EXPECT_LE(difference(net.forward(x), before), dtype == f64 ? 1e-12 : c.layers * 16 * kUnit) << c.model;
    }
  }
}

// 1,867,405: the published count of the folded detector.
TEST(FoldBatchNorms, LeavesWhatADetectorFinds) {
  const models::Yolov5 net = models::yolov5n();
  season(net);
  net.to(f64);
  net.eval();
  const Tensor x = rand({2, 3, 64, 96}, {.dtype = f64});
  const models::Yolov5 folded = nn::fold_batch_norms(net, x);
  EXPECT_EQ(numel(folded), 1867405);
  EXPECT_EQ(numel(net), 1872157) << "the network itself stays";
  const auto expected = net(x), got = folded(x);
  for (std::size_t l = 0; l < 3; ++l) EXPECT_LE(difference(got[l], expected[l]), 1e-12) << l;
  Names names;
  for (const NamedTensor& t : folded.state_dict()) {
    if (t.name.starts_with("model.0.")) names.push_back(t.name);
  }
  EXPECT_EQ(names, (Names{"model.0.conv.weight", "model.0.conv.bias"}));
  EXPECT_NE(folded.str().find("BatchNorm2d(16, folded)"), std::string::npos) << folded.str();
}

// Sequences are images one pixel high; the activation and the sum stay where they were.
TEST(FoldBatchNorms, KeepsWhatFollows) {
  struct Net : nn::Module<Net> {
    nn::Conv1d conv = child("conv", nn::Conv1d{{.in = 4, .out = 6, .kernel = {3}, .padding = 1, .dtype = f64}});
    nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 6, .dtype = f64}});
    nn::Conv2d image = child("image", nn::Conv2d{{.in = 1, .out = 2, .kernel = {1}, .dtype = f64}});
    nn::BatchNorm2d wide = child("wide", nn::BatchNorm2d{{.channels = 2, .dtype = f64}});
    Activation activation = Activation::none;
    Tensor forward(const Tensor& x) const {
      const Tensor y = norm(conv(x), activation);
      return wide(image(y.unsqueeze(1)), activation, y.unsqueeze(1).expand({y.size(0), 2, y.size(1), y.size(2)}));
    }
  };
  for (const Activation activation : {Activation::none, Activation::relu, Activation::relu6, Activation::silu}) {
    Net net;
    net.activation = activation;
    season(net);
    net.eval();
    const Tensor x = randn({3, 4, 9}, {.dtype = f64});
    const Net folded = nn::fold_batch_norms(net, x);
    EXPECT_TRUE(folded.norm.is_folded() && folded.wide.is_folded());
    EXPECT_FALSE(net.norm.is_folded());
    EXPECT_LE(difference(folded(x), net(x)), 1e-14) << name(activation);
    folded.train();
    EXPECT_EQ(test::error_of<Error>([&] { folded(x); }),
              "BatchNorm1d: it was folded into the convolution before it and can't be trained; call eval(), or train "
              "the network that it was folded from");
    const Net again = nn::fold_batch_norms(folded, x);
    EXPECT_LE(difference(again(x), net(x)), 1e-14) << "twice";
  }
}

// Each for a reason of its own; the network stays what it was.
TEST(FoldBatchNorms, LeavesWhatIsNoPair) {
  struct Net : nn::Module<Net> {
    static nn::Conv2d make_conv() { return nn::Conv2d{{.in = 3, .out = 3, .kernel = {3}, .padding = 1, .dtype = f64}}; }
    static nn::BatchNorm2d make_norm(bool tracked = true) {
      return nn::BatchNorm2d{{.channels = 3, .track_running_stats = tracked, .dtype = f64}};
    }
    nn::BatchNorm2d first = child("first", make_norm());
    nn::Conv2d seen_twice = child("seen_twice", make_conv());
    nn::BatchNorm2d half = child("half", make_norm());
    nn::Conv2d called_twice = child("called_twice", make_conv());
    nn::BatchNorm2d once = child("once", make_norm());
    nn::Conv2d before = child("before", make_conv());
    nn::BatchNorm2d often = child("often", make_norm());
    nn::Conv2d plain = child("plain", make_conv());
    nn::BatchNorm2d own = child("own", make_norm(false));
    nn::BatchNorm2d idle = child("idle", make_norm());
    nn::Conv2d fine = child("fine", make_conv());
    nn::BatchNorm2d folds = child("folds", make_norm());
    Tensor forward(const Tensor& x) const {
      Tensor y = first(x);
      const Tensor z = seen_twice(y);
      y = half(z) + z;
      y = called_twice(once(called_twice(y)));
      y = often(often(before(y)));
      return folds(fine(own(plain(y))));
    }
  };
  Net net;
  season(net);
  net.eval();
  const Tensor x = randn({2, 3, 5, 5}, {.dtype = f64});
  const Tensor expected = net(x);
  const nn::FoldReport report = nn::fold_batch_norms(net, [&] { net(x); });
  EXPECT_EQ(report.folded, Names{"folds"});
  EXPECT_EQ(report.left,
            (Names{"first: reads no convolution's result", "half: its convolution's result is read elsewhere, too",
                   "once: its convolution is called more than once", "often: is called more than once",
                   "own: has no running statistics", "idle: was not called, or shares its tensors"}));
  EXPECT_LE(difference(net(x), expected), 1e-14);
}

// A convolution that is in the network twice can't be changed for one of its places.
TEST(FoldBatchNorms, LeavesSharedWeights) {
  const nn::Conv2d conv{{.in = 3, .out = 3, .kernel = {1}, .dtype = f64}};
  const auto norm = [] { return nn::BatchNorm2d{{.channels = 3, .dtype = f64}}; };
  nn::Sequential net{conv, norm(), conv, norm()};
  season(net);
  net.eval();
  const Tensor x = randn({2, 3, 4, 4}, {.dtype = f64}), expected = net(x);
  const nn::FoldReport report = nn::fold_batch_norms(net, [&] { net(x); });
  EXPECT_TRUE(report.folded.empty());
  EXPECT_EQ(report.left, (Names{"1: reads no convolution's result", "3: reads no convolution's result"}));
  EXPECT_EQ(net(x).to_vector<double>(), expected.to_vector<double>());
}

}  // namespace
}  // namespace halfstep
