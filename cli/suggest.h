// SPDX-License-Identifier: Apache-2.0
// What somebody may have meant by a word that isn't known.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace halfstep::cli {

/// The choice that is nearest to `word`: one that begins with it, else one that a few slips of the keyboard (a letter
/// too many, missing, wrong, or two swapped) lead to. Empty when none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& choices);

/// `; did you mean NEAREST?`, or nothing.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& choices);

}  // namespace halfstep::cli
