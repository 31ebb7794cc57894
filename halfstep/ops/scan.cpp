// SPDX-License-Identifier: Apache-2.0
// Norms, and reductions and scans along one dimension: extremes with their indices, cumulative sums and products.
#include <cmath>
#include <cstddef>

#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/ratio.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/reduce_inl.h"

namespace halfstep {
namespace {

using detail::div_or_zero;
using detail::kept;
using detail::mul_wide;
using detail::reduced_sizes;

// --- norm

const Op& signed_pow_op();
// sign(x) |x|^exponent, and 0 for 0.
Tensor signed_pow(const Tensor& x, double exponent) {
  return call(signed_pow_op(), {&x}, ScalarAttributes{.value = {.floating = exponent}});
}
const Op& signed_pow_op() {
  static const Op& op = define_op({
      .name = "signed_pow",
      .signature = "signed_pow(input, exponent)",
      .infer = [](InferContext& ctx) { infer_elementwise(ctx, ctx.input(0).dtype()); },
      .grad =
          [](GradContext& c) {
            const double e = c.attributes<ScalarAttributes>().value.floating;
            if (e == 0) return c.set(0, c.grad() * 0.0);
            c.set(0, c.grad() * (signed_pow(c.input(0), 0) * signed_pow(c.input(0), e - 1) * e));
          },
      .saves = {in(0)},
      .attributes = &attribute_struct<ScalarAttributes>(),
      .backward = true,
  });
  return op;
}
[[maybe_unused]] const Op& signed_pow_defined = signed_pow_op();

const Op& norm_op = define_op({
    .name = "norm",
    .signature = "norm(input, p=2, dims=[], keepdim=false, dtype=none)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<NormAttributes>();
          const Tensor& x = ctx.input(0);
          const DType result = dtype_or(a.dtype, x.dtype());
          if (result == DType::f64 && is_low_precision(x.dtype())) ctx.cast(result);
          ctx.output(reduced_sizes(x.sizes(), shape_of(a.dims), a.keepdim, ctx.name()), result);
          if ((std::isinf(a.p) || a.p < 0) && x.numel() == 0 && ctx.outputs[0].sizes.numel() != 0) {
            fail<ShapeError>("norm: expected at least one element for the order {}, got {}", a.p, x.sizes().str());
          }
        },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<NormAttributes>();
          const Shape dims = shape_of(a.dims);
          const Shape& sizes = c.input_sizes(0);
          const Tensor &x = c.input(0), &y = c.output();
          if (a.p == 0) return c.set(0, zeros(sizes, {.dtype = x.dtype(), .device = x.device()}));
          if (std::isinf(a.p)) {
            NormAttributes weights{.dims = int_list(dims)};
            weights.p = 1;
            return c.set(0, call(*find_op("extreme_weights"), {&x, &y}, weights) * kept(c.grad(), sizes, dims));
          }
          if (a.p == 1) return c.set(0, signed_pow(x, 0) * kept(c.grad(), sizes, dims));
          if (a.p == 2) return c.set(0, mul_wide(x, kept(div_or_zero(c.grad(), y), sizes, dims)));
          // Of x / y, which is near 1 where the gradient counts: powers of x and y would leave the range.
          const Tensor wide = is_low_precision(x.dtype()) ? x.to(f32) : x;
          const Tensor one = full({}, 1, {.dtype = f64, .device = y.device()});
          const Tensor ratio = mul_wide(wide, kept(div_or_zero(one, y), sizes, dims));
          c.set(0, signed_pow(ratio, a.p - 1) * kept(c.grad(), sizes, dims));
        },
    .saves = {in(0) | out(0)},
    .attributes = &attribute_struct<NormAttributes>(),
    .dtype_attribute = offsetof(NormAttributes, dtype),
});

// --- extremes with indices

Shape sizes_along(const Shape& sizes, const DimAttributes& a) {
  Shape result = sizes;
  if (sizes.empty()) return result;
  if (a.keepdim) {
    result[static_cast<int>(a.dim)] = 1;
  } else {
    result.erase(static_cast<int>(a.dim));
  }
  return result;
}

void check_choice(InferContext& ctx) {
  const Tensor& x = ctx.input(0);
  const auto& a = ctx.attributes<DimAttributes>();
  if (x.dim() > 0 && x.size(a.dim) == 0) {
    fail<ShapeError>("{}: expected at least one element along dimension {}, got {}", ctx.name(), a.dim,
                     x.sizes().str());
  }
}
void infer_arg(InferContext& ctx) {
  check_choice(ctx);
  ctx.output(sizes_along(ctx.input(0).sizes(), ctx.attributes<DimAttributes>()), DType::i64);
}
void infer_extreme_along(InferContext& ctx) {
  check_choice(ctx);
  const Shape sizes = sizes_along(ctx.input(0).sizes(), ctx.attributes<DimAttributes>());
  ctx.output(sizes, ctx.input(0).dtype());
  ctx.output(sizes, DType::i64);
}

const Op& pick_along_op();
// put_along: zeros but for input, which goes to its index along `dim`; pick_along takes it out again. Both have the
// dimension with size 1 on the narrow side; `step` is its size on the other.
const Op& put_along_op() {
  static const Op& op = define_op({
      .name = "put_along",
      .signature = "put_along(input, indices, dim, size)",
      .infer =
          [](InferContext& ctx) {
            const auto& a = ctx.attributes<ViewAttributes>();
            Shape sizes = ctx.input(0).sizes();
            sizes[static_cast<int>(a.dim)] = a.step;
            ctx.output(sizes, ctx.input(0).dtype());
          },
      .grad =
          [](GradContext& c) {
            const auto& a = c.attributes<ViewAttributes>();
            c.set(0, call(pick_along_op(), {&c.grad(), &c.input(1)}, a));
          },
      .saves = {in(1)},
      .attributes = &attribute_struct<ViewAttributes>(),
      .backward = true,
  });
  return op;
}
const Op& pick_along_op() {
  static const Op& op = define_op({
      .name = "pick_along",
      .signature = "pick_along(input, indices, dim)",
      .infer = [](InferContext& ctx) { ctx.output(ctx.input(1).sizes(), ctx.input(0).dtype()); },
      .grad =
          [](GradContext& c) {
            const auto& a = c.attributes<ViewAttributes>();
            c.set(0, call(put_along_op(), {&c.grad(), &c.input(1)}, a));
          },
      .saves = {in(1)},
      .attributes = &attribute_struct<ViewAttributes>(),
      .backward = true,
  });
  return op;
}
[[maybe_unused]] const Op& put_along_defined = put_along_op();
[[maybe_unused]] const Op& pick_along_defined = pick_along_op();

void extreme_along_gradient(GradContext& c) {
  const auto& a = c.attributes<DimAttributes>();
  const Shape& sizes = c.input_sizes(0);
  if (sizes.empty()) return c.set(0, c.grad());
  Shape narrow = sizes;
  narrow[static_cast<int>(a.dim)] = 1;
  ViewAttributes put;
  put.dim = a.dim;
  put.step = sizes[static_cast<int>(a.dim)];
  const Tensor gradient = c.grad().reshape(narrow), indices = c.output(1).reshape(narrow);
  c.set(0, call(put_along_op(), {&gradient, &indices}, put));
}

const Op& max_dim_op = define_op({
    .name = "max_dim",
    .signature = "max(input, dim, keepdim=false)",
    .infer = infer_extreme_along,
    .grad = extreme_along_gradient,
    .saves = {out(1)},
    .attributes = &attribute_struct<DimAttributes>(),
});
const Op& min_dim_op = define_op({
    .name = "min_dim",
    .signature = "min(input, dim, keepdim=false)",
    .infer = infer_extreme_along,
    .grad = extreme_along_gradient,
    .saves = {out(1)},
    .attributes = &attribute_struct<DimAttributes>(),
});
const Op& argmax_op = define_op({
    .name = "argmax",
    .signature = "argmax(input, dim=none, keepdim=false)",
    .infer = infer_arg,
    .attributes = &attribute_struct<DimAttributes>(),
});
const Op& argmin_op = define_op({
    .name = "argmin",
    .signature = "argmin(input, dim=none, keepdim=false)",
    .infer = infer_arg,
    .attributes = &attribute_struct<DimAttributes>(),
});

// --- scans

void infer_scan(InferContext& ctx) {
  const Tensor& x = ctx.input(0);
  const DType natural = is_floating(x.dtype()) ? x.dtype() : DType::i64;
  const DType result = dtype_or(ctx.attributes<DimAttributes>().dtype, natural);
  if (is_floating(result) != is_floating(x.dtype()) || result == DType::f64) ctx.cast(result);
  ctx.output(x.sizes(), result);
}
Tensor reversed_cumsum(const Tensor& x, std::int64_t dim, bool reverse);

const Op& cumsum_op = define_op({
    .name = "cumsum",
    .signature = "cumsum(input, dim, dtype=none)",
    .infer = infer_scan,
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<DimAttributes>();
          c.set(0, reversed_cumsum(c.grad(), a.dim, !a.reverse));
        },
    .attributes = &attribute_struct<DimAttributes>(),
    .dtype_attribute = offsetof(DimAttributes, dtype),
});
Tensor reversed_cumsum(const Tensor& x, std::int64_t dim, bool reverse) {
  return call(cumsum_op, {&x}, DimAttributes{.dim = dim, .reverse = reverse});
}

const Op& cumprod_backward_op = define_op({
    .name = "cumprod_backward",
    .signature = "cumprod_backward(gradient, input, dim)",
    .infer =
        [](InferContext& ctx) {
          ctx.output(ctx.input(1).sizes(), ctx.input(1).dtype());
          ctx.cast(ctx.input(1).dtype());
        },
    .attributes = &attribute_struct<DimAttributes>(),
    .key = 1,
    .backward = true,
});
const Op& cumprod_op = define_op({
    .name = "cumprod",
    .signature = "cumprod(input, dim, dtype=none)",
    .infer = infer_scan,
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<DimAttributes>();
          const Tensor x = is_low_precision(c.input_dtype(0)) ? c.input(0).to(f32) : c.input(0);
          if (!c.create_graph) {
            return c.set(0, call(cumprod_backward_op, {&c.grad(), &x}, DimAttributes{.dim = a.dim}));
          }
          // dx[i] = sum over k >= i of g[k] times the product of x[j], j <= k, with x[i] replaced by 1: on n copies.
          if (x.dim() == 0) return c.set(0, c.grad());
          const Tensor rows = x.transpose(a.dim, -1), g = c.grad().transpose(a.dim, -1);
          const std::int64_t n = rows.size(-1);
          const TensorOptions options{.dtype = x.dtype(), .device = x.device()};
          const Tensor one = eye(n, options);
          const Tensor products = cumprod(rows.unsqueeze(-2) * (1 - one) + one, -1);  // [..., i, k]
          const Tensor from_i = cumsum(one, -1);                                      // 1 where k >= i
          c.set(0, sum(products * from_i * g.unsqueeze(-2), {-1}).transpose(a.dim, -1));
        },
    .saves = {in(0)},
    .attributes = &attribute_struct<DimAttributes>(),
    .dtype_attribute = offsetof(DimAttributes, dtype),
});

Tensor call_scan(const Op& op, const Tensor& input, std::int64_t dim, const CumulateOptions& options) {
  check_defined(input, op.name, "a tensor");
  DimAttributes a{.dim = wrap_dim(dim, input.dim(), op.name)};
  if (options.dtype) a.dtype = dtype_code(*options.dtype);
  return call(op, {&input}, a);
}
DimAttributes along(const Op& op, const Tensor& input, std::int64_t dim, const KeepOptions& options) {
  check_defined(input, op.name, "a tensor");
  return {.dim = wrap_dim(dim, input.dim(), op.name), .keepdim = options.keepdim};
}
ValuesAndIndices extreme(const Op& op, const Tensor& input, std::int64_t dim, const KeepOptions& options) {
  auto both = call_n<2>(op, {&input}, along(op, input, dim, options));
  return {both[0], both[1]};
}
Tensor call_arg(const Op& op, const Tensor& input, std::optional<std::int64_t> dim, const KeepOptions& options) {
  if (dim) return call(op, {&input}, along(op, input, *dim, options));
  check_defined(input, op.name, "a tensor");
  const Tensor flat = input.detach().reshape({-1});
  const Tensor result = call(op, {&flat}, along(op, flat, 0, {}));
  return options.keepdim ? result.reshape(Shape::filled(input.dim(), 1)) : result;
}

}  // namespace

Tensor norm(const Tensor& input, double p, const Shape& dims, const ReduceOptions& options) {
  check_defined(input, "norm", "a tensor");
  check_floating(input, "norm");
  NormAttributes a{.dims = int_list(dims), .keepdim = options.keepdim};
  a.p = p;
  if (options.dtype) a.dtype = dtype_code(*options.dtype);
  return call(norm_op, {&input}, a);
}
ValuesAndIndices max(const Tensor& input, std::int64_t dim, const KeepOptions& options) {
  return extreme(max_dim_op, input, dim, options);
}
ValuesAndIndices min(const Tensor& input, std::int64_t dim, const KeepOptions& options) {
  return extreme(min_dim_op, input, dim, options);
}
Tensor argmax(const Tensor& input, std::optional<std::int64_t> dim, const KeepOptions& options) {
  return call_arg(argmax_op, input, dim, options);
}
Tensor argmin(const Tensor& input, std::optional<std::int64_t> dim, const KeepOptions& options) {
  return call_arg(argmin_op, input, dim, options);
}
Tensor cumsum(const Tensor& input, std::int64_t dim, const CumulateOptions& options) {
  return call_scan(cumsum_op, input, dim, options);
}
Tensor cumprod(const Tensor& input, std::int64_t dim, const CumulateOptions& options) {
  return call_scan(cumprod_op, input, dim, options);
}

}  // namespace halfstep
