// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/gather_planes.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <vector>

#include "halfstep/backends/cpu/gather_planes.h"
#include "halfstep/backends/cpu/image_mean.h"
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

/// The columns' taps for vectors of places: for each vector and each of `most` taps the weights, 0 where a place has
/// fewer, and where the taps lie. They count from `base` where all lie close behind it, and else from the row's
/// beginning; `reach` tells.
struct ColumnTaps {
  enum Reach : std::int8_t { one_vector, two_vectors, anywhere };
  struct Head {
    std::int32_t base;
    Reach reach;
  };
  std::int64_t most = 0;
  std::vector<Head> heads;
  std::vector<float> weights;
  std::vector<std::int32_t> places;
  ColumnTaps(const Taps& taps, std::int64_t most_taps, std::int64_t lanes);
};
/// A row of places of one channel, next to each other in x and in y.
struct GatherLine {
  DType from_dtype, to_dtype;
  const void* x;  ///< row 0
  void* y;
  std::int64_t row_step, width;  ///< of x
  const Taps* columns;
  const ColumnTaps* vectors;  ///< null: windows too wide for them
  const Tap *rows, *rows_end;
  const double* divisors;  ///< a column's; null: 1
  double divisor;
  float *line, *result;  ///< room for a row of x and two vectors, and for one of y and a vector
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

// The rows of the window as one, in float32.
template <class T>
HWY_INLINE void sum_rows(const GatherLine& g) {
  const F32Tag d;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(g.width);
  const T* x = static_cast<const T*>(g.x);
  std::size_t w = 0;
  for (; w + lanes <= n; w += lanes) {
    F32Vec total = hn::Zero(d);
    for (const Tap* r = g.rows; r != g.rows_end; ++r) {
      total = hn::MulAdd(hn::Set(d, static_cast<float>(r->weight)), load(d, x + r->at * g.row_step + w), total);
    }
    hn::StoreU(total, d, g.line + w);
  }
  if (w == n) return;
  F32Vec total = hn::Zero(d);
  for (const Tap* r = g.rows; r != g.rows_end; ++r) {
    const F32Vec v = load_n(d, x + r->at * g.row_step + w, n - w);
    total = hn::MulAdd(hn::Set(d, static_cast<float>(r->weight)), v, total);
  }
  hn::StoreU(total, d, g.line + w);
}

HWY_INLINE void sum_columns(const GatherLine& g) {
  const F32Tag d;
  const hn::RebindToSigned<F32Tag> di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const ColumnTaps& taps = *g.vectors;
  const ColumnTaps::Head* head = taps.heads.data();
  const float* weights = taps.weights.data();
  const std::int32_t* places = taps.places.data();
  for (std::int64_t w = 0; w < g.columns->size; w += lanes) {
    F32Vec total = hn::Zero(d);
    for (std::int64_t k = 0; k < taps.most; ++k, ++head, weights += lanes, places += lanes) {
      const float* from = g.line + head->base;
      F32Vec v;
      if (head->reach == ColumnTaps::one_vector) {
        v = hn::TableLookupLanes(hn::LoadU(d, from), hn::SetTableIndices(d, places));
      } else if (head->reach == ColumnTaps::two_vectors) {
        const auto at = hn::LoadU(di, places), all = hn::Set(di, static_cast<std::int32_t>(lanes));
        const auto index = hn::IndicesFromVec(d, hn::And(at, hn::Sub(all, hn::Set(di, 1))));
        v = hn::IfThenElse(hn::RebindMask(d, hn::Lt(at, all)), hn::TableLookupLanes(hn::LoadU(d, from), index),
                           hn::TableLookupLanes(hn::LoadU(d, from + lanes), index));
      } else {
        v = hn::GatherIndex(d, from, hn::LoadU(di, places));
      }
      const F32Vec weight = hn::LoadU(d, weights);
      // Infinity that no tap takes stays out.
      total = hn::MulAdd(weight, hn::IfThenElseZero(hn::Ne(weight, hn::Zero(d)), v), total);
    }
    hn::StoreU(total, d, g.result + w);
  }
}

template <class T, class O>
void line_of(const GatherLine& g) {
  const F32Tag d;
  sum_rows<T>(g);
  const Taps& columns = *g.columns;
  if (g.vectors) {
    sum_columns(g);
  } else {
    for (std::int64_t w = 0; w < columns.size; ++w) {
      float sum = 0;
      for (const Tap *c = columns.begin(w), *end = columns.end(w); c != end; ++c) {
        sum += static_cast<float>(c->weight) * g.line[c->at];
      }
      g.result[w] = sum;
    }
  }
  if (g.divisors) {
    for (std::int64_t w = 0; w < columns.size; ++w) g.result[w] /= static_cast<float>(g.divisor * g.divisors[w]);
  }
  const F32Vec by = hn::Set(d, g.divisors ? 1.0f : static_cast<float>(g.divisor));
  map_run(
      d, static_cast<O*>(g.y), columns.size, [&](F32Vec v) HWY_ATTR { return hn::Div(v, by); }, Run<float>{g.result});
}

// The sum of n elements, behind which there are `more`: 64 terms in float32 in each lane, their sums in float64.
template <class T>
HWY_INLINE double sum_of_run(const T* x, std::size_t n, std::size_t more) {
  const F32Tag d;
  const std::size_t lanes = hn::Lanes(d);
  double total = 0;
  for (std::size_t block = 0; block < n;) {
    const std::size_t end = std::min(n, block + 64 * lanes);
    F32Vec sum = hn::Zero(d);
    std::size_t i = block;
    for (; i + lanes <= end; i += lanes) sum = hn::Add(sum, load(d, x + i));
    if (i < end && i + lanes <= n + more) {
      sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, end - i), load(d, x + i)));
    } else if (i < end) {
      sum = hn::Add(sum, load_n(d, x + i, end - i));
    }
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
    block = end;
  }
  return total;
}
template <class T>
void sums_of_runs(const void* x, std::int64_t runs, std::int64_t length, float* sums) {
  for (std::int64_t r = 0; r < runs; ++r) {
    const T* run = static_cast<const T*>(x) + r * length;
    const std::int64_t more = (runs - 1 - r) * length;
    sums[r] = static_cast<float>(sum_of_run(run, static_cast<std::size_t>(length), static_cast<std::size_t>(more)));
  }
}

}  // namespace

std::int64_t gather_lanes() { return static_cast<std::int64_t>(hn::Lanes(F32Tag())); }

void gather_line(const GatherLine& g) {
  visit_image_dtypes(g.from_dtype, g.to_dtype, [&](auto from, auto to) { line_of<decltype(from), decltype(to)>(g); });
}

void plane_sums(DType dtype, const void* x, std::int64_t planes, std::int64_t length, float* sums) {
  if (dtype == DType::f16) return sums_of_runs<Half>(x, planes, length, sums);
  if (dtype == DType::bf16) return sums_of_runs<BFloat16>(x, planes, length, sums);
  sums_of_runs<float>(x, planes, length, sums);
}

void gather_row(const GatherRow& g) {
  visit_image_dtypes(g.x->dtype, g.y->dtype, [&](auto from, auto to) { row_of<decltype(from), decltype(to)>(g); });
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
HWY_EXPORT(gather_line);
HWY_EXPORT(gather_lanes);
HWY_EXPORT(plane_sums);

ColumnTaps::ColumnTaps(const Taps& taps, std::int64_t most_taps, std::int64_t lanes) : most(most_taps) {
  const std::int64_t vectors = (taps.size + lanes - 1) / lanes;
  heads.resize(static_cast<std::size_t>(vectors * most));
  weights.assign(static_cast<std::size_t>(vectors * most * lanes), 0.0f);
  places.assign(weights.size(), 0);
  for (std::int64_t v = 0; v < vectors; ++v) {
    for (std::int64_t k = 0; k < most; ++k) {
      const std::int64_t at = v * most + k;
      float* weight = weights.data() + at * lanes;
      std::int32_t* place = places.data() + at * lanes;
      std::int32_t low = INT32_MAX, high = 0;
      const std::int64_t count = std::min(lanes, taps.size - v * lanes);
      for (std::int64_t i = 0; i < count; ++i) {
        const Tap* tap = taps.begin(v * lanes + i) + k;
        if (tap >= taps.end(v * lanes + i)) continue;
        weight[i] = static_cast<float>(tap->weight);
        place[i] = static_cast<std::int32_t>(tap->at);
        low = std::min(low, place[i]);
        high = std::max(high, place[i]);
      }
      Head& head = heads[static_cast<std::size_t>(at)];
      head = {.base = 0, .reach = anywhere};
      if (high - low >= 2 * lanes) continue;
      if (low <= high) head.base = low;
      head.reach = high - low < lanes ? one_vector : two_vectors;
      for (std::int64_t i = 0; i < lanes; ++i) place[i] = std::max(place[i] - head.base, 0);
    }
  }
}

namespace {

// Whether all of a source's n places go into one place, as they are.
bool takes_all(const Taps& taps, std::int64_t n) {
  if (taps.size != 1 || taps.first[1] != n) return false;
  for (std::int64_t i = 0; i < n; ++i) {
    if (taps.taps[i].at != i || taps.taps[i].weight != 1) return false;
  }
  return true;
}
// Whether all places are one place of the source with one weight.
bool all_alike(const Taps& taps) {
  for (std::int64_t i = 0; i < taps.size; ++i) {
    if (taps.first[i + 1] != i + 1 || taps.taps[i].at != 0 || taps.taps[i].weight != taps.taps[0].weight) return false;
  }
  return taps.size > 0;
}
constexpr std::int64_t kPlanes = 256;

// Means of whole planes.
void average_planes(const TensorView& x, TensorView y, float divisor) {
  const std::int64_t length = x.sizes[2] * x.sizes[3];
  parallel_for(y.numel, row_grain(length), [&](std::int64_t begin, std::int64_t end) {
    float sums[kPlanes];
    for (std::int64_t at = begin; at < end; at += kPlanes) {
      const std::int64_t count = std::min(kPlanes, end - at);
      HWY_DYNAMIC_DISPATCH(plane_sums)
      (x.dtype, element(x.dtype, static_cast<const void*>(x.data), at * length), count, length, sums);
      if (divisor != 1) {
        for (std::int64_t i = 0; i < count; ++i) sums[i] /= divisor;
      }
      write_row(y, at, 1, count, sums);
    }
  });
}
// And the reverse: a number for each whole plane.
void fill_planes(const TensorView& x, const TensorView& y, float row, float column, float divisor) {
  const std::int64_t length = y.sizes[2] * y.sizes[3];
  visit_floating(y.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(x.numel, row_grain(length), [&](std::int64_t begin, std::int64_t end) {
      float values[kPlanes];
      for (std::int64_t at = begin; at < end; at += kPlanes) {
        const std::int64_t count = std::min(kPlanes, end - at);
        read_row(x, at, 1, count, values);
        for (std::int64_t i = 0; i < count; ++i) {
          const T value = convert<T>(row * (column * values[i]) / divisor);
          std::fill_n(static_cast<T*>(y.data) + (at + i) * length, length, value);
        }
      }
    });
  });
}

// Rows of channels whose columns lie side by side. A row that is made of the same rows as the one before is a copy of
// it.
void gather_lines(const TensorView& x, const TensorView& y, const Taps& rows, const Taps& columns,
                  const Divisors& divisors) {
  constexpr std::int64_t kMostTaps = 8;
  const ImageStrides from(x), to(y);
  const std::int64_t height = y.sizes[2], channels = y.sizes[1], width = x.sizes[3],
                     lanes = HWY_DYNAMIC_DISPATCH(gather_lanes)();
  const std::int64_t most = std::max<std::int64_t>(most_taps(columns), 1);
  const bool vectors = most <= kMostTaps && width < INT32_MAX / 2;
  const ColumnTaps taps = vectors ? ColumnTaps(columns, most, lanes) : ColumnTaps({}, 0, lanes);
  const auto divisor_of = [&](std::int64_t row) {
    return divisors.rows ? divisors.all * divisors.rows[row] : divisors.all;
  };
  std::vector<char> repeated(static_cast<std::size_t>(height), 0);
  for (std::int64_t h = 1; h < height; ++h) {
    const auto same = [](const Tap& a, const Tap& b) { return a.at == b.at && a.weight == b.weight; };
    repeated[static_cast<std::size_t>(h)] =
        divisor_of(h) == divisor_of(h - 1) &&
        std::equal(rows.begin(h), rows.end(h), rows.begin(h - 1), rows.end(h - 1), same);
  }
  const std::size_t row_bytes = static_cast<std::size_t>(y.sizes[3]) * static_cast<std::size_t>(item_size(y.dtype));
  const std::int64_t work = (width + y.sizes[3]) * std::max<std::int64_t>(most_taps(rows), 1);
  parallel_for(y.sizes[0] * channels * height, row_grain(work), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch(static_cast<std::size_t>(width + y.sizes[3] + 3 * lanes));
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t h = i % height, plane = i / height, n = plane / channels, c = plane % channels;
      void* row = element(y.dtype, y.data, to.at(n, c, h, 0));
      if (i > begin && repeated[static_cast<std::size_t>(h)]) {
        std::memcpy(row, element(y.dtype, y.data, to.at(n, c, h - 1, 0)), row_bytes);
        continue;
      }
      HWY_DYNAMIC_DISPATCH(gather_line)
      ({.from_dtype = x.dtype,
        .to_dtype = y.dtype,
        .x = element(x.dtype, static_cast<const void*>(x.data), from.at(n, c, 0, 0)),
        .y = row,
        .row_step = from.h,
        .width = width,
        .columns = &columns,
        .vectors = vectors ? &taps : nullptr,
        .rows = rows.begin(h),
        .rows_end = rows.end(h),
        .divisors = divisors.columns,
        .divisor = divisor_of(h),
        .line = scratch.data(),
        .result = scratch.data() + width + 2 * lanes});
    }
  });
}

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
  const bool all_to_one = takes_all(rows, x.sizes[2]) && takes_all(columns, x.sizes[3]);
  const bool one_to_all = !divisors.rows && !divisors.columns && x.sizes[2] == 1 && x.sizes[3] == 1 &&
                          all_alike(rows) && all_alike(columns);
  const auto all = static_cast<float>(divisor_of(0) * (divisors.columns ? divisors.columns[0] : 1));
  if (known && channels_side_by_side(x, y)) {
    if (all_to_one) return mean_of_images(x, y, all);
    if (one_to_all) {
      return spread_over_images(x, y, static_cast<float>(rows.taps->weight), static_cast<float>(columns.taps->weight),
                                all);
    }
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
  if (known && x.contiguous && y.contiguous) {
    if (all_to_one) return average_planes(x, y, all);
    if (one_to_all) {
      return fill_planes(x, y, static_cast<float>(rows.taps->weight), static_cast<float>(columns.taps->weight), all);
    }
  }
  if (known && x.numel > 0 && (from.w == 1 || x.sizes[3] == 1) && (to.w == 1 || y.sizes[3] == 1)) {
    return gather_lines(x, y, rows, columns, divisors);
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
