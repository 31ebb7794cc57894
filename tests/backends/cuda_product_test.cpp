// SPDX-License-Identifier: Apache-2.0
// What the CUDA plug-in asks cuBLASLt for, and how it cuts and repeats products: arithmetic that needs no GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "halfstep/backends/cuda/kernels/attention.h"
#include "halfstep/backends/cuda/libraries/product.h"
#include "halfstep/backends/cuda/libraries/product_batches.h"

namespace hscuda {
namespace {

alignas(256) char memory[3][4096];

/// Row-major factors, [batch] of [m, k] and [k, n].
Product dense(int64_t m, int64_t n, int64_t k, int dtype = HALFSTEP_F16, int64_t batch = 1) {
  Product p;
  p.dtype = p.out_dtype = p.bias_dtype = dtype;
  p.m = m, p.n = n, p.k = k, p.batch = batch;
  p.a = {memory[0], k, 1, m * k};
  p.b = {memory[1], n, 1, k * n};
  p.c = {memory[2], n, 1, m * n};
  return p;
}

TEST(CudaProduct, SidesAreTakenAsTheyLieOrTurned) {
  const auto check = [](const Side& side, bool turned, int64_t ld) {
    EXPECT_TRUE(side.fits);
    EXPECT_EQ(side.turned, turned);
    EXPECT_EQ(side.ld, ld);
  };
  check(side_of(3, 5, 5, 1), false, 5);
  check(side_of(3, 5, 9, 1), false, 9);  // rows of a wider matrix
  check(side_of(3, 5, 1, 3), true, 3);
  check(side_of(3, 5, 1, 7), true, 7);
  // The stride of a dimension of one is anything.
  check(side_of(1, 5, 0, 1), false, 5);
  check(side_of(1, 5, 77, 1), false, 5);
  check(side_of(3, 1, 1, 0), false, 1);
  check(side_of(3, 1, 4, 99), false, 4);
  check(side_of(1, 5, 2, 3), true, 3);  // one row of a matrix that lies turned
  check(side_of(1, 1, 0, 0), false, 1);
  EXPECT_FALSE(side_of(3, 5, 10, 2).fits);
  EXPECT_FALSE(side_of(3, 5, 0, 1).fits);  // one row for all
  EXPECT_FALSE(side_of(3, 5, 1, 0).fits);
  EXPECT_FALSE(side_of(3, 5, 4, 1).fits);  // rows that overlap
}

TEST(CudaProduct, KeysSayAllThatAnAlgorithmDependsOn) {
  const Product p = dense(6, 8, 4, HALFSTEP_F16, 2);
  const auto key = plan_key(p, true);
  ASSERT_TRUE(key);
  EXPECT_EQ(key->m, 6);
  EXPECT_EQ(key->n, 8);
  EXPECT_EQ(key->k, 4);
  EXPECT_EQ(key->a_ld, 4);
  EXPECT_EQ(key->b_ld, 8);
  EXPECT_EQ(key->c_ld, 8);
  EXPECT_EQ(key->a_batch, 24);
  EXPECT_FALSE(key->tf32);     // float32 only
  EXPECT_EQ(key->a_align, 4);  // the second matrix begins at byte 48
  EXPECT_EQ(key->b_align, 6);
  EXPECT_EQ(key->c_align, 5);

  // Everything that changes the call changes the key; addresses alone don't.
  std::vector<Product> others(13, p);
  others[1].m = 5;
  others[2].n = 7, others[2].b.row = 8;
  others[3].k = 3;
  others[4].a.row = 5;
  others[5].a.row = 1, others[5].a.column = 6;
  others[6].b.batch = 0;
  others[7].out_dtype = HALFSTEP_F32;
  others[8].accumulate = true;
  others[9].bias = memory[0];
  others[10].a.data = memory[0] + 2;
  others[11].dtype = others[11].out_dtype = HALFSTEP_BF16;
  others[12].batch = 3;
  std::set<std::size_t> hashes;
  for (std::size_t i = 0; i < others.size(); ++i) {
    const auto other = plan_key(others[i], false);
    ASSERT_TRUE(other) << i;
    EXPECT_EQ(*other == *key, i == 0) << i;
    hashes.insert(PlanKeyHash{}(*other));
  }
  EXPECT_EQ(hashes.size(), others.size());
  Product moved = p;
  moved.a.data = memory[0] + 512;
  EXPECT_EQ(*plan_key(moved, false), *key);

  const Product wide = dense(6, 8, 4, HALFSTEP_F32);
  EXPECT_TRUE(plan_key(wide, true)->tf32);
  EXPECT_FALSE(plan_key(wide, false)->tf32);
  EXPECT_EQ(plan_key(wide, false)->a_batch, 0);  // of one matrix it has no meaning
  EXPECT_FALSE(plan_key(dense(6, 8, 4, HALFSTEP_F64), true)->tf32);
}

TEST(CudaProduct, TransposedViewsNeedNoCopy) {
  // The gradient of a weight: g transposed [n, m] times x [m, k].
  Product p = dense(6, 8, 4);
  p.a.row = 1, p.a.column = 6;
  p.b.row = 1, p.b.column = 4;
  const auto key = plan_key(p, false);
  ASSERT_TRUE(key);
  EXPECT_TRUE(key->a_turned);
  EXPECT_TRUE(key->b_turned);
  EXPECT_EQ(key->a_ld, 6);
  EXPECT_EQ(key->b_ld, 4);
}

TEST(CudaProduct, WhatTheLibraryDoesNotTakeIsRefused) {
  const auto refused = [](auto change, int dtype = HALFSTEP_F16, int64_t batch = 1) {
    Product p = dense(6, 8, 4, dtype, batch);
    change(p);
    return !plan_key(p, false).has_value();
  };
  EXPECT_FALSE(refused([](Product&) {}));
  for (const int dtype : {HALFSTEP_I64, HALFSTEP_I32, HALFSTEP_I8, HALFSTEP_U8}) {
    EXPECT_TRUE(refused([](Product&) {}, dtype));
  }
  EXPECT_TRUE(refused([](Product& p) { p.out_dtype = HALFSTEP_BF16; }));
  EXPECT_TRUE(refused([](Product& p) { p.out_dtype = HALFSTEP_F16; }, HALFSTEP_F32));
  EXPECT_TRUE(refused([](Product& p) { p.out_dtype = HALFSTEP_F32; }, HALFSTEP_F64));
  EXPECT_TRUE(refused([](Product& p) { p.k = 0; }));
  EXPECT_TRUE(refused([](Product& p) { p.a.column = 2, p.a.row = 8; }));
  EXPECT_TRUE(refused([](Product& p) { p.c.row = 1, p.c.column = 6; }));
  const int64_t large = int64_t{1} << 31;
  EXPECT_TRUE(refused([&](Product& p) { p.m = large; }));
  EXPECT_TRUE(refused([&](Product& p) { p.n = p.b.row = p.c.row = large; }));
  EXPECT_TRUE(refused([&](Product& p) { p.k = p.a.row = large; }));
  EXPECT_TRUE(refused([&](Product& p) { p.batch = large; }));
  // A bias of the result's dtype, packed, in whole packs.
  EXPECT_FALSE(refused([](Product& p) { p.bias = memory[0]; }));
  EXPECT_TRUE(refused([](Product& p) { p.bias = memory[0] + 2; }));
  EXPECT_TRUE(refused([](Product& p) { p.bias = memory[0], p.bias_stride = 2; }));
  EXPECT_TRUE(refused([](Product& p) { p.bias = memory[0], p.bias_dtype = HALFSTEP_F32; }));
  // Results that lie over each other; heads that lie beside each other in rows do not.
  EXPECT_TRUE(refused([](Product& p) { p.c.batch = 0; }, HALFSTEP_F16, 3));
  EXPECT_TRUE(refused([](Product& p) { p.c.batch = 12; }, HALFSTEP_F16, 3));
  EXPECT_FALSE(refused([](Product& p) { p.c.row = 24, p.c.batch = 8; }, HALFSTEP_F16, 3));
  EXPECT_TRUE(refused([](Product& p) { p.c.row = 23, p.c.batch = 8; }, HALFSTEP_F16, 3));
  EXPECT_FALSE(refused([](Product& p) { p.a.batch = p.b.batch = 0; }, HALFSTEP_F16, 3));
}

/// The places of a, b and c that products touch, in the order in which they do, and whether they are added.
struct Touch {
  int64_t a, b, c;
  bool add;
  bool operator==(const Touch&) const = default;
  auto operator<=>(const Touch&) const = default;
};
template <int N>
std::vector<Touch> touches(const BatchDim (&dims)[N], int* calls) {
  const Product p = dense(1, 1, 1, HALFSTEP_F32);
  std::vector<Touch> all;
  *calls = 0;
  for_batches(p, dims, [&](const Product& one) {
    ++*calls;
    const auto at = [](const void* x, const char* base) { return (static_cast<const char*>(x) - base) / 4; };
    for (int64_t i = 0; i < one.batch; ++i) {
      all.push_back({at(one.a.data, memory[0]) + i * one.a.batch, at(one.b.data, memory[1]) + i * one.b.batch,
                     at(one.c.data, memory[2]) + i * one.c.batch, one.accumulate});
    }
    return 0;
  });
  return all;
}

TEST(CudaProduct, DimensionsOfBatchesBecomeFewCalls) {
  int calls = 0;
  // Two that lie behind each other are one call.
  const BatchDim behind[] = {{3, 20, 40, 60}, {2, 10, 20, 30}};
  const auto all = touches(behind, &calls);
  EXPECT_EQ(calls, 1);
  ASSERT_EQ(all.size(), 6u);
  EXPECT_EQ(all[5], (Touch{50, 100, 150, false}));
  // Two that don't: the longer is the batch. Factors may be repeated.
  const BatchDim apart[] = {{3, 100, 0, 30}, {2, 10, 20, 300}};
  const auto other = touches(apart, &calls);
  EXPECT_EQ(calls, 2);
  const std::set<Touch> got(other.begin(), other.end());
  std::set<Touch> want;
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 2; ++j) want.insert({100 * i + 10 * j, 20 * j, 30 * i + 300 * j, false});
  }
  EXPECT_EQ(got, want);
  // Nothing to do, and nothing to walk over.
  const BatchDim none[] = {{3, 1, 1, 1}, {0, 1, 1, 1}}, one[] = {{1, 5, 5, 5}};
  EXPECT_TRUE(touches(none, &calls).empty());
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(touches(one, &calls), (std::vector<Touch>{{0, 0, 0, false}}));
}

TEST(CudaProduct, SumsAreAddedOneAfterTheOther) {
  int calls = 0;
  // Three to each of four results: the first of each is stored, the others are added.
  const BatchDim dims[] = {{4, 30, 5, 7}, {3, 10, 50, 0}};
  const auto all = touches(dims, &calls);
  EXPECT_EQ(calls, 3);
  std::set<int64_t> stored;
  for (const Touch& t : all) {
    EXPECT_EQ(t.add, !stored.insert(t.c).second) << t.c;
  }
  EXPECT_EQ(stored.size(), 4u);
}

TEST(CudaProduct, HeadsInGroups) {
  // 12 heads; a has each, b one for 2, c one for 6.
  BatchDim dims[3];
  ASSERT_TRUE(head_dims(12, {1, 2, 6}, {100, 1000, 10000}, dims));
  std::set<std::vector<int64_t>> got, want;
  for (int64_t i = 0; i < dims[0].size; ++i) {
    for (int64_t j = 0; j < dims[1].size; ++j) {
      for (int64_t k = 0; k < dims[2].size; ++k) {
        got.insert({i * dims[0].a + j * dims[1].a + k * dims[2].a, i * dims[0].b + j * dims[1].b + k * dims[2].b,
                    i * dims[0].c + j * dims[1].c + k * dims[2].c});
      }
    }
  }
  for (int64_t h = 0; h < 12; ++h) want.insert({h * 100, h / 2 * 1000, h / 6 * 10000});
  EXPECT_EQ(got, want);
  EXPECT_FALSE(head_dims(6, {1, 2, 3}, {1, 1, 1}, dims));
  EXPECT_FALSE(head_dims(6, {2, 2, 2}, {1, 1, 1}, dims));
}

TEST(CudaAttention, GroupsNest) {
  EXPECT_TRUE(groups_nest({1, 6, 1, 1, 1, 1, 1, 2, 3}));
  EXPECT_TRUE(groups_nest({1, 12, 1, 1, 1, 1, 6, 2, 12}));
  EXPECT_FALSE(groups_nest({1, 6, 1, 1, 1, 1, 2, 3, 1}));
  EXPECT_FALSE(groups_nest({1, 6, 1, 1, 1, 1, 3, 2, 1}));
}

TEST(CudaAttention, PiecesFitTheirMemory) {
  const auto bytes = [](const AttentionSizes& s, const AttentionPiece& p) {
    return 4 * p.items * p.heads * p.queries * s.keys;
  };
  // A small GPT: many items at a time, of all heads.
  const AttentionSizes small = {64, 6, 256, 256, 64, 64, 1, 1, 1};
  const auto p = attention_piece(small, 4, 1);
  EXPECT_EQ(p.heads, 6);
  EXPECT_EQ(p.queries, 256);
  EXPECT_GE(p.items, 32);
  EXPECT_LE(p.items, 64);
  EXPECT_LE(bytes(small, p), kAttentionBytes);
  // More heads than fit: whole sets of those that share a key.
  const AttentionSizes heads = {2, 32, 2048, 2048, 64, 64, 1, 4, 8};
  const auto h = attention_piece(heads, 4, 2);
  EXPECT_EQ(h.items, 1);
  EXPECT_EQ(h.heads % 8, 0);
  EXPECT_LE(2 * bytes(heads, h), std::max(kAttentionBytes, int64_t{2} * 4 * 8 * h.queries * 2048));
  // Queries are cut too, and at last one has to be enough.
  const AttentionSizes long_one = {1, 1, 100000, 100000, 64, 64, 1, 1, 1};
  const auto l = attention_piece(long_one, 4, 2);
  EXPECT_EQ(l.queries % 64, 0);
  EXPECT_GT(l.queries, 0);
  EXPECT_LE(2 * bytes(long_one, l), kAttentionBytes);
  const AttentionSizes huge = {1, 1, 40, 1000000000, 64, 64, 1, 1, 1};
  EXPECT_EQ(attention_piece(huge, 4, 2).queries, 40);
  EXPECT_EQ(attention_piece({3, 4, 5, 6, 7, 8, 2, 4, 1}, 4, 1, 0).heads, 4);
}

}  // namespace
}  // namespace hscuda
