// SPDX-License-Identifier: Apache-2.0
// Model against loops written out, and evaluation against the trainer's.
#include "halfstep/train/model.h"

#include <gtest/gtest.h>

#include <sstream>

#include "halfstep/data/loader.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/loss.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/loss.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

using test::error_of;
using test::Regression;
using test::Samples;
using training::Model;
using training::ModelOptions;
using training::TrainContext;

const Samples& training_samples() {
  static const Samples samples(100, 6, 3, 1);
  return samples;
}
const Samples& test_samples() {
  static const Samples samples(50, 6, 3, 2);
  return samples;
}

data::DataLoader loader(const Samples& samples = training_samples(), std::int64_t batch_size = 16) {
  return data::DataLoader{samples.dataset(), {.batch_size = batch_size, .shuffle = true, .seed = 3}};
}

// A network with the weights of that seed.
Regression fresh(std::uint64_t seed = 7) {
  manual_seed(seed);
  return Regression(6, 3);
}

TEST(Model, TrainsAsALoopDoes) {
  const Regression by_loop = fresh(), net = fresh();
  std::vector<double> losses, lines;
  {
    optim::SGD optimizer{by_loop.parameters(), {.lr = 0.3, .momentum = 0.9}};
    data::DataLoader batches = loader();
    for (int epoch = 0; epoch < 3; ++epoch) {
      double sum = 0;
      for (const auto& [x, y] : batches) {
        optimizer.zero_grad();
        const Tensor loss = cross_entropy(by_loop(x), y);
        loss.backward();
        optimizer.step();
        sum += loss.item<double>() * static_cast<double>(x.size(0));
        lines.push_back(loss.item<double>());
      }
      losses.push_back(sum / 100);
    }
  }
  optim::SGD optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
  Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer}};
  data::DataLoader batches = loader();
  std::ostringstream out;
  const training::History history = model.train(3, batches, {training::LossMonitor{5, out}});
  EXPECT_EQ(test::values(net), test::values(by_loop));
  EXPECT_EQ(history.epochs(), 3);
  EXPECT_EQ(history.steps(), 21);  // 7 an epoch
  for (std::size_t i = 0; i < 3; ++i) EXPECT_DOUBLE_EQ(history["loss"][i], losses[i]);
  EXPECT_LT(losses[2], 0.7 * losses[0]);
  EXPECT_EQ(history["skipped"], (std::vector<double>{0, 0, 0}));
  std::string expected;
  for (const auto& [epoch, step, at] : {std::tuple(1, 5, 4), {2, 3, 9}, {3, 1, 14}, {3, 6, 19}}) {
    std::ostringstream line;
    line.precision(9);
    line << "epoch: " << epoch << " step: " << step << ", loss is ";
    EXPECT_NE(out.str().find(line.str()), std::string::npos) << out.str();
    const double value = std::stod(out.str().substr(out.str().find(line.str()) + line.str().size()));
    EXPECT_EQ(static_cast<float>(value), static_cast<float>(lines[static_cast<std::size_t>(at)]));
  }
}

TEST(Model, ScalesLossesAtLevelO2) {
  const Regression net = fresh();
  optim::SGD optimizer{net.parameters(), {.lr = 0.5}};
  Model model{net,
              {.loss = nn::CrossEntropyLoss{},
               .optimizer = optimizer,
               .metrics = {training::Accuracy{}},
               .amp_level = amp::Level::O2,
               .loss_scale_manager = amp::FixedLossScaleManager{1024}}};
  data::DataLoader batches = loader(), test = loader(test_samples());
  double scale = 0, overflows = 0;
  DType output = f64;
  const training::History history = model.train(8, batches, {training::Lambda{{.on_step_end = [&](TrainContext& c) {
                                                  scale = c.scale.item<double>();
                                                  overflows += c.overflow.item<double>();
                                                }}}});
  EXPECT_EQ(scale, 1024);
  EXPECT_EQ(overflows, 0);
  EXPECT_LT(history["loss"].back(), 0.5 * history["loss"].front());
  EXPECT_GT(model.eval(test)["accuracy"], 0.8);
  output = model.predict(zeros({2, 6})).dtype();
  EXPECT_EQ(output, f32);
  EXPECT_EQ(net.fc.weight.dtype(), f32);
  // The network itself is at the level: its product of 1 + 2^-12 with 1 is rounded to f16.
  Tensor(net.fc.weight).detach().fill_(1);
  Tensor(net.fc.bias).detach().fill_(0);
  EXPECT_EQ(model.predict(tensor({1 + 0x1p-12, 0, 0, 0, 0, 0}, {1, 6})).to_vector<double>()[0], 1);
}

// Steps that are replayed give the same bits, with evaluations and rates that change in between.
TEST(Model, ReplaysStepsWhenAsked) {
  std::vector<std::vector<std::vector<double>>> weights;
  std::vector<std::vector<double>> losses;
  for (const bool captured : {false, true}) {
    const Regression net = fresh();
    optim::SGD optimizer{net.parameters(), {.lr = 0.5, .momentum = 0.9}};
    Model model{net,
                {.loss = nn::CrossEntropyLoss{},
                 .optimizer = optimizer,
                 .metrics = {"accuracy"},
                 .amp_level = amp::Level::O2,
                 .loss_scale_manager = amp::DynamicLossScaleManager{1024, 2, 5},
                 .capture = captured}};
    data::DataLoader batches = loader(), test = loader(test_samples());
    std::ostringstream out;
    losses.push_back(
        model.fit(4, batches, test,
                  {training::LossMonitor{3, out},
                   training::ReduceLROnPlateau{{.monitor = "loss", .patience = 1, .min_delta = 9}}})["loss"]);
    weights.push_back(test::values(net));
    const CaptureStats stats = model.capture_stats();
    EXPECT_EQ(stats.plain + stats.recorded + stats.replayed, captured ? 28u : 0u);
    EXPECT_GE(stats.replayed, captured ? 12u : 0u);
  }
  EXPECT_EQ(weights[1], weights[0]);
  EXPECT_EQ(losses[1], losses[0]);
}

// One batch of the first epoch has an infinite loss.
TEST(Model, CountsSkippedSteps) {
  const Regression net = fresh();
  optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
  int step = 0;
  const auto loss = [&](const Tensor& output, const Tensor& target) {
    return ++step == 3 ? cross_entropy(output, target) * std::numeric_limits<double>::infinity()
                       : cross_entropy(output, target);
  };
  Model model{net, {.loss = loss, .optimizer = optimizer, .loss_scale_manager = amp::FixedLossScaleManager{8}}};
  data::DataLoader batches = loader();
  std::vector<std::vector<std::vector<double>>> weights{test::values(net)};
  const training::History history = model.train(
      2, batches, {training::Lambda{{.on_step_end = [&](TrainContext&) { weights.push_back(test::values(net)); }}}});
  EXPECT_EQ(history["skipped"], (std::vector<double>{1, 1}));
  EXPECT_EQ(weights[3], weights[2]);
  EXPECT_NE(weights[4], weights[3]);
  EXPECT_TRUE(std::isfinite(history["loss"][0]));  // the mean of the other batches
}

TEST(Model, EvaluatesAsTheTrainerDoes) {
  const Regression net = fresh();
  Model model{net,
              {.loss = nn::CrossEntropyLoss{},
               .metrics = {"acc", training::Metric("top2", training::TopK{{.k = 2}}), "loss", "confusion_matrix",
                           "perplexity"}}};
  data::DataLoader test = loader(test_samples(), 16);  // 16, 16, 16 and 2
  const training::MetricResults results = model.eval(test);
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  const training::EvalReport report = training::evaluate(classifier, test_samples().dataset(), std::nullopt);
  EXPECT_DOUBLE_EQ(results["acc"], report.metrics["top1"]);
  EXPECT_GT(results["top2"], report.metrics["top1"]);
  // Losses are means in float32 of other batches: 50 terms under 3, off by 50 roundings each way at most.
  EXPECT_NEAR(results["loss"], report.metrics["loss"], 100 * 3 * 0x1p-24);
  EXPECT_NEAR(results["perplexity"], std::exp(report.metrics["loss"]),
              100 * 3 * 0x1p-24 * std::exp(report.metrics["loss"]));
  const auto counts = results["confusion_matrix"].tensor().to_vector<std::int64_t>();
  EXPECT_DOUBLE_EQ(static_cast<double>(counts[0] + counts[4] + counts[8]) / 50, report.metrics["top1"]);
  // A second evaluation begins anew.
  EXPECT_DOUBLE_EQ(model.eval(test)["acc"], report.metrics["top1"]);
}

TEST(Model, FitWatchesTheValidation) {
  const Regression net = fresh();
  optim::SGD optimizer{net.parameters(), {.lr = 0.3}};
  Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer, .metrics = {"accuracy"}}};
  data::DataLoader batches = loader(), test = loader(test_samples());
  test::TemporaryDir dir;
  std::string calls;
  std::vector<std::string> watchable;
  const training::History mine;
  const auto note = [&](char c) { return [&calls, c](TrainContext&) { calls += c; }; };
  const training::History history = model.fit(
      5, batches, test,
      {training::Lambda{{.on_epoch_begin = [&](TrainContext& c) { watchable = c.watchable(); },
                         .on_epoch_end = note(')'),
                         .on_eval_begin = note('['),
                         .on_eval_end = note(']')}},
       training::ModelCheckpoint{{.directory = dir.path(), .prefix = "net", .keep = 1, .monitor = "accuracy"}}, mine,
       training::ReduceLROnPlateau{{.monitor = "eval_loss"}},
       training::EarlyStopping{{.monitor = "accuracy", .patience = 9}}},
      {.every = 2});
  EXPECT_EQ(watchable, (std::vector<std::string>{"loss", "eval_loss", "eval_accuracy"}));
  EXPECT_EQ(calls, ")[]))[])[])");  // after epochs 2, 4 and the last
  ASSERT_EQ(history["eval_accuracy"].size(), 5u);
  EXPECT_TRUE(std::isnan(history["eval_accuracy"][0]));
  EXPECT_DOUBLE_EQ(history["eval_accuracy"][4], model.eval(test)["accuracy"]);
  EXPECT_EQ(mine["loss"], history["loss"]);
  EXPECT_LT(history["eval_loss"][4], history["eval_loss"][1]);
  EXPECT_TRUE(std::filesystem::exists(dir.path() / "net-5_7.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(dir.path() / "net-best.safetensors"));
}

TEST(Model, StopsWhenACallbackAsks) {
  const Regression net = fresh();
  optim::SGD optimizer{net.parameters(), {.lr = 0.3}};
  Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer}};
  data::DataLoader batches = loader();
  int ends = 0;
  const training::History history = model.train(3, batches,
                                                {training::Lambda{{.on_train_end = [&](TrainContext&) { ++ends; },
                                                                   .on_epoch_end = [&](TrainContext&) { ++ends; },
                                                                   .on_step_end =
                                                                       [](TrainContext& c) {
                                                                         if (c.step == 9)
                                                                           c.request_stop("nine are enough");
                                                                       }}}});
  EXPECT_EQ(history.steps(), 9);
  EXPECT_EQ(history.epochs(), 2);
  EXPECT_EQ(history.stop_reason(), "nine are enough");
  EXPECT_EQ(ends, 3);
  EXPECT_TRUE(net.is_training());
  // What a callback throws ends the run, and the network is as it was.
  const std::string error = error_of<Error>([&] {
    net.eval();
    model.train(1, batches, {training::Lambda{{.on_step_end = [](TrainContext&) { throw Error("mine"); }}}});
  });
  EXPECT_EQ(error, "mine");
  EXPECT_FALSE(net.is_training());
}

TEST(Model, GoesOnFromACheckpoint) {
  test::TemporaryDir dir;
  const auto batches = [] { return data::DataLoader{training_samples().dataset(), {.batch_size = 16}}; };
  const auto train_all = [&](const Regression& net, int epochs, bool restore, bool save) {
    optim::SGD optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    Model model{net,
                {.loss = nn::CrossEntropyLoss{},
                 .optimizer = optimizer,
                 .loss_scale_manager = amp::DynamicLossScaleManager{256, 2, 3}}};
    if (restore) model.restore(dir.path() / "CKP-2_7.safetensors");
    data::DataLoader l = batches();
    double scale = 0;
    std::vector<training::Callback> callbacks{
        training::Lambda{{.on_step_end = [&](TrainContext& c) { scale = c.scale.item<double>(); }}}};
    if (save) callbacks.push_back(training::ModelCheckpoint{{.directory = dir.path()}});
    model.train(epochs, l, callbacks);
    auto all = test::values(net);
    all.push_back({scale});
    return all;
  };
  const auto whole = train_all(fresh(), 4, false, false);
  EXPECT_EQ(whole.back()[0], 256 * 512);  // 27 good steps before the last one
  train_all(fresh(), 2, false, true);
  EXPECT_EQ(train_all(fresh(8), 2, true, false), whole);
  const Regression other = fresh();
  optim::AdamW adam{other.parameters(), {.lr = 0.1}};
  Model model{other, {.loss = nn::CrossEntropyLoss{}, .optimizer = adam}};
  const auto before = test::values(other);
  const std::string error = error_of<Error>([&] { model.restore(dir.path() / "CKP-2_7.safetensors"); });
  EXPECT_NE(error.find("expected a checkpoint of a run with AdamW, got one with SGD"), std::string::npos) << error;
  EXPECT_EQ(test::values(other), before);
}

// The order of samples and the masks of dropout are those of the run that was left, in the middle of an epoch too.
TEST(Model, ResumesBitExactlyInTheMiddleOfAnEpoch) {
  test::TemporaryDir dir;
  const auto batches = [] {
    return data::DataLoader{training_samples().dataset(), {.batch_size = 16, .shuffle = true, .seed = 5}};
  };
  const auto train = [&](const std::string& from, bool save) {
    manual_seed(from.empty() ? 3 : 8);
    const nn::Sequential net{nn::Linear{{.in = 6, .out = 16}}, nn::ReLU{}, nn::Dropout{{.p = 0.5}},
                             nn::Linear{{.in = 16, .out = 3}}};
    optim::SGD optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    Model model{net,
                {.loss = nn::CrossEntropyLoss{},
                 .optimizer = optimizer,
                 .loss_scale_manager = amp::DynamicLossScaleManager{256, 2, 3}}};
    data::DataLoader l = batches();
    training::FitOptions options;
    if (!from.empty()) options.from = model.resume(dir.path() / from, l);
    std::vector<training::Callback> callbacks;
    std::vector<double> losses;
    callbacks.push_back(training::Lambda{{.on_epoch_end = [&](TrainContext& c) { losses.push_back(c.epoch_loss); }}});
    if (save) callbacks.push_back(training::ModelCheckpoint{{.directory = dir.path(), .steps = 3, .keep = 0}});
    model.train(3, l, callbacks, options);
    auto all = test::values(net);
    losses.erase(losses.begin(), losses.end() - 2);  // of the second and the third epoch
    all.push_back(losses);
    return all;
  };
  const auto whole = train("", true);
  for (const char* file : {"CKP-2_2.safetensors", "CKP-2_5.safetensors"}) {
    EXPECT_EQ(train(file, false), whole) << file;
  }
  // A loader of another size has no such place: nothing is changed.
  const Regression net = fresh();
  optim::SGD optimizer{net.parameters(), {.lr = 0.3}};
  Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer}};
  data::DataLoader few{training_samples().dataset(), {.batch_size = 112}};
  const auto before = test::values(net);
  const PhiloxState random = default_generator().state();
  const std::string error = error_of<Error>([&] { model.resume(dir.path() / "CKP-2_5.safetensors", few); });
  EXPECT_NE(error.find("CKP-2_5.safetensors: expected the loader of the run that wrote it"), std::string::npos)
      << error;
  data::DataLoader fits = batches();
  EXPECT_THROW(model.resume(dir.path() / "CKP-2_5.safetensors", fits), Error);  // another network
  EXPECT_EQ(fits.state().epoch, 0);
  EXPECT_EQ(fits.state().batch, 0);
  EXPECT_EQ(test::values(net), before);
  EXPECT_EQ(default_generator().state().offset, random.offset);
}

// The rate follows from the place in the run, also where that resumes.
TEST(Model, FollowsASchedule) {
  for (const bool by_epoch : {false, true}) {
    const auto rates = [&](const training::FitOptions& from) {
      const Regression net = fresh();
      optim::SGD optimizer{net.parameters(), {.lr = 0.8}};
      optim::StepLR schedule{optimizer, {.step_size = by_epoch ? 1 : 5, .gamma = 0.5}};
      Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer}};
      data::DataLoader l = loader();
      if (from.from.step > 0) l.seek({.epoch = from.from.epoch, .batch = from.from.batch});
      std::vector<double> used;
      model.train(2, l,
                  {training::Lambda{{.on_step_begin = [&](TrainContext& c) { used.push_back(c.optimizer->lr(0)); }}},
                   training::LearningRateSchedule{schedule, {.by_epoch = by_epoch}}},
                  from);
      return used;
    };
    // Seven steps an epoch.
    std::vector<double> wanted;
    for (int step = 0; step < 14; ++step) wanted.push_back(0.8 * std::pow(0.5, by_epoch ? step / 7 : step / 5));
    EXPECT_EQ(rates({}), wanted);
    EXPECT_EQ(rates({.from = {.epoch = 1, .batch = 2, .step = 9}}),
              std::vector<double>(wanted.begin() + 9, wanted.end()));
  }
}

// What an evaluation needs is there while batches are evaluated, and no longer.
TEST(Model, HoldsWhatAnEvaluationNeeds) {
  const Regression net = fresh();
  optim::SGD optimizer{net.parameters(), {.lr = 0.3}};
  Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer, .metrics = {"loss"}}};
  data::DataLoader batches = loader(), test = loader(test_samples(), 25);
  std::string seen;
  const auto note = [&](const char* what) { return [&seen, what](TrainContext&) { seen += what; }; };
  struct InBatches final : training::CallbackBase {
    explicit InBatches(std::string& text) : text_(text) {}
    void on_eval_batch(TrainContext& /*context*/, const training::EvalProgress& /*progress*/) override { text_ += "."; }
    std::string& text_;
  };
  model.fit(2, batches, test,
            {training::Lambda{{.on_epoch_end = note("|"), .on_eval_begin = note("b"), .on_eval_end = note("e")}},
             training::Callback(std::make_shared<InBatches>(seen))},
            {.during_evaluation = [&]() -> std::shared_ptr<void> {
              seen += "(";
              return {nullptr, [&](void*) { seen += ")"; }};
            }});
  EXPECT_EQ(seen, "b(..)e|b(..)e|");
}

// Evaluations see the averages; training doesn't, and steps that are skipped don't count.
TEST(Model, EvaluatesTheAverageOfItsWeights) {
  const Regression net = fresh(), plain = fresh();
  optim::SGD optimizer{net.parameters(), {.lr = 0.3}}, other{plain.parameters(), {.lr = 0.3}};
  optim::EMA average{net.parameters(), {.decay = 0.5}};
  const amp::DynamicLossScaleManager overflows{0x1p22, 2, 2000};
  Model model{net,
              {.loss = nn::CrossEntropyLoss{},
               .optimizer = optimizer,
               .metrics = {"loss"},
               .amp_level = amp::Level::O2,
               .loss_scale_manager = overflows}};
  Model without{plain,
                {.loss = nn::CrossEntropyLoss{},
                 .optimizer = other,
                 .metrics = {"loss"},
                 .amp_level = amp::Level::O2,
                 .loss_scale_manager = overflows}};
  data::DataLoader batches = loader(), again = loader(), test = loader(test_samples());
  const training::History history = model.fit(3, batches, test, {training::WeightAverage{average}});
  without.train(3, again);
  EXPECT_EQ(test::values(net), test::values(plain));
  ASSERT_GT(history["skipped"].back(), 0);
  EXPECT_EQ(average.updates(), 21 - static_cast<std::int64_t>(history["skipped"].back()));
  EXPECT_NE(static_cast<double>(model.eval(test)["loss"]), history["eval_loss"].back());
  average.swap();
  // Means of 50 losses in float32, which the run adds up by batches.
  EXPECT_NEAR(static_cast<double>(model.eval(test)["loss"]), history["eval_loss"].back(), 50 * 0x1p-24);
}

// A part that the user froze stays frozen.
TEST(Model, LeavesModesAsTheyWere) {
  const nn::Sequential net{nn::Linear{{.in = 6, .out = 4}}, nn::BatchNorm1d{{.channels = 4}},
                           nn::Linear{{.in = 4, .out = 3}}};
  const nn::ModuleBase& norm = *net.children()[1].second;
  norm.eval();
  optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
  Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer, .metrics = {"accuracy"}}};
  data::DataLoader batches = loader(), test = loader(test_samples());
  const auto buffers = norm.buffers()[0].tensor.to_vector<double>();
  bool norm_training = false, eval_training = true;
  model.fit(
      2, batches, test,
      {training::Lambda{{.on_step_end = [&](TrainContext&) { norm_training = norm_training || norm.is_training(); },
                         .on_eval_begin = [&](TrainContext&) { eval_training = net.is_training(); }}}});
  EXPECT_FALSE(norm_training);
  EXPECT_FALSE(eval_training);
  EXPECT_EQ(norm.buffers()[0].tensor.to_vector<double>(), buffers);
  EXPECT_TRUE(net.is_training());
  EXPECT_FALSE(norm.is_training());
  const Tensor output =
      model.predict(test_samples().dataset()->batch({.indices = std::vector<std::int64_t>{0, 1}}).input);
  EXPECT_FALSE(output.requires_grad());
  EXPECT_TRUE(net.is_training());
}

TEST(Model, TakesAnythingThatHasBatches) {
  std::vector<data::Batch> list;
  for (const data::Batch& b : loader()) list.push_back(b);
  const Regression a = fresh(), b = fresh();
  for (const Regression* net : {&a, &b}) {
    optim::SGD optimizer{net->parameters(), {.lr = 0.3}};
    Model model{*net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer, .metrics = {"loss"}}};
    if (net == &a) {
      model.train(1, list);
      EXPECT_GT(model.eval(loader(test_samples()))["loss"], 0);
    } else {
      model.train(1, loader());
    }
  }
  EXPECT_EQ(test::values(a), test::values(b));
}

TEST(Model, WritesForTensorBoard) {
  test::TemporaryDir dir;
  const Regression net = fresh();
  optim::SGD optimizer{net.parameters(), {.lr = 0.3}};
  Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer, .metrics = {"accuracy"}}};
  data::DataLoader batches = loader(), test = loader(test_samples());
  model.fit(2, batches, test, {training::TensorBoard{dir.path(), {.steps = 5}}});
  std::vector<std::filesystem::path> files;
  for (const auto& e : std::filesystem::directory_iterator(dir.path())) files.push_back(e.path());
  ASSERT_EQ(files.size(), 1u);
  const std::string bytes = io::read_file(files[0], 1 << 20);
  const auto count = [&](const std::string& tag) {
    int n = 0;
    for (std::size_t at = bytes.find(tag); at != std::string::npos; at = bytes.find(tag, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(count("train/loss"), 2);  // steps 5 and 10 of 14
  EXPECT_EQ(count("train/lr"), 2);
  for (const char* tag :
       {"epoch/loss", "epoch/skipped", "eval/loss", "eval/accuracy", "weights/fc.weight", "weights/fc.bias"}) {
    EXPECT_EQ(count(tag), 2) << tag;
  }
}

TEST(Model, SaysWhatIsMissingOrDoesNotFit) {
  const auto refused = [](auto call, const std::string& text) {
    const std::string error = error_of<Error>(call);
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  const Regression net = fresh(), other = fresh();
  optim::SGD optimizer{net.parameters(), {.lr = 0.3}}, others{other.parameters(), {.lr = 0.3}};
  const nn::CrossEntropyLoss loss;
  refused([&] { Model(net, {.loss = loss, .loss_scale_manager = amp::FixedLossScaleManager{}}); },
          "Model: expected an optimizer beside the loss scale manager, got none");
  refused([&] { Model(net, {.loss = loss, .keep_batchnorm_fp32 = true}); }, "keep_batchnorm_fp32, got none");
  refused([&] { Model(net, {.optimizer = optimizer}); }, "Model: expected a loss beside the optimizer, got none");
  refused([&] { Model(net, {.loss = loss, .optimizer = others}); },
          "the optimizer holds 'fc.weight' [3, 6], which is no parameter of this network; was it made of another one?");
  refused([&] { Model(net, {.metrics = {"acc", training::Accuracy{}, "acc"}}); }, "different names, got \"acc\" twice");
  refused([&] { Model(net, {.metrics = {"loss"}}); }, "expected a loss for the metric \"loss\", got none");
  Model bare{net, {.loss = loss}};
  data::DataLoader batches = loader(), test = loader(test_samples());
  refused([&] { bare.train(1, batches); }, "Model::train: expected a model with an optimizer, got one without");
  refused([&] { bare.eval(test); }, "Model::eval: expected a model with metrics, got one without");
  refused([&] { bare.predict({}); }, "Model::predict: expected a batch, got an undefined tensor");
  Model model{net, {.loss = loss, .optimizer = optimizer, .metrics = {"accuracy"}}};
  refused([&] { model.train(0, batches); }, "Model::train: expected at least 1 epoch, got 0");
  refused([&] { model.fit(1, batches, test, {}, {.every = 0}); }, "Model::fit: expected at least 1 epoch between");
  refused([&] { model.train(1, std::vector<data::Batch>{}); }, "expected at least one batch an epoch, got none");
  refused([&] { model.eval(std::vector<data::Batch>{}); }, "Model::eval: expected at least one batch, got none");
  refused([&] { model.train(1, batches, {training::EarlyStopping{}}); },
          "EarlyStopping: expected one of loss to watch, got \"eval_loss\"; there is no validation in train(), but in "
          "fit()");
  refused(
      [&] { model.fit(1, batches, test, {training::ModelCheckpoint{{.directory = "never", .monitor = "eval_acc"}}}); },
      "ModelCheckpoint: expected one of loss, eval_loss, eval_accuracy to watch, got \"eval_acc\"");
  EXPECT_FALSE(std::filesystem::exists("never"));
  refused([&] { model.fit(1, batches, test, {training::ReduceLROnPlateau{{.monitor = "eval_f1"}}}); },
          "got \"eval_f1\"");
  // A metric that doesn't fit the output.
  Model wrong{net, {.loss = loss, .metrics = {"mae"}}};
  refused([&] { wrong.eval(test); }, "mae: expected output and target of one shape, got f32 [16, 3] and i64 [16]");
}

}  // namespace
}  // namespace halfstep
