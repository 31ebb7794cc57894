// SPDX-License-Identifier: Apache-2.0
// The gradients of batch_norm and batch_norm_act: one pass that sums, one that writes those of input and residual.
#include "device/norm_batch.cuh"

namespace hscuda {
namespace {

// The gradient of what the activation got.
template <class T, int kWidth>
__device__ __forceinline__ void before_activation(int activation, const Pack<T, kWidth>& g, const Pack<T, kWidth>& y,
                                                  float (&result)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    result[j] = value_of(g.values[j]);
    if (activation != 0 && !passes(activation, value_of(y.values[j]))) result[j] = 0;
  }
}

template <class T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> as_pack(const float (&values)[kWidth]) {
  Pack<T, kWidth> pack;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) pack.values[j] = convert<T>(values[j]);
  return pack;
}

// A pack of the gradient, of which `more` is a part that is still to be added where it isn't null.
template <class T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> whole(const T* g, const T* more, int64_t at) {
  const auto first = *reinterpret_cast<const Pack<T, kWidth>*>(g + at);
  if (more == nullptr) return first;
  const auto second = *reinterpret_cast<const Pack<T, kWidth>*>(more + at);
  float sum[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum[j] = value_of(first.values[j]) + value_of(second.values[j]);
  return as_pack<T, kWidth>(sum);
}

// parts[channel * chunks + k]: block k's sums of g and of g (x - mean). Blocks go over the rows together, from the last
// to the first: the cache still holds the end of g, which was written last, and the next pass begins where this one
// ends. `more`, unless it is null, is added to g first. `kept`, unless it is null, receives the gradient behind the
// activation, so that the next pass reads neither g nor y.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rows_products(const T* g, const T* more, const T* x, const T* y, int activation, const float* mean, RowsPlan p,
                  T* kept, Two* parts) {
  using P = Pack<T, kWidth>;
  const int64_t pack = static_cast<int64_t>(blockIdx.y) * p.across + (threadIdx.x & (p.across - 1));
  const int64_t together = int64_t{kUnroll} * p.down, end = p.rows;
  float m[kWidth] = {}, s1[kWidth] = {}, s2[kWidth] = {};
  if (pack < p.packs) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) m[j] = mean[pack * kWidth + j];
    for (int64_t turn = (end - 1) / together - blockIdx.x; turn >= 0; turn -= gridDim.x) {
      const int64_t row = turn * together + (threadIdx.x >> p.across_bits);
      P gs[kUnroll], xs[kUnroll], ys[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * p.down >= end) continue;
        const int64_t at = (row + u * p.down) * p.packs + pack;
        gs[u] = whole<T, kWidth>(g, more, at * kWidth);
        xs[u] = reinterpret_cast<const P*>(x)[at];
        if (activation != 0) ys[u] = reinterpret_cast<const P*>(y)[at];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * p.down >= end) continue;
        float v[kWidth];
        before_activation(activation, gs[u], ys[u], v);
        if (kept) reinterpret_cast<P*>(kept)[(row + u * p.down) * p.packs + pack] = as_pack<T, kWidth>(v);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          s1[j] += v[j];
          s2[j] = fused(v[j], value_of(xs[u].values[j]) - m[j], s2[j]);
        }
      }
    }
  }
  join_rows(p, s1, s2, [&](int64_t channel, double a, double b) { parts[channel * gridDim.x + blockIdx.x] = {a, b}; });
}

// Block number channel * chunks + k.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    planes_products(const T* g, const T* more, const T* x, const T* y, int activation, const float* mean, PlanesPlan p,
                    T* kept, Two* parts) {
  using P = Pack<T, kWidth>;
  const int64_t channel = blockIdx.x / p.chunks, first = blockIdx.x % p.chunks * p.chunk;
  const int64_t end = first + p.chunk < p.units ? first + p.chunk : p.units;
  const int64_t skip = (p.channels - 1) * p.run, start = channel * p.run;
  const float m = mean[channel];
  float s1[kWidth] = {}, s2[kWidth] = {};
  for (int64_t unit = first + threadIdx.x; unit < end; unit += kUnroll * kThreads) {
    P gs[kUnroll], xs[kUnroll], ys[kUnroll];
    int64_t places[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = unit + u * kThreads;
      if (i >= end) continue;
      const int64_t at = start + i * kWidth + static_cast<int64_t>(p.per_run.divide(static_cast<uint32_t>(i))) * skip;
      places[u] = at;
      gs[u] = whole<T, kWidth>(g, more, at);
      xs[u] = *reinterpret_cast<const P*>(x + at);
      if (activation != 0) ys[u] = *reinterpret_cast<const P*>(y + at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (unit + u * kThreads >= end) continue;
      float v[kWidth];
      before_activation(activation, gs[u], ys[u], v);
      if (kept) *reinterpret_cast<P*>(kept + places[u]) = as_pack<T, kWidth>(v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        s1[j] += v[j];
        s2[j] = fused(v[j], value_of(xs[u].values[j]) - m, s2[j]);
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
  if (threadIdx.x == 0) parts[blockIdx.x] = sums;
}

// Any strides and dtypes. The walk is that of x, g and y.
template <class C>
__global__ void __launch_bounds__(kThreads)
    other_products(AnyFloat g, AnyFloat x, AnyFloat y, int activation, const C* mean, ChannelPlaces<3> walk,
                   PlanesPlan p, Two* parts) {
  const int64_t channel = blockIdx.x / p.chunks, first = blockIdx.x % p.chunks * p.chunk;
  const int64_t end = first + p.chunk < p.units ? first + p.chunk : p.units;
  C s1 = 0, s2 = 0;
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    int64_t at[3];
    places_of(walk.places, i, at);
    const int64_t* step = walk.channel_strides;
    const C v = g.load<C>(at[1] + channel * step[1]);
    if (activation != 0 && !passes(activation, y.load<C>(at[2] + channel * step[2]))) continue;
    s1 += v;
    s2 = fused(v, x.load<C>(at[0] + channel * step[0]) - mean[channel], s2);
  }
  const Two sums = block_reduce(Two{static_cast<double>(s1), static_cast<double>(s2)}, AddTwo{}, Two{0, 0});
  if (threadIdx.x == 0) parts[blockIdx.x] = sums;
}

// x_grad = scale (g - mean_g - (x - mean) slope); without x, scale g.
template <class C>
struct Slopes {
  const C *weight, *rstd;
  C *weight_grad, *bias_grad;  // null where not wanted
  C *scale, *mean_g, *slope;
};
// A warp a channel.
template <class C>
__global__ void __launch_bounds__(kThreads)
    channel_slopes(int64_t channels, const Two* parts, int64_t chunks, double places, Slopes<C> s) {
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (channel >= channels) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Two sums{0, 0};
  if (parts) {
    for (int64_t k = lane; k < chunks; k += kWarp) sums = AddTwo{}(sums, parts[channel * chunks + k]);
    sums = warp_reduce(sums, AddTwo{});
  }
  if (lane != 0) return;
  const double rstd = static_cast<double>(s.rstd[channel]), sum_gz = sums.b * rstd;
  if (s.weight_grad) s.weight_grad[channel] = static_cast<C>(sum_gz);
  if (s.bias_grad) s.bias_grad[channel] = static_cast<C>(sums.a);
  s.scale[channel] = s.weight ? s.weight[channel] * s.rstd[channel] : s.rstd[channel];
  s.mean_g[channel] = static_cast<C>(sums.a / places);
  s.slope[channel] = static_cast<C>(sum_gz / places * rstd);
}

// What the second pass reads and writes. x is null where it isn't needed, the results where they aren't wanted.
template <class T>
struct Gradient {
  const T *g, *x, *y;
  void *x_grad, *residual_grad;
  int x_grad_dtype, residual_dtype, activation;
  const float *mean, *scale, *mean_g, *slope;
};

template <class T, int kWidth>
__device__ __forceinline__ void load_packs(const Gradient<T>& t, int64_t i, Pack<T, kWidth>& g, Pack<T, kWidth>& x,
                                           Pack<T, kWidth>& y) {
  g = reinterpret_cast<const Pack<T, kWidth>*>(t.g)[i];
  if (t.x) x = reinterpret_cast<const Pack<T, kWidth>*>(t.x)[i];
  if (t.activation != 0) y = reinterpret_cast<const Pack<T, kWidth>*>(t.y)[i];
}
template <class T, int kWidth>
__device__ __forceinline__ void write_packs(const Gradient<T>& t, int64_t i, const Pack<T, kWidth>& g,
                                            const Pack<T, kWidth>& x, const Pack<T, kWidth>& y, const float* mean,
                                            const float* scale, const float* mean_g, const float* slope) {
  float v[kWidth];
  before_activation(t.activation, g, y, v);
  if (t.residual_grad) store_pack(t.residual_grad, t.residual_dtype, i, v);
  if (!t.x_grad) return;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (t.x) v[j] = fused(mean[j] - value_of(x.values[j]), slope[j], v[j] - mean_g[j]);
    v[j] *= scale[j];
  }
  store_pack(t.x_grad, t.x_grad_dtype, i, v);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 2) rows_gradient(Gradient<T> t, RowsPlan p) {
  constexpr int kTogether = 2;  // of each of up to three tensors
  const int64_t pack = static_cast<int64_t>(blockIdx.y) * p.across + (threadIdx.x & (p.across - 1));
  if (pack >= p.packs) return;
  float m[kWidth], k[kWidth], mg[kWidth], s[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int64_t c = pack * kWidth + j;
    m[j] = t.mean[c], k[j] = t.scale[c], mg[j] = t.mean_g[c], s[j] = t.slope[c];
  }
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.chunk;
  const int64_t end = first + p.chunk < p.rows ? first + p.chunk : p.rows;
  for (int64_t row = first + (threadIdx.x >> p.across_bits); row < end; row += kTogether * p.down) {
    Pack<T, kWidth> g[kTogether], x[kTogether], y[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (row + u * p.down < end) load_packs(t, (row + u * p.down) * p.packs + pack, g[u], x[u], y[u]);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int64_t at = (row + u * p.down) * p.packs + pack;
      if (row + u * p.down < end) write_packs(t, at, g[u], x[u], y[u], m, k, mg, s);
    }
  }
}

template <class T, int kWidth>
__device__ __forceinline__ void write_plane_packs(const Gradient<T>& t, int64_t i, uint32_t element,
                                                  const Pack<T, kWidth>& g, const Pack<T, kWidth>& x,
                                                  const Pack<T, kWidth>& y, const Divisor& run,
                                                  const Divisor& channels) {
  const PlaneChannels<kWidth> at(element, run, channels);
  float m[kWidth], k[kWidth], mg[kWidth], s[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const uint32_t c = at.channel[j];
    m[j] = t.mean[c], k[j] = t.scale[c], mg[j] = t.mean_g[c], s[j] = t.slope[c];
  }
  write_packs(t, i, g, x, y, m, k, mg, s);
}
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) planes_gradient(int64_t n, Gradient<T> t, Divisor run, Divisor channels) {
  constexpr int kPacks = 2;  // of each of up to three tensors
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kPacks + threadIdx.x, packs = n / kWidth;
  Pack<T, kWidth> g[kPacks], x[kPacks], y[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    if (first + u * kThreads < packs) load_packs(t, first + u * kThreads, g[u], x[u], y[u]);
  }
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int64_t i = first + u * kThreads;
    if (i < packs) write_plane_packs(t, i, static_cast<uint32_t>(i * kWidth), g[u], x[u], y[u], run, channels);
  }
  const int64_t rest = packs * kWidth + threadIdx.x;
  if (blockIdx.x == 0 && rest < n) {
    Pack<T, 1> g1, x1, y1;
    load_packs(t, rest, g1, x1, y1);
    write_plane_packs(t, rest, static_cast<uint32_t>(rest), g1, x1, y1, run, channels);
  }
}

template <class C>
struct GradientOfAny {
  Layout<6> layout;  // x, g, y, x_grad, residual_grad, channel
  AnyFloat x, g, y, x_grad, residual_grad;
  const C *mean, *scale, *mean_g, *slope;
  int activation;
  bool with_x;
  __device__ void operator()(int64_t i) const {
    int64_t at[6];
    places_of(layout, i, at);
    const int64_t c = at[5];
    C v = g.load<C>(at[1]);
    if (activation != 0 && !passes(activation, y.load<C>(at[2]))) v = 0;
    if (residual_grad.data) residual_grad.store<C>(at[4], v);
    if (!x_grad.data) return;
    if (with_x) v = fused(mean[c] - x.load<C>(at[0]), slope[c], v - mean_g[c]);
    x_grad.store<C>(at[3], scale[c] * v);
  }
};

struct AddBoth {
  template <class C>
  __device__ __forceinline__ C operator()(C a, C b) const {
    return a + b;
  }
};
// The sum of a gradient's two parts, row-major, where no pass adds them up.
class Whole {
 public:
  bool take(const Call& call, const Tensor& g, const Tensor& more) {
    g_ = &g, more_ = &more;
    sum_ = g;
    sum_.strides = strides_;
    int64_t stride = 1;
    for (int d = g.ndim - 1; d >= 0; --d) strides_[d] = stride, stride *= g.sizes[d];
    sum_.data = call.workspace<char>(g.numel * static_cast<int64_t>(item_size(g.dtype)));
    return sum_.data != nullptr;
  }
  const Tensor& sum() const { return sum_; }
  void add(const Call& call) const {
    if (g_ == nullptr) return;
    with_floating(g_->dtype, [&](auto zero) {
      using T = decltype(zero);
      map<T, T, T>(call, AddBoth{}, sum_, *g_, *more_);
    });
  }

 private:
  const Tensor *g_ = nullptr, *more_ = nullptr;
  Tensor sum_ = {};
  int64_t strides_[HALFSTEP_MAX_DIMS] = {};
};

// --- calls

// The tensors of a call; null where absent or not wanted.
struct Operands {
  const Tensor *g, *more, *x, *y, *x_grad, *residual_grad;
  int activation;
};

// `keep`: the residual's gradient is written on the way.
template <class T, int kWidth>
void take_products(const Call& call, const ChannelPlan& plan, const Operands& t, const float* mean, bool keep,
                   Two* parts) {
  T* const kept = keep ? static_cast<T*>(t.residual_grad->data) : nullptr;
  const T* const more = t.more ? static_cast<const T*>(t.more->data) : nullptr;
  const T *g = static_cast<const T*>(t.g->data), *x = static_cast<const T*>(t.x->data);
  const T* y = t.y ? static_cast<const T*>(t.y->data) : nullptr;
  if (plan.by_rows()) {
    const RowsPlan& p = plan.rows;
    launch(call, {.grid = dim3(p.chunks, p.tiles), .shared = join_bytes(p)}, rows_products<T, kWidth>, g, more, x, y,
           t.activation, mean, p, kept, parts);
  } else {
    launch(call, {.grid = plan.planes.blocks()},
           plan.planes.width == kWidth ? planes_products<T, kWidth> : planes_products<T, 1>, g, more, x, y,
           t.activation, mean, plan.planes, kept, parts);
  }
}
template <class T, int kWidth>
void write_gradients(const Call& call, const ChannelPlan& plan, const Operands& t, bool with_x, const float* mean,
                     const Slopes<float>& s) {
  const Gradient<T> gradient{.g = static_cast<const T*>(t.g->data),
                             .x = with_x ? static_cast<const T*>(t.x->data) : nullptr,
                             .y = t.y ? static_cast<const T*>(t.y->data) : nullptr,
                             .x_grad = t.x_grad ? t.x_grad->data : nullptr,
                             .residual_grad = t.residual_grad ? t.residual_grad->data : nullptr,
                             .x_grad_dtype = t.x_grad ? t.x_grad->dtype : 0,
                             .residual_dtype = t.residual_grad ? t.residual_grad->dtype : 0,
                             .activation = t.activation,
                             .mean = mean,
                             .scale = s.scale,
                             .mean_g = s.mean_g,
                             .slope = s.slope};
  const ChannelLayout& l = plan.layout;
  if (plan.by_rows()) {
    const RowsPlan p = rows_plan(l.places, l.channels, kWidth, int64_t{1} << 30, 2 * kUnroll);
    launch(call, {.grid = dim3(p.chunks, p.tiles), .alone = true}, rows_gradient<T, kWidth>, gradient, p);
  } else {
    const int64_t n = t.x->numel;
    launch(call, {.grid = grid_size(divide_up(n, kWidth), kThreads * 2, int64_t{1} << 31), .alone = true},
           planes_gradient<T, kWidth>, n, gradient, Divisor(static_cast<uint32_t>(l.run)),
           Divisor(static_cast<uint32_t>(l.channels)));
  }
}

template <class C>
halfstep_status backward(const Call& call) {
  const auto& a = call.attributes<halfstep_batch_norm_attributes>();
  const bool act = call.n > 5;
  Operands t{.g = &call.in[0],
             .more = call.has(6) ? &call.in[6] : nullptr,
             .x = &call.in[1],
             .y = act && a.activation != 0 ? &call.in[5] : nullptr,
             .x_grad = a.want_input ? &call.out[0] : nullptr,
             .residual_grad = act && a.want_residual ? &call.out[3] : nullptr,
             .activation = act ? a.activation : 0};
  const Tensor& x = *t.x;
  const int64_t channels = x.sizes[1];
  if (channels == 0) return HALFSTEP_OK;
  const bool sums = (a.training || a.want_weight || a.want_bias) && x.numel > 0;
  const auto plan_now = [&] { return channel_plan(call, x, {t.g, t.more, t.y}, {t.x_grad, t.residual_grad}); };
  // Where all are wanted, the pass that sums writes what the activation got, so that the other reads that alone.
  const auto keeps = [&](const ChannelPlan& plan) {
    return sums && plan.fast && a.training && t.activation != 0 && t.x_grad && t.residual_grad &&
           t.residual_grad->dtype == x.dtype;
  };
  Whole whole;
  if (t.more && !keeps(plan_now())) {
    if (!whole.take(call, *t.g, *t.more)) return call.no_memory();
    t.g = &whole.sum();
    t.more = nullptr;
  }
  Alike alike;
  if (!alike.take(call, x, t.g)) return call.no_memory();
  const ChannelPlan plan = plan_now();
  const bool keep = keeps(plan);
  C* scale = call.workspace<C>(3 * channels);
  Two* parts = sums ? call.workspace<Two>(channels * plan.chunks()) : nullptr;
  if (!scale || (sums && !parts)) return call.no_memory();
  const C* mean = static_cast<const C*>(call.in[3].data);
  const Slopes<C> s{.weight = call.has(2) ? static_cast<const C*>(call.in[2].data) : nullptr,
                    .rstd = static_cast<const C*>(call.in[4].data),
                    .weight_grad = a.want_weight ? static_cast<C*>(call.out[1].data) : nullptr,
                    .bias_grad = a.want_bias ? static_cast<C*>(call.out[2].data) : nullptr,
                    .scale = scale,
                    .mean_g = scale + channels,
                    .slope = scale + 2 * channels};
  const AnyFloat y = t.y ? AnyFloat(*t.y) : AnyFloat();
  whole.add(call);
  alike.move(call);
  if (sums && !plan.fast) {
    launch(call, {.grid = plan.planes.blocks()}, other_products<C>, AnyFloat(*t.g), AnyFloat(x), y, t.activation, mean,
           channel_places<3>({&x, t.g, t.y}), plan.planes, parts);
  } else if (sums) {
    if constexpr (std::is_same_v<C, float>) {
      with_fast(x.dtype, [&](auto zero) {
        using T = decltype(zero);
        with_width<T>(plan.width, [&](auto width) { take_products<T, width()>(call, plan, t, mean, keep, parts); });
      });
    }
  }
  launch(call, {.grid = grid_size(channels, kThreads / kWarp, int64_t{1} << 30)}, channel_slopes<C>, channels,
         static_cast<const Two*>(parts), plan.chunks(), static_cast<double>(std::max<int64_t>(plan.layout.places, 1)),
         s);
  if (x.numel == 0 || (!t.x_grad && !t.residual_grad)) return call.launched();
  const bool with_x = a.training && t.x_grad;
  if (keep) {
    t.g = t.residual_grad;
    t.y = t.residual_grad = nullptr;
    t.activation = 0;
  }
  if (!plan.fast) {
    const auto any = [](const Tensor* tensor) { return tensor ? AnyFloat(*tensor) : AnyFloat(); };
    for_each(
        call, x.numel,
        GradientOfAny<C>{channel_elements<5>({&x, t.g, t.y, t.x_grad, t.residual_grad}), any(t.x), any(t.g), any(t.y),
                         any(t.x_grad), any(t.residual_grad), mean, s.scale, s.mean_g, s.slope, t.activation, with_x});
  } else if constexpr (std::is_same_v<C, float>) {
    with_fast(x.dtype, [&](auto zero) {
      using T = decltype(zero);
      with_width<T>(plan.width, [&](auto width) { write_gradients<T, width()>(call, plan, t, with_x, mean, s); });
    });
  }
  return call.launched();
}

halfstep_status batch_norm_backward(Call& call) {
  return call.in[1].dtype == HALFSTEP_F64 ? backward<double>(call) : backward<float>(call);
}

constexpr KernelDef kKernels[] = {
    {.op = "batch_norm_backward",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = batch_norm_backward},
    {.op = "batch_norm_act_backward",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = batch_norm_backward},
    {.op = "batch_norm_act_backward_of_sum",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = batch_norm_backward},
};

}  // namespace

std::span<const KernelDef> norm_batch_backward_kernels() { return kKernels; }

}  // namespace hscuda
