// SPDX-License-Identifier: Apache-2.0
// interpolate and its backward pass: each place of the result sums what it is made of, row by row.
#include "device/window.cuh"
#include "halfstep/runtime/plugin_attributes.h"

namespace hscuda {
namespace {

template <class Access>
struct Interpolate {
  static constexpr int kWidth = Access::kWidth;
  using C = typename Access::C;
  Image x, y;
  Resampling rows, columns;

  __device__ __forceinline__ void operator()(int64_t n, int64_t c, int h, int w) const {
    const Resampling::Taps r = rows.taps(h), k = columns.taps(w);
    const int64_t from = x.at(n, c, r.low, k.low);
    C total[kWidth];
    const auto a = Access::fetch(x, from);
    if (r.share == 0 && k.share == 0) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] = Access::value(a, j);
    } else {
      // A neighbour without a share may be beyond the edge.
      const auto b = Access::fetch(x, k.share > 0 ? from + x.w : from);
      const int64_t below = r.share > 0 ? from + x.h : from;
      const auto d = Access::fetch(x, below);
      const auto e = Access::fetch(x, k.share > 0 ? below + x.w : below);
      const C left = static_cast<C>(1 - k.share), right = static_cast<C>(k.share);
      const C top = static_cast<C>(1 - r.share), bottom = static_cast<C>(r.share);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        C upper = left * Access::value(a, j), lower = left * Access::value(d, j);
        if (k.share > 0) {
          upper = fused(right, Access::value(b, j), upper);
          lower = fused(right, Access::value(e, j), lower);
        }
        total[j] = top * upper;
        if (r.share > 0) total[j] = fused(bottom, lower, total[j]);
      }
    }
    Access::store(y, y.at(n, c, h, w), total);
  }
};

template <class Access>
struct InterpolateBackward {
  static constexpr int kWidth = Access::kWidth;
  using C = typename Access::C;
  Image g, x_grad;
  Resampling rows, columns;

  __device__ __forceinline__ void operator()(int64_t n, int64_t c, int h, int w) const {
    const Range r = rows.of_place(h), k = columns.of_place(w);
    C total[kWidth] = {};
    for (int i = r.first; i < r.end; ++i) {
      const C row = static_cast<C>(rows.weight(i, h));
      if (row == 0) continue;
      C sum[kWidth] = {};
      for (int l = k.first; l < k.end; ++l) {
        const C column = static_cast<C>(columns.weight(l, w));
        if (column == 0) continue;
        const auto raw = Access::fetch(g, g.at(n, c, i, l));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] = fused(column, Access::value(raw, j), sum[j]);
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] = fused(row, sum[j], total[j]);
    }
    Access::store(x_grad, x_grad.at(n, c, h, w), total);
  }
};

constexpr const char* kTooLarge = "images of 2^29 places or more are for the CPU";

Resampling resampling(const halfstep_interpolate_attributes& a, int d, const Tensor& source, const Tensor& result) {
  Resampling r;
  r.from = static_cast<int>(source.sizes[2 + d]);
  r.to = static_cast<int>(result.sizes[2 + d]);
  r.scale = a.scale[d];
  r.mode = a.mode;
  r.align_corners = a.align_corners != 0;
  return r;
}

halfstep_status interpolate(Call& call) {
  const auto& a = call.attributes<halfstep_interpolate_attributes>();
  const Tensor &x = call.in[0], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  if (!within_reach(x) || !within_reach(y)) return call.refuse(kTooLarge);
  with_access(x, y, {}, [&](auto access) {
    for_each_place(call, y,
                   Interpolate<decltype(access)>{Image(x), Image(y), resampling(a, 0, x, y), resampling(a, 1, x, y)});
  });
  return call.launched();
}

halfstep_status interpolate_backward(Call& call) {
  const auto& a = call.attributes<halfstep_interpolate_attributes>();
  const Tensor &g = call.in[0], &x_grad = call.out[0];
  if (x_grad.numel == 0) return HALFSTEP_OK;
  if (!within_reach(g) || !within_reach(x_grad)) return call.refuse(kTooLarge);
  with_access(g, x_grad, {}, [&](auto access) {
    for_each_place(call, x_grad,
                   InterpolateBackward<decltype(access)>{Image(g), Image(x_grad), resampling(a, 0, x_grad, g),
                                                         resampling(a, 1, x_grad, g)});
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "interpolate", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = interpolate},
    {.op = "interpolate_backward",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = interpolate_backward},
};

}  // namespace

std::span<const KernelDef> resample_kernels() { return kKernels; }

}  // namespace hscuda
