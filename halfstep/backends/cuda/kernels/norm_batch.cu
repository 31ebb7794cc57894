// SPDX-License-Identifier: Apache-2.0
// batch_norm and batch_norm_act: statistics in one pass over x, joined in a second small kernel, then one pass that
// normalises, adds and activates. All sums have a fixed order.
#include "device/norm_batch.cuh"

namespace hscuda {
namespace {

// Of the places of one channel that a block has: their mean and the sum of squared differences from it.
struct Moments {
  double mean, squares;
};
// From sums about a number that is near the mean, so that little cancels.
__device__ __forceinline__ Moments moments_about(double shift, Two sums, double n) {
  const double own = sums.b - sums.a * sums.a / n;
  return {shift + sums.a / n, own < 0 ? 0 : own};
}

// parts[channel * chunks + k]: the moments of chunk k.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) rows_moments(const T* x, RowsPlan p, Moments* parts) {
  const int64_t pack = static_cast<int64_t>(blockIdx.y) * p.across + (threadIdx.x & (p.across - 1));
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.chunk;
  const int64_t end = first + p.chunk < p.rows ? first + p.chunk : p.rows;
  float shift[kWidth] = {}, s1[kWidth] = {}, s2[kWidth] = {};
  if (pack < p.packs) {
    const auto* from = reinterpret_cast<const Pack<T, kWidth>*>(x) + pack;
    const auto a = from[first * p.packs], b = from[(first + end) / 2 * p.packs], c = from[(end - 1) * p.packs];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      shift[j] = middle(value_of(a.values[j]), value_of(b.values[j]), value_of(c.values[j]));
    }
    for (int64_t row = first + (threadIdx.x >> p.across_bits); row < end; row += kUnroll * p.down) {
      Pack<T, kWidth> v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * p.down < end) v[u] = from[(row + u * p.down) * p.packs];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * p.down >= end) continue;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float d = value_of(v[u].values[j]) - shift[j];
          s1[j] += d;
          s2[j] = fused(d, d, s2[j]);
        }
      }
    }
  }
  // The shifts lie behind the sums.
  const int width = p.across * kWidth;
  float* shifts = dynamic_shared<float>() + 2 * p.down * width;
  if (threadIdx.x < static_cast<unsigned>(p.across)) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) shifts[threadIdx.x * kWidth + j] = shift[j];
  }
  join_rows(p, s1, s2, [&](int64_t channel, double a, double b) {
    const auto at = static_cast<double>(shifts[channel - static_cast<int64_t>(blockIdx.y) * width]);
    parts[channel * gridDim.x + blockIdx.x] = moments_about(at, {a, b}, static_cast<double>(end - first));
  });
}

// Block number channel * chunks + k.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) planes_moments(const T* x, PlanesPlan p, Moments* parts) {
  const int64_t channel = blockIdx.x / p.chunks, first = blockIdx.x % p.chunks * p.chunk;
  const int64_t end = first + p.chunk < p.units ? first + p.chunk : p.units;
  const int64_t skip = (p.channels - 1) * p.run;  // from the end of a run to the next
  const T* from = x + channel * p.run;
  const auto place = [&](int64_t unit) {
    return unit * kWidth + static_cast<int64_t>(p.per_run.divide(static_cast<uint32_t>(unit))) * skip;
  };
  const float shift =
      middle(value_of(from[place(first)]), value_of(from[place((first + end) / 2)]), value_of(from[place(end - 1)]));
  float s1[kWidth] = {}, s2[kWidth] = {};
  for (int64_t unit = first + threadIdx.x; unit < end; unit += kUnroll * kThreads) {
    Pack<T, kWidth> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (unit + u * kThreads < end)
        v[u] = *reinterpret_cast<const Pack<T, kWidth>*>(from + place(unit + u * kThreads));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (unit + u * kThreads >= end) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float d = value_of(v[u].values[j]) - shift;
        s1[j] += d;
        s2[j] = fused(d, d, s2[j]);
      }
    }
  }
  Two sums{0, 0};
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    sums.a += static_cast<double>(s1[j]);
    sums.b += static_cast<double>(s2[j]);
  }
  sums = block_reduce(sums, AddTwo{}, Two{0, 0});
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = moments_about(static_cast<double>(shift), sums, static_cast<double>((end - first) * kWidth));
  }
}

// Any strides and dtypes.
template <class C>
__global__ void __launch_bounds__(kThreads)
    other_moments(AnyFloat x, ChannelPlaces<1> walk, PlanesPlan p, Moments* parts) {
  const int64_t channel = blockIdx.x / p.chunks, first = blockIdx.x % p.chunks * p.chunk;
  const int64_t end = first + p.chunk < p.units ? first + p.chunk : p.units;
  const auto value = [&](int64_t i) {
    int64_t at[1];
    places_of(walk.places, i, at);
    return x.load<C>(channel * walk.channel_strides[0] + at[0]);
  };
  const C shift = middle(value(first), value((first + end) / 2), value(end - 1));
  C s1 = 0, s2 = 0;
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    const C d = value(i) - shift;
    s1 += d;
    s2 = fused(d, d, s2);
  }
  const Two sums = block_reduce(Two{static_cast<double>(s1), static_cast<double>(s2)}, AddTwo{}, Two{0, 0});
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = moments_about(static_cast<double>(shift), sums, static_cast<double>(end - first));
  }
}

template <class C>
struct Parameters {
  const C *weight, *bias, *running_mean, *running_var;  // the last two: what is normalised by, if not training
  C *mean, *rstd, *var;
  C *factor, *offset;  // y = (x - mean) factor + offset
  double eps;
};

// A warp a channel. Part k has `each` places, the last one what is left of `places`. Without parts the running
// statistics are those of the channel.
template <class C>
__global__ void __launch_bounds__(kThreads) channel_parameters(int64_t channels, const Moments* parts, int64_t chunks,
                                                               double each, double places, Parameters<C> p) {
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (channel >= channels) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  C mean, var, lost = 0;
  if (parts) {
    parts += channel * chunks;
    const double about = parts[0].mean;
    Two sums{0, 0};
    for (int64_t k = lane; k < chunks; k += kWarp) {
      const double n = k == chunks - 1 ? places - static_cast<double>(k) * each : each;
      const Moments part = parts[k];
      const double d = part.mean - about;
      sums.a += n * d;
      sums.b += part.squares + n * d * d;
    }
    sums = warp_reduce(sums, AddTwo{});
    const Moments all = moments_about(about, sums, places);
    mean = static_cast<C>(all.mean);
    var = static_cast<C>(all.squares / places);
    // What rounding the mean lost, which the deviation need not be much larger than.
    lost = static_cast<C>(static_cast<double>(mean) - all.mean);
  } else {
    mean = p.running_mean[channel];
    var = p.running_var[channel];
  }
  if (lane != 0) return;
  const C rstd = static_cast<C>(1 / sqrt(static_cast<double>(var) + p.eps));
  const C factor = p.weight ? rstd * p.weight[channel] : rstd;
  p.mean[channel] = mean;
  p.var[channel] = var;
  p.rstd[channel] = rstd;
  p.factor[channel] = factor;
  p.offset[channel] = lost * factor + (p.bias ? p.bias[channel] : C(0));
}

// --- the result

template <class T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> normalised(const Pack<T, kWidth>& x, const Pack<T, kWidth>* residual,
                                                      const float* mean, const float* factor, const float* offset,
                                                      const Activate<float>& activate) {
  Pack<T, kWidth> y;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    float v = fused(value_of(x.values[j]) - mean[j], factor[j], offset[j]);
    if (residual) v += value_of(residual->values[j]);
    y.values[j] = convert<T>(activate(v));
  }
  return y;
}

template <class T, int kWidth, bool kResidual>
__global__ void __launch_bounds__(kThreads)
    rows_apply(const T* x, const T* residual, T* y, RowsPlan p, const float* mean, const float* factor,
               const float* offset, Activate<float> activate) {
  using P = Pack<T, kWidth>;
  const int64_t pack = static_cast<int64_t>(blockIdx.y) * p.across + (threadIdx.x & (p.across - 1));
  if (pack >= p.packs) return;
  float m[kWidth], k[kWidth], o[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    m[j] = mean[pack * kWidth + j], k[j] = factor[pack * kWidth + j], o[j] = offset[pack * kWidth + j];
  }
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.chunk;
  const int64_t end = first + p.chunk < p.rows ? first + p.chunk : p.rows;
  for (int64_t row = first + (threadIdx.x >> p.across_bits); row < end; row += kUnroll * p.down) {
    P v[kUnroll], r[kResidual ? kUnroll : 1];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = (row + u * p.down) * p.packs + pack;
      if (row + u * p.down < end) {
        v[u] = reinterpret_cast<const P*>(x)[at];
        if constexpr (kResidual) r[u] = reinterpret_cast<const P*>(residual)[at];
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = (row + u * p.down) * p.packs + pack;
      if (row + u * p.down < end) {
        reinterpret_cast<P*>(y)[at] = normalised(v[u], kResidual ? &r[kResidual ? u : 0] : nullptr, m, k, o, activate);
      }
    }
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    planes_apply(int64_t n, const T* x, const T* residual, T* y, Divisor run, Divisor channels, const float* mean,
                 const float* factor, const float* offset, Activate<float> activate) {
  using P = Pack<T, kWidth>;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kUnroll + threadIdx.x, packs = n / kWidth;
  P v[kUnroll], r[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + u * kThreads;
    if (i < packs) {
      v[u] = reinterpret_cast<const P*>(x)[i];
      if (residual) r[u] = reinterpret_cast<const P*>(residual)[i];
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + u * kThreads;
    if (i >= packs) continue;
    const PlaneChannels<kWidth> at(static_cast<uint32_t>(i * kWidth), run, channels);
    float m[kWidth], k[kWidth], o[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      m[j] = mean[at.channel[j]], k[j] = factor[at.channel[j]], o[j] = offset[at.channel[j]];
    }
    reinterpret_cast<P*>(y)[i] = normalised(v[u], residual ? &r[u] : nullptr, m, k, o, activate);
  }
  const int64_t rest = packs * kWidth + threadIdx.x;
  if (blockIdx.x == 0 && rest < n) {
    const PlaneChannels<1> at(static_cast<uint32_t>(rest), run, channels);
    const uint32_t c = at.channel[0];
    float value = fused(value_of(x[rest]) - mean[c], factor[c], offset[c]);
    if (residual) value += value_of(residual[rest]);
    y[rest] = convert<T>(activate(value));
  }
}

template <class C>
struct ApplyAny {
  Layout<4> layout;  // y, x, residual, channel
  AnyFloat y, x, residual;
  const C *mean, *factor, *offset;
  Activate<C> activate;
  __device__ void operator()(int64_t i) const {
    int64_t at[4];
    places_of(layout, i, at);
    C v = fused(x.load<C>(at[1]) - mean[at[3]], factor[at[3]], offset[at[3]]);
    if (residual.data) v += residual.load<C>(at[2]);
    y.store<C>(at[0], activate(v));
  }
};

// --- calls

template <class T, int kWidth>
void take_moments(const Call& call, const ChannelPlan& plan, Moments* parts) {
  const T* x = static_cast<const T*>(call.in[0].data);
  if (plan.by_rows()) {
    const RowsPlan& p = plan.rows;
    const std::size_t shared = join_bytes(p) + sizeof(float) * static_cast<std::size_t>(p.across * p.width);
    launch(call, {.grid = dim3(p.chunks, p.tiles), .shared = shared}, rows_moments<T, kWidth>, x, p, parts);
  } else if (plan.planes.width == kWidth) {
    launch(call, {.grid = plan.planes.blocks()}, planes_moments<T, kWidth>, x, plan.planes, parts);
  } else {
    launch(call, {.grid = plan.planes.blocks()}, planes_moments<T, 1>, x, plan.planes, parts);
  }
}
template <class T, int kWidth>
void apply(const Call& call, const ChannelPlan& plan, const Tensor* residual, const Parameters<float>& p,
           int activation) {
  const T* x = static_cast<const T*>(call.in[0].data);
  const T* r = residual ? static_cast<const T*>(residual->data) : nullptr;
  T* y = static_cast<T*>(call.out[0].data);
  const ChannelLayout& l = plan.layout;
  const Activate<float> activate(activation);
  if (plan.by_rows()) {
    const RowsPlan rows = rows_plan(l.places, l.channels, kWidth, int64_t{1} << 30, 2 * kUnroll);
    const Launch how{.grid = dim3(rows.chunks, rows.tiles), .alone = true};
    launch(call, how, r ? rows_apply<T, kWidth, true> : rows_apply<T, kWidth, false>, x, r, y, rows, p.mean, p.factor,
           p.offset, activate);
  } else {
    const int64_t n = call.in[0].numel;
    launch(call, {.grid = grid_size(divide_up(n, kWidth), kThreads * kUnroll, int64_t{1} << 30), .alone = true},
           planes_apply<T, kWidth>, n, x, r, y, Divisor(static_cast<uint32_t>(l.run)),
           Divisor(static_cast<uint32_t>(l.channels)), p.mean, p.factor, p.offset, activate);
  }
}
template <class C>
halfstep_status forward(const Call& call) {
  const auto& a = call.attributes<halfstep_batch_norm_attributes>();
  const Tensor& x = call.in[0];
  const Tensor* residual = call.has(5) ? &call.in[5] : nullptr;
  const int64_t channels = x.sizes[1];
  if (channels == 0) return HALFSTEP_OK;
  Alike alike;
  if (!alike.take(call, x, residual)) return call.no_memory();
  const ChannelPlan plan = channel_plan(call, x, {&call.out[0], residual}, {static_cast<const Tensor*>(nullptr)});
  const bool sums = a.training && x.numel > 0;
  C* factor = call.workspace<C>(2 * channels);
  Moments* parts = sums ? call.workspace<Moments>(channels * plan.chunks()) : nullptr;
  if (!factor || (sums && !parts)) return call.no_memory();
  const auto given = [&](int i) { return call.has(i) ? static_cast<const C*>(call.in[i].data) : nullptr; };
  const Parameters<C> p{.weight = given(1),
                        .bias = given(2),
                        .running_mean = given(3),
                        .running_var = given(4),
                        .mean = static_cast<C*>(call.out[1].data),
                        .rstd = static_cast<C*>(call.out[2].data),
                        .var = static_cast<C*>(call.out[3].data),
                        .factor = factor,
                        .offset = factor + channels,
                        .eps = a.eps};
  alike.move(call);
  if (sums && !plan.fast) {
    launch(call, {.grid = plan.planes.blocks()}, other_moments<C>, AnyFloat(x), channel_places<1>({&x}), plan.planes,
           parts);
  } else if (sums) {
    with_fast(x.dtype, [&](auto zero) {
      using T = decltype(zero);
      with_width<T>(plan.width, [&](auto width) { take_moments<T, width()>(call, plan, parts); });
    });
  }
  const double each = static_cast<double>(plan.by_rows() ? plan.rows.chunk : plan.planes.chunk * plan.planes.width);
  launch(call, {.grid = grid_size(channels, kThreads / kWarp, int64_t{1} << 30)}, channel_parameters<C>, channels,
         static_cast<const Moments*>(parts), plan.chunks(), each, static_cast<double>(plan.layout.places), p);
  if (x.numel == 0) return call.launched();
  if (!plan.fast) {
    const Tensor& y = call.out[0];
    for_each(call, y.numel,
             ApplyAny<C>{channel_elements<3>({&y, &x, residual}), AnyFloat(y), AnyFloat(x),
                         residual ? AnyFloat(*residual) : AnyFloat(), p.mean, p.factor, p.offset,
                         Activate<C>(a.activation)});
  } else if constexpr (std::is_same_v<C, float>) {
    with_fast(x.dtype, [&](auto zero) {
      using T = decltype(zero);
      with_width<T>(plan.width, [&](auto width) { apply<T, width()>(call, plan, residual, p, a.activation); });
    });
  }
  return call.launched();
}

halfstep_status batch_norm(Call& call) {
  return call.in[0].dtype == HALFSTEP_F64 ? forward<double>(call) : forward<float>(call);
}

// --- running statistics

struct Update {
  AnyFloat batch[2], running[2];
  int64_t strides[2];
  double momentum, unbiased;
  __device__ void operator()(int64_t c) const {
    for (int k = 0; k < 2; ++k) {
      const double value = batch[k].load<double>(c) * (k == 1 ? unbiased : 1.0);
      const int64_t at = c * strides[k];
      running[k].store<double>(at, (1 - momentum) * running[k].load<double>(at) + momentum * value);
    }
  }
};
halfstep_status batch_norm_update(Call& call) {
  const auto& a = call.attributes<halfstep_batch_norm_attributes>();
  Update update{.batch = {AnyFloat(call.in[0]), AnyFloat(call.in[1])},
                .running = {AnyFloat(call.out[0]), AnyFloat(call.out[1])},
                .strides = {call.out[0].strides[0], call.out[1].strides[0]},
                .momentum = a.momentum,
                .unbiased = a.count / std::max(a.count - 1, 1.0)};
  for_each(call, call.out[0].numel, update);
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "batch_norm", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = batch_norm},
    {.op = "batch_norm_act", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = batch_norm},
    {.op = "batch_norm_update",
     .dtypes = dtypes({HALFSTEP_F32, HALFSTEP_F64}),
     .layouts = kStrided,
     .attributes = true,
     .run = batch_norm_update},
};

}  // namespace

std::span<const KernelDef> norm_batch_kernels() { return kKernels; }

}  // namespace hscuda
