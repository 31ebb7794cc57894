// SPDX-License-Identifier: Apache-2.0
// linear_weight_only: few rows are multiplied while the weights are read, once and as integers; more of them by blocks
// of weights that are widened to float32 in the cache.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/int8_weight_only.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <cstdint>

#include "halfstep/backends/cpu/simd-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_INT8_WEIGHT_ONLY_
#define HALFSTEP_BACKENDS_CPU_INT8_WEIGHT_ONLY_
namespace halfstep::cpu {
/// Weights [outputs, bytes a row] and what they are multiplied with. With 4 bits the inputs of even places of a row
/// come first, then those of odd ones.
struct WeightOnly {
  const std::uint8_t* weight;
  const float* scale;  ///< [outputs, groups]
  std::int64_t bytes, groups, group_bytes;
  bool four_bits;
  const std::int32_t* group_of;  ///< of each byte of a row; null: groups are whole vectors
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

using WideI32Tag = hn::RebindToSigned<F32Tag>;
using WideI32Vec = hn::Vec<WideI32Tag>;

HWY_INLINE WideI32Vec weights_at(const std::uint8_t* p) {
  return hn::PromoteTo(WideI32Tag(),
                       hn::LoadU(hn::Rebind<std::int8_t, F32Tag>(), reinterpret_cast<const std::int8_t*>(p)));
}
HWY_INLINE WideI32Vec weights_at(const std::uint8_t* p, std::size_t n) {
  alignas(64) std::uint8_t block[64] = {};        // of the vectors that a compiler may copy by
  copy_few(block, p, HWY_MIN(n, sizeof(block)));  // which is n: the compiler doesn't know
  return weights_at(block);
}
HWY_INLINE F32Vec low_half(WideI32Vec v) { return hn::ConvertTo(F32Tag(), hn::ShiftRight<28>(hn::ShiftLeft<28>(v))); }
HWY_INLINE F32Vec high_half(WideI32Vec v) { return hn::ConvertTo(F32Tag(), hn::ShiftRight<4>(v)); }

// sums[r * M + m] += the products of the bytes at `w`, and every `bytes` further for the next output, with what lies at
// x + m * row (and, of 4 bits, at x + m * row + half).
// `scale`: of each byte, by `groups` its group, `scale_step` further for the next output; null: sums are scaled later.
template <int M, int R, bool kFour, bool kFew>
HWY_INLINE void add_products(const std::uint8_t* w, std::int64_t bytes, const float* x, std::int64_t row,
                             [[maybe_unused]] std::int64_t half, [[maybe_unused]] std::size_t n, F32Vec (&sums)[R * M],
                             const float* scale = nullptr, const std::int32_t* groups = nullptr,
                             std::int64_t scale_step = 0) {
  const F32Tag d;
  auto group = hn::Zero(WideI32Tag());
  if (scale != nullptr) group = kFew ? load_n(WideI32Tag(), groups, n) : hn::LoadU(WideI32Tag(), groups);
  F32Vec inputs[M], odd[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    if constexpr (kFew) {
      inputs[m] = load_n(d, x + m * row, n);
      if constexpr (kFour) odd[m] = load_n(d, x + m * row + half, n);
    } else {
      inputs[m] = hn::LoadU(d, x + m * row);
      if constexpr (kFour) odd[m] = hn::LoadU(d, x + m * row + half);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    WideI32Vec v;
    if constexpr (kFew) {
      v = weights_at(w + r * bytes, n);
    } else {
      v = weights_at(w + r * bytes);
    }
    auto by = hn::Zero(d);
    if (scale != nullptr) by = hn::GatherIndex(d, scale + r * scale_step, group);
    if constexpr (kFour) {
      auto low = low_half(v), high = high_half(v);
      if (scale != nullptr) {
        low = hn::Mul(low, by);
        high = hn::Mul(high, by);
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        sums[r * M + m] = hn::MulAdd(high, odd[m], hn::MulAdd(low, inputs[m], sums[r * M + m]));
      }
    } else {
      auto value = hn::ConvertTo(d, v);
      if (scale != nullptr) value = hn::Mul(value, by);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[r * M + m] = hn::MulAdd(value, inputs[m], sums[r * M + m]);
    }
  }
}

// M rows of x times the weights of R outputs, so that what is read is used more than once and no sum waits for itself.
template <int M, int R, bool kFour>
void products_of(const WeightOnly& p, std::int64_t output, const float* x, float* y, std::int64_t y_step) {
  const F32Tag d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t row = kFour ? 2 * p.bytes : p.bytes, half = p.bytes;
  const std::uint8_t* w = p.weight + output * p.bytes;
  F32Vec totals[R * M];
#pragma GCC unroll 16
  for (int i = 0; i < R * M; ++i) totals[i] = hn::Zero(d);
  if (p.group_of != nullptr) {
    const float* const scale = p.scale + output * p.groups;
    std::int64_t i = 0;
    for (; i + lanes <= p.bytes; i += lanes) {
      add_products<M, R, kFour, false>(w + i, p.bytes, x + i, row, half, 0, totals, scale, p.group_of + i, p.groups);
    }
    if (i < p.bytes) {
      add_products<M, R, kFour, true>(w + i, p.bytes, x + i, row, half, static_cast<std::size_t>(p.bytes - i), totals,
                                      scale, p.group_of + i, p.groups);
    }
  }
  for (std::int64_t g = 0; p.group_of == nullptr && g < p.groups; ++g) {
    F32Vec sums[R * M];
#pragma GCC unroll 16
    for (int i = 0; i < R * M; ++i) sums[i] = hn::Zero(d);
    const std::int64_t end = (g + 1) * p.group_bytes;
    std::int64_t i = g * p.group_bytes;
    for (; i + lanes <= end; i += lanes) {
      add_products<M, R, kFour, false>(w + i, p.bytes, x + i, row, half, 0, sums);
    }
    if (i < end) {
      add_products<M, R, kFour, true>(w + i, p.bytes, x + i, row, half, static_cast<std::size_t>(end - i), sums);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const auto scale = hn::Set(d, p.scale[(output + r) * p.groups + g]);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) totals[r * M + m] = hn::MulAdd(sums[r * M + m], scale, totals[r * M + m]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) y[m * y_step + r] += hn::GetLane(hn::SumOfLanes(d, totals[r * M + m]));
  }
}

// All rows times R outputs.
template <int R, bool kFour>
void rows_of(const WeightOnly& p, std::int64_t o, const float* x, std::int64_t rows, float* y, std::int64_t y_step) {
  const std::int64_t row = kFour ? 2 * p.bytes : p.bytes;
  std::int64_t m = 0;
  for (; m + 4 <= rows; m += 4) products_of<4, R, kFour>(p, o, x + m * row, y + m * y_step + o, y_step);
  if (m + 2 <= rows) {
    products_of<2, R, kFour>(p, o, x + m * row, y + m * y_step + o, y_step);
    m += 2;
  }
  if (m < rows) products_of<1, R, kFour>(p, o, x + m * row, y + m * y_step + o, y_step);
}

template <bool kFour>
void outputs_of(const WeightOnly& p, std::int64_t begin, std::int64_t end, const float* x, std::int64_t rows, float* y,
                std::int64_t y_step) {
  constexpr int kOutputs = HWY_TARGET == HWY_AVX2 ? 2 : 4;  // with 4 rows: 8 sums of 16 registers, 16 of 32
  std::int64_t o = begin;
  for (; o + kOutputs <= end; o += kOutputs) rows_of<kOutputs, kFour>(p, o, x, rows, y, y_step);
  for (; o < end; ++o) rows_of<1, kFour>(p, o, x, rows, y, y_step);
}

}  // namespace

/// y[m, o] += the products of some outputs.
void weight_only_rows(const WeightOnly& p, std::int64_t begin, std::int64_t end, const float* x, std::int64_t rows,
                      float* y, std::int64_t y_step) {
  p.four_bits ? outputs_of<true>(p, begin, end, x, rows, y, y_step)
              : outputs_of<false>(p, begin, end, x, rows, y, y_step);
}

/// The weights of one output as float32.
void weight_only_widen(const WeightOnly& p, std::int64_t output, float* to) {
  const F32Tag d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::uint8_t* w = p.weight + output * p.bytes;
  for (std::int64_t g = 0; g < p.groups; ++g) {
    const float number = p.scale[output * p.groups + g];
    const auto scale = hn::Set(d, number);
    const std::int64_t end = (g + 1) * p.group_bytes;
    std::int64_t i = g * p.group_bytes;
    for (; i + lanes <= end; i += lanes) {
      const auto v = weights_at(w + i);
      if (p.four_bits) {
        hn::StoreInterleaved2(hn::Mul(low_half(v), scale), hn::Mul(high_half(v), scale), d, to + 2 * i);
      } else {
        hn::StoreU(hn::Mul(hn::ConvertTo(d, v), scale), d, to + i);
      }
    }
    for (; i < end; ++i) {
      const auto byte = static_cast<std::int8_t>(w[i]);
      if (p.four_bits) {
        to[2 * i] = static_cast<float>(static_cast<std::int8_t>(static_cast<std::uint8_t>(w[i] << 4)) >> 4) * number;
        to[2 * i + 1] = static_cast<float>(byte >> 4) * number;
      } else {
        to[i] = static_cast<float>(byte) * number;
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
HWY_EXPORT(weight_only_rows);
HWY_EXPORT(weight_only_widen);

namespace {

// Rows up to which the weights are read as integers while they are multiplied. One core of Zen 5 takes 18 microseconds
// a row for 512 x 4096 weights in that way, 21 by blocks of float32; more rows leave the second-level cache.
constexpr std::int64_t kFewRows = 64;
// Of widened weights, which the product packs once more: in the third-level cache.
constexpr std::int64_t kWidenedBytes = 4 << 20;
constexpr std::int64_t kWeightGrain = 1 << 16;  // weights worth a thread

Status no_memory(KernelContext* context) {
  context->set_error(context, "out of memory for the workspace");
  return Status::failed;
}

/// A context whose memory is used again by one product after the other.
struct SameMemory : KernelContext {
  explicit SameMemory(KernelContext* context) : KernelContext(*context), outer(context) {
    workspace = [](KernelContext* self, std::uint64_t bytes) -> void* {
      auto& memory = *static_cast<SameMemory*>(self);
      if (memory.next == kMost) return memory.outer->workspace(memory.outer, bytes);
      Piece& piece = memory.pieces[memory.next++];
      if (piece.bytes < bytes) piece = {memory.outer->workspace(memory.outer, bytes), bytes};
      if (piece.data == nullptr) piece.bytes = 0;
      return piece.data;
    };
    set_error = [](KernelContext* self, const char* text) {
      KernelContext* const outer = static_cast<SameMemory*>(self)->outer;
      outer->set_error(outer, text);
    };
    set_magnitude_bound = nullptr;
  }
  static constexpr int kMost = 8;
  struct Piece {
    void* data = nullptr;
    std::uint64_t bytes = 0;
  };
  KernelContext* outer;
  Piece pieces[kMost];
  int next = 0;
};

// Of the vectors of all processors.
constexpr std::int64_t kLanes = 16;

Status few_rows(KernelContext* context, WeightOnly p, const TensorView& x, const TensorView* bias, TensorView& y,
                std::int64_t rows, std::int64_t k, std::int64_t outputs) {
  auto* const floats = static_cast<float*>(
      context->workspace(context, static_cast<std::size_t>(rows * (2 * k + outputs)) * sizeof(float)));
  if (floats == nullptr) return no_memory(context);
  if (p.groups > 1 && p.group_bytes % kLanes != 0) {
    // One after another such groups would be more rest than vectors.
    auto* const group = static_cast<std::int32_t*>(
        context->workspace(context, static_cast<std::size_t>(p.bytes) * sizeof(std::int32_t)));
    if (group == nullptr) return no_memory(context);
    for (std::int64_t i = 0; i < p.bytes; ++i) group[i] = static_cast<std::int32_t>(i / p.group_bytes);
    p.group_of = group;
  }
  float *const inputs = floats, *const plain = floats + rows * k, *const sums = plain + rows * k;
  load_floats(x.dtype, x.data, rows * k, p.four_bits ? plain : inputs);
  for (std::int64_t m = 0; p.four_bits && m < rows; ++m) {
    for (std::int64_t i = 0; i < p.bytes; ++i) {
      inputs[m * k + i] = plain[m * k + 2 * i];
      inputs[m * k + p.bytes + i] = plain[m * k + 2 * i + 1];
    }
  }
  for (std::int64_t m = 0; m < rows; ++m) {
    if (bias != nullptr) {
      std::copy_n(static_cast<const float*>(bias->data), outputs, sums + m * outputs);
    } else {
      std::fill_n(sums + m * outputs, outputs, 0.0f);
    }
  }
  parallel_for(outputs, std::max<std::int64_t>(1, kWeightGrain / std::max<std::int64_t>(k, 1)),
               [&](std::int64_t begin, std::int64_t end) {
                 HWY_DYNAMIC_DISPATCH(weight_only_rows)(p, begin, end, inputs, rows, sums, outputs);
               });
  store_floats(y.dtype, y.data, rows * outputs, sums);
  return Status::ok;
}

Status many_rows(KernelContext* context, const WeightOnly& p, const TensorView& x, const TensorView* bias,
                 TensorView& y, std::int64_t rows, std::int64_t k, std::int64_t outputs) {
  const std::int64_t block = std::min(outputs, std::max<std::int64_t>(16, kWidenedBytes / 4 / k / 16 * 16));
  auto* const wide =
      static_cast<float*>(context->workspace(context, static_cast<std::size_t>(block * k) * sizeof(float)));
  if (wide == nullptr) return no_memory(context);
  SameMemory same(context);
  for (std::int64_t first = 0; first < outputs; first += block) {
    same.next = 0;
    const std::int64_t count = std::min(block, outputs - first);
    parallel_for(count, std::max<std::int64_t>(1, kWeightGrain / k), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t o = begin; o < end; ++o) HWY_DYNAMIC_DISPATCH(weight_only_widen)(p, first + o, wide + o * k);
    });
    GemmArgs g;
    g.m = rows, g.n = count, g.k = k;
    g.a = {x.data, x.dtype, k, 1};
    g.b = {wide, DType::f32, 1, k};
    g.c = element(y.dtype, y.data, first);
    g.c_dtype = y.dtype;
    g.ldc = outputs;
    if (bias != nullptr) g.bias = static_cast<const float*>(bias->data) + first;
    const Status status = gemm(&same, g);
    if (status != Status::ok) return status;
  }
  return Status::ok;
}

Status linear_weight_only(KernelContext* context, const TensorView* in, int n, TensorView* out, int,
                          const void* attributes) {
  const auto& a = *static_cast<const WeightOnlyAttributes*>(attributes);
  const TensorView &x = in[0], &w = in[1], &scale = in[2];
  const TensorView* bias = n > 3 && in[3].defined ? &in[3] : nullptr;
  TensorView& y = out[0];
  if (y.numel == 0) return Status::ok;
  if (!x.contiguous || !w.contiguous || !scale.contiguous || !y.contiguous || (bias != nullptr && !bias->contiguous)) {
    context->set_error(context, "expected row-major tensors");
    return Status::failed;
  }
  const std::int64_t outputs = w.sizes[0], bytes = w.sizes[1], k = a.bits == 4 ? 2 * bytes : bytes,
                     rows = y.numel / outputs, groups = k == 0 ? 0 : k / a.group;
  const WeightOnly p{.weight = static_cast<const std::uint8_t*>(w.data),
                     .scale = static_cast<const float*>(scale.data),
                     .bytes = bytes,
                     .groups = groups,
                     .group_bytes = groups == 0 ? 0 : bytes / groups,
                     .four_bits = a.bits == 4,
                     .group_of = nullptr};
  return rows <= kFewRows || k == 0 ? few_rows(context, p, x, bias, y, rows, k, outputs)
                                    : many_rows(context, p, x, bias, y, rows, k, outputs);
}

const RegisterCpuKernel registered_weight_only[] = {
    {"linear_weight_only", {DType::f32, DType::f16, DType::bf16}, linear_weight_only},
};

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
