// SPDX-License-Identifier: Apache-2.0
// Losses over classes: cross_entropy and nll_loss on class indices, forward and backward.
//
// With q[c] the weight that a sample gives class c (its own class's, and with label smoothing a share of each), a
// sample's loss is sum_c q[c] * (logsumexp(x) - x[c]) for cross_entropy and -sum_c q[c] * x[c] for nll_loss.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>

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
  DimGroup places;

  Samples(const TensorView& t, const TensorView* w, const ClassLossAttributes& attributes, std::int64_t n)
      : target(t), weight(w && w->defined ? w : nullptr), a(attributes), classes(n) {
    for (int i = t.ndim - 1; i >= 0; --i) places.push_outer(t.sizes[i], t.strides[i]);
  }
  std::int64_t label(std::int64_t sample) const {
    const std::int64_t at = places.offset(sample);
    switch (target.dtype) {
      case DType::i64:
        return static_cast<const std::int64_t*>(target.data)[at];
      case DType::i32:
        return static_cast<const std::int32_t*>(target.data)[at];
      default:
        return static_cast<const std::uint8_t*>(target.data)[at];
    }
  }
  C class_weight(std::int64_t c) const {
    return weight ? static_cast<const C*>(weight->data)[c * weight->strides[0]] : C(1);
  }
  C own(std::int64_t label) const { return static_cast<C>(1 - a.label_smoothing) * class_weight(label); }
  C share(std::int64_t c) const {
    return static_cast<C>(a.label_smoothing / static_cast<double>(classes)) * class_weight(c);
  }
  bool smooth() const { return a.label_smoothing != 0; }
  // sum of q
  C mass(std::int64_t label) const {
    double total = static_cast<double>(own(label));
    if (smooth()) {
      for (std::int64_t c = 0; c < classes; ++c) total += static_cast<double>(share(c));
    }
    return static_cast<C>(total);
  }
};

const ClassLossAttributes& class_attributes(const void* p) { return *static_cast<const ClassLossAttributes*>(p); }

// Short rows that lie behind each other are taken together: their exponentials are one run of vectors.
constexpr std::int64_t kShort = 64;
template <class C>
struct Pack {
  static constexpr std::int64_t kRows = kLossRow / kShort;
  alignas(64) C e[kLossRow];
  static bool fits(const TensorView& x) { return x.contiguous && x.ndim == 2 && x.sizes[1] <= kShort; }
  /// Reads rows [first, first + rows) and finds the largest value of each, NaN where there is one.
  void load(const TensorView& x, std::int64_t first, std::int64_t rows, C* tops) {
    const std::int64_t n = x.sizes[1];
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
  parallel_for(count, row_grain(n * 4), [&](std::int64_t begin, std::int64_t end) {
    if (!kNll && Pack<C>::fits(x) && !samples.smooth()) {
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
      double smoothed = 0;  // sum of share(c) * x[c]
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
        losses[i] = static_cast<double>(samples.own(label)) *
                    (std::log(sum) - (static_cast<double>(own) - static_cast<double>(top)));
        if (samples.smooth()) {
          for (std::int64_t b = 0; b < n; b += kLossRow) {
            const std::int64_t size = std::min(kLossRow, n - b);
            if (n > kLossRow) load(b, size);
            for (std::int64_t c = 0; c < size; ++c) {
              smoothed += static_cast<double>(samples.share(b + c)) *
                          (std::log(sum) - (static_cast<double>(row[c]) - static_cast<double>(top)));
            }
          }
          losses[i] += smoothed;
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
    double total = 0;
    for (std::int64_t i = 0; i < count; ++i) total += losses[i];
    if (a.reduction == 1) {
      divisor = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t label = samples.label(i);
        if (label != a.ignore_index) divisor += static_cast<double>(samples.class_weight(label));
      }
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
  parallel_for(count, row_grain(n * 4), [&](std::int64_t begin, std::int64_t end) {
    if (!kNll && Pack<C>::fits(x) && !samples.smooth()) {
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
          C grad;
          read_row(g, g.ndim == 0 ? 0 : g_places.offset(i), 1, 1, &grad);
          const C own = grad / divisor * samples.own(label), factor = own / parts[count + i];
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
        read_row(g, g.ndim == 0 ? 0 : g_places.offset(i), 1, 1, &grad);
        grad /= divisor;
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
