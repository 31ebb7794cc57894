// SPDX-License-Identifier: Apache-2.0
// Before each collective the ranks have agreed, by MPI, what it is; while it runs on the device, this thread waits for
// it, so that a rank that is gone, a timeout or the failure of another rank ends it.
//
// A library that promises sums in the order of ranks reduces by itself. Others (rings) combine in an order that depends
// on the element, and may round 16 bits at every hop: there each rank gets its part of all ranks' values by all_to_all,
// kernels add it up in float32, and all_gather gives the result to all. That moves as many bytes as a ring.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/dist/agreement_internal.h"
#include "halfstep/dist/communication_thread_internal.h"
#include "halfstep/dist/device_group_internal.h"
#include "halfstep/dist/device_messages_internal.h"
#include "halfstep/dist/native_group_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep::dist::detail {

/// The group of a ProcessGroup's ranks on one kind of device.
class DeviceGroup {
 public:
  DeviceGroup(DeviceBackend& backend, Device device, halfstep_group* native)
      : backend_(backend), device_(device), native_(native) {}

  Device device() const { return device_; }
  bool run(CommunicationThread& thread, Call& call);
  /// All ranks call it; nothing else follows.
  void destroy(CommunicationThread& thread, const Call& call) { destroy_native_group(thread, call, backend_, native_); }

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
  bool gather_parts(Call& call);
  bool reduce_parts(Call& call, std::vector<Tensor>& scratch);
  bool reduce_padded_parts(Call& call, std::vector<Tensor>& scratch);
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

bool parts_are_alike(const Call& call) {
  return std::all_of(call.counts.begin(), call.counts.end(), [&](std::int64_t n) { return n == call.counts[0]; });
}

std::vector<std::int64_t> starts_of_parts(const Call& call) {
  std::vector<std::int64_t> starts(call.counts.size());
  std::exclusive_scan(call.counts.begin(), call.counts.end(), starts.begin(), std::int64_t{0});
  return starts;
}

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

// Each rank's part to each other one, in place. Parts alike go as the library likes it, which may be a ring.
bool DeviceGroup::gather_parts(Call& call) {
  const GroupState& group = *call.group;
  const auto item = static_cast<std::int64_t>(item_size(call.dtype));
  char* const all = static_cast<char*>(address(call.on_device->output));
  const auto& t = backend_.table;
  if (parts_are_alike(call)) {
    const std::int64_t bytes = call.counts[0] * item;
    return enqueued(t.all_gather(native_, queue_, all + group.rank * bytes, all, bytes, HALFSTEP_U8), call);
  }
  const std::vector<std::int64_t> starts = starts_of_parts(call);
  const auto me = static_cast<std::size_t>(group.rank);
  std::vector<halfstep_transfer> transfers;
  for (std::size_t r = 0; r < starts.size(); ++r) {
    if (r == me) continue;
    for (const bool receive : {false, true}) {
      const std::size_t part = receive ? r : me;
      const std::int64_t bytes = call.counts[part] * item;
      if (bytes == 0) continue;
      transfers.push_back({all + starts[part] * item, bytes, HALFSTEP_U8, static_cast<std::int32_t>(r), receive, 0});
    }
  }
  return enqueued(t.send_receive(native_, queue_, transfers.data(), static_cast<std::int32_t>(transfers.size())), call);
}

// Part r of everybody's values to rank r, which adds them up in the order of ranks. The part's own place gets the
// result.
bool DeviceGroup::reduce_parts(Call& call, std::vector<Tensor>& scratch) {
  const bool ordered = (backend_.info(device_.index).collectives & HALFSTEP_COLLECTIVES_IN_ORDER) != 0;
  const bool adds = call.op != ReduceOp::min && call.op != ReduceOp::max;
  if (is_integral(call.dtype) || (ordered && !adds)) return reduce_padded_parts(call, scratch);
  if (!adds) return false;  // as in reduce()
  const GroupState& group = *call.group;
  const auto item = static_cast<std::int64_t>(item_size(call.dtype));
  const Tensor data = flat(call.on_device->output);
  const std::vector<std::int64_t> starts = starts_of_parts(call);
  const auto me = static_cast<std::size_t>(group.rank);
  const std::int64_t own = call.counts[me];
  const Tensor parts = empty({group.size * own}, {.dtype = call.dtype, .device = device_});
  scratch.push_back(parts);
  std::vector<halfstep_transfer> transfers;
  for (std::size_t r = 0; r < starts.size(); ++r) {
    const auto peer = static_cast<std::int32_t>(r);
    if (r == me) continue;
    if (const std::int64_t n = call.counts[r]; n > 0) {
      transfers.push_back({static_cast<char*>(address(data)) + starts[r] * item, n * item, HALFSTEP_U8, peer, 0, 0});
    }
    if (own > 0) {
      transfers.push_back(
          {static_cast<char*>(address(parts)) + peer * own * item, own * item, HALFSTEP_U8, peer, 1, 0});
    }
  }
  const auto count = static_cast<std::int32_t>(transfers.size());
  if (!enqueued(backend_.table.send_receive(native_, queue_, transfers.data(), count), call)) return false;
  if (own == 0) return true;
  Tensor mine = data.narrow(0, starts[me], own);
  parts.narrow(0, group.rank * own, own).copy_(mine);
  const Tensor sum = combine_parts(parts, group.size, call.op, call.dtype);
  scratch.push_back(sum);
  mine.copy_(sum);
  return true;
}

// By the library, which reduces equal parts only: all get the length of the longest. What fills them is dropped.
bool DeviceGroup::reduce_padded_parts(Call& call, std::vector<Tensor>& scratch) {
  const GroupState& group = *call.group;
  const std::int64_t longest = *std::max_element(call.counts.begin(), call.counts.end());
  const TensorOptions options{.dtype = call.dtype, .device = device_};
  const Tensor data = flat(call.on_device->output), result = empty({longest}, options);
  const std::vector<std::int64_t> starts = starts_of_parts(call);
  Tensor parts = data;
  if (!parts_are_alike(call)) {
    parts = zeros({group.size * longest}, options);
    for (std::size_t r = 0; r < starts.size(); ++r) {
      const std::int64_t n = call.counts[r];
      if (n > 0) parts.narrow(0, static_cast<std::int64_t>(r) * longest, n).copy_(data.narrow(0, starts[r], n));
    }
  }
  scratch.insert(scratch.end(), {parts, result});
  const bool done =
      enqueued(backend_.table.reduce_scatter(native_, queue_, address(parts), address(result), longest,
                                             static_cast<std::int32_t>(call.dtype), reduction_of(call.op)),
               call);
  if (!done) return false;
  const auto me = static_cast<std::size_t>(group.rank);
  if (const std::int64_t n = call.counts[me]; n > 0) data.narrow(0, starts[me], n).copy_(result.narrow(0, 0, n));
  return true;
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
    case CallKind::all_gather_parts:
      return gather_parts(call);
    case CallKind::reduce_scatter_parts:
      return reduce_parts(call, scratch);
    case CallKind::send:
    case CallKind::receive: {
      const bool sends = call.kind == CallKind::send;
      const halfstep_transfer message{address(sends ? on.input : on.output), bytes, HALFSTEP_U8, call.peer, !sends, 0};
      return enqueued(t.send_receive(native_, queue_, &message, 1), call);
    }
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

void run_message_on_device(CommunicationThread& thread, Call& call) {
  if (!call.group->device_group->run(thread, call)) {
    thread.give_up(fmt::format("{}: the device has no messages", call.title()));
  }
  StatsCounter::get().add({.on_devices = 1});
}

void destroy_device_group(CommunicationThread& thread, const Call& call, std::shared_ptr<DeviceGroup> group) {
  group->destroy(thread, call);
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

namespace {

// By this rank to others, in a call that was done on devices.
std::int64_t bytes_sent(const Call& call) {
  const GroupState& group = *call.group;
  const std::int64_t bytes = call.bytes(), others = group.size - 1;
  const bool is_root = group.rank == call.root;
  const auto own = [&] {
    return call.counts[static_cast<std::size_t>(group.rank)] * static_cast<std::int64_t>(item_size(call.dtype));
  };
  switch (call.kind) {
    case CallKind::all_reduce:
      return 2 * bytes * others / group.size;
    case CallKind::gather:
      return is_root ? 0 : bytes;
    case CallKind::broadcast:
    case CallKind::scatter:
      return is_root ? bytes * others : 0;
    case CallKind::all_gather_parts:
      return own() * others;
    case CallKind::reduce_scatter_parts:
      return bytes - own();
    default:
      return bytes * others;
  }
}

}  // namespace

bool run_on_device(CommunicationThread& thread, Call& call) {
  GroupState& group = *call.group;
  const DeviceMessages::Taken taken(thread, call);
  ++group.device_collectives;
  if (!group.device_group) {
    const Device device = call.on_device->device;
    if (halfstep_group* native = make_native_group(thread, call)) {
      group.device_group = std::make_shared<DeviceGroup>(backend_for(device, name(call.kind)), device, native);
    }
  }
  if (!group.device_group || !group.device_group->run(thread, call)) return false;
  const std::int64_t sent = bytes_sent(call);
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
