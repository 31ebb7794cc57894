// SPDX-License-Identifier: Apache-2.0
// layer_norm, rms_norm and group_norm: rows of contiguous elements with their own statistics. norm_group.h has
// group_norm of channels-last images.
//
// A row of group_norm has several channels of `inner` elements each, a parameter a channel; layer_norm and rms_norm
// have a parameter an element.
#include <algorithm>
#include <cmath>

#include "halfstep/backends/cpu/norm_group.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/row_norm.h"

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

// Rows of tensors of one dtype are used where they lie, others in blocks of what is computed in; and in blocks too
// where a parameter has several elements.
struct Blocks {
  bool direct;
  DType dtype;        // of what the passes get
  std::int64_t size;  // elements of a row at a time

  Blocks(bool direct, const TensorView& x, const RowNormAttributes& a, bool parameters, std::int64_t n)
      : direct(direct),
        dtype(direct ? x.dtype : accumulate_dtype(x.dtype)),
        size(direct && (a.inner == 1 || !parameters) ? n : std::min(n, kNormBlock)) {}

  template <class C>
  const void* read(const TensorView& x, std::int64_t at, std::int64_t n, C* buffer) const {
    if (direct) return element(dtype, static_cast<const void*>(x.data), at);
    read_row(x, at, 1, n, buffer);
    return buffer;
  }
  // Calls write(where), which is to write n elements there.
  template <class C, class F>
  void write(TensorView& y, std::int64_t at, std::int64_t n, C* buffer, F&& f) const {
    if (direct) return f(element(dtype, y.data, at));
    f(static_cast<void*>(buffer));
    write_row(y, at, 1, n, buffer);
  }
  // f(at, n) for each block of a row.
  template <class F>
  void for_each(std::int64_t row, F&& f) const {
    for (std::int64_t at = 0; at < row; at += size) f(at, std::min(size, row - at));
  }
};

// Inputs: x, weight, bias. Outputs: y, mean, rstd (one a row). rms_norm has no mean.
template <class C>
void forward(const TensorView* in, TensorView* out, const RowNormAttributes& a) {
  const TensorView& x = in[0];
  const std::int64_t rows = out[2].numel, n = rows > 0 ? x.numel / rows : 0;
  if (x.numel == 0) return;
  const Parameters parameters(a, n);
  const Blocks blocks(x.dtype == out[0].dtype, x, a, in[1].defined || in[2].defined, n);
  // As in PyTorch, of the dtype that is computed in: that of bf16, 2^-7, would change ordinary results.
  const double epsilon = a.eps >= 0 ? a.eps : finfo(accumulate_dtype(x.dtype)).eps, count_d = static_cast<double>(n);
  if (blocks.direct && a.inner == 1 && a.groups == 1) {
    const RowsNorm norm{.n = n,
                        .centre = !a.rms,
                        .epsilon = epsilon,
                        .weight = in[1].defined ? in[1].data : nullptr,
                        .bias = in[2].defined ? in[2].data : nullptr};
    parallel_for(rows, row_grain(n * 2), [&](std::int64_t begin, std::int64_t end) {
      normalize_rows(x.dtype, element(x.dtype, static_cast<const void*>(x.data), begin * n), end - begin, norm,
                     element(x.dtype, out[0].data, begin * n), static_cast<C*>(out[1].data) + begin,
                     static_cast<C*>(out[2].data) + begin);
    });
    return;
  }
  parallel_for(rows, row_grain(n * 2), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) C buffer[kNormBlock], factors[kNormBlock], offsets[kNormBlock];
    for (std::int64_t r = begin; r < end; ++r) {
      C mean = 0;
      if (!a.rms) {
        double sum = 0;
        blocks.for_each(n, [&](std::int64_t at, std::int64_t count) {
          sum += row_sum(blocks.dtype, blocks.read(x, r * n + at, count, buffer), count);
        });
        mean = static_cast<C>(sum / count_d);
      }
      RowDeviations sums;
      blocks.for_each(n, [&](std::int64_t at, std::int64_t count) {
        add_deviations(blocks.dtype, blocks.read(x, r * n + at, count, buffer), count, static_cast<double>(mean), sums);
      });
      const RowScale scale = row_scale<C>(sums, static_cast<double>(mean), count_d, !a.rms, epsilon);
      static_cast<C*>(out[1].data)[r] = mean + static_cast<C>(scale.shift);
      static_cast<C*>(out[2].data)[r] = static_cast<C>(scale.rstd);
      blocks.for_each(n, [&](std::int64_t at, std::int64_t count) {
        const C* w = in[1].defined ? parameters.expand(in[1], r, at, count, factors) : nullptr;
        const C* b = in[2].defined ? parameters.expand(in[2], r, at, count, offsets) : nullptr;
        const void* from = blocks.read(x, r * n + at, count, buffer);
        blocks.write(out[0], r * n + at, count, buffer,
                     [&](void* to) { normalize_row(blocks.dtype, from, count, scale, w, b, to); });
      });
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
  const Blocks blocks(g.dtype == x.dtype && (out[0].numel == 0 || out[0].dtype == x.dtype), x, a,
                      weight.defined || places > 0, n);
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
      if (blocks.direct && a.inner == 1 && a.groups == 1) {
        const std::int64_t first = k * chunk, count = std::min(rows, first + chunk) - first;
        const auto at = [&](const TensorView& t) { return element(x.dtype, t.data, first * n); };
        C* const dw = sums ? sums + 2 * k * places : nullptr;
        const RowsGradient norm{.n = n,
                                .centre = !a.rms,
                                .weight = weight.defined ? weight.data : nullptr,
                                .dweight = dw,
                                .dbias = sums ? dw + places : nullptr};
        gradient_rows(x.dtype, at(g), at(x), count, means + first, rstds + first, norm,
                      out[0].numel > 0 ? at(out[0]) : nullptr);
        continue;
      }
      for (std::int64_t r = k * chunk; r < std::min(rows, (k + 1) * chunk); ++r) {
        const double mean = static_cast<double>(means[r]), rstd = static_cast<double>(rstds[r]);
        // f(at, n, g, x, weight)
        const auto for_blocks = [&](auto&& f) {
          blocks.for_each(n, [&](std::int64_t at, std::int64_t count) {
            const C* w = weight.defined ? parameters.expand(weight, r, at, count, factors) : nullptr;
            f(at, count, blocks.read(g, r * n + at, count, gs), blocks.read(x, r * n + at, count, xs), w);
          });
        };
        RowGradientSums row;
        for_blocks([&](std::int64_t at, std::int64_t count, const void* gb, const void* xb, const C* w) {
          C* dw = sums ? sums + 2 * k * places + r % a.groups * parameters.per_row : nullptr;
          C* db = sums ? dw + places : nullptr;
          if (!sums || a.inner == 1) {
            return add_gradient_sums(blocks.dtype, gb, xb, count, mean, rstd, w, sums ? dw + at : nullptr,
                                     sums ? db + at : nullptr, row);
          }
          for (std::int64_t i = 0; i < count;) {
            const std::int64_t p = (at + i) / a.inner, run = std::min(count - i, (p + 1) * a.inner - (at + i));
            RowGradientSums own;  // of a parameter, without its weight
            add_gradient_sums(blocks.dtype, element(blocks.dtype, gb, i), element(blocks.dtype, xb, i), run, mean, rstd,
                              nullptr, nullptr, nullptr, own);
            dw[p] += static_cast<C>(own.hz);
            db[p] += static_cast<C>(own.h);
            const double factor = w ? static_cast<double>(w[i]) : 1;
            row.h += own.h * factor;
            row.hz += own.hz * factor;
            i += run;
          }
        });
        if (out[0].numel == 0) continue;
        const double mean_h = a.rms ? 0 : row.h / count_d, mean_hz = row.hz / count_d;
        for_blocks([&](std::int64_t at, std::int64_t count, const void* gb, const void* xb, const C* w) {
          blocks.write(out[0], r * n + at, count, gs, [&](void* to) {
            row_gradient(blocks.dtype, gb, xb, count, mean, rstd, w, mean_h, mean_hz, to);
          });
        });
      }
    }
  });
  for (int o : {1, 2}) {
    column_sums(accumulate_dtype(x.dtype), sums + (o - 1) * places, chunks, 2 * places, out[o].numel, out[o].data);
  }
  return true;
}

Status forward_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  if (!in[0].contiguous) {
    return group_norm_images(context, in, out, norm_attributes(p)) ? Status::ok : Status::failed;
  }
  if (runs_dry(context)) return Status::ok;
  if (in[0].dtype == DType::f64) {
    forward<double>(in, out, norm_attributes(p));
  } else {
    forward<float>(in, out, norm_attributes(p));
  }
  return Status::ok;
}
Status backward_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  if (!in[1].contiguous) {
    return group_norm_images_backward(context, in, out, norm_attributes(p)) ? Status::ok : Status::failed;
  }
  const bool ok = in[1].dtype == DType::f64 ? backward<double>(context, in, out, norm_attributes(p))
                                            : backward<float>(context, in, out, norm_attributes(p));
  return ok ? Status::ok : Status::failed;
}

const RegisterCpuKernel norm_kernels[] = {
    {"layer_norm", kFloatingDTypes, forward_kernel},
    {"rms_norm", kFloatingDTypes, forward_kernel},
    {"group_norm", kFloatingDTypes, forward_kernel, kRunsDry},
    {"norm_backward", kFloatingDTypes, backward_kernel, kRunsDry},
};

}  // namespace
}  // namespace halfstep::cpu
