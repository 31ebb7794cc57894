// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/measure_cost.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <string>

#include "halfstep/core/fail.h"
#include "halfstep/ops/create.h"

namespace halfstep::dist {
namespace {

double slowest_rank(ProcessGroup& group, double seconds) {
  const Tensor all = full({1}, seconds, {.dtype = f64, .device = Device{}});
  group.all_reduce(all, ReduceOp::max, "time of a collective").wait();
  return all.item<double>();
}

LinkCost measure_link(ProcessGroup& group) {
  std::vector<double> sizes;
  for (double bytes = 0x1p10; bytes <= 0x1p25; bytes *= 8) sizes.push_back(bytes);
  // Where other programs took the processors, small messages may have taken longer than large ones, which no link does.
  // The samples, and so what follows from them, are the same on all ranks.
  for (int more_tries = 4; more_tries > 0; --more_tries) {
    try {
      return fit_link(measure_all_reduce(group, sizes), group.size());
    } catch (const Error&) {
    }
  }
  return fit_link(measure_all_reduce(group, sizes), group.size());
}

// The slowest of what groups measured side by side.
LinkCost slowest_link(ProcessGroup& group, const LinkCost& own) {
  return {.latency = slowest_rank(group, own.latency), .bandwidth = 1 / slowest_rank(group, 1 / own.bandwidth)};
}

}  // namespace

std::vector<AllReduceSample> measure_all_reduce(ProcessGroup& group, std::span<const double> sizes, int repetitions) {
  if (repetitions < 1) fail<Error>("measure_all_reduce: expected at least one repetition, got {}", repetitions);
  std::vector<AllReduceSample> samples;
  for (const double bytes : sizes) {
    if (!(bytes >= 1)) fail<Error>("measure_all_reduce: expected sizes of at least one byte, got {}", bytes);
    const auto count = static_cast<std::int64_t>(std::ceil(bytes / 4));
    const Tensor values = zeros({count}, {.device = Device{}});
    std::vector<double> times;
    for (int i = -1; i < repetitions; ++i) {  // the first one warms up
      group.barrier("before a measured all_reduce");
      const auto start = std::chrono::steady_clock::now();
      group.all_reduce(values, ReduceOp::sum, "measured").wait();
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      const double seconds = slowest_rank(group, time.count());
      if (i >= 0) times.push_back(seconds);
    }
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    samples.push_back({.bytes = 4.0 * static_cast<double>(count), .seconds = *middle});
  }
  return samples;
}

ClusterCost measure_cluster(ProcessGroup& group) {
  if (group.size() < 2) fail<Error>("measure_cluster: expected at least 2 ranks, got 1");
  std::map<std::string, int> ranks_of, machines;
  for (int r = 0; r < group.size(); ++r) {
    ++ranks_of[group.host(r)];
    machines.emplace(group.host(r), static_cast<int>(machines.size()));
  }
  for (const auto& [host, ranks] : ranks_of) {
    if (ranks == ranks_of.begin()->second) continue;
    fail<Error>("measure_cluster: expected as many ranks on each machine, got {} on {} and {} on {}",
                ranks_of.begin()->second, ranks_of.begin()->first, ranks, host);
  }
  ClusterCost cluster{.ranks_per_machine = ranks_of.begin()->second};
  if (cluster.ranks_per_machine > 1) {
    ProcessGroup here = machines.size() == 1 ? group : group.split(machines.at(group.host(group.rank())));
    cluster.inside = measure_link(here);
  }
  if (machines.size() == 1) return cluster;
  if (cluster.ranks_per_machine > 1) cluster.inside = slowest_link(group, cluster.inside);
  ProcessGroup pairs = group.split(group.local_rank());
  cluster.between = slowest_link(group, measure_link(pairs));
  cluster.between.bandwidth *= cluster.ranks_per_machine;
  return cluster;
}

}  // namespace halfstep::dist
