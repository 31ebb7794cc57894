// SPDX-License-Identifier: Apache-2.0
// How loss scales of each policy follow overflows. The trajectories are those of the systems they are named after.
#include "halfstep/amp/loss_scale.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string_view>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/ops/create.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/log.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using amp::LossScale;
using amp::LossScalePolicy;
using test::error_of;
using Values = std::vector<double>;

constexpr double kInf = std::numeric_limits<double>::infinity();

// The default device, which --device chooses.
Device here() { return zeros({}).device(); }
Tensor flag(bool overflow) { return full({}, overflow ? 1 : 0); }

/// The scale after each step of `steps`, in which `.` is a good one and `!` an overflow.
Values follow(LossScale& scale, std::string_view steps) {
  scale.start(here());
  Values result;
  for (const char step : steps) {
    scale.update({flag(step == '!')});
    result.push_back(scale.value());
  }
  return result;
}
Values follow(const LossScalePolicy& policy, std::string_view steps) {
  LossScale scale(policy);
  return follow(scale, steps);
}
/// The same through a whole scaler and an optimizer's gradients.
Values follow_scaler(const LossScalePolicy& policy, std::string_view steps) {
  const Tensor p = ones({1}, {.requires_grad = true});
  optim::SGD optimizer({{"p", p}}, {.lr = 1});
  amp::GradScaler scaler(policy);
  Values result;
  for (const char step : steps) {
    scaler.scale(zeros({}));
    p.set_grad(full({1}, step == '!' ? kInf : 1));
    EXPECT_EQ(scaler.step(optimizer).ran(), step != '!');
    scaler.update();
    result.push_back(scaler.get_scale());
  }
  return result;
}

constexpr std::string_view kPattern = "...!...!!....";

struct Trajectory {
  const char* name;
  LossScalePolicy policy;
  Values scales;  // of kPattern
};

std::vector<Trajectory> trajectories() {
  const Values plain = {16, 16, 32, 16, 16, 16, 32, 16, 8, 8, 8, 16, 16};
  return {
      {"torch", LossScalePolicy::torch({.init_scale = 16, .growth_interval = 3}), plain},
      {"apex", LossScalePolicy::apex({.init_scale = 16, .scale_window = 3}), plain},
      {"keras", LossScalePolicy::keras({.initial_scale = 16, .dynamic_growth_steps = 3}), plain},
      {"mindspore", LossScalePolicy::mindspore(16, 2, 3), plain},
      {"jmp", LossScalePolicy::jmp({.loss_scale = 16, .period = 3}), plain},
      {"deepspeed, hysteresis 1",
       LossScalePolicy::deepspeed({.init_scale = 16, .scale_window = 3, .hysteresis = 1}),
       {16, 16, 16, 8, 8, 8, 8, 4, 2, 2, 2, 2, 4}},
      {"deepspeed",
       LossScalePolicy::deepspeed({.init_scale = 16, .scale_window = 3}),
       {16, 16, 16, 16, 16, 16, 16, 8, 4, 4, 4, 4, 8}},
      {"deepspeed, consecutive",
       LossScalePolicy::deepspeed({.init_scale = 16, .scale_window = 3, .consecutive_hysteresis = true}),
       {16, 16, 16, 16, 16, 16, 16, 16, 8, 8, 8, 8, 16}},
      {"megatron",
       LossScalePolicy::megatron({.initial_scale = 16, .growth_interval = 3}),
       {16, 16, 32, 32, 32, 32, 64, 64, 32, 32, 32, 64, 64}},
      {"fixed", LossScalePolicy::fixed(16), Values(kPattern.size(), 16)},
  };
}

TEST(LossScale, PoliciesFollowOverflowsAsTheirSystemsDo) {
  for (const Trajectory& t : trajectories()) {
    EXPECT_EQ(follow(t.policy, kPattern), t.scales) << t.name;
    EXPECT_EQ(follow_scaler(t.policy, kPattern), t.scales) << t.name;
  }
}

TEST(LossScale, DefaultsAreTheirSystems) {
  const auto torch = LossScalePolicy::torch().rules(), apex = LossScalePolicy::apex().rules(),
             keras = LossScalePolicy::keras().rules(), jmp = LossScalePolicy::jmp().rules(),
             mindspore = LossScalePolicy::mindspore().rules(), deepspeed = LossScalePolicy::deepspeed().rules(),
             megatron = LossScalePolicy::megatron().rules();
  const auto numbers = [](const amp::LossScaleRules& r) {
    return Values{r.init_scale,
                  r.growth_factor,
                  r.backoff_factor,
                  static_cast<double>(r.growth_interval),
                  r.floor,
                  r.cap,
                  static_cast<double>(r.hysteresis)};
  };
  EXPECT_EQ(numbers(torch), (Values{65536, 2, 0.5, 2000, 0, 0, 1}));
  EXPECT_EQ(numbers(apex), (Values{65536, 2, 0.5, 2000, 0, 16777216, 1}));
  EXPECT_EQ(numbers(keras), (Values{32768, 2, 0.5, 2000, 0, 0, 1}));
  EXPECT_EQ(numbers(jmp), (Values{32768, 2, 0.5, 2000, 1, 0, 1}));
  EXPECT_EQ(numbers(mindspore), (Values{16777216, 2, 0.5, 2000, 1, 0, 1}));
  EXPECT_EQ(numbers(deepspeed), (Values{65536, 2, 0.5, 1000, 1, 0, 2}));
  EXPECT_EQ(numbers(megatron), (Values{4294967296, 2, 0.5, 1000, 1, 0, 2}));
  EXPECT_TRUE(deepspeed.error_at_floor);
  EXPECT_FALSE(megatron.error_at_floor);
}

// PyTorch's own trajectory, with factors that differ: 4 x2 x0.25 every 2.
TEST(LossScale, GrowsAndFallsByFactorsOfItsOwn) {
  LossScale scale(
      LossScalePolicy::torch({.init_scale = 4, .growth_factor = 2, .backoff_factor = 0.25, .growth_interval = 2}));
  EXPECT_EQ(follow(scale, "..!.!.."), (Values{4, 8, 2, 2, .5, .5, 1}));
  EXPECT_EQ(scale.growth_tracker(), 0);
}

TEST(LossScale, ACapAndAFloor) {
  EXPECT_EQ(follow(LossScalePolicy::apex({.init_scale = 0x1p22, .scale_window = 1}), "...."),
            (Values{0x1p23, 0x1p24, 0x1p24, 0x1p24}));
  EXPECT_EQ(follow(LossScalePolicy::apex({.init_scale = 8, .min_loss_scale = 3}), "!!!"), (Values{4, 3, 3}));
  EXPECT_EQ(follow(LossScalePolicy::jmp({.loss_scale = 2, .period = 2}), "!!!.."), (Values{1, 1, 1, 1, 2}));
  EXPECT_EQ(follow(LossScalePolicy::megatron({.initial_scale = 4, .growth_interval = 1}), "!!!!."),
            (Values{4, 2, 1, 1, 2}));
  // What float32 can't hold is not reached: not by PyTorch's, nor by those whose own becomes infinite.
  const double most = 0x1p127;
  EXPECT_EQ(follow(LossScalePolicy::keras({.initial_scale = most, .dynamic_growth_steps = 1}), ".."),
            (Values{most, most}));
  EXPECT_EQ(follow(LossScalePolicy::torch({.init_scale = 1e38, .growth_factor = 16, .growth_interval = 1}), "."),
            (Values{static_cast<double>(1e38f)}));
  // PyTorch's has no floor: 160 overflows from 2 on lead to 0, from where no way leads back. Ours ends at the smallest
  // normal number.
  EXPECT_EQ(follow(LossScalePolicy::torch({.init_scale = 2}), std::string(160, '!')).back(), 0x1p-126);
}

TEST(LossScale, AnOverflowAtDeepSpeedsFloorIsAnError) {
  const auto policy = LossScalePolicy::deepspeed({.init_scale = 4, .hysteresis = 1});
  LossScale scale(policy);
  EXPECT_EQ(follow(scale, "!!"), (Values{2, 1})) << "reaching it is none";
  const std::string text = error_of<AmpError>([&] {
    scale.update({flag(true)});
    scale.value();
  });
  EXPECT_NE(text.find("floor of 1"), std::string::npos) << text;
  EXPECT_EQ(
      follow(LossScalePolicy::deepspeed({.init_scale = 4, .hysteresis = 1, .raise_error_at_min_scale = false}), "!!!!"),
      (Values{2, 1, 1, 1}));
}

TEST(LossScale, TooManyOverflowsInARowAreAnError) {
  amp::LossScaleRules rules = LossScalePolicy::mindspore(1024).rules();
  rules.overflow_limit = 3;
  LossScale scale{LossScalePolicy(rules)};
  EXPECT_EQ(follow(scale, "!!!.!!!").back(), 16) << "a good step between";
  EXPECT_EQ(scale.overflows_in_a_row(), 3);
  const std::string text = error_of<AmpError>([&] {
    scale.update({flag(true)});
    scale.value();
  });
  EXPECT_NE(text.find("at most 3 overflows in a row, got 4"), std::string::npos) << text;
}

TEST(LossScale, TheFloorIsSaidLoudly) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel level, std::string_view text) {
    if (level >= LogLevel::warning) said.emplace_back(text);
  });
  LossScale scale(LossScalePolicy::mindspore(2, 2, 2));
  follow(scale, "!");
  const std::size_t first = said.size();
  follow(scale, "..");
  const std::size_t good = said.size();
  follow(scale, "!!!");
  set_log_sink({});
  EXPECT_EQ(first, 1u);
  EXPECT_EQ(good, 1u);
  ASSERT_EQ(said.size(), 3u) << "after 1, 2 and 4, not with every step";
  EXPECT_NE(said[2].find("floor of 1 and gradients still overflow (4 so far)"), std::string::npos) << said[2];
}

TEST(LossScale, AnyOfSeveralOverflowsCounts) {
  LossScale scale(LossScalePolicy::torch({.init_scale = 8}));
  scale.start(here());
  const Tensor kept = scale.tensor();
  scale.update({flag(false), flag(true)});
  EXPECT_EQ(scale.value(), 4);
  scale.update({flag(false), full({1}, 1, {.dtype = boolean}), flag(false)});
  EXPECT_EQ(scale.value(), 2);
  scale.update({full({}, 0, {.dtype = boolean}), flag(false)});
  EXPECT_EQ(scale.value(), 2);
  EXPECT_EQ(scale.growth_tracker(), 1);
  EXPECT_EQ(kept.item<double>(), 2) << "the same memory";
}

TEST(LossScale, AStateGoesOnWhereItWas) {
  for (const Trajectory& t : trajectories()) {
    for (std::size_t at = 0; at < kPattern.size(); ++at) {
      LossScale first(t.policy);
      follow(first, kPattern.substr(0, at));
      LossScale before(t.policy), after(t.policy);
      before.load_state_dict(first.state_dict());
      after.start(here());
      after.load_state_dict(first.state_dict());
      const Values expected(t.scales.begin() + static_cast<std::ptrdiff_t>(at), t.scales.end());
      ASSERT_EQ(follow(before, kPattern.substr(at)), expected) << t.name << " " << at;
      ASSERT_EQ(follow(after, kPattern.substr(at)), expected) << t.name << " " << at;
    }
  }
  amp::LossScaleRules rules;
  rules.overflow_limit = 5;
  LossScale limited{LossScalePolicy(rules)};
  follow(limited, "!!!!");
  LossScale other{LossScalePolicy(rules)};
  other.load_state_dict(limited.state_dict());
  EXPECT_EQ(other.overflows_in_a_row(), 4);
}

TEST(LossScale, AScalersStateHasWhatItsPolicyCounts) {
  amp::GradScaler scaler(LossScalePolicy::megatron({.initial_scale = 64}));
  auto state = scaler.state_dict();
  EXPECT_EQ(state.at("hysteresis_used"), 0);
  state["hysteresis_used"] = 1;
  scaler.load_state_dict(state);
  EXPECT_EQ(scaler.state_dict(), state);
  EXPECT_EQ(scaler.policy().rules().hysteresis, 2);
  EXPECT_EQ(scaler.options().floor, 1);
  EXPECT_EQ(scaler.options().growth_interval, 1000);
  // One of PyTorch's has none of it; it continues with a whole hysteresis.
  amp::GradScaler plain{{.init_scale = 8}};
  EXPECT_FALSE(plain.state_dict().contains("hysteresis_used"));
  scaler.load_state_dict(plain.state_dict());
  EXPECT_EQ(scaler.state_dict().at("hysteresis_used"), 0);
  EXPECT_EQ(scaler.get_scale(), 8);
  state["hysteresis_used"] = 0.5;
  const auto before = scaler.state_dict();
  EXPECT_NE(error_of<AmpError>([&] { scaler.load_state_dict(state); }).find("hysteresis_used"), std::string::npos);
  EXPECT_EQ(scaler.state_dict(), before);
}

TEST(LossScale, MisuseIsNamed) {
  const auto says = [](const auto& call, const char* part) {
    const std::string text = error_of<AmpError>(call);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  says([] { LossScalePolicy({.hysteresis = 0}); }, "hysteresis of at least 1, got 0");
  says([] { LossScalePolicy({.overflow_limit = -1}); }, "limit of at least 0");
  says([] { LossScalePolicy({.error_at_floor = true}); }, "floor above 0");
  says([] { LossScalePolicy({.floor = 2, .cap = 1}); }, "floor <= cap, got 2 and 1");
  says([] { LossScalePolicy::fixed(0); }, "scale above 0");
  says([] { LossScalePolicy::mindspore(16, 1, 3); }, "mindspore: expected a scale factor above 1, got 1");
  says([] { LossScalePolicy::mindspore(0.5); }, "mindspore: expected a scale of at least 1, got 0.5");
  says([] { LossScalePolicy::jmp({.period = 0}); }, "growth interval of at least 1, got 0");
  LossScale scale(LossScalePolicy::torch());
  says([&] { scale.update({flag(true)}); }, "before anything was scaled");
  says([&] { scale.set(-1); }, "scale above 0");
  scale.start(here());
  says([&] { scale.update({zeros({2})}); }, "one element of f32 or bool");
  says([&] { scale.update({zeros({}, {.dtype = i32})}); }, "got i32");
  says([&] { scale.load_state_dict({{"scale", 2}}); }, "no '_growth_tracker'");
  says([&] { scale.load_state_dict({{"scale", 2}, {"_growth_tracker", -1}}); }, "at least 0 for '_growth_tracker'");
  says([&] { scale.load_state_dict({{"scale", 2}, {"growth_tracker", -1}}); }, "at least 0 for 'growth_tracker'");
  EXPECT_EQ(scale.value(), 65536);
}

}  // namespace
}  // namespace halfstep
