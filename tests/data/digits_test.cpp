// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/digits.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>

#include "halfstep/core/error.h"
#include "halfstep/runtime/parallel.h"
#include "tests/data/idx_files.h"
#include "tests/support/threads.h"

namespace halfstep::data {
namespace {

using Pixels = std::array<std::uint8_t, kDigitPixels>;

TEST(Digits, HaveTheSizesOfMnist) {
  const MnistData data = make_digits(Split::kTest);
  EXPECT_EQ(data.count, 10000);
  EXPECT_EQ(data.rows, 28);
  EXPECT_EQ(data.columns, 28);
  EXPECT_EQ(data.images.size(), 10000U * 784U);
  EXPECT_EQ(data.labels.size(), 10000U);
}

TEST(Digits, DependOnSeedPartAndIndexOnly) {
  const MnistData data = make_digits(Split::kTrain, {.seed = 7, .count = 300});
  {
    const test::ThreadsGuard one(1);
    const MnistData again = make_digits(Split::kTrain, {.seed = 7, .count = 100});
    EXPECT_TRUE(std::equal(again.images.begin(), again.images.end(), data.images.begin()));
    EXPECT_TRUE(std::equal(again.labels.begin(), again.labels.end(), data.labels.begin()));
  }
  {
    const test::ThreadsGuard three(3);
    EXPECT_EQ(make_digits(Split::kTrain, {.seed = 7, .count = 300}).images, data.images);
  }
  for (const std::int64_t i : {0, 17, 299}) {
    Pixels pixels;
    EXPECT_EQ(draw_digit(7, Split::kTrain, i, pixels), data.labels[static_cast<std::size_t>(i)]);
    EXPECT_TRUE(std::equal(pixels.begin(), pixels.end(), data.image(i).begin())) << i;
  }
}

TEST(Digits, DifferBySeedAndPart) {
  const MnistData a = make_digits(Split::kTrain, {.seed = 1, .count = 50});
  EXPECT_NE(make_digits(Split::kTrain, {.seed = 2, .count = 50}).images, a.images);
  EXPECT_NE(make_digits(Split::kTest, {.seed = 1, .count = 50}).images, a.images);
  for (std::int64_t i = 1; i < 50; ++i) EXPECT_FALSE(std::ranges::equal(a.image(i), a.image(0))) << i;
}

// The first pictures of seed 0 as a checksum (FNV-1a, 64 bits): the demo's figures stay the same from machine to
// machine and from version to version. It changes when the way of drawing is changed on purpose.
TEST(Digits, AreTheSameOnEveryMachine) {
  const MnistData data = make_digits(Split::kTrain, {.seed = 0, .count = 1000});
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const auto* bytes : {&data.images, &data.labels}) {
    for (const std::uint8_t byte : *bytes) hash = (hash ^ byte) * 0x100000001B3;
  }
  EXPECT_EQ(hash, 0x755988912A9A08EBULL) << std::hex << hash;
}

TEST(Digits, LabelsAreUniform) {
  const MnistData data = make_digits(Split::kTest);
  std::array<int, 10> counts{};
  for (const std::uint8_t label : data.labels) ++counts.at(label);
  // Binomial with n = 10000, p = 0.1: deviation 30, so five deviations.
  for (const int n : counts) EXPECT_NEAR(n, 1000, 150);
}

TEST(Digits, LookLikeInkOnPaper) {
  const MnistData data = make_digits(Split::kTest, {.count = 2000});
  double sum = 0;
  for (std::int64_t i = 0; i < data.count; ++i) {
    const auto image = data.image(i);
    const int ink = static_cast<int>(std::ranges::count_if(image, [](std::uint8_t p) { return p > 100; }));
    EXPECT_GE(ink, 15) << i;   // a thin one has some 16 rows
    EXPECT_LE(ink, 350) << i;  // far from a blot
    EXPECT_GE(*std::ranges::max_element(image), 150) << i;
    // The digit stays inside: the outermost pixels may hold specks, but no stroke.
    int border = 0;
    for (int k = 0; k < 28; ++k) {
      border += (image[k] > 100) + (image[27 * 28 + k] > 100) + (image[28 * k] > 100) + (image[28 * k + 27] > 100);
    }
    EXPECT_LE(border, 3) << i;
    sum += std::accumulate(image.begin(), image.end(), 0.0);
  }
  // MNIST's mean is 0.13; a network's settings should carry over.
  EXPECT_NEAR(sum / static_cast<double>(data.images.size()) / 255, 0.13, 0.02);
}

// Nearest class mean: right far more often than by chance, wrong often enough that there is something to learn.
TEST(Digits, CanBeToldApart) {
  const MnistData train = make_digits(Split::kTrain, {.count = 5000});
  const MnistData held_out = make_digits(Split::kTest, {.count = 1000});
  std::vector<std::array<double, kDigitPixels>> means(10);
  std::array<int, 10> counts{};
  for (std::int64_t i = 0; i < train.count; ++i) {
    const auto label = train.labels[static_cast<std::size_t>(i)];
    ++counts[label];
    for (std::size_t p = 0; p < kDigitPixels; ++p) means[label][p] += train.image(i)[p];
  }
  for (std::size_t c = 0; c < 10; ++c) {
    for (double& value : means[c]) value /= counts[c];
  }
  int right = 0;
  for (std::int64_t i = 0; i < held_out.count; ++i) {
    std::size_t best = 0;
    double best_distance = 1e300;
    for (std::size_t c = 0; c < 10; ++c) {
      double distance = 0;
      for (std::size_t p = 0; p < kDigitPixels; ++p) {
        const double d = held_out.image(i)[p] - means[c][p];
        distance += d * d;
      }
      if (distance < best_distance) {
        best_distance = distance;
        best = c;
      }
    }
    right += best == held_out.labels[static_cast<std::size_t>(i)];
  }
  EXPECT_GT(right, 600);
  EXPECT_LT(right, 930);
}

TEST(Digits, RefuseANegativeCount) {
  test::expect_error<Error>([] { make_digits(Split::kTrain, {.count = -1}); }, {"make_digits", "got -1"});
}

}  // namespace
}  // namespace halfstep::data
