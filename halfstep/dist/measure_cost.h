// SPDX-License-Identifier: Apache-2.0
// Latency and bandwidth between the ranks of a job, as the model of cost_model.h takes them.
#pragma once

#include <span>
#include <vector>

#include "halfstep/dist/cost_model.h"
#include "halfstep/dist/process_group.h"

namespace halfstep::dist {

/// The time of an all_reduce of float32 on the CPU, of each of `sizes` in bytes: the median of `repetitions`, each as
/// long as on the slowest rank. All ranks call it, and get the same. Throws Error for repetitions or sizes under 1, and
/// what collectives throw.
HS_API std::vector<AllReduceSample> measure_all_reduce(ProcessGroup& group, std::span<const double> sizes,
                                                       int repetitions = 9);

/// The ways between the group's ranks, from all-reduces of 1 KiB to 32 MiB within each machine and, with as many pairs
/// at work as there are ranks on a machine, between machines. All ranks call it, and get the same. Throws Error for a
/// group of one rank, and where machines have different numbers of ranks.
HS_API ClusterCost measure_cluster(ProcessGroup& group);

}  // namespace halfstep::dist
