// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/thread_pool_internal.h"

#include <fcntl.h>
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
#include <charconv>
#include <climits>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

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
// How often a thread checks how long it was runnable without a processor, and what counts as contention: at least this
// long in total, and a quarter of the time that it ran, twice within kAgain. Interrupts and short kernel work stay
// below. A program that competes gets a time slice every 5 to 24 ms. Resting for a daemon that takes a processor for
// some milliseconds, three to five times a second, took 3% of a training step's time.
constexpr std::int64_t kLookAfter = 5'000'000;
constexpr std::int64_t kDelayed = 500'000;
constexpr std::int64_t kAgain = 50'000'000;
// Without those counters: a gap this long between two looks at the clock of a spinning thread. Measured on two cores
// with two MLP trainings: 60 microseconds give 107 to 112% of the steps that one makes, 150 give 71%, since gaps are
// often shorter; with 30 a quiet machine's interrupts are taken for others, and one makes 66%.
constexpr std::int64_t kPutAside = 60'000;
// How long a worker rests after contention. The time doubles if there is contention again within kStill after a rest.
constexpr std::int64_t kRest = 20'000'000;
constexpr std::int64_t kRestAtMost = 320'000'000;
constexpr std::int64_t kStill = 30'000'000;
// Resting workers are offered a call once its caller has worked on it for this long. A worker that is preempted in the
// middle of a range blocks its caller for a time slice of some milliseconds, which only a longer call makes up for.
constexpr std::int64_t kOfferedAfter = 300'000;

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
void futex_wait_for(std::atomic<std::uint32_t>& word, std::uint32_t while_equal, std::int64_t nanoseconds) noexcept {
  const timespec most{static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, while_equal, &most, nullptr, 0);
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
  std::atomic<int> spinners{0};           ///< workers up to this number spin before they sleep
  std::atomic<std::uint32_t> late{0};     ///< raised with each call that is offered late; resting workers watch it
  std::atomic<int> resting{0};            ///< workers
  std::atomic<int> rests_asked_for{0};    ///< by callers
  std::atomic<bool> delays_known{false};  ///< Linux counts them
  std::atomic<int> workers{0};
  std::mutex growing;
  bool cannot_grow = false;  // under `growing`
};

/// How long the calling thread ran, and how long it was runnable without a processor, as Linux counts.
class Delays {
 public:
  /// Reads the counters if the last time is long enough ago. Whether there is contention.
  bool look(Pool& pool) noexcept {
    const std::int64_t t = now();
    if (t - at_ < kLookAfter) return false;
    at_ = t;
    std::int64_t ran = 0, delayed = 0;
    if (!read(ran, delayed)) return false;
    pool.delays_known.store(true, std::memory_order_relaxed);
    return contention_.check(t, ran, delayed);
  }
  void rested() noexcept { contention_.rested(now()); }

 private:
  // Opened each time: it takes microseconds, and a file kept open would be another thread's in a child of fork().
  static bool read(std::int64_t& ran, std::int64_t& delayed) noexcept {
    const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    std::array<char, 64> text;
    const ssize_t n = ::read(file, text.data(), text.size());
    close(file);
    if (n <= 0) return false;
    const char* const end = text.data() + n;
    const auto [space, error] = std::from_chars(text.data(), end, ran);
    return error == std::errc() && space != end && std::from_chars(space + 1, end, delayed).ec == std::errc();
  }

  Contention contention_;
  std::int64_t at_ = 0;
};
thread_local Delays t_delays;

enum class Spun : std::uint8_t { ready, too_long, put_aside };

/// Spins until `ready()`, for `budget` at most.
template <class Ready>
Spun spin(const Pool& pool, std::int64_t budget, const Ready& ready) noexcept {
  if (ready()) return Spun::ready;
  if (budget <= 0) return Spun::too_long;
  const std::int64_t start = now();
  for (std::int64_t last = start;;) {
    for (int i = 0; i < 8; ++i) {
      relax();
      if (ready()) return Spun::ready;
    }
    const std::int64_t t = now();
    if (t - last > kPutAside && !pool.delays_known.load(std::memory_order_relaxed)) {
      return ready() ? Spun::ready : Spun::put_aside;
    }
    if (t - start > budget) return Spun::too_long;
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

/// Takes no ranges for `length` nanoseconds, except of calls that are offered late. `from` as in help(). Returns the
/// time at which the rest ended.
std::int64_t rest(Pool& pool, int from, std::int64_t length) noexcept {
  const std::int64_t end = now() + length;
  std::uint32_t seen = pool.late.load(std::memory_order_seq_cst);
  pool.resting.fetch_add(1, std::memory_order_seq_cst);
  pool.rests_asked_for.store(0, std::memory_order_relaxed);  // one rest answers all requests so far
  for (std::int64_t t = now(); t < end; t = now()) {
    futex_wait_for(pool.late, seen, end - t);
    const std::uint32_t late = pool.late.load(std::memory_order_seq_cst);
    if (late != seen) help(pool, from);
    seen = late;
  }
  pool.resting.fetch_sub(1, std::memory_order_seq_cst);
  return end;
}

/// Takes a caller's request that a worker should rest; false: there is none.
bool asked_to_rest(Pool& pool) noexcept {
  int n = pool.rests_asked_for.load(std::memory_order_relaxed);
  return n > 0 && pool.rests_asked_for.compare_exchange_strong(n, n - 1, std::memory_order_relaxed);
}

void work(Pool& pool, int index) noexcept {
  pthread_setname_np(pthread_self(), "halfstep");
  const int from = index % kSlots;
  std::int64_t length = kRest, rested_until = -kStill;
  for (;;) {
    const std::uint32_t seen = pool.epoch.load(std::memory_order_seq_cst);
    help(pool, from);
    const bool may_spin = index <= pool.spinners.load(std::memory_order_relaxed);
    const auto changed = [&] { return pool.epoch.load(std::memory_order_relaxed) != seen; };
    Spun spun = Spun::too_long;
    if (may_spin && (t_delays.look(pool) || asked_to_rest(pool))) {
      spun = Spun::put_aside;
    } else {
      spun = spin(pool, may_spin ? kIdleSpin : 0, changed);
    }
    if (spun == Spun::ready) continue;
    if (spun == Spun::put_aside) {
      length = now() - rested_until < kStill ? std::min(2 * length, kRestAtMost) : kRest;
      rested_until = rest(pool, from, length);
      t_delays.rested();
      continue;
    }
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

/// A call that workers may help with from now on.
void offer(Pool& pool, std::uint64_t slot_bit, std::int64_t helpers) noexcept {
  pool.open.fetch_or(slot_bit, std::memory_order_seq_cst);
  pool.epoch.fetch_add(1, std::memory_order_seq_cst);
  if (pool.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake(pool.epoch, static_cast<int>(helpers));
}

/// A call that resting workers don't know of yet.
struct LateOffer {
  Pool& pool;
  std::uint64_t slot_bit;
  std::int64_t helpers, begun;

  void make() const noexcept {
    offer(pool, slot_bit, helpers);
    pool.late.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(pool.late, static_cast<int>(helpers));
  }
};
thread_local LateOffer* t_late_offer = nullptr;  // of the call that this thread is in; null once it is made

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

bool Contention::check(std::int64_t now, std::int64_t ran, std::int64_t delayed) noexcept {
  const bool kept = known_ && delayed - delayed_ >= kDelayed && 4 * (delayed - delayed_) >= ran - ran_;
  known_ = true, ran_ = ran, delayed_ = delayed;
  if (!kept) return false;
  const bool again = kept_ && now - last_ <= kAgain;
  kept_ = true, last_ = now;
  return again;
}

void pool_between_jobs() noexcept {
  const LateOffer* const call = t_late_offer;
  if (call == nullptr || now() - call->begun < kOfferedAfter) return;
  t_late_offer = nullptr;
  call->make();
}

void pool_ask_for_rest() noexcept { pool().rests_asked_for.store(1, std::memory_order_relaxed); }
int pool_resting() noexcept { return pool().resting.load(std::memory_order_seq_cst); }

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
  const int resting = may_spin ? std::min(p.resting.load(std::memory_order_seq_cst), threads - 1) : 0;
  const std::int64_t helpers = std::min<std::int64_t>(ranges - 1, threads - 1);
  if (resting < threads - 1) offer(p, bit, std::min<std::int64_t>(helpers, threads - 1 - resting));
  LateOffer late_offer{p, bit, helpers, resting > 0 ? now() : 0};
  LateOffer* const outer = std::exchange(t_late_offer, resting > 0 ? &late_offer : nullptr);

  std::uint32_t own = 0;
  for (std::int64_t range = 0; range >= 0; range = slot.take()) {
    body(context, range);
    ++own;
  }
  t_late_offer = outer;
  p.open.fetch_and(~bit, std::memory_order_relaxed);
  const auto others = static_cast<std::uint32_t>(ranges) - own;
  const auto all_done = [&] { return slot.done.load(std::memory_order_acquire) == others; };
  const Spun spun = spin(p, may_spin ? kWaitSpin : 0, all_done);
  if (spun != Spun::ready) {
    slot.waiting.store(1, std::memory_order_seq_cst);
    for (std::uint32_t done; (done = slot.done.load(std::memory_order_seq_cst)) != others;) futex_wait(slot.done, done);
    slot.waiting.store(0, std::memory_order_relaxed);
  }
  // The caller can't rest. A worker does, which frees a processor.
  if (may_spin && (t_delays.look(p) || spun == Spun::put_aside)) p.rests_asked_for.store(1, std::memory_order_relaxed);
  p.free_slots.fetch_or(bit, std::memory_order_release);
}

}  // namespace halfstep::detail
