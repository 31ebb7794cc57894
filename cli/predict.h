// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/options.h"

namespace halfstep::cli {

/// What `halfstep predict` was told.
struct PredictOptions : CommonOptions {
  EvalImageOptions pictures;
  std::filesystem::path weights, data, classes;
  std::vector<std::filesystem::path> inputs;
  std::vector<std::int64_t> indices;
  std::string amp;
  int count = 8;
  int top = 5;
  std::uint64_t seed = 0;
};

/// For networks of images: the likeliest classes of each file. A file that can't be read is complained of, the others
/// are still told, and the status is kFailed.
int predict_images(PredictOptions& options);

}  // namespace halfstep::cli
