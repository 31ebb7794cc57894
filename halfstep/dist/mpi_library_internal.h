// SPDX-License-Identifier: Apache-2.0
// Internal: the module of the MPI implementation, opened at run time.
#pragma once

#include <string>

#include "halfstep/dist/mpi_table_internal.h"

namespace halfstep::dist::detail {

/// Opens libhalfstep_mpi_NAME.so in the folder `halfstep/mpi` beside the library (or in HALFSTEP_MPI_DIR). It stays
/// open. Throws DistError if it can't be opened, with the reason and what to do.
const halfstep_mpi_table& open_mpi_module(const std::string& name);

/// Throws DistError unless `code` is 0: `what: MPI reports ...`.
void check_mpi(const halfstep_mpi_table& mpi, int code, const std::string& what);

}  // namespace halfstep::dist::detail
