// SPDX-License-Identifier: Apache-2.0
// The rules of docs/guide/pytorch.md, "Mixed precision, rule by rule", that no other test holds. What is expected is
// what PyTorch 2 does, or the deviation that the page states.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/cast_cache.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/capture.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/clip.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/log.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;

using amp::GradScaler;
using amp::ScalerError;
using Values = std::vector<double>;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Tensor parameter(const Values& values) {
  return tensor(values, {static_cast<std::int64_t>(values.size())}, {.requires_grad = true});
}
void set_grad(const Tensor& p, const Values& values) { p.set_grad(tensor(values, p.sizes())); }

/// The kind of misuse that `f` is, or nothing.
template <class F>
std::optional<ScalerError::Kind> misuse(F&& f) {
  try {
    f();
  } catch (const ScalerError& e) {
    return e.kind();
  }
  return std::nullopt;
}
using enum ScalerError::Kind;

// ---------------------------------------------------------------------------------------------------------- autocast

TEST(PyTorchRules, GradientsOfWeightsAreFloat32WhereverBackwardRuns) {
  const Tensor w = (full({4, 4}, 1) + 0).requires_grad_(), x = ones({2, 4});
  for (const bool inside : {false, true}) {
    w.set_grad({});
    Tensor loss;
    {
      const amp::Autocast region;
      loss = sum(mm(x, w));
      if (inside) loss.backward();
    }
    if (!inside) loss.backward();
    EXPECT_EQ(w.grad().dtype(), f32);
    EXPECT_EQ(w.grad().to_vector<double>(), Values(16, 2));
  }
}

// PyTorch casts a buffer and a view anew at each use: 3 uses, 3 casts; a parameter once.
TEST(PyTorchRules, OnlyParametersAreCached) {
  const Tensor w = (full({4, 4}, 1) + 0).requires_grad_(), buffer = full({4, 4}, 1) + 0;
  const Tensor x = ones({2, 4}, {.dtype = f16});
  const amp::Autocast region;
  const auto casts = [&](const auto& weight) {
    amp::cast_stats() = {};
    for (int i = 0; i < 3; ++i) mm(x, weight());
    return amp::cast_stats().casts;
  };
  EXPECT_EQ(casts([&] { return w; }), 1u);
  EXPECT_EQ(casts([&] { return buffer; }), 3u);
  EXPECT_EQ(casts([&] { return w.t(); }), 3u);
}

TEST(PyTorchRules, ARegionOfOneKindOfDeviceLeavesTheOthers) {
  const Tensor x = ones({2, 2}, {.device = Device{}});
  const amp::Autocast region{{.dtype = f16, .device = Device("sim:0")}};
  EXPECT_EQ(mm(x, x).dtype(), f32);
  const amp::Autocast inner{{.dtype = bf16, .device = Device{}}};
  EXPECT_EQ(mm(x, x).dtype(), bf16);
}

TEST(PyTorchRules, AskedForDtypesAreRespected) {
  const Tensor x = ones({2, 2});
  const amp::Autocast region;
  EXPECT_EQ(sum(mm(x, x), {}, {.dtype = f64}).dtype(), f64);
  EXPECT_EQ(sum(mm(x, x)).dtype(), f32);
}

// -------------------------------------------------------------------------------------------------------- the scaler

TEST(PyTorchRules, FactorsOfADisabledScalerAreNotLookedAt) {
  GradScaler scaler{{.init_scale = 0, .growth_factor = 1, .backoff_factor = 3, .growth_interval = 0, .enabled = false}};
  EXPECT_FALSE(scaler.is_enabled());
  scaler.set_growth_factor(0.5);
  scaler.set_backoff_factor(2);
  scaler.set_growth_interval(-1);
  EXPECT_EQ(scaler.options().growth_factor, 0.5);
  EXPECT_EQ(scaler.options().backoff_factor, 2);
  EXPECT_EQ(scaler.options().growth_interval, -1);
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_TRUE(scaler.state_dict().empty());
  const Tensor p = parameter({1});
  optim::SGD optimizer({{"p", p}}, {.lr = 1});
  scaler.scale(sum(p)).backward();
  scaler.unscale_(optimizer);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_TRUE(scaler.step(optimizer).ran());
  scaler.update();
  scaler.update();
  EXPECT_EQ(p.item<double>(), -1);
}

// PyTorch's unscale_ says nothing, and step() asserts that inf checks were recorded.
TEST(PyTorchRules, UnscalingWithoutGradientsWaitsForTheStep) {
  const Tensor p = parameter({1, 2});
  optim::SGD optimizer({{"p", p}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 4}};
  scaler.scale(zeros({}));
  EXPECT_FALSE(scaler.unscale_(optimizer).defined());
  EXPECT_EQ(scaler.unscale_(optimizer, {.norm = true}).item<double>(), 0) << "of no gradients, as clip_grad_norm_'s";
  EXPECT_EQ(misuse([&] { scaler.step(optimizer); }), no_gradients);
  EXPECT_EQ(misuse([&] { scaler.update(); }), nothing_to_update);
  // Nothing was unscaled, so gradients that come now are, and once. (PyTorch refuses them until an update.)
  set_grad(p, {4, 8});
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_EQ(p.to_vector<double>(), (Values{0, 0}));
  scaler.update();
}

TEST(PyTorchRules, AnOptimizerWithoutGradientsBesideOneThatHasThem) {
  const Tensor p = parameter({1}), q = parameter({1});
  optim::SGD used({{"p", p}}, {.lr = 1}), idle({{"q", q}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 4, .growth_interval = 1}};
  scaler.scale(zeros({}));
  set_grad(p, {4});
  scaler.unscale_(idle);
  scaler.step(used);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_EQ(p.item<double>(), 0);
  EXPECT_EQ(q.item<double>(), 1);
}

TEST(PyTorchRules, ParametersWithoutGradientsAreLeft) {
  const Tensor p = parameter({1}), q = parameter({1});
  optim::SGD optimizer({{"p", p}, {"q", q}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 4}};
  scaler.scale(zeros({}));
  set_grad(q, {4});
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_EQ(p.item<double>(), 1);
  EXPECT_EQ(q.item<double>(), 0);
}

// PyTorch's test_grads_invalidated_between_unscale_and_step.
TEST(PyTorchRules, WhatBecomesOfGradientsAfterUnscalingIsNotLookedAt) {
  const Tensor p = parameter({1, 1});
  optim::SGD optimizer({{"p", p}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 4}};
  scaler.scale(zeros({}));
  set_grad(p, {4, 4});
  scaler.unscale_(optimizer);
  p.grad().fill_(kInf);
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_EQ(p.to_vector<double>(), (Values{-kInf, -kInf}));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4) << "no overflow was found";
}

// [8, inf, 4] / 4: the finite ones are unscaled too, the others stay.
TEST(PyTorchRules, InfinitiesStayAndTheOthersAreUnscaled) {
  const Tensor p = parameter({1, 1, 1});
  optim::SGD optimizer({{"p", p}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 4}};
  scaler.scale(zeros({}));
  set_grad(p, {8, kInf, 4});
  scaler.unscale_(optimizer);
  EXPECT_EQ(p.grad().to_vector<double>(), (Values{2, kInf, 1}));
  EXPECT_FALSE(scaler.step(optimizer).ran());
  EXPECT_EQ(p.to_vector<double>(), (Values{1, 1, 1}));
}

TEST(PyTorchRules, MisuseHasKindsThatOneCanTestFor) {
  const Tensor p = parameter({1});
  optim::SGD optimizer({{"p", p}}, {.lr = 1}), other({{"p", p}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 4}};
  set_grad(p, {4});
  EXPECT_EQ(misuse([&] { scaler.unscale_(optimizer); }), not_started);
  EXPECT_EQ(misuse([&] { scaler.step(optimizer); }), not_started);
  EXPECT_EQ(misuse([&] { scaler.update(); }), not_started);
  scaler.scale(zeros({}));
  EXPECT_EQ(misuse([&] { scaler.update(); }), nothing_to_update);
  scaler.unscale_(optimizer);
  EXPECT_EQ(misuse([&] { scaler.unscale_(optimizer); }), called_twice);
  EXPECT_EQ(misuse([&] { scaler.unscale_(other); }), shared_gradient);
  scaler.step(optimizer);
  EXPECT_EQ(misuse([&] { scaler.step(optimizer); }), called_twice);
  EXPECT_EQ(misuse([&] { scaler.unscale_(optimizer); }), called_after_step);
  EXPECT_EQ(misuse([&] { scaler.step(optimizer, [&] { return sum(p); }); }), called_twice);
  scaler.update();
  EXPECT_EQ(misuse([&] { scaler.load_state_dict({}); }), bad_state);
  EXPECT_EQ(misuse([&] { scaler.load_state_dict({{"scale", 2}}); }), bad_state);
  EXPECT_EQ(misuse([&] { scaler.step(optimizer); }), std::nullopt);
  // They are errors of mixed precision as the others are.
  EXPECT_THROW(scaler.step(optimizer), AmpError);
}

TEST(PyTorchRules, OverflowsBeyondAPolicysLimitsAreAKindOfTheirOwn) {
  const Tensor p = parameter({1});
  optim::SGD optimizer({{"fc.weight", p}}, {.lr = 1});
  GradScaler scaler{amp::LossScalePolicy({.init_scale = 8, .overflow_limit = 1})};
  scaler.scale(zeros({}));
  const auto overflow = [&] {
    set_grad(p, {kInf});
    scaler.step(optimizer);
    scaler.update();
    (void)scaler.get_scale();
  };
  overflow();
  const std::string text = error_of<amp::OverflowError>(overflow);
  EXPECT_NE(text.find("fc.weight"), std::string::npos) << text;
}

// PyTorch's own keys, so that a state goes either way; files of earlier versions had `growth_tracker`.
TEST(PyTorchRules, TheStateHasPyTorchsKeys) {
  GradScaler scaler{{.init_scale = 32, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 7}};
  const std::map<std::string, double> state{
      {"scale", 32}, {"growth_factor", 4}, {"backoff_factor", 0.25}, {"growth_interval", 7}, {"_growth_tracker", 0}};
  EXPECT_EQ(scaler.state_dict(), state);
  for (const char* key : {"_growth_tracker", "growth_tracker"}) {
    std::map<std::string, double> given{
        {"scale", 2}, {"growth_factor", 3}, {"backoff_factor", 0.125}, {"growth_interval", 9}, {key, 5}};
    GradScaler fresh;
    fresh.load_state_dict(given);
    EXPECT_EQ(fresh.growth_tracker(), 5) << key;
    EXPECT_EQ(fresh.state_dict().at("_growth_tracker"), 5);
    EXPECT_FALSE(fresh.state_dict().contains("growth_tracker"));
  }
}

// PyTorch's falls to 0 after 165 overflows, where every gradient is 0 / 0 and no step is ever made again. Ours stops
// where its inverse is still a number, says so, and comes back.
TEST(PyTorchRules, TheScaleNeverReachesZero) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel level, std::string_view text) {
    if (level >= LogLevel::warning && text.starts_with("loss_scale")) said.emplace_back(text);
  });
  const Tensor p = parameter({1}), q = parameter({1});
  optim::SGD optimizer({{"encoder.weight", p}, {"head.bias", q}}, {.lr = 1});
  GradScaler scaler{{.growth_interval = 1}};
  scaler.scale(zeros({}));
  std::size_t first = 0;
  double at_first = 0;
  for (int i = 0; i < 400; ++i) {
    set_grad(p, {1});
    set_grad(q, {i % 2 ? kInf : kNaN});
    EXPECT_FALSE(scaler.step(optimizer).ran());
    scaler.update();
    const double now = scaler.get_scale();  // what a device counted is said when somebody looks
    if (first == 0 && !said.empty()) first = static_cast<std::size_t>(i) + 1, at_first = now;
  }
  EXPECT_EQ(scaler.get_scale(), 0x1p-126);
  set_log_sink({});
  EXPECT_EQ(first, 20u);
  EXPECT_EQ(at_first, 0x1p-4);
  ASSERT_GE(said.size(), 2u);
  EXPECT_NE(said[0].find("20 steps in a row"), std::string::npos) << said[0];
  EXPECT_NE(said.back().find("floor of"), std::string::npos) << said.back();
  for (const std::string& text : said) {
    EXPECT_NE(text.find("head.bias"), std::string::npos) << text;
    EXPECT_EQ(text.find("encoder.weight"), std::string::npos) << text;
  }
  EXPECT_LT(said.size(), 16u) << "not with every step";
  // What is finite there is stepped, and the scale grows again.
  set_grad(p, {0x1p-126});
  q.set_grad({});
  EXPECT_TRUE(scaler.step(optimizer).ran());
  scaler.update();
  EXPECT_EQ(p.item<double>(), 0);
  EXPECT_EQ(scaler.get_scale(), 0x1p-125);
}

TEST(PyTorchRules, OverflowsInACapturedStepAreNamedToo) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel level, std::string_view text) {
    if (level >= LogLevel::warning && text.starts_with("loss_scale")) said.emplace_back(text);
  });
  const Tensor p = (full({2}, 1) + 0).requires_grad_(), q = (full({2}, 1) + 0).requires_grad_();
  optim::SGD optimizer({{"encoder.weight", p}, {"head.bias", q}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 2, .floor = 0.5}};
  auto step = capture([&](const Tensor& x) {
    optimizer.zero_grad();
    scaler.scale(sum(p) + sum(q * x)).backward();
    scaler.step(optimizer);
    scaler.update();
  });
  const Tensor good = ones({2}), bad = full({2}, kInf);
  for (int i = 0; i < 4; ++i) step(good);
  ASSERT_TRUE(step.replayed()) << step.why_not();
  for (int i = 0; i < 4; ++i) {
    step(bad);
    scaler.get_scale();  // devices are looked at no sooner
  }
  EXPECT_TRUE(step.replayed()) << step.why_not();
  set_log_sink({});
  ASSERT_EQ(said.size(), 2u) << "at the floor after 2, and again after twice as many";
  for (const std::string& text : said) EXPECT_NE(text.find("last in head.bias;"), std::string::npos) << text;
  EXPECT_EQ(p.to_vector<double>(), (Values{-3, -3}));
}

// ------------------------------------------------------------------------------------- one scaler, several optimizers

TEST(PyTorchRules, OptimizersOverViewsOfOneBufferAreIndependent) {
  for (const bool unscale_first : {false, true}) {
    const Tensor p = parameter({1, 1}), q = parameter({1, 1});
    const Tensor flat = tensor({4, 4, 8, 8});
    p.set_grad(flat.slice(0, 0, 2));
    q.set_grad(flat.slice(0, 2, 4));
    optim::SGD first({{"p", p}}, {.lr = 1}), second({{"q", q}}, {.lr = 1});
    GradScaler scaler{{.init_scale = 4}};
    scaler.scale(zeros({}));
    if (unscale_first) {
      scaler.unscale_(first);
      scaler.unscale_(second);
    }
    EXPECT_TRUE(scaler.step(first).ran());
    EXPECT_TRUE(scaler.step(second).ran());
    scaler.update();
    EXPECT_EQ(p.to_vector<double>(), (Values{0, 0}));
    EXPECT_EQ(q.to_vector<double>(), (Values{-1, -1}));
    EXPECT_EQ(flat.to_vector<double>(), (Values{1, 1, 2, 2}));
  }
}

TEST(PyTorchRules, AGradientThatTwoOptimizersShareIsRefused) {
  for (const bool own : {false, true}) {
    // One parameter in both, or two that were given one gradient.
    const Tensor p = parameter({1}), q = own ? p : parameter({1});
    set_grad(p, {4});
    q.set_grad(p.grad());
    optim::SGD first({{"p", p}}, {.lr = 1}), second({{"q", q}}, {.lr = 1});
    GradScaler scaler{{.init_scale = 4}};
    scaler.scale(zeros({}));
    scaler.step(first);
    EXPECT_EQ(misuse([&] { scaler.step(second); }), shared_gradient);
    // New gradients of a shared parameter are no mistake.
    set_grad(q, {8});
    EXPECT_TRUE(scaler.step(second).ran());
    EXPECT_EQ(q.item<double>(), own ? -2 : -1);
  }
}

// PyTorch divides what they share twice.
TEST(PyTorchRules, GradientsOfOneOptimizerThatOverlapAreUnscaledOnce) {
  const auto flat = [] { return tensor({4, 8, 12}, {3}); };
  Tensor memory = flat();
  const std::pair<Tensor, Tensor> pairs[] = {
      {narrow(memory, 0, 0, 2), narrow(memory, 0, 1, 2)},  // in part
      {memory, narrow(memory, 0, 1, 1)},                   // one in the other
      {memory, memory},                                    // one gradient for two parameters
  };
  for (const auto& [first, second] : pairs) {
    for (const bool unscaled_before : {false, true}) {
      memory.copy_(flat());
      const Values expected[] = {mul(first, 0.25).to_vector<double>(), mul(second, 0.25).to_vector<double>()};
      const Tensor p = zeros(first.sizes(), {.requires_grad = true}),
                   q = zeros(second.sizes(), {.requires_grad = true});
      p.set_grad(first);
      q.set_grad(second);
      optim::SGD optimizer({{"p", p}, {"q", q}}, {.lr = 1});
      GradScaler scaler{{.init_scale = 4}};
      scaler.scale(zeros({}));
      if (unscaled_before) scaler.unscale_(optimizer);
      scaler.step(optimizer);
      EXPECT_EQ(p.grad().to_vector<double>(), expected[0]);
      EXPECT_EQ(q.grad().to_vector<double>(), expected[1]);
      EXPECT_EQ(neg(p).to_vector<double>(), expected[0]);
      EXPECT_EQ(neg(q).to_vector<double>(), expected[1]);
    }
  }
}

TEST(PyTorchRules, GradientsOfTwoOptimizersThatOverlapInPartAreRefused) {
  for (const bool apart : {false, true}) {
    const Tensor memory = tensor({4, 8, 12, 16}, {4});
    const Tensor p = parameter({0, 0}), q = parameter({0, 0});
    p.set_grad(narrow(memory, 0, 1, 2));
    q.set_grad(narrow(memory, 0, apart ? 2 : 0, 2));
    optim::SGD first({{"p", p}}, {.lr = 1}), second({{"q", q}}, {.lr = 1});
    GradScaler scaler{{.init_scale = 4}};
    scaler.scale(zeros({}));
    scaler.unscale_(first);
    try {
      scaler.unscale_(second);
      ADD_FAILURE() << "expected a ScalerError";
    } catch (const amp::ScalerError& e) {
      EXPECT_EQ(e.kind(), shared_gradient);
      EXPECT_NE(std::string(e.what()).find("the gradient of q lies in memory"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("the gradient of p"), std::string::npos) << e.what();
    }
    EXPECT_EQ(memory.to_vector<double>(), (Values{4, 2, 3, 16})) << "what was refused is as it was";
  }
}

TEST(PyTorchRules, AnOptimizerMadeAnewAtTheSameAddressIsAnother) {
  const Tensor p = parameter({1});
  GradScaler scaler{{.init_scale = 4}};
  scaler.scale(zeros({}));
  std::optional<optim::SGD> optimizer;
  for (int i = 0; i < 3; ++i) {
    optimizer.emplace(NamedTensors{{"p", p}}, optim::SGDOptions{.lr = 1});
    set_grad(p, {4});
    scaler.unscale_(*optimizer);
    EXPECT_TRUE(scaler.step(*optimizer).ran());
    EXPECT_EQ(misuse([&] { scaler.step(*optimizer); }), called_twice);
  }
  EXPECT_EQ(p.item<double>(), -2);
  // What those that are gone found still counts.
  set_grad(p, {kInf});
  optimizer.emplace(NamedTensors{{"p", p}}, optim::SGDOptions{.lr = 1});
  scaler.step(*optimizer);
  optimizer.reset();
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2);
}

struct Mine final : amp::OptimizerBase {
  NamedTensors parameters;
  explicit Mine(NamedTensors p) : parameters(std::move(p)) {}
  const NamedTensors& named_parameters() const override { return parameters; }
  void step_unless(const Tensor&, const Tensor&) override {}
  Tensor step_closure(const std::function<Tensor()>& closure) override { return closure(); }
};

TEST(PyTorchRules, AnOptimizerThatMovesIsTheSameAndACopyIsAnother) {
  const Tensor p = parameter({1});
  GradScaler scaler{{.init_scale = 4}};
  scaler.scale(zeros({}));
  set_grad(p, {4});
  Mine first({{"p", p}});
  scaler.step(first);
  Mine moved(std::move(first));
  EXPECT_EQ(misuse([&] { scaler.step(moved); }), called_twice);
  set_grad(p, {4});
  Mine copy(moved);
  EXPECT_EQ(misuse([&] { scaler.step(copy); }), std::nullopt);
  Mine assigned({});
  assigned = std::move(copy);
  EXPECT_EQ(misuse([&] { scaler.step(assigned); }), called_twice);
  set_grad(p, {4});
  first.parameters = {{"p", p}};
  EXPECT_EQ(misuse([&] { scaler.step(first); }), std::nullopt) << "it has nothing left of the one that moved";
}

}  // namespace
}  // namespace halfstep
