// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>

#include "cli/verbs.h"
#include "halfstep/core/error.h"

namespace halfstep::cli {

std::atomic<int> g_signal{0};
std::atomic<bool> g_stop{false};

void catch_signals() {
  const auto handler = [](int number) {
    if (g_stop.exchange(true)) _exit(128 + number);
    g_signal = number;
  };
  std::signal(SIGINT, handler);
  std::signal(SIGTERM, handler);
}

void complain(const std::string& text) {
  std::fflush(stdout);
  std::fprintf(stderr, "halfstep: %s\n", text.c_str());
}

namespace {

int run(int argc, char** argv) {
  CLI::App program{"Halfstep trains neural networks in mixed precision."};
  program.name("halfstep");
  program.require_subcommand(1);
  program.set_version_flag("--version", HALFSTEP_VERSION);
  program.set_help_all_flag("--help-all", "Help for every verb");
  program.failure_message([](const CLI::App*, const CLI::Error& e) {
    return std::string("halfstep: ") + e.what() + "\nTry `halfstep --help`, or `halfstep VERB --help`.\n";
  });
  int status = kDone;
  add_train(program, status);
  add_eval(program, status);
  add_predict(program, status);
  add_bench(program, status);
  add_compare(program, status);
  add_ops(program, status);
  add_devices(program, status);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return program.exit(e) == 0 ? kDone : kUsage;
  } catch (const UsageError& e) {
    complain(e.what());
    return kUsage;
  } catch (const InternalError& e) {
    complain(std::string("a bug in Halfstep, please report it: ") + e.what());
    return kFailed;
  } catch (const std::bad_alloc&) {
    complain("out of memory");
    return kFailed;
  } catch (const std::exception& e) {
    complain(e.what());
    return kFailed;
  }
  // Output that a full disk or a closed pipe swallowed is no success.
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
    complain("standard output can't be written");
    return kFailed;
  }
  return status;
}

}  // namespace
}  // namespace halfstep::cli

int main(int argc, char** argv) { return halfstep::cli::run(argc, argv); }
