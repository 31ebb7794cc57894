// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "halfstep/ops/create.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "tests/optim/optim_golden.h"

namespace halfstep {
namespace {

using namespace optim;
using test::GoldenEntry;

NamedTensors one(const std::string& name) { return {{name, zeros({1}, {.requires_grad = true})}}; }

std::unique_ptr<Optimizer> optimizer_of(const GoldenEntry& e) {
  if (e.text("optimizer", "SGD") == "Adam") return std::make_unique<Adam>(one("p"), AdamOptions{.lr = e.real("lr")});
  const double momentum = e.op == "OneCycleLR" ? 0.9 : 0;
  auto sgd = std::make_unique<SGD>(one("p0"), SGDOptions{.lr = e.real("lr"), .momentum = momentum});
  for (std::int64_t g = 1; g < e.integer("groups"); ++g) {
    sgd->add_param_group(one("p" + std::to_string(g)),
                         {.lr = e.real("lr") * static_cast<double>(g + 1), .momentum = momentum});
  }
  return sgd;
}

std::unique_ptr<Schedule> schedule_of(const GoldenEntry& e, Optimizer& o) {
  if (e.op == "StepLR") {
    return std::make_unique<StepLR>(o, StepLROptions{.step_size = e.integer("step_size"), .gamma = e.real("gamma")});
  }
  if (e.op == "MultiStepLR") {
    return std::make_unique<MultiStepLR>(
        o, MultiStepLROptions{.milestones = e.integers("milestones"), .gamma = e.real("gamma")});
  }
  if (e.op == "ExponentialLR") return std::make_unique<ExponentialLR>(o, e.real("gamma"));
  if (e.op == "CosineAnnealingLR") {
    return std::make_unique<CosineAnnealingLR>(
        o, CosineAnnealingLROptions{.t_max = e.integer("t_max"), .eta_min = e.real("eta_min")});
  }
  if (e.op == "LinearLR") {
    return std::make_unique<LinearLR>(o, LinearLROptions{.start_factor = e.real("start_factor"),
                                                         .end_factor = e.real("end_factor"),
                                                         .total_iters = e.integer("total_iters")});
  }
  if (e.op == "SequentialLR") {
    const LinearLR warm_up(o, {.start_factor = e.real("start_factor"), .total_iters = e.integer("total_iters")});
    const CosineAnnealingLR cosine(o, {.t_max = e.integer("t_max")});
    return std::make_unique<SequentialLR>(o, std::vector<Schedule>{warm_up, cosine}, e.integers("milestones"));
  }
  if (e.op == "LambdaLR") {
    return std::make_unique<Schedule>(
        o, [](double base, std::int64_t step) { return base / (1 + static_cast<double>(step)); });
  }
  return std::make_unique<OneCycleLR>(
      o, OneCycleLROptions{.max_lr = e.real("max_lr"),
                           .total_steps = e.integer("total_steps"),
                           .pct_start = e.real("pct_start"),
                           .anneal = e.text("anneal_strategy") == "cos" ? Anneal::cosine : Anneal::linear,
                           .cycle_momentum = e.flag("cycle_momentum"),
                           .base_momentum = e.real("base_momentum"),
                           .max_momentum = e.real("max_momentum"),
                           .div_factor = e.real("div_factor"),
                           .final_div_factor = e.real("final_div_factor"),
                           .three_phase = e.flag("three_phase")});
}

// Both sides compute in float64: 1e-12 of the base rate.
TEST(ScheduleGolden, RatesAndMomentum) {
  for (const GoldenEntry& e : goldens_of({"StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "LinearLR",
                                          "SequentialLR", "LambdaLR", "OneCycleLR"})) {
    const auto optimizer = optimizer_of(e);
    const auto schedule = schedule_of(e, *optimizer);
    for (std::int64_t s = 0; s <= e.integer("steps"); ++s) {
      if (s > 0) schedule->step();
      const std::string what = e.name + " step " + std::to_string(s);
      expect_near(schedule->rates(), row_of(e.tensor("lr"), s), 1e-12, what);
      if (e.op == "OneCycleLR") {
        EXPECT_NEAR(optimizer->momentum(), e.tensor("momentum").data[static_cast<std::size_t>(s)], 1e-12) << what;
      }
    }
  }
}

TEST(ScheduleGolden, Plateau) {
  for (const GoldenEntry& e : goldens_of({"ReduceLROnPlateau"})) {
    const auto optimizer = optimizer_of(e);
    const ReduceLROnPlateauOptions options{
        .mode = e.text("mode") == "min" ? PlateauMode::min : PlateauMode::max,
        .factor = e.real("factor"),
        .patience = e.integer("patience"),
        .threshold = e.real("threshold"),
        .threshold_mode = e.text("threshold_mode") == "rel" ? ThresholdMode::relative : ThresholdMode::absolute,
        .cooldown = e.integer("cooldown"),
        .min_lr = e.real("min_lr"),
        .eps = e.real("eps")};
    auto schedule = std::make_unique<ReduceLROnPlateau>(*optimizer, options);
    for (std::int64_t s = 1; s <= e.integer("steps"); ++s) {
      schedule->step(e.tensor("metric").data[static_cast<std::size_t>(s - 1)]);
      EXPECT_NEAR(optimizer->lr(), row_of(e.tensor("lr"), s)[0], 1e-12) << e.name << " step " << s;
      // Resumed after every step, it goes the same way.
      const auto state = schedule->state_dict();
      schedule = std::make_unique<ReduceLROnPlateau>(*optimizer, options);
      schedule->load_state_dict(state);
    }
  }
}

TEST(Schedule, SkippedStepsDoNotCount) {
  const NamedTensors p = one("w");
  SGD sgd{p, {.lr = 1}};
  StepLR schedule{sgd, {.step_size = 1, .gamma = 0.5}};
  amp::GradScaler scaler{{.init_scale = 4}};
  for (const double gradient : {1.0, static_cast<double>(INFINITY), 1.0}) {
    scaler.scale(ones({}));
    p[0].tensor.set_grad(full({1}, gradient));
    const auto result = scaler.step(sgd);
    scaler.update();
    schedule.step(result);
  }
  EXPECT_EQ(schedule.steps(), 2);
  EXPECT_EQ(sgd.lr(), 0.25);
}

TEST(Schedule, ResumesFromItsState) {
  SGD a{one("w"), {.lr = 0.1}}, b{one("w"), {.lr = 0.7}};
  const WarmupCosineLROptions options{.warmup_steps = 3, .total_steps = 9, .start_factor = 0.1, .eta_min = 0.02};
  WarmupCosineLR first{a, options};
  EXPECT_DOUBLE_EQ(a.lr(), 0.01);
  for (int i = 0; i < 5; ++i) first.step();
  EXPECT_DOUBLE_EQ(a.lr(), 0.02 + 0.08 * (1 + std::cos(M_PI / 3)) / 2);
  WarmupCosineLR second{b, options};
  second.load_state_dict(first.state_dict());
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(a.lr(), b.lr());
    first.step();
    second.step();
  }
  EXPECT_DOUBLE_EQ(a.lr(), 0.02) << "past the end it stays";
  EXPECT_THROW(second.load_state_dict({{"steps", 1}}), Error);
}

TEST(Schedule, MisuseIsNamed) {
  SGD sgd{one("w"), {.lr = 0.1}};
  EXPECT_THROW((StepLR{sgd, {.step_size = 0}}), Error);
  EXPECT_THROW((CosineAnnealingLR{sgd, {.t_max = 0}}), Error);
  EXPECT_THROW((LinearLR{sgd, {.start_factor = 0}}), Error);
  EXPECT_THROW((SequentialLR{sgd, {ExponentialLR{sgd, 0.5}}, {3}}), Error);
  EXPECT_THROW((ReduceLROnPlateau{sgd, {.factor = 1}}), Error);
  EXPECT_THROW((OneCycleLR{sgd, {.max_lr = 1, .total_steps = 1}}), Error);
  OneCycleLR cycle{sgd, {.max_lr = 1, .total_steps = 2, .pct_start = 0.6, .cycle_momentum = false}};
  cycle.step();
  EXPECT_THROW(cycle.step(), Error);
  EXPECT_EQ(cycle.steps(), 1);
}

}  // namespace
}  // namespace halfstep
