// SPDX-License-Identifier: Apache-2.0
// max_pool2d and adaptive_max_pool2d, their backward passes and the gradients of these. Backward, each place of the
// image looks through the windows that it is in for those that chose it: no two threads write to one place.
#include "device/window.cuh"

namespace hscuda {
namespace {

template <class Access>
struct MaxPool {
  static constexpr int kWidth = Access::kWidth, kTogether = 4;
  using C = typename Access::C;
  Image x, y, index;
  Windows rows, columns;

  __device__ __forceinline__ void operator()(int64_t n, int64_t c, int h, int w) const {
    const Range r = rows.inside(h), k = columns.inside(w);
    C best[kWidth];
    int number[kWidth];
    const bool none = r.first >= r.end || k.first >= k.end;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      best[j] = -std::numeric_limits<C>::infinity();
      number[j] = none ? 0 : r.first * columns.widest + k.first;
    }
    for (int i = r.first; i < r.end; ++i) {
      const int64_t line = x.at(n, c, rows.start(h) + i * rows.step, columns.start(w));
      for (int l = k.first; l < k.end; l += kTogether) {
        typename Access::Raw raw[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          if (l + u < k.end) raw[u] = Access::fetch(x, line + static_cast<int64_t>(l + u) * columns.step * x.w);
        }
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          if (l + u >= k.end) continue;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const C v = Access::value(raw[u], j);
            if (v > best[j] || v != v) {
              best[j] = v;
              number[j] = i * columns.widest + l + u;
            }
          }
        }
      }
    }
    Access::store(y, y.at(n, c, h, w), best);
    store_numbers(index, index.at(n, c, h, w), number);
  }
};

/// What is read of a window of a place: what it has chosen, and its gradient.
template <class Access, class Number>
struct ReadWindow {
  static constexpr int kWidth = Access::kWidth;
  Pack<Number, kWidth> chosen;
  typename Access::Raw raw;

  __device__ __forceinline__ void read(const Image& g, int64_t g_at, const Image& index, int64_t index_at) {
    chosen = *reinterpret_cast<const Pack<Number, kWidth>*>(static_cast<const Number*>(index.data) + index_at);
    raw = Access::fetch(g, g_at);
  }
  /// Adds the gradient to the total of the place that is number `number` of the window.
  __device__ __forceinline__ void add(int number, typename Access::C (&total)[kWidth]) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (static_cast<int>(chosen.values[j]) == number) total[j] += Access::value(raw, j);
    }
  }
};

template <class Access, class Number>
struct MaxPoolBackward {
  static constexpr int kWidth = Access::kWidth;
  using C = typename Access::C;
  Image g, index, x_grad;
  Windows rows, columns;

  __device__ __forceinline__ void operator()(int64_t n, int64_t c, int h, int w) const {
    const Range r = rows.of_place(h), k = columns.of_place(w);
    C total[kWidth] = {};
    for (int i = r.first; i < r.end; ++i) {
      const int row = rows.number(i, h);
      if (row < 0) continue;
      for (int l = k.first; l < k.end; ++l) {
        const int column = columns.number(l, w);
        if (column < 0) continue;
        ReadWindow<Access, Number> window;
        window.read(g, g.at(n, c, i, l), index, index.at(n, c, i, l));
        window.add(row * columns.widest + column, total);
      }
    }
    Access::store(x_grad, x_grad.at(n, c, h, w), total);
  }
};

/// Where no place is in more than two by two windows, which are neither adaptive nor dilated: all four are read before
/// the first is looked at.
template <class Access, class Number>
struct MaxPoolBackwardOfFew {
  static constexpr int kWidth = Access::kWidth;
  using C = typename Access::C;
  Image g, index, x_grad;
  Windows rows, columns;

  static bool suits(const Windows& w) { return !w.adaptive && w.step == 1 && w.kernel <= 2 * int64_t{w.stride}; }

  __device__ __forceinline__ void operator()(int64_t n, int64_t c, int h, int w) const {
    const Range r = rows.of_place(h), k = columns.of_place(w);
    const int64_t g_at = g.at(n, c, r.first, k.first), index_at = index.at(n, c, r.first, k.first);
    // Of the first window. Strides may be as large as 2^30 where there is one window, which not all places are in.
    const int64_t row = h + rows.padding - int64_t{r.first} * rows.stride;
    const int64_t column = w + columns.padding - int64_t{k.first} * columns.stride;
    const int64_t number = row * columns.widest + column;
    ReadWindow<Access, Number> windows[2][2];
    bool has[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        has[i][l] = r.first + i < r.end && k.first + l < k.end;
        if (has[i][l]) windows[i][l].read(g, g_at + i * g.h + l * g.w, index, index_at + i * index.h + l * index.w);
      }
    }
    C total[kWidth] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        const int64_t before = i * (int64_t{rows.stride} * columns.widest) + l * int64_t{columns.stride};
        if (has[i][l]) windows[i][l].add(static_cast<int>(number - before), total);
      }
    }
    Access::store(x_grad, x_grad.at(n, c, h, w), total);
  }
};

template <class Access>
struct MaxPoolPick {
  static constexpr int kWidth = 1;
  using C = typename Access::C;
  Image x, index, y;
  Windows rows, columns;

  __device__ __forceinline__ void operator()(int64_t n, int64_t c, int h, int w) const {
    int number[1];
    load_numbers(index, index.at(n, c, h, w), number);
    const int row = rows.start(h) + number[0] / columns.widest * rows.step;
    const int column = columns.start(w) + number[0] % columns.widest * columns.step;
    C value[1] = {0};
    // A window that lies outside of the image has chosen nothing.
    if (row >= 0 && row < rows.size && column >= 0 && column < columns.size) {
      value[0] = Access::fetch(x, x.at(n, c, row, column)).value;
    }
    Access::store(y, y.at(n, c, h, w), value);
  }
};

constexpr const char* kTooLarge = "images and windows of 2^29 places or more are for the CPU";

template <class A>
halfstep_status forward(Call& call) {
  const auto& a = call.attributes<A>();
  const Tensor &x = call.in[0], &y = call.out[0], &index = call.out[1];
  if (y.numel == 0) return HALFSTEP_OK;
  if (!within_reach(a) || !within_reach(x) || !within_reach(y)) return call.refuse(kTooLarge);
  Windows rows, columns;
  windows_of(a, x.sizes, y.sizes, rows, columns, true);
  with_access(x, y, {&index}, [&](auto access) {
    for_each_place(call, y, MaxPool<decltype(access)>{Image(x), Image(y), Image(index), rows, columns});
  });
  return call.launched();
}

template <class Attributes>
halfstep_status backward(Call& call) {
  const auto& a = call.attributes<Attributes>();
  const Tensor &g = call.in[0], &index = call.in[1], &x_grad = call.out[0];
  if (x_grad.numel == 0) return HALFSTEP_OK;
  if (!within_reach(a) || !within_reach(x_grad) || !within_reach(g)) return call.refuse(kTooLarge);
  Windows rows, columns;
  windows_of(a, x_grad.sizes, g.sizes, rows, columns, true);
  with_access(g, x_grad, {&index}, [&](auto access) {
    using A = decltype(access);
    const auto with_numbers = [&](auto number) {
      using Few = MaxPoolBackwardOfFew<A, decltype(number)>;
      using Any = MaxPoolBackward<A, decltype(number)>;
      const Image images[] = {Image(g), Image(index), Image(x_grad)};
      if (Few::suits(rows) && Few::suits(columns)) {
        for_each_place(call, x_grad, Few{images[0], images[1], images[2], rows, columns});
      } else {
        for_each_place(call, x_grad, Any{images[0], images[1], images[2], rows, columns});
      }
    };
    index.dtype == HALFSTEP_U8 ? with_numbers(uint8_t{}) : with_numbers(int32_t{});
  });
  return call.launched();
}

template <class A>
halfstep_status pick(Call& call) {
  const auto& a = call.attributes<A>();
  const Tensor &x = call.in[0], &index = call.in[1], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  if (!within_reach(a) || !within_reach(x) || !within_reach(y)) return call.refuse(kTooLarge);
  Windows rows, columns;
  windows_of(a, x.sizes, y.sizes, rows, columns, true);
  if (x.dtype == HALFSTEP_F64) {
    for_each_place(call, y, MaxPoolPick<OneByOne<double>>{Image(x), Image(index), Image(y), rows, columns});
  } else {
    for_each_place(call, y, MaxPoolPick<OneByOne<float>>{Image(x), Image(index), Image(y), rows, columns});
  }
  return call.launched();
}

constexpr KernelDef kernel(const char* op, halfstep_status (*run)(Call&)) {
  return {.op = op, .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = run};
}
constexpr KernelDef kKernels[] = {
    kernel("max_pool2d", forward<halfstep_pool_attributes>),
    kernel("max_pool2d_backward", backward<halfstep_pool_attributes>),
    kernel("max_pool2d_pick", pick<halfstep_pool_attributes>),
    kernel("adaptive_max_pool2d", forward<halfstep_adaptive_pool_attributes>),
    kernel("adaptive_max_pool2d_backward", backward<halfstep_adaptive_pool_attributes>),
    kernel("adaptive_max_pool2d_pick", pick<halfstep_adaptive_pool_attributes>),
};

}  // namespace

std::span<const KernelDef> max_pool_kernels() { return kKernels; }

}  // namespace hscuda
