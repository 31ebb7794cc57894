// SPDX-License-Identifier: Apache-2.0
// A stack of its own, and the switch between two of them.
#pragma once

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <cstddef>

namespace hscuda::emulator {

/// Runs a function that never returns, on its own stack; or stands for a thread's own stack. A fiber may go on on
/// another thread than the one it stopped on, as long as its function keeps no thread-local addresses.
class Fiber {
 public:
  /// The calling thread's own stack.
  Fiber();
  /// A new stack. `main` is called at the first switch.
  Fiber(void (*main)(void*), void* argument);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Stops this one, which is running, and goes on with `next` where it stopped. One thread at a time switches.
  void switch_to(Fiber& next);

 private:
  static void enter();
  void arrived();

  void (*main_)(void*) = nullptr;
  void* argument_ = nullptr;
  void* memory_ = nullptr;  // with a page at its lower end that can't be touched
#if defined(__x86_64__)
  void* top_ = nullptr;  // of the stack where it stopped
#else
  ucontext_t context_;
#endif
  // For the sanitizers, which must know on which stack they are.
  void* fake_ = nullptr;
  const void* bottom_ = nullptr;
  std::size_t bytes_ = 0;
  void* thread_ = nullptr;
};

}  // namespace hscuda::emulator
