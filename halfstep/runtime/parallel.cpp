// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/parallel.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/error.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/processors_internal.h"
#include "halfstep/runtime/thread_pool_internal.h"

namespace halfstep {
namespace {

// A limit for mistakes: each thread takes memory, and the kernels scratch for each.
constexpr int kMostThreads = 4096;

thread_local bool t_inside = false;

/// Marks the calling thread as working on a range, and as it was before when it goes.
class Inside {
 public:
  Inside() : before_(t_inside) { t_inside = true; }
  ~Inside() { t_inside = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  bool before_;
};

/// The number in an environment variable, 0 where it has none. OMP_NUM_THREADS may be a list, of which the first
/// counts.
int environment_threads(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return 0;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (value >= 1 && value <= kMostThreads && (*end == '\0' || *end == ',')) return static_cast<int>(value);
  log(LogLevel::warning, std::string(variable) + " is ignored: expected a number of threads from 1 to " +
                             std::to_string(kMostThreads) + ", got '" + text + "'");
  return 0;
}

int default_threads() {
  if (const int n = environment_threads("HALFSTEP_THREADS")) return n;
  if (const int n = environment_threads("OMP_NUM_THREADS")) return n;
  return detail::processors();
}

std::atomic<int>& threads_setting() {
  static std::atomic<int> threads{default_threads()};
  return threads;
}

/// The jobs of a worker that nobody has taken. The worker takes the first one, thieves take the last one.
class alignas(64) Left {
 public:
  void set(std::uint32_t first, std::uint32_t end) { left_.store(std::uint64_t{first} << 32 | end); }
  std::uint32_t count() const { return count_in(left_.load(std::memory_order_relaxed)); }
  /// -1: none is left.
  std::int64_t take_first() noexcept { return take(kFirst); }
  std::int64_t take_last() noexcept { return take(kLast); }

 private:
  // The upper half of `left_` is the first job, the lower half the one behind the last.
  static constexpr std::uint64_t kFirst = std::uint64_t{1} << 32, kLast = ~std::uint64_t{0};

  static std::uint32_t first_in(std::uint64_t l) { return static_cast<std::uint32_t>(l >> 32); }
  static std::uint32_t end_in(std::uint64_t l) { return static_cast<std::uint32_t>(l); }
  static std::uint32_t count_in(std::uint64_t l) { return end_in(l) - first_in(l); }

  std::int64_t take(std::uint64_t step) noexcept {
    std::uint64_t l = left_.load(std::memory_order_relaxed);
    while (count_in(l) > 0) {
      if (left_.compare_exchange_weak(l, l + step)) return step == kFirst ? first_in(l) : end_in(l) - 1;
    }
    return -1;
  }

  std::atomic<std::uint64_t> left_{0};
};

/// The exception of the lowest range that threw, whichever came first in time: the same one in every run.
class FirstException {
 public:
  void keep(std::int64_t range) {
    const std::lock_guard lock(mutex_);
    if (exception_ && range_ < range) return;
    range_ = range;
    exception_ = std::current_exception();
  }
  void rethrow_any() const {
    if (exception_) std::rethrow_exception(exception_);
  }

 private:
  std::mutex mutex_;
  std::int64_t range_ = 0;
  std::exception_ptr exception_;
};

}  // namespace

int num_threads() noexcept { return threads_setting().load(std::memory_order_relaxed); }

void set_num_threads(int n) {
  if (n < 1 || n > kMostThreads) {
    throw Error("set_num_threads: expected 1 to " + std::to_string(kMostThreads) + " threads, got " +
                std::to_string(n));
  }
  threads_setting().store(n, std::memory_order_relaxed);
}

bool in_parallel_region() noexcept { return t_inside; }

namespace detail {

std::int64_t num_ranges(std::int64_t n, std::int64_t grain) noexcept {
  if (t_inside) return 1;
  const std::int64_t threads = num_threads();
  if (threads == 1) return 1;
  return std::clamp<std::int64_t>(n / std::max<std::int64_t>(grain, 1), 1, threads);
}

namespace {

/// Ranges of n items: the first few are one longer.
struct Cut {
  std::int64_t size, longer;
  Cut(std::int64_t n, std::int64_t ranges) : size(n / ranges), longer(n % ranges) {}
  std::int64_t begin(std::int64_t range) const { return range * size + std::min(range, longer); }
};

/// Calls body(worker) for each of `workers`, each of them once, on free threads.
template <class F>
void on_workers(std::int64_t workers, F&& body) {
  pool_run(
      workers, num_threads(),
      [](void* opaque, std::int64_t worker) {
        const Inside inside;
        (*static_cast<std::remove_reference_t<F>*>(opaque))(worker);
      },
      &body);
}

}  // namespace

void parallel_ranges(std::int64_t n, std::int64_t grain, RangeOrder order, RangeFunction body, void* context) {
  constexpr std::int64_t kRangesPerThread = 4;
  const std::int64_t workers = num_ranges(n, grain);
  const std::int64_t ranges =
      std::clamp(n / std::max<std::int64_t>(grain, 1), workers, std::max(workers, kRangesPerThread * workers));
  struct Call {
    Cut cut;
    RangeFunction body;
    void* context;
  } call = {{n, ranges}, body, context};
  parallel_shared(
      ranges, workers, order,
      [](void* opaque, std::int64_t range, std::int64_t) {
        const Call& c = *static_cast<const Call*>(opaque);
        c.body(c.context, c.cut.begin(range), c.cut.begin(range + 1));
      },
      &call);
}

void parallel_shared(std::int64_t jobs, std::int64_t workers, RangeOrder order, JobFunction body, void* context) {
  if (jobs > std::numeric_limits<std::uint32_t>::max()) {
    throw Error("parallel_jobs: expected less than 2^32 jobs, got " + std::to_string(jobs));
  }
  constexpr std::int64_t kFew = 16;  // workers whose numbers need no memory
  std::array<Left, kFew> few;
  std::vector<Left> more(static_cast<std::size_t>(workers > kFew ? workers : 0));
  const std::span<Left> left =
      workers > kFew ? std::span<Left>(more) : std::span<Left>(few).first(static_cast<std::size_t>(workers));
  for (std::int64_t w = 0; w < workers; ++w) {
    left[static_cast<std::size_t>(w)].set(static_cast<std::uint32_t>(w * jobs / workers),
                                          static_cast<std::uint32_t>((w + 1) * jobs / workers));
  }
  FirstException first;  // Exceptions must not leave a worker: they are kept and thrown again by the caller.
  on_workers(workers, [&](std::int64_t worker) {
    Left& own = left[static_cast<std::size_t>(worker)];
    const auto take = [&](Left& from, bool stolen) {
      return (order == RangeOrder::ascending) != stolen ? from.take_first() : from.take_last();
    };
    const auto next = [&]() -> std::int64_t {
      for (;;) {
        if (const std::int64_t job = take(own, false); job >= 0) return job;
        Left& most = *std::ranges::max_element(left, {}, &Left::count);
        if (most.count() == 0) return -1;
        if (const std::int64_t job = take(most, true); job >= 0) return job;
      }
    };
    for (std::int64_t job = next(); job >= 0; job = next()) {
      try {
        body(context, job, worker);
      } catch (...) {
        first.keep(job);
      }
      pool_between_jobs();
    }
  });
  first.rethrow_any();
}

}  // namespace detail
}  // namespace halfstep
