// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/data/detection_kernels.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "halfstep/data/detection_kernels_internal.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::data {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// OpenCV's tables for 8-bit hue and saturation: 255 / i and 180 / (6 i), with 12 bits behind the point.
struct HsvDivisors {
  std::int32_t saturation[256] = {}, hue[256] = {};
  HsvDivisors() {
    for (int i = 1; i < 256; ++i) {
      saturation[i] = static_cast<std::int32_t>(std::lrint((255 << 12) / static_cast<double>(i)));
      hue[i] = static_cast<std::int32_t>(std::lrint((180 << 12) / (6.0 * i)));
    }
  }
};

// Kernels work on whole vectors: what is left over at the end of a row goes through a vector of its own.
template <class D, class Run>
HWY_INLINE void for_words(D d, std::uint32_t* words, std::int64_t n, const Run& run) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(run(hn::LoadU(d, words + i), i), d, words + i);
  if (i == n) return;
  HWY_ALIGN std::uint32_t rest[hn::MaxLanes(d)] = {};
  std::memcpy(rest, words + i, static_cast<std::size_t>(n - i) * sizeof *words);
  hn::Store(run(hn::Load(d, rest), i), d, rest);
  std::memcpy(words + i, rest, static_cast<std::size_t>(n - i) * sizeof *words);
}

void sample_pixels(const std::uint8_t* picture, std::int64_t stride, std::int64_t width, std::int64_t height,
                   const std::int32_t* xs, const std::int32_t* ys, std::int64_t n, std::uint32_t* out) {
  const hn::ScalableTag<std::uint32_t> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Repartition<std::uint16_t, decltype(d)> d16;
  const auto* base = reinterpret_cast<const std::int32_t*>(picture);
  const auto zero = hn::Zero(di);
  const auto last_x = hn::Set(di, static_cast<std::int32_t>(width - 1)),
             last_y = hn::Set(di, static_cast<std::int32_t>(height - 1));
  const auto row = hn::Set(di, static_cast<std::int32_t>(stride));
  const auto one = hn::Set(di, 1), byte = hn::Set(di, 255);
  const auto bytes = hn::Set(d, 0x00FF00FFU);
  const auto half = hn::Set(d16, std::uint16_t{128}), whole = hn::Set(d16, std::uint16_t{256});
  // Red and blue of a pixel are two numbers of 16 bits in a word, and so are green and what is above it.
  const auto pair = [&](auto w) { return hn::BitCast(d16, hn::Or(w, hn::ShiftLeft<16>(w))); };
  const auto between = [&](auto a, auto b, auto wa, auto wb) {
    return hn::ShiftRight<8>(hn::Add(hn::Add(hn::Mul(a, wa), hn::Mul(b, wb)), half));
  };
  const auto low = [&](auto p) { return hn::BitCast(d16, hn::And(hn::BitCast(d, p), bytes)); };
  const auto high = [&](auto p) { return hn::BitCast(d16, hn::And(hn::ShiftRight<8>(hn::BitCast(d, p)), bytes)); };
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto run = [&](auto px, auto py) {
    const auto x = hn::Min(hn::Max(px, zero), hn::ShiftLeft<kPlaceBits>(last_x));
    const auto y = hn::Min(hn::Max(py, zero), hn::ShiftLeft<kPlaceBits>(last_y));
    const auto x0 = hn::ShiftRight<kPlaceBits>(x), y0 = hn::ShiftRight<kPlaceBits>(y);
    const auto x1 = hn::Min(hn::Add(x0, one), last_x), y1 = hn::Min(hn::Add(y0, one), last_y);
    const auto upper = hn::Mul(y0, row), lower = hn::Mul(y1, row);
    const auto left = hn::Add(hn::Add(x0, x0), x0), right = hn::Add(hn::Add(x1, x1), x1);
    const auto p00 = hn::GatherOffset(di, base, hn::Add(upper, left));
    const auto p01 = hn::GatherOffset(di, base, hn::Add(upper, right));
    const auto p10 = hn::GatherOffset(di, base, hn::Add(lower, left));
    const auto p11 = hn::GatherOffset(di, base, hn::Add(lower, right));
    const auto wx = pair(hn::BitCast(d, hn::And(hn::ShiftRight<kPlaceBits - 8>(x), byte)));
    const auto wy = pair(hn::BitCast(d, hn::And(hn::ShiftRight<kPlaceBits - 8>(y), byte)));
    const auto rest_x = hn::Sub(whole, wx), rest_y = hn::Sub(whole, wy);
    const auto red_blue =
        between(between(low(p00), low(p01), rest_x, wx), between(low(p10), low(p11), rest_x, wx), rest_y, wy);
    const auto green =
        between(between(high(p00), high(p01), rest_x, wx), between(high(p10), high(p11), rest_x, wx), rest_y, wy);
    return hn::Or(hn::BitCast(d, red_blue), hn::ShiftLeft<8>(hn::BitCast(d, green)));
  };
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(run(hn::LoadU(di, xs + i), hn::LoadU(di, ys + i)), d, out + i);
  if (i == n) return;
  HWY_ALIGN std::int32_t rest_xs[hn::MaxLanes(di)] = {}, rest_ys[hn::MaxLanes(di)] = {};
  HWY_ALIGN std::uint32_t rest[hn::MaxLanes(d)];
  std::memcpy(rest_xs, xs + i, static_cast<std::size_t>(n - i) * sizeof *xs);
  std::memcpy(rest_ys, ys + i, static_cast<std::size_t>(n - i) * sizeof *ys);
  hn::Store(run(hn::Load(di, rest_xs), hn::Load(di, rest_ys)), d, rest);
  std::memcpy(out + i, rest, static_cast<std::size_t>(n - i) * sizeof *out);
}

void change_hsv(std::uint32_t* pixels, std::int64_t n, const HsvTables& tables) {
  static const HsvDivisors divisors;
  const hn::ScalableTag<std::uint32_t> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::RebindToFloat<decltype(d)> df;
  const auto byte = hn::Set(di, 255), zero = hn::Zero(di);
  const auto half = hn::Set(di, 1 << 11);
  const auto f0 = hn::Zero(df), f1 = hn::Set(df, 1.0F), f4 = hn::Set(df, 4.0F), f6 = hn::Set(df, 6.0F);
  for_words(d, pixels, n, [&](auto words, std::int64_t) {
    const auto v = hn::BitCast(di, words);
    const auto r = hn::And(v, byte), g = hn::And(hn::ShiftRight<8>(v), byte), b = hn::And(hn::ShiftRight<16>(v), byte);
    const auto most = hn::Max(hn::Max(r, g), b), least = hn::Min(hn::Min(r, g), b);
    const auto range = hn::Sub(most, least), twice = hn::Add(range, range);
    const auto is_red = hn::Eq(most, r), is_green = hn::Eq(most, g);
    const auto green_case = hn::Add(hn::Sub(b, r), twice);
    const auto blue_case = hn::Add(hn::Sub(r, g), hn::Add(twice, twice));
    const auto sector = hn::IfThenElse(is_red, hn::Sub(g, b), hn::IfThenElse(is_green, green_case, blue_case));
    const auto s = hn::ShiftRight<12>(hn::Add(hn::Mul(range, hn::GatherIndex(di, divisors.saturation, most)), half));
    auto h = hn::ShiftRight<12>(hn::Add(hn::Mul(sector, hn::GatherIndex(di, divisors.hue, range)), half));
    h = hn::Add(h, hn::IfThenElseZero(hn::Lt(h, zero), hn::Set(di, 180)));
    const auto hue = hn::ConvertTo(df, hn::GatherIndex(di, tables.hue.data(), h));
    const auto saturation =
        hn::Mul(hn::ConvertTo(df, hn::GatherIndex(di, tables.saturation.data(), s)), hn::Set(df, 1.0F / 255));
    const auto value = hn::ConvertTo(df, hn::GatherIndex(di, tables.value.data(), most));
    // A colour at k of six sixths from its own has value * (1 - saturation * clamp(min(k, 4 - k), 0, 1)).
    const auto sixth = hn::Mul(hue, hn::Set(df, 1.0F / 30));
    const auto depth = hn::Mul(value, saturation);
    const auto colour = [&](float start) {
      auto k = hn::Add(sixth, hn::Set(df, start));
      k = hn::Sub(k, hn::IfThenElseZero(hn::Ge(k, f6), f6));
      const auto share = hn::Min(hn::Max(hn::Min(k, hn::Sub(f4, k)), f0), f1);
      const auto c = hn::NearestInt(hn::Sub(value, hn::Mul(depth, share)));
      return hn::BitCast(d, hn::Min(hn::Max(c, zero), byte));
    };
    return hn::Or(hn::Or(colour(5), hn::ShiftLeft<8>(colour(3))), hn::ShiftLeft<16>(colour(1)));
  });
}

void mix_pixels(std::uint32_t* pixels, const std::uint32_t* others, std::int64_t n, std::uint32_t share) {
  auto* to = reinterpret_cast<std::uint8_t*>(pixels);
  const auto* from = reinterpret_cast<const std::uint8_t*>(others);
  const std::uint32_t rest = 65536 - share;
  for (std::int64_t i = 0; i < 4 * n; ++i) {
    to[i] = static_cast<std::uint8_t>((to[i] * share + from[i] * rest + 32768) >> 16);
  }
}

void pack_pixels(const std::uint32_t* pixels, std::int64_t n, std::uint8_t* out) {
  const hn::FixedTag<std::uint8_t, 16> d;
  alignas(16) static constexpr std::uint8_t kPacked[16] = {0,  1,  2,  4,  5,    6,    8,    9,
                                                           10, 12, 13, 14, 0x80, 0x80, 0x80, 0x80};
  const auto packed = hn::Load(d, kPacked);
  const auto* from = reinterpret_cast<const std::uint8_t*>(pixels);
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) hn::StoreU(hn::TableLookupBytesOr0(hn::LoadU(d, from + 4 * i), packed), d, out + 3 * i);
  for (; i < n; ++i) std::memcpy(out + 3 * i, from + 4 * i, 3);
}

template <class Store>
HWY_INLINE void to_units(const std::uint8_t* bytes, std::int64_t n, const Store& store) {
  const hn::ScalableTag<float> df;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<std::uint8_t, decltype(df)> d8;
  const auto all = hn::Set(df, 255.0F);
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(df));
  const auto unit = [&](auto v) { return hn::Div(hn::ConvertTo(df, hn::PromoteTo(di, v)), all); };
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store(unit(hn::LoadU(d8, bytes + i)), i, lanes);
  if (i == n) return;
  HWY_ALIGN std::uint8_t rest[hn::MaxLanes(df)] = {};
  std::memcpy(rest, bytes + i, static_cast<std::size_t>(n - i));
  store(unit(hn::Load(d8, rest)), i, n - i);
}

void bytes_to_units(const std::uint8_t* bytes, std::int64_t n, DType dtype, void* out) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<std::uint16_t, decltype(df)> d16;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(df));
  if (dtype == f32) {
    auto* to = static_cast<float*>(out);
    to_units(bytes, n, [&](auto v, std::int64_t i, std::int64_t count) {
      if (count == lanes) return hn::StoreU(v, df, to + i);
      HWY_ALIGN float rest[hn::MaxLanes(df)];
      hn::Store(v, df, rest);
      std::memcpy(to + i, rest, static_cast<std::size_t>(count) * sizeof *to);
    });
    return;
  }
  // Rounded to the nearest, halves to even, by hand: the values are 0, or normal numbers of either dtype.
  auto* to = static_cast<std::uint16_t*>(out);
  const bool brain = dtype == bf16;
  const auto rebias = hn::Set(du, brain ? 0U : 112U << 23);
  const auto below_half = hn::Set(du, brain ? 0x7FFFU : 0xFFFU), one = hn::Set(du, 1U);
  to_units(bytes, n, [&](auto v, std::int64_t i, std::int64_t count) {
    const auto bits = hn::BitCast(du, v);
    const auto moved = hn::IfThenZeroElse(hn::Eq(bits, hn::Zero(du)), hn::Sub(bits, rebias));
    const auto odd = hn::And(brain ? hn::ShiftRight<16>(moved) : hn::ShiftRight<13>(moved), one);
    const auto rounded = hn::Add(moved, hn::Add(below_half, odd));
    const auto words = brain ? hn::ShiftRight<16>(rounded) : hn::ShiftRight<13>(rounded);
    const auto narrow = hn::DemoteTo(d16, hn::BitCast(hn::RebindToSigned<decltype(du)>(), words));
    if (count == lanes) return hn::StoreU(narrow, d16, to + i);
    HWY_ALIGN std::uint16_t rest[hn::MaxLanes(d16)];
    hn::StoreU(narrow, d16, rest);
    std::memcpy(to + i, rest, static_cast<std::size_t>(count) * sizeof *to);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::data
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::data {

HWY_EXPORT(sample_pixels);
HWY_EXPORT(change_hsv);
HWY_EXPORT(mix_pixels);
HWY_EXPORT(pack_pixels);
HWY_EXPORT(bytes_to_units);

void sample_pixels(const std::uint8_t* picture, std::int64_t stride, std::int64_t width, std::int64_t height,
                   const std::int32_t* xs, const std::int32_t* ys, std::int64_t n, std::uint32_t* out) {
  HWY_DYNAMIC_DISPATCH(sample_pixels)(picture, stride, width, height, xs, ys, n, out);
}

HsvTables hsv_tables(double hue, double saturation, double value) {
  HsvTables tables{};
  for (int i = 0; i < 256; ++i) {
    const auto at = static_cast<std::size_t>(i);
    tables.hue[at] = static_cast<std::int32_t>(std::fmod(i * hue, 180.0));
    tables.saturation[at] = static_cast<std::int32_t>(std::min(i * saturation, 255.0));
    tables.value[at] = static_cast<std::int32_t>(std::min(i * value, 255.0));
  }
  return tables;
}

void change_hsv(std::uint32_t* pixels, std::int64_t n, const HsvTables& tables) {
  HWY_DYNAMIC_DISPATCH(change_hsv)(pixels, n, tables);
}

void mix_pixels(std::uint32_t* pixels, const std::uint32_t* others, std::int64_t n, std::uint32_t share) {
  HWY_DYNAMIC_DISPATCH(mix_pixels)(pixels, others, n, share);
}

void pack_pixels(const std::uint32_t* pixels, std::int64_t n, std::uint8_t* out) {
  HWY_DYNAMIC_DISPATCH(pack_pixels)(pixels, n, out);
}

void bytes_to_units(const std::uint8_t* bytes, std::int64_t n, DType dtype, void* out) {
  HWY_DYNAMIC_DISPATCH(bytes_to_units)(bytes, n, dtype, out);
}

}  // namespace halfstep::data
#endif
