// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/optimizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/cast_cache.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/dlpack.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using optim::LowPrecision;

NamedTensors one(const std::string& name, Tensor t) {
  t.requires_grad_();
  return {{name, t}};
}

TEST(Optimizer, StepOnGivenGradientsUnlessTheFlagIsSet) {
  const auto p = one("w", tensor({1, 2}, {.dtype = f32}));
  optim::SGD sgd{p, {.lr = 0.5, .momentum = 0.75}};  // products that are exact with and without fused arithmetic
  sgd.step({tensor({1, 1})}, {.unless = ones({})});
  EXPECT_EQ(p[0].tensor.to_vector<float>(), (std::vector<float>{1, 2}));
  sgd.step({tensor({1, 1})}, {.unless = zeros({})});
  EXPECT_EQ(p[0].tensor.to_vector<float>(), (std::vector<float>{0.5, 1.5}));
  EXPECT_FALSE(p[0].tensor.grad().defined());
  // A bool counts as one, such as what all_finite() is the opposite of.
  const auto flag = [](bool set) { return full({}, set ? 1 : 0, {.dtype = boolean}); };
  sgd.step({tensor({1, 1})}, {.unless = flag(true)});
  EXPECT_EQ(p[0].tensor.to_vector<float>(), (std::vector<float>{0.5, 1.5}));
  sgd.step({tensor({0, 0})}, {.unless = flag(false)});  // the momentum alone: 0.5 * 0.75
  EXPECT_EQ(p[0].tensor.to_vector<float>(), (std::vector<float>{0.125, 1.125}));
  for (const Tensor& bad : {zeros({2}), zeros({}, {.dtype = i32})}) {
    const std::string text = test::error_of<Error>([&] { sgd.step({tensor({1, 1})}, {.unless = bad}); });
    EXPECT_NE(text.find("SGD: expected `unless` to be f32 or bool of one element"), std::string::npos) << text;
  }
  EXPECT_THROW(sgd.step(std::vector<Tensor>{}), Error);
  EXPECT_THROW(sgd.step({zeros({3})}), ShapeError);
}

TEST(Optimizer, MisuseIsNamed) {
  const auto p = one("w", ones({2}));
  EXPECT_THROW((optim::SGD{p, {.lr = -1}}), Error);
  EXPECT_THROW((optim::SGD{p, {.lr = 1, .nesterov = true}}), Error);
  EXPECT_THROW((optim::SGD{{p[0], p[0]}, {.lr = 1}}), Error);
  EXPECT_THROW((optim::SGD{{{"y", p[0].tensor * 2}}, {.lr = 1}}), Error);
  EXPECT_THROW((optim::Adam{p, {.beta1 = 1}}), Error);
}

// A step of 1e-3 on 1.0 is under half a unit of bf16's last place.
TEST(Optimizer, LowPrecisionWeightsMove) {
  const auto run = [](LowPrecision how, DType dtype) {
    const auto p = one("w", ones({4096}, {.dtype = dtype}));
    optim::SGD sgd{p, {.lr = 1e-3, .low_precision = how}};
    for (int i = 0; i < 100; ++i) sgd.step({ones({4096})});
    return sum(p[0].tensor, {}, {.dtype = f64}).item<double>() / 4096;
  };
  for (DType dtype : {bf16, f16}) {
    const double unit = dtype == bf16 ? 0x1p-8 : 0x1p-11;  // of values under 1
    EXPECT_NEAR(run(LowPrecision::master_weights, dtype), 0.9, unit) << name(dtype);
    EXPECT_NEAR(run(LowPrecision::kahan, dtype), 0.9, 2 * unit) << name(dtype);
    // Each step's error has a standard deviation of at most unit/2; 100 steps and 4096 weights: unit * 5 / 64, six of
    // it.
    EXPECT_NEAR(run(LowPrecision::stochastic_rounding, dtype), 0.9, 6 * unit * 5 / 64) << name(dtype);
  }
  EXPECT_EQ(run(LowPrecision::nearest, bf16), 1.0);
}

// Word i of element i, parameters one behind the other, each from a new block of four: the numbers are the same on
// every device.
TEST(Optimizer, StochasticRoundingTakesTheWordsThatAreItsOwn) {
  manual_seed(5);
  const std::vector<std::int64_t> sizes = {5, 9001};
  NamedTensors parameters;
  std::vector<Tensor> gradients;
  for (const std::int64_t n : sizes) {
    std::vector<double> values, slopes;
    for (std::int64_t i = 0; i < n; ++i) {
      values.push_back(1 + static_cast<double>(i % 128) / 128);  // bf16's numbers from 1 to 2
      slopes.push_back(static_cast<double>(i % 97) * 0x1p-14);
    }
    parameters.push_back({"p" + std::to_string(n), tensor(values, {n}, {.dtype = bf16}).requires_grad_()});
    gradients.push_back(tensor(slopes, {n}));
  }
  std::vector<std::vector<float>> before;
  for (const auto& p : parameters) before.push_back(p.tensor.to_vector<float>());
  optim::SGD sgd{parameters, {.lr = 1, .low_precision = LowPrecision::stochastic_rounding}};
  const PhiloxState state = default_generator().state();
  sgd.step(gradients);
  std::uint64_t block = 0;
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    const auto after = parameters[k].tensor.to_vector<float>(), slope = gradients[k].to_vector<float>();
    for (std::size_t i = 0; i < after.size(); ++i) {
      const float exact = before[k][i] - slope[i];  // no rounding: all are multiples of 2^-14 under 2
      const std::uint32_t cut = philox_block(state, block + i / 4)[i % 4] & 0xffffu;
      const std::uint32_t bits = (std::bit_cast<std::uint32_t>(exact) + cut) & 0xffff0000u;
      ASSERT_EQ(after[i], std::bit_cast<float>(bits)) << "parameter " << k << ", element " << i;
    }
    block += philox_blocks(static_cast<std::uint64_t>(sizes[k]));
  }
}

// The copy that autocast made is rewritten by the step: the next region casts nothing and sees the new values.
TEST(Optimizer, RewritesTheAutocastCopy) {
  const auto p = one("w", full({8, 8}, 1.0));
  optim::SGD sgd{p, {.lr = 0.25}};
  const Tensor x = ones({2, 8}, {.dtype = bf16});
  const auto forward = [&] {
    amp::Autocast autocast{{.dtype = bf16}};
    return mm(x, p[0].tensor);
  };
  sum(forward()).backward();
  sgd.step();
  amp::cast_stats() = {};
  const Tensor y = forward();
  EXPECT_EQ(amp::cast_stats().casts, 0u);
  EXPECT_EQ(y.to_vector<float>(), std::vector<float>(16, 8 * 0.5f));
  {
    NoGrad no_grad;
    Tensor w = p[0].tensor;
    w.mul_(2);
  }
  EXPECT_EQ(forward().to_vector<float>(), std::vector<float>(16, 8 * 1.0f));
  EXPECT_EQ(amp::cast_stats().casts, 1u);
}

// A master weight is derived from its parameter: weights that are loaded, or put back through an address, are where the
// next step starts. As long as nobody writes them, the master keeps the digits that 16 bits haven't.
TEST(Optimizer, MasterWeightsFollowParametersThatOthersWrite) {
  if (!default_device().is_cpu()) GTEST_SKIP() << "only the CPU's memory has addresses to write through";
  const auto writers = std::vector<std::function<void(const Tensor&, double)>>{
      [](const Tensor& p, double v) { p.detach().fill_(v); },
      [](const Tensor& p, double v) { p.detach().copy_(full(p.sizes(), v)); },
      [](const Tensor& p, double v) { std::fill_n(p.data<BFloat16>(), p.numel(), BFloat16(static_cast<float>(v))); },
      [](const Tensor& p, double v) { from_dlpack(to_dlpack(p.detach())).fill_(v); },
  };
  for (std::size_t k = 0; k < writers.size(); ++k) {
    for (const bool captured : {false, true}) {
      SCOPED_TRACE(fmt::format("writer {}, captured {}", k, captured));
      const auto p = one("w", full({4}, 1, {.dtype = bf16}) + 0);
      optim::SGD sgd{p, {.lr = 1}};
      const auto step = [&](const Tensor& g) {
        sgd.step({g});
        return p[0].tensor.detach() + 0;
      };
      auto fast = capture(step);
      const auto run = [&](double g) {
        const Tensor gradient = full({4}, g);
        return (captured ? fast(gradient) : step(gradient)).to_vector<double>();
      };
      // 1 - 16 * 2^-12 is 1 - 2^-8, which bf16 has; none of the steps by itself would change a bf16 number of 1.
      std::vector<double> now;
      for (int i = 0; i < 16; ++i) now = run(0x1p-12);
      EXPECT_EQ(now, std::vector<double>(4, 1 - 0x1p-8));
      if (captured) {
        EXPECT_TRUE(fast.replayed()) << fast.why_not();
      }
      for (const double value : {3.0, 2.0}) {
        writers[k](p[0].tensor, value);
        EXPECT_EQ(run(0.5), std::vector<double>(4, value - 0.5));
      }
      // And the digits below are kept again, though the address may be held.
      writers[k](p[0].tensor, 1);
      for (int i = 0; i < 16; ++i) now = run(0x1p-12);
      EXPECT_EQ(now, std::vector<double>(4, 1 - 0x1p-8));
    }
  }
}

TEST(Optimizer, AGraphThatStillReadsTheCopyIsNotDisturbed) {
  const auto p = one("w", full({4, 4}, 1.0));
  optim::SGD sgd{p, {.lr = 0.25}};
  Tensor x = ones({2, 4}, {.dtype = bf16, .requires_grad = true});
  Tensor y;
  {
    amp::Autocast autocast{{.dtype = bf16}};
    y = mm(x, p[0].tensor);
  }
  sgd.step({ones({4, 4})});
  sum(y).backward();
  EXPECT_EQ(x.grad().to_vector<float>(), std::vector<float>(8, 4.0f))
      << "the gradient of the weights of the forward pass";
}

TEST(Optimizer, StateRoundTripsBitForBit) {
  const auto make = [](std::uint64_t) {
    std::vector<double> values;
    for (int i = 0; i < 40; ++i) values.push_back(0.1 * i - 1);
    return NamedTensors{{"a", tensor(values, {40}, {.requires_grad = true})},
                        {"b", tensor(values, {8, 5}, {.dtype = bf16, .requires_grad = true})}};
  };
  const auto step = [](optim::Optimizer& o, int i) { o.step({full({40}, 0.3 + i), full({8, 5}, 0.2 - i)}); };
  const NamedTensors p = make(0), q = make(0);
  optim::AdamW a{p, {.lr = 0.01, .amsgrad = true}}, b{q, {.amsgrad = true}};
  for (int i = 0; i < 3; ++i) step(a, i);
  {
    NoGrad no_grad;
    for (std::size_t i = 0; i < p.size(); ++i) Tensor(q[i].tensor).copy_(p[i].tensor);
  }
  EXPECT_THROW(b.load_state_dict({}), Error);
  b.load_state_dict(a.state_dict());
  for (int i = 3; i < 6; ++i) step(a, i), step(b, i);
  for (std::size_t i = 0; i < p.size(); ++i) {
    EXPECT_EQ(p[i].tensor.to_vector<float>(), q[i].tensor.to_vector<float>());
  }
  auto foreign = a.state_dict();
  foreign.tensors.push_back({"c.exp_avg", ones({2})});
  EXPECT_THROW(b.load_state_dict(foreign), Error);
}

// Options that a load has to bring, since the second optimizer is made with the defaults.
TEST(Optimizer, LoadingBringsTheOptions) {
  const auto start = [] {
    return NamedTensors{{"a", tensor({1, -2, 3}, {.requires_grad = true})},
                        {"b", tensor({0.5, -0.25}, {.dtype = bf16, .requires_grad = true})}};
  };
  const auto check = [&](optim::Optimizer& a, const NamedTensors& p, optim::Optimizer& b, const NamedTensors& q,
                         const char* what) {
    const auto step = [](optim::Optimizer& o, int i) {
      o.step({tensor({0.3 + i, -1.0, 0.01 * i}), tensor({0.02, 0.4 - i})});
    };
    for (int i = 0; i < 4; ++i) step(a, i);
    {
      NoGrad no_grad;
      for (std::size_t i = 0; i < p.size(); ++i) Tensor(q[i].tensor).copy_(p[i].tensor);
    }
    b.load_state_dict(a.state_dict());
    EXPECT_EQ(a.state_dict().numbers, b.state_dict().numbers) << what;
    // Falling gradients: a maximum that is kept shows.
    for (int i = 3; i > -3; --i) step(a, i), step(b, i);
    for (std::size_t i = 0; i < p.size(); ++i) {
      EXPECT_EQ(p[i].tensor.to_vector<float>(), q[i].tensor.to_vector<float>()) << what;
    }
  };
  for (const LowPrecision how : {LowPrecision::master_weights, LowPrecision::kahan}) {
    for (const optim::SGDOptions& options :
         {optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .low_precision = how},
          optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true, .low_precision = how},
          optim::SGDOptions{.lr = 0.1, .maximize = true, .low_precision = how}}) {
      const auto p = start(), q = start();
      optim::SGD a{p, options}, b{q, {.lr = 1, .low_precision = how}};
      check(a, p, b, q, "SGD");
    }
    for (const optim::AdamOptions& options :
         {optim::AdamOptions{.lr = 0.1, .beta1 = 0.5, .beta2 = 0.8, .eps = 0.1, .amsgrad = true, .low_precision = how},
          optim::AdamOptions{.lr = 0.1, .weight_decay = 0.2, .maximize = true, .low_precision = how}}) {
      const auto p = start(), q = start();
      optim::Adam a{p, options}, b{q, {.low_precision = how}};
      check(a, p, b, q, "Adam");
    }
  }
}

// Half a unit of bf16 below 1 is 2^-9: two steps of 1e-3 move the weight together, and only if the first is remembered.
TEST(Optimizer, LoadingBringsWhatRoundingCutOff) {
  const auto p = one("w", ones({1}, {.dtype = bf16})), q = one("w", ones({1}, {.dtype = bf16}));
  const optim::SGDOptions options{.lr = 1e-3, .low_precision = LowPrecision::kahan};
  optim::SGD a{p, options}, b{q, options};
  a.step({ones({1})});
  EXPECT_EQ(p[0].tensor.item<double>(), 1);
  b.load_state_dict(a.state_dict());
  b.step({ones({1})});
  EXPECT_EQ(q[0].tensor.item<double>(), 1 - 0x1p-8);
}

TEST(Optimizer, AStateThatDoesNotFitChangesNothing) {
  const auto p = one("w", ones({2})), q = one("v", ones({2}));
  optim::SGD a{p, {.lr = 0.1, .momentum = 0.9}}, b{q, {.lr = 0.5, .dampening = 0.25}};
  a.step({ones({2})});
  EXPECT_THROW(b.load_state_dict(a.state_dict()), Error) << "w is none of its parameters";
  EXPECT_EQ(b.lr(), 0.5);
  EXPECT_EQ(b.momentum(), 0);
  EXPECT_EQ(b.state_dict().numbers.at("group0.dampening"), 0.25);
}

// Work is cut into chunks and blocks: every element of a large parameter goes the way of a parameter of its own.
TEST(Optimizer, LargeParametersAreManySmallOnes) {
  constexpr std::int64_t kLarge = 40000, kPeriod = 7;  // several chunks of 16384 and blocks of 1024, and a rest
  const auto pattern = [](std::int64_t n, double scale) {
    std::vector<double> v;
    for (std::int64_t i = 0; i < n; ++i) v.push_back(scale * static_cast<double>(i % kPeriod - 3));
    return v;
  };
  for (const DType dtype : {f32, f64, bf16}) {
    for (const char* kind : {"sgd", "adam", "kahan"}) {
      std::vector<std::vector<double>> results;
      for (const std::int64_t n : {kLarge, kPeriod}) {
        const auto p = one("w", tensor(pattern(n, 0.3), {n}, {.dtype = dtype}));
        std::unique_ptr<optim::Optimizer> o;
        if (kind == std::string("adam")) {
          o = std::make_unique<optim::Adam>(p, optim::AdamOptions{.lr = 0.1, .amsgrad = true});
        } else {
          const auto how = kind == std::string("kahan") ? LowPrecision::kahan : LowPrecision::master_weights;
          o = std::make_unique<optim::SGD>(p, optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .low_precision = how});
        }
        for (int step = 0; step < 3; ++step) {
          o->step({tensor(pattern(n, 0.7 - 0.2 * step), {n}, {.dtype = dtype == f64 ? f64 : f32})});
        }
        results.push_back(p[0].tensor.to_vector<double>());
      }
      // The same formula, whose products may be fused in one place and not in the other.
      const double unit = dtype == f64 ? 0x1p-52 : dtype == f32 ? 0x1p-23 : 0x1p-7;
      for (std::size_t i = 0; i < results[0].size(); ++i) {
        ASSERT_NEAR(results[0][i], results[1][i % kPeriod], 4 * unit) << name(dtype) << " " << kind << " " << i;
      }
    }
  }
}

// Gradients of another dtype or layout than the parameter's mean the same.
TEST(Optimizer, GradientsOfAnyDTypeAndLayout) {
  const Tensor values = tensor({0.5, -1, 2, 0.25, 3, -0.125}, {2, 3});
  for (const DType dtype : {f32, f64, f16, bf16}) {
    for (const DType weights : {f32, f64}) {
      const auto p = one("w", zeros({2, 3}, {.dtype = weights}));
      optim::SGD sgd{p, {.lr = 1}};
      sgd.step({values.to(dtype)});
      EXPECT_EQ(p[0].tensor.to_vector<double>(), (std::vector<double>{-0.5, 1, -2, -0.25, -3, 0.125})) << name(dtype);
      sgd.step({values.to(dtype).t().contiguous().t()});
      EXPECT_EQ(p[0].tensor.to_vector<double>(), (std::vector<double>{-1, 2, -4, -0.5, -6, 0.25})) << name(dtype);
    }
  }
}

TEST(Optimizer, ZeroGradDropsOrFills) {
  const auto p = one("w", ones({2}));
  optim::SGD sgd{p, {.lr = 1}};
  const Tensor held = ones({2});
  p[0].tensor.set_grad(held);
  sgd.zero_grad(false);
  ASSERT_TRUE(p[0].tensor.grad().defined());
  EXPECT_EQ(held.to_vector<float>(), (std::vector<float>{0, 0})) << "the same memory";
  sgd.zero_grad();
  EXPECT_FALSE(p[0].tensor.grad().defined());
}

}  // namespace
}  // namespace halfstep
