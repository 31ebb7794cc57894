// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/sensitivity.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/quant/quantization.h"
#include "tests/support/errors.h"

namespace halfstep::quant {
namespace {

struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 8, .out = 6}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 6, .out = 6}});
  nn::Linear fc3 = child("fc3", nn::Linear{{.in = 6, .out = 4}});
  Tensor forward(const Tensor& x) const { return fc3(relu(fc2(relu(fc1(x))))); }
};

TEST(Sensitivity, TellsWhatEachLayerAloneCosts) {
  manual_seed(5);
  const Net net;
  const Tensor x = randn({32, 8});
  const Tensor exact = [&] {
    const NoGrad no_grad;
    return net(x);
  }();
  const Quantization q = prepare(net, x);
  (void)net(x);  // ranges
  commit(net);
  net.eval();
  // The second layer's weights have one step: what is left of them is far away.
  Tensor scale = q.at("fc2.weight").scale;
  {
    const NoGrad no_grad;
    scale.fill_(10);
  }
  enable_fake_quant(q.at("fc3.weight"), false);
  int calls = 0;
  const auto loss = [&] {
    ++calls;
    const NoGrad no_grad;
    const Tensor d = net(x) - exact;
    return mean(d * d).item<double>();
  };
  const std::vector<LayerSensitivity> found = sensitivity(net, loss);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(calls, 4);
  EXPECT_EQ(found[0].module, "fc2");
  // By hand: the switches of that layer alone.
  enable_fake_quant(net, false);
  q.at("fc2.weight").enable_fake_quant();
  q.at("relu_1").enable_fake_quant();
  EXPECT_EQ(found[0].loss, loss());
  EXPECT_EQ(found[0].increase, found[0].loss);  // in floating point nothing differs
  EXPECT_FALSE(found[0].weight_only);
  for (const LayerSensitivity& s : found) EXPECT_EQ(s.weight_only, s.module == "fc3");
  EXPECT_GT(found[0].loss, 10 * found[1].loss);
  EXPECT_GT(found[2].loss, 0);
}

TEST(Sensitivity, LeavesSwitchesAsTheyWere) {
  const Net net;
  const Quantization q = prepare(net, zeros({2, 8}));
  q.at("fc1.weight").enable_fake_quant(false);
  EXPECT_EQ(test::error_of<Error>([&] { sensitivity(net, []() -> double { throw Error("no loss"); }); }), "no loss");
  EXPECT_FALSE(q.at("fc1.weight").is_fake_quant_enabled());
  EXPECT_TRUE(q.at("fc2.weight").is_fake_quant_enabled());
  EXPECT_TRUE(q.at("input").is_fake_quant_enabled());
  int calls = 0;
  const auto found = sensitivity(net, [&] { return ++calls == 3 ? NAN : 1.0; });
  EXPECT_TRUE(std::isnan(found[0].increase));
  EXPECT_FALSE(q.at("fc1.weight").is_fake_quant_enabled());
  const Net plain;
  EXPECT_EQ(test::error_of<Error>([&] { sensitivity(plain, [] { return 0.0; }); }),
            "sensitivity: expected a network that quant::prepare() has prepared");
}

}  // namespace
}  // namespace halfstep::quant
