// SPDX-License-Identifier: Apache-2.0
// From a dtype at run time to a type: for kernels that treat a group of dtypes alike. Unlike visit_dtype it
// instantiates the group only, and passes a zero of the storage type.
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// f(zero) for i64, i32, i8, u8 and bool; anything else counts as bool.
template <class F>
void visit_integral(DType dtype, F&& f) {
  switch (dtype) {
    case DType::i64:
      return f(std::int64_t{});
    case DType::i32:
      return f(std::int32_t{});
    case DType::i8:
      return f(std::int8_t{});
    case DType::u8:
      return f(std::uint8_t{});
    default:
      return f(bool{});
  }
}

/// f(zero) for f32, f64, f16, bf16 and the dtypes above.
template <class F>
void visit_numeric(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::f16:
      return f(Half{});
    case DType::bf16:
      return f(BFloat16{});
    default:
      return visit_integral(dtype, f);
  }
}

}  // namespace halfstep::cpu
