// SPDX-License-Identifier: Apache-2.0
// Comparisons, logic and selection, all with broadcasting, and without gradients except where and masked_fill. Throw
// ShapeError for shapes that don't broadcast.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// input == other, elementwise, as bool; false where either is NaN. Like the five below it compares in the common dtype
/// of both sides (PyTorch's promotion; a number doesn't widen a tensor of its kind).
HS_API Tensor eq(const Tensor& input, const Tensor& other);
HS_API Tensor eq(const Tensor& input, Scalar other);
/// input != other; the only comparison that is true where either is NaN.
HS_API Tensor ne(const Tensor& input, const Tensor& other);
HS_API Tensor ne(const Tensor& input, Scalar other);
/// input < other; false where either is NaN.
HS_API Tensor lt(const Tensor& input, const Tensor& other);
HS_API Tensor lt(const Tensor& input, Scalar other);
/// input <= other; false where either is NaN.
HS_API Tensor le(const Tensor& input, const Tensor& other);
HS_API Tensor le(const Tensor& input, Scalar other);
/// input > other; false where either is NaN.
HS_API Tensor gt(const Tensor& input, const Tensor& other);
HS_API Tensor gt(const Tensor& input, Scalar other);
/// input >= other; false where either is NaN.
HS_API Tensor ge(const Tensor& input, const Tensor& other);
HS_API Tensor ge(const Tensor& input, Scalar other);

/// Whether each element is NaN, as bool; false for integers.
HS_API Tensor isnan(const Tensor& input);
/// Whether each element is infinite, as bool; false for integers.
HS_API Tensor isinf(const Tensor& input);
/// Whether each element is finite, as bool; true for integers.
HS_API Tensor isfinite(const Tensor& input);

/// Logical operations, as bool; every value but 0 counts as true (NaN too).
HS_API Tensor logical_and(const Tensor& input, const Tensor& other);
HS_API Tensor logical_or(const Tensor& input, const Tensor& other);
HS_API Tensor logical_xor(const Tensor& input, const Tensor& other);
HS_API Tensor logical_not(const Tensor& input);

/// Bits of integers, or logic on bools. Throws DTypeError for floating dtypes.
HS_API Tensor bitwise_and(const Tensor& input, const Tensor& other);
HS_API Tensor bitwise_or(const Tensor& input, const Tensor& other);
HS_API Tensor bitwise_xor(const Tensor& input, const Tensor& other);
HS_API Tensor bitwise_not(const Tensor& input);

/// `input` where `condition` (bool) is true, `other` elsewhere; all three broadcast, and the result has the common
/// dtype of input and other.
HS_API Tensor where(const Tensor& condition, const Tensor& input, const Tensor& other);
HS_API Tensor where(const Tensor& condition, const Tensor& input, Scalar other);
HS_API Tensor where(const Tensor& condition, Scalar input, const Tensor& other);

/// `input` with `value` where `mask` (bool, broadcast with it) is true. The dtype is that of `input`; a finite value
/// beyond its range becomes the nearest finite one, so that masking scores with -1e9 works in f16 too. Infinities stay
/// what they are; mask_value() is the safe constant before a softmax.
HS_API Tensor masked_fill(const Tensor& input, const Tensor& mask, Scalar value);
HS_API Tensor& masked_fill_(Tensor& input, const Tensor& mask, Scalar value);
/// The lowest finite value of a floating dtype: what masks scores before a softmax. -infinity would turn a fully masked
/// row into NaN; this makes it uniform.
HS_API double mask_value(DType dtype);

}  // namespace halfstep
