// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/calibrate.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "halfstep/quant/quantization.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

struct Net : nn::Module<Net> {
  nn::Conv2d conv = child("conv", nn::Conv2d{{.in = 1, .out = 2, .kernel = {3, 3}}});
  nn::BatchNorm2d norm = child("norm", nn::BatchNorm2d{{.channels = 2}});
  nn::Linear fc = child("fc", nn::Linear{{.in = 32, .out = 3}});
  Tensor forward(const Tensor& x) const { return fc(flatten(relu(norm(conv(x))), 1)); }
};

class Calibrate : public ::testing::Test {
 protected:
  static Tensor images(double low, double high) {
    std::vector<double> values(2 * 36, 0.5);
    values[0] = low, values[40] = high;
    return tensor(values, {2, 1, 6, 6});
  }
  Net net;
};

TEST_F(Calibrate, TakesTheRangesOfWhatPasses) {
  const quant::Quantization q = quant::prepare(net, zeros({2, 1, 6, 6}), {.observer = quant::ObserverKind::min_max});
  const std::vector<double> lows = {-1, -3, -2}, highs = {2, 1, 4};
  std::size_t i = 0;
  const Tensor mean_before = net.norm.running_mean.clone();
  net.train();
  quant::calibrate(net, [&] {
    EXPECT_FALSE(GradMode::is_enabled());
    EXPECT_FALSE(net.is_training());
    (void)net(images(lows[i], highs[i]));
    return ++i < lows.size();
  });
  EXPECT_EQ(i, 3U);
  EXPECT_TRUE(net.is_training());
  // u8 from the least to the greatest: 4 - (-3) in 255 steps, of which 3 / 7 are below 0.
  const auto input = q.tensors().front();
  ASSERT_FALSE(input.weight);
  EXPECT_FLOAT_EQ(q.at(input.name).scale.item<float>(), 7.0F / 255);
  EXPECT_EQ(q.at(input.name).zero_point.to(i64).item<std::int64_t>(), 109);
  EXPECT_EQ(net.norm.running_mean.to_vector<float>(), mean_before.to_vector<float>())
      << "statistics follow training alone";
  // Rounded from now on, and no longer observed.
  net.eval();
  const Tensor far = net(images(-100, 100));
  EXPECT_FLOAT_EQ(q.at(input.name).scale.item<float>(), 7.0F / 255);
  quant::enable_fake_quant(net, false);
  EXPECT_NE(net(images(-100, 100)).to_vector<float>(), far.to_vector<float>());
}

TEST_F(Calibrate, RestoresWhatItTurnedWhenTheRunThrows) {
  const quant::Quantization q = quant::prepare(net, zeros({2, 1, 6, 6}));
  net.train();
  EXPECT_THROW(quant::calibrate(net, []() -> bool { throw std::runtime_error("no data"); }), std::runtime_error);
  EXPECT_TRUE(net.is_training());
  EXPECT_TRUE(GradMode::is_enabled());
  for (const quant::QuantizedTensor& t : q.tensors()) EXPECT_FALSE(q.at(t.name).options.observe_in_eval) << t.name;
}

TEST_F(Calibrate, WantsAPreparedNetwork) {
  EXPECT_NE(test::error_of<Error>([&] {
              quant::calibrate(net, [] { return false; });
            }).find("calibrate: expected a prepared network"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
