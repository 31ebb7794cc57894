// SPDX-License-Identifier: Apache-2.0
// What the simulated accelerator computes for a training step, through its table, against closed forms in float64:
// cross entropy, gradient scaling, optimizer steps.
#include <cmath>
#include <limits>

#include "tests/runtime/sim_table.h"

namespace halfstep::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

using SimTraining = KernelCalls;

// --- cross entropy

// [2, 3 classes, 2 places], so that classes are not next to each other; sample 3 is ignored.
const std::vector<float> kScores = {0.5f, -1, 2, 0.25f, -0.5f, 1, 3, 0, -2, 1.5f, 0.75f, -1};
const std::vector<int64_t> kLabels = {2, 0, 1, -100};
const std::vector<double> kWeights = {0.5, 2, 1.25};

struct Reference {
  std::vector<double> losses = std::vector<double>(4), gradients = std::vector<double>(12);
  double divisor = 0;
  Reference(double smoothing, bool weighted) {
    const auto weight = [&](std::size_t c) { return weighted ? kWeights[c] : 1.0; };
    for (std::size_t s = 0; s < 4; ++s) {
      if (kLabels[s] == -100) continue;
      const std::size_t base = s / 2 * 6 + s % 2, label = static_cast<std::size_t>(kLabels[s]);
      double sum = 0, mass = 0;
      for (std::size_t c = 0; c < 3; ++c) sum += std::exp(static_cast<double>(kScores[base + 2 * c]));
      const auto q = [&](std::size_t c) { return weight(c) * ((c == label ? 1 - smoothing : 0) + smoothing / 3); };
      for (std::size_t c = 0; c < 3; ++c) {
        losses[s] += q(c) * (std::log(sum) - static_cast<double>(kScores[base + 2 * c]));
        mass += q(c);
      }
      for (std::size_t c = 0; c < 3; ++c) {
        gradients[base + 2 * c] = mass * std::exp(static_cast<double>(kScores[base + 2 * c])) / sum - q(c);
      }
      divisor += weight(label);
    }
  }
};

TEST_F(SimTraining, CrossEntropyForwardAndBackward) {
  const DeviceTensor x = queue.tensor(kScores, {2, 3, 2}), labels = queue.tensor(kLabels, {2, 2});
  const DeviceTensor weights = queue.tensor(std::vector<float>(kWeights.begin(), kWeights.end()));
  for (const double smoothing : {0.0, 0.1}) {
    for (const bool weighted : {false, true}) {
      const Reference expected(smoothing, weighted);
      for (const int32_t reduction : {0, 1, 2}) {
        const halfstep_class_loss_attributes a = {reduction, -100, smoothing, 3, -1};
        const DeviceTensor w = weighted ? weights : DeviceTensor{};
        const DeviceTensor loss = reduction == 0 ? queue.empty({2, 2}) : queue.empty({});
        const DeviceTensor parts = queue.empty({2, 2, 2}), divisor = queue.empty({}), back = queue.empty({2, 3, 2});
        call("cross_entropy", HALFSTEP_F32, {x, labels, w}, {loss, parts, divisor}, &a);
        const auto got = doubles(loss);
        const double d = reduction == 1 ? expected.divisor : 1;
        double total = 0;
        for (double v : expected.losses) total += v / d;
        for (std::size_t i = 0; i < got.size(); ++i) {
          EXPECT_NEAR(got[i], reduction == 0 ? expected.losses[i] : total, 1e-6) << reduction;
        }
        EXPECT_NEAR(doubles(divisor)[0], d, 1e-6);
        const DeviceTensor g = reduction == 0 ? queue.tensor(std::vector<float>(4, 3), {2, 2}) : number(3);
        call("cross_entropy_backward", HALFSTEP_F32, {g, x, labels, w, divisor, parts}, {back}, &a);
        const auto slope = doubles(back);
        for (std::size_t i = 0; i < slope.size(); ++i) EXPECT_NEAR(slope[i], 3 * expected.gradients[i] / d, 2e-6) << i;
      }
    }
  }
}

TEST_F(SimTraining, LargeScoresDoNotOverflow) {
  const DeviceTensor x = make({60000, -60000, 59999}, {1, 3}, HALFSTEP_F16),
                     label = queue.tensor(std::vector<int64_t>{2});
  const DeviceTensor loss = queue.empty({}, HALFSTEP_F16), parts = queue.empty({2, 1}), divisor = queue.empty({});
  const halfstep_class_loss_attributes a = {1, -100, 0, 3, -1};
  call("cross_entropy", HALFSTEP_F16, {x, label, {}}, {loss, parts, divisor}, &a);
  // Both are 60000 in f16: two equal scores.
  EXPECT_NEAR(doubles(loss)[0], std::log(2), 5e-4);
}

TEST_F(SimTraining, AWrongLabelFailsWithItsSample) {
  const DeviceTensor x = queue.tensor(kScores, {4, 3}), labels = queue.tensor(std::vector<int64_t>{0, 1, 3, 9});
  const DeviceTensor loss = queue.empty({}), parts = queue.empty({2, 4}), divisor = queue.empty({});
  const halfstep_class_loss_attributes a = {1, -100, 0, 3, -1};
  call("cross_entropy", HALFSTEP_F32, {x, labels, {}}, {loss, parts, divisor}, &a);
  EXPECT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_FAILED);
  const auto error = last_error();
  EXPECT_STREQ(error.text, "expected class indices from 0 to 2 (or the ignore_index -100), got 3 for sample 2 of 4");
  EXPECT_EQ(error.call, 7u);
}

// --- gradient scaling

TEST_F(SimTraining, UnscalesChecksAndTakesTheNorm) {
  const DeviceTensor scale = number(1024), a = make({1024, 0x1p-14f, 2048}, {3}, HALFSTEP_F16),
                     b = make({-512, 3072}, {2}, HALFSTEP_F32), c = make({512}, {1}, HALFSTEP_BF16);
  const DeviceTensor found = number(0), each = queue.tensor(std::vector<float>{0, 0, 0}), norm = number(0),
                     wide = queue.empty({3});
  call("amp_unscale", HALFSTEP_F32, {scale, a, b, c}, {found, each, norm, wide, b, c});
  EXPECT_EQ(doubles(wide), (std::vector<double>{1, 0x1p-24, 2}));
  EXPECT_EQ(doubles(b), (std::vector<double>{-0.5, 3}));
  EXPECT_EQ(doubles(c), (std::vector<double>{0.5}));
  EXPECT_NEAR(doubles(norm)[0], std::sqrt(1 + 4 + 0.25 + 9 + 0.25), 1e-6);
  EXPECT_EQ(doubles(found)[0], 0);
  // Infinities, and what unscaling by a small scale makes one; what was found is never taken back.
  const DeviceTensor small = number(0x1p-10f), bad = make({1, static_cast<float>(-kInf)}, {2}, HALFSTEP_F32),
                     large = make({0x1p120f}, {1}, HALFSTEP_F32), none = DeviceTensor{};
  call("amp_unscale", HALFSTEP_F32, {small, large, b, bad}, {found, each, none, large, b, bad});
  EXPECT_EQ(doubles(found)[0], 1);
  EXPECT_EQ(doubles(each), (std::vector<double>{1, 0, 1}));
  EXPECT_EQ(doubles(b)[1], 3072);
  call("amp_unscale", HALFSTEP_F32, {scale, b}, {found, each, none, b});
  EXPECT_EQ(doubles(found)[0], 1);
}

TEST_F(SimTraining, ChecksWithoutWriting) {
  const DeviceTensor scale = number(2), fine = make({1, 2}, {2}, HALFSTEP_F32),
                     bad = make({static_cast<float>(kInf)}, {1}, HALFSTEP_F16);
  const DeviceTensor found = number(0), each = queue.tensor(std::vector<float>{0, 0}),
                     unknown = queue.tensor(std::vector<float>{1e38f, static_cast<float>(kInf)}),
                     known = queue.tensor(std::vector<float>{10, 10});
  call("amp_check", HALFSTEP_F32, {scale, fine, bad, known}, {found, each});
  EXPECT_EQ(doubles(found)[0], 0) << "a bound says that nothing need be read";
  call("amp_check", HALFSTEP_F32, {scale, fine, bad, unknown}, {found, each});
  EXPECT_EQ(doubles(found)[0], 1);
  EXPECT_EQ(doubles(each), (std::vector<double>{0, 1}));
  EXPECT_EQ(doubles(fine), (std::vector<double>{1, 2}));
}

TEST_F(SimTraining, TheScaleFollowsWhatWasFound) {
  const DeviceTensor scale = number(8), counters = queue.tensor(std::vector<int32_t>(HALFSTEP_SCALE_COUNTERS)),
                     yes = number(1), no = number(0);
  halfstep_scale_update_attributes a = {.growth_factor = 2,
                                        .backoff_factor = 0.5,
                                        .growth_interval = 2,
                                        .hysteresis = 1,
                                        .restart = 0,
                                        .floor = 3,
                                        .cap = 20,
                                        .refill_on_good_step = 0};
  const auto update = [&](const DeviceTensor& first, const DeviceTensor& second) {
    call("amp_update_scale", HALFSTEP_F32, {scale, counters, first, second}, {scale, counters}, &a);
    return std::pair(doubles(scale)[0], doubles(counters));
  };
  // growth, used, in a row, at the floor, stuck
  EXPECT_EQ(update(no, no), std::pair(8.0, std::vector<double>{1, 0, 0, 0, 0}));
  EXPECT_EQ(update(no, no), std::pair(16.0, std::vector<double>{0, 0, 0, 0, 0}));
  EXPECT_EQ(update(no, yes), std::pair(8.0, std::vector<double>{0, 1, 1, 0, 0}));
  EXPECT_EQ(update(yes, no), std::pair(4.0, std::vector<double>{0, 1, 2, 0, 0}));
  EXPECT_EQ(update(yes, yes), std::pair(3.0, std::vector<double>{0, 1, 3, 1, 0})) << "the floor";
  EXPECT_EQ(update(yes, yes), std::pair(3.0, std::vector<double>{0, 1, 4, 2, 1})) << "stuck";
  for (int i = 0; i < 6; ++i) update(no, no);
  EXPECT_EQ(doubles(scale)[0], 20) << "the cap";
  a.hysteresis = 2;
  a.restart = -1;
  EXPECT_EQ(update(yes, no), std::pair(20.0, std::vector<double>{-1, 1, 1, 2, 1})) << "borne";
  EXPECT_EQ(update(yes, no), std::pair(10.0, std::vector<double>{-1, 2, 2, 2, 1}));
  const DeviceTensor flag = queue.tensor(std::vector<uint8_t>{1}, {1}, HALFSTEP_BOOL);
  EXPECT_EQ(update(no, flag), std::pair(5.0, std::vector<double>{-1, 2, 3, 2, 1})) << "a bool";
  EXPECT_EQ(update(no, no), std::pair(5.0, std::vector<double>{0, 2, 0, 2, 1}));
  a.refill_on_good_step = 1;
  EXPECT_EQ(update(no, no), std::pair(5.0, std::vector<double>{1, 0, 0, 2, 1}));
}

TEST_F(SimTraining, TellsWhetherAllIsFinite) {
  const DeviceTensor result = queue.tensor(std::vector<uint8_t>{0}, {1}, HALFSTEP_BOOL),
                     a = make({1, -2, 3e38f}, {3}, HALFSTEP_F32), b = make({65504}, {1}, HALFSTEP_F16),
                     c = make({3e38f}, {1}, HALFSTEP_BF16);
  for (const double bad : {kInf, -kInf, std::nan("")}) {
    call("all_finite", HALFSTEP_F32, {a, b, c}, {result});
    EXPECT_EQ(doubles(result)[0], 1);
    const DeviceTensor d = queue.tensor(std::vector<double>{0, bad});
    call("all_finite", HALFSTEP_F32, {a, d, b}, {result});
    EXPECT_EQ(doubles(result)[0], 0) << bad;
  }
}

// --- optimizers

class SimOptimizer : public SimTraining {
 protected:
  DeviceTensor hyper() { return queue.tensor(std::vector<double>{0.1, 0}); }
  DeviceTensor none;
};

TEST_F(SimOptimizer, SgdWithMomentum) {
  const DeviceTensor p = queue.tensor(std::vector<double>{1, -2}), g = queue.tensor(std::vector<double>{0.5, 0.25}),
                     steps = queue.tensor(std::vector<int64_t>{0}), buffer = queue.tensor(std::vector<double>{9, 9});
  const halfstep_sgd_attributes a = {0.9, 0.5, 0.01, 1, 0};
  double value[2] = {1, -2}, momentum[2];
  for (int step = 1; step <= 3; ++step) {
    call("sgd_step", HALFSTEP_F64, {hyper(), none, none, none, g}, {steps, p, none, none, none, none, buffer}, &a);
    for (int i = 0; i < 2; ++i) {
      const double d = (i == 0 ? 0.5 : 0.25) + 0.01 * value[i];
      momentum[i] = step == 1 ? d : 0.9 * momentum[i] + 0.5 * d;
      value[i] -= 0.1 * (d + 0.9 * momentum[i]);
    }
    const auto now = doubles(p);
    for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(now[i], value[i], 1e-15);
  }
  EXPECT_EQ(queue.read<int64_t>(steps)[0], 3);
}

TEST_F(SimOptimizer, AdamWithDecoupledDecayAndAmsgrad) {
  const DeviceTensor p = queue.tensor(std::vector<double>{1}), steps = queue.tensor(std::vector<int64_t>{0});
  const DeviceTensor m = queue.tensor(std::vector<double>{0}), v = queue.tensor(std::vector<double>{0}),
                     top = queue.tensor(std::vector<double>{0});
  const halfstep_adam_attributes a = {0.9, 0.99, 1e-8, 0.1, 1, 0, 1};
  double value = 1, first = 0, second = 0, largest = 0;
  for (int step = 1; step <= 3; ++step) {
    const double gradient = step == 1 ? 2 : 0.5;
    const DeviceTensor g = queue.tensor(std::vector<double>{gradient});
    call("adam_step", HALFSTEP_F64, {hyper(), none, none, none, g}, {steps, p, none, none, none, none, m, v, top}, &a);
    value *= 1 - 0.1 * 0.1;
    first = 0.9 * first + 0.1 * gradient;
    second = 0.99 * second + 0.01 * gradient * gradient;
    largest = std::max(largest, second);
    value -= 0.1 * (first / (1 - std::pow(0.9, step))) / (std::sqrt(largest / (1 - std::pow(0.99, step))) + 1e-8);
    EXPECT_NEAR(doubles(p)[0], value, 1e-14);
  }
}

TEST_F(SimOptimizer, ScaledStepsKeepMasterAndCopiesTogether) {
  const DeviceTensor half = make({1, 2}, {2}, HALFSTEP_F16), master = queue.tensor(std::vector<float>{1, 2}),
                     g = make({1024, 1024}, {2}, HALFSTEP_F16), wide = queue.empty({2});
  const DeviceTensor plain = queue.tensor(std::vector<float>{1}), copy = make({1}, {1}, HALFSTEP_BF16),
                     g2 = queue.tensor(std::vector<float>{0x1p-3f * 1024});
  const DeviceTensor steps = queue.tensor(std::vector<int64_t>{0, 0, 0}), scale = number(1024);
  const DeviceTensor untouched = queue.tensor(std::vector<float>{5});
  const halfstep_sgd_attributes a = {0, 0, 0, 0, 0};
  const std::vector<DeviceTensor> out = {steps, half, master, none,      none, wide, plain, none,
                                         none,  copy, g2,     untouched, none, none, none,  none};
  // Not taken: gradients are unscaled all the same, so that they look alike after any step.
  call("sgd_step", HALFSTEP_F32, {hyper(), none, number(1), scale, g, g2, none}, out, &a);
  EXPECT_EQ(doubles(master), (std::vector<double>{1, 2}));
  EXPECT_EQ(doubles(wide), (std::vector<double>{1, 1}));
  EXPECT_EQ(doubles(g2)[0], 0.125);
  EXPECT_EQ(doubles(steps), (std::vector<double>{0, 0, 0}));
  const DeviceTensor again = queue.tensor(std::vector<float>{128});
  call("copy", HALFSTEP_F32, {g2, again}, {g2});
  call("sgd_step", HALFSTEP_F32, {hyper(), none, number(0), scale, g, g2, none}, out, &a);
  EXPECT_EQ(doubles(steps), (std::vector<double>{1, 1, 0}));
  EXPECT_EQ(doubles(master), (std::vector<double>{static_cast<double>(0.9f), static_cast<double>(1.9f)}));
  EXPECT_EQ(doubles(half), (std::vector<double>{0x1.cccp-1, 0x1.e68p+0}));  // 0.9 and 1.9 to 11 digits
  EXPECT_EQ(doubles(plain)[0], static_cast<double>(0.9875f));
  EXPECT_EQ(doubles(copy)[0], 0x1.fap-1);  // 0.9875 to 8 digits
  EXPECT_EQ(doubles(untouched)[0], 5);
}

TEST_F(SimOptimizer, WhatItCanNotDoIsUnsupported) {
  const DeviceTensor p = make({1}, {1}, HALFSTEP_BF16), g = make({1}, {1}, HALFSTEP_BF16),
                     lost = make({0}, {1}, HALFSTEP_BF16);
  const DeviceTensor steps = queue.tensor(std::vector<int64_t>{0}), random = queue.tensor(std::vector<int64_t>{1, 2});
  const halfstep_sgd_attributes a = {0, 0, 0, 0, 0};
  EXPECT_EQ(
      queue.call("sgd_step", HALFSTEP_F32, {hyper(), random, none, none, g}, {steps, p, none, none, none, none}, &a),
      HALFSTEP_UNSUPPORTED);
  EXPECT_EQ(
      queue.call("sgd_step", HALFSTEP_F32, {hyper(), none, none, none, g}, {steps, p, none, lost, none, none}, &a),
      HALFSTEP_UNSUPPORTED);
  EXPECT_EQ(queue.reason, "compensated weights are not updated on this device");
  EXPECT_EQ(doubles(p)[0], 1);
  EXPECT_EQ(queue.read<int64_t>(steps)[0], 0);
}

}  // namespace
}  // namespace halfstep::test
