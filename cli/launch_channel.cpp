// SPDX-License-Identifier: Apache-2.0
#include "cli/launch_channel.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace halfstep::cli {
namespace {

constexpr std::size_t kMostLine = 4096, kMostFiles = 4;
constexpr int kConnectMilliseconds = 10'000;

std::string_view next_word(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view word = text.substr(0, end);
  text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  return word;
}

bool connect_in_time(int socket, const sockaddr* to, socklen_t size) {
  ::fcntl(socket, F_SETFL, O_NONBLOCK);
  if (::connect(socket, to, size) != 0) {
    if (errno != EINPROGRESS) return false;
    pollfd wait{.fd = socket, .events = POLLOUT, .revents = 0};
    int error = 0;
    socklen_t length = sizeof(error);
    if (::poll(&wait, 1, kConnectMilliseconds) != 1) return false;
    if (::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) return false;
  }
  ::fcntl(socket, F_SETFL, 0);
  return true;
}

}  // namespace

std::string LaunchAddress::text() const {
  std::string list;
  for (const std::string& a : addresses) list += (list.empty() ? "" : ",") + a;
  return token + " " + std::to_string(port) + " " + list + " " + socket;
}

LaunchAddress LaunchAddress::parse(std::string_view text) {
  LaunchAddress result;
  result.token = next_word(text, ' ');
  result.port = std::atoi(std::string(next_word(text, ' ')).c_str());
  std::string_view list = next_word(text, ' ');
  while (!list.empty()) result.addresses.emplace_back(next_word(list, ','));
  result.socket = text;
  if (text.empty()) result.token.clear();
  return result;
}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = other.release();
  }
  return *this;
}
int File::release() { return std::exchange(descriptor_, -1); }
void File::close() {
  if (descriptor_ >= 0) ::close(release());
}

bool LineReader::read_from(int file) {
  char piece[1024];
  const ssize_t n = ::read(file, piece, sizeof(piece));
  if (n < 0) return errno == EINTR || errno == EAGAIN;
  buffer_.append(piece, static_cast<std::size_t>(n));
  return n > 0 && buffer_.size() <= kMostLine;
}

bool LineReader::next(std::string& line) {
  const std::size_t end = buffer_.find('\n');
  if (end == std::string::npos) return false;
  line = buffer_.substr(0, end);
  buffer_.erase(0, end + 1);
  return true;
}

bool send_line(int socket, const std::string& line, const std::vector<int>& files) {
  std::string bytes = line + "\n";
  iovec data{.iov_base = bytes.data(), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFiles * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!files.empty() && files.size() <= kMostFiles) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(files.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), files.data(), files.size() * sizeof(int));
  }
  // Lines are far shorter than a socket's buffer: one that doesn't take a whole one has no reader.
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

bool receive_line(int socket, std::string& line, std::vector<File>& files) {
  line.clear();
  for (;;) {
    char byte = 0;
    iovec data{.iov_base = &byte, .iov_len = 1};
    alignas(cmsghdr) char control[CMSG_SPACE(kMostFiles * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    for (cmsghdr* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
      if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
      for (std::size_t i = 0; i < (h->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        int file = -1;
        std::memcpy(&file, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
        files.emplace_back(file);
      }
    }
    if (byte == '\n') return true;
    line += byte;
    if (line.size() > kMostLine) return false;
  }
}

File connect_to_launcher(const LaunchAddress& address) {
  sockaddr_un local{};
  local.sun_family = AF_UNIX;
  if (address.socket.size() < sizeof(local.sun_path)) {
    address.socket.copy(local.sun_path, address.socket.size());
    File socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&local), sizeof(local)) == 0) return socket;
  }
  if (address.port == 0) return {};
  for (const std::string& text : address.addresses) {
    sockaddr_in v4{};
    sockaddr_in6 v6{};
    v4.sin_family = AF_INET;
    v6.sin6_family = AF_INET6;
    v4.sin_port = v6.sin6_port = htons(static_cast<std::uint16_t>(address.port));
    const bool is_v4 = ::inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1;
    if (!is_v4 && ::inet_pton(AF_INET6, text.c_str(), &v6.sin6_addr) != 1) continue;
    File socket(::socket(is_v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto* to = is_v4 ? reinterpret_cast<const sockaddr*>(&v4) : reinterpret_cast<const sockaddr*>(&v6);
    if (!connect_in_time(socket.get(), to, is_v4 ? sizeof(v4) : sizeof(v6))) continue;
    end_when_cut(socket.get());
    return socket;
  }
  return {};
}

void end_when_cut(int socket) {
  const auto set = [&](int level, int option, int value) {
    ::setsockopt(socket, level, option, &value, sizeof(value));
  };
  constexpr int kIdleSeconds = 5, kBetweenSeconds = 2, kProbes = 4;
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kBetweenSeconds);
  set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, (kIdleSeconds + kBetweenSeconds * kProbes) * 1000);
}

void write_whole(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(file, bytes.data(), bytes.size());
    if (n >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {
      pollfd wait{.fd = file, .events = POLLOUT, .revents = 0};
      ::poll(&wait, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace halfstep::cli
