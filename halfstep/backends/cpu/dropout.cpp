// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/dropout.cpp"
#include <hwy/foreach_target.h>

#include "halfstep/backends/cpu/simd-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_DROPOUT_
#define HALFSTEP_BACKENDS_CPU_DROPOUT_
#include <algorithm>

#include "halfstep/core/dtype.h"
#include "halfstep/core/philox.h"
#include "halfstep/core/shape.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
/// Everything that a part of the work needs.
struct DropoutWork {
  PhiloxState state;
  std::uint32_t threshold;  ///< words below it drop their element
  double scale;
  const TensorView* in;
  TensorView* out;
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

using U32 = hn::ScalableTag<std::uint32_t>;
using U32Vec = hn::Vec<U32>;
constexpr std::size_t kWords = 4 * hn::MaxLanes(U32());

HWY_INLINE void multiply(std::uint32_t factor, U32Vec v, U32Vec& high, U32Vec& low) {
  const U32 d;
  const hn::ScalableTag<std::uint64_t> d64;
  const U32Vec f = hn::Set(d, factor);
  const auto even = hn::MulEven(v, f);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(d64, v))), f);
  low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
  high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
}

/// The kWords words from word 4 * block on, as core/philox.h defines them, a block in each lane.
HWY_INLINE void philox_words(PhiloxState state, std::uint64_t block, std::uint32_t* words) {
  const U32 d;
  alignas(64) std::uint32_t low[hn::MaxLanes(U32())];
  alignas(64) std::uint32_t high[hn::MaxLanes(U32())];
  for (std::size_t i = 0; i < hn::MaxLanes(U32()); ++i) {
    const std::uint64_t counter = state.offset + block + i;
    low[i] = static_cast<std::uint32_t>(counter);
    high[i] = static_cast<std::uint32_t>(counter >> 32);
  }
  U32Vec c0 = hn::Load(d, low), c1 = hn::Load(d, high), c2 = hn::Zero(d), c3 = hn::Zero(d);
  auto key0 = static_cast<std::uint32_t>(state.seed), key1 = static_cast<std::uint32_t>(state.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    U32Vec high0, low0, high1, low1;
    multiply(0xd2511f53u, c0, high0, low0);
    multiply(0xcd9e8d57u, c2, high1, low1);
    c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(d, key0));
    c1 = low1;
    c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(d, key1));
    c3 = low0;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  hn::StoreInterleaved4(c0, c1, c2, c3, d, words);
}

/// out[j] = words[j] < threshold ? 0 : x[j] * scale, for j < n <= kWords.
template <class T>
HWY_INLINE void apply(const DropoutWork& work, const std::uint32_t* words, const T* x, T* out, std::size_t n) {
  using C = ComputeScalar<T>;
  const auto scale = static_cast<C>(work.scale);
  if constexpr (std::is_same_v<C, float>) {
    const F32Tag d;
    const hn::RebindToSigned<F32Tag> di;
    // Compared as signed numbers with the top bit turned.
    const auto top = hn::Set(di, INT32_MIN);
    const auto limit = hn::Xor(hn::Set(di, static_cast<std::int32_t>(work.threshold)), top);
    const std::size_t lanes = hn::Lanes(d);
    const auto drop = [&](F32Vec v, std::size_t j) {
      const auto word = hn::Xor(hn::LoadU(di, reinterpret_cast<const std::int32_t*>(words + j)), top);
      return hn::IfThenZeroElse(hn::RebindMask(d, hn::Lt(word, limit)), hn::Mul(v, hn::Set(d, scale)));
    };
    std::size_t j = 0;
    for (; j + lanes <= n; j += lanes) store(drop(load(d, x + j), j), d, out + j);
    if (j < n) store_n(drop(load_n(d, x + j, n - j), j), d, out + j, n - j);
  } else {
    for (std::size_t j = 0; j < n; ++j) out[j] = words[j] < work.threshold ? C{0} : x[j] * scale;
  }
}

/// Elements [begin, end) in row-major order.
template <class T>
void dropout_range(const DropoutWork& work, std::int64_t begin, std::int64_t end) {
  constexpr auto kChunk = static_cast<std::int64_t>(kWords);
  // A tail's load of whole vectors of words stays inside the array.
  alignas(64) std::uint32_t words[2 * kWords];
  const auto* x = static_cast<const T*>(work.in->data);
  auto* y = static_cast<T*>(work.out->data);
  const bool straight = work.in->contiguous && work.out->contiguous;
  const int ndim = work.out->ndim;
  std::int64_t index[kMaxDims] = {};
  std::int64_t from = 0, to = 0;
  if (!straight) {
    std::int64_t rest = begin;
    for (int i = ndim - 1; i >= 0; --i) {
      index[i] = rest % work.out->sizes[i];
      rest /= work.out->sizes[i];
      from += index[i] * work.in->strides[i];
      to += index[i] * work.out->strides[i];
    }
  }
  for (std::int64_t i = begin; i < end;) {
    const std::int64_t chunk = i / kChunk;
    philox_words(work.state, static_cast<std::uint64_t>(chunk * (kChunk / 4)), words);
    const std::int64_t n = std::min((chunk + 1) * kChunk, end) - i;
    const std::uint32_t* at = words + (i - chunk * kChunk);
    if (straight) {
      apply(work, at, x + i, y + i, static_cast<std::size_t>(n));
    } else {
      T in_block[kWords], out_block[kWords];
      std::int64_t places[kWords];
      for (std::int64_t j = 0; j < n; ++j) {
        in_block[j] = x[from];
        places[j] = to;
        for (int k = ndim - 1; k >= 0; --k) {
          from += work.in->strides[k];
          to += work.out->strides[k];
          if (++index[k] < work.out->sizes[k]) break;
          from -= work.in->strides[k] * index[k];
          to -= work.out->strides[k] * index[k];
          index[k] = 0;
        }
      }
      apply(work, at, in_block, out_block, static_cast<std::size_t>(n));
      for (std::int64_t j = 0; j < n; ++j) y[places[j]] = out_block[j];
    }
    i += n;
  }
}

}  // namespace

void dropout_part(const DropoutWork& work, std::int64_t begin, std::int64_t end) {
  visit_floating(work.out->dtype, [&](auto tag) { dropout_range<typename decltype(tag)::type>(work, begin, end); });
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(dropout_part);

Status dropout(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const double p = static_cast<const DropoutAttributes*>(attributes)->p;
  if (out[0].numel == 0) return Status::ok;
  const auto* state = static_cast<const std::int64_t*>(in[1].data);
  const std::uint64_t threshold = bernoulli_threshold(p);
  if (threshold >> 32 != 0) {
    std::memset(out[0].data, 0, static_cast<std::size_t>(out[0].numel) * item_size(out[0].dtype));
    return Status::ok;
  }
  const DropoutWork work{
      .state = {static_cast<std::uint64_t>(state[0]), static_cast<std::uint64_t>(state[1])},
      .threshold = static_cast<std::uint32_t>(threshold),
      .scale = 1 / (1 - p),
      .in = &in[0],
      .out = &out[0],
  };
  parallel_for(out[0].numel, 8192, [&](std::int64_t begin, std::int64_t end) {
    HWY_DYNAMIC_DISPATCH(dropout_part)(work, begin, end);
  });
  return Status::ok;
}

const RegisterCpuKernel dropout_kernels("dropout", kFloatingDTypes, dropout, {.slices = Slices::random});

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
