// SPDX-License-Identifier: Apache-2.0
// Weights of linear layers in integers: what they stand for, what a converted network computes and saves.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/models/cnn.h"
#include "halfstep/models/mlp.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/quant/quantization.h"
#include "halfstep/quant/weight_only.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep::quant {
namespace {

#define EXPECT_ERROR(call, text)                                                 \
  EXPECT_NE(test::error_of([&] { (void)(call); }).find(text), std::string::npos) \
      << test::error_of([&] { (void)(call); })

// The scale is what the option says, an integer is the nearest, and what comes back is off by half a scale at most.
TEST(QuantizeWeight, GivesTheNearestIntegers) {
  manual_seed(4);
  for (const int bits : {8, 4}) {
    for (const std::int64_t group : {0, 2, 6, 24}) {
      Tensor w = randn({5, 24});
      w.slice(0, 2, 3).zero_();  // a row of zeros
      const QuantizedWeight q = quantize_weight(w, {.bits = bits, .group_size = group});
      const std::int64_t groups = group == 0 ? 1 : 24 / group, each = 24 / groups;
      EXPECT_EQ(q.scale.sizes(), group == 0 ? (Shape{5}) : (Shape{5, groups}));
      EXPECT_EQ(q.integers.sizes(), (Shape{5, bits == 8 ? 24 : 12}));
      EXPECT_EQ(q.integers.dtype(), bits == 8 ? i8 : u8);
      const auto weights = w.to_vector<double>(), scales = q.scale.to_vector<double>();
      const auto integers = q.integers.to_vector<std::int64_t>();
      const auto back = dequantize_weight(q).to_vector<double>();
      const int most = bits == 8 ? 127 : 7;
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const std::size_t g = i / static_cast<std::size_t>(each);
        double largest = 0;
        for (std::size_t j = g * static_cast<std::size_t>(each); j < (g + 1) * static_cast<std::size_t>(each); ++j) {
          largest = std::max(largest, std::abs(weights[j]));
        }
        const double scale = largest == 0 ? 1 : largest / most;
        EXPECT_NEAR(scales[g], scale, scale * 0x1p-23);  // one division in float32
        std::int64_t n = bits == 8 ? integers[i] : integers[i / 2] >> (i % 2 * 4) & 15;
        if (bits == 4 && n > 7) n -= 16;
        EXPECT_LE(std::llabs(n), most);
        // The quotient is rounded once more than the closed form's.
        EXPECT_LE(std::abs(static_cast<double>(n) - weights[i] / scale), 0.5 + 0x1p-16) << i;
        EXPECT_EQ(back[i], static_cast<double>(static_cast<float>(n) * static_cast<float>(scales[g])));
      }
    }
  }
}

TEST(QuantizeWeight, SaysWhatDoesNotFit) {
  EXPECT_ERROR(quantize_weight(ones({2, 4}), {.bits = 5}), "expected bits of 8 or 4, got 5");
  EXPECT_ERROR(quantize_weight(ones({2, 4}), {.group_size = -1}), "expected a group_size of at least 0, got -1");
  EXPECT_ERROR(quantize_weight(ones({2, 3}), {.bits = 4}),
               "expected an even number of inputs for weights of 4 bits, got 3");
  EXPECT_ERROR(quantize_weight(ones({2, 784}), {.bits = 4, .group_size = 32}),
               "expected an even group_size that divides its 784 inputs, got 32; 28 and 56 would do");
  EXPECT_ERROR(quantize_weight(ones({2, 9}), {.group_size = 5}),
               "expected a group_size that divides its 9 inputs, got 5; 3 and 9 would do");
  EXPECT_ERROR(quantize_weight(ones({2, 4, 1})), "expected a floating weight [O, K], got f32 [2, 4, 1]");
  EXPECT_ERROR(quantize_weight(full({2, 4}, INFINITY)), "expected finite weights, got inf");
  EXPECT_ERROR(dequantize_weight({zeros({2, 4}, {.dtype = i8}), ones({3})}), "expected integers i8 [O, K]");
  EXPECT_ERROR(dequantize_weight({zeros({2, 4}, {.dtype = i8}), ones({2, 3})}), "got i8 [2, 4] and f32 [2, 3]");
  EXPECT_ERROR(dequantize_weight({zeros({2, 4}, {.dtype = i32}), ones({2})}), "got i32 [2, 4]");
}

// The network with its weights rounded, in float64: what the integers stand for.
Tensor expected_of(const models::MLP& rounded, const Tensor& x) {
  const NoGrad no_grad;
  const auto layer = [](const nn::Linear& l, const Tensor& in) {
    return linear(in, l.weight.detach().to(f64), l.bias.detach().to(f64));
  };
  return layer(rounded.fc3, relu(layer(rounded.fc2, relu(layer(rounded.fc1, x.to(f64))))));
}

TEST(QuantizeWeights, ConvertsTheLinearLayersOfANetwork) {
  for (const WeightOnlyOptions& options :
       {WeightOnlyOptions{}, WeightOnlyOptions{.group_size = 16}, WeightOnlyOptions{.bits = 4},
        WeightOnlyOptions{.bits = 4, .group_size = 16}}) {
    manual_seed(5);
    const models::MLP net({.in = 48, .hidden = 32, .classes = 10}), rounded = nn::clone(net);
    for (const nn::Linear* l : {&rounded.fc1, &rounded.fc2, &rounded.fc3}) {
      nn::replace_contents(l->weight, dequantize_weight(quantize_weight(l->weight, options)));
    }
    const models::MLP other_handle = net;
    const std::vector<WeightOnlyLayer> layers = quantize_weights(net, options);
    ASSERT_EQ(layers.size(), 3u);
    EXPECT_EQ(layers[1].path, "fc2");
    EXPECT_EQ(layers[1].bits, options.bits);
    EXPECT_EQ(layers[1].group_size, options.group_size);
    EXPECT_EQ(layers[1].bytes, 32 * 32 * options.bits / 8 + 4 * 32 * (options.group_size > 0 ? 2 : 1));
    EXPECT_EQ(weight_only_layers(net).size(), 3u);
    manual_seed(6);
    const Tensor x = randn({7, 48});
    const NoGrad no_grad;
    const Tensor expected = expected_of(rounded, x), got = net(x);
    EXPECT_EQ(got.dtype(), f32);
    // Sums of at most 48 products, three of them, and terms that cancel: 2^-24 each of what is added.
    EXPECT_LE(max(abs(got.to(f64) - expected)).item<double>(), 3 * 50 * 0x1p-24 * 4);
    EXPECT_EQ(other_handle(x).to_vector<float>(), got.to_vector<float>());
    EXPECT_EQ(nn::clone(net)(x).to_vector<float>(), got.to_vector<float>());
    {
      const amp::Autocast autocast{{.dtype = bf16}};
      const Tensor low = net(x);
      EXPECT_EQ(low.dtype(), bf16);
      EXPECT_LE(max(abs(low.to(f64) - expected)).item<double>(), 0.05 * max(abs(expected)).item<double>());
      EXPECT_GT(max(abs(low.to(f64) - expected)).item<double>(), 0);
    }
    EXPECT_EQ(net(x.to(f16)).dtype(), f16);
  }
}

TEST(QuantizeWeights, AreSavedAndLoaded) {
  manual_seed(5);
  const models::MLP net({.in = 48, .hidden = 32, .classes = 10});
  quantize_weights(net, {.bits = 4, .group_size = 8});
  const test::TemporaryDir folder;
  io::save_safetensors(folder.path() / "net.safetensors", net.state_dict());
  manual_seed(8);
  const models::MLP again({.in = 48, .hidden = 32, .classes = 10});
  const Tensor x = randn({3, 48});
  quantize_weights(again, {.bits = 4, .group_size = 8});
  again.load_state_dict(io::load_safetensors(folder.path() / "net.safetensors").tensors);
  const NoGrad no_grad;
  EXPECT_EQ(again(x).to_vector<float>(), net(x).to_vector<float>());
  std::vector<std::string> names;
  for (const NamedTensor& t : net.state_dict()) names.push_back(t.name);
  EXPECT_NE(std::find(names.begin(), names.end(), "fc2.weight_quantizer.scale"), names.end());
  EXPECT_NE(net.str().find("(fc2): Linear(32, 32, 4-bit weights, group 8"), std::string::npos) << net.str();
}

TEST(QuantizeWeights, LeavesTheRestAsItIs) {
  manual_seed(5);
  const models::CNN net;
  const auto layers = quantize_weights(net);
  ASSERT_EQ(layers.size(), 1u);
  EXPECT_EQ(layers[0].path, "fc");
  for (const NamedTensor& t : net.parameters()) EXPECT_EQ(t.tensor.is_floating(), t.name != "fc.weight") << t.name;
  const Tensor x = randn({2, 1, 28, 28});
  net.eval();
  EXPECT_ERROR(net(x), "expected an input that needs no gradient");
  const NoGrad no_grad;
  EXPECT_EQ(net(x).sizes(), (Shape{2, 10}));
}

TEST(QuantizeWeights, SharedWeightsStaySo) {
  manual_seed(5);
  const nn::Linear one{{.in = 8, .out = 8}};
  nn::Linear two{{.in = 8, .out = 8}};
  two.weight = one.weight;
  const nn::Sequential net{one, two};
  EXPECT_EQ(quantize_weights(net).size(), 2u);
  const NoGrad no_grad;
  EXPECT_EQ(net(ones({1, 8})).sizes(), (Shape{1, 8}));
  EXPECT_EQ(one.weight.dtype(), i8);
  EXPECT_EQ(two.weight.dtype(), i8);
}

TEST(QuantizeWeights, SaysWhatItCannotConvert) {
  manual_seed(5);
  const models::MLP net({.in = 48, .hidden = 20, .classes = 10});
  const auto before = net.fc1.weight.to_vector<float>();
  EXPECT_ERROR(quantize_weights(net, {.group_size = 16}),
               "quantize_weights: 'fc2': expected a group_size that divides its 20 inputs, got 16; 10 and 20 would do");
  EXPECT_EQ(net.fc1.weight.to_vector<float>(), before) << "nothing is changed";
  EXPECT_ERROR(quantize_weights(net, {.skip = {"fc7"}}), "in `skip`, got 'fc7', which is none");
  EXPECT_ERROR(quantize_weights(net, {.skip = {"*"}}), "a network whose linear layers are all in `skip`");
  EXPECT_ERROR(quantize_weights(nn::Conv2d{{.in = 3, .out = 2, .kernel = {1}}}), "got a network without any");
  EXPECT_EQ(quantize_weights(net, {.group_size = 16, .skip = {"fc2", "fc3"}}).size(), 1u);
  EXPECT_ERROR(quantize_weights(net), "'fc1': its weight is integers already");
  const models::MLP prepared({.in = 48, .hidden = 20, .classes = 10});
  prepare(prepared, zeros({1, 48}));
  EXPECT_ERROR(quantize_weights(prepared), "one that quant::prepare() has prepared");
  nn::replace_contents(prepared.fc1.weight, zeros({20, 48}, {.dtype = i8}));
  EXPECT_ERROR(prepared.fc1(ones({1, 48})), "Linear: expected a floating weight, or one of quant::quantize_weights()");
}

}  // namespace
}  // namespace halfstep::quant
