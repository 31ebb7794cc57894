// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "halfstep/autograd/parameter.h"
#include "halfstep/io/read_limits.h"
#include "halfstep/nn/module.h"

namespace halfstep::io {

/// The formats of weight files.
enum class WeightsFormat : std::uint8_t { safetensors, pth };

/// The contents of a weight file.
struct WeightsFile {
  NamedTensors tensors;
  /// safetensors: the texts of `__metadata__`; .pth: values outside the state dict, as JSON.
  std::map<std::string, std::string> metadata;
  WeightsFormat format = WeightsFormat::safetensors;
  NamedTensors others;  ///< .pth: tensors outside the state dict, such as the optimizer's
};

/// Reads a safetensors or .pth file, detected from its content. If all names begin with `module.`, like those of
/// torch.nn.DataParallel, the prefix is removed and this is logged (level info). A checkpoint that ranks wrote in
/// shards is read with them. Throws IoError, also if the file contains no tensor.
HS_API WeightsFile load_weights_file(const std::filesystem::path& path, const ReadLimits& limits = read_limits());

/// Options of load_pretrained.
struct PretrainedOptions {
  /// A last layer of a different size, for a different number of classes, keeps its values; off: that is an error too.
  bool replace_head = true;
  std::vector<std::string> heads = {};  ///< what names of further such layers begin with, as a detector's `model.24.`
};

/// The result of load_pretrained, by the network's names (`unexpected`: by the file's).
struct PretrainedReport {
  std::vector<std::string> loaded;
  std::vector<std::string> missing;     ///< not in the file and left unchanged: only batch counters
  std::vector<std::string> unexpected;  ///< only in the file and ignored: only a last layer under another name
  std::vector<std::string> replaced;    ///< of the last layer: of a different size or not in the file, left unchanged
};

/// Copies the values of a file into a network for fine-tuning, converting dtypes. The file and the network must match
/// except for the last layer (`fc`, `classifier`, `head`, `heads`, or the one registered last), which keeps its initial
/// values if its size or name differs, and this is logged (level warning); and for `num_batches_tracked`, which old
/// files don't have. Throws Error naming all other differences, with suggested names, before anything is changed; also
/// for integers of the network that the file stores as floating-point values, and counters that are negative or over
/// 2^62.
HS_API PretrainedReport load_pretrained(const nn::ModuleBase& module, const NamedTensors& tensors,
                                        const PretrainedOptions& options = {});

}  // namespace halfstep::io
