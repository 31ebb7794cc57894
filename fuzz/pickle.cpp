// SPDX-License-Identifier: Apache-2.0
// Any bytes are either read as a pickle, whose tensors lie within their storages, or refused with an Error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/io/pth_internal.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const halfstep::io::Pickle pickle =
        halfstep::io::parse_pickle({data, size}, "input", {.allowed = halfstep::io::pth_allows, .max_values = 100'000});
    const auto tree = halfstep::io::read_pth_tree(pickle, "input", 1 << 20);
    for (const auto* list : {&tree.tensors, &tree.others}) {
      for (const halfstep::io::PthTensor& t : *list) {
        std::uint64_t last = 0;
        bool empty = false;
        for (int i = 0; i < t.sizes.size(); ++i) {
          empty = empty || t.sizes[i] == 0;
          last += static_cast<std::uint64_t>((t.sizes[i] - 1) * t.strides[i]);
        }
        const std::uint64_t bytes = tree.storages.at(t.storage).bytes;
        if (!empty && t.offset + (last + 1) * halfstep::item_size(t.dtype) > bytes) std::abort();
      }
    }
  } catch (const halfstep::Error& e) {
    if (halfstep::printable(e.what()) != e.what()) std::abort();  // names in it reach a terminal
  }
  return 0;
}
