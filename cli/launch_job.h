// SPDX-License-Identifier: Apache-2.0
// One job of `halfstep launch`: MPI's launcher with all ranks, from start to end.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace halfstep::cli {

struct LaunchJob {
  std::vector<std::string> launcher = {};  ///< mpirun and its options
  std::vector<std::string> program = {};
  int ranks = 1;
  bool other_machines = false;  ///< some ranks may be on other machines than this one
  /// How long the other ranks may go on after one has failed, before they are ended.
  std::chrono::seconds grace{4};
};

struct LaunchResult {
  int status = 0;            ///< of the first rank that failed, 128 + its signal; 0: all ranks ended with 0
  bool interrupted = false;  ///< a signal to this process asked it to end
  int signal = 0;            ///< that signal
};

/// Runs it. SIGINT, SIGTERM and SIGHUP are passed on to all ranks, and a second one kills them. Says on standard error
/// which rank failed first.
LaunchResult run_job(const LaunchJob& job);

}  // namespace halfstep::cli
