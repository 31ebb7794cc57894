// SPDX-License-Identifier: Apache-2.0
// Internal: which gradients are reduced together.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "halfstep/autograd/parameter.h"

namespace halfstep::dist::detail {

/// Buckets of these parameters, which are numbers in `parameters` in the order that their gradients are expected in. A
/// bucket has one dtype and device and is full at `cap_mb` MiB, the first one at `first_cap_mb`.
std::vector<std::vector<std::size_t>> bucket_members(const NamedTensors& parameters, std::span<const std::size_t> order,
                                                     double first_cap_mb, double cap_mb);

}  // namespace halfstep::dist::detail
