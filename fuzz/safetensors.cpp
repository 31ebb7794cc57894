// SPDX-License-Identifier: Apache-2.0
// Any bytes are either read as a safetensors file, whose tensors cover its data and can be written again, or refused
// with an Error.
#include "halfstep/io/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <set>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto file = halfstep::io::parse_safetensors({data, size}, "fuzz", {.max_bytes = 1 << 20});
    std::uint64_t bytes = 0;
    std::set<std::string> names;
    for (const halfstep::NamedTensor& t : file.tensors) {
      bytes += static_cast<std::uint64_t>(t.tensor.numel()) * t.tensor.item_size();
      if (!names.insert(t.name).second || !halfstep::is_utf8(t.name)) std::abort();
    }
    if (bytes > size) std::abort();
  } catch (const halfstep::Error& e) {
    if (halfstep::printable(e.what()) != e.what()) std::abort();  // names in it reach a terminal
  }
  return 0;
}
