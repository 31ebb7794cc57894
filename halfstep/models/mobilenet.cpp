// SPDX-License-Identifier: Apache-2.0
#include "halfstep/models/mobilenet.h"

#include <algorithm>
#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/given_internal.h"
#include "halfstep/nn/init.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/view.h"

namespace halfstep::models {
namespace {

// Multiples of 8 that are at least nine tenths of what was asked for.
std::int64_t rounded(double channels) {
  const auto nearest = static_cast<std::int64_t>(channels + 4) / 8 * 8;
  const std::int64_t result = std::max<std::int64_t>(8, nearest);
  return static_cast<double>(result) < 0.9 * channels ? result + 8 : result;
}

// The paper's Table 2.
struct Stage {
  std::int64_t expand, channels, blocks, stride;
};
constexpr Stage kStages[] = {{1, 16, 1, 1}, {6, 24, 2, 2},  {6, 32, 3, 2}, {6, 64, 4, 2},
                             {6, 96, 3, 1}, {6, 160, 3, 2}, {6, 320, 1, 1}};

nn::Sequential inverted(const InvertedResidualOptions& o) {
  const std::int64_t between = o.in * o.expand;
  nn::Sequential layers;
  if (o.expand != 1) layers.push_back(ConvNormReLU6{{.in = o.in, .out = between, .kernel = 1}});
  layers.push_back(ConvNormReLU6{{.in = between, .out = between, .stride = o.stride, .groups = between}});
  layers.push_back(nn::Conv2d{{.in = between, .out = o.out, .kernel = {1}, .bias = false, .initialise = false}});
  layers.push_back(nn::BatchNorm2d{{.channels = o.out}});
  return layers;
}

nn::Sequential all_features(const MobileNetV2Options& o) {
  nn::Sequential layers;
  std::int64_t in = rounded(32 * o.width);
  layers.push_back(ConvNormReLU6{{.in = 3, .out = in, .stride = 2}});
  for (const Stage& s : kStages) {
    const std::int64_t out = rounded(static_cast<double>(s.channels) * o.width);
    for (std::int64_t i = 0; i < s.blocks; ++i) {
      layers.push_back(InvertedResidual{{.in = in, .out = out, .stride = i == 0 ? s.stride : 1, .expand = s.expand}});
      in = out;
    }
  }
  layers.push_back(ConvNormReLU6{{.in = in, .out = rounded(1280 * std::max(1.0, o.width)), .kernel = 1}});
  return layers;
}

MobileNetV2Options checked(const MobileNetV2Options& o) {
  if (!(o.width > 0) || !std::isfinite(o.width) || o.width > 100 || o.classes < 1) {
    fail<Error>("MobileNetV2: expected a width above 0 (at most 100) and at least 1 class, got {} and {}", o.width,
                o.classes);
  }
  return o;
}

}  // namespace

ConvNormReLU6::ConvNormReLU6(const ConvNormReLU6Options& o)
    : conv(child("0", nn::Conv2d{{.in = nn::given_channels(o, "ConvNormReLU6").in,
                                  .out = o.out,
                                  .kernel = {o.kernel},
                                  .stride = {o.stride},
                                  .padding = o.kernel / 2,
                                  .groups = o.groups,
                                  .bias = false,
                                  .initialise = false}})),
      norm(child("1", nn::BatchNorm2d{{.channels = o.out}})) {}

Tensor ConvNormReLU6::forward(const Tensor& input) const { return norm(conv(input), Activation::relu6); }

InvertedResidual::InvertedResidual(const InvertedResidualOptions& o)
    : options(o), conv(child("conv", inverted(nn::given_channels(o, "InvertedResidual")))) {}

Tensor InvertedResidual::forward(const Tensor& input) const {
  if (options.stride != 1 || options.in != options.out) return conv(input);
  // The sum is the last batch norm's, so that it is no pass of its own.
  const Scope scope(conv);
  const std::size_t last = conv.size() - 1;
  Tensor y = input;
  for (std::size_t i = 0; i + 1 < last; ++i) y = conv.at<ConvNormReLU6>(i)(y);
  y = conv.at<nn::Conv2d>(last - 1)(y);
  return conv.at<nn::BatchNorm2d>(last)(y, Activation::none, input);
}

MobileNetV2::MobileNetV2(const MobileNetV2Options& o)
    : options(checked(o)),
      features(child("features", all_features(o))),
      classifier(child("classifier",
                       nn::Sequential{nn::Dropout{{.p = o.dropout}},
                                      nn::Linear{{.in = rounded(1280 * std::max(1.0, o.width)), .out = o.classes}}})) {
  apply([](const std::string&, const nn::ModuleBase& module) {
    if (const auto* c = dynamic_cast<const nn::Conv2d*>(&module)) {
      nn::init::kaiming_normal_(c->weight, {.mode = nn::init::FanMode::fan_out});
    }
    if (const auto* l = dynamic_cast<const nn::Linear*>(&module)) {
      nn::init::normal_(l->weight, 0, 0.01);
      nn::init::zeros_(l->bias);
    }
  });
}

Tensor MobileNetV2::forward(const Tensor& images) const {
  if (images.dim() != 4 || images.size(1) != 3) {
    fail<ShapeError>("MobileNetV2: expected images [N, 3, H, W], got {}", images.sizes().str());
  }
  const Tensor x = features(to_channels_last(images));
  return classifier(flatten(adaptive_avg_pool2d(x, {1}), 1));
}

}  // namespace halfstep::models
