// SPDX-License-Identifier: Apache-2.0
// Passes over strips (norm_strips-inl.h) that batch norm and group norm share: statistics of each channel, and the
// normalised result.

// The include guard of a header that is compiled once for each target.
#if defined(HALFSTEP_BACKENDS_CPU_NORM_PASSES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFSTEP_BACKENDS_CPU_NORM_PASSES_INL_H_
#undef HALFSTEP_BACKENDS_CPU_NORM_PASSES_INL_H_
#else
#define HALFSTEP_BACKENDS_CPU_NORM_PASSES_INL_H_
#endif

#include <algorithm>

#include "halfstep/backends/cpu/norm_strips-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

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

// Means and sums of squared differences, [channels] each, at mean[0] and mean[channels]; mean has room for
// moments_size() numbers.
inline std::int64_t moments_size(const ChannelWalk& walk) { return 2 * walk.channels * walk.chunks; }
// `in_memory`: whether what x is a part of doesn't fit the caches.
template <class T>
void moments(const TensorView& x, const ChannelWalk& walk, bool in_memory, double* const mean) {
  const std::int64_t channels = walk.channels, blocks = walk.blocks();
  double* const squares = mean + channels;
  const Strips<T> strips(x, x, walk);
  parallel_for(walk.chunks * blocks, row_grain(walk.chunk * walk.width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t k = i / blocks, channel = i % blocks * walk.width;
      double* part = mean + 2 * channels * k + channel;
      Moments<T>(strips, walk, channel, in_memory, part, part + channels)
          .run(k * walk.chunk, std::min(walk.places, (k + 1) * walk.chunk));
    }
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
}

// --- the result

// y = (x - centre) factor + offset, plus the residual unless that is null, activated.
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

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
