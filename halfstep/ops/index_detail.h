// SPDX-License-Identifier: Apache-2.0
// Shared by index.cpp and index_put.cpp; not for users.
#pragma once

#include "halfstep/core/tensor.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::detail {

/// The indices as i64. Throws DTypeError, naming `op`, for other than i64 and i32.
Tensor index_tensor(const Tensor& index, const char* op);
/// `source`, or a copy where it shares memory with the destination of an in-place write.
Tensor apart(const Tensor& source, const Tensor& destination);
ScalarValue scalar_value(Scalar s);

}  // namespace halfstep::detail
