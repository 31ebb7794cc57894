// SPDX-License-Identifier: Apache-2.0
// Losses of two tensors of one shape: terms and their sum in one pass, slopes in another.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "halfstep/backends/cpu/row_block.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kBlock = 1024;
constexpr std::int64_t kChunk = 1 << 15;  // elements whose terms are summed together, whatever the threads

const PairLossAttributes& pair_attributes(const void* p) { return *static_cast<const PairLossAttributes*>(p); }

template <class C>
C sign_of(C v) {
  return v > 0 ? C(1) : v < 0 ? C(-1) : v;  // NaN stays
}
template <class C>
C log_at_least(C v, C logarithm) {
  return v != v ? v : std::max(logarithm, C(-100));
}
// softplus(-x), without overflow
template <class C>
C negative_softplus(C x) {
  return std::log1p(std::exp(-std::abs(x))) + (x != x ? x : std::max(-x, C(0)));
}
template <class C>
C sigmoid_of_negative(C x) {
  const C e = std::exp(-std::abs(x));
  return (x > 0 ? e : C(1)) / (1 + e);
}

// `term(x, y, pos_weight)`, and the slopes of a term in x and y.
template <class C, class F>
void with_loss(const PairLossAttributes& a, F&& f) {
  const C p = static_cast<C>(a.parameter);
  switch (a.kind) {
    case HALFSTEP_LOSS_MSE:
      return f([](C x, C y, C) { return (x - y) * (x - y); }, [](C x, C y, C) { return 2 * (x - y); },
               [](C x, C y, C) { return 2 * (y - x); });
    case HALFSTEP_LOSS_L1:
      return f([](C x, C y, C) { return std::abs(x - y); }, [](C x, C y, C) { return sign_of(x - y); },
               [](C x, C y, C) { return sign_of(y - x); });
    case HALFSTEP_LOSS_SMOOTH_L1: {
      const auto slope = [p](C d) { return std::abs(d) < p ? d / p : sign_of(d); };
      return f(
          [p](C x, C y, C) {
            const C d = std::abs(x - y);
            return d < p ? C(0.5) * d * d / p : d - C(0.5) * p;
          },
          [slope](C x, C y, C) { return slope(x - y); }, [slope](C x, C y, C) { return slope(y - x); });
    }
    case HALFSTEP_LOSS_HUBER: {
      const auto slope = [p](C d) { return std::abs(d) <= p ? d : p * sign_of(d); };
      return f(
          [p](C x, C y, C) {
            const C d = std::abs(x - y);
            return d <= p ? C(0.5) * d * d : p * (d - C(0.5) * p);
          },
          [slope](C x, C y, C) { return slope(x - y); }, [slope](C x, C y, C) { return slope(y - x); });
    }
    case HALFSTEP_LOSS_KL_DIV:
      if (p != 0) {
        return f([](C x, C y, C) { return std::exp(y) * (y - x); }, [](C, C y, C) { return -std::exp(y); },
                 [](C x, C y, C) { return std::exp(y) * (y - x + 1); });
      }
      return f([](C x, C y, C) { return (y == 0 ? C(0) : y * std::log(y)) - y * x; }, [](C, C y, C) { return -y; },
               [](C x, C y, C) { return std::log(y) + 1 - x; });
    case HALFSTEP_LOSS_BCE_WITH_LOGITS:
      return f([](C x, C y, C w) { return (1 - y) * x + (1 + (w - 1) * y) * negative_softplus(x); },
               // 1 - sigmoid(-x) would leave nothing of the slope of a confident negative.
               [](C x, C y, C w) { return (1 - y) * sigmoid_of_negative(-x) - w * y * sigmoid_of_negative(x); },
               [](C x, C, C w) { return w == 1 ? -x : (w - 1) * negative_softplus(x) - x; });
    case HALFSTEP_LOSS_BCE:
      return f(
          [](C x, C y, C) { return -(y * log_at_least(x, std::log(x)) + (1 - y) * log_at_least(x, std::log1p(-x))); },
          [](C x, C y, C) { return (x - y) / std::max((1 - x) * x, static_cast<C>(1e-12f)); },
          [](C x, C, C) { return log_at_least(x, std::log1p(-x)) - log_at_least(x, std::log(x)); });
  }
}

// Blocks of the operands, with ones where a weight is absent.
template <class C>
struct Operands {
  alignas(64) C x[kBlock], y[kBlock], weight[kBlock], pos_weight[kBlock];
  bool weighted;
  explicit Operands(const TensorView* in) : weighted(in[2].defined) {
    std::fill_n(weight, kBlock, C(1));
    std::fill_n(pos_weight, kBlock, C(1));
  }
  void load(const TensorView* in, std::int64_t at, std::int64_t n) {
    read_row(in[0], at, 1, n, x);
    read_row(in[1], at, 1, n, y);
    if (in[2].defined) read_row(in[2], at, 1, n, weight);
    if (in[3].defined) read_row(in[3], at, 1, n, pos_weight);
  }
};

template <class C>
bool forward(KernelContext* context, const TensorView* in, TensorView* out, const PairLossAttributes& a) {
  const std::int64_t n = in[0].numel, chunks = (n + kChunk - 1) / kChunk;
  auto* totals = static_cast<double*>(
      context->workspace(context, static_cast<std::size_t>(std::max<std::int64_t>(chunks, 1)) * sizeof(double)));
  if (!totals) return false;
  const bool probabilities = a.kind == HALFSTEP_LOSS_BCE;
  std::atomic<bool> outside{false};
  with_loss<C>(a, [&](const auto& term, const auto&, const auto&) {
    parallel_for(chunks, 1, [&](std::int64_t begin, std::int64_t end) {
      Operands<C> o(in);
      for (std::int64_t k = begin; k < end; ++k) {
        totals[k] = 0;
        for (std::int64_t at = k * kChunk; at < std::min(n, (k + 1) * kChunk); at += kBlock) {
          const std::int64_t count = std::min(kBlock, std::min(n, (k + 1) * kChunk) - at);
          o.load(in, at, count);
          if (probabilities) {
            for (std::int64_t i = 0; i < count; ++i) {
              if (o.x[i] < 0 || o.x[i] > 1) outside = true;
            }
          }
          if (a.reduction == 0) {
            for (std::int64_t i = 0; i < count; ++i) {
              o.x[i] = o.weight[i] * term(o.x[i], o.y[i], o.pos_weight[i]);
            }
            write_row(out[0], at, 1, count, o.x);
          } else if (o.weighted) {
            totals[k] += sum_terms<C>(
                count, [&](std::int64_t i) { return o.weight[i] * term(o.x[i], o.y[i], o.pos_weight[i]); });
          } else {
            totals[k] += sum_terms<C>(count, [&](std::int64_t i) { return term(o.x[i], o.y[i], o.pos_weight[i]); });
          }
        }
      }
    });
  });
  if (outside) {
    context->set_error(context, "expected probabilities from 0 to 1; for logits use binary_cross_entropy_with_logits");
    return false;
  }
  if (a.reduction != 0) {
    double total = 0;
    for (std::int64_t k = 0; k < chunks; ++k) total += totals[k];
    total /= a.divisor;
    write_row(out[0], 0, 1, 1, &total);
  }
  return true;
}

template <class C>
void backward(const TensorView* in, TensorView* out, const PairLossAttributes& a) {
  const TensorView& g = in[0];
  const std::int64_t n = in[1].numel;
  C scale = 1;
  if (a.reduction != 0) {
    read_row(g, 0, 1, 1, &scale);
    scale = static_cast<C>(static_cast<double>(scale) / a.divisor);
  }
  with_loss<C>(a, [&](const auto&, const auto& slope_x, const auto& slope_y) {
    parallel_for(n, kChunk, [&](std::int64_t begin, std::int64_t end) {
      Operands<C> o(in + 1);
      alignas(64) C gs[kBlock], d[kBlock];
      std::fill_n(gs, kBlock, scale);
      for (std::int64_t at = begin; at < end; at += kBlock) {
        const std::int64_t count = std::min(kBlock, end - at);
        o.load(in + 1, at, count);
        if (a.reduction == 0) read_row(g, at, 1, count, gs);
        const auto write = [&](TensorView& to, const auto& slope) {
          for (std::int64_t i = 0; i < count; ++i) {
            d[i] = gs[i] * (o.weight[i] * slope(o.x[i], o.y[i], o.pos_weight[i]));
          }
          write_row(to, at, 1, count, d);
        };
        if (a.want_input) write(out[0], slope_x);
        if (a.want_target) write(out[1], slope_y);
      }
    });
  });
}

Status forward_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = pair_attributes(p);
  const bool ok =
      in[0].dtype == DType::f64 ? forward<double>(context, in, out, a) : forward<float>(context, in, out, a);
  return ok ? Status::ok : Status::failed;
}
Status backward_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = pair_attributes(p);
  if (in[1].dtype == DType::f64) {
    backward<double>(in, out, a);
  } else {
    backward<float>(in, out, a);
  }
  return Status::ok;
}

const RegisterCpuKernel registered[] = {
    {"mse_loss", kFloatingDTypes, forward_kernel},
    {"l1_loss", kFloatingDTypes, forward_kernel},
    {"smooth_l1_loss", kFloatingDTypes, forward_kernel},
    {"huber_loss", kFloatingDTypes, forward_kernel},
    {"kl_div", kFloatingDTypes, forward_kernel},
    {"binary_cross_entropy_with_logits", kFloatingDTypes, forward_kernel},
    {"binary_cross_entropy", kFloatingDTypes, forward_kernel},
    {"pair_loss_backward", kFloatingDTypes, backward_kernel},
};

}  // namespace
}  // namespace halfstep::cpu
