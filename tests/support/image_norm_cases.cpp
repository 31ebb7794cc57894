// SPDX-License-Identifier: Apache-2.0
// Cases of normalisation fused with what follows it.
#include "tests/support/op_case_makers.h"

namespace halfstep::test {

std::vector<OpCase> image_norm_cases() { return {}; }

}  // namespace halfstep::test
