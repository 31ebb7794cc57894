// SPDX-License-Identifier: Apache-2.0
// Internal: the thread that makes all calls of MPI, in the order in which collectives were started. Neither MPI makes
// progress on its own, and their blocking calls keep a processor busy that another rank or the backward pass could use:
// all waiting is a loop of tests here, with pauses.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "halfstep/dist/process_group_internal.h"

namespace halfstep::dist::detail {

/// Waits without keeping a processor from others: gives way for a while, then sleeps, longer and longer.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Backoff(std::chrono::microseconds awake) : until_(Clock::now() + awake) {}
  void pause();

 private:
  Clock::time_point until_;
  int sleep_us_ = 0;
};

class DeviceMessages;

class CommunicationThread {
 public:
  using Clock = std::chrono::steady_clock;
  /// The process's. Never destroyed: it ends by an exit handler.
  static CommunicationThread& get();

  /// Starts the thread, which initializes MPI, and gives the group of all ranks its place. Throws DistError.
  void start(const halfstep_mpi_table& mpi, const std::shared_ptr<GroupState>& world);
  /// Runs the exchange of a process's end when the process ends; before, no other rank is waited for.
  void end_together(std::shared_ptr<GroupState> world);
  void submit(const std::shared_ptr<Call>& call);
  /// Returns when the call is done and throws what it threw.
  void wait(WorkState& state);

  // For what runs on the thread.

  const halfstep_mpi_table& mpi() const { return *mpi_; }
  DeviceMessages& device_messages() { return device_messages_; }
  /// Gives up on an error of MPI.
  void check(int code, const Call& call);
  /// Waits for what was started with error code `code`. `moving`: bytes that all ranks are known to exchange by now,
  /// for which it is worth staying awake.
  void finish(int code, halfstep_mpi_request* request, const Call& call, std::int64_t moving = 0);
  /// The same for what isn't MPI's: asks `done` until it is true.
  void wait_for(const Call& call, const std::function<bool()>& done, std::int64_t moving = 0);
  /// Returns when no message of the call's group is on its way.
  void finish_messages(const Call& call);
  /// Memory for `bytes`, the same in every call.
  char* scratch(std::size_t bytes);
  /// Nothing more can be exchanged: throws DistError now, and in all later calls.
  [[noreturn]] void give_up(const std::string& text);

  std::optional<CurrentCollective> current();
  void set_abort_check(std::function<std::string()> check);

 private:
  struct Message;
  CommunicationThread();
  void run();
  void run_call(const std::shared_ptr<Call>& call);
  void take_messages();
  void start_message(const std::shared_ptr<Call>& call);
  void progress_messages();
  bool progress(Message& message);
  std::string abort_reason();
  void check_still_wanted(const Call& call, Clock::time_point since);
  void complete(const std::shared_ptr<Call>& call, std::exception_ptr error);
  void leave();
  void at_exit(int status);
  static void on_abort(int signal);
  void aborted_by_mpi();

  const halfstep_mpi_table* mpi_ = nullptr;
  std::thread thread_;
  int process_ = 0;  // its id: a child of fork() has no such thread

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Call>> queue_;
  bool ended_ = false, finalizing_ = false;
  std::shared_ptr<GroupState> world_;  // of end_together()
  std::atomic<bool> ending_{false}, failing_{false};
  std::atomic<bool> parked_{false};  // in a signal handler that doesn't return

  std::mutex current_mutex_;
  std::shared_ptr<Call> current_;
  Clock::time_point current_since_;
  std::function<std::string()> abort_check_;

  // Of the thread alone.
  std::string failed_;
  std::list<Message> messages_;
  DeviceMessages& device_messages_;
  HostBuffer scratch_;
  std::size_t scratch_bytes_ = 0;
};

/// Runs a call other than send and receive, on the thread. Throws DistError.
void run_collective(CommunicationThread& thread, Call& call);

}  // namespace halfstep::dist::detail
