// SPDX-License-Identifier: Apache-2.0
// Choosing by a mask.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/where.cpp"
#include <hwy/foreach_target.h>

#include <cmath>

#include "halfstep/backends/cpu/elementwise.h"
#include "halfstep/backends/cpu/simd-inl.h"
#include "halfstep/core/dtype.h"
#include "halfstep/ops/attributes.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

/// out[i] = mask[i] ? a[i] : b[i], for elements as words of their size.
template <class U>
void select_run(const void*, void* out, const void* const* in, std::int64_t count) {
  const auto* mask = static_cast<const std::uint8_t*>(in[0]);
  const auto* a = static_cast<const U*>(in[1]);
  const auto* b = static_cast<const U*>(in[2]);
  auto* to = static_cast<U*>(out);
  const auto n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  if constexpr (sizeof(U) == 2 || sizeof(U) == 4) {
    const hn::ScalableTag<U> d;
    const hn::Rebind<std::uint8_t, decltype(d)> d8;
    const std::size_t lanes = hn::Lanes(d);
    for (; i + lanes <= n; i += lanes) {
      const auto chosen = hn::Ne(hn::PromoteTo(d, hn::LoadU(d8, mask + i)), hn::Zero(d));
      hn::StoreU(hn::IfThenElse(chosen, hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, to + i);
    }
  }
  for (; i < n; ++i) to[i] = mask[i] ? a[i] : b[i];
}

/// out[i] = mask[i] ? value : x[i]; `state` points to the value's bits. Inputs: x, mask.
template <class U>
void masked_fill_run(const void* state, void* out, const void* const* in, std::int64_t count) {
  const auto* x = static_cast<const U*>(in[0]);
  const auto* mask = static_cast<const std::uint8_t*>(in[1]);
  const U value = *static_cast<const U*>(state);
  auto* to = static_cast<U*>(out);
  const auto n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  if constexpr (sizeof(U) == 2 || sizeof(U) == 4) {
    const hn::ScalableTag<U> d;
    const hn::Rebind<std::uint8_t, decltype(d)> d8;
    const std::size_t lanes = hn::Lanes(d);
    const auto filling = hn::Set(d, value);
    for (; i + lanes <= n; i += lanes) {
      const auto chosen = hn::Ne(hn::PromoteTo(d, hn::LoadU(d8, mask + i)), hn::Zero(d));
      hn::StoreU(hn::IfThenElse(chosen, filling, hn::LoadU(d, x + i)), d, to + i);
    }
  }
  for (; i < n; ++i) to[i] = mask[i] ? value : x[i];
}

}  // namespace

/// For elements of `size` bytes: where (`fill` false) and masked_fill.
const Runs& select_runs(bool fill, std::size_t size) {
  static constexpr Runs kWhere[] = {{select_run<std::uint8_t>},
                                    {select_run<std::uint16_t>},
                                    {select_run<std::uint32_t>},
                                    {select_run<std::uint64_t>}};
  static constexpr Runs kFill[] = {{masked_fill_run<std::uint8_t>},
                                   {masked_fill_run<std::uint16_t>},
                                   {masked_fill_run<std::uint32_t>},
                                   {masked_fill_run<std::uint64_t>}};
  const int i = size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : 3;
  return fill ? kFill[i] : kWhere[i];
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(select_runs);

Status where(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  return run_elementwise(HWY_DYNAMIC_DISPATCH(select_runs)(false, item_size(out[0].dtype)), nullptr, in, 3, out);
}

// A finite value beyond the dtype's range becomes the nearest finite one: -1e9 masks scores in f16 too, without an
// infinity that would make a wholly masked softmax NaN.
template <class T>
T fill_value(const ScalarValue& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value.kind == 2 ? value.floating != 0 : value.integer != 0;
  } else if constexpr (std::is_integral_v<T>) {
    return value.kind == 2 ? convert<T>(value.floating) : convert<T>(value.integer);
  } else {
    double v = value.floating;
    if (std::isfinite(v)) {
      const double low = lowest_finite(dtype_of<T>);
      v = std::fmin(std::fmax(v, low), -low);
    }
    return convert<T>(v);
  }
}

Status masked_fill(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const ScalarValue& value = static_cast<const ScalarAttributes*>(attributes)->value;
  return visit_all(out[0].dtype, [&](auto tag) {
    const auto v = fill_value<typename decltype(tag)::type>(value);
    return run_elementwise(HWY_DYNAMIC_DISPATCH(select_runs)(true, sizeof(v)), &v, in, 2, out);
  });
}

const RegisterCpuKernel where_kernels[] = {
    {"where", kAllDTypes, where, kElementwise},
    {"masked_fill", kAllDTypes, masked_fill, kElementwise},
};

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
