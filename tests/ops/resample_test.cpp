// SPDX-License-Identifier: Apache-2.0
// interpolate against PyTorch in float64, and every layout and dtype against that; what it refuses.
#include "halfstep/ops/resample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "tests/support/errors.h"
#include "tests/support/golden_calls.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

using enum InterpolateMode;

TEST(Interpolate, MatchesPyTorch) {
  test::check_op_goldens("interpolate", test::golden_calls().at("interpolate"), "pooling.json");
}

TEST(Interpolate, AgreesWithFloat64InEveryLayoutAndDtype) {
  const std::vector<InterpolateOptions> all = {{.size = {9, 5}},
                                               {.scale_factor = {2}},
                                               {.size = {4, 11}, .mode = nearest_exact},
                                               {.size = {9, 16}, .mode = bilinear},
                                               {.size = {3, 4}, .mode = bilinear, .align_corners = true},
                                               {.scale_factor = {0.7, 2.3}, .mode = bilinear}};
  for (std::size_t k = 0; k < all.size(); ++k) {
    for (const std::int64_t channels : {1, 3, 16, 67}) {
      manual_seed(12);
      const Tensor x = rand({2, channels, 6, 7}) - 0.5, g = rand(interpolate(x, all[k]).sizes()) + 0.5;
      for (const DType dtype : {f32, f16, bf16}) {
        const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
        const auto passes = [&](const Tensor& image, const Tensor& weights) {
          Tensor in = image.detach();
          in.requires_grad_();
          const Tensor y = interpolate(in, all[k]);
          return std::pair{y.detach(), grad({y}, {in}, {.grad_outputs = {weights}})[0]};
        };
        const Tensor low = x.to(dtype), low_g = g.to(dtype);
        const auto [y, x_grad] = passes(low.to(f64), low_g.to(f64));
        for (const auto format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
          const auto [got, got_grad] = passes(low.contiguous(format), low_g.contiguous(format));
          EXPECT_EQ(got.dtype(), dtype);
          EXPECT_TRUE(got.is_contiguous(format));
          EXPECT_TRUE(got_grad.is_contiguous(format));
          // Two sums of two products with rounded weights; a gradient takes at most 16 places, of up to 1.5.
          const auto expect = [&](const Tensor& a, const Tensor& b, double sum) {
            const auto p = a.to_vector<double>(), q = b.to_vector<double>();
            for (std::size_t i = 0; i < p.size(); ++i) {
              ASSERT_LE(std::abs(p[i] - q[i]), u * std::abs(q[i]) + sum * 0x1p-24 + (dtype == f16 ? 0x1p-25 : 0))
                  << "options " << k << ' ' << name(dtype) << " element " << i;
            }
          };
          expect(got, y, all[k].mode == bilinear ? 8 : 0);
          expect(got_grad, x_grad, 16 * 20);
        }
      }
    }
  }
}

// Rows of one channel that take several vectors, against sums in float64 and on any number of threads.
TEST(Interpolate, LongBilinearRowsAgreeWithFloat64) {
  const test::ThreadsGuard guard;
  struct Rows {
    std::int64_t height, width, to_height, to_width;
  };
  for (const Rows& r : {Rows{5, 37, 10, 74}, Rows{4, 19, 9, 131}, Rows{7, 90, 5, 40}, Rows{6, 211, 4, 33}}) {
    for (const DType dtype : {f32, f16, bf16}) {
      manual_seed(14);
      const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
      const Tensor x = (rand({2, 3, r.height, r.width}) - 0.5).to(dtype).requires_grad_();
      const Tensor g = (rand({2, 3, r.to_height, r.to_width}) + 0.5).to(dtype);
      const auto v = x.to_vector<double>(), w = g.to_vector<double>();
      std::vector<double> expected, expected_grad(v.size()), first;
      const auto neighbours = [](std::int64_t i, std::int64_t from, std::int64_t to) {
        const double at = (static_cast<double>(i) + 0.5) * static_cast<double>(from) / static_cast<double>(to) - 0.5;
        const double place = std::clamp(at, 0.0, static_cast<double>(from - 1)), low = std::floor(place);
        return std::array{std::pair{static_cast<std::int64_t>(low), 1 - (place - low)},
                          std::pair{std::min(static_cast<std::int64_t>(low) + 1, from - 1), place - low}};
      };
      for (std::int64_t plane = 0; plane < 6; ++plane) {
        for (std::int64_t i = 0; i < r.to_height; ++i) {
          for (std::int64_t j = 0; j < r.to_width; ++j) {
            double sum = 0;
            const double slope = w[expected.size()];
            for (const auto& [row, row_weight] : neighbours(i, r.height, r.to_height)) {
              for (const auto& [column, weight] : neighbours(j, r.width, r.to_width)) {
                const auto at = static_cast<std::size_t>((plane * r.height + row) * r.width + column);
                sum += row_weight * weight * v[at];
                expected_grad[at] += row_weight * weight * slope;
              }
            }
            expected.push_back(sum);
          }
        }
      }
      for (const int threads : {1, 3}) {
        set_num_threads(threads);
        const Tensor y = interpolate(x, {.size = {r.to_height, r.to_width}, .mode = bilinear});
        const auto got = y.to_vector<double>(), got_grad = grad({y}, {x}, {.grad_outputs = {g}})[0].to_vector<double>();
        const double tiny = dtype == f16 ? 0x1p-25 : 0;
        for (std::size_t k = 0; k < got.size(); ++k) {
          ASSERT_NEAR(got[k], expected[k], u * std::abs(expected[k]) + 8 * 0x1p-24 + tiny) << r.to_width << " " << k;
        }
        for (std::size_t k = 0; k < got_grad.size(); ++k) {
          // At most 8 rows and columns that a place goes into.
          ASSERT_NEAR(got_grad[k], expected_grad[k], (u + 20 * 0x1p-24) * expected_grad[k] + tiny)
              << r.to_width << " " << k;
        }
        if (first.empty()) first = got;
        EXPECT_EQ(got, first);
      }
    }
  }
}

TEST(Interpolate, RunsInFloat32UnderAutocast) {
  const Tensor x = rand({1, 4, 3, 3}).to(f16).requires_grad_();
  Tensor y;
  {
    const amp::Autocast autocast{{.dtype = f16}};
    y = interpolate(x, {.scale_factor = {2}, .mode = bilinear});
  }
  EXPECT_EQ(y.dtype(), f32);
  EXPECT_EQ(grad({y}, {x}, {.grad_outputs = {ones_like(y)}})[0].dtype(), f16);
}

TEST(Interpolate, DoesNotLetAnInfinityIntoPixelsThatDoNotTouchIt) {
  Tensor x = zeros({1, 1, 2, 2});
  x.select(2, 1).fill_(INFINITY);
  // The first row lies on the upper pixels alone.
  EXPECT_EQ(interpolate(x, {.size = {3}, .mode = bilinear, .align_corners = true})[0][0][0].to_vector<float>(),
            (std::vector<float>{0, 0, 0}));
}

TEST(Interpolate, TakesAnImageWithoutBatchAndNoImages) {
  EXPECT_EQ(interpolate(zeros({3, 4, 5}), {.size = {2}}).sizes(), Shape({3, 2, 2}));
  EXPECT_EQ(interpolate(zeros({0, 3, 4, 5}), {.scale_factor = {1.5}}).sizes(), Shape({0, 3, 6, 7}));
}

TEST(Interpolate, SaysWhatItExpects) {
  using test::error_of;
  const Tensor x = zeros({2, 3, 4, 4});
  EXPECT_EQ(error_of([&] { interpolate(x, {}); }), "interpolate: expected either size or scale_factor, got neither");
  EXPECT_EQ(error_of([&] { interpolate(x, {.size = {2}, .scale_factor = {2}}); }),
            "interpolate: expected either size or scale_factor, got both");
  EXPECT_EQ(error_of([&] { interpolate(x, {.size = {2}, .align_corners = true}); }),
            "interpolate: expected align_corners with the mode bilinear only");
  EXPECT_EQ(error_of([&] { interpolate(x, {.size = {2}, .recompute_scale_factor = true}); }),
            "interpolate: expected recompute_scale_factor with scale_factor only, got a size");
  EXPECT_EQ(error_of([&] { interpolate(x, {.size = {0}}); }), "interpolate: expected size of at least 1, got [0]");
  EXPECT_EQ(error_of([&] { interpolate(x, {.scale_factor = {0.2}}); }),
            "interpolate: expected a scale_factor that leaves at least one place, got 0.2 for [2, 3, 4, 4]");
  EXPECT_EQ(error_of([&] {
              interpolate(x, {.scale_factor = {1, 1, 1}});
            }),
            "interpolate: expected 1 or 2 numbers for scale_factor, got 3");
  EXPECT_EQ(error_of([&] { interpolate(x[0][0], {.size = {2}}); }),
            "interpolate: expected an input [N, C, H, W] or [C, H, W] with at least one place, got [4, 4]");
}

}  // namespace
}  // namespace halfstep
