// SPDX-License-Identifier: Apache-2.0
// What the op tests of this folder share: goldens as tensors, and gradients against differences.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "tests/support/errors.h"
#include "tests/support/golden.h"

namespace halfstep::test {

using Values = std::vector<double>;
using Ints = std::vector<std::int64_t>;

inline Tensor ints(const Ints& values, const Shape& sizes) { return tensor(values, sizes, {.dtype = i64}); }
inline Tensor ints(const Ints& values) { return ints(values, {static_cast<std::int64_t>(values.size())}); }

/// A tensor of different f64 values without ties, the same for the same sizes.
inline Tensor sample(const Shape& sizes, double seed = 1) {
  Values values;
  for (std::int64_t i = 0; i < sizes.numel(); ++i) {
    values.push_back(std::sin(seed * 12.9898 + static_cast<double>(i) * 78.233) * 1.7 + 0.01 * static_cast<double>(i));
  }
  return tensor(values, sizes, {.dtype = f64});
}

inline Tensor from_golden(const GoldenTensor& g, bool requires_grad = false) {
  const DType dtype = *parse_dtype(g.dtype);
  return tensor(g.data, Shape(g.shape), {.dtype = dtype, .requires_grad = requires_grad && is_floating(dtype)});
}

inline void expect_golden(const Tensor& ours, const GoldenTensor& golden, const std::string& what) {
  ASSERT_TRUE(ours.defined()) << what;
  ASSERT_EQ(ours.sizes(), Shape(golden.shape)) << what << ": " << ours.sizes().str();
  EXPECT_STREQ(name(ours.dtype()), golden.dtype.c_str()) << what;
  const Values values = ours.to_vector<double>();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] == golden.data[i] || (std::isnan(values[i]) && std::isnan(golden.data[i]))) continue;
    // Both round in float64, in different orders over some dozens of terms at most (tests/goldens/README.md).
    const double bound = golden.dtype == "f64" ? 1e-12 + 1e-11 * std::fabs(golden.data[i]) : 0;
    ASSERT_LE(std::fabs(values[i] - golden.data[i]), bound) << what << ", element " << i;
  }
}

/// Runs `function` on the inputs of every entry for `op` in ops_f64.json; compares results and gradients.
inline void check_goldens(
    const std::string& op,
    const std::function<std::vector<Tensor>(const GoldenEntry&, const std::vector<Tensor>&)>& function) {
  static const std::vector<GoldenEntry> entries = read_goldens("ops_f64.json");
  int found = 0;
  for (const GoldenEntry& entry : entries) {
    if (entry.op != op) continue;
    ++found;
    std::vector<Tensor> inputs;
    for (std::size_t i = 0; i < entry.inputs.size(); ++i) {
      inputs.push_back(from_golden(entry.inputs[i], i < entry.grads.size() && entry.grads[i]));
    }
    const std::vector<Tensor> outputs = function(entry, inputs);
    ASSERT_EQ(outputs.size(), entry.outputs.size()) << entry.name;
    std::vector<Tensor> with_gradient, cotangents;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      expect_golden(outputs[i], entry.outputs[i], entry.name + " output " + std::to_string(i));
      if (i < entry.cotangents.size() && entry.cotangents[i]) {
        with_gradient.push_back(outputs[i]);
        cotangents.push_back(from_golden(*entry.cotangents[i]));
      }
    }
    if (with_gradient.empty()) continue;
    backward(with_gradient, cotangents);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (i < entry.grads.size() && entry.grads[i]) {
        expect_golden(inputs[i].grad(), *entry.grads[i], entry.name + " gradient " + std::to_string(i));
      }
    }
  }
  EXPECT_GT(found, 0) << "no golden for " << op;
}

/// First and second derivatives of `function` with respect to its f64 inputs, in the layouts given.
template <class F>
void check_gradients(F function, const std::vector<Tensor>& inputs) {
  std::vector<Tensor> leaves;
  for (const Tensor& t : inputs) {
    leaves.push_back(t.is_floating() ? empty_strided(t.sizes(), t.strides(), {.dtype = t.dtype()}) : t);
    if (t.is_floating()) leaves.back().copy_(t).requires_grad_();
  }
  gradcheck(function, leaves);
  gradgradcheck(function, leaves);
}

}  // namespace halfstep::test
