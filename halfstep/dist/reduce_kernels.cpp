// SPDX-License-Identifier: Apache-2.0
// Plain loops, which the compiler turns into vectors. Blocks of the result stay in the first-level cache while the
// inputs go by, so that each input is read from memory once and the result is written once.
#include <hwy/highway.h>

#include <algorithm>
#include <type_traits>

#include "halfstep/dist/reduce_kernels_internal.h"

namespace halfstep::dist::detail {
namespace {

constexpr std::int64_t kReduceKernelsBlockBytes = 8192;

// Wraps around as unsigned numbers do. (8-bit ones are promoted to int, in which no product of two overflows.)
template <class T>
using Wrapping = std::conditional_t<std::is_floating_point_v<T>, T,
                                    std::make_unsigned_t<std::conditional_t<std::is_floating_point_v<T>, int, T>>>;

struct AddValues {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
};
struct MultiplyValues {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
  }
};
// A NaN that came first stays; one that comes is taken.
struct LeastValue {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      const T least = b < a ? b : a;
      return b != b && a == a ? b : least;
    } else {
      return b < a ? b : a;
    }
  }
};
struct GreatestValue {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      const T greatest = b > a ? b : a;
      return b != b && a == a ? b : greatest;
    } else {
      return b > a ? b : a;
    }
  }
};

// n values as floats. The compiler finds the instruction for bfloat16 by itself.
HWY_ATTR void widen(const BFloat16* from, float* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
}
HWY_ATTR void widen(const Half* from, float* to, std::int64_t n) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<float> d;
  const hn::Rebind<hwy::float16_t, hn::ScalableTag<float>> d16;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(from + i))), d, to + i);
  }
  for (; i < n; ++i) to[i] = static_cast<float>(from[i]);
}

template <class F, class T>
void combine_widened(F f, std::span<const T* const> inputs, float* output, std::int64_t n, float divisor) {
  float next[kWidenedBlock];
  widen(inputs[0], output, n);
  for (std::size_t k = 1; k < inputs.size(); ++k) {
    widen(inputs[k], next, n);
    for (std::int64_t i = 0; i < n; ++i) output[i] = f(output[i], next[i]);
  }
  if (divisor != 1.0F) {
    for (std::int64_t i = 0; i < n; ++i) output[i] /= divisor;
  }
}

template <class F, class T>
void combine(F f, std::span<const T* const> inputs, T* output, std::int64_t n, [[maybe_unused]] T divisor) {
  constexpr auto kBlock = kReduceKernelsBlockBytes / static_cast<std::int64_t>(sizeof(T));
  T block[kBlock];  // not the output, which may be any of the inputs
  for (std::int64_t at = 0; at < n; at += kBlock) {
    const std::int64_t size = std::min(kBlock, n - at);
    const T* first = inputs[0] + at;
    if (inputs.size() == 1) {
      std::copy(first, first + size, block);
    } else {
      const T* second = inputs[1] + at;
      for (std::int64_t i = 0; i < size; ++i) block[i] = f(first[i], second[i]);
    }
    for (std::size_t k = 2; k < inputs.size(); ++k) {
      const T* next = inputs[k] + at;
      for (std::int64_t i = 0; i < size; ++i) block[i] = f(block[i], next[i]);
    }
    if constexpr (std::is_floating_point_v<T>) {
      if (divisor != T(1)) {
        for (std::int64_t i = 0; i < size; ++i) block[i] /= divisor;
      }
    }
    std::copy(block, block + size, output + at);
  }
}

// `f` of the operation and its divisor.
template <class T, class F>
void with_operation(ReduceOp op, int divisor, F&& f) {
  switch (op) {
    case ReduceOp::sum:
      return f(AddValues{}, T(1));
    case ReduceOp::mean:
      return f(AddValues{}, static_cast<T>(divisor));
    case ReduceOp::min:
      return f(LeastValue{}, T(1));
    case ReduceOp::max:
      return f(GreatestValue{}, T(1));
    case ReduceOp::product:
      return f(MultiplyValues{}, T(1));
  }
}

}  // namespace

template <class T>
void reduce_values(ReduceOp op, std::span<const T* const> inputs, T* output, std::int64_t n, int divisor) {
  with_operation<T>(op, divisor, [&](auto f, T by) { combine(f, inputs, output, n, by); });
}

template <class T>
void reduce_widened(ReduceOp op, std::span<const T* const> inputs, float* output, std::int64_t n, int divisor) {
  with_operation<float>(op, divisor, [&](auto f, float by) { combine_widened(f, inputs, output, n, by); });
}

template void reduce_widened(ReduceOp, std::span<const Half* const>, float*, std::int64_t, int);
template void reduce_widened(ReduceOp, std::span<const BFloat16* const>, float*, std::int64_t, int);
template void reduce_values(ReduceOp, std::span<const float* const>, float*, std::int64_t, int);
template void reduce_values(ReduceOp, std::span<const double* const>, double*, std::int64_t, int);
template void reduce_values(ReduceOp, std::span<const std::int64_t* const>, std::int64_t*, std::int64_t, int);
template void reduce_values(ReduceOp, std::span<const std::int32_t* const>, std::int32_t*, std::int64_t, int);
template void reduce_values(ReduceOp, std::span<const std::int8_t* const>, std::int8_t*, std::int64_t, int);
template void reduce_values(ReduceOp, std::span<const std::uint8_t* const>, std::uint8_t*, std::int64_t, int);

}  // namespace halfstep::dist::detail
