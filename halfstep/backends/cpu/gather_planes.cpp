// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/gather_planes.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "halfstep/backends/cpu/gather_planes.h"
#include "halfstep/backends/cpu/image_rows.h"
#include "halfstep/backends/cpu/simd-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_GATHER_PLANES_ROW_
#define HALFSTEP_BACKENDS_CPU_GATHER_PLANES_ROW_
namespace halfstep::cpu {
/// A row of places of the result, of some channels that lie side by side.
struct GatherRow {
  const TensorView *x, *y;
  const Taps* columns;
  const Tap *rows, *rows_end;
  std::int64_t from, to, channels;  ///< of the first element: in x (of its row 0), in y
  const double* divisors;           ///< a column's; null: 1
  double divisor;
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

// K vectors of channels of one place; the last of them may have n lanes only.
template <int K, bool kFew, class T, class O>
HWY_INLINE void sum_place(const GatherRow& g, const T* from, std::int64_t column, float divisor, O* to,
                          [[maybe_unused]] std::size_t n) {
  const F32Tag d;
  const std::size_t lanes = hn::Lanes(d);
  const std::int64_t row_step = g.x->strides[2], column_step = g.x->strides[3];
  const Tap *columns = g.columns->begin(column), *columns_end = g.columns->end(column);
  F32Vec total[K];
  for (int k = 0; k < K; ++k) total[k] = hn::Zero(d);
  for (const Tap* r = g.rows; r != g.rows_end; ++r) {
    const T* line = from + r->at * row_step;
    F32Vec sum[K];
    for (int k = 0; k < K; ++k) sum[k] = hn::Zero(d);
    for (const Tap* c = columns; c != columns_end; ++c) {
      const T* place = line + c->at * column_step;
      const auto weight = hn::Set(d, static_cast<float>(c->weight));
      for (int k = 0; k < K; ++k) {
        F32Vec v;
        if constexpr (kFew) {
          v = load_n(d, place, n);
        } else {
          v = load(d, place + static_cast<std::size_t>(k) * lanes);
        }
        sum[k] = hn::MulAdd(weight, v, sum[k]);
      }
    }
    const auto weight = hn::Set(d, static_cast<float>(r->weight));
    for (int k = 0; k < K; ++k) total[k] = hn::MulAdd(weight, sum[k], total[k]);
  }
  if (divisor != 1) {
    const auto by = hn::Set(d, divisor);
    for (int k = 0; k < K; ++k) total[k] = hn::Div(total[k], by);
  }
  if constexpr (kFew) {
    store_n(total[0], d, to, n);
  } else {
    for (int k = 0; k < K; ++k) store(total[k], d, to + static_cast<std::size_t>(k) * lanes);
  }
}

template <class T, class O>
void row_of(const GatherRow& g) {
  const std::size_t lanes = hn::Lanes(F32Tag()), n = static_cast<std::size_t>(g.channels);
  const T* from = static_cast<const T*>(g.x->data) + g.from;
  for (std::int64_t w = 0; w < g.columns->size; ++w) {
    O* to = static_cast<O*>(g.y->data) + g.to + w * g.y->strides[3];
    const auto divisor = static_cast<float>(g.divisors ? g.divisor * g.divisors[w] : g.divisor);
    std::size_t c = 0;
    for (; c + 4 * lanes <= n; c += 4 * lanes) sum_place<4, false>(g, from + c, w, divisor, to + c, 0);
    for (; c + lanes <= n; c += lanes) sum_place<1, false>(g, from + c, w, divisor, to + c, 0);
    if (c < n) sum_place<1, true>(g, from + c, w, divisor, to + c, n - c);
  }
}

}  // namespace

void gather_row(const GatherRow& g) {
  const bool wide = g.y->dtype == DType::f32;
  if (g.x->dtype == DType::f16) return wide ? row_of<Half, float>(g) : row_of<Half, Half>(g);
  if (g.x->dtype == DType::bf16) return wide ? row_of<BFloat16, float>(g) : row_of<BFloat16, BFloat16>(g);
  row_of<float, float>(g);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cstring>

#include "halfstep/backends/cpu/move.h"
#include "halfstep/backends/cpu/row_block.h"

namespace halfstep::cpu {
HWY_EXPORT(gather_row);

namespace {

// Any strides and dtypes, one channel at a time.
template <class T, class C>
void gather_plane_row(const TensorView& x, TensorView y, const Tap* rows, const Tap* rows_end, const Taps& columns,
                      std::int64_t from, std::int64_t to, const double* divisors, double divisor) {
  constexpr std::int64_t kBlock = 256;
  const T* plane = static_cast<const T*>(x.data) + from;
  C block[kBlock];
  for (std::int64_t w0 = 0; w0 < columns.size; w0 += kBlock) {
    const std::int64_t width = std::min(kBlock, columns.size - w0);
    for (std::int64_t w = 0; w < width; ++w) {
      C total = 0;
      for (const Tap* r = rows; r != rows_end; ++r) {
        const T* line = plane + r->at * x.strides[2];
        C sum = 0;
        for (const Tap *c = columns.begin(w0 + w), *end = columns.end(w0 + w); c != end; ++c) {
          sum += static_cast<C>(c->weight) * convert<C>(line[c->at * x.strides[3]]);
        }
        total += static_cast<C>(r->weight) * sum;
      }
      block[w] = total / static_cast<C>(divisors ? divisor * divisors[w0 + w] : divisor);
    }
    write_row(y, to + w0 * y.strides[3], y.strides[3], width, block);
  }
}

// Whether every place is a copy of one.
bool moves(const Taps& taps) {
  for (std::int64_t i = 0; i < taps.size; ++i) {
    if (taps.first[i + 1] != i + 1 || taps.taps[i].weight != 1) return false;
  }
  return true;
}
void move_planes(const TensorView& x, const TensorView& y, const Taps& rows, const Taps& columns) {
  const ImageStrides from(x), to(y);
  visit_bits(x.dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    const U* source = elements<const U>(x);
    U* result = elements<U>(y);
    if (channels_side_by_side(x, y)) {
      for_image_rows(y, 1, [&](std::int64_t n, std::int64_t h, std::int64_t c, std::int64_t channels) {
        for (std::int64_t w = 0; w < columns.size; ++w) {
          std::memcpy(result + to.at(n, c, h, w), source + from.at(n, c, rows.taps[h].at, columns.taps[w].at),
                      static_cast<std::size_t>(channels) * sizeof(U));
        }
      });
    } else {
      for_plane_rows(y, 1, [&](std::int64_t n, std::int64_t c, std::int64_t h) {
        const U* line = source + from.at(n, c, rows.taps[h].at, 0);
        U* row = result + to.at(n, c, h, 0);
        for (std::int64_t w = 0; w < columns.size; ++w) row[w * to.w] = line[columns.taps[w].at * from.w];
      });
    }
  });
}

}  // namespace

void gather_planes(const TensorView& x, const TensorView& y, const Taps& rows, const Taps& columns,
                   const Divisors& divisors) {
  if (y.numel == 0) return;
  const bool whole = !divisors.rows && !divisors.columns && divisors.all == 1;
  if (whole && x.dtype == y.dtype && moves(rows) && moves(columns)) return move_planes(x, y, rows, columns);
  const ImageStrides from(x), to(y);
  const std::int64_t work = std::max<std::int64_t>(1, most_taps(rows) * most_taps(columns));
  const auto divisor_of = [&](std::int64_t row) {
    return divisors.rows ? divisors.all * divisors.rows[row] : divisors.all;
  };
  const bool known = x.dtype != DType::f64 && (y.dtype == x.dtype || y.dtype == DType::f32);
  if (known && channels_side_by_side(x, y)) {
    for_image_rows(y, work, [&](std::int64_t n, std::int64_t h, std::int64_t c, std::int64_t channels) {
      HWY_DYNAMIC_DISPATCH(gather_row)
      ({.x = &x,
        .y = &y,
        .columns = &columns,
        .rows = rows.begin(h),
        .rows_end = rows.end(h),
        .from = n * from.n + c,
        .to = n * to.n + h * to.h + c,
        .channels = channels,
        .divisors = divisors.columns,
        .divisor = divisor_of(h)});
    });
    return;
  }
  visit_floating(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto zero) {
      for_plane_rows(y, work * 4, [&](std::int64_t n, std::int64_t c, std::int64_t h) {
        gather_plane_row<T, decltype(zero)>(x, y, rows.begin(h), rows.end(h), columns, from.at(n, c, 0, 0),
                                            to.at(n, c, h, 0), divisors.columns, divisor_of(h));
      });
    };
    if (x.dtype == DType::f64 || y.dtype == DType::f64) {
      run(double{});
    } else {
      run(float{});
    }
  });
}

}  // namespace halfstep::cpu
#endif
