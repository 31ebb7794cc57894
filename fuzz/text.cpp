// SPDX-License-Identifier: Apache-2.0
// Any bytes become text that is printable and stays what it is, and names are kept so that they come back.
#include "halfstep/core/text.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace halfstep;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::string shown = printable(text), kept = kept_name(text);
  if (!is_utf8(shown) || printable(shown) != shown || printable(kept) != kept || raw_name(kept) != text) std::abort();
  for (const char c : shown) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) std::abort();
  }
  if (is_utf8(printable_lines(text)) && printable(printable_lines(text)) != shown) std::abort();
  if (!is_utf8(printable_start(text, 10)) || printable_start(text, size) != shown) std::abort();
  const std::string raw = raw_name(text);  // of any text, without a crash
  return raw.size() > size ? (std::abort(), 0) : 0;
}
