// SPDX-License-Identifier: Apache-2.0
// The convolutions and the passes between them that image networks are made of.
#pragma once

#include <cstdint>
#include <vector>

#include "halfstep/ops/norm_act.h"

namespace halfstep::bench {

/// Convolutions of a square image without bias, `count` of them in the network.
struct ConvLayer {
  int count;
  std::int64_t in, size, out, kernel, stride, padding, groups = 1;

  std::int64_t out_size() const { return (size + 2 * padding - kernel) / stride + 1; }
  /// Multiply-adds of one image.
  double multiply_adds() const { return static_cast<double>(out_size() * out_size()) * weight(); }
  /// Elements of the input of one image, of its output, and of the weight.
  double input() const { return static_cast<double>(in * size * size); }
  double output() const { return static_cast<double>(out * out_size() * out_size()); }
  double weight() const { return static_cast<double>(in / groups * out * kernel * kernel); }
};

/// A batch norm of images of `channels` x `size` x `size`, with an activation, and before that with the sum of a
/// shortcut.
struct NormLayer {
  int count;
  std::int64_t channels, size;
  Activation activation;
  bool residual;
};

/// The distinct convolutions of ResNet-50 (v1.5: the 3x3 has the stride) on images of 224x224, in their order.
std::vector<ConvLayer> resnet50_convolutions();
/// Its batch norms.
std::vector<NormLayer> resnet50_norms();
/// The convolutions of ResNet-18 with a 3x3 stem and without the first pooling, on images of 32x32.
std::vector<ConvLayer> resnet18_cifar_convolutions();

/// The distinct convolutions of MobileNetV2 on images of 224x224, and its batch norms.
std::vector<ConvLayer> mobilenet_v2_convolutions();
std::vector<NormLayer> mobilenet_v2_norms();

/// Floating-point operations of a training step: forward, the gradients of the weights, those of the inputs but for the
/// first layer's; with a last layer from `features` to `classes`.
double step_operations(const std::vector<ConvLayer>& layers, std::int64_t features, std::int64_t classes,
                       std::int64_t batch);

/// Those of a forward pass of one image.
double forward_operations(const std::vector<ConvLayer>& layers, std::int64_t features, std::int64_t classes);
/// The same of YOLOv5n for 80 classes on images of 640x640, as published.
inline constexpr double kYolov5nOperations = 4.468e9;

}  // namespace halfstep::bench
