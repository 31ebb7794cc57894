// SPDX-License-Identifier: Apache-2.0
// `halfstep launch --as-rank PROGRAM...`: the process that MPI's launcher starts for each rank. It starts the program,
// and stays until the launcher has heard from all ranks, so that MPI's launcher sees no rank fail and leaves the others
// alone until they have said what they have to say.
#pragma once

#include <string>
#include <vector>

namespace halfstep::cli {

/// The variable that says that a rank has the standard files of the launcher, and not MPI's.
inline constexpr const char* kOutputVariable = "HALFSTEP_LAUNCH_OUTPUT";

/// Returns the exit status of the process. Rank 0 has the standard files of the launcher; of other ranks standard error
/// alone is shown, with `[rank N] ` before each line.
int run_as_rank(const std::vector<std::string>& program);

}  // namespace halfstep::cli
