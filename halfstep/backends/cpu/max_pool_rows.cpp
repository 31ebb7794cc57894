// SPDX-License-Identifier: Apache-2.0
// The index of a value is its number in its window, row by row of the widest window: of equal values, -0 and 0 among
// them, the first one's, of several NaN the last one's.
//
// Rows of the image become integers in the order of their values once, in a buffer that the windows then read: integers
// of 16 bits compare as 16-bit floats do that would have to be widened for each window.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/max_pool_rows.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <hwy/cache_control.h>
#include <limits>

#include "halfstep/backends/cpu/image_rows.h"
#include "halfstep/backends/cpu/max_pool_rows.h"
#include "halfstep/backends/cpu/max_pool_taps-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_MAX_POOL_ROWS_JOB_
#define HALFSTEP_BACKENDS_CPU_MAX_POOL_ROWS_JOB_
namespace halfstep::cpu {
/// Some rows of the result of one image, of some channels.
struct MaxRows {
  DType dtype, index_dtype;
  const void* x;  ///< row 0 of the image
  void *y, *index;
  std::int64_t x_row, x_column, y_row, y_column, index_row, index_column;  ///< steps in elements
  const Taps *rows, *columns;
  std::int64_t first, end;  ///< rows of the result
  std::int64_t image_width;
  std::int64_t width;  ///< of the widest window
  std::size_t channels;
  std::int64_t slots = 0;  ///< rows of the image that keys have room for, at least those of any window
  void* keys = nullptr;
  std::int64_t* held = nullptr;  ///< for each slot: twice the row that is there, and 1 if it has special values
};
inline constexpr std::int64_t kByteNumbers = 256;  ///< places of a window, at most, where numbers are bytes
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

/// Integers in the order of floats: the bits, of negative numbers turned around, so that -0 is -1. The reverse is the
/// same.
template <class T>
struct MaxKeys {
  using Lane = std::conditional_t<sizeof(T) == 2, std::int16_t, std::int32_t>;
  static constexpr int kBits = 8 * sizeof(T);
  static constexpr std::int64_t kInfinity = std::is_same_v<T, Half>       ? 0x7c00
                                            : std::is_same_v<T, BFloat16> ? 0x7f80
                                                                          : 0x7f800000;
  static constexpr Lane kLeast = std::numeric_limits<Lane>::min();
  static constexpr std::int64_t kShift = kInfinity + kLeast;
  template <class D>
  static HWY_INLINE hn::Vec<D> set(D d, std::int64_t v) {
    return hn::Set(d, static_cast<Lane>(v));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> turned(D d, hn::Vec<D> v) {
    return hn::Xor(v, hn::And(hn::ShiftRight<kBits - 1>(v), hn::Set(d, std::numeric_limits<Lane>::max())));
  }
};

/// The keys of n >= 4 elements; whether there is -0, which is equal to 0, or NaN.
template <class T>
HWY_INLINE bool keys_of(const T* x, std::size_t n, typename MaxKeys<T>::Lane* to) {
  using Keys = MaxKeys<T>;
  const auto* from = reinterpret_cast<const typename Keys::Lane*>(x);
  bool special = false;
  with_lanes_for<typename Keys::Lane>(n, [&](auto d) HWY_ATTR {
    const std::size_t lanes = hn::Lanes(d);
    auto least = hn::Zero(d), low = least, high = least;
    const auto one = [&](std::size_t i) HWY_ATTR {
      const auto v = hn::LoadU(d, from + i);
      const auto key = Keys::turned(d, v);
      least = hn::Min(least, v);
      low = hn::Min(low, key);
      high = hn::Max(high, key);
      hn::StoreU(key, d, to + i);
    };
    std::size_t i = 0;
    for (; i + lanes <= n; i += lanes) one(i);
    if (i < n) one(n - lanes);
    const auto nan = hn::Or(hn::Gt(high, Keys::set(d, Keys::kInfinity)), hn::Lt(low, Keys::set(d, ~Keys::kInfinity)));
    special = !hn::AllFalse(d, hn::Or(nan, hn::Eq(least, hn::Set(d, Keys::kLeast))));
  });
  return special;
}

/// What windows read: keys of numbers, keys of numbers with -0 or NaN among them, or the elements themselves.
enum class MaxOf : std::uint8_t { plain_keys, all_keys, elements };

/// The best key so far and its number. With -0 and NaN, -0 is 0, and all are shifted until -infinity is the least one
/// and NaN of either sign are above infinity. Elements in float32 are compared as they are.
template <MaxOf kOf, class T, class D>
struct MaxSoFar {
  using Keys = MaxKeys<T>;
  static constexpr bool kFloats = kOf == MaxOf::elements && sizeof(T) == 4;
  hn::Vec<D> best, number, limit;  // what lies above the limit is better: the best one or infinity

  HWY_INLINE void begin(std::int64_t first) {
    const D d;
    best = Keys::set(d, kFloats ? Keys::kInfinity + Keys::kLeast : ~Keys::kInfinity);
    number = Keys::set(d, first);
    limit = hn::Set(d, Keys::kLeast);
  }
  HWY_INLINE void add(hn::Vec<D> key, hn::Vec<D> here) {
    const D d;
    if constexpr (kFloats) {
      const hn::RebindToFloat<D> df;
      const auto v = hn::BitCast(df, key);
      const auto better = hn::RebindMask(d, hn::Or(hn::Gt(v, hn::BitCast(df, best)), hn::IsNaN(v)));
      best = hn::IfThenElse(better, key, best);
      number = hn::IfThenElse(better, here, number);
    } else if constexpr (kOf != MaxOf::plain_keys) {
      if constexpr (kOf == MaxOf::elements) key = Keys::turned(d, key);
      const auto shifted = hn::Add(hn::Sub(key, hn::ShiftRight<Keys::kBits - 1>(key)), Keys::set(d, Keys::kShift));
      const auto better = hn::Gt(shifted, limit);
      best = hn::IfThenElse(better, key, best);
      number = hn::IfThenElse(better, here, number);
      limit = hn::Min(hn::Max(shifted, limit), Keys::set(d, Keys::kInfinity + Keys::kShift));
    } else {
      number = hn::IfThenElse(hn::Gt(key, best), here, number);
      best = hn::Max(key, best);
    }
  }
  HWY_INLINE void write(T* to, std::uint8_t* index) const {
    const D d;
    auto v = kFloats ? best : Keys::turned(d, best);
    if constexpr (kOf != MaxOf::plain_keys && sizeof(T) == 2) {
      // NaN becomes quiet, as everywhere where 16 bits go through float32.
      const auto nan = hn::Gt(hn::And(v, hn::Set(d, INT16_MAX)), Keys::set(d, Keys::kInfinity));
      v = hn::IfThenElse(nan, hn::Or(v, Keys::set(d, std::is_same_v<T, Half> ? 0x200 : 0x40)), v);
    }
    hn::StoreU(v, d, reinterpret_cast<typename Keys::Lane*>(to));
    store_numbers(number, d, index);
  }
};

/// A window of one channel: lines of keys, the first place in each and the step to the next one.
template <class L>
struct MaxWindow {
  const L* const* lines;
  std::int64_t height, first = 0, step = 0, width = 0;
  std::int64_t number = 0, line_numbers = 0;  ///< of the first place, and from one line to the next
};

// K vectors of channels of one place.
template <int K, MaxOf kOf, class D, class T>
HWY_INLINE void choose_maxima(D d, const MaxWindow<hn::TFromD<D>>& m, std::size_t c, T* to, std::uint8_t* index) {
  using Keys = MaxKeys<T>;
  MaxSoFar<kOf, T, D> most[K];
  for (int k = 0; k < K; ++k) most[k].begin(m.number);
  auto first = Keys::set(d, m.number);
  const auto next_line = Keys::set(d, m.line_numbers), one = Keys::set(d, 1);
  const std::int64_t step = m.step;
  for (std::int64_t r = 0; r < m.height; ++r) {
    const hn::TFromD<D>* p = m.lines[r] + m.first + c;
    auto here = first;
    for (std::int64_t i = m.width; i > 0; --i, p += step) {
      for (int k = 0; k < K; ++k) most[k].add(hn::LoadU(d, p + static_cast<std::size_t>(k) * hn::Lanes(d)), here);
      here = hn::Add(here, one);
    }
    first = hn::Add(first, next_line);
  }
  for (int k = 0; k < K; ++k) {
    const std::size_t i = c + static_cast<std::size_t>(k) * hn::Lanes(d);
    most[k].write(to + i, index + i);
  }
}

template <MaxOf kOf, class T>
void choose_row(const MaxRows& m, std::int64_t h, const typename MaxKeys<T>::Lane* const* lines) {
  using L = typename MaxKeys<T>::Lane;
  with_lanes_for<L>(m.channels, [&](auto d) HWY_ATTR {
    const std::int64_t step = kOf == MaxOf::elements ? m.x_column : static_cast<std::int64_t>(m.channels);
    const Tap* row = m.rows->begin(h);
    // Rows of the image that the next row of the result reads first are fetched meanwhile, or memory would be idle:
    // 3x3/2 of 16 x 64 x 112x112 in bf16, two threads of a Zen 4: 1.30 to 0.91 ms.
    const bool more = h + 1 < m.end && row != m.rows->end(h) && m.rows->begin(h + 1) != m.rows->end(h + 1);
    const std::int64_t ahead = more ? m.rows->end(h)[-1].at + 1 : 0,
                       ahead_end = more ? m.rows->end(h + 1)[-1].at + 1 : 0;
    std::int64_t share = 0;
    const T* next = static_cast<const T*>(m.x);
    T* to = static_cast<T*>(m.y) + h * m.y_row;
    std::uint8_t* index = static_cast<std::uint8_t*>(m.index) + h * m.index_row;
    const std::int64_t height = m.rows->end(h) - row;
    MaxWindow<L> window = {.lines = lines, .height = height, .line_numbers = m.width};
    for (std::int64_t w = 0; w < m.columns->size; ++w, to += m.y_column, index += m.index_column) {
      for (share += m.image_width; share >= m.columns->size; share -= m.columns->size, next += m.x_column) {
        for (std::int64_t i = ahead; i < ahead_end; ++i) {
          const T* place = next + i * m.x_row;
          for (std::size_t c = 0; c < m.channels; c += 64 / sizeof(T)) hwy::Prefetch(place + c);
        }
      }
      // A window's places have numbers that follow each other, and one distance.
      const Tap *column = m.columns->begin(w), *columns_end = m.columns->end(w);
      window.width = columns_end - column;
      window.number = 0;
      if (height > 0 && window.width > 0) {
        window.first = column->at * step;
        window.step = window.width > 1 ? (column[1].at - column->at) * step : 0;
        window.number = row->number * m.width + column->number;
      }
      each_few_vectors(d, m.channels,
                       [&](auto k, std::size_t c) HWY_ATTR { choose_maxima<k, kOf>(d, window, c, to, index); });
    }
  });
}

template <class T>
void choose_rows(const MaxRows& m) {
  using L = typename MaxKeys<T>::Lane;
  const auto size = static_cast<std::int64_t>(m.channels) * m.image_width;
  if (m.keys) std::fill_n(m.held, m.slots, std::int64_t{-1});
  const L* lines[kByteNumbers];
  for (std::int64_t h = m.first; h < m.end; ++h) {
    if (!m.keys) {
      for (const Tap* r = m.rows->begin(h); r != m.rows->end(h); ++r) {
        lines[r - m.rows->begin(h)] = static_cast<const L*>(m.x) + r->at * m.x_row;
      }
      choose_row<MaxOf::elements, T>(m, h, lines);
      continue;
    }
    std::int64_t special = 0;
    for (const Tap* r = m.rows->begin(h); r != m.rows->end(h); ++r) {
      const std::int64_t slot = r->at % m.slots;
      L* line = static_cast<L*>(m.keys) + slot * size;
      if (m.held[slot] >> 1 != r->at) {
        const T* x = static_cast<const T*>(m.x) + r->at * m.x_row;
        bool found = false;
        if (m.x_column == static_cast<std::int64_t>(m.channels)) {
          found = keys_of(x, static_cast<std::size_t>(size), line);
        } else {
          L* to = line;
          for (std::int64_t w = 0; w < m.image_width; ++w, x += m.x_column, to += m.channels) {
            found |= keys_of(x, m.channels, to);
          }
        }
        m.held[slot] = 2 * r->at + (found ? 1 : 0);
      }
      special |= m.held[slot] & 1;
      lines[r - m.rows->begin(h)] = line;
    }
    special ? choose_row<MaxOf::all_keys, T>(m, h, lines) : choose_row<MaxOf::plain_keys, T>(m, h, lines);
  }
}

// The same without keys, in float32, for windows of more places than bytes can number: K vectors of channels.
template <int K, class T, class D>
HWY_INLINE void choose_of_many(D d, const MaxRows& m, std::int64_t h, const Tap* columns, const Tap* columns_end,
                               std::size_t c, T* to, std::int32_t* index) {
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  const hn::RebindToSigned<D> di;
  const Tap *row = m.rows->begin(h), *rows_end = m.rows->end(h);
  const bool none = row == rows_end || columns == columns_end;
  const auto first = none ? 0 : static_cast<std::int32_t>(row->number * m.width + columns->number);
  hn::Vec<D> best[K];
  hn::Vec<decltype(di)> number[K];
  for (int k = 0; k < K; ++k) {
    best[k] = hn::Set(d, -std::numeric_limits<float>::infinity());
    number[k] = hn::Set(di, first);
  }
  for (; row != rows_end; ++row) {
    const T* line = static_cast<const T*>(m.x) + row->at * m.x_row + c;
    for (const Tap* column = columns; column != columns_end; ++column) {
      const T* place = line + column->at * m.x_column;
      const auto here = hn::Set(di, static_cast<std::int32_t>(row->number * m.width + column->number));
      for (int k = 0; k < K; ++k) {
        const auto v = load(d, place + static_cast<std::size_t>(k) * kLanes);
        const auto better = hn::Or(hn::Gt(v, best[k]), hn::IsNaN(v));
        best[k] = hn::IfThenElse(better, v, best[k]);
        number[k] = hn::IfThenElse(hn::RebindMask(di, better), here, number[k]);
      }
    }
  }
  for (int k = 0; k < K; ++k) {
    const std::size_t i = c + static_cast<std::size_t>(k) * kLanes;
    store(best[k], d, to + i);
    store_numbers(number[k], di, index + i);
  }
}
template <class T>
void choose_large_rows(const MaxRows& m) {
  with_lanes_for<float>(m.channels, [&](auto d) HWY_ATTR {
    for (std::int64_t h = m.first; h < m.end; ++h) {
      T* to = static_cast<T*>(m.y) + h * m.y_row;
      auto* index = static_cast<std::int32_t*>(m.index) + h * m.index_row;
      for (std::int64_t w = 0; w < m.columns->size; ++w, to += m.y_column, index += m.index_column) {
        const Tap *columns = m.columns->begin(w), *columns_end = m.columns->end(w);
        each_few_vectors(d, m.channels, [&](auto k, std::size_t c) HWY_ATTR {
          choose_of_many<k>(d, m, h, columns, columns_end, c, to, index);
        });
      }
    }
  });
}

template <class T>
void max_rows_of(const MaxRows& m) {
  m.index_dtype == DType::u8 ? choose_rows<T>(m) : choose_large_rows<T>(m);
}

}  // namespace

void max_rows(const MaxRows& m) {
  if (m.dtype == DType::f16) return max_rows_of<Half>(m);
  if (m.dtype == DType::bf16) return max_rows_of<BFloat16>(m);
  max_rows_of<float>(m);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/round_up.h"

namespace halfstep::cpu {
HWY_EXPORT(max_rows);

bool max_pools_by_rows(const TensorView& from, const TensorView& to, const TensorView& index) {
  return from.dtype != DType::f64 && (to.dtype == from.dtype || to.dtype == DType::f32) &&
         channels_side_by_side(from, to, index);
}

bool max_pool_rows(KernelContext* context, const TensorView& x, const TensorView& y, const TensorView& index,
                   const MaxWindows& windows) {
  constexpr std::int64_t kKeyBytes = 32768;  // of a block of channels: in the first-level cache, if there are enough
  constexpr std::int64_t kFewest = 64;       // channels, then: whole lines of the cache
  const Taps &rows = windows.rows, &columns = windows.columns;
  const ImageStrides from(x), to(y), at(index);
  const std::int64_t images = y.sizes[0], channels = y.sizes[1], height = y.sizes[2];
  const std::int64_t item = static_cast<std::int64_t>(item_size(x.dtype));
  // Where windows overlap enough that keys are worth their pass: once and a half in 16 bits. Float32 needs no widening.
  const double taps = static_cast<double>(rows.first[rows.size]) * static_cast<double>(columns.first[columns.size]);
  const double overlap = taps / static_cast<double>(x.sizes[2] * x.sizes[3]);
  const bool keys = index.dtype == DType::u8 && overlap >= (x.dtype == DType::f32 ? 4 : 1.5);
  std::int64_t slots = 1;
  for (std::int64_t h = 0; keys && h < height; ++h) {
    if (rows.begin(h) != rows.end(h)) slots = std::max(slots, rows.end(h)[-1].at - rows.begin(h)->at + 1);
  }
  const std::int64_t work = std::max<std::int64_t>(1, most_taps(rows) * most_taps(columns)) * y.sizes[3];
  // Blocks of channels; the last one has 4 to width + 3.
  std::int64_t width = std::max(kKeyBytes / (slots * x.sizes[3] * item) / kFewest * kFewest, kFewest);
  if (images * height < 32) width = std::min(width, 2 * kFewest);
  const std::int64_t blocks = std::max<std::int64_t>(1, (channels + width - 4) / width);
  width = std::min(width, channels);
  // Rows of several jobs are made into keys by each of them.
  const std::int64_t wanted = (4 * num_threads() + images * blocks - 1) / (images * blocks);
  const std::int64_t rows_of_job = std::clamp(row_grain(work * width), (height + wanted - 1) / wanted, height);
  const std::int64_t parts = (height + rows_of_job - 1) / rows_of_job;
  const std::int64_t jobs = images * blocks * parts;
  const std::int64_t workers =
      std::clamp<std::int64_t>(images * height * channels * work / kReduceGrain, 1, num_workers(jobs));
  const std::int64_t size = round_up(slots * x.sizes[3] * (width + 3) * item, std::int64_t{64});
  const std::int64_t bytes = size + round_up(slots * 8, std::int64_t{64});
  char* memory = nullptr;
  if (keys) {
    memory = static_cast<char*>(context->workspace(context, static_cast<std::uint64_t>(workers * bytes)));
    if (!memory) return false;
  }
  parallel_jobs(jobs, workers, [&](std::int64_t job, std::int64_t worker) {
    const std::int64_t part = job % parts, block = job / parts % blocks, n = job / parts / blocks, c = block * width;
    char* room = memory ? memory + worker * bytes : nullptr;
    HWY_DYNAMIC_DISPATCH(max_rows)
    ({.dtype = x.dtype,
      .index_dtype = index.dtype,
      .x = element(x.dtype, static_cast<const void*>(x.data), n * from.n + c),
      .y = element(y.dtype, y.data, n * to.n + c),
      .index = element(index.dtype, index.data, n * at.n + c),
      .x_row = from.h,
      .x_column = from.w,
      .y_row = to.h,
      .y_column = to.w,
      .index_row = at.h,
      .index_column = at.w,
      .rows = &rows,
      .columns = &columns,
      .first = part * rows_of_job,
      .end = std::min(height, (part + 1) * rows_of_job),
      .image_width = x.sizes[3],
      .width = windows.width,
      .channels = static_cast<std::size_t>(block + 1 < blocks ? width : channels - c),
      .slots = slots,
      .keys = room,
      .held = reinterpret_cast<std::int64_t*>(room ? room + size : nullptr)});
  });
  return true;
}

}  // namespace halfstep::cpu
#endif
