// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/embedding.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/loss.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"

namespace halfstep {
namespace {

std::vector<std::string> names(const NamedTensors& list) {
  std::vector<std::string> result;
  for (const auto& t : list) result.push_back(t.name);
  return result;
}

struct Mixed : nn::Module<Mixed> {
  nn::Embedding table = child("table", nn::Embedding{{.num = 5, .dim = 4, .padding_idx = 0}});
  nn::Sequential body = child(
      "body", nn::Sequential{nn::Linear{{.in = 4, .out = 4}}, nn::BatchNorm1d{{.channels = 4}}, nn::PReLU{},
                             nn::Sequential{{"norm", nn::LayerNorm{{.normalized_shape = {4}}}}, {"act", nn::GELU{}}}});
  nn::ModuleList<nn::Linear> heads =
      child("heads", nn::ModuleList<nn::Linear>{nn::Linear{{.in = 4, .out = 2}}, nn::Linear{{.in = 4, .out = 3}}});
  Tensor forward(const Tensor& x) const { return heads[1](body(table(x))); }
};

// The names that torch.nn gives the same network's state_dict(), written down from its documentation.
TEST(Layers, StateHasPyTorchsNames) {
  EXPECT_EQ(names(Mixed{}.state_dict()),
            (std::vector<std::string>{"table.weight", "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias",
                                      "body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked",
                                      "body.2.weight", "body.3.norm.weight", "body.3.norm.bias", "heads.0.weight",
                                      "heads.0.bias", "heads.1.weight", "heads.1.bias"}));
}

TEST(Layers, ClonesOfContainersAreIndependentAndKeepTheirNames) {
  const Mixed net;
  const Mixed shared = net, other = nn::clone(net);
  ASSERT_EQ(names(other.state_dict()), names(net.state_dict()));
  for (std::size_t i = 0; i < net.state_dict().size(); ++i) {
    EXPECT_TRUE(net.state_dict()[i].tensor.is_same(shared.state_dict()[i].tensor));
    EXPECT_FALSE(net.state_dict()[i].tensor.is_same(other.state_dict()[i].tensor)) << net.state_dict()[i].name;
  }
  other.eval();
  EXPECT_TRUE(net.body[1].is_training());
  EXPECT_FALSE(other.body[1].is_training());
  EXPECT_FALSE(other.heads[0].is_training());
}

TEST(Layers, SequentialRunsInOrderAndRefusesMisuse) {
  const nn::Sequential net{nn::Linear{{.in = 3, .out = 2}}, nn::ReLU{}};
  const Tensor x = tensor({1, -2, 3, 0, 1, 1}, {2, 3});
  EXPECT_EQ(net(x).to_vector<float>(), relu(net.at<nn::Linear>(0)(x)).to_vector<float>());
  EXPECT_THROW(net.at<nn::Linear>(1), Error);
  EXPECT_THROW(net[2], Error);
  EXPECT_THROW((nn::Sequential{{"a", nn::ReLU{}}, {"a", nn::ReLU{}}}), Error);
  EXPECT_THROW((nn::Sequential{{"a.b", nn::ReLU{}}}), Error);
  EXPECT_EQ(net.str(), "Sequential(\n  (0): Linear(3, 2)\n  (1): ReLU()\n)");
}

TEST(Layers, OverridesReachModulesInContainers) {
  const nn::Sequential net{nn::Linear{{.in = 4, .out = 4}},
                           nn::Sequential{nn::Linear{{.in = 4, .out = 4}}, nn::Linear{{.in = 4, .out = 4}}}};
  const auto decisions = amp::explain([&] {
    amp::Autocast autocast{{.dtype = bf16, .modules = {{.path = "1.0", .enabled = false}}}};
    net(ones({2, 4}));
  });
  std::vector<std::string> ran;
  for (const auto& d : decisions) {
    if (d.op == "linear") ran.push_back(d.module);
  }
  EXPECT_EQ(ran, (std::vector<std::string>{"0", "1.1"}));
}

TEST(Layers, FreezingTrainingAndLowPrecision) {
  const Mixed net;
  net.body.requires_grad_(false);
  EXPECT_EQ(names(net.trainable_parameters()).size(), 5u);
  net.body.requires_grad_();
  net.to(bf16);
  EXPECT_EQ(net.body[1].own_tensor("num_batches_tracked").dtype(), i64);
  const Tensor y = net(tensor(std::vector<std::int64_t>{0, 1, 2, 3, 4, 1}, {6}));
  EXPECT_EQ(y.dtype(), bf16);
  sum(y).backward();
  const Tensor gradient = net.table.weight.grad();
  EXPECT_EQ(gradient.dtype(), bf16);
  EXPECT_EQ(gradient.select(0, 0).to_vector<float>(), std::vector<float>(4, 0)) << "the padding row";
}

TEST(Layers, DropoutOnlyWhileTraining) {
  const nn::Dropout drop{{.p = 0.25}};
  const Tensor x = ones({40000});
  const auto y = drop(x).to_vector<double>();
  double zero = 0;
  for (double v : y) {
    if (v == 0)
      ++zero;
    else
      EXPECT_FLOAT_EQ(static_cast<float>(v), 4.0f / 3);
  }
  // Binomial: a standard deviation of sqrt(n p (1 - p)) = 86.6, six of it.
  EXPECT_NEAR(zero, 10000, 520);
  drop.eval();
  EXPECT_EQ(drop(x).to_vector<float>(), x.to_vector<float>());
  EXPECT_THROW((nn::Dropout{{.p = 1.5}}), Error);
}

TEST(Layers, BatchNormKeepsRunningStatistics) {
  const Tensor x = tensor({1, 3, 5, 7}, {4, 1});  // mean 4, biased variance 5, unbiased 20/3
  for (const std::optional<double> momentum : {std::optional<double>(0.1), std::optional<double>()}) {
    const nn::BatchNorm1d norm{{.channels = 1, .eps = 0, .momentum = momentum}};
    EXPECT_FLOAT_EQ(norm(x).to_vector<float>()[3], static_cast<float>(3 / std::sqrt(5.0)));
    const double share = momentum.value_or(1);
    EXPECT_NEAR(norm.running_mean.item<double>(), 4 * share, 1e-6);
    EXPECT_NEAR(norm.running_var.item<double>(), 1 - share + share * 20 / 3, 1e-6);
    EXPECT_EQ(norm.num_batches_tracked.item<int>(), 1);
    norm.eval();
    const double expected = (7 - 4 * share) / std::sqrt(1 - share + share * 20 / 3);
    EXPECT_NEAR(norm(x).to_vector<double>()[3], expected, 1e-6);
    EXPECT_EQ(norm.num_batches_tracked.item<int>(), 1);
    EXPECT_THROW(norm(ones({2, 2})), ShapeError);
  }
  EXPECT_THROW(nn::BatchNorm2d{{.channels = 2}}(ones({2, 2})), ShapeError);
}

// With an activation and a residual the module is batch_norm_act of its parameters, and keeps the same statistics.
TEST(Layers, BatchNormWithWhatFollows) {
  const auto wave = [](const Shape& sizes, double step) {
    std::vector<double> v;
    for (std::int64_t i = 0; i < sizes.numel(); ++i) v.push_back(3 * std::sin(step * static_cast<double>(i)));
    return tensor(v, sizes, {.dtype = f32});
  };
  const auto check = [&](const auto& norm, const auto& plain, const Shape& sizes) {
    const Tensor x = wave(sizes, 1.7), r = wave(sizes, 0.9);
    for (const bool training : {true, false}) {
      norm.train(training);
      plain.train(training);
      EXPECT_EQ(norm(x, Activation::relu, r).template to_vector<float>(),
                relu(plain(x) + r).template to_vector<float>());
      EXPECT_EQ(norm(x, Activation::relu6).template to_vector<float>(), relu6(plain(x)).template to_vector<float>());
      EXPECT_EQ(norm(x, Activation::none, r).template to_vector<float>(), (plain(x) + r).template to_vector<float>());
      EXPECT_EQ(norm.running_mean.template to_vector<float>(), plain.running_mean.template to_vector<float>());
      EXPECT_EQ(norm.running_var.template to_vector<float>(), plain.running_var.template to_vector<float>());
      EXPECT_EQ(norm.num_batches_tracked.template item<int>(), 3);
    }
    EXPECT_THROW(norm(x, Activation::relu, wave({2, 2}, 1)), ShapeError);
  };
  for (const std::optional<double> momentum : {std::optional<double>(0.3), std::optional<double>()}) {
    const nn::BatchNormOptions options{.channels = 5, .momentum = momentum};
    check(nn::BatchNorm2d{options}, nn::BatchNorm2d{options}, {3, 5, 4, 2});
    check(nn::BatchNorm1d{options}, nn::BatchNorm1d{options}, {6, 5});
    check(nn::BatchNorm1d{options}, nn::BatchNorm1d{options}, {2, 5, 7});
  }
  // What doesn't fit is refused before a batch is counted.
  const nn::BatchNorm2d counted{{.channels = 5}};
  EXPECT_THROW(counted(wave({2, 4, 3, 3}, 1), Activation::relu), ShapeError);
  EXPECT_EQ(counted.num_batches_tracked.item<int>(), 0);
}

TEST(Layers, NormsAndActivationsAreTheirOps) {
  const Tensor x = tensor({1, 2, 3, 6}, {1, 4});
  const auto near = [](const Tensor& t, const std::vector<double>& expected) {
    const auto v = t.to_vector<double>();
    ASSERT_EQ(v.size(), expected.size());
    // A function and a division in float32, a few units of its last place for values to 8.
    for (std::size_t i = 0; i < v.size(); ++i) EXPECT_NEAR(v[i], expected[i], 4e-6) << i;
  };
  const double s = std::sqrt(3.5), r = std::sqrt(12.5);
  near(nn::LayerNorm{{.normalized_shape = {4}, .eps = 0}}(x), {-2 / s, -1 / s, 0, 3 / s});
  near(nn::RMSNorm{{.normalized_shape = {4}, .eps = 0}}(x), {1 / r, 2 / r, 3 / r, 6 / r});
  near(nn::GroupNorm{{.groups = 2, .channels = 4, .eps = 0}}(x), {-1, 1, -1, 1});
  near(nn::Flatten{}(ones({1, 2, 2})), {1, 1, 1, 1});
  const Tensor z = tensor({-1, 0, 2});
  near(nn::ReLU{}(z), {0, 0, 2});
  near(nn::LeakyReLU{{.negative_slope = 0.5}}(z), {-0.5, 0, 2});
  near(nn::PReLU{}(z), {-0.25, 0, 2});
  near(nn::SiLU{}(z), {-1 / (1 + std::exp(1)), 0, 2 / (1 + std::exp(-2))});
  near(nn::Sigmoid{}(z), {1 / (1 + std::exp(1)), 0.5, 1 / (1 + std::exp(-2))});
  near(nn::Tanh{}(z), {std::tanh(-1), 0, std::tanh(2)});
  near(nn::GELU{}(z), {-std::erfc(1 / M_SQRT2) / 2, 0, std::erfc(-M_SQRT2)});
  near(nn::Softplus{}(z), {std::log1p(std::exp(-1)), std::log(2), std::log1p(std::exp(2))});
  const double total = std::exp(-1) + 1 + std::exp(2);
  near(nn::Softmax{{.dim = 0}}(z), {std::exp(-1) / total, 1 / total, std::exp(2) / total});
  near(nn::LogSoftmax{{.dim = 0}}(z), {-1 - std::log(total), -std::log(total), 2 - std::log(total)});
  near(nn::Identity{}(z), {-1, 0, 2});
}

TEST(Layers, LossesAreTheirOps) {
  const Tensor a = tensor({0, 3}), b = tensor({0.5, 1});
  EXPECT_EQ(nn::MSELoss{}(a, b).item<double>(), (0.25 + 4) / 2);
  EXPECT_EQ(nn::L1Loss{{.reduction = Reduction::sum}}(a, b).item<double>(), 2.5);
  EXPECT_EQ(nn::SmoothL1Loss{}(a, b).item<double>(), (0.125 + 1.5) / 2);
  EXPECT_EQ(nn::HuberLoss{{.delta = 2}}(a, b).item<double>(), (0.125 + 2) / 2);
  const Tensor logits = zeros({1, 2}), target = tensor(std::vector<std::int64_t>{1}, {1});
  EXPECT_NEAR(nn::CrossEntropyLoss{}(logits, target).item<double>(), std::log(2), 1e-7);
  EXPECT_EQ(nn::NLLLoss{}(tensor({-1, -3}, {1, 2}), target).item<double>(), 3);
  EXPECT_NEAR(nn::KLDivLoss{{.reduction = Reduction::sum}}(tensor({std::log(0.5)}), tensor({1})).item<double>(),
              std::log(2), 1e-7);
  EXPECT_NEAR(nn::BCEWithLogitsLoss{{.pos_weight = tensor({3})}}(zeros({1}), ones({1})).item<double>(), 3 * std::log(2),
              1e-6);
  EXPECT_NEAR(nn::BCELoss{}(tensor({0.25}), ones({1})).item<double>(), std::log(4), 1e-6);
  const nn::CrossEntropyLoss weighted{{.weight = tensor({1, 2})}};
  EXPECT_EQ(names(weighted.state_dict()), std::vector<std::string>{"weight"});
}

}  // namespace
}  // namespace halfstep
