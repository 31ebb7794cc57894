// SPDX-License-Identifier: Apache-2.0
#include "halfstep/amp/autocast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "halfstep/amp/cast_cache.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/reduce.h"

namespace halfstep {
namespace {

Tensor matrix(std::int64_t n, bool requires_grad = false) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < n * n; ++i) values.push_back(static_cast<double>(i % 7) / 3 - 1);
  return tensor(values, {n, n}, {.requires_grad = requires_grad});
}

TEST(Autocast, MatrixProductsRunInTheRegionsDtype) {
  const Tensor a = matrix(4), b = matrix(4);
  for (DType dtype : {f16, bf16}) {
    amp::Autocast autocast{{.dtype = dtype}};
    EXPECT_TRUE(amp::is_autocast_enabled());
    EXPECT_EQ(amp::autocast_dtype(), dtype);
    const Tensor y = mm(a, b);
    EXPECT_EQ(y.dtype(), dtype);
    const Tensor z = linear(a, b);
    EXPECT_EQ(z.dtype(), dtype);
    EXPECT_EQ(matmul(a, b).dtype(), dtype);
    EXPECT_EQ(sum(y).dtype(), f32);
    EXPECT_EQ(sum(y, {}, {.dtype = f64}).dtype(), f64);
    EXPECT_EQ((y + y).dtype(), dtype);
    EXPECT_EQ((y + a).dtype(), f32);
    const Tensor by_hand = [&] {
      amp::Autocast off{{.enabled = false}};
      return mm(a.to(dtype), b.to(dtype));
    }();
    EXPECT_EQ(y.to_vector<float>(), by_hand.to_vector<float>());
  }
  EXPECT_FALSE(amp::is_autocast_enabled());
  EXPECT_EQ(mm(a, b).dtype(), f32);
}

TEST(Autocast, DoublesAndIntegersAreLeftAlone) {
  amp::Autocast autocast;
  const Tensor d = matrix(3).to(f64), i = matrix(3).to(i64);
  EXPECT_EQ(mm(d, d).dtype(), f64);
  EXPECT_EQ(mm(i, i).dtype(), i64);
}

TEST(Autocast, RegionsNestAndExceptionsRestore) {
  const Tensor a = matrix(3);
  amp::Autocast outer{{.dtype = bf16}};
  {
    amp::Autocast inner{{.dtype = f16}};
    EXPECT_EQ(mm(a, a).dtype(), f16);
    {
      amp::Autocast off{{.enabled = false}};
      EXPECT_EQ(mm(a, a).dtype(), f32);
      // Mixed dtypes promote there, as they do outside of any region.
      EXPECT_EQ(mm(a.to(f16), a).dtype(), f32);
    }
    EXPECT_EQ(mm(a, a).dtype(), f16);
  }
  EXPECT_EQ(mm(a, a).dtype(), bf16);
  try {
    amp::Autocast inner{{.dtype = f16}};
    throw std::runtime_error("out");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(mm(a, a).dtype(), bf16);
}

TEST(Autocast, OtherDtypesAreRefused) {
  try {
    amp::Autocast autocast{{.dtype = f64}};
    FAIL();
  } catch (const AmpError& e) {
    EXPECT_STREQ(e.what(), "autocast: expected f16 or bf16, got f64");
  }
  EXPECT_THROW(amp::Autocast({.ops = {{"no_such_op", amp::Policy::float32}}}), AmpError);
  EXPECT_FALSE(amp::is_autocast_enabled());
}

TEST(Autocast, ThreadsStartWithoutARegionAndMayTakeOneOver) {
  const Tensor a = matrix(3);
  amp::Autocast autocast{{.dtype = bf16}};
  const amp::AutocastSnapshot snapshot;
  DType alone{}, with{};
  std::thread([&] {
    alone = mm(a, a).dtype();
    amp::Autocast same{snapshot};
    with = mm(a, a).dtype();
  }).join();
  EXPECT_EQ(alone, f32);
  EXPECT_EQ(with, bf16);
}

TEST(Autocast, InPlaceAndOutFormsFollowThePolicyAndKeepTheDestinationsDtype) {
  const Tensor a = matrix(4), b = matrix(4);
  amp::Autocast autocast{{.dtype = bf16, .ops = {{"add", amp::Policy::lower_precision}}}};
  const Tensor expected = (a.to(bf16) + b.to(bf16)).to(f32);
  Tensor out = zeros({4, 4});
  add_out(out, a, b);
  EXPECT_EQ(out.dtype(), f32);
  EXPECT_EQ(out.to_vector<float>(), expected.to_vector<float>());
  Tensor c = a.clone();
  c.add_(b);
  EXPECT_EQ(c.dtype(), f32);
  EXPECT_EQ(c.to_vector<float>(), expected.to_vector<float>());
}

TEST(Autocast, OverridesHoldInTheirRegion) {
  const Tensor a = matrix(4);
  amp::Autocast autocast{{.ops = {{"mm", amp::Policy::float32}}}};
  EXPECT_EQ(mm(a, a).dtype(), f32);
  EXPECT_EQ(linear(a, a).dtype(), f16);
  {
    amp::Autocast inner{{.ops = {{"linear", amp::Policy::float32}}}};
    EXPECT_EQ(mm(a, a).dtype(), f32);
    EXPECT_EQ(linear(a, a).dtype(), f32);
  }
  EXPECT_EQ(linear(a, a).dtype(), f16);
}

TEST(Autocast, ModulePathsHaveOverrides) {
  const Tensor a = matrix(4);
  amp::Autocast autocast{{.modules = {{.path = "encoder.*.norm", .enabled = false}, {.path = "head", .dtype = bf16}}}};
  const auto run = [&] { return mm(a, a).dtype(); };
  amp::ModuleScope net{""};
  {
    amp::ModuleScope encoder{"encoder"};
    EXPECT_EQ(run(), f16);
    amp::ModuleScope layer{"layer1"};
    amp::ModuleScope norm{"norm"};
    EXPECT_EQ(amp::module_path(), "encoder.layer1.norm");
    EXPECT_EQ(run(), f32);
  }
  amp::ModuleScope head{"head"};
  EXPECT_EQ(run(), bf16);
}

TEST(CastCache, OneCastForAllUsesOfAParameter) {
  const Tensor w = matrix(4, true), x = matrix(4);
  {
    amp::Autocast autocast;
    amp::cast_stats() = {};
    for (int i = 0; i < 3; ++i) mm(x, w);
    EXPECT_EQ(amp::cast_stats().casts, 4u) << "one of w, three of x, which is no parameter";
    EXPECT_EQ(amp::cast_stats().reused, 2u);
    {
      amp::Autocast inner;
      mm(x, w);
    }
    mm(x, w);
    EXPECT_EQ(amp::cast_stats().reused, 4u);
  }
  amp::cast_stats() = {};
  amp::Autocast again;
  mm(x, w);
  EXPECT_EQ(amp::cast_stats().casts, 2u) << "cleared when the outermost region ended";
  amp::cast_stats() = {};
  amp::Autocast uncached{{.cache = false}};
  mm(x, w);
  EXPECT_EQ(amp::cast_stats().casts, 2u);
}

TEST(CastCache, AnInPlaceChangeIsSeen) {
  Tensor w = matrix(4, true);
  amp::Autocast autocast;
  const auto before = mm(w, w).to_vector<float>();
  {
    NoGrad no_grad;
    w.mul_(2);
  }
  const auto after = mm(w, w).to_vector<float>();
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(after[i], 4 * before[i]);
}

TEST(CastCache, ACastMadeWithoutGradIsNotReusedWithoutHistory) {
  const Tensor w = matrix(4, true), x = matrix(4);
  amp::Autocast autocast;
  {
    NoGrad no_grad;
    EXPECT_FALSE(mm(x, w).requires_grad());
  }
  amp::cast_stats() = {};
  const Tensor y = mm(x, w);
  EXPECT_EQ(amp::cast_stats().casts, 1u) << "only x";
  sum(y).backward();
  EXPECT_TRUE(w.grad().defined());
  EXPECT_EQ(w.grad().dtype(), f32);
}

// 16 uses of one weight: gradients add up in float32, so the error stays that of the single products.
TEST(CastCache, GradientsOfSeveralUsesAddUpInFloat32) {
  const std::int64_t n = 32;
  std::vector<double> wv, xv;
  std::uint64_t state = 1;
  const auto next = [&] {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(state >> 40) / (1 << 24) - 0.5;
  };
  for (std::int64_t i = 0; i < n * n; ++i) wv.push_back(next());
  const Tensor w = tensor(wv, {n, n}, {.requires_grad = true});
  const Tensor w64 = tensor(wv, {n, n}, {.dtype = f64, .requires_grad = true});
  Tensor loss, loss64;
  {
    amp::Autocast autocast{{.dtype = bf16}};
    for (int use = 0; use < 16; ++use) {
      xv.clear();
      for (std::int64_t i = 0; i < n * n; ++i) xv.push_back(next());
      const Tensor x = tensor(xv, {n, n}).to(bf16);
      const Tensor y = sum(mm(x, w)), y64 = sum(mm(x.to(f64), w64));
      loss = loss.defined() ? loss + y : y;
      loss64 = loss64.defined() ? loss64 + y64 : y64;
    }
  }
  loss.backward();
  loss64.backward();
  const auto g = w.grad().to_vector<double>(), g64 = w64.grad().to_vector<double>();
  double error = 0, size = 0;
  for (std::size_t i = 0; i < g.size(); ++i) {
    error += (g[i] - g64[i]) * (g[i] - g64[i]);
    size += g64[i] * g64[i];
  }
  EXPECT_LE(std::sqrt(error / size), 6e-4);
}

TEST(Explain, SaysWhatRanInWhichDtypeAndWhy) {
  const Tensor a = matrix(4);
  const auto decisions = amp::explain([&] {
    amp::Autocast autocast{{.dtype = bf16}};
    const amp::ModuleScope scope{"fc1"};
    sum(mm(a, a));
  });
  ASSERT_GE(decisions.size(), 2u);
  const auto mm_call = std::find_if(decisions.begin(), decisions.end(), [](const auto& d) { return d.op == "mm"; });
  ASSERT_NE(mm_call, decisions.end());
  EXPECT_EQ(mm_call->module, "fc1");
  EXPECT_EQ(mm_call->given, (std::vector<DType>{f32, f32}));
  EXPECT_EQ(mm_call->used, (std::vector<DType>{bf16, bf16}));
  EXPECT_NE(mm_call->str().find("lower precision"), std::string::npos) << mm_call->str();
  const amp::Decision d = amp::explain("mm", {f32, f64}, {.dtype = f16});
  EXPECT_EQ(d.used, (std::vector<DType>{f16, f64}));
  EXPECT_THROW(amp::explain("nope", {}), AmpError);
}

// Asked in advance, and told of the call itself: the same dtypes, since both are one piece of code.
TEST(Explain, SaysInAdvanceWhatTheCallThenDoes) {
  const Tensor x = ones({2, 3, 4, 4}), one = ones({3}), zero = zeros({3});
  for (const amp::Policy policy :
       {amp::Policy::lower_precision, amp::Policy::float32, amp::Policy::widest, amp::Policy::pass_through}) {
    for (const DType given : {f32, f16, bf16}) {
      const amp::AutocastOptions options{
          .dtype = f16, .ops = {{"batch_norm", policy}, {"batch_norm_act", policy}, {"linear", policy}}};
      const auto calls = amp::explain([&] {
        const amp::Autocast region(options);
        batch_norm(
            x.to(given),
            {.weight = one, .bias = zero, .running_mean = zero.clone(), .running_var = one.clone(), .training = true});
        batch_norm_act(
            x.to(given),
            {.weight = one, .bias = zero, .running_mean = zero.clone(), .running_var = one.clone(), .training = false},
            Activation::relu);
        linear(matrix(4).to(given), matrix(4), ones({4}));
      });
      for (const std::string op : {"batch_norm", "batch_norm_act", "linear"}) {
        // On a device without the fused kernel it is a batch_norm and what follows.
        if (op == "batch_norm_act" && !x.device().is_cpu()) continue;
        const auto call = std::find_if(calls.begin(), calls.end(), [&](const auto& d) { return d.op == op; });
        ASSERT_NE(call, calls.end()) << op;
        const amp::Decision d = amp::explain(op, call->given, options);
        EXPECT_EQ(d.used, call->used) << op << " " << name(given) << ": " << d.str() << "; " << call->str();
        EXPECT_EQ(d.policy, call->policy);
        EXPECT_EQ(d.reason, call->reason);
      }
    }
  }
  // Running statistics keep float32, which 16 bits are too few for.
  const amp::Decision d = amp::explain("batch_norm", {f16, f32, f32, f32, f32},
                                       {.dtype = f16, .ops = {{"batch_norm", amp::Policy::lower_precision}}});
  EXPECT_EQ(d.used, (std::vector<DType>{f16, f16, f16, f32, f32}));
}

// The declaration of an op says which of its inputs are a state; no list of names does.
TEST(Explain, AnOpsOwnStateStaysAsItIs) {
  const Op& op =
      define_op({.name = "test_with_state",
                 .infer = [](InferContext& ctx) { ctx.view(ctx.input(0).sizes(), ctx.input(0).strides(), 0); },
                 .view = true,
                 .state_inputs = in(1)});
  const amp::AutocastOptions options{.dtype = bf16, .ops = {{"test_with_state", amp::Policy::lower_precision}}};
  const std::vector<DType> expected = {bf16, f32, bf16};
  EXPECT_EQ(amp::explain("test_with_state", {f32, f32, f32}, options).used, expected);
  const Tensor x = ones({2}), state = ones({3}), y = ones({2});
  const auto calls = amp::explain([&] {
    const amp::Autocast region(options);
    call(op, {&x, &state, &y});
  });
  const auto seen = std::find_if(calls.begin(), calls.end(), [](const auto& d) { return d.op == "test_with_state"; });
  ASSERT_NE(seen, calls.end());
  EXPECT_EQ(seen->used, expected);
}

}  // namespace
}  // namespace halfstep
