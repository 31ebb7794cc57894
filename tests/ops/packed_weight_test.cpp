// SPDX-License-Identifier: Apache-2.0
// Weights that a convolution keeps in the order its kernel wants: used again while nothing writes to them, never after.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/float32_precision.h"

namespace halfstep {
namespace {

class PackedWeight : public testing::Test {
 protected:
  void SetUp() override {
    if (!default_device().is_cpu()) GTEST_SKIP() << "only the CPU's kernels keep weights";
  }
};

std::vector<double> run(const Tensor& input, const Tensor& weight) {
  const NoGrad no_grad;
  return conv2d(input, weight, {}, {.padding = {1}}).to_vector<double>();
}

struct Layer {
  Tensor input, weight;
  // The weight's values are computed, so that nobody has had its address.
  explicit Layer(DType dtype = f32) {
    manual_seed(3);
    input = randn({2, 32, 6, 6}, {.dtype = dtype}).contiguous(MemoryFormat::channels_last);
    weight = randn({32, 32, 3, 3}, {.dtype = dtype}) + 0.5;
  }
  // Calls until the weight is kept: the first asks, the second keeps, the third uses what was kept.
  std::vector<double> warm() const {
    std::vector<double> y;
    for (int i = 0; i < 3; ++i) y = run(input, weight);
    return y;
  }
  // What the weight as it is now gives, by a copy of it.
  std::vector<double> expected() const { return run(input, weight.clone()); }
};

// Bytes that a call leaves behind.
std::uint64_t kept_by_call(const Layer& layer) {
  const std::uint64_t before = memory_stats().allocated;
  (void)run(layer.input, layer.weight);
  return memory_stats().allocated - before;
}

TEST_F(PackedWeight, IsKeptWhenAskedForAgainAndGoesWithTheWeight) {
  const std::uint64_t before = memory_stats().allocated;
  {
    const Layer layer;
    EXPECT_EQ(kept_by_call(layer), 0u) << "it may never be asked for again";
    const std::uint64_t kept = kept_by_call(layer);
    if (kept == 0) GTEST_SKIP() << "this processor's kernels take weights as they are";
    EXPECT_GE(kept, std::uint64_t{32 * 32 * 9 * 4});
    EXPECT_EQ(kept_by_call(layer), 0u) << "once is enough";
    EXPECT_EQ(layer.warm(), layer.expected());
  }
  EXPECT_EQ(memory_stats().allocated, before);
}

// Input gradients pack the taps that a stride and a padding make them see.
TEST_F(PackedWeight, OfInputGradientsFollowsStrideAndPadding) {
  for (const DType dtype : {f32, f16, bf16}) {
    for (const bool channels_last : {true, false}) {
      manual_seed(5);
      const Tensor input = randn({2, 32, 6, 6}, {.dtype = dtype}).contiguous(MemoryFormat::channels_last);
      Tensor weight = randn({32, 32, 4, 4}, {.dtype = dtype}) + 0.5;
      if (channels_last) weight = weight.contiguous(MemoryFormat::channels_last);
      for (const std::int64_t stride : {2, 1, 3}) {
        for (const std::int64_t padding : {1, 0, 2}) {
          const NoGrad no_grad;
          const auto solve = [&](const Tensor& w) {
            return conv_transpose2d(input, w, {}, {.stride = {stride}, .padding = {padding}}).to_vector<double>();
          };
          const auto expected = solve(weight.clone());
          for (int i = 0; i < 3; ++i) {
            EXPECT_EQ(solve(weight), expected) << name(dtype) << " stride " << stride << " padding " << padding;
          }
        }
      }
    }
  }
}

// On AMX the precision of float32 decides into how many parts a weight is split.
TEST_F(PackedWeight, FollowsTheFloat32Precision) {
  const Layer layer;
  for (const Float32Precision precision : {Float32Precision::highest, Float32Precision::high}) {
    set_float32_precision(precision);
    const std::vector<double> got = layer.warm();
    EXPECT_EQ(got, layer.expected()) << name(precision);
    set_float32_precision(Float32Precision::highest);
    EXPECT_EQ(layer.warm(), layer.expected());
  }
}

TEST_F(PackedWeight, IsNotKeptInTraining) {
  Layer layer;
  layer.weight.requires_grad_();
  optim::SGD sgd({{"weight", layer.weight}}, {.lr = 0.1});
  std::uint64_t after_first = 0;
  for (int step = 0; step < 4; ++step) {
    sgd.zero_grad();
    conv2d(layer.input, layer.weight, {}, {.padding = {1}}).backward(ones({2, 32, 6, 6}));
    sgd.step();
    if (step == 0) after_first = memory_stats().allocated;
    EXPECT_EQ(memory_stats().allocated, after_first);
  }
}

TEST_F(PackedWeight, FollowsEveryKindOfWrite) {
  for (const DType dtype : {f32, bf16, f16}) {
    SCOPED_TRACE(name(dtype));
    Layer layer(dtype);
    const auto changed = [&](const char* what) {
      SCOPED_TRACE(what);
      const auto now = run(layer.input, layer.weight);
      EXPECT_EQ(now, layer.expected());
      (void)layer.warm();
    };
    const auto before = layer.warm();
    const NoGrad no_grad;
    layer.weight.mul_(-1);
    changed("in place");
    EXPECT_NE(run(layer.input, layer.weight), before);
    layer.weight.copy_(randn(layer.weight.sizes(), {.dtype = dtype}));
    changed("a copy");
    select(layer.weight, 0, 3).fill_(2);
    changed("through a view");
    layer.weight.zero_();
    changed("zeros");
    const Tensor source = randn(layer.weight.sizes(), {.dtype = dtype});
    Tensor target = layer.weight;
    copy_unrecorded(target, source);
    changed("unrecorded");
    {
      // From here on it may be written to without a word.
      void* const address = layer.weight.raw_data();
      changed("address given");
      std::memset(address, 0, 64);
      changed("through the address");
      std::memset(address, 0, 256);
      changed("through the address, later");
    }
  }
}

TEST_F(PackedWeight, FollowsAnOptimizer) {
  Layer layer;
  const auto before = layer.warm();
  layer.weight.requires_grad_();
  optim::SGD sgd({{"weight", layer.weight}}, {.lr = 0.1});
  conv2d(layer.input, layer.weight, {}, {.padding = {1}}).backward(ones({2, 32, 6, 6}));
  sgd.step();
  const auto after = run(layer.input, layer.weight.detach());
  EXPECT_NE(after, before);
  EXPECT_EQ(after, run(layer.input, layer.weight.detach().clone()));
}

// One memory, two weights: what was made of one is not used for the other.
TEST_F(PackedWeight, BelongsToAPartOfTheMemory) {
  manual_seed(5);
  const Tensor input = randn({2, 16, 6, 6}).contiguous(MemoryFormat::channels_last);
  const Tensor both = randn({2, 16, 16, 3, 3}) + 0.5;
  const Tensor a = select(both, 0, 0), b = select(both, 0, 1), turned = a.transpose(0, 1);
  std::vector<std::vector<double>> y;
  for (int i = 0; i < 4; ++i) {
    for (const Tensor& w : {a, b, turned}) {
      y.push_back(run(input, w));
      EXPECT_EQ(y.back(), run(input, w.clone()));
    }
  }
  EXPECT_NE(y[0], y[1]);
  EXPECT_NE(y[0], y[2]);
}

TEST_F(PackedWeight, IsSharedByThreads) {
  const Layer layer;
  const auto expected = layer.expected();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) wrong += run(layer.input, layer.weight) != expected;
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong.load(), 0);
}

}  // namespace
}  // namespace halfstep
