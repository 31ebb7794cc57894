// SPDX-License-Identifier: Apache-2.0
#include "libraries/collectives.h"

#include <nccl.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>

#include "halfstep/runtime/plugin_numbers.h"
#include "host/device.h"
#include "host/errors.h"
#include "libraries/library.h"

namespace hscuda::collectives {
namespace {

struct Nccl {
  Library library{"nccl", NCCL_MAJOR};
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRank) init_rank = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;

  Nccl() {
    library.find(get_unique_id, "ncclGetUniqueId") && library.find(init_rank, "ncclCommInitRank") &&
        library.find(destroy, "ncclCommDestroy") && library.find(abort, "ncclCommAbort") &&
        library.find(async_error, "ncclCommGetAsyncError") && library.find(all_reduce, "ncclAllReduce") &&
        library.find(broadcast, "ncclBroadcast") && library.find(all_gather, "ncclAllGather") &&
        library.find(reduce_scatter, "ncclReduceScatter") && library.find(send, "ncclSend") &&
        library.find(receive, "ncclRecv") && library.find(group_start, "ncclGroupStart") &&
        library.find(group_end, "ncclGroupEnd") && library.find(error_string, "ncclGetErrorString") &&
        library.find(last_error, "ncclGetLastError");
  }
};

/// Null, and noted, when NCCL can't be opened.
const Nccl* nccl() {
  static const Nccl& opened = *new Nccl;
  if (opened.library.failure().empty()) return &opened;
  fail(HALFSTEP_FAILED, 0, "%s", opened.library.failure().c_str());
  return nullptr;
}

struct Group {
  Device* device;
  int ranks, rank;
  std::atomic<ncclComm_t> communicator;  ///< null once aborted
};
Group& group_of(halfstep_group* group) { return *reinterpret_cast<Group*>(group); }

halfstep_status check(const Nccl& n, ncclResult_t result, ncclComm_t communicator, const char* what) {
  if (result == ncclSuccess) return HALFSTEP_OK;
  const char* const more = n.last_error(communicator);
  return fail(HALFSTEP_FAILED, 0, "%s: %s%s%s", what, n.error_string(result), more && *more ? ": " : "",
              more ? more : "");
}

halfstep_status async_error(const Nccl& n, ncclComm_t communicator, const char* what) {
  ncclResult_t state = ncclSuccess;
  if (const auto status = check(n, n.async_error(communicator, &state), communicator, what)) return status;
  return state == ncclInProgress ? HALFSTEP_OK : check(n, state, communicator, what);
}

/// Calls that begin together: f returns what its first failing call did. The group is ended in any case.
template <class F>
ncclResult_t together(const Nccl& n, F&& f) {
  if (const ncclResult_t result = n.group_start(); result != ncclSuccess) return result;
  const ncclResult_t result = f();
  const ncclResult_t end = n.group_end();
  return result != ncclSuccess ? result : end;
}

std::optional<ncclDataType_t> type_of(int32_t dtype) {
  switch (dtype) {
    case HALFSTEP_F32:
      return ncclFloat32;
    case HALFSTEP_F64:
      return ncclFloat64;
    case HALFSTEP_F16:
      return ncclFloat16;
    case HALFSTEP_BF16:
      return ncclBfloat16;
    case HALFSTEP_I64:
      return ncclInt64;
    case HALFSTEP_I32:
      return ncclInt32;
    case HALFSTEP_I8:
      return ncclInt8;
    case HALFSTEP_U8:
    case HALFSTEP_BOOL:
      return ncclUint8;
    default:
      return std::nullopt;
  }
}
// In the order of HALFSTEP_REDUCE_...
constexpr ncclRedOp_t kReductions[] = {ncclSum, ncclProd, ncclMin, ncclMax};

/// What all of the calls below share: f(nccl, communicator, stream) behind what is in the queue.
template <class F>
halfstep_status enqueue(halfstep_group* handle, halfstep_queue* queue_handle, const char* what, F&& f) {
  try {
    const Nccl* const n = nccl();
    if (n == nullptr) return HALFSTEP_FAILED;
    Group& group = group_of(handle);
    const Queue& queue = *reinterpret_cast<Queue*>(queue_handle);
    if (queue.recording) return fail(HALFSTEP_UNSUPPORTED, 0, "%s: graphs hold no collectives here", what);
    const ncclComm_t communicator = group.communicator;
    if (communicator == nullptr) return fail(HALFSTEP_FAILED, 0, "%s: the group was aborted", what);
    if (const auto status = group.device->use()) return status;
    // A rank that has gone is noticed here, not by a hang.
    if (const auto status = async_error(*n, communicator, what)) return status;
    return check(*n, f(*n, communicator, queue.stream), communicator, what);
  } catch (const std::exception& e) {
    return fail(HALFSTEP_FAILED, 0, "%s: %s", what, e.what());
  }
}

/// The same with a dtype and, where it is not negative, a reduction, which f is given as NCCL's.
template <class F>
halfstep_status enqueue_typed(halfstep_group* group, halfstep_queue* queue, const char* what, int32_t dtype,
                              int32_t reduce, F&& f) {
  const auto type = type_of(dtype);
  if (!type) return fail(HALFSTEP_UNSUPPORTED, 0, "%s: NCCL sends no such dtype (%d)", what, dtype);
  // Halfstep divides the sum itself: ncclAvg came with NCCL 2.10.
  if (reduce == HALFSTEP_REDUCE_MEAN) return fail(HALFSTEP_UNSUPPORTED, 0, "%s: no mean", what);
  if (reduce > HALFSTEP_REDUCE_MAX) return fail(HALFSTEP_FAILED, 0, "%s: unknown reduction %d", what, reduce);
  // One byte of 0 or 1: a sum would be something else.
  if (dtype == HALFSTEP_BOOL && reduce == HALFSTEP_REDUCE_SUM) reduce = HALFSTEP_REDUCE_MAX;
  const ncclRedOp_t op = kReductions[reduce < 0 ? 0 : reduce];
  return enqueue(group, queue, what,
                 [&](const Nccl& n, ncclComm_t comm, cudaStream_t stream) { return f(n, comm, stream, *type, op); });
}

// --- the entries

halfstep_status group_id(void* id, uint64_t capacity, uint64_t* bytes) {
  *bytes = 0;
  const Nccl* const n = nccl();
  if (n == nullptr) return HALFSTEP_FAILED;
  if (capacity < sizeof(ncclUniqueId)) {
    return fail(HALFSTEP_FAILED, 0, "a group's id has %zu bytes, there is room for %llu", sizeof(ncclUniqueId),
                static_cast<unsigned long long>(capacity));
  }
  ncclUniqueId made;
  if (const auto status = check(*n, n->get_unique_id(&made), nullptr, "ncclGetUniqueId")) return status;
  std::memcpy(id, &made, sizeof made);
  *bytes = sizeof made;
  return HALFSTEP_OK;
}

halfstep_status group_create(int32_t index, int32_t ranks, int32_t rank, const void* id, uint64_t bytes,
                             halfstep_group** group) {
  *group = nullptr;
  const Nccl* const n = nccl();
  if (n == nullptr) return HALFSTEP_FAILED;
  Device* device = device_at(index);
  if (device == nullptr) return HALFSTEP_FAILED;
  if (const auto status = device->use()) return status;
  ncclUniqueId given;
  if (bytes != sizeof given) {
    return fail(HALFSTEP_FAILED, 0, "expected a group's id of %zu bytes, got %llu", sizeof given,
                static_cast<unsigned long long>(bytes));
  }
  std::memcpy(&given, id, sizeof given);
  ncclComm_t communicator = nullptr;
  if (const auto status = check(*n, n->init_rank(&communicator, ranks, given, rank), nullptr, "ncclCommInitRank"))
    return status;
  *group = reinterpret_cast<halfstep_group*>(new Group{device, ranks, rank, communicator});
  return HALFSTEP_OK;
}

halfstep_status group_destroy(halfstep_group* handle) {
  const std::unique_ptr<Group> group(&group_of(handle));
  if (group->communicator == nullptr) return HALFSTEP_OK;  // was aborted
  const Nccl* const n = nccl();
  if (const auto status = group->device->use()) {
    n->abort(group->communicator);  // which waits for nothing that the GPU would have to do
    return status;
  }
  return check(*n, n->destroy(group->communicator), nullptr, "ncclCommDestroy");
}

halfstep_status group_abort(halfstep_group* handle) {
  Group& group = group_of(handle);
  const Nccl* const n = nccl();
  const ncclComm_t communicator = group.communicator.exchange(nullptr);
  if (communicator == nullptr) return HALFSTEP_OK;
  return check(*n, n->abort(communicator), nullptr, "ncclCommAbort");
}

halfstep_status all_reduce(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                           int32_t dtype, int32_t reduce) {
  return enqueue_typed(group, queue, "all_reduce", dtype, reduce,
                       [&](const Nccl& n, ncclComm_t comm, cudaStream_t stream, ncclDataType_t type, ncclRedOp_t op) {
                         return n.all_reduce(in, out, static_cast<std::size_t>(count), type, op, comm, stream);
                       });
}

halfstep_status broadcast(halfstep_group* group, halfstep_queue* queue, void* data, int64_t count, int32_t dtype,
                          int32_t root) {
  return enqueue_typed(group, queue, "broadcast", dtype, -1,
                       [&](const Nccl& n, ncclComm_t comm, cudaStream_t stream, ncclDataType_t type, ncclRedOp_t) {
                         return n.broadcast(data, data, static_cast<std::size_t>(count), type, root, comm, stream);
                       });
}

halfstep_status all_gather(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                           int32_t dtype) {
  return enqueue_typed(group, queue, "all_gather", dtype, -1,
                       [&](const Nccl& n, ncclComm_t comm, cudaStream_t stream, ncclDataType_t type, ncclRedOp_t) {
                         return n.all_gather(in, out, static_cast<std::size_t>(count), type, comm, stream);
                       });
}

halfstep_status reduce_scatter(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                               int32_t dtype, int32_t reduce) {
  return enqueue_typed(group, queue, "reduce_scatter", dtype, reduce,
                       [&](const Nccl& n, ncclComm_t comm, cudaStream_t stream, ncclDataType_t type, ncclRedOp_t op) {
                         return n.reduce_scatter(in, out, static_cast<std::size_t>(count), type, op, comm, stream);
                       });
}

halfstep_status all_to_all(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                           int32_t dtype) {
  const Group& g = group_of(group);
  const std::size_t bytes = static_cast<std::size_t>(count) * halfstep_plugin_numbers::item_size(dtype);
  return enqueue(group, queue, "all_to_all", [&](const Nccl& n, ncclComm_t comm, cudaStream_t stream) {
    const auto at = [bytes](int rank) { return static_cast<std::size_t>(rank) * bytes; };
    const char* const from = static_cast<const char*>(in);
    char* const to = static_cast<char*>(out);
    if (cudaMemcpyAsync(to + at(g.rank), from + at(g.rank), bytes, cudaMemcpyDeviceToDevice, stream) != cudaSuccess) {
      return ncclUnhandledCudaError;
    }
    return together(n, [&] {
      ncclResult_t result = ncclSuccess;
      for (int r = 0; r < g.ranks && result == ncclSuccess; ++r) {
        if (r == g.rank) continue;
        result = n.send(from + at(r), bytes, ncclUint8, r, comm, stream);
        if (result == ncclSuccess) result = n.receive(to + at(r), bytes, ncclUint8, r, comm, stream);
      }
      return result;
    });
  });
}

halfstep_status send_receive(halfstep_group* group, halfstep_queue* queue, const halfstep_transfer* transfers,
                             int32_t count) {
  return enqueue(group, queue, "send_receive", [&](const Nccl& n, ncclComm_t comm, cudaStream_t stream) {
    return together(n, [&] {
      ncclResult_t result = ncclSuccess;
      for (int32_t i = 0; i < count && result == ncclSuccess; ++i) {
        const halfstep_transfer& t = transfers[i];
        const std::size_t bytes = static_cast<std::size_t>(t.count) * halfstep_plugin_numbers::item_size(t.dtype);
        result = t.receive ? n.receive(t.data, bytes, ncclUint8, t.peer, comm, stream)
                           : n.send(t.data, bytes, ncclUint8, t.peer, comm, stream);
      }
      return result;
    });
  });
}

halfstep_status group_error(halfstep_group* handle) {
  const Nccl* const n = nccl();
  if (n == nullptr) return HALFSTEP_FAILED;
  const ncclComm_t communicator = group_of(handle).communicator;
  if (communicator == nullptr) return fail(HALFSTEP_FAILED, 0, "the group was aborted");
  return async_error(*n, communicator, "NCCL");
}

}  // namespace

void fill(halfstep_plugin_table& table) {
  table.group_id = group_id;
  table.group_create = group_create;
  table.group_destroy = group_destroy;
  table.group_abort = group_abort;
  table.all_reduce = all_reduce;
  table.broadcast = broadcast;
  table.all_gather = all_gather;
  table.reduce_scatter = reduce_scatter;
  table.all_to_all = all_to_all;
  table.send_receive = send_receive;
  table.group_error = group_error;
}

}  // namespace hscuda::collectives
