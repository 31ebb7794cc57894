// SPDX-License-Identifier: Apache-2.0
#include "halfstep/models/yolov5.h"

#include <algorithm>
#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/nn/given_internal.h"
#include "halfstep/nn/pooling.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/view.h"

namespace halfstep::models {
namespace {

nn::Sequential bottlenecks(const CspOptions& o) {
  nn::Sequential blocks;
  const std::int64_t width = o.out / 2;
  for (std::int64_t i = 0; i < o.blocks; ++i) {
    blocks.push_back(CspBottleneck{{.in = width, .out = width, .shortcut = o.shortcut}});
  }
  return blocks;
}

// Joins its inputs' channels.
class Concat : public nn::Module<Concat> {
 public:
  Tensor forward(const std::vector<Tensor>& inputs) const { return cat(inputs, 1); }
  std::string kind() const override { return "Concat"; }
};

std::vector<DetectorLayer> published_layers() {
  const auto conv = [](double out, double kernel, double stride) {
    return DetectorLayer{.module = "Conv", .arguments = {out, kernel, stride}};
  };
  const auto csp = [](std::int64_t repeats, double out, bool shortcut = true) {
    return DetectorLayer{.repeats = repeats, .module = "C3", .arguments = {out, shortcut ? 1.0 : 0.0}};
  };
  const auto joined = [](int with) { return DetectorLayer{.from = {-1, with}, .module = "Concat"}; };
  const DetectorLayer twice{.module = "Upsample", .arguments = {2}};
  return {{.module = "Conv", .arguments = {64, 6, 2, 2}},
          conv(128, 3, 2),
          csp(3, 128),
          conv(256, 3, 2),
          csp(6, 256),
          conv(512, 3, 2),
          csp(9, 512),
          conv(1024, 3, 2),
          csp(3, 1024),
          {.module = "SPPF", .arguments = {1024, 5}},
          conv(512, 1, 1),
          twice,
          joined(6),
          csp(3, 512, false),
          conv(256, 1, 1),
          twice,
          joined(4),
          csp(3, 256, false),
          conv(256, 3, 2),
          joined(14),
          csp(3, 512, false),
          conv(512, 3, 2),
          joined(10),
          csp(3, 1024, false),
          {.from = {17, 20, 23}, .module = "Detect"}};
}

Yolov5Options filled(Yolov5Options o) {
  if (!(o.depth > 0 && o.depth <= 100 && o.width > 0 && o.width <= 100) || o.classes < 1) {
    fail<Error>("Yolov5: expected a depth and a width above 0 (at most 100) and at least 1 class, got {}, {} and {}",
                o.depth, o.width, o.classes);
  }
  if (o.layers.empty()) o.layers = published_layers();
  if (o.anchors.empty()) {
    o.anchors = {{10, 13, 16, 30, 33, 23}, {30, 61, 62, 45, 59, 119}, {116, 90, 156, 198, 373, 326}};
  }
  return o;
}

// Number `i` of the arguments; `otherwise` where there are fewer.
std::int64_t argument(const DetectorLayer& layer, std::size_t i, double otherwise) {
  const double v = i < layer.arguments.size() ? layer.arguments[i] : otherwise;
  if (!(v >= 0 && v <= 1 << 20) || v != std::floor(v)) {
    fail<Error>("Yolov5: expected whole numbers from 0 to 2^20 as arguments of {}, got {}", layer.module, v);
  }
  return static_cast<std::int64_t>(v);
}

Yolov5 sized(double depth, double width, const Yolov5Options& options) {
  Yolov5Options o = options;
  o.depth = depth;
  o.width = width;
  return Yolov5{o};
}

}  // namespace

ConvNormSiLU::ConvNormSiLU(const ConvNormSiLUOptions& o)
    : conv(child("conv", nn::Conv2d{{.in = nn::given_channels(o, "ConvNormSiLU").in,
                                     .out = o.out,
                                     .kernel = {o.kernel},
                                     .stride = {o.stride},
                                     .padding = o.padding < 0 ? o.kernel / 2 : o.padding,
                                     .bias = false}})),
      bn(child("bn", nn::BatchNorm2d{{.channels = o.out, .eps = 1e-3, .momentum = 0.03}})) {}

Tensor ConvNormSiLU::forward(const Tensor& input) const { return bn(conv(input), Activation::silu); }

CspBottleneck::CspBottleneck(const CspOptions& o)
    : cv1(child("cv1", ConvNormSiLU{{.in = nn::given_channels(o, "CspBottleneck").in, .out = o.out}})),
      cv2(child("cv2", ConvNormSiLU{{.in = o.out, .out = o.out, .kernel = 3}})),
      add(o.shortcut && o.in == o.out) {}

Tensor CspBottleneck::forward(const Tensor& input) const {
  const Tensor y = cv2(cv1(input));
  return add ? input + y : y;
}

CspBlock::CspBlock(const CspOptions& o)
    : cv1(child("cv1", ConvNormSiLU{{.in = nn::given_channels(o, "CspBlock").in, .out = o.out / 2}})),
      cv2(child("cv2", ConvNormSiLU{{.in = o.in, .out = o.out / 2}})),
      cv3(child("cv3", ConvNormSiLU{{.in = o.out / 2 * 2, .out = o.out}})),
      m(child("m", bottlenecks(o))) {}

Tensor CspBlock::forward(const Tensor& input) const { return cv3(cat({m(cv1(input)), cv2(input)}, 1)); }

SpatialPyramid::SpatialPyramid(const CspOptions& o)
    : cv1(child("cv1", ConvNormSiLU{{.in = nn::given_channels(o, "SpatialPyramid").in, .out = o.in / 2}})),
      cv2(child("cv2", ConvNormSiLU{{.in = o.in / 2 * 4, .out = o.out}})),
      kernel(o.kernel) {
  if (kernel < 1 || kernel % 2 == 0) fail<Error>("SpatialPyramid: expected an odd kernel, got {}", kernel);
}

Tensor SpatialPyramid::forward(const Tensor& input) const {
  const auto pooled = [this](const Tensor& x) {
    return max_pool2d(x, {kernel}, {.stride = {1}, .padding = {kernel / 2}});
  };
  const Tensor x = cv1(input), y = pooled(x), z = pooled(y);
  return cv2(cat({x, y, z, pooled(z)}, 1));
}

DetectionHead::DetectionHead(const DetectionHeadOptions& o) : options(o) {
  const std::size_t levels = o.in.size();
  if (levels == 0 || o.strides.size() != levels || o.anchors.size() != levels) {
    fail<Error>("DetectionHead: expected channels, strides and anchors of as many levels, got {}, {} and {}", levels,
                o.strides.size(), o.anchors.size());
  }
  const std::size_t sides = o.anchors[0].size();
  std::vector<double> cells;
  for (std::size_t l = 0; l < levels; ++l) {
    if (sides == 0 || sides % 2 != 0 || o.anchors[l].size() != sides) {
      fail<Error>("DetectionHead: expected pairs of a width and a height as anchors, as many in each level, got {}",
                  fmt::join(o.anchors[l], ", "));
    }
    for (const double side : o.anchors[l]) {
      if (!(side > 0)) fail<Error>("DetectionHead: expected anchors above 0, got {}", side);
      cells.push_back(side / static_cast<double>(o.strides[l]));
    }
  }
  const auto each = static_cast<std::int64_t>(sides / 2);
  anchors = buffer("anchors", tensor(cells, {static_cast<std::int64_t>(levels), each, 2}));
  nn::ModuleList<nn::Conv2d> list;
  const std::int64_t numbers = 5 + o.classes;
  const NoGrad no_grad;
  for (std::size_t l = 0; l < levels; ++l) {
    list.push_back(nn::Conv2d{{.in = o.in[l], .out = each * numbers, .kernel = {1}}});
    // The log odds of an object in a cell, and of a class in an object (of 80 classes 0.6 / (80 - 1)).
    const Tensor bias = list[l].bias.view({each, numbers});
    const double cell = static_cast<double>(o.strides[l]) / 640;
    bias.select(1, 4).add_(std::log(8 * cell * cell));
    bias.narrow(1, 5, o.classes).add_(std::log(0.6 / (static_cast<double>(o.classes) - 0.99999)));
  }
  m = child("m", std::move(list));
}

std::vector<Tensor> DetectionHead::forward(const std::vector<Tensor>& levels) const {
  std::vector<Tensor> result;
  for (std::size_t l = 0; l < levels.size(); ++l) {
    const Tensor y = m[l](levels[l]);
    const std::int64_t each = anchors.size(1);
    result.push_back(y.view({y.size(0), each, y.size(1) / each, y.size(2), y.size(3)}).permute({0, 1, 3, 4, 2}));
  }
  return result;
}

std::string DetectionHead::describe() const {
  return fmt::format("{}, strides={}", options.classes, fmt::join(options.strides, ", "));
}

Yolov5::Layers::Layers(const Yolov5Options& o) {
  struct Shape {
    std::int64_t channels, stride;
  };
  std::vector<Shape> shapes = {{3, 1}};  // of the images, then of each layer
  const auto wide = [&](std::int64_t channels) {
    return static_cast<std::int64_t>(std::ceil(static_cast<double>(channels) * o.width / 8)) * 8;
  };
  for (std::size_t i = 0; i < o.layers.size(); ++i) {
    const DetectorLayer& layer = o.layers[i];
    const std::string& kind = layer.module;
    Node node;
    for (const int f : layer.from) {
      const std::int64_t at = f < 0 ? static_cast<std::int64_t>(i) + f : f;
      if (at < -1 || at >= static_cast<std::int64_t>(i)) {
        fail<Error>("Yolov5: layer {} reads layer {}, expected one before it", i, f);
      }
      node.from.push_back(static_cast<std::size_t>(at + 1));
      if (at >= 0) nodes_[static_cast<std::size_t>(at)].last_use = i;
    }
    if (node.from.empty() || (node.from.size() > 1 && kind != "Concat" && kind != "Detect")) {
      fail<Error>("Yolov5: expected one layer that layer {}, {}, reads, got {}", i, kind, node.from.size());
    }
    Shape shape = shapes[node.from[0]];
    const std::int64_t repeats =
        layer.repeats > 1 ? std::max<std::int64_t>(std::llround(static_cast<double>(layer.repeats) * o.depth), 1)
                          : layer.repeats;
    if (repeats < 1 || repeats > 1000 || (repeats != 1 && kind != "C3")) {
      fail<Error>("Yolov5: expected 1 repeat of layer {}, {} (C3: 1 to 1000), got {}", i, kind, repeats);
    }
    const auto take = [&node]<class M>(const M& module) {
      node.module = std::make_shared<M>(module);
      node.call = [](const nn::ModuleBase& base, const std::vector<Tensor>& inputs) {
        if constexpr (std::is_same_v<M, Concat>) {
          return static_cast<const M&>(base)(inputs);
        } else {
          return static_cast<const M&>(base)(inputs[0]);
        }
      };
    };
    const bool last = i + 1 == o.layers.size();
    if (last != (kind == "Detect"))
      fail<Error>("Yolov5: expected Detect as the last layer, got {}", o.layers.back().module);
    if (kind == "Conv") {
      const std::int64_t out = wide(argument(layer, 0, 0)), kernel = argument(layer, 1, 1);
      const std::int64_t stride = argument(layer, 2, 1);
      const ConvNormSiLUOptions conv{.in = shape.channels,
                                     .out = out,
                                     .kernel = kernel,
                                     .stride = stride,
                                     .padding = layer.arguments.size() > 3 ? argument(layer, 3, 0) : -1};
      take(ConvNormSiLU{conv});
      shape = {out, shape.stride * stride};
    } else if (kind == "C3") {
      const std::int64_t out = wide(argument(layer, 0, 0));
      take(CspBlock{{.in = shape.channels, .out = out, .blocks = repeats, .shortcut = argument(layer, 1, 1) != 0}});
      shape.channels = out;
    } else if (kind == "SPPF") {
      const std::int64_t out = wide(argument(layer, 0, 0));
      take(SpatialPyramid{{.in = shape.channels, .out = out, .kernel = argument(layer, 1, 5)}});
      shape.channels = out;
    } else if (kind == "Upsample") {
      const std::int64_t factor = argument(layer, 0, 2);
      if (factor < 1 || shape.stride % factor != 0) {
        fail<Error>("Yolov5: expected a factor of layer {} that divides its stride {}, got {}", i, shape.stride,
                    factor);
      }
      take(nn::Upsample{{.scale_factor = {static_cast<double>(factor)}}});
      shape.stride /= factor;
    } else if (kind == "Concat") {
      shape.channels = 0;
      for (const std::size_t f : node.from) {
        if (shapes[f].stride != shape.stride) {
          fail<Error>("Yolov5: layer {} joins layers of the strides {} and {}", i, shape.stride, shapes[f].stride);
        }
        shape.channels += shapes[f].channels;
      }
      take(Concat{});
    } else if (kind == "Detect") {
      DetectionHeadOptions head{.anchors = o.anchors, .classes = o.classes};
      for (const std::size_t f : node.from) {
        head.in.push_back(shapes[f].channels);
        head.strides.push_back(shapes[f].stride);
      }
      node.module = std::make_shared<DetectionHead>(head);
    } else {
      fail<Error>("Yolov5: expected Conv, C3, SPPF, Upsample, Concat or Detect as layer {}, got {}", i, kind);
    }
    set_name(*node.module, std::to_string(i));
    nodes_.push_back(std::move(node));
    shapes.push_back(shape);
  }
}

DetectorLevels Yolov5::Layers::forward(const Tensor& images) const {
  std::vector<Tensor> results = {images};
  std::vector<Tensor> inputs;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    inputs.clear();
    for (const std::size_t f : node.from) inputs.push_back(results[f]);
    if (i + 1 == nodes_.size()) return static_cast<const DetectionHead&>(*node.module)(inputs);
    results.push_back(node.call(*node.module, inputs));
    // What no later layer reads needs no memory.
    for (const std::size_t f : node.from) {
      if (f > 0 && nodes_[f - 1].last_use == i) results[f] = {};
    }
  }
  return {};
}

void Yolov5::Layers::unshare() {
  ModuleBase::unshare();
  for (Node& node : nodes_) {
    node.module = node.module->copy();
    node.module->unshare();
  }
}

std::vector<std::pair<std::string, nn::ModuleBase*>> Yolov5::Layers::held() const {
  std::vector<std::pair<std::string, nn::ModuleBase*>> result;
  for (const Node& node : nodes_) result.emplace_back(node.module->name(), node.module.get());
  return result;
}

Yolov5::Yolov5(const Yolov5Options& o) : options(filled(o)), model(child("model", Layers{options})) {}

const DetectionHead& Yolov5::head() const { return static_cast<const DetectionHead&>(*model.nodes_.back().module); }

std::string Yolov5::describe() const {
  return fmt::format("{}, depth={}, width={}", options.classes, options.depth, options.width);
}

DetectorLevels Yolov5::forward(const Tensor& images) const {
  const std::int64_t most = *std::max_element(strides().begin(), strides().end());
  if (images.dim() != 4 || images.size(1) != 3 || images.size(2) < most || images.size(2) % most != 0 ||
      images.size(3) < most || images.size(3) % most != 0) {
    fail<ShapeError>("Yolov5: expected images [N, 3, H, W] whose sides are multiples of {}, got {}", most,
                     images.sizes().str());
  }
  return model(to_channels_last(images));
}

Tensor Yolov5::decode(const DetectorLevels& levels) const {
  std::vector<Tensor> rows;
  for (std::size_t l = 0; l < levels.size(); ++l) {
    const Tensor y = sigmoid(levels[l].to(f32));
    const Device device = y.device();
    const std::int64_t each = y.size(1), height = y.size(2), width = y.size(3);
    const auto stride = static_cast<double>(strides()[l]);
    const auto numbers = [&](std::int64_t n) { return arange(0, n, 1, {.dtype = f32, .device = device}); };
    const Tensor column = numbers(width).view({1, 1, 1, width}), row = numbers(height).view({1, 1, height, 1});
    const Tensor anchor = head().anchors[static_cast<std::int64_t>(l)].to(f32) * stride;
    const auto side = [&](int i) {
      return square(y.select(-1, 2 + i) * 2) * anchor.select(-1, i).view({1, each, 1, 1});
    };
    const auto centre = [&](int i, const Tensor& cell) { return (y.select(-1, i) * 2 - 0.5 + cell) * stride; };
    const Tensor box = stack({centre(0, column), centre(1, row), side(0), side(1)}, -1);
    rows.push_back(cat({box, y.narrow(-1, 4, y.size(-1) - 4)}, -1).reshape({y.size(0), -1, y.size(-1)}));
  }
  return cat(rows, 1);
}

Yolov5 yolov5n(const Yolov5Options& o) { return sized(0.33, 0.25, o); }
Yolov5 yolov5s(const Yolov5Options& o) { return sized(0.33, 0.5, o); }
Yolov5 yolov5m(const Yolov5Options& o) { return sized(0.67, 0.75, o); }
Yolov5 yolov5l(const Yolov5Options& o) { return sized(1, 1, o); }
Yolov5 yolov5x(const Yolov5Options& o) { return sized(1.33, 1.25, o); }

}  // namespace halfstep::models
