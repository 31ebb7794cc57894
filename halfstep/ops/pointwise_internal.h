// SPDX-License-Identifier: Apache-2.0
// What the elementwise families share: shape rules and attributes of numbers.
#pragma once

#include "halfstep/ops/attributes.h"
#include "halfstep/ops/op.h"

namespace halfstep::detail {

/// One input; the result has its dtype. bool is refused.
void infer_unary_numeric(InferContext& ctx);
/// One input; the result has its dtype, whatever that is.
void infer_unary_any(InferContext& ctx);
/// One input; integers and bool compute as f32.
void infer_unary_floating(InferContext& ctx);
/// All inputs in their common dtype, which is the result's.
void infer_common(InferContext& ctx);
/// As infer_common; bool is refused.
void infer_common_numeric(InferContext& ctx);
/// As infer_common; integers and bool compute as f32.
void infer_common_floating(InferContext& ctx);
/// One input and ScalarAttributes: the result has the dtype of both together.
void infer_with_number(InferContext& ctx);

ScalarAttributes scalar_attributes(Scalar number);
Scalar number_of(const ScalarValue& value);
/// The number as a 0-d tensor that widens `like` only where its kind does.
Tensor number_tensor(const Tensor& like, Scalar number, const char* op);

/// An elementwise op of one input with the gradient rule `grad`.
const Op& define_unary(const char* name, InferFn infer, GradFn grad, std::uint32_t saves);

/// The in-place form of an op whose gradient reads its input: while recorded, the op runs on a copy, so that what it
/// saves stays what it was.
template <class A = NoAttributes>
Tensor& in_place_keeping_input(const Op& op, Tensor& input, const A& attributes = {}) {
  if (input.defined() && thread_state().grad_enabled && input.requires_grad()) {
    const Tensor kept = input.clone();
    return input.copy_(call(op, {&kept}, attributes));
  }
  return call_in_place(op, input, {}, attributes);
}

}  // namespace halfstep::detail
