// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/random.h"

#include <cmath>
#include <utility>

#include "halfstep/core/box_muller.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"

namespace halfstep {

void Generator::manual_seed(std::uint64_t seed) noexcept { set_state({seed, 0}); }

PhiloxState Generator::state() const noexcept {
  std::lock_guard lock(mutex_);
  return state_;
}

Generator::~Generator() {
  if (captured_.load(std::memory_order_relaxed)) ++capture_generation();
}

void Generator::set_state(PhiloxState state) noexcept {
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("it seeds a generator");
  std::lock_guard lock(mutex_);
  state_ = state;
}

PhiloxState Generator::reserve(std::uint64_t n_blocks) noexcept {
  std::lock_guard lock(mutex_);
  const PhiloxState start = state_;
  state_.offset += n_blocks;
  return start;
}

Generator& default_generator() noexcept {
  // Never destroyed: threads that outlive main may still draw.
  static Generator& generator = *new Generator(0);
  return generator;
}

void manual_seed(std::uint64_t seed) noexcept { default_generator().manual_seed(seed); }

void randperm(PhiloxState state, std::int64_t n, std::int64_t* out) {
  if (n < 0) fail("randperm: expected n >= 0, got {}", n);
  for (std::int64_t i = 0; i < n; ++i) out[i] = i;
  for (std::int64_t i = n - 1; i > 0; --i) {
    const auto at = static_cast<std::uint64_t>(i);
    std::swap(out[i], out[integer_below(state, at, at + 1)]);
  }
}

double RandomStream::uniform(double low, double high) noexcept {
  const double value = low + (high - low) * uniform64();
  // The sum may round up to `high`, which does not belong to the interval.
  return value < high || !(low < high) ? value : std::nextafter(high, low);
}

std::uint64_t RandomStream::below(std::uint64_t n) noexcept {
  std::uint64_t result = 0;
  while (!detail::map_below(next64(), n, result)) {
  }
  return result;
}

double RandomStream::normal() noexcept {
  const std::uint64_t radius = next64();
  return normal_pair64(radius, next64()).first;
}

}  // namespace halfstep
