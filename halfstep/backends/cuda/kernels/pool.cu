// SPDX-License-Identifier: Apache-2.0
// avg_pool2d, adaptive_avg_pool2d and their backward passes: each place of the result sums what it is made of, row by
// row.
#include "device/reduce.cuh"
#include "device/window.cuh"

namespace hscuda {
namespace {

template <class Access>
struct AvgPool {
  static constexpr int kWidth = Access::kWidth, kTogether = 4;
  using C = typename Access::C;
  Image x, y;
  Windows rows, columns;
  double divisor;  // 0: the number of places
  bool with_padding;

  __device__ __forceinline__ void operator()(int64_t n, int64_t c, int h, int w) const {
    const Range r = rows.inside(h), k = columns.inside(w);
    C total[kWidth] = {};
    for (int i = r.first; i < r.end; ++i) {
      const int64_t line = x.at(n, c, rows.start(h) + i, columns.start(w));
      C sum[kWidth] = {};
      for (int l = k.first; l < k.end; l += kTogether) {
        typename Access::Raw raw[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          if (l + u < k.end) raw[u] = Access::fetch(x, line + static_cast<int64_t>(l + u) * x.w);
        }
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          if (l + u >= k.end) continue;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum[j] += Access::value(raw[u], j);
        }
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] += sum[j];
    }
    const C by =
        divisor != 0
            ? static_cast<C>(divisor)
            : static_cast<C>(static_cast<int64_t>(rows.places(h, with_padding)) * columns.places(w, with_padding));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) total[j] /= by;
    Access::store(y, y.at(n, c, h, w), total);
  }
};

template <class Access>
struct AvgPoolBackward {
  static constexpr int kWidth = Access::kWidth;
  using C = typename Access::C;
  Image g, x_grad;
  Windows rows, columns;
  double divisor;                  // of all windows, taken out of the sums
  bool weigh_rows, weigh_columns;  // divisors that differ from window to window are weights
  bool with_padding;

  __device__ __forceinline__ void operator()(int64_t n, int64_t c, int h, int w) const {
    const Range r = rows.of_place(h), k = columns.of_place(w);
    C total[kWidth] = {};
    for (int i = r.first; i < r.end; ++i) {
      C sum[kWidth] = {};
      for (int l = k.first; l < k.end; ++l) {
        const C weight = weigh_columns ? C(1) / static_cast<C>(columns.places(l, with_padding)) : C(1);
        const auto raw = Access::fetch(g, g.at(n, c, i, l));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] = fused(weight, Access::value(raw, j), sum[j]);
      }
      const C weight = weigh_rows ? C(1) / static_cast<C>(rows.places(i, with_padding)) : C(1);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] = fused(weight, sum[j], total[j]);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) total[j] /= static_cast<C>(divisor);
    Access::store(x_grad, x_grad.at(n, c, h, w), total);
  }
};

constexpr const char* kTooLarge = "images and windows of 2^29 places or more are for the CPU";

// What averages are divided by: a number of the program's, or 0.
double own_divisor(const halfstep_pool_attributes& a) { return static_cast<double>(a.divisor); }
double own_divisor(const halfstep_adaptive_pool_attributes&) { return 0; }
bool counts_padding(const halfstep_pool_attributes& a) { return a.count_include_pad != 0; }
bool counts_padding(const halfstep_adaptive_pool_attributes&) { return false; }

// Whether one window is the whole image and only that, with places enough to be worth several threads. Its results lie
// as a reduction leaves them.
bool is_reduction(const Tensor& x, const Tensor& y, const Windows& rows, const Windows& columns) {
  const int64_t places = x.sizes[2] * x.sizes[3];
  for (const Windows* w : {&rows, &columns}) {
    const Range all = w->inside(0);
    if (w->count != 1 || w->start(0) != 0 || all.first != 0 || all.end != w->size) return false;
  }
  const bool dense = (y.sizes[1] == 1 || y.strides[1] == 1) && (y.sizes[0] == 1 || y.strides[0] == y.sizes[1]);
  return dense && places >= 16;
}

template <class A>
halfstep_status average(Call& call) {
  const auto& a = call.attributes<A>();
  const Tensor &x = call.in[0], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  if (!within_reach(a) || !within_reach(x) || !within_reach(y)) return call.refuse(kTooLarge);
  Windows rows, columns;
  windows_of(a, x.sizes, y.sizes, rows, columns, false);
  if (is_reduction(x, y, rows, columns)) {
    const int64_t places = int64_t{rows.places(0, counts_padding(a))} * columns.places(0, counts_padding(a));
    const double divisor = own_divisor(a) != 0 ? own_divisor(a) : static_cast<double>(places);
    const bool done =
        reduce(call, x, 1u << 2 | 1u << 3, kFoldSum, {.kind = kFinishDivide, .a = divisor}, {y.data, y.dtype});
    return done ? call.launched() : call.no_memory();
  }
  with_access(x, y, {}, [&](auto access) {
    for_each_place(call, y,
                   AvgPool<decltype(access)>{Image(x), Image(y), rows, columns, own_divisor(a), counts_padding(a)});
  });
  return call.launched();
}

template <class A>
halfstep_status average_backward(Call& call) {
  const auto& a = call.attributes<A>();
  const Tensor &g = call.in[0], &x_grad = call.out[0];
  if (x_grad.numel == 0) return HALFSTEP_OK;
  if (!within_reach(a) || !within_reach(x_grad) || !within_reach(g)) return call.refuse(kTooLarge);
  Windows rows, columns;
  windows_of(a, x_grad.sizes, g.sizes, rows, columns, false);
  const bool padding = counts_padding(a);
  double divisor = own_divisor(a);
  bool weigh[2] = {false, false};
  if (divisor == 0) {
    divisor = 1;
    int d = 0;
    for (const Windows* w : {&rows, &columns}) {
      weigh[d] = !one_divisor(*w, padding);
      if (!weigh[d]) divisor *= w->places(0, padding);
      ++d;
    }
  }
  with_access(g, x_grad, {}, [&](auto access) {
    for_each_place(call, x_grad,
                   AvgPoolBackward<decltype(access)>{Image(g), Image(x_grad), rows, columns, divisor, weigh[0],
                                                     weigh[1], padding});
  });
  return call.launched();
}

constexpr KernelDef kernel(const char* op, halfstep_status (*run)(Call&)) {
  return {.op = op, .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = run};
}
constexpr KernelDef kKernels[] = {
    kernel("avg_pool2d", average<halfstep_pool_attributes>),
    kernel("avg_pool2d_backward", average_backward<halfstep_pool_attributes>),
    kernel("adaptive_avg_pool2d", average<halfstep_adaptive_pool_attributes>),
    kernel("adaptive_avg_pool2d_backward", average_backward<halfstep_adaptive_pool_attributes>),
};

}  // namespace

std::span<const KernelDef> pool_kernels() { return kKernels; }

}  // namespace hscuda
