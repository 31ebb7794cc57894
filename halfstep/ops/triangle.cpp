// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/triangle.h"

#include <algorithm>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/reduce.h"

namespace halfstep {
namespace {

void infer_triangle(InferContext& ctx) {
  const Tensor& x = ctx.input(0);
  check_defined(x, ctx.name(), "a tensor");
  if (x.dim() < 2) fail<ShapeError>("{}: expected at least 2 dimensions, got {}", ctx.name(), x.sizes().str());
  ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), x.dtype());
}

const Op& tril_op = define_op({
    .name = "tril",
    .signature = "tril(input, diagonal=0)",
    .infer = infer_triangle,
    .grad = [](GradContext& c) { c.set(0, tril(c.grad(), c.attributes<DiagonalAttributes>().diagonal)); },
    .attributes = &attribute_struct<DiagonalAttributes>(),
});
const Op& triu_op = define_op({
    .name = "triu",
    .signature = "triu(input, diagonal=0)",
    .infer = infer_triangle,
    .grad = [](GradContext& c) { c.set(0, triu(c.grad(), c.attributes<DiagonalAttributes>().diagonal)); },
    .attributes = &attribute_struct<DiagonalAttributes>(),
});

// The two dimensions of a diagonal, and how many elements it has.
struct Diagonal {
  int dim1, dim2;
  std::int64_t length, row, column;
  Diagonal(const Shape& sizes, const DiagonalAttributes& a, const char* op)
      : dim1(wrap_dim(a.dim1, sizes.size(), op)), dim2(wrap_dim(a.dim2, sizes.size(), op)) {
    if (dim1 == dim2 || sizes.size() < 2) {
      fail<ShapeError>("{}: expected two different dimensions of {}, got {} and {}", op, sizes.str(), a.dim1, a.dim2);
    }
    // Bounded, so that no offset overflows.
    row = std::clamp<std::int64_t>(a.diagonal < -sizes[dim1] ? sizes[dim1] : -a.diagonal, 0, sizes[dim1]);
    column = std::clamp<std::int64_t>(a.diagonal, 0, sizes[dim2]);
    length = std::min(sizes[dim1] - row, sizes[dim2] - column);
  }
  Shape sizes_of(const Shape& sizes) const {
    Shape result = sizes;
    result.erase(std::max(dim1, dim2));
    result.erase(std::min(dim1, dim2));
    result.push_back(length);
    return result;
  }
};

const Op& diagonal_op = define_op({
    .name = "diagonal",
    .signature = "diagonal(input, offset=0, dim1=0, dim2=1)",
    .infer =
        [](InferContext& ctx) {
          const Tensor& x = ctx.input(0);
          check_defined(x, ctx.name(), "a tensor");
          const Diagonal d(x.sizes(), ctx.attributes<DiagonalAttributes>(), ctx.name());
          Shape strides = x.strides();
          const std::int64_t a = strides[d.dim1], b = strides[d.dim2];
          strides.erase(std::max(d.dim1, d.dim2));
          strides.erase(std::min(d.dim1, d.dim2));
          strides.push_back(a + b);
          const std::int64_t start = d.length > 0 ? d.row * a + d.column * b : 0;
          ctx.view(d.sizes_of(x.sizes()), strides, x.storage_offset() + start);
        },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<DiagonalAttributes>();
          c.set(0, diagonal_backward(c.grad(), c.input_sizes(0), a.diagonal, a.dim1, a.dim2));
        },
    .attributes = &attribute_struct<DiagonalAttributes>(),
    .view = true,
});

const Op& diagonal_backward_op = define_op({
    .name = "diagonal_backward",
    .signature = "diagonal_backward(gradient, sizes, offset, dim1, dim2)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<DiagonalAttributes>();
          const Shape sizes = shape_of(a.sizes);
          const Shape wanted = Diagonal(sizes, a, ctx.name()).sizes_of(sizes);
          if (ctx.input(0).sizes() != wanted) {
            fail<ShapeError>("diagonal_backward: expected {} for the diagonal of {}, got {}", wanted.str(), sizes.str(),
                             ctx.input(0).sizes().str());
          }
          ctx.output(sizes, ctx.input(0).dtype());
        },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<DiagonalAttributes>();
          c.set(0, diagonal(c.grad(), a.diagonal, a.dim1, a.dim2));
        },
    .attributes = &attribute_struct<DiagonalAttributes>(),
    .backward = true,
});

}  // namespace

Tensor tril(const Tensor& input, std::int64_t diagonal) {
  return call(tril_op, {&input}, DiagonalAttributes{.diagonal = diagonal});
}
Tensor triu(const Tensor& input, std::int64_t diagonal) {
  return call(triu_op, {&input}, DiagonalAttributes{.diagonal = diagonal});
}
Tensor tril_(Tensor input, std::int64_t diagonal) {
  return call_in_place(tril_op, input, {}, DiagonalAttributes{.diagonal = diagonal});
}
Tensor triu_(Tensor input, std::int64_t diagonal) {
  return call_in_place(triu_op, input, {}, DiagonalAttributes{.diagonal = diagonal});
}

Tensor diagonal(const Tensor& input, std::int64_t offset, std::int64_t dim1, std::int64_t dim2) {
  return call(diagonal_op, {&input}, DiagonalAttributes{.diagonal = offset, .dim1 = dim1, .dim2 = dim2});
}

Tensor diagonal_backward(const Tensor& gradient, const Shape& sizes, std::int64_t offset, std::int64_t dim1,
                         std::int64_t dim2) {
  return call(diagonal_backward_op, {&gradient},
              DiagonalAttributes{.sizes = int_list(sizes), .diagonal = offset, .dim1 = dim1, .dim2 = dim2});
}

Tensor diag_embed(const Tensor& input, std::int64_t offset) {
  check_defined(input, "diag_embed", "a tensor");
  if (input.dim() == 0) fail<ShapeError>("diag_embed: expected at least one dimension, got a 0-d tensor");
  Shape sizes = input.sizes();
  std::int64_t n = 0;
  if (offset == INT64_MIN || __builtin_add_overflow(sizes.back(), offset < 0 ? -offset : offset, &n)) {
    fail<ShapeError>("diag_embed: the offset {} is too large", offset);
  }
  sizes.back() = n;
  sizes.push_back(n);
  return diagonal_backward(input, sizes, offset, -2, -1);
}

Tensor diag(const Tensor& input, std::int64_t offset) {
  check_defined(input, "diag", "a tensor");
  if (input.dim() == 1) return diag_embed(input, offset);
  if (input.dim() != 2) fail<ShapeError>("diag: expected a vector or a matrix, got {}", input.sizes().str());
  return diagonal(input, offset).clone();
}

Tensor trace(const Tensor& input) {
  check_defined(input, "trace", "a tensor");
  if (input.dim() != 2) fail<ShapeError>("trace: expected a matrix, got {}", input.sizes().str());
  return sum(diagonal(input));
}

}  // namespace halfstep
