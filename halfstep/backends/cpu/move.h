// SPDX-License-Identifier: Apache-2.0
// What the kernels that only move elements share: they know the size of an element, not its type.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "halfstep/backends/cpu/strided_loop.h"

namespace halfstep::cpu {

/// Calls `f(type_identity<U>)` with an unsigned type of 1, 2, 4 or 8 bytes.
template <class F>
void visit_bytes(std::size_t bytes, F&& f) {
  switch (bytes) {
    case 8:
      return f(std::type_identity<std::uint64_t>{});
    case 4:
      return f(std::type_identity<std::uint32_t>{});
    case 2:
      return f(std::type_identity<std::uint16_t>{});
    default:
      return f(std::type_identity<std::uint8_t>{});
  }
}
/// The same with one as large as an element.
template <class F>
void visit_bits(DType dtype, F&& f) {
  visit_bytes(item_size(dtype), f);
}

/// Copies the elements of `from` to those of `to`: same dtype and sizes, any strides.
void move_elements(const TensorView& to, const TensorView& from);

/// The view some elements further on; null stays null.
inline void advance(TensorView& view, std::int64_t elements) {
  if (view.data) {
    view.data = static_cast<char*>(view.data) + elements * static_cast<std::int64_t>(item_size(view.dtype));
  }
}

/// Sets all bytes of a dense output to zero.
inline void clear(const TensorView& view) {
  if (view.numel) std::memset(view.data, 0, static_cast<std::size_t>(view.numel) * item_size(view.dtype));
}

}  // namespace halfstep::cpu
