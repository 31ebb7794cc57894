// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/index.h"

#include "halfstep/ops/join.h"
#include "halfstep/runtime/parallel.h"
#include "halfstep/runtime/queue.h"
#include "tests/ops/index_checks.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using namespace test;

Tensor mask(const Values& values, const Shape& sizes) { return tensor(values, sizes, {.dtype = boolean}); }

TEST(Index, Goldens) {
  check_goldens("gather",
                [](const auto& e, const auto& x) { return std::vector{gather(x[0], e.integer("dim"), x[1])}; });
  check_goldens("scatter",
                [](const auto& e, const auto& x) { return std::vector{scatter(x[0], e.integer("dim"), x[1], x[2])}; });
  check_goldens("scatter_add", [](const auto& e, const auto& x) {
    return std::vector{scatter_add(x[0], e.integer("dim"), x[1], x[2])};
  });
  check_goldens("index_select",
                [](const auto& e, const auto& x) { return std::vector{index_select(x[0], e.integer("dim"), x[1])}; });
  check_goldens("index_add", [](const auto& e, const auto& x) {
    return std::vector{index_add(x[0], e.integer("dim"), x[1], x[2], e.real("alpha", 1))};
  });
  check_goldens("index_put", [](const auto& e, const auto& x) {
    return std::vector{index_put(x[0], {x[1]}, x[2], e.flag("accumulate"))};
  });
  check_goldens("embedding", [](const auto& e, const auto& x) {
    EmbeddingFuncOptions options;
    if (e.has("padding_idx")) options.padding_idx = e.integer("padding_idx");
    return std::vector{embedding(x[1], x[0], options)};
  });
  check_goldens("one_hot",
                [](const auto& e, const auto& x) { return std::vector{one_hot(x[0], e.integer("num_classes"))}; });
}

TEST(Index, PolicyGoldens) {
  // PyTorch refuses the 16-bit type that is not the region's; here it widens to f32 with the others.
  const auto widened = [](const GoldenEntry& e, const Tensor& result) {
    if (!e.flag("throws", false)) return std::vector{result};
    EXPECT_EQ(result.dtype(), f32) << e.name;
    throw Error("as the golden wants it");
  };
  check_policy_goldens("scatter_add", [&](const auto& e, const auto& x) {
    return widened(e, scatter_add(x[0], e.integer("dim"), x[1], x[2]));
  });
  check_policy_goldens("index_put", [&](const auto& e, const auto& x) {
    return widened(e, index_put(x[0], {x[1]}, x[2], e.flag("accumulate")));
  });
}

TEST(Index, GatherAndScatterOfEveryDtype) {
  const Tensor at = ints({2, 0, 1, 1}, {2, 2});
  for (const DType d : {f64, f32, f16, bf16, f8e4m3, i64, i32, i8, u8}) {
    const Tensor x = tensor({1, 2, 3, 4, 5, 6}, {2, 3}, {.dtype = d});
    EXPECT_EQ(gather(x, 1, at).to_vector<double>(), (Values{3, 1, 5, 5})) << name(d);
    EXPECT_EQ(scatter(x, 1, at, Scalar(7)).to_vector<double>(), (Values{7, 2, 7, 4, 7, 6})) << name(d);
    EXPECT_EQ(scatter(x, 1, at, tensor({7, 6, 5, 4}, {2, 2}, {.dtype = d})).to_vector<double>(),
              (Values{6, 2, 7, 4, 4, 6}))
        << name(d);
    if (is_float8(d)) {
      EXPECT_THROW(scatter_add(x, 1, at, x), DTypeError);
      continue;
    }
    EXPECT_EQ(scatter_add(x, 1, at, x).to_vector<double>(), (Values{3, 2, 4, 4, 14, 6})) << name(d);
    EXPECT_EQ(index_add(x, 1, ints({2, 2}), x.slice(1, 0, 2), 2).to_vector<double>(), (Values{1, 2, 9, 4, 5, 24}))
        << name(d);
  }
}

TEST(Index, ScatteredIntegersKeepAllTheirDigits) {
  const std::int64_t value = (std::int64_t{1} << 60) + 1;  // no float has them
  const Tensor index = zeros({1}, {.dtype = i64});
  const Tensor x = scatter(zeros({2}, {.dtype = i64}), 0, index, Scalar(value));
  EXPECT_EQ(x.to_vector<std::int64_t>(), (std::vector<std::int64_t>{value, 0}));
}

TEST(Index, AddedRowsOfEveryWidth) {
  // Small integers: sums are exact in any order.
  for (const DType d : {f32, f64, bf16, f16, i64, i32}) {
    for (const std::int64_t width : {1, 2, 3, 4, 5, 7, 8, 19}) {
      Values source(static_cast<std::size_t>(4 * width)), expected(static_cast<std::size_t>(3 * width), 1);
      const std::int64_t rows[] = {2, 0, 2, 1};
      for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<double>(i % 9);
      for (std::size_t i = 0; i < source.size(); ++i) {
        const auto w = static_cast<std::size_t>(width);
        expected[static_cast<std::size_t>(rows[i / w]) * w + i % w] += 2 * source[i];
      }
      const Tensor x = ones({3, width}, {.dtype = d});
      EXPECT_EQ(index_add(x, 0, ints({2, 0, 2, 1}), tensor(source, {4, width}, {.dtype = d}), 2).to_vector<double>(),
                expected)
          << name(d) << " " << width;
    }
  }
}

TEST(Index, LayoutsAndZeroDimensions) {
  const Tensor x = sample({4, 3}), t = x.transpose(0, 1);
  const Tensor at = ints({0, 3, 3, 1, 2, 0}, {2, 3}).transpose(0, 1);
  EXPECT_EQ(gather(t, 1, at).to_vector<double>(), gather(t.contiguous(), 1, at.contiguous()).to_vector<double>());
  EXPECT_EQ(scatter_add(t, 1, at, t).to_vector<double>(),
            scatter_add(t.contiguous(), 1, at.contiguous(), t.contiguous()).to_vector<double>());
  EXPECT_EQ(index_select(t, 0, ints({2, 2, 0})).to_vector<double>(), cat({t[2], t[2], t[0]}).to_vector<double>());
  EXPECT_EQ(index_select(t, 1, ints({2})).to_vector<double>(), x[2].to_vector<double>());
  const Tensor deep = sample({2, 3, 4}).permute({2, 0, 1});
  EXPECT_EQ(index_select(deep, 0, ints({1, 3})).to_vector<double>(),
            index_select(deep.contiguous(), 0, ints({1, 3})).to_vector<double>());
  EXPECT_EQ(index_add(deep, 0, ints({1, 1}), deep.slice(0, 2, 4)).to_vector<double>(),
            index_add(deep.contiguous(), 0, ints({1, 1}), deep.slice(0, 2, 4).contiguous()).to_vector<double>());
  // An i32 index, and one that is a single column.
  EXPECT_EQ(index_select(x, 0, ints({1, 0}).to(i32)).to_vector<double>(),
            index_select(x, 0, ints({1, 0})).to_vector<double>());
  EXPECT_EQ(index_select(x, 0, ints({3, 9, 1, 9}, {2, 2}).select(1, 0)).to_vector<double>(),
            cat({x[3], x[1]}).to_vector<double>());
  EXPECT_EQ(gather(scalar_tensor(5), 0, ints({0}, {})).item<double>(), 5);
  EXPECT_EQ(gather(scalar_tensor(5), 0, ints({0, 0, 0})).to_vector<double>(), (Values{5, 5, 5}));
  EXPECT_EQ(index_select(scalar_tensor(5), 0, ints({0})).item<double>(), 5);
  EXPECT_EQ(index_add(scalar_tensor(5), 0, ints({0}), scalar_tensor(2)).item<double>(), 7);
  EXPECT_EQ(gather(x, 0, empty({0, 3}, {.dtype = i64})).sizes(), Shape({0, 3}));
  EXPECT_EQ(scatter_add(x, 0, empty({0}, {.dtype = i64}), x).to_vector<double>(), x.to_vector<double>());
  EXPECT_EQ(index_select(zeros({0, 3}), 1, ints({0, 2})).sizes(), Shape({0, 2}));
  EXPECT_EQ(index_select(x, 0, empty({0}, {.dtype = i64})).sizes(), Shape({0, 3}));
  EXPECT_EQ(embedding(empty({2, 0}, {.dtype = i64}), x).sizes(), Shape({2, 0, 3}));
  EXPECT_EQ(embedding(ints({2, 0}), t).to_vector<double>(), cat({t[2], t[0]}).to_vector<double>());
}

// A GPU finds out about a wrong index when it comes to it, and says so when it is waited for.
bool looks_later() { return default_device().str().starts_with("cuda"); }

// `text`: where the indices are looked at during the call. `later`: a part of what is said otherwise.
void expect_wrong_index(const std::function<void()>& f, const std::string& text, const std::string& later) {
  const std::string said = error_of<Error>([&] {
    f();
    synchronize(default_device());
  });
  if (looks_later()) {
    EXPECT_NE(said.find(later), std::string::npos) << said;
  } else {
    EXPECT_EQ(said, text);
  }
}
void expect_wrong_index(const std::function<void()>& f) {
  EXPECT_THROW(
      {
        f();
        synchronize(default_device());
      },
      Error);
}

TEST(Index, WrongIndicesAreNamed) {
  const Tensor x = zeros({2, 5});
  expect_wrong_index(
      [&] {
        index_select(x, 1, ints({0, 4, 7}));
      },
      "index_select: index 7 at [2] lies outside dimension 1 of size 5 (0 to 4), got (f32 [2, 5], i64 [3])",
      "index 7 lies outside of its dimension (0 to 4)");
  expect_wrong_index(
      [&] {
        gather(x, -1, ints({0, 1, 2, -1}, {2, 2}));
      },
      "gather: index -1 at [1, 1] lies outside dimension 1 of size 5 (0 to 4), got (f32 [2, 5], i64 [2, 2])",
      "index -1 lies outside of its dimension (0 to 4)");
  expect_wrong_index(
      [&] {
        index(x, {ints({0, -3})});
      },
      "index: index -3 at [1] lies outside dimension 0 of size 2 (-2 to 1), got (f32 [2, 5], i64 [2])",
      "index -3 lies outside of its dimension (-2 to 1)");
  expect_wrong_index([&] { index_select(zeros({0}), 0, ints({0})); },
                     "index_select: index 0 at [0] lies outside dimension 0 of size 0, which has no elements, got (f32 "
                     "[0], i64 [1])",
                     "index 0 lies outside of a dimension that has no elements");
  Tensor y = ones({2, 5});
  expect_wrong_index([&] { scatter_(y, 1, ints({9, 9}, {1, 2}), Scalar(3)); });
  expect_wrong_index([&] { scatter_(y, 1, ints({9, 9}, {1, 2}), y + 1); });
  expect_wrong_index([&] { scatter_add_(y, 1, ints({9, 9}, {1, 2}), y); });
  expect_wrong_index([&] { index_add_(y, 0, ints({2, 2}), y); });
  expect_wrong_index([&] { index_put_(y, {ints({2, 2})}, scalar_tensor(3)); });
  EXPECT_EQ(y.to_vector<double>(), Values(10, 1)) << "nothing is written by a wrong index";
  if (!looks_later()) {
    EXPECT_THROW(scatter_(y, 1, ints({0, 9}, {1, 2}), Scalar(3)), Error);
    EXPECT_THROW(scatter_(y, 1, ints({0, 9}, {1, 2}), y + 1), Error);
    EXPECT_THROW(scatter_add_(y, 1, ints({0, 9}, {1, 2}), y), Error);
    EXPECT_THROW(index_add_(y, 0, ints({1, 2}), y), Error);
    EXPECT_THROW(index_put_(y, {ints({0, 2})}, scalar_tensor(3)), Error);
    EXPECT_EQ(y.to_vector<double>(), Values(10, 1)) << "a refused write leaves the tensor alone";
  }
  expect_wrong_index([&] { embedding(ints({5}), zeros({5, 2})); });
  expect_wrong_index([&] { embedding(ints({-1}), zeros({5, 2})); });
  expect_wrong_index([&] { one_hot(ints({4}), 4); });
}

TEST(Index, WrongShapesAndDtypes) {
  const Tensor x = zeros({2, 5});
  EXPECT_EQ(error_of<ShapeError>([&] {
              gather(x, 1, ints({0, 0, 0}, {3, 1}));
            }),
            "gather: expected an index no larger than the input [2, 5] except along dimension 1, got [3, 1]");
  EXPECT_THROW(gather(x, 1, ints({0})), ShapeError);
  EXPECT_THROW(gather(x, 2, ints({0}, {1, 1})), ShapeError);
  EXPECT_EQ(error_of<DTypeError>([&] { gather(x, 1, zeros({1, 1})); }), "gather: expected i64 or i32 indices, got f32");
  EXPECT_THROW(scatter(x, 1, ints({0, 0}, {1, 2}), zeros({1, 1})), ShapeError);
  EXPECT_THROW(index_select(x, 0, ints({0}, {1, 1})), ShapeError);
  EXPECT_EQ(error_of<ShapeError>([&] { index_add(x, 0, ints({0}), x); }),
            "index_add: expected a source [1, 5] for 1 indices into dimension 0 of [2, 5], got [2, 5]");
  EXPECT_THROW(index_add(ints({1}), 0, ints({0}), ints({1}), 0.5), DTypeError);
  EXPECT_THROW(embedding(ints({0}), zeros({3})), ShapeError);
  EXPECT_THROW(embedding(ints({0}), zeros({3, 2}), {.padding_idx = 3}), Error);
  EXPECT_THROW(index(x, {}), Error);
  EXPECT_THROW(index(x, {ints({0}), ints({0}), ints({0})}), ShapeError);
  EXPECT_THROW(index(x, {ints({0, 1}), ints({0, 1, 2})}), ShapeError);
  EXPECT_THROW(index(x, {mask({1, 0, 1}, {3})}), ShapeError);
  EXPECT_THROW(index_put(x, {ints({0, 1})}, zeros({3})), ShapeError);
  EXPECT_THROW(masked_select(x, zeros({2, 5})), DTypeError);
  EXPECT_THROW(gather(Tensor(), 0, ints({0})), Error);
  EXPECT_THROW(gather(x, 0, Tensor()), Error);
  EXPECT_THROW(one_hot(ints({0}), 0), Error);
}

TEST(Index, MixedDtypesArePromoted) {
  const Tensor half = ones({3}, {.dtype = f16}), single = full({3}, 0.25);
  EXPECT_EQ(scatter_add(half, 0, ints({0, 0, 2}), single).dtype(), f32);
  EXPECT_EQ(index_add(half, 0, ints({0, 0, 2}), single).to_vector<double>(), (Values{1.5, 1, 1.25}));
  EXPECT_EQ(index_put(half, {ints({1})}, scalar_tensor(0.5)).dtype(), f16) << "a 0-d value doesn't widen";
  Tensor kept = half.clone();
  scatter_add_(kept, 0, ints({0, 0, 2}), single);
  EXPECT_EQ(kept.dtype(), f16);
  EXPECT_EQ(kept.to_vector<double>(), (Values{1.5, 1, 1.25}));
}

TEST(Index, SumsOf16BitsAreTakenInFloat32) {
  // 2048 + 1 is lost in f16 each time; in float32, 4096 ones arrive.
  const std::int64_t n = 4096;
  const Tensor values = ones({n}, {.dtype = f16}), at = zeros({n}, {.dtype = i64});
  const Tensor start = full({1}, 2048, {.dtype = f16});
  EXPECT_EQ(scatter_add(start, 0, at, values).item<double>(), 6144);
  EXPECT_EQ(index_add(start, 0, at, values).item<double>(), 6144);
  EXPECT_EQ(index_put(start, {at}, values, true).item<double>(), 6144);
  const Tensor weight = zeros({2, 3}, {.dtype = f16, .requires_grad = true});
  sum(embedding(at, weight) * full({n, 3}, 1, {.dtype = f16})).backward();
  EXPECT_EQ(weight.grad().to_vector<double>(), (Values{4096, 4096, 4096, 0, 0, 0}));
}

TEST(Index, ThreadsDoNotChangeTheBits) {
  const std::int64_t n = 20000, rows = 37, width = 19;
  Ints at;
  for (std::int64_t i = 0; i < n; ++i) at.push_back(i * 7919 % rows);
  const Tensor index = ints(at), values = sample({n, width}).to(f32);
  const int threads = num_threads();
  std::vector<std::vector<double>> results[2];
  for (int k = 0; k < 2; ++k) {
    set_num_threads(k == 0 ? 1 : 4);
    const Tensor zero = zeros({rows, width});
    const Tensor wide = index.unsqueeze(1).expand({n, width});
    const Tensor weight = zeros({rows, width}, {.requires_grad = true});
    sum(embedding(index, weight) * values).backward();
    for (const Tensor& t : {index_add(zero, 0, index, values), scatter_add(zero, 0, wide, values),
                            index_put(zero, {index}, values, true), weight.grad()}) {
      results[k].push_back(t.to_vector<double>());
    }
  }
  set_num_threads(threads);
  EXPECT_EQ(results[0], results[1]);
}

// Long enough for several blocks, tiles and passes of a sort, wherever there are such. Values are small integers, so
// that sums are exact in any order.
TEST(Index, ManyIndicesSomeOfThemOften) {
  const std::int64_t n = 9000, rows = 700, width = 3;
  Ints at(n);
  Values values(n * width);
  for (std::int64_t i = 0; i < n; ++i) {
    // A third of all goes to one row, the rest is spread over half of them.
    at[i] = i % 3 == 0 ? 300 : i * 7919 % 350;
    for (std::int64_t c = 0; c < width; ++c) values[i * width + c] = static_cast<double>((i + 5 * c) % 16 - 7);
  }
  Values sums(rows * width), last(rows * width, 0.5);
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t c = 0; c < width; ++c) {
      sums[at[i] * width + c] += values[i * width + c];
      last[at[i] * width + c] = values[i * width + c];
    }
  }
  const Tensor index = ints(at), source = tensor(values, {n, width}), wide = index.unsqueeze(1).expand({n, width});
  const Tensor zero = zeros({rows, width}), half = full({rows, width}, 0.5);
  EXPECT_EQ(index_add(zero, 0, index, source).to_vector<double>(), sums);
  EXPECT_EQ(index_add(zeros({width, rows}), 1, index, source.t()).t().to_vector<double>(), sums);
  EXPECT_EQ(scatter_add(zero, 0, wide, source).to_vector<double>(), sums);
  EXPECT_EQ(index_put(zero, {index}, source, true).to_vector<double>(), sums);
  EXPECT_EQ(index_put(zero.to(i64), {index}, source.to(i64), true).to_vector<double>(), sums);
  const Tensor weight = zeros({rows, width}, {.requires_grad = true});
  embedding(index, weight).backward(source);
  EXPECT_EQ(weight.grad().to_vector<double>(), sums);
  EXPECT_EQ(scatter(half, 0, wide, source).to_vector<double>(), last);
  EXPECT_EQ(scatter(half.t(), 1, wide.t(), source.t()).t().to_vector<double>(), last);
  EXPECT_EQ(index_put(half, {index}, source).to_vector<double>(), last);
  Ints places;
  for (std::int64_t i = 0; i < n * width; ++i) {
    if (values[i] != 0) places.insert(places.end(), {i / width, i % width});
  }
  EXPECT_EQ(nonzero(source).to_vector<std::int64_t>(), places);
}

TEST(Index, SeveralTensors) {
  // x[i, j, k] = 100 i + 10 j + k.
  const Tensor x = tensor(
      Values{0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23, 100, 101, 102, 103, 110, 111, 112, 113, 120, 121, 122, 123},
      {2, 3, 4}, {.dtype = f64});
  const Tensor a = ints({0, 1, -1}), b = ints({2, 0, 1}), none;
  EXPECT_EQ(index(x, {a}).sizes(), Shape({3, 3, 4}));
  EXPECT_EQ(index(x, {a, b, ints({3, 3, 0})}).to_vector<double>(), (Values{23, 103, 110}));
  EXPECT_EQ(index(x, {none, b, ints({0, 1, -1})}).to_vector<double>(), (Values{20, 1, 13, 120, 101, 113}));
  EXPECT_EQ(index(x, {none, b, ints({0, 1, -1})}).sizes(), Shape({2, 3}));
  // A whole dimension between them: the index's dimension comes first.
  EXPECT_EQ(index(x, {ints({0, 1}), none, ints({3, 2})}).to_vector<double>(), (Values{3, 13, 23, 102, 112, 122}));
  EXPECT_EQ(index(x, {ints({0, 1}), none, ints({3, 2})}).sizes(), Shape({2, 3}));
  // Broadcast against each other.
  EXPECT_EQ(index(x, {none, ints({0, 2}, {2, 1}), ints({1, 3})}).sizes(), Shape({2, 2, 2}));
  EXPECT_EQ(index(x, {none, ints({0, 2}, {2, 1}), ints({1, 3})}).to_vector<double>(),
            (Values{1, 3, 21, 23, 101, 103, 121, 123}));
  EXPECT_EQ(index(x, {none, ints({1}, {})}).to_vector<double>(), x.select(1, 1).to_vector<double>());
  EXPECT_EQ(index(x.permute({2, 1, 0}), {ints({3, 0})}).to_vector<double>(),
            (Values{3, 103, 13, 113, 23, 123, 0, 100, 10, 110, 20, 120}));
  EXPECT_EQ(index(x, {empty({0}, {.dtype = i64})}).sizes(), Shape({0, 3, 4}));
}

TEST(Index, Masks) {
  const Tensor x = tensor({1, 2, 3, 4, 5, 6}, {2, 3});
  const Tensor m = mask({1, 0, 1, 0, 0, 1}, {2, 3});
  EXPECT_EQ(index(x, {m}).to_vector<double>(), (Values{1, 3, 6}));
  EXPECT_EQ(index(x, {Tensor(), mask({0, 1, 1}, {3})}).to_vector<double>(), (Values{2, 3, 5, 6}));
  EXPECT_EQ(index(x, {mask({0, 1}, {2}), ints({2})}).to_vector<double>(), (Values{6}));
  EXPECT_EQ(masked_select(x, m).to_vector<double>(), (Values{1, 3, 6}));
  EXPECT_EQ(masked_select(x.transpose(0, 1), m.transpose(0, 1)).to_vector<double>(), (Values{1, 3, 6}));
  EXPECT_EQ(masked_select(x, mask({1, 0, 1}, {3})).to_vector<double>(), (Values{1, 3, 4, 6}));
  EXPECT_EQ(masked_select(x, zeros({2, 3}, {.dtype = boolean})).sizes(), Shape({0}));
  EXPECT_EQ(index_put(x, {m}, tensor({7, 8, 9})).to_vector<double>(), (Values{7, 2, 8, 4, 5, 9}));
  EXPECT_EQ(index_put(x, {m}, scalar_tensor(0)).to_vector<double>(), (Values{0, 2, 0, 4, 5, 0}));
  EXPECT_EQ(nonzero(m).to_vector<std::int64_t>(), (Ints{0, 0, 0, 2, 1, 2}));
  EXPECT_EQ(nonzero(tensor({0, -0.0, NAN, 1e-45})).to_vector<std::int64_t>(), (Ints{2, 3}));
  EXPECT_EQ(nonzero(zeros({2, 0})).sizes(), Shape({0, 2}));
  EXPECT_EQ(nonzero(scalar_tensor(3)).sizes(), Shape({1, 0}));
  EXPECT_EQ(where(m)[1].to_vector<std::int64_t>(), (Ints{0, 2, 2}));
}

TEST(Index, PutInPlaceAndIntoViews) {
  Tensor x = zeros({2, 3, 2});
  index_put_(x.select(2, 1), {ints({0, 1}), ints({2, 0})}, tensor({5, 6}));
  EXPECT_EQ(x.to_vector<double>(), (Values{0, 0, 0, 0, 0, 5, 0, 6, 0, 0, 0, 0}));
  index_put_(x, {Tensor(), ints({0, 0})}, ones({1}), true);
  EXPECT_EQ(x.to_vector<double>(), (Values{2, 2, 0, 0, 0, 5, 2, 8, 0, 0, 0, 0}));
  // Values that are the tensor itself.
  Tensor y = tensor({1, 2, 3});
  index_put_(y, {ints({0, 1, 2})}, flip(y, {0}));
  EXPECT_EQ(y.to_vector<double>(), (Values{3, 2, 1}));
  scatter_(y, 0, ints({1, 2, 0}), y);
  EXPECT_EQ(y.to_vector<double>(), (Values{1, 3, 2}));
  index_add_(y, 0, ints({1, 1, 1}), y);
  EXPECT_EQ(y.to_vector<double>(), (Values{1, 9, 2}));
}

TEST(Index, InPlaceIsRecorded) {
  const Tensor x = tensor({1, 2, 3}, {.dtype = f64, .requires_grad = true});
  const Tensor v = tensor({10, 20}, {.dtype = f64, .requires_grad = true});
  Tensor y = x * 2;
  index_put_(y, {ints({2, 0})}, v);
  sum(y * y).backward();
  EXPECT_EQ(y.to_vector<double>(), (Values{20, 4, 10}));
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{0, 16, 0}));
  EXPECT_EQ(v.grad().to_vector<double>(), (Values{20, 40}));
}

TEST(Index, TakeAlongDimAndOneHot) {
  const Tensor x = tensor({3, 1, 2, 6, 5, 4}, {2, 3});
  EXPECT_EQ(take_along_dim(x, ints({2, 0}, {1, 2}), 1).to_vector<double>(), (Values{2, 3, 4, 6}));
  EXPECT_EQ(one_hot(ints({2, 0})).to_vector<std::int64_t>(), (Ints{0, 0, 1, 1, 0, 0}));
  EXPECT_EQ(one_hot(ints({1}, {}), 2).sizes(), Shape({2}));
  EXPECT_THROW(take_along_dim(x, ints({0}), 0), ShapeError);
}

TEST(Index, Gradients) {
  const Tensor x = sample({3, 4}), t = sample({4, 3}, 2).transpose(0, 1), source = sample({2, 4}, 5);
  const Tensor at = ints({2, 0, 0, 1, 2, 2, 1, 0}, {2, 4}), rows = ints({2, 0});
  check_gradients([&](const auto& v) { return gather(v[0] * v[1], 0, at); }, {x, t});
  check_gradients([&](const auto& v) { return gather(v[0] * v[0], 1, at.slice(1, 0, 3)); }, {t});
  check_gradients([&](const auto& v) { return scatter_add(v[0] * v[0], 0, at, v[1] * v[1]); }, {t, source});
  check_gradients([&](const auto& v) { return scatter_add(v[0] * v[0], 0, at, v[1] * v[1]); }, {t, sample({3, 5})});
  const Tensor once = ints({2, 0, 0, 1, 0, 2, 1, 0}, {2, 4});
  check_gradients([&](const auto& v) { return scatter(v[0] * v[0], 0, once, v[1] * v[1]); }, {t, source});
  check_gradients([&](const auto& v) { return scatter(v[0] * v[0], 0, at, Scalar(2)); }, {t});
  check_gradients([&](const auto& v) { return index_select(v[0] * v[0], 0, ints({1, 1, 2})); }, {t});
  check_gradients([&](const auto& v) { return index_add(v[0] * v[0], 0, rows, v[1] * v[1], 0.5); }, {t, source});
  check_gradients([&](const auto& v) { return index(v[0] * v[0], {ints({1, 1}), ints({0, 3})}); }, {t});
  check_gradients([&](const auto& v) { return index(v[0] * v[0], {Tensor(), ints({1, 1})}); }, {t});
  check_gradients([&](const auto& v) { return index_put(v[0] * v[0], {rows}, v[1] * v[1]); }, {t, source});
  check_gradients(
      [&](const auto& v) {
        return index_put(v[0] * v[0], {Tensor(), ints({3, 1})}, v[1] * v[1], true);
      },
      {t, sample({3, 1})});
  check_gradients([&](const auto& v) { return masked_select(v[0] * v[0], mask({1, 0, 1, 1}, {4})); }, {t});
  check_gradients([&](const auto& v) { return embedding(ints({2, 1, 2}), v[0] * v[0]); }, {t});
  check_gradients([&](const auto& v) { return take_along_dim(v[0] * v[0], ints({1, 1}, {1, 2}), 1); }, {t});
}

TEST(Index, EmbeddingWithPadding) {
  const Tensor weight = sample({3, 2}).requires_grad_();
  const Tensor at = ints({2, 1, 2, 0});
  const Tensor g = sample({4, 2}, 9).requires_grad_();
  const Tensor rows = embedding(at, weight, {.padding_idx = -1});
  const Tensor dw = grad({rows}, {weight}, {.grad_outputs = {g}, .create_graph = true})[0];
  const Values values = g.to_vector<double>();
  EXPECT_EQ(dw.to_vector<double>(), (Values{values[6], values[7], values[2], values[3], 0, 0}));
  // What the padding's rows got has no part in dw.
  EXPECT_EQ(grad({sum(dw)}, {g})[0].to_vector<double>(), (Values{0, 0, 1, 1, 0, 0, 1, 1}));
}

TEST(Index, EmbeddingGradientIsFloat32BehindACast) {
  const Tensor weight = zeros({2, 1}, {.requires_grad = true});
  const std::int64_t n = 3000;
  sum(embedding(zeros({n}, {.dtype = i64}), weight.to(bf16))).backward();
  EXPECT_EQ(weight.grad().to_vector<double>(), (Values{double(n), 0})) << "bf16 would have rounded it";
}

}  // namespace
}  // namespace halfstep
