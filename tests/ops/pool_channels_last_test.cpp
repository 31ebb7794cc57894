// SPDX-License-Identifier: Apache-2.0
// Pooling of channels-last images against loops over single elements in float64. Maxima: values with their signs,
// indices and gradients, in windows of every kind, of numbers and of what isn't one. Means of whole images.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>

#include "halfstep/autograd/engine.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/machine_limits.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using Pair = std::array<std::int64_t, 2>;
struct Windows {
  const char* what;
  Pair image, kernel, stride, padding = {0, 0}, dilation = {1, 1};
  bool ceil_mode = false;
};
const Windows kWindows[] = {
    {"3x3/2", {9, 10}, {3, 3}, {2, 2}, {1, 1}},
    {"2x2/2", {8, 7}, {2, 2}, {2, 2}},
    {"5x5/1", {13, 6}, {5, 5}, {1, 1}, {2, 2}},
    {"1x1", {3, 4}, {1, 1}, {1, 1}},
    {"gaps between windows", {11, 12}, {2, 3}, {4, 5}},
    {"dilated", {12, 11}, {3, 2}, {1, 2}, {1, 1}, {2, 3}},
    {"dilated beyond both edges", {2, 5}, {2, 2}, {1, 1}, {1, 1}, {3, 1}},
    {"ceil", {8, 9}, {3, 2}, {3, 2}, {1, 0}, {1, 1}, true},
    {"one place", {1, 1}, {3, 3}, {1, 1}, {1, 1}},
    {"all of it", {7, 6}, {7, 6}, {7, 6}},
    {"16x16", {18, 17}, {16, 16}, {1, 1}},
    {"numbers of four bytes", {19, 20}, {17, 18}, {1, 1}, {8, 9}},
    {"wide and low", {2, 70}, {2, 3}, {1, 2}, {0, 1}},
};

struct Expected {
  std::vector<double> y, x_grad;
  std::vector<std::int64_t> at;  // the place in the image; -1: the window has none
};
// What PyTorch does: the first of equal values, the last NaN.
Expected expected(const Windows& w, const Shape& x_sizes, const std::vector<double>& x, const Shape& y_sizes,
                  const std::vector<double>& g) {
  Expected e;
  e.x_grad.assign(x.size(), 0.0);
  const std::int64_t places = x_sizes[2] * x_sizes[3];
  for (std::int64_t plane = 0; plane < x_sizes[0] * x_sizes[1]; ++plane) {
    for (std::int64_t i = 0; i < y_sizes[2]; ++i) {
      for (std::int64_t j = 0; j < y_sizes[3]; ++j) {
        double best = -kInf;
        std::int64_t at = -1;
        for (std::int64_t k = 0; k < w.kernel[0]; ++k) {
          for (std::int64_t l = 0; l < w.kernel[1]; ++l) {
            const std::int64_t row = i * w.stride[0] - w.padding[0] + k * w.dilation[0];
            const std::int64_t column = j * w.stride[1] - w.padding[1] + l * w.dilation[1];
            if (row < 0 || row >= x_sizes[2] || column < 0 || column >= x_sizes[3]) continue;
            const std::int64_t place = row * x_sizes[3] + column;
            const double v = x[static_cast<std::size_t>(plane * places + place)];
            if (at < 0 || v > best || std::isnan(v)) {
              best = v;
              at = place;
            }
          }
        }
        if (at >= 0) e.x_grad[static_cast<std::size_t>(plane * places + at)] += g[e.y.size()];
        e.y.push_back(best);
        e.at.push_back(at);
      }
    }
  }
  return e;
}

Shape shape_of(const Pair& p) { return {p[0], p[1]}; }
MaxPoolFuncOptions options(const Windows& w) {
  return {shape_of(w.stride), shape_of(w.padding), shape_of(w.dilation), w.ceil_mode};
}
Tensor pool(const Windows& w, const Tensor& x) { return max_pool2d(x, shape_of(w.kernel), options(w)); }

// The same values, channels last, or every other channel of a larger tensor of that layout.
Tensor laid_out(const Tensor& x, bool apart) {
  if (!apart) return to_channels_last(x);
  const Shape s = x.sizes();
  Tensor larger = zeros({s[0], s[2], s[3] + 1, s[1] + 3}, {.dtype = x.dtype()});
  Tensor part = larger.permute({0, 3, 1, 2}).slice(1, 0, s[1]).slice(3, 0, s[3]);
  part.copy_(x);
  return part.detach();
}

void expect_same(double got, double wanted, const std::string& what) {
  if (std::isnan(wanted)) {
    ASSERT_TRUE(std::isnan(got)) << what << ": " << got;
  } else {
    ASSERT_EQ(got, wanted) << what;
    // Of 0 and -0 the first one.
    ASSERT_EQ(std::signbit(got), std::signbit(wanted)) << what;
  }
}

// Gradients are eighths up to one, so that sums of those of 32 windows fit 16 bits: of more, as many are zeros.
std::vector<double> gradients(std::size_t n, std::int64_t windows, std::mt19937& random) {
  std::vector<double> g(n);
  for (double& v : g) {
    v = static_cast<double>(static_cast<int>(random() % 17) - 8) / 8;
    if (static_cast<std::int64_t>(random() % static_cast<unsigned>(windows)) >= 16) v = 0;
  }
  return g;
}

void check(const Windows& w, const Shape& sizes, const std::vector<double>& values, DType dtype, bool apart,
           std::mt19937& random) {
  const std::string what = std::string(w.what) + " " + sizes.str() + " " + name(dtype) + (apart ? " apart" : "");
  const Tensor x = tensor(values, sizes).to(dtype);
  Tensor in = laid_out(x, apart);
  in.requires_grad_();
  const Tensor y = pool(w, in);
  ASSERT_EQ(y.dtype(), dtype);
  const std::vector<double> weights = gradients(static_cast<std::size_t>(y.numel()), w.kernel[0] * w.kernel[1], random);
  const Expected e = expected(w, sizes, x.contiguous().to_vector<double>(), y.sizes(), weights);
  const auto got = y.detach().contiguous().to_vector<double>();
  ASSERT_EQ(got.size(), e.y.size()) << what;
  const Tensor indices = max_pool2d_with_indices(in.detach(), shape_of(w.kernel), options(w)).indices.contiguous();
  const auto at = indices.to_vector<std::int64_t>();
  for (std::size_t i = 0; i < got.size(); ++i) {
    expect_same(got[i], e.y[i], what + ", result " + std::to_string(i));
    if (e.at[i] < 0) continue;
    ASSERT_EQ(at[i], e.at[i]) << what << ", index " << i;
  }
  const Tensor g = laid_out(tensor(weights, y.sizes()).to(dtype), apart);
  const auto x_grad = grad({y}, {in}, {.grad_outputs = {g}})[0].contiguous().to_vector<double>();
  ASSERT_EQ(x_grad.size(), e.x_grad.size()) << what;
  for (std::size_t i = 0; i < x_grad.size(); ++i) {
    ASSERT_EQ(x_grad[i], e.x_grad[i]) << what << ", gradient " << i;
  }
}

// Few values, many of them equal.
std::vector<double> numbers(std::int64_t n, std::mt19937& random) {
  std::vector<double> v(static_cast<std::size_t>(n));
  for (double& e : v) e = static_cast<double>(static_cast<int>(random() % 41) - 20) / 4;
  return v;
}

TEST(MaxPoolChannelsLast, FollowsItsDefinitionInWindowsOfEveryKind) {
  std::mt19937 random(1);
  for (const Windows& w : kWindows) {
    for (const std::int64_t channels : {1, 3, 4, 7, 8, 17, 33, 65, 130}) {
      const Shape sizes = {channels == 17 ? 1 : 2, channels, w.image[0], w.image[1]};
      const std::vector<double> values = numbers(sizes.numel(), random);
      for (const DType dtype : {f32, f16, bf16}) {
        for (const bool apart : {false, true}) check(w, sizes, values, dtype, apart, random);
      }
    }
  }
}

// A row of the image has none, some or nothing else of them, so that windows see rows of each kind.
TEST(MaxPoolChannelsLast, TakesTheLastNaNAndTheFirstZeroOfEitherSign) {
  std::mt19937 random(2);
  const double special[] = {0.0, -0.0, kNaN, std::copysign(kNaN, -1.0), kInf, -kInf, 1.0, -1.0};
  for (const Windows& w : kWindows) {
    for (const std::int64_t channels : {4, 21, 64, 130}) {
      const Shape sizes = {2, channels, w.image[0], w.image[1]};
      for (const std::size_t kinds : {std::size_t{2}, std::size_t{4}, std::size_t{8}}) {
        std::vector<double> values = numbers(sizes.numel(), random);
        for (std::size_t i = 0; i < values.size(); ++i) {
          const std::size_t row = i / static_cast<std::size_t>(w.image[1]) % 5;
          const bool here = row < 2 ? random() % 16 == 0 : row == 3;
          if (here) values[i] = special[random() % kinds];
        }
        for (const DType dtype : {f32, f16, bf16}) check(w, sizes, values, dtype, false, random);
      }
    }
  }
}

// All bits of 16, in order and turned around: each is compared to its neighbours.
TEST(MaxPoolChannelsLast, OrdersAllNumbersOf16Bits) {
  const Windows w = {"pairs", {64, 64}, {1, 2}, {1, 1}};
  std::mt19937 random(3);
  for (const DType dtype : {f16, bf16}) {
    std::vector<double> values(16 * 64 * 64);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto bits = static_cast<std::uint16_t>((i % 2 == 0 ? i : 65535 - i) * 40503u);
      values[i] = dtype == f16 ? static_cast<double>(static_cast<float>(Half::from_bits(bits)))
                               : static_cast<double>(static_cast<float>(BFloat16::from_bits(bits)));
    }
    check(w, {1, 16, 64, 64}, values, dtype, false, random);
  }
}

TEST(MaxPoolChannelsLast, HasTheSameBitsOnAnyNumberOfThreads) {
  const test::ThreadsGuard guard;
  std::mt19937 random(4);
  for (const Windows& w : kWindows) {
    const Shape sizes = {3, 197, w.image[0], w.image[1]};
    const Tensor x = to_channels_last(tensor(numbers(sizes.numel(), random), sizes).to(bf16)).requires_grad_();
    std::vector<std::vector<float>> seen;
    for (const int threads : {1, 2, 7}) {
      set_num_threads(threads);
      const Tensor y = pool(w, x);
      std::vector<float> bits = y.detach().to_vector<float>();
      const Tensor g = full_like(y.detach(), 1.0 / 3);
      const auto more = grad({y}, {x}, {.grad_outputs = {g}})[0].to_vector<float>();
      bits.insert(bits.end(), more.begin(), more.end());
      seen.push_back(std::move(bits));
    }
    EXPECT_EQ(seen[0], seen[1]) << w.what;
    EXPECT_EQ(seen[0], seen[2]) << w.what;
  }
}

// Means over whole images, of channels in blocks of 2048 where there are many images; each row is summed, then the
// rows.
TEST(MeanOfChannelsLastImages, AndItsGradientAgreeWithFloat64) {
  const test::ThreadsGuard guard;
  set_num_threads(2);
  std::mt19937 random(5);
  for (const Pair& image : {Pair{1, 1}, Pair{1, 9}, Pair{6, 5}}) {
    for (const std::int64_t channels : {3, 4, 5, 65, 130, 2050, 4101}) {
      for (const std::int64_t images : {1, 9}) {
        const Shape sizes = {images, channels, image[0], image[1]};
        const auto places = static_cast<std::size_t>(image[0] * image[1]);
        std::vector<double> values(static_cast<std::size_t>(sizes.numel()));
        for (double& v : values) v = static_cast<double>(random() % 2001) / 1000 - 1;
        for (const DType dtype : {f32, f16, bf16}) {
          for (const bool apart : {false, true}) {
            const std::string what = sizes.str() + " " + name(dtype) + (apart ? " apart" : "");
            const Tensor low = tensor(values, sizes).to(dtype);
            const auto x = low.contiguous().to_vector<double>();
            const Tensor in = laid_out(low, apart).requires_grad_();
            const Tensor y = adaptive_avg_pool2d(in, {1});
            const Tensor g = rand(y.sizes()).to(dtype);
            const auto got = y.detach().contiguous().to_vector<double>(), weights = g.to_vector<double>();
            const auto x_grad = grad({y}, {in}, {.grad_outputs = {g}})[0].contiguous().to_vector<double>();
            const double half_ulp = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
            const double smallest = dtype == f16 ? 0x1p-25 : 0;
            for (std::size_t i = 0; i < got.size(); ++i) {
              double sum = 0, size = 0;
              for (std::size_t k = 0; k < places; ++k) {
                sum += x[i * places + k];
                size += std::abs(x[i * places + k]);
              }
              const double n = static_cast<double>(places), mean = sum / n;
              // A rounding for each term, and one of the quotient.
              ASSERT_NEAR(got[i], mean, (n + 1) * 0x1p-24 * size / n + half_ulp * std::abs(mean) + smallest) << what;
              const double each = weights[i] / n;
              for (std::size_t k = 0; k < places; ++k) {
                ASSERT_NEAR(x_grad[i * places + k], each, (half_ulp + 0x1p-23) * each + smallest) << what;
              }
            }
          }
        }
      }
    }
  }
}

// Results of half of the last cache and more go past it.
TEST(MaxPoolChannelsLast, WritesLargeGradients) {
  constexpr std::int64_t kMost = 128 << 20;
  const std::int64_t half = last_cache_bytes() / 2;
  if (half > kMost) GTEST_SKIP() << "the last cache, of " << 2 * half << " bytes, is too large for a test";
  constexpr std::int64_t kChannels = 256, kSide = 160;
  for (const DType dtype : {f32, bf16, f16}) {
    const std::int64_t image = kChannels * kSide * kSide * static_cast<std::int64_t>(item_size(dtype));
    const std::int64_t images = half / image + 1;
    const Tensor x = to_channels_last(zeros({images, kChannels, kSide, kSide}, {.dtype = dtype})).requires_grad_();
    const Tensor y = max_pool2d(x, {2});
    Tensor g = halfstep::remainder(arange(0, y.numel()), 13).reshape(y.sizes()).to(dtype);
    g.select(0, 0).select(0, 3).select(0, 5).select(0, 7).fill_(NAN);
    const auto got = grad({y}, {x}, {.grad_outputs = {g}})[0].contiguous().to_vector<float>(),
               gs = g.to_vector<float>();
    std::size_t wrong = 0;
    for (std::size_t i = 0, j = 0; i < got.size(); ++i) {
      // Of equal values the first of a window is chosen.
      const bool chosen = i % 2 == 0 && i / kSide % 2 == 0;
      const float expected = chosen ? gs[j++] : 0;
      wrong += got[i] != expected && !(std::isnan(got[i]) && std::isnan(expected));
    }
    EXPECT_EQ(wrong, 0U) << name(dtype);
  }
}

}  // namespace
}  // namespace halfstep
