// SPDX-License-Identifier: Apache-2.0
// What the ops that normalise share. Not for users.
#pragma once

#include <array>

#include "halfstep/ops/attributes.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/op.h"

namespace halfstep::detail {

/// Has the parameters (inputs first to last) converted to what an input of dtype `input` is computed in.
void cast_parameters(InferContext& ctx, int first, int last, DType input);
/// Throws unless `p` is absent, or floating and of `sizes`.
void check_parameter(const Tensor& p, const Shape& sizes, const char* op, const char* what);
/// Row-major, or absent as before.
inline Tensor dense(const Tensor& t) { return t.defined() ? t.contiguous() : t; }

/// The input of group_norm as its kernels take it: as it lies where the channels of [N, C, ...] lie next to each other
/// with nothing between the elements, else row-major.
Tensor group_norm_input(const Tensor& input);

/// A checked call of batch_norm or of an op that does more: its first five inputs but x, and its attributes.
struct BatchNormCall {
  Tensor weight, bias, running_mean, running_var;
  BatchNormAttributes attributes;
};
BatchNormCall check_batch_norm(const Tensor& input, const BatchNormFuncOptions& options, const char* op);
/// Brings the running statistics up to date, where there are any, with the mean and the biased variance of a batch.
void update_running_statistics(const BatchNormFuncOptions& options, const BatchNormAttributes& attributes,
                               const Tensor& mean, const Tensor& var);
/// The outputs that ops of batch normalisation have: y; mean, 1 / deviation and variance that were used.
void infer_batch_norm(InferContext& ctx);
/// The first three outputs of their backward passes, whose inputs start with g, x, weight: gradients of input, weight
/// and bias, of shape [0] where they are not asked for.
void infer_batch_norm_backward(InferContext& ctx);
/// batch_norm's rule for the gradients of input, weight and bias, `g` being that of the normalised values: by the fused
/// pass, or in recorded ops where those are asked for.
void batch_norm_gradient(GradContext& c, const Tensor& g);

/// Of batch_norm with constant statistics: gradients of input, weight and bias; for backward
/// passes that aren't recorded.
std::array<Tensor, 3> batch_norm_gradients(const Tensor& g, const Tensor& input, const Tensor& weight,
                                           const Tensor& mean, const Tensor& rstd);
/// What batch_norm_act's backward pass starts from.
struct BatchNormActSaved {
  Tensor input, weight, mean, rstd;
  Tensor y = {};               ///< the result; not read for silu
  Tensor bias = {};            ///< read for silu only
  Tensor residual = {};        ///< its values are read for silu only
  bool with_residual = false;  ///< whether there was one
};
/// The same of batch_norm_act, and the gradient of its residual, undefined without one.
std::array<Tensor, 4> batch_norm_act_gradients(const Tensor& g, const BatchNormActSaved& saved, Activation activation);

}  // namespace halfstep::detail
