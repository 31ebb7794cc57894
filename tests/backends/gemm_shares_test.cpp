// SPDX-License-Identifier: Apache-2.0
// How threads share a product: each element is in one share, several shares a thread where they cost little, and the
// same bits whoever takes which.
#include "halfstep/backends/cpu/gemm_shares.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "halfstep/backends/cpu/amx_tile.h"
#include "tests/backends/gemm_case.h"
#include "tests/support/threads.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kPanel = 32;

TEST(GemmShares, CoverEachElementOnce) {
  for (const std::int64_t rows : {1, 31, 33, 500, 1024}) {
    for (const std::int64_t columns : {1, 32, 95, 600}) {
      for (const std::int64_t threads : {1, 2, 3, 6}) {
        const GemmShares shares = share_product(rows, columns, kPanel, threads, [](std::int64_t r, std::int64_t c) {
          return 1e4 * static_cast<double>(r * c);
        });
        std::vector<int> times(static_cast<std::size_t>(rows * columns));
        for (std::int64_t s = 0; s < shares.count(); ++s) {
          ASSERT_LE(shares.end_row(s) - shares.first_row(s), shares.most_rows());
          ASSERT_LE(shares.end_column(s) - shares.first_column(s), shares.most_columns());
          for (std::int64_t i = shares.first_row(s); i < shares.end_row(s); ++i) {
            for (std::int64_t j = shares.first_column(s); j < shares.end_column(s); ++j) {
              ++times[static_cast<std::size_t>(i * columns + j)];
            }
          }
        }
        for (const int n : times) ASSERT_EQ(n, 1) << rows << " x " << columns << ", " << threads << " threads";
      }
    }
  }
}

TEST(GemmShares, AreSeveralForAThreadWhereThatCostsLittle) {
  const auto count = [](std::int64_t rows, std::int64_t columns, std::int64_t threads, double product, double packing) {
    return share_product(rows, columns, kPanel, threads,
                         [=](std::int64_t r, std::int64_t c) {
                           return product * static_cast<double>(r * c) + packing * static_cast<double>(r + c);
                         })
        .count();
  };
  EXPECT_EQ(count(4096, 4096, 2, 1, 0), 8);
  EXPECT_EQ(count(4096, 4096, 1, 1, 0), 1) << "nobody steals";
  EXPECT_EQ(count(4096, 4096, 2, 1, 200), 2) << "more would pack much more";
  EXPECT_EQ(count(128, 128, 2, 1, 0), 2) << "small";
  EXPECT_EQ(count(64, 64, 2, 1e4, 0), 4) << "of a panel each";
}

// Products that are large enough for several shares. The model of AMX would take minutes.
TEST(GemmShares, GiveTheSameBits) {
  if (!amx_usable()) GTEST_SKIP() << "this process has no AMX";
  const std::int64_t m = 1024, n = 1024, k = 512;
  for (const auto& [path, dtype] :
       {std::pair{GemmPath::split, f32}, std::pair{GemmPath::split, f16}, std::pair{GemmPath::tiles, bf16}}) {
    const Matrix a(m, k, dtype, "rows", 1), b(k, n, dtype, "cols", 2);
    std::vector<unsigned char> before;
    for (const int threads : {1, 2, 3}) {
      const test::ThreadsGuard guard(threads);
      for (int i = 0; i < 3; ++i) {
        std::vector<unsigned char> c(static_cast<std::size_t>(m * n) * item_size(dtype), 0xFF);
        GemmArgs g;
        g.m = m, g.n = g.ldc = n, g.k = k;
        g.a = a.operand(), g.b = b.operand(), g.c = c.data(), g.c_dtype = dtype;
        Context context;
        ASSERT_EQ(gemm_by(path, &context, g), Status::ok) << context.error;
        if (!before.empty()) {
          ASSERT_TRUE(c == before) << name(dtype) << ' ' << threads;
        }
        before = c;
      }
    }
  }
}

}  // namespace
}  // namespace halfstep::cpu
