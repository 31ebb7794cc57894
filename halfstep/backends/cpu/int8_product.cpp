// SPDX-License-Identifier: Apache-2.0
// conv2d_int8 and linear_int8: the numbers that follow the sums, the choice of the path, and plain loops.
#include "halfstep/backends/cpu/int8_product.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/image_rows.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

constexpr const char* kNoMemory = "product of integers: out of memory for the workspace";

template <class T>
T* take_numbers(KernelContext* context, std::int64_t count) {
  return static_cast<T*>(
      context->workspace(context, static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(T)));
}

// Whether factors may be moved behind the activation: activation(s v) = s activation(v) for s > 0.
bool homogeneous(std::int32_t activation) { return activation == 0 || activation == 1 || activation == 4; }

// Fills the call's numbers of channels and steps. False with an error set.
bool prepare_numbers(KernelContext* context, const Int8ProductAttributes& a, const TensorView& weight_scale,
                     const TensorView* bias, Int8Call& call) {
  const std::int64_t channels = call.geometry.o;
  const bool residual = call.residual != nullptr;
  Int8Epilogue& e = call.epilogue;
  e.integers = call.output.dtype != DType::f32;
  e.dtype = call.output.dtype;
  e.residual = residual;
  if (residual) e.residual_dtype = call.residual->dtype;
  e.activation = a.activation;
  // What an activation has no use for would only make more primitives.
  e.a = a.activation == 2 || a.activation == 4 ? static_cast<float>(a.a) : 0;
  e.b = a.activation == 2 ? static_cast<float>(a.b) : 0;
  const double out = e.integers ? a.output_scale : 1;
  if (residual && homogeneous(a.activation)) {
    e.last = static_cast<float>(a.residual_scale / out);
  } else {
    if (residual) e.middle = static_cast<float>(a.residual_scale);
    e.last = static_cast<float>(1 / out);
  }
  if (e.integers) {
    e.zero_point = static_cast<std::int32_t>(a.output_zero_point);
    e.least = static_cast<std::int32_t>(a.quant_min - a.output_zero_point);
    e.most = static_cast<std::int32_t>(a.quant_max - a.output_zero_point);
  }
  call.zero_point = static_cast<std::int32_t>(a.input_zero_point);

  const double unit = residual ? a.residual_scale : 1,
               shift = residual ? static_cast<double>(a.residual_zero_point) : 0;
  const bool with_bias = bias != nullptr || shift != 0;
  auto* numbers = take_numbers<float>(context, 2 * channels);
  if (numbers == nullptr) {
    context->set_error(context, kNoMemory);
    return false;
  }
  for (std::int64_t o = 0; o < channels; ++o) {
    const float given = static_cast<const float*>(weight_scale.data)[o * weight_scale.strides[0]];
    const auto scale = static_cast<float>(a.input_scale * static_cast<double>(given) / unit);
    if (!(given > 0) || !std::isfinite(scale)) {
      context->set_error(context, fmt::format("expected weight_scale[{}] above 0 and finite, also times the input's "
                                              "scale, got {}",
                                              o, given)
                                      .c_str());
      return false;
    }
    numbers[o] = scale;
    if (!with_bias) continue;
    double b = 0;
    if (bias != nullptr && bias->dtype == DType::f32) {
      b = static_cast<double>(static_cast<const float*>(bias->data)[o * bias->strides[0]]) / unit;
    } else if (bias != nullptr) {
      b = static_cast<double>(static_cast<const std::int32_t*>(bias->data)[o * bias->strides[0]]) *
          static_cast<double>(scale);
    }
    numbers[channels + o] = static_cast<float>(b - shift);
  }
  call.scale = numbers;
  call.bias = with_bias ? numbers + channels : nullptr;
  return true;
}

float activated(float v, const Int8Epilogue& e) {
  switch (e.activation) {
    case 1:
      return v > 0 ? v : 0;
    case 2:
      return std::min(std::max(v, e.a), e.b);
    case 3:
      return v / (1 + std::exp(-v));
    case 4:
      return v > 0 ? v : v * e.a;
    case 5:
      return v * std::min(std::max(v * (1.0f / 6) + 0.5f, 0.0f), 1.0f);
    default:
      return v;
  }
}

template <class X>
void loop_rows(const Int8Call& call, std::int64_t begin, std::int64_t end) {
  const ConvGeometry& g = call.geometry;
  const TensorView &x = call.input, &w = call.weight;
  const Int8Epilogue& e = call.epilogue;
  const ImageStrides xs(x), ws(w), ys(call.output);
  const std::int64_t channels = g.c / g.groups, filters = g.o / g.groups;
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t n = row / g.oh, oh = row % g.oh;
    for (std::int64_t ow = 0; ow < g.ow; ++ow) {
      for (std::int64_t o = 0; o < g.o; ++o) {
        std::int32_t sum = 0;
        for (std::int64_t i = 0; i < g.kh; ++i) {
          const std::int64_t h = oh * g.stride[0] - g.before[0] + i * g.dilation[0];
          if (h < 0 || h >= g.h) continue;
          for (std::int64_t j = 0; j < g.kw; ++j) {
            const std::int64_t v = ow * g.stride[1] - g.before[1] + j * g.dilation[1];
            if (v < 0 || v >= g.w) continue;
            const X* from = elements<X>(x) + xs.at(n, o / filters * channels, h, v);
            const std::int8_t* by = elements<std::int8_t>(w) + ws.at(o, 0, i, j);
            for (std::int64_t c = 0; c < channels; ++c) {
              sum += (static_cast<std::int32_t>(from[c * xs.c]) - call.zero_point) * by[c * ws.c];
            }
          }
        }
        const std::int64_t to = ys.at(n, o, oh, ow);
        float r = 0;
        if (call.residual != nullptr) {
          const std::int64_t at = ImageStrides(*call.residual).at(n, o, oh, ow);
          r = call.residual->dtype == DType::u8 ? static_cast<float>(elements<std::uint8_t>(*call.residual)[at])
                                                : static_cast<float>(elements<std::int8_t>(*call.residual)[at]);
        }
        const float v = int8_value(e, sum, call.scale[o], call.bias == nullptr ? 0 : call.bias[o], r);
        if (e.dtype == DType::f32) {
          elements<float>(call.output)[to] = v;
        } else if (e.dtype == DType::u8) {
          elements<std::uint8_t>(call.output)[to] = static_cast<std::uint8_t>(int8_integer(e, v));
        } else {
          elements<std::int8_t>(call.output)[to] = static_cast<std::int8_t>(int8_integer(e, v));
        }
      }
    }
  }
}

// A tensor as images of other sizes: the view and what it points to.
struct ImageView {
  std::int64_t sizes[4], strides[4];
  TensorView view;
  ImageView(const TensorView& t, const std::int64_t (&s)[4]) : view(t) {
    // Dense and channels-last.
    const std::int64_t dense[] = {s[1] * s[2] * s[3], 1, s[1] * s[3], s[1]};
    std::copy_n(s, 4, sizes);
    std::copy_n(dense, 4, strides);
    view.sizes = sizes;
    view.strides = strides;
    view.ndim = 4;
    view.contiguous = false;
  }
  ImageView(const ImageView&) = delete;
  ImageView& operator=(const ImageView&) = delete;
};

Storage* storage_of_int8_weight(KernelContext* context) {
  const auto* state = static_cast<const CpuKernelState*>(context->state);
  return state == nullptr ? nullptr : state->storage(context, 1);
}

Status run_product(KernelContext* context, const Int8ProductAttributes& a, const TensorView& weight_scale,
                   const TensorView* bias, Int8Call& call) {
  if (call.output.numel == 0) return Status::ok;
  const ConvGeometry& g = call.geometry;
  call.weight_storage = storage_of_int8_weight(context);
  // 16-bit results are rounded from float32 ones.
  const TensorView result = call.output;
  const bool narrow = result.dtype == DType::f16 || result.dtype == DType::bf16;
  const std::int64_t sizes[] = {g.n, g.o, g.oh, g.ow};
  ImageView wide(result, sizes);
  if (narrow) {
    wide.view.dtype = DType::f32;
    wide.view.data = take_numbers<float>(context, result.numel);
    if (wide.view.data == nullptr) {
      context->set_error(context, kNoMemory);
      return Status::failed;
    }
    call.output = wide.view;
  }
  if (!prepare_numbers(context, a, weight_scale, bias, call)) return Status::failed;
  const Int8Path path = choose_int8_path(call, compute_isa());
  Status status = int8_by(path, context, call);
  // Where oneDNN has no kernel, and then where images lie in another way.
  if (status == Status::unsupported && path == Int8Path::onednn) status = int8_by(Int8Path::blocked, context, call);
  if (status == Status::unsupported) status = int8_by(Int8Path::reference, context, call);
  if (status == Status::ok && narrow) {
    TensorView to = result;
    store_images(static_cast<const float*>(wide.view.data), 0, g.n, to);
  }
  return status;
}

Status conv2d_int8(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const Int8ProductAttributes*>(attributes);
  const TensorView &x = in[0], &w = in[1], &y = out[0];
  Int8Call call;
  call.input = x, call.weight = w, call.output = y;
  ConvGeometry& g = call.geometry;
  g = {};
  g.n = x.sizes[0], g.c = x.sizes[1], g.h = x.sizes[2], g.w = x.sizes[3];
  g.o = y.sizes[1], g.oh = y.sizes[2], g.ow = y.sizes[3];
  g.kh = w.sizes[2], g.kw = w.sizes[3];
  g.groups = a.groups;
  for (int d = 0; d < 2; ++d) {
    g.stride[d] = a.stride[d];
    g.dilation[d] = a.dilation[d];
    g.before[d] = g.after[d] = a.padding[d];
  }
  if (n > 4 && in[4].defined) call.residual = &in[4];
  return run_product(context, a, in[2], n > 3 && in[3].defined ? &in[3] : nullptr, call);
}

// As a convolution of single places.
Status linear_int8(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const Int8ProductAttributes*>(attributes);
  const bool residual = n > 4 && in[4].defined;
  if (!in[0].contiguous || !out[0].contiguous || (residual && !in[4].contiguous)) {
    context->set_error(context, "expected a row-major input, residual and result");
    return Status::failed;
  }
  const std::int64_t outputs = in[1].sizes[0], inputs = in[1].sizes[1];
  if (out[0].numel == 0) return Status::ok;
  const std::int64_t rows = out[0].numel / outputs;
  const ImageView x(in[0], {1, inputs, 1, rows}), y(out[0], {1, outputs, 1, rows}),
      r(residual ? in[4] : out[0], {1, outputs, 1, rows});
  const std::int64_t sizes[] = {outputs, inputs, 1, 1},
                     strides[] = {in[1].strides[0], in[1].strides[1], in[1].strides[1], in[1].strides[1]};
  Int8Call call;
  call.input = x.view, call.weight = in[1], call.output = y.view;
  call.weight.sizes = sizes;
  call.weight.strides = strides;
  call.weight.ndim = 4;
  if (residual) call.residual = &r.view;
  call.geometry = {1, inputs, 1, rows, outputs, 1, rows, 1, 1, 1, {1, 1}, {1, 1}, {0, 0}, {0, 0}};
  return run_product(context, a, in[2], n > 3 && in[3].defined ? &in[3] : nullptr, call);
}

const RegisterCpuKernel registered_int8_products[] = {
    {"conv2d_int8", {DType::u8, DType::i8}, conv2d_int8},
    {"linear_int8", {DType::u8, DType::i8}, linear_int8},
};

}  // namespace

float int8_value(const Int8Epilogue& e, std::int32_t sum, float scale, float bias, float residual) {
  float v = static_cast<float>(sum) * scale;
  v = v + bias;
  if (e.residual) v = v + residual;
  v = v * e.middle;
  return activated(v, e) * e.last;
}

std::int32_t int8_integer(const Int8Epilogue& e, float v) {
  const float q = std::nearbyint(v), least = static_cast<float>(e.least), most = static_cast<float>(e.most);
  const float low = q > least ? q : least;  // NaN becomes the least
  return static_cast<std::int32_t>(low < most ? low : most) + e.zero_point;
}

Status int8_reference(Int8Call& call) {
  const ConvGeometry& g = call.geometry;
  const std::int64_t work = g.ow * g.o * (g.c / g.groups) * g.kh * g.kw;
  parallel_for(g.n * g.oh, row_grain(work), [&](std::int64_t begin, std::int64_t end) {
    call.input.dtype == DType::u8 ? loop_rows<std::uint8_t>(call, begin, end)
                                  : loop_rows<std::int8_t>(call, begin, end);
  });
  return Status::ok;
}

Int8Path choose_int8_path(const Int8Call& call, Isa isa) noexcept {
  const ConvGeometry& g = call.geometry;
  if (g.c == 0 || g.h == 0 || g.w == 0) return Int8Path::reference;
  return isa >= Isa::avx512_vnni ? Int8Path::onednn : Int8Path::blocked;
}

Status int8_by(Int8Path path, KernelContext* context, Int8Call& call) {
  switch (path) {
    case Int8Path::onednn:
      return int8_onednn(context, call);
    case Int8Path::blocked:
      return int8_blocked(context, call);
    default:
      return int8_reference(call);
  }
}

}  // namespace halfstep::cpu
