// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "halfstep/core/tensor.h"
#include "tests/support/golden.h"

namespace halfstep {

/// The golden as a tensor of ours.
Tensor tensor_of(const test::GoldenTensor& golden);
/// Row `step` of a stacked golden.
std::vector<double> row_of(const test::GoldenTensor& golden, std::int64_t step);
/// Expects |got - expected| <= bound in every element.
void expect_near(const std::vector<double>& got, const std::vector<double>& expected, double bound,
                 const std::string& what);
/// tests/goldens/README.md: 1e-12 of the largest value in f64; 10 roundings of u32 a step in f32.
double drift_bound(const test::GoldenEntry& entry, std::int64_t steps);
/// The entries of optim.json that are of one of these ops.
std::vector<test::GoldenEntry> goldens_of(const std::vector<std::string>& ops);

}  // namespace halfstep
