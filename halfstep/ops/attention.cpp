// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout_internal.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/triangle.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

// The ops take four dimensions: [B or 1, heads, L, E], [B or 1, heads, S, E], [B or 1, heads, S, Ev] and a mask
// [B or 1, H or 1, L or 1, S or 1], where the heads of each divide the largest, H. Dropout numbers the weights of
// [B, H, L, S] row-major.

// The promoted dtype of query, key and value (inputs `first` to first + 2), which the kernel gets them in.
DType common_dtype(InferContext& ctx, int first) {
  const Tensor* all[] = {&ctx.input(first), &ctx.input(first + 1), &ctx.input(first + 2)};
  const DType dtype = result_type(all, ctx.name());
  std::uint64_t mask = 0;
  for (int i = 0; i < 3; ++i) {
    if (all[i]->dtype() != dtype) mask |= std::uint64_t{1} << (first + i);
  }
  if (mask != 0) ctx.cast(dtype, mask);
  return dtype;
}

// In the order of dimensions of `like`, so that heads merge without a copy where they were split without one; matrix
// rows stay contiguous.
void output_like(InferContext& ctx, const Shape& sizes, const Tensor& like, DType dtype) {
  const Shape strides = strides_like(sizes, like.strides());
  if (strides.back() == 1) return ctx.output(sizes, strides, dtype);
  ctx.output(sizes, dtype);
}

// As std::max, but with 0 above 1: a batch of none is as wide as it gets.
std::int64_t wider(std::int64_t a, std::int64_t b) { return a == 0 || b == 0 ? 0 : std::max(a, b); }

Shape result_sizes(const Tensor& q, const Tensor& k, const Tensor& v) {
  Shape s{0, 0, q.size(2), v.size(3)};
  for (int d = 0; d < 2; ++d) s[d] = wider(wider(q.size(d), k.size(d)), v.size(d));
  return s;
}

// Inputs: gradient, query, key, value, mask, dropout state, log-sum-exp. Outputs: the gradients of query, key, value
// (broadcast over the batch) and mask ([B, H, L, S]), empty where not asked for.
const Op& attention_backward_op = define_op({
    .name = "scaled_dot_product_attention_backward",
    .signature = "scaled_dot_product_attention_backward(gradient, query, key, value, mask, state, logsumexp)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<AttentionAttributes>();
          const DType dtype = common_dtype(ctx, 1);
          const Shape out = result_sizes(ctx.input(1), ctx.input(2), ctx.input(3));
          for (int i = 0; i < 3; ++i) {
            const Tensor& x = ctx.input(i + 1);
            const DType wanted = dtype_or(a.dtypes[i], dtype);
            if (!a.want[i]) {
              ctx.output({0}, wanted);
            } else {
              output_like(ctx, {out[0], i == 0 ? out[1] : x.size(1), x.size(2), x.size(3)}, x, wanted);
            }
          }
          ctx.output(a.want[3] ? Shape{out[0], out[1], out[2], ctx.input(2).size(2)} : Shape{0},
                     accumulate_dtype(dtype));
        },
    .attributes = &attribute_struct<AttentionAttributes>(),
    .key = 1,
    .backward = true,
});

// [b, heads, ...] with each head repeated so that there are `n`; one head broadcasts by itself.
Tensor repeat_heads(const Tensor& t, std::int64_t n) {
  const Shape s = t.sizes();
  if (s[1] == n || s[1] == 1) return t;
  return t.unsqueeze(2).expand({s[0], s[1], n / s[1], s[2], s[3]}).reshape({s[0], n, s[2], s[3]});
}
// The gradient of that; the engine sums over a broadcast head.
Tensor sum_heads(const Tensor& t, std::int64_t heads) {
  const Shape s = t.sizes();
  if (s[1] == heads || heads == 1) return t;
  return sum(t.reshape({s[0], heads, s[1] / heads, s[2], s[3]}), {2});
}

// Of recorded ops, for second derivatives.
void composed_gradient(GradContext& c) {
  const auto& a = c.attributes<AttentionAttributes>();
  const Tensor& lse = c.output(1);
  const DType inner = lse.dtype();
  const std::int64_t heads = lse.size(1);
  const Tensor q = repeat_heads(c.input(0).to(inner), heads), k = repeat_heads(c.input(1).to(inner), heads);
  const Tensor g = c.grad().to(inner);
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  Tensor scores = matmul(q, matrix_transpose(k)) * a.scale;
  if (const Tensor& mask = c.input(3); mask.defined()) {
    scores =
        mask.dtype() == DType::boolean ? masked_fill(scores, logical_not(mask), kNothing) : scores + mask.to(inner);
  }
  if (a.causal) {
    const Tensor later = triu(ones({q.size(2), k.size(2)}, {.dtype = DType::boolean, .device = q.device()}), 1);
    scores = masked_fill(scores, later, kNothing);
  }
  // Queries that see nothing: their softmax would be 0 / 0.
  const Tensor blind = eq(lse.detach(), kNothing).unsqueeze(-1);
  const Tensor p = masked_fill(softmax(masked_fill(scores, blind, 0), -1), blind, 0);
  const auto drop = [&](const Tensor& t) {
    if (a.dropout == 0) return t;
    static const Op& dropout_op = *find_op("dropout");
    const Tensor full = t.contiguous();
    return call(dropout_op, {&full, &c.input(4)}, DropoutAttributes{a.dropout});
  };
  if (c.needs(2)) c.set(2, sum_heads(matmul(matrix_transpose(drop(p)), g), c.input_sizes(2)[1]));
  if (!c.needs(0) && !c.needs(1) && !c.needs(3)) return;
  const Tensor v = repeat_heads(c.input(2).to(inner), heads);
  const Tensor dp = drop(matmul(g, matrix_transpose(v)));
  const Tensor ds = p * (dp - sum(p * dp, {-1}, {.keepdim = true}));
  if (c.needs(0)) c.set(0, sum_heads(matmul(ds, k) * a.scale, c.input_sizes(0)[1]));
  if (c.needs(1)) c.set(1, sum_heads(matmul(matrix_transpose(ds), q) * a.scale, c.input_sizes(1)[1]));
  if (c.needs(3)) c.set(3, ds);
}

void attention_gradient(GradContext& c) {
  if (!c.grad().defined()) return;
  if (c.create_graph) return composed_gradient(c);
  AttentionAttributes a = c.attributes<AttentionAttributes>();
  for (int i = 0; i < 4; ++i) a.want[i] = c.needs(i);
  for (int i = 0; i < 3; ++i) a.dtypes[i] = dtype_code(c.grad_dtype(i));
  // The value is not saved when only its own gradient is asked for: anything of its size stands for it.
  const Tensor v = c.input(2).defined()
                       ? c.input(2)
                       : empty({1}, {.dtype = c.input_dtype(2), .device = c.device(2)}).expand(c.input_sizes(2));
  const auto d = call_n<4>(attention_backward_op,
                           {&c.grad(), &c.input(0), &c.input(1), &v, &c.input(3), &c.input(4), &c.output(1)}, a);
  for (int i = 0; i < 4; ++i) {
    if (a.want[i]) c.set(i, d[static_cast<std::size_t>(i)]);
  }
}

// Inputs: query, key, value, mask, dropout state. Outputs: the result, and for each query the logarithm of its sum of
// exponentials (-infinity where it sees no key).
const Op& attention_op = define_op({
    .name = "scaled_dot_product_attention",
    .signature = "scaled_dot_product_attention(query, key, value, mask=none, dropout_p=0, is_causal=false, "
                 "scale=1/sqrt(E), enable_gqa=false)",
    .infer =
        [](InferContext& ctx) {
          const DType dtype = common_dtype(ctx, 0);
          const Shape out = result_sizes(ctx.input(0), ctx.input(1), ctx.input(2));
          output_like(ctx, out, ctx.input(0), dtype);
          ctx.output({out[0], out[1], out[2]}, accumulate_dtype(dtype));
        },
    .grad = attention_gradient,
    .saves = {in(0, 1, 2, 3, 4) | out(1), in(0, 1, 2, 3, 4) | out(1), in(0, 1, 3, 4) | out(1),
              in(0, 1, 2, 3, 4) | out(1)},
    .attributes = &attribute_struct<AttentionAttributes>(),
});

[[noreturn]] void refuse(const char* what, const Tensor& q, const Tensor& k, const Tensor& v) {
  fail<ShapeError>("scaled_dot_product_attention: expected {}, got query {}, key {}, value {}", what, q.sizes().str(),
                   k.sizes().str(), v.sizes().str());
}

// Leading dimensions, without the last `n`.
Shape leading(const Tensor& t, int n) {
  Shape s = t.sizes();
  for (int i = 0; i < n && !s.empty(); ++i) s.pop_back();
  return s;
}

// `t` in four dimensions, its dimensions before the last three being `batch` after broadcasting.
Tensor in_four(const Tensor& t, const Shape& batch) {
  Tensor x = t;
  while (x.dim() < 4) x = x.unsqueeze(0);
  if (batch.size() <= 1) return x;
  Shape sizes = batch;
  for (int i = -3; i < 0; ++i) sizes.push_back(x.size(i));
  return x.expand(sizes).reshape({batch.numel(), x.size(-3), x.size(-2), x.size(-1)});
}

void check_mask(const Tensor& mask, const Shape& scores, bool causal) {
  if (causal) fail<Error>("scaled_dot_product_attention: expected a mask or is_causal, got both");
  if (mask.dtype() != DType::boolean && (!mask.is_floating() || is_float8(mask.dtype()))) {
    fail<DTypeError>("scaled_dot_product_attention: expected a mask of bool or a floating dtype, got {}",
                     name(mask.dtype()));
  }
  bool fits = mask.dim() <= scores.size();
  for (int d = 1; fits && d <= mask.dim(); ++d) {
    fits = mask.size(-d) == 1 || mask.size(-d) == scores[scores.size() - d];
  }
  if (!fits) {
    fail<ShapeError>("scaled_dot_product_attention: expected a mask that broadcasts to {}, got {}", scores.str(),
                     mask.sizes().str());
  }
}

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const AttentionOptions& options) {
  constexpr const char* kName = "scaled_dot_product_attention";
  check_defined(query, kName, "a query");
  check_defined(key, kName, "a key");
  check_defined(value, kName, "a value");
  for (const Tensor* t : {&query, &key, &value}) check_floating(*t, kName);
  if (!(options.dropout_p >= 0 && options.dropout_p <= 1)) {
    fail<Error>("{}: expected a probability between 0 and 1, got {}", kName, options.dropout_p);
  }
  const int rank = std::max({query.dim(), key.dim(), value.dim()});
  if (std::min({query.dim(), key.dim(), value.dim()}) < 2 || query.size(-1) != key.size(-1) ||
      key.size(-2) != value.size(-2)) {
    refuse("[..., L, E], [..., S, E] and [..., S, Ev]", query, key, value);
  }
  const auto heads = [](const Tensor& t) { return t.dim() > 2 ? t.size(-3) : std::int64_t{1}; };
  std::int64_t n = wider(wider(heads(query), heads(key)), heads(value));
  if (options.enable_gqa) {
    if (std::min({query.dim(), key.dim(), value.dim()}) < 3)
      refuse("three dimensions for enable_gqa", query, key, value);
    n = heads(query);
    for (const Tensor* t : {&key, &value}) {
      if (heads(*t) == 0 ? n != 0 : n % heads(*t) != 0) {
        refuse("heads of key and value that divide the query's", query, key, value);
      }
    }
  }
  const auto fits = [n](std::int64_t h) { return h == n || h == 1; };
  if (!options.enable_gqa && !(fits(heads(query)) && fits(heads(key)) && fits(heads(value)))) {
    const bool divides = heads(key) > 0 && heads(query) % heads(key) == 0;
    refuse(
        divides ? "leading dimensions that broadcast (enable_gqa shares heads)" : "leading dimensions that broadcast",
        query, key, value);
  }
  const Shape batch =
      broadcast_shapes(broadcast_shapes(leading(query, 3), leading(key, 3), kName), leading(value, 3), kName);
  Shape scores = batch;
  if (rank > 2) scores.push_back(n);
  scores.push_back(query.size(-2));
  scores.push_back(key.size(-2));
  Tensor mask = options.mask;
  if (mask.defined()) {
    check_mask(mask, scores, options.is_causal);
    mask = in_four(mask, batch);
  }
  const Tensor q = in_four(query, batch), k = in_four(key, batch), v = in_four(value, batch);
  AttentionAttributes a;
  const auto width = static_cast<double>(query.size(-1));
  a.scale = options.scale.value_or(width > 0 ? 1 / std::sqrt(width) : 1);
  a.dropout = options.dropout_p;
  a.causal = options.is_causal;
  const Tensor state = a.dropout > 0 ? reserve_dropout_state(scores.numel(), query.device()) : Tensor();
  const Tensor result = call_n<2>(attention_op, {&q, &k, &v, &mask, &state}, a)[0];
  if (scores.size() == 4) return result;
  scores.back() = value.size(-1);
  return result.reshape(scores);
}

}  // namespace halfstep
