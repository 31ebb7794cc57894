// SPDX-License-Identifier: Apache-2.0
// Callbacks one by one, in runs that are made up: the losses and metrics are given, no network is trained.
#include "halfstep/train/callbacks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "halfstep/io/safetensors.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/create.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/checkpoint.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using training::Callback;
using training::TrainContext;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// A run with the rhythm of a Model's, and whatever numbers a test wants. Watching is not checked here but in Model.
struct MadeUpRun {
  nn::Linear net{{.in = 2, .out = 1}};
  optim::SGD optimizer{net.parameters(), {.lr = 1, .momentum = 0.9}};
  std::function<double(std::int64_t step)> loss = [](std::int64_t) { return 1.0; };
  std::function<void(TrainContext&)> at_epoch_end = [](TrainContext&) {};
  TrainContext context;

  void run(int epochs, std::int64_t steps, const Callback& callback, bool begin = false) {
    context.epochs = epochs;
    context.steps_in_epoch = steps;
    context.network = &net;
    context.optimizer = &optimizer;
    if (begin) callback->on_train_begin(context);
    while (context.epoch < epochs && !context.stop_requested()) {
      ++context.epoch;
      context.step_in_epoch = 0;
      callback->on_epoch_begin(context);
      for (std::int64_t i = 0; i < steps; ++i) {
        ++context.step;
        ++context.step_in_epoch;
        callback->on_step_begin(context);
        context.loss = scalar_tensor(loss(context.step));
        callback->on_step_end(context);
      }
      at_epoch_end(context);
      callback->on_epoch_end(context);
    }
    callback->on_train_end(context);
  }
};

// A metric's values, epoch by epoch; NaN stands for an epoch without evaluation.
std::function<void(TrainContext&)> metric(const std::string& name, std::vector<double> values) {
  return [=](TrainContext& c) {
    c.metrics = {};
    const double v = values[static_cast<std::size_t>(c.epoch - 1)];
    if (!std::isnan(v)) c.metrics.set(name, v);
  };
}

TEST(LossMonitor, CountsStepsOfTheWholeRun) {
  std::ostringstream out;
  MadeUpRun r;
  // 938 steps an epoch are MNIST's in batches of 64.
  r.loss = [](std::int64_t step) { return step == 100 ? 2.2883859 : 1.0 / static_cast<double>(step); };
  r.run(10, 938, training::LossMonitor{100, out});
  std::vector<std::string> lines;
  std::istringstream in(out.str());
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 93u);  // 9380 / 100
  EXPECT_EQ(lines[0], "epoch: 1 step: 100, loss is 2.2883859");
  EXPECT_EQ(lines[9].substr(0, 30), "epoch: 2 step: 62, loss is 0.0");  // 1000 - 938
  EXPECT_EQ(lines[84].substr(0, 24), "epoch: 10 step: 58, loss");
  EXPECT_EQ(lines[85].substr(0, 25), "epoch: 10 step: 158, loss");
  EXPECT_EQ(lines[92].substr(0, 25), "epoch: 10 step: 858, loss");
}

TEST(LossMonitor, WritesTheShortestNumberThatReadsBack) {
  std::ostringstream out;
  MadeUpRun r;
  const double losses[] = {2, 0.1, 1e-7, 0.3333333333333333};
  r.loss = [&](std::int64_t step) { return losses[step - 1]; };
  r.run(1, 4, training::LossMonitor{1, out});
  EXPECT_EQ(out.str(),
            "epoch: 1 step: 1, loss is 2.0\nepoch: 1 step: 2, loss is 0.1\nepoch: 1 step: 3, loss is 1e-07\n"
            "epoch: 1 step: 4, loss is 0.33333334\n");
}

TEST(LossMonitor, StopsOnALossThatIsNoNumber) {
  for (const double bad : {kNan, kInf}) {
    for (const std::int64_t every : {0, 1, 100}) {
      std::ostringstream out;
      MadeUpRun r;
      r.loss = [&](std::int64_t step) { return step == 7 ? bad : 1.0; };
      const std::string error = error_of<Error>([&] { r.run(3, 5, training::LossMonitor{every, out}); });
      EXPECT_NE(error.find(std::isnan(bad) ? "got nan in epoch 2, step 2" : "got inf in epoch 2, step 2"),
                std::string::npos)
          << error;
      EXPECT_EQ(r.context.step, 7);
      EXPECT_EQ(out.str().empty(), every != 1);
    }
  }
}

TEST(TimeMonitor, LeavesEvaluationOut) {
  std::ostringstream out;
  TrainContext c;
  c.step_in_epoch = 4;
  training::TimeMonitor monitor(out);
  const auto wait = [](int ms) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
    while (std::chrono::steady_clock::now() < end) {
    }
  };
  const auto before = std::chrono::steady_clock::now();
  monitor.on_epoch_begin(c);
  wait(8);
  monitor.on_eval_begin(c);
  wait(40);
  monitor.on_eval_end(c);
  monitor.on_epoch_end(c);
  const double all = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - before).count();
  double epoch = 0, step = 0;
  ASSERT_EQ(std::sscanf(out.str().c_str(), "epoch time: %lf ms, per step time: %lf ms", &epoch, &step), 2) << out.str();
  EXPECT_GE(epoch, 8);
  EXPECT_LE(epoch, all - 40 + 0.001);
  EXPECT_NEAR(step, epoch / 4, 0.001);  // both have three digits
}

TEST(History, HasAValueAnEpoch) {
  training::History history;
  MadeUpRun r;
  r.at_epoch_end = [](TrainContext& c) {
    c.epoch_loss = 1.0 / c.epoch;
    c.skipped = c.epoch - 1;
    c.metrics = {};
    if (c.epoch == 2) c.metrics.set("accuracy", 0.5);
    c.metrics.set("recall", tensor({0.5, 1}));
    if (c.epoch == 3) c.request_stop("enough");
    c.optimizer->set_lr(0.5 * c.epoch);
  };
  r.run(5, 4, history, true);  // a copy goes in
  EXPECT_EQ(history.epochs(), 3);
  EXPECT_EQ(history.steps(), 12);
  EXPECT_EQ(history.stop_reason(), "enough");
  EXPECT_EQ(history["loss"], (std::vector<double>{1, 0.5, 1.0 / 3}));
  EXPECT_EQ(history["lr"], (std::vector<double>{0.5, 1, 1.5}));
  EXPECT_EQ(history["skipped"], (std::vector<double>{0, 1, 2}));
  const std::vector<double>& accuracy = history["eval_accuracy"];
  ASSERT_EQ(accuracy.size(), 3u);
  EXPECT_TRUE(std::isnan(accuracy[0]) && accuracy[1] == 0.5 && std::isnan(accuracy[2]));
  EXPECT_EQ(history.values().count("eval_recall"), 0u);
  const std::string error = error_of<Error>([&] { (void)history["acc"]; });
  EXPECT_NE(error.find("eval_accuracy, loss, lr, skipped"), std::string::npos) << error;
}

TEST(Lambda, CallsItsFunctions) {
  std::string calls;
  const auto note = [&](char c) { return [&calls, c](TrainContext&) { calls += c; }; };
  MadeUpRun r;
  r.run(2, 2,
        training::Lambda{{.on_train_begin = note('B'),
                          .on_train_end = note('E'),
                          .on_epoch_begin = note('('),
                          .on_epoch_end = note(')'),
                          .on_step_begin = note('<'),
                          .on_step_end = note('>')}},
        true);
  EXPECT_EQ(calls, "B(<><>)(<><>)E");
  MadeUpRun silent;
  silent.run(1, 1, training::Lambda{{}}, true);
}

// Epochs until the run ends, by hand from the rule: `patience` epochs in a row that aren't better end it.
TEST(EarlyStopping, EndsAfterPatience) {
  struct Case {
    training::EarlyStoppingOptions options;
    std::vector<double> values;
    int epochs;
  };
  const std::vector<double> dip{5, 4, 4.5, 4.2, 3, 3.1, 3.2, 3.3, 3.4, 3.5};
  const Case cases[] = {
      {{.monitor = "eval_loss", .patience = 0}, dip, 3},
      {{.monitor = "eval_loss", .patience = 1}, dip, 3},
      {{.monitor = "eval_loss", .patience = 2}, dip, 4},
      {{.monitor = "eval_loss", .patience = 3}, dip, 8},
      {{.monitor = "eval_loss", .patience = 9}, dip, 10},
      {{.monitor = "eval_loss", .min_delta = 0.9, .patience = 2}, dip, 4},
      {{.monitor = "eval_loss", .min_delta = 1.5, .patience = 3}, dip, 4},  // 3 is better by 2, but comes too late
      {{.monitor = "eval_accuracy", .patience = 2}, dip, 3},                // larger is better
      {{.monitor = "eval_accuracy", .patience = 2, .better = training::Better::smaller}, dip, 4},
      {{.monitor = "eval_top1", .patience = 2}, dip, 3},
      {{.monitor = "eval_mAP50-95", .patience = 2}, dip, 3},
      {{.monitor = "eval_fitness", .patience = 2}, dip, 3},
      {{.monitor = "eval_loss", .patience = 3, .baseline = 3.5}, dip, 3},
      {{.monitor = "eval_loss", .patience = 5, .baseline = 3.5}, dip, 10},
      {{.monitor = "eval_loss", .patience = 2}, {kInf, 3, kInf, kInf, 1}, 4},
      {{.monitor = "eval_loss", .patience = 2}, {3, kNan, 4, kNan, 4, 1}, 5},  // NaN: not evaluated
  };
  for (const Case& c : cases) {
    MadeUpRun r;
    r.at_epoch_end = metric(c.options.monitor.substr(5), c.values);
    r.run(static_cast<int>(c.values.size()), 1, training::EarlyStopping{c.options});
    EXPECT_EQ(r.context.epoch, c.epochs) << "case " << &c - cases;
  }
  MadeUpRun r;
  r.at_epoch_end = metric("loss", dip);
  r.run(10, 1, training::EarlyStopping{{.patience = 3}});
  EXPECT_EQ(r.context.stop_reason(),
            "EarlyStopping: eval_loss has not improved for 3 epochs; its best was 3 in epoch 5");
}

TEST(EarlyStopping, PutsTheBestWeightsBack) {
  for (const bool restore : {true, false}) {
    MadeUpRun r;
    const std::vector<double> values{3, 1, 2, 2, 2};
    r.at_epoch_end = [&](TrainContext& c) {
      metric("loss", values)(c);
      Tensor(r.net.weight).detach().fill_(c.epoch);
    };
    r.run(5, 1, training::EarlyStopping{{.patience = 2, .restore_best_weights = restore}});
    EXPECT_EQ(r.context.epoch, 4);
    EXPECT_EQ(r.net.weight.to_vector<double>()[0], restore ? 2 : 4);
  }
}

// Rates after each epoch, by hand.
TEST(ReduceLROnPlateau, LowersTheRate) {
  struct Case {
    training::PlateauOptions options;
    std::vector<double> values, rates;
  };
  const std::vector<double> flat{1, 1, 1, 1, 1, 1, 1};
  const Case cases[] = {
      {{.factor = 0.5, .patience = 2}, flat, {1, 1, 0.5, 0.5, 0.25, 0.25, 0.125}},
      {{.factor = 0.5, .patience = 1}, flat, {1, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625}},
      // The epoch after the reduction is the one of cooldown 1 that ends it, and counts (as in Keras).
      {{.factor = 0.5, .patience = 1, .cooldown = 2}, flat, {1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125}},
      {{.factor = 0.5, .patience = 1, .min_lr = 0.3}, flat, {1, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3}},
      // Better by less than min_delta is not better; a threshold in shares would take these.
      {{.factor = 0.5, .patience = 2, .min_delta = 0.2},
       {1, 0.9, 0.7, 0.6, 0.55, 0.4, 0.3},
       {1, 1, 1, 1, 0.5, 0.5, 0.5}},
      {{.monitor = "eval_accuracy", .factor = 0.5, .patience = 2},
       {1, 2, 1.5, 1.5, 3, 3, 3},
       {1, 1, 1, 0.5, 0.5, 0.5, 0.25}},
      {{.factor = 0.5, .patience = 2}, {1, kInf, kInf, 0.5, 1, kNan, 1}, {1, 1, 0.5, 0.5, 0.5, 0.5, 0.25}},
  };
  for (const Case& c : cases) {
    MadeUpRun r;
    const Callback callback = training::ReduceLROnPlateau{c.options};
    std::vector<double> rates;
    const auto give = metric(c.options.monitor.substr(5), c.values);
    r.at_epoch_end = [&](TrainContext& context) {
      if (context.epoch > 1) rates.push_back(r.optimizer.lr());
      give(context);
    };
    r.run(static_cast<int>(c.values.size()), 1, callback);
    rates.push_back(r.optimizer.lr());
    ASSERT_EQ(rates.size(), c.rates.size());
    for (std::size_t i = 0; i < rates.size(); ++i) {
      EXPECT_DOUBLE_EQ(rates[i], c.rates[i]) << "case " << &c - cases << " epoch " << i + 1;
    }
  }
}

std::vector<std::string> files_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(ModelCheckpoint, KeepsTheNewestFiles) {
  test::TemporaryDir dir;
  MadeUpRun r;
  r.run(2, 10, training::ModelCheckpoint{{.directory = dir.path() / "new", .prefix = "net", .steps = 4, .keep = 3}},
        true);
  // Steps 4, 8, 12, 16 and 20 of the run.
  EXPECT_EQ(files_in(dir.path() / "new"),
            (std::vector<std::string>{"net-2_10.safetensors", "net-2_2.safetensors", "net-2_6.safetensors"}));
  MadeUpRun odd;
  odd.run(1, 10, training::ModelCheckpoint{{.directory = dir.path() / "odd", .steps = 4, .keep = 0}}, true);
  // The run's end has a file too.
  EXPECT_EQ(files_in(dir.path() / "odd"),
            (std::vector<std::string>{"CKP-1_10.safetensors", "CKP-1_4.safetensors", "CKP-1_8.safetensors"}));
}

TEST(ModelCheckpoint, SavesEpochsAndTheBest) {
  test::TemporaryDir dir;
  MadeUpRun r;
  const std::vector<double> accuracies{0.5, 0.9, 0.95};
  r.loss = [&](std::int64_t step) { return step == 6 ? kNan : 1.0; };
  r.at_epoch_end = [&](TrainContext& c) {
    Tensor(r.net.weight).detach().fill_(c.epoch);
    metric("accuracy", accuracies)(c);
  };
  // (Which names can be watched only a Model knows: the run is begun without asking.)
  fs::create_directories(dir.path());
  r.run(3, 2, training::ModelCheckpoint{{.directory = dir.path(), .monitor = "eval_accuracy"}});
  // Nothing is written with the NaN that ended the third epoch.
  EXPECT_EQ(files_in(dir.path()),
            (std::vector<std::string>{"CKP-1_2.safetensors", "CKP-2_2.safetensors", "CKP-best.safetensors"}));
  const auto weight = [&](const char* name) {
    nn::Linear loaded{{.in = 2, .out = 1}};
    loaded.load_state_dict(training::load_weights(dir.path() / name));
    return loaded.weight.to_vector<double>()[0];
  };
  EXPECT_EQ(weight("CKP-1_2.safetensors"), 1);
  EXPECT_EQ(weight("CKP-best.safetensors"), 2);
  const training::Checkpoint c = training::load_checkpoint(dir.path() / "CKP-2_2.safetensors");
  EXPECT_EQ(c.step, 4);
  EXPECT_EQ(c.loader.epoch, 2);
  EXPECT_EQ(c.optimizer_kind, "SGD");
}

TEST(Callbacks, RefuseOptionsThatMakeNoSense) {
  const auto refused = [](auto make, const char* text) {
    const std::string error = error_of<Error>(make);
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  refused([] { training::LossMonitor{-1}; }, "LossMonitor: expected a number of steps, or 0 for silence, got -1");
  refused([] { training::EarlyStopping{{.patience = -1}}; },
          "EarlyStopping: expected a patience of at least 0, got -1");
  refused([] { training::EarlyStopping{{.min_delta = kNan}}; }, "min_delta");
  refused([] { training::ReduceLROnPlateau{{.factor = 1}}; }, "above 0 and under 1, got 1");
  refused([] { training::ReduceLROnPlateau{{.cooldown = -1}}; }, "cooldown");
  refused([] { training::ReduceLROnPlateau{{.min_lr = -1}}; }, "min_lr");
  refused([] { training::ModelCheckpoint{{.steps = -1}}; }, "steps of at least 0, got -1");
  refused([] { training::ModelCheckpoint{{.keep = -1}}; }, "keep of at least 0, got -1");
  refused([] { training::ModelCheckpoint{{.prefix = "a/b"}}; }, "got \"a/b\"");
  refused([] { training::TensorBoard("x", {.steps = 0}); }, "steps of at least 1, got 0");
  refused([] { Callback(std::shared_ptr<training::CallbackBase>()); }, "expected a callback, got none");
}

}  // namespace
}  // namespace halfstep
