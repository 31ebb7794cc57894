// SPDX-License-Identifier: Apache-2.0
// Captured steps give the same bits as the same steps run as they are, whatever happens between calls.
#include "halfstep/capture/capture.h"

#include <gtest/gtest.h>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/clip.h"
#include "halfstep/optim/schedule.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"

namespace halfstep {
namespace {

struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 6, .out = 16}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 16}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 16, .out = 3}});
  double p = 0;
  Tensor forward(const Tensor& x) const { return fc2(dropout(relu(norm(fc1(x))), p, is_training())); }
};

struct Batch {
  Tensor x, y;
};
std::vector<Batch> batches(std::size_t n, std::int64_t rows = 8) {
  manual_seed(11);
  std::vector<Batch> result;
  for (std::size_t i = 0; i < n; ++i) result.push_back({randn({rows, 6}), randint(0, 3, {rows})});
  return result;
}

std::vector<float> values(const Net& net) {
  std::vector<float> result;
  for (const auto& t : net.state_dict()) {
    for (const float v : t.tensor.to(f32).to_vector<float>()) result.push_back(v);
  }
  return result;
}

// A training program in two forms: `make` gives a step on a network of its own.
template <class Make>
void expect_same(Make make, const std::vector<Batch>& data, std::uint64_t replays) {
  const Net start;
  std::vector<std::vector<float>> losses(2), ends(2);
  for (const bool captured : {false, true}) {
    const Net net = nn::clone(start);
    manual_seed(5);
    auto step = make(net);
    if (captured) {
      auto fast = capture(step);
      for (const Batch& b : data) losses[1].push_back(fast(b.x, b.y).template item<float>());
      EXPECT_EQ(fast.stats().replayed, replays) << fast.why_not();
    } else {
      for (const Batch& b : data) losses[0].push_back(step(b.x, b.y).template item<float>());
    }
    ends[captured] = values(net);
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_EQ(ends[0], ends[1]);
}

TEST(Capture, TrainsToTheSameBits) {
  expect_same(
      [](const Net& net) {
        auto optimizer = std::make_shared<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
        return [net, optimizer](const Tensor& x, const Tensor& y) {
          optimizer->zero_grad();
          const Tensor loss = cross_entropy(net(x), y);
          loss.backward();
          optimizer->step();
          return loss;
        };
      },
      batches(10), 8);
}

TEST(Capture, GradientsOutsideOfGradAndNoZeroGrad) {
  expect_same(
      [](const Net& net) {
        auto optimizer = std::make_shared<optim::Adam>(net.parameters(), optim::AdamOptions{.lr = 0.01});
        return [net, optimizer](const Tensor& x, const Tensor& y) {
          std::vector<Tensor> parameters;
          for (const auto& p : net.parameters()) parameters.push_back(p.tensor);
          const Tensor loss = cross_entropy(net(x), y);
          optimizer->step(grad({loss}, parameters));
          return loss;
        };
      },
      batches(8), 6);
}

TEST(Capture, FollowsGeneratorsRatesAndScales) {
  for (const DType dtype : {f16, bf16}) {
    expect_same(
        [dtype](Net net) {
          net.p = 0.3;
          auto optimizer = std::make_shared<optim::AdamW>(net.parameters(), optim::AdamWOptions{.lr = 0.01});
          // Overflows at first, then grows at every second step.
          auto scaler = std::make_shared<amp::GradScaler>(
              amp::GradScalerOptions{.init_scale = 0x1p24, .backoff_factor = 0.125, .growth_interval = 2});
          return [=](const Tensor& x, const Tensor& y) {
            optimizer->zero_grad();
            Tensor loss;
            {
              const amp::Autocast region({.dtype = dtype});
              loss = cross_entropy(net(x), y);
            }
            scaler->scale(loss).backward();
            scaler->unscale_(*optimizer);
            optim::clip_grad_norm_(net.parameters(), 1.0);
            scaler->step(*optimizer);
            scaler->update();
            return loss * scaler->scale_tensor();
          };
        },
        batches(14), 12);
  }
}

TEST(Capture, TheFusedUnscaleKnowsItsBounds) {
  expect_same(
      [](const Net& net) {
        auto optimizer = std::make_shared<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = 0.05, .momentum = 0.9});
        auto scaler = std::make_shared<amp::GradScaler>(
            amp::GradScalerOptions{.init_scale = 0x1p30, .backoff_factor = 0.125, .growth_interval = 3});
        return [=](const Tensor& x, const Tensor& y) {
          optimizer->zero_grad();
          Tensor loss;
          {
            const amp::Autocast region({.dtype = f16});
            loss = cross_entropy(net(x), y);
          }
          scaler->scale(loss).backward();
          scaler->step(*optimizer);
          scaler->update();
          return loss * scaler->scale_tensor();
        };
      },
      batches(20), 18);
}

TEST(Capture, ARateSetBetweenCallsCounts) {
  const Net start;
  std::vector<std::vector<float>> ends;
  for (const bool captured : {false, true}) {
    const Net net = nn::clone(start);
    optim::SGD optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.5}};
    auto step = [&](const Tensor& x, const Tensor& y) {
      optimizer.zero_grad();
      cross_entropy(net(x), y).backward();
      optimizer.step();
    };
    auto fast = capture(step);
    int i = 0;
    for (const Batch& b : batches(8)) {
      optimizer.set_lr(0.1 / (1 + i));
      optimizer.set_momentum(0, 0.1 * ++i);
      captured ? fast(b.x, b.y) : step(b.x, b.y);
    }
    EXPECT_EQ(fast.stats().replayed, captured ? 6U : 0U);
    ends.push_back(values(net));
  }
  EXPECT_EQ(ends[0], ends[1]);
}

TEST(Capture, ASchedulesStepIsPartOfIt) {
  expect_same(
      [](const Net& net) {
        auto optimizer = std::make_shared<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = 0.4, .momentum = 0.5});
        auto schedule = std::make_shared<optim::ExponentialLR>(*optimizer, 0.7);
        return [=](const Tensor& x, const Tensor& y) {
          optimizer->zero_grad();
          const Tensor loss = cross_entropy(net(x), y);
          loss.backward();
          optimizer->step();
          schedule->step();
          return loss;
        };
      },
      batches(8), 6);
  // A rate that the step sets by itself would be the same in every replay.
  const Net net;
  optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
  auto step = capture([&](const Tensor& x) {
    optimizer.set_lr(optimizer.lr() / 2);
    return x + 1;
  });
  for (int i = 0; i < 4; ++i) step(ones({2}));
  EXPECT_NE(step.why_not().find("it sets a learning rate; do that between steps"), std::string::npos);
  EXPECT_EQ(optimizer.lr(), 0.1 / 16);
}

TEST(Capture, WhatIsChangedBetweenCallsIsSeen) {
  const Net start;
  std::vector<std::vector<float>> ends;
  std::vector<std::vector<float>> losses(2);
  for (const bool captured : {false, true}) {
    const Net net = nn::clone(start);
    optim::SGD optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.5}};
    auto step = [&](const Tensor& x, const Tensor& y) {
      optimizer.zero_grad();
      Tensor loss;
      {
        const amp::Autocast region({.dtype = f16});
        loss = cross_entropy(net(x), y);
      }
      loss.backward();
      optimizer.step();
      return loss;
    };
    auto fast = capture(step);
    int i = 0;
    optim::OptimizerState state;
    for (const Batch& b : batches(24)) {
      ++i;
      if (i == 6) {  // a weight changed in place: its 16-bit copy is old
        const NoGrad no_grad;
        Tensor weight = net.fc2.weight;
        weight.mul_(0.5);
      }
      if (i == 8) {
        state = optimizer.state_dict();
        for (auto& t : state.tensors) t.tensor = t.tensor.clone();
      }
      if (i == 10) optimizer.load_state_dict(state);
      if (i == 12) net.load_state_dict(start.state_dict());
      if (i == 14) net.eval();
      if (i == 16) net.train();
      if (i == 18) net.fc1.requires_grad_(false);
      if (i == 20) net.to(f64), net.to(f32);  // other memory
      if (i == 22) optimizer.zero_grad();
      losses[captured].push_back((captured ? fast(b.x, b.y) : step(b.x, b.y)).item<float>());
    }
    ends.push_back(values(net));
    if (captured) {
      EXPECT_GE(fast.stats().replayed, 10U) << fast.why_not();
    }
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_EQ(ends[0], ends[1]);
}

TEST(Capture, AccumulatesIntoGradients) {
  const Net start;
  std::vector<std::vector<float>> ends;
  for (const bool captured : {false, true}) {
    const Net net = nn::clone(start);
    optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
    auto part = [&](const Tensor& x, const Tensor& y) { (cross_entropy(net(x), y) / 2).backward(); };
    auto fast = capture(part);
    int i = 0;
    for (const Batch& b : batches(12)) {
      captured ? fast(b.x, b.y) : part(b.x, b.y);
      if (++i % 2 == 0) {
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    EXPECT_GE(fast.stats().replayed, captured ? 8U : 0U);
    ends.push_back(values(net));
  }
  EXPECT_EQ(ends[0], ends[1]);
}

TEST(Capture, EachKindOfShapesIsCapturedByItself) {
  auto data = batches(5);
  for (const Batch& b : batches(4, 3)) data.push_back(b);
  data.push_back(batches(1)[0]);
  expect_same(
      [](const Net& net) {
        auto optimizer = std::make_shared<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = 0.1});
        return [net, optimizer](const Tensor& x, const Tensor& y) {
          optimizer->zero_grad();
          const Tensor loss = cross_entropy(net(x), y);
          loss.backward();
          optimizer->step();
          return loss;
        };
      },
      data, 6);
}

TEST(Capture, ReadsInputsWhereTheyLieAndGivesResultsOfTheirOwn) {
  auto step = capture([](const Tensor& a, const Tensor& b) {
    const Tensor sum = a + b;
    return std::pair<Tensor, std::vector<Tensor>>{sum * 2, {a.t().contiguous(), sum}};
  });
  std::vector<Tensor> kept;
  for (int i = 0; i < 6; ++i) {
    const Tensor a = full({2, 3}, i), b = tensor({{1, 2, 3}, {4, 5, 6}});
    const auto [twice, others] = step(a, b);
    EXPECT_EQ(twice.to_vector<float>(), ((a + b) * 2).to_vector<float>()) << i;
    EXPECT_EQ(others[0].sizes(), (Shape{3, 2}));
    kept.push_back(others[1]);
  }
  EXPECT_EQ(step.stats().replayed, 4U);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(kept[static_cast<std::size_t>(i)].to_vector<float>()[0], i + 1);
  // The same tensor twice is not two.
  const Tensor a = ones({2, 3});
  EXPECT_EQ(step(a, a).first.to_vector<float>()[0], 4);
  EXPECT_EQ(step(a, full({2, 3}, 5)).first.to_vector<float>()[0], 12);
  EXPECT_TRUE(step.replayed());
}

TEST(Capture, ConstantsOfTheStepKeepTheirValues) {
  auto step = capture([](const Tensor& x) {
    Tensor y = x;
    for (int i = 0; i < 4; ++i) y = y * tensor({1, 2, 3}) + arange(3).to(f32) + full({3}, i);
    return y;
  });
  const Tensor x = tensor({1, 1, 1});
  std::vector<std::vector<float>> results;
  for (int i = 0; i < 5; ++i) {
    results.push_back(step(x).to_vector<float>());
    const Tensor other = full({64}, 7);  // memory is used by others in between
  }
  for (const auto& r : results) EXPECT_EQ(r, results[0]);
  EXPECT_EQ(step.stats().replayed, 3U);
}

void expect_refused(const std::function<Tensor(const Tensor&)>& step, const std::string& why) {
  auto fast = capture(step);
  for (int i = 1; i < 8; ++i) {
    EXPECT_EQ(fast(full({2}, i)).to_vector<float>(), step(full({2}, i)).to_vector<float>());
    EXPECT_FALSE(fast.replayed());
  }
  EXPECT_NE(fast.why_not().find(why), std::string::npos) << fast.why_not();
}

TEST(Capture, WhatCantBeReplayedRunsAsItIsAndSaysWhy) {
  expect_refused([](const Tensor& x) { return x * static_cast<double>(x.to_vector<float>()[0]); }, "to_vector()");
  expect_refused([](const Tensor& x) { return x * static_cast<double>(sum(x).item<float>()); }, "item()");
  if (default_device().is_cpu()) {
    expect_refused([](const Tensor& x) { return x * static_cast<double>(*x.data<float>()); }, "data()");
  }
  expect_refused([](const Tensor& x) { return x; }, "it returns an input");
  std::vector<Tensor> kept;
  expect_refused(
      [&](const Tensor& x) {
        kept.push_back(x * 2);
        return kept.back() + 1;
      },
      "it keeps tensors that it makes");
  Tensor weight = ones({2}, {.requires_grad = true});
  expect_refused(
      [&](const Tensor& x) {
        const Tensor y = weight * x;
        y.register_hook([](const Tensor& g) { return g * 2; });
        sum(y).backward();
        Tensor g = weight.grad().clone();
        weight.set_grad({});
        return g;
      },
      "hooks");
}

TEST(Capture, RunsAsItIsWhileOpsAreObserved) {
  struct Counter final : OpObserver {
    void after_call(const ObservedCall&) override { ++calls; }
    int calls = 0;
  } counter;
  auto step = capture([](const Tensor& x) { return x * 2 + 1; });
  const Tensor x = ones({3});
  for (int i = 0; i < 4; ++i) step(x);
  EXPECT_TRUE(step.replayed());
  add_observer(&counter);
  step(x);
  remove_observer(&counter);
  EXPECT_FALSE(step.replayed());
  EXPECT_EQ(counter.calls, 2);
  step(x);
  EXPECT_TRUE(step.replayed());
  step.reset();
  step(x);
  EXPECT_FALSE(step.replayed());
}

TEST(Capture, StepsInsideStepsArePartOfThem) {
  auto inner = capture([](const Tensor& x) { return x * 3; });
  auto outer = capture([&](const Tensor& x) { return inner(x) + 1; });
  for (int i = 0; i < 5; ++i) EXPECT_EQ(outer(full({2}, i)).to_vector<float>()[1], static_cast<float>(3 * i + 1));
  EXPECT_TRUE(outer.replayed());
}

TEST(Capture, AnErrorPassesThroughAndTheNextCallRuns) {
  int calls = 0;
  auto step = capture([&](const Tensor& x) {
    if (++calls == 2) throw std::runtime_error("second");
    return x + 1;
  });
  const Tensor x = ones({2});
  step(x);
  EXPECT_THROW(step(x), std::runtime_error);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(step(x).to_vector<float>()[0], 2);
  EXPECT_TRUE(step.replayed());
  EXPECT_EQ(calls, 3);
}

TEST(Capture, AFirstRunThatThrowsDoesNotCount) {
  // What the step uses is seen in a run that ends: a recording made without would not know that gradients are added up.
  Tensor w = ones({2});
  w.requires_grad_();
  bool fails = true;
  auto step = capture([&](const Tensor& x) {
    if (std::exchange(fails, false)) throw std::runtime_error("first");
    sum(w * x).backward();
  });
  const Tensor x = ones({2});
  EXPECT_THROW(step(x), std::runtime_error);
  for (int i = 1; i < 8; ++i) {
    step(x);
    EXPECT_EQ(w.grad().to_vector<float>()[0], i);
  }
  EXPECT_EQ(step.stats().plain, 2U);
  EXPECT_TRUE(step.replayed());
}

TEST(Capture, AReplayAllocatesNothingButItsResults) {
  const Net net;
  optim::SGD optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  auto step = capture([&](const Tensor& x, const Tensor& y) {
    optimizer.zero_grad();
    const Tensor loss = cross_entropy(net(x), y);
    loss.backward();
    optimizer.step();
    return loss;
  });
  const auto data = batches(1);
  for (int i = 0; i < 4; ++i) step(data[0].x, data[0].y);
  ASSERT_TRUE(step.replayed());
  const Device device = default_device();
  const auto before = memory_stats(device).allocations;
  for (int i = 0; i < 10; ++i) step(data[0].x, data[0].y);
  EXPECT_EQ(memory_stats(device).allocations - before, 10U);
}

TEST(Capture, GradientsCanBeReadBetweenReplays) {
  Tensor w = tensor({1, 2, 3});
  w.requires_grad_();
  auto step = capture([&](const Tensor& x) {
    w.set_grad({});
    sum(square(w * x)).backward();
  });
  for (int i = 1; i < 6; ++i) {
    step(full({3}, i));
    const float square_of = static_cast<float>(i * i);
    EXPECT_EQ(w.grad().to_vector<float>(), (std::vector<float>{2 * square_of, 4 * square_of, 6 * square_of}));
    if (i == 4) w.set_grad({});
  }
}

}  // namespace
}  // namespace halfstep
