// SPDX-License-Identifier: Apache-2.0
// Callbacks that dump, compare, check and profile the steps of a Model.
#include "halfstep/train/callbacks_debug.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "halfstep/data/loader.h"
#include "halfstep/nn/loss.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/observer.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/model.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::error_of;
using test::Regression;
using test::Samples;
using training::Callback;
using training::DebugReport;
using training::Model;

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class DebugCallbacks : public ::testing::Test {
 protected:
  // 40 samples in batches of 8: 5 steps an epoch, 10 in all.
  std::vector<double> run(const std::vector<Callback>& callbacks,
                          training::LossFunction loss = nn::CrossEntropyLoss{}) {
    manual_seed(4);
    const Regression net(12, 6);
    const Samples samples(40, 12, 6, 1);
    optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
    data::DataLoader loader{samples.dataset(), {.batch_size = 8, .shuffle = true, .seed = 3}};
    Model model{net, {.loss = std::move(loss), .optimizer = optimizer}};
    std::vector<double> result = model.train(2, loader, callbacks)["loss"];
    for (const auto& values : test::values(net)) result.insert(result.end(), values.begin(), values.end());
    return result;
  }
  // What a callback says goes to `said`.
  DebugReport report(const fs::path& file = {}) {
    return {.file = file, .say = [this](const std::string& text) { said_.push_back(text); }};
  }
  fs::path folder() const { return temporary_.path(); }

  test::TemporaryDir temporary_;
  std::vector<std::string> said_;
};

TEST_F(DebugCallbacks, DumpTheStepsOfARange) {
  const auto plain = run({});
  const auto dumped = run({training::DumpTensors{
      {.dump = {.folder = folder() / "dump", .level = debug::DumpLevel::first}, .steps = {2, 4}, .report = report()}}});
  EXPECT_EQ(dumped, plain);
  EXPECT_FALSE(observed());
  int calls = 0, updates = 0;
  for (const auto& entry : fs::directory_iterator(folder() / "dump")) {
    const json call = json::parse(text_of(entry.path() / "call.json"));
    ++calls;
    if (call["op"] != "sgd_step") continue;
    ++updates;
    EXPECT_TRUE(call["inputs"][0].contains("first"));
  }
  EXPECT_EQ(updates, 3);
  EXPECT_EQ(said_, std::vector{std::to_string(calls) + " calls dumped in " + (folder() / "dump").string() + "\n"});
}

TEST_F(DebugCallbacks, CompareStepsWithAReference) {
  const auto plain = run({});
  const training::CompareSteps compare{
      {.compare = {.reference = DType::f32}, .steps = {3, 3}, .report = report(folder() / "new/report.txt")}};
  EXPECT_EQ(run({compare}), plain);
  ASSERT_EQ(said_.size(), 1u);
  EXPECT_NE(said_[0].find("compared with the CPU in f32"), std::string::npos) << said_[0];
  EXPECT_EQ(text_of(folder() / "new/report.txt"), said_[0]);
  run({compare});  // another run has another report
  EXPECT_EQ(said_.size(), 2u);
}

TEST_F(DebugCallbacks, CompareAStepWithItsTwin) {
  const auto values = [&](const std::vector<Callback>& callbacks) {
    manual_seed(4);
    const Regression net(12, 6);
    const Samples samples(40, 12, 6, 1);
    optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
    data::DataLoader loader{samples.dataset(), {.batch_size = 8}};
    const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
    Model model{make_train_step(std::make_shared<training::ClassificationTask>(classifier), optimizer,
                                amp::GradScaler{}, {.autocast = f16})};
    model.train(1, loader, callbacks);
    return test::values(net);
  };
  const training::CompareTwin twin{{.steps = {2, 3}, .report = report(folder() / "twin.txt")}};
  EXPECT_EQ(values({twin}), values({}));
  ASSERT_EQ(said_.size(), 1u) << "one step of the range";
  EXPECT_NE(said_[0].find("f16"), std::string::npos) << said_[0];
  EXPECT_EQ(text_of(folder() / "twin.txt"), said_[0]);
  EXPECT_NE(error_of<Error>([&] { run({twin}); }).find("CompareTwin: expected a step in an autocast region"),
            std::string::npos);
}

TEST_F(DebugCallbacks, FindOpsThatOverflow) {
  EXPECT_EQ(run({training::NonFiniteMonitor{{.report = report()}}}), run({}));
  EXPECT_EQ(said_, std::vector<std::string>{"0 calls made infinities or NaNs out of finite inputs\n"});
  said_.clear();
  const auto overflows = [](const Tensor& output, const Tensor& target) {
    return mul(mul(nn::CrossEntropyLoss{}(output, target), 1e30), 1e30);
  };
  const fs::path file = folder() / "nonfinite.txt";
  EXPECT_THROW(
      run({training::NonFiniteMonitor{{.check = {.action = debug::OnNonFinite::raise}, .report = report(file)}}},
          overflows),
      debug::NonFiniteError);
  ASSERT_EQ(said_.size(), 1u) << "a run that fails reports too";
  EXPECT_NE(text_of(file).find("the first: "), std::string::npos) << text_of(file);
}

TEST_F(DebugCallbacks, ProfileSteps) {
  const auto plain = run({});
  EXPECT_EQ(run({training::ProfileSteps{{.folder = folder() / "profile", .steps = {2, 3}, .report = report()}}}),
            plain);
  const json trace = json::parse(text_of(folder() / "profile/trace.json"));
  int updates = 0;
  for (const json& event : trace["traceEvents"]) updates += event.value("name", "") == "sgd_step" ? 1 : 0;
  EXPECT_EQ(updates, 2);
  const std::string table = text_of(folder() / "profile/profile.txt");
  EXPECT_NE(table.find("sgd_step"), std::string::npos);
  ASSERT_EQ(said_.size(), 1u);
  EXPECT_EQ(said_[0].find(table), 0u);
}

TEST_F(DebugCallbacks, WarnOfStepsThatARunDoesNotReach) {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel, std::string_view text) { warnings.emplace_back(text); });
  DebugReport named = report(), silent = report();
  named.name = "the late steps";
  silent.warns = false;
  const training::StepRange late{.first = 11, .last = 12};
  run({training::CompareSteps{{.steps = late, .report = report()}},
       training::ProfileSteps{{.folder = folder() / "p", .steps = late, .report = named}},
       training::DumpTensors{{.dump = {.folder = folder() / "d"}, .steps = late, .report = silent}}});
  set_log_sink({});
  EXPECT_EQ(warnings, (std::vector<std::string>{"CompareSteps: the run ended after step 10",
                                                "the late steps: the run ended after step 10"}));
  EXPECT_TRUE(said_.empty());
  EXPECT_THROW(training::CompareSteps({.steps = {.first = 3, .last = 2}}), Error);
  EXPECT_THROW(training::DumpTensors({.steps = {.first = 0, .last = 2}}), Error);
}

}  // namespace
}  // namespace halfstep
