// SPDX-License-Identifier: Apache-2.0
// What a run watches and records: the ranges of steps, and that watching changes nothing.
#include "halfstep/train/debugging.h"

#include <gtest/gtest.h>

#include <limits>

#include "halfstep/debug/nonfinite.h"
#include "halfstep/nn/activation.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/runtime/log.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using test::Regression;
using test::Samples;
using training::DebugConfig;
using training::parse_steps;
using training::TrainConfig;

TEST(Debugging, ReadsRangesOfSteps) {
  constexpr std::int64_t kEnd = std::numeric_limits<std::int64_t>::max();
  const auto both = [](const char* text) {
    const auto range = parse_steps(text, "--debug-steps");
    return std::pair(range.first, range.last);
  };
  EXPECT_EQ(both("3"), std::pair(std::int64_t{3}, std::int64_t{3}));
  EXPECT_EQ(both("10-12"), std::pair(std::int64_t{10}, std::int64_t{12}));
  EXPECT_EQ(both("10-"), std::pair(std::int64_t{10}, kEnd));
  EXPECT_EQ(both("all"), std::pair(std::int64_t{1}, kEnd));
  for (const char* bad : {"", "0", "-", "-3", "2-1", "1-2-3", "x", "1.5", "3 ", "99999999999999999999"}) {
    EXPECT_THROW(both(bad), Error) << bad;
  }
}

class DebuggingRun : public ::testing::Test {
 protected:
  // 50 samples in batches of 8, two a step: 4 steps an epoch, 8 in all.
  TrainConfig config(const DebugConfig& debug) const {
    return {.epochs = 2, .batch_size = 8, .lr = 0.1, .amp = "f16", .accumulate = 2, .seed = 5, .debug = debug};
  }
  test::Recorded run(const DebugConfig& debug, std::vector<std::string>* reports = nullptr) {
    manual_seed(4);
    const Regression net(12, 6);
    const Samples samples(50, 12, 6, 1);
    training::TrainCallbacks callbacks;
    test::Recorded result;
    callbacks.on_step = [&](const training::StepReport& r) { result.steps.push_back(r); };
    callbacks.on_debug = [&](const std::string& text) {
      if (reports) reports->push_back(text);
    };
    const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
    result.report = training::train(config(debug), classifier, samples.dataset(), samples.dataset(), callbacks);
    weights_ = test::values(net);
    return result;
  }
  test::TemporaryDir temporary_;
  std::vector<std::vector<double>> weights_;
};

TEST_F(DebuggingRun, ChangesNothing) {
  const auto plain = run({}).losses();
  const auto weights = weights_;
  for (const DebugConfig& debug :
       {DebugConfig{.dump = temporary_.path() / "d", .steps = "2-3"}, DebugConfig{.compare = "f64", .steps = "all"},
        DebugConfig{.compare = "twin", .steps = "3"}, DebugConfig{.nonfinite = "raise"},
        DebugConfig{.profile = temporary_.path() / "p"}}) {
    std::vector<std::string> reports;
    EXPECT_EQ(run(debug, &reports).losses(), plain);
    EXPECT_EQ(weights_, weights);
    EXPECT_EQ(reports.size(), 1u);
    EXPECT_FALSE(observed());
  }
}

TEST_F(DebuggingRun, DumpsTheStepsOfTheRange) {
  run({.dump = temporary_.path() / "one", .steps = "8"});
  run({.dump = temporary_.path() / "three", .steps = "1-3"});
  const auto updates = [&](const char* folder) {
    int count = 0;
    for (const auto& entry : fs::directory_iterator(temporary_.path() / folder)) {
      count += entry.path().filename().string().ends_with("_sgd_step") ? 1 : 0;
    }
    return count;
  };
  EXPECT_EQ(updates("one"), 1);
  EXPECT_EQ(updates("three"), 3);
}

TEST_F(DebuggingRun, SaysWhenTheRangeWasNotReached) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
  run({.compare = "f64", .steps = "9", .profile = temporary_.path() / "p", .profile_steps = "10-"});
  set_log_sink({});
  ASSERT_EQ(said.size(), 2u);
  EXPECT_EQ(said[0], "--debug-steps 9: the run ended after step 8");
  EXPECT_EQ(said[1], "--profile-steps 10-: the run ended after step 8");
}

TEST_F(DebuggingRun, RefusesWhatItDoesNotKnow) {
  EXPECT_THROW(run({.level = "most"}), Error);
  EXPECT_THROW(run({.compare = "f16"}), Error);
  EXPECT_THROW(run({.nonfinite = "yes"}), Error);
  EXPECT_THROW(run({.steps = "0"}), Error);
  EXPECT_THROW(run({.profile_steps = "x"}), Error);
  TrainConfig off = config({.compare = "twin"});
  off.amp = "off";
  EXPECT_THROW(training::check(off), Error);
}

}  // namespace
}  // namespace halfstep
