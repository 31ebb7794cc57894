// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/control_peer_internal.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <asio/buffer.hpp>
#include <fstream>
#include <random>

namespace halfstep::dist::detail {

void Peer::start(OnMessage on_message, OnClosed on_closed) {
  on_message_ = std::move(on_message);
  on_closed_ = std::move(on_closed);
  asio::error_code error;
  socket_.set_option(asio::ip::tcp::no_delay(true), error);
  socket_.non_blocking(true, error);
  // A program that this process starts would keep the connection open beyond its end.
  ::fcntl(socket_.native_handle(), F_SETFD, FD_CLOEXEC);
  read();
}

void Peer::connect(const asio::ip::tcp::endpoint& to, std::function<void(const asio::error_code&)> done) {
  socket_.async_connect(to,
                        [self = shared_from_this(), done = std::move(done)](const asio::error_code& e) { done(e); });
}

void Peer::read() {
  socket_.async_read_some(asio::buffer(piece_), [self = shared_from_this()](const asio::error_code& e, std::size_t n) {
    if (!self->socket_.is_open()) return;
    if (e) return self->closed();
    self->in_.append(self->piece_, n);
    ControlMessage message;
    for (;;) {
      const Taken taken = take_message(self->in_, message, self->trusted ? kMostMessageBytes : kMostHelloBytes);
      if (taken == Taken::more) break;
      if (taken == Taken::broken) return self->closed();
      if (!self->on_message_(self, message)) return self->close();
      if (!self->socket_.is_open()) return;
    }
    self->read();
  });
}

void Peer::send(const std::string& bytes, bool may_be_dropped) {
  if (!socket_.is_open() || finishing_ || (may_be_dropped && !out_.empty())) return;
  out_ += bytes;
  if (!writing_) write();
}

void Peer::write() {
  asio::error_code error;
  while (!out_.empty() && !error) out_.erase(0, socket_.write_some(asio::buffer(out_), error));
  if (out_.empty() && finishing_) socket_.shutdown(asio::ip::tcp::socket::shutdown_send, error);
  // Other errors come to the reader too, which reports them after what was received before.
  if (error != asio::error::would_block) return;
  writing_ = true;
  socket_.async_wait(asio::ip::tcp::socket::wait_write, [self = shared_from_this()](const asio::error_code& e) {
    self->writing_ = false;
    if (!e && self->socket_.is_open()) self->write();
  });
}

void Peer::finish() {
  if (!socket_.is_open() || finishing_) return;
  finishing_ = true;
  if (!writing_) write();
}

void Peer::close() {
  asio::error_code ignored;
  socket_.close(ignored);
}

void Peer::closed() {
  close();
  on_closed_(shared_from_this());
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> result;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return result;
  for (const ifaddrs* i = all; i; i = i->ifa_next) {
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
    std::array<char, INET6_ADDRSTRLEN> text{};
    if (i->ifa_addr->sa_family == AF_INET) {
      const auto* address = reinterpret_cast<const sockaddr_in*>(i->ifa_addr);
      if (::inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size())) result.emplace_back(text.data());
    } else if (i->ifa_addr->sa_family == AF_INET6) {
      const auto* address = reinterpret_cast<const sockaddr_in6*>(i->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) continue;
      if (::inet_ntop(AF_INET6, &address->sin6_addr, text.data(), text.size())) result.emplace_back(text.data());
    }
  }
  ::freeifaddrs(all);
  return result;
}

std::string network_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  std::array<char, 64> space{};
  const ssize_t n = ::readlink("/proc/self/ns/net", space.data(), space.size());
  if (boot.empty() || n <= 0) return {};
  return boot + " " + std::string(space.data(), static_cast<std::size_t>(n));
}

std::string random_token() {
  constexpr int kWords = 4;
  constexpr const char* kDigits = "0123456789abcdef";
  std::random_device source;
  std::string token;
  for (int i = 0; i < kWords; ++i) {
    auto word = static_cast<std::uint32_t>(source());
    for (int digit = 0; digit < 8; ++digit, word >>= 4) token += kDigits[word & 0xF];
  }
  return token;
}

bool same_token(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned different = 0;
  for (std::size_t i = 0; i < a.size(); ++i) different |= static_cast<unsigned char>(a[i] ^ b[i]);
  return different == 0;
}

}  // namespace halfstep::dist::detail
