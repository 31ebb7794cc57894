// SPDX-License-Identifier: Apache-2.0
// How the CUDA plug-in's normalisation divides tensors among blocks: arithmetic that needs no GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "halfstep/backends/cuda/device/norm_plan.h"

namespace hscuda {
namespace {

struct View {
  std::vector<int64_t> sizes, strides;
  halfstep_tensor tensor() const {
    int64_t numel = 1;
    for (const int64_t n : sizes) numel *= n;
    return {.data = nullptr,
            .sizes = sizes.data(),
            .strides = strides.data(),
            .numel = numel,
            .ndim = static_cast<int32_t>(sizes.size()),
            .dtype = HALFSTEP_F32,
            .defined = 1,
            .contiguous = 0,
            .reserved = 0};
  }
};
ChannelLayout layout(std::vector<int64_t> sizes, std::vector<int64_t> strides) {
  const View view{sizes, strides};
  return channel_layout(view.tensor());
}

TEST(CudaNormPlan, KnowsRowsAndPlanes) {
  ChannelLayout l = layout({2, 3, 4, 5}, {60, 20, 5, 1});
  EXPECT_EQ(l.kind, ChannelLayout::kPlanes);
  EXPECT_EQ(l.run, 20);
  EXPECT_EQ(l.channels, 3);
  EXPECT_EQ(l.places, 40);
  l = layout({2, 3, 4, 5}, {60, 1, 15, 3});
  EXPECT_EQ(l.kind, ChannelLayout::kRows);
  EXPECT_EQ(l.places, 40);
  EXPECT_EQ(layout({7, 3}, {3, 1}).kind, ChannelLayout::kRows);
  // One place a channel and sample: both at once.
  EXPECT_EQ(layout({7, 3, 1, 1}, {3, 1, 1, 1}).kind, ChannelLayout::kRows);
  // One channel is one run.
  l = layout({2, 1, 4, 5}, {20, 20, 5, 1});
  EXPECT_EQ(l.kind, ChannelLayout::kPlanes);
  EXPECT_EQ(l.run, 40);
  // Strides of dimensions of size 1 say nothing.
  EXPECT_EQ(layout({1, 3, 4, 5}, {7, 20, 5, 1}).kind, ChannelLayout::kPlanes);
  // The places in another order, still without gaps.
  EXPECT_EQ(layout({2, 3, 4, 5}, {3, 1, 6, 24}).kind, ChannelLayout::kRows);
  EXPECT_EQ(layout({2, 3, 4, 5}, {80, 1, 20, 4}).kind, ChannelLayout::kOther);  // gaps
  EXPECT_EQ(layout({2, 3, 4, 5}, {60, 20, 1, 4}).kind, ChannelLayout::kOther);  // planes transposed
  EXPECT_EQ(layout({2, 3, 4, 5}, {0, 1, 15, 3}).kind, ChannelLayout::kOther);   // repeated
}

TEST(CudaNormPlan, LieAlikeLooksAtWhatIsThere) {
  const View a{{1, 3, 4}, {99, 4, 1}}, b{{1, 3, 4}, {12, 4, 1}}, c{{1, 3, 4}, {12, 1, 3}};
  EXPECT_TRUE(lie_alike(a.tensor(), b.tensor()));
  EXPECT_FALSE(lie_alike(b.tensor(), c.tensor()));
}

// Every row and every channel has one thread, and no block has none.
TEST(CudaNormPlan, RowsAreDividedWithoutRest) {
  for (const int64_t rows : {1, 31, 32, 4095, 100000}) {
    for (const int64_t channels : {2, 3, 8, 24, 64, 320, 2048, 2100}) {
      for (const int width : {1, 4, 8}) {
        if (channels % width != 0) continue;
        for (const int64_t blocks : {1, 528, 1 << 30}) {
          const RowsPlan p = rows_plan(rows, channels, width, blocks, 4);
          EXPECT_EQ(p.packs * width, channels);
          EXPECT_EQ(p.across * p.down, kThreads);
          EXPECT_EQ(p.across, 1 << p.across_bits);
          EXPECT_LE(p.across, 32);
          EXPECT_GE(int64_t{p.tiles} * p.across, p.packs);
          EXPECT_LT((int64_t{p.tiles} - 1) * p.across, p.packs);
          EXPECT_EQ(p.chunk % p.down, 0);
          EXPECT_GE(int64_t{p.chunks} * p.chunk, rows);
          EXPECT_LT((int64_t{p.chunks} - 1) * p.chunk, rows);
          // A thread has some rows, or there are no more.
          EXPECT_TRUE(p.chunks == 1 || p.chunk >= 4 * p.down);
          // No more blocks than were asked for, beside a tile each.
          EXPECT_LE(int64_t{p.chunks} * p.tiles, std::max<int64_t>(blocks, p.tiles));
        }
      }
    }
  }
  // ResNet-50's first block in f16 on 132 processors: 64 channels are 8 accesses of 16 bytes, 32 places side by side.
  const RowsPlan p = rows_plan(256 * 56 * 56, 64, 8, 4 * 132, 4);
  EXPECT_EQ(p.across, 8);
  EXPECT_EQ(p.down, 32);
  EXPECT_EQ(p.tiles, 1u);
  EXPECT_NEAR(p.chunks, 528, 16);
}

TEST(CudaNormPlan, PlanesAreDividedWithoutRest) {
  for (const int64_t samples : {1, 7, 256}) {
    for (const int64_t run : {1, 49, 3136}) {
      for (const int width : {1, 4}) {
        if (run % width != 0) continue;
        for (const int64_t channels : {1, 3, 2048}) {
          const PlanesPlan p = planes_plan(samples * run, channels, run, width, 528, 8);
          EXPECT_EQ(p.units * width, samples * run);
          EXPECT_GE(p.chunks * p.chunk, p.units);
          EXPECT_LT((int64_t{p.chunks} - 1) * p.chunk, p.units);
          EXPECT_EQ(p.blocks(), channels * p.chunks);
          const auto last = static_cast<uint32_t>(p.units - 1);
          EXPECT_EQ(p.per_run.divide(last), last / (run / width));
        }
      }
    }
  }
}

TEST(CudaNormPlan, RowsInRegistersHaveRoomForAllOfIt) {
  for (const int width : {4, 8}) {
    for (const int most : {32, 64}) {
      for (int64_t length = 1; length < 40000; ++length) {
        const NormRowsPlan p = norm_rows_plan(length, width, most);
        const int threads = p.block ? kThreads : 32;
        const int64_t largest = int64_t{kThreads} * std::min(most, 8 * width);
        ASSERT_EQ(p.fits, length % width == 0 && length <= largest) << length;
        if (!p.fits) continue;
        ASSERT_GE(int64_t{threads} * p.each * width, length) << length;
        ASSERT_LE(p.each * width, most) << length;
        ASSERT_TRUE(p.each == 1 || p.each == 2 || p.each == 4 || p.each == 8) << length;
      }
    }
  }
  // A row of the small GPT: a warp.
  EXPECT_FALSE(norm_rows_plan(384, 8, 32).block);
  EXPECT_EQ(norm_rows_plan(384, 8, 32).each, 2);
  EXPECT_EQ(norm_rows_plan(384, 4, 32).each, 4);
}

}  // namespace
}  // namespace hscuda
