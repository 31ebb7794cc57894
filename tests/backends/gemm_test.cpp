// SPDX-License-Identifier: Apache-2.0
// Products of every path but the tiles of AMX, by gemm_case.h.
#include "halfstep/backends/cpu/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/backends/gemm_case.h"
#include "tests/support/threads.h"

namespace halfstep::cpu {
namespace {

const std::vector<std::string> kLayouts = {"rows", "padded", "cols", "cols padded", "strided"};

/// Every test of float32 sums runs with both kernels of the library.
using GemmIsa = ByIsa;

TEST_P(GemmIsa, SmallShapesInEveryLayout) {
  for (std::int64_t m : {1, 2, 3, 5, 7, 13, 17, 33}) {
    for (std::int64_t n : {1, 2, 4, 6, 8, 15, 16, 31, 33}) {
      for (std::int64_t k : {1, 2, 3, 5, 16, 19, 33}) {
        for (const std::string& a : kLayouts) {
          const std::string& b =
              kLayouts[static_cast<std::size_t>(m + n + k + static_cast<std::int64_t>(a.size())) % 5];
          for (const By by : {By::choice, By::blocked, By::narrow}) {
            check({.m = m, .n = n, .k = k, .layout_a = a, .layout_b = b, .padding = n % 3}, by);
          }
        }
      }
    }
  }
}

TEST_P(GemmIsa, EverySize) {
  for (std::int64_t size = 1; size <= 33; ++size) {
    check({.m = size, .n = 29, .k = 31}, By::blocked);
    check({.m = 29, .n = size, .k = 31, .layout_b = "cols"}, By::blocked);
    check({.m = 29, .n = 31, .k = size, .layout_a = "cols"}, By::blocked);
  }
}

TEST_P(GemmIsa, EveryDTypeAndEpilogue) {
  for (const DType a : {f32, f16, bf16}) {
    for (const DType b : {f32, f16, bf16}) {
      for (const DType c : {f32, f16, bf16}) {
        for (const By by : {By::blocked, By::narrow}) {
          for (const std::string layout : {"rows", "cols"}) {
            const std::int64_t m = by == By::narrow ? 3 : 37;
            Case t{
                .m = m, .n = 45, .k = 53, .a = a, .b = b, .c = c, .layout_a = layout, .layout_b = layout, .padding = 2};
            EXPECT_TRUE(check(t, by));
            t.bias = true, t.bias_dtype = b;
            EXPECT_TRUE(check(t, by));
            t.relu = true;
            EXPECT_TRUE(check(t, by));
            if (c == f32) {
              t.add = true;
              EXPECT_TRUE(check(t, by));
            }
            t.layout_b = layout == "rows" ? "cols" : "rows", t.n = 3, t.m = 70;  // Turned.
            EXPECT_TRUE(check(t, by));
            t.n = 70, t.m = 50, t.k = 3;
            EXPECT_TRUE(check(t, by));
          }
        }
      }
    }
  }
}

TEST_P(GemmIsa, LargerThanEveryBlock) {
  // Several blocks of rows, panels and steps, with what is left over of each.
  for (const DType dtype : {f32, bf16}) {
    for (const std::string a : {"rows", "cols"}) {
      for (const std::string b : {"rows", "cols"}) {
        check({.m = 131, .n = 70, .k = 530, .a = dtype, .b = dtype, .layout_a = a, .layout_b = b}, By::blocked);
        // Sums of more steps in one go than in a half of it, of tiles packed side by side.
        check({.m = 70, .n = 140, .k = 384, .a = dtype, .b = dtype, .layout_a = a, .layout_b = b}, By::blocked);
        check({.m = 20, .n = 1037, .k = 77, .a = dtype, .b = dtype, .c = bf16, .layout_a = a, .layout_b = b},
              By::blocked);
        check(
            {.m = 259, .n = 33, .k = 70, .a = dtype, .b = dtype, .c = f16, .layout_a = a, .layout_b = b, .bias = true},
            By::blocked);
      }
    }
  }
  check({.m = 129, .n = 64, .k = 1024, .add = true}, By::blocked);
  check({.m = 64, .n = 2050, .k = 40}, By::blocked);
  check({.m = 2, .n = 2050, .k = 1040, .layout_b = "cols"}, By::narrow);
  check({.m = 1, .n = 2050, .k = 1040}, By::narrow);
}

TEST_P(GemmIsa, ShapesOfASmallNetwork) {
  for (const DType dtype : {f32, f16, bf16}) {
    for (const std::int64_t batch : {64, 1}) {
      check({.m = batch,
             .n = 512,
             .k = 784,
             .a = dtype,
             .b = dtype,
             .c = dtype,
             .layout_b = "cols",
             .bias = true,
             .bias_dtype = dtype,
             .relu = true});
      check({.m = batch, .n = 784, .k = 512, .a = dtype, .b = dtype, .c = dtype});
      check({.m = 512, .n = 784, .k = batch, .a = dtype, .b = dtype, .c = f32, .layout_a = "cols"});
      check({.m = 10, .n = 512, .k = batch, .a = dtype, .b = dtype, .c = f32, .layout_a = "cols", .add = true});
    }
  }
}

// Vectors that are read where they lie, also a power of two apart, as far as the second-level cache has room. Items of
// a batch that begin at any multiple of 32 bytes have one plan and the workspace of the first.
TEST_P(GemmIsa, VectorsInPlace) {
  check({.m = 40, .n = 512, .k = 300}, By::blocked);
  check({.m = 40, .n = 1024, .k = 500}, By::blocked);
  check({.m = 77, .n = 48, .k = 77, .batch = 4}, By::blocked);
  check({.m = 77, .n = 40, .k = 77, .layout_b = "heads", .batch = 8}, By::blocked);
}

TEST_P(GemmIsa, Batches) {
  for (const DType dtype : {f32, bf16}) {
    for (const std::int64_t batch : {2, 3, 9}) {
      check({.m = 17, .n = 19, .k = 23, .a = dtype, .b = dtype, .c = dtype, .layout_b = "cols", .batch = batch});
      check({.m = 17,
             .n = 19,
             .k = 23,
             .a = dtype,
             .b = dtype,
             .c = dtype,
             .bias = true,
             .batch = batch,
             .share_b = true});
      check({.m = 1, .n = 19, .k = 23, .a = dtype, .b = dtype, .c = f32, .add = true, .batch = batch, .padding = 1});
      check({.m = 64, .n = 64, .k = 64, .a = dtype, .b = dtype, .c = dtype, .layout_a = "cols padded", .batch = batch});
    }
  }
  check({.m = 200, .n = 210, .k = 64, .batch = 2});
}

TEST_P(GemmIsa, ThreadsShareTheWork) {
  for (const int threads : {1, 2, 3, 4}) {
    const test::ThreadsGuard guard(threads);
    check({.m = 150, .n = 170, .k = 90});
    check({.m = 64, .n = 512, .k = 100, .c = bf16, .layout_b = "cols", .bias = true});
    check({.m = 40, .n = 600, .k = 200});
    check({.m = 1, .n = 700, .k = 600, .layout_b = "cols"});
    check({.m = 600, .n = 700, .k = 1});
    check({.m = 70, .n = 70, .k = 70, .batch = 5});
  }
}

// Jobs that threads steal from each other: pieces of rows that share packed columns, chunks of columns that share
// packed rows, and both.
TEST_P(GemmIsa, TheSameBitsForAnyThreads) {
  for (const Case& t :
       {Case{.m = 64,
       .n = 512,
       .k = 784,
       .layout_b = "cols",
       .bias = true},  // forward
                       // Columns in place, rows packed with all goes; sums wait in scratch memory, or in the result.
        Case{.m = 64, .n = 528, .k = 512, .a = bf16, .c = bf16}, Case{.m = 100, .n = 1040, .k = 500, .a = bf16},
        Case{.m = 512, .n = 784, .k = 64, .layout_a = "cols"},  // weight gradient
        Case{.m = 600, .n = 500, .k = 130, .c = f16, .layout_b = "cols", .relu = true},
        Case{.m = 300, .n = 700, .k = 900, .layout_a = "cols", .add = true}}) {
    std::vector<unsigned char> first, again;
    for (const int threads : {1, 2, 3, 7}) {
      const test::ThreadsGuard guard(threads);
      EXPECT_TRUE(check(t, By::blocked, threads == 1 ? &first : &again));
      if (threads > 1) {
        EXPECT_EQ(first, again) << t.text() << ", " << threads;
      }
    }
  }
}

TEST_P(GemmIsa, NotANumberAndInfinityComeThrough) {
  for (const bool relu : {false, true}) {
    for (const By by : {By::blocked, By::narrow}) {
      for (const std::string layout : {"rows", "cols"}) {
        const std::int64_t m = by == By::narrow ? 2 : 20, n = 35, k = 40;
        std::vector<float> a(static_cast<std::size_t>(m * k), 1.0f), b(static_cast<std::size_t>(k * n), 1.0f);
        std::vector<BFloat16> c(static_cast<std::size_t>(m * n));
        const bool rows = layout == "rows";
        const auto at_b = [&](std::int64_t p, std::int64_t j) -> float& {
          return b[static_cast<std::size_t>(rows ? p * n + j : j * k + p)];
        };
        at_b(3, 34) = std::numeric_limits<float>::quiet_NaN();
        at_b(4, 2) = std::numeric_limits<float>::infinity();
        at_b(5, 3) = std::numeric_limits<float>::infinity();
        at_b(6, 3) = -std::numeric_limits<float>::infinity();
        a[static_cast<std::size_t>(1 * k + 7)] = std::numeric_limits<float>::quiet_NaN();
        GemmArgs g;
        g.m = m, g.n = n, g.k = k;
        g.a = {a.data(), f32, k, 1};
        g.b = {b.data(), f32, rows ? n : 1, rows ? 1 : k};
        g.c = c.data(), g.c_dtype = bf16, g.ldc = n;
        g.activation = relu ? GemmActivation::relu : GemmActivation::none;
        Context context;
        ASSERT_EQ(gemm_by(by == By::narrow ? GemmPath::narrow : GemmPath::blocked, &context, g), Status::ok);
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) {
            const float v = static_cast<float>(c[static_cast<std::size_t>(i * n + j)]);
            if (i == 1 || j == 34 || j == 3) {
              EXPECT_TRUE(std::isnan(v)) << i << ", " << j;
            } else if (j == 2) {
              EXPECT_TRUE(std::isinf(v) && v > 0) << i << ", " << j;
            } else {
              EXPECT_EQ(v, 40.0f) << i << ", " << j;
            }
          }
        }
      }
    }
  }
}

TEST_P(GemmIsa, SubnormalsAndOverflowOf16Bits) {
  // 3 * 2^-25 lies between the f16 subnormals 2^-24 and 2^-23, at a tie; 65520 is the first that rounds to infinity.
  const float scale[] = {0x1.8p-24f, 0x1p-24f, 0x1p-26f, 65519.0f, 65520.0f, -70000.0f};
  const float expected[] = {0x1p-23f, 0x1p-24f, 0.0f, 65504.0f, INFINITY, -INFINITY};
  for (std::size_t i = 0; i < std::size(scale); ++i) {
    const std::int64_t m = 6, n = 20;
    std::vector<float> a(6 * 5, 0.0f), b(5 * 20, 0.0f);
    std::vector<Half> c(6 * 20);
    for (int r = 0; r < 6; ++r) a[static_cast<std::size_t>(r * 5)] = scale[i];
    for (int j = 0; j < 20; ++j) b[static_cast<std::size_t>(j)] = 1.0f;
    GemmArgs g;
    g.m = m, g.n = n, g.k = 5;
    g.a = {a.data(), f32, 5, 1}, g.b = {b.data(), f32, 20, 1};
    g.c = c.data(), g.c_dtype = f16, g.ldc = n;
    Context context;
    ASSERT_EQ(gemm_by(GemmPath::blocked, &context, g), Status::ok);
    for (const Half h : c) EXPECT_EQ(static_cast<float>(h), expected[i]);
  }
}

TEST_P(GemmIsa, NothingToSum) {
  for (const DType dtype : {f32, f16, bf16}) {
    check({.m = 5, .n = 7, .k = 0, .a = dtype, .b = dtype, .c = dtype});
    check({.m = 5, .n = 7, .k = 0, .a = dtype, .b = dtype, .c = dtype, .bias = true, .relu = true});
  }
  check({.m = 5, .n = 7, .k = 0, .add = true});
  check({.m = 0, .n = 7, .k = 3});
  check({.m = 5, .n = 0, .k = 3});
  check({.m = 5, .n = 7, .k = 3, .batch = 0});
}

TEST_P(GemmIsa, SameBitsEveryTime) {
  const test::ThreadsGuard guard(2);
  for (const Case& t :
       {Case{.m = 100, .n = 300, .k = 700, .c = bf16, .layout_b = "cols"},
        Case{.m = 1, .n = 900, .k = 700, .layout_b = "cols"}, Case{.m = 300, .n = 200, .k = 64, .layout_a = "cols"}}) {
    std::vector<unsigned char> first, again;
    check(t, By::choice, &first);
    for (int i = 0; i < 3; ++i) {
      check(t, By::choice, &again);
      EXPECT_EQ(first, again);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, GemmIsa, testing::Values(Isa::avx2, Isa::avx512),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(Gemm, OneDnnAgrees) {
  // Where the processor has units. Rows of c that are padded, and other processors, may have no kernel but those that
  // must not run (see onednn.cpp): then the choice goes another way, which is checked with the same bounds.
  for (const DType dtype : {f32, bf16, f16}) {
    const bool units = dtype == bf16 ? compute_isa() >= Isa::avx512_bf16 : compute_isa() >= Isa::avx512_fp16;
    for (const DType c : {dtype, f32}) {
      for (const std::string layout : {"rows", "cols", "padded"}) {
        for (const std::int64_t padding : {0, 3}) {
          Case t{.m = 37,
                 .n = 45,
                 .k = 53,
                 .a = dtype,
                 .b = dtype,
                 .c = c,
                 .layout_a = layout,
                 .layout_b = layout,
                 .padding = padding};
          const bool served = check(t, By::onednn);
          EXPECT_TRUE(served || padding > 0 || layout == "padded" || !units || dtype == f32) << t.text();
          const auto both = [&] {
            check(t, By::onednn);
            EXPECT_TRUE(check(t)) << t.text();
          };
          t.bias = true, t.bias_dtype = c, t.relu = true;
          both();
          t.batch = 3;
          both();
          t.share_b = true, t.bias = false, t.add = c == f32;
          both();
        }
      }
    }
  }
}

// Cut into rectangles for threads, and with rows and columns left over of every block.
TEST(Gemm, OneDnnAgreesOnManyThreads) {
  const int before = num_threads();
  for (const int threads : {2, 3, 8}) {
    set_num_threads(threads);
    for (const DType dtype : {bf16, f16}) {
      for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{300, 270, 100}, {33, 1000, 200}, {1000, 65, 131}}) {
        Case t{.m = m,
               .n = n,
               .k = k,
               .a = dtype,
               .b = dtype,
               .c = dtype,
               .bias = true,
               .bias_dtype = dtype,
               .relu = true};
        check(t, By::onednn);
        t.batch = 5;
        check(t, By::onednn);
      }
      // Tall, cut by rows; and a long sum with float32 results, which goes in pieces: of a weight's gradient, and
      // added.
      check({.m = 900, .n = 270, .k = 100, .a = dtype, .b = dtype, .c = dtype, .layout_b = "cols"}, By::onednn);
      for (const bool add : {false, true}) {
        check({.m = 130, .n = 200, .k = 1600, .a = dtype, .b = dtype, .layout_a = "cols", .add = add}, By::onednn);
      }
    }
  }
  set_num_threads(before);
}

TEST(Gemm, DoublesAndIntegers) {
  for (const std::string& a : kLayouts) {
    for (const std::string& b : kLayouts) {
      check({.m = 9,
             .n = 300,
             .k = 17,
             .a = f64,
             .b = f64,
             .c = f64,
             .layout_a = a,
             .layout_b = b,
             .bias = true,
             .bias_dtype = f64,
             .add = true,
             .relu = true,
             .padding = 1});
      for (const DType dtype : {i64, i32, i8, u8}) {
        check({.m = 5, .n = 7, .k = 11, .a = dtype, .b = dtype, .c = dtype, .layout_a = a, .layout_b = b, .batch = 2});
      }
      check({.m = 5, .n = 7, .k = 11, .a = u8, .b = i8, .c = i32, .layout_a = a, .layout_b = b});
    }
  }
}

TEST(Gemm, RefusesDTypesThatDoNotGoTogether) {
  float x[4] = {};
  GemmArgs g;
  g.m = g.n = g.k = 2;
  g.a = {x, f64, 2, 1}, g.b = {x, f32, 2, 1};
  g.c = x, g.ldc = 2;
  Context context;
  EXPECT_EQ(gemm(&context, g), Status::unsupported);
  g.a.dtype = i32, g.b.dtype = i32;
  EXPECT_EQ(gemm(&context, g), Status::unsupported);
  g.a.dtype = g.b.dtype = f32, g.c_dtype = bf16, g.beta = 1;
  EXPECT_EQ(gemm(&context, g), Status::unsupported);
}

TEST(Gemm, SaysWhenThereIsNoWorkspace) {
  std::vector<float> x(64 * 64);
  GemmArgs g;
  g.m = g.n = g.k = 64;
  g.a = g.b = {x.data(), f32, 64, 1};
  g.c = x.data(), g.ldc = 64;
  Context context;
  context.workspace = [](KernelContext*, std::size_t) -> void* { return nullptr; };
  EXPECT_EQ(gemm(&context, g), Status::failed);
  EXPECT_NE(context.error.find("out of memory"), std::string::npos);
}

}  // namespace
}  // namespace halfstep::cpu
