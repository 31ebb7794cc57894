// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/engine.h"

#include <gtest/gtest.h>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;

Tensor leaf(const Values& values, const Shape& sizes, DType dtype = f64) {
  return tensor(values, sizes, {.dtype = dtype, .requires_grad = true});
}

TEST(Engine, GradientOfAProductSumsOverTheBroadcast) {
  const Tensor x = leaf({1, 2, 3, 4, 5, 6}, {2, 3}), w = leaf({2, 3, 5}, {3});
  sum(x * w).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{2, 3, 5, 2, 3, 5}));
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{5, 7, 9}));
}

TEST(Engine, GradientsAddUpOverCalls) {
  const Tensor x = leaf({3}, {});
  (x * x).backward();
  (x * x).backward();
  EXPECT_EQ(x.grad().item<double>(), 12);
}

TEST(Engine, SecondDerivative) {
  const Tensor x = leaf({3}, {});
  const Tensor y = x * x * x;
  const Tensor dy = grad({y}, {x}, {.create_graph = true})[0];
  EXPECT_EQ(dy.item<double>(), 27);
  const Tensor d2y = grad({dy}, {x}, {.create_graph = true})[0];
  EXPECT_EQ(d2y.item<double>(), 18);
  EXPECT_EQ(grad({d2y}, {x})[0].item<double>(), 6);
  EXPECT_FALSE(x.grad().defined());
}

TEST(Engine, ASecondRunNeedsRetainGraph) {
  const Tensor x = leaf({3}, {});
  const Tensor y = x * x;
  y.backward({}, {.retain_graph = true});
  y.backward();
  EXPECT_EQ(x.grad().item<double>(), 12);
  try {
    y.backward();
    FAIL();
  } catch (const AutogradError& e) {
    EXPECT_NE(std::string(e.what()).find("retain_graph"), std::string::npos) << e.what();
  }
}

TEST(Engine, UnusedInputIsNamed) {
  const Tensor x = leaf({3}, {}), z = leaf({1}, {});
  const Tensor y = x * x;
  try {
    grad({y}, {z}, {.retain_graph = true});
    FAIL();
  } catch (const AutogradError& e) {
    EXPECT_NE(std::string(e.what()).find("allow_unused"), std::string::npos) << e.what();
  }
  EXPECT_FALSE(grad({y}, {z}, {.allow_unused = true})[0].defined());
}

TEST(Engine, ChangedSavedTensorIsNamed) {
  const Tensor x = leaf({3}, {}), w = leaf({2}, {});
  Tensor a = x * 1;
  const Tensor y = a * w;
  a.add_(1);
  try {
    y.backward();
    FAIL();
  } catch (const AutogradError& e) {
    EXPECT_NE(std::string(e.what()).find("mul"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("input 0"), std::string::npos) << e.what();
  }
}

TEST(Engine, InPlaceOnAResult) {
  const Tensor x = leaf({3, 4}, {2});
  Tensor a = x * 2;
  a.add_(x).mul_(5);
  sum(a).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{15, 15}));
}

TEST(Engine, InPlaceOnALeafIsRefused) {
  Tensor x = leaf({3, 4}, {2});
  EXPECT_THROW(x.add_(1), AutogradError);
  EXPECT_THROW(x[0].add_(1), AutogradError);
  NoGrad no_grad;
  x.add_(1);
  EXPECT_EQ(x.to_vector<double>(), (Values{4, 5}));
}

TEST(Engine, InPlaceOnAViewReachesTheBase) {
  const Tensor x = leaf({3, 4}, {2}), y = leaf({10}, {});
  Tensor a = x * 2;
  const Tensor early = a[0];
  Tensor view = a[0];
  view.add_(y);
  EXPECT_EQ(a.to_vector<double>(), (Values{16, 8}));
  sum(a * a).backward({}, {.retain_graph = true});
  // d/dx0 (2 x0 + y)^2 = 4 (2 x0 + y), d/dx1 (2 x1)^2 = 8 x1, d/dy = 2 (2 x0 + y)
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{64, 32}));
  EXPECT_EQ(y.grad().item<double>(), 32);
  // A view from before the write sees it.
  y.set_grad({});
  early.backward();
  EXPECT_EQ(y.grad().item<double>(), 1);
}

TEST(Engine, WritingIntoFreshMemory) {
  const Tensor x = leaf({3, 4}, {2});
  Tensor out = zeros({2, 2}, {.dtype = f64});
  out[0].copy_(x * 2);
  out[1].copy_(x * x);
  sum(out).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{8, 10}));
}

TEST(Engine, HooksSeeAndReplaceGradients) {
  const Tensor x = leaf({3}, {});
  const Tensor y = x * 2;
  double seen = 0;
  y.retain_grad();
  y.register_hook([&](const Tensor& g) {
    seen = g.item<double>();
    return g * 10;
  });
  const auto id = x.register_hook([](const Tensor& g) { return g + 1; });
  int after = 0;
  x.register_post_accumulate_grad_hook([&](const Tensor& t) { after = static_cast<int>(t.grad().item<double>()); });
  (y * y).backward({}, {.retain_graph = true});
  EXPECT_EQ(seen, 12);
  EXPECT_EQ(y.grad().item<double>(), 120);
  EXPECT_EQ(x.grad().item<double>(), 241);
  EXPECT_EQ(after, 241);
  x.remove_hook(id);
  x.set_grad({});
  (x * 1).backward();
  EXPECT_EQ(x.grad().item<double>(), 1);
}

TEST(Engine, ALongChainNeedsNoDeepStack) {
  const Tensor x = leaf({1}, {});
  Tensor y = x;
  for (int i = 0; i < 200000; ++i) y = y + 1;
  y.backward();
  EXPECT_EQ(x.grad().item<double>(), 1);
}

TEST(Engine, ViewsAndTheirGradients) {
  const Tensor x = leaf({1, 2, 3, 4, 5, 6}, {2, 3});
  const Tensor y = x.transpose(0, 1).slice(0, 0, 3, 2).reshape({4});
  EXPECT_EQ(y.to_vector<double>(), (Values{1, 4, 3, 6}));
  sum(y * tensor(Values{1, 2, 3, 4}, {4}, {.dtype = f64})).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{1, 0, 3, 2, 0, 4}));
}

TEST(Engine, GradientsHaveTheInputsDtype) {
  const Tensor x = leaf({1, 2}, {2}, f16), w = leaf({3, 4}, {2}, f32);
  const Tensor y = x * w;
  EXPECT_EQ(y.dtype(), f32);
  sum(y).backward();
  EXPECT_EQ(x.grad().dtype(), f16);
  EXPECT_EQ(w.grad().dtype(), f32);
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{3, 4}));
}

TEST(Engine, UsesOfOneCastAddUpInFloat32) {
  const Tensor w = leaf({1}, {1}, f32);
  const Tensor low = w.to(bf16);
  // 256 + 1 needs nine bits: added up in bf16, the ones would be lost.
  Tensor y = low * tensor(Values{256}, {.dtype = bf16});
  for (int i = 0; i < 16; ++i) y = y + low * tensor(Values{1}, {.dtype = bf16});
  sum(y).backward();
  EXPECT_EQ(w.grad().item<double>(), 272);
}

}  // namespace
}  // namespace halfstep
