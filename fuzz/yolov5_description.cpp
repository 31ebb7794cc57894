// SPDX-License-Identifier: Apache-2.0
// Any text either describes a detector whose rows read layers before them, and that is the same when it is written and
// read again, or is refused.
#include "halfstep/models/yolov5_description.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "halfstep/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace halfstep;
  try {
    const models::Yolov5Options o =
        models::parse_yolov5_description({reinterpret_cast<const char*>(data), size}, "text");
    if (o.classes < 1 || !(o.depth > 0) || !(o.width > 0) || o.anchors.empty() || o.layers.empty()) std::abort();
    for (std::size_t i = 0; i < o.layers.size(); ++i) {
      for (const int from : o.layers[i].from) {
        if (from >= static_cast<int>(i) || from < -static_cast<int>(i) - 1) std::abort();
      }
    }
    const std::string text = models::yolov5_description(o);
    try {
      const models::Yolov5Options again = models::parse_yolov5_description(text, "again");
      if (again.classes != o.classes || !models::yolov5_difference(o, again).empty()) std::abort();
    } catch (const IoError&) {
      std::abort();
    }
  } catch (const IoError&) {
  }
  return 0;
}
