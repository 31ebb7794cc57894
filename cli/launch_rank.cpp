// SPDX-License-Identifier: Apache-2.0
#include "cli/launch_rank.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "cli/launch_channel.h"
#include "cli/launch_nodes.h"
#include "cli/verbs.h"
#include "halfstep/core/text.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostUnfinishedLine = 1 << 16;
constexpr auto kTimeOfOrphans = std::chrono::seconds(5);
// What a process that the rank left behind may still write, after the rank has ended.
constexpr int kLastOutputMilliseconds = 200;
constexpr auto kLastOutputAtMost = std::chrono::seconds(1);

int number_in(std::initializer_list<const char*> variables, int otherwise) {
  for (const char* name : variables) {
    if (const char* text = std::getenv(name); text && *text != '\0') return std::atoi(text);
  }
  return otherwise;
}

// Ranks on one machine share its processors.
void share_processors() {
  for (const char* name : {"HALFSTEP_THREADS", "OMP_NUM_THREADS"}) {
    if (const char* text = std::getenv(name); text && *text != '\0') return;
  }
  const int ranks = number_in({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"}, 1);
  const std::string threads = std::to_string(std::max(1, num_threads() / std::max(1, ranks)));
  ::setenv("HALFSTEP_THREADS", threads.c_str(), 1);
  ::setenv("OMP_NUM_THREADS", threads.c_str(), 1);
}

// Writes each line with the rank before it, one line at a time of all ranks on the machine.
class PrefixedOutput {
 public:
  PrefixedOutput(int rank, int out, const std::string& lock)
      : prefix_(fmt::format("[rank {}] ", rank)),
        out_(out),
        lock_(::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {}

  void add(std::string_view bytes) {
    buffer_ += bytes;
    const std::size_t end = buffer_.rfind('\n');
    if (end != std::string::npos) {
      write(std::string_view(buffer_).substr(0, end + 1));
      buffer_.erase(0, end + 1);
    }
    if (buffer_.size() > kMostUnfinishedLine) finish();
  }
  void finish() {
    if (!buffer_.empty()) write(buffer_ + "\n");
    buffer_.clear();
  }

 private:
  void write(std::string_view lines) const {
    std::string text;
    while (!lines.empty()) {
      const std::size_t end = lines.find('\n') + 1;
      text += prefix_;
      text += lines.substr(0, end);
      lines.remove_prefix(end);
    }
    if (lock_) ::flock(lock_.get(), LOCK_EX);
    write_whole(out_, text);
    if (lock_) ::flock(lock_.get(), LOCK_UN);
  }

  std::string prefix_, buffer_;
  int out_;
  File lock_;
};

class Rank {
 public:
  Rank(int rank, File socket, std::vector<File> files, fs::path folder)
      : rank_(rank),
        folder_(std::move(folder)),
        socket_(std::move(socket)),
        files_(std::move(files)),
        errors_(rank, files_.size() == 2 ? files_[1].get() : STDERR_FILENO, (folder_ / "lock").string()) {}

  int run(const std::vector<std::string>& program) {
    sigset_t watched;
    sigemptyset(&watched);
    for (const int s : {SIGCHLD, SIGTERM, SIGINT, SIGHUP}) sigaddset(&watched, s);
    ::sigprocmask(SIG_BLOCK, &watched, &before_);
    signals_ = File(::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!signals_ || !start(program)) {
      const int error = errno;
      send_line(socket_.get(), "ended 1 0");
      complain(fmt::format("launch: rank {} can't be started: {}", rank_, std::strerror(error)));
      kill_program(SIGKILL);
      ended_ = true;
    }
    while (!left_) turn();
    return kDone;
  }

 private:
  using Clock = std::chrono::steady_clock;

  bool start(const std::vector<std::string>& program) {
    std::array<int, 2> ends{-1, -1};
    if (rank_ != 0 && ::pipe2(ends.data(), O_CLOEXEC) != 0) return false;
    output_ = File(ends[0]);
    const File written(ends[1]);
    const pid_t own = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) return false;
    if (pid_ == 0) become(program, written.get(), own);
    ::setpgid(pid_, pid_);
    return send_line(socket_.get(), fmt::format("started {}", pid_));
  }

  [[noreturn]] void become(const std::vector<std::string>& program, int errors, pid_t parent) {
    ::setpgid(0, 0);  // signals are for all that it starts
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(kFailed);
    const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    ::dup2(nothing, STDIN_FILENO);
    if (rank_ != 0) {
      ::dup2(nothing, STDOUT_FILENO);
      ::dup2(errors, STDERR_FILENO);
    } else if (files_.size() == 2) {
      ::dup2(files_[0].get(), STDOUT_FILENO);
      ::dup2(files_[1].get(), STDERR_FILENO);
    }
    ::unsetenv(kLaunchVariable);
    ::unsetenv(kOutputVariable);
    if (rank_ == 0 && files_.size() == 2) ::setenv(kOutputVariable, "direct", 1);
    for (const int s : {SIGPIPE, SIGXFSZ}) ::signal(s, SIG_DFL);
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
    std::vector<char*> arguments;
    for (const std::string& a : program) arguments.push_back(const_cast<char*>(a.c_str()));
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    const int error = errno;
    complain(fmt::format("launch: {} can't be started: {}", shown_path(program[0]), std::strerror(error)));
    // As shells have it.
    constexpr int kNotFound = 127, kNotStarted = 126;
    ::_exit(error == ENOENT ? kNotFound : kNotStarted);
  }

  void turn() {
    std::array<pollfd, 3> files{{{.fd = signals_.get(), .events = POLLIN, .revents = 0},
                                 {.fd = socket_.get(), .events = POLLIN, .revents = 0},
                                 {.fd = output_.get(), .events = POLLIN, .revents = 0}}};
    ::poll(files.data(), files.size(), socket_ && !others_failed_ ? -1 : 100);
    if (files[2].revents) read_output();
    if (files[0].revents) read_signals();
    if (files[1].revents) read_orders();
    if (!socket_ && !ended_ && Clock::now() > kill_at_) kill_program(SIGKILL);
    if (others_failed_ && is_stopped()) {
      killed_here_ = true;
      kill_program(SIGKILL);
    }
  }

  bool is_stopped() const {
    siginfo_t info{};
    return !ended_ && pid_ > 1 && ::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == pid_;
  }

  // Only ever the group that was made: -1 would be for all processes.
  void kill_program(int number) const {
    if (pid_ > 1 && !ended_) ::kill(-pid_, number);
  }

  bool read_output() {
    std::array<char, 1 << 16> piece;
    const ssize_t n = ::read(output_.get(), piece.data(), piece.size());
    if (n > 0) {
      errors_.add(std::string_view(piece.data(), static_cast<std::size_t>(n)));
      return true;
    }
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return true;
    output_.close();
    return false;
  }

  void read_signals() {
    signalfd_siginfo info{};
    while (::read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
      if (info.ssi_signo == SIGCHLD) {
        int status = 0;
        if (!ended_ && ::waitpid(pid_, &status, WNOHANG) == pid_) end(status);
      } else if (ended_) {
        left_ = true;  // MPI's launcher ends the job
      } else {
        kill_program(static_cast<int>(info.ssi_signo));
      }
    }
  }

  void end(int status) {
    ended_ = true;
    pollfd wait{.fd = output_.get(), .events = POLLIN, .revents = 0};
    // Its own is in the pipe by now, and is taken by the first read.
    const Clock::time_point until = Clock::now() + kLastOutputAtMost;
    while (output_ && ::poll(&wait, 1, kLastOutputMilliseconds) == 1 && read_output() && Clock::now() < until) {
    }
    output_.close();
    errors_.finish();
    const int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (!socket_ ||
        !send_line(socket_.get(), fmt::format("ended {} {} {}", WEXITSTATUS(status), number, killed_here_ ? 1 : 0)))
      left_ = true;
  }

  void read_orders() {
    const bool more = orders_.read_from(socket_.get());
    std::string line;
    while (orders_.next(line)) {
      if (line == "leave") left_ = true;
      if (line == "end-if-stopped") others_failed_ = true;
      if (line.starts_with("signal ") && !ended_) kill_program(std::atoi(line.c_str() + 7));
    }
    if (more || left_) return;
    // The launcher is gone, and can't clear away what it made. The program may finish its step, and is then ended.
    socket_.close();
    for (const fs::path& made : {folder_ / "s", folder_ / "lock", folder_}) ::remove(made.c_str());
    if (ended_) {
      left_ = true;
      return;
    }
    kill_program(SIGTERM);
    kill_at_ = Clock::now() + kTimeOfOrphans;
  }

  int rank_;
  fs::path folder_;  // of the launcher, where that is on this machine
  File socket_;
  std::vector<File> files_;
  PrefixedOutput errors_;
  LineReader orders_;
  File signals_, output_;
  sigset_t before_{};
  pid_t pid_ = -1;
  bool ended_ = false, left_ = false, others_failed_ = false, killed_here_ = false;
  Clock::time_point kill_at_;
};

}  // namespace

int run_as_rank(const std::vector<std::string>& program) {
  const char* variable = std::getenv(kLaunchVariable);
  const int rank = number_in({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}, -1);
  const LaunchAddress address = LaunchAddress::parse(variable ? variable : "");
  if (address.token.empty() || rank < 0 || program.empty()) {
    throw UsageError("launch: --as-rank is for the processes that `halfstep launch` starts");
  }
  // MPI's launcher may know the folder of node 0 only.
  if (const char* folder = std::getenv(kFolderVariable); folder && ::chdir(folder) != 0) {
    complain(fmt::format("launch: rank {}: {}: {}", rank, shown_path(folder), std::strerror(errno)));
    return kFailed;
  }
  ::unsetenv(kFolderVariable);
  std::signal(SIGPIPE, SIG_IGN);
  share_processors();
  File socket = connect_to_launcher(address);
  std::string answer;
  std::vector<File> files;
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  if (!socket || !send_line(socket.get(), fmt::format("hello {} {} {}", address.token, rank, host.data())) ||
      !receive_line(socket.get(), answer, files) || answer != "go") {
    complain(fmt::format("launch: rank {} on {} can't reach the launcher", rank, host.data()));
    return kFailed;
  }
  return Rank(rank, std::move(socket), std::move(files), fs::path(address.socket).parent_path()).run(program);
}

}  // namespace halfstep::cli
