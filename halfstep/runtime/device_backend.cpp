// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/device_backend.h"

#include <algorithm>
#include <cstring>

#include "halfstep/core/fail.h"
#include "halfstep/runtime/device_allocator.h"

namespace halfstep {
namespace {

// Stands in the kernel tables for "asked, has none".
Status no_kernel(KernelContext*, const TensorView*, int, TensorView*, int, const void*) { return Status::unsupported; }

std::atomic<DeviceBackend*> g_backends[kMaxDeviceTypes];
std::mutex g_order_mutex;
std::vector<DeviceBackend*>& order() {
  static auto& list = *new std::vector<DeviceBackend*>;
  return list;
}

halfstep_device_info ask_info(const halfstep_plugin_table& table, int index) {
  halfstep_device_info info{};
  info.size = sizeof(info);
  info.priorities = 1;
  if (table.device_info(index, &info) != HALFSTEP_OK) {
    halfstep_error error{};
    error.size = sizeof(error);
    table.error(&error);
    error.text[sizeof(error.text) - 1] = '\0';
    fail<DeviceError>("device {}:{}: the plug-in can't describe it: {}", table.name, index, error.text);
  }
  info.name[sizeof(info.name) - 1] = '\0';
  info.priorities = std::max(info.priorities, 1);
  return info;
}

}  // namespace

DeviceBackend* backend_of(std::uint8_t device_type) {
  return device_type < kMaxDeviceTypes ? g_backends[device_type].load(std::memory_order_acquire) : nullptr;
}

DeviceBackend& backend_for(Device device, const char* what) {
  DeviceBackend* backend = backend_of(device.type);
  if (!backend) [[unlikely]]
    fail<DeviceError>("{}: device {} has no plug-in here", what, device.str());
  if (device.index >= backend->count) [[unlikely]]
    fail<DeviceError>("{}: there is no device {}; {} has {}", what, device.str(), backend->kind, backend->count);
  return *backend;
}

std::vector<DeviceBackend*> backends() {
  std::lock_guard lock(g_order_mutex);
  return order();
}

DeviceBackend::DeviceBackend(const halfstep_plugin_table& entries, std::string from)
    : table(entries),
      path(std::move(from)),
      kind(entries.name),
      type(register_device_type(entries.name)),
      count(std::min(std::max(entries.device_count(), 0), kMaxDevices)) {
  for (int i = 0; i < count; ++i) {
    infos_.push_back(ask_info(table, i));
    calls_.push_back(std::make_unique<Calls>());
    deferred_.emplace_back();
    lost_.emplace_back();
  }
  g_backends[type].store(this, std::memory_order_release);
  for (int i = 0; i < count; ++i) {
    allocators_.push_back(std::make_unique<DeviceAllocator>(*this, i));
    set_allocator(device(i), allocators_.back().get());
  }
  std::lock_guard lock(g_order_mutex);
  order().push_back(this);
}

DeviceBackend::~DeviceBackend() = default;

bool DeviceBackend::has_collectives() const {
  return table.group_id && table.group_create && table.group_destroy && table.group_abort && table.all_reduce &&
         table.broadcast && table.all_gather && table.reduce_scatter && table.all_to_all && table.send_receive &&
         table.group_error;
}

halfstep_queue* DeviceBackend::default_queue(int index) {
  auto& slot = default_queues_[static_cast<std::size_t>(index)];
  if (halfstep_queue* queue = slot.load(std::memory_order_acquire)) return queue;
  check_alive("queue", index);  // before the lock, which it takes itself
  return default_queue_unchecked(index);
}

halfstep_queue* DeviceBackend::default_queue_unchecked(int index) {
  auto& slot = default_queues_[static_cast<std::size_t>(index)];
  std::lock_guard lock(mutex_);
  if (halfstep_queue* queue = slot.load(std::memory_order_acquire)) return queue;
  halfstep_queue* queue = nullptr;
  check(table.queue_create(index, 0, &queue), "queue", index);
  slot.store(queue, std::memory_order_release);
  return queue;
}

void DeviceBackend::raise_lost(const char* what, int index, const std::string& why) const {
  fail<DeviceLostError>("{}: device {} is lost: {}; resume from the last checkpoint", what, device(index).str(), why);
}

void DeviceBackend::raise(halfstep_status status, const char* what, int index) {
  halfstep_error error{};
  error.size = sizeof(error);
  table.error(&error);
  raise_error(error, status, what, index);
}

void DeviceBackend::defer(halfstep_status status, int index) noexcept {
  if (status == HALFSTEP_OK || status == HALFSTEP_NOT_READY) return;
  halfstep_error error{};
  error.size = sizeof(error);
  table.error(&error);
  error.status = status;
  std::lock_guard lock(mutex_);
  auto& fault = faults_[static_cast<std::size_t>(index)];
  if (fault.load() & kDeferred) return;  // the first one is the cause
  deferred_[static_cast<std::size_t>(index)] = error;
  fault.fetch_or(kDeferred);
}

void DeviceBackend::raise_fault(const char* what, int index) {
  halfstep_error error;
  {
    std::lock_guard lock(mutex_);
    auto& fault = faults_[static_cast<std::size_t>(index)];
    const std::uint8_t state = fault.load();
    if (state & kEnded)
      fail<DeviceError>("{}: device {} is not used any more: the program ends", what, device(index).str());
    if (!(state & kDeferred)) {
      if (state & kLost) {
        std::lock_guard lost_lock(lost_mutex_);
        const std::string& why = lost_[static_cast<std::size_t>(index)];
        raise_lost(what, index, why.empty() ? "it was lost before" : "it was lost before (" + why + ")");
      }
      return;  // another thread has thrown it
    }
    error = deferred_[static_cast<std::size_t>(index)];
    fault.fetch_and(static_cast<std::uint8_t>(~kDeferred));
  }
  raise_error(error, error.status, what, index);
}

void DeviceBackend::raise_error(const halfstep_error& reported, halfstep_status status, const char* what, int index) {
  halfstep_error error = reported;
  error.text[sizeof(error.text) - 1] = '\0';
  std::string why = error.text;
  if (why.empty()) why = status == HALFSTEP_OUT_OF_MEMORY ? "out of memory" : fmt::format("status {}", status);
  if (status == HALFSTEP_LOST || error.status == HALFSTEP_LOST) {
    {
      // Whoever meets the lost device next may be the one who tells the user.
      std::lock_guard lock(lost_mutex_);
      std::string& known = lost_[static_cast<std::size_t>(index)];
      if (known.empty()) known = why;
    }
    faults_[static_cast<std::size_t>(index)].fetch_or(kLost);
    raise_lost(what, index, why);
  }
  // Where the failure belongs: to an earlier, asynchronous call, by its number or somewhere since the last wait.
  std::string place;
  if (error.call != 0) {
    const char* name = call_name(error.call, index);
    const std::string which = error.call & kGraphCall ? "in a captured step" : fmt::format("call {}", error.call);
    place = fmt::format("{} ({})", name ? name : "an op", which);
  }
  const std::string where = device(index).str();
  if (status == HALFSTEP_OUT_OF_MEMORY)
    fail<OutOfMemoryError>("{}: {} on {}", place.empty() ? what : place, why, where);
  if (!place.empty() && place.find(what) != 0) {
    fail<DeviceError>("{}: failed on {}: {}; found out in {}", place, where, why, what);
  }
  const std::string recent = place.empty() ? recent_calls(index) : "";
  fail<DeviceError>("{}: failed on {}: {}{}", place.empty() ? what : place, where, why,
                    recent.empty() ? "" : fmt::format("; enqueued since the last wait: {}", recent));
}

std::uint64_t DeviceBackend::begin_call(const char* name, int index) {
  Calls& calls = *calls_[static_cast<std::size_t>(index)];
  const std::uint64_t number = calls.next.fetch_add(1, std::memory_order_relaxed);
  calls.names[number % kRemembered].store(name, std::memory_order_relaxed);
  return number;
}

std::uint64_t DeviceBackend::graph_call(const char* name) {
  const std::lock_guard lock(graph_mutex_);
  auto known =
      std::find_if(graph_names_.begin(), graph_names_.end(), [&](const char* n) { return std::strcmp(n, name) == 0; });
  if (known == graph_names_.end()) known = graph_names_.insert(known, name);
  return kGraphCall | static_cast<std::uint64_t>(known - graph_names_.begin());
}

const char* DeviceBackend::call_name(std::uint64_t number, int index) const {
  if (number & kGraphCall) {
    const std::lock_guard lock(graph_mutex_);
    const std::uint64_t place = number & ~kGraphCall;
    return place < graph_names_.size() ? graph_names_[place] : nullptr;
  }
  const Calls& calls = *calls_[static_cast<std::size_t>(index)];
  const std::uint64_t next = calls.next.load(std::memory_order_relaxed);
  if (number == 0 || number >= next || next - number > kRemembered) return nullptr;
  return calls.names[number % kRemembered].load(std::memory_order_relaxed);
}

std::string DeviceBackend::recent_calls(int index) const {
  constexpr std::uint64_t kShown = 8;
  const Calls& calls = *calls_[static_cast<std::size_t>(index)];
  const std::uint64_t next = calls.next.load(std::memory_order_relaxed);
  std::uint64_t first = calls.passed.load(std::memory_order_relaxed) + 1;
  std::string text;
  if (next > first + kShown) {
    text = fmt::format("{} calls, at last ", next - first);
    first = next - kShown;
  }
  bool any = false;
  for (std::uint64_t n = first; n < next; ++n) {
    const char* name = call_name(n, index);
    text += fmt::format("{}{}", any ? ", " : "", name ? name : "?");
    any = true;
  }
  return text;
}

void DeviceBackend::passed(int index) {
  Calls& calls = *calls_[static_cast<std::size_t>(index)];
  calls.passed.store(calls.next.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
}

KernelFn DeviceBackend::kernel(const KernelTable& op, DType dtype) {
  auto& slot = op.kernels[type][static_cast<std::size_t>(dtype)];
  const KernelFn known = slot.load(std::memory_order_acquire);
  if (known) return known == no_kernel ? nullptr : known;
  halfstep_kernel answer{};
  answer.size = sizeof(answer);
  const halfstep_status status = table.kernel(op.name.c_str(), op.version, static_cast<std::int32_t>(dtype), &answer);
  if (status != HALFSTEP_OK || !answer.run) {
    slot.store(no_kernel, std::memory_order_release);
    return nullptr;
  }
  op.states[type][static_cast<std::size_t>(dtype)].store(answer.state, std::memory_order_relaxed);
  op.strided[type][static_cast<std::size_t>(dtype)].store((answer.layouts & HALFSTEP_LAYOUT_STRIDED) != 0,
                                                          std::memory_order_relaxed);
  // The structs are the same (runtime/kernel.cpp checks it).
  const auto run = reinterpret_cast<KernelFn>(reinterpret_cast<void (*)()>(answer.run));
  slot.store(run, std::memory_order_release);
  return run;
}

DeviceBackend::Answer DeviceBackend::ask(const std::string& op, int version, DType dtype) const {
  halfstep_kernel answer{};
  answer.size = sizeof(answer);
  const halfstep_status status = table.kernel(op.c_str(), version, static_cast<std::int32_t>(dtype), &answer);
  const bool native = status == HALFSTEP_OK && answer.run;
  return {.native = native,
          .strided = native && (answer.layouts & HALFSTEP_LAYOUT_STRIDED) != 0,
          .reason = native || !answer.reason ? "" : answer.reason};
}

void DeviceBackend::shutdown() {
  for (auto& fault : faults_) fault.fetch_or(kEnded);
  if (ended_.exchange(true, std::memory_order_acq_rel)) return;
  if (table.shutdown) table.shutdown();
}

}  // namespace halfstep
