// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/queue.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/runtime/device_allocator.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/device_wait_internal.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep {

struct Queue::Impl {
  Device device;
  int priority = 0;
  DeviceBackend* backend = nullptr;  // null on the host
  halfstep_queue* native = nullptr;
  bool owned = false;

  ~Impl() {
    if (!owned || backend->ended()) return;
    // Its work is done after this: what it used is anybody's.
    backend->defer(backend->table.queue_destroy(native), device.index);
    backend->allocator(device.index).queue_destroyed(native);
    pinned_queue_destroyed(native);
  }
};

struct Event::Impl {
  Device device;
  DeviceBackend* backend = nullptr;
  halfstep_event* native = nullptr;
  bool timing = false;
  std::mutex mutex;
  std::optional<std::chrono::steady_clock::time_point> time;  // on the CPU

  ~Impl() {
    if (native && !backend->ended()) backend->table.event_destroy(native);
  }
};

namespace {

struct Current {
  Device device;
  std::shared_ptr<Queue::Impl> queue;
};
thread_local std::vector<Current> t_current;  // only devices whose queue isn't the default one

std::shared_ptr<Queue::Impl> current_impl(Device device) {
  for (const Current& c : t_current) {
    if (c.device == device) return c.queue;
  }
  return nullptr;
}

// What the host does with queues is not repeated by a replay.
void refuse_capture(const char* what) {
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse(what);
}

std::atomic<bool> g_synchronous{[] {
  const char* value = std::getenv("HALFSTEP_SYNC");
  return value && *value && std::strcmp(value, "0") != 0;
}()};
std::atomic<bool> g_graphs{[] {
  const char* value = std::getenv("HALFSTEP_GRAPHS");
  return !value || std::strcmp(value, "0") != 0;
}()};

}  // namespace

Queue::Queue(Device device, const QueueOptions& options) : impl_(std::make_shared<Impl>()) {
  impl_->device = device;
  if (options.priority < 0) fail<DeviceError>("queue: expected a priority of at least 0, got {}", options.priority);
  if (device.is_host()) return;
  impl_->backend = &backend_for(device, "queue");
  impl_->backend->check_alive("queue", device.index);
  impl_->priority = std::min(options.priority, impl_->backend->info(device.index).priorities - 1);
  impl_->backend->check(impl_->backend->table.queue_create(device.index, impl_->priority, &impl_->native), "queue",
                        device.index);
  impl_->owned = true;
}

Queue Queue::default_queue(Device device) {
  auto impl = std::make_shared<Impl>();
  impl->device = device;
  if (!device.is_host()) {
    impl->backend = &backend_for(device, "queue");
    impl->native = impl->backend->default_queue(device.index);
  }
  // One object a device, so that handles compare equal.
  static std::mutex mutex;
  static auto& known = *new std::vector<std::shared_ptr<Impl>>;
  std::lock_guard lock(mutex);
  for (const auto& k : known) {
    if (k->device == device) return Queue(k);
  }
  known.push_back(impl);
  return Queue(impl);
}

Queue Queue::current(Device device) {
  auto impl = current_impl(device);
  return impl ? Queue(std::move(impl)) : default_queue(device);
}

Device Queue::device() const { return impl_->device; }
int Queue::priority() const { return impl_->priority; }
void* Queue::native() const { return impl_->native; }

void Queue::synchronize() const {
  if (!impl_->backend) return;
  refuse_capture("it waits for a queue");
  impl_->backend->check_alive("synchronize", impl_->device.index);
  const DeviceWait waiting;
  impl_->backend->check(impl_->backend->table.queue_synchronize(impl_->native), "synchronize", impl_->device.index);
}

bool Queue::query() const {
  if (!impl_->backend) return true;
  impl_->backend->check_alive("query", impl_->device.index);
  const halfstep_status status = impl_->backend->table.queue_query(impl_->native);
  if (status == HALFSTEP_NOT_READY) return false;
  impl_->backend->check(status, "query", impl_->device.index);
  return true;
}

void Queue::wait(const Event& event) const {
  if (!event.native()) return;
  refuse_capture("it makes a queue wait");
  if (event.device().type != impl_->device.type) {
    event.synchronize();  // one kind of device can't wait for another, and the CPU's work is done by the host itself
    return;
  }
  impl_->backend->check_alive("wait", impl_->device.index);
  impl_->backend->check(impl_->backend->table.queue_wait(impl_->native, static_cast<halfstep_event*>(event.native())),
                        "wait", impl_->device.index);
}

QueueGuard::QueueGuard(const Queue& queue) : device_(queue.device()), outer_(current_impl(device_)) {
  for (Current& c : t_current) {
    if (c.device == device_) {
      c.queue = queue.impl_;
      return;
    }
  }
  t_current.push_back({device_, queue.impl_});
}

QueueGuard::~QueueGuard() {
  for (std::size_t i = 0; i < t_current.size(); ++i) {
    if (t_current[i].device != device_) continue;
    if (outer_) {
      t_current[i].queue = std::move(outer_);
    } else {
      t_current.erase(t_current.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return;
  }
}

Event::Event(Device device, const EventOptions& options) : impl_(std::make_shared<Impl>()) {
  impl_->device = device;
  impl_->timing = options.timing;
  if (device.is_host()) return;
  impl_->backend = &backend_for(device, "event");
  impl_->backend->check_alive("event", device.index);
  impl_->backend->check(
      impl_->backend->table.event_create(device.index, options.timing ? HALFSTEP_EVENT_TIMING : 0, &impl_->native),
      "event", device.index);
}

Device Event::device() const { return impl_->device; }
void* Event::native() const { return impl_->native; }

void Event::record(const Queue& queue) const {
  if (queue.device() != impl_->device) {
    fail<DeviceError>("event.record: expected a queue of {}, got one of {}", impl_->device.str(), queue.device().str());
  }
  if (!impl_->backend) {
    std::lock_guard lock(impl_->mutex);
    impl_->time = std::chrono::steady_clock::now();
    return;
  }
  refuse_capture("it records an event");
  impl_->backend->check_alive("event.record", impl_->device.index);
  impl_->backend->check(impl_->backend->table.event_record(impl_->native, static_cast<halfstep_queue*>(queue.native())),
                        "event.record", impl_->device.index);
}

void Event::record() const { record(Queue::current(impl_->device)); }

bool Event::query() const {
  if (!impl_->backend) return true;
  impl_->backend->check_alive("event.query", impl_->device.index);
  const halfstep_status status = impl_->backend->table.event_query(impl_->native);
  if (status == HALFSTEP_NOT_READY) return false;
  impl_->backend->check(status, "event.query", impl_->device.index);
  return true;
}

void Event::synchronize() const {
  if (!impl_->backend) return;
  refuse_capture("it waits for an event");
  impl_->backend->check_alive("event.synchronize", impl_->device.index);
  const DeviceWait waiting;
  impl_->backend->check(impl_->backend->table.event_synchronize(impl_->native), "event.synchronize",
                        impl_->device.index);
}

double Event::elapsed_ms(const Event& end) const {
  if (end.impl_->device != impl_->device) {
    fail<DeviceError>("event.elapsed_ms: expected two events of one device, got {} and {}", impl_->device.str(),
                      end.impl_->device.str());
  }
  if (!impl_->timing || !end.impl_->timing) {
    fail<DeviceError>("event.elapsed_ms: expected events made with {{.timing = true}}");
  }
  if (!impl_->backend) {
    const auto time_of = [](Impl& event) {
      std::lock_guard lock(event.mutex);
      return event.time;
    };
    const auto start_time = time_of(*impl_), end_time = time_of(*end.impl_);
    if (!start_time || !end_time) fail<DeviceError>("event.elapsed_ms: an event was not recorded");
    return std::chrono::duration<double, std::milli>(*end_time - *start_time).count();
  }
  synchronize();
  end.synchronize();
  double milliseconds = 0;
  impl_->backend->check(impl_->backend->table.event_elapsed(impl_->native, end.impl_->native, &milliseconds),
                        "event.elapsed_ms", impl_->device.index);
  return milliseconds;
}

void synchronize(Device device) {
  if (device.is_host()) return;
  refuse_capture("it waits for a device");
  DeviceBackend& backend = backend_for(device, "synchronize");
  backend.check_alive("synchronize", device.index);
  const DeviceWait waiting;
  backend.check(backend.table.synchronize(device.index), "synchronize", device.index);
  backend.passed(device.index);
}

void* current_native_queue(Device device) {
  if (device.is_host()) return nullptr;
  for (const Current& c : t_current) {
    if (c.device == device) return c.queue->native;
  }
  return backend_for(device, "queue").default_queue(device.index);
}

bool synchronous() { return g_synchronous.load(std::memory_order_relaxed); }
void set_synchronous(bool on) { g_synchronous.store(on, std::memory_order_relaxed); }
bool device_graphs() { return g_graphs.load(std::memory_order_relaxed); }
void set_device_graphs(bool on) { g_graphs.store(on, std::memory_order_relaxed); }

}  // namespace halfstep
