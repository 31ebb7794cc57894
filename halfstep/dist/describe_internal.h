// SPDX-License-Identifier: Apache-2.0
// Internal: what ranks tell each other of their networks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "halfstep/autograd/parameter.h"
#include "halfstep/dist/process_group.h"

namespace halfstep::dist::describe {

/// Throws DistError, on all ranks, unless all have tensors of the same names, dtypes and sizes in the same order; it
/// names the first that differs.
void check_same(const NamedTensors& tensors, ProcessGroup& group, const char* who);
/// The tensors' values become those of rank `root`; their layouts stay. Those of one dtype and device are sent
/// together, up to 250 MiB at a time.
void broadcast_values(const NamedTensors& tensors, ProcessGroup& group, int root = 0);
/// Name of the first tensor whose bits differ between ranks; empty if none does.
std::string first_difference(const NamedTensors& tensors, ProcessGroup& group);
/// Numbers separated by spaces.
std::vector<std::size_t> numbers(std::string_view text);

}  // namespace halfstep::dist::describe
