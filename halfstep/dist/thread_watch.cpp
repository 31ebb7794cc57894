// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/thread_watch_internal.h"

#if defined(__linux__)
#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cerrno>
#endif
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "halfstep/core/text.h"

namespace halfstep::dist::detail {

bool parse_blocked_call(const std::string& text, BlockedCall& call) {
  const char* at = text.c_str();
  char* end = nullptr;
  call = {};
  call.number = std::strtol(at, &end, 10);
  if (end == at || call.number < 0) return false;
  for (std::uint64_t& argument : call.arguments) {
    at = end;
    argument = std::strtoull(at, &end, 16);
    if (end == at) return false;
  }
  return true;
}

#if defined(__linux__)
namespace {

// Nobody polls at such intervals: who sleeps for longer is not to be waited for.
constexpr std::int64_t kLongSleepSeconds = 300;
// Threads that wait for other ranks, or that a driver has for itself. Most of those that MPI starts have the name of
// the thread that it was started on.
constexpr std::string_view kNotCounted[] = {"halfstep_comm", "halfstep_watch", "cuda", "NCCL", "nccl"};

std::mutex g_mutex;
std::set<int>& left_out() {
  static auto& threads = *new std::set<int>;
  return threads;
}

std::set<int> own_threads() {
  std::set<int> threads;
  const std::unique_ptr<DIR, int (*)(DIR*)> tasks(::opendir("/proc/self/task"), ::closedir);
  while (const dirent* entry = tasks ? ::readdir(tasks.get()) : nullptr) {
    if (const int thread = std::atoi(entry->d_name); thread > 0) threads.insert(thread);
  }
  return threads;
}

// A file of /proc; empty where it can't be read.
std::string contents(const std::string& path) {
  std::string text;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return text;
  char piece[2048];
  for (ssize_t n = 0; (n = ::read(file, piece, sizeof(piece))) > 0;) text.append(piece, static_cast<std::size_t>(n));
  ::close(file);
  return text;
}

// The value of a line `name:\tvalue` of a status file.
std::string_view field(std::string_view status, std::string_view name) {
  for (std::size_t at = 0; at < status.size();) {
    const std::size_t end = std::min(status.find('\n', at), status.size());
    const std::string_view line = status.substr(at, end - at);
    at = end + 1;
    if (!line.starts_with(name) || line.substr(name.size(), 1) != ":") continue;
    const std::size_t value = line.find_first_not_of(" \t", name.size() + 1);
    return value == std::string_view::npos ? std::string_view() : line.substr(value);
  }
  return {};
}

// Memory of this process that another thread may give away at any moment.
template <class T>
std::optional<T> memory_at(std::uint64_t address) {
  T value{};
  const int file = ::open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  const ssize_t n = ::pread(file, &value, sizeof(value), static_cast<off_t>(address));
  ::close(file);
  return n == static_cast<ssize_t>(sizeof(value)) ? std::optional<T>(value) : std::nullopt;
}

// Whether a wait with that limit, the address of a timespec, takes so long that it is no limit.
bool endless(std::uint64_t limit, std::optional<clockid_t> absolute_on = {}) {
  if (limit == 0) return true;
  const auto until = memory_at<timespec>(limit);
  if (!until) return false;
  timespec now{};
  if (absolute_on) ::clock_gettime(*absolute_on, &now);
  return until->tv_sec - now.tv_sec > kLongSleepSeconds;
}

// What stands behind a descriptor, without a question to a file system, which might not answer.
std::optional<std::uint16_t> type_of(std::uint64_t descriptor) {
  struct statx s {};
  const int flags = AT_EMPTY_PATH | AT_STATX_DONT_SYNC;
  if (::statx(static_cast<int>(descriptor), "", flags, STATX_TYPE, &s) != 0 || !(s.stx_mask & STATX_TYPE)) return {};
  return static_cast<std::uint16_t>(s.stx_mode & S_IFMT);
}

std::string name_of(std::uint64_t descriptor) {
  char name[512];
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  const ssize_t n = ::readlink(path.c_str(), name, sizeof(name));
  return n > 0 ? printable(std::string_view(name, static_cast<std::size_t>(n))) : path;
}

// A pipe's other end may be a program that this one has started, and which computes.
bool has_children() {
  siginfo_t info{};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 || errno != ECHILD;
}

std::string other_wait(const std::string& task, const BlockedCall& call) {
  const auto& a = call.arguments;
  switch (call.number) {
    case SYS_read:
    case SYS_readv:
      if (type_of(a[0]) == S_IFIFO && !has_children()) return "waits for somebody to write to " + name_of(a[0]);
      return {};
#ifdef SYS_open
    case SYS_open:
#endif
    case SYS_openat: {
      // By the kernel's function: to ask for the file may take as long as to open it.
      const std::string where = contents(task + "wchan");
      const bool pipe = where.starts_with("wait_for_partner") || where.starts_with("fifo_open");
      return pipe && !has_children() ? "waits for somebody to open the other end of a pipe" : "";
    }
    case SYS_rt_sigtimedwait:
      return endless(a[2]) ? "waits for a signal" : "";
#ifdef SYS_pause
    case SYS_pause:
#endif
    case SYS_rt_sigsuspend:
      return "waits for a signal";
#ifdef SYS_poll
    case SYS_poll:
      return a[1] == 0 && static_cast<std::int32_t>(a[2]) < 0 ? "waits for a signal" : "";
#endif
    case SYS_ppoll:
      return a[1] == 0 && endless(a[2]) ? "waits for a signal" : "";
    case SYS_nanosleep:
      return endless(a[0]) ? "sleeps" : "";
    case SYS_clock_nanosleep: {
      const auto clock = static_cast<clockid_t>(a[0]);
      const bool absolute = (a[1] & TIMER_ABSTIME) != 0;
      return endless(a[2], absolute ? std::optional(clock) : std::nullopt) ? "sleeps" : "";
    }
    default:
      return {};
  }
}

// What a thread that doesn't run waits for; empty: it may end by itself, or comes from outside.
std::string wait_of(const std::string& task) {
  BlockedCall call;
  if (!parse_blocked_call(contents(task + "syscall"), call)) return {};
  if (call.number != SYS_futex) return other_wait(task, call);
  const auto& a = call.arguments;
  const auto operation = static_cast<std::uint32_t>(a[1]);
  const std::string lock = "waits for a lock or another thread";
  const clockid_t clock = (operation & FUTEX_CLOCK_REALTIME) != 0 ? CLOCK_REALTIME : CLOCK_MONOTONIC;
  switch (operation & FUTEX_CMD_MASK) {
    case FUTEX_WAIT:
      return endless(a[3]) ? lock : "";
    case FUTEX_WAIT_BITSET:
    case FUTEX_WAIT_REQUEUE_PI:
      return endless(a[3], clock) ? lock : "";
    case FUTEX_LOCK_PI:
      return endless(a[3], CLOCK_REALTIME) ? lock : "";
#ifdef FUTEX_LOCK_PI2
    case FUTEX_LOCK_PI2:
      return endless(a[3], clock) ? lock : "";
#endif
    default:
      return {};
  }
}

bool counts(std::string_view name) {
  for (const std::string_view prefix : kNotCounted) {
    if (name.starts_with(prefix)) return false;
  }
  return true;
}

}  // namespace

std::string ThreadWatch::look() {
  const std::set<int> threads = own_threads();
  std::set<int> known;
  {
    const std::lock_guard lock(g_mutex);
    std::erase_if(left_out(), [&](int thread) { return threads.count(thread) == 0; });
    known = left_out();
  }
  const auto own = static_cast<int>(::syscall(SYS_gettid));
  const int main = static_cast<int>(::getpid());
  std::map<int, std::uint64_t> now;
  bool moves = false;
  std::string of_main, of_other;
  for (const int thread : threads) {
    if (thread == own || known.count(thread) > 0) continue;
    const std::string task = fmt::format("/proc/self/task/{}/", thread);
    const std::string status = contents(task + "status");
    const std::string_view state = field(status, "State");
    if (state.empty()) moves = true;  // it has just ended
    if (state.empty() || state[0] == 'Z' || state[0] == 'X' || !counts(field(status, "Name"))) continue;
    const std::uint64_t switches =
        std::strtoull(std::string(field(status, "voluntary_ctxt_switches")).c_str(), nullptr, 10) +
        std::strtoull(std::string(field(status, "nonvoluntary_ctxt_switches")).c_str(), nullptr, 10);
    now[thread] = switches;
    const auto before = seen_.find(thread);
    // R: it runs; D: it waits for a disk; t: a debugger has it.
    if (before == seen_.end() || before->second != switches || state[0] != 'S') moves = true;
    if (moves) continue;
    const std::string wait = wait_of(task);
    if (wait.empty()) moves = true;
    const bool says_more = wait.find("another thread") == std::string::npos;
    if (thread == main) {
      of_main = "its main thread " + wait;
    } else if (of_other.empty() && says_more) {
      of_other = "a thread of it " + wait;
    }
  }
  if (now.size() != seen_.size()) moves = true;
  seen_ = std::move(now);
  if (moves) return {};
  if (of_main.empty()) return of_other.empty() ? "all its threads wait for locks or each other" : of_other;
  return of_main + (of_other.empty() ? "" : ", and " + of_other);
}

NotCounted::NotCounted() : before_(own_threads()) {}
NotCounted::~NotCounted() {
  const std::set<int> now = own_threads();
  const std::lock_guard lock(g_mutex);
  std::set_difference(now.begin(), now.end(), before_.begin(), before_.end(),
                      std::inserter(left_out(), left_out().end()));
}
#else
std::string ThreadWatch::look() { return {}; }
NotCounted::NotCounted() = default;
NotCounted::~NotCounted() = default;
#endif

}  // namespace halfstep::dist::detail
