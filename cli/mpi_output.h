// SPDX-License-Identifier: Apache-2.0
// Where the output of a rank goes. Open MPI gives its ranks a terminal of its own, whatever mpirun itself writes to.
#pragma once

namespace halfstep::cli {

/// Whether a terminal that this process writes to is one that somebody looks at: false for a rank that Open MPI's
/// mpirun has started, unless that writes to a terminal. A process of MPI's on another machine doesn't.
bool mpi_shows_output();

}  // namespace halfstep::cli
