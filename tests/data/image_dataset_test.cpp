// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image_dataset.h"

#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "halfstep/core/error.h"
#include "halfstep/data/image_archive.h"
#include "halfstep/data/loader.h"
#include "halfstep/data/mixup.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/runtime/log.h"
#include "tests/data/idx_files.h"
#include "tests/data/image_goldens.h"

namespace halfstep::data {
namespace {

using test::Bytes;
using test::expect_error;
using test::golden_file;
using test::image_goldens;

/// The goldens' pictures in memory, with some spoilt.
class Memory final : public ImageSource {
 public:
  explicit Memory(std::set<std::int64_t> bad = {}) : bad_(std::move(bad)) {
    for (const auto& entry : image_goldens().at("decode")) files_.push_back(golden_file(entry));
    classes_ = {"even", "odd"};
  }
  std::int64_t size() const override { return static_cast<std::int64_t>(files_.size()); }
  std::int64_t label(std::int64_t index) const override { return index % 2; }
  std::string name(std::int64_t index) const override { return "picture " + std::to_string(index); }
  std::span<const std::uint8_t> read(std::int64_t index, std::vector<std::uint8_t>&) const override {
    if (bad_.count(index) != 0) throw IoError("picture " + std::to_string(index) + ": spoilt");
    return files_[static_cast<std::size_t>(index)];
  }

 private:
  std::vector<Bytes> files_;
  std::set<std::int64_t> bad_;
};

class Quiet {
 public:
  Quiet() {
    set_log_sink([this](LogLevel, std::string_view line) { lines.emplace_back(line); });
  }
  ~Quiet() { set_log_sink({}); }
  std::vector<std::string> lines;
};

TrainTransform small() {
  TrainTransform transform;
  transform.size = 12;
  transform.jitter = {.brightness = 0.2, .contrast = 0.2, .saturation = 0.2, .hue = 0.1};
  return transform;
}

/// All batches of an epoch, one behind the other.
std::pair<std::vector<float>, std::vector<std::int64_t>> epoch_of(const ImageDataset& dataset, int workers,
                                                                  std::int64_t batch, std::int64_t epoch = 0) {
  DataLoader loader{dataset, {.batch_size = batch, .shuffle = true, .workers = workers, .seed = 4}};
  loader.seek({.epoch = epoch, .batch = 0});
  std::pair<std::vector<float>, std::vector<std::int64_t>> all;
  for (const auto& [images, labels] : loader) {
    EXPECT_TRUE(images.is_contiguous(MemoryFormat::channels_last));
    const float* values = images.data<float>();
    all.first.insert(all.first.end(), values, values + images.numel());
    const auto l = labels.to_vector<std::int64_t>();
    all.second.insert(all.second.end(), l.begin(), l.end());
  }
  return all;
}

TEST(ImageDataset, GivesTheSameBitsWithAnyWorkersAndBatches) {
  const ImageDataset dataset{std::make_shared<const Memory>(), small()};
  const auto one = epoch_of(dataset, 0, 7);
  EXPECT_EQ(one.second.size(), static_cast<std::size_t>(dataset.size()));
  for (const int workers : {1, 2, 5}) EXPECT_EQ(epoch_of(dataset, workers, 7), one);
  EXPECT_EQ(epoch_of(dataset, 3, 4), one);
  EXPECT_NE(epoch_of(dataset, 2, 7, 1), one);
}

TEST(ImageDataset, WritesEachDtype) {
  for (const DType dtype : {f32, f16, bf16}) {
    const ImageDataset dataset{
        std::make_shared<const Memory>(), EvalTransform{.size = 8, .resize = 8}, {.dtype = dtype}};
    const std::vector<std::int64_t> indices{3, 1};
    const Batch batch = dataset.batch({.indices = indices});
    EXPECT_EQ(batch.input.dtype(), dtype);
    EXPECT_EQ(batch.input.sizes(), (Shape{2, 3, 8, 8}));
    EXPECT_EQ(batch.target.to_vector<std::int64_t>(), (std::vector<std::int64_t>{1, 1}));
  }
}

TEST(ImageDataset, ReplacesDamagedPicturesByTheNextAndCountsThem) {
  Quiet quiet;
  const auto last = Memory().size() - 1;
  const ImageDataset dataset{std::make_shared<const Memory>(std::set<std::int64_t>{4, 5, last}),
                             EvalTransform{.size = 8, .resize = 8}};
  const std::vector<std::int64_t> asked{4, 5, 6, last, 0}, given{6, 6, 6, 0, 0};
  const Batch batch = dataset.batch({.indices = asked});
  const Batch expected = dataset.batch({.indices = given});
  EXPECT_EQ(batch.input.to_vector<float>(), expected.input.to_vector<float>());
  EXPECT_EQ(batch.target.to_vector<std::int64_t>(), expected.target.to_vector<std::int64_t>());
  EXPECT_EQ(dataset.bad_images().size(), 3U);
  EXPECT_EQ(quiet.lines.size(), 3U);  // each once
  EXPECT_NE(quiet.lines[0].find("picture 4: spoilt"), std::string::npos) << quiet.lines[0];
  const ImageDataset copy = dataset;
  EXPECT_EQ(copy.bad_images(), dataset.bad_images());
}

TEST(ImageDataset, GivesUpOverTheLimit) {
  Quiet quiet;
  const auto source = std::make_shared<const Memory>(std::set<std::int64_t>{4, 9, 20});
  const std::vector<std::int64_t> indices{4, 9, 4, 20};
  const ImageDataset three{source, EvalTransform{.size = 8, .resize = 8}, {.max_damaged = 3}};
  EXPECT_NO_THROW(three.batch({.indices = indices}));
  const ImageDataset two{source, EvalTransform{.size = 8, .resize = 8}, {.max_damaged = 2}};
  expect_error<IoError>([&] { two.batch({.indices = indices}); }, {"at most 2 damaged pictures", "picture 20"});
  std::set<std::int64_t> all;
  for (std::int64_t i = 0; i < source->size(); ++i) all.insert(i);
  const ImageDataset none{std::make_shared<const Memory>(all), EvalTransform{.size = 8, .resize = 8}};
  expect_error<IoError>([&] { none.batch({.indices = indices}); }, {"none can be read"});
}

TEST(ImageDataset, RefusesWhatMakesNoSense) {
  expect_error<Error>([] { ImageDataset(nullptr, TrainTransform{}); }, {"source"});
  expect_error<Error>([] { ImageDataset(std::make_shared<const Memory>(), TrainTransform{}, {.max_damaged = -1}); },
                      {"-1"});
  const ImageDataset dataset{std::make_shared<const Memory>(), TrainTransform{}};
  const std::vector<std::int64_t> outside{1000};
  expect_error<ShapeError>([&] { dataset.batch({.indices = outside}); }, {"1000"});
}

TEST(Mixup, MixesPairsWithOneShare) {
  Batch batch{empty({6, 4}), empty({6}, {.dtype = i64})};
  for (int i = 0; i < 24; ++i) batch.input.data<float>()[i] = static_cast<float>(i / 4 * 100 + i % 4);
  for (int i = 0; i < 6; ++i) batch.target.data<std::int64_t>()[i] = i;
  RandomStream random(9);
  const Mixed mixed = mixup(batch, {.alpha = 1}, random);
  ASSERT_GT(mixed.lambda, 0);
  ASSERT_LT(mixed.lambda, 1);
  std::set<std::int64_t> partners;
  for (std::int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(mixed.target_a[i].item<std::int64_t>(), i);
    const auto partner = mixed.target_b[i].item<std::int64_t>();
    partners.insert(partner);
    for (std::int64_t j = 0; j < 4; ++j) {
      const double expected =
          mixed.lambda * static_cast<double>(100 * i + j) + (1 - mixed.lambda) * static_cast<double>(100 * partner + j);
      // Two products and a sum of numbers up to 503, each rounded to float32.
      EXPECT_NEAR(mixed.input[i][j].item<double>(), expected, 3 * 503 * 0x1p-24);
    }
  }
  EXPECT_EQ(partners.size(), 6U);  // a permutation
  const Tensor soft = soft_targets(mixed.target_a, mixed.target_b, mixed.lambda, 6);
  for (std::int64_t i = 0; i < 6; ++i) {
    double sum = 0;
    for (std::int64_t c = 0; c < 6; ++c) sum += soft[i][c].item<double>();
    EXPECT_NEAR(sum, 1, 0x1p-22);
    const auto partner = mixed.target_b[i].item<std::int64_t>();
    if (partner == i) continue;
    EXPECT_EQ(soft[i][i].item<float>(), static_cast<float>(mixed.lambda));
    EXPECT_EQ(soft[i][partner].item<float>(), static_cast<float>(1 - mixed.lambda));
  }
  // The loss of soft targets is the mix of the two losses.
  const Tensor logits = soft_targets(mixed.target_b, mixed.target_a, 0.7, 6);
  const double both = mixed.lambda * cross_entropy(logits, mixed.target_a).item<double>() +
                      (1 - mixed.lambda) * cross_entropy(logits, mixed.target_b).item<double>();
  EXPECT_NEAR(cross_entropy(logits, soft).item<double>(), both, 1e-6);
}

TEST(Mixup, KeepsLayoutAndDtype) {
  Batch batch{empty_image_batch(3, 4, bf16), empty({3}, {.dtype = i64})};
  batch.input.fill_(2.0);
  std::fill_n(batch.target.data<std::int64_t>(), 3, 1);
  RandomStream random(1);
  const Mixed mixed = mixup(batch, {.alpha = 0.2}, random);
  EXPECT_EQ(mixed.input.dtype(), bf16);
  EXPECT_TRUE(mixed.input.is_contiguous(MemoryFormat::channels_last));
  EXPECT_EQ(mixed.input[2][1][3][3].item<float>(), 2.0F);  // shares add up to 1
}

TEST(Mixup, SharesFollowTheBetaDistribution) {
  // Beta(a, a) has the mean 1/2 and the variance 1 / (4 (2a + 1)).
  for (const double a : {0.2, 1.0, 3.0}) {
    RandomStream random(17);
    constexpr int kDraws = 20000;
    double sum = 0, squares = 0;
    for (int i = 0; i < kDraws; ++i) {
      const double x = beta(a, random);
      ASSERT_GE(x, 0);
      ASSERT_LE(x, 1);
      sum += x;
      squares += (x - 0.5) * (x - 0.5);
    }
    const double variance = 1 / (4 * (2 * a + 1));
    // Five standard deviations of a mean of 20,000; that of the squares is under variance.
    EXPECT_NEAR(sum / kDraws, 0.5, 5 * std::sqrt(variance / kDraws));
    EXPECT_NEAR(squares / kDraws, variance, 5 * variance / std::sqrt(kDraws));
  }
}

TEST(Mixup, DataSetIsKeyedByItsRequest) {
  const auto images = std::make_shared<const ImageDataset>(std::make_shared<const Memory>(), small());
  const MixupDataset mixed{images, {.alpha = 0.4, .classes = 2}};
  EXPECT_EQ(mixed.size(), images->size());
  const std::vector<std::int64_t> indices{3, 8, 5}, others{8, 3, 5};
  const Batch first = mixed.batch({.indices = indices, .seed = 1, .epoch = 2});
  EXPECT_EQ(first.target.sizes(), (Shape{3, 2}));
  EXPECT_EQ(mixed.batch({.indices = indices, .seed = 1, .epoch = 2}).input.to_vector<float>(),
            first.input.to_vector<float>());
  std::set<float> shares;
  for (std::int64_t epoch = 0; epoch < 5; ++epoch) {
    shares.insert(mixed.batch({.indices = indices, .seed = 1, .epoch = epoch}).target[0][0].item<float>());
    shares.insert(mixed.batch({.indices = others, .seed = 1, .epoch = epoch}).target[0][0].item<float>());
  }
  EXPECT_GT(shares.size(), 4U);
}

TEST(Mixup, RefusesWhatMakesNoSense) {
  RandomStream random(1);
  const Batch batch{empty({3, 2}), zeros({3}, {.dtype = i64})};
  expect_error<Error>([&] { mixup(batch, {.alpha = 0}, random); }, {"alpha"});
  expect_error<ShapeError>([&] { mixup({empty({3, 2}), empty({2}, {.dtype = i64})}, {}, random); }, {"[3, 2]", "[2]"});
  expect_error<DTypeError>([&] { mixup({empty({3, 2}), empty({3})}, {}, random); }, {"i64"});
  expect_error<DTypeError>([&] { mixup({empty({3, 2}, {.dtype = i64}), batch.target}, {}, random); }, {"i64"});
  expect_error<Error>([&] { soft_targets(batch.target, batch.target, 0.5, 0); }, {"classes"});
  Tensor wrong = empty({1}, {.dtype = i64});
  wrong.fill_(7);
  expect_error<Error>([&] { soft_targets(wrong, wrong, 0.5, 7); }, {"0 to 6", "got 7"});
}

}  // namespace
}  // namespace halfstep::data
