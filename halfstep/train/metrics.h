// SPDX-License-Identifier: Apache-2.0
// Metrics of a network's quality, with the protocol of MindSpore's metrics: clear(), update() a batch, eval().
#pragma once

#include <concepts>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep::training {

/// The value of a metric: a number, or a tensor (one value per class, a confusion matrix).
class HS_API MetricValue {
 public:
  MetricValue(double value);
  /// `values` on the CPU.
  MetricValue(Tensor values);
  /// The number. Throws ShapeError when there is more than one.
  operator double() const;
  /// The numbers; f64 [] for a single one.
  const Tensor& tensor() const { return values_; }
  /// Whether it is a single number.
  bool is_number() const { return values_.numel() == 1; }

 private:
  Tensor values_;
};
HS_API std::ostream& operator<<(std::ostream& out, const MetricValue& value);

/// Values of metrics by name, in the order in which the metrics were given: `results["accuracy"]`.
class HS_API MetricResults {
 public:
  using Entry = std::pair<std::string, MetricValue>;
  /// The value of that name. Throws Error naming the existing ones.
  const MetricValue& operator[](std::string_view name) const;
  /// Whether there is such a value.
  bool contains(std::string_view name) const;
  /// Adds one, or replaces that of the same name.
  void set(const std::string& name, MetricValue value);
  std::size_t size() const { return entries_.size(); }
  bool empty() const { return entries_.empty(); }
  std::vector<Entry>::const_iterator begin() const { return entries_.begin(); }
  std::vector<Entry>::const_iterator end() const { return entries_.end(); }
  /// One line: `accuracy 0.9786, loss 0.0712`.
  std::string str() const;

 private:
  std::vector<Entry> entries_;
};
HS_API std::ostream& operator<<(std::ostream& out, const MetricResults& results);

/// The common base of all metrics. Derive from it for a custom metric; a Model takes it by value. Tensors may be on any
/// device and of any dtype; sums are kept in float64 and counts as integers.
class HS_API MetricBase {
 public:
  virtual ~MetricBase();
  /// The name of its value in results.
  virtual std::string name() const = 0;
  /// Forgets all batches.
  virtual void clear() = 0;
  /// Adds a batch: the network's output and the target. Throws ShapeError or DTypeError for tensors that the metric
  /// can't evaluate.
  virtual void update(const Tensor& output, const Tensor& target) = 0;
  /// The value over all batches since clear(). Throws Error when there was none.
  virtual MetricValue eval() const = 0;
  /// Whether `output` is the loss of the batch instead of the network's output.
  virtual bool takes_loss() const { return false; }
};

/// Any metric, by value: from a metric object, or from a name (metric_names()). Copies share the metric.
class HS_API Metric {
 public:
  Metric(const char* name) : Metric(std::string(name)) {}
  /// The metric of that name with its defaults; the value has this name too. Throws Error naming the choices.
  Metric(const std::string& name);
  template <std::derived_from<MetricBase> M>
  Metric(M metric) : Metric(std::shared_ptr<MetricBase>(std::make_shared<M>(std::move(metric)))) {}
  /// One that the caller keeps a handle on.
  Metric(std::shared_ptr<MetricBase> metric);
  /// The metric under another name: `training::Metric("acc", training::Accuracy{})`.
  template <std::derived_from<MetricBase> M>
  Metric(std::string name, M metric) : Metric(std::move(metric)) {
    name_ = std::move(name);
  }
  /// The name of its value in results.
  const std::string& name() const { return name_; }
  MetricBase* operator->() const { return metric_.get(); }

 private:
  std::shared_ptr<MetricBase> metric_;
  std::string name_;
};
/// Names that stand for metrics: accuracy (acc), top_1_accuracy, top_5_accuracy (topk), precision, recall, F1 (f1),
/// confusion_matrix, mae, mse, loss, perplexity.
HS_API std::vector<std::string> metric_names();

/// Options of classification metrics.
struct ClassOptions {
  /// Several classes may be correct at once: `output` and `target` are [N, C], the target holds zeros and ones, and a
  /// class is predicted where its output is above `threshold`.
  bool multilabel = false;
  double threshold = 0;              ///< 0 for logits; for probabilities 0.5 is meant
  std::int64_t ignore_index = -100;  ///< labels that count nothing
};

namespace detail {
/// Rows of a batch by class, see metrics.cpp.
struct ClassRows;
}  // namespace detail

/// Fraction of samples whose class is the most likely in the output. `output` [N, C] or [N, C, d1, ...]; `target` has
/// class indices ([N] or [N, d1, ...], integers) or probabilities of the output's shape. Among equal outputs the first
/// class is taken; NaN never is. With several labels a sample counts if all its classes are correct.
class HS_API Accuracy : public MetricBase {
 public:
  explicit Accuracy(const ClassOptions& options = {}) : options_(options) {}
  std::string name() const override { return "accuracy"; }
  void clear() override { right_ = total_ = 0; }
  void update(const Tensor& output, const Tensor& target) override;
  MetricValue eval() const override;

 private:
  ClassOptions options_;
  std::int64_t right_ = 0;
  std::int64_t total_ = 0;
};

/// Options of TopK.
struct TopKOptions {
  std::int64_t k = 5;                ///< at least 1
  std::int64_t ignore_index = -100;  ///< labels that count nothing
};
/// Fraction of samples whose class is among the `k` most likely; tensors as for Accuracy. Its name is `top_5_accuracy`.
class HS_API TopK : public MetricBase {
 public:
  explicit TopK(const TopKOptions& options = {});
  std::string name() const override;
  void clear() override { right_ = total_ = 0; }
  void update(const Tensor& output, const Tensor& target) override;
  MetricValue eval() const override;

 private:
  TopKOptions options_;
  std::int64_t right_ = 0;
  std::int64_t total_ = 0;
};

/// How the values of the classes are averaged.
enum class Average : std::uint8_t {
  macro,     ///< their mean, over the classes that occur in targets or predictions
  micro,     ///< from the counts of all classes together
  weighted,  ///< their mean, weighted by how often each class is in the targets
  none,      ///< one value per class, [C]; 0 where undefined
};
/// Options of Precision, Recall and F1.
struct ClassScoreOptions {
  Average average = Average::macro;  ///< MindSpore's default is none
  ClassOptions classes = {};         ///< what is a class
};

/// The common base of Precision, Recall and F1: true positives (hits), false positives (false alarms) and false
/// negatives (misses) by class.
class HS_API ClassScore : public MetricBase {
 public:
  void clear() override;
  void update(const Tensor& output, const Tensor& target) override;
  MetricValue eval() const override;

 protected:
  explicit ClassScore(const ClassScoreOptions& options) : options_(options) {}
  /// The value of one class from its counts.
  virtual double score(double hits, double false_alarms, double misses) const = 0;

 private:
  ClassScoreOptions options_;
  std::vector<std::int64_t> hits_, false_alarms_, misses_;
};
/// The fraction of predictions of a class that are correct: hits / (hits + false alarms), 0 if there are no
/// predictions. Tensors as for Accuracy.
class HS_API Precision : public ClassScore {
 public:
  explicit Precision(const ClassScoreOptions& options = {}) : ClassScore(options) {}
  std::string name() const override { return "precision"; }

 protected:
  double score(double hits, double false_alarms, double misses) const override;
};
/// The fraction of a class's samples that were found: hits / (hits + misses), 0 if there are none.
class HS_API Recall : public ClassScore {
 public:
  explicit Recall(const ClassScoreOptions& options = {}) : ClassScore(options) {}
  std::string name() const override { return "recall"; }

 protected:
  double score(double hits, double false_alarms, double misses) const override;
};
/// The harmonic mean of precision and recall: 2 hits / (2 hits + false alarms + misses).
class HS_API F1 : public ClassScore {
 public:
  explicit F1(const ClassScoreOptions& options = {}) : ClassScore(options) {}
  std::string name() const override { return "F1"; }

 protected:
  double score(double hits, double false_alarms, double misses) const override;
};

/// What the counts of a confusion matrix are divided by.
enum class Normalize : std::uint8_t {
  none,        ///< counts, as i64
  target,      ///< the samples of the row's class: fractions of the targets
  prediction,  ///< the samples of the column's class: fractions of the predictions
  all,         ///< all samples
};
/// Options of ConfusionMatrix.
struct ConfusionMatrixOptions {
  Normalize normalize = Normalize::none;  ///< what becomes of the counts
  std::int64_t ignore_index = -100;       ///< labels that count nothing
};
/// How often a class (row) was predicted as a class (column), [C, C]: i64, or f64 when normalised (0 where nothing is).
/// Tensors as for Accuracy. Samples whose output is all NaN are left out, which is logged.
class HS_API ConfusionMatrix : public MetricBase {
 public:
  explicit ConfusionMatrix(const ConfusionMatrixOptions& options = {}) : options_(options) {}
  std::string name() const override { return "confusion_matrix"; }
  void clear() override;
  void update(const Tensor& output, const Tensor& target) override;
  MetricValue eval() const override;

 private:
  ConfusionMatrixOptions options_;
  std::vector<std::int64_t> counts_;
  std::int64_t classes_ = 0;
};

/// Mean of |output - target| over all elements. Both must have the same shape: [N, 1] against [N] is rejected.
class HS_API MAE : public MetricBase {
 public:
  std::string name() const override { return "mae"; }
  void clear() override { sum_ = 0, count_ = 0; }
  void update(const Tensor& output, const Tensor& target) override;
  MetricValue eval() const override;

 private:
  double sum_ = 0;
  std::int64_t count_ = 0;
};
/// Mean of (output - target)^2 over all elements. Both must have one shape.
class HS_API MSE : public MetricBase {
 public:
  std::string name() const override { return "mse"; }
  void clear() override { sum_ = 0, count_ = 0; }
  void update(const Tensor& output, const Tensor& target) override;
  MetricValue eval() const override;

 private:
  double sum_ = 0;
  std::int64_t count_ = 0;
};

/// The mean loss over the samples: a smaller last batch counts less (in MindSpore as much as the others).
class HS_API Loss : public MetricBase {
 public:
  std::string name() const override { return "loss"; }
  void clear() override { sum_ = 0, samples_ = 0; }
  /// `loss`: a number, the mean over the samples of the batch, of which `target` has one a row.
  void update(const Tensor& loss, const Tensor& target) override;
  /// One that stands for `samples`.
  void update(double loss, std::int64_t samples = 1);
  MetricValue eval() const override;
  bool takes_loss() const override { return true; }

 private:
  double sum_ = 0;
  std::int64_t samples_ = 0;
};

/// Options of Perplexity.
struct PerplexityOptions {
  std::int64_t ignore_index = -100;  ///< labels that count nothing, such as padding
};
/// e to the mean cross entropy between logits [N, C] or [N, C, d1, ...] and class indices [N] or [N, d1, ...].
/// (MindSpore's takes probabilities; logits lose nothing to rounding.)
class HS_API Perplexity : public MetricBase {
 public:
  explicit Perplexity(const PerplexityOptions& options = {}) : options_(options) {}
  std::string name() const override { return "perplexity"; }
  void clear() override { sum_ = 0, count_ = 0; }
  void update(const Tensor& output, const Tensor& target) override;
  MetricValue eval() const override;

 private:
  PerplexityOptions options_;
  double sum_ = 0;
  std::int64_t count_ = 0;
};

}  // namespace halfstep::training
