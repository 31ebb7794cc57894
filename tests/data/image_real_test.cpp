// SPDX-License-Identifier: Apache-2.0
// Real pictures, where the checkout has them.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "halfstep/data/image_archive.h"
#include "halfstep/data/image_dataset.h"
#include "halfstep/data/image_folder.h"
#include "halfstep/data/loader.h"
#include "tests/data/image_goldens.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;

class RealImages : public testing::Test {
 protected:
  /// The folder of a set; skips the test when it isn't there.
  void open(const std::string& name) {
    const auto root = test::data_dir();
    if (!root || !fs::exists(*root / "images" / name)) GTEST_SKIP() << "no real data: images/" << name;
    folder = *root / "images" / name;
  }
  fs::path folder;
};

TEST_F(RealImages, ImageNetFilesDecodeAndTenAreGrey) {
  open("imagenet-sample");
  if (IsSkipped()) return;
  int pictures = 0, grey = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".JPEG") continue;
    std::vector<std::uint8_t> bytes;
    read_file(entry.path(), 1 << 26, bytes);
    ImageDecoder decoder(bytes, entry.path().string());
    const ImageInfo info = decoder.info();
    grey += info.channels == 1 ? 1 : 0;
    ++pictures;
    if (pictures % 5 != 0) continue;
    // A part from the middle, also shrunk, against the whole.
    Image whole, part;
    decoder.decode(whole);
    const PixelRegion region{info.width / 3, info.height / 4, info.width / 2, info.height / 3};
    const ImagePatch patch = decoder.decode(region, 1, part);
    for (std::int64_t y = 0; y < region.height; ++y) {
      ASSERT_TRUE(std::equal(whole.row(region.top + y) + 3 * region.left,
                             whole.row(region.top + y) + 3 * (region.left + region.width),
                             part.row(region.top + y - patch.top) + 3 * (region.left - patch.left)))
          << entry.path();
    }
    if (info.channels == 1) {
      for (std::size_t i = 0; i < whole.pixels.size(); i += 3) ASSERT_EQ(whole.pixels[i], whole.pixels[i + 2]);
    }
  }
  EXPECT_EQ(pictures, 100);
  EXPECT_EQ(grey, 10);
}

TEST_F(RealImages, FlowersAreFiveClasses) {
  open("flowers5");
  if (IsSkipped()) return;
  const auto train = open_images(folder, Split::kTrain), val = open_images(folder, Split::kTest);
  const std::vector<std::string> classes{"daisy", "dandelion", "roses", "sunflowers", "tulips"};
  EXPECT_EQ(train->classes(), classes);
  EXPECT_EQ(val->classes(), classes);
  EXPECT_EQ(train->size(), 600);
  EXPECT_EQ(val->size(), 150);
  EXPECT_EQ(train->label(0), 0);
  EXPECT_EQ(train->label(599), 4);
  const ImageDataset dataset{val, EvalTransform{}};
  DataLoader loader{dataset, {.batch_size = 50, .workers = 2}};
  double sum = 0, squares = 0;
  std::int64_t count = 0;
  for (const auto& [images, labels] : loader) {
    EXPECT_EQ(images.sizes(), (Shape{50, 3, 224, 224}));
    const float* values = images.data<float>();
    for (std::int64_t i = 0; i < images.numel(); ++i) {
      sum += static_cast<double>(values[i]);
      squares += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    }
    count += images.numel();
  }
  EXPECT_TRUE(dataset.bad_images().empty());
  // Photographs have about the mean and the deviation that the normalisation takes out.
  EXPECT_NEAR(sum / static_cast<double>(count), 0, 0.5);
  EXPECT_NEAR(squares / static_cast<double>(count), 1.3, 0.5);
}

TEST_F(RealImages, CifarIsReadFromItsArchive) {
  open("cifar10-jpeg");
  if (IsSkipped()) return;
  const auto test = open_images(folder, Split::kTest);
  EXPECT_EQ(test->size(), 8000);
  EXPECT_EQ(test->classes(), (std::vector<std::string>{"airplane", "automobile", "bird", "cat", "deer", "dog", "frog",
                                                       "horse", "ship", "truck"}));
  std::array<int, 10> counts{};
  for (std::int64_t i = 0; i < test->size(); ++i) ++counts[static_cast<std::size_t>(test->label(i))];
  for (const int n : counts) EXPECT_EQ(n, 800);
  const ImageDataset dataset{test, cifar_train_transform()};
  DataLoader loader{dataset, {.batch_size = 500, .shuffle = true, .workers = 2}};
  std::int64_t seen = 0;
  for (const auto& [images, labels] : loader) seen += images.size(0);
  EXPECT_EQ(seen, 8000);
  EXPECT_TRUE(dataset.bad_images().empty());
}

}  // namespace
}  // namespace halfstep::data
