// SPDX-License-Identifier: Apache-2.0
// Optimizer steps over all parameters of a group: one small kernel that counts the steps and works out the rates, then
// one pass (in a few launches) that unscales the gradient and reads and writes each parameter, its master weight, its
// 16-bit copy and its states once.
#include "device/chunks.cuh"

namespace hscuda {
namespace {

// ------------------------------------------------------------------------------------------------------------------
// Four elements of a tensor at a time: a block of the random stream, 16 bytes of float32.

constexpr int kFour = 4;
/// Elements of a block of threads: four for each thread, four times.
constexpr int64_t kStepElements = int64_t{kThreads} * kFour * 4;

/// Where four elements are: from `at` on, `n` of them, in whole packs if they are all there.
struct Place {
  int64_t at;
  int n;
  bool whole;
};

/// f32, f16 or bf16 as they lie in memory: they are converted when all loads are under way.
struct Raw {
  uint32_t words[kFour];
};
__device__ __forceinline__ Raw load_raw(const void* data, int dtype, const Place& place) {
  Raw raw = {};
  if (dtype == HALFSTEP_F32) {
    const auto* from = static_cast<const uint32_t*>(data) + place.at;
    if (place.whole) {
      const auto pack = *reinterpret_cast<const Pack<uint32_t, kFour>*>(from);
#pragma unroll
      for (int j = 0; j < kFour; ++j) raw.words[j] = pack.values[j];
    } else {
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        if (j < place.n) raw.words[j] = from[j];
      }
    }
  } else {
    const auto* from = static_cast<const uint16_t*>(data) + place.at;
    if (place.whole) {
      const auto pack = *reinterpret_cast<const Pack<uint32_t, 2>*>(from);
      raw.words[0] = pack.values[0];
      raw.words[1] = pack.values[1];
    } else {
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        if (j < place.n) raw.words[j / 2] |= uint32_t{from[j]} << (16 * (j % 2));
      }
    }
  }
  return raw;
}
__device__ __forceinline__ void unpack(const Raw& raw, int dtype, float (&to)[kFour]) {
  if (dtype == HALFSTEP_F32) {
#pragma unroll
    for (int j = 0; j < kFour; ++j) to[j] = std::bit_cast<float>(raw.words[j]);
    return;
  }
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    const auto bits = static_cast<uint16_t>(raw.words[j / 2] >> (16 * (j % 2)));
    to[j] = dtype == HALFSTEP_F16 ? value_of(Half{bits}) : value_of(BFloat16{bits});
  }
}

template <class T>
__device__ __forceinline__ void load_four(const T* data, const Place& place, T (&to)[kFour]) {
  constexpr int kWidth = static_cast<int>(16 / sizeof(T));
  if (place.whole) {
#pragma unroll
    for (int k = 0; k < kFour; k += kWidth) {
      const auto pack = *reinterpret_cast<const Pack<T, kWidth>*>(data + place.at + k);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) to[k + j] = pack.values[j];
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kFour; ++j) to[j] = j < place.n ? data[place.at + j] : T{};
}
/// Rounded to nearest even.
template <class T, class C>
__device__ __forceinline__ void store_four(T* data, const Place& place, const C (&from)[kFour]) {
  constexpr int kWidth = 16 / sizeof(T) < kFour ? static_cast<int>(16 / sizeof(T)) : kFour;
  if (place.whole) {
#pragma unroll
    for (int k = 0; k < kFour; k += kWidth) {
      Pack<T, kWidth> pack;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) pack.values[j] = convert<T>(from[k + j]);
      *reinterpret_cast<Pack<T, kWidth>*>(data + place.at + k) = pack;
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    if (j < place.n) data[place.at + j] = convert<T>(from[j]);
  }
}
__device__ __forceinline__ void store_floats(void* data, int dtype, const Place& place, const float (&from)[kFour]) {
  if (dtype == HALFSTEP_F32) {
    store_four(static_cast<float*>(data), place, from);
  } else if (dtype == HALFSTEP_F16) {
    store_four(static_cast<Half*>(data), place, from);
  } else {
    store_four(static_cast<BFloat16*>(data), place, from);
  }
}

// ------------------------------------------------------------------------------------------------------------------
// Roundings that keep what nearest loses.

/// Four words of the random stream: see core/philox.h.
__device__ __forceinline__ void philox(const int64_t* state, uint64_t block, uint32_t (&words)[4]) {
  const auto seed = static_cast<uint64_t>(state[0]);
  const uint64_t at = static_cast<uint64_t>(state[1]) + block;
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  uint32_t c[4] = {static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), 0, 0};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * c[0], b = uint64_t{0xcd9e8d57u} * c[2];
    c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0];
    c[1] = static_cast<uint32_t>(b);
    c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1];
    c[3] = static_cast<uint32_t>(a);
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) words[j] = c[j];
}

/// Up or down, with probabilities that make the mean right: for bfloat16 the bits that are cut decide.
__device__ __forceinline__ BFloat16 stochastic_bfloat16(float value, uint32_t random) {
  const auto u = std::bit_cast<uint32_t>(value);
  const uint32_t cut = finite(value) ? (u + (random & 0xffffu)) >> 16 : u >> 16 | ((u & 0x7fffffu) ? 0x40u : 0u);
  return BFloat16{static_cast<uint16_t>(cut)};
}
/// f16: the two neighbours of the value, and how far it lies between them.
__device__ __forceinline__ Half stochastic_half(float value, uint32_t random) {
  auto low = convert<Half>(value);
  if (fabsf(value_of(low)) > fabsf(value)) low.bits = static_cast<uint16_t>(low.bits - 1);  // toward zero
  const float below = value_of(low);
  if (below == value || !finite(value) || !finite(below)) return low;
  const Half high{static_cast<uint16_t>(low.bits + 1)};
  const float part = (value - below) / (value_of(high) - below);
  return static_cast<float>(random >> 8) * 0x1p-24f < part ? high : low;
}

// ------------------------------------------------------------------------------------------------------------------
// The formulas.

/// What a parameter's formula takes from its number of steps and the learning rate; made once a step.
struct Rates {
  double a, b, c;
};

struct Sgd {
  double momentum, dampening, weight_decay, sign;
  bool nesterov;

  __device__ Rates rates(double lr, int64_t step) const {
    return {lr, step == 1 ? 1 : 1 - dampening, step == 1 ? 0 : momentum};
  }

  template <class T>
  struct Formula {
    static constexpr int kStates = 1;
    T lr, decay, sign, rate, kept, momentum;
    bool nesterov;
    __device__ __forceinline__ Formula(const Sgd& s, const Rates& r)
        : lr(static_cast<T>(r.a)),
          decay(static_cast<T>(s.weight_decay)),
          sign(static_cast<T>(s.sign)),
          rate(static_cast<T>(r.b)),
          kept(static_cast<T>(r.c)),
          momentum(static_cast<T>(s.momentum)),
          nesterov(s.nesterov) {}
    /// `has`: the states that there are.
    __device__ __forceinline__ T operator()(T p, T g, T (&state)[kStates], int has) const {
      // A term whose factor is 0 isn't there: 0 times an infinite weight would be NaN.
      const T d = decay != 0 ? fma(decay, p, sign * g) : sign * g;
      if (has == 0) return fma(-lr, d, p);
      state[0] = fma(kept, state[0], rate * d);
      return fma(-lr, nesterov ? fma(momentum, state[0], d) : state[0], p);
    }
  };
};

struct Adam {
  double beta1, beta2, eps, weight_decay, sign;
  bool decoupled;

  __device__ Rates rates(double lr, int64_t step) const {
    const auto t = static_cast<double>(step);
    return {lr / (1 - pow(beta1, t)), 1 / sqrt(1 - pow(beta2, t)), decoupled ? 1 - lr * weight_decay : 1};
  }

  template <class T>
  struct Formula {
    static constexpr int kStates = 3;
    T b1, b2, r1, r2, eps, step_size, root, shrink, decay, sign;
    __device__ __forceinline__ Formula(const Adam& s, const Rates& r)
        : b1(static_cast<T>(s.beta1)),
          b2(static_cast<T>(s.beta2)),
          r1(static_cast<T>(1 - s.beta1)),
          r2(static_cast<T>(1 - s.beta2)),
          eps(static_cast<T>(s.eps)),
          step_size(static_cast<T>(r.a)),
          root(static_cast<T>(r.b)),
          shrink(static_cast<T>(r.c)),
          decay(static_cast<T>(s.decoupled ? 0 : s.weight_decay)),
          sign(static_cast<T>(s.sign)) {}
    __device__ __forceinline__ T operator()(T p, T g, T (&state)[kStates], int has) const {
      p *= shrink;
      g = decay != 0 ? fma(decay, p, sign * g) : sign * g;  // see Sgd
      const T first = fma(b1, state[0], r1 * g), second = fma(b2, state[1], r2 * g * g);
      state[0] = first;
      state[1] = second;
      T top = second;
      if (has == 3) {
        // In this order a NaN of the second moment comes through.
        top = second < state[2] ? state[2] : second;
        state[2] = top;
      }
      return p - step_size * first / fma(sqrt(top), root, eps);
    }
  };
};

// ------------------------------------------------------------------------------------------------------------------

constexpr int kGradient = 0, kParameter = 1, kMaster = 2, kCompensation = 3, kCopy = 4, kUnscaled = 5, kStates = 6,
              kRandomBlock = 9;  // columns
constexpr int kFirstGradient = 4, kFixedOutputs = 5;

/// What all parameters of a call have in common, in device memory.
struct Shared {
  const double* hyper;   ///< [learning rate, stochastic rounding or not]
  const int64_t* state;  ///< of the random stream; null without
  const float* unless;   ///< null: never skipped
  const float* scale;    ///< of the gradients; null: they have none
  __device__ bool skipped() const { return unless && *unless != 0; }
};

/// Which parameters have a gradient.
struct Present {
  static constexpr int kMost = 8192;
  uint32_t bits[kMost / 32];
};

// Counts the step of each parameter and works out its rates, before a block needs them.
template <class Rule>
__global__ void __launch_bounds__(kThreads) begin_step(const __grid_constant__ Present present, int first, int n,
                                                       Rule rule, Shared shared, int64_t* steps, Rates* rates) {
  if (shared.skipped()) return;
  for (auto i = static_cast<int>(thread_index()); i < n; i += static_cast<int>(grid_threads())) {
    if (!(present.bits[i / 32] >> (i % 32) & 1u)) continue;
    const int64_t step = steps[first + i] + 1;
    steps[first + i] = step;
    rates[first + i] = rule.rates(shared.hyper[0], step);
  }
}

/// Four gradients, unscaled and as floats, from what was loaded; written back unscaled where they are scaled.
__device__ __forceinline__ void unscale_four(const Raw& raw, int dtype, void* unscaled, float inverse,
                                             const Place& place, float (&g)[kFour]) {
  unpack(raw, dtype, g);
  if (!unscaled) return;
#pragma unroll
  for (int j = 0; j < kFour; ++j) g[j] *= inverse;
  if (dtype == HALFSTEP_BF16) {
#pragma unroll
    for (int j = 0; j < kFour; ++j) g[j] = value_of(convert<BFloat16>(g[j]));
    store_four(static_cast<BFloat16*>(unscaled), place, g);
  } else {
    store_four(static_cast<float*>(unscaled), place, g);
  }
}
__device__ __forceinline__ void unscale_wide(const double* gradient, double* unscaled, double inverse,
                                             const Place& place, double (&g)[kFour]) {
  load_four(gradient, place, g);
  if (!unscaled) return;
#pragma unroll
  for (int j = 0; j < kFour; ++j) g[j] *= inverse;
  store_four(unscaled, place, g);
}

// Parameters that are computed in T: float for all but f64 ones.
template <class T, class Rule>
__global__ void __launch_bounds__(kThreads, 3) step_kernel(const __grid_constant__ ChunkTable table, Rule rule,
                                                           Shared shared, int num_states, const Rates* rates) {
  using Formula = typename Rule::template Formula<T>;
  constexpr bool kWide = std::is_same_v<T, double>;
  const bool step = !shared.skipped();
  if (!step && !shared.scale) return;
  const Chunk chunk = table.at(blockIdx.x);
  const double inverse = shared.scale ? 1.0 / static_cast<double>(*shared.scale) : 1.0;
  const auto* gradient = table.address(chunk, kGradient);
  auto* unscaled = shared.scale ? table.address(chunk, kUnscaled) : nullptr;
  const int gradient_dtype = chunk.dtype(kGradient);
  const bool wide_gradient = gradient_dtype == HALFSTEP_F64;
  // Parameters are read from `main`: their master, or themselves.
  auto* const parameter = table.address(chunk, kParameter);
  const bool has_master = chunk.has(kMaster);
  const int parameter_dtype = chunk.dtype(kParameter), main_dtype = has_master ? HALFSTEP_F32 : parameter_dtype;
  auto* const main = has_master ? table.address(chunk, kMaster) : parameter;
  auto* const compensation = table.address(chunk, kCompensation);
  auto* const copy = table.address(chunk, kCopy);
  T* states[Formula::kStates];
  int has = 0;
#pragma unroll
  for (int s = 0; s < Formula::kStates; ++s) {
    states[s] = s < num_states ? table.address<T>(chunk, kStates + s) : nullptr;
    has += states[s] != nullptr;
  }
  const Formula formula(rule, step ? rates[chunk.tensor] : Rates{});
  const bool stochastic = !kWide && shared.state && main_dtype != HALFSTEP_F32 && !compensation && shared.hyper[1] != 0;
  const uint64_t first_block = stochastic ? table.word(chunk, kRandomBlock) : 0;

  for (int64_t at = chunk.begin + int64_t{threadIdx.x} * kFour; at < chunk.end; at += kThreads * kFour) {
    const int64_t left = chunk.end - at;
    const Place place{at, left < kFour ? static_cast<int>(left) : kFour, chunk.aligned && left >= kFour};
    T g[kFour], p[kFour], state[Formula::kStates][kFour] = {};
    [[maybe_unused]] Raw raw_gradient = {}, raw_main = {}, raw_lost = {};
    double wide[kFour];
    if (wide_gradient) {
      unscale_wide(static_cast<const double*>(gradient), static_cast<double*>(unscaled), inverse, place, wide);
    } else {
      raw_gradient = load_raw(gradient, gradient_dtype, place);
    }
    if (step) {
      if constexpr (kWide) {
        load_four(static_cast<const double*>(main), place, p);
      } else {
        raw_main = load_raw(main, main_dtype, place);
        if (compensation) raw_lost = load_raw(compensation, parameter_dtype, place);
      }
#pragma unroll
      for (int s = 0; s < Formula::kStates; ++s) {
        if (s < has) load_four(states[s], place, state[s]);
      }
    }
    if (wide_gradient) {
#pragma unroll
      for (int j = 0; j < kFour; ++j) g[j] = static_cast<T>(wide[j]);
    } else {
      float narrow[kFour];
      unscale_four(raw_gradient, gradient_dtype, unscaled, static_cast<float>(inverse), place, narrow);
#pragma unroll
      for (int j = 0; j < kFour; ++j) g[j] = narrow[j];
    }
    if (!step) continue;
    if constexpr (!kWide) unpack(raw_main, main_dtype, p);
    T updated[kFour];
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      T own[Formula::kStates];
#pragma unroll
      for (int s = 0; s < Formula::kStates; ++s) own[s] = state[s][j];
      updated[j] = formula(p[j], g[j], own, has);
#pragma unroll
      for (int s = 0; s < Formula::kStates; ++s) state[s][j] = own[s];
    }
#pragma unroll
    for (int s = 0; s < Formula::kStates; ++s) {
      if (s < has) store_four(states[s], place, state[s]);
    }
    if constexpr (kWide) {
      store_four(static_cast<double*>(main), place, updated);
    } else {
      if (copy) store_floats(copy, chunk.dtype(kCopy), place, updated);
      if (has_master) {
        store_four(static_cast<float*>(main), place, updated);
        if (parameter_dtype != HALFSTEP_F32) store_floats(parameter, parameter_dtype, place, updated);
      } else if (compensation) {
        // Kahan: the update and what earlier roundings cut off; what this one cuts off is kept for the next.
        float lost[kFour], total[kFour];
        unpack(raw_lost, parameter_dtype, lost);
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
          const float change = (updated[j] - p[j]) + lost[j];
          total[j] = p[j] + change;
          const float written = parameter_dtype == HALFSTEP_F16    ? value_of(convert<Half>(total[j]))
                                : parameter_dtype == HALFSTEP_BF16 ? value_of(convert<BFloat16>(total[j]))
                                                                   : total[j];
          lost[j] = change - (written - p[j]);
        }
        store_floats(parameter, parameter_dtype, place, total);
        store_floats(compensation, parameter_dtype, place, lost);
      } else if (stochastic) {
        uint32_t random[4];
        philox(shared.state, first_block + static_cast<uint64_t>(at) / 4, random);
        auto* to = static_cast<uint16_t*>(parameter) + at;
        Pack<uint16_t, kFour> pack;
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
          pack.values[j] = main_dtype == HALFSTEP_F16 ? stochastic_half(updated[j], random[j]).bits
                                                      : stochastic_bfloat16(updated[j], random[j]).bits;
        }
        if (place.whole) {
          *reinterpret_cast<Pack<uint16_t, kFour>*>(to) = pack;
        } else {
#pragma unroll
          for (int j = 0; j < kFour; ++j) {
            if (j < place.n) to[j] = pack.values[j];
          }
        }
      } else {
        store_floats(parameter, parameter_dtype, place, updated);
      }
    }
  }
}

template <class Rule>
halfstep_status optimizer_step(Call& call, const Rule& rule) {
  const int n = call.n - kFirstGradient;
  if (n <= 0) return HALFSTEP_OK;
  const int width = (call.m - 1) / n, num_states = width - kFixedOutputs;
  const auto data = [&](int i) { return call.in[i].defined ? call.in[i].data : nullptr; };
  const Shared shared{static_cast<const double*>(call.in[0].data), static_cast<const int64_t*>(data(1)),
                      static_cast<const float*>(data(2)), static_cast<const float*>(data(3))};
  auto* rates = call.workspace<Rates>(n);
  if (!rates) return call.no_memory();
  bool any_wide = false, any_float = false;
  for (int first = 0; first < n; first += Present::kMost) {
    const int count = std::min(n - first, Present::kMost);
    Present present = {};
    bool any = false;
    for (int i = 0; i < count; ++i) {
      if (!call.in[kFirstGradient + first + i].defined) continue;
      present.bits[i / 32] |= 1u << (i % 32);
      any = true;
      (call.out[1 + (first + i) * width].dtype == HALFSTEP_F64 ? any_wide : any_float) = true;
    }
    if (any) {
      launch(call, {.grid = grid_size(count, kThreads), .alone = true}, begin_step<Rule>, present, first, count, rule,
             shared, static_cast<int64_t*>(call.out[0].data), rates);
    }
  }
  const auto run = [&](bool wide, auto kernel) {
    uint64_t random_block = 0;
    const auto describe = [&](int i, ChunkColumns& columns) -> int64_t {
      const Tensor& gradient = call.in[kFirstGradient + i];
      const Tensor* own = call.out + 1 + i * width;
      if (!gradient.defined) return 0;
      // Every parameter takes blocks of the random stream, whether it needs them or not.
      const uint64_t block = random_block;
      random_block += static_cast<uint64_t>(divide_up(gradient.numel, 4));
      if ((own[0].dtype == HALFSTEP_F64) != wide || gradient.numel == 0) return 0;
      columns.add(kGradient, gradient);
      columns.add(kParameter, own[0]);
      columns.add(kMaster, own[1]);
      columns.add(kCompensation, own[2]);
      columns.add(kCopy, own[3]);
      columns.add(kUnscaled, own[4]);
      for (int s = 0; s < num_states; ++s) columns.add(kStates + s, own[kFixedOutputs + s]);
      if (shared.state) columns.set(kRandomBlock, block);
      return gradient.numel;
    };
    for_each_table(n, kStepElements, describe, [&](const ChunkTable& table) {
      launch_chunks(call, table, true, kernel, table, rule, shared, num_states, rates);
    });
  };
  if (any_float) run(false, step_kernel<float, Rule>);
  if (any_wide) run(true, step_kernel<double, Rule>);
  return call.launched();
}

halfstep_status sgd_step(Call& call) {
  const auto& a = call.attributes<halfstep_sgd_attributes>();
  return optimizer_step(
      call, Sgd{a.momentum, a.dampening, a.weight_decay, a.maximize ? -1.0 : 1.0, static_cast<bool>(a.nesterov)});
}
halfstep_status adam_step(Call& call) {
  const auto& a = call.attributes<halfstep_adam_attributes>();
  return optimizer_step(
      call, Adam{a.beta1, a.beta2, a.eps, a.weight_decay, a.maximize ? -1.0 : 1.0, static_cast<bool>(a.decoupled)});
}

constexpr KernelDef kKernels[] = {
    {.op = "sgd_step",
     .dtypes = dtypes({HALFSTEP_F32, HALFSTEP_F64}),
     .layouts = kStrided,
     .attributes = true,
     .run = sgd_step},
    {.op = "adam_step",
     .dtypes = dtypes({HALFSTEP_F32, HALFSTEP_F64}),
     .layouts = kStrided,
     .attributes = true,
     .run = adam_step},
};

}  // namespace

std::span<const KernelDef> optimizer_kernels() { return kKernels; }

}  // namespace hscuda
