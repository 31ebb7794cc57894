// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/functional.h"

#include <any>
#include <vector>

#include "halfstep/autograd/function.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"

namespace halfstep::dist {
namespace {

using Gradients = std::vector<Tensor>;

void check_differentiable(const char* function, const Tensor& input, ReduceOp op) {
  if (op == ReduceOp::sum || op == ReduceOp::mean || !GradMode::is_enabled() || !input.requires_grad()) return;
  fail<AutogradError>("{}: only sum and mean have a gradient, got {} of a tensor that requires grad; detach() it",
                      function, name(op));
}

// Sizes of one part of `size`.
Shape part_sizes(const char* function, const Tensor& input, int size) {
  if (input.dim() == 0 || input.size(0) % size != 0) {
    fail<ShapeError>("{}: expected a first size that {} ranks can divide, got {}", function, size, input.sizes().str());
  }
  Shape sizes = input.sizes();
  sizes[0] /= size;
  return sizes;
}

Tensor divided_for(const Tensor& gradient, ReduceOp op, const ProcessGroup& group) {
  return op == ReduceOp::mean ? gradient / static_cast<double>(group.size()) : gradient;
}

ProcessGroup saved_group(FunctionContext& c) { return std::any_cast<ProcessGroup>(c.saved_data["group"]); }
ReduceOp saved_op(FunctionContext& c) { return std::any_cast<ReduceOp>(c.saved_data["op"]); }
int saved_root(FunctionContext& c) { return std::any_cast<int>(c.saved_data["root"]); }

struct AllReduceFunction : Function<AllReduceFunction> {
  static Tensor forward(FunctionContext& c, const Tensor& x, ProcessGroup group, ReduceOp op) {
    c.saved_data["group"] = group;
    c.saved_data["op"] = op;
    const Tensor y = x.clone(MemoryFormat::contiguous);
    group.all_reduce(y, op).wait();
    return y;
  }
  static Gradients backward(FunctionContext& c, const Gradients& g) {
    return {all_reduce(g[0], saved_group(c), saved_op(c))};
  }
};

struct ReduceFunction : Function<ReduceFunction> {
  static Tensor forward(FunctionContext& c, const Tensor& x, ProcessGroup group, int root, ReduceOp op) {
    c.saved_data["group"] = group;
    c.saved_data["op"] = op;
    c.saved_data["root"] = root;
    Tensor y = x.clone(MemoryFormat::contiguous);
    group.all_reduce(y, op).wait();
    if (group.rank() != root) y.zero_();
    return y;
  }
  static Gradients backward(FunctionContext& c, const Gradients& g) {
    const ProcessGroup group = saved_group(c);
    return {divided_for(broadcast(g[0], group, saved_root(c)), saved_op(c), group)};
  }
};

struct BroadcastFunction : Function<BroadcastFunction> {
  static Tensor forward(FunctionContext& c, const Tensor& x, ProcessGroup group, int root) {
    c.saved_data["group"] = group;
    c.saved_data["root"] = root;
    const Tensor y = x.clone(MemoryFormat::contiguous);
    group.broadcast(y, root).wait();
    return y;
  }
  static Gradients backward(FunctionContext& c, const Gradients& g) {
    return {reduce(g[0], saved_group(c), saved_root(c))};
  }
};

struct AllGatherFunction : Function<AllGatherFunction> {
  static Tensor forward(FunctionContext& c, const Tensor& x, ProcessGroup group) {
    c.saved_data["group"] = group;
    c.saved_data["scalar"] = x.dim() == 0;
    Shape sizes = x.sizes();
    if (x.dim() == 0) sizes.push_back(1);
    sizes[0] *= group.size();
    const Tensor y = empty(sizes, {.dtype = x.dtype(), .device = x.device()});
    group.all_gather(y, x.contiguous()).wait();
    return y;
  }
  static Gradients backward(FunctionContext& c, const Gradients& g) {
    const Tensor own = reduce_scatter(g[0], saved_group(c));
    return {std::any_cast<bool>(c.saved_data["scalar"]) ? own.reshape({}) : own};
  }
};

struct GatherFunction : Function<GatherFunction> {
  static Tensor forward(FunctionContext& c, const Tensor& x, ProcessGroup group, int root) {
    c.saved_data["group"] = group;
    c.saved_data["root"] = root;
    c.saved_data["scalar"] = x.dim() == 0;
    Shape sizes = x.sizes();
    if (x.dim() == 0) sizes.push_back(1);
    sizes[0] *= group.size();
    const bool here = group.rank() == root;
    const TensorOptions like{.dtype = x.dtype(), .device = x.device()};
    const Tensor y = here ? empty(sizes, like) : zeros(sizes, like);
    group.gather(here ? y : Tensor(), x.contiguous(), root).wait();
    return y;
  }
  static Gradients backward(FunctionContext& c, const Gradients& g) {
    const Tensor own = scatter(g[0], saved_group(c), saved_root(c));
    return {std::any_cast<bool>(c.saved_data["scalar"]) ? own.reshape({}) : own};
  }
};

struct ScatterFunction : Function<ScatterFunction> {
  static Tensor forward(FunctionContext& c, const Tensor& x, ProcessGroup group, int root) {
    c.saved_data["group"] = group;
    c.saved_data["root"] = root;
    const Tensor y = empty(part_sizes("scatter", x, group.size()), {.dtype = x.dtype(), .device = x.device()});
    group.scatter(y, group.rank() == root ? x.contiguous() : Tensor(), root).wait();
    return y;
  }
  static Gradients backward(FunctionContext& c, const Gradients& g) {
    return {gather(g[0], saved_group(c), saved_root(c))};
  }
};

struct ReduceScatterFunction : Function<ReduceScatterFunction> {
  static Tensor forward(FunctionContext& c, const Tensor& x, ProcessGroup group, ReduceOp op) {
    c.saved_data["group"] = group;
    c.saved_data["op"] = op;
    const Tensor y = empty(part_sizes("reduce_scatter", x, group.size()), {.dtype = x.dtype(), .device = x.device()});
    group.reduce_scatter(y, x.contiguous(), op).wait();
    return y;
  }
  static Gradients backward(FunctionContext& c, const Gradients& g) {
    const ProcessGroup group = saved_group(c);
    return {divided_for(all_gather(g[0], group), saved_op(c), group)};
  }
};

struct AllToAllFunction : Function<AllToAllFunction> {
  static Tensor forward(FunctionContext& c, const Tensor& x, ProcessGroup group) {
    c.saved_data["group"] = group;
    part_sizes("all_to_all", x, group.size());
    const Tensor y = empty(x.sizes(), {.dtype = x.dtype(), .device = x.device()});
    group.all_to_all(y, x.contiguous()).wait();
    return y;
  }
  static Gradients backward(FunctionContext& c, const Gradients& g) { return {all_to_all(g[0], saved_group(c))}; }
};

}  // namespace

Tensor all_reduce(const Tensor& input, const ProcessGroup& group, ReduceOp op) {
  check_differentiable("all_reduce", input, op);
  return AllReduceFunction::apply(input, group, op);
}

Tensor reduce(const Tensor& input, const ProcessGroup& group, int root, ReduceOp op) {
  check_differentiable("reduce", input, op);
  if (root < 0 || root >= group.size()) {
    fail<Error>("reduce: expected a root from 0 to {}, got {}", group.size() - 1, root);
  }
  return ReduceFunction::apply(input, group, root, op);
}

Tensor broadcast(const Tensor& input, const ProcessGroup& group, int root) {
  return BroadcastFunction::apply(input, group, root);
}

Tensor all_gather(const Tensor& input, const ProcessGroup& group) { return AllGatherFunction::apply(input, group); }

Tensor gather(const Tensor& input, const ProcessGroup& group, int root) {
  return GatherFunction::apply(input, group, root);
}

Tensor scatter(const Tensor& input, const ProcessGroup& group, int root) {
  return ScatterFunction::apply(input, group, root);
}

Tensor reduce_scatter(const Tensor& input, const ProcessGroup& group, ReduceOp op) {
  check_differentiable("reduce_scatter", input, op);
  return ReduceScatterFunction::apply(input, group, op);
}

Tensor all_to_all(const Tensor& input, const ProcessGroup& group) { return AllToAllFunction::apply(input, group); }

}  // namespace halfstep::dist
