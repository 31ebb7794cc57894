// SPDX-License-Identifier: Apache-2.0
// Cases of resizing and padding.
#include "halfstep/ops/pad.h"
#include "halfstep/ops/resample.h"
#include "tests/support/op_case_makers.h"

namespace halfstep::test {

std::vector<OpCase> resampling_cases() {
  using enum InterpolateMode;
  const auto resized = [](const Shape& sizes, const InterpolateOptions& options) {
    return op("interpolate", {x(sizes)}, [options](In in) { return interpolate(in[0], options); });
  };
  const auto padded = [](const char* name, const Shape& sizes, const std::vector<std::int64_t>& pads, PadMode mode,
                         double value = 0) {
    return op(name, {x(sizes)}, [=](In in) { return pad(in[0], pads, mode, value); });
  };
  return {
      resized({N, 5, 3, 4}, {.size = {5, 6}, .mode = bilinear}),
      resized({N, 2, 4, 3}, {.size = {3, 7}, .mode = bilinear, .align_corners = true}),
      resized({N, 2, 3, 4}, {.scale_factor = {1.7, 0.6}, .mode = bilinear}),
      resized({N, 5, 3, 2}, {.scale_factor = {2}}),
      resized({N, 2, 3, 4}, {.size = {4, 3}, .mode = nearest_exact}),
      padded("pad", {N, 5, 3, 2}, {1, 0, 2, 1}, PadMode::constant, 0.5),
      padded("pad", {N, 3, 4}, {-1, 2, 1, -2, 1, 0}, PadMode::constant),
      padded("pad", {N, 5, 3, 4}, {2, 3, 1, 2}, PadMode::reflect),
      padded("pad", {N, 5, 3, 2}, {2, 3, 1, -1}, PadMode::replicate),
      padded("pad", {N, 2, 4}, {3, -1}, PadMode::circular),
  };
}

}  // namespace halfstep::test
