// SPDX-License-Identifier: Apache-2.0
#include "fuzz/picture.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return halfstep::fuzz::read_picture(halfstep::data::ImageFormat::png, data, size);
}
