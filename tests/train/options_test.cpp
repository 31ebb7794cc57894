// SPDX-License-Identifier: Apache-2.0
// The trainer's options against a loop in float64 that does what they say, and evaluation against counting by hand.
#include <gtest/gtest.h>

#include "halfstep/data/loader.h"
#include "halfstep/nn/container.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

using test::Regression;
using test::Samples;
using training::TrainConfig;

// Softmax regression by hand: parameters (weights [C, D], then biases) after `steps` batches of the whole set.
std::vector<double> by_hand(const TrainConfig& c, const Samples& s, std::size_t classes, std::vector<double> w,
                            int steps) {
  const std::size_t d = s.features, n = w.size();
  std::vector<double> velocity(n, 0), second(n, 0);
  for (int step = 1; step <= steps; ++step) {
    std::vector<double> g(n, 0);
    for (std::size_t i = 0; i < s.count; ++i) {
      std::vector<double> p(classes);
      double total = 0;
      for (std::size_t k = 0; k < classes; ++k) {
        double z = w[classes * d + k];
        for (std::size_t j = 0; j < d; ++j) z += w[k * d + j] * s.x[i * d + j];
        total += p[k] = std::exp(z);
      }
      for (std::size_t k = 0; k < classes; ++k) {
        const double r =
            (p[k] / total - (s.y[i] == static_cast<std::int64_t>(k) ? 1 : 0)) / static_cast<double>(s.count);
        for (std::size_t j = 0; j < d; ++j) g[k * d + j] += r * s.x[i * d + j];
        g[classes * d + k] += r;
      }
    }
    if (c.clip_norm > 0) {
      double norm = 0;
      for (double v : g) norm += v * v;
      const double factor = std::min(1.0, c.clip_norm / (std::sqrt(norm) + 1e-6));
      for (double& v : g) v *= factor;
    }
    for (std::size_t k = 0; k < n; ++k) {
      if (c.optimizer == "adamw") w[k] -= c.lr * c.weight_decay * w[k];
      const double e = g[k] + (c.optimizer == "adamw" ? 0 : c.weight_decay * w[k]);
      if (c.optimizer == "sgd") {
        velocity[k] = c.momentum * velocity[k] + e;
        w[k] -= c.lr * velocity[k];
      } else {
        velocity[k] = 0.9 * velocity[k] + 0.1 * e;
        second[k] = 0.999 * second[k] + 0.001 * e * e;
        w[k] -= c.lr * velocity[k] / (1 - std::pow(0.9, step)) /
                (std::sqrt(second[k] / (1 - std::pow(0.999, step))) + 1e-8);
      }
    }
  }
  return w;
}

TEST(TrainOptions, DoWhatTheySay) {
  const Samples samples(64, 4, 3, 6);
  std::vector<TrainConfig> configs(9);
  configs[1].momentum = 0.9;
  configs[2].weight_decay = 0.5;
  configs[3].clip_norm = 0.05;
  configs[4].optimizer = "adam";
  configs[4].weight_decay = 0.5;
  configs[5].optimizer = "adamw";
  configs[5].weight_decay = 0.5;
  configs[6].accumulate = 4;
  configs[6].batch_size = 16;
  configs[6].clip_norm = 0.05;
  configs[7].loss_scale = "fixed:1024";
  configs[7].clip_norm = 0.05;
  configs[8].accumulate = 3;
  configs[8].batch_size = 30;  // 30, 30 and 4
  configs[8].momentum = 0.5;
  for (TrainConfig& config : configs) {
    config.lr = config.optimizer == "sgd" ? 0.2 : 0.05;
    config.epochs = 4;
    manual_seed(3);
    const Regression net(4, 3);
    const auto all = [&] {
      auto w = net.fc.weight.to_vector<double>();
      const auto b = net.fc.bias.to_vector<double>();
      w.insert(w.end(), b.begin(), b.end());
      return w;
    };
    const auto start = all();
    test::run(config, net, samples.dataset(), samples.dataset());
    const auto expected = by_hand(config, samples, 3, start, 4), got = all();
    // A gradient is a mean of 64 terms under 1: off by 70 roundings of 2^-24 at most, four times in a row lr of it each
    // (twice that with momentum). Adam divides by the gradient's own size, here above 1e-3, so it is off by 1000 times
    // as much relative to its step of lr; the decay that is looked for is 0.5 times the weight.
    const double bound = config.lr * 4 * 2 * 70 * 0x1p-24 * (config.optimizer == "sgd" ? 1 : 1000);
    for (std::size_t k = 0; k < got.size(); ++k) {
      EXPECT_NEAR(got[k], expected[k], bound) << "configuration " << &config - configs.data() << " parameter " << k;
      EXPECT_GT(std::abs(expected[k] - start[k]), 0);
    }
  }
}

// Logits as they are: 150 samples in batches of 64, the last one smaller and worse.
TEST(TrainOptions, EvaluationCountsSamples) {
  const std::size_t classes = 7;
  std::vector<double> x;
  std::vector<std::int64_t> y;
  double loss = 0;
  int top1 = 0, top5 = 0;
  RandomStream random(5);
  for (std::size_t i = 0; i < 150; ++i) {
    std::vector<double> row(classes);
    for (double& v : row) v = static_cast<double>(random() % 64) / 8;
    const std::size_t label = random() % classes;
    if (i < 100) row[label] = 9;
    if (i >= 140) std::fill(row.begin(), row.end(), 2.0);  // no opinion: only the first classes may count as found
    std::size_t place = 0;
    double total = 0;
    for (std::size_t k = 0; k < classes; ++k) {
      total += std::exp(row[k]);
      place += row[k] > row[label] || (row[k] == row[label] && k < label) ? 1 : 0;
    }
    loss += (std::log(total) - row[label]) / 150;
    top1 += place < 1;
    top5 += place < 5;
    x.insert(x.end(), row.begin(), row.end());
    y.push_back(static_cast<std::int64_t>(label));
  }
  const auto dataset = std::make_shared<data::TensorDataset>(tensor(x, {150, 7}), tensor(y, {150}));
  const nn::Sequential nothing;
  const training::Classifier classifier{.module = &nothing, .forward = [](const Tensor& logits) { return logits; }};
  for (const bool mode : {true, false}) {
    nothing.train(mode);
    const auto seen = [&](const Tensor& logits) {
      EXPECT_FALSE(nothing.is_training());
      return logits;
    };
    training::evaluate({.module = &nothing, .forward = seen}, dataset, std::nullopt);
    EXPECT_EQ(nothing.is_training(), mode) << "left as it was";
  }
  const auto report = training::evaluate(classifier, dataset, std::nullopt, 64);
  // Means of 64 and fewer losses under 10 in float32.
  EXPECT_NEAR(report.metrics["loss"], loss, 70 * 0x1p-24 * 10);
  EXPECT_DOUBLE_EQ(report.metrics["top1"], top1 / 150.0);
  EXPECT_DOUBLE_EQ(report.metrics["top5"], top5 / 150.0);
  EXPECT_LT(top1, top5);
  EXPECT_LT(top5, 150);
  // No number is no hit, whatever the others are.
  const auto broken = std::make_shared<data::TensorDataset>(full({3, 7}, NAN), zeros({3}, {.dtype = i64}));
  EXPECT_EQ(training::evaluate(classifier, broken, std::nullopt).metrics["top5"], 0);
}

TEST(TrainOptions, ScalersFollowPrecisionAndLossScale) {
  TrainConfig config;
  for (const auto& [amp, enabled] : {std::pair{"off", false}, {"bf16", false}, {"f16", true}}) {
    config.amp = amp;
    EXPECT_EQ(training::loss_scale_policy(config).has_value(), enabled) << amp;
    EXPECT_EQ(training::make_scaler(config).is_enabled(), enabled) << amp;
  }
  EXPECT_TRUE(training::loss_scale_policy(config)->rules().dynamic);
  config.amp = "bf16";
  config.loss_scale = "mindspore:1024,4,50";
  const auto options = training::loss_scale_policy(config).value().rules();
  EXPECT_EQ(options.init_scale, 1024);
  EXPECT_EQ(options.growth_factor, 4);
  EXPECT_EQ(options.backoff_factor, 0.25);
  EXPECT_EQ(options.growth_interval, 50);
  EXPECT_EQ(options.floor, 1);
}

}  // namespace
}  // namespace halfstep
