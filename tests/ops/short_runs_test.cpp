// SPDX-License-Identifier: Apache-2.0
// Elementwise ops whose innermost runs are short, which kernels take many at a time: each operand broadcast along any
// dimension, turned, or cut out of a larger tensor, against the same op on copies that lie in order. Same bits.
#include <gtest/gtest.h>

#include <cstring>

#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/view.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

using test::ThreadsGuard;

// Numbers from 1 to 9: divisors of integers, too.
Tensor numbers(const Shape& sizes, DType dtype, std::uint64_t seed) {
  RandomStream random(seed);
  std::vector<double> v;
  for (std::int64_t i = 0; i < sizes.numel(); ++i) v.push_back(static_cast<double>(1 + random.below(9)));
  return tensor(v, sizes, {.dtype = dtype});
}

// The ways in which an operand of these sizes can lie.
constexpr int kWays = 7;
Tensor operand(const Shape& sizes, DType dtype, int way, std::uint64_t seed) {
  Shape s = sizes;
  const int last = s.size() - 1;
  switch (way) {
    case 1:  // one run for all rows
      for (int d = 0; d < last; ++d) s[d] = 1;
      return numbers(s, dtype, seed).expand(sizes);
    case 2:  // one number a row
      s[last] = 1;
      return numbers(s, dtype, seed).expand(sizes);
    case 3:  // one image for all
      s[0] = 1;
      return numbers(s, dtype, seed).expand(sizes);
    case 4:  // turned
      std::swap(s[last], s[last - 1]);
      return numbers(s, dtype, seed).transpose(last, last - 1);
    case 5:  // every second element of longer runs
      s[last] *= 2;
      return numbers(s, dtype, seed).slice(last, 0, s[last], 2);
    case 6:  // rows of one number for all images
      s[0] = s[last] = 1;
      return numbers(s, dtype, seed).expand(sizes);
    default:
      return numbers(sizes, dtype, seed);
  }
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.contiguous().to(Device{}), y = b.contiguous().to(Device{});
  return x.dtype() == y.dtype() && x.sizes() == y.sizes() &&
         std::memcmp(x.const_raw_data(), y.const_raw_data(),
                     static_cast<std::size_t>(x.numel()) * item_size(x.dtype())) == 0;
}

TEST(ShortRuns, OfTwoOperands) {
  for (const std::int64_t width : {1, 2, 3, 5, 8, 31, 32, 33}) {
    const std::int64_t together = 512 / width;  // rows of a block
    for (const std::int64_t rows : {std::int64_t{2}, together - 1, together, together + 1, 2 * together + 3}) {
      for (const std::int64_t images : {1, 3}) {
        const Shape sizes{images, rows, width};
        for (const DType dtype : {f32, bf16, f64, i8, i64}) {
          for (int a = 0; a < kWays; ++a) {
            for (int b = 0; b < kWays; b += a % 2 + 1) {
              const Tensor x = operand(sizes, dtype, a, 1), y = operand(sizes, dtype, b, 2);
              const Tensor xs = x.clone().contiguous(), ys = y.clone().contiguous();
              ASSERT_TRUE(same_bits(x * y, xs * ys)) << sizes.str() << " " << name(dtype) << " " << a << " " << b;
              ASSERT_TRUE(same_bits(gt(x, y), gt(xs, ys))) << sizes.str() << " " << name(dtype) << " " << a << " " << b;
            }
          }
        }
      }
    }
  }
}

TEST(ShortRuns, OnAnyNumberOfThreads) {
  // Blocks have 73 rows of seven: images of 57 blocks; and of two and a row, at which the second of two threads begins.
  for (const Shape& sizes : {Shape{5, 4097, 7}, Shape{333, 147, 7}}) {
    for (int a = 0; a < kWays; ++a) {
      const auto seed = static_cast<std::uint64_t>(10 * a);  // nothing that is left of the last turn is right
      const Tensor x = operand(sizes, f32, a, seed + 3), y = operand(sizes, f32, (a + 2) % kWays, seed + 4);
      const Tensor condition = gt(operand(sizes, f32, (a + 4) % kWays, seed + 5), 4);
      const Tensor sums = x.clone().contiguous() + y.clone().contiguous();
      const Tensor chosen = where(condition.clone().contiguous(), x.clone().contiguous(), y.clone().contiguous());
      for (const int threads : {1, 2, 3}) {
        ThreadsGuard guard(threads);
        EXPECT_TRUE(same_bits(x + y, sums)) << a << ", " << threads << " threads";
        EXPECT_TRUE(same_bits(where(condition, x, y), chosen)) << a << ", " << threads << " threads";
      }
    }
  }
}

// Into the operand itself, into every second element, and into columns.
TEST(ShortRuns, InPlace) {
  const Shape sizes{3, 300, 5};
  for (const DType dtype : {f32, f16, i32}) {
    for (int way = 0; way < kWays; ++way) {
      const Tensor by = operand(sizes, dtype, way, 6);
      for (const int into : {0, 4, 5}) {
        Tensor x = operand(sizes, dtype, into, 7);
        const Tensor want = x.clone().contiguous() + by.clone().contiguous();
        x.add_(by);
        EXPECT_TRUE(same_bits(x, want)) << name(dtype) << " " << way << " into " << into;
      }
    }
  }
}

}  // namespace
}  // namespace halfstep
