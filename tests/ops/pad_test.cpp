// SPDX-License-Identifier: Apache-2.0
// pad against PyTorch, in every layout and dtype; what it refuses.
#include "halfstep/ops/pad.h"

#include <gtest/gtest.h>

#include <cmath>

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

TEST(Pad, MatchesPyTorch) { test::check_op_goldens("pad", test::golden_calls().at("pad"), "pooling.json"); }

// Many rows, so that threads begin in the middle of images.
TEST(Pad, ManyRowsOnSeveralThreads) {
  const std::int64_t n = 3, c = 37, h = 29, w = 41, left = 2, right = 1, top = 3, bottom = -2;
  const std::int64_t height = h + top + bottom, width = w + left + right;
  std::vector<double> values;
  for (std::int64_t i = 0; i < n * c * h * w; ++i) values.push_back(static_cast<double>(i * 31 % 251));
  // Where place i of a padded dimension of size m comes from; -1: from the constant.
  const auto source = [](std::int64_t i, std::int64_t m, PadMode mode) {
    if (i >= 0 && i < m) return i;
    if (mode == PadMode::reflect) return i < 0 ? -i : 2 * (m - 1) - i;
    if (mode == PadMode::replicate) return i < 0 ? 0 : m - 1;
    return std::int64_t{-1};
  };
  for (const PadMode mode : {PadMode::constant, PadMode::reflect, PadMode::replicate}) {
    std::vector<double> expected;
    for (std::int64_t i = 0; i < n * c * height * width; ++i) {
      const std::int64_t y = source(i / width % height - top, h, mode), x = source(i % width - left, w, mode);
      expected.push_back(y < 0 || x < 0 ? 7 : values[static_cast<std::size_t>((i / width / height * h + y) * w + x)]);
    }
    for (const DType dtype : {f32, bf16, u8}) {
      const Tensor x = tensor(values, {n, c, h, w}, {.dtype = dtype});
      for (const int threads : {1, 2, 5}) {
        test::ThreadsGuard guard(threads);
        for (const auto format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
          const Tensor y = pad(x.contiguous(format), {left, right, top, bottom}, mode, 7);
          EXPECT_TRUE(y.to_vector<double>() == expected) << name(dtype) << " " << threads;
        }
      }
    }
  }
}

// Rows of a few bytes to more than a hundred, which are copied in different ways; padded, cut, and both.
TEST(Pad, RowsOfEveryWidth) {
  for (const DType dtype : {u8, bf16, f32, f64}) {
    for (std::int64_t w = 1; w < 72; w += w < 36 ? 1 : 5) {
      const Tensor x = tensor(
          [&] {
            std::vector<double> values;
            for (std::int64_t i = 0; i < 3 * 2 * w; ++i) values.push_back(static_cast<double>(i * 31 % 251));
            return values;
          }(),
          {3, 2, w}, {.dtype = dtype});
      const std::vector<double> values = x.to_vector<double>();
      for (const auto& [left, right] : {std::pair{1, 2}, {0, 3}, {9, 0}, {-1, 4}, {2, -1}, {-1, -2}}) {
        const std::int64_t width = w + left + right;
        if (width < 1) continue;
        std::vector<double> expected;
        for (std::int64_t i = 0; i < 3 * 3 * width; ++i) {
          const std::int64_t image = i / width / 3, row = i / width % 3 - 1, at = i % width - left;
          const bool inside = row >= 0 && at >= 0 && at < w;
          expected.push_back(inside ? values[static_cast<std::size_t>((image * 2 + row) * w + at)] : 5);
        }
        EXPECT_EQ(pad(x, {left, right, 1, 0}, PadMode::constant, 5).to_vector<double>(), expected)
            << name(dtype) << ", " << w << " wide, " << left << " and " << right;
      }
    }
  }
}

TEST(Pad, MovesTheSameElementsInEveryLayoutAndDtype) {
  manual_seed(13);
  const std::vector<std::int64_t> pads = {2, 1, 1, -1};
  for (const PadMode mode : {PadMode::constant, PadMode::reflect, PadMode::replicate, PadMode::circular}) {
    const Tensor x = randint(0, 100, {2, 5, 4, 6}).to(f64);
    const auto expected = pad(x, pads, mode, 7).to_vector<double>();
    for (const DType dtype : {f32, f16, bf16, i64, i32, i8, u8}) {
      for (const auto format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
        const Tensor y = pad(x.to(dtype).contiguous(format), pads, mode, 7);
        EXPECT_EQ(y.dtype(), dtype);
        EXPECT_TRUE(y.is_contiguous(format));
        EXPECT_EQ(y.to_vector<double>(), expected) << name(dtype);
      }
      EXPECT_EQ(pad(x.to(dtype).transpose(1, 3).contiguous().transpose(1, 3), pads, mode, 7).to_vector<double>(),
                expected);
      EXPECT_EQ(pad(x.to(dtype).slice(1, 0, 5, 2), pads, mode, 7).to_vector<double>(),
                pad(x, pads, mode, 7).slice(1, 0, 5, 2).to_vector<double>());
    }
  }
  EXPECT_EQ(pad(ones({2}, {.dtype = boolean}), {1, 0}).to_vector<double>(), (std::vector<double>{0, 1, 1}));
  EXPECT_EQ(pad(ones({2}, {.dtype = boolean}), {1, 0}, PadMode::constant, true).to_vector<double>(),
            (std::vector<double>{1, 1, 1}));
}

TEST(Pad, GradientsAgreeInEveryLayoutAndDtype) {
  manual_seed(14);
  for (const PadMode mode : {PadMode::constant, PadMode::reflect, PadMode::replicate, PadMode::circular}) {
    for (const std::int64_t channels : {3, 19, 600}) {
      const Tensor x = rand({2, channels, 4, 6});
      const std::vector<std::int64_t> pads = {5, 3, 2, -1};
      const Tensor g = rand(pad(x, pads, mode).sizes()) + 0.5;
      for (const DType dtype : {f32, f16, bf16}) {
        const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
        const auto gradient = [&](const Tensor& image, const Tensor& weights) {
          Tensor in = image.detach();
          in.requires_grad_();
          return grad({pad(in, pads, mode)}, {in}, {.grad_outputs = {weights}})[0];
        };
        const auto exact = gradient(x.to(f64), g.to(dtype).to(f64)).to_vector<double>();
        for (const auto format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
          const Tensor got = gradient(x.to(dtype).contiguous(format), g.to(dtype).contiguous(format));
          EXPECT_EQ(got.dtype(), dtype);
          EXPECT_TRUE(got.is_contiguous(format));
          const auto v = got.to_vector<double>();
          // At most 18 places of up to 1.5 come together.
          for (std::size_t i = 0; i < v.size(); ++i) {
            ASSERT_LE(std::abs(v[i] - exact[i]), u * std::abs(exact[i]) + 18 * 27 * 0x1p-24) << i;
          }
        }
      }
    }
  }
}

// Places with copies along every dimension, whose numbers kernels take apart: against a sum over what pad() itself says
// each place comes from.
TEST(Pad, GradientsOfManyCopies) {
  for (const PadMode mode : {PadMode::constant, PadMode::reflect, PadMode::replicate, PadMode::circular}) {
    const bool constant = mode == PadMode::constant;
    const Shape sizes = constant ? Shape{1, 2, 1, 2, 3} : Shape{2, 4, 3, 2};
    const std::vector<std::int64_t> pads = constant ? std::vector<std::int64_t>{1, 1, 2, -1, 0, 1, 1, 2, 3, 1}
                                                    : std::vector<std::int64_t>{1, 1, 2, 1, 1, 3};
    const Tensor number = arange(0, sizes.numel(), 1, {.dtype = f64}).view(sizes);
    const Tensor from = pad(number, pads, mode, -1);
    const Tensor g = arange(0, from.numel(), 1, {.dtype = f64}).view(from.sizes());
    const auto sources = from.to_vector<double>(), weights = g.to_vector<double>();
    std::vector<double> expected(static_cast<std::size_t>(number.numel()));
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (sources[i] >= 0) expected[static_cast<std::size_t>(sources[i])] += weights[i];
    }
    for (const DType dtype : {f64, f32}) {
      Tensor in = number.to(dtype).requires_grad_();
      const Tensor got = grad({pad(in, pads, mode)}, {in}, {.grad_outputs = {g.to(dtype)}})[0];
      EXPECT_EQ(got.to_vector<double>(), expected) << name(dtype) << static_cast<int>(mode);
    }
  }
}

TEST(Pad, OfNothing) {
  EXPECT_EQ(pad(zeros({0, 3}), {1, 1}).sizes(), Shape({0, 5}));
  EXPECT_EQ(pad(zeros({2, 0}), {1, 2}, PadMode::constant, 4).to_vector<float>(), std::vector<float>(6, 4.0f));
  EXPECT_EQ(pad(zeros({3}), {-1, -2}).sizes(), Shape({0}));
  EXPECT_EQ(pad(full({}, 3), {}).item<float>(), 3);
  EXPECT_EQ(pad(zeros({0, 2, 3}), {1, 1}, PadMode::reflect).sizes(), Shape({0, 2, 5}));
}

TEST(Pad, SaysWhatItExpects) {
  using test::error_of;
  const Tensor x = zeros({2, 3, 4});
  EXPECT_EQ(error_of([&] {
              pad(x, {1, 2, 3});
            }),
            "pad: expected a pair of numbers for each of at most 3 dimensions from the last on, got 3 numbers for "
            "[2, 3, 4] in the mode constant");
  EXPECT_EQ(error_of([&] {
              pad(zeros({2, 2, 2, 2}), {1, 1, 1, 1, 1, 1, 1, 1}, PadMode::reflect);
            }),
            "pad: expected a pair of numbers for each of at most 3 dimensions from the last on, got 8 numbers for "
            "[2, 2, 2, 2] in the mode reflect");
  EXPECT_EQ(error_of([&] {
              pad(x, {4, 0}, PadMode::reflect);
            }),
            "pad: expected at most 3 elements on a side of dimension 2 of [2, 3, 4] in the mode reflect, got 4 and 0");
  EXPECT_EQ(error_of([&] {
              pad(x, {0, 5}, PadMode::circular);
            }),
            "pad: expected at most 4 elements on a side of dimension 2 of [2, 3, 4] in the mode circular, got 0 and 5");
  EXPECT_EQ(error_of([&] {
              pad(x, {-3, -2});
            }),
            "pad: expected to leave no less than nothing of dimension 2 of [2, 3, 4], got -3 and -2");
  EXPECT_EQ(error_of([&] {
              pad(x, {-2, -2}, PadMode::replicate);
            }),
            "pad: expected to leave at least one element of dimension 2 of [2, 3, 4], got -2 and -2");
}

}  // namespace
}  // namespace halfstep
