// SPDX-License-Identifier: Apache-2.0
// Guards of autocast that go in another order than they came, or on another thread: autocast is never left on.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/cast_cache.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/runtime/log.h"

namespace halfstep {
namespace {

class Guards : public testing::Test {
 protected:
  void SetUp() override {
    set_log_sink([this](LogLevel level, std::string_view text) {
      if (level == LogLevel::error) said_.emplace_back(text);
    });
  }
  void TearDown() override {
    set_log_sink({});
    EXPECT_FALSE(thread_state().autocast.enabled) << "whatever a test did";
    EXPECT_FALSE(amp::in_region());
  }
  DType product() const { return mm(x_, x_).dtype(); }

  const Tensor x_ = ones({2, 2});
  std::vector<std::string> said_;
};

using Guard = std::optional<amp::Autocast>;

TEST_F(Guards, InOrderNothingIsSaid) {
  {
    const amp::Autocast outer{{.dtype = bf16}};
    { const amp::Autocast inner{{.dtype = f16}}; }
    EXPECT_EQ(product(), bf16);
  }
  EXPECT_EQ(product(), f32);
  EXPECT_TRUE(said_.empty());
}

TEST_F(Guards, TheOuterOneFirst) {
  Guard a, b;
  a.emplace(amp::AutocastOptions{.dtype = bf16});
  b.emplace(amp::AutocastOptions{.dtype = f16});
  a.reset();
  ASSERT_EQ(said_.size(), 1u);
  EXPECT_NE(said_[0].find("closed before one that was opened inside it"), std::string::npos) << said_[0];
  EXPECT_EQ(product(), f16) << "the one that is left";
  b.reset();
  EXPECT_EQ(product(), f32);
  EXPECT_FALSE(amp::is_autocast_enabled());
  EXPECT_EQ(said_.size(), 1u);
}

TEST_F(Guards, ThreeInEveryOrder) {
  const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (const auto& order : orders) {
    Guard g[3];
    g[0].emplace(amp::AutocastOptions{.dtype = bf16});
    g[1].emplace(amp::AutocastOptions{.enabled = false});
    g[2].emplace(amp::AutocastOptions{.dtype = f16});
    const DType says[3] = {bf16, f32, f16};
    for (const int i : order) {
      g[i].reset();
      // What the innermost of those that are left says.
      DType expected = f32;
      for (int k = 0; k < 3; ++k) expected = g[k] ? says[k] : expected;
      EXPECT_EQ(product(), expected) << order[0] << order[1] << order[2] << ", " << i;
    }
    EXPECT_FALSE(amp::is_autocast_enabled());
  }
}

TEST_F(Guards, ADisabledOneInsideThatStaysLonger) {
  Guard a, off;
  a.emplace(amp::AutocastOptions{.dtype = f16});
  off.emplace(amp::AutocastOptions{.enabled = false});
  a.reset();
  EXPECT_EQ(product(), f32);
  off.reset();
  EXPECT_EQ(product(), f32);
}

TEST_F(Guards, OnAnotherThread) {
  auto guard = std::make_unique<amp::Autocast>(amp::AutocastOptions{.dtype = f16});
  EXPECT_EQ(product(), f16);
  std::thread([&] {
    const amp::Autocast own{{.dtype = bf16}};
    guard.reset();
    EXPECT_EQ(product(), bf16) << "that thread's own region stays";
  }).join();
  ASSERT_EQ(said_.size(), 1u);
  EXPECT_NE(said_[0].find("on another thread"), std::string::npos) << said_[0];
  EXPECT_EQ(product(), f32);
  EXPECT_FALSE(amp::is_autocast_enabled());
}

TEST_F(Guards, OpenedOnAThreadThatHasEnded) {
  std::unique_ptr<amp::Autocast> guard;
  std::thread([&] { guard = std::make_unique<amp::Autocast>(); }).join();
  EXPECT_EQ(product(), f32);
  guard.reset();
  EXPECT_EQ(product(), f32);
  std::thread([&] { EXPECT_EQ(product(), f32); }).join();
}

TEST_F(Guards, ARegionThatAnotherThreadClosedUnderAnother) {
  auto outer = std::make_unique<amp::Autocast>(amp::AutocastOptions{.dtype = bf16});
  Guard inner;
  inner.emplace(amp::AutocastOptions{.dtype = f16});
  std::thread([&] { outer.reset(); }).join();
  EXPECT_EQ(product(), f16);
  inner.reset();
  EXPECT_EQ(product(), f32);
}

TEST_F(Guards, ThatLeaveTheirModulesScope) {
  Guard left;
  {
    const amp::Autocast region{{.dtype = bf16, .modules = {{.path = "head", .dtype = f16}}}};
    {
      const amp::ModuleScope head{"head"};
      EXPECT_EQ(product(), f16);
      left.emplace(amp::AutocastOptions{.enabled = false});
    }
    EXPECT_EQ(product(), f32);
  }
  EXPECT_EQ(product(), f32);
  left.reset();
  EXPECT_EQ(product(), f32);
  EXPECT_EQ(amp::module_path(), "");
}

TEST_F(Guards, ThatGoInAHook) {
  const Tensor w = (full({2, 2}, 1) + 0).requires_grad_();
  Guard guard;
  guard.emplace();
  const Tensor y = mm(x_, w);
  y.register_hook([&](const Tensor& g) {
    guard.reset();
    return g;
  });
  sum(y).backward();
  EXPECT_EQ(product(), f32);
  EXPECT_FALSE(amp::is_autocast_enabled());
}

TEST_F(Guards, KeptCastsGoWithTheirRegion) {
  const Tensor w = (full({2, 2}, 1) + 0).requires_grad_();
  Guard a, b;
  a.emplace();
  b.emplace();
  mm(x_, w);
  a.reset();
  b.reset();
  EXPECT_FALSE(amp::in_region());
  amp::cast_stats() = {};
  const amp::Autocast again;
  mm(x_.to(f16), w);
  EXPECT_EQ(amp::cast_stats().casts, 1u);
}

// Destroyed when the thread's own variables are gone.
std::optional<amp::Autocast> g_static;
TEST_F(Guards, ThatOutliveTheProgramsMain) {
  // Only that it ends well: after main() there is nobody left to look. In a process of its own, since a fork of this
  // one has none of its threads.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        g_static.emplace();
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace halfstep
