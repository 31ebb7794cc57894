// SPDX-License-Identifier: Apache-2.0
// `halfstep quantize --weight-only`: weights of linear layers in integers (quant/weight_only.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "cli/options.h"
#include "halfstep/quant/weight_only.h"
#include "halfstep/train/config.h"

namespace halfstep::cli {

/// What --quant-weight-bits, --quant-skip and --group-size say. Throws UsageError for other bits than 8 and 4.
quant::WeightOnlyOptions weight_only_options(const training::QuantizationConfig& config, std::int64_t group_size);

/// Flags of the verb.
struct WeightOnlyRun {
  std::string model = {};
  Device device = {};
  quant::WeightOnlyOptions options = {};
  const training::ImageDataOptions* images = nullptr;  ///< null: no network of images
  std::filesystem::path data = {};                     ///< none: the run's
  std::filesystem::path out = {}, figure = {};
  std::int64_t batch_size = 32;
  int workers = 1;
  std::optional<std::uint64_t> seed = {};  ///< of the built-in data; none: the run's
  bool no_eval = false;
};
/// Converts the network, measures it before and after where there are data, and writes it.
int quantize_weight_only(const WeightOnlyRun& o, Loaded loaded);

}  // namespace halfstep::cli
