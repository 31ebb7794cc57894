// SPDX-License-Identifier: Apache-2.0
// Any bytes at the port of the control channel are either messages, which are written as the same bytes, or refused.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "halfstep/dist/control_messages_internal.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace halfstep::dist::detail;
  const std::string all(reinterpret_cast<const char*>(data), size);
  for (const std::size_t limit : {kMostHelloBytes, kMostMessageBytes}) {
    std::string buffer = all, again;
    ControlMessage message;
    Taken taken = Taken::message;
    while ((taken = take_message(buffer, message, limit)) == Taken::message) again += encode(message);
    if (again + buffer != all) std::abort();
    // As they arrive: in pieces, with the same outcome.
    std::string pieces, of_pieces;
    Taken last = Taken::more;
    for (std::size_t i = 0; i < size && last != Taken::broken; ++i) {
      pieces += all[i];
      while ((last = take_message(pieces, message, limit)) == Taken::message) of_pieces += encode(message);
    }
    if (of_pieces != again || last != taken) std::abort();
  }
  return 0;
}
