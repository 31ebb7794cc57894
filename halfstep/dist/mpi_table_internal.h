// SPDX-License-Identifier: Apache-2.0
// Internal: what the library calls of MPI, as a table of C functions. A module (halfstep/backends/mpi) is compiled for
// each MPI implementation, whose binary interfaces differ, and the one of the launcher is opened at run time.
//
// Nothing here waits for another rank, except init, finalize, comm_split and comm_free, which all ranks call at the
// same time: what has been started makes progress in test(). One thread makes all calls, init included. Functions
// return 0, or an error code of MPI whose text is given by error(); nothing aborts the process but abort().
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

#define HALFSTEP_MPI_TABLE_VERSION 1
#define HALFSTEP_MPI_SYMBOL "halfstep_mpi_module"

typedef struct halfstep_mpi_comm halfstep_mpi_comm;        // a communicator
typedef struct halfstep_mpi_request halfstep_mpi_request;  // something started; memory is used until it is done

enum halfstep_mpi_dtype {
  HALFSTEP_MPI_F32,
  HALFSTEP_MPI_F64,
  HALFSTEP_MPI_I64,
  HALFSTEP_MPI_I32,
  HALFSTEP_MPI_I8,
  HALFSTEP_MPI_U8
};
enum halfstep_mpi_op { HALFSTEP_MPI_SUM, HALFSTEP_MPI_MIN, HALFSTEP_MPI_MAX, HALFSTEP_MPI_PRODUCT };

// Parts of a block of memory, one a rank, in bytes from its start.
typedef struct halfstep_mpi_parts {
  void* data;
  const int64_t* bytes;
  const int64_t* offsets;
} halfstep_mpi_parts;

typedef struct halfstep_mpi_table {
  uint32_t size;  // of this struct
  uint32_t version;
  const char* implementation;  // "openmpi" or "mpich"

  int32_t (*init)(void);
  int32_t (*finalize)(void);
  // `Open MPI 4.1.4`.
  void (*library)(char* text, uint64_t capacity);
  void (*error)(int32_t code, char* text, uint64_t capacity);
  void (*abort)(int32_t status);

  halfstep_mpi_comm* (*world)(void);
  void (*comm_place)(halfstep_mpi_comm* comm, int32_t* rank, int32_t* size);
  int32_t (*comm_split)(halfstep_mpi_comm* comm, int32_t color, int32_t key, halfstep_mpi_comm** result);
  int32_t (*comm_free)(halfstep_mpi_comm* comm);

  // The parts of a rank itself are not copied by alltoallv: their bytes must be 0. allgatherv is in place: part `rank`
  // holds what this rank gives. gatherv and scatterv read `parts` on the root only.
  int32_t (*start_alltoallv)(halfstep_mpi_comm* comm, const halfstep_mpi_parts* send, const halfstep_mpi_parts* receive,
                             halfstep_mpi_request** request);
  int32_t (*start_allgatherv)(halfstep_mpi_comm* comm, const halfstep_mpi_parts* parts, halfstep_mpi_request** request);
  int32_t (*start_broadcast)(halfstep_mpi_comm* comm, void* data, int64_t bytes, int32_t root,
                             halfstep_mpi_request** request);
  int32_t (*start_gatherv)(halfstep_mpi_comm* comm, const void* data, int64_t bytes, const halfstep_mpi_parts* parts,
                           int32_t root, halfstep_mpi_request** request);
  int32_t (*start_scatterv)(halfstep_mpi_comm* comm, const halfstep_mpi_parts* parts, void* data, int64_t bytes,
                            int32_t root, halfstep_mpi_request** request);
  // In place, by the library's own algorithm.
  int32_t (*start_allreduce)(halfstep_mpi_comm* comm, void* data, int64_t count, int32_t dtype, int32_t op,
                             halfstep_mpi_request** request);
  // Messages between two ranks, apart from the collectives'.
  int32_t (*start_send)(halfstep_mpi_comm* comm, const void* data, int64_t bytes, int32_t to, int32_t tag,
                        halfstep_mpi_request** request);
  int32_t (*start_receive)(halfstep_mpi_comm* comm, void* data, int64_t bytes, int32_t from, int32_t tag,
                           halfstep_mpi_request** request);

  // Makes progress and sets *done; a request that is done is freed.
  int32_t (*test)(halfstep_mpi_request* request, int32_t* done);
  // Gives up a request that is not done. MPI may use its memory until the process ends: it must stay.
  void (*abandon)(halfstep_mpi_request* request);
} halfstep_mpi_table;

typedef const halfstep_mpi_table* (*halfstep_mpi_module_fn)(void);

}  // extern "C"
