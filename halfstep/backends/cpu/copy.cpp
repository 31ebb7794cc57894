// SPDX-License-Identifier: Apache-2.0
// Conversions, copies and fills, for every dtype and layout.
#include <cstring>

#include "halfstep/backends/cpu/strided_loop.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

template <class To, class From>
void convert_run(To* to, std::int64_t to_step, const From* from, std::int64_t from_step, std::int64_t n) {
  if constexpr (std::is_same_v<To, From>) {
    if (to_step == 1 && from_step == 1) {
      std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(To));
      return;
    }
    for (std::int64_t i = 0; i < n; ++i) to[i * to_step] = from[i * from_step];
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i * to_step] = convert<To>(from[i * from_step]);
  }
}

Status copy(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  const StridedLoop<2> loop({&out[0], &in[0]});
  visit_all(out[0].dtype, [&](auto to_tag) {
    using To = typename decltype(to_tag)::type;
    visit_all(in[0].dtype, [&](auto from_tag) {
      using From = typename decltype(from_tag)::type;
      loop.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* step) {
        convert_run(static_cast<To*>(out[0].data) + at[0], step[0], static_cast<const From*>(in[0].data) + at[1],
                    step[1], n);
      });
    });
  });
  return Status::ok;
}

// copy_(destination, source): input 0 is the destination itself.
Status copy_into(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void*) {
  return copy(context, in + 1, 1, out, 1, nullptr);
}

Status fill(KernelContext*, const TensorView*, int, TensorView* out, int, const void* attributes) {
  const ScalarValue& value = static_cast<const FillAttributes*>(attributes)->value;
  const StridedLoop<1> loop({&out[0]});
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T v = value.kind == 2 ? convert<T>(value.floating) : convert<T>(value.integer);
    loop.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* step) {
      T* to = static_cast<T*>(out[0].data) + at[0];
      for (std::int64_t i = 0; i < n; ++i) to[i * step[0]] = v;
    });
  });
  return Status::ok;
}

// Zeros, with the gradient where the slice was read.
Status slice_backward(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const ViewAttributes*>(attributes);
  std::memset(out[0].data, 0, static_cast<std::size_t>(out[0].numel) * item_size(out[0].dtype));
  TensorView part = out[0];
  Shape strides(std::span<const std::int64_t>(out[0].strides, static_cast<std::size_t>(out[0].ndim)));
  const auto dim = static_cast<int>(a.dim);
  part.data =
      static_cast<char*>(out[0].data) + a.start * strides[dim] * static_cast<std::int64_t>(item_size(part.dtype));
  strides[dim] *= a.step;
  part.strides = strides.data();
  part.sizes = in[0].sizes;
  part.numel = in[0].numel;
  part.contiguous = false;
  return part.numel ? copy(context, in, 1, &part, 1, nullptr) : Status::ok;
}

const RegisterCpuKernel registered[] = {
    {"to", kAllDTypes, copy},
    {"clone", kAllDTypes, copy},
    {"copy", kAllDTypes, copy_into},
    {"fill", kAllDTypes, fill},
    {"slice_backward", kAllDTypes, slice_backward},
};

}  // namespace
}  // namespace halfstep::cpu
