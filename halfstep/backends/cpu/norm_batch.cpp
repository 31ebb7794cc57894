// SPDX-License-Identifier: Apache-2.0
// batch_norm, batch_norm_act and batch_norm_silu: statistics of each channel over all samples and places, in any layout
// and one pass, then one pass that normalises, adds and activates.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/norm_batch.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <cmath>

#include "halfstep/backends/cpu/norm_strips-inl.h"
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

// --- statistics

// s1 += x - shift, s2 += (x - shift)^2, element by element.
template <class T, class C, class P>
HWY_INLINE void add_moments(const T* x, std::int64_t n, const P& shift, C* HWY_RESTRICT s1, C* HWY_RESTRICT s2) {
  const ComputeTag<T> d;
  each_vector(d, n, [&](std::size_t i, auto part) HWY_ATTR {
    const auto difference = hn::Sub(part.read(d, x + i), part.get(d, shift, i));
    part.write(hn::Add(part.read(d, s1 + i), difference), d, s1 + i);
    part.write(hn::MulAdd(difference, difference, part.read(d, s2 + i)), d, s2 + i);
  });
}

// The same of four strips, `pitch` elements apart: sums are read and written a quarter as often.
template <class T, class C, class P>
HWY_INLINE void add_four_moments(const T* x, std::int64_t pitch, std::int64_t n, const P& shift, C* HWY_RESTRICT s1,
                                 C* HWY_RESTRICT s2) {
  const ComputeTag<T> d;
  const T *x1 = x + pitch, *x2 = x1 + pitch, *x3 = x2 + pitch;
  each_vector(d, n, [&](std::size_t i, auto part) HWY_ATTR {
    fetch_ahead(x, pitch, i, hn::Lanes(d));
    const auto k = part.get(d, shift, i);
    const auto d0 = hn::Sub(part.read(d, x + i), k), d1 = hn::Sub(part.read(d, x1 + i), k);
    const auto d2 = hn::Sub(part.read(d, x2 + i), k), d3 = hn::Sub(part.read(d, x3 + i), k);
    const auto sum = hn::Add(hn::Add(d0, d1), hn::Add(d2, d3));
    const auto squares = hn::Add(hn::MulAdd(d0, d0, hn::Mul(d1, d1)), hn::MulAdd(d2, d2, hn::Mul(d3, d3)));
    part.write(hn::Add(part.read(d, s1 + i), sum), d, s1 + i);
    part.write(hn::Add(part.read(d, s2 + i), squares), d, s2 + i);
  });
}

// Mean and sum of squared differences from it, of `width` channels over places [first, end). Blocks of places are
// summed about a number near their mean, then joined in float64 ("Updating Formulae and a Pairwise Algorithm for
// Computing Sample Variances", Chan, Golub and LeVeque 1979). About the mean of all before, a block's sum of squares is
// not much larger than its part in the whole, so that nothing cancels however large the mean is; the first block, which
// has none before it, is read twice.
template <class T>
class Moments {
 public:
  using C = ComputeScalar<T>;
  static constexpr std::int64_t kFirst = 4, kBlock = 128;  // strips

  Moments(const Strips<T>& x, const ChannelWalk& walk, std::int64_t channel, double* mean, double* squares)
      : x_(x),
        walk_(walk),
        channel_(channel),
        width_(walk.block_width(channel)),
        sum_width_(walk.sum_width(channel)),
        mean_(mean),
        squares_(squares) {}

  void run(std::int64_t first, std::int64_t end) {
    const T* values = x_.read(walk_.rows ? Strip{first, 1, channel_, width_} : Strip{first, 1, channel_, 1}, block_);
    for (std::int64_t c = 0; c < width_; ++c) shift_[c] = convert<C>(values[c]);
    std::int64_t place = sweep(first, end, kFirst);
    const double share = 1 / static_cast<double>(place - first);
    each_channel(width_, [&](auto d, std::int64_t c) HWY_ATTR {
      const auto mean = hn::Add(load_exact(d, shift_ + c), hn::Mul(hn::LoadU(d, a_ + c), hn::Set(d, share)));
      store_rounded(mean, d, shift_ + c);
    });
    sweep(first, end, kFirst);
    join(0, place - first);
    while (place < end) {
      each_channel(width_,
                   [&](auto d, std::int64_t c) HWY_ATTR { store_rounded(hn::LoadU(d, mean_ + c), d, shift_ + c); });
      const std::int64_t begin = place;
      place = sweep(begin, end, kBlock);
      join(begin - first, place - begin);
    }
  }

 private:
  // Sums from place `from` on over at most `strips` strips, into a_ and b_. Returns the place behind them.
  std::int64_t sweep(std::int64_t from, std::int64_t end, std::int64_t strips) {
    std::fill_n(s1_, sum_width_, C(0));
    std::fill_n(s2_, sum_width_, C(0));
    if (walk_.rows) {
      for (std::int64_t i = width_; i < sum_width_; ++i) shift_[i] = shift_[i - width_];
      from = sweep(from, end, strips, Run<C>{shift_});
    } else {
      from = sweep(from, end, strips, Same<C>{shift_[0]});
    }
    std::fill_n(a_, width_, 0.0);
    std::fill_n(b_, width_, 0.0);
    fold(s1_, sum_width_, width_, a_);
    fold(s2_, sum_width_, width_, b_);
    return from;
  }
  template <class P>
  std::int64_t sweep(std::int64_t from, std::int64_t end, std::int64_t strips, const P& shift) {
    while (strips > 0 && from < end) {
      const Strip s = walk_.summed_strip(from, end, channel_);
      const T* x = x_.read(s, block_);
      const std::int64_t pitch = strips >= 4 && x_.direct() ? walk_.four_summed(from, end) : 0;
      if (pitch > 0) {
        add_four_moments(x, pitch, s.numel(), shift, s1_, s2_);
        from += 4 * s.count;
        strips -= 4;
      } else {
        add_moments(x, s.numel(), shift, s1_, s2_);
        from += s.count;
        --strips;
      }
    }
    return from;
  }
  // The block's `n` places join the `before` that mean_ and squares_ are of.
  void join(std::int64_t before, std::int64_t n) {
    const double all = static_cast<double>(before + n), share = 1 / static_cast<double>(n);
    const double to_mean = static_cast<double>(n) / all, to_squares = static_cast<double>(before) * to_mean;
    if (before == 0) {
      std::fill_n(mean_, width_, 0.0);
      std::fill_n(squares_, width_, 0.0);
    }
    each_channel(width_, [&](auto d, std::int64_t c) HWY_ATTR {
      const auto a = hn::LoadU(d, a_ + c), mean = hn::LoadU(d, mean_ + c), part = hn::Mul(a, hn::Set(d, share));
      // At least 0; NaN, as the second operand, stays.
      const auto own = hn::Max(hn::Zero(d), hn::Sub(hn::LoadU(d, b_ + c), hn::Mul(a, part)));
      const auto difference = hn::Add(hn::Sub(load_exact(d, shift_ + c), mean), part);
      hn::StoreU(hn::Add(mean, hn::Mul(difference, hn::Set(d, to_mean))), d, mean_ + c);
      const auto between = hn::Mul(hn::Mul(difference, difference), hn::Set(d, to_squares));
      hn::StoreU(hn::Add(hn::LoadU(d, squares_ + c), hn::Add(own, between)), d, squares_ + c);
    });
  }

  const Strips<T>& x_;
  const ChannelWalk& walk_;
  const std::int64_t channel_, width_, sum_width_;
  double *mean_, *squares_;
  alignas(64) C shift_[kStrip], s1_[kStrip], s2_[kStrip];
  alignas(64) double a_[kStrip], b_[kStrip];
  alignas(64) T block_[kStrip];
};

// Means and sums of squared differences, [channels] each.
bool moments(KernelContext* context, const TensorView& x, const ChannelWalk& walk, double*& means, double*& sums) {
  const std::int64_t channels = walk.channels, blocks = walk.blocks();
  auto* const mean = static_cast<double*>(
      context->workspace(context, static_cast<std::size_t>(2 * channels * walk.chunks) * sizeof(double)));
  if (!mean) return false;
  if (runs_dry(context)) return true;
  double* const squares = mean + channels;
  means = mean;
  sums = squares;
  visit_strips(
      x.dtype, [&](auto tag) { return Strips<decltype(tag)>(x, x, walk).direct(); },
      [&](auto tag) {
        using T = decltype(tag);
        const Strips<T> strips(x, x, walk);
        parallel_for(walk.chunks * blocks, row_grain(walk.chunk * walk.width),
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t i = begin; i < end; ++i) {
                         const std::int64_t k = i / blocks, channel = i % blocks * walk.width;
                         double* part = mean + 2 * channels * k + channel;
                         Moments<T>(strips, walk, channel, part, part + channels)
                             .run(k * walk.chunk, std::min(walk.places, (k + 1) * walk.chunk));
                       }
                     });
      });
  parallel_for(channels, row_grain(4 * walk.chunks), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = 1; k < walk.chunks; ++k) {
      const double before = static_cast<double>(k * walk.chunk);
      const double n = static_cast<double>(std::min(walk.places, (k + 1) * walk.chunk)) - before;
      const double to_mean = n / (before + n), to_squares = before * to_mean;
      const double *other_mean = mean + 2 * channels * k, *other_squares = other_mean + channels;
      each_channel(end - begin, [&](auto d, std::int64_t i) HWY_ATTR {
        const std::int64_t c = begin + i;
        const auto own = hn::LoadU(d, mean + c), difference = hn::Sub(hn::LoadU(d, other_mean + c), own);
        hn::StoreU(hn::Add(own, hn::Mul(difference, hn::Set(d, to_mean))), d, mean + c);
        const auto between = hn::Mul(hn::Mul(difference, difference), hn::Set(d, to_squares));
        const auto sum = hn::Add(hn::LoadU(d, other_squares + c), between);
        hn::StoreU(hn::Add(hn::LoadU(d, squares + c), sum), d, squares + c);
      });
    }
  });
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

template <class T, class P, class Activation>
HWY_INLINE void normalise(const T* x, const T* residual, T* y, std::int64_t n, const P& centre, const P& factor,
                          const P& offset, bool stream, const Activation activate) {
  const ComputeTag<T> d;
  const std::int64_t ahead = elements_ahead<T>(stream);
  const auto normalised = [&](std::size_t i, const auto& part) HWY_ATTR {
    const auto difference = hn::Sub(read_ahead(part, d, x, i, ahead), part.get(d, centre, i));
    return hn::MulAdd(difference, part.get(d, factor, i), part.get(d, offset, i));
  };
  if constexpr (Activation::kRounded) {
    if (residual) {
      each_result(
          d, n, stream, y,
          [&](std::size_t i, auto part)
              HWY_ATTR { return hn::Add(normalised(i, part), read_ahead(part, d, residual, i, ahead)); },
          activate);
    } else {
      each_result(
          d, n, stream, y, [&](std::size_t i, auto part) HWY_ATTR { return normalised(i, part); }, activate);
    }
  } else {
    each_result(d, n, stream, y, [&](std::size_t i, auto part) HWY_ATTR { return activate(d, normalised(i, part)); });
  }
}

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
    return !a.training || moments(context, x, walk, exact, squares);
  }
  C *factor = centre + size, *offset = centre + 2 * size;
  C *mean = static_cast<C*>(f.out_mean->data), *rstd = static_cast<C*>(f.out_rstd->data);
  C* var = static_cast<C*>(f.out_var->data);
  std::fill_n(offset, channels, C(0));
  if (a.training) {
    double *exact, *squares;
    if (!moments(context, x, walk, exact, squares)) return false;
    for (std::int64_t c = 0; c < channels; ++c) {
      mean[c] = static_cast<C>(exact[c]);
      var[c] = static_cast<C>(squares[c] / static_cast<double>(walk.places));
      // What rounding the mean lost, which the deviation need not be much larger than.
      offset[c] = static_cast<C>(static_cast<double>(mean[c]) - exact[c]);
    }
  } else {
    std::copy_n(static_cast<const C*>(f.mean->data), channels, mean);
    std::copy_n(static_cast<const C*>(f.var->data), channels, var);
  }
  const C* weight = f.weight->defined ? static_cast<const C*>(f.weight->data) : nullptr;
  const C* bias = f.bias->defined ? static_cast<const C*>(f.bias->data) : nullptr;
  for (std::int64_t c = 0; c < channels; ++c) {
    rstd[c] = static_cast<C>(1 / std::sqrt(static_cast<double>(var[c]) + a.eps));
    centre[c] = mean[c];
    factor[c] = weight ? rstd[c] * weight[c] : rstd[c];
    offset[c] = offset[c] * factor[c] + (bias ? bias[c] : C(0));
  }
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
