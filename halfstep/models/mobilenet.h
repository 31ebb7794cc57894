// SPDX-License-Identifier: Apache-2.0
// MobileNetV2: Sandler et al., Inverted Residuals and Linear Bottlenecks, 2018, with the names of torchvision's state
// dicts.
#pragma once

#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/module.h"
#include "halfstep/nn/norm.h"

namespace halfstep::models {

/// Options of ConvNormReLU6.
struct ConvNormReLU6Options {
  std::int64_t in = nn::kNotGiven;
  std::int64_t out = nn::kNotGiven;
  std::int64_t kernel = 3;  ///< odd; padded so that stride 1 keeps the size
  std::int64_t stride = 1;
  std::int64_t groups = 1;
};
/// Convolution, batch norm and ReLU6.
class HS_API ConvNormReLU6 : public nn::Module<ConvNormReLU6> {
 public:
  explicit ConvNormReLU6(const ConvNormReLU6Options& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "ConvNormReLU6"; }

  nn::Conv2d conv;       ///< called "0"
  nn::BatchNorm2d norm;  ///< called "1"
};

/// Options of InvertedResidual.
struct InvertedResidualOptions {
  std::int64_t in = nn::kNotGiven;
  std::int64_t out = nn::kNotGiven;
  std::int64_t stride = 1;
  std::int64_t expand = 6;  ///< channels between for each of the input; 1: no convolution before the depthwise one
};
/// 1x1 to more channels, 3x3 depthwise, 1x1 to `out` without an activation; plus the input where the shapes agree.
class HS_API InvertedResidual : public nn::Module<InvertedResidual> {
 public:
  explicit InvertedResidual(const InvertedResidualOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "InvertedResidual"; }

  InvertedResidualOptions options;  ///< as constructed
  nn::Sequential conv;              ///< all of its layers
};

/// Options of MobileNetV2.
struct MobileNetV2Options {
  double width = 1;             ///< factor on the channels, which are rounded to multiples of 8
  std::int64_t classes = 1000;  ///< logits
  double dropout = 0.2;         ///< before the last layer
};

/// MobileNetV2 for images [N, 3, H, W] of 224x224 (any from 32 on) in any layout (it computes in channels-last), to
/// logits [N, classes]. Convolutions start normal with variance 2 / fan out, the last layer normal with standard
/// deviation 0.01. Throws Error for invalid options, ShapeError for unsuitable images.
class HS_API MobileNetV2 : public nn::Module<MobileNetV2> {
 public:
  explicit MobileNetV2(const MobileNetV2Options& options = {});
  Tensor forward(const Tensor& images) const;
  std::string kind() const override { return "MobileNetV2"; }

  MobileNetV2Options options;  ///< as constructed
  nn::Sequential features;     ///< all convolutions
  nn::Sequential classifier;   ///< dropout and a linear layer
};

}  // namespace halfstep::models
