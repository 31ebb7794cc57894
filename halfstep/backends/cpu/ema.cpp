// SPDX-License-Identifier: Apache-2.0
// The moving average of all parameters in one pass.
#include <algorithm>
#include <cmath>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kEmaChunk = 16384;
constexpr std::int64_t kEmaBlock = 1024;

// The difference is scaled, not the two values, so that an average of equal values is that value.
template <class T>
void move_towards(T* __restrict average, const T* __restrict value, T share, std::int64_t n) {
  if (share == T(0)) return;  // also where the value is infinite
  if (share == T(1)) {
    std::copy(value, value + n, average);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) average[i] += share * (value[i] - average[i]);
}

// in: unless (may be absent), hyper (f64: decay, warm-up, equal weights or not), parameters; out: count, averages.
Status ema_update(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  if (in[0].defined && *static_cast<const float*>(in[0].data) != 0) return Status::ok;
  struct Piece {
    std::int32_t tensor;
    std::int64_t start;
  };
  std::int64_t total = 0;
  for (int i = 2; i < n; ++i) total += (in[i].numel + kEmaChunk - 1) / kEmaChunk;
  auto* pieces = static_cast<Piece*>(context->workspace(context, static_cast<std::size_t>(total) * sizeof(Piece)));
  if (!pieces && total > 0) return Status::failed;
  if (runs_dry(context)) return Status::ok;
  const auto* hyper = static_cast<const double*>(in[1].data);
  const double decay = hyper[0], warmup = hyper[1];
  auto& count = *static_cast<std::int64_t*>(out[0].data);
  const auto before = static_cast<double>(count);
  double share = 1 - decay;
  if (warmup > 0) share = 1 - decay * (1 - std::exp(-before / warmup));
  if (hyper[2] != 0) share = 1 / (before + 1);
  if (count == 0) share = 1;
  ++count;
  std::int64_t c = 0;
  for (int i = 2; i < n; ++i) {
    for (std::int64_t at = 0; at < in[i].numel; at += kEmaChunk) pieces[c++] = {i, at};
  }
  parallel_for(total, 2, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const TensorView& parameter = in[pieces[k].tensor];
      void* average = out[pieces[k].tensor - 1].data;
      const std::int64_t start = pieces[k].start, size = std::min(kEmaChunk, parameter.numel - start);
      if (parameter.dtype == DType::f64) {
        move_towards(static_cast<double*>(average) + start, static_cast<const double*>(parameter.data) + start, share,
                     size);
        continue;
      }
      float* to = static_cast<float*>(average) + start;
      if (parameter.dtype == DType::f32) {
        move_towards(to, static_cast<const float*>(parameter.data) + start, static_cast<float>(share), size);
        continue;
      }
      float block[kEmaBlock];
      for (std::int64_t at = 0; at < size; at += kEmaBlock) {
        const std::int64_t part = std::min(kEmaBlock, size - at);
        load_floats(parameter.dtype, parameter.data, start + at, part, block);
        move_towards(to + at, block, static_cast<float>(share), part);
      }
    }
  });
  return Status::ok;
}

const RegisterCpuKernel ema_kernels("ema_update", {DType::f32}, ema_update, kRunsDry);

}  // namespace
}  // namespace halfstep::cpu
