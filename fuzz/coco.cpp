// SPDX-License-Identifier: Apache-2.0
// Any text is either read as COCO's instances, or refused with an IoError.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "fuzz/labels.h"
#include "halfstep/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace halfstep::data;
  for (const bool boxes : {false, true}) {
    try {
      const DetectionData result = parse_coco({reinterpret_cast<const char*>(data), size}, "input",
                                              {.segment_boxes = !boxes, .keep_segments = !boxes});
      if (result.classes.empty() || result.category_ids.size() != result.classes.size()) std::abort();
      for (const LabeledPicture& picture : result.pictures) {
        if (picture.width < 1 || picture.height < 1 || picture.file.empty()) std::abort();
        halfstep::fuzz::check_objects(picture.objects, static_cast<std::int64_t>(result.classes.size()));
      }
      halfstep::fuzz::check_problems(result.skipped, result.problems);
    } catch (const halfstep::IoError&) {
    }
  }
  return 0;
}
