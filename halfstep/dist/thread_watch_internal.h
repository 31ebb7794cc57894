// SPDX-License-Identifier: Apache-2.0
// Internal: whether the threads of this process do anything, as the kernel sees them.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "halfstep/core/export.h"

namespace halfstep::dist::detail {

/// A system call in which a thread is blocked, as /proc/self/task/TID/syscall shows it.
struct BlockedCall {
  long number = -1;
  std::array<std::uint64_t, 6> arguments = {};
};
/// False where the text is none, as of a thread that runs.
HS_API bool parse_blocked_call(const std::string& text, BlockedCall& call);

/// Tells a process that hangs from one that is slow. It hangs when none of its threads has run since the last
/// look and each is blocked in a wait that nothing outside the process ends: for a lock, a condition or another thread,
/// for somebody to write to a pipe, for a signal, or asleep for more than five minutes. Whatever else a thread waits
/// for counts as work: files, disks, sockets, devices, programs that it has started, and waits with a time limit. So
/// does what can't be told: without Linux's /proc no process ever hangs.
///
/// The thread that looks doesn't count, nor do those of MPI, of the watch and of a device's driver, which are known by
/// name or by NotCounted.
class HS_API ThreadWatch {
 public:
  /// What the threads are blocked in, as an end of a sentence: `its main thread waits for a lock or another thread`.
  /// Empty: it doesn't hang, or this is the first look.
  std::string look();

 private:
  std::map<int, std::uint64_t> seen_;  // by thread: how often it has been switched away from
};

/// The threads that begin during its lifetime, and are still there at its end, are no sign of what the program does.
class HS_API NotCounted {
 public:
  NotCounted();
  ~NotCounted();
  NotCounted(const NotCounted&) = delete;
  NotCounted& operator=(const NotCounted&) = delete;

 private:
  std::set<int> before_;
};

}  // namespace halfstep::dist::detail
