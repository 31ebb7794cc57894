// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <type_traits>

#include "halfstep/backends/cpu/strided_loop.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

// Straight sums in row-major order of the output; long ones by blocks of 256.
Status sum(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const ReduceAttributes*>(attributes);
  const TensorView& x = in[0];
  unsigned mask = a.dims.size == 0 ? ~0u : 0u;
  for (int i = 0; i < a.dims.size; ++i)
    mask |= 1u << (a.dims.values[i] < 0 ? a.dims.values[i] + x.ndim : a.dims.values[i]);
  std::int64_t kept_sizes[kMaxDims], kept_strides[kMaxDims], red_sizes[kMaxDims], red_strides[kMaxDims];
  int kept = 0, red = 0;
  for (int i = 0; i < x.ndim; ++i) {
    if (mask >> i & 1) {
      red_sizes[red] = x.sizes[i];
      red_strides[red++] = x.strides[i];
    } else {
      kept_sizes[kept] = x.sizes[i];
      kept_strides[kept++] = x.strides[i];
    }
  }
  std::int64_t red_n = 1;
  for (int i = 0; i < red; ++i) red_n *= red_sizes[i];
  visit_all(x.dtype, [&](auto in_tag) {
    using In = typename decltype(in_tag)::type;
    visit_all(out[0].dtype, [&](auto out_tag) {
      using Out = typename decltype(out_tag)::type;
      using Acc = std::conditional_t<std::is_same_v<Out, double> || std::is_same_v<In, double>, double,
                                     std::conditional_t<std::is_integral_v<Out>, std::int64_t, float>>;
      parallel_for(out[0].numel, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(red_n, 1)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t o = begin; o < end; ++o) {
                       std::int64_t offset = 0, rest = o;
                       for (int i = kept - 1; i >= 0; --i) {
                         offset += rest % kept_sizes[i] * kept_strides[i];
                         rest /= kept_sizes[i];
                       }
                       Acc total{}, block{};
                       for (std::int64_t r = 0; r < red_n; ++r) {
                         std::int64_t at = offset, left = r;
                         for (int i = red - 1; i >= 0; --i) {
                           at += left % red_sizes[i] * red_strides[i];
                           left /= red_sizes[i];
                         }
                         block += convert<Acc>(static_cast<const In*>(x.data)[at]);
                         if ((r & 255) == 255) total += block, block = Acc{};
                       }
                       static_cast<Out*>(out[0].data)[o] = convert<Out>(static_cast<Acc>(total + block));
                     }
                   });
    });
  });
  return Status::ok;
}

const RegisterCpuKernel registered("sum", kComputeDTypes, sum);

}  // namespace
}  // namespace halfstep::cpu
