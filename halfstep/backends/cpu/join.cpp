// SPDX-License-Identifier: Apache-2.0
// cat and flip.
#include "halfstep/backends/cpu/move.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

Status cat(KernelContext*, const TensorView* in, int n, TensorView* out, int, const void* attributes) {
  if (out[0].numel == 0) return Status::ok;
  const std::int64_t wanted = static_cast<const AlongAttributes*>(attributes)->dim;
  const auto dim = static_cast<int>(wanted < 0 ? wanted + out[0].ndim : wanted);
  TensorView part = out[0];
  for (int i = 0; i < n; ++i) {
    if (in[i].numel == 0) continue;
    part.sizes = in[i].sizes;
    part.numel = in[i].numel;
    // In the outermost dimension, a part is one block of a row-major output.
    part.contiguous = out[0].contiguous && (dim == 0 || part.numel == out[0].numel);
    move_elements(part, in[i]);
    advance(part, in[i].sizes[dim] * out[0].strides[dim]);
  }
  return Status::ok;
}

// The input is read from its last element on: negative strides.
Status flip(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  if (out[0].numel == 0) return Status::ok;
  const IntList& dims = static_cast<const DimsAttributes*>(attributes)->dims;
  TensorView from = in[0];
  std::int64_t strides[kMaxDims];
  for (int d = 0; d < from.ndim; ++d) strides[d] = from.strides[d];
  for (int i = 0; i < dims.size; ++i) {
    const std::int64_t d = dims.values[i];
    advance(from, (from.sizes[d] - 1) * strides[d]);
    strides[d] = -strides[d];
  }
  from.strides = strides;
  from.contiguous = from.contiguous && dims.size == 0;
  move_elements(out[0], from);
  return Status::ok;
}

const RegisterCpuKernel join_kernels[] = {
    {"cat", kAllDTypes, cat},
    {"flip", kAllDTypes, flip},
};

}  // namespace
}  // namespace halfstep::cpu
