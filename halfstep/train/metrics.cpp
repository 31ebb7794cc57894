// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/metrics.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <ostream>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/likeliest_internal.h"

namespace halfstep::training {
namespace {

Tensor on_cpu(const std::vector<double>& values, const Shape& shape) {
  return tensor(values, shape, {.dtype = f64, .device = Device{}});
}

double ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }

[[noreturn]] void nothing_seen(const std::string& name) {
  fail<Error>("{}: expected an update() before eval(), there was none, or none that counts", name);
}

std::string told(const Tensor& t) {
  return t.defined() ? fmt::format("{} {}", halfstep::name(t.dtype()), t.sizes().str()) : "an undefined tensor";
}

std::string number(double value) { return fmt::format("{:.6g}", value); }

}  // namespace

// A batch as rows of one score a class, and what belongs to each.
struct detail::ClassRows {
  std::int64_t classes = 0;
  std::vector<double> scores;        // rows of `classes`
  std::vector<std::int64_t> labels;  // one a row; those to ignore are negative
  std::vector<char> truth;           // with several labels: beside `scores`
  std::int64_t rows() const { return static_cast<std::int64_t>(scores.size()) / classes; }
  const double* row(std::int64_t i) const { return scores.data() + i * classes; }
};

namespace {

using detail::ClassRows;

// Classes last.
std::vector<double> rows_of(const Tensor& t) {
  if (t.dim() == 2) return t.to_vector<double>();
  Shape order{0};
  for (int d = 2; d < t.dim(); ++d) order.push_back(d);
  order.push_back(1);
  return t.permute(order).to_vector<double>();
}

ClassRows rows_of(const std::string& name, const Tensor& output, const Tensor& target, const ClassOptions& options) {
  const auto misfit = [&](const char* expected, const char* hint = "") {
    fail<ShapeError>("{}: expected {}, got an output of {} and a target of {}{}", name, expected, told(output),
                     told(target), hint);
  };
  if (!output.defined() || !target.defined()) misfit("an output and a target");
  const NoGrad no_grad;
  const Shape& shape = output.sizes();
  if (options.multilabel) {
    if (shape.size() != 2 || target.sizes() != shape) misfit("output and target [N, classes] with several labels");
    ClassRows result{.classes = shape[1], .scores = output.to_vector<double>(), .labels = {}, .truth = {}};
    for (double v : target.to_vector<double>()) {
      if (v != 0 && v != 1) {
        fail<Error>("{}: expected a target of zeros and ones with several labels, got {}", name, number(v));
      }
      result.truth.push_back(v == 1);
    }
    return result;
  }
  if (shape.size() < 2 || !output.is_floating()) {
    misfit("scores [N, classes, ...]", "; numbers are judged by mae and mse");
  }
  if (shape[1] < 2) misfit("at least two classes", "; numbers are judged by mae and mse");
  ClassRows result{.classes = shape[1], .scores = rows_of(output), .labels = {}, .truth = {}};
  if (target.sizes() == shape) {
    const std::vector<double> shares = rows_of(target);
    for (std::int64_t i = 0; i < result.rows(); ++i) {
      result.labels.push_back(likeliest(shares.data() + i * result.classes, result.classes));
    }
    return result;
  }
  Shape labels{shape[0]};
  for (int d = 2; d < shape.size(); ++d) labels.push_back(shape[d]);
  if (target.sizes() != labels) {
    misfit(fmt::format("a target of class indices {} or of probabilities {}", labels.str(), shape.str()).c_str());
  }
  if (target.is_floating() || target.dtype() == DType::boolean) {
    fail<DTypeError>("{}: expected class indices as integers, got a target of {}", name, told(target));
  }
  result.labels = target.to_vector<std::int64_t>();
  for (std::int64_t& label : result.labels) {
    if (label == options.ignore_index) {
      label = -1;
    } else if (label < 0 || label >= result.classes) {
      fail<Error>("{}: expected labels from 0 to {}, got {}", name, result.classes - 1, label);
    }
  }
  return result;
}

void check_classes(const std::string& name, std::int64_t before, std::int64_t now) {
  if (before > 0 && before != now) {
    fail<ShapeError>("{}: expected {} classes as in the batches before, got {}; clear() begins anew", name, before,
                     now);
  }
}

// Hits among the k likeliest, and how many there could be.
std::pair<std::int64_t, std::int64_t> hits(const ClassRows& rows, std::int64_t k) {
  std::int64_t right = 0, total = 0;
  for (std::int64_t i = 0; i < rows.rows(); ++i) {
    const std::int64_t label = rows.labels[static_cast<std::size_t>(i)];
    if (label < 0) continue;
    ++total;
    const double* row = rows.row(i);
    const double own = row[label];
    if (std::isnan(own)) continue;
    std::int64_t above = 0;
    for (std::int64_t c = 0; c < rows.classes; ++c) above += row[c] > own || (row[c] == own && c < label);
    right += above < k;
  }
  return {right, total};
}

}  // namespace

MetricValue::MetricValue(double value) : values_(on_cpu({value}, {})) {}

MetricValue::MetricValue(Tensor values) : values_(std::move(values)) {
  if (!values_.defined() || values_.numel() == 0) fail<Error>("MetricValue: expected at least one number, got none");
  if (!values_.device().is_cpu()) {
    fail<DeviceError>("MetricValue: expected a tensor on the CPU, got one on {}", values_.device().str());
  }
}

MetricValue::operator double() const {
  if (!is_number()) {
    fail<ShapeError>("MetricValue: expected a single number, got {} of them {}; tensor() has them all", values_.numel(),
                     values_.sizes().str());
  }
  return values_.item<double>();
}

std::ostream& operator<<(std::ostream& out, const MetricValue& value) {
  if (value.is_number()) return out << number(value);
  return out << value.tensor();
}

const MetricValue& MetricResults::operator[](std::string_view name) const {
  for (const Entry& e : entries_) {
    if (e.first == name) return e.second;
  }
  std::string names;
  for (const Entry& e : entries_) names += (names.empty() ? "" : ", ") + e.first;
  fail<Error>("MetricResults: expected one of {}, got \"{}\"", names.empty() ? "(there are none)" : names, name);
}

bool MetricResults::contains(std::string_view name) const {
  return std::any_of(begin(), end(), [&](const Entry& e) { return e.first == name; });
}

void MetricResults::set(const std::string& name, MetricValue value) {
  for (Entry& e : entries_) {
    if (e.first == name) {
      e.second = std::move(value);
      return;
    }
  }
  entries_.emplace_back(name, std::move(value));
}

std::string MetricResults::str() const {
  std::string text;
  for (const Entry& e : entries_) {
    const Tensor& t = e.second.tensor();
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", e.first,
                        e.second.is_number() ? number(e.second) : fmt::format("{} values", t.sizes().str()));
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const MetricResults& results) { return out << results.str(); }

MetricBase::~MetricBase() = default;

namespace {

struct Named {
  const char* name;
  std::function<Metric()> make;
};

const std::vector<Named>& named() {
  static const std::vector<Named> all = {
      {"accuracy", [] { return Metric(Accuracy{}); }},
      {"acc", [] { return Metric(Accuracy{}); }},
      {"top_1_accuracy", [] { return Metric(TopK{{.k = 1}}); }},
      {"top_5_accuracy", [] { return Metric(TopK{{.k = 5}}); }},
      {"topk", [] { return Metric(TopK{{.k = 5}}); }},
      {"precision", [] { return Metric(Precision{}); }},
      {"recall", [] { return Metric(Recall{}); }},
      {"F1", [] { return Metric(F1{}); }},
      {"f1", [] { return Metric(F1{}); }},
      {"confusion_matrix", [] { return Metric(ConfusionMatrix{}); }},
      {"mae", [] { return Metric(MAE{}); }},
      {"mse", [] { return Metric(MSE{}); }},
      {"loss", [] { return Metric(Loss{}); }},
      {"perplexity", [] { return Metric(Perplexity{}); }},
  };
  return all;
}

}  // namespace

std::vector<std::string> metric_names() {
  std::vector<std::string> names;
  for (const Named& n : named()) names.emplace_back(n.name);
  return names;
}

Metric::Metric(std::shared_ptr<MetricBase> metric) : metric_(std::move(metric)) {
  if (!metric_) fail<Error>("Metric: expected a metric, got none");
  name_ = metric_->name();
}

Metric::Metric(const std::string& name) : name_(name) {
  for (const Named& n : named()) {
    if (name == n.name) metric_ = n.make().metric_;
  }
  if (!metric_) fail<Error>("Metric: expected one of {}, got \"{}\"", fmt::join(metric_names(), ", "), name);
}

void Accuracy::update(const Tensor& output, const Tensor& target) {
  const ClassRows rows = rows_of(name(), output, target, options_);
  if (!options_.multilabel) {
    const auto [right, total] = hits(rows, 1);
    right_ += right;
    total_ += total;
    return;
  }
  for (std::size_t at = 0; at < rows.scores.size(); at += static_cast<std::size_t>(rows.classes)) {
    bool all = true;
    for (std::size_t j = at; j < at + static_cast<std::size_t>(rows.classes); ++j) {
      all = all && (rows.scores[j] > options_.threshold) == (rows.truth[j] != 0);
    }
    right_ += all;
    ++total_;
  }
}

MetricValue Accuracy::eval() const {
  if (total_ == 0) nothing_seen(name());
  return static_cast<double>(right_) / static_cast<double>(total_);
}

TopK::TopK(const TopKOptions& options) : options_(options) {
  if (options.k < 1) fail<Error>("TopK: expected k of at least 1, got {}", options.k);
}

std::string TopK::name() const { return fmt::format("top_{}_accuracy", options_.k); }

void TopK::update(const Tensor& output, const Tensor& target) {
  const ClassRows rows = rows_of(name(), output, target, {.ignore_index = options_.ignore_index});
  if (rows.classes < options_.k) {
    fail<ShapeError>("{}: expected at least {} classes, got an output of {}", name(), options_.k, told(output));
  }
  const auto [right, total] = hits(rows, options_.k);
  right_ += right;
  total_ += total;
}

MetricValue TopK::eval() const {
  if (total_ == 0) nothing_seen(name());
  return static_cast<double>(right_) / static_cast<double>(total_);
}

void ClassScore::clear() {
  hits_.clear();
  false_alarms_.clear();
  misses_.clear();
}

void ClassScore::update(const Tensor& output, const Tensor& target) {
  const ClassRows rows = rows_of(name(), output, target, options_.classes);
  check_classes(name(), static_cast<std::int64_t>(hits_.size()), rows.classes);
  const auto classes = static_cast<std::size_t>(rows.classes);
  for (auto* counts : {&hits_, &false_alarms_, &misses_}) counts->resize(classes);
  if (options_.classes.multilabel) {
    for (std::size_t j = 0; j < rows.scores.size(); ++j) {
      const bool said = rows.scores[j] > options_.classes.threshold, is = rows.truth[j] != 0;
      hits_[j % classes] += said && is;
      false_alarms_[j % classes] += said && !is;
      misses_[j % classes] += !said && is;
    }
    return;
  }
  for (std::int64_t i = 0; i < rows.rows(); ++i) {
    const std::int64_t label = rows.labels[static_cast<std::size_t>(i)];
    if (label < 0) continue;
    const std::int64_t said = likeliest(rows.row(i), rows.classes);
    if (said == label) {
      ++hits_[static_cast<std::size_t>(label)];
      continue;
    }
    ++misses_[static_cast<std::size_t>(label)];
    if (said >= 0) ++false_alarms_[static_cast<std::size_t>(said)];
  }
}

MetricValue ClassScore::eval() const {
  double all_hits = 0, all_false = 0, all_missed = 0, sum = 0, weight = 0;
  std::vector<double> values;
  for (std::size_t c = 0; c < hits_.size(); ++c) {
    const auto h = static_cast<double>(hits_[c]), f = static_cast<double>(false_alarms_[c]);
    const auto m = static_cast<double>(misses_[c]);
    all_hits += h, all_false += f, all_missed += m;
    values.push_back(score(h, f, m));
    const double w = options_.average == Average::weighted ? h + m : h + f + m > 0 ? 1 : 0;
    sum += w * values.back();
    weight += w;
  }
  if (all_hits + all_false + all_missed == 0 && !(options_.classes.multilabel && !values.empty())) {
    nothing_seen(name());
  }
  switch (options_.average) {
    case Average::none:
      return on_cpu(values, {static_cast<std::int64_t>(values.size())});
    case Average::micro:
      return score(all_hits, all_false, all_missed);
    case Average::macro:
    case Average::weighted:
      break;
  }
  return ratio(sum, weight);
}

double Precision::score(double hits, double false_alarms, double) const { return ratio(hits, hits + false_alarms); }
double Recall::score(double hits, double, double misses) const { return ratio(hits, hits + misses); }
double F1::score(double hits, double false_alarms, double misses) const {
  return ratio(2 * hits, 2 * hits + false_alarms + misses);
}

void ConfusionMatrix::clear() {
  counts_.clear();
  classes_ = 0;
}

void ConfusionMatrix::update(const Tensor& output, const Tensor& target) {
  const ClassRows rows = rows_of(name(), output, target, {.ignore_index = options_.ignore_index});
  check_classes(name(), classes_, rows.classes);
  classes_ = rows.classes;
  counts_.resize(static_cast<std::size_t>(classes_ * classes_));
  std::int64_t left_out = 0;
  for (std::int64_t i = 0; i < rows.rows(); ++i) {
    const std::int64_t label = rows.labels[static_cast<std::size_t>(i)];
    if (label < 0) continue;
    const std::int64_t said = likeliest(rows.row(i), classes_);
    if (said < 0) {
      ++left_out;
    } else {
      ++counts_[static_cast<std::size_t>(label * classes_ + said)];
    }
  }
  if (left_out > 0) log(LogLevel::warning, fmt::format("{}: {} samples without a class: all NaN", name(), left_out));
}

MetricValue ConfusionMatrix::eval() const {
  if (classes_ == 0) nothing_seen(name());
  const Shape shape{classes_, classes_};
  if (options_.normalize == Normalize::none) return tensor(counts_, shape, {.dtype = i64, .device = Device{}});
  const auto n = static_cast<std::size_t>(classes_);
  std::vector<double> rows(n, 0), columns(n, 0), values;
  double all = 0;
  for (std::size_t i = 0; i < n * n; ++i) {
    const auto count = static_cast<double>(counts_[i]);
    rows[i / n] += count, columns[i % n] += count, all += count;
  }
  for (std::size_t i = 0; i < n * n; ++i) {
    const double whole = options_.normalize == Normalize::target       ? rows[i / n]
                         : options_.normalize == Normalize::prediction ? columns[i % n]
                                                                       : all;
    values.push_back(ratio(static_cast<double>(counts_[i]), whole));
  }
  return on_cpu(values, shape);
}

namespace {

// Adds term(output - target) of every element.
template <class Term>
void add_differences(const std::string& name, const Tensor& output, const Tensor& target, double& sum,
                     std::int64_t& count, Term term) {
  if (!output.defined() || !target.defined() || output.sizes() != target.sizes()) {
    const bool labels = output.defined() && target.defined() && !target.is_floating();
    fail<ShapeError>("{}: expected output and target of one shape, got {} and {}; {}", name, told(output), told(target),
                     labels ? "labels are judged by accuracy" : "reshape one of them?");
  }
  const std::vector<double> a = output.to_vector<double>(), b = target.to_vector<double>();
  for (std::size_t i = 0; i < a.size(); ++i) sum += term(a[i] - b[i]);
  count += static_cast<std::int64_t>(a.size());
}

}  // namespace

void MAE::update(const Tensor& output, const Tensor& target) {
  add_differences(name(), output, target, sum_, count_, [](double d) { return std::abs(d); });
}

MetricValue MAE::eval() const {
  if (count_ == 0) nothing_seen(name());
  return sum_ / static_cast<double>(count_);
}

void MSE::update(const Tensor& output, const Tensor& target) {
  add_differences(name(), output, target, sum_, count_, [](double d) { return d * d; });
}

MetricValue MSE::eval() const {
  if (count_ == 0) nothing_seen(name());
  return sum_ / static_cast<double>(count_);
}

void Loss::update(const Tensor& loss, const Tensor& target) {
  if (!loss.defined() || loss.numel() != 1) {
    fail<ShapeError>("loss: expected a loss of one number, got {}; the metric takes the loss in place of the output",
                     told(loss));
  }
  update(loss.item<double>(), target.defined() && target.dim() > 0 ? target.size(0) : 1);
}

void Loss::update(double loss, std::int64_t samples) {
  if (samples < 0) fail<Error>("loss: expected a number of samples, got {}", samples);
  if (samples > 0) sum_ += loss * static_cast<double>(samples);  // the mean over none is NaN
  samples_ += samples;
}

MetricValue Loss::eval() const {
  if (samples_ == 0) nothing_seen(name());
  return sum_ / static_cast<double>(samples_);
}

void Perplexity::update(const Tensor& output, const Tensor& target) {
  if (!output.defined() || !target.defined() || !output.is_floating() || output.dim() < 2 || target.is_floating()) {
    fail<ShapeError>(
        "perplexity: expected logits [N, classes, ...] and class indices [N, ...], got an output of {} and a target of "
        "{}",
        told(output), told(target));
  }
  const NoGrad no_grad;
  const Tensor terms =
      cross_entropy(output, target, {.reduction = Reduction::none, .ignore_index = options_.ignore_index});
  const std::vector<std::int64_t> labels = target.to_vector<std::int64_t>();
  const std::vector<double> values = terms.to_vector<double>();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (labels[i] == options_.ignore_index) continue;
    sum_ += values[i];
    ++count_;
  }
}

MetricValue Perplexity::eval() const {
  if (count_ == 0) nothing_seen(name());
  return std::exp(sum_ / static_cast<double>(count_));
}

}  // namespace halfstep::training
