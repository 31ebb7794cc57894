// SPDX-License-Identifier: Apache-2.0
// Fake quantization, its gradients, and quantization to integers: the walk over tensors. What is not float32 (float64)
// next to each other goes through blocks in the first-level cache.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "halfstep/backends/cpu/quantize_block.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/strided_loop.h"
#include "halfstep/backends/cpu/visit.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kQuantizeBlock = 1024;
constexpr std::int64_t kQuantizeGrain = 32768;  // elements worth a thread
// Pieces of sums: the same for any number of threads, and so is the order in which they are added.
constexpr std::int64_t kSumPieces = 64;
constexpr std::int64_t kSmallestPiece = 16384;

// How a zero point is taken.
enum class ZeroPoint { cut, as_is, rounded };

// The numbers of all channels as C, in the kernel's workspace.
template <class C>
class GridChannels {
 public:
  GridChannels(KernelContext* context, const TensorView& scale, const TensorView& zero, const QuantizeAttributes& a,
               ZeroPoint form)
      : n_(scale.numel), each_(a.axis >= 0) {
    grid_.least = static_cast<C>(a.quant_min);
    grid_.most = static_cast<C>(a.quant_max);
    grid_.each = each_;
    grid_.fraction = form == ZeroPoint::as_is && each_ && is_floating(zero.dtype);
    auto* numbers = static_cast<C*>(
        context->workspace(context, static_cast<std::size_t>(std::max<std::int64_t>(3 * n_, 1)) * sizeof(C)));
    if (!numbers) return;
    const std::int64_t scale_stride = scale.ndim > 0 ? scale.strides[scale.ndim - 1] : 0;
    const std::int64_t zero_stride = zero.ndim > 0 ? zero.strides[zero.ndim - 1] : 0;
    for (std::int64_t c = 0; c < n_; ++c) {
      if (scale.dtype == DType::f64) {
        const double s = static_cast<const double*>(scale.data)[c * scale_stride];
        numbers[c] = static_cast<C>(s);
        numbers[n_ + c] = static_cast<C>(1 / s);
      } else {
        // In float32 whatever the input is, as PyTorch.
        const float s = static_cast<const float*>(scale.data)[c * scale_stride];
        numbers[c] = static_cast<C>(s);
        numbers[n_ + c] = static_cast<C>(1.0F / s);
      }
      double z = 0;
      if (zero.dtype == DType::i32) {
        z = static_cast<const std::int32_t*>(zero.data)[c * zero_stride];
      } else if (zero.dtype == DType::f64) {
        z = static_cast<const double*>(zero.data)[c * zero_stride];
      } else {
        z = static_cast<double>(static_cast<const float*>(zero.data)[c * zero_stride]);
      }
      if (form == ZeroPoint::rounded) {
        z = std::clamp(std::nearbyint(z), static_cast<double>(a.quant_min), static_cast<double>(a.quant_max));
      } else if (form == ZeroPoint::cut || !each_) {
        z = std::trunc(z);
      }
      numbers[2 * n_ + c] = static_cast<C>(z);
    }
    grid_.scale = numbers;
    grid_.inverse = numbers + n_;
    grid_.zero = numbers + 2 * n_;
  }
  bool ok() const { return grid_.scale != nullptr; }
  std::int64_t size() const { return n_; }
  const Grid<C>& grid() const { return grid_; }
  /// That of a run that begins with channel c and goes on to the next one with each element if `stride` is 1.
  Grid<C> from(std::int64_t c, std::int64_t stride) const {
    Grid<C> grid = grid_;
    grid.scale += c;
    grid.inverse += c;
    grid.zero += c;
    grid.each = stride != 0;
    return grid;
  }

 private:
  std::int64_t n_;
  bool each_;
  Grid<C> grid_{};
};

// The numbers of channels as an operand of a loop over `x`: its elements are 0, 1, ... along the axis.
struct ChannelView {
  std::int64_t strides[kMaxDims] = {};
  TensorView view;
  ChannelView(const TensorView& x, std::int64_t axis) : view(x) {
    if (axis >= 0) strides[axis] = 1;
    view.strides = strides;
    view.contiguous = x.ndim == 1 && axis == 0;
  }
};

template <class C>
constexpr DType kDTypeOf = std::is_same_v<C, double> ? DType::f64 : DType::f32;

// n elements of a floating tensor as C: where they lie, if they can be used there, or in the block.
template <class C>
const C* read_block(const TensorView& t, std::int64_t at, std::int64_t stride, std::int64_t n, C* block) {
  if (t.dtype == kDTypeOf<C> && stride == 1) return static_cast<const C*>(t.data) + at;
  read_row(t, at, stride, n, block);
  return block;
}
// Where n elements are to be written, and their way home.
template <class C>
C* block_target(const TensorView& t, std::int64_t at, std::int64_t stride, C* block) {
  return t.dtype == kDTypeOf<C> && stride == 1 ? static_cast<C*>(t.data) + at : block;
}
template <class C>
void write_block(TensorView& t, std::int64_t at, std::int64_t stride, std::int64_t n, const C* block,
                 const C* written) {
  if (written == block) write_row(t, at, stride, n, block);
}

// f(C{}) for what tensors of this dtype are computed in.
template <class F>
Status in_compute_type(DType dtype, F&& f) {
  return dtype == DType::f64 ? f(double{}) : f(float{});
}
const QuantizeAttributes& quantize_attributes(const void* attributes) {
  return *static_cast<const QuantizeAttributes*>(attributes);
}

// --- forward

// in: x, scale, zero point; out: y, mask (empty where it isn't asked for).
template <ZeroPoint form>
Status put_on_grid(KernelContext* context, const TensorView* in, int, TensorView* out, int m, const void* attributes) {
  const QuantizeAttributes& a = quantize_attributes(attributes);
  return in_compute_type(in[0].dtype, [&](auto zero) {
    using C = decltype(zero);
    const GridChannels<C> channels(context, in[1], in[2], a, form);
    if (!channels.ok()) return Status::failed;
    const bool masked = m > 1 && a.want_mask;
    const ChannelView of(in[0], a.axis);
    const StridedLoop<4> loop({&out[0], &in[0], masked ? &out[1] : &out[0], &of.view});
    loop.for_each_run(kQuantizeGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
      C x_block[kQuantizeBlock], y_block[kQuantizeBlock];
      std::uint8_t mask_block[kQuantizeBlock];
      if constexpr (std::is_same_v<C, float>) {
        if (stride[0] == 1 && stride[1] == 1 && stride[2] == 1 &&
            grid_values_of(channels.from(at[3], stride[3]), in[0].dtype, element(in[0].dtype, in[0].data, at[1]), n,
                           out[0].dtype, element(out[0].dtype, out[0].data, at[0]),
                           masked ? static_cast<std::uint8_t*>(out[1].data) + at[2] : nullptr)) {
          return;
        }
      }
      for (std::int64_t i = 0; i < n; i += kQuantizeBlock) {
        const std::int64_t part = std::min(kQuantizeBlock, n - i), to = at[0] + i * stride[0];
        const C* x = read_block(in[0], at[1] + i * stride[1], stride[1], part, x_block);
        C* y = block_target(out[0], to, stride[0], y_block);
        std::uint8_t *home = nullptr, *mask = nullptr;
        if (masked) {
          home = static_cast<std::uint8_t*>(out[1].data) + at[2] + i * stride[2];
          mask = stride[2] == 1 ? home : mask_block;
        }
        grid_values(channels.from(at[3] + i * stride[3], stride[3]), x, part, y, mask);
        write_block(out[0], to, stride[0], part, y_block, y);
        if (mask == mask_block) {
          for (std::int64_t j = 0; j < part; ++j) home[j * stride[2]] = mask[j];
        }
      }
    });
    return Status::ok;
  });
}

// in: x, scale, zero point; out: integers.
Status quantize(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const QuantizeAttributes& a = quantize_attributes(attributes);
  return in_compute_type(in[0].dtype, [&](auto zero) {
    using C = decltype(zero);
    const GridChannels<C> channels(context, in[1], in[2], a, ZeroPoint::as_is);
    if (!channels.ok()) return Status::failed;
    const ChannelView of(in[0], a.axis);
    const StridedLoop<3> loop({&out[0], &in[0], &of.view});
    loop.for_each_run(kQuantizeGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
      C x_block[kQuantizeBlock], q_block[kQuantizeBlock];
      for (std::int64_t i = 0; i < n; i += kQuantizeBlock) {
        const std::int64_t part = std::min(kQuantizeBlock, n - i);
        const C* x = read_block(in[0], at[1] + i * stride[1], stride[1], part, x_block);
        grid_integers(channels.from(at[2] + i * stride[2], stride[2]), x, part, q_block);
        visit_integral(out[0].dtype, [&](auto type) {
          using T = decltype(type);
          T* q = static_cast<T*>(out[0].data) + at[0] + i * stride[0];
          if (stride[0] == 1) {
            for (std::int64_t j = 0; j < part; ++j) q[j] = static_cast<T>(static_cast<std::int32_t>(q_block[j]));
          } else {
            for (std::int64_t j = 0; j < part; ++j) {
              q[j * stride[0]] = static_cast<T>(static_cast<std::int32_t>(q_block[j]));
            }
          }
        });
      }
    });
    return Status::ok;
  });
}

// in: integers, scale, zero point; out: y.
Status dequantize(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const QuantizeAttributes& a = quantize_attributes(attributes);
  return in_compute_type(out[0].dtype, [&](auto zero) {
    using C = decltype(zero);
    const GridChannels<C> channels(context, in[1], in[2], a, ZeroPoint::as_is);
    if (!channels.ok()) return Status::failed;
    const ChannelView of(in[0], a.axis);
    const StridedLoop<3> loop({&out[0], &in[0], &of.view});
    loop.for_each_run(kQuantizeGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
      C q_block[kQuantizeBlock], y_block[kQuantizeBlock];
      for (std::int64_t i = 0; i < n; i += kQuantizeBlock) {
        const std::int64_t part = std::min(kQuantizeBlock, n - i), to = at[0] + i * stride[0];
        visit_integral(in[0].dtype, [&](auto type) {
          const auto* q = static_cast<const decltype(type)*>(in[0].data) + at[1] + i * stride[1];
          for (std::int64_t j = 0; j < part; ++j) q_block[j] = static_cast<C>(q[j * stride[1]]);
        });
        C* y = block_target(out[0], to, stride[0], y_block);
        grid_points(channels.from(at[2] + i * stride[2], stride[2]), q_block, part, y);
        write_block(out[0], to, stride[0], part, y_block, y);
      }
    });
    return Status::ok;
  });
}

// in: x, alpha; out: y.
Status pact(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  return in_compute_type(in[0].dtype, [&](auto zero) {
    using C = decltype(zero);
    C alpha;
    read_row(in[1], 0, 1, 1, &alpha);
    const StridedLoop<2> loop({&out[0], &in[0]});
    loop.for_each_run(kQuantizeGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
      C x_block[kQuantizeBlock], y_block[kQuantizeBlock];
      for (std::int64_t i = 0; i < n; i += kQuantizeBlock) {
        const std::int64_t part = std::min(kQuantizeBlock, n - i), to = at[0] + i * stride[0];
        const C* x = read_block(in[0], at[1] + i * stride[1], stride[1], part, x_block);
        C* y = block_target(out[0], to, stride[0], y_block);
        clipped_values(x, alpha, part, y);
        write_block(out[0], to, stride[0], part, y_block, y);
      }
    });
    return Status::ok;
  });
}

// --- backward

// in: g, mask; out: the gradient of x.
Status fake_quantize_backward(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  return in_compute_type(in[0].dtype, [&](auto zero) {
    using C = decltype(zero);
    const StridedLoop<3> loop({&out[0], &in[0], &in[1]});
    loop.for_each_run(kQuantizeGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
      C g_block[kQuantizeBlock], y_block[kQuantizeBlock];
      std::uint8_t mask_block[kQuantizeBlock];
      if (is_low_precision(in[0].dtype) && in[0].dtype == out[0].dtype && stride[0] == 1 && stride[1] == 1 &&
          stride[2] == 1) {
        masked_bits(static_cast<const std::uint16_t*>(in[0].data) + at[1],
                    static_cast<const std::uint8_t*>(in[1].data) + at[2], n,
                    static_cast<std::uint16_t*>(out[0].data) + at[0]);
        return;
      }
      for (std::int64_t i = 0; i < n; i += kQuantizeBlock) {
        const std::int64_t part = std::min(kQuantizeBlock, n - i), to = at[0] + i * stride[0];
        const C* g = read_block(in[0], at[1] + i * stride[1], stride[1], part, g_block);
        const std::uint8_t* mask = static_cast<const std::uint8_t*>(in[1].data) + at[2] + i * stride[2];
        if (stride[2] != 1) {
          for (std::int64_t j = 0; j < part; ++j) mask_block[j] = mask[j * stride[2]];
          mask = mask_block;
        }
        C* y = block_target(out[0], to, stride[0], y_block);
        masked_values(g, mask, part, y);
        write_block(out[0], to, stride[0], part, y_block, y);
      }
    });
    return Status::ok;
  });
}

// What a sum is made of: pieces of the loop, each with sums of its own.
struct SumPieces {
  std::int64_t size, count;
  explicit SumPieces(std::int64_t numel)
      : size(std::max(kSmallestPiece, (numel + kSumPieces - 1) / kSumPieces)), count((numel + size - 1) / size) {}
  /// f(k, begin, end) for all of them, over threads.
  template <class F>
  void run(std::int64_t numel, F&& f) const {
    parallel_for(count, std::max<std::int64_t>(1, kQuantizeGrain / size), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = begin; k < end; ++k) f(k, k * size, std::min((k + 1) * size, numel));
    });
  }
};

void write_sum(TensorView& out, std::int64_t c, double total) {
  const std::int64_t at = out.ndim > 0 ? c * out.strides[out.ndim - 1] : 0;
  if (out.dtype == DType::f64) {
    static_cast<double*>(out.data)[at] = total;
  } else {
    static_cast<float*>(out.data)[at] = static_cast<float>(total);
  }
}

// in: g, x, scale, zero point; out: gradients of x, scale, zero point.
Status fake_quantize_learnable_backward(KernelContext* context, const TensorView* in, int, TensorView* out, int,
                                        const void* attributes) {
  const QuantizeAttributes& a = quantize_attributes(attributes);
  return in_compute_type(in[1].dtype, [&](auto zero) {
    using C = decltype(zero);
    const TensorView &g = in[0], &x = in[1];
    const GridChannels<C> channels(context, in[2], in[3], a, ZeroPoint::rounded);
    const SumPieces pieces(x.numel);
    const std::int64_t width = 2 * channels.size();
    auto* sums = static_cast<double*>(context->workspace(
        context, static_cast<std::size_t>(std::max<std::int64_t>(pieces.count * width, 1)) * sizeof(double)));
    if (!channels.ok() || !sums) return Status::failed;
    TensorView& x_grad = out[0];
    const ChannelView of(x, a.axis);
    const StridedLoop<4> loop({a.want_input ? &x_grad : &x, &g, &x, &of.view});
    pieces.run(x.numel, [&](std::int64_t k, std::int64_t begin, std::int64_t end) {
      double* own = sums + k * width;
      std::fill_n(own, width, 0.0);
      loop.for_runs(begin, end, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
        C g_block[kQuantizeBlock], x_block[kQuantizeBlock], d_block[kQuantizeBlock];
        C scale_terms[kQuantizeBlock], zero_terms[kQuantizeBlock];
        for (std::int64_t i = 0; i < n; i += kQuantizeBlock) {
          const std::int64_t part = std::min(kQuantizeBlock, n - i), to = at[0] + i * stride[0];
          const std::int64_t c = at[3] + i * stride[3];
          const C* from = read_block(g, at[1] + i * stride[1], stride[1], part, g_block);
          const C* values = read_block(x, at[2] + i * stride[2], stride[2], part, x_block);
          C* d = a.want_input ? block_target(x_grad, to, stride[0], d_block) : nullptr;
          const GridSums s =
              grid_gradients(channels.from(c, stride[3]), from, values, part, d, a.want_scale ? scale_terms : nullptr,
                             a.want_zero_point ? zero_terms : nullptr);
          if (d) write_block(x_grad, to, stride[0], part, d_block, d);
          if (stride[3] == 0) {
            own[2 * c] += s.scale;
            own[2 * c + 1] += s.zero;
            continue;
          }
          for (std::int64_t j = 0; j < part; ++j) {
            if (a.want_scale) own[2 * (c + j)] += static_cast<double>(scale_terms[j]);
            if (a.want_zero_point) own[2 * (c + j) + 1] += static_cast<double>(zero_terms[j]);
          }
        }
      });
    });
    for (std::int64_t c = 0; c < channels.size(); ++c) {
      double scale_sum = 0, zero_sum = 0;
      for (std::int64_t k = 0; k < pieces.count; ++k) {
        scale_sum += sums[k * width + 2 * c];
        zero_sum += sums[k * width + 2 * c + 1];
      }
      if (a.want_scale) write_sum(out[1], c, scale_sum * a.grad_factor);
      if (a.want_zero_point) write_sum(out[2], c, zero_sum * a.grad_factor);
    }
    return Status::ok;
  });
}

// in: g, x, alpha; out: gradients of x and alpha.
Status pact_backward(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const QuantizeAttributes& a = quantize_attributes(attributes);
  return in_compute_type(in[1].dtype, [&](auto zero) {
    using C = decltype(zero);
    const TensorView &g = in[0], &x = in[1];
    C alpha;
    read_row(in[2], 0, 1, 1, &alpha);
    const SumPieces pieces(x.numel);
    auto* sums = static_cast<double*>(context->workspace(
        context, static_cast<std::size_t>(std::max<std::int64_t>(pieces.count, 1)) * sizeof(double)));
    if (!sums) return Status::failed;
    TensorView& x_grad = out[0];
    const StridedLoop<3> loop({a.want_input ? &x_grad : &x, &g, &x});
    pieces.run(x.numel, [&](std::int64_t k, std::int64_t begin, std::int64_t end) {
      sums[k] = 0;
      loop.for_runs(begin, end, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
        C g_block[kQuantizeBlock], x_block[kQuantizeBlock], d_block[kQuantizeBlock];
        for (std::int64_t i = 0; i < n; i += kQuantizeBlock) {
          const std::int64_t part = std::min(kQuantizeBlock, n - i), to = at[0] + i * stride[0];
          const C* from = read_block(g, at[1] + i * stride[1], stride[1], part, g_block);
          const C* values = read_block(x, at[2] + i * stride[2], stride[2], part, x_block);
          C* d = a.want_input ? block_target(x_grad, to, stride[0], d_block) : nullptr;
          sums[k] += clipped_gradients(from, values, alpha, part, d);
          if (d) write_block(x_grad, to, stride[0], part, d_block, d);
        }
      });
    });
    double total = 0;
    for (std::int64_t k = 0; k < pieces.count; ++k) total += sums[k];
    if (a.want_scale) write_sum(out[1], 0, total);
    return Status::ok;
  });
}

// --- ranges

// in: min, max; out: scale, zero point. As PyTorch's observers, in float32 throughout.
Status quantization_parameters(KernelContext*, const TensorView* in, int, TensorView* out, int,
                               const void* attributes) {
  const auto& a = *static_cast<const QuantizationParametersAttributes*>(attributes);
  const auto steps = static_cast<float>(a.quant_max - a.quant_min), eps = static_cast<float>(a.eps);
  const auto least = static_cast<float>(a.quant_min), most = static_cast<float>(a.quant_max);
  std::int64_t middle = 0;
  if (a.quant_min >= 0) middle = a.quant_min == 0 && a.quant_max == 255 ? 128 : (a.quant_min + a.quant_max) / 2;
  const StridedLoop<4> loop({&out[0], &out[1], &in[0], &in[1]});
  loop.for_each_run(kQuantizeGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
    auto* scales = static_cast<float*>(out[0].data) + at[0];
    auto* zeros = static_cast<std::int32_t*>(out[1].data) + at[1];
    const auto* lows = static_cast<const float*>(in[0].data) + at[2];
    const auto* highs = static_cast<const float*>(in[1].data) + at[3];
    for (std::int64_t i = 0; i < n; ++i) {
      float& scale = scales[i * stride[0]];
      std::int32_t& zero = zeros[i * stride[1]];
      const float low = std::min(lows[i * stride[2]], 0.0F), high = std::max(highs[i * stride[3]], 0.0F);
      scale = 1;
      zero = 0;
      // Nothing was seen, or it is no range.
      if (!(lows[i * stride[2]] <= highs[i * stride[3]])) continue;
      if (a.symmetric) {
        scale = std::max(std::max(-low, high) / (steps / 2), eps);
        zero = static_cast<std::int32_t>(middle);
      } else {
        scale = std::max((high - low) / steps, eps);
        const float shift = least - std::nearbyint(low / scale);
        zero = static_cast<std::int32_t>(shift >= least ? std::min(shift, most) : least);
      }
    }
  });
  return Status::ok;
}

// in: x; out: min, max, in place. What isn't finite is not seen.
Status observe_range(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const ObserveRangeAttributes*>(attributes);
  const TensorView& x = in[0];
  const std::int64_t channels = out[0].numel;
  const SumPieces pieces(x.numel);
  auto* ranges = static_cast<float*>(context->workspace(
      context, static_cast<std::size_t>(std::max<std::int64_t>(pieces.count * 2 * channels, 1)) * sizeof(float)));
  if (!ranges) return Status::failed;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const ChannelView of(x, a.axis);
  const StridedLoop<2> loop({&x, &of.view});
  pieces.run(x.numel, [&](std::int64_t k, std::int64_t begin, std::int64_t end) {
    float *low = ranges + k * 2 * channels, *high = low + channels;
    std::fill_n(low, channels, kInfinity);
    std::fill_n(high, channels, -kInfinity);
    loop.for_runs(begin, end, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* stride) {
      float block[kQuantizeBlock];
      for (std::int64_t i = 0; i < n; i += kQuantizeBlock) {
        const std::int64_t part = std::min(kQuantizeBlock, n - i), c = at[1] + i * stride[1];
        const float* values = read_block(x, at[0] + i * stride[0], stride[0], part, block);
        (stride[1] == 0 ? widen_by_finite : widen_each_by_finite)(values, part, low + c, high + c);
      }
    });
  });
  const auto share = static_cast<float>(a.averaging_constant);
  const std::int64_t low_stride = out[0].ndim > 0 ? out[0].strides[0] : 0;
  const std::int64_t high_stride = out[1].ndim > 0 ? out[1].strides[0] : 0;
  for (std::int64_t c = 0; c < channels; ++c) {
    float low = kInfinity, high = -kInfinity;
    for (std::int64_t k = 0; k < pieces.count; ++k) {
      low = std::min(low, ranges[k * 2 * channels + c]);
      high = std::max(high, ranges[(k * 2 + 1) * channels + c]);
    }
    if (low > high) continue;  // nothing was seen
    float& min = static_cast<float*>(out[0].data)[c * low_stride];
    float& max = static_cast<float*>(out[1].data)[c * high_stride];
    if (share < 0) {
      min = std::min(min, low);
      max = std::max(max, high);
    } else if (min == kInfinity && max == -kInfinity) {
      min = low;
      max = high;
    } else {
      min += share * (low - min);
      max += share * (high - max);
    }
  }
  return Status::ok;
}

// --- values that are pending

std::size_t bytes_of(const TensorView& t) { return static_cast<std::size_t>(t.numel) * item_size(t.dtype); }

// in: values; out: flag, what they are kept in.
Status hold_pending(KernelContext*, const TensorView* in, int n, TensorView* out, int, const void*) {
  float& flag = *static_cast<float*>(out[0].data);
  if (flag != 0) return Status::ok;
  for (int i = 0; i < n; ++i) {
    if (in[i].numel > 0) std::memcpy(out[i + 1].data, in[i].data, bytes_of(in[i]));
  }
  flag = 1;
  return Status::ok;
}

// in: unless (may be absent), what is kept; out: flag, values.
Status settle_pending(KernelContext*, const TensorView* in, int n, TensorView* out, int, const void*) {
  float& flag = *static_cast<float*>(out[0].data);
  const bool dropped = in[0].defined && *static_cast<const float*>(in[0].data) != 0;
  for (int i = 1; dropped && flag != 0 && i < n; ++i) {
    if (in[i].numel > 0) std::memcpy(out[i].data, in[i].data, bytes_of(in[i]));
  }
  flag = 0;
  return Status::ok;
}

const RegisterCpuKernel registered_quantize[] = {
    {"hold_pending", {DType::f32}, hold_pending},
    {"settle_pending", {DType::f32}, settle_pending},
    {"observe_range", kFloatingDTypes, observe_range},
    {"fake_quantize", kFloatingDTypes, put_on_grid<ZeroPoint::as_is>},
    {"fake_quantize_backward", kFloatingDTypes, fake_quantize_backward},
    {"fake_quantize_learnable", kFloatingDTypes, put_on_grid<ZeroPoint::rounded>},
    {"fake_quantize_learnable_backward", kFloatingDTypes, fake_quantize_learnable_backward},
    {"pact", kFloatingDTypes, pact},
    {"pact_backward", kFloatingDTypes, pact_backward},
    {"quantize", kFloatingDTypes, quantize},
    {"dequantize", {DType::u8, DType::i8, DType::i32}, dequantize},
    {"quantization_parameters", {DType::f32}, quantization_parameters},
};

}  // namespace
}  // namespace halfstep::cpu
