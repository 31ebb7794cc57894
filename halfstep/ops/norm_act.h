// SPDX-License-Identifier: Apache-2.0
// Batch normalisation fused with the ops that follow it in image networks.
#pragma once

#include <cstdint>

#include "halfstep/core/tensor.h"
#include "halfstep/ops/norm.h"

namespace halfstep {

/// What is applied to the sum of a normalisation and a residual.
enum class Activation : std::uint8_t { none, relu, relu6, silu };
/// `none`, `relu`, `relu6`, `silu`
HS_API const char* name(Activation activation);

/// That function of a tensor; for `none` the tensor itself.
HS_API Tensor activate(const Tensor& input, Activation activation);

/// activation(batch_norm(input, norm) + residual) for [N, C, ...] in any layout: after the statistics, one pass that
/// reads the input and the residual and writes the result, and in the backward pass one that sums and one that writes
/// the gradients of input and residual. In 16 bits it is rounded once where the three ops would round two or three
/// times. The backward pass keeps the input, the result and the channels' mean and deviation: no more than the ops
/// before and after keep anyway. Observers, and gradients that are themselves recorded, see the component ops; a device
/// without a fused kernel runs those too, with their roundings. The gradient of relu and relu6 is 0 on their bounds, as
/// for the separate ops.
///
/// silu (without a residual) is an op of its own, `batch_norm_silu`: its backward pass keeps the input, the parameters
/// and the statistics, and computes silu's input anew. With a residual it is composed of the ops.
///
/// `residual`, which may be absent, has the input's sizes; one of a different dtype is added by a separate op, with
/// that op's promotion. Throws as batch_norm, and ShapeError for a residual of other sizes.
HS_API Tensor batch_norm_act(const Tensor& input, const BatchNormFuncOptions& norm,
                             Activation activation = Activation::relu, const Tensor& residual = {});

}  // namespace halfstep
