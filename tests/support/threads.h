// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/runtime/parallel.h"

namespace halfstep::test {

/// Restores the number of threads at the end of a test.
class ThreadsGuard {
 public:
  ThreadsGuard() = default;
  explicit ThreadsGuard(int n) { set_num_threads(n); }
  ~ThreadsGuard() { set_num_threads(before_); }
  ThreadsGuard(const ThreadsGuard&) = delete;
  ThreadsGuard& operator=(const ThreadsGuard&) = delete;

 private:
  const int before_ = num_threads();
};

}  // namespace halfstep::test
