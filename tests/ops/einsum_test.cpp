// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/einsum.h"

#include <map>
#include "halfstep/amp/autocast.h"

#include "halfstep/ops/matmul.h"
#include "tests/ops/index_checks.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using namespace test;

// Sum by sum over all values of all letters, in float64: the definition.
Values by_definition(const std::string& inputs, const std::string& output, const std::vector<Tensor>& operands,
                     Shape& sizes) {
  std::map<char, std::int64_t> size;
  std::vector<std::string> terms{""};
  for (char c : inputs) {
    if (c == ',') {
      terms.emplace_back();
    } else {
      terms.back() += c;
    }
  }
  for (std::size_t t = 0; t < terms.size(); ++t) {
    for (std::size_t d = 0; d < terms[t].size(); ++d) {
      std::int64_t& n = size[terms[t][d]];
      n = std::max(n, operands[t].size(static_cast<std::int64_t>(d)));
    }
  }
  std::string letters = output;
  for (const auto& [c, n] : size) {
    if (output.find(c) == std::string::npos) letters += c;
  }
  std::int64_t total = 1, results = 1;
  sizes = Shape();
  for (char c : output) {
    results *= size[c];
    sizes.push_back(size[c]);
  }
  for (char c : letters) total *= size[c];
  std::vector<Values> values;
  for (const Tensor& t : operands) values.push_back(t.to_vector<double>());
  Values result(static_cast<std::size_t>(results), 0.0);
  for (std::int64_t i = 0; i < total; ++i) {
    std::map<char, std::int64_t> at;
    std::int64_t rest = i;
    for (auto c = letters.rbegin(); c != letters.rend(); ++c) {
      at[*c] = rest % size[*c];
      rest /= size[*c];
    }
    double product = 1;
    for (std::size_t t = 0; t < terms.size(); ++t) {
      std::int64_t offset = 0;
      for (std::size_t d = 0; d < terms[t].size(); ++d) {
        const std::int64_t n = operands[t].size(static_cast<std::int64_t>(d));
        offset = offset * n + (n == 1 ? 0 : at[terms[t][d]]);
      }
      product *= values[t][static_cast<std::size_t>(offset)];
    }
    std::int64_t place = 0;
    for (char c : output) place = place * size[c] + at[c];
    result[static_cast<std::size_t>(place)] += product;
  }
  return result;
}

void check(const std::string& inputs, const std::string& output, const std::vector<Shape>& shapes) {
  std::vector<Tensor> operands;
  for (std::size_t i = 0; i < shapes.size(); ++i) operands.push_back(sample(shapes[i], 1 + static_cast<double>(i)));
  Shape sizes;
  const Values expected = by_definition(inputs, output, operands, sizes);
  const std::string equation = inputs + "->" + output;
  const Tensor result = einsum(equation, operands);
  ASSERT_EQ(result.sizes(), sizes) << equation;
  const Values values = result.to_vector<double>();
  // At most some hundred terms of size below 100: sums in another order differ by less than 1e-10.
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 1e-10) << equation << " " << i;
}

TEST(Einsum, Goldens) {
  check_goldens("einsum", [](const auto& e, const auto& x) { return std::vector{einsum(e.text("equation"), x)}; });
}

TEST(Einsum, AgreesWithTheDefinition) {
  check("ij,jk", "ik", {{2, 3}, {3, 4}});
  check("ij,jk", "ki", {{2, 3}, {3, 4}});
  check("ij,kj", "", {{2, 3}, {4, 3}});
  check("ij,kj", "j", {{2, 3}, {4, 3}});
  check("i,i", "i", {{3}, {3}});
  check("i,j,k", "kij", {{2}, {3}, {4}});
  check("iij", "ji", {{3, 3, 2}});
  check("iii", "i", {{3, 3, 3}});
  check("iji", "j", {{3, 2, 3}});
  check("ijij", "", {{2, 3, 2, 3}});
  check("iij,jk", "ik", {{2, 2, 3}, {3, 4}});
  check("abc", "ca", {{2, 3, 4}});
  check("bhqd,bkhd", "bhqk", {{2, 2, 3, 4}, {2, 5, 2, 4}});
  check("ab,bc,cd,de", "ae", {{2, 3}, {3, 4}, {4, 2}, {2, 3}});
  check("ab,ab,ab", "ab", {{2, 3}, {2, 3}, {2, 3}});
  check("ab,cd", "", {{2, 3}, {4, 2}});
  check("ab,bX,Xa", "", {{2, 3}, {3, 4}, {4, 2}});
  // A size of 1 broadcasts.
  check("ij,jk", "ik", {{2, 1}, {3, 4}});
  check("ij,jk", "ijk", {{2, 3}, {1, 4}});
  check("ij,ij", "i", {{1, 3}, {2, 3}});
  check("ij,ij", "j", {{1, 3}, {2, 1}});
  // Nothing to sum.
  check("ij,jk", "ik", {{2, 0}, {0, 4}});
  check("ij,jk", "ik", {{0, 3}, {3, 4}});
}

TEST(Einsum, ImplicitOutputAndEllipsis) {
  const Tensor a = sample({2, 3}), b = sample({3, 4}, 2);
  EXPECT_EQ(einsum("ij,jk", {a, b}).to_vector<double>(), einsum("ij,jk->ik", {a, b}).to_vector<double>());
  EXPECT_EQ(einsum(" b a ", {a}).to_vector<double>(), a.transpose(0, 1).to_vector<double>());
  EXPECT_EQ(einsum("Ba", {a}).sizes(), Shape({2, 3})) << "capitals come first";
  EXPECT_EQ(einsum("ii", {sample({3, 3})}).sizes(), Shape({}));
  const Tensor x = sample({2, 1, 3, 4}), y = sample({5, 4, 2}, 3);
  EXPECT_EQ(einsum("...ij,...jk->...ik", {x, y}).sizes(), Shape({2, 5, 3, 2}));
  EXPECT_EQ(einsum("...ij,...jk", {x, y}).sizes(), Shape({2, 5, 3, 2}));
  EXPECT_EQ(einsum("i...->...i", {x}).to_vector<double>(), x.permute({1, 2, 3, 0}).to_vector<double>());
  EXPECT_EQ(einsum("...", {x}).to_vector<double>(), x.to_vector<double>());
  EXPECT_EQ(einsum("...,...->...", {scalar_tensor(2, {.dtype = f64}), a}).to_vector<double>(),
            (a * 2).to_vector<double>());
}

TEST(Einsum, Tensordot) {
  const Tensor a = sample({2, 3, 4}), b = sample({3, 4, 5}, 2);
  EXPECT_EQ(tensordot(a, b).sizes(), Shape({2, 5}));
  const Values expected = einsum("abc,bcd->ad", {a, b}).to_vector<double>();
  const Values values = tensordot(a, b).to_vector<double>();
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], expected[i], 1e-12);
  EXPECT_EQ(tensordot(a, b, {-1}, {1}).sizes(), Shape({2, 3, 3, 5}));
  EXPECT_EQ(tensordot(a, b, 0).sizes(), Shape({2, 3, 4, 3, 4, 5}));
  EXPECT_THROW(tensordot(a, b, 4), ShapeError);
  EXPECT_THROW(tensordot(a, b, {0}, {0}), ShapeError);
  EXPECT_THROW(tensordot(a, b, {1, 1}, {0, 0}), ShapeError);
}

TEST(Einsum, Errors) {
  const Tensor a = zeros({2, 3}), b = zeros({4, 5});
  EXPECT_EQ(error_of<ShapeError>([&] {
              einsum("ij,jk->ik", {a, b});
            }),
            "einsum: expected equal sizes or 1 for j in \"ij,jk->ik\", got 3 and 4");
  EXPECT_EQ(error_of<ShapeError>([&] { einsum("ijk", {a}); }),
            "einsum: expected 3 dimensions for operand 0 (\"ijk\"), got [2, 3]");
  EXPECT_EQ(error_of<Error>([&] { einsum("ij,jk->ik", {a}); }), "einsum: expected 2 operands for \"ij,jk->ik\", got 1");
  EXPECT_EQ(error_of<Error>([&] { einsum("ij->ix", {a}); }), "einsum: the result's x is in no operand in \"ij->ix\"");
  EXPECT_THROW(einsum("ij->ii", {a}), Error);
  EXPECT_THROW(einsum("i1", {a}), Error);
  EXPECT_THROW(einsum("ij->->", {a}), Error);
  EXPECT_THROW(einsum("i..j", {a}), Error);
  EXPECT_THROW(einsum("......", {a}), Error);
  EXPECT_THROW(einsum("i", {a}), ShapeError);
  EXPECT_THROW(einsum("ii", {a}), ShapeError);
  EXPECT_THROW(einsum("ij...k", {a}), ShapeError);
  EXPECT_THROW(einsum("ij", {Tensor()}), Error);
}

TEST(Einsum, Gradients) {
  const Tensor a = sample({2, 3}), b = sample({4, 3}, 2).transpose(0, 1);
  check_gradients([](const auto& v) { return einsum("ij,jk->ki", v); }, {a, b});
  check_gradients([](const auto& v) { return einsum("ij,ij,ij->i", v); }, {a, a * 2, sample({1, 3}, 5)});
  check_gradients([](const auto& v) { return einsum("ii,ij->j", v); }, {sample({2, 2}), a});
  check_gradients([](const auto& v) { return einsum("...ij,...jk->...ik", v); }, {sample({2, 2, 3}), b});
  check_gradients([](const auto& v) { return tensordot(v[0], v[1], 1); }, {a, b});
}

TEST(Einsum, PolicyGoldens) {
  check_policy_goldens("einsum",
                       [](const auto& e, const auto& x) { return std::vector{einsum(e.text("equation"), x)}; });
}

TEST(Einsum, LowerPrecisionUnderAutocast) {
  const Tensor a = sample({2, 3}).to(f32), b = sample({3, 4}, 2).to(f32);
  amp::Autocast autocast{{.dtype = bf16}};
  const Tensor c = einsum("ij,jk->ik", {a, b});
  EXPECT_EQ(c.dtype(), bf16);
  EXPECT_EQ(c.to_vector<double>(), mm(a.to(bf16), b.to(bf16)).to_vector<double>());
}

}  // namespace
}  // namespace halfstep
