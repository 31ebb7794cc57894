// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/module.h"
#include "halfstep/nn/norm.h"

namespace halfstep::models {

/// Options of CNN.
struct CNNOptions {
  std::int64_t width = 32;  ///< channels of the first convolution; each next one doubles them
  std::int64_t classes = 10;
};

/// A small convolutional network for 28x28 grey images, [N, 1, 28, 28] or flattened, to logits [N, classes]: three 3x3
/// convolutions with batch norm and ReLU, of which the second and third halve the image, the mean over its places, and
/// a linear layer. Throws ShapeError for other images.
class HS_API CNN : public nn::Module<CNN> {
 public:
  explicit CNN(const CNNOptions& options = {});
  Tensor forward(const Tensor& images) const;
  std::string kind() const override { return "CNN"; }

  /// The layers, in their order.
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  nn::Conv2d conv3;
  nn::BatchNorm2d bn3;
  nn::Linear fc;
};

}  // namespace halfstep::models
