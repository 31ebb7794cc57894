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

// The same of kStrips strips, `pitch` elements apart: sums are read and written once for all of them. Strips that are
// read side by side are no stream to the processor, so where the tensor is in memory, it is fetched ahead here.
template <int kStrips, class T, class C, class P>
HWY_INLINE void add_moments_of(const T* x, std::int64_t pitch, std::int64_t n, const P& shift, bool in_memory,
                               C* HWY_RESTRICT s1, C* HWY_RESTRICT s2) {
  static_assert(kStrips % 4 == 0);
  const ComputeTag<T> d;
  each_vector(d, n, [&](std::size_t i, auto part) HWY_ATTR {
    if (in_memory) fetch_ahead(x, pitch, i, hn::Lanes(d), kStrips);
    const auto k = part.get(d, shift, i);
    auto all = part.read(d, s1 + i), all_squares = part.read(d, s2 + i);
    for (int strip = 0; strip < kStrips; strip += 4) {
      const T* at = x + strip * pitch + i;
      const auto d0 = hn::Sub(part.read(d, at), k), d1 = hn::Sub(part.read(d, at + pitch), k);
      const auto d2 = hn::Sub(part.read(d, at + 2 * pitch), k), d3 = hn::Sub(part.read(d, at + 3 * pitch), k);
      const auto sum = hn::Add(hn::Add(d0, d1), hn::Add(d2, d3));
      const auto squares = hn::Add(hn::MulAdd(d0, d0, hn::Mul(d1, d1)), hn::MulAdd(d2, d2, hn::Mul(d3, d3)));
      all = hn::Add(all, sum);
      all_squares = hn::Add(all_squares, squares);
    }
    part.write(all, d, s1 + i);
    part.write(all_squares, d, s2 + i);
  });
}

// Mean and sum of squared differences from it, of `width` channels over places [first, end). Blocks of places are
// summed about a number near their mean, then joined in float64 ("Updating Formulae and a Pairwise Algorithm for
// Computing Sample Variances", Chan, Golub and LeVeque 1979). About the mean of all before, a block's sum of squares is
// not much larger than its part in the whole, so that nothing cancels however large the mean is; the first block, which
// has none before it, is summed about the mean of its first strips.
template <class T>
class Moments {
 public:
  using C = ComputeScalar<T>;
  static constexpr std::int64_t kFirst = 4, kBlock = 128;  // strips

  Moments(const Strips<T>& x, const ChannelWalk& walk, std::int64_t channel, bool in_memory, double* mean,
          double* squares)
      : x_(x),
        walk_(walk),
        channel_(channel),
        width_(walk.block_width(channel)),
        sum_width_(walk.sum_width(channel)),
        in_memory_(in_memory),
        mean_(mean),
        squares_(squares) {}

  void run(std::int64_t first, std::int64_t end) {
    find_shift(first, end);
    for (std::int64_t place = first; place < end;) {
      const std::int64_t begin = place;
      place = sweep(begin, end);
      join(begin - first, place - begin);
      if (place == end) break;
      each_channel(width_,
                   [&](auto d, std::int64_t c) HWY_ATTR { store_rounded(hn::LoadU(d, mean_ + c), d, shift_ + c); });
      repeat_shift();
    }
  }

 private:
  // The mean of the first strips, summed about the first place, so that equal numbers give just that. Differences are
  // divided before they are added, so that no sum overflows.
  void find_shift(std::int64_t first, std::int64_t end) {
    std::int64_t after = first;
    for (std::int64_t k = 0; k < kFirst && after < end; ++k) after += walk_.summed_strip(after, end, channel_).count;
    const ComputeTag<T> d;
    const T* x = x_.read(Strip{first, 1, channel_, width_}, block_);
    each_vector(d, width_, [&](std::size_t i, auto part) HWY_ATTR { part.write(part.read(d, x + i), d, shift_ + i); });
    repeat_shift();
    std::fill_n(s1_, sum_width_, C(0));
    const auto share = static_cast<C>(1 / static_cast<double>(after - first));
    for (std::int64_t place = first; place < after;) {
      const Strip s = walk_.summed_strip(place, end, channel_);
      walk_.rows ? add_share(s, Run<C>{shift_}, share) : add_share(s, Same<C>{shift_[0]}, share);
      place += s.count;
    }
    each_channel(width_, [&](auto dc, std::int64_t c) HWY_ATTR {
      store_rounded(hn::Add(load_exact(dc, shift_ + c), folded(s1_, dc, c)), dc, shift_ + c);
    });
    repeat_shift();
  }
  template <class P>
  void add_share(const Strip& s, const P& from, C share) {
    const ComputeTag<T> d;
    const T* x = x_.read(s, block_);
    each_vector(d, s.numel(), [&](std::size_t i, auto part) HWY_ATTR {
      const auto difference = hn::Sub(part.read(d, x + i), part.get(d, from, i));
      part.write(hn::MulAdd(difference, hn::Set(d, share), part.read(d, s1_ + i)), d, s1_ + i);
    });
  }
  void repeat_shift() {
    if (!walk_.rows) return;
    for (std::int64_t i = width_; i < sum_width_; ++i) shift_[i] = shift_[i - width_];
  }
  // Sums of a channel, taken side by side, as one.
  template <class D>
  HWY_INLINE hn::Vec<D> folded(const C* sums, D d, std::int64_t channel) const {
    if (!walk_.rows) return hn::Set(d, total_of_lanes(sums));
    auto all = load_exact(d, sums + channel);
    for (std::int64_t i = channel + width_; i < sum_width_; i += width_) all = hn::Add(all, load_exact(d, sums + i));
    return all;
  }
  // Sums of up to kBlock strips from place `from` on. Returns the place behind them.
  std::int64_t sweep(std::int64_t from, std::int64_t end) {
    std::fill_n(s1_, sum_width_, C(0));
    std::fill_n(s2_, sum_width_, C(0));
    return walk_.rows ? sweep(from, end, Run<C>{shift_}) : sweep(from, end, Same<C>{shift_[0]});
  }
  template <class P>
  std::int64_t sweep(std::int64_t from, std::int64_t end, const P& shift) {
    const std::int64_t pitch = walk_.summed_pitch();
    for (std::int64_t left = kBlock; left > 0 && from < end;) {
      const Strip s = walk_.summed_strip(from, end, channel_);
      const T* x = x_.read(s, block_);
      const std::int64_t follow = x_.direct() ? std::min(left, walk_.summed_in_turn(from, end)) : 1;
      const std::int64_t taken = follow >= 8 ? 8 : follow >= 4 ? 4 : 1;
      if (taken == 8) {
        add_moments_of<8>(x, pitch, s.numel(), shift, in_memory_, s1_, s2_);
      } else if (taken == 4) {
        add_moments_of<4>(x, pitch, s.numel(), shift, in_memory_, s1_, s2_);
      } else {
        add_moments(x, s.numel(), shift, s1_, s2_);
      }
      from += taken * s.count;
      left -= taken;
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
      const auto a = folded(s1_, d, c), mean = hn::LoadU(d, mean_ + c), part = hn::Mul(a, hn::Set(d, share));
      // At least 0; NaN, as the second operand, stays.
      const auto own = hn::Max(hn::Zero(d), hn::Sub(folded(s2_, d, c), hn::Mul(a, part)));
      const auto difference = hn::Add(hn::Sub(load_exact(d, shift_ + c), mean), part);
      hn::StoreU(hn::Add(mean, hn::Mul(difference, hn::Set(d, to_mean))), d, mean_ + c);
      const auto between = hn::Mul(hn::Mul(difference, difference), hn::Set(d, to_squares));
      hn::StoreU(hn::Add(hn::LoadU(d, squares_ + c), hn::Add(own, between)), d, squares_ + c);
    });
  }

  const Strips<T>& x_;
  const ChannelWalk& walk_;
  const std::int64_t channel_, width_, sum_width_;
  const bool in_memory_;
  double *mean_, *squares_;
  alignas(64) C shift_[kStrip], s1_[kStrip], s2_[kStrip];
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
        const bool in_memory = written_past_caches(x);
        parallel_for(walk.chunks * blocks, row_grain(walk.chunk * walk.width),
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t i = begin; i < end; ++i) {
                         const std::int64_t k = i / blocks, channel = i % blocks * walk.width;
                         double* part = mean + 2 * channels * k + channel;
                         Moments<T>(strips, walk, channel, in_memory, part, part + channels)
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
