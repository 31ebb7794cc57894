// SPDX-License-Identifier: Apache-2.0
// Collectives with gradients, as torch.distributed.nn.functional has them. Each returns when its result is there.
//
// The gradient of a collective is a collective too: every rank has to run the backward pass through it, in the same
// order. They can be differentiated again. Tensors may have any strides; they are made row-major. The loss whose
// gradient is computed is the sum of the ranks' losses.
#pragma once

#include "halfstep/core/export.h"
#include "halfstep/core/tensor.h"
#include "halfstep/dist/process_group.h"

namespace halfstep::dist {

/// The reduction of the ranks' tensors, on every rank. Gradient: the same reduction of the gradients, for sum and mean;
/// others throw AutogradError for an input that requires grad.
HS_API Tensor all_reduce(const Tensor& input, const ProcessGroup& group, ReduceOp op = ReduceOp::sum);
/// The reduction of the ranks' tensors on rank `root`, zeros on others. Gradient: the root's, on all ranks (divided by
/// their number for mean); ops other than sum and mean as in all_reduce.
HS_API Tensor reduce(const Tensor& input, const ProcessGroup& group, int root = 0, ReduceOp op = ReduceOp::sum);
/// The tensor of rank `root`, on every rank; others give one of the same shape and dtype. Gradient: the sum of the
/// ranks' gradients on the root, zeros on others.
HS_API Tensor broadcast(const Tensor& input, const ProcessGroup& group, int root = 0);
/// [n, ...] to [size * n, ...]: the ranks' tensors, one after the other. A 0-d tensor gives [size]. Gradient: the sum
/// of the ranks' gradients of this rank's part.
HS_API Tensor all_gather(const Tensor& input, const ProcessGroup& group);
/// [n, ...] to [size * n, ...]: the ranks' tensors, one after the other, on rank `root`; zeros of that shape on others.
/// A 0-d tensor gives [size]. Gradient: this rank's part of the root's gradient.
HS_API Tensor gather(const Tensor& input, const ProcessGroup& group, int root = 0);
/// [size * n, ...] to [n, ...]: part `rank` of rank `root`'s tensor; others give one of the same shape and dtype.
/// Gradient: the ranks' gradients, one after the other, on the root, zeros on others. Throws ShapeError if the first
/// size can't be divided.
HS_API Tensor scatter(const Tensor& input, const ProcessGroup& group, int root = 0);
/// [size * n, ...] to [n, ...]: part `rank` of the reduction of the ranks' tensors. Gradient: the ranks' gradients, one
/// after the other (divided by their number for mean); ops other than sum and mean as in all_reduce. Throws ShapeError
/// if the first size can't be divided.
HS_API Tensor reduce_scatter(const Tensor& input, const ProcessGroup& group, ReduceOp op = ReduceOp::sum);
/// [size * n, ...] to [size * n, ...]: part r of the result is part `rank` of rank r's tensor. Gradient: the parts sent
/// back. Throws ShapeError if the first size can't be divided.
HS_API Tensor all_to_all(const Tensor& input, const ProcessGroup& group);

}  // namespace halfstep::dist
