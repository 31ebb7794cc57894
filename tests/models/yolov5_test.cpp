// SPDX-License-Identifier: Apache-2.0
// The detector: parameters by layer, start values and names; results and gradients of the same network in PyTorch; what
// it refuses.
#include "halfstep/models/yolov5.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "halfstep/amp/autocast.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "tests/models/peer_numbers.h"
#include "tests/support/errors.h"
#include "tests/support/golden.h"

namespace halfstep {
namespace {

using models::Yolov5;

std::int64_t numel(const NamedTensors& tensors) {
  std::int64_t n = 0;
  for (const NamedTensor& t : tensors) n += t.tensor.numel();
  return n;
}

// Counted from the published table of layers.
TEST(Yolov5, HasThePublishedParametersOfEachLayer) {
  const Yolov5 net = models::yolov5n();
  const std::vector<std::int64_t> expected = {1760,   4672,  4800,  18560,  29184, 73984,  156928, 295424, 296448,
                                              164608, 33024, 0,     0,      90880, 8320,   0,      0,      22912,
                                              36992,  0,     74496, 147712, 0,     296448, 115005};
  ASSERT_EQ(net.model.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(numel(net.model[i].parameters()), expected[i]) << i;
  EXPECT_EQ(numel(net.parameters()), 1872157);
  EXPECT_EQ(net.state_dict().size(), 349U);
  EXPECT_EQ(net.strides(), (std::vector<std::int64_t>{8, 16, 32}));
  std::map<std::string, Shape> shapes;
  for (const NamedTensor& t : net.state_dict()) shapes.emplace(t.name, t.tensor.sizes());
  EXPECT_EQ(shapes.at("model.0.conv.weight"), Shape({16, 3, 6, 6}));
  EXPECT_EQ(shapes.at("model.4.m.1.cv2.bn.running_var"), Shape({32}));
  EXPECT_EQ(shapes.at("model.24.m.2.bias"), Shape({255}));
  EXPECT_EQ(shapes.at("model.24.anchors"), Shape({3, 3, 2}));
}

// The published sizes' parameters, in millions, for 80 classes.
TEST(Yolov5, HasThePublishedSizes) {
  const auto millions = [](const Yolov5& net) {
    return std::round(static_cast<double>(numel(net.parameters())) / 1e5) / 10;
  };
  EXPECT_EQ(millions(models::yolov5s()), 7.2);
  EXPECT_EQ(millions(models::yolov5m()), 21.2);
}

// ln(8 / (640 / stride)^2) and ln(0.6 / (80 - 0.99999)), on top of a bias that starts within 1 / sqrt(channels).
TEST(Yolov5, HeadsStartAtAPrior) {
  const Yolov5 net = models::yolov5n();
  const double objects[] = {-6.684612, -5.298317, -3.912023};
  for (std::size_t l = 0; l < 3; ++l) {
    const auto bias = net.head().m[l].bias.to_vector<double>();
    const double bound = 1 / std::sqrt(static_cast<double>(net.head().options.in[l])) + 1e-5;
    for (std::size_t i = 0; i < bias.size(); ++i) {
      const std::size_t number = i % 85;
      const double prior = number < 4 ? 0 : number == 4 ? objects[l] : -4.880274;
      EXPECT_NEAR(bias[i], prior, bound) << l << ' ' << i;
    }
  }
}

double difference(const Tensor& got, const test::GoldenTensor& expected) {
  const auto v = got.to_vector<double>();
  EXPECT_EQ(got.sizes(), Shape(expected.shape));
  double largest = 0, most = 0;
  for (std::size_t i = 0; i < v.size(); ++i) {
    largest = std::max(largest, std::abs(v[i] - expected.data[i]));
    most = std::max(most, std::abs(expected.data[i]));
  }
  return largest / most;
}

test::GoldenEntry golden() {
  for (test::GoldenEntry& e : test::read_goldens("detection.json")) {
    if (e.name == "yolov5n") return e;
  }
  throw std::runtime_error("detection.json: no such entry");
}

Yolov5 peer(DType dtype) {
  Yolov5 net = models::yolov5n({.classes = 2});
  const Tensor anchors = net.head().anchors.clone();
  net.to(dtype);
  net.load_state_dict(test::peer_state(net));
  Tensor filled = net.head().anchors;
  filled.copy_(anchors.to(dtype));
  return net;
}

// Both sides round in float64 in other orders; decode() computes in float32, of boxes up to 1,500 pixels.
TEST(Yolov5, IsPyTorchsNetwork) {
  const test::GoldenEntry e = golden();
  const Yolov5 net = peer(f64);
  const Tensor images = test::peer_images(1000, {2, 3, 32, 64}, f64);
  net.eval();
  EXPECT_LE(difference(net.decode(net(images)), e.outputs[0]), 16 * 0x1p-24);
  net.train();
  const auto levels = net(images);
  Tensor total;
  for (std::size_t l = 0; l < 3; ++l) {
    EXPECT_LE(difference(levels[l].detach(), e.outputs[l + 1]), 1e-10) << l;
    const Tensor product =
        sum(levels[l] * test::peer_images(static_cast<std::uint32_t>(1001 + l), levels[l].sizes(), f64));
    total = total.defined() ? total + product : product;
  }
  total.backward();
  Tensor weight;
  for (const NamedTensor& p : net.parameters()) {
    if (p.name == "model.0.conv.weight") weight = p.tensor;
  }
  EXPECT_LE(difference(weight.grad(), e.grads[0].value()), 1e-9);
}

TEST(Yolov5, RunsIn16BitsUnderAutocast) {
  const Yolov5 net = peer(f32).eval();
  const Tensor images = test::peer_images(1000, {2, 3, 32, 64}, f32);
  const Tensor exact = net.decode(net(images));
  for (const DType dtype : {f16, bf16}) {
    const amp::Autocast region{{.dtype = dtype}};
    const auto levels = net(images);
    EXPECT_EQ(levels[0].dtype(), dtype);
    EXPECT_EQ(net.decode(levels).dtype(), f32);
    EXPECT_EQ(net.decode(levels).sizes(), exact.sizes());
  }
}

TEST(Yolov5, CopiesAreIndependentWhereCloned) {
  const Yolov5 net = models::yolov5n({.classes = 1});
  const Yolov5 same = net;
  Yolov5 other = net;
  other.unshare();
  Tensor bias = net.head().m[0].bias.detach();
  bias.fill_(3);
  EXPECT_EQ(same.head().m[0].bias.to_vector<float>(), net.head().m[0].bias.to_vector<float>());
  EXPECT_NE(other.head().m[0].bias.to_vector<float>(), net.head().m[0].bias.to_vector<float>());
}

TEST(Yolov5, NamesWhatItRefuses) {
  const auto error = [](const models::Yolov5Options& o) { return test::error_of<Error>([&] { Yolov5 net{o}; }); };
  EXPECT_EQ(error({.classes = 0}),
            "Yolov5: expected a depth and a width above 0 (at most 100) and at least 1 class, got 0.33, 0.25 and 0");
  EXPECT_EQ(error({.layers = {{.module = "Conv", .arguments = {8, 3, 2}}}}),
            "Yolov5: expected Detect as the last layer, got Conv");
  EXPECT_EQ(error({.layers = {{.module = "Swish"}, {.from = {0}, .module = "Detect"}}}),
            "Yolov5: expected Conv, C3, SPPF, Upsample, Concat or Detect as layer 0, got Swish");
  EXPECT_EQ(error({.layers = {{.from = {3}, .arguments = {8}}, {.from = {0}, .module = "Detect"}}}),
            "Yolov5: layer 0 reads layer 3, expected one before it");
  EXPECT_EQ(error({.layers = {{.arguments = {8, 3, 2}},
                              {.arguments = {8, 3, 2}},
                              {.from = {0, 1}, .module = "Concat"},
                              {.module = "Detect"}}}),
            "Yolov5: layer 2 joins layers of the strides 2 and 4");
  EXPECT_EQ(error({.anchors = {{10, 13, 16}, {1, 2}, {3, 4}}}),
            "DetectionHead: expected pairs of a width and a height as anchors, as many in each level, got 10, 13, 16");
  const Yolov5 net = models::yolov5n();
  EXPECT_EQ(test::error_of<ShapeError>([&] {
              net(rand({1, 3, 64, 80}));
            }),
            "Yolov5: expected images [N, 3, H, W] whose sides are multiples of 32, got [1, 3, 64, 80]");
}

}  // namespace
}  // namespace halfstep
