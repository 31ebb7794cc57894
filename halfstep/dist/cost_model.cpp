// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/cost_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "halfstep/core/fail.h"

namespace halfstep::dist {
namespace {

constexpr double kSizeOfFloat = 4;

void check_link(const char* which, const LinkCost& link) {
  if (!(link.latency >= 0) || !std::isfinite(link.latency)) {
    fail<Error>("all_reduce_seconds: expected a latency {} machines of at least 0, got {}", which, link.latency);
  }
  if (!(link.bandwidth > 0)) {
    fail<Error>("all_reduce_seconds: expected a bandwidth {} machines above 0, got {}", which, link.bandwidth);
  }
}

}  // namespace

double all_reduce_seconds(const ClusterCost& cluster, int ranks, double bytes) {
  if (ranks < 1 || cluster.ranks_per_machine < 1) {
    fail<Error>("all_reduce_seconds: expected at least one rank, in all and on a machine, got {} and {}", ranks,
                cluster.ranks_per_machine);
  }
  if (!(bytes >= 0) || !(cluster.start >= 0)) {
    fail<Error>("all_reduce_seconds: expected bytes and a start of at least 0, got {} and {}", bytes, cluster.start);
  }
  if (ranks == 1) return 0;
  const int here = std::min(ranks, cluster.ranks_per_machine);
  const int machines = (ranks + cluster.ranks_per_machine - 1) / cluster.ranks_per_machine;
  double bandwidth = std::numeric_limits<double>::infinity(), inside = 0, between = 0;
  if (here > 1) {
    check_link("inside", cluster.inside);
    bandwidth = cluster.inside.bandwidth;
    inside = cluster.inside.latency;
  }
  if (machines > 1) {
    check_link("between", cluster.between);
    bandwidth = std::min(bandwidth, cluster.between.bandwidth);
    between = cluster.between.latency;
  }
  const double ring = 2.0 * (ranks - machines) * inside + 2.0 * (machines - 1) * between +
                      2.0 * (ranks - 1) / ranks * bytes / bandwidth;
  const double levels = std::bit_width(static_cast<unsigned>(machines - 1));  // of a binary tree, rounded up
  const double tree = 2.0 * (here - 1) * inside + 2.0 * levels * between + 2.0 * bytes / bandwidth;
  switch (cluster.algorithm) {
    case AllReduceAlgorithm::ring:
      return cluster.start + ring;
    case AllReduceAlgorithm::tree:
      return cluster.start + tree;
    case AllReduceAlgorithm::fastest:
      break;
  }
  return cluster.start + std::min(ring, tree);
}

LinkCost fit_link(std::span<const AllReduceSample> samples, int ranks) {
  if (ranks < 2) fail<Error>("fit_link: expected at least 2 ranks, got {}", ranks);
  double least = std::numeric_limits<double>::infinity(), most = 0;
  // Of the relative errors: (a + b bytes) / seconds - 1.
  double s00 = 0, s01 = 0, s11 = 0, r0 = 0, r1 = 0;
  for (const AllReduceSample& s : samples) {
    if (!(s.bytes > 0) || !(s.seconds > 0)) {
      fail<Error>("fit_link: expected bytes and seconds above 0, got {} and {}", s.bytes, s.seconds);
    }
    least = std::min(least, s.bytes), most = std::max(most, s.bytes);
    const double one = 1 / s.seconds, size = s.bytes / s.seconds;
    s00 += one * one, s01 += one * size, s11 += size * size;
    r0 += one, r1 += size;
  }
  if (!(most > least)) fail<Error>("fit_link: expected samples of at least two sizes");
  const double determinant = s00 * s11 - s01 * s01;
  double a = (r0 * s11 - r1 * s01) / determinant, b = (s00 * r1 - s01 * r0) / determinant;
  if (a < 0) a = 0, b = r1 / s11;
  if (b <= 0) fail<Error>("fit_link: expected more bytes to take more time");
  return {.latency = a / (2.0 * (ranks - 1)), .bandwidth = 2.0 * (ranks - 1) / ranks / b};
}

double StepCost::seconds() const {
  double sum = forward + rest;
  for (const GradientCost& g : gradients) sum += g.seconds;
  return sum;
}

StepCost step_cost(const nn::Summary& network, double seconds) {
  // What modules have beside those in them, in the order of the forward pass.
  struct Own {
    double parameters, work;
  };
  std::vector<Own> all;
  std::vector<std::size_t> outer;  // the modules around a row, by depth
  for (const nn::SummaryRow& row : network.rows) {
    const Own own{static_cast<double>(row.parameters), static_cast<double>(row.multiply_adds)};
    outer.resize(static_cast<std::size_t>(row.depth));
    if (!outer.empty()) {
      all[outer.back()].parameters -= own.parameters;
      all[outer.back()].work -= own.work;
    }
    outer.push_back(all.size());
    all.push_back(own);
  }
  const double work = network.rows.empty() ? 0 : static_cast<double>(network.rows[0].multiply_adds);
  if (!(work > 0)) fail<Error>("step_cost: expected a network with multiply-adds");
  StepCost step{.forward = seconds / 3, .gradients = {}};
  double before = 0;  // of modules without parameters
  for (auto own = all.rbegin(); own != all.rend(); ++own) {
    before += std::max(own->work, 0.0) / work * seconds * 2 / 3;
    if (own->parameters <= 0) continue;
    step.gradients.push_back({.bytes = own->parameters * kSizeOfFloat, .seconds = before});
    before = 0;
  }
  step.rest = before;
  return step;
}

std::vector<double> bucket_bytes(std::span<const GradientCost> gradients, const BucketCost& buckets) {
  if (!(buckets.first > 0) || !(buckets.others > 0)) {
    fail<Error>("bucket_bytes: expected sizes above 0, got {} and {}", buckets.first, buckets.others);
  }
  std::vector<double> all;
  double open = 0;
  for (const GradientCost& g : gradients) {
    open += g.bytes;
    if (open < (all.empty() ? buckets.first : buckets.others)) continue;
    all.push_back(open);
    open = 0;
  }
  if (open > 0) all.push_back(open);
  return all;
}

double expected_largest(int ranks) {
  if (ranks <= 1) return 0;
  // The integral of 1 - F(x)^n over x > 0 less that of F(x)^n over x < 0; F is 0 or 1 beyond 9 to float64's digits.
  constexpr int kSteps = 2000;
  constexpr double kFar = 9, kStep = kFar / kSteps;
  double sum = 0;
  for (int i = 0; i <= kSteps; ++i) {
    const double x = i * kStep;
    const auto power = [&](double at) { return std::pow(0.5 * std::erfc(-at / std::sqrt(2.0)), ranks); };
    sum += (i == 0 || i == kSteps ? 0.5 : 1.0) * (1 - power(x) - power(-x));
  }
  return sum * kStep;
}

StepPrediction predict_step(const StepCost& step, const ClusterCost& cluster, int ranks, const BucketCost& buckets) {
  if (!(step.interference >= 0 && step.interference <= 1)) {
    fail<Error>("predict_step: expected an interference from 0 to 1, got {}", step.interference);
  }
  if (!(step.variation >= 0)) fail<Error>("predict_step: expected a variation of at least 0, got {}", step.variation);
  const std::vector<double> sizes = bucket_bytes(step.gradients, buckets);
  StepPrediction result{.buckets = static_cast<int>(sizes.size())};
  double now = step.forward;  // of the backward pass
  double busy_until = 0;      // of what sends
  const auto compute = [&](double seconds) {
    // Slower while a reduction runs.
    const double rate = 1 - step.interference, overlap = std::max(busy_until - now, 0.0);
    if (seconds <= overlap * rate) {
      if (seconds > 0) now += seconds / rate;
      return;
    }
    now += overlap + (seconds - overlap * rate);
  };
  auto size = sizes.begin();
  double open = 0;
  for (std::size_t i = 0; i < step.gradients.size(); ++i) {
    compute(step.gradients[i].seconds);
    open += step.gradients[i].bytes;
    if (open < *size && i + 1 < step.gradients.size()) continue;
    const double seconds = all_reduce_seconds(cluster, ranks, *size * step.sent);
    busy_until = std::max(busy_until, now) + seconds;
    result.communication += seconds;
    if (++size == sizes.end()) break;
    open = 0;
  }
  // What the backward pass still does is hidden, but the optimizer isn't: they are not told apart, and it is short.
  result.exposed = std::max(std::max(now, busy_until) + step.rest - step.seconds(), 0.0);
  result.waiting = step.variation * step.seconds() * expected_largest(ranks);
  result.seconds = step.seconds() + result.exposed + result.waiting;
  return result;
}

BucketCost best_bucket(const StepCost& step, const ClusterCost& cluster, int ranks, std::span<const double> sizes) {
  if (sizes.empty()) fail<Error>("best_bucket: expected at least one size");
  const auto with = [](double size) { return BucketCost{.first = std::min(size, BucketCost().first), .others = size}; };
  std::vector<double> seconds;
  for (const double size : sizes) seconds.push_back(predict_step(step, cluster, ranks, with(size)).seconds);
  constexpr double kNear = 1.001;
  const double limit = *std::min_element(seconds.begin(), seconds.end()) * kNear;
  double best = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (seconds[i] <= limit) best = std::max(best, sizes[i]);
  }
  return with(best);
}

}  // namespace halfstep::dist
