// SPDX-License-Identifier: Apache-2.0
// How the CUDA plug-in shares out reductions: arithmetic that needs no GPU.
#include "halfstep/backends/cuda/device/reduce_plan.h"

#include <gtest/gtest.h>

#include <bit>
#include <deque>
#include <map>
#include <random>
#include <vector>

namespace hscuda {
namespace {

constexpr int kProcessors = 132;

halfstep_tensor tensor_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, uintptr_t data = 0) {
  static std::deque<std::vector<int64_t>> kept;  // a tensor points to its sizes and strides
  halfstep_tensor t = {};
  t.sizes = kept.emplace_back(sizes).data(), t.strides = kept.emplace_back(strides).data();
  t.data = reinterpret_cast<void*>(data);
  t.defined = 1;
  t.ndim = static_cast<int32_t>(sizes.size());
  t.numel = 1;
  for (const int64_t size : sizes) t.numel *= size;
  return t;
}
halfstep_tensor dense(const std::vector<int64_t>& sizes, uintptr_t data = 0) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  return tensor_of(sizes, strides, data);
}

template <int N>
std::vector<int64_t> place(const Layout<N>& layout, int64_t i) {
  int64_t at[N];
  layout.places(static_cast<uint32_t>(i), at);
  return {at, at + N};
}

// Every element goes to the output that its kept coordinates say, once, whatever the strides; packs lie on whole packs.
void check(const halfstep_tensor& x, uint32_t mask, int64_t widest) {
  const Reduction r = plan_reduction(x, mask, widest, kProcessors);
  ASSERT_EQ(r.outputs() * r.length(), x.numel);
  ASSERT_TRUE(std::has_single_bit(static_cast<unsigned>(r.lanes)));
  ASSERT_TRUE(r.lanes <= 32 || (!r.columns && r.lanes == kThreads));
  ASSERT_TRUE(r.width == 1 || r.width == widest);
  ASSERT_GE(r.parts, 1);
  ASSERT_LE(r.parts, 1024);
  ASSERT_GE(r.parts * r.part_length, r.length());
  if (r.parts > 1) {
    ASSERT_LT((r.parts - 1) * r.part_length, r.length()) << "a part without work";
  }
  const int64_t outputs_a_block = r.columns ? int64_t{r.lanes} * r.width : kThreads / r.lanes;
  ASSERT_GE(int64_t{r.blocks} * outputs_a_block, r.outputs());
  if (!r.columns) {
    ASSERT_EQ(r.part_length % r.width, 0);
  }

  std::multimap<int64_t, int64_t> expected, got;  // output, place in x
  std::vector<int64_t> index(static_cast<std::size_t>(x.ndim));
  for (int64_t i = 0; i < x.numel; ++i) {
    int64_t output = 0, at = 0, rest = i;
    for (int d = x.ndim - 1; d >= 0; --d) {
      index[static_cast<std::size_t>(d)] = rest % x.sizes[d];
      rest /= x.sizes[d];
    }
    for (int d = 0; d < x.ndim; ++d) {
      const int64_t c = index[static_cast<std::size_t>(d)];
      at += c * x.strides[d];
      if ((mask >> d & 1) == 0) output = output * x.sizes[d] + c;
    }
    expected.emplace(output, at);
  }
  for (int64_t o = 0; o < r.outputs(); ++o) {
    const auto kept = place(r.kept, o);
    for (int64_t i = 0; i < r.length(); ++i) got.emplace(kept[1], kept[0] + place(r.reduced, i)[0]);
  }
  const auto sorted = [](const std::multimap<int64_t, int64_t>& m) {
    std::vector<std::pair<int64_t, int64_t>> v(m.begin(), m.end());
    std::sort(v.begin(), v.end());
    return v;
  };
  ASSERT_EQ(sorted(got), sorted(expected));

  if (r.width == 1) return;
  // What a kernel reads with one access lies side by side, from a whole pack on (a single run is shifted to one first).
  if (r.columns) {
    for (int64_t o = 0; o < r.outputs(); o += r.width) {
      for (int j = 1; j < r.width; ++j) ASSERT_EQ(place(r.kept, o + j)[0], place(r.kept, o)[0] + j);
      for (int64_t i = 0; i < r.length(); ++i) {
        ASSERT_EQ((place(r.kept, o)[0] + place(r.reduced, i)[0]) % r.width, 0);
      }
    }
  } else if (r.reduced.ndim > 1) {
    ASSERT_EQ(r.length() % r.width, 0);
    for (int64_t o = 0; o < r.outputs(); ++o) {
      for (int64_t i = 0; i < r.length(); i += r.width) {
        ASSERT_EQ((place(r.kept, o)[0] + place(r.reduced, i)[0]) % r.width, 0);
        for (int j = 1; j < r.width; ++j) ASSERT_EQ(place(r.reduced, i + j)[0], place(r.reduced, i)[0] + j);
      }
    }
  } else {
    ASSERT_EQ(r.reduced.strides[0][0], 1);
  }
}

TEST(CudaReducePlan, EveryElementGoesToItsOutputOnce) {
  std::mt19937 random(11);
  for (int run = 0; run < 200; ++run) {
    const int ndim = static_cast<int>(random() % 5);
    std::vector<int64_t> sizes, strides(static_cast<std::size_t>(ndim));
    for (int d = 0; d < ndim; ++d) sizes.push_back(std::vector<int64_t>{1, 2, 3, 4, 8, 16, 40}[random() % 7]);
    while (ndim > 0 && dense(sizes).numel > 20000) sizes[random() % sizes.size()] = 2;
    // A random order of the dimensions in memory; here and there a gap, or a repeated dimension.
    std::vector<std::size_t> order;
    for (std::size_t d = 0; d < sizes.size(); ++d)
      order.insert(order.begin() + static_cast<std::ptrdiff_t>(random() % (d + 1)), d);
    int64_t stride = random() % 4 == 0 ? 2 : 1;
    for (const std::size_t d : order) {
      strides[d] = random() % 8 == 0 ? 0 : stride;
      stride *= sizes[d] + (random() % 8 == 0 ? 8 : 0);
    }
    const auto x = tensor_of(sizes, strides, random() % 4 == 0 ? 4 : 0);
    const auto mask = static_cast<uint32_t>(random() % (1u << ndim));
    for (const int64_t widest : {1, 2, 4, 8}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(sizes) << testing::PrintToString(strides) << " mask "
                                      << mask);
      ASSERT_NO_FATAL_FAILURE(check(x, mask, widest));
    }
  }
}

TEST(CudaReducePlan, NeighboursReadNeighbours) {
  // The gradient of a bias: a thread has columns of its own, many blocks share the rows.
  Reduction r = plan_reduction(dense({16384, 384}), 1, 8, kProcessors);
  EXPECT_TRUE(r.columns);
  EXPECT_EQ(r.width, 8);
  EXPECT_GE(r.blocks * r.parts, kProcessors);
  // Channels-last images, summed over all but the channels: the same.
  r = plan_reduction(tensor_of({32, 64, 56, 56}, {64 * 56 * 56, 1, 64 * 56, 64}), 0b1101, 4, kProcessors);
  EXPECT_TRUE(r.columns);
  EXPECT_EQ(r.reduced.ndim, 1);
  EXPECT_GE(r.blocks * r.parts, kProcessors);
  // Two columns and many rows: the threads still read one run.
  r = plan_reduction(dense({1 << 20, 2}), 1, 4, kProcessors);
  EXPECT_TRUE(r.columns);
  EXPECT_EQ(r.lanes, 2);
  // Rows: threads share them, in packs.
  r = plan_reduction(dense({4096, 1024}), 2, 8, kProcessors);
  EXPECT_FALSE(r.columns);
  EXPECT_EQ(r.width, 8);
  EXPECT_EQ(r.lanes, 32);
  EXPECT_EQ(r.parts, 1);
  // Rows of an odd length begin anywhere, and still go in packs.
  r = plan_reduction(dense({64, 50257}), 2, 8, kProcessors);
  EXPECT_EQ(r.width, 8);
  EXPECT_EQ(r.lanes, kThreads);
  // Short ones of an odd length go one by one.
  EXPECT_EQ(plan_reduction(dense({64, 13}), 2, 8, kProcessors).width, 1);
  // All of a large tensor: the whole GPU takes part.
  r = plan_reduction(dense({100'000'000}), ~0u, 4, kProcessors);
  EXPECT_EQ(r.outputs(), 1);
  EXPECT_GE(r.parts, 4 * kProcessors);
  // All of a small one: one block, so that nothing has to be joined.
  EXPECT_EQ(plan_reduction(dense({1000}), ~0u, 4, kProcessors).parts, 1);
  // A repeated dimension costs nothing to read again: it is walked last.
  r = plan_reduction(tensor_of({64, 4096}, {0, 1}), 0b11, 4, kProcessors);
  EXPECT_EQ(r.reduced.strides[0][0], 1);
}

TEST(CudaReducePlan, NothingToReduce) {
  Reduction r = plan_reduction(dense({3, 0}), 2, 4, kProcessors);  // three sums of nothing
  EXPECT_EQ(r.outputs(), 3);
  EXPECT_EQ(r.length(), 0);
  EXPECT_EQ(r.parts, 1);
  r = plan_reduction(dense({0, 3}), 2, 4, kProcessors);
  EXPECT_EQ(r.outputs(), 0);
  r = plan_reduction(dense({}), ~0u, 4, kProcessors);
  EXPECT_EQ(r.outputs(), 1);
  EXPECT_EQ(r.length(), 1);
}

TEST(CudaRows, RowsOfTensorsWithAndWithoutTheDimension) {
  // x [N, C, H, W] channels-last with its target [N, H, W]
  const auto x = tensor_of({2, 5, 3, 4}, {60, 1, 20, 5}), target = dense({2, 3, 4});
  const Rows<2> r = rows_of<2>({&x, &target}, 1, 1u << 1);
  ASSERT_EQ(r.count(), 24);
  EXPECT_EQ(r.length, 5);
  EXPECT_EQ(r.strides[0], 1);
  for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(place(r.rows, i), (std::vector<int64_t>{i * 5, i}));
  EXPECT_EQ(lanes_of(r, 4, kProcessors), 2);
}

TEST(CudaRows, ThreadsOfARow) {
  const auto lanes = [](const halfstep_tensor& x, int64_t dim) {
    return lanes_of(rows_of<1>({&x}, dim), 4, kProcessors);
  };
  EXPECT_EQ(lanes(dense({1000, 4}), 1), 1);
  EXPECT_EQ(lanes(dense({1000, 64}), 1), 16);
  EXPECT_EQ(lanes(dense({1000, 500}), 1), 32);
  EXPECT_EQ(lanes(dense({1000, 50000}), 1), kThreads);
  EXPECT_EQ(lanes(dense({64, 21, 512, 512}), 1), 1);   // a thread a pixel
  EXPECT_EQ(lanes(dense({100000, 10}), 0), kThreads);  // ten long columns
}

TEST(CudaRows, PackedOnlyWhereEveryRowBeginsOnAPack) {
  const auto x = dense({6, 32}), odd = dense({6, 30}), across = tensor_of({6, 32}, {1, 6});
  const auto gaps = tensor_of({6, 32}, {33, 1});
  const auto packed = [](const halfstep_tensor& t, uintptr_t data) {
    return rows_of<1>({&t}, 1).packed(0, reinterpret_cast<void*>(data), 4, 4);
  };
  EXPECT_TRUE(packed(x, 64));
  EXPECT_FALSE(packed(x, 72));
  EXPECT_FALSE(packed(odd, 64));
  EXPECT_FALSE(packed(across, 64));
  EXPECT_FALSE(packed(gaps, 64));
}

}  // namespace
}  // namespace hscuda
