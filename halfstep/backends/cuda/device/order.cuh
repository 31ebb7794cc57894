// SPDX-License-Identifier: Apache-2.0
// Values as unsigned integers in the same order, so that comparing them is one comparison for every dtype.
#pragma once

#include "device/number.cuh"

namespace hscuda {

/// 32 bits for elements of up to 32, else 64. -0 is 0; NaN is the greatest.
template <class T>
using Key = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
__device__ __forceinline__ Key<T> order_key(T element) {
  const Compute<T> value = value_of(element);
  using C = Compute<T>;
  if constexpr (std::is_same_v<C, bool>) {
    return value ? 1u : 0u;
  } else if constexpr (std::is_integral_v<C>) {
    constexpr Key<T> kFlip = std::is_signed_v<C> ? Key<T>{1} << (8 * sizeof(Key<T>) - 1) : 0;
    return static_cast<Key<T>>(static_cast<std::make_signed_t<Key<T>>>(value)) ^ kFlip;
  } else {
    static_assert(sizeof(C) == sizeof(Key<T>));
    if (value != value) return ~Key<T>{0};
    Key<T> bits;
    const C positive = value + C{0};  // -0 + 0 is 0
    memcpy(&bits, &positive, sizeof bits);
    constexpr Key<T> kSign = Key<T>{1} << (8 * sizeof(Key<T>) - 1);
    return bits & kSign ? ~bits : bits | kSign;
  }
}

/// The greatest key is that of the largest (smallest) value, or of a NaN.
template <class T>
__device__ __forceinline__ uint64_t extreme_key(T element, bool largest) {
  const Key<T> key = order_key(element);
  if (largest) return key;
  if constexpr (std::is_floating_point_v<Compute<T>>) {
    if (key == ~Key<T>{0}) return key;
  }
  return static_cast<Key<T>>(~key);
}

}  // namespace hscuda
