// SPDX-License-Identifier: Apache-2.0
// The arithmetic of PyTorch's HistogramObserver, in float32 where that is in tensors and in float64 where it is in
// Python's numbers, so that the same bins are found.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "halfstep/quant/histogram_internal.h"

namespace halfstep::quant {
namespace {

// torch.linspace, whose second half counts from the end.
float point_of(float start, float end, std::int64_t steps, std::int64_t i) {
  const float step = (end - start) / static_cast<float>(steps - 1);
  return i < steps / 2 ? std::fma(step, static_cast<float>(i), start)
                       : std::fma(-step, static_cast<float>(steps - 1 - i), end);
}

// The histogram's counts in bins of a wider range.
std::vector<float> upscaled(const Histogram& from, float low, float high) {
  constexpr std::int64_t kParts = 16;
  const auto bins = static_cast<std::int64_t>(from.counts.size());
  const float half = 0.5F * ((from.high - from.low) / static_cast<float>(bins * kParts));
  std::vector<float> edges(from.counts.size() + 1), counts(from.counts.size());
  for (std::int64_t i = 0; i <= bins; ++i) edges[static_cast<std::size_t>(i)] = point_of(low, high, bins + 1, i);
  for (std::int64_t i = 0; i < bins * kParts; ++i) {
    const float middle = point_of(from.low, from.high, bins * kParts + 1, i) + half;
    const auto after = std::upper_bound(edges.begin(), edges.end(), middle) - edges.begin();
    const auto bin = std::clamp<std::int64_t>(after - 1, 0, bins - 1);
    counts[static_cast<std::size_t>(bin)] += from.counts[static_cast<std::size_t>(i / kParts)] / kParts;
  }
  return counts;
}

// The squared error of values that are spread evenly from begin to end around a level.
float spread_error(float begin, float end, float density) {
  return density * ((end * end * end - begin * begin * begin) / 3);
}
float floored_quotient(float a, float b) {
  const float rest = std::fmod(a, b);
  float quotient = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
  const float floored = std::floor(quotient);
  return quotient - floored > 0.5F ? floored + 1 : floored;
}

// The squared error when bins start to end get the levels.
double squared_error(const Histogram& h, int levels, std::int64_t start, std::int64_t end) {
  const auto bins = static_cast<std::int64_t>(h.counts.size());
  const double bin_width = (static_cast<double>(h.high) - static_cast<double>(h.low)) / static_cast<double>(bins);
  const double level_width = bin_width * static_cast<double>(end - start + 1) / levels;
  if (level_width == 0) return 0;
  const auto width = static_cast<float>(bin_width), step = static_cast<float>(level_width);
  const auto half = static_cast<float>(level_width / 2);
  const auto last = static_cast<float>(levels - 1);
  double total = 0;
  for (std::int64_t i = 0; i < bins; ++i) {
    const float begin = static_cast<float>(i - start) * width, stop = begin + width;
    const float first_level = std::clamp(floored_quotient(begin, step), 0.0F, last);
    const float last_level = std::clamp(floored_quotient(stop, step), 0.0F, last);
    const float density = h.counts[static_cast<std::size_t>(i)] / width;
    float error = spread_error(begin - (first_level + 0.5F) * step, half, density);
    error += (last_level - first_level - 1) * spread_error(-half, half, density);
    error += spread_error(-half, stop - (last_level * step + half), density);
    total += static_cast<double>(error);
  }
  return total;
}

}  // namespace

std::vector<float> histc(const std::vector<float>& values, std::size_t bins, float low, float high) {
  if (low == high) low -= 1, high += 1;
  std::vector<float> counts(bins);
  for (const float v : values) {
    if (!(v >= low && v <= high)) continue;
    const auto bin = static_cast<std::int64_t>((v - low) * static_cast<float>(bins) / (high - low));
    ++counts[static_cast<std::size_t>(std::min(bin, static_cast<std::int64_t>(bins) - 1))];
  }
  return counts;
}

void add_to(Histogram& h, const std::vector<float>& values, std::size_t bins, float low, float high) {
  if (h.counts.empty()) {
    h = {histc(values, bins, low, high), low, high};
    return;
  }
  const float new_low = std::min(h.low, low), new_high = std::max(h.high, high);
  std::vector<float> counts = histc(values, bins, new_low, new_high), before = h.counts;
  if (new_low != h.low || new_high != h.high) {
    if (h.low == h.high) {
      const float all = std::accumulate(before.begin(), before.end(), 0.0F);
      before = histc({h.low}, bins, new_low, new_high);
      for (float& c : before) c *= all;
    } else {
      before = upscaled(h, new_low, new_high);
    }
  }
  for (std::size_t i = 0; i < bins; ++i) counts[i] += before[i];
  h = {std::move(counts), new_low, new_high};
}

ValueRange least_squares_range(const Histogram& h, int levels) {
  const auto bins = static_cast<std::int64_t>(h.counts.size());
  const float bin_width = (h.high - h.low) / static_cast<float>(bins);
  std::vector<float> sums(h.counts.size());
  double running = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    running += static_cast<double>(h.counts[i]);
    sums[i] = static_cast<float>(running);
  }
  const double total = static_cast<double>(static_cast<float>(running));
  constexpr double kStep = 1e-5;
  double alpha = 0, beta = 1, least = std::numeric_limits<double>::infinity();
  std::int64_t start = 0, end = bins - 1;
  while (alpha < beta) {
    const double next_alpha = alpha + kStep, next_beta = beta - kStep;
    std::int64_t left = start, right = end;
    const auto below = static_cast<float>(next_alpha * total), above = static_cast<float>(next_beta * total);
    while (left < end && sums[static_cast<std::size_t>(left)] < below) ++left;
    while (right > start && sums[static_cast<std::size_t>(right)] > above) --right;
    std::int64_t next_start = start, next_end = end;
    if (left - start > end - right) {
      next_start = left;
      alpha = next_alpha;
    } else {
      next_end = right;
      beta = next_beta;
    }
    if (next_start == start && next_end == end) continue;
    const double error = squared_error(h, levels, next_start, next_end);
    if (error > least) break;
    least = error;
    start = next_start;
    end = next_end;
  }
  return {h.low + bin_width * static_cast<float>(start), h.low + bin_width * static_cast<float>(end + 1)};
}

ValueRange percentile_range(const Histogram& h, double share) {
  const auto bins = static_cast<std::int64_t>(h.counts.size());
  const double total = std::accumulate(h.counts.begin(), h.counts.end(), 0.0);
  const double width = (static_cast<double>(h.high) - static_cast<double>(h.low)) / static_cast<double>(bins);
  const double cut = 1 - share;
  const double below = h.low >= 0    ? 0
                       : h.high <= 0 ? cut
                                     : cut / 2,
               above = h.high <= 0  ? 0
                       : h.low >= 0 ? cut
                                    : cut / 2;
  // How far from an end, in bins, the values that are cut there reach.
  const auto reach = [&](double part, bool from_high) {
    double left = part * total;
    if (left <= 0) return 0.0;
    for (std::int64_t i = 0; i < bins; ++i) {
      const double count = h.counts[static_cast<std::size_t>(from_high ? bins - 1 - i : i)];
      if (count >= left) return static_cast<double>(i) + left / count;
      left -= count;
    }
    return static_cast<double>(bins);
  };
  return {static_cast<float>(h.low + width * reach(below, false)),
          static_cast<float>(h.high - width * reach(above, true))};
}

float least_divergent_bound(const Histogram& h, std::size_t levels) {
  const std::size_t bins = h.counts.size();
  double least = std::numeric_limits<double>::infinity();
  std::size_t best = bins;
  const double all = std::accumulate(h.counts.begin(), h.counts.end(), 0.0);
  double inside = 0;
  std::vector<double> sums(levels), occupied(levels);
  for (std::size_t i = 0; i < std::min(levels, bins); ++i) inside += static_cast<double>(h.counts[i]);
  for (std::size_t n = std::min(levels, bins); n <= bins; ++n) {
    if (n > std::min(levels, bins)) inside += static_cast<double>(h.counts[n - 1]);
    if (inside == 0) continue;
    std::fill(sums.begin(), sums.end(), 0);
    std::fill(occupied.begin(), occupied.end(), 0);
    for (std::size_t j = 0; j < n; ++j) {
      if (h.counts[j] == 0) continue;
      sums[j * levels / n] += static_cast<double>(h.counts[j]);
      ++occupied[j * levels / n];
    }
    double divergence = 0;
    for (std::size_t j = 0; j < n; ++j) {
      const double p = (static_cast<double>(h.counts[j]) + (j == n - 1 ? all - inside : 0)) / all;
      if (p <= 0) continue;
      const std::size_t level = j * levels / n;
      const double q = h.counts[j] == 0 ? 0 : sums[level] / occupied[level] / inside;
      divergence += q == 0 ? std::numeric_limits<double>::infinity() : p * std::log(p / q);
    }
    if (divergence <= least) {
      least = divergence;
      best = n;
    }
  }
  return h.high * (static_cast<float>(best) / static_cast<float>(bins));
}

}  // namespace halfstep::quant
