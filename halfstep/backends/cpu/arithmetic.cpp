// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "halfstep/backends/cpu/strided_loop.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

// 16-bit types compute in float32 and are rounded once.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float, T>;

template <class F>
Status binary(const TensorView* in, TensorView* out, F&& f) {
  const StridedLoop<3> loop({&out[0], &in[0], &in[1]});
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    loop.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* step) {
      T* o = static_cast<T*>(out[0].data) + at[0];
      const T* a = static_cast<const T*>(in[0].data) + at[1];
      const T* b = static_cast<const T*>(in[1].data) + at[2];
      for (std::int64_t i = 0; i < n; ++i) {
        o[i * step[0]] = convert<T>(f(convert<C>(a[i * step[1]]), convert<C>(b[i * step[2]])));
      }
    });
  });
  return Status::ok;
}

template <class F>
Status unary(const TensorView* in, TensorView* out, F&& f) {
  const StridedLoop<2> loop({&out[0], &in[0]});
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    loop.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* step) {
      T* o = static_cast<T*>(out[0].data) + at[0];
      const T* a = static_cast<const T*>(in[0].data) + at[1];
      for (std::int64_t i = 0; i < n; ++i) o[i * step[0]] = convert<T>(f(convert<C>(a[i * step[1]])));
    });
  });
  return Status::ok;
}

template <class C, class V>
C number(const V& value) {
  if constexpr (std::is_integral_v<C>) {
    return convert<C>(value.integer);
  } else {
    return convert<C>(value.floating);
  }
}

template <class C>
C number_alpha(const AlphaAttributes& a) {
  if constexpr (std::is_integral_v<C>) {
    return convert<C>(a.integer_alpha);
  } else {
    return convert<C>(a.alpha);
  }
}

template <class T>
constexpr bool kNumeric = std::is_arithmetic_v<T>;

Status add(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const AlphaAttributes*>(attributes);
  return binary(in, out, [&](auto x, auto y) {
    using C = decltype(x);
    if constexpr (kNumeric<C>) {
      return static_cast<C>(x + number_alpha<C>(a) * y);
    } else {
      return x;
    }
  });
}
Status sub(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const AlphaAttributes*>(attributes);
  return binary(in, out, [&](auto x, auto y) {
    using C = decltype(x);
    if constexpr (kNumeric<C>) {
      return static_cast<C>(x - number_alpha<C>(a) * y);
    } else {
      return x;
    }
  });
}
Status mul(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  return binary(in, out, [](auto x, auto y) {
    if constexpr (kNumeric<decltype(x)>) {
      return static_cast<decltype(x)>(x * y);
    } else {
      return x;
    }
  });
}
Status div(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  return binary(in, out, [](auto x, auto y) {
    if constexpr (std::is_floating_point_v<decltype(x)>) {
      return x / y;
    } else {
      return x;
    }
  });
}
Status neg(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  return unary(in, out, [](auto x) {
    if constexpr (kNumeric<decltype(x)>) {
      return static_cast<decltype(x)>(-x);
    } else {
      return x;
    }
  });
}
Status add_scalar(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const ScalarAttributes*>(attributes);
  return unary(in, out, [&](auto x) {
    using C = decltype(x);
    if constexpr (kNumeric<C>) {
      return static_cast<C>(x + number<C>(a.value));
    } else {
      return x;
    }
  });
}
Status mul_scalar(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const ScalarAttributes*>(attributes);
  return unary(in, out, [&](auto x) {
    using C = decltype(x);
    if constexpr (kNumeric<C>) {
      return static_cast<C>(x * number<C>(a.value));
    } else {
      return x;
    }
  });
}

const RegisterCpuKernel registered[] = {
    {"add", kComputeDTypes, add},
    {"sub", kNumericDTypes, sub},
    {"mul", kComputeDTypes, mul},
    {"div", kFloatingDTypes, div},
    {"neg", kNumericDTypes, neg},
    {"add_scalar", kNumericDTypes, add_scalar},
    {"mul_scalar", kNumericDTypes, mul_scalar},
};

}  // namespace
}  // namespace halfstep::cpu
