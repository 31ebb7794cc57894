// SPDX-License-Identifier: Apache-2.0
// layer_norm, rms_norm and group_norm. A row is read once into registers where it fits there.
#include "device/norm_rows.cuh"

namespace hscuda {
namespace {

template <class C>
struct Affine {
  const C *weight, *bias;  // may be null
  C *mean, *rstd;
  double eps;
};

// Where all elements are the same or nearly so, rounding may leave a variance below 0. NaN stays.
template <class C>
__device__ __forceinline__ C not_negative(C variance) {
  return variance < 0 ? 0 : variance;
}

template <class T, int kEach, bool kBlock>
__global__ void __launch_bounds__(kThreads) normalise_rows(const T* x, T* y, RowShape shape, Affine<float> p) {
  constexpr int kWidth = 16 / sizeof(T);
  using P = Pack<T, kWidth>;
  using Threads = RowThreads<kBlock>;
  const int64_t row = Threads::first_row();
  if (row >= shape.rows) return;
  const int lane = Threads::lane(), packs = static_cast<int>(shape.length / kWidth);
  const P* from = reinterpret_cast<const P*>(x) + row * packs;
  P v[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int i = lane + e * Threads::kCount;
    if (i < packs) v[e] = from[i];
  }
  const auto n = static_cast<float>(shape.length);
  float mean = 0;
  if (!shape.rms) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (lane + e * Threads::kCount >= packs) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += value_of(v[e].values[j]);
    }
    mean = Threads::reduce(sum, Sum{}, 0.0f) / n;
  }
  // What rounding the mean lost comes back in the second sum.
  Pair<float> sums{0, 0};
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (lane + e * Threads::kCount >= packs) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float d = value_of(v[e].values[j]) - mean;
      sums.a = fused(d, d, sums.a);
      sums.b += d;
    }
  }
  sums = Threads::reduce(sums, AddPair{}, Pair<float>{0, 0});
  const float shift = shape.rms ? 0 : sums.b / n;
  const float rstd = 1 / sqrtf(not_negative(fused(-shift, shift, sums.a / n)) + static_cast<float>(p.eps));
  if (lane == 0) {
    p.mean[row] = mean + shift;
    p.rstd[row] = rstd;
  }
  const int64_t first = shape.first_parameter(row);
  P* to = reinterpret_cast<P*>(y) + row * packs;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int i = lane + e * Threads::kCount;
    if (i >= packs) continue;
    float w[kWidth], b[kWidth];
    if (p.weight) load_parameters(p.weight, shape, first, i, w);
    if (p.bias) load_parameters(p.bias, shape, first, i, b);
    P result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      float z = (value_of(v[e].values[j]) - mean - shift) * rstd;
      if (p.weight) z = p.bias ? fused(z, w[j], b[j]) : z * w[j];
      if (!p.weight && p.bias) z += b[j];
      result.values[j] = convert<T>(z);
    }
    to[i] = result;
  }
}

// Rows of packs that are too long for registers, or whose parameters change within a pack: read three times.
template <class T, bool kBlock>
__global__ void __launch_bounds__(kThreads)
    normalise_packs(const T* x, T* y, RowShape shape, Divisor by_inner, Affine<float> p) {
  constexpr int kWidth = 16 / sizeof(T), kTogether = 4;
  using P = Pack<T, kWidth>;
  using Threads = RowThreads<kBlock>;
  const int64_t row = Threads::first_row();
  if (row >= shape.rows) return;
  const int packs = static_cast<int>(shape.length / kWidth);
  const P* from = reinterpret_cast<const P*>(x) + row * packs;
  // The loads of a round are all under way before the first is used.
  const auto each_pack = [&](const auto& f) {
    for (int first = Threads::lane(); first < packs; first += kTogether * Threads::kCount) {
      P v[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (first + u * Threads::kCount < packs) v[u] = from[first + u * Threads::kCount];
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (first + u * Threads::kCount < packs) f(first + u * Threads::kCount, v[u]);
      }
    }
  };
  const auto count = static_cast<double>(shape.length);
  float mean = 0;
  if (!shape.rms) {
    PackSums<kWidth> sums;
    each_pack([&](int, const P& v) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums.a[j] += value_of(v.values[j]);
      sums.count();
    });
    sums.flush();
    mean = static_cast<float>(Threads::reduce(sums.total.a, Sum{}, 0.0) / count);
  }
  PackSums<kWidth> sums;
  each_pack([&](int, const P& v) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float d = value_of(v.values[j]) - mean;
      sums.a[j] = fused(d, d, sums.a[j]);
      sums.b[j] += d;
    }
    sums.count();
  });
  sums.flush();
  const Two total = Threads::reduce(sums.total, AddTwo{}, Two{0, 0});
  const double shift = shape.rms ? 0 : total.b / count;
  const auto rest = static_cast<float>(shift);
  const auto rstd = static_cast<float>(1 / sqrt(not_negative(total.a / count - shift * shift) + p.eps));
  if (Threads::lane() == 0) {
    p.mean[row] = mean + rest;
    p.rstd[row] = rstd;
  }
  const int64_t parameters = shape.first_parameter(row);
  P* to = reinterpret_cast<P*>(y) + row * packs;
  each_pack([&](int i, const P& v) {
    float w[kWidth], b[kWidth];
    if (p.weight) load_parameters(p.weight, shape, by_inner, parameters, i, w);
    if (p.bias) load_parameters(p.bias, shape, by_inner, parameters, i, b);
    P result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      float z = (value_of(v.values[j]) - mean - rest) * rstd;
      if (p.weight) z = p.bias ? fused(z, w[j], b[j]) : z * w[j];
      if (!p.weight && p.bias) z += b[j];
      result.values[j] = convert<T>(z);
    }
    to[i] = result;
  });
}

// Any length and dtype: the row is read three times.
template <class C, bool kBlock>
__global__ void __launch_bounds__(kThreads) normalise_any(AnyFloat x, AnyFloat y, RowShape shape, Affine<C> p) {
  using Threads = RowThreads<kBlock>;
  const int64_t row = Threads::first_row(), n = shape.length, start = row * n;
  if (row >= shape.rows) return;
  const auto count = static_cast<double>(n);
  C mean = 0;
  if (!shape.rms) {
    double sum = 0;
    for (int64_t i = Threads::lane(); i < n; i += Threads::kCount) sum += static_cast<double>(x.load<C>(start + i));
    mean = static_cast<C>(Threads::reduce(sum, Sum{}, 0.0) / count);
  }
  Two sums{0, 0};
  for (int64_t i = Threads::lane(); i < n; i += Threads::kCount) {
    const auto d = static_cast<double>(x.load<C>(start + i) - mean);
    sums.a = fused(d, d, sums.a);
    sums.b += d;
  }
  sums = Threads::reduce(sums, AddTwo{}, Two{0, 0});
  const double shift = shape.rms ? 0 : sums.b / count;
  const C rest = static_cast<C>(shift);
  const C rstd = static_cast<C>(1 / sqrt(not_negative(sums.a / count - shift * shift) + p.eps));
  if (Threads::lane() == 0) {
    p.mean[row] = mean + rest;
    p.rstd[row] = rstd;
  }
  const int64_t first = shape.first_parameter(row);
  for (int64_t i = Threads::lane(); i < n; i += Threads::kCount) {
    C z = (x.load<C>(start + i) - mean - rest) * rstd;
    const int64_t at = shape.parameter(first, i);
    if (p.weight) z *= p.weight[at];
    if (p.bias) z += p.bias[at];
    y.store<C>(start + i, z);
  }
}

template <class C>
halfstep_status forward(const Call& call) {
  const auto& a = call.attributes<halfstep_row_norm_attributes>();
  const Tensor &x = call.in[0], &y = call.out[0];
  if (x.numel == 0) return HALFSTEP_OK;
  const RowShape shape = row_shape(a, x);
  const auto given = [&](int i) { return call.has(i) ? static_cast<const C*>(call.in[i].data) : nullptr; };
  const Affine<C> p{.weight = given(1),
                    .bias = given(2),
                    .mean = static_cast<C*>(call.out[1].data),
                    .rstd = static_cast<C*>(call.out[2].data),
                    .eps = a.eps >= 0 ? a.eps : static_cast<double>(std::numeric_limits<C>::epsilon())};
  if constexpr (std::is_same_v<C, float>) {
    const int width = static_cast<int>(16 / item_size(x.dtype));
    const NormRowsPlan plan = norm_rows_plan(shape.length, width, 64);
    const bool parameters =
        shape.inner == 1 ? shape.groups == 1 && aligned(p.weight, 4) && aligned(p.bias, 4) : shape.inner % width == 0;
    if (plan.fits && parameters && starts_even(x, width) && starts_even(y, width)) {
      with_fast(x.dtype, [&](auto zero) {
        using T = decltype(zero);
        with_rows_plan<8>(plan, [&](auto each, auto block) {
          const int64_t blocks = divide_up(shape.rows, RowThreads<block()>::kRows);
          launch(call, {.grid = static_cast<unsigned>(blocks)}, normalise_rows<T, each(), block()>,
                 static_cast<const T*>(x.data), static_cast<T*>(y.data), shape, p);
        });
      });
      return call.launched();
    }
    if (x.dtype == y.dtype && rows_of_packs(shape, width, {&x, &y})) {
      const Divisor by_inner(static_cast<uint32_t>(shape.inner));
      with_fast(x.dtype, [&](auto zero) {
        using T = decltype(zero);
        const bool block = shape.length > 1024;
        const int64_t blocks = block ? shape.rows : divide_up(shape.rows, RowThreads<false>::kRows);
        launch(call, {.grid = static_cast<unsigned>(blocks)},
               block ? normalise_packs<T, true> : normalise_packs<T, false>, static_cast<const T*>(x.data),
               static_cast<T*>(y.data), shape, by_inner, p);
      });
      return call.launched();
    }
  }
  if (shape.length > 1024) {
    launch(call, {.grid = static_cast<unsigned>(shape.rows)}, normalise_any<C, true>, AnyFloat(x), AnyFloat(y), shape,
           p);
  } else {
    launch(call, {.grid = static_cast<unsigned>(divide_up(shape.rows, RowThreads<false>::kRows))},
           normalise_any<C, false>, AnyFloat(x), AnyFloat(y), shape, p);
  }
  return call.launched();
}

halfstep_status row_norm(Call& call) {
  return call.in[0].dtype == HALFSTEP_F64 ? forward<double>(call) : forward<float>(call);
}

constexpr KernelDef kKernels[] = {
    {.op = "layer_norm", .dtypes = kFloating, .layouts = kContiguous, .attributes = true, .run = row_norm},
    {.op = "rms_norm", .dtypes = kFloating, .layouts = kContiguous, .attributes = true, .run = row_norm},
    {.op = "group_norm", .dtypes = kFloating, .layouts = kContiguous, .attributes = true, .run = row_norm},
};

}  // namespace

std::span<const KernelDef> norm_kernels() { return kKernels; }

}  // namespace hscuda
