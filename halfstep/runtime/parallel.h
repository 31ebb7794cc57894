// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "halfstep/core/export.h"

namespace halfstep {

/// The maximum number of threads that a parallel_for on this thread uses, at least 1. Initially HALFSTEP_THREADS, else
/// OMP_NUM_THREADS, else the number of processors that this process may use: those in its affinity mask, or fewer if
/// its cgroup has a quota (1.5 processors count as 2).
HS_API int num_threads() noexcept;

/// Sets the number of threads for every later parallel_for, and so for all kernels. Throws Error unless n is 1 to 4096.
/// Threads are created when first needed and live until the process ends. If the system provides fewer, fewer do the
/// work, with the same results. They block signals other than faults and SIGPROF.
HS_API void set_num_threads(int n);

/// Whether the calling thread is inside the body of a parallel_for.
HS_API bool in_parallel_region() noexcept;

namespace detail {
/// Which of its own ranges or jobs a worker takes next. Idle workers steal from the other end.
enum class RangeOrder : std::uint8_t { ascending, descending };
using RangeFunction = void (*)(void* context, std::int64_t begin, std::int64_t end);
HS_API void parallel_ranges(std::int64_t n, std::int64_t grain, RangeOrder order, RangeFunction body, void* context);
using JobFunction = void (*)(void* context, std::int64_t job, std::int64_t worker);
HS_API void parallel_shared(std::int64_t jobs, std::int64_t workers, RangeOrder order, JobFunction body, void* context);
/// The number of threads that share a parallel_for over n items: num_threads(), or fewer if one would get less than a
/// grain.
HS_API std::int64_t num_ranges(std::int64_t n, std::int64_t grain) noexcept;

template <class F>
void parallel_in_order(std::int64_t n, std::int64_t grain, RangeOrder order, F&& f) {
  if (n <= 0) return;
  if (num_ranges(n, grain) <= 1) {
    f(std::int64_t{0}, n);
    return;
  }
  using Body = std::remove_reference_t<F>;
  parallel_ranges(
      n, grain, order,
      [](void* context, std::int64_t begin, std::int64_t end) { (*static_cast<Body*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}
}  // namespace detail

/// Calls `f(begin, end)` on ranges that together cover [0, n): up to four per thread, of at least a grain each. Each
/// thread starts with neighbouring ranges and runs them in order. An idle thread steals the last range of the thread
/// with the most ranges left, so a slow processor delays the call by at most one range.
///
/// The ranges run concurrently if there are processors for them, and otherwise one after the other: each free thread of
/// the process's pool, including the caller, takes the next one, so that a call never waits for a descheduled thread
/// that has not started a range. A range must therefore not wait for another.
///
/// `grain` is the number of items that is worth a thread: about 10 microseconds of work, since offering ranges and
/// waiting for the last takes 1 to 5. With fewer than two grains, with one thread, or inside another parallel_for,
/// `f(0, n)` runs on the calling thread and the pool is not touched. After fork() the child has a pool of its own.
///
/// The ranges depend on n, grain and num_threads() only, so that results that depend on them are the same from run to
/// run, whoever takes which. An exception thrown by `f` reaches the caller once all ranges are done; of several, that
/// of the lowest range.
template <class F>
void parallel_for(std::int64_t n, std::int64_t grain, F&& f) {
  detail::parallel_in_order(n, grain, detail::RangeOrder::ascending, std::forward<F>(f));
}
/// The same, where a thread runs its ranges from the last to the first: for a second pass over memory, which finds the
/// end of the first one in the cache.
template <class F>
void parallel_for_descending(std::int64_t n, std::int64_t grain, F&& f) {
  detail::parallel_in_order(n, grain, detail::RangeOrder::descending, std::forward<F>(f));
}

/// How many workers parallel_jobs() has for `jobs` jobs: the number of threads, or fewer where there are fewer jobs.
inline std::int64_t num_workers(std::int64_t jobs) noexcept { return detail::num_ranges(jobs, 1); }

/// Calls `f(job, worker)` for every job in [0, jobs), each worth a thread. A worker in [0, workers) runs one job at a
/// time, so scratch memory per worker is enough. Each worker starts with a contiguous share of the jobs and runs it in
/// order. An idle worker steals the last job of the worker with the most jobs left, so a slow processor delays the call
/// by at most one job. Results must not depend on which worker runs a job. `workers` is capped at num_workers(jobs),
/// the default.
///
/// An exception thrown by `f` reaches the caller once all jobs are done, or at once where there is one worker; of
/// several, that of the lowest job. Throws Error for 2^32 jobs and more. Otherwise as parallel_for.
template <class F>
void parallel_jobs(std::int64_t jobs, std::int64_t workers, F&& f) {
  workers = std::min(workers, num_workers(jobs));
  if (workers <= 1) {
    for (std::int64_t job = 0; job < jobs; ++job) f(job, std::int64_t{0});
    return;
  }
  using Body = std::remove_reference_t<F>;
  detail::parallel_shared(
      jobs, workers, detail::RangeOrder::ascending,
      [](void* context, std::int64_t job, std::int64_t worker) { (*static_cast<Body*>(context))(job, worker); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}
template <class F>
void parallel_jobs(std::int64_t jobs, F&& f) {
  parallel_jobs(jobs, num_workers(jobs), std::forward<F>(f));
}

}  // namespace halfstep
