// SPDX-License-Identifier: Apache-2.0
// Quantization-aware training as a configuration says it (quant/quantization.h does it).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "halfstep/quant/quantization.h"
#include "halfstep/train/callback.h"
#include "halfstep/train/config.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/task.h"
#include "halfstep/train/train_step.h"

namespace halfstep::training {

/// The options of quant::prepare that a configuration stands for. Throws Error for an observer that is not known.
HS_API quant::QuantizationOptions quantization_options(const QuantizationConfig& config);

/// Prepares the task's network for quantization-aware training, as `config.quantization` says; nothing where that is
/// off. What the network calls is seen on a batch of random samples of the configuration's data, whose loss the task
/// computes; the network is on the CPU. Modules keep their mode, and the default generator its state. Throws Error for
/// a network without convolutions and linear layers, for one that is prepared already, and for data that have no random
/// samples.
HS_API void prepare_quantization(const TrainConfig& config, Task& task);

/// Prepares a network of the registry (TrainConfig::model) for being timed in integers, with 8 bits where the
/// configuration doesn't say otherwise: its ranges are those of a few random samples, which say nothing of accuracy.
/// Throws Error as prepare_quantization() does.
HS_API void prepare_random_quantization(TrainConfig config, const RunData& data, const Network& network);

/// What names of tensors begin with that are a network's quantization.
inline constexpr std::string_view kQuantizationPrefix = "quantization.";
/// Copies those tensors of a file that a prepared network has in the same sizes, and returns how many those are: for a
/// network that begins with the ranges of another one.
HS_API std::size_t load_ranges(const nn::ModuleBase& network, const NamedTensors& tensors);

/// Throws Error for scales and zero points of a prepared network that no training gives: a scale that is no number
/// above 0, a zero point outside of the integers, or of a weight other than 0. For networks whose state was read from a
/// file.
HS_API void check_ranges(const nn::ModuleBase& network);
/// The network's state with the integers of its quantized weights (i8) in place of the weights where these have up to 8
/// bits: what files of quantized networks hold. Scales stand beside them, in the network's quantization.
HS_API NamedTensors with_integers(const nn::ModuleBase& network);
/// The reverse: float32 weights from i8 tensors that have a scale, in place. Throws Error for scales that don't fit,
/// for integers of another dtype, and for those that the bits in `recipe`, the flags that were saved with them, don't
/// have.
HS_API void restore_weights(NamedTensors& tensors, const std::map<std::string, std::string>& recipe = {});

/// What flags that were saved with weights (recipe()) say of quantization. Throws Error for text that is none of them.
HS_API QuantizationConfig saved_quantization(const std::map<std::string, std::string>& recipe);
/// The same as recipe() saves it.
HS_API std::map<std::string, std::string> quantization_recipe(const QuantizationConfig& config);

/// Freezes a prepared network on the way: before the first step after `config.freeze_ranges` epochs the ranges of its
/// activations stay as they are, and from `config.freeze_norms` epochs on its batch norms are in evaluation mode while
/// it is trained, as torchvision's scripts have it. Weights follow their range to the end. Null where nothing is to be
/// frozen.
HS_API std::shared_ptr<CallbackBase> quantization_schedule(const QuantizationConfig& config, TrainStep& step);

/// The network's state without what quantizes its activations: what an average of weights is of. A range is a scale
/// and an integer, which can't be averaged.
HS_API NamedTensors without_activation_ranges(const nn::ModuleBase& network);

}  // namespace halfstep::training
