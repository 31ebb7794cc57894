// SPDX-License-Identifier: Apache-2.0
// Training of one network on several ranks, beside the same on one: every rank also trains a copy on the whole batch.
#include "halfstep/dist/data_parallel.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/clip.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/quant/quantization.h"
#include "tests/ranks/networks.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using dist::DataParallel;
using dist::DistError;
using test::error_of;
using test::gradients_of;
using test::part_of;
using test::relative_error;
using test::values_of;
using test::world;

// The MLP of the MNIST examples, smaller.
struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 32, .out = 64}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 64, .out = 64}});
  nn::Linear fc3 = child("fc3", nn::Linear{{.in = 64, .out = 10}});
  Tensor forward(const Tensor& x) const { return fc3(relu(fc2(relu(fc1(x))))); }
};

struct Data {
  Tensor x = randn({48, 32}), y = randint(0, 10, {48});
};

Net seeded(std::uint64_t seed = 3) {
  manual_seed(seed);
  return Net();
}
Net copy_of(const Net& net) { return nn::clone(net); }

// Buckets of a few kilobytes, so that there are several.
dist::DataParallelOptions small_buckets() { return {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.001}; }

TEST(DataParallel, StartsFromRankZerosValues) {
  const Net net = seeded(100 + static_cast<std::uint64_t>(world().rank())), zero = seeded(100);
  EXPECT_EQ(dist::first_difference(net, world()), world().size() > 1 ? "fc1.weight" : "");
  const DataParallel parallel(net, world());
  EXPECT_EQ(dist::first_difference(net, world()), "");
  EXPECT_EQ(values_of(net.state_dict()), values_of(zero.state_dict()));
}

TEST(DataParallel, FiftyStepsAreThoseOfOneProcess) {
  const Net net = seeded(), alone = copy_of(net);
  DataParallel parallel(net, world(), small_buckets());
  optim::SGD sgd(net.parameters(), {.lr = 0.05, .momentum = 0.9}),
      one(alone.parameters(), {.lr = 0.05, .momentum = 0.9});
  manual_seed(7);
  for (int i = 0; i < 50; ++i) {
    const Data batch;
    sgd.zero_grad();
    one.zero_grad();
    cross_entropy(parallel(part_of(batch.x)), part_of(batch.y)).backward();
    cross_entropy(alone(batch.x), batch.y).backward();
    // Sums of 48 terms in another order: a few roundings of float32 (2^-24); measured by PyTorch's DDP: 3.2e-7.
    if (i == 0) {
      EXPECT_LT(relative_error(values_of(gradients_of(net)), values_of(gradients_of(alone))), 5e-6);
    }
    sgd.step();
    one.step();
  }
  EXPECT_EQ(dist::first_difference(net, world()), "");
  EXPECT_LT(relative_error(values_of(net.parameters()), values_of(alone.parameters())), 5e-6);
  EXPECT_EQ(parallel.stats().reductions, 50U);
  EXPECT_GT(parallel.stats().buckets, 2);
}

// Of some hundred kilobytes: fewer bytes are sent in another way, with fewer messages.
struct Wide : nn::Module<Wide> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 32, .out = 512}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 512, .out = 128}});
  nn::Linear fc3 = child("fc3", nn::Linear{{.in = 128, .out = 10}});
  Tensor forward(const Tensor& x) const { return fc3(relu(fc2(relu(fc1(x))))); }
};

// Gradients in 16 bits: half of the bytes, one rounding for the way and one for the mean.
TEST(DataParallel, CompressedGradientsAreRoundedAndHalfAsManyBytes) {
  std::uint64_t bytes[3] = {};
  int k = 0;
  for (const std::optional<DType> dtype : {std::optional<DType>(), std::optional(f16), std::optional(bf16)}) {
    manual_seed(3);
    const Wide net, alone = nn::clone(net);
    dist::DataParallelOptions options;
    if (dtype) options.hook = dist::compress_hook(*dtype);
    DataParallel parallel(net, world(), options);
    manual_seed(7);
    const Data batch;
    const std::uint64_t before = world().stats().bytes_sent;
    cross_entropy(parallel(part_of(batch.x)), part_of(batch.y)).backward();
    bytes[k++] = world().stats().bytes_sent - before;
    cross_entropy(alone(batch.x), batch.y).backward();
    const double error = relative_error(values_of(gradients_of(net)), values_of(gradients_of(alone)));
    // Two roundings of 2^-11 (f16), 2^-8 (bf16) each; values of f16 below 2^-14 have fewer digits.
    EXPECT_LT(error, !dtype ? 5e-6 : *dtype == f16 ? 2e-3 : 2 * 0x1p-8) << (dtype ? name(*dtype) : "f32");
    EXPECT_GT(error, dtype ? 1e-5 : 0.0);
    EXPECT_EQ(gradients_of(net)[0].tensor.dtype(), f32);
    EXPECT_EQ(dist::first_difference(net, world()), "");
  }
  // The buckets' order is told once, in the first pass: some bytes that are no gradients.
  EXPECT_LT(static_cast<double>(bytes[1]), 0.52 * static_cast<double>(bytes[0]));
  EXPECT_LT(static_cast<double>(bytes[2]), 0.52 * static_cast<double>(bytes[0]));
}

TEST(DataParallel, NoSyncAddsUpBeforeOneReduction) {
  const Net net = seeded(), alone = copy_of(net);
  DataParallel parallel(net, world(), small_buckets());
  manual_seed(9);
  const Data a, b, c;
  for (int round = 0; round < 2; ++round) {
    for (const Net* n : {&net, &alone}) {
      for (const NamedTensor& p : n->parameters()) p.tensor.set_grad({});
    }
    const std::uint64_t before = parallel.stats().reductions;
    {
      const auto guard = parallel.no_sync();
      cross_entropy(parallel(part_of(a.x)), part_of(a.y)).backward();
      {
        const auto inner = parallel.no_sync();
        cross_entropy(parallel(part_of(b.x)), part_of(b.y)).backward();
      }
      EXPECT_EQ(parallel.stats().reductions, before);
    }
    cross_entropy(parallel(part_of(c.x)), part_of(c.y)).backward();
    EXPECT_EQ(parallel.stats().reductions, before + 1);
    for (const Data* d : {&a, &b, &c}) cross_entropy(alone(d->x), d->y).backward();
    EXPECT_LT(relative_error(values_of(gradients_of(net)), values_of(gradients_of(alone))), 5e-6);
  }
}

// What was reduced and is not dropped is the same on all ranks: its mean is itself, and new gradients add to it.
TEST(DataParallel, GradientsThatStayAddUp) {
  const Net net = seeded(), alone = copy_of(net);
  DataParallel parallel(net, world());
  optim::SGD sgd(net.parameters(), {.lr = 0.1});
  manual_seed(9);
  const Data a, b;
  for (const Data* d : {&a, &b}) {
    cross_entropy(parallel(part_of(d->x)), part_of(d->y)).backward();
    cross_entropy(alone(d->x), d->y).backward();
  }
  EXPECT_LT(relative_error(values_of(gradients_of(net)), values_of(gradients_of(alone))), 5e-6);
  sgd.zero_grad(false);
  cross_entropy(parallel(part_of(a.x)), part_of(a.y)).backward();
  for (const NamedTensor& p : alone.parameters()) p.tensor.set_grad({});
  cross_entropy(alone(a.x), a.y).backward();
  EXPECT_LT(relative_error(values_of(gradients_of(net)), values_of(gradients_of(alone))), 5e-6);
}

struct Branches : nn::Module<Branches> {
  nn::Linear used = child("used", nn::Linear{{.in = 4, .out = 4}});
  nn::Linear left = child("left", nn::Linear{{.in = 4, .out = 1}});
  nn::Linear right = child("right", nn::Linear{{.in = 4, .out = 1}});
  nn::Linear never = child("never", nn::Linear{{.in = 4, .out = 1}});
  Tensor forward(const Tensor& x, bool to_the_left) const { return (to_the_left ? left : right)(used(x)); }
};

TEST(DataParallel, UnusedParametersAreNamed) {
  manual_seed(3);
  DataParallel parallel(Branches(), world());
  const std::string text = error_of<DistError>([&] { sum(parallel(ones({2, 4}), true)).backward(); });
  for (const char* part : {"right.weight", "right.bias", "never.weight", "find_unused_parameters"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_EQ(text.find("left"), std::string::npos) << text;
}

TEST(DataParallel, UnusedParametersCountAsZerosWhereOthersUseThem) {
  manual_seed(3);
  const Branches net;
  DataParallel parallel(net, world(), {.find_unused_parameters = true});
  const Tensor x = ones({2, 4});
  for (int i = 0; i < 3; ++i) {
    for (const NamedTensor& p : net.parameters()) p.tensor.set_grad({});
    // Rank 0 to the left, the others to the right.
    sum(parallel(x, world().rank() == 0)).backward();
    const auto others = static_cast<float>(world().size() - 1);
    EXPECT_FLOAT_EQ(net.left.bias.grad().item<float>(), 2.0F / static_cast<float>(world().size()));
    EXPECT_FLOAT_EQ(net.right.bias.grad().item<float>(), 2 * others / static_cast<float>(world().size()));
    EXPECT_FALSE(net.never.weight.grad().defined());
    EXPECT_EQ(dist::first_difference(net, world()), "");
  }
}

TEST(DataParallel, ReducesForARankWithoutSamples) {
  const Net net = seeded(), alone = copy_of(net);
  DataParallel parallel(net, world());
  manual_seed(7);
  const Data batch;
  for (int i = 0; i < 2; ++i) {
    for (const NamedTensor& p : net.parameters()) p.tensor.set_grad({});
    if (world().rank() == world().size() - 1) {
      parallel.reduce_without_backward();
    } else {
      (cross_entropy(parallel(batch.x), batch.y) * static_cast<double>(world().size())).backward();
    }
    for (const NamedTensor& p : alone.parameters()) p.tensor.set_grad({});
    (cross_entropy(alone(batch.x), batch.y) * static_cast<double>(world().size() - 1)).backward();
    EXPECT_LT(relative_error(values_of(gradients_of(net)), values_of(gradients_of(alone))), 5e-6);
  }
}

// A pass that an error ended is over: the next one reduces as ever.
TEST(DataParallel, APassThatThrewLeavesNothingBehind) {
  const Net net = seeded(), alone = copy_of(net);
  DataParallel parallel(net, world(), small_buckets());
  manual_seed(7);
  for (int i = 0; i < 3; ++i) {
    const Data batch;
    for (const Net* n : {&net, &alone}) {
      for (const NamedTensor& p : n->parameters()) p.tensor.set_grad({});
    }
    const Tensor x = part_of(batch.x).clone().requires_grad_();
    // Behind the last layers' gradients, which are on their way by then.
    const Tensor hidden = relu(net.fc1(x));
    if (i == 1) hidden.register_hook([](const Tensor&) -> Tensor { throw Error("not this one"); });
    const Tensor loss = cross_entropy(net.fc3(relu(net.fc2(hidden))), part_of(batch.y));
    if (i == 1) {
      EXPECT_EQ(error_of<Error>([&] { loss.backward(); }), "not this one");
      continue;
    }
    loss.backward();
    cross_entropy(alone(batch.x), batch.y).backward();
    EXPECT_LT(relative_error(values_of(gradients_of(net)), values_of(gradients_of(alone))), 5e-6) << i;
    EXPECT_EQ(dist::first_difference(net, world()), "");
    EXPECT_EQ(parallel.stats().reductions, i == 0 ? 1U : 2U);
  }
}

struct Other : nn::Module<Other> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 4, .out = 4}});
  nn::Linear more;
  explicit Other(std::int64_t out) : more(child("more", nn::Linear{{.in = 4, .out = out}})) {}
  Tensor forward(const Tensor& x) const { return more(fc(x)); }
};

TEST(DataParallel, RefusesNetworksThatDiffer) {
  const bool last = world().rank() == world().size() - 1;
  const std::string text = error_of<DistError>([&] { DataParallel parallel(Other(last ? 3 : 2), world()); });
  EXPECT_EQ(text,
            "data_parallel: expected the same network on all ranks, but rank 0 has more.weight f32 [2, 4] where rank " +
                std::to_string(world().size() - 1) + " has more.weight f32 [3, 4]");
  const DataParallel fine(Other(2), world());
}

struct Normed : nn::Module<Normed> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 32, .out = 16}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 16}});
  nn::Linear out = child("out", nn::Linear{{.in = 16, .out = 10}});
  Tensor forward(const Tensor& x) const { return out(relu(norm(fc(x)))); }
};

TEST(DataParallel, BuffersAreRankZerosInEachForwardPass) {
  manual_seed(3);
  const Normed net, alone = nn::clone(net);
  DataParallel parallel(net, world());
  manual_seed(5);
  const Data a, b;
  for (const Data* d : {&a, &b}) {
    cross_entropy(parallel(part_of(d->x)), part_of(d->y)).backward();
    const std::int64_t n = d->x.size(0) / world().size();
    alone(d->x.narrow(0, 0, n));  // what rank 0 saw
  }
  parallel.broadcast_buffers();
  EXPECT_EQ(dist::first_difference(net, world()), "");
  EXPECT_EQ(values_of(net.buffers()), values_of(alone.buffers()));
}

// Buffers of three dtypes; ranks have one of them in unlike layouts.
struct Buffered : nn::Module<Buffered> {
  static Tensor drawn(const Shape& sizes) { return randn(sizes) * static_cast<double>(world().rank() + 1); }
  nn::Linear fc = child("fc", nn::Linear{{.in = 4, .out = 2}});
  nn::Buffer a = buffer("a", drawn({3}));
  nn::Buffer count = buffer("count", full({}, static_cast<double>(world().rank() + 7), {.dtype = i64}));
  nn::Buffer turned = buffer("turned", world().rank() % 2 == 0 ? drawn({3, 5}) : drawn({5, 3}).t());
  nn::Buffer half = buffer("half", drawn({6}).to(f16));
  nn::Buffer none = buffer("none", drawn({0}));
  nn::Buffer counts = buffer("counts", full({4}, static_cast<double>(world().rank()), {.dtype = i64}));
  Tensor forward(const Tensor& x) const { return fc(x); }
};

TEST(DataParallel, BuffersTravelTogether) {
  const Buffered net;
  const std::vector<double> own = values_of(net.state_dict());
  DataParallel parallel(net, world());
  EXPECT_EQ(dist::first_difference(net, world()), "");
  if (world().rank() == 0) {
    EXPECT_EQ(values_of(net.state_dict()), own);
  }
  EXPECT_EQ(net.turned.is_contiguous(), world().rank() % 2 == 0) << "layouts stay";
  for (const NamedTensor& b : net.buffers()) Tensor(b.tensor).copy_(b.tensor + world().rank());
  const std::vector<double> changed = values_of(net.buffers());
  const std::uint64_t before = world().stats().collectives;
  parallel.broadcast_buffers();
  EXPECT_EQ(world().stats().collectives - before, world().size() > 1 ? 3U : 0U) << "one for each dtype";
  EXPECT_EQ(dist::first_difference(net, world()), "");
  if (world().rank() == 0) {
    EXPECT_EQ(values_of(net.buffers()), changed);
  }
}

TEST(DataParallel, RangesOfQuantizationAreRankZerosInEachForwardPass) {
  const Net net = seeded();
  const quant::Quantization quantization = quant::prepare(net, zeros({1, 32}));
  const quant::Observer alone;  // sees what rank 0 sees
  DataParallel parallel(net, world());
  optim::SGD sgd(net.parameters(), {.lr = 0.05});
  manual_seed(5);
  for (int i = 0; i < 3; ++i) {
    const Data batch;
    sgd.zero_grad();
    cross_entropy(parallel(part_of(batch.x)), part_of(batch.y)).backward();
    sgd.step();
    quant::commit(net);
    alone(batch.x.narrow(0, 0, batch.x.size(0) / world().size()));
  }
  parallel.broadcast_buffers();
  EXPECT_EQ(dist::first_difference(net, world()), "");
  const quant::Observer& input = quantization.at("input").activation_post_process;
  EXPECT_EQ(input.min_val.item<float>(), alone.min_val.item<float>());
  EXPECT_EQ(input.max_val.item<float>(), alone.max_val.item<float>());
}

// One step of the tutorial's loop.
Tensor amp_step(DataParallel<Net>& net, const Data& batch, optim::Optimizer& optimizer, amp::GradScaler& scaler,
                std::optional<DType> dtype, double factor) {
  optimizer.zero_grad();
  Tensor loss;
  {
    std::optional<amp::Autocast> region;
    if (dtype) region.emplace(amp::AutocastOptions{.dtype = *dtype});
    loss = cross_entropy(net(part_of(batch.x)), part_of(batch.y));
  }
  scaler.scale(loss * factor).backward();
  scaler.step(optimizer);
  scaler.update();
  return loss;
}

// Gradients that overflow on one rank are dropped on all, and the scales stay the same.
TEST(DataParallel, AllRanksSkipTogether) {
  for (const bool compressed : {false, true}) {
    const Net net = seeded();
    dist::DataParallelOptions options = small_buckets();
    if (compressed) options.hook = dist::compress_hook(f16);
    DataParallel parallel(net, world(), options);
    optim::AdamW adam(net.parameters(), {.lr = 1e-3});
    amp::GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
    manual_seed(7);
    std::vector<double> before = values_of(net.parameters());
    for (int i = 0; i < 8; ++i) {
      const Data batch;
      const bool overflow = i == 2 || i == 5;
      const double factor = overflow && world().rank() == world().size() - 1 ? 1e38 : 1;
      amp_step(parallel, batch, adam, scaler, f16, factor);
      const std::vector<double> now = values_of(net.parameters());
      EXPECT_EQ(now == before, overflow) << i;
      before = now;
      const std::vector<std::string> scales = world().all_gather_text(std::to_string(scaler.get_scale()));
      for (const std::string& s : scales) EXPECT_EQ(s, scales[0]);
    }
    EXPECT_EQ(dist::first_difference(net, world()), "");
  }
}

// A captured step reduces as the step does.
TEST(DataParallel, ReplaysGiveTheSameBits) {
  std::vector<double> results[2];
  for (const bool captured : {false, true}) {
    const Net net = seeded();
    DataParallel parallel(net, world(), small_buckets());
    optim::SGD sgd(net.parameters(), {.lr = 0.1, .momentum = 0.9});
    amp::GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
    const auto step = [&](const Tensor& x, const Tensor& y) {
      sgd.zero_grad();
      Tensor loss;
      {
        const amp::Autocast region({.dtype = bf16});
        loss = cross_entropy(parallel(x), y);
      }
      scaler.scale(loss).backward();
      scaler.step(sgd);
      scaler.update();
      return loss;
    };
    auto fast = capture(step);
    manual_seed(7);
    for (int i = 0; i < 12; ++i) {
      const Data batch;
      const Tensor x = part_of(batch.x).clone(), y = part_of(batch.y).clone();
      results[captured].push_back((captured ? fast(x, y) : step(x, y)).item<double>());
    }
    for (const double v : values_of(net.parameters())) results[captured].push_back(v);
    EXPECT_EQ(dist::first_difference(net, world()), "");
    if (captured) {
      EXPECT_GE(fast.stats().replayed, 8U) << fast.why_not();
    }
    EXPECT_EQ(parallel.stats().reductions, 12U);
  }
  EXPECT_EQ(results[0], results[1]);
}

// A step that was captured reduces no more than the step itself does once the wrapper has gone.
TEST(DataParallel, ReplaysEndWithTheWrapper) {
  const Net net = seeded(), alone = copy_of(net);
  auto parallel = std::make_unique<DataParallel<Net>>(net, world(), small_buckets());
  optim::SGD sgd(net.parameters(), {.lr = 0.1});
  auto fast = capture([&](const Tensor& x, const Tensor& y) {
    sgd.zero_grad();
    const Tensor loss = cross_entropy(net(x), y);
    loss.backward();
    return loss;
  });
  manual_seed(7);
  const Data batch;
  const Tensor x = part_of(batch.x).clone(), y = part_of(batch.y).clone();
  for (int i = 0; i < 6; ++i) fast(x, y);
  EXPECT_TRUE(fast.replayed()) << fast.why_not();
  parallel.reset();
  const std::uint64_t before = world().stats().collectives;
  fast(x, y);
  EXPECT_EQ(world().stats().collectives, before);
  cross_entropy(alone(x), y).backward();
  EXPECT_EQ(values_of(gradients_of(net)), values_of(gradients_of(alone)));
}

// {float32, f16, bf16} x {plain, accumulation, clipping}: replicas are the same, and near the network that one process
// trains on the whole batches.
struct Case {
  std::optional<DType> dtype;
  int accumulate;
  double clip;
};
class Matrix : public ::testing::TestWithParam<Case> {};

TEST_P(Matrix, TrainsAsOneProcessDoes) {
  const Case c = GetParam();
  const Net net = seeded(), alone = copy_of(net);
  DataParallel parallel(net, world(), small_buckets());
  optim::SGD sgd(net.parameters(), {.lr = 0.05, .momentum = 0.9}),
      one(alone.parameters(), {.lr = 0.05, .momentum = 0.9});
  amp::GradScaler scaler({.init_scale = 256, .enabled = c.dtype.has_value()}),
      other({.init_scale = 256, .enabled = c.dtype.has_value()});
  const auto backward = [&](const auto& network, const Tensor& x, const Tensor& y, amp::GradScaler& s) {
    Tensor loss;
    {
      std::optional<amp::Autocast> region;
      if (c.dtype) region.emplace(amp::AutocastOptions{.dtype = *c.dtype});
      loss = cross_entropy(network(x), y) / c.accumulate;
    }
    s.scale(loss).backward();
  };
  const auto update = [&](const nn::ModuleBase& network, optim::Optimizer& optimizer, amp::GradScaler& s) {
    if (c.clip > 0) {
      s.unscale_(optimizer);
      optim::clip_grad_norm_(network.parameters(), c.clip);
    }
    s.step(optimizer);
    s.update();
    optimizer.zero_grad();
  };
  manual_seed(7);
  for (int i = 0; i < 10; ++i) {
    for (int k = 0; k < c.accumulate; ++k) {
      const Data batch;
      std::optional<dist::DataParallelBase::NoSync> guard;
      if (k + 1 < c.accumulate) guard.emplace(parallel);
      backward([&](const Tensor& x) { return parallel(x); }, part_of(batch.x), part_of(batch.y), scaler);
      backward([&](const Tensor& x) { return alone(x); }, batch.x, batch.y, other);
    }
    update(net, sgd, scaler);
    update(alone, one, other);
  }
  EXPECT_EQ(dist::first_difference(net, world()), "");
  // 10 steps move the weights by a few percent; gradients of 16-bit products differ by a rounding of theirs.
  const double rounding = !c.dtype ? 5e-6 : *c.dtype == f16 ? 0x1p-11 : 0x1p-8;
  EXPECT_LT(relative_error(values_of(net.parameters()), values_of(alone.parameters())), rounding);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::optional<DType> dtype : {std::optional<DType>(), std::optional(f16), std::optional(bf16)}) {
    all.push_back({dtype, 1, 0});
    all.push_back({dtype, 3, 0});
    all.push_back({dtype, 1, 0.5});
    all.push_back({dtype, 3, 0.5});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(DataParallel, Matrix, ::testing::ValuesIn(cases()), [](const auto& info) {
  const Case& c = info.param;
  return std::string(c.dtype ? name(*c.dtype) : "f32") + (c.accumulate > 1 ? "_accumulated" : "") +
         (c.clip > 0 ? "_clipped" : "");
});

TEST(DataParallel, RefusesOptionsOutOfRange) {
  EXPECT_NE(error_of<Error>([] { DataParallel parallel(Net(), world(), {.bucket_cap_mb = -1}); }).find("bucket_cap_mb"),
            std::string::npos);
  EXPECT_NE(error_of<DTypeError>([] { dist::compress_hook(f64); }).find("f16 or bf16"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
