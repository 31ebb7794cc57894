// SPDX-License-Identifier: Apache-2.0
// Detectors as ONNX files: decoded predictions, folded and not, and non-maximum suppression inside.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "halfstep/models/detections.h"
#include "halfstep/models/yolov5.h"
#include "halfstep/nn/fold.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "tests/io/onnx_reference.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::kUnit;

class OnnxDetectors : public test::OnnxReference {
 protected:
  // A small one whose objectness and classes are anything from 0 to 1.
  static models::Yolov5 detector() {
    models::Yolov5 net = models::yolov5n({.classes = 3});
    for (const NamedTensor& t : net.state_dict()) {
      if (t.tensor.dim() != 1 || !t.tensor.is_floating()) continue;
      const bool factor = t.name.ends_with("var") || t.name.ends_with("weight");
      nn::replace_contents(t.tensor, factor ? rand(t.tensor.sizes()) * 0.6 + 0.7 : randn(t.tensor.sizes()));
    }
    return net;
  }
  static Forward decoded(const models::Yolov5& net) {
    return [net](const Tensor& x) { return net.decode(net(x)); };
  }

  // What Halfstep finds, in the order of the file: by picture, class and falling score.
  static Tensor found(const Tensor& predictions, const io::OnnxNms& o) {
    const auto pictures =
        models::detections(predictions, {.score = o.score, .overlap = o.overlap, .limit = 100000, .multi_label = true});
    std::vector<double> rows;
    for (std::size_t i = 0; i < pictures.size(); ++i) {
      auto objects = pictures[i];
      std::stable_sort(objects.begin(), objects.end(), [](const auto& a, const auto& b) {
        return std::tuple(a.label, -a.score) < std::tuple(b.label, -b.score);
      });
      for (const models::Detection& d : objects) {
        rows.insert(rows.end(),
                    {static_cast<double>(i), static_cast<double>(d.label), d.score, d.left, d.top, d.right, d.bottom});
      }
    }
    return tensor(rows, {static_cast<std::int64_t>(rows.size() / 7), 7}, {.dtype = f32});
  }
  void add_nms(const std::string& name, const nn::ModuleBase& module, const Forward& forward,
               const std::vector<Tensor>& inputs, double tolerance, io::OnnxOptions options) {
    const auto one = [&](std::span<const Tensor> in) { return std::vector<Tensor>{forward(in[0])}; };
    io::export_onnx(folder_ / (name + ".onnx"), module, one, std::span(inputs).first(1), options);
    const NoGrad no_grad;
    module.eval();
    Json runs = Json::array();
    for (const Tensor& x : inputs) {
      const Tensor given = x.to(options.dtype);
      const Tensor expected = found(forward(given.to(f32)), *options.nms);
      EXPECT_GT(expected.size(0), 0) << name;
      runs.push_back({{"inputs", Json::array({recorded(given, "input")})},
                      {"outputs", Json::array({recorded(expected, "detections")})}});
    }
    std::ofstream(folder_ / (name + ".json")) << Json{{"tolerance", tolerance}, {"runs", runs}}.dump(1);
  }
};

// Beside boxes of some hundred pixels nothing would be seen of probabilities.
Tensor scaled(const Tensor& predictions) {
  return cat({predictions.narrow(2, 0, 4) * 1e-3, predictions.narrow(2, 4, predictions.size(2) - 4)}, 2);
}

// 60 layers, each of which rounds by some units of its largest value; boxes of up to 1,500 pixels.
TEST_F(OnnxDetectors, GiveDecodedPredictions) {
  const models::Yolov5 net = detector();
  const std::vector<Tensor> images{rand({1, 3, 64, 96}), to_channels_last(rand({3, 3, 64, 96}))};
  const double tolerance = 60 * 16 * kUnit;
  const auto forward = [](const models::Yolov5& n) { return [n](const Tensor& x) { return scaled(n.decode(n(x))); }; };
  add("yolov5n", net, forward(net), images, tolerance);
  const models::Yolov5 folded = nn::fold_batch_norms(net, images[0]);
  add("folded", folded, forward(folded), images, tolerance, {.opset = 21});
  add("fixed", folded, forward(folded), {images[1]}, tolerance, {.dynamic_batch = false});
  // Every layer rounds to 2^-11, and 60 of them at random to about eight times that; boxes are squares of sigmoids.
  add("halves", net, forward(net), {images[0]}, 3e-2, {.dtype = f16});
  check();
}

// Boxes around a few places, by hand: which of them are left depends on both limits, on the class and on the order.
TEST_F(OnnxDetectors, SuppressWhatOverlaps) {
  const test::Function same([](const Tensor& x) { return x * 1.0; });
  const auto forward = [&](const Tensor& x) { return same(x); };
  const auto predictions = [](std::int64_t pictures) {
    const Tensor place = (rand({pictures, 6, 1, 2}) * 600).expand({pictures, 6, 20, 2}).reshape({pictures, 120, 2});
    const Tensor boxes = cat({place + randn({pictures, 120, 2}) * 12, rand({pictures, 120, 2}) * 40 + 60}, 2);
    return cat({boxes, rand({pictures, 120, 5})}, 2);
  };
  const std::vector<Tensor> inputs{predictions(1), predictions(3)};
  for (const auto& [score, overlap] : {std::pair(0.25, 0.45), {0.05, 0.8}, {0.4, 0.0}}) {
    const io::OnnxNms nms{.score = score, .overlap = overlap, .limit = 1000};
    add_nms("nms_" + std::to_string(static_cast<int>(score * 100)), same, forward, inputs, 16 * kUnit, {.nms = nms});
  }
  add_nms("nms_fixed", same, forward, {inputs[1]}, 16 * kUnit,
          {.opset = 20, .dynamic_batch = false, .nms = io::OnnxNms{}});
  check();
}

TEST_F(OnnxDetectors, FindObjectsByThemselves) {
  const models::Yolov5 net = nn::fold_batch_norms(detector(), rand({1, 3, 64, 64}));
  add_nms("found", net, decoded(net), {rand({1, 3, 64, 64}), rand({2, 3, 64, 64})}, 60 * 16 * kUnit,
          {.nms = io::OnnxNms{.score = 0.3}});
  check();
}

TEST(OnnxNms, RefusesWhatAreNoPredictions) {
  const test::TemporaryDir dir;
  const test::Function same([](const Tensor& x) { return x * 1.0; });
  const auto error = [&](const Shape& sizes, const io::OnnxOptions& options) {
    return test::error_of<Error>([&] { io::export_onnx(dir.path() / "net.onnx", same, zeros(sizes), options); });
  };
  EXPECT_EQ(error({1, 10}, {.nms = io::OnnxNms{}}),
            "export_onnx: nms: expected one floating output [N, predictions, 5 + classes], got [batch, 10]");
  EXPECT_EQ(error({1, 10, 5}, {.nms = io::OnnxNms{}}),
            "export_onnx: nms: expected one floating output [N, predictions, 5 + classes], got [batch, 10, 5]");
  EXPECT_EQ(
      error({1, 10, 6}, {.nms = io::OnnxNms{.score = 2}}),
      "export_onnx: nms: expected a score and an overlap from 0 to 1 and a limit of at least 1, got 2, 0.45 and 300");
  EXPECT_EQ(error({1, 10, 6}, {.output_names = {"a", "b"}, .nms = io::OnnxNms{}}),
            "export_onnx: nms: expected one name of an output, got 2");
  EXPECT_EQ(error({1, 10, 6}, {.output_names = {"input"}, .nms = io::OnnxNms{}}),
            "export_onnx: two inputs or outputs are called 'input'");
  EXPECT_FALSE(std::filesystem::exists(dir.path() / "net.onnx"));
}

}  // namespace
}  // namespace halfstep
