// SPDX-License-Identifier: Apache-2.0
// Any bytes are either read as a file of torch.save, whose tensors can all be read, or refused with an Error.
#include "halfstep/io/pth.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/io/pth_internal.h"

namespace {

// Touches the first and the last element: the sanitizer sees where they are.
void touch(const halfstep::NamedTensors& tensors) {
  for (const halfstep::NamedTensor& t : tensors) {
    if (t.tensor.numel() == 0) continue;
    std::size_t last = 0;
    for (int i = 0; i < t.tensor.dim(); ++i) {
      last += static_cast<std::size_t>((t.tensor.sizes()[i] - 1) * t.tensor.strides()[i]);
    }
    const auto* first = static_cast<const unsigned char*>(t.tensor.raw_data());
    volatile unsigned char sum = *first;
    sum = static_cast<unsigned char>(sum + first[(last + 1) * t.tensor.item_size() - 1]);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // A low limit keeps each run short. Without checksums, damaged archives get further.
  try {
    const auto file =
        halfstep::io::parse_pth({data, size}, "input", {.max_bytes = 1 << 20, .max_unpacked = 1 << 20}, false);
    touch(file.tensors);
    touch(file.others);
  } catch (const halfstep::Error& e) {
    if (halfstep::printable(e.what()) != e.what()) std::abort();  // names in it reach a terminal
  }
  return 0;
}
