// SPDX-License-Identifier: Apache-2.0
#include "cli/launch_size.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <sstream>
#include <thread>

#include "cli/options.h"
#include "cli/verbs.h"
#include "halfstep/core/error.h"

namespace halfstep::cli {
namespace {

constexpr std::chrono::seconds kTimeToAnswer{10};

bool is_this_machine(const std::string& host) {
  char own[256] = {};
  ::gethostname(own, sizeof own - 1);
  return host == "localhost" || host == "127.0.0.1" || host == own;
}

// `AGENT HOST true`, without a terminal to ask for a password.
pid_t begin_to_ask(const std::string& agent, const std::string& host) {
  std::vector<std::string> words;
  std::istringstream given(agent);
  for (std::string word; given >> word;) words.push_back(word);
  const std::string program = words.empty() ? "" : words[0].substr(words[0].rfind('/') + 1);
  if (program == "ssh") words.insert(words.end(), {"-oBatchMode=yes", "-oConnectTimeout=5"});
  words.insert(words.end(), {host, "true"});
  std::vector<char*> arguments;
  for (std::string& w : words) arguments.push_back(w.data());
  arguments.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::setpgid(0, 0);
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(nothing, standard);
  ::execvp(arguments[0], arguments.data());
  ::_exit(127);
}

std::vector<LaunchHost> those_that_answer(const std::vector<LaunchHost>& hosts, const std::string& agent) {
  struct Asked {
    pid_t pid = -1;
    bool done = false, answered = false;
  };
  std::vector<Asked> asked(hosts.size());
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (is_this_machine(hosts[i].name)) {
      asked[i] = {.done = true, .answered = true};
      continue;
    }
    asked[i].pid = begin_to_ask(agent, hosts[i].name);
    asked[i].done = asked[i].pid < 0;
  }
  const auto end = std::chrono::steady_clock::now() + kTimeToAnswer;
  for (bool late = false; std::any_of(asked.begin(), asked.end(), [](const Asked& a) { return !a.done; });) {
    late = late || std::chrono::steady_clock::now() > end;
    for (Asked& a : asked) {
      if (a.done) continue;
      if (late) ::kill(a.pid, SIGKILL);  // the agent itself: what it started elsewhere ends by itself
      int status = 0;
      const pid_t got = ::waitpid(a.pid, &status, late ? 0 : WNOHANG);
      if (got == 0 || (got < 0 && errno == EINTR)) continue;
      a.done = true;
      a.answered = got == a.pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::vector<LaunchHost> result;
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (asked[i].answered) {
      result.push_back(hosts[i]);
    } else {
      missing.push_back(hosts[i].name);
    }
  }
  if (!missing.empty()) {
    complain(fmt::format("launch: {} can't be reached and {} left out", fmt::join(missing, ", "),
                         missing.size() == 1 ? "is" : "are"));
  }
  return result;
}

}  // namespace

LaunchRange LaunchRange::parse(const char* flag, const std::string& text, std::uint64_t most) {
  const std::size_t colon = text.find(':');
  LaunchRange range;
  range.least = parse_whole(flag, text.substr(0, colon), 1, most);
  range.elastic = colon != std::string::npos;
  range.most = range.elastic ? parse_whole(flag, text.substr(colon + 1), 1, most) : range.least;
  if (range.least > range.most) {
    throw UsageError(fmt::format("{}: expected MIN:MAX, got {} with the larger number first", flag, text));
  }
  return range;
}

void LaunchSize::prepare(std::uint64_t shards) {
  if (all_.empty()) {
    if (shards == 0 || !elastic()) return;
    while (shards % per_node_ != 0 && per_node_ > ranks_.least) --per_node_;
    if (shards % per_node_ != 0) {
      throw Error(
          fmt::format("launch: {} rank{} that --nproc-per-node asks for don't divide the {} shards of --reproducible",
                      per_node_, per_node_ == 1 ? "" : "s", shards));
    }
    return;
  }
  hosts_ = nodes_.elastic ? those_that_answer(all_, agent_) : all_;
  if (!nodes_.elastic) return;
  if (hosts_.size() > nodes_.most) hosts_.resize(nodes_.most);
  if (hosts_.size() < nodes_.least) {
    throw Error(fmt::format("launch: {} of {} machines can be reached, and --nnodes asks for at least {}",
                            hosts_.size(), all_.size(), nodes_.least));
  }
  while (shards > 0 && shards % ranks() != 0) {
    auto from = hosts_.rbegin();
    if (hosts_.size() <= nodes_.least) {
      from = std::find_if(hosts_.rbegin(), hosts_.rend(), [](const LaunchHost& h) { return h.slots > 1; });
    }
    if (from == hosts_.rend()) {
      throw Error(
          fmt::format("launch: {} ranks, one on each machine that --nnodes asks for, don't divide the {} shards "
                      "of --reproducible",
                      ranks(), shards));
    }
    if (--from->slots == 0) hosts_.pop_back();
  }
}

void LaunchSize::shrink() {
  if (ranks_.elastic) per_node_ = std::max(per_node_ - 1, ranks_.least);
}

std::uint64_t LaunchSize::ranks() const {
  if (hosts_.empty()) return per_node_;
  std::uint64_t sum = 0;
  for (const LaunchHost& h : hosts_) sum += h.slots;
  return sum;
}

}  // namespace halfstep::cli
