// SPDX-License-Identifier: Apache-2.0
// Reductions between ranks: the bits are those of a sum in the order of ranks with one rounding.
#include <cmath>
#include <limits>

#include "tests/ranks/ranks.h"

namespace halfstep::dist::test {
namespace {

std::string case_name(DType dtype, ReduceOp op, std::int64_t n) {
  return std::string(halfstep::name(dtype)) + " " + name(op) + " of " + std::to_string(n);
}

// One element, one less than there are ranks, odd numbers, one that goes whole to all and one that doesn't.
std::vector<std::int64_t> counts() { return {0, 1, world().size() - 1, world().size(), 7, 999, 20011}; }

template <class T>
std::vector<T> reduced_values(ReduceOp op, std::int64_t begin, std::int64_t n) {
  std::vector<T> expected;
  for (std::int64_t i = 0; i < n; ++i) expected.push_back(reduced<T>(op, world().size(), begin + i));
  return expected;
}

TEST(AllReduce, IsTheSumInTheOrderOfRanksRoundedOnce) {
  for (const DType dtype : kNumbers) {
    for (const ReduceOp op : kOps) {
      if (op == ReduceOp::mean && is_integral(dtype)) continue;
      for (const std::int64_t n : counts()) {
        visit_dtype(dtype, [&](auto tag) {
          using T = storage_t<tag.value>;
          if constexpr (!std::is_same_v<T, bool>) {
            const Tensor t = values<T>(world().rank(), n);
            world().all_reduce(t, op).wait();
            expect_bits(t, reduced_values<T>(op, 0, n), case_name(dtype, op, n));
          }
        });
      }
    }
  }
}

// 14 MB of float32, and 7 of 16 bits, go in several segments.
TEST(AllReduce, LargeTensorsGoInSegments) {
  constexpr std::int64_t kCount = 3'500'001;
  const Tensor wide = values<float>(world().rank(), kCount), narrow = values<BFloat16>(world().rank(), kCount);
  const Work first = world().all_reduce(wide), second = world().all_reduce(narrow);
  second.wait();
  EXPECT_TRUE(first.done());  // they run in order
  first.wait();
  expect_bits(wide, reduced_values<float>(ReduceOp::sum, 0, kCount), "f32");
  expect_bits(narrow, reduced_values<BFloat16>(ReduceOp::sum, 0, kCount), "bf16");
}

// 2049 needs 12 bits, f16 has 11: a sum that is rounded at every rank stays at 2048.
TEST(AllReduce, SixteenBitsAreRoundedOnce) {
  const int size = world().size();
  for (const std::int64_t n : {std::int64_t{3}, std::int64_t{100}, std::int64_t{30000}}) {
    const Tensor t = empty({n}, {.dtype = f16, .device = Device()});
    for (std::int64_t i = 0; i < n; ++i) t.data<Half>()[i] = Half(world().rank() == 0 ? 2048.0F : 0.75F);
    world().all_reduce(t).wait();
    const std::vector<Half> expected(static_cast<std::size_t>(n),
                                     convert<Half>(2048.0F + 0.75F * static_cast<float>(size - 1)));
    expect_bits(t, expected, std::to_string(n));
  }
}

TEST(AllReduce, MinAndMaxPropagateNaN) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    for (int bad = 0; bad < world().size(); ++bad) {
      const Tensor t = empty({9}, {.device = Device()});
      for (int i = 0; i < 9; ++i) t.data<float>()[i] = static_cast<float>(world().rank());
      if (world().rank() == bad) t.data<float>()[5] = nan;
      world().all_reduce(t, op).wait();
      EXPECT_TRUE(std::isnan(t.data<float>()[5])) << name(op) << " " << bad;
      EXPECT_EQ(t.data<float>()[4], op == ReduceOp::min ? 0.0F : static_cast<float>(world().size() - 1));
    }
  }
}

TEST(AllReduce, TensorsOfAnyDenseLayout) {
  const Tensor t = values<float>(world().rank(), 6 * 7).view({6, 7}).t();
  world().all_reduce(t, ReduceOp::sum).wait();
  expect_bits(t.t(), reduced_values<float>(ReduceOp::sum, 0, 42), "transposed");
}

TEST(AllReduce, ManyInFlight) {
  std::vector<Tensor> tensors;
  std::vector<Work> works;
  for (int k = 0; k < 50; ++k) {
    tensors.push_back(values<float>(world().rank(), 1 + 501 * k, k));
    works.push_back(world().all_reduce(tensors.back()));
  }
  for (std::size_t k = 0; k < works.size(); ++k) {
    works[k].wait();
    std::vector<float> expected;
    for (std::int64_t i = 0; i < tensors[k].numel(); ++i) {
      expected.push_back(reduced<float>(ReduceOp::sum, world().size(), i, static_cast<int>(k)));
    }
    expect_bits(tensors[k], expected, std::to_string(k));
  }
}

TEST(AllReduce, CountsWhatIsSent) {
  const auto before = world().stats();
  const std::int64_t n = 64 * world().size() * 100;  // equal parts
  world().all_reduce(values<float>(world().rank(), n)).wait();
  const auto after = world().stats();
  EXPECT_EQ(after.collectives, before.collectives + 1);
  // 2 (W - 1) / W of the bytes, as in a ring.
  EXPECT_EQ(after.bytes_sent - before.bytes_sent,
            static_cast<std::uint64_t>(2 * (world().size() - 1) * (n * 4 / world().size())));
  EXPECT_GT(after.busy_seconds, before.busy_seconds);
  EXPECT_GT(after.wait_seconds, before.wait_seconds);
}

TEST(ReduceScatter, IsAPartOfTheReduction) {
  for (const DType dtype : kNumbers) {
    for (const ReduceOp op : kOps) {
      if (op == ReduceOp::mean && is_integral(dtype)) continue;
      for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, std::int64_t{6001}}) {
        visit_dtype(dtype, [&](auto tag) {
          using T = storage_t<tag.value>;
          if constexpr (!std::is_same_v<T, bool>) {
            const Tensor input = values<T>(world().rank(), n * world().size());
            const Tensor output = empty({n}, {.dtype = dtype, .device = Device()});
            world().reduce_scatter(output, input, op).wait();
            expect_bits(output, reduced_values<T>(op, n * world().rank(), n), case_name(dtype, op, n));
          }
        });
      }
    }
  }
  const std::int64_t large = 1'500'003;  // in several segments
  const Tensor input = values<float>(world().rank(), large * world().size());
  const Tensor output = empty({large}, {.device = Device()});
  world().reduce_scatter(output, input).wait();
  expect_bits(output, reduced_values<float>(ReduceOp::sum, large * world().rank(), large), "large");
}

}  // namespace
}  // namespace halfstep::dist::test
