// SPDX-License-Identifier: Apache-2.0
// max_pool2d and adaptive_max_pool2d of bytes. They have no gradient, and so no index is written.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/int8_pool.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <cstdint>

#include "halfstep/backends/cpu/image_rows.h"
#include "halfstep/backends/cpu/simd-inl.h"
#include "halfstep/backends/cpu/window.h"

#ifndef HALFSTEP_BACKENDS_CPU_INT8_POOL_ROW_
#define HALFSTEP_BACKENDS_CPU_INT8_POOL_ROW_
namespace halfstep::cpu {
/// A row of places of the result, of some channels that lie side by side.
struct ByteMaxRow {
  const std::uint8_t* x;  ///< row 0 of the image
  std::uint8_t* y;
  std::int64_t row_step, column_step, y_step;
  const Taps* columns;
  const Tap *rows, *rows_end;
  std::size_t channels;
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

// K vectors of channels of one place.
template <int K, class D>
HWY_INLINE void byte_maxima(D d, const ByteMaxRow& m, std::int64_t column, std::size_t c, std::uint8_t* to) {
  using T = hn::TFromD<D>;
  const std::size_t lanes = hn::Lanes(d);
  const Tap *columns = m.columns->begin(column), *columns_end = m.columns->end(column);
  hn::Vec<D> best[K];
  for (int k = 0; k < K; ++k) best[k] = hn::Set(d, hwy::LimitsMin<T>());
  for (const Tap* r = m.rows; r != m.rows_end; ++r) {
    const std::uint8_t* line = m.x + r->at * m.row_step + c;
    for (const Tap* t = columns; t != columns_end; ++t) {
      const T* place = reinterpret_cast<const T*>(line + t->at * m.column_step);
      for (int k = 0; k < K; ++k) {
        best[k] = hn::Max(best[k], hn::LoadU(d, place + static_cast<std::size_t>(k) * lanes));
      }
    }
  }
  for (int k = 0; k < K; ++k) hn::StoreU(best[k], d, reinterpret_cast<T*>(to) + static_cast<std::size_t>(k) * lanes);
}

template <class T>
void byte_row(const ByteMaxRow& m) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 8> few;
  const std::size_t lanes = hn::Lanes(d), step = hn::Lanes(few);
  for (std::int64_t w = 0; w < m.columns->size; ++w) {
    std::uint8_t* to = m.y + w * m.y_step;
    std::size_t c = 0;
    for (; c + 4 * lanes <= m.channels; c += 4 * lanes) byte_maxima<4>(d, m, w, c, to + c);
    for (; c + lanes <= m.channels; c += lanes) byte_maxima<1>(d, m, w, c, to + c);
    for (; c + step <= m.channels; c += step) byte_maxima<1>(few, m, w, c, to + c);
    for (; c < m.channels; ++c) byte_maxima<1>(hn::CappedTag<T, 1>(), m, w, c, to + c);
  }
}

}  // namespace

void byte_max_row(const ByteMaxRow& m, bool is_signed) {
  is_signed ? byte_row<std::int8_t>(m) : byte_row<std::uint8_t>(m);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <limits>

namespace halfstep::cpu {
HWY_EXPORT(byte_max_row);

namespace {

bool byte_windows(KernelContext* context, const PoolAttributes& a, const TensorView& x, const TensorView& y, Taps& rows,
                  Taps& columns) {
  return window_taps(context, a, 0, x.sizes[2], y.sizes[2], rows) &&
         window_taps(context, a, 1, x.sizes[3], y.sizes[3], columns);
}
bool byte_windows(KernelContext* context, const AdaptivePoolAttributes&, const TensorView& x, const TensorView& y,
                  Taps& rows, Taps& columns) {
  return adaptive_taps(context, x.sizes[2], y.sizes[2], rows) &&
         adaptive_taps(context, x.sizes[3], y.sizes[3], columns);
}

template <class T>
void byte_planes(const TensorView& x, const TensorView& y, const Taps& rows, const Taps& columns) {
  const ImageStrides from(x), to(y);
  for_plane_rows(y, most_taps(rows) * most_taps(columns), [&](std::int64_t n, std::int64_t c, std::int64_t h) {
    const T* plane = elements<T>(x) + from.at(n, c, 0, 0);
    for (std::int64_t w = 0; w < columns.size; ++w) {
      T best = std::numeric_limits<T>::min();
      for (const Tap* r = rows.begin(h); r != rows.end(h); ++r) {
        for (const Tap* k = columns.begin(w); k != columns.end(w); ++k) {
          best = std::max(best, plane[r->at * from.h + k->at * from.w]);
        }
      }
      elements<T>(y)[to.at(n, c, h, w)] = best;
    }
  });
}

template <class A>
Status byte_maximum(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const TensorView &x = in[0], &y = out[0];
  if (y.numel == 0) return Status::ok;
  Taps rows, columns;
  if (!byte_windows(context, *static_cast<const A*>(attributes), x, y, rows, columns)) return Status::out_of_memory;
  const bool is_signed = x.dtype == DType::i8;
  if (channels_side_by_side(x, y)) {
    const ImageStrides from(x), to(y);
    // A vector takes 64 of them.
    const std::int64_t work = std::max<std::int64_t>(1, most_taps(rows) * most_taps(columns) / 8);
    for_image_rows(y, work, [&](std::int64_t n, std::int64_t h, std::int64_t c, std::int64_t channels) {
      const ByteMaxRow row{.x = elements<std::uint8_t>(x) + from.at(n, c, 0, 0),
                           .y = elements<std::uint8_t>(y) + to.at(n, c, h, 0),
                           .row_step = from.h,
                           .column_step = from.w,
                           .y_step = to.w,
                           .columns = &columns,
                           .rows = rows.begin(h),
                           .rows_end = rows.end(h),
                           .channels = static_cast<std::size_t>(channels)};
      HWY_DYNAMIC_DISPATCH(byte_max_row)(row, is_signed);
    });
  } else if (is_signed) {
    byte_planes<std::int8_t>(x, y, rows, columns);
  } else {
    byte_planes<std::uint8_t>(x, y, rows, columns);
  }
  return Status::ok;
}

const RegisterCpuKernel registered_int8_pools[] = {
    {"max_pool2d", {DType::u8, DType::i8}, byte_maximum<PoolAttributes>},
    {"adaptive_max_pool2d", {DType::u8, DType::i8}, byte_maximum<AdaptivePoolAttributes>},
};

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
