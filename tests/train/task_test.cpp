// SPDX-License-Identifier: Apache-2.0
// Tasks of other kinds than classification through the same loop: language modelling and detection, a small one each,
// in this file alone. And how a step of several batches adds up.
#include "halfstep/train/task.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/data/loader.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/embedding.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/loss.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/model.h"
#include "halfstep/train/registry.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

using training::Task;
using training::TaskLoss;
using training::TrainStep;

// ------------------------------------------------------------------------------------------------------------- text

// The next number of 0 1 2 ... 7 0 1 ...; batches are windows of one stream, without a target of their own.
class Stream final : public data::Dataset {
 public:
  std::int64_t size() const override { return 64; }
  data::Batch batch(const data::BatchRequest& request) const override {
    std::vector<std::int64_t> ids;
    for (const std::int64_t i : request.indices) {
      for (std::int64_t k = 0; k < 6; ++k) ids.push_back((i + k) % 8);
    }
    return {tensor(ids, {static_cast<std::int64_t>(request.indices.size()), 6}), {}};
  }
};

struct Bigram : nn::Module<Bigram> {
  Bigram() : table(child("table", nn::Embedding{{.num = 8, .dim = 8}})) {}
  Tensor forward(const Tensor& ids) const { return table(ids); }
  nn::Embedding table;
};

class NextToken : public Task {
 public:
  explicit NextToken(const Bigram& net) : net_(net) {}
  const nn::ModuleBase& network() const override { return net_; }
  TaskLoss loss(const data::Batch& batch) override {
    const Tensor logits = net_(batch.input.narrow(1, 0, 5)).reshape({-1, 8});
    return {.loss = cross_entropy(logits, batch.input.narrow(1, 1, 5).reshape({-1}))};
  }
  void end_evaluation(training::MetricResults& results) override {
    results.set("perplexity", std::exp(static_cast<double>(results["loss"])));
  }
  std::string best_by() const override { return "perplexity"; }

 private:
  const Bigram& net_;
};

TEST(Tasks, TextIsATaskOfItsOwn) {
  manual_seed(1);
  const Bigram net;
  optim::Adam optimizer{net.parameters(), {.lr = 0.1}};
  data::DataLoader training{Stream{}, {.batch_size = 16, .shuffle = true}}, test{Stream{}, {.batch_size = 16}};
  training::Model model{make_train_step(std::make_shared<NextToken>(net), optimizer), true};
  const training::History history = model.fit(20, training, test);
  EXPECT_GT(history["eval_perplexity"].front(), 3);
  EXPECT_LT(history["eval_perplexity"].back(), 1.1) << "of 8 equally likely ones";
  EXPECT_EQ(model.eval(test)["perplexity"], history["eval_perplexity"].back());
  EXPECT_GT(model.capture_stats().replayed, 50u);
  EXPECT_NE(test::error_of<Error>([&] { model.predict(zeros({1, 6})); }).find("one of a task"), std::string::npos);
}

// -------------------------------------------------------------------------------------------------------- detection

// A bright pixel in an 8 x 8 picture; some pictures have none. Targets of a batch are a list of (picture, y, x) of as
// many rows as there are objects, and the cells that have one.
class Dots final : public data::Dataset {
 public:
  std::int64_t size() const override { return 48; }
  data::Batch batch(const data::BatchRequest& request) const override {
    const auto n = static_cast<std::int64_t>(request.indices.size());
    std::vector<double> pixels(static_cast<std::size_t>(n * 64)), cells(pixels.size());
    std::vector<std::int64_t> boxes;
    std::int64_t rows = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t at = request.indices[static_cast<std::size_t>(i)];
      if (at % 6 == 0) continue;
      const auto place = static_cast<std::size_t>(i * 64 + at);
      pixels[place] = cells[place] = 1;
      for (const std::int64_t value : {i, at / 8, at % 8}) boxes.push_back(value);
      ++rows;
    }
    data::Batch batch{tensor(pixels, {n, 1, 8, 8}), tensor(boxes, {rows, 3})};
    batch.more = {tensor(cells, {n, 1, 8, 8})};
    return batch;
  }
};

struct Detector : nn::Module<Detector> {
  Detector() : conv(child("conv", nn::Conv2d{{.in = 1, .out = 1, .kernel = {3}, .padding = 1}})) {}
  Tensor forward(const Tensor& x) const { return conv(x); }
  nn::Conv2d conv;
};

class FindDots : public Task {
 public:
  explicit FindDots(const Detector& net) : net_(net) {}
  const nn::ModuleBase& network() const override { return net_; }
  TaskLoss loss(const data::Batch& batch) override {
    TaskLoss made;
    made.output = net_(batch.input);
    const Tensor there = batch.more[0],
                 objects =
                     sum(binary_cross_entropy_with_logits(made.output, there, {.reduction = Reduction::none}) * there),
                 rest = sum(binary_cross_entropy_with_logits(made.output, there, {.reduction = Reduction::none}) *
                            (1 - there));
    made.loss = (objects + rest) / static_cast<double>(batch.input.size(0));
    made.parts = {{"object", objects.detach()}, {"background", rest.detach()}};
    return made;
  }
  void begin_evaluation() override { found_ = objects_ = 0; }
  TaskLoss evaluate(const data::Batch& batch) override {
    TaskLoss made = loss(batch);
    const auto boxes = batch.target.to_vector<std::int64_t>();
    const auto scores = made.output.to_vector<double>();
    for (std::size_t i = 0; i < boxes.size(); i += 3) {
      ++objects_;
      found_ += scores[static_cast<std::size_t>(boxes[i] * 64 + boxes[i + 1] * 8 + boxes[i + 2])] > 0;
    }
    return made;
  }
  void end_evaluation(training::MetricResults& results) override { results.set("recall", found_ / objects_); }
  std::string best_by() const override { return "recall"; }
  bool larger_is_better() const override { return true; }

 private:
  const Detector& net_;
  double found_ = 0, objects_ = 0;
};

TEST(Tasks, DetectionIsATaskOfItsOwn) {
  manual_seed(2);
  const Detector net;
  optim::Adam optimizer{net.parameters(), {.lr = 0.2}};
  training::TrainConfig config;
  config.model = "dots";
  config.epochs = 12;
  config.batch_size = 8;
  config.seed = 2;
  config.lr = 0.2;
  config.optimizer = "adam";
  config.amp = "bf16";
  test::TemporaryDir folder;
  config.out = folder.path() / "run";
  std::vector<training::StepReport> steps;
  training::TrainCallbacks callbacks;
  callbacks.on_step = [&](const training::StepReport& r) { steps.push_back(r); };
  const training::RunReport report = training::train(config, std::make_shared<FindDots>(net), std::make_shared<Dots>(),
                                                     std::make_shared<Dots>(), callbacks);
  EXPECT_EQ(static_cast<double>(report.metrics["recall"]), 1);
  EXPECT_EQ(report.best_by, "recall");
  ASSERT_EQ(steps.size(), 72u);
  for (const training::StepReport& r : steps) {
    // The loss is the sum of its parts, which round once more each: relative 3 * 2^-24 of sums of 512 terms.
    EXPECT_NEAR(r.loss * 8, r.parts.at("object") + r.parts.at("background"), 512 * 0x1p-24 * std::abs(r.loss * 8))
        << r.step;
  }
  const training::Checkpoint saved = training::load_checkpoint(config.out / "best.safetensors");
  EXPECT_EQ(saved.best_by, "recall");
  EXPECT_TRUE(saved.best && *saved.best == 1);
  // Goes on with other tasks' numbers as with classification's.
  config.resume = config.out;
  config.epochs = 13;
  EXPECT_EQ(training::train(config, std::make_shared<FindDots>(net), std::make_shared<Dots>(), std::make_shared<Dots>())
                .epochs,
            13);
}

// --------------------------------------------------------------------------------------------------------- by name

// All that a text task and a detection task register: nothing elsewhere knows of them.
template <class T, class Net>
struct Holding final : T {
  explicit Holding(std::shared_ptr<const Net> net) : T(*net), holder(std::move(net)) {}
  std::shared_ptr<const Net> holder;
};

template <class Set>
training::DataKind data_of(const char* name) {
  return {.name = name, .load = [](const training::TrainConfig&, bool training) {
            training::RunData data;
            if (training) data.training = std::make_shared<Set>();
            data.test = std::make_shared<Set>();
            data.checksums = {{"train", "1"}, {"test", "1"}};
            return data;
          }};
}
template <class Net>
training::NetworkKind network_of(const char* name, const char* task, const char* data) {
  return {.name = name, .task = task, .data = data, .make = [](const training::TrainConfig&, const training::RunData&) {
            return training::Network{.module = std::make_shared<Net>()};
          }};
}
template <class T, class Net>
training::TaskKind task_of(const char* name) {
  return {.name = name,
          .make = [](const training::TrainConfig&, const training::RunData&, const training::Network& network) {
            return std::make_shared<Holding<T, Net>>(network.as<Net>());
          }};
}

const bool kRegistered = [] {
  training::register_data(data_of<Stream>("stream"));
  training::register_network(network_of<Bigram>("bigram", "next-token", "stream"));
  training::register_task(task_of<NextToken, Bigram>("next-token"));
  training::register_data(data_of<Dots>("dots"));
  training::register_network(network_of<Detector>("dot-detector", "find-dots", "dots"));
  training::register_task(task_of<FindDots, Detector>("find-dots"));
  return true;
}();

TEST(Tasks, TextIsTrainedByItsName) {
  ASSERT_TRUE(kRegistered);
  test::TemporaryDir folder;
  training::TrainConfig config = training::default_config("bigram", 16);
  EXPECT_EQ(config.batch_size, 16);
  config.epochs = 20;
  config.optimizer = "adam";
  config.lr = 0.1;
  config.seed = 1;
  config.out = folder.path() / "run";
  const training::RunReport report = training::train(config);
  EXPECT_EQ(report.best_by, "perplexity");
  EXPECT_LT(report.best_value(), 1.1) << "of 8 equally likely ones";
  EXPECT_GT(report.captured.replayed, 50u);
  EXPECT_EQ(training::load_checkpoint(config.out).model, "bigram");
  // The same as with a task and data sets that are made by hand, and gone on with from its folder.
  manual_seed(1);
  const Bigram net;
  training::TrainConfig by_hand = config;
  by_hand.out.clear();
  const auto same = training::train(by_hand, std::make_shared<NextToken>(net), std::make_shared<Stream>(),
                                    std::make_shared<Stream>());
  EXPECT_EQ(same.best_value(), report.best_value());
  config.resume = config.out;
  config.epochs = 21;
  EXPECT_EQ(training::train(config).epochs, 21);
}

TEST(Tasks, DetectionIsTrainedByItsName) {
  training::TrainConfig config = training::default_config("dot-detector", 8);
  config.epochs = 12;
  config.optimizer = "adam";
  config.lr = 0.2;
  config.amp = "bf16";
  config.seed = 2;
  std::vector<training::StepReport> steps;
  training::TrainCallbacks callbacks;
  callbacks.on_step = [&](const training::StepReport& r) { steps.push_back(r); };
  const training::RunReport report = training::train(config, callbacks);
  EXPECT_EQ(static_cast<double>(report.metrics["recall"]), 1);
  ASSERT_EQ(steps.size(), 72u);
  EXPECT_TRUE(steps.back().parts.contains("object"));
  // And evaluated, as `eval` does.
  const training::RunData data = training::load_data(config, false);
  EXPECT_EQ(data.training, nullptr);
  const auto task = training::make_task(config, data);
  EXPECT_TRUE(training::evaluate(*task, data.test).metrics.contains("recall"));
}

TEST(Tasks, NamesThatDoNotFitAreRefused) {
  const auto says = [](const auto& f) { return test::error_of<Error>(f); };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(has(says([] { training::register_data(data_of<Dots>("digits")); }), "a data kind called 'digits'"));
  EXPECT_TRUE(
      has(says([] { training::register_network(network_of<Bigram>("mlp", "a", "b")); }), "network called 'mlp'"));
  EXPECT_TRUE(has(says([] { training::register_task({.name = "classification", .make = {}}); }), "expected a task"));
  EXPECT_TRUE(has(says([] { training::register_task(task_of<NextToken, Bigram>("")); }), "got ''"));
  training::TrainConfig config;
  config.model = "bigrams";
  EXPECT_TRUE(has(says([&] { training::train(config); }), "'bigrams'"));
  // A network that is none for its task, and kinds that nobody registered.
  static const bool registered = [] {
    training::register_network(network_of<Detector>("mistaken", "next-token", "stream"));
    training::register_network(network_of<Detector>("without-task", "nothing", "stream"));
    return true;
  }();
  ASSERT_TRUE(registered);
  config.model = "mistaken";
  EXPECT_TRUE(has(says([&] { training::train(config); }), "network 'mistaken': its task expects a module"));
  config.model = "without-task";
  EXPECT_TRUE(has(says([&] { training::train(config); }), "task: expected one of classification, "));
  EXPECT_TRUE(
      has(says([] { training::data_kind("nothing"); }), "data kind: expected one of digits, cifar, imagenet, "));
}

// ------------------------------------------------------------------------------------------------------- the step

// A step of several batches has the gradients of one batch of all their samples.
TEST(Tasks, SeveralBatchesAreOneStep) {
  const test::Samples samples(40, 6, 3, 5);
  const auto whole = samples.dataset();
  std::vector<std::int64_t> all(40);
  for (std::int64_t i = 0; i < 40; ++i) all[static_cast<std::size_t>(i)] = i;
  const auto part = [&](std::size_t from, std::size_t count) {
    return whole->batch({.indices = std::span(all).subspan(from, count)});
  };
  for (const bool captured : {false, true}) {
    std::vector<std::vector<double>> weights;
    for (const bool cut : {false, true}) {
      manual_seed(3);
      const test::Regression net(6, 3);
      optim::SGD optimizer{net.parameters(), {.lr = 0.5}};
      const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
      TrainStep step = make_train_step(std::make_shared<training::ClassificationTask>(classifier), optimizer, {},
                                       {.clip_norm = 0.7});
      for (int i = 0; i < 4; ++i) {
        std::vector<data::Batch> batches;
        if (cut) {
          batches = {part(0, 16), part(16, 16), part(32, 8)};
        } else {
          batches = {part(0, 40)};
        }
        const training::StepValues values = captured ? step.run_captured(batches) : step.run(batches);
        EXPECT_EQ(values.samples, 40);
        EXPECT_EQ(values.losses.size(), batches.size());
        if (cut) {
          EXPECT_EQ(values.weights, (std::vector<double>{0.4, 0.4, 0.2}));
        }
      }
      weights.push_back(net.parameters()[0].tensor.to_vector<double>());
    }
    // Four steps; gradients are sums of 40 terms under 1, added in another order.
    for (std::size_t i = 0; i < weights[0].size(); ++i) EXPECT_NEAR(weights[1][i], weights[0][i], 4 * 40 * 0x1p-24);
  }
}

// Asked to stop while the loop waits for a batch: the batch that comes then is the next run's first.
TEST(Tasks, AStopWhileWaitingForDataLosesNoBatch) {
  const test::Samples samples(40, 6, 3, 5), others(10, 6, 3, 6);
  struct Stopping final : data::Dataset {
    std::shared_ptr<const data::Dataset> rows;
    std::atomic<bool>* stop;
    std::int64_t at;  // batches until it asks
    mutable std::int64_t made = 0;
    std::int64_t size() const override { return rows->size(); }
    data::Batch batch(const data::BatchRequest& request) const override {
      if (++made == at) stop->store(true);
      return rows->batch(request);
    }
  };
  for (const int accumulate : {1, 2}) {
    for (std::int64_t at = 1; at <= 10; ++at) {
      training::TrainConfig config;
      config.model = "net";
      config.epochs = 2;
      config.batch_size = 8;
      config.lr = 0.5;
      config.workers = 0;
      config.accumulate = accumulate;
      manual_seed(3);
      const test::Regression whole(6, 3);
      const auto losses = test::run(config, whole, samples.dataset(), others.dataset()).losses();
      test::TemporaryDir folder;
      config.out = folder.path() / "run";
      std::atomic<bool> stop{false};
      const auto stopping = std::make_shared<Stopping>();
      stopping->rows = samples.dataset();
      stopping->stop = &stop;
      stopping->at = at;
      manual_seed(3);
      const test::Regression net(6, 3);
      const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
      std::vector<double> seen;
      training::TrainCallbacks callbacks;
      callbacks.on_step = [&](const training::StepReport& r) { seen.push_back(r.loss); };
      EXPECT_TRUE(training::train(config, classifier, stopping, others.dataset(), callbacks, &stop).interrupted);
      config.resume = config.out;
      manual_seed(9);
      const test::Regression rest(6, 3);
      for (const double loss : test::run(config, rest, samples.dataset(), others.dataset()).losses()) {
        seen.push_back(loss);
      }
      EXPECT_EQ(seen, losses) << "batch " << at << ", " << accumulate << " batches a step";
      EXPECT_EQ(test::values(rest), test::values(whole));
    }
  }
}

// The optimizer of a part: gradients of the rest neither grow nor count for the norm that is clipped to.
TEST(Tasks, AnOptimizerOfAPartSeesThatPartOnly) {
  const test::Samples samples(8, 6, 3, 5);
  std::vector<std::int64_t> all{0, 1, 2, 3, 4, 5, 6, 7};
  const data::Batch batch = samples.dataset()->batch({.indices = all});
  manual_seed(3);
  const test::Regression net(6, 3);
  const NamedTensors own{{"bias", net.fc.bias}};
  optim::SGD optimizer{own, {.lr = 1}};
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  TrainStep step =
      make_train_step(std::make_shared<training::ClassificationTask>(classifier), optimizer, {}, {.clip_norm = 1e-3});
  std::vector<double> foreign;
  for (int i = 0; i < 2; ++i) {
    {
      const NoGrad no_grad;
      Tensor(net.fc.bias).copy_(zeros({3}));
    }
    step.run({&batch, 1});
    // A step of rate 1 moves by the clipped gradient: its norm is the bound, less PyTorch's 1e-6 over the norm before
    // (above 0.1 here) and a few roundings of 2^-24.
    double squares = 0;
    for (const double v : net.fc.bias.to_vector<double>()) squares += v * v;
    EXPECT_NEAR(std::sqrt(squares), 1e-3, 1e-3 * (1e-6 / 0.1 + 8 * 0x1p-24));
    foreign.push_back(net.fc.weight.grad().to_vector<double>()[0]);
  }
  EXPECT_EQ(foreign[0], foreign[1]) << "one step's gradient, not two steps'";
}

// One part that overflows leaves the means of the others, and checkpoints stay readable.
TEST(Tasks, AnInfinitePartIsLeftOutOfTheMeans) {
  struct Odd final : Task {
    const test::Regression& net;
    int calls = 0;
    explicit Odd(const test::Regression& n) : net(n) {}
    const nn::ModuleBase& network() const override { return net; }
    TaskLoss loss(const data::Batch& batch) override {
      TaskLoss made;
      made.loss = cross_entropy(net(batch.input), batch.target);
      made.parts = {
          {"part", tensor({++calls == 2 ? std::numeric_limits<double>::infinity() : 4.0}, {}, {.dtype = f32})}};
      return made;
    }
  };
  const test::Samples samples(32, 6, 3, 5);
  manual_seed(3);
  const test::Regression net(6, 3);
  training::TrainConfig config;
  config.model = "net";
  config.batch_size = 8;
  config.lr = 0.5;
  config.capture = false;
  test::TemporaryDir folder;
  config.out = folder.path() / "run";
  training::train(config, std::make_shared<Odd>(net), samples.dataset(), samples.dataset());
  EXPECT_EQ(training::load_checkpoint(config.out).parts, (std::map<std::string, double>{{"part", 12}}));
}

// An evaluation of its own inside of a run takes nothing from the run's.
TEST(Tasks, AnEvaluationInsideOfARun) {
  const test::Samples samples(32, 6, 3, 5);
  manual_seed(3);
  const test::Regression net(6, 3);
  optim::SGD optimizer{net.parameters(), {.lr = 0.5}};
  data::DataLoader loader{samples.dataset(), {.batch_size = 8}}, test{samples.dataset(), {.batch_size = 8}};
  training::Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer, .metrics = {"accuracy"}}};
  const auto history = model.fit(3, loader, test, {training::Lambda{{.on_epoch_end = [&](training::TrainContext&) {
                                   EXPECT_FALSE(model.eval(test).contains("loss"));
                                 }}}});
  for (const double loss : history["eval_loss"]) EXPECT_TRUE(std::isfinite(loss));
}

// One loader for both: each epoch has its own order all the same.
TEST(Tasks, OneLoaderForTrainingAndEvaluation) {
  const test::Samples samples(40, 6, 3, 5);
  std::vector<std::vector<double>> weights;
  for (const bool shared : {false, true}) {
    manual_seed(3);
    const test::Regression net(6, 3);
    optim::SGD optimizer{net.parameters(), {.lr = 0.5}};
    data::DataLoader loader{samples.dataset(), {.batch_size = 16, .shuffle = true}},
        other{samples.dataset(), {.batch_size = 16}};
    training::Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer, .metrics = {"accuracy"}}};
    model.fit(3, loader, shared ? loader : other);
    weights.push_back(net.fc.weight.to_vector<double>());
  }
  EXPECT_EQ(weights[0], weights[1]);
}

TEST(Tasks, HitsAreCountedAsTheLabelRanks) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const Tensor scores = tensor({{3, 2, 1, 0, -1, -2},
                                {0, 0, 0, 0, 0, 0},
                                {0, 0, 0, 0, 0, 0},
                                {1, nan, 3, 4, 5, 6},
                                {1, nan, 3, 4, 5, 6},
                                {9, 8, 7, 6, 5, 4},
                                {1, 2, 3, 4, 5, 6}});
  // First; first of equals; last of equals; a NaN; second of those that a NaN stands among; sixth; no class.
  const training::TopHits hits =
      training::count_top_hits(scores, tensor(std::vector<std::int64_t>{0, 0, 5, 1, 4, 5, -100}, {7}));
  EXPECT_EQ(hits.top1.item<double>(), 2);
  EXPECT_EQ(hits.top5.item<double>(), 3);
  // Soft targets count by their largest share.
  const training::TopHits soft =
      training::count_top_hits(tensor({{0.0, 1.0, 2.0}, {2.0, 1.0, 0.0}}), tensor({{0.1, 0.3, 0.6}, {0.1, 0.6, 0.3}}));
  EXPECT_EQ(soft.top1.item<double>(), 1);
  EXPECT_EQ(soft.top5.item<double>(), 2);
  EXPECT_NE(test::error_of<ShapeError>([&] { training::count_top_hits(scores, zeros({3})); }).find("count_top_hits"),
            std::string::npos);
}

TEST(Tasks, MistakesAreNamed) {
  manual_seed(3);
  const test::Regression net(6, 3), other(6, 3);
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  const auto task = std::make_shared<training::ClassificationTask>(classifier);
  optim::SGD optimizer{net.parameters(), {.lr = 0.5}}, foreign{other.parameters(), {.lr = 0.5}};
  const auto refused = [](auto&& f, const char* part) {
    const std::string error = test::error_of<Error>(f);
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  refused([&] { training::make_train_step(nullptr, optimizer); }, "expected a task, got none");
  refused([&] { make_train_step(task, foreign); }, "no parameter of this network");
  refused([&] { make_train_step(task, optimizer, {}, {.autocast = f32}); },
          "expected f16 or bf16 for autocast, got f32");
  refused([&] { make_train_step(task, optimizer, {}, {.clip_norm = -1}); }, "clip_norm of at least 0, got -1");
  TrainStep step = make_train_step(task, optimizer);
  refused([&] { step.run({}); }, "at least one batch, got none");
  refused([&] { step.run_captured({}); }, "at least one batch, got none");
  refused([&] { step.predict(zeros({1, 6})); }, "expected a step of build_train_network(), got one of a Task");
  training::Model model{step};
  const data::Batch batch{zeros({2, 6}), zeros({2}, {.dtype = i64})};
  const std::vector<data::Batch> batches{batch};
  refused([&] { model.train(1, batches, {}, {.accumulate = 0}); }, "at least 1 batch a step, got 0");
  refused([&] { model.train(1, batches, {}, {.read_every = 0}); }, "at least 1 step between reads, got 0");
  data::DataLoader loader{test::Samples(8, 6, 3, 1).dataset(), {.batch_size = 4}};
  refused([&] { model.train(3, loader, {}, {.from = {.epoch = 1, .batch = 1}}); },
          "expected a loader at epoch 1, batch 1, where the run resumes, got one at epoch 0, batch 0");
  refused([&] { model.train(3, batches, {}, {.from = {.epoch = -1}}); }, "got epoch -1, batch 0, step 0");
  refused([&] { model.train(3, batches, {}, {.from = {.step = std::numeric_limits<std::int64_t>::max()}}); },
          "expected a state to resume from");
  const data::Batch none{zeros({0, 6}), zeros({0}, {.dtype = i64})};
  refused([&] { step.run(std::vector{batch, none}); }, "at least one sample in each batch, got 0");
  training::MetricResults results;
  refused([&] { training::evaluate(*task, batches, results, {.read_every = 0}); }, "at least 1 batch between reads");
}

}  // namespace
}  // namespace halfstep
