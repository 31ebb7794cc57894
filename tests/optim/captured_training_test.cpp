// SPDX-License-Identifier: Apache-2.0
// Captured trainings on the device of --device have the bits of uncaptured ones; on an NVIDIA GPU, emulated or not,
// they go through its graphs, whose launches are counted.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/norm.h"
#include "halfstep/nn/pooling.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/fallback.h"
#include "halfstep/runtime/float32_precision.h"
#include "halfstep/runtime/queue.h"
#include "tests/support/captured_training.h"
#include "tests/support/errors.h"

namespace halfstep::test {
namespace {

class CapturedTraining : public ::testing::Test {
 protected:
  CapturedTraining() {
    set_device_graphs(true);
    reset_fallback_counts();
  }
  ~CapturedTraining() override {
    set_device_graphs(true);
    set_float32_precision(Float32Precision::highest);
  }
  /// Graph launches, as the plug-in for NVIDIA GPUs counts them; for other devices CaptureStats has the count.
  std::uint64_t launches() const { return counter() ? counter()() : 0; }
  bool has_graphs() const { return counter() != nullptr; }

  const Device device = default_device();

 private:
  using Counter = std::uint64_t (*)();
  Counter counter() const {
    if (device.is_cpu()) return nullptr;
    return reinterpret_cast<Counter>(device_extension(device, "graph_launches"));
  }
};

TEST_F(CapturedTraining, ScaledAndSkippedStepsTrainToTheSameBits) {
  constexpr int kSteps = 24;
  for (const bool adam : {false, true}) {
    for (const bool random : {false, true}) {
      const Outcome plain = trained(How::plain, device, kSteps, random, adam);
      // From 2^24 by 1/8 at an overflow and by 2 after every two good steps: some steps were skipped, others not.
      EXPECT_LT(plain.scale, 0x1p24);
      EXPECT_NE(plain.losses.front(), plain.losses.back());
      for (const How how : {How::one_by_one, How::graphs}) {
        const std::uint64_t before = launches();
        const Outcome fast = trained(how, device, kSteps, random, adam);
        EXPECT_EQ(fast.losses, plain.losses);
        EXPECT_EQ(fast.weights, plain.weights);
        EXPECT_EQ(fast.scale, plain.scale);
        EXPECT_GE(fast.stats.replayed, static_cast<std::uint64_t>(kSteps) - 4) << fast.why_not;
        if (how == How::one_by_one || has_graphs()) {
          // The first replay makes no graphs yet. All of a step is one.
          EXPECT_EQ(fast.stats.graphs, how == How::graphs ? fast.stats.replayed - 1 : 0U);
          EXPECT_EQ(launches() - before, fast.stats.graphs);
        }
      }
    }
  }
}

struct Images {
  nn::Sequential net{nn::Conv2d{{.in = 2, .out = 8, .kernel = {3}, .padding = 1}},
                     nn::BatchNorm2d{{.channels = 8}},
                     nn::ReLU{},
                     nn::MaxPool2d{{.kernel = {2}}},
                     nn::Conv2d{{.in = 8, .out = 8, .kernel = {3}, .stride = {2}, .padding = 1}},
                     nn::ReLU{},
                     nn::Flatten{},
                     nn::Linear{{.in = 8 * 2 * 2, .out = 3}}};
};

// Convolutions of cuDNN, whose plans a graph keeps, batch statistics that a step leaves behind, max pooling.
TEST_F(CapturedTraining, ConvolutionsTrainToTheSameBits) {
  const auto train = [&](bool captured) {
    manual_seed(4);
    Images images;
    images.net.to(device);
    optim::SGD sgd{images.net.parameters(), {.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-3}};
    auto step = [&](const Tensor& x, const Tensor& y) {
      sgd.zero_grad();
      Tensor loss;
      {
        const amp::Autocast region({.dtype = bf16});
        loss = cross_entropy(images.net(x), y);
      }
      loss.backward();
      sgd.step();
      return loss;
    };
    auto fast = capture(step);
    std::vector<float> result;
    const std::uint64_t before = launches();
    for (int i = 0; i < 8; ++i) {
      const Tensor x = host_randn({4, 2, 8, 8}).to(device), y = host_classes(4).to(device);
      result.push_back((captured ? fast(x, y) : step(x, y)).item<float>());
    }
    for (const auto& p : images.net.state_dict()) {
      if (!is_floating(p.tensor.dtype())) continue;
      for (const float v : p.tensor.to_vector<float>()) result.push_back(v);
    }
    if (has_graphs()) {
      EXPECT_EQ(launches() - before, captured ? 5U : 0U) << fast.why_not();
      for (const FallbackCount& count : fallback_counts()) EXPECT_EQ(count.calls, 0U) << count.op;
    }
    return result;
  };
  EXPECT_EQ(train(true), train(false));
}

TEST_F(CapturedTraining, GraphsAreLeftOutWhileAnotherPrecisionHolds) {
  if (!has_graphs()) GTEST_SKIP() << "a device that doesn't count the launches of graphs";
  auto step = capture([](const Tensor& a) { return mm(a, a.t()) * 2; });
  // 1 + 2^-11 is 1 in TF32 by truncation or rounding to even; its square isn't 1 in float32.
  const Tensor a = full({8, 8}, 1, {.device = device}) * (1 + 0x1p-11);
  for (int i = 0; i < 4; ++i) step(a);
  const std::uint64_t before = launches();
  const auto exact = step(a).to_vector<float>();
  EXPECT_EQ(launches() - before, 1U) << step.why_not();
  set_float32_precision(Float32Precision::high);
  const auto want = (mm(a, a.t()) * 2).to_vector<float>();
  EXPECT_EQ(step(a).to_vector<float>(), want);
  EXPECT_TRUE(step.replayed());
  EXPECT_EQ(launches() - before, 1U) << "kernel by kernel";
  set_float32_precision(Float32Precision::highest);
  EXPECT_EQ(step(a).to_vector<float>(), exact);
  EXPECT_EQ(launches() - before, 2U);
}

TEST_F(CapturedTraining, WhatKernelsOfGraphsFindIsTold) {
  if (!has_graphs()) GTEST_SKIP() << "a device that doesn't count the launches of graphs";
  auto step = capture([](const Tensor& x, const Tensor& index) { return index_select(x * 2, 0, index) + 1; });
  const Tensor x = tensor({1, 2, 3}, {.device = device});
  const Tensor good = tensor({2, 0}, {.dtype = i64, .device = device}),
               bad = tensor({2, 3}, {.dtype = i64, .device = device});
  for (int i = 0; i < 5; ++i) EXPECT_EQ(step(x, good).to_vector<float>(), (std::vector<float>{7, 3}));
  const std::uint64_t before = launches();
  const std::string said = error_of([&] { step(x, bad).to_vector<float>(); });
  EXPECT_EQ(launches() - before, 1U);
  EXPECT_NE(said.find("index_select (in a captured step): failed on " + device.str() + ": index 3 lies outside"),
            std::string::npos)
      << said;
  EXPECT_EQ(step(x, good).to_vector<float>(), (std::vector<float>{7, 3}));
}

}  // namespace
}  // namespace halfstep::test
