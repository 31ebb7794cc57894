// SPDX-License-Identifier: Apache-2.0
// Any text is either read as an annotation of Pascal VOC, or refused with an IoError.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "fuzz/labels.h"
#include "halfstep/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace halfstep::data;
  try {
    LabelProblems problems;
    const VocAnnotation annotation = parse_voc({reinterpret_cast<const char*>(data), size}, "input", problems);
    if (annotation.names.size() != annotation.boxes.size() || annotation.lines.size() != annotation.boxes.size()) {
      std::abort();
    }
    if (annotation.width < 0 || annotation.height < 0) std::abort();
    for (const std::int64_t line : annotation.lines) {
      if (line < 1) std::abort();
    }
    const std::string classes[] = {"cat", "dog"};
    const auto objects = voc_objects(annotation, "input", 640, 480, classes, problems);
    halfstep::fuzz::check_objects(objects, 2);
    halfstep::fuzz::check_problems(problems.skipped, problems.first);
  } catch (const halfstep::IoError&) {
  }
  return 0;
}
