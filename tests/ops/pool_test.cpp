// SPDX-License-Identifier: Apache-2.0
// Pooling against PyTorch in float64, and every layout and dtype against that; what only values or layouts show; what
// it refuses.
#include "halfstep/ops/pool.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "halfstep/autograd/engine.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/errors.h"
#include "tests/support/golden_calls.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Pool, MatchesPyTorch) {
  for (const char* op : {"max_pool2d", "max_pool1d", "avg_pool2d", "avg_pool1d", "adaptive_avg_pool2d",
                         "adaptive_avg_pool1d", "adaptive_max_pool2d"}) {
    SCOPED_TRACE(op);
    test::check_op_goldens(op, test::golden_calls().at(op), "pooling.json");
  }
}

struct Case {
  const char* what;
  Shape sizes;
  bool exact;  // values are only moved
  std::function<Tensor(const Tensor&)> call;
};

// As many channels as take whole vectors and a rest, and fewer than a vector.
std::vector<Case> cases() {
  const auto stem = [](const Tensor& t) { return max_pool2d(t, {3}, {.stride = {2}, .padding = {1}}); };
  const auto shrunk = [](const Tensor& t) { return avg_pool2d(t, {2}); };
  return {
      {"stem", {2, 67, 9, 10}, true, stem},
      {"stem of many", {3, 130, 12, 7}, true, stem},
      {"stem of few", {2, 5, 9, 10}, true, stem},
      {"a channel", {2, 1, 9, 10}, true, stem},
      {"whole vectors", {2, 64, 9, 10}, true, stem},
      {"large window",
       {2, 70, 20, 19},
       true,
       [](const Tensor& t) {
         return max_pool2d(t, {17, 18}, {.stride = {1}});
       }},
      {"largest of all", {2, 21, 18, 17}, true, [](const Tensor& t) { return adaptive_max_pool2d(t, {1}); }},
      {"adaptive maximum",
       {2, 36, 7, 10},
       true,
       [](const Tensor& t) {
         return adaptive_max_pool2d(t, {3, 4});
       }},
      {"halved", {2, 67, 8, 10}, false, shrunk},
      {"halved in whole vectors", {2, 24, 8, 10}, false, shrunk},
      {"padded",
       {2, 19, 9, 10},
       false,
       [](const Tensor& t) { return avg_pool2d(t, {3}, {.stride = {2}, .padding = {1}, .ceil_mode = true}); }},
      {"mean in whole vectors", {3, 128, 7, 7}, false, [](const Tensor& t) { return adaptive_avg_pool2d(t, {1}); }},
      {"mean", {3, 133, 7, 7}, false, [](const Tensor& t) { return adaptive_avg_pool2d(t, {1}); }},
      {"long mean", {1, 18, 70, 65}, false, [](const Tensor& t) { return adaptive_avg_pool2d(t, {1}); }},
      {"adaptive mean",
       {2, 20, 7, 10},
       false,
       [](const Tensor& t) {
         return adaptive_avg_pool2d(t, {5, 4});
       }},
  };
}

struct Passes {
  Tensor y, x_grad;
};
Passes passes(const Case& c, const Tensor& x, const Tensor& g) {
  Tensor in = x.detach();
  in.requires_grad_();
  const Tensor y = c.call(in);
  return {y.detach(), grad({y}, {in}, {.grad_outputs = {g}})[0]};
}

// Half a unit of the last place, and the bound of a sum of k terms of size up to `largest` in float32, divided after.
void expect_within(const Tensor& got, const Tensor& exact, double sum, const std::string& what) {
  ASSERT_EQ(got.sizes(), exact.sizes()) << what;
  const double u = got.dtype() == f16 ? 0x1p-11 : got.dtype() == bf16 ? 0x1p-8 : 0x1p-24;
  const auto a = got.to_vector<double>(), b = exact.to_vector<double>();
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_LE(std::abs(a[i] - b[i]), u * std::abs(b[i]) + sum + (got.dtype() == f16 && sum > 0 ? 0x1p-25 : 0))
        << what << " element " << i << ": " << a[i] << ", expected " << b[i];
  }
}

TEST(Pool, AgreesWithFloat64InEveryLayoutAndDtype) {
  for (const Case& c : cases()) {
    manual_seed(11);
    const Tensor x = rand(c.sizes) - 0.5, g = rand(c.call(x).sizes()) + 0.5;
    for (const DType dtype : {f32, f16, bf16}) {
      const Tensor low = x.to(dtype), low_g = g.to(dtype);
      const Passes exact = passes(c, low.to(f64), low_g.to(f64));
      const auto check = [&](const Tensor& in, const Tensor& weights, const std::string& how) {
        const std::string what = std::string(c.what) + " " + name(dtype) + how;
        const Passes got = passes(c, in, weights);
        EXPECT_EQ(got.y.dtype(), dtype) << what;
        EXPECT_EQ(got.x_grad.dtype(), dtype) << what;
        // A mean of values below 1: rows of up to 70 terms, then as many rows. A gradient: at most 4 x 4 windows.
        expect_within(got.y, exact.y, c.exact ? 0 : (70 + 70 + 2) * 0x1p-24, what);
        expect_within(got.x_grad, exact.x_grad, 16 * 20 * 0x1p-24, what + ", gradient");
        return got;
      };
      check(low, low_g, " NCHW");
      const Passes nhwc = check(to_channels_last(low), to_channels_last(low_g), " NHWC");
      EXPECT_TRUE(nhwc.y.is_contiguous(MemoryFormat::channels_last)) << c.what;
      EXPECT_TRUE(nhwc.x_grad.is_contiguous(MemoryFormat::channels_last)) << c.what;
      // The gradient may lie otherwise than the image.
      check(to_channels_last(low), low_g, " NHWC, gradient NCHW");
      check(low, to_channels_last(low_g), " NCHW, gradient NHWC");
      // Every other channel of a larger image, and places that are turned around.
      Tensor larger = zeros({c.sizes[0], c.sizes[2], c.sizes[3], 2 * c.sizes[1]}, {.dtype = dtype});
      Tensor slice = larger.permute({0, 3, 1, 2}).slice(1, 0, INT64_MAX, 2);
      slice.copy_(low);
      check(slice.detach(), low_g, " strided");
      check(low.transpose(2, 3).contiguous().transpose(2, 3), low_g, " turned");
    }
  }
}

// Row-major images go some at a time, here 3 in f32 and 7 in bf16, the last ones fewer, through the kernels for
// channels-last ones.
TEST(MaxPool, OfRowMajorImagesHasTheBitsOfChannelsLastOnes) {
  const int threads = num_threads();
  const Shape sizes = {11, 64, 61, 53};
  const Case several[] = {
      {"max", sizes, true, [](const Tensor& t) { return max_pool2d(t, {3}, {.stride = {2}, .padding = {1}}); }},
      {"adaptive", sizes, true, [](const Tensor& t) {
         return adaptive_max_pool2d(t, {7, 5});
       }}};
  manual_seed(12);
  for (const Case& c : several) {
    for (const DType dtype : {f32, bf16}) {
      const Tensor x = (rand(c.sizes) - 0.5).to(dtype), g = (rand(c.call(x).sizes()) + 0.5).to(dtype);
      const Passes last = passes(c, to_channels_last(x), to_channels_last(g));
      for (const int n : {1, 3}) {
        set_num_threads(n);
        const Passes rows = passes(c, x, g);
        EXPECT_TRUE(rows.y.is_contiguous()) << c.what;
        EXPECT_TRUE(rows.x_grad.is_contiguous()) << c.what;
        EXPECT_EQ(rows.y.to_vector<double>(), last.y.to_vector<double>()) << c.what;
        EXPECT_EQ(rows.x_grad.to_vector<double>(), last.x_grad.to_vector<double>()) << c.what;
      }
      set_num_threads(threads);
    }
  }
}

// Rows of one channel that take several vectors: neighbours within a vector, within two, and further apart; windows too
// wide for that; rows that repeat each other; whole planes. Against float64, the same on any number of threads.
TEST(Pool, LongRowsAgreeWithFloat64OnAnyNumberOfThreads) {
  const test::ThreadsGuard guard;
  const std::vector<Case> long_rows = {
      {"side by side",
       {2, 3, 9, 53},
       false,
       [](const Tensor& t) { return avg_pool2d(t, {3}, {.stride = {1}, .padding = {1}, .count_include_pad = false}); }},
      {"halved", {2, 3, 8, 70}, false, [](const Tensor& t) { return avg_pool2d(t, {2}); }},
      {"far apart",
       {1, 2, 6, 211},
       false,
       [](const Tensor& t) {
         return avg_pool2d(t, {2, 3}, {.stride = {2, 5}});
       }},
      {"wide",
       {1, 3, 5, 90},
       false,
       [](const Tensor& t) {
         return avg_pool2d(t, {1, 11}, {.stride = {1, 4}});
       }},
      {"few",
       {3, 5, 10, 50},
       false,
       [](const Tensor& t) {
         return adaptive_avg_pool2d(t, {3, 3});
       }},
      {"many",
       {2, 3, 5, 20},
       false,
       [](const Tensor& t) {
         return adaptive_avg_pool2d(t, {7, 45});
       }},
      {"all", {3, 301, 7, 5}, false, [](const Tensor& t) { return adaptive_avg_pool2d(t, {1}); }},
      {"all of a row", {3, 2, 1, 33}, false, [](const Tensor& t) { return adaptive_avg_pool2d(t, {1}); }},
      {"a long plane", {1, 2, 64, 65}, false, [](const Tensor& t) { return adaptive_avg_pool2d(t, {1}); }}};
  for (const Case& c : long_rows) {
    manual_seed(13);
    const Tensor x = rand(c.sizes) - 0.5, g = rand(c.call(x).sizes()) + 0.5;
    for (const DType dtype : {f32, f16, bf16}) {
      const Tensor low = x.to(dtype), low_g = g.to(dtype);
      const Passes exact = passes(c, low.to(f64), low_g.to(f64));
      std::vector<std::vector<double>> bits;
      for (const int threads : {1, 2, 5}) {
        set_num_threads(threads);
        const Passes got = passes(c, low, low_g);
        const std::string what = std::string(c.what) + " " + name(dtype);
        expect_within(got.y, exact.y, (70 + 70 + 2) * 0x1p-24, what);
        expect_within(got.x_grad, exact.x_grad, 16 * 20 * 0x1p-24, what + ", gradient");
        bits.push_back(got.y.to_vector<double>());
        const auto more = got.x_grad.to_vector<double>();
        bits.back().insert(bits.back().end(), more.begin(), more.end());
      }
      EXPECT_EQ(bits[0], bits[1]) << c.what;
      EXPECT_EQ(bits[0], bits[2]) << c.what;
    }
  }
}

// Windows at the edges have fewer places than the others.
TEST(Pool, InfinityStaysInItsWindows) {
  for (std::int64_t column = 0; column < 40; ++column) {
    Tensor x = ones({1, 1, 4, 40});
    x.select(3, column).fill_(kInfinity);
    const auto y = avg_pool2d(x, {3}, {.stride = {1}, .padding = {1}, .count_include_pad = false}).to_vector<double>();
    for (std::int64_t i = 0; i < 160; ++i) {
      const bool beside = std::abs(i % 40 - column) <= 1;
      EXPECT_EQ(y[static_cast<std::size_t>(i)], beside ? kInfinity : 1) << column << " " << i;
    }
  }
}

TEST(Pool, KeepsAGradientInFloat32WhereTheInputIsACast) {
  Tensor x = to_channels_last(rand({2, 20, 6, 6}) - 0.5).requires_grad_();
  const Tensor low = x.to(bf16);
  for (const Tensor& y : {max_pool2d(low, {3}, {.stride = {1}}), avg_pool2d(low, {3}, {.stride = {1}})}) {
    const Tensor g = grad({y}, {x}, {.grad_outputs = {full_like(y, 1 + 0x1p-7)}, .retain_graph = true})[0];
    ASSERT_EQ(g.dtype(), f32);
    // Sums of up to nine gradients have more digits than bf16.
    EXPECT_NE(g.to(bf16).to(f32).to_vector<float>(), g.to_vector<float>());
  }
}

TEST(MaxPool, ChoosesTheFirstOfEqualOnesAndTheLastNaN) {
  const double nan = std::nan("");
  const std::vector<double> rows = {1,   1, 2,          2,          1,   1, 2,          -kInfinity,
                                    nan, 0, -kInfinity, -kInfinity, nan, 3, -kInfinity, -kInfinity};
  for (const std::int64_t channels : {1, 18}) {
    for (const DType dtype : {f32, f64, f16, bf16}) {
      const Tensor x = to_channels_last(tensor(rows, {1, 1, 4, 4}).to(dtype).expand({1, channels, 4, 4}).clone());
      const auto [values, indices] = max_pool2d_with_indices(x, {2});
      const auto v = values.contiguous().to_vector<double>();
      const auto at = indices.contiguous().to_vector<std::int64_t>();
      for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
        EXPECT_EQ(v[4 * c], 1);
        EXPECT_EQ(v[4 * c + 1], 2);
        EXPECT_TRUE(std::isnan(v[4 * c + 2]));
        EXPECT_EQ(v[4 * c + 3], -kInfinity);
        EXPECT_EQ(std::vector<std::int64_t>(at.begin() + static_cast<std::ptrdiff_t>(4 * c),
                                            at.begin() + static_cast<std::ptrdiff_t>(4 * c + 4)),
                  (std::vector<std::int64_t>{0, 2, 12, 10}));
      }
    }
  }
}

TEST(MaxPool, KeepsOneByteAResult) {
  const Tensor x = rand({1, 8, 40, 40}).requires_grad_();
  struct Index : OpObserver {
    Index() { add_observer(this); }
    ~Index() override { remove_observer(this); }
    void after_call(const ObservedCall& call) override {
      if (call.outputs.size() == 2) dtype = call.outputs[1]->dtype();
    }
    DType dtype = f64;
  } seen;
  max_pool2d(x, {16});
  EXPECT_EQ(seen.dtype, u8);
  max_pool2d(x, {16, 17});
  EXPECT_EQ(seen.dtype, i32);
  adaptive_max_pool2d(x, {3});
  EXPECT_EQ(seen.dtype, u8);
  adaptive_max_pool2d(x, {1});
  EXPECT_EQ(seen.dtype, i32);
}

TEST(MaxPool, OfAWindowWithoutPlacesIsMinusInfinityWithoutAGradient) {
  // Dilated beyond both edges.
  for (const std::int64_t channels : {1, 16}) {
    const Tensor x = ones({1, channels, 2, 1}).requires_grad_();
    const Tensor y = max_pool2d(x, {2, 1}, {.padding = {1, 0}, .dilation = {3, 1}});
    ASSERT_EQ(y.sizes(), Shape({1, channels, 1, 1}));
    EXPECT_EQ(y.to_vector<double>(), std::vector<double>(static_cast<std::size_t>(channels), -kInfinity));
    const Tensor g = grad({y}, {x}, {.grad_outputs = {ones_like(y).requires_grad_()}, .create_graph = true})[0];
    EXPECT_EQ(g.to_vector<double>(), std::vector<double>(static_cast<std::size_t>(2 * channels), 0.0));
  }
}

TEST(MaxPool, IndicesReadTheValues) {
  const Tensor x = rand({2, 3, 9, 8});
  const auto [values, indices] = max_pool2d_with_indices(x[0], {3, 2}, {.stride = {2}, .padding = {1}});
  EXPECT_EQ(indices.dtype(), i64);
  EXPECT_EQ(values.sizes(), Shape({3, 5, 5}));
  const auto v = values.to_vector<float>(), all = x[0].to_vector<float>();
  const auto at = indices.to_vector<std::int64_t>();
  for (std::size_t i = 0; i < v.size(); ++i) EXPECT_EQ(v[i], all[i / 25 * 72 + static_cast<std::size_t>(at[i])]);
}

TEST(AvgPool, DividesExactly) {
  // A sum of nine equal integers divided by nine is that integer: a product with 1 / 9 may not be.
  for (const std::int64_t channels : {1, 24}) {
    for (const float v : {3.0f, 41.0f, 16777215.0f / 9}) {
      const Tensor x = to_channels_last(full({1, channels, 3, 3}, std::floor(v)));
      const Tensor y = avg_pool2d(x, {3});
      for (const float got : y.to_vector<float>()) EXPECT_EQ(got, std::floor(v));
    }
  }
}

// Means of whole images, around the size from which several threads share one, of odd sizes and of many places; against
// plain sums. Float32 adds up blocks of at most 128 values below 1/2 at a time, or rows and then these.
TEST(AvgPool, OfTheWholeImageKeepsItsDigits) {
  manual_seed(12);
  for (const Shape& sizes : {Shape{1, 1, 1, 15}, Shape{2, 3, 3, 5}, Shape{2, 3, 4, 4}, Shape{2, 67, 7, 7},
                             Shape{1, 5, 129, 127}, Shape{2, 64, 33, 31}, Shape{1, 3, 1, 70001}}) {
    const Tensor image = rand(sizes) - 0.5;
    const std::int64_t planes = sizes[0] * sizes[1], places = sizes[2] * sizes[3];
    for (const DType dtype : {f32, f64, f16, bf16}) {
      const Tensor x = image.to(dtype);
      const auto v = x.to_vector<double>();
      std::vector<double> sums(static_cast<std::size_t>(planes));
      for (std::size_t i = 0; i < v.size(); ++i) sums[i / static_cast<std::size_t>(places)] += v[i];
      const auto check = [&](const Tensor& y, double divisor) {
        ASSERT_EQ(y.sizes(), Shape({sizes[0], sizes[1], 1, 1}));
        ASSERT_EQ(y.dtype(), dtype);
        const auto got = y.to_vector<double>();
        const double rounding = dtype == f64 ? 1e-14 : dtype == f32 ? 0x1p-24 : dtype == f16 ? 0x1p-11 : 0x1p-8;
        const double sum = (dtype == f64 ? 1e-13 : 260 * 0x1p-24) * static_cast<double>(places) / divisor / 2;
        for (std::size_t i = 0; i < got.size(); ++i) {
          const double exact = sums[i] / divisor;
          ASSERT_NEAR(got[i], exact, rounding * std::abs(exact) + sum + (dtype == f16 ? 0x1p-25 : 0))
              << name(dtype) << ", plane " << i << " of " << places << " places";
        }
      };
      const auto count = static_cast<double>(places);
      const std::vector<std::int64_t> whole = {sizes[2], sizes[3]};
      for (const Tensor& t : {x, to_channels_last(x), x.transpose(2, 3).contiguous().transpose(2, 3)}) {
        check(adaptive_avg_pool2d(t, {1}), count);
        check(avg_pool2d(t, whole), count);
        check(avg_pool2d(t, whole, {.divisor_override = 3 * places}), 3 * count);
      }
      EXPECT_TRUE(adaptive_avg_pool2d(to_channels_last(x), {1}).is_contiguous(MemoryFormat::channels_last));
    }
  }
}

TEST(AvgPool, OfTheWholeImageGivesTheGradientTheImagesLayout) {
  for (const auto format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
    const Tensor x = rand({2, 16, 5, 5}).contiguous(format).requires_grad_();
    for (const Tensor& y : {adaptive_avg_pool2d(x, {1}), avg_pool2d(x, {5}), max_pool2d(x, {5})}) {
      // A gradient that went through flatten no longer knows.
      const Tensor g = grad({flatten(y, 1)}, {x}, {.grad_outputs = {ones({2, 16})}, .retain_graph = true})[0];
      EXPECT_TRUE(g.is_contiguous(format));
    }
  }
}

TEST(Pool, GivesTheSameBitsWithAnyNumberOfThreads) {
  const int threads = num_threads();
  const Tensor x = to_channels_last((rand({3, 70, 15, 17}) - 0.5).to(bf16));
  for (const Case& c : cases()) {
    if (c.sizes[2] > 17 || std::string(c.what) == "halved") continue;
    const Tensor g = rand(c.call(x).sizes()).to(bf16);
    set_num_threads(1);
    const Passes one = passes(c, x, g);
    set_num_threads(3);
    const Passes three = passes(c, x, g);
    EXPECT_EQ(one.y.to_vector<float>(), three.y.to_vector<float>()) << c.what;
    EXPECT_EQ(one.x_grad.to_vector<float>(), three.x_grad.to_vector<float>()) << c.what;
  }
  set_num_threads(threads);
}

TEST(Pool, TakesAnImageWithoutBatchAndNoImages) {
  const Tensor x = rand({3, 6, 5});
  EXPECT_EQ(max_pool2d(x, {2}).sizes(), Shape({3, 3, 2}));
  EXPECT_EQ(max_pool2d(x, {2}).to_vector<float>(), max_pool2d(x.unsqueeze(0), {2}).to_vector<float>());
  EXPECT_EQ(avg_pool1d(x, {2}).sizes(), Shape({3, 6, 2}));
  EXPECT_EQ(adaptive_avg_pool2d(x, {2, -1}).sizes(), Shape({3, 2, 5}));
  EXPECT_EQ(max_pool2d(zeros({0, 3, 6, 5}), {2}).sizes(), Shape({0, 3, 3, 2}));
  EXPECT_EQ(adaptive_avg_pool2d(zeros({2, 0, 6, 5}), {1}).sizes(), Shape({2, 0, 1, 1}));
}

TEST(Pool, SaysWhatItExpects) {
  using test::error_of;
  const Tensor x = zeros({2, 3, 8, 6});
  EXPECT_EQ(error_of([&] { max_pool2d(x[0][0], {2}); }),
            "max_pool2d: expected an input [N, C, H, W] or [C, H, W] with at least one place, got [8, 6]");
  EXPECT_EQ(error_of([&] { max_pool1d(x, {2}); }),
            "max_pool1d: expected an input [N, C, L] or [C, L] with at least one place, got [2, 3, 8, 6]");
  EXPECT_EQ(error_of([&] { max_pool2d(x.to(i64), {2}); }),
            "max_pool2d: expected f32, f64, f16 or bf16, got i64 [2, 3, 8, 6]");
  EXPECT_EQ(error_of([&] {
              max_pool2d(x, {2, 2, 2});
            }),
            "max_pool2d: expected 1 or 2 numbers for kernel, got [2, 2, 2]");
  EXPECT_EQ(error_of([&] { avg_pool2d(x, {0}); }), "avg_pool2d: expected kernel of at least 1, got [0]");
  EXPECT_EQ(error_of([&] { avg_pool2d(x, {2}, {.stride = {0}}); }),
            "avg_pool2d: expected stride of at least 1, got [0]");
  EXPECT_EQ(error_of([&] { max_pool2d(x, {3}, {.padding = {2}}); }),
            "max_pool2d: expected a padding of at most half of the kernel [3], got [2]");
  EXPECT_EQ(error_of([&] {
              max_pool2d(x, {9, 2}, {.dilation = {1, 2}});
            }),
            "max_pool2d: expected an input that holds a window of 9 x 3 places, got 8 x 6 and padding 0, 0");
  EXPECT_EQ(error_of([&] { avg_pool2d(x, {2}, {.divisor_override = 0}); }),
            "avg_pool2d: expected a divisor other than 0");
  EXPECT_EQ(error_of([&] { adaptive_avg_pool2d(x, {0}); }),
            "adaptive_avg_pool2d: expected an output size of at least 1, got [0]");
  EXPECT_EQ(error_of([&] {
              adaptive_max_pool2d(x, {1, 2, 3});
            }),
            "adaptive_max_pool2d: expected 1 or 2 numbers for output size, got [1, 2, 3]");
  EXPECT_EQ(error_of([&] { adaptive_avg_pool1d(x[0], {-2}); }),
            "adaptive_avg_pool1d: expected output size of at least -1, got [-2]");
}

}  // namespace
}  // namespace halfstep
