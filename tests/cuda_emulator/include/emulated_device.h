// SPDX-License-Identifier: Apache-2.0
// What kernels call: CUDA's functions for threads, bits and numbers.
#pragma once

#include <algorithm>
#include <bit>
#include <source_location>
#include <type_traits>

#include "../block.h"
#include "emulated_types.h"

#pragma GCC visibility push(hidden)

using HscudaWhere = std::source_location;
#define HSCUDA_HERE HscudaWhere where = HscudaWhere::current()

// ------------------------------------------------------------------------------------------------------------------
// Barriers and fences.

inline void __syncthreads(HSCUDA_HERE) { hscuda::emulator::meet_block(hscuda::emulator::Meeting::kBarrier, 0, where); }
inline int __syncthreads_or(int predicate, HSCUDA_HERE) {
  return hscuda::emulator::meet_block(hscuda::emulator::Meeting::kBarrierOr, predicate, where);
}
inline int __syncthreads_and(int predicate, HSCUDA_HERE) {
  return hscuda::emulator::meet_block(hscuda::emulator::Meeting::kBarrierAnd, predicate, where);
}
inline int __syncthreads_count(int predicate, HSCUDA_HERE) {
  return hscuda::emulator::meet_block(hscuda::emulator::Meeting::kBarrierCount, predicate, where);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, HSCUDA_HERE) {
  hscuda::emulator::meet_warp(hscuda::emulator::Meeting::kSyncWarp, mask, 0, 0, where);
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[noreturn]] inline void __trap() { std::abort(); }

// ------------------------------------------------------------------------------------------------------------------
// Between the lanes of a warp.

namespace hscuda::emulator {
template <class T>
T shuffle(unsigned mask, T value, int source, const HscudaWhere& where) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles 32 and 64 bits");
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  const uint64_t word = std::bit_cast<Bits>(value);
  return std::bit_cast<T>(static_cast<Bits>(meet_warp(Meeting::kShuffle, mask, word, source, where)));
}
template <class T>
uint64_t extended(T value) {
  return static_cast<uint64_t>(static_cast<std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>(value));
}
}  // namespace hscuda::emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, HSCUDA_HERE) {
  const int first = hscuda::emulator::lane() & ~(width - 1);
  return hscuda::emulator::shuffle(mask, value, first | (source & (width - 1)), where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, HSCUDA_HERE) {
  const int lane = hscuda::emulator::lane(), source = lane - static_cast<int>(delta);
  return hscuda::emulator::shuffle(mask, value, source < (lane & ~(width - 1)) ? lane : source, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, HSCUDA_HERE) {
  const int lane = hscuda::emulator::lane(), source = lane + static_cast<int>(delta);
  return hscuda::emulator::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, HSCUDA_HERE) {
  const int lane = hscuda::emulator::lane(), source = lane ^ bits;
  return hscuda::emulator::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, HSCUDA_HERE) {
  using namespace hscuda::emulator;
  return static_cast<unsigned>(meet_warp(Meeting::kVote, mask, predicate != 0, 0, where));
}
inline int __any_sync(unsigned mask, int predicate, HSCUDA_HERE) { return __ballot_sync(mask, predicate, where) != 0; }
inline int __all_sync(unsigned mask, int predicate, HSCUDA_HERE) {
  return __ballot_sync(mask, predicate, where) == mask;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, HSCUDA_HERE) {
  using namespace hscuda::emulator;
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  return static_cast<unsigned>(meet_warp(Meeting::kMatch, mask, std::bit_cast<Bits>(value), 0, where));
}
#define HSCUDA_REDUCE(NAME, T, WHAT)                                                  \
  inline T NAME(unsigned mask, T value, HSCUDA_HERE) {                                \
    using namespace hscuda::emulator;                                                 \
    return static_cast<T>(meet_warp(Meeting::WHAT, mask, extended(value), 0, where)); \
  }
HSCUDA_REDUCE(__reduce_add_sync, int, kReduceAdd)
HSCUDA_REDUCE(__reduce_add_sync, unsigned, kReduceAdd)
HSCUDA_REDUCE(__reduce_min_sync, int, kReduceMinSigned)
HSCUDA_REDUCE(__reduce_min_sync, unsigned, kReduceMin)
HSCUDA_REDUCE(__reduce_max_sync, int, kReduceMaxSigned)
HSCUDA_REDUCE(__reduce_max_sync, unsigned, kReduceMax)
HSCUDA_REDUCE(__reduce_and_sync, unsigned, kReduceAnd)
HSCUDA_REDUCE(__reduce_or_sync, unsigned, kReduceOr)
HSCUDA_REDUCE(__reduce_xor_sync, unsigned, kReduceXor)
#undef HSCUDA_REDUCE

// ------------------------------------------------------------------------------------------------------------------
// Atomics. Each is its own name with _system and _block too.

namespace hscuda::emulator {
template <class T, class F>
T atomically(T* at, F change) {
  T old;
  __atomic_load(at, &old, __ATOMIC_RELAXED);
  for (;;) {
    T next = change(old);
    if (__atomic_compare_exchange(at, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
  }
}
}  // namespace hscuda::emulator

#define HSCUDA_ATOMIC(SUFFIX)                                                                    \
  template <class T>                                                                             \
  T atomicAdd##SUFFIX(T* at, std::type_identity_t<T> value) {                                    \
    static_assert(sizeof(T) >= 4 && !std::is_same_v<T, long long>, "CUDA has none");             \
    return hscuda::emulator::atomically(at, [&](T old) { return static_cast<T>(old + value); }); \
  }                                                                                              \
  template <class T>                                                                             \
  T atomicSub##SUFFIX(T* at, std::type_identity_t<T> value) {                                    \
    static_assert(std::is_integral_v<T> && sizeof(T) == 4, "CUDA has none");                     \
    return hscuda::emulator::atomically(at, [&](T old) { return static_cast<T>(old - value); }); \
  }                                                                                              \
  template <class T>                                                                             \
  T atomicMin##SUFFIX(T* at, std::type_identity_t<T> value) {                                    \
    static_assert(std::is_integral_v<T> && sizeof(T) >= 4, "CUDA has none");                     \
    return hscuda::emulator::atomically(at, [&](T old) { return value < old ? value : old; });   \
  }                                                                                              \
  template <class T>                                                                             \
  T atomicMax##SUFFIX(T* at, std::type_identity_t<T> value) {                                    \
    static_assert(std::is_integral_v<T> && sizeof(T) >= 4, "CUDA has none");                     \
    return hscuda::emulator::atomically(at, [&](T old) { return old < value ? value : old; });   \
  }                                                                                              \
  template <class T>                                                                             \
  T atomicOr##SUFFIX(T* at, std::type_identity_t<T> value) {                                     \
    static_assert(std::is_integral_v<T> && sizeof(T) >= 4, "CUDA has none");                     \
    return hscuda::emulator::atomically(at, [&](T old) { return old | value; });                 \
  }                                                                                              \
  template <class T>                                                                             \
  T atomicAnd##SUFFIX(T* at, std::type_identity_t<T> value) {                                    \
    static_assert(std::is_integral_v<T> && sizeof(T) >= 4, "CUDA has none");                     \
    return hscuda::emulator::atomically(at, [&](T old) { return old & value; });                 \
  }                                                                                              \
  template <class T>                                                                             \
  T atomicXor##SUFFIX(T* at, std::type_identity_t<T> value) {                                    \
    static_assert(std::is_integral_v<T> && sizeof(T) >= 4, "CUDA has none");                     \
    return hscuda::emulator::atomically(at, [&](T old) { return old ^ value; });                 \
  }                                                                                              \
  template <class T>                                                                             \
  T atomicExch##SUFFIX(T* at, std::type_identity_t<T> value) {                                   \
    static_assert(sizeof(T) >= 4, "CUDA has none");                                              \
    return hscuda::emulator::atomically(at, [&](T) { return value; });                           \
  }                                                                                              \
  template <class T>                                                                             \
  T atomicCAS##SUFFIX(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {  \
    static_assert(std::is_integral_v<T> && sizeof(T) >= 2, "CUDA has none");                     \
    __atomic_compare_exchange(at, &expected, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    return expected;                                                                             \
  }
HSCUDA_ATOMIC()
HSCUDA_ATOMIC(_system)
HSCUDA_ATOMIC(_block)
#undef HSCUDA_ATOMIC

// ------------------------------------------------------------------------------------------------------------------
// Memory.

#define HSCUDA_LOAD(NAME) \
  template <class T>      \
  T NAME(const T* at) {   \
    return *at;           \
  }
HSCUDA_LOAD(__ldg)
HSCUDA_LOAD(__ldca)
HSCUDA_LOAD(__ldcg)
HSCUDA_LOAD(__ldcs)
HSCUDA_LOAD(__ldcv)
HSCUDA_LOAD(__ldlu)
#undef HSCUDA_LOAD
#define HSCUDA_STORE(NAME)                          \
  template <class T>                                \
  void NAME(T* at, std::type_identity_t<T> value) { \
    *at = value;                                    \
  }
HSCUDA_STORE(__stwb)
HSCUDA_STORE(__stcg)
HSCUDA_STORE(__stcs)
HSCUDA_STORE(__stwt)
#undef HSCUDA_STORE

// ------------------------------------------------------------------------------------------------------------------
// Bits.

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>((int64_t{a} * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>((static_cast<__int128>(a) * b) >> 64);
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __ffsll(long long x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1; }
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (x >> i & 1u) << (31 - i);
  return result;
}
inline unsigned long long __brevll(unsigned long long x) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
         __brev(static_cast<unsigned>(x >> 32));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((uint64_t{high} << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline int __double2hiint(double x) { return static_cast<int>(std::bit_cast<uint64_t>(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(std::bit_cast<uint64_t>(x)); }

// ------------------------------------------------------------------------------------------------------------------
// Numbers. What <cmath> has is called by its own name.

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }  // NaN gives 0
inline float rcbrtf(float x) { return 1.0f / std::cbrt(x); }
inline double rcbrt(double x) { return 1.0 / std::cbrt(x); }

namespace hscuda::emulator {
double inverse_erf(double x);
double inverse_normal(double x);
}  // namespace hscuda::emulator
inline double erfinv(double x) { return hscuda::emulator::inverse_erf(x); }
inline float erfinvf(float x) { return static_cast<float>(hscuda::emulator::inverse_erf(x)); }
inline double normcdf(double x) { return 0.5 * std::erfc(-x * 0.70710678118654752440); }
inline float normcdff(float x) { return static_cast<float>(normcdf(static_cast<double>(x))); }
inline double normcdfinv(double x) { return hscuda::emulator::inverse_normal(x); }
inline float normcdfinvf(float x) { return static_cast<float>(hscuda::emulator::inverse_normal(x)); }
inline double sinpi(double x) {
  // Exact at multiples of 1/2, as CUDA's; the argument is reduced before it is multiplied.
  const double r = std::remainder(x, 2.0);
  if (std::fabs(r) == 1.0) return 0.0;
  return std::sin(r * 3.14159265358979323846);
}
inline double cospi(double x) {
  const double r = std::fabs(std::remainder(x, 2.0));
  if (r == 0.5) return 0.0;
  return std::cos(r * 3.14159265358979323846);
}
inline float sinpif(float x) { return static_cast<float>(sinpi(static_cast<double>(x))); }
inline float cospif(float x) { return static_cast<float>(cospi(static_cast<double>(x))); }
inline void sincospif(float x, float* sine, float* cosine) { *sine = sinpif(x), *cosine = cospif(x); }
inline void sincospi(double x, double* sine, double* cosine) { *sine = sinpi(x), *cosine = cospi(x); }

// As in CUDA: integers of one type, floats with NaN giving way to a number.
#define HSCUDA_MIN_MAX(T)                          \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
HSCUDA_MIN_MAX(int)
HSCUDA_MIN_MAX(unsigned)
HSCUDA_MIN_MAX(long)
HSCUDA_MIN_MAX(unsigned long)
HSCUDA_MIN_MAX(long long)
HSCUDA_MIN_MAX(unsigned long long)
#undef HSCUDA_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }

#undef HSCUDA_HERE

#pragma GCC visibility pop
