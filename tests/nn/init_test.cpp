// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/init.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/core/random.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/embedding.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/create.h"

namespace halfstep {
namespace {

namespace init = nn::init;

struct Moments {
  double mean = 0, variance = 0, low = 0, high = 0;
};
Moments moments(const Tensor& t) {
  const auto v = t.to_vector<double>();
  Moments m{.low = v[0], .high = v[0]};
  for (double x : v) {
    m.mean += x / static_cast<double>(v.size());
    m.low = std::min(m.low, x);
    m.high = std::max(m.high, x);
  }
  for (double x : v) m.variance += (x - m.mean) * (x - m.mean) / static_cast<double>(v.size());
  return m;
}

// The mean of n values has a standard deviation of s / sqrt(n), their variance one of at most s^2 sqrt(2 / n) (the
// normal distribution's; the others here are less): six of each.
void expect_moments(const Tensor& t, double mean, double std) {
  const Moments m = moments(t);
  const auto n = static_cast<double>(t.numel());
  EXPECT_NEAR(m.mean, mean, 6 * std / std::sqrt(n));
  EXPECT_NEAR(m.variance, std * std, 6 * std * std * std::sqrt(2 / n));
}

class Init : public testing::Test {
 protected:
  void SetUp() override { manual_seed(17); }
};

TEST_F(Init, FansGiveTheVariances) {
  const auto weight = [] { return empty({64, 32, 3, 3}, {.dtype = f64}); };  // fans 288 and 576
  expect_moments(init::xavier_uniform_(weight()), 0, std::sqrt(2.0 / 864));
  expect_moments(init::xavier_normal_(weight(), 2), 0, 2 * std::sqrt(2.0 / 864));
  expect_moments(init::kaiming_uniform_(weight()), 0, std::sqrt(2.0 / 288));
  const Tensor uniform = init::kaiming_uniform_(weight(), {.negative_slope = std::sqrt(5)});
  EXPECT_LE(moments(uniform).high, std::sqrt(1.0 / 288)) << "a slope of sqrt(5) gives +-1/sqrt(fan), as Linear has";
  EXPECT_GT(moments(uniform).high, 0.99 * std::sqrt(1.0 / 288));
  expect_moments(
      init::kaiming_normal_(weight(), {.mode = init::FanMode::fan_out, .nonlinearity = init::Nonlinearity::tanh}), 0,
      5.0 / 3 / std::sqrt(576));
  EXPECT_THROW(init::xavier_uniform_(empty({3})), ShapeError);
  EXPECT_THROW(init::kaiming_normal_(empty({3})), ShapeError);
}

TEST_F(Init, Gains) {
  using enum init::Nonlinearity;
  EXPECT_EQ(init::calculate_gain(linear), 1);
  EXPECT_EQ(init::calculate_gain(sigmoid), 1);
  EXPECT_DOUBLE_EQ(init::calculate_gain(tanh), 5.0 / 3);
  EXPECT_DOUBLE_EQ(init::calculate_gain(relu), std::sqrt(2));
  EXPECT_DOUBLE_EQ(init::calculate_gain(leaky_relu), std::sqrt(2 / 1.0001));
  EXPECT_EQ(init::calculate_gain(selu), 0.75);
}

TEST_F(Init, TruncatedNormalsKeepTheirBoundsAndMoments) {
  // Between -2 and 2 the variance is 1 - 4 phi(2) / (2 Phi(2) - 1) = 0.77374.
  const Tensor t = init::trunc_normal_(empty({100000}, {.dtype = f64}), 1, 0.5, 0, 2);
  expect_moments(t, 1, 0.5 * std::sqrt(0.7737413));
  EXPECT_GE(moments(t).low, 0);
  EXPECT_LE(moments(t).high, 2);
  // In a far tail, on either side: mean phi(8) / (1 - Phi(8)) = 8.1213.
  for (double sign : {-1.0, 1.0}) {
    const Tensor tail =
        init::trunc_normal_(empty({20000}, {.dtype = f64}), 0, 1, sign > 0 ? 8 : -30, sign > 0 ? 30 : -8);
    EXPECT_NEAR(moments(tail).mean, sign * 8.1213, 0.01);
    EXPECT_GE(sign * (sign > 0 ? moments(tail).low : moments(tail).high), 8);
  }
  EXPECT_THROW(init::trunc_normal_(empty({2}), 0, 1, 2, 1), Error);
}

TEST_F(Init, OrthogonalRowsOrColumns) {
  for (const Shape& sizes : {Shape{5, 12}, Shape{12, 5}, Shape{4, 2, 3}, Shape{7, 7}}) {
    const double gain = 1.5;
    const auto v = init::orthogonal_(empty(sizes, {.dtype = f64}), gain).to_vector<double>();
    const auto rows = static_cast<std::size_t>(sizes[0]);
    const std::size_t columns = v.size() / rows, count = std::min(rows, columns), length = std::max(rows, columns);
    const auto at = [&](std::size_t i, std::size_t k) {
      return rows <= columns ? v[i * columns + k] : v[k * columns + i];
    };
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t j = 0; j < count; ++j) {
        double product = 0;
        for (std::size_t k = 0; k < length; ++k) product += at(i, k) * at(j, k);
        // Some dozens of roundings of 2^-53.
        EXPECT_NEAR(product, i == j ? gain * gain : 0, 1e-13);
      }
    }
  }
  EXPECT_THROW(init::orthogonal_(empty({4})), ShapeError);
}

// As PyTorch's: weight and bias of a linear layer uniform in +-1/sqrt(in), a table standard normal with a padding row
// of zeros, PReLU's slopes 0.25 unless told otherwise.
TEST_F(Init, LayersStartAsDocumented) {
  const nn::Linear wide{{.in = 25, .out = 4000, .dtype = f64}};
  for (const Tensor& t : {Tensor(wide.weight), Tensor(wide.bias)}) {
    expect_moments(t, 0, 0.2 / std::sqrt(3));
    EXPECT_LE(moments(t).high, 0.2);
    EXPECT_GE(moments(t).low, -0.2);
    // The largest of n such values is under 0.99 of the bound once in 0.995^n runs: n is 4000.
    EXPECT_GT(moments(t).high, 0.99 * 0.2);
    EXPECT_LT(moments(t).low, 0.99 * -0.2);
  }
  const nn::Embedding table{{.num = 1000, .dim = 20, .padding_idx = 3, .dtype = f64}};
  EXPECT_EQ(table.weight.select(0, 3).to_vector<double>(), std::vector<double>(20, 0));
  expect_moments(table.weight.narrow(0, 4, 996), 0, 1);
  EXPECT_EQ(nn::PReLU{}.weight.to_vector<float>(), (std::vector<float>{0.25}));
  EXPECT_EQ((nn::PReLU{{.channels = 2, .init = 0.5}}.weight.to_vector<float>()), (std::vector<float>{0.5, 0.5}));
}

TEST_F(Init, DrawsFollowTheSeedAndDiffer) {
  const auto draw = [] { return init::normal_(empty({8})).to_vector<float>(); };
  const auto first = draw(), second = draw();
  EXPECT_NE(first, second);
  manual_seed(17);
  EXPECT_EQ(draw(), first);
  manual_seed(18);
  EXPECT_NE(draw(), first);
}

TEST_F(Init, ConstantsAndTheIdentity) {
  EXPECT_EQ(init::eye_(empty({2, 3})).to_vector<float>(), (std::vector<float>{1, 0, 0, 0, 1, 0}));
  EXPECT_EQ(init::zeros_(empty({2})).to_vector<float>(), (std::vector<float>{0, 0}));
  EXPECT_EQ(init::ones_(empty({2}, {.dtype = bf16})).to_vector<float>(), (std::vector<float>{1, 1}));
  EXPECT_THROW(init::eye_(empty({3})), ShapeError);
}

}  // namespace
}  // namespace halfstep
