// SPDX-License-Identifier: Apache-2.0
// What reductions fold, element by element.
#pragma once

#include <cmath>
#include <limits>

#include "device/rows.cuh"

namespace hscuda {

/// What is folded.
enum FoldKind : int {
  kFoldSum,
  kFoldProduct,
  kFoldMax,
  kFoldMin,
  kFoldNonzero,
  // The rest are for floating types only.
  kFoldAbs,
  kFoldSquares,
  kFoldPowers,
  kFoldMaxAbs,
  kFoldMinAbs,
  kFoldDistances,     ///< squares of the distances from the output's shift
  kFoldExponentials,  ///< of x - shift
  kFoldEqual,         ///< how many are equal to the shift, NaN to NaN
  kFoldEqualAbs       ///< how many magnitudes are
};

namespace reduction {

constexpr int kUnroll = 4;  // accesses of a thread that are under way together
constexpr int kFlush = 32;  // rounds of them in a block of the sum
constexpr int kBlockElements = kUnroll * kFlush;

template <class Total>
__host__ __device__ constexpr Total identity(int kind) {
  using Limits = std::numeric_limits<Total>;
  switch (kind) {
    case kFoldProduct:
      return Total{1};
    case kFoldMax:
      return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    case kFoldMin:
    case kFoldMinAbs:
      return Limits::has_infinity ? Limits::infinity() : Limits::max();
    default:
      return Total{0};
  }
}

__device__ __forceinline__ int64_t wrapping_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
__device__ __forceinline__ int64_t wrapping_multiply(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
template <class C>
__device__ __forceinline__ C plus(C a, C b) {
  if constexpr (std::is_integral_v<C>) {
    return wrapping_add(a, b);
  } else {
    return a + b;
  }
}
template <class C>
__device__ __forceinline__ C times(C a, C b) {
  if constexpr (std::is_integral_v<C>) {
    return wrapping_multiply(a, b);
  } else {
    return a * b;
  }
}

/// Joins two results.
struct Join {
  int kind;
  template <class Total>
  __device__ __forceinline__ Total operator()(Total a, Total b) const {
    switch (kind) {
      case kFoldProduct:
        return times(a, b);
      case kFoldMax:
      case kFoldMaxAbs:
        return Largest{}(a, b);
      case kFoldMin:
      case kFoldMinAbs:
        return Smallest{}(a, b);
      default:
        return plus(a, b);
    }
  }
};

/// Whether the sum of a block in float32 is to be taken again in float64: it overflowed, or its terms may have been
/// subnormal, `powers` of the elements, and lost more digits than the sum's rounding.
__device__ __forceinline__ bool left_range(float sum, bool powers) {
  using Limits = std::numeric_limits<float>;
  return (powers && sum < kBlockElements * Limits::min()) || !(std::fabs(sum) <= Limits::max());
}

// fold(acc, v, shift): v[u][j] goes into acc[j], for each u; shift[j] belongs to it. again(sum, x, shift): the same for
// one element in float64, after spoilt() of a block's result.
struct FoldSum {
  static constexpr bool kShifted = false;
  __host__ __device__ constexpr int kind() const { return kFoldSum; }
  __device__ constexpr bool slow() const { return false; }
  __host__ __device__ constexpr const double* shift() const { return nullptr; }
  __device__ __forceinline__ bool spoilt(float sum) const { return left_range(sum, false); }
  __device__ __forceinline__ double again(double sum, double x, double) const { return sum + x; }
  template <int m, int n, class C, class Shift>
  __device__ __forceinline__ void fold(C* acc, const C (&v)[m][n], const Shift&) const {
#pragma unroll
    for (int u = 0; u < m; ++u) {
#pragma unroll
      for (int j = 0; j < n; ++j) acc[j] += v[u][j];
    }
  }
};
/// The others share their kernels: which it is, is asked once for some packs.
class FoldAny {
 public:
  static constexpr bool kShifted = true;
  FoldAny(int kind, double p, const double* shift) : kind_(kind), p_(p), shift_(shift) {}
  __host__ __device__ int kind() const { return kind_; }
  /// Takes so long that it isn't worth its code to do several at once.
  __device__ bool slow() const { return kind_ == kFoldPowers || kind_ == kFoldExponentials; }
  __host__ __device__ const double* shift() const { return shift_; }
  __device__ __forceinline__ bool spoilt(float sum) const {
    const bool powers = kind_ == kFoldSquares || kind_ == kFoldDistances || kind_ == kFoldPowers;
    return (powers || kind_ == kFoldSum || kind_ == kFoldAbs) && left_range(sum, powers);
  }
  __device__ __forceinline__ double again(double sum, double x, double shift) const {
    switch (kind_) {
      case kFoldSum:
        return sum + x;
      case kFoldAbs:
        return sum + std::fabs(x);
      case kFoldPowers:
        return sum + std::pow(std::fabs(x), p_);
      default:  // squares have a shift of 0
        return sum + (x - shift) * (x - shift);
    }
  }
  template <int m, int n, class C, class Shift>
  __device__ __forceinline__ void fold(C* acc, const C (&v)[m][n], const Shift& shift) const {
    const auto each = [&](auto f) {
#pragma unroll
      for (int u = 0; u < m; ++u) {
#pragma unroll
        for (int j = 0; j < n; ++j) acc[j] = f(acc[j], v[u][j], shift[j]);
      }
    };
    if constexpr (std::is_integral_v<C>) {
      switch (kind_) {
        case kFoldSum:
          return each([](C a, C x, C) { return wrapping_add(a, x); });
        case kFoldProduct:
          return each([](C a, C x, C) { return wrapping_multiply(a, x); });
        case kFoldMax:
          return each([](C a, C x, C) { return a > x ? a : x; });
        case kFoldMin:
          return each([](C a, C x, C) { return a < x ? a : x; });
        default:
          return each([](C a, C x, C) { return a + (x != 0 ? 1 : 0); });
      }
    } else {
      switch (kind_) {
        case kFoldMax:
          return each([](C a, C x, C) { return Largest{}(a, x); });
        case kFoldMin:
          return each([](C a, C x, C) { return Smallest{}(a, x); });
        case kFoldNonzero:
          return each([](C a, C x, C) { return a + (x != 0 ? C(1) : C(0)); });
        case kFoldAbs:
          return each([](C a, C x, C) { return a + std::fabs(x); });
        case kFoldSquares:
          return each([](C a, C x, C) { return a + x * x; });
        case kFoldDistances:
          return each([](C a, C x, C s) { return a + (x - s) * (x - s); });
        default:
          if constexpr (n == 1) fold_single<m == 1>(each);
      }
    }
  }

 private:
  // What has no kernel that reads packs; `kOne`: comes alone, as what is slow does.
  template <bool kOne, class Each>
  __device__ __forceinline__ void fold_single(const Each& each) const {
    switch (kind_) {
      case kFoldSum:
        return each([](auto a, auto x, auto) { return a + x; });
      case kFoldProduct:
        return each([](auto a, auto x, auto) { return a * x; });
      case kFoldMaxAbs:
        return each([](auto a, auto x, auto) { return Largest{}(a, std::fabs(x)); });
      case kFoldMinAbs:
        return each([](auto a, auto x, auto) { return Smallest{}(a, std::fabs(x)); });
      case kFoldEqual:
        return each([](auto a, auto x, auto s) {
          return a + (x == s || (x != x && s != s) ? decltype(a)(1) : decltype(a)(0));
        });
      case kFoldEqualAbs:
        return each([](auto a, auto x, auto s) {
          return a + (std::fabs(x) == s || (x != x && s != s) ? decltype(a)(1) : decltype(a)(0));
        });
      case kFoldPowers:
        if constexpr (kOne) {
          each([power = p_](auto a, auto x, auto) {
            return a + std::pow(std::fabs(x), static_cast<decltype(x)>(power));
          });
        }
        return;
      default:
        if constexpr (kOne) each([](auto a, auto x, auto s) { return a + std::exp(x - s); });
    }
  }

  int kind_;
  double p_;
  const double* shift_;  ///< one a result, row-major
};

}  // namespace reduction

}  // namespace hscuda
