// SPDX-License-Identifier: Apache-2.0
#include "cli/precision.h"

#include <fmt/format.h>

#include "halfstep/amp/level.h"
#include "halfstep/train/config.h"

namespace halfstep::cli {

void add_precision(const Verb& verb, std::string& amp) {
  add_training_flag(verb, "--amp", &amp,
                    "Mixed precision: off, bf16, f16, or a level O0, O1, O2, O3 or auto (default: the level of the "
                    "training, or else off)");
}

void check_precision(const std::string& amp) {
  training::TrainConfig config;
  if (!amp.empty()) config.amp = amp;
  as_usage([&] { training::amp_mode(config); });
}

Precision set_precision(const Loaded& loaded, const std::string& amp) {
  training::TrainConfig config;
  config.amp = amp;
  if (amp.empty()) {
    // Of the training only a level is part of the network: a region is the caller's.
    const std::size_t space = loaded.amp.find(' ');
    const std::string level = loaded.amp.substr(0, space);
    config.amp = level == "auto" || level.starts_with('O') ? level : "off";
    if (config.amp != "off" && space != std::string::npos) config.amp_dtype = loaded.amp.substr(space + 1);
  }
  const training::AmpMode mode = as_usage([&] { return training::amp_mode(config); });
  Precision precision{.region = mode.region};
  if (mode.level == amp::Level::O0) return precision;
  amp::set_level(*loaded.classifier.module, mode.level, mode.level_dtype);
  if (amp.empty()) precision.said = fmt::format(", {}, as it was trained", training::amp_text(config));
  return precision;
}

}  // namespace halfstep::cli
