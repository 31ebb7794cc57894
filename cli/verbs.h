// SPDX-License-Identifier: Apache-2.0
// The verbs of `halfstep`, one file each. A verb adds its flags to the program and runs when it was named.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace halfstep::cli {

/// Exit status of a finished program: 0 done, 1 failed, 2 wrong arguments, 128 + signal interrupted.
enum Exit : int { kDone = 0, kFailed = 1, kUsage = 2 };

/// Arguments that parse but make no sense together or are out of range: exit status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void add_train(CLI::App& program, int& status);
void add_eval(CLI::App& program, int& status);
void add_predict(CLI::App& program, int& status);
void add_bench(CLI::App& program, int& status);
void add_compare(CLI::App& program, int& status);
void add_data(CLI::App& program, int& status);
void add_convert(CLI::App& program, int& status);
void add_inspect(CLI::App& program, int& status);
void add_export(CLI::App& program, int& status);
void add_quantize(CLI::App& program, int& status);
void add_summary(CLI::App& program, int& status);
void add_ops(CLI::App& program, int& status);
void add_devices(CLI::App& program, int& status);
void add_launch(CLI::App& program, int& status);
void add_plan(CLI::App& program, int& status);
void add_plan_parallel(CLI::App& program, int& status);

/// What the program was called with, without its own name.
extern std::vector<std::string> g_arguments;

/// Signal that asked the program to stop, or 0. Handlers are installed by catch_signals().
extern std::atomic<int> g_signal;
/// Of several processes this one's number; 0 otherwise.
extern int g_rank;
extern std::atomic<bool> g_stop;
/// SIGINT, SIGTERM, SIGHUP (a terminal that was closed) and SIGPIPE (a reader that went away) set the two above; a
/// second SIGINT or SIGTERM ends the program at once.
void catch_signals();

/// Whether a launcher's environment says that this is one of several processes. Throws UsageError, naming the variable,
/// where it says no number of them.
bool one_of_several(const char* verb);
/// Refuses to work as one of several processes where a launcher's environment says so. Throws UsageError naming the
/// variable, and why.
void refuse_many_processes(const char* verb,
                           const char* why = ", and each would do all the work and write the same files");

/// `halfstep: TEXT` on standard error.
void complain(const std::string& text);

}  // namespace halfstep::cli
