// SPDX-License-Identifier: Apache-2.0
// avg_pool2d, adaptive_avg_pool2d and their backward passes, as weighted sums over tables of taps.
#include "halfstep/backends/cpu/gather_planes.h"

namespace halfstep::cpu {
namespace {

double* workspace(KernelContext* context, std::int64_t n) {
  return static_cast<double*>(context->workspace(context, static_cast<std::size_t>(n + 1) * sizeof(double)));
}

// The windows along dimension d of an image of `size`, and what each is divided by; false without memory.
struct Windows {
  Taps taps;
  double* divisors = nullptr;
};
bool windows_of(KernelContext* context, const PoolAttributes& a, int d, std::int64_t size, std::int64_t n,
                Windows& to) {
  if (!window_taps(context, a, d, size, n, to.taps) || !(to.divisors = workspace(context, n))) return false;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t begin = i * a.stride[d] - a.padding[d];
    // With the padding on both sides, but not what ceil_mode adds beyond it.
    const std::int64_t all = std::min(begin + a.kernel[d], size + a.padding[d]) - begin;
    const std::int64_t inside = to.taps.first[i + 1] - to.taps.first[i];
    to.divisors[i] = a.divisor != 0 ? 1 : static_cast<double>(a.count_include_pad ? all : inside);
  }
  return true;
}
bool windows_of(KernelContext* context, const AdaptivePoolAttributes&, int, std::int64_t size, std::int64_t n,
                Windows& to) {
  if (!adaptive_taps(context, size, n, to.taps) || !(to.divisors = workspace(context, n))) return false;
  for (std::int64_t i = 0; i < n; ++i) to.divisors[i] = static_cast<double>(to.taps.first[i + 1] - to.taps.first[i]);
  return true;
}
double divisor_of(const PoolAttributes& a) { return a.divisor != 0 ? static_cast<double>(a.divisor) : 1; }
double divisor_of(const AdaptivePoolAttributes&) { return 1; }

template <class A>
Status forward(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = *static_cast<const A*>(p);
  const TensorView &x = in[0], &y = out[0];
  Windows rows, columns;
  if (!windows_of(context, a, 0, x.sizes[2], y.sizes[2], rows) ||
      !windows_of(context, a, 1, x.sizes[3], y.sizes[3], columns)) {
    return Status::out_of_memory;
  }
  gather_planes(x, y, rows.taps, columns.taps,
                {.rows = rows.divisors, .columns = columns.divisors, .all = divisor_of(a)});
  return Status::ok;
}

// Windows that are all divided by one number have it taken out of the sum; others become weights.
double take_out(Windows& w) {
  if (w.taps.size == 0 ||
      std::all_of(w.divisors, w.divisors + w.taps.size, [&](double v) { return v == w.divisors[0]; })) {
    return w.taps.size == 0 ? 1 : w.divisors[0];
  }
  for (std::int64_t i = 0; i < w.taps.size; ++i) {
    for (Tap* t = w.taps.taps + w.taps.first[i]; t != w.taps.end(i); ++t) t->weight = 1 / w.divisors[i];
  }
  return 1;
}

template <class A>
Status backward(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = *static_cast<const A*>(p);
  const TensorView &g = in[0], &dx = out[0];
  Windows rows, columns;
  if (!windows_of(context, a, 0, dx.sizes[2], g.sizes[2], rows) ||
      !windows_of(context, a, 1, dx.sizes[3], g.sizes[3], columns)) {
    return Status::out_of_memory;
  }
  const double divisor = divisor_of(a) * take_out(rows) * take_out(columns);
  Taps by_row, by_column;
  if (!reversed_taps(context, rows.taps, dx.sizes[2], by_row) ||
      !reversed_taps(context, columns.taps, dx.sizes[3], by_column)) {
    return Status::out_of_memory;
  }
  gather_planes(g, dx, by_row, by_column, {.all = divisor});
  return Status::ok;
}

const RegisterCpuKernel pool_kernels[] = {
    {"avg_pool2d", kFloatingDTypes, forward<PoolAttributes>},
    {"avg_pool2d_backward", kFloatingDTypes, backward<PoolAttributes>},
    {"adaptive_avg_pool2d", kFloatingDTypes, forward<AdaptivePoolAttributes>},
    {"adaptive_avg_pool2d_backward", kFloatingDTypes, backward<AdaptivePoolAttributes>},
};

}  // namespace
}  // namespace halfstep::cpu
