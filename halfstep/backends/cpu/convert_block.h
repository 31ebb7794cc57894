// SPDX-License-Identifier: Apache-2.0
// Blocks of values to and from float32, for kernels that compute in float32 on pieces that fit the first-level cache;
// and blocks of gradients, unscaled or checked.
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"

namespace halfstep::cpu {

/// n values of f32, f16 or bf16 from `from` on, as floats.
void load_floats(DType dtype, const void* from, std::int64_t n, float* to);
/// The same back, rounded to nearest even; NaN stays NaN.
void store_floats(DType dtype, void* to, std::int64_t n, const float* from);

/// sums[i] += factor * from[i] for n values of f32, f16 or bf16; product and sum are rounded.
HS_API void add_floats(DType dtype, const void* from, std::int64_t n, float factor, float* sums);

/// n values of f64, f32, f16 or bf16 as doubles.
HS_API void load_doubles(DType dtype, const void* from, std::int64_t n, double* to);
/// n doubles to f64, f32, f16 or bf16, each rounded once to nearest even; NaN stays NaN.
HS_API void store_doubles(DType dtype, void* to, std::int64_t n, const double* from);

inline void to_floats(const float* from, std::int64_t n, float* to) { load_floats(DType::f32, from, n, to); }
inline void to_floats(const BFloat16* from, std::int64_t n, float* to) { load_floats(DType::bf16, from, n, to); }
inline void to_floats(const Half* from, std::int64_t n, float* to) { load_floats(DType::f16, from, n, to); }

/// Where element `at` of a dense tensor lies.
inline void* element(DType dtype, void* data, std::int64_t at) {
  return static_cast<char*>(data) + at * static_cast<std::int64_t>(item_size(dtype));
}
inline const void* element(DType dtype, const void* data, std::int64_t at) {
  return static_cast<const char*>(data) + at * static_cast<std::int64_t>(item_size(dtype));
}
/// n values from element `at` of `data` on.
inline void load_floats(DType dtype, const void* data, std::int64_t at, std::int64_t n, float* to) {
  load_floats(dtype, element(dtype, data, at), n, to);
}
inline void store_floats(DType dtype, void* data, std::int64_t at, std::int64_t n, const float* from) {
  store_floats(dtype, element(dtype, data, at), n, from);
}

/// What a block of gradients held.
struct GradientBlock {
  bool finite;
  double squares;  ///< the sum of squares of what was written; 0 unless it was asked for
};

/// The dtype that gradients of `from` are unscaled to: f32 for f16, whose range the unscaled values may leave, else
/// the same.
constexpr DType unscaled_dtype(DType from) { return from == DType::f16 ? DType::f32 : from; }
/// to = from * inverse for n values of f64, f32, f16 or bf16, `to` of unscaled_dtype(dtype) and maybe the same memory;
/// checked as written, since unscaling can overflow by itself.
GradientBlock unscale_block(DType dtype, const void* from, void* to, std::int64_t n, double inverse, bool squares);
/// The largest magnitude among n values of f32, f16 or bf16; infinity where one is not finite.
float max_magnitude(DType dtype, const void* from, std::int64_t n);
/// Whether n values of f64, f32, f16 or bf16 would all be finite when multiplied by `inverse`.
bool finite_block(DType dtype, const void* from, std::int64_t n, double inverse);

}  // namespace halfstep::cpu
