// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/int8.h"

#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/image_internal.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/reduce_inl.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

// 255 * 128 times this is below 2^31.
constexpr std::int64_t kMostProducts = 65793;

bool is_byte(DType dtype) { return dtype == DType::u8 || dtype == DType::i8; }

void check_bytes(const Tensor& t, const char* op, const char* what) {
  check_defined(t, op, what);
  if (!is_byte(t.dtype())) fail<DTypeError>("{}: expected {} of u8 or i8, got {}", op, what, name(t.dtype()));
}

void check_scale(double scale, const char* op, const char* what) {
  const auto s = static_cast<float>(scale);
  if (!(s > 0) || !std::isfinite(s)) {
    fail<Error>("{}: expected a scale above 0 and finite in float32 for {}, got {}", op, what, scale);
  }
}
struct ByteRange {
  std::int64_t least, most;
};
ByteRange range_of(DType dtype) { return dtype == DType::u8 ? ByteRange{0, 255} : ByteRange{-128, 127}; }

void check_zero_point(std::int64_t zero_point, DType dtype, const char* op, const char* what) {
  const auto [least, most] = range_of(dtype);
  if (zero_point < least || zero_point > most) {
    fail<Error>("{}: expected a zero_point from {} to {} for {} of {}, got {}", op, least, most, what, name(dtype),
                zero_point);
  }
}
void check_grid(const Int8Grid& grid, DType dtype, const char* op, const char* what) {
  check_scale(grid.scale, op, what);
  check_zero_point(grid.zero_point, dtype, op, what);
}
// The fields of a result, which is on a grid or floating.
template <class A>
void set_output(A& a, const std::optional<Int8Grid>& grid, DType dtype, const char* op) {
  if (!grid) {
    if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16) {
      fail<DTypeError>("{}: expected a dtype of f32, f16 or bf16 for a result without a grid, got {}", op, name(dtype));
    }
    a.dtype = static_cast<std::uint8_t>(dtype);
    return;
  }
  if (!is_byte(grid->dtype)) {
    fail<DTypeError>("{}: expected an output grid of u8 or i8, got {}", op, name(grid->dtype));
  }
  check_grid(*grid, grid->dtype, op, "the output");
  const auto [least, most] = range_of(grid->dtype);
  if (grid->quant_min > grid->quant_max || grid->quant_min < least || grid->quant_max > most) {
    fail<Error>("{}: expected quant_min up to quant_max from {} to {} for an output of {}, got {} and {}", op, least,
                most, name(grid->dtype), grid->quant_min, grid->quant_max);
  }
  a.output_scale = grid->scale;
  a.output_zero_point = grid->zero_point;
  a.quant_min = grid->quant_min;
  a.quant_max = grid->quant_max;
  a.dtype = static_cast<std::uint8_t>(grid->dtype);
}

DType result_dtype(std::uint8_t code) { return static_cast<DType>(code); }

// --- products

std::int64_t window_extent(const Int8ProductAttributes& a, int d, std::int64_t kernel) {
  return a.dilation[d] * (kernel - 1) + 1;
}

// Inputs: x, weight, weight_scale, bias, residual.
const Op& conv2d_int8_op = define_op({
    .name = "conv2d_int8",
    .signature = "conv2d_int8(input, weight, weight_scale, bias=none, residual=none, input grid, residual grid, "
                 "output grid or dtype, activation=none, stride=1, padding=0, dilation=1, groups=1)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<Int8ProductAttributes>();
          const Tensor &x = ctx.input(0), &w = ctx.input(1);
          Shape sizes{x.size(0), w.size(0), 0, 0};
          for (int d = 0; d < 2; ++d) {
            const std::int64_t room = x.size(2 + d) + 2 * a.padding[d] - window_extent(a, d, w.size(2 + d));
            sizes[2 + d] = room < 0 ? 0 : room / a.stride[d] + 1;
          }
          ctx.output(sizes, channels_last_strides(sizes), result_dtype(a.dtype));
        },
    .attributes = &attribute_struct<Int8ProductAttributes>(),
});

const Op& linear_int8_op = define_op({
    .name = "linear_int8",
    .signature = "linear_int8(input, weight, weight_scale, bias=none, residual=none, input grid, residual grid, "
                 "output grid or dtype, activation=none)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<Int8ProductAttributes>();
          Shape sizes = ctx.input(0).sizes();
          sizes[sizes.size() - 1] = ctx.input(1).size(0);
          ctx.output(sizes, result_dtype(a.dtype));
        },
    .attributes = &attribute_struct<Int8ProductAttributes>(),
});

Int8ProductAttributes product_attributes(const Tensor& input, const Tensor& weight, const Tensor& scale,
                                         const Tensor& bias, const Tensor& residual, const Int8ProductOptions& o,
                                         int dims, const char* op) {
  check_bytes(input, op, "an input");
  check_defined(weight, op, "a weight");
  check_defined(scale, op, "a weight_scale");
  if (weight.dtype() != DType::i8) fail<DTypeError>("{}: expected a weight of i8, got {}", op, name(weight.dtype()));
  if (scale.dtype() != DType::f32) {
    fail<DTypeError>("{}: expected a weight_scale of f32, got {}", op, name(scale.dtype()));
  }
  if (weight.dim() != dims) {
    fail<ShapeError>("{}: expected a weight of {} dimensions, got {}", op, dims, weight.sizes().str());
  }
  const Shape channels{weight.size(0)};
  if (scale.sizes() != channels) {
    fail<ShapeError>("{}: expected a weight_scale {} for the weight {}, got {}", op, channels.str(),
                     weight.sizes().str(), scale.sizes().str());
  }
  if (bias.defined()) {
    if (bias.dtype() != DType::i32 && bias.dtype() != DType::f32) {
      fail<DTypeError>("{}: expected a bias of f32 or i32, got {}", op, name(bias.dtype()));
    }
    if (bias.sizes() != channels) {
      fail<ShapeError>("{}: expected a bias {} for the weight {}, got {}", op, channels.str(), weight.sizes().str(),
                       bias.sizes().str());
    }
  }
  std::int64_t products = 1;
  for (int i = 1; i < dims; ++i) products *= weight.size(i);
  if (products > kMostProducts) {
    fail<ShapeError>("{}: expected a weight of at most {} products a sum, which 32 bits hold, got {}", op,
                     kMostProducts, weight.sizes().str());
  }
  Int8ProductAttributes a;
  check_grid(o.input, input.dtype(), op, "the input");
  a.input_scale = o.input.scale;
  a.input_zero_point = o.input.zero_point;
  if (residual.defined()) {
    check_bytes(residual, op, "a residual");
    check_grid(o.residual, residual.dtype(), op, "the residual");
    a.residual_scale = o.residual.scale;
    a.residual_zero_point = o.residual.zero_point;
  }
  set_output(a, o.output, o.dtype, op);
  if (o.activation < Int8Activation::none || o.activation > Int8Activation::hardswish) {
    fail<Error>("{}: expected a known activation, got number {}", op, static_cast<std::int32_t>(o.activation));
  }
  if (o.activation == Int8Activation::hardtanh && !(o.a <= o.b)) {
    fail<Error>("{}: expected a <= b for hardtanh, got {} and {}", op, o.a, o.b);
  }
  if (o.activation == Int8Activation::leaky_relu && !std::isfinite(o.a)) {
    fail<Error>("{}: expected a finite slope a for leaky_relu, got {}", op, o.a);
  }
  a.activation = static_cast<std::int32_t>(o.activation);
  a.a = o.a;
  a.b = o.b;
  return a;
}

// --- what stands between products

const Op& add_int8_op = define_op({
    .name = "add_int8",
    .signature = "add_int8(a, b, a_grid, b_grid, output grid or dtype, relu=false)",
    .infer =
        [](InferContext& ctx) {
          const Tensor& x = ctx.input(0);
          ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()),
                     result_dtype(ctx.attributes<Int8GridAttributes>().dtype));
        },
    .attributes = &attribute_struct<Int8GridAttributes>(),
});

const Op& lookup_int8_op = define_op({
    .name = "lookup_int8",
    .signature = "lookup_int8(input, table)",
    .infer =
        [](InferContext& ctx) {
          const Tensor& x = ctx.input(0);
          ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), ctx.input(1).dtype());
        },
    .attributes = &attribute_struct<Int8GridAttributes>(),
});

const Op& mean_int8_op = define_op({
    .name = "mean_int8",
    .signature = "mean_int8(input, dims, keepdim, input grid, output grid or dtype)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<Int8GridAttributes>();
          const Shape sizes = detail::reduced_sizes(ctx.input(0).sizes(), shape_of(a.dims), a.keepdim, ctx.name());
          ctx.output(sizes, result_dtype(a.dtype));
        },
    .attributes = &attribute_struct<Int8GridAttributes>(),
});

// Inputs: x, weight, scale, bias.
const Op& linear_weight_only_op = define_op({
    .name = "linear_weight_only",
    .signature = "linear_weight_only(input, weight, scale, bias=none, group_size=0)",
    .infer =
        [](InferContext& ctx) {
          Shape sizes = ctx.input(0).sizes();
          sizes[sizes.size() - 1] = ctx.input(1).size(0);
          ctx.output(sizes, ctx.input(0).dtype());
        },
    .attributes = &attribute_struct<WeightOnlyAttributes>(),
    .state_inputs = in(2, 3),  // scale and bias are float32 to the kernel
});

}  // namespace

Tensor conv2d_int8(const Tensor& input, const Tensor& weight, const Tensor& weight_scale, const Tensor& bias,
                   const Tensor& residual, const Conv2dInt8Options& o) {
  const char* op = "conv2d_int8";
  Int8ProductAttributes a = product_attributes(input, weight, weight_scale, bias, residual, o, 4, op);
  detail::numbers_for(o.stride, op, "stride", 2, 1, a.stride);
  detail::numbers_for(o.padding, op, "padding", 2, 0, a.padding);
  detail::numbers_for(o.dilation, op, "dilation", 2, 1, a.dilation);
  if (o.groups < 1 || o.groups > INT32_MAX) {
    fail<ShapeError>("{}: expected groups of at least 1, got {}", op, o.groups);
  }
  a.groups = o.groups;
  if (input.dim() != 4) fail<ShapeError>("{}: expected an input [N, C, H, W], got {}", op, input.sizes().str());
  if (input.size(1) != weight.size(1) * o.groups) {
    fail<ShapeError>("{}: expected an input of {} channels for the weight {} in {} group{}, got {}", op,
                     weight.size(1) * o.groups, weight.sizes().str(), o.groups, o.groups == 1 ? "" : "s",
                     input.sizes().str());
  }
  if (weight.size(0) % o.groups != 0) {
    fail<ShapeError>("{}: expected a number of groups that divides the {} filters of {}, got {}", op, weight.size(0),
                     weight.sizes().str(), o.groups);
  }
  Shape sizes{input.size(0), weight.size(0), 0, 0};
  for (int d = 0; d < 2; ++d) {
    const std::int64_t size = input.size(2 + d), kernel = weight.size(2 + d);
    if (kernel < 1) fail<ShapeError>("{}: expected a window of some size, got {}", op, weight.sizes().str());
    const std::int64_t room = size + 2 * a.padding[d] - window_extent(a, d, kernel);
    if (room < 0) {
      fail<ShapeError>("{}: expected an input that a window of {} fits in, got {} with padding {}", op,
                       window_extent(a, d, kernel), input.sizes().str(), a.padding[d]);
    }
    sizes[2 + d] = room / a.stride[d] + 1;
  }
  if (residual.defined() && residual.sizes() != sizes) {
    fail<ShapeError>("{}: expected a residual of the result's sizes {}, got {}", op, sizes.str(),
                     residual.sizes().str());
  }
  const auto last = MemoryFormat::channels_last;
  const Tensor x = input.contiguous(last), w = weight.contiguous();
  const Tensor r = residual.defined() ? residual.contiguous(last) : residual;
  return call(conv2d_int8_op, {&x, &w, &weight_scale, &bias, &r}, a);
}

Tensor linear_int8(const Tensor& input, const Tensor& weight, const Tensor& weight_scale, const Tensor& bias,
                   const Tensor& residual, const Int8ProductOptions& o) {
  const char* op = "linear_int8";
  const Int8ProductAttributes a = product_attributes(input, weight, weight_scale, bias, residual, o, 2, op);
  if (input.dim() < 1 || input.size(-1) != weight.size(1)) {
    fail<ShapeError>("{}: expected an input [*, {}] for the weight {}, got {}", op, weight.size(1),
                     weight.sizes().str(), input.sizes().str());
  }
  Shape sizes = input.sizes();
  sizes[sizes.size() - 1] = weight.size(0);
  if (residual.defined() && residual.sizes() != sizes) {
    fail<ShapeError>("{}: expected a residual of the result's sizes {}, got {}", op, sizes.str(),
                     residual.sizes().str());
  }
  const Tensor x = input.contiguous(), w = weight.contiguous();
  const Tensor r = residual.defined() ? residual.contiguous() : residual;
  return call(linear_int8_op, {&x, &w, &weight_scale, &bias, &r}, a);
}

Tensor add_int8(const Tensor& a, const Tensor& b, const Int8Grid& a_grid, const Int8Grid& b_grid,
                const std::optional<Int8Grid>& output, bool relu, DType dtype) {
  const char* op = "add_int8";
  check_bytes(a, op, "a first tensor");
  check_bytes(b, op, "a second tensor");
  if (a.sizes() != b.sizes()) {
    fail<ShapeError>("{}: expected tensors of the same sizes, got {} and {}", op, a.sizes().str(), b.sizes().str());
  }
  check_grid(a_grid, a.dtype(), op, "the first tensor");
  check_grid(b_grid, b.dtype(), op, "the second tensor");
  Int8GridAttributes attributes;
  attributes.input_scale = a_grid.scale;
  attributes.input_zero_point = a_grid.zero_point;
  attributes.other_scale = b_grid.scale;
  attributes.other_zero_point = b_grid.zero_point;
  attributes.relu = relu;
  set_output(attributes, output, dtype, op);
  return call(add_int8_op, {&a, &b}, attributes);
}

Tensor lookup_int8(const Tensor& input, const Tensor& table) {
  const char* op = "lookup_int8";
  check_bytes(input, op, "an input");
  check_bytes(table, op, "a table");
  if (table.sizes() != Shape{256}) fail<ShapeError>("{}: expected a table [256], got {}", op, table.sizes().str());
  const Tensor dense = table.contiguous();
  Int8GridAttributes attributes;
  attributes.dtype = static_cast<std::uint8_t>(table.dtype());
  return call(lookup_int8_op, {&input, &dense}, attributes);
}

Tensor mean_int8(const Tensor& input, const Shape& dims, bool keepdim, const Int8Grid& input_grid,
                 const std::optional<Int8Grid>& output, DType dtype) {
  const char* op = "mean_int8";
  check_bytes(input, op, "an input");
  check_grid(input_grid, input.dtype(), op, "the input");
  if (detail::reduced_numel(input.sizes(), dims, op) == 0) {
    fail<ShapeError>("{}: expected dimensions with elements, got {} of {}", op, dims.str(), input.sizes().str());
  }
  Int8GridAttributes attributes;
  attributes.input_scale = input_grid.scale;
  attributes.input_zero_point = input_grid.zero_point;
  attributes.dims = int_list(dims);
  attributes.keepdim = keepdim;
  set_output(attributes, output, dtype, op);
  return call(mean_int8_op, {&input}, attributes);
}

Tensor linear_weight_only(const Tensor& input, const Tensor& weight, const Tensor& scale, const Tensor& bias,
                          const LinearWeightOnlyOptions& options) {
  const char* op = "linear_weight_only";
  check_defined(input, op, "an input");
  check_bytes(weight, op, "a weight");
  check_defined(scale, op, "a scale");
  if (input.dtype() != DType::f32 && input.dtype() != DType::f16 && input.dtype() != DType::bf16) {
    fail<DTypeError>("{}: expected an input of f32, f16 or bf16, got {}", op, name(input.dtype()));
  }
  if (scale.dtype() != DType::f32) fail<DTypeError>("{}: expected a scale of f32, got {}", op, name(scale.dtype()));
  if (weight.dim() != 2) {
    fail<ShapeError>("{}: expected a weight of 2 dimensions, got {}", op, weight.sizes().str());
  }
  WeightOnlyAttributes a;
  a.bits = weight.dtype() == DType::i8 ? 8 : 4;
  const std::int64_t outputs = weight.size(0), k = weight.size(1) * (a.bits == 4 ? 2 : 1);
  if (input.dim() < 1 || input.size(-1) != k) {
    fail<ShapeError>("{}: expected an input [*, {}] for the weight {} of {} bits, got {}", op, k, weight.sizes().str(),
                     a.bits, input.sizes().str());
  }
  const bool rows = scale.dim() == 1;
  const std::int64_t groups = rows ? 1 : scale.dim() == 2 ? scale.size(1) : 0;
  a.group = options.group_size != 0 ? options.group_size : groups > 0 ? k / groups : 0;
  const bool fits = a.group > 0 ? groups > 0 && a.group * groups == k : k == 0 && options.group_size == 0;
  if ((!rows && scale.dim() != 2) || scale.size(0) != outputs || !fits) {
    fail<ShapeError>(
        "{}: expected a scale [{}] or [{}, {} / group_size] with a group_size that divides {}, got {} and {}", op,
        outputs, outputs, k, k, scale.sizes().str(), options.group_size);
  }
  if (a.bits == 4 && a.group % 2 != 0) {
    fail<ShapeError>("{}: expected an even group_size for weights of 4 bits, got {}", op, a.group);
  }
  if (bias.defined()) {
    check_floating(bias, op);
    if (bias.dim() != 1 || bias.size(0) != outputs) {
      fail<ShapeError>("{}: expected a bias [{}] for the weight {}, got {}", op, outputs, weight.sizes().str(),
                       bias.sizes().str());
    }
  }
  const Tensor x = input.detach().contiguous(), w = weight.contiguous(), s = scale.detach().contiguous();
  const Tensor b = bias.defined() ? bias.detach().to(DType::f32).contiguous() : bias;
  return call(linear_weight_only_op, {&x, &w, &s, &b}, a);
}

}  // namespace halfstep
