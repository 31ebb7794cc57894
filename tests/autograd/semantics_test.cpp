// SPDX-License-Identifier: Apache-2.0
// What goes wrong easily: shared gradients, in-place writes and views, cycles, exceptions in the middle.
#include <gtest/gtest.h>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/caching_allocator.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;
using Tensors = std::vector<Tensor>;

Tensor leaf(const Values& values, const Shape& sizes, DType dtype = f64) {
  return tensor(values, sizes, {.dtype = dtype, .requires_grad = true});
}

TEST(Gradients, AreNeverTheCallersTensor) {
  const Tensor x = leaf({1, 2}, {2}), z = leaf({3, 4}, {2});
  const Tensor y = x + z, g = tensor({1, 1}, {2}, {.dtype = f64});
  y.backward(g, {.retain_graph = true});
  y.backward(g);
  EXPECT_EQ(g.to_vector<double>(), (Values{1, 1}));
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{2, 2}));
  EXPECT_EQ(z.grad().to_vector<double>(), (Values{2, 2}));
}

TEST(Gradients, OfTwoLeavesAreTwoTensors) {
  for (const bool create_graph : {false, true}) {
    const Tensor x = leaf({1, 2}, {2}), z = leaf({3, 4}, {2});
    sum(x + z).backward({}, {.create_graph = create_graph});
    const NoGrad no_grad;
    x.grad().mul_(10);
    EXPECT_EQ(z.grad().to_vector<double>(), (Values{1, 1}));
  }
}

TEST(Gradients, AHooksTensorStaysTheHooks) {
  const Tensor x = leaf({1, 2}, {2}), mine = tensor({5, 6}, {2}, {.dtype = f64});
  x.register_hook([&](const Tensor&) { return mine; });
  sum(x * 2).backward();
  sum(x * 2).backward();
  EXPECT_EQ(mine.to_vector<double>(), (Values{5, 6}));
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{10, 12}));
}

TEST(InPlace, AnInputThatIsAViewOfTheDestinationIsNotReadAfterTheWrite) {
  const Tensor x = leaf({2, 3}, {2});
  Tensor a = x * 1;
  a.mul_(a[0]);  // the gradient needs a[0] as it was
  EXPECT_EQ(a.to_vector<double>(), (Values{4, 6}));
  EXPECT_THROW(sum(a).backward(), AutogradError);
  Tensor b = x * 1;
  b.mul_(b.detach()[0]);
  EXPECT_THROW(sum(b).backward(), AutogradError);
}

TEST(InPlace, AnExpandedTensorCanNotBeWrittenTo) {
  Tensor a = ones({1}).expand({3});
  EXPECT_THROW(a.add_(1), Error);
}

TEST(InPlace, GradientsOfWritesToViews) {
  const auto f = [](const Tensors& in) {
    Tensor a = in[0] * 2;
    Tensor column = a.transpose(0, 1)[1];
    column.mul_(in[1]);
    Tensor part = a.slice(1, 0, 3, 2);
    part.add_(in[1].slice(0, 0, 1));
    return a * a;
  };
  const Tensor x = leaf({1, 2, 3, 4, 5, 6}, {2, 3}), w = leaf({7, -2}, {2});
  // column.mul_ needs the column's old values for w: it must say so, not go wrong.
  EXPECT_THROW(sum(f({x, w})).backward(), AutogradError);
  const auto g = [](const Tensors& in) {
    Tensor a = in[0] * 2;
    Tensor column = a.transpose(0, 1)[1];
    column.add_(in[1] * in[1]);
    Tensor part = a.slice(1, 0, 3, 2);
    part.copy_(in[0].slice(1, 0, 2) * in[0].slice(1, 1, 3));
    const Tensor late = a.reshape({6});
    return Tensors{a * a, late * 3, column * column};
  };
  gradcheck(g, {x, w});
  gradgradcheck(g, {x, w});
}

TEST(InPlace, AViewFromBeforeTheWriteInGrad) {
  const Tensor x = leaf({3, 4}, {2}), y = leaf({10}, {}), other = leaf({1}, {});
  Tensor a = x * 2;
  const Tensor early = a[0];
  a.mul_(3);
  a[0].add_(y);
  const Tensor z = early * early + other;
  const auto g = grad({z}, {x, y});
  // early = 6 x0 + y = 28
  EXPECT_EQ(g[0].to_vector<double>(), (Values{12 * 28, 0}));
  EXPECT_EQ(g[1].item<double>(), 56);
}

// The view had no history when it was made; its base has got one since.
TEST(InPlace, AViewFromBeforeItsBaseWasWrittenIsRecorded) {
  const Tensor w = leaf({3, 4, 5, 6}, {2, 2});
  Tensor base = ones({2, 2}, {.dtype = f64});
  const Tensor row = base[0];
  base.copy_(w * 2);
  const Tensor y = row * 5;
  EXPECT_TRUE(y.requires_grad());
  sum(y).backward();
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{10, 10, 0, 0}));
}

TEST(InPlace, ViewsMadeInNoGradAreConstants) {
  const Tensor x = leaf({3, 4}, {2}), w = leaf({1, 1}, {2});
  Tensor a = x * 2;
  a.add_(1);
  const Tensor constant = [&] {
    const NoGrad no_grad;
    return a.view({2});
  }();
  EXPECT_FALSE(constant.requires_grad());
  sum(constant * w).backward();
  EXPECT_FALSE(x.grad().defined());
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{7, 9}));
}

TEST(InPlace, ChangingASavedWeightIsFoundOnEveryPath) {
  const Tensor x = leaf({3, 4}, {2}), w = leaf({1, 1}, {2});
  const Tensor y = sum(x * w);
  {
    const NoGrad no_grad;
    w[1].fill_(5);
  }
  EXPECT_THROW(y.backward(), AutogradError);
}

// Whether what `make` builds is freed when it goes.
template <class F>
void expect_freed(F make) {
  const std::uint64_t before = memory_stats().allocated;
  make();
  EXPECT_EQ(memory_stats().allocated, before);
}

TEST(Cycles, GraphsAreFreed) {
  const Tensor x = leaf(Values(4096, 1), {4096}), w = leaf(Values(4096, 2), {4096});
  expect_freed([&] { (void)sum(x * w * x); });
  expect_freed([&] {
    Tensor a = x * 2;
    a.mul_(w);
  });
  expect_freed([&] {
    Tensor a = x * 2;
    Tensor v = a.slice(0, 0, 100);
    v.mul_(w.slice(0, 0, 100));
  });
  expect_freed([&] {
    Tensor a = x * 2;
    a.register_hook([](const Tensor& g) { return g; });
    a.retain_grad();
    sum(a * a).backward();
    x.set_grad({});
  });
  expect_freed([&] {
    const auto g = grad({sum(x * x * w)}, {x}, {.create_graph = true});
    sum(g[0] * g[0]).backward();
    x.set_grad({}), w.set_grad({});
  });
}

TEST(Exceptions, InAHookLeaveEverythingUsable) {
  const Tensor x = leaf({1, 2}, {2});
  const std::uint64_t before = memory_stats().allocated;
  {
    const Tensor a = x * 2, y = sum(a * a);
    const auto id = a.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("mine"); });
    EXPECT_THROW(y.backward({}, {.retain_graph = true}), std::runtime_error);
    EXPECT_TRUE(GradMode::is_enabled());
    EXPECT_FALSE(x.grad().defined());
    a.remove_hook(id);
    y.backward();
    EXPECT_EQ(x.grad().to_vector<double>(), (Values{8, 16}));
  }
  x.set_grad({});
  EXPECT_EQ(memory_stats().allocated, before);
}

TEST(Exceptions, HooksMayRunBackwardThemselves) {
  const Tensor x = leaf({3}, {}), z = leaf({2}, {});
  const Tensor a = x * x;
  a.register_hook([&](const Tensor&) {
    const EnableGrad on;
    (z * z).backward();
    return Tensor();
  });
  a.backward();
  EXPECT_EQ(x.grad().item<double>(), 6);
  EXPECT_EQ(z.grad().item<double>(), 4);
}

TEST(Grad, DiamondsDuplicatesAndTheOutputItself) {
  const Tensor x = leaf({3}, {});
  const Tensor a = x * 2, b = a * a, c = a + b;
  const auto g = grad({c, b}, {x, a, x, c}, {.grad_outputs = {ones({}, {.dtype = f64}), ones({}, {.dtype = f64})}});
  // dc/da = 1 + 2a = 13, db/da = 12
  EXPECT_EQ(g[0].item<double>(), 50);
  EXPECT_EQ(g[1].item<double>(), 25);
  EXPECT_EQ(g[2].item<double>(), 50);
  EXPECT_EQ(g[3].item<double>(), 1);
  EXPECT_FALSE(x.grad().defined());
}

}  // namespace
}  // namespace halfstep
