// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "tests/support/op_golden.h"

namespace halfstep::test {

/// How each op of the golden files is called, by the files' names of the ops; the elementwise ones that are only in
/// ops_f64.json are in pointwise_table.h.
const std::map<std::string, GoldenCall>& golden_calls();

}  // namespace halfstep::test
