// SPDX-License-Identifier: Apache-2.0
// The hardened longjmp takes a jump to another stack for an error.
#undef _FORTIFY_SOURCE
#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace hscuda::emulator {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kStack = 512 * 1024;  // instrumented frames are several times as large
#else
constexpr std::size_t kStack = 128 * 1024;  // of which only what is touched takes memory
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// The fiber that was left last. One thread at a time runs fibers (machine.h).
Fiber* leaving = nullptr;
#endif

}  // namespace

Fiber::Fiber(void (*main)(void*), void* argument) : main_(main), argument_(argument), started_(false) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  size_ = kStack + page;
  memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory_ == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory_, page, PROT_NONE);
  bottom_ = static_cast<char*>(memory_) + page;
  bytes_ = kStack;
  getcontext(&context_);
  context_.uc_stack.ss_sp = const_cast<void*>(bottom_);
  context_.uc_stack.ss_size = kStack;
  context_.uc_link = nullptr;
  const auto self = reinterpret_cast<uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self),
              static_cast<unsigned>(self >> 32));
#if defined(__SANITIZE_THREAD__)
  thread_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(__SANITIZE_THREAD__)
  if (memory_ != nullptr) __tsan_destroy_fiber(thread_);
#endif
  if (memory_ != nullptr) munmap(memory_, size_);
}

void Fiber::enter(unsigned low, unsigned high) {
  auto* self = reinterpret_cast<Fiber*>(uintptr_t{high} << 32 | low);
  self->entered();
  self->main_(self->argument_);
}

void Fiber::entered() {
#if defined(__SANITIZE_ADDRESS__)
  // The stack that was left is the thread's own where it isn't one of ours: this is how its bounds are learned.
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(fake_, &bottom, &bytes);
  leaving->bottom_ = bottom, leaving->bytes_ = bytes;
#endif
}

// Not inlined: a fiber may come back on another thread, and what is known of that thread's variables is forgotten at a
// call only.
__attribute__((noinline)) void Fiber::switch_to(Fiber& next) {
#if defined(__SANITIZE_THREAD__)
  thread_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(next.thread_, 0);
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  // The sanitizers' longjmp looks for its target on the stack that it leaves; this is slow, and right.
  leaving = this;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_, next.bottom_, next.bytes_);
#endif
  next.started_ = true;
  swapcontext(&context_, &next.context_);
  entered();
#else
  if (_setjmp(point_) != 0) return;
  if (next.started_) _longjmp(next.point_, 1);
  next.started_ = true;
  setcontext(&next.context_);
#endif
}

}  // namespace hscuda::emulator
