// SPDX-License-Identifier: Apache-2.0
#include "block.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "fiber.h"

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace hscuda::emulator {
namespace {

enum class State : uint8_t { kNew, kReady, kWaiting, kDone };

struct Thread {
  State state;
  Meeting what;
  unsigned number;
  unsigned mask;
  int source;
  uint64_t value;   // what it brings to a meeting
  uint64_t answer;  // what it takes from it
  std::source_location where;
  uint3 index;
  Fiber* fiber;
};

/// Bits for the lanes of a warp.
struct Warp {
  unsigned there;    ///< that the block has
  unsigned waiting;  ///< in a meeting of the warp
  unsigned done;     ///< that have returned
};

enum class Order { kForward, kReverse, kRandom };

const char* name_of(Meeting what) {
  switch (what) {
    case Meeting::kBarrier:
      return "__syncthreads";
    case Meeting::kBarrierOr:
      return "__syncthreads_or";
    case Meeting::kBarrierAnd:
      return "__syncthreads_and";
    case Meeting::kBarrierCount:
      return "__syncthreads_count";
    case Meeting::kSyncWarp:
      return "__syncwarp";
    case Meeting::kShuffle:
      return "a shuffle";
    case Meeting::kVote:
      return "a vote";
    case Meeting::kMatch:
      return "__match_any_sync";
    default:
      return "a reduction of a warp";
  }
}
bool same_place(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && a.column() == b.column();
}
bool of_block(Meeting what) { return what <= Meeting::kBarrierCount; }

std::string text_of(const std::source_location& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line()) + " (" + where.function_name() + ")";
}

/// Runs the threads of one block. There is one, used under the lock that all of the device's work runs under.
class Scheduler {
 public:
  void run(dim3 grid, dim3 block, std::size_t shared, bool alone, const std::function<void()>& body);

  int meet_block(Meeting what, int predicate, const std::source_location& where);
  uint64_t meet_warp(Meeting what, unsigned mask, uint64_t value, int source, const std::source_location& where);
  int lane() const { return static_cast<int>(now_->number % 32); }
  void* shared() {
    if (alone_) wrong("uses dynamic shared memory in a kernel that was launched with .alone = true");
    return shared_.get();
  }
  bool alone() const { return alone_; }

 private:
  static void fiber_main(void* self) { static_cast<Scheduler*>(self)->work(); }
  [[noreturn]] void work();
  void run_block();
  void run_body();
  void resume_here(Thread* thread);
  Thread* pick();
  Fiber* fiber_of(Thread* thread);
  void wait();
  void release(unsigned first, unsigned count, unsigned mask);
  void check_barrier();
  void check_warp(Thread& thread);
  void leave_warp(const Thread& thread);
  void finish_warp(unsigned first, unsigned mask);
  [[noreturn]] void wrong(const std::string& what) const;
  uint64_t random() {
    seed_ += 0x9e3779b97f4a7c15u;
    uint64_t z = seed_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  void read_order();

  const std::function<void()>* body_ = nullptr;
  Order order_ = Order::kForward;
  uint64_t seed_ = 0;
  bool alone_ = true;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  unsigned count_ = 0;
  std::vector<Thread*> ready_;  // a queue, from next_ on
  std::size_t next_ = 0;
  unsigned done_ = 0, at_barrier_ = 0;
  Thread* now_ = nullptr;
  Fiber main_;
  Fiber* running_ = nullptr;  // the fiber that runs, null on the thread's own stack
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::unique_ptr<unsigned char[]> shared_;
  std::size_t shared_size_ = 0;
};

Scheduler& scheduler() {
  // Never destroyed: suspended fibers have nothing to clean up, and others may still run at the program's end.
  static Scheduler* const only = new Scheduler;
  return *only;
}

void Scheduler::wrong(const std::string& what) const {
  std::fprintf(stderr, "CUDA emulator: block (%u, %u, %u), thread (%u, %u, %u) %s\n", blockIdx.x, blockIdx.y,
               blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, what.c_str());
  if (!alone_) {
    // Threads that wait in one place for one thing take one line.
    for (unsigned i = 0; i < count_;) {
      const Thread& first = threads_[i];
      unsigned end = i + 1;
      const auto same = [&](const Thread& t) {
        if (t.state != first.state) return false;
        return t.state != State::kWaiting ||
               (t.what == first.what && same_place(t.where, first.where) && (of_block(t.what) || t.mask == first.mask));
      };
      while (end < count_ && same(threads_[end])) ++end;
      std::string text;
      if (first.state == State::kDone) {
        text = "returned";
      } else if (first.state == State::kWaiting) {
        char mask[32] = "";
        if (!of_block(first.what)) std::snprintf(mask, sizeof mask, " of lanes 0x%08x", first.mask);
        text = std::string("in ") + name_of(first.what) + mask + " at " + text_of(first.where);
      } else {
        text = first.state == State::kNew ? "not started" : "running";
      }
      std::fprintf(stderr, "  threads %u to %u: %s\n", i, end - 1, text.c_str());
      i = end;
    }
  }
  std::abort();
}

// Thread-local variables are touched here only, and not inlined: the caller may have come from another thread of the
// CPU.
void Scheduler::run_body() {
  threadIdx = now_->index;
  (*body_)();
}
void Scheduler::resume_here(Thread* thread) {
  now_ = thread;
  threadIdx = thread->index;
}

Thread* Scheduler::pick() {
  if (next_ == ready_.size()) return nullptr;
  if (order_ == Order::kRandom) std::swap(ready_[next_], ready_[next_ + random() % (ready_.size() - next_)]);
  Thread* thread = ready_[next_++];
  if (next_ == ready_.size()) ready_.clear(), next_ = 0;
  return thread;
}

Fiber* Scheduler::fiber_of(Thread* thread) {
  if (thread->state != State::kNew) return thread->fiber;
  if (idle_.empty()) {
    fibers_.push_back(std::make_unique<Fiber>(&Scheduler::fiber_main, this));
    idle_.push_back(fibers_.back().get());
  }
  Fiber* fiber = idle_.back();
  idle_.pop_back();
  thread->fiber = fiber;
  return fiber;
}

// What every fiber does: it runs threads that are new, one after the other; a thread that waits keeps its fiber.
void Scheduler::work() {
  for (;;) {
    Thread* thread = now_;
    thread->state = State::kReady;
    run_body();
    thread->state = State::kDone;
    ++done_;
    leave_warp(*thread);
    check_barrier();
    Fiber* self = running_;
    Thread* next = pick();
    if (next != nullptr && next->state == State::kNew) {
      next->fiber = self;
      now_ = next;
      continue;
    }
    if (next == nullptr && done_ < count_) wrong("returned, and the rest waits for threads that never come");
    idle_.push_back(self);
    now_ = next;
    running_ = next == nullptr ? nullptr : next->fiber;
    self->switch_to(next == nullptr ? main_ : *next->fiber);
  }
}

// The running thread waits until a meeting makes it ready; it may be already.
void Scheduler::wait() {
  Thread* thread = now_;
  Thread* next = pick();
  if (next == nullptr) wrong("waits for threads that never come");
  if (next != thread) {
    Fiber* self = running_;
    running_ = fiber_of(next);
    now_ = next;
    self->switch_to(*running_);
  }
  resume_here(thread);
}

void Scheduler::release(unsigned first, unsigned count, unsigned mask) {
  if (next_ >= 4096) ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(next_)), next_ = 0;
  for (unsigned k = 0; k < count; ++k) {
    const unsigned i = order_ == Order::kReverse ? count - 1 - k : k;
    if (mask != 0 && (mask >> i & 1u) == 0) continue;
    Thread& thread = threads_[first + i];
    if (mask == 0 && thread.state != State::kWaiting) continue;
    thread.state = State::kReady;
    ready_.push_back(&thread);
  }
}

// Called when a thread has come to a barrier or has returned, which counts as coming.
void Scheduler::check_barrier() {
  if (at_barrier_ == 0 || at_barrier_ + done_ < count_) return;
  const Thread* first = nullptr;
  int any = 0, all = 1, number = 0;
  for (unsigned i = 0; i < count_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state != State::kWaiting) continue;
    if (first == nullptr) first = &thread;
    if (thread.what != first->what || !same_place(thread.where, first->where)) {
      wrong("came to a barrier while others of its block are at another one");
    }
    any |= thread.value != 0, all &= thread.value != 0, number += thread.value != 0;
  }
  const int answer = first->what == Meeting::kBarrierOr ? any : first->what == Meeting::kBarrierAnd ? all : number;
  for (unsigned i = 0; i < count_; ++i) threads_[i].answer = static_cast<uint64_t>(answer);
  at_barrier_ = 0;
  release(0, count_, 0);
}

int Scheduler::meet_block(Meeting what, int predicate, const std::source_location& where) {
  Thread& thread = *now_;
  thread.state = State::kWaiting;
  thread.what = what, thread.where = where, thread.value = predicate != 0;
  ++at_barrier_;
  check_barrier();
  wait();
  return static_cast<int>(thread.answer);
}

// Lets the lanes go on that `thread` meets, if all have come.
void Scheduler::check_warp(Thread& thread) {
  Warp& warp = warps_[thread.number / 32];
  const unsigned first = thread.number / 32 * 32;
  unsigned mask = thread.mask;
  // To a barrier, but to nothing else, a lane that has returned counts as come.
  if (thread.what == Meeting::kSyncWarp) mask &= ~warp.done;
  if ((warp.waiting & mask) != mask) return;
  for (unsigned left = mask; left != 0; left &= left - 1) {
    const Thread& other = threads_[first + static_cast<unsigned>(std::countr_zero(left))];
    if (other.what != thread.what || other.mask != thread.mask || !same_place(other.where, thread.where)) {
      wrong("meets lanes of its warp that are elsewhere");
    }
  }
  if (thread.what != Meeting::kSyncWarp) finish_warp(first, mask);
  warp.waiting &= ~mask;
  release(first, 32, mask);
}

void Scheduler::finish_warp(unsigned first, unsigned mask) {
  const Meeting what = threads_[first + static_cast<unsigned>(std::countr_zero(mask))].what;
  uint64_t all = 0;
  bool begun = false;
  for (unsigned left = mask; left != 0; left &= left - 1) {
    const unsigned bit = static_cast<unsigned>(std::countr_zero(left));
    const uint64_t value = threads_[first + bit].value;
    switch (what) {
      case Meeting::kVote:
        all |= uint64_t{value != 0} << bit;
        break;
      case Meeting::kReduceAdd:
        all += value;
        break;
      case Meeting::kReduceXor:
        all ^= value;
        break;
      case Meeting::kReduceOr:
        all |= value;
        break;
      case Meeting::kReduceAnd:
        all = begun ? all & value : value;
        break;
      case Meeting::kReduceMin:
        all = begun ? std::min(all, value) : value;
        break;
      case Meeting::kReduceMax:
        all = begun ? std::max(all, value) : value;
        break;
      case Meeting::kReduceMinSigned:
        all = begun && static_cast<int64_t>(all) < static_cast<int64_t>(value) ? all : value;
        break;
      case Meeting::kReduceMaxSigned:
        all = begun && static_cast<int64_t>(all) > static_cast<int64_t>(value) ? all : value;
        break;
      default:
        break;
    }
    begun = true;
  }
  for (unsigned left = mask; left != 0; left &= left - 1) {
    Thread& thread = threads_[first + static_cast<unsigned>(std::countr_zero(left))];
    if (what == Meeting::kShuffle) {
      if ((mask >> thread.source & 1u) == 0) wrong("shuffles from a lane that its mask doesn't name");
      thread.answer = threads_[first + static_cast<unsigned>(thread.source)].value;
    } else if (what == Meeting::kMatch) {
      thread.answer = 0;
      for (unsigned other = mask; other != 0; other &= other - 1) {
        const auto bit = static_cast<unsigned>(std::countr_zero(other));
        thread.answer |= uint64_t{threads_[first + bit].value == thread.value} << bit;
      }
    } else {
      thread.answer = all;
    }
  }
}

uint64_t Scheduler::meet_warp(Meeting what, unsigned mask, uint64_t value, int source,
                              const std::source_location& where) {
  Thread& thread = *now_;
  thread.state = State::kWaiting;
  thread.what = what, thread.mask = mask, thread.where = where, thread.value = value, thread.source = source & 31;
  Warp& warp = warps_[thread.number / 32];
  if ((mask >> (thread.number % 32) & 1u) == 0) wrong("isn't named by its own mask");
  if ((mask & ~warp.there) != 0) wrong("names lanes that its block doesn't have");
  if (what != Meeting::kSyncWarp && (mask & warp.done) != 0) wrong("names a lane that has returned");
  warp.waiting |= 1u << thread.number % 32;
  check_warp(thread);
  wait();
  return thread.answer;
}

void Scheduler::leave_warp(const Thread& thread) {
  Warp& warp = warps_[thread.number / 32];
  warp.done |= 1u << thread.number % 32;
  // Those who wait for each other at a barrier of the warp may have waited for this one only.
  for (unsigned left = warp.waiting; left != 0; left &= left - 1) {
    Thread& other = threads_[thread.number / 32 * 32 + static_cast<unsigned>(std::countr_zero(left))];
    if (other.state == State::kWaiting && other.what == Meeting::kSyncWarp) check_warp(other);
  }
}

void Scheduler::run_block() {
  done_ = at_barrier_ = 0;
  for (Warp& warp : warps_) warp.waiting = warp.done = 0;
  ready_.clear();
  next_ = 0;
  for (unsigned i = 0; i < count_; ++i) {
    threads_[i].state = State::kNew;
    ready_.push_back(&threads_[order_ == Order::kReverse ? count_ - 1 - i : i]);
  }
  if (shared_size_ != 0) std::memset(shared_.get(), 0xff, shared_size_);
  now_ = pick();
  running_ = fiber_of(now_);
  main_.switch_to(*running_);
}

void Scheduler::read_order() {
  order_ = Order::kForward;
  const char* text = std::getenv("HALFSTEP_CUDA_EMULATED_ORDER");
  if (text == nullptr) return;
  const std::string order = text;
  if (order == "reverse") {
    order_ = Order::kReverse;
  } else if (order.starts_with("random")) {
    order_ = Order::kRandom;
    // Another order in each launch, the same in each run of the program.
    static uint64_t launches = 0;
    seed_ = (order.size() > 7 ? std::strtoull(order.c_str() + 7, nullptr, 10) : 0) + (++launches << 32);
  } else if (!order.empty() && order != "forward") {
    std::fprintf(stderr, "CUDA emulator: HALFSTEP_CUDA_EMULATED_ORDER is forward, reverse or random:SEED, not %s\n",
                 text);
    std::abort();
  }
}

void Scheduler::run(dim3 grid, dim3 block, std::size_t shared, bool alone, const std::function<void()>& body) {
  read_order();
  body_ = &body;
  alone_ = alone;
  blockDim = {block.x, block.y, block.z};
  gridDim = {grid.x, grid.y, grid.z};
  count_ = block.x * block.y * block.z;
  if (threads_.size() < count_) threads_.resize(count_);
  if (!alone) {
    warps_.assign((count_ + 31) / 32, {~0u, 0, 0});
    if (count_ % 32 != 0) warps_.back().there = (1u << count_ % 32) - 1;
    for (unsigned i = 0; i < count_; ++i) {
      threads_[i].number = i;
      threads_[i].index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
    }
  }
  if (shared > shared_size_) {
    shared_ = std::make_unique<unsigned char[]>(shared);
  }
  shared_size_ = shared;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  // A random order of very many blocks would take a table: steps of a number without a common divisor go through all.
  uint64_t step = 1, at = 0;
  if (order_ == Order::kReverse) step = blocks - 1, at = blocks - 1;
  if (order_ == Order::kRandom) {
    at = random() % blocks;
    do step = random() % blocks | 1u;
    while (std::gcd(step, blocks) != 1);
  }
  for (uint64_t k = 0; k < blocks; ++k) {
    blockIdx = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                static_cast<unsigned>(at / grid.x / grid.y)};
    at = (at + step) % blocks;
    if (!alone) {
      run_block();
      continue;
    }
    for (unsigned z = 0; z < block.z; ++z) {
      for (unsigned y = 0; y < block.y; ++y) {
        for (unsigned x = 0; x < block.x; ++x) {
          threadIdx = {x, y, z};
          body();
        }
      }
    }
  }
  alone_ = true;
}

[[noreturn]] void not_alone(Meeting what, const std::source_location& where) {
  std::fprintf(stderr, "CUDA emulator: %s at %s in a kernel that was launched with .alone = true\n", name_of(what),
               text_of(where).c_str());
  std::abort();
}

}  // namespace

int meet_block(Meeting what, int predicate, const std::source_location& where) {
  Scheduler& s = scheduler();
  if (s.alone()) not_alone(what, where);
  return s.meet_block(what, predicate, where);
}
uint64_t meet_warp(Meeting what, unsigned mask, uint64_t value, int source, const std::source_location& where) {
  Scheduler& s = scheduler();
  if (s.alone()) not_alone(what, where);
  return s.meet_warp(what, mask, value, source, where);
}
int lane() {
  Scheduler& s = scheduler();
  return s.alone() ? 0 : s.lane();
}
void run_grid(dim3 grid, dim3 block, std::size_t shared, bool alone, const std::function<void()>& body) {
  scheduler().run(grid, block, shared, alone, body);
}
void* dynamic_shared() { return scheduler().shared(); }

}  // namespace hscuda::emulator
