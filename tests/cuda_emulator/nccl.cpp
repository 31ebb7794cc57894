// SPDX-License-Identifier: Apache-2.0
// NCCL for one rank: what a group of one does. More ranks are refused, as this is no transport.
#include <nccl.h>

#include "functions.h"

struct ncclComm {
  int ranks = 1;
};

namespace {

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt64:
    case ncclFloat64:
      return 8;
    default:
      return 4;
  }
}

ncclResult_t move(const void* in, void* out, std::size_t count, ncclDataType_t type, const ncclComm* comm,
                  cudaStream_t stream) {
  if (comm == nullptr || comm->ranks != 1) return ncclInvalidUsage;
  if (in == out || count == 0) return ncclSuccess;
  const cudaError_t error = cudaMemcpyAsync(out, in, count * size_of(type), cudaMemcpyDeviceToDevice, stream);
  return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  id->internal[0] = 1;
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  if (ranks != 1 || rank != 0 || id.internal[0] != 1) return ncclInvalidArgument;
  *comm = new ncclComm;
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : result == ncclInvalidArgument ? "invalid argument" : "invalid usage";
}

const char* ncclGetLastError(ncclComm_t) { return "the emulated NCCL has groups of one rank only"; }

ncclResult_t ncclAllReduce(const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t comm, cudaStream_t stream) {
  return move(in, out, count, type, comm, stream);
}

ncclResult_t ncclBroadcast(const void* in, void* out, std::size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return root == 0 ? move(in, out, count, type, comm, stream) : ncclInvalidArgument;
}

ncclResult_t ncclAllGather(const void* in, void* out, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return move(in, out, count, type, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t,
                               ncclComm_t comm, cudaStream_t stream) {
  return move(in, out, count, type, comm, stream);
}

// Of one rank there is no other to send to.
ncclResult_t ncclSend(const void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclInvalidArgument;
}
ncclResult_t ncclRecv(void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclInvalidArgument; }
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }

}  // extern "C"

namespace {
using hscuda::emulator::Function;
const Function kFunctions[] = {{"ncclGetUniqueId", ncclGetUniqueId},
                               {"ncclCommInitRank", ncclCommInitRank},
                               {"ncclCommDestroy", ncclCommDestroy},
                               {"ncclCommAbort", ncclCommAbort},
                               {"ncclCommGetAsyncError", ncclCommGetAsyncError},
                               {"ncclGetErrorString", ncclGetErrorString},
                               {"ncclGetLastError", ncclGetLastError},
                               {"ncclAllReduce", ncclAllReduce},
                               {"ncclBroadcast", ncclBroadcast},
                               {"ncclAllGather", ncclAllGather},
                               {"ncclReduceScatter", ncclReduceScatter},
                               {"ncclSend", ncclSend},
                               {"ncclRecv", ncclRecv},
                               {"ncclGroupStart", ncclGroupStart},
                               {"ncclGroupEnd", ncclGroupEnd}};
}  // namespace
