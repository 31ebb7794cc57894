// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/thread_pool_internal.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <climits>
#include <mutex>
#include <system_error>
#include <thread>

#include "halfstep/runtime/processors_internal.h"

namespace halfstep::detail {
namespace {

using Body = void (*)(void* context, std::int64_t range);

constexpr int kSlots = 64;  // calls at a time that workers can help with; one more runs on its caller alone
constexpr std::int64_t kMaxRanges = 65535;

// Nanoseconds. A worker that finds nothing to do spins for a while, since the next call of a training step comes within
// microseconds and waking a thread takes 50. A caller spins for what a range of a small call takes.
constexpr std::int64_t kIdleSpin = 1'000'000;
constexpr std::int64_t kWaitSpin = 100'000;
// A gap this long between two looks at the clock of a spinning thread means that the system ran another thread here.
// Measured on two cores with two MLP trainings: 60 microseconds give 107 to 112% of the steps that one makes, 150 give
// 71%, since gaps are often shorter; with 30 a quiet machine's interrupts are taken for others, and one makes 66%.
constexpr std::int64_t kPutAside = 60'000;
// How long after such a sign nobody spins.
constexpr std::int64_t kBusyFor = 20'000'000;

std::int64_t now() noexcept {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t while_equal) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, while_equal, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<std::uint32_t>& word, int count) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

/// A call that workers may help with. Slots are used again and never freed, so that a worker that comes late reads a
/// valid one: its ticket says that nothing is left.
struct alignas(128) Slot {
  /// Generation (32 bits), ranges (16), next range to take (16).
  std::atomic<std::uint64_t> ticket{0};
  std::atomic<Body> body{nullptr};
  std::atomic<void*> context{nullptr};
  alignas(64) std::atomic<std::uint32_t> done{0};  ///< ranges that have returned, but for those of the caller
  std::atomic<std::uint32_t> waiting{0};           ///< the caller sleeps on `done`

  static std::uint32_t ranges(std::uint64_t t) { return static_cast<std::uint32_t>(t >> 16) & 0xFFFF; }
  static std::uint32_t next(std::uint64_t t) { return static_cast<std::uint32_t>(t) & 0xFFFF; }

  /// Takes the next range; -1: none left.
  std::int64_t take() noexcept {
    std::uint64_t t = ticket.load(std::memory_order_acquire);
    while (next(t) < ranges(t)) {
      if (ticket.compare_exchange_weak(t, t + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return next(t);
    }
    return -1;
  }
};

struct Pool {
  std::array<Slot, kSlots> slots;
  alignas(64) std::atomic<std::uint64_t> open{0};   ///< a bit for each slot that may have ranges left
  alignas(64) std::atomic<std::uint32_t> epoch{0};  ///< raised with each call; idle workers watch it
  alignas(64) std::atomic<std::uint64_t> free_slots{~std::uint64_t{0}};
  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<int> spinners{0};  ///< workers up to this number spin before they sleep
  std::atomic<std::int64_t> busy_until{0};
  std::atomic<int> workers{0};
  std::mutex growing;
  bool cannot_grow = false;  // under `growing`
};

/// Spins until `ready()`, for `budget` at most. False: the budget is used up, or others want the processor.
template <class Ready>
bool spin(Pool& pool, std::int64_t budget, const Ready& ready) noexcept {
  if (ready()) return true;
  const std::int64_t start = now();
  if (budget <= 0 || start < pool.busy_until.load(std::memory_order_relaxed)) return false;
  for (std::int64_t last = start;;) {
    for (int i = 0; i < 8; ++i) {
      relax();
      if (ready()) return true;
    }
    const std::int64_t t = now();
    if (t - last > kPutAside) {
      pool.busy_until.store(t + kBusyFor, std::memory_order_relaxed);
      return ready();
    }
    if (t - start > budget) return false;
    last = t;
  }
}

/// Takes ranges of open calls as long as there are any. `from`: where to look first, so that workers spread.
void help(Pool& pool, int from) noexcept {
  for (bool found = true; found;) {
    found = false;
    for (std::uint64_t rest = std::rotr(pool.open.load(std::memory_order_acquire), from); rest != 0; rest &= rest - 1) {
      Slot& slot = pool.slots[static_cast<std::size_t>((std::countr_zero(rest) + from) % kSlots)];
      for (std::int64_t range = slot.take(); range >= 0; range = slot.take()) {
        found = true;
        slot.body.load(std::memory_order_relaxed)(slot.context.load(std::memory_order_relaxed), range);
        // One by one: the call may end, and the slot begin another, as soon as its last range is counted.
        slot.done.fetch_add(1, std::memory_order_seq_cst);
        if (slot.waiting.load(std::memory_order_seq_cst) != 0) futex_wake(slot.done, 1);
      }
    }
  }
}

void work(Pool& pool, int index) noexcept {
  pthread_setname_np(pthread_self(), "halfstep");
  for (;;) {
    const std::uint32_t seen = pool.epoch.load(std::memory_order_seq_cst);
    help(pool, index % kSlots);
    const bool may_spin = index <= pool.spinners.load(std::memory_order_relaxed);
    const auto changed = [&] { return pool.epoch.load(std::memory_order_relaxed) != seen; };
    if (spin(pool, may_spin ? kIdleSpin : 0, changed)) continue;
    pool.sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (pool.epoch.load(std::memory_order_seq_cst) == seen) futex_wait(pool.epoch, seen);
    pool.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

std::atomic<Pool*> g_pool{nullptr};
std::atomic<Pool*> g_of_parent{nullptr};  // so that a leak checker finds it

// A child of fork() has none of the workers, and what they held stays held: it makes a pool anew.
void forget_in_child() { g_of_parent.store(g_pool.exchange(nullptr)); }

Pool& pool() {
  if (Pool* p = g_pool.load(std::memory_order_acquire)) return *p;
  static std::mutex mutex;
  static const int registered = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                                               [] {
                                                 forget_in_child();
                                                 mutex.unlock();
                                               });
  (void)registered;
  const std::lock_guard lock(mutex);
  Pool* p = g_pool.load(std::memory_order_acquire);
  // Never freed: workers use it until the process ends, after static objects are gone.
  if (p == nullptr) g_pool.store(p = new Pool, std::memory_order_release);
  return *p;
}

void grow(Pool& pool, int workers) {
  const std::lock_guard lock(pool.growing);
  if (pool.cannot_grow) return;
  // A new thread starts with its maker's mask: signals to the process are for the program's own threads. A worker takes
  // what is its own: faults, for a program that reports crashes, and the ticks of profilers.
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGPROF}) sigdelset(&blocked, own);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  while (pool.workers.load(std::memory_order_relaxed) < workers) {
    const int index = pool.workers.load(std::memory_order_relaxed) + 1;
    try {
      std::thread([&pool, index] { work(pool, index); }).detach();
    } catch (const std::system_error&) {
      pool.cannot_grow = true;  // no thread to be had: those that are there, and callers, do the work
      break;
    }
    pool.workers.store(index, std::memory_order_relaxed);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

/// A free slot's number; -1: none.
int take_slot(Pool& pool) noexcept {
  std::uint64_t free = pool.free_slots.load(std::memory_order_relaxed);
  while (free != 0) {
    const int slot = std::countr_zero(free);
    if (pool.free_slots.compare_exchange_weak(free, free & ~(std::uint64_t{1} << slot), std::memory_order_acquire,
                                              std::memory_order_relaxed)) {
      return slot;
    }
  }
  return -1;
}

}  // namespace

void pool_run(std::int64_t ranges, int threads, Body body, void* context) {
  Pool& p = pool();
  if (p.workers.load(std::memory_order_relaxed) < threads - 1) grow(p, threads - 1);
  const int number = ranges > 1 && ranges <= kMaxRanges && threads > 1 ? take_slot(p) : -1;
  if (number < 0) {
    for (std::int64_t range = 0; range < ranges; ++range) body(context, range);
    return;
  }
  Slot& slot = p.slots[static_cast<std::size_t>(number)];
  const std::uint64_t bit = std::uint64_t{1} << number;
  slot.body.store(body, std::memory_order_relaxed);
  slot.context.store(context, std::memory_order_relaxed);
  slot.done.store(0, std::memory_order_relaxed);
  const std::uint64_t generation = (slot.ticket.load(std::memory_order_relaxed) >> 32) + 1;
  // The first range is the caller's.
  slot.ticket.store(generation << 32 | static_cast<std::uint64_t>(ranges) << 16 | 1, std::memory_order_release);
  // More threads than processors would spin in each other's way.
  const bool may_spin = threads <= processors();
  const int spinners = may_spin ? threads - 1 : 0;
  if (p.spinners.load(std::memory_order_relaxed) != spinners) p.spinners.store(spinners, std::memory_order_relaxed);
  p.open.fetch_or(bit, std::memory_order_seq_cst);
  p.epoch.fetch_add(1, std::memory_order_seq_cst);
  if (p.sleepers.load(std::memory_order_seq_cst) > 0) {
    futex_wake(p.epoch, static_cast<int>(std::min<std::int64_t>(ranges - 1, threads - 1)));
  }

  std::uint32_t own = 0;
  for (std::int64_t range = 0; range >= 0; range = slot.take()) {
    body(context, range);
    ++own;
  }
  p.open.fetch_and(~bit, std::memory_order_relaxed);
  const auto others = static_cast<std::uint32_t>(ranges) - own;
  const auto all_done = [&] { return slot.done.load(std::memory_order_acquire) == others; };
  if (!spin(p, may_spin ? kWaitSpin : 0, all_done)) {
    slot.waiting.store(1, std::memory_order_seq_cst);
    for (std::uint32_t done; (done = slot.done.load(std::memory_order_seq_cst)) != others;) futex_wait(slot.done, done);
    slot.waiting.store(0, std::memory_order_relaxed);
  }
  p.free_slots.fetch_or(bit, std::memory_order_release);
}

}  // namespace halfstep::detail
