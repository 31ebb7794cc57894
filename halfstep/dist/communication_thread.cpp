// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/communication_thread_internal.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/dist/control_text_internal.h"
#include "halfstep/dist/device_messages_internal.h"
#include "halfstep/dist/messages_internal.h"
#include "halfstep/dist/mpi_library_internal.h"
#include "halfstep/dist/thread_watch_internal.h"
#include "halfstep/dist/watch_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::dist::detail {
namespace {

using namespace std::chrono_literals;

// Before the first sleep. MPICH's collectives go in rounds, each of which waits for whoever sleeps: with 50 us four
// ranks on two processors take 600 us for four bytes, with this 50.
constexpr auto kAwake = 200us;
constexpr int kLongestSleepUs = 200;  // about what a wait may be too long
constexpr auto kBetweenChecks = 5ms;
// All ranks are here then, and what they sent has arrived. It may not end by itself: MPICH over UCX (4.0.2, between
// machines) closes a connection with the help of the other side, which may wait for the launcher already.
constexpr auto kForFinalize = 3s;
constexpr auto kToLeave = 30s;
constexpr auto kForLastMessages = 1s;
constexpr auto kForTheWatch = 3s;  // a rank that died is known within one

// A thread of the library leaves signals to the program's own threads, but for faults and the profiler's.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF}) sigdelset(&all, s);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

void Backoff::pause() {
  if (Clock::now() < until_) {
    sched_yield();
    return;
  }
  sleep_us_ = sleep_us_ == 0 ? 10 : std::min(sleep_us_ * 3 / 2, kLongestSleepUs);
  std::this_thread::sleep_for(std::chrono::microseconds(sleep_us_));
}

// Never destroyed, either.
CommunicationThread::CommunicationThread() : device_messages_(*new DeviceMessages(*this)) {}

CommunicationThread& CommunicationThread::get() {
  static CommunicationThread& instance = *new CommunicationThread;
  return instance;
}

void CommunicationThread::start(const halfstep_mpi_table& mpi, const std::shared_ptr<GroupState>& world) {
  mpi_ = &mpi;
  process_ = getpid();
  // Kept by the thread too, which may still be in MPI_Init when the caller has given up.
  struct Start {
    std::exception_ptr error;
    bool over = false;
  };
  const auto shared = std::make_shared<Start>();
  {
    const SignalsBlocked blocked;
    thread_ = std::thread([this, &mpi, world, shared] {
      pthread_setname_np(pthread_self(), "halfstep_comm");
      prctl(PR_SET_TIMERSLACK, 1000UL);  // short sleeps are meant as they are said
      try {
        {
          const NotCounted threads_of_mpi;
          check_mpi(mpi, mpi.init(), "ProcessGroup::init");
        }
        world->comm = mpi.world();
        mpi.comm_place(world->comm, &world->rank, &world->size);
        char text[256] = "";
        mpi.library(text, sizeof(text));
        world->library = text;
      } catch (...) {
        shared->error = std::current_exception();
      }
      {
        const std::lock_guard lock(mutex_);
        shared->over = true;
        ended_ = shared->error != nullptr;
        changed_.notify_all();
      }
      if (!shared->error) run();
    });
  }
  std::unique_lock lock(mutex_);
  const bool over = changed_.wait_for(lock, world->timeout, [&] { return shared->over; });
  lock.unlock();
  if (!over) {
    thread_.detach();
    fail<DistError>(
        "ProcessGroup::init: MPI did not start within {}; one of the processes has ended or hangs, or does not call it",
        seconds_text(world->timeout));
  }
  if (shared->error) {
    thread_.join();
    std::rethrow_exception(shared->error);
  }
#if defined(__GLIBC__)
  // A process that fails doesn't wait for the others: they learn of it when it is gone.
  on_exit([](int status, void*) { get().at_exit(status); }, nullptr);
#else
  std::atexit([] { get().at_exit(0); });
#endif
}

void CommunicationThread::end_together(std::shared_ptr<GroupState> world) {
  const std::lock_guard lock(mutex_);
  world_ = std::move(world);
}

void CommunicationThread::submit(const std::shared_ptr<Call>& call) {
  if (process_ != getpid()) {
    fail<DistError>("{}: this process was made by fork() from a rank; only the rank itself can communicate",
                    name(call->kind));
  }
  const std::lock_guard lock(mutex_);
  if (ended_ || ending_) fail<DistError>("{}: the process ends, and communicates no more", name(call->kind));
  if (call->kind != CallKind::send && call->kind != CallKind::receive) call->sequence = ++call->group->next_sequence;
  queue_.push_back(call);
  changed_.notify_all();
}

void CommunicationThread::wait(WorkState& state) {
  if (process_ != getpid()) fail<DistError>("Work::wait: this process was made by fork() from a rank");
  const WaitsForRanks waits;
  const auto begin = Clock::now();
  // What is about to be done needs no sleep.
  for (int i = 0; i < 8; ++i) {
    {
      const std::lock_guard lock(state.mutex);
      if (state.done) break;
    }
    sched_yield();
  }
  std::unique_lock lock(state.mutex);
  state.changed.wait(lock, [&] { return state.done; });
  if (state.error) std::rethrow_exception(state.error);
  if (state.copy_back) std::exchange(state.copy_back, nullptr)();
  const std::chrono::duration<double> time = Clock::now() - begin;
  StatsCounter::get().add({.wait_seconds = time.count()});
}

void CommunicationThread::run() {
  std::optional<Backoff> idle;
  while (true) {
    std::shared_ptr<Call> call;
    {
      std::unique_lock lock(mutex_);
      if (messages_.empty()) changed_.wait(lock, [&] { return !queue_.empty() || ending_; });
      if (!queue_.empty()) {
        call = std::move(queue_.front());
        queue_.pop_front();
      } else if (ending_) {
        break;
      }
    }
    if (call) {
      idle.reset();
      run_call(call);
      continue;
    }
    if (!idle) idle.emplace(kAwake);
    progress_messages();
    idle->pause();
  }
  leave();
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void CommunicationThread::run_call(const std::shared_ptr<Call>& call) {
  std::exception_ptr error;
  const auto begin = Clock::now();
  const bool message = call->kind == CallKind::send || call->kind == CallKind::receive;
  try {
    if (!failed_.empty()) {
      fail<DistError>("{}: nothing can be exchanged any more since an earlier error: {}", call->title(), failed_);
    }
    if (call->group->freed) fail<DistError>("{}: the group was freed", call->title());
    if (message) {
      start_message(call);
      return;
    }
    {
      const std::lock_guard lock(current_mutex_);
      current_ = call;
      current_since_ = begin;
    }
    const Watched watched(*call);
    run_collective(*this, *call);
  } catch (const DistError&) {
    error = std::current_exception();
  } catch (const std::exception& e) {
    error = std::current_exception();
    // Out of memory, say: the other ranks are somewhere in this collective, and no later one would meet them.
    if (failed_.empty()) failed_ = fmt::format("{}: {}", call->title(), e.what());
  }
  if (!message) {
    {
      const std::lock_guard lock(current_mutex_);
      current_ = nullptr;
    }
    const std::chrono::duration<double> time = Clock::now() - begin;
    StatsCounter::get().add({.collectives = 1, .busy_seconds = time.count()});
  }
  complete(call, error);
}

void CommunicationThread::complete(const std::shared_ptr<Call>& call, std::exception_ptr error) {
  for (const Tensor& t : call->written) t.storage()->bump_version();
  if (!failed_.empty()) {
    // MPI may still write to its memory.
    new std::shared_ptr<Call>(call);
  } else {
    call->tensors.clear();
    call->written.clear();
    call->buffers.clear();
  }
  const std::lock_guard lock(call->state->mutex);
  call->state->error = std::move(error);
  call->state->done = true;
  call->state->changed.notify_all();
}

void CommunicationThread::on_abort(int) {
  CommunicationThread& self = get();
  // Whoever else calls abort() gets what it asks for: the handler returns.
  if (self.process_ == getpid() && std::this_thread::get_id() == self.thread_.get_id()) self.aborted_by_mpi();
}

// UCX, which Debian's MPICH is built on, copies from the memory of another process of its machine by itself, and calls
// abort() where that process has died. The watch knows soon which rank it was: then waiting callers get this error, as
// they would have if MPI had waited. There is no way back into MPI; this thread refuses all else until the process
// ends.
void CommunicationThread::aborted_by_mpi() {
  std::string text;
  for (const auto until = Clock::now() + kForTheWatch; text.empty() && Clock::now() < until;) {
    std::this_thread::sleep_for(10ms);
    text = abort_reason();
  }
  if (text.empty() || parked_.exchange(true)) return;
  if (failed_.empty()) failed_ = text;
  std::vector<std::shared_ptr<Call>> waiting;
  {
    const std::lock_guard lock(current_mutex_);
    if (current_) waiting.push_back(std::exchange(current_, nullptr));
  }
  for (Message& m : messages_) waiting.push_back(m.call);
  for (const std::shared_ptr<Call>& call : waiting) {
    complete(call, std::make_exception_ptr(DistError(fmt::format("{}: {}", call->title(), text))));
  }
  new std::list<Message>(std::move(messages_));  // their requests are MPI's for good
  messages_.clear();
  run();
  while (true) ::pause();
}

void CommunicationThread::give_up(const std::string& text) {
  if (failed_.empty()) failed_ = text;
  throw DistError(text);
}

// What the abort check says; it may ask for locks that are held where this thread is asked what it does.
std::string CommunicationThread::abort_reason() {
  std::function<std::string()> check;
  {
    const std::lock_guard lock(current_mutex_);
    check = abort_check_;
  }
  return check ? check() : std::string();
}

void CommunicationThread::check_still_wanted(const Call& call, Clock::time_point since) {
  if (failing_) give_up(fmt::format("{}: the process ends", call.title()));
  if (const std::string text = abort_reason(); !text.empty()) give_up(fmt::format("{}: {}", call.title(), text));
  if (Clock::now() - since > call.group->timeout) {
    give_up(fmt::format("{}: waited {} for the other ranks; one of them has ended or hangs, or does not call it",
                        call.title(), seconds_text(call.group->timeout)));
  }
}

void CommunicationThread::check(int code, const Call& call) {
  if (code == 0) return;
  try {
    check_mpi(*mpi_, code, call.title());
  } catch (const DistError& error) {
    give_up(error.what());
  }
}

void CommunicationThread::finish(int code, halfstep_mpi_request* request, const Call& call, std::int64_t moving) {
  check(code, call);
  const auto since = Clock::now();
  auto checked = since;
  // Data move in small pieces, one test at a time: sleeping in between would cost far more than the processor.
  Backoff backoff(moving > 0 ? 2ms + std::chrono::microseconds(moving / 100) : kAwake);
  try {
    while (true) {
      std::int32_t done = 0;
      if (const int e = mpi_->test(request, &done)) {
        request = nullptr;
        check(e, call);
      }
      if (done) return;
      take_messages();
      progress_messages();
      if (const auto now = Clock::now(); now - checked > kBetweenChecks) {
        checked = now;
        check_still_wanted(call, since);
      }
      backoff.pause();
    }
  } catch (...) {
    if (request) mpi_->abandon(request);
    throw;
  }
}

void CommunicationThread::wait_for(const Call& call, const std::function<bool()>& done, std::int64_t moving) {
  const auto since = Clock::now();
  auto checked = since;
  Backoff backoff(kAwake + std::chrono::microseconds(moving / 1000));
  while (!done()) {
    progress_messages();
    if (const auto now = Clock::now(); now - checked > kBetweenChecks) {
      checked = now;
      check_still_wanted(call, since);
    }
    backoff.pause();
  }
}

void CommunicationThread::finish_messages(const Call& call) {
  wait_for(call, [&] {
    return std::none_of(messages_.begin(), messages_.end(),
                        [&](const Message& m) { return m.call->group == call.group; });
  });
}

char* CommunicationThread::scratch(std::size_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_ = HostBuffer();
    scratch_bytes_ = 0;
    scratch_ = HostBuffer(bytes);
    scratch_bytes_ = bytes;
  }
  return scratch_.data();
}

// --- messages between two ranks, which go on beside the collectives

// Those that were asked for since a collective began to wait.
void CommunicationThread::take_messages() {
  std::deque<std::shared_ptr<Call>> found;
  {
    const std::lock_guard lock(mutex_);
    const auto collectives = std::stable_partition(queue_.begin(), queue_.end(), [](const auto& call) {
      return call->kind == CallKind::send || call->kind == CallKind::receive;
    });
    std::move(queue_.begin(), collectives, std::back_inserter(found));
    queue_.erase(queue_.begin(), collectives);
  }
  for (const std::shared_ptr<Call>& call : found) run_call(call);
}

void CommunicationThread::start_message(const std::shared_ptr<Call>& call) {
  messages_.emplace_back(call);
  progress_messages();
}

void CommunicationThread::progress_messages() {
  for (auto it = messages_.begin(); it != messages_.end();) {
    if (it->running()) {  // this is called by what it waits for
      ++it;
      continue;
    }
    std::exception_ptr error;
    bool done = true;
    try {
      if (!failed_.empty()) throw DistError(it->call->title() + ": " + failed_);
      done = progress(*it);
    } catch (...) {
      error = std::current_exception();
    }
    if (!done) {
      ++it;
      continue;
    }
    const std::shared_ptr<Call> call = it->call;
    it = messages_.erase(it);
    complete(call, error);
  }
}

bool CommunicationThread::progress(Message& m) {
  const auto waits_for_earlier = [&] {
    return std::any_of(messages_.begin(), messages_.end(),
                       [&](const Message& other) { return &other != &m && other.holds_up(m); });
  };
  if (!m.begun() && waits_for_earlier()) return false;
  int e = 0;
  const bool done = m.progress(*this, e);
  check(e, *m.call);
  if (done) return true;
  if (const auto now = Clock::now(); now - m.checked > kBetweenChecks) {
    m.checked = now;
    check_still_wanted(*m.call, m.since);
  }
  return false;
}

// --- the end of the process

void CommunicationThread::leave() {
  if (!failed_.empty() || failing_) return;  // a rank that is gone would be waited for
  try {
    if (world_) {
      // Messages on their way go on meanwhile; when all ranks are here, no more will come.
      Call call;
      call.kind = CallKind::exit;
      call.group = world_;
      call.sequence = ++world_->next_sequence;
      run_collective(*this, call);
    }
    Backoff backoff(kAwake);
    for (const auto until = Clock::now() + kForLastMessages; !messages_.empty() && Clock::now() < until;) {
      progress_messages();
      backoff.pause();
    }
    if (!messages_.empty()) {
      log(LogLevel::warning, fmt::format("the process ends, and {} was not answered", messages_.front().call->title()));
      failed_ = "the process ends";
      progress_messages();  // fails them, for the threads that wait
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      finalizing_ = true;
      changed_.notify_all();
    }
    mpi_->finalize();
  } catch (const std::exception&) {  // the other ranks report a rank that ends too early
  }
}

void CommunicationThread::at_exit(int status) {
  if (process_ != getpid() || std::this_thread::get_id() == thread_.get_id()) return;
  std::unique_lock lock(mutex_);
  if (status != 0) failing_ = true;
  ending_ = true;
  changed_.notify_all();
  // Each wait of the thread for other ranks ends by itself; MPI's own end should, too.
  const auto longest = world_ ? world_->timeout * 2 + kToLeave : std::chrono::milliseconds(kToLeave);
  changed_.wait_for(lock, failing_ ? std::chrono::milliseconds(2s) : longest, [&] { return ended_ || finalizing_; });
  if (finalizing_) changed_.wait_for(lock, kForFinalize, [&] { return ended_; });
  if (ended_ && !parked_) {
    lock.unlock();
    thread_.join();
  }
}

// --- questions from other threads

StatsCounter& StatsCounter::get() {
  static StatsCounter& instance = *new StatsCounter;
  return instance;
}
void StatsCounter::add(const CommunicationStats& more) {
  const std::lock_guard lock(mutex_);
  total_.collectives += more.collectives;
  total_.bytes_sent += more.bytes_sent;
  total_.busy_seconds += more.busy_seconds;
  total_.wait_seconds += more.wait_seconds;
  total_.on_devices += more.on_devices;
}
CommunicationStats StatsCounter::read() const {
  const std::lock_guard lock(mutex_);
  return total_;
}

std::optional<CurrentCollective> CommunicationThread::current() {
  const std::lock_guard lock(current_mutex_);
  if (!current_) return {};
  const std::chrono::duration<double> time = Clock::now() - current_since_;
  return CurrentCollective{fmt::format("{}: {}", current_->title(), current_->action()), current_->sequence,
                           time.count()};
}

void CommunicationThread::set_abort_check(std::function<std::string()> check) {
  {
    const std::lock_guard lock(current_mutex_);
    abort_check_ = std::move(check);
  }
  struct sigaction before {};
  if (sigaction(SIGABRT, nullptr, &before) == 0 && before.sa_handler == SIG_DFL) ::signal(SIGABRT, on_abort);
}

void set_abort_check(std::function<std::string()> check) {
  CommunicationThread::get().set_abort_check(std::move(check));
}
std::optional<CurrentCollective> current_collective() { return CommunicationThread::get().current(); }

}  // namespace halfstep::dist::detail
