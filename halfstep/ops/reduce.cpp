// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/reduce.h"

#include <cstddef>

#include "halfstep/core/fail.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/op.h"

namespace halfstep {
namespace {

// The sizes after reduction over `dims` (none: all).
Shape reduced_sizes(const Shape& sizes, const Shape& dims, bool keepdim, const char* op) {
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

const Op& sum_op = define_op({
    .name = "sum",
    .signature = "sum(input, dims=[], keepdim=false, dtype=none)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<ReduceAttributes>();
          const Tensor& x = ctx.input(0);
          check_defined(x, ctx.name(), "a tensor");
          const DType natural = is_floating(x.dtype()) ? x.dtype() : DType::i64;
          ctx.output(reduced_sizes(x.sizes(), a.dims.shape(), a.keepdim, ctx.name()), a.dtype.or_else(natural));
        },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<ReduceAttributes>();
          const Shape& sizes = c.input_sizes(0);
          const Shape kept = reduced_sizes(sizes, a.dims.shape(), true, "sum");
          c.set(0, c.grad().reshape(kept).expand(sizes));
        },
    .attributes_size = sizeof(ReduceAttributes),
    .dtype_attribute = offsetof(ReduceAttributes, dtype),
});

}  // namespace

Tensor sum(const Tensor& input, const Shape& dims, const ReduceOptions& options) {
  ReduceAttributes a{.dims = dims, .keepdim = options.keepdim, .dtype = {}};
  if (options.dtype) a.dtype = *options.dtype;
  return call(sum_op, {&input}, a);
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
