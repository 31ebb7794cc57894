// SPDX-License-Identifier: Apache-2.0
// Elementary functions where CUDA's own err by more than the ops may: the normal distribution and sigmoids far out, and
// products with them, tanh. Those for float are the CPU kernels' (backends/cpu/math-inl.h, which says how they were
// made), operation by operation; the `quick` ones are for results of 16 bits, where a unit or two of float more is
// nothing.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "device/number.cuh"

namespace hscuda {

/// Whether a kernel for T rounds to 16 bits what it has computed in float.
template <class T>
inline constexpr bool kSixteenBits = sizeof(T) == 2;

namespace math {

inline constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float polynomial(float, float c) { return c; }
/// c + rest x + ..., by Horner's rule.
template <class... C>
__device__ __forceinline__ float polynomial(float x, float c, C... rest) {
  return std::fma(polynomial(x, rest...), x, c);
}

/// 1 / x within two units, for x from 1 to 2^60: what is corrected afterwards.
__device__ __forceinline__ float near_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0f, x);
#else
  return 1.0f / x;
#endif
}

/// The same, within little more than half a unit.
__device__ __forceinline__ float reciprocal(float x) {
  const float near = near_reciprocal(x);
  return std::fma(near, std::fma(-near, x, 1.0f), near);
}

/// 2^n for n from -126 to 127.
__device__ __forceinline__ float power_of_two(int n) { return std::bit_cast<float>((n + 127) << 23); }
/// y 2^n for n from -252 to 254; only the last product can round.
__device__ __forceinline__ float scale(float y, int n) {
  const int half = n >> 1;
  return y * power_of_two(half) * power_of_two(n - half);
}

/// x + rest = n ln 2 + r with |r| <= ln 2 / 2; |x| below 2^20, `rest` what x lacks.
struct ExpParts {
  int n;
  float r;
};
__device__ __forceinline__ ExpParts reduce_exp(float x, float rest = 0) {
  // Next to 1.5 * 2^23 floats are integers, whose low bits are n's.
  constexpr float kShift = 0x1.8p23f;
  const float shifted = std::fma(x, 0x1.715476p+0f, kShift);
  const float n = shifted - kShift;
  const float r = std::fma(-n, 0x1.62e43p-1f, x) + std::fma(n, 1.904654300e-09f, rest);
  return {std::bit_cast<int>(shifted) - std::bit_cast<int>(kShift), r};
}
/// e^r - 1 for |r| <= ln 2 / 2.
__device__ __forceinline__ float expm1_reduced(float r) {
  const float q =
      polynomial(r, 4.999999404e-01f, 1.666652113e-01f, 4.166826606e-02f, 8.368677460e-03f, 1.382073388e-03f);
  return std::fma(r * r, q, r);
}

/// e^x within 1.1 units of the last place; CUDA's own has been seen to miss by 1.74 on an H100.
__device__ __forceinline__ float exp(float x) {
  // Beyond these the result is 0 or infinite.
  const ExpParts parts = reduce_exp(std::fmin(std::fmax(x, -104.0f), 89.0f));
  const float y = scale(expm1_reduced(parts.r) + 1.0f, parts.n);
  return x != x ? x : y;
}
__device__ __forceinline__ double exp(double x) { return std::exp(x); }

/// sigmoid(x) = y 2^n, for any x but NaN.
struct SigmoidParts {
  float y;
  int n;
};
__device__ __forceinline__ SigmoidParts sigmoid_parts(float x) {
  const bool negative = x < 0;
  const ExpParts parts = reduce_exp(std::fmax(-std::fabs(x), -110.0f));
  const float q = expm1_reduced(parts.r);
  const float power = power_of_two(parts.n > -126 ? parts.n : -126);
  const float z = std::fma(q, power, power);
  const float sum = 1.0f + z;
  const float sum_lost = z - (sum - 1.0f);
  const float near = near_reciprocal(sum);
  const float inverse = std::fma(near, std::fma(-near, sum_lost, std::fma(-near, sum, 1.0f)), near);
  return {std::fma(negative ? q : 0.0f, inverse, inverse), negative ? parts.n : 0};
}
__device__ __forceinline__ float sigmoid(float x) {
  const SigmoidParts s = sigmoid_parts(x);
  return x != x ? x : scale(s.y, s.n);
}
__device__ __forceinline__ double sigmoid(double x) {
  const double z = std::exp(-std::fabs(x));
  return (x < 0 ? z : 1.0) / (1.0 + z);
}
__device__ __forceinline__ float quick_sigmoid(float x) {
  const float z = std::exp(-std::fabs(x));
  const float inverse = reciprocal(1.0f + z);
  return x < 0 ? z * inverse : inverse;
}

/// tanh(x), from z = e^-2|x| where that is not next to 1.
__device__ __forceinline__ float tanh_from(float x, float two_z_by_one_plus_z) {
  const float s = x * x;
  const float near = std::fma(
      x * s, polynomial(s, -3.333328366e-01f, 1.333148628e-01f, -5.374317244e-02f, 2.064970694e-02f, -5.716198124e-03f),
      x);
  return std::copysign(std::fabs(x) < 0.625f ? near : 1.0f - two_z_by_one_plus_z, x);
}
__device__ __forceinline__ float tanh(float x) {
  // The result doesn't see z below e^-87.
  const ExpParts parts = reduce_exp(std::fmax(-2.0f * std::fabs(x), -87.0f));
  const float z = (expm1_reduced(parts.r) + 1.0f) * power_of_two(parts.n);
  if (x != x) return x;
  return tanh_from(x, (z + z) / (1.0f + z));
}
__device__ __forceinline__ double tanh(double x) { return std::tanh(x); }
__device__ __forceinline__ float quick_tanh(float x) {
  const float z = std::exp(-2.0f * std::fabs(x));
  return tanh_from(x, (z + z) * near_reciprocal(1.0f + z));
}

/// f sigmoid(x) for f of x's sign; 0 at -infinity.
__device__ __forceinline__ float times_sigmoid(float f, float x) {
  const SigmoidParts s = sigmoid_parts(x);
  // From -110 on the product is below the smallest subnormal.
  return x != x ? x : scale(std::fmax(f, -110.0f) * s.y, s.n);
}
__device__ __forceinline__ double times_sigmoid(double f, double x) {
  const double s = sigmoid(x);
  return s == 0 ? 0.0 : f * s;
}
__device__ __forceinline__ float quick_times_sigmoid(float f, float x) {
  const float s = quick_sigmoid(x);
  return s == 0 ? 0.0f : f * s;
}

/// Phi(-a) exp(a^2 / 2) for a from 0 to 14.5, as P((a - k) / (a + 1.75)) / (a + 1.75); the sum high + low has what the
/// additions and the division lose.
__device__ __forceinline__ float tail_polynomial(float t) {
  return t * polynomial(t, -2.712689340e-01f, -2.086331323e-02f, 3.454835713e-02f, 1.156266127e-02f, -3.229748225e-03f,
                        -4.114212468e-03f, -1.261698664e-03f, 4.840798210e-04f, 7.128826110e-04f, 2.208334045e-04f,
                        -1.158603191e-04f, -7.359206211e-05f);
}
struct TailRatio {
  float high, low;
};
__device__ __forceinline__ TailRatio tail_ratio(float a) {
  constexpr float kFirst = 0.65234375f;
  const float sum = a + 1.75f;
  const float sum_lost = a - (sum - 1.75f);
  const float inverse = reciprocal(sum);
  const float above = a - 1.69802380f;
  const float quotient = above * inverse;
  const float missing = std::fma(-quotient, sum_lost, std::fma(-quotient, sum, above));
  const float t = std::fma(missing, inverse, quotient);
  const float rest = tail_polynomial(t);
  const float p = kFirst + rest;
  const float p_lost = rest - (p - kFirst);
  const float high = p * inverse;
  const float remainder = std::fma(-high, sum_lost, std::fma(-high, sum, p) + p_lost);
  return {high, remainder * inverse};
}

/// Phi(-a) = (high + low) 2^n and exp(-a^2 / 2) = (1 + bell) 2^n for a from 0 to 14.5.
struct NormalTail {
  float high, low, bell;
  int n;
};
__device__ __forceinline__ NormalTail normal_tail(float a) {
  const float square = a * a;
  const ExpParts parts = reduce_exp(square * -0.5f, std::fma(a, a, -square) * -0.5f);
  const float bell = expm1_reduced(parts.r);
  const TailRatio ratio = tail_ratio(a);
  return {ratio.high, std::fma(ratio.high, bell, ratio.low), bell, parts.n};
}
/// Both for an `a` of 16 bits, whose square is exact.
struct QuickTail {
  float phi, bell;
};
__device__ __forceinline__ QuickTail quick_tail(float a) {
  const float inverse = reciprocal(a + 1.75f);
  const float p = 0.65234375f + tail_polynomial((a - 1.69802380f) * inverse);
  const float bell = std::exp(a * a * -0.5f);
  return {p * inverse * bell, bell};
}

/// Phi(x) and exp(-x^2 / 2).
template <class C>
struct NormalParts {
  C phi, bell;
};
__device__ __forceinline__ NormalParts<float> normal_parts(float x) {
  const NormalTail t = normal_tail(std::fmin(std::fabs(x), 14.5f));
  const float tail = scale(t.high + t.low, t.n), bell = scale(1.0f + t.bell, t.n);
  if (x != x) return {x, x};
  return {x < 0 ? tail : 1.0f - tail, bell};
}
__device__ __forceinline__ NormalParts<double> normal_parts(double x) {
  return {0.5 * std::erfc(x * -0.70710678118654752440), std::exp(x * x * -0.5)};
}
__device__ __forceinline__ NormalParts<float> quick_normal_parts(float x) {
  const QuickTail t = quick_tail(std::fmin(std::fabs(x), 14.5f));
  if (x != x) return {x, x};
  return {x < 0 ? t.phi : 1.0f - t.phi, t.bell};
}

/// x Phi(x); 0 at -infinity.
__device__ __forceinline__ float gelu(float x) {
  const float a = std::fmin(std::fabs(x), 14.5f);
  const NormalTail t = normal_tail(a);
  // a Phi(-a), which is what the result lacks of max(x, 0).
  const float high = a * t.high;
  const float low = std::fma(a, t.low, std::fma(a, t.high, -high));
  const float y = (x < 0 ? 0.0f : x) - scale(high + low, t.n);
  return x != x ? x : y;
}
__device__ __forceinline__ double gelu(double x) {
  const double phi = normal_parts(x).phi;
  return phi == 0 ? 0.0 : x * phi;
}
__device__ __forceinline__ float quick_gelu(float x) {
  const float a = std::fmin(std::fabs(x), 14.5f);
  const float y = (x < 0 ? 0.0f : x) - a * quick_tail(a).phi;
  return x != x ? x : y;
}

/// x f, where a vanished f makes an infinite x vanish too.
template <class C>
__device__ __forceinline__ C vanishing_product(C x, C f) {
  return f == 0 && x == x ? C{0} : x * f;
}

/// tanh(log(1 + e^x)): with z = e^-|x|, a quotient of polynomials in z.
template <class C>
__device__ __forceinline__ C tanh_softplus(C x) {
  const C z = std::exp(-std::fabs(x));
  // z (z + 2) / (z (z + 2) + 2), and (1 + 2 z) / (1 + 2 z + 2 z^2)
  const C n = x < 0 ? z * (z + C{2}) : std::fma(C{2}, z, C{1});
  return n / (n + (x < 0 ? C{2} : C{2} * (z * z)));
}

/// The inverse of the error function: Winitzki's closed form, then Halley's steps on erf or erfc.
__device__ inline double inverse_erf(double y) {
  if (!(std::fabs(y) < 1)) return y == 1 ? __builtin_huge_val() : y == -1 ? -__builtin_huge_val() : y - y;
  if (y == 0) return y;
  constexpr double kPi = 3.14159265358979323846, kC = 0.147;
  const double a = std::fabs(y);
  const double l = std::log1p(-a * a);
  const double b = 2 / (kPi * kC) + l / 2;
  double x = std::sqrt(std::sqrt(b * b - l / kC) - b);
  for (int i = 0; i < 3; ++i) {
    // erfc keeps its digits near 1, where erf has none left.
    const double error = a < 0.5 ? std::erf(x) - a : (1 - a) - std::erfc(x);
    const double step = error * 0.88622692545275801365 * std::exp(x * x);
    x -= step / (1 + x * step);
  }
  return std::copysign(x, y);
}

template <class C>
__device__ __forceinline__ C floor_mod(C a, C b) {
  const C m = std::fmod(a, b);
  return m != 0 && (b < 0) != (m < 0) ? m + b : m;
}
/// floor(a / b), from the exact remainder, so that it fits a - floor_mod(a, b) where a / b rounds up to an integer.
template <class C>
__device__ __forceinline__ C floor_div(C a, C b) {
  if (b == 0) return a / b;
  const C m = std::fmod(a, b);
  C quotient = (a - m) / b;
  if (m != 0 && (b < 0) != (m < 0)) quotient -= 1;
  if (quotient == 0) return std::copysign(C{0}, a / b);
  const C floored = std::floor(quotient);
  return quotient - floored > C{0.5} ? floored + 1 : floored;
}
/// base^exponent modulo 2^bits; a negative exponent leaves 1 and -1 only, others become 0.
template <class T>
__device__ __forceinline__ T integer_pow(T base, T exponent) {
  if constexpr (std::is_signed_v<T>) {
    if (exponent < 0) return base == 1 ? T{1} : base == -1 ? (exponent % 2 == 0 ? T{1} : T{-1}) : T{0};
  }
  uint64_t result = 1, factor = static_cast<uint64_t>(base);
  for (auto e = static_cast<uint64_t>(exponent); e != 0; e >>= 1, factor *= factor) {
    if (e & 1) result *= factor;
  }
  return static_cast<T>(result);
}

// A gradient times a ratio: where products and squares leave the range of float32, in float64, which has room for them.
// Those of float64 itself are taken of numbers that are scaled by powers of two.
__device__ __forceinline__ bool is_finite(double x) { return x - x == 0; }
/// Neither 0 nor subnormal, infinite or NaN.
__device__ __forceinline__ bool is_normal(float x) {
  return std::fabs(x) >= std::numeric_limits<float>::min() && std::fabs(x) <= std::numeric_limits<float>::max();
}
/// g a / d 2^e, whatever the factors are.
__device__ inline double scaled_product(double g, double a, double d, int e) {
  int eg = 0, ea = 0, ed = 0;
  if (is_finite(g) && is_finite(a) && is_finite(d)) {
    g = std::frexp(g, &eg);
    a = std::frexp(a, &ea);
    d = std::frexp(d, &ed);
  }
  return std::ldexp(g * (a / d), eg + ea - ed + e);
}
/// The sum of the squares of a and b, divided by 2^(2 e).
__device__ inline double scaled_squares(double a, double b, int* e) {
  const double larger = std::fmax(std::fabs(a), std::fabs(b));
  *e = larger > 0 && is_finite(a) && is_finite(b) ? std::ilogb(larger) : 0;
  a = std::ldexp(a, -*e);
  b = std::ldexp(b, -*e);
  return a * a + b * b;
}
/// g a / b
__device__ inline double scaled_ratio(double g, double a, double b) { return scaled_product(g, a, b, 0); }
__device__ inline float scaled_ratio(float g, float a, float b) {
  const float ratio = a / b;
  if (is_normal(ratio)) return g * ratio;
  return static_cast<float>(double{g} * (double{a} / double{b}));
}
/// -g a / b^2
__device__ inline double div_backward(double g, double a, double b) {
  int e = 0;
  if (is_finite(b)) b = std::frexp(b, &e);
  return -scaled_product(g, a, b * b, -2 * e);
}
__device__ inline float div_backward(float g, float a, float b) {
  const float product = g * a, square = b * b;
  if (is_normal(product) && is_normal(square)) return -product / square;
  return static_cast<float>(-(double{g} * double{a}) / (double{b} * double{b}));
}
/// g a / sqrt(a^2 + b^2)
__device__ inline double hypot_backward(double g, double a, double b) {
  int e;
  const double sum = scaled_squares(a, b, &e);
  return scaled_product(g, a, std::sqrt(sum), -e);
}
__device__ inline float hypot_backward(float g, float a, float b) {
  return static_cast<float>(double{g} * (double{a} / std::sqrt(double{a} * double{a} + double{b} * double{b})));
}
/// g b / (a^2 + b^2), and 0 at the origin.
__device__ inline double atan2_backward(double g, double a, double b) {
  int e;
  const double sum = scaled_squares(a, b, &e);
  return sum == 0 ? 0 : scaled_product(g, b, sum, -2 * e);
}
__device__ inline float atan2_backward(float g, float a, float b) {
  const double sum = double{a} * double{a} + double{b} * double{b};
  return sum == 0 ? 0.0f : static_cast<float>(double{g} * (double{b} / sum));
}

/// a + weight (b - a), from the nearer end, so that weights 0 and 1 give the ends exactly.
template <class C>
__device__ __forceinline__ C interpolate(C a, C b, C weight) {
  const C difference = b - a;
  return std::fabs(weight) < C{0.5} ? std::fma(weight, difference, a) : std::fma(-difference, C{1} - weight, b);
}

}  // namespace math

/// A number of the program's own as what T computes in.
template <class C>
C number(const halfstep_scalar& value) {
  using halfstep_plugin_numbers::convert;
  if constexpr (std::is_same_v<C, bool>) {
    return value.kind == 2 ? value.floating != 0 : value.integer != 0;
  } else if constexpr (std::is_integral_v<C>) {
    return value.kind == 2 ? convert<C>(value.floating) : convert<C>(value.integer);
  } else {
    return convert<C>(value.floating);
  }
}

}  // namespace hscuda
