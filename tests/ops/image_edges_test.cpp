// SPDX-License-Identifier: Apache-2.0
// What holds for all ops on images at the edges of what they take: elements that share memory, numbers near the ends of
// their range, windows larger than the image, derivatives of derivatives under autocast.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/resample.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;

struct ImageOp {
  const char* what;
  std::function<Tensor(const Tensor&)> call;
};

// For images of four channels.
std::vector<ImageOp> image_ops(DType dtype) {
  manual_seed(5);
  const DType inner = dtype == f64 ? f64 : f32;
  const Tensor filters = randn({6, 4, 3, 2}, {.dtype = f64}).to(dtype);
  const Tensor grouped = randn({4, 2, 2, 3}, {.dtype = f64}).to(dtype);
  const Tensor gamma = rand({4}, {.dtype = inner}) + 0.5, beta = randn({4}, {.dtype = inner});
  const Tensor mean = randn({4}, {.dtype = inner}), var = rand({4}, {.dtype = inner}) + 0.5;
  return {
      {"conv2d", [=](const Tensor& x) { return conv2d(x, filters, {}, {.padding = {1}}); }},
      {"conv2d, strides and groups",
       [=](const Tensor& x) { return conv2d(x, grouped, {}, {.stride = {2}, .groups = 2}); }},
      {"conv_transpose2d", [=](const Tensor& x) { return conv_transpose2d(x, grouped, {}, {.groups = 2}); }},
      {"max_pool2d",
       [](const Tensor& x) {
         return max_pool2d(x, {3, 2}, {.stride = {2, 1}, .padding = {1}});
       }},
      {"avg_pool2d", [](const Tensor& x) { return avg_pool2d(x, {3}, {.stride = {2}, .ceil_mode = true}); }},
      {"adaptive_avg_pool2d",
       [](const Tensor& x) {
         return adaptive_avg_pool2d(x, {3, 2});
       }},
      {"adaptive_max_pool2d",
       [](const Tensor& x) {
         return adaptive_max_pool2d(x, {3, 2});
       }},
      {"interpolate",
       [](const Tensor& x) {
         return interpolate(x, {.size = {3, 8}});
       }},
      {"interpolate, bilinear",
       [](const Tensor& x) {
         return interpolate(x, {.size = {7, 3}, .mode = InterpolateMode::bilinear});
       }},
      {"pad",
       [](const Tensor& x) {
         return pad(x, {1, -1, 0, 2});
       }},
      {"pad, reflected",
       [](const Tensor& x) {
         return pad(x, {2, 1, -1, 2}, PadMode::reflect);
       }},
      {"batch_norm", [=](const Tensor& x) { return batch_norm(x, {.weight = gamma, .bias = beta, .training = true}); }},
      {"batch_norm_act",
       [=](const Tensor& x) {
         return batch_norm_act(x, {.weight = gamma, .bias = beta, .training = true}, Activation::relu, x);
       }},
      {"batch_norm_act, frozen",
       [=](const Tensor& x) {
         return batch_norm_act(x, {.weight = gamma, .bias = beta, .running_mean = mean, .running_var = var});
       }},
  };
}

double largest(const Values& values) {
  double most = 1;
  for (const double v : values) most = std::max(most, std::abs(v));
  return most;
}

// Sums of at most some hundred terms in another order: each rounds to at most the sum of magnitudes, which for these
// operands is less than a hundred of the largest results.
void expect_alike(const Tensor& got, const Tensor& wanted, const std::string& what) {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  const Values a = got.detach().to_vector<double>(), b = wanted.detach().to_vector<double>();
  const double u = got.dtype() == f64 ? 0x1p-53 : got.dtype() == f32 ? 0x1p-24 : got.dtype() == f16 ? 0x1p-11 : 0x1p-8;
  const double room = (2 * u + (got.dtype() == f64 ? 0x1p-53 : 0x1p-24) * 100) * largest(b);
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], room) << what << " element " << i;
}

TEST(ImageEdges, ElementsThatShareMemoryAreLikeCopies) {
  const Shape sizes{3, 4, 6, 5};
  for (const DType dtype : {f32, f64, bf16}) {
    for (const ImageOp& op : image_ops(dtype)) {
      // Bits are dimensions: batch, channels, rows, columns.
      for (const int repeated : {1, 2, 4, 8, 12, 15}) {
        manual_seed(static_cast<std::uint64_t>(repeated));
        Shape few = sizes;
        for (int d = 0; d < 4; ++d) {
          if (repeated >> d & 1) few[d] = 1;
        }
        // Statistics of one value are of no use: what they're divided by is next to nothing.
        const bool flat = (repeated & 13) == 13;
        if (flat && std::string(op.what).starts_with("batch_norm")) continue;
        const std::string what = std::string(name(dtype)) + ' ' + op.what + ' ' + few.str();
        const Tensor view = randn(few, {.dtype = f64}).to(dtype).expand(sizes);
        const Tensor shared = view.detach().requires_grad_(), copied = view.contiguous().requires_grad_();
        const Tensor y = op.call(shared), wanted = op.call(copied);
        expect_alike(y, wanted, what);
        Shape once = y.sizes();
        once[2] = once[3] = 1;
        const Tensor g = randn(once, {.dtype = f64}).to(y.dtype()).expand(y.sizes());
        expect_alike(grad({y}, {shared}, {.grad_outputs = {g}})[0],
                     grad({wanted}, {copied}, {.grad_outputs = {g.contiguous()}})[0], what + ": gradient");
      }
    }
  }
}

TEST(ImageEdges, NumbersThatDoNotFitAreRefused) {
  using test::error_of;
  constexpr std::int64_t kEnd = std::numeric_limits<std::int64_t>::max(), kMost = INT32_MAX;
  const Tensor x = zeros({1, 2, 4, 4}), w = zeros({2, 2, 3, 3});
  EXPECT_EQ(error_of([&] { conv2d(x, w, {}, {.stride = {kMost + 1}}); }),
            "conv2d: expected a stride of at most 2147483647, got [2147483648]");
  for (const std::int64_t huge : {kMost + 1, kEnd}) {
    EXPECT_THROW(conv2d(x, w, {}, {.padding = {huge}}), ShapeError);
    EXPECT_THROW(conv2d(x, w, {}, {.dilation = {huge}}), ShapeError);
    EXPECT_THROW(conv2d(x, w, {}, {.groups = huge}), ShapeError);
    EXPECT_THROW(conv_transpose2d(x, w, {}, {.stride = {huge}}), ShapeError);
    EXPECT_THROW(max_pool2d(x, {huge}), ShapeError);
    EXPECT_THROW(max_pool2d(x, {2}, {.stride = {huge}}), ShapeError);
    EXPECT_THROW(max_pool2d(x, {2}, {.dilation = {huge}}), ShapeError);
    EXPECT_THROW(avg_pool2d(x, {2}, {.padding = {huge}}), ShapeError);
    EXPECT_THROW(adaptive_avg_pool2d(x, {huge}), ShapeError);
    EXPECT_THROW(interpolate(x, {.size = {huge}}), ShapeError);
    EXPECT_THROW(pad(x, {kEnd, huge}), ShapeError);
    EXPECT_THROW(pad(x, {-kEnd - 1, huge}), ShapeError);
  }
  // What fits one by one may not together.
  EXPECT_THROW(conv2d(x, w, {}, {.dilation = {kMost}}), ShapeError);
  EXPECT_THROW(max_pool2d(x, {4}, {.dilation = {kMost}}), ShapeError);
  EXPECT_EQ(error_of([&] { max_pool2d(x, {1 << 16}, {.padding = {1 << 15}}); }),
            "max_pool2d: expected a kernel of at most 2147483647 places, got [65536]");
  EXPECT_EQ(error_of([&] {
              pad(zeros({2}, {.dtype = f64}), {0, std::int64_t{1} << 60});
            }),
            "pad: a result [1152921504606846978] has too many elements");
  EXPECT_THROW(interpolate(x, {.size = {kMost}}), ShapeError);
  EXPECT_THROW(conv_transpose2d(x, w, {}, {.stride = {kMost}}), ShapeError);
  // Nothing is not too much.
  EXPECT_EQ(pad(zeros({0, 2}), {0, std::int64_t{1} << 60}).numel(), 0);
}

// oneDNN takes numbers in 32 bits, where these don't fit: the results are those of numbers as good as these.
TEST(ImageEdges, WindowsFarApart) {
  manual_seed(6);
  constexpr std::int64_t kMost = INT32_MAX;
  for (const DType dtype : {f32, f16}) {
    const Tensor x = randn({2, 4, 5, 6}, {.dtype = dtype}).requires_grad_();
    const Tensor w = randn({6, 4, 2, 2}, {.dtype = dtype}).requires_grad_();
    const auto check = [&](const ConvFuncOptions& far, const ConvFuncOptions& near, const char* what) {
      const Tensor y = conv2d(x, w, {}, far), wanted = conv2d(x, w, {}, near);
      expect_alike(y, wanted, what);
      const Tensor g = randn(y.sizes(), {.dtype = f64}).to(dtype);
      const auto a = grad({y}, {x, w}, {.grad_outputs = {g}}), b = grad({wanted}, {x, w}, {.grad_outputs = {g}});
      expect_alike(a[0], b[0], what);
      expect_alike(a[1], b[1], what);
    };
    // One window, at the image's corner.
    check({.stride = {kMost}}, {.stride = {100}}, "stride");
    // Windows around nothing but the middle one.
    check({.stride = {kMost}, .padding = {kMost}}, {.stride = {100}, .padding = {100}}, "padding");
    // The window's first row and column of elements see padding.
    check({.stride = {1 << 30}, .padding = {1 << 30}, .dilation = {1 << 30}},
          {.stride = {1 << 10}, .padding = {1 << 10}, .dilation = {1 << 10}}, "dilation");
    const Tensor pooled = max_pool2d(x, {1}, {.stride = {kMost}});
    EXPECT_EQ(pooled.to_vector<float>(), x.slice(2, 0, 1).slice(3, 0, 1).to_vector<float>());
  }
}

// The number of a place in its window needs more than the tables of small windows.
TEST(ImageEdges, WindowsLargerThanTheImage) {
  manual_seed(7);
  for (const DType dtype : {f32, f64, f16}) {
    for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
      const Tensor x = randn({2, 5, 4, 3}, {.dtype = dtype}).contiguous(format).requires_grad_();
      for (const std::int64_t kernel : {200, 40000}) {
        // Every window sees the whole image: there are as many as rows and columns, and one more.
        const Tensor y = max_pool2d(x, {kernel, kernel}, {.stride = {1}, .padding = {kernel / 2}});
        EXPECT_EQ(y.sizes(), (Shape{2, 5, 5, 4}));
        const Tensor most = amax(x, {2, 3}, {.keepdim = true});
        EXPECT_EQ(y.to_vector<double>(), most.expand(y.sizes()).to_vector<double>());
        const Tensor g = ones(y.sizes(), {.dtype = dtype}).requires_grad_();
        const Tensor d = grad({y}, {x}, {.grad_outputs = {g}, .create_graph = true})[0];
        EXPECT_EQ(d.to_vector<double>(), (eq(x, most).to(dtype) * 20).to_vector<double>());
        // And back: what g gets is picked where the gradient went.
        const Tensor back = grad({d}, {g}, {.grad_outputs = {x.detach()}})[0];
        EXPECT_EQ(back.to_vector<double>(), y.to_vector<double>());
        const Tensor mean_of =
            avg_pool2d(x, {kernel, kernel}, {.stride = {1}, .padding = {kernel / 2}, .count_include_pad = false});
        expect_alike(mean_of, mean(x, {2, 3}, {.keepdim = true}).expand(y.sizes()), "avg_pool2d");
      }
    }
  }
}

// Many threads share the filters of a wide layer unevenly: the last shares are of nothing.
TEST(ImageEdges, SharesOfNothingInAWeightGradient) {
  const int threads = num_threads();
  manual_seed(8);
  const Tensor x = randn({64, 16, 1, 1}).contiguous(MemoryFormat::channels_last);
  const Tensor w = randn({3585, 16, 1, 1}).requires_grad_();
  const Tensor g = randn({64, 3585, 1, 1});
  const auto gradient = [&] { return grad({conv2d(x, w)}, {w}, {.grad_outputs = {g}})[0]; };
  set_num_threads(1);
  const Tensor one = gradient();
  set_num_threads(64);
  const Tensor many = gradient();
  set_num_threads(threads);
  expect_alike(many, one, "64 threads");
}

// Second derivatives of what ran in 16 bits: those of float64 to some roundings of 16 bits.
TEST(ImageEdges, SecondDerivativesUnderAutocast) {
  for (const DType low : {f16, bf16}) {
    manual_seed(9);
    const Tensor x64 = randn({2, 4, 6, 6}, {.dtype = f64}) * 0.5, w64 = randn({4, 4, 3, 3}, {.dtype = f64}) * 0.2;
    const Tensor gamma64 = rand({4}, {.dtype = f64}) + 0.5;
    const auto derivative = [&](DType dtype, bool on) {
      const Tensor x = x64.to(dtype).requires_grad_(), w = w64.to(dtype).requires_grad_();
      const Tensor gamma = gamma64.to(dtype).requires_grad_();
      const amp::Autocast region{{.dtype = low, .enabled = on}};
      Tensor y = batch_norm_act(conv2d(x, w), {.weight = gamma, .training = true}, Activation::relu);
      y = adaptive_avg_pool2d(max_pool2d(y, {2}), {1});
      const Tensor loss = sum((y * y).to(dtype));
      const auto first = grad({loss}, {x, w, gamma}, {.create_graph = true});
      Tensor norm = sum(first[0] * first[0]);
      for (int i = 1; i < 3; ++i) {
        EXPECT_EQ(first[static_cast<std::size_t>(i)].dtype(), dtype);
        norm = norm + sum(first[static_cast<std::size_t>(i)] * first[static_cast<std::size_t>(i)]);
      }
      return grad({norm}, {x, w, gamma});
    };
    const auto got = derivative(f32, true), exact = derivative(f64, false);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].dtype(), f32);
      const Values a = got[i].to_vector<double>(), b = exact[i].to_vector<double>();
      double error = 0, size = 0;
      for (std::size_t k = 0; k < a.size(); ++k) error += (a[k] - b[k]) * (a[k] - b[k]), size += b[k] * b[k];
      // Rounding moves the maxima of some windows with nearly equal ones: a bound of the whole, not of elements.
      EXPECT_LT(std::sqrt(error / size), low == f16 ? 0.02 : 0.15) << name(low) << ' ' << i;
    }
  }
}

}  // namespace
}  // namespace halfstep
