// SPDX-License-Identifier: Apache-2.0
// Float32Precision::high on the CPU: products and convolutions in two parts of bfloat16 where the processor has AMX,
// the same bits as otherwise where it has none; captured steps follow the setting; 16 bits aren't touched.
#include "halfstep/runtime/float32_precision.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/autograd/engine.h"
#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "tests/backends/gemm_case.h"

namespace halfstep {
namespace {

class Float32PrecisionOnTheCpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!default_device().is_cpu()) GTEST_SKIP() << "of the CPU's kernels";
  }
  void TearDown() override { set_float32_precision(before_); }

  static std::vector<double> at(Float32Precision precision, const std::function<Tensor()>& f) {
    set_float32_precision(precision);
    std::vector<double> result = f().to_vector<double>();
    set_float32_precision(Float32Precision::highest);
    return result;
  }

 private:
  const Float32Precision before_ = float32_precision();
};

struct Op {
  std::string name;
  Tensor a, b;
  std::int64_t terms;
  std::function<Tensor(const Tensor& a, const Tensor& b)> run;
};

std::vector<Op> ops(DType dtype) {
  manual_seed(11);
  const auto normal = [&](const std::vector<std::int64_t>& sizes) { return randn(sizes).to(dtype); };
  const auto images = [&](const std::vector<std::int64_t>& sizes) {
    return normal(sizes).contiguous(MemoryFormat::channels_last);
  };
  const auto gradient = [](const Tensor& x, const Tensor& w, const Tensor& of, const ConvFuncOptions& options) {
    const Tensor y = conv2d(x, w, {}, options);
    manual_seed(12);
    y.backward(rand(y.sizes()).to(y.dtype()));  // none is negative
    return of.grad();
  };
  const ConvFuncOptions padded = {.padding = {1}};
  return {
      {"mm", normal({96, 160}), normal({160, 64}), 160, [](const Tensor& a, const Tensor& b) { return mm(a, b); }},
      {"bmm", normal({3, 96, 128}), normal({3, 128, 96}), 128,
       [](const Tensor& a, const Tensor& b) { return bmm(a, b); }},
      {"conv2d 3x3", images({2, 64, 14, 14}), images({64, 64, 3, 3}), 64 * 9,
       [=](const Tensor& x, const Tensor& w) { return conv2d(x, w, {}, padded); }},
      {"conv2d 1x1", images({4, 64, 14, 14}), images({128, 64, 1, 1}), 64,
       [](const Tensor& x, const Tensor& w) { return conv2d(x, w); }},
      {"weight gradient 3x3", images({4, 64, 14, 14}), images({96, 64, 3, 3}), 4 * 14 * 14,
       [=](const Tensor& x, const Tensor& w) {
         const Tensor leaf = w.detach().requires_grad_();
         return gradient(x, leaf, leaf, padded);
       }},
      {"input gradient 3x3", images({4, 64, 14, 14}), images({96, 64, 3, 3}), 96 * 9,
       [=](const Tensor& x, const Tensor& w) {
         const Tensor leaf = x.detach().requires_grad_();
         return gradient(leaf, w, leaf, padded);
       }},
  };
}

TEST_F(Float32PrecisionOnTheCpu, LosesNoMoreThanItMay) {
  for (const Op& op : ops(f32)) {
    const auto run = [&] { return op.run(op.a, op.b); };
    const auto exact = op.run(op.a.to(f64), op.b.to(f64)).to_vector<double>(),
               sizes = op.run(abs(op.a.to(f64)), abs(op.b.to(f64))).to_vector<double>(),
               highest = at(Float32Precision::highest, run), high = at(Float32Precision::high, run);
    const double unit = static_cast<double>(op.terms + 6) * 0x1p-24;
    double most = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      ASSERT_LE(std::abs(highest[i] - exact[i]), unit * sizes[i]) << op.name << ' ' << i;
      ASSERT_LE(std::abs(high[i] - exact[i]), (unit + cpu::kLostByHigh) * sizes[i]) << op.name << ' ' << i;
      if (sizes[i] > 0) most = std::max(most, std::abs(high[i] - exact[i]) / sizes[i]);
    }
    if (cpu::amx_usable()) {
      EXPECT_NE(high, highest) << op.name << ": no part was left out";
      // Errors of many terms cancel, but not to what float32 has.
      EXPECT_GT(most, 0x1p-23) << op.name;
    } else {
      EXPECT_EQ(high, highest) << op.name;
    }
  }
}

TEST_F(Float32PrecisionOnTheCpu, LeavesSixteenBitsAlone) {
  for (const DType dtype : {f16, bf16}) {
    for (const Op& op : ops(dtype)) {
      const auto run = [&] { return op.run(op.a, op.b); };
      EXPECT_EQ(at(Float32Precision::highest, run), at(Float32Precision::high, run)) << op.name << ' ' << name(dtype);
    }
  }
}

TEST_F(Float32PrecisionOnTheCpu, CapturedStepsFollowIt) {
  for (const Op& op : ops(f32)) {
    if (op.name.find("gradient") != std::string::npos) continue;
    for (const auto& [first, then] : {std::pair{Float32Precision::highest, Float32Precision::high},
                                      std::pair{Float32Precision::high, Float32Precision::highest}}) {
      set_float32_precision(first);
      auto step = capture([&](const Tensor& a, const Tensor& b) { return op.run(a, b) * 2; });
      for (int i = 0; i < 3; ++i) step(op.a, op.b);
      for (const Float32Precision precision : {first, then, first}) {
        set_float32_precision(precision);
        const auto expected = (op.run(op.a, op.b) * 2).to_vector<double>();
        EXPECT_EQ(step(op.a, op.b).to_vector<double>(), expected) << op.name << ' ' << name(precision);
        EXPECT_TRUE(step.replayed()) << step.why_not();
      }
    }
  }
}

}  // namespace
}  // namespace halfstep
