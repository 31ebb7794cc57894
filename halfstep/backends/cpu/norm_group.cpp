// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/norm_group.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <cmath>

#include "halfstep/backends/cpu/norm_group.h"
#include "halfstep/backends/cpu/norm_passes-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_NORM_GROUP_
#define HALFSTEP_BACKENDS_CPU_NORM_GROUP_
namespace halfstep::cpu {
/// One image of a batch.
struct ImageView {
  TensorView view;
  std::int64_t sizes[kMaxDims];
  ImageView(const TensorView& of, std::int64_t i) : view(of) {
    if (!of.defined || of.numel == 0) return;
    std::copy_n(of.sizes, of.ndim, sizes);
    sizes[0] = 1;
    view.sizes = sizes;
    view.numel = of.numel / of.sizes[0];
    view.data = element(of.dtype, of.data, i * of.strides[0]);
    view.contiguous = false;
  }
  ImageView(const ImageView&) = delete;
  ImageView& operator=(const ImageView&) = delete;
};
/// Images are shared among threads, or, where there are fewer, each one's strips.
inline std::int64_t image_workers(std::int64_t images) { return images >= num_threads() ? num_workers(images) : 1; }
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

// A worker's memory for an image: sums of channels, and values of channels, repeated for strips of several places.
template <class C>
struct GroupScratch {
  double* sums;
  C* values[4];
};
template <class C>
class GroupWork {
 public:
  GroupWork(KernelContext* context, const ChannelWalk& walk, std::int64_t workers)
      : sums_size_(std::max(moments_size(walk), std::int64_t{1})), values_size_(repeated_size(walk)) {
    sums_ = static_cast<double*>(
        context->workspace(context, static_cast<std::size_t>(workers * sums_size_) * sizeof(double)));
    values_ =
        static_cast<C*>(context->workspace(context, static_cast<std::size_t>(workers * 4 * values_size_) * sizeof(C)));
  }
  bool given() const { return sums_ != nullptr && values_ != nullptr; }
  GroupScratch<C> of(std::int64_t worker) const {
    C* const first = values_ + worker * 4 * values_size_;
    return {sums_ + worker * sums_size_,
            {first, first + values_size_, first + 2 * values_size_, first + 3 * values_size_}};
  }

 private:
  std::int64_t sums_size_, values_size_;
  double* sums_;
  C* values_;
};

template <class T, class C>
void normalise_image(const TensorView& x, TensorView& y, const ChannelWalk& walk, bool in_memory, const C* centre,
                     const C* factor, const C* offset) {
  const Strips<T> in(x, x, walk);
  Strips<T> out(y, x, walk);
  const bool stream = out.direct() && in_memory;
  for_strips_backwards(walk, [&](const Strip& s) {
    alignas(64) T in_block[kStrip], out_block[kStrip];
    with_parameters<C>(
        walk, s,
        [&](const auto& c, const auto& k, const auto& o) {
          normalise<T>(in.read(s, in_block), static_cast<const T*>(nullptr), out.target(s, out_block), s.numel(), c, k,
                       o, stream, Unchanged{});
        },
        centre, factor, offset);
    out.written(s, out_block);
  });
}

template <class C>
bool forward(KernelContext* context, const TensorView* in, TensorView* out, const RowNormAttributes& a) {
  const TensorView& x = in[0];
  const ImageView first(x, 0);
  const ChannelWalk walk(first.view, static_cast<std::int64_t>(hn::Lanes(ComputeTag<C>())));
  const std::int64_t images = x.sizes[0], channels = walk.channels, each = channels / a.groups;
  const std::int64_t workers = image_workers(images);
  const GroupWork<C> work(context, walk, workers);
  if (!work.given()) return false;
  if (runs_dry(context)) return true;
  const C* const weight = in[1].defined ? static_cast<const C*>(in[1].data) : nullptr;
  const C* const bias = in[2].defined ? static_cast<const C*>(in[2].data) : nullptr;
  const bool in_memory = written_past_caches(x);
  const double epsilon = a.eps >= 0 ? a.eps : finfo(accumulate_dtype(x.dtype)).eps;  // as that of rows
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<ComputeScalar<T>, C>) {
      parallel_jobs(images, workers, [&](std::int64_t i, std::int64_t worker) {
        const ImageView image(x, i);
        ImageView result(out[0], i);
        const GroupScratch<C> scratch = work.of(worker);
        const auto [centre, factor, offset, unused] = scratch.values;
        double *const mean = scratch.sums, *const squares = mean + channels;
        moments<T>(image.view, walk, in_memory, mean);
        const auto places = static_cast<double>(walk.places), count = places * static_cast<double>(each);
        for (std::int64_t group = 0; group < a.groups; ++group) {
          const std::int64_t begin = group * each, end = begin + each;
          double all = 0, sum = 0;
          for (std::int64_t c = begin; c < end; ++c) all += mean[c];
          all /= static_cast<double>(each);
          for (std::int64_t c = begin; c < end; ++c) sum += squares[c] + places * (mean[c] - all) * (mean[c] - all);
          const C rounded = static_cast<C>(all), rstd = static_cast<C>(1 / std::sqrt(sum / count + epsilon));
          static_cast<C*>(out[1].data)[i * a.groups + group] = rounded;
          static_cast<C*>(out[2].data)[i * a.groups + group] = rstd;
          // What rounding the mean lost, which the deviation need not be much larger than.
          const double lost = static_cast<double>(rounded) - all;
          for (std::int64_t c = begin; c < end; ++c) {
            centre[c] = rounded;
            factor[c] = weight != nullptr ? rstd * weight[c] : rstd;
            offset[c] = static_cast<C>(lost * static_cast<double>(factor[c]) +
                                       (bias != nullptr ? static_cast<double>(bias[c]) : 0.0));
          }
        }
        for (C* values : {centre, factor, offset}) repeat(walk, values);
        normalise_image<T>(image.view, result.view, walk, in_memory, centre, factor, offset);
      });
    }
  };
  visit_strips(
      x.dtype,
      [&](auto tag) {
        using T = decltype(tag);
        const ImageView y(out[0], 0);
        return Strips<T>(first.view, first.view, walk).direct() && Strips<T>(y.view, first.view, walk).direct();
      },
      run);
  return true;
}

// s1 += g, s2 += g (x - mean), element by element.
template <class T, class C, class P>
HWY_INLINE void add_group_products(const T* g, const T* x, std::int64_t n, const P& mean, C* HWY_RESTRICT s1,
                                   C* HWY_RESTRICT s2) {
  const ComputeTag<T> d;
  each_vector(d, n, [&](std::size_t i, auto part) HWY_ATTR {
    const auto v = part.read(d, g + i), difference = hn::Sub(part.read(d, x + i), part.get(d, mean, i));
    part.write(hn::Add(part.read(d, s1 + i), v), d, s1 + i);
    part.write(hn::MulAdd(v, difference, part.read(d, s2 + i)), d, s2 + i);
  });
}

// Sums of g and of g (x - mean) of each channel, [channels] each, at sums[0] and sums[channels].
template <class T, class C>
void sum_image(const Strips<T>& g, const Strips<T>& x, const ChannelWalk& walk, const C* mean, double* const sums) {
  constexpr std::int64_t kBlock = 128;  // strips whose sums are taken in float32
  const std::int64_t channels = walk.channels, blocks = walk.blocks();
  parallel_for(walk.chunks * blocks, row_grain(walk.chunk * walk.width), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) C s1[kStrip], s2[kStrip];
    alignas(64) T g_block[kStrip], x_block[kStrip];
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t k = i / blocks, channel = i % blocks * walk.width, width = walk.block_width(channel);
      const std::int64_t sum_width = walk.sum_width(channel), last = std::min(walk.places, (k + 1) * walk.chunk);
      double *const sum_g = sums + 2 * channels * k + channel, *const sum_gx = sum_g + channels;
      std::fill_n(sum_g, width, 0.0);
      std::fill_n(sum_gx, width, 0.0);
      for (std::int64_t place = k * walk.chunk; place < last;) {
        std::fill_n(s1, sum_width, C(0));
        std::fill_n(s2, sum_width, C(0));
        for (std::int64_t strips = kBlock; strips > 0 && place < last; --strips) {
          const Strip s = walk.summed_strip(place, last, channel);
          with_parameters<C>(
              walk, s,
              [&](const auto& m) { add_group_products(g.read(s, g_block), x.read(s, x_block), s.numel(), m, s1, s2); },
              mean);
          place += s.count;
        }
        fold(s1, sum_width, width, sum_g);
        fold(s2, sum_width, width, sum_gx);
      }
    }
  });
  for (std::int64_t k = 1; k < walk.chunks; ++k) {
    const double* const part = sums + 2 * channels * k;
    for (std::int64_t c = 0; c < 2 * channels; ++c) sums[c] += part[c];
  }
}

// dx = g factor - part - (x - mean) slope.
template <class T, class P>
HWY_INLINE void write_group_gradient(const T* g, const T* x, T* x_grad, std::int64_t n, bool stream, const P& mean,
                                     const P& factor, const P& part, const P& slope) {
  const ComputeTag<T> d;
  const std::int64_t ahead = elements_ahead<T>(stream);
  const auto gradient = [&](std::size_t i, const auto& lanes) HWY_ATTR {
    const auto difference = hn::Sub(read_ahead(lanes, d, x, i, ahead), lanes.get(d, mean, i));
    const auto scaled = hn::MulSub(read_ahead(lanes, d, g, i, ahead), lanes.get(d, factor, i), lanes.get(d, part, i));
    return hn::NegMulAdd(difference, lanes.get(d, slope, i), scaled);
  };
  each_result(d, n, stream, x_grad, [&](std::size_t i, auto lanes) HWY_ATTR { return gradient(i, lanes); });
}
template <class T, class C>
void write_image(const Strips<T>& g, const Strips<T>& x, Strips<T>& x_grad, const ChannelWalk& walk, bool stream,
                 const C* mean, const C* factor, const C* part, const C* slope) {
  for_strips_backwards(walk, [&](const Strip& s) {
    alignas(64) T g_block[kStrip], x_block[kStrip], x_grad_block[kStrip];
    with_parameters<C>(
        walk, s,
        [&](const auto& m, const auto& k, const auto& b, const auto& sl) {
          write_group_gradient<T>(g.read(s, g_block), x.read(s, x_block), x_grad.target(s, x_grad_block), s.numel(),
                                  stream, m, k, b, sl);
        },
        mean, factor, part, slope);
    x_grad.written(s, x_grad_block);
  });
}

template <class C>
bool backward(KernelContext* context, const TensorView* in, TensorView* out, const RowNormAttributes& a) {
  const TensorView &g = in[0], &x = in[1];
  const ImageView first(x, 0);
  const ChannelWalk walk(first.view, static_cast<std::int64_t>(hn::Lanes(ComputeTag<C>())));
  const std::int64_t images = x.sizes[0], channels = walk.channels, each = channels / a.groups;
  const std::int64_t workers = image_workers(images);
  const GroupWork<C> work(context, walk, workers);
  // Of each image, for the gradients of weight and bias.
  auto* const terms = static_cast<double*>(
      context->workspace(context, static_cast<std::size_t>(2 * channels * images) * sizeof(double)));
  if (!work.given() || terms == nullptr) return false;
  if (runs_dry(context)) return true;
  const C* const weight = in[2].defined ? static_cast<const C*>(in[2].data) : nullptr;
  const C *const means = static_cast<const C*>(in[3].data), *const rstds = static_cast<const C*>(in[4].data);
  const bool wanted = out[0].numel > 0, in_memory = written_past_caches(x);
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<ComputeScalar<T>, C>) {
      parallel_jobs(images, workers, [&](std::int64_t i, std::int64_t worker) {
        const ImageView gradient(g, i), image(x, i);
        ImageView result(out[0], wanted ? i : 0);
        const Strips<T> gs(gradient.view, image.view, walk), xs(image.view, image.view, walk);
        const GroupScratch<C> scratch = work.of(worker);
        const auto [mean, factor, part, slope] = scratch.values;
        for (std::int64_t c = 0; c < channels; ++c) mean[c] = means[i * a.groups + c / each];
        repeat(walk, mean);
        sum_image<T>(gs, xs, walk, mean, scratch.sums);
        const double count = static_cast<double>(walk.places) * static_cast<double>(each);
        double* const term = terms + 2 * channels * i;
        for (std::int64_t group = 0; group < a.groups; ++group) {
          const auto rstd = static_cast<double>(rstds[i * a.groups + group]);
          double h = 0, hz = 0;
          for (std::int64_t c = group * each; c < (group + 1) * each; ++c) {
            const double w = weight != nullptr ? static_cast<double>(weight[c]) : 1.0;
            term[c] = scratch.sums[channels + c] * rstd;
            term[channels + c] = scratch.sums[c];
            h += w * term[channels + c];
            hz += w * term[c];
          }
          for (std::int64_t c = group * each; c < (group + 1) * each; ++c) {
            factor[c] = static_cast<C>(weight != nullptr ? rstd * static_cast<double>(weight[c]) : rstd);
            part[c] = static_cast<C>(rstd * h / count);
            slope[c] = static_cast<C>(rstd * rstd * hz / count);
          }
        }
        if (!wanted) return;
        for (C* values : {factor, part, slope}) repeat(walk, values);
        Strips<T> x_grad(result.view, image.view, walk);
        const bool stream = gs.direct() && xs.direct() && x_grad.direct() && in_memory;
        write_image<T>(gs, xs, x_grad, walk, stream, mean, factor, part, slope);
      });
    }
  };
  visit_strips(
      x.dtype,
      [&](auto tag) {
        using T = decltype(tag);
        const ImageView gradient(g, 0), result(out[0], 0);
        const auto direct = [&](const TensorView& t) { return Strips<T>(t, first.view, walk).direct(); };
        return direct(gradient.view) && direct(first.view) && (!wanted || direct(result.view));
      },
      run);
  for (int o : {1, 2}) {
    if (out[o].numel == 0) continue;
    for (std::int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (std::int64_t i = 0; i < images; ++i) sum += terms[(2 * i + o - 1) * channels + c];
      static_cast<C*>(out[o].data)[c] = static_cast<C>(sum);
    }
  }
  return true;
}

}  // namespace

bool group_forward(KernelContext* context, const TensorView* in, TensorView* out, const RowNormAttributes& a) {
  return in[0].dtype == DType::f64 ? forward<double>(context, in, out, a) : forward<float>(context, in, out, a);
}
bool group_backward(KernelContext* context, const TensorView* in, TensorView* out, const RowNormAttributes& a) {
  return in[1].dtype == DType::f64 ? backward<double>(context, in, out, a) : backward<float>(context, in, out, a);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(group_forward);
HWY_EXPORT(group_backward);

bool group_norm_images(KernelContext* context, const TensorView* in, TensorView* out, const RowNormAttributes& a) {
  return HWY_DYNAMIC_DISPATCH(group_forward)(context, in, out, a);
}
bool group_norm_images_backward(KernelContext* context, const TensorView* in, TensorView* out,
                                const RowNormAttributes& a) {
  return HWY_DYNAMIC_DISPATCH(group_backward)(context, in, out, a);
}

}  // namespace halfstep::cpu
#endif
