// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/matmul.h"

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

// The promoted dtype of the factors, which the kernel gets them in.
DType product_dtype(InferContext& ctx) {
  const Tensor &a = ctx.input(0), &b = ctx.input(1);
  DType dtype = a.impl()->dtype;
  if (b.impl()->dtype != dtype || (ctx.has(2) && ctx.input(2).impl()->dtype != dtype)) {
    // A 0-d factor is refused by the shape rule, so that ranks don't matter here.
    const Tensor* all[] = {&a, &b, ctx.has(2) ? &ctx.input(2) : &a};
    dtype = result_type(all, ctx.name());
    ctx.cast(dtype);
  }
  if (is_float8(dtype) || dtype == DType::boolean) {
    fail<DTypeError>("{}: {} is not supported here; convert with .to()", ctx.name(), name(dtype));
  }
  return dtype_or(ctx.attributes<MatmulAttributes>().dtype, dtype);
}

void infer_mm(InferContext& ctx) {
  const Tensor &a = ctx.input(0), &b = ctx.input(1);
  check_defined(a, ctx.name(), "input 0");
  check_defined(b, ctx.name(), "input 1");
  const Shape &x = a.impl()->sizes, &y = b.impl()->sizes;
  if (x.size() != 2 || y.size() != 2 || x[1] != y[0]) {
    fail<ShapeError>("{}: expected [m, k] and [k, n], got {} and {}", ctx.name(), x.str(), y.str());
  }
  ctx.output({x[0], y[1]}, product_dtype(ctx));
}

void infer_bmm(InferContext& ctx) {
  const Tensor &a = ctx.input(0), &b = ctx.input(1);
  check_defined(a, ctx.name(), "input 0");
  check_defined(b, ctx.name(), "input 1");
  const Shape &x = a.impl()->sizes, &y = b.impl()->sizes;
  if (x.size() != 3 || y.size() != 3 || x[0] != y[0] || x[2] != y[1]) {
    fail<ShapeError>("{}: expected [b, m, k] and [b, k, n], got {} and {}", ctx.name(), x.str(), y.str());
  }
  ctx.output({x[0], x[1], y[2]}, product_dtype(ctx));
}

void infer_linear(InferContext& ctx) {
  const Tensor &x = ctx.input(0), &w = ctx.input(1);
  const Shape &xs = x.impl()->sizes, &ws = w.impl()->sizes;
  if (ctx.has(2)) {
    const Shape& bs = ctx.input(2).impl()->sizes;
    if (bs.size() != 1 || bs[0] != ws[0]) {
      fail<ShapeError>("linear: expected bias [{}] for weight {}, got {}", ws[0], ws.str(), bs.str());
    }
  }
  ctx.output({xs[0], ws[0]}, product_dtype(ctx));
}

MatmulAttributes attributes_of(const MatmulOptions& options) {
  MatmulAttributes a;
  if (options.dtype) a.dtype = dtype_code(*options.dtype);
  return a;
}

const Op& mm_op = define_op({
    .name = "mm",
    .signature = "mm(input, other)",
    .infer = infer_mm,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, mm(c.grad(), matrix_transpose(c.input(1)), {.dtype = c.grad_dtype(0)}));
          if (c.needs(1)) c.set(1, mm(matrix_transpose(c.input(0)), c.grad(), {.dtype = c.grad_dtype(1)}));
        },
    .saves = {in(1), in(0)},
    .attributes = &attribute_struct<MatmulAttributes>(),
});

const Op& bmm_op = define_op({
    .name = "bmm",
    .signature = "bmm(input, other)",
    .infer = infer_bmm,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, bmm(c.grad(), matrix_transpose(c.input(1)), {.dtype = c.grad_dtype(0)}));
          if (c.needs(1)) c.set(1, bmm(matrix_transpose(c.input(0)), c.grad(), {.dtype = c.grad_dtype(1)}));
        },
    .saves = {in(1), in(0)},
    .attributes = &attribute_struct<MatmulAttributes>(),
});

// On matrices; linear() brings other shapes to that.
const Op& linear_op = define_op({
    .name = "linear",
    .signature = "linear(input, weight, bias)",
    .infer = infer_linear,
    .grad =
        [](GradContext& c) {
          const Tensor& g = c.grad();
          if (c.needs(0)) c.set(0, mm(g, c.input(1), {.dtype = c.grad_dtype(0)}));
          if (c.needs(1)) c.set(1, mm(matrix_transpose(g), c.input(0), {.dtype = c.grad_dtype(1)}));
          if (c.needs(2)) c.set(2, sum(g, {0}, {.dtype = c.grad_dtype(2)}));
        },
    .saves = {in(1), in(0)},
    .attributes = &attribute_struct<MatmulAttributes>(),
});

const Op& mv_op = define_op({.name = "mv", .signature = "mv(input, vector)", .composite = true});
const Op& matmul_op = define_op({.name = "matmul", .signature = "matmul(input, other)", .composite = true});
const Op& outer_op = define_op({.name = "outer", .signature = "outer(input, other)", .composite = true});
const Op& addmm_op =
    define_op({.name = "addmm", .signature = "addmm(input, a, b, beta=1, alpha=1)", .composite = true});
const Op& addmv_op =
    define_op({.name = "addmv", .signature = "addmv(input, matrix, vector, beta=1, alpha=1)", .composite = true});
const Op& addr_op = define_op({.name = "addr", .signature = "addr(input, a, b, beta=1, alpha=1)", .composite = true});
const Op& addbmm_op =
    define_op({.name = "addbmm", .signature = "addbmm(input, a, b, beta=1, alpha=1)", .composite = true});
const Op& baddbmm_op =
    define_op({.name = "baddbmm", .signature = "baddbmm(input, a, b, beta=1, alpha=1)", .composite = true});

template <class Product>
Tensor add_scaled(const char* op, const Tensor& input, const Tensor& a, const Tensor& b, Product product_of,
                  const AddmmOptions& o) {
  check_defined(input, op, "an input");
  // A 16-bit result is rounded once: product and sum are taken in float32.
  const bool low = a.defined() && b.defined() && is_low_precision(a.dtype()) && a.dtype() == b.dtype();
  const Tensor product = product_of(a, b, low ? MatmulOptions{.dtype = DType::f32} : MatmulOptions{});
  if (broadcast_shapes(product.sizes(), input.sizes(), op) != product.sizes()) {
    fail<ShapeError>("{}: expected an input that broadcasts to {}, got {}", op, product.sizes().str(),
                     input.sizes().str());
  }
  const Tensor scaled = o.alpha == 1 ? product : product * o.alpha;
  const Tensor result = o.beta == 0 ? scaled : add(scaled, input, o.beta);
  return low && (o.beta == 0 || input.dtype() == a.dtype()) ? cast(result, a.dtype()) : result;
}

Tensor matmul_composed(const Tensor& a, const Tensor& b) {
  if (a.dim() == 0 || b.dim() == 0) {
    fail<ShapeError>("matmul: expected at least one dimension each, got {} and {}", a.sizes().str(), b.sizes().str());
  }
  // Vectors become matrices, and lose that dimension again.
  if (a.dim() == 1) return matmul_composed(a.unsqueeze(0), b).squeeze(b.dim() == 1 ? 0 : -2);
  if (b.dim() == 1) return matmul_composed(a, b.unsqueeze(-1)).squeeze(-1);
  if (a.size(-1) != b.size(-2)) {
    fail<ShapeError>("matmul: expected [..., m, k] and [..., k, n], got {} and {}", a.sizes().str(), b.sizes().str());
  }
  if (a.dim() == 2 && b.dim() == 2) return mm(a, b);
  const std::int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
  if (b.dim() == 2) {
    // One matrix for all: the rows of the batch in one product.
    Shape sizes = a.sizes();
    sizes.back() = n;
    return mm(a.reshape({a.numel() / std::max<std::int64_t>(k, 1), k}), b).reshape(sizes);
  }
  Shape batch_a = a.sizes(), batch_b = b.sizes();
  batch_a.pop_back(), batch_a.pop_back(), batch_b.pop_back(), batch_b.pop_back();
  const Shape batch = broadcast_shapes(batch_a, batch_b, "matmul");
  const auto with = [&](std::int64_t rows, std::int64_t columns) {
    Shape s = batch;
    s.push_back(rows);
    s.push_back(columns);
    return s;
  };
  const std::int64_t count = batch.numel();
  const Tensor x = a.expand(with(m, k)).reshape({count, m, k});
  const Tensor y = b.expand(with(k, n)).reshape({count, k, n});
  return bmm(x, y).reshape(with(m, n));
}

}  // namespace

Tensor mm(const Tensor& input, const Tensor& other, const MatmulOptions& options) {
  return call(mm_op, {&input, &other}, attributes_of(options));
}

Tensor bmm(const Tensor& input, const Tensor& other, const MatmulOptions& options) {
  return call(bmm_op, {&input, &other}, attributes_of(options));
}

Tensor mv(const Tensor& input, const Tensor& vector) {
  return composite(mv_op, {&input, &vector}, [](std::span<const Tensor> in) {
    check_defined(in[0], "mv", "a matrix");
    check_defined(in[1], "mv", "a vector");
    if (in[0].dim() != 2 || in[1].dim() != 1 || in[0].size(1) != in[1].size(0)) {
      fail<ShapeError>("mv: expected [m, k] and [k], got {} and {}", in[0].sizes().str(), in[1].sizes().str());
    }
    return mm(in[0], in[1].unsqueeze(1)).squeeze(1);
  });
}

Tensor matmul(const Tensor& input, const Tensor& other) {
  return composite(matmul_op, {&input, &other}, [](std::span<const Tensor> in) {
    check_defined(in[0], "matmul", "input 0");
    check_defined(in[1], "matmul", "input 1");
    return matmul_composed(in[0], in[1]);
  });
}

Tensor outer(const Tensor& input, const Tensor& other) {
  return composite(outer_op, {&input, &other}, [](std::span<const Tensor> in) {
    check_defined(in[0], "outer", "input 0");
    check_defined(in[1], "outer", "input 1");
    if (in[0].dim() != 1 || in[1].dim() != 1) {
      fail<ShapeError>("outer: expected two vectors, got {} and {}", in[0].sizes().str(), in[1].sizes().str());
    }
    return in[0].unsqueeze(1) * in[1].unsqueeze(0);
  });
}

Tensor linear(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  check_defined(input, "linear", "an input");
  check_defined(weight, "linear", "a weight");
  const Shape &xs = input.impl()->sizes, &ws = weight.impl()->sizes;
  if (ws.size() != 2) fail<ShapeError>("linear: expected weight [out, in], got {}", ws.str());
  if (xs.empty() || xs.back() != ws[1]) {
    const bool flat = xs.size() > 1 && xs.numel() == xs[0] * ws[1];
    fail<ShapeError>("linear: expected input [*, {}], got {}{}", ws[1], xs.str(), flat ? "; flatten it first?" : "");
  }
  if (xs.size() == 2) return call(linear_op, {&input, &weight, &bias}, MatmulAttributes{});
  Shape sizes = xs;
  sizes.back() = ws[0];
  const Tensor rows = input.reshape(
      {xs.back() == 0 ? sizes.numel() / std::max<std::int64_t>(ws[0], 1) : input.numel() / xs.back(), xs.back()});
  return call(linear_op, {&rows, &weight, &bias}, MatmulAttributes{}).reshape(sizes);
}

Tensor addmm(const Tensor& input, const Tensor& a, const Tensor& b, const AddmmOptions& options) {
  return composite(addmm_op, {&input, &a, &b},
                   [&](std::span<const Tensor> in) { return add_scaled("addmm", in[0], in[1], in[2], mm, options); });
}

Tensor addmv(const Tensor& input, const Tensor& matrix, const Tensor& vector, const AddmmOptions& options) {
  const auto product = [](const Tensor& a, const Tensor& b, const MatmulOptions& o) {
    check_defined(a, "addmv", "a matrix");
    check_defined(b, "addmv", "a vector");
    if (a.dim() != 2 || b.dim() != 1 || a.size(1) != b.size(0)) {
      fail<ShapeError>("addmv: expected [m, k] and [k], got {} and {}", a.sizes().str(), b.sizes().str());
    }
    return mm(a, b.unsqueeze(1), o).squeeze(1);
  };
  return composite(addmv_op, {&input, &matrix, &vector}, [&](std::span<const Tensor> in) {
    return add_scaled("addmv", in[0], in[1], in[2], product, options);
  });
}

Tensor addr(const Tensor& input, const Tensor& a, const Tensor& b, const AddmmOptions& options) {
  const auto product = [](const Tensor& x, const Tensor& y, const MatmulOptions& o) {
    check_defined(x, "addr", "a vector");
    check_defined(y, "addr", "a vector");
    if (x.dim() != 1 || y.dim() != 1) {
      fail<ShapeError>("addr: expected two vectors, got {} and {}", x.sizes().str(), y.sizes().str());
    }
    return mm(x.unsqueeze(1), y.unsqueeze(0), o);
  };
  return composite(addr_op, {&input, &a, &b}, [&](std::span<const Tensor> in) {
    return add_scaled("addr", in[0], in[1], in[2], product, options);
  });
}

Tensor addbmm(const Tensor& input, const Tensor& a, const Tensor& b, const AddmmOptions& options) {
  // The sum over the batch is one product whose inner dimension is batch and k together.
  const auto product = [](const Tensor& x, const Tensor& y, const MatmulOptions& o) {
    check_defined(x, "addbmm", "a batch of matrices");
    check_defined(y, "addbmm", "a batch of matrices");
    if (x.dim() != 3 || y.dim() != 3 || x.size(0) != y.size(0) || x.size(2) != y.size(1)) {
      fail<ShapeError>("addbmm: expected [b, m, k] and [b, k, n], got {} and {}", x.sizes().str(), y.sizes().str());
    }
    const std::int64_t inner = x.size(0) * x.size(2);
    return mm(x.permute({1, 0, 2}).reshape({x.size(1), inner}), y.reshape({inner, y.size(2)}), o);
  };
  return composite(addbmm_op, {&input, &a, &b}, [&](std::span<const Tensor> in) {
    return add_scaled("addbmm", in[0], in[1], in[2], product, options);
  });
}

Tensor baddbmm(const Tensor& input, const Tensor& a, const Tensor& b, const AddmmOptions& options) {
  return composite(baddbmm_op, {&input, &a, &b}, [&](std::span<const Tensor> in) {
    return add_scaled("baddbmm", in[0], in[1], in[2], bmm, options);
  });
}

}  // namespace halfstep
