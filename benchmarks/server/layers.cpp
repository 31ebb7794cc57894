// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/server/layers.h"

namespace halfstep::bench {

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
  std::vector<NormLayer> layers = {{1, 64, 112, true, false}};
  struct Stage {
    int blocks;
    std::int64_t width, size, stride;
  };
  for (const Stage s : {Stage{3, 64, 56, 1}, {4, 128, 28, 2}, {6, 256, 14, 2}, {3, 512, 7, 2}}) {
    if (s.stride != 1) layers.push_back({1, s.width, s.size * s.stride, true, false});
    layers.push_back({2 * s.blocks - (s.stride != 1 ? 1 : 0), s.width, s.size, true, false});
    layers.push_back({1, 4 * s.width, s.size, false, false});  // of the shortcut
    layers.push_back({s.blocks, 4 * s.width, s.size, true, true});
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
