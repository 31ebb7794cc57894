// SPDX-License-Identifier: Apache-2.0
// Loss scaling: one pass over all gradients that unscales, checks and sums squares; and the update of the scale.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Elements of one piece of work: its flags and sum are found on their own, so that the result doesn't depend on the
// threads.
constexpr std::int64_t kChunk = 16384;

struct Piece {
  float found;
  double squares;
};

// to[i] = from[i] * inverse, checked as it is written: unscaling can overflow by itself.
template <class To, class From>
Piece unscale_chunk(const From* from, To* to, std::int64_t n, float inverse, bool squares) {
  constexpr int kLanes = 16;
  std::uint32_t bad = 0;
  double sum = 0;
  if constexpr (std::is_same_v<To, float> && std::is_same_v<From, float>) {
    constexpr std::uint32_t kExponent = 0x7f800000u;
    std::uint32_t lanes_bad[kLanes] = {};
    std::int64_t i = 0;
    if (!squares) {
      for (; i + kLanes <= n; i += kLanes) {
        for (int l = 0; l < kLanes; ++l) {
          const float v = from[i + l] * inverse;
          to[i + l] = v;
          lanes_bad[l] |= (std::bit_cast<std::uint32_t>(v) & kExponent) == kExponent ? 1u : 0u;
        }
      }
    } else {
      while (i + kLanes <= n) {
        // Blocks of float32 sums, added up in double.
        float block[kLanes] = {};
        const std::int64_t end = std::min(n - kLanes + 1, i + 64 * kLanes);
        for (; i < end; i += kLanes) {
          for (int l = 0; l < kLanes; ++l) {
            const float v = from[i + l] * inverse;
            to[i + l] = v;
            block[l] += v * v;
            lanes_bad[l] |= (std::bit_cast<std::uint32_t>(v) & kExponent) == kExponent ? 1u : 0u;
          }
        }
        for (float b : block) sum += static_cast<double>(b);
      }
      // Squares of large gradients overflow float32 though the gradients don't.
      if (!std::isfinite(sum)) {
        sum = 0;
        for (std::int64_t j = 0; j < i; ++j) sum += static_cast<double>(to[j]) * static_cast<double>(to[j]);
      }
    }
    for (; i < n; ++i) {
      const float v = from[i] * inverse;
      to[i] = v;
      bad |= std::isfinite(v) ? 0u : 1u;
      sum += static_cast<double>(v) * static_cast<double>(v);
    }
    for (std::uint32_t b : lanes_bad) bad |= b;
  } else {
    using C = std::conditional_t<std::is_same_v<From, double>, double, float>;
    for (std::int64_t i = 0; i < n; ++i) {
      const C v = convert<C>(from[i]) * static_cast<C>(inverse);
      to[i] = convert<To>(v);
      const double written = static_cast<double>(convert<C>(to[i]));
      bad |= std::isfinite(written) ? 0u : 1u;
      sum += written * written;
    }
  }
  return {bad ? 1.0f : 0.0f, sum};
}

Piece unscale_any(const TensorView& from, const TensorView& to, std::int64_t begin, std::int64_t n, float inverse,
                  bool squares) {
  const auto run = [&]<class To, class From>(To*, From*) {
    return unscale_chunk(static_cast<const From*>(from.data) + begin, static_cast<To*>(to.data) + begin, n, inverse,
                         squares);
  };
  switch (from.dtype) {
    case DType::f64:
      return run(static_cast<double*>(nullptr), static_cast<double*>(nullptr));
    case DType::f16:
      return run(static_cast<float*>(nullptr), static_cast<Half*>(nullptr));
    case DType::bf16:
      return run(static_cast<BFloat16*>(nullptr), static_cast<BFloat16*>(nullptr));
    default:
      return run(static_cast<float*>(nullptr), static_cast<float*>(nullptr));
  }
}

// in: scale, gradients; out: found [], found for each gradient, norm [] (may be absent), unscaled gradients. All
// gradients are dense.
Status unscale(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  const float scale = *static_cast<const float*>(in[0].data);
  const auto inverse = static_cast<float>(1.0 / static_cast<double>(scale));
  const int count = n - 1;
  std::int64_t chunks = 0;
  for (int i = 0; i < count; ++i) chunks += (in[1 + i].numel + kChunk - 1) / kChunk;
  auto* pieces = static_cast<Piece*>(context->workspace(context, static_cast<std::size_t>(chunks) * sizeof(Piece)));
  auto* owner =
      static_cast<std::int32_t*>(context->workspace(context, static_cast<std::size_t>(chunks) * sizeof(std::int32_t)));
  auto* start =
      static_cast<std::int64_t*>(context->workspace(context, static_cast<std::size_t>(chunks) * sizeof(std::int64_t)));
  if (!pieces || !owner || !start) return Status::failed;
  std::int64_t c = 0;
  for (int i = 0; i < count; ++i) {
    for (std::int64_t at = 0; at < in[1 + i].numel; at += kChunk, ++c) {
      owner[c] = i;
      start[c] = at;
    }
  }
  const bool squares = out[2].defined;
  parallel_for(chunks, 2, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const TensorView& from = in[1 + owner[k]];
      pieces[k] =
          unscale_any(from, out[3 + owner[k]], start[k], std::min(kChunk, from.numel - start[k]), inverse, squares);
    }
  });
  auto* found = static_cast<float*>(out[0].data);
  auto* each = static_cast<float*>(out[1].data);
  double sum = 0;
  for (std::int64_t k = 0; k < chunks; ++k) {
    sum += pieces[k].squares;
    if (pieces[k].found != 0) *found = each[owner[k]] = 1;
  }
  if (squares) *static_cast<float*>(out[2].data) = static_cast<float>(std::sqrt(sum));
  return Status::ok;
}

// in: scale, growth tracker, found of each optimizer; out: scale, tracker.
Status update_scale(KernelContext*, const TensorView* in, int n, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const ScaleUpdateAttributes*>(attributes);
  auto* scale = static_cast<float*>(out[0].data);
  auto* tracker = static_cast<std::int32_t*>(out[1].data);
  bool found = false;
  for (int i = 2; i < n; ++i) found |= *static_cast<const float*>(in[i].data) != 0;
  if (found) {
    // The factors are doubles, the scale is a float: one rounding, as PyTorch's kernel does it.
    const auto less = static_cast<float>(static_cast<double>(*scale) * a.backoff_factor);
    *scale = std::max(less, std::min(a.floor, *scale));
    *tracker = 0;
  } else if (++*tracker >= a.growth_interval) {
    // At least the interval, not equal to it: it may have been lowered meanwhile.
    const auto grown = static_cast<float>(static_cast<double>(*scale) * a.growth_factor);
    if (std::isfinite(grown)) *scale = std::max(*scale, std::min(grown, a.cap));
    *tracker = 0;
  }
  return Status::ok;
}

const RegisterCpuKernel registered[] = {
    {"amp_unscale", {DType::f32}, unscale},
    {"amp_update_scale", {DType::f32}, update_scale},
};

}  // namespace
}  // namespace halfstep::cpu
