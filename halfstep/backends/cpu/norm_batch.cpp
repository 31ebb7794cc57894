// SPDX-License-Identifier: Apache-2.0
// batch_norm: statistics of each channel over all samples and places, in any layout.
//
// The tensor is walked as runs that lie next to each other in memory: within one channel where places do (the NCHW
// layout), across channels where channels do (channels-last, and [N, C]).
#include <algorithm>
#include <cmath>

#include "halfstep/backends/cpu/row_block.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kBlock = 1024;

// The dimensions of `v` but the channels', in the order in which those of `like` lie in memory.
DimGroup places_like(const TensorView& v, const TensorView& like) {
  int order[kMaxDims], n = 0;
  for (int i = 0; i < like.ndim; ++i) {
    if (i == 1) continue;
    // Behind all that are not closer together.
    int at = n++;
    for (; at > 0 && like.strides[order[at - 1]] < like.strides[i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  DimGroup places;
  for (int i = n - 1; i >= 0; --i) places.push_outer(v.sizes[order[i]], v.strides[order[i]]);
  return places;
}
// Whether channels, not places, lie next to each other.
bool side_by_side(const TensorView& x, const DimGroup& places) {
  return x.strides[1] == 1 && places.inner_stride() != 1 && x.sizes[1] > 1;
}
// How many elements from place p on are a run in all three.
std::int64_t run_length(std::int64_t p, std::int64_t most, const DimGroup& a, const DimGroup& b, const DimGroup& c) {
  const auto left = [p](const DimGroup& g) { return g.inner_size() - p % g.inner_size(); };
  return std::min({most, left(a), left(b), left(c)});
}

// The sum over all places of term(x, y, channel), two at once: totals[2 * c] and [2 * c + 1]. `y` may be x itself.
template <class C, class F>
bool sums(KernelContext* context, const TensorView& x, const TensorView& y, const F& term, double* totals) {
  const DimGroup gx = places_like(x, x), gy = places_like(y, x);
  const std::int64_t channels = x.sizes[1], places = gx.numel;
  std::fill_n(totals, 2 * channels, 0.0);
  if (places == 0) return true;
  if (!side_by_side(x, gx)) {
    parallel_for(channels, row_grain(places * 2), [&](std::int64_t begin, std::int64_t end) {
      alignas(64) C xs[kBlock], ys[kBlock];
      for (std::int64_t c = begin; c < end; ++c) {
        double a = 0, b = 0;
        for (std::int64_t p = 0; p < places;) {
          const std::int64_t run = run_length(p, kBlock, gx, gy, gx);
          read_row(x, c * x.strides[1] + gx.offset(p), gx.inner_stride(), run, xs);
          const C* other = xs;
          if (&y != &x) {
            read_row(y, c * y.strides[1] + gy.offset(p), gy.inner_stride(), run, ys);
            other = ys;
          }
          a += sum_terms<C>(run, [&](std::int64_t j) { return term.first(xs[j], other[j], c); });
          b += sum_terms<C>(run, [&](std::int64_t j) { return term.second(xs[j], other[j], c); });
          p += run;
        }
        totals[2 * c] = a;
        totals[2 * c + 1] = b;
      }
    });
    return true;
  }
  // Channels side by side: chunks of places that depend on the shape only, each with its own sums.
  const std::int64_t chunk = std::max<std::int64_t>((places + 31) / 32, std::min<std::int64_t>(places, 64));
  const std::int64_t chunks = (places + chunk - 1) / chunk;
  auto* parts = static_cast<double*>(
      context->workspace(context, static_cast<std::size_t>(chunks * 2 * channels) * sizeof(double)));
  if (!parts) return false;
  parallel_for(chunks, row_grain(chunk * channels * 2), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) C xs[kBlock], ys[kBlock], a[kBlock], b[kBlock];
    for (std::int64_t k = begin; k < end; ++k) {
      double* part = parts + k * 2 * channels;
      std::fill_n(part, 2 * channels, 0.0);
      for (std::int64_t c0 = 0; c0 < channels; c0 += kBlock) {
        const std::int64_t width = std::min(kBlock, channels - c0);
        for (std::int64_t p0 = k * chunk; p0 < std::min(places, (k + 1) * chunk); p0 += 128) {
          std::fill_n(a, width, C(0));
          std::fill_n(b, width, C(0));
          for (std::int64_t p = p0; p < std::min({places, (k + 1) * chunk, p0 + 128}); ++p) {
            read_row(x, gx.offset(p) + c0, 1, width, xs);
            const C* other = xs;
            if (&y != &x) {
              read_row(y, gy.offset(p) + c0 * y.strides[1], y.strides[1], width, ys);
              other = ys;
            }
            for (std::int64_t c = 0; c < width; ++c) a[c] += term.first(xs[c], other[c], c0 + c);
            for (std::int64_t c = 0; c < width; ++c) b[c] += term.second(xs[c], other[c], c0 + c);
          }
          for (std::int64_t c = 0; c < width; ++c) {
            part[2 * (c0 + c)] += static_cast<double>(a[c]);
            part[2 * (c0 + c) + 1] += static_cast<double>(b[c]);
          }
        }
      }
    }
  });
  for (std::int64_t k = 0; k < chunks; ++k) {
    for (std::int64_t i = 0; i < 2 * channels; ++i) totals[i] += parts[k * 2 * channels + i];
  }
  return true;
}

// out = f(x, y, channel) at all places. `y` may be x itself; out has x's sizes and any strides.
template <class C, class F>
void map(const TensorView& x, const TensorView& y, TensorView& out, const F& f) {
  const DimGroup go = places_like(out, out), gx = places_like(x, out), gy = places_like(y, out);
  const std::int64_t channels = out.sizes[1], places = go.numel;
  const auto apply = [&](std::int64_t out_at, std::int64_t out_step, std::int64_t x_at, std::int64_t x_step,
                         std::int64_t y_at, std::int64_t y_step, std::int64_t n, const auto& channel, C* xs, C* ys) {
    read_row(x, x_at, x_step, n, xs);
    const C* other = xs;
    if (&y != &x) {
      read_row(y, y_at, y_step, n, ys);
      other = ys;
    }
    for (std::int64_t i = 0; i < n; ++i) xs[i] = f(xs[i], other[i], channel(i));
    write_row(out, out_at, out_step, n, xs);
  };
  if (side_by_side(out, go)) {
    parallel_for(places, row_grain(channels), [&](std::int64_t begin, std::int64_t end) {
      alignas(64) C xs[kBlock], ys[kBlock];
      for (std::int64_t p = begin; p < end; ++p) {
        for (std::int64_t c = 0; c < channels; c += kBlock) {
          apply(
              go.offset(p) + c, 1, gx.offset(p) + c * x.strides[1], x.strides[1], gy.offset(p) + c * y.strides[1],
              y.strides[1], std::min(kBlock, channels - c), [c](std::int64_t i) { return c + i; }, xs, ys);
        }
      }
    });
    return;
  }
  parallel_for(channels, row_grain(places), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) C xs[kBlock], ys[kBlock];
    for (std::int64_t c = begin; c < end; ++c) {
      for (std::int64_t p = 0; p < places;) {
        const std::int64_t n = run_length(p, kBlock, go, gx, gy);
        apply(
            c * out.strides[1] + go.offset(p), go.inner_stride(), c * x.strides[1] + gx.offset(p), gx.inner_stride(),
            c * y.strides[1] + gy.offset(p), gy.inner_stride(), n, [c](std::int64_t) { return c; }, xs, ys);
        p += n;
      }
    }
  });
}

template <class First, class Second>
struct Terms {
  First first;
  Second second;
};
template <class First, class Second>
Terms(First, Second) -> Terms<First, Second>;

const BatchNormAttributes& batch_attributes(const void* p) { return *static_cast<const BatchNormAttributes*>(p); }

double* workspace(KernelContext* context, std::int64_t n) {
  return static_cast<double*>(
      context->workspace(context, static_cast<std::size_t>(std::max<std::int64_t>(n, 1)) * sizeof(double)));
}

// Inputs: x, weight, bias, running mean, running variance. Outputs: y, mean, rstd, variance (biased), [C] each.
template <class C>
bool forward(KernelContext* context, const TensorView* in, TensorView* out, const BatchNormAttributes& a) {
  const TensorView& x = in[0];
  const std::int64_t channels = x.sizes[1];
  auto* factor = reinterpret_cast<C*>(workspace(context, 3 * channels));
  if (!factor) return false;
  C *offset = factor + channels, *centre = factor + 2 * channels;
  std::fill_n(offset, channels, C(0));
  C *mean = static_cast<C*>(out[1].data), *rstd = static_cast<C*>(out[2].data), *var = static_cast<C*>(out[3].data);
  if (a.training) {
    double* totals = workspace(context, 2 * channels);
    if (!totals) return false;
    const double n = static_cast<double>(x.numel) / static_cast<double>(channels);
    const auto none = [](C, C, std::int64_t) { return C(0); };
    if (!sums<C>(context, x, x, Terms{[](C v, C, std::int64_t) { return v; }, none}, totals)) return false;
    for (std::int64_t c = 0; c < channels; ++c) mean[c] = static_cast<C>(totals[2 * c] / n);
    // What rounding the mean lost comes back in the second pass.
    if (!sums<C>(context, x, x,
                 Terms{[mean](C v, C, std::int64_t c) { return (v - mean[c]) * (v - mean[c]); },
                       [mean](C v, C, std::int64_t c) { return v - mean[c]; }},
                 totals)) {
      return false;
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      const double shift = totals[2 * c + 1] / n;
      const double v = std::max(totals[2 * c] / n - shift * shift, 0.0);
      var[c] = static_cast<C>(totals[2 * c] != totals[2 * c] ? totals[2 * c] : v);
      rstd[c] = static_cast<C>(1 / std::sqrt(static_cast<double>(var[c]) + a.eps));
      centre[c] = mean[c];
      offset[c] = static_cast<C>(-shift);
      mean[c] += static_cast<C>(shift);
    }
  } else {
    for (std::int64_t c = 0; c < channels; ++c) {
      mean[c] = static_cast<const C*>(in[3].data)[c];
      var[c] = static_cast<const C*>(in[4].data)[c];
      rstd[c] = static_cast<C>(1 / std::sqrt(static_cast<double>(var[c]) + a.eps));
      centre[c] = mean[c];
    }
  }
  const C* weight = in[1].defined ? static_cast<const C*>(in[1].data) : nullptr;
  const C* bias = in[2].defined ? static_cast<const C*>(in[2].data) : nullptr;
  for (std::int64_t c = 0; c < channels; ++c) {
    factor[c] = weight ? rstd[c] * weight[c] : rstd[c];
    offset[c] = offset[c] * factor[c] + (bias ? bias[c] : C(0));
  }
  map<C>(x, x, out[0], [=](C v, C, std::int64_t c) { return (v - centre[c]) * factor[c] + offset[c]; });
  return true;
}

// Inputs: g, x, weight, mean, rstd. Outputs: dx, dweight, dbias.
template <class C>
bool backward(KernelContext* context, const TensorView* in, TensorView* out, const BatchNormAttributes& a) {
  const TensorView &g = in[0], &x = in[1];
  const std::int64_t channels = x.sizes[1];
  const C *mean = static_cast<const C*>(in[3].data), *rstd = static_cast<const C*>(in[4].data);
  const C* weight = in[2].defined ? static_cast<const C*>(in[2].data) : nullptr;
  double* totals = workspace(context, 2 * channels);
  auto* factors = reinterpret_cast<C*>(workspace(context, 3 * channels));
  if (!totals || !factors) return false;
  // sum(g) and sum(g z), z = (x - mean) rstd
  if (!sums<C>(context, x, g,
               Terms{[](C, C gv, std::int64_t) { return gv; },
                     [=](C v, C gv, std::int64_t c) { return gv * ((v - mean[c]) * rstd[c]); }},
               totals)) {
    return false;
  }
  for (std::int64_t c = 0; c < channels; ++c) {
    if (out[1].numel > 0) static_cast<C*>(out[1].data)[c] = static_cast<C>(totals[2 * c + 1]);
    if (out[2].numel > 0) static_cast<C*>(out[2].data)[c] = static_cast<C>(totals[2 * c]);
  }
  if (out[0].numel == 0) return true;
  const double n = static_cast<double>(x.numel) / static_cast<double>(channels);
  C *scale = factors, *mean_g = factors + channels, *mean_gz = factors + 2 * channels;
  for (std::int64_t c = 0; c < channels; ++c) {
    scale[c] = weight ? weight[c] * rstd[c] : rstd[c];
    mean_g[c] = a.training ? static_cast<C>(totals[2 * c] / n) : C(0);
    mean_gz[c] = a.training ? static_cast<C>(totals[2 * c + 1] / n) : C(0);
  }
  map<C>(x, g, out[0], [=](C v, C gv, std::int64_t c) {
    return scale[c] * (gv - mean_g[c] - ((v - mean[c]) * rstd[c]) * mean_gz[c]);
  });
  return true;
}

// running = (1 - momentum) * running + momentum * batch. Inputs: batch mean, batch variance (biased). Outputs: both
// running statistics.
template <class T, class C>
void update(const TensorView* in, TensorView* out, const BatchNormAttributes& a) {
  const double unbiased = a.count / std::max(a.count - 1, 1.0);
  for (int k = 0; k < 2; ++k) {
    T* to = static_cast<T*>(out[k].data);
    const C* from = static_cast<const C*>(in[k].data);
    for (std::int64_t c = 0; c < in[k].numel; ++c) {
      const double batch = static_cast<double>(from[c]) * (k == 1 ? unbiased : 1.0);
      T& r = to[c * out[k].strides[0]];
      r = static_cast<T>((1 - a.momentum) * static_cast<double>(r) + a.momentum * batch);
    }
  }
}

Status forward_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = batch_attributes(p);
  const bool ok =
      in[0].dtype == DType::f64 ? forward<double>(context, in, out, a) : forward<float>(context, in, out, a);
  return ok ? Status::ok : Status::failed;
}
Status backward_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = batch_attributes(p);
  const bool ok =
      in[1].dtype == DType::f64 ? backward<double>(context, in, out, a) : backward<float>(context, in, out, a);
  return ok ? Status::ok : Status::failed;
}
Status update_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = batch_attributes(p);
  if (out[0].dtype == DType::f64) {
    in[0].dtype == DType::f64 ? update<double, double>(in, out, a) : update<double, float>(in, out, a);
  } else {
    in[0].dtype == DType::f64 ? update<float, double>(in, out, a) : update<float, float>(in, out, a);
  }
  return Status::ok;
}

const RegisterCpuKernel registered[] = {
    {"batch_norm", kFloatingDTypes, forward_kernel},
    {"batch_norm_backward", kFloatingDTypes, backward_kernel},
    {"batch_norm_update", {DType::f32, DType::f64}, update_kernel},
};

}  // namespace
}  // namespace halfstep::cpu
