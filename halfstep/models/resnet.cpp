// SPDX-License-Identifier: Apache-2.0
#include "halfstep/models/resnet.h"

#include "halfstep/core/fail.h"
#include "halfstep/nn/given_internal.h"
#include "halfstep/nn/init.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/view.h"

namespace halfstep::models {
namespace {

nn::Conv2d conv(std::int64_t kernel, std::int64_t in, std::int64_t out, std::int64_t stride = 1) {
  return nn::Conv2d{{.in = in,
                     .out = out,
                     .kernel = {kernel},
                     .stride = {stride},
                     .padding = kernel / 2,
                     .bias = false,
                     .initialise = false}};
}

nn::Sequential shortcut(const ResidualBlockOptions& o, std::int64_t out) {
  if (o.stride == 1 && o.in == out) return {};
  return nn::Sequential{conv(1, o.in, out, o.stride), nn::BatchNorm2d{{.channels = out}}};
}

ResNetOptions checked(const ResNetOptions& o) {
  const auto fewest = [](const Shape& s) {
    std::int64_t least = s[0];
    for (const std::int64_t n : s) least = std::min(least, n);
    return least;
  };
  if (o.layers.empty() || o.layers.size() > 4 || fewest(o.layers) < 1) {
    fail<Error>("ResNet: expected 1 to 4 stages of at least 1 block, got {}", o.layers.str());
  }
  if (o.width < 1 || o.classes < 1) {
    fail<Error>("ResNet: expected a width and classes of at least 1, got {} and {}", o.width, o.classes);
  }
  return o;
}

std::int64_t expansion(const ResNetOptions& o) {
  return o.block == ResNetBlock::basic ? BasicBlock::kExpansion : Bottleneck::kExpansion;
}

// Stage `number`, from 0; empty where there are fewer.
nn::Sequential stage(const ResNetOptions& o, int number) {
  nn::Sequential blocks;
  if (number >= o.layers.size()) return blocks;
  const std::int64_t width = o.width << number;
  for (std::int64_t i = 0; i < o.layers[number]; ++i) {
    const bool first = i == 0;
    const std::int64_t before = number == 0 ? o.width : width / 2 * expansion(o);
    const ResidualBlockOptions block{
        .in = first ? before : width * expansion(o), .width = width, .stride = first && number > 0 ? 2 : 1};
    if (o.block == ResNetBlock::basic) {
      blocks.push_back(BasicBlock{block});
    } else {
      blocks.push_back(Bottleneck{block});
    }
  }
  return blocks;
}

ResNet make(ResNetOptions o, ResNetBlock block, const Shape& layers) {
  o.block = block;
  o.layers = layers;
  return ResNet{o};
}

const ResidualBlockOptions& given(const ResidualBlockOptions& o, const char* kind) {
  nn::check_given(o.in, kind, "in", ".in = 64, .width = 64");
  nn::check_given(o.width, kind, "width", ".in = 64, .width = 64");
  return o;
}

}  // namespace

BasicBlock::BasicBlock(const ResidualBlockOptions& o)
    : conv1(child("conv1", conv(3, given(o, "BasicBlock").in, o.width, o.stride))),
      bn1(child("bn1", nn::BatchNorm2d{{.channels = o.width}})),
      conv2(child("conv2", conv(3, o.width, o.width))),
      bn2(child("bn2", nn::BatchNorm2d{{.channels = o.width}})),
      downsample(child("downsample", shortcut(o, o.width))) {}

Tensor BasicBlock::forward(const Tensor& input) const {
  const Tensor y = bn1(conv1(input), Activation::relu);
  return bn2(conv2(y), Activation::relu, downsample(input));
}

Bottleneck::Bottleneck(const ResidualBlockOptions& o)
    : conv1(child("conv1", conv(1, given(o, "Bottleneck").in, o.width))),
      bn1(child("bn1", nn::BatchNorm2d{{.channels = o.width}})),
      conv2(child("conv2", conv(3, o.width, o.width, o.stride))),
      bn2(child("bn2", nn::BatchNorm2d{{.channels = o.width}})),
      conv3(child("conv3", conv(1, o.width, o.width * kExpansion))),
      bn3(child("bn3", nn::BatchNorm2d{{.channels = o.width * kExpansion}})),
      downsample(child("downsample", shortcut(o, o.width * kExpansion))) {}

Tensor Bottleneck::forward(const Tensor& input) const {
  Tensor y = bn1(conv1(input), Activation::relu);
  y = bn2(conv2(y), Activation::relu);
  return bn3(conv3(y), Activation::relu, downsample(input));
}

ResNet::ResNet(const ResNetOptions& o)
    : options(checked(o)),
      conv1(child("conv1", o.cifar_stem ? conv(3, 3, o.width) : conv(7, 3, o.width, 2))),
      bn1(child("bn1", nn::BatchNorm2d{{.channels = o.width}})),
      layer1(child("layer1", stage(o, 0))),
      layer2(child("layer2", stage(o, 1))),
      layer3(child("layer3", stage(o, 2))),
      layer4(child("layer4", stage(o, 3))),
      fc(child("fc", nn::Linear{{.in = (o.width << (o.layers.size() - 1)) * expansion(o), .out = o.classes}})) {
  apply([&](const std::string&, const nn::ModuleBase& module) {
    if (const auto* c = dynamic_cast<const nn::Conv2d*>(&module)) {
      nn::init::kaiming_normal_(c->weight,
                                {.mode = nn::init::FanMode::fan_out, .nonlinearity = nn::init::Nonlinearity::relu});
    }
    if (!o.zero_init_residual) return;
    if (const auto* b = dynamic_cast<const BasicBlock*>(&module)) nn::init::zeros_(b->bn2.weight);
    if (const auto* b = dynamic_cast<const Bottleneck*>(&module)) nn::init::zeros_(b->bn3.weight);
  });
}

Tensor ResNet::forward(const Tensor& images) const {
  if (images.dim() != 4 || images.size(1) != 3) {
    fail<ShapeError>("ResNet: expected images [N, 3, H, W], got {}", images.sizes().str());
  }
  Tensor x = bn1(conv1(to_channels_last(images)), Activation::relu);
  if (!options.cifar_stem) x = max_pool2d(x, {3}, {.stride = {2}, .padding = {1}});
  x = layer4(layer3(layer2(layer1(x))));
  return fc(flatten(adaptive_avg_pool2d(x, {1}), 1));
}

ResNet resnet18(const ResNetOptions& o) { return make(o, ResNetBlock::basic, {2, 2, 2, 2}); }
ResNet resnet34(const ResNetOptions& o) { return make(o, ResNetBlock::basic, {3, 4, 6, 3}); }
ResNet resnet50(const ResNetOptions& o) { return make(o, ResNetBlock::bottleneck, {3, 4, 6, 3}); }
ResNet resnet101(const ResNetOptions& o) { return make(o, ResNetBlock::bottleneck, {3, 4, 23, 3}); }
ResNet resnet152(const ResNetOptions& o) { return make(o, ResNetBlock::bottleneck, {3, 8, 36, 3}); }

ResNet cifar_resnet(int depth, const ResNetOptions& options) {
  if (depth < 8 || depth % 6 != 2) {
    fail<Error>("cifar_resnet: expected a depth of 6 n + 2 (20, 32, 44, 56, 110), got {}", depth);
  }
  ResNetOptions o = options;
  o.width = 16;
  o.cifar_stem = true;
  return make(o, ResNetBlock::basic, Shape::filled(3, (depth - 2) / 6));
}

}  // namespace halfstep::models
