// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/pipeline.h"

#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/error.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "tests/data/idx_files.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

using test::expect_error;
using Floats = std::vector<float>;
using Integers = std::vector<std::int64_t>;

/// n pictures of 3 rows and 2 columns whose pixels count upwards, with labels 0 to 9 in turn.
MnistData small_pictures(std::int64_t n) {
  MnistData pictures{.count = n, .rows = 3, .columns = 2};
  for (std::int64_t i = 0; i < n * 6; ++i) pictures.images.push_back(static_cast<std::uint8_t>(i));
  for (std::int64_t i = 0; i < n; ++i) pictures.labels.push_back(static_cast<std::uint8_t>(i % 10));
  return pictures;
}

/// [n, ...] tensors as they are given.
Pipeline of_tensors(const Tensor& inputs, const Tensor& targets) { return Pipeline{TensorDataset{inputs, targets}}; }

Tensor counting(const Shape& sizes, DType dtype) {
  Tensor t = empty(sizes, {.dtype = f64});
  for (std::int64_t i = 0; i < t.numel(); ++i) t.data<double>()[i] = static_cast<double>(i);
  return t.to(dtype);
}

Integers labels_of(DataLoader& loader) {
  Integers all;
  for (auto [images, labels] : loader) {
    for (const std::int64_t label : labels.to_vector<std::int64_t>()) all.push_back(label);
  }
  return all;
}

TEST(Pipeline, BeginsWithPixelsAndLabels) {
  const Pipeline pipeline{MnistDataset{small_pictures(5)}};
  EXPECT_EQ(pipeline.size(), 5);
  EXPECT_EQ(pipeline.type(Column::image)->str(), "u8 [3, 2, 1]");
  EXPECT_EQ(pipeline.type(Column::label)->str(), "i64 []");
  auto loader = pipeline.batch(2);
  Integers pixels, labels;
  for (auto [image, label] : loader) {
    for (const auto p : image.to_vector<std::int64_t>()) pixels.push_back(p);
    for (const auto l : label.to_vector<std::int64_t>()) labels.push_back(l);
  }
  Integers upwards(30);
  std::iota(upwards.begin(), upwards.end(), 0);
  EXPECT_EQ(pixels, upwards);
  EXPECT_EQ(labels, (Integers{0, 1, 2, 3, 4}));
}

// The whole chain of the tutorial; the numbers are its formula in float64.
TEST(Pipeline, RescalesNormalisesAndTurnsPictures) {
  auto loader = Pipeline{small_pictures(42)}
                    .map({Rescale{1.0 / 255.0, 0}, Normalize{{0.1307}, {0.3081}}, HWC2CHW{}}, Column::image)
                    .map(TypeCast{i32}, Column::label)
                    .batch(42);
  const auto batch = loader.begin();
  EXPECT_EQ(batch->input.sizes(), (Shape{42, 1, 3, 2}));
  EXPECT_EQ(batch->input.dtype(), f32);
  EXPECT_EQ(batch->target.dtype(), i32);
  const Floats values = batch->input.to_vector<float>();
  for (std::size_t p = 0; p < 252; ++p) {
    // Two roundings to float32, of numbers below 1 and below 4: half a unit of each in the last place, the first
    // divided by 0.3081.
    const double exact = (static_cast<double>(p) / 255 - 0.1307) / 0.3081;
    EXPECT_NEAR(values[p], exact, 0x1p-25 / 0.3081 + 0x1p-23) << p;
  }
}

TEST(Pipeline, NormalisesChannelByChannel) {
  const Tensor pictures = counting({2, 2, 2, 3}, f32);  // [N, H, W, C]
  const Normalize normalize{{1, 2, 3}, {1, 2, 4}};
  const Pipeline source = of_tensors(pictures, counting({2}, i64));
  auto before = source.map({normalize, HWC2CHW{}}).batch(2);
  auto after =
      source.map({HWC2CHW{}, Normalize{.mean = {1, 2, 3}, .std = {1, 2, 4}, .is_hwc = false}}, Column::input).batch(2);
  const Floats a = before.begin()->input.to_vector<float>();
  EXPECT_EQ(a, after.begin()->input.to_vector<float>());
  const auto value = [&](int n, int h, int w, int c) { return ((n * 2 + h) * 2 + w) * 3 + c; };
  std::size_t i = 0;
  for (int n = 0; n < 2; ++n) {
    for (int c = 0; c < 3; ++c) {
      for (int h = 0; h < 2; ++h) {
        for (int w = 0; w < 2; ++w) {
          const double std[] = {1, 2, 4};
          EXPECT_EQ(a[i++], static_cast<float>((value(n, h, w, c) - (c + 1)) / std[c]));  // exact
        }
      }
    }
  }
}

TEST(Pipeline, TurnsPicturesWithoutACopyIntoChannelsLast) {
  auto loader = of_tensors(counting({4, 5, 6, 3}, f32), counting({4}, i64)).map(HWC2CHW{}).batch(4);
  const Tensor images = loader.begin()->input;
  EXPECT_EQ(images.sizes(), (Shape{4, 3, 5, 6}));
  EXPECT_TRUE(images.is_contiguous(MemoryFormat::channels_last));
}

TEST(Pipeline, CastsEveryDtype) {
  const Tensor values = counting({3, 4}, f32);
  for (const DType dtype : {f32, f64, f16, bf16, f8e4m3, i64, i32, i8, u8, boolean}) {
    const Pipeline cast = of_tensors(values, values).map(TypeCast{dtype}, Column::target);
    EXPECT_EQ(cast.type(Column::target)->dtype, dtype);
    EXPECT_EQ(cast.type(Column::input)->dtype, f32);
    auto loader = cast.batch(3);
    EXPECT_EQ(loader.begin()->target.to_vector<double>(), values.to(dtype).to_vector<double>()) << name(dtype);
  }
}

TEST(Pipeline, KeepsFloat64) {
  const Tensor values = counting({3, 2, 2, 1}, f64);
  const Pipeline scaled =
      of_tensors(values, counting({3}, i64)).map({Rescale{1.0 / 3}, Normalize{.mean = {0.1}, .std = {0.7}}});
  EXPECT_EQ(scaled.type(Column::input)->dtype, f64);
  auto loader = scaled.batch(3);
  const auto got = loader.begin()->input.to_vector<double>();
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_DOUBLE_EQ(got[i], (static_cast<double>(i) / 3 - 0.1) / 0.7);
}

TEST(Pipeline, RunsFunctionsOnSamples) {
  auto loader = of_tensors(counting({5, 2}, f32), counting({5}, i64))
                    .map([](const Tensor& sample) { return sample * 10; }, Column::input)
                    .map({[](const Tensor& label) { return label.unsqueeze(0).expand({3}); }}, Column::label)
                    .batch(5);
  EXPECT_EQ(loader.begin()->input.to_vector<float>(), (Floats{0, 10, 20, 30, 40, 50, 60, 70, 80, 90}));
  const Tensor labels = loader.begin()->target;
  EXPECT_EQ(labels.sizes(), (Shape{5, 3}));
  EXPECT_EQ(labels.select(0, 4).to_vector<std::int64_t>(), (Integers{4, 4, 4}));
}

// What is drawn at random belongs to seed, epoch and sample, whichever thread draws and in which batch.
TEST(Pipeline, KeysWhatFunctionsDraw) {
  const auto run = [](int workers, std::int64_t batch, std::uint64_t seed) {
    auto loader = of_tensors(counting({20}, i64), counting({20}, i64))
                      .map(
                          [](const Tensor& sample, const SampleKey& key) {
                            EXPECT_EQ(sample.item<std::int64_t>(), key.sample);
                            Tensor made = empty({3}, {.dtype = i64});
                            const std::int64_t values[] = {static_cast<std::int64_t>(key.seed), key.epoch, key.sample};
                            std::copy(std::begin(values), std::end(values), made.data<std::int64_t>());
                            return made;
                          },
                          Column::input)
                      .shuffle({.seed = seed})
                      .batch(batch, {.workers = workers})
                      .repeat(2);
    std::map<std::int64_t, std::set<Integers>> seen;
    for (auto [keys, labels] : loader) {
      for (std::int64_t i = 0; i < keys.size(0); ++i) {
        seen[labels[i].item<std::int64_t>()].insert(keys[i].to_vector<std::int64_t>());
      }
    }
    return seen;
  };
  const auto expected = run(0, 20, 7);
  ASSERT_EQ(expected.size(), 20u);
  EXPECT_EQ(expected.at(3), (std::set<Integers>{{7, 0, 3}, {7, 1, 3}}));  // two passes
  EXPECT_EQ(run(3, 6, 7), expected);
  EXPECT_NE(run(3, 6, 8), expected);
}

TEST(Pipeline, RunsFunctionsWithoutTheLoopsRegions) {
  for (const int workers : {0, 2}) {
    const amp::Autocast autocast;
    auto loader = of_tensors(counting({4, 2, 2}, f32), counting({4}, i64))
                      .map([](const Tensor& sample) {
                        EXPECT_FALSE(GradMode::is_enabled());
                        EXPECT_FALSE(amp::is_autocast_enabled());
                        return sample;
                      })
                      .batch(2, {.workers = workers});
    for (auto [x, y] : loader) EXPECT_EQ(x.dtype(), f32);
    EXPECT_TRUE(amp::is_autocast_enabled());
  }
}

TEST(Pipeline, RunsInTheLoadersThreads) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  auto loader = of_tensors(counting({64}, f32), counting({64}, i64))
                    .map([&](const Tensor& sample) {
                      const std::scoped_lock lock(mutex);
                      threads.insert(std::this_thread::get_id());
                      return sample;
                    })
                    .batch(1, {.workers = 3});
  threads.clear();  // map() tried it here
  for (auto [x, y] : loader) std::this_thread::yield();
  EXPECT_GE(threads.size(), 1u);
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 0u);
}

TEST(Pipeline, IsAValue) {
  const Pipeline source{small_pictures(4)};
  const Pipeline scaled = source.map(Rescale{0.5});
  const Pipeline twice = scaled.map(Rescale{0.5});
  EXPECT_EQ(source.type(Column::image)->dtype, u8);
  auto once = scaled.batch(1), again = twice.batch(1);
  EXPECT_EQ(once.begin()->input.to_vector<float>()[5], 2.5F);
  EXPECT_EQ(again.begin()->input.to_vector<float>()[5], 1.25F);
  // The samples are a data set too.
  const Integers place{2};
  EXPECT_EQ(twice.dataset()->batch({.indices = place}).input.to_vector<float>()[0], 3.0F);
}

TEST(Pipeline, ShufflesTheWholeSetEveryEpoch) {
  const Pipeline source{small_pictures(10)};
  auto ordered = source.batch(3), shuffled = source.shuffle().map(Rescale{}).batch(3);
  EXPECT_EQ(labels_of(ordered), (Integers{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  const Integers first = labels_of(shuffled), second = labels_of(shuffled);
  EXPECT_EQ(first, shuffled_order(10, 0, 0));
  EXPECT_EQ(second, shuffled_order(10, 0, 1));
  EXPECT_NE(first, second);
  EXPECT_EQ(shuffled.size(), 4);
  EXPECT_EQ(source.batch(3, {.drop_last = true}).size(), 3);
}

class PipelineRepeat : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Workers, PipelineRepeat, testing::Values(0, 1, 3), testing::PrintToStringParamName());

// One epoch of k passes has the batches of k epochs.
TEST_P(PipelineRepeat, IsAsManyEpochs) {
  const Pipeline source = Pipeline{small_pictures(10)}.shuffle({.seed = 5});
  for (const std::int64_t batch : {1, 3, 10, 100}) {
    auto plain = source.batch(batch, {.workers = GetParam()});
    auto repeated = source.batch(batch, {.workers = GetParam()}).repeat(2).repeat(2);
    EXPECT_EQ(repeated.size(), 4 * plain.size());
    Integers expected;
    for (int epoch = 0; epoch < 8; ++epoch) {
      for (const std::int64_t label : labels_of(plain)) expected.push_back(label);
    }
    Integers got = labels_of(repeated);
    for (const std::int64_t label : labels_of(repeated)) got.push_back(label);
    EXPECT_EQ(got, expected) << batch;
    // Batches never reach over the end of a pass.
    repeated.seek({.epoch = 0, .batch = 0});
    std::int64_t rows = 0, short_ones = 0;
    for (auto [x, y] : repeated) {
      rows += x.size(0);
      short_ones += x.size(0) < std::min<std::int64_t>(batch, 10);
    }
    EXPECT_EQ(rows, 40);
    EXPECT_EQ(short_ones, batch == 3 ? 4 : 0);
  }
}

TEST_P(PipelineRepeat, GoesOnInTheMiddle) {
  auto loader = Pipeline{small_pictures(10)}.shuffle().batch(4, {.workers = GetParam()}).repeat(3);
  std::vector<Integers> all;
  for (auto [x, y] : loader) all.push_back(y.to_vector<std::int64_t>());
  ASSERT_EQ(all.size(), 9u);
  for (const std::int64_t place : {1, 3, 5, 8, 9}) {
    loader.seek({.epoch = 0, .batch = place});
    std::vector<Integers> rest;
    for (auto [x, y] : loader) rest.push_back(y.to_vector<std::int64_t>());
    EXPECT_EQ(rest, std::vector<Integers>(all.begin() + place, all.end())) << place;
  }
}

// It is a DataLoader where one is taken.
std::int64_t count_rows(DataLoader& loader) {
  std::int64_t rows = 0;
  for (auto [x, y] : loader) rows += x.size(0);
  return rows;
}
TEST(Pipeline, StandsInForALoader) {
  auto loader = Pipeline{small_pictures(7)}.batch(2).repeat(2);
  EXPECT_EQ(count_rows(loader), 14);
  DataLoader moved = Pipeline{small_pictures(7)}.batch(2);
  EXPECT_EQ(count_rows(moved), 7);
}

TEST(Pipeline, TakesWhatOtherDataSetsGive) {
  const Pipeline pictures{MnistDataset{small_pictures(3)}};
  // By a pointer the data set stays what it was, scaled already.
  const Pipeline scaled{std::shared_ptr<const Dataset>(std::make_shared<const MnistDataset>(small_pictures(3)))};
  EXPECT_EQ(pictures.type(Column::image)->str(), "u8 [3, 2, 1]");
  EXPECT_EQ(scaled.type(Column::image)->str(), "f32 [1, 3, 2]");
}

TEST(PipelineErrors, AreTheCallsThatAddTheStep) {
  const Pipeline pictures{small_pictures(3)};
  expect_error<ShapeError>(
      [&] {
        (void)pictures.map(Normalize{{1, 2, 3}, {1, 1, 1}});
      },
      {"Normalize", "each of the 1 channels of u8 [3, 2, 1]", "got 3"});
  expect_error<ShapeError>(
      [&] {
        (void)pictures.map({HWC2CHW{}, Normalize{{0.1}, {0.3}}});
      },
      {"Normalize", "the 2 channels of u8 [1, 3, 2]", ".is_hwc = false"});
  expect_error<ShapeError>([&] { (void)pictures.map(Normalize{.mean = {0.1}, .std = {0.3}, .is_hwc = false}); },
                           {"Normalize", "the 3 channels", ".is_hwc = true"});
  expect_error<ShapeError>([&] { (void)pictures.map(HWC2CHW{}, Column::label); },
                           {"HWC2CHW", "expected samples [H, W, C], got i64 []"});
  expect_error<ShapeError>(
      [&] {
        (void)pictures.map(Normalize{{0}, {1}}, Column::label);
      },
      {"Normalize", "expected samples [H, W, C], got i64 []"});
  expect_error<DTypeError>([&] { (void)pictures.map(TypeCast{static_cast<DType>(77)}); }, {"dtype"});
}

TEST(PipelineErrors, NameNumbersThatMakeNoSense) {
  expect_error<Error>([] { (void)ColumnTransform(Rescale{INFINITY, 0}); }, {"Rescale", "finite scale", "inf"});
  expect_error<Error>([] { (void)ColumnTransform(Rescale{1, NAN}); }, {"Rescale", "finite shift"});
  expect_error<Error>([] { (void)ColumnTransform(Normalize{{}, {}}); }, {"Normalize", "each channel, got 0 and 0"});
  expect_error<Error>([] { (void)ColumnTransform(Normalize{{1, 2}, {1}}); }, {"Normalize", "got 2 and 1"});
  expect_error<Error>([] { (void)ColumnTransform(Normalize{{1}, {0}}); }, {"Normalize", "std above 0, got 0"});
  expect_error<Error>([] { (void)ColumnTransform(Normalize{{1}, {-1}}); }, {"Normalize", "std above 0, got -1"});
  expect_error<Error>([] { (void)ColumnTransform(Normalize{{NAN}, {1}}); }, {"Normalize", "finite mean"});
  expect_error<Error>([] { (void)ColumnTransform(std::function<Tensor(const Tensor&)>{}); }, {"empty"});
}

TEST(PipelineErrors, NameWhatFunctionsGive) {
  const Pipeline numbers = of_tensors(counting({6}, f32), counting({6}, i64));
  expect_error<Error>([&] { (void)numbers.map([](const Tensor&) { return Tensor{}; }); }, {"got none for sample 0"});
  expect_error<std::runtime_error>(
      [&] { (void)numbers.map([](const Tensor&) -> Tensor { throw std::runtime_error("no such file"); }); },
      {"no such file"});
  // Unlike results are seen by the worker, and thrown by the loop.
  auto ragged =
      numbers.map([](const Tensor& x) { return empty({x.item<float>() < 3 ? 1 : 2}, {.dtype = f32}); }, Column::input)
          .batch(6, {.workers = 2});
  expect_error<ShapeError>([&] { labels_of(ragged); }, {"f32 [1] for sample 0", "f32 [2] for sample 3"});
}

class WithoutTargets final : public Dataset {
 public:
  std::int64_t size() const override { return 2; }
  Batch batch(const BatchRequest& request) const override {
    return {empty({static_cast<std::int64_t>(request.indices.size()), 3}), Tensor{}};
  }
};

TEST(PipelineErrors, NameWhatIsMissing) {
  expect_error<Error>([] { Pipeline{std::shared_ptr<const Dataset>()}; }, {"expected a data set, got none"});
  expect_error<Error>([] { Pipeline{MnistData{}}; }, {"at least one sample", "0"});
  expect_error<Error>(
      [] {
        Pipeline{MnistDataset{small_pictures(2), {.flatten = true}}};
      },
      {"MnistDataset without options", "flatten true"});
  const Pipeline bare{WithoutTargets{}};
  EXPECT_FALSE(bare.type(Column::label).has_value());
  expect_error<Error>([&] { (void)bare.map(TypeCast{i64}, Column::label); }, {"target (label)", "gives none"});
  expect_error<Error>([&] { (void)bare.map(TypeCast{f16}, static_cast<Column>(2)); }, {"got number 2"});
  expect_error<Error>([&] { (void)bare.batch(0); }, {"batch size"});
  expect_error<Error>([&] { (void)bare.batch(1).repeat(0); }, {"at least 1 pass, got 0"});
  expect_error<Error>([&] { (void)bare.batch(1).repeat(-1); }, {"got -1", "loop around it"});
  expect_error<Error>([&] { (void)bare.batch(1).repeat(1 << 20).repeat(1 << 20); }, {"at most 2147483647"});
  expect_error<Error>([] { DataLoader{MnistDataset{small_pictures(2)}, {.repeat = 0}}; }, {"1 to 2147483647 passes"});
}

// On the real pixels: what the constants are for. Their mean and deviation are published as 0.1307 and 0.3081, so the
// normalised ones are 0 and 1 within what the fourth digit leaves.
TEST(PipelineReal, NormalisesMnist) {
  const auto root = test::data_dir();
  if (!root || !has_mnist(*root / "mnist", Split::kTrain)) GTEST_SKIP() << "no MNIST here";
  auto loader = Pipeline{MnistDataset{load_mnist(*root / "mnist", Split::kTrain)}}
                    .map({Rescale{1.0 / 255}, Normalize{{0.1307}, {0.3081}}, HWC2CHW{}}, Column::image)
                    .batch(1000, {.workers = 2});
  double sum = 0, squares = 0, n = 0;
  for (auto [images, labels] : loader) {
    ASSERT_EQ(images.sizes(), (Shape{1000, 1, 28, 28}));
    const Floats values = images.to_vector<float>();
    for (const float x : values) {
      sum += x;
      squares += static_cast<double>(x) * x;
      n += 1;
    }
  }
  EXPECT_EQ(n, 60000.0 * 784);
  EXPECT_NEAR(sum / n, 0, 0.5e-4 / 0.3081);
  EXPECT_NEAR(std::sqrt(squares / n), 1, 0.5e-4 / 0.3081);
}

}  // namespace
}  // namespace halfstep::data
