// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/errors.h"
#include "tests/support/op_golden.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

using test::error_of;

using test::GoldenEntry;
using Values = std::vector<double>;
using Tensors = std::vector<Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Reduction reduction_of(const GoldenEntry& e) {
  const std::string text = e.text("reduction", "mean");
  return text == "none"        ? Reduction::none
         : text == "sum"       ? Reduction::sum
         : text == "batchmean" ? Reduction::batchmean
                               : Reduction::mean;
}

Tensors call_cross_entropy(const GoldenEntry& e, const Tensors& in) {
  return {cross_entropy(in[0], in[1],
                        {.weight = in.size() > 2 ? in[2] : Tensor{},
                         .reduction = reduction_of(e),
                         .ignore_index = e.integer("ignore_index", -100),
                         .label_smoothing = e.real("label_smoothing", 0)})};
}
Tensors call_nll_loss(const GoldenEntry& e, const Tensors& in) {
  return {nll_loss(in[0], in[1],
                   {.weight = in.size() > 2 ? in[2] : Tensor{},
                    .reduction = reduction_of(e),
                    .ignore_index = e.integer("ignore_index", -100)})};
}

TEST(ClassLoss, AgreesWithPyTorch) {
  test::check_op_goldens("cross_entropy", call_cross_entropy);
  test::check_op_goldens("nll_loss", call_nll_loss);
}
TEST(ClassLoss, FollowsThePolicy) {
  test::check_policy_goldens("cross_entropy", call_cross_entropy);
  test::check_policy_goldens("nll_loss", call_nll_loss);
}

TEST(ClassLoss, AnIndexThatIsNoClassIsNamedWithItsSample) {
  const Tensor x = zeros({3, 10}), t = tensor(std::vector<std::int64_t>{1, 12, 99}, {3}, {.dtype = i64});
  // A device finds it while it computes: whoever reads the result is told.
  const std::string text = error_of([&] { cross_entropy(x, t).item<double>(); });
  EXPECT_NE(text.find("cross_entropy"), std::string::npos) << text;
  EXPECT_NE(text.find("expected class indices from 0 to 9"), std::string::npos) << text;
  EXPECT_NE(text.find("got 12 for sample 1 of 3"), std::string::npos) << text;
  EXPECT_NE(error_of([&] { nll_loss(x, t).item<double>(); }).find("got 12"), std::string::npos);
}

TEST(ClassLoss, Errors) {
  const Tensor x = zeros({3, 10});
  EXPECT_THROW(cross_entropy(x, zeros({3, 10}, {.dtype = i64})), ShapeError);
  EXPECT_THROW(cross_entropy(x, zeros({4}, {.dtype = i64})), ShapeError);
  EXPECT_THROW(cross_entropy(x, zeros({3})), ShapeError);  // floating: probabilities
  EXPECT_THROW(cross_entropy(x, zeros({3}, {.dtype = boolean})), DTypeError);
  EXPECT_THROW(cross_entropy(x, zeros({3}, {.dtype = i64}), {.weight = ones({9})}), ShapeError);
  EXPECT_THROW(cross_entropy(x, zeros({3}, {.dtype = i64}), {.label_smoothing = 1.5}), Error);
  EXPECT_THROW(cross_entropy(x, zeros({3}, {.dtype = i64}), {.reduction = Reduction::batchmean}), Error);
  EXPECT_THROW(cross_entropy(zeros({3, 10}, {.dtype = i64}), zeros({3}, {.dtype = i64})), DTypeError);
}

TEST(ClassLoss, AllSamplesIgnoredIsNaNInTheMean) {
  const Tensor x = zeros({2, 3}), t = full({2}, -100, {.dtype = i64});
  EXPECT_TRUE(std::isnan(cross_entropy(x, t).item<double>()));
  EXPECT_EQ(cross_entropy(x, t, {.reduction = Reduction::sum}).item<double>(), 0);
}

// log(1000 classes) from equal logits as large as f16 has them: nothing overflows, and the gradient in f16 is the
// rounded difference of probability and target.
TEST(ClassLoss, SixteenBitLogits) {
  for (DType dtype : {f16, bf16}) {
    Tensor x = full({2, 1000}, 60000, {.dtype = dtype});
    x.requires_grad_();
    const Tensor t = tensor(std::vector<std::int64_t>{0, 999}, {2}, {.dtype = i64});
    const Tensor loss = cross_entropy(x, t);
    EXPECT_EQ(loss.dtype(), dtype);
    EXPECT_EQ(loss.item<double>(), tensor(Values{std::log(1000.0)}, {1}, {.dtype = dtype}).item<double>());
    loss.backward();
    const Values expected = tensor(Values{(0.001 - 1) / 2, 0.001 / 2}, {2}, {.dtype = dtype}).to_vector<double>();
    const auto g = x.grad().to_vector<double>();
    EXPECT_EQ(g[0], expected[0]);
    EXPECT_EQ(g[1], expected[1]);
    EXPECT_EQ(g[1999], expected[0]);
  }
}

TEST(ClassLoss, LongRowsTakenBlockByBlock) {
  const std::int64_t n = 9000;
  Values values;
  for (std::int64_t i = 0; i < n; ++i) values.push_back(std::cos(static_cast<double>(i)));
  Tensor x = tensor(values, {1, n}, {.dtype = f64});
  x.requires_grad_();
  const Tensor t = tensor(std::vector<std::int64_t>{8000}, {1}, {.dtype = i64});
  double sum = 0;
  for (double v : values) sum += std::exp(v);
  const Tensor loss = cross_entropy(x, t);
  EXPECT_NEAR(loss.item<double>(), std::log(sum) - values[8000], 1e-12);
  loss.backward();
  const auto g = x.grad().to_vector<double>();
  EXPECT_NEAR(g[8000], std::exp(values[8000]) / sum - 1, 1e-13);
  EXPECT_NEAR(g[17], std::exp(values[17]) / sum, 1e-13);
}

TEST(ClassLoss, FirstAndSecondGradients) {
  Values values;
  for (int i = 0; i < 24; ++i) values.push_back(std::sin(i));
  const Tensor x = tensor(values, {2, 3, 4}, {.dtype = f64, .requires_grad = true});
  const Tensor strided = tensor(values, {4, 3, 2}, {.dtype = f64}).transpose(0, 2).requires_grad_();
  const Tensor t = tensor(std::vector<std::int64_t>{0, 2, 1, -100, 2, 2, 0, 1}, {2, 4}, {.dtype = i64});
  const Tensor w = tensor(Values{0.5, 2, 1}, {3}, {.dtype = f64});
  for (const Tensor& in : {x, strided}) {
    for (Reduction r : {Reduction::none, Reduction::mean, Reduction::sum}) {
      for (double smoothing : {0.0, 0.2}) {
        const auto f = [&](const Tensors& v) {
          return Tensors{cross_entropy(v[0], t, {.weight = w, .reduction = r, .label_smoothing = smoothing}),
                         nll_loss(v[0], t, {.weight = w, .reduction = r})};
        };
        gradcheck(f, {in});
        gradgradcheck(f, {in});
      }
    }
  }
  const Tensor p = tensor(Values(24, 1.0 / 3), {2, 3, 4}, {.dtype = f64, .requires_grad = true});
  const auto f = [&](const Tensors& v) {
    return Tensors{cross_entropy(v[0], v[1], {.weight = w, .label_smoothing = 0.1})};
  };
  gradcheck(f, {x, p});
  gradgradcheck(f, {x, p});
}

TEST(ClassLoss, StridedInputs) {
  Values values;
  for (int i = 0; i < 12; ++i) values.push_back(std::cos(i));
  const Tensor x = tensor(values, {4, 3}, {.dtype = f64}),
               t = tensor(std::vector<std::int64_t>{3, 0, 1}, {3}, {.dtype = i64});
  EXPECT_EQ(cross_entropy(x.t(), t).item<double>(), cross_entropy(x.t().contiguous(), t).item<double>());
  const Tensor pairs = tensor(std::vector<std::int64_t>{3, 9, 0, 9, 1, 9}, {3, 2}, {.dtype = i64});
  EXPECT_EQ(cross_entropy(x.t(), pairs.select(1, 0)).item<double>(), cross_entropy(x.t(), t).item<double>());
}

// Logits of images: more classes than are added up at once in float32, a row of places that is no whole number of
// vectors, places that are ignored, and channels that lie anywhere. Against sums in float64.
struct Image {
  Shape sizes;
  double smoothing;
  bool weighted, each;  // class weights; a loss for each place
};
void check_image_loss(const Image& c, DType dtype, MemoryFormat format) {
  SCOPED_TRACE(c.sizes.str() + " " + std::string(name(dtype)));
  manual_seed(5);
  const std::int64_t samples = c.sizes[0], n = c.sizes[1], places = c.sizes[2] * c.sizes[3], all = samples * places;
  const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
  const Tensor x = ((rand(c.sizes) - 0.5) * 12).to(dtype).contiguous(format).requires_grad_();
  const Tensor labels = randint(0, n, {samples, c.sizes[2], c.sizes[3]});
  const auto v = x.detach().contiguous().to_vector<double>();
  auto t = labels.to_vector<std::int64_t>();
  for (std::size_t i = 3; i < t.size(); i += 7) t[i] = -1;
  const Tensor weight = rand({n}) + 0.5;
  const Values w = c.weighted ? weight.to_vector<double>() : Values(static_cast<std::size_t>(n), 1);
  const CrossEntropyOptions options{.weight = c.weighted ? weight : Tensor{},
                                    .reduction = c.each ? Reduction::none : Reduction::mean,
                                    .ignore_index = -1,
                                    .label_smoothing = c.smoothing};
  const Tensor loss = cross_entropy(x, tensor(t, labels.sizes(), {.dtype = i32}), options);
  const Tensor slopes = rand(loss.sizes()) + 0.5;
  const auto got = loss.to_vector<double>(), weights = slopes.to(dtype).to_vector<double>();
  const auto gradient = grad({loss}, {x}, {.grad_outputs = {slopes.to(dtype)}})[0].contiguous().to_vector<double>();

  double divisor = 0, total = 0, magnitude = 0;
  for (std::int64_t label : t) divisor += label < 0 ? 0 : w[static_cast<std::size_t>(label)];
  for (std::int64_t i = 0; i < all; ++i) {
    const auto at = [&](std::int64_t k) {
      return static_cast<std::size_t>((i / places * n + k) * places + i % places);
    };
    const std::int64_t label = t[static_cast<std::size_t>(i)];
    double sum = 0, expected = 0, mass = 0;
    for (std::int64_t k = 0; k < n; ++k) sum += std::exp(v[at(k)]);
    const auto q = [&](std::int64_t k) {
      const double own = k == label ? 1 - c.smoothing : 0;
      return label < 0 ? 0 : (own + c.smoothing / static_cast<double>(n)) * w[static_cast<std::size_t>(k)];
    };
    for (std::int64_t k = 0; k < n; ++k) {
      expected += q(k) * (std::log(sum) - v[at(k)]);
      mass += q(k);
    }
    total += expected;
    const double g = c.each ? weights[static_cast<std::size_t>(i)] : weights[0] / divisor;
    if (c.each) {
      ASSERT_NEAR(got[static_cast<std::size_t>(i)], expected, u * expected + 0x1p-19 * (1 + expected)) << i;
    }
    magnitude = std::max(magnitude, g);
    for (std::int64_t k = 0; k < n; ++k) {
      const double d = g * (mass * std::exp(v[at(k)]) / sum - q(k));
      ASSERT_NEAR(gradient[at(k)], d, u * std::abs(d) + 0x1p-20 * magnitude + (dtype == f16 ? 0x1p-25 : 0))
          << i << " " << k;
    }
  }
  if (!c.each) {
    EXPECT_NEAR(got[0], total / divisor, (u + 0x1p-20) * total / divisor);
  }
}
TEST(ClassLoss, ImagesOfAllSizesAgreeWithFloat64) {
  const test::ThreadsGuard guard;
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    for (const Image& c : {Image{{2, 5, 7, 11}, 0, false, false}, Image{{2, 5, 7, 11}, 0.1, true, true},
                           Image{{1, 70, 20, 31}, 0.2, false, true}, Image{{3, 21, 16, 33}, 0, true, false},
                           Image{{2, 1, 9, 9}, 0, false, true}, Image{{2, 3, 3, 3}, 0.3, true, false}}) {
      for (const DType dtype : {f32, f16, bf16}) {
        for (const auto format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
          check_image_loss(c, dtype, format);
        }
      }
    }
  }
}

// The loss of a sample that the network is sure of is small, and has its digits: exponentials, a sum and a logarithm of
// a few roundings each.
TEST(ClassLoss, SureSamplesOfImagesKeepTheirDigits) {
  if (!default_device().is_cpu()) GTEST_SKIP() << "other devices may add exponentials up beside the largest one's 1";
  for (const std::int64_t classes : {2, 3, 150}) {
    for (const double gap : {4.0, 8.0, 12.0, 18.0, 40.0}) {
      for (const double top : {0.0, 64.0}) {
        Tensor x = full({2, classes, 5, 7}, top - gap);
        x.select(1, 1).fill_(top);
        const Tensor target = ones({2, 5, 7}, {.dtype = i64});
        const Tensor loss = cross_entropy(x, target, {.reduction = Reduction::none});
        const double exact = std::log1p(static_cast<double>(classes - 1) * std::exp(-gap));
        for (const double got : loss.to_vector<double>()) {
          ASSERT_NEAR(got, exact, 12 * 0x1p-24 * exact) << classes << " classes, " << gap;
        }
      }
    }
  }
}

TEST(ClassLoss, WhatIsWrongAtAPlaceOfAnImageStaysThere) {
  Tensor x = zeros({1, 3, 4, 8});
  x.select(1, 2).select(2, 5).fill_(std::nan(""));  // a column of places
  const std::vector<std::int64_t> t(32, 1);
  std::vector<std::int64_t> ignored = t;
  for (std::size_t i = 5; i < 32; i += 8) ignored[i] = -100;
  x.requires_grad_();
  const auto loss = [&](const std::vector<std::int64_t>& labels, Reduction r) {
    return cross_entropy(x, tensor(labels, {1, 4, 8}, {.dtype = i64}), {.reduction = r});
  };
  const auto each = loss(t, Reduction::none).to_vector<double>();
  for (std::size_t i = 0; i < 32; ++i) {
    if (i % 8 == 5) {
      EXPECT_TRUE(std::isnan(each[i]));
    } else {
      EXPECT_NEAR(each[i], std::log(3), 1e-6);
    }
  }
  // An ignored place has no gradient whatever its logits are.
  const Tensor mean = loss(ignored, Reduction::mean);
  EXPECT_NEAR(mean.item<double>(), std::log(3), 1e-6);
  for (double v : grad({mean}, {x})[0].select(2, 3).select(2, 5).to_vector<double>()) EXPECT_EQ(v, 0);
  const std::string text = error_of([&] {
    std::vector<std::int64_t> wrong = t;
    wrong[9] = 3;
    loss(wrong, Reduction::mean).item<double>();
  });
  EXPECT_NE(text.find("got 3 for sample 9 of 32"), std::string::npos) << text;
}

// --- losses of two tensors of one shape

LossOptions loss_options(const GoldenEntry& e) { return {.reduction = reduction_of(e)}; }
Tensor optional_input(const GoldenEntry& e, const char* flag, const Tensors& in, std::size_t i) {
  return e.flag(flag, false) && in.size() > i ? in[i] : Tensor{};
}

const std::map<std::string, test::GoldenCall>& pair_losses() {
  static const std::map<std::string, test::GoldenCall> table = {
      {"mse_loss", [](auto& e, auto& in) { return Tensors{mse_loss(in[0], in[1], loss_options(e))}; }},
      {"l1_loss", [](auto& e, auto& in) { return Tensors{l1_loss(in[0], in[1], loss_options(e))}; }},
      {"smooth_l1_loss",
       [](auto& e, auto& in) {
         return Tensors{smooth_l1_loss(in[0], in[1], {.reduction = reduction_of(e), .beta = e.real("beta", 1)})};
       }},
      {"huber_loss",
       [](auto& e, auto& in) {
         return Tensors{huber_loss(in[0], in[1], {.reduction = reduction_of(e), .delta = e.real("delta", 1)})};
       }},
      {"kl_div",
       [](auto& e, auto& in) {
         return Tensors{
             kl_div(in[0], in[1], {.reduction = reduction_of(e), .log_target = e.flag("log_target", false)})};
       }},
      {"binary_cross_entropy_with_logits",
       [](auto& e, auto& in) {
         return Tensors{binary_cross_entropy_with_logits(in[0], in[1],
                                                         {.weight = optional_input(e, "weighted", in, 2),
                                                          .pos_weight = optional_input(e, "pos_weighted", in, 3),
                                                          .reduction = reduction_of(e)})};
       }},
      {"binary_cross_entropy",
       [](auto& e, auto& in) {
         return Tensors{binary_cross_entropy(
             in[0], in[1], {.weight = optional_input(e, "weighted", in, 2), .reduction = reduction_of(e)})};
       }},
      {"cosine_similarity",
       [](auto& e, auto& in) {
         return Tensors{cosine_similarity(in[0], in[1], {.dim = e.integer("dim"), .eps = e.real("eps")})};
       }},
  };
  return table;
}

TEST(PairLoss, AgreesWithPyTorch) {
  for (const auto& [op, call] : pair_losses()) test::check_op_goldens(op, call);
}
TEST(PairLoss, FollowsThePolicy) {
  for (const auto& [op, call] : pair_losses()) test::check_policy_goldens(op, call);
}

TEST(PairLoss, FirstAndSecondGradients) {
  Values a, b;
  for (int i = 0; i < 12; ++i) {
    a.push_back(0.5 + 0.4 * std::sin(i));
    b.push_back(0.5 + 0.3 * std::cos(2 * i));
  }
  const Tensor x = tensor(a, {3, 4}, {.dtype = f64, .requires_grad = true});
  const Tensor t = tensor(a, {4, 3}, {.dtype = f64}).t().requires_grad_();
  const Tensor y = tensor(b, {3, 4}, {.dtype = f64, .requires_grad = true});
  const Tensor w = tensor(Values{0.5, 2, 1, 3}, {4}, {.dtype = f64});
  for (const Tensor& in : {x, t}) {
    for (Reduction r : {Reduction::none, Reduction::mean, Reduction::sum}) {
      const std::vector<std::function<Tensor(const Tensors&)>> losses = {
          [r](const Tensors& v) { return mse_loss(v[0], v[1], {r}); },
          [r](const Tensors& v) { return l1_loss(v[0], v[1], {r}); },
          [r](const Tensors& v) { return smooth_l1_loss(v[0], v[1], {.reduction = r, .beta = 0.25}); },
          [r](const Tensors& v) { return huber_loss(v[0], v[1], {.reduction = r, .delta = 0.25}); },
          [r](const Tensors& v) { return kl_div(v[0], v[1], {.reduction = r}); },
          [r](const Tensors& v) { return kl_div(v[0], v[1], {.reduction = r, .log_target = true}); },
          [r, w](const Tensors& v) {
            return binary_cross_entropy_with_logits(v[0], v[1], {.weight = w, .pos_weight = w, .reduction = r});
          },
          [r](const Tensors& v) { return binary_cross_entropy(v[0], v[1], {.reduction = r}); },
      };
      for (std::size_t i = 0; i < losses.size(); ++i) {
        EXPECT_NO_THROW(gradcheck(losses[i], {in, y})) << "loss " << i;
        EXPECT_NO_THROW(gradgradcheck(losses[i], {in, y})) << "loss " << i;
      }
    }
    const auto f = [](const Tensors& v) { return cosine_similarity(v[0], v[1], {.dim = 1}); };
    gradcheck(f, {in, y});
    gradgradcheck(f, {in, y});
  }
}

TEST(PairLoss, Errors) {
  const std::string text = error_of([] { mse_loss(zeros({4, 1}), zeros({4})); });
  EXPECT_NE(text.find("mse_loss: expected a target of the input's shape [4, 1], got [4]"), std::string::npos) << text;
  EXPECT_THROW(mse_loss(zeros({2}), zeros({2}, {.dtype = i64})), DTypeError);
  EXPECT_THROW(mse_loss(zeros({2}), zeros({2}), {.reduction = Reduction::batchmean}), Error);
  EXPECT_THROW(huber_loss(zeros({2}), zeros({2}), {.delta = 0}), Error);
  EXPECT_THROW(smooth_l1_loss(zeros({2}), zeros({2}), {.beta = -1}), Error);
  const std::string outside = error_of([] { binary_cross_entropy(full({2}, 1.5), zeros({2})); });
  // A GPU's kernel finds it, and the device is named between op and reason.
  const bool later = default_device().str().starts_with("cuda");
  EXPECT_NE(outside.find(later ? "binary_cross_entropy" : "binary_cross_entropy: expected probabilities from 0 to 1"),
            std::string::npos)
      << outside;
  EXPECT_NE(outside.find("expected probabilities from 0 to 1"), std::string::npos) << outside;
}

// Terms are sums of two products of values of one sign: logarithms within 2 units, four roundings.
TEST(PairLoss, ProbabilitiesOfAllSizesAgreeWithFloat64) {
  Values x = {0, 1, 0x1p-149, 1 - 0x1p-24, 0x1p-25}, y = {0.25, 0.25, 1, 0, 0.5}, exact;
  for (int i = 0; i < 2000; ++i) {
    const double v = i % 3 == 0 ? std::exp2(-i / 14.0) : i % 3 == 1 ? 1 - std::exp2(-i % 24) : i / 2000.0;
    x.push_back(static_cast<float>(v)), y.push_back(i % 9 / 8.0);
  }
  const auto at_least = [](double logarithm) { return std::max(logarithm, -100.0); };
  for (std::size_t i = 0; i < x.size(); ++i) {
    exact.push_back(-y[i] * at_least(std::log(x[i])) - (1 - y[i]) * at_least(std::log1p(-x[i])));
  }
  const auto of = [&](DType d) {
    return binary_cross_entropy(tensor(x, {.dtype = d}), tensor(y, {.dtype = d}), {.reduction = Reduction::none});
  };
  const Values got = of(f32).to_vector<double>();
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_NEAR(got[i], exact[i], 8 * 0x1p-24 * exact[i] + 1e-44) << x[i] << " " << y[i];
  }
  x = {0.5, std::nan(""), 0.25}, y = {1, 0.5, std::nan("")};
  for (const DType d : {f32, bf16, f16}) {
    const Values some = of(d).to_vector<double>();
    EXPECT_FALSE(std::isnan(some[0])) << name(d);
    EXPECT_TRUE(std::isnan(some[1]) && std::isnan(some[2])) << name(d);
  }
}

TEST(PairLoss, LogitsOfAllSizesAgreeWithFloat64) {
  // Terms are sums of two products of values of one sign each, whose factors are within 4 units: 8 units of 2^-24. The
  // slope of a confident negative keeps its relative precision.
  Values x, y, w;
  for (double v = -100; v <= 100; v += 0.37) {
    for (const double target : {0.0, 1.0, 0.3})
      x.push_back(static_cast<double>(static_cast<float>(v))), y.push_back(target);
  }
  const auto n = static_cast<std::int64_t>(x.size());
  for (const double weight : {1.0, 3.0}) {
    const Tensor logits = tensor(x, {n}).requires_grad_(), targets = tensor(y, {n});
    const auto t = targets.to_vector<double>();
    const Tensor loss = binary_cross_entropy_with_logits(
        logits, targets, {.pos_weight = full({n}, weight), .reduction = Reduction::none});
    const auto got = loss.to_vector<double>();
    const auto slopes = grad({loss}, {logits}, {.grad_outputs = {ones({n})}})[0].to_vector<double>();
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double factor = 1 + (weight - 1) * t[i],
                   softplus = std::log1p(std::exp(-std::abs(x[i]))) + std::max(-x[i], 0.0);
      const double first = (1 - t[i]) * x[i], second = factor * softplus;
      ASSERT_NEAR(got[i], first + second, 8 * 0x1p-24 * (std::abs(first) + second) + 0x1p-126) << x[i] << " " << t[i];
      const double up = (1 - t[i]) / (1 + std::exp(-x[i])), down = weight * t[i] / (1 + std::exp(x[i]));
      ASSERT_NEAR(slopes[i], up - down, 8 * 0x1p-24 * (up + down) + 0x1p-126) << x[i] << " " << t[i];
    }
  }
}

// Both sides of the limit and the limit itself, in blocks that are no whole number of vectors. One subtraction and two
// operations more: 3 units.
TEST(PairLoss, HuberAndSmoothL1OfAllSizesAgreeWithFloat64) {
  const test::ThreadsGuard guard;
  set_num_threads(3);
  for (const std::int64_t n : {1, 31, 1037, 70001}) {
    for (const DType dtype : {f32, f16, bf16}) {
      manual_seed(3);
      const Tensor x = ((rand({n}) - 0.5) * 4).to(dtype).requires_grad_(),
                   y = ((rand({n}) - 0.5) * 4).to(dtype).requires_grad_();
      const auto a = x.to_vector<double>(), b = y.to_vector<double>();
      const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
      for (const double limit : {0.0, 0.75, 1.0}) {
        for (const bool huber : {false, true}) {
          if (huber && limit == 0) continue;
          const Tensor loss = huber ? huber_loss(x, y, {.reduction = Reduction::none, .delta = limit})
                                    : smooth_l1_loss(x, y, {.reduction = Reduction::none, .beta = limit});
          const auto got = loss.to_vector<double>();
          const auto slopes = grad({loss}, {x, y}, {.grad_outputs = {full({n}, 3, {.dtype = dtype})}});
          const auto dx = slopes[0].to_vector<double>(), dy = slopes[1].to_vector<double>();
          for (std::size_t i = 0; i < a.size(); ++i) {
            const double d = a[i] - b[i], m = std::abs(d), sign = d > 0 ? 1 : d < 0 ? -1 : 0;
            const bool near = m < limit;
            const double scale = huber ? limit : 1;
            const double term = near ? m * m / 2 * (scale / limit) : scale * (m - limit / 2);
            const double slope = near ? d * (scale / limit) : scale * sign;
            ASSERT_NEAR(got[i], term, 4 * 0x1p-24 * (term + limit) + u * term + 0x1p-25) << i;
            ASSERT_NEAR(dx[i], 3 * slope, 3 * (4 * 0x1p-24 + u) * std::abs(slope) + 0x1p-22) << i;
            ASSERT_NEAR(dy[i], -3 * slope, 3 * (4 * 0x1p-24 + u) * std::abs(slope) + 0x1p-22) << i;
          }
        }
      }
    }
  }
  const Tensor x = tensor(Values{std::nan(""), -kInfinity, 2}, {3}).requires_grad_(), y = tensor(Values{0, 0, 2}, {3});
  for (const Tensor& loss : {huber_loss(x, y, {.reduction = Reduction::sum}),
                             smooth_l1_loss(x, y, {.reduction = Reduction::sum, .beta = 0})}) {
    const auto slopes = grad({loss}, {x})[0].to_vector<double>();
    EXPECT_TRUE(std::isnan(slopes[0]));
    EXPECT_EQ(slopes[1], -1);
    EXPECT_EQ(slopes[2], 0);
  }
}

TEST(PairLoss, LargeLogitsAndLargeSums) {
  const Tensor x = tensor(Values{-1000, 1000, 0}, {3}), y = tensor(Values{1, 0, 1}, {3});
  EXPECT_EQ(binary_cross_entropy_with_logits(x, y, {.reduction = Reduction::none}).slice(0, 0, 2).to_vector<double>(),
            (Values{1000, 1000}));
  // The sum, 400000, is beyond f16; the mean is not.
  const Tensor a = full({100000}, 2, {.dtype = f16}), b = zeros({100000}, {.dtype = f16});
  EXPECT_EQ(mse_loss(a, b).item<double>(), 4);
  EXPECT_EQ(mse_loss(a, b).dtype(), f16);
  EXPECT_TRUE(std::isnan(mse_loss(empty({0}), empty({0})).item<double>()));
  EXPECT_EQ(mse_loss(empty({0}), empty({0}), {.reduction = Reduction::sum}).item<double>(), 0);
}

}  // namespace
}  // namespace halfstep
