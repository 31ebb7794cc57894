// SPDX-License-Identifier: Apache-2.0
// Norm and clipping of all gradients together.
#include <algorithm>
#include <cmath>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Pieces of work are the same for any number of threads, and so is the order in which their sums are added.
constexpr std::int64_t kClipChunk = 16384;
constexpr std::int64_t kClipBlock = 1024;

struct Piece {
  std::int32_t tensor;
  std::int64_t start;
  double value;
};

Piece* cut(KernelContext* context, const TensorView* tensors, int n, std::int64_t* count) {
  *count = 0;
  for (int i = 0; i < n; ++i) *count += (tensors[i].numel + kClipChunk - 1) / kClipChunk;
  auto* pieces = static_cast<Piece*>(context->workspace(context, static_cast<std::size_t>(*count) * sizeof(Piece)));
  if (!pieces || runs_dry(context)) return pieces;
  std::int64_t c = 0;
  for (int i = 0; i < n; ++i) {
    for (std::int64_t at = 0; at < tensors[i].numel; at += kClipChunk) pieces[c++] = {i, at, 0};
  }
  return pieces;
}

// Sum of powers, or largest absolute value (NaN wins), of a piece. Sums are taken in double: squares of float32 fit.
double piece_norm(const TensorView& t, std::int64_t start, std::int64_t n, double exponent) {
  const bool largest = std::isinf(exponent);
  constexpr int kLanes = 8;
  double lanes[kLanes] = {};
  double total = 0;
  const auto add = [&](const auto* x, std::int64_t size) {
    std::int64_t i = 0;
    if (largest) {
      for (; i < size; ++i) {
        const double v = std::abs(static_cast<double>(x[i]));
        if (!(v <= total) && !std::isnan(total)) total = v;
      }
      return;
    }
    if (exponent != 2) {
      for (; i < size; ++i) {
        const double v = std::abs(static_cast<double>(x[i]));
        total += exponent == 1 ? v : std::pow(v, exponent);
      }
      return;
    }
    for (; i + kLanes <= size; i += kLanes) {
      for (int l = 0; l < kLanes; ++l) {
        const auto v = static_cast<double>(x[i + l]);
        lanes[l] += v * v;
      }
    }
    for (; i < size; ++i) total += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  };
  if (t.dtype == DType::f64) {
    add(static_cast<const double*>(t.data) + start, n);
  } else if (t.dtype == DType::f32) {
    add(static_cast<const float*>(t.data) + start, n);
  } else {
    float block[kClipBlock];
    for (std::int64_t at = 0; at < n; at += kClipBlock) {
      const std::int64_t size = std::min(kClipBlock, n - at);
      load_floats(t.dtype, t.data, start + at, size, block);
      add(block, size);
    }
  }
  for (double l : lanes) total += l;
  return total;
}

Status multi_norm(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void* attributes) {
  const double exponent = static_cast<const ClipAttributes*>(attributes)->norm_type;
  const bool largest = std::isinf(exponent);
  std::int64_t count;
  Piece* pieces = cut(context, in, n, &count);
  if (!pieces) return Status::failed;
  if (runs_dry(context)) return Status::ok;
  parallel_for(count, 2, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const TensorView& t = in[pieces[k].tensor];
      pieces[k].value = piece_norm(t, pieces[k].start, std::min(kClipChunk, t.numel - pieces[k].start), exponent);
    }
  });
  double total = 0;
  for (std::int64_t k = 0; k < count; ++k) {
    if (!largest) {
      total += pieces[k].value;
    } else if (!(pieces[k].value <= total) && !std::isnan(total)) {
      total = pieces[k].value;
    }
  }
  if (!largest) total = exponent == 2 ? std::sqrt(total) : std::pow(total, 1 / exponent);
  if (out[0].dtype == DType::f64) {
    *static_cast<double*>(out[0].data) = total;
  } else {
    *static_cast<float*>(out[0].data) = static_cast<float>(total);
  }
  return Status::ok;
}

// The sums of which norms are made, one for each piece in the order in which they are added up: for tensors that lie on
// several ranks. A `limit` of 1 asks for the sums that amp_unscale takes of what it writes.
Status multi_norm_pieces(KernelContext* context, const TensorView* in, int n, TensorView* out, int,
                         const void* attributes) {
  const auto& a = *static_cast<const ClipAttributes*>(attributes);
  std::int64_t count;
  Piece* pieces = cut(context, in, n, &count);
  if (!pieces) return Status::failed;
  if (runs_dry(context)) return Status::ok;
  parallel_for(count, 2, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const TensorView& t = in[pieces[k].tensor];
      const std::int64_t start = pieces[k].start, size = std::min(kClipChunk, t.numel - start);
      if (a.limit == 0) {
        pieces[k].value = piece_norm(t, start, size, a.norm_type);
        continue;
      }
      constexpr std::int64_t kUnscaled = 2048;  // elements that amp_unscale works on at a time
      alignas(64) char copy[kUnscaled * sizeof(double)];
      for (std::int64_t at = 0; at < size; at += kUnscaled) {
        pieces[k].value += unscale_block(t.dtype, element(t.dtype, static_cast<const void*>(t.data), start + at), copy,
                                         std::min(kUnscaled, size - at), 1, true)
                               .squares;
      }
    }
  });
  for (std::int64_t k = 0; k < count; ++k) static_cast<double*>(out[0].data)[k] = pieces[k].value;
  return Status::ok;
}

template <class T>
void clip_run(T* x, std::int64_t n, bool by_value, T limit, T factor) {
  if (by_value) {
    for (std::int64_t i = 0; i < n; ++i) {
      // A NaN passes both comparisons and stays.
      if (x[i] > limit) x[i] = limit;
      if (x[i] < -limit) x[i] = -limit;
    }
  } else {
    for (std::int64_t i = 0; i < n; ++i) x[i] *= factor;
  }
}

// in: norm (absent: clip by value), gradients; out: the gradients.
Status multi_clip(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void* attributes) {
  const double limit = static_cast<const ClipAttributes*>(attributes)->limit;
  const bool by_value = !in[0].defined;
  double factor = 1;
  if (!by_value && !runs_dry(context)) {
    const double norm = in[0].dtype == DType::f64 ? *static_cast<const double*>(in[0].data)
                                                  : static_cast<double>(*static_cast<const float*>(in[0].data));
    factor = limit / (norm + 1e-6);
    if (factor >= 1) return Status::ok;
  }
  std::int64_t count;
  Piece* pieces = cut(context, out, n - 1, &count);
  if (!pieces) return Status::failed;
  if (runs_dry(context)) return Status::ok;
  parallel_for(count, 2, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const TensorView& t = out[pieces[k].tensor];
      const std::int64_t start = pieces[k].start, size = std::min(kClipChunk, t.numel - start);
      if (t.dtype == DType::f64) {
        clip_run(static_cast<double*>(t.data) + start, size, by_value, limit, factor);
      } else if (t.dtype == DType::f32) {
        clip_run(static_cast<float*>(t.data) + start, size, by_value, static_cast<float>(limit),
                 static_cast<float>(factor));
      } else {
        float block[kClipBlock];
        for (std::int64_t at = 0; at < size; at += kClipBlock) {
          const std::int64_t part = std::min(kClipBlock, size - at);
          load_floats(t.dtype, t.data, start + at, part, block);
          clip_run(block, part, by_value, static_cast<float>(limit), static_cast<float>(factor));
          store_floats(t.dtype, t.data, start + at, part, block);
        }
      }
    }
  });
  return Status::ok;
}

const RegisterCpuKernel clip_kernels[] = {
    {"multi_norm", {DType::f32}, multi_norm, kRunsDry},
    {"multi_norm_pieces", {DType::f32}, multi_norm_pieces, kRunsDry},
    {"multi_clip", {DType::f32}, multi_clip, kRunsDry},
};

}  // namespace
}  // namespace halfstep::cpu
