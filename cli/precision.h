// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "cli/options.h"
#include "halfstep/core/dtype.h"

namespace halfstep::cli {

/// The precision that a network with weights computes in.
struct Precision {
  std::optional<DType> region = {};  ///< of autocast around its forward pass; none: no autocast
  std::string said = {};             ///< `, O2 bf16, as it was trained`, where nobody asked for it; else empty
};
/// Throws UsageError for an `--amp` that is no precision; empty: not given.
void check_precision(const std::string& amp);
/// Puts the network at the level of `--amp`, or, where `amp` is empty, at the level of mixed precision (O0 to O3, auto)
/// that it was trained with. Throws UsageError as check_precision().
Precision set_precision(const Loaded& loaded, const std::string& amp);
/// Adds such an --amp.
void add_precision(const Verb& verb, std::string& amp);

}  // namespace halfstep::cli
