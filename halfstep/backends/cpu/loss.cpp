// SPDX-License-Identifier: Apache-2.0
// Losses over classes: cross_entropy and nll_loss on class indices, forward and backward.
//
// With q[c] the weight that a sample gives class c (its own class's, and with label smoothing a share of each), a
// sample's loss is sum_c q[c] * (logsumexp(x) - x[c]) for cross_entropy and -sum_c q[c] * x[c] for nll_loss.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <limits>
#include <type_traits>

#include "halfstep/backends/cpu/exp_block.h"
#include "halfstep/backends/cpu/row_block.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kLossRow = 4096;  // longer rows are read block by block

// Input 0 of the forward pass is [N, C, ...], the target [N, ...].
template <class C>
struct Samples {
  const TensorView& target;
  const TensorView* weight;  // null: all ones
  const ClassLossAttributes& a;
  std::int64_t classes;
  C share_of_each = 0;    // before its weight
  double all_shares = 0;  // their sum, weighted
  DimGroup places;

  Samples(const TensorView& t, const TensorView* w, const ClassLossAttributes& attributes, std::int64_t n)
      : target(t), weight(w && w->defined ? w : nullptr), a(attributes), classes(n) {
    for (int i = t.ndim - 1; i >= 0; --i) places.push_outer(t.sizes[i], t.strides[i]);
    if (!smooth()) return;
    share_of_each = static_cast<C>(a.label_smoothing / static_cast<double>(classes));
    for (std::int64_t c = 0; c < classes; ++c) all_shares += static_cast<double>(share(c));
  }
  // f(the first label) with the labels' type.
  template <class F>
  auto visit_labels(F&& f) const {
    switch (target.dtype) {
      case DType::i64:
        return f(static_cast<const std::int64_t*>(target.data));
      case DType::i32:
        return f(static_cast<const std::int32_t*>(target.data));
      default:
        return f(static_cast<const std::uint8_t*>(target.data));
    }
  }
  std::int64_t label(std::int64_t sample) const {
    const std::int64_t at = places.contiguous() ? sample : places.offset(sample);
    return visit_labels([at](const auto* p) -> std::int64_t { return p[at]; });
  }
  void read_labels(std::int64_t first, std::int64_t n, std::int64_t* to) const {
    const bool straight = places.contiguous();
    visit_labels([&](const auto* p) {
      for (std::int64_t i = 0; i < n; ++i) to[i] = p[straight ? first + i : places.offset(first + i)];
    });
  }
  // The sum of the weights of `count` samples' classes.
  double total_weight(std::int64_t count) const {
    return visit_labels([&](const auto* p) {
      if (!weight && places.contiguous()) {
        const std::int64_t none = a.ignore_index;
        std::int64_t ignored = 0;
        for (std::int64_t i = 0; i < count; ++i) ignored += p[i] == none ? 1 : 0;
        return static_cast<double>(count - ignored);
      }
      return sum_terms<double>(count, [&](std::int64_t i) {
        const std::int64_t label = p[places.offset(i)];
        return label != a.ignore_index ? static_cast<double>(class_weight(label)) : 0.0;
      });
    });
  }
  C class_weight(std::int64_t c) const {
    return weight ? static_cast<const C*>(weight->data)[c * weight->strides[0]] : C(1);
  }
  C own(std::int64_t label) const { return static_cast<C>(1 - a.label_smoothing) * class_weight(label); }
  C share(std::int64_t c) const { return share_of_each * class_weight(c); }
  bool smooth() const { return a.label_smoothing != 0; }
  // sum of q
  C mass(std::int64_t label) const { return static_cast<C>(static_cast<double>(own(label)) + all_shares); }
  // sum of share(first + c) * (zero - x[c]) for c < n
  double smoothed(const C* x, std::int64_t first, std::int64_t n, double zero) const {
    if (!weight) {
      const double sum = sum_terms<double>(n, [&](std::int64_t c) { return zero - static_cast<double>(x[c]); });
      return static_cast<double>(share_of_each) * sum;
    }
    return sum_terms<double>(
        n, [&](std::int64_t c) { return static_cast<double>(share(first + c)) * (zero - static_cast<double>(x[c])); });
  }
};

const ClassLossAttributes& class_attributes(const void* p) { return *static_cast<const ClassLossAttributes*>(p); }

// Short rows that lie behind each other are taken together: their exponentials are one run of vectors.
constexpr std::int64_t kShort = 64;
template <class C>
struct Pack {
  static constexpr std::int64_t kRows = kLossRow / kShort;
  alignas(64) C e[kLossRow];
  static bool fits(const RowPlan& x) {
    return x.stride == 1 && x.length <= kShort && x.rows.n <= 1 && x.rows.inner_stride() == x.length;
  }
  /// Reads rows [first, first + rows) and finds the largest value of each, NaN where there is one.
  void load(const TensorView& x, std::int64_t first, std::int64_t rows, C* tops) {
    const std::int64_t n = x.sizes[1];  // the classes
    read_row(x, first * n, 1, rows * n, e);
    for (std::int64_t r = 0; r < rows; ++r) {
      C top = -std::numeric_limits<C>::infinity();
      for (const C* v = e + r * n; v < e + (r + 1) * n; ++v) top = *v > top || *v != *v ? *v : top;
      tops[r] = top;
    }
  }
  /// exp(x - tops[r]) of what was read.
  void exponentials(std::int64_t rows, std::int64_t n, const C* tops) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < n; ++c) e[r * n + c] -= tops[r];
    }
    exp_sum(e, rows * n, C(0), e);
  }
};

// Logits of one class whose places lie side by side, as those of images do, are taken together: blocks of columns, read
// class by class.
constexpr std::int64_t kClassColumns = 256;
template <class C>
bool places_side_by_side(const RowPlan& plan) {
  return std::is_same_v<C, float> && plan.rows.inner_stride() == 1 && plan.rows.inner_size() >= 16;
}
// f(first sample, samples) for all blocks, in parallel.
template <class F>
void for_columns_of_classes(const RowPlan& plan, F&& f) {
  const std::int64_t inner = plan.rows.inner_size(), blocks = (inner + kClassColumns - 1) / kClassColumns;
  parallel_for(plan.rows.numel / inner * blocks, row_grain(plan.length * std::min(inner, kClassColumns) * 4),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t b = begin; b < end; ++b) {
                   const std::int64_t column = b % blocks * kClassColumns;
                   f(b / blocks * inner + column, std::min(kClassColumns, inner - column));
                 }
               });
}
// A class's logits in float32, in `buffer` where they aren't in memory.
const float* class_row(const TensorView& x, std::int64_t at, std::int64_t n, float* buffer) {
  if (x.dtype == DType::f32) return static_cast<const float*>(x.data) + at;
  read_row(x, at, 1, n, buffer);
  return buffer;
}

// Of samples [first, first + count): the largest logits, the sums of the exponentials above them less the 1 of these,
// and with label smoothing what the shares of all classes add to the losses, less the logarithm's part.
struct ClassColumns {
  alignas(64) float top[kClassColumns];
  double others[kClassColumns], below[kClassColumns];

  ClassColumns(const TensorView& x, const RowPlan& plan, const Samples<float>& samples, std::int64_t first,
               std::int64_t count) {
    constexpr std::int64_t kTerms = 64;  // that are added up in float32
    const std::int64_t at = plan.rows.offset(first), n = plan.length;
    alignas(64) float buffer[kClassColumns], part[kClassColumns], lost[kClassColumns], shares[kClassColumns];
    std::fill_n(top, count, -std::numeric_limits<float>::infinity());
    for (std::int64_t c = 0; c < n; ++c) {
      const float* row = class_row(x, at + c * plan.stride, count, buffer);
      // A NaN need not stay: its exponential is one too.
      for (std::int64_t j = 0; j < count; ++j) top[j] = row[j] > top[j] ? row[j] : top[j];
    }
    std::fill_n(others, count, -1.0);
    std::fill_n(below, count, 0.0);
    for (std::int64_t block = 0; block < n; block += kTerms) {
      for (float* zeros : {part, lost, shares}) std::fill_n(zeros, count, 0.0f);
      for (std::int64_t c = block; c < std::min(n, block + kTerms); ++c) {
        const float* row = class_row(x, at + c * plan.stride, count, buffer);
        exp_add(row, top, count, part, lost);
        if (!samples.smooth()) continue;
        const float share = samples.share(c);
        for (std::int64_t j = 0; j < count; ++j) shares[j] += share * (top[j] - row[j]);
      }
      for (std::int64_t j = 0; j < count; ++j)
        others[j] = others[j] + static_cast<double>(part[j]) + static_cast<double>(lost[j]);
      for (std::int64_t j = 0; j < count; ++j) below[j] += static_cast<double>(shares[j]);
    }
  }
};
// The logits of `count` samples' classes; 0 for a label below 0.
void read_own_logits(const TensorView& x, std::int64_t at, std::int64_t stride, const std::int64_t* labels,
                     std::int64_t count, float* to) {
  visit_floating(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* data = static_cast<const T*>(x.data) + at;
    for (std::int64_t j = 0; j < count; ++j) to[j] = labels[j] < 0 ? 0 : convert<float>(data[labels[j] * stride + j]);
  });
}

template <class C>
void store_scalar(TensorView& out, C value) {
  write_row(out, 0, 1, 1, &value);
}

// Outputs: the loss; for cross_entropy [2, N, ...] with each sample's largest logit and the sum of exponentials above
// it (their logsumexp in one number would lose the digits that large logits need); the number that the mean divided by.
template <class C, bool kNll>
Status forward(KernelContext* context, const TensorView* in, TensorView* out, const ClassLossAttributes& a) {
  const TensorView& x = in[0];
  const RowPlan plan(x, 1);
  const std::int64_t count = plan.rows.numel, n = plan.length;
  auto* losses = static_cast<double*>(
      context->workspace(context, static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(double)));
  if (!losses) return Status::failed;
  if (runs_dry(context)) return Status::ok;
  const Samples<C> samples(in[1], &in[2], a, plan.length);
  TensorView& divisor_out = out[kNll ? 1 : 2];
  C* parts = kNll ? nullptr : static_cast<C*>(out[1].data);
  std::atomic<std::int64_t> wrong{INT64_MAX};
  // Whether sample i counts; labels that are no class are noted.
  const auto counts = [&](std::int64_t i, std::int64_t label) {
    losses[i] = 0;
    if (label == a.ignore_index) return false;
    if (label >= 0 && label < n) return true;
    std::int64_t first = wrong.load();
    while (i < first && !wrong.compare_exchange_weak(first, i)) {
    }
    return false;
  };
  const bool columns = !kNll && places_side_by_side<C>(plan);
  if constexpr (!kNll && std::is_same_v<C, float>) {
    if (columns)
      for_columns_of_classes(plan, [&](std::int64_t first, std::int64_t size) {
        const ClassColumns block(x, plan, samples, first, size);
        std::int64_t labels[kClassColumns];
        float own[kClassColumns], weights[kClassColumns], log_sum[kClassColumns];
        samples.read_labels(first, size, labels);
        std::copy_n(block.top, size, parts + first);
        // Of a sample that the network is sure of, the sum is 1 and the little that the loss is made of.
        for (std::int64_t j = 0; j < size; ++j) {
          parts[count + first + j] = static_cast<float>(block.others[j] + 1);
          log_sum[j] = static_cast<float>(block.others[j]);
        }
        log1p_each(log_sum, size, log_sum);
        for (std::int64_t j = 0; j < size; ++j) {
          const std::int64_t label = labels[j];
          const bool plain = label != a.ignore_index && label >= 0 && label < n;
          weights[j] = plain ? samples.own(label) : 0;
          labels[j] = plain || counts(first + j, label) ? label : -1;
        }
        read_own_logits(x, plan.rows.offset(first), plan.stride, labels, size, own);
        double* to = losses + first;
        for (std::int64_t j = 0; j < size; ++j) {
          const double above = static_cast<double>(own[j]) - static_cast<double>(block.top[j]);
          to[j] = static_cast<double>(weights[j]) * (static_cast<double>(log_sum[j]) - above);
        }
        if (samples.smooth()) {
          for (std::int64_t j = 0; j < size; ++j) {
            to[j] += samples.all_shares * static_cast<double>(log_sum[j]) + block.below[j];
          }
        }
        for (std::int64_t j = 0; j < size; ++j) {
          if (labels[j] < 0) to[j] = 0;
        }
      });
  }
  parallel_for(columns ? 0 : count, row_grain(n * 4), [&](std::int64_t begin, std::int64_t end) {
    if (!kNll && Pack<C>::fits(plan) && !samples.smooth()) {
      Pack<C> pack;
      for (std::int64_t p = begin; p < end; p += Pack<C>::kRows) {
        const std::int64_t rows = std::min(Pack<C>::kRows, end - p);
        pack.load(x, p, rows, parts + p);
        pack.exponentials(rows, n, parts + p);
        for (std::int64_t r = 0; r < rows; ++r) {
          const std::int64_t i = p + r, label = samples.label(i);
          double sum = 0;
          for (std::int64_t c = 0; c < n; ++c) sum += static_cast<double>(pack.e[r * n + c]);
          parts[count + i] = static_cast<C>(sum);
          if (!counts(i, label)) continue;
          C own;
          read_row(x, i * n + label, 1, 1, &own);
          losses[i] = static_cast<double>(samples.own(label)) *
                      (std::log(sum) - (static_cast<double>(own) - static_cast<double>(parts[i])));
        }
      }
      return;
    }
    alignas(64) C row[kLossRow];
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t label = samples.label(i), at = plan.rows.offset(i);
      if (parts) parts[i] = parts[count + i] = 0;
      if (!counts(i, label)) continue;
      const auto load = [&](std::int64_t from, std::int64_t size) {
        read_row(x, at + from * plan.stride, plan.stride, size, row);
      };
      C own;
      read_row(x, at + label * plan.stride, 1, 1, &own);
      if (!kNll) {
        C top = -std::numeric_limits<C>::infinity();
        for (std::int64_t b = 0; b < n; b += kLossRow) {
          const std::int64_t size = std::min(kLossRow, n - b);
          load(b, size);
          const C t = max_of(row, size);
          top = t > top || t != t ? t : top;
          if (top != top) break;
        }
        double sum = 0;
        for (std::int64_t b = 0; b < n; b += kLossRow) {
          const std::int64_t size = std::min(kLossRow, n - b);
          if (n > kLossRow) load(b, size);
          sum += exp_sum(row, size, top, nullptr);
        }
        parts[i] = top;
        parts[count + i] = static_cast<C>(sum);
        const double zero = std::log(sum) + static_cast<double>(top);
        losses[i] = static_cast<double>(samples.own(label)) *
                    (std::log(sum) - (static_cast<double>(own) - static_cast<double>(top)));
        if (samples.smooth()) {
          for (std::int64_t b = 0; b < n; b += kLossRow) {
            const std::int64_t size = std::min(kLossRow, n - b);
            if (n > kLossRow) load(b, size);
            losses[i] += samples.smoothed(row, b, size, zero);
          }
        }
      } else {
        losses[i] = -static_cast<double>(samples.own(label)) * static_cast<double>(own);
      }
    }
  });
  if (const std::int64_t i = wrong.load(); i != INT64_MAX) {
    char text[200];
    std::snprintf(text, sizeof text,
                  "expected class indices from 0 to %lld (or the ignore_index %lld), got %lld for "
                  "sample %lld of %lld",
                  static_cast<long long>(n - 1), static_cast<long long>(a.ignore_index),
                  static_cast<long long>(samples.label(i)), static_cast<long long>(i), static_cast<long long>(count));
    context->set_error(context, text);
    return Status::failed;
  }
  double divisor = 1;
  if (a.reduction == 0) {
    visit_floating(out[0].dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (std::int64_t i = 0; i < count; ++i) static_cast<T*>(out[0].data)[i] = convert<T>(losses[i]);
    });
  } else {
    double total = sum_of(losses, count);
    if (a.reduction == 1) {
      divisor = samples.total_weight(count);
      total /= divisor;  // NaN when all samples are ignored, as in PyTorch
    }
    store_scalar(out[0], total);
  }
  store_scalar(divisor_out, divisor);
  return Status::ok;
}

// Inputs: gradient (one number, or one a sample), x, target, weight, divisor, maxima and sums (cross_entropy only).
template <class C, bool kNll>
Status backward(const TensorView* in, TensorView* out, const ClassLossAttributes& a) {
  const TensorView &g = in[0], &x = in[1];
  const RowPlan to(out[0], 1);
  const std::int64_t n = to.length, count = to.rows.numel;
  const RowPlan from(x, 1);
  const Samples<C> samples(in[2], &in[3], a, n);
  DimGroup g_places;
  for (int i = g.ndim - 1; i >= 0; --i) g_places.push_outer(g.sizes[i], g.strides[i]);
  C divisor;
  read_row(in[4], 0, 1, 1, &divisor);
  const C* parts = kNll ? nullptr : static_cast<const C*>(in[5].data);
  C whole = 0;  // the gradient, where it is one for all
  if (g.ndim == 0) read_row(g, 0, 1, 1, &whole);
  const auto gradient_of = [&](std::int64_t i) {
    C grad = whole;
    if (g.ndim != 0) read_row(g, g_places.offset(i), 1, 1, &grad);
    return grad / divisor;
  };
  const bool columns = !kNll && places_side_by_side<C>(from) && places_side_by_side<C>(to) &&
                       from.rows.inner_size() == to.rows.inner_size() && n < INT32_MAX;
  if constexpr (!kNll && std::is_same_v<C, float>) {
    if (columns)
      for_columns_of_classes(to, [&](std::int64_t first, std::int64_t size) {
        alignas(64) C buffer[kClassColumns], factor[kClassColumns], own[kClassColumns], grads[kClassColumns];
        std::int64_t all_labels[kClassColumns];
        std::int32_t labels[kClassColumns];  // -1: ignored
        samples.read_labels(first, size, all_labels);
        for (std::int64_t j = 0; j < size; ++j) {
          const std::int64_t label = all_labels[j];
          const bool plain = label != a.ignore_index && label >= 0 && label < n;
          labels[j] = plain ? static_cast<std::int32_t>(label) : -1;
          own[j] = plain ? samples.own(label) : C(0);
        }
        if (g.ndim == 0) {
          std::fill_n(grads, size, gradient_of(first));
        } else {
          for (std::int64_t j = 0; j < size; ++j) grads[j] = gradient_of(first + j);
        }
        const C* sums = parts + count + first;
        for (std::int64_t j = 0; j < size; ++j) {
          const C mass = static_cast<C>(static_cast<double>(own[j]) + samples.all_shares);
          factor[j] = grads[j] * mass / sums[j];
          own[j] *= grads[j];
        }
        const std::int64_t in_at = from.rows.offset(first), out_at = to.rows.offset(first);
        for (std::int64_t c = 0; c < n; ++c) {
          const float* row = class_row(x, in_at + c * from.stride, size, buffer);
          const bool direct = out[0].dtype == DType::f32;
          C* y = direct ? static_cast<C*>(out[0].data) + out_at + c * to.stride : buffer;
          class_gradient(row, size,
                         {.shifts = parts + first,
                          .factors = factor,
                          .own = own,
                          .labels = labels,
                          .number = static_cast<std::int32_t>(c),
                          .grads = samples.smooth() ? grads : nullptr,
                          .share = samples.share(c)},
                         y);
          if (!direct) write_row(out[0], out_at + c * to.stride, 1, size, buffer);
        }
      });
  }
  parallel_for(columns ? 0 : count, row_grain(n * 4), [&](std::int64_t begin, std::int64_t end) {
    if (!kNll && Pack<C>::fits(from) && Pack<C>::fits(to) && !samples.smooth()) {
      Pack<C> pack;
      for (std::int64_t p = begin; p < end; p += Pack<C>::kRows) {
        const std::int64_t rows = std::min(Pack<C>::kRows, end - p);
        read_row(x, p * n, 1, rows * n, pack.e);
        pack.exponentials(rows, n, parts + p);
        for (std::int64_t r = 0; r < rows; ++r) {
          const std::int64_t i = p + r, label = samples.label(i);
          C* row = pack.e + r * n;
          if (label == a.ignore_index) {
            std::fill_n(row, n, C(0));
            continue;
          }
          const C own = gradient_of(i) * samples.own(label), factor = own / parts[count + i];
          for (std::int64_t c = 0; c < n; ++c) row[c] *= factor;
          row[label] -= own;
        }
        write_row(out[0], p * n, 1, rows * n, pack.e);
      }
      return;
    }
    alignas(64) C row[kLossRow];
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t label = samples.label(i), out_at = to.rows.offset(i);
      const bool ignored = label == a.ignore_index;
      C grad = 0, factor = 0;
      if (!ignored) {
        grad = gradient_of(i);
        if (!kNll) factor = grad * samples.mass(label) / parts[count + i];
      }
      for (std::int64_t b = 0; b < n; b += kLossRow) {
        const std::int64_t size = std::min(kLossRow, n - b);
        if (ignored || kNll) {
          std::fill_n(row, size, C(0));
        } else {
          read_row(x, from.rows.offset(i) + b * from.stride, from.stride, size, row);
          exp_sum(row, size, parts[i], row);
          for (std::int64_t c = 0; c < size; ++c) row[c] *= factor;
        }
        if (!ignored) {
          if (samples.smooth()) {
            for (std::int64_t c = 0; c < size; ++c) row[c] -= grad * samples.share(b + c);
          }
          if (label >= b && label < b + size) row[label - b] -= grad * samples.own(label);
        }
        write_row(out[0], out_at + b * to.stride, to.stride, size, row);
      }
    }
  });
  return Status::ok;
}

// q itself, [N, classes, ...]. Inputs: target, weight.
template <class C>
Status targets(const TensorView* in, TensorView* out, const ClassLossAttributes& a) {
  const RowPlan to(out[0], 1);
  const Samples<C> samples(in[0], &in[1], a, to.length);
  for (std::int64_t i = 0; i < to.rows.numel; ++i) {
    const std::int64_t label = samples.label(i);
    C* row = static_cast<C*>(out[0].data) + to.rows.offset(i);
    for (std::int64_t c = 0; c < to.length; ++c) {
      const bool counts = label != a.ignore_index;
      row[c * to.stride] = !counts ? C(0) : samples.share(c) + (c == label ? samples.own(label) : C(0));
    }
  }
  return Status::ok;
}

template <bool kNll>
Status forward_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = class_attributes(p);
  return in[0].dtype == DType::f64 ? forward<double, kNll>(context, in, out, a)
                                   : forward<float, kNll>(context, in, out, a);
}
template <bool kNll>
Status backward_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = class_attributes(p);
  return in[1].dtype == DType::f64 ? backward<double, kNll>(in, out, a) : backward<float, kNll>(in, out, a);
}
Status targets_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = class_attributes(p);
  return out[0].dtype == DType::f64 ? targets<double>(in, out, a) : targets<float>(in, out, a);
}

const RegisterCpuKernel loss_kernels[] = {
    {"cross_entropy", kFloatingDTypes, forward_kernel<false>, kRunsDry},
    {"cross_entropy_backward", kFloatingDTypes, backward_kernel<false>},
    {"nll_loss", kFloatingDTypes, forward_kernel<true>, kRunsDry},
    {"nll_loss_backward", kFloatingDTypes, backward_kernel<true>},
    {"cross_entropy_targets", {DType::f32, DType::f64}, targets_kernel},
};

}  // namespace
}  // namespace halfstep::cpu
