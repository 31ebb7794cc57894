// SPDX-License-Identifier: Apache-2.0
// MindSpore's loss scalers and managers.
#include "halfstep/amp/loss_scaler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>

#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using amp::all_finite;
using amp::DynamicLossScaler;
using amp::StaticLossScaler;
using test::error_of;
using Values = std::vector<double>;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Tensor of(const Values& values, DType dtype = f32) {
  return tensor(values, {static_cast<std::int64_t>(values.size())}, {.dtype = dtype});
}
Tensor finite(bool yes) { return full({}, yes ? 1 : 0, {.dtype = boolean}); }
bool is_finite(const std::vector<Tensor>& tensors) { return all_finite(tensors).item<bool>(); }

// --- all_finite

TEST(AllFinite, IsABoolOnTheDevice) {
  const Tensor result = all_finite({of({1, 2})});
  EXPECT_EQ(result.dtype(), boolean);
  EXPECT_EQ(result.sizes(), Shape{});
  EXPECT_EQ(result.device(), zeros({}).device());
  EXPECT_FALSE(result.requires_grad());
}

TEST(AllFinite, FindsOneBadElementAnywhere) {
  // Whole vectors, their tails, and pieces that other threads look at.
  for (const std::int64_t n : {1, 15, 17, 1100, 40003}) {
    for (const std::int64_t at : {std::int64_t{0}, n / 2, n - 1}) {
      for (const DType dtype : {f32, f16, bf16, f64}) {
        for (const double bad : {kInf, -kInf, kNaN}) {
          const Tensor t = ones({n}, {.dtype = dtype});
          ASSERT_TRUE(is_finite({of({1}), t}));
          t.narrow(0, at, 1).fill_(bad);
          ASSERT_FALSE(is_finite({t})) << n << " " << at << " " << name(dtype) << " " << bad;
          ASSERT_FALSE(is_finite({of({1}), t, of({1}, f16)}));
        }
      }
    }
  }
}

TEST(AllFinite, TheLargestValuesAreFinite) {
  EXPECT_TRUE(is_finite({of({3.4028234663852886e38, 0x1p-149}), of({-65504}, f16), of({3.3895313892515355e38}, bf16),
                         of({1.7976931348623157e308, -0.0}, f64)}));
}

TEST(AllFinite, TensorsOfEveryKind) {
  EXPECT_TRUE(is_finite({})) << "of none at all";
  EXPECT_TRUE(is_finite({Tensor(), Tensor()}));
  EXPECT_FALSE(is_finite({Tensor(), of({kNaN}), Tensor()}));
  EXPECT_TRUE(is_finite({zeros({0, 3}), full({2}, 7, {.dtype = i64}), full({}, 1, {.dtype = boolean})}));
  // What lies between the elements of a view counts for nothing; of a transposed one everything does.
  const Tensor wide = of({1, kInf, 2, kInf});
  EXPECT_TRUE(is_finite({wide.slice(0, 0, 4, 2)}));
  EXPECT_FALSE(is_finite({wide.slice(0, 1, 4, 2)}));
  EXPECT_FALSE(is_finite({tensor({1, 2, 3, kInf, 5, 6}, {2, 3}).t()}));
  EXPECT_TRUE(is_finite({of({448}, f8e4m3), of({57344}, f8e5m2)}));
  EXPECT_FALSE(is_finite({of({1e9}, f8e5m2)}));
}

// --- scaling

TEST(LossScaler, ScalesAndUnscalesAsMindSpores) {
  StaticLossScaler scaler(1024);
  EXPECT_EQ(scaler.scale(of({1})).item<double>(), 1024);
  const auto unscaled = scaler.unscale({of({1.5, 1.0}, f16), of({1.2}, f16)});
  // MindSpore's figures, to the digits that it prints.
  EXPECT_NEAR(unscaled[0].to_vector<double>()[0], 1.4648e-3, 5e-8);
  EXPECT_NEAR(unscaled[0].to_vector<double>()[1], 9.7656e-4, 5e-9);
  EXPECT_NEAR(unscaled[1].item<double>(), 1.1721e-3, 5e-8);
  EXPECT_FALSE(scaler.adjust(finite(true)));
  EXPECT_FALSE(scaler.adjust(finite(false)));
  EXPECT_EQ(scaler.scale_value(), 1024);
}

TEST(LossScaler, ComputesInFloat32WhereMindSporesDoesNot) {
  // 2^16 is infinite in f16, and 2^-25 is 0 there.
  StaticLossScaler large(0x1p16);
  for (const DType dtype : {f16, bf16}) {
    const Tensor scaled = large.scale(of({1.5, -2}, dtype));
    EXPECT_EQ(scaled.dtype(), f32);
    EXPECT_EQ(scaled.to_vector<double>(), (Values{98304, -131072}));
  }
  StaticLossScaler larger(0x1p25);
  for (const DType dtype : {f16, bf16}) {
    const Tensor unscaled = larger.unscale(of({1.5, -1024}, dtype));
    EXPECT_EQ(unscaled.dtype(), f32);
    EXPECT_EQ(unscaled.to_vector<double>(), (Values{0x1.8p-25, -0x1p-15}));
  }
  // f64 stays f64: 1 + 2^-40 does not fit float32.
  EXPECT_EQ(larger.unscale(of({(1 + 0x1p-40) * 0x1p25}, f64)).item<double>(), 1 + 0x1p-40);
  EXPECT_EQ(larger.scale(of({1 + 0x1p-40}, f64)).item<double>(), (1 + 0x1p-40) * 0x1p25);
}

// PyTorch's bits for a scale that is no power of 2.
TEST(LossScaler, UnscalesByTheRoundedReciprocal) {
  StaticLossScaler scaler(3);
  const Values expected = {0x1.555556p-2, 0x1.555556p-1, 1, 0x1.aaaaacp0, 0x1.2aaaacp1, 0x1.aaaaacp1};
  const Tensor g = of({1, 2, 3, 5, 7, 10});
  EXPECT_EQ(scaler.unscale(g).to_vector<double>(), expected);
  EXPECT_EQ(scaler.unscale(of({1, 2, 3, 5, 7, 10}).requires_grad_()).to_vector<double>(), expected) << "recorded";
  EXPECT_EQ(g.to_vector<double>(), (Values{1, 2, 3, 5, 7, 10})) << "the gradients themselves stay";
}

TEST(LossScaler, ListsKeepTheirPlaces) {
  DynamicLossScaler scaler(4, 2, 3);
  const auto scaled = scaler.scale({of({1}), Tensor(), of({2}, f16)});
  ASSERT_EQ(scaled.size(), 3u);
  EXPECT_EQ(scaled[0].item<double>(), 4);
  EXPECT_FALSE(scaled[1].defined());
  EXPECT_EQ(scaled[2].item<double>(), 8);
  const Tensor turned = tensor({1, 2, 3, 4, 5, 6}, {2, 3}).t(), strided = of({8, 0, 16, 0}).slice(0, 0, 4, 2);
  const auto unscaled = scaler.unscale({Tensor(), turned, strided, of({kInf, 4}, bf16), of({8}, f64)});
  ASSERT_EQ(unscaled.size(), 5u);
  EXPECT_FALSE(unscaled[0].defined());
  EXPECT_EQ(unscaled[1].sizes(), (Shape{3, 2}));
  EXPECT_EQ(unscaled[1].to_vector<double>(), (Values{.25, 1, .5, 1.25, .75, 1.5}));
  EXPECT_EQ(unscaled[2].to_vector<double>(), (Values{2, 4}));
  EXPECT_EQ(unscaled[3].to_vector<double>(), (Values{kInf, 1}));
  EXPECT_EQ(unscaled[4].dtype(), f64);
  EXPECT_EQ(unscaled[4].item<double>(), 2);
  EXPECT_TRUE(scaler.unscale(std::vector<Tensor>{}).empty());
}

TEST(LossScaler, BothWaysAreRecorded) {
  StaticLossScaler scaler(8);
  const Tensor x = of({3}).requires_grad_();
  sum(scaler.scale(x * x)).backward();
  EXPECT_EQ(x.grad().item<double>(), 48);
  x.set_grad({});
  const auto parts = scaler.unscale({x * x, of({1})});
  sum(parts[0]).backward();
  EXPECT_EQ(x.grad().item<double>(), 0.75);
}

// MindSpore's own trajectory.
TEST(LossScaler, TheDynamicScaleFollowsMindSpores) {
  DynamicLossScaler scaler(1024, 2, 3);
  const std::vector<bool> steps = {1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1};
  Values scales, counters;
  for (const bool step : steps) {
    EXPECT_TRUE(scaler.adjust(finite(step)));
    scales.push_back(scaler.scale_value());
    counters.push_back(scaler.counter());
  }
  EXPECT_EQ(scales, (Values{1024, 1024, 2048, 1024, 1024, 1024, 512, 256, 256, 256, 512, 512}));
  EXPECT_EQ(counters, (Values{1, 2, 0, 0, 1, 2, 0, 0, 1, 2, 0, 1}));
  for (int i = 0; i < 12; ++i) scaler.adjust(finite(false));
  EXPECT_EQ(scaler.scale_value(), 1) << "the floor";
  // 1200 in a row are no error here; a manager's are.
  for (int i = 0; i < 1200; ++i) scaler.adjust(finite(false));
  EXPECT_EQ(scaler.scale_value(), 1);
}

TEST(LossScaler, AStepInTheFunctionStyle) {
  DynamicLossScaler scaler(0x1p15, 2, 50);
  const auto gradient_of = [&](double factor) {
    const Tensor w = of({1}, f16).requires_grad_();
    scaler.scale(sum(w * factor)).backward();
    return std::vector<Tensor>{w.grad()};
  };
  const auto fine = gradient_of(0x1p-20);
  EXPECT_TRUE(is_finite(fine));
  EXPECT_EQ(scaler.unscale(fine)[0].item<double>(), 0x1p-20);
  const auto bad = gradient_of(4);  // 2^17 is no f16
  const Tensor finite = all_finite(bad);
  EXPECT_FALSE(finite.item<bool>());
  scaler.adjust(finite);
  EXPECT_EQ(scaler.scale_value(), 0x1p14);
}

TEST(LossScaler, MisuseIsNamed) {
  const auto says = [](const auto& call, const char* part) {
    const std::string text = error_of<Error>(call);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  says([] { StaticLossScaler(0.5); }, "StaticLossScaler: expected a scale of at least 1, got 0.5");
  says([] { StaticLossScaler{kNaN}; }, "at least 1");
  says([] { DynamicLossScaler(0, 2, 3); }, "DynamicLossScaler: expected a scale of at least 1, got 0");
  says([] { DynamicLossScaler(2, 1, 3); }, "scale factor above 1, got 1");
  says([] { DynamicLossScaler(2, 2, 0); }, "scale window of at least 1, got 0");
  StaticLossScaler scaler(2);
  says([&] { scaler.scale(Tensor()); }, "scale: ");
  says([&] { scaler.scale(of({1}, i32)); }, "scale: ");
  says([&] { scaler.unscale(of({1}, i32)); }, "unscale: ");
  says([&] { scaler.adjust(of({1})); }, "adjust: expected a bool tensor of one element");
  says([&] { scaler.adjust(zeros({2}, {.dtype = boolean})); }, "got bool [2]");
}

// --- managers

TEST(LossScaleManager, AreValues) {
  const amp::FixedLossScaleManager fixed;
  EXPECT_EQ(fixed.policy().rules().init_scale, 128);
  EXPECT_FALSE(fixed.policy().rules().dynamic);
  EXPECT_TRUE(fixed.drop_overflow_update());
  EXPECT_FALSE(amp::FixedLossScaleManager(1024, false).drop_overflow_update());
  const amp::DynamicLossScaleManager dynamic;
  EXPECT_EQ(dynamic.policy().rules().init_scale, 16777216);
  EXPECT_EQ(dynamic.policy().rules().growth_interval, 2000);
  EXPECT_EQ(dynamic.policy().rules().floor, 1);
  EXPECT_TRUE(dynamic.drop_overflow_update());
  std::optional<amp::LossScaleManager> held = amp::FixedLossScaleManager(256);
  EXPECT_EQ(held->policy().rules().init_scale, 256);
  held = dynamic;
  EXPECT_EQ(held->policy().rules().init_scale, 16777216);
  held = amp::LossScalePolicy::megatron();
  EXPECT_EQ(held->policy().rules().hysteresis, 2);
}

TEST(LossScaleManager, MoreThan1000OverflowsInARowAreAnError) {
  amp::LossScale scale(amp::DynamicLossScaleManager(4, 2, 3).policy());
  scale.start(zeros({}).device());
  const Tensor overflow = ones({}), fine = zeros({});
  for (int i = 0; i < 5; ++i) scale.update({overflow});
  scale.update({fine});
  for (int i = 0; i < 1000; ++i) scale.update({overflow});
  EXPECT_EQ(scale.value(), 1);
  const std::string text = error_of<AmpError>([&] {
    scale.update({overflow});
    scale.value();
  });
  EXPECT_NE(text.find("at most 1000 overflows in a row, got 1001"), std::string::npos) << text;
}

TEST(LossScaleManager, MisuseIsNamed) {
  const auto says = [](const auto& call, const char* part) {
    const std::string text = error_of<AmpError>(call);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  says([] { amp::FixedLossScaleManager(0.5); }, "FixedLossScaleManager: expected a scale of at least 1, got 0.5");
  says([] { amp::DynamicLossScaleManager(0.5); }, "DynamicLossScaleManager: expected a scale of at least 1, got 0.5");
  says([] { amp::DynamicLossScaleManager(2, 0.5); }, "scale factor above 1, got 0.5");
}

}  // namespace
}  // namespace halfstep
