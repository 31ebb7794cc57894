// SPDX-License-Identifier: Apache-2.0
// Random numbers: element i of the row-major order from word i of a Philox stream, whatever the strides.
// One thread makes what comes from one block of four words.
#include "device/fault.cuh"
#include "device/random.cuh"

namespace hscuda {
namespace {

__device__ __forceinline__ uint64_t join(uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; }

// ------------------------------------------------------------------------------------------------------------------
// Fills. F(stream, block, values) makes the F::kElements elements of a block.

template <class T, class F>
__global__ void __launch_bounds__(kThreads) fill_random(Layout<1> layout, State state, F f, T* out) {
  const PhiloxState stream = state();
  for (int64_t block = thread_index(); block * F::kElements < layout.numel; block += grid_threads()) {
    T values[F::kElements];
    f(stream, static_cast<uint64_t>(block), values);
#pragma unroll
    for (int j = 0; j < F::kElements; ++j) {
      const int64_t i = block * F::kElements + j;
      if (i >= layout.numel) break;
      int64_t at[1];
      layout.places(i, at);
      out[at[0]] = values[j];
    }
  }
}
template <class T, class F>
void fill(const Call& call, const F& f) {
  const Tensor& y = call.out[0];
  if (y.numel == 0) return;
  launch(call, {.grid = grid_size(y.numel, kThreads * F::kElements), .alone = true}, fill_random<T, F>,
         layout_of<1>({&y}, true), State(call.in[1]), f, static_cast<T*>(y.data));
}

/// The next value below.
__device__ __forceinline__ float before(float value) { return std::nextafter(value, -__builtin_huge_valf()); }
__device__ __forceinline__ double before(double value) { return std::nextafter(value, -__builtin_huge_val()); }
template <class T>
__device__ __forceinline__ T before(T value) {
  // By one place of the 16-bit pattern, which orders magnitudes.
  const uint16_t bits = value.bits;
  if ((bits & 0x7fffu) == 0) return T{0x8001u};
  return T{static_cast<uint16_t>(bits & 0x8000u ? bits + 1 : bits - 1)};
}

template <class T>
struct Uniform {
  static constexpr int kElements = std::is_same_v<T, double> ? 2 : 4;
  double a, b;
  __device__ __forceinline__ T place(double u) const {
    const T value = convert<T>(a + (b - a) * u);
    return a < b && static_cast<double>(value_of(value)) >= b ? before(value) : value;
  }
  __device__ __forceinline__ void operator()(PhiloxState stream, uint64_t block, T (&values)[kElements]) const {
    const PhiloxBlock words = philox_block(stream, block);
    if constexpr (kElements == 2) {
      values[0] = place(halfstep::uniform_f64(join(words[0], words[1])));
      values[1] = place(halfstep::uniform_f64(join(words[2], words[3])));
    } else {
      // As many bits as the significand has, or the largest numbers would round up to 1.
      constexpr int kBits = std::is_same_v<T, Half> ? 11 : std::is_same_v<T, BFloat16> ? 8 : 24;
#pragma unroll
      for (std::size_t j = 0; j < 4; ++j) values[j] = place(halfstep::uniform_bits(words[j], kBits));
    }
  }
};

// Box and Muller, the same arithmetic as core/box_muller.h, which has the reasons.
struct Normals {
  double first, second;
};
__device__ __forceinline__ Normals turn(unsigned quadrant, double x, double y) {
  const double first = quadrant % 2 == 0 ? x : y, second = quadrant % 2 == 0 ? y : x;
  return {quadrant == 1 || quadrant == 2 ? -first : first, quadrant >= 2 ? -second : second};
}
__device__ inline Normals normals(uint32_t word0, uint32_t word1) {
  const double radius = std::sqrt(-2.0 * std::log((word0 + 1.0) * 0x1p-32));
  const uint32_t quadrant = (word1 + (1u << 29)) >> 30;
  const auto remainder = static_cast<int32_t>(word1 - (quadrant << 30));
  const double theta = remainder * (3.14159265358979323846 * 0x1p-31);
  return turn(quadrant, radius * std::cos(theta), radius * std::sin(theta));
}
__device__ inline Normals normals64(uint64_t word0, uint64_t word1) {
  constexpr double kPiHigh = 3.14159265358979311600, kPiLow = 1.2246467991473532e-16;
  const double square = -2.0 * std::log(halfstep::uniform_open_f64(word0));
  const double radius = std::sqrt(square);
  const double radius_rest = radius > 0 ? std::fma(-radius, radius, square) / (2 * radius) : 0.0;
  const uint64_t turn53 = word1 >> 11;
  const uint64_t quarters = (turn53 + (uint64_t{1} << 50)) >> 51;
  const auto remainder = static_cast<int64_t>(turn53) - static_cast<int64_t>(quarters << 51);
  const double scaled = static_cast<double>(remainder) * 0x1p-52;
  const double theta = scaled * kPiHigh;
  const double rest = std::fma(scaled, kPiLow, std::fma(scaled, kPiHigh, -theta));
  const double cosine = std::cos(theta), sine = std::sin(theta);
  const double x = std::fma(radius, cosine, std::fma(radius_rest, cosine, -radius * rest * sine));
  const double y = std::fma(radius, sine, std::fma(radius_rest, sine, radius * rest * cosine));
  return turn(static_cast<unsigned>(quarters & 3), x, y);
}

template <class T>
struct Normal {
  static constexpr int kElements = std::is_same_v<T, double> ? 2 : 4;
  double mean, deviation;
  __device__ __forceinline__ T place(double z) const { return convert<T>(mean + deviation * z); }
  __device__ __forceinline__ void operator()(PhiloxState stream, uint64_t block, T (&values)[kElements]) const {
    const PhiloxBlock words = philox_block(stream, block);
    if constexpr (kElements == 2) {
      const Normals z = normals64(join(words[0], words[1]), join(words[2], words[3]));
      values[0] = place(z.first), values[1] = place(z.second);
    } else {
#pragma unroll
      for (std::size_t j = 0; j < 4; j += 2) {
        const Normals z = normals(words[j], words[j + 1]);
        values[j] = place(z.first), values[j + 1] = place(z.second);
      }
    }
  }
};

/// The integers from `low` on, as they lie in memory: conversion to an integer is modulo 2^bits, others are rare.
template <class T>
struct Integer {
  static constexpr int kElements = 2;
  int64_t low;
  uint64_t range;  ///< 0: 2^64
  __device__ __forceinline__ void operator()(PhiloxState stream, uint64_t block, T (&values)[kElements]) const {
#pragma unroll
    for (uint64_t j = 0; j < 2; ++j) {
      const uint64_t below = halfstep::integer_below(stream, block * 2 + j, range);
      values[j] = convert<T>(static_cast<int64_t>(static_cast<uint64_t>(low) + below));
    }
  }
};

template <class T>
struct Coin {
  static constexpr int kElements = 4;
  uint64_t threshold;
  __device__ __forceinline__ void operator()(PhiloxState stream, uint64_t block, T (&values)[kElements]) const {
    const PhiloxBlock words = philox_block(stream, block);
#pragma unroll
    for (std::size_t j = 0; j < 4; ++j) values[j] = convert<T>(words[j] < threshold);
  }
};

template <template <class> class F>
halfstep_status real(Call& call) {
  const auto& a = call.attributes<halfstep_random_attributes>();
  with_floating(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    fill<T>(call, F<T>{a.a, a.b});
  });
  return call.launched();
}
halfstep_status randint(Call& call) {
  const auto& a = call.attributes<halfstep_random_attributes>();
  with_type(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    fill<T>(call, Integer<T>{a.low, a.range});
  });
  return call.launched();
}
halfstep_status bernoulli_p(Call& call) {
  const uint64_t threshold = halfstep::bernoulli_threshold(call.attributes<halfstep_random_attributes>().a);
  with_type(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    fill<T>(call, Coin<T>{threshold});
  });
  return call.launched();
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    toss(Layout<2> layout, State state, T* out, const T* p, Fault* fault, unsigned long long call) {
  const PhiloxState stream = state();
  for (int64_t block = thread_index(); block * 4 < layout.numel; block += grid_threads()) {
    const PhiloxBlock words = philox_block(stream, static_cast<uint64_t>(block));
    for (int j = 0; j < 4 && block * 4 + j < layout.numel; ++j) {
      int64_t at[2];
      layout.places(block * 4 + j, at);
      const auto v = static_cast<double>(value_of(p[at[1]]));
      if (!(v >= 0 && v <= 1)) report(fault, call, kProbability);
      out[at[0]] = convert<T>(words[static_cast<std::size_t>(j)] < halfstep::bernoulli_threshold(v));
    }
  }
}
halfstep_status bernoulli(Call& call) {
  const Tensor &p = call.in[0], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  with_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(call, {.grid = grid_size(y.numel, kThreads * 4), .alone = true}, toss<T>, layout_of<2>({&y, &p}, true),
           State(call.in[1]), static_cast<T*>(y.data), static_cast<const T*>(p.data), call.fault(), call.number());
  });
  return call.launched();
}

constexpr KernelDef kernel(const char* op, uint32_t dtypes, bool attributes, halfstep_status (*run)(Call&)) {
  return {.op = op, .dtypes = dtypes, .layouts = kStrided, .attributes = attributes, .run = run};
}
constexpr KernelDef kKernels[] = {
    kernel("uniform", kFloating, true, real<Uniform>),
    kernel("normal", kFloating, true, real<Normal>),
    kernel("randint", kAll, true, randint),
    kernel("bernoulli_p", kAll, true, bernoulli_p),
    kernel("bernoulli", kFloating, false, bernoulli),
    {.op = "randperm",
     .dtypes = 0,
     .layouts = 0,
     .attributes = false,
     .run = nullptr,
     .missing = "each step of a permutation needs the one before: the CPU is faster"},
};

}  // namespace

std::span<const KernelDef> random_kernels() { return kKernels; }

}  // namespace hscuda
