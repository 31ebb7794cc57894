// SPDX-License-Identifier: Apache-2.0
// Convolutions against float64 in every layout and dtype, at sizes that take several blocks; and what they refuse.
// That float64 is right: gradcheck of the cases, and goldens.
#include "halfstep/ops/conv.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/errors.h"
#include "tests/support/golden_calls.h"
#include "tests/support/op_golden.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

struct Case {
  Shape input, weight;
  ConvFuncOptions options;
  bool bias = false;
};

// Kinds of layers that networks have, and odd ones.
std::vector<Case> cases() {
  return {
      {{3, 3, 32, 32}, {16, 3, 3, 3}, {.padding = {1}}, true},
      {{5, 16, 14, 14}, {32, 16, 3, 3}, {.stride = {2}, .padding = {1}}},
      {{2, 64, 9, 7}, {32, 64, 1, 1}, {}},
      {{3, 32, 9, 9}, {16, 32, 1, 1}, {.stride = {2}}, true},
      {{2, 3, 40, 40}, {8, 3, 7, 7}, {.stride = {2}, .padding = {3}}},
      {{3, 24, 12, 12}, {24, 1, 3, 3}, {.stride = {1}, .padding = {1}, .groups = 24}},
      {{2, 17, 11, 13}, {17, 1, 3, 3}, {.stride = {2}, .padding = {1}, .groups = 17}, true},
      {{2, 12, 10, 8}, {20, 3, 3, 3}, {.padding = {2}, .dilation = {2}, .groups = 4}},
      {{2, 5, 9, 8}, {7, 5, 2, 4}, {.stride = {2, 3}, .padding = {0, 2}}, true},
      // Several blocks of images, the last one smaller.
      {{7, 32, 64, 64}, {8, 32, 1, 1}, {}, true},
      {{1, 1, 5, 5}, {1, 1, 5, 5}, {}},
      {{2, 4, 1, 1}, {3, 4, 3, 3}, {.padding = {1}}},
      // Results of one channel, or of one place, which lie the same in every layout.
      {{2, 20, 6, 5}, {1, 20, 1, 1}, {}, true},
      {{2, 20, 6, 5}, {1, 20, 3, 3}, {.padding = {1}}},
      {{3, 24, 4, 4}, {8, 24, 4, 4}, {}},
  };
}

std::string str(const Case& c) {
  return c.input.str() + " * " + c.weight.str() + " stride " + c.options.stride.str() + " groups " +
         std::to_string(c.options.groups);
}

// Each element within half a unit of the last place of the exact one (which is of these rounded operands) plus the
// bound gamma_k of a sum of k products in float32, k terms |a||b| of which are `magnitudes`.
void expect_within(const Tensor& got, const Tensor& exact, const Tensor& magnitudes, double k,
                   const std::string& what) {
  const double u = got.dtype() == f16 ? 0x1p-11 : got.dtype() == bf16 ? 0x1p-8 : 0x1p-24;
  const double tiny = got.dtype() == f16 ? 0x1p-25 : 0;
  const auto x = got.detach().to_vector<double>(), y = exact.detach().to_vector<double>(),
             m = magnitudes.detach().to_vector<double>();
  ASSERT_EQ(x.size(), y.size()) << what;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double sum = (k + 2) * 0x1p-24 * m[i];
    ASSERT_LE(std::abs(x[i] - y[i]), u * (std::abs(y[i]) + sum) + sum + tiny)
        << what << " element " << i << ' ' << y[i];
  }
}

struct Products {
  Tensor y, x_grad, weight_grad, bias_grad;
};
Products products(const Case& c, const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& g) {
  Tensor in = x.detach(), weight = w.detach(), bias = b.defined() ? b.detach() : b;
  in.requires_grad_();
  weight.requires_grad_();
  std::vector<Tensor> leaves{in, weight};
  if (bias.defined()) leaves.push_back(bias.requires_grad_());
  const Tensor y = conv2d(in, weight, bias, c.options);
  const auto grads = grad({y}, leaves, {.grad_outputs = {g.defined() ? g : ones_like(y)}});
  return {y.detach(), grads[0], grads[1], bias.defined() ? grads[2] : Tensor()};
}

TEST(Conv, MatchesPyTorch) {
  for (const char* op : {"conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"}) {
    test::check_op_goldens(op, test::golden_calls().at(op), "conv.json");
  }
}

TEST(Conv, AgreesWithFloat64InEveryLayoutAndDtype) {
  for (const Case& c : cases()) {
    manual_seed(7);
    const Tensor x = randn(c.input), w = randn(c.weight), b = c.bias ? randn({c.weight[0]}) : Tensor();
    const Tensor g = randn(conv2d(x, w, b, c.options).sizes());
    for (const DType dtype : {f32, f16, bf16}) {
      const auto rounded = [&](const Tensor& t) { return t.defined() ? t.to(dtype) : t; };
      const auto wide = [&](const Tensor& t) { return t.defined() ? rounded(t).to(f64) : t; };
      const auto size = [&](const Tensor& t) { return t.defined() ? abs(wide(t)) : t; };
      const Products exact = products(c, wide(x), wide(w), wide(b), wide(g));
      const Products terms = products(c, size(x), size(w), size(b), size(g));
      const double inner = static_cast<double>(c.weight[1] * c.weight[2] * c.weight[3]);
      const double back = static_cast<double>(c.weight[0] * c.weight[2] * c.weight[3] / c.options.groups);
      const double places = static_cast<double>(g.numel() / g.size(1));
      for (const auto format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
        for (const auto weight_format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
          const std::string what = str(c) + " " + name(dtype) +
                                   (format == MemoryFormat::contiguous ? " NCHW" : " NHWC") +
                                   (weight_format == MemoryFormat::contiguous ? " OIHW" : " OHWI");
          const Products got =
              products(c, rounded(x).contiguous(format), rounded(w).contiguous(weight_format), rounded(b), rounded(g));
          EXPECT_EQ(got.y.dtype(), dtype) << what;
          expect_within(got.y, exact.y, terms.y, inner + 1, what);
          expect_within(got.x_grad, exact.x_grad, terms.x_grad, back, what + ", input's gradient");
          expect_within(got.weight_grad, exact.weight_grad, terms.weight_grad, places, what + ", weight's gradient");
          EXPECT_TRUE(got.weight_grad.is_contiguous(weight_format)) << what;
          if (format == MemoryFormat::channels_last) {
            EXPECT_TRUE(got.y.is_contiguous(format)) << what;
            EXPECT_TRUE(got.x_grad.is_contiguous(format)) << what;
          }
        }
      }
    }
  }
}

// Shares of filters and columns are laid out by the number of threads: more than filters, columns or both divide by.
TEST(Conv, SumsWeightGradientsOnAnyNumberOfThreads) {
  manual_seed(11);
  const int threads = num_threads();
  const std::vector<Case> some = {{{2, 40, 3, 3}, {70, 40, 1, 1}, {}},
                                  {{3, 20, 9, 9}, {130, 20, 3, 3}, {.stride = {2}, .padding = {1}}},
                                  {{1, 3, 17, 13}, {5, 3, 5, 4}, {.stride = {2}, .padding = {3}, .dilation = {1, 2}}},
                                  {{2, 600, 2, 2}, {30, 600, 1, 1}, {}}};
  for (const Case& c : some) {
    const Tensor x = randn(c.input), w = randn(c.weight), g = randn(conv2d(x, w, {}, c.options).sizes());
    const Products exact = products(c, x.to(f64), w.to(f64), {}, g.to(f64));
    const Products terms = products(c, abs(x.to(f64)), w.to(f64), {}, abs(g.to(f64)));
    for (const int n : {1, 2, 3, 4, 8}) {
      set_num_threads(n);
      const auto last = MemoryFormat::channels_last;
      const Products got = products(c, x.contiguous(last), w.contiguous(last), {}, g.contiguous(last));
      expect_within(got.weight_grad, exact.weight_grad, terms.weight_grad, static_cast<double>(g.numel() / g.size(1)),
                    str(c) + " on threads: " + std::to_string(n));
    }
    set_num_threads(threads);
  }
}

// Whole images, bands of rows where there are fewer images than threads, and sums of several terms: of windows with
// strides, in which a band could begin in another phase, and of 14 bands, which 16 threads share.
TEST(Conv, HasTheSameBitsOnAnyNumberOfThreads) {
  manual_seed(12);
  const test::ThreadsGuard guard;
  const std::vector<Case> some = {{{1, 3, 63, 63}, {32, 3, 7, 7}, {.stride = {2}, .padding = {3}}},
                                  {{2, 64, 28, 28}, {64, 64, 3, 3}, {.stride = {2}, .padding = {1}}},
                                  {{2, 96, 14, 14}, {96, 96, 3, 3}, {.stride = {2}, .padding = {1}}, true},
                                  {{2, 128, 14, 14}, {256, 128, 1, 1}, {}},
                                  {{2, 48, 14, 14}, {64, 48, 3, 3}, {.padding = {1}}},
                                  {{3, 32, 45, 40}, {32, 32, 3, 3}, {.padding = {1}}, true},
                                  {{5, 64, 32, 32}, {96, 64, 1, 1}, {}},
                                  {{1, 32, 30, 31}, {64, 32, 3, 3}, {.stride = {3}, .padding = {1}, .dilation = {2}}},
                                  {{2, 64, 20, 20}, {64, 1, 3, 3}, {.padding = {1}, .groups = 64}}};
  for (const Case& c : some) {
    for (const DType dtype : {f32, bf16, f16}) {
      const auto last = MemoryFormat::channels_last;
      const Tensor x = randn(c.input).to(dtype).contiguous(last), w = randn(c.weight).to(dtype);
      const Tensor b = c.bias ? randn({c.weight[0]}) : Tensor();
      const Tensor g = randn(conv2d(x, w, {}, c.options).sizes()).to(dtype).contiguous(last);
      std::vector<std::vector<double>> one;
      for (const int n : {1, 2, 3, 4, 7, 16}) {
        set_num_threads(n);
        const Products got = products(c, x, w, b, g);
        const std::vector<std::vector<double>> now = {got.y.to_vector<double>(), got.x_grad.to_vector<double>(),
                                                      got.weight_grad.to_vector<double>()};
        if (one.empty()) one = now;
        for (std::size_t i = 0; i < now.size(); ++i) {
          EXPECT_TRUE(now[i] == one[i]) << str(c) << ' ' << name(dtype) << ", result " << i << " on threads: " << n;
        }
      }
    }
  }
}

TEST(Conv, GivesTheSameBitsAgain) {
  manual_seed(3);
  const Case c{{4, 32, 20, 20}, {32, 32, 3, 3}, {.padding = {1}}};
  for (const DType dtype : {f32, bf16}) {
    const Tensor x = randn(c.input).to(dtype).contiguous(MemoryFormat::channels_last), w = randn(c.weight).to(dtype);
    const Products a = products(c, x, w, {}, {}), b = products(c, x, w, {}, {});
    EXPECT_EQ(a.y.to_vector<float>(), b.y.to_vector<float>());
    EXPECT_EQ(a.x_grad.to_vector<float>(), b.x_grad.to_vector<float>());
    EXPECT_EQ(a.weight_grad.to_vector<float>(), b.weight_grad.to_vector<float>());
  }
}

TEST(Conv, HasAnImageWithoutBatchAndSequences) {
  manual_seed(5);
  const Tensor x = randn({3, 6, 5}), w = randn({4, 3, 3, 3});
  EXPECT_EQ(conv2d(x, w).to_vector<float>(), conv2d(x.unsqueeze(0), w).to_vector<float>());
  EXPECT_EQ(conv2d(x, w).sizes(), Shape({4, 4, 3}));
  const Tensor s = randn({2, 3, 9}), k = randn({4, 3, 3});
  const Tensor as_image = conv2d(s.unsqueeze(2), k.unsqueeze(2), {}, {.stride = {1, 2}, .padding = {0, 1}});
  EXPECT_EQ(conv1d(s, k, {}, {.stride = {2}, .padding = {1}}).to_vector<float>(), as_image.to_vector<float>());
}

TEST(Conv, OfNothing) {
  const Tensor w = ones({2, 3, 3, 3}).requires_grad_();
  const Tensor none = zeros({0, 3, 5, 5}).requires_grad_();
  const Tensor y = conv2d(none, w);
  EXPECT_EQ(y.sizes(), Shape({0, 2, 3, 3}));
  sum(y).backward();
  EXPECT_EQ(w.grad().to_vector<float>(), std::vector<float>(54, 0.0f));
  // No channels: sums of nothing, and the bias.
  const Tensor bias = ones({2});
  EXPECT_EQ(conv2d(zeros({1, 0, 4, 4}), zeros({2, 0, 3, 3}), bias).to_vector<float>(), std::vector<float>(8, 1.0f));
}

TEST(Conv, LetsWhatIsNotFiniteThrough) {
  Tensor x = zeros({1, 1, 3, 3});
  x.select(2, 1).select(2, 1).fill_(std::nanf(""));
  for (const DType dtype : {f32, f16, bf16}) {
    EXPECT_TRUE(std::isnan(conv2d(x.to(dtype), ones({1, 1, 3, 3}).to(dtype)).item<float>()));
  }
  // A sum beyond f16's range is infinity.
  EXPECT_EQ(conv2d(full({1, 4, 1, 1}, 256).to(f16), full({1, 4, 1, 1}, 256).to(f16)).item<float>(), INFINITY);
}

TEST(Conv, RunsInLowerPrecisionUnderAutocast) {
  const Tensor x = randn({2, 3, 6, 6}).requires_grad_(), w = randn({4, 3, 3, 3}).requires_grad_();
  Tensor y;
  {
    const amp::Autocast autocast{{.dtype = bf16}};
    y = conv2d(x, w);
  }
  EXPECT_EQ(y.dtype(), bf16);
  sum(y.to(f32)).backward();
  EXPECT_EQ(w.grad().dtype(), f32);
  EXPECT_EQ(x.grad().dtype(), f32);
}

// Sums of products of 16 bits that no one rounds: within what float32 sums may be off, far below 16 bits.
TEST(Conv, KeepsWeightGradientsInFloat32UnderAutocast) {
  std::vector<Case> all = cases();
  all.push_back({{3, 40, 9, 9}, {64, 40, 1, 1}, {.stride = {2}}});
  all.push_back({{3, 64, 10, 9}, {40, 64, 3, 3}, {.padding = {1}}});
  all.push_back({{2, 12, 10, 11}, {16, 12, 3, 2}, {.stride = {1, 2}, .padding = {2, 1}, .dilation = {2, 1}}});
  all.push_back({{5, 3, 17, 20}, {8, 3, 7, 7}, {.stride = {2}, .padding = {3}}, true});
  for (const Case& c : all) {
    manual_seed(8);
    const Tensor g = randn(conv2d(zeros(c.input), zeros(c.weight), {}, c.options).sizes());
    for (const DType low : {f16, bf16}) {
      const auto rounded = [&](const Tensor& t) { return t.defined() ? t.to(low).to(f32) : t; };
      const auto wide = [&](const Tensor& t) { return t.defined() ? t.to(f64) : t; };
      const Tensor x = rounded(randn(c.input)), w = rounded(randn(c.weight)), dy = rounded(g);
      const Tensor b = rounded(c.bias ? randn({c.weight[0]}) : Tensor());
      const Products exact = products(c, wide(x), wide(w), wide(b), wide(dy));
      const Products terms = products(c, abs(wide(x)), abs(wide(w)), b.defined() ? abs(wide(b)) : b, abs(wide(dy)));
      const double places = static_cast<double>(g.numel() / g.size(1));
      for (const auto format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
        const std::string what = str(c) + " " + name(low) + (format == MemoryFormat::contiguous ? " NCHW" : " NHWC");
        const Tensor weight = w.contiguous(format).requires_grad_();
        Tensor y;
        {
          const amp::Autocast autocast{{.dtype = low}};
          y = conv2d(x.contiguous(format), weight, b, c.options);
        }
        EXPECT_EQ(y.dtype(), low);
        const Tensor got = grad({y}, {weight}, {.grad_outputs = {dy.to(low).contiguous(format)}})[0];
        EXPECT_EQ(got.dtype(), f32) << what;
        expect_within(got, exact.weight_grad, terms.weight_grad, places, what + ", weight's gradient");
        expect_within(y, exact.y, terms.y, static_cast<double>(c.weight[1] * c.weight[2] * c.weight[3] + 1), what);
      }
    }
  }
}

TEST(Conv, SaysWhatItExpects) {
  const Tensor x = zeros({2, 3, 8, 8}), w = zeros({4, 3, 3, 3});
  using test::error_of;
  EXPECT_EQ(error_of([&] {
              conv2d(x, zeros({4, 2, 3, 3}));
            }),
            "conv2d: expected an input of 2 channels for the weight [4, 2, 3, 3] in 1 group, got [2, 3, 8, 8]");
  EXPECT_EQ(error_of([&] {
              conv2d(zeros({8, 8}), w);
            }),
            "conv2d: expected an input [N, C, H, W] or [C, H, W], got [8, 8]");
  EXPECT_EQ(error_of([&] { conv2d(x, w, zeros({3})); }),
            "conv2d: expected a bias [4] for the weight [4, 3, 3, 3], got [3]");
  EXPECT_EQ(error_of([&] {
              conv2d(x, zeros({4, 3, 9, 3}));
            }),
            "conv2d: expected an input that a window of 9 fits in, got [2, 3, 8, 8] with padding 0");
  EXPECT_EQ(error_of([&] { conv2d(x, w, {}, {.stride = {0}}); }), "conv2d: expected a stride of at least 1, got [0]");
  EXPECT_EQ(error_of([&] {
              conv2d(x, w, {}, {.stride = {1, 1, 1}});
            }),
            "conv2d: expected a stride of 1 or 2 numbers, got [1, 1, 1]");
  EXPECT_EQ(error_of([&] {
              conv2d(x, zeros({5, 1, 3, 3}), {}, {.groups = 3});
            }),
            "conv2d: expected a number of groups that divides the 5 filters of [5, 1, 3, 3], got 3");
  EXPECT_EQ(error_of([&] { conv2d(x.to(i64), w); }), "conv2d: expected f32, f64, f16 or bf16, got i64 [2, 3, 8, 8]");
  EXPECT_EQ(
      error_of([&] {
        conv_transpose2d(x, zeros({3, 4, 3, 3}), {}, {.output_padding = {1}});
      }),
      "conv_transpose2d: expected an output_padding less than stride or dilation, got 1 with stride 1, dilation 1");
  EXPECT_EQ(error_of([&] {
              conv_transpose2d(zeros({1, 2, 1, 1}), zeros({2, 2, 1, 1}), {}, {.padding = {1}});
            }),
            "conv_transpose2d: expected a result of some size, got -1 places from [1, 2, 1, 1] with padding 1");
}

}  // namespace
}  // namespace halfstep
