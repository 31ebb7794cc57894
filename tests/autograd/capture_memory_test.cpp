// SPDX-License-Identifier: Apache-2.0
// The memory of captured steps: places that are planned once, for all replays.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <vector>

#include "halfstep/autograd/engine.h"
#include "halfstep/capture/capture.h"
#include "halfstep/capture/placement_internal.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/caching_allocator.h"

namespace halfstep {
namespace {

using detail::find_places;
using detail::most_in_use;
using detail::Placement;

// ------------------------------------------------------------------------------------------------------------- places

void expect_apart(const std::vector<Placement>& all, std::size_t border, std::size_t end) {
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Placement& a = all[i];
    EXPECT_LE(a.offset + a.bytes, end);
    EXPECT_FALSE(a.offset < border && a.offset + a.bytes > border) << "it lies across the border";
    for (std::size_t k = 0; k < i; ++k) {
      const Placement& b = all[k];
      const bool at_once = a.first <= b.last && b.first <= a.last;
      const bool overlap = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
      ASSERT_FALSE(at_once && overlap) << i << " and " << k;
    }
  }
}

TEST(CapturePlaces, HaveNoByteInCommonAtATime) {
  RandomStream random(5);
  double worst = 1;
  for (int round = 0; round < 200; ++round) {
    std::vector<Placement> all;
    const std::size_t calls = 5 + random() % 100;
    for (std::size_t i = 0, n = random() % 120; i < n; ++i) {
      const std::size_t first = random() % calls, last = std::min(calls - 1, first + random() % 12);
      all.push_back({.bytes = 64 * (1 + random() % (random() % 4 == 0 ? 1000 : 20)), .first = first, .last = last});
    }
    // Some outlast the step, one above the other below a border.
    std::size_t border = 0;
    for (std::size_t i = 0, n = random() % 6; i < n; ++i) {
      const std::size_t bytes = 64 * (1 + random() % 200);
      all.push_back({.bytes = bytes, .first = random() % calls, .last = calls, .offset = border, .fixed = true});
      border += bytes;
    }
    const std::vector<Placement> before = all;
    const std::size_t end = find_places(all, border);
    expect_apart(all, border, end);
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(!all[i].fixed || all[i].offset == before[i].offset);
    }
    const std::size_t least = std::max(border, most_in_use(all));
    EXPECT_GE(end, least);
    if (border == 0 && least > 0) worst = std::max(worst, static_cast<double>(end) / static_cast<double>(least));
    std::vector<Placement> again = before;
    EXPECT_EQ(find_places(again, border), end);
    for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(again[i].offset, all[i].offset);
  }
  // Lifetimes by chance are harder than those of a network.
  EXPECT_LT(worst, 1.15);
}

// More than gaps are sought for: the smaller ones follow each other by size, and share no byte either.
TEST(CapturePlaces, OfVeryManyBlocksHaveNoByteInCommonEither) {
  RandomStream random(6);
  std::vector<Placement> all;
  constexpr std::size_t kBlocks = 30000, kCalls = 20000;
  for (std::size_t i = 0; i < kBlocks; ++i) {
    const std::size_t first = random() % kCalls, last = std::min(kCalls - 1, first + random() % 40);
    all.push_back({.bytes = 64 * (1 + random() % 12), .first = first, .last = last});
  }
  const std::size_t end = find_places(all);
  std::size_t sum = 0;
  std::vector<std::vector<std::size_t>> begins(kCalls), ends(kCalls);
  for (std::size_t i = 0; i < kBlocks; ++i) {
    begins[all[i].first].push_back(i);
    ends[all[i].last].push_back(i);
    sum += all[i].bytes;
    ASSERT_LE(all[i].offset + all[i].bytes, end);
  }
  std::map<std::size_t, std::size_t> used;  // ends by offsets
  for (std::size_t call = 0; call < kCalls; ++call) {
    for (const std::size_t i : begins[call]) {
      const auto [at, fresh] = used.emplace(all[i].offset, all[i].offset + all[i].bytes);
      ASSERT_TRUE(fresh) << i;
      ASSERT_TRUE(at == used.begin() || std::prev(at)->second <= at->first) << i;
      ASSERT_TRUE(std::next(at) == used.end() || at->second <= std::next(at)->first) << i;
    }
    for (const std::size_t i : ends[call]) used.erase(all[i].offset);
  }
  EXPECT_LT(end, sum / 20);
}

// Results that the forward pass leaves go in the opposite order, as a stack, beside others that are short-lived.
TEST(CapturePlaces, OfANetworkAreAsFewAsCanBe) {
  std::vector<Placement> all;
  constexpr std::size_t kLayers = 40;
  for (std::size_t i = 0; i < kLayers; ++i) {
    const std::size_t bytes = 64 * (1 + (i * 7) % 5) << (4 - i / 10);
    const std::size_t back = 2 * kLayers - 1 - i;
    all.push_back({.bytes = bytes, .first = i, .last = back});
    all.push_back({.bytes = bytes, .first = back, .last = back + 1});
  }
  const std::size_t end = find_places(all);
  expect_apart(all, 0, end);
  EXPECT_LE(static_cast<double>(end), 1.01 * static_cast<double>(most_in_use(all)));
}

TEST(CapturePlaces, OfNothingAndOfOne) {
  std::vector<Placement> all;
  EXPECT_EQ(find_places(all), 0u);
  EXPECT_EQ(most_in_use(all), 0u);
  all.push_back({.bytes = 100, .first = 3, .last = 3, .offset = 7});
  EXPECT_EQ(find_places(all), 100u);
  EXPECT_EQ(all[0].offset, 0u);
  // In front of the border it doesn't fit, behind it there is room.
  EXPECT_EQ(find_places(all, 99), 199u);
  EXPECT_EQ(all[0].offset, 99u);
}

// -------------------------------------------------------------------------------------------------------------- steps

// Layers of different widths on many samples: no result has the size of another, and all are larger than the weights.
struct Layers {
  std::vector<Tensor> weights;
  Layers() {
    std::int64_t in = 24;
    for (const std::int64_t out : {40, 32, 56, 48, 16, 20, 12}) {
      weights.push_back(mul(randn({in, out}), 0.2));
      weights.back().requires_grad_();
      in = out;
    }
  }
  void forget_gradients() const {
    for (const Tensor& w : weights) w.set_grad({});
  }
  Tensor loss(Tensor x) const {
    for (const Tensor& w : weights) x = tanh(mul(matmul(x, w), 0.5));
    return mean(square(x));
  }
  std::vector<std::vector<float>> gradients() const {
    std::vector<std::vector<float>> all;
    for (const Tensor& w : weights) all.push_back(w.grad().to_vector<float>());
    return all;
  }
};

CapturedStep training_step(const Layers& layers) {
  return CapturedStep([&layers](std::span<const Tensor> in) {
    layers.forget_gradients();
    const Tensor loss = layers.loss(in[0]);
    loss.backward();
    return CapturedStep::Result{.tensors = {loss.detach()}};
  });
}

// The most bytes in use from here on, without those in use now.
class Peak {
 public:
  Peak() : before_(memory_stats(default_device()).allocated) { reset_peak_memory(default_device()); }
  double bytes() const { return static_cast<double>(memory_stats(default_device()).allocated_peak - before_); }

 private:
  std::uint64_t before_;
};

TEST(CaptureMemory, ReplaysNeedNoMoreThanTheStep) {
  manual_seed(1);
  const Layers layers;
  const Tensor x = randn({8192, 24});
  const auto plain = [&] {
    layers.forget_gradients();
    layers.loss(x).backward();
  };
  plain();
  plain();
  double alone = 0;
  {
    layers.forget_gradients();
    const Peak peak;
    plain();
    alone = peak.bytes();
  }
  layers.forget_gradients();
  const Peak peak;
  CapturedStep step = training_step(layers);
  for (int i = 0; i < 5; ++i) step({&x, 1});
  ASSERT_TRUE(step.replayed()) << step.why_not();
  // Beside its own: scratch of 1 MiB, and the result; and the place from which a device's graphs read the input.
  const double input = default_device().is_cpu() ? 0 : static_cast<double>(x.numel()) * sizeof(float);
  EXPECT_LT(peak.bytes(), 1.03 * alone + (1 << 20) + input);
}

TEST(CaptureMemory, GradientsLieWhereTheForwardPassWasAndHaveTheSameBits) {
  manual_seed(2);
  const Layers layers;
  CapturedStep step = training_step(layers);
  std::vector<Tensor> losses;
  std::vector<std::vector<float>> values;
  for (int i = 0; i < 6; ++i) {
    // Of two sizes, which are recorded by themselves and share no memory but that of gradients between calls.
    const Tensor x = randn({i % 2 == 0 ? 4096 : 1000, 24});
    losses.push_back(step({&x, 1}).tensors[0]);
    const auto got = layers.gradients();
    values.push_back(losses.back().to_vector<float>());
    layers.forget_gradients();
    const Tensor loss = layers.loss(x);
    loss.backward();
    EXPECT_EQ(layers.gradients(), got) << i;
    EXPECT_EQ(loss.to_vector<float>(), values.back()) << i;
  }
  EXPECT_EQ(step.stats().replayed, 2u);
  // Results are copies, which later replays leave alone.
  for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_EQ(losses[i].to_vector<float>(), values[i]);
}

// In a replay temporaries use the memory of the gradient, which the step reads after them.
TEST(CaptureMemory, AGradientThatIsGivenToTheStepIsReadAsItWas) {
  manual_seed(4);
  const Tensor x = randn({64, 512}), small = randn({256, 512});
  Tensor w = mul(randn({512, 512}), 0.05);
  w.requires_grad_();
  mean(square(matmul(x, w))).backward();
  CapturedStep step([&](std::span<const Tensor> in) {
    w.set_grad({});
    std::vector<Tensor> parts;
    for (int i = 0; i < 8; ++i) parts.push_back(mul(small, i));
    Tensor total = sum(parts[0]);
    for (const Tensor& part : parts) total = add(total, sum(part));
    parts.clear();
    const Tensor before = sum(square(in[1]));
    mean(square(matmul(in[0], w))).backward();
    return CapturedStep::Result{.tensors = {before, total}};
  });
  for (int i = 0; i < 6; ++i) {
    const Tensor gradient = w.grad();
    double expected = 0;
    for (const double v : gradient.to_vector<double>()) expected += v * v;
    const Tensor inputs[] = {x, gradient};
    const Tensor got = step(inputs).tensors[0];
    // 512 * 512 squares, each rounded, and their sum, of blocks of at most 4096.
    EXPECT_NEAR(got.item<float>(), expected, expected * 4096 * 0x1p-24) << i;
  }
  EXPECT_GE(step.stats().replayed, 3u) << step.why_not();
}

TEST(CaptureMemory, GradientsThatAreKeptAreThoseOfTheLastReplay) {
  manual_seed(3);
  const Layers layers;
  CapturedStep step = training_step(layers);
  const Tensor x = randn({4096, 24}), y = randn({4096, 24});
  for (int i = 0; i < 3; ++i) step({&x, 1});
  ASSERT_TRUE(step.replayed()) << step.why_not();
  const Tensor kept = layers.weights[0].grad(), view = kept.narrow(0, 3, 2);
  step({&y, 1});
  EXPECT_TRUE(layers.weights[0].grad().is_same(kept));
  layers.forget_gradients();
  layers.loss(y).backward();
  EXPECT_EQ(kept.to_vector<float>(), layers.weights[0].grad().to_vector<float>());
  EXPECT_EQ(view.to_vector<float>(), layers.weights[0].grad().narrow(0, 3, 2).to_vector<float>());
}

TEST(CaptureMemory, WhatGradientsHaveIsAllThatStaysOfAReleasedStep) {
  manual_seed(4);
  const Layers layers;
  const Tensor x = randn({8192, 24});
  const Device device = default_device();
  const std::uint64_t before = memory_stats(device).allocated;
  std::vector<std::vector<float>> expected;
  std::uint64_t weights = 0;
  for (const Tensor& w : layers.weights) weights += static_cast<std::uint64_t>(w.numel()) * w.item_size();
  {
    CapturedStep step = training_step(layers);
    for (int i = 0; i < 3; ++i) step({&x, 1});
    ASSERT_TRUE(step.replayed()) << step.why_not();
    expected = layers.gradients();
    // A device that lacks kernels leaves results of the CPU's on the host.
    if (device.is_cpu()) {
      EXPECT_GT(memory_stats(device).allocated, before + (4 << 20));
    }
    step.release();
    EXPECT_LT(memory_stats(device).allocated, before + 3 * weights + (64 << 10));
    EXPECT_EQ(layers.gradients(), expected);
    for (int i = 0; i < 3; ++i) step({&x, 1});
    EXPECT_TRUE(step.replayed());
    EXPECT_EQ(layers.gradients(), expected);
  }
  EXPECT_EQ(layers.gradients(), expected);
  layers.forget_gradients();
  EXPECT_EQ(memory_stats(device).allocated, before);
}

// Gradients that one captured step makes and another adds to.
TEST(CaptureMemory, GradientsAreAddedToAcrossSteps) {
  manual_seed(5);
  const Layers layers;
  CapturedStep first = training_step(layers);
  CapturedStep next([&](std::span<const Tensor> in) {
    layers.loss(in[0]).backward();
    return CapturedStep::Result{};
  });
  for (int i = 0; i < 6; ++i) {
    const Tensor x = randn({4096, 24}), y = randn({2048, 24});
    first({&x, 1});
    next({&y, 1});
    const auto got = layers.gradients();
    layers.forget_gradients();
    layers.loss(x).backward();
    layers.loss(y).backward();
    EXPECT_EQ(layers.gradients(), got) << i;
    layers.forget_gradients();
  }
  EXPECT_TRUE(first.replayed()) << first.why_not();
}

}  // namespace
}  // namespace halfstep
