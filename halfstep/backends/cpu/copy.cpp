// SPDX-License-Identifier: Apache-2.0
// Conversions, copies and fills, for every dtype and layout.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/copy.cpp"
#include <hwy/foreach_target.h>

#include "halfstep/backends/cpu/elementwise.h"
#include "halfstep/backends/cpu/simd-inl.h"
#include "halfstep/core/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

/// Between float32 and the 16-bit floats, and from one of these to the other, in vectors.
template <class To, class From>
void float_run(const void*, void* out, const void* const* in, std::int64_t n) {
  map_run(
      F32Tag(), static_cast<To*>(out), n, [](F32Vec v) { return v; }, Run<From>{static_cast<const From*>(in[0])});
}

// As convert(): towards zero, saturated, and 0 for NaN.
template <class To, class From>
void integer_run(const void*, void* out, const void* const* in, std::int64_t n) {
  const hn::ScalableTag<To> d;
  const hn::Rebind<float, decltype(d)> df;
  const auto* from = static_cast<const From*>(in[0]);
  auto* to = static_cast<To*>(out);
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    auto v = load(df, from + i);
    v = hn::IfThenElse(hn::IsNaN(v), hn::Zero(df), v);
    if constexpr (sizeof(To) == 8) {
      hn::StoreU(hn::ConvertTo(d, hn::PromoteTo(hn::RebindToFloat<decltype(d)>(), v)), d, to + i);
    } else {
      hn::StoreU(hn::ConvertTo(d, v), d, to + i);
    }
  }
  for (; i < n; ++i) to[i] = convert<To>(from[i]);
}

template <class To>
RunFn find_integer_run(DType from) {
  return from == DType::f32    ? integer_run<To, float>
         : from == DType::f16  ? integer_run<To, Half>
         : from == DType::bf16 ? integer_run<To, BFloat16>
                               : nullptr;
}

template <class U>
void fill_run(const void* state, void* out, const void* const*, std::int64_t count) {
  const hn::ScalableTag<U> d;
  const U value = *static_cast<const U*>(state);
  const auto v = hn::Set(d, value);
  auto* to = static_cast<U*>(out);
  const auto n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) hn::StoreU(v, d, to + i);
  for (; i < n; ++i) to[i] = value;
}

}  // namespace

RunFn find_cast_run(DType to, DType from) {
  switch (to) {
    case DType::f32:
      return from == DType::f16 ? float_run<float, Half> : from == DType::bf16 ? float_run<float, BFloat16> : nullptr;
    case DType::f16:
      return from == DType::f32 ? float_run<Half, float> : from == DType::bf16 ? float_run<Half, BFloat16> : nullptr;
    case DType::bf16:
      return from == DType::f32 ? float_run<BFloat16, float> : from == DType::f16 ? float_run<BFloat16, Half> : nullptr;
    case DType::i64:
      return find_integer_run<std::int64_t>(from);
    case DType::i32:
      return find_integer_run<std::int32_t>(from);
    default:
      return nullptr;
  }
}

RunFn find_fill_run(std::size_t size) {
  return size == 1   ? fill_run<std::uint8_t>
         : size == 2 ? fill_run<std::uint16_t>
         : size == 4 ? fill_run<std::uint32_t>
                     : fill_run<std::uint64_t>;
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cstring>

#include "halfstep/backends/cpu/move.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

HWY_EXPORT(find_cast_run);
HWY_EXPORT(find_fill_run);

template <class To, class From>
void convert_run(const void*, void* out, const void* const* in, std::int64_t n) {
  auto* to = static_cast<To*>(out);
  const auto* from = static_cast<const From*>(in[0]);
  for (std::int64_t i = 0; i < n; ++i) to[i] = convert<To>(from[i]);
}

Status copy(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  if (out[0].numel == 0) return Status::ok;
  if (in[0].dtype == out[0].dtype) {
    move_elements(out[0], in[0]);
    return Status::ok;
  }
  Runs runs{.straight = HWY_DYNAMIC_DISPATCH(find_cast_run)(out[0].dtype, in[0].dtype)};
  if (!runs.straight) {
    visit_all(out[0].dtype, [&](auto to) {
      visit_all(in[0].dtype, [&](auto from) {
        runs.straight = convert_run<typename decltype(to)::type, typename decltype(from)::type>;
      });
    });
    runs.grain = 8192;
  } else {
    runs.grain = 16384;  // Casts run beside matrix products: their operands are often in another core's cache.
  }
  return run_elementwise(runs, nullptr, in, 1, out);
}

// copy_(destination, source): input 0 is the destination itself.
Status copy_into(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void*) {
  return copy(context, in + 1, 1, out, 1, nullptr);
}

Status fill(KernelContext*, const TensorView*, int, TensorView* out, int, const void* attributes) {
  const ScalarValue& value = static_cast<const FillAttributes*>(attributes)->value;
  return visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T v = value.kind == 2 ? convert<T>(value.floating) : convert<T>(value.integer);
    return run_elementwise({.straight = HWY_DYNAMIC_DISPATCH(find_fill_run)(sizeof(T))}, &v, nullptr, 0, out);
  });
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

const RegisterCpuKernel copy_kernels[] = {
    {"to", kAllDTypes, copy, kElementwise},         {"clone", kAllDTypes, copy, kElementwise},
    {"copy", kAllDTypes, copy_into, kElementwise},  {"fill", kAllDTypes, fill, kElementwise},
    {"slice_backward", kAllDTypes, slice_backward},
};

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
