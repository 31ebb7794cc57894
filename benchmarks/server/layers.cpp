// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/server/layers.h"

#include <algorithm>

namespace halfstep::bench {
namespace {

template <class Layer, class Same>
void add_once(std::vector<Layer>& layers, const Layer& layer, Same&& same) {
  const auto at = std::find_if(layers.begin(), layers.end(), [&](const Layer& l) { return same(l, layer); });
  if (at == layers.end()) {
    layers.push_back(layer);
  } else {
    at->count += layer.count;
  }
}

// An inverted residual of MobileNetV2 on images of `size`: to `between` channels, depthwise, to `out`.
struct Inverted {
  std::int64_t in, size, between, out, stride;
};
std::vector<Inverted> mobilenet_v2_blocks() {
  struct Stage {
    std::int64_t expand, out, blocks, stride;
  };
  std::vector<Inverted> all;
  std::int64_t in = 32, size = 112;
  for (const Stage s : {Stage{1, 16, 1, 1},
                        {6, 24, 2, 2},
                        {6, 32, 3, 2},
                        {6, 64, 4, 2},
                        {6, 96, 3, 1},
                        {6, 160, 3, 2},
                        {6, 320, 1, 1}}) {
    for (std::int64_t i = 0; i < s.blocks; ++i) {
      const std::int64_t stride = i == 0 ? s.stride : 1;
      all.push_back({in, size, in * s.expand, s.out, stride});
      in = s.out, size /= stride;
    }
  }
  return all;
}

}  // namespace

std::vector<ConvLayer> resnet50_convolutions() {
  std::vector<ConvLayer> layers = {{1, 3, 224, 64, 7, 2, 3}};
  struct Stage {
    int blocks;
    std::int64_t in, size, width, stride;
  };
  for (const Stage s : {Stage{3, 64, 56, 64, 1}, {4, 256, 56, 128, 2}, {6, 512, 28, 256, 2}, {3, 1024, 14, 512, 2}}) {
    const std::int64_t w = s.width, small = s.size / s.stride;
    layers.push_back({1, s.in, s.size, w, 1, 1, 0});
    layers.push_back({s.stride == 1 ? s.blocks : 1, w, s.size, w, 3, s.stride, 1});
    layers.push_back({s.stride == 1 && s.in == w ? s.blocks + 1 : s.blocks, w, small, 4 * w, 1, 1, 0});
    if (s.in != w) layers.push_back({1, s.in, s.size, 4 * w, 1, s.stride, 0});  // the shortcut
    layers.push_back({s.blocks - 1, 4 * w, small, w, 1, 1, 0});
    if (s.stride != 1) layers.push_back({s.blocks - 1, w, small, w, 3, 1, 1});
  }
  return layers;
}

std::vector<NormLayer> resnet50_norms() {
  std::vector<NormLayer> layers = {{1, 64, 112, Activation::relu, false}};
  struct Stage {
    int blocks;
    std::int64_t width, size, stride;
  };
  for (const Stage s : {Stage{3, 64, 56, 1}, {4, 128, 28, 2}, {6, 256, 14, 2}, {3, 512, 7, 2}}) {
    if (s.stride != 1) layers.push_back({1, s.width, s.size * s.stride, Activation::relu, false});
    layers.push_back({2 * s.blocks - (s.stride != 1 ? 1 : 0), s.width, s.size, Activation::relu, false});
    layers.push_back({1, 4 * s.width, s.size, Activation::none, false});  // of the shortcut
    layers.push_back({s.blocks, 4 * s.width, s.size, Activation::relu, true});
  }
  return layers;
}

std::vector<ConvLayer> resnet18_cifar_convolutions() {
  std::vector<ConvLayer> layers = {{1, 3, 32, 64, 3, 1, 1}, {4, 64, 32, 64, 3, 1, 1}};
  for (std::int64_t in = 64, size = 32; in < 512; in *= 2, size /= 2) {
    layers.push_back({1, in, size, 2 * in, 3, 2, 1});
    layers.push_back({1, in, size, 2 * in, 1, 2, 0});  // the shortcut
    layers.push_back({3, 2 * in, size / 2, 2 * in, 3, 1, 1});
  }
  return layers;
}

std::vector<ConvLayer> mobilenet_v2_convolutions() {
  std::vector<ConvLayer> layers = {{1, 3, 224, 32, 3, 2, 1}};
  const auto add = [&](const ConvLayer& layer) {
    add_once(layers, layer, [](const ConvLayer& a, const ConvLayer& b) {
      return a.in == b.in && a.size == b.size && a.out == b.out && a.kernel == b.kernel && a.stride == b.stride;
    });
  };
  for (const Inverted& b : mobilenet_v2_blocks()) {
    if (b.between != b.in) add({1, b.in, b.size, b.between, 1, 1, 0});
    add({1, b.between, b.size, b.between, 3, b.stride, 1, b.between});
    add({1, b.between, b.size / b.stride, b.out, 1, 1, 0});
  }
  add({1, 320, 7, 1280, 1, 1, 0});
  return layers;
}

std::vector<NormLayer> mobilenet_v2_norms() {
  std::vector<NormLayer> layers = {{1, 32, 112, Activation::relu6, false}};
  const auto add = [&](std::int64_t channels, std::int64_t size, Activation activation) {
    add_once(layers, NormLayer{1, channels, size, activation, false}, [](const NormLayer& a, const NormLayer& b) {
      return a.channels == b.channels && a.size == b.size && a.activation == b.activation;
    });
  };
  for (const Inverted& b : mobilenet_v2_blocks()) {
    if (b.between != b.in) add(b.between, b.size, Activation::relu6);
    add(b.between, b.size / b.stride, Activation::relu6);
    add(b.out, b.size / b.stride, Activation::none);
  }
  add(1280, 7, Activation::relu6);
  return layers;
}

double step_operations(const std::vector<ConvLayer>& layers, std::int64_t features, std::int64_t classes,
                       std::int64_t batch) {
  double adds = 3.0 * static_cast<double>(features * classes) - layers.front().multiply_adds();
  for (const ConvLayer& layer : layers) adds += 3.0 * layer.count * layer.multiply_adds();
  return 2.0 * static_cast<double>(batch) * adds;
}

double forward_operations(const std::vector<ConvLayer>& layers, std::int64_t features, std::int64_t classes) {
  double adds = static_cast<double>(features * classes);
  for (const ConvLayer& layer : layers) adds += layer.count * layer.multiply_adds();
  return 2.0 * adds;
}

}  // namespace halfstep::bench
