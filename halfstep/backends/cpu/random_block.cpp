// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/random_block.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>
// after highway.h
#include <hwy/contrib/math/math-inl.h>

#include <bit>

#include "halfstep/backends/cpu/random_block.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace random_detail {

using Tag64 = hn::ScalableTag<std::uint64_t>;
using Tag32 = hn::Repartition<std::uint32_t, Tag64>;
using TagF64 = hn::RebindToFloat<Tag64>;
using Vec64 = hn::Vec<Tag64>;
using VecF64 = hn::Vec<TagF64>;

constexpr std::uint64_t kLow = 0xffffffffu;

// A block in each lane, as two words in each of two vectors: the first in the low half.
struct WordPairs {
  Vec64 a, b;
};
HWY_INLINE WordPairs word_pairs(Vec64 block, PhiloxState state) {
  const Tag64 d;
  const Tag32 words;
  // Only the low halves of the lanes count until the end.
  const auto product = [&](std::uint32_t factor, Vec64 x)
                           HWY_ATTR { return hn::MulEven(hn::Set(words, factor), hn::BitCast(words, x)); };
  Vec64 c0 = block, c1 = hn::ShiftRight<32>(block), c2 = hn::Zero(d), c3 = hn::Zero(d);
  auto k0 = static_cast<std::uint32_t>(state.seed), k1 = static_cast<std::uint32_t>(state.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Vec64 p0 = product(0xd2511f53u, c0), p1 = product(0xcd9e8d57u, c2);
    c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), c1), hn::Set(d, k0));
    c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), c3), hn::Set(d, k1));
    c1 = p1;
    c3 = p0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  const Vec64 low = hn::Set(d, kLow);
  return {hn::Or(hn::And(c0, low), hn::ShiftLeft<32>(c1)), hn::Or(hn::And(c2, low), hn::ShiftLeft<32>(c3))};
}

// Taylor series of cos(x) and sin(x) / x in powers of -x^2; what follows them is below 2^-58 for |x| <= pi / 4.
struct Series {
  double c[9];
};
constexpr Series taylor(int first) {
  Series series{};
  double factorial = 1;  // exact up to 18!
  for (int k = 0, n = 1; k < 9; ++k) {
    for (; n <= 2 * k + first; ++n) factorial *= n;
    series.c[k] = 1 / factorial;
  }
  return series;
}
constexpr Series kCosine = taylor(0), kSine = taylor(1);

HWY_INLINE VecF64 evaluate(VecF64 minus_square, const Series& series) {
  const TagF64 f;
  VecF64 sum = hn::Set(f, series.c[8]);
  for (int k = 7; k >= 0; --k) sum = hn::MulAdd(sum, minus_square, hn::Set(f, series.c[k]));
  return sum;
}

struct Normals {
  VecF64 first, second;
};
// normal_pair() of core/box_muller.h.
HWY_INLINE Normals normals(Vec64 pair) {
  const Tag64 d;
  const TagF64 f;
  const Vec64 word0 = hn::And(pair, hn::Set(d, kLow)), word1 = hn::ShiftRight<32>(pair);
  // Integers below 2^52 (of either sign for the second) become doubles by their place in the significand.
  const VecF64 radius_word =
      hn::Sub(hn::BitCast(f, hn::Or(word0, hn::Set(d, 0x4330000000000000u))), hn::Set(f, 0x1p52));
  const VecF64 logarithm = hn::Log(f, hn::Mul(hn::Add(radius_word, hn::Set(f, 1.0)), hn::Set(f, 0x1p-32)));
  const VecF64 radius = hn::Sqrt(hn::Mul(hn::Set(f, -2.0), logarithm));
  const Vec64 quarters = hn::ShiftRight<30>(hn::Add(word1, hn::Set(d, std::uint64_t{1} << 29)));  // 0 to 4
  const Vec64 remainder = hn::Sub(word1, hn::ShiftLeft<30>(quarters));
  const VecF64 scaled =
      hn::Sub(hn::BitCast(f, hn::Add(remainder, hn::Set(d, 0x4338000000000000u))), hn::Set(f, 0x1.8p52));
  const VecF64 theta = hn::Mul(scaled, hn::Set(f, 3.14159265358979323846 * 0x1p-31));
  const VecF64 minus_square = hn::Neg(hn::Mul(theta, theta));
  const VecF64 x = hn::Mul(radius, evaluate(minus_square, kCosine));
  const VecF64 y = hn::Mul(radius, hn::Mul(theta, evaluate(minus_square, kSine)));
  // Turned by as many right angles.
  const auto odd = hn::MaskFromVec(hn::BitCast(f, hn::Sub(hn::Zero(d), hn::And(quarters, hn::Set(d, 1)))));
  const Vec64 two = hn::Set(d, 2);
  const Vec64 first_sign = hn::ShiftLeft<62>(hn::And(hn::Add(quarters, hn::Set(d, 1)), two));
  const Vec64 second_sign = hn::ShiftLeft<62>(hn::And(quarters, two));
  return {hn::Xor(hn::IfThenElse(odd, y, x), hn::BitCast(f, first_sign)),
          hn::Xor(hn::IfThenElse(odd, x, y), hn::BitCast(f, second_sign))};
}

// Calls f(words, place) for a vector of blocks at a time; `place` has room for a whole vector's results.
template <class T, class F>
HWY_INLINE void for_blocks(PhiloxState state, std::uint64_t first, std::int64_t blocks, T* results, F&& f) {
  const Tag64 d;
  const auto n = static_cast<std::int64_t>(hn::Lanes(d));
  const auto at = [&](std::int64_t i) HWY_ATTR {
    return word_pairs(hn::Iota(d, state.offset + first + static_cast<std::uint64_t>(i)), state);
  };
  std::int64_t i = 0;
  for (; i + n <= blocks; i += n) f(at(i), results + 4 * i);
  if (i < blocks) {
    HWY_ALIGN T rest[4 * hn::MaxLanes(Tag64())];
    f(at(i), rest);
    for (std::int64_t j = 0; j < 4 * (blocks - i); ++j) results[4 * i + j] = rest[j];
  }
}

HWY_INLINE void store_words(WordPairs pairs, std::uint32_t* words) {
  // The lower half of a lane comes first in memory.
  static_assert(std::endian::native == std::endian::little);
  hn::StoreInterleaved2(pairs.a, pairs.b, Tag64(), reinterpret_cast<std::uint64_t*>(words));
}
HWY_INLINE void store_normals(WordPairs pairs, double* results) {
  const Normals a = normals(pairs.a), b = normals(pairs.b);
  hn::StoreInterleaved4(a.first, a.second, b.first, b.second, TagF64(), results);
}

}  // namespace random_detail

void words_of_blocks(PhiloxState state, std::uint64_t first, std::int64_t blocks, std::uint32_t* words) {
  random_detail::for_blocks(state, first, blocks, words, random_detail::store_words);
}
void normals_of_blocks(PhiloxState state, std::uint64_t first, std::int64_t blocks, double* results) {
  random_detail::for_blocks(state, first, blocks, results, random_detail::store_normals);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(words_of_blocks);
HWY_EXPORT(normals_of_blocks);

void random_words(PhiloxState state, std::uint64_t first, std::int64_t blocks, std::uint32_t* words) {
  HWY_DYNAMIC_DISPATCH(words_of_blocks)(state, first, blocks, words);
}
void random_normals(PhiloxState state, std::uint64_t first, std::int64_t blocks, double* normals) {
  HWY_DYNAMIC_DISPATCH(normals_of_blocks)(state, first, blocks, normals);
}

}  // namespace halfstep::cpu
#endif
