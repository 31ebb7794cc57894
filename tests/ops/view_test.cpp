// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/view.h"

#include "halfstep/ops/activation.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/random.h"
#include "tests/ops/index_checks.h"

namespace halfstep {
namespace {

using namespace test;

TEST(View, Goldens) {
  check_goldens("reshape",
                [](const auto& e, const auto& x) { return std::vector{reshape(x[0], e.integers("shape"))}; });
  check_goldens("permute", [](const auto& e, const auto& x) { return std::vector{permute(x[0], e.integers("dims"))}; });
  check_goldens("squeeze", [](const auto& e, const auto& x) { return std::vector{squeeze(x[0], e.integer("dim"))}; });
  check_goldens("unsqueeze",
                [](const auto& e, const auto& x) { return std::vector{unsqueeze(x[0], e.integer("dim"))}; });
  check_goldens("expand", [](const auto& e, const auto& x) { return std::vector{expand(x[0], e.integers("shape"))}; });
  check_goldens("narrow", [](const auto& e, const auto& x) {
    return std::vector{narrow(x[0], e.integer("dim"), e.integer("start"), e.integer("length"))};
  });
  check_goldens("select", [](const auto& e, const auto& x) {
    return std::vector{select(x[0], e.integer("dim"), e.integer("index"))};
  });
  check_goldens("slice", [](const auto& e, const auto& x) {
    return std::vector{x[0].slice(e.integer("dim"), e.integer("start"), e.integer("end"), e.integer("step"))};
  });
}

TEST(View, ReshapeIsAViewWherePossible) {
  const Tensor x = sample({2, 3, 4});
  EXPECT_EQ(x.view({6, -1}).storage(), x.storage());
  EXPECT_EQ(x.view({2, 1, 12}).to_vector<double>(), x.to_vector<double>());
  const Tensor t = x.transpose(0, 1);
  EXPECT_EQ(t.view({3, 2, 2, 2}).to_vector<double>(), t.to_vector<double>()) << "splitting needs no copy";
  EXPECT_THROW(t.view({6, 4}), ShapeError);
  EXPECT_NE(t.reshape({6, 4}).storage(), x.storage());
  EXPECT_EQ(t.reshape({6, 4}).to_vector<double>(), t.to_vector<double>());
  // Joined where they lie behind each other, in every stride pattern of a slice.
  const Tensor s = sample({4, 6}).slice(1, 0, 6, 2);
  EXPECT_EQ(s.view({12}).to_vector<double>(), s.to_vector<double>()) << "an even slice has one step";
  EXPECT_THROW(sample({4, 6}).slice(1, 0, 4).view({16}), ShapeError);
  const Tensor e = sample({1, 3}).expand({4, 3});
  EXPECT_EQ(e.view({2, 2, 3}).to_vector<double>(), e.to_vector<double>());
  EXPECT_EQ(e.reshape({12}).to_vector<double>(), e.to_vector<double>());
  EXPECT_EQ(x.reshape({24}).reshape({1, 24, 1}).sizes(), Shape({1, 24, 1}));
  EXPECT_EQ(scalar_tensor(3).reshape({1, 1}).sizes(), Shape({1, 1}));
  EXPECT_EQ(tensor({3}).view({}).item<double>(), 3);
}

TEST(View, SizesOfZeroAndMinusOne) {
  const Tensor none = zeros({2, 0, 3});
  EXPECT_EQ(none.reshape({0}).sizes(), Shape({0}));
  EXPECT_EQ(none.view({3, 0}).sizes(), Shape({3, 0}));
  EXPECT_EQ(none.view({3, -1}).sizes(), Shape({3, 0}));
  EXPECT_THROW(none.view({0, -1}), ShapeError) << "any size would do";
  EXPECT_THROW(none.view({1}), ShapeError);
  const Tensor x = zeros({2, 3});
  EXPECT_EQ(error_of<ShapeError>([&] {
              x.view({4, 2});
            }),
            "view: expected a shape of 6 elements for [2, 3], got [4, 2]");
  EXPECT_THROW(x.view({-1, -1}), ShapeError);
  EXPECT_THROW(x.view({4, -1}), ShapeError);
  EXPECT_THROW(x.view({-2, -3}), ShapeError);
  EXPECT_THROW(x.view({INT64_MAX, 2}), ShapeError);
  EXPECT_THROW(x.view({1, 1, 1, 1, 1, 1, 1, 2, 3}), ShapeError) << "nine dimensions";
  EXPECT_THROW(Tensor().view({1}), Error);
}

TEST(View, ExpandAndBroadcast) {
  const Tensor x = tensor({1, 2}, {2, 1});
  EXPECT_EQ(x.expand({3, -1, 2}).to_vector<double>(), (Values{1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2}));
  EXPECT_EQ(x.expand({2, 0}).sizes(), Shape({2, 0}));
  EXPECT_EQ(expand_as(x, zeros({2, 3})).stride(1), 0);
  EXPECT_EQ(broadcast_to(x, {4, 2, 1}).sizes(), Shape({4, 2, 1}));
  EXPECT_THROW(x.expand({3, 1}), ShapeError);
  EXPECT_THROW(x.expand({2}), ShapeError);
  EXPECT_THROW(x.expand({-1, 2, 1}), ShapeError) << "a new dimension has no size to keep";
  const std::vector<Tensor> pair{x, tensor({5, 6, 7})};
  const auto both = broadcast_tensors(pair);
  EXPECT_EQ(both[1].to_vector<double>(), (Values{5, 6, 7, 5, 6, 7}));
  const std::vector<Tensor> axes{arange(0, 2), arange(0, 3)};
  EXPECT_EQ(meshgrid(axes)[0].to_vector<double>(), (Values{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(meshgrid(axes)[1].to_vector<double>(), (Values{0, 1, 2, 0, 1, 2}));
}

TEST(View, PermuteMovedimAndSwapaxes) {
  const Tensor x = sample({2, 3, 4});
  EXPECT_EQ(permute(x, {-1, 0, 1}).sizes(), Shape({4, 2, 3}));
  EXPECT_EQ(movedim(x, {0}, {-1}).sizes(), Shape({3, 4, 2}));
  EXPECT_EQ(movedim(x, {0, 1}, {1, 2}).sizes(), Shape({4, 2, 3}));
  EXPECT_EQ(movedim(x, {2}, {0}).to_vector<double>(), x.permute({2, 0, 1}).to_vector<double>());
  EXPECT_EQ(swapaxes(x, 0, 2).sizes(), Shape({4, 3, 2}));
  EXPECT_EQ(sample({2, 3}).t().sizes(), Shape({3, 2}));
  EXPECT_EQ(scalar_tensor(1).t().dim(), 0);
  EXPECT_THROW(x.permute({0, 1}), ShapeError);
  EXPECT_THROW(x.permute({0, 1, 1}), ShapeError);
  EXPECT_THROW(x.permute({0, 1, 3}), ShapeError);
  EXPECT_THROW(x.t(), ShapeError);
  EXPECT_THROW(x.transpose(0, 3), ShapeError);
  EXPECT_THROW(movedim(x, {0, 1}, {0}), ShapeError);
  EXPECT_THROW(movedim(x, {0, 0}, {0, 1}), ShapeError);
}

TEST(View, SqueezeFlattenUnflatten) {
  const Tensor x = zeros({1, 2, 1, 3});
  EXPECT_EQ(squeeze(x).sizes(), Shape({2, 3}));
  EXPECT_EQ(squeeze(x, -2).sizes(), Shape({1, 2, 3}));
  EXPECT_EQ(squeeze(x, 1).sizes(), x.sizes()) << "other sizes than 1 stay";
  EXPECT_EQ(unsqueeze(x, 4).sizes(), Shape({1, 2, 1, 3, 1}));
  EXPECT_EQ(unsqueeze(x, -5).sizes(), Shape({1, 1, 2, 1, 3}));
  EXPECT_THROW(unsqueeze(x, 5), ShapeError);
  EXPECT_EQ(flatten(x, 1).sizes(), Shape({1, 6}));
  EXPECT_EQ(flatten(scalar_tensor(1)).sizes(), Shape({1}));
  EXPECT_EQ(flatten(zeros({2, 0, 3}), 1).sizes(), Shape({2, 0}));
  EXPECT_THROW(flatten(x, 2, 1), ShapeError);
  EXPECT_EQ(unflatten(zeros({2, 12}), 1, {3, -1}).sizes(), Shape({2, 3, 4}));
  EXPECT_EQ(view_as(zeros({2, 3}), zeros({6})).sizes(), Shape({6}));
  EXPECT_EQ(error_of<ShapeError>([] {
              unflatten(zeros({2, 12}), 1, {5, -1});
            }),
            "unflatten: expected sizes of 12 elements for dimension 1 of [2, 12], got [5, -1]");
}

TEST(View, SliceSelectNarrow) {
  const Tensor x = arange(0, 10);
  EXPECT_EQ(x.slice(0, -3).to_vector<double>(), (Values{7, 8, 9}));
  EXPECT_EQ(x.slice(0, 1, -1, 4).to_vector<double>(), (Values{1, 5}));
  EXPECT_EQ(x.slice(0, 8, 3).numel(), 0);
  EXPECT_EQ(x.slice(0, 20).numel(), 0);
  EXPECT_EQ(x.slice(0, INT64_MIN, INT64_MAX).numel(), 10);
  EXPECT_EQ(x.slice(0, 0, 10, INT64_MAX).numel(), 1);
  EXPECT_EQ(x[-1].item<int>(), 9);
  EXPECT_EQ(x.narrow(0, -4, 2).to_vector<double>(), (Values{6, 7}));
  EXPECT_EQ(x.narrow(0, 10, 0).numel(), 0);
  EXPECT_THROW(x.slice(0, 0, 10, 0), ShapeError);
  EXPECT_EQ(error_of<ShapeError>([&] { x[10]; }),
            "select: expected an index from -10 to 9 along dimension 0 of [10], got 10");
  EXPECT_THROW(x.narrow(0, 8, 3), ShapeError);
  EXPECT_THROW(x.narrow(0, 8, INT64_MAX), ShapeError);
  EXPECT_THROW(scalar_tensor(1).slice(0, 0), ShapeError);
  EXPECT_THROW(scalar_tensor(1)[0], ShapeError);
}

TEST(View, AsStrided) {
  const Tensor x = arange(0, 12).view({3, 4});
  EXPECT_EQ(as_strided(x, {2, 2}, {1, 4}, 1).to_vector<double>(), (Values{1, 5, 2, 6}));
  EXPECT_EQ(as_strided(x, {3, 3}, {1, 1}, 0).to_vector<double>(), (Values{0, 1, 2, 1, 2, 3, 2, 3, 4}));
  EXPECT_EQ(as_strided(x, {0}, {1}, 0).numel(), 0);
  EXPECT_THROW(as_strided(x, {2, 7}, {1, 2}, 0), ShapeError);
  EXPECT_THROW(as_strided(x, {1}, {1}, -1), ShapeError);
  EXPECT_THROW(as_strided(x, {INT64_MAX}, {INT64_MAX}, 0), ShapeError);
  EXPECT_THROW(as_strided(x, {1, 2}, {1}, 0), ShapeError);
}

// Images of one channel or place lie the same in every layout; their strides say which one is meant, and convolutions,
// elementwise ops and conversions follow that.
TEST(View, ChannelsLastOfOneChannel) {
  for (const Shape& sizes : {Shape{3, 1, 5, 6}, Shape{3, 4, 1, 1}, Shape{1, 1, 2, 1}}) {
    const Tensor x = rand(sizes).requires_grad_(), y = to_channels_last(x);
    EXPECT_EQ(y.strides(), channels_last_strides(sizes));
    EXPECT_EQ(y.raw_data(), x.raw_data());
    EXPECT_EQ(y.to_vector<float>(), x.to_vector<float>());
    EXPECT_TRUE(to_channels_last(y).is_same(y));
    EXPECT_EQ(y.to(bf16).strides(), y.strides());
    EXPECT_EQ(relu(y).strides(), y.strides());
    const Tensor w = rand({8, sizes[1], 1, 1}), z = conv2d(y, w);
    EXPECT_EQ(z.strides(), channels_last_strides(z.sizes()));
    EXPECT_EQ(conv2d(x, w).strides(), contiguous_strides(z.sizes()));
    sum(y * y).backward();
    EXPECT_EQ(x.grad().to_vector<float>(), (x.detach() * 2).to_vector<float>());
  }
}

TEST(View, ChannelsLast) {
  const Tensor x = sample({2, 3, 4, 5}), y = to_channels_last(x);
  EXPECT_TRUE(is_channels_last(y));
  EXPECT_FALSE(is_channels_last(x));
  EXPECT_EQ(y.strides(), Shape({60, 1, 15, 3}));
  EXPECT_EQ(y.to_vector<double>(), x.to_vector<double>());
  EXPECT_TRUE(to_channels_last(y).is_same(y));
  EXPECT_TRUE(is_channels_last(y * y)) << "elementwise ops keep the layout";
  EXPECT_TRUE(is_channels_last(y.clone()));
  EXPECT_EQ(y.contiguous().strides(), x.strides());
  EXPECT_EQ(y.permute({0, 2, 3, 1}).storage(), y.storage());
  EXPECT_TRUE(y.permute({0, 2, 3, 1}).is_contiguous());
  EXPECT_THROW(to_channels_last(zeros({2, 3})), ShapeError);
}

TEST(View, WritesReachTheBase) {
  Tensor x = zeros({2, 3});
  const auto version = x.version();
  x.transpose(0, 1).slice(0, 1, 3).fill_(2);
  EXPECT_EQ(x.to_vector<double>(), (Values{0, 2, 2, 0, 2, 2}));
  EXPECT_GT(x.version(), version);
}

// Slices that are whole runs of memory, of every size and place of a run, and such that are not.
TEST(View, SliceBackwardPutsGradientsBack) {
  const Shape sizes({3, 24, 4});
  for (const DType dtype : {f32, bf16, i64, u8}) {
    for (std::int64_t dim = 0; dim < 3; ++dim) {
      for (std::int64_t start = 0; start < sizes[dim]; start += 1 + start) {
        for (const std::int64_t step : {1, 2}) {
          const std::int64_t length = (sizes[dim] - start + step - 1) / step;
          Shape part = sizes;
          part[dim] = length;
          Values values;
          for (std::int64_t i = 0; i < part.numel(); ++i) values.push_back(static_cast<double>(1 + i % 100));
          Values expected(static_cast<std::size_t>(sizes.numel()));
          for (std::int64_t i = 0; i < part.numel(); ++i) {
            std::int64_t at[3] = {i / (part[1] * part[2]), i / part[2] % part[1], i % part[2]};
            at[dim] = start + at[dim] * step;
            expected[static_cast<std::size_t>((at[0] * 24 + at[1]) * 4 + at[2])] = values[static_cast<std::size_t>(i)];
          }
          const Tensor g = tensor(values, part, {.dtype = dtype});
          const std::int64_t end = sizes[dim];
          EXPECT_EQ(slice_backward(g, sizes, dim, start, end, step).to_vector<double>(), expected)
              << name(dtype) << ' ' << dim << ' ' << start << ' ' << step;
          const Tensor turned = g.permute({2, 0, 1}).contiguous().permute({1, 2, 0});
          EXPECT_EQ(slice_backward(turned, sizes, dim, start, end, step).to_vector<double>(), expected)
              << name(dtype) << ' ' << dim << ' ' << start << ' ' << step << ", turned";
        }
      }
    }
  }
}

TEST(View, Gradients) {
  const Tensor x = sample({2, 3, 4}).permute({2, 0, 1}), flat = sample({12});
  check_gradients([](const auto& v) { return reshape(v[0] * v[0], {6, 4}); }, {x});
  check_gradients([](const auto& v) { return reshape(v[0], {3, -1}) * 2; }, {x});
  check_gradients([](const auto& v) { return permute(v[0] * v[0], {1, 2, 0}); }, {x});
  check_gradients([](const auto& v) { return expand(unsqueeze(v[0] * v[0], 0), {3, 4, 2, 3}); }, {x});
  check_gradients([](const auto& v) { return squeeze((v[0] * v[0]).slice(1, 1, 2), 1); }, {x});
  check_gradients([](const auto& v) { return (v[0] * v[0]).slice(0, 1, 4, 2); }, {x});
  check_gradients([](const auto& v) { return select(v[0] * v[0], 1, -1); }, {x});
  check_gradients([](const auto& v) { return narrow(v[0] * v[0], 2, 1, 2); }, {x});
  check_gradients([](const auto& v) { return movedim(v[0] * v[0], {0}, {2}); }, {x});
  check_gradients([](const auto& v) { return to_channels_last(v[0] * v[0]); }, {sample({2, 2, 1, 2})});
  check_gradients([](const auto& v) { return as_strided(v[0] * v[0], {2, 3}, {1, 4}, 2); }, {flat});
  check_gradients([](const auto& v) { return as_strided(v[0] * v[0], {4, 3}, {2, 1}, 1); }, {flat});
  check_gradients([](const auto& v) { return as_strided(v[0] * v[0], {2, 3}, {0, 1}, 0); }, {flat});
  check_gradients(
      [](const auto& v) {
        return as_strided((v[0] * v[0]).view({3, 4}).transpose(0, 1), {3}, {4}, 1);
      },
      {flat});
}

}  // namespace
}  // namespace halfstep
