// SPDX-License-Identifier: Apache-2.0
// Optimizer steps over all parameters of a group in one pass: the parameter, its master weight and its 16-bit copy are
// read and written once.
#include <algorithm>
#include <bit>
#include <cmath>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/core/philox.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Elements of a piece of work for one thread, and of a block that is worked on in the first-level cache.
constexpr std::int64_t kChunk = 16384;
constexpr std::int64_t kBlock = 1024;
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
  float lost[kBlock] = {}, total[kBlock] = {}, written[kBlock] = {};
  load_floats(dtype, compensation, at, n, lost);
  for (std::int64_t i = 0; i < n; ++i) total[i] = before[i] + ((after[i] - before[i]) + lost[i]);
  store_floats(dtype, data, at, n, total);
  load_floats(dtype, data, at, n, written);
  for (std::int64_t i = 0; i < n; ++i) lost[i] = ((after[i] - before[i]) + lost[i]) - (written[i] - before[i]);
  store_floats(dtype, compensation, at, n, lost);
}

// in: hyper (f64: lr, stochastic or not), random state (i64: seed, offset; may be absent), unless (may be absent),
// gradients (each may be absent). out: steps, then for each parameter: itself, master, compensation, copy, states.
// `Rule` is the optimizer's formula for a block.
template <class Rule>
Status optimizer_step(KernelContext* context, const TensorView* in, int n, TensorView* out, int m, const Rule& rule) {
  if (in[2].defined && *static_cast<const float*>(in[2].data) != 0) return Status::ok;
  const auto* hyper = static_cast<const double*>(in[0].data);
  const double lr = hyper[0];
  const bool stochastic = hyper[1] != 0 && in[1].defined;
  PhiloxState random{};
  if (stochastic) {
    const auto* words = static_cast<const std::int64_t*>(in[1].data);
    random = {static_cast<std::uint64_t>(words[0]), static_cast<std::uint64_t>(words[1])};
  }
  const int count = n - 3;
  if (count == 0) return Status::ok;
  const int width = (m - 1) / count;
  const int states = width - 4;
  auto* steps = static_cast<std::int64_t*>(out[0].data);
  std::int64_t chunks = 0;
  for (int i = 0; i < count; ++i) {
    if (in[3 + i].defined) chunks += (in[3 + i].numel + kChunk - 1) / kChunk;
  }
  auto* pieces = static_cast<Piece*>(context->workspace(context, static_cast<std::size_t>(chunks) * sizeof(Piece)));
  auto* first =
      static_cast<std::uint64_t*>(context->workspace(context, static_cast<std::size_t>(count) * sizeof(std::uint64_t)));
  if (!pieces || !first) return Status::failed;
  std::int64_t c = 0;
  std::uint64_t blocks = 0;
  for (int i = 0; i < count; ++i) {
    if (!in[3 + i].defined) continue;
    ++steps[i];
    first[i] = blocks;
    blocks += static_cast<std::uint64_t>(in[3 + i].numel + 3) / 4;
    for (std::int64_t at = 0; at < in[3 + i].numel; at += kChunk) pieces[c++] = {i, at};
  }
  parallel_for(chunks, 2, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const int i = pieces[k].parameter;
      const TensorView& gradient = in[3 + i];
      TensorView* own = out + 1 + i * width;
      const TensorView &parameter = own[0], &master = own[1], &compensation = own[2], &copy = own[3];
      const std::int64_t stop = std::min(gradient.numel, pieces[k].start + kChunk);
      const auto constants = rule.constants(lr, steps[i]);
      if (parameter.dtype == DType::f64) {
        double* state[kMaxStates] = {};
        for (int s = 0; s < states; ++s) state[s] = static_cast<double*>(own[4 + s].data) + pieces[k].start;
        double wide[kBlock];
        for (std::int64_t at = pieces[k].start; at < stop; at += kBlock) {
          const std::int64_t size = std::min(kBlock, stop - at);
          const double* g = static_cast<const double*>(gradient.data) + at;
          if (gradient.dtype != DType::f64) {
            float narrow[kBlock];
            load_floats(gradient.dtype, gradient.data, at, size, narrow);
            for (std::int64_t j = 0; j < size; ++j) wide[j] = static_cast<double>(narrow[j]);
            g = wide;
          }
          rule.template run<double>(constants, static_cast<double*>(parameter.data) + at, g, state, size);
          for (int s = 0; s < states; ++s) state[s] += size;
        }
        continue;
      }
      float* state[kMaxStates] = {};
      for (int s = 0; s < states; ++s) state[s] = static_cast<float*>(own[4 + s].data) + pieces[k].start;
      float values[kBlock], before[kBlock], gradients[kBlock];
      for (std::int64_t at = pieces[k].start; at < stop; at += kBlock) {
        const std::int64_t size = std::min(kBlock, stop - at);
        const float* g = static_cast<const float*>(gradient.data) + at;
        if (gradient.dtype == DType::f64) {
          const double* wide = static_cast<const double*>(gradient.data) + at;
          for (std::int64_t j = 0; j < size; ++j) gradients[j] = static_cast<float>(wide[j]);
          g = gradients;
        } else if (gradient.dtype != DType::f32) {
          load_floats(gradient.dtype, gradient.data, at, size, gradients);
          g = gradients;
        }
        float* p = values;
        if (master.defined) {
          p = static_cast<float*>(master.data) + at;
        } else if (parameter.dtype == DType::f32) {
          p = static_cast<float*>(parameter.data) + at;
        } else {
          load_floats(parameter.dtype, parameter.data, at, size, values);
          if (compensation.defined) std::copy(values, values + size, before);
        }
        rule.template run<float>(constants, p, g, state, size);
        for (int s = 0; s < states; ++s) state[s] += size;
        if (parameter.dtype != DType::f32) {
          if (compensation.defined) {
            store_kahan(parameter.dtype, parameter.data, compensation.data, at, size, before, p);
          } else if (stochastic && !master.defined) {
            store_stochastic(parameter.dtype, parameter.data, at, size, p, random, first[i]);
          } else {
            store_floats(parameter.dtype, parameter.data, at, size, p);
          }
        }
        if (copy.defined) store_floats(copy.dtype, copy.data, at, size, p);
      }
    }
  });
  return Status::ok;
}

struct SgdRule {
  const SgdAttributes& a;
  struct Constants {
    double lr, momentum, rate, weight_decay, sign;
    bool first;
  };
  Constants constants(double lr, std::int64_t step) const {
    return {lr, a.momentum, 1 - a.dampening, a.weight_decay, a.maximize ? -1.0 : 1.0, step == 1};
  }
  template <class T>
  void run(const Constants& k, T* __restrict p, const T* __restrict g, T* const* state, std::int64_t n) const {
    const T lr = static_cast<T>(k.lr), decay = static_cast<T>(k.weight_decay), sign = static_cast<T>(k.sign);
    if (a.momentum == 0) {
      for (std::int64_t i = 0; i < n; ++i) p[i] -= lr * (sign * g[i] + decay * p[i]);
      return;
    }
    const T momentum = static_cast<T>(k.momentum), rate = static_cast<T>(k.first ? 1.0 : k.rate);
    const T kept = k.first ? T(0) : momentum;
    T* __restrict b = state[0];
    if (a.nesterov) {
      for (std::int64_t i = 0; i < n; ++i) {
        const T d = sign * g[i] + decay * p[i];
        b[i] = kept * b[i] + rate * d;
        p[i] -= lr * (d + momentum * b[i]);
      }
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        b[i] = kept * b[i] + rate * (sign * g[i] + decay * p[i]);
        p[i] -= lr * b[i];
      }
    }
  }
};

struct AdamRule {
  const AdamAttributes& a;
  struct Constants {
    double step_size, root_correction, decay, sign;
  };
  Constants constants(double lr, std::int64_t step) const {
    const double c1 = 1 - std::pow(a.beta1, static_cast<double>(step));
    const double c2 = 1 - std::pow(a.beta2, static_cast<double>(step));
    return {lr / c1, std::sqrt(c2), a.decoupled ? 1 - lr * a.weight_decay : a.weight_decay, a.maximize ? -1.0 : 1.0};
  }
  template <class T>
  void run(const Constants& k, T* __restrict p, const T* __restrict g, T* const* state, std::int64_t n) const {
    const T b1 = static_cast<T>(a.beta1), b2 = static_cast<T>(a.beta2), eps = static_cast<T>(a.eps);
    const T r1 = static_cast<T>(1 - a.beta1), r2 = static_cast<T>(1 - a.beta2);
    const T step_size = static_cast<T>(k.step_size), root = static_cast<T>(1 / k.root_correction);
    const T sign = static_cast<T>(k.sign);
    // Without decay both forms are exact: factor 1 and addend 0.
    const T shrink = a.decoupled ? static_cast<T>(k.decay) : T(1);
    const T decay = a.decoupled ? T(0) : static_cast<T>(k.decay);
    T* __restrict m = state[0];
    T* __restrict v = state[1];
    T* __restrict top = state[2];
    const auto one = [&](std::int64_t i, T second) {
      p[i] = p[i] - step_size * m[i] / (std::sqrt(second) * root + eps);
    };
    if (a.amsgrad) {
      for (std::int64_t i = 0; i < n; ++i) {
        p[i] *= shrink;
        const T d = sign * g[i] + decay * p[i];
        m[i] = b1 * m[i] + r1 * d;
        v[i] = b2 * v[i] + r2 * d * d;
        top[i] = std::max(top[i], v[i]);
        one(i, top[i]);
      }
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        p[i] *= shrink;
        const T d = sign * g[i] + decay * p[i];
        m[i] = b1 * m[i] + r1 * d;
        v[i] = b2 * v[i] + r2 * d * d;
        one(i, v[i]);
      }
    }
  }
};

Status sgd_step(KernelContext* context, const TensorView* in, int n, TensorView* out, int m, const void* attributes) {
  return optimizer_step(context, in, n, out, m, SgdRule{*static_cast<const SgdAttributes*>(attributes)});
}
Status adam_step(KernelContext* context, const TensorView* in, int n, TensorView* out, int m, const void* attributes) {
  return optimizer_step(context, in, n, out, m, AdamRule{*static_cast<const AdamAttributes*>(attributes)});
}

const RegisterCpuKernel registered[] = {
    {"sgd_step", {DType::f32, DType::f64}, sgd_step},
    {"adam_step", {DType::f32, DType::f64}, adam_step},
};

}  // namespace
}  // namespace halfstep::cpu
