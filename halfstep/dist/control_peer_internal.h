// SPDX-License-Identifier: Apache-2.0
// Internal: a connection of Control, and the addresses of this machine. For .cpp files of this folder only (it includes
// asio).
#pragma once

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/dist/control_messages_internal.h"

namespace halfstep::dist::detail {

/// A connection that messages come and go on. It is used on the thread of its io_context only.
class Peer : public std::enable_shared_from_this<Peer> {
 public:
  /// A message came; the connection is closed when it returns false.
  using OnMessage = std::function<bool(const std::shared_ptr<Peer>&, const ControlMessage&)>;
  /// The connection was closed, by the other side, by an error or by bytes that are no message; not by close().
  using OnClosed = std::function<void(const std::shared_ptr<Peer>&)>;

  explicit Peer(asio::ip::tcp::socket socket) : socket_(std::move(socket)) {}

  /// Begins to read.
  void start(OnMessage on_message, OnClosed on_closed);
  /// Connects first.
  void connect(const asio::ip::tcp::endpoint& to, std::function<void(const asio::error_code&)> done);
  /// Sends bytes: at once as far as they go, so that a process may end right after it, and the rest later. Of a
  /// connection that takes nothing, what `may_be_dropped` is dropped.
  void send(const std::string& bytes, bool may_be_dropped = false);
  /// Closes it after what is still to be sent, from this side: what the other side sends is still read.
  void finish();
  void close();
  bool is_open() const { return socket_.is_open(); }

  int rank = -1;         ///< of the other side, once it has shown the token
  bool trusted = false;  ///< it has

 private:
  void read();
  void write();
  void closed();

  asio::ip::tcp::socket socket_;
  OnMessage on_message_;
  OnClosed on_closed_;
  std::string in_, out_;
  char piece_[4096];
  bool writing_ = false, finishing_ = false;
};

/// Addresses of this machine that others may reach: no loopback, no link-local ones.
std::vector<std::string> own_addresses();
/// What only processes on the same machine, and in the same network namespace of it, have in common; empty: not known.
std::string network_identity();
/// Bytes that nobody guesses, as hexadecimal digits. Throws std::exception.
std::string random_token();
/// Compares all bytes, so that the time says nothing about the first that differs.
bool same_token(const std::string& a, const std::string& b);

}  // namespace halfstep::dist::detail
