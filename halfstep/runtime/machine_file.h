// SPDX-License-Identifier: Apache-2.0
// Files in which a program keeps what it measured of a machine.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "halfstep/core/export.h"

namespace halfstep {

/// `halfstep/FOLDER/PROCESSOR-ISA-THREADS.json` in $XDG_CACHE_HOME, or in ~/.cache, for machine() as it is now; empty
/// where there is neither.
HS_API std::filesystem::path machine_file(std::string_view folder);
/// A text that another build of the library doesn't have: it may have other kernels.
HS_API std::string library_build();

}  // namespace halfstep
