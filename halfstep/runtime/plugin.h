/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plug-in interface: what a device vendor implements, in C, so that Halfstep trains on the device.
 *
 * A plug-in is a shared library that exports one function, halfstep_plugin(). When an unknown device is first
 * requested, Halfstep loads the libraries named by HALFSTEP_PLUGINS (files or folders, separated by colons), then those
 * named libhalfstep_*.so in the folder halfstep/plugins next to libhalfstep.so.
 *
 * Rules
 * - Every struct that may grow begins with its size as known to its creator. Neither side reads past that size; an
 *   entry beyond the end, or a null one, is absent.
 * - A minor version adds entries at the end. The same major version with any minor works: neither side uses
 *   entries that it does not know. A different major version is refused.
 * - No call throws, exits or prints. A call that fails returns a status, and halfstep_plugin_table.error returns the
 *   reason on the same thread.
 * - Entries are called from several threads at once; one queue is used by one thread at a time.
 * - After HALFSTEP_LOST every call on that device returns it immediately; calls that destroy or free still release
 *   host resources.
 * - Addresses of device memory are opaque to the host: it does arithmetic on them within one allocation and never reads
 *   through them.
 *
 * An entry is marked [mandatory] or [optional]. Optional ones come in groups; a group counts as present if all of its
 * entries are.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "halfstep/runtime/plugin_attributes.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. */
#define HALFSTEP_PLUGIN_MAJOR 1
#define HALFSTEP_PLUGIN_MINOR 2

/* The maximum number of dimensions of a tensor. */
#define HALFSTEP_MAX_DIMS 8
/* The room that Halfstep gives halfstep_plugin_table.group_id. */
#define HALFSTEP_GROUP_ID_BYTES 8192

/* How a call ended. */
typedef int32_t halfstep_status;
enum {
  HALFSTEP_OK = 0,
  HALFSTEP_UNSUPPORTED = 1,   /* not handled here, nothing was written: Halfstep runs it on the CPU */
  HALFSTEP_FAILED = 2,        /* it went wrong */
  HALFSTEP_OUT_OF_MEMORY = 3, /* no memory left; Halfstep gives back what it keeps and asks again */
  HALFSTEP_LOST = 4,          /* the device is gone for good; every later use is refused */
  HALFSTEP_NOT_READY = 5      /* of a query: the work is not done yet */
};

/* Element types. 16-bit floats are IEEE binary16 and bfloat16; rounding is to nearest even, subnormals are kept. */
enum {
  HALFSTEP_F32 = 0,
  HALFSTEP_F64 = 1,
  HALFSTEP_F16 = 2,
  HALFSTEP_BF16 = 3,
  HALFSTEP_F8E4M3 = 4,
  HALFSTEP_F8E5M2 = 5,
  HALFSTEP_I64 = 6,
  HALFSTEP_I32 = 7,
  HALFSTEP_I8 = 8,
  HALFSTEP_U8 = 9,
  HALFSTEP_BOOL = 10 /* one byte, 0 or 1 */
};

/* Private to plug-ins; Halfstep only passes pointers to them. */
typedef struct halfstep_queue halfstep_queue;
typedef struct halfstep_event halfstep_event;
typedef struct halfstep_graph halfstep_graph;
typedef struct halfstep_group halfstep_group;

/* ---------------------------------------------------------------------------------------------------------------- */
/* Kernels */

/* A tensor as a kernel sees it. What it points to (including sizes and strides) belongs to Halfstep and is valid during
 * the call: a kernel that only enqueues its work must copy what it needs. This struct does not grow within a major
 * version. */
typedef struct halfstep_tensor {
  void* data;             /* the first element in device memory; not to be used for an absent or empty tensor */
  const int64_t* sizes;   /* ndim of them */
  const int64_t* strides; /* in elements, 0 where a dimension is repeated */
  int64_t numel;          /* the product of the sizes */
  int32_t ndim;
  uint8_t dtype;
  uint8_t defined;    /* 0 for an optional input that was left out */
  uint8_t contiguous; /* row-major without gaps */
  uint8_t reserved;
} halfstep_tensor;

/* What a kernel is given in addition to its tensors, for the duration of the call. */
typedef struct halfstep_context {
  uint32_t size;  /* of this struct, in bytes */
  int32_t device; /* the device's index among its kind */
  uint64_t call;  /* the number of this call. Asynchronous work that fails is reported with it (halfstep_error.call) */
  halfstep_queue* queue; /* where the work goes; null on the CPU */
  /* Device memory until the work enqueued by this call is done, aligned to 64 bytes; null: none left. If the call is
   * recorded into a graph, the address is good for the life of the graph, but other kernels of it may be given the
   * same: what the kernel leaves there is lost between launches. */
  void* (*workspace)(struct halfstep_context* context, uint64_t bytes);
  /* The reason for a status other than HALFSTEP_OK; the text is copied. */
  void (*set_error)(struct halfstep_context* context, const char* text);
  /* Null, or reports that no value of output 0 is larger in magnitude than `bound`, or NaN. Optional for a kernel. */
  void (*set_magnitude_bound)(struct halfstep_context* context, float bound);
  void* owner; /* Halfstep's */
  void* state; /* halfstep_kernel.state of this kernel */
} halfstep_context;

/* A kernel: reads in[0..n), writes out[0..m), which have been allocated with the shapes, strides and dtypes that the
 * op's rule gives. Inputs of elementwise ops have their own shapes, which broadcast to the output's by NumPy's rules.
 * `attributes` points to the op's struct below, or is null. Inputs and outputs overlap only where an op works in place,
 * and then exactly. Work goes to context->queue, after what is already there; the call need not wait for it. With any
 * status but HALFSTEP_OK the kernel has written and enqueued nothing. */
typedef halfstep_status (*halfstep_kernel_fn)(halfstep_context* context, const halfstep_tensor* in, int n,
                                              halfstep_tensor* out, int m, const void* attributes);

/* The layouts a kernel supports. Halfstep makes tensors with other layouts contiguous before the call. */
enum {
  HALFSTEP_LAYOUT_CONTIGUOUS = 1, /* row-major without gaps (an empty mask means this too) */
  HALFSTEP_LAYOUT_STRIDED = 2     /* any strides */
};

/* An answer of halfstep_plugin_table.kernel. */
typedef struct halfstep_kernel {
  uint32_t size;    /* of this struct, in bytes */
  uint32_t layouts; /* mask of HALFSTEP_LAYOUT_... */
  halfstep_kernel_fn run;
  const char* reason; /* why there is none, for users: "no f64 units"; may be null */
  void* state;        /* the plug-in's own, handed to `run` in its context, so that one function may serve many ops */
} halfstep_kernel;

/* ---------------------------------------------------------------------------------------------------------------- */
/* Devices, errors and profiler records */

/* A device, as halfstep_plugin_table.device_info describes it. */
typedef struct halfstep_device_info {
  uint32_t size;       /* of this struct as Halfstep knows it */
  uint32_t dtypes;     /* mask: bit HALFSTEP_F16 is set when tensors of f16 may live here */
  uint64_t memory;     /* in bytes, all of it */
  char name[128];      /* of the hardware: "Example 9000" */
  uint32_t low_dtypes; /* mask: what matrix units compute natively, for hints to users */
  int32_t priorities;  /* queues take priorities from 0 (lowest) to priorities - 1; at least 1 */
  /* Since 1.2. Mask of HALFSTEP_COLLECTIVES_...: what the group of collectives promises. */
  uint32_t collectives;
  uint32_t reserved;
} halfstep_device_info;

/* What went wrong, as returned by halfstep_plugin_table.error. */
typedef struct halfstep_error {
  uint32_t size;  /* of this struct as Halfstep knows it */
  int32_t status; /* what failed: a status from above */
  uint64_t call;  /* halfstep_context.call of the kernel that failed; 0: not known */
  char text[256];
} halfstep_error;

/* A time range on a device, for the profiler. */
typedef struct halfstep_record {
  uint64_t call; /* of the kernel; 0 for a copy */
  int32_t device;
  uint32_t queue;    /* a number that tells queues apart */
  uint64_t start_ns; /* on the clock of clock_gettime(CLOCK_MONOTONIC) */
  uint64_t end_ns;
} halfstep_record;

enum { HALFSTEP_COPY_TO_DEVICE = 0, HALFSTEP_COPY_TO_HOST = 1, HALFSTEP_COPY_ON_DEVICE = 2 };
enum { HALFSTEP_EVENT_TIMING = 1 };
/* MEAN, since 1.2: the sum, divided by the number of ranks before it is rounded. */
enum {
  HALFSTEP_REDUCE_SUM = 0,
  HALFSTEP_REDUCE_PROD = 1,
  HALFSTEP_REDUCE_MIN = 2,
  HALFSTEP_REDUCE_MAX = 3,
  HALFSTEP_REDUCE_MEAN = 4
};
/* IN_ORDER: all_reduce and reduce_scatter combine the values in the order of ranks, in float32 (f64 in itself, integers
 * in their own size, wrapping around), and round once; min and max give NaN where any value is NaN, and the first of
 * equal values. Without it Halfstep moves the values by all_to_all and adds them up by kernels. */
enum { HALFSTEP_COLLECTIVES_IN_ORDER = 1 };

/* One of the messages of halfstep_plugin_table.send_receive. This struct does not grow within a major version. */
typedef struct halfstep_transfer {
  void* data; /* device memory, which a send only reads */
  int64_t count;
  int32_t dtype;
  int32_t peer;     /* another rank of the group */
  uint32_t receive; /* 0: a send to the peer; 1: a receive from it */
  uint32_t reserved;
} halfstep_transfer;
enum { HALFSTEP_LOG_DEBUG = 0, HALFSTEP_LOG_INFO = 1, HALFSTEP_LOG_WARNING = 2, HALFSTEP_LOG_ERROR = 3 };

/* ---------------------------------------------------------------------------------------------------------------- */
/* The table */

/* A plug-in's entries: see the rules above. */
typedef struct halfstep_plugin_table {
  uint32_t size;  /* of this struct as the plug-in was compiled with it */
  uint32_t major; /* HALFSTEP_PLUGIN_MAJOR */
  uint32_t minor; /* HALFSTEP_PLUGIN_MINOR */

  /* --- identity. Strings live as long as the library. */
  const char* name;    /* [mandatory] the kind of device, as users write it: lower-case letters, digits, underscores */
  const char* vendor;  /* [optional] */
  const char* version; /* [optional] of the plug-in and its driver */

  /* [mandatory] How many devices there are; 0 when the driver is missing. Called first, once. */
  int32_t (*device_count)(void);
  /* [mandatory] Fills in `info` up to info->size. */
  halfstep_status (*device_info)(int32_t device, halfstep_device_info* info);
  /* [mandatory] The last failure on this thread, cleared by the call; status HALFSTEP_OK when there was none. The text
   * is only the reason: Halfstep adds which op failed and on which device. */
  void (*error)(halfstep_error* error);
  /* [mandatory] Waits for all queues of a device. Failures of asynchronous work since the last wait are reported here,
   * or by the first call that waits, once. */
  halfstep_status (*synchronize)(int32_t device);

  /* --- memory */
  /* [mandatory] At least `bytes` bytes (never 0), aligned to 256. */
  halfstep_status (*allocate)(int32_t device, uint64_t bytes, void** data);
  /* [mandatory] All work on the memory is done when it is called. */
  halfstep_status (*deallocate)(int32_t device, void* data, uint64_t bytes);
  /* [mandatory] */
  halfstep_status (*memory_info)(int32_t device, uint64_t* free_bytes, uint64_t* total_bytes);
  /* [optional group: pinned] Host memory that the device accesses directly, so that copies are asynchronous.
   */
  halfstep_status (*host_allocate)(uint64_t bytes, void** data);
  halfstep_status (*host_deallocate)(void* data, uint64_t bytes);

  /* --- copies, on a queue, after the work that is already there */
  /* [mandatory] `kind` is HALFSTEP_COPY_...; the host's end may be any host memory and stays valid until the queue has
   * passed the copy, except that from and to memory that is not pinned the call may wait until it is done. */
  halfstep_status (*copy)(halfstep_queue* queue, void* destination, const void* source, uint64_t bytes, int32_t kind);
  /* [optional] Between two devices of this kind, on a queue of the source's; without it copies go through the host. */
  halfstep_status (*copy_peer)(halfstep_queue* queue, int32_t to_device, void* destination, const void* source,
                               uint64_t bytes);

  /* --- queues: each does its work in order; several run concurrently */
  /* [mandatory] `priority` from 0 to halfstep_device_info.priorities - 1. */
  halfstep_status (*queue_create)(int32_t device, int32_t priority, halfstep_queue** queue);
  /* [mandatory] Waits for the work that is in it. */
  halfstep_status (*queue_destroy)(halfstep_queue* queue);
  /* [mandatory] */
  halfstep_status (*queue_synchronize)(halfstep_queue* queue);
  /* [mandatory] HALFSTEP_OK when all is done, else HALFSTEP_NOT_READY; does not wait. */
  halfstep_status (*queue_query)(halfstep_queue* queue);
  /* [mandatory] Later work of the queue waits for the event's last record; at once when it was never recorded. */
  halfstep_status (*queue_wait)(halfstep_queue* queue, halfstep_event* event);

  /* --- events */
  /* [mandatory] `flags`: HALFSTEP_EVENT_TIMING or 0. */
  halfstep_status (*event_create)(int32_t device, uint32_t flags, halfstep_event** event);
  /* [mandatory] Valid even while a queue has yet to reach the event. */
  halfstep_status (*event_destroy)(halfstep_event* event);
  /* [mandatory] Marks the place in the queue; a second record moves the event. */
  halfstep_status (*event_record)(halfstep_event* event, halfstep_queue* queue);
  /* [mandatory] HALFSTEP_OK when the queue has passed it or it was never recorded, else HALFSTEP_NOT_READY. */
  halfstep_status (*event_query)(halfstep_event* event);
  /* [mandatory] */
  halfstep_status (*event_synchronize)(halfstep_event* event);
  /* [mandatory] Milliseconds of the device's clock from `start` to `end`; both have timing and were passed. */
  halfstep_status (*event_elapsed)(halfstep_event* start, halfstep_event* end, double* milliseconds);

  /* --- kernels */
  /* [mandatory] The kernel of `op` (names as `halfstep ops` lists them) whose key input has `dtype`, in `kernel`, up to
   * kernel->size; `version` is the op's, raised when its attributes or meaning change. With HALFSTEP_UNSUPPORTED there
   * is none, and kernel->reason may say why. Asked once for each combination; which ops a device has may depend on the
   * device's index only through HALFSTEP_UNSUPPORTED of the kernel itself.
   *
   * Ops without a kernel run on the CPU, with copies to it and back. Worth having first: `to`, `clone`
   * and `copy` (casts, layouts, broadcasts: one kernel, strided and converting, serves all three, for the source is
   * their last input; `copy` has its destination as input 0, which is where its dtype comes from), `fill`, and for
   * gradient scaling `amp_unscale` and `amp_check` (unscale and check many gradients at once) and `amp_update_scale`;
   * their gradients, as an optimizer's tensors, are dense but not always row-major. Random ops (`uniform`, `normal`,
   * `bernoulli_p`, `dropout`, ...) get the state of Philox 4x32-10 as an input of two i64, seed and offset, so that
   * their numbers are the same on every device. */
  halfstep_status (*kernel)(const char* op, int32_t version, int32_t dtype, halfstep_kernel* kernel);

  /* --- [optional] Extensions without an entry here, by name; null if there is no such extension. */
  void* (*extension)(const char* name);
  /* [optional] Called once, before the program ends or the library is abandoned; no other entry is called after it. */
  void (*shutdown)(void);

  /* --- [optional group: profile] */
  halfstep_status (*profile_start)(int32_t device);
  halfstep_status (*profile_stop)(int32_t device);
  /* Moves up to `capacity` finished records to `records` and returns how many; called until there are none. */
  halfstep_status (*profile_read)(int32_t device, halfstep_record* records, uint64_t capacity, uint64_t* count);

  /* --- [optional group: graph] Work of a queue recorded once and replayed: what a captured step does. */
  /* Until graph_end, kernels called for the queue do nothing but become part of the graph. Between the two calls
   * Halfstep calls only kernels that it has called before with tensors of these shapes. */
  halfstep_status (*graph_begin)(halfstep_queue* queue);
  /* With another status than HALFSTEP_OK, or when a kernel refused, Halfstep does without graphs of this step. */
  halfstep_status (*graph_end)(halfstep_queue* queue, halfstep_graph** graph);
  /* Enqueues all kernels of the graph, with the addresses and attributes of their calls; on the same queue. With
   * HALFSTEP_UNSUPPORTED nothing was enqueued: Halfstep calls the kernels one by one. */
  halfstep_status (*graph_launch)(halfstep_graph* graph, halfstep_queue* queue);
  /* Its work is done. */
  halfstep_status (*graph_destroy)(halfstep_graph* graph);

  /* --- [optional group: collectives] Between the processes of a job (docs/devices/collectives.md). Since 1.2, in which
   * the entries behind reduce_scatter were added: nothing has called the first eight without them.
   *
   * A group has `ranks` members, each with one device, numbered from 0. All ranks call the same entries in the same
   * order with the same counts, dtypes, reductions and roots; Halfstep has made sure of that before it calls. The work
   * goes to the queue, after what is already there, and the call does not wait for other ranks; Halfstep uses one queue
   * for a group. `count` is in elements. Halfstep moves values of every dtype as bytes (HALFSTEP_U8); only reductions
   * are given others. With HALFSTEP_UNSUPPORTED, which may depend on dtype and reduction only, nothing was enqueued:
   * Halfstep does it in another way, on all ranks.
   *
   * What goes wrong after the call (a rank is gone, the network is) is told by group_error, not by calls that wait for
   * the queue; results are undefined then. */
  /* On rank 0: what the others need to find the group, at most HALFSTEP_GROUP_ID_BYTES. They get a copy by MPI. */
  halfstep_status (*group_id)(void* id, uint64_t capacity, uint64_t* bytes);
  /* Waits for the other ranks to call it; called on a thread of its own. */
  halfstep_status (*group_create)(int32_t device, int32_t ranks, int32_t rank, const void* id, uint64_t bytes,
                                  halfstep_group** group);
  /* No work of the group is left in queues, unless it was aborted. */
  halfstep_status (*group_destroy)(halfstep_group* group);
  /* From any thread: ends what waits for other ranks, here and (as soon as they can know) there; the queue goes on
   * behind it. After it the group can only be destroyed. */
  halfstep_status (*group_abort)(halfstep_group* group);
  /* `out` may be `in`. */
  halfstep_status (*all_reduce)(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                                int32_t dtype, int32_t reduce);
  halfstep_status (*broadcast)(halfstep_group* group, halfstep_queue* queue, void* data, int64_t count, int32_t dtype,
                               int32_t root);
  /* `count` elements of each rank, in the order of ranks; `in` may be its own place in `out`. */
  halfstep_status (*all_gather)(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                                int32_t dtype);
  /* Part `rank`, of `count` elements, of the reduction of ranks * count. */
  halfstep_status (*reduce_scatter)(halfstep_group* group, halfstep_queue* queue, const void* in, void* out,
                                    int64_t count, int32_t dtype, int32_t reduce);
  /* Part r of `out`, of `count` elements, becomes part `rank` of rank r's `in`. They do not overlap. */
  halfstep_status (*all_to_all)(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                                int32_t dtype);
  /* Sends and receives that begin together, so that none waits for another; those between the same two ranks fit in
   * their order. Only the ranks that it names take part. */
  halfstep_status (*send_receive)(halfstep_group* group, halfstep_queue* queue, const halfstep_transfer* transfers,
                                  int32_t count);
  /* From any thread, at any time, without waiting: HALFSTEP_OK as long as nothing has gone wrong in the group. */
  halfstep_status (*group_error)(halfstep_group* group);
} halfstep_plugin_table;

/* What Halfstep provides to a plug-in; lives as long as the program. */
typedef struct halfstep_host {
  uint32_t size; /* of this struct as Halfstep knows it */
  uint32_t major;
  uint32_t minor;
  const char* version; /* of Halfstep */
  /* Writes to Halfstep's log; `level` is HALFSTEP_LOG_... */
  void (*log)(int32_t level, const char* text);
  /* Since 1.1. The CPU's kernel of an op, for devices that the processor computes for: simulated ones, and those whose
   * memory it can read. Answers as halfstep_plugin_table.kernel does; `version` is the op's, `dtype` that of its key
   * input. The kernel's `run` computes before it returns, on the calling thread and Halfstep's threads, in any thread
   * of the plug-in. Its context is the plug-in's: `state` as in the answer, `queue` null, `workspace` memory of the
   * host until the call returns, `set_error` for what goes wrong, `set_magnitude_bound` null or not. Its tensors lie
   * where the processor reads them, and are otherwise as a kernel of a plug-in gets them. */
  halfstep_status (*cpu_kernel)(const char* op, int32_t version, int32_t dtype, halfstep_kernel* kernel);
} halfstep_host;

/* The one function that a plug-in exports. Returns a table that lives as long as the library, or null if the plug-in
 * can't be used with this host. Called once. */
typedef const halfstep_plugin_table* (*halfstep_plugin_fn)(const halfstep_host* host);
#define HALFSTEP_PLUGIN_SYMBOL "halfstep_plugin"

#ifdef __cplusplus
} /* extern "C" */
#endif
