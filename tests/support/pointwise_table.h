// SPDX-License-Identifier: Apache-2.0
// Every elementwise function by the name that the golden files have for it, with its attributes taken from an entry.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "halfstep/core/tensor.h"
#include "tests/support/op_golden.h"

namespace halfstep::test {

using Inputs = std::vector<Tensor>;
using PointwiseFunction = std::function<Tensor(const GoldenEntry&, const Inputs&)>;
const std::map<std::string, PointwiseFunction>& pointwise_functions();

}  // namespace halfstep::test
