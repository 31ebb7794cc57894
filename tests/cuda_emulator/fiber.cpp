// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#if defined(__x86_64__)
// Keeps what a called function must keep (the System V ABI) on the stack that is left, and takes it from the other:
// switch(&top of the one, top of the other). The system's swapcontext() asks the kernel about signals each time, and
// under the address sanitizer clears what is known of a whole stack: a thousand times as slow.
asm(R"(
.pushsection .text
.hidden hscuda_emulator_switch
.globl hscuda_emulator_switch
.type hscuda_emulator_switch, @function
hscuda_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hscuda_emulator_switch, .-hscuda_emulator_switch
.popsection
)");
extern "C" void hscuda_emulator_switch(void** from, void* to);
#endif

namespace hscuda::emulator {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kStack = 512 * 1024;  // instrumented frames are several times as large
#else
constexpr std::size_t kStack = 128 * 1024;  // of which only what is touched takes memory
#endif

std::size_t page() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// The one that was left last and the one that runs.
Fiber *leaving = nullptr, *running = nullptr;

}  // namespace

Fiber::Fiber() = default;

Fiber::Fiber(void (*main)(void*), void* argument) : main_(main), argument_(argument) {
  memory_ = mmap(nullptr, kStack + page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory_ == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory_, page(), PROT_NONE);
  bottom_ = static_cast<char*>(memory_) + page();
  bytes_ = kStack;
  // Stacks that all begin at the same place of a page share few lines of the caches: each begins elsewhere.
  static unsigned number = 0;
  const std::size_t offset = number++ % 32 * 128;
#if defined(__x86_64__)
  // As if enter() had been called from nowhere: its own address, where the switch takes six registers and returns to,
  // with a return address of 0 behind it, which is 8 bytes below a multiple of 16: vectors on the stack rely on that.
  auto** top = reinterpret_cast<void**>(static_cast<char*>(memory_) + page() + kStack - offset);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&Fiber::enter);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  top_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = const_cast<void*>(bottom_);
  context_.uc_stack.ss_size = kStack - offset;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::enter, 0);
#endif
#if defined(__SANITIZE_THREAD__)
  thread_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
  if (memory_ == nullptr) return;
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(thread_);
#endif
  munmap(memory_, kStack + page());
}

void Fiber::enter() {
  Fiber* self = running;
  self->arrived();
  self->main_(self->argument_);
  std::abort();
}

void Fiber::arrived() {
#if defined(__SANITIZE_ADDRESS__)
  // This is how the bounds of a thread's own stack are learned.
  __sanitizer_finish_switch_fiber(fake_, &leaving->bottom_, &leaving->bytes_);
#endif
}

// Not inlined: a fiber may come back on another thread, and what is known of that thread's own variables is forgotten
// at a call only.
__attribute__((noinline)) void Fiber::switch_to(Fiber& next) {
  leaving = this, running = &next;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_, next.bottom_, next.bytes_);
#endif
#if defined(__SANITIZE_THREAD__)
  thread_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(next.thread_, 0);
#endif
#if defined(__x86_64__)
  hscuda_emulator_switch(&top_, next.top_);
#else
  swapcontext(&context_, &next.context_);
#endif
  arrived();
}

}  // namespace hscuda::emulator
