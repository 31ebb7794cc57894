// SPDX-License-Identifier: Apache-2.0
// Internal: `--compress-gradients`.
#pragma once

#include <optional>
#include <string>

#include "halfstep/dist/power_sgd.h"

namespace halfstep::training {

/// What ranks send gradients in; at most one of both.
struct Compression {
  std::optional<DType> dtype = {};
  std::optional<dist::PowerSGDOptions> power_sgd = {};
};
/// `off`, `f16`, `bf16`, `powersgd`, `powersgd:RANK` or `powersgd:RANK,START`. Throws Error for anything else.
Compression parse_compression(const std::string& text);

}  // namespace halfstep::training
