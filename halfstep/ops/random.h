// SPDX-License-Identifier: Apache-2.0
// Random tensors. Element i (row-major, whatever the layout) depends on the generator's seed and offset and on i only:
// not on threads, sizes of other calls, or the device. Without a generator the default one is used (core/random.h).
#pragma once

#include <cstdint>

#include "halfstep/core/random.h"
#include "halfstep/core/tensor.h"

namespace halfstep {

/// Uniform in [0, 1): multiples of 2^-24 (f32), 2^-53 (f64), 2^-11 (f16), 2^-8 (bf16), so that 1 is never rounded to.
HS_API Tensor rand(const Shape& sizes, const TensorOptions& options = {}, Generator* generator = nullptr);
/// Standard normal.
HS_API Tensor randn(const Shape& sizes, const TensorOptions& options = {}, Generator* generator = nullptr);
/// Integers in [low, high), each with the same probability, as i64 unless the options say otherwise. Throws Error when
/// there are none.
HS_API Tensor randint(std::int64_t low, std::int64_t high, const Shape& sizes,
                      const TensorOptions& options = {.dtype = i64}, Generator* generator = nullptr);
/// A random order of 0 ... n - 1.
HS_API Tensor randperm(std::int64_t n, const TensorOptions& options = {.dtype = i64}, Generator* generator = nullptr);
/// 1 with the probability that the input has in each place, else 0; in the input's dtype. Probabilities outside [0, 1]
/// are an Error.
HS_API Tensor bernoulli(const Tensor& input, Generator* generator = nullptr);
/// rand() with the sizes, dtype, device and layout of `other`.
HS_API Tensor rand_like(const Tensor& other, Generator* generator = nullptr);
/// randn() with the sizes, dtype, device and layout of `other`.
HS_API Tensor randn_like(const Tensor& other, Generator* generator = nullptr);
/// randint() with the sizes, dtype, device and layout of `other`.
HS_API Tensor randint_like(const Tensor& other, std::int64_t low, std::int64_t high, Generator* generator = nullptr);

/// Fill a tensor, which may be a view, in place and return it: uniform in [low, high), normal with mean and standard
/// deviation, or 1 with probability p. Computed in f64 for f64, else in f32 or wider, and rounded once; what would
/// round up to `high` becomes the largest value below it.
HS_API Tensor uniform_(Tensor input, double low = 0, double high = 1, Generator* generator = nullptr);
HS_API Tensor normal_(Tensor input, double mean = 0, double std = 1, Generator* generator = nullptr);
HS_API Tensor bernoulli_(Tensor input, double p = 0.5, Generator* generator = nullptr);

}  // namespace halfstep
