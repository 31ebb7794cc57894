// SPDX-License-Identifier: Apache-2.0
// A group of devices is made when all ranks first have a collective for one: rank 0's id travels by MPI. Before each
// collective the ranks have agreed, by MPI as well, what it is; while it runs on the device, this thread waits for it,
// so that a rank that is gone, a timeout or the failure of another rank ends it.
//
// A library that promises sums in the order of ranks reduces by itself. Others (rings) combine in an order that depends
// on the element, and may round 16 bits at every hop: there each rank gets its part of all ranks' values by all_to_all,
// kernels add it up in float32, and all_gather gives the result to all. That moves as many bytes as a ring.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/dist/agreement_internal.h"
#include "halfstep/dist/communication_thread_internal.h"
#include "halfstep/dist/device_group_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep::dist::detail {

/// The group of a ProcessGroup's ranks on one kind of device. Never destroyed, like its communicator of MPI.
class DeviceGroup {
 public:
  DeviceGroup(DeviceBackend& backend, Device device, halfstep_group* native)
      : backend_(backend), device_(device), native_(native) {}

  Device device() const { return device_; }
  bool run(CommunicationThread& thread, Call& call);

 private:
  /// A call of the table: HALFSTEP_UNSUPPORTED is false, what goes wrong is thrown.
  bool enqueued(halfstep_status status, const Call& call) {
    if (status == HALFSTEP_UNSUPPORTED) return false;
    check(status, call);
    return true;
  }
  void check(halfstep_status status, const Call& call);
  bool enqueue(Call& call, std::vector<Tensor>& scratch);
  bool reduce(Call& call, std::vector<Tensor>& scratch);
  bool reduce_by_library(Call& call, const void* in, void* out, std::int32_t reduce);
  bool reduce_in_order_of_ranks(Call& call, std::vector<Tensor>& scratch);
  bool to_root(Call& call, bool gathers);
  void wait(CommunicationThread& thread, const Call& call, const Event& done);

  DeviceBackend& backend_;
  const Device device_;
  halfstep_group* const native_;
  halfstep_queue* queue_ = nullptr;  // of the call that runs
};

namespace {

// The queue of this thread for a device. It lives as long as the program.
const Queue& queue_for(Device device) {
  static auto& queues = *new std::vector<Queue>;  // of the communication thread alone
  for (const Queue& q : queues) {
    if (q.device() == device) return q;
  }
  return queues.emplace_back(device, QueueOptions{.priority = 1000});  // the highest there is
}

// All elements in the order of memory.
Tensor flat(const Tensor& t) { return as_strided(t.detach(), {t.numel()}, {1}, t.storage_offset()); }

std::int64_t bytes_of(const Tensor& t) { return t.numel() * static_cast<std::int64_t>(t.item_size()); }

void* address(const Tensor& t) { return const_cast<void*>(t.const_raw_data()); }

std::int32_t reduction_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return HALFSTEP_REDUCE_MIN;
    case ReduceOp::max:
      return HALFSTEP_REDUCE_MAX;
    case ReduceOp::product:
      return HALFSTEP_REDUCE_PROD;
    case ReduceOp::mean:
      return HALFSTEP_REDUCE_MEAN;
    default:
      return HALFSTEP_REDUCE_SUM;
  }
}

// The sum or product of equal parts, in their order, in float32 (float64 for f64), rounded once.
Tensor combine_parts(const Tensor& parts, int ranks, ReduceOp op, DType dtype) {
  const DType wide = dtype == DType::f64 ? dtype : DType::f32;
  const std::int64_t n = parts.numel() / ranks;
  Tensor sum = parts.narrow(0, 0, n).to(wide);
  for (int r = 1; r < ranks; ++r) {
    const Tensor next = parts.narrow(0, r * n, n).to(wide);
    sum = op == ReduceOp::product ? sum * next : sum + next;
  }
  if (op == ReduceOp::mean) sum = sum / static_cast<double>(ranks);
  return sum.to(dtype);
}

// --- making a group

struct IdBlock {
  std::int32_t status = HALFSTEP_FAILED;
  std::uint32_t bytes = 0;
  char data[HALFSTEP_GROUP_ID_BYTES] = {};  // or the reason
};
struct Outcome {
  std::int32_t status = HALFSTEP_FAILED;
  std::int32_t follows = 0;  ///< given up because another rank failed
  char reason[248] = {};
};

template <std::size_t N>
void put_reason(char (&to)[N], const DeviceBackend& backend) {
  halfstep_error error{};
  error.size = sizeof(error);
  backend.table.error(&error);
  error.text[sizeof(error.text) - 1] = '\0';
  const std::string_view text = error.text[0] ? error.text : "no reason was given";
  const std::size_t length = std::min(text.size(), N - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

std::string reason_of(const DeviceBackend& backend) {
  char text[sizeof(halfstep_error::text)] = {};
  put_reason(text, backend);
  return text;
}

// What a thread of its own does: it waits for the other ranks, one of which may be gone, or have failed.
struct Creation {
  std::mutex mutex;
  std::condition_variable ended;
  bool over = false, unwanted = false;
  Outcome outcome;
  halfstep_group* group = nullptr;

  void run(const DeviceBackend& backend, int device, int ranks, int rank, const IdBlock& id) {
    halfstep_group* made = nullptr;
    Outcome came;
    came.status = backend.table.group_create(device, ranks, rank, id.data, id.bytes, &made);
    if (came.status != HALFSTEP_OK) put_reason(came.reason, backend);
    const std::lock_guard lock(mutex);
    over = true;
    outcome = came;
    group = made;
    if (unwanted) destroy(backend);
    ended.notify_all();
  }
  bool is_over() {
    const std::lock_guard lock(mutex);
    return over;
  }
  /// The outcome, or that nobody waits for it any more. A creation that doesn't wait for other ranks comes to its end:
  /// a process that ended first would take the device away from under it.
  Outcome take() {
    std::unique_lock lock(mutex);
    ended.wait_for(lock, std::chrono::seconds(1), [this] { return over; });
    unwanted = !over;
    return over ? outcome : Outcome{.status = HALFSTEP_FAILED, .follows = 1};
  }
  void discard(const DeviceBackend& backend) {
    const std::lock_guard lock(mutex);
    destroy(backend);
  }

 private:
  void destroy(const DeviceBackend& backend) {
    if (!group) return;
    backend.table.group_abort(group);
    backend.table.group_destroy(std::exchange(group, nullptr));
  }
};

// The ranks' outcomes, which come one by one: who fails is known to the others while they still wait for it. Never
// destroyed, as MPI may use its memory.
class Outcomes {
 public:
  Outcomes(CommunicationThread& thread, const Call& call)
      : thread_(thread), call_(call), all_(static_cast<std::size_t>(call.group->size)), open_(all_.size()) {
    each_other([&](int r, std::size_t k) {
      const int code = thread_.mpi().start_receive(call_.group->comm, &all_[k], sizeof(Outcome), r, kTag, &open_[k]);
      if (code != 0) thread_.finish(code, nullptr, call_);
    });
  }
  /// Whether another rank is known to have failed.
  bool any_failed() {
    bool failed = false;
    each_other([&](int, std::size_t k) {
      std::int32_t done = 0;
      if (open_[k]) {
        const int code = thread_.mpi().test(open_[k], &done);
        if (done || code != 0) open_[k] = nullptr;
        if (code != 0) thread_.finish(code, nullptr, call_);
      }
      failed = failed || (!open_[k] && all_[k].status != HALFSTEP_OK);
    });
    return failed;
  }
  /// Gives this rank's to all, and waits for those of all.
  const std::vector<Outcome>& exchange(const Outcome& own) {
    Outcome& mine = all_[static_cast<std::size_t>(call_.group->rank)] = own;
    std::vector<halfstep_mpi_request*> sends;
    each_other([&](int r, std::size_t) {
      halfstep_mpi_request* request = nullptr;
      const int code = thread_.mpi().start_send(call_.group->comm, &mine, sizeof(Outcome), r, kTag, &request);
      if (code != 0) thread_.finish(code, nullptr, call_);
      sends.push_back(request);
    });
    each_other([&](int, std::size_t k) {
      if (open_[k]) thread_.finish(0, std::exchange(open_[k], nullptr), call_);
    });
    for (halfstep_mpi_request* request : sends) thread_.finish(0, request, call_);
    return all_;
  }

 private:
  static constexpr int kTag = 32001;  // beyond those of messages
  template <class F>
  void each_other(F&& f) {
    for (int r = 0; r < call_.group->size; ++r) {
      if (r != call_.group->rank) f(r, static_cast<std::size_t>(r));
    }
  }
  CommunicationThread& thread_;
  const Call& call_;
  std::vector<Outcome> all_;
  std::vector<halfstep_mpi_request*> open_;
};

void refuse(const Call& call, Device device, const std::string& why) {
  call.group->no_device_group = true;
  if (call.group->rank != 0) return;
  log(LogLevel::warning,
      fmt::format("the collectives of {} can't be used: {}; tensors on it go through the host", device.str(), why));
}

// All ranks call it; null on all if any can't.
std::shared_ptr<DeviceGroup> make_group(CommunicationThread& thread, const Call& call) {
  const GroupState& group = *call.group;
  const Device device = call.on_device->device;
  DeviceBackend& backend = backend_for(device, name(call.kind));
  IdBlock& id = *new IdBlock;  // MPI, and the thread below, may use it to the end
  if (group.rank == 0) {
    std::uint64_t bytes = 0;
    id.status = backend.table.group_id(id.data, sizeof(id.data), &bytes);
    id.bytes = static_cast<std::uint32_t>(bytes);
    if (id.status != HALFSTEP_OK) put_reason(id.data, backend);
  }
  halfstep_mpi_request* request = nullptr;
  const int code = thread.mpi().start_broadcast(group.comm, &id, sizeof(IdBlock), 0, &request);
  thread.finish(code, request, call);
  if (id.status != HALFSTEP_OK) {
    id.data[sizeof(id.data) - 1] = '\0';
    refuse(call, device, id.data);
    return nullptr;
  }
  Outcomes& outcomes = *new Outcomes(thread, call);
  const auto creation = std::make_shared<Creation>();
  std::thread([creation, &id, &backend, device, ranks = group.size, rank = group.rank] {
    creation->run(backend, device.index, ranks, rank, id);
  }).detach();
  thread.wait_for(call, [&] { return creation->is_over() || outcomes.any_failed(); });
  const std::vector<Outcome>& all = outcomes.exchange(creation->take());
  const auto failed = std::find_if(all.begin(), all.end(), [](const Outcome& o) { return o.status != HALFSTEP_OK; });
  if (failed != all.end()) {
    const auto first =
        std::find_if(failed, all.end(), [](const Outcome& o) { return o.status != HALFSTEP_OK && o.follows == 0; });
    creation->discard(backend);
    const auto& why = first == all.end() ? *failed : *first;
    refuse(call, device, fmt::format("rank {}: {}", &why - all.data(), why.reason));
    return nullptr;
  }
  return std::make_shared<DeviceGroup>(backend, device, creation->group);
}

}  // namespace

// --- a call

// What a group says is no consequence of earlier ops, which DeviceBackend::raise would list.
void DeviceGroup::check(halfstep_status status, const Call& call) {
  if (status == HALFSTEP_OK) return;
  if (status == HALFSTEP_LOST) backend_.raise(status, name(call.kind), device_.index);
  fail<DeviceError>("failed on {}: {}", device_.str(), reason_of(backend_));
}

bool DeviceGroup::reduce_by_library(Call& call, const void* in, void* out, std::int32_t reduce) {
  const auto dtype = static_cast<std::int32_t>(call.dtype);
  const auto& t = backend_.table;
  return enqueued(call.kind == CallKind::all_reduce
                      ? t.all_reduce(native_, queue_, in, out, call.count, dtype, reduce)
                      : t.reduce_scatter(native_, queue_, in, out, call.count, dtype, reduce),
                  call);
}

bool DeviceGroup::reduce_in_order_of_ranks(Call& call, std::vector<Tensor>& scratch) {
  const int ranks = call.group->size;
  const DeviceOperands& on = *call.on_device;
  const Tensor output = flat(on.output);
  const bool all = call.kind == CallKind::all_reduce;
  // Equal parts; what the last ones lack is added up with whatever is there, and dropped.
  const std::int64_t share = all ? (call.count + ranks - 1) / ranks : call.count;
  const std::int64_t bytes = share * static_cast<std::int64_t>(item_size(call.dtype));
  const TensorOptions options{.dtype = call.dtype, .device = device_};
  Tensor whole = all ? output : flat(on.input);
  if (whole.numel() != share * ranks) {
    whole = zeros({share * ranks}, options);
    whole.narrow(0, 0, call.count).copy_(output);
  }
  const Tensor parts = empty({share * ranks}, options);
  scratch.insert(scratch.end(), {whole, parts});
  const auto& t = backend_.table;
  if (!enqueued(t.all_to_all(native_, queue_, address(whole), address(parts), bytes, HALFSTEP_U8), call)) return false;
  const Tensor sum = combine_parts(parts, ranks, call.op, call.dtype);
  scratch.push_back(sum);
  if (!all) {
    Tensor(output).copy_(sum);
    return true;
  }
  if (!enqueued(t.all_gather(native_, queue_, address(sum), address(whole), bytes, HALFSTEP_U8), call)) {
    fail<DeviceError>("all_gather: not supported, but all_to_all is");  // which has used the output by now
  }
  if (whole.storage() != output.storage()) Tensor(output).copy_(whole.narrow(0, 0, call.count));
  return true;
}

bool DeviceGroup::reduce(Call& call, std::vector<Tensor>& scratch) {
  const DeviceOperands& on = *call.on_device;
  const void* in = address(on.input.defined() ? on.input : on.output);
  void* out = address(on.output);
  const std::int32_t reduce = reduction_of(call.op);
  const bool ordered = (backend_.info(device_.index).collectives & HALFSTEP_COLLECTIVES_IN_ORDER) != 0;
  // Integers have the same bits in any order.
  if (ordered || is_integral(call.dtype)) return reduce_by_library(call, in, out, reduce);
  // Nothing is known of NaN, and of zeros of either sign.
  if (call.op == ReduceOp::min || call.op == ReduceOp::max) return false;
  if (call.group->reduction != Reduction::library) return reduce_in_order_of_ranks(call, scratch);
  if (call.op != ReduceOp::mean) return reduce_by_library(call, in, out, reduce);
  if (reduce_by_library(call, in, out, reduce)) return true;
  if (!reduce_by_library(call, in, out, HALFSTEP_REDUCE_SUM)) return false;
  Tensor result = flat(on.output);
  result.copy_(result / static_cast<double>(call.group->size));
  return true;
}

// Messages between the root and each other rank.
bool DeviceGroup::to_root(Call& call, bool gathers) {
  const GroupState& group = *call.group;
  const DeviceOperands& on = *call.on_device;
  const std::int64_t bytes = call.bytes();
  const auto transfer = [&](char* data, int peer, bool receive) {
    return halfstep_transfer{data, bytes, HALFSTEP_U8, peer, receive ? 1U : 0U, 0};
  };
  std::vector<halfstep_transfer> transfers;
  const auto& t = backend_.table;
  if (group.rank != call.root) {
    transfers.push_back(transfer(static_cast<char*>(address(gathers ? on.input : on.output)), call.root, !gathers));
    return enqueued(t.send_receive(native_, queue_, transfers.data(), 1), call);
  }
  char* all = static_cast<char*>(address(gathers ? on.output : on.input));
  for (int r = 0; r < group.size; ++r) {
    if (r != call.root) transfers.push_back(transfer(all + r * bytes, r, gathers));
  }
  if (!enqueued(t.send_receive(native_, queue_, transfers.data(), group.size - 1), call)) return false;
  char* own = all + group.rank * bytes;
  char* other = static_cast<char*>(address(gathers ? on.input : on.output));
  if (own == other) return true;
  return enqueued(t.copy(queue_, gathers ? own : other, gathers ? other : own, static_cast<std::uint64_t>(bytes),
                         HALFSTEP_COPY_ON_DEVICE),
                  call);
}

bool DeviceGroup::enqueue(Call& call, std::vector<Tensor>& scratch) {
  const DeviceOperands& on = *call.on_device;
  const auto& t = backend_.table;
  const std::int64_t bytes = call.bytes();
  switch (call.kind) {
    case CallKind::all_reduce:
    case CallKind::reduce_scatter:
      return reduce(call, scratch);
    case CallKind::broadcast:
      return enqueued(t.broadcast(native_, queue_, address(on.output), bytes, HALFSTEP_U8, call.root), call);
    case CallKind::all_gather:
      return enqueued(t.all_gather(native_, queue_, address(on.input), address(on.output), bytes, HALFSTEP_U8), call);
    case CallKind::all_to_all:
      return enqueued(t.all_to_all(native_, queue_, address(on.input), address(on.output), bytes, HALFSTEP_U8), call);
    case CallKind::gather:
      return to_root(call, true);
    case CallKind::scatter:
      return to_root(call, false);
    default:
      return false;
  }
}

void DeviceGroup::wait(CommunicationThread& thread, const Call& call, const Event& done) {
  int asked = 0;
  const auto check_group = [&] { check(backend_.table.group_error(native_), call); };
  thread.wait_for(
      call,
      [&] {
        if (done.query()) return true;
        if (++asked % 16 == 0) check_group();
        return false;
      },
      call.bytes());
  done.synchronize();  // tells of failures of the device
  check_group();
}

bool DeviceGroup::run(CommunicationThread& thread, Call& call) {
  const Queue& queue = queue_for(device_);
  const QueueGuard guard(queue);
  const NoGrad no_grad;
  queue_ = static_cast<halfstep_queue*>(queue.native());
  // Kept where they may still be used after an error.
  const auto scratch = std::make_unique<std::vector<Tensor>>();
  try {
    queue.wait(call.on_device->ready);
    if (!enqueue(call, *scratch)) return false;
    const Event done(device_);
    done.record(queue);
    wait(thread, call, done);
    return true;
  } catch (const std::exception& e) {
    backend_.table.group_abort(native_);  // the other ranks learn of it, and the queue goes on
    new std::vector<Tensor>(std::move(*scratch));
    if (dynamic_cast<const DistError*>(&e)) throw;
    thread.give_up(fmt::format("{}: {}", call.title(), e.what()));
  }
}

std::uint32_t device_offer(const Call& call) {
  if (!call.on_device || call.group->no_device_group) return 0;
  const DeviceOperands& on = *call.on_device;
  const GroupState& group = *call.group;
  if (group.device_group && group.device_group->device() != on.device) return 0;
  const DeviceBackend& backend = backend_for(on.device, name(call.kind));
  std::uint32_t h = 2166136261U;  // FNV-1a of the kind
  for (const char c : backend.kind) h = (h ^ static_cast<unsigned char>(c)) * 16777619U;
  h = (h ^ (backend.info(on.device.index).collectives & HALFSTEP_COLLECTIVES_IN_ORDER)) * 16777619U;
  return h == 0 ? 1 : h;
}

bool run_on_device(CommunicationThread& thread, Call& call) {
  GroupState& group = *call.group;
  if (!group.device_group) group.device_group = make_group(thread, call);
  if (!group.device_group || !group.device_group->run(thread, call)) return false;
  const std::int64_t bytes = call.bytes(), others = group.size - 1;
  std::int64_t sent = bytes * others;
  if (call.kind == CallKind::all_reduce) sent = 2 * bytes * others / group.size;
  if (call.kind == CallKind::gather) sent = group.rank == call.root ? 0 : bytes;
  const bool from_root = call.kind == CallKind::broadcast || call.kind == CallKind::scatter;
  if (from_root && group.rank != call.root) sent = 0;
  StatsCounter::get().add({.bytes_sent = static_cast<std::uint64_t>(sent), .on_devices = 1});
  return true;
}

bool use_device(Call& call, const Tensor& input, const Tensor& output, bool output_counts) {
  static const bool wanted = [] {
    const char* value = std::getenv("HALFSTEP_DEVICE_COLLECTIVES");
    return !value || std::strcmp(value, "0") != 0;
  }();
  // What travels with the ranks' agreement needs no collective.
  if (!wanted || call.bytes() <= Descriptor::kPayloadBytes) return false;
  const Device device = (output.defined() ? output : input).device();
  if (device.is_cpu() || (input.defined() && input.device() != device)) return false;
  if (!backend_for(device, name(call.kind)).has_collectives()) return false;
  auto on = std::make_shared<DeviceOperands>(DeviceOperands{
      .device = device, .input = input, .output = output, .output_counts = output_counts, .ready = Event(device)});
  on->ready.record();
  for (const Tensor& t : {input, output}) {
    if (t.defined()) call.tensors.push_back(t);
  }
  if (output.defined()) call.written.push_back(output);
  call.on_device = std::move(on);
  return true;
}

void stage_to_host(Call& call) {
  DeviceOperands& on = *call.on_device;
  const Queue& queue = queue_for(on.device);
  const QueueGuard guard(queue);
  queue.wait(on.ready);
  on.staged = true;
  const auto host = [&](const Tensor& t, bool contents) -> void* {
    if (!t.defined()) return nullptr;
    const auto bytes = static_cast<std::size_t>(bytes_of(t));
    call.buffers.emplace_back(bytes);
    if (contents) read_memory(call.buffers.back().data(), t.const_raw_data(), on.device, bytes);
    return call.buffers.back().data();
  };
  call.input = host(on.input, true);
  call.output = host(on.output, on.output_counts);
}

void return_to_device(Call& call) {
  const DeviceOperands& on = *call.on_device;
  if (!on.staged || !on.output.defined()) return;
  const Queue& queue = queue_for(on.device);
  const QueueGuard guard(queue);
  copy_memory(write_raw_data(on.output), on.device, call.output, Device{},
              static_cast<std::size_t>(bytes_of(on.output)));
  queue.synchronize();  // the caller's queue knows nothing of this one
}

}  // namespace halfstep::dist::detail
