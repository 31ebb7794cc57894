// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/join.h"

#include "tests/ops/index_checks.h"

namespace halfstep {
namespace {

using namespace test;

TEST(Join, Goldens) {
  check_goldens("cat", [](const auto& e, const auto& x) { return std::vector{cat(x, e.integer("dim"))}; });
  check_goldens("stack", [](const auto& e, const auto& x) { return std::vector{stack(x, e.integer("dim"))}; });
  check_goldens("split", [](const auto& e, const auto& x) {
    return e.has("size") ? split(x[0], e.integer("size"), e.integer("dim"))
                         : split(x[0], e.integers("sizes"), e.integer("dim"));
  });
  check_goldens("chunk",
                [](const auto& e, const auto& x) { return chunk(x[0], e.integer("chunks"), e.integer("dim")); });
  check_goldens("unbind", [](const auto& e, const auto& x) { return unbind(x[0], e.integer("dim")); });
  check_goldens("repeat",
                [](const auto& e, const auto& x) { return std::vector{repeat(x[0], e.integers("repeats"))}; });
  check_goldens("roll", [](const auto& e, const auto& x) {
    return std::vector{roll(x[0], {e.integer("shifts")}, {e.integer("dim")})};
  });
  check_goldens("flip", [](const auto& e, const auto& x) { return std::vector{flip(x[0], e.integers("dims"))}; });
}

TEST(Join, CatOfManyTensors) {
  std::vector<Tensor> parts;
  Values expected;
  for (int i = 0; i < 300; ++i) {
    parts.push_back(tensor({double(i), double(-i)}, {.dtype = f64, .requires_grad = true}));
    expected.insert(expected.end(), {double(i), double(-i)});
  }
  const Tensor all = cat(parts);
  EXPECT_EQ(all.to_vector<double>(), expected);
  sum(all * all).backward();
  EXPECT_EQ(parts[299].grad().to_vector<double>(), (Values{598, -598}));
  EXPECT_EQ(parts[17].grad().to_vector<double>(), (Values{34, -34}));
}

TEST(Join, CatPromotesDtypes) {
  const Tensor half = tensor({1.5, 2}, {.dtype = f16, .requires_grad = true});
  const Tensor brain = tensor({3.25}, {.dtype = bf16, .requires_grad = true});
  const Tensor whole = ints({7});
  EXPECT_EQ(cat({half, whole}).dtype(), f16);
  const Tensor all = cat({half, brain, whole});
  EXPECT_EQ(all.dtype(), f32);
  EXPECT_EQ(all.to_vector<double>(), (Values{1.5, 2, 3.25, 7}));
  sum(all * all).backward();
  EXPECT_EQ(half.grad().dtype(), f16);
  EXPECT_EQ(half.grad().to_vector<double>(), (Values{3, 4}));
  EXPECT_EQ(brain.grad().dtype(), bf16);
  // Beyond the 63rd tensor, too.
  std::vector<Tensor> many(70, tensor({1}, {.dtype = f32}));
  many.push_back(ints({5}));
  EXPECT_EQ(cat(many).to_vector<double>().back(), 5);
}

TEST(Join, CatOfLayouts) {
  const Tensor a = sample({2, 3, 4, 5}).contiguous(MemoryFormat::channels_last), b = a * 2;
  const Tensor joined = cat({a, b}, 1);
  EXPECT_TRUE(joined.is_contiguous(MemoryFormat::channels_last));
  EXPECT_EQ(joined.to_vector<double>(), cat({a.contiguous(), b.contiguous()}, 1).to_vector<double>());
  const Tensor t = sample({3, 2}).transpose(0, 1);
  EXPECT_EQ(cat({t, t}, 0).to_vector<double>(), cat({t.contiguous(), t.contiguous()}, 0).to_vector<double>());
  const Tensor one = tensor({1.0}).expand({3});
  EXPECT_EQ(cat({one, tensor({2, 3})}).to_vector<double>(), (Values{1, 1, 1, 2, 3}));
}

TEST(Join, CatOfEmptyTensors) {
  const Tensor x = sample({2, 3});
  Tensor none = empty({0}, {.dtype = f64, .requires_grad = true});
  const Tensor joined = cat({none, x, none}, 1);
  EXPECT_EQ(joined.to_vector<double>(), x.to_vector<double>());
  sum(joined).backward();
  EXPECT_EQ(none.grad().sizes(), Shape({0}));
  EXPECT_EQ(cat({none, none}).sizes(), Shape({0}));
  EXPECT_EQ(cat({zeros({2, 0}), zeros({2, 3})}, 1).sizes(), Shape({2, 3}));
  EXPECT_EQ(cat({zeros({0, 3}), zeros({0, 3})}, 0).sizes(), Shape({0, 3}));
}

TEST(Join, WrongShapes) {
  EXPECT_EQ(error_of<ShapeError>([] {
              cat({zeros({2, 3}), zeros({3, 3})}, 1);
            }),
            "cat: expected sizes like [2, 3] but in dimension 1, got [3, 3] for tensor 1");
  EXPECT_THROW(cat({zeros({2, 3}), zeros({2})}, 1), ShapeError);
  EXPECT_THROW(cat({zeros({})}), ShapeError);
  EXPECT_THROW(cat(std::vector<Tensor>{}), Error);
  EXPECT_THROW(cat({Tensor(), zeros({1})}), Error);
  EXPECT_THROW(cat({zeros({1})}, 1), ShapeError);
  EXPECT_THROW(cat({zeros({1}), zeros({1}, {.dtype = f8e4m3})}), DTypeError);
  EXPECT_EQ(error_of<ShapeError>([] {
              stack({zeros({2}), zeros({3})});
            }),
            "stack: expected tensors of one shape, got [2] and [3]");
  EXPECT_EQ(error_of<ShapeError>([] {
              split(zeros({5}), std::vector<std::int64_t>{2, 2});
            }),
            "split: expected sizes that add up to 5 (dimension 0 of [5]), got [2, 2]");
  EXPECT_THROW(split(zeros({5}), std::vector<std::int64_t>{INT64_MAX, 2}), ShapeError);
  EXPECT_THROW(split(zeros({5}), 0), ShapeError);
  EXPECT_THROW(chunk(zeros({5}), 0), ShapeError);
  EXPECT_THROW(unbind(zeros({})), ShapeError);
  EXPECT_THROW(repeat(zeros({2, 2}), {2}), ShapeError);
  EXPECT_THROW(flip(zeros({2, 2}), {0, -2}), ShapeError);
  EXPECT_THROW(roll(zeros({2, 2}), {1, 2}, {0}), ShapeError);
}

TEST(Join, SplitsAreViews) {
  Tensor x = sample({7, 2});
  const auto parts = split(x, 3);
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts[2].sizes(), Shape({1, 2}));
  parts[1].slice(0, 0, 1).fill_(9);
  EXPECT_EQ(x[3].to_vector<double>(), (Values{9, 9}));
  EXPECT_EQ(split(zeros({0, 2}), 3).size(), 1u);
  EXPECT_EQ(split(zeros({4}), INT64_MAX).size(), 1u);
  EXPECT_EQ(chunk(zeros({0, 2}), 3).size(), 3u);
  EXPECT_EQ(unbind(zeros({0, 2})).size(), 0u);
}

TEST(Join, RepeatAndTile) {
  const Tensor x = tensor({1, 2, 3}, {3});
  EXPECT_EQ(repeat(x, {2}).to_vector<double>(), (Values{1, 2, 3, 1, 2, 3}));
  EXPECT_EQ(repeat(x, {2, 2}).sizes(), Shape({2, 6}));
  EXPECT_EQ(repeat(x, {0, 2}).sizes(), Shape({0, 6}));
  EXPECT_EQ(tile(tensor({1, 2, 3, 4}, {2, 2}), {2}).to_vector<double>(), (Values{1, 2, 1, 2, 3, 4, 3, 4}));
  EXPECT_EQ(repeat_interleave(x, 2, 0).to_vector<double>(), (Values{1, 1, 2, 2, 3, 3}));
  Tensor once = repeat(x, {1});
  once.fill_(0);
  EXPECT_EQ(x.to_vector<double>(), (Values{1, 2, 3}));
  const Tensor deep = zeros({1, 1, 1, 1, 1, 1, 1, 2});
  EXPECT_EQ(repeat(deep, {2, 1, 1, 1, 1, 1, 1, 3}).sizes(), Shape({2, 1, 1, 1, 1, 1, 1, 6}));
  EXPECT_EQ(repeat(deep, {1, 1, 1, 1, 1, 1, 1, 0}).numel(), 0);
}

TEST(Join, RollAndFlip) {
  const Tensor x = tensor({1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_EQ(roll(x, {1}).to_vector<double>(), (Values{6, 1, 2, 3, 4, 5}));
  EXPECT_EQ(roll(x, {-4, 3}, {1, 0}).to_vector<double>(), (Values{5, 6, 4, 2, 3, 1}));
  EXPECT_EQ(roll(zeros({0, 3}), {1}, {0}).sizes(), Shape({0, 3}));
  for (const DType d : {f64, f32, f16, bf16, f8e4m3, i64, i32, i8, u8}) {
    EXPECT_EQ(flip(x.to(d), {0, 1}).to_vector<double>(), (Values{6, 5, 4, 3, 2, 1})) << name(d);
    EXPECT_EQ(flip(x.to(d).transpose(0, 1), {0}).to_vector<double>(), (Values{3, 6, 2, 5, 1, 4})) << name(d);
  }
  EXPECT_EQ(flip(zeros({0, 3}), {0, 1}).sizes(), Shape({0, 3}));
  EXPECT_EQ(flip(tensor({1, 2}).reshape({1, 2}).expand({2, 2}), {1}).to_vector<double>(), (Values{2, 1, 2, 1}));
  EXPECT_EQ(flip(scalar_tensor(3), {}).item<double>(), 3);
}

TEST(Join, Gradients) {
  const std::vector<Tensor> xs{sample({2, 3}), sample({3, 2}, 2).transpose(0, 1)};
  check_gradients([](const auto& x) { return cat({x[0] * x[1], x[1], x[0]}, 1); }, xs);
  check_gradients([](const auto& x) { return stack({x[0] * x[1], x[1]}, 1); }, xs);
  check_gradients([](const auto& x) { return split(x[0] * x[1], 2, 1); }, xs);
  check_gradients([](const auto& x) { return unbind(x[0] * x[1], 1); }, xs);
  check_gradients([](const auto& x) { return repeat(x[0] * x[1], {2, 1, 2}); }, xs);
  check_gradients([](const auto& x) { return repeat_interleave(x[0] * x[1], 2, 0); }, xs);
  check_gradients([](const auto& x) { return roll(x[0] * x[1], {1, 1}, {0, 1}); }, xs);
  check_gradients([](const auto& x) { return flip(x[0] * x[1], {1}); }, xs);
  check_gradients(
      [](const auto& x) {
        return cat({x[0] * x[0], x[1]}, 0);
      },
      {zeros({0, 2}, {.dtype = f64}), sample({2, 2})});
}

}  // namespace
}  // namespace halfstep
