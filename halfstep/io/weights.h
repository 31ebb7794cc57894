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

/// The forms of files with weights.
enum class WeightsFormat : std::uint8_t { safetensors, pth };

/// What a file with weights holds.
struct WeightsFile {
  NamedTensors tensors;
  /// safetensors: the texts of `__metadata__`; .pth: values beside the state dict, as JSON.
  std::map<std::string, std::string> metadata;
  WeightsFormat format = WeightsFormat::safetensors;
  NamedTensors others;  ///< .pth: tensors beside the state dict, such as the optimizer's
};

/// Reads a safetensors or .pth file, which it knows by its content. When all names begin with `module.`, as those of
/// torch.nn.DataParallel do, they lose it, and the log says so (level info). Throws IoError, also when there is no
/// tensor in it.
HS_API WeightsFile load_weights_file(const std::filesystem::path& path, const ReadLimits& limits = read_limits());

/// Options of load_pretrained.
struct PretrainedOptions {
  /// A last layer of another size, for another number of classes, keeps the values it has; off: that is an error too.
  bool replace_head = true;
};

/// What load_pretrained did, by the network's names (`unexpected`: by the file's).
struct PretrainedReport {
  std::vector<std::string> loaded;
  std::vector<std::string> missing;     ///< not in the file and left as they were: only counters of batches
  std::vector<std::string> unexpected;  ///< in the file only and left out: only a last layer under another name
  std::vector<std::string> replaced;    ///< of the last layer: of another size or not in the file, left as they were
};

/// Copies the values of a file into a network for fine-tuning, converting dtypes. What is in the file and in the
/// network must be the same but for the last layer (`fc`, `classifier`, `head`, `heads`, or what is registered last),
/// which stays as it was made where it has another size or another name, and the log says so (level warning); and for
/// `num_batches_tracked`, which old files don't have. Throws Error naming all other differences, with the names that
/// may have been meant, before anything is changed; also for integers of the network that the file has as floating
/// values, and counters that are negative or over 2^62.
HS_API PretrainedReport load_pretrained(const nn::ModuleBase& module, const NamedTensors& tensors,
                                        const PretrainedOptions& options = {});

}  // namespace halfstep::io
