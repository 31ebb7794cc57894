// SPDX-License-Identifier: Apache-2.0
#include "cli/fold.h"

#include <fmt/format.h>

#include "halfstep/nn/fold.h"
#include "halfstep/quant/quantization.h"
#include "halfstep/train/trace_step.h"

namespace halfstep::cli {
namespace {

constexpr const char* kFoldFlag = "--fold-batch-norm";

}  // namespace

void add_fold(const Verb& verb, bool& fold) {
  verb.add_switch(kFoldFlag, fold, "Fold batch norms into the convolutions before them");
}

std::string fold_network(const Loaded& loaded, const std::string& model, std::int64_t image_size) {
  const nn::ModuleBase& module = *loaded.network.module;
  const Device device = [&] {
    const NamedTensors parameters = module.parameters();
    return parameters.empty() ? Device() : parameters.front().tensor.device();
  }();
  if (quant::quantization_of(module)) {
    throw UsageError(
        fmt::format("{}: {} was trained with --qat, whose rounding is that of the network as it is", kFoldFlag, model));
  }
  const Tensor example = training::example_input(model, 1, image_size, device);
  // The verb's own network: nobody else has a handle on it.
  const nn::FoldReport report =
      nn::fold_batch_norms(const_cast<nn::ModuleBase&>(module), [&] { (void)loaded.network.forward(example); });
  if (report.folded.empty()) {
    throw UsageError(fmt::format("{}: {} has no batch norms that read a convolution's result{}", kFoldFlag, model,
                                 report.left.empty() ? "" : "; " + report.left.front()));
  }
  const std::size_t left = report.left.size();
  return fmt::format(", {} batch norms folded{}", report.folded.size(),
                     left > 0 ? fmt::format(", {} left ({})", left, report.left.front()) : "");
}

}  // namespace halfstep::cli
