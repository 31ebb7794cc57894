// SPDX-License-Identifier: Apache-2.0
// Optimizer steps over all parameters of a group. Each formula is computed in float64 and what it changes is rounded
// once, to float32 or float64.
//
// Inputs: hyper (f64: learning rate, stochastic rounding or not), random state (may be absent), a flag that forbids the
// step (may be absent), the gradients' scale (may be absent), the gradients (each may be absent). Outputs: the step
// counters, then for each parameter: itself, its float32 master weight, its compensation, its 16-bit copy, its unscaled
// gradient (all four may be absent), the state's tensors. Everything of one parameter is dense and lies alike.
#include <algorithm>

#include "gradients.h"

namespace sim {
namespace {

constexpr std::size_t kFirstGradient = 4, kFixedOutputs = 5;
constexpr std::size_t kMaxStates = 3;
constexpr int64_t kBlock = 1024;

void read_doubles(const View& from, int64_t at, int64_t n, double* to) {
  with_floating(from.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* x = from.at<T>(at);
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<double>(load(x[i]));
  });
}
/// Rounds to the view's dtype.
void write(const View& to, int64_t at, int64_t n, const double* from) {
  with_floating(to.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* y = to.at<T>(at);
    for (int64_t i = 0; i < n; ++i) y[i] = convert<T>(from[i]);
  });
}

void unscale_block(const View& from, const View& to, int64_t at, int64_t n, double inverse) {
  with_floating(from.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* x = from.at<T>(at);
    auto* y = to.at<Unscaled<T>>(at);
    for (int64_t i = 0; i < n; ++i) y[i] = unscale(x[i], inverse);
  });
}

struct Sgd {
  double lr, momentum, weight_decay, dampening, sign;
  bool nesterov, first;
  Sgd(const halfstep_sgd_attributes& a, double rate, int64_t step)
      : lr(rate),
        momentum(a.momentum),
        weight_decay(a.weight_decay),
        dampening(a.dampening),
        sign(a.maximize ? -1 : 1),
        nesterov(a.nesterov != 0),
        first(step == 1) {}
  void run(double* p, const double* g, double (*states)[kBlock], int64_t n) const {
    double* buffer = states[0];
    for (int64_t i = 0; i < n; ++i) {
      // A term whose factor is 0 isn't there: 0 times an infinite weight would be NaN.
      double d = sign * g[i];
      if (weight_decay != 0) d += weight_decay * p[i];
      if (momentum != 0) {
        // The buffer begins as the first gradient.
        buffer[i] = first ? d : momentum * buffer[i] + (1 - dampening) * d;
        d = nesterov ? d + momentum * buffer[i] : buffer[i];
      }
      p[i] -= lr * d;
    }
  }
};

struct Adam {
  double beta1, beta2, eps, step_size, root, shrink, decay, sign;
  bool amsgrad;
  Adam(const halfstep_adam_attributes& a, double lr, int64_t step)
      : beta1(a.beta1),
        beta2(a.beta2),
        eps(a.eps),
        step_size(lr / (1 - std::pow(a.beta1, static_cast<double>(step)))),
        root(1 / std::sqrt(1 - std::pow(a.beta2, static_cast<double>(step)))),
        shrink(a.decoupled ? 1 - lr * a.weight_decay : 1),
        decay(a.decoupled ? 0 : a.weight_decay),
        sign(a.maximize ? -1 : 1),
        amsgrad(a.amsgrad != 0) {}
  void run(double* p, const double* g, double (*states)[kBlock], int64_t n) const {
    double *m = states[0], *v = states[1], *top = states[2];
    for (int64_t i = 0; i < n; ++i) {
      const double value = p[i] * shrink, gradient = decay != 0 ? sign * g[i] + decay * value : sign * g[i];
      m[i] = beta1 * m[i] + (1 - beta1) * gradient;
      v[i] = beta2 * v[i] + (1 - beta2) * gradient * gradient;
      double second = v[i];
      if (amsgrad) second = top[i] = second < top[i] ? top[i] : second;  // a NaN of v comes through
      p[i] = value - step_size * m[i] / (std::sqrt(second) * root + eps);
    }
  }
};

template <class Rule, class Attributes>
std::string optimizer_step(const Call& call) {
  const bool step = !call.in[2].defined || *call.in[2].at<float>() == 0;
  const double inverse = call.in[3].defined ? 1.0 / static_cast<double>(*call.in[3].at<float>()) : 0;
  const std::size_t count = call.in.size() - kFirstGradient;
  if (count == 0 || (!step && inverse == 0)) return {};
  const double lr = *call.in[0].at<double>();
  const std::size_t width = (call.out.size() - 1) / count;
  auto* steps = call.out[0].at<int64_t>();
  double values[kBlock], gradients[kBlock], states[kMaxStates][kBlock];
  for (std::size_t k = 0; k < count; ++k) {
    const View& gradient = call.in[kFirstGradient + k];
    if (!gradient.defined) continue;
    const View* own = &call.out[1 + k * width];
    const View &parameter = own[0], &master = own[1], &copy = own[3], &unscaled = own[4];
    const View& weight = master.defined ? master : parameter;  // what is updated
    if (step) ++steps[k];
    const Rule rule(call.attributes<Attributes>(), lr, steps[k]);
    for (int64_t at = 0; at < gradient.numel; at += kBlock) {
      const int64_t n = std::min(kBlock, gradient.numel - at);
      if (inverse != 0) unscale_block(gradient, unscaled, at, n, inverse);
      if (!step) continue;
      read_doubles(inverse != 0 ? unscaled : gradient, at, n, gradients);
      read_doubles(weight, at, n, values);
      for (std::size_t s = kFixedOutputs; s < width; ++s) read_doubles(own[s], at, n, states[s - kFixedOutputs]);
      rule.run(values, gradients, states, n);
      for (std::size_t s = kFixedOutputs; s < width; ++s) write(own[s], at, n, states[s - kFixedOutputs]);
      write(weight, at, n, values);
      if (weight.dtype == HALFSTEP_F32 && (master.defined || copy.defined)) {
        // Copies are roundings of the float32 weight, not of what it was rounded from.
        read_doubles(weight, at, n, values);
      }
      if (master.defined) write(parameter, at, n, values);
      if (copy.defined) write(copy, at, n, values);
    }
  }
  return {};
}

const char* refuses(const Call& call) {
  if (call.in[1].defined) return "stochastic rounding is not done on this device";
  const std::size_t count = call.in.size() - kFirstGradient;
  const std::size_t width = count == 0 ? 0 : (call.out.size() - 1) / count;
  for (std::size_t k = 0; k < count; ++k) {
    if (call.out[1 + k * width + 2].defined) return "compensated weights are not updated on this device";
  }
  return nullptr;
}

constexpr uint32_t kAsked = dtypes({HALFSTEP_F32, HALFSTEP_F64});
constexpr KernelDef kSgd{.op = "sgd_step",
                         .dtypes = kAsked,
                         .layouts = HALFSTEP_LAYOUT_STRIDED,
                         .attribute_bytes = sizeof(halfstep_sgd_attributes),
                         .run = optimizer_step<Sgd, halfstep_sgd_attributes>,
                         .refuses = refuses};
constexpr KernelDef kAdam{.op = "adam_step",
                          .dtypes = kAsked,
                          .layouts = HALFSTEP_LAYOUT_STRIDED,
                          .attribute_bytes = sizeof(halfstep_adam_attributes),
                          .run = optimizer_step<Adam, halfstep_adam_attributes>,
                          .refuses = refuses};

}  // namespace

std::span<const Kernel> optimizer_kernels() {
  static constexpr Kernel kKernels[] = {kernel<kSgd>, kernel<kAdam>};
  return kKernels;
}

}  // namespace sim
