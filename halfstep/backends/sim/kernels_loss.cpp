// SPDX-License-Identifier: Apache-2.0
// cross_entropy on class indices, forward and backward. All of it is computed in float64 and rounded at the end.
//
// With q[c] the weight that a sample gives class c (its own class's, and with label smoothing a share of each), the
// loss of a sample is the sum over c of q[c] * (logsumexp(x) - x[c]).
#include "walk.h"

namespace sim {
namespace {

/// The scores [N, C, ...] and labels [N, ...] of a call, both contiguous.
class Samples {
 public:
  Samples(const View& scores, const View& labels, const View& weight, const halfstep_class_loss_attributes& a)
      : classes(scores.sizes[1]),
        count(labels.numel),
        scores_(scores),
        labels_(labels),
        weight_(weight),
        smoothing_(a.label_smoothing) {
    for (int d = 2; d < scores.ndim; ++d) step *= scores.sizes[d];
  }
  int64_t classes, count;
  int64_t step = 1;  ///< between the classes of a sample

  /// Where class 0 of a sample is.
  int64_t place(int64_t sample) const { return sample / step * classes * step + sample % step; }
  int64_t label(int64_t sample) const {
    switch (labels_.dtype) {
      case HALFSTEP_I64:
        return *labels_.at<int64_t>(sample);
      case HALFSTEP_I32:
        return *labels_.at<int32_t>(sample);
      default:
        return *labels_.at<uint8_t>(sample);
    }
  }
  void read(int64_t sample, double* row) const {
    with_type(scores_.dtype, [&](auto zero) {
      using T = decltype(zero);
      const T* from = scores_.at<T>(place(sample));
      for (int64_t c = 0; c < classes; ++c) row[c] = static_cast<double>(load(from[c * step]));
    });
  }
  double weight(int64_t c) const {
    if (!weight_.defined) return 1;
    return weight_.dtype == HALFSTEP_F64 ? *weight_.at<double>(c) : static_cast<double>(*weight_.at<float>(c));
  }
  bool smooth() const { return smoothing_ != 0; }
  /// What label smoothing gives a class, and what the label's own gets beside it.
  double share(int64_t c) const { return smoothing_ / static_cast<double>(classes) * weight(c); }
  double own(int64_t label) const { return (1 - smoothing_) * weight(label); }
  /// The sum of q.
  double mass(int64_t label) const {
    double total = own(label);
    for (int64_t c = 0; smooth() && c < classes; ++c) total += share(c);
    return total;
  }

 private:
  const View &scores_, &labels_, &weight_;
  double smoothing_;
};

void store(const View& to, int64_t at, double value) {
  with_type(to.dtype, [&](auto zero) { *to.at<decltype(zero)>(at) = convert<decltype(zero)>(value); });
}
double read(const View& from, int64_t at) {
  return with_type(from.dtype, [&](auto zero) { return static_cast<double>(load(*from.at<decltype(zero)>(at))); });
}

const View kNone = {};

// Inputs: scores, labels, weight. Outputs: the loss; [2, N, ...] with the largest score of each sample and the sum of
// exponentials of the scores less that; the divisor of the mean.
std::string cross_entropy(const Call& call) {
  const auto& a = call.attributes<halfstep_class_loss_attributes>();
  const View &x = call.in[0], &loss = call.out[0], &parts = call.out[1];
  const Samples samples(x, call.in[1], call.in.size() > 2 ? call.in[2] : kNone, a);
  const int64_t n = samples.classes, count = samples.count;
  std::vector<double> row(static_cast<std::size_t>(n));
  double total = 0, divisor = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t label = samples.label(i);
    double value = 0, top = 0, sum = 0;
    if (label != a.ignore_index) {
      if (label < 0 || label >= n) {
        return "expected class indices from 0 to " + std::to_string(n - 1) + " (or the ignore_index " +
               std::to_string(a.ignore_index) + "), got " + std::to_string(label) + " for sample " + std::to_string(i) +
               " of " + std::to_string(count);
      }
      samples.read(i, row.data());
      top = -std::numeric_limits<double>::infinity();
      for (double v : row) top = v > top || v != v ? v : top;
      for (double v : row) sum += std::exp(v - top);
      const double log_sum = std::log(sum);
      value = samples.own(label) * (log_sum - (row[static_cast<std::size_t>(label)] - top));
      for (int64_t c = 0; samples.smooth() && c < n; ++c) {
        value += samples.share(c) * (log_sum - (row[static_cast<std::size_t>(c)] - top));
      }
      divisor += samples.weight(label);
    }
    store(parts, i, top);
    store(parts, count + i, sum);
    if (a.reduction == 0) store(loss, i, value);
    total += value;
  }
  if (a.reduction != 1) divisor = 1;
  // All samples ignored: 0 / 0.
  if (a.reduction != 0) store(loss, 0, total / divisor);
  store(call.out[2], 0, divisor);
  return {};
}

// Inputs: the gradient (a number, or one a sample), scores, labels, weight, divisor, largest scores and sums.
std::string cross_entropy_backward(const Call& call) {
  const auto& a = call.attributes<halfstep_class_loss_attributes>();
  const View &g = call.in[0], &x = call.in[1], &parts = call.in[5], &to = call.out[0];
  const Samples samples(x, call.in[2], call.in[3], a);
  const int64_t n = samples.classes, count = samples.count;
  const double divisor = read(call.in[4], 0);
  std::vector<double> row(static_cast<std::size_t>(n));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t label = samples.label(i), place = samples.place(i);
    if (label == a.ignore_index) {
      for (int64_t c = 0; c < n; ++c) store(to, place + c * samples.step, 0);
      continue;
    }
    const double gradient = read(g, g.ndim == 0 ? 0 : i) / divisor;
    const double top = read(parts, i), factor = gradient * samples.mass(label) / read(parts, count + i);
    samples.read(i, row.data());
    for (int64_t c = 0; c < n; ++c) {
      double v = std::exp(row[static_cast<std::size_t>(c)] - top) * factor;
      if (samples.smooth()) v -= gradient * samples.share(c);
      if (c == label) v -= gradient * samples.own(label);
      store(to, place + c * samples.step, v);
    }
  }
  return {};
}

constexpr KernelDef kCrossEntropy{.op = "cross_entropy",
                                  .dtypes = kFloating,
                                  .layouts = HALFSTEP_LAYOUT_CONTIGUOUS,
                                  .attribute_bytes = sizeof(halfstep_class_loss_attributes),
                                  .run = cross_entropy};
constexpr KernelDef kCrossEntropyBackward{.op = "cross_entropy_backward",
                                          .dtypes = kFloating,
                                          .layouts = HALFSTEP_LAYOUT_CONTIGUOUS,
                                          .attribute_bytes = sizeof(halfstep_class_loss_attributes),
                                          .run = cross_entropy_backward};

}  // namespace

std::span<const Kernel> loss_kernels() {
  static constexpr Kernel kKernels[] = {kernel<kCrossEntropy>, kernel<kCrossEntropyBackward>};
  return kKernels;
}

}  // namespace sim
