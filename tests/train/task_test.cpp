// SPDX-License-Identifier: Apache-2.0
// Tasks of other kinds than classification through the same loop: language modelling and detection, a small one each,
// in this file alone.
#include "halfstep/train/task.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/core/random.h"
#include "halfstep/data/loader.h"
#include "halfstep/data/mixup.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/embedding.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/loss.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/adam.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/flags.h"
#include "halfstep/train/model.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/trace_step.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

using training::Task;
using training::TaskLoss;

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
  // What comes behind each text.
  std::vector<std::string> predictions(const data::Batch& batch) override {
    const Tensor next = argmax(net_(batch.input.narrow(1, 5, 1)).reshape({-1, 8}), 1);
    std::vector<std::string> lines;
    for (const std::int64_t id : next.to_vector<std::int64_t>()) lines.push_back(std::to_string(id));
    return lines;
  }

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

// A task says what it is trained on; evaluations have the samples as they are.
TEST(Tasks, SayWhatTheyAreTrainedOn) {
  class Half final : public data::Dataset {
   public:
    explicit Half(std::shared_ptr<const data::Dataset> all) : all_(std::move(all)) {}
    std::int64_t size() const override { return all_->size() / 2; }
    data::Batch batch(const data::BatchRequest& request) const override { return all_->batch(request); }

   private:
    std::shared_ptr<const data::Dataset> all_;
  };
  class OfHalf final : public training::Task {
   public:
    explicit OfHalf(const Bigram& net) : task_(net) {}
    const nn::ModuleBase& network() const override { return task_.network(); }
    training::TaskLoss loss(const data::Batch& batch) override { return task_.loss(batch); }
    std::shared_ptr<const data::Dataset> training_data(std::shared_ptr<const data::Dataset> samples) const override {
      return std::make_shared<Half>(std::move(samples));
    }

   private:
    NextToken task_;
  };
  manual_seed(1);
  const Bigram net;
  training::TrainConfig config;
  config.batch_size = 8;
  const auto steps = [&](const std::shared_ptr<training::Task>& task) {
    return training::train(config, task, std::make_shared<Stream>(), std::make_shared<Stream>()).steps;
  };
  EXPECT_EQ(steps(std::make_shared<OfHalf>(net)) * 2, steps(std::make_shared<NextToken>(net)));
}

TEST(Tasks, OfClassesMixTheirSamples) {
  const auto samples = std::make_shared<data::TensorDataset>(tensor({1, 2, 3, 4}, {4, 1}),
                                                             tensor(std::vector<std::int64_t>{0, 1, 2, 0}, {4}));
  const training::Classifier none{};
  const auto data = [&](const training::ClassificationOptions& options) {
    return training::ClassificationTask(none, options).training_data(samples);
  };
  EXPECT_EQ(data({}), samples);
  const std::vector<std::int64_t> indices{0, 1, 2, 3};
  const data::BatchRequest request{.indices = indices};
  const data::MixupDataset mixed(samples, {.alpha = 0.4, .classes = 3});
  for (const auto& options : {training::ClassificationOptions{.classes = {"a", "b", "c"}, .mixup = 0.4},
                              training::ClassificationOptions{.mixup = 0.4, .num_classes = 3}}) {
    const data::Batch batch = data(options)->batch(request), expected = mixed.batch(request);
    EXPECT_EQ(batch.target.to_vector<float>(), expected.target.to_vector<float>());
    EXPECT_EQ(batch.input.to_vector<float>(), expected.input.to_vector<float>());
  }
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

// Text with flags of its own, for a network with a size of its own: neither makes it pictures.
training::DataKind text_kind() {
  training::DataKind kind = data_of<Stream>("stream");
  kind.flags = "text";
  kind.random = [](const training::NetworkKind&, std::int64_t n, std::int64_t /*image_size*/) {
    return data::Batch{randint(0, 8, {n, 6}, {.dtype = i64}), {}};
  };
  return kind;
}
training::NetworkKind text_network() {
  training::NetworkKind kind = network_of<Bigram>("bigram", "next-token", "stream");
  kind.image_size = 6;
  kind.described_by = [](const training::TrainConfig& c) {
    return c.data.empty() ? "" : "the table of " + c.data.string();
  };
  return kind;
}

const bool kRegistered = [] {
  training::register_data(text_kind());
  training::register_network(text_network());
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

// What programs ask of a network before they run it comes from its kind of data.
TEST(Tasks, TextIsNoPictures) {
  ASSERT_TRUE(kRegistered);
  EXPECT_FALSE(training::network_input("bigram").images);
  manual_seed(1);
  const Tensor before = rand({1});
  manual_seed(1);
  const Tensor example = training::example_input("bigram", 3);
  EXPECT_EQ(example.sizes(), (Shape{3, 6}));
  EXPECT_EQ(example.dtype(), i64);
  EXPECT_EQ(example.to_vector<std::int64_t>(), std::vector<std::int64_t>(18, 0));
  EXPECT_EQ(rand({1}).to_vector<float>(), before.to_vector<float>());
  EXPECT_EQ(Bigram()(example).sizes(), (Shape{3, 6, 8}));
  const std::string error = test::error_of<Error>([] { training::example_input("dot-detector"); });
  EXPECT_NE(error.find("its data, dots, have no random samples"), std::string::npos) << error;
  // None of the flags of the library's kinds of data.
  training::TrainConfig config;
  for (const training::Flag& flag : training::flags(config)) {
    EXPECT_EQ(training::takes("bigram", flag), flag.data.empty() && flag.task.empty()) << flag.name();
  }
  config.model = "bigram";
  EXPECT_EQ(training::network_label(config), "bigram");
  config.data = "a.txt";
  EXPECT_EQ(training::network_label(config), "the table of a.txt");
}

TEST(Tasks, SayWhatTheyFind) {
  ASSERT_TRUE(kRegistered);
  test::TemporaryDir folder;
  training::TrainConfig config = training::default_config("bigram", 16);
  config.epochs = 20;
  config.optimizer = "adam";
  config.lr = 0.1;
  config.seed = 1;
  config.out = folder.path() / "run";
  training::train(config);
  const training::RunData data = training::load_data(config, false);
  const auto task = training::make_task(config, data);
  task->network().load_state_dict(training::load_checkpoint(config.out).weights);
  // Text i ends with (i + 5) mod 8.
  EXPECT_EQ(training::predictions(*task, *data.test, 3), (std::vector<std::string>{"6", "7", "0"}));
  EXPECT_EQ(training::predictions(*task, *data.test, 100).size(), 64u) << "all there are";
  EXPECT_TRUE(training::predictions(*task, *data.test, 0).empty());
  EXPECT_TRUE(task->network().is_training()) << "as before";
  // A task without words for it.
  config.model = "dot-detector";
  const training::RunData dots = training::load_data(config, false);
  EXPECT_TRUE(training::predictions(*training::make_task(config, dots), *dots.test, 3).empty());
  // Classes by their names, where there are any.
  const test::Samples samples(8, 6, 3, 5);
  manual_seed(3);
  const test::Regression net(6, 3);
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  training::ClassificationTask named{classifier, {.classes = {"a", "b", "c"}}}, numbered{classifier};
  const auto shares = softmax(net(tensor(samples.x, {8, 6})), 1).to_vector<float>();
  const auto names = training::predictions(named, *samples.dataset(), 8);
  const auto numbers = training::predictions(numbered, *samples.dataset(), 8);
  ASSERT_EQ(names.size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) {
    const auto row = shares.begin() + static_cast<std::ptrdiff_t>(3 * i);
    const auto best = std::max_element(row, row + 3);
    const std::string share = fmt::format(" ({:.1f}%)", 100 * static_cast<double>(*best));
    EXPECT_EQ(names[i], std::string(1, static_cast<char>('a' + (best - row))) + share);
    EXPECT_EQ(numbers[i], std::to_string(best - row) + share);
  }
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

}  // namespace
}  // namespace halfstep
