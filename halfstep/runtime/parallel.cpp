// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/parallel.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>

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

void parallel_ranges(std::int64_t n, std::int64_t ranges, RangeFunction body, void* context) {
  struct Call {
    std::int64_t size, longer;
    RangeFunction body;
    void* context;
    FirstException first;  // Exceptions must not leave a worker: they are kept and thrown again by the caller.
  } call = {n / ranges, n % ranges, body, context, {}};
  pool_run(
      ranges, num_threads(),
      [](void* opaque, std::int64_t range) {
        Call& c = *static_cast<Call*>(opaque);
        const Inside inside;
        const std::int64_t begin = range * c.size + std::min(range, c.longer);
        try {
          c.body(c.context, begin, begin + c.size + (range < c.longer ? 1 : 0));
        } catch (...) {
          c.first.keep(range);
        }
      },
      &call);
  call.first.rethrow_any();
}

}  // namespace detail
}  // namespace halfstep
