// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#ifndef HALFSTEP_STD_THREADS
#include <omp.h>
#endif

#include "halfstep/core/error.h"
#include "halfstep/runtime/log.h"

namespace halfstep {
namespace {

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
  if (value >= 1 && value <= 4096 && (*end == '\0' || *end == ',')) return static_cast<int>(value);
  log(LogLevel::warning,
      std::string(variable) + " is ignored: expected a number of threads from 1 to 4096, got '" + text + "'");
  return 0;
}

int default_threads() {
  if (const int n = environment_threads("HALFSTEP_THREADS")) return n;
  if (const int n = environment_threads("OMP_NUM_THREADS")) return n;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
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
  if (n < 1) throw Error("set_num_threads: expected at least 1 thread, got " + std::to_string(n));
  threads_setting().store(n, std::memory_order_relaxed);
#ifndef HALFSTEP_STD_THREADS
  omp_set_num_threads(n);
#endif
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
  const std::int64_t size = n / ranges, longer = n % ranges;
  // Exceptions must not leave an OpenMP region or a thread: they are kept and thrown again by the caller.
  FirstException first;
  const auto run = [&](std::int64_t range) {
    const Inside inside;
    const std::int64_t begin = range * size + std::min(range, longer);
    try {
      body(context, begin, begin + size + (range < longer ? 1 : 0));
    } catch (...) {
      first.keep(range);
    }
  };
#ifdef HALFSTEP_STD_THREADS
  std::vector<std::thread> workers;
  workers.reserve(static_cast<std::size_t>(ranges - 1));
  for (std::int64_t range = 1; range < ranges; ++range) {
    try {
      workers.emplace_back(run, range);
    } catch (const std::system_error&) {  // No thread to be had: the range is worked on here.
      run(range);
    }
  }
  run(0);
  for (std::thread& worker : workers) worker.join();
#else
  // The team may come out smaller than asked for (a nested region of the user's own, a thread limit): every range is
  // worked on all the same.
#pragma omp parallel num_threads(static_cast <int>(ranges))
  {
    const int team = omp_get_num_threads();
    for (std::int64_t range = omp_get_thread_num(); range < ranges; range += team) run(range);
  }
#endif
  first.rethrow_any();
}

}  // namespace detail
}  // namespace halfstep
