// SPDX-License-Identifier: Apache-2.0
#include "cli/launch_nodes.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "cli/launch_channel.h"
#include "cli/launch_frames.h"
#include "cli/verbs.h"
#include "halfstep/core/text.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr std::chrono::seconds kToCome{600}, kToSayThatItWaits{10};

std::string address_of(const sockaddr_in& a) {
  std::array<char, INET_ADDRSTRLEN> text{};
  return ::inet_ntop(AF_INET, &a.sin_addr, text.data(), text.size()) ? text.data() : "";
}

std::string first_difference(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const std::string one = i < a.size() ? a[i] : "nothing", other = i < b.size() ? b[i] : "nothing";
    if (one != other) return fmt::format("{} on node 0, {} there", printable_start(one), printable_start(other));
  }
  return {};
}

File listen_on(int port, const char* flag) {
  File socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_port = htons(static_cast<std::uint16_t>(port));
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&any), sizeof(any)) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    throw UsageError(fmt::format("{}: port {} can't be used: {}", flag, port, std::strerror(errno)));
  }
  return socket;
}

}  // namespace

struct Nodes::Impl {
  struct Node {
    File socket;
    std::string address, token, host;
    int port = 0;
  };

  explicit Impl(const NodeTask& t) : task(t) {
    machines.push_back({"", task.ranks});
    const File listener = listen_on(task.port, "--master-port");
    nodes.resize(static_cast<std::size_t>(task.nodes));
    machines.resize(static_cast<std::size_t>(task.nodes));
    std::size_t here = 1;
    const auto begin = Clock::now();
    bool said = false;
    while (here < nodes.size()) {
      pollfd wait{.fd = listener.get(), .events = POLLIN, .revents = 0};
      if (::poll(&wait, 1, 500) == 1) here += welcome(listener.get()) ? 1 : 0;
      const auto waited = Clock::now() - begin;
      if (waited > kToCome) {
        refuse_all(fmt::format("node {} didn't come", fmt::join(missing(), ", ")));
      } else if (waited > kToSayThatItWaits && !std::exchange(said, true)) {
        complain(fmt::format("launch: waiting for node {} at port {}", fmt::join(missing(), ", "), task.port));
      }
    }
    // Two machines with one address are one, whose ranks MPI's launcher would start together.
    // The first is named as the others see it: localhost would be each of them.
    machines[0].name = own_address(nodes[1].socket.get());
    make_agent();
    std::set<std::string> names;
    for (std::size_t i = 1; i < nodes.size(); ++i) {
      const std::string& address = nodes[i].address;
      const bool own = address.starts_with("127.") || own_address(nodes[i].socket.get()) == address;
      machines[i].name =
          own || !names.insert(address).second ? fmt::format("127.77.{}.{}", i / 250, i % 250 + 1) : address;
      send_frame(nodes[i].socket.get(), json{{"agent", agent}}.dump());
    }
    thread = std::thread([this] { listen_to_nodes(); });
  }

  ~Impl() {
    ended = true;
    if (thread.joinable()) thread.join();
    for (std::size_t i = 1; i < nodes.size(); ++i) {
      if (nodes[i].socket) send_frame(nodes[i].socket.get(), json{{"status", status}}.dump());
    }
    std::error_code ignored;
    if (!folder.empty()) fs::remove_all(folder, ignored);
  }

  std::vector<std::size_t> missing() const {
    std::vector<std::size_t> result;
    for (std::size_t i = 1; i < nodes.size(); ++i) {
      if (!nodes[i].socket) result.push_back(i);
    }
    return result;
  }

  [[noreturn]] void refuse_all(const std::string& why) {
    for (Node& n : nodes) {
      if (n.socket) send_frame(n.socket.get(), json{{"error", why}}.dump());
    }
    throw UsageError("launch: " + why);
  }

  static std::string own_address(int socket) {
    sockaddr_in own{};
    socklen_t size = sizeof(own);
    return ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) == 0 ? address_of(own) : std::string();
  }

  // Whether one more has come.
  bool welcome(int listener) {
    sockaddr_in from{};
    socklen_t size = sizeof(from);
    File socket(::accept4(listener, reinterpret_cast<sockaddr*>(&from), &size, SOCK_CLOEXEC));
    if (!socket) return false;
    end_when_cut(socket.get());
    std::string text;
    if (!receive_frame(socket.get(), text, kFrameSeconds)) return false;
    const json hello = json::parse(text, nullptr, false);
    if (!hello.is_object() || !hello.contains("halfstep_node")) return false;  // a stranger
    const int rank = hello.value("halfstep_node", 0);
    const std::string host = printable_start(hello.value("host", ""));
    std::string why;
    const auto same = [&](const char* what, const std::string& mine, const std::string& theirs) {
      if (why.empty() && mine != theirs) {
        why = fmt::format("expected the same {} on all machines, got {} on node 0, {} on node {} (host {})", what,
                          printable_start(mine), printable_start(theirs), rank, host);
      }
    };
    same("version of Halfstep", HALFSTEP_VERSION, hello.value("version", ""));
    same("--nnodes", std::to_string(task.nodes), std::to_string(hello.value("nodes", 0)));
    same("path of the program", task.program, hello.value("program", ""));
    const auto words = hello.value("words", std::vector<std::string>());
    if (why.empty() && words != task.words) {
      why = fmt::format("expected the same command on all machines, got {} (node {}, host {})",
                        first_difference(task.words, words), rank, host);
    }
    if (why.empty() && (rank < 1 || rank >= task.nodes)) {
      why = fmt::format("--node-rank: expected a number from 0 to {}, got {} (host {})", task.nodes - 1, rank, host);
    }
    if (why.empty() && nodes[static_cast<std::size_t>(rank)].socket) {
      why = fmt::format("--node-rank: two machines say that they are node {}: {} and {}", rank,
                        nodes[static_cast<std::size_t>(rank)].host, host);
    }
    if (!why.empty()) {
      send_frame(socket.get(), json{{"error", why}}.dump());
      refuse_all(why);
    }
    nodes[static_cast<std::size_t>(rank)] = {std::move(socket), address_of(from), hello.value("token", ""), host,
                                             hello.value("port", 0)};
    machines[static_cast<std::size_t>(rank)].ranks = hello.value("ranks", std::uint64_t{1});
    return true;
  }

  // MPI's launchers take no command with blanks in its path.
  void make_agent() {
    folder = std::string(kAgentFolder) + "XXXXXX";
    if (!::mkdtemp(folder.data())) {
      folder.clear();
      throw UsageError(fmt::format("launch: no folder can be made in /tmp: {}", std::strerror(errno)));
    }
    agent = folder + "/" + kAgentName;
    fs::create_symlink(task.program, agent);
  }

  // A signal to one of the machines is one to the job.
  void listen_to_nodes() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
    std::vector<pollfd> files;
    for (std::size_t i = 1; i < nodes.size(); ++i) {
      files.push_back({.fd = nodes[i].socket.get(), .events = POLLIN, .revents = 0});
    }
    while (!ended) {
      if (::poll(files.data(), files.size(), 200) <= 0) continue;
      for (pollfd& f : files) {
        if (!f.revents) continue;
        std::string text;
        if (!receive_frame(f.fd, text, kFrameSeconds)) {
          f.fd = -1;  // its ranks are heard of by others
          continue;
        }
        const json message = json::parse(text, nullptr, false);
        const int number = message.is_object() ? message.value("signal", 0) : 0;
        if (number == SIGINT || number == SIGTERM || number == SIGHUP) ::kill(::getpid(), number);
      }
    }
  }

  NodeTask task;
  std::vector<Node> nodes;  // by number; the first is this one
  std::vector<Machine> machines;
  std::string folder, agent;
  std::thread thread;
  std::atomic<bool> ended{false};
  int status = kFailed;
};

Nodes::Nodes(const NodeTask& task) : impl_(std::make_unique<Impl>(task)) {}
Nodes::~Nodes() = default;
const std::vector<Nodes::Machine>& Nodes::machines() const { return impl_->machines; }
const std::string& Nodes::agent() const { return impl_->agent; }
void Nodes::set_status(int status) { impl_->status = status; }

void Nodes::prepare_environment() const {
  json list = json::object();
  for (std::size_t i = 1; i < impl_->nodes.size(); ++i) {
    const Impl::Node& n = impl_->nodes[i];
    list[impl_->machines[i].name] = {{"address", n.address}, {"port", n.port}, {"token", n.token}};
  }
  ::setenv(kNodesVariable, list.dump().c_str(), 1);
}

File connect_to_node_0(const NodeTask& task) {
  const auto begin = Clock::now();
  std::string problem;
  for (bool said = false;; std::this_thread::sleep_for(std::chrono::milliseconds(300))) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    if (const int e = ::getaddrinfo(task.address.c_str(), nullptr, &hints, &found)) {
      problem = ::gai_strerror(e);
    } else {
      LaunchAddress to;
      to.port = task.port;
      for (const addrinfo* i = found; i; i = i->ai_next) {
        to.addresses.push_back(address_of(*reinterpret_cast<const sockaddr_in*>(i->ai_addr)));
      }
      ::freeaddrinfo(found);
      if (File socket = connect_to_launcher(to)) return socket;
      problem = "no connection";
    }
    const auto waited = Clock::now() - begin;
    const auto text = fmt::format("{} port {}: {}", printable_start(task.address), task.port, problem);
    if (waited > kToCome) throw UsageError(fmt::format("launch: node 0 can't be reached at {}", text));
    if (waited > kToSayThatItWaits && !std::exchange(said, true)) {
      complain(fmt::format("launch: waiting for node 0 at {}", text));
    }
  }
}

int run_as_agent(int argc, char** argv) {
  int i = 1;
  while (i < argc && argv[i][0] == '-') ++i;
  const std::string name = i < argc ? argv[i++] : "";
  std::string command;
  for (; i < argc; ++i) command += (command.empty() ? "" : " ") + std::string(argv[i]);
  const char* text = std::getenv(kNodesVariable);
  const json list = json::parse(text ? text : "", nullptr, false);
  if (!list.is_object() || !list.contains(name)) {
    complain(fmt::format("launch: {} is no machine of this job", printable_start(name)));
    return kFailed;
  }
  const json& node = list[name];
  LaunchAddress to;
  to.port = node.value("port", 0);
  to.addresses = {node.value("address", "")};
  const File socket = connect_to_launcher(to);
  if (!socket || !send_frame(socket.get(), json{{"token", node.value("token", "")}, {"command", command}}.dump())) {
    complain(fmt::format("launch: node {} can't be reached", name));
    return kFailed;
  }
  for (std::string frame; receive_frame(socket.get(), frame, -1);) {
    if (frame.starts_with('s')) return std::atoi(frame.c_str() + 1);
    if (frame.starts_with('o')) write_whole(STDERR_FILENO, std::string_view(frame).substr(1));
  }
  return kFailed;  // the machine is lost
}

}  // namespace halfstep::cli
