// SPDX-License-Identifier: Apache-2.0
// Prepared networks as integers, against what their fake quantization computes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/data/digits.h"
#include "halfstep/data/loader.h"
#include "halfstep/data/mnist.h"
#include "halfstep/infer/int8_product_internal.h"
#include "halfstep/infer/parity.h"
#include "halfstep/infer/session.h"
#include "halfstep/models/mlp.h"
#include "halfstep/models/mobilenet.h"
#include "halfstep/models/resnet.h"
#include "halfstep/models/yolov5.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/resample.h"
#include "halfstep/ops/sort.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/quant/quantization.h"
#include "tests/support/errors.h"

namespace halfstep::infer {
namespace {

#define EXPECT_ERROR(call, text)                                                 \
  EXPECT_NE(test::error_of([&] { (void)(call); }).find(text), std::string::npos) \
      << test::error_of([&] { (void)(call); })

using Names = std::vector<std::string>;
using Forward = nn::TracedForward;

template <class M>
Forward forward_of(const M& net) {
  return [&net](std::span<const Tensor> in) {
    if constexpr (std::is_convertible_v<decltype(net(in[0])), std::vector<Tensor>>) {
      return std::vector<Tensor>(net(in[0]));
    } else {
      return std::vector<Tensor>{net(in[0])};
    }
  };
}

// Weights and statistics as training leaves them, factors of both signs among them.
void season(const nn::ModuleBase& module, bool signs = true) {
  manual_seed(3);
  for (const NamedTensor& t : module.state_dict()) {
    if (t.tensor.dim() != 1 || !t.tensor.is_floating()) continue;
    const bool factor = t.name.ends_with("var") || t.name.ends_with("weight");
    Tensor values = factor ? rand(t.tensor.sizes()) * 0.6 + 0.7 : rand(t.tensor.sizes()) * 0.4 - 0.2;
    if (signs && t.name.ends_with("weight")) values = values * (1 - 2 * trunc(rand(t.tensor.sizes()) * 1.2));
    nn::replace_contents(t.tensor, values.to(t.tensor.dtype()));
  }
}

// Prepares the network, shows it some batches, and freezes what it saw.
template <class M>
void calibrate(const M& net, const Shape& sample, const quant::QuantizationOptions& options = {}, int batches = 6) {
  Shape sizes = sample;
  sizes.insert(0, 4);
  manual_seed(11);
  const Forward forward = forward_of(net);
  quant::prepare(net, forward, {randn(sizes)}, options);
  net.train();
  const NoGrad no_grad;
  for (int i = 0; i < batches; ++i) {
    const Tensor x = randn(sizes);
    (void)forward({&x, 1});
  }
  quant::enable_observer(net, false);
  net.eval();
}

// The share of elements that are more than a step of 1/255 of what is expected apart.
double share_apart(const Tensor& got, const Tensor& expected) {
  EXPECT_EQ(got.sizes(), expected.sizes());
  const std::vector<double> a = got.to_vector<double>(), b = expected.to_vector<double>();
  const auto [least, most] = std::minmax_element(b.begin(), b.end());
  const double step = (*most - *least) / 255;
  std::int64_t apart = 0;
  for (std::size_t i = 0; i < a.size(); ++i) apart += !(std::abs(a[i] - b[i]) <= step);
  return static_cast<double>(apart) / static_cast<double>(a.size());
}

Names quantized_calls(const Session& session) {
  const Names calls = session.calls();
  const std::set<std::string> kinds(calls.begin(), calls.end());
  return {kinds.begin(), kinds.end()};
}

// Of all results 99.9% lie within a step of what fake quantization gives in float32. In a deep network with random
// weights one integer that is rounded in another way changes others, up to the whole of the last layers: there float32
// itself isn't that close to fake quantization in float64, and integers are to be as close as it is, within the
// accidents of which elements it hits.
template <class M>
void expect_parity(const M& net, const Shape& sample, std::int64_t batch,
                   const quant::QuantizationOptions& options = {}) {
  SCOPED_TRACE(net.kind());
  season(net);
  calibrate(net, sample, options, 30);
  Shape sizes = sample;
  sizes.insert(0, batch);
  manual_seed(17);
  const Tensor x = randn(sizes), wide_x = x.to(f64);
  const Forward forward = forward_of(net);
  const Session session(net, forward, {x}, {.int8 = true});
  const NoGrad no_grad;
  const M wide = nn::clone(net);
  wide.to(f64).eval();
  const std::vector<Tensor> expected = forward({&x, 1}), exact = forward_of(wide)({&wide_x, 1});
  for (int call = 0; call < 2; ++call) {
    const std::vector<Tensor> got = session.run({&x, 1});
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_LE(share_apart(got[i], expected[i]), 0.001 + 1.5 * share_apart(expected[i], exact[i])) << i;
      EXPECT_LE(share_apart(got[i], exact[i]), 0.001 + 1.5 * share_apart(expected[i], exact[i])) << i;
    }
  }
  EXPECT_EQ(session.why_not(), "");
  // By itself each layer is right: an integer is another one only where the value lies so close to the middle between
  // two that float32 decides. A float32 sum of n products is off by about sqrt(n) 2^-24 of its terms, which are some
  // hundred steps: 2^-14 of a step for n = 576, and so is the share of elements that close to the middle.
  for (const LayerParity& layer : compare_layers(net, forward, {x})) {
    EXPECT_EQ(layer.alone.by_more, 0) << layer.name << " " << layer.call << " " << layer.alone.most;
    EXPECT_LE(layer.alone.by_one * static_cast<double>(layer.elements),
              2 + 0x1p-13 * static_cast<double>(layer.elements))
        << layer.name << " " << layer.call;
  }
}

TEST(Int8Session, GivesWhatFakeQuantizationGives) {
  expect_parity(models::MLP(), {784}, 200);
  expect_parity(models::cifar_resnet(20), {3, 32, 32}, 40);
  expect_parity(models::MobileNetV2({.width = 0.25, .classes = 100}), {3, 64, 64}, 10);
  expect_parity(models::yolov5n({.classes = 3}), {3, 64, 64}, 4);
}

// A network that has learned something amplifies less, and its logits tell inputs apart.
TEST(Int8Session, GivesWhatFakeQuantizationOfATrainedNetworkGives) {
  manual_seed(1);
  const models::ResNet net = models::cifar_resnet(20);
  const data::ImageOptions normal{.mean = 0.1307, .std = 0.3081};
  const data::MnistDataset digits{data::make_digits(data::Split::kTrain, {.count = 1920}), normal};
  data::DataLoader loader{digits, {.batch_size = 64, .shuffle = true}};
  const Device device = zeros({1}).device();
  const auto picture = [&](const Tensor& digit) {
    return pad(digit.to(device), {2, 2, 2, 2}).expand({-1, 3, -1, -1}).contiguous();
  };
  optim::SGD optimizer{net.parameters(), {.lr = 0.05, .momentum = 0.9}};
  for (auto [images, labels] : loader) {
    optimizer.zero_grad();
    cross_entropy(net(picture(images)), labels.to(device)).backward();
    optimizer.step();
  }
  quant::prepare(net, zeros({1, 3, 32, 32}));
  const NoGrad no_grad;
  for (auto [images, labels] : loader) (void)net(picture(images));
  quant::enable_observer(net, false);
  net.eval();
  const data::MnistDataset others{data::make_digits(data::Split::kTest, {.count = 300}), normal};
  data::DataLoader tests{others, {.batch_size = 100}};
  const Session session(net, zeros({1, 3, 32, 32}), {.int8 = true});
  std::vector<Tensor> got, expected;
  std::int64_t right = 0;
  for (auto [images, labels] : tests) {
    const Tensor x = picture(images);
    got.push_back(session(x));
    expected.push_back(net(x));
    right += sum(eq(argmax(got.back(), 1), labels.to(device)).to(i64)).item<std::int64_t>();
  }
  EXPECT_GT(right, 200) << "of 300: it has learned";
  EXPECT_LE(share_apart(cat(got, 0), cat(expected, 0)), 0.001);
}

TEST(Int8Session, GivesItForOtherGridsToo) {
  const models::ResNet net = models::cifar_resnet(8);
  const quant::QuantizationOptions kinds[] = {{.symmetric = true},
                                              {.per_channel = false},
                                              {.reduce_range = true},
                                              {.weight_bits = 4},
                                              {.activation_bits = 5},
                                              {.learned = true},
                                              {.skip = {"fc", "layer1.0.conv2"}},
                                              {.first = false, .last = false},
                                              {.weight_bits = 16},
                                              {.activation_bits = 16}};
  for (const auto& options : kinds) {
    SCOPED_TRACE(&options - kinds);
    expect_parity(nn::clone(net), {3, 32, 32}, 20, options);
  }
}

// Activations of 16 bits: two exact products, of high and low bytes. What they stand for is x (the values on the grid)
// times w, rounded to float32: x once, each of the products, their sum and the bias once, each to 2^-24 of what is
// added up. A wrong integer would be off by 2^-16 of a term, of which there are 45.
TEST(Int8Session, ComputesActivationsOf16BitsAsTwoProducts) {
  for (const bool symmetric : {false, true}) {
    for (const bool pointwise : {false, true}) {
      manual_seed(3);
      const nn::Conv2d net{{.in = 5, .out = 7, .kernel = {3, 3}, .stride = {2}, .padding = 1}};
      const nn::Linear rows{{.in = 45, .out = 6}};
      const nn::ModuleBase& module = pointwise ? static_cast<const nn::ModuleBase&>(rows) : net;
      const Forward forward = [&](std::span<const Tensor> in) {
        return std::vector<Tensor>{pointwise ? rows(in[0]) : net(in[0])};
      };
      const Shape sizes = pointwise ? Shape{4, 45} : Shape{4, 5, 9, 9};
      quant::prepare(module, forward, {randn(sizes)}, {.activation_bits = 16, .symmetric = symmetric});
      const NoGrad no_grad;
      for (int i = 0; i < 3; ++i) (void)forward(std::vector<Tensor>{randn(sizes) + 0.5});
      quant::enable_observer(module, false);
      module.eval();
      const Session session(module, forward, {zeros(sizes)}, {.int8 = true});
      EXPECT_EQ(session.calls(), (Names{"fake_quantize", pointwise ? "linear_int16" : "conv2d_int16"}));
      EXPECT_NE(test::error_of([&] {
                  (void)Session(module, forward, {zeros(sizes)}, {.dtype = bf16, .int8 = true});
                }).find("activations of 16 bits are float32 between products, expected dtype f32 or none, got bf16"),
                std::string::npos);
      const quant::Quantization& q = *quant::quantization_of(module);
      Tensor x = randn(sizes) * 1.5;  // some beyond the range
      const Tensor grid_x = q.at("input")(x).to(f64);
      const Tensor w = q.at("weight")(pointwise ? rows.weight : net.weight).to(f64);
      const Tensor bias = (pointwise ? rows.bias : net.bias).detach().to(f64);
      const auto product = [&](const Tensor& a, const Tensor& b, const Tensor& c) {
        return pointwise ? linear(a, b, c) : conv2d(a, b, c, {.stride = {2}, .padding = {1}});
      };
      const std::vector<double> expected = product(grid_x, w, bias).to_vector<double>();
      const std::vector<double> terms = product(abs(grid_x), abs(w), abs(bias)).to_vector<double>();
      for (int call = 0; call < 2; ++call) {
        const std::vector<double> got = session(x).to_vector<double>();
        ASSERT_EQ(got.size(), expected.size());
        for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 5 * 0x1p-24 * terms[i]) << i;
      }
    }
  }
}

TEST(Int8Session, StaysInIntegersFromTheFirstLayerToTheLast) {
  const models::ResNet net = models::cifar_resnet(20);
  season(net);
  calibrate(net, {3, 32, 32});
  const Session session(net, zeros({1, 3, 32, 32}), {.int8 = true});
  const Names calls = session.calls();
  EXPECT_EQ(calls.front(), "quantize");
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "quantize"), 1);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "dequantize"), 0);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "conv2d_int8"), 21) << "19, and 2 of the shortcuts";
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "linear_int8"), 1);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "mean_int8"), 1);
  for (const char* floating : {"conv2d", "linear", "batch_norm", "relu", "mean", "add_int8"}) {
    EXPECT_EQ(std::count(calls.begin(), calls.end(), floating), 0) << floating;
  }
}

TEST(Int8Session, TakesPicturesOfBytesByATable) {
  const models::ResNet net = models::cifar_resnet(8);
  season(net);
  calibrate(net, {3, 32, 32});
  manual_seed(2);
  const Tensor p = (rand({6, 3, 32, 32}) * 256).to(u8);
  const Tensor mean = tensor({0.5, 0.25, 0.125}, {1, 3, 1, 1}), x = (p.to(f32) / 255 - mean) / 0.25;
  const Session floats(net, zeros({1, 3, 32, 32}), {.int8 = true});
  const Session bytes(net, zeros({1, 3, 32, 32}),
                      {.int8 = true, .pictures = Pictures{.mean = {0.5F, 0.25F, 0.125F}, .std = {0.25F}}});
  EXPECT_EQ(bytes(p).to_vector<float>(), floats(x).to_vector<float>());
  EXPECT_EQ(bytes.calls().front(), "pictures_int8");
  EXPECT_EQ(std::ranges::count(bytes.calls(), "quantize"), 0);
  const Session one(net, zeros({1, 3, 32, 32}), {.int8 = true, .pictures = Pictures{.mean = {0.5F}, .std = {0.25F}}});
  EXPECT_EQ(one(p).to_vector<float>(), floats((p.to(f32) / 255 - 0.5) / 0.25).to_vector<float>());
}

// What lies between products: sums outside of groups, grids that differ, moved integers, functions by table, means.
struct Between : nn::Module<Between> {
  nn::Conv2d a = child("a", nn::Conv2d{{.in = 3, .out = 8, .kernel = {3, 3}, .padding = 1}});
  nn::Conv2d b = child("b", nn::Conv2d{{.in = 3, .out = 8, .kernel = {3, 3}, .padding = 1, .bias = false}});
  nn::BatchNorm2d bn = child("bn", nn::BatchNorm2d{{.channels = 8}});
  nn::Conv2d depthwise = child("depthwise", nn::Conv2d{{.in = 24, .out = 24, .kernel = {3, 3}, .groups = 24}});
  nn::Conv2d last = child("last", nn::Conv2d{{.in = 24, .out = 4, .kernel = {1, 1}}});
  nn::Linear gate = child("gate", nn::Linear{{.in = 24, .out = 24}});
  nn::Linear fc = child("fc", nn::Linear{{.in = 4, .out = 6}});
  Tensor forward(const Tensor& x) const {
    const Tensor left = hardswish(a(x)), right = bn(b(x));
    const Tensor small = interpolate(max_pool2d(left, {.kernel_size = {2, 2}}), {.scale_factor = {2, 2}});
    const Tensor both = relu(small + left);                   // neither is a product's own result
    const Tensor joined = cat({both, tanh(both), right}, 1);  // grids of different ranges, a function by table
    Tensor y = leaky_relu(depthwise(pad(joined, {1, 1, 1, 1})), 0.1);
    const Tensor s = sigmoid(gate(mean(y, Shape{2, 3})));  // a gate, in floating point behind the product
    y = y * s.unsqueeze(2).unsqueeze(3);
    return fc(flatten(adaptive_avg_pool2d(last(y), {1, 1}), 1));
  }
};

TEST(Int8Session, ComputesWhatLiesBetweenProducts) {
  const Between net;
  expect_parity(net, {3, 8, 8}, 50);
  const Names calls = Session(net, zeros({1, 3, 8, 8}), {.int8 = true}).calls();
  for (const char* wanted : {"max_pool2d", "interpolate", "add_int8", "lookup_int8", "cat", "pad", "mean_int8",
                             "conv2d_int8", "linear_int8"}) {
    EXPECT_GE(std::count(calls.begin(), calls.end(), wanted), 1) << wanted;
  }
  // Floating are the network's input, and what the gate computes and is multiplied by.
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "dequantize"), 1);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "quantize"), 2);
  for (const char* unwanted : {"conv2d", "linear", "add", "relu", "hardswish", "tanh", "batch_norm", "mean"}) {
    EXPECT_EQ(std::count(calls.begin(), calls.end(), unwanted), 0) << unwanted;
  }
}

// A sequence's convolution with its norm behind a view.
struct Sequence : nn::Module<Sequence> {
  nn::Conv1d conv = child("conv", nn::Conv1d{{.in = 4, .out = 8, .kernel = {3}, .padding = 1}});
  nn::BatchNorm1d bn = child("bn", nn::BatchNorm1d{{.channels = 8}});
  nn::Linear rows = child("rows", nn::Linear{{.in = 8, .out = 8}});
  nn::Linear fc = child("fc", nn::Linear{{.in = 8, .out = 5}});
  Tensor forward(const Tensor& x) const {
    const Tensor a = relu(bn(conv(x)));
    return fc(mean(silu(rows(a.transpose(1, 2))), Shape{1}));
  }
};
TEST(Int8Session, TakesSequences) { expect_parity(Sequence(), {4, 12}, 50); }

TEST(Int8Weights, MoveFactorsIntoScalesAndSignsIntoIntegers) {
  const Tensor q = tensor({1, -2, 127, 4, 5, 6, 100, -127, 50, 9}, {5, 2}).to(i8);
  const Tensor scale = tensor({0.5, 0.25, 0.125, 0.5, 0.5}).to(f32);
  const nn::detail::NormFactors factors{tensor({2, -4, 0, 1e-100, 1}).to(f64), tensor({3, 1, -0.75, 2, -0.3}).to(f64)};
  const detail::Int8Weights w = detail::int8_weights(q, scale, factors);
  EXPECT_EQ(w.weight.to_vector<double>(), (std::vector<double>{1, -2, -127, -4, 0, 0, 0, 0, 50, 9}));
  // A factor of 0, or one that is none beside the shift, leaves that alone.
  EXPECT_EQ(w.scale.to_vector<double>(), (std::vector<double>{1, 1, 0.125, 0.5, 0.5}));
  EXPECT_EQ(w.bias.to_vector<float>(), (std::vector<float>{3, 1, -0.75F, 2, -0.3F}));
  // One scale for all channels.
  const detail::Int8Weights one = detail::int8_weights(q, tensor({0.5}).to(f32), factors);
  EXPECT_EQ(one.scale.to_vector<double>(), (std::vector<double>{1, 2, 0.5, 0.5, 0.5}));
}

// A channel whose norm says nothing of the product, and one whose factor is tiny.
TEST(Int8Session, KeepsTheShiftsOfNormsWithoutAFactor) {
  const models::ResNet net = models::cifar_resnet(8);
  season(net);
  for (const NamedTensor& t : net.state_dict()) {
    if (!t.name.ends_with("bn1.weight")) continue;
    std::vector<double> values = t.tensor.to_vector<double>();
    values[0] = 0;
    values[1] = 1e-12;
    values[2] = -1e-30;
    nn::replace_contents(t.tensor, tensor(values).to(f32));
  }
  calibrate(net, {3, 32, 32});
  manual_seed(4);
  const Tensor x = randn({20, 3, 32, 32});
  const Session session(net, x, {.int8 = true});
  const NoGrad no_grad;
  EXPECT_LE(share_apart(session(x), net(x)), 0.001);
  for (const LayerParity& layer : compare_layers(net, x)) EXPECT_EQ(layer.alone.by_more, 0) << layer.name;
}

TEST(Int8Session, HoldsForAnyBatchAndIsNotChangedByTheNetwork) {
  const models::ResNet net = models::cifar_resnet(8);
  season(net);
  calibrate(net, {3, 32, 32});
  const Session session(net, zeros({1, 3, 32, 32}), {.int8 = true});
  manual_seed(4);
  const Tensor x = randn({5, 3, 32, 32});
  const std::vector<float> whole = session(x).to_vector<float>();
  for (std::int64_t i = 0; i < 5; ++i) {
    const std::vector<float> one = session(x.slice(0, i, i + 1)).to_vector<float>();
    EXPECT_TRUE(std::equal(one.begin(), one.end(), whole.begin() + i * 10))
        << "integers don't know of their neighbours";
  }
  const NoGrad no_grad;
  for (const NamedTensor& t : net.state_dict()) {
    if (t.tensor.is_floating()) Tensor(t.tensor).fill_(0.5);
  }
  EXPECT_EQ(session(x).to_vector<float>(), whole);
}

TEST(Int8Session, RefusesWhatIsNotQuantized) {
  const models::MLP net;
  EXPECT_ERROR(Session(net, zeros({1, 784}), {.int8 = true}),
               "session: int8: expected a network that quant::prepare()");
  quant::prepare(net, zeros({1, 784}));
  EXPECT_ERROR(Session(net, zeros({1, 784}), {.int8 = true}),
               "expected a range for 'input', but its observer has seen nothing");
  EXPECT_ERROR(compare_layers(models::MLP(), zeros({1, 784})),
               "compare_layers: expected a network that quant::prepare()");
  // A float session of a prepared network computes what it computes: with fake quantization.
  net.train();
  manual_seed(1);
  const Tensor x = randn({8, 784});
  (void)net(x);
  quant::enable_observer(net, false);
  net.eval();
  const NoGrad no_grad;
  EXPECT_EQ(Session(net, x)(x).to_vector<float>(), net(x).to_vector<float>());
  // Switched off, nothing is on a grid.
  quant::enable_fake_quant(net, false);
  EXPECT_EQ(quantized_calls(Session(net, x, {.int8 = true})), (Names{"linear", "relu"}));
}

// A layer in integers, and one that may be left out.
struct Halves : nn::Module<Halves> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 16, .out = 64}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 64, .out = 8}});
  Tensor* between = nullptr;  // receives what fc2 reads
  Tensor forward(const Tensor& x) const {
    const Tensor hidden = relu(fc1(x));
    if (between) *between = hidden;
    return fc2(hidden);
  }
};

TEST(Int8Session, ComputesWhatWasLeftOutIn16Bits) {
  manual_seed(5);
  Halves net;
  calibrate(net, {16}, {.skip = {"fc2"}});
  const Tensor x = randn({10, 16});
  Tensor hidden;
  const Forward both = [&](std::span<const Tensor> in) {
    net.between = &hidden;
    const Tensor result = net(in[0]);
    net.between = nullptr;
    return std::vector<Tensor>{result, hidden};
  };
  const std::vector<Tensor> exact = Session(net, both, {x}, {.int8 = true}).run({&x, 1});
  const NoGrad no_grad;
  const Tensor terms = matmul(abs(exact[1]), transpose(abs(net.fc2.weight), 0, 1));
  for (const DType dtype : {bf16, f16}) {
    SCOPED_TRACE(name(dtype));
    const Session session(net, x, {.dtype = dtype, .int8 = true});
    EXPECT_EQ(session.calls(), (Names{"quantize", "linear_int8", "linear"}));
    const Tensor got = session(x);
    EXPECT_EQ(got.dtype(), dtype);
    EXPECT_EQ(session(x).to_vector<double>(), got.to_vector<double>()) << "planned";
    // What fc2 reads, its weight, its bias and its result are each rounded by up to u of themselves.
    const double u = dtype == bf16 ? 0x1p-8 : 0x1p-11;
    const Tensor bound = (terms * (2 * u) + abs(net.fc2.bias) * u + abs(exact[0]) * u) * 1.02 + 1e-6;
    EXPECT_EQ(sum(gt(abs(got.to(f32) - exact[0]), bound)).item<std::int64_t>(), 0);
    EXPECT_NE(got.to_vector<double>(), exact[0].to_vector<double>());
    // The same where a float32 result of the integers is rounded by the call that reads it.
    const std::vector<Tensor> twice = Session(net, both, {x}, {.dtype = dtype, .int8 = true}).run({&x, 1});
    EXPECT_EQ(twice[0].to_vector<double>(), got.to_vector<double>());
    EXPECT_EQ(twice[1].to_vector<double>(), exact[1].to_vector<double>()) << "the integers are the same";
    EXPECT_EQ(twice[1].dtype(), f32);
  }
}

TEST(CompareLayers, TellsWhereAnErrorArises) {
  const models::ResNet net = models::cifar_resnet(8);
  season(net);
  calibrate(net, {3, 32, 32});
  manual_seed(4);
  const Tensor x = randn({8, 3, 32, 32});
  const std::vector<LayerParity> layers = compare_layers(net, x);
  Names names;
  for (const LayerParity& layer : layers) names.push_back(layer.name);
  for (const char* name : {"bn1", "layer1.0.bn1", "fc"})
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
  EXPECT_TRUE(std::is_sorted(layers.begin(), layers.end(), [](const LayerParity& a, const LayerParity& b) {
    return std::pair(a.chain.by_more, a.chain.by_one) > std::pair(b.chain.by_more, b.chain.by_one);
  }));
  const auto named = [&](const char* name) {
    return *std::find_if(layers.begin(), layers.end(), [&](const LayerParity& l) { return l.name == name; });
  };
  EXPECT_EQ(named("fc").elements, 80);
  EXPECT_TRUE(named("fc").floating);
  EXPECT_EQ(named("fc").call, "linear_int8");
  EXPECT_EQ(named("bn1").module, "conv1");
  EXPECT_FALSE(named("bn1").floating);
  EXPECT_EQ(named("bn1").elements, 8 * 16 * 32 * 32);
  // The chain before it is none: the first layer has the same differences in both.
  EXPECT_EQ(named("bn1").chain.by_one, named("bn1").alone.by_one);
}

}  // namespace
}  // namespace halfstep::infer
