// SPDX-License-Identifier: Apache-2.0
// Steps built by build_train_network, against the same written out by hand.
#include "halfstep/train/train_step.h"

#include <gtest/gtest.h>

#include "halfstep/capture/capture.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/loss.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/sgd.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using amp::Level;
using test::error_of;
using training::build_train_network;

struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 6, .out = 16}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 16}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 16, .out = 3}});
  Tensor forward(const Tensor& x) const { return fc2(relu(norm(fc1(x)))); }
};

std::vector<std::pair<Tensor, Tensor>> batches(std::size_t n) {
  manual_seed(21);
  std::vector<std::pair<Tensor, Tensor>> result;
  for (std::size_t i = 0; i < n; ++i) result.emplace_back(randn({8, 6}), randint(0, 3, {8}));
  return result;
}

std::vector<float> weights(const Net& net) {
  std::vector<float> all;
  for (const auto& t : net.state_dict()) {
    for (const float v : t.tensor.to(f32).to_vector<float>()) all.push_back(v);
  }
  return all;
}

TEST(TrainStep, IsTheLoopWrittenOut) {
  const Net start;
  for (const bool by_hand : {true, false}) {
    static std::vector<float> losses, end;
    const Net net = nn::clone(start);
    optim::SGD optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
    std::vector<float> mine;
    if (by_hand) {
      amp::auto_mixed_precision(net, Level::O2);
      amp::GradScaler scaler{amp::LossScalePolicy::mindspore(0x1p24, 2, 2000)};
      for (const auto& [x, y] : batches(12)) {
        optimizer.zero_grad();
        const Tensor loss = cross_entropy(net(x), y);
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
        mine.push_back(loss.item<float>());
      }
      losses = mine;
      end = weights(net);
    } else {
      auto step = build_train_network(net, optimizer, nn::CrossEntropyLoss{}, {.level = Level::O2});
      for (const auto& [x, y] : batches(12)) mine.push_back(step(x, y).loss.item<float>());
      EXPECT_EQ(mine, losses);
      EXPECT_EQ(weights(net), end);
    }
  }
}

TEST(TrainStep, GivesLossOverflowAndScale) {
  const Net net;
  optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
  // Of MindSpore's manager: the first steps overflow at 2^24 x 2^100.
  auto step =
      build_train_network(net, optimizer, nn::CrossEntropyLoss{},
                          {.level = Level::O2, .loss_scale_manager = amp::DynamicLossScaleManager{0x1p40, 16, 3}});
  const auto [x, y] = batches(1)[0];
  double scale = 0x1p40;
  bool overflowed = false, ran = false;
  for (int i = 0, good = 0; i < 12; ++i) {
    const auto before = weights(net);
    const auto [loss, overflow, used] = step(x, y);
    EXPECT_EQ(loss.dtype(), f32);
    EXPECT_EQ(loss.dim(), 0);
    EXPECT_EQ(overflow.dtype(), boolean);
    EXPECT_EQ(used.item<double>(), scale);
    const bool dropped = overflow.item<bool>();
    (dropped ? overflowed : ran) = true;
    EXPECT_EQ(net.fc1.weight.to(f32).to_vector<float>()[0] == before[0], dropped);
    good = dropped ? 0 : good + 1;
    if (dropped) scale /= 16;
    if (good == 3) scale *= 16, good = 0;
  }
  EXPECT_TRUE(overflowed && ran);
  EXPECT_EQ(step.scaler()->get_scale(), scale);
}

TEST(TrainStep, WithoutDroppingAndWithoutScalingTheStepIsTheSame) {
  // In float32 a scale that is a power of two changes nothing but exponents.
  const Net start;
  std::vector<std::vector<float>> ends;
  for (const int kind : {0, 1, 2}) {
    const Net net = nn::clone(start);
    optim::SGD optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.5}};
    training::TrainNetworkOptions options;
    if (kind == 1) options.loss_scale_manager = amp::FixedLossScaleManager{1024, false};
    if (kind == 2) options.loss_scale_manager = amp::FixedLossScaleManager{1024};
    auto step = build_train_network(net, optimizer, nn::CrossEntropyLoss{}, options);
    for (const auto& [x, y] : batches(5)) {
      const auto result = step(x, y);
      EXPECT_EQ(result.scale.item<float>(), kind ? 1024 : 1);
      EXPECT_FALSE(result.overflow.item<bool>());
    }
    EXPECT_EQ(step.scaler() != nullptr, kind != 0);
    ends.push_back(weights(net));
  }
  EXPECT_EQ(ends[0], ends[1]);
  EXPECT_EQ(ends[0], ends[2]);
}

TEST(TrainStep, CapturedItGivesTheSameBits) {
  const Net start;
  for (const Level level : {Level::O0, Level::O1, Level::O2, Level::O3, Level::automatic}) {
    std::vector<std::vector<float>> ends(2), losses(2);
    for (const bool captured : {false, true}) {
      const Net net = nn::clone(start);
      optim::SGD optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
      auto step =
          build_train_network(net, optimizer, nn::CrossEntropyLoss{},
                              {.level = level, .loss_scale_manager = amp::DynamicLossScaleManager{0x1p30, 8, 4}});
      auto fast = capture(step);
      for (const auto& [x, y] : batches(16)) {
        const auto [loss, overflow, scale] = captured ? fast(x, y) : step(x, y);
        losses[captured].push_back(loss.item<float>());
        losses[captured].push_back(static_cast<float>(overflow.item<bool>()));
        losses[captured].push_back(scale.item<float>());
      }
      EXPECT_EQ(fast.stats().replayed, captured ? 14U : 0U) << fast.why_not();
      ends[captured] = weights(net);
    }
    EXPECT_EQ(losses[0], losses[1]) << amp::name(level);
    EXPECT_EQ(ends[0], ends[1]) << amp::name(level);
  }
}

TEST(TrainStep, PresetsAndWhatIsGivenInTheirPlace) {
  const auto shown = [](const training::TrainNetworkOptions& options) {
    const Net net;
    optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
    const auto step = build_train_network(net, optimizer, nn::CrossEntropyLoss{}, options);
    const auto label = [](const nn::ModuleBase& m) {
      const auto* p = m.precision().get();
      return p ? p->label : std::string("-");
    };
    // Of the network, and of its norm where that has one of its own.
    return label(net) + " " + label(net.norm) + (step.scaler() ? " scaled" : "");
  };
  EXPECT_EQ(shown({}), "- -");
  EXPECT_EQ(shown({.level = Level::O1}), "f32 -");
  EXPECT_EQ(shown({.level = Level::automatic}), "auto f16 -");
  EXPECT_EQ(shown({.level = Level::O2}), "f16 f32 scaled");
  EXPECT_EQ(shown({.level = Level::O3}), "f16 -");
  EXPECT_EQ(shown({.level = Level::O2, .keep_batchnorm_fp32 = false}), "f16 - scaled");
  EXPECT_EQ(shown({.level = Level::O3, .keep_batchnorm_fp32 = true}), "f16 f32");
  EXPECT_EQ(shown({.level = Level::O2, .cast_model_type = bf16}), "bf16 f32");
  EXPECT_EQ(shown({.cast_model_type = bf16}), "bf16 -");
  EXPECT_EQ(shown({.keep_batchnorm_fp32 = true, .cast_model_type = f16}), "f16 f32");
  EXPECT_EQ(shown({.level = Level::O2, .cast_model_type = f32}), "- -");
}

TEST(TrainStep, MisuseIsAnswered) {
  const Net net, other;
  optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
  EXPECT_EQ(error_of<Error>([&] { build_train_network(other, optimizer, nn::CrossEntropyLoss{}); }),
            "build_train_network: the optimizer holds 'fc1.weight' [16, 6], which is no parameter of this network; was "
            "it made of another one?");
  EXPECT_EQ(error_of<Error>([&] { build_train_network(net, optimizer, nullptr); }),
            "build_train_network: expected a loss function, got none");
  EXPECT_EQ(error_of<AmpError>(
                [&] { build_train_network(net, optimizer, nn::CrossEntropyLoss{}, {.cast_model_type = f64}); }),
            "build_train_network: expected a cast_model_type of f16, bf16 or f32, got f64");
  EXPECT_NE(error_of<AmpError>([&] {
              build_train_network(net, optimizer, nn::CrossEntropyLoss{},
                                  {.level = Level::O1, .keep_batchnorm_fp32 = false});
            }).find("keep_batchnorm_fp32 = false is for O2 and O3"),
            std::string::npos);
  EXPECT_EQ(net.str(), Net{}.str()) << "nothing was changed";
  auto step = build_train_network(net, optimizer, [](const Tensor& a, const Tensor&) { return a; });
  const auto [x, y] = batches(1)[0];
  EXPECT_EQ(error_of<ShapeError>([&] { step(x, y); }),
            "train_step: expected a loss of one element, got [8, 3]; take its mean?");
}

TEST(TrainStep, PredictsInEvaluationModeAndLeavesModesAsTheyWere) {
  const Net net;
  optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
  const auto step = build_train_network(net, optimizer, nn::CrossEntropyLoss{}, {.level = Level::O2});
  net.norm.eval();
  const auto before = net.norm.running_mean.to_vector<float>();
  const Tensor y = step.predict(batches(1)[0].first);
  EXPECT_EQ(y.dtype(), f32);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(net.is_training());
  EXPECT_TRUE(net.fc1.is_training());
  EXPECT_FALSE(net.norm.is_training()) << "it was in evaluation mode before";
  EXPECT_EQ(net.norm.running_mean.to_vector<float>(), before);
}

}  // namespace
}  // namespace halfstep
