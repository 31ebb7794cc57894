// SPDX-License-Identifier: Apache-2.0
// Loss scaling: one pass over all gradients that unscales, checks and sums squares, or checks only; and the update of
// the scale.
#include <algorithm>
#include <cmath>
#include <limits>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Elements of one piece of work: its flags and sum are found on their own, so that the result doesn't depend on the
// threads.
constexpr std::int64_t kChunk = 16384;
constexpr std::int64_t kBlock = 2048;  // elements worked on at a time

struct Chunk {
  std::int32_t gradient;
  bool finite;
  std::int64_t start;
  double squares;
};

// in: scale, gradients; out: found [], found for each gradient. `body(i, start, size, inverse)` works on a piece of
// gradient i and says what it held; gradients whose bound (if there are any) says enough are left out. Null when there
// is no memory.
template <class Body>
const Chunk* each_chunk(KernelContext* context, const TensorView* in, int n, TensorView* out, const float* bounds,
                        std::int64_t& chunks, Body&& body) {
  const auto inverse = 1.0 / static_cast<double>(*static_cast<const float*>(in[0].data));
  const auto finite = [&](int i) {
    return bounds != nullptr &&
           static_cast<double>(bounds[i]) * inverse <= static_cast<double>(std::numeric_limits<float>::max());
  };
  chunks = 0;
  for (int i = 0; i < n - 1; ++i) chunks += finite(i) ? 0 : (in[1 + i].numel + kChunk - 1) / kChunk;
  auto* all = static_cast<Chunk*>(context->workspace(context, static_cast<std::size_t>(chunks) * sizeof(Chunk)));
  if (!all) return nullptr;
  std::int64_t c = 0;
  for (std::int32_t i = 0; i < n - 1; ++i) {
    if (finite(i)) continue;
    for (std::int64_t at = 0; at < in[1 + i].numel; at += kChunk) all[c++] = {i, true, at, 0};
  }
  parallel_for(chunks, 2, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      Chunk& chunk = all[k];
      const std::int64_t stop = std::min(in[1 + chunk.gradient].numel, chunk.start + kChunk);
      for (std::int64_t at = chunk.start; at < stop; at += kBlock) {
        const GradientBlock block = body(chunk.gradient, at, std::min(kBlock, stop - at), inverse);
        chunk.finite &= block.finite;
        chunk.squares += block.squares;
      }
    }
  });
  auto* found = static_cast<float*>(out[0].data);
  auto* each = static_cast<float*>(out[1].data);
  for (std::int64_t k = 0; k < chunks; ++k) {
    if (!all[k].finite) *found = each[all[k].gradient] = 1;
  }
  return all;
}

// in: scale, gradients; out: found [], found for each gradient, norm [] (may be absent), unscaled gradients. All
// gradients are dense.
Status unscale(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  const bool squares = out[2].defined;
  std::int64_t chunks = 0;
  const Chunk* all = each_chunk(
      context, in, n, out, nullptr, chunks, [&](std::int32_t i, std::int64_t at, std::int64_t size, double inverse) {
        const TensorView &from = in[1 + i], &to = out[3 + i];
        return unscale_block(from.dtype, element(from.dtype, static_cast<const void*>(from.data), at),
                             element(to.dtype, to.data, at), size, inverse, squares);
      });
  if (!all && chunks > 0) return Status::failed;
  double sum = 0;
  for (std::int64_t k = 0; k < chunks; ++k) sum += all[k].squares;
  if (squares) *static_cast<float*>(out[2].data) = static_cast<float>(std::sqrt(sum));
  return Status::ok;
}

// in: scale, gradients, a bound on the magnitudes in each (infinity where nothing is known); out: found [], found for
// each gradient, of what unscaling will give: for optimizers that unscale in the pass that updates the parameters.
Status check(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  std::int64_t chunks = 0;
  const Chunk* all = each_chunk(
      context, in, n - 1, out, static_cast<const float*>(in[n - 1].data), chunks,
      [&](std::int32_t i, std::int64_t at, std::int64_t size, double inverse) -> GradientBlock {
        const TensorView& from = in[1 + i];
        return {finite_block(from.dtype, element(from.dtype, static_cast<const void*>(from.data), at), size, inverse),
                0};
      });
  return !all && chunks > 0 ? Status::failed : Status::ok;
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
    {"amp_check", {DType::f32}, check},
    {"amp_update_scale", {DType::f32}, update_scale},
};

}  // namespace
}  // namespace halfstep::cpu
