// SPDX-License-Identifier: Apache-2.0
// Networks prepared for quantization: where they are quantized, and that they compute what the same ops with fake
// quantizations written between them compute.
#include "halfstep/quant/quantization.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/models/registry.h"
#include "halfstep/models/resnet.h"
#include "halfstep/models/yolov5.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "tests/support/errors.h"

namespace halfstep::quant {
namespace {

using Names = std::vector<std::string>;

// A residual block as functions and modules, a linear layer behind it.
struct Net : nn::Module<Net> {
  nn::Conv2d conv1 = child("conv1", nn::Conv2d{{.in = 3, .out = 4, .kernel = {3, 3}, .padding = 1, .bias = false}});
  nn::BatchNorm2d bn1 = child("bn1", nn::BatchNorm2d{{.channels = 4}});
  nn::Conv2d conv2 = child("conv2", nn::Conv2d{{.in = 4, .out = 4, .kernel = {3, 3}, .padding = 1}});
  nn::Linear fc = child("fc", nn::Linear{{.in = 16, .out = 5}});
  bool in_place = false;
  Tensor forward(const Tensor& x) const {
    const Tensor a = bn1(conv1(x), Activation::relu);
    Tensor sum = conv2(a) + a;
    if (in_place) {
      relu_(sum);
    } else {
      sum = relu(sum);
    }
    return fc(flatten(max_pool2d(sum, {.kernel_size = {2, 2}}), 1));
  }
};

Tensor batch() {
  manual_seed(3);
  return randn({2, 3, 4, 4});
}

Names names_of(const Quantization& q, bool weights) {
  Names result;
  for (const QuantizedTensor& t : q.tensors()) {
    if (t.weight == weights) result.push_back(t.name);
  }
  return result;
}

// Net's forward() with the fake quantizations of `q` where they belong.
Tensor by_hand(const Net& net, const Quantization& q, const Tensor& x) {
  const auto fake = [&](const char* name, const Tensor& t) { return q.at(name)(t); };
  Tensor a = conv2d(fake("input", x), fake("conv1.weight", net.conv1.weight), {}, {.padding = {1, 1}});
  a = fake("bn1", net.bn1(a, Activation::relu));
  Tensor b = conv2d(a, fake("conv2.weight", net.conv2.weight), net.conv2.bias, {.padding = {1, 1}});
  b = fake("relu", relu(b + a));
  b = flatten(max_pool2d(b, {.kernel_size = {2, 2}}), 1);
  return linear(b, fake("fc.weight", net.fc.weight), net.fc.bias);
}

TEST(Quantization, FindsWhatIsComputedTogether) {
  const Net net;
  const Quantization q = prepare(net, batch());
  EXPECT_EQ(names_of(q, true), (Names{"conv1.weight", "conv2.weight", "fc.weight"}));
  EXPECT_EQ(names_of(q, false), (Names{"input", "bn1", "relu"}));
  Names groups;
  for (const QuantizedTensor& t : q.tensors()) {
    if (!t.group.empty()) groups.push_back(t.group);
  }
  EXPECT_EQ(groups, (Names{"conv2d + batch_norm + relu", "conv2d + add + relu"}));
  EXPECT_TRUE(q.left().empty());
  EXPECT_TRUE(net.is_training());
}

TEST(Quantization, StandsInATracedRunWithoutIt) {
  const Net net;
  prepare(net, batch());
  const nn::TracedForward forward = [&](std::span<const Tensor> in) { return std::vector<Tensor>{net(in[0])}; };
  const QuantizedTrace traced = trace_quantized(net, forward, {batch()});
  Names ops, grids;
  for (const nn::TracedCall& call : traced.trace.calls) ops.push_back(call.op);
  for (const TracedGrid& grid : traced.grids) {
    const nn::TracedCall& call = traced.trace.calls.at(static_cast<std::size_t>(grid.call));
    grids.push_back(grid.name + " " + call.op + " " + std::to_string(grid.input));
    EXPECT_EQ(grid.weight, grid.input == 1) << grid.name;
    EXPECT_EQ(grid.quantizer.get(), &quantization_of(net)->at(grid.name));
  }
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "fake_quantize"), 0);
  EXPECT_EQ(grids, (Names{"input conv2d 0", "conv1.weight conv2d 1", "bn1 relu -1", "conv2.weight conv2d 1",
                          "relu relu -1", "fc.weight linear 1"}));
  for (const nn::TracedCall& call : traced.trace.calls) {
    EXPECT_EQ(keeps_grid(call), call.op == "max_pool2d" || call.op == "view" || call.op == "flatten") << call.op;
  }
  // The thread's runs are quantized again.
  EXPECT_EQ(net(batch()).to_vector<float>(), by_hand(net, *quantization_of(net), batch()).to_vector<float>());
  const Net plain;
  EXPECT_EQ(test::error_of<Error>([&] { trace_quantized(plain, forward, {batch()}); }),
            "trace_quantized: expected a network that quant::prepare() has prepared");
  const nn::TracedForward part = [&](std::span<const Tensor> in) { return std::vector<Tensor>{net.conv1(in[0])}; };
  EXPECT_EQ(test::error_of<Error>([&] { trace_quantized(net, part, {batch()}, "export"); }),
            "export: expected the calls that the network was prepared with, but 'bn1' isn't computed");
}

TEST(Quantization, WithoutFakeQuantizationItIsTheNetwork) {
  const Net net;
  const Net plain = nn::clone(net);
  const Quantization q = prepare(net, batch());
  enable_fake_quant(q, false);
  EXPECT_EQ(net(batch()).to_vector<float>(), plain(batch()).to_vector<float>());
}

TEST(Quantization, ComputesWhatTheOpsWithFakeQuantizationsBetweenThemDo) {
  for (const bool in_place : {false, true}) {
    Net net;
    net.in_place = in_place;
    const Quantization q = prepare(net, batch());
    Net other = nn::clone(net);
    const Quantization same = *quantization_of(other);
    ASSERT_TRUE(other.remove_attached("quantization"));
    for (int step = 0; step < 2; ++step) {  // ranges follow
      const Tensor x = batch() * (step + 1.0);
      const Tensor ours = net(x), theirs = by_hand(other, same, x);
      EXPECT_EQ(ours.to_vector<float>(), theirs.to_vector<float>());
      sum(square(ours)).backward();
      sum(square(theirs)).backward();
      const NamedTensors a = net.parameters(), b = other.parameters();
      ASSERT_EQ(a.size(), b.size());
      for (std::size_t i = 0; i < a.size(); ++i) {
        EXPECT_EQ(a[i].tensor.grad().to_vector<float>(), b[i].tensor.grad().to_vector<float>()) << a[i].name;
      }
    }
    // On their grid: multiples of the scale.
    net.eval();
    const auto& bn1 = q.at("bn1");
    EXPECT_GT(bn1.scale.item<float>(), 0);
    EXPECT_NE(bn1.scale.item<float>(), 1);
  }
}

struct Watching final : OpObserver {
  void after_call(const ObservedCall&) override { ++calls; }
  int calls = 0;
};

TEST(Quantization, FusedOpsAndTheirPartsAreQuantizedInTheSamePlaces) {
  const Net net;
  const Quantization q = prepare(net, batch());
  (void)net(batch());
  net.eval();
  const std::vector<float> fused = net(batch()).to_vector<float>();
  std::vector<float> parts;
  {
    Watching watching;  // takes no fused ops
    const Observing observing(&watching);
    parts = net(batch()).to_vector<float>();
  }
  // A batch norm and what follows round once or twice; a value at the middle between two integers may change by one,
  // which is a 255th of a range of some 3 in one of 16 inputs of the last layer, times weights of at most 1/4.
  for (std::size_t i = 0; i < fused.size(); ++i) EXPECT_NEAR(fused[i], parts[i], 3.0 / 255 / 4 * 2);
}

TEST(Quantization, ClonesAreIndependent) {
  const Net net;
  prepare(net, batch());
  (void)net(batch());
  const Net copy = nn::clone(net);
  net.eval();
  copy.eval();
  EXPECT_EQ(copy(batch()).to_vector<float>(), net(batch()).to_vector<float>());
  ASSERT_NE(quantization_of(copy), nullptr);
  quantization_of(copy)->at("bn1").scale.fill_(0.5);
  EXPECT_NE(quantization_of(net)->at("bn1").scale.item<float>(), 0.5F);
  EXPECT_EQ(net.state_dict().size(), copy.state_dict().size());
}

TEST(Quantization, LeavesOutWhatIsAskedFor) {
  {
    const Net net;
    const Quantization q = prepare(net, batch(), {.skip = {"conv2"}});
    EXPECT_EQ(names_of(q, true), (Names{"conv1.weight", "fc.weight"}));
    EXPECT_EQ(names_of(q, false), (Names{"input", "relu"}));  // conv2 reads bn1's result as it is
    EXPECT_EQ(q.left(), Names{"conv2: left out by option"});
  }
  {
    const Net net;
    const Quantization q = prepare(net, batch(), {.first = false, .last = false});
    EXPECT_EQ(names_of(q, true), Names{"conv2.weight"});
    EXPECT_EQ(names_of(q, false), Names{"bn1"});
    EXPECT_EQ(q.left().size(), 2U);
  }
  const Net net;
  EXPECT_EQ(test::error_of<Error>([&] { prepare(net, batch(), {.skip = {"conv7*"}}); }),
            "prepare: expected the paths of modules with weights in `skip`, got 'conv7*', which fits none");
  EXPECT_EQ(test::error_of<Error>([&] { prepare(net, batch(), {.skip = {"*"}}); }),
            "prepare: expected a network with convolutions or linear layers to quantize, got none");
  EXPECT_EQ(test::error_of<Error>([&] { prepare(net, batch(), {.weight_bits = 9}); }),
            "prepare: expected weight_bits of 2 to 8 or 16, got 9");
  prepare(net, batch());
  EXPECT_EQ(test::error_of<Error>([&] { prepare(net, batch()); }), "prepare: the network is prepared already");
}

TEST(Quantization, WeightsMayHaveOneScale) {
  const Net net;
  const Quantization q = prepare(net, batch(), {.per_channel = false});
  (void)net(batch());
  const FakeQuantize& weight = q.at("conv1.weight");
  const float largest = max(abs(net.conv1.weight.detach())).item<float>();
  // Symmetric: 255 steps of 8 bits cover -largest to largest, PyTorch's formula.
  EXPECT_EQ(weight.scale.to_vector<float>(), std::vector<float>{largest / (254.0F / 2)});
}

TEST(Quantization, OfPublishedNetworks) {
  {
    const models::ResNet net = models::resnet18({.classes = 10});
    const Quantization q = prepare(net, zeros({1, 3, 64, 64}));
    EXPECT_EQ(names_of(q, true).size(), 21U);  // 17 convolutions of 3x3 and 7x7, 3 of 1x1, the linear layer
    // The input, 17 activations behind batch norm, the 3 projections, the mean over places.
    EXPECT_EQ(names_of(q, false).size(), 22U);
  }
  {
    const models::Yolov5 net;
    const Quantization q =
        prepare(net, [&](std::span<const Tensor> in) { return net(in[0]); }, {zeros({1, 3, 64, 64})});
    EXPECT_EQ(names_of(q, true).size(), 60U);  // 57 with batch norm and the 3 of the head
    const std::vector<QuantizedTensor> tensors = q.tensors();
    EXPECT_TRUE(std::none_of(tensors.begin(), tensors.end(), [](const QuantizedTensor& t) {
      return !t.weight && t.name.starts_with("model.24");  // predictions are nobody's input
    }));
    EXPECT_TRUE(std::any_of(tensors.begin(), tensors.end(),
                            [](const QuantizedTensor& t) { return t.group == "conv2d + batch_norm + silu"; }));
  }
}

TEST(Quantization, UnderAutocastWeightsAndResultsHaveTheRegionsDtype) {
  const Net net;
  const Quantization q = prepare(net, batch());
  (void)net(batch());
  net.eval();
  const std::vector<float> exact = net(batch()).to_vector<float>();
  std::vector<float> low;
  {
    const amp::Autocast autocast{{.dtype = bf16}};
    const Tensor y = net(batch());
    EXPECT_EQ(y.dtype(), bf16);
    low = y.to(f32).to_vector<float>();
  }
  // bf16 has 8 bits: the logits of some 1 are off by their rounding, 2^-8, that of the weights and inputs of three
  // layers, and by the integers that change: a few hundredths in all.
  for (std::size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(exact[i], low[i], 0.06);
}

TEST(Quantization, SkippedStepsLeaveNoTrace) {
  const Net net;
  const Quantization q = prepare(net, batch());
  (void)net(batch());
  commit(net);
  const float before = q.at("bn1").scale.item<float>();
  (void)net(batch() * 100);
  EXPECT_NE(q.at("bn1").scale.item<float>(), before);
  commit(net, ones({1}));
  EXPECT_EQ(q.at("bn1").scale.item<float>(), before);
}

}  // namespace
}  // namespace halfstep::quant
