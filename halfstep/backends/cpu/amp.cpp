// SPDX-License-Identifier: Apache-2.0
// Loss scaling: one pass over many tensors that unscales, checks and sums squares, or checks only; and the update of
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
constexpr std::int64_t kAmpChunk = 16384;
constexpr std::int64_t kAmpBlock = 2048;  // elements worked on at a time

struct Chunk {
  std::int32_t tensor;
  bool finite;
  std::int64_t start;
  double squares;
};

// `body(i, start, size)` works on a piece of tensor i and says what it held; tensors of which `known(i)` says that they
// are finite are left out. Null when there is no memory.
template <class Known, class Body>
const Chunk* each_chunk(KernelContext* context, const TensorView* tensors, int n, std::int64_t& chunks, Known&& known,
                        Body&& body) {
  chunks = 0;
  for (int i = 0; i < n; ++i) chunks += known(i) ? 0 : (tensors[i].numel + kAmpChunk - 1) / kAmpChunk;
  auto* all = static_cast<Chunk*>(context->workspace(context, static_cast<std::size_t>(chunks) * sizeof(Chunk)));
  if (!all || runs_dry(context)) return all;
  std::int64_t c = 0;
  for (std::int32_t i = 0; i < n; ++i) {
    if (known(i)) continue;
    for (std::int64_t at = 0; at < tensors[i].numel; at += kAmpChunk) all[c++] = {i, true, at, 0};
  }
  parallel_for(chunks, 2, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      Chunk& chunk = all[k];
      const std::int64_t stop = std::min(tensors[chunk.tensor].numel, chunk.start + kAmpChunk);
      for (std::int64_t at = chunk.start; at < stop; at += kAmpBlock) {
        const GradientBlock block = body(chunk.tensor, at, std::min(kAmpBlock, stop - at));
        chunk.finite &= block.finite;
        chunk.squares += block.squares;
      }
    }
  });
  return all;
}

bool nothing_known(int) { return false; }

double inverse_of(const TensorView& scale) { return 1.0 / static_cast<double>(*static_cast<const float*>(scale.data)); }

// out: found [], found for each gradient.
void report(const Chunk* all, std::int64_t chunks, TensorView* out) {
  auto* found = static_cast<float*>(out[0].data);
  auto* each = static_cast<float*>(out[1].data);
  for (std::int64_t k = 0; k < chunks; ++k) {
    if (!all[k].finite) *found = each[all[k].tensor] = 1;
  }
}

// in: scale, gradients; out: found [], found for each gradient, norm [] (may be absent), unscaled gradients. All
// gradients are dense.
Status unscale(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  const bool squares = out[2].defined;
  const bool dry = runs_dry(context);
  const double inverse = dry ? 1 : inverse_of(in[0]);
  std::int64_t chunks = 0;
  const Chunk* all = each_chunk(
      context, in + 1, n - 1, chunks, nothing_known, [&](std::int32_t i, std::int64_t at, std::int64_t size) {
        const TensorView &from = in[1 + i], &to = out[3 + i];
        return unscale_block(from.dtype, element(from.dtype, static_cast<const void*>(from.data), at),
                             element(to.dtype, to.data, at), size, inverse, squares);
      });
  if (!all && chunks > 0) return Status::failed;
  if (runs_dry(context)) return Status::ok;
  report(all, chunks, out);
  double sum = 0;
  for (std::int64_t k = 0; k < chunks; ++k) sum += all[k].squares;
  if (squares) *static_cast<float*>(out[2].data) = static_cast<float>(std::sqrt(sum));
  return Status::ok;
}

// Whether a piece of `from` would be finite if it were multiplied by `inverse`.
GradientBlock looked_at(const TensorView& from, std::int64_t at, std::int64_t size, double inverse) {
  return {finite_block(from.dtype, element(from.dtype, static_cast<const void*>(from.data), at), size, inverse), 0};
}

// in: scale, gradients, a bound on the magnitudes in each (infinity where nothing is known); out: found [], found for
// each gradient, of what unscaling will give: for optimizers that unscale in the pass that updates the parameters.
Status check(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  const bool dry = runs_dry(context);
  const double inverse = dry ? 1 : inverse_of(in[0]);
  const auto* bounds = static_cast<const float*>(in[n - 1].data);
  std::int64_t chunks = 0;
  const Chunk* all = each_chunk(
      context, in + 1, n - 2, chunks,
      [&](int i) {
        return !dry &&
               static_cast<double>(bounds[i]) * inverse <= static_cast<double>(std::numeric_limits<float>::max());
      },
      [&](std::int32_t i, std::int64_t at, std::int64_t size) { return looked_at(in[1 + i], at, size, inverse); });
  if (!all && chunks > 0) return Status::failed;
  if (runs_dry(context)) return Status::ok;
  report(all, chunks, out);
  return Status::ok;
}

// in: dense tensors; out: whether all of their values are finite.
Status all_finite(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  std::int64_t chunks = 0;
  const Chunk* all =
      each_chunk(context, in, n, chunks, nothing_known,
                 [&](std::int32_t i, std::int64_t at, std::int64_t size) { return looked_at(in[i], at, size, 1); });
  if (!all && chunks > 0) return Status::failed;
  if (runs_dry(context)) return Status::ok;
  *static_cast<bool*>(out[0].data) = std::all_of(all, all + chunks, [](const Chunk& c) { return c.finite; });
  return Status::ok;
}

bool is_set(const TensorView& flag) {
  return flag.dtype == DType::boolean ? *static_cast<const bool*>(flag.data)
                                      : *static_cast<const float*>(flag.data) != 0;
}

// in: scale, counters, found of each optimizer; out: scale, counters.
Status update_scale(KernelContext*, const TensorView* in, int n, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const ScaleUpdateAttributes*>(attributes);
  auto* scale = static_cast<float*>(out[0].data);
  auto* count = static_cast<std::int32_t*>(out[1].data);
  if (std::any_of(in + 2, in + n, is_set)) {
    count[HALFSTEP_SCALE_GROWTH] = a.restart;
    ++count[HALFSTEP_SCALE_IN_A_ROW];
    count[HALFSTEP_SCALE_USED] = std::min(count[HALFSTEP_SCALE_USED] + 1, a.hysteresis);
    if (count[HALFSTEP_SCALE_USED] == a.hysteresis) {
      // The factors are doubles, the scale is a float: one rounding, as PyTorch's kernel does it.
      const auto less = static_cast<float>(static_cast<double>(*scale) * a.backoff_factor);
      count[HALFSTEP_SCALE_STUCK] += *scale <= a.floor;
      *scale = std::max(less, std::min(a.floor, *scale));
      count[HALFSTEP_SCALE_AT_FLOOR] += *scale <= a.floor;
    }
  } else {
    count[HALFSTEP_SCALE_IN_A_ROW] = 0;
    if (a.refill_on_good_step) count[HALFSTEP_SCALE_USED] = 0;
    // At least the interval, not equal to it: it may have been lowered meanwhile.
    if (++count[HALFSTEP_SCALE_GROWTH] >= a.growth_interval) {
      const auto grown = static_cast<float>(static_cast<double>(*scale) * a.growth_factor);
      if (std::isfinite(grown)) *scale = std::max(*scale, std::min(grown, a.cap));
      count[HALFSTEP_SCALE_GROWTH] = count[HALFSTEP_SCALE_USED] = 0;
    }
  }
  return Status::ok;
}

const RegisterCpuKernel amp_kernels[] = {
    {"amp_unscale", {DType::f32}, unscale, kRunsDry},
    {"amp_check", {DType::f32}, check, kRunsDry},
    {"all_finite", {DType::f32}, all_finite, kRunsDry},
    {"amp_update_scale", {DType::f32}, update_scale},
};

}  // namespace
}  // namespace halfstep::cpu
