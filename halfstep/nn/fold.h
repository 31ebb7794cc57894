// SPDX-License-Identifier: Apache-2.0
// Batch norms folded into the convolutions before them, for inference: with constant statistics both together are one
// convolution with a bias.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "halfstep/nn/conv.h"
#include "halfstep/nn/module.h"
#include "halfstep/nn/norm.h"

namespace halfstep::nn {

/// A convolution that computes norm(conv(x)) with the norm's running statistics: PyTorch's function of that name. Its
/// weight is conv's times weight / sqrt(running_var + eps), channel by channel, rounded once. Throws Error where
/// channels differ or the norm has no running statistics.
/// @{
HS_API Conv1d fuse_conv_bn_eval(const Conv1d& conv, const BatchNorm1d& norm);
HS_API Conv2d fuse_conv_bn_eval(const Conv2d& conv, const BatchNorm2d& norm);
/// @}

/// What fold_batch_norms() did.
struct FoldReport {
  std::vector<std::string> folded = {};  ///< paths of the norms that were folded
  std::vector<std::string> left = {};    ///< those that were left, each with the reason: `bn2: reads no convolution`
};

/// Folds batch norms of `module` into the convolutions whose results they read, in place: convolutions get new weights
/// and a bias, norms become what follows them (BatchNormBase::is_folded). Which belong together is seen in a run of
/// `forward`, once, in evaluation mode: a norm is left where it reads something else than a convolution's result,
/// where somebody else reads that too, where either is called twice or shares its tensors with another module, and
/// where it has no running statistics. Afterwards the network is in evaluation mode, for inference only. Results are
/// those of before up to rounding.
///
/// Handles that share this one's containers change too: fold a clone(), as the other form does.
HS_API FoldReport fold_batch_norms(ModuleBase& module, const std::function<void()>& forward);

/// An independent copy of the network, folded; `example` is an input of it:
///
///     const auto fast = nn::fold_batch_norms(net, zeros({1, 3, 224, 224}));
template <class M>
M fold_batch_norms(const M& module, const Tensor& example) {
  M result = clone(module);
  fold_batch_norms(result, [&] { (void)result(example); });
  return result;
}

}  // namespace halfstep::nn
