// SPDX-License-Identifier: Apache-2.0
// Each place of the image looks through the windows that it is in for those that chose it, so that no two threads write
// to one place and sums have one order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/max_pool_backward_rows.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <hwy/cache_control.h>

#include "halfstep/backends/cpu/image_rows.h"
#include "halfstep/backends/cpu/max_pool_rows.h"
#include "halfstep/backends/cpu/max_pool_taps-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_MAX_POOL_BACKWARD_ROWS_ROW_
#define HALFSTEP_BACKENDS_CPU_MAX_POOL_BACKWARD_ROWS_ROW_
namespace halfstep::cpu {
/// A window that a place of the image is in: where it lies, in elements, and the place's number in it.
struct WindowOfPlace {
  std::int64_t g, index;
  std::int32_t number;
};
/// A row of places of the image's gradient, of some channels.
struct MaxGradientRow {
  DType dtype, to_dtype, index_dtype;
  const void *g, *index;  ///< row 0
  void* to;
  std::int64_t row_step, index_row_step, to_step;  ///< in elements
  const std::int64_t* first;                       ///< as in Taps: the windows of place w are windows[first[w]] to ...
  const WindowOfPlace* windows;
  std::int64_t places;
  const Tap *rows, *rows_end;
  std::int64_t width;  ///< of the widest window
  std::size_t channels;
  bool stream;  ///< past the caches; memory is aligned then
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

// Two vectors to aligned memory one after the other, past the caches.
template <class D, class T>
HWY_INLINE void stream_sums(hn::Vec<D> v0, hn::Vec<D> v1, D d, T* p) {
  const hn::Repartition<std::uint16_t, D> d16;
  if constexpr (std::is_same_v<T, float>) {
    hn::Stream(v0, d, p);
    hn::Stream(v1, d, p + hn::Lanes(d));
  } else if constexpr (std::is_same_v<T, Half>) {
    const hn::Rebind<hwy::float16_t, D> dh;
    const hn::Rebind<std::uint16_t, D> half;
    const auto h0 = hn::BitCast(half, hn::DemoteTo(dh, v0)), h1 = hn::BitCast(half, hn::DemoteTo(dh, v1));
    hn::Stream(hn::Combine(d16, h1, h0), d16, reinterpret_cast<std::uint16_t*>(p));
  } else if (HWY_LIKELY(hn::AllFalse(d, hn::IsNaN(hn::Add(v0, v1))))) {
    hn::Stream(round_two(d, v0, v1), d16, reinterpret_cast<std::uint16_t*>(p));
  } else {
    store_two(v0, v1, d, p);
  }
}

// The sums of K vectors of channels of one place.
template <int K, class D, class T, class I, class O>
HWY_INLINE void collect_gradients(D d, const MaxGradientRow& m, const T* from, const I* index,
                                  const WindowOfPlace* begin, const WindowOfPlace* end, O* to) {
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  hn::Vec<D> total[K];
  for (int k = 0; k < K; ++k) total[k] = hn::Zero(d);
  for (const Tap* r = m.rows; r != m.rows_end; ++r) {
    const T* line = from + r->at * m.row_step;
    const I* chosen = index + r->at * m.index_row_step;
    const auto number = static_cast<std::int32_t>(r->number * m.width);
    for (const WindowOfPlace* w = begin; w != end; ++w) {
      const T* place = line + w->g;
      const I* numbers = chosen + w->index;
#ifdef __GNUC__
      // Keeps one pointer instead of one for each of the vectors, for which there are not enough registers.
      asm("" : "+r"(place), "+r"(numbers));
#endif
      const std::int32_t here = number + w->number;
      for (int k = 0; k < K; ++k) {
        const std::size_t i = static_cast<std::size_t>(k) * kLanes;
        const auto sum = hn::Add(total[k], load(d, place + i));
        total[k] = hn::IfThenElse(numbered(d, numbers + i, here), sum, total[k]);
      }
    }
  }
  if constexpr (K == 1) {
    store(total[0], d, to);
  } else if (m.stream) {
    for (int k = 0; k < K; k += 2) {
      stream_sums(total[k], total[k + 1], d, to + static_cast<std::size_t>(k) * kLanes);
    }
  } else {
    for (int k = 0; k < K; k += 2) store_two(total[k], total[k + 1], d, to + static_cast<std::size_t>(k) * kLanes);
  }
}

template <class T, class O, class I>
void collect_row(const MaxGradientRow& m) {
  with_lanes_for<float>(m.channels, [&](auto d) HWY_ATTR {
    const T* from = static_cast<const T*>(m.g);
    const I* index = static_cast<const I*>(m.index);
    O* to = static_cast<O*>(m.to);
    for (std::int64_t w = 0; w < m.places; ++w, to += m.to_step) {
      const WindowOfPlace *begin = m.windows + m.first[w], *end = m.windows + m.first[w + 1];
      each_few_vectors(d, m.channels, [&](auto k, std::size_t c) HWY_ATTR {
        collect_gradients<k>(d, m, from + c, index + c, begin, end, to + c);
      });
    }
  });
  if (m.stream) hwy::FlushStream();  // non-temporal stores must be visible before other threads are signalled
}

}  // namespace

void max_gradient_row(const MaxGradientRow& m) {
  visit_image_dtypes(m.dtype, m.to_dtype, [&](auto from, auto to) {
    using T = decltype(from);
    using O = decltype(to);
    m.index_dtype == DType::u8 ? collect_row<T, O, std::uint8_t>(m) : collect_row<T, O, std::int32_t>(m);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/runtime/machine_limits.h"

namespace halfstep::cpu {
HWY_EXPORT(max_gradient_row);

bool max_pool_backward_rows(KernelContext* context, const TensorView& g, const TensorView& index, const TensorView& dx,
                            const Taps& rows, const Taps& columns, std::int64_t width) {
  const ImageStrides from(g), to(dx), at(index);
  const std::int64_t count = columns.first[columns.size];
  auto* windows = static_cast<WindowOfPlace*>(
      context->workspace(context, static_cast<std::uint64_t>(count + 1) * sizeof(WindowOfPlace)));
  if (!windows) return false;
  for (std::int64_t i = 0; i < count; ++i) {
    const Tap& tap = columns.taps[i];
    windows[i] = {tap.at * from.w, tap.at * at.w, static_cast<std::int32_t>(tap.number)};
  }
  // Results that leave little room in the last cache go past it. 16 images of 64 channels, windows of 3x3/2, two
  // threads of a Zen 4 with 32 MiB: on 112x112, 25 MB, 1.53 to 1.36 ms, in float32 2.12 to 1.56; on 56x56 in float32,
  // 13 MB, they would take 0.38 ms instead of 0.30.
  const std::int64_t item = static_cast<std::int64_t>(item_size(dx.dtype));
  const bool stream = dx.numel * item >= last_cache_bytes() / 2 && to.w * item % 64 == 0 &&
                      reinterpret_cast<std::uintptr_t>(dx.data) % 64 == 0 && to.h * item % 64 == 0 &&
                      to.n * item % 64 == 0;
  const std::int64_t work = std::max<std::int64_t>(1, most_taps(rows) * most_taps(columns));
  for_image_rows(dx, work, [&](std::int64_t n, std::int64_t h, std::int64_t c, std::int64_t channels) {
    HWY_DYNAMIC_DISPATCH(max_gradient_row)
    ({.dtype = g.dtype,
      .to_dtype = dx.dtype,
      .index_dtype = index.dtype,
      .g = element(g.dtype, static_cast<const void*>(g.data), n * from.n + c),
      .index = element(index.dtype, static_cast<const void*>(index.data), n * at.n + c),
      .to = element(dx.dtype, dx.data, to.at(n, c, h, 0)),
      .row_step = from.h,
      .index_row_step = at.h,
      .to_step = to.w,
      .first = columns.first,
      .windows = windows,
      .places = columns.size,
      .rows = rows.begin(h),
      .rows_end = rows.end(h),
      .width = width,
      .channels = static_cast<std::size_t>(channels),
      .stream = stream});
  });
  return true;
}

}  // namespace halfstep::cpu
#endif
