// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/sort.h"

#include <algorithm>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/op.h"

namespace halfstep {
namespace {

// The values came from these places, each from one of its own.
void gradient_to_places(GradContext& c, std::int64_t dim) {
  if (!c.grad(0).defined()) return;
  const Tensor zero = zeros(c.input_sizes(0), {.dtype = c.grad_dtype(0), .device = c.device(0)});
  c.set(0, scatter_add(zero, dim, c.output(1).detach(), c.grad(0)));
}

const Op& sort_op = define_op({
    .name = "sort",
    .signature = "sort(input, dim=-1, descending=false, stable=false)",
    .infer =
        [](InferContext& ctx) {
          const Tensor& x = ctx.input(0);
          wrap_dim(ctx.attributes<SortAttributes>().dim, std::max(x.dim(), 1), ctx.name());
          ctx.output(x.sizes(), x.dtype());
          ctx.output(x.sizes(), DType::i64);
        },
    .grad = [](GradContext& c) { gradient_to_places(c, c.attributes<SortAttributes>().dim); },
    .saves = {out(1)},
    .attributes = &attribute_struct<SortAttributes>(),
});

const Op& topk_op = define_op({
    .name = "topk",
    .signature = "topk(input, k, dim=-1, largest=true, sorted=true)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<TopKAttributes>();
          Shape sizes = ctx.input(0).sizes();
          const int dim = wrap_dim(a.dim, std::max(sizes.size(), 1), ctx.name());
          const std::int64_t n = sizes.empty() ? 1 : sizes[dim];
          if (a.k < 0 || a.k > n) {
            fail<ShapeError>("topk: expected a k from 0 to {} for dimension {} of {}, got {}", n, dim, sizes.str(),
                             a.k);
          }
          if (!sizes.empty()) sizes[dim] = a.k;
          ctx.output(sizes, ctx.input(0).dtype());
          ctx.output(sizes, DType::i64);
        },
    .grad = [](GradContext& c) { gradient_to_places(c, c.attributes<TopKAttributes>().dim); },
    .saves = {out(1)},
    .attributes = &attribute_struct<TopKAttributes>(),
});

SortResult pick(const SortResult& sorted, std::int64_t dim, std::int64_t at, bool keepdim) {
  if (sorted.values.dim() == 0) return sorted;
  if (keepdim) return {sorted.values.narrow(dim, at, 1), sorted.indices.narrow(dim, at, 1)};
  return {sorted.values.select(dim, at), sorted.indices.select(dim, at)};
}

}  // namespace

SortResult sort(const Tensor& input, std::int64_t dim, const SortOptions& options) {
  check_defined(input, "sort", "a tensor");
  auto [values, indices] = call_n<2>(sort_op, {&input}, SortAttributes{.dim = dim, .descending = options.descending});
  return {values, indices};
}

Tensor argsort(const Tensor& input, std::int64_t dim, const SortOptions& options) {
  return sort(input, dim, options).indices;
}

SortResult topk(const Tensor& input, std::int64_t k, std::int64_t dim, const TopKOptions& options) {
  check_defined(input, "topk", "a tensor");
  auto [values, indices] = call_n<2>(
      topk_op, {&input}, TopKAttributes{.dim = dim, .k = k, .largest = options.largest, .sorted = options.sorted});
  return {values, indices};
}

SortResult kthvalue(const Tensor& input, std::int64_t k, std::int64_t dim, bool keepdim) {
  check_defined(input, "kthvalue", "a tensor");
  const std::int64_t n = input.dim() == 0 ? 1 : input.size(dim);
  if (k < 1 || k > n) {
    fail<ShapeError>("kthvalue: expected a k from 1 to {} for dimension {} of {}, got {}", n, dim, input.sizes().str(),
                     k);
  }
  return pick(topk(input, k, dim, {.largest = false}), dim, k - 1, keepdim);
}

}  // namespace halfstep
