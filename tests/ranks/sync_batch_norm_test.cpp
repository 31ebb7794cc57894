// SPDX-License-Identifier: Apache-2.0
// Batch norm over the batches of all ranks, beside batch_norm_act of the batches put together.
#include "halfstep/dist/sync_batch_norm.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/dist/data_parallel.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/sgd.h"
#include "tests/ranks/networks.h"

namespace halfstep {
namespace {

using test::gradients_of;
using test::part_of;
using test::relative_error;
using test::values_of;
using test::world;

Tensor leaf(const Tensor& t) { return t.detach().clone().requires_grad_(); }
std::vector<double> values(const Tensor& t) { return t.to_vector<double>(); }

struct Case {
  Shape sizes;
  bool affine;
  Activation activation;
  bool residual;
  DType dtype;
};

class SyncBatchNorm : public ::testing::TestWithParam<Case> {};

TEST_P(SyncBatchNorm, IsBatchNormOfAllRanksBatches) {
  const Case c = GetParam();
  manual_seed(11);
  const Tensor whole = (randn(c.sizes) * 2 + 3).to(c.dtype), gradient = randn(c.sizes).to(c.dtype),
               beside = randn(c.sizes).to(c.dtype);
  const Tensor weight = randn({c.sizes[1]}), bias = randn({c.sizes[1]});
  const auto make = [&](bool synced) {
    struct {
      Tensor x, weight, bias, residual, mean, var, y;
    } m;
    m.x = leaf(synced ? part_of(whole) : whole);
    if (c.affine) m.weight = leaf(weight), m.bias = leaf(bias);
    if (c.residual) m.residual = leaf(synced ? part_of(beside) : beside);
    m.mean = zeros({c.sizes[1]}), m.var = ones({c.sizes[1]});
    const BatchNormFuncOptions options{.weight = m.weight,
                                       .bias = m.bias,
                                       .running_mean = m.mean,
                                       .running_var = m.var,
                                       .training = true,
                                       .momentum = 0.3};
    m.y = synced ? dist::sync_batch_norm(m.x, options, world(), c.activation, m.residual)
                 : batch_norm_act(m.x, options, c.activation, m.residual);
    m.y.backward(synced ? part_of(gradient) : gradient);
    return m;
  };
  const auto here = make(true), want = make(false);
  // Statistics in float32 sums of other lengths, results rounded once more to the dtype.
  const double rounding = c.dtype == f32 ? 2e-6 : c.dtype == f16 ? 2e-3 : 1.6e-2;
  EXPECT_LT(relative_error(values(here.y), values(part_of(want.y))), rounding);
  EXPECT_EQ(here.y.dtype(), c.dtype);
  EXPECT_LT(relative_error(values(here.x.grad()), values(part_of(want.x.grad()))), 4 * rounding);
  EXPECT_LT(relative_error(values(here.mean), values(want.mean)), 2e-6);
  EXPECT_LT(relative_error(values(here.var), values(want.var)), 2e-6);
  if (c.residual) {
    EXPECT_LT(relative_error(values(here.residual.grad()), values(part_of(want.residual.grad()))), rounding);
  }
  if (!c.affine) return;
  // The rank's part of the sums.
  for (const auto& [own, all] :
       {std::pair(here.weight.grad(), want.weight.grad()), {here.bias.grad(), want.bias.grad()}}) {
    const Tensor sum_of_ranks = own.clone();
    world().all_reduce(sum_of_ranks).wait();
    EXPECT_LT(relative_error(values(sum_of_ranks), values(all)), 4 * rounding);
  }
}

// 13 samples: ranks have 6 and 7, or 3 and 4 of them.
INSTANTIATE_TEST_SUITE_P(Ranks, SyncBatchNorm,
                         ::testing::Values(Case{{13, 8, 5, 5}, true, Activation::none, false, f32},
                                           Case{{13, 8, 5, 5}, true, Activation::relu, true, f32},
                                           Case{{13, 8, 5, 5}, false, Activation::none, false, f32},
                                           Case{{13, 8}, true, Activation::relu, false, f32},
                                           Case{{13, 8, 5, 5}, true, Activation::silu, false, f32},
                                           Case{{13, 8, 5, 5}, true, Activation::silu, true, f32},
                                           Case{{13, 8, 5, 5}, true, Activation::silu, false, bf16},
                                           Case{{13, 8, 6}, true, Activation::none, true, f32},
                                           Case{{13, 8, 5, 5}, true, Activation::relu, true, f16},
                                           Case{{13, 8, 5, 5}, true, Activation::relu, false, bf16}),
                         [](const auto& info) { return "Case" + std::to_string(info.index); });

TEST(SyncBatchNormNumbers, OneValueIsNoBatch) {
  if (world().size() == 1) GTEST_SKIP() << "one rank";
  const bool first = world().rank() == 0;
  const Tensor mean = zeros({3}), var = ones({3});
  const BatchNormFuncOptions options{.running_mean = mean, .running_var = var, .training = true};
  EXPECT_THROW(dist::sync_batch_norm(randn({first ? 1 : 0, 3}), options, world()), ShapeError);
  EXPECT_THROW(dist::sync_batch_norm(randn({0, 3}), options, world()), ShapeError);
  EXPECT_EQ(values(var), std::vector<double>(3, 1));
  dist::sync_batch_norm(randn({first ? 2 : 0, 3}), options, world());
  for (const double v : values(var)) EXPECT_TRUE(std::isfinite(v) && v != 1) << v;
}

// Means far from 0 cost no digits but those that x itself lacks.
TEST(SyncBatchNormNumbers, MeansFarFromZero) {
  if (world().size() == 1) GTEST_SKIP() << "one rank";
  manual_seed(11);
  const Tensor whole = randn({24, 8, 5, 5}) + 1e4, gradient = randn({24, 8, 5, 5});
  const auto made = [&](bool synced, DType dtype) {
    const Tensor x = leaf((synced ? part_of(whole) : whole).to(dtype));
    const Tensor var = ones({8}).to(dtype), mean = zeros({8}).to(dtype);
    const BatchNormFuncOptions options{.running_mean = mean, .running_var = var, .training = true, .momentum = 1};
    const Tensor y = synced ? dist::sync_batch_norm(x, options, world()) : batch_norm_act(x, options, Activation::none);
    y.backward((synced ? part_of(gradient) : gradient).to(dtype));
    return std::array{y.detach(), x.grad(), var};
  };
  const auto exact = made(false, f64), here = made(true, f32);
  for (int i = 0; i < 3; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const Tensor want = i < 2 ? part_of(exact[at]) : exact[at];
    const double error = relative_error(values(here[at]), values(want));
    // Each element is a difference of neighbours, which is exact, less a mean of about 1e-4 and its rounding: a few
    // roundings of 2^-24. The variance's are averaged out. dx is itself a difference of sums that nearly cancel.
    EXPECT_LT(error, i == 1 ? 4e-6 : 1e-6) << i;
  }
}

struct Net : nn::Module<Net> {
  nn::Conv2d conv = child("conv", nn::Conv2d{{.in = 3, .out = 8, .kernel = {3}}});
  nn::BatchNorm2d norm = child("norm", nn::BatchNorm2d{{.channels = 8}});
  Tensor forward(const Tensor& x) const { return mean(norm(conv(x), Activation::relu), {1, 2, 3}); }
};

TEST(ConvertSyncBatchNorm, ANetworkTrainsAsOnTheWholeBatch) {
  manual_seed(3);
  const Net net, alone = nn::clone(net);
  EXPECT_EQ(dist::convert_sync_batch_norm(net, world()), 1);
  EXPECT_EQ(net.norm.describe(), "8, synchronised");
  EXPECT_EQ(alone.norm.describe(), "8");
  dist::DataParallel parallel(net, world());
  optim::SGD sgd(net.parameters(), {.lr = 0.1}), one(alone.parameters(), {.lr = 0.1});
  manual_seed(7);
  for (int i = 0; i < 10; ++i) {
    const Tensor x = randn({24, 3, 7, 7}), w = randn({24});
    sgd.zero_grad();
    one.zero_grad();
    mean(parallel(part_of(x)) * part_of(w)).backward();
    mean(alone(x) * w).backward();
    if (i == 0) {
      EXPECT_LT(relative_error(values_of(gradients_of(net)), values_of(gradients_of(alone))), 5e-6);
    }
    sgd.step();
    one.step();
  }
  EXPECT_EQ(dist::first_difference(net, world()), "");
  EXPECT_LT(relative_error(values_of(net.state_dict()), values_of(alone.state_dict())), 2e-5);
  // In evaluation it is the running statistics' norm, without the other ranks.
  const nn::EvalMode mode(net);
  if (world().rank() == 0) net(ones({2, 3, 7, 7}));
}

TEST(ConvertSyncBatchNorm, ReplaysGiveTheSameBits) {
  std::vector<double> results[2];
  for (const bool captured : {false, true}) {
    manual_seed(3);
    const Net net;
    dist::convert_sync_batch_norm(net, world());
    dist::DataParallel parallel(net, world());
    optim::SGD sgd(net.parameters(), {.lr = 0.1});
    const auto step = [&](const Tensor& x) {
      sgd.zero_grad();
      const Tensor apart = parallel(x) - 1, loss = mean(apart * apart);
      loss.backward();
      sgd.step();
      return loss;
    };
    auto fast = capture(step);
    manual_seed(7);
    for (int i = 0; i < 8; ++i) {
      const Tensor x = part_of(randn({16, 3, 7, 7})).clone();
      results[captured].push_back((captured ? fast(x) : step(x)).item<double>());
    }
    for (const double v : values_of(net.state_dict())) results[captured].push_back(v);
    // Behind the first one and two recordings: the order of the buckets changes with the second one.
    if (captured) {
      EXPECT_GE(fast.stats().replayed, 5U) << fast.why_not();
    }
  }
  EXPECT_EQ(results[0], results[1]);
}

}  // namespace
}  // namespace halfstep
