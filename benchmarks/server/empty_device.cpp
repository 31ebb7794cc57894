// SPDX-License-Identifier: Apache-2.0
// A device whose kernels do nothing: what is left of a call is the way to the kernel.
#include "benchmarks/server/empty_device.h"

#include <cstdlib>

#include "halfstep/runtime/plugin_loader.h"

namespace halfstep::bench {
namespace {

halfstep_queue* some_queue() {
  static char queue;
  return reinterpret_cast<halfstep_queue*>(&queue);
}
halfstep_event* some_event() {
  static char event;
  return reinterpret_cast<halfstep_event*>(&event);
}

halfstep_plugin_table make_table() {
  halfstep_plugin_table t{};
  t.size = sizeof(t);
  t.major = HALFSTEP_PLUGIN_MAJOR;
  t.minor = HALFSTEP_PLUGIN_MINOR;
  t.name = "empty";
  t.device_count = [] { return 1; };
  t.device_info = [](std::int32_t, halfstep_device_info* info) {
    info->memory = std::uint64_t{1} << 30;
    return halfstep_status{HALFSTEP_OK};
  };
  t.error = [](halfstep_error* error) { error->status = HALFSTEP_OK; };
  t.synchronize = [](std::int32_t) { return halfstep_status{HALFSTEP_OK}; };
  t.allocate = [](std::int32_t, std::uint64_t bytes, void** data) {
    *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    return halfstep_status{*data ? HALFSTEP_OK : HALFSTEP_OUT_OF_MEMORY};
  };
  t.deallocate = [](std::int32_t, void* data, std::uint64_t) {
    std::free(data);
    return halfstep_status{HALFSTEP_OK};
  };
  t.memory_info = [](std::int32_t, std::uint64_t* free_bytes, std::uint64_t* total) {
    *free_bytes = *total = std::uint64_t{1} << 30;
    return halfstep_status{HALFSTEP_OK};
  };
  t.copy = [](halfstep_queue*, void*, const void*, std::uint64_t, std::int32_t) {
    return halfstep_status{HALFSTEP_OK};
  };
  t.queue_create = [](std::int32_t, std::int32_t, halfstep_queue** queue) {
    *queue = some_queue();
    return halfstep_status{HALFSTEP_OK};
  };
  t.queue_destroy = t.queue_synchronize = t.queue_query = [](halfstep_queue*) { return halfstep_status{HALFSTEP_OK}; };
  t.queue_wait = [](halfstep_queue*, halfstep_event*) { return halfstep_status{HALFSTEP_OK}; };
  t.event_create = [](std::int32_t, std::uint32_t, halfstep_event** event) {
    *event = some_event();
    return halfstep_status{HALFSTEP_OK};
  };
  t.event_destroy = t.event_query = t.event_synchronize = [](halfstep_event*) { return halfstep_status{HALFSTEP_OK}; };
  t.event_record = [](halfstep_event*, halfstep_queue*) { return halfstep_status{HALFSTEP_OK}; };
  t.event_elapsed = [](halfstep_event*, halfstep_event*, double* ms) {
    *ms = 0;
    return halfstep_status{HALFSTEP_OK};
  };
  t.kernel = [](const char*, std::int32_t, std::int32_t, halfstep_kernel* kernel) {
    kernel->layouts = HALFSTEP_LAYOUT_STRIDED;
    kernel->run = [](halfstep_context*, const halfstep_tensor*, int, halfstep_tensor*, int, const void*) {
      return halfstep_status{HALFSTEP_OK};
    };
    return halfstep_status{HALFSTEP_OK};
  };
  return t;
}

}  // namespace

Device empty_device() {
  static const bool registered = (register_plugin(make_table(), "the benchmarks"), true);
  (void)registered;
  return Device("empty");
}

}  // namespace halfstep::bench
