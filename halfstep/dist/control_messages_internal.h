// SPDX-License-Identifier: Apache-2.0
// Internal: what goes over the connections of Control. A message is its length (4 bytes, little-endian), its kind (a
// byte) and its fields; a text is its length (2 bytes) and its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "halfstep/core/export.h"
#include "halfstep/dist/control.h"

namespace halfstep::dist::detail {

/// What a rank does.
struct Activity {
  enum class State : std::uint8_t {
    idle,
    collective,  ///< of all ranks
    subgroup,    ///< a collective of some of them
    working,     ///< on something that takes long, as it said
  };
  State state = State::idle;
  std::uint64_t elapsed_ms = 0;  ///< since it began with that
  std::uint64_t sequence = 0;    ///< of the collective; idle: of the last one
  std::uint64_t of_all = 0;      ///< of the last collective of all ranks that it entered
  std::uint64_t bytes = 0;
  std::uint64_t still_ms = 0;  ///< for how long none of its threads has run
  std::string name = {};       ///< working: what
  std::string label = {};
  std::string blocked = {};  ///< what its threads are blocked in, where nothing moves
};

struct ControlMessage {
  enum class Kind : std::uint8_t {
    hello = 1,  ///< to rank 0: who connects, and the token of the job
    accepted,   ///< from rank 0: its own token, which a stranger at the same address doesn't have
    ready,      ///< from rank 0: all have connected
    beat,       ///< what the sender does
    report,     ///< to rank 0: the sender ends with an error
    failure,    ///< the first failure
    goodbye,    ///< the sender has finished; what it did last
    stop,       ///< a rank was asked to stop; it is answered by a heartbeat
  };
  Kind kind = Kind::beat;
  std::string token = {};  ///< hello, accepted
  std::uint32_t rank = 0;  ///< hello
  Activity activity = {};  ///< beat, goodbye
  Failure failure = {};    ///< failure; report: its text only
};

/// Longest message that is accepted, and longest from somebody who hasn't shown the token.
inline constexpr std::size_t kMostMessageBytes = 8192, kMostHelloBytes = 128;

/// The bytes of a message. Texts that are too long are cut.
HS_API std::string encode(const ControlMessage& message);

enum class Taken : std::uint8_t {
  message,  ///< a message was taken off the front of the buffer
  more,     ///< the buffer doesn't hold a whole one yet
  broken,   ///< what it holds is none
};
/// Takes a message of at most `limit` bytes off the front of what was received.
HS_API Taken take_message(std::string& buffer, ControlMessage& message, std::size_t limit = kMostMessageBytes);

}  // namespace halfstep::dist::detail
