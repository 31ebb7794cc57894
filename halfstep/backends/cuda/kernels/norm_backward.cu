// SPDX-License-Identifier: Apache-2.0
// norm_backward: with h = g weight and z = (x - mean) rstd, x_grad = rstd (h - mean(h) - z mean(h z)), and column sums
// of g z and g for the parameters. Where rows fit into registers one kernel does all of it and leaves a sum a column
// and block, which a second one joins.
#include "device/norm_rows.cuh"

namespace hscuda {
namespace {

template <class C>
struct Saved {
  const C *weight, *mean, *rstd;  // weight may be null
};

// Threads keep to their columns, so that they sum them over all of the block's rows. parts[block][2][length]; null: not
// wanted.
template <class T, int kEach, bool kBlock>
__global__ void __launch_bounds__(kThreads) gradient_of_rows(const T* g, const T* x, void* x_grad, int x_grad_dtype,
                                                             RowShape shape, Saved<float> p, float* parts) {
  constexpr int kWidth = 16 / sizeof(T);
  using P = Pack<T, kWidth>;
  using Threads = RowThreads<kBlock>;
  const int lane = Threads::lane(), packs = static_cast<int>(shape.length / kWidth);
  const int64_t step = static_cast<int64_t>(gridDim.x) * Threads::kRows;
  const auto n = static_cast<float>(shape.length);
  float sum_gz[kEach][kWidth] = {}, sum_g[kEach][kWidth] = {};
  P next_g[kEach], next_x[kEach];
  const auto fetch = [&](int64_t row) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = lane + e * Threads::kCount;
      if (row >= shape.rows || i >= packs) continue;
      next_g[e] = reinterpret_cast<const P*>(g)[row * packs + i];
      next_x[e] = reinterpret_cast<const P*>(x)[row * packs + i];
    }
  };
  // The next row is under way while this one is worked on.
  fetch(Threads::first_row());
  for (int64_t row = Threads::first_row(); row < shape.rows; row += step) {
    P gs[kEach], xs[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) gs[e] = next_g[e], xs[e] = next_x[e];
    fetch(row + step);
    const float mean = p.mean[row], rstd = p.rstd[row];
    Pair<float> sums{0, 0};
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = lane + e * Threads::kCount;
      if (i >= packs) continue;
      float w[kWidth];
      if (p.weight) load_parameters(p.weight, shape, 0, i, w);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float v = value_of(gs[e].values[j]), z = (value_of(xs[e].values[j]) - mean) * rstd;
        sum_gz[e][j] = fused(v, z, sum_gz[e][j]);
        sum_g[e][j] += v;
        const float h = p.weight ? v * w[j] : v;
        sums.a += h;
        sums.b = fused(h, z, sums.b);
      }
    }
    if (!x_grad) continue;
    sums = Threads::reduce(sums, AddPair{}, Pair<float>{0, 0});
    const float mean_h = shape.rms ? 0 : sums.a / n, mean_hz = sums.b / n;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = lane + e * Threads::kCount;
      if (i >= packs) continue;
      float w[kWidth], d[kWidth];
      if (p.weight) load_parameters(p.weight, shape, 0, i, w);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float v = value_of(gs[e].values[j]), z = (value_of(xs[e].values[j]) - mean) * rstd;
        const float h = p.weight ? v * w[j] : v;
        d[j] = rstd * fused(-z, mean_hz, h - mean_h);
      }
      store_pack(x_grad, x_grad_dtype, row * packs + i, d);
    }
  }
  if (!parts) return;
  // The columns' sums of the block, warp behind warp.
  float* to = parts + static_cast<int64_t>(blockIdx.x) * 2 * shape.length;
  const auto write = [&](const float(&from)[kEach][kWidth], float* result) {
    float* shared = kBlock ? nullptr : dynamic_shared<float>() + threadIdx.x / kWarp * shape.length;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = lane + e * Threads::kCount;
      if (i >= packs) continue;
#pragma unroll
      for (int k = 0; k < kWidth / 4; ++k) {
        const Pack<float, 4> four{from[e][4 * k], from[e][4 * k + 1], from[e][4 * k + 2], from[e][4 * k + 3]};
        reinterpret_cast<Pack<float, 4>*>(kBlock ? result : shared)[i * (kWidth / 4) + k] = four;
      }
    }
    if constexpr (!kBlock) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < shape.length; i += kThreads) {
        float sum = 0;
        for (int k = 0; k < Threads::kRows; ++k) sum += dynamic_shared<float>()[k * shape.length + i];
        result[i] = sum;
      }
      __syncthreads();
    }
  };
  write(sum_gz, to);
  write(sum_g, to + shape.length);
}

// x_grad of rows of packs, which are read twice.
template <class T, bool kBlock>
__global__ void __launch_bounds__(kThreads) gradient_of_packs(const T* g, const T* x, void* x_grad, int x_grad_dtype,
                                                              RowShape shape, Divisor by_inner, Saved<float> p) {
  constexpr int kWidth = 16 / sizeof(T), kTogether = 2;
  using P = Pack<T, kWidth>;
  using Threads = RowThreads<kBlock>;
  const int64_t row = Threads::first_row();
  if (row >= shape.rows) return;
  const int packs = static_cast<int>(shape.length / kWidth);
  const float mean = p.mean[row], rstd = p.rstd[row];
  const int64_t parameters = shape.first_parameter(row);
  // f(pack, h, z), with the loads of a round all under way before the first is used.
  const auto each_pack = [&](const auto& f) {
    for (int first = Threads::lane(); first < packs; first += kTogether * Threads::kCount) {
      P gs[kTogether], xs[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int i = first + u * Threads::kCount;
        if (i >= packs) continue;
        gs[u] = reinterpret_cast<const P*>(g)[row * packs + i];
        xs[u] = reinterpret_cast<const P*>(x)[row * packs + i];
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int i = first + u * Threads::kCount;
        if (i >= packs) continue;
        float h[kWidth], z[kWidth], w[kWidth];
        if (p.weight) load_parameters(p.weight, shape, by_inner, parameters, i, w);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          h[j] = value_of(gs[u].values[j]);
          if (p.weight) h[j] *= w[j];
          z[j] = (value_of(xs[u].values[j]) - mean) * rstd;
        }
        f(i, h, z);
      }
    }
  };
  PackSums<kWidth> sums;
  each_pack([&](int, const float(&h)[kWidth], const float(&z)[kWidth]) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sums.a[j] += h[j];
      sums.b[j] = fused(h[j], z[j], sums.b[j]);
    }
    sums.count();
  });
  sums.flush();
  const Two total = Threads::reduce(sums.total, AddTwo{}, Two{0, 0});
  const auto count = static_cast<double>(shape.length);
  const float mean_h = shape.rms ? 0 : static_cast<float>(total.a / count);
  const auto mean_hz = static_cast<float>(total.b / count);
  each_pack([&](int i, const float(&h)[kWidth], const float(&z)[kWidth]) {
    float d[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) d[j] = rstd * fused(-z[j], mean_hz, h[j] - mean_h);
    store_pack(x_grad, x_grad_dtype, row * packs + i, d);
  });
}

// x_grad for any length and dtype: rows are read twice.
template <class C, bool kBlock>
__global__ void __launch_bounds__(kThreads)
    gradient_of_any(AnyFloat g, AnyFloat x, AnyFloat x_grad, RowShape shape, Saved<C> p) {
  using Threads = RowThreads<kBlock>;
  const int64_t row = Threads::first_row(), n = shape.length, start = row * n;
  if (row >= shape.rows) return;
  const C mean = p.mean[row], rstd = p.rstd[row];
  const int64_t first = shape.first_parameter(row);
  const auto h = [&](int64_t i) {
    const C v = g.load<C>(start + i);
    return p.weight ? v * p.weight[shape.parameter(first, i)] : v;
  };
  const auto z = [&](int64_t i) { return (x.load<C>(start + i) - mean) * rstd; };
  Two sums{0, 0};
  for (int64_t i = Threads::lane(); i < n; i += Threads::kCount) {
    const auto value = static_cast<double>(h(i));
    sums.a += value;
    sums.b = fused(value, static_cast<double>(z(i)), sums.b);
  }
  sums = Threads::reduce(sums, AddTwo{}, Two{0, 0});
  const auto count = static_cast<double>(n);
  const C mean_h = shape.rms ? C(0) : static_cast<C>(sums.a / count), mean_hz = static_cast<C>(sums.b / count);
  for (int64_t i = Threads::lane(); i < n; i += Threads::kCount) {
    x_grad.store<C>(start + i, rstd * fused(-z(i), mean_hz, h(i) - mean_h));
  }
}

// The sums of a parameter for each element of a row: a thread a column, over the chunk blockIdx.y of the rows that have
// these parameters. parts[chunk][2][parameters].
template <class C>
__global__ void __launch_bounds__(kThreads)
    column_sums(AnyFloat g, AnyFloat x, RowShape shape, Saved<C> p, int64_t chunk, C* parts) {
  const int64_t parameters = shape.length * shape.groups, at = thread_index();
  if (at >= parameters) return;
  const int64_t group = at / shape.length, column = at % shape.length, rows = shape.rows / shape.groups;
  const int64_t first = blockIdx.y * chunk, end = first + chunk < rows ? first + chunk : rows;
  Two sums{0, 0};
  for (int64_t k = first; k < end; ++k) {
    const int64_t row = k * shape.groups + group, i = row * shape.length + column;
    const C v = g.load<C>(i);
    sums.a += static_cast<double>(v * ((x.load<C>(i) - p.mean[row]) * p.rstd[row]));
    sums.b += static_cast<double>(v);
  }
  C* to = parts + blockIdx.y * 2 * parameters;
  to[at] = static_cast<C>(sums.a);
  to[parameters + at] = static_cast<C>(sums.b);
}
// The same where `inner` elements share a parameter: a block a parameter.
template <class C>
__global__ void __launch_bounds__(kThreads)
    shared_sums(AnyFloat g, AnyFloat x, RowShape shape, Saved<C> p, int64_t chunk, C* parts) {
  const int64_t per_row = shape.length / shape.inner, parameters = per_row * shape.groups, at = blockIdx.x;
  const int64_t group = at / per_row, start = at % per_row * shape.inner, all = shape.rows / shape.groups * shape.inner;
  const int64_t first = blockIdx.y * chunk, end = first + chunk < all ? first + chunk : all;
  Two sums{0, 0};
  for (int64_t k = first + threadIdx.x; k < end; k += kThreads) {
    const int64_t row = k / shape.inner * shape.groups + group, i = row * shape.length + start + k % shape.inner;
    const C v = g.load<C>(i);
    sums.a += static_cast<double>(v * ((x.load<C>(i) - p.mean[row]) * p.rstd[row]));
    sums.b += static_cast<double>(v);
  }
  sums = block_reduce(sums, AddTwo{}, Two{0, 0});
  if (threadIdx.x != 0) return;
  C* to = parts + blockIdx.y * 2 * parameters;
  to[at] = static_cast<C>(sums.a);
  to[parameters + at] = static_cast<C>(sums.b);
}

// The sums of parts[chunk][2][parameters]: 8 of them a block, 32 chunks at a time.
template <class C>
__global__ void __launch_bounds__(kThreads)
    join_parts(const C* parts, int64_t chunks, int64_t parameters, C* weight_grad, C* bias_grad) {
  constexpr int kAcross = 8, kDown = kThreads / kAcross;
  __shared__ double sums[kThreads];
  const int column = static_cast<int>(threadIdx.x) % kAcross, line = static_cast<int>(threadIdx.x) / kAcross;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kAcross + column;
  double sum = 0;
  if (at < 2 * parameters) {
#pragma unroll 4
    for (int64_t k = line; k < chunks; k += kDown) sum += static_cast<double>(parts[k * 2 * parameters + at]);
  }
  sums[threadIdx.x] = sum;
  for (int half = kDown / 2; half > 0; half /= 2) {
    __syncthreads();
    if (line < half) sums[threadIdx.x] += sums[threadIdx.x + static_cast<unsigned>(half * kAcross)];
  }
  if (line != 0 || at >= 2 * parameters) return;
  C* to = at < parameters ? weight_grad : bias_grad;
  if (to) to[at < parameters ? at : at - parameters] = static_cast<C>(sums[threadIdx.x]);
}

template <class T>
struct ZeroOut {
  T* data;
  __device__ void operator()(int64_t i) const { data[i] = 0; }
};

template <class C>
void join(const Call& call, const C* parts, int64_t chunks, int64_t parameters, C* weight_grad, C* bias_grad) {
  launch(call, {.grid = static_cast<unsigned>(divide_up(2 * parameters, 8))}, join_parts<C>, parts, chunks, parameters,
         weight_grad, bias_grad);
}

void gradient_by_packs(const Call& call, const RowShape& shape, const Saved<float>& p) {
  const Tensor &g = call.in[0], &x = call.in[1], &x_grad = call.out[0];
  const bool block = shape.length > 1024;
  const int64_t blocks = block ? shape.rows : divide_up(shape.rows, RowThreads<false>::kRows);
  with_fast(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(call, {.grid = static_cast<unsigned>(blocks)},
           block ? gradient_of_packs<T, true> : gradient_of_packs<T, false>, static_cast<const T*>(g.data),
           static_cast<const T*>(x.data), x_grad.data, static_cast<int>(x_grad.dtype), shape,
           Divisor(static_cast<uint32_t>(shape.inner)), p);
  });
}

template <class C>
halfstep_status backward(const Call& call) {
  const auto& a = call.attributes<halfstep_row_norm_attributes>();
  const Tensor &g = call.in[0], &x = call.in[1], &x_grad = call.out[0];
  const auto wanted = [&](bool want, int i) {
    return want && call.out[i].numel > 0 ? static_cast<C*>(call.out[i].data) : nullptr;
  };
  C *weight_grad = wanted(a.want_weight, 1), *bias_grad = wanted(a.want_bias, 2);
  if (x.numel == 0) {
    if (weight_grad) for_each(call, call.out[1].numel, ZeroOut<C>{weight_grad});
    if (bias_grad) for_each(call, call.out[2].numel, ZeroOut<C>{bias_grad});
    return call.launched();
  }
  const RowShape shape = row_shape(a, x);
  const bool sums = weight_grad || bias_grad, want_x = a.want_input && x_grad.numel > 0;
  const Saved<C> p{.weight = call.has(2) ? static_cast<const C*>(call.in[2].data) : nullptr,
                   .mean = static_cast<const C*>(call.in[3].data),
                   .rstd = static_cast<const C*>(call.in[4].data)};
  const int64_t parameters = shape.per_row() * shape.groups, processors = call.device().processors();
  if constexpr (std::is_same_v<C, float>) {
    const int width = static_cast<int>(16 / item_size(x.dtype));
    const NormRowsPlan plan = norm_rows_plan(shape.length, width, 32);
    if (plan.fits && shape.inner == 1 && shape.groups == 1 && g.dtype == x.dtype && aligned(p.weight, 4) &&
        starts_even(x, width) && starts_even(g, width) &&
        (!want_x || (is_fast(x_grad.dtype) && starts_even(x_grad, width)))) {
      const int64_t blocks = std::min(divide_up(shape.rows, plan.block ? 1 : kThreads / kWarp), 2 * processors);
      float* parts = sums ? call.workspace<float>(blocks * 2 * shape.length) : nullptr;
      if (sums && !parts) return call.no_memory();
      with_fast(x.dtype, [&](auto zero) {
        using T = decltype(zero);
        with_rows_plan<sizeof(T) == 4 ? 8 : 4>(plan, [&](auto each, auto block) {
          const std::size_t shared =
              block() || !sums ? 0 : static_cast<std::size_t>(kThreads / kWarp * shape.length) * sizeof(float);
          launch(call, {.grid = static_cast<unsigned>(blocks), .shared = shared}, gradient_of_rows<T, each(), block()>,
                 static_cast<const T*>(g.data), static_cast<const T*>(x.data), want_x ? x_grad.data : nullptr,
                 static_cast<int>(x_grad.dtype), shape, p, parts);
        });
      });
      if (sums) join<float>(call, parts, blocks, parameters, weight_grad, bias_grad);
      return call.launched();
    }
  }
  // Chunks so that there is work for all processors.
  const int64_t across = shape.inner == 1 ? divide_up(parameters, kThreads) : parameters;
  const int64_t down = shape.inner == 1 ? shape.rows / shape.groups : shape.rows / shape.groups * shape.inner;
  const int64_t least = shape.inner == 1 ? 16 : 4 * kThreads;
  const int64_t chunk = std::max(divide_up(down, std::max<int64_t>(1, 4 * processors / across)), least);
  const int64_t chunks = divide_up(down, chunk);
  C* parts = sums ? call.workspace<C>(chunks * 2 * parameters) : nullptr;
  if (sums && !parts) return call.no_memory();
  bool packed = false;
  if constexpr (std::is_same_v<C, float>) {
    const int width = static_cast<int>(16 / item_size(x.dtype));
    packed = want_x && g.dtype == x.dtype && rows_of_packs(shape, width, {&g, &x, &x_grad});
  }
  if (packed) {
    if constexpr (std::is_same_v<C, float>) gradient_by_packs(call, shape, p);
  } else if (want_x) {
    const int64_t blocks = shape.length > 1024 ? shape.rows : divide_up(shape.rows, RowThreads<false>::kRows);
    launch(call, {.grid = static_cast<unsigned>(blocks)},
           shape.length > 1024 ? gradient_of_any<C, true> : gradient_of_any<C, false>, AnyFloat(g), AnyFloat(x),
           AnyFloat(x_grad), shape, p);
  }
  if (sums) {
    const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(chunks));
    if (shape.inner == 1) {
      launch(call, {.grid = grid, .alone = true}, column_sums<C>, AnyFloat(g), AnyFloat(x), shape, p, chunk, parts);
    } else {
      launch(call, {.grid = grid}, shared_sums<C>, AnyFloat(g), AnyFloat(x), shape, p, chunk, parts);
    }
    join<C>(call, parts, chunks, parameters, weight_grad, bias_grad);
  }
  return call.launched();
}

halfstep_status norm_backward(Call& call) {
  return call.in[1].dtype == HALFSTEP_F64 ? backward<double>(call) : backward<float>(call);
}

constexpr KernelDef kKernels[] = {
    {.op = "norm_backward", .dtypes = kFloating, .layouts = kContiguous, .attributes = true, .run = norm_backward},
};

}  // namespace

std::span<const KernelDef> norm_backward_kernels() { return kKernels; }

}  // namespace hscuda
