// SPDX-License-Identifier: Apache-2.0
// Cases of convolutions.
#include "tests/support/op_case_makers.h"

namespace halfstep::test {

std::vector<OpCase> convolution_cases() { return {}; }

}  // namespace halfstep::test
