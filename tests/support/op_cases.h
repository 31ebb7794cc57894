// SPDX-License-Identifier: Apache-2.0
// One call or more of every op that has a gradient, for the tests that hold for all ops.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep::test {

/// Stands for a size in an argument's shape that is 2, and 0 where a case is run on empty tensors.
inline constexpr std::int64_t N = -1;

/// An argument of a case.
struct OpArg {
  enum Kind { real, constant, index, mask };
  Kind kind = real;  ///< a floating tensor with a gradient or without, i64 indices, bools
  Shape sizes;
  double low = -2;  ///< range of the values; indices are in [0, high)
  double high = 2;
};

/// A call of an op that is right for any floating dtype of its arguments.
struct OpCase {
  std::string op;  ///< which is to be seen running; composites are believed
  std::vector<OpArg> args;
  std::function<std::vector<Tensor>(const std::vector<Tensor>&)> call;
  double roundings = 1;      ///< of the result in 16 bits, where it is more than the one that an op is to make
  bool sixteen_bits = true;  ///< whether f16 and bf16 give the f64 result rounded
  bool differences = true;   ///< whether differences find the gradient in float64
  Tensor (*function)(const Tensor&) = nullptr;  ///< what is called, if that is a function of the one argument
};

/// Cases by family. Together they are one table.
std::vector<OpCase> unary_cases();
std::vector<OpCase> binary_cases();
std::vector<OpCase> reduction_cases();
std::vector<OpCase> product_cases();
std::vector<OpCase> moving_cases();
std::vector<OpCase> network_cases();
std::vector<OpCase> convolution_cases();
std::vector<OpCase> pooling_cases();
std::vector<OpCase> resampling_cases();
std::vector<OpCase> image_norm_cases();
std::vector<OpCase> detection_cases();
std::vector<OpCase> quantize_cases();
std::vector<OpCase> all_op_cases();

/// How the arguments lie in memory.
enum class OpLayout { contiguous, strided, empty };

/// The arguments of a case: the same values for the same case, rounded to `dtype`. Strided ones have their dimensions
/// in memory the other way round, with gaps.
std::vector<Tensor> op_arguments(const OpCase& c, OpLayout layout, DType dtype);

}  // namespace halfstep::test
