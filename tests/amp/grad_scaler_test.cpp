// SPDX-License-Identifier: Apache-2.0
#include "halfstep/amp/grad_scaler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/log.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;

using amp::GradScaler;
using Values = std::vector<double>;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const Values kInjected = {0, kInf, kNaN, -kInf};

#define EXPECT_MESSAGE(statement, part)                                   \
  do {                                                                    \
    const std::string text = error_of<AmpError>([&] { statement; });      \
    EXPECT_NE(text.find(part), std::string::npos) << "message: " << text; \
  } while (false)

Tensor parameter(const Values& values, const Shape& sizes, DType dtype = f32) {
  return tensor(values, sizes, {.dtype = dtype, .requires_grad = true});
}

void set_grad(const Tensor& p, const Values& values, DType dtype) {
  p.set_grad(tensor(values, p.sizes(), {.dtype = dtype}));
}

// A scaler in use, and an optimizer of parameters called p0, p1...
struct Trial {
  NamedTensors parameters;
  optim::SGD optimizer;
  GradScaler scaler;

  static NamedTensors named(const std::vector<Tensor>& tensors) {
    NamedTensors result;
    for (const Tensor& t : tensors) result.push_back({"p" + std::to_string(result.size()), t});
    return result;
  }
  explicit Trial(const std::vector<Tensor>& tensors, const amp::GradScalerOptions& options = {.init_scale = 4})
      : parameters(named(tensors)), optimizer(parameters, {.lr = 1}), scaler(options) {
    scaler.scale(zeros({}));
  }
  const Tensor& p(std::size_t i = 0) const { return parameters[i].tensor; }
};

// ------------------------------------------------------------------------------------------------- states and errors

TEST(GradScaler, CallsOutOfOrderSayWhatIsWrong) {
  Trial s({parameter({1, 2}, {2})});
  EXPECT_MESSAGE(s.scaler.update(), "update: no step()");
  set_grad(s.p(), {4, 8}, f32);
  s.scaler.unscale_(s.optimizer);
  EXPECT_MESSAGE(s.scaler.unscale_(s.optimizer), "unscale_: called already");
  s.scaler.step(s.optimizer);
  EXPECT_MESSAGE(s.scaler.unscale_(s.optimizer), "unscale_: called after step()");
  EXPECT_MESSAGE(s.scaler.step(s.optimizer), "step: called already");
  s.scaler.update();
  EXPECT_MESSAGE(s.scaler.update(), "update: no step()");
  EXPECT_EQ(s.p().to_vector<double>(), (Values{0, 0}));  // one step of [1, 2], however many errors
}

TEST(GradScaler, BeforeTheFirstScale) {
  const Tensor p = parameter({1}, {1});
  optim::SGD optimizer({{"p", p}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 8}};
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_EQ(scaler.growth_tracker(), 0);
  EXPECT_FALSE(scaler.scale_tensor().defined());
  set_grad(p, {8}, f32);
  EXPECT_MESSAGE(scaler.unscale_(optimizer), "scaler.scale(loss)");
  EXPECT_MESSAGE(scaler.step(optimizer), "scaler.scale(loss)");
  EXPECT_MESSAGE(scaler.update(), "scaler.scale(loss)");
  scaler.update(16);
  EXPECT_EQ(scaler.get_scale(), 16);
  EXPECT_EQ(scaler.scale(ones({})).item<double>(), 16);
  EXPECT_TRUE(scaler.scale_tensor().defined());
}

TEST(GradScaler, AStepWithoutGradientsLeavesItUsable) {
  Trial s({parameter({1}, {1})});
  EXPECT_MESSAGE(s.scaler.step(s.optimizer), "no parameter of the optimizer has a gradient");
  s.scaler.unscale_(s.optimizer);  // says nothing, as PyTorch's
  EXPECT_MESSAGE(s.scaler.step(s.optimizer), "no parameter of the optimizer has a gradient");
  set_grad(s.p(), {4}, f32);
  s.scaler.unscale_(s.optimizer);
  EXPECT_TRUE(s.scaler.step(s.optimizer).ran());
  s.scaler.update();
  EXPECT_EQ(s.p().item<double>(), 0);
}

TEST(GradScaler, AStepThatThrowsCanBeRepeatedAfterUpdate) {
  struct Failing : optim::SGD {
    using optim::SGD::SGD;
    void step_unless(const Tensor& found, const Tensor& scale) override {
      if (fails) throw std::runtime_error("device lost");
      optim::SGD::step_unless(found, scale);
    }
    bool unscales() const override { return fused; }
    bool fused = false;
    bool fails = true;
  };
  for (const bool fused : {false, true}) {
    const Tensor p = parameter({1}, {1});
    Failing optimizer({{"p", p}}, {.lr = 1});
    optimizer.fused = fused;
    GradScaler scaler{{.init_scale = 4}};
    scaler.scale(zeros({}));
    set_grad(p, {4}, f32);
    EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
    optimizer.fails = false;
    EXPECT_TRUE(scaler.step(optimizer).ran());  // unscaled once
    EXPECT_EQ(p.item<double>(), 0);
  }
}

TEST(GradScaler, OptionsThatMakeNoSense) {
  EXPECT_MESSAGE(GradScaler({.growth_factor = 1}), "growth factor above 1");
  EXPECT_MESSAGE(GradScaler({.backoff_factor = 1}), "backoff factor between 0 and 1");
  EXPECT_MESSAGE(GradScaler({.backoff_factor = 0}), "backoff factor between 0 and 1");
  EXPECT_MESSAGE(GradScaler({.growth_interval = 0}), "growth interval");
  for (const double scale : {0.0, -1.0, kInf, kNaN, 1e39})
    EXPECT_MESSAGE(GradScaler({.init_scale = scale}), "scale above 0");
  EXPECT_MESSAGE(GradScaler({.floor = 4, .cap = 2}), "floor <= cap");
  EXPECT_MESSAGE(GradScaler({.floor = kNaN}), "floor");
  EXPECT_MESSAGE(GradScaler({.init_scale = 1e-46}), "scale above 0");  // 0 in float32
  GradScaler scaler;
  EXPECT_MESSAGE(scaler.set_growth_factor(0.5), "growth factor");
  EXPECT_MESSAGE(scaler.set_backoff_factor(2), "backoff factor");
  EXPECT_MESSAGE(scaler.set_growth_interval(-1), "growth interval");
  EXPECT_MESSAGE(scaler.update(0), "scale above 0");
  EXPECT_EQ(scaler.options().init_scale, 65536);
  EXPECT_EQ(scaler.options().growth_interval, 2000);
}

// ---------------------------------------------------------------------------------------------------------- scaling

TEST(GradScaler, ScalesInFloat32) {
  GradScaler scaler;
  for (const Shape& sizes : {Shape{}, Shape{1}}) {
    // PyTorch keeps a one-element vector in f16, where 2 * 65536 is infinite.
    const Tensor loss = full(sizes, 2, {.dtype = f16});
    EXPECT_EQ(scaler.scale(loss).dtype(), f32);
    EXPECT_EQ(sum(scaler.scale(loss)).item<double>(), 131072);
  }
  EXPECT_EQ(scaler.scale(ones({}, {.dtype = f64})).dtype(), f64);
  EXPECT_EQ(scaler.scale(ones({}, {.dtype = bf16})).dtype(), f32);
  EXPECT_THROW(scaler.scale(ones({}, {.dtype = i64})), DTypeError);
  EXPECT_THROW(scaler.scale(Tensor()), Error);
  const auto list = scaler.scale(std::vector<Tensor>{ones({}), full({}, 3)});
  EXPECT_EQ(list[1].item<double>(), 3 * 65536);
  const Tensor x = parameter({3}, {}, f16);
  GradScaler smaller{{.init_scale = 1024}};  // the gradient of an f16 loss is f16: 65536 would not fit
  smaller.scale(x * 0.5).backward();
  EXPECT_EQ(x.grad().dtype(), f16);
  EXPECT_EQ(x.grad().item<double>(), 512);
}

// -------------------------------------------------------------------------------------------------------- unscaling

TEST(GradScaler, UnscalesEveryDtypeAndLayout) {
  const std::vector<Tensor> params = {parameter(Values(6), {2, 3}),
                                      parameter(Values(6), {2, 3}, f16),
                                      parameter(Values(6), {2, 3}, bf16),
                                      parameter(Values(6), {2, 3}, f64),
                                      parameter(Values(6), {2, 3}),
                                      parameter(Values(6), {2, 3}),
                                      parameter({}, {0, 3}),
                                      parameter({1}, {1})};
  Trial s(params, {.init_scale = 2});
  const Values g = {2, 4, 6, 8, 10, 12}, half = {1, 2, 3, 4, 5, 6};
  set_grad(params[0], g, f32);
  set_grad(params[1], g, f16);
  set_grad(params[2], g, bf16);
  set_grad(params[3], g, f64);
  const Tensor transposed = tensor({2, 8, 4, 10, 6, 12}, {3, 2}).t();
  params[4].set_grad(transposed);
  const Tensor wide = tensor({2, -1, 4, -1, 6, -1, 8, -1, 10, -1, 12, -1}, {2, 6});
  params[5].set_grad(wide.slice(1, 0, 6, 2));
  params[6].set_grad(zeros({0, 3}));
  // params[7] has none.
  const Tensor norm = s.scaler.unscale_(s.optimizer, {.norm = true});
  const DType dtypes[] = {f32, f32, bf16, f64, f32, f32};  // f16 gradients become f32
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(params[i].grad().to_vector<double>(), half) << i;
    EXPECT_EQ(params[i].grad().dtype(), dtypes[i]) << i;
  }
  EXPECT_EQ(params[6].grad().numel(), 0);
  EXPECT_FALSE(params[7].grad().defined());
  EXPECT_EQ(wide.to_vector<double>()[1], -1);  // what lies between is left alone
  // 6 gradients of 1, 4, ... 36 = 91.
  EXPECT_FLOAT_EQ(norm.item<float>(), std::sqrt(6.0f * 91.0f));
}

TEST(GradScaler, TheNormIsThatOfLargeGradientsToo) {
  const std::int64_t n = 100000;
  Values values;
  double squares = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    values.push_back(static_cast<float>(std::sin(static_cast<double>(i)) * 1e30));
    squares += values.back() * values.back();
  }
  Trial s({parameter(Values(values.size()), {n})}, {.init_scale = 1});
  set_grad(s.p(), values, f32);
  const Tensor norm = s.scaler.unscale_(s.optimizer, {.norm = true});
  // Sums in double: only the result is rounded to float32.
  EXPECT_NEAR(norm.item<double>() / std::sqrt(squares), 1, 2e-7);
}

TEST(GradScaler, AnyNonFiniteElementIsFoundAndNamed) {
  // Places in whole vectors, tails and behind the first chunk.
  for (const std::int64_t at : {0, 7, 15, 16, 16383, 16384, 40000, 40002}) {
    for (std::size_t kind = 1; kind < 4; ++kind) {
      for (const DType dtype : {f32, f16, bf16, f64}) {
        Trial s({parameter({1}, {1}), parameter(Values(40003), {40003}, dtype), parameter({1}, {1})});
        set_grad(s.p(0), {1}, f32);
        Values values(40003, 1);
        values[static_cast<std::size_t>(at)] = kInjected[kind];
        set_grad(s.p(1), values, dtype);
        set_grad(s.p(2), {1}, f32);
        const auto result = s.scaler.step(s.optimizer);
        ASSERT_FALSE(result.ran()) << at << " " << kind << " " << name(dtype);
        ASSERT_EQ(result.overflows(), (std::vector<std::string>{"p1"}));
        ASSERT_EQ(s.p(0).item<double>(), 1);
      }
    }
  }
}

TEST(GradScaler, AllOverflowsAreListed) {
  Trial s({parameter({1}, {1}), parameter({1}, {1}), parameter({1}, {1})});
  set_grad(s.p(0), {1}, f32);
  set_grad(s.p(1), {kNaN}, f32);
  set_grad(s.p(2), {kInf}, f32);
  const auto result = s.scaler.step(s.optimizer);
  EXPECT_EQ(result.first_overflow(), "p1");
  EXPECT_EQ(result.overflows(), (std::vector<std::string>{"p1", "p2"}));
  s.scaler.update();
  s.optimizer.zero_grad();
  EXPECT_EQ(result.first_overflow(), "p1");  // a result outlives its step
}

TEST(GradScaler, UnscalingThatOverflowsIsFound) {
  Trial s({parameter({1}, {1})}, {.init_scale = 0.5});
  set_grad(s.p(), {3e38}, f32);  // finite, but 6e38 isn't
  EXPECT_FALSE(s.scaler.step(s.optimizer).ran());
  EXPECT_EQ(s.p().item<double>(), 1);
}

// One bad element in a gradient of any length, at any place, with and without the norm: long gradients are checked in
// lanes and chunks, and their rest one by one.
TEST(GradScaler, OneBadElementIsFoundAnywhere) {
  for (const std::int64_t n : {1, 16, 33, 1100, 17000}) {
    for (const std::int64_t at : {n / 2, n - 1}) {
      for (const DType dtype : {f32, f64, bf16, f16}) {
        for (const bool norm : {false, true}) {
          for (const double bad : {kInf, kNaN, 3e38}) {
            if (bad == 3e38 && dtype != f32 && dtype != bf16) continue;
            const Tensor p = zeros({n}, {.dtype = dtype, .requires_grad = true});
            Trial s({p}, {.init_scale = 0.5});
            Tensor g = ones({n}, {.dtype = dtype});
            g.narrow(0, at, 1).fill_(bad);  // 3e38 is finite, and unscaled it isn't
            p.set_grad(g);
            s.scaler.unscale_(s.optimizer, {.norm = norm});
            const auto result = s.scaler.step(s.optimizer);
            ASSERT_FALSE(result.ran()) << n << " " << at << " " << name(dtype) << " " << norm << " " << bad;
            ASSERT_EQ(p.to_vector<double>(), Values(static_cast<std::size_t>(n), 0));
          }
        }
      }
    }
  }
}

TEST(GradScaler, FinitePartsAreUnscaledWhenOthersAreNot) {
  Trial s({parameter({1, 1, 1}, {3})});
  set_grad(s.p(), {8, kInf, 4}, f32);
  EXPECT_FALSE(s.scaler.step(s.optimizer).ran());
  EXPECT_EQ(s.p().grad().to_vector<double>(), (Values{2, kInf, 1}));
  EXPECT_EQ(s.p().to_vector<double>(), (Values{1, 1, 1}));
}

TEST(GradScaler, GradientsAfterASkippedStepAreTheSameForAllOptimizers) {
  const Tensor a = parameter({1, 1}, {2}), b = parameter({1, 1}, {2});
  optim::SGD sgd({{"a", a}}, {.lr = 1, .momentum = 0.9});
  optim::Adam adam({{"b", b}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 16}};
  scaler.scale(zeros({}));
  set_grad(a, {32, kInf}, f32);
  set_grad(b, {32, kInf}, f32);
  scaler.step(sgd);
  scaler.step(adam);
  EXPECT_EQ(a.grad().to_vector<double>(), (Values{2, kInf}));
  EXPECT_EQ(b.grad().to_vector<double>(), (Values{2, kInf}));
  scaler.update();
  // Nor did the skipped step reach their states: the next one is the first.
  const Tensor c = parameter({1, 1}, {2});
  optim::Adam control({{"c", c}}, {.lr = 1});
  for (const Tensor& t : {b, c}) set_grad(t, {3, 4}, f32);
  adam.step();
  control.step();
  EXPECT_EQ(b.to_vector<float>(), c.to_vector<float>());
}

TEST(GradScaler, GradientsBrokenAfterUnscaleReachTheParameters) {
  // The check is not made again, as in PyTorch.
  Trial s({parameter({1}, {1})});
  set_grad(s.p(), {4}, f32);
  s.scaler.unscale_(s.optimizer);
  s.p().grad().fill_(kInf);
  EXPECT_TRUE(s.scaler.step(s.optimizer).ran());
  EXPECT_EQ(s.p().item<double>(), -kInf);
}

TEST(GradScaler, ASharedParameterIsNamed) {
  const Tensor shared = parameter({1}, {1}), own = parameter({1}, {1});
  optim::SGD first({{"shared", shared}}, {.lr = 1});
  optim::SGD second({{"own", own}, {"tied", shared}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 4}};
  scaler.scale(zeros({}));
  set_grad(shared, {4}, f32);
  set_grad(own, {4}, f32);
  scaler.unscale_(first);
  EXPECT_MESSAGE(scaler.unscale_(second), "the gradient of tied");
  EXPECT_EQ(shared.grad().item<double>(), 1);
  EXPECT_EQ(own.grad().item<double>(), 4);  // the refused call changed nothing
}

TEST(GradScaler, ANewGradientInTheSameMemoryIsNoMistake) {
  Trial s({parameter({1}, {1})});
  for (int step = 0; step < 3; ++step) {
    s.optimizer.zero_grad(false);
    s.scaler.scale(sum(s.p())).backward();
    EXPECT_TRUE(s.scaler.step(s.optimizer).ran());
    s.scaler.update();
  }
  EXPECT_EQ(s.p().item<double>(), -2);
}

// ---------------------------------------------------------------------------------------------------------- updates

TEST(GradScaler, SeveralOptimizersSkipEachOnItsOwn) {
  const Tensor p0 = parameter({1}, {1}), p1 = parameter({1}, {1});
  optim::SGD o0({{"p0", p0}}, {.lr = 1}), o1({{"p1", p1}}, {.lr = 1});
  GradScaler scaler{{.init_scale = 128}};
  scaler.scale(zeros({}));
  set_grad(p0, {128}, f32);
  set_grad(p1, {kInf}, f32);
  EXPECT_TRUE(scaler.step(o0).ran());
  EXPECT_FALSE(scaler.step(o1).ran());
  scaler.update();
  EXPECT_EQ(p0.item<double>(), 0);
  EXPECT_EQ(p1.item<double>(), 1);
  EXPECT_EQ(scaler.get_scale(), 64);
  EXPECT_EQ(scaler.growth_tracker(), 0);
}

TEST(GradScaler, StaticScale) {
  Trial s({parameter({1}, {1})}, {.init_scale = 128, .growth_interval = 1, .dynamic = false});
  for (const double g : {128.0, kInf, 128.0}) {
    set_grad(s.p(), {g}, f32);
    EXPECT_EQ(s.scaler.step(s.optimizer).ran(), std::isfinite(g));
    s.scaler.update();
    EXPECT_EQ(s.scaler.get_scale(), 128);
  }
  EXPECT_EQ(s.p().item<double>(), -1);
  EXPECT_MESSAGE(s.scaler.update(), "update: no step()");
}

TEST(GradScaler, TheFloorHoldsAndIsSaidLoudly) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel level, std::string_view text) {
    if (level >= LogLevel::warning) said.emplace_back(text);
  });
  Trial s({parameter({1}, {1})}, {.init_scale = 4, .floor = 1});
  Values scales;
  for (int i = 0; i < 4; ++i) {
    set_grad(s.p(), {kInf}, f32);
    s.scaler.step(s.optimizer);
    s.scaler.update();
    scales.push_back(s.scaler.get_scale());
    if (i == 0) {
      EXPECT_TRUE(said.empty());
    }
  }
  const std::size_t count = said.size();
  // A good step at the floor is nothing to complain of.
  set_grad(s.p(), {1}, f32);
  s.scaler.step(s.optimizer);
  s.scaler.update();
  set_log_sink({});
  EXPECT_EQ(scales, (Values{2, 1, 1, 1}));
  ASSERT_GE(count, 1u);
  EXPECT_EQ(said.size(), count);
  EXPECT_NE(said[0].find("floor of 1"), std::string::npos) << said[0];
}

TEST(GradScaler, GrowthAtTheFloorIsNoOverflow) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
  // The scale can't grow (cap = floor): every interval ends with tracker 0 and the scale unchanged.
  Trial s({parameter({1}, {1})}, {.init_scale = 2, .growth_interval = 1, .floor = 2, .cap = 2});
  set_grad(s.p(), {1}, f32);
  s.scaler.step(s.optimizer);
  s.scaler.update();
  set_log_sink({});
  EXPECT_TRUE(said.empty()) << said[0];
  EXPECT_EQ(s.scaler.get_scale(), 2);
}

TEST(GradScaler, TheCapHolds) {
  Trial s({parameter({1}, {1})}, {.init_scale = 4, .growth_interval = 1, .cap = 24});
  Values scales;
  for (int i = 0; i < 5; ++i) {
    set_grad(s.p(), {1}, f32);
    s.scaler.step(s.optimizer);
    s.scaler.update();
    scales.push_back(s.scaler.get_scale());
  }
  EXPECT_EQ(scales, (Values{8, 16, 24, 24, 24}));
}

TEST(GradScaler, AShorterIntervalTakesEffectAtOnce) {
  Trial s({parameter({1}, {1})}, {.init_scale = 4, .growth_interval = 10});
  const auto good = [&] {
    set_grad(s.p(), {1}, f32);
    s.scaler.step(s.optimizer);
    s.scaler.update();
  };
  for (int i = 0; i < 5; ++i) good();
  EXPECT_EQ(s.scaler.growth_tracker(), 5);
  s.scaler.set_growth_interval(3);  // below the count: PyTorch would never grow again
  good();
  EXPECT_EQ(s.scaler.get_scale(), 8);
  EXPECT_EQ(s.scaler.growth_tracker(), 0);
}

TEST(GradScaler, AScaleOfOnesOwn) {
  Trial s({parameter({1}, {1})});
  set_grad(s.p(), {1}, f32);
  s.scaler.step(s.optimizer);
  s.scaler.update();
  s.scaler.update(1024);  // needs no step before
  EXPECT_EQ(s.scaler.get_scale(), 1024);
  EXPECT_EQ(s.scaler.growth_tracker(), 1);
  set_grad(s.p(), {1024}, f32);
  s.scaler.unscale_(s.optimizer);
  s.scaler.update(2048);  // forgets what was unscaled
  EXPECT_MESSAGE(s.scaler.update(), "update: no step()");
}

// ------------------------------------------------------------------------------------------------------------ state

TEST(GradScaler, StateBeforeAndAfterTheFirstUse) {
  Trial used({parameter({1}, {1})},
             {.init_scale = 32, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 7});
  set_grad(used.p(), {1}, f32);
  used.scaler.step(used.optimizer);
  used.scaler.update();
  const auto state = used.scaler.state_dict();
  EXPECT_EQ(state, (std::map<std::string, double>{{"scale", 32},
                                                  {"growth_factor", 4},
                                                  {"backoff_factor", 0.25},
                                                  {"growth_interval", 7},
                                                  {"_growth_tracker", 1}}));
  GradScaler fresh;
  fresh.load_state_dict(state);
  EXPECT_EQ(fresh.state_dict(), state);
  fresh.scale(zeros({}));
  EXPECT_EQ(fresh.state_dict(), state);
  Trial other({parameter({1}, {1})});
  other.scaler.load_state_dict(state);
  EXPECT_EQ(other.scaler.state_dict(), state);
  EXPECT_EQ(GradScaler().state_dict().at("scale"), 65536);
}

TEST(GradScaler, StatesThatDoNotFit) {
  GradScaler scaler;
  EXPECT_MESSAGE(scaler.load_state_dict({}), "saved by a disabled scaler");
  auto state = scaler.state_dict();
  state.erase("_growth_tracker");
  EXPECT_MESSAGE(scaler.load_state_dict(state), "'_growth_tracker'");
  state = scaler.state_dict();
  for (const auto& [key, bad] : std::map<std::string, double>{{"scale", -1},
                                                              {"growth_factor", 1},
                                                              {"backoff_factor", 2},
                                                              {"growth_interval", 0},
                                                              {"_growth_tracker", -1}}) {
    auto broken = state;
    broken[key] = bad;
    EXPECT_NE(error_of<AmpError>([&] { scaler.load_state_dict(broken); }), "") << key;
    broken[key] = kNaN;
    EXPECT_NE(error_of<AmpError>([&] { scaler.load_state_dict(broken); }), "") << key;
  }
  EXPECT_EQ(scaler.state_dict(), state);
  GradScaler off{{.enabled = false}};
  off.load_state_dict(state);
  EXPECT_TRUE(off.state_dict().empty());
}

TEST(GradScaler, Disabled) {
  const Tensor p = parameter({1}, {1});
  optim::SGD optimizer({{"p", p}}, {.lr = 1});
  GradScaler scaler{{.enabled = false}};
  const Tensor loss = sum(p);
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_FALSE(scaler.is_enabled());
  loss.backward();
  p.grad().fill_(kInf);
  EXPECT_FALSE(scaler.unscale_(optimizer).defined());
  const auto result = scaler.step(optimizer);
  EXPECT_TRUE(result.ran());
  EXPECT_TRUE(result.overflows().empty());
  EXPECT_EQ(p.item<double>(), -kInf);
  scaler.update();
  scaler.update(5);
}

// --------------------------------------------------------------------------------------------------------- closures

TEST(GradScaler, Closures) {
  Trial s({parameter({3}, {1})});
  const auto closure = [&] {
    s.optimizer.zero_grad();
    const Tensor loss = sum(s.p() * s.p());
    s.scaler.scale(loss).backward();
    return loss;
  };
  const auto result = s.scaler.step(s.optimizer, closure);
  EXPECT_TRUE(result.ran());
  EXPECT_EQ(result.loss().item<double>(), 9);
  EXPECT_EQ(s.p().item<double>(), -3);
  EXPECT_MESSAGE(s.scaler.step(s.optimizer, closure), "with a closure");
  s.scaler.update();
  EXPECT_EQ(s.scaler.growth_tracker(), 1);
}

TEST(GradScaler, AClosureThatOverflowsSkipsTheStep) {
  Trial s({parameter({3}, {1})});
  const auto closure = [&] {
    s.optimizer.zero_grad();
    const Tensor loss = sum(s.p() * s.p()) * 1e38;
    s.scaler.scale(loss).backward();
    return loss;
  };
  const auto result = s.scaler.step(s.optimizer, closure);
  EXPECT_FALSE(result.ran());
  EXPECT_EQ(result.first_overflow(), "p0");
  EXPECT_EQ(s.p().item<double>(), 3);
  s.scaler.update();
  EXPECT_EQ(s.scaler.get_scale(), 2);
}

}  // namespace
}  // namespace halfstep
