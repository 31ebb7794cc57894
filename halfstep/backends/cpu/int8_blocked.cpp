// SPDX-License-Identifier: Apache-2.0
// Products of integers without units for 8 bits: operands are widened to 16 bits (the input without its zero point),
// whose products are summed in pairs in 32 bits, which is exact. oneDNN's kernels for such processors sum pairs of
// products in 16 bits, which saturates. Depthwise convolutions are computed in float32, where sums of so few products
// are exact too.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/int8_blocked.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "halfstep/backends/cpu/int8_product.h"
#include "halfstep/backends/cpu/math-inl.h"
#include "halfstep/backends/cpu/simd-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_INT8_BLOCKED_
#define HALFSTEP_BACKENDS_CPU_INT8_BLOCKED_
namespace halfstep::cpu {
/// Rows of a tile, and output channels of a block of packed weights.
struct Int8TileSizes {
  std::int64_t rows, columns;
};
/// The largest window of a depthwise convolution: products whose sum float32 holds.
inline constexpr std::int64_t kDepthwiseTaps = (1 << 24) / (255 * 128);
/// Places of the result next to each other times some output channels that follow each other.
struct Int8Tile {
  const Int8Call* call;
  const std::int16_t* a;  ///< [rows of a tile, pairs, 2]
  const std::int16_t* b;  ///< [pairs, columns of a block, 2]
  std::int64_t pairs;
  std::int64_t place, rows;      ///< of the result, that are wanted
  std::int64_t output, columns;  ///< likewise
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

using SumTag = hn::RebindToSigned<F32Tag>;
using SumVec = hn::Vec<SumTag>;
using PairTag = hn::ScalableTag<std::int16_t>;

// 16 sums of 32 registers, or 8 of 16: with 24 or 12 the compiler has too few for products (half as long again).
constexpr int kTileRows = HWY_TARGET == HWY_AVX2 ? 4 : 8;
constexpr int kTileVectors = 2;

// n bytes as float32.
template <class T>
HWY_INLINE F32Vec bytes_as_floats(const void* p, std::int64_t at, std::size_t n) {
  const F32Tag d;
  const hn::Rebind<T, F32Tag> db;
  const T* from = static_cast<const T*>(p) + at;
  if (n == hn::Lanes(d)) return hn::ConvertTo(d, hn::PromoteTo(SumTag(), hn::LoadU(db, from)));
  alignas(64) T block[64] = {};  // of the vectors that a compiler may copy by
  copy_few(block, from, n);
  return hn::ConvertTo(d, hn::PromoteTo(SumTag(), hn::LoadU(db, block)));
}
HWY_INLINE F32Vec bytes_as_floats(DType dtype, const void* p, std::int64_t at, std::size_t n) {
  return dtype == DType::u8 ? bytes_as_floats<std::uint8_t>(p, at, n) : bytes_as_floats<std::int8_t>(p, at, n);
}

template <class T>
HWY_INLINE void store_bytes(SumVec v, void* p, std::int64_t at, std::size_t n) {
  const hn::Rebind<T, F32Tag> db;
  T* to = static_cast<T*>(p) + at;
  if (n == hn::Lanes(SumTag())) return hn::StoreU(hn::DemoteTo(db, v), db, to);
  alignas(64) T block[hn::MaxLanes(F32Tag())];
  hn::StoreU(hn::DemoteTo(db, v), db, block);
  copy_few(to, block, n);
}

HWY_INLINE F32Vec activated_values(F32Vec v, const Int8Epilogue& e) {
  const F32Tag d;
  switch (e.activation) {
    case 1:
      return hn::Max(v, hn::Zero(d));
    case 2:
      return hn::Min(hn::Max(v, hn::Set(d, e.a)), hn::Set(d, e.b));
    case 3:
      return times_sigmoid(v, v);
    case 4:
      return hn::IfThenElse(hn::Gt(v, hn::Zero(d)), v, hn::Mul(v, hn::Set(d, e.a)));
    case 5: {
      const auto gate = hn::Add(hn::Mul(v, hn::Set(d, 1.0f / 6)), hn::Set(d, 0.5f));
      return hn::Mul(v, hn::Min(hn::Max(gate, hn::Zero(d)), hn::Set(d, 1.0f)));
    }
    default:
      return v;
  }
}

// The steps of Int8Epilogue for n sums of channels from `output` on, and their way home.
HWY_INLINE void finish_sums(const Int8Call& call, F32Vec v, std::int64_t place, std::int64_t output, std::size_t n) {
  const F32Tag d;
  const Int8Epilogue& e = call.epilogue;
  const bool all = n == hn::Lanes(d);
  const auto channels = [&](const float* p)
                            HWY_ATTR { return all ? hn::LoadU(d, p + output) : load_n(d, p + output, n); };
  const std::int64_t at = place * call.geometry.o + output;
  v = hn::Mul(v, channels(call.scale));
  if (call.bias != nullptr) v = hn::Add(v, channels(call.bias));
  if (e.residual) v = hn::Add(v, bytes_as_floats(e.residual_dtype, call.residual->data, at, n));
  if (e.middle != 1) v = hn::Mul(v, hn::Set(d, e.middle));
  v = activated_values(v, e);
  if (e.last != 1) v = hn::Mul(v, hn::Set(d, e.last));
  if (!e.integers) {
    float* const to = static_cast<float*>(call.output.data) + at;
    if (all) return hn::StoreU(v, d, to);
    return store_n(v, d, to, n);
  }
  // In this order NaN becomes the least.
  v = hn::Min(hn::Max(hn::Round(v), hn::Set(d, static_cast<float>(e.least))), hn::Set(d, static_cast<float>(e.most)));
  const auto q = hn::Add(hn::ConvertTo(SumTag(), v), hn::Set(SumTag(), e.zero_point));
  e.dtype == DType::u8 ? store_bytes<std::uint8_t>(q, call.output.data, at, n)
                       : store_bytes<std::int8_t>(q, call.output.data, at, n);
}

// n bytes of the input without its zero point.
template <class T>
HWY_INLINE void widen_bytes(const T* from, std::int64_t n, std::int16_t zero, std::int16_t* to) {
  const PairTag d;
  const hn::Rebind<T, PairTag> db;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto z = hn::Set(d, zero);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::Sub(hn::PromoteTo(d, hn::LoadU(db, from + i)), z), d, to + i);
  for (; i < n; ++i) to[i] = static_cast<std::int16_t>(from[i] - zero);
}

template <class T>
void gather_places_of(const Int8Call& call, std::int64_t place, std::int64_t count, std::int64_t group,
                      std::int64_t row, std::int16_t* to) {
  const ConvGeometry& g = call.geometry;
  const std::int64_t channels = g.c / g.groups;
  const auto zero = static_cast<std::int16_t>(call.zero_point);
  const T* x = static_cast<const T*>(call.input.data) + group * channels;
  for (std::int64_t p = place; p < place + count; ++p, to += row) {
    const std::int64_t n = p / (g.oh * g.ow), oh = p / g.ow % g.oh, ow = p % g.ow;
    std::int16_t* at = to;
    for (std::int64_t i = 0; i < g.kh; ++i) {
      const std::int64_t h = oh * g.stride[0] - g.before[0] + i * g.dilation[0];
      const std::int64_t left = ow * g.stride[1] - g.before[1];
      const T* line = x + (n * g.h + h) * g.w * g.c;
      if (h >= 0 && h < g.h && g.groups == 1 && g.dilation[1] == 1 && left >= 0 && left + g.kw <= g.w) {
        widen_bytes(line + left * g.c, g.kw * channels, zero, at);
        at += g.kw * channels;
        continue;
      }
      for (std::int64_t j = 0; j < g.kw; ++j, at += channels) {
        const std::int64_t w = left + j * g.dilation[1];
        if (h < 0 || h >= g.h || w < 0 || w >= g.w) {
          std::memset(at, 0, static_cast<std::size_t>(channels) * sizeof(std::int16_t));
        } else {
          widen_bytes(line + w * g.c, channels, zero, at);
        }
      }
    }
    if (at < to + row) *at = 0;  // of an odd number of products
  }
}

// What a place of a depthwise convolution is made of: where an element of the window is in the input, and its weights.
struct DepthwiseTap {
  std::int64_t input, weight;
};

// K vectors of channels of one place; with kFew one of n lanes.
template <int K, bool kFew, class T>
HWY_INLINE void depthwise_place(const Int8Call& call, const T* image, std::int64_t at, const float* weight,
                                const DepthwiseTap* taps, std::int64_t count, std::int64_t place, std::int64_t c,
                                [[maybe_unused]] std::size_t n) {
  const F32Tag d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto zero = hn::Set(d, static_cast<float>(call.zero_point));
  F32Vec sums[K];
  for (int k = 0; k < K; ++k) sums[k] = hn::Zero(d);
  for (std::int64_t i = 0; i < count; ++i) {
    const T* from = image + (at + taps[i].input + c);
    const float* by = weight + taps[i].weight + c;
    for (int k = 0; k < K; ++k) {
      F32Vec v, factor;
      if constexpr (kFew) {
        v = bytes_as_floats<T>(from, 0, n);
        factor = load_n(d, by, n);
      } else {
        const hn::Rebind<T, F32Tag> db;
        v = hn::ConvertTo(d, hn::PromoteTo(SumTag(), hn::LoadU(db, from + k * lanes)));
        factor = hn::LoadU(d, by + k * lanes);
      }
      sums[k] = hn::MulAdd(hn::Sub(v, zero), factor, sums[k]);
    }
  }
  for (int k = 0; k < K; ++k) {
    finish_sums(call, sums[k], place, c + k * lanes, kFew ? n : static_cast<std::size_t>(lanes));
  }
}

// A row of places of a depthwise convolution; weights are [window, channels].
template <class T>
void depthwise_row_of(const Int8Call& call, const float* weight, std::int64_t row, std::int64_t first,
                      std::int64_t last) {
  const ConvGeometry& g = call.geometry;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(F32Tag()));
  const std::int64_t n = row / g.oh, top = row % g.oh * g.stride[0] - g.before[0];
  const T* image = static_cast<const T*>(call.input.data) + n * g.h * g.w * g.c;
  DepthwiseTap whole[kDepthwiseTaps], part[kDepthwiseTaps];
  std::int64_t rows = 0;
  for (std::int64_t i = 0; i < g.kh; ++i) {
    const std::int64_t h = top + i * g.dilation[0];
    if (h < 0 || h >= g.h) continue;
    for (std::int64_t j = 0; j < g.kw; ++j) {
      whole[rows++] = {(h * g.w + j * g.dilation[1]) * g.c, (i * g.kw + j) * g.c};
    }
  }
  for (std::int64_t ow = 0; ow < g.ow; ++ow) {
    const std::int64_t left = ow * g.stride[1] - g.before[1], place = row * g.ow + ow;
    const DepthwiseTap* taps = whole;
    std::int64_t count = rows;
    if (left < 0 || left + (g.kw - 1) * g.dilation[1] >= g.w) {
      count = 0;
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t w = left + i % g.kw * g.dilation[1];
        if (w >= 0 && w < g.w) part[count++] = whole[i];
      }
      taps = part;
    }
    const std::int64_t at = left * g.c;
    std::int64_t c = first;
    for (; c + 4 * lanes <= last; c += 4 * lanes) {
      depthwise_place<4, false>(call, image, at, weight, taps, count, place, c, 0);
    }
    for (; c + 2 * lanes <= last; c += 2 * lanes) {
      depthwise_place<2, false>(call, image, at, weight, taps, count, place, c, 0);
    }
    for (; c + lanes <= last; c += lanes) depthwise_place<1, false>(call, image, at, weight, taps, count, place, c, 0);
    if (c < last) {
      depthwise_place<1, true>(call, image, at, weight, taps, count, place, c, static_cast<std::size_t>(last - c));
    }
  }
}

}  // namespace

Int8TileSizes int8_tile_sizes() { return {kTileRows, kTileVectors * static_cast<std::int64_t>(hn::Lanes(F32Tag()))}; }

/// `count` places of the result as rows of what they see: [window, channels of the group], padded to `row`.
void int8_gather_places(const Int8Call& call, std::int64_t place, std::int64_t count, std::int64_t group,
                        std::int64_t row, std::int16_t* to) {
  call.input.dtype == DType::u8 ? gather_places_of<std::uint8_t>(call, place, count, group, row, to)
                                : gather_places_of<std::int8_t>(call, place, count, group, row, to);
}

void int8_tile(const Int8Tile& t) {
  const SumTag d;
  const PairTag dp;
  const std::size_t lanes = hn::Lanes(d);
  SumVec sums[kTileRows][kTileVectors], unused = hn::Zero(d);
  for (auto& row : sums) {
    for (auto& s : row) s = hn::Zero(d);
  }
  const std::int16_t* b = t.b;
  const std::int64_t row = 2 * t.pairs;
  for (std::int64_t k = 0; k < t.pairs; ++k, b += 2 * kTileVectors * lanes) {
    const auto b0 = hn::LoadU(dp, b), b1 = hn::LoadU(dp, b + 2 * lanes);
    for (int r = 0; r < kTileRows; ++r) {
      std::int32_t pair;
      std::memcpy(&pair, t.a + r * row + 2 * k, sizeof(pair));
      const auto a = hn::BitCast(dp, hn::Set(d, pair));
      sums[r][0] = hn::ReorderWidenMulAccumulate(d, a, b0, sums[r][0], unused);
      sums[r][1] = hn::ReorderWidenMulAccumulate(d, a, b1, sums[r][1], unused);
    }
  }
  for (int r = 0; r < kTileRows; ++r) {
    if (r >= t.rows) break;
    for (int v = 0; v < kTileVectors; ++v) {
      const std::int64_t first = v * static_cast<std::int64_t>(lanes), rest = t.columns - first;
      if (rest <= 0) break;
      finish_sums(*t.call, hn::ConvertTo(F32Tag(), sums[r][v]), t.place + r, t.output + first,
                  std::min(lanes, static_cast<std::size_t>(rest)));
    }
  }
}

void int8_depthwise_row(const Int8Call& call, const float* weight, std::int64_t row, std::int64_t first,
                        std::int64_t last) {
  call.input.dtype == DType::u8 ? depthwise_row_of<std::uint8_t>(call, weight, row, first, last)
                                : depthwise_row_of<std::int8_t>(call, weight, row, first, last);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/packed_weight.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
HWY_EXPORT(int8_tile_sizes);
HWY_EXPORT(int8_gather_places);
HWY_EXPORT(int8_tile);
HWY_EXPORT(int8_depthwise_row);

namespace {

constexpr std::int64_t kGatheredBytes = 128 << 10;  // of places in 16 bits, a thread: a part of the second-level cache
constexpr double kBlockedWork = 500'000;            // multiply-adds worth a thread

Status no_room(KernelContext* context) {
  context->set_error(context, "product of integers: out of memory for the workspace");
  return Status::failed;
}

bool images_lie_well(const Int8Call& call) {
  return channels_last(call.input) && channels_last(call.output) &&
         (call.residual == nullptr || channels_last(*call.residual));
}

Status int8_depthwise(KernelContext* context, Int8Call& call) {
  const ConvGeometry& g = call.geometry;
  const std::int64_t window = g.kh * g.kw;
  const PackedWeight packed = packed_weight(
      context, call.weight_storage, call.weight, -1, call.geometry.groups,
      static_cast<std::size_t>(window * g.c) * sizeof(float), [&](void* to) {
        const std::int64_t* s = call.weight.strides;
        for (std::int64_t k = 0; k < window; ++k) {
          for (std::int64_t c = 0; c < g.c; ++c) {
            static_cast<float*>(to)[k * g.c + c] =
                static_cast<const std::int8_t*>(call.weight.data)[c * s[0] + k / g.kw * s[2] + k % g.kw * s[3]];
          }
        }
        return true;
      });
  if (packed.data == nullptr) return no_room(context);
  const auto* weight = static_cast<const float*>(packed.data);
  // Few rows are divided by channels.
  constexpr std::int64_t kBlock = 128;
  const std::int64_t rows = g.n * g.oh, blocks = rows >= 16 ? 1 : (g.c + kBlock - 1) / kBlock,
                     width = blocks == 1 ? g.c : kBlock;
  const double work = static_cast<double>(g.ow * width) * static_cast<double>(window);
  parallel_for(rows * blocks, std::max<std::int64_t>(1, static_cast<std::int64_t>(kBlockedWork / 4 / work)),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t first = i % blocks * width;
                   HWY_DYNAMIC_DISPATCH(int8_depthwise_row)
                   (call, weight, i / blocks, first, std::min(g.c, first + width));
                 }
               });
  return Status::ok;
}

}  // namespace

Status int8_blocked(KernelContext* context, Int8Call& call) {
  const ConvGeometry& g = call.geometry;
  if (!images_lie_well(call)) return Status::unsupported;
  if (g.groups == g.c && g.c == g.o && g.kh * g.kw <= kDepthwiseTaps) return int8_depthwise(context, call);
  const Int8TileSizes tile = HWY_DYNAMIC_DISPATCH(int8_tile_sizes)();
  const std::int64_t channels = g.c / g.groups, filters = g.o / g.groups, pairs = (g.kh * g.kw * channels + 1) / 2,
                     blocks = (filters + tile.columns - 1) / tile.columns, block = 2 * pairs * tile.columns;
  const PackedWeight packed =
      packed_weight(context, call.weight_storage, call.weight, -1 - tile.columns, call.geometry.groups,
                    static_cast<std::size_t>(g.groups * blocks * block) * sizeof(std::int16_t), [&](void* data) {
                      const std::int64_t* s = call.weight.strides;
                      parallel_for(g.groups * blocks, 1, [&](std::int64_t begin, std::int64_t end) {
                        for (std::int64_t i = begin; i < end; ++i) {
                          std::int16_t* to = static_cast<std::int16_t*>(data) + i * block;
                          for (std::int64_t k = 0; k < 2 * pairs; ++k) {
                            const std::int64_t at = k / channels, c = k % channels;
                            for (std::int64_t j = 0; j < tile.columns; ++j) {
                              const std::int64_t o = i % blocks * tile.columns + j;
                              const bool inside = o < filters && at < g.kh * g.kw;
                              to[(k / 2 * tile.columns + j) * 2 + k % 2] =
                                  inside ? static_cast<const std::int8_t*>(
                                               call.weight.data)[(i / blocks * filters + o) * s[0] + c * s[1] +
                                                                 at / g.kw * s[2] + at % g.kw * s[3]]
                                         : std::int16_t{0};
                            }
                          }
                        }
                      });
                      return true;
                    });
  if (packed.data == nullptr) return no_room(context);
  // Tasks: some places, times a group, times some blocks of its output channels where there are few places.
  const std::int64_t places = g.n * g.oh * g.ow;
  const int threads = in_parallel_region() ? 1 : num_threads();
  const std::int64_t fit = std::max<std::int64_t>(1, kGatheredBytes / (4 * pairs) / tile.rows),
                     even = std::max<std::int64_t>(1, (places / threads + tile.rows - 1) / tile.rows);
  const std::int64_t height = std::min(fit, even) * tile.rows, heights = (places + height - 1) / height;
  const std::int64_t parts =
      heights * g.groups >= threads ? 1 : std::min(blocks, (threads + heights * g.groups - 1) / (heights * g.groups));
  const std::int64_t tasks = heights * g.groups * parts;
  const double work = static_cast<double>(places * filters) * static_cast<double>(2 * pairs * g.groups);
  const std::int64_t workers = std::clamp<std::int64_t>(static_cast<std::int64_t>(work / kBlockedWork), 1,
                                                        std::min<std::int64_t>(tasks, threads));
  auto* const gathered = static_cast<std::int16_t*>(
      context->workspace(context, static_cast<std::size_t>(workers * height * 2 * pairs) * sizeof(std::int16_t)));
  if (gathered == nullptr) return no_room(context);
  parallel_for(workers, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) {
      std::int16_t* const rows = gathered + worker * height * 2 * pairs;
      for (std::int64_t task = worker * tasks / workers; task < (worker + 1) * tasks / workers; ++task) {
        const std::int64_t part = task % parts, group = task / parts % g.groups,
                           first = task / parts / g.groups * height, count = std::min(height, places - first);
        HWY_DYNAMIC_DISPATCH(int8_gather_places)(call, first, count, group, 2 * pairs, rows);
        const std::int64_t whole = (count + tile.rows - 1) / tile.rows * tile.rows;
        std::memset(rows + count * 2 * pairs, 0, static_cast<std::size_t>((whole - count) * 4 * pairs));
        for (std::int64_t b = part * blocks / parts; b < (part + 1) * blocks / parts; ++b) {
          const std::int16_t* weights = static_cast<const std::int16_t*>(packed.data) + (group * blocks + b) * block;
          for (std::int64_t r = 0; r < count; r += tile.rows) {
            HWY_DYNAMIC_DISPATCH(int8_tile)
            ({.call = &call,
              .a = rows + r * 2 * pairs,
              .b = weights,
              .pairs = pairs,
              .place = first + r,
              .rows = std::min(tile.rows, count - r),
              .output = group * filters + b * tile.columns,
              .columns = std::min(tile.columns, filters - b * tile.columns)});
          }
        }
      }
    }
  });
  return Status::ok;
}

}  // namespace halfstep::cpu
#endif  // HWY_ONCE
