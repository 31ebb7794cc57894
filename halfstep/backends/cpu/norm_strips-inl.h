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
/// Has four strips fetched that are summed 16 strips later: strips read side by side aren't a stream to the processor.
template <class T>
HWY_INLINE void fetch_ahead(const T* strips, std::int64_t pitch, std::size_t i) {
  for (int k = 16; k < 20; ++k) hwy::Prefetch(strips + k * pitch + static_cast<std::int64_t>(i));
}

/// to[i] = f(i, part) for i < count, where f returns the vector from i on.
template <class D, class T, class F>
HWY_INLINE void each_result(D d, std::int64_t count, T* to, F&& f) {
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const auto first = f(i, Whole{});
    store_two(first, f(i + lanes, Whole{}), d, to + i);
  }
  for (; i + lanes <= n; i += lanes) store(f(i, Whole{}), d, to + i);
  if (i < n) store_n(f(i, Part{n - i}), d, to + i, n - i);
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
  parallel_for(spans * blocks, row_grain(size), [&](std::int64_t begin, std::int64_t end) {
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
  });
}

/// Sums of `n` numbers in turn into `width` of them, in float64: to[c] += from[c] + from[c + width] + ...
template <class C>
HWY_INLINE void fold(const C* from, std::int64_t n, std::int64_t width, double* to) {
  if (width == 1) {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(from[i]);
    to[0] += sum;
    return;
  }
  for (; n > 0; n -= width, from += width) {
    for (std::int64_t c = 0; c < width; ++c) to[c] += static_cast<double>(from[c]);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
