// SPDX-License-Identifier: Apache-2.0
// Losses of two tensors of one shape: terms and their sum in one pass, slopes in another.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <type_traits>
#include <utility>

#include "halfstep/backends/cpu/bce_block.h"
#include "halfstep/backends/cpu/huber_block.h"
#include "halfstep/backends/cpu/row_block.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kPairLossBlock = 1024;
constexpr std::int64_t kPairLossChunk = 1 << 15;  // elements whose terms are summed together, whatever the threads

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

// A loss: the term of input x, target y and positive weight w, and the term's slopes in x and in y.
template <class C>
struct Mse {
  explicit Mse(const PairLossAttributes&) {}
  C term(C x, C y, C) const { return (x - y) * (x - y); }
  C slope_x(C x, C y, C) const { return 2 * (x - y); }
  C slope_y(C x, C y, C) const { return 2 * (y - x); }
};
template <class C>
struct L1 {
  explicit L1(const PairLossAttributes&) {}
  C term(C x, C y, C) const { return std::abs(x - y); }
  C slope_x(C x, C y, C) const { return sign_of(x - y); }
  C slope_y(C x, C y, C) const { return sign_of(y - x); }
};
// Blocks of terms and slopes in vectors.
template <class C, HuberPart kTerms, HuberPart kSlopes>
struct HuberLike {
  C parameter;
  explicit HuberLike(const PairLossAttributes& a) : parameter(static_cast<C>(a.parameter)) {}
  void terms(const C* x, const C* y, const C*, std::int64_t n, C* to) const {
    huber_block(kTerms, x, y, parameter, n, to);
  }
  void slopes_x(const C* x, const C* y, const C*, std::int64_t n, C* to) const {
    huber_block(kSlopes, x, y, parameter, n, to);
  }
  void slopes_y(const C* x, const C* y, const C*, std::int64_t n, C* to) const {
    huber_block(kSlopes, y, x, parameter, n, to);
  }
};
template <class C>
using SmoothL1 = HuberLike<C, HuberPart::smooth_l1_terms, HuberPart::smooth_l1_slopes>;
template <class C>
using Huber = HuberLike<C, HuberPart::huber_terms, HuberPart::huber_slopes>;
template <class C>
struct KlDiv {
  explicit KlDiv(const PairLossAttributes&) {}
  C term(C x, C y, C) const { return (y == 0 ? C(0) : y * std::log(y)) - y * x; }
  C slope_x(C, C y, C) const { return -y; }
  C slope_y(C x, C y, C) const { return std::log(y) + 1 - x; }
};
// Of a target that is a logarithm.
template <class C>
struct KlDivLog {
  explicit KlDivLog(const PairLossAttributes&) {}
  C term(C x, C y, C) const { return std::exp(y) * (y - x); }
  C slope_x(C, C y, C) const { return -std::exp(y); }
  C slope_y(C x, C y, C) const { return std::exp(y) * (y - x + 1); }
};
template <class C>
struct BceWithLogits {
  explicit BceWithLogits(const PairLossAttributes&) {}
  C term(C x, C y, C w) const { return (1 - y) * x + (1 + (w - 1) * y) * negative_softplus(x); }
  // 1 - sigmoid(-x) would leave nothing of the slope of a confident negative.
  C slope_x(C x, C y, C w) const { return (1 - y) * sigmoid_of_negative(-x) - w * y * sigmoid_of_negative(x); }
  C slope_y(C x, C, C w) const { return w == 1 ? -x : (w - 1) * negative_softplus(x) - x; }
};
// What blocks of terms and slopes are computed by where that is done in vectors.
template <>
struct BceWithLogits<float> {
  explicit BceWithLogits(const PairLossAttributes&) {}
  float slope_y(float x, float, float w) const { return w == 1 ? -x : (w - 1) * negative_softplus(x) - x; }
  static constexpr auto terms = bce_with_logits_terms;
  static constexpr auto slopes_x = bce_with_logits_slopes;
};
template <class C>
struct BceSlopes {
  C slope_x(C x, C y, C) const { return (x - y) / std::max((1 - x) * x, static_cast<C>(1e-12f)); }
  C slope_y(C x, C, C) const { return log_at_least(x, std::log1p(-x)) - log_at_least(x, std::log(x)); }
};
template <class C>
struct Bce : BceSlopes<C> {
  explicit Bce(const PairLossAttributes&) {}
  C term(C x, C y, C) const { return -(y * log_at_least(x, std::log(x)) + (1 - y) * log_at_least(x, std::log1p(-x))); }
};
template <>
struct Bce<float> : BceSlopes<float> {
  explicit Bce(const PairLossAttributes&) {}
  static constexpr auto terms = bce_terms;
};
// Whether a loss is of probabilities.
template <template <class> class Loss>
constexpr bool kOfProbabilities = std::is_same_v<Loss<float>, Bce<float>>;

// terms[i] and slopes[i] of a block.
template <class Loss, class C>
void terms_of(const Loss& loss, const C* x, const C* y, const C* w, std::int64_t n, C* terms) {
  if constexpr (requires { loss.terms(x, y, w, n, terms); }) {
    loss.terms(x, y, w, n, terms);
  } else {
    for (std::int64_t i = 0; i < n; ++i) terms[i] = loss.term(x[i], y[i], w[i]);
  }
}
template <class Loss, class C>
void slopes_of(const Loss& loss, const C* x, const C* y, const C* w, std::int64_t n, C* slopes) {
  if constexpr (requires { loss.slopes_x(x, y, w, n, slopes); }) {
    loss.slopes_x(x, y, w, n, slopes);
  } else {
    for (std::int64_t i = 0; i < n; ++i) slopes[i] = loss.slope_x(x[i], y[i], w[i]);
  }
}
template <class Loss, class C>
void target_slopes_of(const Loss& loss, const C* x, const C* y, const C* w, std::int64_t n, C* slopes) {
  if constexpr (requires { loss.slopes_y(x, y, w, n, slopes); }) {
    loss.slopes_y(x, y, w, n, slopes);
  } else {
    for (std::int64_t i = 0; i < n; ++i) slopes[i] = loss.slope_y(x[i], y[i], w[i]);
  }
}

// Blocks of the operands, with ones where a weight is absent.
template <class C>
struct Operands {
  alignas(64) C x[kPairLossBlock], y[kPairLossBlock], weight[kPairLossBlock], pos_weight[kPairLossBlock];
  bool weighted;
  explicit Operands(const TensorView* in) : weighted(in[2].defined) {
    std::fill_n(weight, kPairLossBlock, C(1));
    std::fill_n(pos_weight, kPairLossBlock, C(1));
  }
  void load(const TensorView* in, std::int64_t at, std::int64_t n) {
    read_row(in[0], at, 1, n, x);
    read_row(in[1], at, 1, n, y);
    if (in[2].defined) read_row(in[2], at, 1, n, weight);
    if (in[3].defined) read_row(in[3], at, 1, n, pos_weight);
  }
};

template <template <class> class Loss, class C>
bool forward(KernelContext* context, const TensorView* in, TensorView* out, const PairLossAttributes& a) {
  const std::int64_t n = in[0].numel, chunks = (n + kPairLossChunk - 1) / kPairLossChunk;
  auto* totals = static_cast<double*>(
      context->workspace(context, static_cast<std::size_t>(std::max<std::int64_t>(chunks, 1)) * sizeof(double)));
  if (!totals) return false;
  if (runs_dry(context)) return true;
  std::atomic<bool> outside{false};
  parallel_for(chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    const Loss<C> loss(a);
    Operands<C> o(in);
    for (std::int64_t k = begin; k < end; ++k) {
      totals[k] = 0;
      for (std::int64_t at = k * kPairLossChunk; at < std::min(n, (k + 1) * kPairLossChunk); at += kPairLossBlock) {
        const std::int64_t count = std::min(kPairLossBlock, std::min(n, (k + 1) * kPairLossChunk) - at);
        o.load(in, at, count);
        if constexpr (kOfProbabilities<Loss>) {
          int wrong = 0;
          for (std::int64_t i = 0; i < count; ++i) wrong |= (o.x[i] < 0) | (o.x[i] > 1);
          if (wrong) outside = true;
        }
        terms_of(loss, o.x, o.y, o.pos_weight, count, o.x);
        if (o.weighted) {
          for (std::int64_t i = 0; i < count; ++i) o.x[i] *= o.weight[i];
        }
        if (a.reduction == 0) {
          write_row(out[0], at, 1, count, o.x);
        } else {
          totals[k] += sum_of(o.x, count);
        }
      }
    }
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

template <template <class> class Loss, class C>
void backward(const TensorView* in, TensorView* out, const PairLossAttributes& a) {
  const TensorView& g = in[0];
  const std::int64_t n = in[1].numel;
  C scale = 1;
  if (a.reduction != 0) {
    read_row(g, 0, 1, 1, &scale);
    scale = static_cast<C>(static_cast<double>(scale) / a.divisor);
  }
  parallel_for(n, kPairLossChunk, [&](std::int64_t begin, std::int64_t end) {
    const Loss<C> loss(a);
    Operands<C> o(in + 1);
    alignas(64) C gs[kPairLossBlock], d[kPairLossBlock];
    std::fill_n(gs, kPairLossBlock, scale);
    for (std::int64_t at = begin; at < end; at += kPairLossBlock) {
      const std::int64_t count = std::min(kPairLossBlock, end - at);
      o.load(in + 1, at, count);
      if (a.reduction == 0) read_row(g, at, 1, count, gs);
      if (a.want_input) {
        slopes_of(loss, o.x, o.y, o.pos_weight, count, d);
        for (std::int64_t i = 0; i < count; ++i) d[i] = gs[i] * (o.weight[i] * d[i]);
        write_row(out[0], at, 1, count, d);
      }
      if (a.want_target) {
        target_slopes_of(loss, o.x, o.y, o.pos_weight, count, d);
        for (std::int64_t i = 0; i < count; ++i) d[i] = gs[i] * (o.weight[i] * d[i]);
        write_row(out[1], at, 1, count, d);
      }
    }
  });
}

template <template <class> class Loss>
bool forward_of(KernelContext* context, const TensorView* in, TensorView* out, const PairLossAttributes& a) {
  return in[0].dtype == DType::f64 ? forward<Loss, double>(context, in, out, a)
                                   : forward<Loss, float>(context, in, out, a);
}
template <template <class> class Loss>
void backward_of(const TensorView* in, TensorView* out, const PairLossAttributes& a) {
  if (in[1].dtype == DType::f64) {
    backward<Loss, double>(in, out, a);
  } else {
    backward<Loss, float>(in, out, a);
  }
}
bool kl_div_forward(KernelContext* context, const TensorView* in, TensorView* out, const PairLossAttributes& a) {
  return (a.parameter != 0 ? forward_of<KlDivLog> : forward_of<KlDiv>)(context, in, out, a);
}
void kl_div_backward(const TensorView* in, TensorView* out, const PairLossAttributes& a) {
  (a.parameter != 0 ? backward_of<KlDivLog> : backward_of<KlDiv>)(in, out, a);
}

// All losses: the op and how its attributes call it, with which the one op of all gradients finds it.
struct LossOp {
  const char* name;
  std::int32_t kind;
  decltype(&kl_div_forward) forward;
  decltype(&kl_div_backward) backward;
};
constexpr LossOp kLosses[] = {
    {"mse_loss", HALFSTEP_LOSS_MSE, forward_of<Mse>, backward_of<Mse>},
    {"l1_loss", HALFSTEP_LOSS_L1, forward_of<L1>, backward_of<L1>},
    {"smooth_l1_loss", HALFSTEP_LOSS_SMOOTH_L1, forward_of<SmoothL1>, backward_of<SmoothL1>},
    {"huber_loss", HALFSTEP_LOSS_HUBER, forward_of<Huber>, backward_of<Huber>},
    {"kl_div", HALFSTEP_LOSS_KL_DIV, kl_div_forward, kl_div_backward},
    {"binary_cross_entropy_with_logits", HALFSTEP_LOSS_BCE_WITH_LOGITS, forward_of<BceWithLogits>,
     backward_of<BceWithLogits>},
    {"binary_cross_entropy", HALFSTEP_LOSS_BCE, forward_of<Bce>, backward_of<Bce>},
};

template <std::size_t i>
Status pair_loss_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  return kLosses[i].forward(context, in, out, pair_attributes(p)) ? Status::ok : Status::failed;
}
Status pair_loss_backward_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* p) {
  const PairLossAttributes& a = pair_attributes(p);
  for (const LossOp& loss : kLosses) {
    if (loss.kind != a.kind) continue;
    loss.backward(in, out, a);
    return Status::ok;
  }
  return Status::unsupported;
}

template <std::size_t... I>
bool register_losses(std::index_sequence<I...>) {
  (RegisterCpuKernel(kLosses[I].name, kFloatingDTypes, pair_loss_kernel<I>, kRunsDry), ...);
  return true;
}
const bool pair_loss_kernels = register_losses(std::make_index_sequence<std::size(kLosses)>());
const RegisterCpuKernel pair_loss_backward_kernels{"pair_loss_backward", kFloatingDTypes, pair_loss_backward_kernel};

}  // namespace
}  // namespace halfstep::cpu
