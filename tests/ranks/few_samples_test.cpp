// SPDX-License-Identifier: Apache-2.0
// Evaluations of fewer samples than ranks: the figures are those of one process.
#include <cmath>
#include <functional>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/embedding.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/detection.h"
#include "halfstep/train/trainer.h"
#include "tests/ranks/ranks.h"
#include "tests/support/errors.h"

namespace halfstep::dist::test {
namespace {

// The first `size` samples that `make` makes of their indices.
class Made final : public data::Dataset {
 public:
  using Make = std::function<data::Batch(const std::vector<std::int64_t>&)>;
  Made(std::int64_t size, Make make) : size_(size), make_(std::move(make)) {}
  std::int64_t size() const override { return size_; }
  data::Batch batch(const data::BatchRequest& request) const override {
    return make_({request.indices.begin(), request.indices.end()});
  }

 private:
  std::int64_t size_;
  Make make_;
};

// The figures of all ranks together, and those of one process that has all samples, for 1, 2, 3 and more samples.
// `tolerance` is relative: each batch's mean loss is rounded to float32.
void expect_the_same(training::Task& task, const Made::Make& make, const std::vector<std::string>& names,
                     double tolerance) {
  for (const std::int64_t n : {1, 2, 3, 5}) {
    const auto samples = std::make_shared<Made>(n, make);
    const training::EvalReport one = training::evaluate(task, samples, {.batch_size = 4, .group = {}});
    const training::EvalReport all = training::evaluate(task, samples, {.batch_size = 4, .group = world()});
    ASSERT_EQ(all.metrics.size(), one.metrics.size()) << all.metrics << " and " << one.metrics;
    for (std::size_t i = 0; i < one.metrics.size(); ++i) {
      EXPECT_EQ(all.metrics.begin()[static_cast<std::ptrdiff_t>(i)].first,
                one.metrics.begin()[static_cast<std::ptrdiff_t>(i)].first);
    }
    for (const std::string& name : names) {
      const auto expected = static_cast<double>(one.metrics[name]);
      EXPECT_NEAR(static_cast<double>(all.metrics[name]), expected, tolerance * std::abs(expected))
          << name << " of " << n << " samples";
    }
  }
}

TEST(FewSamples, OfClassesAreCountedOnce) {
  manual_seed(3);
  const nn::Linear net{{.in = 4, .out = 3}};
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  training::ClassificationTask task(classifier, {.keep_verdicts = true});
  const auto make = [](const std::vector<std::int64_t>& indices) {
    std::vector<double> x;
    std::vector<std::int64_t> labels;
    for (const std::int64_t i : indices) {
      for (int k = 0; k < 4; ++k) x.push_back(std::sin(static_cast<double>(7 * i + k)));
      labels.push_back(i % 3);
    }
    const auto n = static_cast<std::int64_t>(indices.size());
    return data::Batch{tensor(x, {n, 4}).to(f32), tensor(labels, {n})};
  };
  expect_the_same(task, make, {"loss", "top1", "top5"}, 1e-6);
  // The table of classes has the rows of all ranks' samples.
  for (const std::int64_t n : {1, 3}) {
    const auto samples = std::make_shared<Made>(n, make);
    training::ResultTable one, all;
    training::evaluate(task, samples, {.table = &one, .group = {}});
    training::evaluate(task, samples, {.table = &all, .group = world()});
    EXPECT_EQ(all.rows, one.rows);
    EXPECT_FALSE(all.rows.empty());
  }
  EXPECT_NE(halfstep::test::error_of<Error>([&] {
              training::evaluate(task, std::make_shared<Made>(0, make), {.group = world()});
            }).find("expected at least one batch, got none"),
            std::string::npos);
}

// A bigram on texts: parts on the device and parts that are counted later, under names that sort otherwise than they
// come, and a figure of the means.
class Texts final : public training::Task {
 public:
  const nn::ModuleBase& network() const override { return table_; }
  training::TaskLoss loss(const data::Batch& batch) override {
    const Tensor logits = table_(batch.input.narrow(1, 0, 5)).reshape({-1, 8});
    const Tensor next = batch.input.narrow(1, 1, 5).reshape({-1});
    training::TaskLoss made{.loss = cross_entropy(logits, next)};
    made.parts = {{"zeros", full({}, static_cast<double>(batch.input.size(0)), {.dtype = f32, .device = Device{}})},
                  {"tokens", full({}, 5.0 * static_cast<double>(batch.input.size(0)), {.device = Device{}})}};
    made.count_later = [batch](std::map<std::string, double>& parts) {
      for (const std::int64_t id : batch.input.to_vector<std::int64_t>()) parts["ids"] += static_cast<double>(id);
    };
    return made;
  }
  void end_evaluation(training::MetricResults& results) override {
    results.set("perplexity", std::exp(static_cast<double>(results["loss"])));
  }

 private:
  nn::Embedding table_{{.num = 8, .dim = 8}};
};

TEST(FewSamples, OfATasksOwnPartsAreAddedUpByName) {
  manual_seed(4);
  Texts task;
  const auto make = [](const std::vector<std::int64_t>& indices) {
    std::vector<std::int64_t> ids;
    for (const std::int64_t i : indices) {
      for (std::int64_t k = 0; k < 6; ++k) ids.push_back((3 * i + k * k) % 8);
    }
    return data::Batch{tensor(ids, {static_cast<std::int64_t>(indices.size()), 6}), {}};
  };
  expect_the_same(task, make, {"loss", "zeros", "tokens", "ids", "perplexity"}, 1e-6);
}

// A head of zero weights finds the same in every picture: a box of the anchor's size in the middle of the two cells of
// the coarsest level. Pictures differ in what is there, so that some of it is found and some of it not.
TEST(FewSamples, OfDetectionGiveThePrecisionOfAll) {
  const auto net = std::make_shared<const models::Yolov5>(models::yolov5n({.classes = 1}));
  {
    const NoGrad no_grad;
    for (std::int64_t l = 0; l < 3; ++l) {
      Tensor weight = net->head().m[static_cast<std::size_t>(l)].weight,
             bias = net->head().m[static_cast<std::size_t>(l)].bias;
      weight.fill_(0);
      bias.copy_(tensor({0, 0, 0, 0, l == 2 ? 2.0 : -30.0, 30, 0, 0, 0, 0, -30, 30, 0, 0, 0, 0, -30, 30}, {18}));
    }
  }
  training::DetectionTask task(net);
  const auto make = [](const std::vector<std::int64_t>& indices) {
    std::vector<double> objects, places;
    for (const std::int64_t i : indices) {
      // The whole input, which is found, or its right half.
      const double width = i % 2 == 0 ? 1 : 0.5;
      for (const double v : {0.0, 1 - width / 2, 0.5, width, 1.0}) objects.push_back(v);
      for (const double v : {static_cast<double>(i), 1.0, 0.0, 0.0, 64.0, 32.0}) places.push_back(v);
    }
    const auto n = static_cast<std::int64_t>(indices.size());
    return data::Batch{.input = zeros({n, 3, 32, 64}),
                       .target = tensor(objects, {n, 1, 5}).to(f32),
                       .more = {tensor(places, {n, 6}, {.dtype = f64})}};
  };
  expect_the_same(task, make, {"precision", "recall", "mAP50", "mAP50-95", "COCO_AP50", "COCO_AP", "fitness"}, 1e-12);
  EXPECT_EQ(task.evaluation().pictures(), 5);
  training::MetricResults all;
  task.end_evaluation(all);
  EXPECT_GT(static_cast<double>(all["COCO_AP"]), 0);
  EXPECT_LT(static_cast<double>(all["COCO_AP"]), 1);
}

}  // namespace
}  // namespace halfstep::dist::test
