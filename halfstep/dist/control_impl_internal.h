// SPDX-License-Identifier: Apache-2.0
// Internal: the state of a Control and what its thread does with it (control.cpp).
#pragma once

#include <unistd.h>

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/steady_timer.hpp>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "halfstep/dist/control.h"
#include "halfstep/dist/control_peer_internal.h"
#include "halfstep/dist/control_text_internal.h"

namespace halfstep::dist {

namespace detail {
inline std::chrono::milliseconds passed(std::chrono::steady_clock::time_point since,
                                        std::chrono::steady_clock::time_point now) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(now - since);
}
}  // namespace detail

struct Control::Impl {
  using Clock = std::chrono::steady_clock;
  using Kind = detail::ControlMessage::Kind;

  Impl(int own, int ranks, ControlOptions o) : rank(own), size(ranks), options(std::move(o)) {}
  ~Impl() { stop(); }

  void set_up(std::vector<std::string> hosts, const Exchange& exchange);
  void start();
  void say_goodbye();
  void stop();

  // Everything below runs on the thread, but publish() and what it protects.
  void listen(bool local);
  void accept();
  void connect();
  void try_connect();
  bool on_message(const std::shared_ptr<detail::Peer>& peer, const detail::ControlMessage& m);
  bool on_hello(const std::shared_ptr<detail::Peer>& peer, const detail::ControlMessage& m);
  void on_failure_message(const Failure& f);
  void on_closed(const std::shared_ptr<detail::Peer>& peer);
  void schedule_tick();
  void tick();
  void watch(Clock::time_point now);
  void watch_steps(Clock::time_point now);
  void look_for_movement(Clock::time_point now, bool was_away);
  void look_for_stop();
  void ask_to_stop();
  void check_answers();
  void decide(Failure::What what, int who, std::string text);
  void adopt(Failure f);
  void send_all(const std::string& bytes, bool may_be_dropped = false);
  void member_left(int who);
  void check_parted();
  detail::Activity own_activity();
  // The other side of connections: rank 0 to this rank, all others to rank 0.
  bool watches(int other) const { return rank == 0 ? other != 0 : other == 0; }
  void notify(bool& flag) {
    const std::lock_guard lock(mutex);
    flag = true;
    changed.notify_all();
  }

  const int rank, size;
  const pid_t process = ::getpid();
  const ControlOptions options;
  std::string token, answer_token;
  std::vector<asio::ip::tcp::endpoint> addresses;  // of rank 0

  asio::io_context io;
  asio::steady_timer timer{io}, retry{io}, stop_timer{io};
  std::optional<asio::ip::tcp::acceptor> acceptor;
  std::vector<detail::RankState> ranks;
  std::vector<std::shared_ptr<detail::Peer>> peers;  // by rank
  std::set<std::shared_ptr<detail::Peer>> strangers;
  std::string connect_error;
  Clock::time_point started, ticked, asked;
  Clock::time_point moved, last_activity;  // of this process: when it was last seen to move, and mine_since then
  std::string blocked;                     // empty: it moves
  int warned_of = -1;                      // the rank that was warned of
  bool all_here = false, parting = false, stopping = false;
  std::thread thread;

  mutable std::mutex mutex;
  std::condition_variable changed;
  // Protected by it:
  detail::Activity mine, collective;  // what it does, and what it did before it began to work on something else
  Clock::time_point mine_since = Clock::now();
  std::map<std::uint64_t, std::string> busy;  // by number
  std::uint64_t last_busy = 0;
  std::optional<Failure> failure;
  bool ready = false, parted = false;
  std::atomic<bool> failed{false};
};

}  // namespace halfstep::dist
