/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the simulated accelerator offers beyond the plug-in interface, through its `extension` entry: faults that a test
 * orders, and counters. docs/devices/sim.md describes the device.
 *
 * Orders of faults, also read from HALFSTEP_SIM_FAULTS when the library is loaded:
 *
 *   orders      = order { ";" order }
 *   order       = "fail" on              the kernel fails on the queue: the next call that waits reports it, once
 *               | "refuse" on            the kernel's call returns HALFSTEP_FAILED, nothing is written
 *               | "unsupported" on       the kernel's call returns HALFSTEP_UNSUPPORTED, nothing is written
 *               | "corrupt" on           one value of the kernel's first output is wrong; no error is reported
 *               | "delay" on ":" time    the kernel starts so much later
 *               | "oom" ":" which        an allocation of device memory finds none
 *               | "lost" ":" number      a kernel's call finds the device gone: it and all later calls on the device
 *                                        return HALFSTEP_LOST, and the work that was queued is dropped
 *               | "clear"                removes all remaining orders
 *               | "restore"              brings lost devices back (no hardware does that; for tests in one process)
 *   on          = ":" op ":" which
 *   op          = the name of an op | "matmul" (mm, bmm or linear) | "*" (any)
 *               | "graph_begin" | "graph_end" | "graph_launch"
 *   which       = number                 that one from now on, once; the next is number 1
 *               | number ":always"       that one and every one after it
 *   time        = number ("ns" | "us" | "ms" | "s")
 *
 * So "fail:matmul:3" fails the third matrix product from now, "delay:*:1:always:50ms" delays every kernel. Every order
 * counts for itself; kernels of all devices count together, in the order of their calls. What a graph recorded counts
 * when the graph is launched. "refuse" and "unsupported" on an entry of graphs are what it returns; "fail", "corrupt"
 * and "delay" on "graph_launch" go to the last kernel of the graph.
 */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* extension("sim_order_fault"): adds orders. Returns 0, or 1 when they are not understood; then none is added, and
 * halfstep_plugin_table.error tells where. */
typedef int32_t (*halfstep_sim_order_fault_fn)(const char* orders);

/* Counters of all devices since the library was loaded. */
typedef struct halfstep_sim_stats {
  uint32_t size; /* of this struct as the caller knows it */
  uint32_t devices;
  uint64_t kernels;        /* run, failed ones included */
  uint64_t failed_kernels; /* those that failed on a queue */
  uint64_t copies;
  uint64_t copied_bytes;
  uint64_t waiting_copies; /* those whose call waited, because the host's memory was not pinned */
  uint64_t allocations;    /* of device memory, that succeeded */
  uint64_t graph_launches;
  uint64_t host_reads; /* copies to the host's memory */
} halfstep_sim_stats;

/* extension("sim_stats"): fills in `stats` up to stats->size. */
typedef void (*halfstep_sim_stats_fn)(halfstep_sim_stats* stats);

#ifdef __cplusplus
} /* extern "C" */
#endif
