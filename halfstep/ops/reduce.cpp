// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/reduce.h"

#include <cmath>
#include <cstddef>
#include <limits>

#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/ratio.h"
#include "halfstep/ops/reduce_inl.h"
#include "halfstep/ops/softmax.h"

namespace halfstep {

Shape detail::reduced_sizes(const Shape& sizes, const Shape& dims, bool keepdim, const char* op) {
  unsigned mask = dims.empty() ? ~0u : 0u;
  for (std::int64_t d : dims) {
    const unsigned bit = 1u << wrap_dim(d, sizes.size(), op);
    if (mask & bit) fail<ShapeError>("{}: expected each dimension at most once, got {}", op, dims.str());
    mask |= bit;
  }
  Shape result;
  for (int i = 0; i < sizes.size(); ++i) {
    if (!(mask >> i & 1)) {
      result.push_back(sizes[i]);
    } else if (keepdim) {
      result.push_back(1);
    }
  }
  return result;
}

std::int64_t detail::reduced_numel(const Shape& sizes, const Shape& dims, const char* op) {
  const Shape ones = reduced_sizes(sizes, dims, true, op);
  std::int64_t n = 1;
  for (int i = 0; i < sizes.size(); ++i) n *= ones[i] == sizes[i] ? 1 : sizes[i];
  return n;
}

Tensor detail::kept(const Tensor& gradient, const Shape& sizes, const Shape& dims) {
  return gradient.reshape(reduced_sizes(sizes, dims, true, "reduce"));
}

namespace {

using detail::div_or_zero;
using detail::kept;
using detail::mul_wide;
using detail::reduced_numel;
using detail::reduced_sizes;

// What a gradient rule of several ops takes 16 bits in.
Tensor wide(const Tensor& x) { return is_low_precision(x.dtype()) ? x.to(f32) : x; }

template <class A>
Shape dims_of(const A& a) {
  return shape_of(a.dims);
}
Shape dims_of(const GradContext& c) { return shape_of(c.attributes<ReduceAttributes>().dims); }

void infer_reduce(InferContext& ctx, DType natural) {
  const auto& a = ctx.attributes<ReduceAttributes>();
  ctx.output(reduced_sizes(ctx.input(0).sizes(), shape_of(a.dims), a.keepdim, ctx.name()), dtype_or(a.dtype, natural));
}
DType sum_dtype(const Tensor& x) { return is_floating(x.dtype()) ? x.dtype() : DType::i64; }

void infer_sum(InferContext& ctx) {
  const Tensor& x = ctx.input(0);
  const DType result = dtype_or(ctx.attributes<ReduceAttributes>().dtype, sum_dtype(x));
  // What isn't added up in its own kind is converted first, as in PyTorch; 16 bits are not, since they add up in f32.
  if (is_floating(result) != is_floating(x.dtype()) || (result == DType::f64 && x.dtype() != DType::f32)) {
    ctx.cast(result);
  }
  infer_reduce(ctx, result);
}

// max and min of nothing don't exist.
void infer_extreme(InferContext& ctx) {
  const Tensor& x = ctx.input(0);
  infer_reduce(ctx, x.dtype());
  if (x.numel() == 0 && ctx.outputs[0].sizes.numel() != 0) {
    fail<ShapeError>("{}: expected at least one element to choose from, got {}", ctx.name(), x.sizes().str());
  }
}

const Op& sum_op = define_op({
    .name = "sum",
    .signature = "sum(input, dims=[], keepdim=false, dtype=none)",
    .infer = infer_sum,
    .grad =
        [](GradContext& c) {
          const Shape& sizes = c.input_sizes(0);
          c.set(0, kept(c.grad(), sizes, dims_of(c)).expand(sizes));
        },
    .attributes = &attribute_struct<ReduceAttributes>(),
    .dtype_attribute = offsetof(ReduceAttributes, dtype),
});
const Op& mean_op = define_op({
    .name = "mean",
    .signature = "mean(input, dims=[], keepdim=false, dtype=none)",
    .infer = infer_sum,
    .grad =
        [](GradContext& c) {
          const Shape& sizes = c.input_sizes(0);
          const auto n = static_cast<double>(reduced_numel(sizes, dims_of(c), "mean"));
          c.set(0, kept(c.grad() / n, sizes, dims_of(c)).expand(sizes));
        },
    .attributes = &attribute_struct<ReduceAttributes>(),
    .dtype_attribute = offsetof(ReduceAttributes, dtype),
});

const Op& div_or_zero_op = define_op({
    .name = "div_or_zero",
    .signature = "div_or_zero(input, other)",
    .infer =
        [](InferContext& ctx) {
          const Tensor* both[] = {&ctx.input(0), &ctx.input(1)};
          const DType dtype = result_type(both, ctx.name());
          ctx.cast(dtype);
          infer_elementwise(ctx, dtype);
        },
    .grad =
        [](GradContext& c) {
          const Tensor quotient = div_or_zero(c.grad(), c.input(1));
          if (c.needs(0)) c.set(0, quotient);
          if (c.needs(1)) c.set(1, neg(quotient * c.output()));
        },
    .saves = {in(1), in(1) | out(0)},
    .backward = true,
});

// The product of the other elements for each: prod with the element itself replaced by 1. Recorded, on n copies.
const Op& prod_others_op = define_op({
    .name = "prod_others",
    .signature = "prod_others(input, dim)",
    .infer = [](InferContext& ctx) { ctx.output(ctx.input(0).sizes(), ctx.input(0).dtype()); },
    .attributes = &attribute_struct<DimAttributes>(),
    .backward = true,
});
// x[..., n] as [..., n, n], where row i has a one in place i.
Tensor with_ones(const Tensor& x) {
  const std::int64_t n = x.size(-1);
  const Tensor one = eye(n, {.dtype = x.dtype(), .device = x.device()});
  return x.unsqueeze(-2) * (1 - one) + one;
}
// The reduced dimensions of x as one, at the end; `back` undoes it.
Tensor gather_dims(const Tensor& x, const Shape& dims, Shape* order, Shape* moved) {
  unsigned mask = dims.empty() ? ~0u : 0u;
  for (std::int64_t d : dims) mask |= 1u << wrap_dim(d, x.dim(), "reduce");
  *order = Shape();
  Shape flat;
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < x.dim(); ++i) {
      if (static_cast<int>(mask >> i & 1) == pass) order->push_back(i);
    }
    if (pass == 0) {
      for (std::int64_t d : *order) flat.push_back(x.sizes()[static_cast<int>(d)]);
    }
  }
  const Tensor permuted = x.permute(*order);
  *moved = permuted.sizes();
  flat.push_back(permuted.numel() == 0 ? 0 : permuted.numel() / std::max<std::int64_t>(flat.numel(), 1));
  return permuted.reshape(flat);
}
Tensor scatter_dims(const Tensor& x, const Shape& order, const Shape& moved) {
  Shape inverse = order;
  for (int i = 0; i < order.size(); ++i) inverse[static_cast<int>(order[i])] = i;
  return x.reshape(moved).permute(inverse);
}

const Op& prod_op = define_op({
    .name = "prod",
    .signature = "prod(input, dims=[], keepdim=false, dtype=none)",
    .infer = infer_sum,
    .grad =
        [](GradContext& c) {
          const Tensor x = wide(c.input(0));
          Shape order, moved;
          const Tensor flat = gather_dims(x, dims_of(c), &order, &moved);
          Tensor others;
          if (c.create_graph) {
            others = prod(with_ones(flat), {-1});
          } else {
            others = call(prod_others_op, {&flat}, DimAttributes{.dim = flat.dim() - 1});
          }
          const Shape& sizes = c.input_sizes(0);
          c.set(0, scatter_dims(others, order, moved) * kept(c.grad(), sizes, dims_of(c)));
        },
    .saves = {in(0)},
    .attributes = &attribute_struct<ReduceAttributes>(),
    .dtype_attribute = offsetof(ReduceAttributes, dtype),
});

// 1 / (number of ties) where an element equals the result, else 0; with `p` 1 magnitudes are compared, and the sign of
// the element comes in.
const Op& extreme_weights_op = define_op({
    .name = "extreme_weights",
    .signature = "extreme_weights(input, result, dims, magnitudes)",
    .infer =
        [](InferContext& ctx) {
          const DType dtype = ctx.input(0).dtype();
          ctx.output(ctx.input(0).sizes(), dtype);
          ctx.cast(dtype);
        },
    .attributes = &attribute_struct<NormAttributes>(),
    .backward = true,
});
Tensor extreme_weights(const GradContext& c, const Shape& dims, bool magnitudes) {
  NormAttributes a{.dims = int_list(dims)};
  a.p = magnitudes ? 1 : 0;
  return call(extreme_weights_op, {&c.input(0), &c.output()}, a);
}
void extreme_gradient(GradContext& c) {
  const Shape dims = dims_of(c);
  c.set(0, extreme_weights(c, dims, false) * kept(c.grad(), c.input_sizes(0), dims));
}
const Op& amax_op = define_op({
    .name = "amax",
    .signature = "amax(input, dims=[], keepdim=false)",
    .infer = infer_extreme,
    .grad = extreme_gradient,
    .saves = {in(0) | out(0)},
    .attributes = &attribute_struct<ReduceAttributes>(),
});
const Op& amin_op = define_op({
    .name = "amin",
    .signature = "amin(input, dims=[], keepdim=false)",
    .infer = infer_extreme,
    .grad = extreme_gradient,
    .saves = {in(0) | out(0)},
    .attributes = &attribute_struct<ReduceAttributes>(),
});

void infer_bool(InferContext& ctx) { infer_reduce(ctx, DType::boolean); }
const Op& any_op = define_op({
    .name = "any",
    .signature = "any(input, dims=[], keepdim=false)",
    .infer = infer_bool,
    .attributes = &attribute_struct<ReduceAttributes>(),
});
const Op& all_op = define_op({
    .name = "all",
    .signature = "all(input, dims=[], keepdim=false)",
    .infer = infer_bool,
    .attributes = &attribute_struct<ReduceAttributes>(),
});
const Op& count_nonzero_op = define_op({
    .name = "count_nonzero",
    .signature = "count_nonzero(input, dims=[])",
    .infer = [](InferContext& ctx) { infer_reduce(ctx, DType::i64); },
    .attributes = &attribute_struct<ReduceAttributes>(),
});

template <int kOutputs>
void infer_var(InferContext& ctx) {
  const auto& a = ctx.attributes<VarAttributes>();
  const Shape sizes = reduced_sizes(ctx.input(0).sizes(), dims_of(a), a.keepdim, ctx.name());
  for (int i = 0; i < kOutputs; ++i) ctx.output(sizes, ctx.input(0).dtype());
}
// The input less its mean, and the divisor.
Tensor centred(const GradContext& c, double* divisor) {
  const auto& a = c.attributes<VarAttributes>();
  *divisor = static_cast<double>(reduced_numel(c.input_sizes(0), dims_of(a), "var")) - a.correction;
  const Tensor x = wide(c.input(0));
  return x - mean(x, dims_of(a), {.keepdim = true});
}
Tensor var_gradient(const GradContext& c, const Tensor& gradient) {
  double divisor;
  const Tensor difference = centred(c, &divisor);
  return difference * kept(wide(gradient) * (2 / divisor), c.input_sizes(0), dims_of(c.attributes<VarAttributes>()));
}
const Op& var_op = define_op({
    .name = "var",
    .signature = "var(input, dims=[], correction=1, keepdim=false)",
    .infer = infer_var<1>,
    .grad = [](GradContext& c) { c.set(0, var_gradient(c, c.grad())); },
    .saves = {in(0)},
    .attributes = &attribute_struct<VarAttributes>(),
});
const Op& std_op = define_op({
    .name = "std",
    .signature = "std(input, dims=[], correction=1, keepdim=false)",
    .infer = infer_var<1>,
    .grad =
        [](GradContext& c) {
          double divisor;
          const Tensor difference = centred(c, &divisor);
          const Tensor ratio = div_or_zero(c.grad(), c.output()) / divisor;
          c.set(0, mul_wide(difference, kept(ratio, c.input_sizes(0), dims_of(c.attributes<VarAttributes>()))));
        },
    .saves = {in(0) | out(0)},
    .attributes = &attribute_struct<VarAttributes>(),
});
const Op& var_mean_op = define_op({
    .name = "var_mean",
    .signature = "var_mean(input, dims=[], correction=1, keepdim=false)",
    .infer = infer_var<2>,
    .grad =
        [](GradContext& c) {
          Tensor total;
          if (c.grad(0).defined()) total = var_gradient(c, c.grad(0));
          if (c.grad(1).defined()) {
            const Shape dims = dims_of(c.attributes<VarAttributes>());
            const auto n = static_cast<double>(reduced_numel(c.input_sizes(0), dims, "var_mean"));
            const Tensor part = kept(wide(c.grad(1)) / n, c.input_sizes(0), dims);
            total = total.defined() ? total + part : part.expand(c.input_sizes(0));
          }
          c.set(0, total);
        },
    .saves = {in(0)},
    .attributes = &attribute_struct<VarAttributes>(),
});

// softmax over several dimensions together: the slope of logsumexp.
const Op& logsumexp_op = define_op({
    .name = "logsumexp",
    .signature = "logsumexp(input, dims, keepdim=false)",
    .infer = [](InferContext& ctx) { infer_reduce(ctx, ctx.input(0).dtype()); },
    .grad =
        [](GradContext& c) {
          const Shape dims = dims_of(c);
          Tensor p;
          if (dims.size() == 1) {
            p = softmax(c.input(0), dims[0]);
          } else {
            Shape order, moved;
            const Tensor flat = softmax(gather_dims(c.input(0), dims, &order, &moved), -1);
            p = scatter_dims(flat, order, moved);
          }
          const Shape& sizes = c.input_sizes(0);
          // Beside +infinity softmax is NaN, though finite elements have the limit 0.
          constexpr double kInfinity = std::numeric_limits<double>::infinity();
          const Tensor under = kept(where(eq(c.output(), kInfinity), c.output(), -kInfinity), sizes, dims);
          const Tensor slope = masked_fill(p, lt(c.input(0), under), 0);
          c.set(0, slope * kept(c.grad(), sizes, dims));
        },
    .saves = {in(0) | out(0)},
    .attributes = &attribute_struct<ReduceAttributes>(),
});

const Op& dot_op = define_op({
    .name = "dot",
    .signature = "dot(input, other)",
    .infer =
        [](InferContext& ctx) {
          const Tensor &a = ctx.input(0), &b = ctx.input(1);
          if (a.dim() != 1 || b.dim() != 1 || a.numel() != b.numel()) {
            fail<ShapeError>("dot: expected two vectors of one length, got {} and {}", a.sizes().str(),
                             b.sizes().str());
          }
          const Tensor* both[] = {&a, &b};
          const DType dtype = result_type(both, ctx.name());
          ctx.cast(dtype);
          ctx.output({}, dtype);
        },
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, c.grad() * c.input(1));
          if (c.needs(1)) c.set(1, c.grad() * c.input(0));
        },
    .saves = {in(1), in(0)},
});

ReduceAttributes attributes_of(const Shape& dims, bool keepdim, const std::optional<DType>& dtype = {}) {
  ReduceAttributes a{.dims = int_list(dims), .keepdim = keepdim, .dtype = kNoDType};
  if (dtype) a.dtype = dtype_code(*dtype);
  return a;
}
Tensor reduce(const Op& op, const Tensor& input, const Shape& dims, bool keepdim,
              const std::optional<DType>& dtype = {}) {
  check_defined(input, op.name, "a tensor");
  return call(op, {&input}, attributes_of(dims, keepdim, dtype));
}
VarAttributes var_attributes(const Tensor& input, const Shape& dims, const VarOptions& options, const char* op) {
  check_defined(input, op, "a tensor");
  check_floating(input, op);
  return {.dims = int_list(dims), .keepdim = options.keepdim, .correction = options.correction};
}

}  // namespace

Tensor detail::div_or_zero(const Tensor& a, const Tensor& b) {
  const Tensor x = a.to(f64), y = b.to(f64);
  return call(div_or_zero_op, {&x, &y});
}

Tensor sum(const Tensor& input, const Shape& dims, const ReduceOptions& options) {
  return reduce(sum_op, input, dims, options.keepdim, options.dtype);
}
Tensor mean(const Tensor& input, const Shape& dims, const ReduceOptions& options) {
  check_defined(input, "mean", "a tensor");
  const DType dtype = options.dtype.value_or(input.dtype());
  if (!is_floating(dtype)) {
    fail<DTypeError>("mean: expected a floating dtype, got {}; ask for one with .dtype", name(dtype));
  }
  return reduce(mean_op, input, dims, options.keepdim, options.dtype);
}
Tensor prod(const Tensor& input, const Shape& dims, const ReduceOptions& options) {
  return reduce(prod_op, input, dims, options.keepdim, options.dtype);
}
Tensor var(const Tensor& input, const Shape& dims, const VarOptions& options) {
  return call(var_op, {&input}, var_attributes(input, dims, options, "var"));
}
Tensor std(const Tensor& input, const Shape& dims, const VarOptions& options) {
  return call(std_op, {&input}, var_attributes(input, dims, options, "std"));
}
Tensor stddev(const Tensor& input, const Shape& dims, const VarOptions& options) {
  return halfstep::std(input, dims, options);
}
std::pair<Tensor, Tensor> var_mean(const Tensor& input, const Shape& dims, const VarOptions& options) {
  auto both = call_n<2>(var_mean_op, {&input}, var_attributes(input, dims, options, "var_mean"));
  return {both[0], both[1]};
}
Tensor amax(const Tensor& input, const Shape& dims, const KeepOptions& options) {
  return reduce(amax_op, input, dims, options.keepdim);
}
Tensor amin(const Tensor& input, const Shape& dims, const KeepOptions& options) {
  return reduce(amin_op, input, dims, options.keepdim);
}
Tensor max(const Tensor& input) { return amax(input); }
Tensor min(const Tensor& input) { return amin(input); }
Tensor any(const Tensor& input, const Shape& dims, const KeepOptions& options) {
  return reduce(any_op, input, dims, options.keepdim);
}
Tensor all(const Tensor& input, const Shape& dims, const KeepOptions& options) {
  return reduce(all_op, input, dims, options.keepdim);
}
Tensor count_nonzero(const Tensor& input, const Shape& dims) { return reduce(count_nonzero_op, input, dims, false); }
Tensor logsumexp(const Tensor& input, const Shape& dims, const KeepOptions& options) {
  check_defined(input, "logsumexp", "a tensor");
  check_floating(input, "logsumexp");
  return reduce(logsumexp_op, input, dims, options.keepdim);
}
Tensor dot(const Tensor& input, const Tensor& other) {
  check_defined(input, "dot", "input 0");
  check_defined(other, "dot", "input 1");
  return call(dot_op, {&input, &other});
}

Tensor sum_to(const Tensor& input, const Shape& sizes, const char* op) {
  if (input.sizes() == sizes) return input;
  const int extra = input.dim() - sizes.size();
  Shape dims;
  bool fits = extra >= 0;
  for (int i = 0; fits && i < input.dim(); ++i) {
    const std::int64_t wanted = i < extra ? 1 : sizes[i - extra];
    if (i < extra || (wanted == 1 && input.sizes()[i] != 1)) {
      dims.push_back(i);
    } else if (wanted != input.sizes()[i]) {
      fits = false;
    }
  }
  if (!fits) {
    fail<ShapeError>("{}: a gradient of {} can't be summed to {}", op, input.sizes().str(), sizes.str());
  }
  const Tensor total = dims.empty() ? input : sum(input, dims, {.keepdim = true});
  return total.reshape(sizes);
}

}  // namespace halfstep
