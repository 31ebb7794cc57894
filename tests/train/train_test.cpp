// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>

#include "halfstep/amp/loss_scaler.h"
#include "halfstep/core/random.h"
#include "halfstep/data/digits.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/ops/create.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/trainer.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using training::TrainConfig;

class Train : public ::testing::Test {
 protected:
  void SetUp() override {
    training_ = digits(data::Split::kTrain, 640);
    test_ = digits(data::Split::kTest, 100);
  }

  static std::shared_ptr<const data::Dataset> digits(data::Split split, std::int64_t count) {
    return std::make_shared<data::MnistDataset>(data::make_digits(split, {.seed = 1, .count = count}),
                                                data::ImageOptions{.flatten = true, .mean = 0.1307, .std = 0.3081});
  }

  struct Result {
    training::RunReport report;
    NamedTensors weights;
    std::vector<double> losses, scales;
  };
  Result run(const TrainConfig& config, std::int64_t stop_after = 0) {
    manual_seed(config.seed);
    std::shared_ptr<const void> holder;
    const training::Classifier classifier = training::make_classifier("mlp", holder);
    std::atomic<bool> stop{false};
    Result result;
    training::TrainCallbacks callbacks;
    callbacks.on_step = [&](const training::StepReport& r) {
      result.losses.push_back(r.loss);
      result.scales.push_back(r.scale);
      if (r.step == stop_after) stop = true;
    };
    result.report = training::train(config, classifier, training_, test_, callbacks, &stop);
    for (const auto& t : classifier.module->state_dict()) result.weights.push_back({t.name, t.tensor.detach().clone()});
    return result;
  }

  test::TemporaryDir temporary_;
  const fs::path folder_ = temporary_.path();
  std::shared_ptr<const data::Dataset> training_, test_;
};

// Interrupted in the middle of the second epoch: the rest is bit-identical.
TEST_F(Train, ResumesBitForBit) {
  for (const char* amp : {"f16", "off"}) {
    TrainConfig config;
    config.epochs = 3;
    config.lr = 1e-3;
    config.optimizer = "adam";
    config.amp = amp;
    config.seed = 3;
    if (config.amp == "f16") config.loss_scale = "dynamic:1048576,2,0.5,4";
    const Result whole = run(config);
    config.out = folder_ / amp;
    const Result first = run(config, 14);
    EXPECT_TRUE(first.report.interrupted);
    EXPECT_EQ(first.report.steps, 14);
    config.resume = config.out;
    const Result rest = run(config);
    EXPECT_FALSE(rest.report.interrupted);
    std::vector<double> losses = first.losses, scales = first.scales;
    losses.insert(losses.end(), rest.losses.begin(), rest.losses.end());
    scales.insert(scales.end(), rest.scales.begin(), rest.scales.end());
    EXPECT_EQ(losses, whole.losses);
    EXPECT_EQ(scales, whole.scales);
    ASSERT_EQ(rest.weights.size(), whole.weights.size());
    for (std::size_t i = 0; i < whole.weights.size(); ++i) {
      EXPECT_EQ(rest.weights[i].tensor.to_vector<float>(), whole.weights[i].tensor.to_vector<float>())
          << whole.weights[i].name;
    }
    EXPECT_EQ(rest.report.skipped, whole.report.skipped);
  }
}

// How close they are is bounds_test's matter; here, that the network itself learns in all.
TEST_F(Train, LearnsInEveryPrecision) {
  TrainConfig config;
  config.epochs = 4;
  config.lr = 0.05;
  for (const char* amp : {"off", "bf16", "f16"}) {
    config.amp = amp;
    const Result r = run(config);
    EXPECT_LT(r.losses.back(), 0.8 * r.losses.front()) << amp;
    EXPECT_EQ(r.losses.size(), 40U);
  }
}

// A region that stays open over the steps would keep casts of the weights from one step to the next.
TEST_F(Train, ReplaysStepsInEveryPrecision) {
  for (const char* amp : {"off", "f16", "bf16", "O1", "O2", "O3", "auto"}) {
    TrainConfig config;
    config.epochs = 2;
    config.batch_size = 32;
    config.lr = 0.01;
    config.amp = amp;
    EXPECT_GE(run(config).report.captured.replayed, 30u) << amp;  // of 40 steps
  }
}

TEST_F(Train, CheckpointsOfOtherRunsAreRefused) {
  TrainConfig config;
  config.out = folder_ / "a";
  run(config);
  const auto error_of = [&](const TrainConfig& c) -> std::string {
    try {
      run(c);
    } catch (const IoError& e) {
      return e.what();
    }
    return "no error";
  };
  TrainConfig other;
  other.out = folder_ / "b";
  other.resume = folder_ / "a";
  other.epochs = 2;
  other.optimizer = "adam";
  EXPECT_NE(error_of(other).find("expected the state of Adam"), std::string::npos);
  other.optimizer = "sgd";
  other.batch_size = 32;
  EXPECT_NE(error_of(other).find("--batch-size"), std::string::npos);
  other.batch_size = 64;
  training::Checkpoint c = training::load_checkpoint(folder_ / "a");
  c.weights[0].tensor = zeros({3, 3});  // another network's
  training::save_checkpoint(folder_ / "wrong.safetensors", c);
  other.resume = folder_ / "wrong.safetensors";
  EXPECT_NE(error_of(other).find("wrong.safetensors"), std::string::npos);
  io::save_safetensors(folder_ / "plain.safetensors", {{"x", zeros({1})}});
  other.resume = folder_ / "plain.safetensors";
  EXPECT_NE(error_of(other).find("without training state"), std::string::npos);
  fs::copy(folder_ / "a" / "last.safetensors", folder_ / "cut.safetensors");
  fs::resize_file(folder_ / "cut.safetensors", fs::file_size(folder_ / "cut.safetensors") / 2);
  other.resume = folder_ / "cut.safetensors";
  EXPECT_NE(error_of(other).find("cut short"), std::string::npos);
}

TEST_F(Train, ALossThatIsNoNumberEndsTheRunAndKeepsTheCheckpoint) {
  TrainConfig config;
  config.epochs = 3;
  config.lr = 1e30;
  config.save_every = 1;
  config.out = folder_ / "a";
  try {
    run(config);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("finite loss"), std::string::npos) << e.what();
  }
  EXPECT_NO_THROW(training::load_checkpoint(folder_ / "a"));
}

TEST_F(Train, OverflowsAreSkippedAndTheScaleRecovers) {
  TrainConfig config;
  config.epochs = 3;
  config.amp = "f16";
  config.loss_scale = "dynamic:1048576,2,0.5,4";
  const Result r = run(config);
  EXPECT_GT(r.report.skipped, 0);
  EXPECT_LT(r.report.skipped, r.report.steps / 2);
  EXPECT_GT(*std::max_element(r.scales.begin(), r.scales.end()), 1048576) << "it grew";
  EXPECT_LT(r.losses.back(), r.losses.front());
}

void expect_same(const amp::LossScaleRules& got, const amp::LossScaleRules& wanted, const std::string& text) {
  EXPECT_EQ(got.init_scale, wanted.init_scale) << text;
  EXPECT_EQ(got.dynamic, wanted.dynamic) << text;
  EXPECT_EQ(got.growth_factor, wanted.growth_factor) << text;
  EXPECT_EQ(got.backoff_factor, wanted.backoff_factor) << text;
  EXPECT_EQ(got.growth_interval, wanted.growth_interval) << text;
  EXPECT_EQ(got.floor, wanted.floor) << text;
  EXPECT_EQ(got.cap, wanted.cap) << text;
  EXPECT_EQ(got.hysteresis, wanted.hysteresis) << text;
  EXPECT_EQ(got.refill_on_good_step, wanted.refill_on_good_step) << text;
  EXPECT_EQ(got.late_growth, wanted.late_growth) << text;
  EXPECT_EQ(got.error_at_floor, wanted.error_at_floor) << text;
  EXPECT_EQ(got.overflow_limit, wanted.overflow_limit) << text;
}

// Every policy that the library has is one of the flag's, with its defaults, with all values in order, and by name.
TEST(TrainConfig, EveryLossScalePolicyHasAName) {
  using P = amp::LossScalePolicy;
  const std::pair<const char*, P> cases[] = {
      {"dynamic", P::torch()},
      {"torch", P::torch()},
      {"torch:8,4,0.25,7",
       P::torch({.init_scale = 8, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 7})},
      {"dynamic:growth_interval=7", P::torch({.growth_interval = 7})},
      {"dynamic:1024,4", P::torch({.init_scale = 1024, .growth_factor = 4})},
      {"dynamic:1024,4,0.25", P::torch({.init_scale = 1024, .growth_factor = 4, .backoff_factor = 0.25})},
      {"dynamic:1024,2,0.5,7,4,65536,3",
       P({.init_scale = 1024, .growth_interval = 7, .floor = 4, .cap = 65536, .hysteresis = 3})},
      {"mindspore", P::mindspore()},
      {"mindspore:8", P::mindspore(8)},
      {"mindspore:8,4,7", P::mindspore(8, 4, 7)},
      {"apex", P::apex()},
      {"apex:8,4,7,2,16",
       P::apex({.init_scale = 8, .scale_factor = 4, .scale_window = 7, .min_loss_scale = 2, .max_loss_scale = 16})},
      {"apex:max_loss_scale=1e6", P::apex({.max_loss_scale = 1e6})},
      {"keras", P::keras()},
      {"keras:8,7", P::keras({.initial_scale = 8, .dynamic_growth_steps = 7})},
      {"jmp", P::jmp()},
      {"jmp:8,7,4,2", P::jmp({.loss_scale = 8, .period = 7, .factor = 4, .min_loss_scale = 2})},
      {"deepspeed", P::deepspeed()},
      {"deepspeed:8,4,7,2,3,true,no", P::deepspeed({.init_scale = 8,
                                                    .scale_factor = 4,
                                                    .scale_window = 7,
                                                    .min_scale = 2,
                                                    .hysteresis = 3,
                                                    .consecutive_hysteresis = true,
                                                    .raise_error_at_min_scale = false})},
      {"deepspeed:65536,hysteresis=4,consecutive_hysteresis=1",
       P::deepspeed({.hysteresis = 4, .consecutive_hysteresis = true})},
      {"megatron", P::megatron()},
      {"megatron:8,2,4,0.25,7,3", P::megatron({.initial_scale = 8,
                                               .min_scale = 2,
                                               .growth_factor = 4,
                                               .backoff_factor = 0.25,
                                               .growth_interval = 7,
                                               .hysteresis = 3})},
      {"megatron:hysteresis=4,initial_scale=16", P::megatron({.initial_scale = 16, .hysteresis = 4})},
      {"fixed:8", P::fixed(8)},
      {"8", P::fixed(8)},
  };
  for (const auto& [text, policy] : cases) {
    const auto got = training::parse_loss_scale(text);
    ASSERT_TRUE(got.has_value()) << text;
    expect_same(got->rules(), policy.rules(), text);
    // The run's scaler is one of these, and the error of a wrong word names them all.
    training::TrainConfig config;
    config.loss_scale = text;
    expect_same(training::make_scaler(config).policy().rules(), policy.rules(), text);
    const std::string name = std::string(text).substr(0, std::string(text).find(':'));
    if (name == "8") continue;
    EXPECT_NE(training::loss_scale_forms().find(name), std::string::npos);
  }
}

TEST(TrainConfig, LossScales) {
  const auto rules = [](const char* text) { return training::parse_loss_scale(text).value().rules(); };
  EXPECT_FALSE(training::parse_loss_scale("none").has_value());
  EXPECT_FALSE(rules("1024").dynamic);
  EXPECT_EQ(rules("fixed:8").init_scale, 8);
  const auto d = rules("dynamic:1048576,4,0.25,50");
  EXPECT_EQ(d.init_scale, 1048576);
  EXPECT_EQ(d.growth_factor, 4);
  EXPECT_EQ(d.backoff_factor, 0.25);
  EXPECT_EQ(d.growth_interval, 50);
  // Every rule that a policy of the library can have.
  expect_same(rules("dynamic:1024,floor=4,cap=65536,hysteresis=3,refill_on_good_step=yes,late_growth=1,"
                    "error_at_floor=true,overflow_limit=100"),
              {.init_scale = 1024,
               .floor = 4,
               .cap = 65536,
               .hysteresis = 3,
               .refill_on_good_step = true,
               .late_growth = true,
               .error_at_floor = true,
               .overflow_limit = 100},
              "dynamic");
  EXPECT_EQ(rules("dynamic:overflow_limit=0").overflow_limit, 0);
  expect_same(rules("mindspore:16777216,2,2000,overflow_limit=1000"), amp::DynamicLossScaleManager().policy().rules(),
              "mindspore");
  const auto m = rules("mindspore:1024,2,50");
  EXPECT_EQ(m.floor, 1);
  EXPECT_EQ(m.backoff_factor, 0.5);
  for (const char* bad : {"",
                          "x",
                          "dynamic:",
                          "dynamic:1,2,3,4",
                          "dynamic:-1",
                          "fixed",
                          "fixed:0",
                          "mindspore:1,1,1",
                          "mindspore:0.5,2,50",
                          "dynamic:1,2,0.5,1.5",
                          "1e400",
                          "nan",
                          "none:",
                          "none:1",
                          "apex:",
                          "apex:1,2,3,4,5,6",
                          "keras:1,0",
                          "jmp:1,2000,0.5",
                          "deepspeed:hysteresis",
                          "megatron:=1",
                          "megatron:hysteresis=0",
                          "megatron:hysteresis=2,hysteresis=3",
                          "deepspeed:hysteresis=4,65536",
                          "deepspeed:1,init_scale=2",
                          "deepspeed:raise_error_at_min_scale=maybe",
                          "apex:hysteresis=2",
                          "dynamic:overflow_limit=-1",
                          "dynamic:overflow_limit=1.5",
                          "dynamic:error_at_floor=1",
                          "dynamic:floor=8,cap=4",
                          "megatron:65536,1,2,0.5,1e10",
                          "Apex",
                          "apex ",
                          "megatron:nan"}) {
    EXPECT_THROW(training::parse_loss_scale(bad), Error) << bad;
  }
  for (const char* bad :
       {"x", "megatron:hysteresis=0", "apex:hysteresis=2", "deepspeed:raise_error_at_min_scale=maybe"}) {
    try {
      training::parse_loss_scale(bad);
      ADD_FAILURE() << bad;
    } catch (const Error& e) {
      const std::string text = e.what();
      EXPECT_EQ(text.find("--loss-scale: expected "), 0U) << text;
      EXPECT_NE(text.find(bad), std::string::npos) << text;
    }
  }
  EXPECT_THROW(training::amp_dtype("O2"), Error);
  EXPECT_THROW(training::amp_dtype("f8"), Error);
}

}  // namespace
}  // namespace halfstep
