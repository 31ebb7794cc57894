// SPDX-License-Identifier: Apache-2.0
// Residual networks: He et al., Deep Residual Learning for Image Recognition, 2015, with the names of torchvision's
// state dicts.
#pragma once

#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/module.h"
#include "halfstep/nn/norm.h"

namespace halfstep::models {

/// The kind of block of a residual network.
enum class ResNetBlock : std::uint8_t {
  basic,       ///< 3x3, 3x3
  bottleneck,  ///< 1x1, 3x3, 1x1 with four times the channels; the 3x3 has the stride (v1.5)
};

/// Where a residual block begins and ends.
struct ResidualBlockOptions {
  std::int64_t in = nn::kNotGiven;     ///< channels of the input
  std::int64_t width = nn::kNotGiven;  ///< channels of the 3x3 convolutions
  std::int64_t stride = 1;             ///< of the block
};

/// Two 3x3 convolutions with a shortcut, ReLU after the first and after the sum: [N, in, H, W] to [N, width, H /
/// stride, W / stride].
class HS_API BasicBlock : public nn::Module<BasicBlock> {
 public:
  static constexpr std::int64_t kExpansion = 1;  ///< channels of the output for each of `width`
  explicit BasicBlock(const ResidualBlockOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "BasicBlock"; }

  /// PyTorch's names, in the order of computation.
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  nn::Sequential downsample;  ///< 1x1 convolution and batch norm where the shapes differ, else empty: the input itself
};

/// 1x1, 3x3 and 1x1 convolutions with a shortcut, ReLU after the first, the second and after the sum: [N, in, H, W] to
/// [N, 4 width, H / stride, W / stride].
class HS_API Bottleneck : public nn::Module<Bottleneck> {
 public:
  static constexpr std::int64_t kExpansion = 4;  ///< channels of the output for each of `width`
  explicit Bottleneck(const ResidualBlockOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "Bottleneck"; }

  /// PyTorch's names, in the order of computation.
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  nn::Conv2d conv3;
  nn::BatchNorm2d bn3;
  nn::Sequential downsample;  ///< as BasicBlock's
};

/// Options of ResNet. The defaults are ResNet-50's.
struct ResNetOptions {
  ResNetBlock block = ResNetBlock::bottleneck;
  Shape layers = {3, 4, 6, 3};  ///< blocks of each stage, 1 to 4 stages; each halves the image but the first
  std::int64_t width = 64;      ///< of the stem and the first stage; each next stage doubles it
  std::int64_t classes = 1000;  ///< logits
  bool cifar_stem = false;      ///< a 3x3 convolution of stride 1 and no pooling, instead of 7x7, stride 2 and pooling
  bool zero_init_residual =
      false;  ///< the last weight of batch norm in each block starts at 0: blocks begin as shortcuts
};

/// A residual network of images [N, 3, H, W] in any layout (it computes in channels-last), to logits [N, classes].
/// Convolutions start normal with variance 2 / fan out, batch norms at 1 and 0, the last layer as nn::Linear. Throws
/// Error for invalid options, ShapeError for unsuitable images.
class HS_API ResNet : public nn::Module<ResNet> {
 public:
  explicit ResNet(const ResNetOptions& options = {});
  Tensor forward(const Tensor& images) const;
  std::string kind() const override { return "ResNet"; }

  ResNetOptions options;  ///< as constructed
  nn::Conv2d conv1;       ///< the stem
  nn::BatchNorm2d bn1;
  nn::Sequential layer1;
  nn::Sequential layer2;  ///< empty where there are fewer stages, as layer3 and layer4
  nn::Sequential layer3;
  nn::Sequential layer4;
  nn::Linear fc;
};

/// The networks of the paper's Table 1, for images of 224x224 (any from 32 on), with the stride on the 3x3.
/// @{
HS_API ResNet resnet18(const ResNetOptions& options = {});
HS_API ResNet resnet34(const ResNetOptions& options = {});
HS_API ResNet resnet50(const ResNetOptions& options = {});
HS_API ResNet resnet101(const ResNetOptions& options = {});
HS_API ResNet resnet152(const ResNetOptions& options = {});
/// @}
/// The networks of the paper's section 4.2, for images of 32x32: three stages of 16, 32 and 64 channels, `depth` = 6 n
/// + 2 layers of weights (20, 32, 44, 56, 110). Shortcuts between stages are 1x1 convolutions with batch norm (the
/// paper's option B), as in the weights that PyTorch's users exchange; its option A has none.
HS_API ResNet cifar_resnet(int depth, const ResNetOptions& options = {.classes = 10});

}  // namespace halfstep::models
