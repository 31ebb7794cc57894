// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/nonfinite.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/checkpoint.h"
#include "halfstep/core/random.h"
#include "halfstep/debug/call_trace.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/runtime/log.h"
#include "tests/debug/nets.h"

namespace halfstep {
namespace {

using debug::NonFinite;
using debug::NonFiniteError;
using debug::OnNonFinite;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const debug::NonFiniteOptions kCollect{.action = OnNonFinite::collect};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// exp(12) = 162754.79, which float16 doesn't reach; the layer before gives exactly 12.
TEST(NonFinite, NamesTheModuleWhereFloat16Overflows) {
  const test::ExpNet net;
  test::set(net.fc.weight, {4, 4, 1, 0});
  const Tensor x = tensor({1.0, 2.0}, {1, 2});
  NonFinite watch(kCollect);
  {
    // exp runs in float32 under autocast; here the region is told otherwise.
    const amp::Autocast autocast{{.dtype = f16, .ops = {{"exp", amp::Policy::lower_precision}}}};
    const Tensor y = net(x);
    EXPECT_EQ(y.dtype(), f16);
    EXPECT_EQ(y.to_vector<double>()[0], kInfinity);
    exp(y);  // of infinity: not where the trouble begins
  }
  ASSERT_EQ(watch.count(), 1u);
  const debug::NonFiniteFinding f = watch.findings().at(0);
  EXPECT_EQ(f.site.module, "head");
  EXPECT_EQ(f.site.op, "exp");
  EXPECT_EQ(f.site.backward_of, "");
  EXPECT_EQ(f.output.dtype, f16);
  EXPECT_EQ(f.output.inf, 1);
  EXPECT_EQ(f.output.nan, 0);
  ASSERT_EQ(f.inputs.size(), 1u);
  EXPECT_EQ(f.inputs[0].min, 1);
  EXPECT_EQ(f.inputs[0].max, 12);
  ASSERT_TRUE(f.exact);
  EXPECT_NEAR(*f.exact, std::exp(12.0), 1e-9);
  const std::string text = f.str();
  for (const char* part :
       {"head: exp", "1 inf among 2 values", "f16 [1, 2]", "forward", "from 1 to 12",
        "f16 overflow: the largest |value| of the exact result is 162755, f16 reaches 65504", "bf16?"}) {
    EXPECT_TRUE(contains(text, part)) << part << " in " << text;
  }
}

// d/dx of 400x at a gradient of 200 is 80000: over float16's reach, in the backward pass of the product.
TEST(NonFinite, NamesTheGradientThatOverflows) {
  Tensor x = tensor({1.0}, {1}).to(f16).requires_grad_();
  const Tensor y = mul(x, tensor({400.0}, {1}).to(f16));
  NonFinite watch{{.action = OnNonFinite::raise}};
  try {
    y.backward(tensor({200.0}, {1}).to(f16));
    FAIL() << "nothing was found";
  } catch (const NonFiniteError& e) {
    EXPECT_TRUE(contains(e.what(), "mul (backward of mul): made 1 inf")) << e.what();
    EXPECT_TRUE(contains(e.what(), "backward, call")) << e.what();
    EXPECT_TRUE(contains(e.what(), "the exact result is 80000, f16 reaches 65504; a smaller loss scale")) << e.what();
  }
  EXPECT_EQ(watch.findings().size(), 1u);
}

TEST(NonFinite, NamesTheModuleOfAGradient) {
  const test::ExpNet net;
  test::set(net.fc.weight, {300, 0, 0, 1});
  NonFinite watch(kCollect);
  Tensor x = tensor({0.0, 0.0}, {1, 2}).to(f16).requires_grad_();
  Tensor y;
  {
    const amp::Autocast autocast{{.dtype = f16}};
    y = net.fc(x);  // the module is called by itself: its path is its name
  }
  EXPECT_EQ(watch.count(), 0u);
  y.backward(tensor({600.0, 0.0}, {1, 2}).to(f16));  // 300 * 600
  ASSERT_EQ(watch.count(), 1u);
  EXPECT_EQ(watch.findings()[0].site.module, "fc");
  EXPECT_NE(watch.findings()[0].site.backward_of, "");
  EXPECT_EQ(watch.findings()[0].exact, 180000) << watch.findings()[0].str();
}

// A forward pass that a checkpoint runs again in the backward pass makes the same values again. The modules are those
// that it enters.
TEST(NonFinite, ReportsOnceWhatACheckpointComputesTwice) {
  const test::ExpNet net;
  test::set(net.fc.weight, {100, 0, 0, 1});
  const Tensor x = ones({1, 2}, {.requires_grad = true});
  NonFinite watch(kCollect);
  debug::CallTrace trace;
  const Tensor y = checkpoint([&](const Tensor& t) { return net(t); }, x);  // exp(100) is too much for float32
  EXPECT_EQ(watch.count(), 1u);
  sum(y).backward();
  ASSERT_EQ(watch.count(), 1u);
  EXPECT_EQ(watch.findings()[0].site.module, "head");
  EXPECT_EQ(watch.findings()[0].site.op, "exp");
  EXPECT_EQ(watch.findings()[0].site.backward_of, "");
  std::vector<debug::CallSite> runs;
  for (const debug::TracedCall& call : trace.calls()) {
    if (call.site.op == "exp") runs.push_back(call.site);
  }
  ASSERT_EQ(runs.size(), 2u);
  for (const debug::CallSite& run : runs) EXPECT_EQ(run.module, "head");
  EXPECT_EQ(runs[0].backward_of, "");
  EXPECT_NE(runs[1].backward_of, "");
}

TEST(NonFinite, SeesWhatAnInPlaceOpHadBefore) {
  Tensor x = tensor({60000.0, 1.0}, {2}).to(f16);
  NonFinite watch(kCollect);
  x.mul_(2);
  ASSERT_EQ(watch.count(), 1u);
  EXPECT_EQ(watch.findings()[0].inputs.at(0).max, 60000);  // not the infinity that stands there now
  EXPECT_EQ(watch.findings()[0].exact, 120000);
  x.mul_(2);  // the infinity was there already
  EXPECT_EQ(watch.count(), 1u);
}

TEST(NonFinite, LeavesOutWhatWasAskedForOrPassedOn) {
  NonFinite watch(kCollect);
  const Tensor x = tensor({1.0, 2.0}, {2});
  const Tensor mask = gt(x, 1.5);
  const Tensor scores = masked_fill(x, mask, -kInfinity);
  EXPECT_EQ(softmax(scores, 0).to_vector<double>(), (std::vector<double>{1, 0}));
  full({2}, kInfinity);
  Tensor filled = zeros({2});
  filled.fill_(kInfinity);
  sum(filled);
  Tensor fresh = empty({2});
  fresh.fill_(std::numeric_limits<double>::quiet_NaN());
  fresh.copy_(x);
  EXPECT_EQ(watch.count(), 0u) << watch.findings()[0].str();
  EXPECT_GT(watch.calls(), 4u);
}

TEST(NonFinite, SaysWhenNoDtypeWouldHelp) {
  NonFinite watch(kCollect);
  log(tensor({0.0, 1.0}, {2}));
  sqrt(tensor({-1.0}, {1}));
  ASSERT_EQ(watch.count(), 2u);
  EXPECT_TRUE(contains(watch.findings()[0].str(), "made 1 inf")) << watch.findings()[0].str();
  EXPECT_TRUE(contains(watch.findings()[1].str(), "made 1 NaN")) << watch.findings()[1].str();
  for (const auto& f : watch.findings()) EXPECT_TRUE(contains(f.str(), "no other dtype would help")) << f.str();
}

TEST(NonFinite, FindsCastsThatOverflow) {
  NonFinite watch(kCollect);
  tensor({70000.0}, {1}).to(f16);
  ASSERT_EQ(watch.count(), 1u);
  EXPECT_EQ(watch.findings()[0].exact, 70000);
}

TEST(NonFinite, WarnsOnceForAnOpAndModule) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel level, std::string_view text) {
    EXPECT_EQ(level, LogLevel::warning);
    said.emplace_back(text);
  });
  {
    NonFinite watch;
    for (int i = 0; i < 3; ++i) log(zeros({1}));
    reciprocal(zeros({1}));
    EXPECT_EQ(watch.count(), 4u);
  }
  set_log_sink({});
  EXPECT_EQ(said.size(), 2u);
}

TEST(NonFinite, KeepsAtMostSoManyAndStopsWhenItGoes) {
  {
    NonFinite watch{{.action = OnNonFinite::collect, .most = 2}};
    for (int i = 0; i < 3; ++i) log(zeros({1}));
    EXPECT_EQ(watch.count(), 3u);
    EXPECT_EQ(watch.findings().size(), 2u);
  }
  EXPECT_FALSE(observed());
}

TEST(NonFinite, WatchesItsOwnThreadUnlessAsked) {
  for (const bool all : {false, true}) {
    NonFinite watch{{.action = OnNonFinite::collect, .all_threads = all}};
    std::thread([] { log(zeros({1})); }).join();
    EXPECT_EQ(watch.count(), all ? 1u : 0u);
  }
}

// What happens inside of it is neither recorded nor cast nor random: the run is bit-identical.
TEST(NonFinite, ChangesNothing) {
  const auto run = [](bool watched) {
    manual_seed(5);
    const test::Small net;
    const Tensor x = randn({4, 3});
    std::optional<NonFinite> watch;
    if (watched) watch.emplace(kCollect);
    Tensor y;
    {
      const amp::Autocast autocast{{.dtype = bf16}};
      y = sum(exp(net(x)));
    }
    y.backward();
    return std::pair(y.to_vector<double>(), net.fc1.weight.grad().to_vector<double>());
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(Statistics, CountsWhatIsThere) {
  const Tensor x =
      tensor({1.0, -3.0, 0.0, kInfinity, std::numeric_limits<double>::quiet_NaN(), 0x1p-20, -kInfinity}, {7});
  const debug::Statistics s = debug::statistics(x.to(f16));
  EXPECT_EQ(s.numel, 7);
  EXPECT_EQ(s.dtype, f16);
  EXPECT_EQ(s.min, -3);
  EXPECT_EQ(s.max, 1);
  EXPECT_EQ(s.mean, (-2 + 0x1p-20) / 4);
  EXPECT_EQ(s.abs_sum, 4 + 0x1p-20);
  EXPECT_EQ(s.nan, 1);
  EXPECT_EQ(s.inf, 2);
  EXPECT_EQ(s.zero, 1);
  EXPECT_EQ(s.subnormal, 1);
  EXPECT_FALSE(s.finite());
  EXPECT_EQ(s.str(), "f16 [7]: min -3, max 1, mean -0.5, sum|x| 4; 1 nan, 2 inf, 1 zero, 1 subnormal");
  // 2^-20 is a normal number in float32.
  EXPECT_EQ(debug::statistics(x).subnormal, 0);
  const debug::Statistics none = debug::statistics(zeros({0}));
  EXPECT_TRUE(std::isnan(none.mean) && std::isnan(none.min));
  EXPECT_EQ(none.str(), "f32 [0]");
  EXPECT_EQ(debug::statistics(tensor(std::vector<std::int64_t>{2, 0, -4}, {3})).str(),
            "i64 [3]: min -4, max 2, mean -0.666667, sum|x| 6; 1 zero");
  // A view with gaps.
  EXPECT_EQ(debug::statistics(tensor({1.0, 2.0, 3.0, 4.0}, {2, 2}).t().select(0, 1)).mean, 3);
}

}  // namespace
}  // namespace halfstep
