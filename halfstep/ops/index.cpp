// SPDX-License-Identifier: Apache-2.0
// Ops along one dimension: gather, scatter, index_select, index_add; embedding. Indexing with several tensors is in
// index_put.cpp.
#include "halfstep/ops/index.h"

#include <algorithm>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index_detail.h"
#include "halfstep/ops/op.h"

namespace halfstep {
namespace {

// The dtype of a result that two tensors go into; they are converted where they differ.
DType join_dtypes(InferContext& ctx, int a, int b) {
  DType dtype = ctx.input(a).dtype();
  if (ctx.input(b).dtype() != dtype) {
    const Tensor* both[] = {&ctx.input(a), &ctx.input(b)};
    dtype = result_type(both, ctx.name());
    ctx.cast(dtype, std::uint64_t{1} << a | std::uint64_t{1} << b);
  }
  return dtype;
}

// A 0-d tensor counts as one of one element.
std::int64_t size_at(const Shape& sizes, int d) { return sizes.empty() ? 1 : sizes[d]; }

// Checks the index (input 1) of gather or scatter against what it reads or writes (input 0).
void check_along(const InferContext& ctx, std::int64_t wanted) {
  const Shape &sizes = ctx.input(0).sizes(), &index = ctx.input(1).sizes();
  const int n = std::max(sizes.size(), 1);
  const int dim = wrap_dim(wanted, n, ctx.name());
  bool fits = n == std::max(index.size(), 1);
  for (int d = 0; fits && d < n; ++d) fits = d == dim || size_at(index, d) <= size_at(sizes, d);
  if (!fits && index.numel() != 0) {
    fail<ShapeError>("{}: expected an index no larger than the input {} except along dimension {}, got {}", ctx.name(),
                     sizes.str(), dim, index.str());
  }
}

void infer_gather(InferContext& ctx) {
  check_along(ctx, ctx.attributes<AlongAttributes>().dim);
  ctx.output(ctx.input(1).sizes(), ctx.input(0).dtype());
}

void output_like_input(InferContext& ctx, DType dtype) {
  const Tensor& x = ctx.input(0);
  ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), dtype);
}

void infer_scatter(InferContext& ctx) {
  const Shape& index = ctx.input(1).sizes();
  check_along(ctx, ctx.attributes<AlongAttributes>().dim);
  const Shape& src = ctx.input(2).sizes();
  bool fits = std::max(src.size(), 1) == std::max(index.size(), 1);
  for (int d = 0; fits && d < index.size(); ++d) fits = index[d] <= size_at(src, d);
  if (!fits && index.numel() != 0) {
    fail<ShapeError>("{}: expected an index no larger than src {}, got {}", ctx.name(), src.str(), index.str());
  }
  output_like_input(ctx, join_dtypes(ctx, 0, 2));
}

// The vector of indices of index_select and index_add; a 0-d one counts as one element.
std::int64_t check_vector(const InferContext& ctx, const Tensor& index) {
  if (index.dim() > 1) {
    fail<ShapeError>("{}: expected a vector of indices, got {}", ctx.name(), index.sizes().str());
  }
  return index.numel();
}

Tensor zeros_for(GradContext& c, int i, DType dtype) {
  return zeros(c.input_sizes(i), {.dtype = dtype, .device = c.device(i)});
}

// The part of `src` that an index, which may be smaller, reads.
Tensor gather_for(const Tensor& g, std::int64_t dim, const Tensor& index, const Shape& src) {
  Tensor result = gather(g, dim, index);
  if (index.sizes() == src) return result;
  // What the index left out has no part in the result.
  Tensor whole = zeros(src, {.dtype = g.dtype(), .device = g.device()});
  Tensor part = whole;
  for (int d = 0; d < index.dim(); ++d) part = part.slice(d, 0, index.sizes()[d]);
  part.copy_(result);
  return whole;
}

const Op& gather_op = define_op({
    .name = "gather",
    .signature = "gather(input, dim, index)",
    .infer = infer_gather,
    .grad =
        [](GradContext& c) {
          const std::int64_t dim = c.attributes<AlongAttributes>().dim;
          c.set(0, scatter_add_(zeros_for(c, 0, c.grad_dtype(0)), dim, c.input(1), c.grad()));
        },
    .saves = {in(1)},
    .attributes = &attribute_struct<AlongAttributes>(),
});

const Op& scatter_op = define_op({
    .name = "scatter",
    .signature = "scatter(input, dim, index, src)",
    .infer = infer_scatter,
    .grad =
        [](GradContext& c) {
          const std::int64_t dim = c.attributes<AlongAttributes>().dim;
          if (c.needs(0)) c.set(0, scatter(c.grad(), dim, c.input(1), Scalar(0)));
          if (c.needs(2)) c.set(2, gather_for(c.grad(), dim, c.input(1), c.input_sizes(2)));
        },
    .saves = {in(1), 0, in(1)},
    .attributes = &attribute_struct<AlongAttributes>(),
});

const Op& scatter_value_op = define_op({
    .name = "scatter_value",
    .signature = "scatter(input, dim, index, value)",
    .infer =
        [](InferContext& ctx) {
          check_along(ctx, ctx.attributes<ScatterValueAttributes>().dim);
          output_like_input(ctx, ctx.input(0).dtype());
        },
    .grad =
        [](GradContext& c) {
          c.set(0, scatter(c.grad(), c.attributes<ScatterValueAttributes>().dim, c.input(1), Scalar(0)));
        },
    .saves = {in(1)},
    .attributes = &attribute_struct<ScatterValueAttributes>(),
});

const Op& scatter_add_op = define_op({
    .name = "scatter_add",
    .signature = "scatter_add(input, dim, index, src)",
    .infer = infer_scatter,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, c.grad());
          if (c.needs(2)) {
            c.set(2, gather_for(c.grad(), c.attributes<AlongAttributes>().dim, c.input(1), c.input_sizes(2)));
          }
        },
    .saves = {0, 0, in(1)},
    .attributes = &attribute_struct<AlongAttributes>(),
});

const Op& scatter_amax_op = define_op({
    .name = "scatter_amax",
    .signature = "scatter_amax(input, dim, index, src)",
    .infer = infer_scatter,
    .grad =
        [](GradContext& c) {
          const std::int64_t dim = c.attributes<AlongAttributes>().dim;
          const Tensor &index = c.input(1), result = c.output().detach();
          const DType dtype = c.grad().dtype();
          Tensor src = c.input(2).detach();
          for (int d = 0; d < index.dim(); ++d) src = src.slice(d, 0, index.sizes()[d]);
          const Tensor own = eq(c.input(0).detach(), result).to(dtype), given = eq(src, gather(result, dim, index));
          const Tensor share = c.grad() / scatter_add(own, dim, index, given.to(dtype));
          if (c.needs(0)) c.set(0, share * own);
          if (!c.needs(2)) return;
          // What the index left out has a share of 0.
          c.set(2, gather_for(share, dim, index, c.input_sizes(2)) *
                       eq(c.input(2).detach(), gather_for(result, dim, index, c.input_sizes(2))).to(dtype));
        },
    .saves = {in(0, 1, 2) | out(0), 0, in(0, 1, 2) | out(0)},
    .attributes = &attribute_struct<AlongAttributes>(),
});

const Op& index_select_op = define_op({
    .name = "index_select",
    .signature = "index_select(input, dim, index)",
    .infer =
        [](InferContext& ctx) {
          const Tensor& x = ctx.input(0);
          const int dim = wrap_dim(ctx.attributes<AlongAttributes>().dim, std::max(x.dim(), 1), ctx.name());
          const std::int64_t n = check_vector(ctx, ctx.input(1));
          Shape sizes = x.sizes();
          if (sizes.empty()) {
            if (n != 1) fail<ShapeError>("index_select: expected one index for a 0-d tensor, got {}", n);
          } else {
            sizes[dim] = n;
          }
          ctx.output(sizes, x.dtype());
        },
    .grad =
        [](GradContext& c) {
          const std::int64_t dim = c.attributes<AlongAttributes>().dim;
          c.set(0, index_add_(zeros_for(c, 0, c.grad_dtype(0)), dim, c.input(1), c.grad()));
        },
    .saves = {in(1)},
    .attributes = &attribute_struct<AlongAttributes>(),
});

const Op& index_add_op = define_op({
    .name = "index_add",
    .signature = "index_add(input, dim, index, source, alpha=1)",
    .infer =
        [](InferContext& ctx) {
          const Shape& sizes = ctx.input(0).sizes();
          const int dim = wrap_dim(ctx.attributes<IndexAddAttributes>().dim, std::max(sizes.size(), 1), ctx.name());
          const std::int64_t n = check_vector(ctx, ctx.input(1));
          const Shape& source = ctx.input(2).sizes();
          Shape wanted = sizes;
          if (!wanted.empty()) wanted[dim] = n;
          if (source != wanted) {
            fail<ShapeError>("index_add: expected a source {} for {} indices into dimension {} of {}, got {}",
                             wanted.str(), n, dim, sizes.str(), source.str());
          }
          const DType dtype = join_dtypes(ctx, 0, 2);
          if (ctx.attributes<IndexAddAttributes>().alpha.kind == 2 && !is_floating(dtype)) {
            fail<DTypeError>("index_add: expected a whole alpha for {}, got {}", name(dtype),
                             ctx.attributes<IndexAddAttributes>().alpha.floating);
          }
          output_like_input(ctx, dtype);
        },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<IndexAddAttributes>();
          if (c.needs(0)) c.set(0, c.grad());
          if (c.needs(2)) {
            const Tensor g = index_select(c.grad(), a.dim, c.input(1));
            c.set(2, a.alpha.floating == 1 ? g : g * Scalar(a.alpha.floating));
          }
        },
    .saves = {0, 0, in(1)},
    .attributes = &attribute_struct<IndexAddAttributes>(),
});

Tensor embedding_backward(const Tensor& gradient, const Tensor& indices, const EmbeddingAttributes& attributes);

const Op& embedding_op = define_op({
    .name = "embedding",
    .signature = "embedding(indices, weight, padding_idx=none)",
    .infer =
        [](InferContext& ctx) {
          const Tensor& weight = ctx.input(0);
          if (weight.dim() != 2) {
            fail<ShapeError>("embedding: expected a weight [rows, width], got {}", weight.sizes().str());
          }
          Shape sizes = ctx.input(1).sizes();
          sizes.push_back(weight.sizes()[1]);
          ctx.output(sizes, weight.dtype());
        },
    .grad =
        [](GradContext& c) {
          EmbeddingAttributes a = c.attributes<EmbeddingAttributes>();
          a.dtype = dtype_code(c.grad_dtype(0));
          c.set(0, embedding_backward(c.grad(), c.input(1), a));
        },
    .saves = {in(1)},
    .attributes = &attribute_struct<EmbeddingAttributes>(),
});

// [*, width] and indices [*] -> [rows, width]: the sum of the gradients of each row.
const Op& embedding_backward_op = define_op({
    .name = "embedding_backward",
    .signature = "embedding_backward(gradient, indices, rows, padding_idx=none)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<EmbeddingAttributes>();
          ctx.output({a.rows, ctx.input(0).sizes().back()}, dtype_or(a.dtype, ctx.input(0).dtype()));
        },
    .grad =
        [](GradContext& c) {
          // The rows again; those of the padding had no part in the sum.
          EmbeddingAttributes a = c.attributes<EmbeddingAttributes>();
          a.zero_padding = true;
          const Tensor g = c.grad();
          c.set(0, call(embedding_op, {&g, &c.input(1)}, a));
        },
    .saves = {in(1)},
    .attributes = &attribute_struct<EmbeddingAttributes>(),
    .backward = true,
});

Tensor embedding_backward(const Tensor& gradient, const Tensor& indices, const EmbeddingAttributes& attributes) {
  return call(embedding_backward_op, {&gradient, &indices}, attributes);
}

void check_pair(const Tensor& input, const Tensor& other, const char* op, const char* what) {
  check_defined(input, op, "an input");
  check_defined(other, op, what);
}

}  // namespace

Tensor detail::index_tensor(const Tensor& index, const char* op) {
  check_defined(index, op, "indices");
  if (index.dtype() == DType::i64) return index;
  if (index.dtype() == DType::i32) return index.to(DType::i64);
  fail<DTypeError>("{}: expected i64 or i32 indices, got {}", op, name(index.dtype()));
}

Tensor detail::apart(const Tensor& source, const Tensor& destination) {
  return source.storage() == destination.storage() ? source.clone() : source;
}

ScalarValue detail::scalar_value(Scalar s) {
  return {.floating = s.to_double(), .integer = s.to_int(), .kind = static_cast<int>(s.kind())};
}

Tensor gather(const Tensor& input, std::int64_t dim, const Tensor& index) {
  check_defined(input, "gather", "an input");
  const Tensor at = detail::index_tensor(index, "gather");
  return call(gather_op, {&input, &at}, AlongAttributes{.dim = dim});
}

Tensor take_along_dim(const Tensor& input, const Tensor& index, std::int64_t dim) {
  check_pair(input, index, "take_along_dim", "indices");
  if (input.dim() != index.dim() || input.dim() == 0) {
    fail<ShapeError>("take_along_dim: expected indices of as many dimensions as {}, got {}", input.sizes().str(),
                     index.sizes().str());
  }
  const int d = wrap_dim(dim, input.dim(), "take_along_dim");
  Shape a = input.sizes(), b = index.sizes();
  a[d] = b[d] = 1;
  const Shape both = broadcast_shapes(a, b, "take_along_dim");
  a = b = both;
  a[d] = input.sizes()[d];
  b[d] = index.sizes()[d];
  return gather(input.expand(a), d, index.expand(b));
}

Tensor scatter(const Tensor& input, std::int64_t dim, const Tensor& index, const Tensor& src) {
  check_pair(input, src, "scatter", "src");
  const Tensor at = detail::index_tensor(index, "scatter");
  return call(scatter_op, {&input, &at, &src}, AlongAttributes{.dim = dim});
}
Tensor scatter(const Tensor& input, std::int64_t dim, const Tensor& index, Scalar value) {
  check_defined(input, "scatter", "an input");
  const Tensor at = detail::index_tensor(index, "scatter");
  return call(scatter_value_op, {&input, &at},
              ScatterValueAttributes{.dim = dim, .value = detail::scalar_value(value)});
}
Tensor scatter_(Tensor input, std::int64_t dim, const Tensor& index, const Tensor& src) {
  check_pair(input, src, "scatter_", "src");
  const Tensor at = detail::index_tensor(index, "scatter_"), values = detail::apart(src, input);
  return call_in_place(scatter_op, input, {&at, &values}, AlongAttributes{.dim = dim});
}
Tensor scatter_(Tensor input, std::int64_t dim, const Tensor& index, Scalar value) {
  check_defined(input, "scatter_", "an input");
  const Tensor at = detail::index_tensor(index, "scatter_");
  return call_in_place(scatter_value_op, input, {&at},
                       ScatterValueAttributes{.dim = dim, .value = detail::scalar_value(value)});
}

Tensor scatter_add(const Tensor& input, std::int64_t dim, const Tensor& index, const Tensor& src) {
  check_pair(input, src, "scatter_add", "src");
  const Tensor at = detail::index_tensor(index, "scatter_add");
  return call(scatter_add_op, {&input, &at, &src}, AlongAttributes{.dim = dim});
}
Tensor scatter_add_(Tensor input, std::int64_t dim, const Tensor& index, const Tensor& src) {
  check_pair(input, src, "scatter_add_", "src");
  const Tensor at = detail::index_tensor(index, "scatter_add_"), values = detail::apart(src, input);
  return call_in_place(scatter_add_op, input, {&at, &values}, AlongAttributes{.dim = dim});
}

Tensor scatter_amax(const Tensor& input, std::int64_t dim, const Tensor& index, const Tensor& src) {
  check_pair(input, src, "scatter_amax", "src");
  const Tensor at = detail::index_tensor(index, "scatter_amax");
  return call(scatter_amax_op, {&input, &at, &src}, AlongAttributes{.dim = dim});
}

Tensor index_select(const Tensor& input, std::int64_t dim, const Tensor& index) {
  check_defined(input, "index_select", "an input");
  const Tensor at = detail::index_tensor(index, "index_select");
  return call(index_select_op, {&input, &at}, AlongAttributes{.dim = dim});
}

Tensor index_add(const Tensor& input, std::int64_t dim, const Tensor& index, const Tensor& source, Scalar alpha) {
  check_pair(input, source, "index_add", "a source");
  const Tensor at = detail::index_tensor(index, "index_add");
  return call(index_add_op, {&input, &at, &source},
              IndexAddAttributes{.dim = dim, .alpha = detail::scalar_value(alpha)});
}
Tensor index_add_(Tensor input, std::int64_t dim, const Tensor& index, const Tensor& source, Scalar alpha) {
  check_pair(input, source, "index_add_", "a source");
  const Tensor at = detail::index_tensor(index, "index_add_"), values = detail::apart(source, input);
  return call_in_place(index_add_op, input, {&at, &values},
                       IndexAddAttributes{.dim = dim, .alpha = detail::scalar_value(alpha)});
}

Tensor embedding(const Tensor& indices, const Tensor& weight, const EmbeddingFuncOptions& options) {
  check_defined(weight, "embedding", "a weight");
  const Tensor at = detail::index_tensor(indices, "embedding");
  EmbeddingAttributes a;
  a.rows = weight.dim() > 0 ? weight.sizes()[0] : 0;
  if (options.padding_idx) {
    const std::int64_t p = *options.padding_idx;
    if (p < -a.rows || p >= a.rows) {
      fail<Error>("embedding: expected a padding_idx from {} to {}, got {}", -a.rows, a.rows - 1, p);
    }
    a.padding_idx = p < 0 ? p + a.rows : p;
  }
  return call(embedding_op, {&weight, &at}, a);
}

Tensor one_hot(const Tensor& input, std::int64_t num_classes) {
  const Tensor at = detail::index_tensor(input, "one_hot");
  if (num_classes < -1 || num_classes == 0) {
    fail<Error>("one_hot: expected at least 1 class, or -1 to count them, got {}", num_classes);
  }
  if (num_classes == -1) {
    check_values(at, "one_hot");
    const std::vector<std::int64_t> values = at.to_vector<std::int64_t>();
    if (values.empty()) fail<Error>("one_hot: the number of classes can't be read off an empty tensor; give it");
    num_classes = *std::max_element(values.begin(), values.end()) + 1;
    if (num_classes < 1) fail<Error>("one_hot: expected classes of at least 0, got {}", num_classes - 1);
  }
  Shape sizes = at.sizes();
  sizes.push_back(num_classes);
  return scatter_(zeros(sizes, {.dtype = DType::i64, .device = at.device()}), -1, at.unsqueeze(-1), Scalar(1));
}

}  // namespace halfstep
