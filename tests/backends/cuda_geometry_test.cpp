// SPDX-License-Identifier: Apache-2.0
// Sizes of launches and places of elements in the CUDA plug-in: arithmetic that needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "halfstep/backends/cuda/device/geometry.h"

namespace hscuda {
namespace {

TEST(CudaGeometry, GridsCoverTheWorkWithinTheirLimit) {
  EXPECT_EQ(grid_size(0, 256), 1u);  // a launch of no blocks is an error
  EXPECT_EQ(grid_size(1, 256), 1u);
  EXPECT_EQ(grid_size(256, 256), 1u);
  EXPECT_EQ(grid_size(257, 256), 2u);
  EXPECT_EQ(grid_size(int64_t{1} << 40, 256), 1u << 20);
  EXPECT_EQ(grid_size(1000, 10, 7), 7u);
  EXPECT_EQ(divide_up(0, 3), 0);
  EXPECT_EQ(divide_up(9, 3), 3);
  EXPECT_EQ(divide_up(10, 3), 4);
}

TEST(CudaGeometry, DivisorDividesAsTheOperatorDoes) {
  constexpr uint32_t kMost = 0x7fffffffu;
  std::mt19937 random(7);
  std::vector<uint32_t> numbers = {0, 1, 2, 3, 5, 7, 31, 32, 33, 641, 65535, 65536, 65537, 1u << 30, kMost - 1, kMost};
  for (int i = 0; i < 400; ++i) numbers.push_back(static_cast<uint32_t>(random()) >> (1 + random() % 31));
  for (int bit = 1; bit < 31; ++bit) {
    numbers.push_back((1u << bit) - 1);
    numbers.push_back((1u << bit) + 1);
  }
  for (const uint32_t d : numbers) {
    if (d == 0) continue;
    const Divisor divisor(d);
    for (const uint32_t n : numbers) ASSERT_EQ(divisor.divide(n), n / d) << n << " / " << d;
    // The neighbours of multiples are where a wrong constant shows first.
    for (int i = 0; i < 20; ++i) {
      const uint64_t multiple = uint64_t{d} * (random() % (kMost / d + 1));
      for (const uint64_t n : {multiple - 1, multiple, multiple + 1}) {
        if (n <= kMost) {
          ASSERT_EQ(divisor.divide(static_cast<uint32_t>(n)), n / d) << n << " / " << d;
        }
      }
    }
  }
}

halfstep_tensor tensor_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  static std::deque<std::vector<int64_t>> kept;  // a tensor points to its sizes and strides
  halfstep_tensor t = {};
  t.sizes = kept.emplace_back(sizes).data(), t.strides = kept.emplace_back(strides).data();
  t.defined = 1;
  t.ndim = static_cast<int32_t>(sizes.size());
  t.numel = 1;
  for (const int64_t size : sizes) t.numel *= size;
  return t;
}
halfstep_tensor contiguous(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) strides[d] = stride, stride *= sizes[d];
  return tensor_of(sizes, strides);
}

// Where element i of the result, counted with the last dimension fastest, lies in a tensor that broadcasts to it.
int64_t place(const halfstep_tensor& result, const halfstep_tensor& t, int64_t i) {
  int64_t at = 0;
  for (int d = result.ndim - 1; d >= 0; --d) {
    const int64_t index = i % result.sizes[d];
    i /= result.sizes[d];
    const int own = d - (result.ndim - t.ndim);
    if (own >= 0 && t.sizes[own] != 1) at += index * t.strides[own];
  }
  return at;
}

// All elements are walked once, in whatever order, and their places belong together.
void expect_same_places(const halfstep_tensor& result, const halfstep_tensor& a, const halfstep_tensor& b) {
  const Layout<3> layout = layout_of<3>({&result, &a, &b});
  ASSERT_EQ(layout.numel, result.numel);
  ASSERT_GE(layout.ndim, 1);
  using Places = std::vector<int64_t>;
  std::vector<Places> expected, wide, narrow;
  for (int64_t i = 0; i < result.numel; ++i) {
    expected.push_back({place(result, result, i), place(result, a, i), place(result, b, i)});
    int64_t at[3];
    layout.places(i, at);
    wide.push_back({at[0], at[1], at[2]});
    layout.places(static_cast<uint32_t>(i), at);
    narrow.push_back({at[0], at[1], at[2]});
  }
  EXPECT_EQ(wide, narrow);
  // Neighbours in the walk are neighbours in the result's memory, as far as its strides allow.
  EXPECT_TRUE(std::is_sorted(wide.begin(), wide.end(), [](const Places& x, const Places& y) { return x[0] < y[0]; }));
  std::sort(expected.begin(), expected.end());
  std::sort(wide.begin(), wide.end());
  EXPECT_EQ(wide, expected);
}

TEST(CudaGeometry, DimensionsThatLieAcrossEachOtherAreOne) {
  const auto x = contiguous({2, 3, 4, 5});
  const auto layout = layout_of<3>({&x, &x, &x});
  EXPECT_EQ(layout.ndim, 1);
  EXPECT_EQ(layout.sizes[0], 120);
  EXPECT_TRUE(layout.linear());
  EXPECT_TRUE(layout.narrow());
  expect_same_places(x, x, x);

  // Channels last is one run too where all tensors have it.
  const auto nhwc = tensor_of({2, 3, 4, 5}, {60, 1, 15, 3});
  EXPECT_TRUE(layout_of<2>({&nhwc, &nhwc}).linear());
  EXPECT_FALSE(layout_of<2>({&nhwc, &x}).linear());
  expect_same_places(nhwc, x, nhwc);
  expect_same_places(x, nhwc, nhwc);
}

TEST(CudaGeometry, BroadcastDimensionsHaveNoStride) {
  const auto x = contiguous({4, 3, 5});
  const auto row = contiguous({5}), column = contiguous({3, 1}), one = contiguous({}),
             expanded = tensor_of({4, 3, 5}, {0, 5, 1});
  const auto layout = layout_of<2>({&x, &row});
  EXPECT_EQ(layout.ndim, 2);
  EXPECT_EQ(layout.sizes[0], 5);
  EXPECT_EQ(layout.sizes[1], 12);
  EXPECT_EQ(layout.strides[1][1], 0);
  EXPECT_FALSE(layout.linear());
  // One value for all is one dimension.
  EXPECT_EQ(layout_of<2>({&x, &one}).ndim, 1);
  EXPECT_FALSE((layout_of<2>({&x, &one}).linear()));
  expect_same_places(x, row, column);
  expect_same_places(x, one, expanded);
}

TEST(CudaGeometry, TensorsOfNoDimensionOneElementOrNone) {
  const auto scalar = contiguous({}), one = tensor_of({1, 1, 1}, {77, 9, 5});
  EXPECT_TRUE((layout_of<2>({&scalar, &scalar}).linear()));
  EXPECT_TRUE((layout_of<2>({&one, &one}).linear()));
  expect_same_places(scalar, scalar, scalar);
  expect_same_places(one, scalar, one);
  for (const auto& sizes : {std::vector<int64_t>{0}, {3, 0, 2}, {0, 0}}) {
    const auto none = contiguous(sizes);
    EXPECT_EQ((layout_of<1>({&none}).numel), 0);
  }
}

TEST(CudaGeometry, EightDimensionsInAnyOrder) {
  const std::vector<int64_t> sizes = {2, 1, 3, 2, 1, 2, 3, 2};
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    halfstep_tensor tensors[3];
    for (auto& t : tensors) {
      std::vector<std::size_t> order(sizes.size());
      for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
      if (round % 4 != 0) std::shuffle(order.begin(), order.end(), random);
      const bool gaps = random() % 2 == 0, result = &t == &tensors[0];
      std::vector<int64_t> own = sizes, strides(sizes.size());
      int64_t stride = 1;
      for (const std::size_t d : order) {
        if (!result && random() % 4 == 0) own[d] = 1;
        strides[d] = stride;
        stride *= own[d] + (gaps ? static_cast<int64_t>(random() % 3) : 0);
      }
      const std::size_t fewer = result ? 0 : random() % 3;  // leading dimensions may be missing
      t = tensor_of({own.begin() + static_cast<std::ptrdiff_t>(fewer), own.end()},
                    {strides.begin() + static_cast<std::ptrdiff_t>(fewer), strides.end()});
    }
    expect_same_places(tensors[0], tensors[1], tensors[2]);
  }
}

TEST(CudaGeometry, LargeTensorsAreWalkedWith64Bits) {
  const auto x = contiguous({int64_t{1} << 20, 3, 1 << 10});
  const auto y = tensor_of({int64_t{1} << 20, 3, 1 << 10}, {1, int64_t{1} << 30, int64_t{1} << 20});
  const auto layout = layout_of<2>({&x, &y});
  EXPECT_FALSE(layout.narrow());
  for (const int64_t i : {int64_t{0}, int64_t{12345678901} % x.numel, x.numel - 1}) {
    int64_t at[2];
    layout.places(i, at);
    EXPECT_EQ(at[0], i);
    EXPECT_EQ(at[1], place(x, y, i));
  }
}

TEST(CudaGeometry, PacksCoverTheRunsOfEveryTensor) {
  const auto x = contiguous({6, 5, 32}), row = contiguous({32}), column = contiguous({5, 1}),
             odd = contiguous({6, 5, 30});
  const auto gaps = tensor_of({6, 5, 32}, {5 * 36, 36, 1}), turned = tensor_of({6, 5, 32}, {1, 6, 30});
  const auto packs = [](const halfstep_tensor& a, const halfstep_tensor& b, int width) {
    return made_of_packs(layout_of<2>({&a, &b}), width);
  };
  EXPECT_TRUE(packs(x, x, 16));
  EXPECT_TRUE(packs(x, row, 16));
  EXPECT_TRUE(packs(x, column, 16));
  EXPECT_TRUE(packs(odd, odd, 16)) << "a single run may end inside a pack";
  EXPECT_FALSE(packs(odd, contiguous({30}), 4));
  EXPECT_TRUE(packs(x, gaps, 4));
  EXPECT_FALSE(packs(x, gaps, 8));
  EXPECT_FALSE(packs(x, turned, 2));
  // Each element is in one pack, at its place in every tensor.
  for (const auto* other : {&x, &row, &column, &gaps}) {
    const auto whole = layout_of<2>({&x, other});
    const auto in = in_packs(whole, 4);
    ASSERT_EQ(in.numel * 4, whole.numel);
    for (int64_t i = 0; i < whole.numel; ++i) {
      int64_t want[2], first[2];
      whole.places(static_cast<uint32_t>(i), want);
      in.places(static_cast<uint32_t>(i / 4), first);
      ASSERT_EQ(first[0] + i % 4, want[0]);
      ASSERT_EQ(first[1] + (whole.strides[0][1] == 0 ? 0 : i % 4), want[1]);
    }
  }
}

TEST(CudaGeometry, LargeTensorsAreCutIntoPieces) {
  const std::vector<int64_t> sizes = {5, int64_t{1} << 29, 3};
  const auto x = contiguous(sizes), y = tensor_of(sizes, {int64_t{1} << 29, 1, int64_t{5} << 29});
  const auto whole = layout_of<2>({&x, &y});
  int64_t covered = 0;
  int pieces = 0;
  std::vector<std::pair<int64_t, int64_t>> starts;
  in_pieces(whole, [&](const Layout<2>& piece, const auto& from) {
    ASSERT_TRUE(piece.narrow());
    covered += piece.numel;
    ++pieces;
    // First and last element, where the whole layout has them.
    for (const int64_t i : {int64_t{0}, piece.numel - 1}) {
      int64_t at[2];
      piece.places(static_cast<uint32_t>(i), at);
      const int64_t element = from[0] + at[0];
      EXPECT_EQ(from[1] + at[1], place(x, y, element));
    }
    starts.emplace_back(from[0], from[1]);
  });
  EXPECT_EQ(covered, x.numel);
  EXPECT_GE(pieces, 4);
  std::sort(starts.begin(), starts.end());
  EXPECT_EQ(std::unique(starts.begin(), starts.end()), starts.end());
}

TEST(CudaGeometry, RowMajorOrderWhateverTheMemorys) {
  const auto nhwc = tensor_of({2, 3, 4, 5}, {60, 1, 15, 3});
  const auto layout = layout_of<1>({&nhwc}, true);
  for (int64_t i = 0; i < nhwc.numel; ++i) {
    int64_t at[1];
    layout.places(static_cast<uint32_t>(i), at);
    ASSERT_EQ(at[0], place(nhwc, nhwc, i));
  }
}

}  // namespace
}  // namespace hscuda
