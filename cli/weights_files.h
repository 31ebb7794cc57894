// SPDX-License-Identifier: Apache-2.0
// What `convert` and `inspect` share.
#pragma once

#include <map>
#include <string>

#include "halfstep/io/weights.h"

namespace halfstep::cli {

/// Names of tensors that are the same memory seen in the same way, by the name that stands first: `a` for `b`, if `b`
/// is tied to `a`.
std::map<std::string, std::string> tied_names(const NamedTensors& tensors);

/// Bytes that these tensors take, those that are tied counted once.
std::uint64_t total_bytes(const NamedTensors& tensors);

/// `1.5 MB` (10^6 bytes).
std::string bytes_text(std::uint64_t bytes);

/// Whether metadata is that of a checkpoint of Halfstep's own, whose tensors named `optimizer.` are no weights.
bool is_checkpoint(const io::WeightsFile& file);

}  // namespace halfstep::cli
