// SPDX-License-Identifier: Apache-2.0
// Every op that has a gradient, forward and backward, under the observers.
#include <gtest/gtest.h>

#include "halfstep/autograd/engine.h"
#include "halfstep/debug/compare.h"
#include "halfstep/ops/create.h"
#include "tests/support/op_cases.h"

namespace halfstep {
namespace {

void forward_and_backward(const test::OpCase& c, DType dtype) {
  std::vector<Tensor> arguments = op_arguments(c, test::OpLayout::contiguous, dtype);
  std::vector<Tensor> outputs;
  for (Tensor& t : arguments) {
    if (t.is_floating() && !t.requires_grad()) t.requires_grad_();
  }
  for (const Tensor& t : c.call(arguments)) {
    if (t.requires_grad()) outputs.push_back(t);
  }
  std::vector<Tensor> gradients;
  for (const Tensor& t : outputs) {
    // Constant ones would make gradients that cancel to nothing.
    std::vector<double> values;
    for (std::int64_t i = 0; i < t.numel(); ++i) values.push_back(0.25 + static_cast<double>(i * i % 7) / 8);
    gradients.push_back(tensor(values, t.sizes()).to(t.dtype()));
  }
  if (!outputs.empty()) backward(outputs, gradients);
}

// The CPU's kernels are right, so Compare finds them right: one rounding of the result, and for what is computed in
// float32 inside 2^-18 of the largest value (64 roundings: attention and the norms take some dozens). What can't be run
// again are fills only, by kernels of their own: attributes with a dtype, random states and lists of tensors are.
TEST(EveryOp, IsComparedWithTheCpu) {
  std::uint64_t compared = 0;
  for (const DType dtype : {f32, f16, bf16}) {
    for (const test::OpCase& c : test::all_op_cases()) {
      debug::Compare compare;
      forward_and_backward(c, dtype);
      compared += compare.compared();
      for (const auto& [why, count] : compare.skipped()) {
        EXPECT_EQ(why, "fill: a kernel that runs by itself") << c.op << ' ' << name(dtype);
      }
      for (const debug::Comparison& w : compare.worst()) {
        if (!is_floating(w.dtype)) continue;
        const double rounding = w.dtype == f32 || w.dtype == f64 ? 0 : finfo(w.dtype).eps / 2;
        EXPECT_LE(w.max_relative, rounding + 0x1p-18)
            << c.op << ' ' << name(dtype) << ": " << w.site.str() << " got " << w.got << ", expected " << w.expected;
      }
    }
  }
  EXPECT_GT(compared, 1000u);
}

}  // namespace
}  // namespace halfstep
