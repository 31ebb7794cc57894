// SPDX-License-Identifier: Apache-2.0
// Calls of the CPU's convolutions without a dispatcher.
#pragma once

#include "halfstep/backends/cpu/conv.h"
#include "halfstep/core/tensor.h"
#include "tests/backends/kernel_context.h"

namespace halfstep::cpu {

inline TensorView view(const Tensor& t) {
  return {.data = t.raw_data(),
          .sizes = t.sizes().data(),
          .strides = t.strides().data(),
          .numel = t.numel(),
          .ndim = t.dim(),
          .dtype = t.dtype(),
          .defined = true,
          .contiguous = t.is_contiguous()};
}

inline ConvGeometry geometry(std::int64_t n, std::int64_t c, std::int64_t size, std::int64_t o, std::int64_t k,
                             std::int64_t stride, std::int64_t padding) {
  const std::int64_t out = (size + 2 * padding - k) / stride + 1;
  return {n, c, size, size, o, out, out, k, k, 1, {stride, stride}, {1, 1}, {padding, padding}, {padding, padding}};
}

}  // namespace halfstep::cpu
