// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/mnist.h"

#include <array>
#include <numeric>

#include "halfstep/core/error.h"
#include "tests/data/idx_files.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;
using test::Bytes;
using test::expect_error;
using test::gzip;
using test::idx_header;
using test::idx_images;
using test::idx_labels;
using test::TemporaryDir;
using test::write_file;
using test::operator+;

class Mnist : public testing::Test {
 protected:
  fs::path write(const std::string& name, const Bytes& bytes) { return write_file(dir_.path() / name, bytes); }
  const fs::path& path() const { return dir_.path(); }

 private:
  TemporaryDir dir_;
};

constexpr const char* kTrainImages = "train-images-idx3-ubyte";
constexpr const char* kTrainLabels = "train-labels-idx1-ubyte";

TEST_F(Mnist, ReadsOneFolder) {
  write(kTrainImages, idx_images(3));
  write(kTrainLabels, idx_labels({9, 0, 4}));
  const MnistData data = load_mnist(path(), Split::kTrain);
  EXPECT_EQ(data.count, 3);
  EXPECT_EQ(data.labels, (Bytes{9, 0, 4}));
  EXPECT_EQ(data.image(2).size(), 784U);
  EXPECT_EQ(data.image(2)[5], static_cast<std::uint8_t>((2 * 784 + 5) * 7));
  EXPECT_TRUE(has_mnist(path(), Split::kTrain));
  EXPECT_FALSE(has_mnist(path(), Split::kTest));
}

TEST_F(Mnist, ReadsEveryPlaceAndName) {
  const std::array<std::pair<const char*, Split>, 7> stems{{{"t10k", Split::kTest},
                                                            {"test", Split::kTest},
                                                            {"test/t10k", Split::kTest},
                                                            {"test/test", Split::kTest},
                                                            {"train/train", Split::kTrain},
                                                            {"MNIST/raw/t10k", Split::kTest},
                                                            {"raw/train", Split::kTrain}}};
  std::uint32_t n = 1;
  for (const auto& [stem, split] : stems) {
    for (const bool packed : {false, true}) {
      for (const char dot : {'-', '.'}) {
        SCOPED_TRACE(stem);
        const TemporaryDir dir;
        const std::string ending = packed ? "-ubyte.gz" : "-ubyte";
        const Bytes images = idx_images(n);
        const Bytes labels = idx_labels(Bytes(n, 7));
        write_file(dir.path() / (stem + std::string("-images") + dot + "idx3" + ending),
                   packed ? gzip(images) : images);
        write_file(dir.path() / (stem + std::string("-labels") + dot + "idx1" + ending),
                   packed ? gzip(labels) : labels);
        EXPECT_EQ(load_mnist(dir.path(), split).count, n);
        ++n;
      }
    }
  }
}

TEST_F(Mnist, PrefersPlainFiles) {
  write(kTrainImages, idx_images(1));
  write("train-images-idx3-ubyte.gz", gzip(idx_images(2)));
  write("train-labels-idx1-ubyte.gz", gzip(idx_labels({3})));
  EXPECT_EQ(load_mnist(path(), Split::kTrain).count, 1);
}

TEST_F(Mnist, SaysWhatIsMissing) {
  expect_error<IoError>([&] { load_mnist(path() / "nowhere", Split::kTrain); }, {"nowhere", "no such folder"});
  const fs::path file = write("a-file", {1});
  expect_error<IoError>([&] { load_mnist(file, Split::kTrain); }, {"a-file", "not a folder"});
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); },
                        {"train-images-idx3-ubyte", ".gz", path().string(), "train/", "found neither"});
  expect_error<IoError>([&] { load_mnist(path(), Split::kTest); }, {"t10k-images-idx3-ubyte", "test/"});
  write(kTrainImages, idx_images(1));
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); }, {"train-labels-idx1-ubyte", "found neither"});
  // A link to nowhere is there, but can't be opened: it is named instead of the file being called missing.
  fs::create_symlink("no-target", path() / kTrainLabels);
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); }, {"cannot open", kTrainLabels});
}

TEST_F(Mnist, RefusesLabelsWhereImagesAreExpected) {
  write(kTrainImages, idx_labels({1, 2, 3}));
  write(kTrainLabels, idx_labels({1, 2, 3}));
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); },
                        {kTrainImages, "expected images (magic number 0x00000803)", "got 0x00000801 (labels)"});
}

TEST_F(Mnist, RefusesImagesWhereLabelsAreExpected) {
  write(kTrainImages, idx_images(2));
  write(kTrainLabels, idx_images(2));
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); },
                        {kTrainLabels, "expected labels (magic number 0x00000801)", "got 0x00000803 (images)"});
}

TEST_F(Mnist, RefusesOtherElementTypes) {
  write(kTrainImages, idx_header(0x0D, {1, 28, 28}) + Bytes(4 * 784));
  write(kTrainLabels, idx_labels({1}));
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); },
                        {kTrainImages, "got 0x00000d03 with the shape [1, 28, 28]"});
}

TEST_F(Mnist, RefusesUnlikeCounts) {
  write(kTrainImages, idx_images(3));
  write(kTrainLabels, idx_labels({1, 2}));
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); },
                        {"2 labels in", kTrainLabels, "3 images in", kTrainImages});
}

TEST_F(Mnist, RefusesLabelsOutOfRange) {
  write(kTrainImages, idx_images(3));
  write(kTrainLabels, idx_labels({1, 9, 10}));
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); },
                        {kTrainLabels, "labels from 0 to 9", "got 10 at position 2"});
  EXPECT_EQ(load_mnist(path(), Split::kTrain, {.classes = 11}).labels[2], 10);
}

TEST_F(Mnist, RefusesOtherSizes) {
  write(kTrainImages, idx_images(1, 32, 30));
  write(kTrainLabels, idx_labels({1}));
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); }, {kTrainImages, "28x28", "got 32x30"});
  const MnistData data = load_mnist(path(), Split::kTrain, {.rows = 0, .columns = 0});
  EXPECT_EQ(data.rows, 32);
  EXPECT_EQ(data.columns, 30);
}

TEST_F(Mnist, RefusesNoImages) {
  write(kTrainImages, idx_images(0));
  write(kTrainLabels, idx_labels({}));
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); },
                        {kTrainImages, "at least one image", "[0, 28, 28]"});
}

TEST_F(Mnist, NamesTheFileThatIsCutShort) {
  Bytes images = idx_images(100);
  images.resize(images.size() / 2);
  write(kTrainImages, images);
  write(kTrainLabels, idx_labels(Bytes(100, 1)));
  expect_error<IoError>([&] { load_mnist(path(), Split::kTrain); }, {kTrainImages, "[100, 28, 28]", "cut short"});
}

double mean_pixel(const MnistData& data) {
  const double sum = std::accumulate(data.images.begin(), data.images.end(), std::uint64_t{0});
  return sum / static_cast<double>(data.images.size()) / 255;
}

std::array<int, 10> label_counts(const MnistData& data) {
  std::array<int, 10> counts{};
  for (const std::uint8_t label : data.labels) ++counts[label];
  return counts;
}

// The counts and means are the published ones of the data set.
TEST(MnistFiles, AreReadRight) {
  const auto dir = test::data_dir();
  if (!dir) GTEST_SKIP() << "no data folder: set HALFSTEP_DATA";
  const MnistData train = load_mnist(*dir / "mnist", Split::kTrain);
  EXPECT_EQ(train.count, 60000);
  EXPECT_EQ(label_counts(train), (std::array{5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949}));
  EXPECT_NEAR(mean_pixel(train), 0.1307, 5e-5);
  const MnistData held_out = load_mnist(*dir / "mnist", Split::kTest);
  EXPECT_EQ(held_out.count, 10000);
  EXPECT_EQ(label_counts(held_out), (std::array{980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009}));
  EXPECT_NEAR(mean_pixel(held_out), 0.1325, 5e-5);
}

TEST(MnistFiles, FashionIsReadRight) {
  const auto dir = test::data_dir();
  if (!dir) GTEST_SKIP() << "no data folder: set HALFSTEP_DATA";
  const MnistData held_out = load_mnist(*dir / "fashion-mnist", Split::kTest);
  EXPECT_EQ(held_out.count, 10000);
  for (const int n : label_counts(held_out)) EXPECT_EQ(n, 1000);
  EXPECT_NEAR(mean_pixel(held_out), 0.2868, 5e-5);
}

}  // namespace
}  // namespace halfstep::data
