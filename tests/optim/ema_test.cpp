// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/ema.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/create.h"
#include "tests/optim/optim_golden.h"

namespace halfstep {
namespace {

void set(const Tensor& t, const std::vector<double>& values) {
  NoGrad no_grad;
  Tensor(t).copy_(tensor(values, t.sizes(), {.dtype = f64}));
}

TEST(EmaGolden, Averages) {
  for (const test::GoldenEntry& e : goldens_of({"ema", "swa"})) {
    const Tensor w = zeros({4}, {.dtype = f64, .requires_grad = true});
    optim::EMA ema({{"w", w}}, {.decay = e.real("decay", 0.5), .equal = e.op == "swa"});
    for (std::int64_t s = 0; s < 12; ++s) {
      set(w, row_of(e.inputs[0], s));
      ema.update();
      expect_near(ema.averages()[0].tensor.to_vector<double>(), row_of(e.outputs[0], s), drift_bound(e, 12),
                  e.name + " update " + std::to_string(s));
    }
    EXPECT_EQ(ema.updates(), 12);
  }
}

// 1 / 1024 of a bf16 weight is lost in bf16 and kept in float32.
TEST(Ema, AveragesLowPrecisionInFloat32AndSwaps) {
  const Tensor w = ones({3000}, {.dtype = bf16, .requires_grad = true});
  optim::EMA ema({{"w", w}, {"count", zeros({}, {.dtype = i64})}}, {.decay = 1 - 0x1p-10});
  ASSERT_EQ(ema.averages().size(), 1u) << "integers are left out";
  ema.update();
  set(w, std::vector<double>(3000, 2));
  ema.update();
  EXPECT_EQ(ema.averages()[0].tensor.dtype(), f32);
  EXPECT_EQ(ema.averages()[0].tensor.to_vector<double>(), std::vector<double>(3000, 1 + 0x1p-10));
  ema.swap();
  EXPECT_EQ(w.to_vector<double>()[0], 1);
  EXPECT_THROW(ema.update(), Error);
  ema.swap();
  EXPECT_EQ(w.to_vector<double>()[2999], 2);
  EXPECT_FALSE(ema.is_swapped());
}

// Work is cut into chunks of 16384 and, in 16 bits, blocks of 1024: every element has its own average.
TEST(Ema, LargeParametersInEveryDType) {
  for (const DType dtype : {f32, f64, bf16}) {
    const Tensor w = zeros({40000}, {.dtype = dtype, .requires_grad = true});
    optim::EMA ema({{"w", w}}, {.decay = 0.75});
    ema.update();
    std::vector<double> values;
    for (int i = 0; i < 40000; ++i) values.push_back(i % 251);  // bf16 has 8 bits
    set(w, values);
    ema.update();
    const auto v = ema.averages()[0].tensor.to_vector<double>();
    for (std::size_t i = 0; i < v.size(); ++i) ASSERT_EQ(v[i], 0.25 * values[i]) << name(dtype) << " " << i;
  }
}

TEST(Ema, WarmUpFollowsItsFormula) {
  const Tensor w = zeros({1}, {.dtype = f64, .requires_grad = true});
  optim::EMA ema({{"w", w}}, {.decay = 0.9, .warmup = 5});
  double expected = 0;
  for (int i = 0; i < 8; ++i) {
    set(w, {static_cast<double>(i * i)});
    ema.update();
    const double decay = i == 0 ? 0 : 0.9 * (1 - std::exp(-i / 5.0));
    expected = decay * expected + (1 - decay) * i * i;
    EXPECT_NEAR(ema.averages()[0].tensor.item<double>(), expected, 1e-13) << i;
  }
}

TEST(Ema, SkippedStepsAreNotCounted) {
  const Tensor w = ones({2}, {.requires_grad = true});
  optim::EMA ema({{"w", w}}, {.decay = 0.5});
  ema.update_unless(ones({}));
  EXPECT_EQ(ema.updates(), 0);
  ema.update_unless(zeros({}));
  set(w, {3, 3});
  ema.update_unless(ones({}));
  EXPECT_EQ(ema.averages()[0].tensor.to_vector<float>(), (std::vector<float>{1, 1}));
  ema.update_unless(full({}, 1, {.dtype = boolean}));
  EXPECT_EQ(ema.averages()[0].tensor.to_vector<float>(), (std::vector<float>{1, 1}));
  EXPECT_THROW(ema.update_unless(zeros({2})), Error);
  ema.update(amp::StepResult{});
  EXPECT_EQ(ema.averages()[0].tensor.to_vector<float>(), (std::vector<float>{2, 2}));
}

TEST(Ema, StateRoundTrips) {
  const Tensor w = ones({2}, {.requires_grad = true});
  optim::EMA a({{"w", w}}, {.decay = 0.5}), b({{"w", w}}, {.decay = 0.5});
  a.update();
  set(w, {5, -1});
  a.update();
  b.load_state_dict(a.state_dict());
  a.update();
  b.update();
  EXPECT_EQ(b.averages()[0].tensor.to_vector<float>(), (std::vector<float>{4, -0.5}));
  EXPECT_EQ(a.averages()[0].tensor.to_vector<float>(), b.averages()[0].tensor.to_vector<float>());
  EXPECT_THROW(b.load_state_dict({}), Error);
  EXPECT_THROW(b.load_state_dict({{{"v", ones({2})}}, {{"updates", 1}}}), Error);
  EXPECT_THROW(b.load_state_dict({{{"w", ones({3})}}, {{"updates", 1}}}), ShapeError);
  EXPECT_THROW((optim::EMA({}, {.decay = 1.5})), Error);
}

}  // namespace
}  // namespace halfstep
