// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/side_work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace halfstep::cpu {
namespace {

/// A product and its operands, all ones. It runs on the software model of the tiles, so the tests need no AMX.
struct Product {
  TileProduct product = {};
  std::vector<std::uint32_t> a, b;
  std::vector<float> c;

  Product(std::int64_t rows, std::int64_t columns, std::int64_t steps, TileParts parts) {
    const std::int64_t pairs = steps * count_parts(parts), wide = (columns + 31) / 32 * 32;
    a.resize(static_cast<std::size_t>((rows + 15) / 16 * 16 * pairs), 0x3F803F80);  // 1
    b.resize(static_cast<std::size_t>(wide * pairs), 0x3F803F80);
    c.resize(static_cast<std::size_t>(rows * columns));
    product.steps = steps, product.rows = rows, product.columns = columns;
    product.parts = parts;
    product.set_packed(a.data());
    product.b = b.data(), product.c = c.data(), product.ldc = columns;
  }
  void multiply() const {
    const AmxKernels kernels = amx_kernels(false);
    kernels.multiply(product);
    kernels.release();
  }
};

TEST(SideWork, IsCalledAsOftenAsTheProductSays) {
  for (const TileParts parts : {TileParts::two, TileParts::leading_two, TileParts::three}) {
    for (const auto& [rows, columns] : {std::pair{32, 32}, {7, 40}, {33, 16}, {70, 90}}) {
      Product one(rows, columns, 48, parts);
      std::int64_t calls = 0;
      one.product.beside = [](void* count) { ++*static_cast<std::int64_t*>(count); };
      one.product.beside_state = &calls;
      one.multiply();
      EXPECT_EQ(calls, one.product.count_beside()) << rows << " x " << columns;
      // The product isn't changed by it: each of its parts is 1.
      for (const float x : one.c) ASSERT_EQ(x, static_cast<float>(48 * 2 * count_products(parts)));
    }
  }
}

TEST(SideWork, DoesEachStepOnceInOrder) {
  for (const std::int64_t count : {0, 1, 5, 100, 5000}) {
    Product one(64, 32, 32, TileParts::three);  // 24 calls
    std::vector<std::int64_t> done;
    const auto step = [&](std::int64_t i) { done.push_back(i); };
    SideWork work(step, count);
    for (const std::int64_t products : {3, 2, 1}) {
      work.attach(one.product, products);
      one.multiply();
    }
    work.finish();
    ASSERT_EQ(done.size(), static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) EXPECT_EQ(done[static_cast<std::size_t>(i)], i);
  }
}

TEST(SideWork, IsSpreadEvenly) {
  constexpr std::int64_t kCount = 600, kProducts = 5;
  Product one(64, 64, 64, TileParts::two);  // 64 calls
  std::int64_t done = 0;
  const auto step = [&](std::int64_t) { ++done; };
  SideWork work(step, kCount);
  for (std::int64_t i = 1; i <= kProducts; ++i) {
    // Within a product as well: every call does about as many steps.
    struct Watched {
      void (*run)(void*);
      void* state;
      std::int64_t *done, most = 0;
    } watched = {};
    work.attach(one.product, kProducts + 1 - i);
    watched = {one.product.beside, one.product.beside_state, &done};
    one.product.beside = [](void* state) {
      auto& w = *static_cast<Watched*>(state);
      const std::int64_t before = *w.done;
      w.run(w.state);
      w.most = std::max(w.most, *w.done - before);
    };
    one.product.beside_state = &watched;
    one.multiply();
    EXPECT_NEAR(static_cast<double>(done), static_cast<double>(kCount * i / kProducts), 2) << "after product " << i;
    EXPECT_LE(watched.most, 2) << "1.9 steps a call";
  }
  work.finish();
  EXPECT_EQ(done, kCount);
}

// Also where there is less than one step per product.
TEST(SideWork, FewStepsAreSpreadOverAllProducts) {
  Product one(16, 16, 16, TileParts::leading_two);  // 3 calls
  std::int64_t done = 0;
  const auto step = [&](std::int64_t) { ++done; };
  SideWork work(step, 5);
  for (std::int64_t i = 0; i < 20; ++i) {
    work.attach(one.product, 20 - i);
    one.multiply();
    EXPECT_NEAR(static_cast<double>(done), static_cast<double>(i + 1) / 4, 1) << "after product " << i;
  }
  EXPECT_GE(done, 4);
  work.finish();
  EXPECT_EQ(done, 5);
}

}  // namespace
}  // namespace halfstep::cpu
