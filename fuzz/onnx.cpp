// SPDX-License-Identifier: Apache-2.0
// Any bytes are either read as an ONNX network, whose tensors have names and can be copied, or refused with an Error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <set>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/io/onnx_import.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const halfstep::io::ReadLimits limits{.max_bytes = 1 << 20, .max_unpacked = 1 << 20};
    const auto net = halfstep::io::parse_onnx({data, size}, "fuzz", {.limits = limits});
    const auto copy = halfstep::nn::clone(net);
    std::set<std::string> names;
    for (const halfstep::NamedTensor& t : copy.state_dict()) {
      if (!names.insert(t.name).second || halfstep::printable(t.name) != t.name) std::abort();
    }
  } catch (const halfstep::Error& e) {
    if (halfstep::printable(e.what()) != e.what()) std::abort();  // names in it reach a terminal
  }
  return 0;
}
