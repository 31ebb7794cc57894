// SPDX-License-Identifier: Apache-2.0
#include "device/block.cuh"
#include "device/elementwise.cuh"
#include "kernels/conv_direct.h"

namespace hscuda {
namespace {

/// A convolution as kernels get it.
struct Geometry {
  int64_t n, c, h, w;  // of x
  int64_t o, oh, ow;   // of y
  int64_t kh, kw;
  int64_t inner, filters;    // channels and filters of a group
  int64_t x[4], k[4], y[4];  // strides; k are the weight's
  int64_t stride[2], padding[2], dilation[2];

  /// Where element `k` of the window of output place `p` lies in the input; may be outside.
  __device__ int64_t place(int d, int64_t p, int64_t k) const { return p * stride[d] - padding[d] + k * dilation[d]; }
  /// The output place whose window's element `k` lies on input place `i`, or -1.
  __device__ int64_t place_back(int d, int64_t i, int64_t k, int64_t size) const {
    const int64_t p = i + padding[d] - k * dilation[d];
    return p >= 0 && p % stride[d] == 0 && p / stride[d] < size ? p / stride[d] : -1;
  }
};

Geometry geometry_of(const ConvCall& conv) {
  Geometry g = {};
  g.n = conv.x->sizes[0], g.c = conv.x->sizes[1], g.h = conv.x->sizes[2], g.w = conv.x->sizes[3];
  g.o = conv.y->sizes[1], g.oh = conv.y->sizes[2], g.ow = conv.y->sizes[3];
  g.kh = conv.w->sizes[2], g.kw = conv.w->sizes[3];
  g.inner = g.c / conv.attributes->groups, g.filters = g.o / conv.attributes->groups;
  for (int d = 0; d < 4; ++d) {
    g.x[d] = conv.x->strides[d], g.k[d] = conv.w->strides[d], g.y[d] = conv.y->strides[d];
  }
  for (int d = 0; d < 2; ++d) {
    g.stride[d] = conv.attributes->stride[d];
    g.padding[d] = conv.attributes->padding[d];
    g.dilation[d] = conv.attributes->dilation[d];
  }
  return g;
}

/// The result's dtype isn't part of the kernels' types: it costs little beside the sum.
template <class A>
__device__ void store(void* to, int dtype, int64_t at, A value) {
  with_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(to)[at] = convert<T>(value);
  });
}

struct Result {
  void* data;
  int dtype;
  const void* bias;  // of the operands' dtype
  int64_t bias_stride;
};

template <class T>
__device__ Accumulate<T> bias_of(const Result& r, int64_t channel) {
  return r.bias == nullptr ? Accumulate<T>(0) : value_of(static_cast<const T*>(r.bias)[channel * r.bias_stride]);
}

// A thread for an element. Sums are of a window's place each first, then of the places, so that no sum is very long.
template <class T>
__global__ void __launch_bounds__(kThreads) conv_output(Geometry g, const T* x, const T* k, Result y) {
  for (int64_t i = thread_index(); i < g.n * g.o * g.oh * g.ow; i += grid_threads()) {
    const int64_t q = i % g.ow, p = i / g.ow % g.oh, o = i / (g.ow * g.oh) % g.o, n = i / (g.ow * g.oh * g.o);
    const int64_t first = o / g.filters * g.inner;
    Accumulate<T> sum = 0;
    for (int64_t r = 0; r < g.kh; ++r) {
      const int64_t a = g.place(0, p, r);
      if (a < 0 || a >= g.h) continue;
      for (int64_t s = 0; s < g.kw; ++s) {
        const int64_t b = g.place(1, q, s);
        if (b < 0 || b >= g.w) continue;
        const T* from = x + n * g.x[0] + first * g.x[1] + a * g.x[2] + b * g.x[3];
        const T* weight = k + o * g.k[0] + r * g.k[2] + s * g.k[3];
        Accumulate<T> part = 0;
        for (int64_t c = 0; c < g.inner; ++c) {
          part += Accumulate<T>(value_of(from[c * g.x[1]])) * Accumulate<T>(value_of(weight[c * g.k[1]]));
        }
        sum += part;
      }
    }
    store(y.data, y.dtype, n * g.y[0] + o * g.y[1] + p * g.y[2] + q * g.y[3], sum + bias_of<T>(y, o));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) conv_input(Geometry g, const T* y, const T* k, Result x) {
  for (int64_t i = thread_index(); i < g.n * g.c * g.h * g.w; i += grid_threads()) {
    const int64_t b = i % g.w, a = i / g.w % g.h, c = i / (g.w * g.h) % g.c, n = i / (g.w * g.h * g.c);
    const int64_t first = c / g.inner * g.filters;
    Accumulate<T> sum = 0;
    for (int64_t r = 0; r < g.kh; ++r) {
      const int64_t p = g.place_back(0, a, r, g.oh);
      if (p < 0) continue;
      for (int64_t s = 0; s < g.kw; ++s) {
        const int64_t q = g.place_back(1, b, s, g.ow);
        if (q < 0) continue;
        const T* from = y + n * g.y[0] + first * g.y[1] + p * g.y[2] + q * g.y[3];
        const T* weight = k + first * g.k[0] + c % g.inner * g.k[1] + r * g.k[2] + s * g.k[3];
        Accumulate<T> part = 0;
        for (int64_t o = 0; o < g.filters; ++o) {
          part += Accumulate<T>(value_of(from[o * g.y[1]])) * Accumulate<T>(value_of(weight[o * g.k[0]]));
        }
        sum += part;
      }
    }
    store(x.data, x.dtype, n * g.x[0] + c * g.x[1] + a * g.x[2] + b * g.x[3], sum + bias_of<T>(x, c));
  }
}

// A block for an element, whose sum is over all images; the places are dealt out to the threads.
template <class T>
__global__ void __launch_bounds__(kThreads) conv_weight(Geometry g, const T* x, const T* y, Result k) {
  const int64_t i = blockIdx.x;
  const int64_t s = i % g.kw, r = i / g.kw % g.kh, c = i / (g.kw * g.kh) % g.inner, o = i / (g.kw * g.kh * g.inner);
  const int64_t from = o / g.filters * g.inner + c;
  Accumulate<T> sum = 0;
  for (int64_t place = threadIdx.x; place < g.n * g.oh * g.ow; place += blockDim.x) {
    const int64_t q = place % g.ow, p = place / g.ow % g.oh, n = place / (g.ow * g.oh);
    const int64_t a = g.place(0, p, r), b = g.place(1, q, s);
    if (a < 0 || a >= g.h || b < 0 || b >= g.w) continue;
    sum += Accumulate<T>(value_of(y[n * g.y[0] + o * g.y[1] + p * g.y[2] + q * g.y[3]])) *
           Accumulate<T>(value_of(x[n * g.x[0] + from * g.x[1] + a * g.x[2] + b * g.x[3]]));
  }
  sum = block_reduce(sum, Sum{}, Accumulate<T>(0));
  if (threadIdx.x == 0) store(k.data, k.dtype, o * g.k[0] + c * g.k[1] + r * g.k[2] + s * g.k[3], sum);
}

struct Add {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Every combination of dtypes: in float64, which rounds the exact sum of two float32 at most a second time, far below
// the result's last place.
__global__ void __launch_bounds__(kThreads) add_bias_any(Layout<3> layout, void* to, int to_dtype, const void* sums,
                                                         int dtype, const void* bias, int bias_dtype) {
  const auto load = [](const void* data, int type, int64_t at) {
    return with_floating(
        type, [&](auto zero) { return static_cast<double>(value_of(static_cast<const decltype(zero)*>(data)[at])); });
  };
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[3];
    layout.places(i, at);
    store(to, to_dtype, at[0], load(sums, dtype, at[1]) + load(bias, bias_dtype, at[2]));
  }
}

}  // namespace

void add_channel_bias(const Call& call, const Tensor& to, const Tensor& sums, const Tensor& bias) {
  const int64_t sizes[] = {bias.numel, 1, 1}, strides[] = {bias.strides[0], 0, 0};
  Tensor row = bias;
  row.sizes = sizes, row.strides = strides, row.ndim = 3;
  const auto quick = [&](auto out_zero, auto sum_zero, auto bias_zero) {
    using Out = decltype(out_zero);
    using In = decltype(sum_zero);
    using Bias = decltype(bias_zero);
    map<Out, In, Bias>(call, Add{}, to, sums, row);
  };
  const auto are = [&](int a, int b, int c) { return to.dtype == a && sums.dtype == b && bias.dtype == c; };
  if (are(HALFSTEP_F32, HALFSTEP_F32, HALFSTEP_F32)) return quick(float{}, float{}, float{});
  if (are(HALFSTEP_F16, HALFSTEP_F32, HALFSTEP_F16)) return quick(Half{}, float{}, Half{});
  if (are(HALFSTEP_BF16, HALFSTEP_F32, HALFSTEP_BF16)) return quick(BFloat16{}, float{}, BFloat16{});
  const Layout<3> layout = layout_of<3>({&to, &sums, &row});
  launch(call, {.grid = grid_size(layout.numel, kThreads), .alone = true}, add_bias_any, layout, to.data,
         static_cast<int>(to.dtype), sums.data, static_cast<int>(sums.dtype), bias.data, static_cast<int>(bias.dtype));
}

halfstep_status convolve_directly(Call& call, const ConvCall& conv) {
  const Tensor& result = conv.result();
  if (result.numel == 0) return HALFSTEP_OK;
  const Geometry g = geometry_of(conv);
  const Result to = {result.data, result.dtype, conv.bias ? conv.bias->data : nullptr,
                     conv.bias ? conv.bias->strides[0] : 0};
  with_floating(conv.operand().dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto *x = static_cast<const T*>(conv.x->data), *k = static_cast<const T*>(conv.w->data),
               *y = static_cast<const T*>(conv.y->data);
    if (conv.part == ConvPart::kWeight) {
      const auto threads =
          static_cast<unsigned>(std::clamp<int64_t>(divide_up(g.n * g.oh * g.ow, kWarp), 1, 8)) * kWarp;
      launch(call, {.grid = static_cast<unsigned>(result.numel), .block = threads}, conv_weight<T>, g, x, y, to);
      return;
    }
    const Launch how{.grid = grid_size(result.numel, kThreads), .alone = true};
    if (conv.part == ConvPart::kOutput) {
      launch(call, how, conv_output<T>, g, x, k, to);
    } else {
      launch(call, how, conv_input<T>, g, y, k, to);
    }
  });
  return call.launched();
}

}  // namespace hscuda
