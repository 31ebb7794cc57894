// SPDX-License-Identifier: Apache-2.0
// Whole networks, run by ONNX's reference evaluator.
#include <gtest/gtest.h>

#include "halfstep/models/mlp.h"
#include "halfstep/models/mobilenet.h"
#include "halfstep/models/registry.h"
#include "halfstep/models/resnet.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/nn/pooling.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "tests/io/onnx_reference.h"

namespace halfstep {
namespace {

using test::Function;
using test::kUnit;

class OnnxNetworks : public test::OnnxReference {
 protected:
  // Statistics and weights of batch norm as training leaves them: none that could be left out or taken for another.
  static void season(const nn::ModuleBase& module) {
    for (const NamedTensor& t : module.state_dict()) {
      const bool norm = t.tensor.dim() == 1 && t.tensor.is_floating();
      if (!norm) continue;
      const double low = t.name.ends_with("var") || t.name.ends_with("weight") ? 0.7 : -0.2;
      nn::replace_contents(t.tensor, rand(t.tensor.sizes()) * (low < 0 ? 0.4 : 0.6) + low);
    }
  }
  void add_seasoned(const std::string& name, const nn::ModuleBase& module, const Forward& forward,
                    const std::vector<Tensor>& inputs, double tolerance, const io::OnnxOptions& options = {}) {
    season(module);
    add(name, module, forward, inputs, tolerance, options);
  }
  template <nn::TensorModule M>
  void add_seasoned(const std::string& name, const M& module, const std::vector<Tensor>& inputs, double tolerance,
                    const io::OnnxOptions& options = {}) {
    add_seasoned(
        name, module, [&](const Tensor& x) { return module(x); }, inputs, tolerance, options);
  }
};
using OnnxNetworksSlow = OnnxNetworks;

// Each layer's sums round by a few units of their largest value, at random, and what comes in is passed on as it is:
// n layers are within n times that.
constexpr double kLayer = 16 * kUnit;

TEST_F(OnnxNetworks, OfAllDtypesAndOpsets) {
  const models::MLP mlp({.in = 64, .hidden = 48});
  const std::vector<Tensor> inputs{randn({1, 64}), randn({7, 64})};
  for (int opset = 17; opset <= 21; ++opset) {
    add("mlp_" + std::to_string(opset), mlp, inputs, 256 * kUnit, {.opset = opset});
  }
  // Three layers of sums of 64 terms in halves: every one and every rounding between is 2^-11 at most.
  add("mlp_f16", mlp, inputs, 1e-2, {.dtype = f16});
  add("mlp_fixed", mlp, {randn({3, 8, 8})}, 256 * kUnit, {.dynamic_batch = false});
  const nn::Sequential net{
      nn::BatchNorm2d{{.channels = 3}},
      Function([](const Tensor& x, const auto& p) { return conv2d(x, p[0], p[1]); }, {randn({8, 3, 3, 3}), randn({8})}),
      nn::GELU{},
      nn::GroupNorm{{.groups = 2, .channels = 8}},
      nn::Flatten{},
      nn::LayerNorm{{.normalized_shape = {8 * 4 * 4}}},
      nn::Linear{{.in = 8 * 4 * 4, .out = 10}},
      nn::Softmax{{.dim = -1}}};
  add("mixed_f16", net, {randn({1, 3, 6, 6}), randn({2, 3, 6, 6})}, 2e-2, {.dtype = f16});
  add("mixed_21", net, {randn({1, 3, 6, 6}), randn({2, 3, 6, 6})}, 512 * kUnit, {.opset = 21});
  check();
}

TEST_F(OnnxNetworks, OfImages) {
  const auto images = [](std::int64_t size) {
    return std::vector<Tensor>{to_channels_last(randn({1, 3, size, size})), randn({3, 3, size, size})};
  };
  const nn::Sequential plain{nn::Conv2d{{.in = 3, .out = 8, .kernel = {3}, .padding = 1}},
                             nn::ReLU{},
                             nn::MaxPool2d{{.kernel = {2}}},
                             nn::Conv2d{{.in = 8, .out = 12, .kernel = {3}, .stride = {2}, .bias = false}},
                             nn::BatchNorm2d{{.channels = 12}},
                             nn::ReLU{},
                             nn::AdaptiveAvgPool2d{{.output_size = {1}}},
                             nn::Flatten{},
                             nn::Dropout{},
                             nn::Linear{{.in = 12, .out = 5}}};
  add_seasoned("plain", plain, images(20), 4 * kLayer);
  const models::Model resnet20 = models::make_model("resnet20");
  add_seasoned("resnet20", *resnet20.module, resnet20.forward, images(32), 20 * kLayer);
  const models::ResNet bottleneck{{.layers = {1, 1, 2}, .width = 8, .classes = 7}};
  add_seasoned("bottleneck", bottleneck, images(33), 14 * kLayer);
  add_seasoned("mobile", models::MobileNetV2{{.width = 0.35, .classes = 7}}, images(32), 53 * kLayer);
  // Every layer rounds to 2^-11, and 14 of them at random to about four times that.
  add_seasoned("bottleneck_f16", bottleneck, images(33), 1e-2, {.dtype = f16});
  check();
}

// The names that the command line knows, as large as they are published. The evaluator takes its time.
TEST_F(OnnxNetworksSlow, OfTheRegistry) {
  for (const models::ModelInfo& info : models::all_models()) {
    const models::Model net = models::make_model(info.name);
    const bool digits = info.data == models::DataKind::digits;
    const std::int64_t size = info.name == "resnet50" || info.name == "mobilenet_v2" ? 224 : 32;
    const auto input = [&](std::int64_t n) { return digits ? randn({n, 784}) : randn({n, 3, size, size}); };
    add_seasoned(info.name, *net.module, net.forward, {input(1), input(2)}, 160 * kLayer);
  }
  check();
}

}  // namespace
}  // namespace halfstep
