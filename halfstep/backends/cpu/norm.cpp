// SPDX-License-Identifier: Apache-2.0
// layer_norm, rms_norm and group_norm: rows of contiguous elements with their own statistics.
//
// A row of group_norm has several channels of `inner` elements each, a parameter a channel; layer_norm and rms_norm
// have a parameter an element.
#include <algorithm>
#include <cmath>

#include "halfstep/backends/cpu/row_block.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kNormBlock = 2048;

const RowNormAttributes& norm_attributes(const void* p) { return *static_cast<const RowNormAttributes*>(p); }

// Which parameters go with element i of row r.
struct Parameters {
  std::int64_t inner;   // elements with one parameter
  std::int64_t groups;  // rows before the parameters start again
  std::int64_t per_row;
  Parameters(const RowNormAttributes& a, std::int64_t length)
      : inner(a.inner), groups(a.groups), per_row(length / a.inner) {}
  // Factors (or offsets) of elements [from, from + n) of a row.
  template <class C>
  const C* expand(const TensorView& view, std::int64_t row, std::int64_t from, std::int64_t n, C* buffer) const {
    const C* p = static_cast<const C*>(view.data) + row % groups * per_row;
    if (inner == 1) return p + from;
    for (std::int64_t i = 0; i < n;) {
      const std::int64_t at = (from + i) / inner, run = std::min(n - i, (at + 1) * inner - (from + i));
      std::fill_n(buffer + i, run, p[at]);
      i += run;
    }
    return buffer;
  }
};

// Inputs: x, weight, bias. Outputs: y, mean, rstd (one a row). rms_norm has no mean.
template <class C>
void forward(const TensorView* in, TensorView* out, const RowNormAttributes& a) {
  const TensorView& x = in[0];
  const std::int64_t rows = out[2].numel, n = rows > 0 ? x.numel / rows : 0;
  if (x.numel == 0) return;
  const Parameters parameters(a, n);
  const bool whole = n <= kNormBlock;
  // As in PyTorch, of the dtype that is computed in: that of bf16, 2^-7, would change ordinary results.
  const double epsilon = a.eps >= 0 ? a.eps : finfo(accumulate_dtype(x.dtype)).eps;
  parallel_for(rows, row_grain(n * 2), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) C row[kNormBlock], factors[kNormBlock], offsets[kNormBlock];
    for (std::int64_t r = begin; r < end; ++r) {
      const auto load = [&](std::int64_t at, std::int64_t count) { read_row(x, r * n + at, 1, count, row); };
      C mean = 0;
      if (!a.rms) {
        double sum = 0;
        for (std::int64_t at = 0; at < n; at += kNormBlock) {
          load(at, std::min(kNormBlock, n - at));
          sum += sum_of(row, std::min(kNormBlock, n - at));
        }
        mean = static_cast<C>(sum / static_cast<double>(n));
      }
      double squares = 0, rest = 0;  // what rounding the mean lost comes back in the second pass
      for (std::int64_t at = 0; at < n; at += kNormBlock) {
        const std::int64_t count = std::min(kNormBlock, n - at);
        if (!whole || a.rms) load(at, count);
        squares += sum_terms<C>(count, [&](std::int64_t i) { return (row[i] - mean) * (row[i] - mean); });
        if (!a.rms) rest += sum_terms<C>(count, [&](std::int64_t i) { return row[i] - mean; });
      }
      const double shift_d = rest / static_cast<double>(n);
      const C shift = static_cast<C>(shift_d);
      // Where all elements are nearly the same, rounding may leave a variance below 0. NaN stays.
      const double difference = squares / static_cast<double>(n) - shift_d * shift_d;
      const C rstd = static_cast<C>(1 / std::sqrt((difference < 0 ? 0 : difference) + epsilon));
      static_cast<C*>(out[1].data)[r] = mean + shift;
      static_cast<C*>(out[2].data)[r] = rstd;
      for (std::int64_t at = 0; at < n; at += kNormBlock) {
        const std::int64_t count = std::min(kNormBlock, n - at);
        if (!whole) load(at, count);
        for (std::int64_t i = 0; i < count; ++i) row[i] = ((row[i] - mean) - shift) * rstd;
        if (in[1].defined) {
          const C* w = parameters.expand(in[1], r, at, count, factors);
          for (std::int64_t i = 0; i < count; ++i) row[i] *= w[i];
        }
        if (in[2].defined) {
          const C* b = parameters.expand(in[2], r, at, count, offsets);
          for (std::int64_t i = 0; i < count; ++i) row[i] += b[i];
        }
        write_row(out[0], r * n + at, 1, count, row);
      }
    }
  });
}

// Inputs: g, x, weight, mean, rstd. Outputs: dx, dweight, dbias (the latter two empty where not wanted).
// With h = g * weight and z = (x - mean) * rstd: dx = rstd * (h - mean(h) - z * mean(h z)); without mean(h) for rms.
template <class C>
bool backward(KernelContext* context, const TensorView* in, TensorView* out, const RowNormAttributes& a) {
  const TensorView &g = in[0], &x = in[1], &weight = in[2];
  const std::int64_t rows = in[4].numel, n = rows > 0 ? x.numel / rows : 0;
  const C *means = static_cast<const C*>(in[3].data), *rstds = static_cast<const C*>(in[4].data);
  const std::int64_t places = out[1].numel > 0 ? out[1].numel : out[2].numel;
  const bool dry = runs_dry(context);
  for (int o : {1, 2}) std::fill_n(static_cast<C*>(out[o].data), dry ? 0 : out[o].numel, C(0));
  if (x.numel == 0) return true;
  const Parameters parameters(a, n);
  const double count_d = static_cast<double>(n);
  // Sums over rows: chunks of rows that depend on the shape only, each with its own sums.
  const std::int64_t chunk = std::max<std::int64_t>((rows + 15) / 16, std::max<std::int64_t>(1, 4096 / n));
  const std::int64_t chunks = (rows + chunk - 1) / chunk;
  C* sums = nullptr;
  if (places > 0) {
    const auto bytes = static_cast<std::size_t>(2 * chunks * places) * sizeof(C);
    sums = static_cast<C*>(context->workspace(context, bytes));
    if (!sums) return false;
  }
  if (dry) return true;
  if (sums) std::fill_n(sums, 2 * chunks * places, C(0));
  parallel_for(chunks, row_grain(chunk * n * 4), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) C gs[kNormBlock], xs[kNormBlock], factors[kNormBlock];
    for (std::int64_t k = begin; k < end; ++k) {
      for (std::int64_t r = k * chunk; r < std::min(rows, (k + 1) * chunk); ++r) {
        const C mean = means[r], rstd = rstds[r];
        // gs = h, xs = z
        const auto load = [&](std::int64_t at, std::int64_t count, bool scaled) {
          read_row(g, r * n + at, 1, count, gs);
          read_row(x, r * n + at, 1, count, xs);
          for (std::int64_t i = 0; i < count; ++i) xs[i] = (xs[i] - mean) * rstd;
          if (scaled && weight.defined) {
            const C* w = parameters.expand(weight, r, at, count, factors);
            for (std::int64_t i = 0; i < count; ++i) gs[i] *= w[i];
          }
        };
        double sum_h = 0, sum_hz = 0;
        for (std::int64_t at = 0; at < n; at += kNormBlock) {
          const std::int64_t count = std::min(kNormBlock, n - at);
          if (sums) {
            load(at, count, false);
            C* dw = sums + 2 * k * places + r % a.groups * parameters.per_row;
            C* db = dw + places;
            if (a.inner == 1) {
              for (std::int64_t i = 0; i < count; ++i) dw[at + i] += gs[i] * xs[i];
              for (std::int64_t i = 0; i < count; ++i) db[at + i] += gs[i];
            } else {
              for (std::int64_t i = 0; i < count;) {
                const std::int64_t p = (at + i) / a.inner, run = std::min(count - i, (p + 1) * a.inner - (at + i));
                dw[p] += static_cast<C>(dot_of(gs + i, xs + i, run));
                db[p] += static_cast<C>(sum_of(gs + i, run));
                i += run;
              }
            }
          }
          load(at, count, true);
          if (!a.rms) sum_h += sum_of(gs, count);
          sum_hz += dot_of(gs, xs, count);
        }
        if (out[0].numel == 0) continue;
        const C mean_h = static_cast<C>(sum_h / count_d), mean_hz = static_cast<C>(sum_hz / count_d);
        for (std::int64_t at = 0; at < n; at += kNormBlock) {
          const std::int64_t count = std::min(kNormBlock, n - at);
          if (n > kNormBlock) load(at, count, true);
          for (std::int64_t i = 0; i < count; ++i) gs[i] = rstd * (gs[i] - mean_h - xs[i] * mean_hz);
          write_row(out[0], r * n + at, 1, count, gs);
        }
      }
    }
  });
  for (int o : {1, 2}) {
    C* to = static_cast<C*>(out[o].data);
    for (std::int64_t i = 0; i < out[o].numel; ++i) {
      double total = 0;
      for (std::int64_t k = 0; k < chunks; ++k) total += static_cast<double>(sums[(2 * k + o - 1) * places + i]);
      to[i] = static_cast<C>(total);
    }
  }
  return true;
}

Status forward_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* p) {
  if (in[0].dtype == DType::f64) {
    forward<double>(in, out, norm_attributes(p));
  } else {
    forward<float>(in, out, norm_attributes(p));
  }
  return Status::ok;
}
Status backward_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const bool ok = in[1].dtype == DType::f64 ? backward<double>(context, in, out, norm_attributes(p))
                                            : backward<float>(context, in, out, norm_attributes(p));
  return ok ? Status::ok : Status::failed;
}

const RegisterCpuKernel norm_kernels[] = {
    {"layer_norm", kFloatingDTypes, forward_kernel},
    {"rms_norm", kFloatingDTypes, forward_kernel},
    {"group_norm", kFloatingDTypes, forward_kernel},
    {"norm_backward", kFloatingDTypes, backward_kernel, kRunsDry},
};

}  // namespace
}  // namespace halfstep::cpu
