// SPDX-License-Identifier: Apache-2.0
// Internal: what started this process, from the environment variables that launchers of MPI set.
#pragma once

#include <functional>
#include <string>

#include "halfstep/core/export.h"

namespace halfstep::dist::detail {

/// A process's place in a job. Numbers that the launcher doesn't tell are -1.
struct Launch {
  std::string mpi;       ///< module to open: "openmpi" or "mpich"; empty: no launcher
  std::string launcher;  ///< for messages: `mpirun of Open MPI`
  std::string size_variable;
  int size = -1, rank = -1, local_rank = -1, local_size = -1;
  bool by_user = false;  ///< HALFSTEP_MPI chose the module
};

/// Reads the variables through `get`, std::getenv's type. Throws DistError where they say what can't be: a number that
/// is none, a step of Slurm with several tasks that srun started without MPI, an unknown HALFSTEP_MPI.
HS_API Launch find_launch(const std::function<const char*(const char*)>& get);
/// Of this process.
HS_API Launch find_launch();

}  // namespace halfstep::dist::detail
