// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/conv.h"

#include <algorithm>

#include "halfstep/core/fail.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/image_internal.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

// --- Shapes

// Elements that a window spans.
std::int64_t extent(std::int64_t kernel, std::int64_t dilation) { return dilation * (kernel - 1) + 1; }

std::int64_t out_size(const ConvAttributes& a, int d, std::int64_t size, std::int64_t kernel) {
  const std::int64_t room = size + 2 * a.padding[d] - extent(kernel, a.dilation[d]);
  return room < 0 ? 0 : room / a.stride[d] + 1;
}

// Channels-last alone. Of what is dense in both ways (one channel, or images of one place) the strides tell, even those
// of dimensions of one place.
bool channels_last(const Tensor& t) {
  if (!t.is_contiguous(MemoryFormat::channels_last)) return false;
  return !t.is_contiguous(MemoryFormat::contiguous) ||
         (t.strides() == channels_last_strides(t.sizes()) && t.strides() != contiguous_strides(t.sizes()));
}
Shape layout(const Shape& sizes, bool last) { return last ? channels_last_strides(sizes) : contiguous_strides(sizes); }

// In the layout that it is in, or else in the one that the other operand asks for.
Tensor dense(const Tensor& t, bool last) {
  if (t.is_contiguous(MemoryFormat::contiguous) || t.is_contiguous(MemoryFormat::channels_last)) return t;
  return t.contiguous(last ? MemoryFormat::channels_last : MemoryFormat::contiguous);
}

// The promoted dtype of the operands, which the kernel gets them in.
DType operand_dtype(InferContext& ctx, int operands) {
  std::array<const Tensor*, 3> all = {&ctx.input(0), &ctx.input(1), &ctx.input(0)};
  if (operands > 2 && ctx.has(2)) all[2] = &ctx.input(2);
  for (const Tensor* t : all) check_floating(*t, ctx.name());
  const DType dtype = result_type(all, ctx.name());
  for (const Tensor* t : all) {
    if (t->dtype() != dtype) ctx.cast(dtype);
  }
  return dtype;
}

// --- Ops
//
// Three products of three tensors, each the gradient of the others: an output, an input and a weight that are tied by
// one geometry. Derivatives of any order are made of them.

Tensor convolve(const Tensor& x, const Tensor& weight, const Tensor& bias, ConvAttributes a);
Tensor backward_input(const Tensor& gradient, const Tensor& weight, ConvAttributes a, const Tensor& like = {});
Tensor backward_weight(const Tensor& gradient, const Tensor& x, const Tensor& weight, ConvAttributes a);

ConvAttributes with(ConvAttributes a, const Shape& sizes, DType dtype) {
  a.sizes = int_list(sizes);
  a.dtype = dtype_code(dtype);
  return a;
}
Tensor channel_sums(const Tensor& g, DType dtype) { return sum(g, {0, 2, 3}, {.dtype = dtype}); }

// Inputs: x [N, C, H, W], weight [O, C / groups, KH, KW], bias [O].
const Op& conv2d_op = define_op({
    .name = "conv2d",
    .signature = "conv2d(input, weight, bias=none, stride=1, padding=0, dilation=1, groups=1)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<ConvAttributes>();
          const Tensor &x = ctx.input(0), &w = ctx.input(1);
          // As a gradient of a transposed convolution with output_padding it may have fewer places than fit.
          const Shape sizes = a.sizes.size > 0 ? shape_of(a.sizes)
                                               : Shape{x.size(0), w.size(0), out_size(a, 0, x.size(2), w.size(2)),
                                                       out_size(a, 1, x.size(3), w.size(3))};
          ctx.output(sizes, layout(sizes, channels_last(x) || channels_last(w)),
                     dtype_or(a.dtype, operand_dtype(ctx, 3)));
        },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<ConvAttributes>();
          const Tensor& g = c.grad();
          if (c.needs(0)) {
            c.set(0, backward_input(g, c.input(1), with(a, c.input_sizes(0), c.grad_dtype(0)), c.input(0)));
          }
          if (c.needs(1)) {
            c.set(1, backward_weight(g, c.input(0), c.input(1), with(a, c.input_sizes(1), c.grad_dtype(1))));
          }
          if (c.needs(2)) c.set(2, channel_sums(g, c.grad_dtype(2)));
        },
    .saves = {in(1), in(0, 1), 0},
    .attributes = &attribute_struct<ConvAttributes>(),
});

// Inputs: gradient of the output, weight. Output: gradient of the input, of `sizes`.
const Op& backward_input_op = define_op({
    .name = "conv2d_backward_input",
    .signature = "conv2d_backward_input(gradient, weight)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<ConvAttributes>();
          const Shape sizes = shape_of(a.sizes);
          ctx.output(sizes, layout(sizes, channels_last(ctx.input(0)) || channels_last(ctx.input(1))),
                     dtype_or(a.dtype, operand_dtype(ctx, 2)));
        },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<ConvAttributes>();
          if (c.needs(0)) c.set(0, convolve(c.grad(), c.input(1), {}, with(a, c.input_sizes(0), c.grad_dtype(0))));
          if (c.needs(1)) {
            c.set(1, backward_weight(c.input(0), c.grad(), c.input(1), with(a, c.input_sizes(1), c.grad_dtype(1))));
          }
        },
    .saves = {in(1), in(0, 1)},
    .attributes = &attribute_struct<ConvAttributes>(),
    .backward = true,
});

// Inputs: gradient of the output, input, and a weight whose layout the result gets (its values aren't read).
const Op& backward_weight_op = define_op({
    .name = "conv2d_backward_weight",
    .signature = "conv2d_backward_weight(gradient, input, weight=none)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<ConvAttributes>();
          const Shape sizes = shape_of(a.sizes);
          const bool last = ctx.has(2) && channels_last(ctx.input(2));
          ctx.output(sizes, layout(sizes, last), dtype_or(a.dtype, operand_dtype(ctx, 2)));
        },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<ConvAttributes>();
          if (c.needs(0)) c.set(0, convolve(c.input(1), c.grad(), {}, with(a, c.input_sizes(0), c.grad_dtype(0))));
          if (c.needs(1)) c.set(1, backward_input(c.input(0), c.grad(), with(a, c.input_sizes(1), c.grad_dtype(1))));
        },
    .saves = {in(1), in(0)},
    .attributes = &attribute_struct<ConvAttributes>(),
    .backward = true,
});

// Inputs: x [N, C, H, W], weight [C, O / groups, KH, KW], bias [O]; the result's sizes are attributes. x stands where
// the gradient of a convolution's output does.
const Op& conv_transpose2d_op = define_op({
    .name = "conv_transpose2d",
    .signature =
        "conv_transpose2d(input, weight, bias=none, stride=1, padding=0, output_padding=0, groups=1, dilation=1)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<ConvAttributes>();
          const Shape sizes = shape_of(a.sizes);
          ctx.output(sizes, layout(sizes, channels_last(ctx.input(0)) || channels_last(ctx.input(1))),
                     dtype_or(a.dtype, operand_dtype(ctx, 3)));
        },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<ConvAttributes>();
          const Tensor& g = c.grad();
          if (c.needs(0)) c.set(0, convolve(g, c.input(1), {}, with(a, c.input_sizes(0), c.grad_dtype(0))));
          if (c.needs(1)) {
            c.set(1, backward_weight(c.input(0), g, c.input(1), with(a, c.input_sizes(1), c.grad_dtype(1))));
          }
          if (c.needs(2)) c.set(2, channel_sums(g, c.grad_dtype(2)));
        },
    .saves = {in(1), in(0, 1), 0},
    .attributes = &attribute_struct<ConvAttributes>(),
});

Tensor convolve(const Tensor& x, const Tensor& weight, const Tensor& bias, ConvAttributes a) {
  const bool last = channels_last(x) || channels_last(weight);
  const Tensor dense_x = dense(x, last), dense_weight = dense(weight, last);
  const Tensor dense_bias = bias.defined() ? bias.contiguous() : bias;
  return call(conv2d_op, {&dense_x, &dense_weight, &dense_bias}, a);
}
// In the layout of `like`, where it is given: a pooling's gradient may be of none.
Tensor backward_input(const Tensor& gradient, const Tensor& weight, ConvAttributes a, const Tensor& like) {
  const bool follow = like.defined() && channels_last(like);
  const bool last = follow || channels_last(gradient) || channels_last(weight);
  const Tensor g = follow ? to_channels_last(gradient) : dense(gradient, last);
  const Tensor w = dense(weight, last);
  return call(backward_input_op, {&g, &w}, a);
}
Tensor backward_weight(const Tensor& gradient, const Tensor& x, const Tensor& weight, ConvAttributes a) {
  const bool last = channels_last(gradient) || channels_last(x);
  const Tensor g = dense(gradient, last), dense_x = dense(x, last), like = weight.detach();
  return call(backward_weight_op, {&g, &dense_x, &like}, a);
}

const Op& conv1d_op =
    define_op({.name = "conv1d",
               .signature = "conv1d(input, weight, bias=none, stride=1, padding=0, dilation=1, groups=1)",
               .composite = true});
const Op& conv_transpose1d_op = define_op(
    {.name = "conv_transpose1d",
     .signature =
         "conv_transpose1d(input, weight, bias=none, stride=1, padding=0, output_padding=0, groups=1, dilation=1)",
     .composite = true});

// --- What the public functions check

// One number for all dimensions, or one for each. Sequences are images of one row, so that theirs stands last.
void read_list(const Shape& given, int dims, std::int64_t least, std::int64_t first, const char* op, const char* what,
               std::int64_t (&to)[2]) {
  if (given.size() != 1 && given.size() != dims) {
    fail<ShapeError>("{}: expected {} of 1{} number{}, got {}", op, what, dims == 1 ? "" : " or 2",
                     dims == 1 ? "" : "s", given.str());
  }
  for (const std::int64_t v : given) detail::check_number(v, given, op, what, least);
  to[0] = dims == 1 ? first : given[0];
  to[1] = given.back();
}

ConvAttributes attributes_of(const char* op, int dims, const Shape& stride, const Shape& padding, const Shape& dilation,
                             std::int64_t groups) {
  ConvAttributes a;
  read_list(stride, dims, 1, 1, op, "a stride", a.stride);
  read_list(padding, dims, 0, 0, op, "a padding", a.padding);
  read_list(dilation, dims, 1, 1, op, "a dilation", a.dilation);
  if (groups < 1) fail<ShapeError>("{}: expected groups of at least 1, got {}", op, groups);
  if (groups > INT32_MAX) fail<ShapeError>("{}: expected groups of at most {}, got {}", op, INT32_MAX, groups);
  a.groups = groups;
  return a;
}

// `out` channels of the result for this weight.
void check_operands(const char* op, int dims, const Tensor& input, const Tensor& weight, const Tensor& bias,
                    std::int64_t groups, bool transposed) {
  check_defined(input, op, "an input");
  check_defined(weight, op, "a weight");
  check_floating(input, op);
  check_floating(weight, op);
  const char* places = dims == 1 ? "L" : "H, W";
  if (input.dim() != dims + 1 && input.dim() != dims + 2) {
    fail<ShapeError>("{}: expected an input [N, C, {}] or [C, {}], got {}", op, places, places, input.sizes().str());
  }
  if (weight.dim() != dims + 2) {
    fail<ShapeError>("{}: expected a weight of {} dimensions, got {}", op, dims + 2, weight.sizes().str());
  }
  const std::int64_t channels = input.size(-dims - 1);
  const std::int64_t wanted = transposed ? weight.size(0) : weight.size(1) * groups;
  if (channels != wanted) {
    fail<ShapeError>("{}: expected an input of {} channels for the weight {} in {} group{}, got {}", op, wanted,
                     weight.sizes().str(), groups, groups == 1 ? "" : "s", input.sizes().str());
  }
  if (weight.size(0) % groups != 0) {
    fail<ShapeError>("{}: expected a number of groups that divides the {} filters of {}, got {}", op, weight.size(0),
                     weight.sizes().str(), groups);
  }
  for (int d = 2; d < weight.dim(); ++d) {
    if (weight.size(d) < 1) fail<ShapeError>("{}: expected a window of some size, got {}", op, weight.sizes().str());
  }
  if (!bias.defined()) return;
  check_floating(bias, op);
  const std::int64_t out = transposed ? weight.size(1) * groups : weight.size(0);
  if (bias.dim() != 1 || bias.size(0) != out) {
    fail<ShapeError>("{}: expected a bias [{}] for the weight {}, got {}", op, out, weight.sizes().str(),
                     bias.sizes().str());
  }
}

// Images of one row from sequences, a batch of one from none; and back.
Tensor as_images(const Tensor& t, int dims) {
  const Tensor batch = t.dim() == dims + 1 ? t.unsqueeze(0) : t;
  return dims == 1 ? batch.unsqueeze(2) : batch;
}
Tensor as_given(const Tensor& t, const Tensor& input, int dims) {
  const Tensor result = dims == 1 ? t.squeeze(2) : t;
  return input.dim() == dims + 1 ? result.squeeze(0) : result;
}

Tensor conv(const char* op, int dims, const Tensor& input, const Tensor& weight, const Tensor& bias,
            const ConvFuncOptions& o) {
  const ConvAttributes a = attributes_of(op, dims, o.stride, o.padding, o.dilation, o.groups);
  check_operands(op, dims, input, weight, bias, o.groups, false);
  for (int d = 0; d < dims; ++d) {
    const int at = 2 - dims + d;
    const std::int64_t size = input.size(input.dim() - dims + d), window = extent(weight.size(2 + d), a.dilation[at]);
    if (size + 2 * a.padding[at] < window) {
      fail<ShapeError>("{}: expected an input that a window of {} fits in, got {} with padding {}", op, window,
                       input.sizes().str(), a.padding[at]);
    }
  }
  if (input.dim() == 4) return convolve(input, weight, bias, a);
  const Tensor w = dims == 1 ? weight.unsqueeze(2) : weight;
  return as_given(convolve(as_images(input, dims), w, bias, a), input, dims);
}

Tensor conv_transpose(const char* op, int dims, const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const ConvTransposeFuncOptions& o) {
  ConvAttributes a = attributes_of(op, dims, o.stride, o.padding, o.dilation, o.groups);
  std::int64_t extra[2];
  read_list(o.output_padding, dims, 0, 0, op, "an output_padding", extra);
  check_operands(op, dims, input, weight, bias, o.groups, true);
  const Tensor x = as_images(input, dims), w = dims == 1 ? weight.unsqueeze(2) : weight;
  Shape sizes{x.size(0), w.size(1) * a.groups};
  for (int d = 0; d < 2; ++d) {
    if (extra[d] != 0 && extra[d] >= std::max(a.stride[d], a.dilation[d])) {
      fail<ShapeError>(
          "{}: expected an output_padding less than stride or dilation, got {} with stride {}, dilation {}", op,
          extra[d], a.stride[d], a.dilation[d]);
    }
    const std::int64_t size =
        (x.size(2 + d) - 1) * a.stride[d] - 2 * a.padding[d] + extent(w.size(2 + d), a.dilation[d]) + extra[d];
    if (size < 1 || x.size(2 + d) < 1) {
      fail<ShapeError>("{}: expected a result of some size, got {} places from {} with padding {}", op, size,
                       input.sizes().str(), a.padding[d]);
    }
    sizes.push_back(size);
  }
  a.sizes = int_list(sizes);
  const bool last = channels_last(x) || channels_last(w);
  const Tensor dense_x = dense(x, last), dense_w = dense(w, last);
  const Tensor dense_bias = bias.defined() ? bias.contiguous() : bias;
  return as_given(call(conv_transpose2d_op, {&dense_x, &dense_w, &dense_bias}, a), input, dims);
}

}  // namespace

Tensor conv2d(const Tensor& input, const Tensor& weight, const Tensor& bias, const ConvFuncOptions& options) {
  return conv("conv2d", 2, input, weight, bias, options);
}

Tensor conv1d(const Tensor& input, const Tensor& weight, const Tensor& bias, const ConvFuncOptions& options) {
  return composite(conv1d_op, {&input, &weight, &bias},
                   [&](std::span<const Tensor> in) { return conv("conv1d", 1, in[0], in[1], in[2], options); });
}

Tensor conv_transpose2d(const Tensor& input, const Tensor& weight, const Tensor& bias,
                        const ConvTransposeFuncOptions& options) {
  return conv_transpose("conv_transpose2d", 2, input, weight, bias, options);
}

Tensor conv_transpose1d(const Tensor& input, const Tensor& weight, const Tensor& bias,
                        const ConvTransposeFuncOptions& options) {
  return composite(conv_transpose1d_op, {&input, &weight, &bias}, [&](std::span<const Tensor> in) {
    return conv_transpose("conv_transpose1d", 1, in[0], in[1], in[2], options);
  });
}

}  // namespace halfstep
