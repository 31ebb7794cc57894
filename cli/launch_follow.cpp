// SPDX-License-Identifier: Apache-2.0
// `halfstep launch` on the machines other than node 0.
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <list>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "cli/launch_frames.h"
#include "cli/verbs.h"
#include "halfstep/core/text.h"

namespace halfstep::cli {

namespace fs = std::filesystem;

bool send_frame(int socket, std::string_view text) {
  const auto size = htonl(static_cast<std::uint32_t>(text.size()));
  std::string bytes(reinterpret_cast<const char*>(&size), sizeof(size));
  bytes += text;
  for (std::string_view rest = bytes; !rest.empty();) {
    const ssize_t n = ::send(socket, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    rest.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

bool receive_frame(int socket, std::string& text, int seconds) {
  constexpr std::uint32_t kMost = 1 << 24;
  const auto read_all = [&](char* to, std::size_t size) {
    for (std::size_t done = 0; done < size;) {
      pollfd wait{.fd = socket, .events = POLLIN, .revents = 0};
      const int ready = ::poll(&wait, 1, seconds < 0 ? -1 : seconds * 1000);
      if (ready < 0 && errno == EINTR) continue;
      if (ready <= 0) return false;
      const ssize_t n = ::recv(socket, to + done, size - done, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      done += static_cast<std::size_t>(n);
    }
    return true;
  };
  std::uint32_t size = 0;
  if (!read_all(reinterpret_cast<char*>(&size), sizeof(size)) || ntohl(size) > kMost) return false;
  text.assign(ntohl(size), '\0');
  return read_all(text.data(), text.size());
}

namespace {

// A command that the agent has asked for: the process of MPI on this machine.
struct Remote {
  File socket, output;
  pid_t pid = -1;
};

class Follower {
 public:
  explicit Follower(const NodeTask& task) : task_(task) {
    std::random_device source;
    token_ = fmt::format("{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
  }

  int run() {
    listen();
    node_0_ = connect_to_node_0(task_);
    if (!greet()) return kFailed;
    sigset_t watched;
    sigemptyset(&watched);
    for (const int s : {SIGCHLD, SIGTERM, SIGINT, SIGHUP}) sigaddset(&watched, s);
    ::sigprocmask(SIG_BLOCK, &watched, &before_);
    std::signal(SIGPIPE, SIG_IGN);
    signals_ = File(::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // what leaves its parent ends with this as well
    while (!over_) turn();
    end_all();
    std::error_code ignored;
    if (!agent_folder_.empty()) fs::remove_all(agent_folder_, ignored);
    return status_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void listen() {
    sockaddr_in any{};
    any.sin_family = AF_INET;
    socklen_t size = sizeof(any);
    listener_ = File(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&any), sizeof(any)) != 0 ||
        ::listen(listener_.get(), SOMAXCONN) != 0 ||
        ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&any), &size) != 0) {
      throw UsageError(fmt::format("launch: no port can be used: {}", std::strerror(errno)));
    }
    port_ = ntohs(any.sin_port);
  }

  // Until all machines are there.
  bool greet() {
    std::array<char, 256> host{};
    ::gethostname(host.data(), host.size() - 1);
    const nlohmann::json hello{{"halfstep_node", task_.rank},
                               {"nodes", task_.nodes},
                               {"version", HALFSTEP_VERSION},
                               {"host", host.data()},
                               {"program", task_.program},
                               {"ranks", task_.ranks},
                               {"words", task_.words},
                               {"port", port_},
                               {"token", token_}};
    std::string answer;
    if (!send_frame(node_0_.get(), hello.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)) ||
        !receive_frame(node_0_.get(), answer, -1)) {
      complain(fmt::format("launch: {} port {} is no node 0 of this job, or has ended", printable_start(task_.address),
                           task_.port));
      return false;
    }
    const nlohmann::json message = nlohmann::json::parse(answer, nullptr, false);
    if (message.is_object() && message.contains("agent")) {
      make_agent(message.value("agent", ""));
      return true;
    }
    complain("launch: " + printable_start(message.is_object() ? message.value("error", "") : answer, 1000));
    return false;
  }

  // Open MPI's process here looks for the agent too, and falls without it. Where both nodes are on one machine it is
  // there already.
  void make_agent(const std::string& path) {
    const fs::path folder = fs::path(path).parent_path();
    if (!folder.string().starts_with(kAgentFolder) || folder.parent_path() != "/tmp") return;
    if (::mkdir(folder.c_str(), S_IRWXU) != 0) return;
    agent_folder_ = folder;
    std::error_code ignored;
    fs::create_symlink(task_.program, folder / kAgentName, ignored);
  }

  void turn() {
    std::vector<pollfd> files;
    const auto watch = [&](int file) { files.push_back({.fd = file, .events = POLLIN, .revents = 0}); };
    watch(signals_.get());
    watch(over_ ? -1 : node_0_.get());
    watch(listener_.get());
    for (const Remote& r : remotes_) {
      watch(r.output.get());
      watch(r.socket.get());
    }
    ::poll(files.data(), files.size(), 500);
    std::size_t i = 3;
    for (Remote& r : remotes_) {
      if (files[i++].revents) pass_output(r);
      // Its agent has ended: MPI's launcher is done with it.
      if (files[i++].revents) end(r, SIGTERM);
    }
    if (files[2].revents) accept();
    if (files[1].revents) read_node_0();
    if (files[0].revents) read_signals();
    remotes_.remove_if([](const Remote& r) { return r.pid < 0 && !r.socket; });
  }

  static void end(Remote& r, int number) {
    r.socket.close();
    if (r.pid > 1) ::kill(-r.pid, number);
  }

  void pass_output(Remote& r) {
    std::array<char, 1 << 14> piece;
    const ssize_t n = ::read(r.output.get(), piece.data(), piece.size());
    if (n > 0) {
      if (r.socket) send_frame(r.socket.get(), "o" + std::string(piece.data(), static_cast<std::size_t>(n)));
    } else if (n == 0 || (errno != EINTR && errno != EAGAIN)) {
      r.output.close();
    }
  }

  void accept() {
    File socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    std::string text;
    if (!socket || !receive_frame(socket.get(), text, kFrameSeconds)) return;
    const nlohmann::json order = nlohmann::json::parse(text, nullptr, false);
    if (!order.is_object() || order.value("token", "") != token_) return;
    end_when_cut(socket.get());
    const std::string command = order.value("command", "");
    std::array<int, 2> ends{-1, -1};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return;
    Remote r{std::move(socket), File(ends[0]), -1};
    const File written(ends[1]);
    const pid_t own = ::getpid();
    const std::string folder = fs::current_path().string();
    r.pid = ::fork();
    if (r.pid == 0) {
      ::setpgid(0, 0);
      ::prctl(PR_SET_PDEATHSIG, SIGTERM);
      if (::getppid() != own) ::_exit(kFailed);
      ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
      ::dup2(written.get(), STDOUT_FILENO);
      ::dup2(written.get(), STDERR_FILENO);
      ::setenv(kFolderVariable, folder.c_str(), 1);
      std::signal(SIGPIPE, SIG_DFL);
      ::sigprocmask(SIG_SETMASK, &before_, nullptr);
      ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      ::_exit(127);
    }
    if (r.pid > 0) remotes_.push_back(std::move(r));
  }

  void read_node_0() {
    std::string text;
    over_ = true;
    if (!receive_frame(node_0_.get(), text, kFrameSeconds)) {
      if (!interrupted_) complain("launch: node 0 is lost; the ranks of this machine are ended");
      status_ = interrupted_ ? 128 + interrupted_ : kFailed;
      return;
    }
    const nlohmann::json message = nlohmann::json::parse(text, nullptr, false);
    status_ = message.is_object() ? message.value("status", kFailed) : kFailed;
  }

  void read_signals() {
    signalfd_siginfo info{};
    while (::read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
      const int number = static_cast<int>(info.ssi_signo);
      if (number != SIGCHLD) {
        interrupted_ = number;
        send_frame(node_0_.get(), nlohmann::json{{"signal", number}}.dump());
        continue;
      }
      int status = 0;
      for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
        for (Remote& r : remotes_) {
          if (r.pid != pid) continue;
          pollfd wait{.fd = r.output.get(), .events = POLLIN, .revents = 0};
          while (r.output && ::poll(&wait, 1, 0) == 1) pass_output(r);
          if (r.socket) {
            send_frame(r.socket.get(),
                       fmt::format("s{}", WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status)));
          }
          r.pid = -1;
          r.socket.close();
          r.output.close();
        }
      }
    }
  }

  // What MPI has not ended by itself.
  void end_all() {
    constexpr auto kByItself = std::chrono::seconds(2), kAfterSignal = std::chrono::seconds(5);
    const auto begin = Clock::now();
    bool asked = false;
    while (!remotes_.empty()) {
      turn();
      const auto waited = Clock::now() - begin;
      if (waited > kByItself && !std::exchange(asked, true)) {
        for (Remote& r : remotes_) end(r, SIGTERM);
      }
      if (waited > kByItself + kAfterSignal) {
        for (Remote& r : remotes_) end(r, SIGKILL);
        return;
      }
    }
  }

  const NodeTask& task_;
  std::string token_;
  fs::path agent_folder_;
  int port_ = 0;
  File listener_, node_0_, signals_;
  sigset_t before_{};
  std::list<Remote> remotes_;
  bool over_ = false;
  int interrupted_ = 0, status_ = kFailed;
};

}  // namespace

int follow_node(const NodeTask& task) { return Follower(task).run(); }

}  // namespace halfstep::cli
