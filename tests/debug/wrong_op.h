// SPDX-License-Identifier: Apache-2.0
// An op whose 16-bit kernel is wrong in one element: y = 3x, but the last element is 3x + 1/4.
#pragma once

#include "halfstep/ops/op.h"

namespace halfstep::test {

template <class T>
Status triple_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  const T* x = static_cast<const T*>(in[0].data);
  T* y = static_cast<T*>(out[0].data);
  for (std::int64_t i = 0; i < in[0].numel; ++i) y[i] = convert<T>(3 * convert<double>(x[i]));
  if constexpr (sizeof(T) == 2) {
    const std::int64_t last = in[0].numel - 1;
    y[last] = convert<T>(3 * convert<double>(x[last]) + 0.25);
  }
  return Status::ok;
}

inline Tensor triple(const Tensor& x) {
  static const Op& op = *[] {
    const Op& declared = define_op({
        .name = "test_triple",
        .signature = "test_triple(input)",
        .infer = [](InferContext& ctx) { infer_elementwise(ctx, ctx.input(0).dtype()); },
        .grad = [](GradContext& c) { c.set(0, c.grad() * 3.0); },
    });
    RegisterCpuKernel("test_triple", {DType::f64}, triple_kernel<double>);
    RegisterCpuKernel("test_triple", {DType::f32}, triple_kernel<float>);
    RegisterCpuKernel("test_triple", {DType::f16}, triple_kernel<Half>);
    RegisterCpuKernel("test_triple", {DType::bf16}, triple_kernel<BFloat16>);
    return &declared;
  }();
  return call(op, {&x});
}

}  // namespace halfstep::test
