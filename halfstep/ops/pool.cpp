// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/pool.h"

#include <vector>

#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/image_internal.h"
#include "halfstep/ops/pointwise.h"

namespace halfstep {
namespace {

using detail::as_images;
using detail::geometry;
using detail::numbers_for;
using detail::output_like_image;
using detail::output_resized;
using detail::strides_in;

// How many places windows have at most: their numbers are kept in a byte where they fit.
DType index_dtype(std::int64_t places) { return places <= 256 ? DType::u8 : DType::i32; }
std::int64_t places(const PoolAttributes& a, const Shape&) { return a.kernel[0] * a.kernel[1]; }
std::int64_t widest(std::int64_t size, std::int64_t windows) {
  std::int64_t most = 0;
  for (std::int64_t i = 0; i < windows; ++i) {
    most = std::max(most, ((i + 1) * size + windows - 1) / windows - i * size / windows);
  }
  return most;
}
std::int64_t places(const AdaptivePoolAttributes& a, const Shape& sizes) {
  return widest(sizes[2], a.sizes.values[0]) * widest(sizes[3], a.sizes.values[1]);
}

std::int64_t pooled_size(const PoolAttributes& a, int d, std::int64_t size) {
  const std::int64_t room = size + 2 * a.padding[d] - a.dilation[d] * (a.kernel[d] - 1) - 1;
  if (room < 0) return 0;
  std::int64_t n = (room + (a.ceil_mode ? a.stride[d] - 1 : 0)) / a.stride[d] + 1;
  // The last window begins inside of the image or of the padding before it.
  if (a.ceil_mode && (n - 1) * a.stride[d] >= size + a.padding[d]) --n;
  return n;
}
Shape pooled_sizes(const PoolAttributes& a, const Shape& sizes) {
  return {pooled_size(a, 0, sizes[2]), pooled_size(a, 1, sizes[3])};
}
Shape pooled_sizes(const AdaptivePoolAttributes& a, const Shape&) { return {a.sizes.values[0], a.sizes.values[1]}; }

// Attributes of the pass that comes next: `sizes` of fixed windows is the geometry of the image in all passes; of
// adaptive ones it is so in a backward pass, and in a forward pass the result's height and width, then the image's
// strides.
PoolAttributes backward_attributes(const PoolAttributes& a, const Shape&, DType dtype) {
  PoolAttributes result = a;
  result.dtype = dtype_code(dtype);
  return result;
}
AdaptivePoolAttributes backward_attributes(const AdaptivePoolAttributes& a, const Shape& image, DType dtype) {
  return {.sizes = geometry(image, strides_in(a.sizes)), .dtype = dtype_code(dtype)};
}
PoolAttributes forward_attributes(const PoolAttributes& a, const Shape&) {
  PoolAttributes result = a;
  result.dtype = kNoDType;
  return result;
}
AdaptivePoolAttributes forward_attributes(const AdaptivePoolAttributes& a, const Shape& pooled) {
  return {.sizes = geometry({pooled[2], pooled[3]}, strides_in(a.sizes)), .dtype = kNoDType};
}

// --- averages: the forward and the backward pass are each other's gradient

struct AveragePair {
  const Op* forward;
  const Op* backward;
};
template <class A>
AveragePair average_pair();

template <class A>
AveragePair define_average(const char* name, const char* signature, const char* backward, const char* backward_call) {
  AveragePair pair;
  pair.forward = &define_op({
      .name = name,
      .signature = signature,
      .infer =
          [](InferContext& ctx) {
            const Tensor& x = ctx.input(0);
            const Shape sizes = pooled_sizes(ctx.attributes<A>(), x.sizes());
            output_resized(ctx, sizes[0], sizes[1], x.dtype());
          },
      .grad =
          [](GradContext& c) {
            const A a = backward_attributes(c.attributes<A>(), c.input_sizes(0), c.grad_dtype(0));
            c.set(0, call(*average_pair<A>().backward, {&c.grad()}, a));
          },
      .attributes = &attribute_struct<A>(),
  });
  pair.backward = &define_op({
      .name = backward,
      .signature = backward_call,
      .infer =
          [](InferContext& ctx) {
            const auto& a = ctx.attributes<A>();
            output_like_image(ctx, a.sizes, dtype_or(a.dtype, ctx.input(0).dtype()));
          },
      .grad =
          [](GradContext& c) {
            const A a = forward_attributes(c.attributes<A>(), c.input_sizes(0));
            c.set(0, call(*average_pair<A>().forward, {&c.grad()}, a));
          },
      .attributes = &attribute_struct<A>(),
      .backward = true,
  });
  return pair;
}

template <>
AveragePair average_pair<PoolAttributes>() {
  static const AveragePair pair = define_average<PoolAttributes>(
      "avg_pool2d",
      "avg_pool2d(input, kernel, stride=kernel, padding=0, ceil_mode=false, count_include_pad=true, "
      "divisor_override=none)",
      "avg_pool2d_backward", "avg_pool2d_backward(gradient, kernel, stride, padding, ...)");
  return pair;
}
template <>
AveragePair average_pair<AdaptivePoolAttributes>() {
  static const AveragePair pair =
      define_average<AdaptivePoolAttributes>("adaptive_avg_pool2d", "adaptive_avg_pool2d(input, output_size)",
                                             "adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward(gradient)");
  return pair;
}

// --- maxima: the backward pass puts gradients where the index says, its own gradient picks them up there

struct MaximumOps {
  const Op* forward;
  const Op* backward;
  const Op* pick;
};
template <class A>
MaximumOps maximum_ops();

struct MaximumNames {
  const char *forward, *signature, *backward, *backward_signature, *pick, *pick_signature;
};
template <class A>
MaximumOps define_maximum(const MaximumNames& names) {
  MaximumOps ops;
  // Outputs: values, and the number of each in its window, row by row of the widest window.
  ops.forward = &define_op({
      .name = names.forward,
      .signature = names.signature,
      .infer =
          [](InferContext& ctx) {
            const Tensor& x = ctx.input(0);
            const auto& a = ctx.attributes<A>();
            const Shape sizes = pooled_sizes(a, x.sizes());
            output_resized(ctx, sizes[0], sizes[1], x.dtype());
            if (detail::is_byte_image(x)) return ctx.output({0}, DType::u8);  // no gradient will ask for it
            output_resized(ctx, sizes[0], sizes[1], index_dtype(places(a, x.sizes())));
          },
      .grad =
          [](GradContext& c) {
            if (!c.grad(0).defined()) return;
            const A a = backward_attributes(c.attributes<A>(), c.input_sizes(0), c.grad_dtype(0));
            c.set(0, call(*maximum_ops<A>().backward, {&c.grad(0), &c.output(1)}, a));
          },
      .saves = {out(1)},
      .attributes = &attribute_struct<A>(),
  });
  ops.backward = &define_op({
      .name = names.backward,
      .signature = names.backward_signature,
      .infer =
          [](InferContext& ctx) {
            const auto& a = ctx.attributes<A>();
            output_like_image(ctx, a.sizes, dtype_or(a.dtype, ctx.input(0).dtype()));
          },
      .grad =
          [](GradContext& c) {
            A a = c.attributes<A>();
            a.dtype = kNoDType;
            c.set(0, call(*maximum_ops<A>().pick, {&c.grad(), &c.input(1)}, a));
          },
      .saves = {in(1)},
      .attributes = &attribute_struct<A>(),
      .backward = true,
  });
  ops.pick = &define_op({
      .name = names.pick,
      .signature = names.pick_signature,
      .infer =
          [](InferContext& ctx) {
            const Tensor& index = ctx.input(1);
            ctx.output(index.sizes(), strides_like(index.sizes(), index.strides()), ctx.input(0).dtype());
          },
      .grad =
          [](GradContext& c) {
            A a = c.attributes<A>();
            a.dtype = dtype_code(c.grad_dtype(0));
            c.set(0, call(*maximum_ops<A>().backward, {&c.grad(), &c.input(1)}, a));
          },
      .saves = {in(1)},
      .attributes = &attribute_struct<A>(),
      .backward = true,
  });
  return ops;
}

template <>
MaximumOps maximum_ops<PoolAttributes>() {
  static const MaximumOps ops = define_maximum<PoolAttributes>(
      {.forward = "max_pool2d",
       .signature = "max_pool2d(input, kernel, stride=kernel, padding=0, dilation=1, ceil_mode=false)",
       .backward = "max_pool2d_backward",
       .backward_signature = "max_pool2d_backward(gradient, index, kernel, stride, padding, dilation)",
       .pick = "max_pool2d_pick",
       .pick_signature = "max_pool2d_pick(input, index, kernel, stride, padding, dilation)"});
  return ops;
}
template <>
MaximumOps maximum_ops<AdaptivePoolAttributes>() {
  static const MaximumOps ops =
      define_maximum<AdaptivePoolAttributes>({.forward = "adaptive_max_pool2d",
                                              .signature = "adaptive_max_pool2d(input, output_size)",
                                              .backward = "adaptive_max_pool2d_backward",
                                              .backward_signature = "adaptive_max_pool2d_backward(gradient, index)",
                                              .pick = "adaptive_max_pool2d_pick",
                                              .pick_signature = "adaptive_max_pool2d_pick(input, index)"});
  return ops;
}

[[maybe_unused]] const AveragePair defined_averages[] = {average_pair<PoolAttributes>(),
                                                         average_pair<AdaptivePoolAttributes>()};
[[maybe_unused]] const MaximumOps defined_maxima[] = {maximum_ops<PoolAttributes>(),
                                                      maximum_ops<AdaptivePoolAttributes>()};

// --- options

struct Window {
  const Shape &kernel, &stride, &padding, &dilation;
};
PoolAttributes pool_attributes(const Tensor& input, const Window& w, const char* op, int dims, bool bytes = false) {
  detail::check_image(input, op, dims, bytes);
  PoolAttributes a;
  numbers_for(w.kernel, op, "kernel", dims, 1, a.kernel);
  numbers_for(w.stride.empty() ? w.kernel : w.stride, op, "stride", dims, 1, a.stride);
  numbers_for(w.padding, op, "padding", dims, 0, a.padding);
  numbers_for(w.dilation, op, "dilation", dims, 1, a.dilation);
  for (int d = 0; d < 2; ++d) {
    if (a.padding[d] > a.kernel[d] / 2) {
      fail<ShapeError>("{}: expected a padding of at most half of the kernel {}, got {}", op, w.kernel.str(),
                       w.padding.str());
    }
  }
  return a;
}
// With what only the image of four dimensions tells.
PoolAttributes fitted(PoolAttributes a, const Tensor& x, const char* op) {
  a.sizes = geometry(x.sizes(), x.strides());
  const Shape sizes = pooled_sizes(a, x.sizes());
  if (sizes[0] < 1 || sizes[1] < 1) {
    fail<ShapeError>("{}: expected an input that holds a window of {} x {} places, got {} x {} and padding {}, {}", op,
                     a.dilation[0] * (a.kernel[0] - 1) + 1, a.dilation[1] * (a.kernel[1] - 1) + 1, x.size(2), x.size(3),
                     a.padding[0], a.padding[1]);
  }
  return a;
}

PoolAttributes max_attributes(const Tensor& input, const Shape& kernel, const MaxPoolFuncOptions& o, const char* op,
                              int dims, bool bytes = true) {
  PoolAttributes a = pool_attributes(input, {kernel, o.stride, o.padding, o.dilation}, op, dims, bytes);
  a.ceil_mode = o.ceil_mode;
  if (a.kernel[0] * a.kernel[1] > INT32_MAX) {
    fail<ShapeError>("{}: expected a kernel of at most {} places, got {}", op, INT32_MAX, kernel.str());
  }
  return a;
}
Tensor max_pool(const Tensor& input, const Shape& kernel, const MaxPoolFuncOptions& options, const char* op, int dims) {
  const PoolAttributes a = max_attributes(input, kernel, options, op, dims);
  return as_images(input, dims, [&](const Tensor& x) {
    return call_n<2>(*maximum_ops<PoolAttributes>().forward, {&x}, fitted(a, x, op))[0];
  });
}
Tensor avg_pool(const Tensor& input, const Shape& kernel, const AvgPoolFuncOptions& o, const char* op, int dims) {
  PoolAttributes a = pool_attributes(input, {kernel, o.stride, o.padding, Shape{1}}, op, dims);
  a.ceil_mode = o.ceil_mode;
  a.count_include_pad = o.count_include_pad;
  if (o.divisor_override) {
    if (*o.divisor_override == 0) fail<Error>("{}: expected a divisor other than 0", op);
    a.divisor = *o.divisor_override;
  }
  return as_images(input, dims, [&](const Tensor& x) {
    return call(*average_pair<PoolAttributes>().forward, {&x}, fitted(a, x, op));
  });
}

AdaptivePoolAttributes adaptive_attributes(const Tensor& x, const Shape& output_size, const char* op, int dims) {
  std::int64_t wanted[2] = {1, 1};
  numbers_for(output_size, op, "output size", dims, -1, wanted);
  for (int d = 0; d < 2; ++d) {
    if (wanted[d] == -1) wanted[d] = x.size(2 + d);
    if (wanted[d] == 0) fail<ShapeError>("{}: expected an output size of at least 1, got {}", op, output_size.str());
  }
  return {.sizes = geometry({wanted[0], wanted[1]}, x.strides()), .dtype = kNoDType};
}
Tensor adaptive_avg_pool(const Tensor& input, const Shape& output_size, const char* op, int dims) {
  detail::check_image(input, op, dims);
  return as_images(input, dims, [&](const Tensor& x) {
    return call(*average_pair<AdaptivePoolAttributes>().forward, {&x}, adaptive_attributes(x, output_size, op, dims));
  });
}

// --- indices as PyTorch has them

// Where the windows of one dimension begin.
std::vector<std::int64_t> begins(const PoolAttributes& a, int d, std::int64_t, std::int64_t windows) {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < windows; ++i) result.push_back(i * a.stride[d] - a.padding[d]);
  return result;
}
std::vector<std::int64_t> begins(const AdaptivePoolAttributes&, int, std::int64_t size, std::int64_t windows) {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < windows; ++i) result.push_back(i * size / windows);
  return result;
}
std::int64_t window_width(const PoolAttributes& a, const Tensor&) { return a.kernel[1]; }
std::int64_t window_width(const AdaptivePoolAttributes& a, const Tensor& x) {
  return widest(x.size(3), a.sizes.values[1]);
}
std::int64_t step(const PoolAttributes& a, int d) { return a.dilation[d]; }
std::int64_t step(const AdaptivePoolAttributes&, int) { return 1; }

template <class A>
MaxPoolResult with_indices(const Tensor& input, const A& attributes, const Tensor& x) {
  const auto [values, index] = call_n<2>(*maximum_ops<A>().forward, {&x}, attributes);
  const Tensor number = index.to(DType::i64);
  const std::int64_t width = window_width(attributes, x);
  const TensorOptions options{.dtype = DType::i64, .device = x.device()};
  const Tensor rows =
      tensor_from_integers(begins(attributes, 0, x.size(2), values.size(2)), {values.size(2), 1}, options);
  const Tensor columns =
      tensor_from_integers(begins(attributes, 1, x.size(3), values.size(3)), {values.size(3)}, options);
  const Tensor at = (rows + floor_divide(number, width) * step(attributes, 0)) * x.size(3) + columns +
                    remainder(number, width) * step(attributes, 1);
  if (input.dim() == 4) return {values, at};
  return {values.squeeze(0), at.squeeze(0)};
}

}  // namespace

Tensor max_pool2d(const Tensor& input, const Shape& kernel, const MaxPoolFuncOptions& options) {
  return max_pool(input, kernel, options, "max_pool2d", 2);
}
Tensor max_pool1d(const Tensor& input, const Shape& kernel, const MaxPoolFuncOptions& options) {
  return max_pool(input, kernel, options, "max_pool1d", 1);
}
Tensor avg_pool2d(const Tensor& input, const Shape& kernel, const AvgPoolFuncOptions& options) {
  return avg_pool(input, kernel, options, "avg_pool2d", 2);
}
Tensor avg_pool1d(const Tensor& input, const Shape& kernel, const AvgPoolFuncOptions& options) {
  return avg_pool(input, kernel, options, "avg_pool1d", 1);
}
Tensor adaptive_avg_pool2d(const Tensor& input, const Shape& output_size) {
  return adaptive_avg_pool(input, output_size, "adaptive_avg_pool2d", 2);
}
Tensor adaptive_avg_pool1d(const Tensor& input, const Shape& output_size) {
  return adaptive_avg_pool(input, output_size, "adaptive_avg_pool1d", 1);
}
Tensor adaptive_max_pool2d(const Tensor& input, const Shape& output_size) {
  const char* op = "adaptive_max_pool2d";
  detail::check_image(input, op, 2, true);
  return as_images(input, 2, [&](const Tensor& x) {
    return call_n<2>(*maximum_ops<AdaptivePoolAttributes>().forward, {&x},
                     adaptive_attributes(x, output_size, op, 2))[0];
  });
}

MaxPoolResult max_pool2d_with_indices(const Tensor& input, const Shape& kernel, const MaxPoolFuncOptions& options) {
  const char* op = "max_pool2d_with_indices";
  const PoolAttributes a = max_attributes(input, kernel, options, op, 2, false);
  const Tensor x = input.dim() == 3 ? input.unsqueeze(0) : input;
  return with_indices(input, fitted(a, x, op), x);
}
MaxPoolResult adaptive_max_pool2d_with_indices(const Tensor& input, const Shape& output_size) {
  const char* op = "adaptive_max_pool2d_with_indices";
  detail::check_image(input, op);
  const Tensor x = input.dim() == 3 ? input.unsqueeze(0) : input;
  return with_indices(input, adaptive_attributes(x, output_size, op, 2), x);
}

}  // namespace halfstep
