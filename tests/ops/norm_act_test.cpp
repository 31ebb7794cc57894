// SPDX-License-Identifier: Apache-2.0
// batch_norm_act and the kernels that it shares with batch_norm, against float64 sums written out here and against the
// ops that it is made of.
#include "halfstep/ops/norm_act.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <set>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/node.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/runtime/machine_limits.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;
constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::relu6};
constexpr double kFloat = 0x1p-24;  // a rounding of float32

double rounding(DType dtype) {
  return dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : dtype == f32 ? kFloat : 0x1p-53;
}
std::string made_by(const Tensor& t) {
  const AutogradMeta* meta = autograd_meta_or_null(t);
  return meta && meta->grad_fn ? meta->grad_fn->name() : "";
}
Tensor values(const Shape& sizes, DType dtype, double mean = 0, double deviation = 1) {
  return (randn(sizes, {.dtype = f64}) * deviation + mean).to(dtype);
}

// What a call is made of.
struct Case {
  Shape sizes;
  DType dtype = f32;
  MemoryFormat format = MemoryFormat::channels_last;
  Activation activation = Activation::relu;
  bool with_residual = true;
  bool training = true;
  double mean = 0.5;
  Tensor x = {}, residual = {}, weight = {}, bias = {}, running_mean = {}, running_var = {}, g = {};

  std::string str() const {
    return std::string(name(dtype)) + ' ' + sizes.str() + ' ' + name(activation) + (with_residual ? " residual" : "") +
           (training ? " training" : " evaluation") + (format == MemoryFormat::channels_last ? " channels-last" : "");
  }
  Case& fill() {
    manual_seed(3);
    const DType inner = dtype == f64 ? f64 : f32;
    const auto image = [&](double at, double deviation) {
      const Tensor t = values(sizes, dtype, at, deviation);
      return sizes.size() == 4 ? t.contiguous(format) : t;
    };
    const Shape channels{sizes[1]};
    x = image(mean, 2).requires_grad_();
    if (with_residual) residual = image(0.5, 1).requires_grad_();
    g = image(0.25, 1);
    weight = values(channels, inner, 2, 0.5).requires_grad_();
    bias = values(channels, inner, 1, 0.5).requires_grad_();
    running_mean = values(channels, inner, mean);
    running_var = (rand(channels, {.dtype = inner}) + 0.5);
    return *this;
  }
  BatchNormFuncOptions norm() const {
    BatchNormFuncOptions o{.weight = weight, .bias = bias, .training = training, .eps = 1e-3};
    if (!training) o.running_mean = running_mean, o.running_var = running_var;
    return o;
  }
  std::vector<Tensor> leaves() const {
    std::vector<Tensor> all{x, weight, bias};
    if (with_residual) all.push_back(residual);
    return all;
  }
  Tensor run() const { return batch_norm_act(x, norm(), activation, residual); }
  Tensor run_composed() const {
    Tensor y = batch_norm(x, norm());
    if (with_residual) y = y + residual;
    return activation == Activation::none ? y : activation == Activation::relu ? relu(y) : relu6(y);
  }
};

// The result and the gradients in float64, channel by channel. Where the activation is on, the result itself says: near
// a bound rounding decides.
struct Reference {
  Values y, x, weight, bias, residual;
  Values x_size, weight_size, bias_size;  ///< sums of the magnitudes of what was added up
  double y_size = 0, deviation = 0;       ///< largest terms; smallest deviation

  Reference(const Case& c, const Tensor& result) {
    const auto data = [](const Tensor& t) { return t.defined() ? t.detach().to_vector<double>() : Values(); };
    const Values x_in = data(c.x), r = data(c.residual), g_in = data(c.g), got = data(result);
    const Values w = data(c.weight), b = data(c.bias), rm = data(c.running_mean), rv = data(c.running_var);
    const std::int64_t n = c.sizes[0], channels = c.sizes[1], inner = c.x.numel() / n / channels;
    const double count = static_cast<double>(n * inner);
    y.resize(x_in.size()), x.resize(x_in.size()), residual.resize(x_in.size()), x_size.resize(x_in.size());
    deviation = std::numeric_limits<double>::infinity();
    for (std::int64_t k = 0; k < channels; ++k) {
      const auto each = [&](const auto& f) {
        for (std::int64_t i = 0; i < n; ++i) {
          for (std::int64_t p = 0; p < inner; ++p) f(static_cast<std::size_t>((i * channels + k) * inner + p));
        }
      };
      const auto ch = static_cast<std::size_t>(k);
      double mean = 0, var = 0;
      each([&](std::size_t i) { mean += x_in[i] / count; });
      each([&](std::size_t i) { var += (x_in[i] - mean) * (x_in[i] - mean) / count; });
      if (!c.training) mean = rm[ch], var = rv[ch];
      const double rstd = 1 / std::sqrt(var + 1e-3);
      deviation = std::min(deviation, 1 / rstd);
      double sum = 0, product = 0, sum_size = 0, product_size = 0;
      each([&](std::size_t i) {
        const double z = (x_in[i] - mean) * rstd;
        const double normalised = z * w[ch] + b[ch], before = normalised + (r.empty() ? 0 : r[i]);
        y_size = std::max({y_size, std::abs(z * w[ch]) + std::abs(b[ch]) + (r.empty() ? 0 : std::abs(r[i]))});
        y[i] = c.activation == Activation::none ? before : std::max(before, 0.0);
        if (c.activation == Activation::relu6) y[i] = std::min(y[i], 6.0);
        const bool on =
            c.activation == Activation::none || (got[i] > 0 && (c.activation != Activation::relu6 || got[i] < 6));
        residual[i] = on ? g_in[i] : 0;
        sum += residual[i], product += residual[i] * z;
        sum_size += std::abs(residual[i]), product_size += std::abs(residual[i] * z);
      });
      weight.push_back(product), weight_size.push_back(product_size);
      bias.push_back(sum), bias_size.push_back(sum_size);
      each([&](std::size_t i) {
        const double z = (x_in[i] - mean) * rstd;
        const double inside = c.training ? residual[i] - sum / count - z * product / count : residual[i];
        x[i] = w[ch] * rstd * inside;
        // Rounded are the terms, and sums of up to 128 float32 terms in theirs.
        x_size[i] = std::abs(w[ch]) * rstd *
                    (std::abs(residual[i]) + (c.training ? (sum_size + std::abs(z) * product_size) / count : 0));
      });
    }
  }
};

void expect_near(const Tensor& got, const Values& exact, const auto& bound, const std::string& what) {
  const Values v = got.detach().to_vector<double>();
  ASSERT_EQ(v.size(), exact.size()) << what;
  for (std::size_t i = 0; i < v.size(); ++i) ASSERT_NEAR(v[i], exact[i], bound(i)) << what << " element " << i;
}

// One rounding to the dtype, and those of what is computed in (float32, or float64 throughout): a few for each term of
// a formula, and 128 for sums of up to 128 terms that were rounded one by one, each to less than the sum of magnitudes.
// What z is wrong by is relative to the rounded mean: |mean| / deviation roundings more. On a device without the fused
// kernels the normalised values are rounded to the dtype too, before the residual is added.
void check_against_float64(const Case& c) {
  const std::string what = c.str();
  const Tensor y = c.run();
  EXPECT_EQ(y.dtype(), c.dtype) << what;
  EXPECT_EQ(y.strides(), c.x.strides()) << what;
  const Reference exact(c, y);
  const double u = rounding(c.dtype), inner = c.dtype == f64 ? 0x1p-53 : kFloat;
  const double off = inner * (1 + std::abs(c.mean) / exact.deviation);
  const double tiny = c.dtype == f16 ? 0x1p-25 : 0;  // half of f16's smallest number
  const double parts = made_by(y) == "batch_norm_act" ? 0 : u * exact.y_size;
  expect_near(
      y, exact.y, [&](std::size_t i) { return u * std::abs(exact.y[i]) + parts + 16 * inner * exact.y_size + tiny; },
      what);
  const auto d = grad({y}, c.leaves(), {.grad_outputs = {c.g}});
  EXPECT_EQ(d[0].strides(), c.x.strides()) << what;
  expect_near(
      d[0], exact.x,
      [&](std::size_t i) { return u * std::abs(exact.x[i]) + (128 * inner + 8 * off) * exact.x_size[i] + tiny; },
      what + ": of the input");
  expect_near(
      d[1], exact.weight,
      [&](std::size_t i) { return 128 * inner * exact.weight_size[i] + 8 * off * exact.bias_size[i] + inner; },
      what + ": of the weight");
  expect_near(
      d[2], exact.bias, [&](std::size_t i) { return 128 * inner * exact.bias_size[i] + inner; },
      what + ": of the bias");
  if (!c.with_residual) return;
  EXPECT_EQ(d[3].strides(), c.residual.strides()) << what;
  expect_near(
      d[3], exact.residual, [&](std::size_t) { return 0; }, what + ": of the residual");
}

// Strips of several places, of one, and of a part of the channels; ends of vectors; several pieces of places.
TEST(BatchNormAct, AgreesWithFloat64) {
  for (const DType dtype : {f32, f64, f16, bf16}) {
    for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
      for (const Shape& sizes : {Shape{2, 16, 7, 9}, Shape{3, 24, 5, 4}, Shape{2, 3, 40, 50}, Shape{2, 130, 9, 5},
                                 Shape{1, 2100, 3, 2}, Shape{1, 2049, 3, 3}, Shape{2, 64, 33, 31}}) {
        for (const bool training : {true, false}) {
          const auto activation = kActivations[(sizes[1] + (training ? 1 : 0)) % 3];
          check_against_float64(
              Case{.sizes = sizes, .dtype = dtype, .format = format, .activation = activation, .training = training}
                  .fill());
        }
      }
    }
  }
}
TEST(BatchNormAct, EveryActivationWithAndWithoutResidual) {
  for (const DType dtype : {f32, f64, f16, bf16}) {
    for (const Activation activation : kActivations) {
      for (const bool with_residual : {true, false}) {
        for (const bool training : {true, false}) {
          for (const Shape& sizes : {Shape{4, 20, 6, 7}, Shape{50, 5}, Shape{3, 4, 17}}) {
            check_against_float64(Case{.sizes = sizes,
                                       .dtype = dtype,
                                       .activation = activation,
                                       .with_residual = with_residual,
                                       .training = training}
                                      .fill());
          }
        }
      }
    }
  }
}
TEST(BatchNormAct, OtherVectorsAgreeToo) {
  const cpu::Isa best = cpu::compute_isa();
  cpu::set_isa_for_test(cpu::Isa::avx2);
  for (const DType dtype : {f32, f64, f16, bf16}) {
    for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
      check_against_float64(Case{.sizes = {3, 44, 9, 11}, .dtype = dtype, .format = format}.fill());
    }
  }
  cpu::set_isa_for_test(best);
}

// Results that go past the caches; of 37 channels rows don't begin where lines of memory do.
TEST(BatchNormAct, LargeResultsAgreeWithFloat64) {
  const std::int64_t bytes = std::min<std::int64_t>(last_cache_bytes(), 128 << 20) / 8;
  for (const DType dtype : {f32, f16, bf16}) {
    const std::int64_t channels = dtype == f16 ? 37 : 64;
    const std::int64_t height = bytes / static_cast<std::int64_t>(item_size(dtype)) / channels / 66 + 1;
    const auto activation = dtype == bf16 ? Activation::relu6 : Activation::relu;
    check_against_float64(Case{
        .sizes = {2, channels, height, 33}, .dtype = dtype, .activation = activation, .with_residual = dtype != f16}
                              .fill());
  }
}

// In float32 and float64 the fused result is that of the three ops to the bit: each rounds where they do. So are the
// residual's gradient, and the others to the order in which sums are taken: they are the same sums.
TEST(BatchNormAct, IsTheOpsThatItIsMadeOf) {
  for (const DType dtype : {f32, f64}) {
    for (const Activation activation : kActivations) {
      for (const bool with_residual : {true, false}) {
        for (const bool training : {true, false}) {
          for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
            const Case c = Case{.sizes = {4, 6, 5, 7},
                                .dtype = dtype,
                                .format = format,
                                .activation = activation,
                                .with_residual = with_residual,
                                .training = training}
                               .fill();
            const Tensor fused = c.run(), composed = c.run_composed();
            const bool any = with_residual || activation != Activation::none;
            if (fused.device().is_cpu()) {
              EXPECT_EQ(made_by(fused), any ? "batch_norm_act" : "batch_norm") << c.str();
            }
            EXPECT_EQ(fused.to_vector<double>(), composed.to_vector<double>()) << c.str();
            const auto a = grad({fused}, c.leaves(), {.grad_outputs = {c.g}});
            const auto b = grad({composed}, c.leaves(), {.grad_outputs = {c.g}});
            for (std::size_t i = 0; i < a.size(); ++i) {
              EXPECT_EQ(a[i].to_vector<double>(), b[i].to_vector<double>()) << c.str() << " gradient " << i;
            }
          }
        }
      }
    }
  }
}
// In 16 bits the ops round three times: to at most half of their last place, so that both differ by three roundings of
// the largest of the values on the way.
TEST(BatchNormAct, RoundsOnceWhereTheOpsRoundThreeTimes) {
  for (const DType dtype : {f16, bf16}) {
    const Case c = Case{.sizes = {4, 6, 5, 7}, .dtype = dtype}.fill();
    const Tensor fused = c.run(), composed = c.run_composed();
    const Reference exact(c, fused);
    expect_near(
        composed, fused.detach().to_vector<double>(), [&](std::size_t) { return 3 * rounding(dtype) * exact.y_size; },
        c.str());
  }
}

class Names : public OpObserver {
 public:
  Names() { add_observer(this); }
  ~Names() override { remove_observer(this); }
  void after_call(const ObservedCall& call) override {
    const std::lock_guard lock(mutex);
    if (call.op) names.push_back(call.name);
  }
  bool seen(const std::string& name) const { return std::find(names.begin(), names.end(), name) != names.end(); }
  std::mutex mutex;
  std::vector<std::string> names;
};

TEST(BatchNormAct, ObserversSeeTheOpsThatItIsMadeOf) {
  const Case c = Case{.sizes = {2, 4, 3, 3}}.fill();
  const Tensor before = c.run();
  const auto fused = grad({before}, c.leaves(), {.grad_outputs = {c.g}, .retain_graph = true});
  const Names observer;
  const Tensor y = c.run();
  EXPECT_EQ(observer.names, (std::vector<std::string>{"batch_norm", "add", "relu"}));
  EXPECT_EQ(y.to_vector<float>(), before.to_vector<float>());
  // One that comes between the passes sees the ops of the backward pass.
  const auto seen = grad({before}, c.leaves(), {.grad_outputs = {c.g}});
  EXPECT_TRUE(observer.seen("batch_norm_backward"));
  EXPECT_FALSE(observer.seen("batch_norm_act_backward"));
  for (std::size_t i = 0; i < fused.size(); ++i)
    EXPECT_EQ(fused[i].to_vector<float>(), seen[i].to_vector<float>()) << i;
}

// Every subset of what may need a gradient has those of the whole.
TEST(BatchNormAct, GradientsThatAreAskedForOneByOne) {
  for (const bool training : {true, false}) {
    for (const Activation activation : kActivations) {
      Case c = Case{.sizes = {3, 4, 5, 2}, .dtype = f64, .activation = activation, .training = training}.fill();
      const auto all = grad({c.run()}, c.leaves(), {.grad_outputs = {c.g}});
      const Tensor inputs[] = {c.x.detach(), c.weight.detach(), c.bias.detach(), c.residual.detach()};
      for (unsigned mask = 1; mask < 16; ++mask) {
        Tensor* slots[] = {&c.x, &c.weight, &c.bias, &c.residual};
        std::vector<Tensor> leaves;
        std::vector<std::size_t> which;
        for (std::size_t i = 0; i < 4; ++i) {
          *slots[i] = inputs[i].clone();
          if (!(mask >> i & 1)) continue;
          leaves.push_back(slots[i]->requires_grad_());
          which.push_back(i);
        }
        const auto some = grad({c.run()}, leaves, {.grad_outputs = {c.g}});
        for (std::size_t i = 0; i < some.size(); ++i) {
          expect_near(
              some[i], all[which[i]].to_vector<double>(), [](std::size_t) { return 1e-12; },
              c.str() + " of " + std::to_string(mask));
        }
      }
    }
  }
}

// Operands that lie otherwise than the input: row-major beside channels-last, slices, repeated values.
TEST(BatchNormAct, OperandsOfOtherLayouts) {
  for (const DType dtype : {f32, f16, f64}) {
    for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
      const MemoryFormat other =
          format == MemoryFormat::contiguous ? MemoryFormat::channels_last : MemoryFormat::contiguous;
      const Case c = Case{.sizes = {3, 10, 4, 6}, .dtype = dtype, .format = format}.fill();
      const Tensor y = c.run();
      const auto expected = grad({y}, c.leaves(), {.grad_outputs = {c.g}});
      // Rows with gaps between their elements, and behind them.
      for (const std::int64_t step : {1, 2}) {
        Case moved = c;
        moved.residual = c.residual.detach().contiguous(other).requires_grad_();
        moved.g = empty({3, 10, 4, 12}, {.dtype = dtype}).slice(3, 0, 6 * step, step);
        moved.g.copy_(c.g);
        const Tensor z = moved.run();
        EXPECT_EQ(z.strides(), y.strides());
        EXPECT_EQ(z.to_vector<double>(), y.to_vector<double>()) << c.str();
        const auto got = grad({z}, moved.leaves(), {.grad_outputs = {moved.g}});
        for (std::size_t i = 0; i < got.size(); ++i) {
          EXPECT_EQ(got[i].to_vector<double>(), expected[i].to_vector<double>()) << c.str() << " gradient " << i;
        }
        if (dtype != f64) continue;
        // The input itself: its sums are taken in another order.
        moved.x = empty({3, 10, 4, 12}, {.dtype = dtype}).slice(3, 0, 6 * step, step);
        moved.x.copy_(c.x.detach());
        moved.x.requires_grad_();
        const Tensor gaps = moved.run();
        const auto bound = [](std::size_t) { return 1e-11; };
        expect_near(gaps, y.to_vector<double>(), bound, c.str());
        const auto of_gaps = grad({gaps}, moved.leaves(), {.grad_outputs = {c.g}});
        for (std::size_t i = 0; i < of_gaps.size(); ++i) {
          expect_near(of_gaps[i], expected[i].to_vector<double>(), bound, c.str());
        }
      }
      // One value for all places of a channel, as the gradient of a mean over them is.
      const Tensor one = values({3, 10, 1, 1}, dtype).expand({3, 10, 4, 6});
      const auto repeated = grad({c.run()}, c.leaves(), {.grad_outputs = {one}});
      const auto dense = grad({c.run()}, c.leaves(), {.grad_outputs = {one.contiguous(format)}});
      for (std::size_t i = 0; i < dense.size(); ++i) {
        EXPECT_EQ(repeated[i].to_vector<double>(), dense[i].to_vector<double>()) << c.str() << " gradient " << i;
      }
    }
  }
}

// The input is the cast of a float32 tensor: its gradient is written in float32, not rounded.
TEST(BatchNormAct, GradientsOfCastsStayFloat32) {
  Case c = Case{.sizes = {3, 8, 5, 5}, .dtype = bf16}.fill();
  const Tensor wide = c.x.detach().to(f32).requires_grad_();
  const Case rounded = c;
  amp::Autocast region({.dtype = bf16});
  c.x = wide.to(bf16);
  const Tensor y = c.run();
  const Reference exact(c, y);
  const Tensor d = grad({y}, {wide}, {.grad_outputs = {c.g}})[0];
  EXPECT_EQ(d.dtype(), f32);
  expect_near(
      d, exact.x, [&](std::size_t i) { return 200 * kFloat * exact.x_size[i]; }, "of a cast");
}

TEST(BatchNormAct, KeepsTheInputsDtypeUnderAutocast) {
  for (const DType dtype : {f16, bf16, f32}) {
    const Case c = Case{.sizes = {2, 4, 3, 3}, .dtype = dtype}.fill();
    const amp::Autocast region({.dtype = dtype == bf16 ? bf16 : f16});
    EXPECT_EQ(c.run().dtype(), dtype);
  }
  // Beside a float32 residual the sum is float32, as that of the op `add`.
  Case c = Case{.sizes = {2, 4, 3, 3}, .dtype = bf16}.fill();
  c.residual = c.residual.detach().to(f32);
  const Tensor y = c.run();
  EXPECT_EQ(y.dtype(), f32);
  EXPECT_EQ(y.to_vector<float>(), c.run_composed().to_vector<float>());
}

TEST(BatchNormAct, IsTheSameForAnyNumberOfThreads) {
  const int threads = num_threads();
  for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
    const Case c = Case{.sizes = {8, 48, 28, 28}, .dtype = bf16, .format = format}.fill();
    std::vector<Values> results[2];
    for (const int n : {1, 3}) {
      set_num_threads(n);
      const Tensor y = c.run();
      auto& to = results[n == 1 ? 0 : 1];
      to.push_back(y.to_vector<double>());
      for (const Tensor& t : grad({y}, c.leaves(), {.grad_outputs = {c.g}})) to.push_back(t.to_vector<double>());
    }
    EXPECT_EQ(results[0], results[1]);
  }
  set_num_threads(threads);
}
TEST(BatchNormAct, RunningStatisticsFollowTheBatch) {
  const Tensor mean = zeros({2}), var = ones({2});
  const auto version = mean.version();
  const Tensor x = tensor(Values{1, 10, 3, 30}, {2, 2});
  const BatchNormFuncOptions norm{
      .running_mean = mean, .running_var = var, .training = true, .momentum = 0.5, .eps = 0};
  // Means 2 and 20, deviations 1 and 10.
  EXPECT_EQ(batch_norm_act(x, norm).to_vector<double>(), (Values{0, 0, 1, 1}));
  EXPECT_EQ(mean.to_vector<double>(), (Values{1, 10}));
  EXPECT_EQ(var.to_vector<double>(), (Values{1.5, 100.5}));  // unbiased: 2 and 200
  EXPECT_GT(mean.version(), version);
  // In evaluation they are used and stay.
  BatchNormFuncOptions frozen = norm;
  frozen.training = false;
  const Values y = batch_norm_act(x, frozen, Activation::none, x).to_vector<double>();
  EXPECT_NEAR(y[2], 3 + (3 - 1) / std::sqrt(1.5), 1e-6);
  EXPECT_EQ(mean.to_vector<double>(), (Values{1, 10}));
}

// --- what is kept, and what may change

TEST(BatchNormAct, KeepsInputAndResultOnly) {
  class Kept : public SavingHook {
   public:
    std::shared_ptr<SavedSlot> save(const Tensor& t, bool, std::uint32_t) override {
      storages.insert(t.storage().get());
      return nullptr;
    }
    void read(std::span<const Tensor* const>) override {}
    std::set<const void*> storages;
  };
  for (const DType dtype : {f32, bf16}) {
    const Case c = Case{.sizes = {2, 4, 6, 6}, .dtype = dtype}.fill();
    Kept kept;
    saving_hook() = &kept;
    const Tensor y = c.run();
    saving_hook() = nullptr;
    EXPECT_TRUE(kept.storages.contains(c.x.storage().get()));
    EXPECT_TRUE(kept.storages.contains(y.storage().get()));
    EXPECT_TRUE(kept.storages.contains(c.weight.storage().get()));
    EXPECT_FALSE(kept.storages.contains(c.residual.storage().get()));
    EXPECT_EQ(kept.storages.size(), 5u) << "input, weight, result, mean and 1 / deviation";
  }
}
TEST(BatchNormAct, ChangesInPlaceAreNoticed) {
  const auto fresh = [] { return Case{.sizes = {2, 4, 3, 3}}.fill(); };
  {
    const Case c = fresh();
    const Tensor x = c.x * 1, y = batch_norm_act(x, c.norm(), c.activation, c.residual);
    const NoGrad no_grad;
    Tensor changed = y.detach();
    changed.add_(1);
    EXPECT_THROW(sum(y).backward(), AutogradError) << "result";
  }
  {
    const Case c = fresh();
    Tensor x = c.x * 1;
    const Tensor y = batch_norm_act(x, c.norm(), c.activation, c.residual);
    x.add_(1);
    EXPECT_THROW(y.backward(c.g), AutogradError) << "input";
  }
  {
    // The residual isn't kept: it may be written over.
    const Case c = fresh();
    Tensor residual = c.residual * 1;
    const Tensor y = batch_norm_act(c.x, c.norm(), c.activation, residual);
    residual.add_(1);
    EXPECT_NO_THROW(y.backward(c.g));
  }
}
// A block's input goes into its first op and comes back as the residual.
TEST(BatchNormAct, ResidualThatIsUsedTwice) {
  const Case c = Case{.sizes = {2, 4, 5, 5}, .dtype = f64}.fill();
  const auto block = [&](bool fused, const Tensor& r) {
    const Tensor h = r * 1.5;
    if (fused) return batch_norm_act(h, c.norm(), Activation::relu, r) + r * 0.5;
    return relu(batch_norm(h, c.norm()) + r) + r * 0.5;
  };
  const auto a = grad({block(true, c.residual)}, {c.residual}, {.grad_outputs = {c.g}});
  const auto b = grad({block(false, c.residual)}, {c.residual}, {.grad_outputs = {c.g}});
  expect_near(
      a[0], b[0].to_vector<double>(), [](std::size_t) { return 1e-12; }, "used twice");
  // Input and residual at once.
  const auto both = grad({batch_norm_act(c.x, c.norm(), Activation::relu, c.x)}, {c.x}, {.grad_outputs = {c.g}});
  const auto composed = grad({relu(batch_norm(c.x, c.norm()) + c.x)}, {c.x}, {.grad_outputs = {c.g}});
  expect_near(
      both[0], composed[0].to_vector<double>(), [](std::size_t) { return 1e-12; }, "input as residual");
}

// --- NaN, infinities, bounds, errors

TEST(BatchNormAct, NanComesThrough) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : {f32, f16, bf16, f64}) {
    for (const Activation activation : kActivations) {
      const Tensor x = tensor(Values{nan, -1, 2, inf, -inf, 9}, {6, 1}, {.dtype = dtype});
      const Tensor mean = zeros({1}), var = ones({1}), residual = zeros({6, 1}, {.dtype = dtype});
      const BatchNormFuncOptions norm{.running_mean = mean, .running_var = var, .eps = 0};
      const Values y = batch_norm_act(x, norm, activation, residual).to_vector<double>();
      EXPECT_TRUE(std::isnan(y[0]));
      const bool none = activation == Activation::none, six = activation == Activation::relu6;
      EXPECT_EQ(Values(y.begin() + 1, y.end()),
                (Values{none ? -1.0 : 0, 2, six ? 6 : inf, none ? -inf : 0, six ? 6.0 : 9}))
          << name(activation);
      // In training one NaN is everybody's.
      for (const double v : batch_norm_act(x, {.training = true}, activation, residual).to_vector<double>()) {
        EXPECT_TRUE(std::isnan(v));
      }
    }
  }
}
// Frozen statistics: the input's gradient is the result's, times a factor, whatever the input is.
TEST(BatchNormAct, FrozenGradientsDontReadTheInput) {
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor x = tensor(Values{inf, 1, 2, 3}, {2, 2}).requires_grad_();
  const Tensor mean = zeros({2}), var = full({2}, 0.25), g = tensor(Values{1, 2, 3, 4}, {2, 2});
  const Tensor y = batch_norm_act(x, {.running_mean = mean, .running_var = var, .eps = 0}, Activation::relu);
  EXPECT_EQ(grad({y}, {x}, {.grad_outputs = {g}})[0].to_vector<double>(), (Values{2, 4, 6, 8}));
}
// On a bound the gradient is 0, as relu's and relu6's.
TEST(BatchNormAct, BoundsHaveNoGradient) {
  const Tensor x = tensor(Values{0, 6, 3, -1, 7}, {5, 1}).requires_grad_();
  const Tensor mean = zeros({1}), var = ones({1}), g = ones({5, 1});
  for (const bool fused : {true, false}) {
    const BatchNormFuncOptions norm{.running_mean = mean, .running_var = var, .eps = 0};
    const Tensor y6 = fused ? batch_norm_act(x, norm, Activation::relu6) : relu6(batch_norm(x, norm));
    EXPECT_EQ(grad({y6}, {x}, {.grad_outputs = {g}})[0].to_vector<double>(), (Values{0, 0, 1, 0, 0}));
    const Tensor y = fused ? batch_norm_act(x, norm, Activation::relu) : relu(batch_norm(x, norm));
    EXPECT_EQ(grad({y}, {x}, {.grad_outputs = {g}})[0].to_vector<double>(), (Values{0, 1, 1, 0, 1}));
  }
}
TEST(BatchNormAct, NothingToNormalise) {
  const Tensor mean = zeros({3}), var = ones({3});
  const Tensor x = empty({0, 3, 2, 2}).requires_grad_();
  const Tensor y = batch_norm_act(x, {.running_mean = mean, .running_var = var}, Activation::relu, x);
  EXPECT_EQ(y.sizes(), (Shape{0, 3, 2, 2}));
  EXPECT_EQ(grad({y}, {x}, {.grad_outputs = {y.detach()}})[0].sizes(), (Shape{0, 3, 2, 2}));
}
TEST(BatchNormAct, Errors) {
  const Tensor x = ones({2, 3, 4, 4}), mean = zeros({3}), var = ones({3});
  const BatchNormFuncOptions norm{.running_mean = mean, .running_var = var};
  EXPECT_THROW(batch_norm_act(x, norm, Activation::relu, ones({2, 3, 4, 1})), ShapeError);
  EXPECT_THROW(batch_norm_act(x, norm, Activation::relu, ones({2, 3, 4, 4}, {.dtype = i64})), DTypeError);
  EXPECT_THROW(batch_norm_act(x, {}), Error);
  EXPECT_THROW(batch_norm_act(ones({3}), {.training = true}), ShapeError);
  EXPECT_THROW(batch_norm_act(ones({1, 3}), {.training = true}), ShapeError);
  EXPECT_THROW(batch_norm_act(x, {.weight = ones({2}), .training = true}), ShapeError);
  const Tensor low = zeros({3}, {.dtype = f16});
  EXPECT_THROW(batch_norm_act(x, {.running_mean = low, .running_var = low, .training = true}), DTypeError);
}

}  // namespace
}  // namespace halfstep
