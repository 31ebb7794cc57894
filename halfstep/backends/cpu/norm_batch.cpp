// SPDX-License-Identifier: Apache-2.0
// batch_norm, batch_norm_act and batch_norm_silu: statistics of each channel over all samples and places, in any layout
// and one pass, then one pass that normalises, adds and activates.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/norm_batch.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <cmath>

#include "halfstep/backends/cpu/norm_passes-inl.h"
#include "halfstep/backends/cpu/wide-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_NORM_BATCH_
#define HALFSTEP_BACKENDS_CPU_NORM_BATCH_
namespace halfstep::cpu {
/// What is normalised, and how: inputs and outputs of batch_norm, and batch_norm_act's residual.
struct BatchNormForward {
  const TensorView *x, *weight, *bias, *mean, *var, *residual;
  TensorView *y, *out_mean, *out_rstd, *out_var;
  const BatchNormAttributes* attributes;
  int activation;  // as the attribute, or kSiluOfNorm
};
inline constexpr int kSiluOfNorm = -1;
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

// Means and sums of squared differences, [channels] each, in workspace.
bool batch_moments(KernelContext* context, const TensorView& x, const ChannelWalk& walk, double*& means,
                   double*& sums) {
  auto* const mean =
      static_cast<double*>(context->workspace(context, static_cast<std::size_t>(moments_size(walk)) * sizeof(double)));
  if (!mean) return false;
  if (runs_dry(context)) return true;
  means = mean;
  sums = mean + walk.channels;
  visit_strips(
      x.dtype, [&](auto tag) { return Strips<decltype(tag)>(x, x, walk).direct(); },
      [&](auto tag) { moments<decltype(tag)>(x, walk, written_past_caches(x), mean); });
  return true;
}

// --- the result

/// What follows a normalisation: nothing, silu, relu, or relu6, which also sets what is at least `kBound` to that. NaN
/// stays NaN.
template <int kBound>  // 0: none
struct Rectified {
  static constexpr bool kRounded = true;
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> v) const {
    // Of a number and NaN, x86's maximum is the second operand; -0 plus 0 is 0.
    const auto rectified = hn::Add(hn::Max(hn::Zero(d), v), hn::Zero(d));
    if constexpr (kBound == 0) return rectified;
    return hn::Min(hn::Set(d, static_cast<hn::TFromD<D>>(kBound)), rectified);
  }
  // Of bfloat16, as integers: negative numbers and -0 are less than 0, positive ones are in order. After rounding,
  // which changes neither sign nor order, and the bound is a bfloat16.
  template <class D>
  HWY_INLINE hn::Vec<D> packed(D d, hn::Vec<D> v) const {
    static_assert(kBound == 0 || kBound == 6);
    const hn::RebindToSigned<D> di;
    const auto rectified = hn::Max(hn::BitCast(di, v), hn::Zero(di));
    if constexpr (kBound == 0) return hn::BitCast(d, rectified);
    return hn::BitCast(d, hn::Min(rectified, hn::Set(di, std::int16_t{0x40c0})));
  }
};

template <bool kLow>  // whether results have 16 bits; the op silu's function, to the bit
struct SiluOf {
  static constexpr bool kRounded = false;
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> v) const {
    if constexpr (kLow) {
      return wide_silu_low(d, v);
    } else {
      return wide_times_sigmoid(d, v, v);
    }
  }
};

template <class T, class C, class Activation>
void normalise_all(const BatchNormForward& f, const ChannelWalk& walk, const C* centre, const C* factor,
                   const C* offset, const Activation& activate) {
  const TensorView& x = *f.x;
  const TensorView none{};
  const Strips<T> in(x, x, walk), residual(f.residual ? *f.residual : none, x, walk);
  Strips<T> out(*f.y, x, walk);
  const bool stream = out.direct() && written_past_caches(*f.y);
  for_strips_backwards(walk, [&](const Strip& s) {
    alignas(64) T in_block[kStrip], residual_block[kStrip], out_block[kStrip];
    with_parameters<C>(
        walk, s,
        [&](const auto& c, const auto& k, const auto& o) {
          normalise<T>(in.read(s, in_block), residual.read(s, residual_block), out.target(s, out_block), s.numel(), c,
                       k, o, stream, activate);
        },
        centre, factor, offset);
    out.written(s, out_block);
  });
}

template <class C>
bool forward(KernelContext* context, const BatchNormForward& f) {
  const TensorView& x = *f.x;
  const BatchNormAttributes& a = *f.attributes;
  const ChannelWalk walk(x, static_cast<std::int64_t>(hn::Lanes(ComputeTag<C>())));
  const std::int64_t channels = walk.channels, size = repeated_size(walk);
  if (channels == 0) return true;
  auto* centre = static_cast<C*>(context->workspace(context, static_cast<std::size_t>(3 * size) * sizeof(C)));
  if (!centre) return false;
  if (runs_dry(context)) {
    double *exact, *squares;
    return !a.training || batch_moments(context, x, walk, exact, squares);
  }
  C *factor = centre + size, *offset = centre + 2 * size;
  C *mean = static_cast<C*>(f.out_mean->data), *rstd = static_cast<C*>(f.out_rstd->data);
  C* var = static_cast<C*>(f.out_var->data);
  std::fill_n(offset, channels, C(0));
  if (a.training) {
    double *exact, *squares;
    if (!batch_moments(context, x, walk, exact, squares)) return false;
    each_channel(channels, [&](auto d, std::int64_t c) HWY_ATTR {
      const auto m = hn::LoadU(d, exact + c);
      store_rounded(m, d, mean + c);
      store_rounded(hn::Div(hn::LoadU(d, squares + c), hn::Set(d, static_cast<double>(walk.places))), d, var + c);
      // What rounding the mean lost, which the deviation need not be much larger than.
      store_rounded(hn::Sub(load_exact(d, mean + c), m), d, offset + c);
    });
  } else {
    std::copy_n(static_cast<const C*>(f.mean->data), channels, mean);
    std::copy_n(static_cast<const C*>(f.var->data), channels, var);
  }
  std::copy_n(mean, channels, centre);
  const C* weight = f.weight->defined ? static_cast<const C*>(f.weight->data) : nullptr;
  const C* bias = f.bias->defined ? static_cast<const C*>(f.bias->data) : nullptr;
  each_channel(channels, [&](auto d, std::int64_t c) HWY_ATTR {
    const auto deviation = hn::Sqrt(hn::Add(load_exact(d, var + c), hn::Set(d, a.eps)));
    store_rounded(hn::Div(hn::Set(d, 1.0), deviation), d, rstd + c);
    const auto scale = load_exact(d, rstd + c);
    store_rounded(weight ? hn::Mul(scale, load_exact(d, weight + c)) : scale, d, factor + c);
    const auto rest = hn::Mul(load_exact(d, offset + c), load_exact(d, factor + c));
    store_rounded(bias ? hn::Add(rest, load_exact(d, bias + c)) : rest, d, offset + c);
  });
  if (walk.places == 0) return true;
  for (C* values : {centre, factor, offset}) repeat(walk, values);
  const auto direct = [&](auto tag) {
    using T = decltype(tag);
    return Strips<T>(x, x, walk).direct() && Strips<T>(*f.y, x, walk).direct() &&
           (!f.residual || Strips<T>(*f.residual, x, walk).direct());
  };
  visit_strips(x.dtype, direct, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<ComputeScalar<T>, C>) {
      if (f.activation == kSiluOfNorm) {
        // Results in T: 16 bits where T has them, and perhaps where it is float32, which other layouts go through.
        if constexpr (sizeof(T) == 2) return normalise_all<T>(f, walk, centre, factor, offset, SiluOf<true>{});
        if constexpr (sizeof(T) == 4) {
          if (is_low_precision(x.dtype)) return normalise_all<T>(f, walk, centre, factor, offset, SiluOf<true>{});
        }
        if constexpr (sizeof(T) > 2) return normalise_all<T>(f, walk, centre, factor, offset, SiluOf<false>{});
      }
      if (f.activation == 0) return normalise_all<T>(f, walk, centre, factor, offset, Unchanged{});
      if (f.activation == 1) return normalise_all<T>(f, walk, centre, factor, offset, Rectified<0>{});
      normalise_all<T>(f, walk, centre, factor, offset, Rectified<6>{});
    }
  });
  return true;
}

}  // namespace

bool batch_norm_forward(KernelContext* context, const BatchNormForward& f) {
  return f.x->dtype == DType::f64 ? forward<double>(context, f) : forward<float>(context, f);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(batch_norm_forward);

// Inputs: x, weight, bias, running mean, running variance, for batch_norm_act a residual. Outputs: y; mean, rstd and
// biased variance, [C] each.
Status forward(KernelContext* context, const TensorView* in, int n, TensorView* out, const void* p, bool silu) {
  const BatchNormForward f{.x = &in[0],
                           .weight = &in[1],
                           .bias = &in[2],
                           .mean = &in[3],
                           .var = &in[4],
                           .residual = n > 5 && in[5].defined ? &in[5] : nullptr,
                           .y = &out[0],
                           .out_mean = &out[1],
                           .out_rstd = &out[2],
                           .out_var = &out[3],
                           .attributes = static_cast<const BatchNormAttributes*>(p),
                           .activation = silu ? kSiluOfNorm : static_cast<const BatchNormAttributes*>(p)->activation};
  return HWY_DYNAMIC_DISPATCH(batch_norm_forward)(context, f) ? Status::ok : Status::failed;
}
Status forward_kernel(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void* p) {
  return forward(context, in, n, out, p, false);
}
Status silu_kernel(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void* p) {
  return forward(context, in, n, out, p, true);
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
Status update_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = *static_cast<const BatchNormAttributes*>(p);
  if (out[0].dtype == DType::f64) {
    in[0].dtype == DType::f64 ? update<double, double>(in, out, a) : update<double, float>(in, out, a);
  } else {
    in[0].dtype == DType::f64 ? update<float, double>(in, out, a) : update<float, float>(in, out, a);
  }
  return Status::ok;
}

const RegisterCpuKernel norm_batch_kernels[] = {
    {"batch_norm", kFloatingDTypes, forward_kernel, kRunsDry},
    {"batch_norm_act", kFloatingDTypes, forward_kernel, kRunsDry},
    {"batch_norm_silu", kFloatingDTypes, silu_kernel, kRunsDry},
    {"batch_norm_update", {DType::f32, DType::f64}, update_kernel},
};

}  // namespace
}  // namespace halfstep::cpu
#endif
