// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/control.h"

#include <pthread.h>
#include <unistd.h>
#include <csignal>

#include <algorithm>
#include <asio/ip/v6_only.hpp>
#include <asio/post.hpp>
#include <nlohmann/json.hpp>
#include <system_error>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/dist/control_impl_internal.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/runtime/log.h"

namespace halfstep::dist {
namespace {

using namespace detail;
using asio::ip::tcp;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Strangers at the port that haven't shown the token yet.
constexpr std::size_t kMostStrangers = 64;
constexpr milliseconds kStrangerTime{5000};
constexpr milliseconds kGoodbyeTime{1000}, kReportTime{2000};
// Between two looks at whether this rank is asked to stop.
constexpr milliseconds kStopLook{100};

}  // namespace

// Ranks tell each other where they are, and rank 0 where it listens. Whatever fails fails on all of them.
void Control::Impl::set_up(std::vector<std::string> hosts, const Exchange& exchange) {
  const auto all = [&](const nlohmann::json& own) {
    const std::vector<std::string> texts = exchange(own.dump());
    if (texts.size() != static_cast<std::size_t>(size)) {
      fail<DistError>("control channel: expected {} texts from the exchange between ranks, got {}", size, texts.size());
    }
    std::vector<nlohmann::json> result;
    for (const std::string& t : texts) {
      result.push_back(nlohmann::json::parse(t, nullptr, false));
      if (!result.back().is_object())
        fail<DistError>("control channel: the exchange between ranks gave no JSON object");
    }
    return result;
  };
  const auto places = all({{"network", network_identity()}, {"pid", ::getpid()}});
  ranks.resize(static_cast<std::size_t>(size));
  bool local = true;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].host = std::move(hosts[r]);
    ranks[r].pid = places[r].value("pid", std::int64_t{0});
    const std::string network = places[r].value("network", "");
    local = local && !network.empty() && network == places[0].value("network", "");
  }
  nlohmann::json own = nlohmann::json::object();
  if (rank == 0) {
    try {
      listen(local);
      token = random_token();
      answer_token = random_token();
      own = {{"token", token},
             {"answer", answer_token},
             {"port", acceptor->local_endpoint().port()},
             {"addresses",
              local ? std::vector<std::string>{acceptor->local_endpoint().address().to_string()} : own_addresses()}};
      const bool same_machine_too = !local;
      if (same_machine_too) own["addresses"].push_back("127.0.0.1");
    } catch (const std::exception& e) {
      own = {{"error", e.what()}};
    }
  }
  const nlohmann::json of_first = all(own)[0];
  if (of_first.contains("error")) {
    fail<DistError>("control channel: rank 0 (host {}) can't listen on a port: {}", printable(ranks[0].host),
                    printable(of_first.value("error", "")));
  }
  token = of_first.value("token", "");
  answer_token = of_first.value("answer", "");
  for (const auto& text : of_first.value("addresses", std::vector<std::string>())) {
    asio::error_code error;
    const auto address = asio::ip::make_address(text, error);
    // Loopback is where rank 0 is for those on its machine only.
    if (error || (address.is_loopback() &&
                  places[static_cast<std::size_t>(rank)].value("network", "") != places[0].value("network", ""))) {
      continue;
    }
    addresses.emplace_back(address, of_first.value("port", std::uint16_t{0}));
  }
}

void Control::Impl::listen(bool local) {
  const auto open = [&](const tcp::endpoint& where) {
    tcp::acceptor result(io);
    result.open(where.protocol());
    if (where.protocol() == tcp::v6() && !local) result.set_option(asio::ip::v6_only(false));
    result.bind(where);
    result.listen();
    acceptor.emplace(std::move(result));
  };
  try {
    open(local ? tcp::endpoint(asio::ip::address_v4::loopback(), 0) : tcp::endpoint(tcp::v6(), 0));
  } catch (const std::system_error&) {
    open(local ? tcp::endpoint(asio::ip::address_v6::loopback(), 0) : tcp::endpoint(tcp::v4(), 0));
  }
}

void Control::Impl::start() {
  peers.resize(static_cast<std::size_t>(size));
  started = ticked = moved = Clock::now();
  ranks[static_cast<std::size_t>(rank)].here = true;
  rank == 0 ? accept() : connect();
  schedule_tick();
  if (options.stop) look_for_stop();
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread = std::thread([this] {
      pthread_setname_np(pthread_self(), "halfstep_watch");
      io.run();
    });
  } catch (const std::system_error& e) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    fail<DistError>("control channel: no thread could be started: {}", e.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  std::unique_lock lock(mutex);
  // The ticks end this: a rank that is missing is a failure.
  changed.wait(lock, [&] { return ready || failure; });
  if (!ready) fail<DistError>("control channel: {}", failure->text);
}

void Control::Impl::accept() {
  acceptor->async_accept([this](const asio::error_code& e, tcp::socket socket) {
    if (!acceptor->is_open()) return;
    if (!e && strangers.size() < kMostStrangers) {
      const auto peer = std::make_shared<Peer>(std::move(socket));
      strangers.insert(peer);
      peer->start([this](const auto& p, const ControlMessage& m) { return on_message(p, m); },
                  [this](const auto& p) { on_closed(p); });
      const auto limit = std::make_shared<asio::steady_timer>(io, kStrangerTime);
      limit->async_wait([this, limit, peer](const asio::error_code&) {
        if (strangers.erase(peer) > 0) peer->close();
      });
    }
    if (!e) return accept();
    // Out of descriptors, say: without a pause this would be a busy loop.
    retry.expires_after(options.heartbeat);
    retry.async_wait([this](const asio::error_code& ended) {
      if (!ended) accept();
    });
  });
}

void Control::Impl::connect() {
  if (addresses.empty()) {
    return asio::post(io, [this] {
      decide(Failure::What::silent, 0,
             fmt::format("{} has no address that {} could reach", rank_text(ranks, 0), rank_text(ranks, rank)));
    });
  }
  try_connect();
}

// All addresses at once: some may lead nowhere, or to another machine. The first that shows rank 0's token is taken.
void Control::Impl::try_connect() {
  for (const tcp::endpoint& to : addresses) {
    const auto peer = std::make_shared<Peer>(tcp::socket(io));
    strangers.insert(peer);
    peer->connect(to, [this, peer, to](const asio::error_code& e) {
      if (strangers.count(peer) == 0) return;
      if (e) {
        connect_error = fmt::format("{} port {}: {}", to.address().to_string(), to.port(), e.message());
        strangers.erase(peer);
        return peer->close();
      }
      peer->start([this](const auto& p, const ControlMessage& m) { return on_message(p, m); },
                  [this](const auto& p) { on_closed(p); });
      peer->send(encode({.kind = Kind::hello, .token = token, .rank = static_cast<std::uint32_t>(rank)}));
    });
  }
  retry.expires_after(std::max(options.heartbeat, options.connect / 8));
  retry.async_wait([this](const asio::error_code& ended) {
    if (ended || peers[0]) return;
    for (const auto& peer : std::exchange(strangers, {})) peer->close();
    try_connect();
  });
}

bool Control::Impl::on_message(const std::shared_ptr<Peer>& peer, const ControlMessage& m) {
  if (!peer->trusted) {
    if (rank == 0) return m.kind == Kind::hello && on_hello(peer, m);
    // What answers here may be a stranger that has the address of rank 0 on another machine.
    if (m.kind != Kind::accepted || !same_token(m.token, answer_token) || peers[0]) return false;
    peer->trusted = true;
    peer->rank = 0;
    peers[0] = peer;
    strangers.erase(peer);
    for (const auto& other : std::exchange(strangers, {})) other->close();
    ranks[0].here = true;
    ranks[0].heard = Clock::now();
    return true;
  }
  RankState& from = ranks[static_cast<std::size_t>(peer->rank)];
  from.heard = Clock::now();
  switch (m.kind) {
    case Kind::beat:
      from.activity = m.activity;
      return true;
    case Kind::goodbye:
      from.activity = m.activity;
      member_left(peer->rank);
      return false;
    case Kind::ready:
      all_here = true;
      notify(ready);
      return true;
    case Kind::report:
      if (rank == 0) {
        decide(Failure::What::error, peer->rank,
               fmt::format("{} failed: {}", rank_text(ranks, peer->rank), printable(m.failure.text)));
      }
      return true;
    case Kind::failure:
      on_failure_message(m.failure);
      return true;
    case Kind::stop:
      if (rank != 0) peer->send(encode({.kind = Kind::beat, .activity = own_activity()}));
      ask_to_stop();
      return true;
    case Kind::hello:
    case Kind::accepted:
      break;
  }
  return true;
}

bool Control::Impl::on_hello(const std::shared_ptr<Peer>& peer, const ControlMessage& m) {
  if (!same_token(m.token, token) || m.rank == 0 || m.rank >= static_cast<std::uint32_t>(size) || parting) return false;
  if (peers[m.rank]) return false;  // it came by another address already
  strangers.erase(peer);
  peer->trusted = true;
  peer->rank = static_cast<int>(m.rank);
  peers[m.rank] = peer;
  ranks[m.rank].here = true;
  ranks[m.rank].heard = Clock::now();
  peer->send(encode({.kind = Kind::accepted, .token = answer_token}));
  all_here = std::all_of(ranks.begin(), ranks.end(), [](const RankState& r) { return r.here; });
  if (all_here) {
    asio::error_code ignored;
    acceptor->close(ignored);
    send_all(encode({.kind = Kind::ready}));
    notify(ready);
  }
  return true;
}

// Of rank 0 to the others; or of the others to a rank 0 that was away when they noticed.
void Control::Impl::on_failure_message(const Failure& f) {
  if (f.rank < 0 || f.rank >= size || (rank == 0 && f.rank != 0)) return;
  adopt(f);
}

void Control::Impl::on_closed(const std::shared_ptr<Peer>& peer) {
  if (strangers.erase(peer) > 0 || peer->rank < 0) return;
  if (!failed && !parting && !ranks[static_cast<std::size_t>(peer->rank)].left) {
    ranks[static_cast<std::size_t>(rank)].activity = own_activity();
    decide(
        Failure::What::ended, peer->rank,
        fmt::format("{} ended without a goodbye (killed, or ended by an error); at its last heartbeat, {} before, {}",
                    rank_text(ranks, peer->rank),
                    seconds_text(passed(ranks[static_cast<std::size_t>(peer->rank)].heard, Clock::now())),
                    circumstances(ranks, peer->rank)));
  }
  check_parted();
}

void Control::Impl::member_left(int who) {
  ranks[static_cast<std::size_t>(who)].left = true;
  peers[static_cast<std::size_t>(who)]->close();
  check_parted();
}

void Control::Impl::schedule_tick() {
  timer.expires_after(options.heartbeat);
  timer.async_wait([this](const asio::error_code& e) {
    if (e) return;
    tick();
    schedule_tick();
  });
}

void Control::Impl::tick() {
  const Clock::time_point now = Clock::now();
  // If it was this process that didn't run, what others sent meanwhile has yet to be read.
  const bool was_away = passed(ticked, now) > std::max(3 * options.heartbeat, options.lost / 2);
  ticked = now;
  if (was_away) {
    for (RankState& r : ranks) r.heard = now;
  }
  if (parting) return;
  look_for_movement(now, was_away);
  ranks[static_cast<std::size_t>(rank)].activity = own_activity();
  ranks[static_cast<std::size_t>(rank)].heard = now;
  send_all(encode({.kind = Kind::beat, .activity = ranks[static_cast<std::size_t>(rank)].activity}), true);
  if (!failed && !was_away) watch(now);
}

void Control::Impl::look_for_stop() {
  stop_timer.expires_after(std::min(options.heartbeat, kStopLook));
  stop_timer.async_wait([this](const asio::error_code& e) {
    if (e || stopping) return;
    all_here&& options.stop() ? ask_to_stop() : look_for_stop();
  });
}

// Stopping takes all ranks: one that doesn't answer is not to be waited for as long as in training, since whoever sent
// the signal may send the one that kills soon.
void Control::Impl::ask_to_stop() {
  if (std::exchange(stopping, true) || parting || failed) return;
  asked = Clock::now();
  send_all(encode({.kind = Kind::stop}));
  stop_timer.expires_after(options.answer);
  stop_timer.async_wait([this](const asio::error_code& e) {
    if (!e) check_answers();
  });
}

void Control::Impl::check_answers() {
  if (parting || failed) return;
  const Clock::time_point now = Clock::now();
  // As in tick(): answers may have come and not been read.
  if (passed(ticked, now) > std::max(3 * options.heartbeat, options.lost / 2)) {
    stopping = false;
    return ask_to_stop();
  }
  for (int r = 0; r < size; ++r) {
    const RankState& other = ranks[static_cast<std::size_t>(r)];
    if (!watches(r) || !other.here || other.left || other.heard > asked) continue;
    ranks[static_cast<std::size_t>(rank)].activity = own_activity();
    return decide(Failure::What::silent, r,
                  fmt::format("{} hasn't answered for {} since the job was asked to stop: stopped, or cut off; {}",
                              rank_text(ranks, r), seconds_text(passed(asked, now)), circumstances(ranks, r)));
  }
}

void Control::Impl::decide(Failure::What what, int who, std::string text) {
  const RankState& r = ranks[static_cast<std::size_t>(who)];
  adopt({.what = what, .rank = who, .host = r.host, .pid = r.pid, .text = std::move(text)});
}

void Control::Impl::adopt(Failure f) {
  {
    const std::lock_guard lock(mutex);
    if (failure) return;
    failure = f;
    failed = true;
    changed.notify_all();
  }
  // Others than rank 0 tell a rank 0 that they lost, for when it comes back.
  if (rank == 0 || f.rank == 0) send_all(encode({.kind = Kind::failure, .failure = f}));
  if (!options.on_failure) return;
  try {
    options.on_failure(f);
  } catch (const std::exception& e) {
    log(LogLevel::error, fmt::format("control channel: the callback for a failure threw: {}", e.what()));
  }
}

void Control::Impl::send_all(const std::string& bytes, bool may_be_dropped) {
  for (const auto& peer : peers) {
    if (peer && peer->is_open()) peer->send(bytes, may_be_dropped);
  }
}

Activity Control::Impl::own_activity() {
  const std::lock_guard lock(mutex);
  Activity a = mine;
  const Clock::time_point now = Clock::now();
  a.elapsed_ms = static_cast<std::uint64_t>(passed(mine_since, now).count());
  if (!busy.empty() && a.state == Activity::State::idle) {
    a.state = Activity::State::working;
    a.name = busy.begin()->second;
    a.label.clear();
  }
  if (a.state == Activity::State::idle && !blocked.empty()) {
    a.still_ms = static_cast<std::uint64_t>(passed(moved, now).count());
    a.blocked = blocked;
  }
  return a;
}

void Control::Impl::check_parted() {
  if (!parting) return;
  if (std::none_of(peers.begin(), peers.end(), [](const auto& p) { return p && p->is_open(); })) notify(parted);
}

// The other side closes when it has read all, so that nothing that was sent gets lost; nobody waits for it for long.
void Control::Impl::say_goodbye() {
  asio::post(io, [this] {
    if (!failed) send_all(encode({.kind = Kind::goodbye, .activity = own_activity()}));
    parting = true;
    for (const auto& peer : peers) {
      if (peer) peer->finish();
    }
    check_parted();
  });
  std::unique_lock lock(mutex);
  changed.wait_for(lock, kGoodbyeTime, [&] { return parted; });
}

void Control::Impl::stop() {
  io.stop();
  if (thread.joinable()) thread.join();
}

Control::Control(int rank, int size, std::vector<std::string> hosts, const Exchange& exchange, ControlOptions options)
    : impl_(std::make_unique<Impl>(rank, size, std::move(options))) {
  if (size < 1 || rank < 0 || rank >= size || hosts.size() != static_cast<std::size_t>(size)) {
    fail<DistError>(
        "control channel: expected a rank under the number of ranks and a host for each, got rank {} of {} and {} "
        "hosts",
        rank, size, hosts.size());
  }
  const ControlOptions& o = impl_->options;
  if (o.heartbeat.count() <= 0 || o.lost < 3 * o.heartbeat || o.connect.count() <= 0 || o.out_of_step.count() < 0) {
    fail<DistError>(
        "control channel: expected a heartbeat above 0 and at least three of them until a rank is lost, got {} ms and "
        "{} ms",
        o.heartbeat.count(), o.lost.count());
  }
  if (o.hang.count() != 0 && o.hang < 3 * o.heartbeat) {
    fail<DistError>("control channel: expected 0 or at least three heartbeats ({} ms) until a rank hangs, got {} ms",
                    3 * o.heartbeat.count(), o.hang.count());
  }
  if (size == 1) return;
  impl_->set_up(std::move(hosts), exchange);
  impl_->start();
}

Control::~Control() {
  if (impl_->process != ::getpid()) {  // a child of fork() has neither the thread nor anything to say
    [[maybe_unused]] const Impl* const abandoned = impl_.release();
    return;
  }
  if (impl_->thread.joinable()) impl_->say_goodbye();
}

void Control::doing(const CollectiveNote& c) {
  const std::lock_guard lock(impl_->mutex);
  Activity& a = impl_->mine;
  a.state = c.of_all ? Activity::State::collective : Activity::State::subgroup;
  a.sequence = c.sequence;
  if (c.of_all) a.of_all = c.sequence;
  a.bytes = c.bytes;
  a.name = c.name;
  a.label = c.label;
  impl_->mine_since = Clock::now();
}

void Control::done() {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->mine.state == Activity::State::working) impl_->mine = impl_->collective;
  impl_->mine.state = Activity::State::idle;
  impl_->mine_since = Clock::now();
}

void Control::working(std::string_view what) {
  const std::lock_guard lock(impl_->mutex);
  Activity& a = impl_->mine;
  if (a.state != Activity::State::working) impl_->collective = a;
  a.state = Activity::State::working;
  a.name = what;
  a.label.clear();
  impl_->mine_since = Clock::now();
}

std::uint64_t Control::busy(std::string_view with) {
  const std::lock_guard lock(impl_->mutex);
  impl_->busy.emplace(++impl_->last_busy, with);
  return impl_->last_busy;
}

void Control::not_busy(std::uint64_t number) {
  const std::lock_guard lock(impl_->mutex);
  impl_->busy.erase(number);
  // From here on it may fall behind.
  if (impl_->mine.state == Activity::State::idle) impl_->mine_since = Clock::now();
}

void Control::report_failure(std::string_view text) {
  Impl& impl = *impl_;
  if (impl.process != ::getpid()) return;
  if (!impl.thread.joinable()) {
    const std::lock_guard lock(impl.mutex);
    if (!impl.failure) impl.failure = Failure{.rank = impl.rank, .pid = ::getpid(), .text = std::string(text)};
    impl.failed = true;
    return;
  }
  const auto decide_here = [&impl, said = std::string(text)] {
    impl.decide(Failure::What::error, impl.rank,
                fmt::format("{} failed: {}", rank_text(impl.ranks, impl.rank), printable(said)));
  };
  asio::post(impl.io, [&impl, decide_here, said = std::string(text)] {
    if (impl.failed) return;
    if (impl.rank == 0) return decide_here();
    impl.send_all(encode({.kind = ControlMessage::Kind::report, .failure = {.text = said}}));
  });
  std::unique_lock lock(impl.mutex);
  if (impl.changed.wait_for(lock, kReportTime, [&] { return impl.failure.has_value(); })) return;
  // Rank 0 doesn't answer.
  lock.unlock();
  asio::post(impl.io, decide_here);
  lock.lock();
  impl.changed.wait_for(lock, kReportTime, [&] { return impl.failure.has_value(); });
}

std::optional<Failure> Control::failure() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->failure;
}

bool Control::failed() const noexcept { return impl_->failed; }

}  // namespace halfstep::dist
