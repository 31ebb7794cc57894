// SPDX-License-Identifier: Apache-2.0
// What holds for every op, on the table of tests/support/op_cases.h: first and second derivatives against differences
// in float64, on contiguous, strided and empty tensors; results and gradients in 16 bits against float64. An op without
// a case fails.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <set>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/autograd/node.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/random.h"
#include "tests/support/op_cases.h"

namespace halfstep {
namespace {

using test::OpCase;
using test::OpLayout;

constexpr const char* kLayouts[] = {"contiguous", "strided", "empty"};

void check_gradients(const std::vector<OpCase>& cases) {
  for (const OpCase& c : cases) {
    if (!c.differences) continue;
    for (const OpLayout layout : {OpLayout::contiguous, OpLayout::strided, OpLayout::empty}) {
      const auto in = op_arguments(c, layout, f64);
      try {
        gradcheck(TensorFunction(c.call), in);
        gradgradcheck(TensorFunction(c.call), in);
      } catch (const std::exception& e) {
        ADD_FAILURE() << c.op << ", " << kLayouts[static_cast<int>(layout)] << ": " << e.what();
      }
    }
  }
}

TEST(GradientsUnary, MatchDifferences) { check_gradients(test::unary_cases()); }
TEST(GradientsBinary, MatchDifferences) { check_gradients(test::binary_cases()); }
TEST(GradientsReduction, MatchDifferences) { check_gradients(test::reduction_cases()); }
TEST(GradientsProduct, MatchDifferences) { check_gradients(test::product_cases()); }
TEST(GradientsMoving, MatchDifferences) { check_gradients(test::moving_cases()); }
TEST(GradientsNetwork, MatchDifferences) { check_gradients(test::network_cases()); }
TEST(GradientsConvolution, MatchDifferences) { check_gradients(test::convolution_cases()); }
TEST(GradientsPooling, MatchDifferences) { check_gradients(test::pooling_cases()); }
TEST(GradientsResampling, MatchDifferences) { check_gradients(test::resampling_cases()); }
TEST(GradientsImageNorm, MatchDifferences) { check_gradients(test::image_norm_cases()); }
TEST(GradientsDetection, MatchDifferences) { check_gradients(test::detection_cases()); }
TEST(GradientsQuantize, MatchDifferences) { check_gradients(test::quantize_cases()); }

class Seen : public OpObserver {
 public:
  Seen() { add_observer(this); }
  ~Seen() override { remove_observer(this); }
  void after_call(const ObservedCall& call) override {
    const std::lock_guard lock(mutex_);
    if (call.op) names_.insert(call.op->name);
  }
  const std::set<std::string>& names() const { return names_; }

 private:
  std::mutex mutex_;
  std::set<std::string> names_;
};

// Ops without a gradient, and why that is right.
bool needs_no_gradient(const Op& op) {
  // Fused backward passes, which step aside for recorded ops when their own derivative is asked for (the second
  // derivatives of what calls them are checked above), and constants in a backward pass: made of targets, and of where
  // an extreme is.
  if (op.backward) return true;
  static const std::set<std::string> list = {
      // Bools and integers.
      "all", "any", "argmax", "argmin", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "count_nonzero",
      "eq", "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_and", "logical_not", "logical_or", "logical_xor",
      "lt", "ne", "nms", "nonzero", "nonzero_count",
      // Steps: PyTorch's has no gradient either.
      "floor_divide",
      // Random integers: their gradient is none, and nothing that has one comes in.
      "randint", "randperm",
      // To integers and from them, and from a range that was seen to its scale.
      "quantize", "dequantize", "quantization_parameters",
      // Of networks that are not trained any more.
      "add_int8", "conv2d_int8", "linear_int8", "linear_weight_only", "lookup_int8", "mean_int8"};
  return list.contains(op.name);
}

// Fused ops, of which observers see the parts: without one, what made the result tells. On a device without the fused
// kernel the parts are all there is.
bool is_hidden(const std::string& op) { return op == "batch_norm_act" || op == "batch_norm_silu"; }
bool is_in_parts(const OpCase& c, const Tensor& result) {
  return is_hidden(c.op) && autograd_meta(result).made_by() != c.op;
}

TEST(OpCases, EveryOpIsThereAndDifferentiable) {
  std::set<std::string> seen, declared;
  for (const OpCase& c : test::all_op_cases()) {
    declared.insert(c.op);
    const Op* op = find_op(c.op);
    ASSERT_NE(op, nullptr) << c.op;
    if (is_hidden(c.op)) {
      for (const Tensor& t : c.call(op_arguments(c, OpLayout::contiguous, f64))) {
        EXPECT_TRUE(!is_in_parts(c, t) || !t.device().is_cpu()) << c.op << " has a case that doesn't call it";
      }
      seen.insert(c.op);
    }
    const Seen calls;
    const auto in = op_arguments(c, OpLayout::contiguous, f64);
    std::vector<Tensor> roots, weights, leaves;
    for (const Tensor& t : c.call(in)) {
      if (!t.requires_grad()) continue;
      roots.push_back(t);
      weights.push_back(ones(t.sizes(), {.dtype = f64}).requires_grad_());
    }
    EXPECT_TRUE(op->composite || is_hidden(c.op) || calls.names().contains(c.op))
        << c.op << " has a case that doesn't call it";
    for (const Tensor& t : in) {
      if (t.requires_grad()) leaves.push_back(t);
    }
    // Gradients of gradients are checked too, so that what the recorded backward pass calls is covered.
    grad(roots, leaves, {.grad_outputs = weights, .create_graph = true, .allow_unused = true});
    seen.insert(calls.names().begin(), calls.names().end());
  }
  for (const Op* op : all_ops()) {
    const std::string name = op->name;
    if (name.starts_with("test_")) continue;
    if (name == "to_device") continue;  // takes two devices: tests/runtime
    if (op->composite) {
      EXPECT_TRUE(declared.contains(name)) << name << " has no case in tests/support/op_cases.cpp";
    } else if (op->grad) {
      EXPECT_TRUE(seen.contains(name) || needs_no_gradient(*op))
          << name << " has no case in tests/support/op_cases.cpp";
    } else {
      EXPECT_TRUE(needs_no_gradient(*op)) << name << " has neither a gradient nor a reason to have none";
    }
  }
}

// |got - exact| <= roundings u |exact| + 64 u32 scale + 2^-25 for f16, whose numbers below 2^-14 have fewer digits. The
// arguments are of size 1, so scale, the largest |exact| or 1, bounds the terms of every sum, which float32 takes.
void expect_rounded(const Tensor& got, const Tensor& exact, double roundings, bool relative, const std::string& what) {
  const double u = got.dtype() == f16 ? 0x1p-11 : got.dtype() == bf16 ? 0x1p-8 : 0x1p-24;
  const auto x = got.detach().to_vector<double>(), y = exact.detach().to_vector<double>();
  ASSERT_EQ(x.size(), y.size()) << what;
  double scale = 1;
  for (const double v : y) scale = std::max(scale, std::abs(v));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double bound =
        roundings * u * (relative ? std::abs(y[i]) : scale) + 64 * 0x1p-24 * scale + (got.dtype() == f16 ? 0x1p-25 : 0);
    EXPECT_NEAR(x[i], y[i], bound) << what << " element " << i << ", in units of the last place "
                                   << std::abs(x[i] - y[i]) / (2 * u * std::max(std::abs(y[i]), 1e-30));
    if (!(std::abs(x[i] - y[i]) <= bound)) return;
  }
}

// Gradients are made of a few ops, each rounding once: four roundings of the largest.
void check_sixteen_bits(const std::vector<OpCase>& cases) {
  for (const OpCase& c : cases) {
    if (!c.sixteen_bits) continue;
    for (const DType dtype : {f16, bf16}) {
      for (const OpLayout layout : {OpLayout::contiguous, OpLayout::strided}) {
        const std::string what = c.op + " " + name(dtype) + " " + kLayouts[static_cast<int>(layout)];
        try {
          const auto low = op_arguments(c, layout, dtype);
          std::vector<Tensor> wide, low_leaves, wide_leaves;
          for (const Tensor& t : low) {
            wide.push_back(t.is_floating() ? t.detach().to(f64) : t);
            if (!t.requires_grad()) continue;
            wide.back().requires_grad_();
            low_leaves.push_back(t);
            wide_leaves.push_back(wide.back());
          }
          const auto got = c.call(low), exact = c.call(wide);
          std::vector<Tensor> low_weights, wide_weights, low_roots, wide_roots;
          manual_seed(1);
          for (std::size_t o = 0; o < got.size(); ++o) {
            EXPECT_EQ(got[o].dtype(), dtype) << what;
            // The sum of two values is rounded, and before it one of them, which is at most 2 larger than the sum: the
            // residual, the other one, is at most 2. That is less than four roundings of the largest, or of 1.
            const bool parts = is_in_parts(c, got[o]);
            expect_rounded(got[o], exact[o], parts ? 4 : c.roundings, !parts, what);
            if (!got[o].requires_grad()) continue;
            low_roots.push_back(got[o]);
            wide_roots.push_back(exact[o]);
            low_weights.push_back((rand(got[o].sizes(), {.dtype = f64}) + 0.5).to(got[o].dtype()));
            wide_weights.push_back(low_weights.back().to(f64));
          }
          const auto a = grad(low_roots, low_leaves, {.grad_outputs = low_weights, .allow_unused = true});
          const auto b = grad(wide_roots, wide_leaves, {.grad_outputs = wide_weights, .allow_unused = true});
          for (std::size_t i = 0; i < a.size(); ++i) {
            ASSERT_EQ(a[i].defined(), b[i].defined()) << what;
            if (a[i].defined()) expect_rounded(a[i], b[i], 4, false, what + " gradient " + std::to_string(i));
          }
        } catch (const std::exception& e) {
          ADD_FAILURE() << what << ": " << e.what();
        }
      }
    }
  }
}

TEST(SixteenBitsUnary, RoundOnce) { check_sixteen_bits(test::unary_cases()); }
TEST(SixteenBitsBinary, RoundOnce) { check_sixteen_bits(test::binary_cases()); }
TEST(SixteenBitsReduction, RoundOnce) { check_sixteen_bits(test::reduction_cases()); }
TEST(SixteenBitsProduct, RoundOnce) { check_sixteen_bits(test::product_cases()); }
TEST(SixteenBitsMoving, RoundOnce) { check_sixteen_bits(test::moving_cases()); }
TEST(SixteenBitsNetwork, RoundOnce) { check_sixteen_bits(test::network_cases()); }
TEST(SixteenBitsConvolution, RoundOnce) { check_sixteen_bits(test::convolution_cases()); }
TEST(SixteenBitsPooling, RoundOnce) { check_sixteen_bits(test::pooling_cases()); }
TEST(SixteenBitsResampling, RoundOnce) { check_sixteen_bits(test::resampling_cases()); }
TEST(SixteenBitsImageNorm, RoundOnce) { check_sixteen_bits(test::image_norm_cases()); }
TEST(SixteenBitsDetection, RoundOnce) { check_sixteen_bits(test::detection_cases()); }
TEST(SixteenBitsQuantize, RoundOnce) { check_sixteen_bits(test::quantize_cases()); }

}  // namespace
}  // namespace halfstep
