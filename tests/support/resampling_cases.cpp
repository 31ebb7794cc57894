// SPDX-License-Identifier: Apache-2.0
// Cases of resizing and padding.
#include "tests/support/op_case_makers.h"

namespace halfstep::test {

std::vector<OpCase> resampling_cases() { return {}; }

}  // namespace halfstep::test
