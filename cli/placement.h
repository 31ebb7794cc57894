// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace halfstep::cli {

/// What `devices DEVICE --model MODEL` shows.
struct PlacementOptions {
  std::string model;
  std::string amp = "off";
  std::int64_t batch_size = 2;
  std::int64_t image_size = 0;
};
/// Without a level of the user's own, no warnings of ops that run on the CPU: the table says so.
void silence_fallback_warnings();
/// Prints where each op of a training step of the network runs on the device. Throws UsageError.
int print_placement(const std::string& device, const PlacementOptions& options);

}  // namespace halfstep::cli
