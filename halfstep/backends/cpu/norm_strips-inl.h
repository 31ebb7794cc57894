// SPDX-License-Identifier: Apache-2.0
// Strips of tensors (norm_walk.h) as vectors, and loops over them. Strips that are stored otherwise than they are
// worked on (another layout or dtype) go through a block in the first-level cache.

// The include guard of a header that is compiled once for each target.
#if defined(HALFSTEP_BACKENDS_CPU_NORM_STRIPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFSTEP_BACKENDS_CPU_NORM_STRIPS_INL_H_
#undef HALFSTEP_BACKENDS_CPU_NORM_STRIPS_INL_H_
#else
#define HALFSTEP_BACKENDS_CPU_NORM_STRIPS_INL_H_
#endif

#include <hwy/cache_control.h>

#include "halfstep/backends/cpu/norm_walk.h"
#include "halfstep/backends/cpu/past_caches.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

/// A tensor whose strips are read and written as T: its own type, or what it is computed in.
template <class T>
class Strips {
 public:
  /// `v` may be absent. It has the sizes of what the walk was made for.
  Strips(const TensorView& v, const TensorView& like, const ChannelWalk& walk)
      : view_(v), walk_(walk), lies_(v, like, walk), direct_(lies_.together && v.dtype == dtype_of<T>) {}
  bool present() const { return lies_.present; }
  /// Whether strips are used where they lie.
  bool direct() const { return direct_ || !lies_.present; }

  /// The elements of a strip, in `block` unless they are used where they lie; null for an absent tensor.
  const T* read(const Strip& s, T* block) const {
    if (!lies_.present) return nullptr;
    if (direct_) return place_of(s);
    if constexpr (std::is_same_v<T, ComputeScalar<T>>) {
      for_pieces(s, [&](std::int64_t at, std::int64_t stride, std::int64_t n, std::int64_t i) {
        read_row(view_, at, stride, n, block + i);
      });
    }
    return block;
  }
  /// Where a strip is to be written, and, once it is, its way home.
  T* target(const Strip& s, T* block) const {
    if (!lies_.present) return nullptr;
    return direct_ ? place_of(s) : block;
  }
  void written(const Strip& s, const T* block) {
    if (!lies_.present || direct_) return;
    if constexpr (std::is_same_v<T, ComputeScalar<T>>) {
      for_pieces(s, [&](std::int64_t at, std::int64_t stride, std::int64_t n, std::int64_t i) {
        write_row(view_, at, stride, n, block + i);
      });
    }
  }

 private:
  T* place_of(const Strip& s) const {
    T* data = static_cast<T*>(view_.data);
    if (walk_.rows) return data + s.place * walk_.channels + s.channel;
    return data + lies_.places.offset(s.place) + s.channel * lies_.channel_stride;
  }
  template <class F>
  void for_pieces(const Strip& s, F&& f) const {
    const std::int64_t first = s.channel * lies_.channel_stride;
    if (walk_.rows) {
      for (std::int64_t p = 0; p < s.count; ++p) {
        f(first + lies_.places.offset(s.place + p), lies_.channel_stride, s.width, p * s.width);
      }
      return;
    }
    std::int64_t i = 0;
    lies_.places.for_runs(s.place, s.place + s.count, [&](std::int64_t at, std::int64_t n, std::int64_t stride) {
      f(first + at, stride, n, i);
      i += n;
    });
  }

  TensorView view_;
  const ChannelWalk& walk_;
  StripPlaces lies_;
  bool direct_;
};

/// f(zero) with the type that strips are read as: the tensors' own if all lie as the walk goes, else what they are
/// computed in. `direct<T>()` says whether they do.
template <class Direct, class F>
void visit_strips(DType dtype, Direct&& direct, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f(double{});
    case DType::f16:
      if (direct(Half{})) return f(Half{});
      break;
    case DType::bf16:
      if (direct(BFloat16{})) return f(BFloat16{});
      break;
    default:
      break;
  }
  return f(float{});
}

/// Full vectors, and the first `n` lanes of one.
struct Whole {
  template <class D, class T>
  HWY_INLINE hn::Vec<D> read(D d, const T* p) const {
    return load(d, p);
  }
  template <class D, class T>
  HWY_INLINE void write(hn::Vec<D> v, D d, T* p) const {
    store(v, d, p);
  }
  template <class D, class P>
  HWY_INLINE hn::Vec<D> get(D d, const P& operand, std::size_t i) const {
    return operand.get(d, i);
  }
};
struct Part {
  std::size_t n;
  template <class D, class T>
  HWY_INLINE hn::Vec<D> read(D d, const T* p) const {
    return load_n(d, p, n);
  }
  template <class D, class T>
  HWY_INLINE void write(hn::Vec<D> v, D d, T* p) const {
    store_n(v, d, p, n);
  }
  template <class D, class P>
  HWY_INLINE hn::Vec<D> get(D d, const P& operand, std::size_t i) const {
    return operand.get_n(d, i, n);
  }
};
template <class D, class F>
HWY_INLINE void each_vector(D d, std::int64_t count, F&& f) {
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) f(i, Whole{});
  if (i < n) f(i, Part{n % lanes});
}
/// Has memory behind `strips` strips fetched while `lanes` elements of each from `i` on are summed: line after line, 16
/// KiB or a turn ahead.
template <class T>
HWY_INLINE void fetch_ahead(const T* x, std::int64_t pitch, std::size_t i, std::size_t lanes, std::size_t strips) {
  const auto turn = static_cast<std::int64_t>(strips) * pitch;
  const std::int64_t ahead = std::max<std::int64_t>(turn, 16384 / static_cast<std::int64_t>(sizeof(T)));
  const T* next = x + ahead + static_cast<std::int64_t>(strips * i);
  for (std::size_t k = 0; k < strips * lanes; k += 64 / sizeof(T)) hwy::Prefetch(next + k);
}

/// How many elements ahead memory is fetched where tensors don't fit the caches: the processor follows some streams by
/// itself, but not far enough to keep memory busy. 0 where they fit.
template <class T>
std::int64_t elements_ahead(bool in_memory) {
  return in_memory ? 4096 / static_cast<std::int64_t>(sizeof(T)) : 0;
}
/// Reads from element `i` on, and fetches what lies `ahead` elements further.
template <class Lanes, class D, class T>
HWY_INLINE hn::Vec<D> read_ahead(const Lanes& part, D d, const T* p, std::size_t i, std::int64_t ahead) {
  hwy::Prefetch(p + i + ahead);
  return part.read(d, p + i);
}

/// What happens to results: nothing. Another type may do something, and where `kRounded`, with the same outcome to
/// results that are bfloat16 already, none of them NaN.
struct Unchanged {
  static constexpr bool kRounded = true;
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D, hn::Vec<D> v) const {
    return v;
  }
  template <class D>
  HWY_INLINE hn::Vec<D> packed(D, hn::Vec<D> v) const {
    return v;
  }
};

/// Two vectors to memory one after the other, activated; past the caches if kStream, where memory is aligned.
template <bool kStream, class D, class T, class Activation>
HWY_INLINE void write_two(hn::Vec<D> v0, hn::Vec<D> v1, D d, T* p, const Activation& activate) {
  if constexpr (sizeof(T) == 2) {
    const hn::Repartition<std::uint16_t, D> d16;
    auto* to = reinterpret_cast<std::uint16_t*>(p);
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (HWY_LIKELY(hn::AllFalse(d, hn::IsNaN(hn::Add(v0, v1))))) {
        const auto halves = activate.packed(d16, round_two(d, v0, v1));
        kStream ? hn::Stream(halves, d16, to) : hn::StoreU(halves, d16, to);
        return;
      }
    } else if constexpr (kStream) {
      const hn::Rebind<hwy::float16_t, D> dh;
      const hn::Rebind<std::uint16_t, D> half;
      const auto h0 = hn::BitCast(half, hn::DemoteTo(dh, activate(d, v0)));
      const auto h1 = hn::BitCast(half, hn::DemoteTo(dh, activate(d, v1)));
      hn::Stream(hn::Combine(d16, h1, h0), d16, to);
      return;
    }
  } else if constexpr (kStream) {
    hn::Stream(activate(d, v0), d, p);
    hn::Stream(activate(d, v1), d, p + hn::Lanes(d));
    return;
  }
  store(activate(d, v0), d, p);
  store(activate(d, v1), d, p + hn::Lanes(d));
}

/// to[i] = f(i, part), activated, for i < count, where f returns the vector from i on; past the caches if `stream`.
template <class D, class T, class F, class Activation = Unchanged>
HWY_INLINE void each_result(D d, std::int64_t count, bool stream, T* to, F&& f, const Activation& activate = {}) {
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  if (stream && reinterpret_cast<std::uintptr_t>(to) % 64 == 0) {
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const auto first = f(i, Whole{});
      write_two<true>(first, f(i + lanes, Whole{}), d, to + i, activate);
    }
  }
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const auto first = f(i, Whole{});
    write_two<false>(first, f(i + lanes, Whole{}), d, to + i, activate);
  }
  for (; i + lanes <= n; i += lanes) store(activate(d, f(i, Whole{})), d, to + i);
  if (i < n) store_n(activate(d, f(i, Part{n - i})), d, to + i, n - i);
}

/// Calls f(parameters...) with values of channels as operands of a strip: a value for each element, or one for all.
/// Arrays of the channels are as repeated() makes them.
template <class C, class F, class... Arrays>
HWY_INLINE void with_parameters(const ChannelWalk& walk, const Strip& s, F&& f, const Arrays*... arrays) {
  if (walk.rows) {
    f(Run<C>{arrays + s.channel}...);
  } else {
    f(Same<C>{arrays[s.channel]}...);
  }
}
/// Values that array of channels needs, and their repetition for strips of several places.
inline std::int64_t repeated_size(const ChannelWalk& walk) { return walk.channels * walk.written; }
template <class C>
void repeat(const ChannelWalk& walk, C* values) {
  for (std::int64_t i = walk.channels; i < repeated_size(walk); ++i) values[i] = values[i - walk.channels];
}

/// Calls f(strip) for all strips, over threads. Each thread goes through its part backwards, 128 Ki elements at a time
/// (with less the processor doesn't see a stream of addresses): what the pass before it read last is in the cache
/// still.
template <class F>
void for_strips_backwards(const ChannelWalk& walk, F&& f) {
  const std::int64_t span = walk.rows ? walk.written : walk.run;  // places of an item
  const std::int64_t spans = (walk.places + span - 1) / span, blocks = walk.blocks();
  const std::int64_t size = span * walk.width;
  parallel_for_descending(spans * blocks, row_grain(size), [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t group = std::max<std::int64_t>(1, 131072 / size);
    for (std::int64_t last = end; last > begin; last -= group) {
      for (std::int64_t i = std::max(begin, last - group); i < last; ++i) {
        const std::int64_t channel = i % blocks * walk.width;
        const std::int64_t first = i / blocks * span, after = std::min(walk.places, first + span);
        for (std::int64_t p = first; p < after;) {
          const Strip s = walk.written_strip(p, after, channel);
          f(s);
          p += s.count;
        }
      }
    }
    hwy::FlushStream();  // non-temporal stores must be visible before other threads are signalled
  });
}

/// Calls f(d, c) for the channels c < n in vectors of float64, then one by one: the arithmetic of each is the same.
template <class F>
HWY_INLINE void each_channel(std::int64_t n, F&& f) {
  const F64Tag d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t c = 0;
  for (; c + lanes <= n; c += lanes) f(d, c);
  for (; c < n; ++c) f(hn::CappedTag<double, 1>(), c);
}
template <class D>
HWY_INLINE hn::Vec<D> load_exact(D d, const double* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> load_exact(D d, const float* p) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, D>(), p));
}
template <class D>
HWY_INLINE void store_rounded(hn::Vec<D> v, D d, double* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void store_rounded(hn::Vec<D> v, D, float* p) {
  const hn::Rebind<float, D> df;
  hn::StoreU(hn::DemoteTo(df, v), df, p);
}

/// The sum of a channel whose places were summed side by side (kSumStrip), in float64 and in an order of its own, which
/// is the same for all widths of vectors.
template <class C>
HWY_INLINE double total_of_lanes(const C* sums) {
  alignas(64) double part[8] = {};
  each_channel(8, [&](auto d, std::int64_t c) HWY_ATTR {
    auto all = load_exact(d, sums + c);
    for (std::int64_t i = c + 8; i < kSumStrip; i += 8) all = hn::Add(all, load_exact(d, sums + i));
    hn::StoreU(all, d, part + c);
  });
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

/// Sums of `n` numbers in turn into `width` of them, in float64: to[c] += from[c] + from[c + width] + ...
template <class C>
HWY_INLINE void fold(const C* from, std::int64_t n, std::int64_t width, double* to) {
  if (width == 1 && n == kSumStrip) {
    to[0] += total_of_lanes(from);
    return;
  }
  for (; n > 0; n -= width, from += width) {
    each_channel(width, [&](auto d, std::int64_t c) HWY_ATTR {
      hn::StoreU(hn::Add(hn::LoadU(d, to + c), load_exact(d, from + c)), d, to + c);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
