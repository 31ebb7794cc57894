// SPDX-License-Identifier: Apache-2.0
// batch_norm_act with silu, an op of its own: against float64 sums written out here and the ops that it is made of.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <set>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/node.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;
constexpr double kEps = 1e-3;

double rounding(DType dtype) {
  return dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : dtype == f32 ? 0x1p-24 : 0x1p-53;
}
std::string made_by(const Tensor& t) {
  const AutogradMeta* meta = autograd_meta_or_null(t);
  return meta && meta->grad_fn ? meta->grad_fn->name() : "";
}

struct Case {
  Shape sizes;
  DType dtype = f32;
  MemoryFormat format = MemoryFormat::channels_last;
  bool training = true;
  double mean = 0.5;
  Tensor x = {}, weight = {}, bias = {}, running_mean = {}, running_var = {}, g = {};

  std::string str() const {
    return std::string(name(dtype)) + ' ' + sizes.str() + (training ? " training" : " evaluation") +
           (format == MemoryFormat::channels_last ? " channels-last" : "");
  }
  Case& fill() {
    manual_seed(5);
    const DType inner = dtype == f64 ? f64 : f32;
    const auto normal = [](const Shape& s, DType to, double at, double deviation) {
      return (randn(s, {.dtype = f64}) * deviation + at).to(to);
    };
    const auto image = [&](double at, double deviation) {
      const Tensor t = normal(sizes, dtype, at, deviation);
      return sizes.size() == 4 ? t.contiguous(format) : t;
    };
    const Shape channels{sizes[1]};
    x = image(mean, 2).requires_grad_();
    g = image(0.25, 1);
    weight = normal(channels, inner, 2, 0.5).requires_grad_();
    bias = normal(channels, inner, 0.5, 0.5).requires_grad_();
    running_mean = normal(channels, inner, mean, 1);
    running_var = rand(channels, {.dtype = inner}) + 0.5;
    return *this;
  }
  BatchNormFuncOptions norm() const {
    BatchNormFuncOptions o{.weight = weight, .bias = bias, .training = training, .eps = kEps};
    if (!training) o.running_mean = running_mean, o.running_var = running_var;
    return o;
  }
  std::vector<Tensor> leaves() const { return {x, weight, bias}; }
  Tensor run() const { return batch_norm_act(x, norm(), Activation::silu); }
  std::vector<Tensor> gradients(const Tensor& y) const { return grad({y}, leaves(), {.grad_outputs = {g}}); }
};

// In float64: the result, the gradients, and how far roundings may have moved each of them. `u` is a rounding to the
// result's dtype, `inner` one of what is computed in, `parts` one to the dtype in between, where the op ran as batch
// norm and silu.
struct Reference {
  Values y, x, weight, bias;
  Values y_bound, x_bound, weight_bound, bias_bound;

  Reference(const Case& c, double u, double inner, double parts) {
    const auto data = [](const Tensor& t) { return t.detach().to_vector<double>(); };
    const Values in = data(c.x), g = data(c.g), w = data(c.weight), b = data(c.bias);
    const Values rm = data(c.running_mean), rv = data(c.running_var);
    const std::int64_t n = c.sizes[0], channels = c.sizes[1], places = c.x.numel() / n / channels;
    const double count = static_cast<double>(n * places), tiny = c.dtype == f16 ? 0x1p-25 : 0;
    for (Values* v : {&y, &x, &y_bound, &x_bound}) v->resize(in.size());
    Values before(in.size()), moved(in.size());
    for (std::int64_t k = 0; k < channels; ++k) {
      const auto each = [&](const auto& f) {
        for (std::int64_t i = 0; i < n; ++i) {
          for (std::int64_t p = 0; p < places; ++p) f(static_cast<std::size_t>((i * channels + k) * places + p));
        }
      };
      const auto ch = static_cast<std::size_t>(k);
      double mean = 0, var = 0;
      each([&](std::size_t i) { mean += in[i] / count; });
      each([&](std::size_t i) { var += (in[i] - mean) * (in[i] - mean) / count; });
      if (!c.training) mean = rm[ch], var = rv[ch];
      const double rstd = 1 / std::sqrt(var + kEps);
      // Of x hat: the mean's rounding is relative to the mean; of silu's input z: eight roundings of its terms.
      const double off = inner * (1 + std::abs(mean) * rstd);
      double sum = 0, product = 0, sum_size = 0, product_size = 0, sum_moved = 0, product_moved = 0;
      each([&](std::size_t i) {
        const double hat = (in[i] - mean) * rstd, z = hat * w[ch] + b[ch], s = 1 / (1 + std::exp(-z));
        const double terms = std::abs(hat * w[ch]) + std::abs(b[ch]);
        const double of_z = 8 * (inner * terms + off * std::abs(w[ch])) + parts * std::abs(z);
        // silu's slope is at most 1.1, its slope's slope at most 0.5; silu is within 4 units (8 roundings), its slope
        // within 12 roundings of its terms, s and z s (1 - s), which are at most 1.3 together.
        y[i] = z * s;
        y_bound[i] = u * std::abs(y[i]) + 1.1 * of_z + 8 * inner * std::abs(y[i]) + tiny;
        before[i] = g[i] * (s + z * s * (1 - s));
        moved[i] = std::abs(g[i]) * (0.5 * of_z + 12 * inner * 1.3 + 1.1 * parts) + parts * std::abs(before[i]);
        sum += before[i], product += before[i] * hat;
        sum_size += std::abs(before[i]), product_size += std::abs(before[i] * hat);
        sum_moved += moved[i], product_moved += moved[i] * std::abs(hat);
      });
      weight.push_back(product), bias.push_back(sum);
      // Sums of up to 128 terms are rounded term by term, each to less than the sum of magnitudes.
      bias_bound.push_back(sum_moved + 128 * inner * sum_size + inner);
      weight_bound.push_back(product_moved + 128 * inner * product_size + 8 * off * sum_size + inner);
      each([&](std::size_t i) {
        const double hat = (in[i] - mean) * rstd, scale = std::abs(w[ch]) * rstd;
        const auto mixed = [&](double own, double of_sum, double of_product) {
          return own + (c.training ? (of_sum + std::abs(hat) * of_product) / count : 0);
        };
        x[i] = w[ch] * rstd * (c.training ? before[i] - sum / count - hat * product / count : before[i]);
        x_bound[i] = u * std::abs(x[i]) + scale * mixed(moved[i], sum_moved, product_moved) + tiny +
                     (128 * inner + 8 * off) * scale * mixed(std::abs(before[i]), sum_size, product_size);
      });
    }
  }
};

void expect_near(const Tensor& got, const Values& exact, const Values& bound, const std::string& what) {
  const Values v = got.detach().to_vector<double>();
  ASSERT_EQ(v.size(), exact.size()) << what;
  for (std::size_t i = 0; i < v.size(); ++i) ASSERT_NEAR(v[i], exact[i], bound[i]) << what << " element " << i;
}

void check_against_float64(const Case& c) {
  const std::string what = c.str();
  const Tensor y = c.run();
  EXPECT_EQ(y.dtype(), c.dtype) << what;
  EXPECT_EQ(y.strides(), c.x.strides()) << what;
  const bool fused = made_by(y) == "batch_norm_silu";
  EXPECT_TRUE(fused || !y.device().is_cpu()) << what;
  const double u = rounding(c.dtype);
  const Reference exact(c, u, c.dtype == f64 ? 0x1p-53 : 0x1p-24, fused ? 0 : u);
  expect_near(y, exact.y, exact.y_bound, what);
  const auto d = c.gradients(y);
  EXPECT_EQ(d[0].strides(), c.x.strides()) << what;
  expect_near(d[0], exact.x, exact.x_bound, what + ": of the input");
  expect_near(d[1], exact.weight, exact.weight_bound, what + ": of the weight");
  expect_near(d[2], exact.bias, exact.bias_bound, what + ": of the bias");
}

// Strips of several places, of one, and of a part of the channels; ends of vectors; several pieces of places.
TEST(BatchNormSilu, AgreesWithFloat64) {
  for (const DType dtype : {f32, f64, f16, bf16}) {
    for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
      for (const bool training : {true, false}) {
        for (const Shape& sizes : {Shape{2, 16, 7, 9}, Shape{3, 24, 5, 4}, Shape{2, 3, 40, 50}, Shape{2, 130, 9, 5},
                                   Shape{1, 2100, 3, 2}, Shape{50, 5}, Shape{3, 4, 17}}) {
          check_against_float64(Case{.sizes = sizes, .dtype = dtype, .format = format, .training = training}.fill());
        }
      }
    }
  }
}
TEST(BatchNormSilu, OtherVectorsAgreeToo) {
  const cpu::Isa best = cpu::compute_isa();
  cpu::set_isa_for_test(cpu::Isa::avx2);
  for (const DType dtype : {f32, f64, f16, bf16})
    check_against_float64(Case{.sizes = {3, 44, 9, 11}, .dtype = dtype}.fill());
  cpu::set_isa_for_test(best);
}

// In float32 and float64 both round where the other does; with a residual there is no other way.
TEST(BatchNormSilu, GivesWhatTheOpsGive) {
  for (const DType dtype : {f32, f64}) {
    for (const bool training : {true, false}) {
      const Case c = Case{.sizes = {4, 6, 5, 7}, .dtype = dtype, .training = training}.fill();
      const Tensor normalised = batch_norm(c.x, c.norm());
      EXPECT_EQ(c.run().to_vector<double>(), silu(normalised).to_vector<double>()) << c.str();
      EXPECT_EQ(batch_norm_act(c.x, c.norm(), Activation::silu, c.g).to_vector<double>(),
                silu(normalised + c.g).to_vector<double>())
          << c.str();
    }
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

TEST(BatchNormSilu, ObserversSeeTheOpsThatItIsMadeOf) {
  for (const bool training : {true, false}) {
    const Case c = Case{.sizes = {2, 4, 3, 3}, .dtype = f64, .training = training}.fill();
    const Tensor before = c.run();
    const auto fused = grad({before}, c.leaves(), {.grad_outputs = {c.g}, .retain_graph = true});
    const Names observer;
    EXPECT_EQ(c.run().to_vector<double>(), before.to_vector<double>());
    EXPECT_EQ(observer.names, (std::vector<std::string>{"batch_norm", "silu"}));
    // One that comes between the passes sees the ops of the backward pass.
    const auto seen = c.gradients(before);
    EXPECT_TRUE(observer.seen("silu_backward") && observer.seen("batch_norm_backward"));
    EXPECT_FALSE(observer.seen("batch_norm_silu_backward"));
    for (std::size_t i = 0; i < fused.size(); ++i) {
      expect_near(seen[i], fused[i].to_vector<double>(), Values(static_cast<std::size_t>(fused[i].numel()), 1e-12),
                  c.str() + " gradient " + std::to_string(i));
    }
  }
}

// Every subset of what may need a gradient has those of the whole.
TEST(BatchNormSilu, GradientsThatAreAskedForOneByOne) {
  for (const bool training : {true, false}) {
    Case c = Case{.sizes = {3, 4, 5, 2}, .dtype = f64, .training = training}.fill();
    const auto all = c.gradients(c.run());
    const Tensor inputs[] = {c.x.detach(), c.weight.detach(), c.bias.detach()};
    for (unsigned mask = 1; mask < 8; ++mask) {
      Tensor* slots[] = {&c.x, &c.weight, &c.bias};
      std::vector<Tensor> leaves;
      std::vector<std::size_t> which;
      for (std::size_t i = 0; i < 3; ++i) {
        *slots[i] = inputs[i].clone();
        if (!(mask >> i & 1)) continue;
        leaves.push_back(slots[i]->requires_grad_());
        which.push_back(i);
      }
      const auto some = grad({c.run()}, leaves, {.grad_outputs = {c.g}});
      for (std::size_t i = 0; i < some.size(); ++i) {
        const Values expected = all[which[i]].to_vector<double>();
        expect_near(some[i], expected, Values(expected.size(), 1e-12), c.str() + " of " + std::to_string(mask));
      }
    }
  }
}

// The input, the parameters and the statistics: not the result, and not silu's input.
TEST(BatchNormSilu, KeepsInputAndStatisticsOnly) {
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
    if (made_by(y) != "batch_norm_silu") continue;
    for (const Tensor& t : c.leaves()) EXPECT_TRUE(kept.storages.contains(t.storage().get()));
    EXPECT_FALSE(kept.storages.contains(y.storage().get()));
    EXPECT_EQ(kept.storages.size(), 5u) << "input, weight, bias, mean and 1 / deviation";
  }
}
TEST(BatchNormSilu, ChangesInPlaceAreNoticed) {
  for (const int which : {0, 1, 2}) {
    const Case c = Case{.sizes = {2, 4, 3, 3}}.fill();
    Tensor changed = std::array{c.x, c.weight, c.bias}[static_cast<std::size_t>(which)] * 1;
    Case other = c;
    (which == 0 ? other.x : which == 1 ? other.weight : other.bias) = changed;
    const Tensor y = other.run();
    // batch_norm alone doesn't read its bias again.
    if (which == 2 && made_by(y) != "batch_norm_silu") continue;
    changed.add_(1);
    EXPECT_THROW(y.backward(c.g), AutogradError) << which;
  }
}

// The input is the cast of a float32 tensor: its gradient is written in float32, not rounded.
TEST(BatchNormSilu, GradientsOfCastsStayFloat32) {
  Case c = Case{.sizes = {3, 8, 5, 5}, .dtype = bf16}.fill();
  const Tensor wide = c.x.detach().to(f32).requires_grad_();
  const Case rounded = c;
  const amp::Autocast region({.dtype = bf16});
  c.x = wide.to(bf16);
  const Tensor y = c.run();
  EXPECT_EQ(y.dtype(), bf16);
  const Tensor d = grad({y}, {wide}, {.grad_outputs = {c.g}})[0];
  EXPECT_EQ(d.dtype(), f32);
  if (made_by(y) != "batch_norm_silu") return;
  const Reference exact(rounded, 0, 0x1p-24, 0);
  expect_near(d, exact.x, exact.x_bound, "of a cast");
}

TEST(BatchNormSilu, IsTheSameForAnyNumberOfThreads) {
  const int threads = num_threads();
  for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
    const Case c = Case{.sizes = {8, 48, 28, 28}, .dtype = bf16, .format = format}.fill();
    std::vector<Values> results[2];
    for (const int n : {1, 3}) {
      set_num_threads(n);
      const Tensor y = c.run();
      auto& to = results[n == 1 ? 0 : 1];
      to.push_back(y.to_vector<double>());
      for (const Tensor& t : c.gradients(y)) to.push_back(t.to_vector<double>());
    }
    EXPECT_EQ(results[0], results[1]);
  }
  set_num_threads(threads);
}

// silu has the limits 0 and infinity, its slope 0 and 1; NaN stays NaN. With constant statistics the deviation is 1/2.
TEST(BatchNormSilu, InfinitiesHaveLimits) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : {f32, f16, bf16, f64}) {
    const Tensor x = tensor(Values{nan, inf, -inf, 2000, -2000, 0}, {6, 1}, {.dtype = dtype}).requires_grad_();
    const Tensor mean = zeros({1}), var = full({1}, 0.25);
    const Tensor y = batch_norm_act(x, {.running_mean = mean, .running_var = var, .eps = 0}, Activation::silu);
    const Values v = y.to_vector<double>();
    EXPECT_TRUE(std::isnan(v[0]));
    EXPECT_EQ(Values(v.begin() + 1, v.end()),
              (Values{inf, 0, tensor(Values{4000}, {1}, {.dtype = dtype}).item<double>(), 0, 0}))
        << name(dtype);
    const Values d = grad({y}, {x}, {.grad_outputs = {ones({6, 1}, {.dtype = dtype})}})[0].to_vector<double>();
    EXPECT_TRUE(std::isnan(d[0]));
    EXPECT_EQ(Values(d.begin() + 1, d.end()), (Values{2, 0, 2, 0, 1})) << name(dtype);
  }
}
TEST(BatchNormSilu, RunningStatisticsFollowTheBatch) {
  const Tensor mean = zeros({2}), var = ones({2});
  const Tensor x = tensor(Values{1, 10, 3, 30}, {2, 2});
  batch_norm_act(x, {.running_mean = mean, .running_var = var, .training = true, .momentum = 0.5}, Activation::silu);
  EXPECT_EQ(mean.to_vector<double>(), (Values{1, 10}));
  EXPECT_EQ(var.to_vector<double>(), (Values{1.5, 100.5}));  // unbiased: 2 and 200
}
TEST(BatchNormSilu, NothingToNormalise) {
  const Tensor mean = zeros({3}), var = ones({3}), x = empty({0, 3, 2, 2}).requires_grad_();
  const Tensor y = batch_norm_act(x, {.running_mean = mean, .running_var = var}, Activation::silu);
  EXPECT_EQ(y.sizes(), (Shape{0, 3, 2, 2}));
  EXPECT_EQ(grad({y}, {x}, {.grad_outputs = {y.detach()}})[0].sizes(), (Shape{0, 3, 2, 2}));
}

}  // namespace
}  // namespace halfstep
