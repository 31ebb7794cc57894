// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/policy.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/errors.h"
#include "tests/support/op_golden.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

using test::GoldenEntry;
using test::GoldenTensor;

std::optional<std::int64_t> axis_of(const GoldenEntry& e) {
  return e.has("axis") ? std::optional(e.integer("axis")) : std::nullopt;
}

// Equal as numbers: -0 is 0, and NaN is NaN.
void expect_equal(const Tensor& got, const GoldenTensor& want, const std::string& what) {
  EXPECT_EQ(name(got.dtype()), want.dtype) << what;
  EXPECT_EQ(got.sizes(), Shape(want.shape)) << what;
  const auto values = got.detach().to_vector<double>();
  ASSERT_EQ(values.size(), want.data.size()) << what;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(want.data[i])) {
      EXPECT_TRUE(std::isnan(values[i])) << what << " element " << i << ": " << values[i];
    } else {
      EXPECT_EQ(values[i], want.data[i]) << what << " element " << i;
    }
  }
}

struct Golden {
  const GoldenEntry& entry;
  std::vector<Tensor> inputs;
  explicit Golden(const GoldenEntry& e) : entry(e) {
    for (std::size_t i = 0; i < e.inputs.size(); ++i) {
      inputs.push_back(test::to_tensor(e.inputs[i], i < e.grads.size() && e.grads[i]));
    }
  }
};
template <class F>
void for_goldens(const std::string& op, F&& f) {
  int found = 0;
  for (const GoldenEntry& e : test::read_goldens("quantize.json")) {
    if (e.op != op) continue;
    ++found;
    SCOPED_TRACE(e.name);
    Golden golden(e);
    f(golden);
  }
  EXPECT_GT(found, 0) << op;
}

TEST(FakeQuantize, IsPyTorchsBitForBit) {
  for_goldens("fake_quantize", [](Golden& g) {
    const GoldenEntry& e = g.entry;
    const FakeQuantizeFuncOptions options{e.integer("quant_min"), e.integer("quant_max"), axis_of(e)};
    const Tensor y = fake_quantize(g.inputs[0], g.inputs[1], g.inputs[2], options);
    expect_equal(y, e.outputs[0], "result");
    backward({y}, {test::to_tensor(*e.cotangents[0])});
    expect_equal(g.inputs[0].grad(), *e.grads[0], "gradient");
    // Without a gradient no mask is written; the values are the same.
    const NoGrad no_grad;
    expect_equal(fake_quantize(g.inputs[0], g.inputs[1], g.inputs[2], options), e.outputs[0], "without gradients");
  });
}

TEST(FakeQuantize, AnyLayoutGivesTheSame) {
  manual_seed(3);
  const Tensor x = randn({3, 4, 5, 6}) * 2, scale = rand({4}) * 0.1 + 0.01;
  const Tensor zero = tensor({0, 3, -7, 100}, {.dtype = i32});
  for (const std::optional<std::int64_t> axis : {std::optional<std::int64_t>(1), std::optional<std::int64_t>()}) {
    const Tensor s = axis ? scale : scale.narrow(0, 1, 1), z = axis ? zero : zero.narrow(0, 1, 1);
    const FakeQuantizeFuncOptions options{.axis = axis};
    const Tensor plain = x.clone().requires_grad_();
    const Tensor y = fake_quantize(plain, s, z, options);
    const Tensor g = randn(x.sizes());
    backward({y}, {g});
    const Tensor wide = zeros({6, 10, 4, 3}).slice(1, 0, INT64_MAX, 2).permute({3, 2, 1, 0});
    wide.detach().copy_(x);
    for (const Tensor& other : {to_channels_last(x), wide}) {
      const Tensor leaf = other.detach().requires_grad_();
      const Tensor again = fake_quantize(leaf, s, z, options);
      EXPECT_EQ(again.to_vector<float>(), y.to_vector<float>());
      backward({again}, {g});
      EXPECT_EQ(leaf.grad().to_vector<float>(), plain.grad().to_vector<float>());
    }
    // A gradient that is one number everywhere has strides of 0.
    const Tensor leaf = to_channels_last(x).detach().requires_grad_();
    sum(fake_quantize(leaf, s, z, options)).backward();
    const auto ones_where = leaf.grad().to_vector<float>();
    const auto scaled = plain.grad().to_vector<float>();
    for (std::size_t i = 0; i < scaled.size(); ++i) EXPECT_EQ(ones_where[i] != 0, scaled[i] != 0);
  }
}

// A view made before its base got a history has one too: the mask is there.
TEST(FakeQuantize, OfAViewWhoseBaseGotAHistoryHasAGradient) {
  const Tensor leaf = tensor({1, 2, 300, 4}).requires_grad_(), scale = tensor({1.0}), zero = zeros({1}, {.dtype = i32});
  Tensor base = zeros({4});
  const Tensor view = base.slice(0, 1, 4);
  base.copy_(leaf);
  sum(fake_quantize(view, scale, zero)).backward();
  EXPECT_EQ(leaf.grad().to_vector<float>(), (std::vector<float>{0, 1, 0, 1}));
}

// In 16 bits the value is computed in float32 and rounded once: that of the float32 result, cast.
TEST(FakeQuantize, SixteenBitsRoundOnce) {
  manual_seed(4);
  for (const DType dtype : {f16, bf16}) {
    const Tensor x = (randn({7, 33}) * 2).to(dtype), scale = tensor({0.0137}), zero = tensor({9}, {.dtype = i32});
    const Tensor got = fake_quantize(x, scale, zero), wide = fake_quantize(x.to(f32), scale, zero);
    EXPECT_EQ(got.dtype(), dtype);
    EXPECT_EQ(got.to(f32).to_vector<float>(), wide.to(dtype).to(f32).to_vector<float>());
  }
}

TEST(FakeQuantize, OfAFloat32TensorInARegionHasTheRegionsDtype) {
  manual_seed(5);
  const Tensor x = randn({6, 8}), scale = tensor({0.0137}), zero = tensor({0}, {.dtype = i32});
  const Tensor plain = fake_quantize(x, scale, zero);
  for (const DType dtype : {f16, bf16}) {
    const amp::Autocast region{{.dtype = dtype}};
    const Tensor y = fake_quantize(x, scale, zero);
    EXPECT_EQ(y.dtype(), dtype);
    // Not rounded before it was quantized.
    EXPECT_EQ(y.to(f32).to_vector<float>(), plain.to(dtype).to(f32).to_vector<float>());
    EXPECT_EQ(fake_quantize(x.to(f64), scale, zero).dtype(), f64);
    EXPECT_EQ(fake_quantize(x.to(dtype), scale, zero).dtype(), dtype);
    EXPECT_EQ(fake_quantize_learnable(x, scale, zero).dtype(), dtype);
  }
  const auto calls = amp::explain([&] {
    const amp::Autocast region{{.dtype = bf16}};
    fake_quantize(x, scale, zero);
  });
  ASSERT_EQ(calls.size(), 1U);
  EXPECT_EQ(calls[0].policy, amp::Policy::low_output);
  EXPECT_EQ(calls[0].used, (std::vector<DType>{f32, f32, i32}));
  // An override of the region comes first.
  const amp::Autocast region{{.dtype = bf16, .ops = {{"fake_quantize", amp::Policy::float32}}}};
  EXPECT_EQ(fake_quantize(x, scale, zero).dtype(), f32);
}

// The weight's gradient comes in float32 from the product, as that of a cast weight does.
TEST(FakeQuantize, AWeightsGradientInARegionIsNotRounded) {
  manual_seed(6);
  const Tensor x = randn({16, 8}).to(bf16), scale = tensor({0.0137}), zero = tensor({0}, {.dtype = i32});
  const Tensor quantized = randn({4, 8}).requires_grad_(), cast = fake_quantize(quantized.detach(), scale, zero);
  const Tensor g = randn({16, 4}).to(bf16);
  {
    const amp::Autocast region{{.dtype = bf16}};
    const Tensor y = linear(x, fake_quantize(quantized, scale, zero));
    backward({y}, {g});
  }
  const Tensor weight = cast.clone().requires_grad_();
  {
    const amp::Autocast region{{.dtype = bf16}};
    backward({linear(x, weight)}, {g});
  }
  const Tensor inside = le(abs(quantized.detach()), 0.0137 * 127);
  EXPECT_EQ(quantized.grad().to_vector<float>(), where(inside, weight.grad(), 0).to_vector<float>());
}

// Of a sum of n terms in float32 the error is at most n u times the sum of magnitudes; the terms have 4 roundings each.
TEST(LearnableFakeQuantize, IsPyTorchs) {
  for_goldens("fake_quantize_learnable", [](Golden& g) {
    const GoldenEntry& e = g.entry;
    const LearnableFakeQuantizeOptions options{e.integer("quant_min"), e.integer("quant_max"), axis_of(e),
                                               e.real("grad_factor")};
    const Tensor y = fake_quantize_learnable(g.inputs[0], g.inputs[1], g.inputs[2], options);
    expect_equal(y, e.outputs[0], "result");
    const Tensor cotangent = test::to_tensor(*e.cotangents[0]);
    for (const bool recorded : {false, true}) {
      const auto grads =
          grad({y}, g.inputs, {.grad_outputs = {cotangent}, .create_graph = recorded, .retain_graph = true});
      expect_equal(grads[0], *e.grads[0], "gradient of input");
      const double n = static_cast<double>(g.inputs[0].numel());
      for (int k = 1; k < 3; ++k) {
        const std::string what = k == 1 ? "scale" : "zero";
        const auto got = grads[static_cast<std::size_t>(k)].to_vector<double>();
        const auto &want = e.tensor(what).data, &magnitude = e.tensor(what + "_magnitude").data;
        ASSERT_EQ(got.size(), want.size());
        for (std::size_t i = 0; i < got.size(); ++i) {
          // The error of a value within its step is a difference of numbers up to 128 steps large.
          const double term = what == "scale" ? 0x1p-24 * 256 * n : 0;
          EXPECT_NEAR(got[i], want[i], (n + 4) * 0x1p-24 * magnitude[i] + term) << what << " " << i;
          EXPECT_NEAR(e.grads[static_cast<std::size_t>(k)]->data[i], want[i], (n + 4) * 0x1p-24 * magnitude[i] + term);
        }
      }
    }
  });
}

// Outside of the range the value is (bound - zero point) scale, whose derivatives are real ones.
TEST(LearnableFakeQuantize, ClampedElementsMatchDifferences) {
  const TensorOptions options{.dtype = f64};
  manual_seed(8);
  const Tensor side = where(gt(rand({4, 3, 5}), 0.5), full({4, 3, 5}, 1.0), full({4, 3, 5}, -1.0)).to(f64);
  const Tensor x = side * (rand({4, 3, 5}, options) + 3);
  const Tensor scale = (rand({3}, options) * 0.1 + 0.1).requires_grad_(), zero = zeros({3}, {.dtype = i32});
  gradcheck(TensorFunction([&](const std::vector<Tensor>& in) {
              return std::vector<Tensor>{
                  fake_quantize_learnable(x, in[0], zero, {.quant_min = -8, .quant_max = 7, .axis = 1})};
            }),
            {scale});
  // LSQ+: the zero point's slope is -scale there; PyTorch rounds it, so that differences see steps. One whole step:
  const auto total = [&](double z) {
    return sum(fake_quantize_learnable(x, scale.detach(), full({3}, z, options),
                                       {.quant_min = -8, .quant_max = 7, .axis = 1}))
        .item<double>();
  };
  const Tensor z = full({3}, 1.0, options).requires_grad_();
  sum(fake_quantize_learnable(x, scale.detach(), z, {.quant_min = -8, .quant_max = 7, .axis = 1})).backward();
  EXPECT_NEAR(sum(z.grad()).item<double>(), total(2) - total(1), 1e-12 * 60);
}

TEST(LearnableFakeQuantize, SumsAreTheSameForAnyNumberOfThreads) {
  manual_seed(9);
  const int before = num_threads();
  for (const std::optional<std::int64_t> axis : {std::optional<std::int64_t>(1), std::optional<std::int64_t>()}) {
    for (const bool last : {false, true}) {
      const Tensor x = last ? to_channels_last(randn({5, 8, 40, 50})) : randn({5, 8, 40, 50});
      const Tensor g = randn({5, 8, 40, 50});
      std::vector<std::vector<float>> seen;
      for (const int threads : {1, 2, 5}) {
        set_num_threads(threads);
        const Tensor leaf = x.detach().requires_grad_();
        const Tensor scale = full({axis ? 8 : 1}, 0.02).requires_grad_(),
                     zero = full({axis ? 8 : 1}, 3.0).requires_grad_();
        backward({fake_quantize_learnable(leaf, scale, zero, {.axis = axis})}, {g});
        auto all = leaf.grad().to_vector<float>();
        for (const float v : scale.grad().to_vector<float>()) all.push_back(v);
        for (const float v : zero.grad().to_vector<float>()) all.push_back(v);
        seen.push_back(all);
      }
      EXPECT_EQ(seen[0], seen[1]);
      EXPECT_EQ(seen[0], seen[2]);
    }
  }
  set_num_threads(before);
}

// 16 bits: the same numbers as of the float32 input, for the sums too, whose gradients come in 16 bits.
TEST(LearnableFakeQuantize, SixteenBitsComputeInFloat32) {
  manual_seed(10);
  for (const DType dtype : {f16, bf16}) {
    const Tensor low = (randn({6, 50}) * 2).to(dtype), g = randn({6, 50}).to(dtype);
    std::vector<std::vector<float>> sums;
    for (const DType in : {dtype, f32}) {
      const Tensor x = low.detach().clone().to(in).requires_grad_();
      const Tensor scale = tensor({0.11}).requires_grad_(), zero = tensor({2.0}).requires_grad_();
      backward({fake_quantize_learnable(x, scale, zero, {.quant_min = -8, .quant_max = 7})}, {g.to(in)});
      EXPECT_EQ(x.grad().dtype(), in);
      sums.push_back({scale.grad().item<float>(), zero.grad().item<float>()});
    }
    EXPECT_EQ(sums[0], sums[1]);
  }
}

TEST(Pact, MatchesThePapersFunction) {
  for_goldens("pact", [](Golden& g) {
    const Tensor y = pact(g.inputs[0], g.inputs[1]);
    expect_equal(y, g.entry.outputs[0], "result");
    const Tensor cotangent = test::to_tensor(*g.entry.cotangents[0]);
    for (const bool recorded : {false, true}) {
      const auto grads =
          grad({y}, g.inputs, {.grad_outputs = {cotangent}, .create_graph = recorded, .retain_graph = true});
      expect_equal(grads[0], *g.entry.grads[0], "gradient of input");
      // Up to 60 terms of at most 4.
      EXPECT_NEAR(grads[1].item<double>(), g.entry.grads[1]->data[0], 60 * 240 * 0x1p-24);
    }
  });
}

TEST(Quantize, IsPyTorchs) {
  for_goldens("quantize", [](Golden& g) {
    const std::string dtype = g.entry.text("dtype");
    const QuantizeOptions options{.dtype = dtype == "u8" ? u8 : dtype == "i8" ? i8 : i32, .axis = axis_of(g.entry)};
    const Tensor q = quantize(g.inputs[0], g.inputs[1], g.inputs[2], options);
    expect_equal(q, g.entry.outputs[0], "integers");
  });
  for_goldens("dequantize", [](Golden& g) {
    expect_equal(dequantize(g.inputs[0], g.inputs[1], g.inputs[2], {.axis = axis_of(g.entry)}), g.entry.outputs[0],
                 "values");
  });
}

// The two ways to the same number, on which int8 inference rests.
TEST(Quantize, IntegersStandForTheValuesOfFakeQuantization) {
  manual_seed(12);
  const Tensor x = randn({4, 6, 7}) * 3, scale = rand({6}) * 0.1 + 0.01,
               zero = tensor({0, 1, -5, 60, 7, -100}, {.dtype = i32});
  for (const DType dtype : {f32, f16, bf16, f64}) {
    const Tensor given = x.to(dtype);
    const Tensor q = quantize(given, scale, zero, {.dtype = i8, .quant_min = -100, .quant_max = 99, .axis = 1});
    const Tensor fake = fake_quantize(given, scale, zero, {.quant_min = -100, .quant_max = 99, .axis = 1});
    EXPECT_EQ(dequantize(q, scale, zero, {.axis = 1, .dtype = dtype}).to_vector<double>(), fake.to_vector<double>());
  }
}

TEST(QuantizationParameters, ArePyTorchsBitForBit) {
  for_goldens("quantization_parameters", [](Golden& g) {
    const GoldenEntry& e = g.entry;
    const auto [scale, zero] = quantization_parameters(
        g.inputs[0], g.inputs[1], {e.integer("quant_min"), e.integer("quant_max"), e.flag("symmetric")});
    expect_equal(scale, e.outputs[0], "scale");
    expect_equal(zero, e.outputs[1], "zero point");
  });
}

TEST(QuantizationParameters, OfNoRangeAreOneAndZero) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const Tensor low = tensor({inf, nan, -1, 2}), high = tensor({-inf, 1, nan, 1});
  for (const bool symmetric : {false, true}) {
    const auto [scale, zero] = quantization_parameters(low, high, {.symmetric = symmetric});
    EXPECT_EQ(scale.to_vector<float>(), (std::vector<float>{1, 1, 1, 1}));
    EXPECT_EQ(zero.to_vector<double>(), (std::vector<double>{0, 0, 0, 0}));
  }
}

// Against amin and amax; the moving average by hand.
TEST(ObserveRange, FollowsTheFiniteElements) {
  const float inf = std::numeric_limits<float>::infinity();
  manual_seed(13);
  for (const DType dtype : {f32, f16, bf16, f64}) {
    for (const bool last : {false, true}) {
      const Tensor plain = randn({4, 5, 60, 70}).to(dtype), x = last ? to_channels_last(plain) : plain;
      Tensor low = full({}, inf), high = full({}, -inf), lows = full({5}, inf), highs = full({5}, -inf);
      observe_range(x, low, high);
      EXPECT_EQ(low.item<float>(), amin(x).item<float>());
      EXPECT_EQ(high.item<float>(), amax(x).item<float>());
      observe_range(x, lows, highs, {.axis = 1});
      EXPECT_EQ(lows.to_vector<float>(), amin(x, {0, 2, 3}).to(f32).to_vector<float>());
      EXPECT_EQ(highs.to_vector<float>(), amax(x, {0, 2, 3}).to(f32).to_vector<float>());
      // Wider, and not narrower.
      observe_range(x * 2, low, high);
      observe_range(x, low, high);
      EXPECT_EQ(low.item<float>(), amin(x).item<float>() * 2);
      const Tensor before = lows.clone();
      observe_range(x * 2, lows, highs, {.axis = 1, .averaging_constant = 0.25});
      EXPECT_EQ(lows.to_vector<float>(), (before * 1.25).to_vector<float>());
    }
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Tensor low = full({}, inf), high = full({}, -inf);
  observe_range(tensor({nan, inf, -inf}), low, high);
  EXPECT_EQ(low.item<float>(), inf);
  EXPECT_EQ(high.item<float>(), -inf);
  observe_range(tensor({nan, 3, inf, -inf, -2, nan, 0, 1, 1, 1, 1}), low, high);
  EXPECT_EQ(low.item<float>(), -2);
  EXPECT_EQ(high.item<float>(), 3);
  observe_range(zeros({0}), low, high);
  EXPECT_EQ(high.item<float>(), 3);
  Tensor wrong = zeros({2});
  EXPECT_THROW(observe_range(zeros({3}), wrong, high), ShapeError);
  EXPECT_THROW(observe_range(zeros({3}, {.dtype = i32}), low, high), DTypeError);
  EXPECT_THROW(observe_range(zeros({3}), low, high, {.averaging_constant = 2}), Error);
}

TEST(QuantizeOps, RefuseWhatTheyCannotDo) {
  const Tensor x = ones({2, 3}), one = tensor({0.1}), three = full({3}, 0.1), zero = zeros({1}, {.dtype = i32});
  const Tensor zeros3 = zeros({3}, {.dtype = i32});
  EXPECT_THROW(fake_quantize(x, three, zeros3), ShapeError);
  EXPECT_THROW(fake_quantize(x, three, zeros3, {.axis = 0}), ShapeError);
  EXPECT_THROW(fake_quantize(x, three, zero, {.axis = 1}), ShapeError);
  EXPECT_THROW(fake_quantize(x, three, zeros3, {.axis = 2}), ShapeError);
  EXPECT_THROW(fake_quantize(x, one.to(f64), zero), DTypeError);
  EXPECT_THROW(fake_quantize(x, one, zero.to(i64)), DTypeError);
  EXPECT_THROW(fake_quantize(x.to(i32), one, zero), DTypeError);
  EXPECT_THROW(fake_quantize(x, one, zero, {.quant_min = 3, .quant_max = 2}), Error);
  EXPECT_THROW(fake_quantize(x, one, zero, {.quant_min = 0, .quant_max = 1 << 24}), Error);
  EXPECT_THROW(fake_quantize(Tensor(), one, zero), Error);
  EXPECT_THROW(fake_quantize_learnable(x, one, zero, {.grad_factor = std::nan("")}), Error);
  EXPECT_THROW(quantize(x, one, zero, {.dtype = i64}), DTypeError);
  EXPECT_THROW(quantize(x, one, zero, {.dtype = u8, .quant_max = 256}), Error);
  EXPECT_THROW(dequantize(x, one, zero), DTypeError);
  EXPECT_THROW(dequantize(zeros3, one, zero, {.dtype = i32}), DTypeError);
  EXPECT_THROW(pact(x, three), ShapeError);
  EXPECT_THROW(quantization_parameters(one, three), ShapeError);
  EXPECT_THROW(quantization_parameters(one, one, {.quant_min = 5, .quant_max = 5}), Error);
  EXPECT_THROW(quantization_parameters(one, one, {.eps = 0}), Error);
  EXPECT_THROW(lsq_grad_factor(0, 127), Error);
  EXPECT_EQ(lsq_grad_factor(25, 4), 0.1);
  // Empty tensors are fine.
  const Tensor none = zeros({0, 3}).requires_grad_(), scale = full({3}, 0.1).requires_grad_();
  sum(fake_quantize_learnable(none, scale, zeros3, {.axis = 1})).backward();
  EXPECT_EQ(scale.grad().to_vector<float>(), (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(quantize(none, scale, zeros3, {.axis = 1}).sizes(), (Shape{0, 3}));
}

}  // namespace
}  // namespace halfstep
