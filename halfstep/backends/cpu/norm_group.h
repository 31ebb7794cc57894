// SPDX-License-Identifier: Apache-2.0
// group_norm of channels-last images: a batch norm of each image, with the statistics of its channels joined by groups.
#pragma once

#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// Inputs x [N, C, ...], weight and bias [C] (or absent), outputs y and mean and 1 / deviation [N * groups]. Statistics
/// are those of channels, joined in float64. False: there is no workspace.
bool group_norm_images(KernelContext* context, const TensorView* in, TensorView* out, const RowNormAttributes& a);
/// Inputs: g, x, weight, mean, 1 / deviation. Outputs: gradients of x, weight and bias, the latter two empty where they
/// are not wanted.
bool group_norm_images_backward(KernelContext* context, const TensorView* in, TensorView* out,
                                const RowNormAttributes& a);

}  // namespace halfstep::cpu
