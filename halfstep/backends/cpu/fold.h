// SPDX-License-Identifier: Apache-2.0
// What reductions fold, and how a block of elements is folded.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace halfstep::cpu::fold {

template <class C>
using Vec [[gnu::vector_size(32)]] = C;

/// Which results float32 may have spoilt where float64 has room for them.
enum class Terms {
  kept,      ///< none
  elements,  ///< an overflow of the sum
  powers     ///< one of a term, or terms that were subnormal and so lost digits
};
/// What is folded: `fold` takes an element (or a vector of them) into an accumulator, `combine` joins two results (or
/// vectors of them).
/// `shift` is a number that goes with the output.
struct Folded {
  static constexpr bool kScalar = false;
  static constexpr Terms kTerms = Terms::kept;
};
struct Sum : Folded {
  static constexpr double kInit = 0;
  static constexpr Terms kTerms = Terms::elements;
  template <class V>
  V fold(V acc, V x, V) const {
    return acc + x;
  }
  template <class V>
  V combine(V a, V b) const {
    return a + b;
  }
};
template <class V>
V absolute(V x) {
  return x < 0 ? -x : x;
}
struct SumAbs : Sum {
  template <class V>
  V fold(V acc, V x, V) const {
    return acc + absolute(x);
  }
};
struct SumSquares : Sum {
  static constexpr Terms kTerms = Terms::powers;
  template <class V>
  V fold(V acc, V x, V) const {
    return acc + x * x;
  }
};
/// Second pass of the variance.
struct SumSquaredDistances : Sum {
  static constexpr Terms kTerms = Terms::powers;
  template <class V>
  V fold(V acc, V x, V shift) const {
    return acc + (x - shift) * (x - shift);
  }
};
struct CountNonzero : Sum {
  static constexpr bool kScalar = true;
  static constexpr Terms kTerms = Terms::kept;
  template <class V>
  V fold(V acc, V x, V) const {
    return acc + (x != 0 ? V(1) : V(0));
  }
};
struct SumPowers : Sum {
  static constexpr bool kScalar = true;
  static constexpr Terms kTerms = Terms::powers;
  double p;
  template <class V>
  V fold(V acc, V x, V) const {
    return acc + std::pow(std::abs(x), static_cast<V>(p));
  }
};
/// Second pass of logsumexp; the shift is the largest element.
struct SumExponentials : Sum {
  static constexpr bool kScalar = true;
  static constexpr Terms kTerms = Terms::kept;
  template <class V>
  V fold(V acc, V x, V shift) const {
    return acc + std::exp(x - shift);
  }
};
struct Product : Folded {
  static constexpr double kInit = 1;
  template <class V>
  V fold(V acc, V x, V) const {
    return acc * x;
  }
  template <class V>
  V combine(V a, V b) const {
    return a * b;
  }
};
/// NaN wins over everything, as in PyTorch.
struct Max : Folded {
  static constexpr double kInit = -std::numeric_limits<double>::infinity();
  template <class V>
  V fold(V acc, V x, V) const {
    const V larger = acc > x ? acc : x;  // x where either is NaN
    return acc != acc ? acc : larger;
  }
  template <class V>
  V combine(V a, V b) const {
    return fold(a, b, b);
  }
};
struct Min : Folded {
  static constexpr double kInit = std::numeric_limits<double>::infinity();
  template <class V>
  V fold(V acc, V x, V) const {
    const V smaller = acc < x ? acc : x;
    return acc != acc ? acc : smaller;
  }
  template <class V>
  V combine(V a, V b) const {
    return fold(a, b, b);
  }
};
struct MaxAbs : Max {
  static constexpr double kInit = 0;
  template <class V>
  V fold(V acc, V x, V) const {
    return Max::fold(acc, absolute(x), x);
  }
};
struct MinAbs : Min {
  template <class V>
  V fold(V acc, V x, V) const {
    return Min::fold(acc, absolute(x), x);
  }
};

/// The lanes of four accumulators, joined in float64 as a tree.
template <class Op, class C>
double join_lanes(const Op& op, const Vec<C>* acc) {
  constexpr int kLanes = 32 / sizeof(C), kWide = 4, kParts = kLanes / kWide;
  Vec<double> joined[4 * kParts];
  for (int k = 0; k < 4 * kParts; ++k) {
    for (int l = 0; l < kWide; ++l) joined[k][l] = static_cast<double>(acc[k / kParts][k % kParts * kWide + l]);
  }
  for (int n = 2 * kParts; n > 0; n /= 2) {
    for (int k = 0; k < n; ++k) joined[k] = op.combine(joined[k], joined[k + n]);
  }
  const Vec<double> last = joined[0];
  return op.combine(op.combine(double{last[0]}, double{last[2]}), op.combine(double{last[1]}, double{last[3]}));
}

template <class Op, class C>
double fold_straight(const Op& op, const C* x, std::int64_t n, C shift) {
  if constexpr (!Op::kScalar) {
    constexpr int kLanes = 32 / sizeof(C);
    double total = Op::kInit;
    std::int64_t i = 0;
    if (n >= 4 * kLanes) {
      using V = Vec<C>;
      const V shifts = V{} + shift, first = V{} + static_cast<C>(Op::kInit);
      V acc[4] = {first, first, first, first};
      for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int k = 0; k < 4; ++k) {
          V v;
          std::memcpy(&v, x + i + k * kLanes, sizeof v);
          acc[k] = op.fold(acc[k], v, shifts);
        }
      }
      total = join_lanes<Op, C>(op, acc);
    }
    C rest = static_cast<C>(Op::kInit);
    for (; i < n; ++i) rest = op.fold(rest, x[i], shift);
    return op.combine(total, static_cast<double>(rest));
  } else {
    double total = Op::kInit;
    for (std::int64_t i = 0; i < n; i += 64) {
      C part = static_cast<C>(Op::kInit);
      for (std::int64_t j = i; j < std::min(i + 64, n); ++j) part = op.fold(part, x[j], shift);
      total = op.combine(total, static_cast<double>(part));
    }
    return total;
  }
}

/// Whether the sum of n terms in float32 is to be taken again in float64. Below n times the smallest normal number the
/// digits that subnormal terms lack may be more than a rounding of the sum.
template <class Op, class V>
bool spoilt(V total, std::int64_t n) {
  const V least = Op::kTerms == Terms::powers ? static_cast<V>(n) * V{std::numeric_limits<float>::min()}
                                              : std::numeric_limits<V>::lowest();
  return !((total >= least) & (total <= std::numeric_limits<V>::max()));
}
/// Whether no element differs from the shift, as in a row of zeros, whose sum of 0 is right.
inline bool all_equal(const float* x, std::int64_t n, float shift) {
  int differ = 0;
  for (std::int64_t i = 0; i < n; ++i) differ |= x[i] != shift;
  return differ == 0;
}

/// A block in float64, after float32 has spoilt its total.
template <class Op>
[[gnu::noinline]] double fold_again(const Op& op, const float* x, std::int64_t n, float shift, double total) {
  if (total == 0 && all_equal(x, n, shift)) return total;
  constexpr std::int64_t kWide = 512;
  double wide[kWide];
  total = Op::kInit;
  for (std::int64_t i = 0; i < n; i += kWide) {
    const std::int64_t part = std::min(kWide, n - i);
    std::copy_n(x + i, part, wide);
    total = op.combine(total, fold_straight(op, static_cast<const double*>(wide), part, static_cast<double>(shift)));
  }
  return total;
}
/// One block of contiguous elements.
template <class Op, class C>
double fold_block(const Op& op, const C* x, std::int64_t n, C shift) {
  const double total = fold_straight(op, x, n, shift);
  if constexpr (std::is_same_v<C, float> && Op::kTerms != Terms::kept) {
    if (spoilt<Op>(total, n)) return fold_again(op, x, n, shift, total);
  }
  return total;
}

}  // namespace halfstep::cpu::fold
