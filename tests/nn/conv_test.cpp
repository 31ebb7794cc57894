// SPDX-License-Identifier: Apache-2.0
// What tests/nn/golden_test.cpp doesn't hold against PyTorch: initial values, errors, layouts.
#include "halfstep/nn/conv.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/nn/container.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

// Uniform in +-bound: of n values the largest is under bound (1 - 20 / n) with a probability of e^-20, and the mean
// square is bound^2 / 3 with a standard error of 0.3 bound^2 / sqrt(n).
void expect_uniform(const Tensor& t, double bound) {
  double largest = 0, squares = 0;
  for (const double v : t.to_vector<double>()) largest = std::max(largest, std::abs(v)), squares += v * v;
  const auto n = static_cast<double>(t.numel());
  EXPECT_LE(largest, bound);
  EXPECT_GE(largest, bound * (1 - 20 / n));
  EXPECT_NEAR(squares / n / (bound * bound), 1.0 / 3, 6 * 0.3 / std::sqrt(n));
}

TEST(Conv, StartsAsPyTorchs) {
  const nn::Conv2d conv{{.in = 64, .out = 256, .kernel = {3, 2}, .groups = 4}};
  EXPECT_EQ(conv.weight.sizes(), (Shape{256, 16, 3, 2}));
  expect_uniform(conv.weight, 1 / std::sqrt(16.0 * 6));
  expect_uniform(conv.bias, 1 / std::sqrt(16.0 * 6));
  // The fan in of a transposed convolution is counted as for the others, over the weight's second dimension.
  const nn::ConvTranspose1d transposed{{.in = 64, .out = 256, .kernel = {5}, .groups = 2}};
  EXPECT_EQ(transposed.weight.sizes(), (Shape{64, 128, 5}));
  expect_uniform(transposed.weight, 1 / std::sqrt(128.0 * 5));
  expect_uniform(transposed.bias, 1 / std::sqrt(128.0 * 5));
  const nn::Conv1d plain{{.in = 2, .out = 3, .kernel = {1}, .bias = false, .dtype = f64}};
  EXPECT_FALSE(plain.bias.defined());
  EXPECT_EQ(plain.parameters().size(), 1U);
  EXPECT_EQ(plain.weight.dtype(), f64);
  const nn::Conv2d bare{{.in = 2, .out = 3, .kernel = {2}, .initialise = false}};
  EXPECT_EQ(bare.weight.to_vector<float>(), std::vector<float>(24, 0));
}

TEST(Conv, SaysWhatItIs) {
  const nn::Conv2d conv{{.in = 3, .out = 8, .kernel = {3}, .stride = {2}, .padding = {1, 0}, .bias = false}};
  EXPECT_EQ(conv.str(), "Conv2d(3, 8, kernel=[3, 3], stride=[2, 2], padding=[1, 0], bias=false)");
  EXPECT_EQ((nn::Conv1d{{.in = 2, .out = 4, .kernel = {3}, .padding = "same", .dilation = {2}, .groups = 2}}.str()),
            "Conv1d(2, 4, kernel=[3], padding=same, dilation=[2], groups=2)");
  EXPECT_EQ((nn::Conv1d{{.in = 2, .out = 4, .kernel = {3}, .padding = "valid"}}.str()), "Conv1d(2, 4, kernel=[3])");
  EXPECT_EQ(
      (nn::Conv1d{{.in = 1, .out = 1, .kernel = {3}, .padding = 1, .padding_mode = nn::PaddingMode::circular}}.str()),
      "Conv1d(1, 1, kernel=[3], padding=[1], padding_mode=circular)");
  EXPECT_EQ((nn::ConvTranspose2d{{.in = 2, .out = 1, .kernel = {2}, .stride = {2}, .output_padding = {1, 0}}}.str()),
            "ConvTranspose2d(2, 1, kernel=[2, 2], stride=[2, 2], output_padding=[1, 0])");
}

TEST(Conv, RefusesOptionsThatDoNotFit) {
  const auto said = [](const nn::ConvOptions& o) { return test::error_of<Error>([&] { nn::Conv2d{o}; }); };
  EXPECT_EQ(said({.in = 3, .out = 4, .kernel = {3}, .groups = 2}),
            "Conv2d: expected in and out to be multiples of groups, got in 3, out 4 and groups 2");
  EXPECT_EQ(said({.in = 3, .out = 4, .kernel = {3, 3, 3}}),
            "Conv2d: expected a kernel of 1 or 2 numbers of at least 1, got [3, 3, 3]");
  EXPECT_EQ(said({.in = 3, .out = 4, .kernel = {0, 3}}),
            "Conv2d: expected a kernel of 1 or 2 numbers of at least 1, got [0, 3]");
  EXPECT_EQ(said({.in = 3, .out = 4, .kernel = {3}, .padding = -1}),
            "Conv2d: expected a padding of 1 or 2 numbers of at least 0, got [-1]");
  EXPECT_EQ(said({.in = 3, .out = 4, .kernel = {3}, .stride = {1, 2}, .padding = "same"}),
            "Conv2d: padding \"same\" needs stride 1, got [1, 2]");
  EXPECT_EQ(said({.in = 3, .out = 4, .kernel = {3}, .stride = {0}}),
            "Conv2d: expected a stride of 1 or 2 numbers of at least 1, got [0]");
  EXPECT_EQ(said({.in = 3, .out = 4, .kernel = {3}, .dilation = {0}}),
            "Conv2d: expected a dilation of 1 or 2 numbers of at least 1, got [0]");
  EXPECT_EQ(test::error_of<Error>([] { nn::Padding("full"); }),
            "padding: expected numbers, \"same\" or \"valid\", got \"full\"");
  EXPECT_EQ(
      test::error_of<Error>(
          [] { nn::ConvTranspose1d{{.in = 1, .out = 1, .kernel = {3}, .stride = {2}, .output_padding = {2}}}; }),
      "ConvTranspose1d: expected an output_padding under stride or dilation, got [2] with stride [2] and dilation "
      "[1]");
  // The op names what doesn't fit of an input.
  const nn::Conv2d conv{{.in = 3, .out = 4, .kernel = {3}}};
  EXPECT_THROW(conv(zeros({1, 4, 8, 8})), ShapeError);
  EXPECT_THROW(conv(zeros({1, 3, 2, 8})), ShapeError);
}

TEST(Conv, LayoutOfWeightsChangesAndValuesStay) {
  const nn::Sequential net{nn::Conv2d{{.in = 3, .out = 4, .kernel = {3}, .padding = 1}},
                           nn::Conv2d{{.in = 4, .out = 2, .kernel = {3}, .padding = 1}}};
  const Tensor x = randn({2, 3, 5, 6});
  const Tensor before = net(x);
  const auto weight = net.at<nn::Conv2d>(0).weight.to_vector<float>();
  const Tensor handle = net.at<nn::Conv2d>(0).weight;
  net.to(MemoryFormat::channels_last);
  EXPECT_TRUE(is_channels_last(net.at<nn::Conv2d>(0).weight));
  EXPECT_TRUE(is_channels_last(handle)) << "handles on a weight see the new layout";
  EXPECT_EQ(net.at<nn::Conv2d>(0).weight.to_vector<float>(), weight);
  EXPECT_TRUE(net.at<nn::Conv2d>(0).weight.requires_grad());
  EXPECT_TRUE(net.at<nn::Conv2d>(0).weight.is_leaf());
  const Tensor after = net(x);
  EXPECT_TRUE(is_channels_last(after));
  const auto a = before.to_vector<double>(), b = after.to_vector<double>();
  // Sums of 36 products of size 1 in float32, in other orders.
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 36 * 36 * 6e-8);
  // The optimizer works on such weights, and the layout stays.
  optim::SGD optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  sum(after * after).backward();
  optimizer.step();
  EXPECT_NE(net.at<nn::Conv2d>(0).weight.to_vector<float>(), weight);
  EXPECT_TRUE(is_channels_last(net.at<nn::Conv2d>(0).weight));
  net.to(MemoryFormat::contiguous);
  EXPECT_TRUE(net.at<nn::Conv2d>(0).weight.is_contiguous());
  EXPECT_THROW(net.to(MemoryFormat::preserve), Error);
}

TEST(Conv, ClonesShareNothing) {
  const nn::Conv2d conv{{.in = 1, .out = 1, .kernel = {2}}};
  const nn::Conv2d other = nn::clone(conv), same = conv;
  EXPECT_TRUE(same.weight.is_same(conv.weight));
  EXPECT_FALSE(other.weight.is_same(conv.weight));
  EXPECT_EQ(other.weight.to_vector<float>(), conv.weight.to_vector<float>());
}

}  // namespace
}  // namespace halfstep
