// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/int8.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

// Weights of both widths, in groups of several lengths, against float64.
TEST(LinearWeightOnly, IsTheProductWithTheWeightsReal) {
  manual_seed(9);
  for (const std::int64_t bits : {8, 4}) {
    for (const std::int64_t k : {2, 34, 128, 1056}) {
      for (const std::int64_t group : {std::int64_t{0}, k / 2, std::int64_t{2}}) {
        if (group == 1) continue;
        if (bits == 4 && group % 2 != 0) continue;
        for (const std::int64_t rows : {1, 2, 3, 7, 13, 64, 70}) {
          const std::int64_t outputs = 37, groups = group == 0 ? 1 : k / group, each = k / groups;
          const Tensor q =
              bits == 8 ? randint(-128, 128, {outputs, k}, {.dtype = i8}) : randint(-8, 8, {outputs, k}, {.dtype = i8});
          const std::vector<std::int64_t> integers = q.to_vector<std::int64_t>();
          Tensor w = q;
          if (bits == 4) {
            std::vector<std::int64_t> packed;
            for (std::size_t i = 0; i < integers.size(); i += 2) {
              packed.push_back((integers[i] & 15) | (integers[i + 1] & 15) << 4);
            }
            w = tensor_from_integers(packed, {outputs, k / 2}, {.dtype = u8});
          }
          const Tensor scale = rand(group == 0 ? Shape{outputs} : Shape{outputs, groups}) * 0.1;
          const Tensor bias = rows % 2 == 0 ? Tensor() : randn({outputs});
          const DType dtype = rows % 3 == 0 ? f32 : rows % 3 == 1 ? bf16 : f16;
          const Tensor x = randn({rows, k}).to(dtype);
          const Tensor y = linear_weight_only(x, w, scale, bias, {.group_size = group});
          ASSERT_EQ(y.dtype(), dtype);
          const auto xs = x.to_vector<double>(), s = scale.to_vector<double>(), got = y.to_vector<double>();
          const auto b = bias.defined() ? bias.to_vector<double>() : std::vector<double>(37, 0.0);
          for (std::int64_t m = 0; m < rows; ++m) {
            for (std::int64_t o = 0; o < outputs; ++o) {
              double sum = b[static_cast<std::size_t>(o)], size = std::abs(sum);
              for (std::int64_t i = 0; i < k; ++i) {
                const double t = xs[static_cast<std::size_t>(m * k + i)] *
                                 static_cast<double>(integers[static_cast<std::size_t>(o * k + i)]) *
                                 s[static_cast<std::size_t>(o * groups + i / each)];
                sum += t;
                size += std::abs(t);
              }
              // Each term is rounded up to three times, and once for each of the sums that it is in: at most k + 1 of
              // them; the result once more to its dtype.
              const double u = dtype == f32 ? 0x1p-24 : dtype == f16 ? 0x1p-11 : 0x1p-8;
              const double bound = static_cast<double>(k + 4) * 0x1p-24 * size + u * std::abs(sum) + 0x1p-25;
              ASSERT_NEAR(got[static_cast<std::size_t>(m * outputs + o)], sum, bound)
                  << bits << " bits, k " << k << " group " << group << " rows " << rows;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(linear_weight_only(ones({2, 3, 4}), zeros({5, 4}, {.dtype = i8}), ones({5})).sizes(), (Shape{2, 3, 5}));
  EXPECT_EQ(linear_weight_only(ones({0, 4}), zeros({5, 4}, {.dtype = i8}), ones({5})).sizes(), (Shape{0, 5}));
}

// Many outputs, whose weights are widened in several blocks.
TEST(LinearWeightOnly, WidensBlockByBlock) {
  manual_seed(10);
  const Tensor x = randn({70, 2048}), q = randint(-128, 128, {1300, 2048}, {.dtype = i8}), scale = rand({1300, 16});
  const Tensor got = linear_weight_only(x, q, scale);
  // A few rows at a time go the other way.
  const auto many = got.to_vector<double>(), few = linear_weight_only(x.slice(0, 4, 8), q, scale).to_vector<double>();
  // Terms of at most 5 * 128 of either sign: sums of 2048 are about 2048 * 64 * 0.8 * 0.5 without signs.
  for (std::size_t i = 0; i < few.size(); ++i) ASSERT_NEAR(few[i], many[4 * 1300 + i], 2052 * 0x1p-24 * 2 * 55000);
}

TEST(LinearWeightOnly, RefusesWhatHasNoMeaning) {
  const Tensor x = ones({2, 8}), w = zeros({3, 8}, {.dtype = i8}), half = zeros({3, 4}, {.dtype = u8}), s = ones({3});
  EXPECT_NO_THROW(linear_weight_only(x, w, s));
  EXPECT_NO_THROW(linear_weight_only(x, half, s));
  EXPECT_THROW(linear_weight_only(x.to(f64), w, s), DTypeError);
  EXPECT_THROW(linear_weight_only(x, w.to(i32), s), DTypeError);
  EXPECT_THROW(linear_weight_only(x, w, s.to(f16)), DTypeError);
  EXPECT_THROW(linear_weight_only(x, w.to(u8), s), ShapeError);
  EXPECT_THROW(linear_weight_only(x, w.reshape({24}), s), ShapeError);
  EXPECT_THROW(linear_weight_only(ones({2, 7}), w, s), ShapeError);
  EXPECT_THROW(linear_weight_only(x, w, ones({4})), ShapeError);
  EXPECT_THROW(linear_weight_only(x, w, ones({3, 3})), ShapeError);
  EXPECT_THROW(linear_weight_only(x, w, ones({3, 1, 1})), ShapeError);
  EXPECT_THROW(linear_weight_only(x, w, ones({3, 4}), {}, {.group_size = 4}), ShapeError);
  EXPECT_THROW(linear_weight_only(x, w, ones({3, 4}), {}, {.group_size = -2}), ShapeError);
  EXPECT_THROW(linear_weight_only(x, half, ones({3, 8})), ShapeError);  // half a byte has no scale of its own
  EXPECT_THROW(linear_weight_only(x, w, s, ones({2})), ShapeError);
  EXPECT_THROW(linear_weight_only(x, w, s, zeros({3}, {.dtype = i32})), DTypeError);
}

}  // namespace
}  // namespace halfstep
