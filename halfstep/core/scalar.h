// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep {

/// A number used together with tensors, as in `x * 2`. It is a floating-point number, an integer or a bool, and in type
/// promotion only that kind counts, not its width (PyTorch's rule): an f16 tensor times 2.5 stays f16, an i64 tensor
/// times 2.5 becomes f32.
class Scalar {
 public:
  enum class Kind : std::uint8_t { boolean, integer, floating };

  constexpr Scalar(bool value) : integer_(value), floating_(value), kind_(Kind::boolean) {}
  template <std::integral T>
  constexpr Scalar(T value)
      : integer_(static_cast<std::int64_t>(value)), floating_(static_cast<double>(value)), kind_(Kind::integer) {}
  template <std::floating_point T>
  constexpr Scalar(T value) : integer_(0), floating_(value), kind_(Kind::floating) {}

  /// The kind that counts in type promotion.
  constexpr Kind kind() const { return kind_; }
  constexpr bool is_floating() const { return kind_ == Kind::floating; }
  /// The value as a double.
  constexpr double to_double() const { return floating_; }
  /// The integer or bool; for a floating-point number its value truncated toward zero (0 if it doesn't fit).
  constexpr std::int64_t to_int() const { return is_floating() ? convert<std::int64_t>(floating_) : integer_; }

 private:
  std::int64_t integer_;
  double floating_;
  Kind kind_;
};

}  // namespace halfstep
