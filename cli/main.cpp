// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "cli/launch_nodes.h"
#include "cli/options.h"
#include "cli/suggest.h"
#include "cli/verbs.h"
#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/runtime/machine.h"

namespace halfstep::cli {

std::atomic<int> g_signal{0};
int g_rank = 0;
std::atomic<bool> g_stop{false};
std::vector<std::string> g_arguments;

void catch_signals() {
  const auto handler = [](int number) {
    // The number first: whoever sees that it should stop reads it.
    int none = 0;
    const bool again = !g_signal.compare_exchange_strong(none, number);
    if (again && (number == SIGINT || number == SIGTERM)) _exit(128 + number);
    g_stop = true;
  };
  std::signal(SIGINT, handler);
  std::signal(SIGTERM, handler);
  std::signal(SIGPIPE, handler);
  // nohup and its like ignore it.
  if (std::signal(SIGHUP, handler) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
}

namespace {

std::string_view without_blanks(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\n\v\f\r";
  const std::size_t first = text.find_first_not_of(kBlanks);
  return first == std::string_view::npos ? "" : text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

}  // namespace

namespace {

// What says that this is one of several processes: a launcher's variable, and their number in it.
std::optional<std::pair<const char*, std::string>> number_of_processes(const char* verb) {
  // Of Open MPI, MPICH and Intel MPI, MVAPICH, Slurm, and torchrun and its like.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE",
                           "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"}) {
    const char* value = std::getenv(name);
    // An empty one is how shells take a variable away for one command.
    if (!value || *value == '\0') continue;
    const std::string_view text = without_blanks(value);
    const std::size_t first = text.find_first_not_of('0');
    if (text.find_first_not_of("0123456789") != std::string_view::npos || first == std::string_view::npos) {
      throw UsageError(
          fmt::format("{0}: {1}: expected the number of processes that a launcher started, at least 1, got '{2}'; "
                      "unset {1} if there was none",
                      verb, name, value));
    }
    if (text.substr(first) != "1") return std::pair(name, std::string(text));
  }
  return std::nullopt;
}

}  // namespace

bool one_of_several(const char* verb) { return number_of_processes(verb).has_value(); }

void refuse_many_processes(const char* verb, const char* why) {
  const auto found = number_of_processes(verb);
  if (!found) return;
  throw UsageError(fmt::format(
      "{0}: {1}={2} says that this is one of {2} processes{3}; start one process, or unset {1} if it is one", verb,
      found->first, found->second, why));
}

void complain(const std::string& text) {
  std::fflush(stdout);
  std::string line = printable_lines(text);
  std::replace(line.begin(), line.end(), '\n', ' ');
  const std::string who = g_rank > 0 ? fmt::format("halfstep (rank {})", g_rank) : std::string("halfstep");
  std::fprintf(stderr, "%s: %s\n", who.c_str(), line.c_str());
}

namespace {

// Of other programs' launchers.
constexpr const char* kLauncherFlags[] = {"--dist-url", "--dist-backend", "--world-size", "--rank",
                                          "--multiprocessing-distributed"};

// A file that is opened would otherwise take the place of a closed standard file, and get what is printed. What stands
// in goes the other way, as in gnulib: reading from it or writing to it stays an error. Returns whether all are taken.
bool open_standard_files() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    int file = ::open("/dev/null", descriptor == 0 ? O_WRONLY : O_RDONLY);
    // Where /dev is missing: a folder that can be neither read nor written.
    if (file < 0) file = ::open("/", O_PATH);
    if (file != descriptor) return false;
  }
  return true;
}

// A reader that went away, where its signal is caught, ends the program as the signal would have.
int output_failed() {
  if (g_signal == SIGPIPE) return 128 + SIGPIPE;
  complain("standard output can't be written");
  return kFailed;
}

// What fmt throws when standard output takes nothing more.
bool is_of_output(const std::exception& e) {
  return std::ferror(stdout) && dynamic_cast<const std::system_error*>(&e) != nullptr &&
         dynamic_cast<const std::filesystem::filesystem_error*>(&e) == nullptr;
}

// The library warns of such values and goes on; who starts a program by hand wants to know.
void check_environment() {
  const auto value = [](const char* name) -> std::string {
    const char* text = std::getenv(name);
    return text ? text : "";
  };
  const auto check = [&](const char* name, std::span<const char* const> choices) {
    const std::string given = value(name);
    if (given.empty() || std::find(choices.begin(), choices.end(), given) != choices.end()) return;
    throw UsageError(fmt::format("{}: expected one of {}, got '{}'", name, fmt::join(choices, ", "), given));
  };
  constexpr const char* kWinograd[] = {"off", "2x2", "4x4"};
  constexpr const char* kSwitch[] = {"0", "1"};
  constexpr const char* kLevels[] = {"debug", "info", "warning", "error"};
  check("HALFSTEP_ISA", isa_names());
  check("HALFSTEP_WINOGRAD", kWinograd);
  check("HALFSTEP_TF32", kSwitch);
  check("HALFSTEP_TUNE", kSwitch);
  check("HALFSTEP_LOG", kLevels);
  if (const std::string n = value("HALFSTEP_THREADS"); !n.empty()) parse_whole("HALFSTEP_THREADS", n, 1, kMostThreads);
}

std::vector<std::string> verb_names(const CLI::App& program) {
  std::vector<std::string> names;
  for (const CLI::App* verb : program.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(verb->get_name());
  }
  return names;
}

// The first argument, which names the verb.
void check_verb(const CLI::App& program, const std::vector<std::string>& arguments) {
  const auto names = verb_names(program);
  const std::string list = fmt::format("{}", fmt::join(names, ", "));
  if (arguments.empty()) {
    throw UsageError(fmt::format("expected a command: {}; `halfstep --help` says what they do", list));
  }
  const std::string& given = arguments[0];
  if (given.starts_with('-') || std::find(names.begin(), names.end(), given) != names.end()) return;
  throw UsageError(
      fmt::format("there is no command '{}'{}; the commands are {}", given, did_you_mean(given, names), list));
}

// What CLI11 has to say, in the words of this program.
std::string usage_text(const CLI::App& program, const CLI::ParseError& e) {
  const auto verbs = program.get_subcommands();
  const CLI::App* verb = verbs.empty() ? &program : verbs[0];
  const std::string help =
      verb == &program ? std::string("halfstep --help") : fmt::format("halfstep {} --help", verb->get_name());
  // A flag that isn't known explains best why another is missing.
  const bool extras = dynamic_cast<const CLI::ExtrasError*>(&e) != nullptr;
  if (extras || dynamic_cast<const CLI::RequiredError*>(&e) != nullptr) {
    std::vector<std::string> flags;
    for (const CLI::Option* option : verb->get_options()) {
      for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
    }
    for (const std::string& argument : program.remaining(true)) {
      if (!argument.starts_with('-')) continue;
      const std::string flag = argument.substr(0, argument.find('='));
      std::string reason;
      if (std::find(std::begin(kLauncherFlags), std::end(kLauncherFlags), flag) != std::end(kLauncherFlags)) {
        reason = flag + " is not needed: `mpirun -n N halfstep train` and `halfstep launch` start N processes";
      }
      if (reason.empty()) reason = fmt::format("there is no flag {}{}", flag, did_you_mean(flag, flags));
      return fmt::format("{}: {}; `{}` lists the flags", verb->get_name(), reason, help);
    }
    if (extras)
      return fmt::format("{}: one argument too many: '{}'; see `{}`", verb->get_name(),
                         fmt::join(program.remaining(true), " "), help);
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&e) != nullptr) {
    const std::string text = e.what(), flag = text.substr(0, text.find(':'));
    const bool twice = text.find("At Most") != std::string::npos;
    const char* what = twice                   ? "given more than once"
                       : flag.starts_with('-') ? "expected a value"
                                               : "expected one more";
    return fmt::format("{}: {}: {}; see `{}`", verb->get_name(), flag, what, help);
  }
  return fmt::format("{}{}; see `{}`", verb == &program ? std::string() : verb->get_name() + ": ", e.what(), help);
}

int run(int argc, char** argv) {
  g_arguments.assign(argv + std::min(argc, 1), argv + argc);
  if (!open_standard_files()) return kFailed;
  // Over a limit, writing shall fail, not the program.
  std::signal(SIGXFSZ, SIG_IGN);
  CLI::App program{"Halfstep trains neural networks in mixed precision."};
  program.name("halfstep");
  program.require_subcommand(1);
  program.set_version_flag("--version", "halfstep " HALFSTEP_VERSION);
  program.set_help_all_flag("--help-all", "Help for every verb");
  int status = kDone;
  add_train(program, status);
  add_eval(program, status);
  add_predict(program, status);
  add_bench(program, status);
  add_compare(program, status);
  add_data(program, status);
  add_convert(program, status);
  add_inspect(program, status);
  add_export(program, status);
  add_quantize(program, status);
  add_summary(program, status);
  add_ops(program, status);
  add_devices(program, status);
  add_launch(program, status);
  add_plan(program, status);
  add_plan_parallel(program, status);
  try {
    check_verb(program, g_arguments);
    check_environment();
    std::vector<std::string> arguments = with_standard_values(program, g_arguments);
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
    program.parse(arguments);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) {
      complain(usage_text(program, e));
      return kUsage;
    }
    program.exit(e);  // prints the help or the version
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
    if (is_of_output(e)) return output_failed();
    complain(e.what());
    dist::ProcessGroup::report_failure(e.what());
    return kFailed;
  }
  if (status > 128) return status;  // a signal, of which all was said
  // Output that a full disk or a closed pipe swallowed is no success.
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) return output_failed();
  return status;
}

}  // namespace
}  // namespace halfstep::cli

int main(int argc, char** argv) {
  // MPI's launcher starts it in place of ssh.
  if (argc > 0 && std::filesystem::path(argv[0]).filename() == halfstep::cli::kAgentName) {
    return halfstep::cli::run_as_agent(argc, argv);
  }
  return halfstep::cli::run(argc, argv);
}
