// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/dist/process_group.h"
#include "halfstep/nn/module.h"
#include "halfstep/ops/norm_act.h"

namespace halfstep::dist {

/// activation(batch_norm(input) + residual) with the statistics of the batches of all ranks together, which may be of
/// different sizes, an empty one included: what halfstep::batch_norm_act gives for the concatenation of the ranks'
/// inputs, up to rounding. Gradients of input and residual take the dependence of the statistics on all inputs into
/// account; those of weight and bias are the rank's part, which dist::DataParallel adds up. Running statistics are
/// updated alike on all ranks. PyTorch's SyncBatchNorm. All ranks call it, forward and backward. Without
/// `options.training` it is batch_norm_act. Not to be differentiated twice. Throws as batch_norm_act does.
HS_API Tensor sync_batch_norm(const Tensor& input, const BatchNormFuncOptions& options, const ProcessGroup& group,
                              Activation activation = Activation::none, const Tensor& residual = {});

/// Has every BatchNorm1d and BatchNorm2d of a network normalise by sync_batch_norm() in training, and returns how many
/// there are: PyTorch's SyncBatchNorm.convert_sync_batchnorm, which makes other modules. All handles of the modules
/// change; names, parameters and buffers stay.
HS_API int convert_sync_batch_norm(const nn::ModuleBase& module, const ProcessGroup& group);

}  // namespace halfstep::dist
