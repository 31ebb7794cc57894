// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/fake_quantize.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/checkpoint.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/sgd.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using quant::FakeQuantize;
using quant::FakeQuantizeOptions;
using quant::ScaleSource;

std::vector<double> numbers(const Tensor& t) { return t.to_vector<double>(); }
std::vector<std::string> names(const NamedTensors& tensors) {
  std::vector<std::string> result;
  for (const auto& t : tensors) result.push_back(t.name);
  return result;
}
std::vector<std::vector<double>> state_of(const nn::ModuleBase& m) {
  std::vector<std::vector<double>> result;
  for (const auto& t : m.state_dict()) result.push_back(numbers(t.tensor));
  return result;
}

// What torch.ao.quantization.FakeQuantize(...).state_dict() lists, of PyTorch 2.15.
TEST(FakeQuantizeModule, HasPyTorchsNames) {
  const FakeQuantize activation(quant::activation_options());
  const std::vector<std::string> expected = {"fake_quant_enabled",
                                             "observer_enabled",
                                             "scale",
                                             "zero_point",
                                             "activation_post_process.eps",
                                             "activation_post_process.min_val",
                                             "activation_post_process.max_val"};
  EXPECT_EQ(names(activation.state_dict()), expected);
  EXPECT_EQ(activation.scale.sizes(), Shape{1});
  EXPECT_EQ(activation.zero_point.dtype(), i32);
  EXPECT_EQ(activation.fake_quant_enabled.dtype(), u8);
  EXPECT_EQ(activation.activation_post_process.min_val.sizes(), Shape{});
  EXPECT_TRUE(activation.parameters().empty());
  const FakeQuantize weight(quant::weight_options(5));
  EXPECT_EQ(weight.scale.sizes(), Shape{5});
  EXPECT_EQ(weight.describe(), "8 bits, -128 to 127, symmetric, axis 0, moving_average");
  const FakeQuantize learned({.is_signed = true, .source = ScaleSource::learned});
  EXPECT_EQ(names(learned.parameters()), (std::vector<std::string>{"scale", "zero_point"}));
  const FakeQuantize clipped({.bits = 4, .source = ScaleSource::clipped});
  EXPECT_EQ(names(clipped.parameters()), std::vector<std::string>{"alpha"});
  EXPECT_EQ(names(FakeQuantize({.observer = quant::ObserverKind::histogram}).state_dict())[5],
            "activation_post_process.histogram");
}

TEST(FakeQuantizeModule, HasTheIntegersOfItsBits) {
  const auto expect = [](const FakeQuantizeOptions& o, std::int64_t least, std::int64_t most) {
    const FakeQuantize f(o);
    EXPECT_EQ(f.quant_min(), least) << f.describe();
    EXPECT_EQ(f.quant_max(), most) << f.describe();
  };
  expect({.bits = 8}, 0, 255);
  expect({.bits = 8, .reduce_range = true}, 0, 127);
  expect({.bits = 2}, 0, 3);
  expect({.bits = 2, .is_signed = true}, -2, 1);
  expect({.bits = 4, .is_signed = true, .narrow_range = true}, -7, 7);
  expect({.bits = 8, .is_signed = true, .reduce_range = true}, -64, 63);
  expect({.bits = 16, .is_signed = true}, -32768, 32767);
  EXPECT_THROW(FakeQuantize({.bits = 1}), Error);
  EXPECT_THROW(FakeQuantize({.bits = 9}), Error);
  EXPECT_THROW(FakeQuantize({.bits = 2, .reduce_range = true}), Error);
  EXPECT_THROW(FakeQuantize({.narrow_range = true}), Error);
  EXPECT_THROW(FakeQuantize({.is_signed = true, .source = ScaleSource::clipped}), Error);
  EXPECT_THROW(FakeQuantize({.axis = 0}), Error);
}

// Against PyTorch's observers: what they give is what the input is quantized with.
TEST(FakeQuantizeModule, QuantizesWithTheRangeThatItJustSaw) {
  int run = 0;
  for (const test::GoldenEntry& e : test::read_goldens("quantize.json")) {
    if (e.op != "observer" || e.integer("quant_min") != 0 || e.integer("quant_max") != 255 || e.has("axis")) continue;
    SCOPED_TRACE(e.name);
    ++run;
    const FakeQuantize fake({.symmetric = e.flag("symmetric"),
                             .observer = *quant::parse_observer_kind(e.text("kind")),
                             .averaging_constant = e.real("averaging_constant", 0.01),
                             .bins = e.integer("bins", 2048)});
    for (std::int64_t i = 0; i < e.integer("batches"); ++i) {
      const auto of = [&](const char* what) {
        return test::to_tensor(e.tensor(what + std::to_string(i))).reshape({1});
      };
      const Tensor x = test::to_tensor(e.tensor("batch" + std::to_string(i)));
      const Tensor want = fake_quantize(x, of("scale"), of("zero"), {0, 255});
      EXPECT_EQ(numbers(fake(x)), numbers(want)) << i;
      EXPECT_EQ(numbers(fake.scale), numbers(of("scale")));
    }
  }
  EXPECT_GT(run, 3);
}

TEST(FakeQuantizeModule, SwitchesDoWhatTheySay) {
  const FakeQuantize fake(quant::activation_options());
  const Tensor x = tensor({-1, 0.3, 2}), wide = tensor({-10, 0.3, 20});
  fake.disable_fake_quant();
  EXPECT_EQ(numbers(fake(x)), numbers(x));
  const auto scale = numbers(fake.scale);
  EXPECT_NE(scale[0], 1);  // it was observed
  quant::enable_observer(fake, false);
  quant::enable_fake_quant(fake);
  EXPECT_EQ(numbers(fake(wide)), numbers(fake_quantize(wide, fake.scale, fake.zero_point, {0, 255})));
  EXPECT_EQ(numbers(fake.scale), scale);
  fake.enable_observer();
  // In evaluation nothing is observed but by option.
  fake.eval();
  fake(wide);
  EXPECT_EQ(numbers(fake.scale), scale);
  FakeQuantizeOptions options = quant::activation_options();
  options.observe_in_eval = true;
  const FakeQuantize calibrated(options);
  calibrated.eval();
  calibrated(wide);
  EXPECT_NE(numbers(calibrated.scale), std::vector<double>{1});
  // The switches travel with the state.
  fake.disable_observer();
  fake.train();
  const FakeQuantize other(quant::activation_options());
  other(x);
  other.load_state_dict(fake.state_dict());
  EXPECT_FALSE(other.is_observer_enabled());
  EXPECT_TRUE(other.is_fake_quant_enabled());
  other(wide);
  EXPECT_EQ(numbers(other.scale), scale);
  // Copies share them, clones don't.
  const FakeQuantize same = other, own = nn::clone(other);
  same.disable_fake_quant();
  EXPECT_FALSE(other.is_fake_quant_enabled());
  EXPECT_TRUE(own.is_fake_quant_enabled());
  // Calibration ends when the observer is disabled: a step that is skipped later doesn't undo it.
  other.enable_observer();
  other(wide);
  other.disable_observer();
  const auto calibrated_scale = numbers(other.scale);
  other.commit(tensor({1.0}));
  EXPECT_EQ(numbers(other.scale), calibrated_scale);
  // An observer with a histogram is searched when it is done.
  const FakeQuantize histogram({.observer = quant::ObserverKind::histogram, .bins = 64});
  histogram.disable_fake_quant();
  histogram(x);
  EXPECT_EQ(numbers(histogram.scale), std::vector<double>{1});
  histogram.disable_observer();
  EXPECT_NE(numbers(histogram.scale), std::vector<double>{1});
}

TEST(QuantizeOps, AreCapturedAndReplayed) {
  const Tensor weight = randn({5, 6}).requires_grad_(), alpha = tensor({1.5}).requires_grad_();
  const Tensor learned = tensor({0.05}).requires_grad_();
  const Tensor low = tensor({-1.0}), high = tensor({2.0});
  const auto step = [&](const Tensor& x) {
    const auto [scale, zero] = quantization_parameters(low, high);
    const Tensor fixed = zeros({1}, {.dtype = i32});
    const Tensor w = fake_quantize_learnable(weight, learned, fixed);
    const Tensor y = linear(fake_quantize(pact(x, alpha), scale, zero, {.quant_min = 0, .quant_max = 255}), w);
    const auto grads = grad({sum(y)}, {weight, alpha, learned});
    return std::vector<Tensor>{y, grads[0], grads[1], grads[2]};
  };
  auto fast = capture(step);
  for (int i = 0; i < 5; ++i) {
    const Tensor x = randn({7, 6}) * 2;
    const auto got = fast(x), want = step(x);
    for (std::size_t k = 0; k < got.size(); ++k) EXPECT_EQ(got[k].to_vector<float>(), want[k].to_vector<float>()) << k;
  }
  EXPECT_EQ(fast.stats().replayed, 3U) << fast.why_not();
}

struct Net : nn::Module<Net> {
  FakeQuantize input = child("input", FakeQuantize{quant::activation_options()});
  FakeQuantize weight = child("weight", FakeQuantize{quant::weight_options(4)});
  nn::Linear fc = child("fc", nn::Linear{{.in = 6, .out = 4}});
  Tensor forward(const Tensor& x) const { return linear(input(x), weight(fc.weight), fc.bias); }
};

// A step that the scaler skips leaves ranges, scales and zero points as they were, without a read by the host; the same
// in captured steps, on any device.
TEST(FakeQuantizeModule, SkippedStepsLeaveNoTraceInARegion) {
  const Net start;
  std::vector<std::vector<std::vector<double>>> ends;
  for (const bool captured : {false, true}) {
    const Net net = nn::clone(start);
    manual_seed(21);
    optim::SGD optimizer(net.parameters(), {.lr = 0.05});
    amp::GradScaler scaler(amp::GradScalerOptions{.init_scale = 128});
    const auto train = [&](const Tensor& x, const Tensor& y) {
      optimizer.zero_grad();
      Tensor loss;
      {
        const amp::Autocast region{{.dtype = f16}};
        const Tensor out = net(x);
        loss = mse_loss(out, y);
      }
      scaler.scale(loss).backward();
      const auto step = scaler.step(optimizer);
      quant::commit(net, step.found_inf());
      scaler.update();
      return loss;
    };
    auto fast = capture(train);
    for (int i = 0; i < 9; ++i) {
      const Tensor x = randn({8, 6}) * (i + 1), y = randn({8, 4});
      const bool overflows = i % 4 == 3;
      const auto before = state_of(net);
      // The target makes the gradient infinite.
      const Tensor target = overflows ? y * 1e38 : y;
      if (captured) {
        fast(x * (overflows ? 50 : 1), target);
      } else {
        train(x * (overflows ? 50 : 1), target);
      }
      EXPECT_EQ(state_of(net) == before, overflows) << i;
    }
    if (captured) {
      EXPECT_GE(fast.stats().replayed, 6U) << fast.why_not();
    }
    ends.push_back(state_of(net));
  }
  EXPECT_EQ(ends[0], ends[1]);
}

TEST(FakeQuantizeModule, ARepeatedForwardPassUsesTheSameScale) {
  manual_seed(24);
  const FakeQuantize fake(quant::activation_options()), other = nn::clone(fake);
  fake(tensor({-1, 1}));
  other(tensor({-1, 1}));
  const Tensor x = randn({6, 7}).requires_grad_(), y = x.detach().clone().requires_grad_();
  sum(square(checkpoint([&](const Tensor& in) { return fake(in * 3); }, x))).backward();
  sum(square(other(y * 3))).backward();
  EXPECT_EQ(numbers(x.grad()), numbers(y.grad()));
  EXPECT_EQ(state_of(fake), state_of(other));
}

TEST(FakeQuantizeModule, InARegionIsOfTheRegionsDtypeAndReadsFloat32) {
  const FakeQuantize fake(quant::weight_options(4));
  const Tensor w = randn({4, 9}).requires_grad_();
  const Tensor plain = nn::clone(fake)(w);
  const amp::Autocast region{{.dtype = bf16}};
  const Tensor y = fake(w);
  EXPECT_EQ(y.dtype(), bf16);
  EXPECT_EQ(numbers(y), numbers(plain.to(bf16)));
  EXPECT_EQ(fake.scale.dtype(), f32);
}

TEST(FakeQuantizeModule, LearnsItsScale) {
  manual_seed(22);
  const FakeQuantize fake({.bits = 4, .is_signed = true, .symmetric = true, .source = ScaleSource::learned});
  const Tensor x = randn({64, 32});
  const Tensor y = fake(x);
  // LSQ's first value; rounded a few times.
  const double first = 2 * mean(abs(x)).item<double>() / std::sqrt(7.0);
  EXPECT_NEAR(fake.scale.item<double>(), first, 4 * 0x1p-24 * first);
  EXPECT_EQ(numbers(y), numbers(fake_quantize(x, fake.scale.detach(), zeros({1}, {.dtype = i32}), {-8, 7})));
  const Tensor g = randn(x.sizes());
  backward({y}, {g});
  const Tensor scale = fake.scale.detach().clone().requires_grad_();
  backward({fake_quantize_learnable(x, scale, zeros({1}, {.dtype = i32}), {-8, 7, {}, lsq_grad_factor(x.numel(), 7)})},
           {g});
  EXPECT_EQ(numbers(fake.scale.grad()), numbers(scale.grad()));
  // Training it lowers the error of a scale that starts too large. The best one for 16 levels of normal numbers is
  // near a third of the deviation.
  const FakeQuantize wrong({.bits = 4,
                            .is_signed = true,
                            .symmetric = true,
                            .axis = 1,
                            .channels = 32,
                            .source = ScaleSource::learned,
                            .gradient_elements = 64});
  Tensor start = wrong.scale.detach();
  start.fill_(0.9);
  optim::SGD optimizer(wrong.parameters(), {.lr = 0.05});
  const auto error = [&] { return mean(square(wrong(x) - x)); };
  const double before = error().item<double>();
  for (int i = 0; i < 60; ++i) {
    optimizer.zero_grad();
    sum(square(wrong(x) - x)).backward();
    optimizer.step();
  }
  EXPECT_LT(error().item<double>(), before / 2);
  for (const double s : numbers(wrong.scale)) {
    EXPECT_GT(s, 0.15);
    EXPECT_LT(s, 0.6);
  }
  // A loaded scale is kept, and one that training made negative counts as the smallest.
  const FakeQuantize loaded({.bits = 4, .is_signed = true, .symmetric = true, .source = ScaleSource::learned});
  loaded.load_state_dict(fake.state_dict());
  loaded(x * 10);
  EXPECT_EQ(numbers(loaded.scale), numbers(fake.scale));
  start = loaded.scale.detach();
  start.fill_(-1);
  EXPECT_TRUE(std::isfinite(sum(loaded(x)).item<double>()));
  EXPECT_LE(max(abs(loaded(x).detach())).item<double>(), 8 * 0x1p-23);
}

TEST(FakeQuantizeModule, LearnsAZeroPointAndFollowsItsObserver) {
  manual_seed(23);
  const FakeQuantize fake({.bits = 4, .is_signed = true, .source = ScaleSource::learned});
  const Tensor x = rand({50, 8}) * 3 + 1;
  sum(fake(x)).backward();
  EXPECT_TRUE(fake.zero_point.grad().defined());
  EXPECT_TRUE(fake.scale.grad().defined());
  fake.enable_observer();
  const Tensor y = fake(x);
  const auto [scale, zero] = fake.calculate_qparams();
  EXPECT_EQ(numbers(fake.scale), numbers(scale));
  EXPECT_EQ(numbers(fake.zero_point), numbers(zero));
  EXPECT_EQ(numbers(y), numbers(fake_quantize(x, scale.reshape({1}), zero.reshape({1}), {-8, 7})));
  // Twice in one step.
  sum(fake(x) + fake(x * 2)).backward();
}

TEST(FakeQuantizeModule, LearnsABound) {
  const FakeQuantize fake({.bits = 4, .source = ScaleSource::clipped, .alpha = 3});
  const Tensor x = tensor({-1, 0.9, 2, 2.95, 3, 7}).requires_grad_();
  const Tensor y = fake(x), g = tensor({1, 2, 3, 4, 5, 6});
  // Steps of 3 / 15.
  const std::vector<double> want{0, 0.8, 2, 3, 3, 3};
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(numbers(y)[i], want[i], i == 1 ? 0.2 : 1e-6) << i;
  backward({y}, {g});
  EXPECT_EQ(numbers(x.grad()), (std::vector<double>{0, 2, 3, 4, 0, 0}));
  EXPECT_EQ(numbers(fake.alpha.grad()), std::vector<double>{11});
  EXPECT_EQ(numbers(fake.scale), numbers(tensor({3.0}) / 15));
  // A bound that 16 bits don't hold: what is clipped is the largest integer all the same, and has a gradient.
  for (const DType dtype : {f16, bf16}) {
    const FakeQuantize wide({.bits = 16, .source = ScaleSource::clipped, .alpha = 1.0058});
    const Tensor large = tensor({5.0}, {.dtype = dtype}).requires_grad_(), out = wide(large);
    EXPECT_EQ(numbers(out), numbers(tensor({1.0058}).to(dtype)));
    sum(out).backward();
    EXPECT_EQ(numbers(wide.alpha.grad()), std::vector<double>{1});
  }
}

}  // namespace
}  // namespace halfstep
