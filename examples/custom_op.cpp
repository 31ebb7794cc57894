// SPDX-License-Identifier: Apache-2.0
// A custom op (shape rule, gradient, CPU kernel, policy row) and a custom function with its own backward pass.
#include <cmath>
#include <iostream>

#include "halfstep/halfstep.h"

using namespace halfstep;

namespace {

// y = x^3 as an op: the gradient is written with recorded ops, so it can be differentiated again.
const Op& cube_op = define_op({
    .name = "cube",
    .signature = "cube(input)",
    .infer = [](InferContext& ctx) { infer_elementwise(ctx, ctx.input(0).dtype()); },
    .grad = [](GradContext& c) { c.set(0, c.grad() * (c.input(0) * c.input(0)) * 3.0); },
    .saves = {in(0)},
});

// The kernel: a plain function over plain structs. It sees contiguous float32 here; other dtypes have no kernel and get
// a clear error.
Status cube_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void*) {
  if (!in[0].contiguous) {
    context->set_error(context, "expected a contiguous tensor");
    return Status::unsupported;
  }
  const auto* x = static_cast<const float*>(in[0].data);
  auto* y = static_cast<float*>(out[0].data);
  for (std::int64_t i = 0; i < in[0].numel; ++i) y[i] = x[i] * x[i] * x[i];
  return Status::ok;
}
const RegisterCpuKernel registered{"cube", {f32}, cube_kernel};

Tensor cube(const Tensor& x) { return call(cube_op, {&x}); }

// A custom function: the sign of x forward, the gradient of a hard tanh backward (a straight-through estimator).
struct Binarize : Function<Binarize> {
  static Tensor forward(FunctionContext& c, const Tensor& x) {
    c.save_for_backward({x});
    return where(ge(x, 0), ones_like(x), neg(ones_like(x)));
  }
  static std::vector<Tensor> backward(FunctionContext& c, const std::vector<Tensor>& grads) {
    const Tensor x = c.saved()[0];
    return {where(le(abs(x), 1), grads[0], zeros_like(x))};
  }
};

}  // namespace

int main() {
  // Cubes leave the range of 16 bits soon: float32 under autocast.
  amp::add_policy("cube", amp::Policy::float32, "cubes leave the range of 16 bits");
  const Tensor x = tensor({-2, 0.5, 3}, {.requires_grad = true});
  Tensor y;
  {
    amp::Autocast autocast{{.dtype = f16}};
    y = cube(x.to(f16));
  }
  std::cout << "cube ran in " << name(y.dtype()) << ": " << amp::explain("cube", {f16}).str() << '\n';
  const Tensor dy = grad({sum(cube(x))}, {x}, {.create_graph = true})[0];
  const Tensor d2y = grad({sum(dy)}, {x})[0];
  const Tensor b = Binarize::apply(x);
  sum(b).backward();
  std::cout << "y " << y << "\ndy " << dy.detach() << "\nd2y " << d2y << "\nsign " << b.detach() << "\nits gradient "
            << x.grad() << '\n';
  const bool right = y.dtype() == f32 && d2y.to_vector<float>() == std::vector<float>{-12, 3, 18} &&
                     x.grad().to_vector<float>() == std::vector<float>{0, 1, 0};
  return right ? 0 : 1;
}
