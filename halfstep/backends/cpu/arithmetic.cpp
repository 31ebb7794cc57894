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

const RegisterCpuKernel registered[] = {
    {"add", kComputeDTypes, add},
    {"sub", kNumericDTypes, sub},
    {"mul", kComputeDTypes, mul},
    {"div", kFloatingDTypes, div},
    {"neg", kNumericDTypes, neg},
    {"add_scalar", kNumericDTypes, add_scalar},
    {"mul_scalar", kNumericDTypes, mul_scalar},
    {"sum", kComputeDTypes, sum},
};

}  // namespace
}  // namespace halfstep::cpu
