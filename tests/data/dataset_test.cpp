// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/dataset.h"

#include <cmath>
#include <numeric>

#include "halfstep/core/error.h"
#include "tests/data/idx_files.h"

namespace halfstep::data {
namespace {

using test::expect_error;
using Indices = std::vector<std::int64_t>;

MnistData counting(std::int64_t n) {
  MnistData data{.count = n};
  data.images.resize(static_cast<std::size_t>(n * 784));
  for (std::size_t i = 0; i < data.images.size(); ++i) data.images[i] = static_cast<std::uint8_t>(i % 256);
  for (std::int64_t i = 0; i < n; ++i) data.labels.push_back(static_cast<std::uint8_t>(i % 10));
  return data;
}

TEST(MnistDataset, MakesImagesAndLabels) {
  const MnistDataset dataset{counting(5)};
  EXPECT_EQ(dataset.size(), 5);
  const Indices indices{4, 0, 4};
  const auto [images, labels] = dataset.batch({.indices = indices});
  EXPECT_EQ(images.sizes(), (Shape{3, 1, 28, 28}));
  EXPECT_EQ(images.dtype(), f32);
  EXPECT_EQ(labels.sizes(), (Shape{3}));
  EXPECT_EQ(labels.to_vector<std::int64_t>(), (Indices{4, 0, 4}));
  const std::vector<float> values = images.to_vector<float>();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t image = static_cast<std::size_t>(indices[i / 784]);
    ASSERT_EQ(values[i], static_cast<float>((image * 784 + i % 784) % 256) / 255.0F) << i;
  }
}

// Every one of the 256 pixel values comes out as a division by 255 rounds it.
TEST(MnistDataset, DividesExactly) {
  const MnistDataset dataset{counting(1), {.flatten = true}};
  const Batch batch = dataset.batch({.indices = Indices{0}});
  EXPECT_EQ(batch.input.sizes(), (Shape{1, 784}));
  for (int p = 0; p < 256; ++p) EXPECT_EQ(batch.input.data<float>()[p], static_cast<float>(p) / 255.0F) << p;
}

TEST(MnistDataset, Normalises) {
  const double mean = 0.1307;
  const double deviation = 0.3081;
  const MnistDataset dataset{counting(1), {.mean = mean, .std = deviation}};
  const Batch batch = dataset.batch({.indices = Indices{0}});
  // Three roundings (bias, two sums) of terms below 4, one unit of whose last place is 2^-22.
  for (int p = 0; p < 256; ++p) {
    EXPECT_NEAR(batch.input.data<float>()[p], (p / 255.0 - mean) / deviation, 1.5 * 0x1p-22) << p;
  }
}

TEST(MnistDataset, HandlesSizesThatAreNoMultipleOfABlock) {
  MnistData data{.count = 2, .rows = 5, .columns = 7};
  data.images.resize(70);
  std::iota(data.images.begin(), data.images.end(), std::uint8_t{100});
  data.labels = {1, 2};
  const Batch batch = MnistDataset{data}.batch({.indices = Indices{1, 0}});
  EXPECT_EQ(batch.input.sizes(), (Shape{2, 1, 5, 7}));
  for (int i = 0; i < 70; ++i)
    EXPECT_EQ(batch.input.data<float>()[i], static_cast<float>(100 + (i + 35) % 70) / 255.0F);
}

TEST(MnistDataset, MakesAnEmptyBatch) {
  const Batch batch = MnistDataset{counting(2)}.batch({});
  EXPECT_EQ(batch.input.sizes(), (Shape{0, 1, 28, 28}));
  EXPECT_EQ(batch.target.sizes(), (Shape{0}));
}

TEST(MnistDataset, RefusesWhatDoesNotFit) {
  MnistData data = counting(3);
  data.labels.pop_back();
  expect_error<Error>([&] { MnistDataset{data}; }, {"3 labels", "and 2"});
  expect_error<Error>([] { MnistDataset(counting(1), {.std = 0}); }, {"positive std", "0"});
  expect_error<Error>([] { MnistDataset(counting(1), {.mean = NAN}); }, {"finite mean"});
  const MnistDataset dataset{counting(3)};
  expect_error<ShapeError>([&] { dataset.batch({.indices = Indices{3}}); }, {"0 to 2", "got 3"});
  expect_error<ShapeError>([&] { dataset.batch({.indices = Indices{-1}}); }, {"0 to 2", "got -1"});
}

TEST(MnistDataset, RefusesNegativeSizes) {
  for (const auto& [count, rows, columns] :
       std::vector<std::array<std::int64_t, 3>>{{-1, 2, 2}, {0, -28, 28}, {2, -2, -2}, {1, std::int64_t{1} << 62, 4}}) {
    MnistData data = counting(2);
    data.count = count;
    data.rows = rows;
    data.columns = columns;
    if (count > 0) data.labels.resize(static_cast<std::size_t>(count));
    data.images.resize(count == 2 ? 8 : 0);
    expect_error<Error>([&] { MnistDataset{data}; }, {"at least 0"});
  }
}

TEST(TensorDataset, GathersRows) {
  std::vector<float> inputs(12);
  std::iota(inputs.begin(), inputs.end(), 0.0F);
  Indices targets{10, 11, 12, 13};
  const TensorDataset dataset{from_blob(inputs.data(), {4, 3}), from_blob(targets.data(), {4}, i64)};
  EXPECT_EQ(dataset.size(), 4);
  const auto [x, y] = dataset.batch({.indices = Indices{2, 0}});
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{6, 7, 8, 0, 1, 2}));
  EXPECT_EQ(y.to_vector<std::int64_t>(), (Indices{12, 10}));
  EXPECT_EQ(x.sizes(), (Shape{2, 3}));
  expect_error<ShapeError>([&] { dataset.batch({.indices = Indices{4}}); }, {"0 to 3", "got 4"});
}

TEST(TensorDataset, TakesStridedTensors) {
  std::vector<float> values{0, 1, 2, 3, 4, 5};
  const Tensor transposed = from_blob(values.data(), {2, 3}).t();  // [3, 2]
  const TensorDataset dataset{transposed, transposed.select(1, 0)};
  const auto [x, y] = dataset.batch({.indices = Indices{1}});
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{1, 4}));
  EXPECT_EQ(y.to_vector<float>(), (std::vector<float>{1}));
}

TEST(TensorDataset, RefusesUnlikeCounts) {
  expect_error<ShapeError>([] { TensorDataset(empty({3, 2}), empty({4})); }, {"[3, 2]", "[4]"});
  expect_error<ShapeError>([] { TensorDataset(empty({}), empty({})); }, {"inputs [N, ...]"});
}

}  // namespace
}  // namespace halfstep::data
