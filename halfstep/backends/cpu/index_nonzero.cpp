// SPDX-License-Identifier: Apache-2.0
// The places of elements that are not zero.
#include <algorithm>

#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {
namespace {

// Calls f(i, is_not_zero) for all elements in row-major order.
template <class F>
void for_each_place(const TensorView& x, F&& f) {
  visit_all(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* data = static_cast<const T*>(x.data);
    std::int64_t position[kMaxDims] = {};
    std::int64_t offset = 0;
    for (std::int64_t i = 0; i < x.numel; ++i) {
      f(position, convert<bool>(data[offset]));
      for (int d = x.ndim - 1; d >= 0; --d) {
        offset += x.strides[d];
        if (++position[d] < x.sizes[d]) break;
        offset -= x.sizes[d] * x.strides[d];
        position[d] = 0;
      }
    }
  });
}

Status nonzero_count(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  std::int64_t count = 0;
  for_each_place(in[0], [&](const std::int64_t*, bool set) { count += set; });
  *static_cast<std::int64_t*>(out[0].data) = count;
  return Status::ok;
}

Status nonzero(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::int64_t count = static_cast<const CountAttributes*>(attributes)->count;
  auto* to = static_cast<std::int64_t*>(out[0].data);
  std::int64_t found = 0;
  for_each_place(in[0], [&](const std::int64_t* position, bool set) {
    // Another thread may write the input between counting and this.
    if (!set || found == count) return;
    for (int d = 0; d < in[0].ndim; ++d) *to++ = position[d];
    ++found;
  });
  std::fill(to, static_cast<std::int64_t*>(out[0].data) + out[0].numel, std::int64_t{0});
  return Status::ok;
}

const RegisterCpuKernel index_nonzero_kernels[] = {
    {"nonzero_count", kAllDTypes, nonzero_count},
    {"nonzero", kAllDTypes, nonzero},
};

}  // namespace
}  // namespace halfstep::cpu
