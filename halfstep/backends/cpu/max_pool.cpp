// SPDX-License-Identifier: Apache-2.0
// max_pool2d and adaptive_max_pool2d, their backward passes and the gradients of these.
//
// The index of a value is its number in its window, row by row of the widest window. Images whose channels lie side by
// side are pooled by max_pool_rows.h; of others, a thread has a channel to itself in the backward pass.
#include <cmath>
#include <limits>

#include "halfstep/backends/cpu/image_order.h"
#include "halfstep/backends/cpu/image_rows.h"
#include "halfstep/backends/cpu/max_pool_rows.h"
#include "halfstep/backends/cpu/row_block.h"

namespace halfstep::cpu {
namespace {

// The windows of an image of height h and width w.
bool windows_of(KernelContext* context, const PoolAttributes& a, std::int64_t h, std::int64_t w, const TensorView& y,
                MaxWindows& to) {
  to.height = a.kernel[0];
  to.width = a.kernel[1];
  return window_taps(context, a, 0, h, y.sizes[2], to.rows) && window_taps(context, a, 1, w, y.sizes[3], to.columns);
}
bool windows_of(KernelContext* context, const AdaptivePoolAttributes&, std::int64_t h, std::int64_t w,
                const TensorView& y, MaxWindows& to) {
  if (!adaptive_taps(context, h, y.sizes[2], to.rows) || !adaptive_taps(context, w, y.sizes[3], to.columns)) {
    return false;
  }
  to.height = most_taps(to.rows);
  to.width = most_taps(to.columns);
  return true;
}

template <class F>
void visit_index(const TensorView& index, F&& f) {
  index.dtype == DType::u8 ? f(std::uint8_t{}) : f(std::int32_t{});
}

// f(C, x, index) with what x is computed in, and with pointers to x's and the index's elements.
template <class F>
void visit_pair(const TensorView& x, const TensorView& index, F&& f) {
  visit_floating(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    visit_index(index, [&](auto zero) { f(ComputeOf<T>{}, elements<T>(x), elements<decltype(zero)>(index)); });
  });
}

template <class A>
Status forward(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const TensorView &x = in[0], &y = out[0], &index = out[1];
  if (y.numel == 0) return Status::ok;
  if (reorders_images({in, 1}, {out, 2})) return run_channels_last(context, forward<A>, {in, 1}, {out, 2}, p);
  MaxWindows windows;
  if (!windows_of(context, *static_cast<const A*>(p), x.sizes[2], x.sizes[3], y, windows)) return Status::out_of_memory;
  const Taps &rows = windows.rows, &columns = windows.columns;
  const ImageStrides from(x), to(y), at(index);
  const std::int64_t work = most_taps(rows) * most_taps(columns);
  if (y.dtype == x.dtype && max_pools_by_rows(x, y, index)) {
    return max_pool_rows(context, x, y, index, windows) ? Status::ok : Status::out_of_memory;
  }
  visit_pair(x, index, [&](auto zero, auto* image, auto* numbers) {
    using C = decltype(zero);
    using T = std::remove_pointer_t<decltype(image)>;
    using I = std::remove_pointer_t<decltype(numbers)>;
    for_plane_rows(y, work * 4, [&](std::int64_t n, std::int64_t c, std::int64_t h) {
      const T* plane = image + from.at(n, c, 0, 0);
      for (std::int64_t w = 0; w < columns.size; ++w) {
        C best = -std::numeric_limits<C>::infinity();
        const bool none = rows.begin(h) == rows.end(h) || columns.begin(w) == columns.end(w);
        std::int64_t number = none ? 0 : rows.begin(h)->number * windows.width + columns.begin(w)->number;
        for (const Tap* r = rows.begin(h); r != rows.end(h); ++r) {
          for (const Tap* k = columns.begin(w); k != columns.end(w); ++k) {
            const C v = convert<C>(plane[r->at * from.h + k->at * from.w]);
            if (v > best || std::isnan(v)) {
              best = v;
              number = r->number * windows.width + k->number;
            }
          }
        }
        static_cast<T*>(y.data)[to.at(n, c, h, w)] = convert<T>(best);
        numbers[at.at(n, c, h, w)] = static_cast<I>(number);
      }
    });
  });
  return Status::ok;
}

// The place with a number in window i, or -1: there is none for a window without places.
std::int64_t place_of(const Taps& taps, std::int64_t i, std::int64_t number) {
  if (taps.begin(i) == taps.end(i)) return -1;
  // A window's places have numbers that follow each other.
  return taps.begin(i)[number - taps.begin(i)->number].at;
}

// The row and the column of each number of a window: in a table where it is small, since a division for each element
// would take longer than all else.
struct Numbers {
  std::int64_t width = 1;
  std::int32_t *rows = nullptr, *columns = nullptr;
  std::int64_t row(std::int64_t number) const { return rows ? rows[number] : number / width; }
  std::int64_t column(std::int64_t number) const { return rows ? columns[number] : number % width; }
};
bool numbers_of(KernelContext* context, const MaxWindows& windows, Numbers& to) {
  constexpr std::int64_t kMost = 4096;
  to.width = windows.width;
  if (windows.height > kMost / windows.width) return true;
  const std::int64_t count = windows.height * windows.width;
  to.rows = static_cast<std::int32_t*>(
      context->workspace(context, static_cast<std::size_t>(2 * count) * sizeof(std::int32_t)));
  if (!to.rows) return false;
  to.columns = to.rows + count;
  for (std::int64_t i = 0; i < count; ++i) {
    to.rows[i] = static_cast<std::int32_t>(i / windows.width);
    to.columns[i] = static_cast<std::int32_t>(i % windows.width);
  }
  return true;
}

// The backward pass channel by channel, each by one thread, which adds to where the index says. 16 bits add up in a
// plane of float32.
template <class C, class T, class I>
bool scatter_planes(KernelContext* context, const TensorView& g, const TensorView& index, TensorView& dx,
                    const MaxWindows& windows) {
  const ImageStrides from(g), to(dx), at(index);
  const std::int64_t channels = dx.sizes[1], planes = dx.sizes[0] * channels, h = dx.sizes[2], w = dx.sizes[3];
  const std::int64_t work = h * w + 4 * g.sizes[2] * g.sizes[3];
  const std::int64_t workers =
      std::clamp<std::int64_t>(planes * work / kReduceGrain, 1, std::min<std::int64_t>(planes, num_threads()));
  const bool direct = dx.dtype == (std::is_same_v<C, double> ? DType::f64 : DType::f32);
  C* memory = nullptr;
  Numbers numbers;
  if (!numbers_of(context, windows, numbers)) return false;
  if (!direct) {
    memory = static_cast<C*>(context->workspace(context, static_cast<std::size_t>(workers * h * w) * sizeof(C)));
    if (!memory) return false;
  }
  parallel_for(workers, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) {
      for (std::int64_t plane = worker; plane < planes; plane += workers) {
        const std::int64_t n = plane / channels, c = plane % channels;
        C* sums = direct ? elements<C>(dx) + to.at(n, c, 0, 0) : memory + worker * h * w;
        const std::int64_t row_step = direct ? to.h : w, column_step = direct ? to.w : 1;
        for (std::int64_t i = 0; i < h; ++i) {
          for (std::int64_t j = 0; j < w; ++j) sums[i * row_step + j * column_step] = 0;
        }
        const T* gradient = elements<T>(g) + from.at(n, c, 0, 0);
        const I* chosen = elements<I>(index) + at.at(n, c, 0, 0);
        for (std::int64_t i = 0; i < g.sizes[2]; ++i) {
          for (std::int64_t j = 0; j < g.sizes[3]; ++j) {
            const I number = chosen[i * at.h + j * at.w];
            const std::int64_t row = place_of(windows.rows, i, numbers.row(number));
            const std::int64_t column = place_of(windows.columns, j, numbers.column(number));
            if (row < 0 || column < 0) continue;
            sums[row * row_step + column * column_step] += convert<C>(gradient[i * from.h + j * from.w]);
          }
        }
        for (std::int64_t i = 0; !direct && i < h; ++i) write_row(dx, to.at(n, c, i, 0), to.w, w, sums + i * w);
      }
    }
  });
  return true;
}

// Inputs: g, index. Output: the image's gradient.
template <class A>
Status backward(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const TensorView &g = in[0], &index = in[1];
  TensorView& dx = out[0];
  if (dx.numel == 0) return Status::ok;
  if (reorders_images({in, 2}, {out, 1})) return run_channels_last(context, backward<A>, {in, 2}, {out, 1}, p);
  MaxWindows windows;
  if (!windows_of(context, *static_cast<const A*>(p), dx.sizes[2], dx.sizes[3], g, windows)) {
    return Status::out_of_memory;
  }
  if (max_pools_by_rows(g, dx, index)) {
    Taps rows, columns;
    if (!reversed_taps(context, windows.rows, dx.sizes[2], rows) ||
        !reversed_taps(context, windows.columns, dx.sizes[3], columns)) {
      return Status::out_of_memory;
    }
    return max_pool_backward_rows(context, g, index, dx, rows, columns, windows.width) ? Status::ok
                                                                                       : Status::out_of_memory;
  }
  bool ok = true;
  visit_pair(g, index, [&](auto zero, auto* gradient, auto* numbers) {
    using T = std::remove_pointer_t<decltype(gradient)>;
    using I = std::remove_pointer_t<decltype(numbers)>;
    ok = scatter_planes<decltype(zero), T, I>(context, g, index, dx, windows);
  });
  return ok ? Status::ok : Status::out_of_memory;
}

// Inputs: an image, index. Output: the image's values at the index.
template <class A>
Status pick(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const TensorView &x = in[0], &index = in[1], &y = out[0];
  if (y.numel == 0) return Status::ok;
  MaxWindows windows;
  if (!windows_of(context, *static_cast<const A*>(p), x.sizes[2], x.sizes[3], y, windows)) return Status::out_of_memory;
  Numbers table;
  if (!numbers_of(context, windows, table)) return Status::out_of_memory;
  const ImageStrides from(x), to(y), at(index);
  visit_pair(x, index, [&](auto, auto* image, auto* numbers) {
    using T = std::remove_pointer_t<decltype(image)>;
    for_plane_rows(y, 16, [&](std::int64_t n, std::int64_t c, std::int64_t h) {
      for (std::int64_t w = 0; w < y.sizes[3]; ++w) {
        const auto number = numbers[at.at(n, c, h, w)];
        const std::int64_t row = place_of(windows.rows, h, table.row(number));
        const std::int64_t column = place_of(windows.columns, w, table.column(number));
        elements<T>(y)[to.at(n, c, h, w)] = row < 0 || column < 0 ? T{} : image[from.at(n, c, row, column)];
      }
    });
  });
  return Status::ok;
}

const RegisterCpuKernel max_pool_kernels[] = {
    {"max_pool2d", kFloatingDTypes, forward<PoolAttributes>},
    {"max_pool2d_backward", kFloatingDTypes, backward<PoolAttributes>},
    {"max_pool2d_pick", kFloatingDTypes, pick<PoolAttributes>},
    {"adaptive_max_pool2d", kFloatingDTypes, forward<AdaptivePoolAttributes>},
    {"adaptive_max_pool2d_backward", kFloatingDTypes, backward<AdaptivePoolAttributes>},
    {"adaptive_max_pool2d_pick", kFloatingDTypes, pick<AdaptivePoolAttributes>},
};

}  // namespace
}  // namespace halfstep::cpu
