// SPDX-License-Identifier: Apache-2.0
// The calls of MPI that the library makes, compiled for one implementation; see mpi_table_internal.h.
//
// MPI 3 counts in int: what is larger travels in pieces, as messages between pairs of ranks.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "halfstep/dist/mpi_table_internal.h"

struct halfstep_mpi_comm {
  MPI_Comm collectives = MPI_COMM_NULL;
  MPI_Comm messages = MPI_COMM_NULL;  // of send and receive, so that no tag of theirs meets a collective's
  int rank = 0, size = 1;
};

struct halfstep_mpi_request {
  std::vector<MPI_Request> all;
  std::vector<int> counts[2], offsets[2];  // read by MPI until the collective is done
};

namespace {

using Comm = halfstep_mpi_comm;
using Request = halfstep_mpi_request;
using Parts = halfstep_mpi_parts;

halfstep_mpi_comm the_world;
bool initialized_here = false;

// The largest message. Tests lower it to make tensors of theirs travel in pieces.
int64_t piece_bytes() {
  static const int64_t bytes = [] {
    const char* text = std::getenv("HALFSTEP_MPI_PIECE_BYTES");
    const long long given = text ? std::atoll(text) : 0;
    return static_cast<int64_t>(given > 0 ? given : 1LL << 30);
  }();
  return bytes;
}

// Errors are returned, never fatal: the library throws them.
int set_up(Comm& comm, MPI_Comm collectives) {
  comm.collectives = collectives;
  if (const int e = MPI_Comm_set_errhandler(comm.collectives, MPI_ERRORS_RETURN)) return e;
  if (const int e = MPI_Comm_dup(comm.collectives, &comm.messages)) return e;
  if (const int e = MPI_Comm_set_errhandler(comm.messages, MPI_ERRORS_RETURN)) return e;
  if (const int e = MPI_Comm_rank(comm.collectives, &comm.rank)) return e;
  return MPI_Comm_size(comm.collectives, &comm.size);
}

int32_t init() {
  int already = 0, level = 0;
  if (const int e = MPI_Initialized(&already)) return e;
  if (!already) {
    // The thread that calls this makes all other calls too; more is asked for where other libraries use MPI as well.
    if (const int e = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level)) return e;
    initialized_here = true;
  }
  MPI_Comm all = MPI_COMM_NULL;
  if (const int e = MPI_Comm_dup(MPI_COMM_WORLD, &all)) return e;
  return set_up(the_world, all);
}

int32_t finalize() {
  int done = 0;
  MPI_Finalized(&done);
  return done || !initialized_here ? 0 : MPI_Finalize();
}

void copy_text(const char* from, char* text, uint64_t capacity) {
  if (capacity) std::snprintf(text, capacity, "%s", from);
}

void library(char* text, uint64_t capacity) {
  char full[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0, major = 0, minor = 0, release = 0;
  MPI_Get_library_version(full, &length);
  if (std::sscanf(full, "Open MPI v%d.%d.%d", &major, &minor, &release) == 3) {
    std::snprintf(text, capacity, "Open MPI %d.%d.%d", major, minor, release);
  } else if (std::sscanf(full, "MPICH Version: %d.%d.%d", &major, &minor, &release) >= 2) {
    std::snprintf(text, capacity, "MPICH %d.%d.%d", major, minor, release);
  } else {
    full[std::strcspn(full, ",\n")] = '\0';
    copy_text(full, text, capacity);
  }
}

void error(int32_t code, char* text, uint64_t capacity) {
  char full[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  MPI_Error_string(code, full, &length);
  copy_text(full, text, capacity);
}

void abort_job(int32_t status) { MPI_Abort(MPI_COMM_WORLD, status); }

halfstep_mpi_comm* world() { return &the_world; }

void comm_place(Comm* comm, int32_t* rank, int32_t* size) {
  *rank = comm->rank;
  *size = comm->size;
}

int32_t comm_split(Comm* comm, int32_t color, int32_t key, Comm** result) {
  MPI_Comm part = MPI_COMM_NULL;
  if (const int e = MPI_Comm_split(comm->collectives, color, key, &part)) return e;
  auto made = std::make_unique<Comm>();
  if (const int e = set_up(*made, part)) return e;
  *result = made.release();
  return 0;
}

int32_t comm_free(Comm* comm) {
  const std::unique_ptr<Comm> owned(comm == &the_world ? nullptr : comm);
  if (const int e = MPI_Comm_free(&comm->messages)) return e;
  return MPI_Comm_free(&comm->collectives);
}

// --- messages in pieces

int send_pieces(Request& request, MPI_Comm comm, const void* data, int64_t bytes, int to, int tag) {
  const auto* at = static_cast<const char*>(data);
  int64_t left = bytes;
  do {
    const int64_t now = std::min(left, piece_bytes());
    MPI_Request started = MPI_REQUEST_NULL;
    if (const int e = MPI_Isend(at, static_cast<int>(now), MPI_BYTE, to, tag, comm, &started)) return e;
    request.all.push_back(started);
    at += now;
    left -= now;
  } while (left > 0);
  return 0;
}

int receive_pieces(Request& request, MPI_Comm comm, void* data, int64_t bytes, int from, int tag) {
  auto* at = static_cast<char*>(data);
  int64_t left = bytes;
  do {
    const int64_t now = std::min(left, piece_bytes());
    MPI_Request started = MPI_REQUEST_NULL;
    if (const int e = MPI_Irecv(at, static_cast<int>(now), MPI_BYTE, from, tag, comm, &started)) return e;
    request.all.push_back(started);
    at += now;
    left -= now;
  } while (left > 0);
  return 0;
}

constexpr int kPieceTag = 1;

char* part(const Parts& parts, int rank) { return static_cast<char*>(parts.data) + parts.offsets[rank]; }

// Starts what `start` does with a new request, which is given up where that fails.
template <class Start>
int32_t start(Request** result, Start&& starts) {
  auto request = std::make_unique<Request>();
  const int e = starts(*request);
  Request* const made = request.release();  // MPI may use what has been started: it stays
  if (e == 0) *result = made;
  return e;
}

// Counts and offsets as MPI takes them; false where one is too large.
bool as_ints(const Parts& parts, int size, std::vector<int>& counts, std::vector<int>& offsets) {
  for (int r = 0; r < size; ++r) {
    if (parts.offsets[r] + parts.bytes[r] > piece_bytes()) return false;
    counts.push_back(static_cast<int>(parts.bytes[r]));
    offsets.push_back(static_cast<int>(parts.offsets[r]));
  }
  return true;
}

int32_t start_alltoallv(Comm* comm, const Parts* send, const Parts* receive, Request** result) {
  return start(result, [&](Request& r) {
    // Pairs, from the next rank on so that not all send to rank 0 first. The collective of MPI would do the same.
    for (int i = 1; i < comm->size; ++i) {
      const int from = (comm->rank + comm->size - i) % comm->size;
      if (receive->bytes[from] == 0) continue;
      if (const int e =
              receive_pieces(r, comm->collectives, part(*receive, from), receive->bytes[from], from, kPieceTag))
        return e;
    }
    for (int i = 1; i < comm->size; ++i) {
      const int to = (comm->rank + i) % comm->size;
      if (send->bytes[to] == 0) continue;
      if (const int e = send_pieces(r, comm->collectives, part(*send, to), send->bytes[to], to, kPieceTag)) return e;
    }
    return 0;
  });
}

// All ranks know all sizes, and so take the same way.
int32_t start_allgatherv(Comm* comm, const Parts* parts, Request** result) {
  return start(result, [&](Request& r) -> int {
    if (as_ints(*parts, comm->size, r.counts[0], r.offsets[0])) {
      r.all.push_back(MPI_REQUEST_NULL);
      return MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_BYTE, parts->data, r.counts[0].data(), r.offsets[0].data(), MPI_BYTE,
                             comm->collectives, &r.all.back());
    }
    for (int i = 1; i < comm->size; ++i) {
      const int from = (comm->rank + comm->size - i) % comm->size;
      if (parts->bytes[from] == 0) continue;
      if (const int e = receive_pieces(r, comm->collectives, part(*parts, from), parts->bytes[from], from, kPieceTag))
        return e;
    }
    if (parts->bytes[comm->rank] == 0) return 0;
    for (int i = 1; i < comm->size; ++i) {
      const int to = (comm->rank + i) % comm->size;
      if (const int e =
              send_pieces(r, comm->collectives, part(*parts, comm->rank), parts->bytes[comm->rank], to, kPieceTag))
        return e;
    }
    return 0;
  });
}

int32_t start_broadcast(Comm* comm, void* data, int64_t bytes, int32_t root, Request** result) {
  return start(result, [&](Request& r) {
    auto* at = static_cast<char*>(data);
    for (int64_t left = bytes; left > 0;) {
      const int64_t now = std::min(left, piece_bytes());
      MPI_Request started = MPI_REQUEST_NULL;
      if (const int e = MPI_Ibcast(at, static_cast<int>(now), MPI_BYTE, root, comm->collectives, &started)) return e;
      r.all.push_back(started);
      at += now;
      left -= now;
    }
    return 0;
  });
}

int32_t start_gatherv(Comm* comm, const void* data, int64_t bytes, const Parts* parts, int32_t root, Request** result) {
  return start(result, [&](Request& r) {
    if (comm->rank != root) return bytes == 0 ? 0 : send_pieces(r, comm->collectives, data, bytes, root, kPieceTag);
    for (int from = 0; from < comm->size; ++from) {
      if (from == root || parts->bytes[from] == 0) continue;
      if (const int e = receive_pieces(r, comm->collectives, part(*parts, from), parts->bytes[from], from, kPieceTag))
        return e;
    }
    if (bytes != 0) std::memmove(part(*parts, root), data, static_cast<size_t>(bytes));
    return 0;
  });
}

int32_t start_scatterv(Comm* comm, const Parts* parts, void* data, int64_t bytes, int32_t root, Request** result) {
  return start(result, [&](Request& r) {
    if (comm->rank != root) return bytes == 0 ? 0 : receive_pieces(r, comm->collectives, data, bytes, root, kPieceTag);
    for (int i = 1; i < comm->size; ++i) {
      const int to = (root + i) % comm->size;
      if (parts->bytes[to] == 0) continue;
      if (const int e = send_pieces(r, comm->collectives, part(*parts, to), parts->bytes[to], to, kPieceTag)) return e;
    }
    if (bytes != 0) std::memmove(data, part(*parts, root), static_cast<size_t>(bytes));
    return 0;
  });
}

int32_t start_allreduce(Comm* comm, void* data, int64_t count, int32_t dtype, int32_t op, Request** result) {
  const MPI_Datatype types[] = {MPI_FLOAT, MPI_DOUBLE, MPI_INT64_T, MPI_INT32_T, MPI_INT8_T, MPI_UINT8_T};
  const int64_t sizes[] = {4, 8, 8, 4, 1, 1};
  const MPI_Op ops[] = {MPI_SUM, MPI_MIN, MPI_MAX, MPI_PROD};
  if (dtype < 0 || dtype >= 6 || op < 0 || op >= 4) return MPI_ERR_ARG;
  return start(result, [&](Request& r) {
    auto* at = static_cast<char*>(data);
    for (int64_t left = count; left > 0;) {
      const int64_t now = std::min(left, std::max<int64_t>(piece_bytes() / sizes[dtype], 1));
      MPI_Request started = MPI_REQUEST_NULL;
      if (const int e = MPI_Iallreduce(MPI_IN_PLACE, at, static_cast<int>(now), types[dtype], ops[op],
                                       comm->collectives, &started))
        return e;
      r.all.push_back(started);
      at += now * sizes[dtype];
      left -= now;
    }
    return 0;
  });
}

int32_t start_send(Comm* comm, const void* data, int64_t bytes, int32_t to, int32_t tag, Request** result) {
  return start(result, [&](Request& r) { return send_pieces(r, comm->messages, data, bytes, to, tag); });
}

int32_t start_receive(Comm* comm, void* data, int64_t bytes, int32_t from, int32_t tag, Request** result) {
  return start(result, [&](Request& r) { return receive_pieces(r, comm->messages, data, bytes, from, tag); });
}

int32_t test(Request* request, int32_t* done) {
  int all = 0;
  std::vector<MPI_Status> statuses(request->all.size());
  int e = MPI_Testall(static_cast<int>(request->all.size()), request->all.data(), &all, statuses.data());
  if (e == MPI_ERR_IN_STATUS) {
    for (const MPI_Status& s : statuses) {
      if (s.MPI_ERROR != MPI_SUCCESS && s.MPI_ERROR != MPI_ERR_PENDING) e = s.MPI_ERROR;
    }
  }
  *done = all;
  if (e == 0 && all) delete request;
  return e;
}

// A collective can't be cancelled, and a message that has begun may go on: nothing is freed.
void abandon(Request* request) { (void)request; }

const halfstep_mpi_table the_table = {
    .size = sizeof(halfstep_mpi_table),
    .version = HALFSTEP_MPI_TABLE_VERSION,
#if defined(OPEN_MPI)
    .implementation = "openmpi",
#else
    .implementation = "mpich",
#endif
    .init = init,
    .finalize = finalize,
    .library = library,
    .error = error,
    .abort = abort_job,
    .world = world,
    .comm_place = comm_place,
    .comm_split = comm_split,
    .comm_free = comm_free,
    .start_alltoallv = start_alltoallv,
    .start_allgatherv = start_allgatherv,
    .start_broadcast = start_broadcast,
    .start_gatherv = start_gatherv,
    .start_scatterv = start_scatterv,
    .start_allreduce = start_allreduce,
    .start_send = start_send,
    .start_receive = start_receive,
    .test = test,
    .abandon = abandon,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const halfstep_mpi_table* halfstep_mpi_module() { return &the_table; }
