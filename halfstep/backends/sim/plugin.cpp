// SPDX-License-Identifier: Apache-2.0
// The table that Halfstep finds the device by.
#include "halfstep/runtime/plugin.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "collectives.h"
#include "graphs.h"
#include "kernel.h"
#include "queue.h"
#include "sim.h"

namespace sim {
namespace {

Event* event_of(halfstep_event* event) { return reinterpret_cast<Event*>(event); }

// --- identity

int32_t device_count() { return static_cast<int32_t>(machine().devices.size()); }

halfstep_status device_info(int32_t index, halfstep_device_info* info) {
  return guarded([&]() -> halfstep_status {
    const Device* device = machine().device(index);
    if (device == nullptr) return HALFSTEP_FAILED;
    halfstep_device_info all = {};
    all.dtypes = kAll;
    all.memory = device->memory.total_bytes();
    std::strncpy(all.name, "Simulated accelerator", sizeof all.name - 1);
    all.low_dtypes = dtypes({HALFSTEP_F16, HALFSTEP_BF16});
    all.priorities = kPriorities;
    if (collectives::promise() == collectives::Promise::in_order) all.collectives = HALFSTEP_COLLECTIVES_IN_ORDER;
    answer(info, all);
    return HALFSTEP_OK;
  });
}

halfstep_status synchronize(int32_t index) {
  return guarded([&]() -> halfstep_status {
    Device* device = machine().device(index);
    if (device == nullptr) return HALFSTEP_FAILED;
    for (const auto& queue : device->queues()) queue->drain();
    return device->outcome();
  });
}

// --- memory

halfstep_status allocate(int32_t index, uint64_t bytes, void** data) {
  return guarded([&]() -> halfstep_status {
    *data = nullptr;
    Device* device = machine().device(index);
    if (device == nullptr) return HALFSTEP_FAILED;
    if (device->lost()) return device->present();
    if (machine().faults.next_allocation()) {
      return fail(HALFSTEP_OUT_OF_MEMORY, 0, "no memory for %llu bytes, as ordered",
                  static_cast<unsigned long long>(bytes));
    }
    if (!device->memory.allocate(bytes, data)) {
      return fail(HALFSTEP_OUT_OF_MEMORY, 0, "no hole of %llu bytes; %llu of %llu bytes are free",
                  static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(device->memory.free_bytes()),
                  static_cast<unsigned long long>(device->memory.total_bytes()));
    }
    machine().allocations.fetch_add(1, std::memory_order_relaxed);
    return HALFSTEP_OK;
  });
}

halfstep_status deallocate(int32_t index, void* data, uint64_t bytes) {
  return guarded([&]() -> halfstep_status {
    Device* device = machine().device(index);
    if (device == nullptr) return HALFSTEP_FAILED;
    const uint64_t size = device->memory.size_of(data);
    if (size == 0) return fail(HALFSTEP_FAILED, 0, "no allocation begins at %p", data);
    if (bytes > size || size - bytes >= 256) {
      return fail(HALFSTEP_FAILED, 0, "%llu bytes were given for an allocation of %llu",
                  static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(size));
    }
    const char* begin = device->memory.translate(data, size);
    for (const auto& queue : device->queues()) {
      if (!device->lost() && queue->uses({begin, begin + size})) {
        return fail(HALFSTEP_FAILED, 0, "queued work still uses the memory at %p", data);
      }
    }
    device->memory.deallocate(data);
    return device->present();
  });
}

halfstep_status memory_info(int32_t index, uint64_t* free_bytes, uint64_t* total_bytes) {
  const Device* device = machine().device(index);
  if (device == nullptr) return HALFSTEP_FAILED;
  *free_bytes = device->memory.free_bytes();
  *total_bytes = device->memory.total_bytes();
  return device->present();
}

halfstep_status host_allocate(uint64_t bytes, void** data) {
  return guarded([&]() -> halfstep_status {
    *data = machine().pinned.allocate(bytes);
    if (*data != nullptr) return HALFSTEP_OK;
    return fail(HALFSTEP_OUT_OF_MEMORY, 0, "no host memory for %llu bytes", static_cast<unsigned long long>(bytes));
  });
}

halfstep_status host_deallocate(void* data, uint64_t) {
  return guarded([&]() -> halfstep_status {
    if (machine().pinned.deallocate(data)) return HALFSTEP_OK;
    return fail(HALFSTEP_FAILED, 0, "no pinned memory begins at %p", data);
  });
}

// --- copies

class CopyWork final : public Work {
 public:
  CopyWork(char* to, const char* from, uint64_t bytes) : Work(Kind::copy, 0), to_(to), from_(from), bytes_(bytes) {}
  std::string run() const override {
    std::memmove(to_, from_, bytes_);
    machine().copies.fetch_add(1, std::memory_order_relaxed);
    machine().copied_bytes.fetch_add(bytes_, std::memory_order_relaxed);
    return {};
  }
  const char* op() const override { return "copy"; }

 private:
  char* to_;
  const char* from_;
  uint64_t bytes_;
};

/// Host memory as a queue's thread may touch it: not another device's address by mistake.
bool is_host(const void* address) {
  return address != nullptr && std::none_of(machine().devices.begin(), machine().devices.end(),
                                            [&](const auto& d) { return d->memory.contains(address); });
}

halfstep_status copy(halfstep_queue* handle, void* destination, const void* source, uint64_t bytes, int32_t kind) {
  return guarded([&]() -> halfstep_status {
    Queue& queue = *queue_of(handle);
    Device& device = queue.device();
    if (device.lost()) return device.present();
    if (bytes == 0) return HALFSTEP_OK;
    if (kind < HALFSTEP_COPY_TO_DEVICE || kind > HALFSTEP_COPY_ON_DEVICE) {
      return fail(HALFSTEP_FAILED, 0, "unknown kind %d", kind);
    }
    const bool to_device = kind != HALFSTEP_COPY_TO_HOST, from_device = kind != HALFSTEP_COPY_TO_DEVICE;
    char* to = to_device ? device.memory.translate(destination, bytes) : static_cast<char*>(destination);
    const char* from = from_device ? device.memory.translate(source, bytes) : static_cast<const char*>(source);
    if ((to_device && to == nullptr) || (from_device && from == nullptr)) {
      return fail(HALFSTEP_FAILED, 0, "%llu bytes at %p are not in the memory of this device",
                  static_cast<unsigned long long>(bytes), to_device && to == nullptr ? destination : source);
    }
    const void* host = to_device ? source : destination;
    if (kind != HALFSTEP_COPY_ON_DEVICE && !is_host(host)) {
      return fail(HALFSTEP_FAILED, 0, "%p is not host memory", host);
    }
    const bool waits = kind != HALFSTEP_COPY_ON_DEVICE && !machine().pinned.contains(host, bytes);
    if (waits) {
      if (const auto status = refuse_while_recording(queue, "copy of memory that is not pinned")) return status;
    }
    auto work = std::make_shared<CopyWork>(to, from, bytes);
    if (to_device) work->touches.push_back({to, to + bytes});
    if (from_device) work->touches.push_back({from, from + bytes});
    const uint64_t number = queue.push(std::move(work));
    if (!to_device) machine().host_reads.fetch_add(1, std::memory_order_relaxed);
    if (!waits) return HALFSTEP_OK;
    machine().waiting_copies.fetch_add(1, std::memory_order_relaxed);
    queue.wait(number);
    return device.outcome();
  });
}

halfstep_status copy_peer(halfstep_queue* handle, int32_t to_index, void* destination, const void* source,
                          uint64_t bytes) {
  return guarded([&]() -> halfstep_status {
    Queue& queue = *queue_of(handle);
    Device& device = queue.device();
    const Device* other = machine().device(to_index);
    if (other == nullptr) return HALFSTEP_FAILED;
    if (device.lost()) return device.present();
    if (other->lost()) return other->present();
    if (bytes == 0) return HALFSTEP_OK;
    char* to = other->memory.translate(destination, bytes);
    const char* from = device.memory.translate(source, bytes);
    if (to == nullptr || from == nullptr) {
      return fail(HALFSTEP_FAILED, 0, "%llu bytes at %p are not in the memory of device %d",
                  static_cast<unsigned long long>(bytes), to == nullptr ? destination : source,
                  to == nullptr ? to_index : device.index);
    }
    auto work = std::make_shared<CopyWork>(to, from, bytes);
    work->touches = {{to, to + bytes}, {from, from + bytes}};
    queue.push(std::move(work));
    return HALFSTEP_OK;
  });
}

// --- queues

halfstep_status queue_create(int32_t index, int32_t priority, halfstep_queue** queue) {
  return guarded([&]() -> halfstep_status {
    *queue = nullptr;
    Device* device = machine().device(index);
    if (device == nullptr) return HALFSTEP_FAILED;
    if (device->lost()) return device->present();
    if (priority < 0 || priority >= kPriorities) {
      return fail(HALFSTEP_FAILED, 0, "expected a priority from 0 to %d, got %d", kPriorities - 1, priority);
    }
    *queue = reinterpret_cast<halfstep_queue*>(device->create_queue(priority));
    return HALFSTEP_OK;
  });
}

halfstep_status queue_destroy(halfstep_queue* handle) {
  return guarded([&]() -> halfstep_status {
    for (const auto& device : machine().devices) {
      if (device->destroy_queue(queue_of(handle))) return device->outcome();
    }
    return fail(HALFSTEP_FAILED, 0, "no such queue");
  });
}

halfstep_status queue_synchronize(halfstep_queue* handle) {
  return guarded([&]() -> halfstep_status {
    Queue& queue = *queue_of(handle);
    if (const auto status = refuse_while_recording(queue, "queue_synchronize")) return status;
    queue.drain();
    return queue.device().outcome();
  });
}

halfstep_status queue_query(halfstep_queue* handle) {
  return guarded([&]() -> halfstep_status {
    const Queue& queue = *queue_of(handle);
    if (queue.device().lost()) return queue.device().present();
    return queue.idle() ? HALFSTEP_OK : HALFSTEP_NOT_READY;
  });
}

halfstep_status queue_wait(halfstep_queue* handle, halfstep_event* event) {
  return guarded([&]() -> halfstep_status {
    Queue& queue = *queue_of(handle);
    if (queue.device().lost()) return queue.device().present();
    if (const auto status = refuse_while_recording(queue, "queue_wait")) return status;
    if (auto ticket = event_of(event)->ticket()) queue.wait_for(std::move(ticket));
    return HALFSTEP_OK;
  });
}

// --- events

halfstep_status event_create(int32_t index, uint32_t flags, halfstep_event** event) {
  return guarded([&]() -> halfstep_status {
    *event = nullptr;
    const Device* device = machine().device(index);
    if (device == nullptr) return HALFSTEP_FAILED;
    if (device->lost()) return device->present();
    *event = reinterpret_cast<halfstep_event*>(new Event(index, (flags & HALFSTEP_EVENT_TIMING) != 0));
    return HALFSTEP_OK;
  });
}

halfstep_status event_destroy(halfstep_event* event) {
  const Device* device = machine().device(event_of(event)->device);
  delete event_of(event);
  return device->present();
}

halfstep_status event_record(halfstep_event* event, halfstep_queue* handle) {
  return guarded([&]() -> halfstep_status {
    Queue& queue = *queue_of(handle);
    if (queue.device().lost()) return queue.device().present();
    if (const auto status = refuse_while_recording(queue, "event_record")) return status;
    auto ticket = std::make_shared<Ticket>();
    event_of(event)->set_ticket(ticket);
    queue.mark(std::move(ticket));
    return HALFSTEP_OK;
  });
}

halfstep_status event_query(halfstep_event* handle) {
  return guarded([&]() -> halfstep_status {
    const Event& event = *event_of(handle);
    const Device& device = *machine().device(event.device);
    if (device.lost()) return device.present();
    const auto ticket = event.ticket();
    return !ticket || ticket->passed() ? HALFSTEP_OK : HALFSTEP_NOT_READY;
  });
}

halfstep_status event_synchronize(halfstep_event* handle) {
  return guarded([&]() -> halfstep_status {
    const Event& event = *event_of(handle);
    if (const auto ticket = event.ticket()) ticket->wait();
    return machine().device(event.device)->outcome();
  });
}

halfstep_status event_elapsed(halfstep_event* start, halfstep_event* end, double* milliseconds) {
  return guarded([&]() -> halfstep_status {
    uint64_t times[2] = {};
    const Event* events[2] = {event_of(start), event_of(end)};
    for (int i = 0; i < 2; ++i) {
      if (!events[i]->timing) return fail(HALFSTEP_FAILED, 0, "an event was made without timing");
      const auto ticket = events[i]->ticket();
      if (!ticket) return fail(HALFSTEP_FAILED, 0, "an event was never recorded");
      if (!ticket->passed(&times[i])) {
        return fail(HALFSTEP_NOT_READY, 0, "an event has not been passed yet");
      }
    }
    // Either may be the earlier one.
    *milliseconds = (static_cast<double>(times[1]) - static_cast<double>(times[0])) * 1e-6;
    return machine().device(events[0]->device)->present();
  });
}

// --- profile

halfstep_status set_profiling(int32_t index, bool on) {
  Device* device = machine().device(index);
  if (device == nullptr) return HALFSTEP_FAILED;
  device->profile(on);
  return device->present();
}
halfstep_status profile_start(int32_t index) { return set_profiling(index, true); }
halfstep_status profile_stop(int32_t index) { return set_profiling(index, false); }
halfstep_status profile_read(int32_t index, halfstep_record* records, uint64_t capacity, uint64_t* count) {
  return guarded([&]() -> halfstep_status {
    *count = 0;
    Device* device = machine().device(index);
    if (device == nullptr) return HALFSTEP_FAILED;
    *count = device->take_records(records, capacity);
    return HALFSTEP_OK;
  });
}

// --- extensions

int32_t order_fault(const char* orders) {
  return guarded([&]() -> halfstep_status {
           bool restore = false;
           const std::string wrong = machine().faults.order(orders, &restore);
           if (!wrong.empty()) return fail(HALFSTEP_FAILED, 0, "faults: %s", wrong.c_str());
           if (restore) {
             for (const auto& device : machine().devices) device->restore();
           }
           return HALFSTEP_OK;
         }) == HALFSTEP_OK
             ? 0
             : 1;
}

void stats(halfstep_sim_stats* to) {
  const Machine& m = machine();
  const halfstep_sim_stats all = {to->size,
                                  static_cast<uint32_t>(m.devices.size()),
                                  m.kernels.load(),
                                  m.failed_kernels.load(),
                                  m.copies.load(),
                                  m.copied_bytes.load(),
                                  m.waiting_copies.load(),
                                  m.allocations.load(),
                                  m.graph_launches.load(),
                                  m.host_reads.load()};
  answer(to, all);
}

uint64_t busy_time(int32_t index) {
  const Device* device = machine().device(index);
  return device == nullptr ? 0 : device->busy_ns.load(std::memory_order_relaxed);
}

void* extension(const char* name) {
  const std::string_view which = name;
  if (which == "busy_time") return reinterpret_cast<void*>(busy_time);
  if (which == "sim_order_fault") return reinterpret_cast<void*>(static_cast<halfstep_sim_order_fault_fn>(order_fault));
  if (which == "sim_stats") return reinterpret_cast<void*>(static_cast<halfstep_sim_stats_fn>(stats));
  return nullptr;
}

// --- the table: each plug-in writes down its own, entry by entry, so that one that is missing is seen here

// The same list as in any plug-in's table, of functions of its own: plug-ins are built alone and share no code.
constexpr halfstep_plugin_table kTable = {
    .size = sizeof(halfstep_plugin_table),
    .major = HALFSTEP_PLUGIN_MAJOR,
    .minor = HALFSTEP_PLUGIN_MINOR,
    .name = "sim",
    .vendor = "Halfstep",
    .version = "1.0",
    .device_count = device_count,
    .device_info = device_info,
    .error = take_error,
    .synchronize = synchronize,
    .allocate = allocate,
    .deallocate = deallocate,
    .memory_info = memory_info,
    .host_allocate = host_allocate,
    .host_deallocate = host_deallocate,
    .copy = copy,
    .copy_peer = copy_peer,
    .queue_create = queue_create,
    .queue_destroy = queue_destroy,
    .queue_synchronize = queue_synchronize,
    .queue_query = queue_query,
    .queue_wait = queue_wait,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_query = event_query,
    .event_synchronize = event_synchronize,
    .event_elapsed = event_elapsed,
    .kernel = find_kernel,
    .extension = extension,
    .shutdown = end_machine,
    .profile_start = profile_start,
    .profile_stop = profile_stop,
    .profile_read = profile_read,
    .graph_begin = nullptr,  // graphs::fill()
    .graph_end = nullptr,
    .graph_launch = nullptr,
    .graph_destroy = nullptr,
    // By collectives::fill().
    .group_id = nullptr,
    .group_create = nullptr,
    .group_destroy = nullptr,
    .group_abort = nullptr,
    .all_reduce = nullptr,
    .broadcast = nullptr,
    .all_gather = nullptr,
    .reduce_scatter = nullptr,
    .all_to_all = nullptr,
    .send_receive = nullptr,
    .group_error = nullptr,
};

/// "512M" and the like; none where it is no such thing.
std::optional<uint64_t> parse_bytes(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || value == 0) return std::nullopt;
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (shift < 0 || value > (uint64_t{1} << 44) >> shift) return std::nullopt;
  return value << shift;
}

const char* setting(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : otherwise;
}

/// The table, without the entries that the environment takes away.
const halfstep_plugin_table* table() {
  static const halfstep_plugin_table chosen = [] {
    halfstep_plugin_table all = kTable;
    collectives::fill(all);
    if (std::string_view(setting("HALFSTEP_SIM_GRAPHS", "1")) != "0") graphs::fill(all);
    if (collectives::promise() == collectives::Promise::none) all.group_id = nullptr;  // and with it the whole group
    return all;
  }();
  return &chosen;
}

/// Makes the devices from the environment, or returns what is wrong with it.
std::string make_machine(const halfstep_host* host) {
  if (host == nullptr || host->size < offsetof(halfstep_host, cpu_kernel) + sizeof host->cpu_kernel ||
      host->cpu_kernel == nullptr) {
    return "it computes with the CPU's kernels, which a host lends from version 1.1 of the plug-in interface on";
  }
  const std::string memory = setting("HALFSTEP_SIM_MEMORY", "1G"), count = setting("HALFSTEP_SIM_DEVICES", "2");
  const auto bytes = parse_bytes(memory);
  if (!bytes) return "HALFSTEP_SIM_MEMORY: expected bytes such as 512M or 2G, at most 16384G, got '" + memory + "'";
  int devices = 0;
  const auto [end, error] = std::from_chars(count.data(), count.data() + count.size(), devices);
  if (error != std::errc{} || end != count.data() + count.size() || devices < 0 || devices > 64) {
    return "HALFSTEP_SIM_DEVICES: expected a number from 0 to 64, got '" + count + "'";
  }
  const std::string_view promise = setting("HALFSTEP_SIM_COLLECTIVES", "1");
  if (promise != "0" && promise != "1" && promise != "ring") {
    return "HALFSTEP_SIM_COLLECTIVES: expected 0, 1 or ring, got '" + std::string(promise) + "'";
  }
  using collectives::Promise;
  collectives::set_promise(promise == "0" ? Promise::none : promise == "ring" ? Promise::ring : Promise::in_order);
  auto made = std::make_unique<Machine>();
  made->host = host;
  bool restore = false;
  if (const std::string wrong = made->faults.order(setting("HALFSTEP_SIM_FAULTS", ""), &restore); !wrong.empty()) {
    return "HALFSTEP_SIM_FAULTS: " + wrong;
  }
  for (int i = 0; i < devices; ++i) made->devices.push_back(std::make_unique<Device>(i, *bytes));
  set_machine(std::move(made));
  return {};
}

}  // namespace
}  // namespace sim

extern "C" [[gnu::visibility("default")]] const halfstep_plugin_table* halfstep_plugin(const halfstep_host* host) {
  // Whoever opens the library a second time gets the same devices.
  if (sim::is_running()) return sim::table();
  std::string wrong;
  try {
    wrong = sim::make_machine(host);
  } catch (const std::exception& e) {
    wrong = e.what();
  }
  if (wrong.empty()) return sim::table();
  // A setting that can't be meant is better refused than passed over: a test that orders faults counts on them.
  if (host != nullptr) host->log(HALFSTEP_LOG_ERROR, ("sim: " + wrong).c_str());
  return nullptr;
}
