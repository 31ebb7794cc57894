// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/checkpoint.h"

#include <gtest/gtest.h>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/caching_allocator.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;

using Values = std::vector<double>;
using Tensors = std::vector<Tensor>;

Tensor random(const Shape& sizes, std::uint64_t seed, DType dtype = f32) {
  RandomStream stream(seed);
  Values values(static_cast<std::size_t>(sizes.numel()));
  for (double& v : values) v = stream.normal();
  return tensor(values, sizes, {.dtype = dtype, .requires_grad = true});
}

// A mask of zeros and twos from the default generator, as dropout's.
Tensor random_mask(const Shape& sizes) {
  const auto n = static_cast<std::uint64_t>(sizes.numel());
  const PhiloxState state = default_generator().reserve(philox_blocks(n));
  Values values;
  for (std::uint64_t i = 0; i < n; ++i) values.push_back(philox_word(state, i) & 1 ? 2 : 0);
  return tensor(values, sizes);
}

// Three layers, each saving a few tensors of x's size.
Tensor block(const Tensor& x, const Tensor& w) {
  Tensor h = x;
  for (int i = 0; i < 3; ++i) {
    h = mm(h, w) * 0.02;  // stays small over many layers
    h = h * h + h;
  }
  return h;
}

TEST(Checkpoint, SameBitsWithLessMemory) {
  const Tensor x = random({256, 64}, 1), w = random({64, 64}, 2);
  std::uint64_t before = memory_stats(default_device()).allocated;
  const Tensor plain = sum(block(x, w));
  const std::uint64_t kept = memory_stats(default_device()).allocated - before;
  plain.backward();
  const auto dx = x.grad().to_vector<float>(), dw = w.grad().to_vector<float>();
  x.set_grad({}), w.set_grad({});
  before = memory_stats(default_device()).allocated;
  const Tensor again = sum(checkpoint([&](const Tensor& in) { return block(in, w); }, x));
  const std::uint64_t kept_by_checkpoint = memory_stats(default_device()).allocated - before;
  // Each product's input and output, but for x itself: five tensors of 64 KiB, against none.
  EXPECT_GE(kept, 5u * 65536u);
  EXPECT_LT(kept_by_checkpoint, 65536u);
  EXPECT_EQ(again.item<float>(), plain.item<float>());
  again.backward();
  EXPECT_EQ(x.grad().to_vector<float>(), dx);
  EXPECT_EQ(w.grad().to_vector<float>(), dw);  // captured, not an input
}

TEST(Checkpoint, MemoryIsFreedWithTheGraph) {
  const Tensor x = random({256, 64}, 1), w = random({64, 64}, 2);
  const std::uint64_t before = memory_stats(default_device()).allocated;
  {
    const Tensor y = sum(checkpoint([&](const Tensor& in) { return block(in, w); }, x));
    y.backward({}, {.retain_graph = true});
    y.backward();
  }
  x.set_grad({}), w.set_grad({});
  EXPECT_EQ(memory_stats(default_device()).allocated, before);
  // Also when it never ran.
  {
    const Tensor y = sum(checkpoint([&](const Tensor& in) { return block(in, w); }, x));
  }
  EXPECT_EQ(memory_stats(default_device()).allocated, before);
}

TEST(Checkpoint, RandomNumbersAreThoseOfTheForwardPass) {
  const Tensor x = random({8, 8}, 1);
  const auto f = [](const Tensor& in) { return in * random_mask(in.sizes()) * in; };
  manual_seed(7);
  sum(f(x) + f(x)).backward();
  const auto expected = x.grad().to_vector<float>();
  const std::uint64_t offset = default_generator().offset();
  x.set_grad({});
  manual_seed(7);
  const Tensor y = sum(checkpoint(f, x) + checkpoint(f, x));
  EXPECT_EQ(default_generator().offset(), offset);
  y.backward();
  EXPECT_EQ(x.grad().to_vector<float>(), expected);
  EXPECT_EQ(default_generator().offset(), offset);
}

TEST(Checkpoint, SeesTheAutocastStateOfTheForwardPass) {
  const Tensor x = random({4, 4}, 1), w = random({4, 4}, 2);
  std::vector<DType> seen;
  const auto f = [&](const Tensor& in) {
    const Tensor y = mm(in, w);
    seen.push_back(y.dtype());
    return y * y;
  };
  AutocastState& state = thread_state().autocast;
  const AutocastState was = state;
  state.enabled = true, state.dtype = bf16;
  const Tensor plain = f(x), again = checkpoint(f, x);
  state = was;
  sum(plain).backward();
  const auto dx = x.grad().to_vector<float>(), dw = w.grad().to_vector<float>();
  x.set_grad({}), w.set_grad({});
  sum(again).backward();
  EXPECT_EQ(seen, (std::vector<DType>{bf16, bf16, bf16}));
  EXPECT_EQ(x.grad().to_vector<float>(), dx);
  EXPECT_EQ(w.grad().to_vector<float>(), dw);
}

TEST(Checkpoint, FirstAndSecondDerivatives) {
  const Tensor x = random({2, 3}, 1, f64), w = random({3, 3}, 2, f64);
  const auto f = [](const Tensors& in) {
    return checkpoint([](const Tensor& a, const Tensor& b) { return block(a, b); }, in[0], in[1]);
  };
  gradcheck(f, {x, w});
  gradgradcheck(f, {x, w});
}

TEST(Checkpoint, Nests) {
  const Tensor x = random({256, 64}, 1), w = random({64, 64}, 2);
  sum(block(block(block(x, w), w), w)).backward();
  const auto dx = x.grad().to_vector<float>(), dw = w.grad().to_vector<float>();
  x.set_grad({}), w.set_grad({});
  const auto inner = [&](const Tensor& in) { return block(in, w); };
  const std::uint64_t before = memory_stats(default_device()).allocated;
  const Tensor y =
      sum(checkpoint([&](const Tensor& in) { return checkpoint(inner, checkpoint(inner, checkpoint(inner, in))); }, x));
  // The inner checkpoints' inputs are not kept either.
  EXPECT_LT(memory_stats(default_device()).allocated - before, 65536u);
  y.backward();
  EXPECT_EQ(x.grad().to_vector<float>(), dx);
  EXPECT_EQ(w.grad().to_vector<float>(), dw);
  const Tensor a = random({2, 3}, 1, f64), b = random({3, 3}, 2, f64);
  const auto nested = [](const Tensors& in) {
    const Tensor v = in[1];
    const auto deep = [v](const Tensor& t) { return block(t, v); };
    return checkpoint([deep](const Tensor& t) { return checkpoint(deep, checkpoint(deep, t)); }, in[0]);
  };
  gradgradcheck(nested, {a, b});
}

TEST(Checkpoint, ChangedInputsAndParametersAreFound) {
  const Tensor w = random({4, 4}, 2);
  Tensor x = random({4, 4}, 1) * 1;
  const Tensor y = sum(checkpoint([&](const Tensor& in) { return block(in, w); }, x));
  {
    const NoGrad no_grad;
    x.add_(1);
  }
  const std::string text = error_of<Error>([&] { y.backward(); });
  EXPECT_NE(text.find("changed in place"), std::string::npos) << text;

  const Tensor z = sum(checkpoint([&](const Tensor& in) { return block(in, w); }, x));
  {
    const NoGrad no_grad;
    Tensor(w).add_(1);
  }
  EXPECT_NE(error_of<Error>([&] { z.backward(); }).find("changed in place"), std::string::npos);
}

TEST(Checkpoint, AFunctionThatDoesSomethingElseIsFound) {
  const Tensor x = random({4, 4}, 1);
  int calls = 0;
  const auto f = [&](const Tensor& in) { return calls++ ? in * in * in : in * in; };
  const Tensor y = sum(checkpoint(f, (x * 1)) * 1);
  EXPECT_EQ(calls, 1);
  y.backward();  // only saves its input, which was kept: no second run
  EXPECT_EQ(calls, 1);
  int others = 0;
  const auto g = [&](const Tensor& in) {
    const Tensor h = in * 2;
    return others++ ? h * h * h : h * h;
  };
  const Tensor z = sum(checkpoint(g, x));
  const std::string text = error_of<Error>([&] { z.backward(); });
  EXPECT_NE(text.find("did something else"), std::string::npos) << text;
}

TEST(Checkpoint, AFailingFunctionLeavesTheThreadAsItWas) {
  const Tensor x = random({4, 4}, 1);
  const auto f = [](const Tensor& in) { return mm(in, in * 2).view({3}); };
  EXPECT_THROW(checkpoint(f, x), ShapeError);
  const Tensor y = sum(x * x);
  y.backward();
  EXPECT_EQ(x.grad().to_vector<float>(), (x * 2).to_vector<float>());
}

TEST(Checkpoint, WithoutRecordingItIsACall) {
  const Tensor x = random({4, 4}, 1);
  const NoGrad no_grad;
  const Tensor y = checkpoint([](const Tensor& in) { return in * 2; }, x);
  EXPECT_FALSE(y.requires_grad());
}

TEST(Checkpoint, HooksAndInPlaceOperations) {
  const Tensor x = random({4, 4}, 1);
  int hooks = 0;
  const auto f = [&](const Tensor& in) {
    Tensor h = in * in;
    h.register_hook([&](const Tensor&) {
      ++hooks;
      return Tensor();
    });
    h.mul_(2);
    Tensor row = h[0];
    row.add_(in[1]);
    return h * h;
  };
  sum(f(x)).backward();
  const auto expected = x.grad().to_vector<float>();
  x.set_grad({});
  sum(checkpoint(f, x)).backward();
  EXPECT_EQ(x.grad().to_vector<float>(), expected);
  EXPECT_EQ(hooks, 2);
}

// The second run comes when no module's scope is open any more.
TEST(Checkpoint, WhatARegionSaysOfModulesHoldsInTheSecondRun) {
  const Tensor x = random({4, 4}, 1), w = random({4, 4}, 2);
  std::vector<DType> ran;
  std::vector<std::string> paths;
  Tensor y;
  {
    const amp::Autocast region{{.dtype = f16, .modules = {{.path = "net.head", .enabled = false}}}};
    const amp::ModuleScope net{"net"};
    y = checkpoint(
        [&](const Tensor& t) {
          const amp::ModuleScope head{"head"};
          const Tensor product = mm(t * 1, w);
          ran.push_back(product.dtype());
          paths.push_back(amp::module_path());
          return product * product;
        },
        x);
  }
  sum(y).backward();
  EXPECT_EQ(ran, (std::vector<DType>{f32, f32}));
  EXPECT_EQ(paths, (std::vector<std::string>{"net.head", "net.head"}));
  EXPECT_EQ(amp::module_path(), "");
}

}  // namespace
}  // namespace halfstep
