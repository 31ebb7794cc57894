// SPDX-License-Identifier: Apache-2.0
// Optimizer steps over all parameters of a group in one pass: the gradient is unscaled and the parameter, its master
// weight and its 16-bit copy are read and written once.
#include <algorithm>
#include <bit>
#include <cmath>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/optimizer_rules.h"
#include "halfstep/core/philox.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Elements of a piece of work for one thread, and of a block that is worked on in the first-level cache.
constexpr std::int64_t kOptimizerChunk = 16384;
constexpr std::int64_t kOptimizerBlock = 1024;
constexpr int kMaxStates = 3;

struct Piece {
  std::int32_t parameter;
  std::int64_t start;
};

// Rounds up or down with probabilities that make the mean right: the bits that are cut decide.
void store_stochastic(DType dtype, void* data, std::int64_t at, std::int64_t n, const float* from, PhiloxState state,
                      std::uint64_t first_block) {
  PhiloxBlock block{};
  std::uint64_t have = ~std::uint64_t{0};
  for (std::int64_t i = 0; i < n; ++i) {
    const auto index = static_cast<std::uint64_t>(at + i);
    if (index / 4 != have) {
      have = index / 4;
      block = philox_block(state, first_block + have);
    }
    const std::uint32_t random = block[index % 4];
    const auto u = std::bit_cast<std::uint32_t>(from[i]);
    if (dtype == DType::bf16) {
      const bool finite = (u & 0x7f800000u) != 0x7f800000u;
      const std::uint32_t bits = finite ? (u + (random & 0xffffu)) >> 16 : (u >> 16 | ((u & 0x7fffffu) ? 0x40u : 0u));
      static_cast<BFloat16*>(data)[at + i].bits = static_cast<std::uint16_t>(bits);
      continue;
    }
    // f16: the two neighbours of the value, and how far it lies between them.
    Half low = convert<Half>(from[i]);
    if (std::abs(convert<float>(low)) > std::abs(from[i])) --low.bits;  // toward zero
    const float below = convert<float>(low);
    if (below != from[i] && std::isfinite(from[i]) && std::isfinite(below)) {
      Half high = low;
      ++high.bits;
      const float step = convert<float>(high) - below;
      const float part = (from[i] - below) / step;
      if (static_cast<float>(random >> 8) * 0x1p-24f < part) low = high;
    }
    static_cast<Half*>(data)[at + i] = low;
  }
}

// Adds the update and what earlier roundings cut off; what this one cuts off is kept for the next.
void store_kahan(DType dtype, void* data, void* compensation, std::int64_t at, std::int64_t n, const float* before,
                 const float* after) {
  float lost[kOptimizerBlock] = {}, total[kOptimizerBlock] = {}, written[kOptimizerBlock] = {};
  load_floats(dtype, compensation, at, n, lost);
  for (std::int64_t i = 0; i < n; ++i) total[i] = before[i] + ((after[i] - before[i]) + lost[i]);
  store_floats(dtype, data, at, n, total);
  load_floats(dtype, data, at, n, written);
  for (std::int64_t i = 0; i < n; ++i) lost[i] = ((after[i] - before[i]) + lost[i]) - (written[i] - before[i]);
  store_floats(dtype, compensation, at, n, lost);
}

// What one parameter is updated from and to, as the kernel's views.
struct Slot {
  const TensorView &gradient, &parameter, &master, &compensation, &copy, &unscaled;
  TensorView* states;
  int num_states;
};

// in: hyper (f64: lr, stochastic or not), random state (i64: seed, offset; may be absent), unless (may be absent),
// scale of the gradients (f32; may be absent), gradients (each may be absent). out: steps, then for each parameter:
// itself, master, compensation, copy, unscaled gradient (absent without scale; may be the gradient itself), states.
constexpr int kFirstGradient = 4, kFixedOutputs = 5;

Slot slot_of(const TensorView* in, TensorView* out, int i, int width) {
  TensorView* own = out + 1 + i * width;
  return {in[kFirstGradient + i], own[0], own[1], own[2], own[3], own[4], own + kFixedOutputs, width - kFixedOutputs};
}

struct Random {
  bool on;
  PhiloxState state;
};

// Elements [start, stop) of a parameter. `inverse` of the scale is 0 where there is none; without `step` the gradients
// are unscaled and nothing else is done, so that they are the same after a step that was skipped.
template <class Rule>
void update_chunk(const Slot& slot, const Rule& rule, std::int64_t start, std::int64_t stop, double inverse, bool step,
                  const Random& random, std::uint64_t first_block) {
  const auto& [gradient, parameter, master, compensation, copy, unscaled, states, num_states] = slot;
  const TensorView& source = inverse != 0 ? unscaled : gradient;
  const bool wide = parameter.dtype == DType::f64;
  double wide_gradients[kOptimizerBlock];
  float values[kOptimizerBlock], before[kOptimizerBlock], gradients[kOptimizerBlock];
  for (std::int64_t at = start; at < stop; at += kOptimizerBlock) {
    const std::int64_t n = std::min(kOptimizerBlock, stop - at);
    if (inverse != 0) {
      unscale_block(gradient.dtype, element(gradient.dtype, static_cast<const void*>(gradient.data), at),
                    element(unscaled.dtype, unscaled.data, at), n, inverse, false);
    }
    if (!step) continue;
    const void* from = element(source.dtype, static_cast<const void*>(source.data), at);
    if (wide) {
      double* state[kMaxStates] = {};
      for (int s = 0; s < num_states; ++s) state[s] = static_cast<double*>(states[s].data) + at;
      const auto* g = static_cast<const double*>(from);
      if (source.dtype != DType::f64) {
        load_floats(source.dtype, from, n, gradients);
        std::copy(gradients, gradients + n, wide_gradients);
        g = wide_gradients;
      }
      rule.run(static_cast<double*>(parameter.data) + at, g, state, n, {});
      continue;
    }
    float* state[kMaxStates] = {};
    for (int s = 0; s < num_states; ++s) state[s] = static_cast<float*>(states[s].data) + at;
    const auto* g = static_cast<const float*>(from);
    if (source.dtype == DType::f64) {
      const auto* doubles = static_cast<const double*>(from);
      for (std::int64_t j = 0; j < n; ++j) gradients[j] = static_cast<float>(doubles[j]);
      g = gradients;
    } else if (source.dtype != DType::f32) {
      load_floats(source.dtype, from, n, gradients);
      g = gradients;
    }
    float* p = values;
    if (master.defined) {
      p = static_cast<float*>(master.data) + at;
    } else if (parameter.dtype == DType::f32) {
      p = static_cast<float*>(parameter.data) + at;
    } else {
      load_floats(parameter.dtype, parameter.data, at, n, values);
      if (compensation.defined) std::copy(values, values + n, before);
    }
    // The rounding to nearest of a float32 weight is written with it.
    RoundedCopy rounded;
    if (copy.defined) {
      rounded = {element(copy.dtype, copy.data, at), copy.dtype};
    } else if (master.defined) {
      rounded = {element(parameter.dtype, parameter.data, at), parameter.dtype};
    }
    rule.run(p, g, state, n, rounded);
    if (parameter.dtype != DType::f32 && (!master.defined || copy.defined)) {
      if (compensation.defined) {
        store_kahan(parameter.dtype, parameter.data, compensation.data, at, n, before, p);
      } else if (random.on && !master.defined) {
        store_stochastic(parameter.dtype, parameter.data, at, n, p, random.state, first_block);
      } else {
        store_floats(parameter.dtype, parameter.data, at, n, p);
      }
    }
  }
}

// `rule_at(lr, step)` is the optimizer's formula at a step.
template <class RuleAt>
Status optimizer_step(KernelContext* context, const TensorView* in, int n, TensorView* out, int m,
                      const RuleAt& rule_at) {
  const bool dry = runs_dry(context);
  const bool step = dry || !in[2].defined || *static_cast<const float*>(in[2].data) == 0;
  const double inverse = in[3].defined && !dry ? 1.0 / static_cast<double>(*static_cast<const float*>(in[3].data)) : 0;
  const int count = n - kFirstGradient;
  if (count == 0 || (!step && inverse == 0)) return Status::ok;
  const auto* hyper = static_cast<const double*>(in[0].data);
  Random random{.on = !dry && hyper[1] != 0 && in[1].defined, .state = {}};
  if (random.on) {
    const auto* words = static_cast<const std::int64_t*>(in[1].data);
    random.state = {static_cast<std::uint64_t>(words[0]), static_cast<std::uint64_t>(words[1])};
  }
  const int width = (m - 1) / count;
  auto* steps = static_cast<std::int64_t*>(out[0].data);
  std::int64_t chunks = 0;
  for (int i = 0; i < count; ++i) {
    const TensorView& gradient = in[kFirstGradient + i];
    if (gradient.defined) chunks += (gradient.numel + kOptimizerChunk - 1) / kOptimizerChunk;
  }
  auto* pieces = static_cast<Piece*>(context->workspace(context, static_cast<std::size_t>(chunks) * sizeof(Piece)));
  auto* first =
      static_cast<std::uint64_t*>(context->workspace(context, static_cast<std::size_t>(count) * sizeof(std::uint64_t)));
  if (!pieces || !first) return Status::failed;
  if (dry) return Status::ok;
  std::int64_t c = 0;
  std::uint64_t blocks = 0;
  for (int i = 0; i < count; ++i) {
    const TensorView& gradient = in[kFirstGradient + i];
    if (!gradient.defined) continue;
    if (step) ++steps[i];
    first[i] = blocks;
    blocks += static_cast<std::uint64_t>(gradient.numel + 3) / 4;
    for (std::int64_t at = 0; at < gradient.numel; at += kOptimizerChunk) pieces[c++] = {i, at};
  }
  // Each thread takes its share of every parameter: matrix products divide their rows among the threads in the same
  // way, so that a weight mostly stays in the caches of one core.
  const auto place = [&](const Piece& p) {
    return static_cast<double>(p.start) / static_cast<double>(in[kFirstGradient + p.parameter].numel);
  };
  // A total order: std::sort needs no memory, a stable one would.
  std::sort(pieces, pieces + chunks, [&](const Piece& a, const Piece& b) {
    const double x = place(a), y = place(b);
    return x != y ? x < y : a.parameter != b.parameter ? a.parameter < b.parameter : a.start < b.start;
  });
  parallel_jobs(chunks, detail::num_ranges(chunks, 2), [&](std::int64_t k, std::int64_t) {
    const int i = pieces[k].parameter;
    const Slot slot = slot_of(in, out, i, width);
    const std::int64_t stop = std::min(slot.gradient.numel, pieces[k].start + kOptimizerChunk);
    update_chunk(slot, rule_at(hyper[0], steps[i]), pieces[k].start, stop, inverse, step, random, first[i]);
  });
  return Status::ok;
}

struct Sgd : SgdRule {
  void run(float* p, const float* g, float* const* states, std::int64_t n, RoundedCopy copy) const {
    sgd_block(*this, p, g, states, n, copy);
  }
  void run(double* p, const double* g, double* const* states, std::int64_t n, RoundedCopy) const {
    sgd_block(*this, p, g, states, n);
  }
};
struct Adam : AdamRule {
  void run(float* p, const float* g, float* const* states, std::int64_t n, RoundedCopy copy) const {
    adam_block(*this, p, g, states, n, copy);
  }
  void run(double* p, const double* g, double* const* states, std::int64_t n, RoundedCopy) const {
    adam_block(*this, p, g, states, n);
  }
};

Status sgd_step(KernelContext* context, const TensorView* in, int n, TensorView* out, int m, const void* attributes) {
  const auto& a = *static_cast<const SgdAttributes*>(attributes);
  return optimizer_step(context, in, n, out, m, [&](double lr, std::int64_t step) {
    return Sgd{{.lr = lr,
                .momentum = a.momentum,
                .weight_decay = a.weight_decay,
                .rate = step == 1 ? 1 : 1 - a.dampening,
                .kept = step == 1 ? 0 : a.momentum,
                .sign = a.maximize ? -1.0 : 1.0,
                .nesterov = a.nesterov != 0}};
  });
}

Status adam_step(KernelContext* context, const TensorView* in, int n, TensorView* out, int m, const void* attributes) {
  const auto& a = *static_cast<const AdamAttributes*>(attributes);
  return optimizer_step(context, in, n, out, m, [&](double lr, std::int64_t step) {
    return Adam{{.beta1 = a.beta1,
                 .beta2 = a.beta2,
                 .eps = a.eps,
                 .step_size = lr / (1 - std::pow(a.beta1, static_cast<double>(step))),
                 .root = 1 / std::sqrt(1 - std::pow(a.beta2, static_cast<double>(step))),
                 .shrink = a.decoupled ? 1 - lr * a.weight_decay : 1,
                 .decay = a.decoupled ? 0 : a.weight_decay,
                 .sign = a.maximize ? -1.0 : 1.0,
                 .amsgrad = a.amsgrad != 0}};
  });
}

const RegisterCpuKernel optimizer_kernels[] = {
    {"sgd_step", {DType::f32, DType::f64}, sgd_step, kRunsDry},
    {"adam_step", {DType::f32, DType::f64}, adam_step, kRunsDry},
};

}  // namespace
}  // namespace halfstep::cpu
