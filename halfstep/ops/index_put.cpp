// SPDX-License-Identifier: Apache-2.0
// Indexing with several tensors, and with masks.
#include <algorithm>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/index_detail.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

// The op's input has the indexed dimensions in front: inputs `first` and on are one i64 tensor for each of them, of one
// broadcast shape.
Shape indexed_sizes(const InferContext& ctx, int first) {
  Shape result;
  for (int i = first; i < ctx.size(); ++i) result = broadcast_shapes(result, ctx.input(i).sizes(), ctx.name());
  const Shape& x = ctx.input(0).sizes();
  for (int d = ctx.size() - first; d < x.size(); ++d) result.push_back(x[d]);
  return result;
}

Tensor call_index(const Tensor& x, std::span<const Tensor> at);
Tensor call_index_put(const Tensor& x, const Tensor& values, std::span<const Tensor> at, bool accumulate);

std::vector<Tensor> saved_indices(const GradContext& c, int first) {
  std::vector<Tensor> at;
  for (int i = first; i < c.size(); ++i) at.push_back(c.input(i));
  return at;
}

const Op& index_op = define_op({
    .name = "index",
    .signature = "index(input, indices)",
    .infer = [](InferContext& ctx) { ctx.output(indexed_sizes(ctx, 1), ctx.input(0).dtype()); },
    .grad =
        [](GradContext& c) {
          const Tensor zero = zeros(c.input_sizes(0), {.dtype = c.grad_dtype(0), .device = c.device(0)});
          c.set(0, call_index_put(zero, c.grad(), saved_indices(c, 1), true));
        },
    .saves = {in(1, 2, 3, 4, 5, 6, 7, 8)},
});

const Op& index_put_op = define_op({
    .name = "index_put",
    .signature = "index_put(input, indices, values, accumulate=false)",
    .infer =
        [](InferContext& ctx) {
          const Shape wanted = indexed_sizes(ctx, 2);
          if (ctx.input(1).sizes() != wanted) {
            fail<InternalError>("index_put: values {} for {}", ctx.input(1).sizes().str(), wanted.str());
          }
          const Tensor& x = ctx.input(0);
          DType dtype = x.dtype();
          if (ctx.input(1).dtype() != dtype) {
            const Tensor* both[] = {&x, &ctx.input(1)};
            dtype = result_type(both, ctx.name());
            ctx.cast(dtype, 3);
          }
          ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), dtype);
        },
    .grad =
        [](GradContext& c) {
          const std::vector<Tensor> at = saved_indices(c, 2);
          if (c.needs(0)) {
            const bool accumulate = c.attributes<IndexPutAttributes>().accumulate;
            const Tensor zero = zeros({}, {.dtype = c.grad().dtype(), .device = c.device(0)});
            c.set(0, accumulate ? c.grad() : call_index_put(c.grad(), zero.expand(c.input_sizes(1)), at, false));
          }
          if (c.needs(1)) c.set(1, call_index(c.grad(), at));
        },
    .saves = {in(2, 3, 4, 5, 6, 7, 8, 9), in(2, 3, 4, 5, 6, 7, 8, 9)},
    .attributes = &attribute_struct<IndexPutAttributes>(),
});

// How many elements are not zero: an i64 tensor of one element.
const Op& nonzero_count_op = define_op({
    .name = "nonzero_count",
    .signature = "nonzero_count(input)",
    .infer = [](InferContext& ctx) { ctx.output({}, DType::i64); },
});
const Op& nonzero_op = define_op({
    .name = "nonzero",
    .signature = "nonzero(input)",
    .infer =
        [](InferContext& ctx) {
          ctx.output({ctx.attributes<CountAttributes>().count, ctx.input(0).dim()}, DType::i64);
        },
    .attributes = &attribute_struct<CountAttributes>(),
});

Tensor call_index(const Tensor& x, std::span<const Tensor> at) {
  std::vector<const Tensor*> inputs{&x};
  for (const Tensor& t : at) inputs.push_back(&t);
  Tensor result;
  call_op(index_op, inputs, nullptr, {&result, 1});
  return result;
}

Tensor call_index_put(const Tensor& x, const Tensor& values, std::span<const Tensor> at, bool accumulate) {
  std::vector<const Tensor*> inputs{&x, &values};
  for (const Tensor& t : at) inputs.push_back(&t);
  Tensor result;
  const IndexPutAttributes attributes{accumulate};
  call_op(index_put_op, inputs, &attributes, {&result, 1});
  return result;
}

// What a list of indices comes to: the indexed dimensions, one i64 tensor each, and where their dimensions go.
struct Plan {
  std::vector<Tensor> at;
  Shape order;         // the input's dimensions, indexed ones first
  Shape broadcast;     // sizes of the indices together
  int place = 0;       // where the dimensions of the indices come in the result
  Shape result_sizes;  // of index(input, indices)

  Plan(const Tensor& input, const std::vector<Tensor>& indices, const char* op) {
    check_defined(input, op, "an input");
    const Shape& sizes = input.sizes();
    Shape indexed;
    int d = 0;
    for (const Tensor& t : indices) {
      const int takes = t.defined() && t.dtype() == DType::boolean ? t.dim() : 1;
      if (d + takes > sizes.size()) {
        fail<ShapeError>("{}: {} has too few dimensions for these indices", op, sizes.str());
      }
      if (!t.defined()) {
        ++d;
      } else if (t.dtype() == DType::boolean) {
        for (int i = 0; i < takes; ++i) {
          if (t.sizes()[i] != sizes[d + i]) {
            fail<ShapeError>("{}: expected a mask of the sizes of {} from dimension {} on, got {}", op, sizes.str(), d,
                             t.sizes().str());
          }
        }
        if (takes == 0) fail<ShapeError>("{}: expected a mask with dimensions, got a 0-d one", op);
        for (const Tensor& column : where(t)) {
          at.push_back(column);
          indexed.push_back(d++);
        }
      } else {
        at.push_back(detail::index_tensor(t, op));
        indexed.push_back(d++);
      }
    }
    if (at.empty()) fail<Error>("{}: expected at least one tensor of indices", op);
    for (const Tensor& t : at) broadcast = broadcast_shapes(broadcast, t.sizes(), op);
    const bool adjacent = indexed.back() - indexed[0] + 1 == indexed.size();
    place = adjacent ? static_cast<int>(indexed[0]) : 0;
    order = indexed;
    Shape rest;
    for (int i = 0; i < sizes.size(); ++i) {
      if (std::find(indexed.begin(), indexed.end(), i) == indexed.end()) rest.push_back(i);
    }
    for (std::int64_t i : rest) order.push_back(i);
    for (int i = 0; i < rest.size() && i < place; ++i) result_sizes.push_back(sizes[static_cast<int>(rest[i])]);
    for (std::int64_t n : broadcast) result_sizes.push_back(n);
    for (int i = place; i < rest.size(); ++i) result_sizes.push_back(sizes[static_cast<int>(rest[i])]);
  }

  // From [indices, rest] to where the dimensions of the indices belong, or back.
  Tensor moved(const Tensor& t, bool back) const {
    const int n = t.dim(), b = broadcast.size();
    if (place == 0 || b == 0) return t;
    Shape dims;
    if (back) {
      for (int i = 0; i < b; ++i) dims.push_back(place + i);
      for (int i = 0; i < place; ++i) dims.push_back(i);
    } else {
      for (int i = 0; i < place; ++i) dims.push_back(b + i);
      for (int i = 0; i < b; ++i) dims.push_back(i);
    }
    for (int i = place + b; i < n; ++i) dims.push_back(i);
    return t.permute(dims);
  }

  Tensor values_for(const Tensor& input, const Tensor& given, const char* op) const {
    check_defined(given, op, "values");
    // A number of one element, about to be expanded, must not widen the result.
    const Tensor* both[] = {&input, &given};
    const bool narrow = given.dtype() != input.dtype() && result_type(both, op) == input.dtype();
    const Tensor values = narrow ? given.to(input.dtype()) : given;
    if (broadcast_shapes(values.sizes(), result_sizes, op) != result_sizes) {
      fail<ShapeError>("{}: expected values that broadcast to {}, got {}", op, result_sizes.str(),
                       values.sizes().str());
    }
    return moved(values.expand(result_sizes), true);
  }
};

Tensor in_order(const Tensor& x, const Shape& order) {
  for (int i = 0; i < order.size(); ++i) {
    if (order[i] != i) return x.permute(order);
  }
  return x;
}

Tensor out_of_order(const Tensor& x, const Shape& order) {
  Shape inverse = order;
  for (int i = 0; i < order.size(); ++i) inverse[static_cast<int>(order[i])] = i;
  return in_order(x, inverse);
}

}  // namespace

Tensor index(const Tensor& input, const std::vector<Tensor>& indices) {
  const Plan plan(input, indices, "index");
  return plan.moved(call_index(in_order(input, plan.order), plan.at), false);
}

Tensor index_put(const Tensor& input, const std::vector<Tensor>& indices, const Tensor& values, bool accumulate) {
  const Plan plan(input, indices, "index_put");
  const Tensor v = plan.values_for(input, values, "index_put");
  return out_of_order(call_index_put(in_order(input, plan.order), v, plan.at, accumulate), plan.order);
}

Tensor index_put_(Tensor input, const std::vector<Tensor>& indices, const Tensor& values, bool accumulate) {
  const Plan plan(input, indices, "index_put_");
  const Tensor v = detail::apart(plan.values_for(input, values, "index_put_"), input);
  Tensor destination = in_order(input, plan.order);
  std::vector<const Tensor*> inputs{&destination, &v};
  for (const Tensor& t : plan.at) inputs.push_back(&t);
  const IndexPutAttributes attributes{accumulate};
  call_op_into(index_put_op, inputs, &attributes, destination, true);
  return input;
}

Tensor masked_select(const Tensor& input, const Tensor& mask) {
  check_defined(input, "masked_select", "an input");
  check_defined(mask, "masked_select", "a mask");
  if (mask.dtype() != DType::boolean) {
    fail<DTypeError>("masked_select: expected a bool mask, got {}", name(mask.dtype()));
  }
  check_values(mask, "masked_select");
  const Shape sizes = broadcast_shapes(input.sizes(), mask.sizes(), "masked_select");
  const Tensor places = nonzero(mask.expand(sizes).reshape({-1}));
  return index_select(input.expand(sizes).reshape({-1}), 0, places.select(1, 0));
}

Tensor nonzero(const Tensor& input) {
  check_defined(input, "nonzero", "a tensor");
  check_values(input, "nonzero");
  const auto count = call(nonzero_count_op, {&input}).item<std::int64_t>();
  return call(nonzero_op, {&input}, CountAttributes{count});
}

std::vector<Tensor> where(const Tensor& condition) {
  check_defined(condition, "where", "a condition");
  const Tensor places = nonzero(condition.dim() == 0 ? condition.reshape({1}) : condition);
  std::vector<Tensor> result;
  for (std::int64_t d = 0; d < places.size(1); ++d) result.push_back(places.select(1, d));
  return result;
}

}  // namespace halfstep
