// SPDX-License-Identifier: Apache-2.0
// mm, bmm and linear: operands of any strides, handed to the matrix product of gemm.h.
#include <cstring>
#include <string>

#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {
namespace {

GemmOperand operand(const TensorView& x, int rows, int cols) {
  return {x.data, x.dtype, x.strides[rows], x.strides[cols]};
}

/// The last two dimensions of in[0] and in[1], of in[1] the other way round for a linear layer's weights.
Status product(KernelContext* context, const TensorView* in, int n, TensorView* out, bool transpose_b) {
  const TensorView &a = in[0], &b = in[1], &c = out[0];
  const int row = a.ndim - 2, col = a.ndim - 1;
  GemmArgs g;
  g.m = a.sizes[row];
  g.k = a.sizes[col];
  g.n = c.sizes[col];
  g.a = operand(a, row, col);
  g.b = transpose_b ? operand(b, 1, 0) : operand(b, row, col);
  g.c = c.data;
  g.c_dtype = c.dtype;
  g.ldc = c.strides[row];
  if (a.ndim == 3) {
    g.batch = a.sizes[0];
    g.a_batch_stride = a.strides[0];
    g.b_batch_stride = b.strides[0];
    g.c_batch_stride = c.strides[0];
  }
  if (n > 2 && in[2].defined) {
    g.bias = in[2].data;
    g.bias_dtype = in[2].dtype;
    if (in[2].strides[0] != 1 && g.n > 1) {
      // The product wants it next to each other.
      const std::size_t item = item_size(in[2].dtype);
      auto* dense = static_cast<char*>(context->workspace(context, static_cast<std::size_t>(g.n) * item));
      if (dense == nullptr) {
        context->set_error(context, "matrix product: out of memory for the bias");
        return Status::failed;
      }
      for (std::int64_t i = 0; i < g.n && !runs_dry(context); ++i) {
        const auto from = i * in[2].strides[0] * static_cast<std::int64_t>(item);
        std::memcpy(dense + i * static_cast<std::int64_t>(item), static_cast<const char*>(in[2].data) + from, item);
      }
      g.bias = dense;
    }
  }
  const Status status = gemm(context, g);
  if (status == Status::unsupported) {
    const std::string text = std::string("matrix product: expected a result of the operands' kind, got ") +
                             name(a.dtype) + " * " + name(b.dtype) + " into " + name(c.dtype);
    context->set_error(context, text.c_str());
    return Status::failed;
  }
  return status;
}

Status mm(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  return product(context, in, n, out, false);
}
Status linear(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  return product(context, in, n, out, true);
}

const RegisterCpuKernel matmul_kernels[] = {
    {"mm", kNumericDTypes, mm, kRunsDry},
    {"bmm", kNumericDTypes, mm, kRunsDry},
    {"linear", kNumericDTypes, linear, kRunsDry},
};

}  // namespace
}  // namespace halfstep::cpu
