// SPDX-License-Identifier: Apache-2.0
// Gradients at infinities and NaN. The tables were printed by PyTorch 2.15 (float64, gradient 2 for each element);
// where PyTorch itself has NaN at an infinity, ours is the limit and isn't in them.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "halfstep/autograd/engine.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

const Values kInputs = {-kInf, -1e30, -4, -3, -1, -0.0, 0, 1, 3, 4, 6, 7, kInf, kNaN};

void expect_near(const Values& got, const Values& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::string where = what + " at " + std::to_string(i);
    if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(got[i])) << where << ": " << got[i];
    } else if (std::isinf(expected[i])) {
      EXPECT_EQ(got[i], expected[i]) << where;
    } else {
      EXPECT_NEAR(got[i], expected[i], tolerance) << where;
    }
  }
}

struct Row {
  const char* name;
  std::function<Tensor(const Tensor&)> f;
  Values slopes;  // times 2
};
const std::vector<Row>& rows() {
  static const std::vector<Row> all = {
      {"relu", [](const Tensor& x) { return relu(x); }, {0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2}},
      {"relu6", [](const Tensor& x) { return relu6(x); }, {0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 0, 0, 0, 2}},
      {"hardtanh", [](const Tensor& x) { return hardtanh(x); }, {0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 2}},
      {"hardtanh from -inf",
       [](const Tensor& x) { return hardtanh(x, -kInf, 6); },
       {0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 2}},
      {"hardsigmoid",
       [](const Tensor& x) { return hardsigmoid(x); },
       {0, 0, 0, 0, 1.0 / 3, 1.0 / 3, 1.0 / 3, 1.0 / 3, 0, 0, 0, 0, 0, 0}},
      {"hardswish",
       [](const Tensor& x) { return hardswish(x); },
       {0, 0, 0, 0, 1.0 / 3, 1, 1, 5.0 / 3, 2, 2, 2, 2, 2, 2}},
      {"elu",
       [](const Tensor& x) { return elu(x); },
       {0, 0, 0.036631278, 0.099574137, 0.735758882, 2, 2, 2, 2, 2, 2, 2, 2, 2}},
      {"elu 2",
       [](const Tensor& x) { return elu(x, 2); },
       {0, 0, 0.073262556, 0.199148273, 1.471517765, 4, 4, 2, 2, 2, 2, 2, 2, 2}},
      {"selu",
       [](const Tensor& x) { return selu(x); },
       {0, 0, 0.064401425, 0.175061224, 1.293537206, 3.516198682, 3.516198682, 2.101401975, 2.101401975, 2.101401975,
        2.101401975, 2.101401975, 2.101401975, 2.101401975}},
      {"gelu, tanh",
       [](const Tensor& x) { return gelu(x, GeluForm::tanh); },
       // PyTorch has NaN at the infinities.
       {0, 0, -6.702464e-4, -0.023168333, -0.165928168, 1, 1, 2.165928168, 2.023168333, 2.000670246, 2, 2, 2, kNaN}},
      {"leaky_relu",
       [](const Tensor& x) { return leaky_relu(x); },
       {0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 2, 2, 2, 2, 2, 2, 0.02}},
      {"threshold", [](const Tensor& x) { return threshold(x, 1, 5); }, {0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2}},
      {"clamp from 0", [](const Tensor& x) { return clamp(x, 0); }, {0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 0}},
      {"clamp to 1",
       [](const Tensor& x) { return clamp(x, std::nullopt, 1); },
       {2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0}},
      {"clamp_min", [](const Tensor& x) { return clamp_min(x, 0); }, {0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 0}},
      {"clamp_max", [](const Tensor& x) { return clamp_max(x, 1); }, {2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0}},
      {"clamp", [](const Tensor& x) { return clamp(x, 0, 6); }, {0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 0, 0, 0, 0}},
      {"clamp by tensors",
       [](const Tensor& x) { return clamp(x, zeros({}, {.dtype = x.dtype()}), full({}, 6, {.dtype = x.dtype()})); },
       {0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 1, 0, 0, 2}},
      {"abs", [](const Tensor& x) { return abs(x); }, {-2, -2, -2, -2, -2, 0, 0, 2, 2, 2, 2, 2, 2, 0}},
      {"nan_to_num", [](const Tensor& x) { return nan_to_num(x); }, {0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0}},
      {"softplus",
       [](const Tensor& x) { return softplus(x); },
       {0, 0, 0.035972419, 0.094851746, 0.537882843, 1, 1, 1.462117157, 1.905148254, 1.964027581, 1.995054753,
        1.998177896, 2, kNaN}},
      {"logsigmoid",
       [](const Tensor& x) { return logsigmoid(x); },
       {2, 2, 1.964027581, 1.905148254, 1.462117157, 1, 1, 0.537882843, 0.094851746, 0.035972419, 0.004945247,
        0.001822104, 0, kNaN}},
      {"prelu",
       [](const Tensor& x) { return prelu(x, full({1}, 0.25, {.dtype = x.dtype()})); },
       {0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 2, 2, 2, 2, 2, 2, 0.5}},
  };
  return all;
}

TEST(SpecialValues, SlopesAreThoseOfPyTorch) {
  for (const Row& row : rows()) {
    for (const DType dtype : {f64, f32, bf16, f16}) {
      for (const bool recorded : {false, true}) {
        // -1e30 is -infinity in f16, where slopes may differ: it is left out.
        Values inputs = kInputs, expected = row.slopes;
        if (dtype == f16) {
          inputs.erase(inputs.begin() + 1);
          expected.erase(expected.begin() + 1);
        }
        const Tensor x = tensor(inputs, {.dtype = dtype, .requires_grad = true});
        const Tensor y = row.f(x);
        const Tensor g =
            grad({y}, {x}, {.grad_outputs = {full(y.sizes(), 2, {.dtype = dtype})}, .create_graph = recorded})[0];
        const double tolerance = dtype == f64 ? 1e-6 : dtype == f32 ? 2e-6 : dtype == f16 ? 2e-3 : 2e-2;
        expect_near(g.to_vector<double>(), expected, tolerance,
                    std::string(row.name) + " " + name(dtype) + (recorded ? " recorded" : ""));
      }
    }
  }
}

// An absent bound and one that is infinite are the same here (PyTorch takes an infinity as a bound that is reached).
TEST(SpecialValues, InfiniteBoundsOfClampDoNotBind) {
  for (const DType dtype : {f64, f32, f16}) {
    const Tensor x = tensor(Values{-kInf, -1, 1, kInf, kNaN}, {.dtype = dtype, .requires_grad = true});
    const auto slopes = [&](const Tensor& y) { return grad({sum(y)}, {x})[0].to_vector<double>(); };
    EXPECT_EQ(slopes(clamp(x, 0.0, kInf)), (Values{0, 0, 1, 1, 0}));
    EXPECT_EQ(slopes(clamp(x, -kInf, 0.0)), (Values{1, 1, 0, 0, 0}));
    EXPECT_EQ(slopes(clamp(x, -kInf, kInf)), (Values{1, 1, 1, 1, 0}));
  }
}

// torch.clamp and torch.nn.functional.hardtanh as PyTorch 2.15 prints them: a bound that is NaN makes everything NaN.
// The gradient of clamp is 0 then, that of hardtanh is what the other bound says.
TEST(SpecialValues, NaNBoundsMakeEverythingNaN) {
  const auto all_nan = [](const Tensor& y) {
    for (const double v : y.detach().to_vector<double>()) {
      if (!std::isnan(v)) return false;
    }
    return true;
  };
  for (const DType dtype : {f64, f32, f16, bf16}) {
    for (const std::int64_t times : {1, 7}) {
      for (const bool strided : {false, true}) {
        const Tensor once = tensor(Values{-kInf, -1, 0, 2, kInf, kNaN}, {.dtype = dtype});
        Tensor x = repeat(once, {times});
        if (strided) x = x.unsqueeze(1).expand({6 * times, 3}).contiguous().select(1, 0);
        x.requires_grad_();
        const auto check = [&](const Tensor& y, const Values& slopes) {
          EXPECT_TRUE(all_nan(y)) << y;
          for (const bool recorded : {false, true}) {
            const Tensor g = grad({y}, {x},
                                  {.grad_outputs = {ones(y.sizes(), {.dtype = dtype})},
                                   .create_graph = recorded,
                                   .retain_graph = true})[0];
            Values expected;
            for (std::int64_t i = 0; i < times; ++i) expected.insert(expected.end(), slopes.begin(), slopes.end());
            EXPECT_EQ(g.detach().to_vector<double>(), expected) << name(dtype) << recorded;
          }
        };
        const Values none(6, 0);
        check(clamp(x, kNaN), none);
        check(clamp(x, std::nullopt, kNaN), none);
        check(clamp(x, 0.0, kNaN), none);
        check(clamp(x, kNaN, 1.0), none);
        check(clamp(x, kNaN, kNaN), none);
        check(clamp(x, -kInf, kNaN), none);
        check(clamp_min(x, kNaN), none);
        check(clamp_max(x, kNaN), none);
        check(hardtanh(x, 0, kNaN), {0, 0, 0, 1, 1, 1});
        check(hardtanh(x, kNaN, 1), {1, 1, 1, 0, 0, 1});
        check(clamp_min(x, full({}, kNaN, {.dtype = dtype})), Values(6, 1));
        Tensor y = x.detach().clone();
        EXPECT_TRUE(all_nan(clamp_(y, kNaN)));
      }
    }
  }
  const Tensor integers = tensor_from_integers({1, 2, 3}, {3}, {.dtype = i64});
  EXPECT_TRUE(all_nan(clamp(integers, kNaN)));
  EXPECT_TRUE(all_nan(hardtanh(integers, 0, kNaN)));
}

// d logsumexp / dx is softmax: 0 for finite elements beside an infinite one, NaN where the limit depends on the way.
TEST(SpecialValues, LogsumexpBesideInfinity) {
  const std::vector<std::pair<Values, Values>> cases = {
      {{1, kInf, 2}, {0, kNaN, 0}},
      {{kInf, kInf, 0}, {kNaN, kNaN, 0}},
      {{kInf, -kInf}, {kNaN, 0}},
      {{1, 2, -kInf}, {0.26894142137, 0.73105857863, 0}},
      {{-kInf, -kInf}, {kNaN, kNaN}},
      {{kNaN, 1}, {kNaN, kNaN}},
      {{1e4, kInf, kNaN}, {kNaN, kNaN, kNaN}},
  };
  for (const auto& [in, expected] : cases) {
    for (const DType dtype : {f64, f32, bf16}) {
      for (const bool recorded : {false, true}) {
        const Tensor x = tensor(in, {.dtype = dtype, .requires_grad = true});
        const Tensor g = grad({logsumexp(x, {0})}, {x}, {.create_graph = recorded})[0];
        expect_near(g.to_vector<double>(), expected, dtype == bf16 ? 4e-3 : 1e-6, "logsumexp");
      }
    }
  }
  // The elements of several dimensions together, in rows of their own.
  const Tensor x = tensor(Values{0, kInf, 1, 2, 3, 4, 5, 6}, {2, 2, 2}, {.dtype = f64, .requires_grad = true});
  logsumexp(x, {0, 2}).backward(ones({2}, {.dtype = f64}));
  const double total = std::exp(1.) + std::exp(2.) + std::exp(5.) + std::exp(6.);
  expect_near(x.grad().to_vector<double>(),
              {0, kNaN, std::exp(1.) / total, std::exp(2.) / total, 0, 0, std::exp(5.) / total, std::exp(6.) / total},
              1e-12, "two dimensions");
}

// Beside +infinity these have no limit that doesn't depend on the way: NaN everywhere, as PyTorch.
TEST(SpecialValues, SoftmaxAndCrossEntropyBesideInfinity) {
  for (const bool log : {false, true}) {
    const Tensor x = tensor(Values{1, kInf, 2}, {.dtype = f64, .requires_grad = true});
    const Tensor y = log ? log_softmax(x, 0) : softmax(x, 0);
    expect_near(y.to_vector<double>(), log ? Values{kNaN, kNaN, kNaN} : Values{kNaN, kNaN, kNaN}, 0, "softmax");
  }
  // A class with probability 0 that isn't the label costs nothing without label smoothing.
  const Tensor x = tensor(Values{1, 2, -kInf}, {1, 3}, {.dtype = f64, .requires_grad = true});
  const Tensor loss = cross_entropy(x, tensor_from_integers({0}, {1}, {.dtype = i64}));
  EXPECT_NEAR(loss.item<double>(), 1.3132616875182228, 1e-12);
  loss.backward();
  expect_near(x.grad().to_vector<double>(), {-0.7310585786300049, 0.7310585786300049, 0}, 1e-12, "cross_entropy");
}

TEST(SpecialValues, LossesOfMixedDtypesFollowPromotion) {
  const Tensor x = tensor(Values{0.5, -1}, {.dtype = f64, .requires_grad = true}),
               y = tensor(Values{0.1, 1}, {.dtype = f32});
  const auto softplus_of = [](double v) { return std::log1p(std::exp(v)); };
  const double t = static_cast<double>(0.1f);
  const double expected = ((1 - t) * 0.5 + softplus_of(-0.5) + softplus_of(1)) / 2;
  for (const Tensor& weight : {Tensor(), ones({2}, {.dtype = f32}), ones({2}, {.dtype = f64})}) {
    for (const bool positive : {false, true}) {
      const BceWithLogitsOptions options{.weight = positive ? Tensor() : weight,
                                         .pos_weight = positive ? weight : Tensor()};
      const Tensor loss = binary_cross_entropy_with_logits(x, y, options);
      EXPECT_EQ(loss.dtype(), f64);
      EXPECT_NEAR(loss.item<double>(), expected, 1e-15);
      const Tensor g = grad({loss}, {x})[0];
      EXPECT_EQ(g.dtype(), f64);
      expect_near(g.to_vector<double>(), {(1 / (1 + std::exp(-0.5)) - t) / 2, (1 / (1 + std::exp(1.)) - 1) / 2}, 1e-15,
                  "gradient");
      EXPECT_EQ(binary_cross_entropy_with_logits(y, x.detach(), options).dtype(), f64);
    }
  }
  // A weight of another dtype takes part: f32 logits with f64 weights give f64.
  const Tensor low = tensor(Values{0.5, -1}), wide = ones({2}, {.dtype = f64});
  EXPECT_EQ(binary_cross_entropy_with_logits(low, y, {.weight = wide}).dtype(), f64);
  EXPECT_EQ(binary_cross_entropy_with_logits(low, y, {.pos_weight = wide}).dtype(), f64);
}

// The gradient of the target is -x where positive ones have no weight: nothing there is multiplied by 0.
TEST(SpecialValues, TargetsOfInfiniteLogits) {
  const Tensor x = tensor(Values{-kInf, kInf}, {.dtype = f64}),
               y = tensor(Values{0, 1}, {.dtype = f64, .requires_grad = true});
  const Tensor loss = binary_cross_entropy_with_logits(x, y, {.reduction = Reduction::sum});
  expect_near(grad({loss}, {y})[0].to_vector<double>(), {kInf, -kInf}, 0, "target");
}

// The slope is (1 - y) sigmoid(x) - w y sigmoid(-x): far out it is small, but not nothing.
TEST(SpecialValues, LogitsFarOutKeepTheirSlope) {
  for (const DType dtype : {f32, f64}) {
    for (const double v : {-14.0, -17.0, -20.0, -40.0, 20.0, 40.0}) {
      for (const double y : {0.0, 1.0}) {
        for (const bool recorded : {false, true}) {
          const Tensor x = full({1}, v).to(dtype).requires_grad_(), target = full({1}, y).to(dtype);
          const Tensor loss = sum(binary_cross_entropy_with_logits(x, target));
          const Tensor slope = grad({loss}, {x}, {.create_graph = recorded})[0];
          const double exact = y == 0 ? 1 / (1 + std::exp(-v)) : -1 / (1 + std::exp(v));
          const double unit = dtype == f32 ? 0x1p-24 : 0x1p-53;
          EXPECT_NEAR(slope.detach().item<double>(), exact, 8 * unit * std::abs(exact))
              << v << ' ' << y << ' ' << name(dtype) << ' ' << recorded;
        }
      }
    }
  }
}

}  // namespace
}  // namespace halfstep
