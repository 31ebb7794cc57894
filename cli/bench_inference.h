// SPDX-License-Identifier: Apache-2.0
// `halfstep bench MODEL --inference`: calls of sessions (infer/session.h) in place of training steps.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/core/device.h"
#include "halfstep/quant/weight_only.h"

namespace halfstep::cli {

struct InferenceBench {
  std::string model = {};
  Device device = {};
  std::int64_t batch_size = 1;
  std::int64_t image_size = 0;        ///< pixels of a side; of networks that take no images, any number
  std::vector<std::string> amp = {};  ///< precisions: off, bf16 or f16
  bool int8 = false;                  ///< the integers of the same network too, with ranges from random samples
  /// The network with weights of linear layers in integers too, in each of the precisions.
  std::optional<quant::WeightOnlyOptions> weights = {};
  int steps = 1, warmup = 0;           ///< timed calls, and calls before them
  std::filesystem::path onnx_to = {};  ///< folder for what is timed as ONNX files, for other runtimes; empty: none
};

/// Times calls on random data in turns and prints a JSON line for each precision. Throws UsageError for precisions that
/// are no dtype, for integers on a device, and for networks that don't have one input and one result.
int bench_inference(const InferenceBench& o);

}  // namespace halfstep::cli
