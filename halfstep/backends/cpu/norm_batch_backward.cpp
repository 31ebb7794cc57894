// SPDX-License-Identifier: Apache-2.0
// The gradients of batch_norm, batch_norm_act and batch_norm_silu: one pass that sums, one that writes those of input
// and residual.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/norm_batch_backward.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <cmath>

#include "halfstep/backends/cpu/norm_strips-inl.h"
#include "halfstep/backends/cpu/wide-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_NORM_BATCH_BACKWARD_
#define HALFSTEP_BACKENDS_CPU_NORM_BATCH_BACKWARD_
namespace halfstep::cpu {
/// Inputs and outputs; null where an op has none: y and residual_grad but for batch_norm_act, bias but for
/// batch_norm_silu, more (which g lacks) but for batch_norm_act_backward_of_sum.
struct BatchNormBackward {
  const TensorView *g, *x, *weight, *mean, *rstd, *y, *bias, *more;
  TensorView *x_grad, *weight_grad, *bias_grad, *residual_grad;
  const BatchNormAttributes* attributes;
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr std::int64_t kBlock = 128;  // strips whose sums are taken in float32

// A strip of the operands, values of its channels (what was normalised is (x - mean) scale + bias), and a bit for each
// element: whether the activation lets its gradient pass.
template <class T, class P>
struct Given {
  const T *g, *x, *y, *more;
  P mean, scale, bias;
  std::uint8_t* passes;
  std::int64_t ahead;  // see read_ahead()
};
template <class T, class P>
Given(const T*, const T*, const T*, const T*, P, P, P, std::uint8_t*, std::int64_t) -> Given<T, P>;

// The gradient of what the activation got: as relu's and hardtanh's, also where the result is NaN. Without an
// activation it is g (kMore: the sum of two, rounded to T); with one it is 0 where the result is at most 0 or, of
// relu6, at least `kBound`.
template <bool kMore>
struct UnchangedSlope {
  template <class D, class T, class P, class Lanes>
  HWY_INLINE hn::Vec<D> operator()(D d, const Given<T, P>& s, std::size_t i, const Lanes& part) const {
    const auto g = read_ahead(part, d, s.g, i, s.ahead);
    if constexpr (!kMore) return g;
    return rounded_to<T>(d, hn::Add(g, read_ahead(part, d, s.more, i, s.ahead)));
  }
};
template <int kBound, bool kMore, bool kNote = false>  // kBound 0: none. kNote: notes which elements pass
struct RectifiedSlope {
  template <class D, class T, class P, class Lanes>
  HWY_INLINE hn::Vec<D> operator()(D d, const Given<T, P>& s, std::size_t i, const Lanes& part) const {
    const auto result = read_ahead(part, d, s.y, i, s.ahead);
    const auto whole = UnchangedSlope<kMore>{}(d, s, i, part);
    auto stopped = hn::Le(result, hn::Zero(d));
    if constexpr (kBound != 0) {
      stopped = hn::Or(stopped, hn::Ge(result, hn::Set(d, static_cast<hn::TFromD<D>>(kBound))));
    }
    if constexpr (kNote) hn::StoreMaskBits(d, hn::Not(stopped), s.passes + i / 8);
    return hn::IfThenZeroElse(stopped, whole);
  }
};
// The same by what was noted, without the result.
struct NotedSlope {
  template <class D, class T, class P, class Lanes>
  HWY_INLINE hn::Vec<D> operator()(D d, const Given<T, P>& s, std::size_t i, const Lanes& part) const {
    return hn::IfThenElseZero(hn::LoadMaskBits(d, s.passes + i / 8), UnchangedSlope<false>{}(d, s, i, part));
  }
};
// Of silu, whose result doesn't tell its input: that is computed again.
struct SiluSlope {
  template <class D, class T, class P, class Lanes>
  HWY_INLINE hn::Vec<D> operator()(D d, const Given<T, P>& s, std::size_t i, const Lanes& part) const {
    const auto difference = hn::Sub(part.read(d, s.x + i), part.get(d, s.mean, i));
    const auto normalised = hn::MulAdd(difference, part.get(d, s.scale, i), part.get(d, s.bias, i));
    return hn::Mul(read_ahead(part, d, s.g, i, s.ahead), wide_silu_slope(d, normalised));
  }
};

// s1 += g, s2 += g (x - mean), element by element; g is also written to `kept` unless that is null, past the caches
// with `stream`.
template <class T, class C, class P, class Before>
HWY_INLINE void add_products(const Given<T, P>& s, std::int64_t n, C* HWY_RESTRICT s1, C* HWY_RESTRICT s2, T* kept,
                             bool stream, const Before before) {
  const ComputeTag<T> d;
  const auto add = [&](auto v, std::size_t i, const auto& part) HWY_ATTR {
    const auto difference = hn::Sub(read_ahead(part, d, s.x, i, s.ahead), part.get(d, s.mean, i));
    part.write(hn::Add(part.read(d, s1 + i), v), d, s1 + i);
    part.write(hn::MulAdd(v, difference, part.read(d, s2 + i)), d, s2 + i);
    return v;
  };
  if (kept) {
    each_result(d, n, stream, kept,
                [&](std::size_t i, auto part) HWY_ATTR { return add(before(d, s, i, part), i, part); });
  } else {
    each_vector(d, n, [&](std::size_t i, auto part) HWY_ATTR { add(before(d, s, i, part), i, part); });
  }
}

// x_grad = scale (g - mean_g - (x - mean) slope) and residual_grad = g, where they are asked for. With constant
// statistics (not `with_x`) it is scale g.
template <class T, class P, class Before>
HWY_INLINE void write_gradients(const Given<T, P>& s, bool with_x, T* x_grad, T* residual_grad, std::int64_t n,
                                const P& mean_g, const P& slope, bool stream, const Before before) {
  const ComputeTag<T> d;
  const auto gradient = [&](auto v, std::size_t i, const auto& part) HWY_ATTR {
    const auto difference = hn::Sub(read_ahead(part, d, s.x, i, s.ahead), part.get(d, s.mean, i));
    const auto inner = hn::NegMulAdd(difference, part.get(d, slope, i), hn::Sub(v, part.get(d, mean_g, i)));
    return hn::Mul(part.get(d, s.scale, i), inner);
  };
  if (with_x && residual_grad) {
    const std::size_t lanes = hn::Lanes(d);
    std::size_t i = 0;
    for (; i + 2 * lanes <= static_cast<std::size_t>(n); i += 2 * lanes) {
      const auto v0 = before(d, s, i, Whole{}), v1 = before(d, s, i + lanes, Whole{});
      store_two(v0, v1, d, residual_grad + i);
      const auto x0 = gradient(v0, i, Whole{});
      store_two(x0, gradient(v1, i + lanes, Whole{}), d, x_grad + i);
    }
    for (; i < static_cast<std::size_t>(n); i += lanes) {
      const Part part{std::min(lanes, static_cast<std::size_t>(n) - i)};
      const auto v = before(d, s, i, part);
      part.write(v, d, residual_grad + i);
      part.write(gradient(v, i, part), d, x_grad + i);
    }
  } else if (with_x) {
    each_result(d, n, stream, x_grad,
                [&](std::size_t i, auto part) HWY_ATTR { return gradient(before(d, s, i, part), i, part); });
  } else {
    if (residual_grad) {
      each_result(d, n, stream, residual_grad,
                  [&](std::size_t i, auto part) HWY_ATTR { return before(d, s, i, part); });
    }
    if (x_grad) {
      each_result(d, n, stream, x_grad, [&](std::size_t i, auto part) HWY_ATTR {
        return hn::Mul(part.get(d, s.scale, i), before(d, s, i, part));
      });
    }
  }
}

// The tensors of a backward pass in strips of T.
template <class T>
struct Operands {
  const TensorView none{};
  Strips<T> g, x, y, more, x_grad, residual_grad;
  std::uint8_t* passes = nullptr;  // a bit for each element, in the order of memory
  std::int64_t ahead;
  Operands(const BatchNormBackward& f, const ChannelWalk& walk)
      : g(*f.g, *f.x, walk),
        x(*f.x, *f.x, walk),
        y(f.y ? *f.y : none, *f.x, walk),
        more(f.more ? *f.more : none, *f.x, walk),
        x_grad(f.attributes->want_input ? *f.x_grad : none, *f.x, walk),
        residual_grad(f.residual_grad && f.attributes->want_residual ? *f.residual_grad : none, *f.x, walk),
        ahead(elements_ahead<T>(streams(f))) {}
  bool direct() const {
    return g.direct() && x.direct() && y.direct() && more.direct() && x_grad.direct() && residual_grad.direct();
  }
  // Whether results go past the caches, which tensors of their size don't fit.
  bool streams(const BatchNormBackward& f) const { return direct() && written_past_caches(*f.x); }
  // Whether the pass that sums writes the residual's gradient, so that the next one reads that instead of all else.
  bool keeps(const BatchNormBackward& f) const {
    return f.attributes->training && f.attributes->activation != 0 && x_grad.present() && residual_grad.present() &&
           direct();
  }
  // Whether it notes which elements pass, so that the next one reads bits instead of results: where all vectors of the
  // walk begin with a whole byte of them.
  bool notes(const BatchNormBackward& f, const ChannelWalk& walk) const {
    constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(ComputeTag<T>()));
    const bool whole_bytes = kLanes % 8 == 0 && (walk.channels % kLanes == 0 ||
                                                 (walk.blocks() == 1 && walk.channels * walk.together % kLanes == 0));
    return f.attributes->training && f.attributes->activation != 0 && y.present() && x_grad.present() && !f.more &&
           !keeps(f) && direct() && walk.rows && whole_bytes;
  }
  std::uint8_t* passes_of(const Strip& s, const ChannelWalk& walk) const {
    return passes == nullptr ? nullptr : passes + (s.place * walk.channels + s.channel) / 8;
  }
};

// Values of the channels, repeated for strips of several places.
template <class C>
struct Channels {
  C *mean, *scale, *bias, *mean_g, *slope;
};

// Sums over places [first, end) of g and g (x - mean), of the channels from `channel` on. With `keep` g is also written
// as the residual's gradient, past the caches with `stream`.
template <class T, class C, class Before>
void sum_part(const Operands<T>& t, const ChannelWalk& walk, std::int64_t channel, std::int64_t first, std::int64_t end,
              bool keep, bool stream, const Channels<C>& of, double* sum_g, double* sum_gx, const Before& before) {
  alignas(64) C s1[kStrip], s2[kStrip];
  alignas(64) T g_block[kStrip], x_block[kStrip], y_block[kStrip], more_block[kStrip];
  const std::int64_t width = walk.block_width(channel), sum_width = walk.sum_width(channel);
  std::fill_n(sum_g, width, 0.0);
  std::fill_n(sum_gx, width, 0.0);
  while (first < end) {
    std::fill_n(s1, sum_width, C(0));
    std::fill_n(s2, sum_width, C(0));
    for (std::int64_t strips = kBlock; strips > 0 && first < end; --strips) {
      const Strip s = walk.summed_strip(first, end, channel);
      with_parameters<C>(
          walk, s,
          [&](const auto& m, const auto& k, const auto& b) {
            add_products(Given{t.g.read(s, g_block), t.x.read(s, x_block), t.y.read(s, y_block),
                               t.more.read(s, more_block), m, k, b, t.passes_of(s, walk), t.ahead},
                         s.numel(), s1, s2, keep ? t.residual_grad.target(s, nullptr) : nullptr, stream, before);
          },
          of.mean, of.scale, of.bias);
      first += s.count;
    }
    fold(s1, sum_width, width, sum_g);
    fold(s2, sum_width, width, sum_gx);
  }
}

template <class T, class C, class Before>
void sum_all(const Operands<T>& t, const ChannelWalk& walk, bool keep, bool stream, const Channels<C>& of,
             double* parts, const Before& before) {
  const std::int64_t channels = walk.channels, blocks = walk.blocks();
  parallel_for(walk.chunks * blocks, row_grain(walk.chunk * walk.width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t k = i / blocks, channel = i % blocks * walk.width;
      double* part = parts + 2 * channels * k + channel;
      sum_part<T>(t, walk, channel, k * walk.chunk, std::min(walk.places, (k + 1) * walk.chunk), keep, stream, of, part,
                  part + channels, before);
    }
    if (keep && stream) hwy::FlushStream();
  });
  for (std::int64_t k = 1; k < walk.chunks; ++k) {
    const double* part = parts + 2 * channels * k;
    each_channel(2 * channels, [&](auto d, std::int64_t i) HWY_ATTR {
      hn::StoreU(hn::Add(hn::LoadU(d, parts + i), hn::LoadU(d, part + i)), d, parts + i);
    });
  }
}

template <class T, class C, class Before>
void write_all(Operands<T>& t, const ChannelWalk& walk, bool with_x, bool stream, const Channels<C>& of,
               const Before& before) {
  for_strips_backwards(walk, [&](const Strip& s) {
    alignas(64) T g_block[kStrip], x_block[kStrip], y_block[kStrip], more_block[kStrip];
    alignas(64) T x_grad_block[kStrip], residual_block[kStrip];
    with_parameters<C>(
        walk, s,
        [&](const auto& m, const auto& k, const auto& b, const auto& mg, const auto& sl) {
          const T* x = with_x || std::is_same_v<Before, SiluSlope> ? t.x.read(s, x_block) : nullptr;
          write_gradients(Given{t.g.read(s, g_block), x, t.y.read(s, y_block), t.more.read(s, more_block), m, k, b,
                                t.passes_of(s, walk), t.ahead},
                          with_x, t.x_grad.target(s, x_grad_block), t.residual_grad.target(s, residual_block),
                          s.numel(), mg, sl, stream, before);
        },
        of.mean, of.scale, of.bias, of.mean_g, of.slope);
    t.x_grad.written(s, x_grad_block);
    t.residual_grad.written(s, residual_block);
  });
}

// What the passes work with: values of the channels, the sums of g and of g (x - mean), and room for a bit of each
// element, where they are noted.
template <class C>
struct Work {
  Channels<C> of;
  double* sums;
  std::uint8_t* passes;
};
template <class C>
HWY_NOINLINE bool prepare(KernelContext* context, const BatchNormBackward& f, const ChannelWalk& walk, bool notes,
                          Work<C>& work) {
  const std::int64_t channels = walk.channels, size = repeated_size(walk);
  auto* sums = static_cast<double*>(context->workspace(
      context, static_cast<std::size_t>(2 * channels * std::max<std::int64_t>(walk.chunks, 1)) * sizeof(double)));
  auto* values = static_cast<C*>(context->workspace(context, static_cast<std::size_t>(5 * size) * sizeof(C)));
  // Highway asks for 8 bytes of memory at each vector's bits. It writes those of the vector alone, on which threads
  // with neighbouring strips rely.
  auto* passes =
      notes ? static_cast<std::uint8_t*>(context->workspace(context, static_cast<std::size_t>(f.x->numel / 8 + 16)))
            : nullptr;
  if (!sums || !values || (notes && !passes)) return false;
  if (runs_dry(context)) return true;
  work = {{values, values + size, values + 2 * size, values + 3 * size, values + 4 * size}, sums, passes};
  const Channels<C>& of = work.of;
  const C *rstd = static_cast<const C*>(f.rstd->data), *given = static_cast<const C*>(f.mean->data);
  const C* weight = f.weight->defined ? static_cast<const C*>(f.weight->data) : nullptr;
  const C* bias = f.bias && f.bias->defined ? static_cast<const C*>(f.bias->data) : nullptr;
  for (std::int64_t c = 0; c < channels; ++c) {
    of.mean[c] = given[c];
    of.scale[c] = weight ? weight[c] * rstd[c] : rstd[c];
    of.bias[c] = bias ? bias[c] : C(0);
  }
  for (C* repeated : {of.mean, of.scale, of.bias}) repeat(walk, repeated);
  std::fill_n(sums, 2 * channels, 0.0);
  return true;
}
// From the sums: the gradients of weight and bias, and what the gradient of the input takes from them.
template <class C>
HWY_NOINLINE void use_sums(const BatchNormBackward& f, const ChannelWalk& walk, const Work<C>& work) {
  const BatchNormAttributes& a = *f.attributes;
  const Channels<C>& of = work.of;
  const std::int64_t channels = walk.channels;
  const C* rstd = static_cast<const C*>(f.rstd->data);
  const double n = static_cast<double>(std::max<std::int64_t>(walk.places, 1));
  for (std::int64_t c = 0; c < channels; ++c) {
    // sum(g z), z = (x - mean) rstd
    const double sum_g = work.sums[c], sum_gz = work.sums[channels + c] * static_cast<double>(rstd[c]);
    if (a.want_weight) static_cast<C*>(f.weight_grad->data)[c] = static_cast<C>(sum_gz);
    if (a.want_bias) static_cast<C*>(f.bias_grad->data)[c] = static_cast<C>(sum_g);
    of.mean_g[c] = static_cast<C>(sum_g / n);
    of.slope[c] = static_cast<C>(sum_gz / n * static_cast<double>(rstd[c]));
  }
  for (C* repeated : {of.mean_g, of.slope}) repeat(walk, repeated);
}

// `first` sums; `second` writes, unless the first pass has written the residual's gradient.
template <class T, class C, class First, class Second>
void backward(const BatchNormBackward& f, const ChannelWalk& walk, const Work<C>& work, const First& first,
              const Second& second) {
  const BatchNormAttributes& a = *f.attributes;
  Operands<T> t(f, walk);
  t.passes = work.passes;
  const bool sums_wanted = a.training || a.want_weight || a.want_bias;
  const bool keep = t.keeps(f), stream = t.streams(f);
  if (sums_wanted && walk.places > 0) sum_all<T>(t, walk, keep, stream, work.of, work.sums, first);
  use_sums(f, walk, work);
  if (walk.places == 0 || (!t.x_grad.present() && !t.residual_grad.present())) return;
  if (keep) {
    BatchNormBackward rest = f;
    rest.g = f.residual_grad;
    rest.y = rest.more = nullptr;
    rest.residual_grad = nullptr;
    Operands<T> kept(rest, walk);
    return write_all<T>(kept, walk, true, stream, work.of, UnchangedSlope<false>{});
  }
  write_all<T>(t, walk, a.training && t.x_grad.present(), stream, work.of, second);
}

template <class T, class C, int kBound, bool kMore>
void backward_rectified(const BatchNormBackward& f, const ChannelWalk& walk, const Work<C>& work) {
  if constexpr (!kMore) {
    if (work.passes) return backward<T>(f, walk, work, RectifiedSlope<kBound, false, true>{}, NotedSlope{});
  }
  backward<T>(f, walk, work, RectifiedSlope<kBound, kMore>{}, RectifiedSlope<kBound, kMore>{});
}

template <class C>
bool backward(KernelContext* context, const BatchNormBackward& f) {
  const ChannelWalk walk(*f.x, static_cast<std::int64_t>(hn::Lanes(ComputeTag<C>())));
  if (walk.channels == 0) return true;
  bool done = false;
  visit_strips(
      f.x->dtype, [&](auto tag) { return Operands<decltype(tag)>(f, walk).direct(); },
      [&](auto tag) {
        using T = decltype(tag);
        if constexpr (std::is_same_v<ComputeScalar<T>, C>) {
          Work<C> work;
          if (!prepare(context, f, walk, Operands<T>(f, walk).notes(f, walk), work)) return;
          done = true;
          if (runs_dry(context)) return;
          if (f.bias) return backward<T>(f, walk, work, SiluSlope{}, SiluSlope{});
          const auto run = [&](auto sum) {
            constexpr bool kMore = decltype(sum)::value;
            const int activation = f.y ? f.attributes->activation : 0;
            activation == 0   ? backward<T>(f, walk, work, UnchangedSlope<kMore>{}, UnchangedSlope<kMore>{})
            : activation == 1 ? backward_rectified<T, C, 0, kMore>(f, walk, work)
                              : backward_rectified<T, C, 6, kMore>(f, walk, work);
          };
          f.more ? run(std::true_type()) : run(std::false_type());
        }
      });
  return done;
}

}  // namespace

bool batch_norm_backward(KernelContext* context, const BatchNormBackward& f) {
  return f.x->dtype == DType::f64 ? backward<double>(context, f) : backward<float>(context, f);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(batch_norm_backward);

// Inputs: g, x, weight, mean, rstd, for batch_norm_act y, for a sum what g lacks. Outputs: gradients of input, weight
// and bias, for batch_norm_act of the residual.
Status backward_kernel(KernelContext* context, const TensorView* in, int n, TensorView* out, int m, const void* p) {
  const BatchNormBackward f{.g = &in[0],
                            .x = &in[1],
                            .weight = &in[2],
                            .mean = &in[3],
                            .rstd = &in[4],
                            .y = n > 5 ? &in[5] : nullptr,
                            .bias = nullptr,
                            .more = n > 6 ? &in[6] : nullptr,
                            .x_grad = &out[0],
                            .weight_grad = &out[1],
                            .bias_grad = &out[2],
                            .residual_grad = m > 3 ? &out[3] : nullptr,
                            .attributes = static_cast<const BatchNormAttributes*>(p)};
  return HWY_DYNAMIC_DISPATCH(batch_norm_backward)(context, f) ? Status::ok : Status::failed;
}

// Inputs: g, x, weight, bias, mean, rstd. Outputs: gradients of input, weight and bias.
Status silu_backward_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const BatchNormBackward f{.g = &in[0],
                            .x = &in[1],
                            .weight = &in[2],
                            .mean = &in[4],
                            .rstd = &in[5],
                            .y = nullptr,
                            .bias = &in[3],
                            .more = nullptr,
                            .x_grad = &out[0],
                            .weight_grad = &out[1],
                            .bias_grad = &out[2],
                            .residual_grad = nullptr,
                            .attributes = static_cast<const BatchNormAttributes*>(p)};
  return HWY_DYNAMIC_DISPATCH(batch_norm_backward)(context, f) ? Status::ok : Status::failed;
}

const RegisterCpuKernel norm_batch_backward_kernels[] = {
    {"batch_norm_backward", kFloatingDTypes, backward_kernel, kRunsDry},
    {"batch_norm_act_backward", kFloatingDTypes, backward_kernel, kRunsDry},
    {"batch_norm_act_backward_of_sum", kFloatingDTypes, backward_kernel, kRunsDry},
    {"batch_norm_silu_backward", kFloatingDTypes, silu_backward_kernel, kRunsDry},
};

}  // namespace
}  // namespace halfstep::cpu
#endif
