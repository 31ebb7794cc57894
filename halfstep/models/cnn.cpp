// SPDX-License-Identifier: Apache-2.0
#include "halfstep/models/cnn.h"

#include "halfstep/core/fail.h"
#include "halfstep/nn/init.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/view.h"

namespace halfstep::models {
namespace {

constexpr std::int64_t kSide = 28;

nn::Conv2d conv3x3(std::int64_t in, std::int64_t out, std::int64_t stride) {
  nn::Conv2d made{
      {.in = in, .out = out, .kernel = {3}, .stride = {stride}, .padding = {1}, .bias = false, .initialise = false}};
  nn::init::kaiming_normal_(made.weight,
                            {.mode = nn::init::FanMode::fan_out, .nonlinearity = nn::init::Nonlinearity::relu});
  return made;
}

}  // namespace

CNN::CNN(const CNNOptions& o)
    : conv1(child("conv1", conv3x3(1, o.width, 1))),
      bn1(child("bn1", nn::BatchNorm2d{{.channels = o.width}})),
      conv2(child("conv2", conv3x3(o.width, 2 * o.width, 2))),
      bn2(child("bn2", nn::BatchNorm2d{{.channels = 2 * o.width}})),
      conv3(child("conv3", conv3x3(2 * o.width, 4 * o.width, 2))),
      bn3(child("bn3", nn::BatchNorm2d{{.channels = 4 * o.width}})),
      fc(child("fc", nn::Linear{{.in = 4 * o.width, .out = o.classes}})) {}

Tensor CNN::forward(const Tensor& images) const {
  if (images.dim() < 2 || images.size(0) == 0 || images.numel() != images.size(0) * kSide * kSide) {
    fail<ShapeError>("CNN: expected images [N, 1, {0}, {0}] or [N, {1}], got {2}", kSide, kSide * kSide,
                     images.sizes().str());
  }
  Tensor x = images.reshape({images.size(0), 1, kSide, kSide});
  x = bn1(conv1(to_channels_last(x)), Activation::relu);
  x = bn2(conv2(x), Activation::relu);
  x = bn3(conv3(x), Activation::relu);
  return fc(flatten(adaptive_avg_pool2d(x, {1}), 1));
}

}  // namespace halfstep::models
