// SPDX-License-Identifier: Apache-2.0
// add_int8, lookup_int8 and mean_int8.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/int8_pointwise.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <cstdint>
#include <type_traits>

#include "halfstep/backends/cpu/simd-inl.h"
#include "halfstep/core/dtype.h"

#ifndef HALFSTEP_BACKENDS_CPU_INT8_POINTWISE_RUN_
#define HALFSTEP_BACKENDS_CPU_INT8_POINTWISE_RUN_
namespace halfstep::cpu {
/// A run of a sum: a a_factor + b b_factor + shift, with ReLU, in units of the result; integers are that rounded, plus
/// `zero`, clamped.
struct Int8Sum {
  float a_factor, b_factor, shift;
  std::int32_t zero, least, most;
  bool a_signed, b_signed, relu, clamped;
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

using ByteI32Tag = hn::RebindToSigned<F32Tag>;
using ByteI32Vec = hn::Vec<ByteI32Tag>;

template <class T>
HWY_INLINE ByteI32Vec load_bytes(const void* p, std::size_t at) {
  return hn::PromoteTo(ByteI32Tag(), hn::LoadU(hn::Rebind<T, F32Tag>(), static_cast<const T*>(p) + at));
}
HWY_INLINE F32Vec byte_values(const void* p, std::size_t at, bool is_signed) {
  return hn::ConvertTo(F32Tag(), is_signed ? load_bytes<std::int8_t>(p, at) : load_bytes<std::uint8_t>(p, at));
}

template <class Out>
HWY_INLINE void put_sum(const Int8Sum& s, F32Vec v, Out* to) {
  const F32Tag d;
  if constexpr (std::is_same_v<Out, float>) {
    hn::StoreU(v, d, to);
  } else {
    const ByteI32Tag di;
    // Beyond this all are clamped, and integers that are added to might wrap around.
    v = hn::Min(hn::Max(v, hn::Set(d, -65536.0f)), hn::Set(d, 65536.0f));
    auto q = hn::Add(hn::NearestInt(v), hn::Set(di, s.zero));
    // Beyond the dtype's range the conversion below clamps.
    if (s.clamped) q = hn::Min(hn::Max(q, hn::Set(di, s.least)), hn::Set(di, s.most));
    const hn::Rebind<Out, F32Tag> db;
    hn::StoreU(hn::DemoteTo(db, q), db, to);
  }
}

template <bool kASigned, bool kBSigned, class Out>
void sum_run_of(const Int8Sum& s, const void* a, const void* b, Out* to, std::size_t n) {
  const F32Tag d;
  const std::size_t lanes = hn::Lanes(d);
  const auto a_factor = hn::Set(d, s.a_factor), b_factor = hn::Set(d, s.b_factor), shift = hn::Set(d, s.shift);
  const auto step = [&](const void* pa, const void* pb, std::size_t at, Out* put) HWY_ATTR {
    auto v = hn::MulAdd(byte_values(pb, at, kBSigned), b_factor, shift);
    v = hn::MulAdd(byte_values(pa, at, kASigned), a_factor, v);
    if (s.relu) v = hn::Max(v, hn::Zero(d));
    put_sum(s, v, put);
  };
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    step(a, b, i, to + i);
    step(a, b, i + lanes, to + i + lanes);
  }
  for (; i + lanes <= n; i += lanes) step(a, b, i, to + i);
  if (i == n) return;
  alignas(64) std::uint8_t a_rest[64] = {}, b_rest[64] = {};
  alignas(64) Out rest[hn::MaxLanes(F32Tag())];
  copy_few(a_rest, static_cast<const std::uint8_t*>(a) + i, n - i);
  copy_few(b_rest, static_cast<const std::uint8_t*>(b) + i, n - i);
  step(a_rest, b_rest, 0, rest);
  copy_few(to + i, rest, n - i);
}

template <class Out>
void sum_run_to(const Int8Sum& s, const void* a, const void* b, Out* to, std::size_t n) {
  if (s.a_signed) {
    s.b_signed ? sum_run_of<true, true>(s, a, b, to, n) : sum_run_of<true, false>(s, a, b, to, n);
  } else {
    s.b_signed ? sum_run_of<false, true>(s, a, b, to, n) : sum_run_of<false, false>(s, a, b, to, n);
  }
}

}  // namespace

void int8_sum_run(const Int8Sum& s, const void* a, const void* b, void* to, DType dtype, std::size_t n) {
  if (dtype == DType::f32) return sum_run_to(s, a, b, static_cast<float*>(to), n);
  if (dtype == DType::u8) return sum_run_to(s, a, b, static_cast<std::uint8_t*>(to), n);
  sum_run_to(s, a, b, static_cast<std::int8_t*>(to), n);
}

/// sums[c] += x[c].
void int8_add_row(const std::uint8_t* x, bool is_signed, std::int32_t* sums, std::size_t n) {
  const ByteI32Tag d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t c = 0;
  if (is_signed) {
    for (; c + lanes <= n; c += lanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, sums + c), load_bytes<std::int8_t>(x, c)), d, sums + c);
    }
    for (; c < n; ++c) sums[c] += static_cast<std::int8_t>(x[c]);
  } else {
    for (; c + lanes <= n; c += lanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, sums + c), load_bytes<std::uint8_t>(x, c)), d, sums + c);
    }
    for (; c < n; ++c) sums[c] += x[c];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/backends/cpu/reduce_plan.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/strided_loop.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
HWY_EXPORT(int8_sum_run);
HWY_EXPORT(int8_add_row);

namespace {

constexpr std::int64_t kByteBlock = 1024;
constexpr std::int64_t kByteGrain = 1 << 16;  // elements worth a thread

// VBMI, which Highway's targets here don't tell: two permutations of 128 entries, and the highest bit chooses.
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) std::int64_t lookup_permuting(const std::uint8_t* table,
                                                                                     const std::uint8_t* from,
                                                                                     std::uint8_t* to, std::int64_t n) {
  const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 64),
                t2 = _mm512_loadu_si512(table + 128), t3 = _mm512_loadu_si512(table + 192);
  std::int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const __m512i at = _mm512_loadu_si512(from + i);
    const __m512i low = _mm512_permutex2var_epi8(t0, at, t1), high = _mm512_permutex2var_epi8(t2, at, t3);
    _mm512_storeu_si512(to + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high));
  }
  return i;
}

void lookup_bytes(const std::uint8_t* table, const std::uint8_t* from, std::uint8_t* to, std::int64_t n) {
  static const bool permutes = __builtin_cpu_supports("avx512vbmi") != 0;
  std::int64_t i = permutes && compute_isa() >= Isa::avx512 ? lookup_permuting(table, from, to, n) : 0;
  for (; i < n; ++i) to[i] = table[from[i]];
}

// n bytes that lie `stride` apart: where they are, or in the block.
const std::uint8_t* read_bytes(const TensorView& t, std::int64_t at, std::int64_t stride, std::int64_t n,
                               std::uint8_t* block) {
  const auto* from = static_cast<const std::uint8_t*>(t.data) + at;
  if (stride == 1) return from;
  for (std::int64_t i = 0; i < n; ++i) block[i] = from[i * stride];
  return block;
}
void write_bytes(TensorView& t, std::int64_t at, std::int64_t stride, std::int64_t n, const std::uint8_t* block) {
  auto* to = static_cast<std::uint8_t*>(t.data) + at;
  for (std::int64_t i = 0; i < n; ++i) to[i * stride] = block[i];
}

Status add_int8(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const Int8GridAttributes*>(attributes);
  TensorView& y = out[0];
  const bool integers = item_size(y.dtype) == 1;
  const double unit = integers ? a.output_scale : 1, a_factor = a.input_scale / unit, b_factor = a.other_scale / unit;
  const bool is_signed = y.dtype == DType::i8;
  const Int8Sum sum{.a_factor = static_cast<float>(a_factor),
                    .b_factor = static_cast<float>(b_factor),
                    .shift = static_cast<float>(-static_cast<double>(a.input_zero_point) * a_factor -
                                                static_cast<double>(a.other_zero_point) * b_factor),
                    .zero = static_cast<std::int32_t>(a.output_zero_point),
                    .least = static_cast<std::int32_t>(a.quant_min),
                    .most = static_cast<std::int32_t>(a.quant_max),
                    .a_signed = in[0].dtype == DType::i8,
                    .b_signed = in[1].dtype == DType::i8,
                    .relu = a.relu != 0,
                    .clamped = a.quant_min != (is_signed ? -128 : 0) || a.quant_max != (is_signed ? 127 : 255)};
  const StridedLoop<3> loop({&y, &in[0], &in[1]});
  loop.for_each_run(kByteGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
    std::uint8_t a_block[kByteBlock], b_block[kByteBlock], y_block[kByteBlock];
    float floats[kByteBlock];
    for (std::int64_t i = 0; i < n; i += kByteBlock) {
      const std::int64_t part = std::min(kByteBlock, n - i), to = at[0] + i * stride[0];
      const std::uint8_t* pa = read_bytes(in[0], at[1] + i * stride[1], stride[1], part, a_block);
      const std::uint8_t* pb = read_bytes(in[1], at[2] + i * stride[2], stride[2], part, b_block);
      const auto count = static_cast<std::size_t>(part);
      if (!integers) {
        HWY_DYNAMIC_DISPATCH(int8_sum_run)(sum, pa, pb, floats, DType::f32, count);
        write_row(y, to, stride[0], part, floats);
        continue;
      }
      void* const home = stride[0] == 1 ? static_cast<std::uint8_t*>(y.data) + to : y_block;
      HWY_DYNAMIC_DISPATCH(int8_sum_run)(sum, pa, pb, home, y.dtype, count);
      if (home == y_block) write_bytes(y, to, stride[0], part, y_block);
    }
  });
  return Status::ok;
}

Status lookup_int8(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  TensorView& y = out[0];
  std::uint8_t table[256];
  for (int i = 0; i < 256; ++i) table[i] = static_cast<const std::uint8_t*>(in[1].data)[i * in[1].strides[0]];
  const StridedLoop<2> loop({&y, &in[0]});
  loop.for_each_run(kByteGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
    std::uint8_t x_block[kByteBlock], y_block[kByteBlock];
    const std::int64_t step = stride[0] == 1 && stride[1] == 1 ? std::max<std::int64_t>(n, 1) : kByteBlock;
    for (std::int64_t i = 0; i < n; i += step) {
      const std::int64_t part = std::min(step, n - i), to = at[0] + i * stride[0];
      const std::uint8_t* x = read_bytes(in[0], at[1] + i * stride[1], stride[1], part, x_block);
      std::uint8_t* const home = stride[0] == 1 ? static_cast<std::uint8_t*>(y.data) + to : y_block;
      lookup_bytes(table, x, home, part);
      if (home == y_block) write_bytes(y, to, stride[0], part, y_block);
    }
  });
  return Status::ok;
}

// The results are numbered as the kept dimensions go, row-major, which is how they lie in a dense result.
Status mean_int8(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const Int8GridAttributes*>(attributes);
  const TensorView& x = in[0];
  TensorView& y = out[0];
  if (y.numel == 0) return Status::ok;
  if (!y.contiguous) {
    context->set_error(context, "expected a row-major result");
    return Status::failed;
  }
  const ReducePlan plan(x, a.dims);
  const std::int64_t count = plan.reduced.numel, columns = plan.kept.inner_size(), stride = plan.kept.inner_stride();
  // 255 * this is below 2^31.
  constexpr std::int64_t kExact = 1 << 23;
  const float factor = static_cast<float>(a.input_scale / static_cast<double>(count));
  const float inverse = static_cast<float>(1 / a.output_scale);
  const float least = static_cast<float>(a.quant_min - a.output_zero_point),
              most = static_cast<float>(a.quant_max - a.output_zero_point);
  const bool is_signed = x.dtype == DType::i8;
  constexpr std::int64_t kColumns = 256;
  const std::int64_t blocks = (columns + kColumns - 1) / kColumns, rows = plan.kept.numel / columns;
  parallel_for(rows * blocks, row_grain(std::min(kColumns, columns) * count),
               [&](std::int64_t begin, std::int64_t end) {
                 std::int32_t sums[kColumns];
                 std::int64_t totals[kColumns];
                 std::uint8_t block[kColumns];
                 for (std::int64_t k = begin; k < end; ++k) {
                   const std::int64_t first = k % blocks * kColumns, width = std::min(kColumns, columns - first),
                                      base = plan.kept.offset(k / blocks * columns + first);
                   std::fill_n(totals, width, std::int64_t{0});
                   for (std::int64_t from = 0; from < count; from += kExact) {
                     std::fill_n(sums, width, 0);
                     for (std::int64_t i = from; i < std::min(count, from + kExact); ++i) {
                       const std::uint8_t* row =
                           read_bytes(x, base + plan.reduced.offset(i), width == 1 ? 1 : stride, width, block);
                       HWY_DYNAMIC_DISPATCH(int8_add_row)(row, is_signed, sums, static_cast<std::size_t>(width));
                     }
                     for (std::int64_t c = 0; c < width; ++c) totals[c] += sums[c];
                   }
                   float values[kColumns];
                   for (std::int64_t c = 0; c < width; ++c) {
                     values[c] = static_cast<float>(totals[c] - count * a.input_zero_point) * factor;
                   }
                   const std::int64_t to = k / blocks * columns + first;
                   if (item_size(y.dtype) > 1) {
                     store_floats(y.dtype, y.data, to, width, values);
                     continue;
                   }
                   for (std::int64_t c = 0; c < width; ++c) {
                     const float q = std::clamp(std::nearbyint(values[c] * inverse), least, most);
                     static_cast<std::uint8_t*>(y.data)[to + c] =
                         static_cast<std::uint8_t>(static_cast<std::int64_t>(q) + a.output_zero_point);
                   }
                 }
               });
  return Status::ok;
}

const RegisterCpuKernel registered_int8_pointwise[] = {
    {"add_int8", {DType::u8, DType::i8}, add_int8},
    {"lookup_int8", {DType::u8, DType::i8}, lookup_int8},
    {"mean_int8", {DType::u8, DType::i8}, mean_int8},
};

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
