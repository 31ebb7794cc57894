// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/value_and_grad.h"

#include <gtest/gtest.h>

#include <string>

#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;
using Values = std::vector<double>;

Tensor of(const Values& values, DType dtype = f32) {
  return tensor(values, {static_cast<std::int64_t>(values.size())}, {.dtype = dtype});
}
Tensor parameter(const Values& values) { return of(values).requires_grad_(); }

TEST(ValueAndGrad, OfParameters) {
  const Tensor w = parameter({2, 3}), b = parameter({5});
  const auto step = value_and_grad([&](const Tensor& x) { return sum(w * x) + sum(b); }, {w, b});
  const auto [loss, gradients] = step(of({7, 11}));
  EXPECT_EQ(loss.item<double>(), 2 * 7 + 3 * 11 + 5);
  EXPECT_FALSE(loss.requires_grad());
  ASSERT_EQ(gradients.size(), 2u);
  EXPECT_EQ(gradients[0].to_vector<double>(), (Values{7, 11}));
  EXPECT_EQ(gradients[1].to_vector<double>(), (Values{1}));
  EXPECT_FALSE(w.grad().defined()) << "grad() is not touched";
  w.set_grad(of({1, 1}));
  EXPECT_EQ(step(of({1, 2})).gradients[0].to_vector<double>(), (Values{1, 2})) << "nothing adds up";
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{1, 1}));
}

TEST(ValueAndGrad, OnlyTheFirstOfSeveralResultsIsDifferentiated) {
  const Tensor w = parameter({2, 3});
  const auto pair = value_and_grad(
      [&](const Tensor& x) {
        const Tensor y = w * x;
        return std::pair(sum(y), y);
      },
      NamedTensors{{"w", w}});
  const auto [value, gradients] = pair(of({7, 11}));
  EXPECT_EQ(gradients[0].to_vector<double>(), (Values{7, 11})) << "not twice that";
  EXPECT_EQ(value.first.item<double>(), 47);
  EXPECT_EQ(value.second.to_vector<double>(), (Values{14, 33}));
  EXPECT_FALSE(value.second.requires_grad());
  const auto tuple = value_and_grad(
      [&](const Tensor& x) { return std::tuple(sum(w * x), std::string("anything"), 3, std::vector{w * 2}, Tensor()); },
      std::vector{w});
  const auto result = tuple(of({7, 11}));
  EXPECT_EQ(result.gradients[0].to_vector<double>(), (Values{7, 11}));
  EXPECT_EQ(std::get<1>(result.value), "anything");
  EXPECT_EQ(std::get<2>(result.value), 3);
  EXPECT_FALSE(std::get<3>(result.value)[0].requires_grad());
  EXPECT_FALSE(std::get<4>(result.value).defined());
}

TEST(ValueAndGrad, OfArguments) {
  const auto product = [](const Tensor& a, const Tensor& b) { return sum(a * b * b); };
  const Tensor a = of({2, 3}), b = of({5, 7});
  EXPECT_EQ(value_and_grad(product)(a, b).gradients.to_vector<double>(), (Values{25, 49})) << "position 0 unless named";
  EXPECT_EQ(value_and_grad(product, 0)(a, b).gradients.to_vector<double>(), (Values{25, 49}));
  EXPECT_EQ(value_and_grad(product, 1)(a, b).gradients.to_vector<double>(), (Values{20, 42}));
  const auto [value, both] = value_and_grad(product, {1, 0})(a, b);
  EXPECT_EQ(value.item<double>(), 2 * 25 + 3 * 49);
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].to_vector<double>(), (Values{20, 42})) << "in the order of the positions";
  EXPECT_EQ(both[1].to_vector<double>(), (Values{25, 49}));
  EXPECT_EQ(value_and_grad(product, {0})(a, b).gradients.size(), 1u);
  EXPECT_EQ(value_and_grad(product, std::vector<int>{1})(a, b).gradients[0].to_vector<double>(), (Values{20, 42}));
  EXPECT_FALSE(a.requires_grad());
  EXPECT_FALSE(b.requires_grad());
  // One tensor in both places: each has its own gradient.
  const auto [square, apart] = value_and_grad(product, {0, 1})(a, a);
  EXPECT_EQ(square.item<double>(), 8 + 27);
  EXPECT_EQ(apart[0].to_vector<double>(), (Values{4, 9}));
  EXPECT_EQ(apart[1].to_vector<double>(), (Values{8, 18}));
}

TEST(ValueAndGrad, OfArgumentsAndParameters) {
  const Tensor w = parameter({2, 3});
  const auto f = [&](int factor, const Tensor& x, const std::string&) { return sum(w * x * x) * factor; };
  const auto [value, gradients] = value_and_grad(f, 1, std::vector{w})(10, of({5, 7}), "text");
  EXPECT_EQ(value.item<double>(), 10 * (2 * 25 + 3 * 49));
  EXPECT_EQ(gradients.first.to_vector<double>(), (Values{200, 420}));
  EXPECT_EQ(gradients.second[0].to_vector<double>(), (Values{250, 490}));
  const auto several = value_and_grad(f, {1}, NamedTensors{{"w", w}})(1, of({5, 7}), "text").gradients;
  EXPECT_EQ(several.first[0].to_vector<double>(), (Values{20, 42}));
  EXPECT_EQ(several.second[0].to_vector<double>(), (Values{25, 49}));
}

TEST(ValueAndGrad, UnusedAndFrozenParametersHaveNone) {
  const Tensor w = parameter({2}), unused = parameter({3}), frozen = of({4});
  const auto gradients =
      value_and_grad([&](const Tensor& x) { return sum(w * x * frozen); }, {unused, w, frozen})(of({5})).gradients;
  ASSERT_EQ(gradients.size(), 3u);
  EXPECT_FALSE(gradients[0].defined());
  EXPECT_EQ(gradients[1].item<double>(), 20);
  EXPECT_FALSE(gradients[2].defined());
}

TEST(ValueAndGrad, RecordsWhereRecordingIsOff) {
  const Tensor w = parameter({2});
  const NoGrad off;
  const auto step = value_and_grad([&](const Tensor& x) { return sum(w * w * x); }, std::vector{w});
  EXPECT_EQ(step(of({3})).gradients[0].item<double>(), 12);
  EXPECT_FALSE(GradMode::is_enabled());
}

TEST(ValueAndGrad, MisuseIsNamed) {
  const Tensor w = parameter({2, 3});
  const auto says = [](const auto& call, const char* part) {
    const std::string text = error_of<Error>(call);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const auto loss = [&](const Tensor& x) { return sum(w * x); };
  says(
      [&] {
        value_and_grad([&](const Tensor& x) { return std::pair(w * x, sum(w * x)); }, std::vector{w})(of({1, 2}));
      },
      "expected a loss of one floating element as the function's first result, got f32 [2]");
  says(
      [&] {
        value_and_grad([&](const Tensor& x) { return sum(x); }, std::vector{w})(of({1, 2}));
      },
      "depends on nothing");
  says(
      [&] {
        value_and_grad([&](const Tensor&) { return Tensor(); }, std::vector{w})(of({1, 2}));
      },
      "undefined tensor");
  says([&] { value_and_grad(loss, 1)(of({1, 2})); }, "expected positions of the 1 arguments, from 0, got 1");
  says([&] { value_and_grad(loss, -1)(of({1, 2})); }, "got -1");
  says([&] { value_and_grad(loss, {0, 0})(of({1, 2})); }, "position 0 is there twice");
  says([&] { value_and_grad(loss, 0)(of({1, 2}, i64)); }, "expected argument 0 to be floating, got i64");
  says(
      [&] {
        value_and_grad([&](const Tensor& x, int) { return sum(w * x); }, 1)(of({1, 2}), 3);
      },
      "argument 1 is no tensor");
}

}  // namespace
}  // namespace halfstep
