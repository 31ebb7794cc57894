// SPDX-License-Identifier: Apache-2.0
// Any text is either read as a list of pictures with labels, or refused with an IoError.
#include "halfstep/data/image_list.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "halfstep/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace halfstep::data;
  try {
    const auto entries = parse_image_list({reinterpret_cast<const char*>(data), size}, "input");
    if (entries.empty()) std::abort();
    for (const ImageListEntry& entry : entries) {
      if (entry.path.empty() || entry.label < 0 || entry.label >= kMostClasses) std::abort();
      if (entry.path.find('\n') != std::string::npos || entry.path.find('\0') != std::string::npos) std::abort();
    }
  } catch (const halfstep::IoError&) {
  }
  return 0;
}
