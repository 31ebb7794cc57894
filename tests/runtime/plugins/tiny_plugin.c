/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The least of a plug-in, in C11, compiled into several libraries of which most are wrong in one way (CMakeLists.txt
 * beside this file). Memory is the host's, work is done at once, and there is one kernel.
 *
 *   TINY_NAME       the kind of device
 *   TINY_MAJOR, TINY_MINOR, TINY_SIZE   what the table says of itself
 *   TINY_DEVICES    how many devices there are
 *   TINY_WITHOUT    an entry to leave out
 *   TINY_NO_SYMBOL  the function has another name
 *   TINY_NULL       1: it returns no table
 *   TINY_UNABLE     its device can't be described
 */
#define _DEFAULT_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "halfstep/runtime/plugin.h"

#ifndef TINY_NAME
#define TINY_NAME tiny
#endif
#ifndef TINY_MAJOR
#define TINY_MAJOR HALFSTEP_PLUGIN_MAJOR
#endif
#ifndef TINY_MINOR
#define TINY_MINOR HALFSTEP_PLUGIN_MINOR
#endif
#ifndef TINY_SIZE
#define TINY_SIZE sizeof(halfstep_plugin_table)
#endif
#ifndef TINY_DEVICES
#define TINY_DEVICES 1
#endif
#ifndef TINY_NULL
#define TINY_NULL 0
#endif
#ifdef TINY_NO_SYMBOL
#define TINY_SYMBOL halfstep_plug_out
#else
#define TINY_SYMBOL halfstep_plugin
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

static halfstep_error last_error;

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static int32_t device_count(void) { return TINY_DEVICES; }

static halfstep_status device_info(int32_t device, halfstep_device_info* info) {
  halfstep_device_info all;
  (void)device;
  memset(&all, 0, sizeof all);
#ifdef TINY_UNABLE
  last_error.status = HALFSTEP_FAILED;
  strcpy(last_error.text, "its cable is unplugged");
  return HALFSTEP_FAILED;
#endif
  all.size = info->size;
  all.dtypes = (1u << (HALFSTEP_BOOL + 1)) - 1;
  all.memory = 1u << 30;
  strcpy(all.name, "Tiny");
  all.priorities = 1;
  memcpy(info, &all, least(info->size, sizeof all));
  return HALFSTEP_OK;
}

static void error(halfstep_error* to) {
  last_error.size = to->size;
  memcpy(to, &last_error, least(to->size, sizeof last_error));
  memset(&last_error, 0, sizeof last_error);
}

static halfstep_status synchronize(int32_t device) {
  (void)device;
  return HALFSTEP_OK;
}

static halfstep_status allocate(int32_t device, uint64_t bytes, void** data) {
  (void)device;
  *data = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *data != NULL ? HALFSTEP_OK : HALFSTEP_OUT_OF_MEMORY;
}

static halfstep_status deallocate(int32_t device, void* data, uint64_t bytes) {
  (void)device;
  (void)bytes;
  free(data);
  return HALFSTEP_OK;
}

static halfstep_status memory_info(int32_t device, uint64_t* free_bytes, uint64_t* total_bytes) {
  (void)device;
  *free_bytes = *total_bytes = 1u << 30;
  return HALFSTEP_OK;
}

static halfstep_status copy(halfstep_queue* queue, void* destination, const void* source, uint64_t bytes,
                            int32_t kind) {
  (void)queue;
  (void)kind;
  memmove(destination, source, bytes);
  return HALFSTEP_OK;
}

static halfstep_status queue_create(int32_t device, int32_t priority, halfstep_queue** queue) {
  static char only;
  (void)device;
  (void)priority;
  *queue = (halfstep_queue*)&only;
  return HALFSTEP_OK;
}

static halfstep_status queue_call(halfstep_queue* queue) {
  (void)queue;
  return HALFSTEP_OK;
}

static halfstep_status queue_wait(halfstep_queue* queue, halfstep_event* event) {
  (void)queue;
  (void)event;
  return HALFSTEP_OK;
}

static halfstep_status event_create(int32_t device, uint32_t flags, halfstep_event** event) {
  static char only;
  (void)device;
  (void)flags;
  *event = (halfstep_event*)&only;
  return HALFSTEP_OK;
}

static halfstep_status event_call(halfstep_event* event) {
  (void)event;
  return HALFSTEP_OK;
}

static halfstep_status event_record(halfstep_event* event, halfstep_queue* queue) {
  (void)event;
  (void)queue;
  return HALFSTEP_OK;
}

static halfstep_status event_elapsed(halfstep_event* start, halfstep_event* end, double* milliseconds) {
  (void)start;
  (void)end;
  *milliseconds = 0;
  return HALFSTEP_OK;
}

/* Conversion of f32 into i32, towards zero, of contiguous tensors only: to make others contiguous is the business of
 * this very op. */
static halfstep_status to(halfstep_context* context, const halfstep_tensor* in, int n, halfstep_tensor* out, int m,
                          const void* attributes) {
  const float* x = in[0].data;
  int32_t* y = out[0].data;
  int64_t i;
  (void)n;
  (void)m;
  (void)attributes;
  if (out[0].dtype != HALFSTEP_I32) {
    context->set_error(context, "tiny converts into i32 only");
    return HALFSTEP_UNSUPPORTED;
  }
  for (i = 0; i < out[0].numel; ++i) y[i] = (int32_t)x[i];
  return HALFSTEP_OK;
}

static halfstep_status kernel(const char* op, int32_t version, int32_t dtype, halfstep_kernel* answer) {
  halfstep_kernel all;
  memset(&all, 0, sizeof all);
  all.size = answer->size;
  if (strcmp(op, "to") == 0 && version == 1 && dtype == HALFSTEP_F32) {
    all.layouts = HALFSTEP_LAYOUT_CONTIGUOUS;
    all.run = to;
  } else {
    all.reason = "too tiny";
  }
  memcpy(answer, &all, least(answer->size, sizeof all));
  return all.run != NULL ? HALFSTEP_OK : HALFSTEP_UNSUPPORTED;
}

static int32_t precision = -1; /* what Halfstep has said last; -1: nothing yet */
static void set_precision(int32_t value) { precision = value; }

static void* extension(const char* name) {
  if (strcmp(name, "answer") == 0) return &last_error;
  if (strcmp(name, "precision") == 0) return &precision;
  if (strcmp(name, "set_float32_precision") == 0) {
    /* C has no conversion from a function to void*; POSIX promises that they look alike. */
    void (*function)(int32_t) = set_precision;
    void* result;
    memcpy(&result, &function, sizeof result);
    return result;
  }
  return NULL;
}

/* The table's first `size` bytes right before a page that nobody may read. What is longer than the table that this file
 * knows ends in bytes that make no function. */
static const halfstep_plugin_table* at_the_edge(const halfstep_plugin_table* whole, size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), aligned = (size + 7) / 8 * 8;
  char* pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char* place = pages + page - aligned;
  if (pages == MAP_FAILED || mprotect(pages + page, page, PROT_NONE) != 0) abort();
  memset(place, 0xff, aligned);
  memcpy(place, whole, least(size, sizeof *whole));
  return (const halfstep_plugin_table*)(void*)place;
}

extern const halfstep_plugin_table* TINY_SYMBOL(const halfstep_host* host);

const halfstep_plugin_table* TINY_SYMBOL(const halfstep_host* host) {
  static int calls;
  halfstep_plugin_table table;
  /* The host is what its header says, and calls once. */
  if (host == NULL || host->size < sizeof(halfstep_host) || host->major != HALFSTEP_PLUGIN_MAJOR || calls++ > 0)
    abort();
  memset(&table, 0, sizeof table);
  table.size = (uint32_t)(TINY_SIZE);
  table.major = TINY_MAJOR;
  table.minor = TINY_MINOR;
  table.name = TEXT(TINY_NAME);
  table.vendor = "Tiny vendor";
  table.version = "0.1";
  table.device_count = device_count;
  table.device_info = device_info;
  table.error = error;
  table.synchronize = synchronize;
  table.allocate = allocate;
  table.deallocate = deallocate;
  table.memory_info = memory_info;
  table.copy = copy;
  table.queue_create = queue_create;
  table.queue_destroy = queue_call;
  table.queue_synchronize = queue_call;
  table.queue_query = queue_call;
  table.queue_wait = queue_wait;
  table.event_create = event_create;
  table.event_destroy = event_call;
  table.event_record = event_record;
  table.event_query = event_call;
  table.event_synchronize = event_call;
  table.event_elapsed = event_elapsed;
  table.kernel = kernel;
  table.extension = extension;
#ifdef TINY_WITHOUT
  table.TINY_WITHOUT = NULL;
#endif
  return TINY_NULL ? NULL : at_the_edge(&table, TINY_SIZE);
}
