// SPDX-License-Identifier: Apache-2.0
// Numbers in the values of flags, such as --loss-scale and --lr-schedule have.
#pragma once

#include <string>
#include <vector>

namespace halfstep::training {

/// The finite numbers of a list with commas, which is a part of the value `whole` of `flag`. Throws Error naming the
/// `forms` that are expected.
std::vector<double> flag_numbers(const char* flag, const char* forms, const std::string& list,
                                 const std::string& whole);

}  // namespace halfstep::training
