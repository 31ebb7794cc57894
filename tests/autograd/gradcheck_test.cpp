// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/gradcheck.h"

#include <gtest/gtest.h>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;

using Values = std::vector<double>;
using Tensors = std::vector<Tensor>;

Tensor leaf(const Values& values, const Shape& sizes, DType dtype = f64) {
  return tensor(values, sizes, {.dtype = dtype, .requires_grad = true});
}

// x * x with the gradient that `how` says: ops of the test's own, to see wrong ones found.
enum class How { right, factor, not_linear, changes_its_gradient, second_wrong };
How g_how = How::right;

struct Squares {
  const Op& op;
  static const Op& get() {
    static const Op& op = define_op({
        .name = "gradcheck_test_square",
        .infer = [](InferContext& c) { infer_elementwise(c, c.input(0).dtype()); },
        .grad =
            [](GradContext& c) {
              Tensor g = c.grad();
              const Tensor& x = c.input(0);
              switch (g_how) {
                case How::right:
                  return c.set(0, g * x * 2);
                case How::factor:
                  return c.set(0, g * x * 2.01);
                case How::not_linear:
                  return c.set(0, g * g * x * 2);  // right for gradients of 0 and 1
                case How::changes_its_gradient: {
                  const Tensor result = g * x * 2;
                  const NoGrad no_grad;
                  g.mul_(2);
                  return c.set(0, result);
                }
                case How::second_wrong:
                  return c.set(0, g.detach() * x * 2);  // right, but its own derivative for g is lost
              }
            },
        .saves = {in(0)},
    });
    return op;
  }
};

Status square_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  const auto* x = static_cast<const double*>(in[0].data);
  auto* y = static_cast<double*>(out[0].data);
  for (std::int64_t i = 0; i < out[0].numel; ++i) y[i] = x[i] * x[i];
  return Status::ok;
}

const RegisterCpuKernel registered("gradcheck_test_square", {DType::f64}, square_kernel);

Tensor square(const Tensor& x) { return call(Squares::get(), {&x}); }

class WrongGradients : public ::testing::Test {
 protected:
  void TearDown() override { g_how = How::right; }
  const Tensor x_ = leaf({1, 2, -3, 0.5}, {2, 2});
  static Tensor f(const Tensors& in) { return square(in[0]); }
};

TEST_F(WrongGradients, TheRightOnePasses) {
  gradcheck(f, {x_});
  gradgradcheck(f, {x_});
}

TEST_F(WrongGradients, AWrongFactorIsNamedWithItsPlace) {
  g_how = How::factor;
  const std::string text = error_of<Error>([&] { gradcheck(f, {x_}); });
  EXPECT_NE(text.find("gradcheck: the gradient of output 0 at [0, 0] for input 0 at [0, 0]"), std::string::npos)
      << text;
  EXPECT_NE(text.find("numerical 2.0"), std::string::npos) << text;
  EXPECT_NE(text.find("analytical 2.01"), std::string::npos) << text;
  EXPECT_THROW(gradcheck(f, {x_}), AutogradError);
}

TEST_F(WrongGradients, OneThatIsOnlyRightForSingleElementsIsFound) {
  g_how = How::not_linear;
  EXPECT_NE(error_of<Error>([&] { gradcheck(f, {x_}); }).find("linear"), std::string::npos);
}

TEST_F(WrongGradients, OneThatWritesToTheGradientItGotIsFound) {
  g_how = How::changes_its_gradient;
  EXPECT_NE(error_of<Error>([&] { gradcheck(f, {x_}); }).find("changed the gradient"), std::string::npos);
}

TEST_F(WrongGradients, AWrongSecondDerivativeIsFound) {
  g_how = How::second_wrong;
  gradcheck(f, {x_});
  const std::string text = error_of<Error>([&] { gradgradcheck(f, {x_}); });
  EXPECT_NE(text.find("gradgradcheck: the gradient of the gradient for input 0"), std::string::npos) << text;
  EXPECT_NE(text.find("for the gradient of output 0"), std::string::npos) << text;
}

TEST(Gradcheck, SeveralInputsAndOutputsWithIntegersAmongThem) {
  const Tensor x = leaf({1, 2, 3, 4, 5, 6}, {2, 3}), w = leaf({0.5, -1, 2}, {3});
  const Tensor n = tensor({3, 4, 5}, {3}, {.dtype = i64});
  const auto f = [](const Tensors& in) { return Tensors{in[0] * in[1] * in[2], sum(in[1] * in[1]), in[2] + 1}; };
  gradcheck(f, {x, w, n});
  gradgradcheck(f, {x, w, n});
  EXPECT_FALSE(x.grad().defined());
  EXPECT_EQ(x.to_vector<double>(), (Values{1, 2, 3, 4, 5, 6}));
}

TEST(Gradcheck, EmptyAndZeroDimensional) {
  const Tensor none = leaf({}, {0, 3}), one = leaf({2}, {});
  const auto f = [](const Tensors& in) { return in[0] * in[1]; };
  gradcheck(f, {none, one});
  gradgradcheck(f, {none, one});
  gradcheck(f, {one, one});
  gradgradcheck(f, {one, one});
}

TEST(Gradcheck, KeepsTheStridesOfItsInputs) {
  const Tensor base = leaf({1, 2, 3, 4, 5, 6, 7, 8}, {2, 4});
  const Tensor transposed = base.transpose(0, 1), strided = base.slice(1, 0, 4, 2);
  std::vector<Shape> seen;
  const auto f = [&](const Tensors& in) {
    seen = {in[0].strides(), in[1].strides()};
    return mm(in[0], in[1] * in[1]);
  };
  gradcheck(f, {transposed, strided});
  EXPECT_EQ(seen[0], (Shape{1, 4}));
  EXPECT_EQ(seen[1], (Shape{4, 2}));
  gradgradcheck(f, {transposed, strided});
}

TEST(Gradcheck, AnOutputThatDoesNotDependOnAnInput) {
  const Tensor x = leaf({1, 2}, {2}), z = leaf({3}, {});
  const auto f = [](const Tensors& in) { return Tensors{in[0] * in[0], in[1] * 2, ones({2}, {.dtype = f64})}; };
  gradcheck(f, {x, z});
  gradgradcheck(f, {x, z});
}

TEST(Gradcheck, ALostHistoryIsFound) {
  const Tensor x = leaf({1, 2}, {2});
  EXPECT_NE(error_of<Error>([&] {
              gradcheck([](const Tensors& in) { return in[0].detach() * in[0]; }, {x});
            }).find("numerical 2.0"),
            std::string::npos);
}

TEST(Gradcheck, RandomFunctionsAreFound) {
  const Tensor x = leaf({1, 2}, {2});
  int calls = 0;
  const auto f = [&](const Tensors& in) { return in[0] * static_cast<double>(++calls); };
  EXPECT_NE(error_of<Error>([&] { gradcheck(f, {x}); }).find("differs between two runs"), std::string::npos);
}

TEST(Gradcheck, RefusesWhatItCanNotCheck) {
  const auto f = [](const Tensors& in) { return in[0] * in[0]; };
  EXPECT_THROW(gradcheck(f, {leaf({1, 2}, {2}, f32)}), DTypeError);
  EXPECT_THROW(gradcheck(f, {tensor({1, 2}, {2}, {.dtype = f64})}), Error);
  const std::string text = error_of<Error>([&] { gradcheck(f, {leaf({1}, {1}).expand({3})}); });
  EXPECT_NE(text.find("overlapping"), std::string::npos) << text;
  EXPECT_THROW(gradcheck([](const Tensors& in) { return in[0].to(f32); }, {leaf({1}, {1})}), DTypeError);
}

TEST(Gradcheck, RunsInNoGradToo) {
  const NoGrad no_grad;
  const auto f = [](const Tensors& in) { return in[0] * in[0]; };
  gradcheck(f, {leaf({1, 2}, {2})});
  gradgradcheck(f, {leaf({1, 2}, {2})});
}

}  // namespace
}  // namespace halfstep
