// SPDX-License-Identifier: Apache-2.0
// Products on the tiles of AMX: by the processor's units where it has them, else by their model.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/amx_tile.h"
#include "tests/backends/gemm_case.h"
#include "tests/support/threads.h"

namespace halfstep::cpu {
namespace {

using GemmTiles = ByIsa;

// On the tiles of AMX, or by their model. Both orders of each operand in memory, with what is left over of each tile,
// panel, block and piece of the sum; results of each dtype, with and without what follows the sum.
TEST_P(GemmTiles, EveryLayoutAndEpilogue) {
  for (const std::string a : {"rows", "padded", "cols", "cols padded"}) {
    for (const std::string b : {"rows", "padded", "cols", "cols padded"}) {
      for (const auto& [m, n, k] : {std::array{3, 5, 2}, std::array{16, 32, 32}, std::array{17, 33, 34},
                                    std::array{47, 65, 62}, std::array{70, 40, 96}, std::array{5, 100, 64}}) {
        Case t{.m = m, .n = n, .k = k, .a = bf16, .b = bf16, .layout_a = a, .layout_b = b, .padding = m % 3};
        // One operand is packed in pairs, which lie side by side where both numbers are even; padding is odd.
        const auto served = [&](std::int64_t steps) {
          const bool even = steps % 2 == 0;
          return a.starts_with("cols") || !b.starts_with("cols") || (even && (a == "rows" || b == "cols"));
        };
        EXPECT_EQ(check(t, By::tiles), served(k));
        t.c = m % 2 == 0 ? f16 : bf16, t.bias = true, t.bias_dtype = n % 2 == 0 ? f32 : bf16, t.relu = n > 60;
        EXPECT_EQ(check(t, By::tiles), served(k));
        t.c = f32, t.add = true;
        EXPECT_EQ(check(t, By::tiles), served(k));
        if (k == 2) continue;
        t.k = k - 1;
        EXPECT_EQ(check(t, By::tiles), served(k - 1));
      }
    }
  }
  // A weight's gradient in several goes; rows in place, of either operand; blocks of rows and chunks of columns.
  EXPECT_TRUE(check({.m = 40, .n = 50, .k = 1501, .a = bf16, .b = bf16, .layout_a = "cols", .add = true}, By::tiles));
  EXPECT_TRUE(check({.m = 300, .n = 70, .k = 96, .a = bf16, .b = bf16, .c = bf16, .layout_b = "cols"}, By::tiles));
  EXPECT_TRUE(check({.m = 24, .n = 300, .k = 64, .a = bf16, .b = bf16, .c = bf16, .layout_b = "cols", .bias = true},
                    By::tiles));
  EXPECT_TRUE(check({.m = 33, .n = 90, .k = 8200, .a = bf16, .b = bf16, .c = bf16, .layout_b = "cols"}, By::tiles));
  EXPECT_TRUE(check({.m = 100, .n = 70, .k = 288, .a = bf16, .b = bf16, .c = bf16, .layout_b = "cols"}, By::tiles));
  EXPECT_TRUE(check({.m = 100,
                     .n = 90,
                     .k = 260,  // which isn't in place
                     .a = bf16,
                     .b = bf16,
                     .c = bf16,
                     .layout_b = "cols",
                     .bias = true,
                     .relu = true},
                    By::tiles));
  EXPECT_TRUE(check({.m = 20, .n = 40, .k = 64, .a = bf16, .b = bf16, .layout_b = "cols", .batch = 5}, By::tiles));
  EXPECT_TRUE(check({.m = 40, .n = 70, .k = 1120, .a = bf16, .b = bf16}, By::tiles));  // goes of rows in place
  EXPECT_TRUE(
      check({.m = 35, .n = 1100, .k = 1040, .a = bf16, .b = bf16, .layout_a = "cols"}, By::tiles));  // and chunks
  EXPECT_TRUE(check({.m = 9, .n = 20, .k = 1, .a = bf16, .b = bf16, .layout_a = "cols"}, By::tiles));
  EXPECT_FALSE(check({.m = 20, .n = 40, .k = 64, .a = bf16, .b = f32}, By::tiles));
  EXPECT_FALSE(check({.m = 20, .n = 40, .k = 64, .a = bf16, .b = bf16, .layout_a = "strided"}, By::tiles));
}

// Whatever their number and share, threads add up the same.
TEST_P(GemmTiles, TheSameBitsForAnyThreads) {
  for (const Case& t : {Case{.m = 300, .n = 260, .k = 1060, .a = bf16, .b = bf16, .layout_a = "cols"},
                        Case{.m = 64, .n = 512, .k = 96, .a = bf16, .b = bf16, .c = bf16, .layout_b = "cols"},
                        Case{.m = 520, .n = 97, .k = 320, .a = bf16, .b = bf16, .c = bf16, .layout_b = "cols"},
                        Case{.m = 520, .n = 97, .k = 96, .a = bf16, .b = bf16, .c = bf16, .layout_b = "cols"}}) {
    std::vector<unsigned char> first, again;
    for (const int threads : {1, 2, 3, 4}) {
      const test::ThreadsGuard guard(threads);
      EXPECT_TRUE(check(t, By::tiles, threads == 1 ? &first : &again));
      if (threads > 1) {
        EXPECT_EQ(first, again) << threads;
      }
    }
  }
}

// Packed operands and sums of a thread stay in the second-level cache, or little more: products of which they would not
// are left to other kernels.
TEST(GemmTilesWorkspace, IsOfTheSizeOfCaches) {
  struct Shape {
    std::int64_t m, n, k;
    bool turned;
    DType c;
    bool ours;
  };
  const test::ThreadsGuard guard(1);
  for (const Shape& s : {Shape{64, 10, 1'000'000, true, f32, true}, Shape{1536, 384, 16384, true, f32, true},
                         Shape{4096, 4096, 2040, false, bf16, true}, Shape{2048, 2048, 16384, true, bf16, false},
                         Shape{2048, 4096, 11008, false, bf16, false}}) {
    SCOPED_TRACE(fmt::format("{} x {} x {}", s.m, s.n, s.k));
    GemmArgs g;
    g.m = s.m, g.n = s.n, g.k = s.k, g.ldc = s.n, g.c_dtype = s.c;
    g.a = {nullptr, bf16, s.turned ? 1 : s.k, s.turned ? s.m : 1};
    g.b = {nullptr, bf16, s.turned ? s.n : 1, s.turned ? 1 : s.k};
    if (amx_usable()) {
      EXPECT_EQ(choose_gemm_path(g, Isa::amx) == GemmPath::tiles, s.ours);
    }
    if (!s.ours) continue;
    std::uint64_t asked = 0;
    KernelContext context = {};
    context.owner = &asked;
    context.workspace = [](KernelContext* self, std::uint64_t bytes) -> void* {
      *static_cast<std::uint64_t*>(self->owner) += bytes;
      return nullptr;
    };
    context.set_error = [](KernelContext*, const char*) {};
    EXPECT_EQ(gemm_by(GemmPath::tiles, &context, g), Status::failed);
    EXPECT_GT(asked, 0U);
    EXPECT_LE(asked, 3U << 20);
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, GemmTiles, testing::Values(Isa::avx2, Isa::avx512_bf16, Isa::amx),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace halfstep::cpu
