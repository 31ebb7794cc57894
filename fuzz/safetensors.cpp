// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>

#include "halfstep/core/error.h"
#include "halfstep/io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    halfstep::io::parse_safetensors({data, size}, "fuzz");
  } catch (const halfstep::Error&) {
  }
  return 0;
}
