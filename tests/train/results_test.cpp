// SPDX-License-Identifier: Apache-2.0
// The table of a run and its curves.
#include "halfstep/train/results.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>

#include "halfstep/core/error.h"
#include "halfstep/core/random.h"
#include "halfstep/data/digits.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/train/trainer.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

using training::EpochResult;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<EpochResult> two_epochs() {
  return {{.epoch = 1,
           .step = 10,
           .loss = 2.25,
           .metrics = {{"loss", 2}, {"a \"b\", c\n", 0.5}},
           .lr = 0.1,
           .scale = 65536,
           .skipped = 1,
           .seconds = 1.5,
           .samples_per_s = 100,
           .peak_tensor_mb = 12.5,
           .peak_rss_mb = 80},
          {.epoch = 2, .step = 20, .loss = kNan, .metrics = {{"top1", 0.75}}, .lr = 1e-5, .scale = 1, .skipped = 2}};
}

TEST(Results, TheTableIsCsv) {
  EXPECT_EQ(training::results_csv(two_epochs()),
            "epoch,step,loss,eval_loss,\"eval_a \"\"b\"\", c\\n\",eval_top1,lr,scale,skipped,seconds,samples_per_s,"
            "peak_tensor_mb,peak_rss_mb\n"
            "1,10,2.25,2,0.5,,0.1,65536,1,1.5,100,12.5,80\n"
            "2,20,nan,,,0.75,1e-05,1,2,0,0,0,0\n");
  EXPECT_EQ(training::csv_field("plain"), "plain");
  EXPECT_EQ(training::csv_field("a,b"), "\"a,b\"");
  EXPECT_EQ(training::csv_field("\xff"), "\\xff");
}

TEST(Results, AreReadAsTheyWereWritten) {
  test::TemporaryDir dir;
  const auto path = dir.path() / "results.csv";
  const auto write = [&](const std::string& text) {
    io::AtomicFile file(path);
    file.write(text.data(), text.size());
    file.commit();
  };
  const std::string text = training::results_csv(two_epochs());
  write(text);
  const auto rows = training::read_results(path);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(training::results_csv(rows), text);
  EXPECT_EQ(rows[1].skipped, 2);
  EXPECT_TRUE(std::isnan(rows[1].loss));
  EXPECT_EQ(rows[1].metrics.size(), 1u);
  const auto refused = [&](const std::string& content, const std::string& why) {
    write(content);
    const std::string error = test::error_of<IoError>([&] { training::read_results(path); });
    EXPECT_NE(error.find(why), std::string::npos) << error;
  };
  refused("", "an empty file");
  refused("name,marks\nme,1\n", ":1: expected the columns of a run's results, got 'name'");
  refused("epoch,step,loss\n1,2\n", ":2: expected 3 fields, got 2");
  refused("epoch,step,loss\n1,2,x\n", ":2: expected a number for loss, got 'x'");
  refused("epoch,step,loss\n1,-2,1\n", ":2: expected a number for step");
  refused("epoch,step,loss\n1e300,2,1\n", ":2: expected a number for epoch");
}

TEST(Results, StepsBecomeAFewPoints) {
  training::StepCurve curve(8);
  for (int i = 1; i <= 1000; ++i) {
    curve.add(
        {.step = i, .loss = i == 500 ? kNan : static_cast<double>(i), .lr = 2.0 * i, .scale = 1, .skipped = i / 2});
  }
  const auto points = curve.points();
  ASSERT_LE(points.size(), 8u);
  EXPECT_GT(points.size(), 4u);
  std::int64_t before = 0;
  for (const auto& p : points) {
    // The mean of before + 1 ... p.step, of which 500 is left out.
    const double n = static_cast<double>(p.step - before), sum = n * static_cast<double>(before + 1 + p.step) / 2;
    const bool holds = before < 500 && 500 <= p.step;
    EXPECT_DOUBLE_EQ(p.loss, holds ? (sum - 500) / (n - 1) : sum / n);
    EXPECT_EQ(p.lr, 2.0 * static_cast<double>(p.step));
    EXPECT_EQ(p.skipped, p.step / 2);
    before = p.step;
  }
  EXPECT_EQ(before, 1000);
  training::StepCurve bad;
  bad.add({.step = 1, .loss = kNan});
  EXPECT_TRUE(std::isnan(bad.points()[0].loss));
}

TEST(Results, CurvesOfLittleAndOfNothing) {
  const auto svg = [](const training::RunCurves& run) { return draw_curves(run).svg(); };
  const std::string empty = svg({.title = "<run>"});
  EXPECT_NE(empty.find(">&lt;run&gt;</text>"), std::string::npos);
  for (const char* title : {"Loss", "Learning rate", "Loss scale", "Skipped steps, in all", "Speed"}) {
    EXPECT_NE(empty.find(std::string(">") + title + "</text>"), std::string::npos) << title;
  }
  // One epoch of one step, and one that ended in NaN.
  EXPECT_EQ(
      svg({.rows = {{.epoch = 1, .step = 1, .loss = 1}}, .steps = {{.step = 1, .loss = 1, .lr = 0.1}}}).find("nan"),
      std::string::npos);
  const std::string bad = svg({.epochs = 2,
                               .steps_in_epoch = 2,
                               .rows = {{.epoch = 1, .step = 2, .loss = kNan, .metrics = {{"top1", kNan}}}},
                               .steps = {{.step = 1, .loss = 1}, {.step = 2, .loss = kNan}}});
  EXPECT_NE(bad.find(">not finite</text>"), std::string::npos);
  EXPECT_EQ(bad.find("\"nan"), std::string::npos);
}

// An evaluation that is stopped has seen a part of the samples: no figure is made of that.
TEST(Results, FiguresAreOfWholeEvaluations) {
  test::TemporaryDir dir;
  const auto samples = [](data::Split split, std::int64_t count) {
    return std::make_shared<data::MnistDataset>(data::make_digits(split, {.count = count}),
                                                data::ImageOptions{.flatten = true});
  };
  training::TrainConfig config;
  config.epochs = 6;
  config.eval_batch_size = 8;
  config.out = dir.path() / "run";
  std::atomic<bool> stop{false};
  int evaluations = 0;
  training::TrainCallbacks callbacks;
  callbacks.on_eval = [&](const training::EvalReport&) { ++evaluations; };
  // Of an earlier evaluation, by then, figures may be due: pictures are not made after each of such short epochs.
  callbacks.on_eval_batch = [&](const training::EvalProgress&) { stop = evaluations == 4; };
  std::shared_ptr<const void> holder;
  const auto report =
      training::train(config, training::make_classifier("mlp", holder), samples(data::Split::kTrain, 64),
                      samples(data::Split::kTest, 32), callbacks, &stop);
  EXPECT_TRUE(report.interrupted);
  EXPECT_EQ(evaluations, 4);
  const std::string table = io::read_file(config.out / "classes.csv", 1 << 20);
  int counted = 0;
  for (std::size_t line = table.find('\n') + 1; line < table.size(); line = table.find('\n', line) + 1) {
    counted += std::stoi(table.substr(table.rfind(',', table.find('\n', line)) + 1));
  }
  EXPECT_EQ(counted, 32) << table;
}

// A run that resumes and is stopped before its first step.
TEST(Results, AreWrittenAsSoonAsARunGoesOn) {
  test::TemporaryDir dir;
  const auto samples = [](data::Split split, std::int64_t count) {
    return std::make_shared<data::MnistDataset>(data::make_digits(split, {.count = count}),
                                                data::ImageOptions{.flatten = true});
  };
  const auto training_part = samples(data::Split::kTrain, 64), test_part = samples(data::Split::kTest, 32);
  training::TrainConfig config;
  config.epochs = 2;
  config.out = dir.path() / "run";
  config.log_json = config.out / "log.jsonl";
  std::atomic<bool> stop{false};
  const auto train = [&] {
    manual_seed(1);
    std::shared_ptr<const void> holder;
    return training::train(config, training::make_classifier("mlp", holder), training_part, test_part, {}, &stop);
  };
  std::filesystem::create_directory(config.out);
  config.epochs = 1;
  train();
  const std::string table = io::read_file(config.out / "results.csv", 1 << 20);
  std::filesystem::remove(config.out / "curves.svg");
  {
    // As if it had been killed before its checkpoint: a row that comes again.
    io::AtomicFile file(config.out / "results.csv");
    std::string more = table.substr(table.find('\n') + 1);
    more = table + "2,2" + more.substr(more.find(',', 2));
    file.write(more.data(), more.size());
    file.commit();
  }
  config.epochs = 2;
  config.resume = config.out;
  stop = true;
  EXPECT_TRUE(train().interrupted);
  EXPECT_EQ(io::read_file(config.out / "results.csv", 1 << 20), table);
  const std::string curves = io::read_file(config.out / "curves.svg", 1 << 20);
  EXPECT_NE(curves.find(">mlp in float32, batch 64</text>"), std::string::npos);
  stop = false;
  train();
  EXPECT_EQ(training::read_results(config.out / "results.csv").size(), 2u);
  // Without a folder, curves for TensorBoard have no place.
  config.out.clear();
  config.resume.clear();
  config.log_json.clear();
  config.tensorboard = true;
  EXPECT_NE(test::error_of<Error>(train).find("got no `out`"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
