// SPDX-License-Identifier: Apache-2.0
// Verdicts of a classifier against tables worked out by hand.
#include "halfstep/train/verdicts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "halfstep/data/dataset.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/classification.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

using training::Verdicts;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// One-hot scores of what is said of samples with these labels.
Verdicts of(const std::vector<std::int64_t>& labels, const std::vector<std::int64_t>& said, std::int64_t classes) {
  std::vector<double> scores(labels.size() * static_cast<std::size_t>(classes), 0);
  for (std::size_t i = 0; i < said.size(); ++i)
    scores[i * static_cast<std::size_t>(classes) + static_cast<std::size_t>(said[i])] = 5;
  const auto n = static_cast<std::int64_t>(labels.size());
  Verdicts v;
  v.add(tensor(scores, {n, classes}), tensor(labels, {n}));
  return v;
}

TEST(VerdictTables, AreThoseWorkedOutByHand) {
  const Verdicts v = of({0, 0, 1, 1, 2, 2}, {0, 1, 1, 1, 2, 0}, 3);
  EXPECT_EQ(confusion_counts(v), (std::vector<std::int64_t>{1, 1, 0, 0, 2, 0, 1, 0, 1}));
  EXPECT_EQ(v.right(), 4);
  const auto rows = class_rows(v, {"cat", "", "a,\"b\""});
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].name, "cat");
  EXPECT_EQ(rows[1].name, "1");
  const double precision[] = {1.0 / 2, 2.0 / 3, 1}, recall[] = {1.0 / 2, 1, 1.0 / 2},
               f1[] = {1.0 / 2, 4.0 / 5, 2.0 / 3};
  for (std::size_t c = 0; c < 3; ++c) {
    EXPECT_DOUBLE_EQ(rows[c].precision, precision[c]);
    EXPECT_DOUBLE_EQ(rows[c].recall, recall[c]);
    EXPECT_DOUBLE_EQ(rows[c].f1, f1[c]);
    EXPECT_EQ(rows[c].count, 2);
  }
  EXPECT_EQ(class_rows_csv(rows),
            "class,precision,recall,f1,count\n"
            "cat,0.5,0.5,0.5,2\n"
            "1,0.6666666666666666,1,0.8,2\n"
            "\"a,\"\"b\"\"\",1,0.5,0.6666666666666666,2\n");
}

TEST(VerdictTables, ClassesWithoutSamplesOrVerdictsAreZero) {
  const auto rows = class_rows(of({0, 0}, {0, 1}, 3));
  EXPECT_EQ(rows[1].precision, 0);
  EXPECT_EQ(rows[1].recall, 0);
  EXPECT_EQ(rows[2].f1, 0);
  EXPECT_EQ(rows[2].count, 0);
}

TEST(VerdictTables, TiesNanLabelsThatAreNoneAndSoftTargets) {
  Verdicts v;
  v.add(tensor({1.0, 1.0, kNan, 2.0, kNan, kNan, 0.0, std::log(3.0)}, {4, 2}), tensor({1, 1, 0, 9}, {4}));
  // Of equal scores the first; a NaN never; only NaN: nothing; 9 is no class.
  EXPECT_EQ(v.said, (std::vector<std::int32_t>{0, 1, -1, 1}));
  EXPECT_EQ(v.label, (std::vector<std::int32_t>{1, 1, 0, -1}));
  EXPECT_FLOAT_EQ(v.share[0], 0.5F);
  EXPECT_FLOAT_EQ(v.share[1], 1);
  EXPECT_EQ(v.share[2], 0);
  EXPECT_FLOAT_EQ(v.share[3], 0.75F);  // 3 / (1 + 3)
  EXPECT_EQ(confusion_counts(v), (std::vector<std::int64_t>{0, 0, 1, 1}));
  EXPECT_EQ(v.right(), 1);
  // The same hits as the task counts.
  const auto hits = training::count_top_hits(tensor({1.0, 1.0, kNan, 2.0, kNan, kNan, 0.0, std::log(3.0)}, {4, 2}),
                                             tensor({1, 1, 0, 9}, {4}));
  EXPECT_EQ(hits.top1.item<double>(), 1);
  Verdicts soft;
  soft.add(tensor({0.0, 9.0}, {1, 2}), tensor({0.9, 0.1}, {1, 2}));
  EXPECT_EQ(soft.label[0], 0);
  EXPECT_THROW(soft.add(tensor({0.0, 9.0, 1.0}, {1, 3}), tensor({0}, {1})), ShapeError);
}

TEST(VerdictFigures, NamesOfAnyBytesAndManyClasses) {
  const std::string svg = training::draw_confusion(of({0, 1, 2}, {0, 1, 1}, 3), {"<a&b>", "\x01\xff", "c"}, "t<").svg();
  EXPECT_NE(svg.find(">&lt;a&amp;b&gt;</text>"), std::string::npos);
  EXPECT_NE(svg.find(">\\x01\\xff</text>"), std::string::npos);
  EXPECT_NE(svg.find("2 of 3 right (66.67%)"), std::string::npos);
  EXPECT_NE(svg.find("c taken for \\x01\\xff"), std::string::npos);
  const std::string many = training::draw_confusion(of({0, 999}, {0, 3}, 1000), {}, "many").svg();
  EXPECT_NE(many.find("a cell is 10 x 10 classes"), std::string::npos);
  EXPECT_LT(many.size(), 20000u);
  EXPECT_FALSE(training::draw_confusion({}, {}, "none").svg().empty());
  EXPECT_NE(test::error_of<Error>([] {
              training::draw_confusion(of({0}, {0}, 2001), {}, "t");
            }).find("at most 2000 classes, got 2001"),
            std::string::npos);
}

// Of a classifier of more classes the run's other files are written.
TEST(VerdictFigures, ARunOfTooManyClassesHasNoMatrix) {
  struct Wide : nn::Module<Wide> {
    Tensor forward(const Tensor& x) const { return x; }
  };
  const Wide net;
  training::ClassificationTask task({.module = &net, .forward = [&](const Tensor& x) { return net(x); }});
  const test::TemporaryDir dir;
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
  task.evaluate({zeros({2, 2001}), tensor({0, 2000}, {2}, {.dtype = i64})});
  task.write_results({.folder = dir.path(), .title = "t"});
  set_log_sink({});
  ASSERT_EQ(said.size(), 1u);
  EXPECT_NE(said[0].find("confusion.svg: not written"), std::string::npos) << said[0];
  EXPECT_TRUE(std::filesystem::exists(dir.path() / "classes.csv"));
  EXPECT_FALSE(std::filesystem::exists(dir.path() / "confusion.svg"));
}

TEST(VerdictFigures, NoMistakesIsSaidOnlyWhereAllIsRight) {
  const auto says = [](const Verdicts& v, const char* text) {
    return training::draw_confusion(v, {}, "t").svg().find(std::string(">") + text + "</text>") != std::string::npos;
  };
  EXPECT_TRUE(says(of({0, 1}, {0, 1}, 2), "No mistakes"));
  EXPECT_TRUE(says(of({0, 1}, {1, 1}, 2), "Most frequent mistakes"));
  Verdicts nothing;
  nothing.add(tensor({kNan, kNan, kNan, kNan}, {2, 2}), tensor({0, 1}, {2}));
  EXPECT_EQ(nothing.right(), 0);
  EXPECT_FALSE(says(nothing, "No mistakes"));
  Verdicts unlabelled;
  unlabelled.add(tensor({1.0, 0.0}, {1, 2}), tensor({9}, {1}));
  EXPECT_FALSE(says(unlabelled, "No mistakes"));
}

TEST(VerdictFigures, PicturesAreThoseOfTheData) {
  data::MnistData pictures{.count = 1};
  pictures.labels = {3};
  for (int i = 0; i < 784; ++i) pictures.images.push_back(static_cast<std::uint8_t>(i % 256));
  const data::MnistDataset samples(pictures, {.flatten = true, .mean = 0.1307, .std = 0.3081});
  const training::PictureForm form{
      .channels = 1, .height = 28, .width = 28, .normalization = {.mean = {0.1307F}, .std = {0.3081F}}};
  const data::Batch batch = samples.batch({.indices = std::vector<std::int64_t>{0}});
  const io::Bitmap bitmap = training::bitmap_of(batch.input, 0, form);
  ASSERT_EQ(bitmap.pixels.size(), 784u * 3);
  for (std::size_t i = 0; i < 784; ++i) EXPECT_EQ(bitmap.pixels[3 * i + 1], i % 256) << i;
  EXPECT_THROW(training::bitmap_of(batch.input, 0, {}), ShapeError);
  EXPECT_THROW(training::bitmap_of(batch.input, 1, form), ShapeError);
  // Colour, in any layout: red is the first channel.
  Tensor image = zeros({1, 3, 2, 2});
  image[0][0].fill_(1);
  EXPECT_EQ(training::bitmap_of(to_channels_last(image), 0, {}).pixels[0], 255);
  EXPECT_EQ(training::bitmap_of(image, 0, {}).pixels[1], 0);
  const Verdicts v = of({3}, {4}, 10);
  const io::Drawing drawing = draw_predictions(v, {}, samples, form, "digits");
  const std::string svg = drawing.svg();
  EXPECT_NE(svg.find(">is 3</text>"), std::string::npos);
  EXPECT_NE(svg.find(">All mistakes, those that it was surest of first</text>"), std::string::npos);
  EXPECT_FALSE(training::draw_predictions({}, {}, samples, form, "none").png().empty());
}

}  // namespace
}  // namespace halfstep
