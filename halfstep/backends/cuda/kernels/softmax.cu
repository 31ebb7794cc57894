// SPDX-License-Identifier: Apache-2.0
// softmax and log_softmax along one dimension, and their backward passes. Rows of up to 8192 elements that lie in whole
// packs stay in registers between the passes; others are read twice.
#include "device/softmax.cuh"
#include "halfstep/runtime/plugin_attributes.h"

namespace hscuda {
namespace {

constexpr int kMostThreads = 512;

template <class... T>
inline constexpr int kRowWidth = static_cast<int>(16 / std::max({sizeof(T)...}));

template <class In, class Out, int kPacks>
__global__ void __launch_bounds__(kMostThreads)
    softmax_packs(Rows<2> rows, int packs, int lanes, bool logarithm, const In* x, Out* y) {
  using C = Compute<In>;
  constexpr int kWidth = kRowWidth<In, Out>;
  const int lane = lane_of_thread(lanes);
  const int64_t row = row_of_thread(lanes);
  const bool exists = row < rows.rows.numel;
  int64_t at[2] = {0, 0};
  if (exists) walk_places(rows.rows, row, at);
  C v[kPacks][kWidth], top = static_cast<C>(-INFINITY);
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int pack = lane + u * lanes;
    Pack<In, kWidth> loaded;
    if (exists && pack < packs) loaded = reinterpret_cast<const Pack<In, kWidth>*>(x + at[0])[pack];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      v[u][j] = exists && pack < packs ? static_cast<C>(value_of(loaded.values[j])) : static_cast<C>(-INFINITY);
    }
  }
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) top = Largest{}(top, v[u][j]);
  }
  top = row_reduce(top, Largest{}, static_cast<C>(-INFINITY), lanes);
  C part = 0;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    if (lane + u * lanes >= packs) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const C below = v[u][j] - top, e = exponential(below);
      part += e;
      v[u][j] = logarithm ? below : e;
    }
  }
  const double sum = row_reduce(static_cast<double>(part), Sum{}, 0.0, lanes);
  const C divisor = static_cast<C>(logarithm ? std::log(sum) : sum);
  if (!exists) return;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int pack = lane + u * lanes;
    if (pack >= packs) continue;
    Pack<Out, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      result.values[j] = convert<Out>(logarithm ? v[u][j] - divisor : v[u][j] / divisor);
    }
    reinterpret_cast<Pack<Out, kWidth>*>(y + at[1])[pack] = result;
  }
}

// Any strides and lengths. `In` is what x has; y's dtype is asked for element by element.
template <class In, class C>
__global__ void __launch_bounds__(kThreads)
    softmax_any(Rows<2> rows, int lanes, bool logarithm, const In* x, void* y, int y_dtype) {
  const int lane = lane_of_thread(lanes);
  const int64_t row = row_of_thread(lanes);
  const bool exists = row < rows.rows.numel;
  int64_t at[2] = {0, 0};
  Exponentials<C> all;
  if (exists) {
    walk_places(rows.rows, row, at);
    all = exponentials_of<C>(x + at[0], rows.strides[0], rows.length, lane, lanes);
  }
  all = row_reduce(all, JoinExponentials{}, Exponentials<C>{}, lanes);
  if (!exists) return;
  const C divisor = static_cast<C>(logarithm ? std::log(all.total()) : all.total());
  for (int64_t i = lane; i < rows.length; i += lanes) {
    const C below = static_cast<C>(value_of(x[at[0] + i * rows.strides[0]])) - all.top;
    store_floating(y, y_dtype, at[1] + i * rows.strides[1], logarithm ? below - divisor : exponential(below) / divisor);
  }
}

template <class T, class Gradient, class Out, int kPacks>
__global__ void __launch_bounds__(kMostThreads)
    softmax_backward_packs(Rows<3> rows, int packs, int lanes, bool logarithm, const Gradient* g, const T* y,
                           Out* x_grad) {
  using C = Compute<T>;
  constexpr int kWidth = kRowWidth<T, Gradient, Out>;
  const int lane = lane_of_thread(lanes);
  const int64_t row = row_of_thread(lanes);
  const bool exists = row < rows.rows.numel;
  int64_t at[3] = {0, 0, 0};
  if (exists) walk_places(rows.rows, row, at);
  Pack<T, kWidth> ys[kPacks];
  Pack<Gradient, kWidth> gs[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int pack = lane + u * lanes;
    if (!exists || pack >= packs) continue;
    gs[u] = reinterpret_cast<const Pack<Gradient, kWidth>*>(g + at[1])[pack];
    ys[u] = reinterpret_cast<const Pack<T, kWidth>*>(y + at[0])[pack];
  }
  C part = 0;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    if (!exists || lane + u * lanes >= packs) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const C gradient = static_cast<C>(value_of(gs[u].values[j]));
      part += logarithm ? gradient : gradient * static_cast<C>(value_of(ys[u].values[j]));
    }
  }
  const C total = static_cast<C>(row_reduce(static_cast<double>(part), Sum{}, 0.0, lanes));
  if (!exists) return;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int pack = lane + u * lanes;
    if (pack >= packs) continue;
    Pack<Out, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const C gradient = static_cast<C>(value_of(gs[u].values[j])), value = static_cast<C>(value_of(ys[u].values[j]));
      result.values[j] = convert<Out>(logarithm ? gradient - exponential(value) * total : value * (gradient - total));
    }
    reinterpret_cast<Pack<Out, kWidth>*>(x_grad + at[2])[pack] = result;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) softmax_backward_any(Rows<3> rows, int lanes, bool logarithm, const void* g,
                                                                 int g_dtype, const T* y, void* x_grad, int x_dtype) {
  using C = Compute<T>;
  const int lane = lane_of_thread(lanes);
  const int64_t row = row_of_thread(lanes);
  const bool exists = row < rows.rows.numel;
  int64_t at[3] = {0, 0, 0};
  double sum = 0;
  if (exists) {
    walk_places(rows.rows, row, at);
    for (int64_t i = lane; i < rows.length; i += lanes) {
      const C gradient = load_floating<C>(g, g_dtype, at[1] + i * rows.strides[1]);
      const C value = static_cast<C>(value_of(y[at[0] + i * rows.strides[0]]));
      sum += static_cast<double>(logarithm ? gradient : gradient * value);
    }
  }
  const C total = static_cast<C>(row_reduce(sum, Sum{}, 0.0, lanes));
  if (!exists) return;
  for (int64_t i = lane; i < rows.length; i += lanes) {
    const C gradient = load_floating<C>(g, g_dtype, at[1] + i * rows.strides[1]);
    const C value = static_cast<C>(value_of(y[at[0] + i * rows.strides[0]]));
    store_floating(x_grad, x_dtype, at[2] + i * rows.strides[2],
                   logarithm ? gradient - exponential(value) * total : value * (gradient - total));
  }
}

/// How packed rows are shared out: threads to a row, threads of a block, packs of a thread. Without lanes: they don't
/// fit.
struct RowShare {
  int lanes = 0, threads = kThreads, packs = 1;
};
RowShare share_row(int64_t packs) {
  if (packs <= 32) return {static_cast<int>(power_of_two(packs)), kThreads, 1};
  if (packs <= 128) return {32, kThreads, 4};
  if (packs <= 256) return {256, 256, 1};
  if (packs <= 1024) return {256, 256, 4};
  if (packs <= 2048) return {512, 512, 4};
  return {};
}

/// Calls f(zero of x, zero of y) for the pairs that have kernels of their own.
template <class F>
bool with_pair(int from, int to, F&& f) {
  if (to == HALFSTEP_F32 && from == HALFSTEP_F16) return f(Half{}, float{});
  if (to == HALFSTEP_F32 && from == HALFSTEP_BF16) return f(BFloat16{}, float{});
  if (to != from) return false;
  return with_floating(to, [&](auto zero) { return f(zero, zero); });
}

template <bool kLogarithm>
halfstep_status forward(Call& call) {
  const Tensor &x = call.in[0], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  const Rows<2> rows = rows_of<2>({&x, &y}, call.attributes<halfstep_dim_attributes>().dim);
  const bool packed = with_pair(x.dtype, y.dtype, [&](auto in_zero, auto out_zero) {
    using In = decltype(in_zero);
    using Out = decltype(out_zero);
    constexpr int kWidth = kRowWidth<In, Out>;
    const RowShare share = share_row(rows.length / kWidth);
    if (share.lanes == 0 || !rows.packed(0, x.data, kWidth, sizeof(In)) ||
        !rows.packed(1, y.data, kWidth, sizeof(Out))) {
      return false;
    }
    const Launch how{.grid = row_blocks(rows.count(), share.threads, share.lanes),
                     .block = static_cast<unsigned>(share.threads),
                     .alone = share.lanes == 1};
    launch(call, how, share.packs == 1 ? softmax_packs<In, Out, 1> : softmax_packs<In, Out, 4>, rows,
           static_cast<int>(rows.length / kWidth), share.lanes, kLogarithm, static_cast<const In*>(x.data),
           static_cast<Out*>(y.data));
    return true;
  });
  if (packed) return call.launched();
  const int lanes = lanes_of(rows, 4, call.device().processors());
  const Launch how{.grid = row_blocks(rows.count(), kThreads, lanes), .alone = lanes == 1};
  with_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(call, how, y.dtype == HALFSTEP_F64 ? softmax_any<T, double> : softmax_any<T, Compute<T>>, rows, lanes,
           kLogarithm, static_cast<const T*>(x.data), y.data, static_cast<int>(y.dtype));
  });
  return call.launched();
}

template <bool kLogarithm>
halfstep_status backward(Call& call) {
  const Tensor &g = call.in[0], &y = call.in[1], &x_grad = call.out[0];
  if (x_grad.numel == 0) return HALFSTEP_OK;
  const Rows<3> rows = rows_of<3>({&y, &g, &x_grad}, call.attributes<halfstep_dim_attributes>().dim);
  const auto packs = [&](auto y_zero, auto x_zero) {
    using T = decltype(y_zero);
    using Out = decltype(x_zero);
    constexpr int kWidth = kRowWidth<T, Out>;
    const RowShare share = share_row(rows.length / kWidth);
    if (share.lanes == 0 || !rows.packed(0, y.data, kWidth, sizeof(T)) || !rows.packed(1, g.data, kWidth, sizeof(T)) ||
        !rows.packed(2, x_grad.data, kWidth, sizeof(Out))) {
      return false;
    }
    const Launch how{.grid = row_blocks(rows.count(), share.threads, share.lanes),
                     .block = static_cast<unsigned>(share.threads),
                     .alone = share.lanes == 1};
    launch(call, how, share.packs == 1 ? softmax_backward_packs<T, T, Out, 1> : softmax_backward_packs<T, T, Out, 4>,
           rows, static_cast<int>(rows.length / kWidth), share.lanes, kLogarithm, static_cast<const T*>(g.data),
           static_cast<const T*>(y.data), static_cast<Out*>(x_grad.data));
    return true;
  };
  // The gradient of a cast input: y and g in float32, x_grad in 16 bits.
  if (g.dtype == y.dtype &&
      with_pair(x_grad.dtype, y.dtype, [&](auto x_zero, auto y_zero) { return packs(y_zero, x_zero); })) {
    return call.launched();
  }
  const int lanes = lanes_of(rows, 4, call.device().processors());
  with_floating(y.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(call, {.grid = row_blocks(rows.count(), kThreads, lanes), .alone = lanes == 1}, softmax_backward_any<T>,
           rows, lanes, kLogarithm, g.data, static_cast<int>(g.dtype), static_cast<const T*>(y.data), x_grad.data,
           static_cast<int>(x_grad.dtype));
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "softmax", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = forward<false>},
    {.op = "log_softmax", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = forward<true>},
    {.op = "softmax_backward", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = backward<false>},
    {.op = "log_softmax_backward", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = backward<true>},
};

}  // namespace

std::span<const KernelDef> softmax_kernels() { return kKernels; }

}  // namespace hscuda
