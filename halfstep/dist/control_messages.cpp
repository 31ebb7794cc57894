// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "halfstep/dist/control_messages_internal.h"

namespace halfstep::dist::detail {
namespace {

constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kMostToken = 64, kMostName = 64, kMostLabel = 512, kMostBlocked = 512, kMostHost = 256,
                      kMostText = 4096;

// The fields of a message are written and read by the same function, so that both agree.
class FieldWriter {
 public:
  template <class T>
  void number(const T& value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bytes_ += static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i) & 0xFF);
    }
  }
  template <class E>
  void choice(const E& value, E /*last*/) {
    number(static_cast<std::uint8_t>(value));
  }
  void text(const std::string& value, std::size_t most) {
    const std::string_view kept = std::string_view(value).substr(0, most);
    number(static_cast<std::uint16_t>(kept.size()));
    bytes_ += kept;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  void number(T& value) {
    if (bytes_.size() < sizeof(T)) {
      good_ = false;
      bytes_ = {};
      return;
    }
    std::uint64_t result = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      result |= static_cast<std::uint64_t>(static_cast<unsigned char>(bytes_[i])) << (8 * i);
    }
    bytes_.remove_prefix(sizeof(T));
    value = static_cast<T>(result);
  }
  template <class E>
  void choice(E& value, E last) {
    std::uint8_t number_of_it = 0;
    number(number_of_it);
    good_ = good_ && number_of_it <= static_cast<std::uint8_t>(last);
    if (good_) value = static_cast<E>(number_of_it);
  }
  void text(std::string& value, std::size_t most) {
    std::uint16_t size = 0;
    number(size);
    good_ = good_ && size <= most && size <= bytes_.size();
    if (!good_) return;
    value = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
  }
  bool done() const { return good_ && bytes_.empty(); }

 private:
  std::string_view bytes_;
  bool good_ = true;
};

template <class Stream, class M>
void fields(Stream& s, M& m) {
  using Kind = ControlMessage::Kind;
  switch (m.kind) {
    case Kind::hello:
      s.text(m.token, kMostToken);
      s.number(m.rank);
      break;
    case Kind::accepted:
      s.text(m.token, kMostToken);
      break;
    case Kind::ready:
    case Kind::stop:
      break;
    case Kind::beat:
    case Kind::goodbye:
      s.choice(m.activity.state, Activity::State::working);
      s.number(m.activity.elapsed_ms);
      s.number(m.activity.sequence);
      s.number(m.activity.of_all);
      s.number(m.activity.bytes);
      s.text(m.activity.name, kMostName);
      s.text(m.activity.label, kMostLabel);
      s.number(m.activity.still_ms);
      s.text(m.activity.blocked, kMostBlocked);
      break;
    case Kind::report:
      s.text(m.failure.text, kMostText);
      break;
    case Kind::failure:
      s.choice(m.failure.what, Failure::What::error);
      s.number(m.failure.rank);
      s.number(m.failure.pid);
      s.text(m.failure.host, kMostHost);
      s.text(m.failure.text, kMostText);
      break;
  }
}

}  // namespace

std::string encode(const ControlMessage& message) {
  FieldWriter body;
  body.number(static_cast<std::uint8_t>(message.kind));
  fields(body, message);
  FieldWriter frame;
  frame.number(static_cast<std::uint32_t>(body.bytes().size()));
  return frame.bytes() + body.bytes();
}

Taken take_message(std::string& buffer, ControlMessage& message, std::size_t limit) {
  if (buffer.size() < kLengthBytes) return Taken::more;
  std::uint32_t size = 0;
  FieldReader(buffer).number(size);
  if (size == 0 || size > limit) return Taken::broken;
  if (buffer.size() < kLengthBytes + size) return Taken::more;
  FieldReader body(std::string_view(buffer).substr(kLengthBytes, size));
  std::uint8_t kind = 0;
  body.number(kind);
  if (kind < static_cast<std::uint8_t>(ControlMessage::Kind::hello) ||
      kind > static_cast<std::uint8_t>(ControlMessage::Kind::stop)) {
    return Taken::broken;
  }
  message = {};
  message.kind = static_cast<ControlMessage::Kind>(kind);
  fields(body, message);
  if (!body.done()) return Taken::broken;
  buffer.erase(0, kLengthBytes + size);
  return Taken::message;
}

}  // namespace halfstep::dist::detail
