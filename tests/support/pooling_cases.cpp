// SPDX-License-Identifier: Apache-2.0
// Cases of pooling.
#include "tests/support/op_case_makers.h"

namespace halfstep::test {

std::vector<OpCase> pooling_cases() { return {}; }

}  // namespace halfstep::test
