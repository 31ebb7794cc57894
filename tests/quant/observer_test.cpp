// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/observer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/no_samples_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "tests/support/errors.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using quant::Observer;
using quant::ObserverKind;
using quant::ObserverOptions;
using test::GoldenEntry;

const float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<double> numbers(const Tensor& t) { return t.to_vector<double>(); }

// Every number is bit-identical to that of PyTorch's observer, after each batch.
TEST(Observers, ArePyTorchsBitForBit) {
  int run = 0;
  for (const GoldenEntry& e : test::read_goldens("quantize.json")) {
    if (e.op != "observer") continue;
    SCOPED_TRACE(e.name + " " + e.torch);
    ++run;
    ObserverOptions options{.kind = *quant::parse_observer_kind(e.text("kind")),
                            .quant_min = e.integer("quant_min"),
                            .quant_max = e.integer("quant_max"),
                            .symmetric = e.flag("symmetric"),
                            .averaging_constant = e.real("averaging_constant", 0.01),
                            .bins = e.integer("bins", 2048)};
    if (e.has("axis")) {
      options.axis = e.integer("axis");
      options.channels = e.tensor("batch0").shape[static_cast<std::size_t>(*options.axis)];
    }
    const Observer observer(options);
    if (e.text("kind") != "entropy") {
      EXPECT_EQ(observer.kind(), e.torch);
    }
    for (std::int64_t i = 0; i < e.integer("batches"); ++i) {
      const auto of = [&](const char* what) { return e.tensor(what + std::to_string(i)).data; };
      const Tensor x = test::to_tensor(e.tensor("batch" + std::to_string(i)));
      EXPECT_EQ(numbers(observer(x)), numbers(x));
      EXPECT_EQ(numbers(observer.min_val), of("min")) << i;
      EXPECT_EQ(numbers(observer.max_val), of("max")) << i;
      if (observer.histogram.defined()) {
        EXPECT_EQ(numbers(observer.histogram), of("histogram")) << i;
      }
      const auto [scale, zero] = observer.calculate_qparams();
      EXPECT_EQ(numbers(scale), of("scale")) << i;
      EXPECT_EQ(numbers(zero), of("zero")) << i;
    }
  }
  EXPECT_GT(run, 20);
}

// The bound is an edge of a bin, computed by numpy from the same counts.
TEST(Observers, EntropyFindsTheLeastDivergence) {
  int run = 0;
  for (const GoldenEntry& e : test::read_goldens("quantize.json")) {
    if (e.op != "entropy") continue;
    SCOPED_TRACE(e.name);
    ++run;
    const Observer observer({.kind = ObserverKind::entropy,
                             .quant_min = e.integer("quant_min"),
                             .quant_max = e.integer("quant_max"),
                             .symmetric = true,
                             .bins = e.integer("bins")});
    observer(test::to_tensor(e.inputs[0]));
    const double steps = static_cast<double>(e.integer("quant_max") - e.integer("quant_min"));
    // Three roundings in float32.
    EXPECT_NEAR(observer.calculate_qparams().scale.item<double>() * steps / 2, e.outputs[0].data[0],
                3 * 0x1p-24 * e.outputs[0].data[0]);
  }
  EXPECT_GT(run, 3);
}

TEST(Observers, PercentileHoldsItsShareOfTheValues) {
  Tensor x;
  for (const GoldenEntry& e : test::read_goldens("quantize.json")) {
    if (e.op != "percentile") continue;
    SCOPED_TRACE(e.name);
    if (!e.inputs.empty()) x = test::to_tensor(e.inputs[0]);
    const ObserverOptions options{.kind = ObserverKind::percentile, .bins = 4096, .percentile = e.real("percentile")};
    const Observer both(options), one(options);
    both(x);
    one(abs(x));
    // numpy's quantile lies between two neighbours of the sorted values; a histogram counts the same share a value
    // earlier or later, to a bin, and the zero point moves both ends by half a step.
    const auto [scale, zero] = both.calculate_qparams();
    const double low = -scale.item<double>() * zero.item<double>(), top = low + 255 * scale.item<double>();
    const auto expect_quantile = [](double got, double want, std::vector<double> values, double slack) {
      std::sort(values.begin(), values.end());
      const auto after = std::upper_bound(values.begin(), values.end(), want) - values.begin();
      const auto at = [&](std::ptrdiff_t k) {
        return values[static_cast<std::size_t>(std::clamp<std::ptrdiff_t>(k, 0, std::ssize(values) - 1))];
      };
      EXPECT_GE(got, at(after - 2) - slack);
      EXPECT_LE(got, at(after + 1) + slack);
    };
    const double bin = (both.max_val.item<double>() - both.min_val.item<double>()) / 4096;
    const double slack = bin + scale.item<double>() / 2;
    expect_quantile(low, e.outputs[0].data[0], numbers(x), slack);
    expect_quantile(top, e.outputs[0].data[1], numbers(x), slack);
    expect_quantile(255 * one.calculate_qparams().scale.item<double>(), e.outputs[0].data[2], numbers(abs(x)), bin);
    EXPECT_EQ(one.calculate_qparams().zero_point.item<double>(), 0);
  }
  ASSERT_TRUE(x.defined());
  // Of evenly spread values every quantile is known to a bin: 1 / 4096 of 2, and the zero point rounds by half a step.
  const Observer even({.kind = ObserverKind::percentile, .symmetric = true, .bins = 4096, .percentile = 90});
  even(linspace(-1, 1, 100001));
  EXPECT_NEAR(even.calculate_qparams().scale.item<double>() * 127.5, 0.9, 2.0 / 4096);
}

TEST(Observers, WhatIsNotFiniteIsNeverSeen) {
  for (const ObserverKind kind : {ObserverKind::min_max, ObserverKind::moving_average, ObserverKind::histogram,
                                  ObserverKind::percentile, ObserverKind::entropy}) {
    const Observer observer({.kind = kind, .bins = 64, .percentile = 100}), clean = nn::clone(observer);
    observer(tensor({kNan, kInf, -kInf}));
    EXPECT_EQ(observer.min_val.item<float>(), kInf) << quant::name(kind);
    EXPECT_EQ(observer.calculate_qparams().scale.item<float>(), 1);
    observer(tensor({kNan, -1, 2, kInf}));
    observer(tensor({-kInf}));
    clean(tensor({-1, 2}));
    EXPECT_EQ(observer.min_val.item<float>(), -1);
    EXPECT_EQ(observer.max_val.item<float>(), 2);
    EXPECT_EQ(numbers(observer.calculate_qparams().scale), numbers(clean.calculate_qparams().scale));
    observer(zeros({0}));
    observer.reset_min_max_vals();
    EXPECT_EQ(observer.max_val.item<float>(), -kInf);
  }
}

TEST(Observers, AStepThatWasSkippedLeavesNoTrace) {
  for (const ObserverKind kind : {ObserverKind::min_max, ObserverKind::moving_average, ObserverKind::histogram}) {
    SCOPED_TRACE(quant::name(kind));
    const Observer observer({.kind = kind, .bins = 32});
    const auto state = [&] {
      std::vector<double> all;
      for (const auto& t : observer.state_dict()) {
        for (const double v : numbers(t.tensor)) all.push_back(v);
      }
      return all;
    };
    const Tensor overflow = tensor({1.0}), none = tensor({0.0});
    observer(tensor({-1, 1}));
    const auto first = state();
    observer.commit(none);
    EXPECT_EQ(state(), first);
    // Several inputs of one step: they are pending together, and used.
    observer(tensor({-100, 1}));
    observer(tensor({-1, 1e4}));
    EXPECT_NE(state(), first);
    observer.commit(overflow);
    EXPECT_EQ(state(), first);
    observer.commit(overflow);  // nothing is pending
    EXPECT_EQ(state(), first);
    observer(tensor({-3, 5}));
    const auto second = state();
    observer.commit();
    observer.commit(overflow);
    EXPECT_EQ(state(), second);
    // A bool is as good, and a state that was loaded is what a skipped step falls back to.
    const Observer other({.kind = kind, .bins = 32});
    other(tensor({-7, 8}));
    observer.load_state_dict(other.state_dict());
    const auto loaded = state();
    observer(tensor({-70, 80}));
    observer.commit(tensor({1.0}).to(boolean));
    EXPECT_EQ(state(), loaded);
  }
}

// What a rank without samples computes with isn't its data.
TEST(Observers, DoNotSeeWhatStandsInForNoSamples) {
  for (const ObserverKind kind : {ObserverKind::min_max, ObserverKind::moving_average, ObserverKind::histogram}) {
    const Observer observer({.kind = kind, .bins = 8});
    observer(tensor({-1.0, 2.0}));
    const std::vector<double> low = numbers(observer.min_val), high = numbers(observer.max_val);
    {
      const nn::detail::NoSamples none(true);
      EXPECT_EQ(numbers(observer(tensor({-5.0, 7.0}))), (std::vector<double>{-5, 7}));
    }
    EXPECT_EQ(numbers(observer.min_val), low);
    EXPECT_EQ(numbers(observer.max_val), high);
    observer(tensor({-5.0, 7.0}));
    EXPECT_NE(numbers(observer.max_val), high);
  }
}

TEST(Observers, AreCapturedAndReplayed) {
  const Observer observer({.axis = 1, .channels = 3}), plain = nn::clone(observer);
  const auto step_of = [](const Observer& o) {
    return [o](const Tensor& x, const Tensor& found_inf) {
      o(x);
      const auto [scale, zero] = o.calculate_qparams();
      o.commit(found_inf);
      return std::vector<Tensor>{scale, zero, o.min_val.clone()};
    };
  };
  auto fast = capture(step_of(observer));
  const auto slow = step_of(plain);
  for (int i = 0; i < 8; ++i) {
    const Tensor x = randn({4, 3, 5}) * (i + 1), found = full({1}, i % 3 == 1 ? 1.0 : 0.0);
    const auto got = fast(x, found), want = slow(x, found);
    for (std::size_t k = 0; k < got.size(); ++k) EXPECT_EQ(numbers(got[k]), numbers(want[k])) << i;
  }
  EXPECT_EQ(fast.stats().replayed, 6U) << fast.why_not();
}

TEST(Observers, HaveIndependentClonesAndFloat32Ranges) {
  const Observer observer({.kind = ObserverKind::min_max});
  observer(tensor({-1, 1}));
  const Observer copy = observer, own = nn::clone(observer);
  copy(tensor({-2, 1}));
  EXPECT_EQ(observer.min_val.item<float>(), -2);
  EXPECT_EQ(own.min_val.item<float>(), -1);
  observer.to(f64);
  observer(tensor({-3, 1}, {.dtype = f64}));
  EXPECT_EQ(observer.min_val.dtype(), f32);
  EXPECT_EQ(observer.min_val.item<float>(), -3);
  observer.to(f16);
  EXPECT_EQ(observer.min_val.dtype(), f32);
}

TEST(Observers, RefuseOptionsThatDoNotGoTogether) {
  EXPECT_THROW(Observer({.quant_min = 3, .quant_max = 3}), Error);
  EXPECT_THROW(Observer({.axis = 0}), Error);
  EXPECT_THROW(Observer({.channels = 4}), Error);
  EXPECT_THROW(Observer({.kind = ObserverKind::histogram, .axis = 0, .channels = 4}), Error);
  EXPECT_THROW(Observer({.averaging_constant = 1.5}), Error);
  EXPECT_THROW(Observer({.eps = 0}), Error);
  EXPECT_THROW(Observer({.bins = 1}), Error);
  EXPECT_THROW(Observer({.percentile = 0}), Error);
  const Observer observer({.axis = 1, .channels = 3});
  EXPECT_THROW(observer(zeros({2, 4})), ShapeError);
  EXPECT_THROW(observer(zeros({2, 3}, {.dtype = i32})), DTypeError);
  EXPECT_THROW(observer(Tensor()), Error);
  observer(zeros({2, 3}));
  EXPECT_THROW(observer.commit(zeros({2})), Error);
  EXPECT_FALSE(quant::parse_observer_kind("largest").has_value());
}

}  // namespace
}  // namespace halfstep
