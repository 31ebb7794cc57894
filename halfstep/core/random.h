// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>

#include "halfstep/core/export.h"
#include "halfstep/core/philox.h"

namespace halfstep {

/// Hands out parts of one Philox stream. Any thread may call any member. An op reserves as many blocks as its output
/// needs, and the kernel computes element i from the state it received, so results depend on the order of the ops but
/// not on the number of threads.
class HS_API Generator {
 public:
  explicit Generator(std::uint64_t seed = 0) noexcept : state_{seed, 0} {}
  Generator(const Generator&) = delete;
  ~Generator();
  Generator& operator=(const Generator&) = delete;

  /// Starts the stream of `seed` from its beginning.
  void manual_seed(std::uint64_t seed) noexcept;
  std::uint64_t seed() const noexcept { return state().seed; }
  /// Blocks handed out so far.
  std::uint64_t offset() const noexcept { return state().offset; }
  /// Seed and offset together, for checkpoints.
  PhiloxState state() const noexcept;
  void set_state(PhiloxState state) noexcept;
  /// Takes the next `n_blocks` blocks of four words and returns where they start.
  PhiloxState reserve(std::uint64_t n_blocks) noexcept;
  /// A captured step draws from it: when it is destroyed, the step is captured again.
  void note_captured() noexcept { captured_.store(true, std::memory_order_relaxed); }

 private:
  std::atomic<bool> captured_{false};
  mutable std::mutex mutex_;
  PhiloxState state_;
};

/// The generator that ops use when they are given none. It starts with seed 0, so that a program that sets no seed
/// still gives the same results from run to run.
HS_API Generator& default_generator() noexcept;

/// Seeds the default generator.
HS_API void manual_seed(std::uint64_t seed) noexcept;

/// A random permutation of 0 … n-1, all n! equally likely (Fisher and Yates; Durstenfeld's form), from the
/// randperm_blocks(n) blocks at `state`. Throws Error if n is negative.
HS_API void randperm(PhiloxState state, std::int64_t n, std::int64_t* out);
constexpr std::uint64_t randperm_blocks(std::int64_t n) noexcept {
  return philox_blocks64(n > 0 ? static_cast<std::uint64_t>(n) : 0);
}

/// A sequential generator for host code outside kernels, such as image augmentation. It satisfies
/// UniformRandomBitGenerator; unlike the standard library's distributions, its members give the same numbers with every
/// standard library. Do not share it between threads; derive a seed for each instead.
class HS_API RandomStream {
 public:
  using result_type = std::uint32_t;
  explicit RandomStream(std::uint64_t seed, std::uint64_t offset = 0) noexcept : state_{seed, offset} {}
  explicit RandomStream(PhiloxState state) noexcept : state_(state) {}

  /// The range of a word, as required by UniformRandomBitGenerator, and the next word.
  static constexpr result_type min() noexcept { return 0; }
  static constexpr result_type max() noexcept { return std::numeric_limits<result_type>::max(); }
  result_type operator()() noexcept {
    if (used_ == 4) {
      block_ = philox_block(state_, 0);
      ++state_.offset;
      used_ = 0;
    }
    return block_[used_++];
  }
  /// The next two words as one number.
  std::uint64_t next64() noexcept {
    const std::uint64_t low = (*this)();
    return std::uint64_t{(*this)()} << 32 | low;
  }
  /// In [0, 1), 24 bits; in [0, 1), 53 bits; in [low, high).
  float uniform() noexcept { return uniform_f32((*this)()); }
  double uniform64() noexcept { return uniform_f64(next64()); }
  double uniform(double low, double high) noexcept;
  bool bernoulli(double p) noexcept { return (*this)() < bernoulli_threshold(p); }
  /// In [0, n), n > 0, each with probability exactly 1 / n.
  std::uint64_t below(std::uint64_t n) noexcept;
  /// Standard normal, from 128 bits.
  double normal() noexcept;

 private:
  PhiloxState state_;
  PhiloxBlock block_{};
  std::uint32_t used_ = 4;
};

}  // namespace halfstep
