// SPDX-License-Identifier: Apache-2.0
// The log of a Model's run.
#include "halfstep/train/json_logger.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "halfstep/data/loader.h"
#include "halfstep/nn/loss.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/model.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using training::JsonLogger;
using training::JsonLoggerOptions;

class JsonLogs : public ::testing::Test {
 protected:
  // 40 samples in batches of 8: 5 steps an epoch.
  training::History run(const std::vector<training::Callback>& callbacks, const training::FitOptions& options = {},
                        bool capture = false) {
    manual_seed(4);
    const test::Regression net(12, 6);
    const test::Samples samples(40, 12, 6, 1);
    optim::SGD optimizer{net.parameters(), {.lr = 0.25}};
    data::DataLoader loader{samples.dataset(), {.batch_size = 8, .shuffle = true, .seed = 3}};
    data::DataLoader test{samples.dataset(), {.batch_size = 8}};
    training::Model model{
        net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer, .metrics = {"accuracy"}, .capture = capture}};
    return model.fit(2, loader, test, callbacks, options);
  }
  std::vector<json> lines() const {
    std::vector<json> result;
    std::ifstream in(file());
    for (std::string line; std::getline(in, line);) result.push_back(json::parse(line));
    return result;
  }
  std::vector<json> lines(const std::string& event) const {
    std::vector<json> result = lines();
    std::erase_if(result, [&](const json& line) { return line["event"] != event; });
    return result;
  }
  fs::path file() const { return temporary_.path() / "log.jsonl"; }

  test::TemporaryDir temporary_;
};

TEST_F(JsonLogs, HaveStepsEvaluationsAndTheEnd) {
  const training::History history =
      run({JsonLogger{file(), {.start = {{"model", std::string("regression")}, {"lr", 1.5}}}}});
  std::string events;
  for (const json& line : lines()) events += line["event"].get<std::string>()[1];
  EXPECT_EQ(events,
            "tttttt"
            "v"
            "ttttt"
            "v"
            "n");  // start, steps, eval, steps, eval, end
  const json start = lines("start").at(0);
  EXPECT_EQ(start["model"], "regression");
  EXPECT_EQ(start["lr"], 1.5) << "given in place of the optimizer's";
  EXPECT_EQ(start["epochs"], 2);
  EXPECT_EQ(start["accumulate"], 1);
  EXPECT_EQ(start["device"], "cpu");
  EXPECT_EQ(start["scale"], 1.0);
  EXPECT_EQ(start["step"], 0);
  double sum = 0;
  std::int64_t number = 0;
  for (const json& step : lines("step")) {
    EXPECT_EQ(step["step"], ++number);
    EXPECT_EQ(step["epoch"], number <= 5 ? 1 : 2);
    EXPECT_EQ(step["lr"], 0.25);
    EXPECT_GT(step["samples_per_s"], 0);
    EXPECT_GT(step["peak_rss_mb"], 0);
    if (number <= 5) sum += step["loss"].get<double>() * 8;
  }
  EXPECT_DOUBLE_EQ(sum / 40, history["loss"][0]);
  const std::vector<json> evals = lines("eval");
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(evals[i]["accuracy"], history["eval_accuracy"][i]);
    EXPECT_EQ(evals[i]["loss"], history["eval_loss"][i]);
    EXPECT_EQ(evals[i]["step"], 5 * (i + 1));
  }
  const json end = lines("end").at(0);
  EXPECT_EQ(end["epochs"], 2);
  EXPECT_EQ(end["step"], 10);
  EXPECT_EQ(end["accuracy"], history["eval_accuracy"][1]);
  EXPECT_EQ(end["interrupted"], false);
  EXPECT_GT(end["seconds"], 0);
}

TEST_F(JsonLogs, SayHowStepsWereReplayed) {
  run({JsonLogger{file()}}, {}, true);
  const json capture = lines("capture").at(0);
  EXPECT_EQ(capture["plain"].get<int>() + capture["recorded"].get<int>() + capture["replayed"].get<int>(), 10);
  EXPECT_GT(capture["replayed"], 5);
}

TEST_F(JsonLogs, SayThatARunWasStopped) {
  std::atomic<bool> stop{false};
  run({JsonLogger{file()}, training::Lambda{{.on_step_end = [&](training::TrainContext& c) { stop = c.step == 3; }}}},
      {.stop = &stop});
  EXPECT_EQ(lines("step").size(), 3u);
  EXPECT_EQ(lines("end").at(0)["interrupted"], true);
  EXPECT_EQ(lines("end").at(0)["epochs"], 0);
  // A callback that has seen enough is no interruption.
  run({JsonLogger{file()}, training::Lambda{{.on_step_end = [&](training::TrainContext& c) { c.request_stop(); }}}});
  EXPECT_EQ(lines("end").at(0)["interrupted"], false);
  EXPECT_EQ(lines().size(), 3u) << "the file was written anew";
}

TEST_F(JsonLogs, GoOnBehindOtherLines) {
  const auto log = std::make_shared<training::JsonLog>(file());
  log->write("note", {{"text", std::string("before")}});
  run({JsonLogger{log, {.end = false}}});
  log->write("note", {{"text", std::string("after")}});
  EXPECT_EQ(lines("note").size(), 2u);
  EXPECT_TRUE(lines("end").empty());
  const std::size_t before = lines().size();
  run({JsonLogger{file(), {.append = true}}});
  EXPECT_EQ(lines().size(), before + 14);
  EXPECT_THROW(JsonLogger(std::shared_ptr<training::JsonLog>()), Error);
  EXPECT_THROW(JsonLogger(temporary_.path() / "no/folder/log"), IoError);
}

}  // namespace
}  // namespace halfstep
