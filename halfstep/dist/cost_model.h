// SPDX-License-Identifier: Apache-2.0
// What a step of data parallel training costs on many ranks: a model of latency, bandwidth and overlap, to plan by.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/nn/summary.h"

namespace halfstep::dist {

/// A way between ranks in the latency-bandwidth model (Hockney, Parallel Computing 20, 1994): a message of n bytes
/// takes `latency + n / bandwidth`.
struct LinkCost {
  double latency = 0;    ///< seconds
  double bandwidth = 0;  ///< bytes a second, sent while as many are received
};

/// How an all-reduce goes.
enum class AllReduceAlgorithm : std::uint8_t {
  ring,     ///< around all ranks, or directly between all pairs, which takes as many messages and bytes
  tree,     ///< NCCL's: a chain in each machine, two binary trees over the machines
  fastest,  ///< the quicker of both, as NCCL chooses
};

/// Ranks on machines, and the ways between them.
struct ClusterCost {
  int ranks_per_machine = 1;
  LinkCost inside = {};   ///< between ranks of a machine; the bandwidth is that of a rank
  LinkCost between = {};  ///< between machines; the bandwidth is that of a machine, all of its network cards together
  double start = 0;       ///< seconds before the first message of a collective
  AllReduceAlgorithm algorithm = AllReduceAlgorithm::fastest;
};

/// Seconds of an all-reduce of `bytes` by n = `ranks` ranks on m machines of g ranks; 0 for one rank. The model is that
/// by which NCCL chooses its algorithm (src/graph/tuning.cc), with the bytes of each:
///
///     ring: start + 2(n - m) inside.latency + 2(m - 1) between.latency + 2(n - 1)/n bytes / bandwidth
///     tree: start + 2(g - 1) inside.latency + 2 ceil(log2 m) between.latency + 2 bytes / bandwidth
///
/// The bandwidth is the smaller one of the ways in use. (Thakur, Rabenseifner and Gropp, 2005, for the ring; Sanders,
/// Speck and Traeff, 2009, for the two trees.) Throws Error for ranks, latencies or bandwidths out of range.
HS_API double all_reduce_seconds(const ClusterCost& cluster, int ranks, double bytes);

/// An all-reduce that was measured.
struct AllReduceSample {
  double bytes = 0, seconds = 0;
};
/// The latency and bandwidth with which all_reduce_seconds(), as a ring on one machine, comes closest to the samples:
/// the least sum of squared relative errors. Neither is negative. Throws Error for fewer than two sizes, for samples
/// that aren't above 0, and for fewer than two ranks.
HS_API LinkCost fit_link(std::span<const AllReduceSample> samples, int ranks);

/// A gradient that the backward pass makes.
struct GradientCost {
  double bytes = 0;    ///< of memory
  double seconds = 0;  ///< of the backward pass, from the gradient before this one to this one
};
/// A step of one rank without communication.
struct HS_API StepCost {
  double forward = 0;                   ///< seconds before the backward pass
  std::vector<GradientCost> gradients;  ///< in the order in which the backward pass makes them
  double rest = 0;                      ///< seconds of the backward pass behind the last gradient, and of the optimizer
  double sent = 1;  ///< bytes that are sent for a byte of gradient: 0.5 where float32 is compressed to 16 bits
  /// Share of a processor that a reduction takes from the backward pass meanwhile: 0 where something else sends, as on
  /// GPUs; 1 where ranks have all processors of a machine at work, and communication in the background is only moved.
  double interference = 0;
  /// Standard deviation of a rank's computing time from step to step, as a share of it: all wait for the slowest one.
  double variation = 0;
  double seconds() const;
};
/// The step of a network that takes `seconds` in all: a third of it the forward pass and two thirds the backward pass,
/// in which each module has the part of the multiply-adds that it has in the forward pass. Parameters are float32.
/// Throws Error for a network without multiply-adds.
HS_API StepCost step_cost(const nn::Summary& network, double seconds);

/// Sizes of buckets in bytes of gradients, as in DataParallelOptions.
struct BucketCost {
  double first = 0x1p20;
  double others = 25 * 0x1p20;
};
/// Bytes of the buckets that DataParallel makes of gradients in this order. Throws Error for sizes that aren't above 0.
HS_API std::vector<double> bucket_bytes(std::span<const GradientCost> gradients, const BucketCost& buckets);

/// The expected largest of n = `ranks` values of a standard normal distribution: 0 for one, 1.42 for 8, 3.24 for 1,000.
HS_API double expected_largest(int ranks);

/// A predicted step.
struct HS_API StepPrediction {
  double seconds = 0;        ///< of the step
  double communication = 0;  ///< seconds in which reductions run
  double exposed = 0;        ///< seconds by which communication makes the step longer
  double waiting = 0;        ///< seconds by which the slowest rank is later than the mean of them
  int buckets = 0;
  /// Share of the communication that adds nothing to the step; 1 without communication.
  double hidden() const { return communication > 0 ? 1 - exposed / communication : 1; }
  /// Share of the speed that as many ranks would have each by itself.
  double efficiency() const { return seconds > 0 ? 1 - (exposed + waiting) / seconds : 1; }
};
/// The step on so many ranks: a bucket is reduced when its last gradient is there and the bucket before it is done,
/// while the backward pass continues; the optimizer waits for all. Ranks' times vary independently of each other, as a
/// normal distribution. Throws as all_reduce_seconds() and bucket_bytes() do.
HS_API StepPrediction predict_step(const StepCost& step, const ClusterCost& cluster, int ranks,
                                   const BucketCost& buckets = {});

/// The largest size of buckets, among `sizes` in bytes, with which a step is at most a thousandth longer than with the
/// best of them; the first bucket is no larger than 1 MiB. Throws Error for no sizes, and as
/// above.
HS_API BucketCost best_bucket(const StepCost& step, const ClusterCost& cluster, int ranks,
                              std::span<const double> sizes);

}  // namespace halfstep::dist
