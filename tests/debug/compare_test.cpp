// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "halfstep/amp/autocast.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/sort.h"
#include "halfstep/optim/adam.h"
#include "tests/debug/nets.h"
#include "tests/debug/wrong_op.h"

namespace halfstep {
namespace {

using debug::Compare;
using debug::Comparison;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Wrong : nn::Module<Wrong> {
  Tensor forward(const Tensor& x) const { return test::triple(x); }
};
struct WrongNet : nn::Module<WrongNet> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 2, .out = 3, .bias = false}});
  Wrong wrong = child("wrong", Wrong{});
  Tensor forward(const Tensor& x) const { return relu(wrong(fc(x))); }
};

// 1/4 beside 3 * 2 = 6, where float16's last place is 2^-8: 64 units.
TEST(Compare, NamesTheWrongOp) {
  const WrongNet net;
  test::set(net.fc.weight, {1, 0, 0, 1, 1, 1});
  Compare compare;
  {
    const amp::Autocast autocast{{.dtype = f16}};
    net(tensor({1.0, 1.0}, {1, 2}));
  }
  const std::vector<Comparison> worst = compare.worst();
  ASSERT_GE(worst.size(), 3u);
  const Comparison& c = worst[0];
  EXPECT_EQ(c.site.op, "test_triple");
  EXPECT_EQ(c.site.module, "wrong");
  EXPECT_EQ(c.dtype, f16);
  EXPECT_EQ(c.sizes, Shape({1, 3}));
  EXPECT_EQ(c.max_ulp, 64);
  EXPECT_EQ(c.max_absolute, 0.25);
  EXPECT_EQ(c.max_relative, 0.25 / 6);
  EXPECT_EQ(c.worst_index, 2);
  EXPECT_EQ(c.got, 6.25);
  EXPECT_EQ(c.expected, 6);
  for (std::size_t i = 1; i < worst.size(); ++i) EXPECT_EQ(worst[i].max_ulp, 0) << worst[i].site.str();
  EXPECT_EQ(compare.compared(), worst.size());
  const std::string report = compare.report();
  const auto at = report.find("worst results\n        64 roundings         64 ulp");
  EXPECT_NE(at, std::string::npos) << report;
  EXPECT_NE(report.find("wrong: test_triple, call"), std::string::npos) << report;
  EXPECT_NE(report.find("element 2 is 6.25, expected 6"), std::string::npos) << report;
}

// 1 + 2^-11 lies half-way between two float16 numbers: half a unit. In float32 the same sum is exact.
TEST(Compare, CountsInUnitsOfTheResult) {
  const Tensor a = tensor({1.0}, {1}), b = tensor({0x1p-11}, {1});
  for (const DType dtype : {f16, f32}) {
    Compare compare;
    add(a.to(dtype), b.to(dtype));
    for (const Comparison& c : compare.worst()) {
      EXPECT_EQ(c.max_ulp, c.site.op == "add" && dtype == f16 ? 0.5 : 0) << c.site.op;
    }
  }
  // The cast of 1/3: its distance to the nearest bfloat16 number, 0.333984375, in units of 2^-9.
  Compare compare;
  tensor({1.0 / 3}, {1}, {.dtype = f64}).to(bf16);
  EXPECT_DOUBLE_EQ(compare.worst().at(0).max_ulp, (0.333984375 - 1.0 / 3) * 512);
}

// 1 + 2^-30 - 1 in float32: nothing is left of 2^-30, which is 2^23 units in the last place of it, but a quarter of the
// rounding of a sum of such terms: 2^-30 of 2^-53 (the last place of 2^-30) + 2^-24 * 2.
TEST(Compare, MeasuresSumsByTheirTerms) {
  const Tensor a = tensor({1.0, 0x1p-30, -1.0}, {1, 3}), b = ones({3, 1});
  Compare compare;
  const double got = mm(a, b).item<double>();
  const Comparison c = compare.worst().at(0);
  EXPECT_EQ(c.expected, 0x1p-30);
  const double error = std::fabs(got - 0x1p-30);
  EXPECT_EQ(c.max_ulp, error / 0x1p-53);
  EXPECT_DOUBLE_EQ(c.max_roundings, error / (0x1p-53 + 0x1p-24 * (2 + 0x1p-30)));
  EXPECT_GT(c.max_ulp, 1e6);
}

TEST(Compare, KnowsOverflowFromError) {
  Compare compare;
  const Tensor big = tensor({300.0}, {1}).to(f16);
  mul(big, big);  // 90000: rounds to infinity, as it should
  log(zeros({1}));
  sqrt(tensor({-1.0}, {1}));
  for (const Comparison& c : compare.worst()) EXPECT_LT(c.max_ulp, 1) << c.site.op;
  // float32 overflows where the exact result is 1: the worst that there is.
  Compare again;
  const Tensor huge = tensor({0x1p127}, {1});
  div(mul(huge, huge), huge);
  EXPECT_EQ(again.worst().at(0).max_ulp, 0) << "each op by itself is right";
}

TEST(Compare, SeesInPlaceOpsAsTheyWere) {
  Tensor x = tensor({1.0, 2.0, 3.0}, {3}).to(f16);
  const Tensor source = tensor({0.1, 0.2, 0.3}, {3});
  Compare compare;
  x.mul_(5);
  x.add_(x);
  x.copy_(source);
  x.t();
  EXPECT_EQ(compare.compared(), 3u);
  for (const Comparison& c : compare.worst()) EXPECT_LE(c.max_ulp, 0.5) << c.site.op;
  EXPECT_TRUE(compare.skipped().empty());
}

TEST(Compare, GivesRandomOpsTheSameNumbers) {
  const Tensor x = ones({1000}).to(bf16);
  Compare compare;
  dropout(x, 0.5);
  randn({100});
  rand({100}, {.dtype = f16});
  randperm(10);
  ASSERT_GE(compare.compared(), 4u) << compare.report();
  for (const Comparison& c : compare.worst()) EXPECT_EQ(c.max_ulp, 0) << c.site.op;
}

// A whole step on the CPU, whose 16-bit kernels round once: half a unit, and a little for the sums in float32 (32 terms
// at most). Elementwise kernels and sums in float32 make a few roundings.
TEST(Compare, FindsTheCpuRight) {
  manual_seed(3);
  for (const char* amp : {"off", "f16", "bf16"}) {
    const test::Small net;
    optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
    const Tensor x = randn({32, 3});
    Compare compare{{.reference = f64}};
    Tensor loss;
    {
      const amp::Autocast autocast{
          {.dtype = amp == std::string("bf16") ? bf16 : f16, .enabled = amp != std::string("off")}};
      loss = mean(net(x) * net(x));
    }
    loss.backward();
    optimizer.step();
    EXPECT_GT(compare.compared(), 10u);
    for (const Comparison& c : compare.worst()) {
      EXPECT_LT(c.max_relative, 0x1p-20 + (c.dtype == f32 ? 0 : finfo(c.dtype).eps / 2)) << c.site.str();
      EXPECT_LE(c.max_roundings, c.dtype == f32 ? 4 : 0.625) << c.site.str();
    }
    EXPECT_TRUE(compare.skipped().contains("adam_step: a kernel that runs by itself")) << compare.report();
    for (const auto& [why, count] : compare.skipped())
      EXPECT_TRUE(why.ends_with(": a kernel that runs by itself")) << why;
    EXPECT_NE(compare.report().find("not compared"), std::string::npos);
  }
}

TEST(Compare, TakesIntegersAndBools) {
  const Tensor x = tensor({1.0, 3.0, 2.0}, {3}).to(f16);
  Compare compare;
  argmax(x, 0);
  gt(x, 1.5);
  nonzero(x);
  for (const Comparison& c : compare.worst()) EXPECT_EQ(c.max_ulp, 0) << c.site.op;
  EXPECT_GE(compare.compared(), 3u);
}

TEST(Compare, SkipsWhatHasNoKernelAndSaysSo) {
  static const Op& op =
      define_op({.name = "test_only_f32", .signature = "test_only_f32(input)", .infer = [](InferContext& ctx) {
                   infer_elementwise(ctx, ctx.input(0).dtype());
                 }});
  static const RegisterCpuKernel kernel("test_only_f32", {DType::f32}, test::triple_kernel<float>);
  const Tensor x = ones({2});
  {
    Compare compare;
    call(op, {&x});
    EXPECT_EQ(compare.compared(), 0u);
    ASSERT_EQ(compare.skipped().size(), 1u);
    EXPECT_NE(compare.skipped().begin()->first.find("f64 is not supported"), std::string::npos);
  }
  Compare compare{{.reference = f32}};
  call(op, {&x});
  EXPECT_EQ(compare.compared(), 1u);
  EXPECT_THROW(Compare({.reference = f16}), DTypeError);
}

TEST(Compare, KeepsTheWorst) {
  Compare compare{{.most = 1}};
  relu(ones({1}));
  test::triple(ones({1}).to(f16));
  relu(ones({1}));
  relu(ones({1}));
  ASSERT_EQ(compare.worst().size(), 1u);
  EXPECT_EQ(compare.worst()[0].site.op, "test_triple");
  EXPECT_EQ(compare.compared(), 5u);  // with the cast
}

}  // namespace
}  // namespace halfstep
