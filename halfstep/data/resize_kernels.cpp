// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/data/resize_kernels.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "halfstep/data/resize_internal.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::data {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

[[maybe_unused]] constexpr std::int32_t kHalf = std::int32_t{1} << (kWeightBits - 1);

#if HWY_ARCH_X86

// On x86 this Highway operation is one instruction, which adds neighbouring products.
template <class D32, class V16, class V32>
HWY_INLINE V32 add_pairs(D32 d, V16 a, V16 b, V32 sum) {
  V32 unused = hn::Zero(d);
  return hn::ReorderWidenMulAccumulate(d, a, b, sum, unused);
}

void resize_row(const std::uint8_t* row, const std::int32_t* first, const std::int16_t* weights, std::int64_t outputs,
                std::int64_t groups, std::uint8_t* out) {
  const hn::FixedTag<std::uint8_t, 32> d8;
  const hn::FixedTag<std::int16_t, 16> d16;
  const hn::FixedTag<std::int32_t, 8> d32;
  const hn::FixedTag<std::int32_t, 4> half;
  // Four pixels r g b r g b ... become pairs of one colour, widened to 16 bits; 0x80 gives zero.
  alignas(32) static constexpr std::uint8_t kPairs[32] = {
      0, 0x80, 3, 0x80, 1, 0x80, 4,  0x80, 2, 0x80, 5,  0x80, 0x80, 0x80, 0x80, 0x80,
      6, 0x80, 9, 0x80, 7, 0x80, 10, 0x80, 8, 0x80, 11, 0x80, 0x80, 0x80, 0x80, 0x80};
  const auto pairs = hn::Load(d8, kPairs);
  const auto rounding = hn::Set(half, kHalf);
  for (std::int64_t o = 0; o < outputs; ++o) {
    const std::uint8_t* p = row + 3 * std::int64_t{first[o]};
    auto high = hn::Zero(d32), low = hn::Zero(d32);
    for (std::int64_t g = 0; g < groups; ++g) {
      const auto pixels = hn::BitCast(d16, hn::TableLookupBytesOr0(hn::LoadDup128(d8, p), pairs));
      high = add_pairs(d32, pixels, hn::LoadU(d16, weights), high);
      low = add_pairs(d32, pixels, hn::LoadU(d16, weights + 16), low);
      p += 12;
      weights += 32;
    }
    const auto sum = hn::Add(hn::ShiftLeft<8>(high), low);
    const auto both = hn::Add(hn::Add(hn::LowerHalf(half, sum), hn::UpperHalf(half, sum)), rounding);
    const hn::Rebind<std::uint8_t, decltype(half)> bytes;
    const auto pixel = hn::DemoteTo(bytes, hn::ShiftRight<kWeightBits>(both));
    hn::StoreU(pixel, bytes, out);
    out += 3;
  }
}

void resize_columns(const std::uint8_t* in, std::int64_t stride, std::int64_t rows, const std::int16_t* weights,
                    std::int64_t pairs, std::int64_t bytes, std::uint8_t* out) {
  const hn::ScalableTag<std::uint8_t> d8;
  const hn::ScalableTag<std::int16_t> d16;
  const hn::ScalableTag<std::int32_t> d32;
  constexpr std::int64_t kLanes = hn::MaxLanes(hn::ScalableTag<std::uint8_t>());
  alignas(16) static constexpr std::uint8_t kUnzip[16] = {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
  const auto unzip = hn::LoadDup128(d8, kUnzip);
  const auto zero = hn::Zero(d8);
  const auto rounding = hn::Set(d32, kHalf);
  for (std::int64_t j = 0; j < bytes; j += kLanes) {
    auto high0 = hn::Zero(d32), high1 = high0, high2 = high0, high3 = high0;
    auto low0 = high0, low1 = high0, low2 = high0, low3 = high0;
    for (std::int64_t k = 0; k < pairs; ++k) {
      const auto a = hn::LoadU(d8, in + std::min(2 * k, rows - 1) * stride + j);
      const auto b = hn::LoadU(d8, in + std::min(2 * k + 1, rows - 1) * stride + j);
      std::int32_t w[2];
      std::memcpy(w, weights + 4 * k, sizeof w);
      const auto high = hn::BitCast(d16, hn::Set(d32, w[0])), low = hn::BitCast(d16, hn::Set(d32, w[1]));
      const auto lower = hn::InterleaveLower(d8, a, b), upper = hn::InterleaveUpper(d8, a, b);
      const auto p0 = hn::BitCast(d16, hn::InterleaveLower(d8, lower, zero));
      const auto p1 = hn::BitCast(d16, hn::InterleaveUpper(d8, lower, zero));
      const auto p2 = hn::BitCast(d16, hn::InterleaveLower(d8, upper, zero));
      const auto p3 = hn::BitCast(d16, hn::InterleaveUpper(d8, upper, zero));
      high0 = add_pairs(d32, p0, high, high0);
      high1 = add_pairs(d32, p1, high, high1);
      high2 = add_pairs(d32, p2, high, high2);
      high3 = add_pairs(d32, p3, high, high3);
      low0 = add_pairs(d32, p0, low, low0);
      low1 = add_pairs(d32, p1, low, low1);
      low2 = add_pairs(d32, p2, low, low2);
      low3 = add_pairs(d32, p3, low, low3);
    }
    const auto finish = [&](auto high, auto low) {
      return hn::ShiftRight<kWeightBits>(hn::Add(hn::Add(hn::ShiftLeft<8>(high), low), rounding));
    };
    const auto clamp = [&](auto v) {
      return hn::BitCast(d8, hn::Min(hn::Max(v, hn::Zero(d16)), hn::Set(d16, std::int16_t{255})));
    };
    // Everything above stays inside blocks of 16 bytes, and so do these.
    const auto first = clamp(hn::ReorderDemote2To(d16, finish(high0, low0), finish(high1, low1)));
    const auto second = clamp(hn::ReorderDemote2To(d16, finish(high2, low2), finish(high3, low3)));
    const auto zipped = hn::Or(first, hn::BitCast(d8, hn::ShiftLeft<8>(hn::BitCast(d16, second))));
    const auto result = hn::TableLookupBytes(zipped, unzip);
    if (j + kLanes <= bytes) {
      hn::StoreU(result, d8, out + j);
    } else {
      alignas(64) std::uint8_t rest[kLanes];
      hn::Store(result, d8, rest);
      std::memcpy(out + j, rest, static_cast<std::size_t>(bytes - j));
    }
  }
}

#else

std::uint8_t rounded(std::int64_t sum) {
  return static_cast<std::uint8_t>(std::clamp<std::int64_t>((sum + kHalf) >> kWeightBits, 0, 255));
}

void resize_row(const std::uint8_t* row, const std::int32_t* first, const std::int16_t* weights, std::int64_t outputs,
                std::int64_t groups, std::uint8_t* out) {
  for (std::int64_t o = 0; o < outputs; ++o, weights += 32 * groups) {
    for (int c = 0; c < 3; ++c) {
      std::int64_t sum = 0;
      for (std::int64_t t = 0; t < 4 * groups; ++t) {
        const std::int16_t* w = weights + t / 4 * 32 + t % 4 / 2 * 8 + t % 2;
        const std::int64_t weight = 256 * std::int64_t{w[0]} + w[16];
        if (weight != 0) sum += weight * row[3 * (first[o] + t) + c];
      }
      out[3 * o + c] = rounded(sum);
    }
  }
}

void resize_columns(const std::uint8_t* in, std::int64_t stride, std::int64_t rows, const std::int16_t* weights,
                    std::int64_t pairs, std::int64_t bytes, std::uint8_t* out) {
  for (std::int64_t j = 0; j < bytes; ++j) {
    std::int64_t sum = 0;
    for (std::int64_t k = 0; k < 2 * pairs; ++k) {
      const std::int16_t* w = weights + k / 2 * 4 + k % 2;
      sum += (256 * std::int64_t{w[0]} + w[2]) * in[std::min(k, rows - 1) * stride + j];
    }
    out[j] = rounded(sum);
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::data
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::data {

HWY_EXPORT(resize_row);
HWY_EXPORT(resize_columns);

void resize_row(const std::uint8_t* row, const std::int32_t* first, const std::int16_t* weights, std::int64_t outputs,
                std::int64_t groups, std::uint8_t* out) {
  HWY_DYNAMIC_DISPATCH(resize_row)(row, first, weights, outputs, groups, out);
}

void resize_columns(const std::uint8_t* in, std::int64_t stride, std::int64_t rows, const std::int16_t* weights,
                    std::int64_t pairs, std::int64_t bytes, std::uint8_t* out) {
  HWY_DYNAMIC_DISPATCH(resize_columns)(in, stride, rows, weights, pairs, bytes, out);
}

}  // namespace halfstep::data
#endif
