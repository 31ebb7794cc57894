// SPDX-License-Identifier: Apache-2.0
// Metrics against scikit-learn's values, counts by hand and closed forms.
#include "halfstep/train/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "halfstep/ops/create.h"
#include "halfstep/train/json_log.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;
using training::Average;
using training::Metric;
using training::MetricValue;
using training::Normalize;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor labels(const std::vector<std::int64_t>& values) {
  return tensor(values, {static_cast<std::int64_t>(values.size())});
}

// Scores that make `said` the likeliest class of each sample.
Tensor scores(const std::vector<std::int64_t>& said, std::int64_t classes) {
  std::vector<double> values;
  for (std::int64_t c : said) {
    for (std::int64_t k = 0; k < classes; ++k) values.push_back(k == c ? 1.5 : -0.5 * static_cast<double>(k));
  }
  return tensor(values, {static_cast<std::int64_t>(said.size()), classes});
}

// What is and what was said, of five classes: the last one never occurs, class 3 is never said.
const std::vector<std::int64_t> kIs{0, 1, 2, 2, 1, 0, 2, 3, 2, 1};
const std::vector<std::int64_t> kSaid{0, 2, 2, 1, 1, 0, 2, 0, 2, 0};

// In two batches of unlike size.
template <class M>
MetricValue after_both(M metric) {
  const Tensor output = scores(kSaid, 5), target = labels(kIs);
  metric.update(output.slice(0, 0, 7), target.slice(0, 0, 7));
  metric.update(output.slice(0, 7), target.slice(0, 7));
  return metric.eval();
}

TEST(Metrics, AccuracyCountsSamples) {
  EXPECT_DOUBLE_EQ(after_both(training::Accuracy{}), 0.6);
  training::Accuracy accuracy;
  accuracy.update(scores({1}, 3), labels({0}));
  accuracy.clear();
  accuracy.update(scores({1, 2}, 3), labels({1, 2}));
  EXPECT_DOUBLE_EQ(accuracy.eval(), 1);
}

TEST(Metrics, TiesAndNansAreNoHits) {
  training::Accuracy accuracy;
  // All equal: class 0 is said. NaN for the label is never right; NaN elsewhere takes nothing away.
  accuracy.update(tensor({1, 1, 1, kNan, 5, 0, kNan, 5, 0, kNan, kNan, kNan}, {4, 3}), labels({1, 0, 1, 2}));
  EXPECT_DOUBLE_EQ(accuracy.eval(), 0.25);
  // The first of equal classes is the one that was said; who says nothing at all misses, but raises no false alarm.
  training::ConfusionMatrix matrix;
  matrix.update(tensor({1, 3, 3, 0, 0, 0}, {2, 3}), labels({2, 1}));
  EXPECT_EQ(matrix.eval().tensor().to_vector<std::int64_t>(), (std::vector<std::int64_t>{0, 0, 0, 1, 0, 0, 0, 1, 0}));
  training::F1 f1{{.average = Average::none}};
  f1.update(tensor({kNan, kNan, 2, 2, 0, 1}, {3, 2}), labels({0, 0, 1}));
  EXPECT_EQ(f1.eval().tensor().to_vector<double>(), (std::vector<double>{2.0 / 3, 1}));
}

TEST(Metrics, AccuracyTakesProbabilitiesPixelsAndIgnoredLabels) {
  training::Accuracy soft;
  soft.update(scores({0, 2}, 3), tensor({0.6, 0.4, 0, 0.1, 0.7, 0.2}, {2, 3}));
  EXPECT_DOUBLE_EQ(soft.eval(), 0.5);
  // Two pictures of 1x2 pixels, classes along dimension 1: said are (1, 0) and (1, 1).
  training::Accuracy pixels;
  pixels.update(tensor({0, 1, 2, 0, 0, 0, 3, 3}, {2, 2, 1, 2}),
                tensor(std::vector<std::int64_t>{1, 0, -100, 0}, {2, 1, 2}));
  EXPECT_DOUBLE_EQ(pixels.eval(), 2.0 / 3);
}

TEST(Metrics, SeveralLabelsAtOnce) {
  const Tensor target = tensor({1, 0, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1}, {4, 3});
  const Tensor said = tensor({2, -1, 1, -3, 1, 1, -1, 1, -1, -1, 0, 1}, {4, 3});  // above 0: scikit-learn's predictions
  training::Accuracy accuracy{{.multilabel = true}};
  accuracy.update(said, target);
  EXPECT_DOUBLE_EQ(accuracy.eval(), 0.5);  // rows 0 and 3
  const auto of = [&](auto metric) {
    metric.update(said, target);
    return metric.eval();
  };
  const auto options = [](Average average) {
    return training::ClassScoreOptions{.average = average, .classes = {.multilabel = true}};
  };
  EXPECT_DOUBLE_EQ(of(training::Precision{options(Average::macro)}), 8.0 / 9);
  EXPECT_DOUBLE_EQ(of(training::Recall{options(Average::macro)}), 5.0 / 6);
  EXPECT_DOUBLE_EQ(of(training::F1{options(Average::micro)}), 5.0 / 6);
  EXPECT_NEAR(of(training::F1{options(Average::weighted)}), 0.8222222222222223, 1e-15);
  training::Accuracy half{{.multilabel = true, .threshold = 1.5}};
  half.update(said, target);
  EXPECT_DOUBLE_EQ(half.eval(), 0);
}

TEST(Metrics, TopKCountsTheFirstK) {
  // The label's rank (from 1) in the rows: 1, 2, 3, 4; and one where all are equal, whose label is the third.
  const Tensor output = tensor({9, 1, 2, 3, 3, 9, 2, 1, 2, 3, 9, 1, 1, 2, 3, 9, 4, 4, 4, 4}, {5, 4});
  const Tensor target = labels({0, 0, 0, 0, 2});
  const double expected[] = {0.2, 0.4, 0.8, 1};
  for (std::int64_t k = 1; k <= 4; ++k) {
    training::TopK top{{.k = k}};
    top.update(output, target);
    EXPECT_DOUBLE_EQ(top.eval(), expected[k - 1]) << k;
    EXPECT_EQ(top.name(), "top_" + std::to_string(k) + "_accuracy");
  }
}

// Values of scikit-learn 1.7 (zero_division=0) on the two lists above.
TEST(Metrics, PrecisionRecallAndF1AreScikitLearns) {
  struct Expected {
    std::vector<double> classes;
    double macro, micro, weighted;
  };
  const auto compare = [](auto make, const Expected& expected) {
    EXPECT_DOUBLE_EQ(after_both(make(Average::macro)), expected.macro);
    EXPECT_DOUBLE_EQ(after_both(make(Average::micro)), expected.micro);
    EXPECT_DOUBLE_EQ(after_both(make(Average::weighted)), expected.weighted);
    const MetricValue each = after_both(make(Average::none));
    EXPECT_EQ(each.tensor().sizes(), Shape({5}));
    EXPECT_EQ(each.tensor().to_vector<double>(), expected.classes);
  };
  compare([](Average a) { return training::Precision{{.average = a}}; }, {{0.5, 0.5, 0.75, 0, 0}, 0.4375, 0.6, 0.55});
  compare([](Average a) { return training::Recall{{.average = a}}; },
          {{1, 1.0 / 3, 0.75, 0, 0}, 0.5208333333333333, 0.6, 0.6});
  compare([](Average a) { return training::F1{{.average = a}}; },
          {{2.0 / 3, 0.4, 0.75, 0, 0}, 0.45416666666666666, 0.6, 0.5533333333333333});
}

TEST(Metrics, ConfusionMatrixHasTrueClassesInRows) {
  const MetricValue counts = after_both(training::ConfusionMatrix{});
  EXPECT_EQ(counts.tensor().dtype(), i64);
  EXPECT_EQ(counts.tensor().to_vector<std::int64_t>(),
            (std::vector<std::int64_t>{2, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 3, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  const auto row = [](Normalize n, std::int64_t r) {
    return after_both(training::ConfusionMatrix{{.normalize = n}}).tensor()[r].to_vector<double>();
  };
  EXPECT_EQ(row(Normalize::target, 1), (std::vector<double>{1.0 / 3, 1.0 / 3, 1.0 / 3, 0, 0}));
  EXPECT_EQ(row(Normalize::prediction, 1), (std::vector<double>{0.25, 0.5, 0.25, 0, 0}));
  EXPECT_EQ(row(Normalize::all, 2), (std::vector<double>{0, 0.1, 0.3, 0, 0}));
}

TEST(Metrics, ErrorsOfNumbers) {
  training::MAE mae;
  training::MSE mse;
  for (const auto dtype : {f32, f16}) {  // all values fit both
    mae.update(tensor({1, 2, 3, 4}, {2, 2}, {.dtype = dtype}), tensor({1, 0, 3.5, 8}, {2, 2}));
    mse.update(tensor({1, 2, 3, 4}, {2, 2}, {.dtype = dtype}), tensor({1, 0, 3.5, 8}, {2, 2}));
  }
  EXPECT_DOUBLE_EQ(mae.eval(), (0 + 2 + 0.5 + 4) / 4);
  EXPECT_DOUBLE_EQ(mse.eval(), (0 + 4 + 0.25 + 16) / 4);
}

TEST(Metrics, LossIsWeightedBySamples) {
  training::Loss loss;
  loss.update(scalar_tensor(2.0), labels({0, 0, 0}));
  loss.update(scalar_tensor(6.0), labels({0}));
  EXPECT_DOUBLE_EQ(loss.eval(), 3);
  loss.clear();
  loss.update(0.5);
  EXPECT_DOUBLE_EQ(loss.eval(), 0.5);
}

TEST(Metrics, PerplexityOfKnownDistributions) {
  // Equal logits of four classes say 1/4 each: perplexity 4, whatever the labels.
  training::Perplexity uniform;
  uniform.update(zeros({3, 4}), labels({0, 2, 3}));
  EXPECT_NEAR(uniform.eval(), 4, 4 * 3e-7);  // log 4 and the sum are rounded to float32
  // Logits log 3 and 0 say 3/4 and 1/4: e^-(log 3/4 + log 3/4 + log 1/4) / 3; one label is padding.
  training::Perplexity odds;
  odds.update(tensor({std::log(3), 0, 0, std::log(3), 0, std::log(3), 1, 2}, {4, 2}), labels({0, 1, 0, -100}));
  EXPECT_NEAR(odds.eval(), std::cbrt(16.0 / 9 * 4), 2e-6);
  // Sequences: classes along dimension 1.
  training::Perplexity sequence;
  sequence.update(zeros({2, 5, 3}), zeros({2, 3}, {.dtype = i64}));
  EXPECT_NEAR(sequence.eval(), 5, 5 * 3e-7);
}

TEST(Metrics, AreMadeByName) {
  for (const std::string& name : training::metric_names()) EXPECT_EQ(Metric(name).name(), name);
  EXPECT_EQ(Metric("acc")->name(), "accuracy");
  EXPECT_EQ(Metric("topk")->name(), "top_5_accuracy");
  EXPECT_EQ(Metric("f1")->name(), "F1");
  EXPECT_EQ(Metric("mine", training::MAE{}).name(), "mine");
  const std::string error = error_of<Error>([] { Metric("acuracy"); });
  EXPECT_NE(error.find("expected one of accuracy, acc, "), std::string::npos) << error;
  EXPECT_NE(error.find("\"acuracy\""), std::string::npos) << error;
}

TEST(Metrics, ResultsAreFoundByName) {
  training::MetricResults results;
  results.set("accuracy", 0.75);
  results.set("recall", tensor({0.5, 1}));
  results.set("accuracy", 0.5);
  EXPECT_DOUBLE_EQ(results["accuracy"], 0.5);
  EXPECT_EQ(results.size(), 2u);
  EXPECT_TRUE(results.contains("recall"));
  EXPECT_NE(error_of<ShapeError>([&] { (void)static_cast<double>(results["recall"]); }).find("2 of them"),
            std::string::npos);
  const std::string error = error_of<Error>([&] { (void)results["loss"]; });
  EXPECT_NE(error.find("accuracy, recall"), std::string::npos) << error;
  std::ostringstream out;
  out << results;
  EXPECT_EQ(out.str(), "accuracy 0.5, recall [2] values");
  // A line of a log has numbers.
  training::JsonLog::Fields fields;
  training::add_metrics(fields, results);
  EXPECT_EQ(fields, (training::JsonLog::Fields{{"accuracy", 0.5}}));
}

// Every metric says what it expected and what came when the tensors are not for it.
TEST(Metrics, RefuseWhatDoesNotFit) {
  const auto refused = [](auto metric, const Tensor& output, const Tensor& target, const char* text) {
    const std::string error = error_of<Error>([&] { metric.update(output, target); });
    EXPECT_TRUE(error.starts_with(metric.name() + ": expected ")) << error;
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  const Tensor output = scores({0, 1, 2, 3}, 4), target = labels({0, 1, 2, 3});
  // Numbers where classes are judged, and the other way round.
  for (const char* name : {"accuracy", "top_1_accuracy", "precision", "recall", "F1", "confusion_matrix"}) {
    const Metric metric(name);
    const std::string error = error_of<ShapeError>([&] { metric->update(zeros({4}), zeros({4})); });
    EXPECT_NE(error.find("got an output of f32 [4] and a target of f32 [4]; numbers are judged by mae and mse"),
              std::string::npos)
        << error;
    EXPECT_NE(error_of<ShapeError>([&] {
                metric->update(zeros({4, 1}), zeros({4, 1}));
              }).find("two classes"),
              std::string::npos);
    EXPECT_NE(error_of<ShapeError>([&] {
                metric->update(output, labels({0, 1}));
              }).find("class indices [4]"),
              std::string::npos);
    EXPECT_NE(error_of<Error>([&] {
                metric->update(output, labels({0, 1, 2, 4}));
              }).find("from 0 to 3, got 4"),
              std::string::npos);
    EXPECT_NE(error_of<DTypeError>([&] { metric->update(output, zeros({4})); }).find("integers"), std::string::npos);
    EXPECT_NE(error_of<Error>([&] { metric->update({}, target); }).find("an undefined tensor"), std::string::npos);
  }
  refused(training::MAE{}, output, target, "got f32 [4, 4] and i64 [4]; labels are judged by accuracy");
  refused(training::MSE{}, zeros({4, 1}), zeros({4}), "of one shape, got f32 [4, 1] and f32 [4]; reshape");
  refused(training::TopK{}, output, target, "at least 5 classes, got an output of f32 [4, 4]");
  refused(training::Loss{}, output, target, "a loss of one number, got f32 [4, 4]");
  refused(training::Perplexity{}, zeros({4}), zeros({4}), "logits [N, classes, ...]");
  refused(training::Accuracy{{.multilabel = true}}, output, target, "with several labels, got an output of f32 [4, 4]");
  refused(training::Accuracy{{.multilabel = true}}, zeros({1, 2}), tensor({0, 0.5}, {1, 2}), "zeros and ones");
  // The number of classes changes under way.
  training::Precision precision;
  precision.update(output, target);
  EXPECT_NE(error_of<ShapeError>([&] { precision.update(scores({0}, 5), labels({0})); }).find("4 classes"),
            std::string::npos);
  EXPECT_NE(error_of<Error>([] { training::TopK{{.k = 0}}; }).find("at least 1"), std::string::npos);
}

TEST(Metrics, EvalNeedsSamples) {
  for (const std::string& name : training::metric_names()) {
    const std::string error = error_of<Error>([&] { Metric(name)->eval(); });
    EXPECT_NE(error.find("expected an update() before eval()"), std::string::npos) << name << ": " << error;
  }
  training::Accuracy ignored;
  ignored.update(scores({0}, 2), labels({-100}));
  EXPECT_NE(error_of<Error>([&] { ignored.eval(); }), "");
}

}  // namespace
}  // namespace halfstep
