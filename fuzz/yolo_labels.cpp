// SPDX-License-Identifier: Apache-2.0
// Any text is read as YOLO's labels: sound boxes, the rest counted.
#include "halfstep/data/detection_labels.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "fuzz/labels.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace halfstep::data;
  constexpr std::int64_t kClasses = 5;
  LabelProblems problems;
  const auto objects = parse_yolo_labels({reinterpret_cast<const char*>(data), size}, "input", kClasses, problems);
  halfstep::fuzz::check_objects(objects, kClasses);
  halfstep::fuzz::check_problems(problems.skipped, problems.first);
  return 0;
}
